//! Addresses that leave paging for a while: [`MappedRegion::cede`] and [`MappedRegion::regain`].
//!
//! A program maps files, code or shared memory over a part of its region. The pages there are ceded
//! first: memory of the kernel's own takes their place, or ordinary memory stays, and their words
//! say `Poisoned`, as those of addresses that the program has unmapped. So no page is filled, taken
//! out or counted there.
//!
//! The rule: a page is owned from the moment that its bytes are final until its addresses are
//! ceded. A thread that touches the page meanwhile sleeps, and meets the memory that lies there
//! afterwards. As in `discard.rs`, all of this is inside the reclaim gate: while the program forks,
//! no page is ceded or regained.

use std::{io, ops::Range};

use farpage_signals::SignalGuard;
use farpage_store::{PageIndex, PageRange};
use farpage_vm::{AddressSpace, Cede};

use crate::{
    MappedRegion, PageError,
    installer::UsageCount,
    owner_wait::{Attempt, OwnerWait},
    protocol::{self, PageState, PageWord},
    region::RegionGuard,
};

/// Upper bound of the pages that are ceded by one call of the kernel. A thread that wants one of
/// them waits for all.
const CEDED_TOGETHER: usize = 4096;

impl<A: AddressSpace> MappedRegion<A> {
    /// Takes the pages in `range` out of paging until they are [regained](Self::regain). Their
    /// contents are gone. Memory without access lies there then, and the program may map there what
    /// it likes.
    ///
    /// # Errors
    /// A page that cannot be discarded until the deadline, is pinned, or that the kernel does not
    /// replace. No page is ceded then, and pages before that page are zeros.
    ///
    /// # Panics
    /// If the range is no whole pages of the region, or the region is read-only, over a user's own
    /// store, or has a name.
    pub fn cede(&self, range: Range<usize>) -> Result<(), PageError> {
        let entered = self.enter()?;
        let pages = self.pages_to_cede(&range);
        if self.cede_ordinary(&entered, pages, Cede::Barred)? {
            return Ok(());
        }
        let act = |rest: PageRange| {
            let together = rest.start.and_on(CEDED_TOGETHER).within(rest);
            match self.try_cede(together)? {
                Attempt::Done(count) => Ok(Attempt::Done(count)),
                Attempt::NotNow(_) | Attempt::Absent => {
                    self.try_discard(together)?;
                    Ok(Attempt::NotNow(None))
                }
            }
        };
        let mut rest = pages;
        if let Err(error) = self.act_on(&mut rest, &entered, act, |page| self.ask_for(page)) {
            let before = self.bytes_of(pages.start.until(rest.start));
            if !before.is_empty() {
                self.regain(before)?;
            }
            return Err(error);
        }
        Ok(())
    }

    /// Cedes the page at `offset` as [`cede`](Self::cede) does, with its bytes: they lie in memory
    /// of the kernel's own afterwards. It is protected as the page was, or can be read and written
    /// if the kernel does not list mappings or move several at once (before Linux 6.17). Other
    /// threads may use the page meanwhile.
    ///
    /// # Errors
    /// A page that cannot be brought in, is lost or busy, or that the kernel does not replace. The
    /// page is as before.
    ///
    /// # Panics
    /// As [`cede`](Self::cede).
    pub fn cede_with_bytes(&self, offset: usize) -> Result<(), PageError> {
        let entered = self.enter()?;
        let mut pages = self.pages_to_cede(&(offset..offset + self.page_bytes()));
        if self.cede_ordinary(&entered, pages, Cede::InPlace)? {
            return Ok(());
        }
        let act = |rest: PageRange| self.try_cede_with_bytes(rest.start);
        self.act_on(&mut pages, &entered, act, |page| self.ask_for(page))
    }

