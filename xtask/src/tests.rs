//! `cargo xtask test`: the whole suite, benchmarks included, and a closing line that hides nothing.
//!
//! The rule it keeps: every test is counted as passed, failed or skipped. A test that cannot run
//! here says so by a line `SKIPPED: <test>: <why>` on its standard error and returns; an ignored
//! test counts as skipped too. libtest keeps what a passing test prints to itself, so the programs
//! run with `--show-output` and the lines are picked out of it here.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{
    bench, children, data,
    programs::{self, Program},
    rdma,
};

/// Test programs that take longer than [`SHORT`], and how long they take on two cores, in
/// seconds: measured, and renewed when the figure that is printed at the start has become wrong.
const LONG_S: [(&str, u64); 27] = [
    ("bench apps", 20),
    ("bench cli", 9),
    ("bench figures", 39),
    ("bench train", 10),
    ("bench train_checkpoint", 8),
    ("bench umap", 60),
    ("crates/capi examples", 60),
    ("crates/capi umap", 42),
    ("crates/fabric conformance", 9),
    ("crates/fabric server", 4),
    ("crates/farpage budget", 34),
    ("crates/farpage in_thread", 15),
    ("crates/farpage kill", 20),
    ("crates/farpage lifecycle", 30),
    ("crates/farpage pin", 4),
    ("crates/farpage regions", 10),
    ("crates/farpage stores", 9),
    ("crates/farpage torture", 60),
    ("crates/pager farpage_pager", 25),
    ("crates/pager protocol_model", 17),
    ("crates/python pytest", 20),
    ("crates/store farpage_store", 30),
    ("crates/train exchange", 5),
    ("crates/vm farpage_vm", 14),
    ("crates/vm kernel", 46),
    ("memserver conformance", 4),
    ("memserver deaths", 10),
];
/// What any other program takes, on average.
const SHORT: Duration = Duration::from_millis(500);
/// Programs that `--quick` leaves out: the slowest, but for the tests of `pager` and `store` by
/// themselves.
const NOT_QUICK: [&str; 13] = [
    "bench apps",
    "bench figures",
    "bench umap",
    "crates/capi examples",
    "crates/capi umap",
    "crates/farpage budget",
    "crates/farpage kill",
    "crates/farpage lifecycle",
    "crates/farpage regions",
    "crates/farpage torture",
    "crates/pager protocol_model",
    "crates/vm kernel",
    "memserver deaths",
];
const DOCS: Duration = Duration::from_secs(10);
const BENCHMARKS: Duration = Duration::from_secs(60);
const RDMA: Duration = Duration::from_secs(240);
/// Building all of it for the first time.
const BUILD: Duration = Duration::from_secs(360);

/// Whose tests run optimised as well, as what is shipped is: end to end, torture, and servers that
/// are killed. The profile does not optimise across crates, which is done anew for each
/// program.
const RELEASE: [&str; 10] = [
    "--profile=optimised",
    "--package",
    "farpage",
    "--package",
    "farpage-memserver",
    "--test=lifecycle",
    "--test=regions",
    "--test=torture",
    "--test=kill",
    "--test=deaths",
];

/// What is to be run.
#[derive(Clone, Copy, PartialEq)]
enum Scope {
    /// Everything.
    Whole,
    /// What takes less than three minutes, once built.
    Quick,
    /// What the arguments for cargo and for the test programs name.
    Named,
}

/// One line of progress.
struct Step {
    label: String,
    /// How long it takes, as far as is known.
    expected: Duration,
    what: What,
}

enum What {
    Program(Program),
    Docs,
    /// By this program.
    Benchmarks(PathBuf),
    Rdma,
}

