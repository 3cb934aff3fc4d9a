//! Signals that are sent to the launcher.
//!
//! The rule it keeps: a program whose signal is lost ends by itself after a while.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use farpage_testkit::{serve_tcp, text, wait_until};
use tempfile::TempDir;

use crate::{
    PYTHON,
    common::{can_run, farpage_as, output},
};

/// A launcher in a folder and a process group of its own, and its program's output.
struct Run {
    launcher: Child,
    lines: BufReader<ChildStdout>,
    folder: TempDir,
}

impl Run {
    /// Starts a program, and waits for the first line that it prints.
    fn start(script: &str) -> (Run, String) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_farpage"));
        command.args(["run", "--budget", "16MiB", "--", PYTHON, "-uc", script]);
        command
            .env("TMPDIR", folder.path())
            .env("FARPAGE_PAGE_SIZE", "16KiB");
        command.process_group(0);
        let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(launcher.stdout.take().unwrap());
        let mut run = Run {
            launcher,
            lines,
            folder,
        };
        let first = run.line();
        (run, first)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.launcher.id() as i32, signal) }, 0);
    }

    /// Waits for the end of the launcher, and asserts that the folder is empty.
    fn status(mut self) -> Option<i32> {
        let status = self.launcher.wait().unwrap();
        let left: Vec<_> = fs::read_dir(self.folder.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        status.code()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

#[test]
fn signals_that_are_sent_to_the_launcher_reach_the_program() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let signals = [
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGWINCH,
        libc::SIGABRT,
        libc::SIGRTMIN() + 3,
    ];
    for signal in signals {
        let (mut run, _) = Run::start(&format!(
            "
import signal, sys, time
def on(number, frame): print('got', number); sys.exit(5)
signal.signal({signal}, on)
print('up')
time.sleep(30)
"
        ));
        run.signal(signal);
        assert_eq!(run.line(), format!("got {signal}"));
        assert_eq!(run.status(), Some(5), "{signal}");
    }
    // A signal that the program does not handle ends it, and the launcher exits as a shell does.
    let (run, _) = Run::start("import time\nprint('up')\ntime.sleep(30)");
    run.signal(libc::SIGUSR1);
    assert_eq!(run.status(), Some(128 + libc::SIGUSR1));
}

/// Beginning of a program that ends at once, and leaves a child behind with remote memory. The
/// child goes on once the launcher has waited for the program.
const CHILD: &str = "
import os, signal, time
M = 1 << 20
def wait(what):
    while not what(): time.sleep(0.01)
def status(name):
    with open(f'/proc/{launcher}/status') as status:
        return next(line.split()[1] for line in status if line.startswith(name))
program, launcher, ready = os.getpid(), os.getppid(), os.pipe()
if os.fork() != 0:
    os.read(ready[0], 1)
    os._exit(3)
blocks = [bytearray(2 * M) for _ in range(24)]
os.write(ready[1], b'.')
wait(lambda: not os.path.exists(f'/proc/{program}'))
";

#[test]
fn a_child_that_is_left_behind_keeps_its_memory_whatever_signal_the_launcher_gets() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let (mut run, first) = Run::start(&format!(
        "{CHILD}
for sent in (signal.SIGWINCH, signal.SIGURG, signal.SIGCONT, signal.SIGUSR1, signal.SIGTSTP):
    os.kill(launcher, sent)
    if sent == signal.SIGTSTP: wait(lambda: status('State') == 'T')
    os.kill(launcher, signal.SIGCONT)
    wait(lambda: int(status('ShdPnd'), 16) == 0)
print('sent')
blocks += [bytearray(2 * M) for _ in range(24)]
for round in range(4):
    for at, block in enumerate(blocks): block[at * 4096] = at + round
    assert all(block[at * 4096] == at + round for at, block in enumerate(blocks))
print('done')
os._exit(0)
"
    ));
    assert_eq!((first.as_str(), run.line().as_str()), ("sent", "done"));
    assert_eq!(run.status(), Some(3));
}

#[test]
fn a_launcher_that_is_told_to_end_before_a_child_that_is_left_behind_says_so() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = format!(
        "{CHILD}
os.close(1)
os.close(2)
os.kill(launcher, signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
"
    );
    let ours = farpage_as("16KiB", &["--budget", "16MiB"], &[PYTHON, "-c", &script]);
    let said = text(&ours.stderr);
    assert_eq!(ours.status.code(), Some(3), "{said}");
    assert!(said.contains("lose their remote memory"), "{said}");
}

#[test]
fn a_child_without_memory_of_its_own_does_not_keep_the_launcher_by_whatever_call_it_is_made() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let (mut run, first) = Run::start(
        "
import ctypes, os, time
block, launcher = bytearray(4 << 20), os.getppid()
print('up')
def ends():
    try:
        with open(f'/proc/{launcher}/stat') as stat: return ') Z' in stat.read()
    except FileNotFoundError: return True
if ctypes.CDLL(None)._Fork() == 0:
    until = time.monotonic() + 30
    while not ends() and time.monotonic() < until: time.sleep(0.01)
    print('ended' if ends() else 'kept')
os._exit(0)
",
    );
    assert_eq!((first.as_str(), run.line().as_str()), ("up", "ended"));
    assert_eq!(run.status(), Some(0));
}

