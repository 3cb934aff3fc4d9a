//! The program as people and scripts use it: each benchmark in its `--smoke` form, as a process,
//! against the memory server that it starts itself.
//!
//! The rule it keeps: every benchmark runs here or in the test programs beside this one, all of
//! which `cargo xtask bench --smoke` runs. `versus-swap` and `versus-numpy` are left out on
//! purpose: a test suite does not change the swap of the machine that it runs on.

mod common;

use std::{
    fs::Permissions,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use common::{
    assert_has, assert_positive, assert_refused, bench, can_page, list, parsed, printed, report,
    run, said, socket_of, start, wait_until,
};

/// Runs all of `runs`, unless pages cannot be served here. Asserts that the figures at `positive`
/// are above zero, and returns the reports.
fn reports(runs: &[&str], positive: &str) -> Vec<Value> {
    if !can_page() {
        return Vec::new();
    }
    let checked = |run: &&str| {
        let report = report(run);
        assert_positive(&report, positive);
        assert_eq!(report["config"]["smoke"], true);
        report
    };
    runs.iter().map(checked).collect()
}

fn assert_paged(report: &Value) {
    let events = "/faults /fills /evictions /bytes_read /bytes_written";
    assert_positive(report, events);
    let sizes = "/budget_bytes /peak_resident_bytes /compression_ratio";
    assert_positive(report, sizes);
    assert!(report["steals"].is_u64(), "{report}");
    let [peak, budget] = ["peak_resident_bytes", "budget_bytes"].map(|name| report[name].as_u64());
    assert!(
        peak <= budget,
        "peak {peak:?} is over the budget {budget:?}"
    );
}

#[test]
fn hostile_requests_of_every_kind_are_sent_and_a_victim_beside_them_keeps_every_word() {
    for report in reports(&["hostile"], "/fault_p99_ratio") {
        for arm in ["attacked", "beside_burner"] {
            let figures = "/seconds /fault_us/p99 /stream_mb_per_s /words_checked";
            assert_positive(&report[arm], figures);
        }
        assert_eq!(report["config"]["attacker"], "127.0.0.2");
        assert_eq!(report["damaged_words"], 0);
        assert_eq!(report["server_alive"], true);
        assert_eq!(report["attack"]["foreign_bytes"], 0);
        assert!(report["fault_p99_met"].is_boolean());
        let kinds = report["attack"]["kinds"].as_object().expect("kinds");
        assert_eq!(kinds.len(), 9, "{report}");
        let sum = |field: &str| -> u64 {
            let kinds = kinds.values();
            kinds.filter_map(|kind| kind[field].as_u64()).sum()
        };
        let [sent, refused, granted, unanswered] =
            ["sent", "refused", "granted", "unanswered"].map(sum);
        assert!(sent >= 3000 && refused > 0, "{report}");
        assert_eq!(sent, refused + granted + unanswered);
    }
}

#[test]
fn regmem_reports_all_ways_and_registers_nothing_while_it_measures() {
    let figures = "/read/pool_us /read/register_us /warm_up_registrations";
    for fabric in ["shm", "tcp"] {
        let report = report(&format!("regmem --fabric {fabric}"));
        assert_positive(&report, figures);
        for pattern in list(&report, "/acquire_release") {
            assert_positive(pattern, "/pool_ns /register_ns /by_address_ns");
        }
        assert_eq!(report["steady_state_registrations"], 0);
        let registrar = report["config"]["registrar"].as_str().expect("a text");
        assert!(registrar.contains("no adapter"), "{registrar}");
    }
}

#[test]
fn a_server_with_less_memory_than_is_used_says_so_and_is_not_killed_in_a_cgroup_of_it() {
    let test = "a_server_with_less_memory_than_is_used_says_so_and_is_not_killed_in_a_cgroup_of_it";
    if !can_page() {
        return;
    }
    // The tenth that is used is 24 MiB.
    let report = report("tiers --only first,capacity,starved --size 240MiB");
    assert_eq!(list(&report, "/capacity").len(), 2, "{report}");
    for row in list(&report, "/capacity") {
        assert_positive(row, "/slowdown/0 /cold_us /explained /saved");
        assert_eq!(
            row["cached_bytes_max"], 0,
            "the spill file is in memory: {row}"
        );
    }
    if let Some(why) = report["not_starved"].as_str() {
        eprintln!("SKIPPED: {test}: {why}");
        return;
    }
    assert_eq!(list(&report, "/starved").len(), 4, "{report}");
    for row in list(&report, "/starved") {
        assert_positive(row, "/fetches /evictions /group/peak_bytes");
        assert_eq!(row["group"]["oom_kills"], 0, "{row}");
        let share = row["cold_share"].as_f64().expect("a share");
        assert!(share > 0.05, "a tenth does not fit into memory: {row}");
    }
}

#[test]
fn a_picture_of_tiers_shows_latency_what_is_held_and_the_slowdown() {
    if !can_page() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiers.svg");
    printed(&format!(
        "tiers --smoke --fabric shm --only latency,curve --svg {}",
        file.display()
    ));
    let svg = std::fs::read_to_string(&file).unwrap();
    let expected = ["in memory", "pool", "disk", "holds, MiB", "--memory 50 %"];
    assert_has(&svg, &[&expected[..], &["of the lent"]].concat());
    // Four rows in the legend and over time, and the slowdown of all.
    let lines = svg.matches("<polyline").count();
    assert!(lines > 8, "{lines} lines");
}

#[test]
fn train_reports_every_mode_and_the_same_parameters_over_each_fabric() {
    let hashes = ["sim", "shm", "tcp"].map(|fabric| {
        let report = report(&format!("train --fabric {fabric} --seeds 2"));
        let modes = list(&report, "/modes");
        let steps = [("bsp", 30.0), ("ds", 6.0), ("fixed", 6.0), ("none", 0.0)];
        for (figures, (mode, steps)) in modes.iter().zip(steps) {
            assert_eq!(figures["mode"], mode);
            assert_eq!(figures["serial_steps_per_step"], steps);
            let positive = "/accuracy /worst_accuracy /loss /seconds";
            assert_positive(figures, positive);
            assert_eq!(list(figures, "/curve").len(), 9, "{figures}");
        }
        let figures = "/modes/0/bytes_over_theory /modes/1/distance";
        assert_positive(&report, figures);
        let above = &report["ds_minus_bsp"]["above_points"];
        assert!(above.is_number(), "{report}");
        let hashes = modes.iter().map(|figures| figures["hashes"].clone());
        hashes.collect::<Vec<_>>()
    });
    assert_eq!(hashes[0], hashes[1]);
    assert_eq!(hashes[0], hashes[2]);
    report("train --fabric tcp --mode ds --shards skewed --slow-worker 1:2 --link-gbps 1");
}

#[test]
fn ring_reports_every_step_and_their_ratios() {
    for fabric in ["shm", "tcp"] {
        let report = report(&format!("ring --fabric {fabric}"));
        let size = &report["sizes"][0];
        let ratios = "/ring_over_no_ring /polling_over_event /batch_over_single";
        assert_positive(size, ratios);
        let steps = list(&report, "/sizes/1/steps");
        assert!(steps.len() >= 4, "{report}");
        for step in &steps[..4] {
            assert_positive(step, "/messages_per_s /round_trip_us");
        }
    }
}

#[test]
fn parameter_server_is_compared_with_a_program_that_copies_four_times() {
    for fabric in ["shm", "tcp"] {
        let report = report(&format!("parameter-server --fabric {fabric}"));
        let rows = list(&report, "/rows");
        let met: Vec<_> = rows.iter().map(|row| row["is_met"].is_boolean()).collect();
        assert_eq!(met, [false, true, false, true], "judged from 4 KiB on");
        for row in rows {
            assert_eq!(row["copies"].as_f64(), Some(4.0), "{row}");
            assert!(row["bounced_bytes"].is_null(), "there is no adapter: {row}");
            let figures = "/farpage_us /copying_us /pulls/pull_us /copying_over_farpage/0";
            assert_positive(row, figures);
        }
    }
}

#[test]
fn stream_verifies_and_reports_four_kernels() {
    let runs = [
        "stream --fabric shm",
        "stream --fabric tcp",
        "stream --page-size 4KiB --data smooth --codec lz4",
        "stream --page-size 256KiB --data constant --threads 3",
        "stream --page-size 2MiB --size 48MiB --iterations 2",
        "stream --link-gbps 10 --link-us 20 --budget 2MiB",
        "stream --read-ahead 0 --fillers 1 --evictors 2",
        "stream --data turbulence --dtype f32 --codec shuffle",
    ];
    let reports = reports(&runs, "/yardsticks/plain_share");
    for report in &reports {
        assert_positive(
            &report["yardsticks"],
            "/plain_triad_mb_per_s /fabric/raw_read_mb_per_s /fabric/raw_write_mb_per_s \
             /fabric/raw_read_write_mb_per_s",
        );
        let kernels = list(report, "/kernels");
        let names: Vec<_> = kernels.iter().map(|kernel| &kernel["name"]).collect();
        assert_eq!(names, ["copy", "scale", "add", "triad"]);
        for kernel in kernels {
            assert_positive(kernel, "/mb_per_s /min_s /avg_s /max_s");
        }
        // Whatever does not apply is absent.
        let absent = ["fault_us", "us_per_access"].map(|name| report.get(name));
        assert_eq!(absent, [None, None], "{report}");
    }
    for (report, fabric) in reports.iter().zip(["shm", "tcp"]) {
        let server = report["config"]["server"].as_str().unwrap();
        assert!(server.starts_with(fabric), "{report}");
        assert_paged(report);
        assert_positive(report, "/yardsticks/fabric_share");
    }
}

#[test]
fn random_verifies_uniform_and_zipf() {
    let runs = [
        "random --fabric shm --page-size 4KiB",
        "random --fabric tcp --page-size 4KiB",
        "random --fabric shm --page-size 4KiB --zipf 0.99",
        "random --fabric tcp --page-size 4KiB --zipf 0.99",
        "random --no-advice --threads 1",
    ];
    let figures = "/us_per_access /us_per_read /us_per_update";
    for report in &reports(&runs, figures) {
        assert_paged(report);
    }
}

#[test]
fn latency_reports_percentiles_of_both_states() {
    let runs = [
        "latency --fabric shm --page-size 4KiB",
        "latency --fabric tcp --page-size 4KiB",
        "latency --fabric tcp",
    ];
    for report in &reports(&runs, "") {
        let samples = ["fault_us", "evicting_fault_us"].map(|state| {
            assert_positive(&report[state], "/p50 /p90 /p99 /p999 /samples");
            report[state]["samples"].as_u64().unwrap()
        });
        assert_paged(report);
        // An access that is no fault is no sample: nearly all have to be faults.
        let faults = report["faults"].as_u64().unwrap();
        assert!(faults >= (samples[0] + samples[1]) * 9 / 10, "{report}");
    }
}

#[test]
fn floor_measures_this_machine_and_the_raw_fabric() {
    let figures = "/kernel_fault_us/p50 /kernel_fault_us/p99 /uffd_round_trip_us/p50 \
         /uffd_round_trip_us/p99 /uffd_one_cpu_round_trip_us/p50 \
         /uffd_in_thread_round_trip_us/p50 /memcpy_mb_per_s /raw_read_mb_per_s \
         /raw_write_mb_per_s /raw_cold_read_mb_per_s /raw_cold_write_mb_per_s \
         /raw_read_write_mb_per_s /work_mb_per_s /moved_work_mb_per_s";
    let runs = ["floor --fabric shm --page-size 4KiB", "floor --fabric tcp"];
    reports(&runs, figures);
}

#[test]
fn on_one_cpu_there_is_no_second_one_and_faults_alone_need_no_server() {
    let runs = ["floor --faults --one-cpu"];
    for report in reports(&runs, "/uffd_round_trip_us/p50") {
        assert_eq!(report["config"]["one_cpu"], true);
        assert_eq!(report["config"]["server"], "none");
        for absent in ["uffd_two_cpu_round_trip_us", "memcpy_mb_per_s"] {
            assert!(report[absent].is_null(), "{report}");
        }
    }
}

#[test]
fn eviction_counts_the_evictors_time_by_clean_pages() {
    let runs = ["eviction --page-size 4KiB"];
    for report in reports(&runs, "/evictor_cpu_us_per_page") {
        // Two rounds over three quarters and more of 3072 pages, and nothing was written but what
        // the filling left.
        let clean = report["clean_evictions"].as_u64().unwrap();
        assert!(clean > 4000, "{report}");
    }
}

#[test]
fn sparse_counts_the_memory_beside_the_pages() {
    let runs = ["sparse --size 1GiB --budget 4MiB --touches 1024", "sparse"];
    // Frames on their way at either moment are a part of `metadata_bytes`: a small region's own
    // figure may be less than these, and then it is zero.
    for (report, most_mb) in reports(&runs, "/us_per_sparse_page").iter().zip([1.5, 1.0]) {
        // A thousandth of the larger region, and what one run may show by chance.
        let bytes = report["metadata_bytes"].as_f64().unwrap();
        assert!(bytes < most_mb * f64::from(1 << 20), "{report}");
    }
}

#[test]
fn plain_arrays_page_nothing() {
    for benchmark in ["stream", "random"] {
        let report = report(&format!("{benchmark} --plain"));
        assert!(report.get("faults").is_none(), "{report}");
    }
}

#[test]
fn targets_keeps_every_figure_behind_a_ratio() {
    if !can_page() {
        return;
    }
    for target in list(&report("targets"), "/targets") {
        assert_positive(target, "/measured /against /ratio");
    }
    let output = run(&["targets", "--smoke", "--only", "fault, ", "--format=json"]);
    let record = parsed(&output);
    assert_eq!(list(&record, "/targets").len(), 5, "{record}");
    // A command that two targets need ran once, and `floor`, which drifts, before and after.
    let reports = list(&record, "/reports");
    let names: Vec<_> = reports.iter().map(|report| &report["benchmark"]).collect();
    let bracketed = ["floor", "latency", "floor"];
    assert_eq!(names, [bracketed, bracketed, bracketed].concat());
    // The defaults come first: free threads, the default fault mode.
    for (at, report) in reports.iter().enumerate() {
        assert_eq!(report["config"]["one_cpu"] == true, at >= 3, "{report}");
    }
    let modes = [1, 4, 7].map(|at| &reports[at]["config"]["fault_mode"]);
    assert_eq!(modes, ["filler", "filler", "in-thread"]);
}

/// Writes a file of results. Returns its path.
fn results(folder: &TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, text).expect("the folder can be written to");
    path.to_str().expect("a name of letters").to_owned()
}

