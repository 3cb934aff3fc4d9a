//! Faults served in the threads that raise them, and every other SIGBUS.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;
mod copied;
mod foreign;
mod registrations;
mod served;

#[path = "../common/moves.rs"]
mod moves;
