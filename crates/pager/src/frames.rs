//! The residency budget and the frames that circulate under it: [`Frames`].
//!
//! The rule: the bytes of all frames in existence, free, in flight or mapped in a region, never exceed the budget. A frame is
//! made once and then circulates: a fill takes a free one and maps it, an eviction brings it back. (Where pages are copied instead of moved, see
//! `scatter.rs`, the mapped copy counts as a frame does.) Which page deserves a frame is left to fillers and evictors.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crossbeam_utils::CachePadded;
use farpage_vm::{AddressSpace, Frame};

use crate::run::{keep_first, pages_in};

/// 4 KiB to 2 MiB in powers of two.
const SIZES: usize = 10;
/// The smallest page size, as a power of two.
const SMALLEST_SHIFT: u32 = 12;

/// Free frames are kept by the power of two that their number of pages reaches: runs of up to 1023 pages.
const LENGTHS: usize = 10;

/// Frames that read-ahead leaves to demand: more than all threads of a large machine fault on at once.
const DEMAND_RESERVE_PAGES: u64 = 16;

/// All frames of a runtime.
pub(crate) struct Frames<A: AddressSpace> {
    space: Arc<A>,
    budget: u64,
    high: u64,
    low: u64,
    /// Two pages of the largest size: one instruction may touch two, so evictors leave that much alone unless a fill waits for a frame.
    floor: AtomicU64,
    /// Bytes of frames in existence.
    made: CachePadded<AtomicU64>,
    /// Highest value of `made`.
    peak: AtomicU64,
    /// Bytes of frames that are mapped or in flight, that is: not free.
    used: CachePadded<AtomicU64>,
    /// Of these, bytes of pages on their way out.
    leaving: CachePadded<AtomicU64>,
    /// Bytes that the program has pinned.
    pinned: AtomicU64,
    /// Bytes of pages that fillers hold back unmapped.
    held: AtomicU64,
    /// Bytes of the largest demand fill that found no frame and waits.
    starving: AtomicU64,
    free: [CachePadded<Mutex<Free<A::Frame>>>; SIZES],
    failed_before: AtomicBool,
}

