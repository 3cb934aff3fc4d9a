//! [`Layout`]: the aggregators of each group of workers, and the part of the vector that each has.

use std::ops::Range;

use super::error::AggregateError;
use crate::{exchange::chunk, job::Job, plan::Plan};

/// Shape of a job, as aggregators and workers know it.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Groups of workers, shared out among the aggregators.
    pub plan: Plan,
    /// Number of aggregators.
    pub aggregators: usize,
    /// Number of parameters.
    pub parameters: usize,
}

impl Layout {
    /// Returns the shape of `job`.
    ///
    /// # Errors
    /// [`AggregateError::Uneven`]
    pub fn of(job: &Job) -> Result<Self, AggregateError> {
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

    pub(super) fn of_group(&self) -> usize {
        self.aggregators / self.plan.groups().max(1)
    }

    /// Returns the parameters that an aggregator has: as many as the others of its group, or one
    /// more.
    pub(super) fn part(&self, aggregator: usize) -> Range<usize> {
        let count = self.of_group();
        chunk(self.parameters, count, aggregator % count)
    }

    /// Lists the ranks that an aggregator serves when ring `number` is used.
    pub(super) fn members(&self, number: usize, aggregator: usize) -> Vec<usize> {
        self.plan.members(number, aggregator / self.of_group())
    }

    /// Returns the aggregators that a worker goes through when ring `number` is used.
    pub(super) fn aggregators(&self, number: usize, rank: usize) -> Range<usize> {
        let (group, count) = (self.plan.group_of(rank, number), self.of_group());
        group * count..(group + 1) * count
    }
}
