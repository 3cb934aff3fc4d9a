//! `mprotect`, `mlock` and its kind, `mincore` and `madvise`.
//!
//! Protections are the kernel's own: it raises SIGSEGV whether a page is present or not, and pages
//! come and go under any of them. Locked memory is pinned, and locked by the kernel as well.
//!
//! The rule it keeps: memory that is given back to the arena is neither protected nor locked.

use std::{
    ffi::{c_int, c_uchar, c_uint, c_void},
    io, iter,
    ops::Range,
    sync::atomic::{AtomicI32, AtomicUsize, Ordering},
};

use farpage::Advice;
use farpage_signals::Mutex;

use crate::{
    Inside,
    maps::{KERNEL_PAGE_BYTES, PLAIN, ours, pages_of},
    ranges::Ranges,
    say_once, set_errno,
    state::{self, State},
};

/// Protections of ranges, except reading and writing.
static PROTECTED: Mutex<Ranges<c_int>> = Mutex::new(Ranges::new());
/// Ranges that the program has locked.
static LOCKED: Mutex<Ranges<()>> = Mutex::new(Ranges::new());
/// Non-zero once `PROTECTED` or `LOCKED` may have a range, so that most calls need no lock.
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// Flags of `mlockall` if memory that is allocated and mapped from now on is locked; else 0. The
/// kernel is not told: it would lock the runtime's mappings, too.
static LOCKS_ALL: AtomicI32 = AtomicI32::new(0);

fn locks_all() -> bool {
    LOCKS_ALL.load(Ordering::Relaxed) != 0
}

/// Makes later calls look for protections and locks.
fn expect_some() {
    KNOWN.store(1, Ordering::Release);
}

fn is_all_plain() -> bool {
    KNOWN.load(Ordering::Acquire) == 0
}

/// Returns the arena's addresses of a call, and whether all of them are allocated.
fn allocated(address: *mut c_void, bytes: usize) -> Option<(&'static State, Range<usize>, bool)> {
    let (addresses, state) = (ours(address, bytes)?, state::get()?);
    if Inside::is() {
        return None;
    }
    let _inside = Inside::enter();
    let is_there = state.arena.is_allocated(addresses.clone());
    Some((state, addresses, is_there))
}

fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// `mprotect`.
///
/// # Safety
/// As `mprotect`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mprotect(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
) -> c_int {
    let raw = || {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_mprotect, address, bytes, protection) as c_int }
    };
    match allocated(address, bytes) {
        None => raw(),
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((_, addresses, true)) => {
            let inside = Inside::enter();
            let mut protected = PROTECTED.lock();
            let done = raw();
            let errno = crate::errno();
            if done == 0 {
                expect_some();
                protected.remove(addresses.clone());
                if protection != PLAIN {
                    protected.insert(addresses, protection);
                }
            }
            drop(protected);
            drop(inside);
            if done == 0 { 0 } else { fail(errno) }
        }
    }
}

/// Protects addresses of the arena, or lifts a protection.
pub(crate) fn set(addresses: Range<usize>, protection: c_int) -> io::Result<()> {
    if protection == PLAIN && is_all_plain() {
        return Ok(());
    }
    expect_some();
    let mut protected = PROTECTED.lock();
    kernel_protects(&addresses, protection)?;
    protected.remove(addresses.clone());
    if protection != PLAIN {
        protected.insert(addresses, protection);
    }
    Ok(())
}

