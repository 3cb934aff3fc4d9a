//! [`ServerStat`]: what a memory server says about itself, for people and monitors.

use serde::{Deserialize, Serialize};

/// Figures of one memory server at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStat {
    /// The server's version.
    pub version: String,
    /// How long it has been running.
    pub uptime_ms: u64,
    /// Whether it is shutting down.
    pub draining: bool,
    /// The most that it grants.
    pub capacity_bytes: u64,
    /// Granted now: leased to sessions, or held by a name or for it.
    pub granted_bytes: u64,
    /// Physically backed now: granted memory that has been written.
    pub resident_bytes: u64,
    /// Sessions whose client is connected.
    pub sessions: u64,
    /// Sessions whose connection was lost: they end unless their client comes back in time.
    pub lost_sessions: u64,
    /// The clients of all sessions, those that are lent most first, at most
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
    /// Bytes of the pages that connected clients keep here, before compression. Clients report it
    /// with every renewal of a lease.
    pub logical_bytes: u64,
    /// Bytes that these pages take on the server.
    pub stored_bytes: u64,
    /// Part of `granted_bytes`: memory that shared-memory clients released but still have mapped or
    /// open.
    pub retained_bytes: u64,
    /// Held for long requests that are being received. Not part of `granted_bytes`.
    pub request_bytes: u64,
    /// What a server that lends more than its memory says of it. All zero for others.
    pub tiers: TierStat,
    /// The same server's shares of its memory, the largest first, at most 64.
    pub shares: Vec<ShareStat>,
    /// How often named regions are open for reading.
    pub readers: u64,
    /// Versions of named regions that have been replaced or removed, and that are still read.
    pub old_versions: u64,
}

impl ServerStat {
    /// As many clients fit one answer with names of any length.
    pub const CLIENTS_MOST: usize = 1024;
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

/// What clients of one address, or over shared memory of one user, have of a server's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStat {
    /// The address, or `user:` and the user's number.
    pub of: String,
    /// What the operator gave it; 1 if nothing.
    pub weight: u32,
    /// In memory as they are.
    pub hot_bytes: u64,
    /// Sessions that are lent something.
    pub sessions: u64,
}

/// Where the granted bytes of a server are that lends more than its memory, and what it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStat {
    /// The most memory that it may hold for what it lends; 0 for a server that holds all of it.
    pub memory_bytes: u64,
    /// Memory that it holds now: the hot bytes, the compressed pool, buffers and tables.
    pub held_bytes: u64,
    /// In memory as they are.
    pub hot_bytes: u64,
    /// In memory, compressed, counted before compression.
    pub compressed_bytes: u64,
    /// Memory of the compressed pool.
    pub pool_bytes: u64,
    /// In the spill file and nowhere else, counted before compression.
    pub spilled_bytes: u64,
    /// Chunks that were moved out of memory since the start.
    pub evictions: u64,
    /// Chunks that an operation had to wait for since the start.
    pub fetches: u64,
    /// Half of the fetches took no longer, in microseconds.
    pub fetch_p50_us: u64,
    /// Of a hundred fetches 99 took no longer, in microseconds.
    pub fetch_p99_us: u64,
    /// Chunks that were moved out although a client over shared memory reaches them by itself.
    pub forced_seals: u64,
    /// Memory that such clients took by touching what had left, and that was given back.
    pub stray_bytes: u64,
    /// Operations that were turned down because no memory came free in time.
    pub no_room: u64,
    /// Reads and writes of the spill file that failed, and bytes that came back changed.
    pub spill_errors: u64,
}
