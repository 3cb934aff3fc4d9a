//! [`Staging`]: buffers that encoded pages travel in, and [`IoBuf`], what travels.
//!
//! The rule it keeps: the buffers are registered memory, made once and used again, so that an
//! adapter moves them as they lie. Those that are out hold at most [`BYTES_MAX`] together, or one
//! page: they are local memory beside the budget. Whoever takes one puts it back.

use std::{array, sync::Arc};

use farpage_fabric::{
    Buf,
    regmem::{RegBuf, RegError, RegPool},
};

use crate::{Frame, PageIndex, PageStore, StoreError, codec::Coder};

const BYTES_MAX: usize = 4 << 20;

/// Buffers for encoded pages, by page size; made once and used again.
pub(super) struct Staging {
    pool: RegPool,
    /// Kept for this lane, as many as were [`prepare`](Self::prepare)d: taking one takes no lock
    /// and allocates nothing. All others go back to the pool, so that lanes share the memory.
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

    /// Keeps buffers for `pages` pages from now on, as far as they can be had. What is missing is
    /// asked for again by [`take`](Self::take).
    pub(super) fn prepare(&mut self, page_bytes: usize, pages: usize) {
        self.free[page_bytes.ilog2() as usize].reserve_exact(pages);
        let taken: Vec<_> = (0..pages)
            .map_while(|_| self.take(page_bytes).ok().flatten())
            .collect();
        for block in taken {
            self.put(block, page_bytes);
        }
    }

    /// Whether a buffer for a page of `page_bytes` may be taken.
    pub(super) fn has(&self, page_bytes: usize) -> bool {
        self.bytes_out == 0 || self.bytes_out + page_bytes <= BYTES_MAX
    }

    /// A buffer for an encoded page, as long as one can become. `None`: too many are out.
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

/// Why pages stay where they are.
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

/// What travels: pages as they are, or an encoded page.
pub(super) enum IoBuf<F> {
    Frame(F),
    Staging(RegBuf),
}

impl<F: Frame> Buf for IoBuf<F> {
    fn registered(&self) -> Option<&RegBuf> {
        match self {
            Self::Frame(_) => None,
            Self::Staging(block) => Some(block),
        }
    }
}

impl<F: Frame> AsRef<[u8]> for IoBuf<F> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.as_ref(),
            Self::Staging(block) => block.as_ref(),
        }
    }
}

impl<F: Frame> AsMut<[u8]> for IoBuf<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Frame(frame) => frame.as_mut(),
            Self::Staging(block) => block.as_mut(),
        }
    }
}
