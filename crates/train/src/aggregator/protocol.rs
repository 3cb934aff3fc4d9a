//! [`Party`], bytes of areas and boards, messages of workers, and times that both sides keep.
//!
//! The rule it keeps: workers and aggregators of one job are of one version.

use std::{fmt, time::Duration};

use farpage_fabric::{ExtentId, areas::Board, patterns::RingPlace};

/// Offset of the gradient in a worker's area, behind a ring for announcements.
pub(super) const GRADIENT_AT: usize = 128 + RING_BYTES;
const RING_BYTES: usize = 1024;
/// Offset of the version's number in a board, where READs wait for it. The party at fault and the
/// awaited party follow.
pub(super) const VERSION_AT: usize = 0;
pub(super) const CULPRIT_AT: usize = Board::NUMBER_BYTES;
pub(super) const AWAITED_AT: usize = CULPRIT_AT + Board::NUMBER_BYTES;
pub(super) const HEAD_BYTES: usize = AWAITED_AT + Board::NUMBER_BYTES;
pub(super) const PARAMETERS_AT: usize = 4096;
/// Version of a board whose aggregator has given up: no worker waits for it.
pub(super) const GIVEN_UP: u64 = u64::MAX;
/// Divisor of the deadline: a party that waits for this share tells the others for whom, so that
/// all of them name the one at fault, and not one that waits like them.
pub(super) const TOLD_AFTER: u32 = 4;
/// Time in which others can hear who is at fault.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);
/// Time for which a waiting thread yields before it sleeps: as long as waking it takes.
pub(super) const SPIN: Duration = Duration::from_micros(100);
pub(super) const NAP_MIN: Duration = Duration::from_micros(20);
pub(super) const NAP_MAX: Duration = Duration::from_millis(10);

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

/// Message of a worker by its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The worker has placed its vector of this round.
    Placed(u64),
    /// The worker waits for a party.
    Waits(Party),
    /// The worker gives up because of a party, which may be itself.
    GivesUp(Party),
}

impl Word {
    pub(super) fn to_bytes(self) -> [u8; 16] {
        let (kind, number) = match self {
            Self::Placed(round) => (0u64, round),
            Self::Waits(party) => (1, party.code()),
            Self::GivesUp(party) => (2, party.code()),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    pub(super) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, number) = bytes.split_at_checked(8)?;
        let number = u64::from_le_bytes(number.try_into().ok()?);
        match u64::from_le_bytes(kind.try_into().ok()?) {
            0 => Some(Self::Placed(number)),
            1 => Party::of_code(number).map(Self::Waits),
            2 => Party::of_code(number).map(Self::GivesUp),
            _ => None,
        }
    }
}

/// Returns the name of the board for the workers that use ring `number`.
pub(super) fn board(number: usize) -> String {
    format!("ring-{number}/mean")
}

pub(super) fn area(number: usize, rank: usize) -> String {
    format!("ring-{number}/worker-{rank}")
}

pub(super) fn place(extent: ExtentId) -> RingPlace {
    RingPlace {
        extent,
        offset: 0,
        capacity: RING_BYTES,
    }
}

/// Returns the offset of the parameters in a board that has `count` of them. `turn` counts the
/// rounds of the board's group, not those of other groups.
pub(super) fn parameters_at(turn: u64, count: usize) -> usize {
    PARAMETERS_AT + 4 * count * (turn % 2) as usize
}
