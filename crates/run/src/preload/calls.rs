//! Calls whose buffers the filter cannot see, with in-thread faults: `readv`, `recvmsg` and their
//! kind lead to memory by lists.
//!
//! The rule it keeps: without remote memory among them they are the C library's own.

use std::ffi::{c_int, c_uint};

use farpage_vm::calls;
use libc::{iovec, mmsghdr, msghdr, off_t, timespec};

use crate::{
    filter::is_remote,
    next::{Next, next},
    set_errno, signals,
};

macro_rules! calls {
    ($($name:ident $later:ident = $number:ident($($arg:ident: $type:ty),*) -> $result:ty [$($value:expr),*];)+) => {
        mod found {
            use std::ffi::CStr;

            use super::Next;

            $(
                #[expect(non_upper_case_globals, reason = "the name of a function")]
                pub(super) static $name: Next = {
                    let name = concat!(stringify!($name), "\0");
                    match CStr::from_bytes_with_nul(name.as_bytes()) {
                        Ok(name) => Next::new(name),
                        Err(_) => panic!("a name has one end"),
                    }
                };
            )+
        }
        $(
            next! {
                #[doc = stringify!($name)]
                $later = (found::$name)($($arg: $type),*) -> $result, else -1;
            }

            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As the call.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
                let args = [$($value),*];
                // SAFETY: the caller's promise.
                unsafe {
                    if signals::are_ours() && calls::leads_to_remote(libc::$number, args, &is_remote) {
                        return outcome(calls::call(libc::$number, args, &is_remote)) as $result;
                    }
                    $later($($arg),*)
                }
            }
        )+
    };
}

fn outcome(result: isize) -> isize {
    if result < 0 {
        set_errno(-result as c_int);
        return -1;
    }
    result
}

calls! {
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
