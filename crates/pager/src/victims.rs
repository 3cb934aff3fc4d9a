//! Choosing victims: [`Victims`], and the detaching of pages. Shared by all that take pages out.
//!
//! Two sources name candidates. [`DropBehind`] has the pages that streams have gone through. A loop
//! over more data than fits never hits under FIFO: each page leaves just before it is needed again.
//! The opposite is right for a loop: the pages just gone through leave, and the rest stays until
//! the program comes along again. So pages that a stream has gone through wait for a while, since
//! the next row of a grid looks at the last one once more. Then they leave before other pages do.
//! The frames of streams circulate in little memory, which the caches may hold.
//!
//! [`ClockHand`] sweeps the words of all regions in address order. Userspace paging has no access
//! bits, and asking the kernel for them costs more than most evictions. The page words say when a
//! page came in (its stamp), and if it came back soon after it had left or was wanted while it left
//! (its usage count). So there is no list of resident pages to keep, lock and update on every fill.
//! The hand passes over pages younger than the *age floor*, lowers the usage counts of others, and
//! gives pages with none. Neighbours in memory leave together. The floor rises while most pages are
//! old enough, so that the order approaches first in, first out; it falls when the hand finds too
//! few. The downside: a page that is hot without ever leaving is not known to be hot, so that it
//! leaves and comes back once. A page that was hot stays for a while: its usage count falls by one
//! with each pass.
//!
//! The rule: a page is looked at as a victim only in its word, and touched only when it is owned as
//! `Leaving`. A page that was not taken out is mapped as before. The caller decides what becomes of
//! a page that was taken out.

use std::{
    collections::VecDeque,
    ops::{Bound, Range},
    sync::{Arc, Mutex, MutexGuard},
};

use farpage_store::{PageIndex, PageRange};
use farpage_vm::{AddressSpace, DetachError, RUN_PAGES_MAX, SCATTERED_PAGES_MAX};
use smallvec::SmallVec;

use crate::{
    clock::{FillClock, FoundBy, Proof},
    frames::FrameAllocator,
    freeze::Entered,
    mapper::{Mapper, Runs},
    protocol::{self, PageState, PageWord},
    region::{CHUNK_PAGES, Region, RegionGuard, RegionTable, chunk_of},
    run::PageRun,
};

/// Pages to look through for victims. Only the holder looks through them meanwhile.
#[derive(Debug)]
pub(crate) struct Candidates {
    pub(crate) region: Arc<Region>,
    /// Pages of one chunk, or pages that a stream has gone through.
    pub(crate) pages: PageRange,
    /// Lowest age of a victim: younger pages stay.
    pub(crate) age_floor: u32,
    pub(crate) found_by: FoundBy,
}

/// Reason why the first of some pages was not taken out.
pub(crate) enum NotTaken {
    /// The page has another owner, or the kernel does not give it, and why. Text is made of that
    /// where threads may allocate: handlers of faults take pages out, too.
    NotNow(Option<DetachError>),
    /// The page is not here to be taken out.
    NotHere,
}

/// Outcome of dropping pages.
#[derive(Default)]
pub(crate) struct Dropped {
    /// Number of pages that are gone.
    pub(crate) pages: usize,
    /// First page that the kernel does not drop. Taking it out says why, or does it.
    pub(crate) refused: Option<PageIndex>,
}

/// Pages of all regions, as far as they may leave.
pub(crate) struct Victims<A: AddressSpace> {
    mapper: Arc<Mapper<A>>,
    frames: Arc<FrameAllocator<A>>,
    regions: Arc<RegionTable>,
    clock: Arc<FillClock>,
    clock_hand: ClockHand,
    drop_behind: DropBehind,
}

impl<A: AddressSpace> Victims<A> {
    pub(crate) fn new(
        mapper: Arc<Mapper<A>>,
        frames: Arc<FrameAllocator<A>>,
        regions: Arc<RegionTable>,
        clock: Arc<FillClock>,
    ) -> Self {
        let budget_ticks = clock.budget_ticks();
        Victims {
            mapper,
            frames,
            regions,
            clock,
            clock_hand: ClockHand::new(budget_ticks),
            drop_behind: DropBehind::new(budget_ticks),
        }
    }

