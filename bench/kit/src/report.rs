//! Results of a run, as JSON and as tables.
//!
//! The rule it keeps: units are in the names, and a figure that does not apply is absent. MB are
//! 10^6 bytes, as STREAM counts them.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    options::{Common, Format, Paging},
    out::say,
    paging::PagingFigures,
    yardsticks::Yardsticks,
};

/// Result of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the subcommand.
    pub benchmark: &'static str,
    /// True if all data was what it had to be.
    pub verified: bool,
    /// Settings of the run.
    pub config: Config,
    /// Figures of the benchmark.
    #[serde(flatten)]
    pub figures: Figures,
    /// Work of the pager meanwhile; none without a pager.
    #[serde(flatten)]
    pub paging: Option<PagingFigures>,
}

/// Settings of a run by name, defaults included; those that were not chosen are absent.
#[derive(Debug, Serialize)]
pub struct Config(Map<String, Value>);

impl Config {
    /// Takes the settings from the options. `server` is the memory server, or what was used
    /// instead.
    pub fn new(common: &Common, server: impl ToString) -> Self {
        Self(Map::new()).with(json!({
            "server": server.to_string(),
            "page_size_bytes": common.page_size.as_u64(),
            "fillers": common.fillers,
            "link_gbps": common.link_gbps,
            "link_us": common.link_us,
            "one_cpu": common.one_cpu.then_some(true),
            "smoke": common.run.smoke,
        }))
    }

    /// Adds the settings of a benchmark that pages.
    pub fn with_paging(self, paging: &Paging) -> Self {
        self.with(json!({
            "size_bytes": paging.size_bytes(),
            "budget": paging.budget.to_string(),
            "evictors": paging.evictors,
            "run_length_bytes": paging.run_length.map(|length| length.as_u64()),
            "read_ahead_pages": paging.read_ahead,
            "fault_mode": paging.fault_mode,
            "codec": paging.codec.to_string(),
            "redundancy": (paging.redundancy.copies() > 1).then(|| paging.redundancy.to_string()),
            "data": paging.data.name(),
            "dtype": paging.data.dtype,
            "seed": paging.seed,
        }))
    }

    /// Adds the settings of the object `own`, except for those that are null.
    pub fn with(mut self, own: Value) -> Self {
        if let Value::Object(own) = own {
            let chosen = own.into_iter().filter(|(_, value)| !value.is_null());
            self.0.extend(chosen);
        }
        self
    }

    /// Returns a setting as text; `None` if it was not chosen.
    fn text(&self, name: &str) -> Option<String> {
        let value = self.0.get(name)?;
        let text = value.as_str().map(str::to_owned);
        Some(text.unwrap_or_else(|| value.to_string()))
    }

    fn bytes(&self, name: &str) -> Option<u64> {
        self.0.get(name)?.as_u64()
    }
}

/// Figures of a benchmark; each fills in its own.
#[derive(Debug, Default, Serialize)]
pub struct Figures {
    /// Kernels of STREAM, or a field's writes and reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<Vec<Kernel>>,
    /// Bounds that the figures are compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yardsticks: Option<Yardsticks>,
    /// Times of faults, added by [`Figures::add_fault`].
    #[serde(flatten)]
    pub faults: BTreeMap<&'static str, Percentiles>,
    /// Single figures, added by [`Figures::add`].
    #[serde(flatten)]
    pub single: BTreeMap<&'static str, f64>,
}

/// Times of faults: `name: name in tables`.
const FAULTS: [&str; 11] = [
    "kernel_fault_us: kernel's own 4 KiB fault",
    "uffd_round_trip_us: bare userfaultfd, COPY",
    "uffd_one_cpu_round_trip_us: bare userfaultfd, COPY, one CPU",
    "uffd_two_cpu_round_trip_us: bare userfaultfd, COPY, two CPUs",
    "uffd_move_round_trip_us: bare userfaultfd, MOVE",
    "uffd_in_thread_round_trip_us: in the thread itself, COPY",
    "uffd_in_thread_move_round_trip_us: in the thread itself, MOVE",
    "uffd_read_round_trip_us: READ, hash, MOVE",
    "uffd_in_thread_read_round_trip_us: in the thread itself, READ, hash, MOVE",
    "fault_us: read, room in the budget",
    "evicting_fault_us: write, changed pages leave",
];

