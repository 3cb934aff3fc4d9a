//! [`Client`]: READs and WRITEs of chunks at one server, one at a time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farpage_bench_kit::pick::mix;
use farpage_fabric::{Channel, Extent, Op, Session, Verb};
use farpage_wire::{Atomic, ExtentId, TierStat};

/// Bytes that a server moves out and in at once, and that a READ here brings at once.
pub(super) const CHUNK: usize = 64 << 10;

/// A client of one server, with the extent that it has written there.
pub(super) struct Client {
    session: Arc<Session>,
    channel: Box<dyn Channel<Vec<u8>>>,
    extent: Extent,
    content: fn(u64, &mut [u8]),
    spare: Option<Vec<u8>>,
    expected: Vec<u8>,
    pub(super) wrong: u64,
}

/// Fills `bytes` with words that do not compress.
pub(super) fn noise(chunk: u64, bytes: &mut [u8]) {
    for (i, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        word.copy_from_slice(&mix((chunk << 20) | i).to_le_bytes());
    }
}

/// Fills `bytes` with words that compress to a third or so.
pub(super) fn smooth(chunk: u64, bytes: &mut [u8]) {
    for (i, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        let low = mix((chunk << 20) | (i / 4)) & 0xffff;
        word.copy_from_slice(&((chunk << 16) | low).to_le_bytes());
    }
}

impl Client {
    pub(super) fn new(
        session: &Arc<Session>,
        bytes: u64,
        content: fn(u64, &mut [u8]),
    ) -> Result<Self> {
        let session = Arc::clone(session);
        let extent = session.grant(bytes)?;
        let channel = session.channel()?;
        let mut client = Self {
            session,
            channel,
            extent,
            content,
            spare: None,
            expected: vec![0; CHUNK],
            wrong: 0,
        };
        for chunk in 0..client.chunks() {
            let mut bytes = vec![0; CHUNK];
            content(chunk, &mut bytes);
            client.operate(Verb::Write, chunk, bytes)?;
        }
        Ok(client)
    }

    pub(super) fn chunks(&self) -> u64 {
        self.extent.bytes / CHUNK as u64
    }

    pub(super) fn operate(&mut self, verb: Verb, chunk: u64, buf: Vec<u8>) -> Result<Vec<u8>> {
        let offset = chunk * CHUNK as u64;
        transfer(&mut *self.channel, verb, self.extent.id, offset, buf)
    }

    /// Returns the microseconds of one READ, whose bytes are compared when the clock has stopped.
    pub(super) fn read(&mut self, chunk: u64) -> Result<f64> {
        let buf = self.spare.take().unwrap_or_else(|| vec![0; CHUNK]);
        let begin = Instant::now();
        let buf = self.operate(Verb::Read, chunk, buf)?;
        let took = begin.elapsed();
        (self.content)(chunk, &mut self.expected);
        self.wrong += u64::from(buf != self.expected);
        self.spare = Some(buf);
        Ok(took.as_secs_f64() * 1e6)
    }

    /// Returns microseconds of round trips: the server's process does atomics itself on any fabric.
    pub(super) fn round_trips(&mut self, count: u64) -> Result<Vec<f64>> {
        let word = self.session.grant_for_atomics(8)?;
        let extent = std::mem::replace(&mut self.extent, word);
        let mut time = |_| {
            let begin = Instant::now();
            self.operate(Verb::Atomic(Atomic::FetchAdd(0)), 0, vec![0; 8])?;
            Ok(begin.elapsed().as_secs_f64() * 1e6)
        };
        let times = (0..count).map(&mut time).collect();
        self.session.release(word.id)?;
        self.extent = extent;
        times
    }

    pub(super) fn tiers(&self) -> Result<TierStat> {
        Ok(self.session.stat()?.tiers)
    }
}

/// Runs one operation to its end.
pub(super) fn transfer(
    channel: &mut dyn Channel<Vec<u8>>,
    verb: Verb,
    extent: ExtentId,
    offset: u64,
    buf: Vec<u8>,
) -> Result<Vec<u8>> {
    let op = Op {
        tag: 0,
        verb,
        extent,
        offset,
        len: buf.len() as u32,
        buf,
    };
    channel.post(op).ok().context("an empty queue is full")?;
    let mut done = Vec::with_capacity(1);
    let until = Instant::now() + Duration::from_secs(10);
    // Polls, since waking takes longer than a READ on some machines.
    while channel.poll(&mut done) == 0 {
        ensure!(Instant::now() < until, "the server does not answer");
        std::hint::spin_loop();
    }
    let done = done.pop().context("it has just ended")?;
    done.result?;
    Ok(done.buf)
}
