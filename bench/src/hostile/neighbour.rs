//! Process beside the victim: its report to the benchmark, and its end.

use std::{
    io::{self, Read},
    thread,
};

use anyhow::{Context, Result};
use farpage_bench_kit::out::say;
use serde::Serialize;

/// Ends this process, a neighbour, when the benchmark that started it is gone.
pub(super) fn end_with_parent() {
    thread::spawn(|| {
        // The benchmark writes nothing here: the read ends when the benchmark closes its end.
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
}

/// Prints a neighbour's report, for the benchmark.
pub(super) fn tell(report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(report).context("a report is JSON")?;
    say(text)
}
