//! [`RingSender`]: sends without waiting for the receiver.
//!
//! The rule it keeps: no byte is overwritten before it was taken, and none is announced before it
//! was placed. A full ring is a value; the caller decides when to try again.

use std::{collections::VecDeque, time::Duration};

use super::layout::{
    CONSUMED_AT, HEADER_BYTES, LENGTH_BYTES, Notifier, RingPlace, WORD_BYTES, room_of, sealed,
    unsealed,
};
use crate::{
    Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb,
    regmem::{RegBuf, RegError, RegPool},
};

farpage_wire::debug_as_display!(SendError);

/// Upper bound of a WRITE that gathers messages: a network moves that much in a few microseconds.
const SEGMENT_BYTES: usize = 16 << 10;

/// Reason why a message was not sent. No part of it was, unless the connection is lost.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The receiver has not taken enough yet: call [`RingSender::progress`] and try again.
    #[error("the ring is full: the receiver has not taken what was sent")]
    Full,
    /// The message is larger than the ring.
    #[error(
        "a message of {bytes} bytes does not fit into a ring of {capacity}: make the ring larger or the message smaller"
    )]
    TooLong {
        /// The message's length.
        bytes: usize,
        /// The ring's capacity, of which a message takes 8 to 15 bytes more than its length.
        capacity: usize,
    },
    /// The connection is lost, with all messages that were not taken. A new channel needs a new
    /// ring.
    #[error("the ring's connection is lost: {0}")]
    Lost(ChannelError),
    /// The pool has no memory to send from.
    #[error(transparent)]
    Memory(#[from] RegError),
}

/// One sender's end of a ring.
pub struct RingSender<C: ?Sized = dyn Channel<RegBuf>> {
    channel: Box<C>,
    pool: RegPool,
    place: RingPlace,
    /// Notifier of placed messages.
    notifier: Option<Notifier>,
    /// Bytes of all messages so far.
    written: u64,
    /// Bytes of `written` that went into WRITEs; the rest is in `staged`.
    posted: u64,
    /// Tail that the caller asked for. `announced` is the tail that is placed or on its way.
    wanted: u64,
    announced: u64,
    /// Bytes that the receiver has taken, as far as is known here.
    consumed: u64,
    /// Buffer of the next WRITE, with the number of its bytes so far.
    staged: Option<(RegBuf, usize)>,
    /// Buffers of the WRITEs after `staged`.
    spare: Vec<RegBuf>,
    /// Operations that the channel has not taken yet, in order.
    backlog: VecDeque<(Op<RegBuf>, How)>,
    /// Operations of the caller that have ended.
    others: VecDeque<Completion<RegBuf>>,
    data_in_flight: usize,
    tails_in_flight: usize,
    asking: bool,
    dead: Option<ChannelError>,
    scratch: Vec<Completion<RegBuf>>,
}

/// Way of posting an operation.
#[derive(Clone, Copy, Debug)]
enum How {
    Plain,
    /// An operation that wakes a sleeping receiver. Used for the tail only.
    Notifying,
    /// A READ that waits until a board's number is this or more.
    When(u64),
}

/// Tags of the sender's own operations.
const DATA: u64 = 0;
const TAIL: u64 = 1;
const CREDIT: u64 = 2;
/// Offset that is added to the tags of the caller's operations.
const OTHERS: u64 = 3;

impl<C: Channel<RegBuf> + ?Sized> RingSender<C> {
    /// Makes a sender into a ring that its receiver has made. `channel` must have no other user.
    ///
    /// # Panics
    /// If offset or capacity are no multiples of 64, or the capacity is 0.
    pub fn new(channel: Box<C>, pool: &RegPool, place: RingPlace) -> Self {
        place.check();
        Self {
            channel,
            pool: pool.clone(),
            place,
            notifier: None,
            written: 0,
            posted: 0,
            wanted: 0,
            announced: 0,
            consumed: 0,
            staged: None,
            spare: Vec::new(),
            backlog: VecDeque::new(),
            others: VecDeque::new(),
            data_in_flight: 0,
            tails_in_flight: 0,
            asking: false,
            dead: None,
            scratch: Vec::new(),
        }
    }

    /// Sets `notifier`, which is notified whenever messages have been placed. Default: none.
    pub fn with_notifier(mut self, notifier: Notifier) -> Self {
        self.notifier = Some(notifier);
        self
    }

    /// Adds a message to those that travel with the next [`flush`](Self::flush). Never waits. Many
    /// small messages make one WRITE.
    ///
    /// # Errors
    /// [`SendError`]. When the ring is [`Full`](SendError::Full), earlier messages are on their
    /// way, and so is the READ that asks how much the receiver has taken.
    pub fn send(&mut self, message: &[u8]) -> Result<(), SendError> {
        let (room, capacity) = (room_of(message.len()), self.place.capacity);
        if room > capacity {
            return Err(SendError::TooLong {
                bytes: message.len(),
                capacity,
            });
        }
        if self.free() < room {
            self.flush()?;
            self.ask()?;
            self.progress()?;
            if self.free() < room {
                return Err(SendError::Full);
            }
        }
        self.reserve(room)?;
        self.append(&(message.len() as u64).to_ne_bytes());
        self.append(message);
        self.append(&[0; 8][..room - LENGTH_BYTES - message.len()]);
        self.written += room as u64;
        Ok(())
    }

