//! Results of a run of the applications: JSON, tables, and the data of the picture.
//!
//! The rule it keeps: performance is the local run's time over the run's, so that 1 is as fast as
//! local memory, whatever was measured.

use comfy_table::Table;
use serde::Serialize;

use farpage_bench_kit::{
    paging::Counts,
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
    pub(crate) fn human(&self) -> String {
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
        let joined =
            |cells: &mut dyn Iterator<Item = String>| cells.collect::<Vec<_>>().join(" | ");
        let shares = joined(&mut self.config.shares_percent.iter().map(|s| format!("{s} %")));
        let header = format!(
            "performance, local = 100 % | page KiB | remote MiB | kept local MiB | local s | {shares}"
        );
        let rows = self.apps.iter().map(|app| {
            let local_s = app
                .shares
                .first()
                .map(|s| format!("{:.3}", s.local_seconds));
            let (name, local_s) = (app.shown_name(), local_s.unwrap_or_default());
            let [remote, kept] = [app.remote_bytes, app.local_bytes].map(mib);
            let cells = joined(&mut app.shares.iter().map(|s| {
                let one_thread = s.one_thread.map(|one| one.performance);
                percent(s.performance, s.floor, one_thread)
            }));
            let page_kib = app.page_size_bytes >> 10;
            format!("{name} | {page_kib} | {remote} | {kept} | {local_s} | {cells}")
        });
        let across = |name: &str, figure: &dyn Fn(&Summary) -> String| {
            let figures = joined(&mut self.summary.iter().map(figure));
            format!("{name} |  |  |  |  | {figures}")
        };
        let mean = across("geometric mean", &|s| {
            (s.geometric_mean.zip(s.geometric_mean_floor)).map_or(String::new(), |(mean, floor)| {
                percent(mean, floor, s.geometric_mean_one_thread)
            })
        });
        let worst = across("worst", &|s| s.worst.clone());
        report::filled_table(&header, rows.chain([mean, worst]))
    }

    fn paging_table(&self) -> Table {
        let shares = self.apps.iter();
        let shares = shares.flat_map(|app| app.shares.iter().map(move |s| (app, s)));
        let rows = shares.map(|(app, s)| {
            let (p, name, share, seconds) = (&s.paging, &app.name, s.share_percent, s.seconds);
            let [read, written] = [p.bytes_read, p.bytes_written].map(mib);
            let came = [p.faults, p.fills, p.prefetches, p.starved];
            let left = [p.evictions, p.clean_evictions, p.steals];
            let counts = came.into_iter().chain(left).map(|count| count.to_string());
            let counts = counts.collect::<Vec<_>>().join(" | ");
            format!("{name} | {share} % | {seconds:.3} | {counts} | {read} | {written}")
        });
        report::filled_table(
            "paging, per run | local | s | faults | brought in | ahead | waited for room | sent away | unchanged | wanted again | read MiB | written MiB",
            rows,
        )
    }
}

impl AppFigures {
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
