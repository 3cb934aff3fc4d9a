//! [`Link`]: makes a fast local fabric behave like a slower network.
//!
//! The rule it keeps: operations go ahead at once and only their completions are held back, so that
//! the measured rate is the link's and not the shaper's. The downside: remote bytes change earlier
//! than on a real slow link.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::{Buf, Busy, Channel, Completion, Op, PollInterest, Verb};

/// Upper bound of operations in flight, including those held back. Without a bound, a fast fabric
/// would pile them up.
const DEPTH: usize = 64;

/// A full-duplex link that the channels of a runtime share: READs and atomics fill one direction,
/// WRITEs the other.
#[derive(Debug)]
pub struct Link {
    bytes_per_s: f64,
    latency: Duration,
    /// Time when the direction has moved everything that was given to it. A signal handler may
    /// post, and the standard library's locks never allocate.
    inbound_free_at: Mutex<Instant>,
    outbound_free_at: Mutex<Instant>,
}

impl Link {
    /// Makes a link that moves `gbps` gigabits per second in each direction and adds `latency_us`
    /// microseconds to every operation.
    ///
    /// # Panics
    /// When `gbps` is not above zero or `latency_us` is below zero.
    pub fn new(gbps: f64, latency_us: f64) -> Self {
        assert!(
            gbps > 0.0 && latency_us >= 0.0,
            "a link of {gbps} Gbit/s and {latency_us} us"
        );
        let now = Instant::now();
        Self {
            bytes_per_s: gbps * 1e9 / 8.0,
            latency: Duration::from_secs_f64(latency_us / 1e6),
            inbound_free_at: Mutex::new(now),
            outbound_free_at: Mutex::new(now),
        }
    }

    /// Takes the time that `bytes` need in the direction of `verb`. Returns the time of arrival.
    fn reserve(&self, verb: Verb, bytes: u32, now: Instant) -> Instant {
        let moving = Duration::from_secs_f64(f64::from(bytes) / self.bytes_per_s);
        let direction = match verb.fetches() {
            true => &self.inbound_free_at,
            false => &self.outbound_free_at,
        };
        let mut free_at = direction.lock().expect("nothing panics under this lock");
        *free_at = (*free_at).max(now) + moving;
        *free_at + self.latency
    }
}

/// A channel whose completions are held back until the link would have delivered them.
pub(crate) struct Shaped<B> {
    inner: Box<dyn Channel<B>>,
    link: Arc<Link>,
    /// The caller's tag and the due time of each operation; its index is the tag that `inner` sees.
    slots: Vec<Option<(u64, Instant)>>,
    free: Vec<usize>,
    /// Operations that ended within and are not yet due: due time and slot, the index in `ended`.
    due: BinaryHeap<Reverse<(Instant, usize)>>,
    ended: Vec<Option<Completion<B>>>,
    scratch: Vec<Completion<B>>,
}

impl<B: Buf> Shaped<B> {
    pub(crate) fn new(inner: Box<dyn Channel<B>>, link: Arc<Link>) -> Self {
        let (slots, free, ended) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            inner,
            link,
            slots,
            free,
            due: BinaryHeap::new(),
            ended,
            scratch: Vec::new(),
        }
    }
}

impl<B: Buf> Channel<B> for Shaped<B> {
    fn post(&mut self, mut op: Op<B>) -> Result<(), Busy<B>> {
        if self.in_flight() == DEPTH {
            return Err(Busy(op));
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.ended.push(None);
            self.slots.len() - 1
        });
        let (tag, verb, bytes) = (op.tag, op.verb, op.len);
        op.tag = slot as u64;
        match self.inner.post(op) {
            Ok(()) => {
                self.slots[slot] = Some((tag, self.link.reserve(verb, bytes, Instant::now())));
                Ok(())
            }
            Err(Busy(mut op)) => {
                op.tag = tag;
                self.free.push(slot);
                Err(Busy(op))
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        while self.inner.poll(&mut self.scratch) > 0 {}
        for completion in self.scratch.drain(..) {
            let slot = completion.tag as usize;
            let (tag, due) = self.slots[slot].expect("a completion belongs to a posted operation");
            // An error says that the link is gone: there is nothing to wait for.
            let due = if completion.result.is_ok() {
                due
            } else {
                Instant::now()
            };
            self.ended[slot] = Some(Completion { tag, ..completion });
            self.due.push(Reverse((due, slot)));
        }
        let now = Instant::now();
        while let Some(Reverse((due, slot))) = self.due.peek().copied()
            && due <= now
        {
            self.due.pop();
            self.slots[slot] = None;
            self.free.push(slot);
            done.extend(self.ended[slot].take());
        }
        done.len() - before
    }

    /// Returns false even if the fabric's WRITEs are in order: bytes are placed before the link has
    /// moved them, so a WRITE that announces others has to wait for their completions.
    fn writes_in_order(&self) -> bool {
        false
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        let mut wait = self.inner.wait();
        let due = self.due.peek().map(|Reverse((due, _))| *due);
        wait.until = match (wait.until, due) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        SessionOptions,
        sim::{SimConfig, SimServer},
    };

    #[test]
    fn each_direction_has_the_rate_and_every_operation_the_latency() {
        let link = Link::new(8.0, 50.0);
        let now = Instant::now();
        let after_us = |due: Instant| (due - now).as_micros();
        assert_eq!(after_us(link.reserve(Verb::Read, 1_000_000, now)), 1050);
        assert_eq!(after_us(link.reserve(Verb::Read, 1_000_000, now)), 2050);
        assert_eq!(after_us(link.reserve(Verb::Write, 500_000, now)), 550);
        let later = now + Duration::from_millis(10);
        assert_eq!(after_us(link.reserve(Verb::Read, 1_000, later)), 10_051);
    }

    #[test]
    fn channels_share_the_link_and_wait_says_when() {
        let link = Arc::new(Link::new(1.0, 0.0));
        let options = SessionOptions {
            link: Some(Arc::clone(&link)),
            ..SessionOptions::default()
        };
        let session = SimServer::new(SimConfig::new(1))
            .session(&options)
            .expect("alive");
        let extent = session.grant(1 << 20).expect("room").id;
        let begun = Instant::now();
        let mut channels = [0; 2].map(|_| session.channel::<Vec<u8>>().expect("alive"));
        for (tag, channel) in (7..).zip(&mut channels) {
            let op = Op {
                tag,
                verb: Verb::Write,
                extent,
                offset: 0,
                len: 1 << 20,
                buf: vec![1; 1 << 20],
            };
            assert!(channel.post(op).is_ok());
        }
        let mut done = Vec::new();
        for (tag, channel) in (7..).zip(&mut channels) {
            while channel.poll(&mut done) == 0 {
                let until = channel.wait().until.expect("in flight");
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
            assert_eq!(
                (done.last().map(|last| last.tag), channel.in_flight()),
                (Some(tag), 0)
            );
        }
        // Two WRITEs of 2^20 bytes at 125 bytes per microsecond, one behind the other.
        assert!(
            begun.elapsed() >= Duration::from_micros(16_777),
            "{:?}",
            begun.elapsed()
        );
    }
}
