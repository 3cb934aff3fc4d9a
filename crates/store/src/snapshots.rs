//! [`Snapshots`]: slots that pages had when the process was copied, and that a copy may still read.
//!
//! The rule it keeps: a slot that was in a page's entry when a snapshot was taken is not free before
//! the snapshot ends. Entries say at which *time* they were stored: the number of snapshots before
//! them. A snapshot needs the slots of entries that are as old as itself, or older.
//!
//! Nothing is copied and no entry is looked at when a snapshot is taken: the copy of the process
//! has a copy of the entries.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{PageStore, place::SlotSpan, remote::Backing};

/// Upper bound of times. Entries that are stored later count as needed by all later snapshots, so
/// that slots are kept for longer than necessary.
pub(crate) const TIME_MAX: u16 = (1 << 14) - 1;

/// Snapshots of the regions of a pool.
#[derive(Default)]
pub(crate) struct Snapshots {
    /// Time of the entries that are stored now.
    now: AtomicU16,
    /// True if an entry may have been stored since the last snapshot.
    is_stored: AtomicBool,
    is_live: AtomicBool,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Number of snapshots that have not ended, by their time.
    live: BTreeMap<u16, usize>,
    /// Slots that went out of use since, and the time of their entries.
    slots: Vec<(SlotSpan, u16)>,
    /// True if the pool ends with the last snapshot.
    ends: bool,
}

impl Snapshots {
    /// Returns the time of an entry that is stored now.
    pub(crate) fn now(&self) -> u16 {
        self.is_stored.store(true, Ordering::Relaxed);
        self.now.load(Ordering::Relaxed)
    }

    /// Takes a snapshot and returns its time. No entry is stored meanwhile.
    fn take(&self) -> u16 {
        let mut kept = self.kept.lock();
        let mut at = self.now.load(Ordering::Relaxed);
        if self.is_stored.swap(false, Ordering::Relaxed) {
            self.now.store(TIME_MAX.min(at + 1), Ordering::Relaxed);
        } else {
            // All entries are older than the present time.
            at = at.saturating_sub(1);
        }
        *kept.live.entry(at).or_default() += 1;
        self.is_live.store(true, Ordering::SeqCst);
        at
    }

    /// Ends a snapshot. Returns the slots that none needs any more, and whether the pool ends now.
    fn end(&self, at: u16) -> (Vec<SlotSpan>, bool) {
        let mut kept = self.kept.lock();
        let count = kept.live.get_mut(&at).expect("a snapshot ends once");
        *count -= 1;
        if *count == 0 {
            kept.live.remove(&at);
        }
        let newest = kept.live.last_key_value().map(|(&at, _)| at);
        self.is_live.store(newest.is_some(), Ordering::SeqCst);
        let is_needed = |(_, time): &(SlotSpan, u16)| newest.is_some_and(|at| *time <= at);
        let (needed, free) = mem::take(&mut kept.slots).into_iter().partition(is_needed);
        kept.slots = needed;
        let free: Vec<(SlotSpan, u16)> = free;
        let ends = newest.is_none() && mem::take(&mut kept.ends);
        (free.into_iter().map(|(slot, _)| slot).collect(), ends)
    }

    /// Keeps a slot that goes out of use if a snapshot needs it. `time` is that of its entry. False
    /// if the slot is free now.
    pub(crate) fn keep(&self, slot: SlotSpan, time: u16) -> bool {
        if !self.is_live.load(Ordering::SeqCst) {
            return false;
        }
        let mut kept = self.kept.lock();
        let newest = kept.live.last_key_value();
        let is_needed = newest.is_some_and(|(&at, _)| time <= at);
        if is_needed {
            kept.slots.push((slot, time));
        }
        is_needed
    }

    /// Notes that the pool ends with the last snapshot. False if there is none: it ends now.
    pub(crate) fn end_later(&self) -> bool {
        let mut kept = self.kept.lock();
        kept.ends = !kept.live.is_empty();
        kept.ends
    }

    /// Returns the bytes of the slots that are kept.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let kept = self.kept.lock();
        kept.slots.iter().map(|(slot, _)| u64::from(slot.bytes)).sum()
    }
}

