//! Children made by `fork` under `farpage run` that allocate by themselves: their memory is remote,
//! too, within the budget that they share with their parent.
//!
//! The rule it keeps: each test runs by fillers and in-thread, and a child allocates a multiple of
//! the budget.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{process::Command, time::Duration};

use common::{AT_ONCE, GCC, MIB, can_run, compile, farpage, farpage_as, modes, output};
use farpage_bench_limits::cgroup::{Cgroup, Parent, SwapUse};
use farpage_memserver::{RunningServer, Server};
use farpage_testkit::{tcp, test_name, text, wait_until};

const PYTHON: &str = "/usr/bin/python3";

/// Runs a case of `own.c` in both modes with `budget` and more `options`, under paging from the
/// beginning. The case must succeed, and `lines` be what farpage says.
fn run(case: &str, budget: &str, options: &[&str], lines: &[&str]) {
    run_in(
        modes(),
        case,
        &[&["--budget", budget, AT_ONCE], options].concat(),
        lines,
    );
}

/// Runs a case of `own.c` in some `modes`.
fn run_in(modes: &[&[&str]], case: &str, options: &[&str], lines: &[&str]) {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "children/own", &["-pthread"]).unwrap();
    for &mode in modes {
        let options = [options, mode].concat();
        let ours = farpage_as("16KiB", &options, &[program.to_str().unwrap(), case]);
        let (printed, said) = (text(&ours.stdout), text(&ours.stderr));
        assert_eq!(printed, "done\n", "{mode:?} {} {said}", ours.status);
        assert_eq!(said.lines().count(), lines.len(), "{mode:?} {said}");
        for line in lines {
            assert!(said.contains(line), "{mode:?} {said}");
        }
    }
}

#[test]
fn a_child_allocates_beside_what_it_has_inherited() {
    run("allocations", "8MiB", &[], &[]);
}

#[test]
fn a_child_of_a_parent_without_remote_memory_has_some() {
    run("alone", "8MiB", &[], &[]);
}

#[test]
fn grandchildren_use_what_threads_of_their_parent_look_at_during_the_fork() {
    run("among-lookers", "32MiB", &[], &[]);
}

#[test]
fn a_child_that_needs_little_leaves_its_parents_memory_where_it_is() {
    run("fits", "64MiB", &[], &[]);
}

/// Four arenas of that size have no room among the addresses of a process.
#[test]
fn a_program_starts_with_an_arena_that_leaves_no_addresses_for_all_children() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "print(len(bytearray(9 << 20)))";
    for &mode in modes() {
        let options = [&["--budget", "64MiB", "--capacity", "20TiB"], mode].concat();
        let ours = farpage_as("2MiB", &options, &[PYTHON, "-c", script]);
        assert_eq!(
            text(&ours.stdout),
            "9437184\n",
            "{mode:?} {}",
            text(&ours.stderr)
        );
    }
}

#[test]
fn calls_on_mappings_of_a_child_do_what_they_do_in_its_parent() {
    run("mappings", "8MiB", &[], &[]);
}

#[test]
fn children_of_children_have_arenas_of_their_own() {
    run("generations", "32MiB", &[], &[]);
}

#[test]
fn a_line_of_forks_allocates_locally_at_its_end_and_says_so() {
    run("more-generations", "32MiB", &[], &["the first 4 processes"]);
}

/// Each process needs 4 MiB of the budget.
#[test]
fn a_child_without_a_share_of_the_budget_allocates_locally_and_says_so() {
    run("generations", "8MiB", &[], &["too many programs share"]);
}

#[test]
fn a_child_that_has_closed_all_descriptors_allocates() {
    run("bare", "8MiB", &[], &[]);
}

#[test]
fn a_child_that_confines_itself_first_allocates_locally_and_says_so() {
    run("confined", "8MiB", &[], &["a filter of system calls"]);
}

#[test]
fn a_child_that_allocates_little_starts_no_thread() {
    run("little", "8MiB", &[], &[]);
}

#[test]
fn a_child_outlives_its_parent_with_what_it_has_allocated() {
    run("outlives", "8MiB", &[], &[]);
}

#[test]
fn children_allocate_whatever_threads_of_their_parent_do_at_the_fork() {
    run("among-threads", "8MiB", &[], &[]);
}

#[test]
fn a_child_by_a_call_without_handlers_allocates_locally_and_says_so() {
    run("raw", "8MiB", &[], &["runs no handlers of fork"]);
}

/// A server with leases that end by goodbyes alone, or `grace` after a connection has ended.
fn server(grace: Duration) -> RunningServer {
    Server::builder()
        .listen(tcp())
        .capacity(512 * MIB)
        .lease(FOR_EVER)
        .reconnect_grace(grace)
        .start()
        .unwrap()
}

/// Longer than a test.
const FOR_EVER: Duration = Duration::from_secs(600);

