//! [`Queue`]: jobs for threads that exist before the jobs.
//!
//! The rule it keeps: locks and waits are the standard library's, which use neither memory nor
//! destructors of a thread's own.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Time without a taken job after which the queue's threads count as busy with long calls. Most
/// calls end sooner, also on a busy machine, so that no thread is started for them.
const PATIENCE: Duration = Duration::from_millis(100);

/// Jobs, in order, and the threads that take them.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Condition that is notified when a job is taken.
    taken: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Number of threads that wait for a job.
    idle: usize,
    /// Number of jobs taken so far.
    taken: u64,
    closed: bool,
}

impl Queue {
    /// Adds a job. Returns true if it waits for a thread that is busy.
    pub(crate) fn push(&self, job: Job) -> bool {
        let mut state = self.state();
        state.jobs.push_back(job);
        let waits = state.jobs.len() > state.idle;
        drop(state);
        self.changed.notify_one();
        waits
    }

    /// Waits until there are no jobs, or none is taken for a while. Returns true if jobs are left.
    pub(crate) fn is_stuck(&self) -> bool {
        let mut state = self.state();
        while !state.jobs.is_empty() {
            let before = state.taken;
            let waits = |state: &mut State| !state.jobs.is_empty() && state.taken == before;
            let waited = self.taken.wait_timeout_while(state, PATIENCE, waits);
            let (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return true;
            }
            state = now;
        }
        false
    }

    /// Runs jobs until the queue is closed.
    pub(crate) fn work(&self) {
        while let Some(job) = self.take() {
            job();
        }
    }

    /// Closes the queue: the threads end when they have run the jobs that are there.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn take(&self) -> Option<Job> {
        let mut state = self.state();
        state.idle += 1;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.idle -= 1;
                state.taken += 1;
                self.taken.notify_all();
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
