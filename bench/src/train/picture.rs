//! The picture of a run: how each mode learns, over steps and over time, and what it moves.

use std::path::Path;

use anyhow::Result;
use farpage_bench_kit::{
    panels::{self, Area, Line},
    plot,
};

use super::report::{Figures, Point, Report};

const SIZE: (u32, u32) = (1600, 760);
const LEGEND: u32 = 40;

/// A panel, and the values that it shows of a curve's points.
struct Panel {
    title: &'static str,
    across: &'static str,
    x: fn(&Point) -> f64,
    /// Value of a point; `None` where there is none yet.
    y: fn(&Point) -> Option<f64>,
}

const PANELS: [Panel; 5] = [
    Panel {
        title: "accuracy of the consensus, %",
        across: "steps",
        x: |point| point.step as f64,
        y: |point| Some(100.0 * point.accuracy),
    },
    Panel {
        title: "accuracy of the consensus, %",
        across: "seconds",
        x: |point| point.seconds,
        y: |point| Some(100.0 * point.accuracy),
    },
    Panel {
        title: "loss",
        across: "steps",
        x: |point| point.step as f64,
        y: |point| (point.step > 0).then_some(point.loss),
    },
    Panel {
        title: "loss",
        across: "seconds",
        x: |point| point.seconds,
        y: |point| (point.step > 0).then_some(point.loss),
    },
    Panel {
        title: "distance from the consensus",
        across: "steps",
        x: |point| point.step as f64,
        y: |point| Some(point.distance),
    },
];

/// Draws `report` to a file.
pub(super) fn draw(report: &Report, path: &Path) -> Result<()> {
    plot::draw_svg(path, SIZE, |area| draw_on(&report.modes, area))
}

fn draw_on(modes: &[Figures], area: &Area<'_>) -> Result<(), String> {
    let (legend, rest) = area.split_vertically(LEGEND);
    let names = modes.iter().map(|mode| mode.mode.as_str());
    panels::legend(&legend, (130, 0), names)?;
    let cells = rest.split_evenly((2, 4));
    for (panel, cell) in PANELS.iter().zip(&cells) {
        let line = |mode: &Figures| -> Line {
            let at = |point| Some(((panel.x)(point), (panel.y)(point)?));
            mode.curve.iter().filter_map(at).collect()
        };
        let lines: Vec<Line> = modes.iter().map(line).collect();
        panels::lines(cell, panel.title, panel.across, &lines)?;
    }
    let bars = |cell, title, value: fn(&Figures) -> f64| {
        let values = modes.iter().map(|mode| (mode.mode.as_str(), value(mode)));
        panels::bars(cell, title, &values.collect::<Vec<_>>())
    };
    let [.., sent, serial, exchanging] = &cells[..] else {
        unreachable!("two rows of four cells")
    };
    let title = "MB that a worker sends in a step";
    bars(sent, title, |mode| mode.bytes_per_step / 1e6)?;
    bars(serial, "serial steps of a step", |mode| {
        mode.serial_steps_per_step
    })?;
    let title = "exchanging, % of a worker's time";
    bars(exchanging, title, |mode| 100.0 * mode.exchange_share)
}
