//! [`Job`]: what all workers of a training run do, and [`Job::work`], what one of them does.
//!
//! The rule it keeps: a job and a rank decide everything that a worker computes. Times are looked
//! at for figures only.

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
    model::{Model, Scratch},
    optimizer::{Optimizer, Rule},
    plan::{Mode, Plan},
};

farpage_fabric::debug_as_display!(WorkError);

/// A training run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Who synchronises with whom.
    pub plan: Plan,
    /// The model.
    pub model: Model,
    /// The optimizer.
    pub rule: Rule,
    /// The examples.
    pub data: Arc<Dataset>,
    /// Who trains with which of them.
    pub shards: Shards,
    /// Examples of a worker in a step.
    pub batch: usize,
    /// Steps of each worker.
    pub steps: u64,
    /// Parameters are kept for the record after each so many steps, and after the last.
    pub every: u64,
    /// Decides initial parameters, shards and batches.
    pub seed: u64,
    /// A worker that computes as if it were so many times slower.
    pub slow: Option<(usize, f64)>,
    /// So many aggregators that exchanges go through, shared out equally among the groups of a
    /// round; 0: in rings.
    pub aggregators: usize,
}

/// A worker's parameters at one point of the run.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Steps done.
    pub step: u64,
    /// Seconds since the worker began.
    pub seconds: f64,
    /// The mean loss of the batches since the snapshot before.
    pub loss: f64,
    /// The parameters.
    pub parameters: Vec<f32>,
}

/// Why a worker could not go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum WorkError {
    /// In a ring.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Through aggregators.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// A checkpoint could not be kept.
    #[error("worker {rank} cannot keep its checkpoint of step {step}: {source}")]
    Keep {
        /// The worker.
        rank: usize,
        /// The steps done.
        step: u64,
        /// Why not.
        r#source: KeepError,
    },
}

/// What a worker has done.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Steps that were done before, up to the checkpoint that it went on from.
    pub from: u64,
    /// From before the first step to after the last.
    pub snapshots: Vec<Snapshot>,
    /// The parameters after as many further rounds as spread everything to everybody, without any
    /// training in between.
    pub settled: Vec<f32>,
    /// Seconds of computing, a slow worker's idling included.
    pub compute_s: f64,
    /// Seconds of exchanging, waiting for others included.
    pub exchange_s: f64,
    /// Bytes that its operations moved during the steps.
    pub moved_bytes: u64,
    /// How many of them to and from each aggregator, if there are some.
    pub moved_by_aggregator: Vec<u64>,
    /// Chunks that it had to wait for one after the other, during the steps.
    pub serial_steps: u64,
}

impl Job {
    /// The worker of this rank before its first step.
    pub fn beginning(&self, rank: usize) -> Checkpoint {
        let shard = self
            .data
            .shards(self.shards, self.plan.workers(), self.seed);
        let parameters = self.model.initial(self.seed);
        let learnt = match self.has_optimizer() {
            true => parameters.len() - self.model.statistics(),
            false => 0,
        };
        Checkpoint {
            step: 0,
            optimizer: Optimizer::new(self.rule, learnt),
            parameters,
            batches: Batches::new(shard[rank].clone(), self.seed, rank),
        }
    }

    /// Whether workers have an optimizer, which aggregators have otherwise.
    fn has_optimizer(&self) -> bool {
        self.aggregators == 0 || self.plan.mode() != Mode::Bsp
    }

    /// Whether aggregators have something that a job needs to go on: the optimizer, and the
    /// parameters.
    pub fn is_kept_by_aggregators(&self) -> bool {
        !self.has_optimizer()
    }

    /// Rounds of exchanges: those of the steps, and those without training behind them.
    pub(crate) fn rounds(&self) -> u64 {
        match self.plan.mode() {
            Mode::Nothing => 0,
            Mode::Bsp => self.steps,
            Mode::Ds | Mode::Fixed => self.steps + u64::from(self.plan.digits()),
        }
    }

    /// Does the part of the worker of this rank, in rings.
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

    /// The same through aggregators.
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
            // 2. What others have found.
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

    /// Whether the parameters after so many steps are for the record.
    fn is_kept(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || step == self.steps
    }

    /// Makes a slow worker's computing last as long as it should; returns how long it took then.
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

/// Stands for all parameters of all workers, in the order of their ranks.
pub fn hash<'a>(parameters: impl IntoIterator<Item = &'a [f32]>) -> u128 {
    let mut hash = XxHash3_128::new();
    for worker in parameters {
        for value in worker {
            hash.write(&value.to_bits().to_le_bytes());
        }
    }
    hash.finish_128()
}

/// The mean of several workers' parameters.
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

/// How far workers are from their mean: the root of the mean squared distance, over the mean's own
/// length.
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
