//! Errors of requests to a server: one enum per operation.

use std::{fmt, io, sync::Arc};

use farpage_wire::{Limit, Refusal, VersionRead};

farpage_wire::debug_as_display!(
    ConnectError,
    ControlError,
    AllocError,
    PublishError,
    OpenNameError,
    BindError
);

/// Failure to connect to a server.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The endpoint does not answer.
    #[error("cannot connect to {endpoint}: {source}; is a memory server running there?")]
    Unreachable {
        /// The server's endpoint.
        endpoint: String,
        /// Error from the system.
        r#source: io::Error,
    },
    /// RDMA cannot be used: it was not built in, this machine has no device, or the device refused.
    #[error("cannot use {endpoint}: {reason}")]
    NoRdma {
        /// The server's endpoint.
        endpoint: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// The process that answers is no server of this version.
    #[error("{endpoint} answered, but {reason}")]
    Protocol {
        /// The server's endpoint.
        endpoint: String,
        /// Description of the wrong answer.
        reason: String,
    },
    /// The session has ended, and its leases with it. Trying again does not help.
    #[error("the session at {endpoint} has ended: {reason}")]
    Ended {
        /// The server's endpoint.
        endpoint: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// The server turned the client away.
    #[error("{endpoint} refused: {reason}")]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// Reason in the server's words.
        reason: String,
    },
}

/// Failure of a control call.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The connection broke, or the server did not answer in time.
    #[error("cannot {attempt} at {endpoint}: {reason}")]
    Disconnected {
        /// The server's endpoint.
        endpoint: String,
        /// Request, as a verb phrase for messages.
        attempt: String,
        /// Error of the connection.
        reason: String,
    },
    /// The server turned the request down; the session goes on.
    #[error("{endpoint} refused to {attempt}: {reason}")]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// Request, as a verb phrase for messages.
        attempt: String,
        /// Reason in the server's words.
        reason: String,
    },
    /// The request was not sent, because there is no key.
    #[error("cannot {attempt} at {endpoint}: {reason}")]
    Key {
        /// The server's endpoint.
        endpoint: String,
        /// Request, as a verb phrase for messages.
        attempt: String,
        /// Fault of the key file, and the remedy.
        reason: String,
    },
}

/// Failure to get memory from a server.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The server is full. The session goes on, and a smaller request may succeed.
    #[error(
        "{endpoint} has {}; free memory there, raise that limit or add a server",
        limit.refusal(*asked, *available)
    )]
    Full {
        /// The server's endpoint.
        endpoint: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that could be granted.
        available: u64,
        /// The limit that stands in the way.
        limit: Limit,
    },
    /// The server is full, and keeps older versions of the requesting region, since programs read
    /// them. The session goes on.
    #[error(
        "{full}; what was published before under `{name}` is kept for those who read it ({}), and is free when they close it",
        ReadersPerVersion(read)
    )]
    Read {
        /// The refusal. Boxed: results that carry this error stay small.
        full: Box<AllocError>,
        /// Name of the region.
        name: Arc<str>,
        /// The older versions, with the number of their readers.
        read: Arc<[VersionRead]>,
    },
    /// Any other error.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Formats readers per version, for people.
struct ReadersPerVersion<'a>(&'a [VersionRead]);

impl fmt::Display for ReadersPerVersion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, VersionRead { version, readers }) in self.0.iter().enumerate() {
            let (comma, s) = (
                if i > 0 { ", " } else { "" },
                if *readers == 1 { "" } else { "s" },
            );
            write!(f, "{comma}{readers} reader{s} of version {version}")?;
        }
        Ok(())
    }
}

/// Failure to claim or publish a name.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// Another client holds the region of that name.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be had when that client closes it"
    )]
    InUse {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// The name is bound, and this session neither opened nor claimed it to replace it.
    #[error(
        "a region named `{name}` exists on {endpoint} already: open it, remove it, or ask for it to be replaced"
    )]
    Exists {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// A later writer has taken the name over, while this one was cut off.
    #[error(
        "another client has opened region `{name}` on {endpoint} for writing since, while this one was cut off: close it, and open it again"
    )]
    Outdated {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// The server keeps another region of the name, which was created apart from this one.
    #[error(
        "{endpoint} keeps another region `{name}`, which was created apart from this one: remove it there (`farpage-memserver remove`), or use another name"
    )]
    OtherRegion {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// The server does not answer, and the request was not sent. The name keeps its former binding.
    #[error(transparent)]
    NotAsked(ControlError),
    /// Any other error.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Failure to open a named region.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenNameError {
    /// The user's key has no such name.
    #[error("{endpoint} has no region named `{name}` that belongs to this user's key")]
    NotFound {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// Another client holds the region.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be opened when that client closes it"
    )]
    InUse {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// Several servers hold the name, and forget it together.
    #[error("region `{name}` on {endpoint} is held by several servers, which forget it together")]
    Shared {
        /// The server's endpoint.
        endpoint: String,
        /// Name of the region.
        name: String,
    },
    /// Any other error.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Failure of a server to listen.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another process listens there.
    #[error("cannot listen on {endpoint}: another server does; stop it or choose another address")]
    InUse {
        /// The endpoint.
        endpoint: String,
    },
    /// A file that is no socket is at the path.
    #[error(
        "cannot listen on {endpoint}: there is a file at the path that is no socket; move it or choose another path"
    )]
    NotASocket {
        /// The endpoint.
        endpoint: String,
    },
    /// The system refused to listen.
    #[error("cannot listen on {endpoint}: {source}")]
    Io {
        /// The endpoint.
        endpoint: String,
        /// Error from the system.
        r#source: io::Error,
    },
    /// RDMA cannot be used: it was not built in, this machine has no device, or the device refused.
    #[error("cannot listen on {endpoint}: {reason}")]
    NoRdma {
        /// The endpoint.
        endpoint: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// The endpoint is `auto`, which is a client's choice.
    #[error(
        "cannot listen on {endpoint}: `auto` is a client's choice; listen on rdma:// and on tcp:// with the same port, so that clients can make it"
    )]
    Auto {
        /// The endpoint.
        endpoint: String,
    },
    /// The endpoint is simulated. Simulated servers live in their clients' processes.
    #[error("cannot listen on {endpoint}: a simulated server lives in its client's process")]
    Simulated {
        /// The endpoint.
        endpoint: String,
    },
}

/// Reason why a control call has no result.
#[derive(Debug)]
pub(crate) enum RequestError {
    Refused(Refusal),
    Disconnected(String),
    /// The connection was lost before the request was sent.
    NotAsked(String),
    /// The request was not sent: there is no key to show.
    Key(String),
}
