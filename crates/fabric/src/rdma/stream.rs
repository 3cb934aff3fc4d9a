//! [`RdmaStream`]: a connection with an adapter on each side, as sessions and servers know it: a
//! byte stream for control messages, or the server's end of a data connection, on which nothing is
//! said.
//!
//! The rule it keeps: a thread that sleeps on a stream wakes when either side ends it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{
    Secret, SessionId,
    control::{Hello, Purpose},
};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;

use super::{
    control::Control,
    domains::Domains,
    verbs::{COMPLETIONS, Depths, EventKind, Pair, READS_IN_FLIGHT_MAX},
};

/// Upper bound of the wait for the last messages' acknowledgement when a stream is closed.
const LINGER: Duration = Duration::from_millis(500);

/// Depths of the server's end of a data connection, which posts nothing.
pub(super) const PASSIVE: Depths = Depths {
    sends: 1,
    receives: 1,
    reads_in_flight: READS_IN_FLIGHT_MAX,
    inline: false,
};

/// Depths of a server's end if WRITEs may notify: a receive for each that the server has not heard
/// of. A client that is further ahead waits for its adapter, which tries again for four seconds.
pub(super) const LISTENING: Depths = Depths {
    receives: 256,
    ..PASSIVE
};

/// Makes a server's end of a data connection ready for WRITEs that notify, if it `hears` of them.
pub(super) fn listen(mut pair: Pair, hears: bool) -> io::Result<Pair> {
    if hears {
        for _ in 0..LISTENING.receives {
            pair.post_receive(0)?;
        }
        pair.queue().arm()?;
    }
    Ok(pair)
}

/// A connection with an adapter on each side.
#[derive(Debug)]
pub(crate) struct RdmaStream {
    line: Mutex<StreamKind>,
    /// True once this side or the peer has closed the connection.
    over: AtomicBool,
    /// Readable when `over`.
    wake: EventFd,
    /// Readable when the connection manager has something to say, or `over`.
    ended: Epoll,
    /// Readable when `ended` is, or when messages came or went.
    ready: Epoll,
    side: Side,
}

/// Side of the connection that a stream is on.
#[derive(Debug)]
pub(super) enum Side {
    Client,
    Server {
        domains: Arc<Domains>,
        /// Session, secret and line of a data connection.
        claim: Option<(SessionId, Secret, u64)>,
        /// True if the WRITEs of a data connection may notify.
        hears: bool,
    },
}

/// Use of a connection.
#[derive(Debug)]
pub(super) enum StreamKind {
    Control(Box<Control>),
    /// The client's adapter READs and WRITEs, and no messages travel. The server may hear of WRITEs
    /// that notify.
    Data(Pair),
}

impl StreamKind {
    pub(super) fn pair(&self) -> &Pair {
        match self {
            Self::Control(control) => control.pair(),
            Self::Data(pair) => pair,
        }
    }

    fn control(&mut self) -> &mut Control {
        match self {
            Self::Control(control) => control,
            Self::Data(_) => unreachable!("nothing is said on a data connection"),
        }
    }
}

impl RdmaStream {
    /// Makes a stream over a `line` that is connected, or about to be.
    pub(super) fn new(line: StreamKind, side: Side) -> io::Result<Self> {
        let (ended, ready) = (epoll()?, epoll()?);
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        watch(&ended, line.pair().id())?;
        watch(&ended, &wake)?;
        watch(&ready, &ended.0)?;
        watch(&ready, line.pair().queue().as_fd())?;
        Ok(Self {
            line: Mutex::new(line),
            over: AtomicBool::new(false),
            wake,
            ended,
            ready,
            side,
        })
    }

    /// Runs `act` with the pair, to grant the connection or to ask for its device.
    pub(super) fn with_pair<T>(&self, act: impl FnOnce(&Pair) -> T) -> T {
        act(self.line.lock().pair())
    }

    /// Accepts a data connection: from here on the client may WRITE. Tells the client whether
    /// WRITEs may notify.
    pub(crate) fn accept(&self) -> io::Result<()> {
        let hears = matches!(self.side, Side::Server { hears: true, .. });
        let mut words = Hello::new(Purpose::Data).encode().to_vec();
        words.push(hears.into());
        self.with_pair(|pair| pair.accept(&words))
    }

