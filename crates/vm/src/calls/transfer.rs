//! Reads, writes, receives and sends of plain buffers, through a local one.
//!
//! The rule it keeps: what a call returns is what it would have returned with local memory. More
//! than a piece moves in several calls only where one call could have done the same: in files, and
//! to streams. A stream that is read ends after a piece, as it may. A message is never cut: its
//! local buffer is as long as it is.

use std::{mem, ptr, slice};

use super::{
    local::{Buffers, IsRemote, LocalBuffer, PIECE_BYTES},
    raw::{Arguments, system_call},
};

/// Upper bound of the buffers that the kernel takes.
pub(super) const BUFFERS_MAX: usize = 1024;
/// Length of the longest address of a socket.
pub(super) const ADDRESS_BYTES: usize = 128;

pub(super) fn error(number: libc::c_int) -> isize {
    -(number as isize)
}

/// Kind of data that a descriptor moves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DescriptorKind {
    /// Bytes at positions: only the file's end makes a call shorter.
    File,
    /// Bytes as they come.
    Stream,
    /// Messages, one for each call.
    Messages,
}

impl DescriptorKind {
    pub(super) fn of(fd: usize) -> DescriptorKind {
        // SAFETY: all zeros is a valid answer, which the call fills in.
        let mut stat: libc::stat = unsafe { mem::zeroed() };
        let into = &raw mut stat as usize;
        // SAFETY: asks only.
        if unsafe { system_call(libc::SYS_fstat, [fd, into, 0, 0, 0, 0]) } < 0 {
            return DescriptorKind::Stream;
        }
        match stat.st_mode & libc::S_IFMT {
            libc::S_IFREG | libc::S_IFBLK => DescriptorKind::File,
            libc::S_IFSOCK => DescriptorKind::of_socket(fd),
            _ => DescriptorKind::Stream,
        }
    }

    fn of_socket(fd: usize) -> DescriptorKind {
        let (mut kind, mut bytes) = (0 as libc::c_int, 4 as libc::socklen_t);
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_TYPE as usize);
        let (into, length) = (&raw mut kind as usize, &raw mut bytes as usize);
        let args = [fd, level, option, into, length, 0];
        // SAFETY: asks only.
        unsafe { system_call(libc::SYS_getsockopt, args) };
        if kind == libc::SOCK_STREAM {
            DescriptorKind::Stream
        } else {
            DescriptorKind::Messages
        }
    }
}

/// Plan of a transfer: the length of its pieces, and its end.
#[derive(Clone, Copy)]
pub(super) struct TransferPlan {
    /// Most bytes that move at once.
    pub(super) piece: usize,
    /// True if the transfer goes on after a whole piece.
    goes_on: bool,
}

impl TransferPlan {
    /// Makes a plan for `bytes` bytes. `goes_on` names the kinds whose calls go on after a piece.
    pub(super) fn new(
        fd: usize,
        bytes: usize,
        goes_on: impl FnOnce(DescriptorKind) -> bool,
    ) -> TransferPlan {
        let whole = TransferPlan {
            piece: bytes,
            goes_on: false,
        };
        if bytes <= PIECE_BYTES {
            return whole;
        }
        match DescriptorKind::of(fd) {
            DescriptorKind::Messages => whole,
            kind => TransferPlan {
                piece: PIECE_BYTES,
                goes_on: goes_on(kind),
            },
        }
    }
}

impl TransferPlan {
    /// Returns a plan that moves all `bytes` at once.
    pub(super) fn whole(self, bytes: usize) -> TransferPlan {
        TransferPlan {
            piece: bytes,
            goes_on: false,
        }
    }
}

/// True if the call `number` has a list of buffers.
pub(super) const fn has_list(number: libc::c_long) -> bool {
    matches!(
        number,
        libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_vmsplice
    )
}

