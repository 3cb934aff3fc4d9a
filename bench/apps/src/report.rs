//! Results of a run of the applications: JSON, tables, and the data of the picture.
//!
//! The rule it keeps: performance is the local run's time over the run's, so that 1 is as fast as
//! local memory, whatever was measured.

use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use farpage_bench_kit::{
    options::Format,
    report::{self, geometric_mean},
};

/// Results of a run.
#[derive(Debug, Serialize)]
pub(crate) struct AppsReport {
    pub(crate) benchmark: &'static str,
    /// True if every result of every application was right.
    pub(crate) verified: bool,
    pub(crate) config: Config,
    pub(crate) apps: Vec<AppFigures>,
    /// Summary of each share, in the order of the configuration.
    pub(crate) summary: Vec<Summary>,
}

/// Settings of the run, defaults included.
#[derive(Debug, Serialize)]
pub(crate) struct Config {
    pub(crate) server: String,
    /// Bytes that were asked for as each application's data.
    pub(crate) size_bytes: u64,
    pub(crate) shares_percent: Vec<f64>,
    pub(crate) threads: usize,
    pub(crate) repeat: u16,
    pub(crate) smoke: bool,
}

/// Results of an application.
#[derive(Debug, Serialize)]
pub(crate) struct AppFigures {
    pub(crate) name: &'static str,
    /// True if the application has a part in the means.
    pub(crate) in_means: bool,
    pub(crate) verified: bool,
    pub(crate) page_size_bytes: u64,
    /// Bytes of the arrays that may be remote.
    pub(crate) remote_bytes: u64,
    /// Bytes that are local by design, which count against the local memory.
    pub(crate) local_bytes: u64,
    pub(crate) shares: Vec<ShareFigures>,
}

/// Results of an application with a share of its memory local.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ShareFigures {
    pub(crate) share_percent: f64,
    pub(crate) budget_bytes: u64,
    /// Median of the repetitions, as `local_seconds` and `performance` are.
    pub(crate) seconds: f64,
    /// Seconds of the same work in local memory, before each repetition.
    pub(crate) local_seconds: f64,
    /// Time of the local run over that of the run with paging.
    pub(crate) performance: f64,
    pub(crate) performance_min: f64,
    pub(crate) performance_max: f64,
    /// Highest performance with the bytes that moved, if nothing but computing and the work on
    /// these pages took time.
    pub(crate) floor: f64,
    /// Results of one thread, beside one in local memory. Absent where all runs have one thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) one_thread: Option<OneThread>,
    #[serde(flatten)]
    pub(crate) paging: Paging,
}

/// Results of an application that one thread runs, while paging has the other cores to itself.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct OneThread {
    /// Median of the repetitions, as `local_seconds` and `performance` are.
    pub(crate) seconds: f64,
    pub(crate) local_seconds: f64,
    pub(crate) performance: f64,
}

/// Counts of the pager: means of the repetitions' timed parts.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Paging {
    pub(crate) faults: u64,
    pub(crate) fills: u64,
    /// Fills ahead of a fault.
    pub(crate) prefetches: u64,
    /// Faults that had to wait for a frame.
    pub(crate) starved: u64,
    pub(crate) evictions: u64,
    /// Evictions of pages that had not changed.
    pub(crate) clean_evictions: u64,
    pub(crate) steals: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// Results of all applications with a share of their memory local.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) share_percent: f64,
    /// Geometric mean of the performances. Absent where no application that counts was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) geometric_mean: Option<f64>,
    /// Geometric mean of the same applications' floors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) geometric_mean_floor: Option<f64>,
    /// Geometric mean of the same applications' performances with one thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) geometric_mean_one_thread: Option<f64>,
    pub(crate) worst: &'static str,
    pub(crate) worst_performance: f64,
}

/// Sums up applications that were all measured with `shares`.
pub(crate) fn summarise(apps: &[AppFigures], shares: &[f64]) -> Vec<Summary> {
    let summary = |(at, &share_percent): (usize, &f64)| {
        let figures = || {
            apps.iter()
                .map(move |app| (app, app.shares[at].performance))
        };
        let (worst, worst_performance) = figures().min_by(|a, b| a.1.total_cmp(&b.1))?;
        let mean = |figure: fn(&ShareFigures) -> Option<f64>| {
            let counted = apps.iter().filter(|app| app.in_means);
            let ratios: Vec<f64> = counted.filter_map(|app| figure(&app.shares[at])).collect();
            (!ratios.is_empty()).then(|| geometric_mean(&ratios))
        };
        Some(Summary {
            share_percent,
            geometric_mean: mean(|share| Some(share.performance)),
            geometric_mean_floor: mean(|share| Some(share.floor)),
            geometric_mean_one_thread: mean(|share| Some(share.one_thread?.performance)),
            worst: worst.name,
            worst_performance,
        })
    };
    shares.iter().enumerate().filter_map(summary).collect()
}

impl AppsReport {
    /// Prints the report to standard output; fails if something was not verified.
    pub(crate) fn conclude(&self, format: Format) -> Result<()> {
        report::conclude(self, self.verified, format, Self::human)
    }

