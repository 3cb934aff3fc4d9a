//! Pages that the program needs no more, whatever they hold: [`MappedRegion::discard`].
//!
//! A mapped page is owned as `Leaving` and detached, so that a concurrent write lands either
//! before, and is gone with the page, or after, on zeros. A page that is not mapped is owned as
//! `Filling`. The store forgets the page's bytes while the page is owned. A page that is wanted
//! meanwhile, or pinned, is mapped again as zeros.
//!
//! The rule: the calling thread owns pages here and waits for nothing while it does, except for a
//! frame, and that outside the reclaim gate: while the program forks, nothing is discarded. The
//! page protocol is that of evictors and fillers; only the bytes differ.

use std::ops::Range;

use farpage_store::{PageIndex, PageRange};
use farpage_vm::AddressSpace;

use crate::{
    MappedRegion, PageError,
    doors::Command,
    installer::UsageCount,
    owner_wait::Attempt,
    protocol::{self, NEVER_LEFT, OnFailed, PageState},
    region::{RegionGuard, chunk_of},
    run::PageRun,
    victims::NotTaken,
};

impl<A: AddressSpace> MappedRegion<A> {
    /// Turns the pages that lie wholly in `range` into zeros. The store's space for these pages and
    /// their frames are freed, and nothing is written back. The last page counts as whole where
    /// `range` ends with the region. Returns the range of these pages; the caller zeroes the rest.
    ///
    /// # Errors
    /// A page that the kernel, a device or a slow store holds until the deadline. The pages before
    /// it are zeros.
    ///
    /// # Panics
    /// If the range does not lie in the region, or the region is read-only or over a user's own
    /// store, whose pages cannot be forgotten.
    pub fn discard(&self, range: Range<usize>) -> Result<Range<usize>, PageError> {
        let entered = self.enter()?;
        let region = self.region();
        assert!(
            !region.is_read_only() && !region.store.is_users_own(),
            "pages of {} cannot be discarded",
            region.label()
        );
        let pages = self.whole_pages(range.clone());
        if let Some(discarded) = self.discard_ordinary(range) {
            return discarded;
        }
        let act = |rest: PageRange| match self.next_touched(rest.start).min(rest.end) {
            next if next > rest.start => Ok(Attempt::Done(next - rest.start)),
            _ => self.try_discard(rest),
        };
        // Pages that nobody has touched are passed over also while the program forks.
        let mut rest = self
            .next_touched(pages.start)
            .min(pages.end)
            .until(pages.end);
        self.act_on(&mut rest, &entered, act, |page| self.ask_for(page))?;
        Ok(self.bytes_of(pages))
    }

    /// Returns the bytes of pages, whole ones.
    pub(crate) fn bytes_of(&self, pages: PageRange) -> Range<usize> {
        pages.start.offset(self.page_bytes())..pages.end.offset(self.page_bytes())
    }

    /// Returns the first page from `page` on that may hold anything but zeros: all others were
    /// never brought in. Of a region with a name, more is stored than this program has touched.
    fn next_touched(&self, page: PageIndex) -> PageIndex {
        let region = self.region();
        if region.store.has_name() {
            return page;
        }
        match region.next_touched(chunk_of(page)) {
            Some(chunk) => region.chunk(chunk).start.max(page),
            None => PageIndex(region.pages()),
        }
    }

    /// Asks the worker that owns a page to let go of it. A worker may keep a page that was read
    /// ahead until a thread wants it, or that was handed over and no evictor was called for. The
    /// page is not wanted here: if it has left meanwhile, it is not brought in.
    pub(crate) fn ask_for(&self, page: PageIndex) {
        match self.region().words.load(page).state() {
            PageState::Filling => {
                (self.shared().doors).tell_fillers(|| Command::LetGo(self.region().clone(), page))
            }
            PageState::Leaving => self.shared().hand_over.noted(self.region(), page),
            _ => {}
        }
    }

    /// Discards the leading ones of `pages`.
    pub(crate) fn try_discard(&self, pages: PageRange) -> Result<Attempt, PageError> {
        let (region, page) = (self.region(), pages.start);
        match region.words.load(page).state() {
            // Looked at after the word: any owner of the page since has left it blank, or the
            // program has written to it since.
            PageState::Remote if region.store.is_blank(page) => {
                let is_blank = |&page: &PageIndex| {
                    region.words.load(page).state() == PageState::Remote
                        && region.store.is_blank(page)
                };
                Ok(Attempt::Done(
                    pages.iter().take_while(is_blank).count().max(1),
                ))
            }
            PageState::Remote => self.discard_remote(page),
            PageState::Resident => {
                let run = page.and_on(region.run_pages).within(pages);
                self.discard_mapped(region.in_one_stripe(run, false))
            }
            PageState::Filling | PageState::Leaving => Ok(Attempt::NotNow(None)),
            PageState::Poisoned | PageState::Lost => self.discard_broken(page),
        }
    }