/// Returns the buffers of a call; a single buffer is put in `one`. `None`: the call does not move
/// plain bytes.
///
/// # Safety
/// As [`super::call`].
unsafe fn buffers<'a>(
    number: libc::c_long,
    args: Arguments,
    one: &'a mut [libc::iovec; 1],
) -> Option<Buffers<'a>> {
    let [_, at, count, ..] = args;
    match number {
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_pread64
        | libc::SYS_pwrite64
        | libc::SYS_recvfrom
        | libc::SYS_sendto => {
            one[0].iov_base = at as *mut _;
            one[0].iov_len = count;
            Some(Buffers(one))
        }
        _ if has_list(number) && (1..=BUFFERS_MAX).contains(&count) && at != 0 => {
            // SAFETY: the caller's promise: the call may read as many there.
            Some(Buffers(unsafe {
                slice::from_raw_parts(at as *const libc::iovec, count)
            }))
        }
        _ => None,
    }
}

const NO_BUFFER: [libc::iovec; 1] = [libc::iovec {
    iov_base: ptr::null_mut(),
    iov_len: 0,
}];

/// True if a call has remote buffers, or a remote list of them.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn buffers_are_remote(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> bool {
    let (mut one, [_, at, count, ..]) = (NO_BUFFER, args);
    // SAFETY: the caller's promise.
    let buffers = unsafe { buffers(number, args, &mut one) };
    buffers.is_some_and(|buffers| {
        let is_list = buffers.0.as_ptr() as usize == at;
        let list_bytes = count.saturating_mul(mem::size_of::<libc::iovec>());
        buffers.are_remote(is_remote) || is_list && is_remote(at, list_bytes)
    })
}

/// Makes a call that moves plain bytes. `None`: the call is another one, or has no remote buffer.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn call(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> Option<isize> {
    if number == libc::SYS_getrandom {
        // SAFETY: the caller's promise.
        return unsafe { random(args, is_remote) };
    }
    let [fd, _, _, third, fourth, fifth] = args;
    let is_address_remote = number == libc::SYS_recvfrom
        && fourth != 0
        && (is_remote(fourth, ADDRESS_BYTES) || is_remote(fifth, 4));
    // SAFETY: the caller's promise.
    if !is_address_remote && !unsafe { buffers_are_remote(number, args, is_remote) } {
        return None;
    }
    let mut one = NO_BUFFER;
    // SAFETY: the caller's promise.
    let buffers = unsafe { buffers(number, args, &mut one) }?;
    let Some(bytes) = buffers.bytes() else {
        return Some(error(libc::EINVAL));
    };
    let reads = |kind| kind == DescriptorKind::File;
    let at_positions = |_| true;
    // SAFETY: in all of these the caller's promise holds for the buffers, and what the kernel is
    // given in their place is the call's own.
    Some(unsafe {
        match number {
            libc::SYS_read | libc::SYS_readv => pull(
                buffers,
                TransferPlan::new(fd, bytes, reads),
                |local, bytes, _| system_call(libc::SYS_read, [fd, local as usize, bytes, 0, 0, 0]),
            ),
            libc::SYS_write | libc::SYS_writev => push(
                buffers,
                TransferPlan::new(fd, bytes, |_| true),
                |local, bytes, _| {
                    system_call(libc::SYS_write, [fd, local as usize, bytes, 0, 0, 0])
                },
            ),
            libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => {
                let plan = TransferPlan::new(fd, bytes, at_positions);
                pull(buffers, plan, |local, bytes, done| {
                    at_position(libc::SYS_preadv2, args, number, local, bytes, done)
                })
            }
            libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2 => {
                let plan = TransferPlan::new(fd, bytes, at_positions);
                push(buffers, plan, |local, bytes, done| {
                    at_position(libc::SYS_pwritev2, args, number, local, bytes, done)
                })
            }
            libc::SYS_recvfrom => receive(args, buffers),
            libc::SYS_vmsplice => splice(fd, buffers, bytes, third),
            _ => {
                let mut address = [0u8; ADDRESS_BYTES];
                let to = if fourth == 0 || fifth > ADDRESS_BYTES {
                    fourth
                } else {
                    ptr::copy_nonoverlapping(fourth as *const u8, address.as_mut_ptr(), fifth);
                    address.as_ptr() as usize
                };
                let send = |local: *mut u8, bytes, _| {
                    let args = [fd, local as usize, bytes, third, to, fifth];
                    system_call(libc::SYS_sendto, args)
                };
                if keeps_memory(number, args) {
                    give(buffers, bytes, send)
                } else {
                    push(buffers, TransferPlan::new(fd, bytes, |_| true), send)
                }
            }
        }
    })
}