fn kernel_protects(addresses: &Range<usize>, protection: c_int) -> io::Result<()> {
    // SAFETY: addresses of the arena, which stay mapped. What may be done there is the program's
    // own wish.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mprotect,
            addresses.start,
            addresses.len(),
            protection,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the protections of `addresses`.
pub(crate) fn of(addresses: &Range<usize>) -> Vec<(Range<usize>, c_int)> {
    if is_all_plain() {
        return Vec::new();
    }
    PROTECTED.lock().within(addresses)
}

/// Makes `addresses` readable, writable and not locked. Returns false if the kernel cannot, for
/// lack of mappings.
pub(crate) fn lift(state: &State, addresses: Range<usize>) -> bool {
    if is_all_plain() {
        return true;
    }
    unlock(state, addresses.clone());
    for (part, _) in of(&addresses) {
        if set(part, PLAIN).is_err() {
            say_once(
                "a protection cannot be lifted (see `sysctl vm.max_map_count`): that memory is not used again",
            );
            return false;
        }
    }
    true
}

/// Moves the mapping at `old` to the front of `new`, with its protections and locks. All of `new`
/// is locked if the program locks all. Returns false if nothing has moved.
///
/// # Safety
/// Nobody uses `old` meanwhile, and `new` is fresh memory that nobody has seen.
pub(crate) unsafe fn relocate(state: &State, old: Range<usize>, new: Range<usize>) -> bool {
    let protected = of(&old);
    // Locked pages would not move.
    let locked = unlock(state, old.clone());
    let is_moved = lift(state, old.clone()) && {
        // SAFETY: the caller's promise.
        let moved = unsafe { state.arena.relocate(old.clone(), new.start) };
        let is_locked = || !locks_all() || lock_range(state, new.clone(), 0).is_ok();
        moved.is_ok()
            && (is_locked() || {
                // SAFETY: as before.
                let back = unsafe {
                    state
                        .arena
                        .relocate(new.start..new.start + old.len(), old.start)
                };
                back.is_err()
            })
    };
    let place = if is_moved { new.start } else { old.start };
    restore(state, protected, locked, old.start, place);
    is_moved
}

/// Restores protections and locks of the mapping, which has moved from `old` to `new`.
fn restore(
    state: &State,
    protected: Vec<(Range<usize>, c_int)>,
    locked: Vec<(Range<usize>, ())>,
    old: usize,
    new: usize,
) {
    let moved = |part: Range<usize>| new + (part.start - old)..new + (part.end - old);
    for (part, ()) in locked {
        // The memory was locked before, so the budget has room, unless other threads were faster.
        if lock_range(state, moved(part), 0).is_err() {
            say_once("a lock (mlock) is lost: that memory is remote again");
        }
    }
    for (part, protection) in protected {
        if set(moved(part), protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
}

/// Protects and locks the addresses by which a mapping has grown, as its last byte is.
pub(crate) fn extend(added: Range<usize>) {
    let last = added.start - 1..added.start;
    if let Some((_, protection)) = of(&last).pop() {
        let _ = set(added.clone(), protection);
    }
    if !is_all_plain()
        && LOCKED.lock().touches(&last)
        && let Some(state) = state::get()
    {
        // As the kernel does: without room, the added memory is not locked.
        let _ = lock_range(state, added, 0);
    }
}

/// Makes addresses zeros. The error is an `errno`.
///
/// # Safety
/// As [`Arena::discard`](farpage::Arena::discard).
pub(crate) unsafe fn discard(state: &State, addresses: Range<usize>) -> Result<(), c_int> {
    let page_bytes = state.arena.region().page_bytes();
    let touched = pages_of(state, &addresses);
    let first = touched.start
        + if touched.start < addresses.start {
            page_bytes
        } else {
            0
        };
    let last = touched.end
        - if addresses.end < touched.end {
            page_bytes
        } else {
            0
        };
    let (first, last) = (first.min(addresses.end), last.max(addresses.start));
    // Whole pages are discarded whatever their protection is.
    let whole = first..last.max(first);
    if !whole.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { state.arena.discard(whole.clone()) }.map_err(|_| libc::EAGAIN)?;
    }
    for part in [addresses.start..whole.start, whole.end..addresses.end] {
        if !part.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { overwrite(state, part) }?;
        }
    }
    Ok(())
}

/// Makes a part of a page zeros by overwriting it, which protections must allow: none changes
/// meanwhile.
///
/// # Safety
/// As [`discard`].
unsafe fn overwrite(state: &State, part: Range<usize>) -> Result<(), c_int> {
    let mut protected = PROTECTED.lock();
    let known = protected.within(&part);
    let mut lifted = known.iter().map(|(part, _)| kernel_protects(part, PLAIN));
    let done = if lifted.all(|lifted| lifted.is_ok()) {
        // SAFETY: the caller's promise.
        unsafe { state.arena.discard(part) }.map_err(|_| libc::EAGAIN)
    } else {
        say_once("memory cannot be given up: see `sysctl vm.max_map_count`");
        Err(libc::EAGAIN)
    };
    for (part, protection) in known {
        if kernel_protects(&part, protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
            protected.remove(part);
        }
    }
    done
}

/// `mlock`.
///
/// # Safety
/// As `mlock`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlock(address: *const c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { mlock2(address, bytes, 0) }
}

