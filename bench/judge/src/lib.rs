//! Judging and drawing: whole sittings of `farpage-bench`, what came of them, and pictures of it.
//!
//! The rule it keeps: what is judged is what a command printed, so that every figure can be
//! measured again by typing the command. Measuring is left to the commands.

// `println!` panics when nobody reads any more: what is found goes through `out::say`.
#![deny(clippy::print_stdout)]

pub mod codecs;
pub mod compare;
pub mod figures;
mod points;
mod record;
pub mod sweep;
pub mod targets;
pub mod versus_numpy;
pub mod versus_swap;
pub mod versus_umap;
