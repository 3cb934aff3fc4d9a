//! [`AggregateError`]: failures of steps through aggregators, at workers and at aggregators.

use std::{io, time::Duration};

use farpage_fabric::{areas::OfferError, regmem::RegError, server::BindError};

use super::{protocol::Party, state::StateError};
use crate::checkpoint::KeepError;

farpage_fabric::debug_as_display!(AggregateError);

/// Failure of a step through aggregators. The job cannot go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum AggregateError {
    /// Aggregators that cannot be shared out equally among groups.
    #[error(
        "{aggregators} aggregators cannot be shared out among the {groups} groups of a round: choose a multiple of {groups}"
    )]
    Uneven { aggregators: usize, groups: usize },
    /// A party has no memory to lend.
    #[error("{who} cannot take part: {source}")]
    Offer { who: Party, r#source: OfferError },
    /// An aggregator cannot serve.
    #[error("{who} cannot be reached by workers: {source}")]
    Serve { who: Party, r#source: BindError },
    /// An aggregator cannot be reached, or lends nothing.
    #[error("{who} gets no memory of {at}: {reason}; do all run the same job, each rank once?")]
    Refused {
        who: Party,
        at: Party,
        reason: String,
    },
    /// A party has no registered memory for a gradient or for parameters.
    #[error("{who} has no memory to exchange from: {source}")]
    Buffers { who: Party, r#source: RegError },
    /// An aggregator has no memory for parameters and the optimizer's state, or lost it.
    #[error("{who} cannot get at its parameters and the optimizer's state: {source}")]
    State {
        who: Party,
        r#source: Box<StateError>,
    },
    /// A checkpoint could not be kept.
    #[error("{who} cannot keep its checkpoint of step {step}: {source}")]
    Keep {
        who: Party,
        step: u64,
        r#source: KeepError,
    },
    /// A checkpoint could not be read.
    #[error("{who} cannot go on from its checkpoint: {source}")]
    Resume { who: Party, r#source: io::Error },
    /// A party did not do its part in time.
    #[error(
        "{who} waited {deadline:?} in step {step} for {missing}: it is stuck, or too slow for this deadline"
    )]
    Missing {
        who: Party,
        missing: Party,
        step: u64,
        deadline: Duration,
    },
    /// A party has gone.
    #[error("{who} cannot go on in step {step}: {gone} is gone: {reason}")]
    Gone {
        who: Party,
        gone: Party,
        step: u64,
        reason: String,
    },
    /// A party sent or showed something else than it should have.
    #[error(
        "{who} got something from {from} in step {step} that does not belong there: {detail}; do all run the same job?"
    )]
    Strange {
        who: Party,
        from: Party,
        step: u64,
        detail: String,
    },
}

impl AggregateError {
    /// Makes the error of `who`, which `by` has told that it gave up because of `gone`.
    pub(super) fn given_up(who: Party, by: Party, gone: Party, step: u64) -> Self {
        let reason = match gone == by {
            true => "it gave up, and says itself why".to_owned(),
            false => format!("{by} gave up because of it"),
        };
        Self::Gone {
            who,
            gone,
            step,
            reason,
        }
    }

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