fn triads(page_size_bytes: u32, figures: &[u32]) -> String {
    let result = |mb_per_s: &u32| {
        format!(
            r#"{{"benchmark":"stream","verified":true,"config":{{"server":"shm:///{mb_per_s}","page_size_bytes":{page_size_bytes}}},
                 "kernels":[{{"name":"triad","mb_per_s":{mb_per_s}}}]}}"#
        )
    };
    figures.iter().map(result).collect()
}

#[test]
fn compare_judges_repetitions_by_their_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let a = results(&folder, "before.json", &triads(4096, &[100, 104, 102]));
    let b = results(&folder, "after.json", &triads(4096, &[204, 200, 208]));
    let compared = |b: &str| {
        let printed = printed(&format!("compare {a} {b}"));
        let line = printed.lines().find(|line| line.contains("triad.mb_per_s"));
        line.unwrap().to_owned()
    };
    assert_has(&compared(&b), &["2.000", "better"]);
    let same = compared(&a);
    assert!(same.contains("1.000") && !same.contains("better"), "{same}");
}

#[test]
fn compare_refuses_what_does_not_match() {
    let folder = tempfile::tempdir().unwrap();
    let a = results(&folder, "small.json", &triads(4096, &[100]));
    let b = results(&folder, "large.json", &triads(65536, &[100]));
    let text = results(&folder, "text.json", "no results");
    let nowhere = "/nonexistent/results.json";
    for (b, expected) in [
        (&*b, "page_size_bytes=65536"),
        (&*text, "does not hold results"),
        (nowhere, nowhere),
    ] {
        assert_refused(&format!("compare {a} {b}"), 1, expected);
    }
}

