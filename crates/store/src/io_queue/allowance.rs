//! [`Hedges`]: how many READs an I/O queue may hedge, and when it looks for late answers.
//!
//! The rule it keeps: hedges are paid for by READs that began before. The looks themselves, and the
//! choice of READs, are left to `hedge.rs`.

use std::time::{Duration, Instant};

use super::{late::LateReads, run::Direction};

/// Number of READs for each of which one may be hedged: 5 %.
pub(super) const READS_PER_HEDGE: u32 = 20;
/// Hedges that an I/O queue may save up: what a worker has under way when a server falls silent.
const HEDGES_MAX: u32 = 32;
/// Interval of looks at requests that are under way: a fraction of the shortest patience.
pub(super) const LOOK: Duration = Duration::from_millis(2);

/// Delay of a look after which the thread stood still, and may lack answers that have come.
pub(super) const STILL: Duration = Duration::from_millis(2);

/// State of the hedges of an I/O queue.
pub(super) struct Hedges {
    pub(super) late: LateReads,
    /// READs that may be paid with, at most [`HEDGES_MAX`] times [`READS_PER_HEDGE`].
    pub(super) credit: u32,
    /// True once a request for pages with copies was made.
    pub(super) is_used: bool,
    /// Time of the next look at requests under way. `None`: none was under way.
    pub(super) look_at: Option<Instant>,
    /// Time in which the thread stood still, which is no server's silence.
    still: Duration,
    /// Time of the last look, without the time in which the thread stood still.
    pub(super) looked: Instant,
}

impl Hedges {
    pub(super) fn new(late: LateReads) -> Self {
        Self {
            late,
            credit: HEDGES_MAX * READS_PER_HEDGE,
            is_used: false,
            look_at: None,
            still: Duration::ZERO,
            looked: Instant::now(),
        }
    }

    /// Returns the time, without the time in which the thread stood still.
    pub(super) fn now(&self) -> Instant {
        let real = Instant::now();
        self.look_at.map_or(real, |at| real.min(at + STILL)) - self.still
    }

    /// Begins a look if it is time. Returns the time, without that in which the thread stood still,
    /// and true if it did so just now.
    pub(super) fn begin_look(&mut self) -> Option<(Instant, bool)> {
        let real = Instant::now();
        let look_at = *self.look_at.get_or_insert(real + LOOK);
        if real < look_at {
            return None;
        }
        self.looked = self.now();
        let stood_still = real - look_at > STILL;
        self.still = real - self.looked;
        self.look_at = Some(real + LOOK);
        Some((self.looked, stood_still))
    }

    /// Notes that a request for pages with copies begins. READs pay a part of a hedge.
    pub(super) fn begin(&mut self, way: Direction) {
        self.is_used = true;
        if way == Direction::Fill {
            self.credit = (self.credit + 1).min(HEDGES_MAX * READS_PER_HEDGE);
        }
    }

    /// Returns the time of the next look while requests are under way.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let first = || Instant::now() + LOOK;
        self.is_used.then(|| self.look_at.unwrap_or_else(first))
    }
}
