//! Calls of the keeper to processes made by `fork`, which start their agents.
//!
//! The rule it keeps: only the process is called that the number belongs to, and none that has
//! limited its system calls since the fork, which an agent's could break. A process that holds
//! SIGURG back is not called either: it could limit its calls before the signal comes.

use std::{
    fs, io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::PathBuf,
    ptr,
};

use super::orders::AGENT_NAME;

/// Reason why a process is not called.
pub(super) enum Uncalled {
    /// All threads hold the signal back just now.
    Later,
    Never(String),
}

/// Calls the process of this id, which knows itself by `number`. `is_alive` says that this process
/// has not ended, whose id another one would have then.
///
/// # Errors
/// See [`Uncalled`].
pub(super) fn call(
    process: libc::pid_t,
    number: u64,
    is_alive: impl Fn() -> bool,
) -> Result<(), Uncalled> {
    let failed = |error: io::Error| Uncalled::Never(format!("it cannot be called: {error}"));
    let descriptor = open(process).map_err(failed)?;
    // The id was the process's when the descriptor was opened.
    if !is_alive() {
        return Err(Uncalled::Never("it has ended".into()));
    }
    let unknown = || Uncalled::Never("its threads cannot be looked at".into());
    let own = fs::read_to_string("/proc/self/status").ok();
    let own = own
        .as_deref()
        .and_then(Confinement::read)
        .ok_or_else(unknown)?;
    let threads = confinements(process).ok_or_else(unknown)?;
    let is_limited = |it: &Confinement| it.is_strict || it.filters > own.filters;
    if threads.iter().any(is_limited) {
        let why = "it has limited its system calls";
        return Err(Uncalled::Never(why.into()));
    }
    if threads.iter().all(|it| it.is_signal_blocked) {
        return Err(Uncalled::Later);
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

/// Limits of a thread, of its `status` file.
struct Confinement {
    /// Number of filters of system calls.
    filters: u64,
    /// True if the thread may read, write and end alone.
    is_strict: bool,
    /// True if the thread holds SIGURG back.
    is_signal_blocked: bool,
}

impl Confinement {
    /// Reads the text of a `status` file. `None` where it lacks a line.
    fn read(status: &str) -> Option<Confinement> {
        let value = |name: &str| {
            let mut lines = status.lines();
            lines
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let blocked = u64::from_str_radix(value("SigBlk:")?, 16).ok()?;
        Some(Confinement {
            filters: value("Seccomp_filters:")?.parse().ok()?,
            is_strict: value("Seccomp:")? == "1",
            is_signal_blocked: blocked >> (libc::SIGURG - 1) & 1 == 1,
        })
    }
}

/// Returns the limits of all threads of a process. `None` where one cannot be read.
fn confinements(process: libc::pid_t) -> Option<Vec<Confinement>> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let read = |path: PathBuf| match fs::read_to_string(path.join("status")) {
        // The thread has ended.
        Err(error) if is_gone(&error) => None,
        status => Some(status.ok().as_deref().and_then(Confinement::read)),
    };
    let read_all = threads.map(|thread| thread.map_or(Some(None), |it| read(it.path())));
    read_all.flatten().collect()
}

/// True if a file of a thread cannot be read because the thread has ended.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_thread_are_read_from_its_status() {
        let status = |blocked, mode, filters| {
            format!("Name:\tx\nSigBlk:\t{blocked}\nSeccomp:\t{mode}\nSeccomp_filters:\t{filters}\n")
        };
        let read = |text: String| {
            let it = Confinement::read(&text).expect("all lines are there");
            (it.filters, it.is_strict, it.is_signal_blocked)
        };
        assert_eq!(read(status("0000000000400000", 2, 3)), (3, false, true));
        assert_eq!(read(status("ffffffffffbfffff", 1, 0)), (0, true, false));
        assert!(Confinement::read("SigBlk:\t0\nSeccomp:\t0\n").is_none());
    }

    #[test]
    fn agents_and_dead_threads_are_told_from_others() {
        for (stat, expected) in [
            ("7 (farpage-agent) S 1", true),
            ("7 (a) b) Z 1", true),
            ("7 (farpage-agent) x) S 1", false),
            ("7 (python) R 1", false),
            ("", false),
        ] {
            assert_eq!(is_agent_or_dead(stat), expected, "{stat}");
        }
    }
}
