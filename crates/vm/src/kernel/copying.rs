//! Copying (kernel 5.7): for kernels that cannot move, and for pages that refuse to.
//!
//! In by `UFFDIO_COPY`. Out by `mremap` with `MREMAP_DONTUNMAP` to a temporary address, which is
//! atomic as a move is, then by `UFFDIO_COPY` into the slot. Write-protecting the page and copying
//! it where it lies would deadlock when the program drops the page in between: the copy would fault
//! on the region, in the thread whose turn it is to end that fault.
//!
//! The rule it keeps: as for moving, every page ends up whole on one side. Out, a run is copied
//! page by page, so that memory which runs out puts one page at stake and not a run.
//!
//! The price: each transfer in progress takes more memory than the frames account for (out one
//! page, in one run), holds the mmap lock for writing, and makes no huge pages. Pages that a device
//! is writing to (direct I/O) are taken all the same, so that what the device writes later is lost.

use std::{io, ops::Range};

use nix::errno::Errno;

use super::{fence::Fenced, shard::KernelShard};
use crate::{
    frame::{FramePool, KernelFrame},
    pages::Pages,
    space::{DetachError, InstallError},
    sys::{self, KERNEL_PAGE_BYTES, Refusal, Stopped},
};

/// Maps copies of the frame's pages at `pages`. This replaces poison markers, which moving takes
/// for pages.
pub(super) fn install(
    shard: &KernelShard,
    pages: Pages,
    mut frame: KernelFrame,
) -> Result<(), InstallError<KernelFrame>> {
    // SAFETY:
    // - The frame's pages are present, hence readable.
    // - What a region's absent pages are filled with is the pager's decision.
    let copied = unsafe {
        match pages.count() {
            1 => copy_page_in(shard, pages.range(), frame.address()),
            _ => copy_in(shard, pages.range(), frame.address()),
        }
    };
    let Err(Stopped { done_bytes, why }) = copied else {
        // Dropping the frame gives its pages back, so that there is one of each as before.
        return Ok(());
    };
    let copied_bytes = done_bytes % pages.page_bytes();
    let whole_bytes = done_bytes - copied_bytes;
    drop(frame.split_front(whole_bytes));
    let start = pages.address() + whole_bytes;
    take_back(shard, start..start + copied_bytes);
    Err(InstallError {
        frame,
        kind: why.into(),
    })
}

/// Maps copies of the frame's pages at `pages`, all of them or none. The frame stays as it is.
pub(super) fn install_copy(
    shard: &KernelShard,
    pages: Pages,
    frame: &KernelFrame,
) -> Result<(), Refusal> {
    assert_eq!(frame.len(), pages.bytes(), "as long as its pages");
    // SAFETY:
    // - The frame's pages are present, hence readable.
    // - What a region's absent pages are filled with is the pager's decision.
    let copied = unsafe { copy_in(shard, pages.range(), frame.address()) };
    copied.map_err(|Stopped { done_bytes, why }| {
        take_back(shard, pages.address()..pages.address() + done_bytes);
        why
    })
}

/// Maps zeros at `part`, absent kernel pages of one page. Parts that the program has unmapped are
/// passed over.
pub(super) fn put_zeros(shard: &KernelShard, part: Range<usize>) -> io::Result<()> {
    let zeros = vec![0u8; part.len()];
    // SAFETY:
    // - The zeros are readable.
    // - What a region's absent pages are filled with is the pager's decision.
    let put = unsafe { copy_page_in(shard, part, zeros.as_ptr().addr()) };
    match put.map_err(|stopped| stopped.why) {
        Err(why @ (Refusal::OutOfMemory | Refusal::Contended | Refusal::Other(_))) => {
            Err(why.into())
        }
        _ => Ok(()),
    }
}

/// Drops copies that were mapped a moment ago, and whose bytes the frame has.
fn take_back(shard: &KernelShard, copies: Range<usize>) {
    if copies.is_empty() {
        return;
    }
    let fenced = shard.fence.lock();
    let there = fenced.gone.free_bytes(&copies);
    // SAFETY:
    // - The caller made these copies, and the frame has their bytes.
    // - The program has not unmapped them: the fence is locked.
    let _ = unsafe { sys::madvise(copies.start, there, libc::MADV_DONTNEED) };
}

