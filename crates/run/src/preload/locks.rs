//! Memory that the program has locked, by `mlock` and its kind: it is pinned, and locked by the
//! kernel as well. Stacks for signals and of contexts are pinned.
//!
//! The rule it keeps: pages are pinned before the kernel locks them, once for each page, and
//! unpinned when the last locked part of the page is unlocked.

use std::{
    ffi::{c_int, c_uint, c_void},
    ops::Range,
    process,
    ptr::{self, NonNull},
    slice,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

use farpage::Ranges;
use farpage_signals::Mutex;

use crate::{
    Inside, answer, arena, fail,
    mappings::{self, Map},
    next::Next,
    say_once, signal_stack, signals,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Flags of `mlockall` if memory that is allocated and mapped from now on is locked; else 0. The
/// kernel is not told: it would lock the runtime's mappings, too.
static LOCKS_ALL: AtomicI32 = AtomicI32::new(0);

/// Process that has set [`LOCKS_ALL`]: its children have no locks.
static LOCKER: AtomicU32 = AtomicU32::new(0);

/// Returns the flags of `mlockall` if this process locks memory that is made from now on; else 0.
fn locks_all() -> c_int {
    match LOCKS_ALL.load(Ordering::Relaxed) {
        0 => 0,
        _ if LOCKER.load(Ordering::Relaxed) != process::id() => 0,
        flags => flags,
    }
}

/// True if the program locks all memory that is made from now on.
pub(crate) fn lock_all() -> bool {
    locks_all() != 0
}

/// Locks fresh memory of the arena, if the program locks all. Returns false if that fails.
pub(crate) fn made(state: &State, addresses: &Range<usize>) -> bool {
    !lock_all() || lock_range(&mut mappings::change(), state, addresses, Some(0)).is_ok()
}

/// Calls `work` while the kernel's locks of the pages of `addresses` are lifted: pages that leave
/// would take the kernel's lock of their whole mapping along.
pub(crate) fn without<R>(
    map: &Map,
    state: &State,
    addresses: &Range<usize>,
    work: impl FnOnce() -> R,
) -> R {
    let locked = map.those(&state.pages_of(addresses), |fact| fact.is_locked);
    kernel_unlocks(&locked);
    let done = work();
    kernel_locks(&locked);
    done
}

/// Brings `parts` in, if the budget has room for them, before the map of mappings is held: a
/// server may not answer. Pins say what fails.
fn bring_in(state: &State, parts: &[Range<usize>]) {
    let budget = state::runtime().map_or(0, |runtime| runtime.stats().pager.budget_bytes);
    let bytes: usize = parts.iter().map(ExactSizeIterator::len).sum();
    if !state.arena.is_ordinary() && bytes as u64 <= budget {
        for part in parts {
            let _ = state.arena.region().prefetch_now(state.offsets(part));
        }
    }
}

/// Pins `addresses`, until they are unlocked or given up. With the `flags` of `mlock2` the kernel
/// locks them, too. The error is an `errno`; nothing more is locked then than before.
pub(crate) fn lock_range(
    map: &mut Map,
    state: &State,
    addresses: &Range<usize>,
    flags: Option<c_uint>,
) -> Result<(), c_int> {
    mappings::expect_some();
    let fails = |error: &dyn std::fmt::Display| {
        say_once(&format!("mlock: {error}"));
        libc::ENOMEM
    };
    // Pins are of pages under paging.
    (state.arena.begin_paging()).map_err(|error| fails(&error))?;
    let region = state.arena.region();
    let mut pinned = Vec::new();
    let mut pin = |page: Range<usize>| {
        let page = state.offsets(&page);
        region.pin(page.clone()).map_err(|error| fails(&error))?;
        pinned.push(page);
        Ok(())
    };
    let mut pages = each_page(state, addresses);
    let is_locked = pages
        .try_for_each(|page| match map.has(&page, |fact| fact.is_locked) {
            true => Ok(()),
            false => pin(page),
        })
        .and_then(|()| match flags {
            // SAFETY: addresses of the arena, which stay mapped.
            Some(flags) => unsafe {
                let done = mappings::done(libc::SYS_mlock2, addresses, [flags as usize, 0]);
                done.inspect_err(|_| {
                    // Some of it may be locked.
                    kernel_unlocks(slice::from_ref(addresses));
                    kernel_locks(&map.those(addresses, |fact| fact.is_locked));
                })
            },
            None => Ok(()),
        });
    match is_locked {
        Ok(()) => map.change(addresses, |fact| fact.is_locked = true),
        Err(_) => pinned.into_iter().for_each(|page| region.unpin(page)),
    }
    is_locked
}

fn kernel_unlocks(locked: &[Range<usize>]) {
    for part in locked {
        // SAFETY: addresses of the arena, which stay mapped.
        let _ = unsafe { mappings::done(libc::SYS_munlock, part, [0, 0]) };
    }
}

/// Makes the kernel lock ranges again that were locked before.
pub(crate) fn kernel_locks(locked: &[Range<usize>]) {
    for part in locked {
        // SAFETY: addresses of the arena, which stay mapped.
        let done = unsafe { mappings::done(libc::SYS_mlock2, part, [0, 0]) };
        // Memory that may not be read (ENOMEM) is locked all the same.
        if done.is_err_and(|errno| errno != libc::ENOMEM) {
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

/// Unlocks the locked parts of `addresses`.
pub(crate) fn unlock(map: &mut Map, state: &State, addresses: &Range<usize>) {
    let gone = map.those(addresses, |fact| fact.is_locked);
    kernel_unlocks(&gone);
    map.change(addresses, |fact| fact.is_locked = false);
    let mut pages: Vec<_> = gone
        .iter()
        .flat_map(|part| each_page(state, part))
        .collect();
    // Once per page, with its last locked part.
    pages.dedup();
    for page in pages {
        if !map.has(&page, |fact| fact.is_locked) {
            state.arena.region().unpin(state.offsets(&page));
        }
    }
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
            bring_in(state, slice::from_ref(&addresses));
            let locked = lock_parts(&mut mappings::change(), state, &addresses, flags);
            drop(inside);
            answer(locked)
        }
    }
}

/// Locks memory of the arena, of which the kernel has ceded pages. The error is an `errno`.
fn lock_parts(
    map: &mut Map,
    state: &State,
    addresses: &Range<usize>,
    flags: c_uint,
) -> Result<(), c_int> {
    for (part, is_ceded) in map.parts(addresses, |fact| fact.is_ceded) {
        match is_ceded {
            // SAFETY: the program's own memory, which stays mapped.
            true => unsafe { mappings::done(libc::SYS_mlock2, &part, [flags as usize, 0]) }?,
            false => lock_range(map, state, &part, Some(flags))?,
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
            let mut map = mappings::change();
            kernel_unlocks(&map.those(&addresses, |fact| fact.is_ceded));
            unlock(&mut map, state, &addresses);
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
        let statics = lock_statics(state);
        let inside = Inside::enter();
        // An ordinary arena would be locked as local memory is.
        let begun = state.arena.begin_paging().map_err(|_| libc::ENOMEM);
        let locked = statics.and(begun).and_then(|()| lock_allocations(state));
        if let Err(errno) = locked {
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
    mappings::expect_some();
    LOCKER.store(process::id(), Ordering::Relaxed);
    LOCKS_ALL.store(if is_for_all { flags } else { 0 }, Ordering::Relaxed);
    0
}

/// Locks static arrays. They stay pinned also if that fails.
fn lock_statics(state: &State) -> Result<(), c_int> {
    for region in state.arena.beside() {
        let (start, bytes) = (region.as_ptr(), region.len());
        pin_statics(start.cast(), bytes).unwrap_or(Ok(()))?;
        let addresses = start as usize..start as usize + bytes;
        // SAFETY: addresses of static arrays, which stay mapped.
        unsafe { mappings::done(libc::SYS_mlock2, &addresses, [0, 0]) }?;
    }
    Ok(())
}

fn lock_allocations(state: &State) -> Result<(), c_int> {
    let allocations = state.arena.allocations();
    bring_in(state, &allocations);
    let mut map = mappings::change();
    let allocations = state.arena.allocations();
    // Ceded pages are locked with all that is local.
    let is_missing = |all| map.those(all, |fact| !fact.is_locked && !fact.is_ceded);
    let missing: Vec<_> = allocations.iter().flat_map(is_missing).collect();
    for (newly, part) in missing.iter().enumerate() {
        if let Err(errno) = lock_range(&mut map, state, part, Some(0)) {
            for part in &missing[..newly] {
                unlock(&mut map, state, part);
            }
            return Err(errno);
        }
    }
    Ok(())
}

/// Locks memory that the kernel has just mapped, if the program locks all. The error is an `errno`.
pub(crate) fn mapped_by_kernel(address: *mut c_void, bytes: usize) -> Result<(), c_int> {
    let flags = locks_all();
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
        let _inside = Inside::enter();
        unlock(&mut mappings::change(), state, &state.arena.addresses());
    }
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munlockall) as c_int }
}

/// Pinned parts of static arrays, which stay pinned.
static PINNED: Mutex<Ranges<bool>> = Mutex::new(Ranges::new());

/// Pins the static arrays among `bytes` bytes at `address`. The error is an `errno`.
fn pin_statics(address: *const c_void, bytes: usize) -> Option<Result<(), c_int>> {
    let (region, range) = state::static_region(address, bytes)?;
    let _inside = Inside::enter();
    let base = region.as_ptr() as usize;
    let mut pinned = PINNED.lock();
    let new = pinned.those(&(base + range.start..base + range.end), |is_pinned| {
        !is_pinned
    });
    for part in new {
        let pages = part.start - base..part.end - base;
        if let Err(error) = region.pin(pages) {
            say_once(&format!("a static array cannot be pinned: {error}"));
            return Some(Err(libc::ENOMEM));
        }
        pinned.change(&part, |is_pinned| *is_pinned = true);
    }
    Some(Ok(()))
}

/// Bytes of a stack that are kept if its lower end is unknown: all of a small block.
const STACK_BYTES: usize = 256 << 10;
/// Most bytes of a stack that are looked through for its lower end.
const STACK_MAX: usize = 8 << 20;

/// Returns the addresses of a remote stack that ends at `top`. Its lower end is the beginning of a
/// block of `heap.rs`, if that can be told, and else where allocated memory begins, at most
/// [`STACK_BYTES`] below.
pub(crate) fn stack_below(top: usize) -> Option<Range<usize>> {
    let last = top.checked_sub(1)?;
    if !state::is_remote(last, 1) {
        return None;
    }
    let page = last & !(KERNEL_PAGE_BYTES - 1);
    let pages_below = |lowest: usize| (lowest..=page).rev().step_by(KERNEL_PAGE_BYTES);
    if let Some(part) = state::statics().iter().find(|part| part.contains(&last)) {
        return Some(part.start.max(top.saturating_sub(STACK_BYTES))..top);
    }
    let Some(state) = state::get().filter(|state| state.has(last)) else {
        return Some(page..top);
    };
    let addresses = state.arena.addresses();
    let known = pages_below(addresses.start.max(top.saturating_sub(STACK_MAX)))
        .find(|&start| state.is_made(start))
        .filter(|&start| {
            let bytes = NonNull::new(ptr::with_exposed_provenance_mut(start))
                .and_then(|start| state.arena.usable_bytes(start));
            bytes.is_some_and(|bytes| start + bytes >= top)
        });
    let allocated = || {
        let _inside = Inside::enter();
        let is_allocated = |page: &usize| state.arena.is_allocated(*page..*page + 1);
        pages_below(addresses.start.max(top.saturating_sub(STACK_BYTES)))
            .take_while(is_allocated)
            .last()
    };
    Some(known.or_else(allocated).unwrap_or(page)..top)
}

/// Pins the stack of a thread or process that the program makes, until the stack is freed. Writes a
/// line if it cannot be pinned.
pub(crate) fn keep_stack(stack: Range<usize>) {
    let start = stack.start & !(KERNEL_PAGE_BYTES - 1);
    let is_pinned = |start: usize| pin_stack(start as *const c_void, stack.end - start);
    let upper = start.max(stack.end.saturating_sub(STACK_BYTES) & !(KERNEL_PAGE_BYTES - 1));
    if !is_pinned(start) && !is_pinned(upper) {
        say_once(
            "the stack of a child by clone cannot be pinned: a fault there ends the child; raise --budget, or use --fillers",
        );
    }
}

/// Pins a stack, if it is remote. With in-thread faults the kernel cannot write to an absent page
/// of a stack, as it does for signals. Returns false if the stack cannot be pinned.
fn pin_stack(address: *const c_void, bytes: usize) -> bool {
    if !signals::are_ours() {
        return true;
    }
    let pinned = pin_statics(address, bytes).or_else(|| match state::allocated(address, bytes) {
        Some((state, addresses, true)) => Some(pins(state, &addresses)),
        _ => None,
    });
    // Remote memory that is not all allocated, or in a child made by `fork`, is not pinned.
    let is_local = || !state::is_remote(address as usize, bytes);
    pinned.map_or_else(is_local, |pinned| pinned.is_ok())
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
    MAKECONTEXT.get().unwrap_or(ptr::null_mut())
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

fn pins(state: &State, addresses: &Range<usize>) -> Result<(), c_int> {
    let _inside = Inside::enter();
    bring_in(state, slice::from_ref(addresses));
    lock_range(&mut mappings::change(), state, addresses, None)
}
