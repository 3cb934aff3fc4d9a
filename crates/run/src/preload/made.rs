//! The addresses in the arena at which allocations of `heap.rs` begin.
//!
//! The next allocator in line maps memory of the arena like any caller. Blocks that it cuts out of
//! its mappings are its own, so an address in the arena does not tell whose an allocation is.
//!
//! The rule it keeps: a look-up takes no lock and no system call, since it is done for each small
//! object that the next allocator frees.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
};

use crate::state::{self, KERNEL_PAGE_BYTES};

/// A bit for each kernel page of the arena. Null before the arena exists.
static BITS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// Makes the bits. Called once, before the first allocation in an arena of `bytes` bytes.
pub(crate) fn begin(bytes: usize) {
    // Parts that are never touched take no memory.
    let words = vec![0_u64; bytes.div_ceil(KERNEL_PAGE_BYTES).div_ceil(64)];
    let words: &'static mut [u64] = Box::leak(words.into_boxed_slice());
    BITS.store(words.as_mut_ptr().cast(), Ordering::Release);
}

/// Records that an allocation begins at `address` in the arena.
pub(crate) fn add(address: usize) {
    if let Some((word, bit)) = bit(address) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Removes the record of an allocation that its owner is about to free or move.
pub(crate) fn remove(address: usize) {
    if let Some((word, bit)) = bit(address) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// True if an allocation begins in the page of `address`. In a child made by `fork`: as it was at
/// the fork.
pub(crate) fn holds(address: usize) -> bool {
    bit(address).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

fn bit(address: usize) -> Option<(&'static AtomicU64, u64)> {
    let page = state::offset(address)? / KERNEL_PAGE_BYTES;
    // SAFETY: as many words as the arena has pages for, never given back; made by `begin` before
    // there are addresses of the arena.
    let word = unsafe { &*BITS.load(Ordering::Acquire).add(page / 64) };
    Some((word, 1 << (page % 64)))
}
