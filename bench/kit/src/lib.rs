//! What all of farpage's measurements have in common: options, data, memory servers, runs, reports,
//! pictures.
//!
//! The rule it keeps: nothing here knows a benchmark. What they are is left to `farpage-bench` and
//! the crates beside it.

// `println!` panics when nobody reads any more: what is found goes through `out::say`.
#![deny(clippy::print_stdout)]

pub mod arena;
pub mod bare;
pub mod cpus;
pub mod data;
pub mod held;
pub mod options;
pub mod out;
pub mod panels;
pub mod pick;
pub mod plot;
pub mod progress;
pub mod raw;
pub mod remote;
pub mod report;
pub mod server;
pub mod sitting;
pub mod work;
pub mod yardsticks;

pub use farpage_bench_limits::cgroup;
