//! [`OnDisk`]: copies of a named region that are on their servers' disks.
//!
//! The rule it keeps: all published slots of a listed copy are on the disk. A copy that was made
//! anew is in memory alone, and so is one whose server has missed a publication. Writing is left to
//! [`Additions`](crate::named).

use std::collections::HashSet;

use farpage_fabric::ExtentId;
use farpage_signals::Mutex;

use crate::pool::SlotPool;

/// Copies that are on disks: the number of the server, and the extent.
#[derive(Default)]
pub(crate) struct OnDisk(Mutex<HashSet<(u8, ExtentId)>>);

impl OnDisk {
    /// Makes the list of a region that was opened: what its manifest names is on the disks.
    pub(crate) fn of(pool: &SlotPool) -> Self {
        Self(Mutex::new(pool.good_copies().collect()))
    }

    /// True if a copy is on the disk.
    pub(crate) fn has(&self, copy: (u8, ExtentId)) -> bool {
        self.0.lock().contains(&copy)
    }

    /// Notes which copies are on the disks now. All others are not.
    pub(crate) fn note(&self, copies: impl Iterator<Item = (u8, ExtentId)>) {
        *self.0.lock() = copies.collect();
    }
}
