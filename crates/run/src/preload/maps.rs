//! `mmap` of private anonymous memory, and what is done with it.
//!
//! The rule it keeps: what is mapped in the arena is known by its bytes. A page of the arena is
//! given back when nothing is mapped in it any more. All other calls go to the kernel as they are.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    Inside, set_errno,
    state::{self, State},
};

const KERNEL_PAGE_BYTES: usize = 4096;

/// First addresses of what is mapped in the arena, and how many bytes it has.
static MAPPED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn mapped() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `mmap`.
///
/// # Safety
/// As `mmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let may_be = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let is_plain = address.is_null()
        && protection == libc::PROT_READ | libc::PROT_WRITE
        && flags & libc::MAP_TYPE == libc::MAP_PRIVATE
        && flags & libc::MAP_ANONYMOUS != 0
        && flags & !may_be == 0;
    if is_plain && let Some(state) = state::serves(bytes) {
        return map(state, bytes).unwrap_or(libc::MAP_FAILED);
    }
    // SAFETY: the caller's promise.
    unsafe {
        libc::syscall(
            libc::SYS_mmap,
            address,
            bytes,
            protection,
            flags,
            fd,
            offset,
        ) as *mut c_void
    }
}

/// `mmap64`, which is the same here.
///
/// # Safety
/// As `mmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(address, bytes, protection, flags, fd, offset) }
}

fn map(state: &State, bytes: usize) -> Option<*mut c_void> {
    let whole = bytes.checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    let made = state.allocate(whole, KERNEL_PAGE_BYTES);
    if made.is_null() {
        return None;
    }
    let _inside = Inside::enter();
    mapped().insert(made as usize, whole);
    Some(made)
}

/// The addresses of a call, if they lie in the arena.
fn ours(address: *mut c_void, bytes: usize) -> Option<Range<usize>> {
    let start = address as usize;
    let end = start
        .checked_add(bytes)?
        .checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    (bytes > 0 && state::owns(start) && state::owns(end - 1)).then_some(start..end)
}

/// `munmap`.
///
/// # Safety
/// As `munmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    match (ours(address, bytes), state::get()) {
        (Some(addresses), Some(state)) if !Inside::is() => {
            unmap(state, addresses);
            0
        }
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(libc::SYS_munmap, address, bytes) as c_int },
    }
}

fn unmap(state: &State, addresses: Range<usize>) {
    let _inside = Inside::enter();
    let page_bytes = state.arena.region().page_bytes();
    let base = state.arena.addresses().start;
    let down = |at: usize| base + (at - base) / page_bytes * page_bytes;
    let up = |at: usize| base + (at - base).next_multiple_of(page_bytes);
    let mut mapped = mapped();
    for gone in cut(&mut mapped, addresses) {
        // Pages at the ends go, too, if nothing else is mapped in them.
        let is_free = |part: Range<usize>| {
            let before = mapped.range(..part.end).next_back();
            before.is_none_or(|(&start, &bytes)| start + bytes <= part.start)
        };
        let first = down(gone.start);
        let start = if is_free(first..gone.start) {
            first
        } else {
            gone.start
        };
        let last = up(gone.end);
        let end = if is_free(gone.end..last) {
            last
        } else {
            gone.end
        };
        // SAFETY: the program has unmapped it. What cannot be discarded now is tried again.
        let _ = unsafe { state.arena.release(start..end) };
    }
}

/// Takes addresses out of what is mapped. Returns those that were.
fn cut(mapped: &mut BTreeMap<usize, usize>, addresses: Range<usize>) -> Vec<Range<usize>> {
    let touched: Vec<_> = mapped
        .range(..addresses.end)
        .rev()
        .map(|(&start, &bytes)| (start, start + bytes))
        .take_while(|&(_, end)| end > addresses.start)
        .collect();
    let mut gone = Vec::new();
    for (start, end) in touched {
        mapped.remove(&start);
        let part = start.max(addresses.start)..end.min(addresses.end);
        if start < part.start {
            mapped.insert(start, part.start - start);
        }
        if part.end < end {
            mapped.insert(part.end, end - part.end);
        }
        gone.push(part);
    }
    gone
}

/// `mremap`.
///
/// # Safety
/// As `mremap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mremap(
    address: *mut c_void,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    let (Some(old), Some(state)) = (ours(address, bytes), state::get()) else {
        // SAFETY: the caller's promise.
        return unsafe {
            libc::syscall(
                libc::SYS_mremap,
                address,
                bytes,
                new_bytes,
                flags,
                new_address,
            ) as *mut c_void
        };
    };
    if flags & !libc::MREMAP_MAYMOVE != 0 || new_bytes == 0 {
        set_errno(libc::EINVAL);
        return libc::MAP_FAILED;
    }
    let whole = new_bytes.next_multiple_of(KERNEL_PAGE_BYTES);
    if whole <= old.len() {
        if whole < old.len() {
            unmap(state, old.start + whole..old.end);
        }
        return address;
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let Some(made) = map(state, whole) else {
        return libc::MAP_FAILED;
    };
    // SAFETY: the new mapping is longer than the old one, and nobody else has it.
    unsafe {
        made.cast::<u8>()
            .copy_from_nonoverlapping(address.cast(), old.len())
    };
    unmap(state, old);
    made
}

/// `madvise`.
///
/// # Safety
/// As `madvise`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn madvise(
    address: *mut c_void,
    bytes: usize,
    advice: c_int,
) -> c_int {
    let (Some(addresses), Some(state), false) = (ours(address, bytes), state::get(), Inside::is())
    else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice) as c_int };
    };
    let _inside = Inside::enter();
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            // SAFETY: the program gives the contents up.
            match unsafe { state.arena.discard(addresses) } {
                Ok(()) => 0,
                Err(_) => -1,
            }
        }
        // The others say how memory is backed, or are hints: what backs it here is not theirs.
        _ => 0,
    }
}
