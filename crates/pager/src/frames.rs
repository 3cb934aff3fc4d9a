//! The frames that circulate under the budget: [`FrameAllocator`].
//!
//! A frame is made once and then circulates: a fill takes a free one and maps it, an eviction
//! brings it back. (Where pages are copied instead of moved, the mapped copy counts as a frame
//! does.)
//!
//! The rule: a caller that takes or gives back a frame need not think of others. Evictors are
//! called when little is left, and fillers when one of them waits for a frame that was given back.
//! Fillers and evictors decide which page deserves a frame.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

use crossbeam_utils::CachePadded;
use farpage_fabric::log::later;
use farpage_vm::{AddressSpace, Batch, Frame, ReservedRoom, SCATTERED_PAGES_MAX};

use crate::{
    budget::{Budget, BudgetReservation},
    doors::Doors,
    mapper::Mapper,
    run::{keep_first, pages_in},
};

/// Number of page sizes: 4 KiB to 2 MiB in powers of two.
const SIZES: usize = 10;
/// Smallest page size, as a power of two.
const SMALLEST_SHIFT: u32 = 12;

/// All frames of a runtime.
pub(crate) struct FrameAllocator<A: AddressSpace> {
    mapper: Arc<Mapper<A>>,
    doors: Arc<Doors>,
    budget: Budget,
    free: [CachePadded<Mutex<FreeLists<A::Frame>>>; SIZES],
    failed_before: AtomicBool,
}

impl<A: AddressSpace> FrameAllocator<A> {
    pub(crate) fn new(mapper: Arc<Mapper<A>>, doors: Arc<Doors>, budget: Budget) -> Self {
        FrameAllocator {
            mapper,
            doors,
            budget,
            free: std::array::from_fn(|_| CachePadded::new(Mutex::new(FreeLists::default()))),
            failed_before: AtomicBool::new(false),
        }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Prepares for pages of `page_bytes`: reserves space for their free frames.
    pub(crate) fn expect(&self, page_bytes: usize) {
        self.budget.expect(page_bytes);
        self.free(page_bytes)
            .reserve(self.budget.most() as usize / page_bytes);
    }

    /// Takes a frame for a page that a thread waits for, and for up to `more` pages next to it, as
    /// far as read-ahead may have them. `None`: the budget is used up; evictors have been called.
    pub(crate) fn for_demand(&self, page_bytes: usize, more: usize) -> Option<A::Frame> {
        let more = self.budget.room_for_prefetch(page_bytes).min(more);
        let frame = self.take(page_bytes, 1 + more);
        if frame.is_none() {
            self.budget.starve(page_bytes);
        }
        self.doors.call_evictors(&self.budget);
        frame
    }

    /// Takes a frame for up to `pages` pages that may be wanted soon, only while it leaves room for
    /// demand. `None`: it would not; evictors have been called.
    pub(crate) fn for_prefetch(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        let pages = self.budget.room_for_prefetch(page_bytes).min(pages);
        let frame = (pages > 0).then(|| self.take(page_bytes, pages)).flatten();
        self.doors.call_evictors(&self.budget);
        frame
    }

    /// Takes a frame of one page to work with. `None`: there is none, unless a frame of another
    /// size is given up.
    pub(crate) fn spare(&self, page_bytes: usize) -> Option<A::Frame> {
        // A statement of its own, so that the lock is released.
        let free = self.free(page_bytes).take(page_bytes, 1, false);
        let frame = free.or_else(|| self.make(page_bytes, 1))?;
        self.budget.begin_use(page_bytes as u64);
        Some(frame)
    }

    /// Takes back a frame, which is free from now on.
    pub(crate) fn release(&self, frame: A::Frame, page_bytes: usize) {
        let bytes = frame.as_ref().len() as u64;
        self.put(frame, page_bytes);
        self.budget.end_use(bytes);
        self.tell_who_starves();
    }

    /// Keeps a free frame, unless the budget has become smaller.
    fn put(&self, frame: A::Frame, page_bytes: usize) {
        if self.budget.exceeded_by() == 0 {
            return self.free(page_bytes).put(frame, page_bytes);
        }
        let bytes = frame.as_ref().len() as u64;
        drop(frame);
        self.budget.unmake(bytes);
    }

    /// Changes the budget. Free frames beyond it are given up; evictors see to the rest. Returns
    /// the number of bytes that exceed it for now.
    pub(crate) fn set_budget(&self, bytes: u64) -> u64 {
        self.budget.set(bytes);
        self.follow_budget()
    }

    /// Lends `bytes` of the budget. Free frames beyond the rest are given up; evictors see to the
    /// pages.
    pub(crate) fn lend(&self, bytes: u64) {
        self.budget.lend(bytes);
        self.follow_budget();
    }

    /// Gives up free frames beyond the budget, and calls evictors. Returns the number of bytes that
    /// exceed it for now.
    fn follow_budget(&self) -> u64 {
        self.give_up_excess();
        self.tell_who_starves();
        self.budget.exceeded_by()
    }

    /// Reserves room for copies of `pages` pages to be mapped beside their frame. With
    /// `in_place_of_frames`, free frames are given up if need be. `None`: the budget has no room.
    pub(crate) fn for_copy(
        &self,
        page_bytes: usize,
        pages: usize,
        in_place_of_frames: bool,
    ) -> Option<BudgetReservation<'_>> {
        let reserve = || {
            let room = self.budget.reserve(page_bytes, pages);
            room.filter(|room| room.pages() == pages)
        };
        let mut room = reserve();
        while room.is_none() && in_place_of_frames && self.give_up(page_bytes, pages) {
            room = reserve();
        }
        room
    }

