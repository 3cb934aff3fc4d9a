//! `malloc` and its kind.
//!
//! The rules it keeps: `calloc` touches nothing, since fresh memory of the arena is zeros, while
//! `malloc` may give out freed memory unzeroed. Memory that another allocator has cut out of its
//! own mapping in the arena is that allocator's. Small blocks are the C library's or jemalloc's
//! (`small.rs`), by their addresses.

use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
};

use crate::{
    ALIGN, Inside,
    allocate::Holds,
    arena, give_up, local, made, next, protect, set_errno,
    small::{self, Jemalloc},
    state::{self, State},
};

/// Allocates memory of the arena, and records where it begins.
fn allocate(state: &State, bytes: usize, align: usize, holds: Holds) -> *mut c_void {
    let made = state.allocate(bytes, align, holds);
    made::add(made as usize);
    made
}

/// Makes a small block by jemalloc. `None`: the next allocator is to make it.
fn small(make: impl FnOnce(&Jemalloc) -> *mut c_void) -> Option<NonNull<c_void>> {
    NonNull::new(make(small::serves()?))
}

/// Counts a block that the next allocator has `made`, and returns it. The block that is one too
/// many makes jemalloc serve small requests.
///
/// # Safety
/// `made` is a block of the next allocator, or null.
unsafe fn counted(made: *mut c_void) -> *mut c_void {
    if small::counts(made as usize) && !made.is_null() && !next::is_early(made) {
        // SAFETY: the caller's promise. Blocks are counted only if the next allocator is the C
        // library's.
        let is_due = unsafe { small::add(made) };
        if is_due && state::get().or_else(arena::try_open).is_some() {
            small::switch();
        }
    }
    made
}

/// Counts a block of the next allocator that is about to be given up.
///
/// # Safety
/// As [`counted`].
unsafe fn uncount(old: *mut c_void) {
    if small::counts(old as usize) && !old.is_null() && !next::is_early(old) {
        // SAFETY: as above.
        unsafe { small::remove(old) };
    }
}

/// `malloc`.
///
/// # Safety
/// As `malloc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    match arena::serves(bytes) {
        Some(state) => allocate(state, bytes, ALIGN, Holds::Anything),
        None if local::serves() => local::allocate(bytes, ALIGN),
        None => match small(|jemalloc| jemalloc.malloc(bytes)) {
            Some(made) => made.as_ptr(),
            // SAFETY: the caller's promise.
            None => unsafe { counted(next::malloc(bytes)) },
        },
    }
}

/// `calloc`.
///
/// # Safety
/// As `calloc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let Some(all) = count.checked_mul(bytes) else {
        set_errno(libc::ENOMEM);
        return ptr::null_mut();
    };
    match arena::serves(all) {
        Some(state) => allocate(state, all, ALIGN, Holds::Zeros),
        None if local::serves() => local::allocate(all, ALIGN),
        None => match small(|jemalloc| jemalloc.calloc(count, bytes)) {
            Some(made) => made.as_ptr(),
            // SAFETY: the caller's promise.
            None => unsafe { counted(next::calloc(count, bytes)) },
        },
    }
}

/// `free`.
///
/// # Safety
/// As `free`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free(old: *mut c_void) {
    if local::holds(old) {
        // SAFETY: the caller's promise.
        return unsafe { local::free(old) };
    }
    if !made::holds(old as usize) {
        // SAFETY: the caller's promise.
        return unsafe {
            match small::owner(old as usize) {
                Some(jemalloc) => jemalloc.free(old),
                None => {
                    uncount(old);
                    next::free(old);
                }
            }
        };
    }
    // In a child made by `fork` nothing is freed.
    let (Some(state), Some(old)) = (state::get(), NonNull::new(old)) else {
        return;
    };
    let _inside = Inside::enter();
    let Some(bytes) = state.arena.usable_bytes(old.cast()) else {
        give_up("free(): invalid pointer");
    };
    let start = old.as_ptr() as usize;
    if !protect::lift_allocated(state, &(start..start + bytes)) {
        return;
    }
    made::remove(start);
    // SAFETY: the caller's promise. A page that cannot be discarded now is tried again.
    let _ = unsafe { state.arena.deallocate(old.cast()) };
}

