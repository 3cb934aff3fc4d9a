//! Training on many workers: synchronous, by divide and shuffle, in fixed groups, and alone.
//!
//! The rule it keeps: all modes start from the same parameters, see the same batches and have the
//! same learning rate, and their runs take turns. A run counts only if its workers moved the bytes
//! and took the serial steps that theory says. Workers are threads of this process that share its
//! processors, unless `--addresses` makes it one of several processes. So times mean something only
//! where a slow link or a slow worker dominates them: bytes and serial steps are what carries over
//! to other machines.

mod checkpoint;
mod picture;

use std::{env, ops::Range, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use farpage::{ByteSize, Runtime};
use farpage_bench_kit::{
    options::{Run, not_negative, positive, some_bytes},
    report::{self, median, right, table},
};
use farpage_fabric::{Link, SessionOptions};
use farpage_train::{
    Address, Between, Cnn, Course, Job, Mlp, Mode, Model, Network, Outcome, Plan, Rule, Scratch,
    Station, consensus,
    data::{Dataset, Shards, Source},
    distance, hash,
};
use farpage_wire::Endpoint;
use serde::Serialize;

use self::checkpoint::Checkpoints;

/// Bytes may exceed those of the parameters by headers and announcements.
const OVERHEAD_MAX: f64 = 0.01;
/// Below so many bytes a message, announcements weigh more than that.
const CHECKED_BYTES: f64 = 64_000.0;
/// Points of a curve.
const POINTS: u64 = 20;
/// The 95 % quantile of Student's distribution, by degrees of freedom from 1.
const STUDENT_95: [f64; 19] = [
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
    1.761, 1.753, 1.746, 1.740, 1.734, 1.729,
];

/// What lies between the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum TrainFabric {
    /// A simulation
    Sim,
    /// Shared memory
    Shm,
    /// TCP over the loopback
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Dealt {
    /// Each worker sees all classes
    Even,
    /// Each worker sees few classes
    Skewed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Optimizing {
    /// Gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Modelled {
    /// Fully connected layers
    Mlp,
    /// Convolutions with batch normalisation, and a fully connected layer
    Cnn,
}

#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct TrainOptions {
    /// Workers: a power of --group
    #[arg(long, value_name = "N", default_value_t = 16)]
    workers: usize,
    /// Workers of a group
    #[arg(long, value_name = "N", default_value_t = 4)]
    group: usize,
    /// Who synchronises with whom: bsp (the mean gradient of all), ds (the mean parameters of a
    /// group that changes), fixed (of a group that stays), none
    #[arg(
        long,
        value_name = "MODES",
        value_delimiter = ',',
        default_value = "bsp,ds,fixed,none"
    )]
    #[serde(serialize_with = "names")]
    mode: Vec<Mode>,
    /// Sums and steps by so many parameter servers instead of a ring, for --mode bsp
    #[arg(long, value_name = "S", conflicts_with = "addresses", value_parser = clap::value_parser!(u64).range(1..))]
    aggregators: Option<u64>,
    /// Keeps the aggregators' parameters and optimizer's state on this memory server, of which
    /// --state-budget is local at a time
    #[arg(long, value_name = "URL", requires_all = ["aggregators", "state_budget"])]
    #[serde(skip)]
    state: Option<Endpoint>,
    /// Local memory for what --state keeps; all aggregators of a process share it
    #[arg(long, value_name = "SIZE", requires = "state", value_parser = some_bytes)]
    state_budget: Option<ByteSize>,
    /// What is learnt: digits, mnist (both after `cargo xtask data`) or blobs (made here)
    #[arg(long, default_value = "digits")]
    #[serde(serialize_with = "name")]
    data: Source,
    /// Where the files of --data are
    #[arg(long, value_name = "DIR", default_value = "target/training-data")]
    data_dir: PathBuf,
    /// What learns
    #[arg(long, value_enum, default_value_t = Modelled::Mlp)]
    model: Modelled,
    /// Units of each hidden layer of mlp
    #[arg(
        long,
        value_name = "UNITS",
        value_delimiter = ',',
        default_value = "128,128"
    )]
    hidden: Vec<usize>,
    /// Channels of each stage of cnn, which halves a picture's sides
    #[arg(
        long,
        value_name = "CHANNELS",
        value_delimiter = ',',
        default_value = "8,16"
    )]
    channels: Vec<usize>,
    /// Examples of a worker in a step
    #[arg(long, value_name = "N", default_value_t = 16)]
    batch: usize,
    /// Steps of each worker
    #[arg(long, value_name = "N", default_value_t = 200)]
    steps: u64,
    /// The optimizer, whose state stays at its worker
    #[arg(long, value_enum, default_value_t = Optimizing::Sgd)]
    optimizer: Optimizing,
    /// How much of a gradient is applied, in all modes
    #[arg(long, value_name = "RATE", default_value_t = 0.05)]
    rate: f32,
    /// How much of the last change sgd applies again
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    momentum: f32,
    /// Who trains with which examples
    #[arg(long, value_enum, default_value_t = Dealt::Even)]
    shards: Dealt,
    /// Seed of the first run
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Runs of each mode, each with a seed of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=20))]
    seeds: u64,
    /// What lies between the workers
    #[arg(long, value_enum, default_value_t = TrainFabric::Shm)]
    fabric: TrainFabric,
    /// Gives each worker a link of so many gigabits per second
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    link_gbps: Option<f64>,
    /// Adds so many microseconds to every operation on the fabric
    #[arg(long, value_name = "US", value_parser = not_negative)]
    link_us: Option<f64>,
    /// A worker that computes so many times slower, as RANK:TIMES
    #[arg(long, value_name = "RANK:TIMES", value_parser = slow)]
    slow_worker: Option<(usize, f64)>,
    /// Where the workers are, by rank: this process is one of them then. Each is an endpoint that
    /// the others reach, such as tcp://10.0.0.2:7500
    #[arg(long, value_name = "URLS", value_delimiter = ',', conflicts_with_all = ["workers", "fabric", "seeds"])]
    #[serde(skip)]
    addresses: Vec<Endpoint>,
    /// Which of --addresses this process is [default: what torchrun, mpirun or srun say]
    #[arg(long, value_name = "RANK", requires = "addresses")]
    #[serde(skip)]
    rank: Option<usize>,
    /// Keeps checkpoints on this memory server
    #[arg(long, value_name = "URL", conflicts_with = "aggregators")]
    #[serde(skip)]
    checkpoint: Option<Endpoint>,
    /// Keeps one after each so many steps
    #[arg(long, value_name = "STEPS", default_value_t = 50, requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    #[serde(skip)]
    checkpoint_every: u64,
    /// What the checkpoints are called on the server; each job needs a name of its own
    #[arg(
        long,
        value_name = "NAME",
        default_value = "train",
        requires = "checkpoint"
    )]
    #[serde(skip)]
    checkpoint_name: String,
    /// Goes on from the newest checkpoint that all workers have kept
    #[arg(long, requires = "checkpoint")]
    #[serde(skip)]
    resume: bool,
    /// The longest that a worker waits for another, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive)]
    deadline: f64,
    /// Also draws how each mode learns, and what it moves, to this file
    #[arg(long, value_name = "FILE", conflicts_with = "addresses")]
    #[serde(skip)]
    svg: Option<PathBuf>,
    #[command(flatten)]
    #[serde(skip)]
    run: Run,
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

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    verified: bool,
    parameters: usize,
    parameter_bytes: usize,
    config: Config,
    modes: Vec<Figures>,
    /// Accuracy of the consensus, ds minus bsp, in points over the pairs of one seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    ds_minus_bsp: Option<Paired>,
}

