//! The arithmetic of moving a run out: its progress, and the holes in it ([`Progress`]).
//!
//! The rule it keeps: nothing is moved here, only counted. All offsets are bytes from the start of
//! the run. A *hole* is a kernel page that the program has dropped out of a larger page.

use std::ops::Range;

use crate::sys::KERNEL_PAGE_BYTES;

/// Progress of a run that moves out.
#[derive(Debug)]
pub(super) struct Progress {
    len: usize,
    page_bytes: usize,
    /// Offset before which all has moved, or is a hole.
    done: usize,
    /// Offset at which the next move ends.
    end: usize,
    first_hole: Option<usize>,
    last_hole: Range<usize>,
}

impl Progress {
    /// Makes the progress of a run of `len` bytes in pages of `page_bytes`.
    pub(super) fn new(len: usize, page_bytes: usize) -> Self {
        Self {
            len,
            page_bytes,
            done: 0,
            end: len,
            first_hole: None,
            last_hole: 0..0,
        }
    }

    /// Returns the range to move next. `None`: the run has ended.
    pub(super) fn next(&mut self) -> Option<Range<usize>> {
        if self.done == self.len {
            return None;
        }
        if self.done == self.end {
            self.end += self.page_bytes;
        }
        Some(self.done..self.end)
    }

    /// Notes that all of the range moved.
    pub(super) fn moved(&mut self) {
        self.done = self.end;
    }

    /// Narrows the range to its first page, after a refusal of the whole because it spans two
    /// mappings. `false`: the range was no more than that.
    pub(super) fn narrow(&mut self) -> bool {
        let page_end = self.done - self.done % self.page_bytes + self.page_bytes;
        let is_narrower = page_end < self.end;
        if is_narrower {
            self.end = page_end;
        }
        is_narrower
    }

    /// Notes that `done_bytes` of the range moved before a refusal. The rest may be tried again.
    pub(super) fn stopped(&mut self, done_bytes: usize) {
        self.done += done_bytes;
    }

    /// Notes that `done_bytes` of the range moved, and the kernel page behind them is a hole.
    /// `false`: with that, all of a page is missing, and the run ends before it.
    pub(super) fn pass_hole(&mut self, done_bytes: usize) -> bool {
        self.done += done_bytes;
        let start = if self.last_hole.end == self.done {
            self.last_hole.start
        } else {
            self.done
        };
        self.first_hole.get_or_insert(start);
        self.done += KERNEL_PAGE_BYTES;
        self.last_hole = start..self.done;
        let page_is_missing =
            self.done.is_multiple_of(self.page_bytes) && start + self.page_bytes <= self.done;
        if page_is_missing {
            self.done -= self.page_bytes;
        }
        !page_is_missing
    }

    /// Returns the bytes of the pages that are complete but for holes.
    pub(super) fn whole_bytes(&self) -> usize {
        self.done - self.done % self.page_bytes
    }

    /// Returns the range, within the complete pages, from the first hole to the last.
    pub(super) fn holes(&self) -> Option<Range<usize>> {
        let start = self.first_hole.filter(|&hole| hole < self.whole_bytes())?;
        Some(start..self.last_hole.end.min(self.whole_bytes()))
    }

    /// Returns the range that has moved behind the first `whole_bytes`, if it is more than a hole.
    pub(super) fn moved_behind(&self, whole_bytes: usize) -> Option<Range<usize>> {
        let is_hole = self.last_hole.start <= whole_bytes && self.last_hole.end >= self.done;
        (self.done > whole_bytes && !is_hole).then_some(whole_bytes..self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum KernelPage {
        There,
        Dropped,
        Busy,
    }
    use KernelPage::{Busy, Dropped, There};

    #[derive(Debug, PartialEq)]
    enum MoveAnswer {
        Moved,
        SpansTwo,
        Missing(usize),
        Busy(usize),
    }

    /// Plays the kernel: moves up to the first page that is dropped or held, and nothing of a range
    /// that spans two mappings.
    fn kernel(pages: &[KernelPage], divided_at: usize, what: Range<usize>) -> MoveAnswer {
        if what.start < divided_at && divided_at < what.end {
            return MoveAnswer::SpansTwo;
        }
        let kernel_pages = what.start / KERNEL_PAGE_BYTES..what.end / KERNEL_PAGE_BYTES;
        for at in kernel_pages {
            let done_bytes = at * KERNEL_PAGE_BYTES - what.start;
            match pages[at] {
                There => {}
                Dropped => return MoveAnswer::Missing(done_bytes),
                Busy => return MoveAnswer::Busy(done_bytes),
            }
        }
        MoveAnswer::Moved
    }

    /// Runs the loop of moving out.
    fn run(pages: &[KernelPage], page_bytes: usize, divided_at: usize) -> Progress {
        let mut progress = Progress::new(pages.len() * KERNEL_PAGE_BYTES, page_bytes);
        while let Some(next) = progress.next() {
            match kernel(pages, divided_at, next) {
                MoveAnswer::Moved => progress.moved(),
                MoveAnswer::SpansTwo => assert!(progress.narrow(), "a page lies in one mapping"),
                MoveAnswer::Missing(done_bytes) => {
                    if !progress.pass_hole(done_bytes) {
                        break;
                    }
                }
                MoveAnswer::Busy(done_bytes) => {
                    progress.stopped(done_bytes);
                    break;
                }
            }
        }
        progress
    }

    #[test]
    fn runs_end_where_a_naive_look_at_every_page_ends_them() {
        let mut random = 1u64;
        let mut below = |limit: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random % limit) as usize
        };
        for round in 0..20_000 {
            let per_page = 1 << below(4);
            let count = 1 + below(5);
            // Half of the runs have long stretches that are dropped, so that whole pages are.
            let mut kind = There;
            let pages: Vec<_> = (0..per_page * count)
                .map(|_| {
                    if round % 2 == 0 || below(4) == 0 {
                        kind = [There, There, There, Dropped, Dropped, Busy][below(6)];
                    }
                    kind
                })
                .collect();
            let page_bytes = per_page * KERNEL_PAGE_BYTES;
            let divided_at = below(count as u64 + 1) * page_bytes;
            let progress = run(&pages, page_bytes, divided_at);

            let whole = pages
                .chunks(per_page)
                .take_while(|page| !page.contains(&Busy) && page.contains(&There))
                .count();
            let end = whole * per_page;
            assert_eq!(progress.whole_bytes(), whole * page_bytes, "{pages:?}");
            let dropped = |&at: &usize| pages[at] == Dropped;
            match progress.holes() {
                None => assert_eq!((0..end).find(dropped), None, "{pages:?}"),
                Some(holes) => {
                    let first = holes.start / KERNEL_PAGE_BYTES;
                    assert_eq!((0..end).find(dropped), Some(first), "{pages:?}");
                    let behind = holes.end / KERNEL_PAGE_BYTES;
                    assert!(first < behind && behind <= end, "{pages:?}");
                    assert_eq!((behind..end).find(dropped), None, "{pages:?}");
                }
            }
            // Behind them all has moved up to the page that is busy, unless a page is missing.
            let next = pages.get(end..(end + per_page).min(pages.len())).unwrap();
            let moved = next.iter().take_while(|&&page| page != Busy);
            let is_any_there = moved.clone().any(|&page| page == There);
            let until = (end + moved.count()) * KERNEL_PAGE_BYTES;
            let expected = is_any_there.then_some(whole * page_bytes..until);
            assert_eq!(
                progress.moved_behind(whole * page_bytes),
                expected,
                "{pages:?}"
            );
        }
    }
}
