//! Mappings: reserved, advised, protected, carried away, released.
//!
//! The rule it keeps: a mapping made here takes no memory until it is touched, also where the
//! program locks all that it maps (`mlockall`), is not inherited by `fork`, and is given up again
//! where it cannot be set up.

use std::{
    ops::Range,
    sync::{OnceLock, atomic::AtomicU32},
};

use nix::errno::Errno;

use crate::calls::raw::system_call;

/// The kernel page: the unit in which the kernel maps, moves and counts. Checked when a space is
/// opened.
pub(crate) const KERNEL_PAGE_BYTES: usize = 4096;

/// `madvise`, for advice that leaves pages alone or drops pages that the caller owns. The call goes
/// to the kernel by its number: a program under `farpage run` has a `madvise` of its own.
///
/// # Safety
/// The range is a mapping of the caller's; with `MADV_DONTNEED` nothing may rely on its bytes.
pub(crate) unsafe fn madvise(start: usize, len: usize, advice: libc::c_int) -> nix::Result<()> {
    // SAFETY: this function's contract: the range is the caller's, and so are its bytes.
    result(unsafe { system_call(libc::SYS_madvise, [start, len, advice as usize, 0, 0, 0]) })
}

/// Pages that the kernel backs a mapping with, and what `fork` and core dumps do with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Huge pages, which `fork` does not inherit and core dumps leave out.
    Huge,
    /// Small pages, as above: a page that the kernel merged or prefetched behind the pager's back
    /// would break the budget.
    Small,
    /// Pages as of any mapping of the program.
    Ordinary,
}

/// Addresses where the kernel places nothing by itself: just below programs, which begin at two
/// thirds of the address space and above. ThreadSanitizer (0x5500_0000_0000 to 0x5680_0000_0000)
/// and MemorySanitizer (0x5100_0000_0000 to 0x6000_0000_0000) take them for a program's memory, and
/// most others for their own shadow memory. Empty on other processors than x86-64.
const APART: Range<usize> = match cfg!(target_arch = "x86_64") {
    true => 0x5500_0000_0000..0x5555_0000_0000,
    false => 0..0,
};
/// Number of places there that are tried.
const PLACES_TRIED: usize = 8;

/// Reserves memory as [`reserve`] does, [apart](APART) if there is room. A process made by a raw
/// `clone` has nothing at the memory's addresses, where the kernel places that process's mappings
/// if they are not apart.
pub(crate) fn reserve_apart(len: usize, align: usize, backing: Backing) -> nix::Result<usize> {
    let starts = APART.len().saturating_sub(len.saturating_add(align));
    let tries = if starts > 0 { PLACES_TRIED } else { 0 };
    for _ in 0..tries {
        let mut random = 0_usize;
        // SAFETY: writes to the variable.
        unsafe { libc::getrandom((&raw mut random).cast(), size_of::<usize>(), 0) };
        let place = (APART.start + random % starts).next_multiple_of(align);
        // SAFETY: an address that is a wish replaces no mapping.
        let start = unsafe { map_anonymous(place, len, libc::PROT_NONE, 0) }?;
        if start == place {
            return set_up(start, len, backing).map(|()| start);
        }
        // SAFETY: made just now, and nobody else knows it.
        unsafe { release(start, len) };
    }
    reserve(len, align, backing)
}

/// Reserves `len` bytes of private anonymous memory, aligned to `align` (a power of two). It takes
/// no memory until touched.
pub(crate) fn reserve(len: usize, align: usize, backing: Backing) -> nix::Result<usize> {
    let slack = align - KERNEL_PAGE_BYTES;
    // SAFETY: no address is asked for, so that no mapping is replaced.
    let start = unsafe { map_anonymous(0, len + slack, libc::PROT_NONE, 0) }?;
    let aligned = start.next_multiple_of(align);
    let end = start + len + slack;
    for (from, to) in [(start, aligned), (aligned + len, end)] {
        if from < to {
            // SAFETY: part of the mapping made above, which nobody else knows.
            unsafe { release(from, to - from) };
        }
    }
    set_up(aligned, len, backing)?;
    Ok(aligned)
}

/// Reserves memory as [`reserve`] does, but at `start`: what is mapped there is replaced, and
/// nothing beside it.
///
/// # Safety
/// Nothing relies on what is mapped there.
pub(crate) unsafe fn reserve_at(start: usize, len: usize, backing: Backing) -> nix::Result<()> {
    // SAFETY: this function's contract: nothing relies on what is mapped there.
    unsafe { map_anonymous(start, len, libc::PROT_NONE, libc::MAP_FIXED) }?;
    set_up(start, len, backing)
}

