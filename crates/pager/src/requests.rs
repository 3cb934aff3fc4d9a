//! Requests that a worker has in flight on its I/O queue, each for a run: [`RequestsInFlight`].
//!
//! The rule: a request that was begun comes back from [`RequestsInFlight::poll`] exactly once, with
//! its frame. A request that the I/O queue is too busy to take is kept and tried again; the worker
//! need not know. Fills and write-backs say what a request is for, and what follows.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_store::{
    IoQueue, PageIndex, PageRange, PageStore, RunCompletion, RunCounts, StoreCall, StoreError,
};
use farpage_vm::Frame;
use nix::poll::PollFd;

use crate::{
    pace::Posted,
    region::Region,
    run::{PageRun, StoreFrame},
    tags::Tags,
};

/// Request for a run, without the run's frame.
pub(crate) trait RunRequest {
    fn region(&self) -> &Arc<Region>;

    fn pages(&self) -> PageRange;

    /// Begins the request on an I/O queue. The error gives the frame back: the I/O queue is too
    /// busy.
    fn start<F: Frame>(
        io_queue: &mut IoQueue<StoreFrame<F>>,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: StoreFrame<F>,
        tag: u64,
    ) -> Result<(), StoreFrame<F>>;

    fn bytes(&self) -> usize {
        self.pages().len() * self.region().page_bytes()
    }
}

/// Request that has ended.
pub(crate) struct EndedRequest<T, F> {
    pub(crate) request: T,
    pub(crate) run: PageRun<F>,
    pub(crate) outcome: RunCounts,
    /// The pages that failed, and why.
    pub(crate) failed: Vec<(PageIndex, StoreError)>,
    /// Time of the post. `None`: in this very turn, which says nothing about the link.
    pub(crate) posted: Option<Posted>,
    /// Time since the post.
    pub(crate) took: Duration,
}

/// Request that the I/O queue has.
#[derive(Debug)]
struct PostedRequest<T> {
    request: T,
    posted: Posted,
    turn: u64,
}

/// Requests in flight of one worker.
pub(crate) struct RequestsInFlight<T, F: Frame> {
    io_queue: IoQueue<StoreFrame<F>>,
    posted: Tags<PostedRequest<T>>,
    posted_bytes: usize,
    /// Requests that the I/O queue was too busy to take.
    unposted: VecDeque<(T, F)>,
    done: Vec<RunCompletion<StoreFrame<F>>>,
    /// Number of turns so far.
    turn: u64,
}

impl<T: RunRequest, F: Frame> RequestsInFlight<T, F> {
    pub(crate) fn new(io_queue: IoQueue<StoreFrame<F>>) -> Self {
        RequestsInFlight {
            io_queue,
            posted: Tags::default(),
            posted_bytes: 0,
            unposted: VecDeque::new(),
            done: Vec::with_capacity(64),
            turn: 0,
        }
    }

    /// Makes room for one more request for a run of the region: it allocates nothing unless it
    /// fails.
    pub(crate) fn prepare(&mut self, region: &Region) {
        self.io_queue.prepare(&region.store, region.run_pages);
        self.posted.reserve(1);
        self.unposted.reserve(1);
    }

    /// Begins a turn of the worker.
    pub(crate) fn next_turn(&mut self) {
        self.turn += 1;
    }

    /// Begins a request.
    pub(crate) fn post(&mut self, request: T, frame: F) {
        let (store, page) = (request.region().store.clone(), request.pages().start);
        let posted = Posted::now(self.posted.len() == 0);
        self.posted_bytes += request.bytes();
        let tag = self.posted.insert(PostedRequest {
            request,
            posted,
            turn: self.turn,
        });
        if let Err(StoreFrame(frame)) =
            T::start(&mut self.io_queue, &store, page, StoreFrame(frame), tag)
        {
            let PostedRequest { request, .. } = self.take(tag);
            self.unposted.push_back((request, frame));
        }
    }

    fn take(&mut self, tag: u64) -> PostedRequest<T> {
        let posted = self.posted.remove(tag);
        self.posted_bytes -= posted.request.bytes();
        posted
    }

