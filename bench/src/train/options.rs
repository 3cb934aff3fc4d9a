//! The options of `train`, and the job that they describe.
//!
//! The rule it keeps: threads and processes make the same job of the same options.

use std::{ops::Range, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use farpage::{ByteSize, Runtime};
use farpage_bench_kit::options::{Run, not_negative, positive, some_bytes};
use farpage_train::{
    Job, Mlp, Mode, Plan, Rule,
    data::{Dataset, Shards, Source},
};
use farpage_wire::Endpoint;
use serde::Serialize;

use super::checkpoint::Checkpoints;

/// Approximate number of points of a curve.
const POINTS: u64 = 20;

/// Fabric between the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TrainFabric {
    /// A simulation
    Sim,
    /// Shared memory
    Shm,
    /// TCP over the loopback
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Dealt {
    /// Each worker sees all classes
    Even,
    /// Each worker sees few classes
    Skewed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Optimizing {
    /// Gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
}

#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct TrainOptions {
    /// Workers: a power of --group
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(super) workers: usize,
    /// Workers of a group
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(super) group: usize,
    /// Synchronisation: bsp (the mean gradient of all), ds (the mean parameters of a group that
    /// changes), fixed (of a group that stays), none
    #[arg(
        long,
        value_name = "MODES",
        value_delimiter = ',',
        default_value = "bsp,ds,fixed,none"
    )]
    #[serde(serialize_with = "names")]
    pub(super) mode: Vec<Mode>,
    /// Parameter servers to exchange through, instead of rings: each sums, and for bsp does the
    /// optimizer's step. For ds and fixed a multiple of the number of groups
    #[arg(long, value_name = "S", group = "through", conflicts_with = "addresses", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) aggregators: Option<u64>,
    /// Keeps the parameters and the optimizer's state of bsp's aggregators on this memory server,
    /// of which --state-budget is local at a time
    #[arg(long, value_name = "URL", requires_all = ["through", "state_budget"])]
    #[serde(skip)]
    pub(super) state: Option<Endpoint>,
    /// Local memory for what --state keeps; all aggregators of a process share it
    #[arg(long, value_name = "SIZE", requires = "state", value_parser = some_bytes)]
    pub(super) state_budget: Option<ByteSize>,
    /// Data to learn: digits, mnist (both after `cargo xtask data`) or blobs (made here)
    #[arg(long, default_value = "digits")]
    #[serde(serialize_with = "name")]
    pub(super) data: Source,
    /// Directory of the files of --data
    #[arg(long, value_name = "DIR", default_value = "target/training-data")]
    pub(super) data_dir: PathBuf,
    /// Units of each hidden layer
    #[arg(
        long,
        value_name = "UNITS",
        value_delimiter = ',',
        default_value = "128,128"
    )]
    pub(super) hidden: Vec<usize>,
    /// Examples of a worker in a step
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(super) batch: usize,
    /// Steps of each worker
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(super) steps: u64,
    /// The optimizer, whose state stays at its worker, or at bsp's aggregators
    #[arg(long, value_enum, default_value_t = Optimizing::Sgd)]
    pub(super) optimizer: Optimizing,
    /// Learning rate of all modes
    #[arg(long, value_name = "RATE", default_value_t = 0.05)]
    pub(super) rate: f32,
    /// Share of the last change that sgd applies again
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    pub(super) momentum: f32,
    /// Distribution of the examples among the workers
    #[arg(long, value_enum, default_value_t = Dealt::Even)]
    pub(super) shards: Dealt,
    /// Seed of the first run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
    /// Runs of each mode, each with a seed of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=20))]
    pub(super) seeds: u64,
    /// Fabric between the workers
    #[arg(long, value_enum, default_value_t = TrainFabric::Shm)]
    pub(super) fabric: TrainFabric,
    /// Link of each worker, and of each aggregator, in gigabits per second
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    pub(super) link_gbps: Option<f64>,
    /// Microseconds to add to every operation on the fabric
    #[arg(long, value_name = "US", value_parser = not_negative)]
    pub(super) link_us: Option<f64>,
    /// A slow worker, and the factor by which it is slower, as RANK:TIMES
    #[arg(long, value_name = "RANK:TIMES", value_parser = slow)]
    pub(super) slow_worker: Option<(usize, f64)>,
    /// Endpoints of the workers, by rank, at which the others reach them, such as
    /// tcp://10.0.0.2:7500: this process is one of the workers then
    #[arg(long, value_name = "URLS", value_delimiter = ',', group = "apart", conflicts_with_all = ["workers", "fabric", "seeds"])]
    #[serde(skip)]
    pub(super) addresses: Vec<Endpoint>,
    /// Endpoints of the aggregators, by number, at which the workers reach them, such as
    /// tcp://10.0.0.2:7500: this process is one of the aggregators then, or one of --workers
    #[arg(long, value_name = "URLS", value_delimiter = ',', groups = ["apart", "through"], conflicts_with_all = ["fabric", "seeds"])]
    #[serde(skip)]
    pub(super) aggregators_at: Vec<Endpoint>,
    /// Rank of this process in --addresses or --workers; the aggregators have the ranks behind the
    /// workers' [default: as torchrun, mpirun or srun say]
    #[arg(long, value_name = "RANK", requires = "apart")]
    #[serde(skip)]
    pub(super) rank: Option<usize>,
    /// Keeps checkpoints on this memory server
    #[arg(long, value_name = "URL")]
    #[serde(skip)]
    pub(super) checkpoint: Option<Endpoint>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "STEPS", default_value_t = 50, requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    #[serde(skip)]
    pub(super) checkpoint_every: u64,
    /// Name of the checkpoints on the server; each job needs a name of its own
    #[arg(
        long,
        value_name = "NAME",
        default_value = "train",
        requires = "checkpoint"
    )]
    #[serde(skip)]
    pub(super) checkpoint_name: String,
    /// Goes on from the newest checkpoint that all workers, and the aggregators of bsp, have kept
    #[arg(long, requires = "checkpoint")]
    #[serde(skip)]
    pub(super) resume: bool,
    /// Seconds that a worker or an aggregator waits for another at most
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive)]
    pub(super) deadline: f64,
    /// File to draw to: how each mode learns, and what it moves
    #[arg(long, value_name = "FILE", conflicts_with = "apart")]
    #[serde(skip)]
    pub(super) svg: Option<PathBuf>,
    #[command(flatten)]
    #[serde(flatten, serialize_with = "smoke")]
    pub(super) run: Run,
}

