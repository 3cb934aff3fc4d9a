//! Memory that is ordinary until it needs a budget: [`MappedRegion::begin_paging`].
//!
//! A region may begin as ordinary memory: the kernel makes its pages at their first touch, huge
//! ones where the program would have them, and no fault is caught. When paging begins, all pages
//! that may be there are owned as `Filling` before the first fault can come. So a thread that
//! touches an absent part of one leaves a note and waits. Then the kernel is asked which parts are
//! there. A page of which some part is there is completed with zeros, counted, and published as
//! `Resident`. It is changed as far as the store knows, since nothing is stored of it. All others
//! are published as `Remote`, which means zeros.
//!
//! The rule: threads that touch pages which are there go on meanwhile. Calls on the region that
//! rely on ordinary memory hold [`OrdinaryHold`](crate::beginning::OrdinaryHold), and all of this
//! is inside the reclaim gate: a child of `fork` finds the region on one side or the other.

use std::{io, iter, ops::Range, slice};

use farpage_store::{PageIndex, PageRange};
use farpage_vm::AddressSpace;

use crate::{
    MappedRegion, PageError,
    installer::UsageCount,
    mapper::KERNEL_PAGE_BYTES,
    protocol,
    region::{CHUNK_PAGES, RegionGuard},
};

impl<A: AddressSpace> MappedRegion<A> {
    /// True if the region is ordinary memory, as it [began](crate::RegionOptions::ordinary).
    pub fn is_ordinary(&self) -> bool {
        self.region().beginning.is_ordinary()
    }

    /// Lets the kernel back the kernel pages in `range` with huge ones, or not, if the region is
    /// ordinary memory.
    pub fn advise_huge(&self, range: Range<usize>, huge: bool) {
        if let Ok(_entered) = self.enter()
            && let Some(_hold) = self.region().beginning.hold()
        {
            (self.shared().mapper).advise_huge(self.region(), kernel_pages(&range), huge);
        }
    }

    /// Counts the bytes of ordinary memory in `used`, whole pages, that are there and not ceded.
    pub fn ordinary_bytes(&self, used: &[Range<usize>]) -> usize {
        let (mut found, mut bytes) = (Vec::new(), 0);
        let kept = used.iter().flat_map(|range| self.kept(self.whole(range)));
        for pages in kept {
            (self.shared().mapper).present(self.region(), self.bytes_of(pages), &mut found);
            bytes += found.iter().map(ExactSizeIterator::len).sum::<usize>();
        }
        bytes
    }

    /// Puts the region under paging, if it is ordinary memory. What lies outside `used` and `idle`,
    /// whole pages in order, is given up, and zeros from then on. The pages in `used` that are
    /// there come under the budget, which they may exceed until evictors have caught up. So do
    /// those in `idle`, where hardly any are expected: `idle` may be far longer. Threads may use
    /// the region meanwhile. Those that touch an absent page wait. Returns false while the program
    /// forks: [wait](Self::wait_for_fork), and call again.
    ///
    /// # Errors
    /// The kernel's. The region is ordinary memory as before, but for what was given up.
    ///
    /// # Panics
    /// If `used` or `idle` are no whole pages of the region.
    pub fn begin_paging(
        &self,
        used: &[Range<usize>],
        idle: &[Range<usize>],
    ) -> Result<bool, PageError> {
        let _entered = self.enter()?;
        let (shared, region) = (self.shared(), self.region());
        let whole = |ranges: &[Range<usize>]| -> Vec<PageRange> {
            ranges.iter().map(|range| self.whole(range)).collect()
        };
        let (used, idle) = (whole(used), whole(idle));
        if self.is_ordinary() {
            let started = self.pager().begin_work();
            started.map_err(|error| PageError::cannot_start(region.label(), &error))?;
        }
        let Some(_inside) = shared.gate.enter_for_program() else {
            return Ok(!self.is_ordinary());
        };
        let (Some(begin), Some(guard)) = (region.beginning.begin(), region.enter()) else {
            return Ok(true);
        };
        for pages in self.catch(&used, &idle)? {
            self.adopt(&guard, pages);
        }
        self.end_adoption();
        begin.begun();
        Ok(true)
    }