/// Single figures: `name: name in tables`; those without one stand in another table.
const SINGLE: [&str; 17] = [
    "us_per_access: an access",
    "us_per_read: a read",
    "us_per_update: an update",
    "us_per_read_miss: a read that misses",
    "evictor_cpu_us_per_page: evictors' CPU time, a clean page",
    "uffd_replace_us: READ, hash, MOVE; another MOVE and hash out",
    "us_per_sparse_page: a page of a sparse region",
    "metadata_bytes: page metadata",
    "memcpy_mb_per_s: memcpy",
    "raw_read_mb_per_s: fabric READ, hot buffers",
    "raw_write_mb_per_s: fabric WRITE, hot buffers",
    "raw_cold_read_mb_per_s: fabric READ, cold buffers",
    "raw_cold_write_mb_per_s: fabric WRITE, cold buffers",
    "raw_read_write_mb_per_s: fabric READ + WRITE, hot buffers",
    "work_mb_per_s: triad's work without a pager",
    "moved_work_mb_per_s: the same, moved in and out",
    "error_max: ",
];

fn named<const N: usize>(
    table: &'static [&'static str; N],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    table.iter().filter_map(|figure| figure.split_once(": "))
}

impl Figures {
    /// Adds single figures. What could not be measured is left out.
    pub fn add<F: Into<Option<f64>>>(&mut self, name: &'static str, figure: F) {
        assert!(named(&SINGLE).any(|(known, _)| known == name), "{name}");
        self.single
            .extend(figure.into().map(|figure| (name, figure)));
    }

    /// Adds the percentiles of a fault's times in nanoseconds. What could not be measured is left
    /// out.
    pub fn add_fault<'a>(
        &mut self,
        name: &'static str,
        times: impl Into<Option<&'a Histogram<u64>>>,
    ) {
        assert!(named(&FAULTS).any(|(known, _)| known == name), "{name}");
        let times = times.into().map(|times| (name, Percentiles::of(times)));
        self.faults.extend(times);
    }
}

/// Rate in the best time, and the best, mean and worst time of a loop over the arrays, which is
/// named as in McCalpin's STREAM.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Kernel {
    pub name: &'static str,
    pub mb_per_s: f64,
    pub min_s: f64,
    pub avg_s: f64,
    pub max_s: f64,
}

/// Computes the figures of a kernel that moved `bytes` each time, in these `seconds`.
pub fn kernel_figures(name: &'static str, bytes: u64, seconds: &[f64]) -> Kernel {
    let [_, min_s, max_s] = spread(seconds);
    Kernel {
        name,
        mb_per_s: bytes as f64 / min_s / 1e6,
        min_s,
        avg_s: seconds.iter().sum::<f64>() / seconds.len() as f64,
        max_s,
    }
}

/// Percentiles of times, in microseconds, and the number of times.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub samples: u64,
}

impl Percentiles {
    /// Takes the percentiles from a histogram of nanoseconds.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        let us = |percent| histogram.value_at_percentile(percent) as f64 / 1000.0;
        Self {
            p50: us(50.0),
            p90: us(90.0),
            p99: us(99.0),
            p999: us(99.9),
            samples: histogram.len(),
        }
    }
}

/// Returns the median; of an even number of values, the mean of the middle two.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[half],
        _ => (sorted[half - 1] + sorted[half]) / 2.0,
    }
}

/// Returns for each repetition how many times as fast `ours` is as `theirs`, whose figures are
/// rates if `more_is_better`, and times otherwise.
pub fn times_as_fast(ours: &[f64], theirs: &[f64], more_is_better: bool) -> Vec<f64> {
    let pairs = ours.iter().zip(theirs);
    let ratios = pairs.map(|(ours, theirs)| match more_is_better {
        true => ours / theirs,
        false => theirs / ours,
    });
    ratios.collect()
}

