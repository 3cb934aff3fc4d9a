//! Single pages out by copying, beside running threads of the program.
//!
//! A page that moves leaves an address behind which every processor that runs the program has to
//! forget. This shootdown takes several times as long as all else in the move. A run pays for one;
//! pages that are used at random have no neighbours to share it with. A copy that is mapped leaves
//! no address behind, and pages that are taken out by copying share their shootdowns:
//!
//! 1. write-protect all from the first of them to the last: one call, one shootdown;
//! 2. copy them by `process_vm_readv`, to which a dropped page is an error and not a fault;
//! 3. give their memory back by one `process_madvise`, with one shootdown;
//! 4. lift the protection.
//!
//! The rule it keeps: from the first step on no write reaches these pages, so that what is given
//! back is what was copied. It holds as long as nobody else lifts the protection: calls do not
//! overlap. A write to a protected page raises SIGBUS, and its thread waits until the protection is
//! lifted or the page is gone.
//!
//! The downsides:
//! - A page that a device is writing to goes along unseen, which `UFFDIO_MOVE` refuses. So this is
//!   for in-thread faults alone, where the program pins what it hands to the kernel.
//! - The program may unmap a part of the region, and another of its threads map something there
//!   before that call has returned. If both happen between the last look whether mappings change
//!   and the third step, what was mapped is dropped.

use std::{io, ops::Range};

use nix::errno::Errno;

use super::shard::KernelShard;
use crate::{
    frame::KernelFrame,
    pages::Pages,
    sys::{self, KERNEL_PAGE_BYTES},
};

/// Takes out the leading ones of `pages`, kernel pages in ascending order, each to its frame.
/// Returns how many.
pub(super) fn detach(shard: &KernelShard, pages: &[Pages], frames: &mut [KernelFrame]) -> usize {
    assert!(pages.len() <= frames.len(), "a frame for each page");
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
        return 0;
    };
    let start = first.address();
    let fenced = shard.fence.lock();
    // Up to what the program has unmapped: what is there now is not the region's.
    let there = start + fenced.gone.free_bytes(&(start..last.range().end));
    let pages = &pages[..pages.partition_point(|page| page.range().end <= there)];
    let Some(end) = pages.last().map(|page| page.range().end) else {
        return 0;
    };
    let mut addresses = [0; sys::RANGES_MAX];
    let mut slots = [0; sys::RANGES_MAX];
    for (at, (page, frame)) in pages.iter().zip(&*frames).enumerate() {
        debug_assert_eq!(page.bytes(), KERNEL_PAGE_BYTES, "single pages");
        (addresses[at], slots[at]) = (page.address(), frame.address());
    }
    let (addresses, slots) = (&addresses[..pages.len()], &slots[..pages.len()]);
    let uffd = shard.fence.uffd();
    if uffd.write_protect(start, end - start).is_err() {
        drop(fenced);
        unprotect(shard, start..end);
        return 0;
    }
    // SAFETY: the slots are the frames', which are borrowed mutably.
    let copied = unsafe { sys::copy_each(addresses, slots, KERNEL_PAGE_BYTES) };
    let taken = match copied {
        // SAFETY:
        // - The frames have all bytes of these pages, and nobody writes to them: they are
        //   protected.
        // - They are the region's: the fence is locked, and no mapping is changing.
        Ok(copied) if !uffd.is_changing() => unsafe {
            sys::drop_each(
                pages[..copied].iter().map(Pages::range),
                libc::MADV_DONTNEED,
            )
        },
        Ok(_) | Err(_) => Ok(0),
    };
    // Lifting waits while mappings change.
    drop(fenced);
    unprotect(shard, start..end);
    taken.unwrap_or(0)
}

/// Lifts write protection from `range`, as far as the program has not unmapped it.
pub(super) fn unprotect(shard: &KernelShard, range: Range<usize>) {
    let mut since = None;
    let mut lift = |start: usize, len: usize| {
        loop {
            let fenced = shard.fence.lock();
            let lifted = shard.fence.uffd().write_unprotect(start, len);
            drop(fenced);
            let is_changing =
                |error: &io::Error| error.raw_os_error() == Some(Errno::EAGAIN as i32);
            match lifted {
                Err(error) if is_changing(&error) && shard.fence.wait_for_change(&mut since) => {}
                other => return other,
            }
        }
    };
    if lift(range.start, range.len()).is_err() {
        for start in range.step_by(KERNEL_PAGE_BYTES) {
            // An error: it is not the region's any more, or its messages are not read. Then the
            // thread that writes there lifts it.
            let _ = lift(start, KERNEL_PAGE_BYTES);
        }
    }
}
