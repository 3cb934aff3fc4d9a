//! Lines at the end of a run about memory that was not remote.
//!
//! The rule it keeps: a program that was not interposed is named, with the reason.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs,
    mem::MaybeUninit,
    os::unix::{ffi::OsStrExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use bytesize::ByteSize;

use crate::{program::Program, starts};

/// Name of the page that all interposed processes share (`preload/family.rs`). Its first byte: a
/// process has made an arena. Its fourth: a child made by `fork` has got remote memory.
const FACTS: &str = "facts";
const FACTS_BYTES: usize = 4096;
/// Local memory beyond the budget that any program has.
const SMALL: ByteSize = ByteSize::mib(16);

/// Makes the page of facts, and notes that the program is not interposed yet.
pub(crate) fn begin(folder: &Path, program: &Path, command: &mut Command) -> Result<()> {
    fs::write(folder.join(FACTS), [0; FACTS_BYTES])
        .context("cannot write to the directory for sockets (see `df` and `ulimit -f`)")?;
    let (folder, program) = (folder.to_owned(), program.to_owned());
    let note = move || {
        starts::note(&folder, &program);
        Ok(())
    };
    // SAFETY: the C library leaves a child of `fork` an allocator that works.
    unsafe { command.pre_exec(note) };
    Ok(())
}

/// Names the programs that were not interposed, and says why. Without any, says if nothing was
/// remote while a program had more local memory than the budget.
pub(crate) fn say(folder: &Path, budget: ByteSize) {
    let left = left(folder);
    for path in &left {
        let refusal = Program::read(path)
            .ok()
            .and_then(|program| program.refusal());
        let why = refusal.unwrap_or_else(|| "its loader has not loaded farpage's library".into());
        eprintln!(
            "farpage: {} was not interposed, so that its memory was local: {why}",
            path.display()
        );
    }
    let has_arena = has_fact(folder, 0);
    let local = most_local_bytes();
    if left.is_empty() && !has_arena && local > budget + SMALL {
        eprintln!(
            "farpage: nothing was remote, and a program had {local} of local memory: its requests are smaller than --min-bytes (--small yes makes them remote), or another program started it (--children interposes those, too)",
        );
    }
}

/// Says that children made by `fork` have ended with the program, which a signal has ended.
pub(crate) fn say_of_children(folder: &Path) {
    if has_fact(folder, 3) {
        eprintln!(
            "farpage: a signal has ended the program: processes that it had made by fork, and that still needed its memory, have ended, too"
        );
    }
}

/// True if a process has noted the fact of this number.
fn has_fact(folder: &Path, fact: usize) -> bool {
    fs::read(folder.join(FACTS)).is_ok_and(|facts| facts.get(fact) == Some(&1))
}

/// Reads the paths of programs that were never interposed. Processes that live on are left out:
/// they may still be starting.
fn left(folder: &Path) -> BTreeSet<PathBuf> {
    let lives_on = |process: &OsStr| Path::new("/proc").join(process).exists();
    let note = |name: OsString| {
        let process = name.as_bytes().strip_prefix(starts::PREFIX.as_bytes())?;
        if lives_on(OsStr::from_bytes(process)) {
            return None;
        }
        fs::read_link(folder.join(&name)).ok()
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| note(entry.file_name()))
        .collect()
}

/// Returns the peak of local memory over all processes that have ended and were waited for.
fn most_local_bytes() -> ByteSize {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: there is room for the answer; all zeros is a valid one, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    ByteSize::kib(usage.ru_maxrss as u64)
}
