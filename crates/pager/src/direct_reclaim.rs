//! Direct reclaim: a thread that serves its own fault makes room itself, [`DirectReclaim`].
//!
//! The thread takes a few victims out while its READ is under way. No evictor has to be woken for
//! them, and no other processor has to forget the addresses while the program runs there. (Where
//! other threads of the program do run, copies leave in batches: `scatter.rs`.)
//!
//! The rule is that of a signal handler, see `in_thread.rs`: unchanged pages are gone, changed ones
//! are handed over, and nothing is waited for.

use std::sync::Arc;

use farpage_store::PageRange;
use farpage_vm::AddressSpace;

use crate::{
    candidates::{Candidates, FoundBy},
    freeze::Entered,
    hand_over::PAGES_PER_CALL,
    protocol,
    region::{Region, RegionGuard},
    requests::Leaving,
    run::PageRun,
    shared::SharedParts,
    stats::Counters,
    victims::{DetachOutcome, Walk},
};

/// Number of chunks whose victims one call looks at; some chunks have none.
const CHUNKS_PER_CALL: usize = 4;

/// Eviction by one thread for its own faults.
pub(crate) struct DirectReclaim<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    worker: usize,
}

impl<A: AddressSpace> DirectReclaim<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, worker: usize) -> Self {
        DirectReclaim { shared, worker }
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters[self.worker]
    }

    /// Takes a few pages out if memory is tight. Returns whether it did.
    pub(crate) fn reclaim(&self) -> bool {
        let (budget, hand_over) = (self.shared.frames.budget(), &self.shared.hand_over);
        let (mut left, mut any) = (PAGES_PER_CALL, false);
        if !budget.is_tight() || hand_over.rests() {
            return false;
        }
        // While the program forks, the thread waits as if there were no victims.
        let gate = &self.shared.gate;
        let Some(entered) = gate.enter(self.worker) else {
            return false;
        };
        for _ in 0..CHUNKS_PER_CALL {
            if left == 0 || !budget.is_tight() || !hand_over.has_room() || gate.is_closed() {
                break;
            }
            let Some(candidates) = self.shared.victims.candidates() else {
                break;
            };
            if candidates.region.is_stalled() {
                continue;
            }
            if candidates.region.is_read_only() {
                any |= self.drop_candidates(&entered, &candidates);
                continue;
            }
            if self.shared.scatter.is_better(&candidates) {
                return self.copy_out(&entered, candidates) || any;
            }
            any |= self.move_out(&entered, &candidates, &mut left);
        }
        any
    }

    /// Drops victims among the candidates of a read-only region. Returns whether there were any.
    fn drop_candidates(&self, entered: &Entered<'_>, candidates: &Candidates) -> bool {
        let dropped = (self.shared.victims).drop_candidates(entered, candidates);
        self.counters().evicted(dropped.pages, dropped.pages);
        if let Some(page) = dropped.refused {
            let (region, found_by) = (&candidates.region, candidates.found_by);
            self.move_run_out(entered, region, page.alone(), found_by);
        }
        dropped.pages > 0
    }

    /// Takes victims of the candidates, and of some behind them, out by copying.
    fn copy_out(&self, entered: &Entered<'_>, candidates: Candidates) -> bool {
        let (region, found_by) = (candidates.region.clone(), candidates.found_by);
        let took_out = |region: &RegionGuard, run| self.took_out(entered, region, run, found_by);
        let outcome = (self.shared.scatter).take_out(entered, candidates, took_out);
        let outcome = outcome.unwrap_or_default();
        let mut any = outcome.any;
        for page in outcome.refused {
            any |= self.move_run_out(entered, &region, page.alone(), found_by) > 0;
        }
        any
    }

    /// Takes victims of the candidates out by moving, at most `left`.
    fn move_out(&self, entered: &Entered<'_>, candidates: &Candidates, left: &mut usize) -> bool {
        let (region, found_by) = (&candidates.region, candidates.found_by);
        let page_bytes = region.page_bytes();
        let mut walk = Walk::new(&self.shared.victims, candidates);
        loop {
            let excess = self.shared.frames.budget().excess_pages(page_bytes);
            let most = (*left).min(excess);
            if most == 0 {
                break;
            }
            let Some(pages) = walk.next(most) else {
                break;
            };
            *left -= pages.len();
            walk.took(self.move_run_out(entered, region, pages, found_by));
        }
        walk.end()
    }

    /// Takes as many of the leading ones of `pages` out as go together. Returns how many.
    fn move_run_out(
        &self,
        entered: &Entered<'_>,
        region: &Arc<Region>,
        pages: PageRange,
        found_by: FoundBy,
    ) -> usize {
        let victims = &self.shared.victims;
        match victims.take_out(entered, region, pages, protocol::leave) {
            DetachOutcome::Taken(region, run) => {
                let taken = run.len();
                self.took_out(entered, &region, run, found_by);
                return taken;
            }
            DetachOutcome::Refused(_) => self.counters().failed_evictions.bump(),
            DetachOutcome::NotNow | DetachOutcome::NotHere => {}
        }
        0
    }

    /// Settles pages that were taken out: unchanged ones are gone, the rest is handed over.
    fn took_out(
        &self,
        entered: &Entered<'_>,
        region: &RegionGuard,
        run: PageRun<A::Frame>,
        found_by: FoundBy,
    ) {
        let shared = &self.shared;
        let stamp = shared.victims.stamp(found_by);
        let first = run.first();
        let mut gone = [false; PAGES_PER_CALL];
        for (page, bytes) in run.bytes_by_page() {
            gone[page - first] =
                region.store.is_unchanged(page, bytes) && region.leave(page, stamp);
        }
        let left = gone.iter().filter(|&&gone| gone).count();
        self.counters().evicted(left, left);
        region.store.count_clean(left);
        run.cut(
            |page| gone[page - first],
            |run, gone| {
                if gone {
                    let page_bytes = region.page_bytes();
                    return shared.frames.release(run.into_frame(), page_bytes);
                }
                let (region, departure) = (region.again(), entered.depart());
                let leaving = Leaving::new(region, run.pages(), None, found_by, departure);
                let budget = shared.frames.budget();
                shared
                    .hand_over
                    .hand_over(leaving, run.into_frame(), budget);
            },
        );
    }
}