    /// Counts `bytes` of pages that come under the budget, as [`Budget::adopt`] does. Free frames
    /// beyond the budget are given up; evictors see to the rest.
    pub(crate) fn adopt(&self, bytes: u64) {
        self.budget.adopt(bytes);
        self.give_up_excess();
    }

    /// Gives up free frames while memory exceeds the budget, and calls evictors.
    fn give_up_excess(&self) {
        let sizes = (0..SIZES).map(|i| 1 << (i as u32 + SMALLEST_SHIFT));
        for size in sizes {
            while self.budget.exceeded_by() > 0 && self.give_up(size, 1) {}
        }
        self.doors.call_evictors(&self.budget);
    }

    /// Counts used pages that have gone back to the kernel.
    pub(crate) fn lose(&self, bytes: usize) {
        self.budget.lose(bytes);
        self.tell_who_starves();
    }

    /// Takes back the frame of a run whose copy, for which room was reserved, is mapped: the copy
    /// counts as used in the frame's place.
    pub(crate) fn copied(&self, frame: A::Frame, page_bytes: usize) {
        self.put(frame, page_bytes);
        self.tell_who_starves();
    }

    fn tell_who_starves(&self) {
        if self.budget.is_starving() {
            self.doors.wake_fillers();
        }
    }

    /// Takes a frame of at least one page and at most `pages`.
    fn take(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        // Each a statement of its own, so that its lock is released: two fillers of different sizes
        // would wait for each other.
        let mut frame = self.free(page_bytes).take(page_bytes, pages, false);
        if frame.is_none() {
            frame = self.make(page_bytes, pages);
        }
        if frame.is_none() {
            frame = self.free(page_bytes).take(page_bytes, pages, true);
        }
        while frame.is_none() && self.give_up_other(page_bytes) {
            frame = self.make(page_bytes, pages);
        }
        if let Some(frame) = &frame {
            self.budget.begin_use(frame.as_ref().len() as u64);
        }
        frame
    }

    /// Gives up a free page of another size. Returns whether there was one.
    fn give_up_other(&self, page_bytes: usize) -> bool {
        let sizes = (0..SIZES).map(|i| 1 << (i as u32 + SMALLEST_SHIFT));
        let mut others = sizes.filter(|&size| size != page_bytes);
        others.any(|size| self.give_up(size, 1))
    }

    /// Gives up a free frame of at most `pages` pages. Returns whether there was one.
    fn give_up(&self, page_bytes: usize, pages: usize) -> bool {
        // A statement of its own, so that the lock is released.
        let victim = self.free(page_bytes).take(page_bytes, pages, true);
        let Some(victim) = victim else {
            return false;
        };
        let bytes = victim.as_ref().len() as u64;
        drop(victim);
        self.budget.unmake(bytes);
        true
    }

    /// Gives up free pages of this size together: as many as share one interruption, at most half
    /// of the free ones, and none if that is fewer than `at_least`. Returns how many.
    pub(crate) fn give_up_together(&self, page_bytes: usize, at_least: usize) -> usize {
        let most = (self.budget.free() as usize / page_bytes / 2).min(SCATTERED_PAGES_MAX);
        if most < at_least {
            return 0;
        }
        let mut frames = Batch::new();
        let mut free = self.free(page_bytes);
        while frames.len() < most
            && let Some(frame) = free.take(page_bytes, 1, false)
        {
            frames.push(frame);
        }
        drop(free);
        let pages = frames.len();
        self.mapper.drop_frames(frames);
        self.budget.unmake((pages * page_bytes) as u64);
        pages
    }

