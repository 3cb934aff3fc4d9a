//! Every combination of worker counts, run lengths and read-ahead lengths, and how close farpage's
//! own choice comes to the best.
//!
//! The rule it keeps: the best of many noisy points looks better than it is, so the grid only says
//! which points to look at. These points and farpage's own choice are then measured afresh in
//! turns, and only the new figures are compared.

use clap::Args;
use std::{fmt, thread};

use anyhow::{Context, Result};
use bytesize::ByteSize;
use serde::Serialize;
use serde_json::json;

use farpage_bench_kit::{
    options::{Fabric, Format, Printing, page_size, positive, some_bytes},
    out::say,
    progress::Progress,
    report::{self, median},
    sitting::Sitting,
};

/// Lengths of runs in bytes: a page of the usual size, what farpage chooses for fast links, and
/// more than that.
const RUN_LENGTHS: [u64; 3] = [64 << 10, 512 << 10, 2 << 20];
/// Bytes to read ahead. 0: never; more than the last is more than fits into small budgets.
const READ_AHEAD: [u64; 3] = [0, 1 << 20, 4 << 20];
/// Number of times that the best point and farpage's own choice are measured once more.
const ROUNDS: u16 = 5;

/// Workload: its name, its command and the path of its figure.
struct Workload {
    name: &'static str,
    unit: &'static str,
    command: &'static str,
    /// Option for the size, so that a point takes seconds. With --smoke the benchmarks choose one.
    size: &'static str,
    figure: &'static str,
    more_is_better: bool,
}

const WORKLOADS: [Workload; 2] = [
    Workload {
        name: "STREAM triad",
        unit: "MB/s",
        command: "stream --iterations 3",
        size: "",
        figure: "/kernels/3/mb_per_s",
        more_is_better: true,
    },
    Workload {
        name: "random access",
        unit: "us",
        command: "random --no-advice",
        size: "--accesses 40000",
        figure: "/us_per_access",
        more_is_better: false,
    },
];

/// Settings that farpage is told.
#[derive(Clone, Copy, PartialEq, Serialize)]
struct Setting {
    fillers: usize,
    evictors: usize,
    run_bytes: u64,
    read_ahead_pages: u64,
}

#[derive(Serialize)]
struct Point {
    /// Setting of the point; none: farpage chooses.
    setting: Option<Setting>,
    triad_mb_per_s: f64,
    random_us_per_access: f64,
}

/// Farpage's own choice against the grid's best point.
#[derive(Serialize)]
struct Share {
    workload: &'static str,
    unit: &'static str,
    best: Setting,
    best_figure: f64,
    auto_figure: f64,
    /// Speed of farpage's own choice divided by that of the best point.
    auto_share_of_best: f64,
}

/// Options of `sweep`.
#[derive(Args, Debug)]
pub struct SweepOptions {
    /// Fabric to the benchmarks' own memory servers
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    page_size: ByteSize,
    /// Size of all remote arrays together, of which a quarter fits into the budget [default:
    /// 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    size: Option<ByteSize>,
    /// Makes the fabric behave like a link of GBPS gigabits per second in each direction
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    link_gbps: Option<f64>,
    /// Number of times that each point is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    #[command(flatten)]
    printing: Printing,
    /// Tiny sizes, few points, once: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with_all = ["repeat", "size"])]
    smoke: bool,
}

/// Runs the subcommand `sweep` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &SweepOptions) -> Result<()> {
    let page_bytes = options.page_size.as_u64();
    let (settings, repeat, rounds) = match options.smoke {
        true => (grid(&[1], &[512 << 10], &[0, 1 << 20], page_bytes), 1, 1),
        false => {
            let cpus = thread::available_parallelism().context("cannot count the CPUs")?;
            let counts = counts(cpus.get().min(4));
            let settings = grid(&counts, &RUN_LENGTHS, &READ_AHEAD, page_bytes);
            (settings, options.repeat, ROUNDS)
        }
    };
    let settings: Vec<_> = [None]
        .into_iter()
        .chain(settings.into_iter().map(Some))
        .collect();
    let mut sitting = Sitting::new(options.smoke)?;
    let steps = u64::from(repeat) * settings.len() as u64 + u64::from(rounds) * 2;
    let progress = Progress::new(steps);
    let mut measure = |workload: &Workload, setting: Option<Setting>| {
        progress.phase(told(setting));
        let size = if options.smoke { "" } else { workload.size };
        let command = format!(
            "{} {size} {}",
            workload.command,
            arguments(options, setting)
        );
        sitting.next_repetition();
        sitting.figure(&command, workload.figure)
    };
    // 1. The grid.
    let mut figures = vec![[const { Vec::new() }; 2]; settings.len()];
    for _ in 0..repeat {
        for (setting, figures) in settings.iter().zip(&mut figures) {
            for (workload, figures) in WORKLOADS.iter().zip(figures) {
                figures.push(measure(workload, *setting)?);
            }
            progress.step(1);
        }
    }
    let points: Vec<Point> = settings
        .into_iter()
        .zip(&figures)
        .map(|(setting, [triad, random])| Point {
            setting,
            triad_mb_per_s: median(triad),
            random_us_per_access: median(random),
        })
        .collect();
    // 2. The grid's best points once more, in turns with farpage's own choice.
    let mut shares = Vec::new();
    for (number, workload) in WORKLOADS.iter().enumerate() {
        let speed = |figure: f64| match workload.more_is_better {
            true => figure,
            false => 1.0 / figure,
        };
        let (best, _) = (points.iter().zip(&figures))
            .filter_map(|(point, figures)| Some((point.setting?, speed(median(&figures[number])))))
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
            .context("the grid is never empty")?;
        let (mut of_best, mut of_auto) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            of_auto.push(measure(workload, None)?);
            of_best.push(measure(workload, Some(best))?);
            progress.step(1);
        }
        let (auto_figure, best_figure) = (median(&of_auto), median(&of_best));
        shares.push(Share {
            workload: workload.name,
            unit: workload.unit,
            best,
            best_figure,
            auto_figure,
            auto_share_of_best: speed(auto_figure) / speed(best_figure),
        });
    }
    drop(progress);
    match options.printing.format {
        Format::Human => {
            say(table(&points))?;
            for share in &shares {
                say(share)?;
            }
        }
        Format::Json => say(json!({
            "benchmark": "sweep",
            "points": points,
            "shares": shares,
            "reports": sitting.into_reports(),
        }))?,
    }
    Ok(())
}

