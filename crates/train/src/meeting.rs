//! [`Meeting`]: a worker's exchange with the others, in rings or through aggregators.
//!
//! The rule it keeps: a step calls the same verbs in both cases. `Meeting` decides where the
//! parameters and the gradient lie, and whose optimizer does its step.

use crate::{
    aggregator::{AggregateError, Through},
    checkpoint::KeepError,
    exchange::{Exchange, ExchangeError},
    optimizer::Optimizer,
    plan::{Mode, Plan},
};

farpage_fabric::debug_as_display!(WorkError);

/// Failure of a worker. The job cannot go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum WorkError {
    /// An exchange in a ring failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A step through aggregators failed.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// A checkpoint could not be kept.
    #[error("worker {rank} cannot keep its checkpoint of step {step}: {source}")]
    Keep {
        rank: usize,
        step: u64,
        r#source: KeepError,
    },
}

/// A worker's way to the others, with the vectors that travel it.
pub(crate) struct Meeting<'a> {
    plan: Plan,
    way: Way<'a>,
}

enum Way<'a> {
    Rings {
        exchange: &'a mut Exchange,
        parameters: Vec<f32>,
        gradient: Vec<f32>,
    },
    /// Parameters and gradient lie in the buffers of `through`, unless gradients do not travel.
    Aggregators {
        through: &'a mut Through,
        gradient: Option<Vec<f32>>,
    },
}

/// Amounts that a worker has moved so far.
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    /// Bytes to and from each aggregator.
    pub(crate) by_aggregator: Vec<u64>,
    pub(crate) serial_steps: u64,
}

impl<'a> Meeting<'a> {
    pub(crate) fn in_rings(plan: Plan, exchange: &'a mut Exchange, parameters: Vec<f32>) -> Self {
        let gradient = vec![0.0; parameters.len()];
        let way = Way::Rings {
            exchange,
            parameters,
            gradient,
        };
        Self { plan, way }
    }

    /// Makes a meeting through aggregators, which have the parameters after `from` steps under BSP.
    pub(crate) fn through(
        plan: Plan,
        through: &'a mut Through,
        parameters: &[f32],
        from: u64,
    ) -> Result<Self, WorkError> {
        let is_bsp = plan.mode() == Mode::Bsp;
        if is_bsp && from > 0 {
            through.resume(from)?;
        } else {
            through.buffers()?.0.copy_from_slice(parameters);
        }
        let gradient = (!is_bsp).then(|| vec![0.0; parameters.len()]);
        let way = Way::Aggregators { through, gradient };
        Ok(Self { plan, way })
    }

    /// Returns the parameters and the gradient.
    pub(crate) fn vectors(&mut self) -> Result<(&mut [f32], &mut [f32]), WorkError> {
        Ok(match &mut self.way {
            Way::Rings {
                parameters,
                gradient,
                ..
            } => (parameters, gradient),
            Way::Aggregators { through, gradient } => {
                let (parameters, travelling) = through.buffers()?;
                (parameters, gradient.as_deref_mut().unwrap_or(travelling))
            }
        })
    }

    /// Returns the parameters that only this worker has: none where aggregators have them, too.
    pub(crate) fn own_parameters(&mut self) -> Result<&[f32], WorkError> {
        match &self.way {
            Way::Aggregators { gradient: None, .. } => Ok(&[]),
            _ => Ok(self.vectors()?.0),
        }
    }

    /// Replaces the gradient by the mean of all workers'. Aggregators let the optimizer do its step
    /// at once, and give the parameters.
    pub(crate) fn share_gradient(&mut self, round: u64) -> Result<(), WorkError> {
        match &mut self.way {
            Way::Rings {
                exchange, gradient, ..
            } => {
                let number = self.plan.ring_of(round).expect("one ring of all");
                exchange.mean(number, round, gradient)?;
            }
            Way::Aggregators { through, .. } => through.step_in_place(round)?,
        }
        Ok(())
    }

    /// Lets the worker's own optimizer do a step, if it has one.
    pub(crate) fn step(&mut self, optimizer: &mut Optimizer) -> Result<(), WorkError> {
        if let Way::Aggregators { gradient: None, .. } = self.way {
            return Ok(());
        }
        let (parameters, gradient) = self.vectors()?;
        optimizer.step(parameters, gradient);
        Ok(())
    }

    /// Replaces the parameters by their mean over the group of this round, if there is one.
    pub(crate) fn share_parameters(&mut self, round: u64) -> Result<(), WorkError> {
        let Some(number) = self.plan.ring_of(round) else {
            return Ok(());
        };
        match &mut self.way {
            Way::Rings {
                exchange,
                parameters,
                ..
            } => exchange.mean(number, round, parameters)?,
            Way::Aggregators { through, .. } => through.mean_in_place(round)?,
        }
        Ok(())
    }

    /// Tells the others that this worker goes, for a reason that is not theirs.
    pub(crate) fn give_up(&mut self) {
        match &mut self.way {
            Way::Rings { exchange, .. } => exchange.give_up(),
            Way::Aggregators { through, .. } => through.give_up(),
        }
    }

    pub(crate) fn moved(&self) -> Moved {
        match &self.way {
            Way::Rings { exchange, .. } => Moved {
                bytes: exchange.moved_bytes(),
                by_aggregator: Vec::new(),
                serial_steps: exchange.serial_steps(),
            },
            Way::Aggregators { through, .. } => {
                let by_aggregator = through.moved_bytes();
                Moved {
                    bytes: by_aggregator.iter().sum(),
                    by_aggregator,
                    serial_steps: through.serial_steps(),
                }
            }
        }
    }
}
