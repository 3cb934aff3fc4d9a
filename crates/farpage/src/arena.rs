//! [`Arena`]: one region that allocations of any size come from and return to.
//!
//! One region per allocation would cost a kernel mapping and a reservation at the servers each. An
//! arena is one region for good. Free and allocated ranges are recorded in local memory.
//!
//! The rule: free ranges are zeros, and hold neither frames nor slots. So a new allocation is zero,
//! and costs nothing before it is touched. A range is discarded before it is given out again,
//! except to callers that take memory with old contents (`kept.rs`).
//!
//! Allocations are of whole pages, which are never shared between them (`arena_pages.rs`).

use std::{
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering},
};

use bytesize::ByteSize;
use farpage_pager::PageError;
use farpage_signals::{Mutex, MutexGuard};

use crate::{
    Region,
    arena_pages::{Fit, Ranges},
    ordinary_time::OrdinaryTime,
};

farpage_wire::debug_as_display!(ArenaError);

/// Number of freed bytes after which servers are asked to take memory back, if the arena reserves
/// none: each request costs a round trip.
const TRIM_BYTES: usize = 64 << 20;
/// Upper bound of [kept](Arena::allocate_uninit) freed memory: bytes, and part of the budget.
const KEPT_BYTES: usize = 32 << 20;
const KEPT_PART: usize = 16;

/// One region that allocations come from: see [`Runtime::arena`](crate::Runtime::arena).
///
/// All methods may be called by any thread. Memory of an arena may be given to system calls like
/// that of any region.
///
/// ```no_run
/// use farpage::{ByteSize, Runtime};
///
/// let runtime = Runtime::builder()
///     .server("shm:///run/farpage.sock")
///     .budget(ByteSize::mib(256))
///     .build()?;
/// let arena = runtime.arena(64 << 30)?;
/// let block = arena.allocate(100 << 20, 64)?; // 100 MiB, zeroed
/// unsafe { block.as_ptr().write(7) };
/// unsafe { arena.deallocate(block)? };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Arena {
    pub(crate) region: Region,
    address: usize,
    pub(crate) page_bytes: usize,
    budget_bytes: usize,
    ranges: Mutex<Ranges>,
    freed_bytes: AtomicUsize,
    touched_peak_bytes: AtomicUsize,
    pub(crate) ordinary: OrdinaryTime,
}

/// The reason why an arena could not make an allocation.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The arena has no free range of this length.
    #[error(
        "the arena of {} has no room for {}: {} are allocated, and the longest free range has {}; make a larger arena",
        ByteSize(*capacity_bytes as u64), ByteSize(*asked_bytes as u64), ByteSize(*allocated_bytes as u64), ByteSize(*longest_bytes as u64)
    )]
    Full {
        /// Bytes of the allocation.
        asked_bytes: usize,
        /// Bytes of the arena.
        capacity_bytes: usize,
        /// Bytes of all allocations, in whole pages.
        allocated_bytes: usize,
        /// Bytes of the longest free range.
        longest_bytes: usize,
    },
    /// The process is a child of the one that has the arena.
    #[error("{}", farpage_pager::FORKED)]
    Forked,
    /// More than the budget would be allocated, and the kernel does not catch the faults of memory
    /// that was ordinary until now. The arena is as before.
    #[error("the arena cannot have more memory than its budget: {why}")]
    NotCaught {
        /// The reason, and what to do.
        why: String,
    },
}

/// Lock on the record of allocations.
#[doc(hidden)]
pub struct ArenaHold<'a>(#[expect(dead_code, reason = "a guard")] MutexGuard<'a, Ranges>);

impl Arena {
    pub(crate) fn new(region: Region) -> Arena {
        let budget_bytes = region.budget_bytes();
        let (address, page_bytes) = (region.as_ptr() as usize, region.page_bytes());
        let mut ranges = Ranges::default();
        ranges.give(0..region.len() / page_bytes);
        Arena {
            region,
            address,
            page_bytes,
            budget_bytes,
            ranges: Mutex::new(ranges),
            freed_bytes: AtomicUsize::new(0),
            touched_peak_bytes: AtomicUsize::new(0),
            ordinary: OrdinaryTime::new(budget_bytes),
        }
    }

