//! System calls on memory whose absent pages the kernel cannot bring in ([`call`]).
//!
//! With in-thread faults a system call that touches an absent page fails with `EFAULT`. The page
//! may leave at any moment, so that touching it before the call is not enough. The rule kept here:
//! a call that would lose something by failing never sees such memory.
//!
//! - Reads, writes, receives and sends go through a local buffer, in pieces where the call may do a
//!   part (`transfer.rs`, `messages.rs`). Bytes that the kernel has handed over cannot be lost on
//!   the way, no page has to stay, and no budget is too small.
//! - Copies from and to other processes go on, page by page, where the kernel has stopped
//!   (`processes.rs`).
//! - Calls after which the kernel keeps what it was given ([`keeps_memory`]) get a copy that nobody
//!   uses again.
//! - Calls that cannot be repeated, because they have taken or changed something by the time they
//!   write, get local copies of their arguments (`structs.rs`).
//! - All others are tried again after a touch of their remote arguments, and of what their
//!   structures lead to (`nested.rs`). Nothing stays in memory for them: a page that leaves in
//!   between costs one more try.
//!
//! A touch of a page that is lost raises SIGBUS, as everywhere. So does a touch of memory that the
//! program has protected raise SIGSEGV, where the kernel would say `EFAULT`.
//!
//! Nothing here allocates or locks: all of it may run in a signal handler.

mod local;
mod messages;
mod nested;
mod pointers;
mod processes;
pub(crate) mod raw;
mod structs;
mod transfer;

use std::ptr;

use nix::sched::sched_yield;

use local::bring_in;

pub use local::{Guesses, IsRemote, is_absent};
pub use pointers::{NUMBERS, addresses};
pub use raw::{Arguments, INSTRUCTION_BYTES, instruction, system_call};
pub use transfer::keeps_memory;

use crate::sys::KERNEL_PAGE_BYTES;

/// Number of repetitions of a call that fails with `EFAULT`, if it was given remote memory. Each
/// time the page has to leave between a touch and the call.
const TRIES: usize = 200;
/// Number of repetitions of a call whose structures alone lead to remote memory: words of them may
/// only look like addresses.
const TRIES_LED: usize = 20;
const FAULT: isize = -(libc::EFAULT as isize);

/// Makes the system call `number`. Returns the kernel's result: a negative number is that of an
/// error.
///
/// # Safety
/// - The call and its arguments are what the caller may ask of the kernel.
/// - Remote memory among them may be read, and what the call writes there may be written.
/// - The call is none that returns twice, or with another stack.
pub unsafe fn call(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    guesses: Guesses<'_>,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        transfer::call(number, args, is_remote)
            .or_else(|| messages::call(number, args, is_remote))
            .or_else(|| structs::call(number, args, is_remote))
            .unwrap_or_else(|| {
                let first = system_call(number, args);
                complete(number, args, first, is_remote, guesses)
            })
    }
}

/// Goes on after the kernel has answered a call with `first`: makes the call again, or the rest of
/// it, if a page was absent. Returns the kernel's result. For calls that [`call`] makes without
/// local copies.
///
/// # Safety
/// As [`call`].
pub unsafe fn complete(
    number: libc::c_long,
    args: Arguments,
    first: isize,
    is_remote: IsRemote<'_>,
    guesses: Guesses<'_>,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        match processes::has_lists(number) {
            true => processes::complete(number, args, first, is_remote),
            false => again(number, args, first, is_remote, guesses),
        }
    }
}

/// True if remote buffers are among those that a call's arguments only lead to (`readv`, `recvmsg`
/// and their kind).
///
/// # Safety
/// As [`call`].
pub unsafe fn leads_to_remote(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        transfer::buffers_are_remote(number, args, is_remote)
            || messages::are_remote(number, args, is_remote)
    }
}

/// True if [`call`] is to make the call `number` also if none of its arguments is remote, since
/// they may lead to remote memory.
pub const fn leads_on(number: libc::c_long) -> bool {
    transfer::has_list(number)
        || messages::has_list(number)
        || processes::has_lists(number)
        || nested::waits(number)
        || nested::leads(number)
}

/// Makes a call whose result is known again and again while a page was absent.
///
/// # Safety
/// As [`call`].
unsafe fn again(
    number: libc::c_long,
    args: Arguments,
    first: isize,
    is_remote: IsRemote<'_>,
    guesses: Guesses<'_>,
) -> isize {
    let mut result = first;
    for tries in 0..TRIES {
        if result != FAULT {
            break;
        }
        // Some calls give most of their arguments another meaning now and then. So nothing is
        // touched before the call has missed it.
        let mut remote = pointers::of(number, args)
            .chain(nested::waited(number, args))
            .filter(|&at| is_remote(at, 1))
            .peekable();
        let is_given = remote.peek().is_some();
        if let Some((at, bytes)) = nested::command(number, args) {
            // A device may have carried the command out, unless the command was absent.
            if !bring_in(at, bytes, is_remote) {
                break;
            }
        } else {
            remote.for_each(|at| touch(at, is_remote));
            let leads = nested::follow(number, args, is_remote, guesses, tries);
            let may_help = is_given || leads && tries < TRIES_LED;
            if !may_help {
                break;
            }
        }
        if tries > 0 {
            let _ = sched_yield();
        }
        // SAFETY: the caller's promise.
        result = unsafe { system_call(number, args) };
    }
    result
}

/// Brings in the page at an address and the next: few arguments of these calls are longer.
fn touch(at: usize, is_remote: IsRemote<'_>) {
    for at in [at, at.saturating_add(KERNEL_PAGE_BYTES - 1)] {
        if is_remote(at, 1) {
            // SAFETY: remote memory is mapped; any byte of it may be read.
            unsafe { ptr::read_volatile(at as *const u8) };
        }
    }
}
