//! Single pages out by copying, beside running threads of the program.
//!
//! A page that moves leaves an address behind which every processor that runs the program has to
//! forget. This shootdown takes several times as long as all else in the move. A run pays for one;
//! pages that are used at random have no neighbours to share it with. A copy that is mapped leaves
//! no address behind, and pages that are taken out by copying share their shootdowns:
//!
//! 1. write-protect all from the first of them to the last: one call, one shootdown;
//! 2. copy them by `process_vm_readv`;
//! 3. own each of them: a page that another thread has taken up meanwhile stays;
//! 4. give the owned pages' memory back by one `process_madvise`, with one shootdown;
//! 5. lift the protection.
//!
//! The rule it keeps: from the first step on no write reaches these pages, so that what is given
//! back is what was copied. It holds as long as no other caller lifts the protection: calls do not
//! overlap. A write to a protected page is a fault, and its thread waits until the protection is
//! lifted or the page is gone.
//!
//! The second step may meet a page that the program has dropped. That is an error to it where
//! faults are signals. Elsewhere it sleeps on a fault like any thread of the program, until the
//! page has been filled. So the pages have no owner then, and the fence, under which the fault's
//! message is read, is not held.
//!
//! The downsides:
//! - A page that a device is writing to goes along unseen, which `UFFDIO_MOVE` refuses. So this is
//!   for in-thread faults, where the program pins what it hands to the kernel, and for programs
//!   that promise it.
//! - The program may unmap a part of the region, and another of its threads map something there
//!   before that call has returned. If both happen between the last look whether mappings change
//!   and the fourth step, what was mapped is dropped.

use std::{io, ops::Range};

use nix::errno::Errno;

use super::{fence::Fenced, shard::KernelShard};
use crate::{
    frame::KernelFrame,
    pages::Pages,
    sys::{self, KERNEL_PAGE_BYTES},
};

/// Copies the leading pages of `pages`, kernel pages in ascending order, each to its frame, and
/// takes out the pages that `own` owns, by their number. Returns up to which page that went well.
pub(super) fn detach(
    shard: &KernelShard,
    pages: &[Pages],
    frames: &mut [KernelFrame],
    own: &mut dyn FnMut(usize) -> bool,
) -> usize {
    assert!(pages.len() <= frames.len(), "a frame for each page");
    let fenced = shard.fence.lock();
    let pages = there(&fenced, pages);
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
        return 0;
    };
    let (start, end) = (first.address(), last.range().end);
    let mut addresses = [0; sys::RANGES_MAX];
    let mut slots = [0; sys::RANGES_MAX];
    for (at, (page, frame)) in pages.iter().zip(&*frames).enumerate() {
        debug_assert_eq!(page.bytes(), KERNEL_PAGE_BYTES, "single pages");
        (addresses[at], slots[at]) = (page.address(), frame.address());
    }
    let (addresses, slots) = (&addresses[..pages.len()], &slots[..pages.len()]);
    let protected = shard.fence.uffd().write_protect(start, end - start);
    drop(fenced);
    let mut dealt_with = 0;
    if protected.is_ok() {
        // SAFETY: the slots are the frames', which are borrowed mutably.
        let copied = unsafe { sys::copy_each(addresses, slots, KERNEL_PAGE_BYTES) };
        dealt_with = give_back(shard, &pages[..copied.unwrap_or(0)], own);
    }
    // Lifting waits while mappings change.
    unprotect(shard, start..end);
    dealt_with
}

/// Returns the leading pages before the first address that the program has unmapped: memory there
/// is not the region's.
fn there<'a>(fenced: &Fenced<'_>, pages: &'a [Pages]) -> &'a [Pages] {
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
        return &[];
    };
    let start = first.address();
    let there = start + fenced.gone.free_bytes(&(start..last.range().end));
    &pages[..pages.partition_point(|page| page.range().end <= there)]
}

/// Gives the memory of pages back that have been copied and that `own` owns. Returns up to which
/// page that went well.
fn give_back(shard: &KernelShard, pages: &[Pages], own: &mut dyn FnMut(usize) -> bool) -> usize {
    let fenced = shard.fence.lock();
    let pages = there(&fenced, pages);
    if shard.fence.uffd().is_changing() {
        return 0;
    }
    let mut owned = [0; sys::RANGES_MAX];
    let mut count = 0;
    for at in (0..pages.len()).filter(|&at| own(at)) {
        owned[count] = at;
        count += 1;
    }
    let owned = &owned[..count];
    // SAFETY:
    // - The frames have all bytes of these pages: since before they were copied nobody has put
    //   other ones there, and nobody has written to them, since they are protected.
    // - They are the region's: the fence is held, and no mapping is changing.
    let dropped = unsafe {
        sys::drop_each(
            owned.iter().map(|&at| pages[at].range()),
            libc::MADV_DONTNEED,
        )
    };
    drop(fenced);
    owned
        .get(dropped.unwrap_or(0))
        .map_or(pages.len(), |&at| at)
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
            // An error: the page is not the region's any more, or its messages are not read. Then
            // the thread that writes there lifts the protection.
            let _ = lift(start, KERNEL_PAGE_BYTES);
        }
    }
}
