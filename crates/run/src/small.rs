//! `--small`: small requests go to jemalloc, which takes its memory by `mmap`, and so from the
//! arena.
//!
//! The rule it keeps: jemalloc comes from the system, as a shared library that the preloaded
//! library loads (`preload/small.rs`). No process is started to find it.

use std::{
    env,
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::Read,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};
use bytesize::ByteSize;
use clap::ValueEnum;

use crate::elf::number;

/// Name by which the loader finds jemalloc.
const JEMALLOC: &str = "libjemalloc.so.2";
/// Packages that have it.
const PACKAGES: &str = "Debian and Ubuntu: libjemalloc2; Fedora and Arch: jemalloc";
/// The loader's list of libraries.
const CACHE: &str = "/etc/ld.so.cache";
/// Largest `--min-bytes` with jemalloc.
const MIN_BYTES_MAX: ByteSize = ByteSize::mib(2);

/// Variable that sets options of the C library before a program begins.
const TUNABLES: &str = "GLIBC_TUNABLES";
/// Option for jemalloc's 2632 bytes of variables of each thread. The C library keeps 512 bytes for
/// libraries that are loaded later; most of these stay free.
const ROOM: &str = "glibc.rtld.optional_static_tls";
const ROOM_BYTES: usize = 3584;

/// Option `--small`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Small {
    /// The program's own allocator first, and jemalloc once small objects pass a quarter of the
    /// budget.
    Auto,
    /// Jemalloc from the beginning.
    Yes,
    /// The program's own allocator: small objects are local.
    No,
}

/// Allocator of requests below `--min-bytes`.
pub(crate) enum SmallBy {
    /// Jemalloc, from the beginning or later.
    Jemalloc(PathBuf, Small),
    /// The program's own allocator, as asked for.
    Own,
    /// The program's own allocator, for this reason.
    OwnBecause(String),
}

impl Small {
    /// Returns the allocator of requests below `min_bytes`.
    ///
    /// # Errors
    /// `yes` on a system without jemalloc, or with larger requests than it serves.
    pub(crate) fn by(self, min_bytes: ByteSize) -> Result<SmallBy> {
        if self == Small::No {
            return Ok(SmallBy::Own);
        }
        if min_bytes > MIN_BYTES_MAX {
            if self == Small::Yes {
                bail!(
                    "--small yes goes with --min-bytes of {MIN_BYTES_MAX} at most: jemalloc asks for memory in pieces of that size"
                );
            }
            return Ok(SmallBy::OwnBecause(format!(
                "--min-bytes is more than {MIN_BYTES_MAX}"
            )));
        }
        if self == Small::Auto
            && let Some(why) = why_not_by_itself()
        {
            return Ok(SmallBy::OwnBecause(why));
        }
        match jemalloc() {
            Some(path) => Ok(SmallBy::Jemalloc(path, self)),
            None if self == Small::Yes => bail!(
                "--small yes needs {JEMALLOC}, which the loader does not find: install it ({PACKAGES})"
            ),
            None => Ok(SmallBy::OwnBecause(format!(
                "{JEMALLOC} is not installed ({PACKAGES})"
            ))),
        }
    }
}

impl SmallBy {
    /// Passes the choice to the preloaded library.
    pub(crate) fn pass(&self, command: &mut Command) {
        let mut set = |name: &str, value: &OsStr| {
            command.env(format!("FARPAGE_RUN_{name}"), value);
        };
        match self {
            SmallBy::Own => {}
            SmallBy::OwnBecause(why) => set("SMALL_LOCAL", why.as_ref()),
            SmallBy::Jemalloc(path, small) => {
                set("JEMALLOC", path.as_ref());
                if *small == Small::Yes {
                    set("SMALL_AT_ONCE", "1".as_ref());
                }
                let theirs = env::var(TUNABLES).unwrap_or_default();
                // A user who has set the option keeps it.
                if !theirs.contains(ROOM) {
                    let colon = if theirs.is_empty() { "" } else { ":" };
                    let room = format!("{ROOM}={ROOM_BYTES}");
                    set("TUNABLE", room.as_ref());
                    command.env(TUNABLES, format!("{theirs}{colon}{room}"));
                }
            }
        }
    }
}

