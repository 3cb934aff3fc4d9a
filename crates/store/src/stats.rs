//! Counters of one store, and of all stores of a runtime.
//!
//! The rule it keeps: counters are relaxed and tell no order; a snapshot is not a consistent cut.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a store has done so far. Shared by all lanes.
        #[derive(Debug, Default)]
        pub struct StoreStats { $($(#[$doc])* pub(crate) $name: AtomicU64,)* }

        /// The counters of [`StoreStats`] at one time.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct StoreStatsSnapshot { $($(#[$doc])* pub $name: u64,)* }

        impl StoreStats {
            /// Reads all counters.
            pub fn snapshot(&self) -> StoreStatsSnapshot {
                StoreStatsSnapshot { $($name: self.$name.load(Relaxed),)* }
            }

            /// Adds what one run did.
            pub(crate) fn add(&self, run: &StoreStatsSnapshot) {
                $(if run.$name != 0 { self.$name.fetch_add(run.$name, Relaxed); })*
            }
        }

        impl std::ops::Add for StoreStatsSnapshot {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    /// Payload bytes that fills brought over the wire (or out of a user's store).
    bytes_read,
    /// Payload bytes that write-backs sent over the wire (or into a user's store).
    bytes_written,
    /// Fills that needed a request.
    fills,
    /// Fills of never-written pages: no request.
    fills_never,
    /// Fills of pages of one repeated value: no request.
    fills_repeated,
    /// Write-backs that found the page unchanged: no request.
    write_backs_clean,
    /// Write-backs of pages of one repeated value: no request.
    write_backs_repeated,
    /// Write-backs stored as they are.
    write_backs_raw,
    /// Write-backs stored compressed.
    write_backs_lz4,
    /// Bytes of all changed pages before encoding: with `bytes_stored` the compression ratio.
    bytes_plain,
    /// Bytes of the same pages as stored; a repeated value counts nothing.
    bytes_stored,
    /// Operations (of one page, or of several in a row) that were posted again after a transient failure.
    retries,
    /// Pages that came back other than they were written.
    corrupt,
    /// Pages whose fill or write-back ended with an error.
    errors,
}
