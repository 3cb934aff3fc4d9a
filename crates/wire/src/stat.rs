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
    /// Clients that hold a session.
    pub sessions: u64,
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
}
