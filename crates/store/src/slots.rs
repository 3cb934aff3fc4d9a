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
    /// Holes are not given out: the extent is a column of a parity set.
    Column,
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
    /// Number of slots that have been allocated, modulo 2^32.
    allocated: u32,
    /// Number of given-up writes that may still land.
    doubts: u32,
    /// Bytes of the holes.
    free_bytes: u64,
}

/// Use of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentUse {
    /// Bytes of the holes.
    pub(crate) free_bytes: u64,
    /// Bytes of the slots.
    pub(crate) used_bytes: u64,
    /// Number of slots that have been allocated, modulo 2^32.
    pub(crate) allocated: u32,
    /// True if no write is under way, and nothing can land late.
    pub(crate) is_settled: bool,
    /// True if no slot is given out, since the extent's bytes are being copied.
    pub(crate) is_sealed: bool,
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
    /// Bytes of the holes of columns.
    pub(crate) column_free_bytes: u64,
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
            column_free_bytes: 0,
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
            allocated: 0,
            doubts: 0,
            free_bytes: 0,
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

    /// Takes out unused extents that are neither sealed nor columns, as long as the rest covers
    /// what is reserved, and `held_bytes` in slots that are held beside that. Extents without a
    /// copy cover nothing. Returns the indices.
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
                matches!(extent.choice, Choice::Sealed | Choice::Column),
                extent.choice == Choice::Lost,
            );
            let unused = extent.free_bytes == usable;
            let is_surplus = is_lost || !is_sealed && kept_bytes >= needed_bytes + bytes;
            if unused && is_surplus {
                kept_bytes -= if is_lost { 0 } else { bytes };
                self.take(index);
                taken.push(index);
            }
        }
        taken
    }

    /// Takes an unused extent out. Does nothing if the arena does not have it.
    pub(crate) fn take(&mut self, index: u32) {
        let Some(Some(extent)) = self.extents.get(index as usize) else {
            return;
        };
        let (bytes, usable) = (extent.granted_bytes, extent.usable_bytes);
        self.granted_bytes -= bytes;
        self.usable_bytes -= usable;
        if usable > 0 {
            self.remove(start_of(index), usable);
        }
        self.extents[index as usize] = None;
    }

    /// Returns the use of an extent; `None` if the arena does not have it.
    pub(crate) fn use_of(&self, index: u32) -> Option<ExtentUse> {
        let extent = self.extents.get(index as usize)?.as_ref()?;
        Some(ExtentUse {
            free_bytes: extent.free_bytes,
            used_bytes: extent.usable_bytes - extent.free_bytes,
            allocated: extent.allocated,
            is_settled: extent.writes == 0 && extent.doubts == 0,
            is_sealed: extent.choice == Choice::Sealed,
        })
    }

    /// Counts a given-up write to an extent that may still land.
    pub(crate) fn begin_doubt(&mut self, index: u32) {
        if let Some(Some(extent)) = self.extents.get_mut(index as usize) {
            extent.doubts += 1;
        }
    }

    /// Ends what [`begin_doubt`](Self::begin_doubt) began.
    pub(crate) fn end_doubt(&mut self, index: u32) {
        if let Some(Some(extent)) = self.extents.get_mut(index as usize) {
            extent.doubts -= 1;
        }
    }

    /// Takes all free space: start and length of each hole.
    pub(crate) fn take_holes(&mut self) -> BTreeMap<Slot, u64> {
        self.by_length.iter_mut().for_each(BTreeSet::clear);
        self.free_bytes = 0;
        for extent in self.extents.iter_mut().flatten() {
            extent.free_bytes = 0;
        }
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
        if before == Choice::Column {
            self.column_free_bytes -= extent.free_bytes;
        }
        if choice == Choice::Column {
            self.column_free_bytes += extent.free_bytes;
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
            extent.allocated = extent.allocated.wrapping_add(slots as u32);
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

    fn extent_of(&mut self, hole: Slot) -> &mut ArenaExtent {
        let extent = self.extents[hole.extent as usize].as_mut();
        extent.expect("a hole is in an extent")
    }

    /// Returns the holes by length among which a hole is; `None` if it is not given out.
    fn by_length_of(&mut self, hole: Slot) -> Option<&mut BTreeSet<(u64, Slot)>> {
        let choice = self.extent_of(hole).choice;
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
        let extent = self.extent_of(hole);
        extent.free_bytes += len;
        if extent.choice == Choice::Column {
            self.column_free_bytes += len;
        }
        self.holes.insert(hole, len);
        if let Some(by_length) = self.by_length_of(hole) {
            by_length.insert((len, hole));
        }
    }

    fn remove(&mut self, hole: Slot, len: u64) {
        self.free_bytes -= len;
        let extent = self.extent_of(hole);
        extent.free_bytes -= len;
        if extent.choice == Choice::Column {
            self.column_free_bytes -= len;
        }
        self.holes.remove(&hole);
        if let Some(by_length) = self.by_length_of(hole) {
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
mod tests;
