//! Programs whose memory is ordinary until more is allocated than the budget.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::process::Command;

use common::{GCC, MIB, can_run, compile, farpage_as, modes, output, said, same_as_plain};
use farpage_testkit::text;

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
        assert_eq!(said(&stats, " that were allocated at once"), 28 * MIB);
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
fn memory_that_is_locked_or_mapped_over_comes_under_paging() {
    for case in ["locks", "maps-over"] {
        stats_of(case, "32MiB")
            .iter()
            .for_each(|stats| came_under_paging(stats));
    }
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
