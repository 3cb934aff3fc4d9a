//! The allocator of small requests (`--small`): the C library's, and jemalloc (`jemalloc.rs`) once
//! the program's small objects pass a quarter of the budget.
//!
//! The rule it keeps: jemalloc serves only where the C library's allocator is next in line.

use std::{
    cell::Cell,
    ffi::c_void,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicIsize, AtomicPtr, AtomicU8, AtomicUsize, Ordering},
    },
    thread,
};

use crate::{code, environment::variable, mixed, next, say, state::KERNEL_PAGE_BYTES};

/// Part of the budget that small objects may take before jemalloc serves them.
const LOCAL_PART: u64 = 4;
/// Largest number of arenas. More threads than processors do not wait for each other for long.
pub(crate) const ARENAS_MAX: usize = 16;

/// One block in as many is counted, for all of them: which ones, follows from their addresses.
const SAMPLED: isize = 8;

/// Reason why jemalloc serves nothing, although it was to.
static WHY_LOCAL: OnceLock<String> = OnceLock::new();

/// Allocator of small requests: [`OWN`], [`COUNTING`] or [`SWITCHED`]. Relaxed: either allocator is
/// right at any time.
static MODE: AtomicU8 = AtomicU8::new(OWN);
/// The next allocator, for good.
const OWN: u8 = 0;
/// The next allocator, until enough is counted.
const COUNTING: u8 = 1;
/// Jemalloc.
const SWITCHED: u8 = 2;

/// A page that is zeros in a child made by `fork`, by whatever call, and begins with 1 before.
static ALIVE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());

/// Bytes of small objects that the C library has made for the program, until the switch.
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
/// Number of arenas of jemalloc's: one for each processor.
static ARENAS: AtomicUsize = AtomicUsize::new(1);
/// Bytes of small objects that cause the switch.
static LIMIT_BYTES: AtomicIsize = AtomicIsize::new(isize::MAX);

thread_local! {
    /// Depth of this thread in functions of jemalloc.
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

/// Prepares jemalloc, which maps its own tables. Called by our constructor, before requests are
/// served here. This thread must not be inside: our `__register_atfork` would not register the
/// runtime's handlers before jemalloc's.
pub(crate) fn load() {
    // SAFETY: reads nothing of the caller's.
    within(|| unsafe { tikv_jemalloc_sys::nallocx(1, 0) });
}

/// Calls a function of jemalloc's.
pub(crate) fn within<T>(call: impl FnOnce() -> T) -> T {
    CALLS.set(CALLS.get() + 1);
    let result = call();
    CALLS.set(CALLS.get() - 1);
    result
}

/// True if this thread is in a function of jemalloc's, whose tables are local.
pub(crate) fn is_calling() -> bool {
    CALLS.get() > 0
}

/// Begins to count small objects, or, with `--small yes`, to serve them. Called once the plan of
/// the arena is made.
pub(crate) fn begin() {
    let Some(small) = variable("SMALL") else {
        return;
    };
    let is_at_once = small == "yes";
    // Reads files, which a program that confines itself may not open later.
    let processors = thread::available_parallelism().map_or(1, usize::from);
    ARENAS.store(processors.min(ARENAS_MAX), Ordering::Relaxed);
    if let Err(why) = prepare() {
        if is_at_once {
            say(&format!("--small yes: small objects stay local: {why}"));
        }
        let _ = WHY_LOCAL.set(why);
        return;
    }
    if let Some(Ok(bytes)) = variable("BUDGET").map(|bytes| bytes.parse()) {
        set_budget(bytes);
    }
    MODE.store(
        if is_at_once { SWITCHED } else { COUNTING },
        Ordering::Relaxed,
    );
}

/// Returns an error if small objects are to stay local.
fn prepare() -> Result<(), String> {
    if mixed::is() {
        return Err("the program has a part of an allocator".to_owned());
    }
    // A program that defines `malloc` itself never calls ours.
    let next = next::look_up(libc::RTLD_NEXT, c"malloc");
    if !code::is_c_library(next as usize) {
        return Err("the program has an allocator of its own, which serves them".to_owned());
    }
    make_alive()
}

/// Returns the reason why small objects stay local, if they were not to.
pub(crate) fn why_local() -> Option<&'static str> {
    WHY_LOCAL.get().map(String::as_str)
}

