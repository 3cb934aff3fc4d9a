//! [`Stats`]: figures of a runtime.

use std::fmt;

use bytesize::ByteSize;
use farpage_pager::PagerStats;
use farpage_store::{RegPoolStats, StoreStatsSnapshot};

/// Figures of a runtime since it was built. Counts are of pages unless the name says bytes.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Counts of pages in the address space.
    pub pager: PagerStats,
    /// Counts of pages on the way to and from their stores.
    pub store: StoreStatsSnapshot,
    /// Memory registered with network adapters. Without adapters, memory that would be registered.
    pub registered: RegPoolStats,
    /// Number of servers of `auto://` endpoints that are reached over tcp because rdma was not
    /// available. [`Session::fallback`](crate::Session::fallback) of each of
    /// [`Runtime::sessions`](crate::Runtime::sessions) says why.
    pub fallbacks: usize,
}

impl Stats {
    pub(crate) fn new(
        pager: PagerStats,
        store: StoreStatsSnapshot,
        registered: RegPoolStats,
        fallbacks: usize,
    ) -> Stats {
        Stats {
            pager,
            store,
            registered,
            fallbacks,
        }
    }

    /// Bytes of changed pages before encoding over bytes stored. `None` if nothing was stored.
    pub fn compression_ratio(&self) -> Option<f64> {
        (self.store.bytes_stored > 0)
            .then(|| self.store.bytes_plain as f64 / self.store.bytes_stored as f64)
    }

    /// Returns the largest difference between a value that was written back and the same value as
    /// the store returns it, over all arrays: 0 without lossy codecs.
    pub fn largest_error(&self) -> f64 {
        self.store.largest_error()
    }
}

/// The figures in one line for people.
impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats {
            pager,
            store,
            fallbacks,
            ..
        } = self;
        write!(
            f,
            "{} faults, {} fills ({} ahead), {} evictions ({} unchanged), {} taken back on their way out; {} read, {} written; at most {} of {} in memory",
            pager.faults,
            pager.fills,
            pager.prefetches,
            pager.evictions,
            pager.clean_evictions,
            pager.steals,
            ByteSize(store.bytes_read),
            ByteSize(store.bytes_written),
            ByteSize(pager.peak_resident_bytes),
            ByteSize(pager.budget_bytes),
        )?;
        if store.failovers > 0 {
            write!(f, "; {} reads by another copy", store.failovers)?;
        }
        if store.under_protected_bytes > 0 {
            let lacking = ByteSize(store.under_protected_bytes);
            write!(f, "; {lacking} have fewer copies than asked for")?;
        }
        if store.sealed_bytes > 0 {
            let (sealed, parity) = (ByteSize(store.sealed_bytes), ByteSize(store.parity_bytes));
            write!(
                f,
                "; {sealed} have parity instead of copies, which takes {parity}"
            )?;
        }
        if store.repaired_bytes > 0 {
            write!(f, "; {} copied again", ByteSize(store.repaired_bytes))?;
        }
        if store.draining_bytes > 0 {
            let left = ByteSize(store.draining_bytes);
            write!(f, "; {left} are left on servers that are being emptied")?;
        }
        match fallbacks {
            0 => Ok(()),
            servers => write!(f, "; {servers} of the servers over tcp for want of rdma"),
        }
    }
}
