//! Messages between farpage's clients and servers: ids, endpoints, control messages and byte
//! layouts.
//!
//! The rule it keeps: every decoder is total. Whatever bytes arrive, it returns a value or an
//! error, never panics and never allocates more than it was sent. Sockets, memory and policy are
//! left to the crates above.
#![forbid(unsafe_code)]

pub mod control;
pub mod data;
mod endpoint;
mod environment;
mod id;
mod key;
mod limit;
pub mod register;
pub mod segment;
mod stat;
mod units;

pub use control::{
    Durability, ExtentRange, NamedRegion, Persistence, Refusal, Request, Response, VersionRead,
    Versions,
};
pub use data::{Atomic, MAX_OP_BYTES};
pub use endpoint::{Endpoint, EndpointError};
pub use environment::{UnknownVariable, check_environment, is_known};
pub use id::{ExtentId, Secret, ServerId, SessionId};
pub use key::{Challenge, PublicKey, PublicKeyError, Signature, bytes_of_hex, hex_of};
pub use limit::Limit;
pub use stat::{ClientStat, PersistStat, ServerStat, ShareStat, TierStat};
pub use units::{UnitError, parse_size, parse_time, told_apart};

/// Protocol version of this build. A peer with another version is turned away. Every change of a
/// message raises the number; the tests of [`control`] and [`data`] pin the bytes of all
/// messages.
pub const VERSION: u16 = 12;

/// Implements `Debug` of error types by their `Display`.
///
/// Programs whose `main` returns a `Result`, and `unwrap`, print errors by `Debug`. The text has to
/// say what went wrong and what to do, as `Display` does.
#[macro_export]
macro_rules! debug_as_display {
    ($($error:ty),+ $(,)?) => {$(
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}
