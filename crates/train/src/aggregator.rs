//! [`Aggregator`] and [`Through`]: means by parameter servers, and an optimizer's step there.
//!
//! The rule it keeps: vectors are summed in the order of ranks, never in that of arrival, so a seed
//! decides every bit, and the number of aggregators none. No party is waited for beyond the
//! deadline, and a missing one is named.
//!
//! Each aggregator of a group has an equal part of the vector. A worker WRITEs its part into an
//! area that it alone holds there (*push*), and announces it by a ring in the same area. When all
//! parts have come, the aggregator shows the result on a board: the mean of parameters, or, for
//! gradients, the parameters that its optimizer has changed. Workers READ the result there by
//! themselves (*pull*). The board has two versions: the next one is written beside the one that is
//! read, and begun only when all members have pushed again. A worker reads the version's number
//! once more after the parameters, so torn parameters are never taken.
//!
//! Where groups change from round to round, an aggregator serves the group of its number in each
//! round. It has areas and a board for each of these groups.
//!
//! Where a READ can wait for a number ([`Channel::waits_for_numbers`]), a worker posts push and
//! pull together, and a step is one exchange of messages. Elsewhere the worker polls the number.
//!
//! [`Channel::waits_for_numbers`]: farpage_fabric::Channel::waits_for_numbers

mod kept;
mod line;
mod link;
mod server;
mod state;
mod summing;
mod through;

use std::{fmt, io, ops::Range, time::Duration};

use farpage_fabric::{
    ExtentId,
    areas::{Board, OfferError},
    patterns::RingPlace,
    regmem::RegError,
    server::BindError,
};

use crate::{checkpoint::KeepError, exchange::chunk, job::Job, plan::Plan};

pub use self::{
    server::{Aggregator, AggregatorCourse},
    state::StateError,
    through::Through,
};

farpage_fabric::debug_as_display!(AggregateError);

/// Offset of the gradient in a worker's area, behind a ring for announcements.
const GRADIENT_AT: usize = 128 + RING_BYTES;
const RING_BYTES: usize = 1024;
/// Offset of the version's number in a board, where READs wait for it. The party at fault and the
/// awaited party follow.
const VERSION_AT: usize = 0;
const CULPRIT_AT: usize = Board::NUMBER_BYTES;
const AWAITED_AT: usize = CULPRIT_AT + Board::NUMBER_BYTES;
const HEAD_BYTES: usize = AWAITED_AT + Board::NUMBER_BYTES;
const PARAMETERS_AT: usize = 4096;
/// Version of a board whose aggregator has given up: no worker waits for it.
const GIVEN_UP: u64 = u64::MAX;
/// Divisor of the deadline: a party that waits for this share tells the others for whom, so that
/// all of them name the one at fault, and not one that waits like them.
const TOLD_AFTER: u32 = 4;
/// Time in which others can hear who is at fault.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for which a waiting thread yields before it sleeps: as long as waking it takes.
const SPIN: Duration = Duration::from_micros(100);
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(10);

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
    fn code(self) -> u64 {
        match self {
            Self::Worker(rank) => 1 + rank as u64,
            Self::Aggregator(number) => 1 + AGGREGATORS_FROM + number as u64,
        }
    }

    /// Returns the party of `code`; 0 stands for none.
    fn of_code(code: u64) -> Option<Self> {
        let number = code.checked_sub(1)?;
        Some(match number.checked_sub(AGGREGATORS_FROM) {
            None => Self::Worker(number as usize),
            Some(number) => Self::Aggregator(number as usize),
        })
    }
}

/// Message of a worker by its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// The worker has placed its vector of this round.
    Placed(u64),
    /// The worker waits for a party.
    Waits(Party),
    /// The worker gives up because of a party, which may be itself.
    GivesUp(Party),
}

impl Word {
    fn to_bytes(self) -> [u8; 16] {
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

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
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

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(rank) => write!(f, "worker {rank}"),
            Self::Aggregator(number) => write!(f, "aggregator {number}"),
        }
    }
}

