//! The seam of this crate: [`Channel`], one queue pair with its completion queue.
//!
//! The rule it keeps: a buffer moves into the operation and comes back in its completion, so that
//! no code can touch memory that the transport is using. The meaning of the bytes is left to the
//! callers.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use farpage_wire::{Atomic, ExtentId, data::WORD_BYTES};
use nix::poll::{PollFd, PollFlags};

use crate::regmem::RegBuf;

farpage_wire::debug_as_display!(ChannelError);

/// A buffer for operations. It stands for the same bytes until it is dropped.
pub trait Buf: AsRef<[u8]> + AsMut<[u8]> + Send + 'static {
    /// Returns the registered buffer whose first bytes these are. A channel over an adapter moves a
    /// registered buffer without a copy, and copies any other. Channels without an adapter do not
    /// ask.
    fn registered(&self) -> Option<&RegBuf> {
        None
    }
}

impl Buf for Vec<u8> {}

impl Buf for RegBuf {
    fn registered(&self) -> Option<&RegBuf> {
        Some(self)
    }
}

/// Kind of an operation, seen from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Copies remote memory to the buffer.
    Read,
    /// Copies the buffer to remote memory.
    Write,
    /// An atomic change of the 8 bytes of remote memory at an offset that is a multiple of 8. The
    /// word's old value comes back in the buffer: 8 bytes, little-endian as on the processors that
    /// farpage runs on.
    ///
    /// The change is atomic with respect to the atomics of all channels of the session. Over RDMA
    /// the server's adapter executes it, so it is atomic only with other atomics through that
    /// adapter, and not with the server's processors (`IBV_ATOMIC_HCA`). Over shared memory, TCP
    /// and the simulation a processor executes it, so threads of the server may use the word, too
    /// (`lock` instructions). WRITEs of the same word are not atomic with it on any fabric. By
    /// contract a READ of the word may be torn, but it is not on any machine that we know.
    ///
    /// Where WRITEs are [in order](Channel::writes_in_order), an atomic takes place after the
    /// WRITEs that were posted before it. Operations that are posted after it may take place before
    /// it, unless they are posted after its completion. An atomic that ends in
    /// [`Disconnected`](ChannelError::Disconnected) or [`TimedOut`](ChannelError::TimedOut) has
    /// taken place, still will at a server that was only slow, or never will. The channel never
    /// repeats an atomic. A caller that repeats one must find out first.
    Atomic(Atomic),
}

impl Verb {
    /// True if remote bytes come back into the buffer.
    pub(crate) fn fetches(self) -> bool {
        !matches!(self, Self::Write)
    }
}

/// One operation on remote memory: the first `len` bytes of `buf` against `extent` at `offset`.
#[derive(Debug)]
pub struct Op<B> {
    /// Number chosen by the caller and handed back in the completion. The channel does not read it.
    pub tag: u64,
    /// Kind of the operation.
    pub verb: Verb,
    /// Extent that the operation reads or changes.
    pub extent: ExtentId,
    /// Offset in the extent, in bytes.
    pub offset: u64,
    /// Length in bytes: at most the buffer's length and
    /// [`MAX_OP_BYTES`](farpage_wire::MAX_OP_BYTES), and exactly 8 for an atomic.
    pub len: u32,
    /// Buffer of the bytes. It moves in here and comes back in the [`Completion`].
    pub buf: B,
}

impl<B> Op<B> {
    /// Ends the operation.
    pub(crate) fn complete(self, result: Result<(), ChannelError>) -> Completion<B> {
        Completion {
            tag: self.tag,
            verb: self.verb,
            buf: self.buf,
            result,
        }
    }
}

/// A full queue. It hands the operation back, to be posted again after a [`Channel::poll`].
#[derive(Debug)]
pub struct Busy<B>(pub Op<B>);

/// The end of one operation. Completions may come in another order than their operations.
#[derive(Debug)]
pub struct Completion<B> {
    /// The operation's tag.
    pub tag: u64,
    /// The operation's verb.
    pub verb: Verb,
    /// The operation's buffer. After a failed READ or atomic its bytes are unspecified.
    pub buf: B,
    /// `Ok` if the operation took place.
    pub result: Result<(), ChannelError>,
}

