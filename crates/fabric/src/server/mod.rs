//! The server half of every transport: accepts connections, parses frames, moves bytes.
//!
//! The rule it keeps: nothing that a peer sends can do more than close its own connection, with one
//! logged line that names the peer and the reason. The [`Host`](crate::host::Host) decides who may
//! have which memory.

mod accept;
mod batch;
mod close;
mod connection;
mod control;
mod data;
mod frames;
mod gate;
mod incoming;
mod kept;
mod lines;
mod listen;
mod places;
mod service;
mod traffic;
mod transfer;
mod window;

pub use self::{
    accept::ServerThread,
    kept::{Asked, KeptConnection, let_inherit, take_inherited},
    listen::{Listener, SocketAccess},
    places::ConnectionLimits,
    service::{Service, Shutdown},
    traffic::ServerTraffic,
};
pub(crate) use self::{
    batch::{Batch, still_leased},
    close::CloseReason,
    connection::{Connection, LOOK},
    control::answer,
    data::{DataClient, DataService},
    transfer::{BatchVectors, Rest},
};
pub use crate::errors::BindError;
