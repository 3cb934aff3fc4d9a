//! Shared parts of these tests: servers in and out of this process, this test program run once more
//! as another process, watchdogs and seeds.
//!
//! The rule it keeps: nothing waits without a bound, and nothing that was started outlives its
//! test.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses its own part"
)]
#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

pub mod relay;
pub mod words;

use std::{
    env, fmt, fs,
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    slice,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Sender},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use farpage::{BuildError, Builder, ByteSize, RemoteArray, Runtime, Store};
use farpage_memserver::{RunningServer, Server};
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use tempfile::TempDir;

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// Returns all page sizes.
pub fn page_sizes() -> impl Iterator<Item = usize> {
    (12..=21).map(|shift| 1 << shift)
}

/// Transport between a client and its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    Shm,
    Tcp,
    Rdma,
}

/// Variable of the environment with the address of an RDMA device of this machine.
const RDMA_ADDRESS: &str = "FARPAGE_TEST_RDMA_ADDRESS";

/// Returns the fabrics of a test: shm and tcp; in a build with RDMA, if a device is named, rdma
/// alone.
pub fn fabrics() -> Vec<Fabric> {
    match cfg!(feature = "rdma") && env::var_os(RDMA_ADDRESS).is_some() {
        true => vec![Fabric::Rdma],
        false => vec![Fabric::Shm, Fabric::Tcp],
    }
}

/// True if this program can run servers on `fabric`. If not, says that `test` is skipped, and why.
pub fn can_reach(test: &str, fabric: Fabric) -> bool {
    let can = fabric != Fabric::Rdma || fabrics().contains(&Fabric::Rdma);
    if !can {
        eprintln!(
            "SKIPPED: {test}: it takes a build with `--features rdma` and an RDMA device, whose address {RDMA_ADDRESS} names; \
             `cargo xtask vm` has one"
        );
    }
    can
}

impl Fabric {
    fn listen(self, directory: &TempDir) -> String {
        match self {
            Fabric::Shm => format!("shm://{}", directory.path().join("s").display()),
            Fabric::Tcp => "tcp://127.0.0.1:0".to_owned(),
            Fabric::Rdma => format!("rdma://{}:0", env::var(RDMA_ADDRESS).unwrap()),
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fabric::Shm => "shm",
            Fabric::Tcp => "tcp",
            Fabric::Rdma => "rdma",
        })
    }
}

/// A memory server in this process.
pub struct Memory {
    pub url: String,
    pub server: RunningServer,
    _directory: TempDir,
}

impl Memory {
    pub fn start(fabric: Fabric, capacity_bytes: usize) -> Memory {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::builder()
            .listen(fabric.listen(&directory).parse().unwrap())
            .capacity(capacity_bytes as u64)
            .grace(Duration::from_millis(100))
            .start()
            .unwrap();
        Memory {
            url: server.endpoints()[0].to_string(),
            server,
            _directory: directory,
        }
    }

    /// Builds a runtime on this server with two workers of each kind.
    pub fn runtime(&self, budget_bytes: usize, page_bytes: usize) -> Runtime {
        builder(budget_bytes, page_bytes)
            .server(&self.url)
            .build()
            .unwrap()
    }
}

/// Returns a builder with two workers of each kind whatever the machine, so that shards and races
/// between workers exist everywhere.
pub fn builder(budget_bytes: usize, page_bytes: usize) -> Builder {
    Runtime::builder()
        .budget(ByteSize(budget_bytes as u64))
        .page_size(ByteSize(page_bytes as u64))
        .fillers(2)
        .evictors(2)
}

