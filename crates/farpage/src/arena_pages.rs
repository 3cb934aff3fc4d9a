//! The record of an arena's free and allocated pages: [`Ranges`].
//!
//! Allocation takes the best fit in whole pages, of equal ones that with the lowest address. Free
//! neighbours are joined. `slots.rs` of the store has figures beside size classes and first fit.
//!
//! The rule it keeps: a page is free, allocated, kept or stuck, and only one of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use crate::{kept::Kept, ranges};

/// Free and allocated page numbers of the arena.
#[derive(Default)]
pub(crate) struct Ranges {
    /// First page and number of pages of each free range. Neighbours are joined.
    pub(crate) free: BTreeMap<usize, usize>,
    /// Free ranges as (pages, first page), shortest first, then lowest.
    pub(crate) by_length: BTreeSet<(usize, usize)>,
    /// First page and number of pages of each allocation.
    pub(crate) allocated: BTreeMap<usize, usize>,
    pub(crate) allocated_pages: usize,
    /// True for allocated pages that need no memory: without access so far, or ceded.
    idle: ranges::Ranges<bool>,
    idle_pages: usize,
    /// Freed ranges that could not be discarded yet.
    pub(crate) stuck: Vec<Range<usize>>,
    /// Freed allocations that are not discarded, and neither free nor allocated.
    pub(crate) kept: Kept,
}

/// Choice of the free range for an allocation.
#[derive(Clone, Copy)]
pub(crate) enum Fit {
    /// Shortest free range with room: large ranges stay whole.
    Shortest,
    /// Longest free range: an allocation that has grown can grow again in place there.
    Roomiest,
}

impl Ranges {
    /// Takes `pages` pages of a free range from `align(its start)` on. Returns the first page.
    pub(crate) fn take(
        &mut self,
        pages: usize,
        fit: Fit,
        align: impl Fn(usize) -> usize,
    ) -> Option<usize> {
        let fits = |&&(len, start): &&(usize, usize)| align(start) + pages <= start + len;
        let mut long = self.by_length.range((pages, 0)..);
        let &(len, start) = match fit {
            Fit::Shortest => long.find(fits),
            Fit::Roomiest => long.rev().find(fits),
        }?;
        let first = align(start);
        self.remove(start, len);
        self.insert(start..first);
        self.insert(first + pages..start + len);
        Some(first)
    }

    /// Takes the `pages` pages from `first` on. Returns false if some of them are not free.
    pub(crate) fn take_at(&mut self, first: usize, pages: usize) -> bool {
        match self.free.get(&first).copied() {
            Some(len) if len >= pages => {
                self.remove(first, len);
                self.insert(first + pages..first + len);
                true
            }
            _ => false,
        }
    }

    /// Takes pages out of the middle of a free range. Returns false if some of them are not free.
    pub(crate) fn take_inside(&mut self, pages: Range<usize>) -> bool {
        match self.free.range(..=pages.start).next_back() {
            Some((&first, &len)) if first + len >= pages.end => {
                self.remove(first, len);
                self.insert(first..pages.start);
                self.insert(pages.end..first + len);
                true
            }
            _ => false,
        }
    }

    /// Records `pages` as free, and joins them with free neighbours.
    pub(crate) fn give(&mut self, pages: Range<usize>) {
        let (mut start, mut end) = (pages.start, pages.end);
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            self.remove(before, len);
            start = before;
        }
        if let Some(&len) = self.free.get(&end) {
            self.remove(end, len);
            end += len;
        }
        self.insert(start..end);
    }

    /// Takes `pages` out of their allocations. Returns the ranges that belonged to one.
    pub(crate) fn cut(&mut self, pages: Range<usize>) -> Vec<Range<usize>> {
        let mut cut = Vec::new();
        // A range within one page has no whole page.
        if pages.is_empty() {
            return cut;
        }
        let before = self.allocated.range(..pages.start).next_back();
        let from = match before {
            Some((&first, &len)) if first + len > pages.start => first,
            _ => pages.start,
        };
        let touched: Vec<_> = self.allocated.range(from..pages.end.max(from)).collect();
        let touched: Vec<_> = touched
            .into_iter()
            .map(|(&first, &len)| (first, len))
            .collect();
        for (first, len) in touched {
            let (start, end) = (first.max(pages.start), (first + len).min(pages.end));
            self.allocated.remove(&first);
            if first < start {
                self.allocated.insert(first, start - first);
            }
            if end < first + len {
                self.allocated.insert(end, first + len - end);
            }
            self.forget(start..end);
            cut.push(start..end);
        }
        cut
    }

    /// Counts pages out that are no allocation's any more. Returns whether some of them needed no
    /// memory.
    pub(crate) fn forget(&mut self, pages: Range<usize>) -> bool {
        self.allocated_pages -= pages.len();
        let idle_before = self.idle_pages;
        self.set_idle(&pages, false);
        self.idle_pages < idle_before
    }

    /// Returns the number of allocated pages that may need memory.
    pub(crate) fn used_pages(&self) -> usize {
        self.allocated_pages - self.idle_pages
    }

    /// Returns the ranges of allocated pages that may need memory, ascending.
    pub(crate) fn used(&self) -> impl Iterator<Item = Range<usize>> {
        let allocated = self.allocated.iter();
        allocated.flat_map(|(&first, &pages)| {
            let is_used = |is_idle: bool| !is_idle;
            self.idle.those(&(first..first + pages), is_used)
        })
    }

    /// Returns the parts of allocated `pages` that need no memory.
    pub(crate) fn idle(&self, pages: &Range<usize>) -> Vec<Range<usize>> {
        self.idle.those(pages, |is_idle| is_idle)
    }

    /// Notes whether allocated `pages` need no memory.
    pub(crate) fn set_idle(&mut self, pages: &Range<usize>, is_idle: bool) {
        if !is_idle && self.idle_pages == 0 {
            return;
        }
        let before = self.idle(pages).iter().map(Range::len).sum::<usize>();
        let now = if is_idle { pages.len() } else { 0 };
        self.idle.change(pages, |fact| *fact = is_idle);
        self.idle_pages = self.idle_pages - before + now;
    }

    fn insert(&mut self, pages: Range<usize>) {
        if !pages.is_empty() {
            self.free.insert(pages.start, pages.len());
            self.by_length.insert((pages.len(), pages.start));
        }
    }

    fn remove(&mut self, start: usize, len: usize) {
        self.free.remove(&start);
        self.by_length.remove(&(len, start));
    }
}
