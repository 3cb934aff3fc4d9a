//! [`Batch`]: operations that came together, each checked against the leases of its session.
//!
//! The rule it keeps: no byte of an operation moves before the operation is checked. A refused
//! operation ends its batch: the operations before the refused one are carried out, and the
//! connection is closed.

use std::io;

use farpage_wire::{
    Atomic, SessionId,
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, Condition, MAX_BATCH, OP_HEADER_BYTES, OPERAND_BYTES,
        OpHeader, OpKind, Status, WORD_BYTES,
    },
};

use super::{close::CloseReason, transfer::BatchVectors};
use crate::{
    exchange::ring::Board,
    host::Host,
    memory::{Absent, ExtentSpan, Residency},
};

/// Operations of one batch. Used again and again.
pub(crate) struct Batch {
    /// Operations that are carried out.
    pub(crate) ops: Vec<Checked>,
    bytes: [OpBytes; MAX_BATCH],
    /// Index of the first READ whose number has not come. That READ, and those behind it that wait
    /// for a number, are answered [`Status::NotYet`].
    pub(crate) waiting: Option<usize>,
    /// The operation behind `ops` that is not carried out, and the status of its answer.
    pub(super) refused: Option<(OpHeader, Status)>,
}

/// One operation of a batch, checked.
pub(crate) struct Checked {
    pub(super) header: OpHeader,
    pub(crate) span: ExtentSpan,
}

/// Bytes on the wire of one operation that are not in its span.
#[derive(Clone, Copy, Default)]
struct OpBytes {
    operands: [u8; OPERAND_BYTES],
    answer: [u8; ANSWER_HEADER_BYTES],
    /// Old value of an atomic's word.
    word: [u8; WORD_BYTES as usize],
}

/// Reason why a step of a batch has ended early.
pub(crate) enum Stop {
    /// The memory of operation `op` cannot be had. The operations before `op` go on.
    Absent { op: usize, why: Absent },
    /// The connection cannot go on.
    Close(CloseReason),
}

impl From<CloseReason> for Stop {
    fn from(reason: CloseReason) -> Self {
        Self::Close(reason)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Close(error.into())
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            ops: Vec::with_capacity(MAX_BATCH),
            bytes: [OpBytes::default(); MAX_BATCH],
            waiting: None,
            refused: None,
        }
    }
}

impl Batch {
    /// Checks the operations of `headers`, a whole batch, against the protocol and the leases of
    /// `session`. The first one must have the number `sequence`. Returns the next one's number.
    ///
    /// # Errors
    /// The headers make no batch.
    pub(crate) fn check(
        &mut self,
        host: &dyn Host,
        session: SessionId,
        mut sequence: u32,
        headers: &[u8],
    ) -> Result<u32, CloseReason> {
        self.ops.clear();
        (self.waiting, self.refused) = (None, None);
        let headers = headers.as_chunks::<OP_HEADER_BYTES>().0;
        for (bytes, left) in headers.iter().zip((0..headers.len()).rev()) {
            let header = OpHeader::decode(bytes)?;
            if usize::from(header.following) != left || header.sequence != sequence {
                return Err(CloseReason::Violation("operations out of order".to_owned()));
            }
            sequence = sequence.wrapping_add(1);
            match permitted(host, session, header) {
                Some(op) => self.ops.push(op),
                None => {
                    self.refused = Some((header, Status::Refused));
                    break;
                }
            }
        }
        Ok(sequence)
    }

    /// Points `vectors` at the places of the bytes that follow the headers: the spans of WRITEs,
    /// and the operands.
    pub(crate) fn place(&mut self, vectors: &mut BatchVectors) {
        vectors.clear();
        for (i, (op, bytes)) in self.ops.iter().zip(&mut self.bytes).enumerate() {
            match op.header.kind {
                OpKind::Read => {}
                OpKind::Write => vectors.push_span(i, &op.span),
                OpKind::FetchAdd | OpKind::CompareSwap | OpKind::ReadWhen => {
                    vectors.push(i, &mut bytes.operands);
                }
            }
        }
    }

    /// Executes the atomics, each by `execute`, which returns the word's old value.
    pub(super) fn change_words(
        &mut self,
        mut execute: impl FnMut(usize, &Checked, Atomic) -> Result<u64, Stop>,
    ) -> Result<(), Stop> {
        for (i, (op, bytes)) in self.ops.iter().zip(&mut self.bytes).enumerate() {
            if let Some(change) = op.header.kind.atomic(&bytes.operands) {
                bytes.word = execute(i, op, change)?.to_le_bytes();
            }
        }
        Ok(())
    }

    /// Returns the condition of operation `i`, if it is a READ that waits for a number.
    pub(crate) fn condition(&self, i: usize) -> Option<Condition> {
        let waits = self.ops[i].header.kind == OpKind::ReadWhen;
        waits.then(|| Condition::decode(&self.bytes[i].operands))
    }

