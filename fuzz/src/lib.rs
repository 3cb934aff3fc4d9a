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
    Target {
        name: "wire_control",
        run: wire_control::run,
        seeds: wire_control::seeds,
    },
    Target {
        name: "wire_data",
        run: wire_data::run,
        seeds: wire_data::seeds,
    },
    Target {
        name: "codec_blocks",
        run: codec_blocks::run,
        seeds: codec_blocks::seeds,
    },
    Target {
        name: "server_connection",
        run: server_connection::run,
        seeds: server_connection::seeds,
    },
];
