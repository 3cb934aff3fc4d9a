//! Copies of a [`SlotPool`]'s extents: their health, the choice of slots that follows from it, and
//! what a repair needs of the pool.
//!
//! The rule it keeps: slots of a sealed extent are not given out, and the extent's copies change
//! only while it is sealed and no write to it is under way. Copying is left to the
//! [repairs](crate::repair).

use std::sync::{Arc, atomic::Ordering};

use farpage_fabric::{AllocError, Extent, ExtentId, Session};
use farpage_signals::MutexGuard;

use super::SlotPool;
use crate::{
    groups::{ContentsMove, ExtentGroup, Member, MemberState, SetView},
    place::SlotPlace,
    slots::Choice,
};

impl SlotPool {
    /// Returns the group of a place, unless the extent is gone.
    pub(crate) fn group(&self, place: SlotPlace) -> Option<ExtentGroup> {
        self.groups.get(place.extent)
    }

    /// True if two numbers are those of one server, which was named twice. A server that was
    /// started anew at the address of one that is lost is another.
    pub(crate) fn is_same(&self, one: u8, other: u8) -> bool {
        let (a, b) = (self.session(one), self.session(other));
        let is_lost = |session: &Session| session.loss(false).is_some();
        one == other || a.endpoint() == b.endpoint() && !is_lost(a) && !is_lost(b)
    }

    /// True if the server answers and keeps this program's memory.
    pub(crate) fn is_usable(&self, server: u8) -> bool {
        self.health.is_fine(self.port(server)) && self.session(server).loss(false).is_none()
    }

    /// Notes that a server has failed to answer.
    pub(crate) fn failed(&self, server: u8) {
        if self.has_copies() {
            self.health.failed(self.port(server));
        }
    }

    /// Returns the part that a group has in the choice of slots.
    pub(super) fn choice_of(&self, index: u32) -> Choice {
        let Some(group) = self.groups.get(index) else {
            return Choice::Lost;
        };
        if group.column.is_some() {
            return Choice::Column;
        }
        let leaves = (group.members()).any(|(_, member)| self.is_leaving(member.server));
        if !self.has_copies() {
            return if leaves {
                Choice::Second
            } else {
                Choice::First
            };
        }
        let usable = group.good().filter(|(_, it)| self.is_usable(it.server));
        match (usable.count(), group.good_count()) {
            (usable, _) if usable == self.copies && !leaves => Choice::First,
            (1.., _) => Choice::Second,
            (0, 1..) => Choice::Third,
            (0, 0) => Choice::Lost,
        }
    }

