//! System calls of the program with in-thread faults ([`call`]), and memory that is brought in for
//! them by guesses.
//!
//! The rule it keeps: a guess is a small part of the budget, and is brought in without a load. What
//! is not allocated, protected or lost is passed over. Nothing stays pinned.

use std::{
    cell::Cell,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use farpage::Region;
use farpage_vm::{
    calls::{self, Guesses},
    sigbus::on_stock_stack,
};
use libc::c_long;

use crate::{
    Inside,
    state::{self, KERNEL_PAGE_BYTES, is_remote},
};

/// Part of the budget that is guessed before a repetition of a call, and its bound.
const BUDGET_PART: u64 = 8;
const GUESSED_MAX: u64 = 256 << 10;

/// Bytes that are guessed before a repetition of a call. Relaxed: 0 until [`begin`] has run.
static MAX_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Allows guesses, as the budget says. Called when the arena has been made.
pub(crate) fn begin() {
    let budget = state::runtime().map_or(0, |runtime| runtime.stats().pager.budget_bytes);
    let bytes = (budget / BUDGET_PART).min(GUESSED_MAX);
    MAX_BYTES.store(bytes as usize, Ordering::Relaxed);
}

/// Brings in the page at an address, if it is allocated, can be read, and is absent. Returns false
/// if its server does not answer.
fn fetch(at: usize) -> bool {
    let Some(state) = state::get() else {
        return true;
    };
    let is_absent = || is_remote(at, 1) && calls::is_absent(at);
    let bring = |region: &Region, offset: usize| {
        let _inside = Inside::enter();
        on_stock_stack(|| region.prefetch_now(offset..offset + 1)).is_ok()
    };
    if let Some((region, range)) = state::static_region(at as *const _, 1) {
        return !is_absent() || bring(region, range.start);
    }
    match state::allocated(at as *const _, 1) {
        Some((_, _, true)) if is_absent() => {
            bring(state.arena.region(), state.offsets(&(at..at + 1)).start)
        }
        _ => true,
    }
}

/// Calls `work` with the guesses of this process. A child made by `fork` has none: its faults are
/// its parent's.
fn with_guesses(work: impl FnOnce(Guesses<'_>) -> isize) -> isize {
    if state::get().is_none() {
        return work(Guesses::NONE);
    }
    // After a server that does not answer no other page is waited for.
    let answers = Cell::new(true);
    let fetch = |at: usize, bytes: usize| {
        let first = at & !(KERNEL_PAGE_BYTES - 1);
        for page in (first..at.saturating_add(bytes)).step_by(KERNEL_PAGE_BYTES) {
            if answers.get() {
                answers.set(fetch(page));
            }
        }
    };
    work(Guesses {
        fetch: &fetch,
        max_bytes: MAX_BYTES.load(Ordering::Relaxed),
    })
}

/// True if some of `bytes` bytes at an address are remote, and the first is allocated: freed memory
/// reads as zeros, where the kernel says `EFAULT`.
fn is_there(at: usize, bytes: usize) -> bool {
    let is_freed = || {
        let pointer = ptr::without_provenance(at);
        state::ours(pointer, 1).is_some()
            && matches!(state::allocated(pointer, 1), Some((_, _, false)))
    };
    is_remote(at, bytes) && !is_freed()
}

/// Returns what tells remote memory of the call `number`.
fn predicate(number: c_long) -> calls::IsRemote<'static> {
    match number {
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => &is_there,
        _ => &is_remote,
    }
}

/// Makes a system call, whose memory may be remote.
///
/// # Safety
/// As [`calls::call`].
pub(crate) unsafe fn call(number: c_long, args: calls::Arguments) -> isize {
    // SAFETY: the caller's promise.
    with_guesses(|guesses| unsafe { calls::call(number, args, predicate(number), guesses) })
}

/// Goes on with a system call that the kernel has answered with `first`.
///
/// # Safety
/// As [`calls::complete`].
pub(crate) unsafe fn complete(number: c_long, args: calls::Arguments, first: isize) -> isize {
    // SAFETY: the caller's promise.
    with_guesses(|guesses| unsafe {
        calls::complete(number, args, first, predicate(number), guesses)
    })
}
