//! Aggregators and workers as processes: the same bits as threads, the fate of the others when one
//! is killed, or a memory server that one needs, and how the job goes on.

mod common;
#[path = "common/training.rs"]
mod training;

use self::{
    common::{can_page, parsed},
    training::{
        Scene, WORKERS, assert_goes_on, assert_named, assert_names_server, assert_whole, ends,
    },
};

const AGGREGATORS: usize = 2;

#[test]
fn aggregators_as_processes_end_with_the_bits_of_threads() {
    if !can_page() {
        return;
    }
    let scene = Scene::new(64 << 20);
    let cases = [("shm", "bsp"), ("tcp", "bsp"), ("shm", "ds")];
    for (fabric, mode) in cases.into_iter().chain([("tcp", "fixed")]) {
        let job = ["--mode", mode, "--steps", "12"];
        let whole = scene.together(&[&job[..], &["--aggregators", "2"]].concat());
        let named = ["--checkpoint-name", &format!("{fabric}-{mode}")];
        let slow = ["--slow-worker", "1:2", "--link-gbps", "5"];
        let children = scene.start(fabric, AGGREGATORS, &[&job[..], &named, &slow].concat());
        assert_whole(&ends(children), &whole, 0);
    }
}

#[test]
fn a_job_goes_on_when_a_worker_or_an_aggregator_was_killed() {
    if !can_page() {
        return;
    }
    for (fabric, mode, killed) in [
        ("tcp", "bsp", 2),
        ("tcp", "bsp", 5),
        ("shm", "bsp", 4),
        ("tcp", "ds", 2),
        ("shm", "ds", 5),
    ] {
        assert_goes_on(fabric, mode, AGGREGATORS, killed);
    }
}

#[test]
fn a_job_goes_on_when_the_memory_of_its_aggregators_was_killed() {
    if !can_page() {
        return;
    }
    let scene = Scene::new(256 << 20);
    // The state is larger than the budget, so that each step needs the memory server.
    let job = ["--mode", "bsp", "--steps", "60", "--optimizer", "adam"];
    let job = [&job[..], &["--hidden", "768,768"]].concat();
    let whole = scene.together(&[&job[..], &["--aggregators", "2"]].concat());
    let mut memory = Scene::new(64 << 20);
    let start = |memory: &Scene, more: &[&str]| {
        let state = ["--state", &memory.url, "--state-budget", "2MiB"];
        let kept = [&state[..], &["--checkpoint-every", "10"]].concat();
        scene.start("shm", AGGREGATORS, &[&job[..], &kept, more].concat())
    };
    let children = start(&memory, &["--link-us", "3000"]);
    scene.wait_for(20);
    memory.server.child.kill().expect("it runs");
    let named = [&*memory.url, "gave up, and says itself why"];
    assert_named(children, None, &named);
    let successor = Scene::new(64 << 20);
    let resumed = start(&successor, &["--resume"]);
    assert_whole(&ends(resumed), &whole, 10);
}

#[test]
fn a_server_of_checkpoints_that_is_killed_ends_the_job_with_its_address() {
    if !can_page() {
        return;
    }
    for mode in ["bsp", "ds"] {
        assert_names_server(mode, AGGREGATORS);
    }
}

#[test]
fn an_aggregator_that_is_not_started_is_named_by_all() {
    if !can_page() {
        return;
    }
    let scene = Scene::new(64 << 20);
    let job = ["--mode", "bsp", "--steps", "10"];
    let mut children = scene.start("tcp", AGGREGATORS, &job);
    children.0[WORKERS + 1].kill().expect("it runs");
    assert_named(children, Some(WORKERS + 1), &["aggregator 1"]);
}

#[test]
fn what_is_wrong_with_aggregators_is_said() {
    if !can_page() {
        return;
    }
    let scene = Scene::new(64 << 20);
    let refused = |args: &[&str], expected: &str| scene.assert_refused(args, expected);
    let of = |mode, count, steps| ["--mode", mode, "--aggregators", count, "--steps", steps];
    refused(&of("ds", "3", "20"), "choose a multiple of 2");
    let state = ["--state", &scene.url, "--state-budget", "1MiB"];
    let of_ds = [&of("ds", "2", "20")[..], &state].concat();
    refused(&of_ds, "--mode bsp alone");
    // Checkpoints of another number of aggregators.
    let kept = ["--checkpoint", &scene.url, "--checkpoint-every", "5"];
    parsed(&scene.together(&[&of("bsp", "2", "20")[..], &kept].concat()));
    let names = scene.names();
    assert_eq!(names.len(), 2 * (WORKERS + AGGREGATORS), "{names:?}");
    let resumed = |mode, count| [&of(mode, count, "30")[..], &kept, &["--resume"]].concat();
    refused(&resumed("bsp", "4"), "of all 4 workers and 4 aggregators");
    refused(&resumed("bsp", "1"), "aggregators 2");
    refused(&resumed("ds", "2"), "Bsp");
    let whole = parsed(&scene.together(&["--mode", "bsp", "--steps", "30", "--aggregators", "2"]));
    let ended = parsed(&scene.together(&resumed("bsp", "2")));
    assert_eq!(ended["modes"][0]["hashes"], whole["modes"][0]["hashes"]);
    assert_eq!(ended["modes"][0]["curve"][0]["step"], 15);
}
