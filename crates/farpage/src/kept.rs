//! Freed allocations that are given out again without being zeroed: [`Kept`].
//!
//! Programs make and free arrays of the same size over and over. The pages of a freed array are
//! still in local memory, so its next owner waits for no page.
//!
//! The rule: a kept allocation has no owner, and keeps its old contents. Kept memory is so little
//! that evictors do not miss it.

use std::{collections::VecDeque, ops::Range};

/// Number of allocations that are kept at most: a search looks at each.
const ALLOCATIONS_MAX: usize = 64;

/// Pages of freed allocations.
#[derive(Default)]
pub(crate) struct Kept {
    /// Upper bound of kept pages. `None`, and nothing is kept, before the first call of `begin`.
    most_pages: Option<usize>,
    pages: usize,
    /// First page and number of pages, the longest kept first.
    allocations: VecDeque<(usize, usize)>,
}

impl Kept {
    /// Keeps up to `most_pages` pages from now on. Only the first call has an effect.
    pub(crate) fn begin(&mut self, most_pages: usize) {
        if self.most_pages.is_none() {
            self.most_pages = Some(most_pages);
            self.allocations.reserve(ALLOCATIONS_MAX + 1);
        }
    }

    /// Keeps the allocation `freed`. Returns an allocation that the caller discards. To be called
    /// again with `None` until it returns `None`.
    pub(crate) fn put(&mut self, freed: Option<(usize, usize)>) -> Option<(usize, usize)> {
        let most = self.most_pages.unwrap_or(0);
        if let Some((first, pages)) = freed {
            // One allocation must not drive all others out.
            if pages > most / 2 {
                return freed;
            }
            self.allocations.push_back((first, pages));
            self.pages += pages;
        }
        if self.pages <= most && self.allocations.len() <= ALLOCATIONS_MAX {
            return None;
        }
        self.pop()
    }

    /// Returns the pages of each kept allocation.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let kept = self.allocations.iter();
        kept.map(|&(first, pages)| first..first + pages)
    }

    /// Returns the number of kept pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Gives up the allocation that was kept longest.
    pub(crate) fn pop(&mut self) -> Option<(usize, usize)> {
        let (first, pages) = self.allocations.pop_front()?;
        self.pages -= pages;
        Some((first, pages))
    }

    /// Takes the last freed allocation that has `pages` pages and whose first page `fits`.
    pub(crate) fn take(&mut self, pages: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
        let suits = |&(first, len): &(usize, usize)| len == pages && fits(first);
        let at = self.allocations.iter().rposition(suits)?;
        let (first, _) = self.allocations.remove(at)?;
        self.pages -= pages;
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_freed_comes_first_and_the_longest_kept_goes_first() {
        let mut kept = Kept::default();
        assert_eq!(kept.put(Some((0, 1))), Some((0, 1)), "nothing is asked for");
        kept.begin(8);
        for first in [10, 20, 30, 40] {
            assert_eq!(kept.put(Some((first, 2))), None);
        }
        assert_eq!(kept.put(Some((50, 5))), Some((50, 5)), "more than half");
        assert_eq!(kept.put(Some((60, 3))), Some((10, 2)));
        assert_eq!(kept.put(None), Some((20, 2)));
        assert_eq!(kept.put(None), None);
        assert_eq!(kept.take(2, |_| true), Some(40));
        assert_eq!(kept.take(2, |first| first != 30), None);
        assert_eq!(kept.take(1, |_| true), None);
        assert_eq!(
            (kept.pop(), kept.pop(), kept.pop()),
            (Some((30, 2)), Some((60, 3)), None)
        );
        assert_eq!(kept.pages, 0);
    }

    #[test]
    fn so_many_are_searched_at_most() {
        let mut kept = Kept::default();
        kept.begin(1000);
        for first in 0..ALLOCATIONS_MAX {
            assert_eq!(kept.put(Some((first, 1))), None);
        }
        assert_eq!(kept.put(Some((ALLOCATIONS_MAX, 1))), Some((0, 1)));
    }
}
