//! [`Figures`]: counts of moves, and log lines about trouble.
//!
//! The rule it keeps: nothing here is waited for. Trouble is logged once per [`SAY_EVERY`] at most.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use farpage_fabric::log::later;
use hdrhistogram::Histogram;
use parking_lot::Mutex;

use super::chunk::Place;

/// Shortest time between two logs of trouble.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Counters for display, so relaxed.
pub(super) struct Figures {
    pub(super) compressed_chunks: AtomicU64,
    pub(super) spilled_chunks: AtomicU64,
    pub(super) evictions: AtomicU64,
    /// Evictions of chunks that a client over shared memory reaches by itself.
    pub(super) forced_seals: AtomicU64,
    pub(super) stray_bytes: AtomicU64,
    pub(super) no_room: AtomicU64,
    pub(super) spill_errors: AtomicU64,
    /// Durations of fetches, in nanoseconds.
    pub(super) fetches: Mutex<Histogram<u64>>,
    /// Number of fetches so far; wraps around.
    ticks: AtomicU32,
    last_said: Mutex<Option<Instant>>,
}

impl Figures {
    pub(super) fn new() -> Self {
        let fetches = Histogram::new_with_bounds(1, 1 << 36, 2).expect("bounds that it takes");
        Self {
            compressed_chunks: AtomicU64::new(0),
            spilled_chunks: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            forced_seals: AtomicU64::new(0),
            stray_bytes: AtomicU64::new(0),
            no_room: AtomicU64::new(0),
            spill_errors: AtomicU64::new(0),
            fetches: Mutex::new(fetches),
            ticks: AtomicU32::new(0),
            last_said: Mutex::default(),
        }
    }

    /// Counts a chunk's move between places.
    pub(super) fn moved(&self, from: Place, to: Place) {
        let figure = |place| match place {
            Place::Compressed => Some(&self.compressed_chunks),
            Place::Spilled => Some(&self.spilled_chunks),
            Place::Hole | Place::Hot | Place::Busy | Place::Orphan => None,
        };
        if let Some(figure) = figure(from) {
            figure.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(figure) = figure(to) {
            figure.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a fetch. Returns the number of fetches so far, never 0.
    pub(super) fn tick(&self) -> u32 {
        self.ticks
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1)
            .max(1)
    }

    /// Returns the number of fetches that followed the fetch of tick `fetched`.
    pub(super) fn fetches_since(&self, fetched: u32) -> u32 {
        self.ticks.load(Ordering::Relaxed).wrapping_sub(fetched)
    }

    pub(super) fn count_fetch(&self, took: Duration) {
        self.fetches
            .lock()
            .saturating_record(took.as_nanos() as u64);
    }

    pub(super) fn count_no_room(&self) {
        self.no_room.fetch_add(1, Ordering::Relaxed);
        self.say("an operation was turned down: no memory came free in time".to_owned());
    }

    pub(super) fn count_spill_error(&self, what: &str) {
        self.spill_errors.fetch_add(1, Ordering::Relaxed);
        self.say(what.to_owned());
    }

    /// Logs trouble, once per `SAY_EVERY` at most; `stat` has the counts.
    pub(super) fn say(&self, what: String) {
        let now = Instant::now();
        let mut last = self.last_said.lock();
        if last.is_none_or(|last| now - last >= SAY_EVERY) {
            *last = Some(now);
            later(move || tracing::warn!("{what}"));
        }
    }
}
