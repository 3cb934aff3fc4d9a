//! Child processes with a bound on their time: programs, and the running test program itself.

use std::{
    env,
    fmt::Display,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    mem,
    process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{SigSet, Signal, kill},
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    },
    unistd::{ForkResult, Pid, alarm, fork},
};

use crate::wait::{test_name, wait_channels};

/// Returns `bytes` as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Forks, and returns true if `work` returns true in the child, within a time limit. The child has
/// one thread, and whatever other threads of this process have locked.
pub fn passes_in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child allocates, which glibc supports after fork, and ends without destructors of
    // its parent's.
    match unsafe { fork() }.expect("there is room for a process") {
        ForkResult::Child => {
            // A lock of the runtime's that this thread has holds signals back.
            let unblocked = SigSet::all().thread_unblock();
            alarm::set(CHILD_SECONDS);
            let status = i32::from(unblocked.is_err() || !work());
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => waitpid(child, None) == Ok(WaitStatus::Exited(child, 0)),
    }
}

/// Time after which a child by [`passes_in_child`] is killed.
const CHILD_SECONDS: u32 = 60;

/// Runs a command that must succeed within `patience`. Returns its output.
pub fn run(command: &mut Command, patience: Duration) -> Output {
    let output = finish(command, patience);
    assert!(
        output.status.success(),
        "{command:?} failed: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Runs a command that must end within `patience`, with any status.
pub fn finish(command: &mut Command, patience: Duration) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let out = Reader::new(child.stdout.take().expect("piped above"));
    let err = Reader::new(child.stderr.take().expect("piped above"));
    let since = Instant::now();
    loop {
        // Processes that the command has started may hold the pipes for longer.
        if let Some(status) = child.try_wait().unwrap()
            && out.has_ended()
            && err.has_ended()
        {
            return Output {
                status,
                stdout: out.take(),
                stderr: err.take(),
            };
        }
        if since.elapsed() > patience {
            let threads = wait_channels(child.id());
            let _ = child.kill();
            let _ = child.wait();
            panic!(
                "{command:?} has not ended within {patience:?}; its threads:\n{threads}\n{}{}",
                text(&out.take()),
                text(&err.take())
            );
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Thread that reads a pipe to its end, so that the process at the other end never waits.
struct Reader {
    thread: JoinHandle<()>,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Reader {
    fn new(mut pipe: impl Read + Send + 'static) -> Reader {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let read = bytes.clone();
        let thread = thread::spawn(move || {
            let mut some = vec![0; 64 << 10];
            while let Ok(count @ 1..) = pipe.read(&mut some) {
                read.lock().unwrap().extend_from_slice(&some[..count]);
            }
        });
        Reader { thread, bytes }
    }

    fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Takes the bytes that have come.
    fn take(&self) -> Vec<u8> {
        mem::take(&mut self.bytes.lock().unwrap())
    }
}

/// Waits for the end of `child`. Fails the test if `child` has not ended within `patience`.
#[track_caller]
pub fn wait_for_end(child: &mut Child, patience: Duration) -> ExitStatus {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(
            since.elapsed() < patience,
            "the other process has not ended within {patience:?}; its threads:\n{}",
            wait_channels(child.id())
        );
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sends a signal to `child`. With SIGSTOP, returns when all threads have stopped.
pub fn send_signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id() as i32);
    kill(pid, signal).unwrap();
    if signal == Signal::SIGSTOP {
        waitid(Id::Pid(pid), WaitPidFlag::WSTOPPED).unwrap();
    }
}

/// Reads a figure of a file in `/proc/PROCESS` whose lines are `Name:   123 kB`. Returns it in
/// bytes.
pub fn proc_bytes(process: impl Display, file: &str, name: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{process}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.unwrap_or_else(|| panic!("no {name} in {file}"));
    let kib = kib.trim_start_matches(':').trim().trim_end_matches(" kB");
    kib.parse::<usize>().unwrap() << 10
}

/// Prints a line that a parent waits for. libtest has left the test's name without an end of line.
pub fn say(line: &str) {
    println!("\n{line}");
    io::stdout().flush().unwrap();
}

/// Makes a command that runs this test program once more, for the test `test` alone.
pub fn test_command(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command
}

/// Process that runs one test of this test program. Killed when dropped.
pub struct TestProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl TestProcess {
    /// Starts the running test once more, in an environment that tells the test its role.
    pub fn start(environment: &[(&str, &str)]) -> TestProcess {
        Self::start_as(&test_name(), environment)
    }

    /// Starts the test `test` as [`start`](Self::start) does.
    pub fn start_as(test: &str, environment: &[(&str, &str)]) -> TestProcess {
        Self::spawn(test_command(test).envs(environment.iter().copied()))
    }

    /// Starts a command of [`test_command`].
    pub fn spawn(command: &mut Command) -> TestProcess {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().expect("piped above"));
        let (sender, lines) = mpsc::channel();
        // A thread reads, so that reading has a bound, and the pipe is always emptied.
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        TestProcess {
            stdin: child.stdin.take(),
            child,
            lines,
        }
    }

    /// Waits for the first line that starts with `prefix`. Returns the rest of the line.
    #[track_caller]
    pub fn wait_for_line(&mut self, prefix: &str) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let line = self
                .lines
                .recv_timeout(until.saturating_duration_since(Instant::now()))
                .unwrap_or_else(|e| panic!("the other process never said `{prefix}`: {e}"));
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
    }

    /// Closes the process's standard input.
    pub fn hang_up(&mut self) {
        self.stdin = None;
    }

    /// Sends a signal. With SIGSTOP, returns when all threads have stopped.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// Waits for the end of the process. Fails the test if it has not ended within `patience`.
    #[track_caller]
    pub fn wait(&mut self, patience: Duration) -> ExitStatus {
        wait_for_end(&mut self.child, patience)
    }

    /// Waits until the process has passed its test, and shows its output.
    #[track_caller]
    pub fn must_pass(mut self, patience: Duration) {
        self.hang_up();
        let status = self.wait(patience);
        for line in self.lines.iter() {
            println!("  | {line}");
        }
        assert!(status.success(), "the other process failed: {status}");
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
