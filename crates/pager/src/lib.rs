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
mod budget;
mod claim;
mod clock;
mod costs;
mod doors;
mod error;
mod evictor;
mod filler;
mod fills;
mod flights;
mod frames;
mod free;
mod guest;
mod hand_over;
mod held;
mod in_thread;
mod installer;
mod job;
mod last_words;
mod leaving;
mod mapped;
mod mapper;
mod options;
mod pace;
mod pager;
mod proof;
pub mod protocol;
mod region;
mod regions;
mod relief;
mod run;
mod scatter;
mod shared;
#[cfg(test)]
mod simulation;
mod slab;
mod stats;
mod stretch;
mod sweep;
mod team;
mod victims;
mod wishes;
mod worker;
mod write_backs;

pub use error::{FORKED, FlushError, MapError, PageError, PinError, StartError};
pub use in_thread::InThread;
pub use mapped::Mapped;
pub use options::{Advice, PagerOptions, RegionOptions};
pub use pager::Pager;
pub use stats::PagerStats;
