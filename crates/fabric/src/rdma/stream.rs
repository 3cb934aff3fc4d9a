//! [`RdmaStream`]: a connection with an adapter on each side, as sessions and servers know it: a
//! byte stream for control messages, or the server's end of a data connection, on which nothing is
//! said.
//!
//! The rule it keeps: whoever sleeps on it wakes when it ends, whichever side ended it.

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
    server::Domains,
    verbs::{COMPLETIONS, Depths, EventKind, Pair, READS_IN_FLIGHT_MAX},
};

/// How long the last messages may take to be acknowledged when a stream is closed.
const LINGER: Duration = Duration::from_millis(500);

/// What the server's end of a data connection needs: it posts nothing.
pub(super) const PASSIVE: Depths = Depths {
    sends: 1,
    receives: 1,
    reads_in_flight: READS_IN_FLIGHT_MAX,
    inline: false,
};

/// What it needs if WRITEs may notify: a receive for each of which the server has not heard. A
/// client that is further ahead waits for its adapter, which tries again for four seconds.
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
    line: Mutex<Line>,
    /// Closed here, or by the peer.
    over: AtomicBool,
    /// Readable when `over`.
    wake: EventFd,
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
        claim: Option<(SessionId, Secret, u64)>,
        /// Whether the WRITEs of a data connection may notify.
        hears: bool,
    },
}

/// What it is for.
#[derive(Debug)]
pub(super) enum Line {
    Control(Box<Control>),
    /// The client's adapter READs and WRITEs, and nobody here says anything. The server may hear
    /// of WRITEs that notify.
    Data(Pair),
}

impl Line {
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
    /// A stream over a line that is connected, or about to be.
    pub(super) fn new(line: Line, side: Side) -> io::Result<Self> {
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

    /// What is done with the pair: granting the connection, asking for its device.
    pub(super) fn with_pair<T>(&self, act: impl FnOnce(&Pair) -> T) -> T {
        act(self.line.lock().pair())
    }

    /// Accepts a data connection: from here on the client may WRITE. It is told whether WRITEs may
    /// notify.
    pub(crate) fn accept(&self) -> io::Result<()> {
        let hears = matches!(self.side, Side::Server { hears: true, .. });
        let mut words = Hello::new(Purpose::Data).encode().to_vec();
        words.push(hears.into());
        self.with_pair(|pair| pair.accept(&words))
    }

    /// Readable when [`has_heard`](Self::has_heard) is to be asked.
    pub(crate) fn arrivals_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }

    /// Whether WRITEs of a data connection that notify have been placed since it was asked last.
    /// The next ones wake.
    pub(crate) fn has_heard(&self) -> io::Result<bool> {
        let mut line = self.line.lock();
        let Line::Data(pair) = &mut *line else {
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

    /// The session that the client of a data connection claimed and proved, and the line; on the
    /// server only.
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

    /// Reads what is there; `WouldBlock` when nothing is, and then the stream wakes who sleeps on
    /// it; 0 at the end.
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

    /// Writes what fits into one message; `WouldBlock` while the peer can take none.
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

    /// Whether either side has closed the connection, or the adapter is gone.
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

    /// Closes the connection, after what was written has arrived or [`LINGER`]; whoever sleeps on
    /// it wakes.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LINGER;
        loop {
            let mut line = self.line.lock();
            let is_sent = match &mut *line {
                Line::Control(control) => {
                    control.advance().is_err() || control.failure().is_some() || control.is_sent()
                }
                // The adapter touches our memory no more.
                Line::Data(pair) => {
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

fn epoll() -> io::Result<Epoll> {
    Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)
}

fn watch(epoll: &Epoll, fd: impl AsFd) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?)
}
