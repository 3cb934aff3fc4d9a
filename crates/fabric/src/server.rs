//! The server half of every transport.
#![allow(missing_docs)]
use std::{io, sync::Arc};

use farpage_wire::Endpoint;

use crate::host::Host;

/// A bound endpoint.
pub struct Listener {
    _a: (),
}

/// Access of other users to a shared-memory socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketAccess {
    /// Mode 0600.
    #[default]
    Owner,
    /// Mode 0660.
    Group,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    #[error("another server is listening on {endpoint}: stop it or choose another path")]
    InUse { endpoint: String },
    #[error("cannot listen on {endpoint}: {source}")]
    Io { endpoint: String, source: io::Error },
    #[error("cannot listen on {endpoint}: a simulated server lives in its client's process")]
    Simulated { endpoint: String },
}

/// Payload bytes moved by the server's CPU; one for all listeners of a daemon.
#[derive(Debug, Default)]
pub struct Traffic {
    _a: (),
}

impl Traffic {
    pub fn bytes_read(&self) -> u64 {
        todo!()
    }
    pub fn bytes_written(&self) -> u64 {
        todo!()
    }
}

/// Ends [`serve`]; clones are the same switch.
#[derive(Clone, Debug)]
pub struct Shutdown {
    _a: (),
}

impl Shutdown {
    pub fn new() -> io::Result<Self> {
        todo!()
    }
    pub fn begin(&self) {
        todo!()
    }
    pub fn has_begun(&self) -> bool {
        todo!()
    }
}

impl Listener {
    pub fn bind(_endpoint: &Endpoint, _access: SocketAccess) -> Result<Self, BindError> {
        todo!()
    }
    /// Where it listens, with the port that was found when 0 was asked for.
    pub fn endpoint(&self) -> &Endpoint {
        todo!()
    }
}

/// Accepts and serves connections until `shutdown` begins; then closes them, joins their threads and returns.
/// A `Request::Stat` is answered from `Host::stat` with the bytes of `traffic` filled in.
pub fn serve(
    _listener: Listener,
    _host: Arc<dyn Host>,
    _traffic: Arc<Traffic>,
    _shutdown: Shutdown,
) {
    todo!()
}
