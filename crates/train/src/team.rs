//! [`run`]: all workers of a job as threads of this process, with a real or a simulated fabric
//! between them.
//!
//! The rule it keeps: the threads share nothing but the job and the fabric, so that what they find
//! is what processes would find.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use farpage::Runtime;
use farpage_fabric::{Endpoint, Link, SessionOptions};

use crate::{
    aggregator::{AggregateError, Aggregator, Layout, Through},
    checkpoint::Course,
    exchange::LeaveError,
    job::{Job, Outcome, WorkError},
    plan::Mode,
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
    Work(#[from] WorkError),
    /// All is done, and one of the workers does not end.
    #[error(transparent)]
    Leave(#[from] LeaveError),
    /// The aggregators, or workers on their way to them, failed.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// Aggregators take the mean of all workers.
    #[error("mode {0} does not go through aggregators: bsp does")]
    Mode(Mode),
    /// None is no parameter server.
    #[error("0 aggregators: one at least")]
    NoAggregators,
    /// The system gave no place for sockets.
    #[error("cannot make a folder for the workers' sockets: {0}")]
    Folder(std::io::Error),
    /// A worker's thread panicked; its message is on standard error.
    #[error("worker {0} panicked")]
    Panicked(usize),
    /// An aggregator's thread panicked; its message is on standard error.
    #[error("aggregator {0} panicked")]
    AggregatorPanicked(usize),
}

/// A peer that is silent for this long has gone.
const LEASE: Duration = Duration::from_secs(10);

impl Network {
    /// Where the worker of this rank, or the aggregator of this number, serves.
    fn endpoint(&self, job: &Job, folder: &Path, number: usize) -> Endpoint {
        match self.between {
            Between::Sim => Endpoint::Sim(job.seed.wrapping_add(number as u64)),
            Between::Shm => Endpoint::Shm(folder.join(format!("socket-{number}"))),
            Between::Tcp => Endpoint::Tcp {
                host: "127.0.0.1".to_owned(),
                port: 0,
            },
        }
    }

    /// How the worker of this rank reaches others.
    fn options(&self, rank: usize, key: &Path) -> SessionOptions {
        SessionOptions {
            client: format!("worker {rank}"),
            key_file: Some(key.to_owned()),
            deadline: self.deadline,
            link: self.link.map(|(gbps, us)| Arc::new(Link::new(gbps, us))),
            ..SessionOptions::default()
        }
    }
}

/// Runs a job through so many aggregators and returns what became of each worker, by rank.
///
/// # Errors
/// [`TeamError`]; of several workers that failed, that of the lowest rank.
pub fn run_through(
    job: &Job,
    network: &Network,
    aggregators: usize,
) -> Result<Vec<Outcome>, TeamError> {
    run_through_in(job, network, aggregators, None)
}

/// As [`run_through`]; the aggregators keep parameters and the optimizer's state in the memory of a
/// runtime, if there is one.
///
/// # Errors
/// As [`run_through`]. Memory that an aggregator cannot get at comes before what workers met then.
pub fn run_through_in(
    job: &Job,
    network: &Network,
    aggregators: usize,
    state: Option<&Runtime>,
) -> Result<Vec<Outcome>, TeamError> {
    if job.plan.mode() != Mode::Bsp {
        return Err(TeamError::Mode(job.plan.mode()));
    }
    if aggregators == 0 {
        return Err(TeamError::NoAggregators);
    }
    let folder = tempfile::tempdir().map_err(TeamError::Folder)?;
    let initial = job.model.initial(job.seed);
    let layout = Layout {
        aggregators,
        workers: job.plan.workers(),
        parameters: initial.len(),
        statistics: job.model.statistics(),
    };
    let opened = (0..aggregators).map(|number| {
        let endpoint = network.endpoint(job, folder.path(), number);
        let opened = Aggregator::open(layout, number, &endpoint, LEASE)?;
        Ok(match state {
            Some(runtime) => opened.keep_in(runtime),
            None => opened,
        })
    });
    let opened = opened.collect::<Result<Vec<_>, AggregateError>>()?;
    let addresses: Vec<Address> = opened.iter().map(Aggregator::address).collect();
    let key: PathBuf = folder.path().join("key");
    thread::scope(|scope| {
        let (initial, addresses) = (&initial, &addresses);
        let serve = |aggregator: Aggregator| {
            let served = move || aggregator.serve(initial, job.rule, job.steps, network.deadline);
            scope.spawn(served)
        };
        let serving: Vec<_> = opened.into_iter().map(serve).collect();
        let work = |rank| {
            let options = network.options(rank, &key);
            scope.spawn(move || -> Result<Outcome, TeamError> {
                let deadline = network.deadline;
                let mut through = Through::join(layout, rank, addresses, &options, deadline)?;
                Ok(job.work_through(rank, &mut through)?)
            })
        };
        let working: Vec<_> = (0..layout.workers).map(work).collect();
        // All of them have ended before any result is looked at.
        let worked = working.into_iter().enumerate().map(|(rank, thread)| {
            let ended = thread.join();
            ended.unwrap_or(Err(TeamError::Panicked(rank)))
        });
        let worked: Vec<_> = worked.collect();
        let served = serving.into_iter().enumerate().map(|(number, thread)| {
            let ended = thread.join();
            ended.map_err(|_| TeamError::AggregatorPanicked(number))
        });
        let mut served: Vec<_> = served.collect();
        let is_cause =
            |ended: &Result<_, _>| matches!(ended, Ok(Err(AggregateError::State { .. })));
        if let Some(cause) = served.iter().position(is_cause) {
            served.swap_remove(cause)??;
        }
        let outcomes = worked.into_iter().collect::<Result<Vec<_>, _>>()?;
        for ended in served {
            ended??;
        }
        Ok(outcomes)
    })
}

/// Runs a job and returns what became of each worker, by rank.
///
/// # Errors
/// [`TeamError`]; of several workers that failed, that of the lowest rank.
pub fn run(job: &Job, network: &Network) -> Result<Vec<Outcome>, TeamError> {
    let courses = (0..job.plan.workers()).map(|_| Course::default());
    run_on(job, network, courses.collect())
}

/// Runs a job of which each worker has a course, by rank.
///
/// # Errors
/// As [`run`]. A checkpoint that could not be kept comes before what the other workers met then.
///
/// # Panics
/// If there are not as many courses as workers.
pub fn run_on(
    job: &Job,
    network: &Network,
    courses: Vec<Course<'_>>,
) -> Result<Vec<Outcome>, TeamError> {
    let folder = tempfile::tempdir().map_err(TeamError::Folder)?;
    let workers = job.plan.workers();
    assert_eq!(courses.len(), workers, "a course for each worker");
    let stations = (0..workers).map(|rank| {
        let endpoint = network.endpoint(job, folder.path(), rank);
        Station::open(job.plan, rank, &endpoint, LEASE)
    });
    let stations = stations.collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<Address> = stations.iter().map(Station::address).collect();
    // The team's own, so that nothing is left in the user's home.
    let key: PathBuf = folder.path().join("key");
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((rank, station), course) in stations.into_iter().enumerate().zip(courses) {
            let options = network.options(rank, &key);
            let addresses = &addresses;
            threads.push(scope.spawn(move || -> Result<Outcome, TeamError> {
                let mut member = station.join(addresses, &options, network.deadline)?;
                let outcome = job.work(rank, &mut member.exchange, course)?;
                member.leave()?;
                Ok(outcome)
            }));
        }
        let ended = threads
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| thread.join().unwrap_or(Err(TeamError::Panicked(rank))));
        // All of them have ended before any result is looked at.
        let mut ended: Vec<_> = ended.collect();
        let is_cause =
            |ended: &Result<_, _>| matches!(ended, Err(TeamError::Work(WorkError::Keep { .. })));
        if let Some(cause) = ended.iter().position(is_cause) {
            return ended.swap_remove(cause).map(|outcome| vec![outcome]);
        }
        ended.into_iter().collect()
    })
}
