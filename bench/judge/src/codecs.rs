//! Bounds that compression is held to: LZ4 against raw, the codec that chooses for itself against
//! every other, ZFP against LZ4.
//!
//! The rule it keeps: runs to be compared are measured moments apart, over the same link, with the
//! same data, and again until noise no longer decides (see `verdict`) or there have been enough
//! repetitions. A check that is missed makes the command fail; one that stays undecided is named.

mod verdict;

use crate::figures::plan::Extent;
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::json;

use self::verdict::{Ratio, Verdict, against_best, contenders};
use crate::{
    bound::Bound,
    figures::plan::{COMPRESSIBLE, Plan, Rate, STATIC_CODECS, fits, lossy},
    points::Points,
};
use farpage_bench_kit::{
    data::Contents,
    options::Printing,
    progress::Progress,
    report::{self, median},
    sitting::Sitting,
};

/// Name of the codec that chooses for itself.
const ADAPTIVE: &str = "adaptive";
/// Fields that are smooth enough for ZFP to beat LZ4 on each.
const SMOOTH: [Contents; 5] = {
    use Contents::{Climate, Hurricane, Orbitals, Smooth, Turbulence};
    [Smooth, Climate, Hurricane, Turbulence, Orbitals]
};

/// Figure that runs are compared by, in all repetitions of a command; empty if there was none.
type Figure = fn(&Points, &str) -> Vec<f64>;

fn kernel<const AT: usize>(points: &Points, command: &str) -> Vec<f64> {
    let figures = points.figures(command, &format!("/kernels/{AT}/mb_per_s"));
    figures.unwrap_or_default()
}

const TRIAD: Figure = kernel::<3>;
const STEPS: Figure = kernel::<2>;

fn bytes_moved(points: &Points, command: &str) -> Vec<f64> {
    let figures = |path| points.figures(command, path).unwrap_or_default();
    let (read, written) = (figures("/bytes_read"), figures("/bytes_written"));
    read.iter().zip(&written).map(|(a, b)| a + b).collect()
}

/// Command that is held to a bound against the best of its rivals.
struct Trial {
    what: String,
    figure: Figure,
    judged: String,
    rivals: Vec<String>,
    bound: Bound,
    /// Name of the check of a geometric mean that this trial is part of.
    mean: Option<String>,
}

impl Trial {
    /// Returns the commands of `repetition`, of which the first is 0. The judged command is in the
    /// middle of its rivals, which take turns next to it. Rivals that are far behind are left out.
    fn commands(&self, points: &Points, repetition: usize) -> Vec<&String> {
        let (_, mut figures) = self.figures(points);
        for figures in &mut figures {
            figures.truncate(repetition);
        }
        let rivals = self.rivals.iter().zip(contenders(&figures));
        let rivals = rivals.filter_map(|(rival, contends)| contends.then_some(rival));
        let mut commands: Vec<&String> = rivals.collect();
        let turn = repetition % commands.len();
        commands.rotate_left(turn);
        commands.insert(commands.len() / 2, &self.judged);
        commands
    }

    fn figures(&self, points: &Points) -> (Vec<f64>, Vec<Vec<f64>>) {
        let of = |command: &String| (self.figure)(points, command);
        (of(&self.judged), self.rivals.iter().map(of).collect())
    }

    fn ratio(&self, points: &Points) -> Ratio {
        let (judged, rivals) = self.figures(points);
        Ratio::of(&against_best(&judged, &rivals))
    }

    fn is_decided(&self, points: &Points) -> bool {
        self.ratio(points).verdict(self.bound) != Verdict::Undecided
    }
}

/// Outcome of a check.
#[derive(Serialize)]
struct Check {
    what: String,
    target: String,
    ratio: f64,
    /// Bound of the ratio's error, at 98 % confidence.
    off: Option<f64>,
    verdict: Verdict,
}

impl Check {
    fn new(what: String, bound: Bound, ratio: Ratio) -> Self {
        Self {
            what,
            target: bound.text(),
            ratio: ratio.mean,
            off: ratio.off(),
            verdict: ratio.verdict(bound),
        }
    }
}

/// Throughput of a field over a link with each codec, in the order of the codecs, where the codec
/// serves the field.
#[derive(Serialize)]
struct Point {
    data: String,
    link: String,
    mb_per_s: Vec<Option<f64>>,
}

/// Options of `codecs`.
#[derive(Args, Debug)]
pub struct CodecsOptions {
    #[command(flatten)]
    extent: Extent,
    /// Most repetitions of a check that noise could decide; more than before goes on from there
    /// [default: 7, with --quick 3]
    #[arg(long, value_name = "N", conflicts_with = "smoke", value_parser = clap::value_parser!(u16).range(3..=99))]
    repetitions: Option<u16>,
    #[command(flatten)]
    printing: Printing,
}

