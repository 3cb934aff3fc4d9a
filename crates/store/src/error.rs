//! Errors of a region's store, per operation, with the place and whether trying again helps.
//!
//! The rule it keeps: every error about a page names its region, its page and the server or store
//! that it concerns.

use std::{fmt, sync::Arc};

use farpage_fabric::{AllocError, ChannelError, ConnectError, ControlError, regmem::RegError};
use farpage_wire::ExtentId;

use crate::{CodecError, Redundancy};

farpage_wire::debug_as_display!(
    StoreError,
    TableError,
    CreateError,
    MixedServersError,
    PublishStoreError,
    OpenStoreError
);

/// Failure to fill or write back a page. After a failed write-back the last good copy is still
/// there.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The bytes that came back are not those that were written. Never handed out as data; reading
    /// them again does not help.
    #[error(
        "page {page} of {region} came back from {server} damaged: {detail}; it is lost unless its server has another copy"
    )]
    Corrupt {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The endpoint of the server, or the name of the store.
        server: Arc<str>,
        /// The mismatch.
        detail: &'static str,
    },
    /// The server could not be reached, or did not answer, until the deadline.
    #[error("{operation} of page {page} of {region} failed after {attempts} attempts: {source}; {}", if *.retry { "trying again may help once the server answers" } else { "trying again does not help" })]
    Remote {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The endpoint of the server.
        server: Arc<str>,
        /// "fill" or "write-back".
        operation: &'static str,
        /// Number of attempts.
        attempts: u32,
        /// True if the same operation may succeed later.
        retry: bool,
        /// The last failure.
        r#source: ChannelError,
    },
    /// The page got no room on any server. It may be written back once memory is free again.
    #[error("no remote memory for page {page} of {region}: {source}{}", HeldBytes(*.held_bytes))]
    Full {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// Bytes of remote memory that no page of this process uses any more, held for children
        /// made by `fork`. They are free when the children end.
        held_bytes: u64,
        /// The refusal of the server that was asked last.
        r#source: AllocError,
    },
    /// The entry that a child made by `fork` has of the page is damaged: it refers to no slot.
    /// Nothing was read, and reading it again does not help.
    #[error(
        "the entry of page {page} of {region} is damaged in the memory of a child made by fork: {detail}"
    )]
    Entry {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The damage.
        detail: &'static str,
    },
    /// Local memory for the page to travel in is lacking. Nothing was sent; the page may be moved
    /// once there is memory.
    #[error("no buffer for page {page} of {region}: {source}")]
    Memory {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The failed request for registered memory.
        r#source: Arc<RegError>,
    },
    /// The region's own store returned an error.
    #[error("{operation} of page {page} of {region} failed in its store {store}: {message}")]
    User {
        /// The program's name for the region.
        region: Arc<str>,
        /// The page in the region.
        page: u64,
        /// The name of the store.
        store: String,
        /// "fill" or "write-back".
        operation: &'static str,
        /// The kind of the `io::Error`.
        kind: std::io::ErrorKind,
        /// The text of the `io::Error`.
        message: String,
    },
    /// The region's own store panicked.
    #[error("store {store} panicked in the {operation} of page {page} of {region}: {message}")]
    Panicked {
        /// The program's name for the region.
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

/// End of the text of [`StoreError::Full`], for people.
struct HeldBytes(u64);

impl fmt::Display for HeldBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            bytes => write!(
                f,
                "; {bytes} bytes are held for children made by fork, and are free when they end"
            ),
        }
    }
}

