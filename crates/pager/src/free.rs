//! Free frames of one page size, by length: [`FreeLists`].
//!
//! The rule: putting a frame back allocates nothing, since a signal handler may do so. Room for all
//! frames that the budget allows is reserved before.

use farpage_vm::Frame;

use crate::run::{keep_first, pages_in};

/// Number of length classes. Frames are kept by the power of two that their number of pages
/// reaches: runs of up to 1023 pages.
const LENGTHS: usize = 10;

/// A stack of frames for each length.
pub(crate) struct FreeLists<F>([Vec<F>; LENGTHS]);

impl<F> Default for FreeLists<F> {
    fn default() -> Self {
        FreeLists(Default::default())
    }
}

impl<F: Frame> FreeLists<F> {
    /// Reserves space for `pages` pages in whatever lengths. Reserved space alone takes no memory.
    pub(crate) fn reserve(&mut self, pages: usize) {
        for (class, frames) in self.0.iter_mut().enumerate() {
            frames.reserve((pages >> class).saturating_sub(frames.len()));
        }
    }

    /// Takes a frame of `pages` pages, cut from a longer one if need be. If there is none and a
    /// `shorter` one will do, takes the longest there is.
    pub(crate) fn take(&mut self, page_bytes: usize, pages: usize, shorter: bool) -> Option<F> {
        let class = pages.ilog2() as usize;
        let long_enough = |frame: &F| pages_in(frame, page_bytes) >= pages;
        // The top of the stack was used last and is warm.
        let fits = (class..LENGTHS).find(|&at| self.0[at].last().is_some_and(long_enough));
        let any = || (0..=class).rev().find(|&at| !self.0[at].is_empty());
        let mut frame = self.0[fits.or_else(|| shorter.then(any).flatten())?].pop()?;
        if let Some(rest) = keep_first(&mut frame, pages, page_bytes) {
            self.put(rest, page_bytes);
        }
        Some(frame)
    }

    pub(crate) fn put(&mut self, frame: F, page_bytes: usize) {
        self.0[pages_in(&frame, page_bytes).ilog2() as usize].push(frame);
    }
}
