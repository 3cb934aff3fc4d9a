//! Fills that a thread of the program runs for its own fault: [`InlineHandler`].
//!
//! The rule is that of a signal handler, see `in_thread.rs`. An inline handler brings in one run,
//! and takes a few victims out while its READ is under way. No evictor has to be woken for them,
//! and no other processor has to forget the addresses while the program runs there. (Where other
//! threads of the program do run, copies leave in batches: `scatter.rs`.) Unchanged pages are gone,
//! changed ones are handed over (`hand_over.rs`), and nothing is waited for. Work that it cannot do
//! there (logging why a page is lost, opening a channel, reading ahead) is left to the page's
//! filler.

use std::{sync::Arc, time::Duration};

use farpage_fabric::Since;
use farpage_store::{IoQueue, PageIndex};
use farpage_vm::AddressSpace;
use nix::poll::PollFd;
use smallvec::SmallVec;

use crate::{
    PageError,
    ahead::ReadAhead,
    budget::Budget,
    clock::FoundBy,
    doors::{Ask, Command},
    fills::{Arrivals, FillCompletion, Fills},
    freeze::Entered,
    hand_over::PAGES_PER_CALL,
    pace::Pace,
    reclaim::{EvictionLimit, Sink, evict},
    region::{Region, RegionGuard},
    requests::{Fill, Leaving},
    run::PageRun,
    shared::SharedParts,
    waker::sleep_on,
};

/// Time after which an inline handler looks again for a frame.
const NAP: Duration = Duration::from_micros(50);

/// Bounds of the reclaim for one fault.
const RECLAIM_LIMIT: EvictionLimit = EvictionLimit {
    chunks: 4,
    pages: PAGES_PER_CALL,
};

/// Worker that serves one fault at a time in the thread that raised it.
pub(crate) struct InlineHandler<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    worker: usize,
    pub(crate) fills: Fills<A, InlineCompletion<A>>,
}

impl<A: AddressSpace> InlineHandler<A> {
    pub(crate) fn new(
        shared: Arc<SharedParts<A>>,
        worker: usize,
        io: IoQueue<Fill, PageRun<A::Frame>>,
        pace: Pace,
        deadline: Duration,
    ) -> Self {
        let completion = InlineCompletion {
            arrivals: Arrivals::new(shared.clone(), worker),
            since: Since::now(),
        };
        InlineHandler {
            fills: Fills::new(shared.clone(), worker, io, pace, deadline, completion),
            shared,
            worker,
        }
    }

    /// Serves a fault in the thread that raised it. When this returns, all requests that it started
    /// have ended. Read-ahead is the business of the page's own filler.
    pub(crate) fn serve(&mut self, region: &Arc<Region>, page: PageIndex, address: usize) {
        let Some(plan) = self.begin_serving(region, page, address) else {
            return;
        };
        while !self.fills.is_idle() {
            if !self.work() && !self.reclaim() {
                self.nap();
            }
        }
        self.end_serving(region, page, plan);
    }

    /// Takes the fault on, and makes room while its READ is under way. `None`: nothing was started.
    pub(crate) fn begin_serving(
        &mut self,
        region: &Arc<Region>,
        page: PageIndex,
        address: usize,
    ) -> Option<ReadAhead> {
        let guard = region.enter()?;
        self.shared.counters[self.worker].faults.bump();
        self.fills.completion.since = Since::now();
        let plan = self.fills.on_fault(guard, page, address);
        // A page that was read ahead is here by now, and evictors have more time than the thread.
        if !self.fills.is_idle() {
            self.reclaim();
        }
        Some(plan)
    }

    /// Ends the service of a fault: asks the page's filler to read ahead, and maps a read-ahead
    /// marker while the next window travels.
    pub(crate) fn end_serving(&mut self, region: &Arc<Region>, page: PageIndex, plan: ReadAhead) {
        if !plan.ahead.is_empty() {
            let shard = self.shared.mapper.shard_of(region, page);
            let ask = Ask::Ahead(region.clone(), plan);
            self.shared.doors.ask_filler(shard, ask);
        }
        if self.fills.io.lacks_channels() {
            let shard = self.shared.mapper.shard_of(region, page);
            self.shared.doors.ask_filler(shard, Ask::Channels);
        }
        self.map_marker(region, page);
    }