impl StoreError {
    /// True if a server could not be reached before the deadline. Other pages of that server would
    /// fail now, too.
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
    /// True if the same operation may succeed later without anything being changed.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::Entry { .. } | Self::Panicked { .. } => false,
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

/// Failure to make a region's store.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The codec makes no sense, or does not fit the array.
    #[error("{region}: {source}")]
    Codec {
        /// The program's name for the region.
        region: Arc<str>,
        /// The misfit, and the codecs that would fit.
        r#source: CodecError,
    },
    /// The runtime has no memory server.
    #[error(
        "{region} needs remote memory, but the runtime has no server: name one, or give the region a store of its own"
    )]
    NoServer {
        /// The program's name for the region.
        region: Arc<str>,
    },
    /// The page size is not one that this crate can handle.
    #[error(
        "page size of {page_bytes} bytes for {region}: it must be a power of two from 4 KiB to 2 MiB"
    )]
    PageSize {
        /// The program's name for the region.
        region: Arc<str>,
        /// The size asked for.
        page_bytes: usize,
    },
    /// The region has no bytes, or more than a process can address.
    #[error("{region} has {bytes} bytes: need 1 to {most}")]
    Size {
        /// The program's name for the region.
        region: Arc<str>,
        /// The size asked for.
        bytes: u64,
        /// The largest size.
        most: u64,
    },
    /// The region is to have a redundancy that cannot be kept.
    #[error(
        "redundancy {redundancy} of {region}: need none, copies=2 to copies=4, or parity=2+1 to parity=8+2"
    )]
    Redundancy {
        /// The program's name for the region.
        region: Arc<str>,
        /// The redundancy asked for.
        redundancy: Redundancy,
    },
    /// The region is to have more copies than there are servers.
    #[error(
        "{region} is to have {copies} copies of each page, on {copies} different servers, but the runtime has {servers}: name {} more, or ask for fewer copies",
        copies - servers
    )]
    TooFewServers {
        /// The program's name for the region.
        region: Arc<str>,
        /// The copies asked for: as many servers are needed.
        copies: usize,
        /// The servers of the runtime.
        servers: usize,
    },
    /// The thread that replaces lost copies cannot be started.
    #[error(
        "{region} is to have copies, and no thread can be started that replaces lost ones: {source}; raise `ulimit -u`, or ask for none"
    )]
    Repairs {
        /// The program's name for the region.
        region: Arc<str>,
        /// The error of the system.
        r#source: std::io::Error,
    },
    /// The region has a name, and is to have parity.
    #[error("region `{name}` cannot have parity: create it with copies, or without a name")]
    NamedParity {
        /// The name.
        name: String,
    },
    /// A region of the name exists with copies, and the new one has none, or the other way round.
    #[error(
        "region `{name}` exists {}: give the new one the same redundancy, or remove the region first",
        match has_copies { true => "with copies", false => "without copies" }
    )]
    OtherRedundancy {
        /// The name.
        name: String,
        /// True if the region that exists has copies.
        has_copies: bool,
    },
    /// The servers that hold the name of a region with copies are not those of the runtime.
    #[error(
        "region `{name}` cannot be replaced: other servers hold it than this runtime has; use a runtime with exactly its servers, remove the region first, or use another name"
    )]
    OtherServers {
        /// The name.
        name: String,
    },
    /// Too few of the servers that hold the name of a region with copies answer, of the region to
    /// be replaced, or of one that was removed while some of them were away.
    #[error(
        "region `{name}` cannot be created: {have} of the servers that hold its name agree, and {need} are needed ({reason}): create it when they answer, or under another name; if they are gone for good, remove the name on each of the others (`farpage-memserver remove`)"
    )]
    Holders {
        /// The name.
        name: String,
        /// Number of servers that agree.
        have: usize,
        /// Number of servers that are needed.
        need: usize,
        /// The first server's answer.
        reason: String,
    },
    /// The process has no room for the page table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The cluster has a region of that name open.
    #[error("region `{name}` is open in this program already: close it first")]
    Held {
        /// The name.
        name: String,
    },
    /// Another program has the region open, or has claimed its name.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be had when that client closes it"
    )]
    InUse {
        /// The name.
        name: String,
        /// The endpoint of the server that says so.
        endpoint: String,
    },
    /// Some servers of the runtime keep names on a disk, and others do not.
    #[error("creating region `{name}`: {source}")]
    Mixed {
        /// The name.
        name: String,
        /// One server of each kind.
        r#source: MixedServersError,
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
        /// The program's name for the region.
        region: Arc<str>,
        /// The region's size.
        bytes: u64,
        /// Bytes that the region reserves.
        needed_bytes: u64,
        /// True if the region reserves room for two versions.
        named: bool,
        /// The server's answer.
        r#source: AllocError,
    },
}

/// Servers of one region, of which some keep names on a disk: the others would lose their part of
/// the region with a restart.
#[derive(thiserror::Error)]
#[error(
    "{with} keeps names on a disk and {without} does not; start both with --persist, or neither"
)]
pub struct MixedServersError {
    /// The endpoint of a server with a disk.
    pub with: String,
    /// The endpoint of a server without one.
    pub without: String,
}