    /// Allocates `bytes` zeroed bytes, at least one page, at an address that is a multiple of
    /// `align`, a power of two.
    ///
    /// # Errors
    /// See [`ArenaError`].
    ///
    /// # Panics
    /// If `align` is no power of two.
    pub fn allocate(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, ArenaError> {
        self.take(bytes, align, Fit::Shortest)
    }

    /// Allocates as [`allocate`](Self::allocate) does, with as much free memory behind as possible:
    /// for an allocation that has grown and will again.
    ///
    /// # Errors
    /// See [`ArenaError`].
    ///
    /// # Panics
    /// If `align` is no power of two.
    pub fn allocate_to_grow(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, ArenaError> {
        self.take(bytes, align, Fit::Roomiest)
    }

    /// Allocates as [`allocate`](Self::allocate) does, with bytes of any contents: zeros, or those
    /// of a freed allocation. From the first call on, freed allocations are kept for later calls:
    /// their pages stay, and the next owner waits for none. At most 32 MiB and a sixteenth of the
    /// budget are kept.
    ///
    /// # Errors
    /// See [`ArenaError`].
    ///
    /// # Panics
    /// If `align` is no power of two.
    pub fn allocate_uninit(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, ArenaError> {
        assert!(align.is_power_of_two(), "an alignment of {align}");
        if self.region.is_parents() {
            return Err(ArenaError::Forked);
        }
        let pages = self.pages(bytes);
        let fits = |first: usize| (self.address + first * self.page_bytes).is_multiple_of(align);
        let mut ranges = self.ranges();
        let most = KEPT_BYTES.min(self.budget_bytes / KEPT_PART);
        ranges.kept.begin(most / self.page_bytes);
        let kept = ranges.kept.take(pages, fits);
        if let Some(first) = kept.filter(|&first| self.is_sound(first, pages)) {
            return Ok(self.allocated(&mut ranges, first, pages));
        }
        drop(ranges);
        if let Some(first) = kept {
            // Zeros again; pages that cannot be discarded now are tried again.
            let _ = self.free(first..first + pages);
        }
        self.take(bytes, align, Fit::Shortest)
    }

    /// Allocates as [`allocate`](Self::allocate) does. The program has no access until it
    /// [begins](Self::begin_use) to use the allocation, or parts of it: addresses without memory
    /// take nothing of the budget.
    ///
    /// # Errors
    /// See [`ArenaError`].
    ///
    /// # Panics
    /// If `align` is no power of two.
    #[doc(hidden)]
    pub fn allocate_idle(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, ArenaError> {
        self.take_for(bytes, align, Fit::Shortest, true)
    }

    fn take(&self, bytes: usize, align: usize, fit: Fit) -> Result<NonNull<u8>, ArenaError> {
        self.take_for(bytes, align, fit, false)
    }

    fn take_for(
        &self,
        bytes: usize,
        align: usize,
        fit: Fit,
        is_idle: bool,
    ) -> Result<NonNull<u8>, ArenaError> {
        assert!(align.is_power_of_two(), "an alignment of {align}");
        if self.region.is_parents() {
            return Err(ArenaError::Forked);
        }
        let pages = self.pages(bytes);
        let align_pages = (align / self.page_bytes).max(1);
        let base = self.address / self.page_bytes;
        let aligned = |page: usize| (base + page).next_multiple_of(align_pages) - base;
        let mut ranges = self.ranges();
        loop {
            if let Some(first) = ranges.take(pages, fit, aligned) {
                if is_idle {
                    ranges.set_idle(&(first..first + pages), true);
                } else {
                    ranges = self.admit(ranges, first, pages)?;
                }
                return Ok(self.allocated(&mut ranges, first, pages));
            }
            let Some((first, pages)) = ranges.kept.pop() else {
                return Err(self.full(&ranges, bytes));
            };
            drop(ranges);
            // Pages that cannot be discarded now are tried again.
            let _ = self.free(first..first + pages);
            ranges = self.ranges();
        }
    }

    /// True if all `pages` pages from `first` on can be touched.
    fn is_sound(&self, first: usize, pages: usize) -> bool {
        let bytes = first * self.page_bytes..(first + pages) * self.page_bytes;
        !self.region.has_broken(bytes)
    }

    /// Records the `pages` pages from `first` on as an allocation. Returns its address.
    fn allocated(&self, ranges: &mut Ranges, first: usize, pages: usize) -> NonNull<u8> {
        ranges.allocated.insert(first, pages);
        ranges.allocated_pages += pages;
        let address = self.address + first * self.page_bytes;
        NonNull::new(address as *mut u8).expect("no region begins at address 0")
    }

    fn full(&self, ranges: &Ranges, asked_bytes: usize) -> ArenaError {
        let longest = ranges.by_length.last().map_or(0, |&(pages, _)| pages);
        ArenaError::Full {
            asked_bytes,
            capacity_bytes: self.region.len(),
            allocated_bytes: ranges.allocated_pages * self.page_bytes,
            longest_bytes: longest * self.page_bytes,
        }
    }

    /// Frees an allocation: its bytes are gone, here and at the servers, unless it is kept for
    /// [`allocate_uninit`](Self::allocate_uninit).
    ///
    /// # Errors
    /// A page that could not be discarded, because the kernel or a device uses it. The allocation
    /// is freed, and its range is tried again when another allocation is freed.
    ///
    /// # Panics
    /// If no allocation begins at `allocation`.
    ///
    /// # Safety
    /// Nobody uses the allocation any more.
    pub unsafe fn deallocate(&self, allocation: NonNull<u8>) -> Result<(), PageError> {
        let first = self.page_of(allocation);
        let mut ranges = self.ranges();
        let pages = ranges.allocated.remove(&first);
        let pages = pages.unwrap_or_else(|| panic!("no allocation begins at {allocation:p}"));
        let had_idle = ranges.forget(first..first + pages);
        let (mut outcome, mut freed) = (Ok(()), Some((first, pages)));
        // Memory that the kernel may still read must not be written by a next owner.
        let bytes = self.bytes_of(first..first + pages);
        // Memory without access is not for a next owner, and does not count.
        if had_idle || self.region.is_zero_copy(bytes) {
            return self.free_under(ranges, first..first + pages);
        }
        while let Some((first, pages)) = ranges.kept.put(freed.take()) {
            outcome = outcome.and(self.free_under(ranges, first..first + pages));
            ranges = self.ranges();
        }
        outcome
    }

    /// Makes an allocation longer or shorter in place. Returns whether that was possible; it always
    /// is for a shorter one. Added bytes are zeros, except those of the old last page.
    ///
    /// # Errors
    /// As [`deallocate`](Self::deallocate), of the pages that were cut off.
    ///
    /// # Panics
    /// If no allocation begins at `allocation`.
    ///
    /// # Safety
    /// Nobody uses the pages that are cut off any more.
    pub unsafe fn resize(&self, allocation: NonNull<u8>, bytes: usize) -> Result<bool, PageError> {
        let (first, pages) = (self.page_of(allocation), self.pages(bytes));
        let mut ranges = self.ranges();
        let before = ranges.allocated.get(&first).copied();
        let before = before.unwrap_or_else(|| panic!("no allocation begins at {allocation:p}"));
        if pages > before {
            if !ranges.take_at(first + before, pages - before) {
                return Ok(false);
            }
            ranges = match self.admit(ranges, first + before, pages - before) {
                Ok(ranges) => ranges,
                // An allocation elsewhere says why.
                Err(_) => return Ok(false),
            };
        }
        ranges.allocated.insert(first, pages);
        if pages >= before {
            ranges.allocated_pages += pages - before;
        } else {
            ranges.forget(first + pages..first + before);
            self.free_under(ranges, first + pages..first + before)?;
        }
        Ok(true)
    }

    /// Resizes an allocation as [`resize`](Self::resize) does, or moves it if it cannot grow in
    /// place or its address is no multiple of `align`, a power of two. Pages move by their entries:
    /// remote pages stay remote, and no byte is copied. Returns the new address, a multiple of
    /// `align`. Added bytes are zeros, except those of the old last page.
    ///
    /// # Errors
    /// See [`ArenaError`]. The allocation is unchanged.
    ///
    /// # Panics
    /// If no allocation begins at `allocation`, or `align` is no power of two.
    ///
    /// # Safety
    /// Nobody uses the allocation meanwhile, nor under its old address afterwards.
    pub unsafe fn reallocate(
        &self,
        allocation: NonNull<u8>,
        bytes: usize,
        align: usize,
    ) -> Result<NonNull<u8>, ArenaError> {
        assert!(align.is_power_of_two(), "an alignment of {align}");
        let is_aligned = (allocation.as_ptr() as usize).is_multiple_of(align);
        // SAFETY: the caller's promise. What cannot be discarded now is tried again.
        if is_aligned && unsafe { self.resize(allocation, bytes) }.unwrap_or(true) {
            return Ok(allocation);
        }
        let before = self.usable_bytes(allocation);
        let before = before.unwrap_or_else(|| panic!("no allocation begins at {allocation:p}"));
        let kept = before.min(self.pages(bytes) * self.page_bytes);
        let made = self.take(bytes, align, Fit::Roomiest)?;
        let old = allocation.as_ptr() as usize - self.address;
        // SAFETY: nobody uses the old pages, and the new ones are nobody's but ours.
        let moved = unsafe {
            self.region
                .relocate(old..old + kept, made.as_ptr() as usize - self.address)
        };
        // SAFETY: nobody uses the one that is given up. As above.
        let _ = unsafe { self.deallocate(if moved.is_ok() { allocation } else { made }) };
        moved.map(|()| made).map_err(|error| match error {
            PageError::Forked => ArenaError::Forked,
            error => ArenaError::NotCaught {
                why: error.to_string(),
            },
        })
    }

    /// Moves bytes within the arena as `mremap` does: whole pages by their entries, the rest by
    /// copying. All bytes are copied if `from` and `to` lie differently in their pages. The
    /// contents of `from` are unspecified afterwards: [`release`](Self::release) it.
    ///
    /// # Errors
    /// [`PageError::Forked`].
    ///
    /// # Panics
    /// If the ranges do not lie in the arena.
    ///
    /// # Safety
    /// Nobody uses the bytes of either range, and no page has bytes of both.
    pub unsafe fn relocate(&self, from: Range<usize>, to: usize) -> Result<(), PageError> {
        let all = self.addresses();
        let is_inside = |start: usize| all.start <= start && start + from.len() <= all.end;
        assert!(is_inside(from.start) && is_inside(to), "not the arena's");
        let from = from.start - self.address..from.end - self.address;
        // SAFETY: the caller's promise.
        unsafe { self.region.relocate(from, to - self.address) }
    }

    /// Allocates pages for `bytes` bytes from `end` on, the end of another allocation. Returns
    /// false if some of them are not free. [`release`](Self::release) frees both allocations
    /// together.
    ///
    /// # Panics
    /// If `end` is not the address of a page of the arena.
    pub fn extend(&self, end: usize, bytes: usize) -> bool {
        let offset = end.wrapping_sub(self.address);
        assert!(
            offset <= self.region.len() && offset.is_multiple_of(self.page_bytes),
            "{end:#x} is no page's of the arena"
        );
        let (first, pages) = (offset / self.page_bytes, self.pages(bytes));
        let mut ranges = self.ranges();
        if self.region.is_parents() || !ranges.take_at(first, pages) {
            return false;
        }
        let Ok(mut ranges) = self.admit(ranges, first, pages) else {
            return false;
        };
        ranges.allocated.insert(first, pages);
        ranges.allocated_pages += pages;
        true
    }

    /// True if the arena has a free range of `bytes` bytes now.
    pub fn has_room(&self, bytes: usize) -> bool {
        let (pages, ranges) = (self.pages(bytes), self.ranges());
        let longest = ranges.by_length.last();
        longest.is_some_and(|&(free, _)| free >= pages)
    }

    /// Allocates the pages at `addresses`. Returns false if some of them are not free.
    /// [`release`](Self::release) frees them.
    ///
    /// # Panics
    /// If the range is no whole pages of the arena.
    #[doc(hidden)]
    pub fn claim(&self, addresses: Range<usize>) -> bool {
        let pages = self.whole_pages(&addresses);
        let mut ranges = self.ranges();
        loop {
            if self.region.is_parents() {
                return false;
            }
            if ranges.take_inside(pages.clone()) {
                self.allocated(&mut ranges, pages.start, pages.len());
                ranges.set_idle(&pages, true);
                return true;
            }
            let Some((first, count)) = ranges.kept.pop() else {
                return false;
            };
            drop(ranges);
            // Pages that cannot be discarded now are tried again.
            let _ = self.free(first..first + count);
            ranges = self.ranges();
        }
    }

    /// Takes allocated pages out of paging, so that the program may map anything there: their
    /// contents are gone, and memory without access lies there. The pages must be
    /// [regained](Self::regain) before they are freed.
    ///
    /// # Errors
    /// A page that is pinned or busy, or the kernel's, for lack of mappings. No page is ceded then.
    ///
    /// # Panics
    /// If the range is no whole pages of the arena.
    ///
    /// # Safety
    /// No references to bytes of the range exist.
    #[doc(hidden)]
    pub unsafe fn cede(&self, addresses: Range<usize>) -> Result<(), PageError> {
        let bytes = self.whole_bytes(&addresses);
        self.note_touched();
        self.region.mapped.with(|mapped| mapped.cede(bytes))?;
        self.end_use(&addresses);
        Ok(())
    }

    /// Takes the allocated page at `address` out of paging as [`cede`](Self::cede) does, with its
    /// bytes, which other threads may use meanwhile. Protections stay, except on kernels before
    /// Linux 6.17, where the page may be readable and writable afterwards.
    ///
    /// # Errors
    /// As [`cede`](Self::cede), and a page that cannot be brought in. The page is as before.
    ///
    /// # Panics
    /// If no page of the arena begins at `address`.
    #[doc(hidden)]
    pub fn cede_with_bytes(&self, address: usize) -> Result<(), PageError> {
        let bytes = self.whole_bytes(&(address..address + self.page_bytes));
        let mapped = &self.region.mapped;
        mapped.with(|mapped| mapped.cede_with_bytes(bytes.start))
    }

    /// Takes ceded pages back into paging. They are zeros.
    ///
    /// # Errors
    /// The kernel's, for lack of mappings: the pages are of no use.
    ///
    /// # Panics
    /// If the range is no whole pages of the arena.
    ///
    /// # Safety
    /// Nobody uses what is mapped there.
    #[doc(hidden)]
    pub unsafe fn regain(&self, addresses: Range<usize>) -> Result<(), PageError> {
        let pages = self.whole_pages(&addresses);
        let bytes = self.bytes_of(pages.clone());
        self.region.mapped.with(|mapped| mapped.regain(bytes))?;
        self.ranges().set_idle(&pages, false);
        Ok(())
    }

    /// Frees the pages that lie wholly in `addresses`, whichever allocations they belong to, as
    /// `munmap` does with parts of a mapping. Bytes of other pages in the range become zeros.
    ///
    /// # Errors
    /// As [`deallocate`](Self::deallocate).
    ///
    /// # Panics
    /// If the range does not lie in the arena.
    ///
    /// # Safety
    /// Nobody uses the bytes of the range any more.
    pub unsafe fn release(&self, addresses: Range<usize>) -> Result<(), PageError> {
        let bytes = addresses.start - self.address..addresses.end - self.address;
        let whole = bytes.start.div_ceil(self.page_bytes)..bytes.end / self.page_bytes;
        let mut ranges = self.ranges();
        let freed = ranges.cut(whole);
        let in_place = |pages: &Range<usize>| self.free_in_place(&mut ranges, pages.clone());
        let freed_in_place: Vec<_> = freed.iter().map(in_place).collect();
        drop(ranges);
        let mut outcome = Ok(());
        let mut at = bytes.start;
        for (pages, freed) in freed.into_iter().zip(freed_in_place) {
            let (start, end) = (pages.start * self.page_bytes, pages.end * self.page_bytes);
            // SAFETY: nobody uses these bytes: the caller's promise.
            outcome = outcome.and(unsafe { self.region.discard_shared(at..start) });
            outcome = outcome.and(freed.unwrap_or_else(|| self.free(pages)));
            at = end;
        }
        // SAFETY: as above.
        outcome.and(unsafe { self.region.discard_shared(at..bytes.end.max(at)) })
    }

    /// Makes a range of addresses zeros and gives up its contents: see [`Region::discard_shared`].
    ///
    /// # Errors
    /// As [`Region::discard_shared`].
    ///
    /// # Panics
    /// If the range does not lie in the arena.
    ///
    /// # Safety
    /// No references to bytes of the range exist.
    pub unsafe fn discard(&self, addresses: Range<usize>) -> Result<(), PageError> {
        let bytes = addresses.start - self.address..addresses.end - self.address;
        self.note_touched();
        // SAFETY: the caller's promise.
        unsafe { self.region.discard_shared(bytes) }
    }

    /// Returns the bytes of `allocation`, in whole pages. `None` if no allocation begins there.
    pub fn usable_bytes(&self, allocation: NonNull<u8>) -> Option<usize> {
        let address = allocation.as_ptr() as usize;
        if !self.contains(address) || !(address - self.address).is_multiple_of(self.page_bytes) {
            return None;
        }
        let pages = self
            .ranges()
            .allocated
            .get(&self.page_of(allocation))
            .copied();
        pages.map(|pages| pages * self.page_bytes)
    }

    /// True if each page that has some of `addresses` belongs to an allocation.
    pub fn is_allocated(&self, addresses: Range<usize>) -> bool {
        let all = self.addresses();
        if addresses.start < all.start || all.end < addresses.end {
            return false;
        }
        let page = |address: usize| (address - self.address) / self.page_bytes;
        let end = (addresses.end - self.address).div_ceil(self.page_bytes);
        let ranges = self.ranges();
        let mut at = page(addresses.start);
        while at < end {
            match ranges.allocated.range(..=at).next_back() {
                Some((&first, &pages)) if first + pages > at => at = first + pages,
                _ => return false,
            }
        }
        true
    }

    /// Locks the record of allocations, so that a copy of this process finds it whole.
    #[doc(hidden)]
    pub fn hold(&self) -> ArenaHold<'_> {
        ArenaHold(self.ranges())
    }

    /// Returns the addresses of all allocations, ascending.
    pub fn allocations(&self) -> Vec<Range<usize>> {
        let address = |page: usize| self.address + page * self.page_bytes;
        let ranges = self.ranges();
        let allocated = ranges.allocated.iter();
        allocated
            .map(|(&first, &pages)| address(first)..address(first + pages))
            .collect()
    }

    /// True if `address` lies in the arena.
    pub fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.address) < self.region.len()
    }

    /// Returns the arena's addresses.
    pub fn addresses(&self) -> Range<usize> {
        self.address..self.address + self.region.len()
    }

    /// Returns the bytes of all allocations, in whole pages.
    pub fn allocated_bytes(&self) -> usize {
        self.ranges().allocated_pages * self.page_bytes
    }

    /// Returns the arena's size in bytes.
    pub fn capacity_bytes(&self) -> usize {
        self.region.len()
    }

    /// Returns the most bytes that were touched at once, in whole pages: brought into local memory,
    /// for a touch or with a page that was touched, and not freed since.
    pub fn touched_peak_bytes(&self) -> usize {
        self.note_touched().max(self.ordinary_bytes())
    }

    /// Notes and returns the most bytes that were touched at once, without ordinary memory.
    fn note_touched(&self) -> usize {
        let touched = self.region.touched_pages() * self.page_bytes;
        let before = (self.touched_peak_bytes).fetch_max(touched, Ordering::Relaxed);
        before.max(touched)
    }

    /// Returns the region that the arena is made of: for advice, pins and figures.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Discards pages of no allocation and records them as free. Tries stuck ranges again.
    fn free(&self, pages: Range<usize>) -> Result<(), PageError> {
        let mut outcome = self.discard_pages(pages);
        let stuck = std::mem::take(&mut self.ranges().stuck);
        for pages in stuck {
            outcome = outcome.and(self.discard_pages(pages));
        }
        outcome
    }

    fn discard_pages(&self, pages: Range<usize>) -> Result<(), PageError> {
        // Must be noted before the pages are gone.
        self.note_touched();
        let bytes = self.bytes_of(pages.clone());
        // SAFETY: the pages are no allocation's, and not free for one before they are given back.
        let discarded = unsafe { self.region.discard_shared(bytes.clone()) };
        let mut ranges = self.ranges();
        if let Err(error) = discarded {
            // The whole range is tried again when another allocation is freed.
            ranges.stuck.push(pages);
            return Err(error);
        }
        ranges.give(pages);
        let is_empty = ranges.allocated_pages == 0;
        drop(ranges);
        let freed = self.freed_bytes.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len();
        if freed >= TRIM_BYTES || is_empty {
            self.freed_bytes.store(0, Ordering::Relaxed);
            self.region.trim();
        }
        Ok(())
    }

    fn page_of(&self, allocation: NonNull<u8>) -> usize {
        let offset = (allocation.as_ptr() as usize).wrapping_sub(self.address);
        assert!(
            offset < self.region.len() && offset.is_multiple_of(self.page_bytes),
            "no allocation begins at {allocation:p}"
        );
        offset / self.page_bytes
    }

    /// Returns the numbers of the pages at `addresses`.
    fn whole_pages(&self, addresses: &Range<usize>) -> Range<usize> {
        let offset = |address: usize| {
            let offset = address.wrapping_sub(self.address);
            assert!(
                offset <= self.region.len() && offset.is_multiple_of(self.page_bytes),
                "{address:#x} is no page's of the arena"
            );
            offset / self.page_bytes
        };
        offset(addresses.start)..offset(addresses.end)
    }

    /// Returns the offsets of the whole pages at `addresses`.
    fn whole_bytes(&self, addresses: &Range<usize>) -> Range<usize> {
        self.bytes_of(self.whole_pages(addresses))
    }

    fn pages(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.page_bytes).max(1)
    }

    /// Frees pages of no allocation, under the lock where that is quick.
    fn free_under(
        &self,
        mut ranges: MutexGuard<'_, Ranges>,
        pages: Range<usize>,
    ) -> Result<(), PageError> {
        let freed = self.free_in_place(&mut ranges, pages.clone());
        drop(ranges);
        freed.unwrap_or_else(|| self.free(pages))
    }

    pub(crate) fn ranges(&self) -> MutexGuard<'_, Ranges> {
        // A panic under the lock comes before any change.
        self.ranges.lock()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("region", &self.region)
            .field("allocated_bytes", &self.allocated_bytes())
            .finish_non_exhaustive()
    }
}
