//! Results of calls into C as errors.

use std::{ffi::c_int, io, os::fd::BorrowedFd, ptr::NonNull};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Returns the error of a call that has not returned 0.
pub(super) fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // Some calls return the error instead of setting it.
        errno => Err(io::Error::from_raw_os_error(errno.abs())),
    }
}

/// Returns the error of a call that has returned no object.
pub(super) fn not_null<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
