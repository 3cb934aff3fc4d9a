//! [`GroupTable`]: the groups of extents of a pool, by index, and the state of their members.
//!
//! The rule it keeps: **every member in state Good has the complete bytes of each slot of its group
//! that an entry refers to.** So a member becomes Stale before an entry is published that refers to
//! a slot which the member lacks, and Good again only by a [repair](crate::repair). The last Good
//! member of a group is given up only with its server's session.
//!
//! A page entry names a group by its index. Moving or rebuilding a member is one change here, and
//! nothing in an entry changes.

mod member;
mod sets;
mod view;

use std::sync::{
    RwLock,
    atomic::{AtomicI64, Ordering},
};

use farpage_wire::ExtentId;

pub(crate) use self::{
    member::{Member, MemberState},
    view::SetView,
};
use crate::{
    options::COPIES_MAX,
    parity::{Column, ParitySet},
    place::SlotPlace,
};

pub(crate) const NO_PANIC: &str = "nothing panics under this lock";

/// Extents of equal length on different servers that hold the same bytes. The position of a member
/// names it as long as writes to the group are under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentGroup {
    /// Members by position, the home first. `None`: the copy is missing.
    members: [Option<Member>; COPIES_MAX],
    copies: u8,
    /// Number of replaced members: positions that were noted before may name other extents now.
    pub(crate) changes: u32,
    /// Length of each extent that is used.
    pub(crate) bytes: u64,
    /// Position in a parity set. The home is the extent that the set is computed from.
    pub(crate) column: Option<Column>,
}

impl ExtentGroup {
    /// Makes a group of `copies` copies of `bytes` from the extents that were granted, the home
    /// first.
    pub(crate) fn new(
        copies: usize,
        bytes: u64,
        granted: impl IntoIterator<Item = (u8, ExtentId)>,
    ) -> Self {
        let mut members = [None; COPIES_MAX];
        for (member, (server, id)) in members[..copies].iter_mut().zip(granted) {
            let state = MemberState::Good;
            *member = Some(Member { server, id, state });
        }
        Self {
            members,
            copies: copies as u8,
            changes: 0,
            bytes,
            column: None,
        }
    }

    /// Returns the positions, each with its member unless the copy is missing.
    pub(crate) fn positions(&self) -> impl Iterator<Item = (u8, Option<Member>)> {
        (0..).zip(self.members).take(usize::from(self.copies))
    }

    /// Returns the members that exist.
    pub(crate) fn members(&self) -> impl Iterator<Item = (u8, Member)> {
        self.positions()
            .filter_map(|(at, member)| Some((at, member?)))
    }

    /// Returns the Good members.
    pub(crate) fn good(&self) -> impl Iterator<Item = (u8, Member)> {
        self.members()
            .filter(|(_, member)| member.state == MemberState::Good)
    }

    /// Returns the positions of the Good members, as bits.
    pub(crate) fn good_bits(&self) -> u8 {
        self.good().map(|(at, _)| 1 << at).sum()
    }

    /// Returns the number of Good members.
    pub(crate) fn good_count(&self) -> usize {
        self.good().count()
    }

    /// True if a copy is missing, stale or dead.
    pub(crate) fn lacks_copies(&self) -> bool {
        self.good_count() < usize::from(self.copies)
    }

    /// True if a death that the group should outlive may lose bytes. A column has its parity.
    pub(crate) fn is_under_protected(&self) -> bool {
        let is_good =
            |member: Option<Member>| member.is_some_and(|member| member.state == MemberState::Good);
        match self.column {
            Some(_) => !is_good(self.members[0]),
            None => self.lacks_copies(),
        }
    }

    /// True if both have the same extents at the same positions.
    pub(crate) fn has_extents_of(&self, other: &Self) -> bool {
        let extent = |member: &Option<Member>| member.map(|it| (it.server, it.id));
        let (mine, theirs) = (self.members.iter(), other.members.iter());
        self.bytes == other.bytes && mine.map(extent).eq(theirs.map(extent))
    }

    pub(crate) fn member(&self, at: u8) -> Option<Member> {
        self.members[usize::from(at)]
    }

    /// Changes the state of Good members whose positions are in `bits`.
    fn demote(&mut self, bits: u8, state: MemberState) {
        for (at, member) in self.members.iter_mut().enumerate() {
            if let Some(member) = member
                && bits & (1 << at) != 0
                && member.state == MemberState::Good
            {
                member.state = state;
            }
        }
    }
}

/// Bytes of pages, and of the slots that the pages are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) plain_bytes: i64,
    pub(crate) stored_bytes: i64,
}