    /// Sends the added messages and announces them.
    ///
    /// # Errors
    /// [`SendError::Lost`], [`SendError::Memory`].
    pub fn flush(&mut self) -> Result<(), SendError> {
        self.hand_over()?;
        self.progress()
    }

    /// Posts the added messages like [`flush`](Self::flush), but without progress. Operations that
    /// follow until the next [`progress`](Self::progress) may then travel together with them.
    ///
    /// # Errors
    /// [`SendError::Lost`], [`SendError::Memory`].
    pub fn hand_over(&mut self) -> Result<(), SendError> {
        self.post_staged();
        self.wanted = self.written;
        self.announce()
    }

    /// Posts an operation of the caller's on the ring's channel, behind all that was handed over.
    /// If it is a WRITE, messages that are sent later are announced after it has been placed.
    /// [`ended`](Self::ended) returns its completion.
    ///
    /// # Panics
    /// When [`Channel::post`] does.
    pub fn operate(&mut self, op: Op<RegBuf>) {
        self.enqueue_other(op, How::Plain);
    }

    /// Posts an operation like [`operate`](Self::operate), by [`Channel::post_when`].
    ///
    /// # Panics
    /// When [`Channel::post`] does.
    pub fn operate_when(&mut self, op: Op<RegBuf>, least: u64) {
        self.enqueue_other(op, How::When(least));
    }

    /// Takes one of the caller's operations that have ended, if there is one.
    /// [`progress`](Self::progress) lets them end.
    pub fn ended(&mut self) -> Option<Completion<RegBuf>> {
        self.others.pop_front()
    }

    /// Returns [`Channel::waits_for_numbers`] of the ring's channel.
    pub fn waits_for_numbers(&self) -> bool {
        self.channel.waits_for_numbers()
    }

    /// Returns [`Channel::writes_in_order`] of the ring's channel.
    pub fn writes_in_order(&self) -> bool {
        self.channel.writes_in_order()
    }

    fn enqueue_other(&mut self, mut op: Op<RegBuf>, how: How) {
        if op.verb == Verb::Write {
            self.data_in_flight += 1;
        }
        op.tag += OTHERS;
        self.enqueue(op, how);
    }

    /// Lets operations make progress. Never waits.
    ///
    /// # Errors
    /// [`SendError::Lost`], [`SendError::Memory`].
    pub fn progress(&mut self) -> Result<(), SendError> {
        self.advance(None)
    }

    /// Makes progress like [`progress`](Self::progress), by [`Channel::poll_within`].
    ///
    /// # Errors
    /// [`SendError::Lost`], [`SendError::Memory`].
    pub fn progress_within(&mut self, patience: Duration) -> Result<(), SendError> {
        self.advance(Some(patience))
    }

    fn advance(&mut self, mut patience: Option<Duration>) -> Result<(), SendError> {
        let mut ended = std::mem::take(&mut self.scratch);
        loop {
            self.post_backlog();
            let count = match patience.take() {
                Some(patience) => self.channel.poll_within(&mut ended, patience),
                None => self.channel.poll(&mut ended),
            };
            if count == 0 {
                break;
            }
            for completion in ended.drain(..) {
                self.complete(completion);
            }
        }
        self.scratch = ended;
        self.announce()
    }

    /// Returns the ring's channel.
    #[cfg(feature = "rdma")]
    pub(crate) fn channel(&self) -> &C {
        &self.channel
    }

    /// Returns the number of bytes that the receiver has taken so far, as far as is known.
    #[cfg(feature = "rdma")]
    pub(crate) fn consumed(&self) -> u64 {
        self.consumed
    }

    #[cfg(feature = "rdma")]
    pub(crate) fn channel_mut(&mut self) -> &mut C {
        &mut self.channel
    }

