//! One worker, or one aggregator, as a process of its own.
//!
//! The rule it keeps: the process does the part that a thread would do, with the same bits. It
//! reads the step that the job goes on from before others can reach the process, so that all know
//! that step before one of them goes on.

use std::{env, sync::Arc, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use farpage_bench_kit::report;
use farpage_fabric::{Link, SessionOptions};
use farpage_train::{
    Address, Aggregator, AggregatorCourse, Course, Job, Layout, Outcome, Scratch, Station, Through,
    hash,
};
use farpage_wire::Endpoint;
use serde_json::json;

use super::{
    options::{Jobs, TrainOptions},
    report::shares,
};

/// Variables that hold a process's rank: torchrun's, Open MPI's, MPICH's and Slurm's.
const RANKS: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

fn rank_of_environment() -> Result<usize> {
    let mut named = RANKS
        .iter()
        .filter_map(|name| Some((name, env::var(name).ok()?)));
    let missing = || format!("--rank is missing, and so are all of {}", RANKS.join(", "));
    let (name, rank) = named.next().with_context(missing)?;
    let parsed = rank.parse();
    parsed.with_context(|| format!("{name}={rank} is no rank"))
}

/// Runs the worker or the aggregator with this process's rank.
pub(super) fn run(mut options: TrainOptions) -> Result<()> {
    if !options.addresses.is_empty() {
        options.workers = options.addresses.len();
    }
    let (workers, aggregators) = (options.workers, options.aggregators_at.len());
    let rank = options.rank.map_or_else(rank_of_environment, Ok)?;
    ensure!(
        rank < workers + aggregators,
        "rank {rank} is none of {workers} workers and, behind them, {aggregators} aggregators"
    );
    let [mode] = *options.mode else {
        bail!("a process of a job runs one mode: add --mode ds, or another");
    };
    let job = Jobs::new(&options)?.job(mode, options.seed)?;
    let checkpoints = options.checkpoints(&job, 1)?;
    let from = options.from(checkpoints.as_ref(), rank..rank + 1)?;
    match rank.checked_sub(workers) {
        Some(number) => {
            let course = match &checkpoints {
                Some(checkpoints) => checkpoints.aggregator_course(&job, number, from)?,
                None => AggregatorCourse::default(),
            };
            serve(&options, &job, number, course)
        }
        None => {
            let course = match &checkpoints {
                Some(checkpoints) => checkpoints.course(&job, rank, from)?,
                None => Course::default(),
            };
            let outcome = work(&options, &job, rank, course)?;
            print(&options, &job, rank, &outcome)
        }
    }
}

/// Runs one aggregator.
fn serve(
    options: &TrainOptions,
    job: &Job,
    number: usize,
    course: AggregatorCourse<'_>,
) -> Result<()> {
    let (from, deadline) = (course.from, options.patience());
    let state = options.state_memory()?;
    // Half the deadline: a killed worker is found gone before another party's patience ends.
    let at = &options.aggregators_at[number];
    let mut aggregator = Aggregator::open(Layout::of(job)?, number, at, deadline / 2)?;
    if let Some(runtime) = &state {
        aggregator = aggregator.keep_in(runtime);
    }
    if let Some((gbps, _)) = options.link() {
        aggregator = aggregator.behind_link(gbps);
    }
    let begun = Instant::now();
    aggregator.serve_job(job, course, deadline)?;
    let seconds = begun.elapsed().as_secs_f64();
    let report = json!({
        "benchmark": "train",
        "aggregator": number,
        "mode": job.plan.mode().to_string(),
        // From when the aggregator could be reached to when all workers had gone.
        "seconds": seconds,
        "resumed_from": from,
    });
    report::print(&report, options.run.printing.format, |_| {
        format!("aggregator {number}: served for {seconds:.2} s")
    })
}

/// Runs one worker.
fn work(options: &TrainOptions, job: &Job, rank: usize, course: Course<'_>) -> Result<Outcome> {
    let deadline = options.patience();
    let fabric = |urls: &[Endpoint]| {
        urls.iter()
            .cloned()
            .map(Address::Fabric)
            .collect::<Vec<_>>()
    };
    let link = options.link();
    let session = SessionOptions {
        client: format!("worker {rank}"),
        deadline,
        link: link.map(|(gbps, us)| Arc::new(Link::new(gbps, us))),
        ..SessionOptions::default()
    };
    if job.aggregators > 0 {
        let addresses = fabric(&options.aggregators_at);
        let mut through = Through::join(Layout::of(job)?, rank, &addresses, &session, deadline)?;
        return Ok(job.work_through(rank, &mut through, course)?);
    }
    let station = Station::open(job.plan, rank, &options.addresses[rank], deadline)?;
    let mut member = station.join(&fabric(&options.addresses), &session, deadline)?;
    let outcome = job.work(rank, &mut member.exchange, course)?;
    member.leave()?;
    Ok(outcome)
}

fn print(options: &TrainOptions, job: &Job, rank: usize, outcome: &Outcome) -> Result<()> {
    let end = outcome.snapshots.last().expect("a run has an end");
    let (test, mut scratch) = (&job.data.test, Scratch::default());
    let right = job.model.right(&end.parameters, test, &mut scratch);
    let steps = (job.steps - outcome.from) as f64;
    let accuracy = right as f64 / test.labels.len() as f64;
    let hash = format!("{:032x}", hash([&*end.parameters]));
    let share = outcome.exchange_s / (outcome.exchange_s + outcome.compute_s);
    let (loss, seconds) = (end.loss, end.seconds);
    let report = json!({
        "benchmark": "train",
        "rank": rank,
        "mode": job.plan.mode().to_string(),
        "loss": loss,
        // Of this worker's parameters, on examples that no worker trained with.
        "accuracy": accuracy,
        "hash": hash,
        "seconds": seconds,
        "exchange_share": share,
        // Number of steps done before this process began.
        "resumed_from": outcome.from,
        "bytes_per_step": outcome.moved_bytes as f64 / steps,
        "serial_steps_per_step": outcome.serial_steps as f64 / steps,
    });
    report::print(&report, options.run.printing.format, |_| {
        let (accuracy, shares) = (100.0 * accuracy, shares(share));
        format!(
            "worker {rank}: accuracy {accuracy:.2} %, loss {loss:.3}, parameters {hash}, {seconds:.2} s, computing / exchanging {shares} %"
        )
    })
}
