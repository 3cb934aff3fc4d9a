//! The rate of the link to the servers, as far as I/O queues had to wait for it: [`LinkTraffic`] is
//! shared by all I/O queues, [`Watch`] is one I/O queue's view.
//!
//! The rule it keeps: **only an I/O queue's sleep counts, and only if a request that was in flight
//! when it fell asleep still is when it looks.** Then the link was busy all the time, so the bytes
//! that all I/O queues received meanwhile are what it carries. Other time would make any link look
//! slow: requests that have ended but were not looked after yet, requests between waking and
//! looking, the work that looking finds, and pauses without requests. A link that no I/O queue
//! waits for needs no compression.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Number of bytes that must be waited for until a rate is known.
const RATE_BYTES: f64 = (256 << 10) as f64;
/// Waiting time, in nanoseconds, after which old measurements count half.
const RATE_NS: f64 = 50e6;
/// Time without waiting for the link after which its rate is doubled, so that a link that has
/// become faster is noticed. A guess that was too optimistic is corrected within an epoch or two.
const DOUBT: Duration = Duration::from_secs(5);

/// Directions: indices of pairs.
pub(crate) const READ: usize = 0;
pub(crate) const WRITE: usize = 1;

/// Bytes that all I/O queues of a cluster have moved and waited for. Atomic counters only, because
/// signal handlers report here, too.
#[derive(Debug)]
pub(crate) struct LinkTraffic {
    began: Instant,
    /// Reads and writes.
    ways: [LinkCounters; 2],
}

/// Counters of one direction.
#[derive(Debug, Default)]
struct LinkCounters {
    delivered: AtomicU64,
    waited_ns: AtomicU64,
    waited_bytes: AtomicU64,
}

/// Snapshot of one direction's counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkSnapshot {
    pub(super) delivered: u64,
    pub(super) waited_ns: u64,
    pub(super) waited_bytes: u64,
}

impl Default for LinkTraffic {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            ways: Default::default(),
        }
    }
}

impl LinkTraffic {
    pub(super) fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Counts `bytes` that arrived while an I/O queue waited for `ns`.
    pub(super) fn waited(&self, way: usize, bytes: u64, ns: u64) {
        self.ways[way].waited_bytes.fetch_add(bytes, Relaxed);
        self.ways[way].waited_ns.fetch_add(ns, Relaxed);
    }

    pub(super) fn counts(&self) -> [LinkSnapshot; 2] {
        [READ, WRITE].map(|way| {
            let way = &self.ways[way];
            LinkSnapshot {
                delivered: way.delivered.load(Relaxed),
                waited_ns: way.waited_ns.load(Relaxed),
                waited_bytes: way.waited_bytes.load(Relaxed),
            }
        })
    }
}

/// One I/O queue's requests in flight.
#[derive(Debug)]
pub(crate) struct Watch {
    traffic: Arc<LinkTraffic>,
    ways: [Watched; 2],
    /// Time of the last look.
    looks_ns: u64,
}

#[derive(Debug, Default)]
struct Watched {
    under_way: u32,
    /// Time since which a request has been in flight; `delivered` had its value then.
    since_ns: u64,
    delivered: u64,
    /// Set while the I/O queue sleeps: requests of the current wait that are still in flight.
    slept_on: Cell<Option<u32>>,
}

impl Watch {
    pub(crate) fn new(traffic: Arc<LinkTraffic>) -> Self {
        Self {
            traffic,
            ways: Default::default(),
            looks_ns: 0,
        }
    }

    /// Notes that a request was posted.
    pub(crate) fn posted(&mut self, way: usize) {
        if self.ways[way].under_way == 0 {
            self.restart(way, self.traffic.now_ns());
        }
        self.ways[way].under_way += 1;
    }

    /// Notes that a request has ended.
    pub(crate) fn ended(&mut self, way: usize, bytes: u64) {
        let watched = &mut self.ways[way];
        watched.under_way -= 1;
        // Requests end in the order in which they were posted, or nearly so.
        let left = watched.slept_on.get();
        let left = left.map(|left| left.saturating_sub(1));
        watched.slept_on.set(left);
        let way = &self.traffic.ways[way];
        way.delivered.fetch_add(bytes, Relaxed);
    }

