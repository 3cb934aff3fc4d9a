//! Work of the pager, as benchmarks report it: counts of events between two moments.

use farpage::Stats;
use serde::Serialize;

/// Counts of the pager's events and of the bytes that they moved.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    /// Accesses to pages that were not in local memory.
    pub faults: u64,
    /// Pages that came in.
    pub fills: u64,
    /// Pages that left.
    pub evictions: u64,
    /// Pages that were wanted again while they left.
    pub steals: u64,
    /// Fills ahead of a fault.
    pub prefetches: u64,
    /// Faults that had to wait for a frame.
    pub starved: u64,
    /// Evictions of pages that had not changed.
    pub clean_evictions: u64,
    /// Bytes that the fabric brought.
    pub bytes_read: u64,
    /// Bytes that the fabric took away.
    pub bytes_written: u64,
}

impl Counts {
    /// Returns the counts of a runtime so far.
    pub fn of(Stats { pager, store, .. }: &Stats) -> Self {
        Self {
            faults: pager.faults,
            fills: pager.fills,
            evictions: pager.evictions,
            steals: pager.steals,
            prefetches: pager.prefetches,
            starved: pager.starved,
            clean_evictions: pager.clean_evictions,
            bytes_read: store.bytes_read,
            bytes_written: store.bytes_written,
        }
    }

    /// Combines each count with that of `other`.
    pub fn with(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            faults: combine(self.faults, other.faults),
            fills: combine(self.fills, other.fills),
            evictions: combine(self.evictions, other.evictions),
            steals: combine(self.steals, other.steals),
            prefetches: combine(self.prefetches, other.prefetches),
            starved: combine(self.starved, other.starved),
            clean_evictions: combine(self.clean_evictions, other.clean_evictions),
            bytes_read: combine(self.bytes_read, other.bytes_read),
            bytes_written: combine(self.bytes_written, other.bytes_written),
        }
    }
}

/// Work of the pager during the measured part of a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PagingFigures {
    /// Events of that part.
    #[serde(flatten)]
    pub counts: Counts,
    /// Bytes of changed pages over bytes stored for them; absent when nothing was stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_ratio: Option<f64>,
    /// Local memory for pages.
    pub budget_bytes: u64,
    /// Most bytes resident at once since the runtime was built.
    pub peak_resident_bytes: u64,
}

impl PagingFigures {
    /// Returns the work from `begin` to `end`.
    pub fn between(begin: &Stats, end: &Stats) -> Self {
        let plain = end.store.bytes_plain - begin.store.bytes_plain;
        let stored = end.store.bytes_stored - begin.store.bytes_stored;
        Self {
            counts: Counts::of(end).with(Counts::of(begin), |end, begin| end - begin),
            compression_ratio: (stored > 0).then(|| plain as f64 / stored as f64),
            budget_bytes: end.pager.budget_bytes,
            peak_resident_bytes: end.pager.peak_resident_bytes,
        }
    }
}
