//! [`PeerStream`]: a connected socket, Unix or TCP, or a control connection over RDMA; every wait
//! has an end.
//!
//! The rule it keeps: a call says itself whether it may block. Each call that may block takes the
//! time at which it gives up, or was [told](PeerStream::let_wait) how long it may wait. The meaning
//! of the bytes is left to the callers, except for the hello and the control frames, which both
//! sides share.

mod connect;
mod message;

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{Shutdown, TcpStream},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    ptr,
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, Refusal,
    control::{self, ControlDecodeError, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recv, recvmsg, send, sendmsg,
        setsockopt, sockopt,
    },
    sys::time::{TimeVal, TimeValLike},
    unistd::Pid,
};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) use self::{connect::keep_alive, message::SocketMessage};
use self::{
    connect::{connect_tcp, connect_unix},
    message::gather,
};
use crate::{
    exchange::ring::STREAM_MESSAGE_BYTES,
    nonblocking::{describe, retry, timeout_until},
    rdma::{ASK_AGAIN, RdmaStream},
};

/// Descriptors per message: the kernel's limit is 253 (SCM_MAX_FD).
const FDS_PER_MESSAGE: usize = 128;

const SEND_FLAGS: MsgFlags = MsgFlags::MSG_DONTWAIT.union(MsgFlags::MSG_NOSIGNAL);

/// Size of the longest frame that a peer may make us hold without charge, on each connection.
pub(crate) const SMALL_FRAME_BYTES: usize = 4 << 10;
/// Size of the pieces in which a longer frame is charged.
const PIECE_BYTES: usize = 256 << 10;
/// Time within which the rest of a frame has to follow its length. Generous for 24 MiB.
const FRAME: Duration = Duration::from_secs(30);
/// Time within which each piece of a frame has to come: earlier pieces hold room meanwhile.
const PIECE: Duration = Duration::from_secs(5);

/// A connected socket, or an RDMA control connection.
#[derive(Debug)]
pub(crate) enum PeerStream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Rdma(Box<RdmaStream>),
}

/// Reason why a control message did not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("{}", describe(.0))]
    Io(io::Error),
    #[error(transparent)]
    Decode(#[from] ControlDecodeError),
    /// The message was thrown away; the connection goes on.
    #[error("{0}")]
    Refused(Refusal),
}

impl From<io::Error> for ReceiveError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl PeerStream {
    pub(crate) fn connect(endpoint: &Endpoint, until: Instant) -> io::Result<Self> {
        match endpoint {
            Endpoint::Shm(path) => connect_unix(path, until).map(Self::Unix),
            Endpoint::Tcp { host, port } => connect_tcp(host, *port, until).map(Self::Tcp),
            Endpoint::Rdma { .. } | Endpoint::Auto { .. } | Endpoint::Sim(_) => {
                unreachable!("{endpoint} has no socket")
            }
        }
    }

    /// Returns a descriptor and the events to wait for on it. They tell of the connection's end,
    /// but not of incoming bytes.
    pub(crate) fn end(&self) -> (BorrowedFd<'_>, PollFlags) {
        match self {
            Self::Unix(_) | Self::Tcp(_) => {
                (self.as_fd(), PollFlags::from_bits_retain(libc::POLLRDHUP))
            }
            Self::Rdma(stream) => (stream.ended_fd(), PollFlags::POLLIN),
        }
    }