/// Reason why an operation did not take place.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer is gone or the connection broke. This channel is dead: every operation on it fails
    /// so from now on. A channel opened anew from the same session may work.
    #[error("connection to {endpoint} lost: {reason}")]
    Disconnected {
        /// The server's endpoint.
        endpoint: String,
        /// Error of the connection.
        reason: String,
    },
    /// The session has ended, and its leases with it. Repeating the operation does not help.
    #[error("{endpoint} does not keep this program's memory any more: {reason}")]
    Lost {
        /// The server's endpoint.
        endpoint: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// The server did not answer within the operation deadline. This channel is dead.
    #[error("{endpoint} did not answer within {deadline:?}")]
    TimedOut {
        /// The server's endpoint.
        endpoint: String,
        /// The deadline that passed.
        deadline: Duration,
    },
    /// The address is not in a lease of this client, or the offset of an atomic is no multiple of
    /// 8. Repeating the operation does not help.
    #[error(
        "{endpoint} refused {len} bytes at {offset} of extent {extent}: not leased to this client, out of its range, or for an atomic no multiple of 8"
    )]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// The extent asked for.
        extent: ExtentId,
        /// The offset asked for.
        offset: u64,
        /// The length asked for.
        len: u32,
    },
    /// The server lends more than its memory, and no memory came free for the bytes in time, or its
    /// disk was too slow. This channel is dead. The operation may be repeated on a new one.
    #[error(
        "{endpoint} lends more than its memory, and none came free in time, or its disk was too slow: raise its --memory"
    )]
    NoRoom {
        /// The server's endpoint.
        endpoint: String,
    },
    /// The server moved the bytes to its spill file and cannot read them back as they were. This
    /// channel is dead. Repeating the operation does not help.
    #[error(
        "{endpoint} cannot read {len} bytes at {offset} of extent {extent} back from its spill file: its disk failed or changed them"
    )]
    Unreadable {
        /// The server's endpoint.
        endpoint: String,
        /// The extent asked for.
        extent: ExtentId,
        /// The offset asked for.
        offset: u64,
        /// The length asked for.
        len: u32,
    },
    /// The number that a READ [waits for](Channel::post_when) was not there in time. The channel
    /// goes on.
    #[error("{endpoint} has not announced number {least} yet")]
    NotYet {
        /// The server's endpoint.
        endpoint: String,
        /// Least number that the READ waits for.
        least: u64,
    },
    /// The adapter cannot do this operation. The channel goes on.
    #[error("the way to {endpoint} has no atomics: {reason}")]
    NoAtomics {
        /// The server's endpoint.
        endpoint: String,
        /// RDMA device that has no atomics.
        reason: String,
    },
}

impl ChannelError {
    /// True if the same operation may succeed on a new channel. READs and WRITEs may be repeated
    /// then; an atomic may have taken place already.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Disconnected { .. } | Self::TimedOut { .. } | Self::NoRoom { .. } => true,
            Self::Lost { .. }
            | Self::Refused { .. }
            | Self::Unreadable { .. }
            | Self::NotYet { .. }
            | Self::NoAtomics { .. } => false,
        }
    }
}

/// Events to sleep on until [`Channel::poll`] may have something to do.
#[derive(Debug, Default)]
pub struct PollInterest<'a> {
    /// The descriptor to poll, if there is one.
    pub fd: Option<BorrowedFd<'a>>,
    /// True if a readable descriptor is to wake the sleeper.
    pub readable: bool,
    /// True if a writable descriptor is to wake the sleeper: bytes of posted operations are unsent.
    pub writable: bool,
    /// Time of the next poll at the latest: the operation deadline, or the end of a completion that
    /// a shaped link holds back.
    pub until: Option<Instant>,
}

impl<'a> PollInterest<'a> {
    /// Returns the descriptor with its events, of which there may be none.
    pub fn poll_fd(&self) -> Option<PollFd<'a>> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.readable);
        events.set(PollFlags::POLLOUT, self.writable);
        self.fd.map(|fd| PollFd::new(fd, events))
    }
}

/// One queue pair with its completion queue; used by one thread at a time.
pub trait Channel<B: Buf>: Send {
    /// Queues an operation. Does not wait for the peer.
    ///
    /// # Errors
    /// [`Busy`] with the operation when the queue is full. On a dead channel the operation is
    /// accepted and completes with an error.
    ///
    /// # Panics
    /// When `len` is 0, exceeds the buffer or
    /// [`MAX_OP_BYTES`](farpage_wire::MAX_OP_BYTES), or is not 8 for an atomic.
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>>;

    /// Posts like [`post`](Self::post), and wakes the peer once a WRITE has been placed, if the
    /// fabric has immediate data and the peer expects it. Default: wakes nobody.
    ///
    /// # Errors
    /// The errors of [`post`](Self::post).
    ///
    /// # Panics
    /// When [`post`](Self::post) does.
    fn post_notifying(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.post(op)
    }

    /// Posts a READ of a [`Board`](crate::areas::Board) that takes place as soon as the number at
    /// the board's beginning is `least` or more. Operations behind it wait, too. The READ ends in
    /// [`NotYet`](ChannelError::NotYet) if the number is late, well before the operation's
    /// deadline.
    ///
    /// Default: the READ does not wait, since the fabric has no processor at the other end that
    /// could wait. [`waits_for_numbers`](Self::waits_for_numbers) says so.
    ///
    /// # Errors
    /// The errors of [`post`](Self::post).
    ///
    /// # Panics
    /// When [`post`](Self::post) does.
    fn post_when(&mut self, op: Op<B>, _least: u64) -> Result<(), Busy<B>> {
        self.post(op)
    }

