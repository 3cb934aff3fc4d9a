//! [`Pace`]: how long a server takes to answer, and from when on an answer is late.
//!
//! The rule it keeps: a time of its own for each way to a server, which follows the answers that
//! came. Comparing servers is left to the [hedges](super::hedge).

use std::time::{Duration, Instant};

/// Shortest time after which an answer is late. Servers that share two busy processors with eight
/// threads of a program answer after up to 4 ms now and then.
const FLOOR: Duration = Duration::from_millis(5);
/// Longest time after which an answer is late, however slow a server was.
const CEILING: Duration = Duration::from_millis(250);
/// Multiple of the usual slow answer after which an answer is late.
const FACTOR: u32 = 4;
/// Shares of the difference by which `slow_ns` follows slower and faster answers. It settles where
/// one answer in 64 is slower, if these are slower by as much as the others are faster.
const UP: u64 = 8;
const DOWN: u64 = 512;

/// Times of the answers of a server.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Time that slow answers usually take, in nanoseconds: an asymmetric moving average.
    slow_ns: u64,
    /// Time of the last late answer that counted.
    late_at: Option<Instant>,
}

impl Pace {
    /// Returns the time after which an answer is late.
    pub(super) fn patience(self) -> Duration {
        (Duration::from_nanos(self.slow_ns) * FACTOR).clamp(FLOOR, CEILING)
    }

    /// Notes an answer that comes `now`. One that is late counts as just late, and of all that come
    /// within the patience only the first counts: a server that was stopped for seconds, and then
    /// answers all that waited, is as fast as before. True if the answer was in time.
    pub(super) fn note(&mut self, took: Duration, now: Instant) -> bool {
        let patience = self.patience();
        if took >= patience {
            let is_first = |at: Instant| now.saturating_duration_since(at) >= patience;
            if !self.late_at.is_none_or(is_first) {
                return false;
            }
            self.late_at = Some(now);
        }
        let took_ns = took.min(patience).as_nanos() as u64;
        match took_ns.checked_sub(self.slow_ns) {
            Some(slower_ns) => self.slow_ns += slower_ns / UP,
            None => self.slow_ns -= (self.slow_ns - took_ns) / DOWN,
        }
        took < patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_slow_answers() {
        let mut pace = Pace::default();
        assert_eq!(pace.patience(), FLOOR);
        let ms = Duration::from_millis;
        let mut now = Instant::now();
        let mut note = |pace: &mut Pace, took| {
            now += took;
            pace.note(took, now)
        };
        for _ in 0..10_000 {
            assert!(note(&mut pace, ms(1)));
        }
        assert_eq!(pace.patience(), FLOOR, "answers after 1 ms need no more");
        // A network with a round trip of 20 ms: the first answers seem late.
        let late = (0..1000).filter(|_| !note(&mut pace, ms(20))).count();
        assert!(late < 50, "{late}");
        assert!((ms(60)..=ms(80)).contains(&pace.patience()), "{pace:?}");
        // One in 100 takes three times as long.
        let late = (0..10_000).filter(|i| !note(&mut pace, ms(if i % 100 == 0 { 60 } else { 20 })));
        assert_eq!(late.count(), 0);
    }

    #[test]
    fn all_answers_after_a_long_stop_count_as_one() {
        let mut pace = Pace::default();
        let now = Instant::now();
        for _ in 0..64 {
            assert!(!pace.note(Duration::from_secs(10), now));
        }
        assert_eq!(pace.patience(), FLOOR, "{pace:?}");
        // A server that is always slow.
        for second in 0..1000 {
            pace.note(Duration::from_secs(1), now + Duration::from_secs(second));
        }
        assert_eq!(pace.patience(), CEILING, "{pace:?}");
    }
}
