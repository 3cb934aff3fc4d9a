//! The count of a run's tests, read from the output of test programs.
//!
//! The rule it keeps: every test is counted as passed, failed or skipped. A test that cannot run
//! here prints `SKIPPED: <test>: <why>` on its standard error and returns; an ignored test counts
//! as skipped, too. libtest hides the output of a passing test, so programs run with
//! `--show-output`, and these lines are picked out of it.

use std::{collections::BTreeSet, mem, process::ExitCode};

/// Time of one test beyond which [`Tally::close`] names it.
const SLOW_S: f64 = 20.0;

/// Part of a panic's message that [`Tally::close`] repeats.
const REASON_CHARS: usize = 300;

/// Counts of tests, and the lines to show of the programs that ran them.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    /// Failed tests: `<test>`, or `<test>: <why>`.
    pub(crate) failures: Vec<String>,
    /// Skipped tests: `<test>: <why>`.
    pub(crate) skips: Vec<String>,
    /// Output lines that a person wants to see.
    pub(crate) shown: String,
    /// Tests that took longer than [`SLOW_S`], with their seconds.
    slow: Vec<(f64, String)>,
    /// Names of tests that passed in the virtual machine. Outside it they may be skipped.
    passed_in_vm: BTreeSet<String>,
    /// True while the programs run in the virtual machine.
    in_vm: bool,
    /// Names of the current program's tests that libtest calls passed.
    names_ok: BTreeSet<String>,
    /// Number of failures before the current program.
    failures_before: usize,
    /// Number of skips that the current program is about to report as passed.
    skips_passed: usize,
    /// True inside the part in which libtest repeats the output of passing tests.
    in_successes: bool,
    /// Failed test whose output is being read.
    failed: Option<String>,
    /// Place of the panic whose message is the next line.
    panicked_at: Option<String>,
}

impl Tally {
    /// Makes a tally of programs that run in the virtual machine.
    pub(crate) fn of_vm() -> Tally {
        Tally {
            in_vm: true,
            ..Tally::default()
        }
    }

    /// Counts the outcome in a test program's line, and keeps the line if a person wants to see it.
    pub(crate) fn take(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        if self.count(&line) {
            self.say(&line);
        }
    }

    /// Adds a line to show.
    pub(crate) fn say(&mut self, line: &str) {
        self.shown.push_str(line);
        self.shown.push('\n');
    }

    /// Adds a failure and a line that names it.
    pub(crate) fn fail(&mut self, failure: String) {
        self.say(&format!("FAILED: {failure}"));
        self.failures.push(failure);
        self.failures_before = self.failures.len();
    }

    /// Adds the counts of `other`, whose lines have been shown.
    pub(crate) fn merge(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.failures_before = self.failures.len();
        self.skips.extend(other.skips);
        self.slow.extend(other.slow);
        self.passed_in_vm.extend(other.passed_in_vm);
    }

    /// Returns the counts as text: `3 passed, 0 failed, 1 skipped`.
    pub(crate) fn counts(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failures.len(),
            self.skips.len()
        )
    }

    /// Prints slow tests, skips, failures and the closing line. A test that was skipped here and
    /// passed in the virtual machine counts as passed.
    pub(crate) fn close(mut self) -> ExitCode {
        self.skips.retain(|skip| {
            let test = skip.split(": ").next().unwrap_or(skip);
            !self.passed_in_vm.contains(last_segment(test))
        });
        println!();
        self.slow.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (seconds, test) in &self.slow {
            println!("SLOW: {seconds:.0} s: {test}");
        }
        for skip in &self.skips {
            println!("SKIPPED: {skip}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
        println!("{}", self.counts());
        match self.failures.len() {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }

    /// Counts the outcome in `line`. Returns true if a person wants to see the line.
    fn count(&mut self, line: &str) -> bool {
        if let Some(skip) = skipped(line) {
            let test = skip.split(": ").next().unwrap_or(skip);
            self.names_ok.remove(last_segment(test));
            self.skips.push(skip.to_owned());
            self.skips_passed += 1;
            return false;
        }
        if let Some(outcome) = Outcome::read(line) {
            if outcome.seconds > SLOW_S {
                self.slow.push((outcome.seconds, outcome.test.to_owned()));
            }
            match outcome.verdict {
                "ok" => {
                    self.names_ok.insert(last_segment(outcome.test).to_owned());
                }
                "FAILED" => self.failures.push(outcome.test.to_owned()),
                ignored => {
                    let why = ignored.strip_prefix("ignored, ");
                    let why = why.unwrap_or("ignored, it does not say why");
                    self.skips.push(format!("{}: {why}", outcome.test));
                }
            }
        }
        self.note_reason(line);
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.passed += number_before(result, "passed").saturating_sub(self.skips_passed);
            // Output of a test may come between its name and its outcome.
            let failed = self.failures_before + number_before(result, "failed");
            for _ in self.failures.len()..failed {
                self.failures.push("a test whose name is above".to_owned());
            }
            self.failures_before = self.failures.len();
            self.skips_passed = 0;
            let names_ok = mem::take(&mut self.names_ok);
            if self.in_vm {
                self.passed_in_vm.extend(names_ok);
            }
        }
        !self.in_successes
    }

    /// Adds the first panic in the output of a failed test to its entry in `failures`, so that the
    /// closing lines say why.
    fn note_reason(&mut self, line: &str) {
        let section = line.strip_prefix("---- ");
        if let Some(test) = section.and_then(|it| it.strip_suffix(" stdout ----")) {
            self.failed = Some(test.to_owned());
        } else if let Some(at) = self.panicked_at.take() {
            let failed = self.failed.take();
            let failures = self.failures.iter_mut();
            if let Some(entry) = failures
                .rev()
                .find(|entry| Some(&**entry) == failed.as_ref())
            {
                let message: String = line.chars().take(REASON_CHARS).collect();
                *entry = format!("{entry}: {message} ({at})");
            }
        } else if let Some((_, at)) = line.split_once(" panicked at ")
            && self.failed.is_some()
        {
            self.panicked_at = Some(at.trim_end_matches(':').to_owned());
        }
    }
}

/// A line `test name ... ok <1.2s>`, `... FAILED <1.2s>` or `... ignored, reason`.
struct Outcome<'a> {
    test: &'a str,
    verdict: &'a str,
    seconds: f64,
}

