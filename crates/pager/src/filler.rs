//! The owner of one shard: [`Filler`], which reads its faults and its mail.
//!
//! A fault takes one hand-off, from the kernel to the filler that sleeps in its shard's
//! userfaultfd. The fill that follows is in `fills.rs`. Plans are kept for later in the
//! [`PrefetchQueue`], read-ahead markers by [`HeldBack`].
//!
//! The rule: a filler waits only in the sleep of its thread (`executor.rs`), and never touches the
//! program's memory.

use std::{
    collections::VecDeque,
    mem,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_fabric::{Since, log::later};
use farpage_store::{IoQueue, PageIndex};
use farpage_vm::{AddressSpace, EventScope, Events, Shard};
use nix::poll::PollFd;

use crate::{
    PageError,
    ahead::{ReadAhead, own_ahead},
    doors::{Ask, Command, FillerInbox},
    fills::{Arrivals, FillCompletion, Fills},
    freeze::Entered,
    in_thread::InThread,
    installer::UsageCount,
    markers::Markers,
    pace::Pace,
    protocol,
    region::{Region, RegionGuard, chunk_of, chunks_of},
    requests::Fill,
    run::{PageRun, keep_first, pages_in},
    shared::SharedParts,
    stats::Counters,
    waker::RETRY,
};

/// One fault in `SAMPLED` is asked for the thread that raised it: finding out where a thread runs
/// takes as long as serving a fault.
const SAMPLED: u32 = 64;

pub(crate) struct Filler<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    shard: Shard,
    inbox: FillerInbox,
    deadline: Duration,
    fills: Fills<A, HeldBack<A>>,
    prefetch_queue: PrefetchQueue<A>,
    /// Service of faults by threads of the program, if the runtime has it.
    in_thread: Option<Arc<InThread<A>>>,
    last_region: Option<Arc<Region>>,
    /// Pages whose protection keeps threads from writing.
    protected: Vec<(RegionGuard, PageIndex)>,
    /// Addresses that the program has unmapped, and whose pages are not given up yet.
    unmapped: Vec<Range<usize>>,
    /// Number of faults that were read, and the thread that raised one of them.
    seen: u32,
    sample: Option<u32>,
    /// Buffer kept between turns, so that reading faults does not allocate.
    events: Events,
}

impl<A: AddressSpace> Filler<A> {
    /// Makes the filler of `shard`, which is its number among the workers, too.
    pub(crate) fn new(
        shared: Arc<SharedParts<A>>,
        shard: usize,
        io: IoQueue<Fill, PageRun<A::Frame>>,
        inbox: FillerInbox,
        pace: Pace,
        deadline: Duration,
        in_thread: Option<Arc<InThread<A>>>,
    ) -> Self {
        let held_back = HeldBack::new(shared.clone(), shard);
        Filler {
            fills: Fills::new(shared.clone(), shard, io, pace, deadline, held_back),
            prefetch_queue: PrefetchQueue::new(shared.clone(), Shard(shard)),
            shared,
            shard: Shard(shard),
            inbox,
            deadline,
            in_thread,
            last_region: None,
            protected: Vec::with_capacity(64),
            unmapped: Vec::new(),
            seen: 0,
            sample: None,
            events: Events {
                faults: Vec::with_capacity(64),
                unmapped: Vec::new(),
            },
        }
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters[self.shard.0]
    }

    /// Performs all work that can be done without waiting. Returns whether anything was done.
    /// Without [`EventScope::All`] a turn is cheaper: for where the descriptor has told of no new
    /// fault.
    pub(crate) fn turn(&mut self, asked: EventScope) -> bool {
        let events = self.read_events(asked);
        let mail = self.read_mail();
        let mut busy = self.unprotect();
        busy |= self.fills.serve_backlog();
        busy |= self.fills.completion.lend();
        busy |= self.prefetch_queue.serve(&mut self.fills);
        busy |= self.fills.poll();
        busy || mail || events
    }

