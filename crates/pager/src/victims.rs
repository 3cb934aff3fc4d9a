//! Choosing victims and detaching them: [`Victims`]. Shared by evictors and by in-thread faults.
//!
//! The rule: a page is looked at as a victim only in its word, and touched only when it is owned as
//! `Leaving`. A page that was not taken out is mapped as before. The caller decides what becomes of
//! a page that was taken out.

use std::sync::Arc;

use farpage_store::{PageIndex, PageRange};
use farpage_vm::{AddressSpace, DetachError, SCATTERED_PAGES_MAX};

use crate::{
    candidates::{Candidates, FoundBy},
    clock::FillClock,
    clock_hand::ClockHand,
    drop_behind::DropBehind,
    frames::FrameAllocator,
    freeze::Entered,
    mapper::{Mapper, Runs},
    proof::Proof,
    protocol::{self, PageState, PageWord},
    region::RegionTable,
    region::{Region, RegionGuard},
    run::PageRun,
};

/// Outcome of trying to take out the leading ones of some pages.
pub(crate) enum DetachOutcome<F> {
    /// Run that the caller owns, as `Leaving`.
    Taken(RegionGuard, PageRun<F>),
    /// The first page has another owner.
    NotNow,
    /// The kernel does not give the first page.
    Refused(DetachError),
    /// The first page is not here to be taken out.
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
    proof: Arc<Proof>,
    clock_hand: ClockHand,
    drop_behind: DropBehind,
}

impl<A: AddressSpace> Victims<A> {
    pub(crate) fn new(
        mapper: Arc<Mapper<A>>,
        frames: Arc<FrameAllocator<A>>,
        regions: Arc<RegionTable>,
        clock: Arc<FillClock>,
        proof: Arc<Proof>,
    ) -> Self {
        let budget_ticks = clock.budget_ticks();
        Victims {
            mapper,
            frames,
            regions,
            clock,
            proof,
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
        let streams = self.proof.streams_go_first();
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
    ) -> DetachOutcome<A::Frame> {
        let Some(region) = region.enter() else {
            return DetachOutcome::NotHere;
        };
        let first = pages.start;
        let others = pages
            .iter()
            .find(|&page| region.words.try_apply(page, own).is_none());
        let owned = first.until(others.unwrap_or(pages.end));
        if owned.is_empty() {
            let word = region.words.load(first);
            // A page being filled has nothing that is not in the store, until it is mapped; one
            // that leaves may.
            let not_now = word.installing()
                || matches!(word.state(), PageState::Leaving | PageState::Resident);
            return if not_now {
                DetachOutcome::NotNow
            } else {
                DetachOutcome::NotHere
            };
        }
        let detached = self.mapper.detach(&region, owned);
        // Pages that the kernel did not give with the rest get their own answer next time.
        let taken = detached.as_ref().map_or(1, PageRun::len);
        self.stay(&region, (first + taken).until(owned.end));
        match detached {
            Ok(run) => DetachOutcome::Taken(region, run),
            Err(DetachError::Absent) => {
                // The program gave the page back to the kernel. What was written back last is the
                // page now.
                self.frames.budget().lose(region.page_bytes());
                self.remove(&region, first.alone(), self.clock.now());
                DetachOutcome::NotHere
            }
            Err(error) => {
                self.stay(&region, first.alone());
                DetachOutcome::Refused(error)
            }
        }
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
        let own = |page: &PageIndex| region.words.try_apply(*page, protocol::leave).is_some();
        for run in runs {
            let mut page = run.start;
            while page < run.end && owned.len() < SCATTERED_PAGES_MAX {
                let rest = page.until(run.end);
                let mine = page.and_on(rest.iter().take_while(own).count());
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
        victims.proof.leave(candidates.found_by, taken_bytes);
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
