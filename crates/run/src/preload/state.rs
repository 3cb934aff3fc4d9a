//! The runtime and the arena of this process, and the options that the launcher has passed.
//!
//! The rule it keeps: facts change at few moments, by `arena.rs`, and in a child made by `fork`,
//! which has neither runtime nor arena. All is read without a lock, also by handlers of signals.

use std::{
    ffi::c_void,
    ops::Range,
    path::{Path, PathBuf},
    process, ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use farpage::{Advice, Arena, Region, Runtime};
use farpage_signals::{Mutex, MutexGuard};

use crate::Inside;

pub(crate) const KERNEL_PAGE_BYTES: usize = 4096;

/// The arena and its figures.
pub(crate) struct State {
    pub(crate) arena: Arena,
    /// Region that installed the runtime's handler of SIGBUS, with in-thread faults.
    _first: Option<Region>,
    peak_bytes: AtomicUsize,
}

/// Options of `farpage run` that hold for the whole life of the process.
pub(crate) struct Options {
    /// True if programs that this one starts are interposed, too.
    pub(crate) interposes_children: bool,
    /// The launcher's folder.
    pub(crate) folder: PathBuf,
}

static OPTIONS: OnceLock<Options> = OnceLock::new();
static RUNTIME: OnceLock<Runtime> = OnceLock::new();
static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
/// Address and size of the arena; 0 bytes before it exists.
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Size in bytes from which on requests are served here.
static MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Addresses of static arrays that are remote.
static STATICS: OnceLock<Vec<Range<usize>>> = OnceLock::new();
/// Id of the process that has built the runtime.
static PROCESS: AtomicUsize = AtomicUsize::new(0);
/// True once the program has asked for a ring. Sequentially consistent: if one thread asks for a
/// ring and another makes the arena at the same time, one sees the other's store.
static HAS_RINGS: AtomicBool = AtomicBool::new(false);

/// Keeps the options.
pub(crate) fn set_options(options: Options) {
    let _ = OPTIONS.set(options);
}

/// Keeps the runtime.
pub(crate) fn set_runtime(runtime: Runtime) {
    let _ = RUNTIME.set(runtime);
}

/// Serves requests of `min_bytes` and more from now on, in this process.
pub(crate) fn serve_from(min_bytes: usize) {
    PROCESS.store(process::id() as usize, Ordering::Relaxed);
    MIN_BYTES.store(min_bytes, Ordering::Relaxed);
}

/// Sends all requests to the next allocator from now on.
pub(crate) fn serve_none() {
    MIN_BYTES.store(usize::MAX, Ordering::Relaxed);
}

/// True if no request is served any more.
pub(crate) fn serves_none() -> bool {
    MIN_BYTES.load(Ordering::Relaxed) == usize::MAX
}

/// Right to make the arena.
static MAKING: Mutex<()> = Mutex::new(());
/// Number of forks that this process has begun and not ended.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Takes the right to make the arena. `None` while the process forks: a child would get it in part.
/// The caller must not wait: `fork` may wait for a lock of the program's allocator that the caller
/// has.
pub(crate) fn making() -> Option<MutexGuard<'static, ()>> {
    let right = MAKING.lock();
    (FORKS.load(Ordering::Relaxed) == 0).then_some(right)
}

/// Waits until no thread makes the arena, and lets none begin until the [end](end_fork) of a fork.
pub(crate) fn begin_fork() {
    let _right = MAKING.lock();
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Ends a fork.
pub(crate) fn end_fork() {
    FORKS.fetch_sub(1, Ordering::Relaxed);
}

/// Publishes the arena, so that requests are served from it.
pub(crate) fn publish(state: State) {
    let addresses = state.arena.addresses();
    START.store(addresses.start, Ordering::Relaxed);
    BYTES.store(addresses.len(), Ordering::Relaxed);
    STATE.store(Box::into_raw(Box::new(state)), Ordering::Release);
    if HAS_RINGS.swap(false, Ordering::SeqCst) {
        expect_zero_copy();
    }
}

/// Treats all of the arena as memory that the kernel keeps references to, also if the arena is made
/// later.
pub(crate) fn expect_zero_copy() {
    HAS_RINGS.swap(true, Ordering::SeqCst);
    if let Some(state) = get() {
        let _inside = Inside::enter();
        for region in state.arena.beside().iter().chain([state.arena.region()]) {
            let advised = region.advise(.., Advice::ZeroCopy);
            debug_assert!(advised.is_ok(), "marks are set in memory");
        }
    }
}

/// Returns the size from which on requests are served here.
pub(crate) fn min_bytes() -> usize {
    MIN_BYTES.load(Ordering::Relaxed)
}

/// Returns the runtime, once it is built. `None` in a child made by `fork`.
pub(crate) fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get().filter(|_| !is_forked())
}

/// Returns the state. `None` before its beginning, and in a child made by `fork`, by whatever call
/// (a raw `clone`, for one).
pub(crate) fn get() -> Option<&'static State> {
    inherited().filter(|_| !is_forked())
}