fn smoke<S: serde::Serializer>(run: &Run, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map([("smoke", run.smoke)])
}

fn names<S: serde::Serializer>(modes: &[Mode], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(modes.iter().map(ToString::to_string))
}

fn name<S: serde::Serializer>(source: &Source, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(source)
}

fn slow(text: &str) -> Result<(usize, f64), String> {
    let wrong = || format!("`{text}` is no rank and factor, such as 3:2.5");
    let (rank, times) = text.split_once(':').ok_or_else(wrong)?;
    let (rank, times) = (rank.parse().map_err(|_| wrong())?, positive(times)?);
    match times >= 1.0 {
        true => Ok((rank, times)),
        false => Err(wrong()),
    }
}

/// Data and model that all runs of the options share.
pub(super) struct Jobs<'a> {
    options: &'a TrainOptions,
    data: Arc<Dataset>,
    pub(super) model: Mlp,
}

impl<'a> Jobs<'a> {
    pub(super) fn new(options: &'a TrainOptions) -> Result<Self> {
        let data = Arc::new(Dataset::load(options.data, &options.data_dir)?);
        let mut widths = vec![data.width];
        widths.extend(&options.hidden);
        widths.push(data.classes);
        let is_empty = widths.contains(&0);
        ensure!(!is_empty, "--hidden 0: a layer has one unit at least");
        let is_some = options.steps > 0 && options.batch > 0;
        ensure!(is_some, "--steps and --batch: one at least");
        ensure!(
            options.state.is_none() || options.mode == [Mode::Bsp],
            "--state: aggregators have an optimizer in --mode bsp alone"
        );
        if let Some((rank, _)) = options.slow_worker {
            let workers = options.workers;
            let is_one = rank < workers;
            ensure!(is_one, "--slow-worker {rank}: ranks are below {workers}");
        }
        Ok(Self {
            options,
            data,
            model: Mlp::new(&widths),
        })
    }

