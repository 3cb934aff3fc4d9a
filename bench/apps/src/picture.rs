//! The picture of a run: performance over local memory, a line for each application, as SVG.

use std::path::Path;

use anyhow::Result;

use crate::report::AppsReport;
use farpage_bench_kit::{
    panels::{self, Line},
    plot,
};

const SIZE: (u32, u32) = (1100, 600);
/// Pixels beside the chart for the names of its lines.
const LEGEND: u32 = 340;

/// Draws the report to a file.
pub(crate) fn draw(report: &AppsReport, path: &Path) -> Result<()> {
    let mut names: Vec<String> = report.apps.iter().map(|app| app.shown_name()).collect();
    let mut lines: Vec<Line> = Vec::new();
    for app in &report.apps {
        let points = app.shares.iter();
        let points = points.map(|s| (s.share_percent, s.performance * 100.0));
        lines.push(points.collect());
    }
    let mean = report.summary.iter();
    let mean = mean.filter_map(|s| Some((s.share_percent, s.geometric_mean? * 100.0)));
    let mean: Line = mean.collect();
    if !mean.is_empty() {
        names.push("geometric mean".to_owned());
        lines.push(mean);
    }
    for line in &mut lines {
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    plot::draw_svg(path, SIZE, |area| {
        let (chart, legend) = area.split_horizontally(SIZE.0 - LEGEND);
        panels::legend(&legend, (0, 24), names.iter().map(String::as_str))?;
        let title = "performance, % of all in local memory";
        let across = "local memory, % of the application's";
        panels::lines(&chart, title, across, &lines)
    })
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
            config: Config::default(),
            summary: summarise(&apps, &[50.0]),
            apps,
        };
        let path = std::env::temp_dir().join(format!("farpage-picture-{}.svg", std::process::id()));
        draw(&report, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let axes = ["local memory, %", "performance, %"];
        for expected in [
            &axes[..],
            &["quick", "slow (not in the mean)", "geometric mean"],
        ]
        .concat()
        {
            assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
        }
        draw(&report, Path::new("/nonexistent/x.svg")).unwrap_err();
    }
}
