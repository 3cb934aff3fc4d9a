//! Programs with in-thread faults (`farpage run --in-thread`): system calls and signals of small C
//! programs, and whole programs of this machine.
//!
//! The rule it keeps: each C program checks itself, and first succeeds without farpage.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

#[path = "../common/mod.rs"]
mod common;

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, Output},
    thread,
    time::Duration,
};

use common::{GCC, can_run_with, file_of_lines, same_as_plain};
use farpage_testkit::{finish, serve_tcp, test_name, text};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(150);

/// Runs a command to its end, within a time limit.
fn output(command: &mut Command) -> Output {
    command.env("LC_ALL", "C").env_remove("FARPAGE_FAULT_MODE");
    finish(command, LIMIT)
}

fn farpage(options: &[&str], command: &[&str]) -> Command {
    let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
    farpage
        .args(["run", "--at-once"])
        .args(options)
        .arg("--")
        .args(command);
    farpage
}

/// True if the test can run here. If not, says that the test is skipped.
fn can_run(programs: &[&str]) -> bool {
    if !cfg!(target_arch = "x86_64") {
        let test = test_name();
        eprintln!("SKIPPED: {test}: --in-thread works on x86-64 alone");
        return false;
    }
    can_run_with(&["--in-thread"], &["userfaultfd", "seccomp"], programs)
}

const SORT: &str = "/usr/bin/sort";
const XZ: &str = "/usr/bin/xz";
const PYTHON: &str = "/usr/bin/python3";

/// A C program of this folder, compiled.
struct Compiled {
    path: PathBuf,
    _folder: TempDir,
}