    /// Returns the I/O queue. Its driver makes calls of users' stores, without the filler.
    pub(crate) fn io(&mut self) -> &mut IoQueue<Fill, PageRun<A::Frame>> {
        &mut self.fills.io
    }

    fn read_events(&mut self, asked: EventScope) -> bool {
        let mut events = mem::take(&mut self.events);
        if let Err(error) = self.shared.mapper.events(self.shard, asked, &mut events) {
            panic!("cannot read page faults: {error}");
        }
        let any = !events.is_empty();
        for fault in events.faults.drain(..) {
            self.counters().faults.bump();
            self.seen = self.seen.wrapping_add(1);
            if self.seen.is_multiple_of(SAMPLED)
                || self.seen < SAMPLED && self.seen.is_power_of_two()
            {
                self.sample = (fault.thread != 0).then_some(fault.thread);
            }
            self.on_fault(fault.address, fault.protected);
        }
        self.unmapped.append(&mut events.unmapped);
        self.events = events;
        any | self.give_up_unmapped()
    }

    fn on_fault(&mut self, address: usize, protected: bool) {
        let Some(region) = self.region_at(address) else {
            return self.on_stray_fault(address);
        };
        let page = region.page_at(address);
        if !region.beginning.catches_faults() {
            // The kernel refused the rest of the region, which is ordinary memory again.
            self.shared.mapper.wake(&region, page.alone());
            return;
        }
        region.store.expect(page);
        // A closing region gives its addresses up, and the program must not be using them. Only an
        // evictor that copies pages out may sleep there then, and that evictor has a guard.
        let entered = region.enter();
        let is_open = entered.is_some();
        let Some(guard) = entered.or_else(|| region.enter_beside()) else {
            return;
        };
        if protected {
            self.protected.push((guard, page));
            self.unprotect();
            return;
        }
        let plan = self.fills.on_fault(guard, page, address);
        if is_open {
            self.prefetch_queue.add(region, plan, true);
        }
    }

    /// Lets the program write again to pages that are protected. While others leave by copying, all
    /// faulted ones wait: most are let go together with those, and the rest may not change before.
    fn unprotect(&mut self) -> bool {
        let before = self.protected.len();
        let scatter = &self.shared.scatter;
        (self.protected).retain(|(region, page)| !scatter.unprotect(region, *page));
        self.protected.len() < before
    }

    /// Ends a fault at an address of no region: the region has closed since, or the program has
    /// made its mapping longer by `mremap`. The thread must not sleep there for ever.
    fn on_stray_fault(&self, address: usize) {
        if let Err(error) = self.shared.mapper.poison_stray(self.shard, address) {
            later(move || {
                tracing::error!(%error, address = format_args!("{address:#x}"), "a fault at an address that is no region's cannot be ended");
            });
        }
    }

    fn region_at(&mut self, address: usize) -> Option<Arc<Region>> {
        if !self
            .last_region
            .as_ref()
            .is_some_and(|r| r.contains(address) && !r.is_closing())
        {
            self.last_region = self.shared.regions.at(address);
        }
        self.last_region.clone()
    }

    /// Gives up pages that the program has unmapped. Not while the program forks: entries stay as
    /// they are then. Returns whether there were any.
    fn give_up_unmapped(&mut self) -> bool {
        if self.unmapped.is_empty() {
            return false;
        }
        let shared = self.shared.clone();
        let Some(entered) = shared.gate.enter_for_fill(self.shard.0) else {
            return false;
        };
        for addresses in mem::take(&mut self.unmapped) {
            let regions = shared.regions.overlapping(&addresses);
            for region in regions.iter().filter_map(Region::enter) {
                self.unmap(&entered, &region, &addresses);
            }
        }
        true
    }

