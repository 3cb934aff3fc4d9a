//! [`Mover`]: bytes of extents on their way, one operation at a time.
//!
//! The rule it keeps: a mover waits for servers, so no worker uses one. It has channels of its own,
//! so that I/O queues wait for nothing. The choice of what moves is left to the
//! [repairs](crate::repair), and to the page maps of [named regions](crate::named).

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ChannelError, ConnectError, ExtentId, Op, Verb,
    regmem::{RegBuf, RegError},
};
use nix::poll::PollTimeout;

use crate::{
    groups::{ExtentGroup, Member, SetView},
    parity::{add_product, positions},
    place::SlotPlace,
    pool::SlotPool,
};

/// Bytes that are copied at a time: as many as a run of pages has.
pub(crate) const PIECE_BYTES: u64 = 512 << 10;

/// Mover of pieces of extents of a pool, one after another.
pub(crate) struct Mover<'a> {
    pool: &'a SlotPool,
    /// Channels by the numbers of the servers, opened when they are needed.
    channels: Vec<Option<Box<dyn Channel<RegBuf>>>>,
    /// Extents in which a WRITE that seemed lost may still land.
    doubtful: Vec<(u8, ExtentId)>,
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

/// Upper bound of the bytes per second that are moved.
pub(crate) struct Pace {
    rate: Option<u64>,
    began: Instant,
    moved_bytes: u64,
}

impl Pace {
    /// Begins at most `rate` bytes per second. `None`: no bound.
    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self {
            rate,
            began: Instant::now(),
            moved_bytes: 0,
        }
    }

    /// Counts `bytes`, and sleeps until they may have been moved.
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.moved_bytes += bytes;
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.moved_bytes as f64 / rate as f64);
            thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
    }
}

/// Blocks that are compared when an extent is made anew.
const BLOCK_BYTES: usize = 4096;

/// Number of blocks of a piece up to which the damage may be that of another extent.
const BLOCKS_FEW: usize = 4;

/// Way to tell if bytes of an extent are damaged, or those of another of its parity set.
enum Doubt<'a> {
    /// Bytes that were computed from other sources: where these agree, the extent is damaged.
    Sources(&'a [u8]),
    /// Number of blocks that differ in a piece, since the set has no other sources: a few may
    /// be those of another extent. The page's hash tells when it is filled.
    Number,
}

impl Doubt<'_> {
    /// Puts blocks of `old` into the `computed` piece where the damage may be that of another
    /// extent. Returns their number.
    fn resolve(self, computed: &mut [u8], old: &[u8]) -> usize {
        let blocks = || old.chunks(BLOCK_BYTES).enumerate();
        let range = |at: usize, block: &[u8]| at * BLOCK_BYTES..at * BLOCK_BYTES + block.len();
        let differing: Vec<_> = blocks()
            .map(|(at, block)| range(at, block))
            .filter(|range| computed[range.clone()] != old[range.clone()])
            .collect();
        let is_doubtful = |range: &Range<usize>| match self {
            Self::Sources(again) => computed[range.clone()] != again[range.clone()],
            Self::Number => differing.len() <= BLOCKS_FEW,
        };
        let kept: Vec<_> = differing.iter().filter(|it| is_doubtful(it)).collect();
        for range in &kept {
            computed[(*range).clone()].copy_from_slice(&old[(*range).clone()]);
        }
        kept.len()
    }
}

/// Cuts `bytes` bytes into pieces that are copied at a time: offset and length.
pub(crate) fn pieces_of(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let pieces = (0..bytes).step_by(PIECE_BYTES as usize);
    pieces.map(move |at| (at, PIECE_BYTES.min(bytes - at) as usize))
}

impl<'a> Mover<'a> {
    pub(crate) fn new(pool: &'a SlotPool) -> Self {
        Self {
            pool,
            channels: pool.servers().iter().map(|_| None).collect(),
            doubtful: Vec::new(),
        }
    }

    /// True if a WRITE of this mover may still land in an extent.
    pub(crate) fn may_land_in(&self, extent: (u8, ExtentId)) -> bool {
        self.doubtful.contains(&extent)
    }

