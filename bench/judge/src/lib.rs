//! Judging and drawing: whole sittings of `farpage-bench`, their findings, and pictures of them.
//!
//! The rule it keeps: only what a command printed is judged, so that every figure can be measured
//! again by typing the command. Measuring is left to the commands.

// `println!` panics when the reader of standard output has gone: results go through `out::say`.
#![deny(clippy::print_stdout)]

mod bound;
pub mod codecs;
pub mod compare;
pub mod figures;
mod points;
mod record;
pub mod targets;
pub mod versus_numpy;
pub mod versus_swap;
pub mod versus_umap;
