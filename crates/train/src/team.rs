//! [`run`]: all workers of a job as threads of this process, with a real or a simulated fabric
//! between them.
//!
//! The rule it keeps: the threads share nothing but the job and the fabric, so that what they find
//! is what processes would find.

use std::{path::PathBuf, sync::Arc, thread, time::Duration};

use farpage_fabric::{Endpoint, Link, SessionOptions};

use crate::{
    exchange::ExchangeError,
    job::{Job, Outcome},
    station::{Address, JoinError, Station},
};

/// What lies between the workers of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// A simulation, with delays and reordering of its own.
    Sim,
    /// Shared memory.
    Shm,
    /// TCP over the loopback interface.
    Tcp,
}

/// How a team's fabric behaves.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// What lies between the workers.
    pub between: Between,
    /// Each worker's link to the others: gigabits per second and microseconds.
    pub link: Option<(f64, f64)>,
    /// The longest that a worker waits for another.
    pub deadline: Duration,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TeamError {
    /// The workers did not come together.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// They did, and came apart.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The system gave no place for sockets.
    #[error("cannot make a folder for the workers' sockets: {0}")]
    Folder(std::io::Error),
    /// A worker's thread panicked; its message is on standard error.
    #[error("worker {0} panicked")]
    Panicked(usize),
}

/// A peer that is silent for this long has gone.
const LEASE: Duration = Duration::from_secs(10);

/// Runs a job and returns what became of each worker, by rank.
///
/// # Errors
/// [`TeamError`]; of several workers that failed, that of the lowest rank.
pub fn run(job: &Job, network: &Network) -> Result<Vec<Outcome>, TeamError> {
    let folder = tempfile::tempdir().map_err(TeamError::Folder)?;
    let workers = job.plan.workers();
    let stations = (0..workers).map(|rank| {
        let endpoint = match network.between {
            Between::Sim => Endpoint::Sim(job.seed.wrapping_add(rank as u64)),
            Between::Shm => Endpoint::Shm(folder.path().join(format!("worker-{rank}"))),
            Between::Tcp => Endpoint::Tcp {
                host: "127.0.0.1".to_owned(),
                port: 0,
            },
        };
        Station::open(job.plan, rank, &endpoint, LEASE)
    });
    let stations = stations.collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<Address> = stations.iter().map(Station::address).collect();
    // The team's own, so that nothing is left in the user's home.
    let key: PathBuf = folder.path().join("key");
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, station) in stations.into_iter().enumerate() {
            let options = SessionOptions {
                client: format!("worker {rank}"),
                key_file: Some(key.clone()),
                deadline: network.deadline,
                link: network.link.map(|(gbps, us)| Arc::new(Link::new(gbps, us))),
                ..SessionOptions::default()
            };
            let addresses = &addresses;
            threads.push(scope.spawn(move || -> Result<Outcome, TeamError> {
                let mut member = station.join(addresses, &options, network.deadline)?;
                let outcome = job.work(rank, &mut member.exchange)?;
                member.leave();
                Ok(outcome)
            }));
        }
        let ended = threads
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| thread.join().unwrap_or(Err(TeamError::Panicked(rank))));
        // All of them have ended before any result is looked at.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}
