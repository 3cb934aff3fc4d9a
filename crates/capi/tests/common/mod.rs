//! Shared parts of these tests: the libraries, installed once below the target directory, and
//! compilers for programs that use them.
//!
//! The rule it keeps: tests use the files that `cargo xtask install` gives to users.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    env,
    ffi::OsStr,
    fs, mem,
    path::{Path, PathBuf},
    process::Command,
    ptr,
    sync::LazyLock,
    time::Duration,
};

use farpage_memserver::RunningServer;
use farpage_testkit::{MIB, run, test_name, text};

/// Warnings are errors everywhere.
const STRICT: [&str; 5] = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];

/// Returns the folder in which the libraries are installed for this test program.
pub(crate) fn prefix() -> &'static Path {
    static PREFIX: LazyLock<PathBuf> = LazyLock::new(|| {
        let prefix = scratch("prefix");
        // Cargo has built them beside this program.
        let program = env::current_exe().expect("a test program has a path");
        let built = program.parent().expect("it lies in a folder");
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut install = Command::new(cargo);
        install
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["run", "--quiet", "--package", "xtask", "--", "install"])
            .arg("--prefix")
            .arg(&prefix)
            .arg("--built")
            .arg(built);
        run(&mut install, Duration::from_secs(300));
        prefix
    });
    &PREFIX
}

/// Returns a folder of this test program's own, emptied.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let program = env::current_exe().expect("a test program has a path");
    let mut own = program.file_name().expect("it is a file").to_owned();
    own.push(format!("-{name}"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(own);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("the target directory can be written");
    folder
}

/// Starts a memory server in this process.
pub(crate) fn serve(endpoint: &str) -> RunningServer {
    farpage_testkit::serve(&endpoint.parse().expect("an endpoint"), 256 * MIB)
}

/// Returns an options struct that is all zero but for its length.
pub(crate) fn blank<T: Copy>() -> T {
    // SAFETY: the option structs may be all zeros, and begin with their length.
    unsafe {
        let mut it: T = mem::zeroed();
        ptr::from_mut(&mut it)
            .cast::<usize>()
            .write(mem::size_of::<T>());
        it
    }
}

/// True if all programs can be found. If not, says that the test is skipped.
pub(crate) fn have(programs: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = |program: &&&str| env::split_paths(&path).any(|dir| dir.join(program).is_file());
    match programs.iter().find(|program| !found(program)) {
        None => true,
        Some(missing) => {
            let test = test_name();
            eprintln!("SKIPPED: {test}: no `{missing}`; `cargo xtask setup` installs it");
            false
        }
    }
}

/// Returns the output of pkg-config as words.
pub(crate) fn pkg_config(args: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command
        .env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"))
        .args(args);
    let output = run(&mut command, Duration::from_secs(10));
    text(&output.stdout)
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

/// Compiles and links one program with the flags of pkg-config for `package`.
pub(crate) fn compile(
    compiler: &str,
    more: &[&str],
    sources: &[PathBuf],
    package: &str,
    program: &Path,
) {
    let mut command = Command::new(compiler);
    command
        .args(STRICT)
        .args(more)
        .args(sources)
        .args(pkg_config(&["--cflags", "--libs", package]))
        .args(pkg_config(&["--libs", "farpage"]))
        .arg(format!("-Wl,-rpath,{}", prefix().join("lib").display()))
        .args(["-pthread", "-o"])
        .arg(program);
    run(&mut command, Duration::from_secs(120));
}

/// Returns the sources in a folder of this crate.
pub(crate) fn sources(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = fs::read_dir(folder).expect("the folder is there");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("it can be read").path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .collect();
    paths.sort();
    paths
}
