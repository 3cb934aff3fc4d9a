//! [`Since`]: how long something has been waited for, in time that this process ran.
//!
//! A process that is stopped, or whose machine stands still, waits for nobody. When it goes on, a
//! deadline by the clock has passed, and a page would be given up whose answer has come already.
//!
//! The rule: of a stretch in which no thread has looked at the time here, at most [`STILL`] counts.
//! So whoever waits looks again by [`Since::look_by`]. A wait is bounded all the same: each look
//! counts something. Limits that keep a promise to others, such as a lease, go by the clock.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The longest stretch between two looks that counts as running: several times what a thread waits
/// for its turn on a busy machine.
const STILL: Duration = Duration::from_millis(100);
/// The longest sleep of whoever waits: a quarter of [`STILL`], or late wake-ups would look like
/// standing still.
const LOOK: Duration = Duration::from_millis(25);

static BASE: LazyLock<Instant> = LazyLock::new(Instant::now);

/// In the upper half when somebody looked last, in the lower half how long this process has stood
/// still so far, both in milliseconds that wrap around. Relaxed: nothing else is read by it, and
/// both halves change in one step, so that nobody sees the new time with the old loss.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// A moment from which the time is counted that this process runs.
#[derive(Clone, Copy, Debug)]
pub struct Since {
    at: Instant,
    /// What had been lost by then.
    lost_ms: u32,
}

impl Since {
    /// From now on.
    pub fn now() -> Since {
        let at = Instant::now();
        let lost_ms = look(&LOOKED, ms_of(at));
        Since { at, lost_ms }
    }

    /// How long this process has run since then. Waits for nothing and allocates nothing.
    pub fn elapsed(self) -> Duration {
        let now = Instant::now();
        let still = self.still(look(&LOOKED, ms_of(now)));
        now.saturating_duration_since(self.at).saturating_sub(still)
    }

    /// When to look again at the latest, for whoever sleeps until `wait` has passed.
    pub fn look_by(self, wait: Duration) -> Instant {
        let now = Instant::now();
        now + wait.saturating_sub(self.elapsed()).min(LOOK)
    }

    /// The later of two moments.
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

/// Notes a look. Returns what has been lost until then.
fn look(looked: &AtomicU64, now_ms: u32) -> u32 {
    let still_ms = STILL.as_millis() as u32;
    let mut before = looked.load(Ordering::Relaxed);
    loop {
        let (last_ms, lost_ms) = ((before >> 32) as u32, before as u32);
        let gap_ms = now_ms.wrapping_sub(last_ms);
        // Not negative either: another thread may have looked since `now_ms` was read.
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
        // However seldom somebody looks, each look counts.
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
