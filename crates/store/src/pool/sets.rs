//! Parity sets of a [`SlotPool`]: what their making and their end need of the pool.
//!
//! The rule it keeps: no slot of a column is given out, and a column's extents change only while
//! the column is sealed. Computing parity is left to the [set maker](crate::set_maker).

use std::{
    collections::BTreeSet,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use farpage_fabric::ExtentId;

use super::{SlotPool, damage::DamagedRange, spares::SpareExtent, wish::RoomWish};
use crate::{
    groups::{ExtentGroup, Member, MemberState, SetView},
    parity::{ParityCode, ParitySet},
    place::SlotPlace,
    slots::ExtentUse,
};

/// Part of a pool that may be room in sets before a set is opened rather than the pool grown: with
/// four data extents and one of parity, the memory is then 1.43 times the pages.
const ROOM_PART: u64 = 8;
/// Time within which a set is opened while writes wait; then the pool grows.
const OPENING_WITHIN: Duration = Duration::from_secs(1);
impl SlotPool {
    /// Returns the code of a pool with parity.
    pub(crate) fn code(&self) -> Option<ParityCode> {
        self.redundancy.code()
    }

    /// Returns the number of a server that is the same for all numbers of one server.
    pub(crate) fn first_number(&self, server: u8) -> u8 {
        let first = (0..server).find(|&before| self.is_same(before, server));
        first.unwrap_or(server)
    }

    /// Returns the sources that a group's bytes can be computed from, if it is in a set.
    pub(crate) fn sources(&self, index: u32) -> Option<(SetView, u16)> {
        let view = self.groups.set_of(index)?;
        let sources = view.sources(0, |member| self.is_usable(member.server))?;
        Some((view, sources))
    }

    /// Notes that the extent at a position of a place's set, or the place's own at `None`, has
    /// damaged bytes where the place has `bytes`: bytes that were decoded without that extent were
    /// right. `changes` is the number of the place's group when these were read. For signal
    /// handlers, too.
    pub(crate) fn mark_extent_damaged(
        &self,
        place: SlotPlace,
        at: Option<u8>,
        (changes, bytes): (u32, u32),
    ) {
        let view = self.groups.set_of(place.extent);
        let Some(view) = view.filter(|view| view.changes == changes) else {
            return;
        };
        let at = at.unwrap_or(view.at);
        let index = view.set.groups()[usize::from(at)];
        let (home, group) = (view.home(at), self.groups.get(index));
        if let (Some(home), Some(group)) = (home, group)
            && group.member(0) == Some(home)
        {
            self.damaged.lock().note(DamagedRange {
                server: home.server,
                id: home.id,
                offset: place.offset,
                bytes,
            });
            let place = SlotPlace {
                extent: index,
                ..place
            };
            self.mark_damaged(place, (1, group.changes), home);
        }
    }

    /// Returns offset and length of each range of an extent that is known to be damaged.
    pub(crate) fn damaged_ranges(&self, member: Member) -> Vec<(u64, u64)> {
        // Copied: signal handlers wait for the lock.
        let ranges = *self.damaged.lock();
        ranges.of(member.server, member.id)
    }

    /// Returns the use of a group; `None` for a parity extent, and a group that is gone.
    pub(crate) fn use_of(&self, index: u32) -> Option<ExtentUse> {
        self.arenas
            .iter()
            .find_map(|arena| arena.lock().use_of(index))
    }

    /// Counts a given-up write that may still land.
    pub(crate) fn begin_doubt(&self, place: SlotPlace) {
        let arena = &self.arenas[usize::from(place.server)];
        arena.lock().begin_doubt(place.extent);
    }

    /// Makes a set of sealed groups, and gives their additional copies back: see
    /// [`GroupTable::code`](crate::groups::GroupTable::code). False if a group has changed.
    pub(crate) fn make_set(
        &self,
        code: ParityCode,
        columns: &[(u32, ExtentGroup, u8)],
        parity: &[(u8, ExtentId)],
    ) -> bool {
        let Some((rest, moves)) = self.groups.code(code, columns, parity) else {
            return false;
        };
        let bytes = columns[0].1.bytes;
        moves.into_iter().for_each(|it| self.show_contents(it));
        parity
            .iter()
            .for_each(|(server, _)| self.count_copy(*server, bytes));
        self.release_members(&rest, bytes);
        true
    }

    /// Ends the opening of a set: its columns have their copies, and the parity goes back. False if
    /// a copy is missing.
    pub(crate) fn dissolve_set(&self, number: u32, set: &ParitySet) -> bool {
        let Some(parity) = self.groups.dissolve(number) else {
            return false;
        };
        for group in &parity {
            let members: Vec<Member> = group.members().map(|(_, member)| member).collect();
            self.release_members(&members, group.bytes);
        }
        *self.room_awaited.lock() = None;
        for &index in set.columns() {
            for arena in self.arenas.iter() {
                let mut arena = arena.lock();
                // Looked up under the lock: what changes later comes by `follow_health`.
                arena.choose(index, self.choice_of(index));
            }
        }
        true
    }

    /// Gives up the opening of a set, and the copies that were made. False, and nothing is done, if
    /// that left two of the set's extents on one server.
    pub(crate) fn keep_set(&self, number: u32, set: &ParitySet) -> bool {
        let bytes = (self.groups.get(set.columns()[0])).map_or(0, |group| group.bytes);
        let closed = (self.groups).keep_closed(number, |one, other| self.is_same(one, other));
        let Some((rest, moves)) = closed else {
            return false;
        };
        moves.into_iter().for_each(|it| self.show_contents(it));
        self.release_members(&rest, bytes);
        true
    }

    /// Begins to open a set: its columns lack copies from now on. False if there is no such set.
    pub(crate) fn open_set(&self, number: u32) -> bool {
        self.groups.open(number, self.copies)
    }

    /// True if a write waits for room that a set may have.
    pub(crate) fn is_room_awaited(&self) -> bool {
        self.room_awaited.lock().is_some_and(|wish| wish.stands())
    }

    /// Asks for a set to be opened, if that makes much room. True if the caller is to wait for it
    /// instead of asking servers for memory: an eighth of the pool or more is room in sets. After a
    /// second without a set that was opened, servers are asked in any case.
    pub(super) fn await_room(&self) -> bool {
        let in_sets = self.room_in_sets();
        if in_sets == 0 || in_sets < self.granted_bytes() / ROOM_PART {
            return false;
        }
        self.ask_for_opening().elapsed() < OPENING_WITHIN
    }

    /// Asks for a set to be opened, since servers have no room. Does nothing without room in sets.
    pub(super) fn await_any_room(&self) {
        if self.room_in_sets() > 0 {
            self.ask_for_opening();
        }
    }

    /// Asks for a set to be opened. Returns the time since when that is so.
    fn ask_for_opening(&self) -> Instant {
        let mut awaited = self.room_awaited.lock();
        let (wish, is_new) = RoomWish::repeat(*awaited);
        *awaited = Some(wish);
        drop(awaited);
        if is_new {
            self.health.wake();
        }
        wish.since
    }

    /// Returns the bytes of holes in columns: opening sets makes that much room.
    pub(crate) fn room_in_sets(&self) -> u64 {
        let arenas = self.arenas.iter();
        arenas.map(|arena| arena.lock().column_free_bytes).sum()
    }

    /// Returns the bytes that this pool has on a server.
    pub(crate) fn copied_bytes_on(&self, server: u8) -> u64 {
        self.copied_bytes[usize::from(server)].load(Ordering::Relaxed)
    }

    /// Counts copies that differ, and parity that came back damaged.
    pub(crate) fn count_differing(&self) {
        self.differing.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of times that copies differed, or parity came back damaged.
    pub(crate) fn differing(&self) -> u64 {
        self.differing.load(Ordering::Relaxed)
    }

    fn release_members(&self, members: &[Member], bytes: u64) {
        for &Member { server, id, state } in members {
            self.uncount_copy(server, bytes);
            if state != MemberState::Good || !self.keep_spare(SpareExtent { server, id, bytes }) {
                self.release(usize::from(server), id);
            }
        }
    }

    /// Keeps an extent that nothing lands in any more, unless there are enough: as many of each
    /// length, for each server, as there are parities. With these a set can be opened if servers
    /// have no room: the copies of a column go to servers that have most of them, and homes of a
    /// set are on different servers. One that is too many on its server stays all the same while
    /// others lack theirs: what goes back is lost to other clients. A pool without reservations
    /// keeps none.
    fn keep_spare(&self, spare: SpareExtent) -> bool {
        if !self.may_keep_spares(spare.server) {
            return false;
        }
        let enough = self.spares_needed();
        let mut spares = self.spares.lock();
        let is_lacking = spares.iter().filter(|it| it.bytes == spare.bytes).count() < enough;
        if is_lacking {
            spares.push(spare);
        }
        is_lacking
    }

    /// True if extents are to be kept on the server.
    fn may_keep_spares(&self, server: u8) -> bool {
        let is_reserved = || (self.arenas.iter()).any(|arena| arena.lock().reserved_bytes > 0);
        self.code().is_some() && self.may_grant(server) && is_reserved()
    }

    /// Returns the number of extents of each length that are to be kept in all. A server that is
    /// silent for a moment counts, too.
    fn spares_needed(&self) -> usize {
        let stays = |it: u8| !self.is_leaving(it) && self.session(it).loss(false).is_none();
        let servers = 0..self.servers.len() as u8;
        let staying = servers.filter(|&it| self.first_number(it) == it && stays(it));
        staying.count() * self.code().map_or(0, |code| usize::from(code.parity))
    }

    /// True if an extent of the length is to be kept on the server.
    fn is_spare_lacking(&self, server: u8, bytes: u64) -> bool {
        let enough = self.code().map_or(0, |code| usize::from(code.parity));
        self.spares_on(server, bytes) < enough && self.may_keep_spares(server)
    }

    /// Returns the number of extents of a length that are kept on a server.
    pub(crate) fn spares_on(&self, server: u8, bytes: u64) -> usize {
        let spares = self.spares.lock();
        spares.iter().filter(|it| it.is_for(server, bytes)).count()
    }

    /// Takes an extent that was kept on a server.
    pub(crate) fn take_spare(&self, server: u8, bytes: u64) -> Option<ExtentId> {
        let mut spares = self.spares.lock();
        let at = spares.iter().position(|it| it.is_for(server, bytes))?;
        Some(spares.swap_remove(at).id)
    }

    /// Keeps an extent that was taken for a copy or parity and nothing was written to, or gives it
    /// back if there are enough.
    pub(crate) fn return_spare(&self, server: u8, id: ExtentId, bytes: u64) {
        if !self.keep_spare(SpareExtent { server, id, bytes }) {
            self.drop_copy(server, id);
        }
    }

    /// Gives an extent back in which something may still land. Asks for another one to keep, if
    /// there are too few.
    pub(crate) fn renew_spare(&self, server: u8, id: ExtentId, bytes: u64) {
        self.drop_copy(server, id);
        self.ask_for_spare(server, bytes);
    }

    /// Asks for the extents that are to be kept and are missing: other clients may have taken what
    /// went back, and the openings of sets use extents up.
    pub(crate) fn ask_for_spares(&self) {
        let sets = self.groups.sets().into_iter();
        let groups = sets.filter_map(|(_, set)| self.groups.get(set.columns()[0]));
        let lengths: BTreeSet<u64> = groups.map(|group| group.bytes).collect();
        for bytes in lengths {
            for server in 0..self.servers.len() as u8 {
                while self.ask_for_spare(server, bytes) {}
            }
            self.release_surplus_spares(bytes);
        }
    }

    /// Gives back extents of a length that are too many in all, first where there are most.
    fn release_surplus_spares(&self, bytes: u64) {
        let enough = self.spares_needed();
        loop {
            let mut spares = self.spares.lock();
            let alike = || spares.iter().filter(|it| it.bytes == bytes);
            let on = |server: u8| alike().filter(|it| it.server == server).count();
            let most = (spares.iter().enumerate())
                .filter(|(_, it)| it.bytes == bytes)
                .max_by_key(|(_, it)| on(it.server));
            let Some((at, _)) = most.filter(|_| alike().count() > enough) else {
                return;
            };
            let SpareExtent { server, id, .. } = spares.swap_remove(at);
            drop(spares);
            self.release(usize::from(server), id);
        }
    }

    /// Asks a server for an extent to keep, if there are too few. True if the server granted it.
    fn ask_for_spare(&self, server: u8, bytes: u64) -> bool {
        if !self.is_spare_lacking(server, bytes) {
            return false;
        }
        match self.grant_copy(server, bytes) {
            Ok(extent) if extent.bytes >= bytes => {
                let id = extent.id;
                self.spares.lock().push(SpareExtent { server, id, bytes });
                true
            }
            Ok(extent) => {
                self.drop_copy(server, extent.id);
                false
            }
            // Asked again later: a set may be opened without it.
            Err(_) => false,
        }
    }

    /// Returns the number of extents that are kept on each server.
    #[cfg(test)]
    pub(crate) fn spares_by_server(&self) -> Vec<usize> {
        let spares = self.spares.lock();
        let on = |server| spares.iter().filter(|it| it.server == server).count();
        (0..self.servers.len())
            .map(|server| on(server as u8))
            .collect()
    }

    /// Returns server and id of each extent that is kept.
    #[cfg(test)]
    pub(crate) fn spare_ids(&self) -> Vec<(u8, ExtentId)> {
        let spares = self.spares.lock();
        spares.iter().map(|it| (it.server, it.id)).collect()
    }

    /// Returns the bytes that are kept on servers.
    pub(super) fn spare_bytes(&self, is_on: impl Fn(u8) -> bool) -> u64 {
        let spares = self.spares.lock();
        let found = spares.iter().filter(|it| is_on(it.server));
        found.map(|it| it.bytes).sum()
    }

    /// Gives back extents that were kept.
    pub(super) fn release_spares(&self, which: impl Fn(&SpareExtent) -> bool) {
        let spares: Vec<SpareExtent> = {
            let mut spares = self.spares.lock();
            spares.extract_if(.., |it| which(it)).collect()
        };
        for SpareExtent { server, id, .. } in spares {
            self.release(usize::from(server), id);
        }
    }

    /// Gives back extents that were kept and serve no more: on servers that leave or are lost, and
    /// all once nothing is reserved.
    pub(crate) fn release_useless_spares(&self) {
        let is_reserved = (self.arenas.iter()).any(|arena| arena.lock().reserved_bytes > 0);
        let is_lost = |server: u8| self.session(server).loss(false).is_some();
        self.release_spares(|it| !is_reserved || self.is_leaving(it.server) || is_lost(it.server));
    }

    /// True if each arena covers what regions were promised there, and what is held for snapshots,
    /// without the columns of a set.
    fn is_surplus(&self, set: &ParitySet) -> bool {
        self.arenas.iter().enumerate().all(|(server, arena)| {
            let arena = arena.lock();
            let columns = set.columns().iter();
            let columns = columns.filter(|&&index| arena.has_extent(index));
            let bytes: u64 = (columns.filter_map(|&index| self.groups.get(index)))
                .map(|group| group.bytes)
                .sum();
            let needed_bytes = arena.reserved_bytes + self.snapshots.held_bytes_on(server);
            bytes == 0 || arena.kept_bytes() >= needed_bytes + bytes
        })
    }

    /// Gives back sets in which no slot is in use, unless regions were promised their room. For the
    /// thread that repairs, which alone changes sets.
    pub(crate) fn release_unused_sets(&self) {
        let _one_at_a_time = self.growing.lock();
        for (number, set) in self.groups.sets() {
            if self.live_bytes(&set) > 0 || set.is_opening || !self.is_surplus(&set) {
                continue;
            }
            for &index in set.columns() {
                self.arenas
                    .iter()
                    .for_each(|arena| arena.lock().take(index));
            }
            let groups = self.groups.remove_set(number);
            groups.iter().for_each(|group| self.release_group(group));
        }
    }

    /// Returns the bytes of the slots of a set that are in use.
    pub(crate) fn live_bytes(&self, set: &ParitySet) -> u64 {
        let columns = set.columns().iter();
        let used = columns.filter_map(|&index| self.use_of(index));
        used.map(|it| it.used_bytes).sum()
    }

    /// Returns the bytes of the columns of all sets, and of their parity extents.
    pub(crate) fn sealed_bytes(&self) -> (u64, u64) {
        let bytes_of = |index: &u32| self.groups.get(*index).map_or(0, |group| group.bytes);
        let sets = self.groups.sets().into_iter().map(|(_, set)| {
            let columns: u64 = set.columns().iter().map(bytes_of).sum();
            (columns, set.parity().iter().map(bytes_of).sum::<u64>())
        });
        sets.fold((0, 0), |sum, set| (sum.0 + set.0, sum.1 + set.1))
    }
}
