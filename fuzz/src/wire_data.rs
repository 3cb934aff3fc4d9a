//! Data headers from arbitrary bytes: no panic, and decoded headers encode to the same bytes.

use farpage_wire::{
    ExtentId, MAX_OP_BYTES,
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, MAX_BATCH, OP_HEADER_BYTES, OpHeader, OpKind, Status,
        WORD_BYTES,
    },
};

/// Decodes `bytes` as the header of an operation and as that of an answer.
pub fn run(bytes: &[u8]) {
    if let Some(header) = bytes.first_chunk::<OP_HEADER_BYTES>()
        && let Ok(op) = OpHeader::decode(header)
    {
        assert_eq!(&op.encode(), header);
        assert!(op.len > 0 && op.len <= MAX_OP_BYTES && usize::from(op.following) < MAX_BATCH);
        assert!(op.offset.checked_add(u64::from(op.len)).is_some());
    }
    if let Some(header) = bytes.first_chunk::<ANSWER_HEADER_BYTES>()
        && let Ok(answer) = AnswerHeader::decode(header)
    {
        assert_eq!(&answer.encode(), header);
    }
}

/// Makes a whole header of each kind.
pub fn seeds() -> Vec<Vec<u8>> {
    let kinds = [
        (OpKind::Read, 4096),
        (OpKind::Write, MAX_OP_BYTES),
        (OpKind::FetchAdd, WORD_BYTES),
        (OpKind::CompareSwap, WORD_BYTES),
        (OpKind::ReadWhen, 4096),
    ];
    let ops = kinds.map(|(kind, len)| {
        let op = OpHeader {
            kind,
            following: MAX_BATCH as u16 - 1,
            sequence: u32::MAX,
            len,
            extent: ExtentId(3),
            offset: 1 << 20,
        };
        op.encode().to_vec()
    });
    let answers = [
        Status::Ok,
        Status::Refused,
        Status::NoRoom,
        Status::Unreadable,
        Status::NotYet,
    ]
    .map(|status| {
        let answer = AnswerHeader {
            status,
            sequence: 9,
            len: 4096,
        };
        answer.encode().to_vec()
    });
    ops.into_iter().chain(answers).collect()
}
