//! Shared parts of the tests of `farpage run`: running programs with it and without.

#![allow(dead_code, reason = "not every test uses all of it")]
#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

pub(crate) const MIB: u64 = 1 << 20;

/// Runs a command to its end, within a time limit.
pub(crate) fn output(command: &mut Command) -> Output {
    let child = command
        .env("LC_ALL", "C")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    let waiter = thread::spawn(move || child.wait_with_output().unwrap());
    let since = Instant::now();
    while !waiter.is_finished() {
        if since.elapsed() > Duration::from_secs(120) {
            // SAFETY: our own child, which has not been waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("{command:?} has not ended in time");
        }
        thread::sleep(Duration::from_millis(1));
    }
    waiter.join().unwrap()
}

pub(crate) fn farpage(options: &[&str], command: &[&str]) -> Output {
    farpage_in_pages_of("16KiB", options, command)
}

pub(crate) fn farpage_in_pages_of(page: &str, options: &[&str], command: &[&str]) -> Output {
    let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
    farpage.env("FARPAGE_PAGE_SIZE", page);
    farpage.arg("run").args(options).arg("--").args(command);
    output(&mut farpage)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// True if all of `programs` exist. If not, says that `test` is skipped.
pub(crate) fn can_run(test: &str, programs: &[&str]) -> bool {
    if let Some(missing) = programs.iter().find(|path| !Path::new(path).exists()) {
        eprintln!("SKIPPED: {test}: there is no {missing}");
        return false;
    }
    let tried = farpage(&["--budget", "16MiB"], &["/bin/true"]);
    let why = text(&tried.stderr);
    if tried.status.code() == Some(125) && why.contains("userfaultfd") {
        eprintln!(
            "SKIPPED: {test}: {}",
            why.lines().next().unwrap_or_default()
        );
        return false;
    }
    assert!(tried.status.success(), "{why}");
    true
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