/// A shell's job control: launcher and program stop, and both go on.
#[test]
fn launcher_stops_and_goes_on_with_the_program() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
print(os.getpid())
time.sleep(30)
";
    let (run, program) = Run::start(script);
    let processes = [run.launcher.id().to_string(), program];
    let states = || {
        processes.clone().map(|process| {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
            stat.rsplit(") ").next().unwrap().starts_with('T')
        })
    };
    for (signal, stopped) in [(libc::SIGTSTP, true), (libc::SIGCONT, false)] {
        run.signal(signal);
        let what = format!("both are stopped: {stopped}");
        wait_until(&what, || states() == [stopped; 2]);
    }
    run.signal(libc::SIGTERM);
    assert_eq!(run.status(), Some(5));
}

/// A program that signals its whole process group has received its own signal already.
#[test]
fn signal_of_the_program_to_its_group_is_not_sent_back() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import os, signal, sys, time
count = 0
def on(number, frame):
    global count
    count += 1
signal.signal(signal.SIGUSR1, on)
signal.signal(signal.SIGUSR2, lambda number, frame: (print(count), sys.exit(0)))
os.killpg(0, signal.SIGUSR1)
print('up')
time.sleep(30)
";
    let (mut run, first) = Run::start(script);
    assert_eq!(first, "up");
    run.signal(libc::SIGUSR2);
    assert_eq!(run.line(), "1");
    assert_eq!(run.status(), Some(0));
}

#[test]
fn launcher_that_is_killed_takes_the_program_along() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let (mut run, _) = Run::start("import time\nprint('up')\ntime.sleep(90)");
    let since = Instant::now();
    run.signal(libc::SIGKILL);
    // The program alone has the other end of this pipe now.
    let mut rest = String::new();
    run.lines.read_to_string(&mut rest).unwrap();
    assert!(since.elapsed() < Duration::from_secs(60), "it lived on");
    assert_eq!(run.launcher.wait().unwrap().signal(), Some(libc::SIGKILL));
}

/// Settings that a supervisor leaves behind (an ignored SIGCHLD, a mask) reach the program.
#[test]
fn program_has_the_mask_and_actions_that_the_launcher_was_started_with() {
    if !can_run(&[PYTHON]) {
        return;
    }
    // Signals 32 and 33 are the C library's own.
    let show = "print([hex(int(line[7:], 16) & 0x7fffffff) for line in open('/proc/self/status') if line[:6] in ('SigBlk', 'SigIgn')])";
    let launch = |words: &str| {
        let prepare = format!(
            "
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
words = {words} + [{PYTHON:?}, '-c', {show:?}]
os.execv(words[0], words)
"
        );
        let mut command = Command::new(PYTHON);
        let ended = output(command.args(["-c", &prepare]));
        assert!(ended.status.success(), "{ended:?}");
        String::from_utf8(ended.stdout).unwrap()
    };
    let plain = launch("[]");
    let binary = env!("CARGO_BIN_EXE_farpage");
    let ours = launch(&format!("[{binary:?}, 'run', '--budget', '16MiB', '--']"));
    assert_eq!(ours, plain);
}

/// Returns the id of the only child of a process.
fn child_of(process: u32) -> String {
    let path = format!("/proc/{process}/task/{process}/children");
    fs::read_to_string(path).unwrap().trim().to_owned()
}

/// True if the first thread of a process holds signals back.
fn holds_signals(process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let held = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    u64::from_str_radix(held.unwrap().trim(), 16).unwrap() != 0
}

/// Ends a program whose server has stopped to answer while the program gets remote memory.
#[test]
fn program_that_waits_for_a_server_ends_at_once() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "import sys\nprint('up')\nsys.stdin.readline()\nx = bytearray(64 << 20)";
    for (signal, mode) in [
        (libc::SIGTERM, "--in-thread"),
        (libc::SIGINT, "--in-thread"),
        (libc::SIGTERM, "--fillers"),
    ] {
        let (server, url) = serve_tcp(128 << 20);
        let mut command = Command::new(env!("CARGO_BIN_EXE_farpage"));
        command.args(["run", mode, "--budget", "16MiB", "--capacity", "80MiB"]);
        command.args(["--server", &url, "--", "/bin/sh", "-c"]);
        // An interpreter handles SIGINT, unless it is told not to.
        let script = format!("import signal\nsignal.signal({signal}, signal.SIG_DFL)\n{script}");
        command.args(["exec \"$0\" -uc \"$1\"", PYTHON, &script]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut launcher = command.process_group(0).spawn().unwrap();
        let mut lines = BufReader::new(launcher.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        server.shutdown();
        let address = url.strip_prefix("tcp://").unwrap();
        let _silent = TcpListener::bind(address).unwrap();
        launcher.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let program = child_of(launcher.id());
        wait_until("the program waits for its server", || {
            holds_signals(&program)
        });
        let since = Instant::now();
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(launcher.id() as i32, signal) }, 0);
        assert_eq!(launcher.wait().unwrap().code(), Some(128 + signal));
        // The deadline of a connection is longer.
        assert!(since.elapsed() < Duration::from_secs(5), "{mode} {signal}");
    }
}