    /// Makes a frame of as many pages as the budget and the address space allow, at most `pages`.
    fn make(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        let mut room = self.budget.reserve(page_bytes, pages)?;
        loop {
            let error = match self.mapper.new_frame(page_bytes, room.pages()) {
                Ok(frame) => {
                    room.use_up();
                    return Some(frame);
                }
                Err(error) => error,
            };
            // A long frame may find no addresses next to each other where a shorter one does.
            room.keep(room.pages() / 2);
            if room.pages() == 0 {
                if !self.failed_before.swap(true, Ordering::Relaxed) {
                    later(move || {
                        tracing::error!(%error, page_bytes, "no memory for a frame although the budget allows it; lower the budget");
                    });
                }
                return None;
            }
        }
    }

    /// Locks the free frames of one size, by a lock that never allocates: for signal handlers.
    fn free(&self, page_bytes: usize) -> MutexGuard<'_, FreeLists<A::Frame>> {
        self.free[(page_bytes.trailing_zeros() - SMALLEST_SHIFT) as usize]
            .lock()
            .expect("a worker that panics ends the process")
    }
}

/// Number of length classes. Frames are kept by the power of two that their number of pages
/// reaches: runs of up to 1023 pages.
const LENGTHS: usize = 10;

/// Free frames of one page size: a stack for each length. Putting a frame back allocates nothing,
/// since a signal handler may do so: room for all frames that the budget allows is reserved before.
struct FreeLists<F>([Vec<F>; LENGTHS]);

impl<F> Default for FreeLists<F> {
    fn default() -> Self {
        FreeLists(Default::default())
    }
}

impl<F: Frame> FreeLists<F> {
    /// Reserves space for `pages` pages in whatever lengths. Reserved space alone takes no memory.
    fn reserve(&mut self, pages: usize) {
        for (class, frames) in self.0.iter_mut().enumerate() {
            frames.reserve((pages >> class).saturating_sub(frames.len()));
        }
    }

    /// Takes a frame of `pages` pages, cut from a longer one if need be. If there is none and a
    /// `shorter` one will do, takes the longest there is.
    pub(crate) fn take(&mut self, page_bytes: usize, pages: usize, shorter: bool) -> Option<F> {
        let class = pages.ilog2() as usize;
        let long_enough = |frame: &F| pages_in(frame, page_bytes) >= pages;
        // The top of the stack was used last and is warm.
        let fits = (class..LENGTHS).find(|&at| self.0[at].last().is_some_and(long_enough));
        let any = || (0..=class).rev().find(|&at| !self.0[at].is_empty());
        let mut frame = self.0[fits.or_else(|| shorter.then(any).flatten())?].pop()?;
        if let Some(rest) = keep_first(&mut frame, pages, page_bytes) {
            self.put(rest, page_bytes);
        }
        Some(frame)
    }

    pub(crate) fn put(&mut self, frame: F, page_bytes: usize) {
        self.0[pages_in(&frame, page_bytes).ilog2() as usize].push(frame);
    }
}

#[cfg(test)]
mod tests {
    use farpage_vm::{SimOptions, SimSpace};

    use super::*;
    use crate::run::pages_in;

    #[test]
    fn where_no_room_is_left_for_a_run_shorter_ones_use_the_whole_budget() {
        const PAGE_BYTES: usize = 4096;
        for frame_pages_max in [1, 3] {
            let space = Arc::new(SimSpace::new(SimOptions {
                frame_pages_max,
                ..SimOptions::default()
            }));
            let doors =
                Doors::new(Vec::new(), Vec::new(), true).expect("a descriptor is to be had");
            let budget = Budget::new(64 * PAGE_BYTES as u64, 0.9, 0.95);
            let frames = FrameAllocator::new(Arc::new(Mapper::new(space)), Arc::new(doors), budget);
            frames.expect(PAGE_BYTES);
            let mut taken = Vec::new();
            while let Some(frame) = frames.for_demand(PAGE_BYTES, 15) {
                assert!(pages_in(&frame, PAGE_BYTES) <= frame_pages_max);
                taken.push(frame);
            }
            let bytes: usize = taken.iter().map(|frame| frame.as_ref().len()).sum();
            assert_eq!(bytes, 64 * PAGE_BYTES);
            let budget = frames.budget();
            assert_eq!(
                (budget.used(), budget.peak()),
                (budget.bytes(), budget.bytes())
            );
        }
    }
}
