//! [`Job`]: what all workers and aggregators of a training run are told, and how results compare.

use std::sync::Arc;

use twox_hash::XxHash3_128;

use crate::{
    data::{Dataset, Shards},
    mlp::Mlp,
    optimizer::Rule,
    plan::{Mode, Plan},
};

/// A training run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Groups of workers that synchronise, round by round.
    pub plan: Plan,
    /// The model.
    pub model: Mlp,
    /// The optimizer.
    pub rule: Rule,
    /// The examples.
    pub data: Arc<Dataset>,
    /// Assignment of examples to workers.
    pub shards: Shards,
    /// Number of examples of a worker in a step.
    pub batch: usize,
    /// Number of steps of each worker.
    pub steps: u64,
    /// Steps between snapshots of the parameters. One is also taken after the last step.
    pub every: u64,
    /// Seed of initial parameters, shards and batches.
    pub seed: u64,
    /// Rank of a worker that computes as if it were slower, and the factor.
    pub slow: Option<(usize, f64)>,
    /// Number of aggregators that exchanges go through, shared out equally among the groups of a
    /// round; 0 for exchanges in rings.
    pub aggregators: usize,
}

impl Job {
    /// True if workers have an optimizer, which aggregators have otherwise.
    pub(crate) fn has_optimizer(&self) -> bool {
        self.aggregators == 0 || self.plan.mode() != Mode::Bsp
    }

    /// True if aggregators keep what a job needs to go on: the optimizer and the parameters.
    pub fn is_kept_by_aggregators(&self) -> bool {
        !self.has_optimizer()
    }

    /// Counts the rounds of exchanges: those of the steps, and those without training after them.
    pub(crate) fn rounds(&self) -> u64 {
        match self.plan.mode() {
            Mode::Nothing => 0,
            Mode::Bsp => self.steps,
            Mode::Ds | Mode::Fixed => self.steps + u64::from(self.plan.digits()),
        }
    }
}

/// Hashes all parameters of all workers, in the order of their ranks.
pub fn hash<'a>(parameters: impl IntoIterator<Item = &'a [f32]>) -> u128 {
    let mut hash = XxHash3_128::new();
    for worker in parameters {
        for value in worker {
            hash.write(&value.to_bits().to_le_bytes());
        }
    }
    hash.finish_128()
}

/// Returns the mean of several workers' parameters.
///
/// # Panics
/// If there is none, or lengths differ.
pub fn consensus<'a>(parameters: impl IntoIterator<Item = &'a [f32]>) -> Vec<f32> {
    let mut workers = parameters.into_iter();
    let first = workers.next().expect("one worker at least");
    let mut sums: Vec<f64> = first.iter().copied().map(f64::from).collect();
    let mut count = 1.0;
    for worker in workers {
        assert_eq!(worker.len(), sums.len(), "workers of one model");
        for (sum, value) in sums.iter_mut().zip(worker) {
            *sum += f64::from(*value);
        }
        count += 1.0;
    }
    sums.iter().map(|sum| (sum / count) as f32).collect()
}

/// Returns the distance of workers from their mean: the root of the mean squared distance, over the
/// mean's own length.
pub fn distance<'a>(parameters: impl IntoIterator<Item = &'a [f32]>, mean: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let (mut sum, mut count) = (0.0, 0.0);
    for worker in parameters {
        let apart = worker
            .iter()
            .zip(mean)
            .map(|(a, b)| square(f64::from(*a) - f64::from(*b)));
        sum += apart.sum::<f64>();
        count += 1.0;
    }
    let length: f64 = mean.iter().map(|value| square(f64::from(*value))).sum();
    (sum / count / length).sqrt()
}