    fn discard_mapped(&self, pages: PageRange) -> Result<Attempt, PageError> {
        let (shared, region) = (self.shared(), self.region());
        let Some(inside) = shared.gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        let taken = (shared.victims).take_out(&inside, region, pages, protocol::borrow);
        let (region, run) = match taken {
            Ok(taken) => taken,
            // The program gave the page back to the kernel: what was stored is the page now.
            Err(NotTaken::NotHere) => return Ok(Attempt::Done(0)),
            Err(NotTaken::NotNow(error)) => {
                let label = |error| PageError::cannot_take_out(region.label(), pages.start, error);
                return Ok(Attempt::NotNow(error.map(label)));
            }
        };
        let taken = run.len();
        // Cleared while the pages are ours, and before others may fill them.
        region.store.clear(run.pages());
        let map_zeros = |run| self.map_zeros(run);
        (shared.victims).leave(&region, run, NEVER_LEFT, |_, _| true, map_zeros);
        Ok(Attempt::Done(taken))
    }

    fn discard_remote(&self, page: PageIndex) -> Result<Attempt, PageError> {
        let Some(region) = self.region().enter() else {
            return Ok(Attempt::Done(1));
        };
        let Some(inside) = self.shared().gate.enter_for_program() else {
            return Ok(Attempt::NotNow(None));
        };
        if region.words.try_apply(page, protocol::prefetch).is_none() {
            return Ok(Attempt::Done(0));
        }
        region.store.clear(page.alone());
        region.words.apply(page, |w| (protocol::forgotten(w), ()));
        // The store has zeros, too. A frame may have to be waited for.
        drop(inside);
        let mut outcome = Ok(Attempt::Done(1));
        match region.words.apply(page, protocol::fill_failed) {
            OnFailed::Dropped => region.store.count_left(page),
            // A thread waits for the page: it comes as zeros.
            OnFailed::MustPoison => match self.frame_for(page) {
                Ok(frame) => self.map_zeros(PageRun::new(page, frame, region.page_bytes())),
                Err(error) => {
                    (self.shared().installer).fail(&region, page, error.clone());
                    outcome = Err(error);
                }
            },
        }
        outcome
    }

    /// Turns a page that raises SIGBUS into zeros.
    fn discard_broken(&self, page: PageIndex) -> Result<Attempt, PageError> {
        let (shared, region) = (self.shared(), self.region());
        let frame = self.frame_for(page)?;
        let take = |w| protocol::heal(w).or(protocol::taken_up(w));
        let own = |region: &RegionGuard| region.words.try_apply(page, take).is_some();
        let Some(_inside) = shared.gate.enter_for_program() else {
            shared.frames.release(frame, region.page_bytes());
            return Ok(Attempt::NotNow(None));
        };
        let Some(region) = region.enter().filter(own) else {
            shared.frames.release(frame, region.page_bytes());
            return Ok(Attempt::Done(0));
        };
        region.found(page);
        region.store.clear(page.alone());
        // Where the program has unmapped the addresses, the page is poisoned again.
        self.map_zeros(PageRun::new(page, frame, region.page_bytes()));
        Ok(Attempt::Done(1))
    }

    /// Maps owned pages as zeros, and overwrites their frame for that.
    pub(crate) fn map_zeros(&self, run: PageRun<A::Frame>) {
        let (shared, region) = (self.shared(), self.region());
        let (first, mut frame) = (run.first(), run.into_frame());
        frame.as_mut().fill(0);
        let run = PageRun::new(first, frame, region.page_bytes());
        // The store has zeros, too: nothing is lost with a page that cannot be mapped.
        let refused = |page, _, error| {
            shared.installer.fail(region, page, error);
        };
        (shared.installer).install(region, run, UsageCount::Wanted, refused);
    }

    pub(crate) fn busy(&self, page: PageIndex) -> PageError {
        PageError::Busy {
            region: self.region().label(),
            page: page.number(),
        }
    }

    /// Returns the pages that lie wholly in a range of bytes.
    fn whole_pages(&self, range: Range<usize>) -> PageRange {
        let (region, page_bytes) = (self.region(), self.page_bytes());
        let all = PageRange::first(region.pages());
        assert!(
            range.start <= range.end && range.end <= region.geometry.bytes,
            "bytes {range:?} do not lie in a region of {} bytes",
            region.geometry.bytes
        );
        let first = PageIndex(range.start.div_ceil(page_bytes));
        let end = if range.end as u64 >= region.store.bytes() {
            all.end
        } else {
            PageIndex(range.end / page_bytes)
        };
        first.until(end.max(first))
    }
}