#[test]
fn under_the_tables_stands_how_near_a_figure_is_to_the_fabric_and_to_plain_memory() {
    if !can_page() {
        return;
    }
    for (benchmark, page_size, plain, fabric) in [
        ("stream", "64KiB", "triad: ", "All kernels: "),
        ("random", "4KiB", "an access: ", "All accesses: "),
        ("traffic", "64KiB", "both: ", "All steps: "),
        ("latency", "4KiB", "a read, p50: ", "The same: "),
        // Larger than the smallest array of plain memory.
        ("latency", "2MiB", "a read, p50: ", "The same: "),
    ] {
        let stdout = printed(&format!("{benchmark} --smoke --page-size {page_size}"));
        assert_has(&stdout, &["verified", "peak resident"]);
        let line = stdout.lines().last().expect("a line");
        let (before, after) = line
            .split_once(" % of plain memory (")
            .unwrap_or_else(|| panic!("no plain memory in\n{stdout}"));
        assert!(before.starts_with(plain), "{line}");
        let at = after.find(fabric).unwrap_or_else(|| panic!("{line}"));
        assert!(after[at..].contains(" % of the raw fabric ("), "{line}");
    }
    // A run that is compared with nothing says nothing.
    let stdout = printed("random --smoke --plain");
    assert!(!stdout.contains("% of plain memory"), "{stdout}");
}