/// Hold on all that a region's pages had in remote memory at one moment, for a copy of the process.
/// Dropping it frees what the region does not use any more.
pub struct Snapshot {
    store: Arc<PageStore>,
    at: u16,
}

impl Snapshot {
    /// Takes a snapshot of a region in remote memory. `None` for a user's own store, which keeps no
    /// older bytes. No page may be written back meanwhile.
    pub fn take(store: &Arc<PageStore>) -> Option<Snapshot> {
        let Backing::Remote(remote) = &store.backing else {
            return None;
        };
        Some(Snapshot {
            at: remote.pool.snapshots.take(),
            store: store.clone(),
        })
    }

    /// Returns the region.
    pub fn store(&self) -> &Arc<PageStore> {
        &self.store
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let Backing::Remote(remote) = &self.store.backing else {
            return;
        };
        let (free, ends) = remote.pool.snapshots.end(self.at);
        remote.pool.give_back(&free);
        if ends {
            remote.pool.release_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::SlotPlace;

    fn slot(number: u64) -> SlotSpan {
        SlotSpan {
            place: SlotPlace {
                server: 0,
                extent: 0,
                offset: number * 64,
            },
            bytes: 64,
        }
    }

    #[test]
    fn a_slot_is_kept_for_snapshots_that_are_younger_than_its_entry() {
        let snapshots = Snapshots::default();
        let old = snapshots.now();
        assert!(!snapshots.keep(slot(0), old), "there is no snapshot");
        let first = snapshots.take();
        let between = snapshots.now();
        let second = snapshots.take();
        let new = snapshots.now();
        assert!(!snapshots.keep(slot(1), new));
        assert!(snapshots.keep(slot(2), between));
        assert!(snapshots.keep(slot(3), old));
        assert_eq!(snapshots.kept_bytes(), 128);
        // The first snapshot does not need what was stored after it.
        assert_eq!(snapshots.end(second), (vec![slot(2)], false));
        assert!(!snapshots.keep(slot(4), between));
        assert_eq!(snapshots.end(first), (vec![slot(3)], false));
        assert!(!snapshots.keep(slot(5), old));
    }

    #[test]
    fn the_older_snapshot_may_end_first() {
        let snapshots = Snapshots::default();
        let old = snapshots.now();
        let first = snapshots.take();
        let between = snapshots.now();
        let second = snapshots.take();
        assert!(snapshots.keep(slot(0), old) && snapshots.keep(slot(1), between));
        assert_eq!(snapshots.end(first), (vec![], false));
        assert_eq!(snapshots.end(second), (vec![slot(0), slot(1)], false));
    }

    #[test]
    fn snapshots_without_a_change_between_them_have_one_time() {
        let snapshots = Snapshots::default();
        let old = snapshots.now();
        let times: Vec<u16> = (0..40_000).map(|_| snapshots.take()).collect();
        assert!(times.iter().all(|&time| time == times[0]));
        assert!(snapshots.keep(slot(0), old));
        let new = snapshots.now();
        assert!(!snapshots.keep(slot(1), new));
        for &time in &times[1..] {
            assert_eq!(snapshots.end(time), (vec![], false));
        }
        assert!(snapshots.end_later());
        assert_eq!(snapshots.end(times[0]), (vec![slot(0)], true));
        assert!(!snapshots.end_later());
    }

    #[test]
    fn after_the_last_time_more_is_kept_and_nothing_is_lost() {
        let snapshots = Snapshots::default();
        let mut times = Vec::new();
        for _ in 0..2 * u32::from(TIME_MAX) {
            times.push((snapshots.now(), snapshots.take()));
        }
        for &(entry, snapshot) in &times {
            assert!(entry <= snapshot);
        }
        let (entry, _) = times[times.len() - 1];
        assert!(snapshots.keep(slot(0), entry));
        let last = times.pop().expect("there are some").1;
        let mut free = snapshots.end(last).0;
        for (_, snapshot) in times {
            free.extend(snapshots.end(snapshot).0);
        }
        assert_eq!(free, [slot(0)]);
    }
}