/// Returns the bytes of small objects at which jemalloc began to serve them. `None` if it did not,
/// or did from the beginning.
pub(crate) fn switched_at() -> Option<u64> {
    let bytes = LIVE_BYTES.load(Ordering::Relaxed);
    (is_switched() && bytes > 0).then_some(bytes as u64)
}

/// Sets the size of small objects that causes the switch, to a part of the process's budget.
pub(crate) fn set_budget(bytes: u64) {
    LIMIT_BYTES.store((bytes / LOCAL_PART) as isize, Ordering::Relaxed);
}

/// True if a block of the C library at `address` is to be counted.
pub(crate) fn counts(address: usize) -> bool {
    // Neighbours of one size have all residues: by Fibonacci hashing.
    let hash = (address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    MODE.load(Ordering::Relaxed) == COUNTING && hash >> (u64::BITS - SAMPLED.ilog2()) == 0
}

/// Counts a block of the C library that the program gets. Returns true if jemalloc is to serve
/// small requests from now on: the caller makes the arena, and calls [`switch`] or [`postpone`].
///
/// # Safety
/// `block` is a block of the C library.
pub(crate) unsafe fn add(block: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    count(SAMPLED * unsafe { bytes_of(block) })
}

/// Counts a block of the C library that the program gives up.
///
/// # Safety
/// As [`add`].
pub(crate) unsafe fn remove(block: *mut c_void) {
    // SAFETY: the caller's promise.
    count(-SAMPLED * unsafe { bytes_of(block) });
}

/// Counts `bytes` more. Returns true if there are enough.
fn count(bytes: isize) -> bool {
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
    live > LIMIT_BYTES.load(Ordering::Relaxed) && is_alive()
}

/// Returns the bytes that a block of the C library takes, from the word before it. The C library's
/// `malloc_usable_size` also looks behind the block, at memory that nothing else needs.
///
/// # Safety
/// As [`add`].
unsafe fn bytes_of(block: *mut c_void) -> isize {
    // SAFETY: the C library keeps the size there, with flags in three bits.
    (unsafe { *block.cast::<usize>().sub(1) } & !7) as isize
}

/// Serves small requests by jemalloc from now on.
pub(crate) fn switch() {
    MODE.store(SWITCHED, Ordering::Relaxed);
}

/// Leaves small requests to the C library for good: there will be no arena.
pub(crate) fn stay_local() {
    MODE.store(OWN, Ordering::Relaxed);
}

/// Delays the switch until small objects take twice as much: there is no arena now.
pub(crate) fn postpone() {
    let twice = LIVE_BYTES.load(Ordering::Relaxed).saturating_mul(2);
    LIMIT_BYTES.fetch_max(twice, Ordering::Relaxed);
}

/// Returns the number of arenas that threads share.
pub(crate) fn arenas() -> usize {
    ARENAS.load(Ordering::Relaxed)
}

/// True if jemalloc has begun to serve small requests.
pub(crate) fn is_switched() -> bool {
    MODE.load(Ordering::Relaxed) == SWITCHED
}

/// True if jemalloc serves small requests now. A child made by `fork` allocates locally.
pub(crate) fn serves() -> bool {
    is_switched() && is_alive()
}

/// True if this process is not a child made by `fork`. Costs no system call.
pub(crate) fn is_alive() -> bool {
    let page = ALIVE.load(Ordering::Relaxed);
    // SAFETY: the page is never unmapped.
    !page.is_null() && unsafe { &*page }.load(Ordering::Relaxed) == 1
}

/// Makes the page of [`ALIVE`].
fn make_alive() -> Result<(), String> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the place. The call is made by number: our own `mmap` serves the
    // program.
    let page = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            0_usize,
            KERNEL_PAGE_BYTES,
            rights,
            flags,
            -1,
            0_usize,
        )
    };
    if page <= 0 {
        return Err("the kernel has no page".to_owned());
    }
    let page = page as *mut AtomicU8;
    // SAFETY: made above, of this size. By number as above.
    let wiped = unsafe {
        libc::syscall(
            libc::SYS_madvise,
            page,
            KERNEL_PAGE_BYTES,
            libc::MADV_WIPEONFORK,
        )
    };
    if wiped != 0 {
        return Err("the kernel has no MADV_WIPEONFORK".to_owned());
    }
    // SAFETY: made above.
    unsafe { &*page }.store(1, Ordering::Relaxed);
    ALIVE.store(page, Ordering::Relaxed);
    Ok(())
}
