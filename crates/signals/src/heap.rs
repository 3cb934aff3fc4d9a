//! [`Allocator`]: memory for threads that serve faults, which the program's allocator cannot hold
//! up.
//!
//! A handler of the program may interrupt `malloc` or `free`, which hold a lock, and touch an
//! absent page. A thread that serves this fault must not wait for that lock.
//!
//! The rule it keeps: a thread that holds signals back neither takes memory from the program's
//! allocator nor gives memory back to it. Its memory comes from a heap of the runtime's. Blocks of
//! the program's that it frees wait for the next thread that lets signals in. The lock of the
//! runtime's heap is held with signals held back.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicPtr, AtomicU8, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use talc::{
    base::{Talc, binning::DefaultBinning},
    source::Manual,
};

use crate::{Mutex, holds_signals_back};

/// Size of the addresses that the heap reserves. Addresses without memory cost nothing.
const RESERVED: usize = 1 << 30;
/// Part of a process' limit of addresses (`RLIMIT_AS`) that the heap reserves at most.
const LIMIT_PART: usize = 16;
/// Smallest piece of addresses that becomes memory at a time.
const STEP: usize = 1 << 20;
/// Smallest size of a block whose pages go back to the kernel when it is freed.
const LARGE: usize = 128 << 10;
/// Upper bound of what the heap adds to a block: headers and alignment.
const OVERHEAD: usize = 4096;

/// An allocator for programs that handle signals and use farpage: threads of the runtime never wait
/// for a lock of `A`. Other threads are served by `A`.
///
/// The C and the Python library have it. A Rust program names it as its own by
/// `#[global_allocator]`.
///
/// The heap has at most 1 GiB, or a sixteenth of the process' `RLIMIT_AS`. If that is used up, the
/// runtime's threads ask `A`. Freed blocks from 128 KiB on give their pages back to the kernel.
#[derive(Debug, Default)]
pub struct Allocator<A = System> {
    programs: A,
    /// Blocks of `programs` that threads of the runtime have freed.
    left: AtomicPtr<Left>,
}

impl Allocator {
    /// Makes an allocator on top of the system's.
    pub const fn new() -> Allocator {
        Allocator::over(System)
    }
}

