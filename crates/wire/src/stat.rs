//! [`ServerStat`]: a memory server's figures about itself, for people and monitors.

use serde::{Deserialize, Serialize};

/// Figures of one memory server at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStat {
    /// The server's version.
    pub version: String,
    /// Milliseconds since the server's start.
    pub uptime_ms: u64,
    /// True while the server is shutting down.
    pub draining: bool,
    /// The most bytes that the server grants: 0 while clients are to move their memory elsewhere.
    pub capacity_bytes: u64,
    /// Bytes granted now: leased to sessions, or held by a name or for a name.
    pub granted_bytes: u64,
    /// Bytes physically backed now: granted memory that has been written.
    pub resident_bytes: u64,
    /// Sessions whose client is connected.
    pub sessions: u64,
    /// Sessions whose connection was lost: they end unless their client comes back in time.
    pub lost_sessions: u64,
    /// Clients of all sessions, those with the most granted bytes first, at most
    /// [`CLIENTS_MOST`](Self::CLIENTS_MOST).
    pub clients: Vec<ClientStat>,
    /// Extents granted now.
    pub extents: u64,
    /// Named regions kept.
    pub named_regions: u64,
    /// Payload bytes of READs served through the server's CPU (none over shared memory and RDMA).
    pub bytes_read: u64,
    /// Payload bytes of WRITEs served through the server's CPU (none over shared memory and RDMA).
    pub bytes_written: u64,
    /// Bytes of the pages that connected clients keep here, before compression. Clients report them
    /// with every renewal of a lease.
    pub logical_bytes: u64,
    /// Bytes that the pages of connected clients take on the server.
    pub stored_bytes: u64,
    /// Part of `granted_bytes`: memory that shared-memory clients released but still have mapped or
    /// open.
    pub retained_bytes: u64,
    /// Bytes held for long requests that are being received. Not part of `granted_bytes`.
    pub request_bytes: u64,
    /// Figures of a server that lends more than its memory. All zero for other servers.
    pub tiers: TierStat,
    /// Shares of the memory of a server that lends more than it has: the largest 64, in this order.
    pub shares: Vec<ShareStat>,
    /// Number of times that named regions are open for reading.
    pub readers: u64,
    /// Versions of named regions that have been replaced or removed, and that are still read.
    pub old_versions: u64,
    /// Figures of a server that keeps names on a disk.
    pub persist: PersistStat,
}

impl ServerStat {
    /// Upper bound of `clients`: as many fit one answer with names of any length.
    pub const CLIENTS_MOST: usize = 1024;

    /// True if the server is shutting down, grants nothing more, and waits for its clients to move
    /// their memory to other servers.
    pub fn asks_to_leave(&self) -> bool {
        self.draining && self.capacity_bytes == 0
    }
}

/// Named regions on the disk of a server that keeps names there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistStat {
    /// Directory of the names; empty if the server keeps none on a disk.
    pub directory: String,
    /// Bytes that the directory's files take on the disk.
    pub disk_bytes: u64,
    /// Bytes written to the directory since the start.
    pub written_bytes: u64,
    /// Names whose files are damaged: they cannot be opened.
    pub damaged_names: u64,
    /// Reason why nothing is written to the directory before the next start; empty without one.
    pub error: String,
}

/// A client, as a server knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStat {
    /// Name that the client gives itself: program and process number.
    pub name: String,
    /// Address and port, or over shared memory process and user.
    pub address: String,
    /// True while the client is connected.
    pub connected: bool,
    /// Bytes lent to the client.
    pub granted_bytes: u64,
    /// Extents lent to the client.
    pub extents: u64,
}

/// Share of a server's memory of the clients of one address, or over shared memory of one user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStat {
    /// The address, or `user:` and the user's number.
    pub of: String,
    /// Weight that the operator gave the share; 1 by default.
    pub weight: u32,
    /// Bytes in memory, uncompressed.
    pub hot_bytes: u64,
    /// Sessions that are lent something.
    pub sessions: u64,
}

/// Places of the granted bytes of a server that lends more than its memory, and their costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStat {
    /// The most memory that the server may hold for lent bytes; 0 if it holds all of them.
    pub memory_bytes: u64,
    /// Memory that the server holds now: the hot bytes, the compressed pool, buffers and tables.
    pub held_bytes: u64,
    /// Bytes in memory, uncompressed.
    pub hot_bytes: u64,
    /// Bytes in memory in compressed form, counted before compression.
    pub compressed_bytes: u64,
    /// Memory of the compressed pool.
    pub pool_bytes: u64,
    /// Bytes in the spill file and nowhere else, counted before compression.
    pub spilled_bytes: u64,
    /// Chunks that were moved out of memory since the start.
    pub evictions: u64,
    /// Chunks that an operation had to wait for since the start.
    pub fetches: u64,
    /// Median duration of a fetch, in microseconds.
    pub fetch_p50_us: u64,
    /// Duration that 99 of a hundred fetches do not exceed, in microseconds.
    pub fetch_p99_us: u64,
    /// Chunks that were moved out although a client over shared memory reaches them by itself.
    pub forced_seals: u64,
    /// Memory that clients took by touching chunks that had left; it was given back since.
    pub stray_bytes: u64,
    /// Operations that were turned down because no memory came free in time.
    pub no_room: u64,
    /// Reads and writes of the spill file that failed, and bytes that came back changed.
    pub spill_errors: u64,
}
