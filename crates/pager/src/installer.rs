//! Mapping pages, publishing them and waking their threads: [`Installer`].
//!
//! The rule: a page's word follows its mapping, never the other way round. A page is called
//! resident after it was mapped, and poisoned after its addresses were. Threads that sleep on it
//! are woken after that. The caller owns the pages before; they have no owner afterwards.

use std::{io, sync::Arc};

use farpage_fabric::log::later;
use farpage_store::{PageIndex, PageRange};
use farpage_vm::{AddressSpace, InstallError, InstallErrorKind};

use crate::{
    PageError,
    clock::FillClock,
    crash_message::{self, CrashMessage},
    frames::FrameAllocator,
    mapper::Mapper,
    protocol::{self, OnFailed, PageState, PageWord, USAGE_MAX},
    region::Region,
    run::{PageRun, pages_in},
};

/// Usage count that a page starts with, by the reason why it is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageCount {
    /// Highest: a thread wanted the page while it was leaving.
    Wanted,
    /// Highest if the page had left only recently, otherwise 0: a thread faulted on the page alone.
    Refault,
    /// 1 if the page had left only recently, otherwise 0: a thread faulted on it along a stream.
    Along,
    /// 0: no thread waits for the page.
    Unwanted,
}

/// Publisher of pages that are, or cannot be, in memory: ends their ownership.
pub(crate) struct Installer<A: AddressSpace> {
    pub(crate) mapper: Arc<Mapper<A>>,
    pub(crate) frames: Arc<FrameAllocator<A>>,
    pub(crate) clock: Arc<FillClock>,
    pub(crate) crash_message: CrashMessage,
}

impl<A: AddressSpace> Installer<A> {
    /// Maps a run of owned pages and publishes them. `refused` gets each page that is refused, true
    /// if the store has the page's bytes, and the error: the caller still owns the page.
    pub(crate) fn install(
        &self,
        region: &Region,
        mut run: PageRun<A::Frame>,
        usage: UsageCount,
        mut refused: impl FnMut(PageIndex, bool, PageError),
    ) {
        self.announce(region, run.pages());
        if region.is_read_only() {
            run = match self.install_copy(region, run) {
                Ok(pages) => return self.arrived(region, pages, usage),
                Err(run) => run,
            };
        }
        let page_bytes = region.page_bytes();
        loop {
            let pages = run.pages();
            let Err(InstallError { frame, kind }) = self.mapper.install(region, run) else {
                return self.arrived(region, pages, usage);
            };
            let mapped = pages.len() - pages_in(&frame, page_bytes);
            let first = pages.start + mapped;
            self.arrived(region, pages.start.until(first), usage);
            let mut page = PageRun::new(first, frame, page_bytes);
            let rest = page.keep_first(1);
            self.refuse(region, page, usage, kind, &mut refused);
            match rest {
                Some(rest) => run = rest,
                None => return,
            }
        }
    }

    /// Maps a run of owned pages and publishes them. A page that is refused is poisoned if the
    /// store has its bytes, and lost otherwise.
    pub(crate) fn put_back(&self, region: &Region, run: PageRun<A::Frame>, usage: UsageCount) {
        self.install(region, run, usage, |page, is_stored, error| {
            if is_stored {
                self.fail(region, page, error);
            } else {
                self.lose(region, page, &error);
            }
        });
    }

    /// Maps a copy of a run of a read-only region: it leaves by being dropped, without a frame.
    /// Returns its pages.
    ///
    /// # Errors
    /// The run: there is no room beside its frame, or a page is refused. Moving it says why.
    fn install_copy(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
    ) -> Result<PageRange, PageRun<A::Frame>> {
        let (page_bytes, pages) = (region.page_bytes(), run.pages());
        let Some(mut room) = self.frames.for_copy(page_bytes, run.len(), true) else {
            return Err(run);
        };
        let frame = self.mapper.install_copy(region, run, &mut room)?;
        self.frames.copied(frame, page_bytes);
        Ok(pages)
    }

    /// Announces owned pages before they are mapped: the program may change them from here on.
    pub(crate) fn announce(&self, region: &Region, pages: PageRange) {
        region.touch(pages);
        for page in pages {
            region.words.apply(page, |w| (protocol::installing(w), ()));
        }
    }

    /// Deals with a page that was not mapped.
    fn refuse(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
        usage: UsageCount,
        kind: InstallErrorKind,
        refused: &mut impl FnMut(PageIndex, bool, PageError),
    ) {
        let (page, frame) = (run.first(), run.into_frame());
        let error = match kind {
            // The program took the page away and another thread put it back before we looked: the
            // mapped bytes are the newer ones. The frame is dropped; its share of the budget stands
            // for the mapped page from now on.
            InstallErrorKind::Exists => {
                drop(frame);
                return self.arrived(region, page.alone(), usage);
            }
            InstallErrorKind::Gone => {
                self.frames.release(frame, region.page_bytes());
                return self.gone(region, page, usage != UsageCount::Unwanted);
            }
            InstallErrorKind::Os(error) => error,
            kind => io::Error::other(kind),
        };
        // Threads may sleep whose notes were settled just now, so a page that is not there after
        // all counts as wanted.
        region.words.apply(page, protocol::fault);
        let is_stored = region.store.is_unchanged(page, frame.as_ref());
        self.frames.release(frame, region.page_bytes());
        let error = PageError::cannot_map(region.label(), page, &error);
        refused(page, is_stored, error);
    }

