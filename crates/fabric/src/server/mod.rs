//! The server half of every transport: accepts connections, parses frames, moves bytes.
//!
//! The rule it keeps: nothing that a peer sends can do more than close its own connection, with one
//! logged line that names the peer and the reason. The [`Host`](crate::host::Host) decides who may
//! have which memory.

mod connection;
mod control;
mod data;
mod frames;
mod incoming;
mod lines;
mod listen;
mod places;
mod service;
mod together;
mod window;

use std::time::Duration;

pub(crate) use self::control::answer;
pub use self::{
    listen::{Listener, SocketAccess},
    places::ConnectionLimits,
    service::{Service, Serving, Shutdown, Traffic},
};
pub use crate::errors::BindError;

/// Interval at which a thread that waits for a client checks that its session still lives.
const LOOK: Duration = Duration::from_secs(1);
