//! The owner of one shard: [`Filler`], which reads its faults and its mail.
//!
//! A fault takes one hand-off, from the kernel to the filler that sleeps in its shard's
//! userfaultfd. The fill that follows is in `fills.rs`; pages and plans kept for later are in
//! `held_back.rs` and `prefetch_queue.rs`.
//!
//! The rule: a filler waits only in the sleep of its thread (`executor.rs`), and never touches the
//! program's memory.

use std::{
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
    ahead::ReadAhead,
    doors::{Ask, Command, FillerInbox},
    fills::{FillCompletion, Fills},
    freeze::Entered,
    held_back::HeldBack,
    in_thread::InThread,
    pace::Pace,
    prefetch_queue::PrefetchQueue,
    protocol,
    region::{Region, RegionGuard, chunk_of, chunks_of},
    requests::Fill,
    run::PageRun,
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