/// `mlock2`. Pages come in at once, even with MLOCK_ONFAULT.
///
/// # Safety
/// As `mlock2`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlock2(
    address: *const c_void,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    // The lock begins with the first page, as the manual says.
    let within = address as usize % KERNEL_PAGE_BYTES;
    let start = (address as usize - within) as *mut c_void;
    match allocated(start, bytes.saturating_add(within)) {
        // SAFETY: the caller's promise.
        None => unsafe { libc::syscall(libc::SYS_mlock2, address, bytes, flags) as c_int },
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((state, addresses, true)) => match lock_range(state, addresses, flags) {
            Ok(()) => 0,
            Err(errno) => fail(errno),
        },
    }
}

/// Pins and locks `addresses`. The error is an `errno`; nothing more is locked then than before.
fn lock_range(state: &State, addresses: Range<usize>, flags: c_uint) -> Result<(), c_int> {
    let _inside = Inside::enter();
    expect_some();
    let mut locked = LOCKED.lock();
    let (region, base) = (state.arena.region(), state.arena.addresses().start);
    let mut pinned = Vec::new();
    let unpin = |pages: Vec<Range<usize>>| pages.into_iter().for_each(|page| region.unpin(page));
    for page in each_page(state, &addresses) {
        if locked.touches(&page) {
            continue;
        }
        let page = page.start - base..page.end - base;
        if let Err(error) = region.pin(page.clone()) {
            say_once(&format!("mlock: {error}"));
            unpin(pinned);
            return Err(libc::ENOMEM);
        }
        pinned.push(page);
    }
    // SAFETY: addresses of the arena, which stay mapped.
    let done = unsafe { libc::syscall(libc::SYS_mlock2, addresses.start, addresses.len(), flags) };
    if done != 0 {
        let errno = crate::errno();
        // Some of it may be locked. SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_munlock, addresses.start, addresses.len()) };
        kernel_locks(&locked.within(&addresses));
        unpin(pinned);
        return Err(errno);
    }
    locked.insert(addresses, ());
    Ok(())
}

fn kernel_unlocks(locked: &[(Range<usize>, ())]) {
    for (part, ()) in locked {
        // SAFETY: addresses of the arena, which stay mapped.
        unsafe { libc::syscall(libc::SYS_munlock, part.start, part.len()) };
    }
}

/// Makes the kernel lock ranges again that were locked before.
fn kernel_locks(locked: &[(Range<usize>, ())]) {
    for (part, ()) in locked {
        // SAFETY: addresses of the arena, which stay mapped.
        let done = unsafe { libc::syscall(libc::SYS_mlock2, part.start, part.len(), 0) };
        // Memory that may not be read (ENOMEM) is locked all the same.
        if done != 0 && crate::errno() != libc::ENOMEM {
            say_once(
                "a lock of the kernel's (mlock) is lost: that memory stays, but may be swapped",
            );
        }
    }
}

fn each_page(state: &State, addresses: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let page_bytes = state.arena.region().page_bytes();
    let pages = pages_of(state, addresses).step_by(page_bytes);
    pages.map(move |start| start..start + page_bytes)
}

/// Unlocks the locked parts of `addresses`. Returns them.
pub(crate) fn unlock(state: &State, addresses: Range<usize>) -> Vec<(Range<usize>, ())> {
    if is_all_plain() {
        return Vec::new();
    }
    let _inside = Inside::enter();
    let mut locked = LOCKED.lock();
    let gone = locked.remove(addresses);
    let base = state.arena.addresses().start;
    kernel_unlocks(&gone);
    for (part, ()) in &gone {
        for page in each_page(state, part) {
            // Once per page, with its last part that is unlocked.
            if !locked.touches(&page) && is_last_in(&gone, part, &page) {
                state
                    .arena
                    .region()
                    .unpin(page.start - base..page.end - base);
            }
        }
    }
    gone
}

/// True if no later part of `gone` touches `page`.
fn is_last_in(gone: &[(Range<usize>, ())], part: &Range<usize>, page: &Range<usize>) -> bool {
    let later =
        |(other, ()): &(Range<usize>, ())| other.start > part.start && other.start < page.end;
    !gone.iter().any(later)
}

