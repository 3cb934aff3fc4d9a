//! `cargo xtask test --programs`: installs programs, and runs them under `farpage run` beside plain
//! runs and beside swap.
//!
//! The rule it keeps: Python's packages go into an environment below `target`. Arguments and
//! measurements of the programs are left to the tests of `farpage run`.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Result, bail};

use crate::{
    children,
    setup::{self, Need},
};

const NEEDS: [Need; 18] = [
    Need::program("zstd", "zstd", "zstd"),
    Need::program("xz", "xz-utils", "xz"),
    Need::program("sqlite3", "sqlite3", "sqlite3"),
    Need::program("redis-server", "redis-server", "redis-server"),
    Need::program("redis-benchmark", "redis-tools", "redis-benchmark"),
    Need::program("memcached", "memcached", "memcached"),
    Need::program("minimap2", "minimap2", "minimap2"),
    Need::program("Java", "default-jdk-headless", "java"),
    Need::program("node", "nodejs", "node"),
    Need::program("perl", "perl", "perl"),
    Need::program("gawk", "gawk", "gawk"),
    Need::program("R", "r-base-core", "Rscript"),
    Need::program("octave", "octave", "octave-cli"),
    Need::program("jq", "jq", "jq"),
    Need::program("swipl", "swi-prolog-nox", "swipl"),
    Need::program("sbcl", "sbcl", "sbcl"),
    Need::program("tclsh", "tcl", "tclsh"),
    Need::new("Python with venv", "python3-venv", || {
        children::works("python3", &["-c", "import venv, ensurepip"])
    }),
];

const PACKAGES: [&str; 8] = [
    "numpy==2.4.6",
    "duckdb==2.0.0",
    "polars==2.1.0",
    "pyarrow==26.0.1",
    "scikit-learn==1.9.1",
    "lightgbm==4.7.0",
    "networkx==3.6.1",
    "pymemcache==4.0.0",
];

/// Runs all programs, or those with `names`.
///
/// # Errors
/// A package that cannot be installed or built. A program whose output differs is an exit code.
pub(crate) fn run(names: &[String]) -> Result<ExitCode> {
    setup::install(&NEEDS, "running programs as they are")?;
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let target = target.canonicalize()?;
    let python = packages(&target.join("programs"))?;
    let release = ["build", "--release", "--package=farpage-run"];
    step(
        children::cargo()
            .args(release)
            .arg("--package=farpage-memserver"),
    )?;
    let mut tests = children::cargo();
    tests
        .args(["test", "--package=farpage-run", "--test=farpage_programs"])
        .args(["--", "--ignored", "--nocapture"])
        .env("FARPAGE_BINARIES", target.join("release"))
        .env("FARPAGE_PYTHON", python)
        .env("FARPAGE_PROGRAMS", names.join(" "));
    children::code(&mut tests)
}

/// Returns the Python that has the packages, which it installs into `folder`.
fn packages(folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    if !python.exists() {
        step(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "--disable-pip-version-check", "install"])
        .args(["--quiet", "--only-binary=:all:"])
        .args(PACKAGES);
    step(&mut pip)?;
    Ok(python)
}

fn step(command: &mut Command) -> Result<()> {
    let status = children::status(command)?;
    if !status.success() {
        bail!("{command:?} failed ({status})");
    }
    Ok(())
}
