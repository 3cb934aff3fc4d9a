//! Signals that are sent to the launcher.
//!
//! The rule it keeps: a program whose signal is lost ends by itself after a while.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    PYTHON,
    common::{can_run, output},
};

/// A launcher in a folder of its own, and what its program prints.
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

    /// Waits for the end, after which the folder is empty.
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
    let test = "signals_that_are_sent_to_the_launcher_reach_the_program";
    if !can_run(test, &[PYTHON]) {
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
    // One that the program does not handle ends it, and the launcher says so as a shell does.
    let (run, _) = Run::start("import time\nprint('up')\ntime.sleep(30)");
    run.signal(libc::SIGUSR1);
    assert_eq!(run.status(), Some(128 + libc::SIGUSR1));
}

/// A program that signals its whole process group has its own signal already.
#[test]
fn signal_of_the_program_to_its_group_is_not_sent_back() {
    let test = "signal_of_the_program_to_its_group_is_not_sent_back";
    if !can_run(test, &[PYTHON]) {
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
    // In a group of its own, which the tests are not in.
    let folder = tempfile::tempdir().unwrap();
    let launch = format!(
        "import os, sys; os.setpgid(0, 0); os.execv({:?}, ['farpage', 'run', '--budget', '16MiB', '--', {PYTHON:?}, '-uc', sys.argv[1]])",
        env!("CARGO_BIN_EXE_farpage")
    );
    let mut launcher = Command::new(PYTHON)
        .args(["-c", &launch, script])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    // SAFETY: our own child, which has not been waited for.
    unsafe { libc::kill(launcher.id() as i32, libc::SIGUSR2) };
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    launcher.wait().unwrap();
    assert_eq!(rest, "1\n");
}

#[test]
fn launcher_that_is_killed_takes_the_program_along() {
    let test = "launcher_that_is_killed_takes_the_program_along";
    if !can_run(test, &[PYTHON]) {
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

/// SIGCHLD that is ignored, a mask: what a supervisor leaves behind is the program's.
#[test]
fn program_has_the_mask_and_actions_that_the_launcher_was_started_with() {
    let test = "program_has_the_mask_and_actions_that_the_launcher_was_started_with";
    if !can_run(test, &[PYTHON]) {
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
