//! [`Mover`]: bytes of extents on their way, one operation at a time.
//!
//! The rule it keeps: a mover waits for servers, so no worker uses one. It has channels of its own,
//! so that I/O queues wait for nothing. The choice of what moves is left to the
//! [repairs](crate::repair), and to the page maps of [named regions](crate::named).

use std::{
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ChannelError, ConnectError, ExtentId, Op, Verb,
    regmem::{RegBuf, RegError},
};
use nix::poll::PollTimeout;

use crate::{groups::Member, place::SlotPlace, pool::SlotPool};

/// Bytes that are copied at a time: as many as a run of pages has.
const PIECE_BYTES: u64 = 512 << 10;

/// Mover of pieces of extents of a pool, one after another.
pub(crate) struct Mover<'a> {
    pool: &'a SlotPool,
    /// Channels by the numbers of the servers, opened when they are needed.
    channels: Vec<Option<Box<dyn Channel<RegBuf>>>>,
}

/// Failure of one operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveError {
    #[error(transparent)]
    Memory(RegError),
    #[error(transparent)]
    Connect(ConnectError),
    #[error(transparent)]
    Channel(ChannelError),
}

impl MoveError {
    /// True if the server does not answer, or not now.
    pub(crate) fn is_silence(&self) -> bool {
        match self {
            Self::Memory(_) => false,
            Self::Connect(_) => true,
            Self::Channel(error) => error.is_transient(),
        }
    }
}

impl<'a> Mover<'a> {
    pub(crate) fn new(pool: &'a SlotPool) -> Self {
        Self {
            pool,
            channels: pool.servers().iter().map(|_| None).collect(),
        }
    }

    pub(crate) fn read(&mut self, place: SlotPlace, len: usize) -> Result<RegBuf, MoveError> {
        let buf = self.buffer(len)?;
        let extent = self.pool.extent(place);
        self.transfer(Verb::Read, (place.server, extent), place.offset, buf)
    }

    pub(crate) fn write(&mut self, place: SlotPlace, piece: &[u8]) -> Result<(), MoveError> {
        let mut buf = self.buffer(piece.len())?;
        buf.as_mut().copy_from_slice(piece);
        let extent = self.pool.extent(place);
        self.transfer(Verb::Write, (place.server, extent), place.offset, buf)
            .map(drop)
    }

    /// Copies pieces of an extent, each given by its start and length, to another extent: at most
    /// `rate` bytes per second.
    ///
    /// # Errors
    /// The error of a server, and the server's number.
    pub(crate) fn copy(
        &mut self,
        pieces: &[(u64, u64)],
        source: Member,
        target: (u8, ExtentId),
        rate: Option<u64>,
    ) -> Result<(), (u8, MoveError)> {
        let source = (source.server, source.id);
        let (began, mut copied_bytes) = (Instant::now(), 0);
        for &(mut offset, mut left) in pieces {
            while left > 0 {
                let len = left.min(PIECE_BYTES);
                let read = self
                    .buffer(len as usize)
                    .and_then(|buf| self.transfer(Verb::Read, source, offset, buf));
                let buf = read.map_err(|error| (source.0, error))?;
                self.transfer(Verb::Write, target, offset, buf)
                    .map_err(|error| (target.0, error))?;
                (offset, left) = (offset + len, left - len);
                copied_bytes += len;
                if let Some(rate) = rate {
                    let due = Duration::from_secs_f64(copied_bytes as f64 / rate as f64);
                    thread::sleep(due.saturating_sub(began.elapsed()));
                }
            }
        }
        Ok(())
    }

    fn buffer(&self, len: usize) -> Result<RegBuf, MoveError> {
        let buf = self.pool.registered.acquire(len);
        buf.map_err(MoveError::Memory)
    }

    /// Carries out one operation, and waits for it. Returns its buffer.
    pub(crate) fn transfer(
        &mut self,
        verb: Verb,
        (server, extent): (u8, ExtentId),
        offset: u64,
        buf: RegBuf,
    ) -> Result<RegBuf, MoveError> {
        let channel = match &mut self.channels[usize::from(server)] {
            Some(channel) => channel,
            none => {
                let channel = self.pool.session(server).channel();
                none.insert(channel.map_err(MoveError::Connect)?)
            }
        };
        let op = Op {
            tag: 0,
            verb,
            extent,
            offset,
            len: buf.as_ref().len() as u32,
            buf,
        };
        assert!(channel.post(op).is_ok(), "a channel takes one operation");
        let mut done = Vec::new();
        while channel.poll(&mut done) == 0 {
            let wait = channel.wait();
            let left = wait.until.map_or(PollTimeout::NONE, |until| {
                let left = until.saturating_duration_since(Instant::now());
                PollTimeout::try_from(left.as_millis() + u128::from(!left.is_zero()))
                    .unwrap_or(PollTimeout::MAX)
            });
            // Whatever the call returns, the channel is polled next.
            let _ = nix::poll::poll(wait.poll_fd().as_mut_slice(), left);
        }
        let completion = done.pop().expect("poll returned one");
        let result = completion.result.map(|()| completion.buf);
        result.map_err(MoveError::Channel)
    }
}
