//! [`SetView`]: a parity set as one of its groups sees it.
//!
//! The rule it keeps: a view is a copy, and takes no lock. What changes later is noticed by the
//! number of changes.

use super::member::{Member, MemberState};
use crate::parity::{ParitySet, SET_MAX, positions};

/// A parity set and the extents that it is computed from, at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SetView {
    pub(crate) set: ParitySet,
    /// Position of the group that the view is of.
    pub(crate) at: u8,
    homes: [Option<Member>; SET_MAX],
    /// Number of the changes of the set.
    pub(crate) changes: u32,
}

impl SetView {
    /// Makes the view of the group at a position, with the homes of all groups of the set.
    pub(super) fn new(
        (set, at): (ParitySet, u8),
        homes: [Option<Member>; SET_MAX],
        changes: u32,
    ) -> Self {
        Self {
            set,
            at,
            homes,
            changes,
        }
    }

    /// True if no slot is in the group.
    pub(crate) fn is_parity(&self) -> bool {
        self.at >= self.set.code.data
    }

    /// Returns the extent at a position.
    pub(crate) fn home(&self, at: u8) -> Option<Member> {
        self.homes[usize::from(at)]
    }

    /// Returns the positions of as many Good extents as determine the others, as bits, those with
    /// low numbers first. Positions in `but`, that of the view's own group and those that are not
    /// `usable` do not count. `None` if these are too few.
    pub(crate) fn sources(&self, but: u16, usable: impl Fn(&Member) -> bool) -> Option<u16> {
        self.any_sources(but, |home| home.state == MemberState::Good && usable(home))
    }

    /// Chooses as [`sources`](Self::sources) does, also among extents that are not Good: some of
    /// their bytes are damaged, so that a hash must confirm what is decoded.
    pub(crate) fn any_sources(&self, but: u16, usable: impl Fn(&Member) -> bool) -> Option<u16> {
        let but = but | 1 << self.at;
        let is_source = |at: &u8| {
            let home = self.homes[usize::from(*at)];
            but & (1 << at) == 0 && home.is_some_and(|home| usable(&home))
        };
        let all = positions(u16::MAX).filter(is_source);
        let found = all.take(usize::from(self.set.code.data));
        let bits: u16 = found.map(|at| 1 << at).sum();
        (bits.count_ones() == u32::from(self.set.code.data)).then_some(bits)
    }

    /// Returns the number of Good extents of the set beyond those that determine all.
    pub(crate) fn spare(&self) -> usize {
        let homes = self.homes.iter().flatten();
        let good = homes.filter(|home| home.state == MemberState::Good).count();
        good.saturating_sub(usize::from(self.set.code.data))
    }

    /// Returns the extents of all groups, by position.
    pub(crate) fn homes(&self) -> impl Iterator<Item = Member> {
        self.homes.into_iter().flatten()
    }

    /// Returns the extents of the other groups.
    pub(crate) fn others(&self) -> impl Iterator<Item = Member> {
        let homes = self.homes.into_iter().zip(0..);
        homes.filter_map(move |(home, at)| home.filter(|_| at != self.at))
    }
}