/// Takes the leading pages of `pages` out, to `frame`'s slots. `fenced` is the shard's fence.
pub(super) fn detach(
    shard: &KernelShard,
    pages: Pages,
    mut frame: KernelFrame,
    fenced: Fenced<'_>,
) -> Result<KernelFrame, DetachError> {
    let slot = frame.address();
    // From here on, dropping what was not copied gives back the part that was.
    frame.set_occupied();
    let mut refused = None;
    for (address, to) in pages.addresses().zip((slot..).step_by(pages.page_bytes())) {
        let page = address..address + pages.page_bytes();
        if let Err(why) = copy_out(shard, page.clone(), to, frame.pool()) {
            refused = Some((page, why));
            break;
        }
    }
    // Putting back waits while mappings change.
    drop(fenced);
    let Some((page, why)) = refused else {
        return Ok(frame);
    };
    let taken_bytes = page.start - pages.address();
    let error = match why {
        CarryError::Refused(error) => error,
        CarryError::Staged(staged, why) => {
            put_back(shard, page, staged);
            DetachError::Os(why.into())
        }
    };
    frame.split_front(taken_bytes).ok_or(error)
}

/// Copies the page that was carried to `staged` back to where it was.
fn put_back(shard: &KernelShard, page: Range<usize>, staged: usize) {
    // SAFETY:
    // - `staged` is a readable mapping as long as the page.
    // - The page is being taken out: nobody else may fill it.
    let back = unsafe { copy_page_in(shard, page.clone(), staged) };
    // SAFETY: the mapping that the page was carried to. Nobody else knows it, and it is not used
    // after this.
    unsafe { sys::release(staged, page.len()) };
    if let Err(Stopped { done_bytes, .. }) = back {
        // Never zeros, never a hang: what cannot be put back is poisoned.
        shard.give_up(page.start + done_bytes..page.end);
    }
}

/// [`Uffd::copy`](crate::Uffd::copy) to absent pages of a region, as far as the program has not
/// unmapped them.
///
/// # Safety
/// As [`Uffd::copy`](crate::Uffd::copy).
pub(super) unsafe fn copy_in(
    shard: &KernelShard,
    to: Range<usize>,
    from: usize,
) -> Result<(), Stopped> {
    let start = to.start;
    shard.fence.fill(to, |uffd, done, len| {
        // SAFETY: this function's contract is that of `Uffd::copy`.
        unsafe { uffd.copy(start + done, from + done, len) }
    })
}

/// [`copy_in`] to one page, which the program may have divided (by `mprotect`, say): the kernel
/// copies nothing across two mappings.
///
/// # Safety
/// As [`copy_in`].
unsafe fn copy_page_in(shard: &KernelShard, to: Range<usize>, from: usize) -> Result<(), Stopped> {
    // SAFETY: this function's contract.
    let copied = unsafe { copy_in(shard, to.clone(), from) };
    copied.or_else(|stopped| match stopped.why {
        // SAFETY: this function's contract.
        Refusal::Missing => unsafe { copy_parts_in(shard, to, from, stopped.done_bytes) },
        _ => Err(stopped),
    })
}

/// Calls [`copy_in`] for each kernel page by itself, from `done_bytes` on.
///
/// # Safety
/// As [`copy_in`].
unsafe fn copy_parts_in(
    shard: &KernelShard,
    to: Range<usize>,
    from: usize,
    done_bytes: usize,
) -> Result<(), Stopped> {
    for at in (done_bytes..to.len()).step_by(KERNEL_PAGE_BYTES) {
        let part = to.start + at..to.start + at + KERNEL_PAGE_BYTES;
        // SAFETY: this function's contract.
        let copied = unsafe { copy_in(shard, part, from + at) };
        copied.map_err(|stopped| Stopped {
            done_bytes: at,
            why: stopped.why,
        })?;
    }
    Ok(())
}

/// A page that was not carried out.
enum CarryError {
    /// The page is where it was.
    Refused(DetachError),
    /// The page lies at this temporary address.
    Staged(usize, Refusal),
}

/// Takes one page out of a region and copies it to a slot of `pool`, which is the caller's.
fn copy_out(
    shard: &KernelShard,
    page: Range<usize>,
    slot: usize,
    pool: &FramePool,
) -> Result<(), CarryError> {
    // The program may drop the page between this and the next step: then it is taken out as zeros,
    // which the program reads there, too.
    match shard.pagemap.any_occupied(page.start, page.len()) {
        Ok(true) => match carry_out(page.clone(), slot, pool) {
            // The program has divided its mapping: the addresses are there, in two.
            Err(CarryError::Refused(DetachError::Absent)) if page.len() > KERNEL_PAGE_BYTES => {
                carry_parts_out(shard, page, slot, pool)
            }
            carried => carried,
        },
        Ok(false) => Err(CarryError::Refused(DetachError::Absent)),
        Err(error) => Err(CarryError::Refused(DetachError::Os(error))),
    }
}