    /// Returns a descriptor that is readable when [`has_heard`](Self::has_heard) is to be asked.
    pub(crate) fn arrivals_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }

    /// True if WRITEs of a data connection that notify have been placed since the last call. The
    /// next ones wake.
    pub(crate) fn has_heard(&self) -> io::Result<bool> {
        let mut line = self.line.lock();
        let StreamKind::Data(pair) = &mut *line else {
            return Ok(false);
        };
        if !pair.queue().take_wakeups() {
            return Ok(false);
        }
        pair.queue().arm()?;
        let mut has_heard = false;
        loop {
            let mut reports = [None; COMPLETIONS];
            let count = pair.queue().poll(&mut reports)?;
            // Receives that the end of the connection flushes stand for nothing.
            for _ in reports.iter().flatten().filter(|done| done.result.is_ok()) {
                has_heard = true;
                pair.post_receive(0)?;
            }
            if count < COMPLETIONS {
                return Ok(has_heard);
            }
        }
    }

    /// Returns the session, secret and line that the client of a data connection claimed and
    /// proved. `None` on the client.
    pub(crate) fn claim(&self) -> Option<(SessionId, Secret, u64)> {
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

    /// Reads bytes that have come; 0 at the end. `WouldBlock` when there are none: further ones
    /// wake the threads that sleep on the stream.
    pub(crate) fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        let mut line = self.line.lock();
        let control = line.control();
        if let Some(bytes) = control.read(buf)? {
            return Ok(bytes);
        }
        let failure = control.failure();
        drop(line);
        match failure {
            // A peer that closes flushes our receives, which is the end that a socket reports as 0
            // bytes.
            Some(failure) if failure.is_flush() => Ok(0),
            Some(failure) => Err(io::Error::new(
                io::ErrorKind::ConnectionReset,
                failure.describe(),
            )),
            // The last message may have arrived since, just before the end.
            None if self.has_ended() => Ok(self.line.lock().control().read(buf)?.unwrap_or(0)),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Writes as much of `buf` as fits into one message. `WouldBlock` while the peer can take none.
    pub(crate) fn write(&self, buf: &[u8]) -> io::Result<usize> {
        let mut line = self.line.lock();
        let control = line.control();
        let written = control.write(buf)?;
        let failure = control.failure();
        drop(line);
        match (failure, written) {
            (Some(failure), _) => Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                failure.describe(),
            )),
            (None, Some(bytes)) => Ok(bytes),
            (None, None) if self.has_ended() => Err(io::ErrorKind::BrokenPipe.into()),
            (None, None) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// True if either side has closed the connection, or the adapter is gone.
    pub(crate) fn has_ended(&self) -> bool {
        let line = self.line.lock();
        while let Ok(Some(event)) = line.pair().id().next_event() {
            if event.kind != EventKind::Established {
                self.end();
            }
        }
        drop(line);
        self.over.load(Ordering::Acquire)
    }

    /// Closes the connection once all that was written has arrived, or after [`LINGER`]. Wakes the
    /// threads that sleep on it.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LINGER;
        loop {
            let mut line = self.line.lock();
            let is_sent = match &mut *line {
                StreamKind::Control(control) => {
                    control.advance().is_err() || control.failure().is_some() || control.is_sent()
                }
                // The adapter touches our memory no more.
                StreamKind::Data(pair) => {
                    pair.kill();
                    true
                }
            };
            if is_sent || self.over.load(Ordering::Acquire) || Instant::now() >= until {
                line.pair().disconnect();
                break;
            }
            drop(line);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.end();
    }

    fn end(&self) {
        self.over.store(true, Ordering::Release);
        // Fails only when the counter is full, and then it is readable already.
        let _ = self.wake.write(1);
    }

    /// Returns a descriptor that is readable when [`has_ended`](Self::has_ended) may be true.
    pub(crate) fn ended_fd(&self) -> BorrowedFd<'_> {
        self.ended.0.as_fd()
    }
}

impl AsFd for RdmaStream {
    /// Returns a descriptor that is readable when a read or a write that could not may get on.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }
}

fn epoll() -> io::Result<Epoll> {
    Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)
}

fn watch(epoll: &Epoll, fd: impl AsFd) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?)
}