    /// Takes ceded pages back: what is mapped in `range` is gone, and the pages are zeros.
    ///
    /// The program must not use the range until this returns.
    ///
    /// # Errors
    /// The kernel's, for lack of mappings: the pages are ceded as before, or cannot be accessed.
    ///
    /// # Panics
    /// As [`cede`](Self::cede).
    pub fn regain(&self, range: Range<usize>) -> Result<(), PageError> {
        let entered = self.enter()?;
        let pages = self.pages_to_cede(&range);
        let (shared, region) = (self.shared(), self.region());
        loop {
            self.wait_for_thaw(&entered);
            let Some(_inside) = shared.gate.enter_for_program() else {
                continue;
            };
            // Until the pages' words say that they are ordinary again.
            let hold = region.beginning.hold();
            let regained = shared.mapper.regain(region, pages);
            regained.map_err(|error| self.not_ceded(pages.start, &error))?;
            if hold.is_some() {
                for page in pages {
                    let is_settled = self.settle_regained(page);
                    debug_assert!(is_settled, "pages of ordinary memory have no owner");
                }
                return Ok(());
            }
            break;
        }
        for page in pages {
            let mut waiting = OwnerWait::default();
            while !self.settle_regained(page) {
                waiting.wait(&entered, || self.ask_for(page));
            }
        }
        Ok(())
    }

    /// Cedes pages of ordinary memory. Returns false if the region is under paging.
    fn cede_ordinary(
        &self,
        entered: &SignalGuard,
        pages: PageRange,
        how: Cede<'_>,
    ) -> Result<bool, PageError> {
        let (shared, region) = (self.shared(), self.region());
        while region.beginning.is_ordinary() {
            self.wait_for_thaw(entered);
            let Some(_inside) = shared.gate.enter_for_program() else {
                continue;
            };
            let (Some(_hold), Some(guard)) = (region.beginning.hold(), region.enter()) else {
                break;
            };
            let ceded = shared.mapper.cede(region, pages, how);
            ceded.map_err(|error| self.not_ceded(pages.start, &error))?;
            for page in pages {
                let owned = guard.words.try_apply(page, own_unpinned);
                debug_assert!(owned.is_some(), "no page of ordinary memory has an owner");
            }
            self.publish_ceded(&guard, pages);
            return Ok(true);
        }
        Ok(false)
    }

    /// Publishes a page as remote whose addresses were regained. Returns false while it has another
    /// owner: a worker that has read a fault late, and calls the page poisoned again.
    pub(crate) fn settle_regained(&self, page: PageIndex) -> bool {
        let Some(region) = self.region().enter() else {
            return true;
        };
        if region.words.try_apply(page, protocol::heal).is_some() {
            // Notes are of threads that were woken when the page was ceded.
            region.words.apply(page, |w| (protocol::installing(w), ()));
            self.publish_remote(&region, page);
            return true;
        }
        !matches!(
            region.words.load(page).state(),
            PageState::Filling | PageState::Leaving | PageState::Poisoned
        )
    }

    fn pages_to_cede(&self, range: &Range<usize>) -> PageRange {
        let (region, page_bytes) = (self.region(), self.page_bytes());
        let is_whole = |at: usize| at.is_multiple_of(page_bytes);
        assert!(
            is_whole(range.start) && is_whole(range.end),
            "bytes {range:?} are no whole pages of {page_bytes} bytes"
        );
        assert!(
            !region.is_read_only() && !region.store.is_users_own() && !region.store.has_name(),
            "pages of {} cannot be ceded",
            region.label()
        );
        self.pages(range.clone())
    }

    /// Cedes the leading ones of `pages`, as far as they are absent. Their contents are gone.
    pub(crate) fn try_cede(&self, pages: PageRange) -> Result<Attempt, PageError> {
        let shared = self.shared();
        let gone = |page: &PageIndex| shared.mapper.is_gone(self.region(), *page);
        if gone(&pages.start) {
            return Ok(Attempt::Done(pages.iter().take_while(gone).count()));
        }
        let Some(region) = self.region().enter() else {
            return Ok(Attempt::Done(pages.len()));
        };
        let Some(_inside) = shared.gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        let owned = region.own(pages, own_unpinned);
        if owned.is_empty() {
            return Ok(Attempt::NotNow(None));
        }
        region.store.clear(owned);
        self.cede_owned(&region, owned, Cede::Barred)
    }