impl<A> Allocator<A> {
    /// Makes an allocator on top of `programs`, which serves all threads but the runtime's.
    pub const fn over(programs: A) -> Allocator<A> {
        Allocator {
            programs,
            left: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

// SAFETY: each block comes from one of two allocators, and goes back to the same one, which its
// address tells.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Allocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(block) = self.allocate_here(layout) {
            return block.as_ptr();
        }
        // SAFETY: the caller's promise.
        unsafe { self.programs.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if Heap::has(block) {
            // SAFETY: the caller's promise; the block is the heap's.
            unsafe { free(block, layout) };
        } else if !(holds_signals_back() && self.leave(block, layout)) {
            // SAFETY: the caller's promise; the block is the program's allocator's.
            unsafe { self.programs.dealloc(block, layout) };
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(block) = self.allocate_here(layout) else {
            // SAFETY: the caller's promise.
            return unsafe { self.programs.alloc_zeroed(layout) };
        };
        // SAFETY: new, and as long as said.
        unsafe { zero(block.as_ptr(), layout.size()) };
        block.as_ptr()
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let is_heaps = Heap::has(block);
        // SAFETY: the caller's promise, which holds for the new layout, too; both blocks have as
        // many bytes as are copied.
        unsafe {
            if !is_heaps && !holds_signals_back() {
                return self.programs.realloc(block, layout, size);
            }
            let in_place = |heap: &mut Heap| {
                (heap.blocks.try_realloc_in_place(block, layout, size)).then_some(block)
            };
            if is_heaps && let Some(block) = with_heap(in_place) {
                return block;
            }
            let made = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !made.is_null() {
                ptr::copy_nonoverlapping(block, made, size.min(layout.size()));
                self.dealloc(block, layout);
            }
            made
        }
    }
}

impl<A: GlobalAlloc> Allocator<A> {
    /// Allocates from the heap if this thread belongs to the runtime. `None`: the program's
    /// allocator is to be asked.
    fn allocate_here(&self, layout: Layout) -> Option<NonNull<u8>> {
        if holds_signals_back() {
            return with_heap(|heap| heap.allocate(layout));
        }
        if !self.left.load(Relaxed).is_null() {
            self.free_left();
        }
        None
    }

    /// Leaves `block` to a thread that may give it back. False if there is no memory to note it in.
    fn leave(&self, block: *mut u8, layout: Layout) -> bool {
        let Some(left) = with_heap(|heap| heap.allocate(Layout::new::<Left>())) else {
            return false;
        };
        let left = left.as_ptr().cast::<Left>();
        let mut next = self.left.load(Relaxed);
        loop {
            // SAFETY: just allocated, and nobody else knows it yet.
            unsafe {
                left.write(Left {
                    block,
                    layout,
                    next,
                });
            }
            let swapped = self
                .left
                .compare_exchange_weak(next, left, Release, Relaxed);
            match swapped {
                Ok(_) => return true,
                Err(now) => next = now,
            }
        }
    }

    /// Gives blocks back that threads of the runtime have left.
    #[cold]
    fn free_left(&self) {
        let mut left = self.left.swap(ptr::null_mut(), Acquire);
        while !left.is_null() {
            // SAFETY: the list is this thread's since the swap, and each block is named once.
            unsafe {
                let Left {
                    block,
                    layout,
                    next,
                } = left.read();
                self.programs.dealloc(block, layout);
                free(left.cast(), Layout::new::<Left>());
                left = next;
            }
        }
    }
}

/// Block of the program's allocator that a thread of the runtime has freed. The heap's.
struct Left {
    block: *mut u8,
    layout: Layout,
    next: *mut Left,
}

/// Addresses of the heap; 0 and 0 before the first block.
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Lock of the heap. Held with signals held back, and never over a call of anybody's.
static HEAP: Mutex<Heap> = Mutex::new(Heap {
    blocks: Talc::new(Manual),
    end: None,
    is_refused: false,
});

/// Page that says that the heap is whole. Children find it wiped: a thread that they lack may hold
/// the heap's lock.
static WHOLE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());

/// Calls `work` with the heap. `None` if `work` returns that, or the heap is not whole.
fn with_heap<T>(work: impl FnOnce(&mut Heap) -> Option<T>) -> Option<T> {
    // SAFETY: null, or a page that stays.
    let whole = unsafe { WHOLE.load(Relaxed).as_ref() };
    if whole.is_some_and(|whole| whole.load(Relaxed) == 0) {
        return None;
    }
    work(&mut HEAP.lock())
}

/// Frees a block of the heap. The block stays if the heap is not whole.
///
/// # Safety
/// The block is from [`Heap::allocate`] with `layout`, and not used any more.
unsafe fn free(block: *mut u8, layout: Layout) {
    // SAFETY: the caller's promise.
    unsafe {
        if layout.size() >= LARGE {
            drop_pages(block, layout.size());
        }
        with_heap(|heap| {
            heap.blocks.deallocate(block, layout);
            Some(())
        });
    }
}

/// Finds out whether the heap is whole in a child made by `fork`.
extern "C" fn in_child() {
    // SAFETY: null, or a page that stays.
    if let Some(whole) = unsafe { WHOLE.load(Relaxed).as_ref() }
        && HEAP.try_lock().is_some()
    {
        whole.store(1, Relaxed);
    }
}

/// Memory that grows in one range of addresses.
struct Heap {
    blocks: Talc<Manual, DefaultBinning>,
    /// End of the part that is memory.
    end: Option<NonNull<u8>>,
    /// True if the kernel has refused the addresses.
    is_refused: bool,
}

// SAFETY: its pointers are to memory that is there until the process ends.
unsafe impl Send for Heap {}

impl Heap {
    /// True if `block` comes from the heap.
    fn has(block: *mut u8) -> bool {
        // The length is stored last.
        let bytes = BYTES.load(Acquire);
        (block as usize).wrapping_sub(START.load(Relaxed)) < bytes
    }

    fn allocate(&mut self, layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: layouts of an allocator are not empty.
        let mut allocate = || unsafe { self.blocks.try_allocate(layout) };
        allocate().or_else(|| {
            self.grow(layout.size().checked_add(layout.align() + OVERHEAD)?)?;
            // SAFETY: as above.
            unsafe { self.blocks.try_allocate(layout) }
        })
    }

