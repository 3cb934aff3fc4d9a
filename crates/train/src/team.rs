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
    aggregator::{AggregateError, Aggregator, AggregatorCourse, Layout, Through},
    checkpoint::Course,
    exchange::LeaveError,
    job::Job,
    meeting::WorkError,
    station::{Address, JoinError, Station},
    work::Outcome,
};

farpage_fabric::debug_as_display!(TeamError);

/// Fabric between the workers of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// A simulation, with delays and reordering of its own.
    Sim,
    /// Shared memory.
    Shm,
    /// TCP over the loopback interface.
    Tcp,
}

/// Fabric of a team, with its links and its deadline.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// Fabric between the workers.
    pub between: Between,
    /// Each worker's link to the others: gigabits per second and microseconds.
    pub link: Option<(f64, f64)>,
    /// The longest that a worker waits for another.
    pub deadline: Duration,
}

/// Failure of a run.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TeamError {
    /// The workers did not come together.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The workers came together, and came apart.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// A worker does not end, although all is done.
    #[error(transparent)]
    Leave(#[from] LeaveError),
    /// The aggregators, or workers on their way to them, failed.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
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

/// Time after which a silent peer has gone.
const LEASE: Duration = Duration::from_secs(10);

impl Network {
    /// Returns the endpoint at which worker, or aggregator, `number` serves.
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

    /// Returns the options with which worker `rank` reaches others.
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

/// Beginnings of a team's members, and the checkpoints that they keep.
#[derive(Debug, Default)]
pub struct Courses<'a> {
    /// Courses of the workers, by rank. None: all begin at the beginning and keep nothing.
    pub workers: Vec<Course<'a>>,
    /// Courses of the aggregators, by number. None: as for workers.
    pub aggregators: Vec<AggregatorCourse<'a>>,
    /// Memory of the aggregators' parameters and optimizer's state; `None` is local memory.
    pub state: Option<&'a Runtime>,
}

/// Runs a job, in rings or through aggregators as it says. Returns the outcome of each worker, by
/// rank.
///
/// # Errors
/// [`TeamError`]; of several workers that failed, that of the lowest rank.
pub fn run(job: &Job, network: &Network) -> Result<Vec<Outcome>, TeamError> {
    run_on(job, network, Courses::default())
}

/// Runs a job as [`run`] does, on `courses`.
///
/// # Errors
/// Those of [`run`]. A checkpoint that could not be kept, and memory that an aggregator cannot get
/// at, come before errors of others that follow from it.
///
/// # Panics
/// If there are some courses, and not as many as workers, or as aggregators.
pub fn run_on(
    job: &Job,
    network: &Network,
    courses: Courses<'_>,
) -> Result<Vec<Outcome>, TeamError> {
    let Courses {
        mut workers,
        mut aggregators,
        state,
    } = courses;
    if workers.is_empty() {
        workers.resize_with(job.plan.workers(), Course::default);
    }
    if aggregators.is_empty() {
        aggregators.resize_with(job.aggregators, AggregatorCourse::default);
    }
    assert_eq!(workers.len(), job.plan.workers(), "a course for each");
    assert_eq!(aggregators.len(), job.aggregators, "a course for each");
    let folder = tempfile::tempdir().map_err(TeamError::Folder)?;
    match job.aggregators {
        0 => run_in_rings(job, network, folder.path(), workers),
        _ => run_through(job, network, folder.path(), workers, aggregators, state),
    }
}

fn run_through(
    job: &Job,
    network: &Network,
    folder: &Path,
    workers: Vec<Course<'_>>,
    aggregators: Vec<AggregatorCourse<'_>>,
    state: Option<&Runtime>,
) -> Result<Vec<Outcome>, TeamError> {
    let layout = Layout::of(job)?;
    let opened = (0..job.aggregators).map(|number| {
        let endpoint = network.endpoint(job, folder, number);
        let mut opened = Aggregator::open(layout, number, &endpoint, LEASE)?;
        if let Some(runtime) = state {
            opened = opened.keep_in(runtime);
        }
        Ok(match network.link {
            Some((gbps, _)) => opened.behind_link(gbps),
            None => opened,
        })
    });
    let opened = opened.collect::<Result<Vec<_>, AggregateError>>()?;
    let addresses: Vec<Address> = opened.iter().map(Aggregator::address).collect();
    let key: PathBuf = folder.join("key");
    thread::scope(|scope| {
        let addresses = &addresses;
        let serve = |(aggregator, course): (Aggregator, _)| {
            scope.spawn(move || Ok(aggregator.serve_job(job, course, network.deadline)?))
        };
        let serving: Vec<_> = opened.into_iter().zip(aggregators).map(serve).collect();
        let work = |(rank, course)| {
            let options = network.options(rank, &key);
            scope.spawn(move || -> Result<Outcome, TeamError> {
                let deadline = network.deadline;
                let mut through = Through::join(layout, rank, addresses, &options, deadline)?;
                Ok(job.work_through(rank, &mut through, course)?)
            })
        };
        let working: Vec<_> = workers.into_iter().enumerate().map(work).collect();
        let worked = of_all(working, TeamError::Panicked);
        let served = of_all(serving, TeamError::AggregatorPanicked);
        if is_cause(&served) {
            return served.map(|_| Vec::new());
        }
        let outcomes = worked?;
        served.map(|_| outcomes)
    })
}

fn run_in_rings(
    job: &Job,
    network: &Network,
    folder: &Path,
    courses: Vec<Course<'_>>,
) -> Result<Vec<Outcome>, TeamError> {
    let stations = (0..job.plan.workers()).map(|rank| {
        let endpoint = network.endpoint(job, folder, rank);
        Station::open(job.plan, rank, &endpoint, LEASE)
    });
    let stations = stations.collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<Address> = stations.iter().map(Station::address).collect();
    // The team's own, so that nothing is left in the user's home.
    let key: PathBuf = folder.join("key");
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
        of_all(threads, TeamError::Panicked)
    })
}

/// Waits for all `threads` before any result is looked at. Returns all results, or the error that
/// the others' errors follow from, or the first.
fn of_all<T>(
    threads: Vec<thread::ScopedJoinHandle<'_, Result<T, TeamError>>>,
    panicked: fn(usize) -> TeamError,
) -> Result<Vec<T>, TeamError> {
    let threads = threads.into_iter().enumerate();
    let ended = threads.map(|(at, thread)| thread.join().unwrap_or(Err(panicked(at))));
    let mut ended: Vec<_> = ended.collect();
    if let Some(cause) = ended.iter().position(is_cause) {
        return ended.swap_remove(cause).map(|result| vec![result]);
    }
    ended.into_iter().collect()
}

/// True if a member met the error by itself, and not because of others.
fn is_cause<T>(ended: &Result<T, TeamError>) -> bool {
    matches!(
        ended,
        Err(TeamError::Work(WorkError::Keep { .. })
            | TeamError::Aggregate(
                AggregateError::State { .. }
                    | AggregateError::Keep { .. }
                    | AggregateError::Resume { .. }
            ))
    )
}
