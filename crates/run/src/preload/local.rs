//! Memory that is never remote, for requests of the C library while it works for the runtime: the
//! table of a new thread's variables, for one.
//!
//! The program's allocator cannot serve these requests. Its memory may be in the arena, so that a
//! thread of the runtime would wait for a page that it has to bring in itself.
//!
//! A child made by `fork` has a slot of its own: the lock of its parent's heap may be held by a
//! thread that does not exist in the child, where nothing of that heap is freed.
//!
//! The rule it keeps: an allocation from here is recognised by its address, in whichever thread.

use std::{
    alloc::Layout,
    ffi::c_void,
    mem::MaybeUninit,
    ptr::{self, NonNull},
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use farpage_signals::{Mutex, MutexGuard};
use talc::{
    base::{Talc, binning::DefaultBinning},
    source::Manual,
};

use crate::{
    ALIGN, Inside, is_starting, set_errno,
    state::{self, GENERATIONS},
};

/// Size of a heap: more than the C library has ever asked for. Unused parts take no memory.
const SLOT_BYTES: usize = 32 << 20;
/// Number of heaps: those of a process and of the processes that it was forked from.
const SLOTS: usize = GENERATIONS;
const BYTES: usize = SLOTS * SLOT_BYTES;

/// Header before each allocation.
#[repr(C, align(16))]
struct Before {
    /// Start of the block in the heap.
    start: NonNull<u8>,
    layout: Layout,
}

static mut MEMORY: MaybeUninit<[u8; BYTES]> = MaybeUninit::uninit();

type Heap = Talc<Manual, DefaultBinning>;

static HEAP: LazyLock<Mutex<Heap>> = LazyLock::new(|| Mutex::new(heap_of(0)));
/// Slot of this process's heap; [`SLOTS`] if none is left.
static SLOT: AtomicUsize = AtomicUsize::new(0);
/// True once something was allocated in the slot.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Makes a heap of a slot that nobody uses. Without a slot the heap is empty.
fn heap_of(slot: usize) -> Heap {
    let mut heap = Heap::new(Manual);
    if let Some(start) = (slot < SLOTS).then_some(slot * SLOT_BYTES) {
        // SAFETY: the slot lies in the memory, which is there until the process ends.
        unsafe { heap.claim((&raw mut MEMORY).cast::<u8>().add(start), SLOT_BYTES) };
    }
    heap
}

/// True if this process has a slot.
pub(crate) fn has_slot() -> bool {
    SLOT.load(Ordering::Relaxed) < SLOTS
}

/// Begins a child made by `fork`, in which it is the only thread.
pub(crate) fn begin_child() {
    let is_used = IS_USED.swap(false, Ordering::Relaxed);
    let slot = (SLOT.load(Ordering::Relaxed) + usize::from(is_used)).min(SLOTS);
    SLOT.store(slot, Ordering::Relaxed);
    // SAFETY: this process has no other thread, and this one is not in the heap.
    unsafe { HEAP.renew(heap_of(slot)) };
}

fn heap() -> MutexGuard<'static, Heap> {
    HEAP.lock()
}

/// True if this thread's requests are served from here: it works for the runtime, or starts a
/// thread whose tables may become one of the runtime's. False in a child made by `fork`.
pub(crate) fn serves() -> bool {
    (Inside::is() || is_starting()) && !state::is_forked()
}

/// Returns zeroed memory. Null, with an `errno`, if no memory is left.
pub(crate) fn allocate(bytes: usize, align: usize) -> *mut c_void {
    let made = find(bytes, align);
    if made.is_null() {
        set_errno(libc::ENOMEM);
    }
    made
}

fn find(bytes: usize, align: usize) -> *mut c_void {
    let align = align.max(ALIGN);
    let before = size_of::<Before>().next_multiple_of(align);
    let all = bytes.checked_add(before);
    let layout = all.and_then(|all| Layout::from_size_align(all, align).ok());
    let Some(layout) = layout else {
        return ptr::null_mut();
    };
    IS_USED.store(true, Ordering::Relaxed);
    // SAFETY: not empty, since a header is part of it.
    let Some(start) = (unsafe { heap().try_allocate(layout) }) else {
        return ptr::null_mut();
    };
    // SAFETY: it has as many bytes, and `Before` lies just before what is handed out.
    unsafe {
        start.as_ptr().write_bytes(0, layout.size());
        let made = start.as_ptr().add(before);
        made.cast::<Before>().sub(1).write(Before { start, layout });
        made.cast()
    }
}

/// True if `allocation` is from here.
pub(crate) fn holds(allocation: *mut c_void) -> bool {
    offset(allocation) < BYTES
}

/// Returns the offset of `allocation` in the memory, if it lies there.
fn offset(allocation: *mut c_void) -> usize {
    (allocation as usize).wrapping_sub((&raw const MEMORY) as usize)
}

/// Returns the bytes of `allocation`.
///
/// # Safety
/// `allocation` is from here, and not freed.
pub(crate) unsafe fn usable(allocation: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    let before = unsafe { &*allocation.cast::<Before>().sub(1) };
    let end = before.start.as_ptr() as usize + before.layout.size();
    end - allocation as usize
}

/// Frees an allocation. Another slot's stays, and all do in a child by whatever call (a raw
/// `clone`, for one): a thread that does not exist there may hold the heap's lock.
///
/// # Safety
/// As [`usable`].
pub(crate) unsafe fn free(allocation: *mut c_void) {
    let is_own = offset(allocation) / SLOT_BYTES == SLOT.load(Ordering::Relaxed);
    if is_own && !state::is_forked() {
        // SAFETY: the caller's promise.
        unsafe {
            let before = allocation.cast::<Before>().sub(1).read();
            heap().deallocate(before.start.as_ptr(), before.layout);
        }
    }
}
