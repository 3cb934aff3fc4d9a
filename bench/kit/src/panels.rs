//! Panels of a picture: lines and bars, a colour for each series.
//!
//! The rule it keeps: a series has the same colour in all panels, by its place among them. The
//! layout of panels is left to the caller.

use std::ops::Range;

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::plot::{COLOURS, FONT, figure};

/// Drawing area of a panel.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Points `(across, up)` of one series.
pub type Line = Vec<(f64, f64)>;

fn colours() -> impl Iterator<Item = &'static RGBColor> {
    // Neighbouring colours of the scheme look alike as thin lines.
    let apart = (0..COLOURS.len()).map(|at| &COLOURS[3 * at % COLOURS.len()]);
    apart.chain([&BLACK]).cycle()
}

/// Returns an axis range from 0 to 5 % above the highest of `values`.
fn upwards(values: impl Iterator<Item = f64>) -> Range<f64> {
    0.0..values.fold(f64::MIN_POSITIVE, f64::max) * 1.05
}

/// Draws the names of the series, each behind a piece of its line and `step` pixels to the right of
/// the one before, or below it.
pub fn legend<'a>(
    area: &Area<'_>,
    step: (i32, i32),
    names: impl IntoIterator<Item = &'a str>,
) -> Result<(), String> {
    for ((at, name), colour) in (0..).zip(names).zip(colours()) {
        let (x, y) = (30 + step.0 * at, 20 + step.1 * at);
        let stroke = PathElement::new(vec![(x, y), (x + 26, y)], colour.stroke_width(3));
        area.draw(&stroke).map_err(|error| error.to_string())?;
        let style = (FONT, 16).into_text_style(area);
        let text = Text::new(name.to_owned(), (x + 34, y - 8), style);
        area.draw(&text).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Draws `lines` over an axis that is labelled `across`.
pub fn lines(area: &Area<'_>, title: &str, across: &str, lines: &[Line]) -> Result<(), String> {
    let points = || lines.iter().flatten();
    let width = upwards(points().map(|at| at.0));
    let height = upwards(points().map(|at| at.1));
    let draw = || -> Result<(), Failure<'_>> {
        let mut chart = panel(area, title).build_cartesian_2d(width, height)?;
        let mut mesh = chart.configure_mesh();
        let mesh = mesh.light_line_style(WHITE).x_desc(across);
        mesh.x_labels(6)
            .y_labels(6)
            .label_style((FONT, 13))
            .draw()?;
        for (line, colour) in lines.iter().zip(colours()) {
            let line = line.iter().copied();
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
        }
        Ok(())
    };
    draw().map_err(|error| error.to_string())
}

/// Draws a bar for each of `values`, its name below and its value above.
pub fn bars(area: &Area<'_>, title: &str, values: &[(&str, f64)]) -> Result<(), String> {
    let most = upwards(values.iter().map(|(_, value)| *value));
    let draw = || -> Result<(), Failure<'_>> {
        let mut chart = panel(area, title).build_cartesian_2d(0.0..values.len() as f64, most)?;
        let mut mesh = chart.configure_mesh();
        let mesh = mesh.disable_x_mesh().light_line_style(WHITE);
        mesh.x_labels(0)
            .y_labels(6)
            .label_style((FONT, 13))
            .draw()?;
        let middle = Pos::new(HPos::Center, VPos::Center);
        let style = (FONT, 13).into_text_style(area).pos(middle);
        for ((at, (name, value)), colour) in values.iter().enumerate().zip(colours()) {
            let left = at as f64;
            let corners = [(left + 0.2, 0.0), (left + 0.8, *value)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
            for (text, height, off) in [((*name).to_owned(), 0.0, 14), (figure(*value), *value, -8)]
            {
                let text = Text::new(text, (0, off), style.clone());
                chart.draw_series([EmptyElement::at((left + 0.5, height)) + text])?;
            }
        }
        Ok(())
    };
    draw().map_err(|error| error.to_string())
}

type Failure<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn panel<'a, 'b>(area: &'a Area<'b>, title: &str) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    chart.caption(title, (FONT, 17)).margin(12);
    chart.x_label_area_size(40).y_label_area_size(56);
    chart
}