/// True if this process may page its own memory. If not, says that `test` is skipped, and why.
pub fn can_page(test: &str) -> bool {
    // A lost page ends the whole program by SIGBUS: the log alone says why it was lost. An error of
    // `try_init` means that another test has installed the subscriber.
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR);
    let _ = log.with_ansi(false).with_writer(io::stderr).try_init();
    match builder(MIB, 4 * KIB).build() {
        Ok(_) => true,
        Err(BuildError::Userfaultfd(why)) => {
            eprintln!("SKIPPED: {test}: {why}");
            false
        }
        Err(other) => panic!("{other}"),
    }
}

/// A memory server in a process of its own, which runs this test program: see [`serve_if_asked`].
pub struct ServerProcess {
    pub url: String,
    test: String,
    /// Bytes that the server lends, and its lease in milliseconds.
    lends: String,
    child: Kin,
    _directory: TempDir,
}

const SERVE: &str = "FARPAGE_TEST_SERVE";

impl ServerProcess {
    /// Starts a server as `test`, a test of this program that calls [`serve_if_asked`] first.
    /// `test` tests something itself, so that no server is counted as a test.
    pub fn start(test: &str, fabric: Fabric, capacity_bytes: usize) -> ServerProcess {
        Self::start_leasing(test, fabric, capacity_bytes, Duration::from_secs(60))
    }

    /// Starts a server as [`start`](Self::start) does, with leases of length `lease`.
    pub fn start_leasing(
        test: &str,
        fabric: Fabric,
        capacity_bytes: usize,
        lease: Duration,
    ) -> ServerProcess {
        let directory = tempfile::tempdir().unwrap();
        let listen = fabric.listen(&directory);
        let lends = format!("{capacity_bytes} {}", lease.as_millis());
        let mut child = Kin::start(test, &[(SERVE, &format!("{listen} {lends}"))]);
        ServerProcess {
            url: child.wait_for_line("serving at "),
            test: test.to_owned(),
            lends,
            child,
            _directory: directory,
        }
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    /// Ends the server as a crash would.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait(Duration::from_secs(10));
    }

    /// Starts the server again at the same address, after its end.
    pub fn start_again(&mut self) {
        let what = format!("{} {}", self.url, self.lends);
        self.child = Kin::start(&self.test, &[(SERVE, &what)]);
        self.child.wait_for_line("serving at ");
    }

    /// Ends the server as a daemon ends whose grace is over: in good order, beside remaining
    /// clients.
    pub fn stop(&mut self) {
        self.child.hang_up();
        self.child.wait(Duration::from_secs(20));
    }
}

/// Serves until standard input ends, if [`ServerProcess`] has started this process. Returns true if
/// it has.
pub fn serve_if_asked() -> bool {
    let Ok(what) = env::var(SERVE) else {
        return false;
    };
    let [listen, capacity_bytes, lease_ms] = what.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{SERVE}={what}")
    };
    let server = Server::builder()
        .listen(listen.parse().unwrap())
        .capacity(capacity_bytes.parse().unwrap())
        .lease(Duration::from_millis(lease_ms.parse().unwrap()))
        .start()
        .unwrap();
    say(&format!("serving at {}", server.endpoints()[0]));
    let _ = io::stdin().read_to_end(&mut Vec::new());
    true
}

/// Process that runs one test of this test program. Killed when dropped.
pub struct Kin {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Kin {
    pub fn start(test: &str, environment: &[(&str, &str)]) -> Kin {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        // A thread reads, so that reading has a bound, and the pipe is always emptied.
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Kin {
            stdin: child.stdin.take(),
            child,
            lines,
        }
    }

    /// Waits for the first line that starts with `prefix`. Returns the rest of the line.
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
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, signal).unwrap();
        if signal == Signal::SIGSTOP {
            waitid(Id::Pid(pid), WaitPidFlag::WSTOPPED).unwrap();
        }
    }

    /// Waits for the end of the process. Fails the test if it has not ended within `patience`.
    pub fn wait(&mut self, patience: Duration) -> ExitStatus {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                since.elapsed() < patience,
                "the other process has not ended within {patience:?}"
            );
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the process has passed its test, and shows its output.
    pub fn must_pass(mut self, patience: Duration) {
        self.hang_up();
        let status = self.wait(patience);
        for line in self.lines.iter() {
            println!("  | {line}");
        }
        assert!(status.success(), "the other process failed: {status}");
    }
}

