//! Training by processes, which may keep checkpoints on a memory server, and which tests kill.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use farpage::Runtime;
use tempfile::TempDir;

use crate::common::{bench, said};

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
    pub(crate) server: Children,
    pub(crate) url: String,
}

impl Scene {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut server = bench(&["serve", "--listen", "tcp://127.0.0.1:0"])
            .args(["--capacity-bytes", &capacity_bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program was built for this test");
        let stdout = server.stdout.take().expect("a pipe");
        let mut url = String::new();
        BufReader::new(stdout)
            .read_line(&mut url)
            .expect("it says where it listens");
        Self {
            folder,
            server: Children(vec![server]),
            url: url.trim().to_owned(),
        }
    }

    /// Returns a runtime of the user.
    fn runtime(&self) -> Runtime {
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

fn addresses(fabric: &str, folder: &Path, count: usize) -> String {
    // All ports are held until all are known, so that they differ.
    let ports = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let ports: Vec<_> = ports.collect();
    let of = |(rank, port): (usize, &TcpListener)| match fabric {
        "shm" => format!("shm://{}/party-{rank}", folder.display()),
        _ => format!("tcp://{}", port.local_addr().expect("a bound socket")),
    };
    let all: Vec<_> = ports.iter().enumerate().map(of).collect();
    all.join(",")
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