/// Text about small objects for `--explain`.
impl fmt::Display for SmallBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SmallBy::Jemalloc(_, Small::Yes) => f.write_str("by jemalloc"),
            SmallBy::Jemalloc(..) => f.write_str(
                "by jemalloc, from when they pass a quarter of the budget; local before (--small no leaves all of them local)",
            ),
            SmallBy::Own => f.write_str(
                "which the budget does not count (--small auto and yes make them remote)",
            ),
            SmallBy::OwnBecause(why) => write!(f, "which the budget does not count: {why}"),
        }
    }
}

/// Returns the reason why jemalloc is not to begin by itself: options of the user's that are not
/// meant for every program.
fn why_not_by_itself() -> Option<String> {
    if env::var_os("MALLOC_CONF").is_some() || Path::new("/etc/malloc.conf").is_symlink() {
        return Some("MALLOC_CONF or /etc/malloc.conf sets options of jemalloc".to_owned());
    }
    let theirs = env::var(TUNABLES).unwrap_or_default();
    theirs
        .contains(ROOM)
        .then(|| format!("{TUNABLES} sets {ROOM}"))
}

/// Returns jemalloc's file, as the loader finds it: by `LD_LIBRARY_PATH`, or by its list.
fn jemalloc() -> Option<PathBuf> {
    let folders = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let by_path = env::split_paths(&folders)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(JEMALLOC));
    let list = fs::read(CACHE).unwrap_or_default();
    by_path.chain(listed(&list)).find(|path| is_loadable(path))
}

/// Returns the files of jemalloc in the loader's `list`, which has its strings between zeros.
fn listed(list: &[u8]) -> impl Iterator<Item = PathBuf> {
    let strings = list.split(|&byte| byte == 0);
    let paths = strings.map(|string| Path::new(OsStr::from_bytes(string)));
    paths
        .filter(|path| path.is_absolute() && path.ends_with(JEMALLOC))
        .map(Path::to_owned)
}

/// True if a file is a library for this program's processor.
fn is_loadable(path: &Path) -> bool {
    let kind = |path: &Path| {
        let mut head = [0; 20];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
        read.ok().map(|()| (head[4], number(&head[18..])))
    };
    let kind_of_path = kind(path);
    kind_of_path.is_some() && kind_of_path == kind(Path::new("/proc/self/exe"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jemalloc_is_found_in_the_list_of_the_loader_by_its_whole_name() {
        let list = b"glibc-ld.so.cache1.1\0libjemalloc.so.2\0/lib/libjemalloc.so.2\0\
            /lib/libjemalloc.so.20\0/lib/my-libjemalloc.so.2\0/usr/lib64/libjemalloc.so.2\0";
        let found: Vec<_> = listed(list).collect();
        let expected = ["/lib/libjemalloc.so.2", "/usr/lib64/libjemalloc.so.2"];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn file_that_is_no_library_of_this_processor_is_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let other = folder.path().join(JEMALLOC);
        // Of 32 bits.
        fs::write(&other, b"\x7fELF\x01 and more than twenty bytes").expect("written");
        assert!(!is_loadable(&other));
        assert!(!is_loadable(&folder.path().join("missing")));
        assert!(is_loadable(&env::current_exe().expect("this program")));
    }

    #[test]
    fn large_min_bytes_leave_small_objects_local_by_default_and_refuse_yes() {
        let by = Small::Auto.by(ByteSize::mib(3)).expect("no error");
        assert!(by.to_string().contains("--min-bytes"), "{by}");
        assert!(Small::Yes.by(ByteSize::mib(3)).is_err());
    }
}
