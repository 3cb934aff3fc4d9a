//! Arenas that are ordinary memory until more is used than the budget.
//!
//! While all that is used fits the budget, the kernel makes pages as for any memory of the program.
//! The allocation that exceeds the budget puts the arena under paging before it returns. So does
//! access to allocated pages that had none.
//!
//! The rule: used and kept pages are within the budget as long as the arena is ordinary. So pages
//! are freed under the lock on the record then: no other allocation gets room before they are gone.
//! Nobody waits for the end of a fork under that lock, which the thread that forks takes.

use std::{ops::Range, slice, time::Instant};

use farpage_pager::{MappedRegion, PageError};
use farpage_signals::{MutexGuard, SignalGuard};
use farpage_vm::sigbus::on_stock_stack;

use crate::{Arena, ArenaError, Region, RegionOptions, arena_pages::Ranges, ordinary_time::Begun};

impl RegionOptions {
    /// Makes an arena ordinary memory, which the budget does not count, until more is used than the
    /// budget. Of no use for a region that is no arena's.
    #[doc(hidden)]
    pub fn ordinary(mut self) -> Self {
        self.paging.ordinary = true;
        self
    }
}

impl Region {
    /// True if the region is ordinary memory, as it [began](RegionOptions::ordinary).
    fn is_ordinary(&self) -> bool {
        self.mapped.get().is_ordinary()
    }

    /// Returns the runtime's budget now.
    pub(crate) fn budget_bytes(&self) -> usize {
        let _signals = SignalGuard::new();
        self.mapped.get().pager().stats().budget_bytes as usize
    }
}

impl Arena {
    /// True if the arena is ordinary memory.
    #[doc(hidden)]
    pub fn is_ordinary(&self) -> bool {
        self.region.is_ordinary()
    }

    /// Returns how paging began, if the arena was ordinary memory before.
    #[doc(hidden)]
    pub fn begun(&self) -> Option<Begun> {
        self.ordinary.begun()
    }

    /// Lets the kernel back `addresses` with huge pages, or not, while the arena is ordinary
    /// memory.
    #[doc(hidden)]
    pub fn advise_huge(&self, addresses: Range<usize>, huge: bool) {
        let base = self.addresses().start;
        let bytes = addresses.start - base..addresses.end - base;
        self.region.mapped.get().advise_huge(bytes, huge);
    }

    /// Puts the arena under paging, if it is ordinary memory.
    ///
    /// # Errors
    /// The kernel's. The arena is as before.
    #[doc(hidden)]
    pub fn begin_paging(&self) -> Result<(), PageError> {
        match self.is_ordinary() {
            true => self.begin_under(self.ranges()).map(drop),
            false => Ok(()),
        }
    }

    /// Counts `regions` of ordinary memory as allocations of the arena: they come under paging with
    /// it, which is at once if they exceed the budget. To be called once.
    ///
    /// # Errors
    /// As [`begin_paging`](Self::begin_paging).
    #[doc(hidden)]
    pub fn add_beside(&self, regions: Vec<Region>) -> Result<(), PageError> {
        let ranges = self.ranges();
        let is_first = self.ordinary.beside.set(regions).is_ok();
        debug_assert!(is_first, "regions are added once");
        match self.is_ordinary() {
            true => self.room_for(ranges, 0).map(drop),
            false => self.begin_under(ranges).map(drop),
        }
    }

