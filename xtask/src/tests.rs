//! `cargo xtask test`: the whole suite, benchmarks included, and a closing line that hides nothing.
//!
//! The rule it keeps: every test is counted as passed, failed or skipped. A test that cannot run here says so by a line
//! `SKIPPED: <test>: <why>` on its standard error and returns; an ignored test counts as skipped too. libtest
//! keeps what a passing test prints to itself, so the programs run with `--show-output` and the lines are picked out of it here.

use std::{
    io::{BufRead, BufReader},
    process::{ExitCode, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{bench, children, rdma};

/// Builds and runs the tests; `args` are for `cargo test`, and after a `--` for the test programs.
///
/// # Errors
/// When the tests cannot be built or started. A failing test is an exit code.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let split = args.iter().position(|arg| arg == "--");
    let (for_cargo, for_programs) = match split {
        Some(at) => (&args[..at], &args[at + 1..]),
        None => (args, &[][..]),
    };
    let names_packages = for_cargo
        .iter()
        .any(|arg| arg.starts_with("-p") || arg.starts_with("--package"));
    let scope = if names_packages {
        &[][..]
    } else {
        &["--workspace"][..]
    };

    // Built first and apart, so that the compiler's progress and errors reach the terminal as they are.
    println!("Building the tests ...");
    let built = children::status(
        children::cargo()
            .args(["test", "--no-run"])
            .args(scope)
            .args(for_cargo),
    )?;
    if !built.success() {
        bail!("the tests do not build; what went wrong is printed above");
    }

    let mut run = children::cargo();
    run.args(["test", "--no-fail-fast"])
        .args(scope)
        .args(for_cargo);
    run.args(["--", "--show-output"])
        .args(for_programs)
        .stdout(Stdio::piped());
    let mut child = children::spawn(&mut run)?;
    let output = child
        .stdout
        .take()
        .expect("the standard output was set to a pipe above");
    let mut tally = Tally::default();
    for line in BufReader::new(output).split(b'\n') {
        tally.show(&line.context("cannot read what the tests print")?);
    }
    let status = children::wait(child)?;
    // A program that crashes takes its tests' results with it and reports none.
    if !status.success() && tally.failed == 0 {
        eprintln!("A test program died or could not be built: cargo says above which one.");
        tally.failed = 1;
    }
    // Part of the whole suite only, not of what somebody asked for.
    if args.is_empty() {
        let benchmarks = bench::smoke()?;
        tally.passed += benchmarks.passed;
        tally.failed += benchmarks.failed;
        tally.skips.extend(benchmarks.skips);
        rdma::run(&[], &mut tally)?;
    }
    Ok(tally.close())
}

/// The tests that need RDMA alone, in the virtual machine; with `filters` those whose name contains one of them.
///
/// # Errors
/// As [`rdma::run`].
pub(crate) fn run_rdma(filters: &[String]) -> Result<ExitCode> {
    let mut tally = Tally::default();
    rdma::run(filters, &mut tally)?;
    Ok(tally.close())
}

/// What the test programs have reported so far.
#[derive(Default)]
pub(crate) struct Tally {
    passed: usize,
    pub(crate) failed: usize,
    /// `<test>: <why>`
    pub(crate) skips: Vec<String>,
    /// Skips of the program that runs now that it will report as passed.
    skips_passed: usize,
    /// Inside the part where libtest repeats what passing tests printed.
    in_successes: bool,
}

impl Tally {
    /// Counts what a line of a test program says and prints it, unless it is for us alone.
    pub(crate) fn show(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        if self.take(&line) {
            println!("{line}");
        }
    }

    /// Prints the closing lines.
    fn close(self) -> ExitCode {
        println!();
        for skip in &self.skips {
            println!("SKIPPED: {skip}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skips.len()
        );
        match self.failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }

    /// Counts what the line says; returns whether a person wants to see it.
    fn take(&mut self, line: &str) -> bool {
        if let Some(skip) = skipped(line) {
            self.skips.push(skip.to_owned());
            self.skips_passed += 1;
            return false;
        }
        if let Some((test, why)) = ignored(line) {
            self.skips.push(format!("{test}: {why}"));
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.passed += count(result, "passed").saturating_sub(self.skips_passed);
            self.failed += count(result, "failed");
            self.skips_passed = 0;
        }
        !self.in_successes
    }
}

/// What is skipped and why, of a line that says so. `skipped: why` counts, too, since a test that
/// words it so must not look passed.
fn skipped(line: &str) -> Option<&str> {
    let (word, skip) = line.trim_start().split_once(": ")?;
    word.eq_ignore_ascii_case("skipped").then_some(skip)
}

/// `test name ... ignored, reason`
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (test, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let why = outcome.strip_prefix("ignored")?.trim_start_matches(", ");
    Some((
        test,
        if why.is_empty() {
            "ignored, it does not say why"
        } else {
            why
        },
    ))
}

/// The number before `word` in `ok. 3 passed; 0 failed; ...`.
fn count(result: &str, word: &str) -> usize {
    let words: Vec<&str> = result
        .split([' ', ';', '.'])
        .filter(|word| !word.is_empty())
        .collect();
    words
        .windows(2)
        .find(|pair| pair[1] == word)
        .and_then(|pair| pair[0].parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod unit {
    use super::*;

    const OUTPUT: &str = "\
running 5 tests
test a ... ok
test b ... ok
test e ... ok
test c ... ignored, needs a NIC
test d ... FAILED

successes:

---- b stdout ----
SKIPPED: b: no permission

---- e stdout ----
skipped: no such file system

successes:
    a
    b
    e

failures:

---- d stdout ----
it broke

failures:
    d

test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";

    #[test]
    fn every_test_is_counted_once() {
        let mut tally = Tally::default();
        let shown: Vec<&str> = OUTPUT.lines().filter(|line| tally.take(line)).collect();
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert_eq!(
            tally.skips,
            ["c: needs a NIC", "b: no permission", "no such file system"]
        );
        assert!(shown.contains(&"it broke"));
        assert!(!shown.contains(&"---- b stdout ----"));
    }
}