    /// Owns and counts the pages in `used` that are not ceded, and those in `idle` that are there,
    /// gives up all others, and catches faults from then on. Returns the pages that it owns.
    pub(crate) fn catch(
        &self,
        used: &[PageRange],
        idle: &[PageRange],
    ) -> Result<Vec<PageRange>, PageError> {
        let (shared, region) = (self.shared(), self.region());
        let refused = |error| PageError::cannot_begin(region.label(), &error);
        // Now, since a refusal must come before the region has changed; and again once faults are
        // caught, after a stray touch.
        let mut allocated: Vec<PageRange> = used.iter().chain(idle).copied().collect();
        allocated.sort_unstable_by_key(|pages| pages.start);
        self.drop_all_but(&allocated).map_err(refused)?;
        let mut owned: Vec<PageRange> = used.iter().flat_map(|&pages| self.kept(pages)).collect();
        self.own_all(&owned);
        let bytes = owned.iter().map(|pages| pages.len() * self.page_bytes());
        let bytes = bytes.sum::<usize>() as u64;
        // Before a fault can ask for memory that is there.
        shared.frames.adopt(bytes);
        if let Err(error) = shared.mapper.begin_paging(region) {
            shared.frames.budget().unmake(bytes);
            // Before threads that wait find pages without an owner.
            region.count_released();
            region.beginning.refused();
            self.disown_all(&owned);
            return Err(refused(error));
        }
        let _ = self.drop_all_but(&allocated);
        owned.extend(self.own_present(idle));
        Ok(owned)
    }

    /// Owns and counts the pages in `idle` that are there and not ceded. Absent ones, whose faults
    /// are caught, are remote.
    fn own_present(&self, idle: &[PageRange]) -> Vec<PageRange> {
        let (page_bytes, mut found, mut owned) = (self.page_bytes(), Vec::new(), Vec::new());
        for pages in idle.iter().flat_map(|&pages| self.kept(pages)) {
            (self.shared().mapper).present(self.region(), self.bytes_of(pages), &mut found);
            for part in &found {
                let there = self.pages(part.clone());
                let own = |page: &PageIndex| {
                    // Another part of the page was found before, or a filler has the page.
                    self.region()
                        .words
                        .try_apply(*page, protocol::prefetch)
                        .is_some()
                };
                for page in there.iter().filter(own) {
                    self.shared().frames.adopt(page_bytes as u64);
                    owned.push(page.alone());
                }
            }
        }
        owned
    }

    /// Returns the parts of `pages` that are not ceded.
    fn kept(&self, pages: PageRange) -> Vec<PageRange> {
        let address = self.address();
        let bytes = self.bytes_of(pages);
        let kept = (self.shared().mapper).kept(address + bytes.start..address + bytes.end);
        let offsets = |part: Range<usize>| part.start - address..part.end - address;
        kept.into_iter()
            .map(|part| self.whole(&offsets(part)))
            .collect()
    }

    /// Ends the adoption of all pages.
    pub(crate) fn end_adoption(&self) {
        let frames = &self.shared().frames;
        frames.budget().note_peak();
        // Calls evictors, if need be.
        frames.adopt(0);
    }

    /// Waits until no thread of the program forks.
    ///
    /// # Errors
    /// [`PageError::Forked`].
    pub fn wait_for_fork(&self) -> Result<(), PageError> {
        let entered = self.enter()?;
        self.wait_for_thaw(&entered);
        Ok(())
    }

    /// Puts the region under paging, whatever of it may be there: for calls that are rare, and need
    /// pages.
    pub(crate) fn under_paging(&self) -> Result<(), PageError> {
        let all = 0..self.mapped_bytes();
        while self.is_ordinary() && !self.begin_paging(slice::from_ref(&all), &[])? {
            self.wait_for_fork()?;
        }
        Ok(())
    }

    /// Turns the kernel pages that lie wholly in `range` of ordinary memory into zeros. Returns the
    /// range of these. `None`: the region is under paging.
    ///
    /// # Errors
    /// The kernel's: the memory stays, at least in part.
    pub fn discard_ordinary(&self, range: Range<usize>) -> Option<Result<Range<usize>, PageError>> {
        let _entered = self.enter().ok()?;
        let _hold = self.region().beginning.hold()?;
        let whole = kernel_pages(&range);
        if whole.is_empty() {
            return Some(Ok(range.start..range.start));
        }
        let dropped = (self.shared().mapper).drop_memory(self.region(), whole.clone());
        let page = self.region().page_at(self.address() + whole.start);
        let refused = |error| PageError::cannot_map(self.region().label(), page, &error);
        Some(dropped.map(|()| whole).map_err(refused))
    }