    /// Returns the choices of slots, the best first.
    pub(super) fn choices(&self) -> &'static [Choice] {
        self.follow_health();
        match self.has_copies() {
            false => &[Choice::First, Choice::Second],
            true => &[Choice::First, Choice::Second, Choice::Third],
        }
    }

    /// Makes whole groups the first choice, if any server has changed since the last look.
    pub(super) fn follow_health(&self) {
        let version = self.health.version();
        if self.seen.load(Ordering::Acquire) == version {
            return;
        }
        for arena in self.arenas.iter() {
            arena.lock().choose_all(|index| self.choice_of(index));
        }
        // A version that another thread has followed meanwhile is seen, too: it looked later.
        self.seen.fetch_max(version, Ordering::AcqRel);
    }

    /// True if a group of a choice has room for a slot of `bytes`.
    pub(crate) fn has_room(&self, bytes: u32, choice: Choice) -> bool {
        self.follow_health();
        (self.arenas.iter()).any(|arena| arena.lock().has_room(bytes, choice))
    }

    /// Ends writes to `slots` slots from `place` on: they are published now, or never.
    pub(crate) fn end_writes(&self, place: SlotPlace, slots: usize) {
        let mut arena = self.arenas[place.server as usize].lock();
        let repair_waits = arena.end_writes(place.extent, slots);
        drop(arena);
        if repair_waits {
            self.health.wake();
        }
    }

    /// Allows entries that refer to the slots of a write whose WRITEs at the positions in `done`
    /// are complete. The other members miss it, and are marked before this returns. False if none
    /// of `done` is Good any more: the write must go on at others.
    pub(crate) fn settle_copies(&self, place: SlotPlace, done: u8) -> bool {
        match self.groups.settle(place.extent, done) {
            None => false,
            Some(marked) => {
                if marked != 0 {
                    self.health.changed();
                }
                true
            }
        }
    }

    /// True if every Good member has the slots of a write that is complete at the positions in
    /// `done`, and there is such a member.
    pub(crate) fn may_publish(&self, place: SlotPlace, done: u8) -> bool {
        let good = self.group(place).map_or(0, |group| group.good_bits());
        // Where all members have been lost since, nothing refers to wrong bytes either.
        !self.has_copies() || good & !done == 0
    }

    /// Notes that members at the positions in `bits` hold damaged bytes, since `right` has the
    /// right ones. The positions are those of a group with this number of `changes`. For signal
    /// handlers, too.
    pub(crate) fn mark_damaged(&self, place: SlotPlace, (bits, changes): (u8, u32), right: Member) {
        let damaged = self
            .groups
            .mark_damaged(place.extent, (bits, changes), right);
        if let Some(server) = damaged {
            let said = u32::from(server) + 1;
            self.damaged_on.store(said, Ordering::Relaxed);
            self.health.changed();
        }
    }

    /// Returns the server on which copies were found damaged since the last call.
    pub(crate) fn take_damaged(&self) -> Option<u8> {
        let said = self.damaged_on.swap(0, Ordering::Relaxed);
        Some(said.checked_sub(1)? as u8)
    }

    /// Marks the members on a dead server. Returns their number.
    pub(crate) fn mark_dead(&self, server: u8, is_lost: bool) -> usize {
        let marked = (self.groups).mark_dead(server, is_lost, |other| self.is_usable(other));
        if marked > 0 {
            self.health.changed();
        }
        marked
    }

    /// Tells for each server if anything may be written there. Nothing is written to members that
    /// are not Good, and none of them becomes Good again.
    pub(crate) fn written_servers(&self) -> Vec<bool> {
        let mut written = vec![!self.has_copies(); self.servers.len()];
        let groups = self.groups.all().into_iter().flatten();
        for (_, member) in groups.flat_map(|group| group.good().collect::<Vec<_>>()) {
            written[usize::from(member.server)] = true;
        }
        written
    }

    /// True if anything may be written at a server.
    pub(crate) fn is_written(&self, server: u8) -> bool {
        self.written_servers()[usize::from(server)]
    }

    /// Returns the Good members of each group, by index, each with the arena that gives its slots
    /// out. Of a pool without copies, all members.
    pub(crate) fn bound_groups(&self) -> Vec<Option<(u8, ExtentGroup)>> {
        let arena_of = |index: u32| {
            let arena = self
                .arenas
                .iter()
                .position(|it| it.lock().has_extent(index));
            arena.map(|arena| arena as u8)
        };
        let groups = (0..).zip(self.groups.all());
        let groups = groups.map(|(index, group)| Some((arena_of(index)?, group?)));
        groups.collect()
    }

    /// Returns the copies that are complete in the servers' memory: server and extent of each.
    pub(crate) fn good_copies(&self) -> impl Iterator<Item = (u8, ExtentId)> {
        let groups = self.groups.all().into_iter().flatten();
        groups.flat_map(|group| {
            let good = group.good().map(|(_, member)| (member.server, member.id));
            good.collect::<Vec<_>>()
        })
    }

    /// Adds a group whose members were opened, and returns its index. Some copies may be missing.
    pub(crate) fn add_opened(
        &self,
        arena: u8,
        bytes: u64,
        members: impl IntoIterator<Item = (u8, ExtentId)>,
    ) -> Option<u32> {
        let group = ExtentGroup::new(self.copies, bytes, members);
        for (_, member) in group.members() {
            self.count_copy(member.server, bytes);
        }
        self.add_group(arena, group)
    }

    /// Keeps the members of all groups as they are while the result is held: a publication writes
    /// to them, and names them.
    pub(crate) fn fix_members(&self) -> MutexGuard<'_, ()> {
        self.members.lock()
    }

    /// Keeps the members, as [`fix_members`](Self::fix_members) does, unless somebody else does.
    pub(crate) fn try_fix_members(&self) -> Option<MutexGuard<'_, ()>> {
        self.members.try_lock()
    }

    /// True if an extent of the server with a port is a Good member of its group, so that a late
    /// WRITE there may do harm. Servers number their extents alike.
    pub(crate) fn is_read(&self, place: SlotPlace, (port, id): (usize, ExtentId)) -> bool {
        let is_it = |member: Member| member.id == id && self.port(member.server) == port;
        let group = self.groups.get(place.extent);
        group.is_some_and(|group| group.good().any(|(_, member)| is_it(member)))
    }

    /// Takes a group out of the choice of slots. False if it is gone. A parity extent has no slots.
    pub(crate) fn seal(&self, index: u32) -> bool {
        self.sealed.fetch_add(1, Ordering::Relaxed);
        let is_here = self
            .groups
            .set_of(index)
            .is_some_and(|view| view.is_parity())
            || self.arenas.iter().any(|arena| {
                let mut arena = arena.lock();
                arena.choose(index, Choice::Sealed);
                arena.has_extent(index)
            });
        if !is_here {
            self.sealed.fetch_sub(1, Ordering::Relaxed);
        }
        is_here
    }

    /// True while a group is sealed: its room comes back.
    pub(crate) fn has_sealed(&self) -> bool {
        self.sealed.load(Ordering::Relaxed) > 0
    }

    /// Puts a sealed group back into the choice of slots.
    pub(crate) fn unseal(&self, index: u32) {
        for arena in self.arenas.iter() {
            let mut arena = arena.lock();
            // Looked up under the lock: what changes later comes by `follow_health`.
            let choice = self.choice_of(index);
            arena.choose(index, choice);
        }
        self.sealed.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns start and length of each piece in use of a sealed group to which no write is under
    /// way; `None` while one is. All of a column is in use: its parity is that of its holes, too.
    pub(crate) fn pieces_at_rest(&self, index: u32) -> Option<Vec<(u64, u64)>> {
        let group = self.groups.get(index)?;
        if group.column.is_some() {
            return Some(vec![(0, group.bytes)]);
        }
        self.arenas.iter().find_map(|arena| {
            let arena = arena.lock();
            let is_here = arena.has_extent(index) && arena.writes(index) == 0;
            is_here.then(|| arena.used_pieces(index))
        })
    }

    /// True if no write to a group is under way.
    pub(crate) fn is_at_rest(&self, index: u32) -> bool {
        self.arenas
            .iter()
            .all(|arena| arena.lock().writes(index) == 0)
    }

    /// Asks a server for an extent that becomes a copy.
    pub(crate) fn grant_copy(&self, server: u8, bytes: u64) -> Result<Extent, AllocError> {
        let granted = self.session(server).grant(bytes);
        if let Err(AllocError::Control(_)) = &granted {
            self.health.failed(self.port(server));
        }
        granted
    }

    /// Replaces the member at a position of a sealed group, and gives the former one back.
    pub(crate) fn replace(&self, index: u32, at: u8, new: Option<(u8, ExtentId)>) {
        let state = MemberState::Good;
        let new = new.map(|(server, id)| Member { server, id, state });
        let group = self.groups.get(index).expect("a sealed extent is kept");
        self.show_contents(self.groups.replace(index, at, new));
        if let Some(new) = new {
            self.count_copy(new.server, group.bytes);
        }
        if let Some(old) = group.member(at) {
            self.uncount_copy(old.server, group.bytes);
            self.release(old.server as usize, old.id);
        }
    }

    /// Lets the server that has a group's home show the group's contents.
    pub(super) fn show_contents(&self, it: ContentsMove) {
        if it.before != it.now {
            let (plain, stored) = (it.contents.plain_bytes, it.contents.stored_bytes);
            (self.session(it.before)).add_contents(-plain, -stored);
            (self.session(it.now)).add_contents(plain, stored);
        }
    }

    /// Counts a member of `bytes` on a server.
    pub(super) fn count_copy(&self, server: u8, bytes: u64) {
        if self.has_copies() {
            self.copied_bytes[usize::from(server)].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Takes back what [`count_copy`](Self::count_copy) counted.
    pub(super) fn uncount_copy(&self, server: u8, bytes: u64) {
        if self.has_copies() {
            self.copied_bytes[usize::from(server)].fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Gives an extent back that was granted as a copy and did not become one.
    pub(crate) fn drop_copy(&self, server: u8, id: ExtentId) {
        self.release(server as usize, id);
    }

    /// Gives extents back that were owed to servers which answer now.
    pub(crate) fn release_owed(&self) {
        let owed = std::mem::take(&mut *self.owed.lock());
        for (server, id) in owed {
            // One whose server is still silent is noted again.
            self.release(server as usize, id);
        }
    }

    /// Counts bytes that were copied to replace a lost copy.
    pub(crate) fn count_repaired(&self, bytes: u64) {
        self.repaired_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes that were copied to replace lost copies.
    pub(crate) fn repaired_bytes(&self) -> u64 {
        self.repaired_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes of groups that have fewer Good copies than they should.
    pub(crate) fn under_protected_bytes(&self) -> u64 {
        if !self.has_copies() {
            return 0;
        }
        let groups = self.groups.all().into_iter().flatten();
        (groups.filter(ExtentGroup::is_under_protected))
            .map(|group| group.bytes)
            .sum()
    }

    /// Returns the number of the server of a session.
    pub(crate) fn number_of(&self, session: &Arc<Session>) -> Option<u8> {
        let mut servers = self.servers.iter();
        let number = servers.position(|(_, other)| Arc::ptr_eq(other, session));
        number.map(|number| number as u8)
    }

    /// Returns the endpoints of a group's servers, for people.
    pub(crate) fn endpoints_of(&self, index: u32) -> String {
        let place = SlotPlace {
            server: 0,
            extent: index,
            offset: 0,
        };
        self.endpoints(place)
    }

    /// Returns the endpoints of a place's servers, for people.
    pub(crate) fn endpoints(&self, place: SlotPlace) -> String {
        let group = self.groups.get(place.extent);
        let members = (group.iter().flat_map(ExtentGroup::members)).map(|(_, member)| member);
        let set = self.groups.set_of(place.extent);
        let members = members.chain(set.iter().flat_map(SetView::others));
        let names: Vec<_> = members
            .map(|member| self.endpoint(member.server).to_string())
            .collect();
        match names.is_empty() {
            true => self.endpoint(place.server).to_string(),
            false => names.join(" and "),
        }
    }
}
