//! Requirements of farpage's build and use: a C compiler and libclang (the bindings of the
//! userfaultfd crate and of ZFP are generated from C headers), CMake and make (ZFP and jemalloc are
//! built with them), tools that build and test the libraries for C++, and the permission to handle
//! page faults.
//!
//! The rule it keeps: a requirement is found by looking for the thing itself, not for a package's
//! name, so that other distributions and hand-made installations count; nothing is installed
//! without root or a `sudo` that asks nothing.

use std::{
    env,
    fs::{self, OpenOptions},
    io, iter,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::children;

/// Installs missing requirements of the build and checks the permissions.
///
/// # Errors
/// Requirements that are missing and cannot be mended from here, with the line that does it.
pub(crate) fn prepare() -> Result<()> {
    install(&NEEDS, "the build")?;
    may_handle_faults()
}

/// Installs missing requirements of the build and those of its tests, in one go, and checks the
/// permissions.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn prepare_with<'a>(of_tests: impl IntoIterator<Item = &'a Need>) -> Result<()> {
    install(NEEDS.iter().chain(of_tests), "the build and its tests")?;
    may_handle_faults()
}

/// A requirement of this machine.
pub(crate) struct Need {
    what: &'static str,
    apt_package: &'static str,
    sign: Sign,
}

/// Sign that a requirement is met.
enum Sign {
    /// A program in the PATH.
    Program(&'static str),
    Other(fn() -> bool),
}

impl Need {
    pub(crate) const fn program(
        what: &'static str,
        apt_package: &'static str,
        program: &'static str,
    ) -> Need {
        let sign = Sign::Program(program);
        Need {
            what,
            apt_package,
            sign,
        }
    }

    pub(crate) const fn new(
        what: &'static str,
        apt_package: &'static str,
        is_there: fn() -> bool,
    ) -> Need {
        let sign = Sign::Other(is_there);
        Need {
            what,
            apt_package,
            sign,
        }
    }

    fn is_missing(&self) -> bool {
        !match self.sign {
            Sign::Program(program) => in_path(program),
            Sign::Other(is_there) => is_there(),
        }
    }
}

const NEEDS: [Need; 7] = [
    Need::program("a C compiler (`cc`)", "gcc", "cc"),
    Need::program(
        "a C++ compiler (`c++`), for libumap and its tests",
        "g++",
        "c++",
    ),
    Need::program(
        "CMake, for ZFP and for tests of the package",
        "cmake",
        "cmake",
    ),
    Need::program("make, for the same and for jemalloc", "make", "make"),
    Need::program(
        "pkg-config, for tests of the package",
        "pkg-config",
        "pkg-config",
    ),
    Need::new("the C library's headers", "libc6-dev", has_libc_headers),
    Need::new("libclang with its headers", "libclang-dev", has_libclang),
];

/// Installs the missing ones of `needs`. Prints to standard error.
///
/// # Errors
/// Requirements that are missing and cannot be installed from here, with the line that does it.
pub(crate) fn install<'a>(needs: impl IntoIterator<Item = &'a Need>, for_whom: &str) -> Result<()> {
    let mut missing: Vec<&Need> = needs.into_iter().collect();
    missing.retain(|need| need.is_missing());
    if missing.is_empty() {
        return Ok(());
    }
    let what: Vec<&str> = missing.iter().map(|need| need.what).collect();
    let what = what.join(", ");
    let packages: Vec<&str> = missing.iter().map(|need| need.apt_package).collect();
    if !in_path("apt-get") {
        bail!(
            "{for_whom} needs {what}.\nThis is not an apt system, so install that with your package manager \
             (Debian calls the packages: {}), then run this again.",
            packages.join(" ")
        );
    }
    let by_hand = format!(
        "sudo apt-get update && sudo apt-get install -y {}",
        packages.join(" ")
    );
    let Some(root) = as_root() else {
        bail!(
            "{for_whom} needs {what}.\nInstalling it takes root. Run this line, then try again:\n\n    {by_hand}\n"
        );
    };
    eprintln!(
        "{for_whom} needs {what}: installing {} with apt-get.",
        packages.join(" ")
    );
    let install = [&["install", "-y", "--no-install-recommends"], &packages[..]].concat();
    for step in [vec!["update"], install] {
        let apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"];
        let mut words = root.iter().copied().chain(apt).chain(step);
        let program = words.next().expect("the chain above is not empty");
        let status = children::status(Command::new(program).args(words).stdout(io::stderr()))?;
        if !status.success() {
            bail!(
                "apt-get failed ({status}). Run this line by hand to see why:\n\n    {by_hand}\n"
            );
        }
    }
    match missing.iter().find(|need| need.is_missing()) {
        None => Ok(()),
        Some(need) => bail!(
            "{} was installed, but {} is still not found",
            need.apt_package,
            need.what
        ),
    }
}

