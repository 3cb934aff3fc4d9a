//! [`RdmaStream`]: the control connection, a byte stream over SEND and RECEIVE; and the server's end of a data connection, on which nothing is said.
//!
//! The rule it keeps: a message is sent only into a buffer that the peer has offered. Each side offers [`SLOTS`] buffers; each message
//! begins with the number of buffers offered anew since the last one (credits). Two of them are kept for messages that carry nothing but credits,
//! of which no more can be under way: one is owed for every half of the others.

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{Secret, SessionId};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;

use super::{
    server::Domains,
    verbs::{COMPLETIONS, Depths, Done, EventKind, Failure, Pair, READS_IN_FLIGHT_MAX, Verb, Work},
};

/// Buffers that each side offers, and as many to send from.
const SLOTS: usize = 8;

/// Messages with bytes in them that may be under way: the others are for credits alone.
const CREDITS: usize = SLOTS - 2;

/// One message. Control messages are mostly shorter; a manifest takes many.
const SLOT_BYTES: usize = 16 << 10;

/// Credits, little endian.
const HEADER_BYTES: usize = 4;

/// Marks the tags of buffers offered; the rest is the buffer's number.
const RECEIVE: u64 = 1 << 32;

/// How long the last messages may take to be acknowledged when a stream is closed.
const LINGER: Duration = Duration::from_millis(500);

/// What a control connection's pair needs.
pub(super) const CONTROL: Depths = Depths {
    sends: SLOTS,
    receives: SLOTS,
    reads_in_flight: READS_IN_FLIGHT_MAX,
};

/// Its registered memory.
pub(super) const CONTROL_BYTES: usize = 2 * SLOTS * SLOT_BYTES;

/// What the server's end of a data connection needs: it posts nothing.
pub(super) const PASSIVE: Depths = Depths {
    sends: 1,
    receives: 1,
    reads_in_flight: READS_IN_FLIGHT_MAX,
};

/// A connection with an adapter on each side.
#[derive(Debug)]
pub(crate) struct RdmaStream {
    inner: Mutex<Inner>,
    /// Closed here, or by the peer.
    over: AtomicBool,
    /// Readable when `over`.
    bell: EventFd,
    /// Readable when the connection manager has something to say, or `over`.
    ended: Epoll,
    /// As above, or when messages came or went.
    ready: Epoll,
    side: Side,
}

/// Which end this is.
#[derive(Debug)]
pub(super) enum Side {
    Client,
    Server {
        domains: Arc<Domains>,
        /// Of a data connection.
        claim: Option<(SessionId, Secret)>,
    },
}

#[derive(Debug)]
struct Inner {
    pair: Pair,
    /// Places to send from, by number.
    vacant: Vec<usize>,
    /// Messages that the peer can take.
    credits: usize,
    /// Buffers offered anew that the peer does not know of.
    owed: usize,
    /// Messages that came: buffer, and what of it has not been read.
    received: VecDeque<(usize, Range<usize>)>,
    failed: Option<Failure>,
}

impl RdmaStream {
    /// A stream over a pair that is about to be connected. Made before, so that the first message finds its buffer.
    pub(super) fn new(mut pair: Pair, side: Side) -> io::Result<Self> {
        let is_control = !matches!(side, Side::Server { claim: Some(_), .. });
        let (ended, ready) = (epoll()?, epoll()?);
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        watch(&ended, pair.id())?;
        watch(&ended, &bell)?;
        watch(&ready, &ended.0)?;
        watch(&ready, pair.completions())?;
        if is_control {
            for slot in 0..SLOTS {
                pair.post_receive(RECEIVE | slot as u64, receive_place(slot))?;
            }
        }
        Ok(Self {
            inner: Mutex::new(Inner {
                pair,
                vacant: (0..SLOTS).collect(),
                credits: CREDITS,
                owed: 0,
                received: VecDeque::with_capacity(SLOTS),
                failed: None,
            }),
            over: AtomicBool::new(false),
            bell,
            ended,
            ready,
            side,
        })
    }

    /// What is done with the pair: asking for the connection, granting it.
    pub(super) fn with_pair<T>(&self, act: impl FnOnce(&Pair) -> T) -> T {
        act(&self.inner.lock().pair)
    }

    /// The session that the client of a data connection claimed and proved; on the server only.
    pub(crate) fn claim(&self) -> Option<(SessionId, Secret)> {
        match &self.side {
            Side::Server { claim, .. } => *claim,
            Side::Client => None,
        }
    }

    pub(super) fn domains(&self) -> Option<&Arc<Domains>> {
        match &self.side {
            Side::Server { domains, .. } => Some(domains),
            Side::Client => None,
        }
    }

