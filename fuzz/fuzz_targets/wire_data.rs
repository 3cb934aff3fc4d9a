//! libFuzzer drives `farpage_fuzz::wire_data`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| farpage_fuzz::wire_data::run(bytes));