/// Reserves memory as [`reserve_at`] does, without access to it. A mapping without access is left
/// if that fails.
///
/// # Safety
/// Nothing relies on what is mapped there.
pub(crate) unsafe fn reserve_barred(start: usize, len: usize, backing: Backing) -> nix::Result<()> {
    // SAFETY: this function's contract: nothing relies on what is mapped there.
    unsafe { map_anonymous(start, len, libc::PROT_NONE, libc::MAP_FIXED) }?;
    // SAFETY: the mapping made above, of which no page is there.
    unsafe { advise(start, len, backing) }?;
    // SAFETY: as above. Pages of a locked mapping neither move nor can be dropped.
    result(unsafe { system_call(libc::SYS_munlock, [start, len, 0, 0, 0, 0]) })
}

/// Replaces what is mapped at `start` by private anonymous memory, which `fork` inherits: with
/// `bytes`, which are as long, or without access. Parts of the memory with bytes are `protected`
/// before others see them. Kernels before Linux 6.17 move one mapping at a time: if there are
/// several parts, all can be read and written there, and the caller protects them.
///
/// # Safety
/// Nothing relies on what is mapped there.
pub(crate) unsafe fn replace(
    start: usize,
    len: usize,
    bytes: Option<&[u8]>,
    protected: &[(Range<usize>, libc::c_int)],
) -> nix::Result<()> {
    let Some(bytes) = bytes else {
        // SAFETY: this function's contract: nothing relies on what is mapped there.
        return unsafe { map_anonymous(start, len, libc::PROT_NONE, libc::MAP_FIXED) }.map(drop);
    };
    assert_eq!(bytes.len(), len, "as many bytes as are replaced");
    let usable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: no address is asked for, so that no mapping is replaced.
    let made = unsafe { map_anonymous(0, len, usable, 0) }?;
    let protected = match protected.len() <= 1 || moves_several() {
        true => protected,
        false => &[],
    };
    // SAFETY:
    // - The mapping made above has room for the bytes, and nobody else knows it.
    // - Nothing relies on what is replaced: this function's contract.
    unsafe {
        (made as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), len);
        let mut parts = protected.iter();
        parts
            .try_for_each(|(part, bits)| protect(made + (part.start - start), part.len(), *bits))
            .and_then(|()| move_to(made, len, start))
            .inspect_err(|_| release(made, len))
    }
}

/// Moves what is mapped at `from` over what is mapped at `to`.
///
/// # Safety
/// Nothing relies on what is mapped there.
unsafe fn move_to(from: usize, len: usize, to: usize) -> nix::Result<()> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    // SAFETY: this function's contract.
    result(unsafe { system_call(libc::SYS_mremap, [from, len, len, flags, to, 0]) })
}

/// True if the kernel moves several mappings by one call, as it does since Linux 6.17. Older
/// kernels refuse it, with a hole where the mappings should go.
fn moves_several() -> bool {
    static MOVES: OnceLock<bool> = OnceLock::new();
    *MOVES.get_or_init(|| {
        let len = 2 * KERNEL_PAGE_BYTES;
        // SAFETY: no address is asked for, so that no mapping is replaced.
        let map = || unsafe { map_anonymous(0, len, libc::PROT_NONE, 0) };
        let (Ok(from), Ok(to)) = (map(), map()) else {
            return false;
        };
        // SAFETY: the mappings made above, which nobody else knows.
        unsafe {
            let is_moved = protect(from, KERNEL_PAGE_BYTES, libc::PROT_READ).is_ok()
                && move_to(from, len, to).is_ok();
            // After a refusal other threads may have mapped memory at `to`.
            release(if is_moved { to } else { from }, len);
            is_moved
        }
    })
}

/// Maps private anonymous memory by the call's number: a program under `farpage run` has an `mmap`
/// of its own. Memory without access is not filled with pages where the program has locked its
/// future mappings (`MCL_FUTURE`).
///
/// # Safety
/// With `MAP_FIXED`, nothing relies on what is mapped there.
unsafe fn map_anonymous(
    start: usize,
    len: usize,
    protection: libc::c_int,
    more: libc::c_int,
) -> nix::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | more;
    let args = [
        start,
        len,
        protection as usize,
        flags as usize,
        usize::MAX,
        0,
    ];
    // SAFETY: this function's contract: nothing relies on what is replaced.
    let mapped = unsafe { system_call(libc::SYS_mmap, args) };
    result(mapped).map(|()| mapped as usize)
}