    /// Takes note of pages that a stream has gone through. Allocates nothing.
    pub(crate) fn passed(&self, region: &Region, pages: PageRange) {
        let addresses = region.address_of(pages.start)..region.address_of(pages.end);
        self.drop_behind.passed(addresses);
    }

    /// Returns pages to look through for victims: of streams, or of the clock hand.
    pub(crate) fn candidates(&self) -> Option<Candidates> {
        let streams = self.clock.proof.streams_go_first();
        let candidates = streams
            .then(|| self.drop_behind.candidates(&self.regions))
            .flatten();
        candidates.or_else(|| self.clock_hand.candidates(&self.regions))
    }

    /// Returns the stamp of a page that leaves now.
    pub(crate) fn stamp(&self, found_by: FoundBy) -> u32 {
        Proof::stamp(found_by, self.clock.now())
    }

    /// Owns the leading ones of `pages` by `own` and detaches them. All lie in one stripe. The
    /// caller is inside the reclaim gate until the pages are published.
    pub(crate) fn take_out(
        &self,
        _inside: &Entered<'_>,
        region: &Arc<Region>,
        pages: PageRange,
        own: impl Fn(PageWord) -> Option<PageWord> + Copy,
    ) -> Result<(RegionGuard, PageRun<A::Frame>), NotTaken> {
        let region = region.enter().ok_or(NotTaken::NotHere)?;
        let (first, owned) = (pages.start, region.own(pages, own));
        if owned.is_empty() {
            let word = region.words.load(first);
            // A page being filled has nothing that is not in the store, until it is mapped; one
            // that leaves may.
            let is_here = word.installing()
                || matches!(word.state(), PageState::Leaving | PageState::Resident);
            return Err(match is_here {
                true => NotTaken::NotNow(None),
                false => NotTaken::NotHere,
            });
        }
        let detached = self.mapper.detach(&region, owned);
        // Pages that the kernel did not give with the rest get their own answer next time.
        let taken = detached.as_ref().map_or(1, PageRun::len);
        self.stay(&region, (first + taken).until(owned.end));
        match detached {
            Ok(run) => Ok((region, run)),
            Err(DetachError::Absent) => {
                // The program gave the page back to the kernel. What was written back last is the
                // page now.
                self.frames.budget().lose(region.page_bytes());
                self.remove(&region, first.alone(), self.clock.now());
                Err(NotTaken::NotHere)
            }
            Err(error) => {
                self.stay(&region, first.alone());
                Err(NotTaken::NotNow(Some(error)))
            }
        }
    }

    /// Publishes pages of a run as remote that `is_safe` says are safe, unless they are wanted or
    /// pinned, and gives their frames back. `stays` gets the others, which the caller still owns.
    /// Returns the number of pages that are gone.
    pub(crate) fn leave(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
        stamp: u32,
        is_safe: impl Fn(PageIndex, &[u8]) -> bool,
        mut stays: impl FnMut(PageRun<A::Frame>),
    ) -> usize {
        let first = run.first();
        let leave = |(page, bytes)| is_safe(page, bytes) && region.leave(page, stamp);
        // Settled once per page: a page that is gone has another owner from here on.
        let gone: SmallVec<[bool; RUN_PAGES_MAX]> = run.bytes_by_page().map(leave).collect();
        run.cut(
            |page| gone[page - first],
            |run, gone| match gone {
                true => self.frames.release(run.into_frame(), region.page_bytes()),
                false => stays(run),
            },
        );
        gone.iter().filter(|&&gone| gone).count()
    }