#[derive(Debug, Serialize)]
struct Config {
    smoke: bool,
    #[serde(flatten)]
    options: TrainOptions,
}

#[derive(Debug, Serialize)]
struct Paired {
    mean_points: f64,
    /// With 95 % the true mean is above it; of two seeds or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    above_points: Option<f64>,
    pairs: usize,
}

/// A mode; means over its runs unless something else is said.
#[derive(Debug, Serialize)]
struct Figures {
    mode: String,
    /// Of the workers' mean, on the examples that nobody trained with.
    accuracy: f64,
    /// Of the worst worker, after rounds without training.
    worst_accuracy: f64,
    loss: f64,
    /// Of the workers from their mean, over the length of that.
    distance: f64,
    bytes_per_step: f64,
    /// Over what theory says of a ring, or of aggregators; none where nothing moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_over_theory: Option<f64>,
    serial_steps_per_step: f64,
    /// Of the slowest worker, the median of the runs.
    seconds: f64,
    /// Of a worker's time.
    exchange_share: f64,
    /// Until the consensus is as good as that of bsp at its end, in the runs of the first seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_to_bsp: Option<f64>,
    /// Of all parameters of all workers at the end, by seed.
    hashes: Vec<String>,
    /// Of each worker's parameters, by rank, in the run of the first seed.
    worker_hashes: Vec<String>,
    /// Accuracies by seed.
    accuracies: Vec<f64>,
    /// The runs of the first seed.
    curve: Vec<Point>,
}

