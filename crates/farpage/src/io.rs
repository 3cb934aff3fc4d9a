//! System calls on remote memory with in-thread faults.
//!
//! With [`FaultMode::InThread`](crate::FaultMode::InThread) the kernel cannot bring absent pages
//! in: a system call that meets an absent page fails with `EFAULT`, and may lose a datagram. The
//! functions here are the same calls without that failure. Any memory may be given to them, remote
//! or not, and in any mode: memory that is not remote in-thread goes to the kernel unchanged.
//!
//! Remote memory is copied through a buffer of local memory, 128 KiB at a time. So no page has to
//! stay during a call, and a call of any length works with any budget. Reads and writes of files,
//! and writes to streams, transfer all bytes; a read of a stream may end after a piece. A message
//! moves whole, whatever its length.
//!
//! ```no_run
//! use std::{fs::File, io};
//! use farpage::{ByteSize, FaultMode, Runtime};
//!
//! let runtime = Runtime::builder()
//!     .server("shm:///run/farpage.sock")
//!     .budget(ByteSize::mib(256))
//!     .fault_mode(FaultMode::InThread)
//!     .build()?;
//! let mut region = runtime.region(8 << 30)?;
//! let records = File::open("records")?;
//! let bytes = farpage::io::pread(&records, &mut region[..1 << 30], 0)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Errors are those of the calls, as [`io::Error`]: `EINTR` is not hidden. Touching
//! [lost](crate#when-memory-is-lost) memory raises SIGBUS here as everywhere.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd, AsRawFd},
};

use farpage_vm::{calls, sigbus};

/// Makes any system call, with remote memory among its arguments. Calls that can be repeated are
/// repeated while a page is absent. `vmsplice` and sends with `MSG_ZEROCOPY`, after which the
/// kernel keeps references to memory, get a copy that is not used again. `execve`, `io_submit` and
/// `io_uring` want pinned memory; for zero-copy sends by `io_uring` see
/// [`Advice::ZeroCopy`](crate::Advice::ZeroCopy).
///
/// # Errors
/// The system call's.
///
/// # Safety
/// - The call and its arguments are valid for the kernel and permitted to the program.
/// - Memory that the call reads may be read, and memory that it writes may be written.
/// - `number` is no `clone`, `fork`, `vfork` or `rt_sigreturn`.
pub unsafe fn system_call(number: libc::c_long, arguments: [usize; 6]) -> io::Result<usize> {
    let is_remote =
        |at: usize, bytes: usize| bytes > 0 && sigbus::serves(at..at.saturating_add(bytes));
    // SAFETY: the caller's promise.
    let result = unsafe { calls::call(number, arguments, &is_remote, calls::Guesses::NONE) };
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result as i32))
}

/// Makes a system call whose first argument is the descriptor `fd`.
///
/// # Safety
/// As [`system_call`].
unsafe fn on(number: libc::c_long, fd: impl AsFd, arguments: [usize; 5]) -> io::Result<usize> {
    let fd = fd.as_fd().as_raw_fd() as usize;
    let [a, b, c, d, e] = arguments;
    // SAFETY: the caller's promise.
    unsafe { system_call(number, [fd, a, b, c, d, e]) }
}

macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($buffer:ident: $type:ty $(, $more:ident: $kind:ty)*) = $number:ident [$($argument:expr),*];)+) => {
        $($(#[$doc])*
        ///
        /// # Errors
        /// The system call's.
        pub fn $name(fd: impl AsFd, $buffer: $type $(, $more: $kind)*) -> io::Result<usize> {
            let arguments = [$buffer.as_ptr() as usize, $buffer.len(), $($argument),*];
            // SAFETY: the buffers are borrowed for the call, exclusively where it writes, and an
            // `IoSlice` is an `iovec`.
            unsafe { on(libc::$number, fd, arguments) }
        })+
    };
}

