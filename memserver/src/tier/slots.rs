//! [`Slots`]: the free places of the spill file.
//!
//! The rule it keeps: there is a slot for each chunk that is lent. A slot that failed is used again
//! only when there is no other.

use std::collections::{HashSet, VecDeque};

pub(super) struct Slots {
    most: u32,
    pub(super) free: Vec<u32>,
    /// Number of the first slot that was never used.
    pub(super) fresh: u32,
    /// Slots that could not be written. Taken again when there is no other, in the order of their
    /// failures.
    pub(super) failed: VecDeque<u32>,
    /// Slots whose bytes could not be read back as they were written.
    pub(super) suspect: HashSet<u32>,
}

impl Slots {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most: most as u32,
            free: Vec::new(),
            fresh: 0,
            failed: VecDeque::new(),
            suspect: HashSet::new(),
        }
    }

    /// Gives `slot` back. A suspect slot counts as failed.
    pub(super) fn give_back(&mut self, slot: u32) {
        match self.suspect.remove(&slot) {
            true => self.failed.push_back(slot),
            false => self.free.push(slot),
        }
    }

    /// Takes a free slot. There is one for each chunk that is lent.
    pub(super) fn take(&mut self) -> u32 {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        if self.fresh < self.most {
            self.fresh += 1;
            return self.fresh - 1;
        }
        let slot = self.failed.pop_front();
        slot.expect("a chunk that is lent has a slot")
    }
}