impl<A: AddressSpace> Frames<A> {
    /// Marks are fractions of the budget, in (0, 1], low below high.
    pub(crate) fn new(space: Arc<A>, budget: u64, low: f64, high: f64) -> Self {
        let mark = |fraction: f64| ((budget as f64 * fraction) as u64).min(budget);
        Frames {
            space,
            budget,
            high: mark(high),
            low: mark(low),
            floor: AtomicU64::new(0),
            made: CachePadded::default(),
            peak: AtomicU64::new(0),
            used: CachePadded::default(),
            leaving: CachePadded::default(),
            pinned: AtomicU64::new(0),
            held: AtomicU64::new(0),
            starving: AtomicU64::new(0),
            free: std::array::from_fn(|_| CachePadded::new(Mutex::new(Free::default()))),
            failed_before: AtomicBool::new(false),
        }
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// From now on there are pages of this size.
    pub(crate) fn expect(&self, page_bytes: usize) {
        self.floor
            .fetch_max(2 * page_bytes as u64, Ordering::Relaxed);
        self.pool(page_bytes)
            .reserve(self.budget as usize / page_bytes);
    }

    /// Highest number of bytes that frames took at any time.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Bytes of pages that are mapped or in flight now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// A frame for a page that somebody waits for, and for up to `more` pages behind it as far as read-ahead may have them.
    /// `None`: the budget is used up; evictors learn of it by [`is_above_mark`](Self::is_above_mark).
    pub(crate) fn for_demand(&self, page_bytes: usize, more: usize) -> Option<A::Frame> {
        let frame = self.take(page_bytes, 1 + self.room_for_prefetch(page_bytes).min(more));
        if frame.is_none() {
            self.starving.fetch_max(page_bytes as u64, Ordering::SeqCst);
        }
        frame
    }

    /// A frame for up to `pages` pages that somebody may want soon: only while it leaves room for demand.
    pub(crate) fn for_prefetch(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        let pages = self.room_for_prefetch(page_bytes).min(pages);
        (pages > 0).then(|| self.take(page_bytes, pages)).flatten()
    }

    /// How many pages may be brought in that nobody waits for.
    fn room_for_prefetch(&self, page_bytes: usize) -> usize {
        // A part of what the evictors keep free belongs to demand, or prefetching would starve it.
        let reserve = ((self.budget - self.low) / 2).min(DEMAND_RESERVE_PAGES * page_bytes as u64);
        (self.room().saturating_sub(reserve) / page_bytes as u64) as usize
    }

    /// A frame of at least one page and at most `pages`.
    fn take(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        // Each a statement of its own, so that its lock is given up: two fillers of different sizes would wait for each other.
        let mut frame = self.pool(page_bytes).take(page_bytes, pages, false);
        if frame.is_none() {
            frame = self.make(page_bytes, pages);
        }
        if frame.is_none() {
            frame = self.pool(page_bytes).take(page_bytes, pages, true);
        }
        while frame.is_none() && self.give_up_other(page_bytes) {
            frame = self.make(page_bytes, pages);
        }
        if let Some(frame) = &frame {
            self.used
                .fetch_add(frame.as_ref().len() as u64, Ordering::Relaxed);
        }
        frame
    }

    /// Gives up a free page of another size. Returns whether there was one.
    fn give_up_other(&self, page_bytes: usize) -> bool {
        let sizes = (0..SIZES).map(|i| 1 << (i as u32 + SMALLEST_SHIFT));
        let mut others = sizes.filter(|&size| size != page_bytes);
        others.any(|size| self.give_up(size))
    }

    /// Gives up a free page. Returns whether there was one.
    fn give_up(&self, page_bytes: usize) -> bool {
        // A statement of its own, so that the lock is given up.
        let victim = self.pool(page_bytes).take(page_bytes, 1, true);
        let Some(victim) = victim else {
            return false;
        };
        let bytes = victim.as_ref().len() as u64;
        drop(victim);
        self.made.fetch_sub(bytes, Ordering::Relaxed);
        true
    }

    /// Counts as many pages as made as the budget allows, `pages` at most. `None`: it allows none.
    fn reserve(&self, page_bytes: usize, pages: usize) -> Option<u64> {
        let page = page_bytes as u64;
        let affordable = |made: u64| (pages as u64).min((self.budget - made) / page) * page;
        let made = self
            .made
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |made| {
                let more = affordable(made);
                (more > 0).then_some(made + more)
            });
        let pages = affordable(made.ok()?) / page;
        self.peak
            .fetch_max(self.made.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(pages)
    }

    /// Makes a frame of as many pages as the budget and the address space allow, `pages` at most.
    fn make(&self, page_bytes: usize, pages: usize) -> Option<A::Frame> {
        let page = page_bytes as u64;
        let mut pages = self.reserve(page_bytes, pages)?;
        loop {
            let error = match self.space.new_frame(page_bytes, pages as usize) {
                Ok(frame) => return Some(frame),
                Err(error) => error,
            };
            // So many may find no room next to each other where fewer do.
            let fewer = pages / 2;
            self.made
                .fetch_sub((pages - fewer) * page, Ordering::Relaxed);
            pages = fewer;
            if pages == 0 {
                if !self.failed_before.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, page_bytes, "no memory for a frame although the budget allows it; lower the budget");
                }
                return None;
            }
        }
    }

    /// A frame comes back free. Returns whether a demand fill waits for one.
    pub(crate) fn release(&self, frame: A::Frame, page_bytes: usize) -> bool {
        let bytes = frame.as_ref().len() as u64;
        self.pool(page_bytes).put(frame, page_bytes);
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        self.starving.load(Ordering::SeqCst) != 0
    }

    /// So many bytes of mapped pages are memory no more: they were given back to the kernel, by the program itself or after they had been copied.
    pub(crate) fn forget(&self, bytes: usize) {
        self.made.fetch_sub(bytes as u64, Ordering::Relaxed);
        self.used.fetch_sub(bytes as u64, Ordering::SeqCst);
    }

    /// A frame of one page to work with. `None`: there is none to spare, unless one of another size is given up.
    pub(crate) fn spare(&self, page_bytes: usize) -> Option<A::Frame> {
        // A statement of its own, so that the lock is given up.
        let free = self.pool(page_bytes).take(page_bytes, 1, false);
        let frame = free.or_else(|| self.make(page_bytes, 1))?;
        self.used.fetch_add(page_bytes as u64, Ordering::Relaxed);
        Some(frame)
    }

    /// Bytes that more frames may have.
    pub(crate) fn room(&self) -> u64 {
        self.budget.saturating_sub(self.used())
    }

    /// A page of memory is about to be made that is no frame; if need be and `in_place_of_a_frame`, a free frame is given up for it. `false`: the budget has no room.
    pub(crate) fn make_elsewhere(&self, page_bytes: usize, in_place_of_a_frame: bool) -> bool {
        let make = || self.reserve(page_bytes, 1).is_some();
        make() || in_place_of_a_frame && self.give_up(page_bytes) && make()
    }

    /// It was not made after all.
    pub(crate) fn unmake(&self, page_bytes: usize) {
        self.made.fetch_sub(page_bytes as u64, Ordering::Relaxed);
    }

    /// A page that was made elsewhere is mapped in the place of this frame, which comes back free. Returns whether a demand fill waits for one.
    pub(crate) fn replaced(&self, frame: A::Frame, page_bytes: usize) -> bool {
        self.pool(page_bytes).put(frame, page_bytes);
        self.starving.load(Ordering::SeqCst) != 0
    }

    /// The fills that found no frame have one now. Others that starve say so again when they try again.
    pub(crate) fn end_starving(&self) {
        self.starving.store(0, Ordering::SeqCst);
    }

    /// Whether a demand fill waits for a frame.
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

    /// Gives back what was set aside.
    pub(crate) fn unpin(&self, bytes: u64) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that are set aside for pinned pages.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Bytes that can be pinned: fills and evictions need room to work in, and evictors must be able to reach their low mark.
    pub(crate) fn pinned_max(&self) -> u64 {
        self.low.min(
            self.budget
                .saturating_sub(2 * self.floor.load(Ordering::Relaxed)),
        )
    }

    /// Pages begin to leave.
    pub(crate) fn begin_leaving(&self, bytes: usize) {
        self.leaving.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// They have left, or stay after all, or take too long to be counted on.
    pub(crate) fn end_leaving(&self, bytes: usize) {
        self.leaving.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn leaving(&self) -> u64 {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Whether more is used than a mark allows: the first of `steps` is the high water mark, the others divide what lies between it and the
    /// budget. While a fill waits for a frame it is above all of them.
    pub(crate) fn is_above_mark(&self, step: usize, steps: usize) -> bool {
        let mark = self.high + (self.budget - self.high) / steps as u64 * step as u64;
        self.used() > mark.max(self.untouchable()) || self.is_starving()
    }

    /// Whether threads that serve their own faults take pages out: at half way between the marks, so that evictors are called only where these
    /// threads do not keep up.
    pub(crate) fn is_tight(&self) -> bool {
        let leaving = self.leaving.load(Ordering::Relaxed);
        let mark = self.low + (self.high - self.low) / 2;
        let is_above = self.used().saturating_sub(leaving) > mark.max(self.untouchable());
        is_above || self.is_starving() && self.excess() > 0
    }

    /// Bytes that evictors leave alone: what they cannot take out, and the two pages beside it that an instruction may need at once.
    fn untouchable(&self) -> u64 {
        self.pinned() + self.held.load(Ordering::Relaxed) + self.floor.load(Ordering::Relaxed)
    }

    /// Fillers hold these bytes back, complete but unmapped.
    pub(crate) fn begin_holding(&self, bytes: usize) {
        self.held.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// They are mapped.
    pub(crate) fn end_holding(&self, bytes: usize) {
        self.held.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// How many bytes more must begin to leave until the low mark will be reached.
    pub(crate) fn excess(&self) -> u64 {
        let staying = self
            .used()
            .saturating_sub(self.leaving.load(Ordering::Relaxed));
        let aim = self
            .low
            .max(self.untouchable())
            .min(self.budget - self.starving.load(Ordering::SeqCst).min(self.budget));
        staying.saturating_sub(aim)
    }

    fn pool(&self, page_bytes: usize) -> MutexGuard<'_, Free<A::Frame>> {
        locked(&self.free[(page_bytes.trailing_zeros() - SMALLEST_SHIFT) as usize])
    }
}

/// Of the standard library, since these are taken in a signal handler too: they never allocate.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a worker that panics ends the process")
}

/// Free frames of one page size, by length.
struct Free<F>([Vec<F>; LENGTHS]);

impl<F> Default for Free<F> {
    fn default() -> Self {
        Free(Default::default())
    }
}

impl<F: Frame> Free<F> {
    /// Room for so many pages in whatever lengths, so that putting a frame back never allocates: a signal handler may do so. Room alone takes no memory.
    fn reserve(&mut self, pages: usize) {
        for (class, frames) in self.0.iter_mut().enumerate() {
            frames.reserve((pages >> class).saturating_sub(frames.len()));
        }
    }

    /// A frame of `pages` pages, cut from a longer one if need be; or else, if a `shorter` one will do, the longest there is.
    fn take(&mut self, page_bytes: usize, pages: usize, shorter: bool) -> Option<F> {
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

    fn put(&mut self, frame: F, page_bytes: usize) {
        self.0[pages_in(&frame, page_bytes).ilog2() as usize].push(frame);
    }
}

#[cfg(test)]
mod tests {
    use farpage_vm::{SimOptions, SimSpace};

    use super::*;

    #[test]
    fn where_no_room_is_left_for_a_run_shorter_ones_use_the_whole_budget() {
        const PAGE_BYTES: usize = 4096;
        for frame_pages_max in [1, 3] {
            let space = Arc::new(SimSpace::new(SimOptions {
                frame_pages_max,
                ..SimOptions::default()
            }));
            let frames = Frames::new(space, 64 * PAGE_BYTES as u64, 0.9, 0.95);
            frames.expect(PAGE_BYTES);
            let mut taken = Vec::new();
            while let Some(frame) = frames.for_demand(PAGE_BYTES, 15) {
                assert!(pages_in(&frame, PAGE_BYTES) <= frame_pages_max);
                taken.push(frame);
            }
            let bytes: usize = taken.iter().map(|frame| frame.as_ref().len()).sum();
            assert_eq!(bytes, 64 * PAGE_BYTES);
            assert_eq!(
                (frames.used(), frames.peak()),
                (frames.budget(), frames.budget())
            );
        }
    }
}
