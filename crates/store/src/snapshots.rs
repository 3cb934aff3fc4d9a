//! [`Snapshots`]: slots that pages had when the process was copied, and that the copy may still
//! read.
//!
//! The rule it keeps: a slot that a page's entry had when a snapshot was taken is not free before
//! the snapshot ends. Taking a snapshot looks at no entry and copies nothing: the copy of the
//! process has a copy of the entries.
//!
//! Entries say at which *time* they were stored: the number of snapshots before them. A snapshot
//! needs a slot that goes out of use if the slot's entry is not younger than the snapshot. Such a
//! slot waits with the youngest snapshot that needs it. When that one ends, the slot goes on to the
//! next older one, or is free, as blocks do on the dead lists of ZFS.
//!
//! Slots that were never in an entry are left to the [`SlotPool`](crate::pool::SlotPool): those of
//! page maps, and of writes that did not take place.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use farpage_signals::Mutex;

use crate::{
    place::{SlotPlace, SlotSpan, slot_bytes},
    roster::SERVERS_MAX,
};

/// Time of slots whose entry is not known: all snapshots need them.
pub(crate) const OLDEST: u16 = 0;
/// Upper bound of times: entries have 14 bits for them. From then on time stands still. Entries
/// that are younger than a snapshot count as old, so that more slots are kept than are needed.
pub(crate) const TIME_MAX: u16 = (1 << 14) - 1;

/// Flag of [`Present`]: an entry may have been stored since the last snapshot.
const STORED: u32 = 1 << 30;
/// Flag of [`Present`]: a snapshot lives.
const LIVE: u32 = 1 << 31;

/// Snapshots of the regions of a pool. They have a cache line of their own: every commit reads
/// `present`, and counters of the pool change with every page.
#[repr(align(64))]
pub(crate) struct Snapshots {
    /// A [`Present`]. Time and flags change together: an entry that is stored at a time sets
    /// `STORED` in that time, or the time has passed.
    present: AtomicU32,
    held: Mutex<Held>,
    /// Bytes of the held slots, by server.
    held_bytes: Box<[AtomicU64]>,
    /// Bytes of the held slots of all pools of the cluster.
    held_bytes_in_all: Arc<AtomicU64>,
}

/// Word of [`Snapshots`] at one moment: the time of entries that are stored now in bits 0..14,
/// [`STORED`] and [`LIVE`].
#[derive(Clone, Copy)]
pub(crate) struct Present(u32);

#[derive(Default)]
struct Held {
    /// Snapshots that have not ended, the oldest first.
    live: Vec<LiveSnapshot>,
    /// Number of snapshots that were taken.
    taken: u64,
    /// True if the pool ends with the last snapshot.
    ends: bool,
}

struct LiveSnapshot {
    number: u64,
    /// Time of the youngest entries that the snapshot has.
    time: u16,
    /// Slots that no page uses any more and no younger snapshot needs. Pushing here allocates under
    /// the lock, with signals held back, as publications do.
    slots: Vec<HeldSlot>,
}

/// Slot that no page uses any more: its [packed](SlotPlace::pack) place, the length that it was
/// allocated for, and the time of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldSlot {
    pub(crate) place: u64,
    bytes: u32,
    time: u16,
}

/// Rest of the end of a snapshot: slots are to be freed.
pub(crate) struct SnapshotEnd {
    /// Slots that no snapshot needs any more.
    pub(crate) free: Vec<HeldSlot>,
    /// Bytes of these slots.
    pub(crate) free_bytes: u64,
    /// True if the pool ends now.
    pub(crate) pool_ends: bool,
}

impl HeldSlot {
    pub(crate) fn span(self) -> SlotSpan {
        SlotSpan {
            place: SlotPlace::unpack(self.place),
            bytes: self.bytes,
        }
    }
}

impl Present {
    /// Returns the time of entries that are stored now.
    pub(crate) fn time(self) -> u16 {
        self.0 as u16 & TIME_MAX
    }

    /// True if a snapshot lives.
    pub(crate) fn has_live(self) -> bool {
        self.0 & LIVE != 0
    }

    /// Returns the time of a snapshot that is taken now, and the present behind it.
    fn take(self) -> (u16, Present) {
        let now = self.time();
        if now == TIME_MAX {
            // No later time tells the entries behind the snapshot from those before it.
            return (now, Present(u32::from(now) | LIVE));
        }
        match self.0 & STORED != 0 {
            true => (now, Present(u32::from(now + 1) | LIVE)),
            // All entries are older than the present time.
            false => (now - 1, Present(u32::from(now) | LIVE)),
        }
    }
}

