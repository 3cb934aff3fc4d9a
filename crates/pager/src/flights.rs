//! Runs that a worker has under way: [`Flights`], over its lane.
//!
//! The rule: a flight that was begun comes back from [`Flights::poll`] exactly once, with its
//! frame. A flight that the lane is too busy to take is kept and tried again; the worker need not
//! know. Fills and write-backs say what a flight is for, and what follows.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_store::{
    Lane, PageIndex, PageRange, PageStore, RunCompletion, RunCounts, StoreCall, StoreError,
};
use farpage_vm::Frame;
use nix::poll::PollFd;

use crate::{
    pace::Posted,
    region::Region,
    run::{Local, Run},
    tags::Tags,
};

/// A run under way, without its frame.
pub(crate) trait Flight {
    fn region(&self) -> &Arc<Region>;

    fn pages(&self) -> PageRange;

    /// Begins the flight on a lane. The error gives the frame back: the lane is too busy.
    fn start<F: Frame>(
        lane: &mut Lane<Local<F>>,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: Local<F>,
        tag: u64,
    ) -> Result<(), Local<F>>;

    fn bytes(&self) -> usize {
        self.pages().len() * self.region().page_bytes()
    }
}

/// A flight that has ended.
pub(crate) struct Landed<T, F> {
    pub(crate) flight: T,
    pub(crate) run: Run<F>,
    pub(crate) outcome: RunCounts,
    /// The pages that failed, and why.
    pub(crate) failed: Vec<(PageIndex, StoreError)>,
    /// Time of the post. `None`: in this very turn, which says nothing about the link.
    pub(crate) posted: Option<Posted>,
    /// Time since the post.
    pub(crate) took: Duration,
}

/// Flight that the lane has.
#[derive(Debug)]
struct Under<T> {
    flight: T,
    posted: Posted,
    turn: u64,
}

/// Flights of one worker.
pub(crate) struct Flights<T, F: Frame> {
    lane: Lane<Local<F>>,
    posted: Tags<Under<T>>,
    posted_bytes: usize,
    /// Flights that the lane was too busy to take.
    unposted: VecDeque<(T, F)>,
    done: Vec<RunCompletion<Local<F>>>,
    /// Number of turns so far.
    turn: u64,
}

impl<T: Flight, F: Frame> Flights<T, F> {
    pub(crate) fn new(lane: Lane<Local<F>>) -> Self {
        Flights {
            lane,
            posted: Tags::default(),
            posted_bytes: 0,
            unposted: VecDeque::new(),
            done: Vec::with_capacity(64),
            turn: 0,
        }
    }

    /// Makes room for one more flight of a run of the region: it allocates nothing unless it fails.
    pub(crate) fn prepare(&mut self, region: &Region) {
        self.lane.prepare(&region.store, region.run_pages);
        self.posted.reserve(1);
        self.unposted.reserve(1);
    }

    /// Begins a turn of the worker.
    pub(crate) fn next_turn(&mut self) {
        self.turn += 1;
    }

    /// Begins a flight.
    pub(crate) fn post(&mut self, flight: T, frame: F) {
        let (store, page) = (flight.region().store.clone(), flight.pages().start);
        let posted = Posted::now(self.posted.len() == 0);
        self.posted_bytes += flight.bytes();
        let tag = self.posted.insert(Under {
            flight,
            posted,
            turn: self.turn,
        });
        if let Err(Local(frame)) = T::start(&mut self.lane, &store, page, Local(frame), tag) {
            let Under { flight, .. } = self.take(tag);
            self.unposted.push_back((flight, frame));
        }
    }

    fn take(&mut self, tag: u64) -> Under<T> {
        let under = self.posted.remove(tag);
        self.posted_bytes -= under.flight.bytes();
        under
    }

    /// Tries all flights again that the lane did not take, since each store is busy for itself.
    /// Flights that are refused again keep their order. Returns whether any was taken.
    pub(crate) fn post_again(&mut self) -> bool {
        let waiting = self.unposted.len();
        for _ in 0..waiting {
            let (flight, frame) = self
                .unposted
                .pop_front()
                .expect("the loop runs over its length");
            self.post(flight, frame);
        }
        self.unposted.len() < waiting
    }

    /// Takes back flights that wait for the lane and, by `is_over`, need not begin.
    pub(crate) fn withdraw(&mut self, is_over: impl Fn(&T) -> bool) -> VecDeque<(T, F)> {
        if !self.unposted().any(&is_over) {
            return VecDeque::new();
        }
        let (over, rest) = std::mem::take(&mut self.unposted)
            .into_iter()
            .partition(|(flight, _)| is_over(flight));
        self.unposted = rest;
        over
    }

    /// Looks for ended flights. Returns whether there are any; [`next`](Self::next) hands them out.
    pub(crate) fn poll(&mut self) -> bool {
        self.lane.poll(&mut self.done);
        !self.done.is_empty()
    }

    /// Takes an ended flight, the last one first: its bytes are in the caches.
    pub(crate) fn next(&mut self) -> Option<Landed<T, F>> {
        let RunCompletion {
            tag,
            frame,
            outcome,
            failed,
        } = self.done.pop()?;
        let Under {
            flight,
            posted,
            turn,
        } = self.take(tag);
        let run = Run::new(flight.pages().start, frame.0, flight.region().page_bytes());
        Some(Landed {
            flight,
            run,
            outcome,
            failed,
            posted: (turn != self.turn).then_some(posted),
            took: posted.elapsed(),
        })
    }

    /// Keeps calls of users' stores from now on, to be taken after each turn.
    pub(crate) fn keep_calls(&mut self) {
        self.lane.keep_calls();
    }

    /// Takes a call that the worker's thread makes itself, while others may drive the worker.
    pub(crate) fn take_call(&mut self) -> Option<StoreCall<Local<F>>> {
        self.lane.take_call()
    }

    /// Takes back a call that has returned.
    pub(crate) fn end_call(&mut self, call: StoreCall<Local<F>>) {
        self.lane.end_call(call);
    }

    /// Announces that calls which were taken and have not ended will be handed in.
    pub(crate) fn await_calls(&mut self) {
        self.lane.await_calls();
    }

    /// Returns the number of flights that the lane has.
    pub(crate) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Returns the bytes of the flights that the lane has.
    pub(crate) fn posted_bytes(&self) -> usize {
        self.posted_bytes
    }

    /// See [`Lane::take_refused`].
    pub(crate) fn take_refused(&mut self) -> Option<StoreError> {
        self.lane.take_refused()
    }

    /// Returns the flights that wait for the lane.
    pub(crate) fn unposted(&self) -> impl Iterator<Item = &T> {
        self.unposted.iter().map(|(flight, _)| flight)
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let unposted = self.unposted.iter_mut().map(|(flight, _)| flight);
        let posted = self.posted.values_mut().map(|under| &mut under.flight);
        posted.chain(unposted)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.posted.len() == 0 && self.unposted.is_empty()
    }

    /// Opens channels again that were lost in a thread that could not open them.
    pub(crate) fn reopen(&mut self) {
        self.lane.reopen();
    }

    /// Appends the descriptors to sleep on. Returns the time of the next poll at the latest.
    pub(crate) fn wait<'a>(&'a self, fds: &mut impl Extend<PollFd<'a>>) -> Option<Instant> {
        self.lane.wait(fds)
    }
}
