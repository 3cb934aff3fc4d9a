//! [`Kept`]: descriptors of the runtime's in a process made by `fork`.
//!
//! The rule it keeps: the program may close each, and open another file under its number.

use std::{
    mem,
    os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd},
};

/// Least number of a descriptor that a child keeps, if its limit allows: programs close the low
/// ones.
const DESCRIPTORS_FROM: RawFd = 900;

/// A descriptor that the program may close.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    number: RawFd,
    file: Option<(u64, u64)>,
}

impl Kept {
    /// Keeps a descriptor open, under a number that programs seldom close.
    pub(super) fn keep(descriptor: OwnedFd) -> Kept {
        // SAFETY: makes a descriptor.
        let high = unsafe {
            libc::fcntl(
                descriptor.as_raw_fd(),
                libc::F_DUPFD_CLOEXEC,
                DESCRIPTORS_FROM,
            )
        };
        let number = match high {
            0.. => high,
            _ => descriptor.into_raw_fd(),
        };
        Kept {
            number,
            file: file_of(number),
        }
    }

    /// Closes the descriptor, unless the program has.
    pub(super) fn close(&self) {
        if self.file.is_some() && file_of(self.number) == self.file {
            // SAFETY: this process's copy, which nobody else uses.
            unsafe { libc::close(self.number) };
        }
    }
}

/// Returns device and number of the file under a descriptor.
fn file_of(descriptor: RawFd) -> Option<(u64, u64)> {
    // SAFETY: all zeros is a valid value, which is written before it is read.
    unsafe {
        let mut status: libc::stat = mem::zeroed();
        (libc::fstat(descriptor, &raw mut status) == 0).then_some((status.st_dev, status.st_ino))
    }
}
