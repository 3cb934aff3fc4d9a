//! [`Control`]: the messages of a control connection, in both directions through a ring at the
//! receiver.
//!
//! The rule it keeps: nothing is sent that the peer has no room for, and a peer that places wrong
//! bytes harms only itself. A connection has a protection domain of its own on either side, so that
//! its key opens its ring and nothing else; sent bytes pass through memory without a key. The
//! request for the connection and its acceptance carry the keys of the rings, so both sides can
//! WRITE as soon as the connection is there.
//!
//! A receiver sleeps until a completion wakes it, since the WRITE of a tail carries immediate data.
//! That takes a receive request at the receiver, of which there are [`ANNOUNCEMENTS`]: a sender
//! makes no more announcements until it knows that all before were taken, and the receiver takes a
//! message only after it has replaced the receive that its announcement took.

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{ExtentId, control::RemoteKey};

use super::{
    bounce::{Bounce, Segment},
    reasons::explain_pair,
    verbs::{
        self, COMPLETIONS, Cq, Depths, Domain, Failure, Id, LocalMemory, Pair, Pd,
        READS_IN_FLIGHT_MAX, WorkRequest,
    },
};
use crate::{
    Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb,
    exchange::ring::{
        HEADER_BYTES, RingMemory, RingPlace, RingReceiver, RingSender, STREAM_MESSAGE_BYTES,
        SendError,
    },
    regmem::{Access, RegBuf, RegPool, RegPoolOptions, Registrar},
};

/// Bytes of a ring with its header. Control messages are mostly shorter than a hundredth of them; a
/// manifest goes through in many parts.
const RING_BYTES: usize = 64 << 10;

/// Layout of both rings of a connection. The peers tell each other where they are.
const PLACE: RingPlace = RingPlace {
    extent: ExtentId(0),
    offset: 0,
    capacity: RING_BYTES - HEADER_BYTES,
};

/// Bytes of the memory that sent messages pass through.
const BOUNCE_BYTES: usize = 32 << 10;

/// Upper bound of announcements that the peer has not heard yet.
const ANNOUNCEMENTS: usize = 32;

/// Depth of the send queue. A message takes two WRITEs, or three around the end of the ring;
/// posting to a full queue goes on when an operation has ended.
const SENDS: usize = 16;

/// Time after which a peer that has taken too little is asked again.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(1);

/// Tag of the receives that announcements take.
const ANNOUNCED: u64 = u64::MAX;

/// One end of a control connection.
pub(super) struct Control {
    // Dropped first: the queue pair goes before the memory that the peer reaches through it.
    sender: RingSender<Carrier>,
    receiver: RingReceiver,
    key: RemoteKey,
    /// The message that is being read; its first `read` bytes have been.
    message: Vec<u8>,
    read: usize,
    /// Announcements that may be made before the peer is known to have taken all.
    announcements: usize,
    /// Time of the last question to the peer, and the position up to which it had taken bytes then.
    asked: Option<(Instant, u64)>,
}

impl Control {
    /// Makes an end for a connection that is resolved or asked for. Messages are gathered in memory
    /// of `plain`.
    ///
    /// # Errors
    /// A text for the user that wants the connection.
    pub(super) fn new(id: Id, plain: &RegPool) -> Result<Self, String> {
        let device = id.device().expect("a resolved id has a device");
        let pd = Pd::new(device).map_err(|error| explain_pair(&error))?;
        let pool = |slab_bytes, access| {
            let registrar: Arc<dyn Registrar> = Arc::new(Domain(Arc::clone(&pd)));
            let options = RegPoolOptions {
                slab_bytes,
                access,
                ..RegPoolOptions::default()
            };
            RegPool::new([registrar], options)
        };
        let ring = pool(RING_BYTES, Access::Remote)
            .acquire(RING_BYTES)
            .map_err(|error| error.to_string())?;
        let keys = ring.keys(pd.domain()).map_err(|error| error.to_string())?;
        let key = RemoteKey {
            address: ring.as_ptr() as u64,
            rkey: keys.expect("the pool serves the domain").rkey,
        };
        let bounce = pool(BOUNCE_BYTES, Access::Local);
        let memory =
            LocalMemory::new(&bounce, &pd, BOUNCE_BYTES).map_err(|error| error.to_string())?;
        let carrier = Carrier::new(id, pd, memory)?;
        Ok(Self {
            sender: RingSender::new(Box::new(carrier), plain, PLACE),
            receiver: RingReceiver::new(RingMemory::registered(ring), PLACE),
            key,
            message: Vec::new(),
            read: 0,
            announcements: ANNOUNCEMENTS,
            asked: None,
        })
    }

