//! [`Job::work`]: the part of one worker in a training run, and its [`Outcome`].
//!
//! The rule it keeps: a job and a rank decide everything that a worker computes. Times serve
//! figures only.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    aggregator::Through,
    checkpoint::{Checkpoint, Course, Keeping},
    data::Batches,
    exchange::Exchange,
    job::Job,
    meeting::{Meeting, WorkError},
    mlp::Scratch,
    optimizer::Optimizer,
    plan::Mode,
};

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

    /// Runs the part of worker `rank`, in rings.
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