#[derive(Clone, Debug, Serialize)]
struct Point {
    step: u64,
    seconds: f64,
    loss: f64,
    accuracy: f64,
    distance: f64,
}

/// One run.
struct Ran {
    curve: Vec<Point>,
    worst_accuracy: f64,
    bytes_per_step: f64,
    bytes_over_theory: Option<f64>,
    serial_steps_per_step: f64,
    exchange_share: f64,
    hash: u128,
    worker_hashes: Vec<u128>,
    is_right: bool,
}

/// Runs the subcommand `train` and prints what it found.
pub(crate) fn run(options: &TrainOptions) -> Result<()> {
    let mut options = options.clone();
    if options.run.smoke {
        options.data = Source::Blobs;
        options.hidden = vec![64, 64];
        options.steps = 8;
    }
    if !options.addresses.is_empty() {
        return work(&options);
    }
    let report = measure(options)?;
    if let Some(path) = &report.config.options.svg {
        picture::draw(&report, path)?;
    }
    let format = report.config.options.run.printing.format;
    report::conclude(&report, report.verified, format, Report::human)
}

/// What a process that is one worker found.
#[derive(Debug, Serialize)]
struct WorkerReport {
    benchmark: &'static str,
    rank: usize,
    mode: String,
    loss: f64,
    /// Of this worker's parameters, on the examples that nobody trained with.
    accuracy: f64,
    hash: String,
    seconds: f64,
    exchange_share: f64,
    /// Steps done before.
    resumed_from: u64,
    bytes_per_step: f64,
    serial_steps_per_step: f64,
}

/// Names the rank of a process: torchrun's, Open MPI's, MPICH's and Slurm's.
const RANKS: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

fn rank_of_environment() -> Result<usize> {
    let named = RANKS
        .iter()
        .find_map(|name| Some((name, env::var(name).ok()?)));
    let (name, rank) = named
        .with_context(|| format!("--rank is missing, and so are all of {}", RANKS.join(", ")))?;
    rank.parse()
        .with_context(|| format!("{name}={rank} is no rank"))
}