    /// Owns and drops pages of `runs`, ascending runs of a read-only region, as far as it can.
    ///
    /// A page becomes remote when it is gone, not before. A thread that touches it in between finds
    /// it there, or faults and leaves a note; the thread is woken, and its next fault fills the
    /// page.
    pub(crate) fn drop_runs(
        &self,
        _inside: &Entered<'_>,
        region: &Arc<Region>,
        runs: &[PageRange],
        found_by: FoundBy,
    ) -> Dropped {
        let mut dropped = Dropped::default();
        let Some(region) = region.enter() else {
            return dropped;
        };
        let mut owned = Runs::new();
        for run in runs {
            let mut page = run.start;
            while page < run.end && owned.len() < SCATTERED_PAGES_MAX {
                let mine = region.own(page.until(run.end), protocol::leave);
                page = mine.end + 1;
                if !mine.is_empty() {
                    owned.push(mine);
                }
            }
        }
        for runs in owned.chunk_by(|a, b| region.stripe_of(a.start) == region.stripe_of(b.start)) {
            let gone = self.mapper.drop_runs(&region, runs);
            for run in &runs[..gone] {
                self.frames.lose(run.len() * region.page_bytes());
                dropped.pages += run.len();
                self.remove(&region, *run, self.stamp(found_by));
            }
            for run in &runs[gone..] {
                dropped.refused.get_or_insert(run.start);
                self.stay(&region, *run);
            }
        }
        dropped
    }

    /// Drops victims of the candidates while there is need: see [`drop_runs`](Self::drop_runs).
    pub(crate) fn drop_candidates(&self, inside: &Entered<'_>, candidates: &Candidates) -> Dropped {
        let mut walk = Walk::new(self, candidates);
        let mut left = (self.frames.budget()).excess_pages(candidates.region.page_bytes());
        let mut runs = Runs::new();
        while left > 0
            && runs.len() < SCATTERED_PAGES_MAX
            && let Some(run) = walk.next(left)
        {
            left -= run.len();
            runs.push(run);
        }
        let dropped = self.drop_runs(inside, &candidates.region, &runs, candidates.found_by);
        walk.took(dropped.pages);
        walk.end();
        dropped
    }

    /// Publishes owned pages that are not mapped as remote, even if they are wanted. Wakes waiting
    /// threads, which fault again.
    pub(crate) fn remove(&self, region: &Region, pages: PageRange, stamp: u32) {
        for page in pages {
            if region.words.apply(page, |w| protocol::removed(w, stamp)) {
                self.mapper.wake(region, page.alone());
            }
        }
    }

    /// Publishes owned pages that were not taken out: they are mapped as before.
    pub(crate) fn stay(&self, region: &Region, pages: PageRange) {
        for page in pages {
            if region
                .words
                .apply(page, |w| (protocol::stayed(w), w.wanted()))
            {
                self.mapper.wake(region, page.alone());
            }
        }
    }
}

/// Walk over candidates.
pub(crate) struct Walk<'a, A: AddressSpace> {
    victims: &'a Victims<A>,
    candidates: &'a Candidates,
    /// Next page to look at.
    page: PageIndex,
    seen: usize,
    taken: usize,
}

impl<'a, A: AddressSpace> Walk<'a, A> {
    pub(crate) fn new(victims: &'a Victims<A>, candidates: &'a Candidates) -> Self {
        Walk {
            victims,
            candidates,
            page: candidates.pages.start,
            seen: 0,
            taken: 0,
        }
    }

    /// Returns the next victims that lie together, at most `most`. `None`: there are no more.
    pub(crate) fn next(&mut self, most: usize) -> Option<PageRange> {
        let region = &self.candidates.region;
        while self.page < self.candidates.pages.end {
            let window = self.page.and_on(region.run_pages.min(most));
            let window = region.in_one_stripe(window.within(self.candidates.pages), false);
            let now = self.victims.clock.now();
            let spared = window.iter().find(|&page| !self.is_victim(page, now));
            let run = self.page.until(spared.unwrap_or(window.end));
            self.page = run.end + usize::from(spared.is_some());
            if !run.is_empty() {
                return Some(run);
            }
        }
        None
    }

    /// Counts pages that have been taken out.
    pub(crate) fn took(&mut self, pages: usize) {
        self.taken += pages;
    }

