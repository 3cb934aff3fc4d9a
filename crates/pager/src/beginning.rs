//! A region's time as ordinary memory: [`Beginning`].
//!
//! The rule: a call that relies on ordinary memory holds [`OrdinaryHold`] for as long as it does.
//! Paging begins when no call does, once, and for good.

use std::sync::{
    PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, Ordering},
};

/// Time of a region before its pages are caught.
#[derive(Debug)]
pub(crate) struct Beginning {
    /// False once the region is under paging: most calls need no lock.
    may_be_ordinary: AtomicBool,
    /// True if faults may come. Set before the first one can, and while paging begins.
    catches: AtomicBool,
    /// True if the region is ordinary memory. The lock is the standard library's, which never
    /// allocates.
    is_ordinary: RwLock<bool>,
}

/// Hold on ordinary memory: paging does not begin while it lives.
pub(crate) type OrdinaryHold<'a> = RwLockReadGuard<'a, bool>;

/// Right to begin paging. Dropped without [`begun`](BeginGuard::begun), memory stays ordinary.
pub(crate) struct BeginGuard<'a> {
    beginning: &'a Beginning,
    is_ordinary: RwLockWriteGuard<'a, bool>,
}

impl Beginning {
    /// Makes the beginning of a region, as ordinary memory or not.
    pub(crate) fn new(ordinary: bool) -> Beginning {
        Beginning {
            may_be_ordinary: AtomicBool::new(ordinary),
            catches: AtomicBool::new(!ordinary),
            is_ordinary: RwLock::new(ordinary),
        }
    }

    /// True if the region is ordinary memory now.
    pub(crate) fn is_ordinary(&self) -> bool {
        self.may_be_ordinary.load(Ordering::Acquire)
    }

    /// True if the kernel reports touches of absent pages.
    pub(crate) fn catches_faults(&self) -> bool {
        self.catches.load(Ordering::Acquire)
    }

    /// Notes that no fault can come after all: the kernel has refused to report them.
    pub(crate) fn refused(&self) {
        self.catches.store(false, Ordering::Release);
    }

    /// Keeps the region ordinary while the result lives. `None`: it is under paging.
    pub(crate) fn hold(&self) -> Option<OrdinaryHold<'_>> {
        if !self.is_ordinary() {
            return None;
        }
        let hold = self.is_ordinary.read();
        Some(hold.unwrap_or_else(PoisonError::into_inner)).filter(|hold| **hold)
    }

    /// Waits until no call relies on ordinary memory, and lets faults come. `None`: the region is
    /// under paging.
    pub(crate) fn begin(&self) -> Option<BeginGuard<'_>> {
        let hold = self.is_ordinary.write();
        let is_ordinary = hold.unwrap_or_else(PoisonError::into_inner);
        if !*is_ordinary {
            return None;
        }
        self.catches.store(true, Ordering::Release);
        Some(BeginGuard {
            beginning: self,
            is_ordinary,
        })
    }
}

impl BeginGuard<'_> {
    /// Ends the time as ordinary memory.
    pub(crate) fn begun(mut self) {
        *self.is_ordinary = false;
    }
}

impl Drop for BeginGuard<'_> {
    fn drop(&mut self) {
        let is_ordinary = *self.is_ordinary;
        let beginning = self.beginning;
        beginning.catches.store(!is_ordinary, Ordering::Release);
        (beginning.may_be_ordinary).store(is_ordinary, Ordering::Release);
    }
}
