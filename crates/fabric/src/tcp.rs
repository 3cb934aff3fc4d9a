//! The client half of TCP: pipelined operations on one connection, received straight into their
//! buffers.
//!
//! The rule it keeps: the server answers in the order of the operations, so the next bytes have a
//! known place, and no byte is copied here. One answer lacks the expected payload: that of a READ
//! that has waited for too long. The bytes behind it move up. Nothing in this file spins, and
//! nothing waits but [`Channel::poll_within`].
//!
//! Operations queue in `ops`, oldest first: the first `sent` are on the wire and wait for their
//! answers, the next `batch` are being sent, the rest will make the next batch.

use std::{
    array,
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use farpage_wire::data::{
    ANSWER_HEADER_BYTES, AnswerHeader, Condition, MAX_BATCH, OP_HEADER_BYTES, OPERAND_BYTES,
    OpHeader, OpKind, Status,
};

use crate::{
    Buf, Busy, Channel, ChannelError, Completion, Op, PollInterest, Since, Verb,
    attachment::Attachment,
    channel::{check_len, refused},
    nonblocking::{describe, retry},
    stream::PeerStream,
};

/// Upper bound of operations in flight.
const DEPTH: usize = MAX_BATCH;

/// Payload bytes at which a batch is closed, so that the server can answer its first operations
/// while later ones still travel. Measured from 64 KiB to 1 MiB: below, 64 KiB operations pay for
/// more system calls than they gain.
const BATCH_BYTES: usize = 1 << 20;

/// A channel over one TCP or Unix connection.
pub(crate) struct TcpChannel<B> {
    attachment: Attachment,
    stream: PeerStream,
    /// Time of the last arrival from the server.
    heard: Since,
    /// Error of a dead channel, with which every operation ends. Set once.
    dead: Option<ChannelError>,
    ops: VecDeque<QueuedOp<B>>,
    /// Number of `ops` that are on the wire.
    sent: usize,
    /// Number of `ops` behind the sent ones that make up the batch that is being sent.
    batch: usize,
    /// Headers of the batch that is being sent.
    headers: Vec<u8>,
    /// Bytes of the batch, headers included, that have been sent.
    batch_sent_bytes: usize,
    /// Bytes of the oldest answer that have been received.
    received_bytes: usize,
    /// Receive timeout that was last set on the stream.
    patience: Option<Duration>,
    /// Sequence number of the next operation.
    sequence: u32,
}

struct QueuedOp<B> {
    op: Op<B>,
    sequence: u32,
    posted: Since,
    /// Number that a READ waits for, and how long.
    condition: Option<Condition>,
    /// Operands of an atomic, or of the condition.
    operands: [u8; OPERAND_BYTES],
    answer: [u8; ANSWER_HEADER_BYTES],
}

impl<B: Buf> Channel<B> for TcpChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.enqueue(op, None)
    }

    fn post_when(&mut self, op: Op<B>, least: u64) -> Result<(), Busy<B>> {
        assert_eq!(op.verb, Verb::Read, "only READs wait");
        // The connection is silent while the READ waits: a quiet server looks dead.
        let wait_ms = self.attachment.patience.silence.as_millis() as u64 / 2;
        self.enqueue(op, Some(Condition { least, wait_ms }))
    }

    fn waits_for_numbers(&self) -> bool {
        true
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        self.advance(done, None)
    }

    fn poll_within(&mut self, done: &mut Vec<Completion<B>>, patience: Duration) -> usize {
        self.advance(done, Some(patience))
    }

    /// Returns true: the server receives WRITEs one after the other from one stream.
    fn writes_in_order(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        match self.ops.front() {
            None => PollInterest::default(),
            Some(_) if self.dead.is_some() => PollInterest {
                until: Some(Instant::now()),
                ..PollInterest::default()
            },
            Some(oldest) => PollInterest {
                fd: Some(self.stream.as_fd()),
                readable: true,
                writable: self.sent < self.ops.len(),
                until: Some(self.attachment.patience.look_by(oldest.posted, self.heard)),
            },
        }
    }
}

impl<B> AsFd for TcpChannel<B> {
    /// Returns a descriptor that is readable when an answer may have come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<B: Buf> TcpChannel<B> {
    /// Makes a channel over `stream`, which has been attached to the session.
    pub(crate) fn new(attachment: Attachment, stream: PeerStream) -> Self {
        Self {
            attachment,
            stream,
            heard: Since::now(),
            dead: None,
            ops: VecDeque::with_capacity(DEPTH),
            sent: 0,
            batch: 0,
            headers: Vec::with_capacity(MAX_BATCH * OP_HEADER_BYTES),
            batch_sent_bytes: 0,
            received_bytes: 0,
            patience: None,
            sequence: 0,
        }
    }

