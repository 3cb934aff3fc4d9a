//! What compression is held to: LZ4 against raw, the codec that chooses for itself against every other, ZFP against LZ4.
//!
//! The rule it keeps: what is compared was measured one right after the other, over the same link, with the same data; medians of the repetitions
//! count, and a check that is missed makes the command fail.

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;

use crate::{
    data::Contents,
    figures::{
        self,
        plan::{COMPRESSIBLE, Plan, Rate, STATIC_CODECS, fits, lossy},
    },
    options::{CodecsOptions, Format},
    points::Points,
    report::{self, geometric_mean, median},
    sitting::Sitting,
};

const TRIAD: &str = "/kernels/3/mb_per_s";
const TRAFFIC: &str = "/kernels/2/mb_per_s";
/// The codec that chooses for itself.
const ADAPTIVE: &str = "adaptive";
/// Fields that are smooth enough for ZFP to beat LZ4 on each.
const SMOOTH: [Contents; 5] = [
    Contents::Smooth,
    Contents::Climate,
    Contents::Hurricane,
    Contents::Turbulence,
    Contents::Orbitals,
];

/// A bound for a ratio.
#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    Above(f64),
    Below(f64),
}

impl Bound {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(least) => ratio >= least,
            Self::Above(least) => ratio > least,
            Self::Below(most) => ratio < most,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(least) => format!("at least {least}"),
            Self::Above(least) => format!("above {least}"),
            Self::Below(most) => format!("below {most}"),
        }
    }
}

/// What became of a check.
#[derive(Serialize)]
struct Check {
    what: String,
    target: String,
    ratio: f64,
    met: bool,
}

impl Check {
    fn new(what: String, bound: Bound, ratio: f64) -> Self {
        Self {
            what,
            target: bound.text(),
            ratio,
            met: bound.is_met(ratio),
        }
    }
}

/// A field over a link: the throughput with each codec, in the order of the codecs, where the codec serves the field.
#[derive(Serialize)]
struct Point {
    data: String,
    link: String,
    mb_per_s: Vec<Option<f64>>,
}

pub(crate) fn run(options: &CodecsOptions) -> Result<()> {
    let plan = Plan::new(&options.extent);
    let mut codecs = STATIC_CODECS.to_vec();
    // A codec that this build does not have cannot be held to anything.
    let adaptive = ADAPTIVE.parse::<farpage::Codec>().is_ok();
    codecs.extend(adaptive.then_some(ADAPTIVE));

    // 1. Measure.
    let streams: Vec<(Contents, Rate, Bound)> = plan
        .rates
        .iter()
        .flat_map(|&rate| {
            // A gigabit is slower than any LZ4; how fast a link LZ4 still gains on depends on the machine.
            let gains = (rate == Rate(Some(1)) || plan.smoke).then_some((
                COMPRESSIBLE,
                rate,
                Bound::AtLeast(1.5),
            ));
            gains
                .into_iter()
                .chain([(Contents::Random, rate, Bound::AtLeast(0.97))])
        })
        .collect();
    let smooth = SMOOTH.into_iter().filter(|data| plan.fields.contains(data));
    let smooth: Vec<(Contents, [String; 2])> = smooth
        .filter_map(|data| {
            let codecs = [lossy(data)?, "lz4".to_owned()];
            Some((
                data,
                codecs.map(|codec| plan.traffic(data, &codec, Rate(None))),
            ))
        })
        .collect();
    let mut commands = Vec::new();
    for (data, rate, _) in &streams {
        commands.extend(["raw", "lz4"].map(|codec| plan.stream(*data, codec, *rate)));
    }
    let sweep: Vec<(Contents, Rate, Vec<Option<String>>)> = plan
        .fields
        .iter()
        .flat_map(|&data| plan.rates.iter().map(move |&rate| (data, rate)))
        .map(|(data, rate)| {
            let command =
                |codec: &&str| fits(codec, data.dtype()).then(|| plan.traffic(data, codec, rate));
            (data, rate, codecs.iter().map(command).collect())
        })
        .collect();
    commands.extend(
        sweep
            .iter()
            .flat_map(|(_, _, commands)| commands)
            .flatten()
            .cloned(),
    );
    commands.extend(smooth.iter().flat_map(|(_, commands)| commands.clone()));
    let mut unique: Vec<&String> = Vec::new();
    for command in &commands {
        if !unique.contains(&command) {
            unique.push(command);
        }
    }
    let sitting = Sitting::new(plan.smoke)?;
    let mut points = Points::open(&options.extent.out, plan.smoke)?;
    figures::measure(&sitting, &mut points, unique, plan.repeat)?;

    // 2. Compare.
    let mut checks = Vec::new();
    for (data, rate, bound) in streams {
        let [raw, lz4] = ["raw", "lz4"].map(|codec| plan.stream(data, codec, rate));
        let what = format!("STREAM triad, {}, {rate}: LZ4 / raw", data.name());
        checks.push(Check::new(what, bound, ratio(&points, &lz4, &raw, TRIAD)?));
    }
    let mut table = Vec::new();
    for (data, rate, commands) in &sweep {
        let figure = |command: &Option<String>| -> Result<Option<f64>> {
            let command = command.as_ref();
            command
                .map(|command| Ok(median(&points.figures(command, TRAFFIC)?)))
                .transpose()
        };
        table.push(Point {
            data: data.name(),
            link: rate.to_string(),
            mb_per_s: commands.iter().map(figure).collect::<Result<_>>()?,
        });
    }
    if adaptive {
        checks.extend(of_adaptive(&codecs, &table));
    }
    for (data, [zfp, lz4]) in &smooth {
        let moved = |command: &str| -> Result<f64> {
            let read = median(&points.figures(command, "/bytes_read")?);
            Ok(read + median(&points.figures(command, "/bytes_written")?))
        };
        let what = format!(
            "bytes moved, {}: {} / LZ4",
            data.name(),
            lossy(*data).unwrap_or_default()
        );
        checks.push(Check::new(
            what,
            Bound::Below(1.0),
            moved(zfp)? / moved(lz4)?,
        ));
    }

    // 3. Say so.
    let missed = checks.iter().filter(|check| !check.met).count();
    match options.format {
        Format::Human => {
            println!("{}\n{}", sweep_table(&codecs, &table), check_table(&checks));
            if !adaptive {
                println!("This build has no codec `{ADAPTIVE}`: nothing is said about it.");
            }
        }
        Format::Json => println!(
            "{}",
            json!({ "benchmark": "codecs", "codecs": codecs, "sweep": table, "checks": checks })
        ),
    }
    ensure!(
        missed == 0 || plan.smoke,
        "{missed} of {} checks are missed; see the last column",
        checks.len()
    );
    Ok(())
}

