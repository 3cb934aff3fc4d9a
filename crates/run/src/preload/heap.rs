//! `malloc` and its kind.
//!
//! The rules it keeps: `calloc` touches nothing, since fresh memory of the arena is zeros, while
//! `malloc` may give out freed memory unzeroed. Memory that another allocator has cut out of its
//! own mapping in the arena is that allocator's.

use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
};

use crate::{
    ALIGN, Inside,
    allocate::Holds,
    arena, give_up, local, made, next, protect, set_errno,
    state::{self, State},
};

/// Allocates memory of the arena, and records where it begins.
fn allocate(state: &State, bytes: usize, align: usize, holds: Holds) -> *mut c_void {
    let made = state.allocate(bytes, align, holds);
    made::add(made as usize);
    made
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
        // SAFETY: the caller's promise.
        None => unsafe { next::malloc(bytes) },
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
        // SAFETY: the caller's promise.
        None => unsafe { next::calloc(count, bytes) },
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
        return unsafe { next::free(old) };
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
        // SAFETY: the caller's promise.
        return unsafe { next::realloc(old, bytes) };
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
        return unsafe { next::usable(of) };
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
        // SAFETY: the caller's promise.
        _ => unsafe { next::memalign(align, bytes) },
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
