//! The data connection, server side: a software NIC that serves READs and WRITEs straight from and
//! into extents, and does atomics on them.
//!
//! The rule it keeps: every operation is checked against the leases of its session before a byte of
//! it moves ([`super::batch`]). Payloads go between the socket and the mapping by vectored system
//! calls; only what came together with headers is copied ([`super::incoming`]). Memory whose bytes
//! may be elsewhere is held in [`super::window`].

use std::{
    io,
    ops::Range,
    time::{Duration, Instant},
};

use farpage_wire::{
    Secret, SessionId,
    data::{AnswerHeader, MAX_BATCH, OP_HEADER_BYTES, OpHeader, Status},
};
use nix::poll::PollFlags;

use super::{
    batch::{Batch, Checked, Stop, still_leased},
    close::CloseReason,
    connection::{Connection, LOOK},
    incoming::Incoming,
    lines::LineHold,
    transfer::{BatchVectors, Rest, vector},
    window::Window,
};
use crate::{memory::Absent, nonblocking::retry, stream::SocketMessage};

/// Upper bound of the time that a refused client takes to read why. Its bytes that are under way
/// are thrown away meanwhile, or the kernel would throw the answer away.
const LINGER: Duration = Duration::from_secs(1);

/// The client of a data connection.
#[derive(Clone, Copy)]
pub(crate) struct DataClient<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) session: SessionId,
    pub(crate) secret: &'a Secret,
    pub(crate) held: &'a LineHold<'a>,
}

/// A data connection while it is served, batch by batch.
pub(crate) struct DataService<'a> {
    pub(crate) client: DataClient<'a>,
    pub(crate) incoming: Incoming<'a>,
    /// Number of the next operation.
    pub(crate) sequence: u32,
    headers: [u8; MAX_BATCH * OP_HEADER_BYTES],
    vectors: BatchVectors,
    window: Window,
}

impl Connection {
    /// Serves batches until the client closes the connection.
    pub(super) fn data(
        &self,
        session: SessionId,
        secret: &Secret,
        held: &LineHold<'_>,
    ) -> Result<(), CloseReason> {
        let client = DataClient {
            connection: self,
            session,
            secret,
            held,
        };
        if self.service.host.exchanges() {
            return self.exchange(client);
        }
        let mut service = DataService::new(client)?;
        let mut batch = Batch::default();
        while service.next(&mut batch)? {
            service.run(&mut batch)?;
            service.reply(&mut batch)?;
        }
        Ok(())
    }
}

impl<'a> DataService<'a> {
    pub(crate) fn new(client: DataClient<'a>) -> io::Result<Self> {
        Ok(Self {
            client,
            incoming: Incoming::new(&client.connection.stream, LOOK)?,
            sequence: 0,
            headers: [0; MAX_BATCH * OP_HEADER_BYTES],
            vectors: BatchVectors::default(),
            window: Window::default(),
        })
    }

    /// Receives the headers of the next batch, and checks the operations. `false` if the client has
    /// closed the connection.
    pub(crate) fn next(&mut self, batch: &mut Batch) -> Result<bool, CloseReason> {
        // The first header says how many follow.
        if !self.fill(0..OP_HEADER_BYTES, true)? {
            return Ok(false);
        }
        let first = self.headers.first_chunk().expect("the first header");
        let end = (1 + usize::from(OpHeader::decode(first)?.following)) * OP_HEADER_BYTES;
        self.fill(OP_HEADER_BYTES..end, false)?;
        let DataClient {
            connection,
            session,
            ..
        } = self.client;
        let (host, headers) = (&*connection.service.host, &self.headers[..end]);
        self.sequence = batch.check(host, session, self.sequence, headers)?;
        Ok(true)
    }

    /// Carries out the operations of `batch`, except that READs move their bytes with the answer.
    pub(crate) fn run(&mut self, batch: &mut Batch) -> Result<(), CloseReason> {
        self.window.be_patient();
        batch.place(&mut self.vectors);
        let received = self.receive(&batch.ops);
        batch.settle(received)?;
        // Atomics come after the WRITEs before them.
        let changed = batch.change_words(|i, op, change| self.window.atomic(i, op, change));
        batch.settle(changed)
    }

    /// Answers the operations of `batch`. A refused operation ends the connection.
    pub(crate) fn reply(&mut self, batch: &mut Batch) -> Result<(), CloseReason> {
        batch.answer(&mut self.vectors);
        let sent = self.transmit(&batch.ops);
        batch.settle(sent)?;
        let traffic = &self.client.connection.service.traffic;
        traffic.count(batch.read_bytes(), batch.written_bytes());
        // The spans keep leases that may end before the next batch comes.
        batch.ops.clear();
        match batch.refused.take() {
            None => Ok(()),
            Some((header, status)) => self.client.refuse(&header, status),
        }
    }

