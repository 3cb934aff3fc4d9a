//! Workers as processes of their own: the same bits as threads, and the fate of the others when one
//! is killed.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

const WORKERS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the command of the program with `args`, and nothing to read.
fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpage-bench"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Returns the endpoints of a test's workers.
fn addresses(fabric: &str, folder: &Path) -> String {
    // All ports are held until all are known, so that they differ.
    let ports = [(); WORKERS].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let of = |(rank, port): (usize, &TcpListener)| match fabric {
        "shm" => format!("shm://{}/worker-{rank}", folder.display()),
        _ => format!("tcp://{}", port.local_addr().expect("a bound socket")),
    };
    ports
        .iter()
        .enumerate()
        .map(of)
        .collect::<Vec<_>>()
        .join(",")
}

/// Workers that are killed if the test fails.
struct Workers(Vec<Child>);

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &mut self.0 {
            // Fails if the worker has ended.
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

fn start(fabric: &str, folder: &Path, args: &[&str]) -> Workers {
    let addresses = addresses(fabric, folder);
    let start = |rank: usize| {
        let mut command = bench(&["train", "--format", "json", "--addresses", &addresses]);
        command
            .args(["--group", "2", "--data", "blobs", "--hidden", "64"])
            .args(args)
            // mpirun sets this variable.
            .env("OMPI_COMM_WORLD_RANK", rank.to_string())
            .env("FARPAGE_KEY_FILE", folder.join("key"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
            .spawn()
            .expect("the program was built for this test")
    };
    Workers((0..WORKERS).map(start).collect())
}

/// Waits for the workers. Returns success, output and errors of each.
fn ends(mut workers: Workers) -> Vec<(bool, String, String)> {
    let until = Instant::now() + PATIENCE;
    for worker in &mut workers.0 {
        while worker.try_wait().expect("a child").is_none() {
            assert!(Instant::now() < until, "a worker hangs");
            thread::sleep(Duration::from_millis(5));
        }
    }
    let ended = std::mem::take(&mut workers.0).into_iter().map(|worker| {
        let output = worker.wait_with_output().expect("it has ended");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.success(),
            text(&output.stdout),
            text(&output.stderr),
        )
    });
    ended.collect()
}

fn parsed(stdout: &str) -> Value {
    serde_json::from_str(stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
}

#[test]
fn processes_end_with_the_bits_of_threads() {
    for mode in ["ds", "bsp"] {
        let args = ["--mode", mode, "--steps", "12"];
        let together = bench(&[
            "train",
            "--format",
            "json",
            "--workers",
            "4",
            "--group",
            "2",
        ])
        .args(["--data", "blobs", "--hidden", "64", "--fabric", "sim"])
        .args(args)
        .output()
        .expect("the program was built for this test");
        let together = parsed(&String::from_utf8_lossy(&together.stdout));
        let expected = &together["modes"][0]["worker_hashes"];
        for fabric in ["shm", "tcp"] {
            let folder = tempfile::tempdir().expect("a folder");
            for (rank, (succeeded, stdout, stderr)) in ends(start(fabric, folder.path(), &args))
                .into_iter()
                .enumerate()
            {
                assert!(succeeded, "{fabric} {mode} {rank}: {stderr}");
                let report = parsed(&stdout);
                assert_eq!(report["rank"], rank);
                assert_eq!(report["hash"], expected[rank], "{fabric} {mode} {rank}");
            }
        }
    }
}

/// Returns the clock ticks that a process has computed for.
fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name in brackets");
    let fields: Vec<_> = fields.split_whitespace().collect();
    // User and system time, as proc_pid_stat(5) counts them, less the two fields before.
    [11, 12]
        .iter()
        .map(|at| fields[*at].parse::<u64>().expect("a number"))
        .sum()
}

#[test]
fn a_worker_that_is_killed_is_named_by_all_others_within_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(5);
    for (fabric, mode) in [("shm", "ds"), ("tcp", "ds"), ("shm", "bsp"), ("tcp", "bsp")] {
        let folder = tempfile::tempdir().expect("a folder");
        let args = ["--mode", mode, "--steps", "100000000", "--deadline", "5"];
        let mut workers = start(fabric, folder.path(), &args);
        let until = Instant::now() + PATIENCE;
        // Workers compute when all of them have joined.
        while workers.0.iter().any(|worker| ticks(worker.id()) < 20) {
            assert!(Instant::now() < until, "{fabric}: nobody computes");
            thread::sleep(Duration::from_millis(5));
        }
        workers.0[2].kill().expect("it runs");
        let killed = Instant::now();
        let ends = ends(workers);
        assert!(killed.elapsed() < DEADLINE * 2, "{:?}", killed.elapsed());
        for (rank, (succeeded, _, stderr)) in ends.iter().enumerate() {
            assert!(!succeeded, "worker {rank}");
            let is_named = ["worker 2 is gone", "for worker 2,"]
                .iter()
                .any(|said| stderr.contains(said));
            assert!(
                rank == 2 || is_named,
                "{fabric} {mode}, worker {rank}: {stderr}"
            );
        }
    }
}

#[test]
fn a_worker_without_a_rank_says_how_it_learns_it() {
    let mut command = bench(&[
        "train",
        "--mode",
        "ds",
        "--addresses",
        "tcp://127.0.0.1:1,tcp://127.0.0.1:2",
    ]);
    for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"] {
        command.env_remove(name);
    }
    let output = command
        .output()
        .expect("the program was built for this test");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr.contains("--rank") && stderr.contains("SLURM_PROCID"),
        "{stderr}"
    );
}

#[test]
fn a_picture_shows_every_mode_and_what_it_learns_and_moves() {
    let folder = tempfile::tempdir().expect("a folder");
    let draw = |file: &Path| {
        let args = ["train", "--smoke", "--fabric", "sim", "--workers", "4"];
        let mut command = bench(&args);
        command.args(["--group", "2", "--mode", "bsp,ds", "--svg"]);
        command.arg(file).output().expect("the program starts")
    };
    let file = folder.path().join("train.svg");
    let output = draw(&file);
    assert!(output.status.success(), "{output:?}");
    let svg = fs::read_to_string(&file).expect("it was drawn");
    let lines = svg.matches("<polyline").count();
    // Five panels with a line for each mode, and the legend's lines.
    assert!(lines >= 2 * 5 + 2, "{lines} lines");
    for expected in [
        "bsp",
        "ds",
        "accuracy",
        "loss",
        "distance",
        "MB that",
        "serial steps",
        "exchanging, %",
    ] {
        assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
    }
    // Panels over steps and over time.
    let panels = |title: &str| svg.lines().filter(|line| line.trim() == title).count();
    assert_eq!((panels("loss"), panels("seconds")), (2, 2));
    let refused = draw(Path::new("/nonexistent/train.svg"));
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("/nonexistent/train.svg"), "{message}");
}