impl Snapshots {
    /// Makes the snapshots, none yet, of a pool. Bytes of held slots are counted in
    /// `held_bytes_in_all`, too.
    pub(crate) fn new(held_bytes_in_all: Arc<AtomicU64>) -> Self {
        Self {
            present: AtomicU32::new(u32::from(OLDEST + 1)),
            held: Mutex::default(),
            held_bytes: (0..SERVERS_MAX).map(|_| AtomicU64::new(0)).collect(),
            held_bytes_in_all,
        }
    }

    /// Returns the present, for a thread that stores entries now.
    pub(crate) fn now(&self) -> Present {
        let present = self.present();
        if present.0 & STORED == 0 {
            self.present.fetch_or(STORED, Ordering::Relaxed);
        }
        present
    }

    /// Returns the present. Acquire pairs with the Release of [`take`](Self::take).
    fn present(&self) -> Present {
        Present(self.present.load(Ordering::Acquire))
    }

    /// Takes a snapshot. Returns its number.
    pub(crate) fn take(&self) -> u64 {
        let mut held = self.held.lock();
        let take = |word| Some(Present(word).take().1.0);
        let before = (self.present)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .expect("no present is refused");
        let number = held.taken;
        held.taken += 1;
        held.live.push(LiveSnapshot {
            number,
            time: Present(before).take().0,
            slots: Vec::new(),
        });
        number
    }

    /// Ends a snapshot. [`freed`](Self::freed) comes when its slots are free.
    pub(crate) fn end(&self, number: u64) -> SnapshotEnd {
        let mut held = self.held.lock();
        let Held { live, ends, .. } = &mut *held;
        let at = live
            .binary_search_by_key(&number, |live| live.number)
            .expect("a snapshot ends once");
        let ended = live.remove(at);
        let mut free = ended.slots;
        if at > 0 {
            let LiveSnapshot { time, slots, .. } = &mut live[at - 1];
            if *time == ended.time && slots.is_empty() {
                // Snapshots of many regions, taken together: the list goes from one to the next.
                mem::swap(slots, &mut free);
            } else {
                slots.extend(free.extract_if(.., |slot| slot.time <= *time));
            }
        }
        let is_last = live.is_empty();
        if is_last {
            self.present.fetch_and(!LIVE, Ordering::Release);
        }
        let mut free_bytes = 0;
        for slot in &free {
            let (server, bytes) = (slot.span().place.server, slot_bytes(slot.bytes));
            self.held_bytes[usize::from(server)].fetch_sub(bytes, Ordering::Relaxed);
            free_bytes += bytes;
        }
        SnapshotEnd {
            free,
            free_bytes,
            pool_ends: is_last && mem::take(ends),
        }
    }

