//! The data connection, server side: a software NIC that serves READs and WRITEs straight from and
//! into extents, and does atomics on them.
//!
//! The rule it keeps: every operation is checked against the leases of its session before a byte of
//! it moves, and no byte is copied in user space: payloads go between the socket and the mapping by
//! vectored system calls.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_wire::{
    Secret, SessionId,
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, MAX_BATCH, OP_HEADER_BYTES, OPERAND_BYTES, OpHeader,
        OpKind, Status, WORD_BYTES,
    },
};
use nix::{errno::Errno, poll::PollFlags};

use super::{
    LOOK,
    connection::{Connection, Fault},
    lines::Held,
};
use crate::{
    memory::{ExtentMemory, Span},
    nonblocking::retry,
    stream::Message,
};

/// How long a refused client may take to read why. Its bytes that are under way are thrown away
/// meanwhile, or the kernel would throw the answer away.
const LINGER: Duration = Duration::from_secs(1);

/// One operation of a batch, checked.
struct Checked {
    header: OpHeader,
    span: Span,
}

impl Connection {
    /// Serves batches until the client closes the connection.
    pub(super) fn data(
        &self,
        session: SessionId,
        secret: &Secret,
        held: &Held<'_>,
    ) -> Result<(), Fault> {
        let mut headers = [0; MAX_BATCH * OP_HEADER_BYTES];
        let mut checked = Vec::with_capacity(MAX_BATCH);
        let mut operands = [[0; OPERAND_BYTES]; MAX_BATCH];
        let mut answers = [[0; ANSWER_HEADER_BYTES]; MAX_BATCH];
        let mut words = [[0; WORD_BYTES as usize]; MAX_BATCH];
        let mut vectors: Vec<libc::iovec> = Vec::with_capacity(2 * MAX_BATCH);
        let alive = || {
            self.service
                .host
                .attach(session, secret)
                .map_err(Fault::Refused)
        };
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
                let lease = self.service.host.extent(session, header.extent);
                let takes = |lease: &Arc<ExtentMemory>| {
                    header.is_aligned() && (!header.kind.is_atomic() || lease.has_atomics())
                };
                let span = (lease.filter(takes))
                    .and_then(|lease| lease.span(header.offset, u64::from(header.len)).ok());
                match span {
                    Some(span) => checked.push(Checked { header, span }),
                    None => {
                        refused = Some(header);
                        break;
                    }
                }
            }
            // 3. The payloads of the WRITEs, into place, and the operands of the atomics.
            vectors.clear();
            vectors.extend(
                checked
                    .iter()
                    .zip(&mut operands)
                    .filter_map(|(op, operands)| match op.header.kind {
                        OpKind::Read => None,
                        OpKind::Write => Some(vector(op.span.as_ptr(), op.span.len())),
                        OpKind::FetchAdd | OpKind::CompareSwap => {
                            Some(vector(operands.as_mut_ptr(), operands.len()))
                        }
                    }),
            );
            self.receive(&mut vectors, &checked, held, &alive)?;
            // 4. The atomics: after the WRITEs before them.
            for ((op, operands), word) in checked.iter().zip(&operands).zip(&mut words) {
                if let Some(atomic) = op.header.kind.atomic(operands) {
                    let old = op.span.lease().atomic(op.header.offset, atomic);
                    *word = old.map_err(|_| lease_ended(op))?.to_le_bytes();
                }
            }
            // 5. The answers, those of READs with the payload behind them and those of atomics with
            //    the old value.
            vectors.clear();
            for ((op, bytes), word) in checked.iter().zip(&mut answers).zip(&mut words) {
                let fetched = match op.header.kind {
                    OpKind::Read => Some(vector(op.span.as_ptr(), op.span.len())),
                    OpKind::Write => None,
                    OpKind::FetchAdd | OpKind::CompareSwap => {
                        Some(vector(word.as_mut_ptr(), word.len()))
                    }
                };
                *bytes = AnswerHeader {
                    status: Status::Ok,
                    sequence: op.header.sequence,
                    len: fetched.map_or(0, |_| op.header.len),
                }
                .encode();
                vectors.push(vector(bytes.as_mut_ptr(), bytes.len()));
                vectors.extend(fetched);
            }
            self.transmit(&mut vectors, &checked, &alive)?;
            let moved_bytes = |kind| {
                let moved = checked.iter().filter(|op| op.header.kind == kind);
                moved.map(|op| u64::from(op.header.len)).sum()
            };
            self.service
                .traffic
                .read_bytes
                .fetch_add(moved_bytes(OpKind::Read), Ordering::Relaxed);
            self.service
                .traffic
                .written_bytes
                .fetch_add(moved_bytes(OpKind::Write), Ordering::Relaxed);
            // The spans keep leases that may end before the next batch comes.
            checked.clear();
            if let Some(header) = refused {
                return self.refuse(&header);
            }
        }
    }

    /// Answers that an operation was refused, and ends the connection so that the client can still
    /// read it.
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
            "{kind:?} of {len} bytes at {offset} of extent {extent}: not leased, out of its range, or for an atomic no multiple of 8 or not granted for atomics"
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

    /// Fills `vectors`, which point to operands and into the spans of `checked`.
    fn receive(
        &self,
        vectors: &mut [libc::iovec],
        checked: &[Checked],
        held: &Held<'_>,
        alive: &dyn Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            still_leased(checked)?;
            // What has arrived could still be read from a socket that was closed: the newer
            // connection waits for this one.
            if held.is_replaced() {
                return Err(Fault::replaced());
            }
            // SAFETY:
            // - every vector lies in a span of `checked`: bytes of a mapping that live as long as
            //   the span, writable, to which no reference exists anywhere; or is the place of an
            //   operand, kept by the caller, which does not look at it meanwhile.
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
        Ok(())
    }

    /// Sends `vectors`, which point to answer headers, old values and into the spans of `checked`.
    fn transmit(
        &self,
        vectors: &mut [libc::iovec],
        checked: &[Checked],
        alive: &dyn Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            // A client that is slow to read must not be sent what the next holder of the extent
            // writes.
            still_leased(checked)?;
            // SAFETY: every vector is an answer header, an old value or lies in a span, all kept by
            // the caller; they are only read.
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
        Ok(())
    }

    /// Waits for the socket, and no longer than until it is time to look whether the session and
    /// its leases still live.
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
        Some(op) => Err(lease_ended(op)),
    }
}

fn lease_ended(op: &Checked) -> Fault {
    Fault::Violation(format!(
        "the lease of extent {} ended during a {:?}",
        op.header.extent, op.header.kind
    ))
}

/// What is left of a vectored transfer.
struct Rest<'a> {
    vectors: &'a mut [libc::iovec],
    /// The first that is not complete.
    next: usize,
    bytes: u64,
}

impl<'a> Rest<'a> {
    fn new(vectors: &'a mut [libc::iovec]) -> Self {
        let bytes = vectors.iter().map(|vector| vector.iov_len as u64).sum();
        Self {
            vectors,
            next: 0,
            bytes,
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
