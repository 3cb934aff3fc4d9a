//! The program as a process, and whether it can work here.

use std::process::{Command, Output, Stdio};

/// Returns the command of the program with `args`, and nothing to read.
pub(crate) fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpage-bench"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    bench(args)
        .output()
        .expect("the program was built for this test")
}

/// True if pages can be served here. Says that `test` is skipped if not.
pub(crate) fn can_page(test: &str) -> bool {
    let doctor = run(&["doctor"]);
    if !doctor.status.success() {
        eprintln!("SKIPPED: {test}: `farpage-bench doctor` says that farpage cannot work here");
    }
    doctor.status.success()
}
