//! Small blocks in the arena, by jemalloc, which is linked into this library.
//!
//! Threads allocate from jemalloc's arenas of ours, whose memory comes from farpage's arena by
//! [`HOOKS`]. Jemalloc's own tables are local: it maps them by `mmap`, which gives a call of
//! jemalloc's no memory of the arena (`maps.rs`). Memory that jemalloc has got is never taken back,
//! but its pages are discarded when they have been free for a while.
//!
//! Work that takes more than a block from a list is done on a stack of the runtime's stock, since
//! the smallest stack of a thread has no room for it.
//!
//! The rule it keeps: a small block is jemalloc's exactly if its address lies in the arena. Blocks
//! that jemalloc would have elsewhere are not given out, and nothing else cuts small blocks out of
//! the arena (`small.rs`).

use std::{
    cell::Cell,
    ffi::{c_uint, c_void},
    ops::Range,
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use farpage_vm::sigbus::on_stock_stack;
use tikv_jemalloc_sys as jemalloc;
use tikv_jemalloc_sys::extent_hooks_t;

use crate::{
    ALIGN, Inside,
    allocate::Holds,
    arena, mappings, protect, set_errno,
    small::{self, ARENAS_MAX, within},
    state,
};

/// Jemalloc's numbers of the arenas, each made for the first thread that gets it. `None`: there was
/// no memory.
static ARENAS: [OnceLock<Option<c_uint>>; ARENAS_MAX] = [const { OnceLock::new() }; ARENAS_MAX];

thread_local! {
    /// True if this thread has one of the arenas.
    static HAS_ARENA: Cell<bool> = const { Cell::new(false) };
}

/// Returns a block. `None` if the next allocator is to make it: jemalloc does not serve, or the
/// arena is full.
pub(crate) fn malloc(bytes: usize) -> Option<NonNull<c_void>> {
    // SAFETY: any size is fine.
    make(|| unsafe { jemalloc::malloc(aligned(bytes)) })
}

/// Returns a block of zeros. `None` as of [`malloc`].
pub(crate) fn calloc(bytes: usize) -> Option<NonNull<c_void>> {
    // SAFETY: as above.
    make(|| unsafe { jemalloc::calloc(1, aligned(bytes)) })
}

/// Returns a block whose address is a multiple of `align`, a power of two. `None` as of [`malloc`].
pub(crate) fn memalign(align: usize, bytes: usize) -> Option<NonNull<c_void>> {
    // SAFETY: as above.
    make(|| unsafe { jemalloc::aligned_alloc(align, aligned(bytes)) })
}

/// Returns the size to ask jemalloc for. Its blocks of 8 bytes alone are not aligned as the C
/// library's are.
fn aligned(bytes: usize) -> usize {
    bytes.max(ALIGN)
}

/// Makes a block. Leaves `errno`, since the caller tries the C library after a failure.
fn make(call: impl FnOnce() -> *mut c_void) -> Option<NonNull<c_void>> {
    if !small::serves() || pauses() {
        return None;
    }
    let before = crate::errno();
    let made = match HAS_ARENA.get() || take_arena() {
        true => NonNull::new(within(call)),
        false => None,
    };
    set_errno(before);
    let Some(made) = made else {
        pause();
        return None;
    };
    if !state::owns(made.as_ptr() as usize) {
        // The thread ends, and has lost its arena.
        // SAFETY: nobody has seen it.
        within(|| unsafe { jemalloc::free(made.as_ptr()) });
        return None;
    }
    Some(made)
}

/// Requests that are still to be left to the C library after a refusal: the search for memory that
/// ends with it is slow.
static PAUSED: AtomicUsize = AtomicUsize::new(0);
/// Requests of the next pause, which are twice those of the pause before.
static NEXT_PAUSE: AtomicUsize = AtomicUsize::new(1);
/// Most requests of a pause: the search costs little among as many, and an arena that has room
/// again is soon used.
const PAUSE_MAX: usize = 1 << 14;

/// True if a request is one of a pause.
fn pauses() -> bool {
    let less = |paused: usize| paused.checked_sub(1);
    PAUSED.load(Ordering::Relaxed) > 0
        && (PAUSED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)).is_ok()
}

/// Begins a pause.
fn pause() {
    let requests = NEXT_PAUSE.load(Ordering::Relaxed);
    NEXT_PAUSE.store(PAUSE_MAX.min(2 * requests), Ordering::Relaxed);
    PAUSED.store(requests, Ordering::Relaxed);
}

/// Resizes a block in place. Returns false if a block of another size would be elsewhere.
///
/// # Safety
/// As `realloc`, of a block of jemalloc's. `bytes` is not 0.
pub(crate) unsafe fn resize(old: *mut c_void, bytes: usize) -> bool {
    let bytes = aligned(bytes);
    // SAFETY: the caller's promise.
    small::serves()
        && within(|| unsafe { jemalloc::xallocx(old, bytes, 0, 0) == jemalloc::nallocx(bytes, 0) })
}

