//! Shared parts of this crate's tests: the real binary, and remote bytes without ceremony.
//!
//! The rule it keeps: nothing waits without a bound, and nothing that was started outlives its
//! test.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

use std::{
    io::{BufRead, BufReader, Lines},
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
};

use farpage_fabric::{Channel, ChannelError, Extent, Session, SessionOptions, Verb, Visit};
use farpage_testkit::{
    PATIENCE, op,
    process::{send_signal, wait_for_end},
    socket_in,
};
use farpage_wire::{Endpoint, ExtentId, ServerStat};
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// Log lines of a daemon.
pub type Log = Lines<BufReader<ChildStderr>>;

trait Drained {
    fn drained(self) -> Daemon;
}

impl Drained for (Daemon, Log) {
    fn drained(self) -> Daemon {
        let (daemon, log) = self;
        thread::spawn(move || log.for_each(drop));
        daemon
    }
}

/// The real binary, listening on both fabrics.
pub struct Daemon {
    pub child: Child,
    /// Endpoint over shared memory; unused after [`Daemon::over_tcp`].
    pub shm: Endpoint,
    pub tcp: Endpoint,
    pub directory: TempDir,
}

/// Makes a command of the binary, in an environment without settings.
pub fn command() -> Command {
    command_at(Path::new(env!("CARGO_BIN_EXE_farpage-memserver")))
}

/// Makes a command of the binary at `path`, in an environment without settings.
pub fn command_at(path: &Path) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FARPAGE_") {
            command.env_remove(name);
        }
    }
    command
}

/// Makes the same command, run by a shell that runs `preparation` first.
fn after(preparation: &str) -> Command {
    let mut shell = Command::new("sh");
    let script = format!("{preparation} && exec \"$@\"");
    let binary = command();
    shell.args(["-c", &script, "sh"]).arg(binary.get_program());
    for (name, value) in binary.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

impl Daemon {
    pub fn start(arguments: &[&str]) -> Self {
        Self::run(command(), arguments).drained()
    }

    /// Starts a daemon that listens on tcp only.
    pub fn over_tcp(arguments: &[&str]) -> Self {
        Self::run_on(command(), false, arguments).drained()
    }

    /// Starts a daemon whose log is not read after it has begun to listen.
    pub fn unread(arguments: &[&str]) -> (Self, Log) {
        Self::run(command(), arguments)
    }

    /// Starts a daemon with at most `files` open files.
    pub fn with_files(files: u64, arguments: &[&str]) -> Self {
        Self::run(after(&format!("ulimit -n {files}")), arguments).drained()
    }

    /// Starts a daemon that listens on tcp only, in the control group of the directory `group`.
    pub fn in_group(group: &Path, arguments: &[&str]) -> Self {
        let enter = format!("echo $$ > {}/cgroup.procs", group.display());
        Self::run_on(after(&enter), false, arguments).drained()
    }

    /// Starts a daemon by `command`, as [`unread`](Self::unread) does.
    pub fn run(command: Command, arguments: &[&str]) -> (Self, Log) {
        Self::run_on(command, true, arguments)
    }

    fn run_on(mut command: Command, with_shm: bool, arguments: &[&str]) -> (Self, Log) {
        let directory = tempfile::tempdir().unwrap();
        let shm = socket_in(&directory);
        command.arg("serve");
        if with_shm {
            command.args(["--listen", &shm.to_string()]);
        }
        let mut child = command
            .args(["--listen", "tcp://127.0.0.1:0", "--log", "json"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let tcp = loop {
            let line = log
                .next()
                .expect("the daemon ended before it listened")
                .unwrap();
            let event: serde_json::Value =
                serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line}"));
            match event["endpoint"].as_str() {
                Some(endpoint) if endpoint.starts_with("tcp:") => break endpoint.parse().unwrap(),
                _ => {}
            }
        };
        let daemon = Self {
            child,
            shm,
            tcp,
            directory,
        };
        (daemon, log)
    }

    /// Sends a signal. After SIGSTOP it returns when all threads have stopped.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    pub fn wait(&mut self) -> ExitStatus {
        wait_for_end(&mut self.child, PATIENCE)
    }

    /// Ends the daemon as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn connect(endpoint: &Endpoint) -> Arc<Session> {
    let options = SessionOptions {
        client: "test".to_owned(),
        ..SessionOptions::default()
    };
    Session::connect(endpoint, &options).unwrap()
}

/// Connects with the key of `key_file`.
pub fn connect_as(endpoint: &Endpoint, key_file: &Path) -> Arc<Session> {
    let options = SessionOptions {
        key_file: Some(key_file.to_owned()),
        ..SessionOptions::default()
    };
    Session::connect(endpoint, &options).unwrap()
}

/// Returns the figures of a server, by a visit that takes no client's place.
pub fn stat(endpoint: &Endpoint) -> ServerStat {
    let options = SessionOptions {
        deadline: PATIENCE,
        ..SessionOptions::default()
    };
    let mut visit = Visit::connect(endpoint, &options).unwrap();
    visit.stat().unwrap()
}

/// Runs one operation and waits for it.
pub fn transfer(
    channel: &mut dyn Channel<Vec<u8>>,
    verb: Verb,
    extent: ExtentId,
    offset: u64,
    buf: Vec<u8>,
) -> Result<Vec<u8>, ChannelError> {
    farpage_testkit::transfer(channel, op(verb, extent, offset, buf))
}

pub fn write(
    session: &Arc<Session>,
    extent: &Extent,
    offset: u64,
    bytes: &[u8],
) -> Result<(), ChannelError> {
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    transfer(
        &mut *channel,
        Verb::Write,
        extent.id,
        offset,
        bytes.to_vec(),
    )
    .map(drop)
}

pub fn read(
    session: &Arc<Session>,
    extent: ExtentId,
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, ChannelError> {
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    // Not zero: a READ that forgets to write must be seen.
    transfer(&mut *channel, Verb::Read, extent, offset, vec![0xa5; len])
}
