//! [`Residency`]: what moves an extent's bytes out of memory and back.
//!
//! The rule it keeps: a byte that is touched through the mapping is held meanwhile.

use std::{fmt, io, time::Instant};

use super::words::SegmentWords;

/// A mover of an extent's bytes: out of its memory while they are unused, and back.
///
/// A byte may be touched through the mapping only while it is *held*: a touched hole would read as
/// zeros and take memory that no limit counts. A thread that holds bytes waits for nothing
/// meanwhile, so that a hold is as short as one system call that does not block.
pub trait Residency: fmt::Debug + Send + Sync {
    /// Holds bytes in memory, from `offset` on and `len` at most. Returns their number.
    ///
    /// With `until` the first byte is brought in if it is elsewhere, so at least one is held.
    /// Bringing in begins before `until` and waits beyond it only for a disk that has begun to
    /// read. The caller holds nothing else then, or two callers could wait for each other. Without
    /// `until`, bytes are held only up to the first that is elsewhere, perhaps none.
    ///
    /// # Errors
    /// The reason why the first byte is not held. No byte is.
    fn hold(&self, offset: u64, len: u64, until: Option<Instant>) -> Result<u64, Absent>;

    /// Hands the `len` bytes at `offset` to `take` if they are elsewhere, and not worth bringing
    /// into memory for this READ alone. `take` waits for nothing. Returns `false` if the bytes are
    /// to be held instead.
    ///
    /// # Errors
    /// The errors of [`hold`](Self::hold), when `take` has not been called.
    fn pass(
        &self,
        offset: u64,
        len: u64,
        until: Instant,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Absent>;

    /// Ends a hold of the bytes that [`hold`](Self::hold) returned.
    fn let_go(&self, offset: u64, len: u64);

    /// Returns the extent's [`SegmentWords`], for a client that reaches the memory by itself. From
    /// now on that client may touch the bytes that the words mark as present.
    ///
    /// # Errors
    /// The kernel's error.
    fn share(&self) -> io::Result<&SegmentWords>;
}

/// Bytes of an extent that are held in memory until this is dropped.
pub(crate) struct HeldBytes<'a> {
    residency: &'a dyn Residency,
    offset: u64,
    /// Number of bytes that are held, perhaps none.
    pub(crate) len: u64,
}

impl<'a> HeldBytes<'a> {
    /// Holds bytes as [`Residency::hold`] does.
    ///
    /// # Errors
    /// The errors of [`Residency::hold`].
    pub(crate) fn take(
        residency: &'a dyn Residency,
        offset: u64,
        len: u64,
        until: Option<Instant>,
    ) -> Result<Self, Absent> {
        let len = residency.hold(offset, len, until)?;
        Ok(Self {
            residency,
            offset,
            len,
        })
    }
}

impl Drop for HeldBytes<'_> {
    fn drop(&mut self) {
        if self.len > 0 {
            self.residency.let_go(self.offset, self.len);
        }
    }
}

/// Reason why bytes cannot be brought into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// All memory was in use until the wait ended, or the disk was too slow.
    #[error("no memory came free for it in time, or its bytes did not come back in time")]
    NoRoom,
    /// The bytes could not be read back, or are not as they were stored.
    #[error("its bytes cannot be read back from where they were moved to")]
    Unreadable,
    /// The lease has ended.
    #[error("its lease has ended")]
    Released,
}