/// Returns the state, in a child made by `fork` that of its parent: for looking up what was
/// allocated at the fork.
pub(crate) fn inherited() -> Option<&'static State> {
    // SAFETY: it is never given back; stored whole.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// True if this is a child made by `fork` of a process that has a runtime.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && process != process::id() as usize
}

/// True if programs that this one starts are interposed.
pub(crate) fn has_children_interposed() -> bool {
    (OPTIONS.get()).is_some_and(|options| options.interposes_children)
}

/// True if a program that this process becomes by `exec` is interposed.
pub(crate) fn starts_interposed() -> bool {
    (PROCESS.load(Ordering::Relaxed) != 0 && !is_forked()) || has_children_interposed()
}

/// Returns the launcher's folder.
pub(crate) fn folder() -> &'static Path {
    (OPTIONS.get()).map_or(Path::new(""), |options| &options.folder)
}

/// Notes the addresses of static arrays that become remote.
pub(crate) fn set_statics(addresses: Vec<Range<usize>>) {
    let _ = STATICS.set(addresses);
}

/// Returns the addresses of static arrays that are remote.
pub(crate) fn statics() -> &'static [Range<usize>] {
    STATICS.get().map_or(&[], Vec::as_slice)
}

/// Returns the region of static arrays that some of `bytes` bytes at `address` lie in, and the
/// place of these in it.
pub(crate) fn static_region(
    address: *const c_void,
    bytes: usize,
) -> Option<(&'static Region, Range<usize>)> {
    let start = address as usize;
    if Inside::is() || statics().is_empty() {
        return None;
    }
    let end = start.checked_add(bytes)?;
    get()?.arena.beside().iter().find_map(|region| {
        let base = region.as_ptr() as usize;
        let (first, last) = (start.max(base), end.min(base + region.len()));
        (first < last).then(|| (region, first - base..last - base))
    })
}

/// True if `address` is the arena's, in this process or in the one that it was forked from.
pub(crate) fn owns(address: usize) -> bool {
    offset(address).is_some()
}

/// Returns the offset of `address` in the arena.
pub(crate) fn offset(address: usize) -> Option<usize> {
    let offset = address.wrapping_sub(START.load(Ordering::Relaxed));
    (offset < BYTES.load(Ordering::Relaxed)).then_some(offset)
}

/// True if some of `bytes` bytes at `at` are remote.
pub(crate) fn is_remote(at: usize, bytes: usize) -> bool {
    let holds = |address| owns(address) || statics().iter().any(|part| part.contains(&address));
    // Also in a child made by `fork`, whose absent pages its parent brings in.
    bytes > 0 && (holds(at) || holds(at.saturating_add(bytes - 1))) && inherited().is_some()
}

/// Returns the addresses of a call, if they lie in the arena.
pub(crate) fn ours(address: *const c_void, bytes: usize) -> Option<Range<usize>> {
    let start = address as usize;
    let end = start
        .checked_add(bytes)?
        .checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    (bytes > 0 && owns(start) && owns(end - 1)).then_some(start..end)
}

/// Returns the arena's addresses of a call by the program, and whether all of them are allocated.
pub(crate) fn allocated(
    address: *const c_void,
    bytes: usize,
) -> Option<(&'static State, Range<usize>, bool)> {
    let (addresses, state) = (ours(address, bytes)?, get()?);
    if Inside::is() {
        return None;
    }
    let _inside = Inside::enter();
    let is_there = state.arena.is_allocated(addresses.clone());
    Some((state, addresses, is_there))
}

impl State {
    pub(crate) fn new(arena: Arena, first: Option<Region>) -> State {
        State {
            arena,
            _first: first,
            peak_bytes: AtomicUsize::new(0),
        }
    }

    /// Returns the offsets of `addresses` in the arena's region.
    pub(crate) fn offsets(&self, addresses: &Range<usize>) -> Range<usize> {
        let base = self.arena.addresses().start;
        addresses.start - base..addresses.end - base
    }

    /// Returns the addresses of the pages that `addresses` touch.
    pub(crate) fn pages_of(&self, addresses: &Range<usize>) -> Range<usize> {
        let page_bytes = self.arena.region().page_bytes();
        let base = self.arena.addresses().start;
        let offsets = self.offsets(addresses);
        base + offsets.start / page_bytes * page_bytes
            ..base + offsets.end.next_multiple_of(page_bytes)
    }

    /// Returns the addresses of the pages that lie wholly in `addresses`. Without such a page the
    /// range is empty, and lies there, too.
    pub(crate) fn whole_pages_of(&self, addresses: &Range<usize>) -> Range<usize> {
        let page_bytes = self.arena.region().page_bytes();
        let base = self.arena.addresses().start;
        let offsets = self.offsets(addresses);
        let start = base + offsets.start.next_multiple_of(page_bytes);
        let start = start.min(addresses.end);
        let end = base + offsets.end / page_bytes * page_bytes;
        start..end.max(start)
    }

    /// Records the present size of all that is used, if it is the largest so far.
    pub(crate) fn note_peak(&self) {
        let now = self.arena.used_bytes();
        self.peak_bytes.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the most that was used at once: allocations without access are not.
    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}
