//! farpage against the kernel's own way to have more memory than there is: swap, to compressed
//! memory, under a cgroup.
//!
//! The rule it keeps: both sides run the same loops over arrays of the same size and contents with
//! the same local memory, in turns. Setting swap up and taking it down is left to `swap`.

use anyhow::{Context, Result};
use bytesize::ByteSize;
use clap::Args;
use farpage::Codec;
use farpage_bench_kit::data::Contents;
use serde_json::{Value, json};

use farpage_bench_kit::{
    options::{Budget, Fabric, Printing, page_size, some_bytes},
    progress::Progress,
    report::{self, median, times_as_fast},
    sitting::Sitting,
};
use farpage_bench_limits::swap::Swap;

/// Memory beside the arrays for the swapping program itself, its stacks and tables. farpage gets
/// none of it: its budget is for pages alone.
const PROGRAM_BYTES: u64 = 16 << 20;

/// Commands that run on both sides, and their figures.
struct Trial {
    name: String,
    command: String,
    /// Options of farpage's side.
    paged: String,
    figures: Vec<Figure>,
}

/// Figure of both sides in all repetitions.
struct Figure {
    what: String,
    /// Path of the figure in a report.
    path: String,
    /// Least speed that farpage is to reach, as a multiple of swap's.
    target: f64,
    swapped: Vec<f64>,
    paged: Vec<f64>,
}

impl Figure {
    fn new(what: String, path: String, target: f64) -> Self {
        let (swapped, paged) = (Vec::new(), Vec::new());
        Self {
            what,
            path,
            target,
            swapped,
            paged,
        }
    }

    fn value(&self, report: &Value) -> Result<f64> {
        let value = report.pointer(&self.path).and_then(Value::as_f64);
        value.with_context(|| format!("a report has no figure for {}", self.what))
    }
}

/// Returns all commands; those with default options come first.
fn trials(options: &VersusSwapOptions, common: &str) -> Vec<Trial> {
    let triad = "/kernels/3/mb_per_s".to_owned();
    let mut trials = vec![Trial {
        name: "stream".to_owned(),
        command: format!("stream --iterations 3 {common}"),
        paged: format!("--page-size {}B", options.page_size.as_u64()),
        figures: vec![Figure::new("STREAM triad, MB/s".to_owned(), triad, 6.0)],
    }];
    // With in-thread faults, the threads that raise faults serve them, as swap's do.
    let in_thread = " --fault-mode in-thread";
    for (by, threads, mode, target) in [
        ("one thread", " --threads 1", "", 0.8),
        ("all threads", "", "", 1.0),
        (
            "one thread, in-thread faults",
            " --threads 1",
            in_thread,
            1.3,
        ),
        ("all threads, in-thread faults", "", in_thread, 1.3),
    ] {
        let figure = |verb| {
            let what = format!("random {verb}, {by}, us");
            Figure::new(what, format!("/us_per_{verb}"), target)
        };
        trials.push(Trial {
            name: format!("random, {by}"),
            command: format!("random --accesses 100000 {common}{threads}"),
            paged: format!("--page-size 4KiB{mode}"),
            figures: ["read", "update"].map(figure).into(),
        });
    }
    trials
}

/// Options of `versus-swap`.
#[derive(Args, Debug)]
pub struct VersusSwapOptions {
    /// Fabric to farpage's memory server
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// farpage's page size for STREAM; random access uses 4KiB, as swap does
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    page_size: ByteSize,
    /// Size of all arrays together
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = some_bytes)]
    size: ByteSize,
    /// Local memory for the arrays: a size or a share of --size
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "25%")]
    budget: Budget,
    /// farpage's compression of pages on their way (raw, lz4, shuffle, ...); zram always compresses
    #[arg(long, default_value_t = Codec::Raw)]
    codec: Codec,
    /// Initial contents of the arrays
    #[arg(long, value_enum, default_value_t = Contents::Random)]
    data: Contents,
    /// Number of times that everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    #[command(flatten)]
    printing: Printing,
}

/// Runs the subcommand `versus-swap` and prints what it found.
pub fn run(options: &VersusSwapOptions) -> Result<()> {
    let size_bytes = options.size.as_u64();
    let budget_bytes = options.budget.bytes(size_bytes);
    let data = options.data.name();
    let common = format!("--size {size_bytes}B --data {data}");
    let (fabric, codec) = (options.fabric, options.codec);
    let paged = format!("--fabric {fabric} --codec {codec} --budget {budget_bytes}B");
    let mut trials = trials(options, &common);

    // Signals end a benchmark and not this process from here on, so that `swap` is always dropped.
    let sitting = Sitting::new(false)?;
    let swap = Swap::set_up(budget_bytes + PROGRAM_BYTES, 2 * size_bytes)?;
    let progress = Progress::new(2 * trials.len() as u64 * u64::from(options.repeat));
    let mut reports = Vec::new();
    for _ in 0..options.repeat {
        for trial in &mut trials {
            let (name, command) = (&trial.name, &trial.command);
            let mut take = |side: &str, run: &dyn Fn() -> Result<Value>| -> Result<Value> {
                progress.phase(format!("{name}, {side}"));
                let report = run().with_context(|| format!("cannot measure {name}, {side}"))?;
                reports.push(report.clone());
                Ok(report)
            };
            // More than fits is the point here: the rest is swapped.
            let plain = format!("{command} --plain --force");
            let swapped = take("swap", &|| sitting.run_as(swap.cgroup().command()?, &plain))?;
            let paged = format!("{command} {paged} {}", trial.paged);
            let paged = take("farpage", &|| sitting.run(&paged))?;
            for figure in &mut trial.figures {
                figure.swapped.push(figure.value(&swapped)?);
                figure.paged.push(figure.value(&paged)?);
            }
        }
    }
    drop(progress);
    drop(swap);

    let (mut rows, mut findings) = (Vec::new(), Vec::new());
    for figure in trials.iter().flat_map(|trial| &trial.figures) {
        let Figure {
            what,
            path,
            target,
            swapped,
            paged,
        } = figure;
        let ratios = times_as_fast(paged, swapped, path.ends_with("mb_per_s"));
        let [ratio, swapped, paged] = [&ratios, swapped, paged].map(|values| median(values));
        let met = ratio >= *target;
        let figures = format!("{swapped:.1} | {paged:.1} | {ratio:.2} | {target}");
        let word = report::yes(met);
        rows.push(format!("{what} | {figures} | {word}"));
        findings.push(json!({ "what": what, "swap": swapped, "farpage": paged, "ratio": ratio, "ratios": ratios, "target": target, "met": met }));
    }
    let header = "what | swap | farpage | times as fast | target | met";
    let table = report::filled_table(header, rows);
    let report = json!({ "benchmark": "versus-swap", "findings": findings, "reports": reports });
    report::print(&report, options.printing.format, |_| {
        format!(
            "{table}\n{} MiB of {data} data, {} MiB of local memory; medians of {} repetitions.",
            size_bytes >> 20,
            budget_bytes >> 20,
            options.repeat
        )
    })
}
