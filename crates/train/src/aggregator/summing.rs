//! [`Turns`]: adding gradients in the order of ranks, by whoever finds that one has come.
//!
//! The rule it keeps: adding never waits for a worker. Who waits is the thread that serves.

use std::{
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    areas::{Areas, Board, Presence},
    patterns::{Landing, RingReceiver},
};

use super::{
    AggregateError, GRADIENT_AT, NAP_MAX, NAP_MIN, Party, SPIN, StateError, VERSION_AT, area,
    parameters_at, state::State,
};

/// What an aggregator has done so far. It never waits.
pub(super) struct Summing {
    pub(super) who: Party,
    pub(super) share: f32,
    pub(super) workers: Vec<(RingReceiver, Landing)>,
    pub(super) board: Board,
    pub(super) state: State,
    pub(super) sum: Vec<f32>,
    pub(super) steps: u64,
    /// The step, and the worker whose gradient comes next.
    pub(super) at: (u64, usize),
    /// Since when it is waited for.
    pub(super) since: Instant,
    pub(super) failed: Option<AggregateError>,
    pub(super) message: Vec<u8>,
}

impl Summing {
    fn is_over(&self) -> bool {
        self.failed.is_some() || self.at.0 == self.steps
    }

    /// Adds the gradients that have come, and does the steps that are complete.
    fn advance(&mut self) {
        while !self.is_over() {
            let ((step, rank), who) = (self.at, self.who);
            let (ring, landing) = &mut self.workers[rank];
            let strange = |detail| AggregateError::Strange {
                who,
                from: Party::Worker(rank),
                step,
                detail,
            };
            match ring.receive(&mut self.message) {
                Ok(false) => return,
                Ok(true) if self.message == step.to_le_bytes() => {}
                Ok(true) => {
                    let detail = format!("it announces {:?}", self.message);
                    self.failed = Some(strange(detail));
                    return;
                }
                Err(error) => {
                    self.failed = Some(strange(error.to_string()));
                    return;
                }
            }
            landing.add_floats(GRADIENT_AT, &mut self.sum, rank == 0);
            self.at = (step, rank + 1);
            if rank + 1 == self.workers.len() {
                if let Err(why) = self.finish(step + 1) {
                    let source = Box::new(why);
                    self.failed = Some(AggregateError::State { who, source });
                    return;
                }
                self.at = (step + 1, 0);
            }
            self.since = Instant::now();
        }
    }

    /// Lets the optimizer do its step, and shows what it makes.
    fn finish(&mut self, version: u64) -> Result<(), StateError> {
        let share = self.share;
        self.sum.iter_mut().for_each(|value| *value *= share);
        let (board, at) = (&self.board, parameters_at(version, self.sum.len()));
        self.state.step(&self.sum, |first, parameters| {
            board.write_floats(at + 4 * first, parameters);
        })?;
        board.announce(VERSION_AT, version);
        match version < self.steps {
            // What comes first is brought while the workers compute.
            true => self.state.prepare(),
            false => Ok(()),
        }
    }
}

/// An aggregator's work, done by whoever finds some: the thread that serves, or one that has placed
/// a gradient.
pub(super) struct Turns {
    summing: Mutex<Summing>,
    /// How often somebody came to look. Who comes while another is at it leaves it to that one.
    /// Sequentially consistent, as is the lock with respect to it: either the one who comes gets
    /// the lock, or the one who has it sees the number after it has let go.
    calls: AtomicU64,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Turns {
    pub(super) fn new(summing: Summing) -> Self {
        Self {
            summing: Mutex::new(summing),
            calls: AtomicU64::new(0),
            is_over: Mutex::new(false),
            over: Condvar::new(),
        }
    }

    /// Does what there is to do, unless somebody else is at it and will.
    pub(super) fn turn(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        while let Ok(mut summing) = self.summing.try_lock() {
            let seen = self.calls.load(Ordering::SeqCst);
            summing.advance();
            let is_over = summing.is_over();
            drop(summing);
            if is_over {
                *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.over.notify_all();
            }
            if self.calls.load(Ordering::SeqCst) == seen {
                return;
            }
        }
    }

    /// Looks at the work, or changes it, and does afterwards what others have left to whoever held
    /// it.
    fn with<T>(&self, look: impl FnOnce(&mut Summing) -> T) -> T {
        let mut summing = self.summing.lock().expect("no gradient makes it panic");
        let seen = look(&mut summing);
        drop(summing);
        self.turn();
        seen
    }

    /// Waits until all steps are done or somebody is missing. `hears`: whether those who place
    /// gradients take turns, so that there is little to look for here.
    pub(super) fn wait(
        &self,
        areas: &Areas,
        hears: bool,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let (mut began, mut before) = (Instant::now(), (0, 0));
        loop {
            let waited = began.elapsed();
            if !hears && waited < SPIN {
                self.turn();
                thread::yield_now();
            } else {
                self.look_for_workers(areas, deadline);
                let nap = match hears {
                    true => NAP_MAX,
                    false => (waited / 16).clamp(NAP_MIN, NAP_MAX),
                };
                self.nap(nap);
            }
            let (at, is_over) = self.with(|summing| (summing.at, summing.is_over()));
            if is_over {
                return self.with(|summing| {
                    // Nothing is added after the end, whatever still arrives.
                    summing.steps = summing.at.0;
                    summing.failed.take().map_or(Ok(()), Err)
                });
            }
            if at != before {
                (began, before) = (Instant::now(), at);
            }
        }
    }

    /// Sleeps for so long, or until it is over.
    fn nap(&self, nap: Duration) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_over {
            drop(self.over.wait_timeout(is_over, nap));
        }
    }

    /// Fails if the worker whose gradient comes next is gone, or has not come in time.
    fn look_for_workers(&self, areas: &Areas, deadline: Duration) {
        let (who, at) = self.with(|summing| (summing.who, summing.at));
        let presence = areas.presence(&area(at.1));
        // What a worker sent before it went still counts.
        self.turn();
        self.with(|summing| {
            if summing.at != at || summing.is_over() {
                return;
            }
            let (step, worker) = (at.0, Party::Worker(at.1));
            if presence == Presence::Gone {
                summing.failed = Some(AggregateError::Gone {
                    who,
                    gone: worker,
                    step,
                    reason: "its session has ended".to_owned(),
                });
            } else if summing.since.elapsed() >= deadline {
                summing.failed = Some(AggregateError::Missing {
                    who,
                    missing: worker,
                    step,
                    deadline,
                });
            }
        });
    }
}