/// Builds and runs the tests; `args` are `--quick`, or for `cargo test` and after a `--` for the
/// test programs.
///
/// # Errors
/// When the tests cannot be built or started. A failing test is an exit code.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let begun = Instant::now();
    let (scope, args) = match args {
        [] => (Scope::Whole, args),
        [only] if only == "--quick" => (Scope::Quick, &[][..]),
        _ => (Scope::Named, args),
    };
    let (for_cargo, for_programs) = match args.iter().position(|arg| arg == "--") {
        Some(at) => (&args[..at], &args[at + 1..]),
        None => (args, &[][..]),
    };
    let test = || {
        let mut cargo = children::cargo();
        cargo.arg("test");
        let names_packages = |arg: &String| arg.starts_with("-p") || arg.starts_with("--package");
        if !for_cargo.iter().any(names_packages) {
            cargo.arg("--workspace");
        }
        cargo.args(for_cargo);
        cargo
    };
    let mut tally = Tally::default();
    announce(scope)?;

    if let Err(error) = data::fetch() {
        // Tests that want it say that they are skipped.
        eprintln!("warning: no training data: {error:#}");
    }
    println!("Building the tests ...");
    let built = programs::build(test().arg("--no-run"))?;
    let benchmarks = built.binary("farpage-bench").map(Path::to_owned);
    let mut steps = Vec::new();
    for program in built.tests {
        let label = program.label.clone();
        steps.push(Step::new(label, What::Program(program)));
    }
    if !for_cargo.iter().any(|arg| selects_targets(arg)) {
        steps.push(Step::new("documentation tests".to_owned(), What::Docs));
    }
    if scope == Scope::Whole {
        println!("Building some of them optimised, too ...");
        let mut cargo = children::cargo();
        for program in programs::build(cargo.args(["test", "--no-run"]).args(RELEASE))?.tests {
            let label = format!("{IN_RELEASE}{}", program.label);
            steps.push(Step::new(label, What::Program(program)));
        }
    }
    if scope == Scope::Whole {
        let label = "every benchmark once".to_owned();
        steps.push(Step::new(label, What::Benchmarks(benchmarks?)));
        let label = "RDMA, in a virtual machine with Soft-RoCE".to_owned();
        steps.push(Step::new(label, What::Rdma));
    }
    if scope == Scope::Quick {
        steps.retain(|step| {
            let stays = !NOT_QUICK.contains(&&*step.label);
            if !stays {
                tally.skips.push(format!("{}: {LEFT_OUT}", step.label));
            }
            stays
        });
        for what in [
            "the optimised programs",
            "every benchmark once",
            "the tests of RDMA",
        ] {
            tally.skips.push(format!("{what}: {LEFT_OUT}"));
        }
    }

    let mut progress = Progress::new(&steps);
    for step in steps {
        progress.begins(&step);
        match &step.what {
            What::Program(program) => run_program(program, for_programs, &mut tally)?,
            What::Docs => {
                let mut docs = test();
                docs.args(["--doc", "--no-fail-fast", "--", "--show-output"]);
                run_tests("cargo test --doc", docs.args(for_programs), &mut tally)?;
            }
            What::Benchmarks(program) => {
                let benchmarks = bench::smoke(program)?;
                tally.passed += benchmarks.passed;
                tally.failures.extend(benchmarks.failures);
                tally.skips.extend(benchmarks.skips);
            }
            What::Rdma => rdma::run(&[], &mut tally)?,
        }
        progress.ends(&step);
    }
    println!("\n{} in all, building included", minutes(begun.elapsed()));
    Ok(tally.close())
}

const LEFT_OUT: &str = "left out by --quick";
/// Before the labels of optimised programs.
const IN_RELEASE: &str = "optimised: ";

/// The tests that need RDMA alone, in the virtual machine; with `filters` those whose name contains
/// one of them.
///
/// # Errors
/// As [`rdma::run`].
pub(crate) fn run_rdma(filters: &[String]) -> Result<ExitCode> {
    let mut tally = Tally::default();
    rdma::run(filters, &mut tally)?;
    Ok(tally.close())
}

/// Runs a test program to its end and counts its tests.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn run_program(program: &Program, args: &[String], tally: &mut Tally) -> Result<()> {
    let mut command = program.command();
    command.arg("--show-output").args(args);
    run_tests(&program.label, &mut command, tally)
}

fn run_tests(name: &str, command: &mut Command, tally: &mut Tally) -> Result<()> {
    let failed_before = tally.failures.len();
    let mut child = children::spawn(command.stdout(Stdio::piped()))?;
    let output = child
        .stdout
        .take()
        .expect("the standard output was set to a pipe above");
    for line in BufReader::new(output).split(b'\n') {
        tally.show(&line.context("cannot read what the tests print")?);
    }
    let status = children::wait(child)?;
    // A program that crashes takes its tests' results with it and reports none.
    if !status.success() && tally.failures.len() == failed_before {
        let failure = format!("{name}: it ended with {status}; the test named last was running");
        println!("FAILED: {failure}");
        tally.failures.push(failure);
    }
    Ok(())
}