    fn enqueue(&mut self, op: Op<B>, condition: Option<Condition>) -> Result<(), Busy<B>> {
        if self.ops.len() == DEPTH {
            return Err(Busy(op));
        }
        check_len(&op);
        let operands = match (op.verb, condition) {
            (Verb::Atomic(atomic), _) => atomic.encode(),
            (_, Some(condition)) => condition.encode(),
            (Verb::Read | Verb::Write, None) => [0; OPERAND_BYTES],
        };
        let flying = QueuedOp {
            op,
            condition,
            operands,
            sequence: self.sequence,
            posted: Since::now(),
            answer: [0; ANSWER_HEADER_BYTES],
        };
        self.sequence = self.sequence.wrapping_add(1);
        // Sent by the next poll, together with all that is posted until then.
        self.ops.push_back(flying);
        Ok(())
    }

    /// Sends and receives. With `patience`, waits for the first answer.
    fn advance(&mut self, done: &mut Vec<Completion<B>>, patience: Option<Duration>) -> usize {
        let before = done.len();
        if self.ops.is_empty() {
            return 0;
        }
        if self.dead.is_none() {
            let moved = self
                .send()
                .and_then(|()| self.receive(done, patience))
                .and_then(|()| {
                    let posted = self.ops.front().map(|oldest| oldest.posted);
                    self.attachment.check(posted, self.heard)
                });
            self.dead = moved.err();
        }
        if let Some(error) = &self.dead {
            self.stream.close();
            done.extend(
                self.ops
                    .drain(..)
                    .map(|flying| flying.op.complete(Err(error.clone()))),
            );
            (self.sent, self.batch) = (0, 0);
        }
        done.len() - before
    }

    /// Sends as much as the socket takes.
    fn send(&mut self) -> Result<(), ChannelError> {
        while self.sent < self.ops.len() {
            if self.batch == 0 {
                self.form_batch();
            }
            let mut slices = [IoSlice::new(&[]); 1 + MAX_BATCH];
            let mut total_bytes = 0;
            let mut count = 0;
            let batch = self.ops.range(self.sent..self.sent + self.batch);
            let payloads = batch.map(QueuedOp::payload);
            for bytes in std::iter::once(&self.headers[..]).chain(payloads) {
                let skip = self
                    .batch_sent_bytes
                    .saturating_sub(total_bytes)
                    .min(bytes.len());
                total_bytes += bytes.len();
                if skip < bytes.len() {
                    slices[count] = IoSlice::new(&bytes[skip..]);
                    count += 1;
                }
            }
            match self.stream.write_vectored(&slices[..count]) {
                Ok(bytes) => self.batch_sent_bytes += bytes,
                Err(error) if retry(&error) => return Ok(()),
                // The reason of a refusal may still wait to be read, so receiving decides what this
                // error means.
                Err(_) if self.sent > 0 => return Ok(()),
                Err(error) => return Err(self.attachment.lost(describe(&error))),
            }
            if self.batch_sent_bytes == total_bytes {
                self.sent += self.batch;
                (self.batch, self.batch_sent_bytes) = (0, 0);
            }
        }
        Ok(())
    }

    fn form_batch(&mut self) {
        let waiting = self.ops.range(self.sent..);
        let mut payload_bytes = 0;
        let fits = |flying: &&QueuedOp<B>| {
            let fits = payload_bytes < BATCH_BYTES;
            payload_bytes += flying.payload().len();
            fits
        };
        self.batch = waiting.take(MAX_BATCH).take_while(fits).count();
        self.headers.clear();
        for (i, flying) in self
            .ops
            .range(self.sent..self.sent + self.batch)
            .enumerate()
        {
            let header = OpHeader {
                kind: match flying.op.verb {
                    Verb::Read if flying.condition.is_some() => OpKind::ReadWhen,
                    Verb::Read => OpKind::Read,
                    Verb::Write => OpKind::Write,
                    Verb::Atomic(atomic) => atomic.kind(),
                },
                following: (self.batch - 1 - i) as u16,
                sequence: flying.sequence,
                len: flying.op.len,
                extent: flying.op.extent,
                offset: flying.op.offset,
            };
            self.headers.extend_from_slice(&header.encode());
        }
    }

    /// Returns the error of an operation whose answer is not [`Status::Ok`].
    fn turned_down(&self, op: &Op<B>, status: Status) -> ChannelError {
        let endpoint = self.attachment.endpoint.clone();
        match status {
            Status::NoRoom => ChannelError::NoRoom { endpoint },
            Status::Unreadable => ChannelError::Unreadable {
                endpoint,
                extent: op.extent,
                offset: op.offset,
                len: op.len,
            },
            Status::Ok | Status::Refused | Status::NotYet => refused(&endpoint, op),
        }
    }