    /// Moves the bytes of `from` to `to` in ordinary memory, with which the former bytes there are
    /// gone: `copy` copies a part of `from` to its new place. Parts that are not there are passed
    /// over. Returns false, and nothing has moved, if the region is under paging.
    ///
    /// # Errors
    /// The kernel's. Nothing has moved.
    pub fn relocate_ordinary(
        &self,
        from: Range<usize>,
        to: usize,
        mut copy: impl FnMut(Range<usize>),
    ) -> Result<bool, PageError> {
        let _entered = self.enter()?;
        let (mapper, region) = (&self.shared().mapper, self.region());
        let Some(_hold) = region.beginning.hold() else {
            return Ok(false);
        };
        let whole = kernel_pages(&from);
        if whole.is_empty() || !to.abs_diff(from.start).is_multiple_of(KERNEL_PAGE_BYTES) {
            copy(from);
            return Ok(true);
        }
        let place = to + (whole.start - from.start);
        let dropped = mapper.drop_memory(region, place..place + whole.len());
        let page = region.page_at(self.address() + place);
        dropped.map_err(|error| PageError::cannot_map(region.label(), page, &error))?;
        let mut there = Vec::new();
        mapper.present(region, whole.clone(), &mut there);
        copy(from.start..whole.start);
        there.into_iter().for_each(&mut copy);
        copy(whole.end..from.end);
        Ok(true)
    }

    /// Gives up the memory outside of `used`.
    fn drop_all_but(&self, used: &[PageRange]) -> io::Result<()> {
        let page_bytes = self.page_bytes();
        let ends = used.iter().map(|pages| pages.end.offset(page_bytes));
        let starts = used.iter().map(|pages| pages.start.offset(page_bytes));
        let gaps = iter::once(0).chain(ends);
        for (start, end) in gaps.zip(starts.chain([self.mapped_bytes()])) {
            if start < end {
                (self.shared().mapper).drop_memory(self.region(), start..end)?;
            }
        }
        Ok(())
    }

    fn own_all(&self, used: &[PageRange]) {
        for page in used.iter().flat_map(|pages| pages.iter()) {
            let owned = self.region().words.try_apply(page, protocol::prefetch);
            debug_assert!(owned.is_some(), "no page of ordinary memory has an owner");
        }
    }

    /// Gives pages back whose faults are not caught after all. Threads that have left notes were
    /// woken when that ended.
    fn disown_all(&self, used: &[PageRange]) {
        for &pages in used {
            for page in pages {
                let words = &self.region().words;
                words.apply(page, |w| {
                    (protocol::fill_failed(protocol::installing(w)).0, ())
                });
            }
            self.shared().mapper.tell(self.region(), pages);
        }
    }

    /// Publishes owned pages as what they are.
    pub(crate) fn adopt(&self, guard: &RegionGuard, pages: PageRange) {
        let (mut there, mut rest) = (Vec::new(), pages);
        while !rest.is_empty() {
            let together = rest.start.and_on(CHUNK_PAGES).within(rest);
            let together = guard.in_one_stripe(together, false);
            rest.start = together.end;
            let page_bytes = self.page_bytes();
            let bytes = together.start.offset(page_bytes)..together.end.offset(page_bytes);
            (self.shared().mapper).present(guard, bytes, &mut there);
            let (whole, holes) = complete(together, page_bytes, &there);
            for hole in holes {
                // A hole that stays is completed at its first touch, like one that the program has
                // made.
                let _ = self.shared().mapper.put_zeros(guard, hole);
            }
            self.publish_adopted(guard, together, &whole);
        }
    }

    /// Publishes `whole` ones of `pages` as resident, and the others as remote.
    fn publish_adopted(&self, guard: &RegionGuard, pages: PageRange, whole: &[PageRange]) {
        let shared = self.shared();
        let page_bytes = self.page_bytes();
        let leave_out = |absent: PageRange| {
            let bytes = (absent.len() * page_bytes) as u64;
            shared.frames.budget().unmake(bytes);
            (absent.iter()).for_each(|page| self.publish_remote(guard, page));
        };
        let mut page = pages.start;
        for &run in whole {
            leave_out(page.until(run.start));
            guard.store.count_made(run.len());
            // Counted first: an evictor may take them at once.
            (shared.frames.budget()).begin_use((run.len() * page_bytes) as u64);
            guard.touch(run);
            shared.installer.arrived(guard, run, UsageCount::Unwanted);
            page = run.end;
        }
        leave_out(page.until(pages.end));
    }