    /// True if the connection has ended. To be called when [`end`](Self::end) woke.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Unix(_) | Self::Tcp(_) => true,
            Self::Rdma(stream) => stream.has_ended(),
        }
    }

    /// Closes both directions for every holder of the socket. Threads that wait on it wake.
    pub(crate) fn close(&self) {
        // The call fails only when the peer has closed already.
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Both),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Both),
            Self::Rdma(stream) => {
                stream.close();
                Ok(())
            }
        };
    }

    /// Tells the peer that nothing more will be sent.
    pub(crate) fn close_sending(&self) {
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Write),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Write),
            Self::Rdma(_) => Ok(()),
        };
    }

    /// Reads the bytes that are there; `WouldBlock` when there are none.
    pub(crate) fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(_) | Self::Tcp(_) => {
                Ok(recv(self.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT)?)
            }
            Self::Rdma(stream) => stream.read(buf),
        }
    }

    /// Sets the longest wait of later reads that may wait for bytes.
    pub(crate) fn let_wait(&self, patience: Duration) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.set_nonblocking(false)?,
            Self::Tcp(socket) => socket.set_nonblocking(false)?,
            Self::Rdma(_) => return Ok(()),
        }
        let patience = TimeVal::milliseconds(patience.as_millis() as i64);
        Ok(setsockopt(self, sockopt::ReceiveTimeout, &patience)?)
    }

    /// Reads the bytes that are there, or that come first, in one system call where the socket can
    /// wait. `TimedOut` after the time set by [`let_wait`](Self::let_wait).
    pub(crate) fn read_or_wait(&self, buf: &mut [u8], patience: Duration) -> io::Result<usize> {
        if let Self::Rdma(stream) = self {
            loop {
                match stream.read(buf) {
                    Err(error) if retry(&error) => {
                        self.wait(PollFlags::POLLIN, Instant::now() + patience)?;
                    }
                    other => return other,
                }
            }
        }
        match recv(self.as_raw_fd(), buf, MsgFlags::empty()) {
            Err(Errno::EAGAIN) => Err(io::ErrorKind::TimedOut.into()),
            other => Ok(other?),
        }
    }

    /// Reads into several buffers. `WouldBlock` when no bytes are there, or if it `waits`, when
    /// none have come in the time set by [`let_wait`](Self::let_wait).
    pub(crate) fn read_vectored(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        waits: bool,
    ) -> io::Result<usize> {
        let mut message = SocketMessage::new(bufs.as_mut_ptr().cast(), bufs.len());
        // SAFETY:
        // - `IoSliceMut` has the layout of `iovec`, guaranteed by std on Unix;
        // - the slices are exclusive and outlive the call.
        unsafe { self.receive_vectors(&mut message, waits) }
    }

    /// Writes what fits; `WouldBlock` when nothing does. A closed peer is an error, never a signal.
    pub(crate) fn write(&self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(_) | Self::Tcp(_) => Ok(send(self.as_raw_fd(), buf, SEND_FLAGS)?),
            Self::Rdma(stream) => stream.write(buf),
        }
    }

    pub(crate) fn write_vectored(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut message = SocketMessage::new(bufs.as_ptr().cast_mut().cast(), bufs.len());
        // SAFETY:
        // - `IoSlice` has the layout of `iovec`, guaranteed by std on Unix;
        // - the slices outlive the call, which only reads them.
        unsafe { self.send_message(&mut message) }
    }

    /// Returns the bytes of a vector that [`send_message`](Self::send_message) takes at most.
    pub(crate) fn most_at_once(&self) -> usize {
        match self {
            Self::Rdma(_) => STREAM_MESSAGE_BYTES,
            Self::Unix(_) | Self::Tcp(_) => usize::MAX,
        }
    }

    /// Sends a message, like `sendmsg`. A closed peer is an error, never a signal.
    ///
    /// # Safety
    /// The message's vectors point to memory that can be read, and to which no reference exists
    /// that is written through.
    pub(crate) unsafe fn send_message(&self, message: &mut SocketMessage) -> io::Result<usize> {
        if let Self::Rdma(stream) = self {
            return gather(message.vectors(), |vector| {
                let mut piece = [0; STREAM_MESSAGE_BYTES];
                let piece = &mut piece[..vector.iov_len.min(STREAM_MESSAGE_BYTES)];
                let from = vector.iov_base.cast::<u8>();
                // SAFETY: promised by the caller for all bytes of the vector, of which these are
                // the first; `piece` is ours.
                unsafe { ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len()) };
                stream.write(piece)
            });
        }
        // SAFETY: promised by the caller.
        let sent = unsafe { libc::sendmsg(self.as_raw_fd(), message.get(), SEND_FLAGS.bits()) };
        Ok(Errno::result(sent)? as usize)
    }

    /// Receives a message, like `recvmsg`. `WouldBlock` when no bytes are there.
    ///
    /// # Safety
    /// The message's vectors point to memory that can be written, and to which no reference exists.
    pub(crate) unsafe fn receive_message(&self, message: &mut SocketMessage) -> io::Result<usize> {
        // SAFETY: promised by the caller.
        unsafe { self.receive_vectors(message, false) }
    }

    /// Receives a message as [`receive_message`](Self::receive_message) does. A socket `waits` for
    /// the first bytes if asked to.
    ///
    /// # Safety
    /// The same as of [`receive_message`](Self::receive_message).
    unsafe fn receive_vectors(
        &self,
        message: &mut SocketMessage,
        waits: bool,
    ) -> io::Result<usize> {
        if let Self::Rdma(stream) = self {
            return gather(message.vectors(), |vector| {
                let mut piece = [0; STREAM_MESSAGE_BYTES];
                let most = vector.iov_len.min(STREAM_MESSAGE_BYTES);
                let bytes = stream.read(&mut piece[..most])?;
                let to = vector.iov_base.cast::<u8>();
                // SAFETY: promised by the caller for all bytes of the vector, which has at least
                // these; `piece` is ours.
                unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), to, bytes) };
                Ok(bytes)
            });
        }
        let flags = if waits { 0 } else { libc::MSG_DONTWAIT };
        // SAFETY: promised by the caller.
        let received = unsafe { libc::recvmsg(self.as_raw_fd(), message.get(), flags) };
        Ok(Errno::result(received)? as usize)
    }

    pub(crate) fn read_exact(&self, mut buf: &mut [u8], until: Instant) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read(buf) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => buf = &mut buf[n..],
                Err(error) if retry(&error) => self.wait(PollFlags::POLLIN, until)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(crate) fn write_all(&self, mut buf: &[u8], until: Instant) -> io::Result<()> {
        while !buf.is_empty() {
            match self.write(buf) {
                Ok(n) => buf = &buf[n..],
                Err(error) if retry(&error) => self.wait(PollFlags::POLLOUT, until)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for `events` on the socket; `TimedOut` at `until`.
    pub(crate) fn wait(&self, events: PollFlags, until: Instant) -> io::Result<()> {
        let (events, again) = match self {
            Self::Unix(_) | Self::Tcp(_) => (events, None),
            // Every event makes the descriptor readable. A peer does not tell when it has room
            // again, so it is asked.
            Self::Rdma(_) => {
                let asks = events.contains(PollFlags::POLLOUT);
                (PollFlags::POLLIN, asks.then(|| Instant::now() + ASK_AGAIN))
            }
        };
        // A peer may wake us all the time without the event that we wait for.
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut fds = [PollFd::new(self.as_fd(), events)];
        loop {
            match poll(
                &mut fds,
                timeout_until(again.map_or(until, |again| again.min(until))),
            ) {
                Ok(0) if Instant::now() >= until => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) if again.is_some() => return Ok(()),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    pub(crate) fn send<T: Serialize>(
        &self,
        message: &T,
        until: Instant,
    ) -> Result<(), ReceiveError> {
        Ok(self.write_all(&control::encode(message)?, until)?)
    }

    /// Receives a message of at most `limit` bytes.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
        limit: usize,
        until: Instant,
    ) -> Result<T, ReceiveError> {
        self.receive_charged(limit, until, &mut |_| Ok(()))
    }

    /// Receives a message like [`receive`](Self::receive). A frame of more than
    /// [`SMALL_FRAME_BYTES`] comes in pieces: `charge` is told the length of each before it is
    /// held. If `charge` refuses, the frame is thrown away.
    pub(crate) fn receive_charged<T: DeserializeOwned>(
        &self,
        limit: usize,
        until: Instant,
        charge: &mut dyn FnMut(u64) -> Result<(), Refusal>,
    ) -> Result<T, ReceiveError> {
        let mut prefix = [0; PREFIX_BYTES];
        self.read_exact(&mut prefix, until)?;
        let bytes = control::frame_bytes(prefix, limit)?;
        let until = until.min(Instant::now() + FRAME);
        // Grown as the bytes arrive, so that a peer that sends little makes us hold little.
        let mut body = Vec::new();
        while body.len() < bytes {
            let have = body.len();
            let piece = (bytes - have).min(PIECE_BYTES);
            if bytes > SMALL_FRAME_BYTES
                && let Err(refusal) = charge(piece as u64)
            {
                drop(body);
                self.discard(bytes - have, until)?;
                return Err(ReceiveError::Refused(refusal));
            }
            body.reserve_exact(piece);
            body.resize(have + piece, 0);
            self.read_exact(&mut body[have..], until.min(Instant::now() + PIECE))?;
        }
        Ok(control::decode(&body)?)
    }

    /// Receives `bytes` bytes and throws them away.
    fn discard(&self, mut bytes: usize, until: Instant) -> io::Result<()> {
        let mut waste = [0; SMALL_FRAME_BYTES];
        while bytes > 0 {
            let part = bytes.min(waste.len());
            self.read_exact(&mut waste[..part], until)?;
            bytes -= part;
        }
        Ok(())
    }

    /// Receives a message of at most `limit` bytes. If it is late, `frame` keeps the bytes that
    /// have come.
    pub(crate) fn receive_on<T: DeserializeOwned>(
        &self,
        frame: &mut Vec<u8>,
        limit: usize,
        until: Instant,
    ) -> Result<T, ReceiveError> {
        loop {
            let have = frame.len();
            let whole = match frame.first_chunk::<PREFIX_BYTES>() {
                Some(prefix) => PREFIX_BYTES + control::frame_bytes(*prefix, limit)?,
                None => PREFIX_BYTES,
            };
            if have >= PREFIX_BYTES && have == whole {
                let message = control::decode(&frame[PREFIX_BYTES..]);
                frame.clear();
                return Ok(message?);
            }
            frame.resize(have + (whole - have).min(PIECE_BYTES), 0);
            let read = self.read(&mut frame[have..]);
            frame.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(_) => {}
                Err(error) if retry(&error) => self.wait(PollFlags::POLLIN, until)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends a client's hello first, then checks the server's.
    pub(crate) fn greet(&self, purpose: Purpose, until: Instant) -> Result<(), ReceiveError> {
        self.write_all(&Hello::new(purpose).encode(), until)?;
        let mut bytes = [0; HELLO_BYTES];
        self.read_exact(&mut bytes, until)?;
        Hello::decode(&bytes)?;
        Ok(())
    }

    /// Passes descriptors in messages of one byte each.
    pub(crate) fn send_fds(&self, fds: &[RawFd], until: Instant) -> io::Result<()> {
        for fds in fds.chunks(FDS_PER_MESSAGE) {
            loop {
                let rights = [ControlMessage::ScmRights(fds)];
                let bytes = [IoSlice::new(&[0])];
                match sendmsg::<()>(self.as_raw_fd(), &bytes, &rights, SEND_FLAGS, None) {
                    Ok(_) => break,
                    // ETOOMANYREFS: too many passed descriptors wait for their receivers.
                    Err(Errno::EAGAIN | Errno::ETOOMANYREFS) => {
                        self.wait(PollFlags::POLLOUT, until)?
                    }
                    Err(Errno::EINTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        Ok(())
    }

    /// Receives the descriptors that [`send_fds`](Self::send_fds) passed, until `received` has
    /// `count`. If some are late, `received` keeps those that have come.
    pub(crate) fn receive_fds(
        &self,
        received: &mut Vec<OwnedFd>,
        count: usize,
        until: Instant,
    ) -> io::Result<()> {
        let mut space = nix::cmsg_space!([RawFd; FDS_PER_MESSAGE]);
        while received.len() < count {
            let mut byte = [0];
            let mut bytes = [IoSliceMut::new(&mut byte)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
            let message = match recvmsg::<()>(self.as_raw_fd(), &mut bytes, Some(&mut space), flags)
            {
                Ok(message) => message,
                Err(Errno::EAGAIN) => {
                    self.wait(PollFlags::POLLIN, until)?;
                    continue;
                }
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let mut batch = Vec::new();
            for message in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(fds) = message {
                    // SAFETY: the kernel made these descriptors for this call, and nobody else
                    // knows them.
                    batch.extend(
                        fds.into_iter()
                            .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
                    );
                }
            }
            if message.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if batch.is_empty() || received.len() + batch.len() > count {
                let reason = "descriptors of extents did not arrive: is the limit of open files (ulimit -n) reached?";
                return Err(io::Error::other(reason));
            }
            received.append(&mut batch);
        }
        Ok(())
    }
}

/// The process on the other side of a Unix socket.
#[derive(Debug)]
pub(crate) struct PeerProcess(OwnedFd);

impl PeerProcess {
    /// Returns the peer of `stream`; `None` if it is this process, or cannot be seen from here.
    pub(crate) fn of(stream: &PeerStream) -> Option<Self> {
        let PeerStream::Unix(socket) = stream else {
            return None;
        };
        let pid = getsockopt(socket, sockopt::PeerCredentials).ok()?.pid();
        if pid == Pid::this().as_raw() {
            return None;
        }
        // SAFETY: the call takes two numbers and returns a descriptor of our own, or -1.
        let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }).ok()?;
        // SAFETY: the kernel made the descriptor for this call, and nobody else knows it.
        Some(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// True if the process ends before `until`.
    pub(crate) fn ends(&self, until: Instant) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        loop {
            match poll(&mut fds, timeout_until(until)) {
                Err(Errno::EINTR) => {}
                other => return other == Ok(1),
            }
        }
    }
}

impl AsFd for PeerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
            Self::Rdma(stream) => stream.as_fd(),
        }
    }
}

impl AsRawFd for PeerStream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