    /// Notes that the I/O queue may sleep until `until`.
    pub(crate) fn sleeps(&self, until: Option<Instant>) {
        if until.is_none_or(|until| until > Instant::now()) {
            for way in &self.ways {
                let left = way.slept_on.get().unwrap_or(way.under_way);
                way.slept_on.set(Some(left));
            }
        }
    }

    /// Notes that the I/O queue begins to look after its requests. The look finds all that have
    /// ended.
    pub(crate) fn looks(&mut self) {
        if self.ways.iter().any(|way| way.under_way > 0) {
            self.looks_ns = self.traffic.now_ns();
        }
    }

    /// Notes that the I/O queue has looked after all its requests.
    pub(crate) fn looked(&mut self) {
        for way in [READ, WRITE] {
            let watched = &self.ways[way];
            // Nothing is in flight, or nothing was before the look began.
            if watched.under_way == 0 || watched.since_ns >= self.looks_ns {
                continue;
            }
            if watched.slept_on.get().is_some_and(|left| left > 0) {
                let delivered = self.traffic.ways[way].delivered.load(Relaxed);
                let bytes = delivered - watched.delivered;
                self.traffic
                    .waited(way, bytes, self.looks_ns - watched.since_ns);
            }
            self.restart(way, self.looks_ns);
        }
    }

    fn restart(&mut self, way: usize, now_ns: u64) {
        let watched = &mut self.ways[way];
        watched.since_ns = now_ns;
        watched.delivered = self.traffic.ways[way].delivered.load(Relaxed);
        watched.slept_on.set(None);
    }
}

/// The rate of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    /// Bytes that were waited for; `ns` is the time of waiting. Older measurements count less.
    bytes: f64,
    ns: f64,
    /// All bytes that were ever waited for.
    bytes_ever: f64,
}

impl Rate {
    /// Counts `bytes` that came while I/O queues waited for `ns`, in an epoch of `wall_ns`.
    pub(super) fn see(&mut self, bytes: f64, ns: f64, wall_ns: f64) {
        let unknown_ns = (wall_ns - ns).max(0.0);
        let doubt = 0.5f64.powf(unknown_ns / DOUBT.as_nanos() as f64);
        // An epoch may wait for many times `RATE_NS`. Something is left even after an outage, so
        // that the rate stays a number.
        let weight = 0.5f64.powf((ns / RATE_NS).min(20.0));
        self.bytes = self.bytes * weight + bytes;
        self.ns = self.ns * weight * doubt + ns;
        self.bytes_ever += bytes;
    }

