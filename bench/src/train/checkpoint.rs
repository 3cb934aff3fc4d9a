//! [`Checkpoints`]: the checkpoints of a job, as named regions of a memory server.
//!
//! The rule it keeps: a job goes on from the newest step that all of its parties have kept: its
//! workers, and its aggregators where these have the optimizer. Each party's checkpoint is a region
//! of its own, which is published whole or not at all. No party keeps a second checkpoint before
//! all have kept the first, or removes one before all have the next.
//!
//! Aggregators have the ranks behind those of the workers. An aggregator's checkpoint may be larger
//! than memory, so it is written and read in pieces.

use std::{
    collections::BTreeMap,
    io::{self, BufReader, BufWriter, Read, Write},
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use farpage::{ByteSize, Region, RegionOptions, Runtime};
use farpage_train::{
    AggregatorCourse, Checkpoint, Content, Course, Courses, Job, KeepError, Keeping, Party,
};
use farpage_wire::Endpoint;

/// Pause between looks at what others have kept.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
/// Bytes of the local budget beside those for the checkpoints.
const ROOM_BYTES: u64 = 16 << 20;
/// Bytes that are written or read at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Checkpoints of a job, on a memory server.
pub(super) struct Checkpoints {
    runtime: Runtime,
    server: Endpoint,
    name: String,
    every: u64,
    workers: usize,
    parties: usize,
    /// Half of a worker's deadline: others still wait when one is told that a server is dead.
    deadline: Duration,
}

impl Checkpoints {
    /// Connects to `server`. `local` workers of this process keep checkpoints.
    pub(super) fn open(
        server: &Endpoint,
        name: &str,
        every: u64,
        job: &Job,
        local: usize,
        deadline: Duration,
    ) -> Result<Self> {
        let bytes = job.beginning(0).to_bytes(job, 0).len() as u64;
        let deadline = deadline / 2;
        let runtime = Runtime::builder()
            .server(server.to_string())
            .budget(ByteSize(2 * bytes * local as u64 + ROOM_BYTES))
            .deadline(deadline)
            .build()
            .with_context(|| format!("--checkpoint {server}"))?;
        Ok(Self {
            runtime,
            server: server.clone(),
            name: name.to_owned(),
            every,
            workers: job.plan.workers(),
            parties: Self::parties(job),
            deadline,
        })
    }

    /// Returns the number of parties that keep checkpoints.
    pub(super) fn parties(job: &Job) -> usize {
        let keep = job.is_kept_by_aggregators();
        job.plan.workers() + if keep { job.aggregators } else { 0 }
    }

    fn party(&self, rank: usize) -> Party {
        match rank.checked_sub(self.workers) {
            None => Party::Worker(rank),
            Some(number) => Party::Aggregator(number),
        }
    }

    fn named(&self, ranks: impl IntoIterator<Item = usize>) -> String {
        let named = ranks.into_iter().map(|rank| self.party(rank).to_string());
        named.collect::<Vec<_>>().join(", ")
    }

    /// Names a region. A killed worker holds the name that it was about to publish until its lease
    /// ends; the worker that repeats the step takes the next `attempt`.
    fn region(&self, step: u64, rank: usize, attempt: u32) -> String {
        format!("{}/{step}/{rank}/{attempt}", self.name)
    }

    /// Returns the kept steps, with the ranks that have kept each and the regions' names.
    fn kept(&self) -> Result<BTreeMap<u64, BTreeMap<usize, String>>> {
        let names = self.runtime.names();
        let names = names.with_context(|| format!("listing checkpoints on {}", self.server))?;
        let mut kept: BTreeMap<u64, BTreeMap<usize, String>> = BTreeMap::new();
        for named in names {
            let parsed = || {
                let rest = named.name.strip_prefix(&self.name)?.strip_prefix('/')?;
                let (step, rank) = rest.split_once('/')?;
                let (rank, attempt) = rank.split_once('/')?;
                attempt.parse::<u32>().ok()?;
                Some((step.parse().ok()?, rank.parse().ok()?))
            };
            if let Some((step, rank)) = parsed() {
                kept.entry(step).or_default().insert(rank, named.name);
            }
        }
        Ok(kept)
    }

    fn missing(&self, kept: Option<&BTreeMap<usize, String>>) -> Vec<usize> {
        let is_missing = |rank: &usize| !kept.is_some_and(|kept| kept.contains_key(rank));
        (0..self.parties).filter(is_missing).collect()
    }

    /// Fails if one of `ranks` has a checkpoint: a new job leaves those of another one alone.
    pub(super) fn ensure_none(&self, ranks: Range<usize>) -> Result<()> {
        let kept = self.kept()?;
        for rank in ranks {
            if let Some(name) = kept.values().find_map(|ranks| ranks.get(&rank)) {
                bail!(
                    "{} has a checkpoint `{name}`: go on from it with --resume, choose another \
                     --checkpoint-name, or remove it with `farpage-memserver remove`",
                    self.server
                );
            }
        }
        Ok(())
    }

    /// Returns the newest step that all parties have kept.
    pub(super) fn newest(&self) -> Result<u64> {
        let kept = self.kept()?;
        let is_whole = |ranks: &BTreeMap<usize, String>| self.missing(Some(ranks)).is_empty();
        if let Some((step, _)) = kept.iter().rev().find(|(_, ranks)| is_whole(ranks)) {
            return Ok(*step);
        }
        let (server, name) = (&self.server, &self.name);
        match kept.last_key_value() {
            None => bail!(
                "{server} has no checkpoint `{name}` of this user's key: begin without --resume. A server's memory, and what was \
                 kept there, is gone when it ends"
            ),
            Some((step, ranks)) => {
                let aggregators = match self.parties - self.workers {
                    0 => String::new(),
                    count => format!(" and {count} aggregators"),
                };
                bail!(
                    "{server} has no checkpoint `{name}` of all {} workers{aggregators}: that of step {step} is of {} alone",
                    self.workers,
                    self.named(ranks.keys().copied())
                )
            }
        }
    }

    /// Reads the checkpoint of `rank` at `step` by `read`. Removes later ones of `rank`, which
    /// other parties lack.
    fn load<T>(&self, rank: usize, step: u64, read: impl FnOnce(Stored) -> Result<T>) -> Result<T> {
        let kept = self.kept()?;
        let name = kept.get(&step).and_then(|ranks| ranks.get(&rank));
        let name = name.with_context(|| format!("the checkpoint of step {step} is gone"))?;
        let open = || {
            self.until_free(|| match self.runtime.open_region(name) {
                Err(farpage::OpenError::Store(farpage_store::OpenStoreError::InUse { .. })) => None,
                outcome => Some(outcome.map_err(Into::into)),
            })
        };
        let read = open().and_then(|region| read(Stored::new(region)));
        let read =
            read.with_context(|| format!("reading checkpoint `{name}` on {}", self.server))?;
        let later = kept.range(step + 1..);
        for later in later.filter_map(|(_, ranks)| ranks.get(&rank)) {
            self.remove(later)?;
        }
        Ok(read)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let removed = self.until_free(|| match self.runtime.remove(name) {
            Err(farpage::error::NamesError::InUse { .. }) => None,
            outcome => Some(outcome.map_err(Into::into)),
        });
        removed.with_context(|| format!("removing checkpoint `{name}` on {}", self.server))
    }

    /// Repeats `attempt` until it returns something else than `None`, which stands for a name that
    /// a killed worker holds: the server releases that name within the lease.
    fn until_free<T>(&self, mut attempt: impl FnMut() -> Option<Result<T>>) -> Result<T> {
        let deadline = self.deadline * 2;
        let until = Instant::now() + deadline;
        loop {
            if let Some(outcome) = attempt() {
                return outcome;
            }
            ensure!(
                Instant::now() < until,
                "another program holds it, after {deadline:?}: end that program, or wait for the end of its lease"
            );
            thread::sleep(BETWEEN_LOOKS);
        }
    }

    fn keep(&self, rank: usize, step: u64, content: &mut dyn Content) -> Result<()> {
        // 1. All have the one before. Otherwise a worker that is far ahead would remove what the
        //    others have, and no step would be left that all of them have.
        let until = Instant::now() + self.deadline;
        loop {
            let kept = self.kept()?;
            let of_rank = |(step, ranks): (&u64, &BTreeMap<usize, String>)| {
                Some((*step, ranks.get(&rank)?.clone()))
            };
            let own: Vec<_> = kept.range(..step).filter_map(of_rank).collect();
            let Some(((before, _), older)) = own.split_last() else {
                break;
            };
            let missing = self.missing(kept.get(before));
            if missing.is_empty() {
                for (_, older) in older {
                    self.remove(older)?;
                }
                break;
            }
            let (deadline, named) = (self.deadline, self.named(missing));
            ensure!(
                Instant::now() < until,
                "waited {deadline:?} for the checkpoint of step {before} of {named}"
            );
            thread::sleep(BETWEEN_LOOKS);
        }
        // 2. Writes this one.
        let mut write = |name: &str| -> Result<bool> {
            let options = RegionOptions::new().name(name);
            let bytes = content.bytes() as usize;
            let region = match self.runtime.region_with(bytes, options) {
                Err(farpage::CreateError::Store(farpage_store::CreateError::InUse { .. })) => {
                    return Ok(false);
                }
                created => created?,
            };
            let mut to = BufWriter::with_capacity(PIECE_BYTES, Stored::new(region));
            content.write_to(&mut to)?;
            let stored = to.into_inner().map_err(io::IntoInnerError::into_error)?;
            stored.into_region().close().map_err(|error| {
                let why = anyhow!("{error}");
                error.into_inner().discard();
                why
            })?;
            Ok(true)
        };
        for attempt in 0.. {
            let name = self.region(step, rank, attempt);
            if write(&name).with_context(|| format!("writing `{name}` to {}", self.server))? {
                break;
            }
        }
        Ok(())
    }

    fn keeping(&self, rank: usize) -> Keeping<'_> {
        let keep = move |step, content: &mut dyn Content| {
            let kept = self.keep(rank, step, content);
            kept.map_err(|error| -> KeepError { format!("{error:#}").into() })
        };
        Keeping {
            every: self.every,
            keep: Box::new(keep),
        }
    }

    /// Returns a worker's course: from a step, or from the beginning.
    pub(super) fn course(&self, job: &Job, rank: usize, from: Option<u64>) -> Result<Course<'_>> {
        let read = |mut stored: Stored| {
            let mut bytes = Vec::new();
            stored.read_to_end(&mut bytes)?;
            Ok(Checkpoint::from_bytes(&bytes, job, rank)?)
        };
        let from = from.map(|step| self.load(rank, step, read)).transpose()?;
        Ok(Course {
            from,
            keeping: Some(self.keeping(rank)),
        })
    }

    /// Returns an aggregator's course, which keeps nothing where workers have the optimizer.
    pub(super) fn aggregator_course(
        &self,
        job: &Job,
        number: usize,
        from: Option<u64>,
    ) -> Result<AggregatorCourse<'_>> {
        let mut course = AggregatorCourse {
            from: from.unwrap_or(0),
            ..AggregatorCourse::default()
        };
        if !job.is_kept_by_aggregators() {
            return Ok(course);
        }
        let rank = self.workers + number;
        let read = |stored| -> Result<Box<dyn Read + Send>> {
            Ok(Box::new(BufReader::with_capacity(PIECE_BYTES, stored)))
        };
        course.checkpoint = from.map(|step| self.load(rank, step, read)).transpose()?;
        course.keeping = Some(self.keeping(rank));
        Ok(course)
    }

    /// Returns the courses of all parties, which are in this process.
    pub(super) fn courses(&self, job: &Job, from: Option<u64>) -> Result<Courses<'_>> {
        let workers = (0..self.workers).map(|rank| self.course(job, rank, from));
        let aggregators = 0..job.aggregators;
        let aggregators = aggregators.map(|number| self.aggregator_course(job, number, from));
        Ok(Courses {
            workers: workers.collect::<Result<_>>()?,
            aggregators: aggregators.collect::<Result<_>>()?,
            state: None,
        })
    }
}

