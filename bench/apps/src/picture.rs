//! The picture of a run: performance over local memory, a line for each application, as SVG.
//!
//! The rule it keeps: drawing needs no fonts here; the viewer of the file brings them.

use std::path::Path;

use anyhow::Result;
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::report::{AppFigures, AppsReport};
use farpage_bench_kit::plot::{self, COLOURS, FONT};

const SIZE: (u32, u32) = (960, 600);
/// A line: its name, its look, and its points (share and performance in percent).
type Line = (String, ShapeStyle, Vec<(f64, f64)>);

/// Draws the report to a file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn draw(report: &AppsReport, path: &Path) -> Result<()> {
    plot::draw_svg(path, SIZE, |area| draw_on(report, area))
}

fn draw_on(report: &AppsReport, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), String> {
    let text = |e: DrawingAreaErrorKind<_>| e.to_string();
    let figures = || report.apps.iter().flat_map(|app| &app.shares);
    let share_max = figures().map(|s| s.share_percent).fold(100.0, f64::max);
    let performance_max = figures()
        .map(|s| s.performance * 100.0)
        .fold(100.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("Performance with a part of the memory local", (FONT, 22))
        .margin(14)
        .margin_right(190)
        .x_label_area_size(46)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..share_max, 0.0..performance_max * 1.05)
        .map_err(text)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("local memory, % of the application's")
        .y_desc("performance, % of all in local memory")
        .x_labels(9)
        .y_labels(11)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style((FONT, 15))
        .draw()
        .map_err(text)?;

    let app_line = |app: &AppFigures| -> Vec<(f64, f64)> {
        let points = app.shares.iter();
        points
            .map(|s| (s.share_percent, s.performance * 100.0))
            .collect()
    };
    let mut lines: Vec<Line> = Vec::new();
    for (app, colour) in report.apps.iter().zip(COLOURS.iter().cycle()) {
        let name = match app.in_means {
            true => app.name.to_owned(),
            false => format!("{} (not in the mean)", app.name),
        };
        lines.push((name, colour.stroke_width(2), app_line(app)));
    }
    let mean: Vec<_> = report
        .summary
        .iter()
        .filter_map(|s| Some((s.share_percent, s.geometric_mean? * 100.0)))
        .collect();
    if !mean.is_empty() {
        lines.push(("geometric mean".into(), BLACK.stroke_width(4), mean));
    }
    let anchor = Pos::new(HPos::Left, VPos::Center);
    let legend = (FONT, 14).into_text_style(area).pos(anchor);
    for (at, (name, style, mut points)) in lines.into_iter().enumerate() {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let markers = points
            .iter()
            .map(|&point| Circle::new(point, 3, style.color.filled()));
        chart.draw_series(markers).map_err(text)?;
        chart
            .draw_series(LineSeries::new(points, style))
            .map_err(text)?;
        let (x, y) = (SIZE.0 as i32 - 182, 70 + 24 * at as i32);
        area.draw(&PathElement::new(vec![(x, y), (x + 22, y)], style))
            .map_err(text)?;
        area.draw(&Text::new(name, (x + 28, y), legend.clone()))
            .map_err(text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{
        super::report::{Config, summarise, tests::app},
        *,
    };

    #[test]
    fn a_picture_has_labelled_axes_and_every_line() {
        let apps = vec![app("quick", true, &[0.9]), app("slow", false, &[0.1])];
        let report = AppsReport {
            benchmark: "apps",
            verified: true,
            config: Config {
                server: "shm:///none".into(),
                size_bytes: 1,
                shares_percent: vec![50.0],
                threads: 1,
                repeat: 1,
                smoke: true,
            },
            summary: summarise(&apps, &[50.0]),
            apps,
        };
        let path = std::env::temp_dir().join(format!("farpage-picture-{}.svg", std::process::id()));
        draw(&report, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for expected in [
            "local memory, %",
            "performance, %",
            "quick",
            "slow (not in the mean)",
            "geometric mean",
        ] {
            assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
        }
        draw(&report, Path::new("/nonexistent/x.svg")).unwrap_err();
    }
}
