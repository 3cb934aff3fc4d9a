//! Measurements of the fabric's inner parts, as subcommands of `farpage-bench`: message rings,
//! verbs, registered memory.
//!
//! The rule it keeps: measurements lie beside the code that they measure and in a crate of their
//! own, so that the fabric depends on nothing that measures it.

// `println!` panics when its reader has gone: results go through `out::say`.
#![deny(clippy::print_stdout)]

pub mod regmem;
pub mod ring;
pub mod verbs;
