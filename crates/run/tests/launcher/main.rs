//! Programs that are started by others, and the launcher itself: interposed programs, other
//! programs and the lines about them, and signals.
//!
//! The rule it keeps: the memory in `--stats` shows whether a program was interposed.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

#[path = "../common/mod.rs"]
mod common;
mod signals;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use common::{MIB, can_run, farpage, output, said};
use farpage_testkit::text;
use tempfile::TempDir;

const PYTHON: &str = "/usr/bin/python3";
const BASH: &str = "/bin/bash";
const CC: &str = "/usr/bin/cc";

/// Script that allocates 40 MiB, and prints a sum of its contents.
const JOB: &str = "held = bytearray(40 << 20); held[::4096] = b'1' * 10240; print(sum(held))";

const LIBRARY: &str = "libfarpage_preload.so";

/// Returns the library's file, where cargo leaves it.
fn library() -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_farpage"));
    let mut beside = ["deps", "."].map(|place| binary.with_file_name(place).join(LIBRARY));
    beside.sort_by_key(|path| !path.is_file());
    beside[0].clone()
}

/// Makes a folder with a script in it that does [`JOB`], and whose first line is `#!` and `first`.
fn script(first: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = program(folder.path(), "job", &format!("#!{first}\n{JOB}\n"));
    (folder, path)
}

fn program(folder: &Path, name: &str, contents: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Compiles a C program of this folder.
fn compile(folder: &Path, source: &str, options: &[&str]) -> String {
    let program = folder.join(source.trim_end_matches(".c"));
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/launcher/");
    let mut cc = Command::new(CC);
    cc.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program);
    let made = output(cc.arg(format!("{sources}{source}")).args(options));
    assert!(made.status.success(), "{}", text(&made.stderr));
    program.display().to_string()
}

/// Asserts that [`JOB`] was done in remote memory.
fn was_remote(story: &str, ended: &Output) {
    let stats = text(&ended.stderr);
    assert!(ended.status.success(), "{story}: {stats}");
    assert_eq!(text(&ended.stdout), "501760\n", "{story}: {stats}");
    let remote = said(&stats, " in the arena");
    assert!(remote >= 40 * MIB, "{story}: {stats}");
    assert!(!stats.contains("not interposed"), "{story}: {stats}");
}

#[test]
fn program_stays_interposed_whatever_starts_it_in_its_place() {
    let tools = ["/usr/bin/env", "/usr/bin/nice", "/usr/bin/taskset"];
    if !can_run(&[&[PYTHON, BASH, CC][..], &tools].concat()) {
        return;
    }
    let (folder, script) = script("/usr/bin/env -S -i /usr/bin/python3");
    let become_it = compile(folder.path(), "become.c", &[]);
    let exec = format!("exec {script}");
    let job = [PYTHON, "-c", JOB, "3", "4", "5"];
    let starts: Vec<Vec<&str>> = [
        &[script.as_str()][..],
        &["/usr/bin/env", "-i", PYTHON, "-c", JOB],
        &["/usr/bin/env", "nice", "taskset", "1", PYTHON, "-c", JOB],
        &[BASH, "-c", &exec],
    ]
    .map(<[&str]>::to_vec)
    .into();
    let functions = [
        "execl", "execlp", "execle", "execv", "execvp", "execvpe", "execve", "fexecve", "execveat",
    ];
    let by_function =
        functions.map(|function| [&[become_it.as_str(), function], &job[..]].concat());
    for command in starts.into_iter().chain(by_function) {
        let ended = farpage(&["--budget", "16MiB", "--stats"], &command);
        was_remote(&format!("{command:?}"), &ended);
    }
    let command = [&[become_it.as_str(), "execle"], &job[..]].concat();
    let ended = farpage(&["--budget", "16MiB", "--stats", "--in-thread"], &command);
    was_remote("in-thread", &ended);
}

