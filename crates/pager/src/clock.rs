//! Time of pages, and what pages that come back tell: [`FillClock`], with its [`Proof`].
//!
//! The fill clock ticks once per 4 KiB that were filled, and a page's stamp is its time. So age is
//! measured in fills, and a page is as old as the bytes that came in after it.
//!
//! Refault distances are the bytes that came in while a page was away. A page that comes back after
//! less than a budget of others would have stayed if there had been room for those others, which
//! twice the budget has. With more memory fewer pages would have come in meanwhile, so the number
//! of pages that would have stayed is rather higher.
//!
//! Streams and the clock hand both name victims ([`FoundBy`]). Pages that come back tell which
//! source named the worse ones: a page's stamp says which source found it. While the clock hand's
//! pages come back less than a quarter as often, the clock hand gives nearly all victims. Otherwise
//! streams do. Each source always gives a part, so that there is proof of both.
//!
//! The rule: this module counts. The turn of a source follows from the counts alone.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::PagerStats;

/// Shift of the fading: the past counts half after some 180 pages that faults brought in.
const FADES_SHIFT: u32 = 8;
/// Value of `back_early` if all pages come back early.
const ALL: u32 = 1 << 24;

/// Clock that counts fills; wraps.
pub(crate) struct FillClock {
    ticks: CachePadded<AtomicU32>,
    budget_ticks: AtomicU32,
    /// Comparison of the sources of victims.
    pub(crate) proof: Proof,
    /// Counts of pages that came back, by refault distance: all, within one budget, within three.
    refaults: [AtomicU64; 3],
    /// Share of the pages that faults brought in that had been away for less than half a budget, of
    /// [`ALL`]; fading.
    back_early: AtomicU32,
}

impl FillClock {
    pub(crate) fn new(budget_bytes: u64) -> FillClock {
        FillClock {
            // Far from 0, the stamp of pages that never left: these must not look as if they had
            // just left.
            ticks: CachePadded::new(AtomicU32::new(u32::MAX / 2)),
            back_early: AtomicU32::new(0),
            budget_ticks: AtomicU32::new(ticks(budget_bytes)),
            proof: Proof::new(ticks(budget_bytes)),
            refaults: Default::default(),
        }
    }

    /// Changes the budget.
    pub(crate) fn set_budget(&self, budget_bytes: u64) {
        let ticks = ticks(budget_bytes);
        self.budget_ticks.store(ticks, Ordering::Relaxed);
    }

    /// Returns the number of ticks that fill the budget once.
    pub(crate) fn budget_ticks(&self) -> u32 {
        self.budget_ticks.load(Ordering::Relaxed)
    }

    pub(crate) fn now(&self) -> u32 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Counts `bytes` that came in. Returns the time before.
    pub(crate) fn tick(&self, bytes: usize) -> u32 {
        self.ticks
            .fetch_add((bytes >> 12) as u32, Ordering::Relaxed)
    }

    /// Begins to count a run's pages that come back.
    pub(crate) fn returns(&self) -> RunReturns {
        RunReturns {
            budget_ticks: self.budget_ticks(),
            refaults: [0; 3],
            bytes: [0; 2],
        }
    }

    /// Counts a run that came back from the store.
    pub(crate) fn returned(&self, returns: &RunReturns) {
        for (count, pages) in self.refaults.iter().zip(returns.refaults) {
            if pages > 0 {
                count.fetch_add(pages, Ordering::Relaxed);
            }
        }
        for (counts, bytes) in self.proof.counts.iter().zip(returns.bytes) {
            if bytes > 0 {
                counts.back.fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
            }
        }
    }

    /// Adds the counts of pages that came back to `stats`.
    pub(crate) fn put_into(&self, stats: &mut PagerStats) {
        let refaults = [0, 1, 2].map(|at: usize| self.refaults[at].load(Ordering::Relaxed));
        [
            stats.returns,
            stats.returns_within_one_budget,
            stats.returns_within_three_budgets,
        ] = refaults;
    }

    /// Takes note of a page that a fault brought in at `now` and that had left at `stamp`.
    pub(crate) fn came_back(&self, stamp: u32, now: u32) {
        let share = self.back_early.load(Ordering::Relaxed);
        let faded = share - (share >> FADES_SHIFT);
        let is_early = u32::from(self.was_away_less_than(2, stamp, now));
        // Counts of another worker in between may be forgotten.
        (self.back_early).store(faded + is_early * (ALL >> FADES_SHIFT), Ordering::Relaxed);
    }

    /// True if a page that left at `stamp` came back so soon that with a little more memory it
    /// would not have left: within a third of a budget, or half of one while a third of all do.
    ///
    /// Some random pages come back within half a budget by chance. Most pages of a set that is used
    /// again and again do, in a loop even all.
    pub(crate) fn is_recent(&self, stamp: u32, now: u32) -> bool {
        self.was_away_less_than(3, stamp, now)
            || self.was_away_less_than(2, stamp, now)
                && self.back_early.load(Ordering::Relaxed) >= ALL / 3
    }

    /// True if the time between `stamp` and `now` is less than the `part`-th part of a budget.
    fn was_away_less_than(&self, part: u32, stamp: u32, now: u32) -> bool {
        now.wrapping_sub(stamp) < self.budget_ticks() / part
    }
}

fn ticks(bytes: u64) -> u32 {
    u32::try_from(bytes >> 12).unwrap_or(u32::MAX / 4)
}

/// Time away, in ticks, from which on a page counts as one that never left, and proves nothing.
const EVER_TICKS: u32 = 1 << 30;

