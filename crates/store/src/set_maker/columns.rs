//! Choice of the columns of a parity set: groups whose homes are on different servers.
//!
//! The rule it keeps: a choice is found if there is one.

use crate::{
    groups::{ExtentGroup, Member},
    parity::ParityCode,
    pool::SlotPool,
};

/// Chooses groups out of `alike` whose homes are on different servers in `homes`. Returns each with
/// the position of its home.
pub(super) fn choose_columns(
    pool: &SlotPool,
    code: ParityCode,
    alike: &[(u32, ExtentGroup)],
    homes: &[u8],
) -> Option<Vec<(u32, ExtentGroup, u8)>> {
    let is_on = |home: usize, group: usize| {
        let on = |(at, member): (u8, Member)| {
            (pool.first_number(member.server) == homes[home]).then_some(at)
        };
        alike[group].1.members().find_map(on)
    };
    let mut taken: Vec<Option<usize>> = vec![None; alike.len()];
    let mut left = usize::from(code.data);
    for home in 0..homes.len() {
        let mut seen = vec![false; alike.len()];
        left -= usize::from(match_home(home, &is_on, &mut taken, &mut seen));
        if left == 0 {
            let pairs = taken.iter().zip(alike).enumerate();
            let columns = pairs.filter_map(|(group, (home, (index, state)))| {
                Some((*index, *state, is_on((*home)?, group)?))
            });
            return Some(columns.collect());
        }
    }
    None
}

/// Finds a group for a home: one step of the search for a maximal matching (Kuhn).
fn match_home(
    home: usize,
    is_on: &impl Fn(usize, usize) -> Option<u8>,
    taken: &mut [Option<usize>],
    seen: &mut [bool],
) -> bool {
    for group in 0..taken.len() {
        if seen[group] || is_on(home, group).is_none() {
            continue;
        }
        seen[group] = true;
        let is_free = match taken[group] {
            None => true,
            Some(other) => match_home(other, is_on, taken, seen),
        };
        if is_free {
            taken[group] = Some(home);
            return true;
        }
    }
    false
}
