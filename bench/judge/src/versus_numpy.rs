//! numpy on farpage's arrays beside numpy on the alternatives: `numpy.memmap`, and swap to
//! compressed memory.
//!
//! The rule it keeps: all run the same steps in turns, with the same local memory, and come to the
//! same results, bit for bit. The steps are in `versus_numpy.py`.

use std::{collections::BTreeMap, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use bytesize::ByteSize;
use clap::Args;
use serde::{Deserialize, Serialize};

use farpage_bench_kit::{
    options::{Budget, Fabric, Printing, some_bytes},
    progress::Progress,
    report::{self, median, times_as_fast},
    server::MemoryServer,
    sitting::Sitting,
};
use farpage_bench_limits::{
    cgroup::{Cgroup, Parent, SwapUse},
    swap::Swap,
};

const STEPS: &str = include_str!("versus_numpy.py");
/// Memory for Python and numpy (25 MiB) and what the steps make beside the array (9 MiB), in the
/// cgroups of memmap and swap: farpage's budget is for pages alone. Large arrays make it matter
/// little.
const PROGRAM_BYTES: u64 = 40 << 20;

/// Options of `versus-numpy`.
#[derive(Args, Debug)]
pub struct VersusNumpyOptions {
    /// A Python with numpy and the package `farpage` (pip install ./crates/python)
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Fabric to farpage's memory server
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// Size of the array
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = some_bytes)]
    size: ByteSize,
    /// Local memory for the array: a size or a share of --size
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "25%")]
    budget: Budget,
    /// Page size of farpage's array [default: the package's own]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    page_size: Option<ByteSize>,
    /// Directory for the file of numpy.memmap: on a disk, for a tmpfs is memory [default: the
    /// folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Number of times that everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    #[command(flatten)]
    printing: Printing,
}

/// Place of the array's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// Local memory, as much as the array needs.
    Local,
    Farpage,
    Memmap,
    Swap,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Local, Self::Farpage, Self::Memmap, Self::Swap];

    fn name(self) -> &'static str {
        match self {
            Self::Local => "all local",
            Self::Farpage => "farpage",
            Self::Memmap => "numpy.memmap",
            Self::Swap => "swap",
        }
    }
}

/// Output of a run.
#[derive(Deserialize)]
struct Printed {
    digest: String,
    /// Time of each step in seconds, in order.
    seconds: Vec<(String, f64)>,
}

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    size_bytes: u64,
    budget_bytes: u64,
    /// True if all runs came to the same results.
    verified: bool,
    rows: Vec<Row>,
}

/// Medians of a step.
#[derive(Serialize)]
struct Row {
    step: String,
    seconds: BTreeMap<Kind, f64>,
    /// Speed of farpage divided by that of memmap: the median of the repetitions' ratios.
    over_memmap: f64,
    over_swap: f64,
}

/// Runs the subcommand and prints what it found.
///
/// # Errors
/// Something could not be set up or measured, or two runs came to different results.
pub fn run(options: &VersusNumpyOptions) -> Result<()> {
    let report = measure(options)?;
    let (format, repeat) = (options.printing.format, options.repeat);
    report::conclude(&report, report.verified, format, |it| it.human(repeat))
}

