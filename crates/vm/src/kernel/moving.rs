//! Moving (kernel 6.8): the physical page changes its address, nothing is copied.
//!
//! `UFFDIO_MOVE` between region and frame pool. The kernel checks that the destination is
//! registered with the descriptor that the call is made on: the shard's for moving in, the pool's
//! for moving out. A run moves by one call, for which every processor that runs the program has to
//! forget the old addresses once.
//!
//! The rule it keeps: wherever the kernel refuses, every page ends up whole on one side, and every
//! write of the program is in it. Pages before the refusal stay where they went. A page of which
//! only a part has moved goes back.

use std::ops::Range;

use super::{copying, fence::Fenced, holes::Progress, occupied, shard::KernelShard, sharing};
use crate::{
    frame::KernelFrame,
    pages::Pages,
    space::{DetachError, InstallError, InstallErrorKind},
    sys::{KERNEL_PAGE_BYTES, Refusal, Stopped},
    uffd::Uffd,
};

/// Maps the frame's pages at `pages`.
pub(super) fn install(
    shard: &KernelShard,
    pages: Pages,
    mut frame: KernelFrame,
) -> Result<(), InstallError<KernelFrame>> {
    let slot = frame.address();
    // SAFETY:
    // - The slots are the frame's, which this call consumes or takes back whole.
    // - What a region's absent pages are filled with is the pager's decision.
    let moved = unsafe { move_in(shard, pages.range(), slot, false) };
    let Err(Stopped { done_bytes, why }) = moved else {
        frame.vacated();
        return Ok(());
    };
    let moved_bytes = done_bytes % pages.page_bytes();
    let whole_bytes = done_bytes - moved_bytes;
    if let Some(whole) = frame.split_front(whole_bytes) {
        whole.vacated();
    }
    let rest = pages
        .behind(whole_bytes)
        .expect("a move that stopped has not done all");
    let frame = match moved_bytes {
        0 => frame,
        bytes => take_back(shard, rest.address(), bytes, frame)?,
    };
    match why {
        // The page, or the rest of it that the program has left, is poisoned. Or it is mapped,
        // which copying is told as well.
        Refusal::Exists => copying::install(shard, rest, frame),
        // `mlock` or `mprotect` has made its mapping differ from the pool's.
        Refusal::Invalid if moved_bytes == 0 => copying::install(shard, rest, frame),
        // A pin on the frame's page, which direct I/O of a store leaves for a moment after it has
        // ended, or a lock on it. Only copying passes them.
        Refusal::Busy | Refusal::Contended => copying::install(shard, rest, frame),
        why => Err(InstallError {
            frame,
            kind: why.into(),
        }),
    }
}

/// Undoes the part of a frame's first page, to be mapped at `address`, that moved in before the
/// rest was refused: a part of the page was mapped or poisoned already. Returns the whole frame.
fn take_back(
    shard: &KernelShard,
    address: usize,
    moved_bytes: usize,
    mut frame: KernelFrame,
) -> Result<KernelFrame, InstallError<KernelFrame>> {
    let slot = frame.address();
    let fenced = shard.fence.lock();
    let there = fenced.gone.free_bytes(&(address..address + moved_bytes));
    // SAFETY:
    // - What moved in a moment ago moves back, except what the program has unmapped since: the
    //   fence is locked. The program's writes to it come along; what it dropped is a hole.
    // - The slots are the frame's, and are absent since their pages moved away.
    let back = unsafe { move_pages(shard, &frame.pool().uffd, slot..slot + there, address, true) };
    // Pinned or gone within that moment: the pinned page's bytes are taken as when copying.
    let carried = back.or_else(|Stopped { done_bytes, .. }| {
        copying::carry_back(
            address + done_bytes,
            there - done_bytes,
            slot + done_bytes,
            frame.pool(),
        )
    });
    let filled = frame.fill_holes_with_zeros(0..moved_bytes);
    match carried.and(filled) {
        Ok(()) => Ok(frame),
        // Not `Exists` or `Gone`, with which the owner would take a frame for whole that has zeros
        // where bytes are missing.
        Err(error) => Err(InstallError {
            frame,
            kind: InstallErrorKind::Os(error),
        }),
    }
}

