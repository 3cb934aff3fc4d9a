//! Results of a run, as JSON and as tables.
//!
//! The rule it keeps: units are in the names, and a figure that does not apply is absent. MB are
//! 10^6 bytes, as STREAM counts them.

use anyhow::{Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{
    data::Dtype,
    options::{Common, FaultMode, Format, Paging},
    out::say,
    yardsticks::{Moved, Yardsticks},
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

/// Settings of a run, defaults included.
#[derive(Debug, Serialize)]
pub struct Config {
    /// Endpoint of the memory server, or what was used instead.
    pub server: String,
    /// Size of a page in bytes.
    pub page_size_bytes: u64,
    /// Number of fillers; none: as many as the load asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fillers: Option<u16>,
    /// `--link-gbps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_gbps: Option<f64>,
    /// `--link-us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_us: Option<f64>,
    /// True if all threads kept to one CPU.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub one_cpu: bool,
    /// True if sizes were tiny.
    pub smoke: bool,
    /// Settings of a benchmark that pages.
    #[serde(flatten)]
    pub paging: Option<PagingConfig>,
    /// Number of threads that computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Number of times that each loop ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations: Option<u16>,
    /// The exponent of a Zipf distribution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zipf: Option<f64>,
    /// Number of reads, and of updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u64>,
    /// Number of faults timed in each state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
}

/// Returns `count` as text, or `auto`.
fn told(count: Option<u16>) -> String {
    count.map_or_else(|| "auto".to_owned(), |count| count.to_string())
}

/// The part of [`Config`] that benchmarks with paging have.
#[derive(Debug, Serialize)]
pub struct PagingConfig {
    size_bytes: u64,
    budget: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    evictors: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_length_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_ahead_pages: Option<u32>,
    fault_mode: FaultMode,
    codec: String,
    data: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<Dtype>,
    seed: u64,
}

impl Config {
    /// Takes the settings from the options; a benchmark adds its own.
    pub fn new(common: &Common, paging: Option<&Paging>, server: impl ToString) -> Self {
        Self {
            server: server.to_string(),
            page_size_bytes: common.page_size.as_u64(),
            fillers: common.fillers,
            link_gbps: common.link_gbps,
            link_us: common.link_us,
            one_cpu: common.one_cpu,
            smoke: common.run.smoke,
            paging: paging.map(|paging| PagingConfig {
                size_bytes: paging.size_bytes(common),
                budget: paging.budget.to_string(),
                evictors: paging.evictors,
                run_length_bytes: paging.run_length.map(|length| length.as_u64()),
                read_ahead_pages: paging.read_ahead,
                fault_mode: paging.fault_mode,
                codec: paging.codec.to_string(),
                data: paging.data.name(),
                dtype: paging.data.dtype,
                seed: paging.seed,
            }),
            threads: None,
            iterations: None,
            zipf: None,
            accesses: None,
            samples: None,
        }
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
    /// Wall time divided by the reads and updates of all threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_per_access: Option<f64>,
    /// Wall time divided by the reads of all threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_per_read: Option<f64>,
    /// Wall time divided by the updates of all threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_per_update: Option<f64>,
    /// Time of the reading threads divided by the pages that they waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_per_read_miss: Option<f64>,
    /// CPU time of the evictors divided by the unchanged pages that they sent away.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evictor_cpu_us_per_page: Option<f64>,
    /// Time of a first write to and a later read of pages far apart, divided by both accesses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_per_sparse_page: Option<f64>,
    /// Private memory that the region took beside its pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata_bytes: Option<u64>,
    /// Time of reads of remote pages while the budget has room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault_us: Option<Percentiles>,
    /// Time of writes to remote pages while each has to push a changed page out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicting_fault_us: Option<Percentiles>,
    /// Time of the kernel's own faults: first touches of ordinary memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_fault_us: Option<Percentiles>,
    /// Time of bare userfaultfd faults that a handler thread resolves by copying.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_round_trip_us: Option<Percentiles>,
    /// Time of bare faults resolved by copying, with both threads on one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_one_cpu_round_trip_us: Option<Percentiles>,
    /// Time of bare faults resolved by copying, with each thread on a CPU of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_two_cpu_round_trip_us: Option<Percentiles>,
    /// Time of bare faults resolved by copying in a signal handler of the faulting thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_in_thread_round_trip_us: Option<Percentiles>,
    /// Time of bare faults resolved by moving in a signal handler of the faulting thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_in_thread_move_round_trip_us: Option<Percentiles>,
    /// Time of bare faults that a handler thread resolves by moving a mapped page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_move_round_trip_us: Option<Percentiles>,
    /// Time of bare faults resolved by a READ over shared memory, a hash and a move.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_read_round_trip_us: Option<Percentiles>,
    /// Time of faults with READ, hash and move in a signal handler of the faulting thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_in_thread_read_round_trip_us: Option<Percentiles>,
    /// Mean time of faults with READ, hash and move by a handler thread that also takes an
    /// unchanged page out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uffd_replace_us: Option<f64>,
    /// The largest difference between an element written and the same element read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_max: Option<f64>,
    /// Rate of copying within this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memcpy_mb_per_s: Option<f64>,
    /// Rate of READs with buffers that stay in the caches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_read_mb_per_s: Option<f64>,
    /// Rate of WRITEs with buffers that stay in the caches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_write_mb_per_s: Option<f64>,
    /// Rate of READs with buffers that are in no cache, as frames are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_cold_read_mb_per_s: Option<f64>,
    /// Rate of WRITEs with buffers that are in no cache, as frames are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_cold_write_mb_per_s: Option<f64>,
    /// Rate of READs and WRITEs in turns with cached buffers, bytes of both directions added up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_read_write_mb_per_s: Option<f64>,
    /// Rate of STREAM's triad with all its transfers and hashes, but without a pager.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work_mb_per_s: Option<f64>,
    /// Rate of STREAM's triad without a pager, with every run moved into a region and out of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_work_mb_per_s: Option<f64>,
}

/// Rate and times of a loop over the arrays.
#[derive(Debug, Serialize)]
pub struct Kernel {
    /// Name, as in McCalpin's STREAM.
    pub name: &'static str,
    /// Rate in the best time.
    pub mb_per_s: f64,
    /// The best time.
    pub min_s: f64,
    /// The mean time.
    pub avg_s: f64,
    /// The worst time.
    pub max_s: f64,
}

/// Computes the figures of a kernel that moved `bytes` each time, in these `seconds`.
pub fn kernel_figures(name: &'static str, bytes: u64, seconds: &[f64]) -> Kernel {
    let min_s = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    Kernel {
        name,
        mb_per_s: bytes as f64 / min_s / 1e6,
        min_s,
        avg_s: seconds.iter().sum::<f64>() / seconds.len() as f64,
        max_s: seconds.iter().copied().fold(0.0, f64::max),
    }
}

/// Percentiles of times, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The 99.9th percentile.
    pub p999: f64,
    /// Number of times.
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

/// Returns the median of `values`, and the order statistics that hold it with 95 %.
pub fn interval(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let off = (0.98 * n.sqrt()).ceil();
    let at = |rank: f64| values[rank.clamp(0.0, n - 1.0) as usize];
    [median(values), at(n / 2.0 - off), at(n / 2.0 + off - 1.0)]
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

/// Work of the pager during the measured part of the run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PagingFigures {
    /// Accesses to pages that were not in local memory.
    pub faults: u64,
    /// Pages that came in.
    pub fills: u64,
    /// Pages that left.
    pub evictions: u64,
    /// Pages that were wanted again while they left.
    pub steals: u64,
    /// Fills ahead of a fault.
    pub prefetches: u64,
    /// Faults that had to wait for a frame.
    pub starved: u64,
    /// Evictions of pages that had not changed.
    pub clean_evictions: u64,
    /// Bytes that the fabric brought.
    pub bytes_read: u64,
    /// Bytes that the fabric took away.
    pub bytes_written: u64,
    /// Bytes of changed pages over bytes stored for them; absent when nothing was stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_ratio: Option<f64>,
    /// Local memory for pages.
    pub budget_bytes: u64,
    /// Most bytes resident at once since the runtime was built.
    pub peak_resident_bytes: u64,
}

impl PagingFigures {
    /// Returns the bytes that went over the fabric in `seconds`.
    pub fn moved(&self, seconds: f64) -> Moved {
        Moved {
            bytes_read: self.bytes_read,
            bytes_written: self.bytes_written,
            seconds,
        }
    }
}

/// Prints a report to standard output: one JSON object, or what `human` makes of it.
///
/// # Errors
/// The errors of [`say`].
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
    ensure!(
        verified,
        "verification FAILED: the figures above are worthless, and this is a bug to report"
    );
    Ok(())
}

impl Report {
    /// Prints this report by the function [`conclude`].
    ///
    /// # Errors
    /// The errors of [`conclude`].
    pub fn conclude(&self, format: Format) -> Result<()> {
        conclude(self, self.verified, format, Self::human)
    }

    fn human(&self) -> String {
        let mut tables = Vec::new();
        if let Some(kernels) = &self.figures.kernels {
            let mut table = table(["kernel", "MB/s", "best s", "mean s", "worst s"]);
            for k in kernels {
                let seconds = [k.min_s, k.avg_s, k.max_s].map(|s| format!("{s:.3}"));
                table.add_row(right(
                    [k.name.to_owned(), format!("{:.0}", k.mb_per_s)]
                        .into_iter()
                        .chain(seconds),
                ));
            }
            tables.push(table);
        }
        tables.extend(self.percentile_table());
        tables.extend(self.single_figures());
        tables.push(self.circumstances());
        let mut texts: Vec<_> = tables.iter().map(Table::to_string).collect();
        texts.extend(self.figures.yardsticks.as_ref().map(ToString::to_string));
        texts.join("\n")
    }

    fn percentile_table(&self) -> Option<Table> {
        let figures = &self.figures;
        let rows: Vec<_> = [
            ("kernel's own 4 KiB fault", figures.kernel_fault_us),
            ("bare userfaultfd, COPY", figures.uffd_round_trip_us),
            (
                "bare userfaultfd, COPY, one CPU",
                figures.uffd_one_cpu_round_trip_us,
            ),
            (
                "bare userfaultfd, COPY, two CPUs",
                figures.uffd_two_cpu_round_trip_us,
            ),
            ("bare userfaultfd, MOVE", figures.uffd_move_round_trip_us),
            (
                "in the thread itself, COPY",
                figures.uffd_in_thread_round_trip_us,
            ),
            (
                "in the thread itself, MOVE",
                figures.uffd_in_thread_move_round_trip_us,
            ),
            ("READ, hash, MOVE", figures.uffd_read_round_trip_us),
            (
                "in the thread itself, READ, hash, MOVE",
                figures.uffd_in_thread_read_round_trip_us,
            ),
            ("read, room in the budget", figures.fault_us),
            ("write, changed pages leave", figures.evicting_fault_us),
        ]
        .into_iter()
        .filter_map(|(name, percentiles)| Some((name, percentiles?)))
        .collect();
        let mut table = table([
            "fault, microseconds",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "samples",
        ]);
        for (name, p) in &rows {
            let times = [p.p50, p.p90, p.p99, p.p999].map(|us| format!("{us:.1}"));
            table.add_row(right(
                [name.to_string()]
                    .into_iter()
                    .chain(times)
                    .chain([p.samples.to_string()]),
            ));
        }
        (!rows.is_empty()).then_some(table)
    }

    fn single_figures(&self) -> Option<Table> {
        let f = &self.figures;
        let mut table = table(["figure", ""]);
        for (name, value, unit) in [
            ("an access", f.us_per_access, "us"),
            ("a read", f.us_per_read, "us"),
            ("an update", f.us_per_update, "us"),
            ("a read that misses", f.us_per_read_miss, "us"),
            (
                "evictors' CPU time, a clean page",
                f.evictor_cpu_us_per_page,
                "us",
            ),
            (
                "READ, hash, MOVE; another MOVE and hash out",
                f.uffd_replace_us,
                "us",
            ),
            ("a page of a sparse region", f.us_per_sparse_page, "us"),
            (
                "page metadata",
                f.metadata_bytes.map(|bytes| bytes as f64 / 1024.0),
                "KiB",
            ),
            ("memcpy", f.memcpy_mb_per_s, "MB/s"),
            ("fabric READ, hot buffers", f.raw_read_mb_per_s, "MB/s"),
            ("fabric WRITE, hot buffers", f.raw_write_mb_per_s, "MB/s"),
            (
                "fabric READ, cold buffers",
                f.raw_cold_read_mb_per_s,
                "MB/s",
            ),
            (
                "fabric WRITE, cold buffers",
                f.raw_cold_write_mb_per_s,
                "MB/s",
            ),
            (
                "fabric READ + WRITE, hot buffers",
                f.raw_read_write_mb_per_s,
                "MB/s",
            ),
            ("triad's work without a pager", f.work_mb_per_s, "MB/s"),
            ("the same, moved in and out", f.moved_work_mb_per_s, "MB/s"),
        ] {
            if let Some(value) = value {
                let digits = if unit == "us" { 2 } else { 0 };
                table.add_row(right([name.to_owned(), format!("{value:.digits$} {unit}")]));
            }
        }
        (table.row_iter().next().is_some()).then_some(table)
    }

    fn circumstances(&self) -> Table {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let mut rows = vec![
            (
                "verified",
                if self.verified {
                    "yes, every element"
                } else {
                    "NO: FAILED"
                }
                .to_owned(),
            ),
            ("server", self.config.server.clone()),
            (
                "page size",
                format!("{} KiB", self.config.page_size_bytes >> 10),
            ),
        ];
        if let Some(paging) = &self.config.paging {
            rows.push((
                "arrays",
                format!("{}, {} data", mib(paging.size_bytes), paging.data),
            ));
            let threads = self.config.threads.unwrap_or(1);
            rows.push((
                "threads",
                format!(
                    "{threads} + {} fillers + {} evictors",
                    told(self.config.fillers),
                    told(paging.evictors)
                ),
            ));
        }
        if let Some(p) = &self.paging {
            rows.push(("budget", mib(p.budget_bytes)));
            rows.push(("peak resident", mib(p.peak_resident_bytes)));
            rows.push((
                "page faults",
                format!("{}, {} waited for room", p.faults, p.starved),
            ));
            rows.push((
                "pages brought in",
                format!("{}, {} ahead of a fault", p.fills, p.prefetches),
            ));
            rows.push((
                "pages sent away",
                format!(
                    "{}, {} unchanged, {} wanted again",
                    p.evictions, p.clean_evictions, p.steals
                ),
            ));
            rows.push((
                "read / written remotely",
                format!("{} / {}", mib(p.bytes_read), mib(p.bytes_written)),
            ));
            if let Some(ratio) = p.compression_ratio {
                rows.push(("compression", format!("{ratio:.2} : 1")));
            }
        }
        let mut table = table(["run", self.benchmark]);
        for (name, value) in rows {
            table.add_row(right([name.to_owned(), value]));
        }
        table
    }
}

/// Makes an empty table for people; the first column holds names.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(right(header.map(str::to_owned)));
    table
}

/// Makes a row whose first cell is a name and whose others are figures.
pub fn right(row: impl IntoIterator<Item = String>) -> Vec<Cell> {
    let align = |at| {
        if at == 0 {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        }
    };
    row.into_iter()
        .enumerate()
        .map(|(at, text)| Cell::new(text).set_alignment(align(at)))
        .collect()
}
