//! [`Limits`]: what a server may give away, and when it takes it back.

use std::time::Duration;

use farpage_wire::PublicKey;

/// The most that a server may give away, and the times after which it takes memory back.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most bytes granted at any time, manifests of named regions included.
    pub capacity_bytes: u64,
    /// The most bytes granted to clients of one address, or over shared memory of one user,
    /// together.
    pub capacity_per_address: u64,
    /// Time after which a silent session ends.
    pub lease: Duration,
    /// Time for a session to come back after its connection closed without a goodbye. The session
    /// ends afterwards; over shared memory at once.
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
    /// Returns the shorter of the times after which sessions end.
    pub fn shortest(&self) -> Duration {
        self.lease.min(self.reconnect_grace)
    }
}
