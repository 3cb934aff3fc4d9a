//! Parts shared by all of farpage's measurements: options, data, memory servers, runs, reports,
//! pictures.
//!
//! The rule it keeps: nothing here knows a benchmark. Benchmarks are left to `farpage-bench` and
//! the crates beside it.

// `println!` panics when the reader of standard output has gone: results go through `out::say`.
#![deny(clippy::print_stdout)]

pub mod arena;
pub mod bare;
pub mod cpus;
pub mod crew;
pub mod data;
pub mod held;
mod names;
pub mod options;
pub mod out;
pub mod paging;
pub mod panels;
pub mod pick;
pub mod plot;
pub mod progress;
pub mod raw;
pub mod report;
pub mod server;
pub mod sitting;
pub mod work;
pub mod yardsticks;

pub use farpage_bench_limits::cgroup;
