//! What a worker has under way: [`Flights`], over its lane.
//!
//! The rule it keeps: a flight that was begun comes back from [`Flights::poll`] exactly once, with
//! its frame. One that the lane is too busy to take is kept and tried again; the worker need not
//! know. What a flight is for, and what follows, is for fills and write-backs to say.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_store::{Done, Lane, Outcome, PageIndex, PageRange, PageStore, StoreCall, StoreError};
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

    /// Begins it on a lane. The error gives the frame back: the lane is too busy.
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
    pub(crate) outcome: Outcome,
    /// The pages that failed, and why.
    pub(crate) failed: Vec<(PageIndex, StoreError)>,
    /// When it was posted. `None`: in this very turn, which says nothing about the link.
    pub(crate) posted: Option<Posted>,
    /// How long ago it was posted.
    pub(crate) took: Duration,
}

/// A flight that the lane has.
#[derive(Debug)]
struct Under<T> {
    flight: T,
    posted: Posted,
    turn: u64,
}

/// All flights of one worker.
pub(crate) struct Flights<T, F: Frame> {
    lane: Lane<Local<F>>,
    posted: Tags<Under<T>>,
    posted_bytes: usize,
    /// Those that the lane was too busy to take.
    unposted: VecDeque<(T, F)>,
    done: Vec<Done<Local<F>>>,
    /// Counts turns.
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

    /// From now on one more flight of a run of the region allocates nothing unless it fails.
    pub(crate) fn prepare(&mut self, region: &Region) {
        self.lane.prepare(&region.store, region.run_pages);
        self.posted.reserve(1);
        self.unposted.reserve(1);
    }

    /// A turn of the worker begins.
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

    /// Tries those again that the lane did not take, all of them, since each store is busy for
    /// itself. What is refused again keeps its order. Returns whether any was taken.
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

    /// Takes those that wait for the lane and need not be begun any more.
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

    /// Looks for ends. Returns whether there are any; [`next`](Self::next) hands them out.
    pub(crate) fn poll(&mut self) -> bool {
        self.lane.poll(&mut self.done);
        !self.done.is_empty()
    }

    /// One that has ended, the last one first: what it brought is in the caches.
    pub(crate) fn next(&mut self) -> Option<Landed<T, F>> {
        let Done {
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

    /// From now on calls of users' stores are to be taken after each turn.
    pub(crate) fn keep_calls(&mut self) {
        self.lane.keep_calls();
    }

    /// A call that the worker's thread makes itself, while others may drive the worker.
    pub(crate) fn take_call(&mut self) -> Option<StoreCall<Local<F>>> {
        self.lane.take_call()
    }

    /// It has returned.
    pub(crate) fn end_call(&mut self, call: StoreCall<Local<F>>) {
        self.lane.end_call(call);
    }

    /// Calls that were taken and have not ended will be handed in.
    pub(crate) fn await_calls(&mut self) {
        self.lane.await_calls();
    }

    /// Flights that the lane has.
    pub(crate) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// And their bytes.
    pub(crate) fn posted_bytes(&self) -> usize {
        self.posted_bytes
    }

    /// See [`Lane::take_refused`].
    pub(crate) fn take_refused(&mut self) -> Option<StoreError> {
        self.lane.take_refused()
    }

    /// Those that wait for the lane.
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

    /// Opens the channels again that were lost while nobody could.
    pub(crate) fn reopen(&mut self) {
        self.lane.reopen();
    }

    /// Appends the descriptors to sleep on; returns when to poll at the latest.
    pub(crate) fn wait<'a>(&'a self, fds: &mut impl Extend<PollFd<'a>>) -> Option<Instant> {
        self.lane.wait(fds)
    }
}
