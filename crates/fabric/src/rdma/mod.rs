//! The fabric for which the others stand in: one-sided READ, WRITE and atomics by a network adapter
//! (InfiniBand, RoCE, and iWARP with immediate data).
//!
//! The rule it keeps: the server's processor takes no part in an operation, and a key opens only
//! what is leased to the client that was given it. Connections are made by the connection manager,
//! so that addresses, path and MTU are found and never assumed. Each session has a protection
//! domain at the server, in which its extents are registered for as long as they are leased; data
//! connections belong to the domain of their session. The control connection is a byte stream
//! through two rings ([`control`]) and carries the same control messages as any other; behind an
//! answer that leases memory come its [`RemoteKey`]s.
//!
//! Memory that the server may move elsewhere is reached through [`paged`].
//!
//! All calls into C are in [`verbs`], which hands safe types to the rest.

mod bounce;
mod bundle;
mod channel;
mod client;
mod connect;
mod control;
mod domains;
mod greeting;
mod leases;
mod paged;
mod reasons;
mod route;
mod server;
mod stream;
#[cfg(test)]
mod tests;
mod verbs;

pub(crate) use self::{
    client::Client,
    control::ASK_AGAIN,
    reasons::devices,
    route::{Route, channel, channels, paged_channel},
    server::{ConnectionRequest, RdmaListener},
    stream::RdmaStream,
};
