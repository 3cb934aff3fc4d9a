//! `cargo xtask bench --smoke`: every benchmark once, with tiny sizes. It shows that they work, and
//! nothing about speed.
//!
//! The rule it keeps: the list of runs is that of `farpage-bench`'s own tests, which check each
//! report.

use std::process::ExitCode;

use anyhow::Result;

use crate::children;

/// Test programs that together run every benchmark.
const PROGRAMS: [&str; 5] = ["cli", "apps", "chaos", "figures", "umap"];

/// Runs the command `cargo xtask bench --smoke`.
///
/// # Errors
/// Cargo cannot be started. A test that fails is an exit code.
pub(crate) fn run() -> Result<ExitCode> {
    let mut tests = children::cargo();
    tests.args(["test", "--no-fail-fast", "--package", "farpage-bench"]);
    tests.args(PROGRAMS.map(|program| format!("--test={program}")));
    children::code(&mut tests)
}
