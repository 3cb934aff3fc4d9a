//! Fuzz targets: each takes any bytes at all and panics if their reader breaks its promise.
//!
//! The rule it keeps: a target is a plain function. libFuzzer calls it with coverage and the
//! address sanitizer (`cargo xtask sanitize`), and the tests of this package call it with a bounded
//! number of mutated seeds, so that no target rots unseen. `seeds` are inputs that reach deep:
//! whole messages of the current version.

pub mod codec_blocks;
pub mod server_connection;
pub mod wire_control;
pub mod wire_data;

/// A target with its name.
pub struct Target {
    /// Name of the target's module and of its program.
    pub name: &'static str,
    /// Function that takes one input, and panics where something is wrong.
    pub run: fn(&[u8]),
    /// Function that returns inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets of this package.
pub const TARGETS: [Target; 4] = [
    target("wire_control", wire_control::run, wire_control::seeds),
    target("wire_data", wire_data::run, wire_data::seeds),
    target("codec_blocks", codec_blocks::run, codec_blocks::seeds),
    target(
        "server_connection",
        server_connection::run,
        server_connection::seeds,
    ),
];

const fn target(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, run, seeds }
}
