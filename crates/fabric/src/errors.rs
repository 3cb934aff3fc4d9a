//! Why a request to a server failed: one enum per operation.

use std::{fmt, io, sync::Arc};

use farpage_wire::{Limit, Refusal, VersionRead};

farpage_wire::debug_as_display!(
    ConnectError,
    ControlError,
    AllocError,
    PublishError,
    OpenError,
    BindError
);

/// Why no connection to a server came about.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nothing answers there.
    #[error("cannot connect to {endpoint}: {source}; is a memory server running there?")]
    Unreachable {
        /// The server's endpoint.
        endpoint: String,
        /// What the system said.
        r#source: io::Error,
    },
    /// RDMA is of no use here: it was not built in, this machine has no device, or the device said
    /// no.
    #[error("cannot use {endpoint}: {reason}")]
    NoRdma {
        /// The server's endpoint.
        endpoint: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Something answers that is no server of this version.
    #[error("{endpoint} answered, but {reason}")]
    Protocol {
        /// The server's endpoint.
        endpoint: String,
        /// What was wrong.
        reason: String,
    },
    /// The session has ended, and with it what it leased. Trying again does not help.
    #[error("the session at {endpoint} has ended: {reason}")]
    Ended {
        /// The server's endpoint.
        endpoint: String,
        /// Why, and what to do.
        reason: String,
    },
    /// The server turned the client away.
    #[error("{endpoint} refused: {reason}")]
    Refused {
        /// The server's endpoint.
        endpoint: String,
        /// The server's words.
        reason: String,
    },
}

/// Why a control call failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The connection broke, or the server did not answer in time.
    #[error("cannot {attempt} at {endpoint}: {reason}")]
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
    /// The request was not sent, because there is no key.
    #[error("cannot {attempt} at {endpoint}: {reason}")]
    Key {
        /// The server's endpoint.
        endpoint: String,
        /// What was to be asked.
        attempt: String,
        /// What is wrong with the key file, and what to do.
        reason: String,
    },
}

/// Why no memory was granted.
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
    /// The server is full, and keeps older versions of the region that asks, since programs read
    /// them. The session goes on.
    #[error(
        "{full}; what was published before under `{name}` is kept for those who read it ({}), and is free when they close it",
        Readers(read)
    )]
    Read {
        /// The refusal. Boxed: results that carry it stay small.
        full: Box<AllocError>,
        /// The region's name.
        name: Arc<str>,
        /// The older versions, and how often each is open.
        read: Arc<[VersionRead]>,
    },
    /// Anything else.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Who reads which version, for people.
struct Readers<'a>(&'a [VersionRead]);

impl fmt::Display for Readers<'_> {
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

/// Why a name was not claimed or published.
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
        /// The name.
        name: String,
    },
    /// The name is bound, and this session neither opened it nor claimed it to replace it.
    #[error(
        "a region named `{name}` exists on {endpoint} already: open it, remove it, or ask for it to be replaced"
    )]
    Exists {
        /// The server's endpoint.
        endpoint: String,
        /// The name.
        name: String,
    },
    /// The server does not answer, and was not asked: the name is bound to what it was bound to
    /// before.
    #[error(transparent)]
    NotAsked(ControlError),
    /// Anything else.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Why a named region was not opened.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This user's key has no such name.
    #[error("{endpoint} has no region named `{name}` that belongs to this user's key")]
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

/// Why a server cannot listen.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another process listens there.
    #[error("cannot listen on {endpoint}: another server does; stop it or choose another address")]
    InUse {
        /// The endpoint.
        endpoint: String,
    },
    /// Something that is no socket is at the path.
    #[error(
        "cannot listen on {endpoint}: there is a file at the path that is no socket; move it or choose another path"
    )]
    NotASocket {
        /// The endpoint.
        endpoint: String,
    },
    /// The system's reason.
    #[error("cannot listen on {endpoint}: {source}")]
    Io {
        /// The endpoint.
        endpoint: String,
        /// What the system said.
        r#source: io::Error,
    },
    /// RDMA is of no use here: it was not built in, this machine has no device, or the device said
    /// no.
    #[error("cannot listen on {endpoint}: {reason}")]
    NoRdma {
        /// The endpoint.
        endpoint: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Only clients choose.
    #[error(
        "cannot listen on {endpoint}: `auto` is a client's choice; listen on rdma:// and on tcp:// with the same port, so that clients can make it"
    )]
    Auto {
        /// The endpoint.
        endpoint: String,
    },
    /// Only clients know simulated servers.
    #[error("cannot listen on {endpoint}: a simulated server lives in its client's process")]
    Simulated {
        /// The endpoint.
        endpoint: String,
    },
}

/// Why a control call had no result.
#[derive(Debug)]
pub(crate) enum CallError {
    Refused(Refusal),
    Disconnected(String),
    /// As `Disconnected`, before the request was sent.
    NotAsked(String),
    /// Nothing was sent: there is no key to show.
    Key(String),
}