    /// Tries all requests again that the I/O queue did not take, since each store is busy for
    /// itself. Requests that are refused again keep their order. Returns whether any was taken.
    pub(crate) fn post_again(&mut self) -> bool {
        let waiting = self.unposted.len();
        for _ in 0..waiting {
            let (request, frame) = self
                .unposted
                .pop_front()
                .expect("the loop runs over its length");
            self.post(request, frame);
        }
        self.unposted.len() < waiting
    }

    /// Takes back requests that wait for the I/O queue and, by `is_over`, need not begin.
    pub(crate) fn withdraw(&mut self, is_over: impl Fn(&T) -> bool) -> VecDeque<(T, F)> {
        if !self.unposted().any(&is_over) {
            return VecDeque::new();
        }
        let (over, rest) = std::mem::take(&mut self.unposted)
            .into_iter()
            .partition(|(request, _)| is_over(request));
        self.unposted = rest;
        over
    }

    /// Looks for ended requests. Returns whether there are any; [`next`](Self::next) hands them
    /// out.
    pub(crate) fn poll(&mut self) -> bool {
        self.io_queue.poll(&mut self.done);
        !self.done.is_empty()
    }

    /// Takes an ended request, the last one first: its bytes are in the caches.
    pub(crate) fn next(&mut self) -> Option<EndedRequest<T, F>> {
        let RunCompletion {
            tag,
            frame,
            outcome,
            failed,
        } = self.done.pop()?;
        let PostedRequest {
            request,
            posted,
            turn,
        } = self.take(tag);
        let run = PageRun::new(
            request.pages().start,
            frame.0,
            request.region().page_bytes(),
        );
        Some(EndedRequest {
            request,
            run,
            outcome,
            failed,
            posted: (turn != self.turn).then_some(posted),
            took: posted.elapsed(),
        })
    }

    /// Keeps calls of users' stores from now on, to be taken after each turn.
    pub(crate) fn keep_calls(&mut self) {
        self.io_queue.keep_calls();
    }

    /// Takes a call that the worker's thread makes itself, while others may drive the worker.
    pub(crate) fn take_call(&mut self) -> Option<StoreCall<StoreFrame<F>>> {
        self.io_queue.take_call()
    }

    /// Takes back a call that has returned.
    pub(crate) fn end_call(&mut self, call: StoreCall<StoreFrame<F>>) {
        self.io_queue.end_call(call);
    }

    /// Announces that calls which were taken and have not ended will be handed in.
    pub(crate) fn await_calls(&mut self) {
        self.io_queue.await_calls();
    }

    /// Returns the number of requests that the I/O queue has.
    pub(crate) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Returns the bytes of the requests that the I/O queue has.
    pub(crate) fn posted_bytes(&self) -> usize {
        self.posted_bytes
    }

    /// See [`IoQueue::take_refused`].
    pub(crate) fn take_refused(&mut self) -> Option<StoreError> {
        self.io_queue.take_refused()
    }

    /// Returns the requests that wait for the I/O queue.
    pub(crate) fn unposted(&self) -> impl Iterator<Item = &T> {
        self.unposted.iter().map(|(request, _)| request)
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let unposted = self.unposted.iter_mut().map(|(request, _)| request);
        let posted = self.posted.values_mut().map(|posted| &mut posted.request);
        posted.chain(unposted)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.posted.len() == 0 && self.unposted.is_empty()
    }

    /// See [`IoQueue::lacks_channels`].
    pub(crate) fn lacks_channels(&self) -> bool {
        self.io_queue.lacks_channels()
    }

    /// See [`IoQueue::open_lacking`].
    pub(crate) fn open_lacking(&mut self) {
        self.io_queue.open_lacking();
    }

    /// Opens channels again that were lost in a thread that could not open them.
    pub(crate) fn reopen(&mut self) {
        self.io_queue.reopen();
    }

    /// Appends the descriptors to sleep on. Returns the time of the next poll at the latest.
    pub(crate) fn wait<'a>(&'a self, fds: &mut impl Extend<PollFd<'a>>) -> Option<Instant> {
        self.io_queue.wait(fds)
    }
}