/// Counts of one run's pages that came back.
pub(crate) struct RunReturns {
    budget_ticks: u32,
    /// Pages by refault distance: all, within one budget, within three.
    refaults: [u64; 3],
    /// Bytes by [`FoundBy`].
    bytes: [usize; 2],
}

impl RunReturns {
    /// Counts a page of `bytes` that came back at `now`; `stamp` is that of its leaving.
    pub(crate) fn count(&mut self, stamp: u32, now: u32, bytes: usize) {
        let (distance, budget) = (now.wrapping_sub(stamp), self.budget_ticks);
        if distance < EVER_TICKS {
            self.refaults[0] += 1;
            self.refaults[1] += u64::from(distance < budget);
            self.refaults[2] += u64::from(distance < budget.saturating_mul(3));
            self.bytes[(stamp & 1) as usize] += bytes;
        }
    }
}

/// Source that found a page which leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundBy {
    /// The clock hand came by. Also of pages that the program asked to leave, which are few.
    ClockHand = 0,
    /// A stream had gone through the page.
    Stream = 1,
}

/// Number of pages of the better source for each page of the worse one.
const MINOR_SHARE: u64 = 16;
/// Number of budgets that leave until the past counts half. Loops are longer than the budget, and
/// pages that left in one piece come back in one piece.
const MEMORY_BUDGETS: u64 = 16;
/// Ticks of the fill clock that left and came back, by [`FoundBy`].
pub(crate) struct Proof {
    budget_ticks: u64,
    counts: [SourceCounts; 2],
}

/// Counts of one source, in ticks of the fill clock; fading.
#[derive(Default)]
struct SourceCounts {
    out: AtomicU64,
    back: AtomicU64,
}

impl Proof {
    pub(crate) fn new(budget_ticks: u32) -> Proof {
        Proof {
            budget_ticks: budget_ticks.into(),
            counts: Default::default(),
        }
    }

    /// Returns the stamp of a page that leaves now.
    pub(crate) fn stamp(found_by: FoundBy, now: u32) -> u32 {
        now & !1 | found_by as u32
    }

    /// Counts pages that begin to leave.
    pub(crate) fn leave(&self, found_by: FoundBy, bytes: usize) {
        self.counts[found_by as usize]
            .out
            .fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
        let [swept, streamed] = self.out();
        if swept + streamed > MEMORY_BUDGETS * self.budget_ticks {
            // Other threads count meanwhile. Their loss is little beside the fading.
            for counts in &self.counts {
                for figure in [&counts.out, &counts.back] {
                    figure.store(figure.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
                }
            }
        }
    }

    /// True if pages that streams have gone through leave before the clock hand looks for others.
    pub(crate) fn streams_go_first(&self) -> bool {
        let [swept, streamed] = self.out();
        if self.hand_is_better() {
            streamed * MINOR_SHARE <= swept
        } else {
            streamed <= swept * MINOR_SHARE
        }
    }

    /// True if the clock hand's pages come back less than a quarter as often.
    fn hand_is_better(&self) -> bool {
        let [swept, streamed] = self.out();
        let [swept_back, streamed_back] =
            [0, 1].map(|by| self.counts[by].back.load(Ordering::Relaxed));
        u128::from(swept_back) * u128::from(streamed) * 4
            < u128::from(streamed_back) * u128::from(swept)
    }

    fn out(&self) -> [u64; 2] {
        [0, 1].map(|by: usize| self.counts[by].out.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: u32 = 1 << 20;

    /// Lets `times` pages come back that had been away for `away` budgets.
    fn come_back(clock: &FillClock, away: f64, times: usize) {
        let away = (f64::from(BUDGET) * away) as u32;
        (0..times).for_each(|_| clock.came_back(0, away));
    }

    #[test]
    fn half_a_budget_is_recent_while_many_pages_come_back_within_it() {
        let clock = FillClock::new(u64::from(BUDGET) << 12);
        let is_recent = |away: f64| clock.is_recent(0, (f64::from(BUDGET) * away) as u32);
        assert!(is_recent(0.3) && !is_recent(0.4));
        for _ in 0..1000 {
            // At random: one in seven.
            come_back(&clock, 0.4, 1);
            come_back(&clock, 2.0, 6);
        }
        assert!(is_recent(0.3) && !is_recent(0.4));
        come_back(&clock, 0.4, 150);
        assert!(
            is_recent(0.4) && !is_recent(0.6),
            "a set that is used again"
        );
        come_back(&clock, 0.6, 1000);
        assert!(!is_recent(0.4), "that is over");
    }

    #[test]
    fn share_of_pages_that_come_back_early_has_bounds() {
        let clock = FillClock::new(u64::from(BUDGET) << 12);
        come_back(&clock, 0.1, 10_000);
        let most = clock.back_early.load(Ordering::Relaxed);
        assert!((ALL - ALL / 100..=ALL).contains(&most), "{most}");
        come_back(&clock, 5.0, 10_000);
        assert!(clock.back_early.load(Ordering::Relaxed) < ALL / 100);
    }

    #[test]
    fn pages_are_told_apart_by_how_much_came_in_while_they_were_away() {
        let clock = FillClock::new(100 << 12);
        let (mut run, now) = (clock.returns(), clock.now());
        for away in [0, 99, 100, 299, 300, 5000] {
            run.count(now.wrapping_sub(away), now, 4096);
        }
        // A page that never left.
        run.count(0, now, 4096);
        clock.returned(&run);
        let mut stats = PagerStats::default();
        clock.put_into(&mut stats);
        assert_eq!(stats.returns, 6);
        assert_eq!(stats.returns_within_one_budget, 2);
        assert_eq!(stats.returns_within_three_budgets, 4);
    }
}
