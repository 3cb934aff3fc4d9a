//! Refusals of `farpage run`: before the program runs, with status 125, in words that say what to
//! do.

mod common;

use std::process::Command;

use common::{can_run, farpage, output};
use farpage_testkit::{serve_tcp, text};

#[test]
fn capacity_that_no_server_has_is_refused_with_the_option_that_asks_for_less() {
    if !can_run(&[]) {
        return;
    }
    let (_server, url) = serve_tcp(64 << 20);
    let options = ["--server", &url, "--budget", "16MiB", "--capacity", "1GiB"];
    // A program takes memory with its first large request.
    let copies = [
        "/bin/dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=32M",
        "count=1",
    ];
    let refused = farpage(&options, &copies);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(125), "{said}");
    for part in ["64.0 MiB left of its capacity of 64.0 MiB", "--capacity"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    assert!(!said.contains("Reserve"), "{said}");
}

#[test]
fn capacity_whose_unit_was_left_out_is_refused() {
    let refused = farpage(&["--budget", "16MiB", "--capacity", "2"], &["/bin/true"]);
    assert_eq!(refused.status.code(), Some(125));
    let said = text(&refused.stderr);
    assert!(
        said.contains("--capacity") && said.contains("2GiB"),
        "{said}"
    );
}

#[test]
fn variable_that_nobody_reads_is_refused_and_the_one_that_was_meant_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpage"));
    command.env("FARPAGE_BUGDET", "1GiB");
    let refused = output(command.args(["run", "--", "/bin/true"]));
    assert_eq!(refused.status.code(), Some(125));
    let said = text(&refused.stderr);
    let complaint = "FARPAGE_BUGDET is no variable of farpage (did you mean FARPAGE_BUDGET?)";
    assert!(said.contains(complaint), "{said}");
}