/// Contents of a group, and the servers that showed the sum and show it now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContentsMove {
    pub(crate) contents: Contents,
    pub(crate) before: u8,
    pub(crate) now: u8,
}

/// Contents of a group. Relaxed: sums of what threads add, each of which adds the same to the
/// session of `server`.
#[derive(Default)]
struct GroupContents {
    /// Server that shows the sum: that of the first member, as long as there is one.
    server: u8,
    plain_bytes: AtomicI64,
    stored_bytes: AtomicI64,
}

impl GroupContents {
    fn add(&self, contents: Contents) {
        (self.plain_bytes).fetch_add(contents.plain_bytes, Ordering::Relaxed);
        (self.stored_bytes).fetch_add(contents.stored_bytes, Ordering::Relaxed);
    }

    /// Lets a server show the sum.
    fn show_at(&mut self, now: u8) -> ContentsMove {
        let before = std::mem::replace(&mut self.server, now);
        let contents = Contents {
            plain_bytes: self.plain_bytes.load(Ordering::Relaxed),
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
        };
        ContentsMove {
            contents,
            before,
            now,
        }
    }
}

/// Groups by index. The lock is the standard library's, which never allocates: a signal handler may
/// look a group up.
#[derive(Default)]
pub(crate) struct GroupTable(RwLock<Groups>);

#[derive(Default)]
struct Groups {
    by_index: Vec<Option<ExtentGroup>>,
    /// Contents of the groups, by index.
    contents: Vec<GroupContents>,
    vacant: Vec<u32>,
    /// Parity sets by number.
    sets: Vec<Option<ParitySet>>,
    /// True once all extents were given back: no group is added any more.
    closed: bool,
}

impl Groups {
    /// Adds a group and returns its index.
    fn add(&mut self, group: ExtentGroup) -> u32 {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.push_vacant();
            self.by_index.len() as u32 - 1
        });
        assert!(
            index < SlotPlace::EXTENTS_MAX,
            "a pool has at most 16 million extents"
        );
        self.by_index[index as usize] = Some(group);
        self.contents[index as usize] = GroupContents {
            server: group.members[0].map_or(0, |home| home.server),
            ..GroupContents::default()
        };
        index
    }

    /// Takes a group out. The index may be used again.
    fn remove(&mut self, index: u32) -> ExtentGroup {
        self.vacant.push(index);
        (self.by_index[index as usize].take()).expect("an arena's extents are in the table")
    }

    /// Adds an index without a group.
    fn push_vacant(&mut self) {
        self.by_index.push(None);
        self.contents.push(GroupContents::default());
    }
}

impl GroupTable {
    /// Adds a group and returns its index; `None` after [`close`](Self::close).
    pub(crate) fn add(&self, group: ExtentGroup) -> Option<u32> {
        let mut groups = self.0.write().expect(NO_PANIC);
        (!groups.closed).then(|| groups.add(group))
    }

    /// Takes a group out. The index may be used again. `None` after [`close`](Self::close), which
    /// has taken all out.
    pub(crate) fn remove(&self, index: u32) -> Option<ExtentGroup> {
        let mut groups = self.0.write().expect(NO_PANIC);
        (!groups.closed).then(|| groups.remove(index))
    }

    /// Takes all groups out for good.
    pub(crate) fn close(&self) -> Vec<Option<ExtentGroup>> {
        let mut groups = self.0.write().expect(NO_PANIC);
        groups.closed = true;
        groups.sets.clear();
        std::mem::take(&mut groups.by_index)
    }

    /// Adds an index that is not used until [`end_gaps`](Self::end_gaps).
    pub(crate) fn add_gap(&self) {
        self.0.write().expect(NO_PANIC).push_vacant();
    }

    /// Allows use of the gaps.
    pub(crate) fn end_gaps(&self) {
        let mut groups = self.0.write().expect(NO_PANIC);
        let gaps = (groups.by_index.iter().zip(0..)).filter(|(group, _)| group.is_none());
        groups.vacant = gaps.map(|(_, index)| index).collect();
    }

    pub(crate) fn get(&self, index: u32) -> Option<ExtentGroup> {
        let groups = self.0.read().expect(NO_PANIC);
        *groups.by_index.get(index as usize)?
    }

    /// Counts bytes of pages in a group, and of their slots. Returns the server that shows the sum.
    pub(crate) fn count_contents(&self, index: u32, contents: Contents) -> Option<u8> {
        let groups = self.0.read().expect(NO_PANIC);
        groups.by_index.get(index as usize)?.as_ref()?;
        let sum = &groups.contents[index as usize];
        sum.add(contents);
        Some(sum.server)
    }

