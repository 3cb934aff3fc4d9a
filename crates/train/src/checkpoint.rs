//! [`Checkpoint`]: what a worker needs to go on after a step, as bytes.
//!
//! The rule it keeps: a worker that goes on from a checkpoint ends with the bits of one that was
//! never interrupted. Bytes that are damaged, or that another job has left, are an error. Where
//! the bytes are kept is the caller's choice ([`Keeping`]).

use std::fmt;

use twox_hash::XxHash3_128;

use crate::{
    data::Batches,
    job::Job,
    optimizer::{Decay, Optimizer},
};

const MAGIC: [u8; 8] = *b"FPTRAIN\0";
const VERSION: u64 = 1;
const HASH_BYTES: usize = 16;

/// All that changes in a worker from step to step.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub(crate) step: u64,
    pub(crate) parameters: Vec<f32>,
    pub(crate) optimizer: Optimizer,
    pub(crate) batches: Batches,
}

/// Why bytes are no checkpoint of a job's worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// They are something else.
    #[error("these bytes are no checkpoint")]
    Foreign,
    /// Another version of farpage has written them.
    #[error("the checkpoint has version {0}, and this program reads version {VERSION}")]
    Version(u64),
    /// They are not what was written.
    #[error("the checkpoint is damaged: its hash differs")]
    Damaged,
    /// They belong to another job, or to another worker.
    #[error("the checkpoint is of a job with `{kept}`, and this one has `{own}`")]
    Other {
        /// What the checkpoint says.
        kept: String,
        /// What the job has instead.
        own: String,
    },
}

/// Why a checkpoint could not be kept, as who keeps it says.
pub type KeepError = Box<dyn std::error::Error + Send + Sync>;

/// Keeps the bytes of the checkpoint after so many steps.
pub type Keep<'a> = dyn FnMut(u64, &[u8]) -> Result<(), KeepError> + Send + 'a;

/// How a worker's checkpoints are kept.
pub struct Keeping<'a> {
    /// After each so many steps, but not after the last one. At least 1.
    pub every: u64,
    /// Keeps one.
    pub keep: Box<Keep<'a>>,
}

impl fmt::Debug for Keeping<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeping")
            .field("every", &self.every)
            .finish_non_exhaustive()
    }
}

/// Where a worker begins, and what it keeps on its way.
#[derive(Debug, Default)]
pub struct Course<'a> {
    /// What it goes on from; `None` is the beginning.
    pub from: Option<Checkpoint>,
    /// How it keeps checkpoints; `None` keeps none.
    pub keeping: Option<Keeping<'a>>,
}

impl Checkpoint {
    /// Steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The checkpoint of the worker of this rank, as bytes. All checkpoints of a worker have the
    /// same length.
    pub fn to_bytes(&self, job: &Job, rank: usize) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        put(&mut bytes, VERSION);
        let words = describe(job, rank);
        put(&mut bytes, words.len() as u64);
        bytes.extend(words.as_bytes());
        put(&mut bytes, self.step);
        put_floats(&mut bytes, &self.parameters);
        let (first, second, decay) = self.optimizer.state();
        put_floats(&mut bytes, first);
        put_floats(&mut bytes, second);
        put(&mut bytes, decay.0.to_bits());
        put(&mut bytes, decay.1.to_bits());
        let (order, at, random) = self.batches.state();
        put(&mut bytes, order.len() as u64);
        order
            .iter()
            .for_each(|number| put(&mut bytes, *number as u64));
        put(&mut bytes, at as u64);
        put(&mut bytes, random);
        let hash = XxHash3_128::oneshot(&bytes);
        bytes.extend(hash.to_le_bytes());
        bytes
    }

    /// The checkpoint in `bytes`, which the worker of this rank of the same job has written.
    ///
    /// # Errors
    /// [`CheckpointError`]
    pub fn from_bytes(bytes: &[u8], job: &Job, rank: usize) -> Result<Self, CheckpointError> {
        let mut reader = Reader(bytes);
        if reader.take(MAGIC.len()).ok() != Some(&MAGIC) {
            return Err(CheckpointError::Foreign);
        }
        match reader.number()? {
            VERSION => {}
            version => return Err(CheckpointError::Version(version)),
        }
        let end = bytes.len().checked_sub(HASH_BYTES);
        let (content, hash) = bytes.split_at(end.ok_or(CheckpointError::Damaged)?);
        if XxHash3_128::oneshot(content).to_le_bytes() != hash {
            return Err(CheckpointError::Damaged);
        }
        // What follows was written as it is: only who wrote it can be wrong.
        let count = reader.count(1)?;
        let kept = String::from_utf8_lossy(reader.take(count)?);
        let own = describe(job, rank);
        if kept != own {
            let pairs = kept.lines().zip(own.lines());
            let other = pairs.into_iter().find(|(kept, own)| kept != own);
            let (kept, own) = other.unwrap_or((&*kept, &*own));
            let (kept, own) = (kept.to_owned(), own.to_owned());
            return Err(CheckpointError::Other { kept, own });
        }
        let step = reader.number()?;
        let (parameters, first, second) = (reader.floats()?, reader.floats()?, reader.floats()?);
        let decay = Decay(
            f64::from_bits(reader.number()?),
            f64::from_bits(reader.number()?),
        );
        let count = reader.count(8)?;
        let order = (0..count).map(|_| reader.number().map(|number| number as usize));
        let order = order.collect::<Result<_, _>>()?;
        let (at, random) = (reader.number()? as usize, reader.number()?);
        Ok(Self {
            step,
            parameters,
            optimizer: Optimizer::with_state(job.rule, first, second, decay),
            batches: Batches::with_state(order, at, random),
        })
    }
}