/// Returns the words that make a command run as root, if that is possible without a question.
fn as_root() -> Option<&'static [&'static str]> {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        return Some(&[]);
    }
    children::works("sudo", &["-n", "true"]).then_some(&["sudo", "-n"])
}

fn in_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

fn has_libc_headers() -> bool {
    has_header("stdio.h") && has_header("linux/userfaultfd.h") && has_header("asm/types.h")
}

/// True if a header is in a folder that compilers search.
pub(crate) fn has_header(header: &str) -> bool {
    let direct = Path::new("/usr/include").join(header);
    direct.is_file() || matches_of("/usr/include", &["*-linux-gnu", header]) > 0
}

/// True if a shared library is in a folder of the distribution. The last component of `path` may
/// have a `*`.
pub(crate) fn has_library(path: &str) -> bool {
    let parts = || path.split('/');
    ["*-linux-gnu", "."].iter().any(|dir| {
        let below: Vec<&str> = iter::once(*dir).chain(parts()).collect();
        matches_of("/usr/lib", &below) > 0
    }) || matches_of("/usr/lib64", &parts().collect::<Vec<_>>()) > 0
}

/// Searches as bindgen does. The library alone is not enough: it cannot find `stddef.h` without its
/// own headers.
fn has_libclang() -> bool {
    if env::var_os("LIBCLANG_PATH").is_some() {
        return true;
    }
    let library = matches_of("/usr/lib", &["llvm*", "lib", "libclang*.so*"])
        + matches_of("/usr/lib", &["*-linux-gnu", "libclang*.so*"])
        + matches_of("/usr", &["lib64", "libclang*.so*"])
        + matches_of("/usr", &["lib", "libclang*.so*"]);
    let headers = matches_of(
        "/usr/lib",
        &["llvm*", "lib", "clang", "*", "include", "stddef.h"],
    ) + matches_of("/usr", &["lib*", "clang", "*", "include", "stddef.h"]);
    library > 0 && headers > 0
}

/// Counts the paths below `dir` that match, one pattern per path component; a `*` stands for any
/// characters.
fn matches_of(dir: impl AsRef<Path>, patterns: &[&str]) -> usize {
    let Some((pattern, rest)) = patterns.split_first() else {
        return usize::from(dir.as_ref().exists());
    };
    if !pattern.contains('*') {
        return matches_of(dir.as_ref().join(pattern), rest);
    }
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| matches_pattern(&entry.file_name().to_string_lossy(), pattern))
        .map(|entry| matches_of(entry.path(), rest))
        .sum()
}

fn matches_pattern(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|name| {
            (0..=name.len()).any(|at| name.get(at..).is_some_and(|end| matches_pattern(end, tail)))
        }),
    }
}

/// Checks that this process may create a userfaultfd that also serves faults raised inside system
/// calls.
///
/// # Errors
/// The reason why it may not, with the line that mends it.
fn may_handle_faults() -> Result<()> {
    // SAFETY: creates a descriptor from a flag word; no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd >= 0 {
        // SAFETY: the descriptor was created above and is known to nobody else.
        unsafe { libc::close(fd as i32) };
        return Ok(());
    }
    let refusal = io::Error::last_os_error();
    if OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .is_ok()
    {
        return Ok(());
    }
    if refusal.raw_os_error() == Some(libc::ENOSYS) {
        bail!(
            "this kernel has no userfaultfd (CONFIG_USERFAULTFD): farpage needs Linux 5.10 or newer with it built in"
        );
    }
    bail!(
        "this user may not handle page faults (userfaultfd: {refusal}). One of these lines mends it:\n\n    \
         sudo sysctl -w vm.unprivileged_userfaultfd=1             # for everybody, until the next boot\n    \
         sudo setfacl -m u:$(id -un):rw /dev/userfaultfd          # for you alone, Linux 6.1 and newer\n\n\
         Inside a container the sandbox may be what refuses: start it with\n\n    \
         docker run --cap-add SYS_PTRACE --security-opt seccomp=unconfined ...\n"
    )
}

/// Checks that `need_mib` MiB of memory are free.
///
/// # Errors
/// The amount that is missing.
pub(crate) fn require_memory(need_mib: u64) -> Result<()> {
    let info = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available_kib = info
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        })
        .context("/proc/meminfo does not say how much memory is available")?;
    if available_kib / 1024 < need_mib {
        bail!(
            "this needs {need_mib} MiB of free memory, and {} MiB are available",
            available_kib / 1024
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_run_of_characters() {
        for (name, pattern, expected) in [
            ("libclang-14.so.1", "libclang*.so*", true),
            ("libclang.so", "libclang*.so*", true),
            ("libclang.a", "libclang*.so*", false),
            ("x86_64-linux-gnu", "*-linux-gnu", true),
            ("llvm-14", "llvm", false),
        ] {
            assert_eq!(
                matches_pattern(name, pattern),
                expected,
                "{name} against {pattern}"
            );
        }
    }
}
