//! Shared parts of the tests of `farpage run`: running programs with it and without.

#![allow(dead_code, reason = "not every test uses all of it")]
#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use farpage_testkit::{finish, mix, test_name, text};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GCC: &str = "/usr/bin/gcc";

/// Returns the options of the fault modes: `--in-thread` exists for one architecture only.
pub(crate) fn modes() -> &'static [&'static [&'static str]] {
    const MODES: [&[&str]; 2] = [&["--fillers"], &["--in-thread"]];
    match cfg!(target_arch = "x86_64") {
        true => &MODES,
        false => &MODES[..1],
    }
}

/// Compiles `tests/{name}.c` into `folder`, with more options. The error is what the compiler says.
pub(crate) fn compile(folder: &Path, name: &str, options: &[&str]) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
    let made = folder.join(source.file_stem().unwrap());
    let mut gcc = Command::new(GCC);
    gcc.args(["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]);
    let ended = output(gcc.args(options).arg("-o").arg(&made).arg(source));
    match ended.status.success() {
        true => Ok(made),
        false => Err(text(&ended.stderr)),
    }
}

/// Runs a command to its end, within a time limit.
pub(crate) fn output(command: &mut Command) -> Output {
    command
        .env("LC_ALL", "C")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    finish(command, Duration::from_secs(120))
}

/// Option for programs so small that their memory would stay ordinary.
pub(crate) const AT_ONCE: &str = "--at-once";

/// Runs a program whose memory is under paging from the beginning.
pub(crate) fn farpage(options: &[&str], command: &[&str]) -> Output {
    farpage_in_pages_of("16KiB", options, command)
}

/// Runs a program as [`farpage`] does, in pages of another size.
pub(crate) fn farpage_in_pages_of(page: &str, options: &[&str], command: &[&str]) -> Output {
    farpage_as(page, &[options, &[AT_ONCE]].concat(), command)
}

/// Runs a program with these options alone.
pub(crate) fn farpage_as(page: &str, options: &[&str], command: &[&str]) -> Output {
    let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
    farpage.env("FARPAGE_PAGE_SIZE", page);
    farpage.arg("run").args(options).arg("--").args(command);
    output(&mut farpage)
}

/// True if all of `programs` exist. If not, says that the test is skipped.
pub(crate) fn can_run(programs: &[&str]) -> bool {
    can_run_with(&[], &["userfaultfd"], programs)
}

/// True if all of `programs` exist, and programs run with `options`. If `farpage run` refuses with
/// one of the words of `lacks`, or a program is missing, says that the test is skipped.
pub(crate) fn can_run_with(options: &[&str], lacks: &[&str], programs: &[&str]) -> bool {
    let test = test_name();
    if let Some(missing) = programs.iter().find(|path| !Path::new(path).exists()) {
        eprintln!("SKIPPED: {test}: there is no {missing}");
        return false;
    }
    let options = [options, &["--budget", "16MiB"]].concat();
    let tried = farpage(&options, &["/bin/true"]);
    let why = text(&tried.stderr);
    if tried.status.code() == Some(125) && lacks.iter().any(|lack| why.contains(lack)) {
        eprintln!(
            "SKIPPED: {test}: {}",
            why.lines().next().unwrap_or_default()
        );
        return false;
    }
    assert!(tried.status.success(), "{why}");
    true
}

/// Makes lines that look random.
pub(crate) fn lines(count: u64) -> String {
    let line = |at: u64| format!("{:016x} line {at}\n", mix(at + 1));
    (0..count).map(line).collect()
}

/// Writes a file of `count` such lines, in a folder that is removed at the end.
pub(crate) fn file_of_lines(count: u64) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines");
    fs::write(&path, lines(count)).unwrap();
    (folder, path.to_str().unwrap().to_owned())
}

/// Asserts that `ours` has the output of a plain run. Returns and prints its `--stats`.
pub(crate) fn same_as_plain(command: &[&str], plain: &Output, ours: &Output) -> String {
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    let stats = text(&ours.stderr);
    let (status, is_same) = (ours.status, plain.stdout == ours.stdout);
    assert!(status.success(), "{command:?}: {status} {stats}");
    assert!(!plain.stdout.is_empty());
    assert!(is_same, "{command:?}: the outputs differ");
    println!("{command:?}: {stats}");
    stats
}

/// Returns the bytes that stand before the text `before` in `--stats`.
pub(crate) fn said(stats: &str, before: &str) -> u64 {
    let at = stats
        .find(before)
        .unwrap_or_else(|| panic!("no `{before}` in {stats}"));
    let mut words = stats[..at].split_whitespace().rev();
    let (unit, number) = (words.next().unwrap(), words.next().unwrap());
    let size: bytesize::ByteSize = format!("{number} {unit}").parse().unwrap();
    size.as_u64()
}
