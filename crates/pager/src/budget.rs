//! Residency budget in figures: [`Budget`].
//!
//! The rule: the bytes of all memory that pages take, mapped, in flight or free, never exceed the
//! budget. Memory is reserved before it is made, and a [`BudgetReservation`] that does not become
//! memory is given back when it is dropped. Nothing here holds a frame or wakes a thread.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use farpage_vm::ReservedRoom;

/// Number of frames that read-ahead leaves to demand: more than all threads of a large machine
/// fault on at once.
const DEMAND_RESERVE_PAGES: u64 = 16;

/// Floors of the budget that are not lent: fills and evictions work with as much.
const LEFT_FLOORS: u64 = 4;

/// Residency budget, and the memory that pages take of it.
#[derive(Default)]
pub(crate) struct Budget {
    /// Upper bound of the budget: its size at the start.
    most: u64,
    /// Low and high mark, as fractions of the budget.
    fractions: (f64, f64),
    /// Budget as it was set, before anything was lent.
    set: AtomicU64,
    /// Bytes that memory beside the pages takes.
    lent: AtomicU64,
    bytes: AtomicU64,
    high: AtomicU64,
    low: AtomicU64,
    /// Two pages of the largest size. One instruction may touch two, so evictors leave that much
    /// alone unless a fill waits for a frame.
    floor: AtomicU64,
    /// Bytes of memory in existence.
    made: CachePadded<AtomicU64>,
    /// Highest value of `made`.
    peak: AtomicU64,
    /// Bytes that are mapped or in flight: not free.
    used: CachePadded<AtomicU64>,
    /// Bytes of `used` whose pages are on their way out.
    leaving: CachePadded<AtomicU64>,
    /// Bytes that the program has pinned.
    pinned: AtomicU64,
    /// Bytes of pages that fillers hold back unmapped.
    held_back: AtomicU64,
    /// Bytes of the largest demand fill that found no frame and waits.
    starving: AtomicU64,
}

impl Budget {
    /// Makes a budget. The marks are fractions of `bytes` in (0, 1], `low` below `high`.
    pub(crate) fn new(bytes: u64, low: f64, high: f64) -> Budget {
        let budget = Budget {
            most: bytes,
            fractions: (low, high),
            set: AtomicU64::new(bytes),
            ..Budget::default()
        };
        budget.set(bytes);
        budget
    }

    /// Changes the budget, at most to its first size. While memory exceeds it, none is made, and
    /// free frames go back to the kernel ([`exceeded_by`](Self::exceeded_by)).
    pub(crate) fn set(&self, bytes: u64) {
        self.set.store(bytes.min(self.most), Ordering::SeqCst);
        self.apply();
    }

    /// Lends `bytes` of the budget, in place of what was lent before, but at most half of it, and
    /// nothing that pinned pages and fills need: the budget is smaller by that.
    pub(crate) fn lend(&self, bytes: u64) {
        self.lent.store(bytes, Ordering::SeqCst);
        self.apply();
    }

    /// Returns the budget as it was set, before anything was lent.
    pub(crate) fn before_loans(&self) -> u64 {
        self.set.load(Ordering::Relaxed)
    }

    /// Makes the budget what was set without what is lent.
    fn apply(&self) {
        let wanted = || {
            let set = self.set.load(Ordering::SeqCst);
            let needed = self.pinned() + LEFT_FLOORS * self.floor.load(Ordering::Relaxed);
            let left = needed.clamp(set / 2, set);
            set - self.lent.load(Ordering::SeqCst).min(set - left)
        };
        let mut bytes = wanted();
        loop {
            self.apply_marks(bytes);
            // Another thread may have set or lent meanwhile, and applied that before this one.
            let now = wanted();
            if now == bytes {
                return;
            }
            bytes = now;
        }
    }

    fn apply_marks(&self, bytes: u64) {
        let mark = |fraction: f64| ((bytes as f64 * fraction) as u64).min(bytes);
        let (low, high) = self.fractions;
        self.low.store(mark(low), Ordering::Relaxed);
        self.high.store(mark(high), Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::SeqCst);
    }