    /// True if [`post_when`](Self::post_when) waits. Default: false.
    fn waits_for_numbers(&self) -> bool {
        false
    }

    /// Moves bytes as far as possible without blocking. Appends the operations that have ended to
    /// `done` and returns their number.
    ///
    /// Every posted operation ends exactly once, on a dead channel with an error.
    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize;

    /// Polls like [`poll`](Self::poll), for a caller that has nothing else to do. May block for
    /// `patience` until something comes, if that saves a system call. Default: does not block.
    fn poll_within(&mut self, done: &mut Vec<Completion<B>>, _patience: Duration) -> usize {
        self.poll(done)
    }

    /// True if WRITEs are placed in the order in which they were posted, each with all bytes before
    /// the next. Default: false.
    fn writes_in_order(&self) -> bool {
        false
    }

    /// Returns the number of operations posted and not yet handed back by [`poll`](Self::poll).
    fn in_flight(&self) -> usize;

    /// Returns the events to sleep on, together with other descriptors. With nothing in flight,
    /// every field is empty.
    fn wait(&self) -> PollInterest<'_>;
}

/// Several channels that may share a queue: posted to one by one, polled and waited for together,
/// by one thread at a time.
pub(crate) trait Channels<B: Buf>: Send {
    /// Posts `op` on channel `number`, like [`Channel::post`].
    fn post(&mut self, number: usize, op: Op<B>) -> Result<(), Busy<B>>;

    /// Polls all channels, like [`Channel::poll`]. Calls `ended` for each operation that has ended,
    /// with its channel's number.
    fn poll(&mut self, ended: &mut dyn FnMut(usize, Completion<B>));

    /// Returns the number of operations of all channels that have not been handed back.
    fn in_flight(&self) -> usize;

    /// Returns the events to sleep on, like [`Channel::wait`].
    fn wait(&self) -> PollInterest<'_>;
}

/// One set of [`Channels`] of an engine that has several.
pub(crate) struct Group<B> {
    pub(crate) channels: Box<dyn Channels<B>>,
    /// The number of each channel in the engine.
    pub(crate) numbers: Vec<usize>,
}

/// A channel with a queue of its own.
pub(crate) struct SingleChannel<B> {
    channel: Box<dyn Channel<B>>,
    scratch: Vec<Completion<B>>,
}

impl<B: Buf> SingleChannel<B> {
    pub(crate) fn new(channel: Box<dyn Channel<B>>) -> Self {
        Self {
            channel,
            scratch: Vec::new(),
        }
    }
}

impl<B: Buf> Channels<B> for SingleChannel<B> {
    fn post(&mut self, _number: usize, op: Op<B>) -> Result<(), Busy<B>> {
        self.channel.post(op)
    }

    fn poll(&mut self, ended: &mut dyn FnMut(usize, Completion<B>)) {
        self.channel.poll(&mut self.scratch);
        self.scratch
            .drain(..)
            .for_each(|completion| ended(0, completion));
    }

    fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    fn wait(&self) -> PollInterest<'_> {
        self.channel.wait()
    }
}

/// Asserts the promises of every caller of [`Channel::post`]. A longer operation would read beyond
/// its buffer.
pub(crate) fn check_len<B: Buf>(op: &Op<B>) {
    let most = op
        .buf
        .as_ref()
        .len()
        .min(farpage_wire::MAX_OP_BYTES as usize);
    assert!(
        op.len > 0 && op.len as usize <= most,
        "operation of {} bytes with room for {most}",
        op.len
    );
    assert!(
        !matches!(op.verb, Verb::Atomic(_)) || op.len == WORD_BYTES,
        "an atomic of {} bytes",
        op.len
    );
}

/// True if the operation's offset is a multiple of 8, or the operation is no atomic.
pub(crate) fn is_aligned<B>(op: &Op<B>) -> bool {
    !matches!(op.verb, Verb::Atomic(_)) || op.offset.is_multiple_of(u64::from(WORD_BYTES))
}

pub(crate) fn refused<B>(endpoint: &str, op: &Op<B>) -> ChannelError {
    ChannelError::Refused {
        endpoint: endpoint.to_owned(),
        extent: op.extent,
        offset: op.offset,
        len: op.len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "an atomic of 4 bytes")]
    fn an_atomic_has_eight_bytes() {
        check_len(&Op {
            tag: 0,
            verb: Verb::Atomic(Atomic::FetchAdd(1)),
            extent: ExtentId(1),
            offset: 0,
            len: 4,
            buf: vec![0; 8],
        });
    }
}
