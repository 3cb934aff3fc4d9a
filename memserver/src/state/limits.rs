//! [`Limits`]: what a server may give away, and when it takes it back.

use std::time::Duration;

use farpage_wire::PublicKey;

/// What a server may give away.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most bytes granted at any time, manifests of named regions included.
    pub capacity_bytes: u64,
    /// The most bytes granted to clients of one address, or over shared memory of one user,
    /// together.
    pub capacity_per_address: u64,
    /// A session that is silent for so long ends.
    pub lease: Duration,
    /// A session whose connection was closed without a goodbye, and that does not come back for so
    /// long, ends. Over shared memory it ends at once.
    pub reconnect_grace: Duration,
    /// The most extents that one session may hold: each costs the server a descriptor and a
    /// mapping.
    pub extents_per_session: usize,
    /// The most extents altogether.
    pub extents: usize,
    /// The most extents of clients of one address, or over shared memory of one user, together.
    pub extents_per_address: usize,
    /// The most sessions at once.
    pub sessions: usize,
    /// Keys whose holders may list and remove all names.
    pub operators: Vec<PublicKey>,
}

impl Limits {
    /// The shorter of the times after which sessions end.
    pub fn shortest(&self) -> Duration {
        self.lease.min(self.reconnect_grace)
    }
}
