//! Frames of the simulated space: [`SimFrame`].
//!
//! The rule it keeps: each page has a number of its own, so that only a frame that was cut can be
//! joined again.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::space::Frame;

/// Counters of all frames together.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// Number of pages that the frames hold.
    pub(super) pages: AtomicUsize,
    /// Place of the next page: a number of its own for every page.
    next_place: AtomicUsize,
}

/// The bytes of a run of pages while they are not mapped.
#[derive(Debug)]
pub struct SimFrame {
    bytes: Vec<u8>,
    page_bytes: usize,
    /// The first page's number: frames lie behind one another if their numbers do.
    place: usize,
    frames: Arc<Frames>,
}

impl SimFrame {
    /// Makes a frame of `bytes`, which lies behind no other.
    pub(super) fn new(frames: &Arc<Frames>, bytes: Vec<u8>, page_bytes: usize) -> Self {
        let pages = bytes.len() / page_bytes;
        frames.pages.fetch_add(pages, Ordering::Relaxed);
        // A gap of one keeps frames that were made one after the other from being joined.
        let place = frames.next_place.fetch_add(pages + 1, Ordering::Relaxed);
        Self {
            bytes,
            page_bytes,
            place,
            frames: Arc::clone(frames),
        }
    }

    /// Takes the first page out, which is mapped now.
    pub(super) fn drop_first(&mut self) {
        self.bytes.drain(..self.page_bytes);
        self.place += 1;
        self.frames.pages.fetch_sub(1, Ordering::Relaxed);
    }

    fn pages(&self) -> usize {
        self.bytes.len() / self.page_bytes
    }
}

impl AsRef<[u8]> for SimFrame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for SimFrame {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Frame for SimFrame {
    fn split_off(&mut self, bytes: usize) -> Self {
        assert!(
            bytes > 0 && bytes < self.bytes.len() && bytes.is_multiple_of(self.page_bytes),
            "{} bytes in pages of {} can not be split after {bytes}",
            self.bytes.len(),
            self.page_bytes
        );
        let rest = self.bytes.split_off(bytes);
        Self {
            bytes: rest,
            page_bytes: self.page_bytes,
            place: self.place + self.pages(),
            frames: Arc::clone(&self.frames),
        }
    }

    fn join(&mut self, mut next: Self) -> Result<(), Self> {
        let behind = Arc::ptr_eq(&self.frames, &next.frames)
            && self.page_bytes == next.page_bytes
            && self.place + self.pages() == next.place;
        if !behind {
            return Err(next);
        }
        self.bytes.append(&mut next.bytes);
        Ok(())
    }
}

impl Drop for SimFrame {
    fn drop(&mut self) {
        self.frames.pages.fetch_sub(self.pages(), Ordering::Relaxed);
    }
}