    /// Holds a slot that goes out of use if a snapshot needs it. `time` is that of its entry. False
    /// if the slot is free now.
    pub(crate) fn hold(&self, slot: SlotSpan, time: u16) -> bool {
        if !self.present().has_live() {
            return false;
        }
        let mut held = self.held.lock();
        let newest = held.live.last_mut();
        // An older snapshot has no younger entries.
        let Some(newest) = newest.filter(|newest| time <= newest.time) else {
            return false;
        };
        newest.slots.push(HeldSlot {
            place: slot.place.pack(),
            bytes: slot.bytes,
            time,
        });
        let bytes = slot_bytes(slot.bytes);
        self.held_bytes[usize::from(slot.place.server)].fetch_add(bytes, Ordering::Relaxed);
        self.held_bytes_in_all.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Notes that `bytes` bytes of slots that were held are free. Until then, writes that find no
    /// room wait.
    pub(crate) fn freed(&self, bytes: u64) {
        self.held_bytes_in_all.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Leaves the end of the pool to the last snapshot. False if no snapshot lives: the pool ends
    /// now.
    pub(crate) fn end_pool_later(&self) -> bool {
        let mut held = self.held.lock();
        held.ends = !held.live.is_empty();
        held.ends
    }

    /// True if the end of a snapshot, of this pool or of another, will free slots.
    pub(crate) fn hold_any(&self) -> bool {
        self.held_bytes_in_all.load(Ordering::Relaxed) > 0
    }

    /// Returns the bytes of the held slots on a server.
    pub(crate) fn held_bytes_on(&self, server: usize) -> u64 {
        self.held_bytes[server].load(Ordering::Relaxed)
    }

    /// Returns the bytes of the held slots on all servers.
    pub(crate) fn held_bytes(&self) -> u64 {
        (0..self.held_bytes.len())
            .map(|server| self.held_bytes_on(server))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshots() -> Snapshots {
        Snapshots::new(Arc::default())
    }

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

    /// Ends a snapshot. Returns the numbers of the slots that are free.
    fn end(snapshots: &Snapshots, number: u64) -> Vec<u64> {
        let ended = snapshots.end(number);
        assert!(!ended.pool_ends);
        snapshots.freed(ended.free_bytes);
        let number = |slot: HeldSlot| slot.span().place.offset / 64;
        ended.free.into_iter().map(number).collect()
    }

    #[test]
    fn a_slot_is_held_for_snapshots_that_are_younger_than_its_entry() {
        let snapshots = snapshots();
        let old = snapshots.now().time();
        assert!(!snapshots.hold(slot(0), old), "there is no snapshot");
        let first = snapshots.take();
        let between = snapshots.now().time();
        let second = snapshots.take();
        let new = snapshots.now().time();
        assert!(!snapshots.hold(slot(1), new));
        assert!(snapshots.hold(slot(2), between));
        assert!(snapshots.hold(slot(3), old));
        assert_eq!(snapshots.held_bytes(), 128);
        // The first snapshot does not need what was stored after it.
        assert_eq!(end(&snapshots, second), [2]);
        assert!(!snapshots.hold(slot(4), between));
        assert_eq!(end(&snapshots, first), [3]);
        assert!(!snapshots.hold(slot(5), old));
        assert_eq!(snapshots.held_bytes(), 0);
        assert_eq!(snapshots.held_bytes_in_all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_older_snapshot_may_end_first() {
        let snapshots = snapshots();
        let old = snapshots.now().time();
        let first = snapshots.take();
        let between = snapshots.now().time();
        let second = snapshots.take();
        assert!(snapshots.hold(slot(0), old) && snapshots.hold(slot(1), between));
        assert!(end(&snapshots, first).is_empty());
        assert_eq!(end(&snapshots, second), [0, 1]);
    }

    #[test]
    fn a_slot_that_went_out_of_use_before_a_snapshot_is_not_held_for_it() {
        let snapshots = snapshots();
        let mut last = snapshots.take();
        // There is always a snapshot.
        for number in 0..3 * u64::from(TIME_MAX) {
            let time = snapshots.now().time();
            let next = snapshots.take();
            assert!(snapshots.hold(slot(number), time));
            let younger = snapshots.take();
            assert!(end(&snapshots, last).is_empty());
            assert_eq!(end(&snapshots, next), [number]);
            last = younger;
        }
        assert_eq!(snapshots.held_bytes(), 0);
    }

    #[test]
    fn snapshots_without_a_change_between_them_have_one_time() {
        let snapshots = snapshots();
        let old = snapshots.now().time();
        let all: Vec<u64> = (0..3000).map(|_| snapshots.take()).collect();
        assert!(snapshots.present().time() < 5);
        assert!(snapshots.hold(slot(0), old));
        let new = snapshots.now().time();
        assert!(!snapshots.hold(slot(1), new));
        for &number in &all[1..] {
            assert!(end(&snapshots, number).is_empty());
        }
        assert_eq!(end(&snapshots, all[0]), [0]);
    }

    #[test]
    fn after_the_last_time_more_is_held_and_nothing_is_lost() {
        for stores_each_time in [true, false] {
            let snapshots = snapshots();
            let mut all = Vec::new();
            for round in 0..2 * u32::from(TIME_MAX) {
                if stores_each_time || round < u32::from(TIME_MAX) {
                    snapshots.now();
                }
                let entry = snapshots.present().time();
                all.push((entry, snapshots.take()));
            }
            assert_eq!(snapshots.present().time(), TIME_MAX);
            // The last entry was stored before the last snapshots.
            let (entry, last) = all.pop().expect("there are some");
            assert!(snapshots.hold(slot(0), entry));
            let mut free = end(&snapshots, last);
            for (_, number) in all.into_iter().rev() {
                free.extend(end(&snapshots, number));
            }
            assert_eq!(free, [0]);
        }
    }

    #[test]
    fn a_pool_ends_with_its_last_snapshot() {
        let snapshots = snapshots();
        assert!(!snapshots.end_pool_later(), "there is no snapshot");
        let (first, second) = (snapshots.take(), snapshots.take());
        assert!(snapshots.end_pool_later());
        assert!(!snapshots.end(second).pool_ends);
        assert!(snapshots.end(first).pool_ends);
        assert!(!snapshots.end_pool_later());
    }

    /// Entries that are stored while snapshots of other regions are taken.
    #[test]
    fn an_entry_that_was_stored_before_a_snapshot_is_never_younger() {
        let snapshots = snapshots();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    snapshots.end(snapshots.take());
                    std::thread::yield_now();
                }
            });
            let is_held = (0..20_000).all(|number| {
                let entry = snapshots.now().time();
                let taken = snapshots.take();
                let is_held = snapshots.hold(slot(number), entry);
                snapshots.end(taken);
                is_held
            });
            stop.store(true, Ordering::Relaxed);
            assert!(is_held, "a slot is lost");
        });
    }
}
