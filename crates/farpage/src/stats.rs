//! [`Stats`]: what a runtime did.

use farpage_pager::PagerStats;
use farpage_store::StoreStatsSnapshot;

/// Figures of a runtime since it was built. Counts are of pages unless the name says bytes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// What happened to pages in the address space.
    pub pager: PagerStats,
    /// What happened to them on the way to and from their stores.
    pub store: StoreStatsSnapshot,
}

impl Stats {
    pub(crate) fn new(pager: PagerStats, store: StoreStatsSnapshot) -> Stats {
        Stats { pager, store }
    }

    /// Bytes of changed pages before encoding over bytes stored. `None` before anything was stored.
    pub fn compression_ratio(&self) -> Option<f64> {
        (self.store.bytes_stored > 0)
            .then(|| self.store.bytes_plain as f64 / self.store.bytes_stored as f64)
    }
}
