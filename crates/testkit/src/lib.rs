//! Helpers that the tests of several crates share: servers, clients that lie, child processes,
//! watchdogs and seeds.
//!
//! The rule it keeps: no wait is without a bound, and no process or server outlives its owner. What
//! needs a runtime is left to the tests of `farpage`.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

pub mod channel;
pub mod process;
pub mod random;
pub mod raw;
pub mod relay;
pub mod server;
pub mod wait;

pub use channel::{op, transfer};
pub use process::{TestProcess, finish, passes_in_child, run, say, test_command, text};
pub use random::{Rng, mix, seed};
pub use raw::{Identity, RawClient};
pub use relay::Relay;
pub use server::{Both, rdma, serve, serve_tcp, socket_in, tcp};
pub use wait::{PATIENCE, Watchdog, test_name, wait_until};

/// One kibibyte.
pub const KIB: usize = 1 << 10;
/// One mebibyte.
pub const MIB: usize = 1 << 20;