    /// Returns the time per byte. `None` until [`RATE_BYTES`] have been waited for.
    pub(super) fn ns_per_byte(&self) -> Option<f64> {
        (self.bytes_ever >= RATE_BYTES).then(|| self.ns / self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the watch of an I/O queue with two READs under way, which has just looked.
    fn watch(traffic: &Arc<LinkTraffic>) -> Watch {
        let mut watch = Watch::new(traffic.clone());
        watch.posted(READ);
        watch.posted(READ);
        pass(traffic);
        watch.looks();
        watch.looked();
        watch
    }

    /// Lets the clock go on.
    fn pass(traffic: &LinkTraffic) {
        let now_ns = traffic.now_ns();
        while traffic.now_ns() < now_ns + 1000 {}
    }

    fn waited(traffic: &LinkTraffic) -> (bool, u64) {
        let [read, write] = traffic.counts();
        assert_eq!((write.waited_ns, write.waited_bytes), (0, 0));
        (read.waited_ns > 0, read.waited_bytes)
    }

    #[test]
    fn time_asleep_counts_with_all_that_arrived_meanwhile() {
        let traffic = Arc::default();
        let (mut watch, mut other) = (watch(&traffic), watch(&traffic));
        watch.sleeps(None);
        pass(&traffic);
        other.ended(READ, 70);
        watch.looks();
        watch.ended(READ, 100);
        watch.looked();
        assert_eq!(waited(&traffic), (true, 170));
        assert_eq!(traffic.counts()[READ].delivered, 170);
    }

    #[test]
    fn time_in_which_nobody_looked_or_nothing_was_under_way_says_nothing() {
        // The I/O queue had something else to do, or did not have to wait.
        for until in [None, Some(Instant::now())] {
            let traffic = Arc::default();
            let mut watch = watch(&traffic);
            if until.is_some() {
                watch.sleeps(until);
            }
            pass(&traffic);
            watch.looks();
            watch.ended(READ, 100);
            watch.looked();
            assert_eq!(waited(&traffic), (false, 0));
        }
        // All requests had ended when the I/O queue looked, at an unknown time.
        let traffic = Arc::default();
        let mut drained = watch(&traffic);
        drained.sleeps(None);
        pass(&traffic);
        drained.looks();
        drained.ended(READ, 100);
        drained.ended(READ, 100);
        drained.looked();
        assert_eq!(waited(&traffic), (false, 0));
        // The I/O queue slept before there was anything to wait for.
        let mut idle = Watch::new(traffic.clone());
        idle.sleeps(None);
        idle.posted(READ);
        idle.posted(READ);
        pass(&traffic);
        idle.looks();
        idle.ended(READ, 100);
        idle.looked();
        assert_eq!(waited(&traffic), (false, 0));
    }

    #[test]
    fn what_is_asked_for_after_waking_is_no_proof_that_the_link_was_busy() {
        let traffic = Arc::default();
        let mut watch = watch(&traffic);
        watch.sleeps(None);
        pass(&traffic);
        watch.posted(READ);
        watch.looks();
        watch.ended(READ, 100);
        watch.ended(READ, 100);
        watch.looked();
        assert_eq!(waited(&traffic), (false, 0));
    }

    #[test]
    fn what_looking_finds_to_do_is_not_waiting() {
        let traffic: Arc<LinkTraffic> = Arc::default();
        let began_ns = traffic.now_ns();
        let mut watch = watch(&traffic);
        watch.sleeps(None);
        pass(&traffic);
        watch.looks();
        let woke_ns = traffic.now_ns();
        watch.ended(READ, 100);
        // Verified, decoded and mapped.
        while traffic.now_ns() < woke_ns + 2 * (woke_ns - began_ns) {}
        watch.looked();
        let waited_ns = traffic.counts()[READ].waited_ns;
        assert!((1..=woke_ns - began_ns).contains(&waited_ns), "{waited_ns}");
    }

    #[test]
    fn a_rate_follows_what_is_seen_and_grows_where_nobody_waits() {
        let mut rate = Rate::default();
        assert_eq!(rate.ns_per_byte(), None);
        let second = 1e9;
        // A gigabit per second, and then a tenth of it.
        rate.see(2.5e6, 20e6, 20e6);
        assert_eq!(rate.ns_per_byte(), Some(8.0));
        for _ in 0..5 {
            rate.see(2.5e6, 200e6, 200e6);
        }
        assert!((rate.ns_per_byte().expect("seen") - 80.0).abs() < 4.0);
        for _ in 0..5 {
            rate.see(0.0, 0.0, second);
        }
        assert!((rate.ns_per_byte().expect("seen") - 40.0).abs() < 2.0);
    }

    #[test]
    fn the_rate_of_a_slow_link_stays_known() {
        // 16 Mb/s, in epochs of 10 ms that waited all the time.
        let mut rate = Rate::default();
        for epoch in 0..1000 {
            rate.see(20e3, 10e6, 10e6);
            if epoch > 20 {
                let ns = rate.ns_per_byte().expect("more than enough was waited for");
                assert!((ns - 500.0).abs() < 1.0, "{ns}");
            }
        }
    }

    #[test]
    fn after_an_outage_the_rate_is_a_number_and_soon_the_right_one() {
        let mut rate = Rate::default();
        rate.see(2.5e6, 20e6, 20e6);
        rate.see(0.0, 1e12, 1e12);
        assert!(rate.ns_per_byte().expect("seen").is_finite());
        (0..10).for_each(|_| rate.see(25e6, 200e6, 200e6));
        assert!((rate.ns_per_byte().expect("seen") - 8.0).abs() < 0.1);
    }

    #[test]
    fn time_that_nobody_waited_does_not_make_a_link_faster_that_is_waited_for_again_and_again() {
        for (wait_ns, idle_ns) in [(9e6, 1e6), (1250e6, 140e6)] {
            let mut rate = Rate::default();
            (0..100).for_each(|_| rate.see(wait_ns / 800.0, wait_ns, wait_ns + idle_ns));
            let ns = rate.ns_per_byte().expect("seen");
            assert!((ns / 800.0 - 1.0).abs() < 0.005, "{ns}");
        }
    }
}
