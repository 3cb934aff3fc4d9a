//! The data connection: fixed little-endian headers of READs, WRITEs and atomics and of their
//! answers.
//!
//! The rule it keeps: each side always knows where the next bytes go, so payloads are received
//! straight into memory. A client sends **batches**. A batch begins with the headers of up to
//! [`MAX_BATCH`] operations; each says how many follow it. Then come the payloads of WRITEs and the
//! operands of atomics, in the order of the headers. The server answers in the same order: a header
//! each, followed by a READ's payload or by an atomic's old value. After an answer other than
//! [`Status::Ok`] and [`Status::NotYet`] the server closes the connection.

use crate::ExtentId;

/// The most bytes that one operation moves: the largest page, stored raw.
pub const MAX_OP_BYTES: u32 = 2 << 20;

/// The most operations whose headers are sent together. Enough to make the cost of a system call
/// small, few enough that the first answer does not wait long for the last payload.
pub const MAX_BATCH: usize = 64;

/// Length of an encoded [`OpHeader`].
pub const OP_HEADER_BYTES: usize = 32;

/// Length of an encoded [`AnswerHeader`].
pub const ANSWER_HEADER_BYTES: usize = 16;

/// Length of the word that an [`Atomic`] changes, and of the old value that comes back.
pub const WORD_BYTES: u32 = 8;

/// Length of an encoded [`Atomic`], and of an encoded [`Condition`].
pub const OPERAND_BYTES: usize = 16;

const OP_MAGIC: u32 = u32::from_le_bytes(*b"fpOp");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"fpAn");

/// Kind of an operation, seen from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Remote memory to the client: the payload follows the answer.
    Read,
    /// The client to remote memory: the payload follows the headers of its batch.
    Write,
    /// [`Atomic::FetchAdd`]: the operands follow the headers of the batch, the old value follows
    /// the answer.
    FetchAdd,
    /// [`Atomic::CompareSwap`]: operands and old value travel as for [`FetchAdd`](Self::FetchAdd).
    CompareSwap,
    /// A READ that waits for its [`Condition`], which follows the headers of the batch: the payload
    /// follows the answer, if that is [`Status::Ok`].
    ReadWhen,
}

/// Condition of an [`OpKind::ReadWhen`] on the number at the beginning of a board's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// The least number that fulfils the condition.
    pub least: u64,
    /// Milliseconds that the server waits for the number before it answers [`Status::NotYet`].
    pub wait_ms: u64,
}

impl Condition {
    /// Returns the operands on the wire, two u64: `least` and `wait_ms`.
    pub fn encode(&self) -> [u8; OPERAND_BYTES] {
        pair(self.least, self.wait_ms)
    }

    /// Reads the condition from `operands`.
    pub fn decode(operands: &[u8; OPERAND_BYTES]) -> Self {
        Self {
            least: u64_at(operands, 0),
            wait_ms: u64_at(operands, 8),
        }
    }
}

/// An atomic change of one 8-byte word of remote memory. The word is a little-endian number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Atomic {
    /// Adds the number, wrapping.
    FetchAdd(u64),
    /// Replaces `expected` by `new`; leaves any other value alone.
    CompareSwap {
        /// The value that is replaced.
        expected: u64,
        /// The value that replaces it.
        new: u64,
    },
}

impl Atomic {
    /// Returns the kind of operation on the wire.
    pub fn kind(&self) -> OpKind {
        match self {
            Self::FetchAdd(_) => OpKind::FetchAdd,
            Self::CompareSwap { .. } => OpKind::CompareSwap,
        }
    }

    /// Returns the operands on the wire, two u64: the summand and 0 for [`Atomic::FetchAdd`],
    /// `expected` and `new` for [`Atomic::CompareSwap`].
    pub fn encode(&self) -> [u8; OPERAND_BYTES] {
        let (first, second) = match *self {
            Self::FetchAdd(summand) => (summand, 0),
            Self::CompareSwap { expected, new } => (expected, new),
        };
        pair(first, second)
    }
}