/// Runs the subcommand `codecs` and prints what it found.
pub fn run(options: &CodecsOptions) -> Result<()> {
    let mut plan = Plan::new(&options.extent);
    plan.repetitions[1] = options.repetitions.unwrap_or(plan.repetitions[1]);
    let mut codecs = STATIC_CODECS.to_vec();
    // A codec that this build does not have cannot be held to anything.
    let adaptive = ADAPTIVE.parse::<farpage::Codec>().is_ok();
    codecs.extend(adaptive.then_some(ADAPTIVE));
    let fields = plan.fields.iter();
    let cells = fields.flat_map(|&data| plan.rates.iter().map(move |&rate| (data, rate)));
    let cells: Vec<(Contents, Rate)> = cells.collect();
    let trials = trials(&plan, &cells, adaptive);

    // 1. Measure.
    let sitting = Sitting::new(plan.smoke)?;
    let mut points = Points::open(&options.extent.out, plan.smoke)?;
    measure(&sitting, &mut points, &trials, &plan)?;

    // 2. Compare.
    let check = |trial: &Trial| Check::new(trial.what.clone(), trial.bound, trial.ratio(&points));
    let mut checks: Vec<Check> = trials.iter().map(check).collect();
    let point = |&(data, rate): &(Contents, Rate)| {
        let mb_per_s = |codec: &&str| {
            let figures = STEPS(&points, &plan.steps(data, codec, rate));
            (!figures.is_empty()).then(|| median(&figures))
        };
        Point {
            data: data.name(),
            link: rate.to_string(),
            mb_per_s: codecs.iter().map(mb_per_s).collect(),
        }
    };
    let table: Vec<Point> = cells.iter().map(point).collect();
    checks.extend(means(&trials, &points));
    if adaptive {
        checks.extend(over_all(&points, &plan, &cells));
    }

    // 3. Say so.
    let names = |verdict: Verdict| -> Vec<&str> {
        let checks = checks.iter().filter(|check| check.verdict == verdict);
        checks.map(|check| check.what.as_str()).collect()
    };
    let (missed, undecided) = (names(Verdict::Missed), names(Verdict::Undecided));
    let report =
        json!({ "benchmark": "codecs", "codecs": codecs, "sweep": table, "checks": checks });
    report::print(&report, options.printing.format, |_| {
        let list = |names: &[&str]| match names {
            [] => "none".to_owned(),
            names => names.join("; "),
        };
        let (sweep, judged) = (sweep_table(&codecs, &table), check_table(&checks));
        let lacking = match adaptive {
            true => String::new(),
            false => format!("This build has no codec `{ADAPTIVE}`: nothing is said about it.\n"),
        };
        let (missed, undecided) = (list(&missed), list(&undecided));
        format!(
            "{sweep}\n{judged}\n{lacking}Missed: {missed}.\nNot decided within noise: {undecided}."
        )
    })?;
    let [missed, undecided, all] = [missed.len(), undecided.len(), checks.len()];
    ensure!(
        missed == 0 || plan.smoke,
        "{missed} of {all} checks are missed, {undecided} not decided"
    );
    Ok(())
}

/// Returns all trials that are compared run by run.
fn trials(plan: &Plan, cells: &[(Contents, Rate)], adaptive: bool) -> Vec<Trial> {
    let mut trials = Vec::new();
    for &rate in &plan.rates {
        // A gigabit is slower than any LZ4; how fast a link LZ4 still gains on depends on the
        // machine.
        let gains = (rate == Rate(Some(1)) || plan.smoke).then_some((COMPRESSIBLE, 1.5));
        for (data, least) in gains.into_iter().chain([(Contents::Random, 0.97)]) {
            let what = |links: String| format!("STREAM triad, {}, {links}: LZ4 / raw", data.name());
            let mean = (data == Contents::Random).then(|| what("all links".to_owned()));
            trials.push(Trial {
                what: what(rate.to_string()),
                figure: TRIAD,
                judged: plan.stream(data, "lz4", rate),
                rivals: vec![plan.stream(data, "raw", rate)],
                bound: Bound::AtLeast(least),
                mean,
            });
        }
    }
    for &(data, rate) in cells.iter().filter(|_| adaptive) {
        let fitting = STATIC_CODECS
            .iter()
            .filter(|codec| fits(codec, data.dtype()));
        let rivals = fitting.map(|codec| plan.steps(data, codec, rate)).collect();
        trials.push(Trial {
            what: format!("{}, {rate}: adaptive / best static", data.name()),
            figure: STEPS,
            judged: plan.steps(data, ADAPTIVE, rate),
            rivals,
            bound: Bound::AtLeast(0.97),
            mean: Some(format!("all fields, {rate}: adaptive / best static")),
        });
    }
    let smooth = SMOOTH.into_iter().filter(|data| plan.fields.contains(data));
    trials.extend(smooth.filter_map(|data| {
        let zfp = lossy(data)?;
        Some(Trial {
            what: format!("bytes moved, {}: {zfp} / LZ4", data.name()),
            figure: bytes_moved,
            judged: plan.traffic(data, &zfp, Rate(None)),
            rivals: vec![plan.traffic(data, "lz4", Rate(None))],
            bound: Bound::Below(1.0),
            mean: None,
        })
    }));
    trials
}

