//! Table of the arena's *ceded* pages, which the program uses for something else (files, code,
//! shared memory, huge pages): the kernel has them, and farpage leaves them alone (`foreign.rs`).
//!
//! The rules it keeps:
//!
//! - Addresses of a ceded page always have a mapping, without access where the program has none:
//!   the kernel never places another one there.
//! - Calls on memory of the arena look here first, and hold what they have seen ([`look`]) until
//!   they are done: no page changes sides under them. Ceding and regaining exclude all others
//!   ([`change`]).

use std::{
    ffi::{c_int, c_long},
    ops::Range,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use farpage_vm::calls::system_call;

use crate::{ranges::Ranges, say_once};

/// Addresses of all ceded pages. Lock of the standard library: taken with signals held back.
static CEDED: RwLock<Ranges<()>> = RwLock::new(Ranges::new());

/// Hold under which no page changes sides.
pub(crate) enum Hold {
    Shared(RwLockReadGuard<'static, Ranges<()>>),
    Exclusive(RwLockWriteGuard<'static, Ranges<()>>),
}

/// Keeps pages from changing sides until the result is dropped. The caller holds signals back.
pub(crate) fn look() -> Hold {
    Hold::Shared(CEDED.read().unwrap_or_else(PoisonError::into_inner))
}

/// Excludes all other calls on memory of the arena until the result is dropped. The caller holds
/// signals back.
pub(crate) fn change() -> Hold {
    Hold::Exclusive(CEDED.write().unwrap_or_else(PoisonError::into_inner))
}

/// Excludes other calls if some of `addresses` are ceded, so that they may be regained.
pub(crate) fn change_if_ceded(addresses: &Range<usize>) -> Hold {
    match look() {
        shared if !shared.touches(addresses) => shared,
        shared => {
            drop(shared);
            change()
        }
    }
}

/// True if some of `addresses` were ceded at a fork, in the child. Takes no lock that another
/// thread of the parent may have held.
pub(crate) fn was_ceded(addresses: &Range<usize>) -> bool {
    CEDED.try_read().is_ok_and(|ceded| ceded.touches(addresses))
}

impl Hold {
    fn ranges(&self) -> &Ranges<()> {
        match self {
            Hold::Shared(ceded) => ceded,
            Hold::Exclusive(ceded) => ceded,
        }
    }

    /// True if some of `addresses` are ceded.
    pub(crate) fn touches(&self, addresses: &Range<usize>) -> bool {
        self.ranges().touches(addresses)
    }

    /// True if all of `addresses` are ceded.
    pub(crate) fn cover(&self, addresses: &Range<usize>) -> bool {
        self.ranges().cover(addresses)
    }

    /// Returns the parts of `addresses`, ascending, and whether each is ceded.
    pub(crate) fn parts(&self, addresses: &Range<usize>) -> Vec<(Range<usize>, bool)> {
        self.ranges().parts(addresses)
    }

    /// Returns the parts of `addresses` that are not ceded, ascending.
    pub(crate) fn kept(&self, addresses: &Range<usize>) -> Vec<Range<usize>> {
        self.ranges().gaps(addresses)
    }

    /// Returns the ceded parts of `addresses`, ascending.
    pub(crate) fn ceded(&self, addresses: &Range<usize>) -> Vec<Range<usize>> {
        let parts = self.ranges().within(addresses).into_iter();
        parts.map(|(part, ())| part).collect()
    }

    /// Records that pages are ceded.
    ///
    /// # Panics
    /// The hold is not exclusive.
    pub(crate) fn insert(&mut self, pages: Range<usize>) {
        self.changed().insert(pages, ());
    }

    /// Records that pages are not ceded any more.
    ///
    /// # Panics
    /// The hold is not exclusive.
    pub(crate) fn remove(&mut self, pages: Range<usize>) {
        self.changed().remove(pages);
    }

    fn changed(&mut self) -> &mut Ranges<()> {
        match self {
            Hold::Exclusive(ceded) => ceded,
            Hold::Shared(_) => unreachable!("pages change sides under an exclusive hold"),
        }
    }
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

/// Makes a system call on ceded addresses. The error is an `errno`.
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

/// Protects ceded addresses. The error is an `errno`.
pub(crate) fn protects(addresses: &Range<usize>, protection: c_int) -> Result<(), c_int> {
    // SAFETY: the program's own memory, and its own wish.
    unsafe { done(libc::SYS_mprotect, addresses, [protection as usize, 0]) }
}