fn pair(first: u64, second: u64) -> [u8; OPERAND_BYTES] {
    let mut bytes = [0; OPERAND_BYTES];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

impl OpKind {
    /// True for the atomics.
    pub fn is_atomic(self) -> bool {
        match self {
            Self::Read | Self::Write | Self::ReadWhen => false,
            Self::FetchAdd | Self::CompareSwap => true,
        }
    }

    /// Returns the atomic of this kind with `operands`. `None` for READs and WRITEs.
    pub fn atomic(self, operands: &[u8; OPERAND_BYTES]) -> Option<Atomic> {
        let (first, second) = (u64_at(operands, 0), u64_at(operands, 8));
        match self {
            Self::Read | Self::Write | Self::ReadWhen => None,
            Self::FetchAdd => Some(Atomic::FetchAdd(first)),
            Self::CompareSwap => Some(Atomic::CompareSwap {
                expected: first,
                new: second,
            }),
        }
    }
}

/// Request for one operation.
///
/// Layout: magic u32, kind u8 (1 READ, 2 WRITE, 3 fetch-and-add, 4 compare-and-swap, 5 READ that
/// waits), zero u8, following u16, sequence u32, length u32 (of an atomic 8), extent u64, offset
/// u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpHeader {
    /// The operation.
    pub kind: OpKind,
    /// Number of headers of the same batch that come after this one.
    pub following: u16,
    /// Number of the operation on its connection, from 0, wrapping; the answer repeats it.
    pub sequence: u32,
    /// Bytes to move.
    pub len: u32,
    /// The extent.
    pub extent: ExtentId,
    /// The first byte's offset in the extent.
    pub offset: u64,
}

/// Outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The bytes moved.
    Ok,
    /// The range is not in a lease of this client, or an atomic's offset is no multiple of 8.
    Refused,
    /// The server lends more than its memory, and no memory came free for the bytes in time.
    NoRoom,
    /// The server moved the bytes out of its memory and cannot read them back as they were.
    Unreadable,
    /// The [`Condition`] of an [`OpKind::ReadWhen`] did not come true in time. The connection goes
    /// on.
    NotYet,
}

/// Answer to one operation.
///
/// Layout: magic u32, status u8 (0 ok, 1 refused, 2 no room, 3 unreadable, 4 not yet), 3 zero
/// bytes, sequence u32, payload length u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHeader {
    /// The operation's status.
    pub status: Status,
    /// The operation's sequence number.
    pub sequence: u32,
    /// Payload bytes that follow: the operation's length after an `Ok` READ or atomic, otherwise 0.
    pub len: u32,
}

/// Reason why a header was not understood: the connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataDecodeError {
    /// The stream slipped, or the peer speaks something else.
    #[error("bad magic in a data header")]
    Magic,
    /// An unknown operation or status.
    #[error("unknown kind {0} in a data header")]
    Kind(u8),
    /// Bytes that must be zero are not.
    #[error("reserved bytes of a data header are set")]
    Reserved,
    /// The length is 0, exceeds [`MAX_OP_BYTES`], or is not [`WORD_BYTES`] for an atomic.
    #[error(
        "operation of {0} bytes; from 1 to {MAX_OP_BYTES} are allowed, and {WORD_BYTES} of atomics"
    )]
    Length(u32),
    /// More headers announced than a batch holds.
    #[error("batch of more than {MAX_BATCH} operations")]
    Batch,
    /// `offset + len` exceeds the address space.
    #[error("offset beyond the address space")]
    Offset,
}

