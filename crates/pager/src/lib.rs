//! Page protocol, residency budget, fillers and evictors: which page is in memory, and when it comes and goes.
//!
//! The rule this crate keeps: **a page's bytes are in exactly one place that counts** (mapped in the program, in a frame of
//! ours, or in the store), and the word of the page says which. How pages enter and leave the address space is `farpage-vm`'s,
//! where their bytes are kept `farpage-store`'s business.
//!
//! Read `protocol.rs` first, then `filler.rs` (the path of a fault) and `evictor.rs` (the path of an eviction).
#![forbid(unsafe_code)]

mod ahead;
mod behind;
mod bell;
mod core;
mod error;
mod evictor;
mod filler;
mod frames;
mod handover;
mod in_thread;
mod job;
mod pace;
mod pager;
pub mod protocol;
mod region;
mod run;
mod scatter;
#[cfg(test)]
mod simulation;
mod slab;
mod stats;
mod sweep;
mod team;
mod victims;
mod worker;

pub use error::PageError;
pub use in_thread::InThread;
pub use pager::{
    Advice, FlushError, MapError, Mapped, Pager, PagerOptions, PinError, RegionOptions, StartError,
};
pub use stats::PagerStats;