impl Outcome<'_> {
    fn read(line: &str) -> Option<Outcome<'_>> {
        let (test, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
        let timed = verdict.strip_suffix("s>");
        let timed = timed.and_then(|it| it.rsplit_once(" <"));
        let timed = timed.and_then(|(verdict, time)| Some((verdict, time.parse().ok()?)));
        let (verdict, seconds) = timed.unwrap_or((verdict, 0.0));
        let known = ["ok", "FAILED"].contains(&verdict) || verdict.starts_with("ignored");
        known.then_some(Outcome {
            test,
            verdict,
            seconds,
        })
    }
}

/// Returns the name of a test without its modules.
fn last_segment(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// Returns the skipped test and the reason, if a line reports one. `skipped: why` counts, too,
/// since a test with that wording must not look passed.
fn skipped(line: &str) -> Option<&str> {
    let (word, skip) = line.trim_start().split_once(": ")?;
    word.eq_ignore_ascii_case("skipped").then_some(skip)
}

/// Returns the number before `word` in `ok. 3 passed; 0 failed; ...`.
fn number_before(result: &str, word: &str) -> usize {
    let before = result.split_once(word).map_or("", |(before, _)| before);
    let number = before.trim_end().rsplit(' ').next();
    number.and_then(|it| it.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod unit {
    use super::*;

    const OUTPUT: &str = "\
running 5 tests
test a ... ok <0.000s>
test b ... ok <20.500s>
test e ... ok
test c ... ignored, needs a NIC
test d ... FAILED <0.100s>

successes:

---- b stdout ----
SKIPPED: b: no permission

---- e stdout ----
skipped: e: no such file system

successes:
    a
    b
    e

failures:

---- d stdout ----
it broke
thread 'd' (7) panicked at tests/d.rs:9:5:
left is not right
thread 'd' (7) panicked at tests/d.rs:10:5:
while dropping

failures:
    d

test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";

    #[test]
    fn every_test_is_counted_once() {
        let mut tally = Tally::default();
        for line in OUTPUT.lines() {
            tally.take(line.as_bytes());
        }
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failures, ["d: left is not right (tests/d.rs:9:5)"]);
        let skips = [
            "c: needs a NIC",
            "b: no permission",
            "e: no such file system",
        ];
        assert_eq!(tally.skips, skips);
        assert_eq!(tally.slow, [(20.5, "b".to_owned())]);
        assert!(tally.shown.contains("it broke"));
        assert!(!tally.shown.contains("---- b stdout ----"));
        assert!(tally.passed_in_vm.is_empty());
    }

    #[test]
    fn test_skipped_in_the_virtual_machine_has_not_passed_there() {
        let mut tally = Tally::of_vm();
        for line in OUTPUT.lines() {
            tally.take(line.as_bytes());
        }
        assert_eq!(tally.passed_in_vm, BTreeSet::from(["a".to_owned()]));
    }
}
