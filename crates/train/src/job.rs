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
    checkpoint::{Checkpoint, Course, KeepError},
    data::{Batches, Dataset, Shards},
    exchange::{Exchange, ExchangeError},
    model::{Model, Scratch},
    optimizer::{Optimizer, Rule},
    plan::{Mode, Plan},
};

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

/// How a worker meets the others.
enum Meeting<'a> {
    Rings(&'a mut Exchange),
    Aggregators(&'a mut Through),
}

/// Why a worker could not go on.
#[derive(Debug, thiserror::Error)]
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
        Checkpoint {
            step: 0,
            optimizer: Optimizer::new(self.rule, parameters.len() - self.model.statistics()),
            parameters,
            batches: Batches::new(shard[rank].clone(), self.seed, rank),
        }
    }

    /// Does the part of the worker of this rank.
    ///
    /// # Errors
    /// [`WorkError`]
    pub fn work(
        &self,
        rank: usize,
        exchange: &mut Exchange,
        course: Course<'_>,
    ) -> Result<Outcome, WorkError> {
        self.train(rank, Meeting::Rings(exchange), course)
    }

    /// The same through aggregators, which have the optimizer. So there are no checkpoints.
    ///
    /// # Errors
    /// [`WorkError`]
    ///
    /// # Panics
    /// If the mode is not [`Mode::Bsp`].
    pub fn work_through(&self, rank: usize, through: &mut Through) -> Result<Outcome, WorkError> {
        assert_eq!(
            self.plan.mode(),
            Mode::Bsp,
            "aggregators take the mean of all"
        );
        self.train(rank, Meeting::Aggregators(through), Course::default())
    }

    fn train(
        &self,
        rank: usize,
        mut meeting: Meeting<'_>,
        course: Course<'_>,
    ) -> Result<Outcome, WorkError> {
        let Course { from, mut keeping } = course;
        let mut at = from.unwrap_or_else(|| self.beginning(rank));
        let (mut scratch, mut gradient) = (Scratch::default(), Vec::new());
        match &mut meeting {
            Meeting::Rings(_) => gradient = vec![0.0; at.parameters.len()],
            // Both are where they travel from and to.
            Meeting::Aggregators(through) => {
                at.optimizer = Optimizer::new(self.rule, 0);
                through.buffers()?.0.copy_from_slice(&at.parameters);
            }
        }
        let from = at.step;
        let (mut compute, mut exchanging, mut loss) = (Duration::ZERO, Duration::ZERO, 0.0);
        let begun = Instant::now();
        let snapshot = |step, loss, parameters: &[f32]| Snapshot {
            step,
            seconds: begun.elapsed().as_secs_f64(),
            loss,
            parameters: parameters.to_vec(),
        };
        let mut snapshots = vec![snapshot(from, 0.0, &at.parameters)];
        let mut since = 0;
        for step in from..self.steps {
            let began = Instant::now();
            let examples = self
                .data
                .train
                .pick(self.data.width, at.batches.next(self.batch));
            let (parameters, slopes) = match &mut meeting {
                Meeting::Rings(_) => (&mut at.parameters[..], &mut gradient[..]),
                Meeting::Aggregators(through) => through.buffers()?,
            };
            let batch_loss = self
                .model
                .gradient(parameters, &examples, &mut scratch, slopes);
            (loss, since) = (loss + f64::from(batch_loss), since + 1);
            let ring = self.plan.ring_of(step);
            let exchange = match &mut meeting {
                Meeting::Rings(exchange) => exchange,
                Meeting::Aggregators(through) => {
                    compute += self.idle(rank, began.elapsed());
                    let began = Instant::now();
                    through.step_in_place(step)?;
                    exchanging += began.elapsed();
                    if self.is_kept(step + 1) {
                        let parameters = through.buffers()?.0;
                        snapshots.push(snapshot(step + 1, loss / f64::from(since), parameters));
                        (loss, since) = (0.0, 0);
                    }
                    continue;
                }
            };
            if self.plan.mode() == Mode::Bsp {
                let worked = self.idle(rank, began.elapsed());
                let began = Instant::now();
                let number = ring.expect("one ring of all");
                exchange.mean(number, step, &mut gradient)?;
                exchanging += began.elapsed();
                let began = Instant::now();
                at.optimizer.step(&mut at.parameters, &gradient);
                compute += worked + began.elapsed();
            } else {
                at.optimizer.step(&mut at.parameters, &gradient);
                compute += self.idle(rank, began.elapsed());
                if let Some(number) = ring {
                    let began = Instant::now();
                    exchange.mean(number, step, &mut at.parameters)?;
                    exchanging += began.elapsed();
                }
            }
            if self.is_kept(step + 1) {
                snapshots.push(snapshot(step + 1, loss / f64::from(since), &at.parameters));
                (loss, since) = (0.0, 0);
            }
            at.step = step + 1;
            if let Some(keeping) = &mut keeping
                && at.step < self.steps
                && at.step.is_multiple_of(keeping.every)
            {
                let bytes = at.to_bytes(self, rank);
                (keeping.keep)(at.step, &bytes).map_err(|source| {
                    exchange.give_up();
                    WorkError::Keep {
                        rank,
                        step: at.step,
                        source,
                    }
                })?;
            }
        }
        let (moved_by_aggregator, moved_bytes, serial_steps) = match meeting {
            Meeting::Rings(exchange) => {
                let moved = (exchange.moved_bytes(), exchange.serial_steps());
                if self.plan.mode() != Mode::Bsp {
                    self.settle(exchange, &mut at.parameters)?;
                }
                (Vec::new(), moved.0, moved.1)
            }
            Meeting::Aggregators(through) => {
                at.parameters.copy_from_slice(through.buffers()?.0);
                let moved: Vec<_> = through.moved_bytes().collect();
                let sum = moved.iter().sum();
                // A push and a pull, whatever the number of workers.
                (moved, sum, 2 * self.steps)
            }
        };
        Ok(Outcome {
            from,
            snapshots,
            settled: at.parameters,
            compute_s: compute.as_secs_f64(),
            exchange_s: exchanging.as_secs_f64(),
            moved_bytes,
            moved_by_aggregator,
            serial_steps,
        })
    }

    /// Whether the parameters after so many steps are for the record.
    fn is_kept(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || step == self.steps
    }

    /// Further rounds without training.
    fn settle(&self, exchange: &mut Exchange, parameters: &mut [f32]) -> Result<(), ExchangeError> {
        let rounds = self.steps..self.steps + u64::from(self.plan.digits());
        for round in rounds {
            if let Some(number) = self.plan.ring_of(round) {
                exchange.mean(number, round, parameters)?;
            }
        }
        Ok(())
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
