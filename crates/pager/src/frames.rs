//! The residency budget and the frames that circulate under it: [`Frames`].
//!
//! The rule: the bytes of all frames in existence, free, in flight or mapped in a region, never exceed the budget. A frame is
//! made once and then circulates: a fill takes a free one and maps it, an eviction brings it back. Which page deserves a frame
//! is left to fillers and evictors.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crossbeam_utils::CachePadded;
use farpage_vm::AddressSpace;
use parking_lot::Mutex;

/// 4 KiB to 2 MiB in powers of two.
const SIZES: usize = 10;
/// The smallest page size, as a power of two.
const SMALLEST_SHIFT: u32 = 12;

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
    /// Bytes of the largest demand fill that found no frame and waits.
    starving: AtomicU64,
    free: [CachePadded<Mutex<Vec<A::Frame>>>; SIZES],
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
            starving: AtomicU64::new(0),
            free: std::array::from_fn(|_| CachePadded::new(Mutex::new(Vec::new()))),
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
    }

    /// Highest number of bytes that frames took at any time.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Bytes of pages that are mapped or in flight now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// A frame for a page that somebody waits for. `None`: the budget is used up; evictors learn of it by
    /// [`above_high`](Self::above_high).
    pub(crate) fn for_demand(&self, page_bytes: usize) -> Option<A::Frame> {
        let frame = self.take(page_bytes);
        if frame.is_none() {
            self.starving.fetch_max(page_bytes as u64, Ordering::SeqCst);
        }
        frame
    }

    /// A frame for a page that somebody may want soon: only while it leaves room for demand.
    pub(crate) fn for_prefetch(&self, page_bytes: usize) -> Option<A::Frame> {
        let room = self.budget.saturating_sub(self.used());
        // A part of what the evictors keep free belongs to demand, or prefetching would starve it.
        let reserve = ((self.budget - self.low) / 2).min(DEMAND_RESERVE_PAGES * page_bytes as u64);
        (room > reserve + page_bytes as u64)
            .then(|| self.take(page_bytes))
            .flatten()
    }

    fn take(&self, page_bytes: usize) -> Option<A::Frame> {
        // A statement of its own, so that its lock is given up: making a frame takes the locks of the other sizes, and two
        // fillers of different sizes would wait for each other.
        let free = self.pool(page_bytes).lock().pop();
        let frame = free.or_else(|| self.make(page_bytes));
        if frame.is_some() {
            self.used.fetch_add(page_bytes as u64, Ordering::Relaxed);
        }
        frame
    }

    /// Makes a frame if the budget allows, giving up free frames of other sizes for it where needed.
    fn make(&self, page_bytes: usize) -> Option<A::Frame> {
        let bytes = page_bytes as u64;
        while self
            .made
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |made| {
                (made + bytes <= self.budget).then_some(made + bytes)
            })
            .is_err()
        {
            let (size, victim) = (0..SIZES)
                .filter(|&i| 1 << (i as u32 + SMALLEST_SHIFT) != page_bytes)
                .find_map(|i| {
                    Some((
                        1u64 << (i as u32 + SMALLEST_SHIFT),
                        self.free[i].lock().pop()?,
                    ))
                })?;
            drop(victim);
            self.made.fetch_sub(size, Ordering::Relaxed);
        }
        self.peak.fetch_max(
            self.made.load(Ordering::Relaxed).min(self.budget),
            Ordering::Relaxed,
        );
        match self.space.new_frame(page_bytes) {
            Ok(frame) => Some(frame),
            Err(error) => {
                self.made.fetch_sub(bytes, Ordering::Relaxed);
                if !self.failed_before.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, page_bytes, "no memory for a frame although the budget allows it; lower the budget");
                }
                None
            }
        }
    }

    /// A frame comes back free. Returns whether a demand fill waits for one.
    pub(crate) fn release(&self, frame: A::Frame, page_bytes: usize) -> bool {
        self.pool(page_bytes).lock().push(frame);
        self.used.fetch_sub(page_bytes as u64, Ordering::SeqCst);
        self.starving.load(Ordering::SeqCst) != 0
    }

    /// A frame's memory is gone: the program gave the page back to the kernel itself.
    pub(crate) fn forget(&self, page_bytes: usize) {
        self.made.fetch_sub(page_bytes as u64, Ordering::Relaxed);
        self.used.fetch_sub(page_bytes as u64, Ordering::SeqCst);
    }

    /// A fill that found no frame is about to try again.
    pub(crate) fn retry_demand(&self) {
        self.starving.store(0, Ordering::SeqCst);
    }

    /// Whether a demand fill waits for a frame.
    pub(crate) fn is_starving(&self) -> bool {
        self.starving.load(Ordering::SeqCst) != 0
    }

    /// A page begins to leave.
    pub(crate) fn begin_leaving(&self, page_bytes: usize) {
        self.leaving.fetch_add(page_bytes as u64, Ordering::Relaxed);
    }

    /// It has left, or stays after all, or takes too long to be counted on.
    pub(crate) fn end_leaving(&self, page_bytes: usize) {
        self.leaving.fetch_sub(page_bytes as u64, Ordering::Relaxed);
    }

    /// Whether evictors should start.
    pub(crate) fn above_high(&self) -> bool {
        self.used() > self.high.max(self.floor.load(Ordering::Relaxed)) || self.is_starving()
    }

    /// Whether more pages must begin to leave until the low mark will be reached.
    pub(crate) fn above_low(&self) -> bool {
        let staying = self
            .used()
            .saturating_sub(self.leaving.load(Ordering::Relaxed));
        staying
            > self
                .low
                .max(self.floor.load(Ordering::Relaxed))
                .min(self.budget - self.starving.load(Ordering::SeqCst).min(self.budget))
    }

    fn pool(&self, page_bytes: usize) -> &Mutex<Vec<A::Frame>> {
        &self.free[(page_bytes.trailing_zeros() - SMALLEST_SHIFT) as usize]
    }
}
