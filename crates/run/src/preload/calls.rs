//! Calls that lead to memory. With in-thread faults: calls whose memory a filter cannot see, since
//! they lead there by lists (`readv`, `recvmsg` and their kind) or structures (`ioctl`,
//! `setsockopt`). In both modes: calls after which the kernel keeps references to their memory
//! (`vmsplice`, sends with `MSG_ZEROCOPY`), which is copied.
//!
//! The rule it keeps: a call without remote memory is the C library's own.
//!
//! `io_uring` takes its orders from memory that no filter sees. Without in-thread faults, from the
//! first ring on all of the arena is treated as if the kernel kept references to it
//! (`Advice::ZeroCopy`), also if the arena is made later.

use std::ffi::{c_int, c_uint, c_void};

use farpage_vm::calls;
use libc::{c_long, c_ulong, iovec, mmsghdr, msghdr, off_t, pid_t, sockaddr, socklen_t, timespec};

use crate::{
    Inside, clone, confine, errno, fail, guesses,
    next::{name, next},
    say_once, signals,
    state::{self, is_remote},
};

/// Defines interposed calls: `$way` makes each, of which the next library's is a part.
macro_rules! calls {
    ($way:ident: $($name:ident $later:ident = $number:ident($($arg:ident: $type:ty),*) -> $result:ty [$($value:expr),*];)+) => {
        $(
            next! {
                #[doc = stringify!($name)]
                $later = (name(concat!(stringify!($name), "\0")))($($arg: $type),*) -> $result, else -1;
            }

            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As the call.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
                // SAFETY: the caller's promise.
                unsafe {
                    let later = || $later($($arg),*) as isize;
                    $way(libc::$number, [$($value),*], later) as $result
                }
            }
        )+
    };
}

/// Makes a call of the program's: with copies of its remote buffers, or as the next library does.
///
/// # Safety
/// As the call.
unsafe fn copied(number: c_long, args: calls::Arguments, later: impl FnOnce() -> isize) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        match is_copied(number, args) {
            true => outcome(guesses::call(number, args)),
            false => later(),
        }
    }
}

/// True if a call has remote buffers that are copied.
///
/// # Safety
/// As the call.
unsafe fn is_copied(number: c_long, args: calls::Arguments) -> bool {
    // SAFETY: the caller's promise.
    (signals::are_ours() || calls::keeps_memory(number, args))
        && unsafe { calls::leads_to_remote(number, args, &is_remote) }
}

/// True for calls, by number, that `syscall` hands over to [`by_number`].
#[cfg(target_arch = "x86_64")]
static HANDED_OVER: [bool; calls::NUMBERS as usize] = {
    let mut are = [false; calls::NUMBERS as usize];
    let mut number = 0;
    while number < calls::NUMBERS {
        are[number as usize] = calls::leads_on(number);
        number += 1;
    }
    are[libc::SYS_sendto as usize] = true;
    are[libc::SYS_io_uring_setup as usize] = true;
    are[libc::SYS_seccomp as usize] = true;
    are[libc::SYS_unshare as usize] = true;
    are
};

/// Makes the calls that `syscall` hands over.
#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" fn by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    if number == libc::SYS_seccomp {
        let install = |filter| {
            // SAFETY: the caller's promise; the filter lasts for the call.
            unsafe { calls::system_call(number, [a, b, filter, d, e, f]) }
        };
        // SAFETY: the caller's promise.
        let installed = unsafe { confine::confine(a, b, c, install) };
        return finish(installed.unwrap_or(-(libc::EPERM as isize)));
    }
    if number == libc::SYS_io_uring_setup {
        match signals::are_ours() {
            // The filter refuses it, too, where the program has an instruction of its own.
            true => {
                say_once(
                    "io_uring_setup fails with EPERM, as the kernel could not bring absent memory in: --fillers allows rings",
                );
                return finish(-(libc::EPERM as isize));
            }
            false => state::expect_zero_copy(),
        }
    }
    let args = [a, b, c, d, e, f];
    // SAFETY: the caller's promise.
    let result = unsafe {
        if signals::are_ours() && !Inside::is() || is_copied(number, args) {
            guesses::call(number, args)
        } else {
            calls::system_call(number, args)
        }
    };
    let result = finish(result);
    if number == libc::SYS_unshare && result != 0 {
        confine::explain(a as c_int);
    }
    result
}

/// `syscall`: as the C library's, except for calls that lead to memory or after which the kernel
/// keeps memory, calls by which a program confines itself, and calls that copy the process.
///
/// Without a frame, and entering the kernel by itself: some calls return twice, or on another
/// stack.
///
/// # Safety
/// As the call.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    std::arch::naked_asm!(
        "cmp rdi, {numbers}",
        "jae 1f",
        "lea rax, [rip + {handed_over}]",
        "cmp byte ptr [rax + rdi], 0",
        "jne 2f",
        "cmp rdi, {fork}",
        "je 5f",
        "cmp rdi, {clone}",
        "je 4f",
        "cmp rdi, {clone3}",
        "je 6f",
        "1:",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "2:",
        "jmp {by_number}",
        "3:",
        "mov rdi, rax",
        "jmp {finish}",
        // `clone`: a copy of the process, unless it shares memory.
        "4:",
        "test esi, {shares}",
        "jnz 7f",
        "5:",
        "sub rsp, 8",
        "call {copy}",
        "add rsp, 8",
        // The child's stack, from which `ret` takes an address as after the kernel's own call.
        "test rdx, rdx",
        "cmovnz rsp, rdx",
        "cmp rax, -4095",
        "jae 3b",
        "ret",
        // `clone3`, whose flags are in memory.
        "6:",
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "call {clone3_shares}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 5b",
        "jmp 1b",
        // A child on a stack of its own, in this memory.
        "7:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {keep}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp 1b",
        fork = const libc::SYS_fork,
        clone = const libc::SYS_clone,
        clone3 = const libc::SYS_clone3,
        shares = const libc::CLONE_VM,
        keep = sym clone::keep_by_number,
        copy = sym clone::copy_by_number,
        clone3_shares = sym clone::clone3_shares,
        numbers = const calls::NUMBERS,
        handed_over = sym HANDED_OVER,
        by_number = sym by_number,
        finish = sym finish,
    )
}