/// The median of the ratios of repetitions, each of two runs that were measured one after the other.
fn ratio(points: &Points, a: &str, b: &str, path: &str) -> Result<f64> {
    let (a, b) = (points.figures(a, path)?, points.figures(b, path)?);
    let ratios: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a / b).collect();
    Ok(median(&ratios))
}

/// The last codec against the best of the others at each point, and against each of them over all points.
fn of_adaptive(codecs: &[&str], table: &[Point]) -> Vec<Check> {
    let mut checks = Vec::new();
    for point in table {
        if let Some((Some(adaptive), others)) = point.mb_per_s.split_last() {
            let best = others.iter().flatten().copied().fold(0.0, f64::max);
            let what = format!("{}, {}: adaptive / best static", point.data, point.link);
            checks.push(Check::new(what, Bound::AtLeast(0.97), adaptive / best));
        }
    }
    for (at, codec) in codecs.iter().enumerate().take(codecs.len() - 1) {
        // What a codec cannot serve it is not compared on.
        let ratios: Vec<f64> = table
            .iter()
            .filter_map(|point| Some((*point.mb_per_s.last()?)? / point.mb_per_s[at]?))
            .collect();
        let what = format!("all fields and links: adaptive / {codec}, geometric mean");
        checks.push(Check::new(what, Bound::Above(1.0), geometric_mean(&ratios)));
    }
    checks
}

fn sweep_table(codecs: &[&str], table: &[Point]) -> comfy_table::Table {
    let mut shown = report::table(["field", "link"]);
    let unit = |codec: &&str| format!("{codec}, MB/s");
    let header = ["field".to_owned(), "link".to_owned()]
        .into_iter()
        .chain(codecs.iter().map(unit));
    shown.set_header(report::right(header));
    for point in table {
        let figures = point.mb_per_s.iter();
        let figures = figures.map(|x| x.map_or("-".to_owned(), |x| format!("{x:.0}")));
        let names = [point.data.clone(), point.link.clone()];
        shown.add_row(report::right(names.into_iter().chain(figures)));
    }
    shown
}

fn check_table(checks: &[Check]) -> comfy_table::Table {
    let mut shown = report::table(["check", "target", "measured", "met"]);
    for check in checks {
        shown.add_row(report::right([
            check.what.clone(),
            check.target.clone(),
            format!("{:.3}", check.ratio),
            if check.met { "yes" } else { "NO" }.to_owned(),
        ]));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(mb_per_s: [Option<f64>; 3]) -> Point {
        Point {
            data: "x".into(),
            link: "y".into(),
            mb_per_s: mb_per_s.to_vec(),
        }
    }

    #[test]
    fn adaptive_is_held_to_the_best_at_each_point_and_to_each_codec_over_all() {
        let table = [
            point([Some(100.0), Some(50.0), Some(98.0)]),
            point([Some(50.0), Some(100.0), Some(90.0)]),
            point([Some(100.0), None, Some(100.0)]),
        ];
        let checks = of_adaptive(&["raw", "lz4", ADAPTIVE], &table);
        let met: Vec<bool> = checks.iter().map(|check| check.met).collect();
        assert_eq!(met, [true, false, true, true, true]);
        assert!((checks[1].ratio - 0.9).abs() < 1e-9);
        assert!((checks[3].ratio - (0.98f64 * 1.8).cbrt()).abs() < 1e-9);
    }

    #[test]
    fn bounds_can_be_missed() {
        assert!(Bound::AtLeast(1.5).is_met(1.5) && !Bound::AtLeast(1.5).is_met(1.49));
        assert!(!Bound::Above(1.0).is_met(1.0) && !Bound::Below(1.0).is_met(1.0));
    }
}