/// Whether an argument of `cargo test` chooses among programs: documentation tests are none.
fn selects_targets(arg: &str) -> bool {
    [
        "--lib",
        "--bin",
        "--test",
        "--example",
        "--bench",
        "--all-targets",
    ]
    .iter()
    .any(|option| arg.starts_with(option))
}

/// Says how long it will take.
fn announce(scope: Scope) -> Result<()> {
    if scope == Scope::Named {
        return Ok(());
    }
    let labels = labels()?;
    let sum = |labels: &mut dyn Iterator<Item = &String>| -> Duration {
        labels.map(|label| expected(label)).sum()
    };
    let all = labels.len();
    let (what, time) = if scope == Scope::Quick {
        let quick = || labels.iter().filter(|it| !NOT_QUICK.contains(&it.as_str()));
        (
            format!("{} of {all} test programs", quick().count()),
            sum(&mut quick()) + DOCS,
        )
    } else {
        let release = || labels.iter().filter(|label| is_release(label));
        (
            format!(
                "{all} test programs, {} of them optimised as well, every benchmark, \
                 and RDMA in a virtual machine",
                release().count()
            ),
            sum(&mut labels.iter()) + sum(&mut release()) + DOCS + BENCHMARKS + RDMA,
        )
    };
    println!(
        "{what}: {} on two cores that have nothing else to do, and {} more where nothing is built yet.",
        minutes(time),
        minutes(BUILD)
    );
    if scope == Scope::Whole {
        println!("`cargo xtask test --quick` leaves out what takes long: under 3 min once built.");
    }
    println!();
    Ok(())
}

/// The labels of all test programs, as [`Program`]s have them, before anything is built.
fn labels() -> Result<BTreeSet<String>> {
    let mut metadata = children::cargo();
    metadata.args(["metadata", "--no-deps", "--format-version", "1"]);
    let output = metadata.output().context("cannot start cargo")?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("cargo's metadata is not JSON")?;
    let root = Path::new(
        metadata["workspace_root"]
            .as_str()
            .context("no workspace")?,
    );
    let mut labels = BTreeSet::new();
    for package in metadata["packages"].as_array().context("no packages")? {
        let manifest = Path::new(package["manifest_path"].as_str().context("no manifest")?);
        let folder = manifest.parent().context("a manifest lies in a folder")?;
        let folder = folder.strip_prefix(root).unwrap_or(folder).display();
        for target in package["targets"].as_array().context("no targets")? {
            let kind = target["kind"][0].as_str();
            if target["test"] == true && kind != Some("bench") {
                let name = target["name"].as_str().context("a target has a name")?;
                labels.insert(format!("{folder} {name}"));
            }
        }
    }
    Ok(labels)
}

/// How long a test program takes, as far as is known.
fn expected(label: &str) -> Duration {
    let known = LONG_S.iter().find(|(known, _)| *known == label);
    known.map_or(SHORT, |(_, seconds)| Duration::from_secs(*seconds))
}

fn is_release(label: &str) -> bool {
    let name = label.rsplit(' ').next().unwrap_or(label);
    RELEASE
        .iter()
        .any(|option| option.trim_start_matches("--test=") == name)
}

impl Step {
    fn new(label: String, what: What) -> Step {
        let expected = match what {
            What::Program(_) => expected(label.trim_start_matches(IN_RELEASE)),
            What::Docs => DOCS,
            What::Benchmarks(_) => BENCHMARKS,
            What::Rdma => RDMA,
        };
        Step {
            label,
            expected,
            what,
        }
    }
}

/// Where the run has got to. Lines, and nothing that only a terminal understands.
struct Progress {
    /// Of all steps, and of those that have ended.
    count: usize,
    ended: usize,
    /// What was expected of those that have not ended, and of those that have.
    ahead: Duration,
    behind: Duration,
    begun: Instant,
    step_begun: Instant,
}