/// Twenty times a child's memory is far more than the server has.
#[test]
fn children_in_turn_leave_no_remote_memory_behind() {
    let server = server(FOR_EVER);
    let url = server.endpoints()[0].to_string();
    run("in-turn", "8MiB", &["--server", &url], &[]);
    wait_until("all memory is back", || server.stat().granted_bytes == 0);
}

#[test]
fn a_child_that_is_killed_leaves_its_share_and_no_remote_memory_behind() {
    let server = server(Duration::from_millis(100));
    let url = server.endpoints()[0].to_string();
    run("killed", "8MiB", &["--server", &url], &[]);
    wait_until("all memory is back", || server.stat().granted_bytes == 0);
}

#[test]
fn a_child_that_becomes_a_program_leaves_its_share_to_its_parent() {
    run("becomes", "8MiB", &[], &[]);
}

/// In-thread, addresses of children are reserved, and not refused.
#[test]
fn a_child_whose_arena_is_refused_leaves_its_share_to_its_parent() {
    let options = ["--budget", "8MiB", AT_ONCE];
    run_in(&modes()[..1], "refused", &options, &["allocates is local"]);
}

#[test]
fn threads_of_a_child_open_and_close_files_while_it_makes_its_arena() {
    run("among-openers", "8MiB", &[], &[]);
}

#[test]
fn memory_of_a_child_is_ordinary_while_it_fits() {
    run_in(modes(), "ordinary", &["--budget", "64MiB"], &[]);
}

#[test]
fn threads_of_a_child_start_late_where_no_limit_of_its_own_may_forbid_them() {
    run_in(modes(), "limited", &["--budget", "64MiB"], &[]);
}

/// Parent and child use 192 MiB each. Beside the budget, the cgroup has room for the launcher, for
/// what the two processes have without farpage, and for page tables.
#[test]
fn parent_and_child_keep_to_the_budget_in_a_cgroup_that_enforces_it() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "children/own", &["-pthread"]).unwrap();
    for &mode in modes() {
        let cgroup = Parent::find().and_then(|parent| {
            Cgroup::remove_leftovers(&parent)?;
            Cgroup::set_up(&parent, (32 + 48) * MIB, SwapUse::Never)
        });
        let cgroup = match cgroup {
            Ok(cgroup) => cgroup,
            Err(why) => return eprintln!("SKIPPED: {}: {why:#}", test_name()),
        };
        // Outside, as its memory is not the program's.
        let server = server(FOR_EVER);
        let url = server.endpoints()[0].to_string();
        let [shell, words @ ..] = cgroup.words();
        let mut ours = Command::new(shell);
        ours.args(words).arg(env!("CARGO_BIN_EXE_farpage"));
        ours.args(["run", "--budget", "32MiB", "--server", &url]);
        ours.args(mode).arg("--").arg(&program).arg("both");
        let ours = output(&mut ours);
        let (peak, kills) = cgroup.peak_and_kills().unwrap();
        let (printed, said) = (text(&ours.stdout), text(&ours.stderr));
        assert_eq!((printed.as_str(), kills), ("done\n", 0), "{mode:?} {said}");
        println!("{mode:?}: {} MiB at most", peak / MIB);
    }
}

/// Private memory of all processes together, at any moment: the budget, and what python has. The
/// parent has no remote memory at the fork, and some afterwards.
#[test]
fn a_pool_of_workers_keeps_to_the_budget_of_its_parent() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = r"
import multiprocessing, time
M = 1 << 20
def local(process='self'):
    with open(f'/proc/{process}/smaps_rollup') as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith('Pss_Anon'))
def work(seed):
    block = bytearray(96 * M)
    for round in range(4):
        for at in range(0, len(block), 4096): block[at] = (at // 4096 * 7 + seed + round) % 251
        for at in range(0, len(block), 4096):
            if block[at] != (at // 4096 * 7 + seed + round) % 251: return False
    return True
with multiprocessing.get_context('fork').Pool(3) as pool:
    block = bytearray(96 * M)
    processes = ['self'] + [worker.pid for worker in pool._pool]
    results = pool.map_async(work, range(3), 1)
    sums = []
    while not results.ready():
        sums.append(sum(local(process) for process in processes) // M)
        time.sleep(0.01)
    assert all(results.get())
print('done', max(sums))
";
    for &mode in modes() {
        let options = [&["--budget", "48MiB", "--min-bytes", "1MiB"], mode].concat();
        let ours = farpage(&options, &[PYTHON, "-c", script]);
        let (printed, said) = (text(&ours.stdout), text(&ours.stderr));
        assert!(ours.status.success(), "{mode:?} {printed} {said}");
        let most = printed.trim().strip_prefix("done ");
        let most: u64 = most.unwrap().parse().unwrap();
        // Each process has 10 MiB of its own at most. Processes are looked at one after another:
        // room that one has given up, and another has taken since, may count twice.
        assert!(most < 48 + 4 * 10 + 8, "{mode:?} {printed} {said}");
    }
}
