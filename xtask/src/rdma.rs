//! The tests of RDMA: built here with the feature `rdma`, run in the virtual machine, one boot for all.
//!
//! The rule it keeps: such a test has `rdma` in its name, or stands in a program of [`WHOLE`]; it is run, or counted as skipped with the
//! reason. With `FARPAGE_REQUIRE_VM=1` a skip is a failure. Nothing but this needs the libraries of RDMA, so nothing else installs them.

use std::{
    env,
    ffi::OsStr,
    io::{self, Read, Write},
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    children,
    setup::{self, Need},
    tests::Tally,
    vm::{End, Machine, Options, Script},
};

/// Whose tests may need RDMA.
const PACKAGES: [&str; 4] = [
    "farpage-fabric",
    "farpage-memserver",
    "farpage",
    "farpage-bench",
];

/// Test programs that run over RDMA as a whole where there is a device.
const WHOLE: [&str; 2] = ["kill", "registered"];

/// For the boot and all tests together, in an emulated machine on two busy cores.
const TIME_MAX: Duration = Duration::from_secs(480);

/// Builds and runs them; with `filters` those whose name contains one of them.
///
/// # Errors
/// When they do not build, or there is no machine although it is required. A failing test and a machine that dies are counted.
pub(crate) fn run(filters: &[String], tally: &mut Tally) -> Result<()> {
    println!("\nThe tests of RDMA, in a virtual machine with Soft-RoCE:");
    let required = env::var_os("FARPAGE_REQUIRE_VM").is_some_and(|it| it == "1");
    let skips_before = tally.skips.len();
    if let Err(why) = try_run(filters, tally)? {
        tally.skips.push(format!("the tests of RDMA: {why:#}"));
    }
    let skips = tally.skips.len() - skips_before;
    if required && skips > 0 {
        eprintln!("FARPAGE_REQUIRE_VM is set: what was skipped of RDMA has failed.");
        tally.failed += skips;
    }
    Ok(())
}

/// The inner result says why they cannot be run here.
fn try_run(filters: &[String], tally: &mut Tally) -> Result<Result<()>> {
    if let Err(why) = setup::install(&NEEDS, "RDMA") {
        return Ok(Err(why));
    }
    let mut script = Script::new();
    for program in build()? {
        let filters: Vec<&OsStr> = match filters {
            [] if WHOLE.contains(&&*program.name) => Vec::new(),
            [] => vec!["rdma".as_ref()],
            filters => filters.iter().map(OsStr::new).collect(),
        };
        if program.has_tests(&filters)? {
            script.line(["cd".as_ref(), program.package.as_os_str()]);
            let words = [
                program.executable.as_os_str(),
                "--show-output".as_ref(),
                // A test has a client and a server, and the machine two processors.
                "--test-threads=1".as_ref(),
            ];
            script.attempt(words.into_iter().chain(filters));
        }
    }

    let options = Options {
        time_max: TIME_MAX,
        ..Options::default()
    };
    let machine = match Machine::prepare(options) {
        Ok(machine) => machine,
        Err(why) => return Ok(Err(why)),
    };
    let mut line = Vec::new();
    let end = machine.run(
        &script,
        &mut |bytes| {
            for &byte in bytes {
                match byte {
                    b'\n' => tally.show(&std::mem::take(&mut line)),
                    byte => line.push(byte),
                }
            }
        },
        // Nobody to tell when our own standard error is gone.
        &mut |bytes| drop(io::stderr().write_all(bytes)),
    );
    let failed = match end {
        Ok(End::Exited(0 | TESTS_FAILED)) => None,
        Ok(End::Exited(status)) => Some(format!("a test program died (status {status})")),
        Ok(End::TimedOut) => Some(format!("not done after {} s", TIME_MAX.as_secs())),
        Err(error) => Some(format!("{error:#}")),
    };
    if let Some(failed) = failed {
        eprintln!("The tests of RDMA failed: {failed}; the last one named above was running.");
        tally.failed += 1;
    }
    Ok(Ok(()))
}

/// The status of a test program that has run to its end, but whose tests did not all pass.
pub(crate) const TESTS_FAILED: u8 = 101;

struct Program {
    name: String,
    executable: PathBuf,
    /// The folder in which cargo would run it.
    package: PathBuf,
}

impl Program {
    fn has_tests(&self, filters: &[&OsStr]) -> Result<bool> {
        let mut list = Command::new(&self.executable);
        let list = list.args(filters).args(["--list", "--format", "terse"]);
        let list = list.stdin(Stdio::null()).output();
        let list = list.with_context(|| format!("cannot start {}", self.executable.display()))?;
        if !list.status.success() {
            let why = String::from_utf8_lossy(&list.stderr);
            bail!("{} lists no tests: {why}", self.executable.display());
        }
        Ok(!list.stdout.is_empty())
    }
}

/// Builds the test programs, and the programs that they start.
fn build() -> Result<Vec<Program>> {
    let mut cargo = children::cargo();
    cargo.args(["test", "--no-run", "--features", "rdma"]);
    cargo.args(["--lib", "--bins", "--tests"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    for package in PACKAGES {
        cargo.args(["--package", package]);
    }
    let mut child = children::spawn(cargo.stdout(Stdio::piped()))?;
    let mut messages = String::new();
    let output = child.stdout.take().expect("it was set to a pipe above");
    io::BufReader::new(output)
        .read_to_string(&mut messages)
        .context("cannot read what cargo says")?;
    if !children::wait(child)?.success() {
        bail!("the tests of RDMA do not build; what went wrong is printed above");
    }
    messages.lines().filter_map(program).collect()
}

/// The test program that a message of cargo is about, if it is about one.
fn program(message: &str) -> Option<Result<Program>> {
    let message: Value = match serde_json::from_str(message) {
        Ok(message) => message,
        Err(error) => return Some(Err(error).context("cargo's message is not JSON")),
    };
    if message["profile"]["test"] != true {
        return None;
    }
    let executable = message["executable"].as_str()?;
    let manifest = PathBuf::from(message["manifest_path"].as_str()?);
    Some(Ok(Program {
        name: message["target"]["name"].as_str()?.to_owned(),
        executable: executable.into(),
        package: manifest.parent()?.to_owned(),
    }))
}

/// What `rdma-sys` is built with, beside what the rest is.
const NEEDS: [Need; 2] = [
    Need {
        what: "libibverbs with its headers",
        apt_package: "libibverbs-dev",
        is_there: || setup::has_library("libibverbs.so") && setup::has_header("infiniband/verbs.h"),
    },
    Need {
        what: "librdmacm with its headers",
        apt_package: "librdmacm-dev",
        is_there: || setup::has_library("librdmacm.so") && setup::has_header("rdma/rdma_cma.h"),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_programs_are_run() {
        let artifact = r#"{"reason":"compiler-artifact","manifest_path":"/a/Cargo.toml","target":{"name":"kill"},"profile":{"test":true},"executable":"/t/deps/a-1"}"#;
        let program_of = |message: &str| program(message).map(|it| it.expect("it is JSON"));
        let found = program_of(artifact).expect("it is a test program");
        assert_eq!(found.executable, PathBuf::from("/t/deps/a-1"));
        assert_eq!(found.package, PathBuf::from("/a"));
        assert!(program_of(&artifact.replace("true", "false")).is_none());
        assert!(program_of(&artifact.replace("\"/t/deps/a-1\"", "null")).is_none());
        assert!(program_of(r#"{"reason":"build-finished","success":true}"#).is_none());
    }
}
