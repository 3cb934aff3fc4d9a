//! [`Checkpoint`]: the state that a worker needs to go on after a step, as bytes.
//!
//! The rule it keeps: a job that goes on from a checkpoint ends with the bits of one that was
//! never interrupted. Bytes that are damaged, or that another job has left, are an error. Where
//! the bytes are kept is the caller's choice ([`Keeping`]).

use std::{
    fmt,
    io::{self, Read, Write},
};

use twox_hash::XxHash3_128;

use crate::{
    aggregator::Party,
    data::Batches,
    job::Job,
    optimizer::{Decay, Optimizer},
};

farpage_fabric::debug_as_display!(CheckpointError);

const MAGIC: [u8; 8] = *b"FPTRAIN\0";
const VERSION: u64 = 2;
const HASH_BYTES: usize = 16;

/// All state of a worker that changes from step to step.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub(crate) step: u64,
    pub(crate) parameters: Vec<f32>,
    pub(crate) optimizer: Optimizer,
    pub(crate) batches: Batches,
}

/// Difference between bytes and a checkpoint of a job's worker.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum CheckpointError {
    /// The bytes are something else.
    #[error("these bytes are no checkpoint")]
    Foreign,
    /// Another version of farpage has written the bytes.
    #[error("the checkpoint has version {0}, and this program reads version {VERSION}")]
    Version(u64),
    /// The bytes are not those that were written.
    #[error("the checkpoint is damaged: its hash differs")]
    Damaged,
    /// The bytes belong to another job, or to another worker.
    #[error("the checkpoint is of a job with `{kept}`, and this one has `{own}`")]
    Other { kept: String, own: String },
}

/// Failure to keep a checkpoint, from the function that keeps it.
pub type KeepError = Box<dyn std::error::Error + Send + Sync>;

/// The bytes of a checkpoint, which may be more than fit into memory at once.
pub trait Content {
    /// Returns the number of bytes.
    fn bytes(&self) -> u64;

    /// Writes all bytes, from the first on.
    ///
    /// # Errors
    /// Errors of `to`, or of bytes that are out of reach.
    fn write_to(&mut self, to: &mut dyn Write) -> io::Result<()>;
}

impl Content for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn write_to(&mut self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(self)
    }
}

/// Function that keeps the bytes of the checkpoint after a number of steps.
pub type Keep<'a> = dyn FnMut(u64, &mut dyn Content) -> Result<(), KeepError> + Send + 'a;

/// Keeper of the checkpoints of a worker, or of an aggregator.
pub struct Keeping<'a> {
    /// Steps between checkpoints, at least 1. The last step has none.
    pub every: u64,
    /// Function that keeps a checkpoint.
    pub keep: Box<Keep<'a>>,
}

impl fmt::Debug for Keeping<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeping")
            .field("every", &self.every)
            .finish_non_exhaustive()
    }
}

/// Beginning of a worker, and the checkpoints that it keeps.
#[derive(Debug, Default)]
pub struct Course<'a> {
    /// Checkpoint to go on from; `None` is the beginning.
    pub from: Option<Checkpoint>,
    /// Keeper of checkpoints; `None` keeps none.
    pub keeping: Option<Keeping<'a>>,
}

impl Checkpoint {
    /// Returns the number of steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the checkpoint of worker `rank` as bytes. All checkpoints of a worker have the same
    /// length.
    pub fn to_bytes(&self, job: &Job, rank: usize) -> Vec<u8> {
        self.to_bytes_with(&self.parameters, job, rank)
    }

