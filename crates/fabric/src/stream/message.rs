//! [`SocketMessage`]: bytes that lie in several places, sent or received at once.
//!
//! The rule it keeps: no reference is made to memory that others may change.

use std::{
    io, ptr,
    sync::atomic::{Ordering, fence},
};

use crate::nonblocking::retry;

/// A `msghdr` with nothing but its vectors: `writev` would raise SIGPIPE in a program that has not
/// masked it.
pub(crate) struct SocketMessage(libc::msghdr);

impl SocketMessage {
    pub(crate) fn new(vectors: *mut libc::iovec, count: usize) -> Self {
        // SAFETY: a `msghdr` is plain data, and all zeros is one without name, vectors and control
        // data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = vectors;
        header.msg_iovlen = count as _;
        Self(header)
    }

    pub(super) fn vectors(&self) -> &[libc::iovec] {
        // SAFETY: what it was made of, which its maker keeps while it uses the message.
        unsafe { std::slice::from_raw_parts(self.0.msg_iov, self.0.msg_iovlen as _) }
    }

    /// Fills the vectors, in order, with as many of `bytes` as fit. Returns their number.
    ///
    /// # Safety
    /// The vectors point to memory that can be written, and to which no reference exists.
    pub(crate) unsafe fn fill(&mut self, bytes: &[u8]) -> usize {
        let mut left = bytes;
        for vector in self.vectors() {
            let (now, rest) = left.split_at(left.len().min(vector.iov_len));
            // SAFETY: promised by the caller for all bytes of the vector, which has at least these.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), vector.iov_base.cast(), now.len()) };
            // A thread that sees the bytes of a later vector sees these.
            fence(Ordering::Release);
            left = rest;
        }
        bytes.len() - left.len()
    }

    /// Copies the bytes that the vectors point to.
    ///
    /// # Safety
    /// The vectors point to memory that can be read, and to which no reference exists that is
    /// written through.
    pub(crate) unsafe fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for vector in self.vectors() {
            let have = bytes.len();
            bytes.resize(have + vector.iov_len, 0);
            let from = vector.iov_base.cast_const().cast::<u8>();
            // SAFETY: promised by the caller; the destination was just made.
            unsafe { ptr::copy_nonoverlapping(from, bytes[have..].as_mut_ptr(), vector.iov_len) };
        }
        bytes
    }

    pub(crate) fn get(&mut self) -> *mut libc::msghdr {
        &raw mut self.0
    }
}

/// Moves as many bytes of `vectors` as go at once, each vector by `step`, which may move only a
/// vector's beginning.
///
/// A vector that was not moved whole is the last: the caller comes again with the rest.
pub(super) fn gather(
    vectors: &[libc::iovec],
    mut step: impl FnMut(&libc::iovec) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut moved = 0;
    for vector in vectors {
        match step(vector) {
            Ok(bytes) if bytes == vector.iov_len => moved += bytes,
            Ok(bytes) => return Ok(moved + bytes),
            Err(error) if moved > 0 && retry(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(moved)
}