/// Does the part of one worker.
fn work(options: &TrainOptions) -> Result<()> {
    let (workers, deadline) = (
        options.addresses.len(),
        Duration::from_secs_f64(options.deadline),
    );
    let rank = options.rank.map_or_else(rank_of_environment, Ok)?;
    ensure!(
        rank < workers,
        "rank {rank} is none of the {workers} of --addresses"
    );
    let [mode] = *options.mode else {
        bail!("a worker runs one mode: add --mode ds, or another");
    };
    let options = TrainOptions {
        workers,
        ..options.clone()
    };
    let job = Jobs::new(&options)?.job(mode, options.seed)?;
    // Before it can be reached: so all know where they go on from before anybody does.
    let checkpoints = options.checkpoints(&job, 1)?;
    let from = options.from(checkpoints.as_ref(), rank..rank + 1)?;
    let course = options.course(checkpoints.as_ref(), &job, rank, from)?;
    let station = Station::open(job.plan, rank, &options.addresses[rank], deadline)?;
    let addresses: Vec<_> = options
        .addresses
        .iter()
        .cloned()
        .map(Address::Fabric)
        .collect();
    let session = SessionOptions {
        client: format!("worker {rank}"),
        deadline,
        link: options
            .link()
            .map(|(gbps, us)| Arc::new(Link::new(gbps, us))),
        ..SessionOptions::default()
    };
    let mut member = station.join(&addresses, &session, deadline)?;
    let outcome = job.work(rank, &mut member.exchange, course)?;
    member.leave()?;
    let end = outcome.snapshots.last().expect("a run has an end");
    let right = job
        .model
        .right(&end.parameters, &job.data.test, &mut Scratch::default());
    let report = WorkerReport {
        benchmark: "train",
        rank,
        mode: mode.to_string(),
        loss: end.loss,
        accuracy: right as f64 / job.data.test.labels.len() as f64,
        hash: format!("{:032x}", hash([&*end.parameters])),
        seconds: end.seconds,
        exchange_share: outcome.exchange_s / (outcome.exchange_s + outcome.compute_s),
        resumed_from: outcome.from,
        bytes_per_step: outcome.moved_bytes as f64 / (job.steps - outcome.from) as f64,
        serial_steps_per_step: outcome.serial_steps as f64 / (job.steps - outcome.from) as f64,
    };
    report::print(&report, options.run.printing.format, |report| {
        format!(
            "worker {rank}: accuracy {:.2} %, loss {:.3}, parameters {}, {:.2} s, of which {:.0} % exchanging",
            100.0 * report.accuracy,
            report.loss,
            report.hash,
            report.seconds,
            100.0 * report.exchange_share
        )
    })
}

/// What all runs of these options have in common.
struct Jobs<'a> {
    options: &'a TrainOptions,
    data: Arc<Dataset>,
    model: Model,
}

impl<'a> Jobs<'a> {
    fn new(options: &'a TrainOptions) -> Result<Self> {
        let data = Arc::new(Dataset::load(options.data, &options.data_dir)?);
        let model = match options.model {
            Modelled::Mlp => {
                let mut widths = vec![data.width];
                widths.extend(&options.hidden);
                widths.push(data.classes);
                ensure!(
                    !widths.contains(&0),
                    "--hidden 0: a layer has one unit at least"
                );
                Model::from(Mlp::new(&widths))
            }
            Modelled::Cnn => {
                let (side, channels) = (data.width.isqrt(), &options.channels);
                ensure!(
                    Cnn::fits(side, channels),
                    "--channels: each stage has one channel at least, and halves the pictures of {side} by {side}"
                );
                Cnn::new(side, channels, data.classes).into()
            }
        };
        ensure!(
            options.steps > 0 && options.batch > 0,
            "--steps and --batch: one at least"
        );
        if let Some((rank, _)) = options.slow_worker {
            let workers = options.workers;
            ensure!(
                rank < workers,
                "--slow-worker {rank}: ranks are below {workers}"
            );
        }
        Ok(Self {
            options,
            data,
            model,
        })
    }

    fn job(&self, mode: Mode, seed: u64) -> Result<Job> {
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
        })
    }
}

impl TrainOptions {
    /// Where `local` workers of this process keep their checkpoints.
    fn checkpoints(&self, job: &Job, local: usize) -> Result<Option<Checkpoints>> {
        let Some(server) = &self.checkpoint else {
            return Ok(None);
        };
        let deadline = Duration::from_secs_f64(self.deadline);
        let (name, every) = (&self.checkpoint_name, self.checkpoint_every);
        Checkpoints::open(server, name, every, job, local, deadline).map(Some)
    }