    /// Makes at least `bytes` more bytes of memory. `None` if there are none.
    fn grow(&mut self, bytes: usize) -> Option<()> {
        if START.load(Relaxed) == 0 && !self.is_refused {
            self.is_refused = !reserve();
        }
        let start = NonNull::new(START.load(Relaxed) as *mut u8)?;
        let from = self.end.unwrap_or(start);
        let used = from.as_ptr() as usize - start.as_ptr() as usize;
        let bytes = bytes.checked_next_multiple_of(STEP)?;
        if used.checked_add(bytes)? > BYTES.load(Relaxed) {
            return None;
        }
        // SAFETY: addresses of the reserved range that nobody else has.
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            if libc::mprotect(from.as_ptr().cast(), bytes, access) != 0 {
                return None;
            }
            self.end = Some(match self.end {
                Some(end) => self.blocks.extend(end, end.as_ptr().add(bytes)),
                None => self.blocks.claim(start.as_ptr(), bytes)?,
            });
        }
        Some(())
    }
}

/// Zeroes a block. Whole pages of a large one take no memory before they are written.
///
/// # Safety
/// The block is as long as said, and nobody else uses it.
unsafe fn zero(block: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let (from, to) = match bytes >= LARGE && Heap::has(block) {
            true => drop_pages(block, bytes),
            false => (bytes, bytes),
        };
        block.write_bytes(0, from);
        block.add(to).write_bytes(0, bytes - to);
    }
}

/// Gives the whole pages of a block of the heap's back to the kernel: they read as zeros. Returns
/// the part of the block that they are.
///
/// # Safety
/// As for [`zero`].
unsafe fn drop_pages(block: *mut u8, bytes: usize) -> (usize, usize) {
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let from = (block as usize).next_multiple_of(page) - block as usize;
    let to = (block as usize + bytes) / page * page - block as usize;
    // SAFETY: whole pages within the block.
    let dropped = unsafe { libc::madvise(block.add(from).cast(), to - from, libc::MADV_DONTNEED) };
    // Locked memory is refused, and keeps its bytes.
    if dropped == 0 {
        (from, to)
    } else {
        (bytes, bytes)
    }
}

