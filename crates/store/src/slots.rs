//! [`Arena`]: slots of all lengths carved out of the extents that one server granted.
//!
//! The rule it keeps: no two live slots overlap, and what is freed joins the free space on both
//! sides. The choice of a server, requests for more and the slots' content are left to the
//! [`SlotPool`](crate::pool::SlotPool).
//!
//! **Best fit.** A slot is the front of the shortest hole that is long enough, in units of 64
//! bytes. There are no size classes: with those, pages whose lengths change left 12 to 25 % unused
//! (padding, ends of blocks, and blocks of a length that went out of fashion), where this leaves 2
//! to 7 % (4000 pages of 16 to 48 KiB, rewritten ten times in order, and at random). First fit
//! leaves 11 to 14 %. Pages of one length leave nothing at all: every hole is a multiple of it.
//!
//! Pages that are written together get slots next to each other ([`Arena::alloc_run`]): in the
//! shortest hole that holds them all, else in the longest ones. Rows are freed as rows, too.
//! Nothing is moved to make rows: a run that is rewritten in part is in pieces until it is written
//! as a whole.
//!
//! One lock per arena is enough: it is held for a fraction of a microsecond per slot, against
//! microseconds of hashing and moving its page.

use std::collections::{BTreeMap, BTreeSet};

use crate::place::slot_bytes;

/// Unit of extents in bytes: a tail that is shorter stays unused.
pub(crate) const GRANULE_BYTES: u64 = 64 << 10;

/// Free bytes that may always be scattered over holes. Extents are a multiple of this.
const SCATTERED_BYTES: u64 = 1 << 20;

/// A slot's extent (index) and offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot {
    pub(crate) extent: u32,
    pub(crate) offset: u64,
}

/// Part that an extent has in the choice of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Holes serve first.
    First,
    /// Holes serve where no extent of the first choice has room: a copy is missing, or on a server
    /// that is being emptied.
    Second,
    /// Holes serve last: no server that has a copy answers now.
    Third,
    /// Holes are not given out: the extent's bytes are being copied.
    Sealed,
    /// Holes are not given out: all copies are lost.
    Lost,
}

/// One extent of an arena.
struct ArenaExtent {
    granted_bytes: u64,
    /// Bytes without the tail.
    usable_bytes: u64,
    choice: Choice,
    /// Number of slots that were allocated for writes that have not ended.
    writes: u32,
}

