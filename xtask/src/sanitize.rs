//! `cargo xtask sanitize`: code that reads bytes from strangers, and code that keeps pages apart,
//! under the address sanitizer.
//!
//! The rule it keeps: it needs only the stable toolchain and the C compiler. The compiler is told
//! to accept its unstable option (`RUSTC_BOOTSTRAP`), and everything is built apart, below
//! `target/sanitize`. The C code of ZFP and LZ4 is instrumented as well. libFuzzer sees coverage by
//! options that are stable.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    children, programs,
    tests::{
        program_job,
        schedule::{self, Job},
        shared,
        tally::Tally,
    },
};

/// Tests that run under the sanitizer: codecs and their C code, by themselves and under the store,
/// and servers whose clients lie. `pager` and `wire` forbid unsafe code and call none of this. With
/// the feature, the fuzz targets are built, too.
const TESTS: [&str; 8] = [
    "--package=farpage-codec",
    "--package=farpage-store",
    "--package=farpage-memserver",
    "--package=farpage-fuzz",
    "--features=farpage-fuzz/libfuzzer",
    "--lib",
    "--test=hostile",
    "--test=bounded",
];

/// Tests of a server's memory, which are left out. The sanitizer keeps freed memory for a while,
/// and takes several times as much.
const PASSED_OVER: [&str; 4] = [
    "--skip",
    "a_publication_of_millions_of_ids_takes_no_memory_and_no_time_of_others",
    "--skip",
    "requests_that_are_half_sent_take_their_senders_room_and_nothing_that_is_lent",
];

/// The programs that libFuzzer drives.
const TARGETS: [&str; 4] = [
    "wire_control",
    "wire_data",
    "codec_blocks",
    "server_connection",
];

/// Target of the build. It is named, so that build scripts are built without the sanitizer.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

const FLAGS: &str = "-Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Time beyond libFuzzer's own limit after which it counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the tests once and each fuzz target for `seconds`.
///
/// # Errors
/// A program that cannot be built or started. A finding is an exit code.
pub(crate) fn run(seconds: u64) -> Result<ExitCode> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the sanitizer is tried on x86-64 only");
    }
    println!("Building tests and fuzz targets with the address sanitizer ...");
    let tests = programs::build(instrumented().args(TESTS))?;
    let fuzzer = Fuzzer::prepare(seconds)?;
    let mut jobs: Vec<Job> = (tests.iter())
        .map(|program| program_job("sanitized: ", program, &PASSED_OVER))
        .collect();
    jobs.extend(TARGETS.map(|target| {
        let fuzzer = &fuzzer;
        shared(&format!("fuzz {target}"), move |tally| {
            fuzzer.run(target, tally)
        })
    }));
    Ok(schedule::run(&jobs)?.close())
}

/// Reads `[--seconds N]`.
pub(crate) fn seconds(args: &[String]) -> Option<u64> {
    match args {
        [] => Some(15),
        [option, seconds] if option == "--seconds" => seconds.parse().ok(),
        _ => None,
    }
}

/// The fuzz targets, built, and their corpus.
struct Fuzzer {
    seconds: u64,
    built: PathBuf,
    corpus: PathBuf,
    findings: PathBuf,
}

impl Fuzzer {
    /// Makes the folders and writes the seeds.
    fn prepare(seconds: u64) -> Result<Fuzzer> {
        let fuzzer = Fuzzer {
            seconds,
            built: folder().join(TRIPLE).join("debug"),
            corpus: folder().join("corpus"),
            findings: folder().join("findings"),
        };
        let mut seeds = Command::new(fuzzer.built.join("farpage-fuzz-seeds"));
        let why = "the seeds cannot be written; why is printed above";
        children::must(seeds.arg(&fuzzer.corpus), why)?;
        fs::create_dir_all(&fuzzer.findings)
            .context("cannot create a folder below target/sanitize")?;
        Ok(fuzzer)
    }

    /// Runs `target` on its seeds, on earlier findings, and on libFuzzer's variations of both.
    fn run(&self, target: &str, tally: &mut Tally) -> Result<()> {
        let mut fuzzer = Command::new(self.built.join(target));
        fuzzer
            .arg(format!("-max_total_time={}", self.seconds))
            // Seconds after which an input counts as hung.
            .arg("-timeout=20")
            .args(["-print_final_stats=1", "-verbosity=0", "-close_fd_mask=1"])
            .arg(format!(
                "-artifact_prefix={}/{target}-",
                self.findings.display()
            ))
            .arg(self.corpus.join(target));
        let limit = Duration::from_secs(self.seconds) + PATIENCE;
        let failed = match children::status_within(limit, &mut fuzzer)? {
            Some(status) if status.success() => {
                tally.passed += 1;
                return Ok(());
            }
            Some(status) => format!("{status}; the input lies in {}", self.findings.display()),
            None => format!("no end after {} s", limit.as_secs()),
        };
        tally.fail(format!("fuzz {target}: {failed}"));
        Ok(())
    }
}

/// Returns a cargo command that builds tests with instrumented code.
fn instrumented() -> Command {
    let mut cargo = children::cargo();
    cargo
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS)
        .env("CFLAGS", "-fsanitize=address")
        .args(["test", "--no-run", "--target", TRIPLE, "--target-dir"])
        .arg(folder());
    cargo
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/sanitize")
}
