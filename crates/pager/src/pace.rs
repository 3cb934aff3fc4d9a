//! Pace of a filler's link, and the lengths of runs and windows that follow: [`Pace`].
//!
//! **Runs.** A run costs a fixed part (a request, two system calls with their TLB shootdowns, a
//! wake-up: some 12 us) and a part per byte, at the pace of the link. The longer the run, the more
//! pages share the fixed part. But the thread that waits for the first page waits for all of them,
//! and so does the next fault. So a run takes [`RUN_TIME`], 64 times the fixed part: a longer one
//! would save less than 2 %. It is never longer than [`RUN_BYTES_MAX`](crate::run::RUN_BYTES_MAX),
//! beyond which its bytes fall out of the cache between READ, hash and use.
//!
//! **Windows.** A read-ahead window is asked for when the program comes to the window before it. It
//! must cover the bytes that the link carries between asking and arriving, or the program waits
//! once per window. So it covers the link's delay twice, and two runs. It is never shorter than the
//! region's own length, which is enough for links that answer at once.
//!
//! **Figures.** Completions give both. The pace: the bytes that arrive while READs queue, by the
//! time since the arrival before. The delay: the time of a READ that finds the link idle, less the
//! time of its bytes. A READ that arrives in the turn of its post (shared memory) says nothing, and
//! the longest runs are right for it.
//!
//! The rule: figures are of the recent past, and a link without any is taken to be as fast as can
//! be.

use std::time::{Duration, Instant};

use farpage_store::RunTiming;

/// Time that a run may take.
const RUN_TIME: Duration = Duration::from_micros(750);
/// Fading of the past: it counts half after `MEMORY_BYTES`, and after `MEMORY_DELAYS` delays.
const MEMORY_BYTES: f64 = (8 << 20) as f64;
const MEMORY_DELAYS: f64 = 16.0;

/// Figures of a filler's link.
#[derive(Debug)]
pub(crate) struct Pace {
    /// True if the length of runs follows the link.
    tuned: bool,
    last_arrival: Option<Instant>,
    /// Bytes that arrived while others queued, and the nanoseconds that they took; fading.
    bytes: f64,
    ns: f64,
    /// Delay of READs that found the link idle, beyond their bytes' time; fading mean.
    delay_ns: f64,
}

impl Pace {
    /// Returns the pace of an unknown link. Unless `tuned`, runs are as long as they may be.
    pub(crate) fn new(tuned: bool) -> Pace {
        Pace {
            tuned,
            last_arrival: None,
            bytes: 0.0,
            ns: 0.0,
            delay_ns: 0.0,
        }
    }

    /// Learns from `bytes` that arrived, unless they did so at once.
    pub(crate) fn arrived(&mut self, bytes: usize, timing: RunTiming, now: Instant) {
        if timing.at_once {
            return;
        }
        let before = self.last_arrival.replace(now);
        let bytes = bytes as f64;
        if timing.alone {
            if let Some(ns_per_byte) = self.ns_per_byte() {
                let took = (now - timing.began).as_nanos() as f64;
                let delay = (took - bytes * ns_per_byte).max(0.0);
                self.delay_ns += (delay - self.delay_ns) / MEMORY_DELAYS;
            }
        } else if let Some(before) = before.filter(|&before| before >= timing.began) {
            self.bytes += bytes;
            self.ns += (now - before).as_nanos() as f64;
            if self.bytes > MEMORY_BYTES {
                (self.bytes, self.ns) = (self.bytes / 2.0, self.ns / 2.0);
            }
        }
    }

    /// Returns the nanoseconds per byte. `None`: not known yet.
    fn ns_per_byte(&self) -> Option<f64> {
        // A megabyte is evidence enough.
        (self.bytes >= (1 << 20) as f64).then(|| self.ns / self.bytes)
    }

    /// Returns the bytes of a run, `most` if the link allows it.
    pub(crate) fn run_bytes(&self, most: usize) -> usize {
        let ns_per_byte = self.ns_per_byte().filter(|_| self.tuned);
        ns_per_byte.map_or(most, |ns_per_byte| {
            most.min((RUN_TIME.as_nanos() as f64 / ns_per_byte) as usize)
        })
    }

    /// Returns the lower bound of the bytes of a read-ahead window.
    pub(crate) fn window_bytes(&self, run_bytes: usize) -> usize {
        self.ns_per_byte().map_or(0, |ns_per_byte| {
            2 * ((self.delay_ns / ns_per_byte) as usize + run_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 512 << 10;
    const PART: usize = 64 << 10;

    fn timing(began: Instant, alone: bool) -> RunTiming {
        let at_once = false;
        RunTiming {
            began,
            alone,
            at_once,
        }
    }

    /// Returns the pace of a link that carries `mb_per_s` after a delay, for `reads` READs, four of
    /// which are always under way; the first of each four finds the link idle.
    fn observe(mb_per_s: f64, delay: Duration, reads: usize) -> Pace {
        let mut pace = Pace::new(true);
        let mut now = Instant::now();
        let time = Duration::from_secs_f64(PART as f64 / mb_per_s / 1e6);
        for _ in 0..reads / 4 {
            let posted = now;
            now += delay;
            for number in 0..4 {
                now += time;
                let alone = number == 0;
                pace.arrived(PART, timing(posted, alone), now);
            }
        }
        pace
    }

    #[test]
    fn a_fast_link_gets_the_longest_runs_and_no_longer_windows() {
        let pace = observe(10_000.0, Duration::from_micros(5), 200);
        assert_eq!(pace.run_bytes(MOST), MOST);
        assert!(pace.window_bytes(MOST) < 1300 << 10);
        assert_eq!(Pace::new(true).run_bytes(MOST), MOST);
        assert_eq!(Pace::new(true).window_bytes(MOST), 0);
    }

    #[test]
    fn runs_that_arrive_at_once_say_nothing_of_the_link() {
        let mut pace = Pace::new(true);
        let mut now = Instant::now();
        for _ in 0..400 {
            let at_once = true;
            let timing = RunTiming {
                at_once,
                ..timing(now, false)
            };
            now += Duration::from_millis(10);
            pace.arrived(PART, timing, now);
        }
        assert_eq!((pace.run_bytes(MOST), pace.window_bytes(MOST)), (MOST, 0));
    }

    #[test]
    fn a_slow_link_gets_runs_that_hold_nobody_up() {
        let pace = observe(125.0, Duration::from_micros(50), 200);
        let run = pace.run_bytes(MOST);
        assert!((80_000..100_000).contains(&run), "{run} bytes at 1 Gb/s");
    }

    #[test]
    fn a_long_link_gets_windows_that_cover_it() {
        let pace = observe(1250.0, Duration::from_millis(1), 1000);
        let window = pace.window_bytes(MOST);
        // Twice 1.25 MB, and two runs.
        assert!((3_300_000..3_700_000).contains(&window), "{window} bytes");
    }

    #[test]
    fn a_link_that_becomes_slow_is_noticed_within_some_megabytes() {
        let mut pace = observe(10_000.0, Duration::ZERO, 2000);
        let mut now = Instant::now() + Duration::from_secs(100);
        let timing = timing(now, false);
        pace.arrived(PART, timing, now);
        for _ in 0..400 {
            now += Duration::from_micros(524);
            pace.arrived(PART, timing, now);
        }
        assert!(pace.run_bytes(MOST) < 100_000);
    }
}
