//! [`Member`]: one copy of a group's bytes.
//!
//! The rule it keeps: a state says what the member has, and not whether its server answers.

use farpage_wire::ExtentId;

/// State of a group's member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberState {
    /// State of a member that has all slots.
    Good,
    /// State of a member that misses a WRITE, or has damaged bytes. Only a page that is right
    /// nowhere else is read there.
    Stale,
    /// State of a member on a dead server. Final, also if the server comes back.
    Dead,
}

/// One copy of a group's bytes: an extent of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) server: u8,
    pub(crate) id: ExtentId,
    pub(crate) state: MemberState,
}