/// `realloc`.
///
/// # Safety
/// As `realloc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    let is_ours = made::holds(old as usize);
    if old.is_null() {
        // SAFETY: any size is fine.
        return unsafe { malloc(bytes) };
    }
    if !is_ours && !local::holds(old) && arena::serves(bytes).is_none() {
        let serves = match local::serves() {
            true => None,
            false => small::serves(),
        };
        match (small::owner(old as usize), serves) {
            (None, None) => {
                // SAFETY: the caller's promise. A block that could not be reallocated stays.
                return unsafe {
                    uncount(old);
                    let made = next::realloc(old, bytes);
                    if made.is_null() && bytes > 0 {
                        counted(old);
                    }
                    counted(made)
                };
            }
            (Some(jemalloc), Some(_)) if bytes > 0 => {
                // SAFETY: as above.
                let made = unsafe { jemalloc.realloc(old, bytes) };
                if !made.is_null() {
                    return made;
                }
            }
            _ => {}
        }
    }
    if bytes == 0 {
        // SAFETY: the caller's promise.
        unsafe { free(old) };
        return ptr::null_mut();
    }
    // Blocks that shrink below `--min-bytes` move to the next allocator: a page for each would fill
    // the arena.
    let stays = arena::serves(bytes).is_some() || Inside::is();
    if is_ours
        && stays
        && let (Some(state), Some(old)) = (state::get(), NonNull::new(old.cast()))
    {
        let start = old.as_ptr() as usize;
        made::remove(start);
        // SAFETY: the caller's promise.
        let made = unsafe { state.reallocate(old, bytes) };
        made::add(if made.is_null() { start } else { made as usize });
        return made;
    }
    // SAFETY: the caller's promise; both have as many bytes as are copied.
    unsafe {
        let made = malloc(bytes);
        if !made.is_null() {
            let kept = malloc_usable_size(old).min(bytes);
            ptr::copy_nonoverlapping(old.cast::<u8>(), made.cast::<u8>(), kept);
            free(old);
        }
        made
    }
}

/// `malloc_usable_size`.
///
/// # Safety
/// As `malloc_usable_size`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_usable_size(of: *mut c_void) -> usize {
    if local::holds(of) {
        // SAFETY: the caller's promise.
        return unsafe { local::usable(of) };
    }
    if !made::holds(of as usize) {
        // SAFETY: the caller's promise.
        return unsafe {
            match small::owner(of as usize) {
                Some(jemalloc) => jemalloc.usable(of),
                None => next::usable(of),
            }
        };
    }
    let (Some(state), Some(of)) = (state::inherited(), NonNull::new(of.cast())) else {
        return 0;
    };
    let _inside = Inside::enter();
    state.arena.usable_bytes(of).unwrap_or(0)
}

/// `memalign`.
///
/// # Safety
/// As `memalign`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    match arena::serves(bytes) {
        Some(state) if align.is_power_of_two() => allocate(state, bytes, align, Holds::Anything),
        None if local::serves() && align.is_power_of_two() => local::allocate(bytes, align),
        None if align.is_power_of_two()
            && let Some(made) = small(|jemalloc| jemalloc.memalign(align, bytes)) =>
        {
            made.as_ptr()
        }
        // SAFETY: the caller's promise.
        _ => unsafe { counted(next::memalign(align, bytes)) },
    }
}

/// `aligned_alloc`.
///
/// # Safety
/// As `aligned_alloc`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { memalign(align, bytes) }
}

/// `posix_memalign`.
///
/// # Safety
/// As `posix_memalign`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn posix_memalign(
    made: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let before = crate::errno();
    // SAFETY: the caller's promise.
    let memory = unsafe { memalign(align, bytes) };
    set_errno(before);
    if memory.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's promise: the result goes there.
    unsafe { *made = memory };
    0
}
