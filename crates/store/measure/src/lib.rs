//! Measurements of the store's inner parts, as subcommands of `farpage-bench`: its codecs, page by
//! page.
//!
//! The rule it keeps: measurements lie beside the code that they measure and in a crate of their
//! own, so that the store depends on nothing that measures it.

// `println!` panics when the reader has gone: results go through `out::say`.
#![deny(clippy::print_stdout)]

pub mod pages;
