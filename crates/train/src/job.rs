//! [`Job`]: a training run of all workers, and [`Job::work`], the part of one of them.
//!
//! The rule it keeps: a job and a rank decide everything that a worker computes. Times serve
//! figures only.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use twox_hash::XxHash3_128;

use crate::{
    aggregator::{AggregateError, Through},
    checkpoint::{Checkpoint, Course, KeepError, Keeping},
    data::{Batches, Dataset, Shards},
    exchange::{Exchange, ExchangeError},
    meeting::Meeting,
    mlp::{Mlp, Scratch},
    optimizer::{Optimizer, Rule},
    plan::{Mode, Plan},
};

farpage_fabric::debug_as_display!(WorkError);

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

/// A worker's parameters at one point of the run.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Number of steps done.
    pub step: u64,
    /// Seconds since the worker began.
    pub seconds: f64,
    /// The mean loss of the batches since the snapshot before.
    pub loss: f64,
    /// The parameters.
    pub parameters: Vec<f32>,
}

/// Reason why a worker could not go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
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
        /// The worker.
        rank: usize,
        /// Number of steps done.
        step: u64,
        /// The cause.
        r#source: KeepError,
    },
}

/// Result of a worker.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Number of steps done before: up to the checkpoint that the worker went on from.
    pub from: u64,
    /// Snapshots, from before the first step to after the last.
    pub snapshots: Vec<Snapshot>,
    /// The parameters after further rounds without training, as many as spread everything to all.
    pub settled: Vec<f32>,
    /// Seconds of computing, a slow worker's idling included.
    pub compute_s: f64,
    /// Seconds of exchanging, waiting for others included.
    pub exchange_s: f64,
    /// Bytes that the worker's operations moved during the steps.
    pub moved_bytes: u64,
    /// Part of `moved_bytes` to and from each aggregator; empty in rings.
    pub moved_by_aggregator: Vec<u64>,
    /// Number of chunks that the worker had to wait for one after the other, during the steps.
    pub serial_steps: u64,
}

impl Job {
    /// Returns the state of worker `rank` before its first step.
    pub fn beginning(&self, rank: usize) -> Checkpoint {
        let shard = self
            .data
            .shards(self.shards, self.plan.workers(), self.seed);
        let parameters = self.model.initial(self.seed);
        let remembered = match self.has_optimizer() {
            true => parameters.len(),
            false => 0,
        };
        Checkpoint {
            step: 0,
            optimizer: Optimizer::new(self.rule, remembered),
            parameters,
            batches: Batches::new(shard[rank].clone(), self.seed, rank),
        }
    }

    /// True if workers have an optimizer, which aggregators have otherwise.
    fn has_optimizer(&self) -> bool {
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

    /// Runs the part of worker `rank`, in rings.
    ///
    /// # Errors
    /// [`WorkError`]
    pub fn work(
        &self,
        rank: usize,
        exchange: &mut Exchange,
        course: Course<'_>,
    ) -> Result<Outcome, WorkError> {
        let Course { from, keeping } = course;
        let mut at = from.unwrap_or_else(|| self.beginning(rank));
        let parameters = std::mem::take(&mut at.parameters);
        let meeting = Meeting::in_rings(self.plan, exchange, parameters);
        self.train(rank, meeting, at, keeping)
    }

    /// Runs the part of worker `rank`, through aggregators.
    ///
    /// # Errors
    /// [`WorkError`]
    pub fn work_through(
        &self,
        rank: usize,
        through: &mut Through,
        course: Course<'_>,
    ) -> Result<Outcome, WorkError> {
        let Course { from, keeping } = course;
        let mut at = from.unwrap_or_else(|| self.beginning(rank));
        let parameters = std::mem::take(&mut at.parameters);
        let meeting = Meeting::through(self.plan, through, &parameters, at.step)?;
        self.train(rank, meeting, at, keeping)
    }

    fn train(
        &self,
        rank: usize,
        mut meeting: Meeting<'_>,
        mut at: Checkpoint,
        mut keeping: Option<Keeping<'_>>,
    ) -> Result<Outcome, WorkError> {
        let (from, mut scratch) = (at.step, Scratch::default());
        let (mut compute, mut exchanging) = (Duration::ZERO, Duration::ZERO);
        let begun = Instant::now();
        let snapshot = |step, loss, parameters: &[f32]| Snapshot {
            step,
            seconds: begun.elapsed().as_secs_f64(),
            loss,
            parameters: parameters.to_vec(),
        };
        let mut snapshots = vec![snapshot(from, 0.0, meeting.vectors()?.0)];
        let (mut loss, mut since) = (0.0, 0);
        for step in from..self.steps {
            // 1. A gradient.
            let began = Instant::now();
            let examples = self
                .data
                .train
                .pick(self.data.width, at.batches.next(self.batch));
            let (parameters, slopes) = meeting.vectors()?;
            let batch_loss = self
                .model
                .gradient(parameters, &examples, &mut scratch, slopes);
            (loss, since) = (loss + f64::from(batch_loss), since + 1);
            // 2. An exchange with others.
            if self.plan.mode() == Mode::Bsp {
                compute += self.idle(rank, began.elapsed());
                let began = Instant::now();
                meeting.share_gradient(step)?;
                exchanging += began.elapsed();
                let began = Instant::now();
                meeting.step(&mut at.optimizer)?;
                compute += began.elapsed();
            } else {
                meeting.step(&mut at.optimizer)?;
                compute += self.idle(rank, began.elapsed());
                let began = Instant::now();
                meeting.share_parameters(step)?;
                exchanging += began.elapsed();
            }
            // 3. The record, and a checkpoint.
            at.step = step + 1;
            if self.is_kept(at.step) {
                let parameters = meeting.vectors()?.0;
                snapshots.push(snapshot(at.step, loss / f64::from(since), parameters));
                (loss, since) = (0.0, 0);
            }
            if let Some(keeping) = &mut keeping
                && at.step < self.steps
                && at.step.is_multiple_of(keeping.every)
            {
                let mut bytes = at.to_bytes_with(meeting.own_parameters()?, self, rank);
                (keeping.keep)(at.step, &mut bytes).map_err(|source| {
                    meeting.give_up();
                    WorkError::Keep {
                        rank,
                        step: at.step,
                        source,
                    }
                })?;
            }
        }
        let moved = meeting.moved();
        // Further rounds without training.
        for round in self.steps..self.rounds() {
            meeting.share_parameters(round)?;
        }
        Ok(Outcome {
            from,
            snapshots,
            settled: meeting.vectors()?.0.to_vec(),
            compute_s: compute.as_secs_f64(),
            exchange_s: exchanging.as_secs_f64(),
            moved_bytes: moved.bytes,
            moved_by_aggregator: moved.by_aggregator,
            serial_steps: moved.serial_steps,
        })
    }

    /// True if the parameters after `step` steps are for the record.
    fn is_kept(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || step == self.steps
    }

    /// Makes a slow worker's computing last longer, by sleeping. Returns how long it took in all.
    fn idle(&self, rank: usize, worked: Duration) -> Duration {
        match self.slow {
            Some((slow, times)) if slow == rank => {
                thread::sleep(worked.mul_f64((times - 1.0).max(0.0)));
                worked.mul_f64(times.max(1.0))
            }
            _ => worked,
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