/// Failure to publish a named region. The previous publication, if there is one, is still there,
/// unless the connection broke in the last step: then either publication may be there.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PublishStoreError {
    /// The region was created without [`RemoteOptions::name`](crate::RemoteOptions::name), or is
    /// kept by a store of its own.
    #[error("{region} cannot be published: it was not created as a named region")]
    NotNamed {
        /// The program's name for the region.
        region: Arc<str>,
    },
    /// The page map got no room on any server.
    #[error("no remote memory for the page map of region `{name}`: {source}")]
    Alloc {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: AllocError,
    },
    /// Local memory for the page map to travel in is lacking.
    #[error("writing the page map of region `{name}`: {source}")]
    Memory {
        /// The name.
        name: String,
        /// The failed request for registered memory.
        r#source: RegError,
    },
    /// A data connection could not be opened.
    #[error("writing the page map of region `{name}`: {source}")]
    Connect {
        /// The name.
        name: String,
        /// The failure to connect.
        r#source: ConnectError,
    },
    /// The page map could not be written.
    #[error("writing the page map of region `{name}`: {source}")]
    Map {
        /// The name.
        name: String,
        /// The failure of the channel.
        r#source: ChannelError,
    },
    /// Some servers of the region keep names on a disk, and others do not.
    #[error("publishing region `{name}`: {source}")]
    Mixed {
        /// The name.
        name: String,
        /// One server of each kind.
        r#source: MixedServersError,
    },
    /// A server's disk does not take the bytes of the new version.
    #[error("publishing region `{name}`: {source}")]
    Persist {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: farpage_fabric::ControlError,
    },
    /// Too few of the servers that hold the name have taken the new version. Either version may be
    /// found until the next one is published.
    #[error(
        "publishing region `{name}`: {have} servers have taken the new version, and {need} are needed ({reason}): flush again when they answer, or close the region and open it again"
    )]
    Holders {
        /// The name.
        name: String,
        /// Number of servers that have the new version.
        have: usize,
        /// Number of servers that are needed.
        need: usize,
        /// The first server's answer.
        reason: String,
    },
    /// Pages of the region are lost: no server has a copy any more.
    #[error(
        "publishing region `{name}`: pages of it are on {endpoints} alone, where no complete copy is left: the version before stays"
    )]
    Lost {
        /// The name.
        name: String,
        /// Endpoints of the servers.
        endpoints: String,
    },
    /// A server would not bind the name.
    #[error("publishing region `{name}`: {source}")]
    Publish {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: farpage_fabric::PublishError,
    },
}

/// Failure to open a named region.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenStoreError {
    /// Some servers of the runtime keep names on a disk, and others do not. The region can be
    /// opened for reading.
    #[error("opening region `{name}` for writing: {source}")]
    Mixed {
        /// The name.
        name: String,
        /// One server of each kind.
        r#source: MixedServersError,
    },
    /// The name is unknown to all servers.
    #[error(
        "no server of this runtime has a region named `{name}`: publish it first, or add the server that has it"
    )]
    NotFound {
        /// The name.
        name: String,
    },
    /// Another program has the region open, or has claimed its name.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be had when that client closes it"
    )]
    InUse {
        /// The name.
        name: String,
        /// The endpoint of the server that says so.
        endpoint: String,
    },
    /// A server would not open the region.
    #[error("opening region `{name}`: {source}")]
    Open {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: farpage_fabric::OpenNameError,
    },
    /// The cluster has the region open.
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
        /// The server's answer.
        r#source: farpage_fabric::PublishError,
    },
    /// Too few of the servers that hold the name answer, so that a newer version may exist.
    #[error(
        "region `{name}` cannot be opened: {have} of the servers that hold its name agree, and {need} are needed{missing}: add those servers to the runtime, or start them; {note}"
    )]
    Holders {
        /// The name.
        name: String,
        /// Number of holders that agree.
        have: usize,
        /// Number of holders that are needed.
        need: usize,
        /// Servers that do not answer, with their reasons, for people.
        missing: String,
        /// Advice, for people.
        note: &'static str,
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
    /// The last version could not be made the only one. The region is as it was.
    #[error("opening region `{name}` for writing: {source}")]
    Complete {
        /// The name.
        name: String,
        /// The failure to publish the version again.
        r#source: Box<PublishStoreError>,
    },
    /// The thread that makes lost copies anew could not be started.
    #[error("opening region `{name}`: cannot start the thread that repairs copies: {source}")]
    Repairs {
        /// The name.
        name: String,
        /// The system's error.
        r#source: std::io::Error,
    },
    /// The region is fully reserved, and the servers would not grant what it lacks.
    #[error("no remote memory for region `{name}`: {source}")]
    Alloc {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: AllocError,
    },
    /// The process has no room for the page table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The manifest or the page map is not what was published.
    #[error("region `{name}` is damaged: {detail}")]
    Damaged {
        /// The name.
        name: String,
        /// The mismatch.
        detail: String,
    },
    /// Servers have regions of the name that were created apart from each other.
    #[error(
        "several servers have regions named `{name}`, which were created apart from each other: open one with its own servers alone"
    )]
    Rivals {
        /// The name.
        name: String,
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
    /// Local memory for the page map to travel in is lacking.
    #[error("reading the page map of region `{name}`: {source}")]
    Memory {
        /// The name.
        name: String,
        /// The failed request for registered memory.
        r#source: RegError,
    },
    /// A data connection could not be opened.
    #[error("reading the page map of region `{name}`: {source}")]
    Connect {
        /// The name.
        name: String,
        /// The failure to connect.
        r#source: ConnectError,
    },
    /// The page map could not be read.
    #[error("reading the page map of region `{name}`: {source}")]
    Map {
        /// The name.
        name: String,
        /// The failure of the channel.
        r#source: ChannelError,
    },
}