    /// Publishes an owned page without addresses as poisoned: the program has unmapped them. If the
    /// page is `wanted`, the region's error says so.
    pub(crate) fn gone(&self, region: &Region, page: PageIndex, wanted: bool) {
        // Before the word says so: a thread that sees the page poisoned looks for the reason.
        if wanted {
            region.record(PageError::Unmapped {
                region: region.label(),
                page: page.number(),
            });
        }
        region.words.apply(page, |w| (protocol::poisoned(w), ()));
        self.mapper.wake(region, page.alone());
    }

    /// Counts owned pages that have been mapped, and publishes them.
    pub(crate) fn arrived(&self, region: &Region, pages: PageRange, usage: UsageCount) {
        region.count_in(pages);
        self.publish(region, pages, usage);
    }

    /// Publishes owned pages that are mapped and were counted when they came.
    pub(crate) fn publish(&self, region: &Region, pages: PageRange, usage: UsageCount) {
        let page_bytes = region.page_bytes();
        let now = self.clock.tick(page_bytes * pages.len());
        let mut noted: Option<PageRange> = None;
        let mut returns = self.clock.returns();
        for page in pages {
            let before = region.words.apply(page, |w| {
                let count = match usage {
                    UsageCount::Wanted => USAGE_MAX,
                    UsageCount::Refault if self.clock.is_recent(w.stamp(), now) => USAGE_MAX,
                    UsageCount::Along => u8::from(self.clock.is_recent(w.stamp(), now)),
                    UsageCount::Refault | UsageCount::Unwanted => 0,
                };
                (protocol::installed(w, count, now), w)
            });
            if before.state() == PageState::Filling {
                returns.count(before.stamp(), now, page_bytes);
                if usage == UsageCount::Refault {
                    self.clock.came_back(before.stamp(), now);
                }
            }
            if before.wanted() {
                noted = Some(noted.map_or(page, |noted| noted.start).until(page + 1));
            }
        }
        self.clock.returned(&returns);
        match noted {
            Some(noted) => self.mapper.wake(region, noted),
            // Notes from before the mapping are settled. Mapping has woken the threads that sleep
            // in the kernel, and no others.
            None => self.mapper.tell(region, pages),
        }
    }

    /// Gives up an owned page that cannot be brought in: threads that wait for it get SIGBUS.
    /// Returns whether there were any.
    pub(crate) fn fail(&self, region: &Region, page: PageIndex, error: PageError) -> bool {
        // Before the word says so: a thread that sees the page poisoned looks for the reason.
        region.record(error.clone());
        match region.words.apply(page, protocol::fill_failed) {
            OnFailed::Dropped => false,
            OnFailed::MustPoison => {
                self.crash_message.say(region, page, &error);
                self.poison(region, page, protocol::poisoned);
                let address = region.address_of(page);
                later(move || {
                    tracing::error!(%error, page = page.number(), address = format_args!("{address:#x}"), "page is lost for now; touching it raises SIGBUS");
                });
                true
            }
        }
    }

    /// Publishes an owned page as lost: its bytes are gone, and the store has others. Touching it
    /// raises SIGBUS until the program overwrites it. Returns the program's error.
    pub(crate) fn lose(&self, region: &Region, page: PageIndex, why: &PageError) -> PageError {
        let error = match why {
            PageError::Lost { .. } => why.clone(),
            why => PageError::Lost {
                region: region.label(),
                page: page.number(),
                why: why.to_string(),
            },
        };
        self.crash_message.say(region, page, &error);
        region.record(error.clone());
        region.lose(page, error.clone());
        self.poison(region, page, protocol::lost);
        let (address, told) = (region.address_of(page), error.clone());
        later(move || {
            tracing::error!(error = %told, page = page.number(), address = format_args!("{address:#x}"), "page is lost; touching it raises SIGBUS");
        });
        error
    }

    /// Makes every access to an owned page raise SIGBUS, and publishes that.
    fn poison(&self, region: &Region, page: PageIndex, published: impl Fn(PageWord) -> PageWord) {
        if let Err(error) = self.mapper.poison(region, page) {
            // Nothing else can stop a thread that waits for the page from sleeping for ever.
            crash_message::write(&format!("farpage: cannot poison a lost page: {error}\n"));
            std::process::abort();
        }
        region.words.apply(page, |w| (published(w), ()));
        self.mapper.wake(region, page.alone());
    }
}
