//! Bringing pages in: [`Filler`], the owner of one shard.
//!
//! A fault takes one hand-off, from the kernel to the filler that sleeps in its shard's userfaultfd:
//!
//! 1. read the faults, and own their pages (`Remote` to `Filling`);
//! 2. take a frame for each and post its READ, demand before read-ahead;
//! 3. poll; a page that is complete and verified is mapped, which wakes its threads, and published (`Filling` to `Resident`).
//!
//! A fill that finds no frame waits in the backlog, still owned, and evictors are rung. The rule: a filler never waits for anything
//! but in [`Filler::sleep`], and never touches the program's memory.

use std::{
    collections::VecDeque,
    mem,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use crossbeam_channel::Receiver;
use farpage_store::{Done, Lane};
use farpage_vm::{AddressSpace, DetachError, Fault};

use crate::{
    Advice, PageError,
    ahead::{STREAMS, Streams},
    core::{Command, Core, Heat},
    protocol::{self, OnFault},
    region::Region,
    slab::Slab,
    stats::Counters,
};

/// READs that one filler keeps in flight for pages that nobody waits for yet.
const PREFETCH_DEPTH: usize = 32;

pub(crate) struct Filler<A: AddressSpace> {
    core: Arc<Core<A>>,
    shard: usize,
    lane: Lane<A::Frame>,
    mail: Receiver<Command>,
    deadline: Duration,
    streams: Streams,
    flights: Slab<Flight>,
    /// Owned pages that wait for a frame, in the order of their faults.
    backlog: VecDeque<Waiting>,
    /// Owned pages with a frame that the lane was too busy to take.
    unposted: VecDeque<(Flight, A::Frame)>,
    /// Pages to bring in when there is room; not owned yet.
    wishes: VecDeque<Wish>,
    /// Complete pages of triggers, held back until the program comes along.
    held: Vec<(Flight, A::Frame)>,
    last_region: Option<Arc<Region>>,
    faults: Vec<Fault>,
    done: Vec<Done<A::Frame>>,
}

/// A page that this filler owns as `Filling`. Its region has been entered.
#[derive(Debug)]
struct Flight {
    region: Arc<Region>,
    page: usize,
    heat: Heat,
    /// The trigger of a stream: held back when complete.
    trigger: bool,
}

#[derive(Debug)]
struct Waiting {
    flight: Flight,
    since: Instant,
}

#[derive(Debug)]
struct Wish {
    region: Arc<Region>,
    pages: Range<usize>,
    /// Whether the first page is a stream's trigger.
    trigger: bool,
}

impl<A: AddressSpace> Filler<A> {
    pub(crate) fn new(
        core: Arc<Core<A>>,
        shard: usize,
        lane: Lane<A::Frame>,
        mail: Receiver<Command>,
        deadline: Duration,
    ) -> Self {
        Filler {
            core,
            shard,
            lane,
            mail,
            deadline,
            streams: Streams::default(),
            flights: Slab::default(),
            backlog: VecDeque::new(),
            unposted: VecDeque::new(),
            wishes: VecDeque::new(),
            held: Vec::new(),
            last_region: None,
            faults: Vec::with_capacity(64),
            done: Vec::with_capacity(64),
        }
    }

    fn counters(&self) -> &Counters {
        &self.core.counters[self.shard]
    }

    /// Does what can be done without waiting. Returns whether anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = self.read_faults();
        busy |= self.read_mail();
        busy |= self.serve_backlog();
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
        any
    }

    fn on_fault(&mut self, address: usize) {
        // No region, or one that is closing: its addresses are being given up, and nobody may be using them.
        let Some(region) = self.region_at(address) else {
            return;
        };
        if !region.enter() {
            return;
        }
        let page = region.page_at(address);
        let on_fault = region.words.apply(page, protocol::fault);
        match on_fault {
            OnFault::Fill => self.begin(Flight {
                region: region.clone(),
                page,
                heat: Heat::Refault,
                trigger: false,
            }),
            OnFault::Noted => {
                self.map_held(&region, page);
                region.exit();
            }
            OnFault::Stale => self.stale(region.clone(), page, address),
        }
        self.read_ahead(&region, page, on_fault == OnFault::Fill);
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
        if !self.core.space.is_present(touched) {
            let flight = Flight {
                region: region.clone(),
                page,
                heat: Heat::Refault,
                trigger: false,
            };
            if region.words.try_apply(page, protocol::vanished).is_some() {
                // Only now that the page is ours does a look at it count: an evictor may just have put it back.
                match self.core.space.detach(self.shard, address, page_bytes) {
                    Ok(rest) => {
                        region.count_out();
                        return self.map(flight, rest);
                    }
                    Err(DetachError::Absent) => {
                        region.count_out();
                        self.core.frames.forget(page_bytes);
                        return self.begin(flight);
                    }
                    Err(_) => self.core.publish(&region, page, Heat::Refault),
                }
            } else if region.words.try_apply(page, protocol::heal).is_some() {
                return self.begin(flight);
            }
        }
        self.counters().stale_faults.bump();
        self.core.space.wake(self.shard, address, page_bytes);
        region.exit();
    }

    /// Starts to fill an owned page that somebody waits for.
    fn begin(&mut self, flight: Flight) {
        // Who came before goes before.
        if self.backlog.is_empty()
            && let Some(frame) = self.core.frames.for_demand(flight.region.page_bytes())
        {
            if self.core.frames.above_high() {
                self.core.ring_evictors();
            }
            return self.post(flight, frame);
        }
        self.counters().starved.bump();
        self.backlog.push_back(Waiting {
            flight,
            since: Instant::now(),
        });
        self.core.ring_evictors();
        self.core.ring_fillers();
    }

    fn serve_backlog(&mut self) -> bool {
        if self.backlog.is_empty() {
            return false;
        }
        self.core.frames.retry_demand();
        let mut any = false;
        while let Some(waiting) = self.backlog.pop_front() {
            let page_bytes = waiting.flight.region.page_bytes();
            if let Some(frame) = self.core.frames.for_demand(page_bytes) {
                self.post(waiting.flight, frame);
                any = true;
            } else if waiting.since.elapsed() > self.deadline {
                self.starve(waiting);
                any = true;
            } else {
                self.backlog.push_front(waiting);
                self.core.ring_evictors();
                break;
            }
        }
        any
    }

    /// A fill found no frame for too long.
    fn starve(&mut self, Waiting { flight, since }: Waiting) {
        let (region, page) = (flight.region.id, flight.page as u64);
        let waited = since.elapsed();
        self.fail(
            flight,
            PageError::NoFrame {
                region,
                page,
                waited,
            },
        );
    }

    fn post(&mut self, flight: Flight, frame: A::Frame) {
        let (store, page) = (flight.region.store.clone(), flight.page as u64);
        let tag = self.flights.insert(flight);
        if let Err(frame) = self.lane.fill(&store, page, frame, tag) {
            let flight = self.flights.remove(tag);
            self.unposted.push_back((flight, frame));
        }
    }

    fn post_unposted(&mut self) -> bool {
        let mut any = false;
        for _ in 0..self.unposted.len() {
            let (flight, frame) = self
                .unposted
                .pop_front()
                .expect("the loop runs over its length");
            let before = self.unposted.len();
            self.post(flight, frame);
            if self.unposted.len() > before {
                // Still too busy; it went to the back, bring it to the front again.
                self.unposted.rotate_right(1);
                break;
            }
            any = true;
        }
        any
    }

    fn settle(&mut self, done: Done<A::Frame>) {
        let flight = self.flights.remove(done.tag);
        match done.outcome {
            Ok(_) if flight.trigger && !self.is_wanted(&flight) && !flight.region.is_closing() => {
                self.hold(flight, done.frame)
            }
            Ok(_) => self.map(flight, done.frame),
            Err(error) => {
                self.core.release(done.frame, flight.region.page_bytes());
                self.fail(flight, error.into());
            }
        }
    }

    /// Some filler finds no frame: what is held back is mapped, so that it can be evicted.
    fn lend_held(&mut self) -> bool {
        if self.held.is_empty() || !self.core.frames.is_starving() {
            return false;
        }
        mem::take(&mut self.held)
            .into_iter()
            .for_each(|(flight, frame)| self.map(flight, frame));
        true
    }

    /// Keeps a trigger unmapped; the one held longest makes room, for its stream has ended.
    fn hold(&mut self, flight: Flight, frame: A::Frame) {
        if self.held.len() == STREAMS {
            let (oldest, frame) = self.held.remove(0);
            self.map(oldest, frame);
        }
        self.held.push((flight, frame));
    }

    fn is_wanted(&self, flight: &Flight) -> bool {
        flight.region.words.load(flight.page).wanted()
    }

    /// Maps a complete page and publishes it.
    fn map(&mut self, flight: Flight, frame: A::Frame) {
        match self
            .core
            .install(&flight.region, flight.page, frame, flight.heat)
        {
            Ok(()) => {
                self.counters().fills.bump();
                if flight.heat == Heat::Cold {
                    self.counters().prefetches.bump();
                }
                flight.region.exit();
            }
            Err((frame, error)) => {
                self.core.release(frame, flight.region.page_bytes());
                let (region, page) = (flight.region.id, flight.page as u64);
                self.fail(
                    flight,
                    PageError::Os {
                        what: "map",
                        region,
                        page,
                        message: error.to_string(),
                    },
                );
            }
        }
    }

    fn fail(&mut self, flight: Flight, error: PageError) {
        if self.core.fail_fill(&flight.region, flight.page, error) {
            self.counters().poisoned.bump();
        }
        flight.region.exit();
    }

    /// `missed`: the page was not on its way.
    fn read_ahead(&mut self, region: &Arc<Region>, page: usize, missed: bool) {
        let advice = region.advice();
        if advice == Advice::Random {
            return;
        }
        if let Some(plan) = self.streams.fault(
            region.id,
            page,
            region.read_ahead,
            advice == Advice::Sequential,
            missed,
        ) {
            let pages = plan.ahead.start.min(region.pages())..plan.ahead.end.min(region.pages());
            if !pages.is_empty() {
                self.wishes.push_back(Wish {
                    region: region.clone(),
                    pages,
                    trigger: true,
                });
            }
        }
    }

    /// Posts READs for pages that nobody waits for yet, as far as frames and the lane allow.
    fn serve_wishes(&mut self) -> bool {
        let mut any = false;
        while self.backlog.is_empty()
            && self.unposted.is_empty()
            && self.flights.len() < PREFETCH_DEPTH
        {
            let Some(wish) = self.wishes.front_mut() else {
                break;
            };
            let (page, trigger) = (wish.pages.next(), mem::take(&mut wish.trigger));
            let Some(page) = page.filter(|_| !wish.region.is_closing()) else {
                self.wishes.pop_front();
                continue;
            };
            let region = wish.region.clone();
            if region.shard_of(page, self.core.shards()) != self.shard
                || region.words.load(page).state() != protocol::State::Remote
            {
                continue;
            }
            let Some(frame) = self.core.frames.for_prefetch(region.page_bytes()) else {
                // No room for guesses. Those that come too late are worth nothing: forget them.
                self.core.ring_evictors();
                self.wishes.clear();
                break;
            };
            if region.enter() {
                if region.words.try_apply(page, protocol::prefetch).is_some() {
                    self.post(
                        Flight {
                            region,
                            page,
                            heat: Heat::Cold,
                            trigger,
                        },
                        frame,
                    );
                    any = true;
                    continue;
                }
                region.exit();
            }
            self.core.release(frame, region.page_bytes());
        }
        any
    }

    /// A fault was noted on a page that is held back: the program has come along.
    fn map_held(&mut self, region: &Arc<Region>, page: usize) {
        if let Some(at) = self
            .held
            .iter()
            .position(|(flight, _)| flight.page == page && flight.region.id == region.id)
        {
            let (flight, frame) = self.held.remove(at);
            self.map(flight, frame);
        }
    }

    fn read_mail(&mut self) -> bool {
        let mut any = false;
        while let Ok(command) = self.mail.try_recv() {
            any = true;
            match command {
                Command::Prefetch(region, pages) => self.wishes.push_back(Wish {
                    region,
                    pages,
                    trigger: false,
                }),
                Command::Demand(region, pages, taken_on) => {
                    self.demand(&region, pages);
                    taken_on.fetch_add(1, Ordering::Release);
                }
                Command::Settle(region) => self.give_up(&region),
            }
        }
        any
    }

    /// The program waits for these pages as if it had touched them; poisoned ones are tried again.
    fn demand(&mut self, region: &Arc<Region>, pages: Range<usize>) {
        for page in pages {
            if region.shard_of(page, self.core.shards()) != self.shard || !region.enter() {
                continue;
            }
            let healed = region.words.try_apply(page, protocol::heal).is_some();
            if healed || region.words.apply(page, protocol::fault) == OnFault::Fill {
                self.begin(Flight {
                    region: region.clone(),
                    page,
                    heat: Heat::Refault,
                    trigger: false,
                });
            } else {
                self.map_held(region, page);
                region.exit();
            }
        }
    }

    /// The region is closing: owned pages of it that nothing will complete are published as they are.
    fn give_up(&mut self, region: &Arc<Region>) {
        self.wishes.retain(|wish| wish.region.id != region.id);
        let (waiting, backlog): (VecDeque<_>, VecDeque<_>) = mem::take(&mut self.backlog)
            .into_iter()
            .partition(|waiting| waiting.flight.region.id == region.id);
        self.backlog = backlog;
        waiting.into_iter().for_each(|waiting| self.starve(waiting));
        let (closing, held) = mem::take(&mut self.held)
            .into_iter()
            .partition::<Vec<_>, _>(|(flight, _)| flight.region.id == region.id);
        self.held = held;
        for (flight, frame) in closing {
            self.map(flight, frame);
        }
        if self
            .last_region
            .as_ref()
            .is_some_and(|last| last.id == region.id)
        {
            self.last_region = None;
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&mut self) {
        let bell = &self.core.fillers[self.shard].bell;
        bell.prepare();
        if !self.mail.is_empty() || self.core.is_stopping() {
            return bell.cancel();
        }
        let mut fds = Vec::with_capacity(4);
        if let Some(fd) = self.core.space.fault_fd(self.shard) {
            fds.push(nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN));
        }
        let mut until = self.lane.wait(&mut fds);
        if !self.backlog.is_empty() {
            let retry = Instant::now() + crate::worker::RETRY;
            until = Some(until.map_or(retry, |at| at.min(retry)));
        }
        bell.sleep(fds, until);
    }
}