    /// Ends the walk: pages not looked at are left to others. Returns whether any page was taken.
    pub(crate) fn end(self) -> bool {
        let Walk {
            victims,
            candidates,
            ..
        } = self;
        if self.page < candidates.pages.end {
            match candidates.found_by {
                FoundBy::Stream => victims.drop_behind.stop_at(candidates, self.page),
                FoundBy::ClockHand => victims.clock_hand.stop_at(candidates, self.page),
            }
        }
        let page_bytes = candidates.region.page_bytes();
        let taken_bytes = self.taken * page_bytes;
        victims.clock.proof.leave(candidates.found_by, taken_bytes);
        if candidates.found_by == FoundBy::ClockHand {
            let used = victims.frames.budget().used() as usize;
            (victims.clock_hand).report(self.seen * page_bytes, taken_bytes, used);
        }
        self.taken > 0
    }

    /// True if a page shall leave. Lowers the usage count of a page that has one.
    fn is_victim(&mut self, page: PageIndex, now: u32) -> bool {
        let words = &self.candidates.region.words;
        let word = words.load(page);
        if word.state() != PageState::Resident || word.pinned() {
            return false;
        }
        self.seen += 1;
        if now.wrapping_sub(word.stamp()) < self.candidates.age_floor {
            return false;
        }
        if word.usage() > 0 {
            words.try_apply(page, |w| (w == word).then(|| protocol::passed_over(w, now)));
            return false;
        }
        true
    }
}

/// Clock hand over all pages of a runtime.
#[derive(Debug)]
pub(crate) struct ClockHand {
    /// Hand under a lock of the standard library, which never allocates: threads look for victims
    /// in a signal handler, too.
    hand: Mutex<HandState>,
    /// Upper bound of the age floor, in ticks of the fill clock: a part of the budget, since few
    /// pages stay older for long.
    age_cap: u32,
}

#[derive(Debug)]
struct HandState {
    /// Address of a region; `page` is the page in it that is next.
    address: usize,
    page: PageIndex,
    age_floor: u32,
    seen: usize,
    taken: usize,
}

impl ClockHand {
    /// Returns a hand for a budget that `budget_ticks` ticks of the fill clock fill once.
    pub(crate) fn new(budget_ticks: u32) -> ClockHand {
        let age_cap = budget_ticks / 4 * 3;
        ClockHand {
            hand: Mutex::new(HandState {
                address: 0,
                page: PageIndex(0),
                age_floor: age_cap,
                seen: 0,
                taken: 0,
            }),
            age_cap,
        }
    }

    fn hand(&self) -> MutexGuard<'_, HandState> {
        self.hand.lock().expect("nothing panics under this lock")
    }

    /// Moves the hand past the next chunk that may hold resident pages, or past the rest of one,
    /// and returns its pages. `None`: no region has any.
    pub(crate) fn candidates(&self, regions: &RegionTable) -> Option<Candidates> {
        let mut hand = self.hand();
        let regions = regions.read();
        // Twice around at most: the first time from where the hand stands, the second from the
        // start.
        for _ in 0..2 {
            for (&address, region) in
                regions.range((Bound::Included(hand.address), Bound::Unbounded))
            {
                let from = if address == hand.address {
                    hand.page
                } else {
                    PageIndex(0)
                };
                if region.resident() == 0 || region.is_closing() {
                    continue;
                }
                if let Some(chunk) = region.next_resident(chunk_of(from)) {
                    (hand.address, hand.page) = (address, PageIndex((chunk + 1) * CHUNK_PAGES));
                    let pages = region.chunk(chunk);
                    return Some(Candidates {
                        region: region.clone(),
                        pages: pages.start.max(from).until(pages.end),
                        age_floor: hand.age_floor,
                        found_by: FoundBy::ClockHand,
                    });
                }
            }
            (hand.address, hand.page) = (0, PageIndex(0));
        }
        None
    }

    /// Moves the hand back to `page`, the first candidate that was not looked at: enough pages
    /// leave. Otherwise the rest of each chunk would be passed over, and under a small budget the
    /// same few pages would leave again and again.
    pub(crate) fn stop_at(&self, candidates: &Candidates, page: PageIndex) {
        let mut hand = self.hand();
        let behind = PageIndex(candidates.pages.end.0.next_multiple_of(CHUNK_PAGES));
        if (hand.address, hand.page) == (candidates.region.address, behind) {
            hand.page = page;
        }
    }

    /// Adjusts the age floor by how many resident candidates were seen and how many leave.
    pub(crate) fn report(&self, seen: usize, taken: usize, resident_in_all: usize) {
        let mut hand = self.hand();
        hand.seen += seen;
        hand.taken += taken;
        // A quarter of all pages looked at is evidence enough.
        if hand.seen * 4 >= resident_in_all {
            if hand.taken * 16 < hand.seen {
                hand.age_floor /= 2;
            } else if hand.taken * 2 > hand.seen {
                hand.age_floor = (hand.age_floor + hand.age_floor / 8 + 1).min(self.age_cap);
            }
            (hand.seen, hand.taken) = (0, 0);
        }
    }
}

