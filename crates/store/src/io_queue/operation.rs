//! One operation of an I/O queue, as its caller sees it: its buffer ([`RunBuffer`]) and its end
//! ([`RunCompletion`]).

use crate::{error::StoreError, page::PageIndex};

/// A local buffer that holds the bytes of a run of pages and can be cut between them and put
/// together again. Never registered with a network adapter: its pages circulate, and pinned pages
/// do not move.
pub trait RunBuffer: AsRef<[u8]> + AsMut<[u8]> + Sized + Send + 'static {
    /// Keeps the first `bytes` (whole pages, not all, not none) and returns the rest.
    fn split_off(&mut self, bytes: usize) -> Self;

    /// Appends `next` if it lies directly behind.
    ///
    /// # Errors
    /// `next`, if it lies elsewhere.
    fn join(&mut self, next: Self) -> Result<(), Self>;
}

impl RunBuffer for Vec<u8> {
    fn split_off(&mut self, bytes: usize) -> Self {
        self.split_off(bytes)
    }

    fn join(&mut self, next: Self) -> Result<(), Self> {
        self.extend(next);
        Ok(())
    }
}

/// Completion of one operation.
#[derive(Debug)]
pub struct RunCompletion<F> {
    /// The operation's tag, as given.
    pub tag: u64,
    /// The frame, as given. Bytes of failed fills are unspecified; a write-back changes none.
    pub frame: F,
    /// Counts of the pages that did not fail.
    pub outcome: RunCounts,
    /// The pages that failed, in ascending order, and why. All other pages are done.
    pub failed: Vec<(PageIndex, StoreError)>,
}

/// Counts of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Pages of a write-back that were unchanged.
    pub clean: u32,
    /// Pages of a write-back whose new bytes are in their store now.
    pub written: u32,
    /// Payload bytes that moved; 0 when no request was needed.
    pub wire_bytes: u64,
}
