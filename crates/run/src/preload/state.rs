//! The runtime and the arena of this process, and the options that the launcher has passed.
//!
//! A child made by `fork` has copies of the arenas of its parent, which it *inherits*. It has no
//! runtime and no arena of its own until it makes them.
//!
//! The rule it keeps: facts change at few moments, by `arena.rs`. All is read without a lock, also
//! by handlers of signals.

use std::{
    ffi::c_void,
    iter,
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

use crate::{Inside, made::Made};

pub(crate) const KERNEL_PAGE_BYTES: usize = 4096;

/// Number of processes in a line of forks that have arenas of their own. Addresses without memory
/// cost nothing.
pub(crate) const GENERATIONS: usize = 4;

/// An arena and its figures.
pub(crate) struct State {
    pub(crate) arena: Arena,
    addresses: Range<usize>,
    /// Process that has made the arena.
    process: usize,
    /// Arena that this process had inherited before.
    inherited: Option<&'static State>,
    /// Addresses at which allocations of `heap.rs` begin.
    made: Made,
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
/// Runtime of this process, or of one that it was forked from.
static RUNTIME: AtomicPtr<Runtime> = AtomicPtr::new(ptr::null_mut());
/// Newest arena of this process, which may be inherited.
static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
/// Size in bytes from which on requests are served here.
static MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Addresses of static arrays that are remote.
static STATICS: OnceLock<Vec<Range<usize>>> = OnceLock::new();
/// Id of the process that our constructor has run in.
static FIRST_PROCESS: AtomicUsize = AtomicUsize::new(0);
/// Id of the process that has built the runtime.
static PROCESS: AtomicUsize = AtomicUsize::new(0);
/// Id of a child made by `fork` that may build a runtime of its own.
static CHILD: AtomicUsize = AtomicUsize::new(0);
/// True once the program has asked for a ring. Sequentially consistent: if one thread asks for a
/// ring and another makes the arena at the same time, one sees the other's store.
static HAS_RINGS: AtomicBool = AtomicBool::new(false);

/// Bytes of large requests of a child made by `fork`, until it has an arena.
static ASKED: AtomicUsize = AtomicUsize::new(0);
/// True once the program has asked for a filter of system calls, which its children inherit.
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Keeps the options.
pub(crate) fn set_options(options: Options) {
    let _ = OPTIONS.set(options);
}

/// Keeps the runtime.
pub(crate) fn set_runtime(runtime: Runtime) {
    RUNTIME.store(Box::into_raw(Box::new(runtime)), Ordering::Release);
}

/// Serves requests of `min_bytes` and more from now on, in this process.
pub(crate) fn serve_from(min_bytes: usize) {
    FIRST_PROCESS.store(this_process(), Ordering::Relaxed);
    PROCESS.store(this_process(), Ordering::Relaxed);
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

/// Begins a child made by `fork`, in which it is the only thread: it may build a runtime, unless
/// its parent stays local.
pub(crate) fn begin_child() {
    // SAFETY: this process has no other thread, and this one does not make an arena.
    unsafe { MAKING.renew(()) };
    FORKS.store(0, Ordering::Relaxed);
    ASKED.store(0, Ordering::Relaxed);
    CHILD.store(this_process(), Ordering::Relaxed);
}

/// Counts a large request of a child made by `fork` that has no arena. Returns the bytes of all.
pub(crate) fn ask(bytes: usize) -> usize {
    let before = ASKED.fetch_add(bytes, Ordering::Relaxed);
    before.saturating_add(bytes)
}

/// True if this child made by `fork` may build a runtime of its own.
pub(crate) fn may_begin_again() -> bool {
    CHILD.load(Ordering::Acquire) == this_process() && !is_confined()
}

/// Notes that the program asks for a filter of system calls. It may forbid what a runtime begins
/// with, so that the filter comes too early for a child's.
pub(crate) fn note_confined() {
    IS_CONFINED.store(true, Ordering::Relaxed);
}

/// True if the program has asked for a filter of system calls.
pub(crate) fn is_confined() -> bool {
    IS_CONFINED.load(Ordering::Relaxed)
}

/// Gives a child made by `fork` its one chance to build a runtime of its own. Returns its parent's.
pub(crate) fn begin_again() -> Option<&'static Runtime> {
    if !may_begin_again() {
        return None;
    }
    let parents = RUNTIME.swap(ptr::null_mut(), Ordering::AcqRel);
    PROCESS.store(this_process(), Ordering::Relaxed);
    // Whoever finds the chance taken finds that the child has begun, too.
    CHILD.store(0, Ordering::Release);
    // SAFETY: it is never given back; stored whole.
    unsafe { parents.as_ref() }
}

/// Publishes the arena, so that requests are served from it.
pub(crate) fn publish(state: State) {
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

/// Returns the runtime of this process, once it is built.
pub(crate) fn runtime() -> Option<&'static Runtime> {
    // SAFETY: it is never given back; stored whole.
    let runtime = unsafe { RUNTIME.load(Ordering::Acquire).as_ref() };
    runtime.filter(|_| !is_forked())
}

/// Returns the arena of this process. `None` before it is made, in a child made by `fork` by
/// whatever call (a raw `clone`, for one) as well.
pub(crate) fn get() -> Option<&'static State> {
    newest().filter(|state| state.process == this_process())
}

/// Returns the newest arena of this process. It may be inherited.
pub(crate) fn newest() -> Option<&'static State> {
    // SAFETY: it is never given back; stored whole.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// Returns the arenas of this process, inherited ones included, from the newest on.
pub(crate) fn all() -> impl Iterator<Item = &'static State> {
    iter::successors(newest(), |state| state.inherited)
}

