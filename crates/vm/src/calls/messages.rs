//! Messages with addresses and control data: `recvmsg`, `sendmsg` and their plural forms.
//!
//! The rule it keeps: the kernel sees local copies of all parts, so that no message is taken that
//! cannot be handed over.

use std::{mem, ptr, slice};

use super::{
    local::{Buffers, IsRemote, LocalBuffer},
    raw::{Arguments, system_call},
    transfer::{ADDRESS_BYTES, TransferPlan, error, give, keeps_memory, pull, push},
};

/// Upper bound of control data. Longer data is refused: the kernel sends and receives none.
const CONTROL_BYTES_MAX: usize = 1 << 20;
/// Upper bound of the messages that the kernel takes at once.
const MESSAGES_MAX: usize = 1024;

/// Makes a call about messages. `None`: the call is another one, or has no remote part.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn call(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> Option<isize> {
    let [fd, messages, count, flags, timeout, _] = args;
    // SAFETY: the caller's promise.
    unsafe {
        if !are_remote(number, args, is_remote) {
            return None;
        }
        match number {
            libc::SYS_recvmsg => Some(receive(fd, messages as *mut libc::msghdr, count)),
            libc::SYS_sendmsg => Some(send(fd, messages as *const libc::msghdr, count)),
            _ => {
                let at = |which: usize| messages + which * mem::size_of::<libc::mmsghdr>();
                let is_receive = number == libc::SYS_recvmmsg;
                let count = count.min(MESSAGES_MAX);
                Some(several(fd, at, count, flags, timeout, is_receive))
            }
        }
    }
}

/// True if the call `number` has messages.
pub(super) const fn has_list(number: libc::c_long) -> bool {
    matches!(
        number,
        libc::SYS_recvmsg | libc::SYS_sendmsg | libc::SYS_recvmmsg | libc::SYS_sendmmsg
    )
}

/// True if the messages of a call have remote parts.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn are_remote(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> bool {
    let [_, messages, count, _, timeout, _] = args;
    // SAFETY: the caller's promise.
    unsafe {
        match number {
            libc::SYS_recvmsg | libc::SYS_sendmsg => is_remote_message(messages, is_remote),
            libc::SYS_recvmmsg | libc::SYS_sendmmsg => {
                let at = |which: usize| messages + which * mem::size_of::<libc::mmsghdr>();
                let has_timeout = number == libc::SYS_recvmmsg && timeout != 0;
                (0..count.min(MESSAGES_MAX)).any(|which| is_remote_message(at(which), is_remote))
                    || has_timeout && is_remote(timeout, 16)
            }
            _ => false,
        }
    }
}

unsafe fn is_remote_message(at: usize, is_remote: IsRemote<'_>) -> bool {
    if at == 0 || is_remote(at, mem::size_of::<libc::mmsghdr>()) {
        return at != 0;
    }
    // SAFETY: the caller's promise: the call may read the header.
    let header = unsafe { ptr::read_unaligned(at as *const libc::msghdr) };
    let count = header.msg_iovlen;
    let is_list_remote = is_remote(
        header.msg_iov as usize,
        count.saturating_mul(mem::size_of::<libc::iovec>()),
    );
    is_remote(header.msg_name as usize, header.msg_namelen as usize)
        || is_remote(header.msg_control as usize, header.msg_controllen)
        || is_list_remote
        // SAFETY: as above, of the list.
        || unsafe { buffers(&header) }.is_some_and(|buffers| buffers.are_remote(is_remote))
}

/// Returns the buffers of a message. `None`: there are more than a call may have.
unsafe fn buffers(header: &libc::msghdr) -> Option<Buffers<'_>> {
    match header.msg_iovlen {
        0 => Some(Buffers(&[])),
        1025.. => None,
        // SAFETY: the caller's promise: the call may read as many there.
        count => Some(Buffers(unsafe {
            slice::from_raw_parts(header.msg_iov, count)
        })),
    }
}

/// Local copies of a header's parts.
struct LocalHeader {
    header: libc::msghdr,
    name: [u8; ADDRESS_BYTES],
    control: Option<LocalBuffer>,
    buffer: libc::iovec,
}

impl LocalHeader {
    /// Makes local parts. Control data that is longer than permitted is an error.
    fn new(user: &libc::msghdr) -> Result<LocalHeader, isize> {
        let control_bytes = user.msg_controllen;
        let has_control = !user.msg_control.is_null() && control_bytes > 0;
        if has_control && control_bytes > CONTROL_BYTES_MAX {
            return Err(error(libc::ENOBUFS));
        }
        let control = has_control.then(|| LocalBuffer::of(control_bytes));
        if matches!(control, Some(None)) {
            return Err(error(libc::ENOMEM));
        }
        Ok(LocalHeader {
            header: *user,
            name: [0; ADDRESS_BYTES],
            control: control.flatten(),
            buffer: libc::iovec {
                iov_base: ptr::null_mut(),
                iov_len: 0,
            },
        })
    }

    /// Returns the header with its parts here.
    fn header(&mut self, local: *mut u8, bytes: usize, user: &libc::msghdr) -> *mut libc::msghdr {
        self.buffer = libc::iovec {
            iov_base: local.cast(),
            iov_len: bytes,
        };
        self.header.msg_iov = &raw mut self.buffer;
        self.header.msg_iovlen = 1;
        if !user.msg_name.is_null() {
            self.header.msg_name = self.name.as_mut_ptr().cast();
            self.header.msg_namelen = user.msg_namelen.min(ADDRESS_BYTES as libc::socklen_t);
        }
        if let Some(control) = &self.control {
            self.header.msg_control = control.start().cast();
            self.header.msg_controllen = user.msg_controllen;
        }
        &raw mut self.header
    }
}

