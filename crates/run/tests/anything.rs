//! Reserved and remote addresses that turn into files, code, shared memory, and back.
//!
//! The rule it keeps: each C program prints the same as in a plain run, with filler threads and
//! with in-thread faults, and with pages of one and of several kernel pages.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use common::{GCC, MIB, can_run, farpage_in_pages_of, modes, output, said, same_as_plain};
use farpage_testkit::{test_name, text};
use tempfile::TempDir;

const JAVA: &str = "/usr/bin/java";
const JAVAC: &str = "/usr/bin/javac";
const NODE: &str = "/usr/bin/node";
const OPTIONS: [&str; 5] = ["--budget", "4MiB", "--capacity", "512MiB", "--stats"];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/anything")
        .join(name)
}

/// Compiles a C program of this test's folder.
fn compile(name: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let made = common::compile(folder.path(), &format!("anything/{name}"), &["-pthread"]).unwrap();
    (folder, made.to_str().unwrap().to_owned())
}

/// Runs a program plain, and in all modes with each page size: with the first of them memory is
/// ordinary until more is allocated than the budget, or something needs paging.
fn check(command: &[&str], pages: &[&str]) {
    let plain = output(Command::new(command[0]).args(&command[1..]));
    for mode in modes() {
        for page in pages {
            let options = [&OPTIONS, *mode].concat();
            let ours = match *page == pages[0] {
                true => common::farpage_as(page, &options, command),
                false => farpage_in_pages_of(page, &options, command),
            };
            let (seen, wanted) = (text(&ours.stdout), text(&plain.stdout));
            let differs = seen.lines().zip(wanted.lines()).position(|(a, b)| a != b);
            assert!(
                seen == wanted && ours.status == plain.status,
                "{command:?}, {mode:?}, {page}: {}, differs in line {differs:?}: {seen}{}",
                ours.status,
                text(&ours.stderr)
            );
            same_as_plain(command, &plain, &ours);
        }
    }
}

fn check_case(case: &str) {
    if can_run(&[GCC]) {
        let (_folder, program) = compile("cases");
        check(&[&program, case], &["16KiB", "4KiB"]);
    }
}

macro_rules! cases {
    ($($test:ident = $case:literal;)+) => {
        $(
            #[test]
            fn $test() {
                check_case($case);
            }
        )+
    };
}

cases! {
    guard_pages_are_mapped_over_remote_memory = "guards";
    addresses_that_are_mapped_are_not_replaced_unless_asked = "noreplace";
    advice_on_forks_holds_for_what_the_kernel_has = "not-to-children";
    files_come_and_go_in_the_middle_of_remote_memory = "middle";
    mappings_move_into_reservations_and_out = "moves-in";
    mappings_that_move_may_leave_their_addresses_mapped = "stays-mapped";
    rings_are_mapped_twice_in_a_row = "twice";
    code_runs_in_reserved_addresses = "executes";
    calls_on_ranges_of_both_kinds_reach_both = "mixed";
    children_have_what_lies_in_the_arena = "children";
    touches_behind_the_end_of_a_file_raise_sigbus = "behind-the-end";
    mappings_that_the_kernel_refuses_change_nothing = "refused";
    system_calls_reach_what_lies_in_the_arena = "calls";
    reservations_beyond_the_capacity_cost_nothing = "giants";
    bytes_beside_a_file_are_never_lost = "borders";
    locked_bytes_beside_a_file_stay_locked = "locked";
    mappings_of_both_kinds_move_with_their_protections = "moves-mixed";
    children_move_what_the_kernel_has_whatever_other_threads_map = "children-move";
    debuggers_bring_memory_in_beside_files = "debugged";
    calls_that_fail_for_lack_of_mappings_lose_nothing_else = "exhausted";
}

#[test]
fn random_calls_are_answered_as_in_a_plain_run() {
    if !can_run(&[GCC]) {
        return;
    }
    let (_folder, program) = compile("random");
    for seed in ["1", "2", "3"] {
        check(&[&program, seed, "400"], &["16KiB", "4KiB", "64KiB"]);
    }
}

/// Runs a program of an interpreter, of which most memory is remote.
fn check_interpreter(command: &[&str]) {
    let plain = output(Command::new(command[0]).args(&command[1..]));
    for mode in modes() {
        let budget = ["--budget", "24MiB", "--stats"];
        let ours = farpage_in_pages_of("16KiB", &[&budget, *mode].concat(), command);
        let stats = same_as_plain(command, &plain, &ours);
        let local = said(&stats, " of it in local memory");
        assert!(local <= 24 * MIB, "{mode:?}: {stats}");
        assert!(said(&stats, " written") > MIB, "{mode:?}: {stats}");
    }
}

#[test]
fn heaps_of_java_are_remote_with_each_collector() {
    if !can_run(&[GCC]) {
        return;
    }
    if !Path::new(JAVA).exists() || !Path::new(JAVAC).exists() {
        eprintln!("SKIPPED: {}: there is no {JAVA} and {JAVAC}", test_name());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let classes = folder.path().to_str().unwrap();
    let made = output(
        Command::new(JAVAC)
            .args(["-d", classes])
            .arg(source("Heap.java")),
    );
    assert!(made.status.success(), "{}", text(&made.stderr));
    for collector in ["-XX:+UseSerialGC", "-XX:+UseParallelGC", "-XX:+UseG1GC"] {
        check_interpreter(&[JAVA, "-Xmx96m", collector, "-cp", classes, "Heap"]);
    }
}

#[test]
fn heaps_of_node_are_remote_with_compiled_code_and_without() {
    if !can_run(&[GCC]) {
        return;
    }
    if !Path::new(NODE).exists() {
        eprintln!("SKIPPED: {}: there is no {NODE}", test_name());
        return;
    }
    let script = source("heap.js");
    let script = script.to_str().unwrap();
    check_interpreter(&[NODE, script]);
    check_interpreter(&[NODE, "--jitless", "--no-expose-wasm", script]);
}