    /// Returns the upper bound of the budget.
    pub(crate) fn most(&self) -> u64 {
        self.most
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn high(&self) -> u64 {
        self.high.load(Ordering::Relaxed)
    }

    fn low(&self) -> u64 {
        self.low.load(Ordering::Relaxed)
    }

    /// Returns the bytes by which existing memory exceeds a budget that was made smaller.
    pub(crate) fn exceeded_by(&self) -> u64 {
        let made = self.made.load(Ordering::Relaxed);
        made.saturating_sub(self.bytes())
    }

    /// Raises the floor to two pages of `page_bytes`, which a new region has.
    pub(crate) fn expect(&self, page_bytes: usize) {
        let floor = 2 * page_bytes as u64;
        self.floor.fetch_max(floor, Ordering::Relaxed);
    }

    /// Returns the highest number of bytes that pages took at any time.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Returns the bytes of pages that are mapped or in flight now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the bytes that more pages may have.
    pub(crate) fn room(&self) -> u64 {
        self.bytes().saturating_sub(self.used())
    }

    /// Returns the number of pages that may be brought in ahead of need.
    pub(crate) fn room_for_prefetch(&self, page_bytes: usize) -> usize {
        let page = page_bytes as u64;
        // Half of what evictors keep free belongs to demand, or prefetching would starve it.
        let reserve =
            (self.bytes().saturating_sub(self.low()) / 2).min(DEMAND_RESERVE_PAGES * page);
        (self.room().saturating_sub(reserve) / page) as usize
    }

    /// True if `bytes` more can be used while evictors still have nothing to do.
    pub(crate) fn is_ample(&self, bytes: usize) -> bool {
        self.used() + bytes as u64 <= self.low()
    }

    /// Returns the bytes of free memory: made, and not used.
    pub(crate) fn free(&self) -> u64 {
        let made = self.made.load(Ordering::Relaxed);
        made.saturating_sub(self.used())
    }

    /// Reserves memory for as many pages as the budget allows, at most `pages`. `None`: none.
    pub(crate) fn reserve(&self, page_bytes: usize, pages: usize) -> Option<BudgetReservation<'_>> {
        let page = page_bytes as u64;
        let mut affordable = 0;
        let made = self
            .made
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |made| {
                // The budget may change between two rounds.
                affordable = (pages as u64).min(self.bytes().saturating_sub(made) / page);
                (affordable > 0).then_some(made + affordable * page)
            });
        made.ok()?;
        let pages = affordable as usize;
        self.note_peak();
        Some(BudgetReservation {
            budget: self,
            page_bytes,
            pages,
        })
    }

    /// Counts `bytes` of pages that come under the budget as made, although some of them may turn
    /// out not to be there. Beside other memory they may exceed the budget: see
    /// [`exceeded_by`](Self::exceeded_by).
    pub(crate) fn adopt(&self, bytes: u64) {
        self.made.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes the memory that exists now, if it is the most so far.
    pub(crate) fn note_peak(&self) {
        let made = self.made.load(Ordering::Relaxed);
        self.peak.fetch_max(made, Ordering::Relaxed);
    }

    /// Counts `bytes` of a free frame that was given back to the kernel.
    pub(crate) fn unmake(&self, bytes: u64) {
        self.made.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` of a free frame as used.
    pub(crate) fn begin_use(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` of a used frame as free.
    pub(crate) fn end_use(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Counts used pages that have gone back to the kernel: the program gave them back itself, or
    /// their bytes were copied before.
    pub(crate) fn lose(&self, bytes: usize) {
        self.unmake(bytes as u64);
        self.end_use(bytes as u64);
    }

    /// Notes that a demand fill of `bytes` found no frame.
    pub(crate) fn starve(&self, bytes: usize) {
        self.starving.fetch_max(bytes as u64, Ordering::SeqCst);
    }

    /// Notes that fills which found no frame have one now. A fill that still starves calls
    /// [`starve`](Self::starve) when it tries again.
    pub(crate) fn end_starving(&self) {
        self.starving.store(0, Ordering::SeqCst);
    }

    /// True if a demand fill waits for a frame.
    pub(crate) fn is_starving(&self) -> bool {
        self.starving.load(Ordering::SeqCst) != 0
    }

    /// Sets `bytes` aside for pinned pages. `false`: too little would be left for all others.
    pub(crate) fn pin(&self, bytes: u64) -> bool {
        let most = self.pinned_max();
        self.pinned
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pinned| {
                pinned.checked_add(bytes).filter(|&pinned| pinned <= most)
            })
            .is_ok()
    }

    /// Gives back `bytes` that were set aside by [`pin`](Self::pin).
    pub(crate) fn unpin(&self, bytes: u64) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes that are set aside for pinned pages.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Returns the bytes that can be pinned. Fills and evictions need room to work in, and evictors
    /// must be able to reach their low mark.
    pub(crate) fn pinned_max(&self) -> u64 {
        let floor = self.floor.load(Ordering::Relaxed);
        self.low().min(self.bytes().saturating_sub(2 * floor))
    }

    /// Counts `bytes` of pages that begin to leave.
    pub(crate) fn begin_leaving(&self, bytes: usize) {
        self.leaving.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Ends the count of `bytes` as leaving: the pages have left, stay after all, or take too long.
    pub(crate) fn end_leaving(&self, bytes: usize) {
        self.leaving.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn leaving(&self) -> u64 {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Counts `bytes` that fillers hold back, complete but unmapped.
    pub(crate) fn begin_holding_back(&self, bytes: usize) {
        self.held_back.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Ends the count of `bytes` as held back: they are mapped.
    pub(crate) fn end_holding_back(&self, bytes: usize) {
        self.held_back.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// True if frames that fillers hold back are needed: some fill finds no frame.
    pub(crate) fn wants_what_is_held_back(&self) -> bool {
        self.is_starving() && self.held_back.load(Ordering::Relaxed) > 0
    }

    /// True if more is used than a mark allows. The first of `steps` marks is the high water mark;
    /// the others divide the bytes between it and the budget. While a fill waits for a frame, all
    /// marks count as passed.
    pub(crate) fn is_above_mark(&self, step: usize, steps: usize) -> bool {
        let high = self.high();
        let mark = high + self.bytes().saturating_sub(high) / steps as u64 * step as u64;
        self.used() > mark.max(self.untouchable()) || self.is_starving()
    }

    /// True if threads that serve their own faults take pages out: half way between the marks, so
    /// that evictors are called only where these threads do not keep up.
    pub(crate) fn is_tight(&self) -> bool {
        let low = self.low();
        let mark = low + self.high().saturating_sub(low) / 2;
        self.staying() > mark.max(self.untouchable()) || self.is_starving() && self.excess() > 0
    }

    /// Returns the bytes that must still begin to leave for the low mark to be reached.
    pub(crate) fn excess(&self) -> u64 {
        let starving = self.starving.load(Ordering::SeqCst).min(self.bytes());
        let aim = self.low().max(self.untouchable());
        let aim = aim.min(self.bytes().saturating_sub(starving));
        self.staying().saturating_sub(aim)
    }

    /// Returns the number of pages that must still begin to leave for the low mark to be reached.
    pub(crate) fn excess_pages(&self, page_bytes: usize) -> usize {
        self.excess().div_ceil(page_bytes as u64) as usize
    }

    /// Returns the bytes that are used and not on their way out.
    fn staying(&self) -> u64 {
        let leaving = self.leaving.load(Ordering::Relaxed);
        self.used().saturating_sub(leaving)
    }

    /// Returns the bytes that evictors leave alone: those that they cannot take out, and beside
    /// these the two pages that one instruction may need.
    fn untouchable(&self) -> u64 {
        self.pinned() + self.held_back.load(Ordering::Relaxed) + self.floor.load(Ordering::Relaxed)
    }
}

/// Memory that is about to be made. Given back when dropped, unless [`ReservedRoom::use_up`] was
/// called.
#[must_use = "what is not made is given back when this is dropped"]
pub(crate) struct BudgetReservation<'a> {
    budget: &'a Budget,
    page_bytes: usize,
    pages: usize,
}

impl BudgetReservation<'_> {
    /// Returns the number of pages that may be made.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Gives back all but `pages`.
    pub(crate) fn keep(&mut self, pages: usize) {
        let rest = (self.pages - pages) * self.page_bytes;
        self.budget.unmake(rest as u64);
        self.pages = pages;
    }
}

impl ReservedRoom for BudgetReservation<'_> {
    /// Notes that all of the memory has been made.
    fn use_up(&mut self) {
        self.pages = 0;
    }
}

impl Drop for BudgetReservation<'_> {
    fn drop(&mut self) {
        self.keep(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = 4096;

    #[test]
    fn half_of_a_budget_can_be_lent_but_no_pinned_pages() {
        let budget = Budget::new(100 << 20, 0.5, 0.75);
        budget.lend(10 << 20);
        assert_eq!(budget.bytes(), 90 << 20);
        budget.set(60 << 20);
        assert_eq!(
            (budget.bytes(), budget.before_loans()),
            (50 << 20, 60 << 20)
        );
        budget.lend(u64::MAX);
        assert_eq!(budget.bytes(), 30 << 20);
        budget.lend(0);
        budget.set(u64::MAX);
        assert_eq!(budget.bytes(), 100 << 20);
        budget.expect(2 << 20);
        assert!(budget.pin(50 << 20));
        budget.lend(u64::MAX);
        assert_eq!(budget.bytes(), (50 + 16) << 20);
        budget.lend(0);
        assert_eq!(budget.bytes(), 100 << 20);
    }

    #[test]
    fn a_reservation_becomes_memory_or_is_given_back() {
        let budget = Budget::new(8 * PAGE_BYTES as u64, 0.5, 0.75);
        let mut first = budget.reserve(PAGE_BYTES, 6).expect("there is room");
        assert_eq!(first.pages(), 6);
        let rest = budget.reserve(PAGE_BYTES, 6).expect("for two");
        assert_eq!(rest.pages(), 2);
        assert!(budget.reserve(PAGE_BYTES, 1).is_none());
        drop(rest);
        first.keep(4);
        first.use_up();
        let mut rest = budget.reserve(PAGE_BYTES, 8).expect("for four");
        assert_eq!(rest.pages(), 4);
        rest.use_up();
        assert!(budget.reserve(PAGE_BYTES, 1).is_none());
        assert_eq!(budget.peak(), budget.bytes());
    }
}
