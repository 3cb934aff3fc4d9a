//! [`AggregateError`]: failures of steps through aggregators, at workers and at aggregators.

use std::{io, time::Duration};

use farpage_fabric::{areas::OfferError, regmem::RegError, server::BindError};

use super::{protocol::Party, state::StateError};
use crate::checkpoint::KeepError;

farpage_fabric::debug_as_display!(AggregateError);

/// Failure of a step through aggregators. The job cannot go on.
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
    pub(super) fn culprit(&self, who: Party) -> Party {
        match self {
            Self::Missing { missing: at, .. }
            | Self::Gone { gone: at, .. }
            | Self::Strange { from: at, .. } => *at,
            _ => who,
        }
    }
}
