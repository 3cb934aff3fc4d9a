//! [`Turns`]: adds vectors in the order of ranks, on any thread that finds that one has come.
//!
//! The rule it keeps: adding never waits for a worker. Only the thread that serves waits.

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
    patterns::{RingMemory, RingReceiver},
};

use super::{
    error::AggregateError,
    link::OwnLink,
    protocol::{
        AWAITED_AT, GRADIENT_AT, NAP_MAX, NAP_MIN, Party, SPIN, TOLD_AFTER, VERSION_AT, Word, area,
        parameters_at,
    },
    state::{State, StateError},
};

/// A worker, as the aggregator sees it in one of its groups.
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) ring: RingReceiver,
    pub(super) landing: RingMemory,
    /// Time of arrival of a vector that the member has announced, and that is not added yet.
    pub(super) arrives: Option<Instant>,
    /// Party that the member says it waits for.
    pub(super) waits_for: Option<Party>,
}

/// Workers that use the same ring, in the order of ranks, and the board shown to them.
pub(super) struct Group {
    pub(super) members: Vec<Member>,
    pub(super) board: Board,
}

/// Use of the mean.
pub(super) enum Task {
    /// The mean is a gradient, which changes the state.
    Step(State),
    /// The mean is what all members go on with.
    Mean,
}

/// Progress of an aggregator, whose methods never wait.
pub(super) struct Summing {
    pub(super) who: Party,
    /// Groups by the number of their ring, used in turns.
    pub(super) groups: Vec<Group>,
    pub(super) task: Task,
    pub(super) sum: Vec<f32>,
    /// Number of rounds: the first round that is not done any more.
    pub(super) rounds: u64,
    /// The round, and the position of the member whose vector comes next.
    pub(super) at: (u64, usize),
    /// Time since which the vector of `at` is waited for.
    pub(super) since: Instant,
    pub(super) link: Option<OwnLink>,
    /// Version that is shown when the link has carried what others read, and that time.
    pub(super) held: Option<(u64, Instant)>,
    /// Time at which something arrives or is shown, if no other thread does something before.
    pub(super) due: Option<Instant>,
    /// Steps between checkpoints, of which the last step has none.
    pub(super) every: Option<u64>,
    /// Step whose checkpoint has to be kept before anything else happens.
    pub(super) keep: Option<u64>,
    pub(super) failed: Option<AggregateError>,
    pub(super) message: Vec<u8>,
}

impl Summing {
    fn is_over(&self) -> bool {
        let is_done = self.at.0 >= self.rounds && self.held.is_none() && self.keep.is_none();
        self.failed.is_some() || is_done
    }

    fn ring_of(&self, round: u64) -> usize {
        (round % self.groups.len() as u64) as usize
    }

    /// Returns the offset in a board of the result of `round`.
    fn place(&self, round: u64) -> usize {
        parameters_at(round / self.groups.len() as u64, self.sum.len())
    }

