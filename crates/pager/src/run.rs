//! Runs: neighbouring pages that travel together, and what is cut off them.
//!
//! The page is the unit of the protocol; the run is the unit of everything that costs a system call, a request or a wake-up. The rule: a run is a list
//! of pages that one worker owns, next to each other in one stripe of one region, with the frame that holds (or will hold) their bytes in order.

use std::ops::Range;

use farpage_vm::Frame;

/// Bytes that move together at most: a longer run makes who waits for its first page wait longer, and costs hardly less per byte (a
/// move of 1 MiB takes 60 us, of which the system call and its TLB shootdown are 2).
pub(crate) const RUN_BYTES_MAX: usize = 512 << 10;

/// A frame of the address space, as the store wants it.
#[derive(Debug)]
pub(crate) struct Local<F>(pub(crate) F);

impl<F: Frame> AsRef<[u8]> for Local<F> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<F: Frame> AsMut<[u8]> for Local<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut()
    }
}

impl<F: Frame> farpage_store::Frame for Local<F> {
    fn split_off(&mut self, bytes: usize) -> Self {
        Local(self.0.split_off(bytes))
    }

    fn join(&mut self, next: Self) -> Result<(), Self> {
        self.0.join(next.0).map_err(Local)
    }
}

/// How many pages a frame holds.
pub(crate) fn pages_in<F: Frame>(frame: &F, page_bytes: usize) -> usize {
    frame.as_ref().len() / page_bytes
}

/// Keeps the first `pages` of a frame, which holds at least as many; returns the rest, if there is one.
pub(crate) fn keep_first<F: Frame>(frame: &mut F, pages: usize, page_bytes: usize) -> Option<F> {
    (pages < pages_in(frame, page_bytes)).then(|| frame.split_off(pages * page_bytes))
}

/// Cuts a run into stretches of pages of the same kind.
pub(crate) fn cut<F: Frame, K: PartialEq>(
    pages: Range<usize>,
    page_bytes: usize,
    frame: F,
    kind: impl Fn(usize) -> K,
    mut each: impl FnMut(Range<usize>, F, K),
) {
    let mut rest = Some(frame);
    let mut from = pages.start;
    while let Some(mut frame) = rest.take() {
        let of = kind(from);
        let to = (from + 1..pages.end)
            .find(|&page| kind(page) != of)
            .unwrap_or(pages.end);
        rest = keep_first(&mut frame, to - from, page_bytes);
        each(from..to, frame, of);
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that know where they lie.
    #[derive(Debug, PartialEq)]
    struct Bytes(usize, Vec<u8>);

    impl AsRef<[u8]> for Bytes {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }

    impl AsMut<[u8]> for Bytes {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.1
        }
    }

    impl Frame for Bytes {
        fn split_off(&mut self, bytes: usize) -> Self {
            Bytes(self.0 + bytes, self.1.split_off(bytes))
        }

        fn join(&mut self, next: Self) -> Result<(), Self> {
            if self.0 + self.1.len() != next.0 {
                return Err(next);
            }
            self.1.extend(next.1);
            Ok(())
        }
    }

    #[test]
    fn a_cut_run_keeps_each_page_with_its_bytes() {
        let bytes = Bytes(0, (0..8).map(|i| i / 2 + 10).collect());
        let mut seen = Vec::new();
        cut(
            10..14,
            2,
            bytes,
            |page| page == 12,
            |pages, frame, odd| {
                seen.push((pages, frame.1, odd));
            },
        );
        let expected = [
            (10..12, vec![10, 10, 11, 11], false),
            (12..13, vec![12, 12], true),
            (13..14, vec![13, 13], false),
        ];
        assert_eq!(seen, expected);
    }
}
