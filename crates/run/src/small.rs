//! `--small`: small requests go to jemalloc, which takes its memory by `mmap`, and so from the
//! arena.
//!
//! The rule it keeps: jemalloc comes from the system, as a shared library that is preloaded behind
//! farpage's. A system without it is told so, and the program does not run.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

/// Name by which the loader finds jemalloc.
const JEMALLOC: &str = "libjemalloc.so.2";

/// Allocator of requests below `--min-bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Small {
    /// Jemalloc, whose memory is remote.
    Yes,
    /// The program's own allocator: small objects are local.
    No,
}

/// Returns jemalloc's file, as the loader of this program finds it.
///
/// # Errors
/// No jemalloc, with the names of its packages.
pub(crate) fn jemalloc() -> Result<PathBuf> {
    let this = std::env::current_exe().context("cannot read /proc/self/exe")?;
    // The loader lists what it would load, and starts nothing.
    let traced = Command::new(this)
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .env("LD_PRELOAD", JEMALLOC)
        .stderr(Stdio::null())
        .output()
        .context("cannot ask the loader for jemalloc")?;
    let listed = String::from_utf8_lossy(&traced.stdout).into_owned();
    let words = listed.lines().filter(|line| line.contains(JEMALLOC));
    let mut paths = words.flat_map(str::split_whitespace);
    match paths.find(|word| word.starts_with('/')) {
        Some(path) => Ok(path.into()),
        None => bail!(
            "--small yes needs {JEMALLOC}, which the loader does not find: install it (Debian and Ubuntu: libjemalloc2; Fedora and Arch: jemalloc)"
        ),
    }
}
