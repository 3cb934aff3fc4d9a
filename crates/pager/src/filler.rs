//! Bringing pages in: [`Filler`], the owner of one shard.
//!
//! A fault takes one hand-off, from the kernel to the filler that sleeps in its shard's userfaultfd:
//!
//! 1. read the faults, and own their pages (`Remote` to `Filling`), each with as many behind it as the program is expected to want at once: a run;
//! 2. take a frame for each run and post its READ, demand before read-ahead;
//! 3. poll; a run that is complete and verified is mapped, which wakes its threads, and published (`Filling` to `Resident`).
//!
//! A fill that finds no frame waits in the backlog, still owned, and evictors are rung. The rule: a filler never waits for anything
//! but in [`Filler::sleep`], and never touches the program's memory.

use std::{
    collections::VecDeque,
    io, mem,
    ops::Range,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_store::{Done, Lane, StoreError};
use farpage_vm::{AddressSpace, DetachError, Fault};
use nix::poll::{PollFd, PollFlags};
use smallvec::SmallVec;

use crate::{
    Advice, PageError,
    ahead::{Plan, STREAMS, Streams},
    bell::{Bell, sleep_on},
    core::{Ask, Command, Core, Heat, Inbox},
    pace::{Pace, Posted},
    protocol::{self, OnFault, State},
    region::{CHUNK_PAGES, Region},
    run::{Local, cut, keep_first, pages_in},
    slab::Slab,
    stats::Counters,
};

/// The smallest page that the kernel knows.
const KERNEL_PAGE_BYTES: usize = 4096;

/// After so long a thread that serves its own fault looks again for a frame.
const NAP: Duration = Duration::from_micros(50);

/// Runs that one filler keeps in flight before it starts more that nobody waits for yet, and their bytes: more than a fast link carries in a
/// round trip.
const RUNS_AHEAD_MAX: usize = 32;
pub(crate) const BYTES_AHEAD_MAX: usize = 8 << 20;
/// Pages that one turn passes over because they are here already, or another filler's, before it looks after faults again.
const PASSED_OVER_PER_TURN: usize = 4096;

pub(crate) struct Filler<A: AddressSpace> {
    core: Arc<Core<A>>,
    /// The worker's number.
    worker: usize,
    shard: usize,
    lane: Lane<Local<A::Frame>>,
    inbox: Inbox,
    deadline: Duration,
    /// Since when a thread of the program has been running it, in a signal handler.
    guest_since: Option<Instant>,
    streams: Streams,
    pace: Pace,
    /// Counts turns.
    turns: u64,
    /// Counts pages that were mapped by themselves for threads that serve their own faults.
    alone: u32,
    flights: Slab<Flight>,
    bytes_in_flight: usize,
    /// Owned pages that wait for a frame, in the order of their faults, and since when.
    backlog: VecDeque<(Waiting, Instant)>,
    /// Owned runs with a frame that the lane was too busy to take.
    unposted: VecDeque<(Flight, A::Frame)>,
    /// Pages to bring in when there is room; not owned yet.
    wishes: VecDeque<Wish>,
    /// Complete runs of triggers, held back until the program comes along.
    held: Vec<(Flight, A::Frame)>,
    last_region: Option<Arc<Region>>,
    faults: Vec<Fault>,
    unmapped: Vec<Range<usize>>,
    done: Vec<Done<Local<A::Frame>>>,
}

/// A run of pages that this filler owns as `Filling`. Its region has been entered.
#[derive(Debug)]
struct Flight {
    region: Arc<Region>,
    pages: Range<usize>,
    heat: Heat,
    /// The trigger of a stream: held back when complete.
    trigger: bool,
    /// The store does not have its bytes.
    unsaved: bool,
    /// When its READ was posted, and the filler's turn.
    posted: Option<(Posted, u64)>,
}

impl Flight {
    /// One page that somebody waits for.
    fn demand(region: Arc<Region>, page: usize) -> Flight {
        Flight {
            region,
            pages: page..page + 1,
            heat: Heat::Refault,
            trigger: false,
            unsaved: false,
            posted: None,
        }
    }

    fn bytes(&self) -> usize {
        self.pages.len() * self.region.page_bytes()
    }

    fn is_wanted(&self) -> bool {
        let wanted = |page| self.region.words.load(page).wanted();
        self.pages.clone().any(wanted)
    }
}

/// A page that this filler owns as `Filling`, in a region that has been entered.
#[derive(Debug)]
struct Waiting {
    region: Arc<Region>,
    page: usize,
    /// These, next to it, are expected to be wanted soon.
    with: Plan,
}

/// Pages in a row and the frame for them.
type Run<F> = (Range<usize>, F);

/// There is no frame to spare for guesses.
struct NoRoom;

#[derive(Debug)]
struct Wish {
    region: Arc<Region>,
    plan: Plan,
    /// Whether the first run is a stream's trigger.
    trigger: bool,
}

impl<A: AddressSpace> Filler<A> {
    pub(crate) fn new(
        core: Arc<Core<A>>,
        worker: usize,
        shard: usize,
        lane: Lane<Local<A::Frame>>,
        inbox: Inbox,
        pace: Pace,
        deadline: Duration,
    ) -> Self {
        Filler {
            core,
            worker,
            shard,
            lane,
            inbox,
            deadline,
            guest_since: None,
            streams: Streams::default(),
            pace,
            turns: 0,
            alone: 0,
            flights: Slab::default(),
            bytes_in_flight: 0,
            backlog: VecDeque::new(),
            unposted: VecDeque::new(),
            wishes: VecDeque::new(),
            held: Vec::new(),
            last_region: None,
            faults: Vec::with_capacity(64),
            unmapped: Vec::new(),
            done: Vec::with_capacity(64),
        }
    }

    fn counters(&self) -> &Counters {
        &self.core.counters[self.worker]
    }

    /// Does what can be done without waiting. Returns whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let faults = self.read_faults();
        self.turn_without_faults() || faults
    }

    /// The same, for who knows that there are no new faults.
    pub(crate) fn turn_without_faults(&mut self) -> bool {
        let mail = self.read_mail();
        self.work() || mail
    }

    fn work(&mut self) -> bool {
        self.turns += 1;
        let mut busy = self.serve_backlog();
        busy |= self.lend_held();
        busy |= self.post_unposted();
        busy |= self.serve_wishes();
        self.lane.poll(&mut self.done);
        busy |= !self.done.is_empty();
        while let Some(done) = self.done.pop() {
            self.settle(done);
        }
        busy
    }

    fn read_faults(&mut self) -> bool {
        let mut faults = mem::take(&mut self.faults);
        if let Err(error) = self.core.space.faults(self.shard, &mut faults) {
            panic!("cannot read page faults: {error}");
        }
        let any = !faults.is_empty();
        for fault in faults.drain(..) {
            self.counters().faults.bump();
            self.on_fault(fault.address);
        }
        self.faults = faults;
        any | self.read_unmapped()
    }

    fn read_unmapped(&mut self) -> bool {
        self.core.space.unmapped(self.shard, &mut self.unmapped);
        let any = !self.unmapped.is_empty();
        for addresses in mem::take(&mut self.unmapped) {
            for region in self.core.regions_in(&addresses) {
                if region.enter() {
                    self.unmap(&region, &addresses);
                    region.exit();
                }
            }
        }
        any
    }

    /// The program has unmapped these addresses: the region's pages that had some of them are gone. Those that others own meet that when they are
    /// mapped or taken out.
    fn unmap(&self, region: &Region, addresses: &Range<usize>) {
        let (core, page_bytes) = (&self.core, region.page_bytes());
        let last = addresses.end.min(region.address + region.layout.bytes) - 1;
        let first = region.page_at(addresses.start.max(region.address));
        let pages = first..region.page_at(last) + 1;
        let mut chunk = region.next_touched(pages.start / CHUNK_PAGES);
        while let Some(at) = chunk.filter(|at| at * CHUNK_PAGES < pages.end) {
            let touched = region.chunk(at);
            for page in touched.start.max(pages.start)..touched.end.min(pages.end) {
                if region.shard_of(page, core.shards()) != self.shard {
                    continue;
                }
                if region.words.try_apply(page, protocol::borrow).is_some() {
                    region.count_out(&(page..page + 1));
                    core.frames.forget(page_bytes);
                } else if region.words.try_apply(page, protocol::prefetch).is_none() {
                    continue;
                }
                region.store.forget(page as u64);
                core.gone(region, page, false);
            }
            chunk = region.next_touched(at + 1);
        }
    }

    fn on_fault(&mut self, address: usize) {
        let Some(region) = self.region_at(address) else {
            return self.on_stray_fault(address);
        };
        let page = region.page_at(address);
        region.store.expect(page as u64);
        // A region that is closing gives its addresses up, and nobody may be using them.
        if !region.enter() {
            return;
        }
        let plan = self.take_on(&region, page, address);
        self.wish(region, plan, true);
    }

    /// No region has this address: it has closed since, or the program has made its mapping longer by `mremap`. Nobody is to sleep there for ever.
    fn on_stray_fault(&self, address: usize) {
        let page = address - address % KERNEL_PAGE_BYTES;
        if let Err(error) = self.core.space.poison(self.shard, page, KERNEL_PAGE_BYTES) {
            tracing::error!(%error, address = format_args!("{address:#x}"), "a fault at an address that is no region's cannot be ended");
        }
    }

    fn wish(&mut self, region: Arc<Region>, plan: Plan, trigger: bool) {
        if !plan.ahead.is_empty() {
            self.wishes.push_back(Wish {
                region,
                plan,
                trigger,
            });
        }
    }

    /// A fault in a region that has been entered: does what the page's word says. Returns what to read ahead.
    fn take_on(&mut self, region: &Arc<Region>, page: usize, address: usize) -> Plan {
        let on_fault = region.words.apply(page, protocol::fault);
        let mut plan = self.plan(region, page, on_fault == OnFault::Fill);
        match on_fault {
            OnFault::Fill => {
                // What is expected next comes along with what is wanted now.
                let run = self.begin(region.clone(), page, plan.clone());
                let ahead = &mut plan.ahead;
                if plan.down {
                    ahead.end = ahead.end.min(run.start);
                } else {
                    ahead.start = ahead.start.max(run.end);
                }
            }
            OnFault::Noted => {
                self.map_held(region, page);
                self.core.noted(region, page);
                region.exit();
            }
            OnFault::Stale => self.stale(region.clone(), page, address),
        }
        plan
    }

    /// Serves a fault in the thread that raised it. When this returns, all that it started has ended; what is to be read ahead beyond that is the
    /// business of the page's own filler.
    pub(crate) fn serve(&mut self, region: &Arc<Region>, page: usize, address: usize) {
        let Some(plan) = self.begin_serving(region, page, address) else {
            return;
        };
        while !self.is_idle() {
            if !self.work() && !self.make_room() {
                self.nap();
            }
        }
        self.end_serving(region, page, plan);
    }

    /// The fault is taken on, and pages leave while its READ is under way. `None`: nothing was started.
    pub(crate) fn begin_serving(
        &mut self,
        region: &Arc<Region>,
        page: usize,
        address: usize,
    ) -> Option<Plan> {
        if !region.enter() {
            return None;
        }
        self.counters().faults.bump();
        self.guest_since = Some(Instant::now());
        let plan = self.take_on(region, page, address);
        self.make_room();
        Some(plan)
    }

    fn make_room(&self) -> bool {
        self.core.make_room(self.counters())
    }

    pub(crate) fn end_serving(&mut self, region: &Arc<Region>, page: usize, plan: Plan) {
        self.guest_since = None;
        if !plan.ahead.is_empty() {
            let shard = region.shard_of(page, self.core.shards());
            self.core
                .ask_filler(shard, Ask::Ahead(region.clone(), plan));
        }
    }

    /// A step between the two, for who does nothing else. Returns whether it is done.
    #[cfg(test)]
    pub(crate) fn serve_a_step(&mut self) -> bool {
        let _ = self.work() || self.make_room();
        self.is_idle()
    }

    /// Makes room for what serving a page of the region takes, so that nothing has to be allocated then.
    pub(crate) fn prepare(&mut self, region: &Region) {
        self.lane.prepare(&region.store, region.run_pages);
        self.flights.reserve(1);
        self.backlog.reserve(1);
        self.unposted.reserve(1);
    }

    /// Opens the channels again that were lost while threads of the program ran this filler.
    pub(crate) fn reopen(&mut self) {
        self.lane.reopen();
    }

    fn is_idle(&self) -> bool {
        self.flights.len() == 0 && self.backlog.is_empty() && self.unposted.is_empty()
    }

    /// Waits for a completion, or for a frame, for a moment.
    fn nap(&self) {
        // One per server. The heap is for those who have more.
        let mut fds = SmallVec::<[PollFd<'_>; 8]>::new();
        let mut until = self.lane.wait(&mut fds);
        if !self.backlog.is_empty() {
            let retry = Instant::now() + NAP;
            until = Some(until.map_or(retry, |at| at.min(retry)));
        }
        sleep_on(&mut fds, until);
    }

    fn region_at(&mut self, address: usize) -> Option<Arc<Region>> {
        if !self
            .last_region
            .as_ref()
            .is_some_and(|r| r.contains(address) && !r.is_closing())
        {
            self.last_region = self.core.region_at(address);
        }
        self.last_region.clone()
    }

    /// The page is called resident or poisoned. Either the thread was served since, or the program took away what was there.
    fn stale(&mut self, region: Arc<Region>, page: usize, touched: usize) {
        let (address, page_bytes) = (region.address_of(page), region.page_bytes());
        let shard = region.shard_of(page, self.core.shards());
        if !self.core.space.is_present(touched) {
            if region.words.try_apply(page, protocol::vanished).is_some() {
                // Only now that the page is ours does a look at it count: an evictor may just have put it back.
                match self.core.space.detach(shard, address, page_bytes, 1) {
                    Ok(rest) => {
                        region.count_out(&(page..page + 1));
                        let mut flight = Flight::demand(region, page);
                        flight.unsaved = true;
                        return self.map(flight, rest);
                    }
                    Err(DetachError::Absent) => {
                        region.count_out(&(page..page + 1));
                        self.core.frames.forget(page_bytes);
                        self.begin(region, page, Plan::NONE);
                        return;
                    }
                    Err(_) => self.core.publish(&region, page..page + 1, Heat::Refault),
                }
            } else if region.words.try_apply(page, protocol::heal).is_some() {
                self.begin(region, page, Plan::NONE);
                return;
            } else if region.words.try_apply(page, protocol::taken_up).is_some() {
                // The program has dropped the poison. What the page was is as lost as before.
                let lost = region.lost(&(page..page + 1)).pop();
                let (_, error) = lost.expect("a lost page has its reason");
                self.lose(&region, page, error);
                region.exit();
                return;
            }
        }
        self.counters().stale_faults.bump();
        self.core.wake(&region, page..page + 1);
        region.exit();
    }

    /// Starts to fill an owned page that somebody waits for, together with what is remote of `with` next to it. Returns what that is.
    fn begin(&mut self, region: Arc<Region>, page: usize, with: Plan) -> Range<usize> {
        let mut waiting = Waiting { region, page, with };
        // Who came before goes before.
        if self.backlog.is_empty() {
            match self.try_begin(waiting) {
                Ok(run) => return run,
                Err(refused) => waiting = refused,
            }
        }
        self.counters().starved.bump();
        self.backlog.push_back((waiting, Instant::now()));
        self.core.call_evictors();
        self.core.ring_fillers();
        page..page + 1
    }

    fn try_begin(&mut self, waiting: Waiting) -> Result<Range<usize>, Waiting> {
        let (region, page, with) = (&waiting.region, waiting.page, &waiting.with);
        let page_bytes = region.page_bytes();
        let next_to_it = if with.down {
            with.ahead.end == page && region.in_one_stripe(&(0..page + 1), true).start < page
        } else {
            with.ahead.start == page + 1
                && region.in_one_stripe(&(page..page + 2), false).len() == 2
        };
        // The run has the page itself, too.
        let more = if next_to_it {
            self.remote_run(region, with)
                .len()
                .min(self.run_pages(region) - 1)
        } else {
            0
        };
        let Some(mut frame) = self.core.frames.for_demand(page_bytes, more) else {
            return Err(waiting);
        };
        self.core.call_evictors();
        let got = pages_in(&frame, page_bytes) - 1;
        let run = if with.down {
            self.own(region, page - got..page, true).start..page + 1
        } else {
            page..self.own(region, page + 1..page + 1 + got, false).end
        };
        if let Some(rest) = keep_first(&mut frame, run.len(), page_bytes) {
            self.core.release(rest, page_bytes);
        }
        let flight = Flight {
            pages: run.clone(),
            ..Flight::demand(waiting.region, page)
        };
        self.post(flight, frame);
        Ok(run)
    }

    /// Pages of a region that move together at most.
    fn run_pages(&self, region: &Region) -> usize {
        let bytes = region.run_pages * region.page_bytes();
        (self.pace.run_bytes(bytes) / region.page_bytes()).max(1)
    }

    /// Pages that a stream of the region reads ahead at most.
    fn window_pages(&self, region: &Region) -> usize {
        let run_bytes = self.run_pages(region) * region.page_bytes();
        let pages = self.pace.window_bytes(run_bytes) / region.page_bytes();
        pages.clamp(*region.read_ahead.start(), *region.read_ahead.end())
    }

    /// The pages of a plan from the nearest on, up to the first that is not remote or not in the same stripe, as many as may move together.
    fn remote_run(&self, region: &Region, plan: &Plan) -> Range<usize> {
        let pages = region.in_one_stripe(&plan.ahead, plan.down);
        let is_there = |page: &usize| region.words.load(*page).state() != State::Remote;
        let most = self.run_pages(region);
        if plan.down {
            let start = pages.start.max(pages.end.saturating_sub(most));
            let stop = (start..pages.end).rev().find(is_there);
            stop.map_or(start, |page| page + 1)..pages.end
        } else {
            let end = pages.end.min(pages.start + most);
            let stop = (pages.start..end).find(is_there);
            pages.start..stop.unwrap_or(end)
        }
    }

    /// Owns pages that nobody waits for, from the nearest on up to the first that is not remote; returns which.
    fn own(&self, region: &Region, pages: Range<usize>, down: bool) -> Range<usize> {
        let refused = |page: &usize| {
            let owned = region.words.try_apply(*page, protocol::prefetch);
            owned.is_none()
        };
        if down {
            let stop = pages.clone().rev().find(refused);
            stop.map_or(pages.start, |page| page + 1)..pages.end
        } else {
            let stop = pages.clone().find(refused);
            pages.start..stop.unwrap_or(pages.end)
        }
    }

    fn serve_backlog(&mut self) -> bool {
        if self.backlog.is_empty() {
            return false;
        }
        let mut any = false;
        while let Some((waiting, since)) = self.backlog.pop_front() {
            match self.try_begin(waiting) {
                Ok(_) => any = true,
                Err(waiting) if since.elapsed() > self.deadline => {
                    self.starve(waiting, since);
                    any = true;
                }
                Err(waiting) => {
                    self.backlog.push_front((waiting, since));
                    self.core.call_evictors();
                    return any;
                }
            }
        }
        // Not before all are served: who holds frames back and looks in between must see that somebody starves.
        self.core.frames.end_starving();
        any
    }

    /// A fill found no frame for too long.
    fn starve(&mut self, waiting: Waiting, since: Instant) {
        let error = PageError::NoFrame {
            region: waiting.region.id,
            page: waiting.page as u64,
            waited: since.elapsed(),
        };
        self.fail(&waiting.region, waiting.page, error);
        waiting.region.exit();
    }

    fn post(&mut self, mut flight: Flight, frame: A::Frame) {
        let (store, page) = (flight.region.store.clone(), flight.pages.start as u64);
        flight.posted = Some((Posted::now(self.flights.len() == 0), self.turns));
        self.bytes_in_flight += flight.bytes();
        let tag = self.flights.insert(flight);
        if let Err(Local(frame)) = self.lane.fill(&store, page, Local(frame), tag) {
            let flight = self.flights.remove(tag);
            self.bytes_in_flight -= flight.bytes();
            self.unposted.push_back((flight, frame));
        }
    }

    /// Tries all of them, since each store is busy for itself; what is refused again keeps its order.
    fn post_unposted(&mut self) -> bool {
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

    fn settle(&mut self, done: Done<Local<A::Frame>>) {
        let flight = self.flights.remove(done.tag);
        self.bytes_in_flight -= flight.bytes();
        if let Some((posted, turn)) = flight.posted
            && turn != self.turns
            && done.outcome.wire_bytes > 0
        {
            (self.pace).arrived(done.outcome.wire_bytes as usize, posted, Instant::now());
        }
        let frame = done.frame.0;
        if !done.failed.is_empty() {
            return self.settle_partly(flight, frame, &done.failed);
        }
        if flight.trigger && !flight.is_wanted() && !flight.region.is_closing() {
            self.hold(flight, frame);
        } else {
            self.map(flight, frame);
        }
    }

    fn settle_partly(&mut self, flight: Flight, frame: A::Frame, failed: &[(u64, StoreError)]) {
        let (region, page_bytes) = (flight.region.clone(), flight.region.page_bytes());
        let error = |page: usize| failed.iter().find(|(failed, _)| *failed == page as u64);
        let lost = |page| error(page).is_some();
        cut(
            flight.pages,
            page_bytes,
            frame,
            lost,
            |pages, frame, lost| {
                if lost {
                    self.core.release(frame, page_bytes);
                    for page in pages {
                        let (_, error) = error(page).expect("the stretch is of lost pages");
                        self.fail(&region, page, error.clone().into());
                    }
                } else {
                    region.enter_again();
                    let flight = Flight {
                        region: region.clone(),
                        pages,
                        heat: flight.heat,
                        trigger: false,
                        unsaved: false,
                        posted: None,
                    };
                    self.map(flight, frame);
                }
            },
        );
        region.exit();
    }

    /// Some filler finds no frame: what is held back is mapped, so that it can be evicted.
    fn lend_held(&mut self) -> bool {
        if self.held.is_empty() || !self.core.frames.is_starving() {
            return false;
        }
        while !self.held.is_empty() {
            self.let_go(0);
        }
        true
    }

    /// Keeps a trigger unmapped; the one held longest makes room, for its stream has ended.
    fn hold(&mut self, flight: Flight, frame: A::Frame) {
        if self.held.len() == STREAMS {
            self.let_go(0);
        }
        self.core.frames.begin_holding(flight.bytes());
        self.held.push((flight, frame));
    }

    /// Maps what is held back.
    fn let_go(&mut self, at: usize) {
        let (flight, frame) = self.held.remove(at);
        self.core.frames.end_holding(flight.bytes());
        self.map(flight, frame);
    }

    /// Maps a complete run and publishes it.
    fn map(&mut self, flight: Flight, frame: A::Frame) {
        let Flight {
            region,
            pages,
            heat,
            unsaved,
            ..
        } = flight;
        let (mut filled, demanded) = (pages.len(), usize::from(heat == Heat::Refault));
        let is_alone = filled == 1 && self.guest_since.is_some();
        self.alone = self.alone.wrapping_add(is_alone.into());
        let count = self.alone;
        let core = self.core.clone();
        let refused = |page, frame, error: io::Error| {
            filled -= 1;
            core.release(frame, region.page_bytes());
            let error = PageError::Os {
                what: "map",
                region: region.id,
                page: page as u64,
                message: error.to_string(),
            };
            if unsaved {
                self.lose(&region, page, error);
            } else {
                self.fail(&region, page, error);
            }
        };
        if is_alone {
            core.install_alone(&region, pages.start, frame, heat, count, refused);
        } else {
            core.install(&region, pages, frame, heat, refused);
        }
        self.counters().fills.add(filled);
        self.counters()
            .prefetches
            .add(filled.saturating_sub(demanded));
        region.exit();
    }

    /// An owned page cannot be brought in.
    fn fail(&mut self, region: &Arc<Region>, page: usize, error: PageError) {
        if let Some(since) = self.guest_since {
            // Threads of the program neither open channels nor write to the log in a signal handler.
            region.enter_again();
            let shard = region.shard_of(page, self.core.shards());
            let command = Command::TakeOver(region.clone(), page, error, since);
            return self.core.tell_filler(shard, command);
        }
        if self.core.fail_fill(region, page, error) {
            self.counters().poisoned.bump();
        }
    }

    /// The bytes of an owned page, which the store does not have, could not be mapped.
    fn lose(&self, region: &Arc<Region>, page: usize, error: PageError) {
        if self.guest_since.is_some() {
            // As in `fail`.
            region.enter_again();
            let shard = region.shard_of(page, self.core.shards());
            let command = Command::Lose(region.clone(), page, error);
            return self.core.tell_filler(shard, command);
        }
        self.core.lose(region, page, &error);
        self.counters().poisoned.bump();
    }

    /// What to read ahead after a fault. `missed`: the page was not on its way.
    fn plan(&mut self, region: &Arc<Region>, page: usize, missed: bool) -> Plan {
        let advice = region.advice();
        if advice == Advice::Random {
            return Plan::NONE;
        }
        let eager = advice == Advice::Sequential;
        let limit = self.window_pages(region);
        let (mut plan, passed) = self.streams.fault(region.id, page, limit, eager, missed);
        plan.ahead.end = plan.ahead.end.min(region.pages());
        if !passed.is_empty() {
            let addresses = region.address_of(passed.start)..region.address_of(passed.end);
            self.core.behind.passed(addresses);
        }
        plan
    }

    /// Posts READs for pages that nobody waits for yet, as far as frames and the lane allow.
    fn serve_wishes(&mut self) -> bool {
        let (mut any, mut passed_over) = (false, 0);
        while self.backlog.is_empty()
            && self.unposted.is_empty()
            && self.flights.len() < RUNS_AHEAD_MAX
            && self.bytes_in_flight < BYTES_AHEAD_MAX
        {
            let Some(mut wish) = self.wishes.pop_front() else {
                break;
            };
            match self.serve_wish(&mut wish) {
                Ok(begun) => {
                    any |= begun;
                    passed_over += usize::from(!begun);
                    self.wish_on(wish);
                    if passed_over == PASSED_OVER_PER_TURN {
                        return true;
                    }
                }
                Err(NoRoom) => {
                    // No room for guesses. Those that come too late are worth nothing: forget them.
                    self.core.call_evictors();
                    self.wishes.push_front(wish);
                    for wish in self.wishes.drain(..) {
                        self.streams.gave_up(wish.region.id, &wish.plan.ahead);
                    }
                }
            }
        }
        any
    }

    fn wish_on(&mut self, wish: Wish) {
        if !wish.plan.ahead.is_empty() && !wish.region.is_closing() {
            self.wishes.push_front(wish);
        }
    }

    /// Begins the nearest run of a wish and takes it off, or passes over a page that is not to be brought in. Returns whether anything was begun.
    fn serve_wish(&mut self, wish: &mut Wish) -> Result<bool, NoRoom> {
        let nearest = wish.plan.nearest();
        let flight = if wish.region.shard_of(nearest, self.core.shards()) == self.shard {
            self.own_ahead(&wish.region, &wish.plan)?
        } else {
            None
        };
        let Some((pages, frame)) = flight else {
            wish.plan.take_off(1);
            return Ok(false);
        };
        // The first run that comes in, since a page that is here already tells nothing.
        let trigger = mem::take(&mut wish.trigger);
        wish.plan.take_off(pages.len());
        let flight = Flight {
            region: wish.region.clone(),
            pages,
            heat: Heat::Cold,
            trigger,
            unsaved: false,
            posted: None,
        };
        self.post(flight, frame);
        Ok(true)
    }

    /// Owns the nearest run of a plan, as far as there are frames for it, and enters its region.
    fn own_ahead(&self, region: &Region, plan: &Plan) -> Result<Option<Run<A::Frame>>, NoRoom> {
        let (run, page_bytes) = (self.remote_run(region, plan), region.page_bytes());
        if run.is_empty() {
            return Ok(None);
        }
        let frame = self.core.frames.for_prefetch(page_bytes, run.len());
        let mut frame = frame.ok_or(NoRoom)?;
        self.core.call_evictors();
        if !region.enter() {
            self.core.release(frame, page_bytes);
            return Ok(None);
        }
        let got = pages_in(&frame, page_bytes);
        let run = if plan.down {
            run.end - got..run.end
        } else {
            run.start..run.start + got
        };
        let run = self.own(region, run, plan.down);
        if run.is_empty() {
            // A thread of the program that serves its own faults was faster.
            region.exit();
            self.core.release(frame, page_bytes);
            return Ok(None);
        }
        if let Some(rest) = keep_first(&mut frame, run.len(), page_bytes) {
            self.core.release(rest, page_bytes);
        }
        Ok(Some((run, frame)))
    }

    /// A fault was noted on a page that is held back: the program has come along.
    fn map_held(&mut self, region: &Arc<Region>, page: usize) {
        if let Some(at) = self
            .held
            .iter()
            .position(|(flight, _)| flight.pages.contains(&page) && flight.region.id == region.id)
        {
            self.let_go(at);
        }
    }

    fn read_mail(&mut self) -> bool {
        let mut any = false;
        while let Ok(ask) = self.inbox.asks.try_recv() {
            any = true;
            match ask {
                Ask::Ahead(region, plan) => self.wish(region, plan, false),
                Ask::Fault(region, address) if region.enter() => {
                    self.counters().faults.bump();
                    let page = region.page_at(address);
                    let plan = self.take_on(&region, page, address);
                    // No trigger: the thread that would fault on it does not come to us.
                    self.wish(region, plan, false);
                }
                Ask::Fault(..) => {}
            }
        }
        while let Ok(command) = self.inbox.mail.try_recv() {
            any = true;
            match command {
                Command::Prefetch(region, pages) => {
                    self.wish(region, Plan::up(pages), false);
                }
                Command::Demand(region, pages, taken_on) => {
                    self.demand(&region, pages);
                    taken_on.fetch_add(1, Ordering::Release);
                }
                Command::TakeOver(region, page, error, since) => {
                    self.take_over(region, page, error, since);
                }
                Command::Lose(region, page, error) => {
                    self.lose(&region, page, error);
                    region.exit();
                }
                Command::Settle(region) => self.give_up(&region),
            }
        }
        any
    }

    /// A page that a thread of the program could not bring in is ours now.
    fn take_over(&mut self, region: Arc<Region>, page: usize, error: PageError, since: Instant) {
        if let Some(in_thread) = self.core.in_thread.get().and_then(Weak::upgrade) {
            in_thread.reopen();
        }
        let wanted = region.words.load(page).wanted();
        if wanted && error.may_retry() && since.elapsed() < self.deadline {
            self.begin(region, page, Plan::NONE);
        } else {
            self.fail(&region, page, error);
            region.exit();
        }
    }

    /// The program waits for these pages as if it had touched them; poisoned ones are tried again.
    fn demand(&mut self, region: &Arc<Region>, pages: Range<usize>) {
        let mut page = pages.start;
        while page < pages.end {
            let at = page;
            page += 1;
            if region.shard_of(at, self.core.shards()) != self.shard || !region.enter() {
                continue;
            }
            let healed = region.words.try_apply(at, protocol::heal).is_some();
            let on_fault = if healed {
                OnFault::Fill
            } else {
                region.words.apply(at, protocol::fault)
            };
            match on_fault {
                OnFault::Fill => {
                    let with = Plan::up(page..pages.end);
                    page = self.begin(region.clone(), at, with).end;
                }
                OnFault::Noted => {
                    self.map_held(region, at);
                    self.core.noted(region, at);
                    region.exit();
                }
                // The program may have given the page back to the kernel, and wants it now.
                OnFault::Stale => self.stale(region.clone(), at, region.address_of(at)),
            }
        }
    }

    /// The region is closing: owned pages of it that nothing will complete are published as they are.
    fn give_up(&mut self, region: &Arc<Region>) {
        self.wishes.retain(|wish| wish.region.id != region.id);
        let (waiting, backlog): (VecDeque<_>, VecDeque<_>) = mem::take(&mut self.backlog)
            .into_iter()
            .partition(|(waiting, _)| waiting.region.id == region.id);
        self.backlog = backlog;
        for (waiting, since) in waiting {
            self.starve(waiting, since);
        }
        for at in (0..self.held.len()).rev() {
            if self.held[at].0.region.id == region.id {
                self.let_go(at);
            }
        }
        if self
            .last_region
            .as_ref()
            .is_some_and(|last| last.id == region.id)
        {
            self.last_region = None;
        }
    }

    /// Nothing is under way, and nothing is kept.
    #[cfg(test)]
    pub(crate) fn is_at_rest(&self) -> bool {
        self.is_idle()
            && self.wishes.is_empty()
            && self.held.is_empty()
            && self.bytes_in_flight == 0
    }

    /// What others wake it with.
    pub(crate) fn bell<'a>(&self, core: &'a Core<A>) -> &'a Bell {
        &core.fillers[self.shard].bell
    }

    /// Something is under way, so that the next turn may find something to do.
    pub(crate) fn has_work(&self) -> bool {
        !self.is_idle() || !self.wishes.is_empty()
    }

    /// Somebody asked for something that it has not looked at, or for what it holds back.
    pub(crate) fn is_called(&self) -> bool {
        !self.inbox.is_empty() || !self.held.is_empty() && self.core.frames.is_starving()
    }

    /// Whether a descriptor tells when there are faults. It is the first one of [`wait`](Self::wait) then.
    pub(crate) fn is_told_of_faults(&self) -> bool {
        self.core.space.fault_fd(self.shard).is_some()
    }

    /// Appends the descriptors to sleep on; returns when to take a turn at the latest.
    pub(crate) fn wait<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> {
        if let Some(fd) = self.core.space.fault_fd(self.shard) {
            fds.push(PollFd::new(fd, PollFlags::POLLIN));
        }
        let mut until = self.lane.wait(fds);
        if !self.backlog.is_empty() {
            let retry = Instant::now() + crate::worker::RETRY;
            until = Some(until.map_or(retry, |at| at.min(retry)));
        }
        until
    }
}