fn measure(options: &VersusNumpyOptions) -> Result<Report> {
    let size_bytes = options.size.as_u64();
    let budget_bytes = options.budget.bytes(size_bytes);
    let folder = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    };
    let folder = folder.context("cannot make a folder for the file of numpy.memmap")?;
    let program = folder.path().join("versus_numpy.py");
    std::fs::write(&program, STEPS).context("cannot write the steps")?;

    // Signals end a run and not this process from here on, so that swap is always taken down.
    let sitting = Sitting::new(false)?;
    sitting.output(python(options, &["-c", "import farpage, numpy"]), "python")?;
    let one = |kind: Kind| -> Result<Printed> {
        let arguments = |kind: &str, place: &str| {
            let page_bytes = options.page_size.map_or(0, |size| size.as_u64());
            let [size, budget, page] =
                &[size_bytes, budget_bytes, page_bytes].map(|n| n.to_string());
            let program = &program.display().to_string();
            let words = [program, kind, size, place, budget, page];
            words.map(str::to_owned)
        };
        // Servers and cgroups live as long as their run.
        let printed = match kind {
            Kind::Local => sitting.output(python(options, &arguments("local", "")), kind.name()),
            Kind::Farpage => {
                let server = MemoryServer::own(options.fabric, 2 * size_bytes)?;
                let url = server.endpoint().to_string();
                sitting.output(python(options, &arguments("farpage", &url)), kind.name())
            }
            Kind::Memmap => {
                let parent = Parent::find()?;
                Cgroup::remove_leftovers(&parent)?;
                let cgroup = Cgroup::set_up(&parent, budget_bytes + PROGRAM_BYTES, SwapUse::Never)?;
                let file = folder.path().join("array").display().to_string();
                let inside = within(&cgroup, python(options, &arguments("memmap", &file)));
                sitting.output(inside, kind.name())
            }
            Kind::Swap => {
                let swap = Swap::set_up(budget_bytes + PROGRAM_BYTES, 2 * size_bytes)?;
                let inside = within(swap.cgroup(), python(options, &arguments("local", "")));
                sitting.output(inside, kind.name())
            }
        };
        let printed = printed?;
        serde_json::from_str(&printed)
            .with_context(|| format!("{} printed no result: {printed}", kind.name()))
    };

    let progress = Progress::new(Kind::ALL.len() as u64 * u64::from(options.repeat));
    let mut rounds: Vec<BTreeMap<Kind, Printed>> = Vec::new();
    for _ in 0..options.repeat {
        let mut round = BTreeMap::new();
        for kind in Kind::ALL {
            progress.phase(kind.name());
            round.insert(kind, one(kind)?);
        }
        rounds.push(round);
    }
    drop(progress);
    Report::of(&rounds, size_bytes, budget_bytes)
}

fn python(options: &VersusNumpyOptions, arguments: &[impl AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::new(&options.python);
    // More threads than one only matter to products of matrices, and there are none.
    command.args(arguments).env("OMP_NUM_THREADS", "1");
    command
}

fn within(cgroup: &Cgroup, command: Command) -> Command {
    let [shell, words @ ..] = cgroup.words();
    let mut inside = Command::new(shell);
    inside.args(words).arg(command.get_program());
    inside.args(command.get_args());
    let variables = command.get_envs();
    inside.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    inside
}

impl Report {
    fn of(rounds: &[BTreeMap<Kind, Printed>], size_bytes: u64, budget_bytes: u64) -> Result<Self> {
        let runs = || rounds.iter().flat_map(BTreeMap::values);
        let first = runs().next().context("there is a first run")?;
        let mut rows = Vec::new();
        for (at, (step, _)) in first.seconds.iter().enumerate() {
            let of = |kind: Kind| -> Result<Vec<f64>> {
                let of_round = |round: &BTreeMap<Kind, Printed>| {
                    let (name, seconds) = round[&kind].seconds.get(at)?;
                    (name == step).then_some(*seconds)
                };
                let seconds: Option<Vec<f64>> = rounds.iter().map(of_round).collect();
                seconds.with_context(|| format!("{} did no step `{step}`", kind.name()))
            };
            let farpage = of(Kind::Farpage)?;
            let over = |kind: Kind| -> Result<f64> {
                Ok(median(&times_as_fast(&farpage, &of(kind)?, false)))
            };
            let medians = Kind::ALL.map(|kind| of(kind).map(|seconds| (kind, median(&seconds))));
            rows.push(Row {
                step: step.clone(),
                over_memmap: over(Kind::Memmap)?,
                over_swap: over(Kind::Swap)?,
                seconds: medians.into_iter().collect::<Result<_>>()?,
            });
        }
        ensure!(!rows.is_empty(), "no step was measured");
        Ok(Self {
            benchmark: "versus-numpy",
            size_bytes,
            budget_bytes,
            verified: runs().all(|run| run.digest == first.digest),
            rows,
        })
    }

    fn human(&self, repeat: u16) -> String {
        let kinds = Kind::ALL.map(Kind::name).join(", s | ");
        let rows = self.rows.iter().map(|row| {
            let seconds = Kind::ALL.map(|kind| format!("{:.3}", row.seconds[&kind]));
            let (step, seconds) = (&row.step, seconds.join(" | "));
            let (memmap, swap) = (row.over_memmap, row.over_swap);
            format!("{step} | {seconds} | {memmap:.2} | {swap:.2}")
        });
        let header = format!(" | {kinds}, s | over memmap | over swap");
        let table = report::filled_table(&header, rows);
        format!(
            "{table}\nAn array of {}, {} of local memory; medians of {repeat} repetitions. The last columns \
             say how many times as fast farpage is.",
            ByteSize(self.size_bytes),
            ByteSize(self.budget_bytes),
        )
    }
}
