//! [`Staging`]: buffers that encoded pages travel in, and [`IoBuf`], the buffer of a request.
//!
//! The rule it keeps: the buffers are registered memory, made once and used again, so that an
//! adapter moves them as they lie. Buffers that are out hold at most [`BYTES_MAX`] together, or one
//! page: they are local memory beside the budget. The I/O queue puts back each buffer that it
//! takes.

use std::{array, sync::Arc};

use farpage_fabric::{
    Buf,
    regmem::{RegBuf, RegError, RegPool},
};

use super::run::RunBuffer;
use crate::{PageIndex, PageStore, StoreError, codec::Coder};

const BYTES_MAX: usize = 4 << 20;

/// Buffers for encoded pages, by page size; made once and used again.
pub(super) struct Staging {
    pool: RegPool,
    /// Buffers kept for this I/O queue, as many as were [`prepare`](Self::prepare)d: taking one
    /// takes no lock and allocates nothing. Others go back to the pool, so that I/O queues share
    /// the memory.
    free: [Vec<RegBuf>; 32],
    /// Plain lengths of the pages whose buffers are out.
    bytes_out: usize,
}

impl Staging {
    pub(super) fn new(pool: RegPool) -> Self {
        Self {
            pool,
            free: array::from_fn(|_| Vec::new()),
            bytes_out: 0,
        }
    }

    /// Keeps buffers for `pages` pages from now on, as far as they can be had. [`take`](Self::take)
    /// asks again for missing buffers.
    pub(super) fn prepare(&mut self, page_bytes: usize, pages: usize) {
        self.free[page_bytes.ilog2() as usize].reserve_exact(pages);
        let taken: Vec<_> = (0..pages)
            .map_while(|_| self.take(page_bytes).ok().flatten())
            .collect();
        for block in taken {
            self.put(block, page_bytes);
        }
    }

    /// True if a buffer for a page of `page_bytes` may be taken.
    pub(super) fn has(&self, page_bytes: usize) -> bool {
        self.bytes_out == 0 || self.bytes_out + page_bytes <= BYTES_MAX
    }

    /// Takes a buffer that holds any encoded page of `page_bytes`. `None`: too many are out.
    pub(super) fn take(&mut self, page_bytes: usize) -> Result<Option<RegBuf>, RegError> {
        if !self.has(page_bytes) {
            return Ok(None);
        }
        let block = match self.free[page_bytes.ilog2() as usize].pop() {
            Some(block) => block,
            None => self.pool.acquire(Coder::bound(page_bytes))?,
        };
        self.bytes_out += page_bytes;
        Ok(Some(block))
    }

    /// Takes a buffer back, or lets it go back to the pool.
    pub(super) fn put(&mut self, buffer: RegBuf, page_bytes: usize) {
        self.bytes_out -= page_bytes;
        let free = &mut self.free[page_bytes.ilog2() as usize];
        if free.len() < free.capacity() {
            free.push(buffer);
        }
    }
}

/// Returns the error of pages that have no buffer to travel in.
pub(super) fn no_memory(
    store: &PageStore,
    error: RegError,
) -> impl Fn(PageIndex) -> StoreError + use<> {
    let region = store.label.clone();
    let source = Arc::new(error);
    move |page| StoreError::Memory {
        region: region.clone(),
        page: page.number(),
        source: source.clone(),
    }
}

/// Buffer of a request: pages as they are, or an encoded page.
pub(super) enum IoBuf<F> {
    Frame(F),
    Staging(RegBuf),
}

impl<F: RunBuffer> Buf for IoBuf<F> {
    fn registered(&self) -> Option<&RegBuf> {
        match self {
            Self::Frame(_) => None,
            Self::Staging(block) => Some(block),
        }
    }
}

impl<F: RunBuffer> AsRef<[u8]> for IoBuf<F> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.as_ref(),
            Self::Staging(block) => block.as_ref(),
        }
    }
}

impl<F: RunBuffer> AsMut<[u8]> for IoBuf<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Frame(frame) => frame.as_mut(),
            Self::Staging(block) => block.as_mut(),
        }
    }
}
