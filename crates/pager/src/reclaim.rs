//! Reclaim: taking pages out while memory is tight, [`evict`].
//!
//! An eviction, in order:
//!
//! 1. streams, or the clock hand, name victims (`victims.rs`); neighbours among them are a run: own
//!    its pages (`Resident` to `Leaving`);
//! 2. detach it: atomic, from here on its bytes are ours alone, and a touch of it faults. Or copy
//!    its pages, where that is cheaper (`scatter.rs`);
//! 3. give it to a [`Sink`], which settles it: unchanged pages are gone, changed ones are written
//!    back. Pages of read-only regions are dropped without one.
//!
//! The rule: evictors and threads that serve their own faults evict by the same steps, and differ
//! in their sinks and limits alone.

use std::{slice, sync::Arc};

use farpage_store::PageRange;
use farpage_vm::{AddressSpace, SCATTERED_PAGES_MAX};

use crate::{
    budget::Budget,
    clock::FoundBy,
    freeze::Entered,
    protocol::{self, PageWord},
    region::{Region, RegionGuard},
    run::PageRun,
    shared::SharedParts,
    stats::Counters,
    victims::{Candidates, Dropped, NotTaken, Walk},
};

/// Bounds of one eviction.
pub(crate) struct EvictionLimit {
    /// Number of chunks whose victims are looked at; some chunks have none.
    pub(crate) chunks: usize,
    /// Number of pages that are tried.
    pub(crate) pages: usize,
}

/// Way of runs that were taken out.
pub(crate) trait Sink<A: AddressSpace> {
    /// True if one more run may be taken out.
    fn has_room(&self) -> bool;

    /// True if more of the budget has to become free.
    fn wants_more(&self, budget: &Budget) -> bool;

    /// Takes over a run that was taken out: its pages are owned as `Leaving`.
    fn put(
        &mut self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        run: PageRun<A::Frame>,
        found_by: FoundBy,
    );
}

/// Takes victims out while there is pressure, the sink has room, and the program does not fork.
/// Returns whether any page was taken out.
pub(crate) fn evict<A: AddressSpace, S: Sink<A>>(
    shared: &SharedParts<A>,
    worker: usize,
    limit: EvictionLimit,
    sink: S,
) -> bool {
    let Some(entered) = &shared.gate.enter(worker) else {
        return false;
    };
    let (mut any, mut left) = (false, limit.pages);
    let mut eviction = Eviction {
        shared,
        worker,
        entered,
        sink,
    };
    for _ in 0..limit.chunks {
        let budget = shared.frames.budget();
        if left == 0 || !eviction.sink.wants_more(budget) || !eviction.goes_on() {
            break;
        }
        let Some(candidates) = shared.victims.candidates() else {
            break;
        };
        if candidates.region.is_stalled() {
            continue;
        }
        if candidates.region.is_read_only() {
            any |= eviction.drop_candidates(&candidates, &mut left);
        } else if !shared.scatter.is_better(&candidates) {
            any |= eviction.move_out(&candidates, &mut left);
        } else if let Some(some) = eviction.copy_out(candidates) {
            any |= some;
            // One call copies as many as it can.
            left = left.saturating_sub(SCATTERED_PAGES_MAX);
        } else {
            // Another thread copies pages out.
            break;
        }
    }
    any
}

/// Taking out of pages, inside the reclaim gate.
pub(crate) struct Eviction<'a, A: AddressSpace, S> {
    pub(crate) shared: &'a SharedParts<A>,
    pub(crate) worker: usize,
    pub(crate) entered: &'a Entered<'a>,
    pub(crate) sink: S,
}

