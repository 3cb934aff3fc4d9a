//! `farpage-bench apps` as people and scripts use it, in its `--smoke` form.

mod common;

use common::{
    assert_has, assert_positive, assert_refused, can_page, interrupt, list, printed, report, said,
    socket_of, start, wait_until,
};

const APPS: &str = "pagerank bfs sort kmeans groupby join spmv xsbench xsbench-random stencil";

#[test]
fn all_apps_verify_and_report_every_share() {
    if !can_page() {
        return;
    }
    let report = report("apps");
    assert_eq!(report["config"]["smoke"], true);
    let shares = list(&report, "/config/shares_percent");
    let apps = list(&report, "/apps");
    let names: Vec<_> = apps.iter().map(|app| &app["name"]).collect();
    assert_eq!(names, APPS.split(' ').collect::<Vec<_>>());
    for app in apps {
        assert_eq!(app["verified"], true, "{app}");
        assert_eq!(app["in_means"], app["name"] != "xsbench-random", "{app}");
        assert_positive(app, "/remote_bytes /page_size_bytes");
        let bytes = |name: &str| app[name].as_u64().unwrap();
        let (remote, kept) = (bytes("remote_bytes"), bytes("local_bytes"));
        assert_eq!(list(app, "/shares").len(), shares.len());
        for (figures, share) in list(app, "/shares").iter().zip(shares) {
            assert_eq!(&figures["share_percent"], share);
            let times = "/seconds /local_seconds /performance /floor";
            assert_positive(figures, times);
            assert_positive(figures, "/performance_min /performance_max");
            assert!(figures["floor"].as_f64().unwrap() <= 1.0, "{app}");
            let one_thread = figures["one_thread"]["performance"].as_f64();
            let has_more = report["config"]["threads"] != 1;
            assert_eq!(one_thread.is_some_and(|x| x > 0.0), has_more, "{app}");
            let share = share.as_f64().unwrap();
            if share < 100.0 {
                let local = figures["budget_bytes"].as_u64().unwrap() + kept;
                let all = (remote + kept) as f64;
                assert!(local as f64 <= all * share / 100.0, "{app}");
                assert_positive(figures, "/faults /fills /evictions /bytes_read");
            } else {
                // Everything fits: nothing leaves.
                assert_eq!(figures["evictions"], 0, "{app}");
            }
        }
    }
    assert_eq!(list(&report, "/summary").len(), shares.len());
    for summary in list(&report, "/summary") {
        assert_positive(summary, "/geometric_mean /worst_performance");
        let mut apps = APPS.split(' ');
        assert!(apps.any(|app| summary["worst"] == app), "{summary}");
    }
}

#[test]
fn tables_and_picture_show_what_was_asked_for() {
    if !can_page() {
        return;
    }
    let picture = format!("{}/apps.svg", env!("CARGO_TARGET_TMPDIR"));
    let stdout = printed(&format!(
        "apps --smoke --apps kmeans,stencil --shares 75,30 --fabric tcp --page-size 8KiB \
         --threads 3 --repeat 2 --svg {picture}"
    ));
    let svg = std::fs::read_to_string(&picture).unwrap();
    let both = ["kmeans", "stencil", "geometric mean"];
    assert_has(&svg, &[&both[..], &["local memory, %"]].concat());
    assert_has(&stdout, &both);
    let expected = ["75 %", "30 %", "yes, every result", "tcp://", "worst"];
    assert_has(&stdout, &[&expected[..], &["3 threads"]].concat());
    assert!(!stdout.contains("pagerank"));
}

#[test]
fn too_little_memory_is_an_error_that_says_what_to_do() {
    if !can_page() {
        return;
    }
    let args = "apps --smoke --apps kmeans --shares 0.01";
    assert_refused(args, 1, "kmeans");
    assert_refused(args, 1, "--size");
}

#[test]
fn ctrl_c_ends_it_in_good_order() {
    if !can_page() {
        return;
    }
    let child = start("apps --smoke --apps kmeans --repeat 99 --size 64MiB");
    let socket = socket_of(&child);
    wait_until("the server listens", || socket.exists());
    let output = interrupt(child);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_has(&said(&output), &["stopped by a signal"]);
    assert!(output.stdout.is_empty());
    // The server takes its socket away when it ends in good order.
    wait_until("the server has gone", || !socket.exists());
}