/// Converts the kernel's result to that of `syscall`.
#[cfg(target_arch = "x86_64")]
extern "C" fn finish(result: isize) -> c_long {
    outcome(result) as c_long
}

fn outcome(result: isize) -> isize {
    if result < 0 {
        return fail(-result as c_int) as isize;
    }
    result
}

calls! { copied:
    vmsplice later_vmsplice = SYS_vmsplice(fd: c_int, list: *const iovec, count: usize, flags: c_uint) -> isize
        [fd as usize, list as usize, count, flags as usize, 0, 0];
    send later_send = SYS_sendto(fd: c_int, from: *const c_void, bytes: usize, flags: c_int) -> isize
        [fd as usize, from as usize, bytes, flags as usize, 0, 0];
    sendto later_sendto = SYS_sendto(fd: c_int, from: *const c_void, bytes: usize, flags: c_int, to: *const sockaddr, to_bytes: socklen_t) -> isize
        [fd as usize, from as usize, bytes, flags as usize, to as usize, to_bytes as usize];
    readv later_readv = SYS_readv(fd: c_int, list: *const iovec, count: c_int) -> isize
        [fd as usize, list as usize, count as usize, 0, 0, 0];
    writev later_writev = SYS_writev(fd: c_int, list: *const iovec, count: c_int) -> isize
        [fd as usize, list as usize, count as usize, 0, 0, 0];
    preadv later_preadv = SYS_preadv(fd: c_int, list: *const iovec, count: c_int, position: off_t) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, 0];
    preadv64 later_preadv64 = SYS_preadv(fd: c_int, list: *const iovec, count: c_int, position: off_t) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, 0];
    pwritev later_pwritev = SYS_pwritev(fd: c_int, list: *const iovec, count: c_int, position: off_t) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, 0];
    pwritev64 later_pwritev64 = SYS_pwritev(fd: c_int, list: *const iovec, count: c_int, position: off_t) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, 0];
    preadv2 later_preadv2 = SYS_preadv2(fd: c_int, list: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, flags as usize];
    preadv64v2 later_preadv64v2 = SYS_preadv2(fd: c_int, list: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, flags as usize];
    pwritev2 later_pwritev2 = SYS_pwritev2(fd: c_int, list: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, flags as usize];
    pwritev64v2 later_pwritev64v2 = SYS_pwritev2(fd: c_int, list: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize
        [fd as usize, list as usize, count as usize, position as usize, 0, flags as usize];
    recvmsg later_recvmsg = SYS_recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize
        [fd as usize, message as usize, flags as usize, 0, 0, 0];
    sendmsg later_sendmsg = SYS_sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize
        [fd as usize, message as usize, flags as usize, 0, 0, 0];
    recvmmsg later_recvmmsg = SYS_recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int
        [fd as usize, messages as usize, count as usize, flags as usize, timeout as usize, 0];
    sendmmsg later_sendmmsg = SYS_sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int
        [fd as usize, messages as usize, count as usize, flags as usize, 0, 0];
}

/// Makes a call of the program's as the next library does, and goes on with it if absent memory is
/// why it did not do all.
///
/// # Safety
/// As the call.
unsafe fn completed(
    number: c_long,
    args: calls::Arguments,
    later: impl FnOnce() -> isize,
) -> isize {
    /// Kind of the requests of a userfaultfd. The runtime makes them where it serves a fault.
    const UFFDIO: usize = 0xaa;
    let result = later();
    let first = if result < 0 {
        -(errno() as isize)
    } else {
        result
    };
    let (may_fail, may_stop) = match number {
        libc::SYS_ioctl => (args[1] >> 8 & 0xff != UFFDIO, false),
        libc::SYS_setsockopt => (true, false),
        // Copies may end early.
        _ => (true, true),
    };
    let is_all = match first {
        0.. => !may_stop,
        _ => first != -(libc::EFAULT as isize) || !may_fail,
    };
    if is_all || !signals::are_ours() || Inside::is() {
        return result;
    }
    // SAFETY: the caller's promise.
    outcome(unsafe { guesses::complete(number, args, first) })
}

calls! { completed:
    ioctl later_ioctl = SYS_ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int
        [fd as usize, request as usize, argument, 0, 0, 0];
    setsockopt later_setsockopt = SYS_setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, bytes: socklen_t) -> c_int
        [fd as usize, level as usize, name as usize, value as usize, bytes as usize, 0];
    process_vm_readv later_process_vm_readv = SYS_process_vm_readv(process: pid_t, own: *const iovec, own_count: c_ulong, others: *const iovec, others_count: c_ulong, flags: c_ulong) -> isize
        [process as usize, own as usize, own_count as usize, others as usize, others_count as usize, flags as usize];
    process_vm_writev later_process_vm_writev = SYS_process_vm_writev(process: pid_t, own: *const iovec, own_count: c_ulong, others: *const iovec, others_count: c_ulong, flags: c_ulong) -> isize
        [process as usize, own as usize, own_count as usize, others as usize, others_count as usize, flags as usize];
}
