//! Programs that confine themselves: filters of system calls (seccomp) and namespaces.
//!
//! A program that installs a filter before it has remote memory stays local from then on: the
//! filter may forbid calls that make an arena.
//!
//! The rule it keeps: a filter that forbids a call of the runtime in the program's threads is
//! refused with a line, since the filter would kill its threads at some later `free`. All other
//! filters are installed, changed to kill the whole process and not a thread. A namespace that the
//! kernel refuses because of the runtime's threads is explained.

use std::{
    ffi::{c_int, c_uint},
    slice,
};

use libc::sock_fprog;

use crate::{Inside, arena, fail, next::next, report, say, say_once, seccomp, set_errno, state};

next! {
    /// `prctl`.
    later_prctl = c"prctl"(option: c_int, b: usize, c: usize, d: usize, e: usize) -> c_int, else -1;
    /// `unshare`.
    later_unshare = c"unshare"(flags: c_int) -> c_int, else -1;
    /// `setns`.
    later_setns = c"setns"(fd: c_int, kind: c_int) -> c_int, else -1;
}

/// `prctl`.
///
/// # Safety
/// As `prctl`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn prctl(
    option: c_int,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
) -> c_int {
    if option == libc::PR_SET_VMA && b == libc::PR_SET_VMA_ANON_NAME as usize && state::owns(c) {
        // Naming a part would split the arena's mapping.
        return 0;
    }
    if option == libc::PR_SET_SECCOMP {
        let operation = match b as c_uint {
            libc::SECCOMP_MODE_STRICT => libc::SECCOMP_SET_MODE_STRICT,
            _ => libc::SECCOMP_SET_MODE_FILTER,
        };
        let install = |filter| {
            // SAFETY: the caller's promise; the filter lasts for the call.
            unsafe { later_prctl(option, b, filter, d, e) }
        };
        // SAFETY: the caller's promise.
        return unsafe { confine(operation as usize, 0, c, install) }
            .unwrap_or_else(|| fail(libc::EPERM));
    }
    // SAFETY: the caller's promise.
    unsafe { later_prctl(option, b, c, d, e) }
}

/// Installs a program's own filter by `install`, which receives the filter's address. Returns
/// `None`, with a line, if the filter is refused.
///
/// # Safety
/// The arguments are those of `seccomp`.
pub(crate) unsafe fn confine<R>(
    operation: usize,
    flags: usize,
    filter: usize,
    install: impl FnOnce(usize) -> R,
) -> Option<R> {
    if Inside::is() {
        return Some(install(filter));
    }
    state::note_confined();
    if state::runtime().is_none() {
        return Some(install(filter));
    }
    if operation as c_uint == libc::SECCOMP_SET_MODE_FILTER
        && flags & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0
    {
        say(
            "a filter of system calls (seccomp) for all threads (SECCOMP_FILTER_FLAG_TSYNC) is refused: it would confine farpage's own threads. \
             Run the program without its sandbox",
        );
        return None;
    }
    let mut copy = Vec::new();
    let forbidden = match operation as c_uint {
        libc::SECCOMP_SET_MODE_STRICT => Some("ioctl"),
        libc::SECCOMP_SET_MODE_FILTER if filter != 0 => {
            // SAFETY: the caller's promise: the call reads the filter there.
            let given = unsafe { &*(filter as *const sock_fprog) };
            if given.filter.is_null() {
                return Some(install(filter));
            }
            // SAFETY: as above.
            let given = unsafe { slice::from_raw_parts(given.filter, given.len.into()) };
            copy = seccomp::killing_all(given);
            if state::get().is_none() {
                // Nothing is remote yet, so the program needs nothing of the runtime from now on.
                if arena::stay_local() {
                    report::finish();
                    say(
                        "the program stays local: it has installed a filter of system calls (seccomp) before anything was remote. \
                         Run it without its sandbox for remote memory",
                    );
                }
                None
            } else {
                seccomp::forbidden(given)
            }
        }
        _ => return Some(install(filter)),
    };
    if let Some(name) = forbidden {
        say(&format!(
            "a filter of system calls (seccomp) is refused: it forbids `{name}`, without which remote memory cannot be served or freed. \
             Run the program without its sandbox"
        ));
        return None;
    }
    let program = sock_fprog {
        len: copy.len() as u16,
        filter: copy.as_mut_ptr(),
    };
    Some(install(&raw const program as usize))
}

/// `unshare`.
///
/// # Safety
/// As `unshare`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { later_unshare(flags) };
    if result != 0 {
        explain(flags);
    }
    result
}

/// `setns`.
///
/// # Safety
/// As `setns`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { later_setns(fd, kind) };
    if result != 0 {
        explain(libc::CLONE_NEWUSER);
    }
    result
}

/// Prints why a namespace was refused, if the runtime's threads are the reason.
pub(crate) fn explain(flags: c_int) {
    let wants_one_thread =
        libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;
    let is_invalid = crate::errno() == libc::EINVAL;
    if is_invalid && flags & wants_one_thread != 0 && state::get().is_some() {
        say_once(
            "a new namespace is refused by the kernel: it wants a process with one thread, and farpage's own threads are there. \
             Start farpage inside of the namespace instead (unshare --user --map-root-user farpage run ...)",
        );
        set_errno(libc::EINVAL);
    }
}
