//! Where in the arena allocations of `heap.rs` begin.
//!
//! An allocator that is next in line maps memory of the arena like anybody else. What it cuts out
//! of that is its own, so that an address in the arena does not tell whose an allocation is.
//!
//! The rule it keeps: asking takes no lock and no system call, since it is done for each small
//! object that such an allocator frees.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
};

use crate::{maps::KERNEL_PAGE_BYTES, state};

/// A bit for each kernel page of the arena. Null: there is no arena.
static BITS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// Once, before anything is made in an arena of `bytes`.
pub(crate) fn begin(bytes: usize) {
    // What is never touched of it takes no memory.
    let words = vec![0_u64; bytes.div_ceil(KERNEL_PAGE_BYTES).div_ceil(64)];
    let words: &'static mut [u64] = Box::leak(words.into_boxed_slice());
    BITS.store(words.as_mut_ptr().cast(), Ordering::Release);
}

/// An allocation begins at this address of the arena.
pub(crate) fn add(address: usize) {
    if let Some((word, bit)) = bit(address) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// It is about to end: who frees it or moves it owns it, so that nobody asks meanwhile.
pub(crate) fn remove(address: usize) {
    if let Some((word, bit)) = bit(address) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether an allocation begins in the page of this address; also in a child made by `fork`, of
/// what was there then.
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
