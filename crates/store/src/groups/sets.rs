//! Parity sets in a [`GroupTable`].
//!
//! The rule it keeps: a group is in a set, or has its copies, or both: one step under the table's
//! lock makes it a column, and one makes it a group with copies again. While it is a column,
//! nothing writes to its home.

use farpage_wire::ExtentId;

use super::{
    ContentsMove, ExtentGroup, GroupTable, Groups, NO_PANIC,
    member::{Member, MemberState},
    view::SetView,
};
use crate::{
    options::COPIES_MAX,
    parity::{Column, ParityCode, ParitySet, SET_MAX},
};

impl Groups {
    fn group_mut(&mut self, index: u32) -> &mut ExtentGroup {
        let group = self.by_index[index as usize].as_mut();
        group.expect("groups of a set are kept")
    }

    pub(super) fn set_of(&self, index: u32) -> Option<SetView> {
        let group = self.by_index.get(index as usize)?.as_ref()?;
        let Column { set, at } = group.column?;
        let set = self.sets[set as usize].expect("a column is in a set");
        let mut homes = [None; SET_MAX];
        for (home, &other) in homes.iter_mut().zip(set.groups()) {
            *home = self.by_index[other as usize].and_then(|group| group.members[0]);
        }
        Some(SetView::new((set, at), homes, group.changes))
    }

    /// Counts a change in each group of a set.
    pub(super) fn note_change(&mut self, set: u32) {
        let set = self.sets[set as usize].expect("a column is in a set");
        for &index in set.groups() {
            let group = self.group_mut(index);
            group.changes = group.changes.wrapping_add(1);
        }
    }
}

impl GroupTable {
    /// Returns the set of a group, unless the group is in none.
    pub(crate) fn set_of(&self, index: u32) -> Option<SetView> {
        self.0.read().expect(NO_PANIC).set_of(index)
    }

    /// Returns all sets, each with its number.
    pub(crate) fn sets(&self) -> Vec<(u32, ParitySet)> {
        let groups = self.0.read().expect(NO_PANIC);
        let sets = (0..).zip(&groups.sets);
        sets.filter_map(|(number, set)| Some((number, (*set)?)))
            .collect()
    }

    /// Returns a set by its number.
    pub(crate) fn set(&self, number: u32) -> Option<ParitySet> {
        *self.0.read().expect(NO_PANIC).sets.get(number as usize)?
    }

    /// Makes a set of `columns`, each with the group as it was when its bytes were read and the
    /// position of the member that becomes the home, and of `parity` extents. Returns the members
    /// that are no longer needed, and the sums that other servers show now. `None` if a column is
    /// not what it was, or lacks a copy: nothing is changed then.
    pub(crate) fn code(
        &self,
        code: ParityCode,
        columns: &[(u32, ExtentGroup, u8)],
        parity: &[(u8, ExtentId)],
    ) -> Option<(Vec<Member>, Vec<ContentsMove>)> {
        // Allocated before the lock is taken, which signal handlers wait for.
        let mut rest = Vec::with_capacity(SET_MAX * COPIES_MAX);
        let mut moves = Vec::with_capacity(SET_MAX);
        let mut all: Vec<u32> = Vec::with_capacity(SET_MAX);
        all.extend(columns.iter().map(|(index, ..)| *index));
        let home_of = |(_, group, home): &(u32, ExtentGroup, u8)| group.member(*home);
        let homes = columns.iter().filter_map(home_of).map(|it| it.server);
        let mut servers: Vec<u8> = homes.chain(parity.iter().map(|it| it.0)).collect();
        servers.sort_unstable();
        servers.dedup();
        assert_eq!(
            servers.len(),
            code.extents(),
            "extents of a set are on different servers"
        );
        let mut groups = self.0.write().expect(NO_PANIC);
        let is_same = |(index, before, _): &(u32, ExtentGroup, u8)| {
            let now = groups.by_index.get(*index as usize).copied().flatten();
            now.is_some_and(|now| {
                now.has_extents_of(before) && !now.lacks_copies() && now.column.is_none()
            })
        };
        if groups.closed || !columns.iter().all(is_same) {
            return None;
        }
        let number = (groups.sets.iter().position(Option::is_none)).unwrap_or_else(|| {
            groups.sets.push(None);
            groups.sets.len() - 1
        });
        for (at, (index, _, home)) in (0..).zip(columns) {
            let group = groups.group_mut(*index);
            rest.extend(
                (group.members())
                    .filter(|(at, _)| at != home)
                    .map(|(_, it)| it),
            );
            let home = group.members[usize::from(*home)];
            group.members = Default::default();
            group.members[0] = home;
            group.copies = 1;
            group.column = Some(Column {
                set: number as u32,
                at,
            });
            let home = home.expect("a whole group has all members");
            moves.push(groups.contents[*index as usize].show_at(home.server));
        }
        let bytes = columns[0].1.bytes;
        for (at, &extent) in (code.data..).zip(parity) {
            let mut group = ExtentGroup::new(1, bytes, [extent]);
            group.column = Some(Column {
                set: number as u32,
                at,
            });
            all.push(groups.add(group));
        }
        groups.sets[number] = Some(ParitySet::new(code, all));
        groups.note_change(number as u32);
        Some((rest, moves))
    }

