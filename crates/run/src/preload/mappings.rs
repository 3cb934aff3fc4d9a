//! The map of the arena's addresses: what the program has mapped, protected and locked, and which
//! pages are *ceded*. The program uses ceded pages for something else (files, code, shared memory,
//! huge pages): the kernel has them, and farpage leaves them alone (`foreign.rs`).
//!
//! The rules it keeps:
//!
//! - Addresses of a ceded page always have a mapping, without access where the program has none:
//!   the kernel never places another one there.
//! - Calls on memory of the arena look here first, and hold the lock until they are done: no
//!   mapping changes under them. Advice holds it [shared](look); all other calls hold it
//!   [alone](change). Those that need pages bring them in before, as far as possible. Pages that
//!   are absent then are waited for while others wait. Lock of the standard library: taken with
//!   signals held back, and before that of the arena's record of allocations.
//! - Protections and locks of ceded pages are the kernel's alone.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_long},
    mem,
    ops::Range,
    ptr,
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use farpage::Ranges;
use farpage_vm::calls::system_call;

use crate::say_once;

/// Protection for reading and writing.
pub(crate) const PLAIN: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Facts about an address of the arena.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Fact {
    /// True if the program has mapped it. False for free memory and for that of `malloc`.
    pub(crate) is_mapped: bool,
    /// True in a ceded page.
    pub(crate) is_ceded: bool,
    /// True if it is pinned: locked by the program, or part of a stack for signals.
    pub(crate) is_locked: bool,
    pub(crate) protection: c_int,
}

impl Default for Fact {
    fn default() -> Fact {
        Fact {
            is_mapped: false,
            is_ceded: false,
            is_locked: false,
            protection: PLAIN,
        }
    }
}

impl Fact {
    pub(crate) fn is_protected(self) -> bool {
        self.protection != PLAIN
    }
}

/// Facts about all addresses of the arena.
pub(crate) type Map = Ranges<Fact>;

static MAP: Lock = Lock(UnsafeCell::new(RwLock::new(Ranges::new())));
/// True once an address may be protected or locked: most calls on memory of `malloc` need no lock.
static MAY_HAVE_SOME: AtomicBool = AtomicBool::new(false);

/// The map's lock, which a child made by `fork` renews.
struct Lock(UnsafeCell<RwLock<Map>>);

// SAFETY: a lock, but for `renew`, whose caller is alone.
unsafe impl Sync for Lock {}

fn lock() -> &'static RwLock<Map> {
    // SAFETY: only `renew` writes to the cell, while nobody has this reference.
    unsafe { &*MAP.0.get() }
}

/// Makes the lock a free one, in a child made by `fork`: threads that only the parent has may hold
/// it shared, as this thread does.
///
/// # Safety
/// This process has no other thread, and no other hold is alive.
pub(crate) unsafe fn renew(hold: RwLockReadGuard<'static, Map>) {
    // SAFETY: the caller's promise; the map moves into the new lock, and the old one is not
    // dropped.
    unsafe {
        let map = ptr::read(&raw const *hold);
        mem::forget(hold);
        MAP.0.get().write(RwLock::new(map));
    }
}

/// Keeps the map from changing until the result is dropped. The caller holds signals back.
pub(crate) fn look() -> RwLockReadGuard<'static, Map> {
    lock().read().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the map from changing, as [`look`] does. `None` while a call changes it, which may be one
/// of this very thread's, stopped by a debugger.
pub(crate) fn try_look() -> Option<RwLockReadGuard<'static, Map>> {
    lock().try_read().ok()
}

/// Excludes all other calls on mappings of the arena until the result is dropped. The caller holds
/// signals back.
pub(crate) fn change() -> RwLockWriteGuard<'static, Map> {
    lock().write().unwrap_or_else(PoisonError::into_inner)
}

/// Makes later calls look for protections and locks.
pub(crate) fn expect_some() {
    MAY_HAVE_SOME.store(true, Ordering::Release);
}

/// True if no memory was ever protected or locked.
pub(crate) fn is_all_plain() -> bool {
    !MAY_HAVE_SOME.load(Ordering::Acquire)
}

/// True if some of `addresses` were ceded at a fork, in the child. Takes no lock that another
/// thread of the parent may have held.
pub(crate) fn was_ceded(addresses: &Range<usize>) -> bool {
    lock()
        .try_read()
        .is_ok_and(|map| map.has(addresses, |fact| fact.is_ceded))
}

/// Maps memory without access over ceded addresses, in place of what the program has there.
pub(crate) fn bar(addresses: &Range<usize>) {
    let flags = libc::MAP_FIXED | libc::MAP_NORESERVE;
    if map_anonymous(addresses, libc::PROT_NONE, flags).is_err() {
        say_once("memory cannot be unmapped: see `sysctl vm.max_map_count`");
    }
}

/// Maps private anonymous memory at ceded addresses. The error is an `errno`.
pub(crate) fn map_anonymous(
    addresses: &Range<usize>,
    protection: c_int,
    flags: c_int,
) -> Result<(), c_int> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the program replaces or unmaps what it has there.
    unsafe {
        done(
            libc::SYS_mmap,
            addresses,
            [protection as usize, flags as usize],
        )
    }
}

/// Makes a system call on addresses of the program's. The error is an `errno`.
///
/// # Safety
/// As the call.
pub(crate) unsafe fn done(
    number: c_long,
    addresses: &Range<usize>,
    rest: [usize; 2],
) -> Result<(), c_int> {
    let [first, second] = rest;
    let no_file = usize::MAX;
    let args = [addresses.start, addresses.len(), first, second, no_file, 0];
    // SAFETY: the caller's promise.
    match unsafe { system_call(number, args) } {
        0.. => Ok(()),
        errno => Err(-errno as c_int),
    }
}

/// Makes the kernel protect addresses. The error is an `errno`.
pub(crate) fn protects(addresses: &Range<usize>, protection: c_int) -> Result<(), c_int> {
    // SAFETY: the program's own memory, and its own wish.
    unsafe { done(libc::SYS_mprotect, addresses, [protection as usize, 0]) }
}