    /// Adds vectors that have come, and does the rounds that are complete.
    fn advance(&mut self) {
        self.due = None;
        while !self.is_over() && self.keep.is_none() {
            match self.go_on() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => self.failed = Some(error),
            }
        }
    }

    /// Takes one step of the work. Returns false if there is nothing to do.
    fn go_on(&mut self) -> Result<bool, AggregateError> {
        let now = Instant::now();
        if let Some((version, at)) = self.held {
            if at > now {
                self.due = Some(at);
                return Ok(false);
            }
            self.held = None;
            self.show(version)?;
            return Ok(true);
        }
        let (round, position) = self.at;
        let number = self.ring_of(round);
        self.hear(number, round, now)?;
        let members = &mut self.groups[number].members;
        let (count, member) = (members.len(), &mut members[position]);
        match member.arrives {
            None => return Ok(false),
            Some(at) if at > now => {
                self.due = Some(at);
                return Ok(false);
            }
            Some(_) => member.arrives = None,
        }
        (member.landing).add_floats(GRADIENT_AT, &mut self.sum, position == 0);
        self.at = (round, position + 1);
        if position + 1 == count {
            self.finish(round)?;
        }
        self.since = Instant::now();
        Ok(true)
    }

    /// Takes the messages of a group's members.
    fn hear(&mut self, number: usize, round: u64, now: Instant) -> Result<(), AggregateError> {
        let who = self.who;
        for member in &mut self.groups[number].members {
            let from = Party::Worker(member.rank);
            let strange = |detail| AggregateError::Strange {
                who,
                from,
                step: round,
                detail,
            };
            // Nothing follows the announcement before its sum is shown.
            while member.arrives.is_none() {
                let received = member.ring.receive(&mut self.message);
                if !received.map_err(|error| strange(error.to_string()))? {
                    break;
                }
                match Word::of_bytes(&self.message) {
                    Some(Word::Placed(placed)) if placed == round => {
                        member.waits_for = None;
                        let link = self.link.as_mut();
                        member.arrives = Some(link.map_or(now, |link| link.arrives(now)));
                    }
                    Some(Word::Waits(party)) => member.waits_for = Some(party),
                    Some(Word::GivesUp(gone)) => {
                        return Err(AggregateError::given_up(who, from, gone, round));
                    }
                    _ => return Err(strange(format!("it announces {:?}", self.message))),
                }
            }
        }
        Ok(())
    }

    /// Turns the sum into the result of `round`.
    fn finish(&mut self, round: u64) -> Result<(), AggregateError> {
        let (at, number) = (self.place(round), self.ring_of(round));
        let Group { members, board } = &self.groups[number];
        let share = 1.0 / members.len() as f32;
        self.sum.iter_mut().for_each(|value| *value *= share);
        match &mut self.task {
            Task::Mean => board.write_floats(at, &self.sum),
            Task::Step(state) => {
                let show = |first, parameters: &[f32]| {
                    board.write_floats(at + 4 * first, parameters);
                };
                let stepped = state.step(&self.sum, show);
                stepped.map_err(|why| lost(self.who, why))?;
            }
        }
        board.announce(AWAITED_AT, 0);
        self.at = (round + 1, 0);
        let others = self.link.as_ref().map(|link| link.others(members.len()));
        match others {
            None => self.show(round + 1)?,
            Some(others) => self.held = Some((round + 1, Instant::now() + others)),
        }
        Ok(())
    }

    fn show(&mut self, version: u64) -> Result<(), AggregateError> {
        let number = self.ring_of(version - 1);
        self.groups[number].board.announce(VERSION_AT, version);
        if version < self.rounds {
            if self
                .every
                .is_some_and(|every| version.is_multiple_of(every))
            {
                self.keep = Some(version);
            }
            if let Task::Step(state) = &self.task {
                // The first pieces are brought while the workers compute.
                state.prepare().map_err(|why| lost(self.who, why))?;
            }
        }
        Ok(())
    }

    /// Shows the parameters that a job goes on with after `from` steps.
    pub(super) fn resume(&mut self, from: u64) -> Result<(), AggregateError> {
        let at = self.place(from - 1);
        let board = &self.groups[self.ring_of(from - 1)].board;
        if let Task::Step(state) = &mut self.task {
            let shown = state.show(|first, parameters| {
                board.write_floats(at + 4 * first, parameters);
            });
            shown.map_err(|why| lost(self.who, why))?;
            board.announce(VERSION_AT, from);
        }
        Ok(())
    }

    /// Returns the worker that is waited for, and the party at fault; `None` if it is the link.
    fn awaited(&self) -> Option<(Party, Party)> {
        let is_waiting = !self.is_over() && self.held.is_none() && self.keep.is_none();
        let members = is_waiting.then(|| &self.groups[self.ring_of(self.at.0)].members)?;
        let member = &members[self.at.1];
        let worker = Party::Worker(member.rank);
        let waits = member.arrives.is_none();
        waits.then(|| (worker, member.waits_for.unwrap_or(worker)))
    }
}

pub(super) fn lost(who: Party, why: StateError) -> AggregateError {
    let source = Box::new(why);
    AggregateError::State { who, source }
}

/// Function that keeps an aggregator's checkpoint after a number of steps.
pub(super) type Keeper<'a> = dyn FnMut(u64, &mut State) -> Result<(), AggregateError> + 'a;

/// An aggregator's work, done by any thread that finds some: the thread that serves, or one that
/// has placed a gradient.
pub(super) struct Turns {
    summing: Mutex<Summing>,
    /// Number of calls of `turn`. A thread that finds another at work leaves its own to that one.
    /// Sequentially consistent, as is the lock with respect to it: either the caller gets the lock,
    /// or the holder sees the number after it has let go.
    calls: AtomicU64,
    /// True if there is something that only the thread that serves can do.
    is_wanted: Mutex<bool>,
    wanted: Condvar,
}