    fn human(&self) -> String {
        let share = |share: f64| format!("{share} %");
        let percent = |performance: f64, floor: f64, one_thread: Option<f64>| {
            let one_thread = one_thread.map_or(String::new(), |it| format!("; {:.1}", it * 100.0));
            let (performance, floor) = (performance * 100.0, floor * 100.0);
            format!("{performance:.1} of {floor:.0}{one_thread} %")
        };
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let named = |name: &str| vec![name.to_owned()];

        let mut header: Vec<String> = [
            "performance, local = 100 %",
            "page KiB",
            "remote MiB",
            "kept local MiB",
            "local s",
        ]
        .map(str::to_owned)
        .into();
        header.extend(self.config.shares_percent.iter().map(|&s| share(s)));
        let mut performance = table(header);
        for app in &self.apps {
            let mut row = named(app.name);
            if !app.in_means {
                row[0] += " (not in the mean)";
            }
            row.push((app.page_size_bytes >> 10).to_string());
            row.extend([mib(app.remote_bytes), mib(app.local_bytes)]);
            row.push(
                app.shares
                    .first()
                    .map_or(String::new(), |s| format!("{:.3}", s.local_seconds)),
            );
            let one_thread = |s: &ShareFigures| s.one_thread.map(|one| one.performance);
            let cell = |s: &ShareFigures| percent(s.performance, s.floor, one_thread(s));
            let cells = app.shares.iter().map(cell);
            row.extend(cells);
            performance.add_row(aligned(row));
        }
        let across = |name: &str, figure: &dyn Fn(&Summary) -> String| {
            let mut row = named(name);
            row.extend(std::iter::repeat_n(String::new(), 4));
            row.extend(self.summary.iter().map(figure));
            aligned(row)
        };
        performance.add_row(across("geometric mean", &|s| {
            (s.geometric_mean.zip(s.geometric_mean_floor)).map_or(String::new(), |(mean, floor)| {
                percent(mean, floor, s.geometric_mean_one_thread)
            })
        }));
        performance.add_row(across("worst", &|s| s.worst.to_owned()));

        let mut paging = table(
            [
                "paging, per run",
                "local",
                "s",
                "faults",
                "brought in",
                "ahead",
                "waited for room",
                "sent away",
                "unchanged",
                "wanted again",
                "read MiB",
                "written MiB",
            ]
            .map(str::to_owned)
            .into(),
        );
        for app in &self.apps {
            for s in &app.shares {
                let mut row = named(app.name);
                row.extend([share(s.share_percent), format!("{:.3}", s.seconds)]);
                let p = &s.paging;
                let counts = [
                    p.faults,
                    p.fills,
                    p.prefetches,
                    p.starved,
                    p.evictions,
                    p.clean_evictions,
                    p.steals,
                ];
                row.extend(counts.map(|count| count.to_string()));
                row.extend([mib(p.bytes_read), mib(p.bytes_written)]);
                paging.add_row(aligned(row));
            }
        }

        let config = &self.config;
        let one_thread = match config.threads {
            1 => "",
            _ => "; behind it: one thread, beside one thread with all in local memory",
        };
        format!(
            "{performance}\nof: the floor, the highest performance with the bytes that moved, if nothing but computing and the work on these pages took \
             time{one_thread}\n{paging}\nverified: {}; server {}; {} threads; median of {}",
            if self.verified {
                "yes, every result"
            } else {
                "NO: FAILED"
            },
            config.server,
            config.threads,
            config.repeat,
        )
    }
}

fn table(header: Vec<String>) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(aligned(header));
    table
}

/// Aligns a row: the name to the left, figures to the right.
fn aligned(row: Vec<String>) -> Vec<Cell> {
    let cell = |(at, text)| {
        Cell::new(text).set_alignment(match at {
            0 => CellAlignment::Left,
            _ => CellAlignment::Right,
        })
    };
    row.into_iter().enumerate().map(cell).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn app(name: &'static str, in_means: bool, performances: &[f64]) -> AppFigures {
        let share = |&performance| ShareFigures {
            share_percent: 50.0,
            budget_bytes: 1,
            seconds: 1.0,
            local_seconds: 1.0,
            performance,
            performance_min: performance,
            performance_max: performance,
            floor: 1.0,
            one_thread: Some(OneThread {
                seconds: 1.0,
                local_seconds: 1.0,
                performance: performance / 2.0,
            }),
            paging: Paging::default(),
        };
        AppFigures {
            name,
            in_means,
            verified: true,
            page_size_bytes: 4096,
            remote_bytes: 1,
            local_bytes: 0,
            shares: performances.iter().map(share).collect(),
        }
    }

    #[test]
    fn the_mean_is_geometric_and_the_worst_is_named_even_where_it_does_not_count() {
        let apps = [
            app("a", true, &[1.0, 0.5]),
            app("b", true, &[0.25, 0.5]),
            app("c", false, &[0.9, 0.01]),
        ];
        let summary = summarise(&apps, &[50.0, 25.0]);
        assert!(
            summary
                .iter()
                .all(|s| (s.geometric_mean.unwrap() - 0.5).abs() < 1e-12)
        );
        let one_thread = summary[0].geometric_mean_one_thread.unwrap();
        assert!((one_thread - 0.25).abs() < 1e-12);
        assert_eq!([summary[0].worst, summary[1].worst], ["b", "c"]);
        assert!(summarise(&apps[2..], &[50.0])[0].geometric_mean.is_none());
    }
}
