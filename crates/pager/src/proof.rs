//! Comparison of the two sources of victims: [`Proof`].
//!
//! Streams and the clock hand both name victims ([`FoundBy`]). Pages that come back tell which
//! source named the worse ones: a page's stamp says which source found it. While the clock hand's
//! pages come back less than a quarter as often, the clock hand gives nearly all victims. Otherwise
//! streams do. Each source always gives a part, so that there is proof of both.
//!
//! The rule: this module counts. The turn of a source follows from the counts alone.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::candidates::FoundBy;

/// Number of pages of the better source for each page of the worse one.
const MINOR_SHARE: u64 = 16;
/// Number of budgets that leave until the past counts half. Loops are longer than the budget, and
/// pages that left in one piece come back in one piece.
const MEMORY_BUDGETS: u64 = 16;
/// Number of ticks after which a page that comes back proves nothing. Pages that never left have
/// stamps much further away.
const MEMORY_TICKS: u32 = 1 << 30;

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

    /// Counts a run that came back from the store.
    pub(crate) fn came_back(&self, back: &RefaultBytes) {
        for (counts, bytes) in self.counts.iter().zip(back.0) {
            if bytes > 0 {
                counts.back.fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
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

/// Bytes of a run that came back, by [`FoundBy`].
#[derive(Default)]
pub(crate) struct RefaultBytes([usize; 2]);

impl RefaultBytes {
    /// Counts a page of `bytes` that came back at `now`; `stamp` is that of its leaving.
    pub(crate) fn count(&mut self, stamp: u32, now: u32, bytes: usize) {
        if now.wrapping_sub(stamp) < MEMORY_TICKS {
            self.0[(stamp & 1) as usize] += bytes;
        }
    }
}
