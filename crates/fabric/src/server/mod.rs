//! The server half of every transport: accepts connections, parses frames, moves bytes.
//!
//! The rule it keeps: nothing that a peer sends can do more than close its own connection, with one
//! logged line that names the peer and the reason. The [`Host`](crate::host::Host) decides who may
//! have which memory.

mod accept;
mod connection;
mod control;
mod data;
mod frames;
mod incoming;
mod lines;
mod listen;
mod operation;
mod places;
mod service;
mod together;
mod traffic;
mod transfer;
mod window;

pub(crate) use self::control::answer;
pub use self::{
    accept::ServerThread,
    listen::{Listener, SocketAccess},
    places::ConnectionLimits,
    service::{Service, Shutdown},
    traffic::ServerTraffic,
};
pub use crate::errors::BindError;
