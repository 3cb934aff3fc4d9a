//! Signals that are sent to the launcher: [`Relay`] passes them on to the program.
//!
//! The rule it keeps: a signal that `kill` sent to the launcher alone reaches the program, and a
//! signal that the terminal sends to the whole process group reaches the program once. The launcher
//! ends after the program; if the launcher is killed all the same, the kernel kills the program.

use std::{
    fs,
    mem::MaybeUninit,
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus},
    ptr,
};

use anyhow::{Context, Result};
use libc::{c_int, siginfo_t, sigset_t};

/// Signals that an instruction of the launcher itself can raise, and that then end the launcher.
const RAISED: [c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Signals held back until [`wait`](Relay::wait) takes them.
pub(crate) struct Relay {
    taken: sigset_t,
    /// The mask that the launcher was started with.
    before: sigset_t,
    /// SIGCHLD's action that the launcher was started with.
    child_action: libc::sigaction,
}

impl Relay {
    /// Holds all signals back for this thread and the threads that it starts. Called before the
    /// first thread and the program exist, so that no signal is lost.
    pub(crate) fn begin() -> Relay {
        let mut taken = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        let mut child_action = MaybeUninit::uninit();
        // SAFETY: each call fills what it is given; all zeros is the default action. An ignored
        // SIGCHLD would lose the program's exit status.
        unsafe {
            libc::sigfillset(taken.as_mut_ptr());
            for signal in RAISED {
                libc::sigdelset(taken.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, taken.as_ptr(), before.as_mut_ptr());
            let default = MaybeUninit::<libc::sigaction>::zeroed();
            libc::sigaction(libc::SIGCHLD, default.as_ptr(), child_action.as_mut_ptr());
            Relay {
                taken: taken.assume_init(),
                before: before.assume_init(),
                child_action: child_action.assume_init(),
            }
        }
    }

    /// Gives the program the mask and actions that the launcher was started with, and has the
    /// kernel kill the program if this thread ends before it.
    pub(crate) fn prepare(&self, command: &mut Command) {
        let (before, child_action) = (self.before, self.child_action);
        // SAFETY: plain system call.
        let launcher = unsafe { libc::getpid() };
        let prepare = move || {
            // SAFETY: plain system calls, on copies that this closure owns.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != launcher {
                    libc::_exit(128 + libc::SIGKILL);
                }
                libc::sigaction(libc::SIGCHLD, &raw const child_action, ptr::null_mut());
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls alone.
        unsafe { command.pre_exec(prepare) };
    }

    /// Waits for the program, and passes signals on meanwhile. Signals stay held back, so that the
    /// launcher cleans up.
    pub(crate) fn wait(&self, mut child: Child) -> Result<ExitStatus> {
        let program = child.id() as libc::pid_t;
        loop {
            let mut info = MaybeUninit::<siginfo_t>::zeroed();
            // SAFETY: a valid set, and room for what is said of the signal.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.taken, info.as_mut_ptr()) };
            // SAFETY: all zeros is valid, too.
            let info = unsafe { info.assume_init() };
            match signal {
                libc::SIGCHLD => {
                    let ended = child.try_wait().context("cannot wait for the program")?;
                    if let Some(status) = ended {
                        return Ok(status);
                    }
                }
                1.. => pass_on(signal, &info, program),
                // Interrupted, as by SIGSTOP and SIGCONT.
                _ => {}
            }
        }
    }

    /// Waits until `is_over`, for when the program has ended. Returns false if a signal tells the
    /// launcher to end before.
    pub(crate) fn wait_until(&self, is_over: impl Fn() -> bool) -> bool {
        let look = libc::timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        while !is_over() {
            // SAFETY: a valid set; nobody asks what is said of the signal.
            let signal = unsafe {
                libc::sigtimedwait(&raw const self.taken, ptr::null_mut(), &raw const look)
            };
            match signal {
                libc::SIGHUP | libc::SIGINT | libc::SIGQUIT | libc::SIGTERM => return false,
                _ => stop_by(signal),
            }
        }
        true
    }
}

/// Passes a signal on to the program, which has not been waited for.
fn pass_on(signal: c_int, info: &siginfo_t, program: libc::pid_t) {
    // SAFETY: plain system calls. The sender is known where the signal was sent.
    unsafe {
        // A hang-up goes to the session's leader alone, which may be the launcher.
        if (was_sent(info) && !is_descendant(info.si_pid())) || signal == libc::SIGHUP {
            match info.si_code {
                libc::SI_QUEUE => libc::sigqueue(program, signal, info.si_value()),
                _ => libc::kill(program, signal),
            };
        }
    }
    stop_by(signal);
}

/// Stops the launcher if the signal asks for that: a shell waits until its job stops, launcher and
/// all. The kernel knows whether the job stops.
fn stop_by(signal: c_int) {
    if let libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU = signal {
        let mut set = MaybeUninit::uninit();
        // SAFETY: calls with a set that the first one fills.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), signal);
            libc::raise(signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
        }
    }
}

/// True if a process sent the signal. The kernel sends to the terminal's whole process group, which
/// the program belongs to.
fn was_sent(info: &siginfo_t) -> bool {
    info.si_code <= 0
}

/// True if a process is alive and is the program or was started by it. A program that signals its
/// process group (`kill 0`) would be answered for ever.
fn is_descendant(mut process: libc::pid_t) -> bool {
    let ours = std::process::id() as libc::pid_t;
    while process > 1 {
        let parent = parent(process);
        if parent == Some(ours) {
            return true;
        }
        process = parent.unwrap_or(0);
    }
    false
}

/// Reads a process's parent.
fn parent(process: libc::pid_t) -> Option<libc::pid_t> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before that parenthesis may contain parentheses and spaces.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}