/// `munlock`.
///
/// # Safety
/// As `munlock`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munlock(address: *const c_void, bytes: usize) -> c_int {
    let within = address as usize % KERNEL_PAGE_BYTES;
    let start = (address as usize - within) as *mut c_void;
    match allocated(start, bytes.saturating_add(within)) {
        // SAFETY: the caller's promise.
        None => unsafe { libc::syscall(libc::SYS_munlock, address, bytes) as c_int },
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((state, addresses, true)) => {
            unlock(state, addresses);
            0
        }
    }
}

/// `mlockall`. The kernel's own would bring all of the arena in, also its free ranges, and lock
/// later mappings of the runtime. If it fails, nothing more is locked than before.
///
/// # Safety
/// As `mlockall`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // An arena that is made later would be locked by the kernel as a whole.
    let (Some(state), false) = (state::get().or_else(state::open), Inside::is()) else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_mlockall, flags) as c_int };
    };
    let known = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    if flags & !known != 0 || flags & (libc::MCL_CURRENT | libc::MCL_FUTURE) == 0 {
        return fail(libc::EINVAL);
    }
    // Locks nothing, but fails without the right to lock.
    // SAFETY: no memory is meant.
    if unsafe { libc::syscall(libc::SYS_mlock, 0, 0) } != 0 {
        return -1;
    }
    if flags & libc::MCL_CURRENT != 0 {
        let inside = Inside::enter();
        if let Err(errno) = lock_allocations(state) {
            drop(inside);
            return fail(errno);
        }
        lock_what_is_local(flags);
    }
    let is_for_all = flags & libc::MCL_FUTURE != 0;
    if is_for_all {
        say_once(
            "mlockall(MCL_FUTURE): what the C library maps for itself from now on (small allocations, stacks of threads) is not locked",
        );
    }
    LOCKS_ALL.store(if is_for_all { flags } else { 0 }, Ordering::Relaxed);
    0
}

fn lock_allocations(state: &State) -> Result<(), c_int> {
    let mut newly = Vec::new();
    for allocation in state.arena.allocations() {
        let before = LOCKED.lock().within(&allocation);
        let ends = before.iter().map(|(part, ())| part.start);
        let starts = before.iter().map(|(part, ())| part.end);
        let gaps = iter::once(allocation.start).chain(starts);
        for (start, end) in gaps.zip(ends.chain([allocation.end])) {
            if start == end {
                continue;
            }
            if let Err(errno) = lock_range(state, start..end, 0) {
                for part in newly {
                    unlock(state, part);
                }
                return Err(errno);
            }
            newly.push(start..end);
        }
    }
    Ok(())
}

/// Locks memory that the kernel has just mapped, if the program locks all. The error is an `errno`.
pub(crate) fn mapped_by_kernel(address: *mut c_void, bytes: usize) -> Result<(), c_int> {
    let flags = LOCKS_ALL.load(Ordering::Relaxed);
    if flags == 0 || Inside::is() || state::get().is_none() {
        return Ok(());
    }
    // SAFETY: a mapping of the program's, whose contents stay.
    let done = unsafe { libc::syscall(libc::SYS_mlock2, address, bytes, on_fault(flags)) };
    // As for the kernel, memory that cannot be brought in (ENOMEM) is locked all the same.
    match crate::errno() {
        errno @ (libc::EAGAIN | libc::EPERM) if done != 0 => Err(errno),
        _ => Ok(()),
    }
}

fn on_fault(flags: c_int) -> c_uint {
    if flags & libc::MCL_ONFAULT != 0 {
        libc::MLOCK_ONFAULT
    } else {
        0
    }
}

/// True if a mapping with these flags takes part in paging: it is registered with a userfaultfd
/// (`um`), or a server's memory, which is shared (`sh`) and not inherited (`dc`).
fn is_for_paging(kinds: &str) -> bool {
    let has = |kind| kinds.split(' ').any(|other| other == kind);
    has("um") || (has("sh") && has("dc"))
}

/// Locks the mappings of this process that do not take part in paging.
fn lock_what_is_local(flags: c_int) {
    let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else {
        return;
    };
    let mut addresses = None;
    for line in maps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16).ok();
            addresses = number(start).zip(number(end));
        } else if let Some(kinds) = line.strip_prefix("VmFlags:")
            && let Some((start, end)) = addresses.take()
            && !is_for_paging(kinds)
        {
            // Some mappings cannot be locked, the kernel's own for one.
            // SAFETY: a mapping of this process, whose contents stay.
            unsafe { libc::syscall(libc::SYS_mlock2, start, end - start, on_fault(flags)) };
        }
    }
}

