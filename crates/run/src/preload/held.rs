//! Calls of the program that find the memory they lead to, with in-thread faults ([`call`]).
//!
//! The rule it keeps: pages that a call needs at once are pinned until it has returned, as far as
//! the budget allows. Memory that is ordinary stays so: the kernel finds all of it.
//!
//! A handler of the program that leaves such a call by `longjmp` leaves its pages pinned.

use std::{cell::RefCell, ops::Range};

use farpage::Region;
use farpage_vm::{calls, sigbus::on_stock_stack};
use libc::c_long;

use crate::{
    Inside,
    state::{self, State, is_remote},
};

/// Pinned pages of a call, by their region and offset. Unpinned when dropped.
#[derive(Default)]
pub(crate) struct Held(RefCell<Vec<(&'static Region, Range<usize>)>>);

impl Held {
    /// Pins the pages of `bytes` bytes at an address, up to the first that cannot be.
    pub(crate) fn hold(&self, at: usize, bytes: usize) {
        let Some(state) = state::get() else {
            // The parent of a child made by `fork` brings pages in.
            return calls::bring_in(at, bytes, &is_remote);
        };
        if state.arena.is_ordinary() {
            return;
        }
        if let Some((region, range)) = region(state, at, bytes) {
            let _inside = Inside::enter();
            let page_bytes = region.page_bytes();
            let first = range.start / page_bytes * page_bytes;
            let end = range.end.next_multiple_of(page_bytes).min(region.len());
            on_stock_stack(|| self.pin(region, first..end));
        }
    }

    fn pin(&self, region: &'static Region, pages: Range<usize>) {
        let mut held = self.0.borrow_mut();
        let is_new = |page: usize| !held.iter().any(|(_, held)| held.contains(&page));
        let page_bytes = region.page_bytes();
        let all_new = pages.clone().step_by(page_bytes).all(is_new);
        if all_new && region.pin(pages.clone()).is_ok() {
            return held.push((region, pages));
        }
        for page in pages.step_by(page_bytes) {
            let page = page..region.len().min(page + page_bytes);
            if held.iter().any(|(_, held)| held.contains(&page.start)) {
                continue;
            }
            if region.pin(page.clone()).is_err() {
                return;
            }
            held.push((region, page));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let held = self.0.take();
        if held.is_empty() {
            return;
        }
        let _inside = Inside::enter();
        for (region, pages) in held {
            region.unpin(pages);
        }
    }
}

/// Returns the region that memory at an address belongs to, and its place there.
fn region(
    state: &'static State,
    at: usize,
    bytes: usize,
) -> Option<(&'static Region, Range<usize>)> {
    let addresses = state.arena.addresses();
    if addresses.contains(&at) {
        let end = at.saturating_add(bytes).min(addresses.end);
        return Some((state.arena.region(), state.offsets(&(at..end))));
    }
    state::static_region(at as *const _, bytes)
}

/// Makes a system call, whose memory may be remote.
///
/// # Safety
/// As [`calls::call`].
pub(crate) unsafe fn call(number: c_long, args: calls::Arguments) -> isize {
    let held = Held::default();
    // SAFETY: the caller's promise.
    unsafe { calls::call(number, args, &is_remote, &|at, bytes| held.hold(at, bytes)) }
}
