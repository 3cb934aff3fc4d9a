//! `cargo xtask test`: the whole suite, benchmarks included, and a closing line that hides nothing.
//!
//! The rule it keeps: all test programs are built first, with one set of features, and then run
//! side by side. The same list of jobs serves `--quick` and `--again`.

pub(crate) mod schedule;
pub(crate) mod tally;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use self::{
    schedule::{Job, Place},
    tally::Tally,
};
use crate::{
    children, data,
    programs::{self, Program},
    rdma, setup,
};

/// Test programs that take longest, the longest first: they begin first, so that none is alone at
/// the end.
const LONG: [&str; 20] = [
    "crates/farpage fork_budget",
    "crates/run in_thread",
    "bench chaos",
    "bench umap",
    "bench cli",
    "crates/capi examples",
    "crates/farpage torture",
    "crates/vm kernel",
    "crates/capi umap",
    "bench figures",
    "crates/run anything",
    "crates/run programs",
    "crates/farpage budget",
    "crates/farpage lifecycle",
    "crates/store farpage_store",
    "crates/pager farpage_pager",
    "bench apps",
    "crates/python pytest",
    "crates/farpage kill",
    "crates/pager protocol_model",
];

/// Test programs that compare times: nothing else runs beside them.
const ALONE: [&str; 0] = [];

/// Test programs that `--quick` leaves out: the slowest, except for the own tests of `pager` and
/// `store`.
const NOT_QUICK: [&str; 21] = [
    "bench apps",
    "bench chaos",
    "bench cli",
    "bench figures",
    "bench train_aggregators",
    "bench umap",
    "crates/capi examples",
    "crates/capi umap",
    "crates/farpage budget",
    "crates/farpage fork_budget",
    "crates/farpage kill",
    "crates/farpage lifecycle",
    "crates/farpage regions",
    "crates/farpage torture",
    "crates/pager protocol_model",
    "crates/python pytest",
    "crates/run anything",
    "crates/run in_thread",
    "crates/run memory",
    "crates/vm kernel",
    "memserver deaths",
];

/// Programs that run with the build that users get: optimised, without checks of overflow, and
/// without the feature `rdma`. Torture, killed servers, installed libraries, and differences
/// without RDMA. The profile does not optimise across crates, which would be done anew for each
/// program.
const OPTIMISED: [&str; 11] = [
    "--profile=optimised",
    "--package=farpage",
    "--package=farpage-memserver",
    "--package=farpage-fabric",
    "--package=farpage-capi",
    "--test=torture",
    "--test=kill",
    "--test=daemon",
    "--test=auto",
    "--test=examples",
    "--test=readme",
];

/// Test programs that run only without the feature `rdma`: users of the static libraries link no
/// library of RDMA.
const WITHOUT_RDMA: [&str; 2] = ["crates/capi examples", "crates/capi readme"];

/// Selection of tests to run.
#[derive(Clone, Copy, PartialEq)]
enum Scope {
    /// Everything.
    Whole,
    /// Programs that take less than three minutes, once built.
    Quick,
    /// Programs that the arguments for cargo and for the test programs select.
    Named,
}

/// The command line of `cargo xtask test`.
struct Options<'a> {
    scope: Scope,
    /// Number of runs of all jobs, one after another.
    rounds: usize,
    /// Number of threads that compute beside the jobs.
    busy_loops: usize,
    for_cargo: Vec<&'a str>,
    for_programs: Vec<&'a str>,
}

impl Options<'_> {
    fn read(args: &[String]) -> Result<Options<'_>> {
        let mut options = Options {
            scope: Scope::Whole,
            rounds: 1,
            busy_loops: 0,
            for_cargo: Vec::new(),
            for_programs: Vec::new(),
        };
        let mut args = args.iter().map(String::as_str);
        while let Some(arg) = args.next() {
            let mut number = || match args.next().map(str::parse) {
                Some(Ok(number)) => Ok(number),
                _ => bail!("`{arg}` takes a number"),
            };
            match arg {
                "--again" => options.rounds = number()?,
                "--beside" => options.busy_loops = number()?,
                "--quick" => options.scope = Scope::Quick,
                "--" => options.for_programs = args.by_ref().collect(),
                other => options.for_cargo.push(other),
            }
        }
        if !options.for_cargo.is_empty() || !options.for_programs.is_empty() {
            if options.scope == Scope::Quick {
                bail!("`--quick` takes nothing that names tests: leave it out");
            }
            options.scope = Scope::Named;
        }
        Ok(options)
    }

    /// Returns a `cargo test` of these options, with `features`.
    fn cargo(&self, features: &[&str]) -> Command {
        let mut cargo = children::cargo();
        cargo.arg("test");
        let names_packages = |arg: &&str| arg.starts_with("-p") || arg.starts_with("--package");
        if !self.for_cargo.iter().any(names_packages) {
            cargo.arg("--workspace").args(features);
        }
        cargo.args(&self.for_cargo);
        cargo
    }
}

