//! The data connection, server side: a software NIC that serves READs and WRITEs straight from and
//! into extents, and does atomics on them.
//!
//! The rule it keeps: every operation is checked against the leases of its session before a byte of
//! it moves. Payloads go between the socket and the mapping by vectored system calls; only what
//! came together with headers is copied ([`super::incoming`]). Memory whose bytes may be elsewhere
//! is held in [`super::window`].

use std::{
    io,
    sync::{Arc, atomic::Ordering, mpsc::RecvTimeoutError},
    time::{Duration, Instant},
};

use farpage_wire::{
    Secret, SessionId,
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, Condition, MAX_BATCH, OP_HEADER_BYTES, OPERAND_BYTES,
        OpHeader, OpKind, Status, WORD_BYTES,
    },
};
use nix::poll::PollFlags;

use super::{
    connection::{CloseReason, Connection, LOOK},
    incoming::Incoming,
    lines::LineHold,
    operation::{Checked, answer_to, header_at, permitted},
    together::{Delegation, DelegationEnd, SMALL_BYTES, Together},
    transfer::{BatchVectors, Rest, vector},
    window::{Grip, Stuck, Window},
};
use crate::{memory::Absent, nonblocking::retry, ring::Board, stream::SocketMessage};

/// Upper bound of the time that a refused client takes to read why. Its bytes that are under way
/// are thrown away meanwhile, or the kernel would throw the answer away.
const LINGER: Duration = Duration::from_secs(1);