/// Figures of two sides that take turns.
#[derive(Default)]
pub struct Pairs {
    one: Vec<f64>,
    other: Vec<f64>,
}

impl Pairs {
    /// Measures a pair; in every second one, `other` comes first.
    pub fn measure(
        &mut self,
        one: impl FnOnce() -> Result<f64>,
        other: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        let (one, other) = match self.one.len() % 2 {
            0 => (one()?, other()?),
            _ => {
                let other = other()?;
                (one()?, other)
            }
        };
        self.one.push(one);
        self.other.push(other);
        Ok(())
    }

    /// Returns the median of each side.
    pub fn medians(&self) -> [f64; 2] {
        [median(&self.one), median(&self.other)]
    }

    /// Returns the median of the other side over the one, and the order statistics that hold it
    /// with 95 %.
    pub fn other_over_one(&self) -> [f64; 3] {
        let mut ratios = times_as_fast(&self.one, &self.other, false);
        ratios.sort_by(f64::total_cmp);
        let n = ratios.len() as f64;
        let off = (0.98 * n.sqrt()).ceil();
        let at = |rank: f64| ratios[rank.clamp(0.0, n - 1.0) as usize];
        [median(&ratios), at(n / 2.0 - off), at(n / 2.0 + off - 1.0)]
    }
}

/// Returns the geometric mean of `ratios`, or 1 if there are none.
pub fn geometric_mean(ratios: &[f64]) -> f64 {
    let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    (logs / ratios.len().max(1) as f64).exp()
}

/// Makes a histogram for nanoseconds up to a minute, to three digits.
pub fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000_000, 3).expect("the bounds above are valid")
}

/// Prints a report to standard output: one JSON object, or what `human` makes of it.
pub fn print<R: Serialize>(report: &R, format: Format, human: impl Fn(&R) -> String) -> Result<()> {
    say(match format {
        Format::Json => {
            serde_json::to_string(report).expect("a report has string keys and finite figures")
        }
        Format::Human => human(report),
    })
}

/// Prints a report like [`print`](print()), and fails unless it is `verified`.
///
/// # Errors
/// `verified` is false, so that the figures mean nothing; and the errors of [`say`].
pub fn conclude<R: Serialize>(
    report: &R,
    verified: bool,
    format: Format,
    human: impl Fn(&R) -> String,
) -> Result<()> {
    print(report, format, human)?;
    let failed =
        "verification FAILED: the figures above are worthless, and this is a bug to report";
    ensure!(verified, failed);
    Ok(())
}

impl Report {
    /// Prints this report by the function [`conclude`].
    pub fn conclude(&self, format: Format) -> Result<()> {
        conclude(self, self.verified, format, Self::human)
    }

    fn human(&self) -> String {
        let figures = &self.figures;
        let kernels = figures.kernels.iter().flatten().map(|k| {
            let (name, rate) = (k.name, k.mb_per_s);
            let [best, mean, worst] = [k.min_s, k.avg_s, k.max_s];
            format!("{name} | {rate:.0} | {best:.3} | {mean:.3} | {worst:.3}")
        });
        let kernels = filled_table("kernel | MB/s | best s | mean s | worst s", kernels);
        let faults = named(&FAULTS).filter_map(|(name, shown)| {
            let p = figures.faults.get(name)?;
            let low = format!("{:.1} | {:.1}", p.p50, p.p90);
            let high = format!("{:.1} | {:.1}", p.p99, p.p999);
            Some(format!("{shown} | {low} | {high} | {}", p.samples))
        });
        let header = "fault, microseconds | p50 | p90 | p99 | p99.9 | samples";
        let faults = filled_table(header, faults);
        let single = named(&SINGLE).filter_map(|(name, shown)| {
            let figure = figures.single.get(name).filter(|_| !shown.is_empty())?;
            let figure = match name {
                name if name.ends_with("mb_per_s") => format!("{figure:.0} MB/s"),
                name if name.ends_with("bytes") => format!("{:.0} KiB", figure / 1024.0),
                _ => format!("{figure:.2} us"),
            };
            Some(format!("{shown} | {figure}"))
        });
        let single = filled_table("figure | ", single);
        let tables = [kernels, faults, single].into_iter();
        let tables = tables.filter(|table| table.row_iter().next().is_some());
        let mut texts: Vec<_> = tables.map(|table| table.to_string()).collect();
        texts.push(self.circumstances().to_string());
        texts.extend(figures.yardsticks.as_ref().map(ToString::to_string));
        texts.join("\n")
    }

