//! What can go wrong with a region's store, per operation, with the place and whether trying again
//! helps.
//!
//! The rule it keeps: every error about a page names its region, its page and the server or store
//! that it concerns.

use std::sync::Arc;

use farpage_fabric::{AllocError, ChannelError, ConnectError, ControlError, regmem::RegError};
use farpage_wire::ExtentId;

use crate::CodecError;

farpage_wire::debug_as_display!(
    StoreError,
    TableError,
    CreateError,
    PublishStoreError,
    OpenStoreError
);

/// Why a page could not be filled or written back. After a failed write-back the last good copy is
/// still there.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// What came back is not what was written. Never handed out as data; reading it again does not
    /// help.
    #[error(
        "page {page} of {region} came back from {server} damaged: {detail}; it is lost unless its server has another copy"
    )]
    Corrupt {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The endpoint of the server, or the name of the store.
        server: Arc<str>,
        /// What does not match.
        detail: &'static str,
    },
    /// The server could not be reached, or did not answer, until the deadline.
    #[error("{operation} of page {page} of {region} failed after {attempts} attempts: {source}; {}", if *.retry { "trying again may help once the server answers" } else { "trying again does not help" })]
    Remote {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The endpoint of the server.
        server: Arc<str>,
        /// "fill" or "write-back".
        operation: &'static str,
        /// How often it was tried.
        attempts: u32,
        /// Whether the same operation may succeed later.
        retry: bool,
        /// The last failure.
        r#source: ChannelError,
    },
    /// No server has room for the page. It may be written back once memory is free again.
    #[error("no remote memory for page {page} of {region}: {source}")]
    Full {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The refusal of the server that was asked last.
        r#source: AllocError,
    },
    /// There is no local memory for the page to travel in. Nothing was sent; the page may be moved
    /// once there is.
    #[error("no buffer for page {page} of {region}: {source}")]
    Memory {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// What is lacking.
        r#source: Arc<RegError>,
    },
    /// The region's own store returned an error.
    #[error("{operation} of page {page} of {region} failed in its store {store}: {message}")]
    User {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The name of the store.
        store: String,
        /// "fill" or "write-back".
        operation: &'static str,
        /// The kind of the `io::Error`.
        kind: std::io::ErrorKind,
        /// Its text.
        message: String,
    },
    /// The region's own store panicked.
    #[error("store {store} panicked in the {operation} of page {page} of {region}: {message}")]
    Panicked {
        /// What the program calls the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The name of the store.
        store: String,
        /// "fill" or "write-back".
        operation: &'static str,
        /// The panic's message.
        message: String,
    },
}

impl StoreError {
    /// Whether a server could not be reached before the deadline. Other pages of it would fail now,
    /// too.
    pub fn is_lost_server(&self) -> bool {
        matches!(
            self,
            Self::Remote { retry: true, .. }
                | Self::Full {
                    source: AllocError::Control(ControlError::Disconnected { .. }),
                    ..
                }
        )
    }
}

impl StoreError {
    /// Whether the same operation may succeed later without anything being changed.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::Panicked { .. } => false,
            Self::Remote { retry, .. } => *retry,
            Self::Full { .. } | Self::Memory { .. } | Self::User { .. } => true,
        }
    }
}

/// The system refused the address space for the page table of a region.
#[derive(Clone, Copy, thiserror::Error)]
#[error(
    "a region of {bytes} bytes in pages of {page_bytes} needs a table of {table_bytes} bytes here, which the system refuses: choose larger pages or a \
     smaller region, or allow more by `ulimit -v` and `sysctl vm.overcommit_memory`"
)]
#[non_exhaustive]
pub struct TableError {
    /// The size of the region.
    pub bytes: u64,
    /// The size of its pages.
    pub page_bytes: usize,
    /// The size of the table.
    pub table_bytes: u64,
}

/// Why a region's store could not be made.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The codec makes no sense, or does not fit the array.
    #[error("{region}: {source}")]
    Codec {
        /// What the program calls the region.
        region: Arc<str>,
        /// What does not fit, and what would.
        r#source: CodecError,
    },
    /// The runtime has no memory server.
    #[error(
        "{region} needs remote memory, but the runtime has no server: name one, or give the region a store of its own"
    )]
    NoServer {
        /// What the program calls the region.
        region: Arc<str>,
    },
    /// The page size is none that this crate can handle.
    #[error(
        "page size of {page_bytes} bytes for {region}: it must be a power of two from 4 KiB to 2 MiB"
    )]
    PageSize {
        /// What the program calls the region.
        region: Arc<str>,
        /// The size asked for.
        page_bytes: usize,
    },
    /// The region has no bytes, or more than a process can address.
    #[error("{region} has {bytes} bytes: need 1 to {most}")]
    Size {
        /// What the program calls the region.
        region: Arc<str>,
        /// The size asked for.
        bytes: u64,
        /// The largest size.
        most: u64,
    },
    /// This process has no room for it.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The cluster has a region of that name open.
    #[error("region `{name}` is open in this program already: close it first")]
    Held {
        /// The name.
        name: String,
    },
    /// Another program has it open, or has claimed the name.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be had when that client closes it"
    )]
    InUse {
        /// The name.
        name: String,
        /// The endpoint of the server that says so.
        endpoint: String,
    },
    /// A server would not keep the name for the region.
    #[error(transparent)]
    Claim(farpage_fabric::PublishError),
    /// The servers would not grant the memory that the region needs. Nothing was taken, and the
    /// runtime goes on.
    #[error(
        "no remote memory for {region}, which needs {needed_bytes} bytes{}: {source}",
        if *.named { " since a named region keeps two versions while it is published" } else { "" }
    )]
    Alloc {
        /// What the program calls the region.
        region: Arc<str>,
        /// The region's size.
        bytes: u64,
        /// What it reserves.
        needed_bytes: u64,
        /// Whether it reserves room for two versions.
        named: bool,
        /// What the server said.
        r#source: AllocError,
    },
}