/// Reason why a step through aggregators failed. The job cannot go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AggregateError {
    /// Aggregators that cannot be shared out equally among groups.
    #[error(
        "{aggregators} aggregators cannot be shared out among the {groups} groups of a round: choose a multiple of {groups}"
    )]
    Uneven {
        /// Number of aggregators.
        aggregators: usize,
        /// Number of groups of a round.
        groups: usize,
    },
    /// A party has no memory to lend.
    #[error("{who} cannot take part: {source}")]
    Offer {
        /// Party without memory.
        who: Party,
        /// The cause.
        r#source: OfferError,
    },
    /// An aggregator cannot serve.
    #[error("{who} cannot be reached by workers: {source}")]
    Serve {
        /// The aggregator.
        who: Party,
        /// The cause.
        r#source: BindError,
    },
    /// An aggregator cannot be reached, or lends nothing.
    #[error("{who} gets no memory of {at}: {reason}; do all run the same job, each rank once?")]
    Refused {
        /// Party that asked.
        who: Party,
        /// Party that was asked.
        at: Party,
        /// The cause.
        reason: String,
    },
    /// A party has no registered memory for a gradient or for parameters.
    #[error("{who} has no memory to exchange from: {source}")]
    Buffers {
        /// Party without memory.
        who: Party,
        /// The cause.
        r#source: RegError,
    },
    /// An aggregator has no memory for parameters and the optimizer's state, or lost it.
    #[error("{who} cannot get at its parameters and the optimizer's state: {source}")]
    State {
        /// The aggregator.
        who: Party,
        /// The cause.
        r#source: Box<StateError>,
    },
    /// A checkpoint could not be kept.
    #[error("{who} cannot keep its checkpoint of step {step}: {source}")]
    Keep {
        /// Owner of the checkpoint.
        who: Party,
        /// Number of steps done.
        step: u64,
        /// The cause.
        r#source: KeepError,
    },
    /// A checkpoint could not be read.
    #[error("{who} cannot go on from its checkpoint: {source}")]
    Resume {
        /// Owner of the checkpoint.
        who: Party,
        /// The cause.
        r#source: io::Error,
    },
    /// A party did not do its part in time.
    #[error(
        "{who} waited {deadline:?} in step {step} for {missing}: it is stuck, or too slow for this deadline"
    )]
    Missing {
        /// Party that waited.
        who: Party,
        /// Party that was waited for.
        missing: Party,
        /// Step of the wait.
        step: u64,
        /// Length of the wait.
        deadline: Duration,
    },
    /// A party has gone.
    #[error("{who} cannot go on in step {step}: {gone} is gone: {reason}")]
    Gone {
        /// Party that noticed.
        who: Party,
        /// Party that is gone.
        gone: Party,
        /// Step at that time.
        step: u64,
        /// The evidence.
        reason: String,
    },
    /// A party sent or showed something else than it should have.
    #[error(
        "{who} got something from {from} in step {step} that does not belong there: {detail}; do all run the same job?"
    )]
    Strange {
        /// Party that received the bytes.
        who: Party,
        /// Party that sent or showed the bytes.
        from: Party,
        /// Step at that time.
        step: u64,
        /// Description of the fault.
        detail: String,
    },
}

impl AggregateError {
    /// Returns the party at fault, as `who` sees it, which had the error.
    fn culprit(&self, who: Party) -> Party {
        match self {
            Self::Missing { missing: at, .. }
            | Self::Gone { gone: at, .. }
            | Self::Strange { from: at, .. } => *at,
            _ => who,
        }
    }
}

/// Shape of a job in which all workers share all parameters, as aggregators and workers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of aggregators.
    pub aggregators: usize,
    /// Number of workers.
    pub workers: usize,
    /// Number of parameters.
    pub parameters: usize,
}

/// Assignment of groups of workers to aggregators, with the shape of the parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seats {
    plan: Plan,
    aggregators: usize,
    parameters: usize,
}

impl From<Layout> for Seats {
    fn from(layout: Layout) -> Self {
        Self {
            plan: Plan::of_all(layout.workers),
            aggregators: layout.aggregators,
            parameters: layout.parameters,
        }
    }
}

impl Seats {
    fn of(job: &Job) -> Result<Self, AggregateError> {
        let (aggregators, groups) = (job.aggregators, job.plan.groups());
        if groups > 0 && (aggregators == 0 || !aggregators.is_multiple_of(groups)) {
            return Err(AggregateError::Uneven {
                aggregators,
                groups,
            });
        }
        Ok(Self {
            plan: job.plan,
            aggregators,
            parameters: job.model.parameters(),
        })
    }

    /// Returns the number of aggregators of a group.
    fn of_group(&self) -> usize {
        self.aggregators / self.plan.groups().max(1)
    }

    /// Returns the parameters that an aggregator has: as many as the others of its group, or one
    /// more.
    fn part(&self, aggregator: usize) -> Range<usize> {
        let count = self.of_group();
        chunk(self.parameters, count, aggregator % count)
    }

    /// Lists the ranks that an aggregator serves when ring `number` is used.
    fn members(&self, number: usize, aggregator: usize) -> Vec<usize> {
        self.plan.members(number, aggregator / self.of_group())
    }

    /// Returns the aggregators that a worker goes through when ring `number` is used.
    fn aggregators(&self, number: usize, rank: usize) -> Range<usize> {
        let (group, count) = (self.plan.group_of(rank, number), self.of_group());
        group * count..(group + 1) * count
    }
}

/// Returns the name of the board for the workers that use ring `number`.
fn board(number: usize) -> String {
    format!("ring-{number}/mean")
}

fn area(number: usize, rank: usize) -> String {
    format!("ring-{number}/worker-{rank}")
}

fn place(extent: ExtentId) -> RingPlace {
    RingPlace {
        extent,
        offset: 0,
        capacity: RING_BYTES,
    }
}

/// Returns the offset of the parameters in a board that has `count` of them. `turn` counts the
/// rounds of the board's group, not those of other groups.
fn parameters_at(turn: u64, count: usize) -> usize {
    PARAMETERS_AT + 4 * count * (turn % 2) as usize
}