/// The extents of one server.
pub(crate) struct Arena {
    /// Extents by the pool's index; most are other servers'.
    extents: Vec<Option<ArenaExtent>>,
    /// Free space: start and length of each hole. No two holes touch.
    holes: BTreeMap<Slot, u64>,
    /// Holes by length, shortest first: those of the first, second and third choice.
    by_length: [BTreeSet<(u64, Slot)>; 3],
    /// Bytes of all holes.
    free_bytes: u64,
    /// Bytes of all extents, without tails.
    usable_bytes: u64,
    /// Bytes of all extents, with tails.
    pub(crate) granted_bytes: u64,
    /// Bytes promised to regions.
    pub(crate) reserved_bytes: u64,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            extents: Vec::new(),
            holes: BTreeMap::new(),
            by_length: Default::default(),
            free_bytes: 0,
            usable_bytes: 0,
            granted_bytes: 0,
            reserved_bytes: 0,
        }
    }

    /// Adds an extent; a tail that is no whole granule stays unused.
    pub(crate) fn add(&mut self, index: u32, bytes: u64) {
        if self.extents.len() <= index as usize {
            self.extents.resize_with(index as usize + 1, || None);
        }
        let usable = bytes / GRANULE_BYTES * GRANULE_BYTES;
        self.extents[index as usize] = Some(ArenaExtent {
            granted_bytes: bytes,
            usable_bytes: usable,
            choice: Choice::First,
            writes: 0,
        });
        self.granted_bytes += bytes;
        self.usable_bytes += usable;
        if usable > 0 {
            self.insert(start_of(index), usable);
        }
    }

    /// Returns the bytes of the extents that have a copy left.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let kept = |extent: &&ArenaExtent| extent.choice != Choice::Lost;
        let extents = self.extents.iter().flatten().filter(kept);
        extents.map(|extent| extent.granted_bytes).sum()
    }

    /// Takes out unused extents that are not sealed, as long as the rest covers what is reserved,
    /// and `held_bytes` in slots that are held beside that. Extents without a copy cover nothing.
    /// Returns the indices.
    pub(crate) fn take_surplus(&mut self, held_bytes: u64) -> Vec<u32> {
        let needed_bytes = self.reserved_bytes + held_bytes;
        let mut kept_bytes = self.kept_bytes();
        let mut taken = Vec::new();
        for index in 0..self.extents.len() as u32 {
            let Some(extent) = &self.extents[index as usize] else {
                continue;
            };
            let (bytes, usable) = (extent.granted_bytes, extent.usable_bytes);
            let (is_sealed, is_lost) = (
                extent.choice == Choice::Sealed,
                extent.choice == Choice::Lost,
            );
            let start = start_of(index);
            let unused = usable == 0 || self.holes.get(&start) == Some(&usable);
            let is_surplus = is_lost || !is_sealed && kept_bytes >= needed_bytes + bytes;
            if unused && is_surplus {
                self.granted_bytes -= bytes;
                kept_bytes -= if is_lost { 0 } else { bytes };
                self.usable_bytes -= usable;
                if usable > 0 {
                    self.remove(start, usable);
                }
                self.extents[index as usize] = None;
                taken.push(index);
            }
        }
        taken
    }

    /// Takes all free space: start and length of each hole.
    pub(crate) fn take_holes(&mut self) -> BTreeMap<Slot, u64> {
        self.by_length.iter_mut().for_each(BTreeSet::clear);
        self.free_bytes = 0;
        std::mem::take(&mut self.holes)
    }

    /// Allocates a slot for `bytes` in an extent of a choice that is given out; `None` if none has
    /// room.
    pub(crate) fn alloc(&mut self, bytes: u32, choice: Choice) -> Option<Slot> {
        let bytes = slot_bytes(bytes);
        let (len, slot) = self.shortest(bytes, choice)?;
        self.carve(slot, len, slot, bytes);
        Some(slot)
    }

    /// Hands out up to `count` slots for pages of `bytes`, a multiple of 64, as many in a row as
    /// possible: fewer if no extent of the choice has room for more.
    pub(crate) fn alloc_run(
        &mut self,
        bytes: u32,
        count: usize,
        choice: Choice,
        mut each: impl FnMut(Slot),
    ) {
        let bytes = slot_bytes(bytes);
        let mut wanted = count as u64;
        while wanted > 0 {
            let Some((len, slot)) = self.hole_for_run(wanted * bytes, bytes, choice) else {
                return;
            };
            let row = wanted.min(len / bytes);
            if row == 0 {
                return;
            }
            self.carve(slot, len, slot, row * bytes);
            (0..row).for_each(|i| each(behind(slot, i * bytes)));
            wanted -= row;
        }
    }

    /// Finds the shortest hole that holds `run` bytes, else the longest. Once the other holes have
    /// more than [`SCATTERED_BYTES`] and more than a sixteenth of the used bytes, the longest is
    /// spared and the second longest serves, if it holds a page: rows are not worth unlimited room.
    fn hole_for_run(&self, run: u64, page: u64, choice: Choice) -> Option<(u64, Slot)> {
        let by_length = &self.by_length[choice as usize];
        let &longest = by_length.last()?;
        let found = self.shortest(run, choice).unwrap_or(longest);
        let scattered = self.free_bytes - longest.0;
        if found == longest && scattered > (self.used_bytes() / 16).max(SCATTERED_BYTES) {
            let next = by_length.iter().nth_back(1).copied();
            return Some(next.filter(|(len, _)| *len >= page).unwrap_or(longest));
        }
        Some(found)
    }

    /// Takes back slots in a row, which have `bytes` bytes together.
    pub(crate) fn free(&mut self, slot: Slot, bytes: u64) {
        let (mut from, mut len) = (slot, bytes);
        let next = self.holes.range(slot..).next();
        if let Some((&next, &next_len)) = next.filter(|(next, _)| next.extent == slot.extent) {
            assert!(next.offset >= from.offset + len, "{slot:?} is freed twice");
            if next.offset == from.offset + len {
                self.remove(next, next_len);
                len += next_len;
            }
        }
        let before = self.holes.range(..slot).next_back();
        if let Some((&before, &before_len)) = before.filter(|(hole, _)| hole.extent == slot.extent)
        {
            let end = before.offset + before_len;
            assert!(end <= from.offset, "{slot:?} is freed twice");
            if end == from.offset {
                self.remove(before, before_len);
                (from, len) = (before, before_len + len);
            }
        }
        self.insert(from, len);
    }

    /// Takes a slot that another process had. False if any of it is taken, or is nowhere.
    pub(crate) fn claim(&mut self, slot: Slot, bytes: u32) -> bool {
        let bytes = slot_bytes(bytes);
        let Some((&hole, &len)) = self.holes.range(..=slot).next_back() else {
            return false;
        };
        let inside = hole.extent == slot.extent && slot.offset + bytes <= hole.offset + len;
        if inside {
            self.carve(hole, len, slot, bytes);
        }
        inside
    }

    /// True if all of a slot of `bytes` is in an extent, and taken.
    pub(crate) fn has(&self, slot: Slot, bytes: u32) -> bool {
        let end = behind(slot, slot_bytes(bytes));
        let extent = self.extents.get(slot.extent as usize);
        let extent = extent.and_then(Option::as_ref);
        let is_inside = extent.is_some_and(|extent| end.offset <= extent.usable_bytes);
        // Earlier holes end earlier.
        let hole = self.holes.range(..end).next_back();
        let hole = hole.filter(|(hole, _)| hole.extent == slot.extent);
        is_inside && hole.is_none_or(|(hole, len)| hole.offset + len <= slot.offset)
    }

    /// Returns the bytes in slots.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.usable_bytes - self.free_bytes
    }

    /// Changes the part that an extent has in the choice of slots. Does nothing to an extent that
    /// the arena does not have.
    pub(crate) fn choose(&mut self, index: u32, choice: Choice) {
        let Some(Some(extent)) = self.extents.get_mut(index as usize) else {
            return;
        };
        let before = std::mem::replace(&mut extent.choice, choice);
        if before == choice {
            return;
        }
        for (&hole, &len) in self.holes.range(start_of(index)..start_of(index + 1)) {
            if let Some(by_length) = self.by_length.get_mut(before as usize) {
                by_length.remove(&(len, hole));
            }
            if let Some(by_length) = self.by_length.get_mut(choice as usize) {
                by_length.insert((len, hole));
            }
        }
    }

    /// Changes the choice of all extents that are not sealed.
    pub(crate) fn choose_all(&mut self, choice: impl Fn(u32) -> Choice) {
        for index in 0..self.extents.len() as u32 {
            if let Some(extent) = &self.extents[index as usize]
                && extent.choice != Choice::Sealed
            {
                self.choose(index, choice(index));
            }
        }
    }

    /// True if an extent of the choice has room for a slot of `bytes`.
    pub(crate) fn has_room(&self, bytes: u32, choice: Choice) -> bool {
        self.shortest(slot_bytes(bytes), choice).is_some()
    }

    /// True if the arena has the extent.
    pub(crate) fn has_extent(&self, index: u32) -> bool {
        matches!(self.extents.get(index as usize), Some(Some(_)))
    }

    /// Counts slots of an extent as allocated for writes that have not ended.
    pub(crate) fn begin_writes(&mut self, index: u32, slots: usize) {
        if let Some(Some(extent)) = self.extents.get_mut(index as usize) {
            extent.writes += slots as u32;
        }
    }

    /// Ends what [`begin_writes`](Self::begin_writes) began. True if none is left in an extent that
    /// is sealed.
    pub(crate) fn end_writes(&mut self, index: u32, slots: usize) -> bool {
        let Some(Some(extent)) = self.extents.get_mut(index as usize) else {
            return false;
        };
        extent.writes -= slots as u32;
        extent.writes == 0 && extent.choice == Choice::Sealed
    }

    /// Returns the number of slots of an extent whose writes have not ended.
    pub(crate) fn writes(&self, index: u32) -> u32 {
        match self.extents.get(index as usize) {
            Some(Some(extent)) => extent.writes,
            _ => 0,
        }
    }

    /// Returns start and length of each piece in use of an extent.
    pub(crate) fn used_pieces(&self, index: u32) -> Vec<(u64, u64)> {
        let Some(Some(extent)) = self.extents.get(index as usize) else {
            return Vec::new();
        };
        let (mut at, mut used) = (0, Vec::new());
        for (hole, &len) in self.holes.range(start_of(index)..start_of(index + 1)) {
            if hole.offset > at {
                used.push((at, hole.offset - at));
            }
            at = hole.offset + len;
        }
        if extent.usable_bytes > at {
            used.push((at, extent.usable_bytes - at));
        }
        used
    }

    fn shortest(&self, bytes: u64, choice: Choice) -> Option<(u64, Slot)> {
        let by_length = &self.by_length[choice as usize];
        by_length.range((bytes, start_of(0))..).next().copied()
    }

    /// Returns the holes by length among which those of an extent are; `None` if they are not given
    /// out.
    fn by_length_of(&mut self, index: u32) -> Option<&mut BTreeSet<(u64, Slot)>> {
        let extent = self.extents[index as usize].as_ref();
        let choice = extent.expect("a hole is in an extent").choice;
        self.by_length.get_mut(choice as usize)
    }

    /// Takes `bytes` at `slot` out of a hole.
    fn carve(&mut self, hole: Slot, len: u64, slot: Slot, bytes: u64) {
        self.remove(hole, len);
        let before = slot.offset - hole.offset;
        if before > 0 {
            self.insert(hole, before);
        }
        let rest = len - before - bytes;
        if rest > 0 {
            self.insert(behind(slot, bytes), rest);
        }
    }

    fn insert(&mut self, hole: Slot, len: u64) {
        self.free_bytes += len;
        self.holes.insert(hole, len);
        if let Some(by_length) = self.by_length_of(hole.extent) {
            by_length.insert((len, hole));
        }
    }

    fn remove(&mut self, hole: Slot, len: u64) {
        self.free_bytes -= len;
        self.holes.remove(&hole);
        if let Some(by_length) = self.by_length_of(hole.extent) {
            by_length.remove(&(len, hole));
        }
    }
}

