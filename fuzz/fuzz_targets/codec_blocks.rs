//! libFuzzer drives `farpage_fuzz::codec_blocks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| farpage_fuzz::codec_blocks::run(bytes));
