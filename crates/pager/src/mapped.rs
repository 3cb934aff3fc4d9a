//! A region as the program holds it: [`MappedRegion`].
//!
//! The rule: the program's calls only ask and wait. Pages are moved by fillers and evictors;
//! nothing here owns a page, except when a closing region is given up in [`Drop`], and where the
//! program gives up what pages hold (`discard.rs`). A call holds signals back
//! ([`MappedRegion::enter`]) and lets them in only where it waits and holds nothing: a handler of
//! the program may touch an absent page, which a worker must be able to serve.

use std::{
    fmt, mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::Since;
use farpage_signals::SignalGuard;
use farpage_store::{PageIndex, PageRange, PageStore};
use farpage_vm::{AddressSpace, DetachError};

use crate::{
    Advice, FlushError, PageError, Pager, PinError,
    doors::Command,
    installer::UsageCount,
    job::Job,
    protocol::{self, PageState, PageWord},
    region::{CHUNK_PAGES, Region, RegionGuard},
    run::PageRun,
    shared::SharedParts,
};

/// Time between two looks at a page that another worker owns.
pub(crate) const LOOK: Duration = Duration::from_micros(20);

/// A mapped region. Dropping it gives its addresses and its pages up, without writing back.
pub struct MappedRegion<A: AddressSpace> {
    pager: Arc<Pager<A>>,
    region: Arc<Region>,
}

impl<A: AddressSpace> MappedRegion<A> {
    pub(crate) fn new(pager: Arc<Pager<A>>, region: Arc<Region>) -> MappedRegion<A> {
        MappedRegion { pager, region }
    }

    /// Returns the first address, aligned to the page size.
    pub fn address(&self) -> usize {
        self.region.address
    }

    /// Returns the number of mapped bytes: the store's size, rounded up to whole pages.
    pub fn mapped_bytes(&self) -> usize {
        self.region.geometry.bytes
    }

    /// Returns the region's page size.
    pub fn page_bytes(&self) -> usize {
        self.region.page_bytes()
    }

    /// Returns the number of mapped pages. A page that is just being mapped may not be counted yet.
    pub fn resident_pages(&self) -> usize {
        self.region.resident()
    }

    /// True if a page of `range` cannot be brought in, or is lost: touching it raises SIGBUS. Pages
    /// that are just being brought in count, too: a poisoned one may be tried again.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn has_broken(&self, range: Range<usize>) -> bool {
        let region = self.region();
        let state = |page| region.words.load(page).state();
        let mut pages = self.pages(range).iter();
        pages.any(|page| {
            matches!(
                state(page),
                PageState::Filling | PageState::Poisoned | PageState::Lost
            )
        })
    }

    /// True if the kernel may hold references to pages of `range`: see [`Advice::ZeroCopy`].
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn is_zero_copy(&self, range: Range<usize>) -> bool {
        self.region.is_zero_copy(self.pages(range))
    }

    /// Returns the store that keeps the pages.
    pub fn store(&self) -> &Arc<PageStore> {
        &self.region.store
    }

    /// Returns the pager that serves the region.
    pub fn pager(&self) -> &Arc<Pager<A>> {
        &self.pager
    }

    /// Tells how the bytes in `range` will be used.
    ///
    /// # Errors
    /// [`Advice::DontNeed`] waits until changed pages are written back, and says which one could
    /// not be.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), PageError> {
        let entered = self.enter()?;
        let pages = self.pages(range);
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => self.region.set_advice(advice),
            // Ordinary memory is made at its first touch.
            Advice::WillNeed if self.is_ordinary() => {}
            Advice::WillNeed => self
                .shared()
                .doors
                .tell_fillers(|| Command::Prefetch(self.region.clone(), pages)),
            Advice::DontNeed => return self.run(pages, false, &entered),
            Advice::ZeroCopy => self.region.mark_zero_copy(pages),
        }
        Ok(())
    }

    /// Puts `bytes` in the place of the pages that lie in `offset..offset + bytes.len()` and are
    /// [lost](PageError::Lost). Pages that are not lost are left alone, whatever they hold.
    ///
    /// # Errors
    /// A lost page lies in the range in part only, or cannot be mapped: it is lost as before. The
    /// others may have been put back.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn put_lost(&self, offset: usize, bytes: &[u8]) -> Result<(), PageError> {
        let entered = self.enter()?;
        let (region, page_bytes) = (&self.region, self.page_bytes());
        let range = offset..offset + bytes.len();
        let lost = region.lost(self.pages(range.clone()));
        let within = |page: PageIndex| {
            let end = (page + 1).offset(page_bytes);
            page.offset(page_bytes)..end.min(region.store.bytes() as usize)
        };
        if let Some((_, error)) = lost.iter().find(|(page, _)| {
            let page = within(*page);
            page.start < range.start || range.end < page.end
        }) {
            return Err(error.clone());
        }
        for (page, error) in lost {
            let at = within(page);
            self.put(
                page,
                &bytes[at.start - offset..at.end - offset],
                &error,
                &entered,
            )?;
        }
        Ok(())
    }

    /// Maps a lost page with `bytes`. `lost`: the reason why it is lost.
    fn put(
        &self,
        page: PageIndex,
        bytes: &[u8],
        lost: &PageError,
        entered: &SignalGuard,
    ) -> Result<(), PageError> {
        let (shared, page_bytes) = (self.shared(), self.page_bytes());
        let (frame, _inside) = loop {
            self.wait_for_thaw(entered);
            // Before the gate: both may wait for a page to leave.
            let mut frame = self.frame_for(page)?;
            let (ours, rest) = frame.as_mut().split_at_mut(bytes.len());
            ours.copy_from_slice(bytes);
            rest.fill(0);
            match shared.gate.enter_for_program() {
                Some(inside) => break (frame, inside),
                None => shared.frames.release(frame, page_bytes),
            }
        };
        let own = |region: &RegionGuard| {
            let owned = region.words.try_apply(page, protocol::taken_up);
            owned.is_some()
        };
        let Some(region) = self.region.enter().filter(own) else {
            // Another call has put it back.
            shared.frames.release(frame, page_bytes);
            return Ok(());
        };
        // Removed while the page is ours: from the moment that it is mapped it may be lost again.
        region.found(page);
        let mut outcome = Ok(());
        let run = PageRun::new(page, frame, page_bytes);
        let refused = |page, _, _| outcome = Err(shared.installer.lose(&region, page, lost));
        (shared.installer).install(&region, run, UsageCount::Wanted, refused);
        outcome
    }

    /// Waits until no thread of the program forks, with signals let in. To be called where the call
    /// holds nothing.
    pub(crate) fn wait_for_thaw(&self, entered: &SignalGuard) {
        while self.shared().gate.is_closed() {
            entered.wait(|| thread::sleep(LOOK));
        }
    }

    /// Takes a frame for one page. Waits for it until the deadline.
    pub(crate) fn frame_for(&self, page: PageIndex) -> Result<A::Frame, PageError> {
        let (frames, since) = (&self.shared().frames, Since::now());
        let mut starved = false;
        loop {
            if let Some(frame) = frames.for_demand(self.page_bytes(), 0) {
                if starved {
                    frames.budget().end_starving();
                }
                return Ok(frame);
            }
            starved = true;
            let waited = since.elapsed();
            if waited > self.pager.deadline() {
                frames.budget().end_starving();
                return Err(PageError::NoFrame {
                    region: self.region.label(),
                    page: page.number(),
                    waited,
                    unwritten: self.shared().unwritten.why(),
                });
            }
            self.shared().doors.wake_fillers();
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Brings the bytes in `range` in and waits for them. Poisoned pages are tried again. A dead
    /// server shows as an error here, and as SIGBUS elsewhere. With a budget smaller than the
    /// range, its first pages may have left again when this returns.
    ///
    /// # Errors
    /// A page that could not be brought in.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn prefetch_now(&self, range: Range<usize>) -> Result<(), PageError> {
        let entered = self.enter()?;
        let pages = self.pages(range);
        if self.is_ordinary() {
            return Ok(());
        }
        for first in pages.iter().step_by(CHUNK_PAGES) {
            let chunk = first.and_on(CHUNK_PAGES).within(pages);
            self.region.take_error();
            let taken_on = self.demand(chunk);
            let mut outcome = Ok(());
            for page in chunk {
                match outcome {
                    Ok(()) => outcome = self.wait_for(page, &taken_on, &entered),
                    // Fills under way end before we return: their errors would be the next call's.
                    Err(_) => self.wait_while_filling(page, &entered),
                }
            }
            outcome?;
        }
        Ok(())
    }

    fn wait_while_filling(&self, page: PageIndex, entered: &SignalGuard) {
        while self.region.words.load(page).state() == PageState::Filling {
            entered.wait(|| thread::sleep(LOOK));
        }
    }

    /// Asks for pages. Returns the counter of the fillers that have taken theirs on.
    pub(crate) fn demand(&self, pages: PageRange) -> Arc<AtomicUsize> {
        let taken_on = Arc::new(AtomicUsize::new(0));
        let doors = &self.shared().doors;
        doors.tell_fillers(|| Command::Demand(self.region.clone(), pages, taken_on.clone()));
        taken_on
    }

    fn wait_for(
        &self,
        page: PageIndex,
        taken_on: &AtomicUsize,
        entered: &SignalGuard,
    ) -> Result<(), PageError> {
        let since = Instant::now();
        let mut asked = since;
        loop {
            // Looked at before the word. A page that is poisoned may have been so before we asked,
            // and one that is called resident may have been given back by the program itself.
            let is_new = taken_on.load(Ordering::Acquire) == self.shared().shards();
            let word = self.region.words.load(page);
            match word.state() {
                PageState::Resident if is_new => return Ok(()),
                // A pinned page comes back, and only then is its pin worth something.
                PageState::Leaving if !word.pinned() => return Ok(()),
                PageState::Lost => {
                    let lost = self.region.lost(page.alone()).pop();
                    // The program may have overwritten the page just now.
                    if let Some((_, error)) = lost {
                        return Err(error);
                    }
                }
                PageState::Poisoned if is_new => {
                    let waited = since.elapsed();
                    let unknown = PageError::NoFrame {
                        region: self.region.label(),
                        page: page.number(),
                        waited,
                        unwritten: self.shared().unwritten.why(),
                    };
                    return Err(self.region.take_error().unwrap_or(unknown));
                }
                _ => {}
            }
            // The page was read ahead and failed, or came and went.
            if asked.elapsed() > Duration::from_millis(5) {
                asked = Instant::now();
                self.demand(page.alone());
            }
            entered.wait(|| thread::sleep(LOOK));
        }
    }

    /// Brings the bytes in `range` in and keeps them in memory until [`unpin`](Self::unpin).
    /// Accesses do not wait, and system calls find the pages, except while [`flush`](Self::flush)
    /// or [`Advice::DontNeed`] writes one back. Whole pages are pinned. Pins are counted, up to 255
    /// per page; all end with the region. This is `umap_fetch_and_pin` of umap (LLNL), with a way
    /// back.
    ///
    /// # Errors
    /// See [`PinError`]; the pages are then pinned as often as before.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn pin(&self, range: Range<usize>) -> Result<(), PinError> {
        self.under_paging()?;
        let _entered = self.enter()?;
        let pages = self.pages(range.clone());
        for page in pages {
            if let Err(error) = self.pin_page(page, pages) {
                self.unpin_pages(pages.start.until(page));
                return Err(error);
            }
        }
        // Pages may lie between some that are being copied out. System calls could not write to
        // them then.
        self.shared().scatter.wait();
        self.prefetch_now(range).map_err(|error| {
            self.unpin_pages(pages);
            PinError::Page(error)
        })
    }

    fn pin_page(&self, page: PageIndex, of: PageRange) -> Result<(), PinError> {
        let (region, budget) = (&self.region, self.shared().frames.budget());
        let page_bytes = region.page_bytes() as u64;
        loop {
            let seen = region.words.load(page);
            if protocol::pin(seen).is_none() {
                return Err(PinError::TooOften {
                    region: region.label(),
                    page: page.number(),
                });
            }
            // The first pin sets the page's bytes aside before the page is pinned: no more is
            // pinned than there is room for.
            let first = !seen.pinned();
            if first && !budget.pin(page_bytes) {
                return Err(PinError::Budget {
                    asked_bytes: of.len() as u64 * page_bytes,
                    most_bytes: budget.pinned_max(),
                });
            }
            let pin = |w: PageWord| protocol::pin(w).filter(|_| w.pinned() != first);
            if region.words.try_apply(page, pin).is_some() {
                if first {
                    region.count_pinned();
                }
                return Ok(());
            }
            // Another thread has pinned the page meanwhile, or taken its last pin back.
            if first {
                budget.unpin(page_bytes);
            }
        }
    }

    /// Takes back one [`pin`](Self::pin) of each page that `range` touches; pages that are not
    /// pinned are left alone.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn unpin(&self, range: Range<usize>) {
        let pages = self.pages(range);
        if let Ok(_entered) = self.enter() {
            self.unpin_pages(pages);
        }
    }

    /// Calls `act` while the pages that `range` touches are in memory and stay there, as far as the
    /// budget lets them. So a page that cannot be brought in is an error here, where touching it
    /// raises SIGBUS, whose handler belongs to the program and may not return.
    ///
    /// # Errors
    /// A page that could not be brought in.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn with_pages<T>(
        &self,
        range: Range<usize>,
        act: impl FnOnce() -> T,
    ) -> Result<T, PageError> {
        let _entered = self.enter()?;
        let pages = self.pages(range.clone());
        if let Some(_hold) = self.region.beginning.hold() {
            return Ok(act());
        }
        let failed = |&page: &PageIndex| self.pin_page(page, pages).is_err();
        let pinned = pages
            .start
            .until(pages.iter().find(failed).unwrap_or(pages.end));
        self.shared().scatter.wait();
        let is_absent = |page| self.region.words.load(page).state() != PageState::Resident;
        let there = match pages.iter().any(is_absent) {
            true => self.prefetch_now(range),
            false => Ok(()),
        };
        let done = there.map(|()| act());
        self.unpin_pages(pinned);
        done
    }

    fn unpin_pages(&self, pages: PageRange) {
        for page in pages {
            if let Some((_, now)) = self.region.words.try_apply(page, protocol::unpin)
                && !now.pinned()
            {
                self.region.count_unpinned();
                self.shared()
                    .frames
                    .budget()
                    .unpin(self.region.page_bytes() as u64);
            }
        }
    }

    /// Writes all changed pages back, keeps them mapped, and makes them durable as far as the store
    /// can.
    ///
    /// # Errors
    /// See [`FlushError`].
    pub fn flush(&self) -> Result<(), FlushError> {
        self.write_back(true)
    }

    /// Flushes a region that ends next: its pages are given up as they are written back, so that
    /// they move once. Pinned pages, and those whose write-back failed, stay.
    ///
    /// # Errors
    /// See [`FlushError`]. The region goes on with all its contents.
    pub fn flush_out(&self) -> Result<(), FlushError> {
        self.write_back(false)
    }

    fn write_back(&self, keep: bool) -> Result<(), FlushError> {
        let entered = self.enter()?;
        let pages = PageRange::first(self.region.pages());
        // Pages that the program may only read have not changed.
        if !self.region.is_read_only() {
            self.run(pages, keep, &entered)?;
        }
        // The store, to be published or made durable, holds older bytes of lost pages.
        if let Some((_, error)) = self.region.lost(pages).into_iter().next() {
            return Err(error.into());
        }
        self.region.store.flush().map_err(FlushError::Durable)
    }

    /// Takes the first error of background work (an eviction or a fill that failed) since the last
    /// call.
    pub fn take_error(&self) -> Option<PageError> {
        match self.enter() {
            Ok(_entered) => self.region.take_error(),
            Err(forked) => Some(forked),
        }
    }

    /// Begins a call of the program.
    pub(crate) fn enter(&self) -> Result<SignalGuard, PageError> {
        if self.pager.is_parents() {
            return Err(PageError::Forked);
        }
        Ok(SignalGuard::new())
    }

    fn run(&self, pages: PageRange, keep: bool, entered: &SignalGuard) -> Result<(), PageError> {
        let job = Job::new(self.region.clone(), pages, keep);
        self.shared().jobs.add(job.clone());
        self.shared().doors.wake_evictors();
        job.wait(entered)
    }

    /// Gives up those of `pages` that are mapped, without writing back. The region is closing and
    /// quiet. Neighbours leave together, and their frames go on to other regions. Pages of a
    /// read-only region have no frames, and go with the mapping. A freeze does not wait for this:
    /// no child of `fork` has a use for the region.
    fn give_up(&self, pages: PageRange) {
        let (frames, region) = (&self.shared().frames, &self.region);
        let page_bytes = region.page_bytes();
        let mut page = pages.start;
        while page < pages.end {
            let stretch = region.in_one_stripe(page.until(pages.end), false);
            let mut owned = region.own(stretch, protocol::borrow);
            page = owned.end.max(page + 1);
            if region.is_read_only() {
                region.count_out(owned);
                continue;
            }
            while !owned.is_empty() {
                match self.shared().mapper.detach(region, owned) {
                    Ok(run) => {
                        owned.start += run.len();
                        frames.release(run.into_frame(), page_bytes);
                        continue;
                    }
                    // Taken by the program before.
                    Err(DetachError::Absent) => {}
                    // Lost together with the mapping.
                    Err(_) => region.count_out(owned.start.alone()),
                }
                frames.budget().lose(page_bytes);
                owned.start += 1;
            }
        }
    }

    pub(crate) fn shared(&self) -> &SharedParts<A> {
        self.pager.shared()
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the pages that a range of bytes touches.
    pub(crate) fn pages(&self, range: Range<usize>) -> PageRange {
        assert!(
            range.start <= range.end && range.end <= self.region.geometry.bytes,
            "bytes {range:?} do not lie in a region of {} bytes",
            self.region.geometry.bytes
        );
        let first = PageIndex(range.start / self.region.page_bytes());
        if range.is_empty() {
            return first.and_on(0);
        }
        first.until(PageIndex(range.end.div_ceil(self.region.page_bytes())))
    }
}

