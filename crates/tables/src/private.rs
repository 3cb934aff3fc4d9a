//! Giving a thread a descriptor table of its own.
//!
//! The rule it keeps: such a table never refers to a pipe, a socket or a lock of the program's, not
//! even for a moment. Other processes would wait for its end.

use std::{
    io,
    ops::RangeInclusive,
    os::fd::{BorrowedFd, IntoRawFd, RawFd},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};

const STANDARD_ERROR: RawFd = 2;

/// Gives the calling thread a table with `kept`, in ascending order, and standard error alone.
/// Standard input and output are an empty file there, so that no descriptor gets their numbers.
pub(crate) fn leave_programs_table(kept: &[RawFd]) -> io::Result<()> {
    let mut kept = kept.to_vec();
    kept.extend(0..=STANDARD_ERROR);
    kept.sort_unstable();
    kept.dedup();
    // The table is copied up to the largest number that is kept.
    let last = kept.last().copied().unwrap_or_default();
    close(last + 1..=RawFd::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    for pair in kept.windows(2) {
        if pair[0] + 1 < pair[1] {
            close(pair[0] + 1..=pair[1] - 1, 0)?;
        }
    }
    stand_in()
}

fn close(numbers: RangeInclusive<RawFd>, flags: u32) -> io::Result<()> {
    // SAFETY: with the flag, the table is this thread's alone from the first call on; the numbers
    // are not used by anybody there.
    let closed =
        unsafe { libc::close_range(*numbers.start() as u32, *numbers.end() as u32, flags as i32) };
    match closed {
        0 => Ok(()),
        _ => {
            let error = io::Error::last_os_error();
            let text = format!(
                "cannot keep descriptors apart from the program's (close_range: {error}; kernel 5.9 or later)"
            );
            Err(io::Error::new(error.kind(), text))
        }
    }
}

/// Puts an empty file in the place of standard input and output, and of standard error if the
/// program has closed it.
fn stand_in() -> io::Result<()> {
    let empty = memfd_create(c"farpage", MFdFlags::MFD_CLOEXEC)?.into_raw_fd();
    for number in 0..=STANDARD_ERROR {
        // SAFETY: the descriptors are this thread's alone.
        unsafe {
            let is_open = fcntl(BorrowedFd::borrow_raw(number), FcntlArg::F_GETFD).is_ok();
            if number != empty && (number != STANDARD_ERROR || !is_open) {
                libc::dup2(empty, number);
            }
        }
    }
    Ok(())
}
