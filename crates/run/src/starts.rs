//! Programs that were started and are not interposed yet, noted in the launcher's folder.
//!
//! The rule it keeps: a process that starts a program notes the start first, and the program's own
//! constructor takes the note away. A note that is left at the end belongs to a program that was
//! never interposed.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, absolute},
    process,
};

/// Prefix of a note's name, before the number of the process.
pub(crate) const PREFIX: &str = "start.";

/// Notes that this process is about to become the program at `path`.
pub(crate) fn note(folder: &Path, path: &Path) {
    write(folder, &process::id().to_string(), path);
}

/// Writes a note: a link, which no limit on the size of files forbids. A process that has changed
/// its user or its root cannot.
pub(crate) fn write(folder: &Path, name: &str, path: &Path) {
    let path = absolute(path).unwrap_or_else(|_| path.to_owned());
    let note = folder.join(format!("{PREFIX}{name}"));
    let _ = fs::remove_file(&note);
    let _ = symlink(path, note);
}