fn start_of(extent: u32) -> Slot {
    Slot { extent, offset: 0 }
}

fn behind(slot: Slot, bytes: u64) -> Slot {
    Slot {
        offset: slot.offset + bytes,
        ..slot
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::place::PLACE_UNIT;

    #[test]
    fn raw_pages_fill_an_extent_to_its_last_granule() {
        for page_bytes in [4096u32, 65536, 2 << 20] {
            let mut arena = Arena::new();
            let bytes = 7 * (2 << 20) + GRANULE_BYTES;
            arena.add(3, bytes);
            let slots =
                std::iter::from_fn(|| arena.alloc(page_bytes, Choice::First)).count() as u64;
            assert_eq!(slots, bytes / u64::from(page_bytes));
        }
    }

    #[derive(Clone, Debug)]
    enum SlotStep {
        Alloc(u32),
        AllocRun(u32, usize),
        Free(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = SlotStep> {
        prop_oneof![
            6 => (1u32..70_000).prop_map(SlotStep::Alloc),
            3 => (12u32..17, 1usize..40).prop_map(|(bits, count)| SlotStep::AllocRun(1 << bits, count)),
            5 => any::<prop::sample::Index>().prop_map(SlotStep::Free),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn live_slots_never_overlap_and_everything_returns(steps in prop::collection::vec(step(), 1..400)) {
            let mut arena = Arena::new();
            let extents = [(0, 3 << 20), (2, (1 << 20) + 3 * GRANULE_BYTES), (5, GRANULE_BYTES + 100)];
            for (index, bytes) in extents {
                arena.add(index, bytes);
            }
            // Slot -> length.
            let mut live: BTreeMap<Slot, u32> = BTreeMap::new();
            for step in steps {
                match step {
                    SlotStep::Alloc(bytes) | SlotStep::AllocRun(bytes, _) => {
                        let mut slots = Vec::new();
                        match step {
                            SlotStep::AllocRun(_, count) => {
                                arena.alloc_run(bytes, count, Choice::First, |slot| slots.push(slot));
                                prop_assert!(slots.len() == count || arena.alloc(bytes, Choice::First).is_none());
                            }
                            _ => slots.extend(arena.alloc(bytes, Choice::First)),
                        }
                        for slot in slots {
                            let end = slot.offset + u64::from(bytes);
                            let extent = extents.iter().find(|(index, _)| *index == slot.extent).expect("a granted extent").1;
                            prop_assert!(end <= extent && slot.offset.is_multiple_of(PLACE_UNIT));
                            if let Some((below, len)) = live.range(..=slot).next_back() {
                                prop_assert!(below.extent != slot.extent || below.offset + u64::from(*len) <= slot.offset);
                            }
                            if let Some((above, _)) = live.range(slot..).next() {
                                prop_assert!(above.extent != slot.extent || end <= above.offset);
                            }
                            live.insert(slot, bytes);
                        }
                    }
                    SlotStep::Free(_) if live.is_empty() => {}
                    SlotStep::Free(index) => {
                        let slot = *index.get(&live.keys().copied().collect::<Vec<_>>());
                        let bytes = live.remove(&slot).expect("picked from the live ones");
                        arena.free(slot, slot_bytes(bytes));
                    }
                }
            }
            let used: u64 = live.values().map(|&bytes| slot_bytes(bytes)).sum();
            prop_assert_eq!(arena.used_bytes(), used);
            // Another process takes the same slots out of the same extents, and none twice.
            let mut other = Arena::new();
            extents.iter().for_each(|&(index, bytes)| other.add(index, bytes));
            for (&slot, &bytes) in &live {
                prop_assert!(other.claim(slot, bytes) && !other.claim(slot, bytes));
            }
            prop_assert_eq!(&other.by_length, &arena.by_length);
            for (index, bytes) in extents {
                for offset in (0..bytes + 4096).step_by(1024) {
                    let (slot, end) = (Slot { extent: index, offset }, offset + 1024);
                    let mut taken = 0;
                    for (live, &len) in live.range(start_of(index)..start_of(index + 1)) {
                        let live_end = live.offset + slot_bytes(len);
                        taken += live_end.min(end).saturating_sub(live.offset.max(offset));
                    }
                    prop_assert_eq!(arena.has(slot, 1024), taken == 1024);
                }
            }
            prop_assert!(!arena.has(start_of(1), 64) && !arena.has(start_of(6), 64));
            prop_assert_eq!(arena.take_surplus(0).len() < 3, !live.is_empty());
            for (slot, bytes) in live {
                arena.free(slot, slot_bytes(bytes));
            }
            arena.take_surplus(0);
            prop_assert_eq!((arena.granted_bytes, arena.holes.len(), arena.by_length[0].len()), (0, 0, 0));
        }
    }

    /// Pages that are rewritten with other lengths again and again, in order and at random, alone
    /// and in runs, some of them raw: the space that was ever needed against the bytes stored.
    #[test]
    fn rewriting_pages_with_changing_lengths_keeps_the_space_compact() {
        for (page_bytes, run_max, raw_in_ten, at_random) in [
            (4096u64, 1, 0, false),
            (4096, 1, 0, true),
            (65536, 1, 0, false),
            (65536, 1, 0, true),
            (4096, 16, 3, false),
            (65536, 16, 3, false),
            (65536, 16, 3, true),
            (65536, 16, 10, false),
            (65536, 1, 10, true),
        ] {
            let mut arena = Arena::new();
            arena.add(0, 1 << 30);
            let mut next = numbers(page_bytes);
            let pages = 4000;
            let mut slots: Vec<Option<(Slot, u64)>> = vec![None; pages];
            let mut worst = 0.0f64;
            for pass in 0..10 {
                let (mut from, mut written) = (0, 0);
                while written < pages {
                    if at_random && pass > 0 {
                        from = next(pages);
                    }
                    let to = (from + 1 + next(run_max)).min(pages);
                    let (raw, encoded): (Vec<_>, Vec<_>) =
                        (from..to).partition(|_| next(10) < raw_in_ten);
                    let mut new: Vec<_> = alloc_run(&mut arena, page_bytes, raw.len())
                        .into_iter()
                        .map(|slot| (slot, page_bytes))
                        .collect();
                    assert_eq!(new.len(), raw.len(), "there is room");
                    for _ in &encoded {
                        let bytes = page_bytes / 4 + next(page_bytes as usize / 2) as u64;
                        new.push((
                            arena
                                .alloc(bytes as u32, Choice::First)
                                .expect("there is room"),
                            bytes,
                        ));
                    }
                    for (page, new) in raw.into_iter().chain(encoded).zip(new) {
                        if let Some((old, bytes)) = slots[page].replace(new) {
                            arena.free(old, slot_bytes(bytes as u32));
                        }
                    }
                    (from, written) = (to, written + to - from);
                }
                // Best fit leaves the end alone as long as anything else will do.
                let (last, len) = arena.holes.last_key_value().expect("not full");
                assert_eq!(last.offset + len, 1 << 30);
                let stored: u64 = slots.iter().flatten().map(|(_, bytes)| bytes).sum();
                worst = worst.max(last.offset as f64 / stored as f64);
            }
            println!(
                "{page_bytes}-byte pages, {raw_in_ten} in 10 raw, runs of {run_max}, at random: {at_random}: {worst:.3} times what is stored"
            );
            assert!(worst < 1.1, "{worst}");
        }
    }

    /// Returns a seeded generator that yields the same numbers on every machine.
    fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
        let mut random = seed;
        move |limit| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % limit
        }
    }

    fn rows(slots: &[Slot], page_bytes: u64) -> usize {
        let behind = |a: &Slot, b: &Slot| a.extent == b.extent && a.offset + page_bytes == b.offset;
        slots.chunk_by(behind).count()
    }

    fn alloc_run(arena: &mut Arena, page_bytes: u64, count: usize) -> Vec<Slot> {
        let mut slots = Vec::new();
        arena.alloc_run(page_bytes as u32, count, Choice::First, |slot| {
            slots.push(slot)
        });
        slots
    }

    #[test]
    fn a_run_is_one_row_where_there_is_room_for_it() {
        for (page_bytes, count) in [
            (4096, 256),
            (4096, 17),
            (65536, 16),
            (65536, 5),
            (65536, 32),
        ] {
            let mut arena = Arena::new();
            arena.add(0, 64 << 20);
            for _ in 0..8 {
                let slots = alloc_run(&mut arena, page_bytes, count);
                assert_eq!((slots.len(), rows(&slots, page_bytes)), (count, 1));
            }
        }
        let mut arena = Arena::new();
        arena.add(0, 1 << 20);
        let all = alloc_run(&mut arena, 65536, 20);
        assert_eq!((all.len(), rows(&all, 65536)), (16, 1), "what there is");
        all.iter()
            .step_by(2)
            .for_each(|slot| arena.free(*slot, 65536));
        assert_eq!(alloc_run(&mut arena, 65536, 20).len(), 8, "in pieces");
    }

    /// Neighbouring pages that are written back together, mostly 16 of them, else some in a row.
    #[test]
    fn rewriting_runs_keeps_them_in_rows() {
        let spare = 16 << 20;
        for (page_bytes, whole_in_ten, written_max, read_max) in [
            (4096u64, 9, 1.1, 1.4),
            (65536, 9, 1.2, 1.5),
            (65536, 5, 3.0, 5.0),
        ] {
            let pages = ((256 << 20) / page_bytes) as usize;
            let mut arena = Arena::new();
            arena.add(0, (256 << 20) + spare);
            let mut next = numbers(page_bytes);
            let mut slots = alloc_run(&mut arena, page_bytes, pages);
            let (mut written, mut runs) = (0, 0);
            let rounds = 10 * pages / 16;
            for i in 0..rounds {
                let mut from = next(pages / 16) * 16;
                let mut to = from + 16;
                if next(10) >= whole_in_ten {
                    from += next(16);
                    to = from + 1 + next(to - from);
                }
                let new = alloc_run(&mut arena, page_bytes, to - from);
                assert_eq!(new.len(), to - from, "there is room");
                if i > rounds / 2 {
                    (written, runs) = (written + rows(&new, page_bytes), runs + 1);
                }
                for (old, new) in slots[from..to].iter_mut().zip(new) {
                    arena.free(std::mem::replace(old, new), page_bytes);
                }
            }
            let read: usize = slots.chunks(16).map(|run| rows(run, page_bytes)).sum();
            let (written, read) = (
                written as f64 / runs as f64,
                read as f64 * 16.0 / pages as f64,
            );
            println!(
                "{page_bytes}-byte pages, {whole_in_ten} in 10 whole: {written:.2} rows per run written, {read:.2} per 16 pages read"
            );
            assert!(written < written_max && read < read_max, "{written} {read}");
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_our_own_mistake() {
        let mut arena = Arena::new();
        arena.add(0, 1 << 20);
        let slot = arena.alloc(4096, Choice::First).expect("there is room");
        arena.alloc(4096, Choice::First);
        arena.free(slot, 4096);
        arena.free(slot, 4096);
    }
}