impl<A: AddressSpace> Drop for MappedRegion<A> {
    fn drop(&mut self) {
        if self.pager.is_parents() {
            // The mapping did not come along, and the remote memory is the parent's.
            mem::forget((self.pager.clone(), self.region.clone()));
            return;
        }
        let _signals = SignalGuard::new();
        let (shared, region) = (self.shared(), &self.region);
        shared.regions.remove(region.address);
        region.close();
        (shared.doors).tell_fillers(|| Command::Settle(region.clone()));
        // Runs of the region that were handed over must not wait for another region's store.
        shared.hand_over.call();
        region.wait_until_quiet();
        // From here on the region's pages have no owner but us.
        let mut dropped_bytes = 0;
        if region.is_read_only() {
            dropped_bytes = region.resident() * region.page_bytes();
        }
        let mut chunk = region.next_touched(0);
        while let Some(at) = chunk
            && region.resident() > 0
        {
            self.give_up(region.chunk(at));
            chunk = region.next_touched(at + 1);
        }
        let pinned_bytes = region.pinned() as u64 * region.page_bytes() as u64;
        shared.frames.budget().unpin(pinned_bytes);
        shared.mapper.unmap(region);
        shared.frames.lose(dropped_bytes);
        // Retired now and here: a worker may hold the region for a moment longer, and must not be
        // the one to give remote memory back.
        region.store.retire();
    }
}

impl<A: AddressSpace> fmt::Debug for MappedRegion<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("address", &format_args!("{:#x}", self.region.address))
            .field("bytes", &self.region.geometry.bytes)
            .field("page_bytes", &self.region.page_bytes())
            .field("resident_pages", &self.region.resident())
            .finish_non_exhaustive()
    }
}