impl Compiled {
    /// Compiles a program. `None` if this machine cannot run it.
    fn new(name: &str) -> Option<Compiled> {
        if !can_run(&[GCC]) {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = common::compile(folder.path(), &format!("in_thread/{name}"), &["-pthread"]);
        let path = path.unwrap();
        Some(Compiled {
            path,
            _folder: folder,
        })
    }

    fn run(&self, options: Option<&[&str]>, which: &str) -> Output {
        let path = self.path.to_str().unwrap();
        match options {
            None => output(Command::new(path).arg(which)),
            Some(options) => {
                output(farpage(options, &[path, which]).env("FARPAGE_PAGE_SIZE", "4KiB"))
            }
        }
    }

    /// Runs a case without farpage, or under it in a mode.
    fn run_in(&self, mode: Option<&str>, which: &str) -> Output {
        let options = mode.map(|mode| [mode, "--budget", "1MiB", "--capacity", "256MiB"]);
        self.run(options.as_ref().map(|it| &it[..]), which)
    }

    /// Runs a case without farpage, in-thread, and with filler threads.
    fn check(&self, which: &str) {
        for mode in [None, Some("--in-thread"), Some("--fillers")] {
            let ended = self.run_in(mode, which);
            let said = format!("{}{}", text(&ended.stdout), text(&ended.stderr));
            let status = ended.status;
            assert!(status.success(), "{which}, {mode:?}: {status:?} {said}");
            assert_eq!(text(&ended.stdout), "done\n", "{which}, {mode:?}: {said}");
        }
    }
}

macro_rules! cases {
    ($($test:ident = $program:literal $which:literal;)+) => {
        $(
            #[test]
            fn $test() {
                if let Some(program) = Compiled::new($program) {
                    program.check($which);
                }
            }
        )+
    };
}

cases! {
    streams_of_the_c_library_fill_remote_memory = "calls" "stdio";
    pipes_and_sockets_lose_nothing = "calls" "streams";
    datagrams_are_received_whole = "calls" "datagrams";
    ten_remote_buffers_are_read_at_once = "calls" "vectors";
    locks_in_remote_memory_work = "calls" "locks";
    paths_and_answers_may_be_remote = "calls" "paths";
    raw_system_calls_find_remote_memory = "calls" "raw";
    children_are_started_with_the_filter = "calls" "children";
    what_lies_in_a_pipe_stays_what_was_put_in = "zero_copy" "pipes";
    sends_without_copying_send_what_was_there = "zero_copy" "sends";
    programs_that_close_all_descriptors_go_on = "descriptors" "close";
    programs_that_close_a_range_of_descriptors_go_on = "descriptors" "close_range";
    programs_that_close_from_a_descriptor_on_go_on = "descriptors" "closefrom";
    programs_with_thousands_of_descriptors_close_them = "descriptors" "many";
    programs_that_replace_descriptors_keep_their_files = "descriptors" "replace";
    allocator_with_remote_state_is_called_by_the_program_alone = "foreign" "";
    a_handler_of_sigsegv_mends_what_it_guards = "signals" "guard";
    a_handler_of_sigbus_gets_what_is_not_ours = "signals" "sigbus";
    actions_and_masks_are_what_the_program_set = "signals" "believed";
    old_calls_change_no_signal_of_the_runtime = "signals" "old";
    threads_that_hold_all_signals_back_go_on = "signals" "blocked";
    handlers_that_hold_all_signals_back_touch_remote_memory = "signals" "handlers";
    waits_with_all_signals_held_back_go_on = "signals" "waits";
    coroutines_on_remote_stacks_go_on = "stacks" "coroutines";
    remote_stacks_for_signals_are_used = "stacks" "signals";
    threads_leave_no_stack_behind = "stacks" "threads";
    threads_run_though_their_given_stacks_are_remote = "stacks" "given";
    children_that_share_memory_run_on_remote_stacks = "stacks" "shared";
    a_handler_leaves_by_longjmp_again_and_again = "signals" "longjmp";
    a_signal_at_each_instruction_finds_remote_memory = "steps" "each";
    a_storm_of_signals_finds_remote_memory = "steps" "storm";
    a_collector_stops_the_world_and_needs_memory = "steps" "collector";
    absent_arguments_reach_a_program_by_exec = "exec" "fork";
    absent_arguments_reach_a_program_by_exec_after_vfork = "exec" "vfork";
    absent_arguments_reach_a_program_by_posix_spawn = "exec" "spawn";
    absent_lines_reach_a_shell = "exec" "system";
}

/// Compares results of calls whose arguments lead to absent memory, small and large, with those of
/// a plain run.
#[test]
fn calls_find_what_their_structures_lead_to() {
    let Some(program) = Compiled::new("leads") else {
        return;
    };
    let path = program.path.to_str().unwrap();
    let cases = [
        "interfaces",
        "filters",
        "processes",
        "confined",
        "programs",
        "keys",
        "words",
        "queues",
        "files",
        "lists",
        "guarded",
        "locked",
    ];
    let cases = cases
        .iter()
        .flat_map(|case| [(case, "small"), (case, "large")]);
    for (case, size) in cases {
        let command = [path, case, size];
        let plain = output(Command::new(path).args([case, size]));
        let said = text(&plain.stderr);
        assert!(plain.status.success(), "{case} {size}: {said}");
        for mode in ["--in-thread", "--fillers"] {
            let options = [mode, "--budget", "1MiB", "--capacity", "256MiB"];
            let options = [&options[..], &["--small", "yes"]].concat();
            let mut ours = farpage(&options, &command);
            let ours = output(ours.env("FARPAGE_PAGE_SIZE", "4KiB"));
            let said = text(&ours.stderr);
            assert_eq!(
                text(&ours.stdout),
                text(&plain.stdout),
                "{case} {size} {mode}: {said}"
            );
            assert!(ours.status.success(), "{case} {size} {mode}: {said}");
        }
    }
}

/// Checks that rings send what was there, with filler threads. In-thread a line refuses them.
#[test]
fn io_uring_sends_what_was_there_or_is_refused() {
    let Some(program) = Compiled::new("zero_copy") else {
        return;
    };
    let modes = [None, Some("--fillers"), Some("--in-thread")];
    for (mode, case) in modes
        .iter()
        .flat_map(|&mode| [(mode, "uring"), (mode, "uring-first")])
    {
        let ended = program.run_in(mode, case);
        let (out, err) = (text(&ended.stdout), text(&ended.stderr));
        let story = format!("{mode:?} {case}: {out}{err}");
        assert!(ended.status.success(), "{story}");
        assert!(out.ends_with("done\n"), "{story}");
        let skips = out.lines().find(|line| line.starts_with("SKIPPED"));
        if mode == Some("--in-thread") {
            assert_eq!(skips, Some("SKIPPED: there is no io_uring"), "{story}");
            assert!(err.contains("--fillers allows rings"), "{story}");
        } else if let Some(line) = skips {
            eprintln!("{line}");
        }
    }
}

/// A program that an interposed one started has its filter, too, and must not have its arena where
/// that filter looks. Here a filter looks at half of all places.
#[test]
fn arenas_lie_where_no_inherited_filter_looks() {
    let Some(calls) = Compiled::new("calls") else {
        return;
    };
    let path = calls.path.to_str().unwrap();
    // An arena that is placed without a check would meet the filter in every second round.
    for _ in 0..8 {
        let options = ["--in-thread", "--budget", "1MiB", "--capacity", "256MiB"];
        let inner = farpage(&options, &[path, "paths"]);
        let mut command = Command::new(path);
        command.arg("filter").arg(inner.get_program());
        command.args(inner.get_args());
        let ended = output(command.env("FARPAGE_PAGE_SIZE", "4KiB"));
        let said = format!("{}{}", text(&ended.stdout), text(&ended.stderr));
        assert_eq!(text(&ended.stdout), "done\n", "{:?} {said}", ended.status);
    }
}

/// The program ends with the status of a plain run.
#[test]
fn sigbus_that_nobody_handles_ends_the_program_as_ever() {
    let Some(signals) = Compiled::new("signals") else {
        return;
    };
    for which in ["die", "die-once", "die-sent"] {
        let plain = signals.run(None, which);
        assert_eq!(plain.status.signal(), Some(libc::SIGBUS), "{which}");
        for mode in [&["--in-thread"][..], &["--fillers"]] {
            let options = [mode, &["--budget", "1MiB"]].concat();
            let ended = signals.run(Some(&options), which);
            let (status, said) = (ended.status.code(), text(&ended.stderr));
            assert_eq!(status, Some(128 + libc::SIGBUS), "{which}: {said}");
        }
    }
}

/// Runs a case whose server ends when the program prints that it is ready.
fn with_lost_server(signals: &Compiled, mode: &[&str], which: &str) -> Output {
    let (server, url) = serve_tcp(64 << 20);
    let options = ["--budget", "1MiB", "--capacity", "16MiB", "--server", &url];
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let path = signals.path.to_str().unwrap();
    let command = [path, which, ready.to_str().unwrap()];
    let mut command = farpage(&[mode, &options].concat(), &command);
    command.env("FARPAGE_DEADLINE", "1");
    let program = thread::spawn(move || output(&mut command));
    while !ready.exists() && !program.is_finished() {
        thread::sleep(Duration::from_millis(1));
    }
    server.shutdown();
    fs::write(folder.path().join("ready.gone"), "").unwrap();
    program.join().unwrap()
}

/// Lost memory is reported before the program's own handler runs, or before the program ends.
#[test]
fn lost_memory_says_so_and_then_goes_to_the_programs_handler() {
    let Some(signals) = Compiled::new("signals") else {
        return;
    };
    for mode in [&["--in-thread"][..], &["--fillers"]] {
        for which in ["lost", "lost-handled"] {
            let ended = with_lost_server(&signals, mode, which);
            let said = text(&ended.stderr);
            assert!(said.contains("raises SIGBUS"), "{which} {mode:?}: {said}");
            if which == "lost" {
                let status = (ended.status.signal(), ended.status.code());
                assert!(
                    status == (Some(libc::SIGBUS), None) || status.1 == Some(128 + libc::SIGBUS),
                    "{which} {mode:?}: {status:?} {said}"
                );
            } else {
                assert_eq!(ended.status.code(), Some(42), "{which} {mode:?}: {said}");
                assert_eq!(text(&ended.stdout), "handled\n", "{mode:?}");
            }
        }
    }
}

/// A handler of SIGBUS that calls `exit` runs destructors, which unmap.
#[test]
fn giving_a_part_of_a_lost_page_back_holds_up_no_exit() {
    let Some(signals) = Compiled::new("signals") else {
        return;
    };
    for mode in [&["--in-thread"][..], &["--fillers"]] {
        let ended = with_lost_server(&signals, mode, "lost-in-part");
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(42), "{mode:?}: {said}");
        assert_eq!(text(&ended.stdout), "handled\n", "{mode:?}: {said}");
    }
}

