//! Calls of the keeper to processes made by `fork`, which start their agents.
//!
//! The rule it keeps: only the process is called that the number belongs to, and none that has
//! limited its system calls since the fork, which an agent's could break.

use std::{
    fs, io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
};

use super::orders::AGENT_NAME;

/// Calls the process of this id, which knows itself by `number`. `is_alive` says that this process
/// has not ended, whose id another one would have then.
///
/// # Errors
/// The reason in words.
pub(super) fn call(
    process: libc::pid_t,
    number: u64,
    is_alive: impl Fn() -> bool,
) -> Result<(), String> {
    let failed = |error: io::Error| format!("it cannot be called: {error}");
    let descriptor = open(process).map_err(failed)?;
    // The id was the process's when the descriptor was opened.
    if !is_alive() {
        return Err("it has ended".into());
    }
    if filters(&format!("/proc/{process}/status")) > filters("/proc/self/status") {
        return Err("it has limited its system calls".into());
    }
    // SAFETY: all zeros is a valid value.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    (info.si_signo, info.si_code) = (libc::SIGURG, libc::SI_QUEUE);
    // SAFETY: the kernel's layout of a queued signal: 16 bytes, then sender, user and value.
    unsafe {
        let fields = (&raw mut info).cast::<u8>();
        (fields.add(16).cast::<libc::pid_t>()).write(libc::getpid());
        fields.add(24).cast::<u64>().write(number);
    }
    let descriptor = descriptor.as_raw_fd();
    // SAFETY: the information lasts for the call. The signal is ignored where nobody handles it.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            descriptor,
            libc::SIGURG,
            ptr::from_ref(&info),
            0,
        )
    };
    match sent {
        0 => Ok(()),
        _ => Err(failed(io::Error::last_os_error())),
    }
}

fn open(process: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    match opened {
        // SAFETY: made just now, and nobody else's.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the number of filters of system calls in a `status` file. None where it cannot be read.
fn filters(status: &str) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    count.trim().parse().ok()
}

/// True if agents are all that is left of a process: its first thread has ended alone, which keeps
/// it from being waited for until they end.
pub(super) fn has_agents_alone(process: libc::pid_t) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else {
        return false;
    };
    let mut stats = threads.map(|thread| fs::read_to_string(thread.ok()?.path().join("stat")).ok());
    stats.all(|stat| stat.as_deref().is_some_and(is_agent_or_dead))
}

/// True if a thread's `stat` file is that of an agent, or of a thread that has ended.
fn is_agent_or_dead(stat: &str) -> bool {
    let name_and_state = stat
        .split_once('(')
        .and_then(|(_, rest)| rest.rsplit_once(") "));
    name_and_state.is_some_and(|(name, rest)| {
        name.as_bytes() == AGENT_NAME.to_bytes() || rest.starts_with(['Z', 'X'])
    })
}