/// True if the kernel keeps references to a call's memory after the call has returned.
pub fn keeps_memory(number: libc::c_long, args: Arguments) -> bool {
    let flags = match number {
        libc::SYS_vmsplice => return true,
        libc::SYS_sendmsg => args[2],
        libc::SYS_sendto | libc::SYS_sendmmsg => args[3],
        _ => return false,
    };
    flags & libc::MSG_ZEROCOPY as usize != 0
}

/// Makes the call `vmsplice`, of at most as much as the pipe can hold. At the end that is read,
/// copies out of the pipe.
unsafe fn splice(fd: usize, buffers: Buffers<'_>, bytes: usize, flags: usize) -> isize {
    let ask = |what: libc::c_int| {
        // SAFETY: asks only.
        unsafe { system_call(libc::SYS_fcntl, [fd, what as usize, 0, 0, 0, 0]) }
    };
    let pipe_bytes = ask(libc::F_GETPIPE_SZ);
    if pipe_bytes < 0 {
        return error(libc::EBADF);
    }
    let bytes = bytes.min(pipe_bytes as usize);
    let splice = |local: *mut u8, bytes, _| {
        let buffer = libc::iovec {
            iov_base: local.cast(),
            iov_len: bytes,
        };
        let args = [fd, &raw const buffer as usize, 1, flags, 0, 0];
        // SAFETY: a local buffer, to which nobody writes any more if the kernel keeps it.
        unsafe { system_call(libc::SYS_vmsplice, args) }
    };
    let reads = ask(libc::F_GETFL) & libc::O_ACCMODE as isize == libc::O_RDONLY as isize;
    let plan = TransferPlan {
        piece: bytes,
        goes_on: false,
    };
    // SAFETY: the caller's promise.
    unsafe {
        if reads {
            pull(buffers, plan, splice)
        } else {
            give(buffers, bytes, splice)
        }
    }
}

/// Makes the call `getrandom`.
unsafe fn random(args: Arguments, is_remote: IsRemote<'_>) -> Option<isize> {
    let [at, bytes, flags, ..] = args;
    let buffer = [libc::iovec {
        iov_base: at as *mut _,
        iov_len: bytes,
    }];
    let plan = TransferPlan {
        piece: PIECE_BYTES.min(bytes),
        goes_on: true,
    };
    is_remote(at, bytes).then(|| {
        // SAFETY: the caller's promise; the kernel is given the call's own buffer.
        unsafe {
            pull(Buffers(&buffer), plan, |local, bytes, _| {
                let args = [local as usize, bytes, flags, 0, 0, 0];
                system_call(libc::SYS_getrandom, args)
            })
        }
    })
}

/// Reads or writes one local buffer at a position.
unsafe fn at_position(
    call: libc::c_long,
    args: Arguments,
    number: libc::c_long,
    local: *mut u8,
    bytes: usize,
    done: usize,
) -> isize {
    let has_flags = number == libc::SYS_preadv2 || number == libc::SYS_pwritev2;
    let (position, flags) = (args[3] as isize, if has_flags { args[5] } else { 0 });
    if position < 0 && !(has_flags && position == -1) {
        return error(libc::EINVAL);
    }
    let buffer = libc::iovec {
        iov_base: local.cast(),
        iov_len: bytes,
    };
    // -1 is the descriptor's own position, which moves by itself.
    let position = if position < 0 {
        usize::MAX
    } else {
        position as usize + done
    };
    let args = [args[0], &raw const buffer as usize, 1, position, 0, flags];
    // SAFETY: the caller's own buffer.
    unsafe { system_call(call, args) }
}