impl<A: AddressSpace, S: Sink<A>> Eviction<'_, A, S> {
    fn counters(&self) -> &Counters {
        &self.shared.counters[self.worker]
    }

    fn goes_on(&self) -> bool {
        self.sink.has_room() && !self.shared.gate.is_closed()
    }

    /// Moves victims among the candidates out, neighbours together, and tries `left` at most.
    fn move_out(&mut self, candidates: &Candidates, left: &mut usize) -> bool {
        let (shared, region) = (self.shared, &candidates.region);
        let mut walk = Walk::new(&shared.victims, candidates);
        while self.goes_on() {
            let excess = shared.frames.budget().excess_pages(region.page_bytes());
            let most = excess.min(*left);
            if most == 0 {
                break;
            }
            let Some(mut run) = walk.next(most) else {
                break;
            };
            *left -= run.len();
            while !run.is_empty() {
                let (pages, taken) =
                    self.move_run(region, run, protocol::leave, candidates.found_by);
                if taken.is_ok() {
                    walk.took(pages);
                }
                run.start += pages;
            }
        }
        walk.end()
    }

    /// Drops victims among the candidates of a read-only region, and counts them off `left`.
    fn drop_candidates(&mut self, candidates: &Candidates, left: &mut usize) -> bool {
        let dropped = self
            .shared
            .victims
            .drop_candidates(self.entered, candidates);
        *left = left.saturating_sub(dropped.pages);
        let (any, found_by) = (dropped.pages > 0, candidates.found_by);
        let moved = self.end_dropping(&candidates.region, dropped, protocol::leave, found_by);
        any || moved.is_ok()
    }

    /// Copies victims of the candidates out, and of some behind them. `None`: another thread takes
    /// pages out by copying.
    fn copy_out(&mut self, candidates: Candidates) -> Option<bool> {
        let (region, found_by) = (candidates.region.clone(), candidates.found_by);
        let put = |region: &RegionGuard, run| self.sink.put(self.entered, region, run, found_by);
        let outcome = (self.shared.scatter).take_out(self.entered, candidates, put)?;
        let mut any = outcome.any;
        for page in outcome.refused {
            let (_, taken) = self.move_run(&region, page.alone(), protocol::leave, found_by);
            any |= taken.is_ok();
        }
        Some(any)
    }

    /// Takes out the leading ones of `pages`, which lie in one stripe, and owns them by `own`.
    /// Returns the number of pages that are dealt with, at least one, and how.
    pub(crate) fn take_out(
        &mut self,
        region: &Arc<Region>,
        pages: PageRange,
        own: fn(PageWord) -> Option<PageWord>,
        found_by: FoundBy,
    ) -> (usize, Result<(), NotTaken>) {
        if !region.is_read_only() {
            return self.move_run(region, pages, own, found_by);
        }
        let (victims, runs) = (&self.shared.victims, slice::from_ref(&pages));
        let dropped = victims.drop_runs(self.entered, region, runs, found_by);
        let dealt_with = dropped
            .refused
            .map_or(pages.len(), |page| page + 1 - pages.start);
        (
            dealt_with,
            self.end_dropping(region, dropped, own, found_by),
        )
    }

    /// Counts pages that were dropped, and moves the one out that the kernel does not drop.
    fn end_dropping(
        &mut self,
        region: &Arc<Region>,
        dropped: Dropped,
        own: fn(PageWord) -> Option<PageWord>,
        found_by: FoundBy,
    ) -> Result<(), NotTaken> {
        self.counters().evicted(dropped.pages, dropped.pages);
        let refused = dropped.refused.ok_or(NotTaken::NotHere)?;
        self.move_run(region, refused.alone(), own, found_by).1
    }

    /// Owns and detaches the leading ones of `pages`. Returns as [`take_out`](Self::take_out) does.
    fn move_run(
        &mut self,
        region: &Arc<Region>,
        pages: PageRange,
        own: fn(PageWord) -> Option<PageWord>,
        found_by: FoundBy,
    ) -> (usize, Result<(), NotTaken>) {
        match (self.shared.victims).take_out(self.entered, region, pages, own) {
            Ok((region, run)) => {
                let taken = run.len();
                self.sink.put(self.entered, &region, run, found_by);
                (taken, Ok(()))
            }
            Err(refused) => {
                if matches!(refused, NotTaken::NotNow(Some(_))) {
                    self.counters().failed_evictions.bump();
                }
                (1, Err(refused))
            }
        }
    }
}
