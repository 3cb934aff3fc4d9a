//! Addresses in an arena at which allocations of `heap.rs` begin: [`Made`].
//!
//! The next allocator in line maps memory of the arena like any caller. Blocks that it cuts out of
//! its mappings are its own, so an address in the arena does not tell whose an allocation is.
//!
//! The rule it keeps: a look-up takes no lock and no system call, since it is done for each small
//! object that the next allocator frees.

use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each kernel page of an arena, by the page's number in the arena.
pub(crate) struct Made(Box<[AtomicU64]>);

impl Made {
    /// Makes the record of an arena of `pages` kernel pages, without allocations.
    pub(crate) fn new(pages: usize) -> Made {
        let words = vec![0_u64; pages.div_ceil(64)];
        // Parts that are never touched take no memory, so the zeros must not be copied.
        // SAFETY: an atomic number has the layout of a number, and nobody else has the words.
        let words = unsafe { Box::from_raw(Box::into_raw(words.into_boxed_slice()) as *mut _) };
        Made(words)
    }

    /// Records that an allocation begins in `page`.
    pub(crate) fn add(&self, page: usize) {
        let (word, bit) = self.bit(page);
        word.fetch_or(bit, Ordering::Relaxed);
    }

    /// Removes the record of an allocation that its owner is about to free or move.
    pub(crate) fn remove(&self, page: usize) {
        let (word, bit) = self.bit(page);
        word.fetch_and(!bit, Ordering::Relaxed);
    }

    /// True if an allocation begins in `page`.
    pub(crate) fn holds(&self, page: usize) -> bool {
        let (word, bit) = self.bit(page);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn bit(&self, page: usize) -> (&AtomicU64, u64) {
        (&self.0[page / 64], 1 << (page % 64))
    }
}
