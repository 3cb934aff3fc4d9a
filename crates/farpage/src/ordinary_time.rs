//! An arena's time as ordinary memory: [`OrdinaryTime`].
//!
//! The rule: nothing here knows the arena.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::Region;

/// Time of an arena before paging begins.
pub(crate) struct OrdinaryTime {
    /// Bytes beyond which paging begins.
    most_bytes: AtomicUsize,
    begun: OnceLock<Begun>,
    /// Regions that come under paging with the arena.
    pub(crate) beside: OnceLock<Vec<Region>>,
}

/// Beginning of paging in memory that was ordinary before.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// Bytes of allocated pages that were used then.
    pub used_bytes: usize,
    /// Time that it took. Allocations waited meanwhile.
    pub took: Duration,
}

impl OrdinaryTime {
    pub(crate) fn new(budget_bytes: usize) -> OrdinaryTime {
        OrdinaryTime {
            most_bytes: AtomicUsize::new(budget_bytes),
            begun: OnceLock::new(),
            beside: OnceLock::new(),
        }
    }

    pub(crate) fn most_bytes(&self) -> usize {
        self.most_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_most_bytes(&self, bytes: usize) {
        self.most_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn note(&self, begun: Begun) {
        let _ = self.begun.set(begun);
    }

    pub(crate) fn begun(&self) -> Option<Begun> {
        self.begun.get().copied()
    }
}
