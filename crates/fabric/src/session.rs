//! [`Session`]: a client's stay at one memory server.
#![allow(missing_docs)]
use std::{io, sync::Arc, time::Duration};

use farpage_wire::{Endpoint, ExtentId, ServerStat};

use crate::{Buf, Channel, Link};

pub struct Session {
    _a: (),
}

/// How a session behaves.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The longest that one operation or one control call may take.
    pub deadline: Duration,
    /// Makes channels behave like a slower network; shared by all sessions that are to share the link.
    pub link: Option<Arc<Link>>,
    /// Who we are, for the server's log.
    pub client: String,
}

/// Memory leased by a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Names it in operations.
    pub id: ExtentId,
    /// Its length.
    pub bytes: u64,
}

/// An opened named region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// What its last publisher stored.
    pub manifest: Vec<u8>,
    /// The extents that it refers to, leased to this session from now on.
    pub extents: Vec<Extent>,
}

/// Why no connection to a server came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nothing answers there.
    #[error("cannot connect to {endpoint}: {source}; is a memory server running there?")]
    Unreachable {
        /// The server's endpoint.
        endpoint: String,
        /// What the system said.
        source: io::Error,
    },
    /// Something answers that is no server of this version.
    #[error("{endpoint} answered, but {reason}")]
    Protocol {
        /// The server's endpoint.
        endpoint: String,
        /// What was wrong.
        reason: String,
    },
    /// The server turned the client away.
    #[error("{endpoint} refused the connection: {reason}")]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// The server's words.
        reason: String,
    },
}

/// Why a control call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The connection broke, or the server did not answer in time.
    #[error("connection to {endpoint} lost while trying to {attempt}: {reason}")]
    Disconnected {
        /// The server's endpoint.
        endpoint: String,
        /// What was asked.
        attempt: String,
        /// What was seen.
        reason: String,
    },
    /// The server turned the request down; the session goes on.
    #[error("{endpoint} refused to {attempt}: {reason}")]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// What was asked.
        attempt: String,
        /// The server's words.
        reason: String,
    },
}

/// Why no memory was granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The server's capacity: the session goes on, and a smaller request may succeed.
    #[error(
        "{endpoint} has no room for {asked} bytes ({available} available): free memory there, raise its capacity or add a server"
    )]
    Full {
        /// The server's endpoint.
        endpoint: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that could be granted.
        available: u64,
    },
    /// Anything else.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Why a name was not published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// Another client holds the region of that name.
    #[error("cannot publish `{name}` on {endpoint}: the region is in use by another client")]
    InUse {
        /// The server's endpoint.
        endpoint: String,
        /// The name.
        name: String,
    },
    /// Anything else.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Why a named region was not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No such name.
    #[error("{endpoint} has no region named `{name}`")]
    NotFound {
        /// The server's endpoint.
        endpoint: String,
        /// The name.
        name: String,
    },
    /// Another client holds it.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be opened when that client closes it"
    )]
    InUse {
        /// The server's endpoint.
        endpoint: String,
        /// The name.
        name: String,
    },
    /// Anything else.
    #[error(transparent)]
    Control(#[from] ControlError),
}

impl Session {
    pub fn connect(
        _endpoint: &Endpoint,
        _options: &SessionOptions,
    ) -> Result<Arc<Self>, ConnectError> {
        todo!()
    }
    pub fn endpoint(&self) -> &Endpoint {
        todo!()
    }
    pub fn grant(&self, _bytes: u64) -> Result<Extent, AllocError> {
        todo!()
    }
    pub fn release(&self, _id: ExtentId) -> Result<(), ControlError> {
        todo!()
    }
    pub fn channel<B: Buf>(self: &Arc<Self>) -> Result<Box<dyn Channel<B>>, ConnectError> {
        todo!()
    }
    pub fn stat(&self) -> Result<ServerStat, ControlError> {
        todo!()
    }
    pub fn publish(
        &self,
        _name: &str,
        _manifest: &[u8],
        _extents: &[ExtentId],
    ) -> Result<(), PublishError> {
        todo!()
    }
    pub fn open(&self, _name: &str) -> Result<Named, OpenError> {
        todo!()
    }
    pub fn remove(&self, _name: &str) -> Result<(), ControlError> {
        todo!()
    }
}

impl Default for SessionOptions {
    /// A deadline of 10 seconds, no shaping, the process's name and id as the client.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            link: None,
            client: String::new(),
        }
    }
}