#[test]
fn words_of_the_tables_are_explained() {
    let words = ["page faults", "waited for room", "pages brought in"];
    let words = [&words[..], &["pages sent away", "peak resident"]].concat();
    for benchmark in [
        "stream", "random", "latency", "eviction", "sparse", "traffic",
    ] {
        assert_has(&printed(&format!("{benchmark} --help")), &words);
    }
    if !can_page() {
        return;
    }
    let table = printed("random --smoke");
    assert_has(&table, &words);
    for unexplained in ["steals", "fills", "starved"] {
        assert!(!table.contains(unexplained), "{unexplained} in\n{table}");
    }
}

/// Runs each benchmark that prints in its own way.
#[test]
fn output_that_nobody_reads_is_no_failure_and_a_full_disk_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let results = results(&folder, "nobody-reads.json", &triads(4096, &[100]));
    for args in [
        &["doctor"][..],
        &["stream", "--smoke", "--plain"],
        &["stream", "--smoke", "--plain", "--format", "json"],
        &["regmem", "--smoke"],
        &["ring", "--smoke"],
        &["pages", "--smoke", "--data", "text"],
        &["compare", &results, &results],
    ] {
        if args == ["doctor"] && !can_page() {
            continue;
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = bench(args).stdout(writer).output().unwrap();
        let stderr = said(&output);
        assert!(output.status.success(), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        let full = std::fs::File::options().write(true).open("/dev/full");
        let output = bench(args).stdout(full.unwrap()).output().unwrap();
        let stderr = said(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert_has(&stderr, &["cannot write to standard output"]);
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}

/// Runs `doctor` as a user who may not catch the faults of system calls.
#[test]
fn doctor_says_what_the_programs_of_this_user_meet() {
    let test = "doctor_says_what_the_programs_of_this_user_meet";
    let permitted = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if !nix::unistd::geteuid().is_root() || permitted.is_ok_and(|value| value.trim() == "1") {
        eprintln!(
            "SKIPPED: {test}: needs root, to become a user without permission, and `sysctl vm.unprivileged_userfaultfd=0`"
        );
        return;
    }
    // The copy is where the other user can run it: the checkout may be root's alone.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("farpage-bench");
    std::fs::copy(env!("CARGO_BIN_EXE_farpage-bench"), &program).unwrap();
    let run_as_nobody = |args: &[&str], user_mode_only: Option<&str>| {
        let mut command = Command::new(&program);
        command.args(args).stdin(Stdio::null());
        command.uid(65534).gid(65534);
        command.env_remove("FARPAGE_USER_MODE_ONLY");
        command.envs(user_mode_only.map(|value| ("FARPAGE_USER_MODE_ONLY", value)));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.code(), text)
    };
    for (user_mode_only, fine) in [(None, false), (Some("0"), false), (Some("1"), true)] {
        let (code, text) = run_as_nobody(&["doctor"], user_mode_only);
        assert_eq!(code, Some(if fine { 0 } else { 1 }), "{text}");
        assert_eq!(text.contains("farpage works here"), fine, "{text}");
        assert_has(&text, &["FARPAGE_USER_MODE_ONLY=1"]);
        // The program that the verdict is about.
        let (code, text) = run_as_nobody(&["stream", "--smoke"], user_mode_only);
        assert_eq!(code, Some(if fine { 0 } else { 1 }), "{text}");
    }
    let (code, text) = run_as_nobody(&["doctor"], Some("perhaps"));
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["FARPAGE_USER_MODE_ONLY=perhaps: need 1 or 0"]);
}

/// Asks for more than this machine has, so that nothing may be started: memory would fill until the
/// kernel kills a process.
#[test]
fn what_does_not_fit_into_memory_is_refused_before_anything_starts() {
    if !can_page() {
        return;
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total_kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    let twice = format!("{}KiB", 2 * total_kib);
    for args in [
        "stream --size",
        "stream --fabric tcp --size",
        "stream --plain --size",
        "random --size",
        "latency --size",
        "traffic --size",
        "apps --size",
        "stream --smoke --budget",
    ] {
        assert_refused(&format!("{args} {twice}"), 1, "--force");
    }
    // With --force, farpage's own limits still refuse.
    let forced = format!("stream --smoke --force --budget {twice}");
    assert_refused(&forced, 1, "does not fit");
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        "walk",
        "stream --no-such-option",
        "stream --page-size 5000",
        "stream --page-size 4MiB",
        "stream --budget 0%",
        "stream --size plenty",
        "stream --iterations 1",
        "stream --fabric pigeon",
        "stream --server http://localhost",
        "stream --server tcp://localhost:1 --fabric tcp",
        "random --zipf 1.5",
        "latency --threads 2",
        "compare one-file-only",
        "targets --quick --repeat 2",
        "figures",
        "codecs --quick --smoke --out x",
        "traffic --codec zip",
        "versus-swap --budget none",
        "floor --link-gbps 0",
        "apps --apps chess",
        "apps --shares 0",
        "apps --shares 50,150",
        "apps --page-size 5000",
        "apps --repeat 0",
        "apps --size plenty",
        "apps --fabric pigeon",
    ] {
        assert_refused(args, 2, "--help");
    }
    assert_refused("", 2, "Usage");
}

#[test]
fn a_server_that_is_not_there_exits_with_1_and_says_so() {
    if !can_page() {
        return;
    }
    let server = "shm:///nonexistent/farpage.sock";
    let args = format!("stream --smoke --server {server}");
    assert_refused(&args, 1, "/nonexistent/farpage.sock");
}

#[test]
fn the_own_server_ends_with_a_benchmark_that_is_killed() {
    if !can_page() {
        return;
    }
    let mut child = start("stream --smoke --size 64MiB --iterations 100");
    let socket = socket_of(&child);
    wait_until("the server listens", || socket.exists());
    child.kill().unwrap();
    child.wait().unwrap();
    // The server takes its socket away when it ends in good order.
    wait_until("the server has gone", || !socket.exists());
}
