//! [`KeptConnection`]: a control connection that goes on in the server's next process.
//!
//! The rule it keeps: a connection changes hands between two requests only, when every byte that
//! was read is answered. Requests that wait in the socket are the next process's. Data connections
//! never change hands: they are closed, and their clients open them again.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU8, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{Challenge, SessionId};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::{
    host::{Peer, Transport},
    stream::PeerStream,
};

/// The longest wait for control connections that were stopped between two requests, and only have
/// to leave.
const STOPPED: Duration = Duration::from_secs(5);

/// The longest wait for connections that have not said what they are for, or that only ask for
/// figures: less than a person notices.
const STRANGERS: Duration = Duration::from_millis(250);

/// State of a control connection between two requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Challenge that the client is to sign.
    pub challenge: Option<Challenge>,
    /// True if the client has announced that its process ends.
    pub is_leaving: bool,
}

/// A control connection between two requests.
#[derive(Debug)]
pub struct KeptConnection {
    /// Connected socket, Unix or TCP. Moved rather than duplicated: a server that has no
    /// descriptors left has its clients still.
    pub(super) stream: Arc<PeerStream>,
    /// Transport of the session.
    pub transport: Transport,
    /// The client.
    pub peer: Peer,
    /// Session of the client.
    pub session: SessionId,
    /// Lease of the session.
    pub lease: Duration,
    /// State of the connection's requests.
    pub asked: Asked,
}

impl KeptConnection {
    /// Takes over the connection of `session` from an earlier process.
    ///
    /// # Errors
    /// The transport is RDMA, whose connections end with their process.
    pub fn inherited(
        socket: OwnedFd,
        transport: Transport,
        peer: Peer,
        (session, lease): (SessionId, Duration),
        asked: Asked,
    ) -> io::Result<Self> {
        let stream = match transport {
            Transport::Shm => PeerStream::Unix(socket.into()),
            Transport::Tcp => PeerStream::Tcp(socket.into()),
            Transport::Rdma => return Err(io::ErrorKind::Unsupported.into()),
        };
        Ok(Self {
            stream: Arc::new(stream),
            transport,
            peer,
            session,
            lease,
            asked,
        })
    }
}

impl AsFd for KeptConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Takes over descriptor `number`, which this process has inherited.
///
/// # Errors
/// There is no such descriptor, or this process made it.
pub fn take_inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(io::Error::other("a standard stream is nobody's to take"));
    }
    // SAFETY: the descriptor is only asked for its flags; a number without a file is an error of
    // the call.
    let look = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = FdFlag::from_bits_retain(fcntl(look, FcntlArg::F_GETFD)?);
    if flags.contains(FdFlag::FD_CLOEXEC) {
        return Err(io::Error::other("the descriptor was not inherited"));
    }
    fcntl(look, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // SAFETY:
    // - the descriptor is open, as `fcntl` just found;
    // - it is nobody's: this process makes descriptors with close-on-exec only, and one that was
    //   taken over has it since the line above.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Lets a next process inherit `descriptor`, or not any more.
///
/// # Errors
/// The kernel's error.
pub fn let_inherit(descriptor: BorrowedFd<'_>, inherits: bool) -> io::Result<()> {
    let flags = match inherits {
        true => FdFlag::empty(),
        false => FdFlag::FD_CLOEXEC,
    };
    fcntl(descriptor, FcntlArg::F_SETFD(flags))?;
    Ok(())
}

/// Purpose of a connection, for the thread that has accepted it. Written by the connection's
/// thread; it publishes nothing else, so relaxed is enough.
#[derive(Debug, Default)]
pub(super) struct Stage(AtomicU8);

impl Stage {
    const CONTROL: u8 = 1;
    const DATA: u8 = 2;
    const KEPT: u8 = 3;

    pub(super) fn is_control(&self) {
        self.0.store(Self::CONTROL, Ordering::Relaxed);
    }

    pub(super) fn is_data(&self) {
        self.0.store(Self::DATA, Ordering::Relaxed);
    }

    /// Notes that the connection's socket is the next process's.
    pub(super) fn set_kept(&self) {
        self.0.store(Self::KEPT, Ordering::Relaxed);
    }

    /// True if the connection's socket is the next process's.
    pub(super) fn is_kept(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::KEPT
    }

    /// Returns the longest wait for the connection's end.
    fn patience(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            Self::CONTROL | Self::KEPT => STOPPED,
            Self::DATA => Duration::ZERO,
            _ => STRANGERS,
        }
    }
}

/// A connection as the thread sees it that has accepted it.
pub(super) struct Accepted {
    pub(super) stage: Arc<Stage>,
    /// The connection's own thread keeps the stream, so that it closes at once when that ends.
    pub(super) socket: Weak<PeerStream>,
    pub(super) thread: JoinHandle<()>,
}

/// Waits until connections have ended that end by themselves at a hand-over.
pub(super) fn let_end<'a>(connections: impl Iterator<Item = &'a Accepted> + Clone) {
    let begun = Instant::now();
    let waits = |it: &Accepted| !it.thread.is_finished() && begun.elapsed() < it.stage.patience();
    while connections.clone().any(waits) {
        thread::sleep(Duration::from_millis(1));
    }
}
