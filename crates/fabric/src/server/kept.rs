//! [`KeptConnection`]: a control connection that goes on in the server's next process.
//!
//! The rule it keeps: a connection changes hands between two requests only, when every byte that
//! was read is answered. Requests that wait in the socket are the next process's. Data connections
//! never change hands: they are closed, and their clients open them again.

use std::{
    io,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd},
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
    /// Connected socket, Unix or TCP.
    pub socket: OwnedFd,
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
    /// Returns the socket as the server's threads use it.
    pub(super) fn stream(socket: OwnedFd, transport: Transport) -> io::Result<PeerStream> {
        match transport {
            Transport::Shm => Ok(PeerStream::Unix(socket.into())),
            Transport::Tcp => Ok(PeerStream::Tcp(socket.into())),
            Transport::Rdma => Err(io::ErrorKind::Unsupported.into()),
        }
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
    const STRANGER: u8 = 0;
    const CONTROL: u8 = 1;
    const DATA: u8 = 2;

    pub(super) fn set_control(&self) {
        self.0.store(Self::CONTROL, Ordering::Relaxed);
    }

    pub(super) fn set_data(&self) {
        self.0.store(Self::DATA, Ordering::Relaxed);
    }

    pub(super) fn is_control(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::CONTROL
    }

    fn is_stranger(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::STRANGER
    }
}

/// A connection as the thread sees it that has accepted it.
pub(super) struct Accepted {
    pub(super) stage: Arc<Stage>,
    /// The connection's own thread keeps the stream, so that it closes at once when that ends.
    pub(super) socket: Weak<PeerStream>,
    pub(super) thread: JoinHandle<()>,
}

/// Waits until connections have ended that end by themselves at a hand-over. `has_controls` tells
/// if control connections are left, of any listener.
pub(super) fn let_end<'a>(
    connections: impl Iterator<Item = &'a Accepted> + Clone,
    patience: Duration,
    has_controls: impl Fn() -> bool,
) {
    let begun = Instant::now();
    let is_stranger = |it: &Accepted| it.stage.is_stranger() && !it.thread.is_finished();
    while (begun.elapsed() < patience && has_controls())
        || (begun.elapsed() < STRANGERS && connections.clone().any(is_stranger))
    {
        thread::sleep(Duration::from_millis(1));
    }
}