    /// Reads a place from the first of its Good copies that has the right bytes. `None` if none of
    /// those that can be read has.
    ///
    /// # Errors
    /// That of the last copy that cannot be read, if there is one.
    pub(crate) fn read_right(
        &mut self,
        place: SlotPlace,
        len: usize,
        is_right: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<RegBuf>, MoveError> {
        let group = self.pool.group(place);
        let mut failure = None;
        for (_, member) in group.iter().flat_map(ExtentGroup::good) {
            match self.read_piece((member.server, member.id), place.offset, len) {
                Ok(buf) if is_right(buf.as_ref()) => return Ok(Some(buf)),
                Ok(_) => {}
                Err((server, error)) => {
                    if error.is_silence() {
                        self.pool.failed(server);
                    }
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// Writes a place in all of its Good copies that answer. The others are no longer Good.
    ///
    /// # Errors
    /// That of the last copy, if none is complete.
    pub(crate) fn write_copies(&mut self, place: SlotPlace, piece: &[u8]) -> Result<(), MoveError> {
        let mut buf = self.buffer(piece.len())?;
        buf.as_mut().copy_from_slice(piece);
        let group = self
            .pool
            .group(place)
            .expect("an allocated slot has a group");
        let (mut done, mut failure) = (0, None);
        for (at, member) in group.good() {
            let extent = (member.server, member.id);
            match self.write_piece(extent, place.offset, buf) {
                Ok(back) => {
                    buf = back;
                    done |= 1 << at;
                }
                Err((server, error)) => {
                    if error.is_silence() {
                        self.pool.failed(server);
                    }
                    failure = Some(error);
                    buf = self.buffer(piece.len())?;
                    buf.as_mut().copy_from_slice(piece);
                }
            }
        }
        match failure {
            None => Ok(()),
            Some(_) if self.pool.has_copies() && self.pool.settle_copies(place, done) => Ok(()),
            Some(error) => Err(error),
        }
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
        let mut pace = Pace::new(rate);
        for &(start, bytes) in pieces {
            for (offset, len) in pieces_of(bytes) {
                let buf = self.read_piece(source, start + offset, len)?;
                self.write_piece(target, start + offset, buf)?;
                pace.moved(len as u64);
            }
        }
        Ok(())
    }

    /// Computes the bytes of an extent of a parity set from its `sources`, by position as bits, and
    /// writes them to another extent: at most `rate` bytes per second.
    ///
    /// # Errors
    /// The error of a server, and the server's number.
    pub(crate) fn decode(
        &mut self,
        bytes: u64,
        (view, sources): (&SetView, u16),
        target: (u8, ExtentId),
        rate: Option<u64>,
    ) -> Result<(), (u8, MoveError)> {
        let mut pace = Pace::new(rate);
        for (offset, len) in pieces_of(bytes) {
            let sum = self.decode_piece((view, sources), target.0, (offset, len))?;
            self.write_piece(target, offset, sum)?;
            pace.moved(len as u64);
        }
        Ok(())
    }

    /// Makes a damaged extent of a parity set anew: at most `rate` bytes per second. Each piece is
    /// computed from the set's `sources`, and compared with the extent. Ranges that are `damaged`,
    /// each given by its start and length, and what the server cannot read, are those computed.
    /// Elsewhere one of the extents is damaged that no fill has found: [`Doubt`] decides. Returns
    /// the number of blocks that differ and stay.
    ///
    /// # Errors
    /// The error of a server, and the server's number.
    pub(crate) fn mend(
        &mut self,
        bytes: u64,
        (member, damaged): (Member, &[(u64, u64)]),
        (view, sources): (&SetView, u16),
        target: (u8, ExtentId),
        rate: Option<u64>,
    ) -> Result<usize, (u8, MoveError)> {
        let mut pace = Pace::new(rate);
        // Sources that are not all the same tell if one of them is damaged.
        let first = sources & sources.wrapping_neg();
        let others = view.sources(first, |it| self.pool.is_usable(it.server));
        let mut kept = 0;
        for (offset, len) in pieces_of(bytes) {
            let mut piece = self.decode_piece((view, sources), target.0, (offset, len))?;
            match self.read_piece((member.server, member.id), offset, len) {
                Err((_, error)) if !error.is_silence() => {}
                old => {
                    let mut old = old?;
                    for &(start, bytes) in damaged {
                        let (from, to) =
                            (start.max(offset), (start + bytes).min(offset + len as u64));
                        if from < to {
                            let range = (from - offset) as usize..(to - offset) as usize;
                            old.as_mut()[range.clone()].copy_from_slice(&piece.as_ref()[range]);
                        }
                    }
                    if old.as_ref() != piece.as_ref() {
                        let again = others.map(|others| {
                            self.decode_piece((view, others), target.0, (offset, len))
                        });
                        let again = again.transpose()?;
                        let doubt = match &again {
                            Some(again) => Doubt::Sources(again.as_ref()),
                            None => Doubt::Number,
                        };
                        kept += doubt.resolve(piece.as_mut(), old.as_ref());
                    }
                }
            }
            self.write_piece(target, offset, piece)?;
            pace.moved(len as u64);
        }
        Ok(kept)
    }

    /// Computes a piece of an extent of a parity set, for the server `target`.
    fn decode_piece(
        &mut self,
        (view, sources): (&SetView, u16),
        target: u8,
        (offset, len): (u64, usize),
    ) -> Result<RegBuf, (u8, MoveError)> {
        let recipe = view.set.code.recipe(view.at, sources);
        let recipe = recipe.expect("as many sources as columns");
        let mut sum = self.buffer(len).map_err(|error| (target, error))?;
        sum.as_mut().fill(0);
        for at in positions(sources) {
            let source = view.home(at).expect("a source is there");
            let piece = self.read_piece((source.server, source.id), offset, len)?;
            add_product(sum.as_mut(), piece.as_ref(), recipe[usize::from(at)]);
        }
        Ok(sum)
    }

    /// Reads a piece of an extent.
    ///
    /// # Errors
    /// The error of the server, and its number.
    pub(crate) fn read_piece(
        &mut self,
        extent: (u8, ExtentId),
        offset: u64,
        len: usize,
    ) -> Result<RegBuf, (u8, MoveError)> {
        let buf = self.buffer(len);
        let read = buf.and_then(|buf| self.transfer(Verb::Read, extent, offset, buf));
        read.map_err(|error| (extent.0, error))
    }

    /// Writes a piece of an extent. Returns its buffer.
    ///
    /// # Errors
    /// The error of the server, and its number.
    pub(crate) fn write_piece(
        &mut self,
        extent: (u8, ExtentId),
        offset: u64,
        piece: RegBuf,
    ) -> Result<RegBuf, (u8, MoveError)> {
        let written = self.transfer(Verb::Write, extent, offset, piece);
        written.map_err(|error| {
            if matches!(&error, MoveError::Channel(error) if error.is_transient()) {
                self.doubtful.push(extent);
            }
            (extent.0, error)
        })
    }

    pub(crate) fn buffer(&self, len: usize) -> Result<RegBuf, MoveError> {
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
        if completion.result.is_err() {
            // An error may be the end of the channel.
            self.channels[usize::from(server)] = None;
        }
        let result = completion.result.map(|()| completion.buf);
        result.map_err(MoveError::Channel)
    }
}
