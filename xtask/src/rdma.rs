//! The tests of RDMA: built here with the feature `rdma`, run in the virtual machine, one boot for
//! all.
//!
//! The rule it keeps: such a test has `rdma` in its name, or stands in a program of [`WHOLE`]; it
//! is run, or counted as skipped with the reason. With `FARPAGE_REQUIRE_VM=1` a skip is a failure.
//! Nothing but this needs the libraries of RDMA, so nothing else installs them.

use std::{
    env,
    ffi::OsStr,
    io::{self, Write},
    time::Duration,
};

use anyhow::Result;

use crate::{
    children,
    programs::{self, Built},
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

/// For the boot and all tests together, in an emulated machine: some minutes on two free cores, and
/// several times as long on busy ones.
const TIME_MAX: Duration = Duration::from_secs(900);

/// Builds and runs them; with `filters` those whose name contains one of them.
///
/// # Errors
/// When they do not build, or there is no machine although it is required. A failing test and a
/// machine that dies are counted.
pub(crate) fn run(filters: &[String], tally: &mut Tally) -> Result<()> {
    let required = env::var_os("FARPAGE_REQUIRE_VM").is_some_and(|it| it == "1");
    let skips_before = tally.skips.len();
    if let Err(why) = try_run(filters, tally)? {
        tally.skips.push(format!("the tests of RDMA: {why:#}"));
    }
    if required && tally.skips.len() > skips_before {
        eprintln!("FARPAGE_REQUIRE_VM is set: what was skipped of RDMA has failed.");
        tally
            .failures
            .extend_from_slice(&tally.skips[skips_before..]);
    }
    Ok(())
}

/// The inner result says why they cannot be run here.
fn try_run(filters: &[String], tally: &mut Tally) -> Result<Result<()>> {
    if let Err(why) = setup::install(&NEEDS, "RDMA") {
        return Ok(Err(why));
    }
    let mut script = Script::new();
    for program in build()?.tests {
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
        let failure = format!("the tests of RDMA: {failed}; the last one named was running");
        eprintln!("FAILED: {failure}");
        tally.failures.push(failure);
    }
    Ok(Ok(()))
}

/// The status of a test program that has run to its end, but whose tests did not all pass.
pub(crate) const TESTS_FAILED: u8 = 101;

/// Builds the test programs, and the programs that they start.
fn build() -> Result<Built> {
    let mut cargo = children::cargo();
    cargo.args(["test", "--no-run", "--features", "rdma"]);
    cargo.args(["--lib", "--bins", "--tests"]);
    for package in PACKAGES {
        cargo.args(["--package", package]);
    }
    programs::build(&mut cargo)
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