/// Why a named region could not be published. The previous publication, if there is one, is still
/// there, unless the connection broke in the last step: then it may be the new one.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PublishStoreError {
    /// The region was created without [`RemoteOptions::name`](crate::RemoteOptions::name), or is
    /// kept by a store of its own.
    #[error("{region} cannot be published: it was not created as a named region")]
    NotNamed {
        /// What the program calls the region.
        region: Arc<str>,
    },
    /// No room for the page map.
    #[error("no remote memory for the page map of region `{name}`: {source}")]
    Alloc {
        /// The name.
        name: String,
        /// What the server said.
        r#source: AllocError,
    },
    /// There is no local memory for the page map to travel in.
    #[error("writing the page map of region `{name}`: {source}")]
    Memory {
        /// The name.
        name: String,
        /// What is lacking.
        r#source: RegError,
    },
    /// A data connection could not be opened.
    #[error("writing the page map of region `{name}`: {source}")]
    Connect {
        /// The name.
        name: String,
        /// What happened.
        r#source: ConnectError,
    },
    /// The page map could not be written.
    #[error("writing the page map of region `{name}`: {source}")]
    Map {
        /// The name.
        name: String,
        /// What happened.
        r#source: ChannelError,
    },
    /// A server would not bind the name.
    #[error("publishing region `{name}`: {source}")]
    Publish {
        /// The name.
        name: String,
        /// What the server said.
        r#source: farpage_fabric::PublishError,
    },
}

/// Why a named region could not be opened.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenStoreError {
    /// No server knows the name.
    #[error(
        "no server of this runtime has a region named `{name}`: publish it first, or add the server that has it"
    )]
    NotFound {
        /// The name.
        name: String,
    },
    /// Another program has it open, or has claimed the name.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be had when that client closes it"
    )]
    InUse {
        /// The name.
        name: String,
        /// The endpoint of the server that says so.
        endpoint: String,
    },
    /// A server would not open it.
    #[error("opening region `{name}`: {source}")]
    Open {
        /// The name.
        name: String,
        /// What the server said.
        r#source: farpage_fabric::OpenError,
    },
    /// The cluster has it open.
    #[error("region `{name}` is open in this program already: close it first")]
    Held {
        /// The name.
        name: String,
    },
    /// A server that has no pages of the region refused to hold its name.
    #[error("opening region `{name}`: {source}")]
    Claim {
        /// The name.
        name: String,
        /// What the server said.
        r#source: farpage_fabric::PublishError,
    },
    /// The region's pages lie on a server that the runtime does not have.
    #[error(
        "region `{name}` also lies on {endpoint}, which this runtime does not use: add that server"
    )]
    ServerMissing {
        /// The name.
        name: String,
        /// The server's endpoint.
        endpoint: String,
    },
    /// The region is fully reserved, and the servers would not grant what it lacks.
    #[error("no remote memory for region `{name}`: {source}")]
    Alloc {
        /// The name.
        name: String,
        /// What the server said.
        r#source: AllocError,
    },
    /// This process has no room for it.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The manifest or the page map is not what was published.
    #[error("region `{name}` is damaged: {detail}")]
    Damaged {
        /// The name.
        name: String,
        /// What does not match.
        detail: String,
    },
    /// The manifest refers to an extent that the server no longer has.
    #[error("region `{name}` is damaged: {endpoint} no longer has extent {extent}")]
    ExtentMissing {
        /// The name.
        name: String,
        /// The server's endpoint.
        endpoint: String,
        /// The extent.
        extent: ExtentId,
    },
    /// There is no local memory for the page map to travel in.
    #[error("reading the page map of region `{name}`: {source}")]
    Memory {
        /// The name.
        name: String,
        /// What is lacking.
        r#source: RegError,
    },
    /// A data connection could not be opened.
    #[error("reading the page map of region `{name}`: {source}")]
    Connect {
        /// The name.
        name: String,
        /// What happened.
        r#source: ConnectError,
    },
    /// The page map could not be read.
    #[error("reading the page map of region `{name}`: {source}")]
    Map {
        /// The name.
        name: String,
        /// What happened.
        r#source: ChannelError,
    },
}
