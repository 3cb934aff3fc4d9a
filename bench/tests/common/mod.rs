//! The program as a process, its reports, and whether it can work here.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use farpage_testkit::{process::send_signal, test_name, text};
use nix::sys::signal::Signal;
use serde_json::Value;

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

/// Starts the program with `args`, separated by spaces. Its output is kept.
pub(crate) fn start(args: &str) -> Child {
    let mut command = bench(&args.split_whitespace().collect::<Vec<_>>());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
        .spawn()
        .expect("the program was built for this test")
}

/// Sends a child Ctrl-C. Returns its output.
pub(crate) fn interrupt(child: Child) -> Output {
    send_signal(&child, Signal::SIGINT);
    child.wait_with_output().expect("the child was started")
}

/// Returns standard error as text.
pub(crate) fn said(output: &Output) -> String {
    text(&output.stderr)
}

/// Returns the report of a run, after success.
pub(crate) fn parsed(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Runs the program with `args`, separated by spaces. Returns its standard output, after success.
pub(crate) fn printed(args: &str) -> String {
    let output = run(&args.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{args}: {output:?}");
    text(&output.stdout)
}

/// Runs the program with `args` in its `--smoke` form. Returns its report, which has to be
/// verified; `codecs` and `targets` judge reports, and have verified them.
pub(crate) fn report(args: &str) -> Value {
    let printed = printed(&format!("{args} --smoke --format json"));
    let report: Value = serde_json::from_str(&printed)
        .unwrap_or_else(|e| panic!("{args}: not one JSON object ({e}): {printed}"));
    let benchmark = args.split(' ').next();
    assert_eq!(report["benchmark"].as_str(), benchmark);
    let judges = ["codecs", "targets"].map(Some).contains(&benchmark);
    assert!(judges || report["verified"] == true, "{report}");
    report
}

/// Asserts that a run with `args`, separated by spaces, ends with `status`, prints no result and
/// says `expected`.
pub(crate) fn assert_refused(args: &str, status: i32, expected: &str) {
    let output = run(&args.split_whitespace().collect::<Vec<_>>());
    let stderr = said(&output);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
    assert!(stderr.contains(expected), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?} printed a result");
}

pub(crate) fn assert_has(text: &str, expected: &[&str]) {
    for expected in expected {
        assert!(text.contains(expected), "{expected} is missing in\n{text}");
    }
}

/// Asserts that the figures at `pointers`, separated by spaces, are there and above zero.
pub(crate) fn assert_positive(report: &Value, pointers: &str) {
    for pointer in pointers.split_whitespace() {
        let figure = report.pointer(pointer).and_then(Value::as_f64);
        assert!(
            figure.is_some_and(|figure| figure > 0.0),
            "{pointer} is {figure:?} in {report}"
        );
    }
}

pub(crate) fn list<'a>(report: &'a Value, pointer: &str) -> &'a [Value] {
    let list = report.pointer(pointer).and_then(Value::as_array);
    list.unwrap_or_else(|| panic!("no list {pointer} in {report}"))
}

/// A memory server, killed when dropped.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) url: String,
}

impl Serving {
    /// Starts a server by `program`, the command of the program without arguments.
    pub(crate) fn start(mut program: Command, listen: &str, capacity_bytes: u64) -> Self {
        program.args(["serve", "--listen", listen]);
        program.args(["--capacity-bytes", &capacity_bytes.to_string()]);
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program
            .spawn()
            .expect("the program was built for this test");
        let stdout = child.stdout.take().expect("it was set to a pipe");
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        read.expect("the server says where it listens, or ends");
        let url = line.trim().to_owned();
        assert!(url.contains("://"), "the server did not start");
        Self { child, url }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Fails if the server has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the clock ticks that a process has computed for, in the program and in the kernel.
pub(crate) fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name in brackets");
    let fields: Vec<_> = fields.split_whitespace().collect();
    // User and system time, as proc_pid_stat(5) counts them, less the two fields before.
    let ticks = [11, 12].map(|at| fields[at].parse::<u64>().expect("a number"));
    ticks.iter().sum()
}

/// Returns the socket of the memory server that a benchmark starts for itself.
pub(crate) fn socket_of(child: &Child) -> PathBuf {
    std::env::temp_dir().join(format!("farpage-bench-{}-server.sock", child.id()))
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "waited a minute until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// True if pages can be served here. Says that the running test is skipped if not.
pub(crate) fn can_page() -> bool {
    let doctor = run(&["doctor"]);
    if !doctor.status.success() {
        let test = test_name();
        eprintln!("SKIPPED: {test}: `farpage-bench doctor` says that farpage cannot work here");
    }
    doctor.status.success()
}