/// Takes the leading pages of `pages` out, to `frame`'s slots. `fenced` is the shard's fence.
pub(super) fn detach(
    shard: &KernelShard,
    pages: Pages,
    mut frame: KernelFrame,
    fenced: Fenced<'_>,
) -> Result<KernelFrame, DetachError> {
    let (slot, address, page_bytes) = (frame.address(), pages.address(), pages.page_bytes());
    // 1. Move up to the first page that is absent or refused: all at once or, where the program has
    //    divided the mapping (by `mprotect`, say) and the kernel refuses what spans two, page by
    //    page.
    let mut progress = Progress::new(pages.bytes(), page_bytes);
    let mut why = None;
    let mut unshared_to = address;
    while let Some(next) = progress.next() {
        let to = slot + next.start..slot + next.end;
        // SAFETY:
        // - The bytes vanish from the mapping alone: touching them there is a fault, which waits
        //   for an install.
        // - The slots are the frame's and vacant.
        let moved =
            unsafe { move_pages(shard, &frame.pool().uffd, to, address + next.start, false) };
        let Err(Stopped {
            done_bytes,
            why: refusal,
        }) = moved
        else {
            progress.moved();
            continue;
        };
        // 2. Pages that a process made by `fork` had at some time are shared until they are written
        //    to, and refused as pinned ones are.
        let refused_at = address + next.start + done_bytes;
        if refusal == Refusal::Busy && refused_at >= unshared_to && sharing::began() {
            unshared_to = address + next.end;
            sharing::end(refused_at..unshared_to);
            progress.stopped(done_bytes);
            continue;
        }
        let is_refused_whole = refusal == Refusal::Invalid && done_bytes == 0;
        let is_first = is_refused_whole && next.start == 0;
        // The kernel moves between mappings that are alike only: not out of one that the program
        // may only read, nor what it has locked or protected (`mlock`, `mprotect`).
        if is_first && occupied::is_read_only(address) {
            return copying::detach(shard, pages, frame, fenced);
        }
        if is_refused_whole && progress.narrow() {
            continue;
        }
        if is_first {
            return copying::detach(shard, pages, frame, fenced);
        }
        // The program dropped this kernel page; the rest of the page may be there.
        if refusal == Refusal::Missing {
            if progress.pass_hole(done_bytes) {
                continue;
            }
        } else {
            progress.stopped(done_bytes);
        }
        why = Some(refusal.into());
        break;
    }
    // The rest deals with frames, and with putting back, which waits while mappings change.
    drop(fenced);
    // 3. Make the pages whole that are partly there.
    let mut whole_bytes = progress.whole_bytes();
    if let Some(holes) = progress.holes() {
        let first_page = holes.start - holes.start % page_bytes;
        if let Err(error) = frame.fill_holes_with_zeros(holes) {
            whole_bytes = first_page;
            why = Some(DetachError::Os(error));
        }
    }
    // 4. Put back what moved behind them.
    let Some(rest) = pages.behind(whole_bytes) else {
        frame.set_occupied();
        return Ok(frame);
    };
    let whole = frame.split_front(whole_bytes);
    let put_back = match progress.moved_behind(whole_bytes) {
        Some(moved) => {
            frame.set_occupied();
            put_back(shard, rest.address()..rest.address() + moved.len(), frame)
        }
        None => Ok(()),
    };
    match whole {
        Some(mut whole) => {
            whole.set_occupied();
            Ok(whole)
        }
        None => Err(put_back
            .err()
            .or(why)
            .expect("a run that ended early has a reason")),
    }
}

