//! Data headers from arbitrary bytes: no panic, and what decodes encodes to the same bytes.
//!
//! Run: `cargo +nightly fuzz run wire_data`; a bounded version runs with the tests of `farpage-wire`.
#![no_main]

use farpage_wire::{
    MAX_OP_BYTES,
    data::{ANSWER_HEADER_BYTES, AnswerHeader, MAX_BATCH, OP_HEADER_BYTES, OpHeader},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
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
});
