//! Pages of regions, in and out of the program's memory: [`Mapper`].
//!
//! The rule: only the mapper calls [`AddressSpace`]. Calls by region and page become calls by shard
//! and address, and pages that are taken out are counted out of their region. The caller owns the
//! pages; the protocol is its business.

use std::{io, ops::Range, sync::Arc};

use crossbeam_utils::CachePadded;
use farpage_store::{PageIndex, PageRange};
use farpage_vm::{
    AddressSpace, Batch, Cede, DetachError, Detached, EventCount, EventScope, EventSources, Events,
    Geometry, InstallError, InstallErrorKind, PageIn, PageOut, Pages, RegionMapping, ReservedRoom,
    SCATTERED_PAGES_MAX, Shard,
};
use smallvec::SmallVec;

use crate::{
    region::{CHUNK_PAGES, Region, chunks_of},
    run::{PageRun, pages_in},
};

/// Size of the smallest page that the kernel knows.
pub(crate) const KERNEL_PAGE_BYTES: usize = 4096;

/// Number of event counts. More would let threads that wait for different pages share one less
/// often.
const EVENT_COUNTS: usize = 64;

/// Pages that leave together by copying, ascending.
pub(crate) type Scattered = SmallVec<[PageIndex; SCATTERED_PAGES_MAX]>;
/// Runs that leave together by being dropped, ascending.
pub(crate) type Runs = SmallVec<[PageRange; SCATTERED_PAGES_MAX]>;

/// Address space of the program, by regions and pages.
pub(crate) struct Mapper<A: AddressSpace> {
    space: Arc<A>,
    /// Events of pages that threads wait for, which serve their own faults. Neighbours share one,
    /// and so do pages far apart.
    woken: Vec<CachePadded<EventCount>>,
}

impl<A: AddressSpace> Mapper<A> {
    pub(crate) fn new(space: Arc<A>) -> Mapper<A> {
        let woken = (0..EVENT_COUNTS).map(|_| CachePadded::default());
        Mapper {
            woken: woken.collect(),
            space,
        }
    }

    pub(crate) fn shards(&self) -> usize {
        self.space.shards()
    }

    /// Makes sure that faults are caught whatever the program closes.
    pub(crate) fn keep_open(&self) -> io::Result<()> {
        self.space.keep_open()
    }

    /// Returns the shard that serves a page.
    pub(crate) fn shard_of(&self, region: &Region, page: PageIndex) -> Shard {
        region.shard_of(page, self.shards())
    }

    /// Maps addresses for a new region.
    pub(crate) fn map(&self, geometry: Geometry) -> io::Result<RegionMapping> {
        self.space.map(geometry)
    }

    /// Starts to catch the faults of a region that was mapped as ordinary memory.
    pub(crate) fn begin_paging(&self, region: &Region) -> io::Result<()> {
        self.space.begin_paging(region.address, region.geometry)
    }

    /// Gives the memory at `bytes` of a region, whole kernel pages, back to the kernel.
    pub(crate) fn drop_memory(&self, region: &Region, bytes: Range<usize>) -> io::Result<()> {
        let addresses = region.address + bytes.start..region.address + bytes.end;
        self.space.drop_memory(addresses)
    }

    /// Lets the kernel back `bytes` of an ordinary region with huge pages, or not.
    pub(crate) fn advise_huge(&self, region: &Region, bytes: Range<usize>, huge: bool) {
        let addresses = region.address + bytes.start..region.address + bytes.end;
        self.space.advise_huge(addresses, huge);
    }

    /// Replaces `out` by the parts of `bytes` of a region, whole kernel pages, where memory is.
    pub(crate) fn present(
        &self,
        region: &Region,
        bytes: Range<usize>,
        out: &mut Vec<Range<usize>>,
    ) {
        out.clear();
        let addresses = region.address + bytes.start..region.address + bytes.end;
        self.space.present(addresses, out);
        for part in out {
            *part = part.start - region.address..part.end - region.address;
        }
    }

    /// Maps zeros at absent `bytes` of a page that has an owner.
    pub(crate) fn put_zeros(&self, region: &Region, bytes: Range<usize>) -> io::Result<()> {
        let (start, end) = (region.address + bytes.start, region.address + bytes.end);
        let shard = self.shard_of(region, region.page_at(start));
        self.space.put_zeros(shard, start..end)
    }

    /// Unmaps the addresses of a region that has given up all its pages.
    pub(crate) fn unmap(&self, region: &Region) {
        self.space.unmap(region.address, region.geometry);
    }

