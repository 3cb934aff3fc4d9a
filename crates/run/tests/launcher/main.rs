//! Programs that are started by others, and the launcher itself: who is interposed, who is not and
//! what is said of it, and what becomes of signals.
//!
//! The rule it keeps: whether a program was interposed is what `--stats` says of its memory.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

#[path = "../common/mod.rs"]
mod common;
mod signals;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use common::{MIB, can_run, farpage, output, said, text};

const PYTHON: &str = "/usr/bin/python3";

/// Asks for 40 MiB, and prints what it finds there.
const JOB: &str = "held = bytearray(40 << 20); held[::4096] = b'1' * 10240; print(sum(held))";

const LIBRARY: &str = "libfarpage_preload.so";

/// The library's file, where cargo leaves it.
fn library() -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_farpage"));
    let mut beside = ["deps", "."].map(|place| binary.with_file_name(place).join(LIBRARY));
    beside.sort_by_key(|path| !path.is_file());
    beside[0].clone()
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

/// All that copies a process, by the C library.
#[test]
fn process_with_remote_memory_is_not_copied_by_any_function() {
    let test = "process_with_remote_memory_is_not_copied_by_any_function";
    if !can_run(test, &[PYTHON]) {
        return;
    }
    let script = "
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
stack = (ctypes.c_char * 65536)()
held = bytearray(4 << 20)
def refused(call):
    ctypes.set_errno(0)
    child = call()
    if child == 0: os._exit(0)
    print(child, ctypes.get_errno())
end = ctypes.cast(ctypes.addressof(stack) + 65536, ctypes.c_void_p)
refused(c.fork); refused(c._Fork); refused(c.__fork)
refused(lambda: c.daemon(1, 1))
refused(lambda: c.forkpty(ctypes.byref(ctypes.c_int()), None, None, None))
refused(lambda: c.clone(c._exit, end, 17, None))
";
    let ended = farpage(&["--budget", "16MiB"], &[PYTHON, "-c", script]);
    let why = text(&ended.stderr);
    assert_eq!(text(&ended.stdout), "-1 38\n".repeat(6), "{why}");
    assert_eq!(why.matches("fork is refused").count(), 6, "{why}");
}

/// Names that `LD_PRELOAD`, a shell or a socket's address would break.
#[test]
fn farpage_starts_from_any_path_with_any_folder_for_temporary_files() {
    let test = "farpage_starts_from_any_path_with_any_folder_for_temporary_files";
    if !can_run(test, &[PYTHON]) {
        return;
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_farpage"));
    let folder = tempfile::tempdir().unwrap();
    let run = |farpage: &Path, temporary: &str| {
        let mut run = Command::new(farpage);
        run.args([
            "run", "--budget", "16MiB", "--stats", "--", PYTHON, "-c", JOB,
        ]);
        run.env("FARPAGE_PAGE_SIZE", "16KiB")
            .env("TMPDIR", temporary);
        was_remote(&format!("{farpage:?} {temporary}"), &output(&mut run));
    };
    let long = folder.path().join("long".repeat(40));
    let odd = folder.path().join("a b:$LIB\u{e9}");
    for path in [&long, &odd] {
        fs::create_dir(path).unwrap();
    }
    for temporary in [
        &long,
        &odd,
        Path::new("/no/such"),
        Path::new(""),
        Path::new("here"),
    ] {
        run(binary, temporary.to_str().unwrap());
    }
    let installed = odd.join("farpage");
    fs::copy(binary, &installed).unwrap();
    fs::copy(library(), odd.join(LIBRARY)).unwrap();
    run(&installed, odd.to_str().unwrap());
}
