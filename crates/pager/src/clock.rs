//! The time of pages: [`FillClock`], which ticks once per 4 KiB that were filled.
//!
//! A page's stamp is this clock's time. So age is measured in fills, and a page is as old as the
//! bytes that came in after it.

use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_utils::CachePadded;

/// Counts fills; wraps.
pub(crate) struct FillClock {
    ticks: CachePadded<AtomicU32>,
    budget_ticks: u32,
}

impl FillClock {
    pub(crate) fn new(budget_bytes: u64) -> FillClock {
        FillClock {
            // Far from 0, the stamp of pages that never left: they must not look as if they had
            // just left.
            ticks: CachePadded::new(AtomicU32::new(u32::MAX / 2)),
            budget_ticks: u32::try_from(budget_bytes >> 12).unwrap_or(u32::MAX / 4),
        }
    }

    /// How many ticks fill the budget once.
    pub(crate) fn budget_ticks(&self) -> u32 {
        self.budget_ticks
    }

    pub(crate) fn now(&self) -> u32 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// `bytes` came in. Returns the time before.
    pub(crate) fn tick(&self, bytes: usize) -> u32 {
        self.ticks
            .fetch_add((bytes >> 12) as u32, Ordering::Relaxed)
    }

    /// Whether a page that left at `stamp` was away for less than half a budget: with a little more
    /// memory it would not have left.
    pub(crate) fn is_recent(&self, stamp: u32, now: u32) -> bool {
        now.wrapping_sub(stamp) < self.budget_ticks / 2
    }
}
