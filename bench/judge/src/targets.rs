//! Targets that farpage is held to, each beside its floor.
//!
//! The rule it keeps: a target is a ratio of two figures of one sitting, the one measured right
//! after the other; the median of all repetitions counts. The targets stand in `targets/rows.rs`.

mod rows;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

use crate::{bound::Bound, record};
use farpage_bench_kit::{
    options::Printing,
    progress::Progress,
    report::{self, median, ranged_if_several, yes},
    sitting::Sitting,
};

/// Target and how to measure its figures.
pub(crate) struct Row {
    what: String,
    target: Bound,
    unit: &'static str,
    measure: Measure,
}

type Measure = Box<dyn Fn(&mut Sitting) -> Result<Measured>>;

/// Figure, its divisor, and the figure without a pager where that is known.
#[derive(Clone, Copy)]
struct Measured {
    figure: f64,
    against: f64,
    floor: Option<f64>,
}

impl From<[f64; 2]> for Measured {
    fn from([figure, against]: [f64; 2]) -> Self {
        Self {
            figure,
            against,
            floor: None,
        }
    }
}

/// Outcome of a target: medians of the repetitions.
#[derive(Serialize)]
pub(crate) struct Finding {
    what: String,
    target: String,
    unit: &'static str,
    measured: f64,
    against: f64,
    ratio: f64,
    /// Ratio of the same work without a pager: only less work could be better.
    #[serde(skip_serializing_if = "Option::is_none")]
    floor: Option<f64>,
    /// Ratio of each repetition.
    ratios: Vec<f64>,
    met: bool,
}

/// Options of `targets`.
#[derive(Args, Debug)]
pub struct TargetsOptions {
    /// Number of times that everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    /// Measures everything once, like --repeat 1
    #[arg(long, conflicts_with = "repeat")]
    quick: bool,
    /// Measures only targets whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Writes the results, too, with date, machine, kernel and commit, to a JSON file in this
    /// directory, and the table beside it
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
    /// Tiny sizes, once: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with_all = ["repeat", "record"])]
    smoke: bool,
}

/// Runs the subcommand `targets` and prints what it found.
pub fn run(options: &TargetsOptions) -> Result<()> {
    let mut rows: Vec<Row> = rows::all(options.smoke);
    rows.retain(|row| row.what.contains(&options.only));
    let only = &options.only;
    ensure!(!rows.is_empty(), "no target's name contains `{only}`");
    let repeat = match options.quick || options.smoke {
        true => 1,
        false => options.repeat,
    };
    let mut sitting = Sitting::new(options.smoke)?;
    let progress = Progress::new(u64::from(repeat) * rows.len() as u64);
    let mut measured = vec![Vec::new(); rows.len()];
    for _ in 0..repeat {
        sitting.next_repetition();
        for (row, measured) in rows.iter().zip(&mut measured) {
            progress.phase(row.what.clone());
            measured.push((row.measure)(&mut sitting)?);
        }
    }
    drop(progress);

    let findings = rows.iter().zip(&measured);
    let findings = findings.map(|(row, values)| Finding::new(row, values));
    let findings: Vec<Finding> = findings.collect();
    let table = table(&findings);
    let config = serde_json::json!({ "repeat": repeat, "smoke": options.smoke });
    let record = record::Record::new(config, findings, sitting.into_reports());
    if let Some(directory) = &options.record {
        record.write(directory, &table)?;
    }
    report::print(&record, options.printing.format, |_| table.to_string())
}

impl Finding {
    fn new(row: &Row, values: &[Measured]) -> Self {
        let of = |pick: fn(&Measured) -> f64| -> Vec<f64> { values.iter().map(pick).collect() };
        let ratios = of(|value| value.figure / value.against);
        let ratio = median(&ratios);
        let floors: Option<Vec<_>> = (values.iter())
            .map(|value| Some(value.floor? / value.against))
            .collect();
        Self {
            what: row.what.clone(),
            target: row.target.text(),
            unit: row.unit,
            measured: median(&of(|value| value.figure)),
            against: median(&of(|value| value.against)),
            ratio,
            floor: floors.map(|floors| median(&floors)),
            ratios,
            met: row.target.is_met(ratio),
        }
    }
}

fn table(findings: &[Finding]) -> comfy_table::Table {
    let rows = findings.iter().map(|finding| {
        let figure = |x: f64| match x {
            x if x < 100.0 => format!("{x:.2} {}", finding.unit),
            _ => format!("{x:.0} {}", finding.unit),
        };
        let [measured, against] = [finding.measured, finding.against].map(figure);
        let digits = if finding.ratio < 0.1 { 5 } else { 3 };
        let ratio = ranged_if_several(&finding.ratios, digits);
        let floor = finding.floor.map(|floor| format!("{floor:.3}"));
        let (floor, met) = (floor.unwrap_or_default(), yes(finding.met));
        let (what, target) = (&finding.what, &finding.target);
        format!("{what} | {target} | {measured} | {against} | {ratio} | {floor} | {met}")
    });
    let header = "what | target | measured | against | ratio | floor | met";
    report::filled_table(header, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_the_ratios_decides() {
        let row = Row {
            what: "x".into(),
            target: Bound::AtMost(1.5),
            unit: "us",
            measure: Box::new(|_| unreachable!("the figures are given below")),
        };
        let values = [[10.0, 1.0], [14.0, 10.0], [12.0, 10.0]].map(Measured::from);
        let finding = Finding::new(&row, &values);
        assert_eq!((finding.ratio, finding.floor), (1.4, None));
        assert!(finding.met);
        assert!(!Finding::new(&row, &[[16.0, 10.0].into()]).met);
        let floors = [20.0, 40.0, 30.0].map(|floor| Measured {
            floor: Some(floor),
            ..Measured::from([1.0, 10.0])
        });
        assert_eq!(Finding::new(&row, &floors).floor, Some(3.0));
    }
}
