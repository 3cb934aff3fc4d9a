//! The processes that a command of `xtask` starts.
//!
//! The rule it keeps: no child outlives `xtask`. Each runs in a process group of its own, so that
//! one signal reaches it together with all its descendants (cargo, compilers, test programs, memory
//! servers).

use std::{
    env,
    os::unix::process::CommandExt,
    process::{self, Child, Command, ExitCode, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// Process groups of the children that run now.
static RUNNING: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<i32>> {
    RUNNING.lock().expect("no panic while it is held")
}

/// Makes Ctrl-C, SIGTERM and SIGHUP end the running children with all their descendants, then this
/// process.
pub(crate) fn end_with_us() -> Result<()> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held until the end: no other child is started.
            let groups = running();
            for group in groups.iter() {
                // SAFETY: plain system call without pointers; the group is that of a child that has
                // not been waited for.
                unsafe { libc::kill(-group, libc::SIGTERM) };
            }
            eprintln!("\ninterrupted");
            // The status that a shell reports for a process that died of this signal.
            process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Returns the cargo that runs `xtask`.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command
}

/// Starts a child without a standard input, in a process group of its own.
pub(crate) fn spawn(command: &mut Command) -> Result<Child> {
    let mut groups = running();
    let child = command
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start `{}`", command.get_program().display()))?;
    groups.push(child.id() as i32);
    Ok(child)
}

/// Waits for a child that [`spawn`] started.
pub(crate) fn wait(mut child: Child) -> Result<ExitStatus> {
    let group = child.id() as i32;
    let status = child.wait().context("cannot wait for a child process");
    running().retain(|&it| it != group);
    status
}

/// Runs a child to its end, with the output of `xtask`.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    wait(spawn(command)?)
}

/// Runs a child to its end. Returns success if the child has succeeded.
pub(crate) fn code(command: &mut Command) -> Result<ExitCode> {
    Ok(ExitCode::from(u8::from(!status(command)?.success())))
}

/// Runs a child to its end.
///
/// # Errors
/// As `why` says, if the child fails.
pub(crate) fn must(command: &mut Command, why: &'static str) -> Result<()> {
    ensure!(status(command)?.success(), why);
    Ok(())
}

/// True if a program can be started and succeeds. Its output is not shown.
pub(crate) fn works(program: &str, args: &[&str]) -> bool {
    let tried = Command::new(program).args(args).output();
    tried.is_ok_and(|output| output.status.success())
}

/// Runs a child to its end as [`status`] does. A child that has not ended within `time` is ended,
/// with all its descendants, and has no status.
pub(crate) fn status_within(time: Duration, command: &mut Command) -> Result<Option<ExitStatus>> {
    wait_within(time, spawn(command)?)
}

/// Waits as [`wait`] does, within `time` as [`status_within`] does.
pub(crate) fn wait_within(time: Duration, mut child: Child) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if child
            .try_wait()
            .context("cannot wait for a child process")?
            .is_some()
        {
            return wait(child).map(Some);
        }
        thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: plain system call without pointers; the group is that of a child that has not been
    // waited for.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
    wait(child).map(|_| None)
}
