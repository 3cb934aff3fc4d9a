//! Programs whose memory is ordinary until more is allocated than the budget.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::process::Command;

use common::{GCC, MIB, can_run, compile, farpage_as, modes, output, said, same_as_plain};
use farpage_testkit::text;

const PYTHON: &str = "/usr/bin/python3";

/// Runs a case of the C program plain and in all modes. Returns the lines of `--stats`.
fn stats_of(case: &str, budget: &str) -> Vec<String> {
    if !can_run(&[GCC]) {
        return Vec::new();
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "ordinary/cases", &["-pthread"]).unwrap();
    let command = [program.to_str().unwrap(), case];
    let plain = output(Command::new(command[0]).args(&command[1..]));
    let run = |mode: &&[&str]| {
        let fixed = ["--budget", budget, "--capacity", "256MiB", "--stats"];
        let ours = farpage_as("16KiB", &[&fixed, *mode].concat(), &command);
        same_as_plain(&command, &plain, &ours)
    };
    modes().iter().map(run).collect()
}

fn is_ordinary(stats: &str) -> bool {
    stats.contains("so that nothing became remote")
}

/// Asserts that memory came under paging, and that the budget held afterwards.
fn came_under_paging(stats: &str) {
    assert!(stats.contains("under paging from then on"), "{stats}");
    assert!(said(stats, " of it in local memory") <= 32 * MIB, "{stats}");
}

#[test]
fn program_that_fits_its_budget_has_ordinary_memory() {
    for stats in stats_of("fits", "32MiB") {
        assert!(is_ordinary(&stats), "{stats}");
        assert_eq!(said(&stats, " that were accessible at once"), 28 * MIB);
    }
}

#[test]
fn program_that_grows_beyond_its_budget_comes_under_paging_while_its_threads_run() {
    for stats in stats_of("grows", "32MiB") {
        came_under_paging(&stats);
        assert!(said(&stats, " written") > 0, "{stats}");
    }
}

#[test]
fn processes_that_are_forked_and_started_leave_memory_ordinary() {
    for stats in stats_of("starts", "32MiB") {
        assert!(is_ordinary(&stats), "{stats}");
    }
}

#[test]
fn child_reads_its_copy_while_its_parent_comes_under_paging() {
    stats_of("child", "32MiB")
        .iter()
        .for_each(|stats| came_under_paging(stats));
}

#[test]
fn memory_that_is_locked_comes_under_paging() {
    stats_of("locks", "32MiB")
        .iter()
        .for_each(|stats| came_under_paging(stats));
}

/// Files and shared memory at addresses of ordinary memory are the program's own.
#[test]
fn memory_that_is_mapped_over_is_ordinary_until_it_exceeds_the_budget() {
    for stats in stats_of("maps-over-and-fits", "32MiB") {
        assert!(is_ordinary(&stats), "{stats}");
        assert_eq!(said(&stats, " that were accessible at once"), 23 * MIB);
    }
    stats_of("maps-over-and-grows", "32MiB")
        .iter()
        .for_each(|stats| came_under_paging(stats));
}

/// Virtual machines reserve far more addresses than they use.
#[test]
fn addresses_without_access_take_nothing_of_the_budget() {
    for stats in stats_of("reserves-and-fits", "32MiB") {
        assert!(is_ordinary(&stats), "{stats}");
        assert_eq!(said(&stats, " that were accessible at once"), 28 * MIB);
    }
    stats_of("reserves-and-grows", "32MiB")
        .iter()
        .for_each(|stats| came_under_paging(stats));
    // Whatever the kernel refuses, for lack of mappings.
    stats_of("is-refused", "32MiB")
        .iter()
        .filter(|stats| !is_ordinary(stats))
        .for_each(|stats| came_under_paging(stats));
}

#[test]
fn memory_that_got_access_by_a_system_call_is_not_lost() {
    stats_of("gets-access-unseen", "32MiB")
        .iter()
        .for_each(|stats| came_under_paging(stats));
}