    /// Notes the first READ whose number `has_come` denies.
    pub(crate) fn look(&mut self, has_come: impl Fn(&ExtentSpan, &Condition) -> bool) {
        self.waiting = (0..self.ops.len()).find(|&i| {
            self.condition(i)
                .is_some_and(|condition| !has_come(&self.ops[i].span, &condition))
        });
    }

    /// Points `vectors` at the answers, with the payloads of READs and the old values of atomics
    /// behind them.
    pub(crate) fn answer(&mut self, vectors: &mut BatchVectors) {
        vectors.clear();
        for (i, (op, bytes)) in self.ops.iter().zip(&mut self.bytes).enumerate() {
            let is_waiting = is_waiting(self.waiting, i, op);
            let answer = AnswerHeader {
                status: match is_waiting {
                    true => Status::NotYet,
                    false => Status::Ok,
                },
                sequence: op.header.sequence,
                len: match op.header.kind {
                    OpKind::Write => 0,
                    _ if is_waiting => 0,
                    _ => op.header.len,
                },
            };
            bytes.answer = answer.encode();
            vectors.push(i, &mut bytes.answer);
            match op.header.kind {
                _ if answer.len == 0 => {}
                kind if kind.is_atomic() => vectors.push(i, &mut bytes.word),
                _ => vectors.push_span(i, &op.span),
            }
        }
    }

    /// Handles the `outcome` of a step: cuts off the operation whose memory cannot be had, and all
    /// operations behind that one.
    ///
    /// # Errors
    /// The step ends the connection.
    pub(super) fn settle(&mut self, outcome: Result<(), Stop>) -> Result<(), CloseReason> {
        let (op, why) = match outcome {
            Ok(()) => return Ok(()),
            Err(Stop::Close(reason)) => return Err(reason),
            Err(Stop::Absent { op, why }) => (op, why),
        };
        let status = match why {
            Absent::NoRoom => Status::NoRoom,
            Absent::Unreadable => Status::Unreadable,
            Absent::Released => return Err(self.ops[op].lease_ended()),
        };
        self.refused = Some((self.ops[op].header, status));
        self.ops.truncate(op);
        Ok(())
    }

    /// True if an operation was refused.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Returns the number of bytes of the READs that are answered with bytes.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.payload_bytes(|i, op| match op.header.kind {
            OpKind::Read | OpKind::ReadWhen => !is_waiting(self.waiting, i, op),
            OpKind::Write | OpKind::FetchAdd | OpKind::CompareSwap => false,
        })
    }

    /// Returns the number of bytes of the WRITEs.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.payload_bytes(|_, op| op.header.kind == OpKind::Write)
    }

    /// Returns the number of bytes of the operations that `counts` names.
    pub(crate) fn payload_bytes(&self, counts: impl Fn(usize, &Checked) -> bool) -> u64 {
        let counted = self.ops.iter().enumerate().filter(|(i, op)| counts(*i, op));
        counted.map(|(_, op)| u64::from(op.header.len)).sum()
    }
}

fn is_waiting(first: Option<usize>, i: usize, op: &Checked) -> bool {
    op.header.kind == OpKind::ReadWhen && first.is_some_and(|first| first <= i)
}

impl Checked {
    /// Returns the offset in the extent of an `address` in the span.
    pub(super) fn offset_of(&self, address: *const u8) -> u64 {
        self.header.offset + (address.addr() - self.span.as_ptr().addr()) as u64
    }

    pub(super) fn range(&self) -> (u64, u64) {
        (self.header.offset, u64::from(self.header.len))
    }

    pub(super) fn residency(&self) -> &dyn Residency {
        let residency = self.span.residency();
        residency.expect("only such memory is held")
    }

    /// Returns the reason that closes the connection: the lease has ended meanwhile.
    pub(crate) fn lease_ended(&self) -> CloseReason {
        CloseReason::Violation(format!(
            "the lease of extent {} ended during a {:?}",
            self.header.extent, self.header.kind
        ))
    }
}

/// Checks that no lease of `ops` has ended.
///
/// # Errors
/// A lease has ended, which closes the connection.
pub(crate) fn still_leased(ops: &[Checked]) -> Result<(), CloseReason> {
    let ended = ops.iter().find(|op| op.span.is_revoked());
    ended.map_or(Ok(()), |op| Err(op.lease_ended()))
}

/// Checks an operation against the leases of `session`. `None` if it is not permitted.
fn permitted(host: &dyn Host, session: SessionId, header: OpHeader) -> Option<Checked> {
    let lease = host.extent(session, header.extent)?;
    let takes = header.is_aligned()
        && (!header.kind.is_atomic() || lease.has_atomics())
        && match header.kind {
            OpKind::Read => true,
            OpKind::ReadWhen => Board::has_number(&lease),
            _ => !lease.is_read_only(),
        };
    let span = takes.then(|| lease.span(header.offset, u64::from(header.len)));
    let span = span?.ok()?;
    Some(Checked { header, span })
}