/// Everything that decides what a worker computes, a line each. A run may be longer than the one
/// that left the checkpoint, and links and workers may be slower.
fn describe(job: &Job, rank: usize) -> String {
    let mut examples = XxHash3_128::new();
    for part in [&job.data.train, &job.data.test] {
        for value in &part.features {
            examples.write(&value.to_bits().to_le_bytes());
        }
        examples.write(&part.labels);
    }
    let Job {
        plan,
        model,
        rule,
        data: _,
        shards,
        batch,
        seed,
        ..
    } = job;
    format!(
        "worker {rank} of {}\n{plan:?}\n{model:?}\n{rule:?}\nseed {seed}\nbatches of {batch}\n\
         shards {shards:?}\nexamples {:032x}\n",
        plan.workers(),
        examples.finish_128()
    )
}

fn put(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(number.to_le_bytes());
}

fn put_floats(bytes: &mut Vec<u8>, values: &[f32]) {
    put(bytes, values.len() as u64);
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Takes bytes from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], CheckpointError> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or(CheckpointError::Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, CheckpointError> {
        let bytes = self.take(8)?.try_into();
        Ok(u64::from_le_bytes(
            bytes.map_err(|_| CheckpointError::Damaged)?,
        ))
    }

    /// How many items of `each` bytes follow.
    fn count(&mut self, each: usize) -> Result<usize, CheckpointError> {
        let count = self.number()?;
        match count <= (self.0.len() / each) as u64 {
            true => Ok(count as usize),
            false => Err(CheckpointError::Damaged),
        }
    }

    fn floats(&mut self) -> Result<Vec<f32>, CheckpointError> {
        let count = self.count(4)?;
        let words = self.take(4 * count)?.chunks_exact(4);
        let floats = words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        Ok(floats.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::*;
    use crate::{
        Mlp, Mode, Plan, Rule,
        data::{Dataset, Shards, Source},
    };

    fn job() -> Job {
        let data = Dataset::load(Source::Blobs, Path::new("")).expect("made here");
        Job {
            plan: Plan::new(Mode::Ds, 4, 2).expect("a power of two"),
            model: Mlp::new(&[data.width, 3, data.classes]).into(),
            rule: Rule::Adam { rate: 0.01 },
            data: Arc::new(data),
            shards: Shards::Even,
            batch: 16,
            steps: 20,
            every: 20,
            seed: 1,
            slow: None,
        }
    }

    #[test]
    fn what_is_read_is_what_was_written() {
        let job = job();
        let mut at = job.beginning(2);
        let gradient = vec![0.25; at.parameters.len()];
        at.optimizer.step(&mut at.parameters, &gradient);
        at.batches.next(7);
        at.step = 9;
        let bytes = at.to_bytes(&job, 2);
        let read = Checkpoint::from_bytes(&bytes, &job, 2).expect("its own");
        assert_eq!(format!("{read:?}"), format!("{at:?}"));
        // Steps may be added.
        let longer = Job { steps: 40, ..job };
        assert!(Checkpoint::from_bytes(&bytes, &longer, 2).is_ok());
    }

    #[test]
    fn a_bit_or_an_end_that_is_missing_is_an_error() {
        let job = job();
        let bytes = job.beginning(0).to_bytes(&job, 0);
        for at in (0..bytes.len())
            .step_by(5)
            .chain(bytes.len() - 20..bytes.len())
        {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            let expected = match at {
                0..8 => CheckpointError::Foreign,
                8..16 => CheckpointError::Version(1 ^ 4 << (8 * (at - 8))),
                _ => CheckpointError::Damaged,
            };
            let read = Checkpoint::from_bytes(&damaged, &job, 0);
            assert_eq!(read.expect_err("damaged"), expected, "byte {at}");
            assert!(Checkpoint::from_bytes(&bytes[..at], &job, 0).is_err());
        }
    }

    #[test]
    fn another_jobs_checkpoint_is_refused_with_the_difference() {
        let job = job();
        let bytes = job.beginning(1).to_bytes(&job, 1);
        let wider = Mlp::new(&[job.data.width, 4, job.data.classes]);
        let plan = |mode, workers, group| Plan::new(mode, workers, group).expect("a plan");
        for (rank, other, said) in [
            (2, job.clone(), "worker 1 of 4"),
            (
                1,
                Job {
                    plan: plan(Mode::Ds, 8, 2),
                    ..job.clone()
                },
                "worker 1 of 8",
            ),
            (
                1,
                Job {
                    plan: plan(Mode::Bsp, 4, 2),
                    ..job.clone()
                },
                "Bsp",
            ),
            (
                1,
                Job {
                    model: wider.into(),
                    ..job.clone()
                },
                "4, 10",
            ),
            (
                1,
                Job {
                    seed: 2,
                    ..job.clone()
                },
                "seed 2",
            ),
            (
                1,
                Job {
                    rule: Rule::Adam { rate: 0.02 },
                    ..job.clone()
                },
                "0.02",
            ),
            (
                1,
                Job {
                    batch: 8,
                    ..job.clone()
                },
                "batches of 8",
            ),
            (
                1,
                Job {
                    shards: Shards::Skewed,
                    ..job.clone()
                },
                "Skewed",
            ),
        ] {
            let error = Checkpoint::from_bytes(&bytes, &other, rank).expect_err(said);
            assert!(matches!(error, CheckpointError::Other { .. }), "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