    /// Takes owned pages, or those of ordinary memory, out of paging.
    pub(crate) fn cede(&self, region: &Region, pages: PageRange, how: Cede<'_>) -> io::Result<()> {
        self.space.cede(addresses(region, pages), how)
    }

    /// Takes ceded pages back, into paging or as ordinary memory.
    pub(crate) fn regain(&self, region: &Region, pages: PageRange) -> io::Result<()> {
        let ceded = addresses(region, pages);
        let geometry = Geometry {
            ordinary: region.beginning.is_ordinary(),
            ..region.geometry
        };
        self.space.regain(region.address, geometry, ceded)
    }

    /// True if a page is ceded, or the program has unmapped its first byte.
    pub(crate) fn is_gone(&self, region: &Region, page: PageIndex) -> bool {
        self.space.is_gone(region.address_of(page))
    }

    /// Returns the parts of `addresses`, of one region, that are not ceded.
    pub(crate) fn kept(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        self.space.kept(addresses)
    }

    pub(crate) fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<A::Frame> {
        self.space.new_frame(page_bytes, pages)
    }

    /// Gives the memory of `frames` back together.
    pub(crate) fn drop_frames(&self, frames: Batch<A::Frame>) {
        self.space.drop_frames(frames);
    }

    /// Maps a run and wakes the threads that sleep on it. The caller counts pages in when it
    /// publishes them.
    pub(crate) fn install(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
    ) -> Result<(), InstallError<A::Frame>> {
        let pages = self.pages(region, run.pages());
        let moved = self.space.install(pages, PageIn::Move(run.into_frame()))?;
        debug_assert!(moved.is_none(), "what moved does not come back");
        Ok(())
    }

    /// Takes as many as possible of `pages`, at least one, out of the mapping.
    pub(crate) fn detach(
        &self,
        region: &Region,
        pages: PageRange,
    ) -> Result<PageRun<A::Frame>, DetachError> {
        let page_bytes = region.page_bytes();
        let out = PageOut::Move(self.pages(region, pages));
        let mut detached = self.space.detach(out).map(Detached::into_frame);
        if let Ok(frame) = detached {
            let run = PageRun::new(pages.start, frame, page_bytes);
            detached = if region.is_zero_copy(run.pages()) {
                self.replace_memory(region, run).map(PageRun::into_frame)
            } else {
                Ok(run.into_frame())
            };
        }
        let taken = match &detached {
            Ok(frame) => pages_in(frame, page_bytes),
            Err(DetachError::Absent) => 1,
            Err(_) => 0,
        };
        region.count_out(pages.start.and_on(taken));
        detached.map(|frame| PageRun::new(pages.start, frame, page_bytes))
    }

    /// Copies the leading pages of a run that was detached to new memory, and leaves the old to the
    /// kernel, which may still read it. Pages without new memory are mapped again.
    ///
    /// The old memory counts to no budget until the kernel lets go of it.
    fn replace_memory(
        &self,
        region: &Region,
        mut run: PageRun<A::Frame>,
    ) -> Result<PageRun<A::Frame>, DetachError> {
        let (first, page_bytes) = (run.first(), region.page_bytes());
        loop {
            let error = match self.new_frame(page_bytes, run.len()) {
                Ok(mut frame) => {
                    frame.as_mut().copy_from_slice(run.into_frame().as_ref());
                    return Ok(PageRun::new(first, frame, page_bytes));
                }
                Err(error) => error,
            };
            // A long frame may find no addresses next to each other where a shorter one does.
            match run.keep_first((run.len() / 2).max(1)) {
                Some(rest) => self.put_back(region, rest),
                None => {
                    self.put_back(region, run);
                    return Err(DetachError::Os(error));
                }
            }
        }
    }

    /// Maps a run again that was detached a moment ago.
    fn put_back(&self, region: &Region, run: PageRun<A::Frame>) {
        let end = run.pages().end;
        if let Err(InstallError {
            frame,
            kind: InstallErrorKind::Os(_),
        }) = self.install(region, run)
        {
            // Never zeros: a touch of a page that cannot be mapped raises SIGBUS.
            for at in 1..=pages_in(&frame, region.page_bytes()) {
                let page = PageIndex(end.0 - at);
                let _ = self.poison(region, page);
            }
        }
    }

    /// Maps a copy of a run, for which `room` is used up. Returns the frame, which is free again.
    ///
    /// # Errors
    /// The run: nothing has changed, and [`install`](Self::install) says why.
    pub(crate) fn install_copy(
        &self,
        region: &Region,
        run: PageRun<A::Frame>,
        room: &mut impl ReservedRoom,
    ) -> Result<A::Frame, PageRun<A::Frame>> {
        let first = run.first();
        let pages = self.pages(region, run.pages());
        let installed = self
            .space
            .install(pages, PageIn::Copy(run.into_frame(), room));
        installed
            .map(|frame| frame.expect("a frame that was copied comes back"))
            .map_err(|refused| PageRun::new(first, refused.frame, region.page_bytes()))
    }