/// True if the block at `address`, which `made.rs` does not know, is a block of jemalloc's.
pub(crate) fn owns(address: usize) -> bool {
    small::is_switched() && state::owns(address)
}

/// Implements `free` of a block of jemalloc's. In a child made by `fork` nothing is freed.
///
/// # Safety
/// As `free`.
pub(crate) unsafe fn free(old: *mut c_void) {
    if small::is_alive() {
        // SAFETY: the caller's promise.
        within(|| unsafe { jemalloc::free(old) });
    }
}

/// Implements `malloc_usable_size` of a block of jemalloc's.
///
/// # Safety
/// As `malloc_usable_size`.
pub(crate) unsafe fn usable(of: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    within(|| unsafe { jemalloc::malloc_usable_size(of) })
}

/// Gives this thread one of the arenas. Returns false if there is no memory for that.
#[cold]
fn take_arena() -> bool {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let _inside = Inside::enter();
    let which = NEXT.fetch_add(1, Ordering::Relaxed) % small::arenas();
    let taken = on_stock_stack(|| {
        let Some(arena) = ARENAS[which].get_or_init(make_arena) else {
            return false;
        };
        let mut arena = *arena;
        // SAFETY: there is as much as is read.
        let failed = unsafe {
            jemalloc::mallctl(
                c"thread.arena".as_ptr(),
                ptr::null_mut(),
                ptr::null_mut(),
                (&raw mut arena).cast(),
                size_of::<c_uint>(),
            )
        };
        failed == 0
    });
    HAS_ARENA.set(taken);
    taken
}

/// Parameters of an arena, as jemalloc has them.
#[repr(C)]
struct Parameters {
    hooks: *const extent_hooks_t,
    /// True if the arena's tables are made by the hooks, too.
    hooks_make_tables: bool,
}

/// Makes an arena, and returns its number. `None` if there is no memory.
fn make_arena() -> Option<c_uint> {
    let mut parameters = Parameters {
        hooks: &HOOKS,
        hooks_make_tables: false,
    };
    let (mut arena, mut bytes) = (0, size_of::<c_uint>());
    // SAFETY: there is room for the number, and as much as is read. The hooks are there for good.
    let made = unsafe {
        jemalloc::mallctl(
            c"experimental.arenas_create_ext".as_ptr(),
            (&raw mut arena).cast(),
            &raw mut bytes,
            (&raw mut parameters).cast(),
            size_of::<Parameters>(),
        )
    };
    (made == 0).then_some(arena)
}

/// Sources of an arena's memory. Functions that are left out are not needed: memory stays
/// jemalloc's, and is never without pages that can be written.
static HOOKS: extent_hooks_t = extent_hooks_t {
    alloc: Some(take),
    purge_forced: Some(discard),
    split: Some(split),
    merge: Some(merge),
    dalloc: None,
    destroy: None,
    commit: None,
    decommit: None,
    purge_lazy: None,
};

/// Takes memory from farpage's arena for jemalloc. Null if the arena is full.
unsafe extern "C" fn take(
    _: *mut extent_hooks_t,
    at: *mut c_void,
    bytes: usize,
    align: usize,
    is_zeros: *mut bool,
    is_there: *mut bool,
    _: c_uint,
) -> *mut c_void {
    if !at.is_null() {
        return ptr::null_mut();
    }
    let _inside = Inside::enter();
    let made = on_stock_stack(|| {
        let state = state::get().or_else(arena::open);
        state.map_or(ptr::null_mut(), |state| {
            state.allocate(bytes, align, Holds::Zeros)
        })
    });
    if !made.is_null() {
        // SAFETY: jemalloc's variables.
        unsafe { (*is_zeros, *is_there) = (true, true) };
    }
    made
}

/// Discards the pages of memory that has been free for a while. Returns false if all of it is zeros
/// then. Parts of pages stay: overwriting them would bring their page in.
unsafe extern "C" fn discard(
    _: *mut extent_hooks_t,
    start: *mut c_void,
    _: usize,
    offset: usize,
    bytes: usize,
    _: c_uint,
) -> bool {
    let Some(state) = state::get() else {
        return true;
    };
    let start = start as usize + offset;
    let addresses = start..start + bytes;
    let _inside = Inside::enter();
    let pages = state.whole_pages_of(&addresses);
    let advised = |pages: &Range<usize>| {
        let advise = || protect::advise_all(&mappings::look(), state, pages, libc::MADV_DONTNEED);
        on_stock_stack(advise).is_ok()
    };
    pages.is_empty() || !advised(&pages) || pages != addresses
}

/// Splits memory, for which nothing is to be done.
unsafe extern "C" fn split(
    _: *mut extent_hooks_t,
    _: *mut c_void,
    _: usize,
    _: usize,
    _: usize,
    _: bool,
    _: c_uint,
) -> bool {
    false
}

/// Merges neighbours, for which nothing is to be done.
unsafe extern "C" fn merge(
    _: *mut extent_hooks_t,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: usize,
    _: bool,
    _: c_uint,
) -> bool {
    false
}