    /// Returns the events to sleep on until [`progress`](Self::progress) may have something to do.
    pub fn wait(&self) -> PollInterest<'_> {
        self.channel.wait()
    }

    /// True if all added messages have been placed and announced.
    pub fn is_idle(&self) -> bool {
        self.announced == self.written && self.data_in_flight + self.tails_in_flight == 0
    }

    /// Returns the number of operations that have not ended.
    pub fn in_flight(&self) -> usize {
        self.channel.in_flight() + self.backlog.len()
    }

    /// True if the receiver has taken all messages, as far as is known. [`ask`](Self::ask) brings
    /// news.
    pub fn is_taken(&self) -> bool {
        self.consumed == self.written
    }

    /// Returns the free bytes, as far as is known. A message takes 8 to 15 bytes beside its length.
    pub fn free(&self) -> usize {
        self.place.capacity - (self.written - self.consumed) as usize
    }

    /// Returns the length of the longest WRITE at `position` that stays within the ring.
    fn segment_bytes(&self, position: u64) -> usize {
        let begin = (position % self.place.capacity as u64) as usize;
        SEGMENT_BYTES.min(self.place.capacity - begin)
    }

    /// Acquires buffers for `bytes` more bytes, so that no message is cut off half way.
    fn reserve(&mut self, bytes: usize) -> Result<(), RegError> {
        let staged = self.staged.as_ref();
        let mut room = staged.map_or(0, |(_, len)| self.segment_bytes(self.posted) - len);
        let mut next = self.posted + staged.map_or(0, |(_, len)| (len + room) as u64);
        let mut buffers = 0;
        while room < bytes {
            let segment = self.segment_bytes(next);
            (room, next, buffers) = (room + segment, next + segment as u64, buffers + 1);
        }
        while self.spare.len() < buffers {
            self.spare.push(self.pool.acquire(SEGMENT_BYTES)?);
        }
        Ok(())
    }

    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (mut buf, len) = self.staged.take().unwrap_or_else(|| {
                let buf = self.spare.pop().expect("`reserve` saw to it");
                (buf, 0)
            });
            let room = self.segment_bytes(self.posted) - len;
            let now;
            (now, bytes) = bytes.split_at(bytes.len().min(room));
            buf.as_mut()[len..][..now.len()].copy_from_slice(now);
            self.staged = Some((buf, len + now.len()));
            if now.len() == room {
                self.post_staged();
            }
        }
    }

    fn post_staged(&mut self) {
        if let Some((buf, len)) = self.staged.take() {
            let begin = self.posted % self.place.capacity as u64;
            self.posted += len as u64;
            self.data_in_flight += 1;
            self.post(DATA, Verb::Write, HEADER_BYTES as u64 + begin, len, buf);
        }
    }

    /// Posts the WRITE of the tail behind the bytes. Where WRITEs are placed in order, it goes at
    /// once. Elsewhere it waits until the bytes, and the tail before it, have been placed.
    fn announce(&mut self) -> Result<(), SendError> {
        if let Some(error) = &self.dead {
            return Err(SendError::Lost(error.clone()));
        }
        let may_go =
            self.channel.writes_in_order() || self.data_in_flight + self.tails_in_flight == 0;
        if may_go && self.announced < self.wanted {
            let mut buf = self.pool.acquire(WORD_BYTES)?;
            buf.as_mut().copy_from_slice(&sealed(self.wanted));
            self.announced = self.wanted;
            self.tails_in_flight += 1;
            self.post(TAIL, Verb::Write, 0, WORD_BYTES, buf);
        }
        Ok(())
    }

    /// Posts a READ of the position up to which the receiver has taken, unless one is under way.
    ///
    /// # Errors
    /// [`SendError::Memory`]. A lost connection is noticed by [`progress`](Self::progress).
    pub fn ask(&mut self) -> Result<(), SendError> {
        if !self.asking {
            let buf = self.pool.acquire(WORD_BYTES)?;
            self.asking = true;
            self.post(CREDIT, Verb::Read, CONSUMED_AT as u64, WORD_BYTES, buf);
        }
        Ok(())
    }

    fn post(&mut self, tag: u64, verb: Verb, at: u64, len: usize, buf: RegBuf) {
        let op = Op {
            tag,
            verb,
            extent: self.place.extent,
            offset: self.place.offset + at,
            len: len as u32,
            buf,
        };
        let how = match tag {
            TAIL => How::Notifying,
            _ => How::Plain,
        };
        self.enqueue(op, how);
    }

    fn enqueue(&mut self, op: Op<RegBuf>, how: How) {
        self.backlog.push_back((op, how));
        self.post_backlog();
    }

    fn post_backlog(&mut self) {
        while let Some((op, how)) = self.backlog.pop_front() {
            let posted = match how {
                How::Notifying => self.channel.post_notifying(op),
                How::When(least) => self.channel.post_when(op, least),
                How::Plain => self.channel.post(op),
            };
            if let Err(Busy(op)) = posted {
                self.backlog.push_front((op, how));
                return;
            }
        }
    }

    fn complete(&mut self, completion: Completion<RegBuf>) {
        match completion.tag {
            DATA => self.data_in_flight -= 1,
            TAIL => self.tails_in_flight -= 1,
            CREDIT => self.asking = false,
            tag => {
                if completion.verb == Verb::Write {
                    self.data_in_flight -= 1;
                    // The bytes that this WRITE should have placed must not be announced.
                    if let Err(error) = &completion.result {
                        self.dead.get_or_insert(error.clone());
                    }
                }
                let tag = tag - OTHERS;
                self.others.push_back(Completion { tag, ..completion });
                return;
            }
        }
        if let Err(error) = completion.result {
            self.dead.get_or_insert(error);
            return;
        }
        match (completion.tag, &self.notifier) {
            (TAIL, Some(notifier)) => notifier.notify(),
            (CREDIT, _) => {
                // A word that was just being placed is read again when it is needed. Bytes that
                // were not announced cannot have been taken.
                if let Some(consumed) = unsealed(completion.buf.as_ref())
                    && consumed <= self.announced
                {
                    self.consumed = self.consumed.max(consumed);
                }
            }
            _ => {}
        }
    }
}
