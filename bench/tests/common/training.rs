//! Training by processes, which may keep checkpoints on a memory server, and which tests kill.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    collections::BTreeSet,
    net::TcpListener,
    ops::Range,
    path::Path,
    process::{self, Child, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use farpage::Runtime;
use tempfile::TempDir;

use crate::common::{Serving, bench, parsed, said};

pub(crate) const WORKERS: usize = 4;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const DEADLINE: Duration = Duration::from_secs(15);

/// Children that are killed at the end.
pub(crate) struct Children(pub(crate) Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails if the child has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A memory server, and a user's key.
pub(crate) struct Scene {
    pub(crate) folder: TempDir,
    pub(crate) server: Serving,
    pub(crate) url: String,
}

impl Scene {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let server = Serving::start(bench(&[]), "tcp://127.0.0.1:0", capacity_bytes);
        let url = server.url.clone();
        Self {
            folder,
            server,
            url,
        }
    }

    pub(crate) fn runtime(&self) -> Runtime {
        let key = self.folder.path().join("key");
        let runtime = Runtime::builder().server(&*self.url).key_file(key);
        runtime.build().expect("the server is there")
    }

    /// Returns the names that the user has on the server.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        let names = self.runtime().names().expect("it tells");
        names.into_iter().map(|named| named.name).collect()
    }

    /// Waits for a checkpoint of this step or a later one.
    pub(crate) fn wait_for(&self, step: u64) {
        let runtime = self.runtime();
        let until = Instant::now() + PATIENCE;
        let step_of = |name: &str| name.split('/').nth(1)?.parse::<u64>().ok();
        loop {
            let names = runtime.names().expect("it tells");
            let steps = names.iter().filter_map(|named| step_of(&named.name));
            if steps.max() >= Some(step) {
                return;
            }
            assert!(Instant::now() < until, "no checkpoint of step {step}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Runs all workers in one process.
    pub(crate) fn together(&self, args: &[&str]) -> Output {
        together(self.folder.path(), args)
    }

    /// Starts a process for each worker, and for each of `aggregators`, in the order of ranks.
    pub(crate) fn start(&self, fabric: &str, aggregators: usize, args: &[&str]) -> Children {
        let kept = ["--checkpoint", &self.url, "--deadline", "15"];
        let args = [&kept[..], args].concat();
        processes(self.folder.path(), fabric, aggregators, "RANK", &args)
    }

    /// Asserts that training in one process ends with status 1 and says `expected`.
    pub(crate) fn assert_refused(&self, args: &[&str], expected: &str) {
        let output = self.together(args);
        let stderr = said(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

/// Returns the command that trains a small network; the user's key is in `folder`.
fn train(folder: &Path) -> Command {
    let mut command = bench(&["train", "--format", "json"]);
    command
        .args(["--group", "2", "--data", "blobs", "--hidden", "64"])
        .env("FARPAGE_KEY_FILE", folder.join("key"));
    command
}

/// Runs all workers in one process.
pub(crate) fn together(folder: &Path, args: &[&str]) -> Output {
    let mut command = train(folder);
    if !args.contains(&"--workers") {
        command.args(["--workers", "4"]);
    }
    command.args(["--fabric", "sim", "--deadline", "8"]);
    command.args(args).output().expect("the program was built")
}

/// Starts a process for each worker, and for each of `aggregators`, in the order of ranks, which
/// the variable `rank_in` tells.
pub(crate) fn processes(
    folder: &Path,
    fabric: &str,
    aggregators: usize,
    rank_in: &str,
    args: &[&str],
) -> Children {
    let served = match aggregators {
        0 => WORKERS,
        count => count,
    };
    let addresses = addresses(fabric, folder, served);
    let start = |rank: usize| {
        let mut command = train(folder);
        match aggregators {
            0 => command.args(["--addresses", &addresses]),
            _ => command.args(["--workers", "4", "--aggregators-at", &addresses]),
        };
        command.args(args).env(rank_in, rank.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program was built")
    };
    Children((0..WORKERS + aggregators).map(start).collect())
}

/// Binds a port that the kernel gives to no connection by itself: between its choice and the start
/// of the process that listens there, a connection of another test could take it.
fn free_port() -> TcpListener {
    const PORTS: Range<u32> = 10_000..30_000;
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let tries = PORTS.len();
    let mut bound = (0..tries).filter_map(|_| {
        let at = process::id().wrapping_mul(64) + TRIED.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + at % PORTS.len() as u32;
        TcpListener::bind(("127.0.0.1", port as u16)).ok()
    });
    bound.next().expect("a free port")
}

fn addresses(fabric: &str, folder: &Path, count: usize) -> String {
    // All ports are held until all are known, so that they differ.
    let ports: Vec<_> = (0..count).map(|_| free_port()).collect();
    let of = |(rank, port): (usize, &TcpListener)| match fabric {
        "shm" => format!("shm://{}/party-{rank}", folder.display()),
        _ => format!("tcp://{}", port.local_addr().expect("a bound socket")),
    };
    let all: Vec<_> = ports.iter().enumerate().map(of).collect();
    all.join(",")
}

/// Asserts that a job with `aggregators`, of which `killed` is killed, ends in time with errors
/// that name it, and goes on to the bits of a job that was not interrupted.
pub(crate) fn assert_goes_on(fabric: &str, mode: &str, aggregators: usize, killed: usize) {
    let scene = Scene::new(64 << 20);
    let job = ["--mode", mode, "--steps", "200", "--optimizer", "adam"];
    let count = aggregators.to_string();
    let through = ["--aggregators", &count];
    let through = if aggregators > 0 { &through[..] } else { &[] };
    let whole = scene.together(&[&job[..], through].concat());
    // A slow link gives time to kill, and changes no bit.
    let kept = ["--checkpoint-every", "10"];
    let slow = ["--link-us", "3000"];
    let mut children = scene.start(fabric, aggregators, &[&job[..], &kept, &slow].concat());
    scene.wait_for(40);
    children.0[killed].kill().expect("it runs");
    let name = match killed < WORKERS {
        true => format!("worker {killed}"),
        false => format!("aggregator {}", killed - WORKERS),
    };
    let gone = format!("{name} is gone");
    let named = [&gone, &format!("for {name}"), &format!("step 30 of {name}")];
    assert_named(children, Some(killed), &named.map(String::as_str));
    // Two generations at most.
    let names = scene.names();
    assert!(names.len() <= 2 * (WORKERS + aggregators), "{names:?}");
    let again = [&job[..], &kept, &["--resume"]].concat();
    assert_whole(&ends(scene.start(fabric, aggregators, &again)), &whole, 30);
}

/// Asserts that a job whose server of checkpoints is killed ends with the server's address.
pub(crate) fn assert_names_server(mode: &str, aggregators: usize) {
    let mut scene = Scene::new(64 << 20);
    let job = ["--mode", mode, "--steps", "100000000"];
    let job = [&job[..], &["--checkpoint-every", "5"]].concat();
    let children = scene.start("tcp", aggregators, &job);
    scene.wait_for(20);
    scene.server.child.kill().expect("it runs");
    // A party that still trained then hears of it from one that could not keep its checkpoint.
    let told = [&*scene.url, "gave up", "its session has ended"];
    let ended = assert_named(children, None, &told);
    assert!(ended.iter().any(|output| said(output).contains(&scene.url)));
}

/// Asserts that all have failed in time, and that all but `killed` have said one of `named`.
pub(crate) fn assert_named(
    children: Children,
    killed: Option<usize>,
    named: &[&str],
) -> Vec<Output> {
    let begun = Instant::now();
    let ended = ends(children);
    assert!(begun.elapsed() < DEADLINE * 2, "{:?}", begun.elapsed());
    for (rank, output) in ended.iter().enumerate() {
        let stderr = said(output);
        assert!(!output.status.success(), "rank {rank}");
        let is_named = named.iter().any(|named| stderr.contains(named));
        assert!(killed == Some(rank) || is_named, "rank {rank}: {stderr}");
    }
    ended
}

/// Asserts that a job that went on has ended with the hashes of one that was not interrupted.
pub(crate) fn assert_whole(ended: &[Output], whole: &Output, from: u64) {
    let whole = parsed(whole);
    // All are told of at once: a party's error often follows from another's.
    let failed = ended.iter().enumerate();
    let failed = failed.filter(|(_, output)| !output.status.success());
    let failed: Vec<_> = failed
        .map(|(rank, output)| format!("rank {rank}: {}: {}", output.status, said(output)))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    for (rank, output) in ended.iter().enumerate() {
        let report = parsed(output);
        let resumed = report["resumed_from"].as_u64().expect("a step");
        assert!(resumed >= from && resumed.is_multiple_of(10), "{resumed}");
        match rank < WORKERS {
            true => assert_eq!(report["hash"], whole["modes"][0]["worker_hashes"][rank]),
            false => assert_eq!(report["aggregator"], rank - WORKERS),
        }
    }
}

pub(crate) fn ends(mut workers: Children) -> Vec<Output> {
    let until = Instant::now() + PATIENCE;
    for worker in &mut workers.0 {
        while worker.try_wait().expect("a child").is_none() {
            assert!(Instant::now() < until, "a worker hangs");
            thread::sleep(Duration::from_millis(5));
        }
    }
    let workers = std::mem::take(&mut workers.0).into_iter();
    let ended = workers.map(|worker| worker.wait_with_output().expect("it has ended"));
    ended.collect()
}
