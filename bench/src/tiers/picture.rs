//! The picture of `tiers`: latency by where bytes are, the server's memory over time, and the
//! slowdown over its memory.

use std::path::Path;

use anyhow::Result;
use farpage_bench_kit::{
    panels::{self, Area, Line},
    plot,
};

use super::{Tiers, turns::Row};

const SIZE: (u32, u32) = (1500, 470);
const LEGEND: u32 = 40;

/// Draws `found` to a file. Parts that were not measured stay empty.
pub(super) fn draw(found: &Tiers, path: &Path) -> Result<()> {
    plot::draw_svg(path, SIZE, |area| draw_on(found, area))
}

fn draw_on(found: &Tiers, area: &Area<'_>) -> Result<(), String> {
    let (legend, rest) = area.split_vertically(LEGEND);
    let cells = rest.split_evenly((1, 3));
    if let Some(latency) = &found.latency {
        let bars = [
            ("no tiers", latency.plain_us),
            ("in memory", latency.hot_us),
            ("pool", latency.pool_us),
            ("disk", latency.disk_us),
        ];
        panels::bars(&cells[0], "READ of 64 KiB, us", &bars)?;
    }
    if found.curve.is_empty() {
        return Ok(());
    }
    let percent = |row: &Row| 100.0 * row.memory_share;
    let names = found.curve.iter();
    let names: Vec<_> = names
        .map(|row| format!("--memory {:.0} % of the lent", percent(row)))
        .collect();
    panels::legend(&legend, (300, 0), names.iter().map(String::as_str))?;
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let held = |row: &Row| -> Line {
        let held = row.held.iter();
        held.map(|(seconds, bytes)| (*seconds, mib(*bytes)))
            .collect()
    };
    let lines: Vec<Line> = found.curve.iter().map(held).collect();
    let title = "all that the server holds, MiB";
    panels::lines(&cells[1], title, "seconds", &lines)?;
    let slowdown = |row: &Row| (percent(row), row.slowdown[0]);
    let line = found.curve.iter().map(slowdown).collect();
    let title = "mean access over all in memory";
    panels::lines(&cells[2], title, "--memory, % of the lent", &[line])
}
