//! The data connection, server side: a software NIC that serves READs and WRITEs straight from and into extents.
//!
//! The rule it keeps: every operation is checked against the leases of its session before a byte of it moves, and no
//! byte is copied in user space: payloads go between the socket and the mapping by vectored system calls.

use std::{
    io,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use farpage_wire::{
    Secret, SessionId,
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, MAX_BATCH, OP_HEADER_BYTES, OpHeader, OpKind, Status,
    },
};
use nix::{errno::Errno, poll::PollFlags};
use std::sync::atomic::Ordering;

use super::{Connection, Fault, LOOK};
use crate::{
    memory::Span,
    stream::{Message, retry},
};

/// How long a refused client may take to read why. Its bytes that are under way are thrown away meanwhile, or the
/// kernel would throw the answer away.
const LINGER: Duration = Duration::from_secs(1);

/// One operation of a batch, checked.
struct Checked {
    header: OpHeader,
    span: Span,
}

impl Connection {
    /// Serves batches until the client closes the connection.
    pub(super) fn data(&self, session: SessionId, secret: &Secret) -> Result<(), Fault> {
        let mut headers = [0; MAX_BATCH * OP_HEADER_BYTES];
        let mut checked = Vec::with_capacity(MAX_BATCH);
        let mut answers = [[0; ANSWER_HEADER_BYTES]; MAX_BATCH];
        let mut vectors: Vec<libc::iovec> = Vec::with_capacity(2 * MAX_BATCH);
        let alive = || self.host.attach(session, secret).map_err(Fault::Refused);
        let mut sequence = 0;
        loop {
            // 1. The headers: the first says how many follow.
            let (first, rest) = headers.split_at_mut(OP_HEADER_BYTES);
            if !self.fill(first, true, &alive)? {
                return Ok(());
            }
            let following = usize::from(header_at(first, 0)?.following);
            self.fill(&mut rest[..following * OP_HEADER_BYTES], false, &alive)?;
            // 2. Each against the protocol and against the leases.
            checked.clear();
            let mut refused = None;
            for i in 0..=following {
                let header = header_at(&headers, i)?;
                if usize::from(header.following) != following - i || header.sequence != sequence {
                    return Err(Fault::Violation("operations out of order".to_owned()));
                }
                sequence = sequence.wrapping_add(1);
                let lease = self.host.extent(session, header.extent);
                match lease.and_then(|lease| lease.span(header.offset, u64::from(header.len)).ok())
                {
                    Some(span) => checked.push(Checked { header, span }),
                    None => {
                        refused = Some(header);
                        break;
                    }
                }
            }
            // 3. The payloads of the WRITEs, into place.
            vectors.clear();
            let writes = checked.iter().filter(|op| op.header.kind == OpKind::Write);
            vectors.extend(writes.map(|op| vector(op.span.as_ptr(), op.span.len())));
            let written_bytes = self.receive(&mut vectors, &checked, &alive)?;
            // 4. The answers, those of READs with the payload behind them.
            vectors.clear();
            for (op, bytes) in checked.iter().zip(&mut answers) {
                let read_bytes = if op.header.kind == OpKind::Read {
                    op.header.len
                } else {
                    0
                };
                *bytes = AnswerHeader {
                    status: Status::Ok,
                    sequence: op.header.sequence,
                    len: read_bytes,
                }
                .encode();
                vectors.push(vector(bytes.as_mut_ptr(), bytes.len()));
                if read_bytes > 0 {
                    vectors.push(vector(op.span.as_ptr(), op.span.len()));
                }
            }
            let sent_bytes = self.transmit(&mut vectors, &checked, &alive)?;
            let read_bytes = sent_bytes - (checked.len() * ANSWER_HEADER_BYTES) as u64;
            self.traffic
                .read_bytes
                .fetch_add(read_bytes, Ordering::Relaxed);
            self.traffic
                .written_bytes
                .fetch_add(written_bytes, Ordering::Relaxed);
            // The spans keep leases that may end before the next batch comes.
            checked.clear();
            if let Some(header) = refused {
                return self.refuse(&header);
            }
        }
    }

