//! The program as people and scripts use it: each benchmark in its `--smoke` form, as a process,
//! against the memory server that it starts itself. `cargo xtask bench --smoke` runs each with
//! other options, too.

mod common;

use std::{
    fs::Permissions,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use common::{bench, can_page, run};

/// Runs a benchmark and checks the parts that all reports have in common.
fn report(benchmark: &str, args: &[&str]) -> Value {
    let output = run(&[&[benchmark, "--smoke", "--format", "json"], args].concat());
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{benchmark} {args:?}: {}\n{stdout}{stderr}",
        output.status
    );
    let report: Value = serde_json::from_str(&stdout)
        .unwrap_or_else(|e| panic!("not one JSON object ({e}): {stdout}"));
    assert_eq!(report["benchmark"], benchmark);
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!(report["config"]["smoke"], true);
    report
}

/// Asserts that figures are there and above zero.
fn assert_positive(report: &Value, pointers: &[&str]) {
    for pointer in pointers {
        let figure = report.pointer(pointer).and_then(Value::as_f64);
        assert!(
            figure.is_some_and(|figure| figure > 0.0),
            "{pointer} is {figure:?} in {report}"
        );
    }
}

fn assert_paged(report: &Value) {
    assert_positive(
        report,
        &[
            "/faults",
            "/fills",
            "/evictions",
            "/bytes_read",
            "/bytes_written",
            "/budget_bytes",
        ],
    );
    assert_positive(report, &["/peak_resident_bytes", "/compression_ratio"]);
    assert!(report["steals"].is_u64(), "{report}");
    let (peak, budget) = (
        report["peak_resident_bytes"].as_u64(),
        report["budget_bytes"].as_u64(),
    );
    assert!(
        peak <= budget,
        "peak {peak:?} is over the budget {budget:?}"
    );
}

const FABRICS: [&str; 2] = ["shm", "tcp"];

#[test]
fn hostile_requests_of_every_kind_are_sent_and_a_victim_beside_them_keeps_every_word() {
    if !can_page(
        "hostile_requests_of_every_kind_are_sent_and_a_victim_beside_them_keeps_every_word",
    ) {
        return;
    }
    let report = report("hostile", &[]);
    assert_eq!(report["config"]["attacker"], "127.0.0.2");
    assert_eq!(report["damaged_words"], 0);
    assert_eq!(report["server_alive"], true);
    assert_eq!(report["attack"]["foreign_bytes"], 0);
    let kinds = report["attack"]["kinds"].as_object().expect("kinds");
    assert_eq!(kinds.len(), 9, "{report}");
    let sum = |field: &str| {
        kinds
            .values()
            .filter_map(|kind| kind[field].as_u64())
            .sum::<u64>()
    };
    assert!(sum("sent") >= 3000, "{report}");
    assert_eq!(
        sum("sent"),
        sum("refused") + sum("granted") + sum("unanswered")
    );
    assert!(sum("refused") > 0, "{report}");
    for arm in ["attacked", "beside_burner"] {
        assert_positive(
            &report[arm],
            &[
                "/seconds",
                "/fault_us/p99",
                "/stream_mb_per_s",
                "/words_checked",
            ],
        );
    }
    assert_positive(&report, &["/fault_p99_ratio"]);
    assert!(report["fault_p99_met"].is_boolean());
}

#[test]
fn regmem_reports_all_ways_and_registers_nothing_while_it_measures() {
    for fabric in FABRICS {
        let report = report("regmem", &["--fabric", fabric]);
        for pattern in 0..3 {
            let figures = ["pool_ns", "register_ns", "by_address_ns"];
            let figures = figures.map(|figure| format!("/acquire_release/{pattern}/{figure}"));
            assert_positive(&report, &figures.each_ref().map(String::as_str));
        }
        assert_positive(
            &report,
            &[
                "/read/pool_us",
                "/read/register_us",
                "/warm_up_registrations",
            ],
        );
        assert_eq!(report["steady_state_registrations"], 0);
        let registrar = report["config"]["registrar"].as_str().expect("a text");
        assert!(registrar.contains("no adapter"), "{registrar}");
    }
}

