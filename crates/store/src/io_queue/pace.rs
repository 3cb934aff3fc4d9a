//! [`Pace`]: how long a server takes to answer, and from when on an answer is late.
//!
//! The rule it keeps: a time of its own for each way to a server, which follows the answers that
//! came. Comparing servers is left to the [hedges](super::hedge).

use std::time::Duration;

/// Shortest time after which an answer is late. Servers that share two busy processors with eight
/// threads of a program answer after up to 4 ms now and then.
const FLOOR: Duration = Duration::from_millis(5);
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
}

impl Pace {
    /// Returns the time after which an answer is late.
    pub(super) fn patience(self) -> Duration {
        (Duration::from_nanos(self.slow_ns) * FACTOR).max(FLOOR)
    }

    /// Notes an answer. One that is late counts as just late: a server that was stopped for seconds
    /// is as fast as before when it goes on. True if the answer was in time.
    pub(super) fn note(&mut self, took: Duration) -> bool {
        let patience = self.patience();
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
        for _ in 0..10_000 {
            assert!(pace.note(ms(1)));
        }
        assert_eq!(pace.patience(), FLOOR, "answers after 1 ms need no more");
        // A network with a round trip of 20 ms: the first answers seem late.
        let late = (0..1000).filter(|_| !pace.note(ms(20))).count();
        assert!(late < 50, "{late}");
        assert!((ms(60)..=ms(80)).contains(&pace.patience()), "{pace:?}");
        // One in 100 takes three times as long.
        let late = (0..10_000).filter(|i| !pace.note(ms(if i % 100 == 0 { 60 } else { 20 })));
        assert_eq!(late.count(), 0);
    }

    #[test]
    fn an_answer_after_a_long_stop_counts_little() {
        let mut pace = Pace::default();
        for _ in 0..3 {
            assert!(!pace.note(Duration::from_secs(10)));
        }
        assert!(pace.patience() < 4 * FLOOR, "{pace:?}");
    }
}