impl Progress {
    fn new(steps: &[Step]) -> Progress {
        Progress {
            count: steps.len(),
            ended: 0,
            ahead: steps.iter().map(|step| step.expected).sum(),
            behind: Duration::ZERO,
            begun: Instant::now(),
            step_begun: Instant::now(),
        }
    }

    /// `[12/47]`
    fn place(&self) -> String {
        format!("[{:>2}/{}]", self.ended + 1, self.count)
    }

    fn begins(&mut self, step: &Step) {
        self.step_begun = Instant::now();
        println!("\n{} {} ...", self.place(), step.label);
    }

    fn ends(&mut self, step: &Step) {
        let took = self.step_begun.elapsed().as_secs_f64();
        println!(
            "{} {} ... {took:.1} s; {}",
            self.place(),
            step.label,
            self.left(step.expected, self.begun.elapsed())
        );
        self.ended += 1;
    }

    /// What is left when a step has ended, judged by how much longer than expected it took until
    /// here.
    fn left(&mut self, expected: Duration, elapsed: Duration) -> String {
        self.ahead = self.ahead.saturating_sub(expected);
        self.behind += expected;
        let pace = elapsed.as_secs_f64() / self.behind.as_secs_f64().max(1.0);
        let left = self.ahead.mul_f64(pace.clamp(0.5, 10.0));
        match self.ahead {
            Duration::ZERO => "the last".to_owned(),
            _ => format!("{} to go", minutes(left)),
        }
    }
}

/// `about 3 min`, `about 40 s`
fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..90 => format!("about {} s", seconds.next_multiple_of(5)),
        seconds => format!("about {} min", seconds.div_ceil(60)),
    }
}

/// What the test programs have reported so far.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    /// `<test>`, or `<test>: <why>`
    pub(crate) failures: Vec<String>,
    /// `<test>: <why>`
    pub(crate) skips: Vec<String>,
    /// Failures of the program that runs now that it has named.
    failures_named: usize,
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
    pub(crate) fn close(self) -> ExitCode {
        println!();
        for skip in &self.skips {
            println!("SKIPPED: {skip}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failures.len(),
            self.skips.len()
        );
        match self.failures.len() {
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
        if let Some(test) = failed(line) {
            self.failures.push(test.to_owned());
            self.failures_named += 1;
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.passed += count(result, "passed").saturating_sub(self.skips_passed);
            // What a test prints may come between its name and its outcome.
            for _ in self.failures_named..count(result, "failed") {
                self.failures.push("a test whose name is above".to_owned());
            }
            self.failures_named = 0;
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

/// `test name ... FAILED`
fn failed(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
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
    fn what_is_left_follows_the_pace_so_far() {
        let step = |seconds| Step {
            label: "a step".to_owned(),
            expected: Duration::from_secs(seconds),
            what: What::Docs,
        };
        let steps = [step(60), step(240), step(60)];
        let mut progress = Progress::new(&steps);
        let left = |progress: &mut Progress, expected, elapsed| {
            progress.left(Duration::from_secs(expected), Duration::from_secs(elapsed))
        };
        assert_eq!(left(&mut progress, 60, 120), "about 10 min to go");
        assert_eq!(left(&mut progress, 240, 300), "about 60 s to go");
        assert_eq!(left(&mut progress, 60, 360), "the last");
    }

    #[test]
    fn programs_whose_time_is_stored_exist() {
        let labels = labels().expect("cargo knows its own workspace");
        for label in LONG_S.iter().map(|(label, _)| label).chain(&NOT_QUICK) {
            assert!(
                labels.contains(*label),
                "there is no test program `{label}`"
            );
        }
        for option in RELEASE.iter().filter(|it| it.starts_with("--test=")) {
            let name = option.trim_start_matches("--test=");
            assert!(
                labels
                    .iter()
                    .any(|label| label.ends_with(&format!(" {name}")))
            );
        }
    }

    #[test]
    fn every_test_is_counted_once() {
        let mut tally = Tally::default();
        let shown: Vec<&str> = OUTPUT.lines().filter(|line| tally.take(line)).collect();
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failures, ["d"]);
        assert_eq!(
            tally.skips,
            ["c: needs a NIC", "b: no permission", "no such file system"]
        );
        assert!(shown.contains(&"it broke"));
        assert!(!shown.contains(&"---- b stdout ----"));
    }
}
