//! Workers as processes of their own: the same bits as threads, and the fate of the others when one
//! is killed.

mod common;
#[path = "common/training.rs"]
mod training;

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use self::{
    common::{assert_has, bench, parsed, run, said, ticks},
    training::{PATIENCE, ends, processes, together},
};

/// Variable that mpirun sets.
const RANK_IN: &str = "OMPI_COMM_WORLD_RANK";

#[test]
fn processes_end_with_the_bits_of_threads() {
    for mode in ["ds", "bsp"] {
        let args = ["--mode", mode, "--steps", "12"];
        let folder = tempfile::tempdir().unwrap();
        let together = parsed(&together(folder.path(), &args));
        let expected = &together["modes"][0]["worker_hashes"];
        for fabric in ["shm", "tcp"] {
            let folder = tempfile::tempdir().unwrap();
            let workers = processes(folder.path(), fabric, 0, RANK_IN, &args);
            for (rank, output) in ends(workers).iter().enumerate() {
                let report = parsed(output);
                assert_eq!(report["rank"], rank);
                assert_eq!(report["hash"], expected[rank], "{fabric} {mode} {rank}");
            }
        }
    }
}

#[test]
fn a_worker_that_is_killed_is_named_by_all_others_within_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(5);
    for (fabric, mode) in [("shm", "ds"), ("tcp", "ds"), ("shm", "bsp"), ("tcp", "bsp")] {
        let folder = tempfile::tempdir().unwrap();
        let args = ["--mode", mode, "--steps", "100000000", "--deadline", "5"];
        let mut workers = processes(folder.path(), fabric, 0, RANK_IN, &args);
        let until = Instant::now() + PATIENCE;
        // Workers compute when all of them have joined.
        while workers.0.iter().any(|worker| ticks(worker.id()) < 20) {
            assert!(Instant::now() < until, "{fabric}: nobody computes");
            thread::sleep(Duration::from_millis(5));
        }
        workers.0[2].kill().unwrap();
        let killed = Instant::now();
        let ends = ends(workers);
        assert!(killed.elapsed() < DEADLINE * 2, "{:?}", killed.elapsed());
        for (rank, output) in ends.iter().enumerate() {
            assert!(!output.status.success(), "worker {rank}");
            let stderr = said(output);
            let named = ["worker 2 is gone", "for worker 2,"];
            let is_named = named.iter().any(|named| stderr.contains(named));
            assert!(rank == 2 || is_named, "{fabric} {mode} {rank}: {stderr}");
        }
    }
}

#[test]
fn a_worker_without_a_rank_says_how_it_learns_it() {
    let mut command = bench(&["train", "--mode", "ds"]);
    command.args(["--addresses", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"]);
    for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_has(&said(&output), &["--rank", "SLURM_PROCID"]);
}

#[test]
fn a_picture_shows_every_mode_and_what_it_learns_and_moves() {
    let folder = tempfile::tempdir().unwrap();
    let draw = |file: &Path| {
        let args = ["train", "--smoke", "--fabric", "sim", "--workers", "4"];
        let more = ["--group", "2", "--mode", "bsp,ds", "--svg"];
        run(&[&args[..], &more, &[file.to_str().unwrap()]].concat())
    };
    let file = folder.path().join("train.svg");
    let output = draw(&file);
    assert!(output.status.success(), "{output:?}");
    let svg = fs::read_to_string(&file).unwrap();
    let lines = svg.matches("<polyline").count();
    // Five panels with a line for each mode, and the legend's lines.
    assert!(lines >= 2 * 5 + 2, "{lines} lines");
    let learned = ["bsp", "ds", "accuracy", "loss", "distance"];
    let moved = ["MB that", "serial steps", "exchanging, %"];
    assert_has(&svg, &[&learned[..], &moved].concat());
    // Panels over steps and over time.
    let panels = |title: &str| svg.lines().filter(|line| line.trim() == title).count();
    assert_eq!((panels("loss"), panels("seconds")), (2, 2));
    let refused = draw(Path::new("/nonexistent/train.svg"));
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_has(&said(&refused), &["/nonexistent/train.svg"]);
}
