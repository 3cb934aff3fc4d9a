//! Stub of the agent for processors that it does not know: no process can be called.
//!
//! The rule it keeps: children work, and keep what they touch.

use super::link::{Kind, LinkName};

/// Returns [`Kind::Deaf`].
pub(super) fn expect_call(_: u64, _: &LinkName) -> Kind {
    Kind::Deaf
}

/// Does nothing.
pub(super) fn forget_calls() {}