#[test]
fn a_server_with_less_memory_than_is_used_says_so_and_is_not_killed_in_a_cgroup_of_it() {
    let name = "a_server_with_less_memory_than_is_used_says_so_and_is_not_killed_in_a_cgroup_of_it";
    if !can_page(name) {
        return;
    }
    // The tenth that is used is 24 MiB.
    let arguments = "tiers --smoke --format json --only capacity,starved --size 240MiB";
    let output = run(&arguments.split(' ').collect::<Vec<_>>());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["verified"], true, "{report}");
    let capacity = report["capacity"].as_array().expect("rows");
    assert_eq!(capacity.len(), 2, "{report}");
    for row in capacity {
        assert_positive(row, &["/slowdown/0", "/cold_us", "/explained", "/saved"]);
        assert_eq!(
            row["cached_bytes_max"], 0,
            "the spill file is in memory: {row}"
        );
    }
    if let Some(why) = report["not_starved"].as_str() {
        eprintln!("SKIPPED: {name}: {why}");
        return;
    }
    let starved = report["starved"].as_array().expect("rows");
    assert_eq!(starved.len(), 4, "{report}");
    for row in starved {
        assert_positive(row, &["/fetches", "/evictions", "/group/peak_bytes"]);
        assert_eq!(row["group"]["oom_kills"], 0, "{row}");
        let share = row["cold_share"].as_f64().expect("a share");
        assert!(share > 0.05, "a tenth does not fit into memory: {row}");
    }
}

#[test]
fn a_picture_of_tiers_shows_latency_what_is_held_and_the_slowdown() {
    let name = "a_picture_of_tiers_shows_latency_what_is_held_and_the_slowdown";
    if !can_page(name) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tiers.svg");
    let arguments = ["tiers", "--smoke", "--only", "latency,curve", "--svg"];
    let arguments: Vec<_> = (arguments.into_iter())
        .chain([file.to_str().expect("a name of letters")])
        .collect();
    let output = run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let svg = std::fs::read_to_string(&file).expect("it was drawn");
    for expected in [
        "in memory",
        "pool",
        "disk",
        "holds, MiB",
        "--memory 50 %",
        "of the lent",
    ] {
        assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
    }
    // Four rows in the legend and over time, and the slowdown of all.
    let lines = svg.matches("<polyline").count();
    assert!(lines > 8, "{lines} lines");
}

#[test]
fn train_reports_every_mode_and_the_same_parameters_over_each_fabric() {
    let mut hashes = Vec::new();
    for fabric in ["sim", "shm", "tcp"] {
        let report = report("train", &["--fabric", fabric, "--seeds", "2"]);
        let modes = report["modes"].as_array().unwrap();
        let steps = ["bsp", "ds", "fixed", "none"]
            .into_iter()
            .zip([30.0, 6.0, 6.0, 0.0]);
        for (figures, (mode, steps)) in modes.iter().zip(steps) {
            assert_eq!(figures["mode"], mode);
            assert_eq!(figures["serial_steps_per_step"], steps);
            assert_positive(
                figures,
                &["/accuracy", "/worst_accuracy", "/loss", "/seconds"],
            );
            assert_eq!(figures["curve"].as_array().unwrap().len(), 9, "{figures}");
        }
        assert_positive(
            &report,
            &["/modes/0/bytes_over_theory", "/modes/1/distance"],
        );
        assert!(
            report["ds_minus_bsp"]["above_points"].is_number(),
            "{report}"
        );
        hashes.push(
            modes
                .iter()
                .map(|figures| figures["hashes"].clone())
                .collect::<Vec<_>>(),
        );
    }
    assert!(
        hashes[0] == hashes[1] && hashes[0] == hashes[2],
        "{hashes:?}"
    );
}

#[test]
fn ring_reports_every_step_and_their_ratios() {
    for fabric in FABRICS {
        let report = report("ring", &["--fabric", fabric]);
        for step in 0..4 {
            let figures = ["messages_per_s", "round_trip_us"];
            let figures = figures.map(|figure| format!("/sizes/1/steps/{step}/{figure}"));
            assert_positive(&report, &figures.each_ref().map(String::as_str));
        }
        let ratios = [
            "ring_over_no_ring",
            "polling_over_event",
            "batch_over_single",
        ];
        let ratios = ratios.map(|ratio| format!("/sizes/0/{ratio}"));
        assert_positive(&report, &ratios.each_ref().map(String::as_str));
    }
}

