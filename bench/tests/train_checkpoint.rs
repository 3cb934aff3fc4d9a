//! Checkpoints of training: a job whose worker is killed goes on and ends with the bits of one that
//! was never interrupted, and errors name a wrong checkpoint or its server.

mod common;
#[path = "common/training.rs"]
mod training;

use std::time::Instant;

use self::{
    common::{can_page, parsed, said},
    training::{DEADLINE, Scene, WORKERS, ends},
};

#[test]
fn a_job_whose_worker_is_killed_goes_on_to_the_bits_of_one_that_was_not() {
    if !can_page("a_job_whose_worker_is_killed_goes_on_to_the_bits_of_one_that_was_not") {
        return;
    }
    for (fabric, mode) in [("tcp", "ds"), ("shm", "bsp")] {
        let scene = Scene::new(64 << 20);
        let job = ["--mode", mode, "--steps", "200", "--optimizer", "adam"];
        let whole = parsed(&scene.together(&job));
        let every = ["--checkpoint-every", "10"];
        // A slow link gives time to kill, and changes no bit.
        let slow = ["--link-us", "3000"];
        let mut workers = scene.start(fabric, 0, &[&job[..], &every, &slow].concat());
        scene.wait_for(40);
        workers.0[2].kill().expect("it runs");
        let killed = Instant::now();
        let interrupted = ends(workers);
        assert!(killed.elapsed() < DEADLINE * 2, "{:?}", killed.elapsed());
        for (rank, output) in interrupted.iter().enumerate() {
            let stderr = said(output);
            assert!(!output.status.success(), "worker {rank}");
            let named = ["worker 2 is gone", "for worker 2,", "step 30 of worker 2"];
            let is_named = named.iter().any(|named| stderr.contains(named));
            assert!(rank == 2 || is_named, "{fabric} {mode} {rank}: {stderr}");
        }
        // Two generations at most.
        let names = scene.names();
        assert!(names.len() <= 2 * WORKERS, "{names:?}");
        let resumed = scene.start(fabric, 0, &[&job[..], &every, &["--resume"]].concat());
        for (rank, output) in ends(resumed).iter().enumerate() {
            let report = parsed(output);
            let from = report["resumed_from"].as_u64().expect("a step");
            assert!(from >= 30 && from.is_multiple_of(10), "{from}");
            let expected = &whole["modes"][0]["worker_hashes"][rank];
            assert_eq!(&report["hash"], expected, "{fabric} {mode} {rank}");
        }
    }
}

#[test]
fn a_memory_server_that_is_killed_ends_the_job_with_its_address() {
    if !can_page("a_memory_server_that_is_killed_ends_the_job_with_its_address") {
        return;
    }
    let mut scene = Scene::new(64 << 20);
    let args = ["--mode", "ds", "--steps", "100000000"];
    let every = ["--checkpoint-every", "5"];
    let workers = scene.start("tcp", 0, &[&args[..], &every].concat());
    scene.wait_for(20);
    scene.server.0[0].kill().expect("it runs");
    let killed = Instant::now();
    let ended = ends(workers);
    assert!(killed.elapsed() < DEADLINE * 2, "{:?}", killed.elapsed());
    let mut naming = 0;
    for (rank, output) in ended.iter().enumerate() {
        let stderr = said(output);
        assert!(!output.status.success(), "worker {rank}");
        naming += usize::from(stderr.contains(&scene.url));
        // A worker that still trained then hears of it from one that could not keep its checkpoint.
        let is_told = stderr.contains(&scene.url) || stderr.contains("gave up");
        assert!(is_told, "worker {rank}: {stderr}");
    }
    assert!(naming > 0);
}

#[test]
fn every_mode_goes_on_as_if_it_had_not_ended() {
    if !can_page("every_mode_goes_on_as_if_it_had_not_ended") {
        return;
    }
    let scene = Scene::new(64 << 20);
    for mode in ["bsp", "ds", "fixed", "none"] {
        let whole = parsed(&scene.together(&["--mode", mode, "--steps", "30"]));
        let kept = ["--checkpoint", &scene.url, "--checkpoint-name", mode];
        let kept = [&kept[..], &["--checkpoint-every", "7", "--mode", mode]].concat();
        parsed(&scene.together(&[&kept[..], &["--steps", "21"]].concat()));
        let names: Vec<_> = scene.names().into_iter().collect();
        let of = |step: u64| move |rank: usize| format!("{mode}/{step}/{rank}/0");
        for expected in (0..WORKERS).map(of(7)).chain((0..WORKERS).map(of(14))) {
            assert!(names.contains(&expected), "{expected}: {names:?}");
        }
        let resumed =
            parsed(&scene.together(&[&kept[..], &["--steps", "30", "--resume"]].concat()));
        assert_eq!(resumed["modes"][0]["hashes"], whole["modes"][0]["hashes"]);
        assert_eq!(resumed["modes"][0]["curve"][0]["step"], 14, "{mode}");
    }
}

#[test]
fn what_is_wrong_is_said_before_training() {
    if !can_page("what_is_wrong_is_said_before_training") {
        return;
    }
    let scene = Scene::new(64 << 20);
    let kept = ["--checkpoint", &scene.url, "--checkpoint-every", "2"];
    let refused = |args: &[&str], expected: &str| {
        scene.assert_refused(&[&kept[..], args].concat(), expected);
    };
    let job = ["--mode", "ds", "--steps", "6"];
    let with = |more: &[&'static str]| [&job[..], more].concat();
    refused(&with(&["--resume"]), "no checkpoint `train`");
    parsed(&scene.together(&[&kept[..], &job].concat()));
    refused(&job, "go on from it with --resume");
    refused(&with(&["--resume", "--seed", "2"]), "`seed 1`");
    refused(&with(&["--resume", "--hidden", "32"]), "64");
    refused(&["--mode", "bsp", "--steps", "6", "--resume"], "Ds");
    refused(&with(&["--resume", "--workers", "2"]), "worker 0 of 4");
    refused(&with(&["--resume", "--workers", "8"]), "of all 8 workers");
    refused(&["--mode", "ds", "--steps", "4", "--resume"], "--steps 4");
    refused(&["--mode", "ds,bsp", "--steps", "6"], "choose one --mode");
    let full = Scene::new(64 << 10);
    let kept = ["--checkpoint", &full.url, "--checkpoint-every", "2"];
    for expected in ["cannot keep its checkpoint of step 2", &full.url] {
        full.assert_refused(&[&job[..], &kept].concat(), expected);
    }
}
