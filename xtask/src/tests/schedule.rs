//! Runs jobs side by side, in a few lanes.
//!
//! The rule it keeps: the output of a job comes as one block when the job has ended, so that
//! programs that run together can be told apart. A job that measures time runs alone.

use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

use anyhow::Result;

use super::tally::Tally;

/// Number of test programs that run at the same time. Most wait for more than half of their time,
/// so that two processors take three.
pub(crate) const LANES: usize = 3;

/// Work of a job, which counts tests into the tally.
pub(crate) type Work<'a> = Box<dyn Fn(&mut Tally) -> Result<()> + Sync + 'a>;

/// A job that runs tests, or is one.
pub(crate) struct Job<'a> {
    pub(crate) label: String,
    pub(crate) place: Place,
    pub(crate) work: Work<'a>,
}

/// Lane of a job.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Place {
    /// One of the [`LANES`], in the order of the list.
    Shared,
    /// A time when no other job runs.
    Alone,
}

/// Runs all jobs, and returns their tests.
///
/// # Errors
/// The first error of a job that could not do its work. A failing test is no error.
pub(crate) fn run(jobs: &[Job]) -> Result<Tally> {
    let of = |place| jobs.iter().filter(move |job| job.place == place);
    let progress = Progress {
        jobs: jobs.len(),
        state: Mutex::default(),
    };
    let shared: Mutex<VecDeque<&Job>> = Mutex::new(of(Place::Shared).collect());
    let next = || {
        shared
            .lock()
            .expect("no panic while it is held")
            .pop_front()
    };
    thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                while let Some(job) = next() {
                    progress.run(job);
                }
            });
        }
    });
    of(Place::Alone).for_each(|job| progress.run(job));
    let ended = progress.state.into_inner().expect("no panic");
    ended.error.map_or(Ok(ended.tally), Err)
}

/// Runs `work` while `loops` threads compute without end, as on a busy machine.
pub(crate) fn beside<T>(loops: usize, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..loops {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = work();
        done.store(true, Relaxed);
        result
    })
}

/// Number of jobs, and the results of jobs that have ended.
struct Progress {
    jobs: usize,
    state: Mutex<Ended>,
}

#[derive(Default)]
struct Ended {
    count: usize,
    tally: Tally,
    error: Option<anyhow::Error>,
}

impl Progress {
    /// Runs `job` and prints its output. Does nothing once a job could not do its work.
    fn run(&self, job: &Job) {
        let state = || self.state.lock().expect("no panic while it is held");
        if state().error.is_some() {
            return;
        }
        let begun = Instant::now();
        let mut tally = Tally::default();
        let result = (job.work)(&mut tally);
        let mut state = state();
        state.count += 1;
        println!(
            "\n[{:>2}/{}] {}, {:.1} s\n{}",
            state.count,
            self.jobs,
            job.label,
            begun.elapsed().as_secs_f64(),
            tally.shown.trim_end()
        );
        state.tally.merge(tally);
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
    }
}