    /// Gives up the region's pages that have some of `addresses`, which the program has unmapped.
    /// Other owners of such pages meet that when they map them or take them out.
    fn unmap(&self, _inside: &Entered<'_>, region: &Region, addresses: &Range<usize>) {
        let shared = &self.shared;
        let last = addresses.end.min(region.address + region.geometry.bytes) - 1;
        let first = region.page_at(addresses.start.max(region.address));
        let pages = first.until(region.page_at(last) + 1);
        let mut chunk = region.next_touched(chunk_of(pages.start));
        while let Some(at) = chunk.filter(|at| chunks_of(pages).contains(at)) {
            for page in region.chunk(at).within(pages) {
                if shared.mapper.shard_of(region, page) != self.shard {
                    continue;
                }
                if region.words.try_apply(page, protocol::borrow).is_some() {
                    region.count_out(page.alone());
                    shared.frames.budget().lose(region.page_bytes());
                } else if region.words.try_apply(page, protocol::prefetch).is_none() {
                    continue;
                }
                region.store.forget(page);
                shared.installer.gone(region, page, false);
            }
            chunk = region.next_touched(at + 1);
        }
    }

    fn read_mail(&mut self) -> bool {
        let mut any = false;
        while let Ok(ask) = self.inbox.asks.try_recv() {
            any = true;
            match ask {
                Ask::Channels => {
                    if let Some(in_thread) = &self.in_thread {
                        in_thread.open_lacking();
                    }
                }
                Ask::Ahead(region, plan) => self.prefetch_queue.add(region, plan, true),
                Ask::Fault(region, address) => {
                    let Some(guard) = region.enter() else {
                        continue;
                    };
                    self.counters().faults.bump();
                    let page = region.page_at(address);
                    let plan = self.fills.on_fault(guard, page, address);
                    self.prefetch_queue.add(region, plan, true);
                }
            }
        }
        while let Ok(command) = self.inbox.mail.try_recv() {
            any = true;
            match command {
                Command::Prefetch(region, pages) => {
                    self.prefetch_queue.add(region, ReadAhead::up(pages), false);
                }
                Command::Demand(region, pages, taken_on) => {
                    let (mapper, shard) = (&self.shared.mapper, self.shard);
                    let is_ours = |page| mapper.shard_of(&region, page) == shard;
                    self.fills.demand(&region, pages, is_ours);
                    taken_on.fetch_add(1, Ordering::Release);
                }
                Command::LetGo(region, page) => self.fills.completion.noted(&region, page),
                Command::TakeOver(region, page, error, since) => {
                    self.take_over(region, page, error, since);
                }
                Command::Lose(region, page, error, departure) => {
                    let entered = departure.inside();
                    self.fills.completion.lose(&entered, &region, page, error);
                }
                Command::Settle(region) => self.give_up(&region),
            }
        }
        any
    }

    /// Takes over a page that a thread of the program could not bring in.
    fn take_over(&mut self, region: RegionGuard, page: PageIndex, error: PageError, since: Since) {
        if let Some(in_thread) = &self.in_thread {
            in_thread.reopen();
        }
        let wanted = region.words.load(page).wanted();
        if wanted && error.may_retry() && since.elapsed() < self.deadline {
            self.fills.begin(region, page, ReadAhead::NONE);
        } else {
            self.fills.completion.fail(&region, page, error);
        }
    }

    /// Gives up a closing region: owned pages of it that nothing will complete are published as
    /// they are.
    fn give_up(&mut self, region: &Region) {
        self.prefetch_queue.give_up(region);
        self.fills.give_up(region);
        self.fills.completion.give_up(region);
        if (self.last_region.as_ref()).is_some_and(|last| last.id == region.id) {
            self.last_region = None;
        }
    }

    /// True if nothing is under way and nothing is kept.
    #[cfg(test)]
    pub(crate) fn is_at_rest(&self) -> bool {
        let keeps_nothing =
            self.prefetch_queue.is_empty() && self.protected.is_empty() && self.unmapped.is_empty();
        self.fills.is_idle() && keeps_nothing && self.fills.completion.is_empty()
    }

    /// True if something is under way, so that the next turn may find something to do.
    pub(crate) fn has_work(&self) -> bool {
        !self.fills.is_idle() || !self.prefetch_queue.is_empty()
    }