/// Reserves the heap's addresses. False if the kernel refuses them.
fn reserve() -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is as long as said.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    let limit = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    let bytes = RESERVED.min(limit / LIMIT_PART) & !(STEP - 1);
    // SAFETY: new addresses, wherever the kernel likes.
    let start = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the handler takes no lock that is held. The page is one of the range's.
    unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let whole = start.byte_add(bytes - page);
        if libc::mprotect(whole, page, libc::PROT_READ | libc::PROT_WRITE) == 0
            && libc::madvise(whole, page, libc::MADV_WIPEONFORK) == 0
        {
            let whole = whole.cast::<AtomicU8>();
            (*whole).store(1, Relaxed);
            WHOLE.store(whole, Relaxed);
        }
    }
    START.store(start as usize, Relaxed);
    // The last page is not the heap's.
    BYTES.store(bytes - STEP, Release);
    true
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::SignalGuard;

    /// Program's allocator that fails the test if a thread that holds signals back asks it.
    struct Programs;

    // SAFETY: the system's.
    unsafe impl GlobalAlloc for Programs {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            assert!(!holds_signals_back(), "a thread of the runtime allocates");
            // SAFETY: the caller's promise.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            assert!(!holds_signals_back(), "a thread of the runtime frees");
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(block, layout) };
        }
    }

    static SYSTEM: Allocator = Allocator::new();
    static BOTH: Allocator<Programs> = Allocator::over(Programs);

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 64).expect("a small alignment")
    }

    /// Allocates `bytes` bytes of `value`.
    fn make(bytes: usize, value: u8) -> *mut u8 {
        // SAFETY: not empty, and as long as said.
        unsafe {
            let block = BOTH.alloc(layout(bytes));
            assert!(!block.is_null() && block.addr().is_multiple_of(64));
            block.write_bytes(value, bytes);
            block
        }
    }

    /// Checks and frees a block of [`make`].
    fn end(block: *mut u8, bytes: usize, value: u8) {
        // SAFETY: from `make`.
        unsafe {
            assert!(
                std::slice::from_raw_parts(block, bytes)
                    .iter()
                    .all(|&b| b == value)
            );
            BOTH.dealloc(block, layout(bytes));
        }
    }

    #[test]
    fn each_block_goes_back_where_it_came_from() {
        for bytes in [1, 100, 5000, 3 << 20] {
            let programs = make(bytes, 1);
            assert!(!Heap::has(programs));
            let signals = SignalGuard::new();
            let runtimes = make(bytes, 2);
            assert!(Heap::has(runtimes));
            // Left until signals are let in: the program's allocator would fail the test.
            end(programs, bytes, 1);
            let kept = make(bytes, 3);
            drop(signals);
            end(runtimes, bytes, 2);
            end(make(bytes, 4), bytes, 4);
            end(kept, bytes, 3);
        }
    }

    #[test]
    fn blocks_grow_and_shrink_over_the_border_of_both_allocators() {
        let mut block = make(100, 5);
        let mut bytes = 100;
        for (at, size) in [10, 4000, 2 << 20, 3, 64, 5000].into_iter().enumerate() {
            let _signals = (at % 2 == 0).then(SignalGuard::new);
            // SAFETY: from `make`; the new part is written.
            unsafe {
                block = BOTH.realloc(block, layout(bytes), size);
                assert!(!block.is_null());
                let kept = size.min(bytes);
                assert!(
                    std::slice::from_raw_parts(block, kept)
                        .iter()
                        .all(|&b| b == 5)
                );
                block.write_bytes(5, size);
            }
            bytes = size;
        }
        end(block, bytes, 5);
    }

    #[test]
    fn zeroed_blocks_are_zero_where_others_have_been() {
        let _signals = SignalGuard::new();
        for _ in 0..100 {
            end(make(777, 9), 777, 9);
            // SAFETY: not empty.
            let block = unsafe { BOTH.alloc_zeroed(layout(777)) };
            end(block, 777, 0);
        }
    }

    #[test]
    fn threads_of_both_kinds_free_what_others_have_made() {
        let (to, from) = std::sync::mpsc::sync_channel::<(usize, usize, u8)>(64);
        let from = std::sync::Mutex::new(from);
        thread::scope(|scope| {
            for thread in 0..4u8 {
                let (to, from) = (to.clone(), &from);
                scope.spawn(move || {
                    // A worker and a program's thread each make and free.
                    let _signals = thread.is_multiple_of(2).then(SignalGuard::new);
                    for round in 0..5000 {
                        let bytes = 1 + round % 300;
                        let value = round as u8;
                        if thread < 2 {
                            to.send((make(bytes, value).addr(), bytes, value))
                                .expect("read");
                        } else if let Ok((block, bytes, value)) =
                            from.lock().expect("no panic").recv()
                        {
                            end(ptr::with_exposed_provenance_mut(block), bytes, value);
                        }
                    }
                });
            }
        });
    }

    /// Makes children by `fork` while another thread uses the heap. Each calls `work`.
    fn in_children(fork: impl Fn() -> libc::pid_t, work: impl Fn()) {
        let ended = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _signals = SignalGuard::new();
                while ended.load(Relaxed) == 0 {
                    end(make(300, 2), 300, 2);
                }
            });
            for _ in 0..200 {
                let child = fork();
                assert!(child >= 0);
                // SAFETY: the child exits, and is waited for.
                unsafe {
                    if child == 0 {
                        libc::alarm(20);
                        work();
                        libc::_exit(0);
                    }
                    let mut status = 0;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    assert_eq!(status, 0, "the child ended otherwise");
                }
            }
            ended.store(1, Relaxed);
        });
    }

    #[test]
    fn a_child_made_by_fork_allocates_whether_the_heap_is_whole_or_not() {
        let signals = SignalGuard::new();
        let block = make(100, 1);
        drop(signals);
        // SAFETY: the child allocates, frees and exits.
        let fork = || unsafe { libc::fork() };
        in_children(fork, || {
            let _signals = SignalGuard::new();
            // SAFETY: not empty; freed once.
            unsafe {
                let made = SYSTEM.alloc(layout(50));
                assert!(!made.is_null());
                SYSTEM.dealloc(made, layout(50));
                SYSTEM.dealloc(block, layout(100));
            }
        });
        end(block, 100, 1);
    }

    #[test]
    fn a_child_made_by_another_call_leaves_the_heap_alone() {
        let signals = SignalGuard::new();
        let block = make(100, 1);
        drop(signals);
        // SAFETY: a copy of the process, as by `fork`.
        let clone =
            || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t };
        in_children(clone, || {
            let _signals = SignalGuard::new();
            // A panic would allocate: the program's allocator may be locked here, too.
            let is_left_alone = with_heap(|_| Some(())).is_none();
            // SAFETY: freed once.
            unsafe {
                free(block, layout(100));
                libc::_exit(i32::from(!is_left_alone));
            }
        });
        end(block, 100, 1);
    }
}
