//! Control frames and hellos from arbitrary bytes: no panic, and what decodes survives being encoded again.
//!
//! Run: `cargo +nightly fuzz run wire_control`; a bounded version runs with the tests of `farpage-wire`.
#![no_main]

use farpage_wire::{
    Request, Response,
    control::{self, HELLO_BYTES, Hello, MAX_FRAME_BYTES, PREFIX_BYTES},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>()
        && let Ok(decoded) = Hello::decode(hello)
    {
        assert_eq!(&decoded.encode(), hello);
    }
    if let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() {
        assert!(control::frame_bytes(*prefix, MAX_FRAME_BYTES).unwrap_or(0) <= MAX_FRAME_BYTES);
    }
    // Bytes may be another, longer form of the same number: the values must agree, not the bytes.
    if let Ok(request) = control::decode::<Request>(bytes) {
        let frame = control::encode(&request)
            .expect("what was decoded is no longer than what it came from");
        assert_eq!(
            control::decode::<Request>(&frame[PREFIX_BYTES..]).as_ref(),
            Ok(&request)
        );
    }
    if let Ok(response) = control::decode::<Response>(bytes) {
        let frame = control::encode(&response)
            .expect("what was decoded is no longer than what it came from");
        assert_eq!(
            control::decode::<Response>(&frame[PREFIX_BYTES..]).as_ref(),
            Ok(&response)
        );
    }
});