    /// Answers that an operation was refused, and ends the connection so that the client can still read it.
    fn refuse(&self, header: &OpHeader) -> Result<(), Fault> {
        let answer = AnswerHeader {
            status: Status::Refused,
            sequence: header.sequence,
            len: 0,
        };
        let until = Instant::now() + LINGER;
        self.stream.write_all(&answer.encode(), until)?;
        self.stream.close_sending();
        let mut waste = [0; 16 << 10];
        while Instant::now() < until {
            match self.stream.read(&mut waste) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error)
                    if retry(&error) && self.stream.wait(PollFlags::POLLIN, until).is_ok() => {}
                Err(_) => break,
            }
        }
        let OpHeader {
            kind,
            len,
            extent,
            offset,
            ..
        } = header;
        let reason = format!(
            "{kind:?} of {len} bytes at {offset} of extent {extent}: not leased, or out of its range"
        );
        Err(Fault::Violation(reason))
    }

    /// Reads headers. `false` when the client closed the connection where a batch `may_end`.
    fn fill(
        &self,
        mut buf: &mut [u8],
        may_end: bool,
        alive: &dyn Fn() -> Result<(), Fault>,
    ) -> Result<bool, Fault> {
        let whole = buf.len();
        while !buf.is_empty() {
            match self.stream.read(buf) {
                Ok(0) if may_end && buf.len() == whole => return Ok(false),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => buf = &mut buf[bytes..],
                Err(error) if retry(&error) => self.pause(PollFlags::POLLIN, alive)?,
                Err(error) if may_end && error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Fills `vectors`, which point into the spans of `checked`; returns their length.
    fn receive(
        &self,
        vectors: &mut [libc::iovec],
        checked: &[Checked],
        alive: &dyn Fn() -> Result<(), Fault>,
    ) -> Result<u64, Fault> {
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            still_leased(checked)?;
            // SAFETY:
            // - every vector lies in a span of `checked`: bytes of a mapping that live as long as the span, writable;
            // - no reference to those bytes exists anywhere, so the kernel may change them.
            let received =
                unsafe { libc::recvmsg(self.stream.as_raw_fd(), rest.message().get(), 0) };
            match Errno::result(received) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => rest.advance(bytes as usize),
                Err(Errno::EAGAIN) => self.pause(PollFlags::POLLIN, alive)?,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(rest.total_bytes)
    }

    /// Sends `vectors`, which point to answer headers and into the spans of `checked`; returns their length.
    fn transmit(
        &self,
        vectors: &mut [libc::iovec],
        checked: &[Checked],
        alive: &dyn Fn() -> Result<(), Fault>,
    ) -> Result<u64, Fault> {
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            // A client that is slow to read must not be sent what the next holder of the extent writes.
            still_leased(checked)?;
            // SAFETY: every vector is an answer header or lies in a span, both kept by the caller; they are only read.
            let sent = unsafe {
                libc::sendmsg(
                    self.stream.as_raw_fd(),
                    rest.message().get(),
                    libc::MSG_NOSIGNAL,
                )
            };
            match Errno::result(sent) {
                Ok(bytes) => rest.advance(bytes as usize),
                Err(Errno::EAGAIN) => self.pause(PollFlags::POLLOUT, alive)?,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(rest.total_bytes)
    }

    /// Waits for the socket, and no longer than until it is time to look whether the session and its leases still live.
    fn pause(&self, events: PollFlags, alive: &dyn Fn() -> Result<(), Fault>) -> Result<(), Fault> {
        match self.stream.wait(events, Instant::now() + LOOK) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => alive(),
            other => Ok(other?),
        }
    }
}

fn still_leased(checked: &[Checked]) -> Result<(), Fault> {
    match checked.iter().find(|op| op.span.is_revoked()) {
        None => Ok(()),
        Some(op) => Err(Fault::Violation(format!(
            "the lease of extent {} ended during a {:?}",
            op.header.extent, op.header.kind
        ))),
    }
}

/// What is left of a vectored transfer.
struct Rest<'a> {
    vectors: &'a mut [libc::iovec],
    /// The first that is not complete.
    next: usize,
    bytes: u64,
    total_bytes: u64,
}

impl<'a> Rest<'a> {
    fn new(vectors: &'a mut [libc::iovec]) -> Self {
        let bytes = vectors.iter().map(|vector| vector.iov_len as u64).sum();
        Self {
            vectors,
            next: 0,
            bytes,
            total_bytes: bytes,
        }
    }

    fn message(&mut self) -> Message {
        let left = &mut self.vectors[self.next..];
        Message::new(left.as_mut_ptr(), left.len())
    }

    fn advance(&mut self, mut bytes: usize) {
        self.bytes -= bytes as u64;
        while self.next < self.vectors.len() && bytes >= self.vectors[self.next].iov_len {
            bytes -= self.vectors[self.next].iov_len;
            self.next += 1;
        }
        if let Some(vector) = self.vectors.get_mut(self.next) {
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(bytes).cast();
            vector.iov_len -= bytes;
        }
    }
}

fn vector(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast(),
        iov_len: len,
    }
}

fn header_at(headers: &[u8], index: usize) -> Result<OpHeader, Fault> {
    let bytes = &headers[index * OP_HEADER_BYTES..][..OP_HEADER_BYTES];
    Ok(OpHeader::decode(
        bytes.try_into().expect("a header's length"),
    )?)
}
