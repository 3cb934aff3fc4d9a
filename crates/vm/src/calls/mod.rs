//! System calls on memory whose absent pages the kernel cannot bring in ([`call`]).
//!
//! With in-thread faults a system call that touches an absent page fails with `EFAULT`. The page
//! may leave at any moment, so that touching it before the call is not enough. The rule kept here:
//! a call that would lose something by failing never sees such memory.
//!
//! - Reads, writes, receives and sends go through a local buffer, in pieces where the call may do a
//!   part (`transfer.rs`, `messages.rs`,
//!   `processes.rs`). Bytes that the kernel has handed over cannot be lost on
//!   the way, no page has to stay, and no budget is too small.
//! - Calls after which the kernel keeps what it was given ([`keeps_memory`]) get a copy that nobody
//!   uses again.
//! - Calls that cannot be repeated, because they have taken or changed something by the time they
//!   write, get local copies of their arguments (`structs.rs`).
//! - Calls that lead to memory by structures find that in memory (`nested.rs`).
//! - All others are tried again after a touch of their remote arguments.
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

use nested::Reach;

pub use local::{Hold, IsRemote};
pub use pointers::{NUMBERS, addresses};
pub use raw::{Arguments, INSTRUCTION_BYTES, instruction, system_call};
pub use transfer::keeps_memory;

use crate::sys::KERNEL_PAGE_BYTES;

/// Number of repetitions of a call that fails with `EFAULT`, if it was given remote memory. Each
/// time the page has to leave between a touch and the call.
const TRIES: usize = 200;

/// Makes the system call `number`. Returns the kernel's result: a negative number is that of an
/// error. `hold` is called for memory that is to stay until the caller has the result.
///
/// # Safety
/// - The call and its arguments are what the caller may ask of the kernel.
/// - Remote memory among them may be read, and what the call writes there may be written.
/// - The call is none that returns twice, or with another stack.
pub unsafe fn call(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    hold: Hold<'_>,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        transfer::call(number, args, is_remote)
            .or_else(|| messages::call(number, args, is_remote))
            .or_else(|| processes::call(number, args, is_remote))
            .or_else(|| structs::call(number, args, is_remote))
            .unwrap_or_else(|| match nested::leads(number) {
                true => held(number, args, is_remote, hold),
                false => again(number, args, is_remote, hold),
            })
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
            || processes::are_remote(number, args, is_remote)
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

/// Makes a call that leads to memory by structures. Repeats it only as long as more of what it
/// leads to is held than before.
///
/// # Safety
/// As [`call`].
unsafe fn held(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    hold: Hold<'_>,
) -> isize {
    let (mut result, mut before) = (-(libc::EFAULT as isize), None);
    for reach in [Reach::FIRST, Reach::FURTHER, Reach::FARTHEST] {
        let held_bytes = nested::hold(number, args, is_remote, hold, reach);
        if before.replace(held_bytes) == Some(held_bytes) {
            continue;
        }
        // SAFETY: the caller's promise.
        result = unsafe { system_call(number, args) };
        if result != -(libc::EFAULT as isize) {
            break;
        }
    }
    result
}

/// Makes a call, again and again while a page was absent.
///
/// # Safety
/// As [`call`].
unsafe fn again(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    hold: Hold<'_>,
) -> isize {
    for tries in 0.. {
        // SAFETY: the caller's promise.
        let result = unsafe { system_call(number, args) };
        if result != -(libc::EFAULT as isize) || tries == TRIES {
            return result;
        }
        // Some calls give most of their arguments another meaning now and then. So nothing is
        // touched before the call has missed it.
        let mut remote = pointers::of(number, args)
            .chain(nested::waited(number, args))
            .filter(|&at| is_remote(at, 1))
            .peekable();
        if remote.peek().is_none() {
            return result;
        }
        remote.for_each(|at| touch(at, is_remote));
        // An argument may be longer than a page.
        if let Some(reach) = [Reach::FURTHER, Reach::FARTHEST].get(tries.wrapping_sub(1)) {
            nested::hold(number, args, is_remote, hold, *reach);
        }
        if tries > 0 {
            let _ = sched_yield();
        }
    }
    unreachable!("the loop ends by itself")
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

/// Brings in the remote pages of `bytes` bytes at an address: a [`Hold`] for memory that cannot be
/// kept.
pub fn bring_in(at: usize, bytes: usize, is_remote: IsRemote<'_>) {
    let end = at.saturating_add(bytes);
    let first = at & !(KERNEL_PAGE_BYTES - 1);
    for page in (first..end).step_by(KERNEL_PAGE_BYTES) {
        let at = page.max(at);
        if is_remote(at, 1) {
            // SAFETY: as in `touch`.
            unsafe { ptr::read_volatile(at as *const u8) };
        }
    }
}