/// Builds and runs the tests; `args` are those of the command.
///
/// # Errors
/// Tests that cannot be built or started. A failing test is an exit code.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let begun = Instant::now();
    let options = Options::read(args)?;
    if let Err(error) = data::fetch() {
        // Tests that need the data say that they are skipped.
        eprintln!("warning: no training data: {error:#}");
    }
    let mut tally = Tally::default();
    let mut no_rdma = None;
    let mut features: &[&str] = &[];
    if options.scope != Scope::Named {
        no_rdma = setup::install(&rdma::NEEDS, "RDMA").err();
        match &no_rdma {
            None => features = &["--features", "rdma"],
            Some(why) => println!("Building without RDMA: {why:#}"),
        }
    }
    println!("Building the tests ...");
    let built = programs::build(options.cargo(features).arg("--no-run"))?;
    let filters = &options.for_programs;
    let optimised;
    let mut jobs: Vec<Job> = Vec::new();
    if options.scope == Scope::Whole {
        println!("Building some of them optimised, too ...");
        let mut cargo = children::cargo();
        optimised = programs::build(cargo.args(["test", "--no-run"]).args(OPTIMISED))?;
        let tests = optimised.iter();
        jobs.extend(tests.map(|program| program_job("optimised: ", program, &[])));
        jobs.push(rdma_job(&built, no_rdma));
    }
    let runs = |program: &&Program| features.is_empty() || !WITHOUT_RDMA.contains(&&*program.label);
    let tests = built.iter().filter(runs);
    jobs.extend(tests.map(|program| program_job("", program, filters)));
    if !options.for_cargo.iter().any(|arg| selects_targets(arg)) {
        let docs = || {
            let mut docs = options.cargo(features);
            docs.args(["--doc", "--no-fail-fast", "--", "--show-output"]);
            docs.args(filters);
            docs
        };
        jobs.push(shared("documentation tests", move |tally| {
            run_tests("cargo test --doc", &mut docs(), tally)
        }));
    }
    if options.scope == Scope::Quick {
        jobs.retain(|job| !NOT_QUICK.contains(&&*job.label));
        let others = ["the optimised programs", "the tests of RDMA"];
        for what in NOT_QUICK.iter().copied().chain(others) {
            tally.skips.push(format!("{what}: left out by --quick"));
        }
    }
    let rank = |label: &str| {
        let label = label.trim_start_matches("optimised: ");
        LONG.iter().position(|long| *long == label)
    };
    jobs.sort_by_key(|job| rank(&job.label).unwrap_or(LONG.len()));
    println!(
        "Built in {} s. Running {} programs, {} at a time ...",
        begun.elapsed().as_secs(),
        jobs.len(),
        schedule::LANES
    );

    let mut failed_in: BTreeMap<String, usize> = BTreeMap::new();
    for round in 1..=options.rounds {
        let ended = schedule::beside(options.busy_loops, || schedule::run(&jobs))?;
        if options.rounds > 1 {
            println!("\nround {round} of {}: {}", options.rounds, ended.counts());
        }
        for failure in BTreeSet::from_iter(&ended.failures) {
            *failed_in.entry(failure.clone()).or_default() += 1;
        }
        tally.merge(ended);
    }
    if options.rounds > 1 {
        for (test, rounds) in failed_in {
            println!("FAILED in {rounds} of {} rounds: {test}", options.rounds);
        }
    }
    println!(
        "\n{} s in all, building included",
        begun.elapsed().as_secs()
    );
    Ok(tally.close())
}

/// Runs only the tests that need RDMA, in the virtual machine; with `filters` those whose name
/// contains one of them.
///
/// # Errors
/// Tests that do not build.
pub(crate) fn run_rdma(filters: &[String]) -> Result<ExitCode> {
    let why_not = setup::install(&rdma::NEEDS, "RDMA").err();
    let mut tally = Tally::of_vm();
    match why_not {
        None => rdma::run(&rdma::build()?, filters, &mut tally)?,
        Some(why) => rdma::skip(&why, &mut tally),
    }
    print!("{}", tally.shown);
    Ok(tally.close())
}

/// Makes the job of a test program.
pub(crate) fn program_job<'a>(prefix: &str, program: &'a Program, args: &'a [&'a str]) -> Job<'a> {
    Job {
        label: format!("{prefix}{}", program.label),
        place: match ALONE.contains(&&*program.label) {
            true => Place::Alone,
            false => Place::Shared,
        },
        work: Box::new(|tally| run_program(program, args, tally)),
    }
}

