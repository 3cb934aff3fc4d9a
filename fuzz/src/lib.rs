//! Fuzz targets: each takes any bytes at all and panics if what reads them breaks its promise.
//!
//! The rule it keeps: a target is a plain function. libFuzzer calls it with coverage and the
//! address sanitizer (`cargo xtask sanitize`), and the tests of this package call it with a bounded
//! number of mutated seeds, so that no target rots unseen. `seeds` are inputs that reach deep:
//! whole messages of the current version.

pub mod codec_blocks;
pub mod server_connection;
pub mod wire_control;
pub mod wire_data;

/// One target under its name.
pub struct Target {
    /// Of its module and of its program.
    pub name: &'static str,
    /// Takes one input; panics where something is wrong.
    pub run: fn(&[u8]),
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
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
