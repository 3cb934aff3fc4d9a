//! The tests of RDMA: built here with the feature `rdma`, run in the virtual machine, one boot for
//! all.
//!
//! The rule it keeps: such a test has `rdma` in its name, or stands in a program of [`WHOLE`]; it
//! is run, or counted as skipped with the reason. With `FARPAGE_REQUIRE_VM=1` a skip is a failure.
//! Only this command needs the libraries of RDMA, so no other installs them.

use std::{env, ffi::OsStr, time::Duration};

use anyhow::Result;

use crate::{
    children,
    programs::{self, Program},
    setup::{self, Need},
    tests::tally::Tally,
    vm::{End, Machine, Options, Script, TESTS_FAILED},
};

/// Packages with tests that may need RDMA, and their folders.
const PACKAGES: [(&str, &str); 4] = [
    ("farpage-fabric", "crates/fabric"),
    ("farpage-memserver", "memserver"),
    ("farpage", "crates/farpage"),
    ("farpage-bench", "bench"),
];

/// Test programs that run over RDMA as a whole if a device exists.
const WHOLE: [&str; 2] = ["kill", "registered"];

/// Time limit for the boot and all tests together, in an emulated machine: some minutes on two free
/// cores, and several times as long on busy ones.
const TIME_MAX: Duration = Duration::from_secs(900);

/// Counts the tests of RDMA as skipped, or as failed if they are required.
pub(crate) fn skip(why: &anyhow::Error, tally: &mut Tally) {
    let skip = format!("the tests of RDMA: {why:#}");
    if env::var_os("FARPAGE_REQUIRE_VM").is_some_and(|it| it == "1") {
        tally.fail(format!("{skip} (FARPAGE_REQUIRE_VM asks for them)"));
    } else {
        tally.skips.push(skip);
    }
}

/// Runs those of `tests`, built with the feature `rdma`, that need RDMA; with `filters` those whose
/// name contains one of them. Without a machine, all are skipped.
///
/// # Errors
/// A program that cannot be started. A failing test and a machine that dies are counted.
pub(crate) fn run(tests: &[Program], filters: &[String], tally: &mut Tally) -> Result<()> {
    let mut script = Script::new();
    let may_need_rdma = |program: &&Program| {
        let folder = program.label.split(' ').next();
        PACKAGES.iter().any(|(_, of)| Some(*of) == folder)
    };
    for program in tests.iter().filter(may_need_rdma) {
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
        Err(why) => {
            skip(&why, tally);
            return Ok(());
        }
    };
    let mut line = Vec::new();
    let mut errors = String::new();
    let end = machine.run(
        &script,
        &mut |bytes| {
            for &byte in bytes {
                match byte {
                    b'\n' => tally.take(&std::mem::take(&mut line)),
                    byte => line.push(byte),
                }
            }
        },
        &mut |bytes| errors.push_str(&String::from_utf8_lossy(bytes)),
    );
    tally.say(errors.trim_end());
    let failed = match end {
        Ok(End::Exited(0 | TESTS_FAILED)) => None,
        Ok(End::Exited(status)) => Some(format!("a test program died (status {status})")),
        Ok(End::TimedOut) => Some(format!("not done after {} s", TIME_MAX.as_secs())),
        Err(error) => Some(format!("{error:#}")),
    };
    if let Some(failed) = failed {
        tally.fail(format!(
            "the tests of RDMA: {failed}; the last one named was running"
        ));
    }
    Ok(())
}

/// Builds the test programs of [`PACKAGES`], and the programs that they start.
///
/// # Errors
/// Programs that do not build.
pub(crate) fn build() -> Result<Vec<Program>> {
    let mut cargo = children::cargo();
    cargo.args(["test", "--no-run", "--features", "rdma"]);
    cargo.args(["--lib", "--bins", "--tests"]);
    for (package, _) in PACKAGES {
        cargo.args(["--package", package]);
    }
    programs::build(&mut cargo)
}

/// Libraries that `rdma-sys` is built with, beside those of the whole build.
pub(crate) const NEEDS: [Need; 2] = [
    Need::new("libibverbs with its headers", "libibverbs-dev", || {
        setup::has_library("libibverbs.so") && setup::has_header("infiniband/verbs.h")
    }),
    Need::new("librdmacm with its headers", "librdmacm-dev", || {
        setup::has_library("librdmacm.so") && setup::has_header("rdma/rdma_cma.h")
    }),
];