    /// The step that a job goes on from, of which these ranks are in this process.
    fn from(&self, checkpoints: Option<&Checkpoints>, ranks: Range<usize>) -> Result<Option<u64>> {
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

    fn course<'a>(
        &self,
        checkpoints: Option<&'a Checkpoints>,
        job: &Job,
        rank: usize,
        from: Option<u64>,
    ) -> Result<Course<'a>> {
        match checkpoints {
            Some(checkpoints) => checkpoints.course(job, rank, from),
            None => Ok(Course::default()),
        }
    }

    /// Where the aggregators of this process keep what they change, if it is not local.
    fn state_memory(&self) -> Result<Option<Runtime>> {
        let (Some(server), Some(budget)) = (&self.state, self.state_budget) else {
            return Ok(None);
        };
        let runtime = Runtime::builder()
            .server(server.to_string())
            .budget(budget)
            .deadline(Duration::from_secs_f64(self.deadline / 2.0));
        let runtime = runtime.build();
        runtime
            .with_context(|| format!("--state {server}"))
            .map(Some)
    }

    /// Gigabits per second and microseconds.
    fn link(&self) -> Option<(f64, f64)> {
        match (self.link_gbps, self.link_us) {
            (None, None) => None,
            // Without a rate the link is as fast as a link can be said to be.
            (gbps, us) => Some((gbps.unwrap_or(1e6), us.unwrap_or(0.0))),
        }
    }
}

fn measure(options: TrainOptions) -> Result<Report> {
    ensure!(
        options.checkpoint.is_none() || (options.mode.len(), options.seeds) == (1, 1),
        "--checkpoint: checkpoints belong to one run, so choose one --mode and one seed"
    );
    let jobs = Jobs::new(&options)?;
    let parameters = jobs.model.parameters();
    let mut ran: Vec<Vec<Ran>> = options.mode.iter().map(|_| Vec::new()).collect();
    for seed in options.seed..options.seed + options.seeds {
        for (mode, ran) in options.mode.iter().zip(&mut ran) {
            let job = jobs.job(*mode, seed)?;
            ran.push(one(&job, &options).with_context(|| format!("mode {mode}, seed {seed}"))?);
        }
    }
    let verified = ran.iter().flatten().all(|ran| ran.is_right);
    let goal = (options.mode.iter().zip(&ran))
        .find(|(mode, _)| **mode == Mode::Bsp)
        .map(|(_, ran)| ran[0].last().accuracy);
    let modes: Vec<_> = (options.mode.iter().zip(&ran))
        .map(|(mode, ran)| Figures::of(*mode, ran, goal))
        .collect();
    Ok(Report {
        benchmark: "train",
        verified,
        parameters,
        parameter_bytes: 4 * parameters,
        ds_minus_bsp: paired(&modes),
        modes,
        config: Config {
            smoke: options.run.smoke,
            options,
        },
    })
}

