//! Runs: neighbouring pages that travel together, and the stretches cut off them.
//!
//! The page is the unit of the protocol. The run is the unit of whatever costs a system call, a
//! request or a wake-up. The rule: a [`PageRun`] is pages of one stripe of one region, which one
//! worker owns, with the frame that holds their bytes in order.

use farpage_store::{PageIndex, PageRange, RunBuffer};
use farpage_vm::Frame;

/// Upper bound of the bytes that move together. A longer run delays the thread that waits for the
/// first page and saves almost nothing per byte: a move of 1 MiB takes 60 us, of which the system
/// call and its TLB shootdown are 2.
pub(crate) const RUN_BYTES_MAX: usize = 512 << 10;

/// Pages in a row with the frame of their bytes.
#[derive(Debug)]
pub(crate) struct PageRun<F> {
    pages: PageRange,
    frame: F,
    page_bytes: usize,
}

impl<F: Frame> PageRun<F> {
    /// Makes a run of the pages from `first` on, as many as `frame` holds.
    pub(crate) fn new(first: PageIndex, frame: F, page_bytes: usize) -> PageRun<F> {
        let pages = first.and_on(pages_in(&frame, page_bytes));
        PageRun {
            pages,
            frame,
            page_bytes,
        }
    }

    pub(crate) fn pages(&self) -> PageRange {
        self.pages
    }

    pub(crate) fn first(&self) -> PageIndex {
        self.pages.start
    }

    /// Returns the number of pages.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns each page with its bytes.
    pub(crate) fn bytes_by_page(&self) -> impl Iterator<Item = (PageIndex, &[u8])> {
        let bytes = self.frame.as_ref().chunks_exact(self.page_bytes);
        self.pages.iter().zip(bytes)
    }

    pub(crate) fn into_frame(self) -> F {
        self.frame
    }

    /// Keeps the first `pages`. Returns the rest, if there is one.
    pub(crate) fn keep_first(&mut self, pages: usize) -> Option<PageRun<F>> {
        let frame = keep_first(&mut self.frame, pages, self.page_bytes)?;
        self.pages.end = self.pages.start + pages;
        Some(PageRun::new(self.pages.end, frame, self.page_bytes))
    }

    /// Hands out stretches of pages of the same kind, in order.
    pub(crate) fn cut<K: PartialEq>(
        self,
        kind: impl Fn(PageIndex) -> K,
        mut each: impl FnMut(PageRun<F>, K),
    ) {
        let mut rest = Some(self);
        while let Some(mut run) = rest.take() {
            let of = kind(run.first());
            // Each page is asked about once: the answer may change while the page is taken.
            let others = (1..run.len()).find(|&at| kind(run.first() + at) != of);
            rest = run.keep_first(others.unwrap_or(run.len()));
            each(run, of);
        }
    }
}

impl<F: Frame> AsRef<[u8]> for PageRun<F> {
    fn as_ref(&self) -> &[u8] {
        self.frame.as_ref()
    }
}

impl<F: Frame> AsMut<[u8]> for PageRun<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        self.frame.as_mut()
    }
}

impl<F: Frame> RunBuffer for PageRun<F> {
    fn split_off(&mut self, bytes: usize) -> Self {
        let rest = self.keep_first(bytes / self.page_bytes);
        rest.expect("some pages are split off")
    }

    fn join(&mut self, mut next: Self) -> Result<(), Self> {
        match self.frame.join(next.frame) {
            Ok(()) => {
                self.pages.end = next.pages.end;
                Ok(())
            }
            Err(frame) => {
                next.frame = frame;
                Err(next)
            }
        }
    }
}

/// Returns the number of pages that a frame holds.
pub(crate) fn pages_in<F: Frame>(frame: &F, page_bytes: usize) -> usize {
    frame.as_ref().len() / page_bytes
}

/// Keeps the first `pages` of a frame, which holds at least as many. Returns the rest, if there is
/// one.
pub(crate) fn keep_first<F: Frame>(frame: &mut F, pages: usize, page_bytes: usize) -> Option<F> {
    (pages < pages_in(frame, page_bytes)).then(|| frame.split_off(pages * page_bytes))
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
        let run = PageRun::new(PageIndex(10), bytes, 2);
        assert_eq!((run.pages(), run.len()), (PageIndex(10).and_on(4), 4));
        let by_page: Vec<_> = run.bytes_by_page().map(|(page, _)| page.0).collect();
        assert_eq!(by_page, [10, 11, 12, 13]);
        let mut seen = Vec::new();
        run.cut(
            |page| page == PageIndex(12),
            |run, odd| {
                seen.push((run.pages(), run.into_frame().1, odd));
            },
        );
        let expected = [
            (PageIndex(10).and_on(2), vec![10, 10, 11, 11], false),
            (PageIndex(12).alone(), vec![12, 12], true),
            (PageIndex(13).alone(), vec![13, 13], false),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_run_that_was_split_for_its_requests_is_joined_again() {
        let bytes = Bytes(0, (0..8).collect());
        let mut run = PageRun::new(PageIndex(10), bytes, 2);
        let mut rest = run.split_off(2);
        let last = rest.split_off(4);
        assert_eq!(
            (run.len(), rest.pages(), last.first()),
            (1, PageIndex(11).and_on(2), PageIndex(13))
        );
        let last = run.join(last).expect_err("the pages between are missing");
        run.join(rest).expect("it lies behind");
        run.join(last).expect("it lies behind");
        assert_eq!(
            (run.pages(), run.into_frame().1),
            (PageIndex(10).and_on(4), (0..8).collect())
        );
    }
}