/// Takes one page out, each kernel page by itself. A page that is not taken whole is put back:
/// meanwhile the program sleeps where it touches a part that is out.
fn carry_parts_out(
    shard: &KernelShard,
    page: Range<usize>,
    slot: usize,
    pool: &FramePool,
) -> Result<(), CarryError> {
    for at in (0..page.len()).step_by(KERNEL_PAGE_BYTES) {
        let part = page.start + at..page.start + at + KERNEL_PAGE_BYTES;
        let Err(why) = carry_out(part.clone(), slot + at, pool) else {
            continue;
        };
        let error = match why {
            CarryError::Refused(error) => error,
            CarryError::Staged(staged, why) => {
                put_back(shard, part, staged);
                DetachError::Os(why.into())
            }
        };
        // SAFETY:
        // - The slot is the caller's, and what was taken out so far is in it.
        // - The page is being taken out: nobody else may fill it.
        let back = unsafe { copy_parts_in(shard, page.start..page.start + at, slot, 0) };
        if let Err(Stopped { done_bytes, .. }) = back {
            // Never zeros, never a hang: what cannot be put back is poisoned.
            shard.give_up(page.start + done_bytes..page.start + at);
        }
        return Err(CarryError::Refused(error));
    }
    Ok(())
}

/// Takes bytes out of a region by `mremap`, and copies them to a slot of `pool`, which is the
/// caller's. Holes become zeros.
fn carry_out(range: Range<usize>, slot: usize, pool: &FramePool) -> Result<(), CarryError> {
    // SAFETY: the range lies in one stripe of a region, which is a private anonymous mapping in
    // which absent pages are faults.
    let staged = unsafe { sys::carry_away(range.start, range.len()) }.map_err(|errno| {
        CarryError::Refused(match errno {
            Errno::EFAULT => DetachError::Absent,
            errno => DetachError::Os(errno.into()),
        })
    })?;
    let copy = || {
        // SAFETY:
        // - `staged` is a mapping that nobody else knows. If it is not readable that is an error.
        // - The slot is the caller's.
        unsafe { pool.uffd.copy(slot, staged, range.len()) }
    };
    let copied = copy().or_else(|stopped| {
        // The program may not read there (`mprotect`), and neither may the kernel for us. Where the
        // page lies now nobody but us can.
        if stopped.why != Refusal::Other(Errno::EFAULT) {
            return Err(stopped);
        }
        let readable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: nobody else knows `staged`.
        let allowed = unsafe { sys::protect(staged, range.len(), readable) };
        allowed.map_err(|_| stopped).and_then(|()| copy())
    });
    copied.map_err(|stopped| CarryError::Staged(staged, stopped.why))?;
    // SAFETY: nobody else knows `staged`, and it is not used after this.
    unsafe { sys::release(staged, range.len()) };
    Ok(())
}

/// Takes `len` bytes that were mapped at `address` a moment ago back to a slot of `pool`, which is
/// the caller's. Kernel pages that the program has dropped meanwhile stay holes.
///
/// # Errors
/// Bytes are lost, for lack of memory.
pub(super) fn carry_back(
    address: usize,
    len: usize,
    slot: usize,
    pool: &FramePool,
) -> io::Result<()> {
    match carry_out(address..address + len, slot, pool) {
        // The program has unmapped some of it, or divided its mapping: each part answers for
        // itself.
        Err(CarryError::Refused(DetachError::Absent)) if len > KERNEL_PAGE_BYTES => (0..len)
            .step_by(KERNEL_PAGE_BYTES)
            .try_for_each(|at| carry_back(address + at, KERNEL_PAGE_BYTES, slot + at, pool)),
        Ok(()) | Err(CarryError::Refused(DetachError::Absent)) => Ok(()),
        Err(CarryError::Refused(why)) => Err(io::Error::other(why)),
        Err(CarryError::Staged(staged, why)) => {
            // SAFETY: the mapping that the bytes were carried to, which nobody else knows.
            unsafe { sys::release(staged, len) };
            Err(why.into())
        }
    }
}
