//! Shared parts of these tests: the libraries, installed once below the target directory, and
//! compilers for programs that use them.
//!
//! The rule it keeps: tests use the files that `cargo xtask install` gives to users.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use farpage_memserver::{RunningServer, Server};

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
    Server::builder()
        .listen(endpoint.parse().expect("an endpoint"))
        .capacity(256 << 20)
        .start()
        .expect("a server")
}

/// True if all programs can be found. If not, says that `test` is skipped.
pub(crate) fn have(test: &str, programs: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = |program: &&&str| env::split_paths(&path).any(|dir| dir.join(program).is_file());
    match programs.iter().find(|program| !found(program)) {
        None => true,
        Some(missing) => {
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

/// Runs a command that must succeed within `patience`. Returns its output.
pub(crate) fn run(command: &mut Command, patience: Duration) -> Output {
    let output = finish(command, patience);
    assert!(
        output.status.success(),
        "{command:?} failed: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Runs a command that must end within `patience`, with any status.
pub(crate) fn finish(command: &mut Command, patience: Duration) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pid = child.id() as i32;
    let (mut out, mut err) = (
        child.stdout.take().expect("piped above"),
        child.stderr.take().expect("piped above"),
    );
    let out = thread::spawn(move || read_all(&mut out));
    let err = thread::spawn(move || read_all(&mut err));
    let end = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is our child") {
            break status;
        }
        if Instant::now() > end {
            let threads = wait_channels(pid);
            let _ = child.kill();
            let _ = child.wait();
            panic!(
                "{command:?} has not ended within {patience:?}; its threads:\n{threads}\n{}{}",
                text(&out.join().expect("it reads")),
                text(&err.join().expect("it reads"))
            );
        }
        thread::sleep(Duration::from_millis(2));
    };
    Output {
        status,
        stdout: out.join().expect("it reads"),
        stderr: err.join().expect("it reads"),
    }
}

fn read_all(pipe: &mut impl std::io::Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = pipe.read_to_end(&mut bytes);
    bytes
}

fn wait_channels(pid: i32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    tasks
        .map(|task| {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            format!("  {} in {}\n", read("comm").trim(), read("wchan"))
        })
        .collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
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
