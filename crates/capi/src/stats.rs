//! Figures of a runtime.

use std::{mem, ptr};

use crate::{
    error::{Failure, farpage_code, guard},
    runtime::farpage_runtime,
};

/// Figures of a runtime since it was made. Counts are of pages unless the name says bytes.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct farpage_stats {
    /// Page faults.
    pub faults: u64,
    /// Pages brought in, for a fault or ahead of one.
    pub fills: u64,
    /// Pages of `fills` that were brought in ahead of need.
    pub prefetches: u64,
    /// Pages taken out.
    pub evictions: u64,
    /// Pages of `evictions` that had not changed.
    pub clean_evictions: u64,
    /// Pages that could not be brought in and raise SIGBUS.
    pub poisoned: u64,
    /// Evictions that failed, so that the page stayed.
    pub failed_evictions: u64,
    /// Bytes of pages that are in local memory now.
    pub resident_bytes: u64,
    /// The most that `resident_bytes` ever was.
    pub peak_resident_bytes: u64,
    /// Budget of the runtime in bytes.
    pub budget_bytes: u64,
    /// Bytes read from servers and stores.
    pub bytes_read: u64,
    /// Bytes written to servers and stores.
    pub bytes_written: u64,
}

/// Puts the figures of a runtime into `*stats`. `stats_bytes` is `sizeof(farpage_stats)` of the
/// program's header: fields that this library does not have become zero.
///
/// # Safety
/// `runtime` came from `farpage_runtime_new` and has not been freed; `stats` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_runtime_stats(
    runtime: *const farpage_runtime,
    stats: *mut farpage_stats,
    stats_bytes: usize,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let all = unsafe { farpage_runtime::get(runtime) }?.stats();
        if stats.is_null() {
            return Err(Failure::invalid("no place for the figures: it is null"));
        }
        let figures = farpage_stats {
            faults: all.pager.faults,
            fills: all.pager.fills,
            prefetches: all.pager.prefetches,
            evictions: all.pager.evictions,
            clean_evictions: all.pager.clean_evictions,
            poisoned: all.pager.poisoned,
            failed_evictions: all.pager.failed_evictions,
            resident_bytes: all.pager.resident_bytes,
            peak_resident_bytes: all.pager.peak_resident_bytes,
            budget_bytes: all.pager.budget_bytes,
            bytes_read: all.store.bytes_read,
            bytes_written: all.store.bytes_written,
        };
        let common = stats_bytes.min(mem::size_of::<farpage_stats>());
        // SAFETY: the caller vouches for `stats_bytes`; all of ours is initialised.
        unsafe {
            ptr::write_bytes(stats.cast::<u8>(), 0, stats_bytes);
            ptr::copy_nonoverlapping(
                ptr::from_ref(&figures).cast::<u8>(),
                stats.cast::<u8>(),
                common,
            );
        }
        Ok(())
    })
}