/// Returns the arena that `address` lies in. It may be inherited.
pub(crate) fn of(address: usize) -> Option<&'static State> {
    all().find(|state| state.has(address))
}

fn this_process() -> usize {
    process::id() as usize
}

/// True if this is a child made by `fork` that has not begun to build a runtime.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && process != this_process()
}

/// True if this is a child made by `fork`.
pub(crate) fn is_child() -> bool {
    let first = FIRST_PROCESS.load(Ordering::Relaxed);
    first != 0 && first != this_process()
}

/// True if programs that this one starts are interposed.
pub(crate) fn has_children_interposed() -> bool {
    (OPTIONS.get()).is_some_and(|options| options.interposes_children)
}

/// True if a program that this process becomes by `exec` is interposed.
pub(crate) fn starts_interposed() -> bool {
    (FIRST_PROCESS.load(Ordering::Relaxed) != 0 && !is_child()) || has_children_interposed()
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

/// True if `address` lies in an arena, which may be inherited.
pub(crate) fn owns(address: usize) -> bool {
    of(address).is_some()
}

/// True if an allocation of `heap.rs` begins in the page of `address`, in any arena.
pub(crate) fn is_made(address: usize) -> bool {
    of(address).is_some_and(|state| state.is_made(address))
}

/// True if some of `bytes` bytes at `at` are remote.
pub(crate) fn is_remote(at: usize, bytes: usize) -> bool {
    let holds = |address| owns(address) || statics().iter().any(|part| part.contains(&address));
    // Also in a child made by `fork`, whose absent pages its parent brings in.
    bytes > 0 && (holds(at) || holds(at.saturating_add(bytes - 1))) && newest().is_some()
}

/// Returns the addresses of a call, if they lie in one arena, and that arena.
fn within(address: *const c_void, bytes: usize) -> Option<(&'static State, Range<usize>)> {
    let start = address as usize;
    let end = start
        .checked_add(bytes)?
        .checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    let state = of(start)?;
    (bytes > 0 && state.has(end - 1)).then_some((state, start..end))
}

/// Returns the addresses of a call, if they lie in the arena of this process.
pub(crate) fn ours(address: *const c_void, bytes: usize) -> Option<Range<usize>> {
    let (state, addresses) = within(address, bytes)?;
    (state.process == this_process()).then_some(addresses)
}

/// Returns the addresses of a call, if they lie in an inherited arena.
pub(crate) fn inherited(address: *const c_void, bytes: usize) -> Option<Range<usize>> {
    let (state, addresses) = within(address, bytes)?;
    (state.process != this_process()).then_some(addresses)
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
        let addresses = arena.addresses();
        State {
            made: Made::new(addresses.len().div_ceil(KERNEL_PAGE_BYTES)),
            process: this_process(),
            inherited: newest(),
            addresses,
            arena,
            _first: first,
            peak_bytes: AtomicUsize::new(0),
        }
    }

    /// True if `address` lies in the arena.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.addresses.contains(&address)
    }

    /// Records that an allocation of `heap.rs` begins at `address`.
    pub(crate) fn note_made(&self, address: usize) {
        self.made.add(self.page(address));
    }

    /// Removes the record of an allocation of `heap.rs` that is about to be freed or moved.
    pub(crate) fn forget_made(&self, address: usize) {
        self.made.remove(self.page(address));
    }

    /// True if an allocation of `heap.rs` begins in the page of `address`.
    pub(crate) fn is_made(&self, address: usize) -> bool {
        self.made.holds(self.page(address))
    }

    /// Returns the number of the kernel page of `address`.
    fn page(&self, address: usize) -> usize {
        (address - self.addresses.start) / KERNEL_PAGE_BYTES
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
