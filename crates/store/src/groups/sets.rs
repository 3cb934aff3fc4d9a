//! Parity sets in a [`GroupTable`].
//!
//! The rule it keeps: a group is in a set, or has its copies, or both: one step under the table's
//! lock makes it a column, and one makes it a group with copies again. While it is a column,
//! nothing writes to its home.

use farpage_wire::ExtentId;

use super::{
    ContentsMove, ExtentGroup, GroupTable, Groups, NO_PANIC, member::Member, view::SetView,
};
use crate::parity::{Column, ParityCode, ParitySet, SET_MAX};

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
        let (mut rest, mut moves) = (Vec::new(), Vec::new());
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
        let mut all: Vec<u32> = columns.iter().map(|(index, ..)| *index).collect();
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

    /// Takes copies away from the columns of a set that was to be dissolved. Returns them.
    pub(crate) fn keep_closed(&self, number: u32) -> Vec<Member> {
        let mut groups = self.0.write().expect(NO_PANIC);
        let Some(Some(set)) = groups.sets.get_mut(number as usize) else {
            return Vec::new();
        };
        set.is_opening = false;
        let set = *set;
        let mut rest = Vec::new();
        for &index in set.columns() {
            let group = groups.group_mut(index);
            rest.extend(group.members[1..].iter_mut().filter_map(Option::take));
            group.copies = 1;
        }
        groups.note_change(number);
        rest
    }

    /// Dissolves a set whose columns have all their copies. Returns the parity extents, which are
    /// no longer needed. `None` if a column lacks a copy.
    pub(crate) fn dissolve(&self, number: u32) -> Option<Vec<ExtentGroup>> {
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
        Some(
            set.parity()
                .iter()
                .map(|&index| groups.remove(index))
                .collect(),
        )
    }

    /// Takes a set out, with all of its groups.
    pub(crate) fn remove_set(&self, number: u32) -> Vec<ExtentGroup> {
        let mut groups = self.0.write().expect(NO_PANIC);
        let set = groups.sets.get_mut(number as usize).and_then(Option::take);
        let all = set.iter().flat_map(ParitySet::groups);
        all.map(|&index| groups.remove(index)).collect()
    }
}