    /// Returns server and extent of a group's first member, without copying the group.
    pub(crate) fn home(&self, index: u32) -> Option<(u8, ExtentId)> {
        let groups = self.0.read().expect(NO_PANIC);
        let home = groups.by_index.get(index as usize)?.as_ref()?.members[0]?;
        Some((home.server, home.id))
    }

    /// Returns all groups by index.
    pub(crate) fn all(&self) -> Vec<Option<ExtentGroup>> {
        self.0.read().expect(NO_PANIC).by_index.clone()
    }

    /// Makes an entry of a slot of the group publishable whose WRITEs at the positions in `done`
    /// are complete: marks all other Good members Stale, and returns the marked positions. `None`
    /// if none of `done` is Good: an entry would refer to bytes that no member has for certain, and
    /// nothing is marked.
    pub(crate) fn settle(&self, index: u32, done: u8) -> Option<u8> {
        let good = (self.0.read().expect(NO_PANIC).by_index[index as usize])
            .expect("an extent with live slots is kept")
            .good_bits();
        if good & done == 0 {
            return None;
        }
        if good & !done == 0 {
            return Some(0);
        }
        let mut groups = self.0.write().expect(NO_PANIC);
        let group = (groups.by_index[index as usize].as_mut()).expect("looked up just now");
        let good = group.good_bits();
        if good & done == 0 {
            return None;
        }
        group.demote(good & !done, MemberState::Stale);
        Some(good & !done)
    }

    /// Marks Good members in `bits` Stale whose bytes are damaged, unless they are all that is
    /// Good and no parity set makes up for them. `right` is a member that has the right bytes; of a
    /// column, it may be a source of its decoding. `changes` is the group's number when the
    /// positions were noted: nothing is marked if a member was replaced since. Returns the server
    /// of a member that was marked.
    pub(crate) fn mark_damaged(
        &self,
        index: u32,
        (bits, changes): (u8, u32),
        right: Member,
    ) -> Option<u8> {
        let mut groups = self.0.write().expect(NO_PANIC);
        let group = groups.by_index.get_mut(index as usize)?.as_mut()?;
        if group.changes != changes {
            return None;
        }
        let has_right = group.good().any(|(at, member)| {
            (member.server, member.id) == (right.server, right.id) && bits & (1 << at) == 0
        }) || group.column.is_some();
        let damaged = group.good().find(|(at, _)| bits & (1 << at) != 0);
        let (_, damaged) = damaged.filter(|_| has_right)?;
        group.demote(bits, MemberState::Stale);
        Some(damaged.server)
    }

    /// Marks the members on a dead server. A group's last Good member is marked only if the
    /// server's session `is_lost`: until then it may come back. Members on servers that are not
    /// `fine` do not count. Returns the number of members that were marked.
    pub(crate) fn mark_dead(&self, server: u8, is_lost: bool, fine: impl Fn(u8) -> bool) -> usize {
        let mut groups = self.0.write().expect(NO_PANIC);
        let mut marked = 0;
        let is_other = |other: &Member| other.server != server && fine(other.server);
        for index in 0..groups.by_index.len() {
            let is_there = |group: &ExtentGroup| {
                let mut members = group.members().map(|(_, member)| member);
                members.any(|it| it.server == server && it.state != MemberState::Dead)
            };
            if !groups.by_index[index].as_ref().is_some_and(is_there) {
                continue;
            }
            let others = groups.by_index[index].is_some_and(|group| {
                let is_decodable = |view: SetView| view.sources(0, is_other).is_some();
                let has_copy = group.good().any(|(_, other)| is_other(&other));
                has_copy || groups.set_of(index as u32).is_some_and(is_decodable)
            });
            let Some(group) = &mut groups.by_index[index] else {
                continue;
            };
            for member in group.members.iter_mut().flatten() {
                if member.server == server
                    && member.state != MemberState::Dead
                    && (is_lost || others)
                {
                    member.state = MemberState::Dead;
                    marked += 1;
                }
            }
        }
        marked
    }

    /// Replaces the member at a position. Call only while no write to the group is under way.
    pub(crate) fn replace(&self, index: u32, at: u8, member: Option<Member>) -> ContentsMove {
        let mut groups = self.0.write().expect(NO_PANIC);
        let group = groups.by_index[index as usize].as_mut();
        let group = group.expect("a sealed extent is kept");
        group.members[usize::from(at)] = member;
        group.changes = group.changes.wrapping_add(1);
        if let Some(column) = group.column {
            // Decodings under way may have read the former extent.
            groups.note_change(column.set);
        }
        let sum = &mut groups.contents[index as usize];
        let home = member.filter(|_| at == 0);
        sum.show_at(home.map_or(sum.server, |home| home.server))
    }
}