    /// Copies the leading ones of `pages`, each to its frame, and gives the memory of those back
    /// that `own` owns. Returns how many leading pages went well. Calls must not overlap.
    pub(crate) fn detach_copies(
        &self,
        region: &Region,
        pages: &[PageIndex],
        frames: &mut [A::Frame],
        mut own: impl FnMut(usize) -> bool,
    ) -> usize {
        let page = |page: &PageIndex| self.pages(region, page.alone());
        let out: SmallVec<[Pages; SCATTERED_PAGES_MAX]> = pages.iter().map(page).collect();
        let left = self.space.detach(PageOut::Copy(&out, frames, &mut own));
        left.map_or(0, |left| left.count())
    }

    /// Drops the leading ones of `runs`, which lie in one stripe of a read-only region. Returns how
    /// many.
    pub(crate) fn drop_runs(&self, region: &Region, runs: &[PageRange]) -> usize {
        let pages = |run: &PageRange| self.pages(region, *run);
        let out: SmallVec<[Pages; SCATTERED_PAGES_MAX]> = runs.iter().map(pages).collect();
        let left = self.space.detach(PageOut::Drop(&out));
        let dropped = left.map_or(0, |left| left.count());
        runs[..dropped]
            .iter()
            .for_each(|&run| region.count_out(run));
        dropped
    }

    /// Ends a write-protection that [`detach_copies`](Self::detach_copies) may have left on a page.
    /// The two calls must not overlap.
    pub(crate) fn unprotect(&self, region: &Region, page: PageIndex) {
        self.space.unprotect(self.pages(region, page.alone()));
    }

    /// True if a page is mapped at `address`. Slow.
    pub(crate) fn is_present(&self, address: usize) -> bool {
        self.space.is_present(address)
    }

    /// Returns the count of events of a page: its mapping, and all other reasons to look again.
    pub(crate) fn event_count(&self, region: &Region, page: PageIndex) -> &EventCount {
        let block = region.id.0 as usize + page.0 / CHUNK_PAGES;
        &self.woken[block % EVENT_COUNTS]
    }

    /// Wakes threads that wait for one of `pages`, and serve their own faults.
    pub(crate) fn tell(&self, region: &Region, pages: PageRange) {
        for chunk in chunks_of(pages).take(EVENT_COUNTS) {
            self.event_count(region, PageIndex(chunk * CHUNK_PAGES))
                .tell();
        }
    }

    /// Wakes the threads that sleep on `pages`; they try again.
    pub(crate) fn wake(&self, region: &Region, pages: PageRange) {
        self.space.wake(self.pages(region, pages));
        self.tell(region, pages);
    }

    /// Makes every touch of an absent page raise SIGBUS from now on, until the page is installed.
    pub(crate) fn poison(&self, region: &Region, page: PageIndex) -> io::Result<()> {
        self.space.poison(self.pages(region, page.alone()))
    }

    /// Makes every touch of the kernel's page at `address`, which is no region's, raise SIGBUS.
    pub(crate) fn poison_stray(&self, shard: Shard, address: usize) -> io::Result<()> {
        let start = address - address % KERNEL_PAGE_BYTES;
        let page = Pages::new(shard, start, KERNEL_PAGE_BYTES, 1);
        self.space.poison(page)
    }

    /// Appends the events of a shard; does not block. The calling thread is the one that reads its
    /// events from now on.
    pub(crate) fn events(
        &self,
        shard: Shard,
        asked: EventScope,
        out: &mut Events,
    ) -> io::Result<()> {
        self.space.events(shard, asked, out)
    }

    /// Returns the way to learn that [`events`](Self::events) has something to say.
    pub(crate) fn wait(&self, shard: Shard) -> EventSources<'_> {
        self.space.wait(shard)
    }

    /// Returns pages of a region, which lie in one stripe, by their addresses.
    fn pages(&self, region: &Region, pages: PageRange) -> Pages {
        let shard = self.shard_of(region, pages.start);
        let address = region.address_of(pages.start);
        Pages::new(shard, address, region.page_bytes(), pages.len())
    }
}

/// Returns the addresses of pages of a region.
fn addresses(region: &Region, pages: PageRange) -> Range<usize> {
    region.address_of(pages.start)..region.address_of(pages.end)
}