/// Programs that share a budget come under paging when they have more than their shares.
#[test]
fn programs_that_share_a_budget_keep_to_their_shares() {
    if !can_run(&[GCC, "/bin/sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "ordinary/cases", &["-pthread"]).unwrap();
    let program = program.to_str().unwrap();
    let script = format!("{program} grows & {program} fits & {program} grows & wait");
    for mode in modes() {
        let options = ["--budget", "32MiB", "--capacity", "256MiB", "--children"];
        let ended = farpage_as(
            "16KiB",
            &[&options, *mode].concat(),
            &["/bin/sh", "-c", &script],
        );
        let said = text(&ended.stdout);
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        assert_eq!(said.matches("all is right").count(), 3, "{said}");
    }
}

#[test]
fn coroutine_on_a_stack_of_malloc_puts_memory_under_paging() {
    for stats in stats_of("coroutine", "32MiB") {
        came_under_paging(&stats);
    }
}

/// Runs a program of Python's in all modes with a budget of 8 MiB. Returns what it has printed, and
/// its standard error.
fn printed_by(program: &str) -> Vec<(String, String)> {
    if !can_run(&[PYTHON]) {
        return Vec::new();
    }
    let run = |mode: &&[&str]| {
        let fixed = ["--budget", "8MiB", "--capacity", "256MiB"];
        let command = [PYTHON, "-c", program];
        let ended = farpage_as("16KiB", &[&fixed, *mode].concat(), &command);
        let (out, err) = (text(&ended.stdout), text(&ended.stderr));
        assert!(ended.status.success(), "{mode:?}: {out} {err}");
        (out, err)
    };
    modes().iter().map(run).collect()
}

#[test]
fn threads_of_the_runtime_start_when_memory_comes_under_paging() {
    let printed = printed_by(
        "
import os
threads = lambda: len(os.listdir('/proc/self/task'))
fits = bytearray(4 << 20)
before = threads()
grows = bytearray(32 << 20)
print(threads() - before >= 3)
",
    );
    for (out, err) in printed {
        assert_eq!(out, "True\n", "{err}");
    }
}

/// Gives up the rights by which root has more threads than a limit allows.
const AS_NOBODY: &str = "
import ctypes, os, resource, struct
fits = bytearray(4 << 20)
if os.getuid() == 0: os.setuid(65534)
NPROC = resource.RLIMIT_NPROC
_, most = resource.getrlimit(NPROC)
";

#[test]
fn program_that_limits_its_threads_comes_under_paging_later() {
    let limits = "
resource.setrlimit(NPROC, (1, most))
grows = bytearray(32 << 20)
print(grows.count(0) == len(grows))
";
    for (out, err) in printed_by(&format!("{AS_NOBODY}{limits}")) {
        assert_eq!(out, "True\n", "{err}");
    }
}

/// A limit that no function of the C library sets is not seen, and threads cannot start under it.
#[test]
fn memory_stays_within_the_budget_while_no_thread_can_start() {
    let limits = "
def limit(to):
    libc = ctypes.CDLL(None)
    assert libc.syscall(160, NPROC, struct.pack('QQ', to, most & (1 << 64) - 1)) == 0
limit(1)
try: print(bytearray(32 << 20))
except MemoryError: print('refused')
limit(most & (1 << 64) - 1)
grows = bytearray(32 << 20)
print(grows.count(0) == len(grows), fits.count(0) == len(fits))
";
    if !cfg!(target_arch = "x86_64") {
        eprintln!(
            "SKIPPED: memory_stays_within_the_budget_while_no_thread_can_start: the call has another number"
        );
        return;
    }
    for (out, err) in printed_by(&format!("{AS_NOBODY}{limits}")) {
        assert_eq!(out, "refused\nTrue True\n", "{err}");
        assert!(err.contains("no thread can be started"), "{err}");
    }
}
