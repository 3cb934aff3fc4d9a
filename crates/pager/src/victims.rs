//! Who leaves, and the taking out: what evictors and threads that serve their own faults have in common.
//!
//! The rule it keeps: a page is looked at as a victim only in its word, and touched only when it is owned as `Leaving`; what was not taken out is mapped as before.

use std::{ops::Range, sync::Arc};

use farpage_vm::{AddressSpace, DetachError};

use crate::{
    behind::Way,
    core::Core,
    protocol::{self, State, Word},
    region::Region,
    run::pages_in,
    sweep::Claim,
};

/// What came of trying to take the leading pages of some out.
pub(crate) enum Out<F> {
    /// These pages are the caller's, as `Leaving`, and their region has been entered.
    Taken(Range<usize>, F),
    /// The first one is another worker's.
    NotNow,
    /// The kernel does not give the first one.
    Refused(DetachError),
    /// There is nothing to take out.
    NotHere,
}

/// A walk over the pages of a claim.
pub(crate) struct Walk<'a, A: AddressSpace> {
    core: &'a Core<A>,
    claim: &'a Claim,
    /// The next one.
    page: usize,
    seen: usize,
    taken: usize,
}

impl<'a, A: AddressSpace> Walk<'a, A> {
    pub(crate) fn new(core: &'a Core<A>, claim: &'a Claim) -> Self {
        Walk {
            core,
            claim,
            page: claim.pages.start,
            seen: 0,
            taken: 0,
        }
    }

    /// The next victims that lie together, at most so many. `None`: there are no more.
    pub(crate) fn next(&mut self, most: usize) -> Option<Range<usize>> {
        let region = &self.claim.region;
        while self.page < self.claim.pages.end {
            let end = self.page + region.run_pages.min(most);
            let window = self.page..self.claim.pages.end.min(end);
            let window = region.in_one_stripe(&window, false);
            let now = self.core.now();
            let spared = window.clone().find(|&page| !self.is_victim(page, now));
            let run = self.page..spared.unwrap_or(window.end);
            self.page = run.end + usize::from(spared.is_some());
            if !run.is_empty() {
                return Some(run);
            }
        }
        None
    }

    /// So many have been taken out.
    pub(crate) fn took(&mut self, pages: usize) {
        self.taken += pages;
    }

    /// What was not looked at is left to others. Returns whether any were taken.
    pub(crate) fn end(self) -> bool {
        let Walk { core, claim, .. } = self;
        if self.page < claim.pages.end {
            match claim.way {
                Way::Behind => core.behind.stop_at(claim, self.page),
                Way::Swept => core.sweep.stop_at(claim, self.page),
            }
        }
        let page_bytes = claim.region.page_bytes();
        core.behind.leave(claim.way, self.taken * page_bytes);
        if claim.way == Way::Swept {
            core.sweep.report(
                self.seen * page_bytes,
                self.taken * page_bytes,
                core.frames.used() as usize,
            );
        }
        self.taken > 0
    }

    /// Whether a page shall leave; one that is warm cools.
    fn is_victim(&mut self, page: usize, now: u32) -> bool {
        let words = &self.claim.region.words;
        let word = words.load(page);
        if word.state() != State::Resident || word.pinned() {
            return false;
        }
        self.seen += 1;
        if now.wrapping_sub(word.stamp()) < self.claim.age_floor {
            return false;
        }
        if word.heat() > 0 {
            words.try_apply(page, |w| (w == word).then(|| protocol::cooled(w, now)));
            return false;
        }
        true
    }
}

impl<A: AddressSpace> Core<A> {
    /// Where to look for victims.
    pub(crate) fn claim(&self) -> Option<Claim> {
        let claim = self.behind.claim(&self.regions);
        claim.or_else(|| self.sweep.claim(&self.regions))
    }

    /// Owns the leading ones of these pages, which lie in one stripe, by `own`, and detaches them.
    pub(crate) fn take_out(
        &self,
        region: &Arc<Region>,
        pages: Range<usize>,
        own: impl Fn(Word) -> Option<Word> + Copy,
    ) -> Out<A::Frame> {
        if !region.enter() {
            return Out::NotHere;
        }
        let first = pages.start;
        let owned = pages
            .clone()
            .find(|&page| region.words.try_apply(page, own).is_none())
            .unwrap_or(pages.end);
        if owned == first {
            let word = region.words.load(first);
            region.exit();
            // A page being filled has nothing that is not in the store, until it is mapped; one that leaves may.
            let not_now =
                word.installing() || matches!(word.state(), State::Leaving | State::Resident);
            return if not_now { Out::NotNow } else { Out::NotHere };
        }
        let page_bytes = region.page_bytes();
        let shard = region.shard_of(first, self.shards());
        let address = region.address_of(first);
        let (taken, out) = match self.space.detach(shard, address, page_bytes, owned - first) {
            Ok(frame) => {
                let taken = pages_in(&frame, page_bytes);
                region.count_out(&(first..first + taken));
                region.enter_again();
                (taken, Out::Taken(first..first + taken, frame))
            }
            Err(DetachError::Absent) => {
                // The program gave the page back to the kernel; what was written back last is the page now.
                region.count_out(&(first..first + 1));
                self.frames.forget(page_bytes);
                if region
                    .words
                    .apply(first, |w| protocol::removed(w, self.now()))
                {
                    self.wake(region, first..first + 1);
                }
                (1, Out::NotHere)
            }
            Err(error) => {
                self.stay(region, first..first + 1);
                (1, Out::Refused(error))
            }
        };
        // What the kernel did not give with the rest gets its own answer next time.
        self.stay(region, first + taken..owned);
        region.exit();
        out
    }

    /// Owned pages that were not taken out are mapped as before.
    pub(crate) fn stay(&self, region: &Region, pages: Range<usize>) {
        for page in pages {
            if region
                .words
                .apply(page, |w| (protocol::stayed(w), w.wanted()))
            {
                self.wake(region, page..page + 1);
            }
        }
    }
}
