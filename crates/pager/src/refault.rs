//! Refault distances, the bytes that came in while a page was away: [`RefaultDistances`]. They tell
//! the worth of more memory.
//!
//! A page's stamp says when it left, by the clock that counts fills. A page that comes back after
//! less than a budget of others would have stayed if there had been room for those others, which
//! twice the budget has. With more memory fewer pages would have come in meanwhile, so the number
//! of pages that would have stayed is rather higher.
//!
//! The rule: this module counts, and decides nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{PagerStats, clock::FillClock};

/// Refault distance, in ticks, from which on a page counts as one that never left.
const EVER_TICKS: u32 = 1 << 30;

/// Counts of pages that came back, by refault distance.
#[derive(Default)]
pub(crate) struct RefaultDistances {
    all: AtomicU64,
    within_one: AtomicU64,
    within_three: AtomicU64,
}

/// Counts of one run's pages.
#[derive(Default)]
pub(crate) struct RunRefaults {
    all: u64,
    within_one: u64,
    within_three: u64,
}

impl RunRefaults {
    /// Counts a page that came back at `now`; `stamp` is that of its leaving.
    pub(crate) fn count(&mut self, clock: &FillClock, stamp: u32, now: u32) {
        let (distance, budget) = (now.wrapping_sub(stamp), clock.budget_ticks());
        if distance < EVER_TICKS {
            self.all += 1;
            self.within_one += u64::from(distance < budget);
            self.within_three += u64::from(distance < budget.saturating_mul(3));
        }
    }
}

impl RefaultDistances {
    pub(crate) fn count(&self, run: &RunRefaults) {
        if run.all > 0 {
            self.all.fetch_add(run.all, Ordering::Relaxed);
            self.within_one.fetch_add(run.within_one, Ordering::Relaxed);
            (self.within_three).fetch_add(run.within_three, Ordering::Relaxed);
        }
    }

    pub(crate) fn put_into(&self, stats: &mut PagerStats) {
        stats.returns = self.all.load(Ordering::Relaxed);
        stats.returns_within_one_budget = self.within_one.load(Ordering::Relaxed);
        stats.returns_within_three_budgets = self.within_three.load(Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_apart_by_how_much_came_in_while_they_were_away() {
        let clock = FillClock::new(100 << 12);
        let (mut run, now) = (RunRefaults::default(), clock.now());
        for away in [0, 99, 100, 299, 300, 5000] {
            run.count(&clock, now.wrapping_sub(away), now);
        }
        // A page that never left.
        run.count(&clock, 0, now);
        let refaults = RefaultDistances::default();
        refaults.count(&run);
        let mut stats = PagerStats::default();
        refaults.put_into(&mut stats);
        assert_eq!(stats.returns, 6);
        assert_eq!(stats.returns_within_one_budget, 2);
        assert_eq!(stats.returns_within_three_budgets, 4);
    }
}
