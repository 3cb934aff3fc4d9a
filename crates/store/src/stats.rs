//! Counters of one store, and of all stores of a runtime.
//!
//! The rule it keeps: counters are relaxed and tell no order; a snapshot is not a consistent cut.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one store, shared by all its I/O queues.
        #[derive(Debug, Default)]
        pub struct StoreStats {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            error_bits: AtomicU64,
        }

        /// The counters of [`StoreStats`] at one time.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct StoreStatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Bytes of remote memory that no page uses any more, held for
            /// [snapshots](crate::Snapshot): children made by `fork` read them. Of one region:
            /// those of all regions that share its remote memory.
            pub held_bytes: u64,
            /// Bytes of remote memory of which fewer copies are complete than were asked for.
            pub under_protected_bytes: u64,
            /// Bytes that were copied between servers to replace lost copies.
            pub repaired_bytes: u64,
            /// Bytes of remote memory that are left on servers which are being emptied.
            pub draining_bytes: u64,
            /// Bytes of remote memory whose pages have parity instead of copies.
            pub sealed_bytes: u64,
            /// Bytes of remote memory that are parity.
            pub parity_bytes: u64,
            /// Largest error, as the bits of a non-negative float, which compare as the float does.
            error_bits: u64,
        }

        impl StoreStats {
            /// Reads all counters. Bytes that are held, under-protected, repaired, draining, sealed
            /// or parity are counted elsewhere.
            pub fn snapshot(&self) -> StoreStatsSnapshot {
                StoreStatsSnapshot {
                    $($name: self.$name.load(Relaxed),)*
                    held_bytes: 0,
                    under_protected_bytes: 0,
                    repaired_bytes: 0,
                    draining_bytes: 0,
                    sealed_bytes: 0,
                    parity_bytes: 0,
                    error_bits: self.error_bits.load(Relaxed),
                }
            }

            /// Adds the counters of one run.
            pub(crate) fn add(&self, run: &StoreStatsSnapshot) {
                $(if run.$name != 0 { self.$name.fetch_add(run.$name, Relaxed); })*
                self.error_bits.fetch_max(run.error_bits, Relaxed);
            }
        }

        impl std::ops::Add for StoreStatsSnapshot {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self {
                    $($name: self.$name + other.$name,)*
                    held_bytes: self.held_bytes + other.held_bytes,
                    under_protected_bytes: self.under_protected_bytes
                        + other.under_protected_bytes,
                    repaired_bytes: self.repaired_bytes + other.repaired_bytes,
                    draining_bytes: self.draining_bytes + other.draining_bytes,
                    sealed_bytes: self.sealed_bytes + other.sealed_bytes,
                    parity_bytes: self.parity_bytes + other.parity_bytes,
                    error_bits: self.error_bits.max(other.error_bits),
                }
            }
        }
    };
}

counters! {
    /// Payload bytes that fills brought over the wire (or out of a user's store).
    bytes_read,
    /// Payload bytes that write-backs sent over the wire, to each copy (or into a user's store).
    bytes_written,
    /// Fills that needed a request.
    fills,
    /// Fills of never-written pages: no request.
    fills_never,
    /// Pages that left as zeros, because they were discarded or never written.
    blanked,
    /// Fills of pages of one repeated value: no request.
    fills_repeated,
    /// Write-backs that found the page unchanged: no request.
    write_backs_clean,
    /// Write-backs of pages of one repeated value: no request.
    write_backs_repeated,
    /// Write-backs stored as they are.
    write_backs_raw,
    /// Write-backs stored as LZ4 blocks.
    write_backs_lz4,
    /// Write-backs stored as LZ4 blocks of shuffled bytes.
    write_backs_shuffled,
    /// Write-backs stored as ZFP blocks.
    write_backs_zfp,
    /// Write-backs that ZFP declined, so that they are stored (and counted) without loss: values
    /// that are not finite, a bound that would not hold, or no gain.
    zfp_declined,
    /// Time that encoding took, all codecs and threads together, including the certification of a
    /// loss.
    encode_ns,
    /// Time that decoding took.
    decode_ns,
    /// Bytes of all changed pages before encoding: with `bytes_stored` the compression ratio.
    bytes_plain,
    /// Bytes of all changed pages as stored; a repeated value counts nothing.
    bytes_stored,
    /// Operations (of one page, or of several in a row) that were posted again after a transient
    /// failure.
    retries,
    /// READs that another copy served than the first.
    failovers,
    /// Pages that came back different from what was written, from one copy or all.
    corrupt,
    /// Pages whose fill or write-back ended with an error.
    errors,
}

impl StoreStatsSnapshot {
    /// Counts the pages of remote memory that are in local memory or were written, and not
    /// discarded since: the touched part of an allocation.
    pub fn touched_pages(&self) -> u64 {
        self.fills_never.saturating_sub(self.blanked)
    }

    /// Returns the largest difference between a value that was written back and the same value as
    /// it comes back; 0 without lossy codecs.
    pub fn largest_error(&self) -> f64 {
        f64::from_bits(self.error_bits)
    }

    pub(crate) fn see_error(&mut self, error: f64) {
        self.error_bits = self.error_bits.max(error.to_bits());
    }
}