    /// Returns the key by which the peer finds this end's ring.
    pub(super) fn key(&self) -> RemoteKey {
        self.key
    }

    /// Notes the key of the peer's ring. A peer that lies gets its own connection closed, by the
    /// adapter.
    pub(super) fn meet(&mut self, peer: RemoteKey) {
        self.sender.channel_mut().peer = peer;
    }

    pub(super) fn pair(&self) -> &Pair {
        &self.sender.channel().pair
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.sender.channel().failed
    }

    /// True if all sent messages have arrived.
    pub(super) fn is_sent(&self) -> bool {
        self.sender.is_idle()
    }

    /// Reads bytes that the peer has sent. `None` if there are none; the next completion then
    /// wakes.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        if self.read == self.message.len() && !self.take()? {
            self.arm()?;
            if !self.take()? {
                return Ok(None);
            }
        }
        let bytes = buf.len().min(self.message.len() - self.read);
        buf[..bytes].copy_from_slice(&self.message[self.read..][..bytes]);
        self.read += bytes;
        Ok(Some(bytes))
    }

    /// Takes the next announced message, if there is one. An announcement without a message is no
    /// fault of the peer: the next tail may be half placed, and its own announcement will wake us.
    /// More than [`ANNOUNCEMENTS`] untaken announcements are a fault.
    fn take(&mut self) -> io::Result<bool> {
        self.advance()?;
        match self.sender.channel().arrivals {
            0 => return Ok(false),
            1..=ANNOUNCEMENTS => {}
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the peer announces messages that it does not send",
                ));
            }
        }
        (self.read, self.message) = (0, Vec::new());
        let is_there = self
            .receiver
            .receive(&mut self.message)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if is_there {
            self.sender.channel_mut().arrivals -= 1;
        }
        Ok(is_there)
    }

    /// Sends as much of `buf` as fits into one message. `None` while the peer has no room, which is
    /// asked for again after [`ASK_AGAIN`].
    ///
    /// # Errors
    /// No memory. A connection that is lost is a [`failure`](Self::failure).
    pub(super) fn write(&mut self, buf: &[u8]) -> io::Result<Option<usize>> {
        self.advance_or_arm(Self::has_room)?;
        if !self.has_room() {
            // Asks at once if the peer has taken something since the last time; a peer that takes
            // nothing costs little.
            let consumed = self.sender.consumed();
            let is_time = |(at, then): (Instant, u64)| consumed > then || at.elapsed() >= ASK_AGAIN;
            if self.asked.is_none_or(is_time) {
                self.sender.ask().map_err(io::Error::other)?;
                self.asked = Some((Instant::now(), consumed));
            }
            return Ok(None);
        }
        let bytes = &buf[..buf.len().min(STREAM_MESSAGE_BYTES)];
        let sent = self.sender.send(bytes).and_then(|()| self.sender.flush());
        match sent {
            // Lost on the way: the thread that waits for an answer hears of the failure.
            Ok(()) | Err(SendError::Lost(_)) => {
                self.announcements -= 1;
                Ok(Some(bytes.len()))
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Takes completions. Renews the announcements once the peer has taken all.
    pub(super) fn advance(&mut self) -> io::Result<()> {
        match self.sender.progress() {
            Ok(()) | Err(SendError::Lost(_)) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        if self.sender.is_taken() {
            self.announcements = ANNOUNCEMENTS;
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.announcements > 0 && self.sender.free() >= STREAM_MESSAGE_BYTES + 16
    }

    /// Advances. If `what` is still false, arms the queue and advances once more.
    fn advance_or_arm(&mut self, what: impl Fn(&Self) -> bool) -> io::Result<()> {
        self.advance()?;
        if !what(self) {
            self.arm()?;
            self.advance()?;
        }
        Ok(())
    }

    /// Arms the queue, so that the next completion wakes.
    fn arm(&mut self) -> io::Result<()> {
        let queue = self.pair().queue();
        queue.take_wakeups();
        queue.arm()
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("carrier", self.sender.channel())
            .finish_non_exhaustive()
    }
}

/// Channel of a ring's sender over a queue pair: WRITEs and READs of the peer's ring, in their
/// order. All of them report their end.
struct Carrier {
    pair: Pair,
    peer: RemoteKey,
    bounce: Bounce,
    /// Operations in flight, each with the memory that stands for its buffer.
    ops: VecDeque<(Op<RegBuf>, Segment)>,
    /// Announcements of the peer that were heard and whose messages were not taken.
    arrivals: usize,
    failed: Option<Failure>,
}

impl Carrier {
    fn new(id: Id, pd: Arc<Pd>, memory: LocalMemory) -> Result<Self, String> {
        let depths = Depths {
            sends: SENDS,
            receives: ANNOUNCEMENTS,
            reads_in_flight: READS_IN_FLIGHT_MAX,
            inline: true,
        };
        let mut pair = Cq::new(pd.device(), depths.completions())
            .and_then(|queue| Pair::new(id, pd, queue, depths, Some(memory)))
            .map_err(|error| explain_pair(&error))?;
        for _ in 0..ANNOUNCEMENTS {
            pair.post_receive(ANNOUNCED).map_err(|error| {
                format!("the RDMA device takes no receives without a buffer, which WRITE with immediate data needs: {error}")
            })?;
        }
        Ok(Self {
            pair,
            peer: RemoteKey {
                address: 0,
                rkey: 0,
            },
            bounce: Bounce::new(BOUNCE_BYTES),
            ops: VecDeque::with_capacity(SENDS),
            arrivals: 0,
            failed: None,
        })
    }

    fn hand_over(&mut self, op: Op<RegBuf>, notify: bool) -> Result<(), Busy<RegBuf>> {
        if self.ops.len() == SENDS {
            return Err(Busy(op));
        }
        let Some(segment) = self.bounce.take(op.len as usize) else {
            return Err(Busy(op));
        };
        if self.failed.is_some() {
            // The operation ends with the next poll. Nothing may arrive behind what was not sent.
            self.ops.push_back((op, segment));
            return Ok(());
        }
        let (address, rkey) = (self.peer.address.wrapping_add(op.offset), self.peer.rkey);
        let memory = self.pair.memory();
        let opcode = if op.verb == Verb::Write {
            memory.copy_in(segment.bytes.start, &op.buf.as_ref()[..op.len as usize]);
            match notify {
                true => verbs::Opcode::WriteNotify { address, rkey },
                false => verbs::Opcode::Write { address, rkey },
            }
        } else {
            verbs::Opcode::Read { address, rkey }
        };
        let work = WorkRequest {
            tag: 0,
            opcode,
            local: memory.local(&segment.bytes),
            signalled: true,
        };
        // SAFETY: the segment lies in the memory that the pair owns.
        if unsafe { self.pair.post(&[work]) }.is_err() {
            self.failed = Some(Failure::REFUSED);
        }
        self.ops.push_back((op, segment));
        Ok(())
    }

    /// Ends the oldest operation with `result`.
    fn end(&mut self, done: &mut Vec<Completion<RegBuf>>, result: Result<(), ChannelError>) {
        let (mut op, segment) = self
            .ops
            .pop_front()
            .expect("a report belongs to an operation");
        if op.verb != Verb::Write && result.is_ok() {
            let bytes = &mut op.buf.as_mut()[..op.len as usize];
            self.pair.memory().copy_out(segment.bytes.start, bytes);
        }
        self.bounce.give_back(&segment);
        done.push(op.complete(result));
    }
}

impl Channel<RegBuf> for Carrier {
    fn post(&mut self, op: Op<RegBuf>) -> Result<(), Busy<RegBuf>> {
        self.hand_over(op, false)
    }

    fn post_notifying(&mut self, op: Op<RegBuf>) -> Result<(), Busy<RegBuf>> {
        self.hand_over(op, true)
    }

    fn poll(&mut self, done: &mut Vec<Completion<RegBuf>>) -> usize {
        let before = done.len();
        // A failed carrier ends its operations below; the adapter's later reports count no more.
        let is_over = self.failed.is_some();
        loop {
            let mut reports = [None; COMPLETIONS];
            let Ok(count) = self.pair.queue().poll(&mut reports) else {
                self.failed.get_or_insert(Failure::FLUSH);
                break;
            };
            for report in reports.into_iter().flatten() {
                match report.result {
                    Err(failure) => {
                        self.failed.get_or_insert(failure);
                    }
                    Ok(()) if report.tag == ANNOUNCED => {
                        self.arrivals += 1;
                        if self.pair.post_receive(ANNOUNCED).is_err() {
                            self.failed.get_or_insert(Failure::REFUSED);
                        }
                    }
                    Ok(()) if is_over => {}
                    Ok(()) => self.end(done, Ok(())),
                }
            }
            if count < COMPLETIONS {
                break;
            }
        }
        if let Some(failure) = self.failed {
            while !self.ops.is_empty() {
                let error = ChannelError::Disconnected {
                    endpoint: "the peer".to_owned(),
                    reason: failure.describe(),
                };
                self.end(done, Err(error));
            }
        }
        done.len() - before
    }

    fn writes_in_order(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        PollInterest {
            fd: Some(self.pair.queue().as_fd()),
            readable: true,
            ..PollInterest::default()
        }
    }
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier")
            .field("pair", &self.pair)
            .field("in_flight", &self.ops.len())
            .field("arrivals", &self.arrivals)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
