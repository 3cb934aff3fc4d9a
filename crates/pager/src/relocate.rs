//! Contents that get other page numbers: [`MappedRegion::relocate`].
//!
//! The contents of a page move by its entry (where the store has its bytes, and their hash), and a
//! page that is mapped moves by its frame. No byte is read, copied, sent or hashed.
//!
//! Both pages are owned before anything changes: the new one as `Filling`, the old one as `Filling`
//! or, if it is mapped, as `Leaving`. Other work that meets them meanwhile (read-ahead, an evictor,
//! a fault that is read late) leaves a note or looks elsewhere. Afterwards the old page is zeros,
//! and the new one is mapped if the old one was, and remote if the old one was.
//!
//! The rule: as in `discard.rs`, the calling thread owns pages here and waits for nothing while it
//! does. A page that it cannot have it gives back, and looks again. Each step is inside the reclaim
//! gate: a child of `fork` meets contents in the old place or in the new one.

use std::ops::Range;

use farpage_fabric::Since;
use farpage_store::{PageIndex, PageRange};
use farpage_vm::AddressSpace;

use crate::{
    MappedRegion, PageError,
    doors::Command,
    installer::UsageCount,
    owner_wait::Attempt,
    protocol::{self, OnFailed, PageState},
    region::RegionGuard,
    run::PageRun,
    victims::NotTaken,
};

impl<A: AddressSpace> MappedRegion<A> {
    /// Moves the contents of the pages of `from` to as many pages from the byte `to` on. Both
    /// ranges begin with a page, and they have no page in common. The former contents of the new
    /// pages are gone, and the old pages are zeros.
    ///
    /// The program must use neither range until this returns. Pins stay with the pages, not with
    /// their contents. A page stays where it is if the kernel, a device or, until the deadline, a
    /// slow server holds it, if it cannot be brought in, or if its new place is pinned. Then
    /// `stays` gets its first byte and that of its new place, and sees to it. Neither page has an
    /// owner meanwhile.
    ///
    /// # Errors
    /// [`PageError::Forked`]: nothing has moved.
    ///
    /// # Panics
    /// If the ranges are no whole pages of the region or overlap, or the region is read-only, over
    /// a user's own store, or has a name.
    pub fn relocate(
        &self,
        from: Range<usize>,
        to: usize,
        mut stays: impl FnMut(usize, usize),
    ) -> Result<(), PageError> {
        self.under_paging()?;
        let entered = self.enter()?;
        let (region, page_bytes) = (self.region(), self.page_bytes());
        assert!(
            from.start.is_multiple_of(page_bytes)
                && from.end.is_multiple_of(page_bytes)
                && to.is_multiple_of(page_bytes),
            "bytes {from:?} and {to} are no whole pages of {page_bytes} bytes"
        );
        assert!(
            !region.is_read_only() && !region.store.is_users_own() && !region.store.has_name(),
            "pages of {} cannot change their places",
            region.label()
        );
        let (old, new) = (self.pages(from.clone()), self.pages(to..to + from.len()));
        assert!(old.within(new).is_empty(), "{old:?} and {new:?} overlap");
        let place = |page: PageIndex| new.start + (page - old.start);
        let act = |rest: PageRange| self.try_relocate(rest, place(rest.start));
        let ask = |page| {
            [page, place(page)]
                .iter()
                .for_each(|page| self.ask_for(*page))
        };
        let mut rest = old;
        while self.act_on(&mut rest, &entered, act, ask).is_err() {
            let page = rest.start;
            stays(page.offset(page_bytes), place(page).offset(page_bytes));
            rest.start += 1;
        }
        Ok(())
    }

    /// Moves the leading ones of the `old` pages to `new` and on.
    ///
    /// # Errors
    /// The kernel or a device holds the old page, or the new one is pinned: the old one stays.
    pub(crate) fn try_relocate(
        &self,
        old: PageRange,
        new: PageIndex,
    ) -> Result<Attempt, PageError> {
        let region = self.region();
        let word = region.words.load(new);
        // A pinned page comes back whenever it is taken away.
        if word.pinned() {
            return Err(self.busy(new));
        }
        // A fault that was read late, or read-ahead, may have brought the new page in.
        if word.state() != PageState::Remote {
            self.try_discard(new.alone())?;
            return Ok(Attempt::NotNow(None));
        }
        let Some(region) = region.enter() else {
            return Ok(Attempt::Done(old.len()));
        };
        match region.words.load(old.start).state() {
            PageState::Resident => self.relocate_mapped(&region, old, new),
            PageState::Remote => Ok(self.relocate_remote(&region, old.start, new)),
            PageState::Filling | PageState::Leaving => Ok(Attempt::NotNow(None)),
            PageState::Poisoned | PageState::Lost => self.relocate_broken(&region, old.start, new),
        }
    }

