//! Results of a run of the applications: JSON, tables, and the data of the picture.
//!
//! The rule it keeps: performance is the local run's time over the run's, so that 1 is as fast as
//! local memory, whatever was measured.

use anyhow::Result;
use comfy_table::Table;
use serde::Serialize;

use farpage_bench_kit::{
    options::Format,
    paging::Counts,
    report::{self, geometric_mean, right},
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
#[derive(Debug, Default, Serialize)]
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
#[derive(Debug, Default, Serialize)]
pub(crate) struct AppFigures {
    pub(crate) name: String,
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
#[derive(Clone, Debug, Default, Serialize)]
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
    /// Counts of the pager: means of the repetitions' timed parts.
    #[serde(flatten)]
    pub(crate) paging: Counts,
}

/// Results of an application that one thread runs, while paging has the other cores to itself.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct OneThread {
    /// Median of the repetitions, as `local_seconds` and `performance` are.
    pub(crate) seconds: f64,
    pub(crate) local_seconds: f64,
    pub(crate) performance: f64,
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
    pub(crate) worst: String,
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
            worst: worst.name.clone(),
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
        let config = &self.config;
        let one_thread = match config.threads {
            1 => "",
            _ => "; behind it: one thread, beside one thread with all in local memory",
        };
        let verified = match self.verified {
            true => "yes, every result",
            false => "NO: FAILED",
        };
        format!(
            "{}\nof: the floor, the highest performance with the bytes that moved, if nothing but computing and the work on these pages took \
             time{one_thread}\n{}\nverified: {verified}; server {}; {} threads; median of {}",
            self.performance_table(),
            self.paging_table(),
            config.server,
            config.threads,
            config.repeat,
        )
    }

    fn performance_table(&self) -> Table {
        let percent = |performance: f64, floor: f64, one_thread: Option<f64>| {
            let one_thread = one_thread.map_or(String::new(), |it| format!("; {:.1}", it * 100.0));
            let (performance, floor) = (performance * 100.0, floor * 100.0);
            format!("{performance:.1} of {floor:.0}{one_thread} %")
        };
        let names = ["performance, local = 100 %", "page KiB", "remote MiB"];
        let names = names.into_iter().chain(["kept local MiB", "local s"]);
        let shares = self.config.shares_percent.iter();
        let header = names
            .map(str::to_owned)
            .chain(shares.map(|s| format!("{s} %")));
        let mut table = report::table("");
        table.set_header(right(header));
        for app in &self.apps {
            let local_s = app.shares.first().map(|s| s.local_seconds);
            let local_s = local_s.map(|seconds| format!("{seconds:.3}"));
            let facts = [
                app.shown_name(),
                (app.page_size_bytes >> 10).to_string(),
                mib(app.remote_bytes),
                mib(app.local_bytes),
                local_s.unwrap_or_default(),
            ];
            let cells = app.shares.iter().map(|s| {
                let one_thread = s.one_thread.map(|one| one.performance);
                percent(s.performance, s.floor, one_thread)
            });
            table.add_row(right(facts.into_iter().chain(cells)));
        }
        let mut across = |name: &str, figure: &dyn Fn(&Summary) -> String| {
            let facts = [name, "", "", "", ""].map(str::to_owned);
            let figures = self.summary.iter().map(figure);
            table.add_row(right(facts.into_iter().chain(figures)));
        };
        across("geometric mean", &|s| {
            (s.geometric_mean.zip(s.geometric_mean_floor)).map_or(String::new(), |(mean, floor)| {
                percent(mean, floor, s.geometric_mean_one_thread)
            })
        });
        across("worst", &|s| s.worst.clone());
        table
    }

    fn paging_table(&self) -> Table {
        let mut table = report::table(
            "paging, per run | local | s | faults | brought in | ahead | waited for room | sent away | unchanged | wanted again | read MiB | written MiB",
        );
        for (app, s) in (self.apps.iter()).flat_map(|app| app.shares.iter().map(move |s| (app, s)))
        {
            let p = &s.paging;
            let (share, seconds) = (s.share_percent, s.seconds);
            let of_run = [format!("{share} %"), format!("{seconds:.3}")];
            let of_run = [app.name.clone()].into_iter().chain(of_run);
            let counts = [
                p.faults,
                p.fills,
                p.prefetches,
                p.starved,
                p.evictions,
                p.clean_evictions,
                p.steals,
            ];
            let bytes = [p.bytes_read, p.bytes_written].map(mib);
            let counts = counts.map(|count| count.to_string());
            table.add_row(right(of_run.chain(counts).chain(bytes)));
        }
        table
    }
}

impl AppFigures {
    /// Returns the name for people.
    pub(crate) fn shown_name(&self) -> String {
        match self.in_means {
            true => self.name.clone(),
            false => format!("{} (not in the mean)", self.name),
        }
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn app(name: &str, in_means: bool, performances: &[f64]) -> AppFigures {
        let share = |&performance| ShareFigures {
            share_percent: 50.0,
            performance,
            floor: 1.0,
            one_thread: Some(OneThread {
                performance: performance / 2.0,
                ..OneThread::default()
            }),
            ..ShareFigures::default()
        };
        AppFigures {
            name: name.to_owned(),
            in_means,
            shares: performances.iter().map(share).collect(),
            ..AppFigures::default()
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
        let is_half = |s: &Summary| (s.geometric_mean.unwrap() - 0.5).abs() < 1e-12;
        assert!(summary.iter().all(is_half));
        let one_thread = summary[0].geometric_mean_one_thread.unwrap();
        assert!((one_thread - 0.25).abs() < 1e-12);
        let worst = summary.iter().map(|s| s.worst.as_str());
        assert_eq!(worst.collect::<Vec<_>>(), ["b", "c"]);
        assert!(summarise(&apps[2..], &[50.0])[0].geometric_mean.is_none());
    }
}