/// Trains once, and looks at what came out.
fn one(job: &Job, options: &TrainOptions) -> Result<Ran> {
    let network = Network {
        between: match options.fabric {
            TrainFabric::Sim => Between::Sim,
            TrainFabric::Shm => Between::Shm,
            TrainFabric::Tcp => Between::Tcp,
        },
        link: options.link(),
        deadline: Duration::from_secs_f64(options.deadline),
    };
    let checkpoints = options.checkpoints(job, options.workers)?;
    let from = options.from(checkpoints.as_ref(), 0..options.workers)?;
    let courses = (0..options.workers)
        .map(|rank| options.course(checkpoints.as_ref(), job, rank, from))
        .collect::<Result<_>>()?;
    let outcomes = match options.aggregators {
        Some(count) => {
            let state = options.state_memory()?;
            farpage_train::run_through_in(job, &network, count as usize, state.as_ref())?
        }
        None => farpage_train::run_on(job, &network, courses)?,
    };
    let count = outcomes.len() as f64;
    let mut scratch = Scratch::default();
    let mut accuracy = |parameters: &[f32]| {
        let right = job.model.right(parameters, &job.data.test, &mut scratch);
        right as f64 / job.data.test.labels.len() as f64
    };
    // 1. The curve.
    let mut curve = Vec::new();
    for at in 0..outcomes[0].snapshots.len() {
        let all = || outcomes.iter().map(|outcome| &outcome.snapshots[at]);
        let parameters = || all().map(|snapshot| &*snapshot.parameters);
        let mean = consensus(parameters());
        curve.push(Point {
            step: outcomes[0].snapshots[at].step,
            seconds: all().map(|snapshot| snapshot.seconds).fold(0.0, f64::max),
            loss: all().map(|snapshot| snapshot.loss).sum::<f64>() / count,
            accuracy: accuracy(&mean),
            distance: distance(parameters(), &mean),
        });
    }
    let worst = outcomes.iter().map(|outcome| accuracy(&outcome.settled));
    let worst_accuracy = worst.fold(1.0, f64::min);
    // 2. Bytes and serial steps, against theory.
    let steps = (job.steps - outcomes[0].from) as f64;
    let total = |of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>();
    let bytes_per_step = total(|outcome| outcome.moved_bytes as f64) / count / steps;
    let members = job
        .plan
        .rings(0)
        .first()
        .map_or(1, |ring| ring.members.len()) as f64;
    let parameter_bytes = 4.0 * job.model.parameters() as f64;
    let (expected, serial) = match options.aggregators {
        Some(_) => (2.0 * parameter_bytes, 2.0),
        None => (
            2.0 * parameter_bytes * (members - 1.0) / members,
            2.0 * (members - 1.0),
        ),
    };
    let bytes_over_theory = (expected > 0.0).then(|| bytes_per_step / expected);
    let are_bytes_right = match bytes_over_theory {
        None => bytes_per_step == 0.0,
        Some(over) => {
            let parts = options.aggregators.map_or(members, |count| count as f64);
            let is_small = parameter_bytes / parts < CHECKED_BYTES;
            over >= 1.0 && (is_small || over <= 1.0 + OVERHEAD_MAX)
        }
    };
    let are_steps_right =
        (outcomes.iter()).all(|outcome| outcome.serial_steps as f64 == serial * steps);
    // 3. Whether everybody has what everybody must have.
    let settled = || outcomes.iter().map(|outcome| &*outcome.settled);
    let apart = distance(settled(), &consensus(settled()));
    let have_met = matches!(job.plan.mode(), Mode::Fixed | Mode::Nothing) || apart == 0.0;
    let last = |outcome: &'_ Outcome| outcome.snapshots.len() - 1;
    let ends = outcomes
        .iter()
        .map(|outcome| &*outcome.snapshots[last(outcome)].parameters);
    let (compute, exchange) = (total(|o| o.compute_s), total(|o| o.exchange_s));
    Ok(Ran {
        worker_hashes: ends.clone().map(|worker| hash([worker])).collect(),
        hash: hash(ends),
        curve,
        worst_accuracy,
        bytes_per_step,
        bytes_over_theory,
        serial_steps_per_step: total(|outcome| outcome.serial_steps as f64) / count / steps,
        exchange_share: exchange / (compute + exchange),
        is_right: are_bytes_right && are_steps_right && have_met,
    })
}

impl Ran {
    fn last(&self) -> &Point {
        self.curve.last().expect("a run has a beginning and an end")
    }
}

