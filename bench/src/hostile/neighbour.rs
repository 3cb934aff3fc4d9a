//! Process beside the victim: its report to the benchmark, its CPU time, and its end.

use std::{
    io::{self, Read, Write},
    thread,
};

use anyhow::{Context, Result};
use nix::sys::resource::{UsageWho, getrusage};
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
    let mut stdout = io::stdout();
    writeln!(stdout, "{text}")
        .and_then(|()| stdout.flush())
        .context("cannot report")
}

/// Returns the CPU time of this process in seconds.
pub(super) fn own_cpu_s() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("cannot ask for the CPU time")?;
    let of = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(of(usage.user_time()) + of(usage.system_time()))
}