    /// Takes one turn. Returns whether anything was done.
    fn work(&mut self) -> bool {
        let mut busy = self.fills.serve_backlog();
        busy |= self.fills.poll();
        busy
    }

    /// Takes a few pages out if memory is tight. Returns whether it did.
    fn reclaim(&self) -> bool {
        let (shared, worker) = (&*self.shared, self.worker);
        let sink = HandOverSink { shared, worker };
        shared.frames.budget().is_tight()
            && !shared.hand_over.rests()
            && evict(shared, worker, RECLAIM_LIMIT, sink)
    }

    /// Takes a step between the beginning and the end of a service, for callers that do nothing
    /// else. Returns whether it is done.
    #[cfg(test)]
    pub(crate) fn serve_a_step(&mut self) -> bool {
        let _ = self.work() || self.reclaim();
        self.fills.is_idle()
    }

    /// Maps the page if it is a read-ahead marker that is held back.
    pub(crate) fn map_marker(&mut self, region: &Arc<Region>, page: PageIndex) {
        let shard = self.shared.mapper.shard_of(region, page);
        if let Some((fill, run)) = self.shared.markers[shard.0].take(region, page) {
            self.fills.completion.map(fill, run);
        }
    }

    /// Waits for a completion, or for a frame, for a moment.
    fn nap(&self) {
        // One descriptor per server. More take heap memory.
        let mut fds = SmallVec::<[PollFd<'_>; 8]>::new();
        let until = self.fills.wait(&mut fds, NAP);
        sleep_on(&mut fds, until);
    }
}

/// Hand-over to evictors as the way of runs that were taken out.
struct HandOverSink<'a, A: AddressSpace> {
    shared: &'a SharedParts<A>,
    worker: usize,
}

impl<A: AddressSpace> Sink<A> for HandOverSink<'_, A> {
    fn has_room(&self) -> bool {
        self.shared.hand_over.has_room()
    }

    fn wants_more(&self, budget: &Budget) -> bool {
        budget.is_tight()
    }

    fn put(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        run: PageRun<A::Frame>,
        found_by: FoundBy,
    ) {
        let shared = self.shared;
        let stamp = shared.victims.stamp(found_by);
        let is_safe = |page, bytes: &[u8]| region.store.is_unchanged(page, bytes);
        let left = (shared.victims).leave(region, run, stamp, is_safe, |run| {
            let (region, departure) = (region.again(), entered.depart());
            let leaving = Leaving::new(region, run.pages(), None, found_by, departure);
            let budget = shared.frames.budget();
            (shared.hand_over).hand_over(leaving, run.into_frame(), budget);
        });
        shared.counters[self.worker].evicted(left, left);
        region.store.count_clean(left);
    }
}

/// Completion of an inline handler's fills.
pub(crate) struct InlineCompletion<A: AddressSpace> {
    arrivals: Arrivals<A>,
    /// Time when the fault was taken on.
    since: Since,
}

impl<A: AddressSpace> InlineCompletion<A> {
    /// Gives an owned page to its filler.
    fn give(&self, region: &Region, page: PageIndex, command: Command) {
        let shard = self.arrivals.shared.mapper.shard_of(region, page);
        self.arrivals.shared.doors.tell_filler(shard, command);
    }
}

impl<A: AddressSpace> FillCompletion<A> for InlineCompletion<A> {
    fn arrivals(&mut self) -> &mut Arrivals<A> {
        &mut self.arrivals
    }

    fn complete(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        self.map(fill, run);
    }

    fn fail(&mut self, region: &RegionGuard, page: PageIndex, error: PageError) {
        let command = Command::TakeOver(region.again(), page, error, self.since);
        self.give(region, page, command);
    }

    fn lose(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        page: PageIndex,
        error: PageError,
    ) {
        let command = Command::Lose(region.again(), page, error, entered.depart());
        self.give(region, page, command);
    }

    /// Leaves the page alone: the handler asks for the next window before it maps a marker.
    fn noted(&mut self, _: &Arc<Region>, _: PageIndex) {}
}