/// A region that is written or read from its beginning. Dropping it publishes nothing.
struct Stored {
    /// `None` once [`into_region`](Stored::into_region) has taken the region.
    region: Option<Region>,
    at: usize,
}

impl Stored {
    fn new(region: Region) -> Self {
        let region = Some(region);
        Self { region, at: 0 }
    }

    fn into_region(mut self) -> Region {
        self.region.take().expect("it is there until now")
    }

    /// Pins the next bytes, at most `most`, and passes them to `take`. A page that cannot be
    /// brought in is an error here; touching it would raise a signal.
    fn next(
        &mut self,
        most: usize,
        take: impl FnOnce(&mut Region, Range<usize>) -> io::Result<()>,
    ) -> io::Result<usize> {
        let region = self.region.as_mut().expect("it is there until the end");
        let range = self.at..region.len().min(self.at + most);
        if range.is_empty() {
            return Ok(0);
        }
        region.pin(range.clone()).map_err(io::Error::other)?;
        let taken = take(region, range.clone());
        region.unpin(range.clone());
        taken?;
        self.at = range.end;
        Ok(range.len())
    }
}

impl Read for Stored {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.next(bytes.len(), |region, range| {
            bytes[..range.len()].copy_from_slice(&region[range]);
            Ok(())
        })
    }
}

impl Write for Stored {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.next(bytes.len(), |region, range| {
            let bytes = &bytes[..range.len()];
            region
                .overwrite(range.start, bytes)
                .map_err(io::Error::other)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            region.discard();
        }
    }
}
