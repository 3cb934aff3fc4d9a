//! The pages of a region by their numbers: [`PageIndex`] and [`PageRange`].
//!
//! The rule it keeps: a page's number is no address, no count and no tag. So it turns into bytes
//! only where a page size is named.

use std::{
    fmt,
    ops::{Add, AddAssign, Range, Sub, SubAssign},
};

/// The number of a page within its region, from 0 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub usize);

impl PageIndex {
    /// Returns the number for error messages.
    pub fn number(self) -> u64 {
        self.0 as u64
    }

    /// Returns the bytes of the region before the page.
    pub fn offset(self, page_bytes: usize) -> usize {
        self.0 * page_bytes
    }

    /// Returns this page and all behind it.
    pub fn onwards(self) -> PageIter {
        PageIter(self.0..usize::MAX)
    }

    /// Returns this page alone.
    pub fn alone(self) -> PageRange {
        self.until(self + 1)
    }

    /// Returns the pages from this one up to `end`, which is not among them.
    pub fn until(self, end: PageIndex) -> PageRange {
        PageRange { start: self, end }
    }

    /// Returns this page and those behind it, `count` in all.
    pub fn and_on(self, count: usize) -> PageRange {
        self.until(self + count)
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Add<usize> for PageIndex {
    type Output = PageIndex;

    fn add(self, pages: usize) -> PageIndex {
        PageIndex(self.0 + pages)
    }
}

impl Sub<usize> for PageIndex {
    type Output = PageIndex;

    fn sub(self, pages: usize) -> PageIndex {
        PageIndex(self.0 - pages)
    }
}

impl AddAssign<usize> for PageIndex {
    fn add_assign(&mut self, pages: usize) {
        self.0 += pages;
    }
}

impl SubAssign<usize> for PageIndex {
    fn sub_assign(&mut self, pages: usize) {
        self.0 -= pages;
    }
}

/// Counts the pages between two indices.
impl Sub for PageIndex {
    type Output = usize;

    fn sub(self, other: PageIndex) -> usize {
        self.0 - other.0
    }
}

/// Pages in a row. Unlike a [`Range`], a `PageRange` is `Copy` and has an iterator of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRange {
    /// First page.
    pub start: PageIndex,
    /// Page behind the last one.
    pub end: PageIndex,
}

impl PageRange {
    /// Range without pages.
    pub const NONE: PageRange = PageRange {
        start: PageIndex(0),
        end: PageIndex(0),
    };

    /// Returns the first `count` pages of a region.
    pub fn first(count: usize) -> PageRange {
        PageIndex(0).and_on(count)
    }

    /// Returns the number of pages.
    pub fn len(self) -> usize {
        self.end.0.saturating_sub(self.start.0)
    }

    /// True if the range has no page.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// True if the range contains `page`.
    pub fn contains(self, page: PageIndex) -> bool {
        (self.start..self.end).contains(&page)
    }

    /// Returns the pages that `others` contains, too.
    pub fn within(self, others: PageRange) -> PageRange {
        self.start.max(others.start).until(self.end.min(others.end))
    }

    /// Iterates over the pages in ascending order.
    pub fn iter(self) -> PageIter {
        PageIter(self.start.0..self.end.0)
    }
}

impl IntoIterator for PageRange {
    type Item = PageIndex;
    type IntoIter = PageIter;

    fn into_iter(self) -> PageIter {
        self.iter()
    }
}

/// The pages of a [`PageRange`], one by one.
#[derive(Clone, Debug)]
pub struct PageIter(Range<usize>);

impl Iterator for PageIter {
    type Item = PageIndex;

    fn next(&mut self) -> Option<PageIndex> {
        self.0.next().map(PageIndex)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl DoubleEndedIterator for PageIter {
    fn next_back(&mut self) -> Option<PageIndex> {
        self.0.next_back().map(PageIndex)
    }
}

impl ExactSizeIterator for PageIter {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_what_lies_between() {
        let pages = PageIndex(3).until(PageIndex(7));
        assert_eq!(pages, PageIndex(3).and_on(4));
        assert_eq!((pages.len(), pages.is_empty()), (4, false));
        assert_eq!(
            pages.iter().map(|page| page.0).collect::<Vec<_>>(),
            [3, 4, 5, 6]
        );
        assert_eq!(pages.iter().next_back(), Some(PageIndex(6)));
        assert!(pages.contains(PageIndex(3)) && !pages.contains(PageIndex(7)));
        assert_eq!(pages.within(PageIndex(5).and_on(9)), PageIndex(5).and_on(2));
        assert!(pages.within(PageIndex(9).alone()).is_empty());
        assert_eq!(pages.within(PageIndex(9).alone()).len(), 0);
        assert_eq!(
            (pages.end - pages.start, pages.start.offset(4096)),
            (4, 3 << 12)
        );
    }
}
