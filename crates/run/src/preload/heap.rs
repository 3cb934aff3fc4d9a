//! `malloc` and its kind.
//!
//! The rules it keeps: `calloc` touches nothing, since fresh memory of the arena is zeros, while
//! `malloc` may give out freed memory unzeroed. Memory that another allocator has cut out of its
//! own mapping in the arena is that allocator's. Small blocks are the C library's or jemalloc's
//! (`jemalloc.rs`), by their addresses. Those that the C library makes for itself are its own: it
//! reads some of them where no fault can be served, as in the child of `posix_spawn`.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::{self, NonNull},
};

use crate::{
    ALIGN, Inside,
    allocate::Holds,
    arena, code, give_up, jemalloc, local, mixed, next, protect, set_errno, small,
    state::{self, State},
};

/// Returns the state if a block of `bytes` bytes is to be the arena's.
fn serves(bytes: usize) -> Option<&'static State> {
    match mixed::is() {
        true => None,
        false => arena::serves(bytes),
    }
}

/// True if this thread's blocks are to be of `local.rs`.
fn is_local() -> bool {
    !mixed::is() && local::serves()
}

/// Returns the state if `block` lies in the arena of this process.
fn own(block: *mut c_void) -> Option<&'static State> {
    state::get().filter(|state| state.has(block as usize))
}

/// Allocates memory of the arena, and records where it begins.
fn allocate(state: &State, bytes: usize, align: usize, holds: Holds) -> *mut c_void {
    let made = state.allocate(bytes, align, holds);
    if !made.is_null() {
        state.note_made(made as usize);
    }
    made
}

/// Makes a small block by jemalloc. `None`: the next allocator is to make it.
fn small(caller: usize, make: impl FnOnce() -> Option<NonNull<c_void>>) -> Option<NonNull<c_void>> {
    match small::is_switched() && !code::is_c_library(caller) {
        true => make(),
        false => None,
    }
}

/// Defines functions that pass the address to which they return as their last argument. On other
/// processors than x86-64, whose faults filler threads serve, the address is 0.
macro_rules! knows_caller {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $by:ident in $register:literal;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[cfg(target_arch = "x86_64")]
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                std::arch::naked_asm!(
                    concat!("mov ", $register, ", [rsp]"),
                    "jmp {by}",
                    by = sym $by,
                )
            }

            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[cfg(not(target_arch = "x86_64"))]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                // SAFETY: the caller's promise.
                unsafe { $by($($arg,)* 0) }
            }
        )+
    };
}