    /// Receives the bytes that have come. With `patience` and all sent, waits for the first.
    fn receive(
        &mut self,
        done: &mut Vec<Completion<B>>,
        patience: Option<Duration>,
    ) -> Result<(), ChannelError> {
        let patience = patience.filter(|_| self.sent == self.ops.len());
        if let Some(patience) = patience
            && self.patience != Some(patience)
        {
            let told = self.stream.let_wait(patience);
            told.map_err(|error| self.attachment.lost(describe(&error)))?;
            self.patience = Some(patience);
        }
        let mut waits = patience.is_some();
        while self.sent > 0 {
            let mut slices: [IoSliceMut<'_>; 2 * DEPTH] =
                array::from_fn(|_| IoSliceMut::new(&mut []));
            let mut wanted_bytes = 0;
            let mut skip = self.received_bytes;
            let mut count = 0;
            for bytes in places(&mut self.ops, self.sent) {
                let skipped = skip.min(bytes.len());
                skip -= skipped;
                let bytes = &mut bytes[skipped..];
                if !bytes.is_empty() {
                    wanted_bytes += bytes.len();
                    slices[count] = IoSliceMut::new(bytes);
                    count += 1;
                }
            }
            let bytes = match self.stream.read_vectored(&mut slices[..count], waits) {
                Ok(0) => {
                    return Err(self
                        .attachment
                        .lost("the server closed the connection".to_owned()));
                }
                Ok(bytes) => bytes,
                Err(error) if retry(&error) => return Ok(()),
                Err(error) => return Err(self.attachment.lost(describe(&error))),
            };
            waits = false;
            self.received_bytes += bytes;
            self.heard = Since::now();
            self.complete_received(done)?;
            if bytes < wanted_bytes {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Hands back the operations whose answers are complete.
    fn complete_received(&mut self, done: &mut Vec<Completion<B>>) -> Result<(), ChannelError> {
        while self.sent > 0 && self.received_bytes >= ANSWER_HEADER_BYTES {
            let oldest = &self.ops[0];
            let answer = AnswerHeader::decode(&oldest.answer);
            let not_yet = oldest
                .condition
                .filter(|_| matches!(&answer, Ok(answer) if answer.status == Status::NotYet));
            let payload_bytes = match oldest.op.verb.fetches() && not_yet.is_none() {
                true => oldest.op.len,
                false => 0,
            };
            let wrong = match answer {
                Err(error) => Some(error.to_string()),
                Ok(answer) if answer.sequence != oldest.sequence => {
                    Some("an answer out of order".to_owned())
                }
                Ok(AnswerHeader {
                    status: status @ (Status::Refused | Status::NoRoom | Status::Unreadable),
                    ..
                }) => {
                    // The server closes after a refusal. This operation gets the refusal, the
                    // others a lost connection.
                    let error = self.turned_down(&oldest.op, status);
                    let refused = self.ops.pop_front().expect("looked at above");
                    done.push(refused.op.complete(Err(error)));
                    Some(
                        "the server closed the connection after it refused an operation".to_owned(),
                    )
                }
                Ok(answer) if answer.len != payload_bytes => {
                    Some("an answer of another length".to_owned())
                }
                Ok(answer) if answer.status == Status::NotYet && not_yet.is_none() => {
                    Some("an operation that waits for nothing was answered with a wait".to_owned())
                }
                Ok(_) => None,
            };
            if let Some(reason) = wrong {
                return Err(self.attachment.lost(reason));
            }
            let answer_bytes = ANSWER_HEADER_BYTES + payload_bytes as usize;
            if self.received_bytes < answer_bytes {
                break;
            }
            let misplaced = not_yet.map(|_| self.beyond(ANSWER_HEADER_BYTES));
            self.received_bytes -= answer_bytes;
            self.sent -= 1;
            let flying = self.ops.pop_front().expect("looked at above");
            let result = match not_yet {
                None => Ok(()),
                Some(Condition { least, .. }) => Err(ChannelError::NotYet {
                    endpoint: self.attachment.endpoint.clone(),
                    least,
                }),
            };
            done.push(flying.op.complete(result));
            if let Some(mut bytes) = misplaced.as_deref() {
                for place in places(&mut self.ops, self.sent) {
                    let now = place.len().min(bytes.len());
                    place[..now].copy_from_slice(&bytes[..now]);
                    bytes = &bytes[now..];
                }
            }
        }
        Ok(())
    }

    /// Copies the bytes that were received behind the first `bytes` bytes.
    fn beyond(&mut self, bytes: usize) -> Vec<u8> {
        let received = places(&mut self.ops, self.sent).flat_map(|place| &*place);
        let received = received.take(self.received_bytes);
        received.skip(bytes).copied().collect()
    }
}

/// Returns the places of the answers of the oldest `sent` operations, each with its payload's.
fn places<B: Buf>(ops: &mut VecDeque<QueuedOp<B>>, sent: usize) -> impl Iterator<Item = &mut [u8]> {
    ops.range_mut(..sent).flat_map(|flying| {
        let payload: &mut [u8] = match flying.op.verb.fetches() {
            true => &mut flying.op.buf.as_mut()[..flying.op.len as usize],
            false => &mut [],
        };
        [&mut flying.answer[..], payload]
    })
}

impl<B: Buf> QueuedOp<B> {
    /// Returns the bytes that travel behind the headers.
    fn payload(&self) -> &[u8] {
        match self.op.verb {
            Verb::Read if self.condition.is_some() => &self.operands,
            Verb::Read => &[],
            Verb::Write => &self.op.buf.as_ref()[..self.op.len as usize],
            Verb::Atomic(_) => &self.operands,
        }
    }
}
