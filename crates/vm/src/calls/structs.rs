//! Calls that cannot be repeated, with local copies of what they read and write.
//!
//! The rule it keeps: a call stands here if it has taken, reaped, changed or waited for something
//! by the time it writes to memory. All others are better tried again.

use std::ptr;

use super::{
    local::{IsRemote, LocalBuffer},
    raw::{Arguments, system_call},
    transfer::{ADDRESS_BYTES, error},
};

/// An argument that is an address, and the number of bytes that the call reads or writes there.
#[derive(Clone, Copy)]
struct Arg(usize, usize);

const TIMESPEC: usize = 16;
const TIMER: usize = 32;
const RUSAGE: usize = 144;
const SIGINFO: usize = 128;
const SIGACTION: usize = 32;
const SIGNAL_STACK: usize = 24;
const LENGTH: usize = 4;
const OFFSET: usize = 8;
const POLL: usize = 8;

/// Returns the parts of a call, at most four.
fn parts(number: libc::c_long, args: Arguments) -> [Arg; 4] {
    const NONE: Arg = Arg(0, 0);
    let mut parts = [NONE; 4];
    let mut fill = |these: &[Arg]| parts[..these.len()].copy_from_slice(these);
    // A set of descriptors is in whole words.
    let set = args[0].div_ceil(64).saturating_mul(8);
    match number {
        libc::SYS_accept | libc::SYS_accept4 => {
            fill(&[Arg(1, ADDRESS_BYTES), Arg(2, LENGTH)]);
        }
        libc::SYS_wait4 => fill(&[Arg(1, 4), Arg(3, RUSAGE)]),
        libc::SYS_waitid => fill(&[Arg(2, SIGINFO), Arg(4, RUSAGE)]),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => fill(&[Arg(1, set), Arg(2, set), Arg(3, set), Arg(4, TIMESPEC)]),
        libc::SYS_pselect6 => fill(&[Arg(1, set), Arg(2, set), Arg(3, set), Arg(4, TIMESPEC)]),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => fill(&[Arg(0, args[1].saturating_mul(POLL))]),
        libc::SYS_ppoll => fill(&[
            Arg(0, args[1].saturating_mul(POLL)),
            Arg(2, TIMESPEC),
            Arg(3, 8),
        ]),
        libc::SYS_nanosleep => fill(&[Arg(0, TIMESPEC), Arg(1, TIMESPEC)]),
        libc::SYS_clock_nanosleep => fill(&[Arg(2, TIMESPEC), Arg(3, TIMESPEC)]),
        libc::SYS_rt_sigtimedwait => fill(&[Arg(0, 8), Arg(1, SIGINFO), Arg(2, TIMESPEC)]),
        libc::SYS_rt_sigaction => fill(&[Arg(1, SIGACTION), Arg(2, SIGACTION)]),
        libc::SYS_rt_sigprocmask => fill(&[Arg(1, 8), Arg(2, 8)]),
        libc::SYS_sigaltstack => fill(&[Arg(0, SIGNAL_STACK), Arg(1, SIGNAL_STACK)]),
        libc::SYS_prlimit64 => fill(&[Arg(2, 16), Arg(3, 16)]),
        libc::SYS_setitimer => fill(&[Arg(1, TIMER), Arg(2, TIMER)]),
        libc::SYS_timer_settime | libc::SYS_timerfd_settime => {
            fill(&[Arg(2, TIMER), Arg(3, TIMER)]);
        }
        libc::SYS_sendfile => fill(&[Arg(2, OFFSET)]),
        libc::SYS_splice | libc::SYS_copy_file_range => fill(&[Arg(1, OFFSET), Arg(3, OFFSET)]),
        libc::SYS_msgrcv => fill(&[Arg(1, args[2].saturating_add(8))]),
        libc::SYS_mq_timedreceive => fill(&[Arg(1, args[2]), Arg(3, 4), Arg(4, TIMESPEC)]),
        libc::SYS_io_getevents => fill(&[Arg(3, args[2].saturating_mul(32)), Arg(4, TIMESPEC)]),
        libc::SYS_getdents64 => fill(&[Arg(1, args[2])]),
        _ => {}
    }
    parts
}

/// Makes a call with local copies. `None`: the call is another one, or has no remote argument.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn call(
    number: libc::c_long,
    mut args: Arguments,
    is_remote: IsRemote<'_>,
) -> Option<isize> {
    let mut parts = parts(number, args);
    if matches!(number, libc::SYS_accept | libc::SYS_accept4) && args[1] != 0 && args[2] != 0 {
        // SAFETY: the caller's promise: the call may read the length.
        let room = unsafe { ptr::read_unaligned(args[2] as *const libc::socklen_t) };
        parts[0].1 = ADDRESS_BYTES.min(room as usize);
    }
    let remote = parts.map(|Arg(arg, bytes)| args[arg] != 0 && is_remote(args[arg], bytes));
    if !remote.contains(&true) {
        return None;
    }
    let lengths = || {
        parts
            .iter()
            .zip(remote)
            .map(|(&part, remote)| (part, remote))
    };
    let of_remote =
        |(Arg(_, bytes), remote): (Arg, bool)| if remote { bytes.saturating_add(8) } else { 0 };
    let bytes = lengths().map(of_remote).fold(0, usize::saturating_add);
    let Some(local) = LocalBuffer::of(bytes) else {
        return Some(error(libc::ENOMEM));
    };
    let given = args;
    let each = |copy: &mut dyn FnMut(usize, *mut u8, *mut u8, usize)| {
        let mut at = local.start();
        for (Arg(arg, bytes), _) in lengths().filter(|(_, remote)| *remote) {
            copy(arg, at, given[arg] as *mut u8, bytes);
            at = at.wrapping_add(bytes.next_multiple_of(8));
        }
    };
    // SAFETY: the local buffer has room for all parts, each rounded up; the caller's promise is
    // that the call may read and write its arguments.
    unsafe {
        each(&mut |arg, local, remote, bytes| {
            local.copy_from_nonoverlapping(remote, bytes);
            args[arg] = local as usize;
        });
        let result = system_call(number, args);
        each(&mut |_, local, remote, bytes| remote.copy_from_nonoverlapping(local, bytes));
        Some(result)
    }
}