/// Runs the commands that have no result yet: a repetition of all trials, then the next of those
/// that are not decided.
///
/// # Errors
/// A benchmark fails, or Ctrl-C: results of benchmarks that have ended are kept.
fn measure(sitting: &Sitting, points: &mut Points, trials: &[Trial], plan: &Plan) -> Result<()> {
    let [least, most] = plan.repetitions.map(usize::from);
    let least = least.min(most);
    for repetition in 0..most {
        let mut open: Vec<&Trial> = trials.iter().collect();
        open.retain(|trial| repetition < least || !trial.is_decided(points));
        let progress = Progress::new(open.len() as u64);
        for trial in open {
            let (number, what) = (repetition + 1, &trial.what);
            progress.phase(format!("repetition {number} of {least} to {most}: {what}"));
            for command in trial.commands(points, repetition) {
                points.measure(sitting, command, repetition as u16)?;
            }
        }
    }
    Ok(())
}

/// Checks the geometric mean of trials that belong together, held to the bound of each: noise may
/// leave the trials themselves undecided.
fn means(trials: &[Trial], points: &Points) -> Vec<Check> {
    let mut names: Vec<&String> = trials.iter().filter_map(|t| t.mean.as_ref()).collect();
    names.sort();
    names.dedup();
    let check = |name: &String| {
        let parts = trials.iter().filter(|t| t.mean.as_ref() == Some(name));
        let ratios: Vec<Ratio> = parts.clone().map(|trial| trial.ratio(points)).collect();
        let bound = parts.map(|trial| trial.bound).next()?;
        let what = format!("{name}, geometric mean");
        Some(Check::new(what, bound, Ratio::mean(&ratios)))
    };
    names.into_iter().filter_map(check).collect()
}

/// Checks the codec that chooses for itself against each other one: the mean over all fields and
/// links that the other serves, in each of which neighbouring runs are compared.
fn over_all(points: &Points, plan: &Plan, cells: &[(Contents, Rate)]) -> Vec<Check> {
    let check = |codec: &&str| {
        let ratios: Vec<Ratio> = cells
            .iter()
            .filter(|(data, _)| fits(codec, data.dtype()))
            .map(|&(data, rate)| {
                let [mut judged, rival] =
                    [ADAPTIVE, codec].map(|codec| STEPS(points, &plan.steps(data, codec, rate)));
                judged.truncate(rival.len());
                Ratio::of(&against_best(&judged, &[rival]))
            })
            .collect();
        let what = format!("all fields and links: adaptive / {codec}, geometric mean");
        Check::new(what, Bound::Above(1.0), Ratio::mean(&ratios))
    };
    STATIC_CODECS.iter().map(check).collect()
}

fn sweep_table(codecs: &[&str], table: &[Point]) -> comfy_table::Table {
    let header = format!("field | link | {}, MB/s", codecs.join(", MB/s | "));
    let rows = table.iter().map(|point| {
        let figures = point.mb_per_s.iter();
        let figures = figures.map(|x| x.map_or("-".to_owned(), |x| format!("{x:.0}")));
        let figures: Vec<String> = figures.collect();
        format!("{} | {} | {}", point.data, point.link, figures.join(" | "))
    });
    report::filled_table(&header, rows)
}

fn check_table(checks: &[Check]) -> comfy_table::Table {
    let rows = checks.iter().map(|check| {
        let met = match check.verdict {
            Verdict::Met => "yes",
            Verdict::Missed => "NO",
            Verdict::Undecided => "not decided",
        };
        let off = check.off.map_or("-".to_owned(), |off| format!("{off:.3}"));
        let (what, target, ratio) = (&check.what, &check.target, check.ratio);
        format!("{what} | {target} | {ratio:.3} | {off} | {met}")
    });
    report::filled_table("check | target | measured | may be off by | met", rows)
}