    /// Lets the columns of a set lack copies, so that the set can be dissolved once each has
    /// `copies`. False if there is no such set.
    pub(crate) fn open(&self, number: u32, copies: usize) -> bool {
        let mut groups = self.0.write().expect(NO_PANIC);
        let Some(Some(set)) = groups.sets.get_mut(number as usize) else {
            return false;
        };
        set.is_opening = true;
        let set = *set;
        for &index in set.columns() {
            groups.group_mut(index).copies = copies as u8;
        }
        true
    }

    /// Takes copies away from the columns of a set that was to be dissolved. A copy takes the place
    /// of a lost home. Returns the members that are no longer needed, and the sums that other
    /// servers show now. `None` if homes would share a server, numbers of which are told apart by
    /// `is_same`: nothing is changed then.
    pub(crate) fn keep_closed(
        &self,
        number: u32,
        is_same: impl Fn(u8, u8) -> bool,
    ) -> Option<(Vec<Member>, Vec<ContentsMove>)> {
        // Allocated before the lock is taken, which signal handlers wait for.
        let mut rest = Vec::with_capacity(SET_MAX * COPIES_MAX);
        let mut moves = Vec::with_capacity(SET_MAX);
        let mut groups = self.0.write().expect(NO_PANIC);
        let set = groups.sets.get(number as usize).copied().flatten()?;
        // 1. The copies that become homes.
        let is_good = |member: &Option<Member>| {
            member.is_some_and(|member| member.state == MemberState::Good)
        };
        let mut chosen = [0; SET_MAX];
        for (at, &index) in chosen.iter_mut().zip(set.columns()) {
            let group = groups.group_mut(index);
            if !is_good(&group.members[0]) {
                *at = group.members.iter().position(is_good).unwrap_or(0);
            }
        }
        let home = |(&index, &at): (&u32, &usize)| groups.by_index[index as usize]?.members[at];
        let homes = || set.groups().iter().zip(&chosen).filter_map(home);
        let are_apart = (homes().enumerate())
            .all(|(at, home)| !homes().take(at).any(|it| is_same(it.server, home.server)));
        if !are_apart {
            return None;
        }
        // 2. The rest goes.
        for (&index, at) in set.columns().iter().zip(chosen) {
            let group = groups.group_mut(index);
            group.members.swap(0, at);
            rest.extend(group.members[1..].iter_mut().filter_map(Option::take));
            group.copies = 1;
            if let Some(home) = group.members[0] {
                moves.push(groups.contents[index as usize].show_at(home.server));
            }
        }
        if let Some(set) = &mut groups.sets[number as usize] {
            set.is_opening = false;
        }
        groups.note_change(number);
        Some((rest, moves))
    }

    /// Dissolves a set whose columns have all their copies. Returns the parity extents, which are
    /// no longer needed. `None` if a column lacks a copy.
    pub(crate) fn dissolve(&self, number: u32) -> Option<Vec<ExtentGroup>> {
        // Allocated before the lock is taken, which signal handlers wait for.
        let mut gone = Vec::with_capacity(SET_MAX);
        let mut groups = self.0.write().expect(NO_PANIC);
        let set = groups.sets.get(number as usize).copied().flatten()?;
        let is_whole = |index: &u32| {
            groups.by_index[*index as usize].is_some_and(|group| !group.lacks_copies())
        };
        if !set.is_opening || !set.columns().iter().all(is_whole) {
            return None;
        }
        groups.note_change(number);
        groups.sets[number as usize] = None;
        for &index in set.columns() {
            groups.group_mut(index).column = None;
        }
        gone.extend(set.parity().iter().map(|&index| groups.remove(index)));
        Some(gone)
    }

    /// Takes a set out, with all of its groups.
    pub(crate) fn remove_set(&self, number: u32) -> Vec<ExtentGroup> {
        // Allocated before the lock is taken, which signal handlers wait for.
        let mut gone = Vec::with_capacity(SET_MAX);
        let mut groups = self.0.write().expect(NO_PANIC);
        let set = groups.sets.get_mut(number as usize).and_then(Option::take);
        let all = set.iter().flat_map(ParitySet::groups);
        gone.extend(all.map(|&index| groups.remove(index)));
        gone
    }
}