/// Undoes the part of a run that moved out before the rest was refused: `range` gets its bytes back
/// from the start of `frame`. Threads that touched it in between sleep on absent pages and are
/// woken. Holes stay holes.
fn put_back(
    shard: &KernelShard,
    range: Range<usize>,
    frame: KernelFrame,
) -> Result<(), DetachError> {
    let slot = frame.address();
    let mut at = range.start;
    let mut result = Ok(());
    while at < range.end {
        let from = |at: usize| slot + (at - range.start);
        // SAFETY:
        // - What moved out a moment ago moves back, to pages that nobody else may fill.
        // - The slots are the frame's, which ends here.
        let back = unsafe { move_in(shard, at..range.end, from(at), true) };
        let Err(Stopped { done_bytes, why }) = back else {
            break;
        };
        at += done_bytes;
        match why {
            // The program has unmapped it meanwhile.
            Refusal::Missing | Refusal::Ended => return Err(DetachError::Absent),
            // Nobody may fill a page that is being taken out. If somebody did, those bytes are
            // newer.
            Refusal::Exists => {}
            // A lock or a pin on the frame's page, which only copying passes.
            why => {
                // SAFETY:
                // - The slot is the frame's. A hole in it is an error (EFAULT) and no fault, since
                //   the pool is in SIGBUS mode.
                // - As above, nobody else may fill the page.
                let copied =
                    unsafe { copying::copy_in(shard, at..at + KERNEL_PAGE_BYTES, from(at)) };
                match copied.map_err(|stopped| stopped.why) {
                    Ok(()) | Err(Refusal::Exists | Refusal::Other(_)) => {}
                    Err(_) => {
                        // Never zeros, never a hang: what cannot be put back is poisoned.
                        shard.give_up(at..at + KERNEL_PAGE_BYTES);
                        result = Err(DetachError::Os(why.into()));
                    }
                }
            }
        }
        at += KERNEL_PAGE_BYTES;
    }
    result
}

/// [`move_pages`] to absent pages of a region, as far as the program has not unmapped them.
///
/// # Safety
/// As [`move_pages`].
unsafe fn move_in(
    shard: &KernelShard,
    to: Range<usize>,
    from: usize,
    allow_holes: bool,
) -> Result<(), Stopped> {
    let start = to.start;
    shard.fence.fill(to, |uffd, done, len| {
        let to = start + done..start + done + len;
        // SAFETY: this function's contract is that of `move_pages`.
        unsafe { move_pages(shard, uffd, to, from + done, allow_holes) }
    })
}

/// Calls [`Uffd::move_pages`] so that a page that is refused has not moved.
///
/// From Linux 6.18 on, a move that has to try again inside the kernel (a page ages or migrates at
/// that moment) forgets that it succeeded, tries once more, and meets the pages that it has just
/// moved itself: `EEXIST`, with nothing counted and nobody woken. The source tells this from a
/// destination that was occupied before: the source is empty.
///
/// # Safety
/// - As [`Uffd::move_pages`].
/// - Nobody else changes the pages at `from` meanwhile, but the program.
unsafe fn move_pages(
    shard: &KernelShard,
    uffd: &Uffd,
    to: Range<usize>,
    from: usize,
    allow_holes: bool,
) -> Result<(), Stopped> {
    let len = to.len();
    let mut done = 0;
    while done < len {
        // SAFETY: this function's contract.
        let moved =
            unsafe { uffd.move_pages(to.start + done, from + done, len - done, allow_holes) };
        let Err(Stopped { done_bytes, why }) = moved else {
            break;
        };
        done += done_bytes;
        let is_source_there = || shard.is_occupied(from + done, KERNEL_PAGE_BYTES);
        if why != Refusal::Exists || is_source_there() {
            return Err(Stopped {
                done_bytes: done,
                why,
            });
        }
        // The number of moved pages is not told: the next page answers for itself.
        uffd.wake(to.start + done, KERNEL_PAGE_BYTES)
            .expect("waking checks alignment only, and pages are aligned");
        done += KERNEL_PAGE_BYTES;
    }
    Ok(())
}