calls! {
    /// Reads at most as many bytes as the buffer has: `read(2)`.
    fn read(buffer: &mut [u8]) = SYS_read [0, 0, 0];
    /// Writes at most as many bytes as the buffer has: `write(2)`.
    fn write(buffer: &[u8]) = SYS_write [0, 0, 0];
    /// Reads at a position: `pread(2)`.
    fn pread(buffer: &mut [u8], position: u64) = SYS_pread64 [position as usize, 0, 0];
    /// Writes at a position: `pwrite(2)`.
    fn pwrite(buffer: &[u8], position: u64) = SYS_pwrite64 [position as usize, 0, 0];
    /// Reads into several buffers, one after the other: `readv(2)`.
    fn readv(buffers: &mut [IoSliceMut<'_>]) = SYS_readv [0, 0, 0];
    /// Writes from several buffers, one after the other: `writev(2)`.
    fn writev(buffers: &[IoSlice<'_>]) = SYS_writev [0, 0, 0];
    /// Reads at a position into several buffers: `preadv(2)`.
    fn preadv(buffers: &mut [IoSliceMut<'_>], position: u64) = SYS_preadv [position as usize, 0, 0];
    /// Writes at a position from several buffers: `pwritev(2)`.
    fn pwritev(buffers: &[IoSlice<'_>], position: u64) = SYS_pwritev [position as usize, 0, 0];
    /// Receives from a socket, with flags such as `MSG_PEEK`: `recv(2)`.
    fn recv(buffer: &mut [u8], flags: i32) = SYS_recvfrom [flags as usize, 0, 0];
    /// Sends to a connected socket, with flags such as `MSG_NOSIGNAL`: `send(2)`.
    fn send(buffer: &[u8], flags: i32) = SYS_sendto [flags as usize, 0, 0];
}

/// Receives from a socket, and returns the sender's address: `recvfrom(2)`. `None` if the socket is
/// connected or the address is no Internet address.
///
/// # Errors
/// The system call's.
pub fn recvfrom(
    fd: impl AsFd,
    buffer: &mut [u8],
    flags: i32,
) -> io::Result<(usize, Option<SocketAddr>)> {
    // SAFETY: all zeros is an address of no family.
    let mut from: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let mut from_bytes = mem::size_of_val(&from) as libc::socklen_t;
    let arguments = [
        buffer.as_mut_ptr() as usize,
        buffer.len(),
        flags as usize,
        &raw mut from as usize,
        &raw mut from_bytes as usize,
    ];
    // SAFETY: the buffer is borrowed for the call; the address and its length are this function's.
    let bytes = unsafe { on(libc::SYS_recvfrom, fd, arguments) }?;
    Ok((bytes, address(&from)))
}

/// Sends to an address: `sendto(2)`.
///
/// # Errors
/// The system call's.
pub fn sendto(fd: impl AsFd, buffer: &[u8], flags: i32, to: SocketAddr) -> io::Result<usize> {
    let (address, bytes) = raw_address(to);
    let arguments = [
        buffer.as_ptr() as usize,
        buffer.len(),
        flags as usize,
        &raw const address as usize,
        bytes,
    ];
    // SAFETY: the buffer is borrowed for the call; the address is this function's.
    unsafe { on(libc::SYS_sendto, fd, arguments) }
}

/// Receives a message with its address and control data: `recvmsg(2)`.
///
/// # Errors
/// The system call's.
///
/// # Safety
/// The message's pointers are to memory of the lengths that it states, which nobody else uses.
pub unsafe fn recvmsg(fd: impl AsFd, message: &mut libc::msghdr, flags: i32) -> io::Result<usize> {
    let arguments = [&raw mut *message as usize, flags as usize, 0, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { on(libc::SYS_recvmsg, fd, arguments) }
}

/// Sends a message with an address and control data: `sendmsg(2)`.
///
/// # Errors
/// The system call's.
///
/// # Safety
/// The message's pointers are to memory of the lengths that it states, which nobody writes.
pub unsafe fn sendmsg(fd: impl AsFd, message: &libc::msghdr, flags: i32) -> io::Result<usize> {
    let arguments = [&raw const *message as usize, flags as usize, 0, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { on(libc::SYS_sendmsg, fd, arguments) }
}

fn address(raw: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(raw.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says so, and the storage is longer.
            let raw = unsafe { &*(&raw const *raw).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { &*(&raw const *raw).cast::<libc::sockaddr_in6>() };
            let (ip, port) = (
                Ipv6Addr::from(raw.sin6_addr.s6_addr),
                u16::from_be(raw.sin6_port),
            );
            Some(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
        }
        _ => None,
    }
}

fn raw_address(address: SocketAddr) -> (libc::sockaddr_storage, usize) {
    // SAFETY: all zeros is an address of no family.
    let mut raw: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let at = &raw mut raw;
    let bytes = match address {
        SocketAddr::V4(v4) => {
            // SAFETY: the storage is long enough for an address of any family.
            let raw = unsafe { &mut *at.cast::<libc::sockaddr_in>() };
            raw.sin_family = libc::AF_INET as libc::sa_family_t;
            raw.sin_port = v4.port().to_be();
            raw.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            mem::size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            // SAFETY: as above.
            let raw = unsafe { &mut *at.cast::<libc::sockaddr_in6>() };
            raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            raw.sin6_port = v6.port().to_be();
            raw.sin6_addr.s6_addr = v6.ip().octets();
            raw.sin6_flowinfo = v6.flowinfo();
            raw.sin6_scope_id = v6.scope_id();
            mem::size_of::<libc::sockaddr_in6>()
        }
    };
    (raw, bytes)
}