impl Turns {
    pub(super) fn new(summing: Summing) -> Self {
        Self {
            summing: Mutex::new(summing),
            calls: AtomicU64::new(0),
            is_wanted: Mutex::new(false),
            wanted: Condvar::new(),
        }
    }

    /// Runs the work that there is, unless another thread is at it and will.
    pub(super) fn turn(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        while let Ok(mut summing) = self.summing.try_lock() {
            let seen = self.calls.load(Ordering::SeqCst);
            summing.advance();
            let is_wanted = summing.is_over() || summing.keep.is_some() || summing.due.is_some();
            drop(summing);
            if is_wanted {
                *self
                    .is_wanted
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = true;
                self.wanted.notify_all();
            }
            if self.calls.load(Ordering::SeqCst) == seen {
                return;
            }
        }
    }

    /// Runs `look` on the work, and does afterwards what others have left to the lock's holder.
    fn with<T>(&self, look: impl FnOnce(&mut Summing) -> T) -> T {
        let mut summing = self.summing.lock().expect("no gradient makes it panic");
        let seen = look(&mut summing);
        drop(summing);
        self.turn();
        seen
    }

    /// Waits until all rounds are done or a party is missing. `hears` is true if threads that place
    /// vectors take turns, so that there is little to look for here.
    pub(super) fn wait(
        &self,
        areas: &Areas,
        hears: bool,
        deadline: Duration,
        keeper: &mut Keeper<'_>,
    ) -> Result<(), AggregateError> {
        let (mut began, mut before, mut due) = (Instant::now(), None, None);
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
                let left = due.map(|due: Instant| due.saturating_duration_since(Instant::now()));
                self.nap(left.map_or(nap, |left| left.min(nap)));
            }
            let at = self.with(|summing| {
                if let Some(step) = summing.keep.take()
                    && let Task::Step(state) = &mut summing.task
                {
                    summing.failed = keeper(step, state).err();
                    // No worker is to blame for the time that the checkpoint took.
                    summing.since = Instant::now();
                }
                summing.at
            });
            let is_over = self.with(|summing| {
                due = summing.due;
                summing.is_over()
            });
            if is_over {
                return self.with(|summing| {
                    // Nothing is added after the end, whatever still arrives.
                    summing.rounds = summing.at.0;
                    summing.failed.take().map_or(Ok(()), Err)
                });
            }
            if Some(at) != before {
                (began, before) = (Instant::now(), Some(at));
            }
        }
    }

    /// Sleeps for `nap`, or until this thread is wanted.
    fn nap(&self, nap: Duration) {
        let mut is_wanted = self
            .is_wanted
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !*is_wanted {
            let woken = self.wanted.wait_timeout(is_wanted, nap);
            is_wanted = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_wanted = false;
    }

    /// Fails if the worker whose vector comes next is gone, or has not come in time. Tells the
    /// others for whom they wait.
    fn look_for_workers(&self, areas: &Areas, deadline: Duration) {
        let (at, awaited) = self.with(|summing| (summing.at, summing.awaited()));
        let Some((worker @ Party::Worker(rank), _)) = awaited else {
            return;
        };
        let number = self.with(|summing| summing.ring_of(at.0));
        let presence = areas.presence(&area(number, rank));
        // Messages that a worker sent before it went still count.
        self.turn();
        self.with(|summing| {
            let awaited = summing.awaited();
            let Some((_, missing)) = awaited.filter(|(still, _)| *still == worker) else {
                return;
            };
            let (who, step, waited) = (summing.who, at.0, summing.since.elapsed());
            if summing.at != at {
                return;
            }
            if presence == Presence::Gone {
                summing.failed = Some(AggregateError::Gone {
                    who,
                    gone: worker,
                    step,
                    reason: "its session has ended".to_owned(),
                });
            } else if waited >= deadline {
                summing.failed = Some(AggregateError::Missing {
                    who,
                    missing,
                    step,
                    deadline,
                });
            } else if waited >= deadline / TOLD_AFTER {
                let board = &summing.groups[number].board;
                board.announce(AWAITED_AT, missing.code());
            }
        });
    }
}