    /// Cedes a page with its bytes, if it is mapped or blank.
    pub(crate) fn try_cede_with_bytes(&self, page: PageIndex) -> Result<Attempt, PageError> {
        let region = self.region();
        if self.shared().mapper.is_gone(region, page) {
            return Ok(Attempt::Done(1));
        }
        match region.words.load(page).state() {
            PageState::Remote if region.store.is_blank(page) => self.cede_blank(page),
            PageState::Resident => self.cede_mapped(page),
            PageState::Remote | PageState::Poisoned | PageState::Lost => Ok(Attempt::Absent),
            PageState::Filling | PageState::Leaving => Ok(Attempt::NotNow(None)),
        }
    }

    /// Cedes a page of which nothing is stored, and which is not mapped.
    fn cede_blank(&self, page: PageIndex) -> Result<Attempt, PageError> {
        let Some(region) = self.region().enter() else {
            return Ok(Attempt::Done(1));
        };
        let Some(_inside) = self.shared().gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        if region.words.try_apply(page, own_unpinned).is_none() {
            return Ok(Attempt::NotNow(None));
        }
        // Another thread may have written to the page before it was owned here.
        if !region.store.is_blank(page) {
            self.publish_remote(&region, page);
            return Ok(Attempt::NotNow(None));
        }
        let zeros = vec![0; region.page_bytes()];
        self.cede_owned(&region, page.alone(), Cede::With(&zeros))
    }

    /// Cedes pages that are owned as `Filling`. Gives them back if the kernel refuses.
    fn cede_owned(
        &self,
        region: &RegionGuard,
        owned: PageRange,
        how: Cede<'_>,
    ) -> Result<Attempt, PageError> {
        if let Err(error) = self.shared().mapper.cede(region, owned, how) {
            (owned.iter()).for_each(|page| self.publish_remote(region, page));
            return Err(self.not_ceded(owned.start, &error));
        }
        self.publish_ceded(region, owned);
        Ok(Attempt::Done(owned.len()))
    }

    fn cede_mapped(&self, page: PageIndex) -> Result<Attempt, PageError> {
        let (shared, region) = (self.shared(), self.region());
        let Some(inside) = shared.gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        let taken = (shared.victims).take_out(&inside, region, page.alone(), protocol::borrow);
        // The kernel or a device may use the page for now.
        let Ok((region, run)) = taken else {
            return Ok(Attempt::NotNow(None));
        };
        let (_, bytes) = run.bytes_by_page().next().expect("a run has a page");
        if let Err(error) = (shared.mapper).cede(&region, page.alone(), Cede::With(bytes)) {
            (shared.installer).put_back(&region, run, UsageCount::Wanted);
            return Err(self.not_ceded(page, &error));
        }
        region.store.clear(page.alone());
        self.publish_ceded(&region, page.alone());
        (shared.frames).release(run.into_frame(), region.page_bytes());
        Ok(Attempt::Done(1))
    }

    /// Publishes owned pages whose addresses are ceded, and wakes the threads that sleep there.
    fn publish_ceded(&self, region: &RegionGuard, pages: PageRange) {
        region.count_released();
        for page in pages {
            region.words.apply(page, |w| (protocol::poisoned(w), ()));
        }
        let mut rest = pages;
        while !rest.is_empty() {
            let stripe = region.in_one_stripe(rest, false);
            self.shared().mapper.wake(region, stripe);
            rest.start = stripe.end;
        }
    }

    fn not_ceded(&self, page: PageIndex, error: &io::Error) -> PageError {
        PageError::cannot_map(self.region().label(), page, error)
    }
}

/// Owns a page that is remote and not pinned. `None`: the page is neither.
fn own_unpinned(w: PageWord) -> Option<PageWord> {
    protocol::prefetch(w).filter(|w| !w.pinned())
}