impl Connection {
    /// Serves batches until the client closes the connection.
    pub(super) fn data(
        &self,
        session: SessionId,
        secret: &Secret,
        held: &LineHold<'_>,
    ) -> Result<(), CloseReason> {
        let mut headers = [0; MAX_BATCH * OP_HEADER_BYTES];
        let mut checked = Vec::with_capacity(MAX_BATCH);
        let mut operands = [[0; OPERAND_BYTES]; MAX_BATCH];
        let mut answers = [[0; ANSWER_HEADER_BYTES]; MAX_BATCH];
        let mut words = [[0; WORD_BYTES as usize]; MAX_BATCH];
        let mut vectors = BatchVectors::default();
        let mut window = Window::default();
        let mut incoming = Incoming::new(&self.stream, LOOK)?;
        let alive = || {
            self.service
                .host
                .attach(session, secret)
                .map_err(CloseReason::Refused)
        };
        let _counted = self.service.count_data_connection();
        let (mut sequence, mut is_small) = (0, false);
        loop {
            if is_small && let Some(together) = self.service.together() {
                let guest = self.guest(session, sequence, incoming.take_all());
                let back = self.leave_to(together, guest, &alive)?;
                (sequence, is_small) = (back.sequence, false);
                incoming.put_back(&back.come);
                if back.is_over {
                    let what = "the lease of what an answer was made of ended".to_owned();
                    return Err(CloseReason::Violation(what));
                }
                let mut unsent = back.unsent;
                let mut vectors = [vector(unsent.as_mut_ptr(), unsent.len())];
                let mut rest = Rest::new(&mut vectors);
                while rest.bytes > 0 {
                    // SAFETY: the vector points into `unsent`, which is only read.
                    let sent = unsafe { self.stream.send_message(&mut rest.message()) };
                    self.went(sent, &mut rest, &mut window, &alive)?;
                }
                continue;
            }
            // 1. The headers: the first says how many follow.
            let (first, rest) = headers.split_at_mut(OP_HEADER_BYTES);
            if !fill(first, &mut incoming, true, &alive)? {
                return Ok(());
            }
            let following = usize::from(header_at(first, 0)?.following);
            let rest = &mut rest[..following * OP_HEADER_BYTES];
            fill(rest, &mut incoming, false, &alive)?;
            // 2. Each against the protocol and against the leases.
            checked.clear();
            let mut refused = None;
            for i in 0..=following {
                let header = header_at(&headers, i)?;
                if usize::from(header.following) != following - i || header.sequence != sequence {
                    return Err(CloseReason::Violation("operations out of order".to_owned()));
                }
                sequence = sequence.wrapping_add(1);
                match permitted(&*self.service.host, session, header) {
                    Some(op) => checked.push(op),
                    None => {
                        refused = Some((header, Status::Refused));
                        break;
                    }
                }
            }
            window.be_patient();
            // 3. The payloads of the WRITEs, into place, and the operands of the atomics.
            vectors.clear();
            for (i, (op, operands)) in checked.iter().zip(&mut operands).enumerate() {
                match op.header.kind {
                    OpKind::Read => {}
                    OpKind::Write => vectors.push_span(i, &op.span),
                    OpKind::FetchAdd | OpKind::CompareSwap | OpKind::ReadWhen => {
                        vectors.push(i, operands);
                    }
                }
            }
            let received = self.receive(
                &mut vectors,
                &checked,
                &mut window,
                &mut incoming,
                held,
                &alive,
            )?;
            if let Err(stuck) = received {
                refused = Some(cut(&mut checked, &stuck)?);
            }
            if checked.iter().any(|op| op.header.kind == OpKind::Write) {
                self.service.host.written(session);
            }
            // 4. The atomics: after the WRITEs before them.
            if let Err(stuck) = change_words(&checked, &operands, &mut words, &mut window)? {
                refused = Some(cut(&mut checked, &stuck)?);
            }
            // 5. The READs that wait: until all can go on, or the first has waited for too long.
            let stays = || !held.is_replaced() && !self.service.shutdown.has_begun();
            let waiting = checked.iter().zip(&operands).position(|(op, operands)| {
                op.header.kind == OpKind::ReadWhen
                    && !Board::reaches(&op.span, &Condition::decode(operands), &stays)
            });
            // 6. The answers, those of READs with the payload behind them and those of atomics with
            //    the old value.
            vectors.clear();
            for (i, (op, (bytes, word))) in
                (checked.iter().zip(answers.iter_mut().zip(&mut words))).enumerate()
            {
                let is_waiting =
                    op.header.kind == OpKind::ReadWhen && waiting.is_some_and(|first| first <= i);
                *bytes = answer_to(&op.header, is_waiting).encode();
                vectors.push(i, bytes);
                match op.header.kind {
                    OpKind::ReadWhen if is_waiting => {}
                    OpKind::Read | OpKind::ReadWhen => vectors.push_span(i, &op.span),
                    OpKind::Write => {}
                    OpKind::FetchAdd | OpKind::CompareSwap => vectors.push(i, word),
                }
            }
            let sent = self.transmit(&mut vectors, &checked, &mut window, &alive)?;
            if let Err(stuck) = sent {
                refused = Some(cut(&mut checked, &stuck)?);
            }
            let moved_bytes = |kind| {
                let moved = checked.iter().filter(|op| op.header.kind == kind);
                moved.map(|op| u64::from(op.header.len)).sum::<u64>()
            };
            let waited_bytes = match waiting {
                None => moved_bytes(OpKind::ReadWhen),
                Some(_) => 0,
            };
            self.service
                .traffic
                .read_bytes
                .fetch_add(moved_bytes(OpKind::Read) + waited_bytes, Ordering::Relaxed);
            self.service
                .traffic
                .written_bytes
                .fetch_add(moved_bytes(OpKind::Write), Ordering::Relaxed);
            let bytes = |op: &Checked| op.header.len as usize;
            is_small =
                checked.iter().map(bytes).sum::<usize>() < SMALL_BYTES / 2 && !is_paged(&checked);
            // The spans keep leases that may end before the next batch comes.
            checked.clear();
            if let Some((header, status)) = refused {
                return self.refuse(&header, status);
            }
        }
    }

    fn guest(&self, session: SessionId, sequence: u32, come: Vec<u8>) -> Delegation {
        Delegation {
            stream: Arc::clone(&self.stream),
            host: Arc::clone(&self.service.host),
            traffic: Arc::clone(&self.service.traffic),
            session,
            sequence,
            come,
        }
    }

