//! Sizes as programs and users see them: capacities, limits of a program's own, and `--stats`.
//!
//! The rule it keeps: a size is asserted from outside, or by the behaviour of a plain run.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::process::{Command, Output};

use common::{MIB, can_run, farpage, modes, output, said};
use farpage_memserver::{RunningServer, Server};
use farpage_testkit::{serve_tcp, tcp, text};

const PYTHON: &str = "/usr/bin/python3";

/// Runs a script in both modes, if this machine can, and calls `check` with the result.
fn python(options: &[&str], script: &str, check: impl Fn(&Output, &str)) {
    if !can_run(&[PYTHON]) {
        return;
    }
    for &mode in modes() {
        let ended = farpage(&[mode, options].concat(), &[PYTHON, "-c", script]);
        let stats = text(&ended.stderr);
        println!("{mode:?} {options:?}: {stats}");
        check(&ended, &stats);
    }
}

fn assert_says(ended: &Output, expected: &str) {
    let (said, why) = (text(&ended.stdout), text(&ended.stderr));
    let seen = (said.trim(), ended.status.code());
    assert_eq!(seen, (expected, Some(0)), "{why}");
}

/// A server's habit: it receives into a large block, and shrinks the block to the message.
#[test]
fn remnants_of_shrunk_blocks_take_no_page_each() {
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

/// An allocator's header, whole pages and the interpreter's own objects come on top.
#[test]
fn an_array_of_the_capacity_fits() {
    let script = "b = bytearray(64 << 20); b[-1] = 7; print(len(b))";
    let options = ["--budget", "8MiB", "--capacity", "64MiB"];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
    // A server with room for the surplus, and one with just the capacity.
    let (_server, url) = serve_tcp(128 << 20);
    let options = ["--budget", "8MiB", "--capacity", "64MiB", "--server", &url];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
    let options = ["--budget", "8MiB", "--capacity", "128MiB", "--server", &url];
    python(&options, script, |ended, _| assert_says(ended, "67108864"));
}

#[test]
fn without_a_capacity_a_program_may_have_what_the_server_has() {
    let (_server, url) = serve_tcp(128 << 20);
    let script = "
b = bytearray(64 << 20)
for i in range(0, len(b), 4096): b[i] = i >> 12 & 255
print(all(b[i] == i >> 12 & 255 for i in range(0, len(b), 4096)))
";
    // Sixteen budgets, and a budget that exceeds the server's memory.
    for budget in ["4MiB", "256MiB"] {
        let options = ["--budget", budget, "--server", &url];
        python(&options, script, |ended, _| assert_says(ended, "True"));
    }
}

/// Starts a server with room for one program, whose leases and graces do not end while a test runs:
/// memory comes free only once a program has announced its end.
fn server_that_waits() -> RunningServer {
    let forever = std::time::Duration::from_secs(600);
    Server::builder()
        .listen(tcp())
        .capacity(64 * MIB)
        .lease(forever)
        .reconnect_grace(forever)
        .start()
        .unwrap()
}

#[test]
fn a_second_program_finds_the_room_of_the_first_however_that_ended() {
    let server = server_that_waits();
    let url = server.endpoints()[0].to_string();
    let options = ["--budget", "8MiB", "--capacity", "48MiB", "--server", &url];
    let (term, abort) = (libc::SIGTERM, libc::SIGABRT);
    for (ending, status) in [
        ("exit(0)", 0),
        ("os._exit(0)", 0),
        (&*format!("os.kill(os.getpid(), {term})"), 128 + term),
        (&*format!("os.kill(os.getpid(), {abort})"), 128 + abort),
    ] {
        let script = format!(
            "import os; b = bytearray(32 << 20); b[-1] = 1; print(b[-1], flush=True); {ending}"
        );
        python(&options, &script, |ended, why| {
            assert_eq!(text(&ended.stdout), "1\n", "{why}");
            assert_eq!(ended.status.code(), Some(status), "{why}");
        });
    }
}

/// Covers a limit that is set before any memory is remote, and one of open files.
#[test]
fn limits_that_are_set_first_hold() {
    let script = "
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
assert resource.getrlimit(resource.RLIMIT_AS) == (2 << 30, 2 << 30)
held = bytearray(100 << 20)
try: bytearray(3 << 30); print('beyond the limit')
except MemoryError: print('fine')
";
    let options = ["--budget", "32MiB", "--capacity", "6GiB"];
    let options = [&options[..], &["--min-bytes", "8MiB"]].concat();
    python(&options, script, |ended, _| assert_says(ended, "fine"));
    let script = "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
held = bytearray(100 << 20); held[-1] = 1; print(sum(held))
";
    python(&options, script, |ended, _| {
        assert_says(ended, "1");
    });
}

/// A limit counts the program's allocations, and not farpage's mappings for them.
#[test]
fn limits_of_address_space_leave_room() {
    if !can_run(&[PYTHON]) {
        return;
    }
    for mode in ["--fillers", "--in-thread"] {
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

#[test]
fn stats_count_what_was_touched() {
    // Zeros that are never written are reserved only. Memory that is freed counts once.
    let script = "
b = bytearray(200 << 20)
for turn in range(3):
    c = bytearray(30 << 20)
    for i in range(0, len(c), 4096): c[i] = 1
    del c
";
    let options = ["--budget", "8MiB", "--capacity", "512MiB", "--stats"];
    python(&options, script, |ended, stats| {
        assert!(ended.status.success(), "{stats}");
        let touched = said(stats, " in the arena");
        assert!((30 * MIB..50 * MIB).contains(&touched), "{stats}");
        assert!(said(stats, " accessible") > 200 * MIB, "{stats}");
    });
}

#[test]
fn programs_that_move_nothing_say_so_alone_and_nothing_among_others() {
    if !can_run(&[]) {
        return;
    }
    for &mode in modes() {
        let options = [mode, &["--budget", "8MiB", "--stats"]].concat();
        let alone = text(&farpage(&options, &["/bin/true"]).stderr);
        assert!(
            alone.lines().count() == 1 && alone.contains("at most 0 B in the arena"),
            "{alone}"
        );
        let options = [&options[..], &["--children"]].concat();
        let among = farpage(&options, &["/bin/true"]);
        assert_eq!(text(&among.stderr), "");
    }
}

/// A signal ends the program as ever, and the program sees no handler.
#[test]
fn stats_are_said_however_a_program_ends() {
    let endings = [
        ("os._exit(3)", 3),
        ("os.abort()", 128 + libc::SIGABRT),
        ("os.kill(os.getpid(), signal.SIGTERM)", 128 + libc::SIGTERM),
        ("ctypes.string_at(0)", 128 + libc::SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGBUS)", 128 + libc::SIGBUS),
    ];
    for (ending, status) in endings {
        let script = format!(
            "
import ctypes, os, signal
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
old = ctypes.create_string_buffer(b'x' * 200); ctypes.CDLL(None).sigaction(15, None, old)
assert not any(old.raw[:8]), old.raw[:8]
b = bytearray(20 << 20)
for i in range(0, len(b), 4096): b[i] = 1
{ending}"
        );
        let options = ["--budget", "8MiB", "--capacity", "64MiB", "--stats"];
        python(&options, &script, |ended, stats| {
            assert_eq!(ended.status.code(), Some(status), "{ending}: {stats}");
            assert!(
                said(stats, " in the arena") >= 20 * MIB,
                "{ending}: {stats}"
            );
            let lines = stats
                .lines()
                .filter(|line| line.contains(" of it in local memory"));
            assert_eq!(lines.count(), 1, "{ending}: {stats}");
        });
    }
}

/// C program with 64 MiB of small objects, or 20 MiB in `.data`.
const LOCAL: &str = r#"
#include <stdlib.h>
#include <string.h>
static char held[20 << 20] = {1};
static volatile char zeros[64 << 20];
int main(int argc, char **argv) {
  (void)argv;
  if (argc > 1) memset(held, 1, sizeof held);
  else for (int i = 0; i < 64 << 10; i++) memset(malloc(1000), 1, 1000);
  return zeros[argc << 20];
}
"#;

#[test]
fn what_is_small_or_initialised_is_said_to_be_local() {
    if !can_run(&["/usr/bin/cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (source, program) = (at("local.c"), at("local"));
    std::fs::write(&source, LOCAL).unwrap();
    // `-fno-builtin`: every `malloc` takes place.
    let made = output(Command::new("cc").args(["-O1", "-fno-builtin", &source, "-o", &program]));
    assert!(made.status.success(), "{}", text(&made.stderr));
    for (command, least) in [(&[&*program][..], 60), (&[&program, "static"], 20)] {
        let options = ["--budget", "8MiB", "--capacity", "64MiB", "--stats"];
        let options = [&options[..], &["--small", "no"]].concat();
        let ended = farpage(&options, command);
        let stats = text(&ended.stderr);
        assert!(said(&stats, " were local") >= least * MIB, "{stats}");
        assert!(stats.contains("small objects"), "{stats}");
        assert!(
            stats.contains("static arrays (.data and .bss: 20."),
            "{stats}"
        );
    }
    // A larger `--min-bytes` keeps memory local that is not asked to be remote.
    let larger = ["--min-bytes", "3MiB", "--budget", "8MiB", "--stats"];
    let stats = text(&farpage(&larger, &[&program]).stderr);
    assert!(said(&stats, " were local") >= 60 * MIB, "{stats}");
    let stats = text(&farpage(&[&larger[..], &["--small", "auto"]].concat(), &[&program]).stderr);
    assert!(stats.contains("small objects are in the arena"), "{stats}");
    let explained = text(&farpage(&["--explain"], &[&program]).stdout);
    assert!(explained.contains("small objects"), "{explained}");
    assert!(explained.contains("(.bss, 64.0 MiB here)"), "{explained}");
    assert!(explained.contains("(.data, 20.0 MiB here"), "{explained}");
}
