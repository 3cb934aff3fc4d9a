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
    options::{Budget, Fabric, Format, Printing, page_size, some_bytes},
    out::say,
    progress::Progress,
    report::{self, median},
    sitting::Sitting,
};
use farpage_bench_limits::swap::Swap;

/// Memory beside the arrays for the swapping program itself, its stacks and tables. farpage gets
/// none of it: its budget is for pages alone.
const PROGRAM_BYTES: u64 = 16 << 20;

/// Figure of both sides.
struct Figure {
    what: &'static str,
    /// Path of the figure in a report.
    path: &'static str,
    more_is_better: bool,
    /// Least speed that farpage is to reach, as a multiple of swap's.
    target: f64,
    /// Commands that print the figure.
    from: Commands,
}

/// Commands that run on both sides.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Commands {
    Stream,
    /// Random accesses by one thread, or by as many as compute by default (`RandomByAll`).
    RandomAlone,
    RandomByAll,
    /// Random accesses with faults served by the threads that raise them, as swap's are.
    InThreadAlone,
    InThreadByAll,
}

impl Commands {
    /// All commands; those with default options come first.
    const ALL: [Self; 5] = [
        Self::Stream,
        Self::RandomAlone,
        Self::RandomByAll,
        Self::InThreadAlone,
        Self::InThreadByAll,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::RandomAlone => "random, one thread",
            Self::RandomByAll => "random, all threads",
            Self::InThreadAlone => "random, one thread, in-thread faults",
            Self::InThreadByAll => "random, all threads, in-thread faults",
        }
    }
}

const FIGURES: [Figure; 9] = [
    Figure {
        what: "STREAM triad, MB/s",
        path: "/kernels/3/mb_per_s",
        more_is_better: true,
        target: 6.0,
        from: Commands::Stream,
    },
    random(
        "random read, one thread, us",
        "/us_per_read",
        0.8,
        Commands::RandomAlone,
    ),
    random(
        "random update, one thread, us",
        "/us_per_update",
        0.8,
        Commands::RandomAlone,
    ),
    random(
        "random read, all threads, us",
        "/us_per_read",
        1.0,
        Commands::RandomByAll,
    ),
    random(
        "random update, all threads, us",
        "/us_per_update",
        1.0,
        Commands::RandomByAll,
    ),
    random(
        "random read, one thread, in-thread faults, us",
        "/us_per_read",
        1.3,
        Commands::InThreadAlone,
    ),
    random(
        "random update, one thread, in-thread faults, us",
        "/us_per_update",
        1.3,
        Commands::InThreadAlone,
    ),
    random(
        "random read, all threads, in-thread faults, us",
        "/us_per_read",
        1.3,
        Commands::InThreadByAll,
    ),
    random(
        "random update, all threads, in-thread faults, us",
        "/us_per_update",
        1.3,
        Commands::InThreadByAll,
    ),
];

const fn random(what: &'static str, path: &'static str, target: f64, from: Commands) -> Figure {
    Figure {
        what,
        path,
        more_is_better: false,
        target,
        from,
    }
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
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &VersusSwapOptions) -> Result<()> {
    let size_bytes = options.size.as_u64();
    let budget_bytes = options.budget.bytes(size_bytes);
    let data = options.data.name();
    let common = format!("--size {size_bytes}B --data {data}");
    let stream = format!("stream --iterations 3 {common}");
    let random = format!("random --accesses 100000 {common}");
    let (fabric, codec) = (options.fabric, options.codec);
    let paged = format!("--fabric {fabric} --codec {codec} --budget {budget_bytes}B");
    let page_size = format!("--page-size {}B", options.page_size.as_u64());

    // Signals end a benchmark and not this process from here on, so that `swap` is always dropped.
    let mut sitting = Sitting::new(false)?;
    let swap = Swap::set_up(budget_bytes + PROGRAM_BYTES, 2 * size_bytes)?;
    let progress = Progress::new(2 * Commands::ALL.len() as u64 * u64::from(options.repeat));
    let mut reports = Vec::new();
    let mut ratios = [const { Vec::new() }; FIGURES.len()];
    let mut values = [const { (Vec::new(), Vec::new()) }; FIGURES.len()];
    for _ in 0..options.repeat {
        sitting.next_repetition();
        let mut take = |phase: &'static str, report: Result<Value>| -> Result<Value> {
            let report = report.with_context(|| format!("cannot measure {phase}"))?;
            reports.push(report.clone());
            progress.step(1);
            Ok(report)
        };
        let mut both = |name: &'static str, command: &str, more: &str| -> Result<_> {
            progress.phase(format!("{name}, swap"));
            // More than fits is the point here: the rest is swapped.
            let swapped = format!("{command} --plain --force");
            let swapped = take(name, sitting.run_as(swap.command()?, &swapped))?;
            progress.phase(format!("{name}, farpage"));
            let paged = format!("{command} {paged} {more}");
            Ok((swapped, take(name, sitting.run(&paged))?))
        };
        let small = "--page-size 4KiB";
        let in_thread = "--page-size 4KiB --fault-mode in-thread";
        let alone = format!("{random} --threads 1");
        for commands in Commands::ALL {
            let name = commands.name();
            let (swapped, paged) = match commands {
                Commands::Stream => both(name, &stream, &page_size),
                Commands::RandomAlone => both(name, &alone, small),
                Commands::RandomByAll => both(name, &random, small),
                Commands::InThreadAlone => both(name, &alone, in_thread),
                Commands::InThreadByAll => both(name, &random, in_thread),
            }?;
            let figures = FIGURES.iter().enumerate();
            for (at, figure) in figures.filter(|(_, figure)| figure.from == commands) {
                let value = |report: &Value| {
                    let value = report.pointer(figure.path).and_then(Value::as_f64);
                    value.with_context(|| format!("a report has no figure for {}", figure.what))
                };
                let (swapped, paged) = (value(&swapped)?, value(&paged)?);
                values[at].0.push(swapped);
                values[at].1.push(paged);
                ratios[at].push(match figure.more_is_better {
                    true => paged / swapped,
                    false => swapped / paged,
                });
            }
        }
    }
    drop(progress);
    drop(swap);

    let mut table = report::table(["what", "swap", "farpage", "times as fast", "target", "met"]);
    let mut findings = Vec::new();
    for ((figure, ratios), (swapped, paged)) in FIGURES.iter().zip(&ratios).zip(&values) {
        let Figure { what, target, .. } = figure;
        let (ratio, swapped, paged) = (median(ratios), median(swapped), median(paged));
        let met = ratio >= *target;
        table.add_row(report::right([
            (*what).to_owned(),
            format!("{swapped:.1}"),
            format!("{paged:.1}"),
            format!("{ratio:.2}"),
            format!("{target}"),
            if met { "yes" } else { "NO" }.to_owned(),
        ]));
        findings.push(json!({ "what": what, "swap": swapped, "farpage": paged, "ratio": ratio, "ratios": ratios, "target": target, "met": met }));
    }
    match options.printing.format {
        Format::Human => say(format_args!(
            "{table}\n{} MiB of {data} data, {} MiB of local memory; medians of {} repetitions.",
            size_bytes >> 20,
            budget_bytes >> 20,
            options.repeat
        )),
        Format::Json => {
            say(json!({ "benchmark": "versus-swap", "findings": findings, "reports": reports }))
        }
    }
}
