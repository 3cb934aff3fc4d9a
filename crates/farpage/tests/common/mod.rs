//! Shared parts of these tests: runtimes, servers in and out of this process, and stores.
//!
//! The rule it keeps: nothing waits without a bound, and nothing that was started outlives its
//! test.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses its own part"
)]
#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

pub mod forks;
pub mod words;

use std::{
    env, fmt,
    io::{self, Read},
    path::Path,
    slice,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use farpage::{BuildError, Builder, ByteSize, RegionOptions, RemoteArray, Runtime, Store};
use farpage_fabric::Persistence;
use farpage_memserver::{RunningServer, Server};
use farpage_testkit::{
    KIB, MIB, TestProcess, Watchdog, say, server::RDMA_ADDRESS, socket_in, tcp, test_name,
};
use nix::sys::signal::Signal;
use tempfile::TempDir;

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

/// Returns the fabrics of a test: shm and tcp; in a build with RDMA, if a device is named, rdma
/// alone.
pub fn fabrics() -> Vec<Fabric> {
    match cfg!(feature = "rdma") && env::var_os(RDMA_ADDRESS).is_some() {
        true => vec![Fabric::Rdma],
        false => vec![Fabric::Shm, Fabric::Tcp],
    }
}

/// True if this program can run servers on `fabric`. If not, says that the test is skipped, and
/// why.
pub fn can_reach(fabric: Fabric) -> bool {
    let can = fabric != Fabric::Rdma || fabrics().contains(&Fabric::Rdma);
    if !can {
        eprintln!(
            "SKIPPED: {}: it takes a build with `--features rdma` and an RDMA device, whose address {RDMA_ADDRESS} names; \
             `cargo xtask vm` has one",
            test_name()
        );
    }
    can
}

impl Fabric {
    fn listen(self, directory: &TempDir) -> String {
        match self {
            Fabric::Shm => socket_in(directory).to_string(),
            Fabric::Tcp => tcp().to_string(),
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
    pub fabric: Fabric,
    pub url: String,
    pub server: RunningServer,
    _directory: TempDir,
}

impl Memory {
    pub fn start(fabric: Fabric, capacity_bytes: usize) -> Memory {
        Memory::start_as(fabric, |server| server.capacity(capacity_bytes as u64))
    }

    /// Starts a server with the settings that `set` makes.
    pub fn start_as(fabric: Fabric, set: impl FnOnce(Server) -> Server) -> Memory {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::builder()
            .listen(fabric.listen(&directory).parse().unwrap())
            .grace(Duration::from_millis(100));
        let server = set(server).start().unwrap();
        Memory {
            fabric,
            url: server.endpoints()[0].to_string(),
            server,
            _directory: directory,
        }
    }

    /// Makes a builder of runtimes on this server, with two workers of each kind.
    pub fn builder(&self, budget_bytes: usize, page_bytes: usize) -> Builder {
        builder(budget_bytes, page_bytes).server(&self.url)
    }

    /// Builds a runtime on this server with two workers of each kind.
    pub fn runtime(&self, budget_bytes: usize, page_bytes: usize) -> Runtime {
        self.builder(budget_bytes, page_bytes).build().unwrap()
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

/// Begins the running test: starts its watchdog. `None` if this process cannot page its own memory.
pub fn begin(seconds: u64) -> Option<Watchdog> {
    let watchdog = Watchdog::new(Duration::from_secs(seconds));
    can_page().then_some(watchdog)
}

/// Runs a test over each fabric, with a server that lends `capacity_bytes`. Does nothing if this
/// process cannot page its own memory.
pub fn over_fabrics(seconds: u64, capacity_bytes: usize, mut test: impl FnMut(&Memory)) {
    let Some(_watchdog) = begin(seconds) else {
        return;
    };
    for fabric in fabrics() {
        test(&Memory::start(fabric, capacity_bytes));
    }
}

/// True if this process may page its own memory. If not, says that the test is skipped, and why.
pub fn can_page() -> bool {
    // A lost page ends the whole program by SIGBUS: the log alone says why it was lost. An error of
    // `try_init` means that another test has installed the subscriber.
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR);
    let _ = log.with_ansi(false).with_writer(io::stderr).try_init();
    match builder(MIB, 4 * KIB).build() {
        Ok(_) => true,
        Err(BuildError::Userfaultfd(why)) => {
            eprintln!("SKIPPED: {}: {why}", test_name());
            false
        }
        Err(other) => panic!("{other}"),
    }
}

/// A memory server in a process of its own, which runs this test program: see [`serve_if_asked`].
pub struct ServerProcess {
    pub url: String,
    test: String,
    /// Bytes that the server lends, its lease and drain timeout in milliseconds, and its directory
    /// of names, if it has one.
    lends: String,
    child: TestProcess,
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
        Self::start_draining(test, fabric, capacity_bytes, lease, Duration::ZERO)
    }

    /// Starts a server as [`start_leasing`](Self::start_leasing) does. When it is
    /// [stopped](Self::stop), its clients have `drain_timeout` to move their memory away.
    pub fn start_draining(
        test: &str,
        fabric: Fabric,
        capacity_bytes: usize,
        lease: Duration,
        drain_timeout: Duration,
    ) -> ServerProcess {
        let (lease, drain) = (lease.as_millis(), drain_timeout.as_millis());
        Self::start_lending(test, fabric, format!("{capacity_bytes} {lease} {drain}"))
    }

    /// Starts a server as [`start`](Self::start) does that keeps names in `persist`.
    pub fn start_persisting(
        test: &str,
        fabric: Fabric,
        capacity_bytes: usize,
        (persist, when): (&Path, Persistence),
    ) -> ServerProcess {
        let (persist, soon) = (persist.display(), when == Persistence::Soon);
        let lends = format!("{capacity_bytes} 60000 0 {persist} {soon}");
        Self::start_lending(test, fabric, lends)
    }

    fn start_lending(test: &str, fabric: Fabric, lends: String) -> ServerProcess {
        let directory = tempfile::tempdir().unwrap();
        let listen = fabric.listen(&directory);
        let mut child = TestProcess::start_as(test, &[(SERVE, &format!("{listen} {lends}"))]);
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
        self.child = TestProcess::start_as(&self.test, &[(SERVE, &what)]);
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
    let words: Vec<_> = what.split(' ').collect();
    let (&[listen, capacity_bytes, lease_ms, drain_ms], persist) = words
        .split_first_chunk()
        .unwrap_or_else(|| panic!("{SERVE}={what}"));
    let mut server = Server::builder();
    if let [directory, soon] = persist {
        let when = match *soon {
            "true" => Persistence::Soon,
            _ => Persistence::AtOnce,
        };
        server = server.persist(directory.into(), when);
    }
    let server = server
        .listen(listen.parse().unwrap())
        .capacity(capacity_bytes.parse().unwrap())
        .lease(Duration::from_millis(lease_ms.parse().unwrap()))
        .drain_timeout(Duration::from_millis(drain_ms.parse().unwrap()))
        .start()
        .unwrap();
    say(&format!("serving at {}", server.endpoints()[0]));
    let _ = io::stdin().read_to_end(&mut Vec::new());
    if drain_ms != "0" {
        server.shutdown();
    }
    true
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

/// Makes an array of words.
pub fn array_with(runtime: &Runtime, len: usize, options: RegionOptions) -> RemoteArray<u64> {
    runtime.array_with(len, options).unwrap()
}

/// Returns the options of a region whose bytes are in `store`.
pub fn stored(store: impl Store) -> RegionOptions {
    RegionOptions::new().store(store)
}

/// Returns the options of a region whose bytes are in a store of this process that never fails.
pub fn stored_here(bytes: usize) -> RegionOptions {
    stored(HookedStore::new(bytes, |_, _| Ok(())))
}

/// A store in this process's memory. Calls `before` at the beginning of each call.
pub struct HookedStore<F> {
    bytes: Mutex<Vec<u8>>,
    before: F,
}

/// TestProcessd of a call of a [`HookedStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Read,
    Write,
    Flush,
}

impl<F> HookedStore<F> {
    pub fn new(bytes: usize, before: F) -> Self {
        HookedStore {
            bytes: Mutex::new(vec![0; bytes]),
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