    /// Fills a `range` of the headers. `false` if the client closed the connection where a batch
    /// `may_end`.
    fn fill(&mut self, range: Range<usize>, may_end: bool) -> Result<bool, CloseReason> {
        let mut filled = range.start;
        loop {
            filled += self.incoming.take(&mut self.headers[filled..range.end]);
            if filled == range.end {
                return Ok(true);
            }
            let is_between = may_end && filled == range.start;
            match self.incoming.wait() {
                Ok(0) if is_between => return Ok(false),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    self.client.check_session()?;
                }
                Err(error) if retry(&error) => {}
                Err(error) if may_end && error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Fills the vectors, which point to operands and into the spans of `ops`.
    fn receive(&mut self, ops: &[Checked]) -> Result<(), Stop> {
        let BatchVectors { vectors, pieces } = &mut self.vectors;
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            still_leased(ops)?;
            // Bytes that have arrived could still be read from a socket that was closed: the newer
            // connection waits for this one.
            if self.client.held.is_replaced() {
                return Err(CloseReason::replaced().into());
            }
            let mut grip = self.window.grip(&mut rest, pieces, ops)?;
            // SAFETY:
            // - every vector lies in a span of `ops`: bytes of a mapping that live as long as the
            //   span, writable, to which no reference exists anywhere; or is the place of an
            //   operand in the batch, which nobody looks at meanwhile.
            let received = unsafe { self.incoming.receive_message(&mut grip.message) };
            drop(grip);
            match received {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => rest.advance(bytes),
                Err(error) if retry(&error) => self.client.pause(PollFlags::POLLIN)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends the vectors, which point to answer headers, old values and into the spans of `ops`.
    ///
    /// An operation's memory is [`Stop::Absent`] only while nothing of its answer has been sent.
    fn transmit(&mut self, ops: &[Checked]) -> Result<(), Stop> {
        let BatchVectors { vectors, pieces } = &mut self.vectors;
        let stream = &self.client.connection.stream;
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            // A client that is slow to read must not be sent what the next holder of the extent
            // writes.
            still_leased(ops)?;
            let (header, most) = (rest.left()[0], stream.most_at_once());
            let mut passed = None;
            self.window.pass(&rest, pieces, ops, most, &mut |bytes| {
                let mut answer = [header, vector(bytes.as_ptr().cast_mut(), bytes.len())];
                let mut message = SocketMessage::new(answer.as_mut_ptr(), answer.len());
                // SAFETY: the header is kept by the batch, and `bytes` outlive the call; both are
                // only read.
                passed = Some(unsafe { stream.send_message(&mut message) });
            })?;
            let sent = match passed {
                Some(sent) => sent,
                None => {
                    let is_between = rest.is_between(pieces);
                    let grip = self.window.grip(&mut rest, pieces, ops);
                    let mut grip = grip.map_err(|stop| match stop {
                        Stop::Absent { op, why } if !is_between => {
                            let extent = ops[op].header.extent;
                            CloseReason::Unable(format!(
                                "extent {extent} in the middle of an answer: {why}"
                            ))
                            .into()
                        }
                        stop => stop,
                    })?;
                    // SAFETY: every vector is an answer header, an old value or lies in a span, all
                    // kept by the batch; they are only read.
                    unsafe { stream.send_message(&mut grip.message) }
                }
            };
            match sent {
                Ok(bytes) => {
                    rest.advance(bytes);
                    self.window.be_patient();
                }
                Err(error) if retry(&error) => self.client.pause(PollFlags::POLLOUT)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl DataClient<'_> {
    /// Checks that the session still lives.
    ///
    /// # Errors
    /// The session has ended.
    pub(crate) fn check_session(&self) -> Result<(), CloseReason> {
        let host = &self.connection.service.host;
        host.attach(self.session, self.secret)
            .map_err(CloseReason::Refused)
    }

    /// Sends `bytes`, the end of an answer.
    pub(crate) fn send(&self, mut bytes: &[u8]) -> Result<(), CloseReason> {
        while !bytes.is_empty() {
            match self.connection.stream.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if retry(&error) => self.pause(PollFlags::POLLOUT)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits for `events` on the socket for [`LOOK`] at most. Checks then that the session still
    /// lives.
    pub(crate) fn pause(&self, events: PollFlags) -> Result<(), CloseReason> {
        match self.connection.stream.wait(events, Instant::now() + LOOK) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => self.check_session(),
            other => Ok(other?),
        }
    }

    /// Answers that an operation was refused, and ends the connection so that the client can still
    /// read the answer.
    fn refuse(&self, header: &OpHeader, status: Status) -> Result<(), CloseReason> {
        let answer = AnswerHeader {
            status,
            sequence: header.sequence,
            len: 0,
        };
        let stream = &self.connection.stream;
        let until = Instant::now() + LINGER;
        stream.write_all(&answer.encode(), until)?;
        stream.close_sending();
        let mut waste = [0; 16 << 10];
        while Instant::now() < until {
            match stream.read(&mut waste) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if retry(&error) && stream.wait(PollFlags::POLLIN, until).is_ok() => {}
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
        let what = format!("{kind:?} of {len} bytes at {offset} of extent {extent}");
        Err(match status {
            Status::NoRoom => {
                CloseReason::Unable(format!("{what}: {}: see --memory", Absent::NoRoom))
            }
            Status::Unreadable => CloseReason::Unable(format!("{what}: {}", Absent::Unreadable)),
            Status::Ok | Status::Refused | Status::NotYet => CloseReason::Violation(format!(
                "{what}: not leased or leased to read only, out of its range, or for an atomic no multiple of 8 or not granted for atomics"
            )),
        })
    }
}
