//! Pages that processes made by `fork` share.
//!
//! The kernel shares all present pages with the new process, until one of both writes. It never
//! moves a page that was shared, not even when the other process has ended, before the page has
//! been written to.
//!
//! The rule it keeps: the sharing ends without a change of the page's bytes, and without a fault of
//! the calling thread, which may be the one that serves faults.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::sys::{self, KERNEL_PAGE_BYTES};

/// True from the first process that is made by `fork` with regions on.
static BEGAN: AtomicBool = AtomicBool::new(false);

/// Notes that a process is about to get copies of regions.
pub(crate) fn begin() {
    BEGAN.store(true, Ordering::Relaxed);
}

/// True if pages may be shared, or may have been.
pub(super) fn began() -> bool {
    BEGAN.load(Ordering::Relaxed)
}

/// Ends the sharing of the pages in `range`, as far as pages are there: the kernel copies each that
/// is still shared.
pub(super) fn end(range: Range<usize>) {
    for address in range.step_by(KERNEL_PAGE_BYTES) {
        // What is absent, or may not be written to, stays as it is: the next move says so.
        let _ = sys::write_nothing(address);
    }
}
