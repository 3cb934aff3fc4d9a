//! [`Plan`]: the groups of workers that synchronise in each round.
//!
//! The rule it keeps: every worker finds the same rings from the number of workers, the size of a
//! group and the round, without a word to the others. Divide and shuffle is DS-Sync
//! ("Divide-and-shuffle synchronization for distributed machine learning", arXiv 2007.03298):
//! workers are numbered in base `group`, and the groups of round r are those that differ in digit r
//! only. So each worker meets, after as many rounds as there are digits, what every other one had.

use std::{fmt, str::FromStr};

farpage_fabric::debug_as_display!(PlanError);

/// Exchange of a job: the vectors, and the groups that share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Bulk synchronous parallel: the mean gradient of all workers in each step.
    Bsp,
    /// Divide and shuffle: a step of each worker's own, then the mean of the parameters in a group
    /// that changes from round to round.
    Ds,
    /// Means as in `Ds`, in groups that stay: without what shuffling is good for.
    Fixed,
    /// Training without an exchange.
    Nothing,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bsp => "bsp",
            Self::Ds => "ds",
            Self::Fixed => "fixed",
            Self::Nothing => "none",
        })
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = [Self::Bsp, Self::Ds, Self::Fixed, Self::Nothing];
        let found = all.into_iter().find(|mode| mode.to_string() == name);
        found.ok_or_else(|| format!("`{name}` is none of bsp, ds, fixed, none"))
    }
}

/// Error of workers that cannot be grouped: their number is no power of the group's.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{workers} workers cannot be in groups of {group}: their number has to be a power of the group's, which is 2 or more"
)]
pub struct PlanError {
    workers: usize,
    group: usize,
}

/// The rings of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    mode: Mode,
    workers: usize,
    group: usize,
    digits: u32,
}

/// A worker's place in one ring: it sends to the next member and receives from the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The ranks of all members, ascending.
    pub members: Vec<usize>,
    /// Index of the worker in `members`.
    pub position: usize,
}

impl Ring {
    /// Returns the rank of the member to send to.
    pub fn next(&self) -> usize {
        self.members[(self.position + 1) % self.members.len()]
    }

    /// Returns the rank of the member to receive from.
    pub fn before(&self) -> usize {
        self.members[(self.position + self.members.len() - 1) % self.members.len()]
    }
}

impl Plan {
    /// Makes a plan for `workers` workers in groups of `group`.
    pub fn new(mode: Mode, workers: usize, group: usize) -> Result<Self, PlanError> {
        let refused = PlanError { workers, group };
        if group < 2 || workers < group {
            return Err(refused);
        }
        let digits = workers.ilog(group);
        if group.checked_pow(digits) != Some(workers) {
            return Err(refused);
        }
        Ok(Self {
            mode,
            workers,
            group,
            digits,
        })
    }

    /// Makes a plan for any number of workers, all in one group.
    pub fn of_all(workers: usize) -> Self {
        Self {
            mode: Mode::Bsp,
            workers,
            group: workers,
            digits: 1,
        }
    }

    /// Returns the exchange of the job.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Returns the number of rounds after which divide and shuffle has spread everything.
    pub fn digits(&self) -> u32 {
        self.digits
    }

    /// Returns the rings of worker `rank`, in the order of their numbers.
    pub fn rings(&self, rank: usize) -> Vec<Ring> {
        let ring = |number| {
            let members = self.members(number, self.group_of(rank, number));
            let position = members.iter().position(|member| *member == rank);
            Ring {
                position: position.expect("a worker is in its own group"),
                members,
            }
        };
        (0..self.ring_count()).map(ring).collect()
    }

    /// Returns the number of rings that each worker is in.
    pub fn ring_count(&self) -> usize {
        match self.mode {
            Mode::Bsp | Mode::Fixed => 1,
            Mode::Ds => self.digits as usize,
            Mode::Nothing => 0,
        }
    }

    /// Returns the number of the ring that `round` uses, if there is an exchange.
    pub fn ring_of(&self, round: u64) -> Option<usize> {
        let count = self.ring_count() as u64;
        (count > 0).then(|| (round % count) as usize)
    }

    /// Returns the number of groups of a round.
    pub fn groups(&self) -> usize {
        match self.mode {
            Mode::Bsp => 1,
            Mode::Ds | Mode::Fixed => self.workers / self.group,
            Mode::Nothing => 0,
        }
    }

    /// Returns the number of the group that worker `rank` is in when ring `number` is used. Its
    /// members differ in this digit only.
    pub fn group_of(&self, rank: usize, number: usize) -> usize {
        match self.mode {
            Mode::Bsp => 0,
            _ => {
                // The rank without the digit.
                let unit = self.group.pow(number as u32);
                rank / (unit * self.group) * unit + rank % unit
            }
        }
    }

    /// Lists the ranks of a group's members when ring `number` is used, ascending.
    pub fn members(&self, number: usize, group: usize) -> Vec<usize> {
        match self.mode {
            Mode::Bsp => (0..self.workers).collect(),
            _ => {
                let unit = self.group.pow(number as u32);
                let first = group / unit * unit * self.group + group % unit;
                (0..self.group).map(|value| first + value * unit).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_differ_in_one_digit_and_all_members_agree() {
        let plan = Plan::new(Mode::Ds, 27, 3).expect("a power");
        assert_eq!(plan.digits(), 3);
        for rank in 0..27 {
            let rings = plan.rings(rank);
            for (digit, ring) in rings.iter().enumerate() {
                assert_eq!(ring.members[ring.position], rank);
                for member in &ring.members {
                    assert_eq!(plan.rings(*member)[digit].members, ring.members);
                }
                assert_eq!(plan.rings(ring.next())[digit].before(), rank);
            }
        }
        assert_eq!(plan.rings(14)[0].members, [12, 13, 14]);
        assert_eq!(plan.rings(14)[1].members, [11, 14, 17]);
        assert_eq!(plan.rings(14)[2].members, [5, 14, 23]);
        for number in 0..3 {
            let groups = (0..plan.groups()).map(|group| (group, plan.members(number, group)));
            let groups: Vec<_> = groups.collect();
            for (group, members) in &groups {
                let of_members = members.iter().map(|rank| plan.group_of(*rank, number));
                assert_eq!(of_members.collect::<Vec<_>>(), [*group; 3]);
            }
            let mut all: Vec<_> = groups
                .into_iter()
                .flat_map(|(_, members)| members)
                .collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..27), "each worker is in one group");
        }
        let used: Vec<_> = (0..5).map(|round| plan.ring_of(round)).collect();
        assert_eq!(used, [0, 1, 2, 0, 1].map(Some));
    }

    #[test]
    fn numbers_that_do_not_divide_are_refused() {
        for (workers, group) in [(12, 4), (4, 1), (2, 4), (0, 0), (8, 4), (15, 2)] {
            let error = Plan::new(Mode::Ds, workers, group).expect_err("no power");
            assert!(error.to_string().contains("power"), "{error}");
        }
    }
}
