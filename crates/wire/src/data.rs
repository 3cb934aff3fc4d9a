//! The data connection: fixed little-endian headers of READs and WRITEs and of their answers.
//!
//! The rule it keeps: one side always knows where the other's next bytes go, so that payloads are received straight
//! into memory. A client sends **batches**: the headers of up to [`MAX_BATCH`] operations, each saying how many follow it,
//! then the payloads of the WRITEs among them. The server answers in the order of the operations: a header each, a READ's
//! followed by its payload. After an answer other than [`Status::Ok`] the server closes the connection.

use crate::ExtentId;

/// The most that one operation moves: the largest page, stored raw.
pub const MAX_OP_BYTES: u32 = 2 << 20;

/// The most operations whose headers are sent together. Enough to make the cost of a system call small, few enough
/// that the first answer does not wait long for the last payload.
pub const MAX_BATCH: usize = 64;

/// Length of an encoded [`OpHeader`].
pub const OP_HEADER_BYTES: usize = 32;

/// Length of an encoded [`AnswerHeader`].
pub const ANSWER_HEADER_BYTES: usize = 16;

const OP_MAGIC: u32 = u32::from_le_bytes(*b"fpOp");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"fpAn");

/// Direction of an operation, seen from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Remote memory to the client: the payload follows the answer.
    Read,
    /// The client to remote memory: the payload follows the headers of its batch.
    Write,
}

/// Asks for one operation.
///
/// Layout: magic u32, kind u8 (1 READ, 2 WRITE), zero u8, following u16, sequence u32, length u32, extent u64, offset u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpHeader {
    /// Direction.
    pub kind: OpKind,
    /// How many headers of the same batch come after this one.
    pub following: u16,
    /// Counts the operations of a connection, from 0, wrapping; the answer repeats it.
    pub sequence: u32,
    /// How many bytes.
    pub len: u32,
    /// Which extent.
    pub extent: ExtentId,
    /// Where in the extent.
    pub offset: u64,
}

/// What became of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The bytes moved.
    Ok,
    /// The address is not in a lease of this client.
    Refused,
}

/// Answers one operation.
///
/// Layout: magic u32, status u8 (0 ok, 1 refused), 3 zero bytes, sequence u32, payload length u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHeader {
    /// What became of it.
    pub status: Status,
    /// The operation's.
    pub sequence: u32,
    /// How many payload bytes follow: a READ's length, otherwise 0.
    pub len: u32,
}

/// Why a header was not understood: the connection cannot go on.
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
    /// No bytes, or more than [`MAX_OP_BYTES`].
    #[error("operation of {0} bytes; from 1 to {MAX_OP_BYTES} are allowed")]
    Length(u32),
    /// More headers announced than a batch holds.
    #[error("batch of more than {MAX_BATCH} operations")]
    Batch,
    /// `offset + len` exceeds the address space.
    #[error("offset beyond the address space")]
    Offset,
}

impl OpHeader {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; OP_HEADER_BYTES] {
        let mut bytes = [0; OP_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&OP_MAGIC.to_le_bytes());
        bytes[4] = match self.kind {
            OpKind::Read => 1,
            OpKind::Write => 2,
        };
        bytes[6..8].copy_from_slice(&self.following.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.extent.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// Anything that no client of this version sends. Whether the range is leased is for the server to find out.
    pub fn decode(bytes: &[u8; OP_HEADER_BYTES]) -> Result<Self, DataDecodeError> {
        if u32_at(bytes, 0) != OP_MAGIC {
            return Err(DataDecodeError::Magic);
        }
        let kind = match bytes[4] {
            1 => OpKind::Read,
            2 => OpKind::Write,
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
        if len == 0 || len > MAX_OP_BYTES {
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
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; ANSWER_HEADER_BYTES] {
        let mut bytes = [0; ANSWER_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&ANSWER_MAGIC.to_le_bytes());
        bytes[4] = match self.status {
            Status::Ok => 0,
            Status::Refused => 1,
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
        let kind = prop_oneof![Just(OpKind::Read), Just(OpKind::Write)];
        (
            kind,
            0..MAX_BATCH as u16,
            any::<u32>(),
            1..=MAX_OP_BYTES,
            any::<u64>(),
            0..u64::MAX - u64::from(MAX_OP_BYTES),
        )
            .prop_map(
                |(kind, following, sequence, len, extent, offset)| OpHeader {
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
        expected[4] = 3;
        assert_eq!(OpHeader::decode(&expected), Err(DataDecodeError::Kind(3)));
        let answer = AnswerHeader {
            status: Status::Refused,
            sequence: 9,
            len: 0,
        };
        assert_eq!(&answer.encode(), b"fpAn\x01\0\0\0\x09\0\0\0\0\0\0\0");
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
        assert_eq!(
            decode(OpHeader { len: 0, ..op }),
            Err(DataDecodeError::Length(0))
        );
        assert_eq!(
            decode(OpHeader {
                len: MAX_OP_BYTES + 1,
                ..op
            }),
            Err(DataDecodeError::Length(MAX_OP_BYTES + 1))
        );
        assert_eq!(
            decode(OpHeader {
                following: MAX_BATCH as u16,
                ..op
            }),
            Err(DataDecodeError::Batch)
        );
        assert_eq!(
            decode(OpHeader {
                offset: u64::MAX,
                ..op
            }),
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
