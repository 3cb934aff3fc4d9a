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
use crate::handover::HandedFigures;

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

    /// Returns the counts that go on in the next process.
    pub(super) fn hand_over(&self) -> HandedFigures {
        let count = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let fetches = self.fetches.lock();
        let fetches = fetches.iter_recorded();
        HandedFigures {
            evictions: count(&self.evictions),
            forced_seals: count(&self.forced_seals),
            stray_bytes: count(&self.stray_bytes),
            no_room: count(&self.no_room),
            spill_errors: count(&self.spill_errors),
            ticks: self.ticks.load(Ordering::Relaxed),
            fetches: fetches
                .map(|it| (it.value_iterated_to(), it.count_at_value()))
                .collect(),
        }
    }

    /// Goes on with the counts of an earlier process.
    pub(super) fn take_over(&self, handed: &HandedFigures) {
        for (figure, count) in [
            (&self.evictions, handed.evictions),
            (&self.forced_seals, handed.forced_seals),
            (&self.stray_bytes, handed.stray_bytes),
            (&self.no_room, handed.no_room),
            (&self.spill_errors, handed.spill_errors),
        ] {
            figure.store(count, Ordering::Relaxed);
        }
        self.ticks.store(handed.ticks, Ordering::Relaxed);
        let mut fetches = self.fetches.lock();
        for (nanos, count) in &handed.fetches {
            fetches.saturating_record_n(*nanos, *count);
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