/// `munlockall`.
///
/// # Safety
/// As `munlockall`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munlockall() -> c_int {
    LOCKS_ALL.store(0, Ordering::Relaxed);
    if let Some(state) = state::get()
        && !Inside::is()
    {
        unlock(state, state.arena.addresses());
    }
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munlockall) as c_int }
}

/// Locks fresh memory of the arena, if the program locks all. Returns false if that fails.
pub(crate) fn made(state: &State, addresses: Range<usize>) -> bool {
    !locks_all() || lock_range(state, addresses, 0).is_ok()
}

/// `mincore`: the kernel knows which pages are present.
///
/// # Safety
/// As `mincore`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mincore(
    address: *mut c_void,
    bytes: usize,
    pages: *mut c_uchar,
) -> c_int {
    match allocated(address, bytes) {
        Some((_, _, false)) => fail(libc::ENOMEM),
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(libc::SYS_mincore, address, bytes, pages) as c_int },
    }
}

/// `madvise`.
///
/// # Safety
/// As `madvise`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn madvise(
    address: *mut c_void,
    bytes: usize,
    advice: c_int,
) -> c_int {
    let Some((state, addresses, is_there)) = allocated(address, bytes) else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice) as c_int };
    };
    if !(address as usize).is_multiple_of(KERNEL_PAGE_BYTES) {
        return fail(libc::EINVAL);
    }
    if !is_there {
        return fail(libc::ENOMEM);
    }
    let outcome = advise(state, addresses, advice);
    outcome.map_or_else(fail, |()| 0)
}

fn not_locked(addresses: &Range<usize>) -> Result<(), c_int> {
    if !is_all_plain() && LOCKED.lock().touches(addresses) {
        return Err(libc::EINVAL);
    }
    Ok(())
}

/// Advises on `addresses` of the arena. The error is an `errno`.
fn advise(state: &State, addresses: Range<usize>, advice: c_int) -> Result<(), c_int> {
    let _inside = Inside::enter();
    let base = state.arena.addresses().start;
    let bytes = addresses.start - base..addresses.end - base;
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            not_locked(&addresses)?;
            // SAFETY: the program gives the contents up.
            unsafe { discard(state, addresses) }
        }
        libc::MADV_DONTNEED_LOCKED => {
            // Pages that leave would take the kernel's lock of their whole mapping along.
            let locked = LOCKED.lock();
            let known = locked.within(&pages_of(state, &addresses));
            kernel_unlocks(&known);
            // SAFETY: as above.
            let done = unsafe { discard(state, addresses) };
            kernel_locks(&known);
            done
        }
        libc::MADV_WILLNEED => {
            let _ = state.arena.region().advise(bytes, Advice::WillNeed);
            Ok(())
        }
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => {
            let here = state.arena.region().prefetch_now(bytes);
            here.map_err(|_| libc::EFAULT)
        }
        libc::MADV_COLD | libc::MADV_PAGEOUT => {
            not_locked(&addresses)?;
            // A page that is locked in another part stays: the first or the last.
            let page_bytes = state.arena.region().page_bytes();
            let mut pages = pages_of(state, &addresses);
            if not_locked(&(pages.start..pages.start + page_bytes)).is_err() {
                pages.start += page_bytes;
            }
            if pages.start < pages.end && not_locked(&(pages.end - page_bytes..pages.end)).is_err()
            {
                pages.end -= page_bytes;
            }
            if pages.start < pages.end {
                let bytes = pages.start - base..pages.end - base;
                let _ = state.arena.region().advise(bytes, Advice::DontNeed);
            }
            Ok(())
        }
        // Backing, dumps and read-ahead of memory are not the program's here; children do not have
        // the memory anyway.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_DONTFORK
        | libc::MADV_DOFORK
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE
        | libc::MADV_HUGEPAGE
        | libc::MADV_NOHUGEPAGE
        | libc::MADV_COLLAPSE
        | libc::MADV_DONTDUMP
        | libc::MADV_DODUMP => Ok(()),
        _ => Err(libc::EINVAL),
    }
}