impl Drop for Kin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints a line that a parent waits for. libtest has left the test's name without an end of line.
pub fn say(line: &str) {
    println!("\n{line}");
    io::stdout().flush().unwrap();
}

/// Ends this process with a message if the watchdog is not dropped in time: a test of something
/// that must not hang would hang for ever otherwise.
pub struct Watchdog {
    _leash: Sender<()>,
}

impl Watchdog {
    pub fn new(test: &'static str, patience: Duration) -> Watchdog {
        let (leash, end) = mpsc::channel();
        thread::spawn(move || {
            if end.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: not done after {patience:?}; its threads:");
                for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
                    let read =
                        |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
                    eprintln!("  {} in {}", read("comm").trim(), read("wchan"));
                }
                std::process::abort();
            }
        });
        Watchdog { _leash: leash }
    }
}

/// Polls `holds` until it returns true, and fails the test after 30 s.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the seed of a test: `FARPAGE_TEST_SEED`, else a new one. Printed, so that a failure can
/// be repeated.
pub fn seed(test: &str) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = env::var("FARPAGE_TEST_SEED").map_or(now.as_nanos() as u64, |seed| {
        seed.parse().expect("FARPAGE_TEST_SEED is a whole number")
    });
    println!("{test}: FARPAGE_TEST_SEED={seed}");
    seed
}

/// SplitMix64 (Steele, Lea and Flood, 2014): small, and equal on all machines.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Returns a value that looks random and depends on all bits of `x`; never 0 for the numbers that
/// tests use.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns the array, and its words for threads that write at the same time.
pub fn shared(array: &mut RemoteArray<u64>) -> (&RemoteArray<u64>, &[AtomicU64]) {
    let (words, len) = (array.as_mut_ptr(), array.len());
    // SAFETY: aligned and mapped for as long as the array is borrowed, and borrowed exclusively:
    // nobody makes a plain slice of it meanwhile, for which a caller would have to dereference the
    // array that it gets back.
    let words = unsafe { slice::from_raw_parts(words.cast::<AtomicU64>(), len) };
    (array, words)
}

pub fn get(words: &[AtomicU64], at: usize) -> u64 {
    words[at].load(Ordering::Relaxed)
}

pub fn set(words: &[AtomicU64], at: usize, value: u64) {
    words[at].store(value, Ordering::Relaxed);
}

/// Reads a figure of a file in `/proc/self` whose lines are `Name:   123 kB`. Returns it in bytes.
pub fn proc_bytes(file: &str, name: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/self/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.unwrap_or_else(|| panic!("no {name} in {file}"));
    kib.trim_start_matches(':')
        .trim()
        .trim_end_matches(" kB")
        .parse::<usize>()
        .unwrap()
        << 10
}

/// A store in this process's memory. Calls `before` at the beginning of each call.
pub struct HookedStore<F> {
    bytes: std::sync::Mutex<Vec<u8>>,
    before: F,
}

/// Kind of a call of a [`HookedStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Read,
    Write,
    Flush,
}

impl<F> HookedStore<F> {
    pub fn new(bytes: usize, before: F) -> Self {
        HookedStore {
            bytes: std::sync::Mutex::new(vec![0; bytes]),
            before,
        }
    }
}

impl<F: Fn(Call, u64) -> io::Result<()> + Send + Sync + 'static> Store for HookedStore<F> {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (self.before)(Call::Read, offset)?;
        buf.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (self.before)(Call::Write, offset)?;
        self.bytes.lock().unwrap()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        (self.before)(Call::Flush, 0)
    }

    fn name(&self) -> String {
        "hooked".to_owned()
    }
}
