//! [`Slots`]: which places of the spill file are free.
//!
//! The rule it keeps: there is a slot for each chunk that is lent. One that failed is used again
//! only when there is no other.

use std::collections::{HashSet, VecDeque};

pub(super) struct Slots {
    most: u32,
    pub(super) free: Vec<u32>,
    /// The first that was never used.
    pub(super) fresh: u32,
    /// Could not be written. Taken again when there is no other, the one that failed first before
    /// the rest.
    pub(super) failed: VecDeque<u32>,
    /// Hold bytes that could not be read back as they were.
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

    /// Nobody has the slot any more.
    pub(super) fn give_back(&mut self, slot: u32) {
        match self.suspect.remove(&slot) {
            true => self.failed.push_back(slot),
            false => self.free.push(slot),
        }
    }

    /// A slot that nobody has. There is one for each chunk that is lent.
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
