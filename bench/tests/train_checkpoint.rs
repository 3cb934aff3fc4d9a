//! Checkpoints of training: a job whose worker is killed goes on and ends with the bits of one that
//! was never interrupted, and errors name a wrong checkpoint or its server.

mod common;
#[path = "common/training.rs"]
mod training;

use std::{thread, time::Duration};

use farpage::RegionOptions;

use self::{
    common::{can_page, parsed},
    training::{Scene, WORKERS, assert_goes_on, assert_names_server},
};

#[test]
fn a_job_whose_worker_is_killed_goes_on_to_the_bits_of_one_that_was_not() {
    if !can_page() {
        return;
    }
    for (fabric, mode) in [("tcp", "ds"), ("shm", "bsp")] {
        assert_goes_on(fabric, mode, 0, 2);
    }
}

#[test]
fn a_memory_server_that_is_killed_ends_the_job_with_its_address() {
    if !can_page() {
        return;
    }
    assert_names_server("ds", 0);
}

#[test]
fn every_mode_goes_on_as_if_it_had_not_ended() {
    if !can_page() {
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
fn a_checkpoint_that_a_killed_party_still_holds_is_removed_once_it_is_free() {
    if !can_page() {
        return;
    }
    let scene = Scene::new(64 << 20);
    let job = ["--mode", "bsp", "--steps", "20"];
    let whole = parsed(&scene.together(&job));
    let kept = ["--checkpoint", &scene.url, "--checkpoint-every", "5"];
    let kept = [&job[..], &kept].concat();
    parsed(&scene.together(&kept));
    // One party alone was about to keep this, and holds it open for writing.
    let runtime = scene.runtime();
    let held = "train/20/0/0";
    let region = runtime
        .region_with(4096, RegionOptions::new().name(held))
        .expect("a free name");
    region.flush().expect("it is published");
    let resumed = thread::scope(|scope| {
        let resumed = scope.spawn(|| scene.together(&[&kept[..], &["--resume"]].concat()));
        // The job waits for the name as long as it is held.
        thread::sleep(Duration::from_secs(1));
        assert!(!resumed.is_finished(), "{:?}", resumed.join());
        region.close().expect("it is published");
        resumed.join().expect("it does not panic")
    });
    let resumed = parsed(&resumed);
    assert_eq!(resumed["modes"][0]["hashes"], whole["modes"][0]["hashes"]);
    assert!(!scene.names().contains(held), "{:?}", scene.names());
}

#[test]
fn what_is_wrong_is_said_before_training() {
    if !can_page() {
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
