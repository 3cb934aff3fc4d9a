//! [`Rest`]: what is left of a vectored transfer, and the target of each of its vectors.

use farpage_wire::data::ANSWER_HEADER_BYTES;

use crate::{memory::ExtentSpan, stream::SocketMessage};

/// Vectors of a transfer, and the target of each.
#[derive(Default)]
pub(crate) struct BatchVectors {
    pub(crate) vectors: Vec<libc::iovec>,
    pub(crate) pieces: Vec<VectorTarget>,
}

/// Target of a vector of a batch.
#[derive(Clone, Copy)]
pub(crate) struct VectorTarget {
    /// The operation's place in the batch.
    pub(crate) op: usize,
    /// True if the vector lies in the operation's span. If not: a header, operands or an old value.
    pub(crate) is_span: bool,
}

impl BatchVectors {
    pub(crate) fn clear(&mut self) {
        self.vectors.clear();
        self.pieces.clear();
    }

    pub(crate) fn push(&mut self, op: usize, bytes: &mut [u8]) {
        self.vectors.push(vector(bytes.as_mut_ptr(), bytes.len()));
        self.pieces.push(VectorTarget { op, is_span: false });
    }

    pub(crate) fn push_span(&mut self, op: usize, span: &ExtentSpan) {
        self.vectors.push(vector(span.as_ptr(), span.len()));
        self.pieces.push(VectorTarget { op, is_span: true });
    }
}

/// Rest of a vectored transfer.
pub(crate) struct Rest<'a> {
    vectors: &'a mut [libc::iovec],
    /// Index of the first vector that is not complete.
    next: usize,
    pub(crate) bytes: u64,
}

impl<'a> Rest<'a> {
    pub(crate) fn new(vectors: &'a mut [libc::iovec]) -> Self {
        let bytes = vectors.iter().map(|vector| vector.iov_len as u64).sum();
        Self {
            vectors,
            next: 0,
            bytes,
        }
    }

    /// Returns the vectors that are not complete, the first without the bytes that have been moved.
    pub(crate) fn left(&self) -> &[libc::iovec] {
        &self.vectors[self.next..]
    }

    /// Returns the index of the first vector that is not complete.
    pub(crate) fn next(&self) -> usize {
        self.next
    }

    /// True if the next byte is the first of an answer.
    pub(crate) fn is_between(&self, pieces: &[VectorTarget]) -> bool {
        !pieces[self.next].is_span && self.vectors[self.next].iov_len == ANSWER_HEADER_BYTES
    }

    pub(crate) fn message(&mut self) -> SocketMessage {
        let left = &mut self.vectors[self.next..];
        SocketMessage::new(left.as_mut_ptr(), left.len())
    }

    pub(crate) fn advance(&mut self, mut bytes: usize) {
        self.bytes -= bytes as u64;
        while self.next < self.vectors.len() && bytes >= self.vectors[self.next].iov_len {
            bytes -= self.vectors[self.next].iov_len;
            self.next += 1;
        }
        if let Some(vector) = self.vectors.get_mut(self.next) {
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(bytes).cast();
            vector.iov_len -= bytes;
        }
    }
}

pub(crate) fn vector(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast(),
        iov_len: len,
    }
}
