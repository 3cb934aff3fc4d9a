//! [`SpareExtent`]: an extent that a pool keeps without a group.
//!
//! The rule it keeps: nothing lands in a spare extent any more, and no entry refers to it.

use farpage_fabric::ExtentId;

/// Extent that stays granted when copies go back, so that a parity set can be opened.
pub(super) struct SpareExtent {
    pub(super) server: u8,
    pub(super) id: ExtentId,
    pub(super) bytes: u64,
}

impl SpareExtent {
    /// True if the extent is on the server, and has the length.
    pub(super) fn is_for(&self, server: u8, bytes: u64) -> bool {
        (self.server, self.bytes) == (server, bytes)
    }
}
