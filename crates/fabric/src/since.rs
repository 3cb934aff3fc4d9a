//! [`Since`]: the time since a moment, counted only while this process runs.
//!
//! A process that is stopped, or whose machine stands still, waits for nothing. When it goes on, a
//! deadline by the clock has passed, and a page would be given up whose answer has come already.
//!
//! The rule: of a stretch in which no thread has looked at the time here, at most [`STILL`] counts.
//! A waiting thread looks again by [`Since::look_by`]. A wait is bounded all the same: each look
//! counts something. Limits that keep a promise to others, such as a lease, go by the clock.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Upper bound of a stretch between two looks that counts as running: several times a thread's wait
/// for its turn on a busy machine.
const STILL: Duration = Duration::from_millis(100);
/// Upper bound of a waiting thread's sleep: a quarter of [`STILL`], or late wake-ups would look
/// like standing still.
const LOOK: Duration = Duration::from_millis(25);

static BASE: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Time of the last look in the upper half, time that this process has stood still so far in the
/// lower half, both in milliseconds that wrap around. Relaxed: no other data is read by it, and
/// both halves change in one step, so that no thread sees the new time with the old loss.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// A moment from which the running time of this process is counted.
#[derive(Clone, Copy, Debug)]
pub struct Since {
    at: Instant,
    /// Time lost by standing still until then, as in [`LOOKED`].
    lost_ms: u32,
}

impl Since {
    /// Starts counting now.
    pub fn now() -> Since {
        let at = Instant::now();
        let lost_ms = look(&LOOKED, ms_of(at));
        Since { at, lost_ms }
    }

    /// Returns how long this process has run since then. Never waits and allocates nothing.
    pub fn elapsed(self) -> Duration {
        let now = Instant::now();
        let still = self.still(look(&LOOKED, ms_of(now)));
        now.saturating_duration_since(self.at).saturating_sub(still)
    }

    /// Returns the time of the next look, for a thread that sleeps until `wait` has passed.
    pub fn look_by(self, wait: Duration) -> Instant {
        let now = Instant::now();
        now + wait.saturating_sub(self.elapsed()).min(LOOK)
    }

    /// Returns the later of two moments.
    pub fn max(self, other: Since) -> Since {
        if other.at > self.at { other } else { self }
    }

    fn still(self, lost_ms: u32) -> Duration {
        Duration::from_millis(lost_ms.wrapping_sub(self.lost_ms).into())
    }
}

fn ms_of(at: Instant) -> u32 {
    at.saturating_duration_since(*BASE).as_millis() as u32
}

/// Notes a look at `now_ms`. Returns the time lost until then.
fn look(looked: &AtomicU64, now_ms: u32) -> u32 {
    let still_ms = STILL.as_millis() as u32;
    let mut before = looked.load(Ordering::Relaxed);
    loop {
        let (last_ms, lost_ms) = ((before >> 32) as u32, before as u32);
        let gap_ms = now_ms.wrapping_sub(last_ms);
        // A negative gap is no gap: another thread may have looked since `now_ms` was read.
        if gap_ms == 0 || gap_ms > u32::MAX / 2 {
            return lost_ms;
        }
        let lost_ms = lost_ms.wrapping_add(gap_ms.saturating_sub(still_ms));
        let after = u64::from(now_ms) << 32 | u64::from(lost_ms);
        match looked.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return lost_ms,
            Err(other) => before = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_without_looks_counts_little_and_others_count_whole() {
        let looked = AtomicU64::new(0);
        let lost = |now_ms| look(&looked, now_ms);
        assert_eq!(lost(1000), 900, "before anybody waited");
        assert_eq!((1..=50).map(|n| lost(1000 + 100 * n)).max(), Some(900));
        assert_eq!(lost(5990), 900, "an older look than the last");
        assert_eq!(lost(9000), 900 + 2900);
        assert_eq!(lost(9000), 3800);
        // Each look counts, however rare looks are.
        let (mut now_ms, before) = (9000_u32, lost(9000));
        for _ in 0..10 {
            now_ms += 700;
            lost(now_ms);
        }
        assert_eq!(7000 - (lost(now_ms) - before), 10 * 100);
    }

    #[test]
    fn the_clock_may_wrap_around() {
        let looked = AtomicU64::new(u64::from(u32::MAX - 40) << 32);
        assert_eq!(look(&looked, 9), 0);
        assert_eq!(look(&looked, 209), 100);
    }

    #[test]
    fn time_passes_for_whoever_looks() {
        let since = Since::now();
        let began = Instant::now();
        let wait = Duration::from_millis(300);
        while since.elapsed() < wait {
            assert!(began.elapsed() < Duration::from_secs(30), "it passes");
            assert!(since.look_by(wait) <= Instant::now() + LOOK);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(began.elapsed() >= wait);
    }
}
