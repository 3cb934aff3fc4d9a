//! farpage for C: the functions of `farpage.h`.
//!
//! The rule it keeps: nothing that a caller does in C, short of a wild pointer, brings this side
//! down. Every argument is checked, a panic becomes [`FARPAGE_INTERNAL`], and each function says in
//! its documentation, which becomes the header, who owns what. What pages do is left to the
//! `farpage` crate.
//!
//! `include/farpage.h` is made from these files by cbindgen; `tests/header.rs` says how to renew
//! it.
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
