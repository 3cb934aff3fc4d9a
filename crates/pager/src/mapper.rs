//! Pages of regions, in and out of the program's memory: [`Mapper`].
//!
//! The rule it keeps: nobody else calls [`AddressSpace`]. What is asked for by region and page is
//! done by shard and address, and what is taken out is counted out of its region. Whoever calls owns
//! the pages; the protocol is his business.

use std::{io, ops::Range, os::fd::BorrowedFd, sync::Arc};

use farpage_vm::{AddressSpace, DetachError, Fault, InstallError, Layout, SCATTERED_PAGES_MAX};
use smallvec::SmallVec;

use crate::{
    region::Region,
    run::{Run, pages_in},
};

/// The smallest page that the kernel knows.
const KERNEL_PAGE_BYTES: usize = 4096;

/// Pages that leave together by copying, ascending.
pub(crate) type Scattered = SmallVec<[usize; SCATTERED_PAGES_MAX]>;

/// The program's memory, by regions and pages.
pub(crate) struct Mapper<A: AddressSpace> {
    space: Arc<A>,
}

impl<A: AddressSpace> Mapper<A> {
    pub(crate) fn new(space: Arc<A>) -> Mapper<A> {
        Mapper { space }
    }

    pub(crate) fn shards(&self) -> usize {
        self.space.shards()
    }

    /// The shard that serves a page.
    pub(crate) fn shard_of(&self, region: &Region, page: usize) -> usize {
        region.shard_of(page, self.shards())
    }

    /// Addresses for a new region. Returns the first.
    pub(crate) fn map(&self, layout: Layout) -> io::Result<usize> {
        self.space.map(layout)
    }

    /// A region that has given up all its pages gives up its addresses.
    pub(crate) fn unmap(&self, region: &Region) {
        self.space.unmap(region.address, region.layout);
    }

    pub(crate) fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<A::Frame> {
        self.space.new_frame(page_bytes, pages)
    }

    /// Maps a run and wakes the threads that sleep on it. Pages are counted in by whoever publishes
    /// them.
    pub(crate) fn install(
        &self,
        region: &Region,
        run: Run<A::Frame>,
    ) -> Result<(), InstallError<A::Frame>> {
        let (shard, address) = self.place(region, run.first());
        self.space.install(shard, address, run.into_frame())
    }

    /// Takes as many as possible of `pages`, at least one, out of the mapping.
    pub(crate) fn detach(
        &self,
        region: &Region,
        pages: Range<usize>,
    ) -> Result<Run<A::Frame>, DetachError> {
        let (shard, address) = self.place(region, pages.start);
        let page_bytes = region.page_bytes();
        let detached = self.space.detach(shard, address, page_bytes, pages.len());
        let taken = match &detached {
            Ok(frame) => pages_in(frame, page_bytes),
            Err(DetachError::Absent) => 1,
            Err(_) => 0,
        };
        region.count_out(&(pages.start..pages.start + taken));
        detached.map(|frame| Run::new(pages.start, frame, page_bytes))
    }

    /// Whether pages of the region may come and go as copies.
    pub(crate) fn can_copy(&self, region: &Region) -> bool {
        !region.layout.read_only && self.space.can_scatter(region.page_bytes())
    }

    /// Maps a copy of `frame`. `false`: nothing has changed, and [`install`](Self::install) says why.
    pub(crate) fn install_copy(&self, region: &Region, page: usize, frame: &A::Frame) -> bool {
        let (shard, address) = self.place(region, page);
        self.space.install_copy(shard, address, frame)
    }

    /// Copies the leading ones of `pages` to the first of `frames` and gives their memory back.
    /// Returns how many. Calls must not overlap.
    pub(crate) fn detach_copies(
        &self,
        region: &Region,
        pages: &[usize],
        frames: &mut [A::Frame],
    ) -> usize {
        let shard = self.shard_of(region, pages[0]);
        let addresses: Scattered = pages.iter().map(|&page| region.address_of(page)).collect();
        let taken = self.space.detach_scattered(shard, &addresses, frames);
        for &page in &pages[..taken] {
            region.count_out(&(page..page + 1));
        }
        taken
    }

    /// Ends a write-protection that [`detach_copies`](Self::detach_copies) may have left on a page.
    /// Must not overlap with it.
    pub(crate) fn unprotect(&self, region: &Region, page: usize) {
        let (shard, address) = self.place(region, page);
        self.space.unprotect(shard, address, region.page_bytes());
    }

    /// Whether a page is mapped at `address`. Slow.
    pub(crate) fn is_present(&self, address: usize) -> bool {
        self.space.is_present(address)
    }

    /// Wakes the threads that sleep on `pages`; they try again.
    pub(crate) fn wake(&self, region: &Region, pages: Range<usize>) {
        let (shard, address) = self.place(region, pages.start);
        let bytes = pages.len() * region.page_bytes();
        self.space.wake(shard, address, bytes);
    }

    /// Every touch of an absent page raises SIGBUS from now on, until it is installed.
    pub(crate) fn poison(&self, region: &Region, page: usize) -> io::Result<()> {
        let (shard, address) = self.place(region, page);
        self.space.poison(shard, address, region.page_bytes())
    }

    /// The same for the kernel's page at an address that is no region's.
    pub(crate) fn poison_stray(&self, shard: usize, address: usize) -> io::Result<()> {
        let page = address - address % KERNEL_PAGE_BYTES;
        self.space.poison(shard, page, KERNEL_PAGE_BYTES)
    }

    /// Appends the faults of a shard; does not block.
    pub(crate) fn faults(&self, shard: usize, out: &mut Vec<Fault>) -> io::Result<()> {
        self.space.faults(shard, out)
    }

    /// Appends the addresses that the program has unmapped.
    pub(crate) fn unmapped(&self, shard: usize, out: &mut Vec<Range<usize>>) {
        self.space.unmapped(shard, out);
    }

    /// Becomes readable when there is something for [`faults`](Self::faults) or
    /// [`unmapped`](Self::unmapped).
    pub(crate) fn fault_fd(&self, shard: usize) -> Option<BorrowedFd<'_>> {
        self.space.fault_fd(shard)
    }

    fn place(&self, region: &Region, page: usize) -> (usize, usize) {
        (self.shard_of(region, page), region.address_of(page))
    }
}
