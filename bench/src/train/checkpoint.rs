//! [`Checkpoints`]: the checkpoints of a job, as named regions of a memory server.
//!
//! The rule it keeps: a job goes on from the newest step that all of its workers have kept. Each
//! worker's checkpoint is a region of its own, which is published whole or not at all. Nobody
//! keeps a second one before all have kept the first, or removes one before all have the next.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use farpage::{ByteSize, RegionOptions, Runtime};
use farpage_train::{Checkpoint, Course, Job, KeepError, Keeping};
use farpage_wire::Endpoint;

/// Between looks at what others have kept.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
/// Of the local budget, beside the checkpoints.
const ROOM_BYTES: u64 = 16 << 20;

/// Where a job's checkpoints are.
pub(super) struct Checkpoints {
    runtime: Runtime,
    server: Endpoint,
    name: String,
    every: u64,
    workers: usize,
    /// Half of a worker's: the others still wait when one is told that a server is dead.
    deadline: Duration,
}

impl Checkpoints {
    /// Reaches the server. `local` workers of this process keep checkpoints.
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
            deadline,
        })
    }

    /// A killed worker holds the name that it was about to publish until its lease ends. Who does
    /// its work again then takes the next `attempt`.
    fn region(&self, step: u64, rank: usize, attempt: u32) -> String {
        format!("{}/{step}/{rank}/{attempt}", self.name)
    }

    /// Which ranks have kept which steps, and under which names.
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
        (0..self.workers).filter(is_missing).collect()
    }

    /// Makes sure that a job which begins leaves the checkpoints of another one alone.
    pub(super) fn ensure_none(&self, ranks: impl Iterator<Item = usize>) -> Result<()> {
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

    /// The newest step that all workers have kept.
    pub(super) fn newest(&self) -> Result<u64> {
        let kept = self.kept()?;
        let is_whole = |ranks: &BTreeMap<usize, String>| self.missing(Some(ranks)).is_empty();
        if let Some((step, _)) = kept.iter().rev().find(|(_, ranks)| is_whole(ranks)) {
            return Ok(*step);
        }
        let (server, name, workers) = (&self.server, &self.name, self.workers);
        match kept.last_key_value() {
            None => bail!(
                "{server} has no checkpoint `{name}` of this user's key: begin without --resume. A server's memory, and what was \
                 kept there, is gone when it ends"
            ),
            Some((step, ranks)) => bail!(
                "{server} has no checkpoint `{name}` of all {workers} workers: that of step {step} has the workers {:?} alone",
                ranks.keys()
            ),
        }
    }

    /// The checkpoint of a worker. What it kept later, as others did not, is removed.
    pub(super) fn load(&self, job: &Job, rank: usize, step: u64) -> Result<Checkpoint> {
        let kept = self.kept()?;
        let name = kept.get(&step).and_then(|ranks| ranks.get(&rank));
        let name = name.with_context(|| format!("the checkpoint of step {step} is gone"))?;
        let read = || -> Result<Checkpoint> {
            let region = self.until_free(|| match self.runtime.open_region(name) {
                Err(farpage::OpenError::Store(farpage_store::OpenStoreError::InUse { .. })) => None,
                outcome => Some(outcome.map_err(Into::into)),
            })?;
            // A page that cannot be read is an error here, and a signal if it is touched.
            region.prefetch_now(..)?;
            let checkpoint = Checkpoint::from_bytes(&region, job, rank);
            region.discard();
            Ok(checkpoint?)
        };
        let checkpoint =
            read().with_context(|| format!("reading checkpoint `{name}` on {}", self.server))?;
        for later in kept
            .range(step + 1..)
            .filter_map(|(_, ranks)| ranks.get(&rank))
        {
            self.remove(later)?;
        }
        Ok(checkpoint)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let removed = self.runtime.remove(name);
        removed.with_context(|| format!("removing checkpoint `{name}` on {}", self.server))
    }

    /// Tries until it is something else than `None`, which stands for a name that a worker holds
    /// that was killed: the server lets go of it within the lease.
    fn until_free<T>(&self, mut attempt: impl FnMut() -> Option<Result<T>>) -> Result<T> {
        let deadline = self.deadline * 2;
        let until = Instant::now() + deadline;
        loop {
            if let Some(outcome) = attempt() {
                return outcome;
            }
            if Instant::now() >= until {
                return Err(anyhow!(
                    "another program holds it, after {:?}: end that program, or wait for the end of its lease",
                    deadline
                ));
            }
            thread::sleep(BETWEEN_LOOKS);
        }
    }

    /// Keeps the checkpoint of a worker.
    fn keep(&self, rank: usize, step: u64, bytes: &[u8]) -> Result<()> {
        // 1. All have the one before. Else a worker that is far ahead would remove what the others
        //    have, and no step would be left that all of them have.
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
            if Instant::now() >= until {
                bail!(
                    "waited {:?} for the checkpoint of step {before} of the workers {missing:?}",
                    self.deadline
                );
            }
            thread::sleep(BETWEEN_LOOKS);
        }
        // 2. This one.
        let write = |name: &str| -> Result<bool> {
            let options = RegionOptions::new().name(name);
            let mut region = match self.runtime.region_with(bytes.len(), options) {
                Err(farpage::CreateError::Store(farpage_store::CreateError::InUse { .. })) => {
                    return Ok(false);
                }
                created => created?,
            };
            region.overwrite(0, bytes)?;
            region.close().map_err(|error| {
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

    /// A worker's course: from a step, or from the beginning.
    pub(super) fn course(&self, job: &Job, rank: usize, from: Option<u64>) -> Result<Course<'_>> {
        let from = from.map(|step| self.load(job, rank, step)).transpose()?;
        let keep = move |step, bytes: &[u8]| {
            let kept = self.keep(rank, step, bytes);
            kept.map_err(|error| -> KeepError { format!("{error:#}").into() })
        };
        Ok(Course {
            from,
            keeping: Some(Keeping {
                every: self.every,
                keep: Box::new(keep),
            }),
        })
    }
}