/// Makes the call `recvfrom`. The address and its length are written here, not by the kernel: a
/// message would be gone if that failed.
unsafe fn receive(args: Arguments, buffers: Buffers<'_>) -> isize {
    let [fd, _, _, flags, address, length] = args;
    let mut from = [0u8; ADDRESS_BYTES];
    let mut from_bytes: libc::socklen_t = 0;
    let waits = flags & libc::MSG_WAITALL as usize != 0 && flags & libc::MSG_PEEK as usize == 0;
    let Some(bytes) = buffers.bytes() else {
        return error(libc::EINVAL);
    };
    let plan = TransferPlan::new(fd, bytes, |_| waits);
    let room = if address == 0 || length == 0 {
        None
    } else {
        // SAFETY: the caller's promise: the call may read and write its length.
        Some(unsafe { ptr::read_unaligned(length as *const libc::socklen_t) })
    };
    if room.is_some_and(|room| room > libc::socklen_t::MAX / 2) {
        return error(libc::EINVAL);
    }
    // SAFETY: the local buffer is the call's own, and so are address and length.
    let got = unsafe {
        pull(buffers, plan, |local, bytes, _| {
            from_bytes = ADDRESS_BYTES as libc::socklen_t;
            let (from, length) = match room {
                Some(_) => (from.as_mut_ptr() as usize, &raw mut from_bytes as usize),
                None => (0, 0),
            };
            system_call(
                libc::SYS_recvfrom,
                [fd, local as usize, bytes, flags, from, length],
            )
        })
    };
    if let Some(room) = room
        && got >= 0
    {
        let bytes = room.min(from_bytes) as usize;
        // SAFETY: the caller's promise: the call may write as many there.
        unsafe {
            ptr::copy_nonoverlapping(from.as_ptr(), address as *mut u8, bytes.min(ADDRESS_BYTES));
            ptr::write_unaligned(length as *mut libc::socklen_t, from_bytes);
        }
    }
    got
}

/// Moves bytes from the kernel to the buffers. `read` is given a local buffer, its length, and the
/// number of bytes done before.
///
/// # Safety
/// The buffers may be written.
pub(super) unsafe fn pull(
    buffers: Buffers<'_>,
    plan: TransferPlan,
    mut read: impl FnMut(*mut u8, usize, usize) -> isize,
) -> isize {
    // SAFETY: what `read` has read is in the local buffer; the caller's promise.
    unsafe {
        pieces(buffers, plan, |local, piece, done| {
            let got = read(local, piece, done);
            if got > 0 {
                // A message may have been longer than the buffer.
                buffers.scatter(done, local, piece.min(got as usize));
            }
            got
        })
    }
}

/// Moves bytes from the buffers to the kernel, as [`pull`].
///
/// # Safety
/// The buffers may be read.
pub(super) unsafe fn push(
    buffers: Buffers<'_>,
    plan: TransferPlan,
    mut write: impl FnMut(*mut u8, usize, usize) -> isize,
) -> isize {
    // SAFETY: the local buffer has room for a piece; the caller's promise.
    unsafe {
        pieces(buffers, plan, |local, piece, done| {
            buffers.gather(done, local, piece);
            write(local, piece, done)
        })
    }
}

/// Copies the first `bytes` bytes of the buffers to memory that is never used again, and gives that
/// to the kernel by one call. So each call is counted once where the kernel numbers them
/// (`MSG_ZEROCOPY`).
///
/// # Safety
/// The buffers may be read.
pub(super) unsafe fn give(
    buffers: Buffers<'_>,
    bytes: usize,
    write: impl FnOnce(*mut u8, usize, usize) -> isize,
) -> isize {
    let Some(local) = LocalBuffer::mapped(bytes) else {
        return error(libc::ENOMEM);
    };
    // SAFETY: the local buffer has room for all; the caller's promise.
    unsafe { buffers.gather(0, local.start(), bytes) };
    write(local.start(), bytes, 0)
}

/// Moves pieces, until a piece is not whole or all are done.
unsafe fn pieces(
    buffers: Buffers<'_>,
    plan: TransferPlan,
    mut transfer: impl FnMut(*mut u8, usize, usize) -> isize,
) -> isize {
    let Some(bytes) = buffers.bytes() else {
        return error(libc::EINVAL);
    };
    let Some(local) = LocalBuffer::of(plan.piece) else {
        return error(libc::ENOMEM);
    };
    let mut done = 0;
    loop {
        let piece = plan.piece.min(bytes - done);
        let moved = transfer(local.start(), piece, done);
        if moved < 0 && done > 0 {
            return done as isize;
        }
        if moved < piece as isize || !plan.goes_on || done + piece == bytes {
            return done as isize + moved;
        }
        done += piece;
    }
}