    /// Takes the thread of the program that raised a sampled fault: one for each [`SAMPLED`]
    /// faults, and more at the start.
    pub(crate) fn sample(&mut self) -> Option<u32> {
        self.sample.take()
    }

    /// Appends the descriptors of channels to sleep on. Returns the latest time of the next turn.
    pub(crate) fn wait<'a>(&'a self, fds: &mut impl Extend<PollFd<'a>>) -> Option<Instant> {
        let waits = !self.protected.is_empty() || !self.unmapped.is_empty();
        let retry = waits.then(|| Instant::now() + RETRY);
        let until = self.fills.wait(fds, RETRY);
        until.into_iter().chain(retry).min()
    }
}

/// Completion of one filler's fills: maps runs, and holds read-ahead markers back. A run that is
/// held back is mapped as soon as a thread wants a page of it, or a fill finds no frame.
struct HeldBack<A: AddressSpace> {
    arrivals: Arrivals<A>,
}

impl<A: AddressSpace> HeldBack<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, worker: usize) -> Self {
        HeldBack {
            arrivals: Arrivals::new(shared, worker),
        }
    }

    /// Returns this filler's markers. A filler's number among the workers is its shard's.
    fn markers(&self) -> &Markers<A> {
        &self.arrivals.shared.markers[self.arrivals.worker]
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.markers().is_empty()
    }

    /// Maps markers if some fill finds no frame, so that they can be evicted. Returns whether there
    /// were any.
    pub(crate) fn lend(&mut self) -> bool {
        let mut any = false;
        while let Some((fill, run)) = self.markers().take_called() {
            self.map(fill, run);
            any = true;
        }
        any
    }

    /// Maps the markers of a closing region.
    pub(crate) fn give_up(&mut self, region: &Region) {
        while let Some((fill, run)) = self.markers().take_of(region) {
            self.map(fill, run);
        }
    }
}

impl<A: AddressSpace> FillCompletion<A> for HeldBack<A> {
    fn arrivals(&mut self) -> &mut Arrivals<A> {
        &mut self.arrivals
    }

    fn complete(&mut self, fill: Fill, run: PageRun<A::Frame>) {
        let is_held_back = fill.marker && !fill.is_wanted() && !fill.region.is_closing();
        let mapped = match is_held_back {
            true => self.markers().keep(fill, run),
            false => Some((fill, run)),
        };
        if let Some((fill, run)) = mapped {
            self.map(fill, run);
        }
    }

    fn fail(&mut self, region: &RegionGuard, page: PageIndex, error: PageError) {
        if self.arrivals.shared.installer.fail(region, page, error) {
            self.arrivals.counters().poisoned.bump();
        }
    }

    fn lose(
        &mut self,
        _entered: &Entered<'_>,
        region: &RegionGuard,
        page: PageIndex,
        error: PageError,
    ) {
        self.arrivals.shared.installer.lose(region, page, &error);
        self.arrivals.counters().poisoned.bump();
    }

    /// Maps the page if it is held back: the program has come along.
    fn noted(&mut self, region: &Arc<Region>, page: PageIndex) {
        if let Some((fill, run)) = self.markers().take(region, page) {
            self.map(fill, run);
        }
    }
}

/// Bounds of the runs that one filler has in flight when it starts more ahead of need, and of their
/// bytes: more than a fast link carries in a round trip.
const RUNS_AHEAD_MAX: usize = 32;
pub(crate) const BYTES_AHEAD_MAX: usize = 8 << 20;
/// Number of pages that one turn passes over, because they are here or another filler's, before it
/// looks for faults again.
const PASSED_OVER_PER_TURN: usize = 4096;

#[derive(Debug)]
struct PrefetchRequest {
    region: Arc<Region>,
    plan: ReadAhead,
    /// True if the first run is a stream's read-ahead marker.
    marker: bool,
}

/// Lack of frames to spare for guesses.
struct NoFrame;

