//! The picture of `chaos`: words checked per second, and the memory of which copies are missing,
//! over time.

use std::path::Path;

use anyhow::Result;
use farpage_bench_kit::{
    panels::{self, Area, Line},
    plot,
};

use super::report::{Moment, Report};

const SIZE: (u32, u32) = (1000, 520);
const LEGEND: u32 = 40;

/// Draws `found` to a file.
pub(super) fn draw(found: &Report, path: &Path) -> Result<()> {
    plot::draw_svg(path, SIZE, |area| draw_on(found, area))
}

fn draw_on(found: &Report, area: &Area<'_>) -> Result<(), String> {
    let (legend, rest) = area.split_vertically(LEGEND);
    let cells = rest.split_evenly((2, 1));
    let names = ["measured", "an event", "all copies there again"];
    panels::legend(&legend, (240, 0), names)?;
    let marked = |measured: fn(&Moment) -> f64| -> Vec<Line> {
        let points: Line = (found.timeline.iter())
            .map(|moment| (moment.at_s, measured(moment)))
            .collect();
        let most = points.iter().fold(0.0, |most: f64, at| most.max(at.1));
        // From the bottom to the top and back at each time: one line for all marks.
        let marks = |times: &mut dyn Iterator<Item = f64>| -> Line {
            times
                .flat_map(|at| [(at, 0.0), (at, most), (at, 0.0)])
                .collect()
        };
        let events = || found.events.iter();
        let begun = marks(&mut events().map(|event| event.at_s));
        let healed = marks(&mut events().map(|event| event.at_s + event.healed_s));
        vec![points, begun, healed]
    };
    let words = marked(|moment| moment.words_per_s / 1e6);
    panels::lines(
        &cells[0],
        "million words checked per second",
        "seconds",
        &words,
    )?;
    let missing = marked(|moment| moment.under_protected_bytes as f64 / f64::from(1 << 20));
    panels::lines(
        &cells[1],
        "memory that lacks a copy, MiB",
        "seconds",
        &missing,
    )
}