#[test]
fn parameter_server_is_compared_with_a_program_that_copies_four_times() {
    for fabric in FABRICS {
        let report = report("parameter-server", &["--fabric", fabric]);
        let rows = report["rows"].as_array().unwrap();
        let met: Vec<_> = rows.iter().map(|row| row["is_met"].is_boolean()).collect();
        assert_eq!(met, [false, true, false, true], "judged from 4 KiB on");
        for (number, row) in rows.iter().enumerate() {
            assert_eq!(row["copies"].as_f64(), Some(4.0), "{row}");
            assert!(row["bounced_bytes"].is_null(), "there is no adapter: {row}");
            let figures = [
                "farpage_us",
                "copying_us",
                "copying_over_farpage/0",
                "pulls/pull_us",
            ];
            let figures = figures.map(|figure| format!("/rows/{number}/{figure}"));
            assert_positive(&report, &figures.each_ref().map(String::as_str));
        }
    }
}

#[test]
fn stream_verifies_and_reports_four_kernels() {
    if !can_page("stream_verifies_and_reports_four_kernels") {
        return;
    }
    for fabric in FABRICS {
        let report = report("stream", &["--fabric", fabric]);
        assert!(
            report["config"]["server"]
                .as_str()
                .unwrap()
                .starts_with(fabric),
            "{report}"
        );
        let kernels = report["kernels"].as_array().unwrap();
        let names: Vec<_> = kernels
            .iter()
            .map(|kernel| kernel["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["copy", "scale", "add", "triad"]);
        for kernel in kernels {
            assert_positive(kernel, &["/mb_per_s", "/min_s", "/avg_s", "/max_s"]);
        }
        assert_paged(&report);
        assert_positive(
            &report["yardsticks"],
            &[
                "/plain_triad_mb_per_s",
                "/plain_share",
                "/fabric/raw_read_mb_per_s",
                "/fabric/raw_write_mb_per_s",
                "/fabric/raw_read_write_mb_per_s",
                "/fabric_share",
            ],
        );
        // Whatever does not apply is absent.
        assert!(
            report.get("fault_us").is_none() && report.get("us_per_access").is_none(),
            "{report}"
        );
    }
}

#[test]
fn random_verifies_uniform_and_zipf() {
    if !can_page("random_verifies_uniform_and_zipf") {
        return;
    }
    for fabric in FABRICS {
        for zipf in [&[][..], &["--zipf", "0.99"]] {
            let report = report(
                "random",
                &[&["--fabric", fabric, "--page-size", "4KiB"], zipf].concat(),
            );
            assert_positive(
                &report,
                &["/us_per_access", "/us_per_read", "/us_per_update"],
            );
            assert_paged(&report);
        }
    }
}

#[test]
fn latency_reports_percentiles_of_both_states() {
    if !can_page("latency_reports_percentiles_of_both_states") {
        return;
    }
    for fabric in FABRICS {
        let report = report("latency", &["--fabric", fabric, "--page-size", "4KiB"]);
        for state in ["fault_us", "evicting_fault_us"] {
            assert_positive(
                &report[state],
                &["/p50", "/p90", "/p99", "/p999", "/samples"],
            );
        }
        assert_paged(&report);
        // An access that is no fault is no sample: nearly all have to be faults.
        let samples = report["fault_us"]["samples"].as_u64().unwrap()
            + report["evicting_fault_us"]["samples"].as_u64().unwrap();
        assert!(
            report["faults"].as_u64().unwrap() >= samples * 9 / 10,
            "{report}"
        );
    }
}

#[test]
fn floor_measures_this_machine_and_the_raw_fabric() {
    if !can_page("floor_measures_this_machine_and_the_raw_fabric") {
        return;
    }
    for fabric in FABRICS {
        let report = report("floor", &["--fabric", fabric]);
        assert_positive(
            &report,
            &[
                "/kernel_fault_us/p50",
                "/kernel_fault_us/p99",
                "/uffd_round_trip_us/p50",
                "/uffd_round_trip_us/p99",
                "/uffd_one_cpu_round_trip_us/p50",
                "/uffd_in_thread_round_trip_us/p50",
                "/memcpy_mb_per_s",
                "/raw_read_mb_per_s",
                "/raw_write_mb_per_s",
                "/raw_cold_read_mb_per_s",
                "/raw_cold_write_mb_per_s",
                "/raw_read_write_mb_per_s",
                "/work_mb_per_s",
                "/moved_work_mb_per_s",
            ],
        );
    }
}

#[test]
fn on_one_cpu_there_is_no_second_one_and_faults_alone_need_no_server() {
    if !can_page("on_one_cpu_there_is_no_second_one_and_faults_alone_need_no_server") {
        return;
    }
    let report = report("floor", &["--faults", "--one-cpu"]);
    assert_positive(&report, &["/uffd_round_trip_us/p50"]);
    assert_eq!(report["config"]["one_cpu"], true);
    assert_eq!(report["config"]["server"], "none");
    for absent in ["uffd_two_cpu_round_trip_us", "memcpy_mb_per_s"] {
        assert!(report[absent].is_null(), "{report}");
    }
}

#[test]
fn eviction_counts_the_evictors_time_by_clean_pages() {
    if !can_page("eviction_counts_the_evictors_time_by_clean_pages") {
        return;
    }
    let report = report("eviction", &["--page-size", "4KiB"]);
    assert_positive(&report, &["/evictor_cpu_us_per_page"]);
    // Two rounds over three quarters and more of 3072 pages, and nothing was written but what the
    // filling left.
    let clean = report["clean_evictions"].as_u64().unwrap();
    assert!(clean > 4000, "{report}");
}

#[test]
fn sparse_counts_the_memory_beside_the_pages() {
    if !can_page("sparse_counts_the_memory_beside_the_pages") {
        return;
    }
    let report = report(
        "sparse",
        &["--size", "1GiB", "--budget", "4MiB", "--touches", "1024"],
    );
    assert_positive(&report, &["/us_per_sparse_page", "/metadata_bytes"]);
    // A thousandth of the region, and what one run may show by chance.
    assert!(
        report["metadata_bytes"].as_u64().unwrap() < (1 << 20) + (512 << 10),
        "{report}"
    );
}

#[test]
fn plain_arrays_page_nothing() {
    for benchmark in ["stream", "random"] {
        let report = report(benchmark, &["--plain"]);
        assert!(report.get("faults").is_none(), "{report}");
    }
}

#[test]
fn targets_keeps_every_figure_behind_a_ratio() {
    if !can_page("targets_keeps_every_figure_behind_a_ratio") {
        return;
    }
    let output = run(&[
        "targets", "--smoke", "--only", "fault, ", "--format", "json",
    ]);
    assert!(output.status.success(), "{output:?}");
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    let targets = record["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 5, "{record}");
    for target in targets {
        assert_positive(target, &["/measured", "/against", "/ratio"]);
    }
    // A command that two targets need ran once, and `floor`, which drifts, before and after.
    let names: Vec<_> = record["reports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|report| report["benchmark"].as_str().unwrap())
        .collect();
    let bracketed = ["floor", "latency", "floor"];
    assert_eq!(names, [bracketed, bracketed, bracketed].concat());
    // The defaults come first: free threads, the default fault mode.
    let configs: Vec<_> = record["reports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|report| &report["config"])
        .collect();
    for (at, config) in configs.iter().enumerate() {
        assert_eq!(config["one_cpu"] == true, at >= 3, "{config}");
    }
    let modes = [1, 4, 7].map(|at| configs[at]["fault_mode"].as_str().unwrap());
    assert_eq!(modes, ["filler", "filler", "in-thread"]);
}

/// A file of results that is removed at the end.
struct Results(PathBuf);

impl Results {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("farpage-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("the directory for temporary files can be written to");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("its name was made from text above")
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn triads(page_size_bytes: u32, figures: &[u32]) -> String {
    figures
        .iter()
        .map(|mb_per_s| {
            format!(
                r#"{{"benchmark":"stream","verified":true,"config":{{"server":"shm:///{mb_per_s}","page_size_bytes":{page_size_bytes}}},
                     "kernels":[{{"name":"triad","mb_per_s":{mb_per_s}}}]}}"#
            )
        })
        .collect()
}

#[test]
fn compare_judges_repetitions_by_their_ranges() {
    let a = Results::new("before.json", &triads(4096, &[100, 104, 102]));
    let b = Results::new("after.json", &triads(4096, &[204, 200, 208]));
    let output = run(&["compare", a.path(), b.path()]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let line = stdout
        .lines()
        .find(|line| line.contains("triad.mb_per_s"))
        .unwrap();
    assert!(line.contains("2.000") && line.contains("better"), "{line}");
    let output = run(&["compare", a.path(), a.path()]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        stdout.contains("1.000") && !stdout.contains("better"),
        "{stdout}"
    );
}

#[test]
fn compare_refuses_what_does_not_match() {
    let a = Results::new("small.json", &triads(4096, &[100]));
    let b = Results::new("large.json", &triads(65536, &[100]));
    let text = Results::new("text.json", "no results");
    for (b, expected) in [
        (b.path(), "page_size_bytes=65536"),
        (text.path(), "does not hold results"),
        ("/nonexistent/results.json", "/nonexistent/results.json"),
    ] {
        let output = run(&["compare", a.path(), b]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.contains(expected) && output.stdout.is_empty(),
            "{stderr}"
        );
    }
}

#[test]
fn the_human_form_is_a_table() {
    if !can_page("the_human_form_is_a_table") {
        return;
    }
    let output = run(&["stream", "--smoke"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}");
    for expected in [
        "triad",
        "MB/s",
        "yes, every element",
        "peak resident",
        "% of plain memory",
        "% of the raw fabric",
    ] {
        assert!(
            stdout.contains(expected),
            "{expected} is missing in\n{stdout}"
        );
    }
}

#[test]
fn under_the_tables_stands_how_near_a_figure_is_to_the_fabric_and_to_plain_memory() {
    let test = "under_the_tables_stands_how_near_a_figure_is_to_the_fabric_and_to_plain_memory";
    if !can_page(test) {
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
        let output = run(&[benchmark, "--smoke", "--page-size", page_size]);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{stdout}");
        let line = stdout.lines().last().expect("a line");
        let (before, after) = line
            .split_once(" % of plain memory (")
            .unwrap_or_else(|| panic!("no plain memory in\n{stdout}"));
        assert!(before.starts_with(plain), "{line}");
        let at = after.find(fabric).unwrap_or_else(|| panic!("{line}"));
        assert!(after[at..].contains(" % of the raw fabric ("), "{line}");
    }
    // A run that is compared with nothing says nothing.
    let output = run(&["random", "--smoke", "--plain"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(!stdout.contains("% of plain memory"), "{stdout}");
}

/// Asserts that `--help` explains the words of the tables.
#[test]
fn words_of_the_tables_are_explained() {
    let words = [
        "page faults",
        "waited for room",
        "pages brought in",
        "pages sent away",
        "peak resident",
    ];
    for benchmark in [
        "stream", "random", "latency", "eviction", "sparse", "traffic",
    ] {
        let output = run(&[benchmark, "--help"]);
        let help = String::from_utf8_lossy(&output.stdout);
        for word in words {
            assert!(help.contains(word), "{benchmark} --help lacks {word}");
        }
    }
    if !can_page("words_of_the_tables_are_explained") {
        return;
    }
    let output = run(&["random", "--smoke"]);
    let table = String::from_utf8_lossy(&output.stdout);
    for word in words {
        assert!(table.contains(word), "{word} is missing in\n{table}");
    }
    for unexplained in ["steals", "fills", "starved"] {
        assert!(!table.contains(unexplained), "{unexplained} in\n{table}");
    }
}

/// Runs each benchmark that prints in its own way.
#[test]
fn output_that_nobody_reads_is_no_failure_and_a_full_disk_is_one() {
    let results = Results::new("nobody-reads.json", &triads(4096, &[100]));
    for args in [
        &["doctor"][..],
        &["stream", "--smoke", "--plain"],
        &["stream", "--smoke", "--plain", "--format", "json"],
        &["regmem", "--smoke"],
        &["ring", "--smoke"],
        &["pages", "--smoke"],
        &["compare", results.path(), results.path()],
    ] {
        if args == ["doctor"] && !can_page("output_that_nobody_reads_is_no_failure") {
            continue;
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = bench(args).stdout(writer).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        let full = std::fs::File::options().write(true).open("/dev/full");
        let output = bench(args).stdout(full.unwrap()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(
            stderr.contains("cannot write to standard output") && !stderr.contains("panicked"),
            "{args:?}: {stderr}"
        );
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
        command
            .args(args)
            .stdin(Stdio::null())
            .uid(65534)
            .gid(65534);
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
        assert!(text.contains("FARPAGE_USER_MODE_ONLY=1"), "{text}");
        // The program that the verdict is about.
        let (code, text) = run_as_nobody(&["stream", "--smoke"], user_mode_only);
        assert_eq!(code, Some(if fine { 0 } else { 1 }), "{text}");
    }
    let (code, text) = run_as_nobody(&["doctor"], Some("perhaps"));
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("FARPAGE_USER_MODE_ONLY=perhaps: need 1 or 0"),
        "{text}"
    );
}

/// Asks for more than this machine has, so that nothing may be started: memory would fill until the
/// kernel kills a process.
#[test]
fn what_does_not_fit_into_memory_is_refused_before_anything_starts() {
    if !can_page("what_does_not_fit_into_memory_is_refused_before_anything_starts") {
        return;
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total_kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    let twice = format!("{}KiB", 2 * total_kib);
    for (args, expected) in [
        (&["stream", "--size", &twice][..], "--force"),
        (&["stream", "--size", &twice, "--fabric", "tcp"], "--force"),
        (&["stream", "--size", &twice, "--plain"], "--force"),
        (&["random", "--size", &twice], "--force"),
        (&["latency", "--size", &twice], "--force"),
        (&["traffic", "--size", &twice], "--force"),
        (&["apps", "--size", &twice], "--force"),
        (&["stream", "--smoke", "--budget", &twice], "--force"),
        // With --force, farpage's own limits still refuse.
        (
            &["stream", "--smoke", "--budget", &twice, "--force"],
            "does not fit",
        ),
    ] {
        let output = run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &[][..],
        &["walk"],
        &["stream", "--no-such-option"],
        &["stream", "--page-size", "5000"],
        &["stream", "--page-size", "4MiB"],
        &["stream", "--budget", "0%"],
        &["stream", "--size", "plenty"],
        &["stream", "--iterations", "1"],
        &["stream", "--fabric", "pigeon"],
        &["stream", "--server", "http://localhost"],
        &["stream", "--server", "tcp://localhost:1", "--fabric", "tcp"],
        &["random", "--zipf", "1.5"],
        &["latency", "--threads", "2"],
        &["compare", "one-file-only"],
        &["targets", "--quick", "--repeat", "2"],
        &["sweep", "--repeat", "0"],
        &["figures"],
        &["codecs", "--quick", "--smoke", "--out", "x"],
        &["traffic", "--codec", "zip"],
        &["versus-swap", "--budget", "none"],
        &["floor", "--link-gbps", "0"],
    ] {
        let output = run(args);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            output.stdout.is_empty(),
            "{args:?} printed to standard output"
        );
    }
}

#[test]
fn a_server_that_is_not_there_exits_with_1_and_says_so() {
    if !can_page("a_server_that_is_not_there_exits_with_1_and_says_so") {
        return;
    }
    let output = run(&[
        "stream",
        "--smoke",
        "--server",
        "shm:///nonexistent/farpage.sock",
    ]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("/nonexistent/farpage.sock"), "{stderr}");
}

#[test]
fn the_own_server_ends_with_a_benchmark_that_is_killed() {
    if !can_page("the_own_server_ends_with_a_benchmark_that_is_killed") {
        return;
    }
    let mut child = bench(&[
        "stream",
        "--smoke",
        "--size",
        "64MiB",
        "--iterations",
        "100",
    ])
    .stdout(Stdio::null())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let socket = std::env::temp_dir().join(format!("farpage-bench-{}-server.sock", child.id()));
    wait_until("the server listens", || socket.exists());
    child.kill().unwrap();
    child.wait().unwrap();
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
