//! Programs that do unusual things to themselves: plugins with names of their own, sandboxes,
//! namespaces, sanitizers, a debugger.
//!
//! The rule it keeps: each works under `farpage run`, or is refused with a line that says what to
//! do instead.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;
// The preloaded library has no test program of its own: it would interpose that program.
#[path = "../src/preload/seccomp.rs"]
mod seccomp;

use std::{
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use common::{GCC, can_run, modes, output};
use farpage_testkit::text;
use tempfile::TempDir;

const GDB: &str = "/usr/bin/gdb";

/// Compiles a C program of this test's folder. `None` if the compiler cannot.
fn compile(folder: &Path, name: &str, options: &[&str]) -> Option<PathBuf> {
    let made = common::compile(folder, &format!("unusual/{name}"), options);
    made.inspect_err(|said| eprintln!("{said}")).ok()
}

/// Compiles the program that confines itself. `None` if this machine cannot run its tests.
fn confined() -> Option<(TempDir, String)> {
    if !cfg!(target_arch = "x86_64") || !can_run(&[GCC]) {
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = compile(folder.path(), "confined", &[]).expect("a C program");
    Some((folder, program.display().to_string()))
}

fn command(mode: &[&str], arguments: &[&str]) -> Command {
    let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
    farpage.args(["run", "--at-once", "--budget", "4MiB"]);
    farpage.args(["--capacity", "256MiB"]).args(mode);
    farpage.arg("--").args(arguments);
    farpage
}

fn said(ended: &Output) -> String {
    let (out, err) = (text(&ended.stdout), text(&ended.stderr));
    format!("{} {out} {err}", ended.status)
}

/// Runs `program` with a plugin, plain and in all modes. Calls `check` with its standard error.
fn check_plugin(plugin: &str, program: &str, check: impl Fn(&str)) {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shared = ["-shared", "-fPIC", "-pthread"];
    let plugin = compile(folder.path(), plugin, &shared).unwrap();
    let program = compile(folder.path(), program, &[]).unwrap();
    let (plugin, program) = (plugin.to_str().unwrap(), program.to_str().unwrap());
    assert!(output(Command::new(program).arg(plugin)).status.success());
    for mode in modes() {
        let ended = output(&mut command(mode, &[program, plugin]));
        assert!(ended.status.success(), "{mode:?}: {}", said(&ended));
        check(&text(&ended.stderr));
    }
}

#[test]
fn plugins_that_bind_deeply_free_what_the_program_has_made() {
    if cfg!(target_arch = "x86_64") {
        check_plugin("plugin", "deepbind", |why| {
            assert_eq!(why.matches("RTLD_DEEPBIND is left out").count(), 1, "{why}");
        });
    }
}

#[test]
fn constructors_of_plugins_wait_for_threads_that_allocate() {
    check_plugin("constructor", "load", |_| {});
}

#[test]
fn programs_confine_themselves_or_hear_why_not() {
    let test = "programs_confine_themselves_or_hear_why_not";
    let Some((_folder, program)) = confined() else {
        return;
    };
    let program = &*program;
    // Arguments of the program, and a part of the line that refuses them, if they are refused.
    let cases = [
        (&["one-denied"][..], None),
        (&["one-denied", "by-number"], None),
        (&["few-allowed"], Some("without its sandbox")),
        (&["few-allowed", "by-number"], Some("without its sandbox")),
        (&["strict"], Some("without its sandbox")),
        (&["user-namespace"], Some("inside of the namespace")),
        (
            &["user-namespace", "by-number"],
            Some("inside of the namespace"),
        ),
    ];
    for (how, refusal) in cases {
        let arguments = [&[program], how].concat();
        let plain = output(Command::new(program).args(how));
        let had = text(&plain.stdout);
        if had != "confined\ndone\n" {
            eprintln!("SKIPPED: {test}: {how:?} is refused without farpage: {had}");
            continue;
        }
        for mode in modes() {
            let ended = output(&mut command(mode, &arguments));
            let all = said(&ended);
            assert!(ended.status.success(), "{how:?} {mode:?}: {all}");
            match refusal {
                None => assert_eq!(text(&ended.stdout), "confined\ndone\n", "{how:?}: {all}"),
                Some(line) => {
                    let out = text(&ended.stdout);
                    assert!(out.starts_with("errno"), "{how:?} {mode:?}: {all}");
                    assert!(out.ends_with("done\n"), "{how:?} {mode:?}: {all}");
                    assert!(
                        text(&ended.stderr).contains(line),
                        "{how:?} {mode:?}: {all}"
                    );
                }
            }
        }
    }
}

#[test]
fn programs_that_confine_themselves_first_stay_local() {
    let Some((_folder, program)) = confined() else {
        return;
    };
    let program = &*program;
    for how in [
        &["first-few-allowed"][..],
        &["first-few-allowed", "by-number"],
        &["first-one-denied"],
    ] {
        for mode in modes() {
            let ended = output(&mut command(mode, &[&[program], how].concat()));
            let all = said(&ended);
            assert!(ended.status.success(), "{how:?} {mode:?}: {all}");
            assert_eq!(text(&ended.stdout), "confined\ndone\n", "{how:?}: {all}");
            assert_eq!(all.matches("stays local").count(), 1, "{how:?}: {all}");
        }
    }
}

/// The runtime's threads start before the filter forbids them.
#[test]
fn program_that_forbids_itself_threads_comes_under_paging_later() {
    let Some((_folder, program)) = confined() else {
        return;
    };
    for mode in modes() {
        for how in [&["no-threads"][..], &["no-threads", "by-number"]] {
            let arguments = [&[&*program], how].concat();
            let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
            farpage.args(["run", "--budget", "4MiB"]);
            farpage.args(["--capacity", "256MiB"]).args(*mode);
            let ended = output(farpage.arg("--").args(&arguments));
            let all = said(&ended);
            assert!(ended.status.success(), "{how:?} {mode:?}: {all}");
            assert_eq!(text(&ended.stdout), "confined\ndone\n", "{how:?}: {all}");
        }
    }
}

#[test]
fn filters_that_would_confine_farpages_threads_are_refused() {
    let Some((_folder, program)) = confined() else {
        return;
    };
    let program = &*program;
    for (how, line) in [
        ("for-all-threads", "SECCOMP_FILTER_FLAG_TSYNC"),
        ("first-for-all-threads", "SECCOMP_FILTER_FLAG_TSYNC"),
        ("first-strict", "without its sandbox"),
    ] {
        for mode in modes() {
            let ended = output(&mut command(mode, &[program, how]));
            let all = said(&ended);
            assert!(ended.status.success(), "{how} {mode:?}: {all}");
            assert!(text(&ended.stdout).starts_with("errno 1\n"), "{how}: {all}");
            assert_eq!(all.matches(line).count(), 1, "{how} {mode:?}: {all}");
        }
    }
}

#[test]
fn remote_memory_has_no_name() {
    let Some((_folder, program)) = confined() else {
        return;
    };
    let program = &*program;
    for mode in modes() {
        let ended = output(&mut command(mode, &[program, "named"]));
        let out = text(&ended.stdout);
        assert_eq!(out, "confined\ndone\n", "{mode:?}: {}", said(&ended));
    }
}

#[test]
fn filters_that_kill_a_thread_end_the_program() {
    let Some((_folder, program)) = confined() else {
        return;
    };
    let program = &*program;
    for how in [&["one-deadly"][..], &["one-deadly", "by-number"]] {
        let plain = output(Command::new(program).args(how));
        assert_eq!(plain.status.signal(), Some(libc::SIGSYS));
        for mode in modes() {
            let ended = output(&mut command(mode, &[&[program], how].concat()));
            let status = Some(128 + libc::SIGSYS);
            assert_eq!(ended.status.code(), status, "{mode:?}: {}", said(&ended));
        }
    }
}

#[test]
fn programs_with_a_sanitizer_are_refused() {
    let test = "programs_with_a_sanitizer_are_refused";
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (option, refusal) in [
        ("-fsanitize=address", Some("AddressSanitizer")),
        ("-fsanitize=thread", Some("ThreadSanitizer")),
        ("-fsanitize=leak", Some("LeakSanitizer")),
        ("-fsanitize=undefined", None),
    ] {
        let Some(program) = compile(folder.path(), "debugged", &[option]) else {
            eprintln!("SKIPPED: {test}: the compiler has no {option}");
            continue;
        };
        let ended = output(&mut command(&[], &[program.to_str().unwrap()]));
        let why = text(&ended.stderr);
        match refusal {
            Some(name) => {
                assert_eq!(ended.status.code(), Some(125), "{option}: {why}");
                assert!(
                    why.contains(name) && why.contains(option),
                    "{option}: {why}"
                );
            }
            None => assert!(ended.status.success(), "{option}: {}", said(&ended)),
        }
    }
}

/// Runs the program `objects` in all modes, with options of `farpage run`. Calls `check` with its
/// standard error.
fn check_objects(how: &str, options: &[&str], check: impl Fn(&str)) {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let compiled = ["-pthread", "-rdynamic", "-fno-builtin"];
    let program = compile(folder.path(), "objects", &compiled).expect("a C program");
    let program = program.to_str().expect("a plain path");
    for mode in modes() {
        let options = [options, *mode, &["--stats"]].concat();
        let mut farpage = command(&options, &[program, how]);
        // An option that jemalloc does not know ends a process, if jemalloc reads it.
        farpage.env("_RJEM_MALLOC_CONF", "abort_conf:true,no_such_option:true");
        let ended = output(&mut farpage);
        let all = said(&ended);
        assert_eq!(text(&ended.stdout), "done\n", "{how} {options:?}: {all}");
        assert!(ended.status.success(), "{how} {options:?}: {all}");
        assert!(!all.contains("jemalloc"), "{how} {options:?}: {all}");
        check(&text(&ended.stderr));
    }
}

#[test]
fn small_blocks_are_aligned_as_those_of_the_c_library() {
    check_objects("aligned", &["--small", "yes"], |_| {});
}

#[test]
fn small_objects_of_threads_that_ended_count() {
    check_objects("ended", &["--small", "auto"], |stats| {
        assert!(stats.contains("small objects are in the arena"), "{stats}");
    });
}

#[test]
fn small_objects_come_to_the_arena_on_small_stacks() {
    check_objects("narrow", &["--small", "yes"], |_| {});
}

#[test]
fn small_objects_come_to_the_arena_of_a_confined_program() {
    if cfg!(target_arch = "x86_64") {
        check_objects("confined", &["--small", "auto"], |_| {});
    }
}

#[test]
fn library_behind_ours_finds_what_it_frees_with_and_what_it_stands_before() {
    if !cfg!(target_arch = "x86_64") || !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["-shared", "-fPIC", "-pthread", "-DLIBRARY"];
    let library = compile(folder.path(), "finds", &options).expect("a C library");
    std::fs::rename(library, folder.path().join("libfinds.so")).expect("it is renamed");
    let at = folder.path().display();
    let (search, path) = (format!("-L{at}"), format!("-Wl,-rpath,{at}"));
    let options = ["-pthread", "-Wl,--no-as-needed", &search, "-lfinds", &path];
    let program = compile(folder.path(), "finds", &options).expect("a C program");
    for mode in modes() {
        for small in ["auto", "yes"] {
            let options = [&["--small", small], *mode].concat();
            let ended = output(&mut command(&options, &[program.to_str().unwrap()]));
            let all = said(&ended);
            assert_eq!(text(&ended.stdout), "called\n", "{options:?}: {all}");
            assert!(ended.status.success(), "{options:?}: {all}");
        }
    }
}

/// Runs programs that define a function of the allocator alone, at random addresses and at fixed
/// ones. A line says what stays local where blocks of ours would reach the C library.
#[test]
fn program_with_a_part_of_an_allocator_runs() {
    if !can_run(&[GCC]) {
        return;
    }
    for (part, is_named) in [("FREE", true), ("REALLOC", true), ("MALLOC", false)] {
        for place in ["-pie", "-no-pie"] {
            let folder = tempfile::tempdir().expect("a folder");
            let define = format!("-D{part}");
            let options = ["-O0", "-fno-builtin", "-fPIC", place, &define];
            let program = compile(folder.path(), "alone", &options).expect("a C program");
            let path = program.to_str().unwrap();
            let plain = output(&mut Command::new(path));
            assert!(plain.status.success());
            for mode in modes() {
                for small in ["auto", "yes"] {
                    let options = [&["--small", small], *mode].concat();
                    let ended = output(&mut command(&options, &[path]));
                    let all = format!("{part} {place} {options:?}: {}", said(&ended));
                    assert_eq!(text(&ended.stdout), text(&plain.stdout), "{all}");
                    assert!(ended.status.success(), "{all}");
                    assert_eq!(
                        all.contains("by malloc and its kind stays local"),
                        is_named,
                        "{all}"
                    );
                }
            }
        }
    }
}

#[test]
fn debugger_reads_memory_that_it_brings_in() {
    let test = "debugger_reads_memory_that_it_brings_in";
    if !can_run(&[GCC, GDB]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "debugged", &[]).unwrap();
    let program = program.to_str().unwrap();
    for mode in modes() {
        let mut farpage = command(mode, &[program]);
        farpage.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut farpage = farpage.spawn().unwrap();
        // The program prints its number when it is set up.
        let mut number = String::new();
        let mut out = BufReader::new(farpage.stdout.take().unwrap());
        out.read_line(&mut number).unwrap();
        let mut gdb = Command::new(GDB);
        gdb.args(["-nx", "-batch", "-p", number.trim()]);
        for line in [
            "handle SIGBUS SIGSYS nostop noprint pass",
            "call (void)farpage_bring_in(&numbers[5], sizeof numbers[5])",
            "print numbers[5]",
            "call (void)farpage_bring_in(&numbers[4194303], sizeof numbers[0])",
            "print numbers[4194303]",
        ] {
            gdb.args(["-ex", line]);
        }
        let read = output(&mut gdb);
        drop(farpage.stdin.take());
        assert!(farpage.wait().unwrap().success());
        let read = said(&read);
        if read.contains("Operation not permitted") {
            eprintln!("SKIPPED: {test}: this system lets no debugger attach");
            return;
        }
        assert!(read.contains("= 5\n"), "{mode:?}: {read}");
        assert!(read.contains("= 4194303\n"), "{mode:?}: {read}");
    }
}
