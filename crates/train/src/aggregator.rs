//! [`Aggregator`] and [`Through`]: a mean gradient and an optimizer's step by a parameter server.
//!
//! The rule it keeps: gradients are summed in the order of ranks, never in that of arrival, so a
//! seed decides every bit, and the number of aggregators none. Nobody is waited for beyond the
//! deadline, and who is missing is named.
//!
//! Each aggregator keeps an equal part of the parameters. A worker WRITEs its part of the gradient
//! into an area that it alone holds there (*push*), and announces it by a ring in the same area.
//! When all have come, the aggregator changes its parameters and shows them on a board. Workers
//! READ them there by themselves (*pull*). The board has two versions: the next one is written
//! beside the one that is read, and begun only when all workers have pushed again. A worker reads
//! the version's number once more after the parameters, so what is torn is never taken.
//!
//! Where a READ can wait for a number ([`Channel::waits_for_numbers`]), a worker posts push and
//! pull together, and a step is one exchange of messages. Elsewhere it looks for the number.
//!
//! [`Channel::waits_for_numbers`]: farpage_fabric::Channel::waits_for_numbers

mod server;
mod state;
mod summing;
mod through;

use std::{fmt, ops::Range, time::Duration};

use farpage_fabric::{
    ExtentId,
    areas::{Board, OfferError},
    patterns::RingPlace,
    regmem::RegError,
    server::BindError,
};

use crate::exchange::chunk;

pub use self::{server::Aggregator, state::StateError, through::Through};

/// Where a worker's area has the gradient, behind a ring for announcements.
const GRADIENT_AT: usize = 128 + RING_BYTES;
const RING_BYTES: usize = 1024;
/// Where a board has the number of its version, and the rank of who is at fault, plus one. READs
/// wait for the number at the beginning.
const VERSION_AT: usize = 0;
const CULPRIT_AT: usize = Board::NUMBER_BYTES;
const HEAD_BYTES: usize = CULPRIT_AT + Board::NUMBER_BYTES;
const PARAMETERS_AT: usize = 4096;
/// The version of a board whose aggregator has given up: nobody waits for it.
const GIVEN_UP: u64 = u64::MAX;
/// In the place of a worker's rank: the aggregator gave up because of itself.
const ITS_OWN_FAULT: u64 = u64::MAX;
/// How long the others can hear of who is at fault.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long a thread that waits lets others run before it sleeps: what waking it takes.
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

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(rank) => write!(f, "worker {rank}"),
            Self::Aggregator(number) => write!(f, "aggregator {number}"),
        }
    }
}

/// Why a step through aggregators failed. The job cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AggregateError {
    /// There is no memory to lend.
    #[error("{who} cannot take part: {source}")]
    Offer {
        /// Who has none.
        who: Party,
        /// Why not.
        r#source: OfferError,
    },
    /// An aggregator cannot serve.
    #[error("{who} cannot be reached by workers: {source}")]
    Serve {
        /// Which.
        who: Party,
        /// Why not.
        r#source: BindError,
    },
    /// An aggregator cannot be reached, or lends nothing.
    #[error("{who} gets no memory of {at}: {reason}; do all run the same job, each rank once?")]
    Refused {
        /// Who asked.
        who: Party,
        /// Who was asked.
        at: Party,
        /// What came of it.
        reason: String,
    },
    /// There is no registered memory for a gradient or for parameters.
    #[error("{who} has no memory to exchange from: {source}")]
    Buffers {
        /// Who has none.
        who: Party,
        /// Why not.
        r#source: RegError,
    },
    /// An aggregator has no memory for parameters and the optimizer's state, or lost it.
    #[error("{who} cannot get at its parameters and the optimizer's state: {source}")]
    State {
        /// Which.
        who: Party,
        /// Why not.
        r#source: Box<StateError>,
    },
    /// Somebody did not do its part in time.
    #[error(
        "{who} waited {deadline:?} in step {step} for {missing}: it is stuck, or too slow for this deadline"
    )]
    Missing {
        /// Who waited.
        who: Party,
        /// For whom.
        missing: Party,
        /// In which step.
        step: u64,
        /// For how long.
        deadline: Duration,
    },
    /// Somebody has gone.
    #[error("{who} cannot go on in step {step}: {gone} is gone: {reason}")]
    Gone {
        /// Who noticed.
        who: Party,
        /// Who is gone.
        gone: Party,
        /// In which step.
        step: u64,
        /// How it was noticed.
        reason: String,
    },
    /// Somebody sent or showed something else than it should have.
    #[error(
        "{who} got something from {from} in step {step} that does not belong there: {detail}; do all run the same job?"
    )]
    Strange {
        /// Who got it.
        who: Party,
        /// Whose it was.
        from: Party,
        /// In which step.
        step: u64,
        /// What is wrong.
        detail: String,
    },
}

/// What all aggregators of a job and all its workers know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many aggregators there are.
    pub aggregators: usize,
    /// How many workers.
    pub workers: usize,
    /// How many parameters.
    pub parameters: usize,
    /// How many of them, at the end, are running statistics.
    pub statistics: usize,
}

impl Layout {
    /// The parameters that an aggregator keeps: as many as the others, or one more.
    fn part(&self, number: usize) -> Range<usize> {
        chunk(self.parameters, self.aggregators, number)
    }

    /// How many of a part are no running statistics.
    fn learnt(&self, part: &Range<usize>) -> usize {
        (self.parameters - self.statistics).clamp(part.start, part.end) - part.start
    }
}

const BOARD: &str = "parameters";

fn area(rank: usize) -> String {
    format!("worker-{rank}")
}

fn place(extent: ExtentId) -> RingPlace {
    RingPlace {
        extent,
        offset: 0,
        capacity: RING_BYTES,
    }
}

/// Where a board has a version's parameters, of which it has so many.
fn parameters_at(version: u64, count: usize) -> usize {
    PARAMETERS_AT + 4 * count * (version % 2) as usize
}