impl OpHeader {
    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; OP_HEADER_BYTES] {
        let mut bytes = [0; OP_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&OP_MAGIC.to_le_bytes());
        bytes[4] = match self.kind {
            OpKind::Read => 1,
            OpKind::Write => 2,
            OpKind::FetchAdd => 3,
            OpKind::CompareSwap => 4,
            OpKind::ReadWhen => 5,
        };
        bytes[6..8].copy_from_slice(&self.following.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.extent.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// True if the offset is allowed. The offset of an atomic must be a multiple of [`WORD_BYTES`];
    /// any other operation may begin anywhere.
    pub fn is_aligned(&self) -> bool {
        !self.kind.is_atomic() || self.offset.is_multiple_of(u64::from(WORD_BYTES))
    }

    /// Reads a header.
    ///
    /// # Errors
    /// Anything that no client of this version sends. The server checks whether the range is leased
    /// and aligned.
    pub fn decode(bytes: &[u8; OP_HEADER_BYTES]) -> Result<Self, DataDecodeError> {
        if u32_at(bytes, 0) != OP_MAGIC {
            return Err(DataDecodeError::Magic);
        }
        let kind = match bytes[4] {
            1 => OpKind::Read,
            2 => OpKind::Write,
            3 => OpKind::FetchAdd,
            4 => OpKind::CompareSwap,
            5 => OpKind::ReadWhen,
            kind => return Err(DataDecodeError::Kind(kind)),
        };
        if bytes[5] != 0 {
            return Err(DataDecodeError::Reserved);
        }
        let following = u16::from_le_bytes([bytes[6], bytes[7]]);
        if usize::from(following) >= MAX_BATCH {
            return Err(DataDecodeError::Batch);
        }
        let len = u32_at(bytes, 12);
        let allowed = match kind {
            OpKind::Read | OpKind::Write | OpKind::ReadWhen => 1..=MAX_OP_BYTES,
            OpKind::FetchAdd | OpKind::CompareSwap => WORD_BYTES..=WORD_BYTES,
        };
        if !allowed.contains(&len) {
            return Err(DataDecodeError::Length(len));
        }
        let offset = u64_at(bytes, 24);
        if offset.checked_add(u64::from(len)).is_none() {
            return Err(DataDecodeError::Offset);
        }
        Ok(Self {
            kind,
            following,
            sequence: u32_at(bytes, 8),
            len,
            extent: ExtentId(u64_at(bytes, 16)),
            offset,
        })
    }
}

impl AnswerHeader {
    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; ANSWER_HEADER_BYTES] {
        let mut bytes = [0; ANSWER_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&ANSWER_MAGIC.to_le_bytes());
        bytes[4] = match self.status {
            Status::Ok => 0,
            Status::Refused => 1,
            Status::NoRoom => 2,
            Status::Unreadable => 3,
            Status::NotYet => 4,
        };
        bytes[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// Anything that no server of this version sends.
    pub fn decode(bytes: &[u8; ANSWER_HEADER_BYTES]) -> Result<Self, DataDecodeError> {
        if u32_at(bytes, 0) != ANSWER_MAGIC {
            return Err(DataDecodeError::Magic);
        }
        let status = match bytes[4] {
            0 => Status::Ok,
            1 => Status::Refused,
            2 => Status::NoRoom,
            3 => Status::Unreadable,
            4 => Status::NotYet,
            status => return Err(DataDecodeError::Kind(status)),
        };
        if bytes[5..8] != [0; 3] {
            return Err(DataDecodeError::Reserved);
        }
        let len = u32_at(bytes, 12);
        if len > MAX_OP_BYTES || (status != Status::Ok && len != 0) {
            return Err(DataDecodeError::Length(len));
        }
        Ok(Self {
            status,
            sequence: u32_at(bytes, 8),
            len,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> impl Strategy<Value = OpHeader> {
        let kind_and_len = prop_oneof![
            (
                prop_oneof![
                    Just(OpKind::Read),
                    Just(OpKind::Write),
                    Just(OpKind::ReadWhen)
                ],
                1..=MAX_OP_BYTES
            ),
            (
                prop_oneof![Just(OpKind::FetchAdd), Just(OpKind::CompareSwap)],
                Just(WORD_BYTES)
            ),
        ];
        (
            kind_and_len,
            0..MAX_BATCH as u16,
            any::<u32>(),
            any::<u64>(),
            0..u64::MAX - u64::from(MAX_OP_BYTES),
        )
            .prop_map(
                |((kind, len), following, sequence, extent, offset)| OpHeader {
                    kind,
                    following,
                    sequence,
                    len,
                    extent: ExtentId(extent),
                    offset,
                },
            )
    }

    #[test]
    fn headers_have_pinned_bytes() {
        let op = OpHeader {
            kind: OpKind::Write,
            following: 3,
            sequence: 7,
            len: 4096,
            extent: ExtentId(5),
            offset: 0x0102_0304,
        };
        let mut expected =
            *b"fpOp\x02\0\x03\0\x07\0\0\0\0\x10\0\0\x05\0\0\0\0\0\0\0\x04\x03\x02\x01\0\0\0\0";
        assert_eq!(op.encode(), expected);
        expected[4] = 5;
        let waiting = OpHeader {
            kind: OpKind::ReadWhen,
            ..op
        };
        assert_eq!(OpHeader::decode(&expected), Ok(waiting));
        let condition = Condition {
            least: 0x0102,
            wait_ms: 7,
        };
        let operands = b"\x02\x01\0\0\0\0\0\0\x07\0\0\0\0\0\0\0";
        assert_eq!(&condition.encode(), operands);
        assert_eq!(Condition::decode(operands), condition);
        expected[4] = 6;
        assert_eq!(OpHeader::decode(&expected), Err(DataDecodeError::Kind(6)));
        let add = Atomic::FetchAdd(0x0102);
        let swap = Atomic::CompareSwap {
            expected: 3,
            new: u64::MAX,
        };
        for (atomic, kind, operands) in [
            (add, 3, b"\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
            (
                swap,
                4,
                b"\x03\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
            ),
        ] {
            let (kind_of, len) = (atomic.kind(), WORD_BYTES);
            let header = OpHeader {
                kind: kind_of,
                len,
                ..op
            };
            assert_eq!(header.encode()[4], kind);
            assert_eq!(&atomic.encode(), operands);
            assert_eq!(kind_of.atomic(operands), Some(atomic));
            assert_eq!(OpKind::Write.atomic(operands), None);
        }
        for (status, byte) in [
            (Status::Refused, 1),
            (Status::NoRoom, 2),
            (Status::Unreadable, 3),
            (Status::NotYet, 4),
        ] {
            let answer = AnswerHeader {
                status,
                sequence: 9,
                len: 0,
            };
            let mut expected = *b"fpAn\0\0\0\0\x09\0\0\0\0\0\0\0";
            expected[4] = byte;
            assert_eq!(answer.encode(), expected);
            assert_eq!(AnswerHeader::decode(&expected), Ok(answer));
        }
    }

    #[test]
    fn limits_hold_at_their_edges() {
        let op = OpHeader {
            kind: OpKind::Read,
            following: 0,
            sequence: 0,
            len: MAX_OP_BYTES,
            extent: ExtentId(0),
            offset: 0,
        };
        let decode = |op: OpHeader| OpHeader::decode(&op.encode());
        assert_eq!(decode(op), Ok(op));
        let long = |kind, len| OpHeader { kind, len, ..op };
        let mut wrong = vec![long(OpKind::Read, 0), long(OpKind::Read, MAX_OP_BYTES + 1)];
        for kind in [OpKind::FetchAdd, OpKind::CompareSwap] {
            wrong.extend([4, 7, 9, 16].map(|len| long(kind, len)));
        }
        for op in wrong {
            assert_eq!(decode(op), Err(DataDecodeError::Length(op.len)));
        }
        let following = MAX_BATCH as u16;
        assert_eq!(
            decode(OpHeader { following, ..op }),
            Err(DataDecodeError::Batch)
        );
        let offset = u64::MAX;
        assert_eq!(
            decode(OpHeader { offset, ..op }),
            Err(DataDecodeError::Offset)
        );
    }

    proptest! {
        #[test]
        fn op_headers_survive_the_wire(op in header()) {
            prop_assert_eq!(OpHeader::decode(&op.encode()), Ok(op));
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_what_decodes_encodes_to_itself(
            op in any::<[u8; OP_HEADER_BYTES]>(), answer in any::<[u8; ANSWER_HEADER_BYTES]>(), valid in header(),
            at in 0..OP_HEADER_BYTES, byte in any::<u8>(),
        ) {
            let mut nearly = valid.encode();
            nearly[at] = byte;
            for bytes in [op, nearly] {
                if let Ok(op) = OpHeader::decode(&bytes) {
                    prop_assert_eq!(op.encode(), bytes);
                }
            }
            let mut nearly = answer;
            nearly[..4].copy_from_slice(b"fpAn");
            if let Ok(answer) = AnswerHeader::decode(&nearly) {
                prop_assert_eq!(answer.encode(), nearly);
            }
        }
    }
}