/// Sets the advice of a mapping. Pages that are there stay as they are.
///
/// # Safety
/// The range is a mapping of the caller's.
pub(crate) unsafe fn advise(start: usize, len: usize, backing: Backing) -> nix::Result<()> {
    let page_kind = match backing {
        Backing::Huge => libc::MADV_HUGEPAGE,
        Backing::Small => libc::MADV_NOHUGEPAGE,
        Backing::Ordinary => return Ok(()),
    };
    // A core dump would bring every page in.
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, page_kind] {
        // SAFETY: this function's contract; none of these drops pages.
        match unsafe { madvise(start, len, advice) } {
            // A kernel built without transparent huge pages: there is nothing to ask for or to
            // refuse.
            Err(Errno::EINVAL) if advice == page_kind => {}
            advised => advised?,
        }
    }
    Ok(())
}

/// Sets advice and protection of a new mapping, which is given up if that fails.
fn set_up(start: usize, len: usize, backing: Backing) -> nix::Result<()> {
    // SAFETY: the mapping is the caller's.
    unsafe { advise(start, len, backing) }.inspect_err(|_| {
        // SAFETY: the caller's mapping, which nobody else knows.
        unsafe { release(start, len) };
    })?;
    let usable = libc::PROT_READ | libc::PROT_WRITE;
    // Pages of a locked mapping neither move nor can be dropped.
    // SAFETY: the mapping made above, of which no page is there.
    let unlocked = Errno::result(unsafe { libc::munlock(start as *const libc::c_void, len) });
    // SAFETY: as above.
    let allowed = unlocked.and_then(|_| unsafe { protect(start, len, usable) });
    allowed.inspect_err(|_| {
        // SAFETY: the mapping made above, which nobody else knows.
        unsafe { release(start, len) }
    })
}

/// Ends a mapping by `munmap`.
///
/// # Safety
/// The range is the caller's, and nothing uses it any more.
pub(crate) unsafe fn release(start: usize, len: usize) {
    // SAFETY: this function's contract: nothing uses the range any more.
    if let Err(errno) = Errno::result(unsafe { libc::munmap(start as *mut libc::c_void, len) }) {
        // Only ENOMEM is possible: cutting a hole would exceed vm.max_map_count. The range stays
        // mapped, which leaks addresses, but its memory can be given back.
        debug_assert_eq!(errno, Errno::ENOMEM);
        // SAFETY: this function's contract: nothing uses the range any more.
        let _ = unsafe { madvise(start, len, libc::MADV_DONTNEED) };
    }
}

/// `mremap` with `MREMAP_DONTUNMAP` (kernel 5.7): moves all pages of the range to a new mapping,
/// atomically, and leaves the range mapped, registered and empty. Returns the pages' new address.
///
/// # Safety
/// The range lies in one private anonymous mapping of the caller's, where absent pages are
/// expected.
pub(crate) unsafe fn carry_away(start: usize, len: usize) -> nix::Result<usize> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    // SAFETY:
    // - The range is one private anonymous mapping in which absent pages are expected: this
    //   function's contract.
    // - The kernel picks a free address, so that no mapping is replaced.
    let staged = unsafe { system_call(libc::SYS_mremap, [start, len, len, flags as usize, 0, 0]) };
    result(staged).map(|()| staged as usize)
}

/// Sets a range's protection by `mprotect`.
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn protect(start: usize, len: usize, prot: libc::c_int) -> nix::Result<()> {
    // SAFETY: this function's contract: the range is the caller's.
    Errno::result(unsafe { libc::mprotect(start as *mut libc::c_void, len, prot) }).map(drop)
}

/// Operation of `FUTEX_WAKE_OP` that writes and changes nothing: `FUTEX_OP(FUTEX_OP_ADD, 0,
/// FUTEX_OP_CMP_EQ, 0)`. Whom the comparison wakes does not matter where at most 0 threads are
/// woken.
pub const FUTEX_ADD_NOTHING: usize = 1 << 28;

/// Writes to the page at `address`, a multiple of 4, without changing a byte: a shared page becomes
/// this process's own. The write is an atomic addition of 0 by `FUTEX_WAKE_OP`, of which the kernel
/// waits for no userfault.
///
/// # Errors
/// `EFAULT` where no page is, or none that may be written to.
pub(crate) fn write_nothing(address: usize) -> nix::Result<()> {
    static NOBODY: AtomicU32 = AtomicU32::new(0);
    let call = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    // A filter of system calls that looks for such addresses would raise SIGSYS for each page.
    let args = [
        NOBODY.as_ptr().addr(),
        call as usize,
        0,
        0,
        address,
        FUTEX_ADD_NOTHING,
    ];
    // SAFETY: wakes nobody, and the bytes at `address` stay what they are.
    let done = unsafe { system_call(libc::SYS_futex, args) };
    result(done)
}

/// Returns the error of a system call.
fn result(done: isize) -> nix::Result<()> {
    match done {
        0.. => Ok(()),
        error => Err(Errno::from_raw(-error as i32)),
    }
}
