//! Sizes as programs and users see them: capacities, limits of a program's own, and `--stats`.
//!
//! The rule it keeps: a size is asserted from outside, or by what a plain run does.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::process::{Command, Output};

use common::{MIB, can_run, farpage, output, text};
use farpage_memserver::{RunningServer, Server};

const PYTHON: &str = "/usr/bin/python3";
const MODES: [&[&str]; 2] = [&[], &["--in-thread"]];

/// Runs a script in both modes, and looks at what came of it.
fn python(options: &[&str], script: &str, check: impl Fn(&Output, &str)) {
    for mode in MODES {
        let ended = farpage(&[mode, options].concat(), &[PYTHON, "-c", script]);
        let stats = text(&ended.stderr);
        println!("{mode:?} {options:?}: {stats}");
        check(&ended, &stats);
    }
}

fn assert_says(ended: &Output, expected: &str) {
    let (why) = (text(&ended.stdout), text(&ended.stderr));
    assert_eq!(
        (said.trim(), ended.status.code()),
        (expected, Some(0)),
        "{why}"
    );
}

fn server(mib: u64) -> (RunningServer, String) {
    let endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let server = Server::builder().listen(endpoint).capacity(mib * MIB);
    let server = server.start().unwrap();
    let url = server.endpoints()[0].to_string();
    (server, url)
}

/// A server's habit: it receives into a large block, and keeps what came.
#[test]
fn remnants_of_shrunk_blocks_take_no_page_each() {
    if !can_run("remnants_of_shrunk_blocks_take_no_page_each", &[PYTHON]) {
        return;
    }
    let script = "
import os
r, w = os.pipe(); kept = []
for i in range(8000):
    os.write(w, b'%0100d' % i); kept.append(os.read(r, 1 << 18))
assert [int(k) for k in kept] == list(range(8000))
print(sum(map(len, kept)))
";
    let options = ["--budget", "8MiB", "--capacity", "64MiB"];
    python(&options, script, |ended, _| assert_says(ended, "800000"));
}

/// An allocator's header, whole pages and what an interpreter has beside it come on top.
#[test]
fn an_array_of_the_capacity_fits() {
    if !can_run("an_array_of_the_capacity_fits", &[PYTHON]) {
        return;
    }
    let script = "b = bytearray(64 << 20); b[-1] = 7; print(len(b))";
    let options = ["--budget", "8MiB", "--capacity", "64MiB"];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
    // A server with room for the surplus, and one that has just the capacity.
    let (_server, url) = server(128);
    let options = ["--budget", "8MiB", "--capacity", "64MiB", "--server", &url];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
    let options = ["--budget", "8MiB", "--capacity", "128MiB", "--server", &url];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
}

#[test]
fn without_a_capacity_a_program_may_have_what_the_server_has() {
    let test = "without_a_capacity_a_program_may_have_what_the_server_has";
    if !can_run(test, &[PYTHON]) {
        return;
    }
    let (_server, url) = server(128);
    let script = "
b = bytearray(64 << 20)
for i in range(0, len(b), 4096): b[i] = i >> 12 & 255
print(all(b[i] == i >> 12 & 255 for i in range(0, len(b), 4096)))
";
    // Sixteen budgets, and a budget that is more than the server has.
    for budget in ["4MiB", "256MiB"] {
        let options = ["--budget", budget, "--server", &url];
        python(&options, script, |ended, _| assert_says(ended, "True"));
    }
}

/// A limit counts what the program allocates, and not what farpage has mapped for it.
#[test]
fn limits_of_address_space_leave_room() {
    if !can_run("limits_of_address_space_leave_room", &[PYTHON]) {
        return;
    }
    for mode in ["", "--in-thread"] {
        let line = format!(
            "ulimit -v 4000000; exec {} run {mode} --budget 32MiB -- {PYTHON} -c 'print(len(bytearray(100 << 20)))'",
            env!("CARGO_BIN_EXE_farpage")
        );
        let ended = output(Command::new("/bin/sh").args(["-c", &line]));
        assert_says(&ended, "104857600");
    }
    let script = "
import resource, threading
for kind in [resource.RLIMIT_AS, resource.RLIMIT_DATA]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (2 << 30, before[1]))
    assert resource.getrlimit(kind) == (2 << 30, before[1]), resource.getrlimit(kind)
    held = bytearray(100 << 20); small = [bytes(2000) for _ in range(20000)]
    thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
    try: bytearray(3 << 30); print('beyond the limit')
    except MemoryError: pass
    resource.setrlimit(kind, (1 << 30, 1 << 30))
    assert resource.prlimit(0, kind) == (1 << 30, 1 << 30)
print('fine')
";
    let options = ["--budget", "32MiB", "--capacity", "6GiB"];
    python(&options, script, |ended, _| assert_says(ended, "fine"));
}