    /// Reads what is there; `WouldBlock` when nothing is, and then the stream wakes who sleeps on it; 0 at the end.
    pub(crate) fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        let mut inner = self.inner.lock();
        inner.advance_or_arm(|inner| !inner.received.is_empty() || inner.failed.is_some())?;
        if let Some((slot, left)) = inner.received.front_mut() {
            let bytes = left.len().min(buf.len());
            let (slot, from) = (*slot, left.start);
            left.start += bytes;
            let is_read = left.start == left.end;
            inner.pair.slab().copy_out(from, &mut buf[..bytes]);
            if is_read {
                inner.received.pop_front();
                inner.offer(slot)?;
                inner.owed += 1;
                inner.advance()?;
            }
            return Ok(bytes);
        }
        let failed = inner.failed;
        drop(inner);
        match failed {
            // A peer that closes flushes our buffers, which is the end that a socket reports as 0 bytes.
            Some(failure) if failure.is_flush() => Ok(0),
            Some(failure) => Err(io::Error::new(
                io::ErrorKind::ConnectionReset,
                failure.describe(),
            )),
            None if self.has_ended() => Ok(0),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Writes what fits into one message; `WouldBlock` while the peer can take none.
    pub(crate) fn write(&self, buf: &[u8]) -> io::Result<usize> {
        let mut inner = self.inner.lock();
        let can_send = |inner: &Inner| inner.credits > 0 && !inner.vacant.is_empty();
        inner.advance_or_arm(|inner| can_send(inner) || inner.failed.is_some())?;
        if let Some(failure) = inner.failed {
            return Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                failure.describe(),
            ));
        }
        if can_send(&inner) {
            let bytes = &buf[..buf.len().min(SLOT_BYTES - HEADER_BYTES)];
            inner.credits -= 1;
            inner.send(bytes)?;
            return Ok(bytes.len());
        }
        drop(inner);
        match self.has_ended() {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Whether either side has closed the connection, or the adapter is gone.
    pub(crate) fn has_ended(&self) -> bool {
        let inner = self.inner.lock();
        while let Ok(Some(event)) = inner.pair.id().next_event() {
            if event.kind != EventKind::Established {
                self.end();
            }
        }
        drop(inner);
        self.over.load(Ordering::Acquire)
    }

    /// Closes the connection, after what was written has arrived or [`LINGER`]; whoever sleeps on it wakes.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LINGER;
        loop {
            let mut inner = self.inner.lock();
            let is_sent = inner.advance().is_err()
                || inner.failed.is_some()
                || inner.vacant.len() == SLOTS
                || self.over.load(Ordering::Acquire);
            if is_sent || Instant::now() >= until {
                inner.pair.disconnect();
                break;
            }
            drop(inner);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.end();
    }

    fn end(&self) {
        self.over.store(true, Ordering::Release);
        // Fails only when the counter is full, and then the bell is heard.
        let _ = self.bell.write(1);
    }

    /// Readable when [`has_ended`](Self::has_ended) may have become true.
    pub(crate) fn ended_fd(&self) -> BorrowedFd<'_> {
        self.ended.0.as_fd()
    }
}

impl AsFd for RdmaStream {
    /// Readable when reading or writing may get on, whichever could not.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }
}

impl Inner {
    /// Moves on; where that does not bring `what` is waited for, arms the queue and looks once more.
    fn advance_or_arm(&mut self, what: impl Fn(&Self) -> bool) -> io::Result<()> {
        if what(self) {
            return Ok(());
        }
        self.advance()?;
        if !what(self) {
            self.pair.take_wakeups();
            self.pair.arm()?;
            self.advance()?;
        }
        Ok(())
    }

    /// Takes what has completed, and says what is owed when it is time.
    fn advance(&mut self) -> io::Result<()> {
        loop {
            let mut done = [None; COMPLETIONS];
            let count = self.pair.poll(&mut done)?;
            for done in done.into_iter().flatten() {
                self.complete(done)?;
            }
            if count < COMPLETIONS {
                break;
            }
        }
        if self.owed >= CREDITS / 2 && !self.vacant.is_empty() && self.failed.is_none() {
            self.send(&[])?;
        }
        Ok(())
    }

    fn complete(&mut self, done: Done) -> io::Result<()> {
        match done.result {
            Err(failure) => {
                self.failed.get_or_insert(failure);
            }
            Ok(()) if done.tag & RECEIVE == 0 => self.vacant.push(done.tag as usize),
            Ok(()) => {
                let slot = (done.tag ^ RECEIVE) as usize;
                let place = receive_place(slot);
                let mut header = [0; HEADER_BYTES];
                self.pair.slab().copy_out(place.start, &mut header);
                // A peer that lies about credits only finds its own messages without a buffer.
                self.credits = (self.credits + u32::from_le_bytes(header) as usize).min(CREDITS);
                if done.bytes > HEADER_BYTES {
                    let bytes = place.start + HEADER_BYTES..place.start + done.bytes;
                    self.received.push_back((slot, bytes));
                } else {
                    // It took none of the peer's credits, so none is owed.
                    self.offer(slot)?;
                }
            }
        }
        Ok(())
    }

    fn offer(&mut self, slot: usize) -> io::Result<()> {
        self.pair
            .post_receive(RECEIVE | slot as u64, receive_place(slot))
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let slot = self.vacant.pop().expect("looked at by the caller");
        let start = (SLOTS + slot) * SLOT_BYTES;
        let owed = std::mem::take(&mut self.owed) as u32;
        self.pair.slab().copy_in(start, &owed.to_le_bytes());
        self.pair.slab().copy_in(start + HEADER_BYTES, bytes);
        let place = start..start + HEADER_BYTES + bytes.len();
        let work = Work {
            tag: slot as u64,
            verb: Verb::Send,
            local: self.pair.slab().local(&place),
            signalled: true,
        };
        // SAFETY: the place lies in the pair's slab.
        unsafe { self.pair.post(&[work]) }
    }
}

fn receive_place(slot: usize) -> Range<usize> {
    slot * SLOT_BYTES..(slot + 1) * SLOT_BYTES
}

fn epoll() -> io::Result<Epoll> {
    Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)
}

fn watch(epoll: &Epoll, fd: impl AsFd) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?)
}
