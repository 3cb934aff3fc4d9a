//! Every combination of worker counts and read-ahead lengths, and how close farpage comes without being told.
//!
//! The rule it keeps: the defaults are measured like any other point, in the same repetitions. The best of many noisy points looks
//! better than it is, so that the defaults' share is rather too low than too high.

use std::{fmt, thread};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::{
    options::{Format, SweepOptions},
    progress::Progress,
    report::{self, median},
    sitting::Sitting,
};

/// Pages to read ahead. 0: never; more than the last is more than fits into small budgets.
const READ_AHEAD_PAGES: [u32; 4] = [0, 8, 32, 128];
const TRIAD: &str = "/kernels/3/mb_per_s";
const ACCESS: &str = "/us_per_access";

/// What farpage is told.
#[derive(Clone, Copy, Serialize)]
struct Setting {
    fillers: usize,
    evictors: usize,
    read_ahead_pages: u32,
}

#[derive(Serialize)]
struct Point {
    /// None: farpage chooses.
    setting: Option<Setting>,
    triad_mb_per_s: f64,
    random_us_per_access: f64,
}

pub(crate) fn run(options: &SweepOptions) -> Result<()> {
    let (settings, repeat) = match options.smoke {
        true => (grid(&[1], &[0, 8]), 1),
        false => {
            let cpus = thread::available_parallelism().context("cannot count the CPUs")?;
            (grid(&counts(cpus.get()), &READ_AHEAD_PAGES), options.repeat)
        }
    };
    let settings: Vec<_> = [None]
        .into_iter()
        .chain(settings.into_iter().map(Some))
        .collect();
    // A grid has many points: seconds each.
    let accesses = if options.smoke {
        ""
    } else {
        "--accesses 40000"
    };
    let mut sitting = Sitting::new(options.smoke)?;
    let progress = Progress::new(u64::from(repeat) * settings.len() as u64);
    let mut figures = vec![[const { Vec::new() }; 2]; settings.len()];
    for _ in 0..repeat {
        sitting.next_repetition();
        for (setting, [triad, random]) in settings.iter().zip(&mut figures) {
            let told = setting.map_or("the defaults".to_owned(), |setting| setting.to_string());
            progress.phase(told);
            let arguments = arguments(options, *setting);
            triad.push(sitting.figure(&format!("stream --iterations 3 {arguments}"), TRIAD)?);
            random.push(sitting.figure(
                &format!("random --no-advice {accesses} {arguments}"),
                ACCESS,
            )?);
            progress.step(1);
        }
    }
    drop(progress);

    let points: Vec<Point> = settings
        .into_iter()
        .zip(&figures)
        .map(|(setting, [triad, random])| Point {
            setting,
            triad_mb_per_s: median(triad),
            random_us_per_access: median(random),
        })
        .collect();
    // Both as speeds, so that more is better.
    let (default, grid) = points
        .split_first()
        .context("the defaults are always measured")?;
    let best = |speed: fn(&Point) -> f64| -> Result<&Point> {
        grid.iter()
            .max_by(|a, b| speed(a).total_cmp(&speed(b)))
            .context("the grid is never empty")
    };
    let best_triad = best(|point| point.triad_mb_per_s)?;
    let best_random = best(|point| 1.0 / point.random_us_per_access)?;
    let triad_share = default.triad_mb_per_s / best_triad.triad_mb_per_s;
    let random_share = best_random.random_us_per_access / default.random_us_per_access;
    match options.format {
        Format::Human => {
            println!("{}", table(&points));
            println!("{}", summary("STREAM triad", best_triad, triad_share));
            println!("{}", summary("random", best_random, random_share));
        }
        Format::Json => println!(
            "{}",
            json!({
                "benchmark": "sweep",
                "points": points,
                "best_triad": best_triad,
                "best_random": best_random,
                "default_share_of_best_triad": triad_share,
                "default_share_of_best_random": random_share,
                "reports": sitting.into_reports(),
            })
        ),
    }
    Ok(())
}

/// 1, 2, 4, ... up to `most`, and `most` itself.
fn counts(most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..)
        .map(|power| 1 << power)
        .take_while(|&count| count < most)
        .collect();
    counts.push(most);
    counts
}

fn grid(counts: &[usize], read_ahead: &[u32]) -> Vec<Setting> {
    let mut grid = Vec::new();
    for &fillers in counts {
        for &evictors in counts {
            grid.extend(read_ahead.iter().map(|&read_ahead_pages| Setting {
                fillers,
                evictors,
                read_ahead_pages,
            }));
        }
    }
    grid
}

/// Of `stream` and `random`.
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
        read_ahead_pages,
    }) = setting
    {
        arguments +=
            &format!(" --fillers {fillers} --evictors {evictors} --read-ahead {read_ahead_pages}");
    }
    arguments
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} fillers, {} evictors, {} pages ahead",
            self.fillers, self.evictors, self.read_ahead_pages
        )
    }
}

fn table(points: &[Point]) -> comfy_table::Table {
    let mut table = report::table([
        "fillers",
        "evictors",
        "pages ahead",
        "triad",
        "random access",
    ]);
    for point in points {
        let told = match point.setting {
            Some(s) => [
                s.fillers as u64,
                s.evictors as u64,
                s.read_ahead_pages.into(),
            ]
            .map(|n| n.to_string()),
            None => ["default"; 3].map(str::to_owned),
        };
        table.add_row(report::right(told.into_iter().chain([
            format!("{:.0} MB/s", point.triad_mb_per_s),
            format!("{:.2} us", point.random_us_per_access),
        ])));
    }
    table
}

fn summary(what: &str, best: &Point, share: f64) -> String {
    let setting = best.setting.map_or_else(String::new, |s| s.to_string());
    format!("{what}: best with {setting}; the defaults reach {share:.3} of it")
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
        assert_eq!(grid(&[1, 2, 4], &[0, 8]).len(), 18);
    }
}
