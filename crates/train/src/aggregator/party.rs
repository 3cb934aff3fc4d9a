//! [`Party`]: a worker or an aggregator, in errors and in messages.

use std::fmt;

/// A worker or an aggregator, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// A worker.
    Worker(usize),
    /// An aggregator.
    Aggregator(usize),
}

/// Offset of aggregators' numbers, which tells them apart from ranks.
const AGGREGATORS_FROM: u64 = 1 << 32;

impl Party {
    /// Returns the party's number, which is above 0.
    pub(super) fn code(self) -> u64 {
        match self {
            Self::Worker(rank) => 1 + rank as u64,
            Self::Aggregator(number) => 1 + AGGREGATORS_FROM + number as u64,
        }
    }

    /// Returns the party of `code`; 0 stands for none.
    pub(super) fn of_code(code: u64) -> Option<Self> {
        let number = code.checked_sub(1)?;
        Some(match number.checked_sub(AGGREGATORS_FROM) {
            None => Self::Worker(number as usize),
            Some(number) => Self::Aggregator(number as usize),
        })
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(rank) => write!(f, "worker {rank}"),
            Self::Aggregator(number) => write!(f, "aggregator {number}"),
        }
    }
}