unsafe fn receive(fd: usize, message: *mut libc::msghdr, flags: usize) -> isize {
    // SAFETY: the caller's promise: the call may read the header.
    let user = unsafe { ptr::read_unaligned(message) };
    // SAFETY: as above, of the list.
    let Some(buffers) = (unsafe { buffers(&user) }) else {
        return error(libc::EMSGSIZE);
    };
    let Some(bytes) = buffers.bytes() else {
        return error(libc::EINVAL);
    };
    let mut parts = match LocalHeader::new(&user) {
        Ok(parts) => parts,
        Err(error) => return error,
    };
    // Control data comes with the first piece: a stream ends there.
    let plan = TransferPlan::new(fd, bytes, |_| false);
    let plan = if flags & libc::MSG_WAITALL as usize != 0 {
        plan.whole(bytes)
    } else {
        plan
    };
    // SAFETY: local parts; the caller's promise for what they are copied to.
    unsafe {
        let got = pull(buffers, plan, |local, bytes, _| {
            let header = parts.header(local, bytes, &user) as usize;
            system_call(libc::SYS_recvmsg, [fd, header, flags, 0, 0, 0])
        });
        if got >= 0 {
            let header = &parts.header;
            if !user.msg_name.is_null() {
                let bytes = user.msg_namelen.min(header.msg_namelen) as usize;
                let bytes = bytes.min(ADDRESS_BYTES);
                ptr::copy_nonoverlapping(parts.name.as_ptr(), user.msg_name.cast(), bytes);
                (*message).msg_namelen = header.msg_namelen;
            }
            if let Some(control) = &parts.control {
                let bytes = (user.msg_controllen).min(header.msg_controllen);
                ptr::copy_nonoverlapping(control.start(), user.msg_control.cast(), bytes);
            }
            (*message).msg_controllen = header.msg_controllen;
            (*message).msg_flags = header.msg_flags;
        }
        got
    }
}

unsafe fn send(fd: usize, message: *const libc::msghdr, flags: usize) -> isize {
    // SAFETY: the caller's promise: the call may read the header and its parts, which are copied
    // to local ones of the same length.
    unsafe {
        let user = ptr::read_unaligned(message);
        let Some(buffers) = buffers(&user) else {
            return error(libc::EMSGSIZE);
        };
        let Some(bytes) = buffers.bytes() else {
            return error(libc::EMSGSIZE);
        };
        let mut parts = match LocalHeader::new(&user) {
            Ok(parts) => parts,
            Err(error) => return error,
        };
        if !user.msg_name.is_null() {
            let bytes = (user.msg_namelen as usize).min(ADDRESS_BYTES);
            ptr::copy_nonoverlapping(user.msg_name.cast(), parts.name.as_mut_ptr(), bytes);
        }
        if let Some(control) = &parts.control {
            let bytes = user.msg_controllen;
            ptr::copy_nonoverlapping(user.msg_control.cast(), control.start(), bytes);
        }
        let send = |local, bytes, done| {
            let header = parts.header(local, bytes, &user);
            if done > 0 {
                // Descriptors and the like have gone with the first piece.
                (*header).msg_control = ptr::null_mut();
                (*header).msg_controllen = 0;
            }
            system_call(libc::SYS_sendmsg, [fd, header as usize, flags, 0, 0, 0])
        };
        if keeps_memory(libc::SYS_sendmsg, [fd, 0, flags, 0, 0, 0]) {
            give(buffers, bytes, send)
        } else {
            push(buffers, TransferPlan::new(fd, bytes, |_| true), send)
        }
    }
}

/// Moves messages as the kernel does: one after the other, with a look at the time after each.
unsafe fn several(
    fd: usize,
    at: impl Fn(usize) -> usize,
    count: usize,
    mut flags: usize,
    timeout: usize,
    is_receive: bool,
) -> isize {
    let now = || {
        // SAFETY: all zeros is a valid time, which the call fills in.
        let mut time: libc::timespec = unsafe { mem::zeroed() };
        // SAFETY: as above.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
        time.tv_sec as i128 * 1_000_000_000 + time.tv_nsec as i128
    };
    let left = (is_receive && timeout != 0).then(|| {
        // SAFETY: the caller's promise: the call may read and write its timeout.
        let time = unsafe { ptr::read_unaligned(timeout as *const libc::timespec) };
        now() + time.tv_sec as i128 * 1_000_000_000 + time.tv_nsec as i128
    });
    let mut done = 0;
    let mut outcome = 0;
    while done < count {
        let message = at(done) as *mut libc::mmsghdr;
        // SAFETY: the caller's promise.
        outcome = unsafe {
            if is_receive {
                let flags = flags & !(libc::MSG_WAITFORONE as usize);
                receive(fd, &raw mut (*message).msg_hdr, flags)
            } else {
                send(fd, &raw const (*message).msg_hdr, flags)
            }
        };
        if outcome < 0 {
            break;
        }
        // SAFETY: as above.
        unsafe { (*message).msg_len = outcome as libc::c_uint };
        done += 1;
        if flags & libc::MSG_WAITFORONE as usize != 0 {
            flags |= libc::MSG_DONTWAIT as usize;
        }
        if left.is_some_and(|end| now() >= end) {
            break;
        }
    }
    if let Some(end) = left
        && done > 0
    {
        let rest = (end - now()).max(0);
        let rest = libc::timespec {
            tv_sec: (rest / 1_000_000_000) as libc::time_t,
            tv_nsec: (rest % 1_000_000_000) as libc::c_long,
        };
        // SAFETY: as above.
        unsafe { ptr::write_unaligned(timeout as *mut libc::timespec, rest) };
    }
    if done > 0 { done as isize } else { outcome }
}
