//! Memory that the program has locked, by `mlock` and its kind: it is pinned, and locked by the
//! kernel as well. Stacks for signals and of contexts are pinned.
//!
//! The rule it keeps: pages are pinned before the kernel locks them, once for each page, and
//! unpinned when the last locked part of the page is unlocked.

use std::{
    ffi::{c_int, c_uint, c_void},
    iter,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use farpage_signals::Mutex;

use crate::{
    Inside, answer, arena, ceded, fail,
    next::Next,
    ranges::Ranges,
    say_once, signal_stack, signals,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Ranges that the program has locked.
static LOCKED: Mutex<Ranges<()>> = Mutex::new(Ranges::new());
/// True once `LOCKED`, or a table of protections, may have a range: most calls need no lock.
static MAY_HAVE_SOME: AtomicBool = AtomicBool::new(false);
/// Flags of `mlockall` if memory that is allocated and mapped from now on is locked; else 0. The
/// kernel is not told: it would lock the runtime's mappings, too.
static LOCKS_ALL: AtomicI32 = AtomicI32::new(0);

/// Makes later calls look for protections and locks.
pub(crate) fn expect_some() {
    MAY_HAVE_SOME.store(true, Ordering::Release);
}

/// True if no memory was ever protected or locked.
pub(crate) fn is_all_plain() -> bool {
    !MAY_HAVE_SOME.load(Ordering::Acquire)
}

/// True if some of `addresses` are locked.
pub(crate) fn touch(addresses: &Range<usize>) -> bool {
    !is_all_plain() && LOCKED.lock().touches(addresses)
}

/// Locks fresh memory of the arena, if the program locks all. Returns false if that fails.
pub(crate) fn made(state: &State, addresses: Range<usize>) -> bool {
    LOCKS_ALL.load(Ordering::Relaxed) == 0 || lock_range(state, addresses, 0).is_ok()
}

/// Calls `work` while the kernel's locks of the pages of `addresses` are lifted: pages that leave
/// would take the kernel's lock of their whole mapping along.
pub(crate) fn without<R>(state: &State, addresses: &Range<usize>, work: impl FnOnce() -> R) -> R {
    let locked = LOCKED.lock();
    let known = locked.within(&state.pages_of(addresses));
    kernel_unlocks(&known);
    let done = work();
    kernel_locks(&known);
    done
}

/// Pins and locks `addresses`. The error is an `errno`; nothing more is locked then than before.
pub(crate) fn lock_range(
    state: &State,
    addresses: Range<usize>,
    flags: c_uint,
) -> Result<(), c_int> {
    pin_range(state, addresses, Some(flags))
}

/// Pins `addresses`, until they are unlocked or given up. With the `flags` of `mlock2` the kernel
/// locks them, too. The error is an `errno`; nothing more is pinned then than before.
pub(crate) fn pin_range(
    state: &State,
    addresses: Range<usize>,
    flags: Option<c_uint>,
) -> Result<(), c_int> {
    let _inside = Inside::enter();
    expect_some();
    // Pins are of pages under paging.
    if let Err(error) = state.arena.begin_paging() {
        say_once(&format!("mlock: {error}"));
        return Err(libc::ENOMEM);
    }
    let mut locked = LOCKED.lock();
    let region = state.arena.region();
    let mut pinned = Vec::new();
    let unpin = |pages: Vec<Range<usize>>| pages.into_iter().for_each(|page| region.unpin(page));
    for page in each_page(state, &addresses) {
        if locked.touches(&page) {
            continue;
        }
        let page = state.offsets(&page);
        if let Err(error) = region.pin(page.clone()) {
            say_once(&format!("mlock: {error}"));
            unpin(pinned);
            return Err(libc::ENOMEM);
        }
        pinned.push(page);
    }
    let lock = |flags: c_uint| {
        let (start, bytes) = (addresses.start, addresses.len());
        // SAFETY: addresses of the arena, which stay mapped.
        unsafe { libc::syscall(libc::SYS_mlock2, start, bytes, flags) }
    };
    if flags.map_or(0, lock) != 0 {
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
pub(crate) fn kernel_locks(locked: &[(Range<usize>, ())]) {
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
    let pages = state.pages_of(addresses).step_by(page_bytes);
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
    kernel_unlocks(&gone);
    for (part, ()) in &gone {
        for page in each_page(state, part) {
            // Once per page, with its last part that is unlocked.
            if !locked.touches(&page) && is_last_in(&gone, part, &page) {
                state.arena.region().unpin(state.offsets(&page));
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

/// Returns the arena's addresses of a lock, which begins with the first page, as the manual says.
/// Tells whether all of them are allocated.
fn pages(address: *const c_void, bytes: usize) -> Option<(&'static State, Range<usize>, bool)> {
    let within = address as usize % KERNEL_PAGE_BYTES;
    let start = address.wrapping_byte_sub(within);
    state::allocated(start, bytes.saturating_add(within))
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
    if let Some(Err(errno)) = pin_statics(address, bytes) {
        return fail(errno);
    }
    match pages(address, bytes) {
        // SAFETY: the caller's promise.
        None => unsafe { libc::syscall(libc::SYS_mlock2, address, bytes, flags) as c_int },
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((state, addresses, true)) => {
            let inside = Inside::enter();
            let locked = lock_parts(state, &addresses, flags);
            drop(inside);
            answer(locked)
        }
    }
}

/// Locks memory of the arena, of which the kernel has ceded pages. The error is an `errno`.
fn lock_parts(state: &State, addresses: &Range<usize>, flags: c_uint) -> Result<(), c_int> {
    let hold = ceded::look();
    for (part, is_ceded) in hold.parts(addresses) {
        match is_ceded {
            // SAFETY: the program's own memory, which stays mapped.
            true => unsafe { ceded::done(libc::SYS_mlock2, &part, [flags as usize, 0]) }?,
            false => lock_range(state, part, flags)?,
        }
    }
    Ok(())
}

/// `munlock`.
///
/// # Safety
/// As `munlock`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munlock(address: *const c_void, bytes: usize) -> c_int {
    match pages(address, bytes) {
        // SAFETY: the caller's promise.
        None => unsafe { libc::syscall(libc::SYS_munlock, address, bytes) as c_int },
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((state, addresses, true)) => {
            let _inside = Inside::enter();
            for (part, is_ceded) in ceded::look().parts(&addresses) {
                if is_ceded {
                    // SAFETY: the program's own memory, which stays mapped.
                    let _ = unsafe { ceded::done(libc::SYS_munlock, &part, [0, 0]) };
                } else {
                    unlock(state, part);
                }
            }
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
    let (Some(state), false) = (state::get().or_else(arena::open), Inside::is()) else {
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
        // An ordinary arena would be locked as local memory is.
        let begun = state.arena.begin_paging().map_err(|_| libc::ENOMEM);
        if let Err(errno) = begun.and_then(|()| lock_allocations(state)) {
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
    // Ceded pages are locked with all that is local.
    let hold = ceded::look();
    let allocations = state.arena.allocations();
    for allocation in allocations.iter().flat_map(|all| hold.kept(all)) {
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

/// Pinned parts of static arrays, which stay pinned.
static PINNED: Mutex<Ranges<()>> = Mutex::new(Ranges::new());

/// Pins the static arrays among `bytes` bytes at `address`. The error is an `errno`.
fn pin_statics(address: *const c_void, bytes: usize) -> Option<Result<(), c_int>> {
    let (region, range) = state::static_region(address, bytes)?;
    let _inside = Inside::enter();
    let base = region.as_ptr() as usize;
    let mut pinned = PINNED.lock();
    for part in pinned.gaps(&(base + range.start..base + range.end)) {
        let pages = part.start - base..part.end - base;
        if let Err(error) = region.pin(pages) {
            say_once(&format!("a static array cannot be pinned: {error}"));
            return Some(Err(libc::ENOMEM));
        }
        pinned.insert(part, ());
    }
    Some(Ok(()))
}

/// Pins a stack, if it is remote. With in-thread faults the kernel cannot write to an absent page
/// of a stack, as it does for signals. Returns false if the stack cannot be pinned.
fn pin_stack(address: *const c_void, bytes: usize) -> bool {
    if !signals::are_ours() {
        return true;
    }
    let pinned = pin_statics(address, bytes).or_else(|| match state::allocated(address, bytes) {
        Some((state, addresses, true)) => Some(pin_range(state, addresses, None)),
        _ => None,
    });
    pinned.is_none_or(|pinned| pinned.is_ok())
}

/// Returns the C library's `makecontext`, after the context's stack has been pinned.
#[cfg(target_arch = "x86_64")]
extern "C" fn next_makecontext(context: *const libc::ucontext_t) -> *mut c_void {
    static MAKECONTEXT: Next = Next::new(c"makecontext");
    // SAFETY: the program's context, in which it has set the stack.
    let stack = unsafe { (*context).uc_stack };
    if !pin_stack(stack.ss_sp, stack.ss_size) {
        say_once(
            "a coroutine's stack cannot be pinned: a signal there may end the program; raise --budget, or use --fillers",
        );
    }
    MAKECONTEXT.get().unwrap_or(std::ptr::null_mut())
}

/// `makecontext`. A remote stack is pinned.
///
/// # Safety
/// As `makecontext`.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn makecontext(context: *mut libc::ucontext_t) {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax",
        "call {next}",
        "mov r11, rax",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp r11",
        next = sym next_makecontext,
    )
}

/// `sigaltstack`. A remote stack is pinned: the kernel writes to it while its page is absent.
///
/// # Safety
/// As `sigaltstack`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaltstack(
    new: *const libc::stack_t,
    old: *mut libc::stack_t,
) -> c_int {
    // SAFETY: the caller's promise. Either may be remote, so that the kernel gets copies.
    let (new, old) = unsafe { (new.as_ref().copied(), old.as_mut()) };
    let is_set = |stack: &libc::stack_t| stack.ss_flags & libc::SS_DISABLE == 0;
    if let Some(stack) = new.filter(is_set)
        && !pin_stack(stack.ss_sp, stack.ss_size)
    {
        say_once(
            "an alternate signal stack cannot be pinned: a fault there ends the program; raise --budget",
        );
    }
    signal_stack::exchange(new, old)
}
