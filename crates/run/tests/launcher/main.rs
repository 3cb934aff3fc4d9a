//! The launcher itself: what becomes of signals.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

#[path = "../common/mod.rs"]
mod common;
mod signals;

const PYTHON: &str = "/usr/bin/python3";
