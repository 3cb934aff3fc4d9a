//! libFuzzer drives `farpage_fuzz::server_connection`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| farpage_fuzz::server_connection::run(bytes));