    /// Returns the regions that come under paging with the arena.
    #[doc(hidden)]
    pub fn beside(&self) -> &[Region] {
        self.ordinary.beside.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the bytes of the regions beside the arena.
    #[doc(hidden)]
    pub fn beside_bytes(&self) -> usize {
        self.beside().iter().map(|region| region.len()).sum()
    }

    /// Counts allocated pages of which a byte is in `addresses` as used, before the program gets
    /// access to them. Ordinary memory comes under paging beyond the budget.
    ///
    /// # Errors
    /// As [`begin_paging`](Self::begin_paging). The pages are as before.
    #[doc(hidden)]
    pub fn begin_use(&self, addresses: &Range<usize>) -> Result<(), PageError> {
        let base = self.addresses().start;
        let pages = (addresses.start - base) / self.page_bytes
            ..(addresses.end - base).div_ceil(self.page_bytes);
        let ranges = self.ranges();
        let more = ranges.idle(&pages).iter().map(Range::len).sum();
        if more > 0 {
            self.room_for(ranges, more)?.set_idle(&pages, false);
        }
        Ok(())
    }

    /// Counts the allocated pages that lie wholly in `addresses` as not used: they hold nothing,
    /// and the program has no access, or they are ceded.
    #[doc(hidden)]
    pub fn end_use(&self, addresses: &Range<usize>) {
        let base = self.addresses().start;
        let pages = (addresses.start - base).div_ceil(self.page_bytes)
            ..(addresses.end - base) / self.page_bytes;
        if !pages.is_empty() {
            self.ranges().set_idle(&pages, true);
        }
    }

    /// Returns the bytes of allocated pages that are used: to which the program has access.
    #[doc(hidden)]
    pub fn used_bytes(&self) -> usize {
        self.ranges().used_pages() * self.page_bytes
    }

    /// Makes the arena ordinary memory up to `bytes` only. To be called before the budget becomes
    /// smaller, and after it has become larger.
    ///
    /// # Errors
    /// As [`begin_paging`](Self::begin_paging).
    #[doc(hidden)]
    pub fn keep_ordinary_to(&self, bytes: usize) -> Result<(), PageError> {
        let ranges = self.ranges();
        self.ordinary.set_most_bytes(bytes);
        self.room_for(ranges, 0).map(drop)
    }

    /// Counts the bytes of ordinary memory that are there.
    pub(crate) fn ordinary_bytes(&self) -> usize {
        if !self.is_ordinary() {
            return 0;
        }
        let used = self.used(&self.ranges());
        let _signals = SignalGuard::new();
        let bytes = |region: &Region, used: &[Range<usize>]| {
            region.mapped.with(|mapped| mapped.ordinary_bytes(used))
        };
        let whole = |region: &Region| bytes(region, slice::from_ref(&(0..region.len())));
        let beside: usize = self.beside().iter().map(whole).sum();
        beside + bytes(&self.region, &used)
    }

    /// Admits the `pages` pages from `first` on, which were free, as allocated: beyond the budget
    /// the arena comes under paging. Without success the pages are free again.
    pub(crate) fn admit<'a>(
        &'a self,
        ranges: MutexGuard<'a, Ranges>,
        first: usize,
        pages: usize,
    ) -> Result<MutexGuard<'a, Ranges>, ArenaError> {
        if !self.is_ordinary() {
            return Ok(ranges);
        }
        self.room_for(ranges, pages).map_err(|error| {
            self.ranges().give(first..first + pages);
            match error {
                PageError::Forked => ArenaError::Forked,
                error => ArenaError::NotCaught {
                    why: error.to_string(),
                },
            }
        })
    }

    fn room_for<'a>(
        &'a self,
        mut ranges: MutexGuard<'a, Ranges>,
        more: usize,
    ) -> Result<MutexGuard<'a, Ranges>, PageError> {
        let most = self.ordinary.most_bytes() / self.page_bytes;
        let more = more + self.beside_bytes().div_ceil(self.page_bytes);
        while self.is_ordinary() && ranges.used_pages() + ranges.kept.pages() + more > most {
            let Some((first, pages)) = ranges.kept.pop() else {
                return self.begin_under(ranges);
            };
            if self
                .free_in_place(&mut ranges, first..first + pages)
                .is_none()
            {
                ranges.stuck.push(first..first + pages);
            }
        }
        Ok(ranges)
    }

    /// Puts the arena under paging. Waits without the lock while the program forks.
    fn begin_under<'a>(
        &'a self,
        mut ranges: MutexGuard<'a, Ranges>,
    ) -> Result<MutexGuard<'a, Ranges>, PageError> {
        let since = Instant::now();
        let mapped = &self.region.mapped;
        loop {
            let (used, idle) = (self.used(&ranges), self.idle(&ranges));
            // The calling thread's stack, if it is a coroutine's, may be a part of the arena.
            if on_stock_stack(|| {
                for region in self.beside() {
                    let all = 0..region.len();
                    let begun =
                        |mapped: &MappedRegion<_>| mapped.begin_paging(slice::from_ref(&all), &[]);
                    if !region.mapped.with(begun)? {
                        return Ok(false);
                    }
                }
                mapped.with(|mapped| mapped.begin_paging(&used, &idle))
            })? {
                break;
            }
            drop(ranges);
            mapped.get().wait_for_fork()?;
            ranges = self.ranges();
        }
        self.ordinary.note(Begun {
            used_bytes: ranges.used_pages() * self.page_bytes,
            took: since.elapsed(),
        });
        Ok(ranges)
    }

    /// Frees pages of no allocation, if the arena is ordinary memory.
    pub(crate) fn free_in_place(
        &self,
        ranges: &mut Ranges,
        pages: Range<usize>,
    ) -> Option<Result<(), PageError>> {
        let bytes = self.bytes_of(pages.clone());
        let discarded = (self.region.mapped).with(|mapped| mapped.discard_ordinary(bytes))?;
        Some(match discarded {
            Ok(_) => {
                ranges.give(pages);
                Ok(())
            }
            // Tried again when another allocation is freed under paging.
            Err(error) => {
                ranges.stuck.push(pages);
                Err(error)
            }
        })
    }

    /// Returns the bytes of allocated pages that are not used, ascending: they hold nothing, unless
    /// the program has got access to them by calls that are not seen, or has something else there.
    fn idle(&self, ranges: &Ranges) -> Vec<Range<usize>> {
        let idle = ranges.idle(&(0..self.region.len() / self.page_bytes));
        idle.into_iter().map(|pages| self.bytes_of(pages)).collect()
    }

    pub(crate) fn bytes_of(&self, pages: Range<usize>) -> Range<usize> {
        pages.start * self.page_bytes..pages.end * self.page_bytes
    }

    /// Returns the bytes that may hold anything but zeros, in whole pages, ascending.
    fn used(&self, ranges: &Ranges) -> Vec<Range<usize>> {
        let allocated = ranges.used();
        let kept = ranges.kept.ranges();
        let mut used: Vec<_> = allocated.chain(kept).chain(ranges.stuck.clone()).collect();
        used.sort_unstable_by_key(|pages| pages.start);
        used.dedup_by(|next, last| {
            let continues = next.start == last.end;
            if continues {
                last.end = next.end;
            }
            continues
        });
        used.into_iter().map(|pages| self.bytes_of(pages)).collect()
    }
}
