//! Memory that clients over shared memory gave back and have not let go of.
//!
//! The rule it keeps: such memory counts against the capacity, and against the client's user, until
//! nobody has it mapped or open any more. So no client can have more of the machine's memory than
//! it is charged for. Bytes that are written meanwhile are thrown away at each look.
//!
//! Looks happen when a request needs room, when figures are asked for, and in the reaper.

use farpage_fabric::{host::Origin, log::later, memory::ExtentFile};
use tracing::warn;

use super::accounts::charge_of;

pub(super) struct Retained {
    pub(super) file: ExtentFile,
    /// Origin that is charged for the memory.
    pub(super) origin: Origin,
}

impl Retained {
    pub(super) fn charge(&self) -> u64 {
        charge_of(self.file.bytes())
    }

    pub(super) fn file(&self) -> ExtentFile {
        self.file.clone()
    }

    /// True if a client still has the memory.
    pub(super) fn is_held(&self) -> bool {
        self.file.is_held_elsewhere().unwrap_or_else(|error| {
            let extent = self.file.id();
            later(move || {
                warn!(%extent, %error, "cannot tell whether a client has let go of memory: it is not charged for it");
            });
            false
        })
    }
}