/// Makes a job for one of the lanes.
pub(crate) fn shared<'a>(
    label: &str,
    work: impl Fn(&mut Tally) -> Result<()> + Sync + 'a,
) -> Job<'a> {
    Job {
        label: label.to_owned(),
        place: Place::Shared,
        work: Box::new(work),
    }
}

/// Makes the job of all tests of RDMA, or of printing `why_not`.
fn rdma_job<'a>(tests: &'a [Program], why_not: Option<anyhow::Error>) -> Job<'a> {
    Job {
        label: "RDMA, in a virtual machine with Soft-RoCE".to_owned(),
        // An emulated machine beside others is so slow that connections time out.
        place: Place::Alone,
        work: Box::new(move |tally| {
            *tally = Tally::of_vm();
            match &why_not {
                None => rdma::run(tests, &[], tally)?,
                Some(why) => rdma::skip(why, tally),
            }
            Ok(())
        }),
    }
}

/// Runs a test program to its end and counts its tests.
///
/// # Errors
/// A program that cannot be started.
fn run_program(program: &Program, args: &[&str], tally: &mut Tally) -> Result<()> {
    let mut command = program.command();
    command
        // The time of each test is an unstable option of libtest.
        .env("RUSTC_BOOTSTRAP", "1")
        .args(["--show-output", "-Zunstable-options", "--report-time"])
        .args(args);
    run_tests(&program.label, &mut command, tally)
}

fn run_tests(name: &str, command: &mut Command, tally: &mut Tally) -> Result<()> {
    let failed_before = tally.failures.len();
    let (output, input) = std::io::pipe().context("cannot make a pipe")?;
    let errors = input.try_clone().context("cannot share a pipe")?;
    let child = children::spawn(command.stdout(input).stderr(errors))?;
    // The child alone holds the pipe's other end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    for line in BufReader::new(output).split(b'\n') {
        tally.take(&line.context("cannot read what the tests print")?);
    }
    let status = children::wait(child)?;
    // A program that crashes takes its tests' results with it and reports none.
    if !status.success() && tally.failures.len() == failed_before {
        tally.fail(format!(
            "{name}: it ended with {status}; the test named last was running"
        ));
    }
    Ok(())
}

/// True if an argument of `cargo test` chooses among programs. Documentation tests are none.
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

#[cfg(test)]
mod unit {
    use std::path::Path;

    use super::*;

    /// Returns the labels of all test programs, as [`Program`]s have them.
    fn labels() -> BTreeSet<String> {
        let mut metadata = children::cargo();
        metadata.args(["metadata", "--no-deps", "--format-version", "1"]);
        let output = metadata.output().expect("cargo runs this test");
        let metadata: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("cargo's metadata is JSON");
        let root = Path::new(metadata["workspace_root"].as_str().expect("a workspace"));
        let mut labels = BTreeSet::new();
        for package in metadata["packages"].as_array().expect("packages") {
            let manifest = Path::new(package["manifest_path"].as_str().expect("a manifest"));
            let folder = manifest.parent().expect("a manifest lies in a folder");
            let folder = folder.strip_prefix(root).unwrap_or(folder).display();
            for target in package["targets"].as_array().expect("targets") {
                let name = target["name"].as_str().expect("a target has a name");
                labels.insert(format!("{folder} {name}"));
            }
        }
        labels
    }

    #[test]
    fn programs_that_are_named_here_exist() {
        let labels = labels();
        for label in LONG
            .iter()
            .chain(&ALONE)
            .chain(&NOT_QUICK)
            .chain(&WITHOUT_RDMA)
        {
            assert!(
                labels.contains(*label),
                "there is no test program `{label}`"
            );
        }
    }

    #[test]
    fn rounds_and_busy_loops_are_told_from_what_is_cargos() {
        let args = [
            "--again", "3", "-p", "farpage", "--beside", "2", "--", "fork",
        ];
        let args = args.map(str::to_owned);
        let options = Options::read(&args).expect("these are options");
        assert!(options.scope == Scope::Named);
        assert_eq!((options.rounds, options.busy_loops), (3, 2));
        assert_eq!(options.for_cargo, ["-p", "farpage"]);
        assert_eq!(options.for_programs, ["fork"]);
        for wrong in [
            &["--again"][..],
            &["--beside", "x"],
            &["--quick", "-p", "farpage"],
        ] {
            let wrong: Vec<String> = wrong.iter().map(|&word| word.to_owned()).collect();
            assert!(Options::read(&wrong).is_err(), "{wrong:?}");
        }
    }
}
