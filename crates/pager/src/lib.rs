//! Page protocol, residency budget, fillers and evictors: which page is in memory, and when it
//! comes and goes.
//!
//! The rule this crate keeps: **a page's bytes are in exactly one place that counts** (mapped in
//! the program, in a frame of ours, or in the store), and the word of the page says which. How
//! pages enter and leave the address space is `farpage-vm`'s business; where their bytes are kept
//! is `farpage-store`'s.
//!
//! Read `protocol.rs` first. Then, from the ground up:
//!
//! | rooms | hold |
//! |---|---|
//! | `region`, `run`, `clock` | pages of a region, runs, their age |
//! | `mapper`, `budget`, `frames` | the address space by pages; memory and its cap |
//! | `waker`, `doors`, `job` | how workers sleep, are woken and asked |
//! | `installer` | maps pages and publishes them |
//! | `victims`, `reclaim` | choosing victims, and taking them out |
//! | `scatter` | pages in and out as copies, where that is cheaper |
//! | `requests`, `shared` | requests to I/O queues; the parts that all workers share |
//! | `fills`, `pace` | bringing in |
//! | `ahead` | reading ahead |
//! | `hand_over`, `write_backs` | runs taken out, until they are safe |
//! | `freeze`, `frozen` | reclaim that rests while the program forks |
//! | `filler`, `evictor` | the workers |
//! | `inline_handler` | threads of the program that serve their own faults |
//! | `seats`, `executor`, `in_thread` | their threads |
//! | `pager`, `map`, `mapped` | the program's view |
//! | `discard`, `relocate` | pages that the program gives up, or wants elsewhere |
#![forbid(unsafe_code)]

mod ahead;
mod beginning;
mod budget;
mod cede;
mod clock;
mod crash_message;
mod discard;
mod doors;
mod error;
mod evictor;
mod executor;
mod filler;
mod fills;
mod frames;
mod freeze;
mod frozen;
mod hand_over;
mod in_thread;
mod inline_handler;
mod installer;
mod job;
mod map;
mod mapped;
mod mapper;
mod markers;
mod options;
mod ordinary;
mod owner_wait;
mod pace;
mod pager;
pub mod protocol;
mod reclaim;
mod region;
mod relocate;
mod requests;
mod run;
mod scatter;
mod seats;
mod shared;
#[cfg(test)]
mod simulation;
mod stats;
mod victims;
mod waker;
mod write_backs;

pub use error::{FORKED, FlushError, FreezeError, MapError, PageError, PinError, StartError};
pub use frozen::Frozen;
pub use in_thread::InThread;
pub use mapped::MappedRegion;
pub use options::{Advice, PagerOptions, RegionOptions};
pub use pager::{Lender, MappedImage, Pager};
pub use stats::PagerStats;