/// Returns 1, 2, 4, ... up to `most`, and `most` itself.
fn counts(most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..)
        .map(|power| 1 << power)
        .take_while(|&count| count < most)
        .collect();
    counts.push(most);
    counts
}

fn grid(
    counts: &[usize],
    run_lengths: &[u64],
    read_ahead: &[u64],
    page_bytes: u64,
) -> Vec<Setting> {
    let mut grid = Vec::new();
    for &fillers in counts {
        for &evictors in counts {
            for &run_bytes in run_lengths {
                grid.extend(read_ahead.iter().map(|&read_ahead| Setting {
                    fillers,
                    evictors,
                    run_bytes,
                    read_ahead_pages: read_ahead.div_ceil(page_bytes),
                }));
            }
        }
    }
    grid
}

/// Returns the arguments of `stream` and `random`.
fn arguments(options: &SweepOptions, setting: Option<Setting>) -> String {
    let mut arguments = format!(
        "--fabric {} --page-size {}B",
        options.fabric,
        options.page_size.as_u64()
    );
    // With --smoke the benchmarks choose sizes of their own.
    if !options.smoke {
        let size = options.size.map_or(256 << 20, |size| size.as_u64());
        arguments += &format!(" --size {size}B");
    }
    if let Some(gbps) = options.link_gbps {
        arguments += &format!(" --link-gbps {gbps}");
    }
    if let Some(Setting {
        fillers,
        evictors,
        run_bytes,
        read_ahead_pages,
    }) = setting
    {
        arguments += &format!(
            " --fillers {fillers} --evictors {evictors} --run-length {run_bytes}B --read-ahead {read_ahead_pages}"
        );
    }
    arguments
}

fn told(setting: Option<Setting>) -> String {
    setting.map_or_else(|| "auto".to_owned(), |setting| setting.to_string())
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} fillers, {} evictors, runs of {}, {} pages ahead",
            self.fillers,
            self.evictors,
            ByteSize::b(self.run_bytes),
            self.read_ahead_pages
        )
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Share {
            workload,
            unit,
            best,
            best_figure,
            auto_figure,
            auto_share_of_best,
        } = self;
        write!(
            f,
            "{workload}: best with {best}. Measured again in turns: {best_figure:.4} {unit}, left to itself {auto_figure:.4} {unit}, \
             {auto_share_of_best:.3} of the best"
        )
    }
}

fn table(points: &[Point]) -> comfy_table::Table {
    let mut table = report::table([
        "fillers",
        "evictors",
        "runs",
        "pages ahead",
        "triad",
        "random access",
    ]);
    for point in points {
        let told = match point.setting {
            Some(s) => [
                s.fillers.to_string(),
                s.evictors.to_string(),
                ByteSize::b(s.run_bytes).to_string(),
                s.read_ahead_pages.to_string(),
            ],
            None => ["auto"; 4].map(str::to_owned),
        };
        table.add_row(report::right(told.into_iter().chain([
            format!("{:.0} MB/s", point.triad_mb_per_s),
            format!("{:.2} us", point.random_us_per_access),
        ])));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_end_with_all_cpus() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
    }

    #[test]
    fn the_grid_has_every_combination_once() {
        let grid = grid(&[1, 2, 4], &[64 << 10, 512 << 10], &[0, 1 << 20], 4096);
        assert_eq!(grid.len(), 36);
        assert_eq!(grid[1].read_ahead_pages, 256);
        for (i, setting) in grid.iter().enumerate() {
            assert!(!grid[..i].contains(setting));
        }
    }
}
