//! The real address space on the real kernel, in both ways of moving pages.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod ceded;
mod common;
mod copied_out;
mod faults;
mod frames;
mod ordinary;
mod pages;
mod permissions;
mod program;
mod read_only;
mod regions;
mod runs;

#[path = "../common/moves.rs"]
mod moves;
