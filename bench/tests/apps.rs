//! `farpage-bench apps` as people and scripts use it, in its `--smoke` form.

mod common;

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use common::{bench, can_page, run};

const APPS: [&str; 10] = [
    "pagerank",
    "bfs",
    "sort",
    "kmeans",
    "groupby",
    "join",
    "spmv",
    "xsbench",
    "xsbench-random",
    "stencil",
];

fn succeeded(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{stdout}{stderr}",
        output.status
    );
    stdout
}

#[test]
fn all_apps_verify_and_report_every_share() {
    if !can_page("all_apps_verify_and_report_every_share") {
        return;
    }
    let stdout = succeeded(&run(&["apps", "--smoke", "--format", "json"]));
    let report: Value = serde_json::from_str(&stdout)
        .unwrap_or_else(|e| panic!("not one JSON object ({e}): {stdout}"));
    assert_eq!(report["benchmark"], "apps");
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!(report["config"]["smoke"], true);
    let shares = report["config"]["shares_percent"].as_array().unwrap();
    let positive = |figure: &Value| figure.as_f64().is_some_and(|figure| figure > 0.0);

    let apps = report["apps"].as_array().unwrap();
    let names: Vec<_> = apps
        .iter()
        .map(|app| app["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, APPS);
    for app in apps {
        assert_eq!(app["verified"], true, "{app}");
        assert_eq!(app["in_means"], app["name"] != "xsbench-random", "{app}");
        assert!(
            positive(&app["remote_bytes"]) && positive(&app["page_size_bytes"]),
            "{app}"
        );
        let all = app["remote_bytes"].as_u64().unwrap() + app["local_bytes"].as_u64().unwrap();
        let figures = app["shares"].as_array().unwrap();
        assert_eq!(figures.len(), shares.len());
        for (figures, share) in figures.iter().zip(shares) {
            assert_eq!(&figures["share_percent"], share);
            for name in [
                "seconds",
                "local_seconds",
                "performance",
                "performance_min",
                "performance_max",
                "floor",
            ] {
                assert!(positive(&figures[name]), "{name} in {app}");
            }
            assert!(figures["floor"].as_f64().unwrap() <= 1.0, "{app}");
            let one_thread = &figures["one_thread"]["performance"];
            let has_more = report["config"]["threads"] != 1;
            assert_eq!(positive(one_thread), has_more, "{app}");
            let share = share.as_f64().unwrap();
            if share < 100.0 {
                let local = figures["budget_bytes"].as_u64().unwrap()
                    + app["local_bytes"].as_u64().unwrap();
                assert!(local as f64 <= all as f64 * share / 100.0, "{app}");
                for count in ["faults", "fills", "evictions", "bytes_read"] {
                    assert!(positive(&figures[count]), "{count} in {app}");
                }
            } else {
                // Everything fits: nothing leaves.
                assert_eq!(figures["evictions"], 0, "{app}");
            }
        }
    }

    let summary = report["summary"].as_array().unwrap();
    assert_eq!(summary.len(), shares.len());
    for summary in summary {
        assert!(positive(&summary["geometric_mean"]) && positive(&summary["worst_performance"]));
        assert!(
            APPS.contains(&summary["worst"].as_str().unwrap()),
            "{summary}"
        );
    }
}

#[test]
fn tables_and_picture_show_what_was_asked_for() {
    if !can_page("tables_and_picture_show_what_was_asked_for") {
        return;
    }
    let picture = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("apps.svg");
    let args = [
        "apps",
        "--smoke",
        "--apps",
        "kmeans,stencil",
        "--shares",
        "75,30",
    ];
    let more = [
        "--fabric",
        "tcp",
        "--page-size",
        "8KiB",
        "--threads",
        "3",
        "--repeat",
        "2",
    ];
    let svg = ["--svg", picture.to_str().unwrap()];
    let stdout = succeeded(&run(&[&args[..], &more, &svg].concat()));
    let svg = std::fs::read_to_string(&picture).unwrap();
    for expected in ["kmeans", "stencil", "geometric mean"] {
        assert!(
            stdout.contains(expected),
            "{expected} is missing in\n{stdout}"
        );
        assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
    }
    for expected in [
        "75 %",
        "30 %",
        "yes, every result",
        "tcp://",
        "worst",
        "3 threads",
    ] {
        assert!(
            stdout.contains(expected),
            "{expected} is missing in\n{stdout}"
        );
    }
    assert!(!stdout.contains("pagerank") && svg.contains("local memory, %"));
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        ["--apps", "chess"],
        ["--shares", "0"],
        ["--shares", "50,150"],
        ["--page-size", "5000"],
        ["--repeat", "0"],
        ["--size", "plenty"],
        ["--fabric", "pigeon"],
    ] {
        let output = run(&[&["apps"][..], &args].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(
            output.stdout.is_empty(),
            "{args:?} printed to standard output"
        );
    }
}

#[test]
fn too_little_memory_is_an_error_that_says_what_to_do() {
    if !can_page("too_little_memory_is_an_error_that_says_what_to_do") {
        return;
    }
    let output = run(&["apps", "--smoke", "--apps", "kmeans", "--shares", "0.01"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("kmeans") && stderr.contains("--size"),
        "{stderr}"
    );
}

#[test]
fn ctrl_c_ends_it_in_good_order() {
    if !can_page("ctrl_c_ends_it_in_good_order") {
        return;
    }
    let child = bench(&[
        "apps", "--smoke", "--apps", "kmeans", "--repeat", "99", "--size", "64MiB",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let socket = std::env::temp_dir().join(format!("farpage-bench-{}-server.sock", child.id()));
    wait_until("the server listens", || socket.exists());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("stopped by a signal") && output.stdout.is_empty(),
        "{stderr}"
    );
    // The server takes its socket away when it ends in good order.
    wait_until("the server has gone", || !Path::new(&socket).exists());
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < end, "waited 20 s until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