/// Compares a program's output with a plain run's, if the program is here.
fn same(command: &[&str], budget: &str) {
    if !can_run(&command[..1]) {
        return;
    }
    let plain = output(Command::new(command[0]).args(&command[1..]));
    let options = ["--in-thread", "--budget", budget, "--stats"];
    let ours = output(farpage(&options, command).env("FARPAGE_PAGE_SIZE", "16KiB"));
    let stats = same_as_plain(command, &plain, &ours);
    let evictions = stats.contains(" left, ") && !stats.contains(" 0 left");
    assert!(evictions, "{stats}");
}

#[test]
fn sort_gives_the_same_bytes_in_thread() {
    let (_folder, input) = file_of_lines(150_000);
    same(&[SORT, "-S", "32M", "--parallel=2", &input], "3MiB");
}

#[test]
fn xz_gives_the_same_bytes_in_thread() {
    let (_folder, input) = file_of_lines(1500);
    same(&[XZ, "-9", "-T1", "-k", "-c", &input], "8MiB");
}

/// An interpreter's paths, buffers of files and arguments of programs are remote.
#[test]
fn python_gives_the_same_bytes_in_thread() {
    let script = "
import os, socket, subprocess, tempfile, threading, json
x = {i: str(i * 7919 % 1000003) for i in range(40000)}
b = bytearray(4 << 20)
for i in range(0, len(b), 1000): b[i] = i % 251
with tempfile.TemporaryDirectory() as d:
    for n in range(200):
        with open(os.path.join(d, 'file %d' % n), 'w') as f: f.write(x[n] * 1000)
    print(len(os.listdir(d)), sum(os.stat(os.path.join(d, f)).st_size for f in os.listdir(d)))
    with open(os.path.join(d, 'b'), 'wb') as f: f.write(b)
    c = bytearray(4 << 20)
    with open(os.path.join(d, 'b'), 'rb', buffering=0) as f: print(f.readinto(c), c == b)
r, w = socket.socketpair()
t = threading.Thread(target=w.sendall, args=(b,)); t.start()
got = b''.join(iter(lambda: r.recv(100000) if t.is_alive() or True else b'', b'')) if False else bytearray()
while len(got) < len(b): got += r.recv(300000)
t.join(); print(got == b)
print(subprocess.run(['/bin/echo', 'started', x[77]], stdout=subprocess.PIPE).stdout)
y = sorted(x.values(), key=lambda s: s[::-1])
print(sum(b), y[:5], y[-5:], len(json.dumps(x)))
";
    same(&[PYTHON, "-c", script], "4MiB");
}