    /// Returns the pages of a range of bytes, which are whole.
    fn whole(&self, range: &Range<usize>) -> PageRange {
        let page_bytes = self.page_bytes();
        assert!(
            range.start.is_multiple_of(page_bytes) && range.end.is_multiple_of(page_bytes),
            "bytes {range:?} are no whole pages of {page_bytes} bytes"
        );
        self.pages(range.clone())
    }
}

/// Returns the kernel pages that lie wholly in a range of bytes; empty if none does.
fn kernel_pages(range: &Range<usize>) -> Range<usize> {
    let start = range.start.next_multiple_of(KERNEL_PAGE_BYTES);
    start..(range.end / KERNEL_PAGE_BYTES * KERNEL_PAGE_BYTES).max(start)
}

/// Returns the runs of `pages` of which some byte is `there`, and the holes in these, each in one
/// page. `there` are ranges of bytes in order, which do not overlap.
fn complete(
    pages: PageRange,
    page_bytes: usize,
    there: &[Range<usize>],
) -> (Vec<PageRange>, Vec<Range<usize>>) {
    let (mut runs, mut holes) = (Vec::<PageRange>::new(), Vec::new());
    let mut parts = there;
    for page in pages {
        let (start, end) = (page.offset(page_bytes), (page + 1).offset(page_bytes));
        let before = parts.iter().take_while(|part| part.end <= start).count();
        parts = &parts[before..];
        let mut at = start;
        for part in parts.iter().take_while(|part| part.start < end) {
            if at < part.start {
                holes.push(at..part.start);
            }
            at = part.end.min(end);
        }
        if at == start {
            continue;
        }
        if at < end {
            holes.push(at..end);
        }
        match runs.last_mut() {
            Some(run) if run.end == page => run.end = page + 1,
            _ => runs.push(page.alone()),
        }
    }
    (runs, holes)
}

#[cfg(test)]
mod tests {
    use farpage_store::PageIndex;

    use super::*;

    #[test]
    fn pages_that_are_partly_there_are_completed() {
        const PAGE: usize = 4 * KERNEL_PAGE_BYTES;
        let kernel_page = |at: usize| at * KERNEL_PAGE_BYTES..(at + 1) * KERNEL_PAGE_BYTES;
        let mut random = 1u64;
        for _ in 0..2000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Six pages, from the second page of the region on: a bit per kernel page.
            let bits = random & random.rotate_left(17) & 0xff_ffff;
            let is_there = |at: usize| bits >> (at - 4) & 1 != 0;
            let mut there: Vec<Range<usize>> = Vec::new();
            for part in (4..28).filter(|&at| is_there(at)).map(kernel_page) {
                match there.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => there.push(part),
                }
            }
            let (runs, holes) = complete(PageIndex(1).and_on(6), PAGE, &there);
            let of_page = (1..7).map(|page| (4 * page..4 * page + 4, page));
            let whole: Vec<usize> = of_page
                .filter(|(parts, _)| parts.clone().any(is_there))
                .map(|(_, page)| page)
                .collect();
            let found: Vec<usize> = runs.iter().flat_map(|run| run.start.0..run.end.0).collect();
            assert_eq!(found, whole, "{bits:#x}");
            assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            let of_page = whole.iter().flat_map(|page| 4 * page..4 * page + 4);
            let missing: Vec<_> = of_page
                .filter(|&at| !is_there(at))
                .map(kernel_page)
                .collect();
            let one_page = |hole: &Range<usize>| hole.start / PAGE == (hole.end - 1) / PAGE;
            assert!(holes.iter().all(one_page));
            let pages = |hole: Range<usize>| hole.step_by(KERNEL_PAGE_BYTES);
            let filled: Vec<usize> = holes.into_iter().flat_map(pages).collect();
            let missing: Vec<usize> = missing.into_iter().map(|part| part.start).collect();
            assert_eq!(filled, missing, "{bits:#x}");
        }
    }
}
