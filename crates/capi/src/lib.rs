//! farpage for C: the functions of `farpage.h`.
//!
//! The rule it keeps: a C caller, short of a wild pointer, cannot bring this side down. Every
//! argument is checked, a panic becomes [`FARPAGE_INTERNAL`], and each function's documentation,
//! which becomes the header, says who owns what. Pages are left to the `farpage` crate.
//!
//! `include/farpage.h` is made from these files by cbindgen; the message of `tests/header.rs` tells
//! how to renew it.
#![allow(
    non_camel_case_types,
    reason = "the types bear the names that they have in C"
)]

mod error;
mod file;
mod handle;
mod log;
mod names;
mod options;
mod region;
mod runtime;
mod stats;
mod store;

pub use error::*;
pub use log::*;
pub use names::*;
pub use options::*;
pub use region::*;
pub use runtime::*;
pub use stats::*;
pub use store::*;

/// Allocator of this library's own. The program's serves threads that do not belong to a runtime.
#[global_allocator]
static ALLOCATOR: farpage::Allocator = farpage::Allocator::new();
