//! [`Staging`]: buffers that encoded pages travel in, and [`IoBuf`], what travels.
//!
//! The rule it keeps: buffers that are out hold at most [`BYTES_MAX`] together, or one page: they are local memory beside
//! the budget. Whoever takes one puts it back.

use farpage_fabric::Buf;

use crate::{Frame, codec::Encoder};

const BYTES_MAX: usize = 4 << 20;

/// Buffers for encoded pages, by page size; made once and used again.
#[derive(Default)]
pub(super) struct Staging {
    free: [Vec<Vec<u8>>; 32],
    /// Plain lengths of the pages whose buffers are out.
    bytes_out: usize,
}

impl Staging {
    /// Whether a buffer for a page of so many bytes may be taken.
    pub(super) fn has(&self, page_bytes: usize) -> bool {
        self.bytes_out == 0 || self.bytes_out + page_bytes <= BYTES_MAX
    }

    /// A buffer for an encoded page, as long as one can become.
    pub(super) fn take(&mut self, page_bytes: usize) -> Option<Vec<u8>> {
        if !self.has(page_bytes) {
            return None;
        }
        self.bytes_out += page_bytes;
        let free = &mut self.free[page_bytes.ilog2() as usize];
        Some(
            free.pop()
                .unwrap_or_else(|| vec![0; Encoder::bound(page_bytes)]),
        )
    }

    pub(super) fn put(&mut self, buffer: Vec<u8>, page_bytes: usize) {
        self.bytes_out -= page_bytes;
        self.free[page_bytes.ilog2() as usize].push(buffer);
    }
}

/// What travels: pages as they are, or an encoded page.
pub(super) enum IoBuf<F> {
    Frame(F),
    Staging(Vec<u8>),
}

impl<F: Frame> Buf for IoBuf<F> {}

impl<F: Frame> AsRef<[u8]> for IoBuf<F> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.as_ref(),
            Self::Staging(bytes) => bytes,
        }
    }
}

impl<F: Frame> AsMut<[u8]> for IoBuf<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Frame(frame) => frame.as_mut(),
            Self::Staging(bytes) => bytes,
        }
    }
}