    /// Lets `together` serve the small batches, until the connection has to go on by itself.
    fn leave_to(
        &self,
        together: &Together,
        guest: Delegation,
        alive: &dyn Fn() -> Result<(), CloseReason>,
    ) -> Result<DelegationEnd, CloseReason> {
        let here = together.serve(guest);
        loop {
            match here.recv_timeout(LOOK) {
                Ok(back) => return Ok(back),
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(fault) = alive() {
                        // Nothing of the session is served any more when this returns.
                        self.stream.close();
                        let _ = here.recv();
                        return Err(fault);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let what = "the thread that serves all connections has failed".to_owned();
                    return Err(CloseReason::Unable(what));
                }
            }
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

    /// Fills `vectors`, which point to operands and into the spans of `checked`.
    fn receive(
        &self,
        vectors: &mut BatchVectors,
        checked: &[Checked],
        window: &mut Window,
        incoming: &mut Incoming<'_>,
        held: &LineHold<'_>,
        alive: &dyn Fn() -> Result<(), CloseReason>,
    ) -> Result<Result<(), Stuck>, CloseReason> {
        let is_paged = is_paged(checked);
        let BatchVectors { vectors, pieces } = vectors;
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            still_leased(checked)?;
            // Bytes that have arrived could still be read from a socket that was closed: the newer
            // connection waits for this one.
            if held.is_replaced() {
                return Err(CloseReason::replaced());
            }
            let mut grip = match is_paged.then(|| window.fill(&rest, pieces, checked)) {
                None => None,
                Some(Ok(grip)) => Some(grip),
                Some(Err(stuck)) => return Ok(Err(stuck)),
            };
            let mut message = grip.as_mut().map_or_else(|| rest.message(), Grip::message);
            // SAFETY:
            // - every vector lies in a span of `checked`: bytes of a mapping that live as long as
            //   the span, writable, to which no reference exists anywhere; or is the place of an
            //   operand, kept by the caller, which does not look at it meanwhile.
            let received = unsafe { incoming.receive_message(&mut message) };
            drop(grip);
            match received {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => rest.advance(bytes),
                Err(error) if retry(&error) => self.pause(PollFlags::POLLIN, alive)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(()))
    }

    /// Sends `vectors`, which point to answer headers, old values and into the spans of `checked`.
    ///
    /// An operation is `Stuck` only when nothing of its answer has been sent.
    fn transmit(
        &self,
        vectors: &mut BatchVectors,
        checked: &[Checked],
        window: &mut Window,
        alive: &dyn Fn() -> Result<(), CloseReason>,
    ) -> Result<Result<(), Stuck>, CloseReason> {
        let is_paged = is_paged(checked);
        let BatchVectors { vectors, pieces } = vectors;
        let mut rest = Rest::new(vectors);
        while rest.bytes > 0 {
            // A client that is slow to read must not be sent what the next holder of the extent
            // writes.
            still_leased(checked)?;
            let mut sent = None;
            if is_paged {
                let header = rest.left()[0];
                let most = self.stream.most_at_once();
                let passed = window.pass(&rest, pieces, checked, most, &mut |bytes| {
                    let mut answer = [header, vector(bytes.as_ptr().cast_mut(), bytes.len())];
                    let mut message = SocketMessage::new(answer.as_mut_ptr(), answer.len());
                    // SAFETY: the header is kept by the caller, and `bytes` outlive the call; both
                    // are only read.
                    sent = Some(unsafe { self.stream.send_message(&mut message) });
                });
                if let Err(stuck) = passed {
                    return Ok(Err(stuck));
                }
            }
            if let Some(sent) = sent {
                self.went(sent, &mut rest, window, alive)?;
                continue;
            }
            let mut grip = match is_paged.then(|| window.fill(&rest, pieces, checked)) {
                None => None,
                Some(Ok(grip)) => Some(grip),
                Some(Err(stuck)) if rest.is_between(pieces) => return Ok(Err(stuck)),
                Some(Err(stuck)) => {
                    let Stuck { op, why } = stuck;
                    return Err(CloseReason::Unable(format!(
                        "extent {} in the middle of an answer: {why}",
                        checked[op].header.extent
                    )));
                }
            };
            let mut message = grip.as_mut().map_or_else(|| rest.message(), Grip::message);
            // SAFETY: every vector is an answer header, an old value or lies in a span, all kept by
            // the caller; they are only read.
            let sent = unsafe { self.stream.send_message(&mut message) };
            drop(grip);
            self.went(sent, &mut rest, window, alive)?;
        }
        Ok(Ok(()))
    }

    /// Handles the outcome `sent` of sending a part of `rest`: advances, or waits for the socket.
    fn went(
        &self,
        sent: io::Result<usize>,
        rest: &mut Rest<'_>,
        window: &mut Window,
        alive: &dyn Fn() -> Result<(), CloseReason>,
    ) -> Result<(), CloseReason> {
        match sent {
            Ok(bytes) => {
                rest.advance(bytes);
                window.be_patient();
                Ok(())
            }
            Err(error) if retry(&error) => self.pause(PollFlags::POLLOUT, alive),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for `events` on the socket for [`LOOK`] at most. Checks then that the session still
    /// lives.
    fn pause(
        &self,
        events: PollFlags,
        alive: &dyn Fn() -> Result<(), CloseReason>,
    ) -> Result<(), CloseReason> {
        match self.stream.wait(events, Instant::now() + LOOK) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => alive(),
            other => Ok(other?),
        }
    }
}

/// Fills `buf` with headers. `false` if the client closed the connection where a batch `may_end`.
fn fill(
    mut buf: &mut [u8],
    incoming: &mut Incoming<'_>,
    may_end: bool,
    alive: &dyn Fn() -> Result<(), CloseReason>,
) -> Result<bool, CloseReason> {
    let whole = buf.len();
    loop {
        let taken = incoming.take(buf);
        buf = &mut buf[taken..];
        if buf.is_empty() {
            return Ok(true);
        }
        match incoming.wait() {
            Ok(0) if may_end && buf.len() == whole => return Ok(false),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => alive()?,
            Err(error) if retry(&error) => {}
            Err(error) if may_end && error.kind() == io::ErrorKind::ConnectionReset => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// True if some of the memory may be elsewhere.
fn is_paged(checked: &[Checked]) -> bool {
    checked.iter().any(|op| op.span.residency().is_some())
}

/// Executes the atomics of a batch.
fn change_words(
    checked: &[Checked],
    operands: &[[u8; OPERAND_BYTES]],
    words: &mut [[u8; WORD_BYTES as usize]],
    window: &mut Window,
) -> Result<Result<(), Stuck>, CloseReason> {
    for (i, op) in checked.iter().enumerate() {
        if let Some(change) = op.header.kind.atomic(&operands[i]) {
            match window.atomic(op, change) {
                Ok(old) => words[i] = old.map_err(|_| lease_ended(op))?.to_le_bytes(),
                Err(why) => return Ok(Err(Stuck { op: i, why })),
            }
        }
    }
    Ok(Ok(()))
}

/// Cuts the operation that is `stuck`, and all behind it, off its batch. Returns its header and the
/// status of its answer.
fn cut(checked: &mut Vec<Checked>, stuck: &Stuck) -> Result<(OpHeader, Status), CloseReason> {
    let op = &checked[stuck.op];
    let status = match stuck.why {
        Absent::NoRoom => Status::NoRoom,
        Absent::Unreadable => Status::Unreadable,
        Absent::Released => return Err(lease_ended(op)),
    };
    let header = op.header;
    checked.truncate(stuck.op);
    Ok((header, status))
}

fn still_leased(checked: &[Checked]) -> Result<(), CloseReason> {
    match checked.iter().find(|op| op.span.is_revoked()) {
        None => Ok(()),
        Some(op) => Err(lease_ended(op)),
    }
}

fn lease_ended(op: &Checked) -> CloseReason {
    CloseReason::Violation(format!(
        "the lease of extent {} ended during a {:?}",
        op.header.extent, op.header.kind
    ))
}