    fn circumstances(&self) -> Table {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let config = &self.config;
        let told = |name: &str| config.text(name).unwrap_or_else(|| "auto".to_owned());
        let page_bytes = config.bytes("page_size_bytes").unwrap_or_default();
        let mut rows = vec![
            ("server", told("server")),
            ("page size", format!("{} KiB", page_bytes >> 10)),
        ];
        if let Some(bytes) = config.bytes("size_bytes") {
            let threads = config.bytes("threads").unwrap_or(1);
            let (fillers, evictors) = (told("fillers"), told("evictors"));
            let threads = format!("{threads} + {fillers} fillers + {evictors} evictors");
            rows.push(("arrays", format!("{}, {} data", mib(bytes), told("data"))));
            rows.push(("threads", threads));
        }
        if let Some(p) = &self.paging {
            let c = &p.counts;
            let faults = format!("{}, {} waited for room", c.faults, c.starved);
            let fills = format!("{}, {} ahead of a fault", c.fills, c.prefetches);
            let (left, clean, steals) = (c.evictions, c.clean_evictions, c.steals);
            let evictions = format!("{left}, {clean} unchanged, {steals} wanted again");
            let moved = format!("{} / {}", mib(c.bytes_read), mib(c.bytes_written));
            rows.extend([
                ("budget", mib(p.budget_bytes)),
                ("peak resident", mib(p.peak_resident_bytes)),
                ("page faults", faults),
                ("pages brought in", fills),
                ("pages sent away", evictions),
                ("read / written remotely", moved),
            ]);
            let ratio = p.compression_ratio.map(|ratio| format!("{ratio:.2} : 1"));
            rows.extend(ratio.map(|ratio| ("compression", ratio)));
        }
        run_table(self.benchmark, self.verified, rows)
    }
}

/// Makes a table for people, whose first column holds names and whose others figures. Bars separate
/// the cells of the header and of each row, such as `codec | ratio`.
pub fn filled_table(header: &str, rows: impl IntoIterator<Item = String>) -> Table {
    let cells = |row: &str| -> Vec<Cell> {
        let cell = |(at, text)| {
            Cell::new(text).set_alignment(match at {
                0 => CellAlignment::Left,
                _ => CellAlignment::Right,
            })
        };
        row.split(" | ").enumerate().map(cell).collect()
    };
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(cells(header));
    for row in rows {
        table.add_row(cells(&row));
    }
    table
}

/// Makes the table of a run's circumstances, the verification first.
pub fn run_table<S: ToString>(
    benchmark: &str,
    verified: bool,
    rows: impl IntoIterator<Item = (&'static str, S)>,
) -> Table {
    let verified = if verified { "yes" } else { "NO: FAILED" };
    let rows = rows.into_iter();
    let rows = rows.map(|(name, value)| format!("{name} | {}", value.to_string()));
    let verified = [format!("verified | {verified}")];
    filled_table(
        &format!("run | {benchmark}"),
        verified.into_iter().chain(rows),
    )
}

/// Formats a figure and its range, such as `1.50 (1.21 to 1.72)`.
pub fn ranged([figure, low, high]: [f64; 3], digits: usize) -> String {
    format!("{figure:.digits$} ({low:.digits$} to {high:.digits$})")
}

/// Formats the median of `values`, with their range if there are several.
pub fn ranged_if_several(values: &[f64], digits: usize) -> String {
    match values {
        [value] => format!("{value:.digits$}"),
        _ => ranged(spread(values), digits),
    }
}

/// Returns the word for a target that is met or not.
pub fn yes(met: bool) -> &'static str {
    if met { "yes" } else { "NO" }
}

/// Returns the median, the least and the greatest of `values`.
pub fn spread(values: &[f64]) -> [f64; 3] {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    [median(values), least, greatest]
}