    /// Owns the leading ones of new pages, as far as they are remote.
    fn own(&self, pages: PageRange) -> PageRange {
        let pages = self.region().own(pages, protocol::prefetch);
        // Clears bytes that a late fault has left there, or that the store has of the pages.
        self.region().store.clear(pages);
        self.region().touch(pages);
        pages
    }

    fn relocate_mapped(
        &self,
        region: &RegionGuard,
        old: PageRange,
        new: PageIndex,
    ) -> Result<Attempt, PageError> {
        let shared = self.shared();
        let Some(inside) = shared.gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        let run = old.start.and_on(region.run_pages).within(old);
        let run = region.in_one_stripe(run, false);
        let owned = self.own(region.in_one_stripe(new.and_on(run.len()), false));
        if owned.is_empty() {
            return Ok(Attempt::NotNow(None));
        }
        let wanted = old.start.and_on(owned.len());
        let taken = match (shared.victims).take_out(&inside, region, wanted, protocol::borrow) {
            Ok((_, run)) => run,
            Err(refused) => {
                (owned.iter()).for_each(|page| self.publish_remote(region, page));
                return match refused {
                    NotTaken::NotNow(Some(error)) => Err(PageError::cannot_take_out(
                        region.label(),
                        wanted.start,
                        error,
                    )),
                    // If the program gave the page back, what was stored is the page now.
                    NotTaken::NotNow(None) | NotTaken::NotHere => Ok(Attempt::NotNow(None)),
                };
            }
        };
        let count = taken.len();
        let others = (owned.start + count).until(owned.end);
        (others.iter()).for_each(|page| self.publish_remote(region, page));
        for (from, to) in taken.pages().iter().zip(owned) {
            region.store.relocate(from, to);
        }
        // The old pages are zeros now.
        (shared.victims).remove(region, taken.pages(), shared.installer.clock.now());
        let run = PageRun::new(owned.start, taken.into_frame(), region.page_bytes());
        (shared.installer).put_back(region, run, UsageCount::Unwanted);
        Ok(Attempt::Done(count))
    }

    fn relocate_remote(&self, region: &RegionGuard, old: PageIndex, new: PageIndex) -> Attempt {
        let Some(_inside) = self.shared().gate.enter_for_program() else {
            return Attempt::NotNow(None);
        };
        if self.own(new.alone()).is_empty() {
            return Attempt::NotNow(None);
        }
        if region.words.try_apply(old, protocol::prefetch).is_none() {
            self.publish_remote(region, new);
            return Attempt::NotNow(None);
        }
        region.store.relocate(old, new);
        self.publish_remote(region, new);
        self.publish_remote(region, old);
        Attempt::Done(1)
    }

    /// Moves a page that raises SIGBUS. A poisoned page is tried again when its new place is
    /// touched; a lost page is lost there, too.
    fn relocate_broken(
        &self,
        region: &RegionGuard,
        old: PageIndex,
        new: PageIndex,
    ) -> Result<Attempt, PageError> {
        let shared = self.shared();
        // The old address raises SIGBUS: only a page ends that.
        let frame = self.frame_for(old)?;
        // Behind the wait for the frame.
        let Some(_inside) = shared.gate.enter_for_program() else {
            shared.frames.release(frame, region.page_bytes());
            return Ok(Attempt::NotNow(None));
        };
        if self.own(new.alone()).is_empty() {
            shared.frames.release(frame, region.page_bytes());
            return Ok(Attempt::NotNow(None));
        }
        let take = |w| protocol::heal(w).or(protocol::taken_up(w));
        if region.words.try_apply(old, take).is_none() {
            shared.frames.release(frame, region.page_bytes());
            self.publish_remote(region, new);
            return Ok(Attempt::NotNow(None));
        }
        // Looked for while the page is ours: it may have been lost a moment ago.
        match region.lost(old.alone()).pop() {
            Some((_, error)) => {
                region.found(old);
                region.store.clear(old.alone());
                shared.installer.lose(region, new, &error);
            }
            None => {
                region.store.relocate(old, new);
                self.publish_remote(region, new);
            }
        }
        self.map_zeros(PageRun::new(old, frame, region.page_bytes()));
        Ok(Attempt::Done(1))
    }

    /// Publishes a page that is owned as `Filling` as remote. If a thread waits for it, its filler
    /// brings it in.
    pub(crate) fn publish_remote(&self, region: &RegionGuard, page: PageIndex) {
        if region.words.apply(page, protocol::fill_failed) == OnFailed::Dropped {
            return;
        }
        let shard = self.shared().mapper.shard_of(region, page);
        let command = Command::TakeOver(region.again(), page, self.busy(page), Since::now());
        self.shared().doors.tell_filler(shard, command);
    }
}
