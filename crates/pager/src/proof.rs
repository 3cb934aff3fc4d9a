//! Which source of victims is the better one: [`Proof`].
//!
//! Streams and the sweep both name victims ([`FoundBy`]). The pages that come back tell who named
//! the worse ones: a page's stamp says by whom it was found. While the sweep's come back less than
//! a quarter as often, the sweep gives nearly all victims. Otherwise streams do. Each always gives
//! a part, so that there is proof of both.
//!
//! The rule: this module counts. Whose turn it is follows from the counts alone.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::candidates::FoundBy;

/// The worse source gives one page for this many of the better one.
const MINOR_SHARE: u64 = 16;
/// The past counts half after this many budgets have left. Loops are longer than the budget, and
/// what left in one piece comes back in one piece.
const MEMORY_BUDGETS: u64 = 16;
/// A page that comes back after this many ticks proves nothing. Pages that never left have stamps
/// much further away.
const MEMORY_TICKS: u32 = 1 << 30;

/// Ticks of the fill clock that left and came back, by [`FoundBy`].
pub(crate) struct Proof {
    budget_ticks: u64,
    counts: [Counts; 2],
}

/// In ticks of the fill clock; fading.
#[derive(Default)]
struct Counts {
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

    /// The stamp of a page that leaves now.
    pub(crate) fn stamp(found_by: FoundBy, now: u32) -> u32 {
        now & !1 | found_by as u32
    }

    /// Pages began to leave.
    pub(crate) fn leave(&self, found_by: FoundBy, bytes: usize) {
        self.counts[found_by as usize]
            .out
            .fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
        let [swept, streamed] = self.out();
        if swept + streamed > MEMORY_BUDGETS * self.budget_ticks {
            // Others count meanwhile. What that loses is little beside what fading loses.
            for counts in &self.counts {
                for figure in [&counts.out, &counts.back] {
                    figure.store(figure.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
                }
            }
        }
    }

    /// A run came back from the store.
    pub(crate) fn came_back(&self, back: &Back) {
        for (counts, bytes) in self.counts.iter().zip(back.0) {
            if bytes > 0 {
                counts.back.fetch_add(bytes as u64 >> 12, Ordering::Relaxed);
            }
        }
    }

    /// Whether what streams have gone through leaves before the sweep looks for others.
    pub(crate) fn streams_go_first(&self) -> bool {
        let [swept, streamed] = self.out();
        if self.sweep_is_better() {
            streamed * MINOR_SHARE <= swept
        } else {
            streamed <= swept * MINOR_SHARE
        }
    }

    /// Whether the sweep's pages come back less than a quarter as often.
    fn sweep_is_better(&self) -> bool {
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
pub(crate) struct Back([usize; 2]);

impl Back {
    /// A page of `bytes` came back at `now`; `stamp` is that of its leaving.
    pub(crate) fn count(&mut self, stamp: u32, now: u32, bytes: usize) {
        if now.wrapping_sub(stamp) < MEMORY_TICKS {
            self.0[(stamp & 1) as usize] += bytes;
        }
    }
}