/// Prefetch requests of one filler, of streams and of the program: to bring pages in while there is
/// room.
///
/// A request owns nothing. Faults go first, and where there is no frame to spare the requests of
/// streams are forgotten: pages that come too late are worth nothing.
struct PrefetchQueue<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    shard: Shard,
    /// Requests, the oldest first.
    requests: VecDeque<PrefetchRequest>,
}

impl<A: AddressSpace> PrefetchQueue<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, shard: Shard) -> Self {
        PrefetchQueue {
            shared,
            shard,
            requests: VecDeque::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(crate) fn add(&mut self, region: Arc<Region>, plan: ReadAhead, marker: bool) {
        if !plan.ahead.is_empty() {
            self.requests.push_back(PrefetchRequest {
                region,
                plan,
                marker,
            });
        }
    }

    /// Forgets the requests of a closing region.
    pub(crate) fn give_up(&mut self, region: &Region) {
        self.requests
            .retain(|request| request.region.id != region.id);
    }

    /// Posts READs, as far as frames and the I/O queue allow. Returns whether anything was done.
    pub(crate) fn serve<L: FillCompletion<A>>(&mut self, fills: &mut Fills<A, L>) -> bool {
        let (mut any, mut passed_over) = (false, 0);
        while fills.has_room_ahead(RUNS_AHEAD_MAX, BYTES_AHEAD_MAX) {
            let Some(mut request) = self.requests.pop_front() else {
                break;
            };
            match self.serve_one(&mut request, fills) {
                Ok(begun) => {
                    any |= begun;
                    passed_over += usize::from(!begun);
                    if !request.plan.ahead.is_empty() && !request.region.is_closing() {
                        self.requests.push_front(request);
                    }
                    if passed_over == PASSED_OVER_PER_TURN {
                        return true;
                    }
                }
                Err(NoFrame) => {
                    self.requests.push_front(request);
                    for request in self.requests.drain(..) {
                        fills.gave_up(&request.region, request.plan.ahead);
                    }
                }
            }
        }
        any
    }

    /// Begins the nearest run of a request and takes it off, or passes over a page that is not to
    /// be brought in. Returns whether anything was begun.
    fn serve_one<L: FillCompletion<A>>(
        &self,
        request: &mut PrefetchRequest,
        fills: &mut Fills<A, L>,
    ) -> Result<bool, NoFrame> {
        let nearest = request.plan.nearest();
        let begun = if self.shared.mapper.shard_of(&request.region, nearest) == self.shard {
            let most = fills.run_pages(&request.region);
            self.own(&request.region, &request.plan, most)?
        } else {
            None
        };
        let Some((mut fill, frame)) = begun else {
            request.plan.take_off(1);
            return Ok(false);
        };
        // The first run that comes in, since a page that is here already tells nothing.
        fill.marker = mem::take(&mut request.marker);
        request.plan.take_off(fill.pages.len());
        fills.post(fill, frame);
        Ok(true)
    }

    /// Owns the nearest run of a plan, at most `most` pages and as far as there are frames for it.
    fn own(
        &self,
        region: &Arc<Region>,
        plan: &ReadAhead,
        most: usize,
    ) -> Result<Option<(Fill, A::Frame)>, NoFrame> {
        let (run, page_bytes) = (plan.remote(region, most), region.page_bytes());
        if run.is_empty() {
            return Ok(None);
        }
        let Some(region) = region.enter() else {
            return Ok(None);
        };
        let frames = &self.shared.frames;
        let mut frame = frames.for_prefetch(page_bytes, run.len()).ok_or(NoFrame)?;
        let got = pages_in(&frame, page_bytes);
        let run = if plan.down {
            (run.end - got).until(run.end)
        } else {
            run.start.and_on(got)
        };
        let run = own_ahead(&region, run, plan.down);
        if run.is_empty() {
            // A thread of the program that serves its own faults was faster.
            frames.release(frame, page_bytes);
            return Ok(None);
        }
        if let Some(rest) = keep_first(&mut frame, run.len(), page_bytes) {
            frames.release(rest, page_bytes);
        }
        let fill = Fill::new(region, run, UsageCount::Unwanted);
        Ok(Some((fill, frame)))
    }
}
