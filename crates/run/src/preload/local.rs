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
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use farpage_signals::Mutex;
use farpage_vm::calls::system_call;
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

/// Header before each allocation.
#[repr(C, align(16))]
struct Before {
    /// Start of the block in the heap.
    start: NonNull<u8>,
    layout: Layout,
}

/// Memory of the first slot.
static mut MEMORY: MaybeUninit<[u8; SLOT_BYTES]> = MaybeUninit::uninit();
/// Addresses of the slots' memory; 0 before a child has mapped its own.
static STARTS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

type Heap = Talc<Manual, DefaultBinning>;

/// Heap of this process's slot, from the first request on.
static HEAP: Mutex<Option<Heap>> = Mutex::new(None);
/// Slot of this process's heap; [`SLOTS`] if none is left.
static SLOT: AtomicUsize = AtomicUsize::new(0);
/// True once something was allocated in the slot.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Makes a heap of a slot that nobody uses. Without memory the heap is empty.
fn heap_of(slot: usize) -> Heap {
    let mut heap = Heap::new(Manual);
    let start = match STARTS
        .get(slot)
        .map(|start| (start, start.load(Ordering::Relaxed)))
    {
        None => 0,
        Some((place, 0)) => {
            let start = if slot == 0 {
                (&raw const MEMORY) as usize
            } else {
                map()
            };
            place.store(start, Ordering::Relaxed);
            start
        }
        Some((_, start)) => start,
    };
    if start != 0 {
        // SAFETY: memory that is there until the process ends.
        unsafe { heap.claim(ptr::with_exposed_provenance_mut(start), SLOT_BYTES) };
    }
    heap
}

/// Maps memory for a slot. Returns 0 if there is none.
fn map() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let no_file = usize::MAX;
    let args = [0, SLOT_BYTES, access, flags as usize, no_file, 0];
    // SAFETY: replaces nothing.
    let made = unsafe { system_call(libc::SYS_mmap, args) };
    usize::try_from(made).unwrap_or(0)
}

/// True if this process has a slot.
pub(crate) fn has_slot() -> bool {
    SLOT.load(Ordering::Relaxed) < SLOTS
}

/// Returns the slot of an allocation from here.
fn slot_of(allocation: *mut c_void) -> Option<usize> {
    let at = allocation as usize;
    STARTS.iter().position(|start| {
        let start = start.load(Ordering::Relaxed);
        start != 0 && at.wrapping_sub(start) < SLOT_BYTES
    })
}

/// Begins a child made by `fork`, in which it is the only thread.
pub(crate) fn begin_child() {
    let is_used = IS_USED.swap(false, Ordering::Relaxed);
    let slot = (SLOT.load(Ordering::Relaxed) + usize::from(is_used)).min(SLOTS);
    SLOT.store(slot, Ordering::Relaxed);
    // SAFETY: this process has no other thread, and this one is not in the heap.
    unsafe { HEAP.renew(None) };
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
    let made = unsafe {
        let mut heap = HEAP.lock();
        let heap = heap.get_or_insert_with(|| heap_of(SLOT.load(Ordering::Relaxed)));
        heap.try_allocate(layout)
    };
    let Some(start) = made else {
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
    slot_of(allocation).is_some()
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
    let is_own = slot_of(allocation) == Some(SLOT.load(Ordering::Relaxed));
    if is_own && !state::is_forked() {
        // SAFETY: the caller's promise.
        unsafe {
            let before = allocation.cast::<Before>().sub(1).read();
            if let Some(heap) = HEAP.lock().as_mut() {
                heap.deallocate(before.start.as_ptr(), before.layout);
            }
        }
    }
}
