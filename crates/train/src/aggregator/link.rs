//! [`OwnLink`]: an aggregator that all its workers reach by one slow link.
//!
//! The rule it keeps: the link decides when something counts, and no bit of it. Workers hold their
//! own completions back ([`Link`](farpage_fabric::Link)), which says nothing of what an
//! aggregator's side carries for all of them. So a vector counts as arrived when the link has
//! carried it behind those that came before. A board's number is shown when the link can have
//! carried what the others read, so that the last one's own link ends with it.

use std::time::{Duration, Instant};

/// A link in both directions.
#[derive(Debug)]
pub(super) struct OwnLink {
    /// Time that one vector takes.
    each: Duration,
    inbound_free_at: Instant,
}

impl OwnLink {
    /// Makes a link of `gbps` gigabits per second, for vectors of `bytes` bytes.
    pub(super) fn new(gbps: f64, bytes: usize) -> Self {
        Self {
            each: Duration::from_secs_f64(bytes as f64 * 8.0 / 1e9 / gbps),
            inbound_free_at: Instant::now(),
        }
    }

    /// Returns the time at which a vector that was placed until `now` has been carried, behind all
    /// before it. Its first byte may have been on its way for long.
    pub(super) fn arrives(&mut self, now: Instant) -> Instant {
        self.inbound_free_at = (self.inbound_free_at + self.each).max(now);
        self.inbound_free_at
    }

    /// Returns how long the link is busy with what all but one of `readers` read.
    pub(super) fn others(&self, readers: usize) -> Duration {
        self.each * readers.saturating_sub(1) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_that_come_together_arrive_one_behind_the_other() {
        // A megabyte at a gigabit per second.
        let (mut link, each) = (OwnLink::new(1.0, 1_000_000), Duration::from_millis(8));
        let now = Instant::now() + Duration::from_secs(1);
        let arrivals = [0; 4].map(|_| link.arrives(now) - now);
        assert_eq!(arrivals, [Duration::ZERO, each, each * 2, each * 3]);
        // Vectors that come when the link has long been free were carried while they came.
        let later = now + Duration::from_secs(1);
        assert_eq!(link.arrives(later), later);
        assert_eq!(link.others(4), each * 3);
        assert_eq!(link.others(1), Duration::ZERO);
    }
}