impl Figures {
    fn of(mode: Mode, ran: &[Ran], goal: Option<f64>) -> Self {
        let mean = |of: &dyn Fn(&Ran) -> f64| ran.iter().map(of).sum::<f64>() / ran.len() as f64;
        let seconds: Vec<_> = ran.iter().map(|ran| ran.last().seconds).collect();
        let reached = |goal| ran[0].curve.iter().find(|point| point.accuracy >= goal);
        Self {
            mode: mode.to_string(),
            accuracy: mean(&|ran| ran.last().accuracy),
            worst_accuracy: mean(&|ran| ran.worst_accuracy),
            loss: mean(&|ran| ran.last().loss),
            distance: mean(&|ran| ran.last().distance),
            bytes_per_step: mean(&|ran| ran.bytes_per_step),
            bytes_over_theory: ran[0].bytes_over_theory,
            serial_steps_per_step: mean(&|ran| ran.serial_steps_per_step),
            seconds: median(&seconds),
            exchange_share: mean(&|ran| ran.exchange_share),
            seconds_to_bsp: goal.and_then(reached).map(|point| point.seconds),
            hashes: ran.iter().map(|ran| format!("{:032x}", ran.hash)).collect(),
            worker_hashes: (ran[0].worker_hashes.iter())
                .map(|hash| format!("{hash:032x}"))
                .collect(),
            accuracies: ran.iter().map(|ran| ran.last().accuracy).collect(),
            curve: ran[0].curve.clone(),
        }
    }
}

/// Ds against bsp, if both were run.
fn paired(modes: &[Figures]) -> Option<Paired> {
    let of = |mode: Mode| {
        modes
            .iter()
            .find(|figures| figures.mode == mode.to_string())
    };
    let (ds, bsp) = (of(Mode::Ds)?, of(Mode::Bsp)?);
    let pairs = ds.accuracies.iter().zip(&bsp.accuracies);
    let points: Vec<_> = pairs.map(|(ds, bsp)| 100.0 * (ds - bsp)).collect();
    let count = points.len();
    let mean_points = points.iter().sum::<f64>() / count as f64;
    let above_points = (count > 1).then(|| {
        let squares: f64 = points
            .iter()
            .map(|point| (point - mean_points).powi(2))
            .sum();
        let error = (squares / (count - 1) as f64 / count as f64).sqrt();
        mean_points - STUDENT_95[count - 2] * error
    });
    Some(Paired {
        mean_points,
        above_points,
        pairs: count,
    })
}

impl Report {
    fn human(&self) -> String {
        let mut results = table([
            "mode",
            "accuracy, %",
            "worst worker, %",
            "loss",
            "distance",
            "MB per step",
            "over theory",
            "serial steps",
            "s",
            "exchanging, %",
            "s to bsp's accuracy",
        ]);
        for mode in &self.modes {
            let or_none = |value: Option<f64>, digits: usize| {
                value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
            };
            results.add_row(right([
                mode.mode.clone(),
                format!("{:.2}", 100.0 * mode.accuracy),
                format!("{:.2}", 100.0 * mode.worst_accuracy),
                format!("{:.3}", mode.loss),
                format!("{:.1e}", mode.distance),
                format!("{:.3}", mode.bytes_per_step / 1e6),
                or_none(mode.bytes_over_theory, 4),
                format!("{:.0}", mode.serial_steps_per_step),
                format!("{:.2}", mode.seconds),
                format!("{:.0}", 100.0 * mode.exchange_share),
                or_none(mode.seconds_to_bsp, 2),
            ]));
        }
        let mut run = table(["run", self.benchmark]);
        let verified = if self.verified { "yes" } else { "NO: FAILED" };
        let config = &self.config.options;
        let mut rows = vec![
            ("verified", verified.to_owned()),
            (
                "workers",
                format!("{} in groups of {}", config.workers, config.group),
            ),
            (
                "parameters",
                format!(
                    "{} ({:.2} MB)",
                    self.parameters,
                    self.parameter_bytes as f64 / 1e6
                ),
            ),
            ("runs of each mode", config.seeds.to_string()),
        ];
        if let Some(count) = config.aggregators {
            rows.push(("aggregators", count.to_string()));
        }
        if let Some(Paired {
            mean_points,
            above_points,
            pairs,
        }) = &self.ds_minus_bsp
        {
            let bound = above_points.map_or(String::new(), |above| {
                format!(", with 95 % above {above:+.2}")
            });
            rows.push((
                "accuracy, ds - bsp",
                format!("{mean_points:+.2} points over {pairs} pairs{bound}"),
            ));
        }
        for (name, value) in rows {
            run.add_row(right([name.to_owned(), value]));
        }
        [results, run].map(|table| table.to_string()).join("\n")
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