    pub(super) fn job(&self, mode: Mode, seed: u64) -> Result<Job> {
        let options = self.options;
        Ok(Job {
            plan: Plan::new(mode, options.workers, options.group)?,
            model: self.model.clone(),
            rule: match options.optimizer {
                Optimizing::Sgd => Rule::Sgd {
                    rate: options.rate,
                    momentum: options.momentum,
                },
                Optimizing::Adam => Rule::Adam { rate: options.rate },
            },
            data: Arc::clone(&self.data),
            shards: match options.shards {
                Dealt::Even => Shards::Even,
                Dealt::Skewed => Shards::Skewed,
            },
            batch: options.batch,
            steps: options.steps,
            every: options.steps.div_ceil(POINTS),
            seed,
            slow: options.slow_worker,
            aggregators: options.aggregator_count(),
        })
    }
}

impl TrainOptions {
    /// Returns the number of aggregators that exchanges go through; 0 for exchanges in rings.
    pub(super) fn aggregator_count(&self) -> usize {
        let count = self.aggregators.map(|count| count as usize);
        count.unwrap_or(self.aggregators_at.len())
    }

    /// True if this process is one of several.
    pub(super) fn is_apart(&self) -> bool {
        !self.addresses.is_empty() || !self.aggregators_at.is_empty()
    }

    /// Returns the time that a worker or an aggregator waits for another at most.
    pub(super) fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.deadline)
    }

    /// Opens the checkpoints for `local` workers of this process, if they are asked for.
    pub(super) fn checkpoints(&self, job: &Job, local: usize) -> Result<Option<Checkpoints>> {
        let Some(server) = &self.checkpoint else {
            return Ok(None);
        };
        let deadline = self.patience();
        let (name, every) = (&self.checkpoint_name, self.checkpoint_every);
        Checkpoints::open(server, name, every, job, local, deadline).map(Some)
    }

    /// Returns the step that a job goes on from. `ranks` are those of this process; aggregators
    /// have the ranks behind the workers'.
    pub(super) fn from(
        &self,
        checkpoints: Option<&Checkpoints>,
        ranks: Range<usize>,
    ) -> Result<Option<u64>> {
        let Some(checkpoints) = checkpoints else {
            return Ok(None);
        };
        if !self.resume {
            checkpoints.ensure_none(ranks)?;
            return Ok(None);
        }
        let (from, steps) = (checkpoints.newest()?, self.steps);
        ensure!(
            from < steps,
            "--steps {steps}: the checkpoint `{}` has {from} already; choose more",
            self.checkpoint_name
        );
        Ok(Some(from))
    }

    /// Returns the memory for what this process's aggregators change, if it is not local.
    pub(super) fn state_memory(&self) -> Result<Option<Runtime>> {
        let (Some(server), Some(budget)) = (&self.state, self.state_budget) else {
            return Ok(None);
        };
        let runtime = Runtime::builder().server(server.to_string()).budget(budget);
        let runtime = runtime.deadline(self.patience() / 2).build();
        let runtime = runtime.with_context(|| format!("--state {server}"));
        runtime.map(Some)
    }

    /// Returns the link's gigabits per second and microseconds, if a link is asked for.
    pub(super) fn link(&self) -> Option<(f64, f64)> {
        let shaped = self.link_gbps.is_some() || self.link_us.is_some();
        // A link without a rate gets a million gigabits per second.
        shaped.then(|| (self.link_gbps.unwrap_or(1e6), self.link_us.unwrap_or(0.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_workers_are_read() {
        assert_eq!(slow("3:2.5"), Ok((3, 2.5)));
        for wrong in ["3", "3:", ":2", "a:2", "3:0.5", "3:-1", "3:nan"] {
            assert!(slow(wrong).is_err(), "{wrong}");
        }
    }
}