knows_caller! {
    malloc(bytes: usize) -> *mut c_void = malloc_for in "rsi";
    calloc(count: usize, bytes: usize) -> *mut c_void = calloc_for in "rdx";
    realloc(old: *mut c_void, bytes: usize) -> *mut c_void = realloc_for in "rdx";
    memalign(align: usize, bytes: usize) -> *mut c_void = memalign_for in "rdx";
    aligned_alloc(align: usize, bytes: usize) -> *mut c_void = memalign_for in "rdx";
    posix_memalign(made: *mut *mut c_void, align: usize, bytes: usize) -> c_int = posix_memalign_for in "rcx";
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
        if is_due {
            match state::get().or_else(arena::try_open) {
                Some(_) => small::switch(),
                None => small::postpone(),
            }
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

/// `malloc` for a caller at an address.
///
/// # Safety
/// As `malloc`.
unsafe extern "C" fn malloc_for(bytes: usize, caller: usize) -> *mut c_void {
    match serves(bytes) {
        Some(state) => allocate(state, bytes, ALIGN, Holds::Anything),
        None if is_local() => local::allocate(bytes, ALIGN),
        None => match small(caller, || jemalloc::malloc(bytes)) {
            Some(made) => made.as_ptr(),
            // SAFETY: the caller's promise.
            None => unsafe { counted(next::malloc(bytes)) },
        },
    }
}

/// `calloc` for a caller at an address.
///
/// # Safety
/// As `calloc`.
unsafe extern "C" fn calloc_for(count: usize, bytes: usize, caller: usize) -> *mut c_void {
    let Some(all) = count.checked_mul(bytes) else {
        set_errno(libc::ENOMEM);
        return ptr::null_mut();
    };
    match serves(all) {
        Some(state) => allocate(state, all, ALIGN, Holds::Zeros),
        None if is_local() => local::allocate(all, ALIGN),
        None => match small(caller, || jemalloc::calloc(all)) {
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
    if !state::is_made(old as usize) {
        // SAFETY: the caller's promise.
        return unsafe {
            if jemalloc::owns(old as usize) {
                jemalloc::free(old);
            } else {
                uncount(old);
                next::free(old);
            }
        };
    }
    // An inherited block is not freed.
    let (Some(state), Some(old)) = (own(old), NonNull::new(old)) else {
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
    state.forget_made(start);
    // SAFETY: the caller's promise. A page that cannot be discarded now is tried again.
    let _ = unsafe { state.arena.deallocate(old.cast()) };
}

/// `realloc` for a caller at an address.
///
/// # Safety
/// As `realloc`.
unsafe extern "C" fn realloc_for(old: *mut c_void, bytes: usize, caller: usize) -> *mut c_void {
    let is_ours = state::is_made(old as usize);
    if old.is_null() {
        // SAFETY: any size is fine.
        return unsafe { malloc_for(bytes, caller) };
    }
    if !is_ours && !local::holds(old) && serves(bytes).is_none() {
        let is_c_library = code::is_c_library(caller);
        // SAFETY: the caller's promise.
        unsafe {
            if jemalloc::owns(old as usize) {
                if bytes > 0 && !is_c_library && jemalloc::resize(old, bytes) {
                    return old;
                }
            } else if is_local() || is_c_library || !small::serves() {
                uncount(old);
                let made = next::realloc(old, bytes);
                if made.is_null() && bytes > 0 {
                    // A block that could not be reallocated stays.
                    counted(old);
                }
                return counted(made);
            }
        }
    }
    if bytes == 0 {
        // SAFETY: the caller's promise.
        unsafe { free(old) };
        return ptr::null_mut();
    }
    // Blocks that shrink below `--min-bytes` move to the next allocator: a page for each would fill
    // the arena.
    let stays = serves(bytes).is_some() || Inside::is();
    if is_ours
        && stays
        && let (Some(state), Some(old)) = (own(old), NonNull::new(old.cast()))
    {
        let start = old.as_ptr() as usize;
        state.forget_made(start);
        // SAFETY: the caller's promise.
        let made = unsafe { state.reallocate(old, bytes) };
        state.note_made(if made.is_null() { start } else { made as usize });
        return made;
    }
    // SAFETY: the caller's promise; both have as many bytes as are copied.
    unsafe {
        let made = malloc_for(bytes, caller);
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
    if !state::is_made(of as usize) {
        // SAFETY: the caller's promise.
        return unsafe {
            match jemalloc::owns(of as usize) {
                true => jemalloc::usable(of),
                false => next::usable(of),
            }
        };
    }
    let (Some(state), Some(of)) = (state::of(of as usize), NonNull::new(of.cast())) else {
        return 0;
    };
    let _inside = Inside::enter();
    state.arena.usable_bytes(of).unwrap_or(0)
}

/// `memalign` for a caller at an address.
///
/// # Safety
/// As `memalign`.
unsafe extern "C" fn memalign_for(align: usize, bytes: usize, caller: usize) -> *mut c_void {
    match serves(bytes) {
        Some(state) if align.is_power_of_two() => allocate(state, bytes, align, Holds::Anything),
        None if is_local() && align.is_power_of_two() => local::allocate(bytes, align),
        None if align.is_power_of_two()
            && let Some(made) = small(caller, || jemalloc::memalign(align, bytes)) =>
        {
            made.as_ptr()
        }
        // SAFETY: the caller's promise.
        _ => unsafe { counted(next::memalign(align, bytes)) },
    }
}

/// `posix_memalign` for a caller at an address.
///
/// # Safety
/// As `posix_memalign`.
unsafe extern "C" fn posix_memalign_for(
    made: *mut *mut c_void,
    align: usize,
    bytes: usize,
    caller: usize,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let before = crate::errno();
    // SAFETY: the caller's promise.
    let memory = unsafe { memalign_for(align, bytes, caller) };
    set_errno(before);
    if memory.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's promise: the result goes there.
    unsafe { *made = memory };
    0
}

/// `strdup`: a string that the program asks for is not the C library's own.
///
/// # Safety
/// As `strdup`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn strdup(text: *const c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    unsafe { copied(text, libc::strlen(text)) }
}

/// `strndup`, as [`strdup`].
///
/// # Safety
/// As `strndup`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn strndup(text: *const c_char, most: usize) -> *mut c_char {
    // SAFETY: the caller's promise.
    unsafe { copied(text, libc::strnlen(text, most)) }
}

/// Returns a copy of a text, and a zero behind it. Null: there is no memory.
///
/// # Safety
/// `text` has `bytes` bytes.
unsafe fn copied(text: *const c_char, bytes: usize) -> *mut c_char {
    // SAFETY: there is room for as much as is written. The first `malloc` in line makes the block,
    // which is the program's own if it has one.
    unsafe {
        let made = libc::malloc(bytes + 1).cast::<c_char>();
        if !made.is_null() {
            ptr::copy_nonoverlapping(text, made, bytes);
            *made.add(bytes) = 0;
        }
        made
    }
}