    /// Returns the checkpoint as bytes, with `parameters` in the place of its own.
    pub(crate) fn to_bytes_with(&self, parameters: &[f32], job: &Job, rank: usize) -> Vec<u8> {
        let Head(mut bytes) = Head::of(job, Party::Worker(rank), self.step);
        put_floats(&mut bytes, parameters);
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

    /// Reads the checkpoint in `bytes`, which worker `rank` of the same job has written.
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
        // The bytes are as they were written: from here on only the writer can be wrong.
        let count = reader.count(1)?;
        let kept = String::from_utf8_lossy(reader.take(count)?);
        compare(&kept, &describe(job, Party::Worker(rank)))?;
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

/// Beginning of a checkpoint: its job, its worker or aggregator, and its step.
pub(crate) struct Head(Vec<u8>);

/// Upper bound of the length of a description.
const WORDS_MAX: u64 = 1 << 20;

impl Head {
    pub(crate) fn of(job: &Job, who: Party, step: u64) -> Self {
        let mut bytes = Vec::from(MAGIC);
        put(&mut bytes, VERSION);
        let words = describe(job, who);
        put(&mut bytes, words.len() as u64);
        bytes.extend(words.as_bytes());
        put(&mut bytes, step);
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    pub(crate) fn write_to(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&self.0)
    }

    /// Reads a head, which has to be this one.
    pub(crate) fn expect_in(&self, from: &mut dyn Read) -> io::Result<()> {
        let mut start = [0; MAGIC.len() + 16];
        from.read_exact(&mut start)?;
        let wrong = |error: CheckpointError| Err(io::Error::other(error));
        if start[..MAGIC.len()] != MAGIC {
            return wrong(CheckpointError::Foreign);
        }
        let mut numbers = Reader(&start[MAGIC.len()..]);
        let number = |number: Result<u64, CheckpointError>| number.map_err(io::Error::other);
        match number(numbers.number())? {
            VERSION => {}
            version => return wrong(CheckpointError::Version(version)),
        }
        let count = number(numbers.number())?;
        if count > WORDS_MAX {
            return wrong(CheckpointError::Damaged);
        }
        let mut words = vec![0; count as usize + 8];
        from.read_exact(&mut words)?;
        let (words, step) = words.split_at(count as usize);
        let own = &self.0[start.len()..];
        let (own_words, own_step) = own.split_at(own.len() - 8);
        let text = String::from_utf8_lossy;
        compare(&text(words), &text(own_words)).map_err(io::Error::other)?;
        match step == own_step {
            true => Ok(()),
            false => wrong(CheckpointError::Damaged),
        }
    }
}

/// Writer or reader of bytes that end with their own hash.
pub(crate) struct Trail<T> {
    inner: T,
    hash: XxHash3_128,
}

impl<T> Trail<T> {
    pub(crate) const BYTES: u64 = HASH_BYTES as u64;

    pub(crate) fn new(inner: T) -> Self {
        let hash = XxHash3_128::new();
        Self { inner, hash }
    }
}

impl Trail<&mut dyn Write> {
    /// Writes the hash.
    pub(crate) fn end(self) -> io::Result<()> {
        let hash = self.hash.finish_128().to_le_bytes();
        self.inner.write_all(&hash)
    }
}

impl Write for Trail<&mut dyn Write> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.write(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Trail<&mut dyn Read> {
    /// Reads the hash, which has to be that of the bytes before.
    pub(crate) fn expect_end(self) -> io::Result<()> {
        let mut hash = [0; HASH_BYTES];
        self.inner.read_exact(&mut hash)?;
        match hash == self.hash.finish_128().to_le_bytes() {
            true => Ok(()),
            false => Err(io::Error::other(CheckpointError::Damaged)),
        }
    }
}

impl Read for Trail<&mut dyn Read> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.hash.write(&bytes[..read]);
        Ok(read)
    }
}

/// Fails with the first difference between two descriptions.
fn compare(kept: &str, own: &str) -> Result<(), CheckpointError> {
    if kept == own {
        return Ok(());
    }
    let other = kept
        .lines()
        .zip(own.lines())
        .find(|(kept, own)| kept != own);
    let (kept, own) = other.unwrap_or((kept, own));
    let (kept, own) = (kept.to_owned(), own.to_owned());
    Err(CheckpointError::Other { kept, own })
}

/// Describes everything that decides what a worker or an aggregator computes, a line each. A run
/// may be longer than the one that left the checkpoint, and links and workers may be slower.
fn describe(job: &Job, who: Party) -> String {
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
        aggregators,
        ..
    } = job;
    let of = match who {
        Party::Worker(_) => plan.workers(),
        Party::Aggregator(_) => *aggregators,
    };
    format!(
        "{who} of {of}\n{plan:?}\naggregators {aggregators}\n{model:?}\n{rule:?}\nseed {seed}\n\
         batches of {batch}\nshards {shards:?}\nexamples {:032x}\n",
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

/// Reader that takes bytes from the front.
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

    /// Reads how many items of `each` bytes follow.
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
            model: Mlp::new(&[data.width, 3, data.classes]),
            rule: Rule::Adam { rate: 0.01 },
            data: Arc::new(data),
            shards: Shards::Even,
            batch: 16,
            steps: 20,
            every: 20,
            seed: 1,
            slow: None,
            aggregators: 0,
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
                8..16 => CheckpointError::Version(VERSION ^ 4 << (8 * (at - 8))),
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
        let plan = |mode, workers, group| Plan::new(mode, workers, group).expect("a plan");
        let (ds_of_8, bsp_of_4) = (plan(Mode::Ds, 8, 2), plan(Mode::Bsp, 4, 2));
        type Change<'a> = &'a dyn Fn(&mut Job);
        let cases: [(usize, Change<'_>, &str); 9] = [
            (2, &|_| {}, "worker 1 of 4"),
            (1, &|job| job.plan = ds_of_8, "worker 1 of 8"),
            (1, &|job| job.plan = bsp_of_4, "Bsp"),
            (1, &|job| job.model = Mlp::new(&[16, 4, 10]), "4, 10"),
            (1, &|job| job.seed = 2, "seed 2"),
            (1, &|job| job.rule = Rule::Adam { rate: 0.02 }, "0.02"),
            (1, &|job| job.batch = 8, "batches of 8"),
            (1, &|job| job.shards = Shards::Skewed, "Skewed"),
            (1, &|job| job.aggregators = 2, "aggregators 0"),
        ];
        for (rank, change, said) in cases {
            let mut other = job.clone();
            change(&mut other);
            let error = Checkpoint::from_bytes(&bytes, &other, rank).expect_err(said);
            assert!(matches!(error, CheckpointError::Other { .. }), "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
