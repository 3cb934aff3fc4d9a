//! [`Checked`]: one operation of a batch, checked against the leases of its session.
//!
//! The rule it keeps: no byte of an operation moves before it is checked.

use farpage_wire::{
    SessionId,
    data::{AnswerHeader, DataDecodeError, OP_HEADER_BYTES, OpHeader, OpKind, Status},
};

use crate::{
    host::Host,
    memory::{ExtentSpan, Residency},
    ring::Board,
};

/// One operation of a batch, checked.
pub(super) struct Checked {
    pub(super) header: OpHeader,
    pub(super) span: ExtentSpan,
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
}

pub(super) fn header_at(headers: &[u8], index: usize) -> Result<OpHeader, DataDecodeError> {
    let bytes = &headers[index * OP_HEADER_BYTES..][..OP_HEADER_BYTES];
    OpHeader::decode(bytes.try_into().expect("a header's length"))
}

/// Checks an operation against the leases of `session`. `None` if it is not permitted.
pub(super) fn permitted(host: &dyn Host, session: SessionId, header: OpHeader) -> Option<Checked> {
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

/// Returns the answer to an operation that is not refused. `is_waiting`: the number that this READ
/// waits for, or one before it in the batch, has not come.
pub(super) fn answer_to(header: &OpHeader, is_waiting: bool) -> AnswerHeader {
    AnswerHeader {
        status: match is_waiting {
            true => Status::NotYet,
            false => Status::Ok,
        },
        sequence: header.sequence,
        len: match header.kind {
            OpKind::ReadWhen if is_waiting => 0,
            OpKind::Write => 0,
            OpKind::Read | OpKind::ReadWhen | OpKind::FetchAdd | OpKind::CompareSwap => header.len,
        },
    }
}