#[test]
fn program_that_was_not_interposed_is_named_with_the_reason() {
    let test = "program_that_was_not_interposed_is_named_with_the_reason";
    if !can_run(&["/usr/bin/env", PYTHON, CC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("seven.c");
    fs::write(&source, "int main(void) { return 7; }").unwrap();
    let fixed = folder.path().join("seven").display().to_string();
    let mut cc = Command::new(CC);
    let made = output(cc.args(["-static", "-o", &fixed]).arg(&source));
    if !made.status.success() {
        eprintln!("SKIPPED: {test}: there is no static C library");
        return;
    }
    let run = |options: &[&str], command: &[&str]| {
        let ended = farpage(&[&["--budget", "16MiB"], options].concat(), command);
        (ended.status.code().unwrap(), text(&ended.stderr))
    };
    let (status, why) = run(&[], &["/usr/bin/env", &fixed]);
    let line =
        format!("{fixed} was not interposed, so that its memory was local: it is statically");
    assert_eq!(status, 7);
    assert!(why.contains(&line), "{why}");
    // The program is refused by itself and as the interpreter of a script.
    let script = program(folder.path(), "script", &format!("#!{fixed}\n"));
    let (status, why) = run(&[], &[&script]);
    assert_eq!(status, 125);
    assert!(
        why.contains("is a script of") && why.contains("statically"),
        "{why}"
    );
    // A fact that only the loader knows.
    let installed = folder.path().join("farpage");
    fs::copy(env!("CARGO_BIN_EXE_farpage"), &installed).unwrap();
    fs::copy(library(), folder.path().join(LIBRARY)).unwrap();
    let remove = format!(
        "import os; os.remove({:?}); os.execv('/bin/true', ['true'])",
        folder.path().join(LIBRARY)
    );
    let mut run_installed = Command::new(installed);
    run_installed.args(["run", "--budget", "16MiB", "--", PYTHON, "-c", &remove]);
    let ended = output(&mut run_installed);
    let why = text(&ended.stderr);
    assert!(ended.status.success(), "{why}");
    assert!(
        why.contains("/bin/true was not interposed, so that its memory was local: its loader"),
        "{why}"
    );
    // With --children, programs that it starts are named besides, however often they start.
    let spawn = format!(
        "import os\nfor _ in range(3): os.waitpid(os.posix_spawn({fixed:?}, [{fixed:?}], {{}}), 0)"
    );
    let (status, why) = run(&["--children"], &[PYTHON, "-c", &spawn]);
    assert_eq!(status, 0, "{why}");
    assert_eq!(why.matches(&line).count(), 1, "{why}");
}

#[test]
fn children_of_a_shell_that_defines_unsetenv_are_not_interposed() {
    if !can_run(&[PYTHON, BASH]) {
        return;
    }
    let child = "/usr/bin/env; :";
    let mut run = Command::new(env!("CARGO_BIN_EXE_farpage"));
    run.args(["run", "--budget", "16MiB", "--", BASH, "-c", child]);
    let ended = output(run.env("LD_PRELOAD", "libc.so.6"));
    let seen = text(&ended.stdout);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert!(!seen.contains("FARPAGE_RUN_"), "{seen}");
    assert!(!seen.contains("FARPAGE_PAGE_SIZE"), "{seen}");
    assert!(!seen.contains("libfarpage"), "{seen}");
    assert!(seen.contains("LD_PRELOAD=libc.so.6"), "{seen}");
    // The memory of the children is reported, since it exceeds the budget.
    let child = format!("{PYTHON} -c \"{JOB}\"; :");
    let ended = farpage(&["--budget", "16MiB"], &[BASH, "-c", &child]);
    let why = text(&ended.stderr);
    assert!(why.contains("nothing was remote"), "{why}");
    assert!(why.contains("--children"), "{why}");
}

/// The child's standard error is closed before it allocates.
#[test]
fn daemon_without_remote_memory_says_that_its_memory_is_local() {
    if !can_run(&[PYTHON]) {
        return;
    }
    // Python's own allocations are local.
    let options = ["--budget", "16MiB", "--min-bytes", "2MiB"];
    let script = "import ctypes; ctypes.CDLL(None).daemon(0, 0); held = bytearray(8 << 20)";
    let ended = farpage(&options, &[PYTHON, "-c", script]);
    let why = text(&ended.stderr);
    assert!(why.contains("a child made by fork"), "{why}");
}

/// A budget that cannot be shared.
#[test]
fn children_of_a_small_budget_say_once_that_their_memory_is_local() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import os
for _ in range(3):
    child = os.fork()
    if child == 0: os._exit(bytearray(8 << 20)[5])
    print(os.waitpid(child, 0)[1])
";
    let options = ["--budget", "3MiB", "--min-bytes", "2MiB"];
    let ended = farpage(&options, &[PYTHON, "-c", script]);
    let (seen, why) = (text(&ended.stdout), text(&ended.stderr));
    assert_eq!(seen, "0\n0\n0\n", "{why}");
    assert_eq!(why.matches("too small to be shared").count(), 1, "{why}");
}

/// Six shells and one program share a budget. The program alone has remote memory, and so a share.
#[test]
fn shells_that_only_start_others_take_no_share() {
    if !can_run(&[PYTHON, "/bin/sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.py");
    fs::write(&job, JOB).unwrap();
    let line = (0..6).fold(format!("{PYTHON} {}", job.display()), |line, at| {
        let (name, line) = (format!("shell{at}"), format!("{line}; :\n"));
        let script = program(folder.path(), &name, &line);
        format!("/bin/sh {script}")
    });
    let options = ["--budget", "7MiB", "--capacity", "64MiB"];
    let options = [&options[..], &["--children", "--stats"]].concat();
    let ended = farpage(&options, &["/bin/sh", "-c", &format!("{line}; :")]);
    was_remote(&line, &ended);
}

/// Paths that `LD_PRELOAD`, a shell or a socket's address would break.
#[test]
fn farpage_starts_from_any_path_with_any_folder_for_temporary_files() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_farpage"));
    let folder = tempfile::tempdir().unwrap();
    let run = |farpage: &Path, temporary: &str| {
        let mut run = Command::new(farpage);
        run.args(["run", "--budget", "16MiB", "--stats", "--"]);
        run.args([PYTHON, "-c", JOB]).env("TMPDIR", temporary);
        run.env("FARPAGE_PAGE_SIZE", "16KiB");
        was_remote(&format!("{farpage:?} {temporary}"), &output(&mut run));
    };
    let long = folder.path().join("long".repeat(40));
    let odd = folder.path().join("a b:$LIB\u{e9}");
    for path in [&long, &odd] {
        fs::create_dir(path).unwrap();
    }
    let [long, odd_name] = [&long, &odd].map(|path| path.to_str().unwrap());
    for temporary in [long, odd_name, "/no/such", "", "here"] {
        run(binary, temporary);
    }
    let installed = odd.join("farpage");
    fs::copy(binary, &installed).unwrap();
    fs::copy(library(), odd.join(LIBRARY)).unwrap();
    run(&installed, odd.to_str().unwrap());
}

#[test]
fn limits_of_the_program_are_its_own_and_none_stops_farpage() {
    if !can_run(&[PYTHON, BASH]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let job = folder.path().join("job.py").display().to_string();
    fs::write(&job, JOB).unwrap();
    for limit in ["-S -n 48", "-S -f 0", "-u 60", "-l 0"] {
        let mut words = limit.rsplit(' ');
        let (shown, kind) = (words.next().unwrap(), words.next().unwrap());
        let line = format!(
            "ulimit {limit}; exec {} run --budget 16MiB --stats -- {BASH} -c 'ulimit {kind} >&2; exec {PYTHON} {job}' | cat",
            env!("CARGO_BIN_EXE_farpage")
        );
        let mut run = Command::new(BASH);
        run.args(["-o", "pipefail", "-c", &line]);
        let ended = output(run.env("FARPAGE_PAGE_SIZE", "16KiB"));
        was_remote(limit, &ended);
        let is_shown = text(&ended.stderr).lines().any(|line| line == shown);
        assert!(is_shown, "{limit}");
    }
}