/// A stretch stays until this share of the budget was gone through after it, and at least
/// `GRACE_BYTES_MIN` or half the budget: programs go through several arrays at once and come back
/// to rows.
const GRACE_SHARE: usize = 16;
const GRACE_BYTES_MIN: usize = 8 << 20;
/// Share of the budget after the grace: a stretch that has not left by then counts as staying.
const SLACK_SHARE: usize = 8;
/// Upper bound of the stretches in the queue; most are of megabytes.
const STRETCHES_MAX: usize = 1024;

/// Stretches that streams have gone through, in order.
pub(crate) struct DropBehind {
    /// Queue under a lock of the standard library, which never allocates: for signal handlers.
    queue: Mutex<Queue>,
    grace_bytes: usize,
    queue_bytes_max: usize,
}

struct Queue {
    /// Address ranges, the ones gone through longest ago first.
    stretches: VecDeque<Range<usize>>,
    bytes: usize,
}

impl DropBehind {
    /// Returns an empty queue for a budget of `budget_ticks` units of 4 KiB.
    pub(crate) fn new(budget_ticks: u32) -> DropBehind {
        let budget_bytes = (budget_ticks as usize) << 12;
        let grace_bytes = (budget_bytes / GRACE_SHARE).max(GRACE_BYTES_MIN.min(budget_bytes / 2));
        DropBehind {
            queue: Mutex::new(Queue {
                stretches: VecDeque::with_capacity(STRETCHES_MAX),
                bytes: 0,
            }),
            grace_bytes,
            queue_bytes_max: grace_bytes + budget_bytes / SLACK_SHARE,
        }
    }

    /// Appends addresses of one region that a stream has gone through. Allocates nothing.
    pub(crate) fn passed(&self, addresses: Range<usize>) {
        let mut queue = self.queue();
        while queue.stretches.len() == STRETCHES_MAX {
            queue.pop();
        }
        queue.bytes += addresses.len();
        queue.stretches.push_back(addresses);
        while queue.bytes > self.queue_bytes_max {
            queue.pop();
        }
    }

    /// Returns the pages that a stream went through longest ago, if their grace is over.
    pub(crate) fn candidates(&self, regions: &RegionTable) -> Option<Candidates> {
        let regions = regions.read();
        let mut queue = self.queue();
        while queue.bytes > self.grace_bytes {
            let addresses = queue.pop()?;
            let Some((_, region)) = regions.range(..=addresses.start).next_back() else {
                continue;
            };
            if !region.is_closing() && region.contains(addresses.end - 1) {
                return Some(Candidates {
                    region: region.clone(),
                    pages: (region.page_at(addresses.start))
                        .until(region.page_at(addresses.end - 1) + 1),
                    age_floor: 0,
                    found_by: FoundBy::Stream,
                });
            }
        }
        None
    }

    /// Puts the candidates from `page` on back: enough pages leave already.
    pub(crate) fn stop_at(&self, candidates: &Candidates, page: PageIndex) {
        let rest =
            candidates.region.address_of(page)..candidates.region.address_of(candidates.pages.end);
        let mut queue = self.queue();
        if queue.stretches.len() < STRETCHES_MAX {
            queue.bytes += rest.len();
            queue.stretches.push_front(rest);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under this lock")
    }
}

impl Queue {
    fn pop(&mut self) -> Option<Range<usize>> {
        let first = self.stretches.pop_front()?;
        self.bytes -= first.len();
        Some(first)
    }
}
