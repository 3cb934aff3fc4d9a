//! The picture of a run: how each mode learns, over steps and over time, and what it moves.

use std::{ops::Range, path::Path};

use anyhow::Result;
use farpage_bench_kit::plot::{self, COLOURS, FONT};
use plotters::{coord::Shift, prelude::*};

use super::{Figures, Point, Report};

const SIZE: (u32, u32) = (1600, 760);
const LEGEND: u32 = 40;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Failure<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// What a panel shows of the points of a curve.
struct Panel {
    title: &'static str,
    across: &'static str,
    x: fn(&Point) -> f64,
    /// `None`: there is nothing yet.
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

/// Draws the report to a file.
///
/// # Errors
/// The file cannot be written.
pub(super) fn draw(report: &Report, path: &Path) -> Result<()> {
    plot::draw_svg(path, SIZE, |area| {
        draw_on(&report.modes, area).map_err(|error| error.to_string())
    })
}

fn draw_on<'a>(modes: &[Figures], area: &Area<'a>) -> Result<(), Failure<'a>> {
    let (legend, panels) = area.split_vertically(LEGEND);
    for (at, (mode, colour)) in with_colours(modes).enumerate() {
        let (x, y) = (30 + 130 * at as i32, LEGEND as i32 / 2);
        legend.draw(&PathElement::new(
            vec![(x, y), (x + 26, y)],
            colour.stroke_width(3),
        ))?;
        let style = (FONT, 16).into_text_style(&legend);
        legend.draw(&Text::new(mode.mode.clone(), (x + 34, y - 8), style))?;
    }
    let cells = panels.split_evenly((2, 4));
    for (panel, cell) in PANELS.iter().zip(&cells) {
        panel.draw(modes, cell)?;
    }
    bars(
        modes,
        &cells[PANELS.len()],
        "MB that a worker sends in a step",
        |mode| mode.bytes_per_step / 1e6,
    )?;
    bars(
        modes,
        &cells[PANELS.len() + 1],
        "serial steps of a step",
        |mode| mode.serial_steps_per_step,
    )
}

fn with_colours(modes: &[Figures]) -> impl Iterator<Item = (&Figures, &RGBColor)> {
    // Neighbours in the scheme look alike as thin lines.
    modes.iter().zip(COLOURS.iter().step_by(3).cycle())
}

/// From 0 to a little above the highest of these.
fn upwards(values: impl Iterator<Item = f64>) -> Range<f64> {
    0.0..values.fold(f64::MIN_POSITIVE, f64::max) * 1.05
}

impl Panel {
    fn draw<'a>(&self, modes: &[Figures], area: &Area<'a>) -> Result<(), Failure<'a>> {
        let line = |mode: &'_ Figures| -> Vec<(f64, f64)> {
            let at = |point| Some(((self.x)(point), (self.y)(point)?));
            mode.curve.iter().filter_map(at).collect()
        };
        let points = || modes.iter().flat_map(line);
        let (across, up) = (
            upwards(points().map(|at| at.0)),
            upwards(points().map(|at| at.1)),
        );
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, (FONT, 17))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(across, up)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(self.across)
            .x_labels(6)
            .y_labels(6)
            .label_style((FONT, 13))
            .draw()?;
        for (mode, colour) in with_colours(modes) {
            chart.draw_series(LineSeries::new(line(mode), colour.stroke_width(2)))?;
        }
        Ok(())
    }
}

/// A bar for each mode.
fn bars<'a>(
    modes: &[Figures],
    area: &Area<'a>,
    title: &str,
    value: fn(&Figures) -> f64,
) -> Result<(), Failure<'a>> {
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 17))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..modes.len() as f64, upwards(modes.iter().map(value)))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_labels(0)
        .y_labels(6)
        .label_style((FONT, 13))
        .draw()?;
    chart.draw_series(with_colours(modes).enumerate().map(|(at, (mode, colour))| {
        let left = at as f64;
        let corners = [(left + 0.2, 0.0), (left + 0.8, value(mode))];
        Rectangle::new(corners, colour.filled())
    }))?;
    Ok(())
}
