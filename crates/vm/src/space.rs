//! The seam of this crate: [`AddressSpace`], how pages enter and leave the program's memory.
//!
//! The rule it keeps: the bytes of a page are either mapped in the program or held in exactly one frame,
//! and [`install`](AddressSpace::install) and [`detach`](AddressSpace::detach) change that atomically, page by page of a run. It knows
//! addresses and shards; which page is where, and why, is the pager's business.

use std::{io, ops::Range, os::fd::BorrowedFd};

/// A page fault that the program raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The address that was touched (at least kernel-page precise).
    pub address: usize,
    /// Whether it was touched by a write.
    pub write: bool,
}

/// Pages of a run at most. A word of the frame pool's map of vacant slots has as many bits, and at 4 KiB pages no larger run is worth its
/// waiting: the fixed costs of a transfer are a small part of it by then.
pub const RUN_PAGES_MAX: usize = 64;

/// Pages that [`AddressSpace::detach_scattered`] takes at most.
pub const SCATTERED_PAGES_MAX: usize = crate::sys::RANGES_MAX;

/// A local buffer that holds the bytes of a run of pages (one or more, all of one size) while they are not mapped: owned, present, never faulting.
pub trait Frame: AsRef<[u8]> + AsMut<[u8]> + Send + Sized + 'static {
    /// Keeps the first `bytes` and returns the rest. Cheap: nothing is copied or allocated.
    ///
    /// # Panics
    /// Unless `bytes` is a multiple of the page size, more than none and fewer than all.
    #[must_use = "the pages that are split off are given back when dropped"]
    fn split_off(&mut self, bytes: usize) -> Self;

    /// Takes `next` in at the end.
    ///
    /// # Errors
    /// `next` itself, if it does not lie directly behind this one.
    fn join(&mut self, next: Self) -> Result<(), Self>;
}

/// The first page of a run could not be taken out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DetachError {
    /// The kernel or a device holds the page (a pending direct read, for example): it stays mapped; try another victim.
    #[error("the page is held by the kernel or a device")]
    Held,
    /// There is no page: the program took it away itself with `madvise` or `munmap`.
    #[error("the page is not mapped")]
    Absent,
    /// Anything else; the page stays mapped.
    #[error("cannot take a page out of the address space")]
    Os(#[source] io::Error),
}

/// A page could not be mapped. The pages of the run before it are mapped, and their threads woken.
#[derive(Debug)]
pub struct InstallError<F> {
    /// What is not mapped, unchanged: from the refused page to the end of the run.
    pub frame: F,
    /// Why the first page of `frame` was refused.
    pub kind: InstallErrorKind,
}

/// Why a page could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallErrorKind {
    /// A page is already mapped there; sleeping threads have been woken.
    #[error("a page is already mapped there")]
    Exists,
    /// The program has unmapped the page's addresses itself, or part of them.
    #[error("the program has unmapped the addresses")]
    Gone,
    /// Anything else.
    #[error("cannot map a page")]
    Os(#[source] io::Error),
}

/// How a region of a new mapping is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length of the region, a multiple of `page_bytes`.
    pub bytes: usize,
    /// Page size: a power of two, 4 KiB to 2 MiB.
    pub page_bytes: usize,
    /// Every `stripe_bytes` of the region belong to one shard, the next to the next shard; a multiple of `page_bytes`.
    pub stripe_bytes: usize,
    /// The shard of the first stripe.
    pub first_shard: usize,
    /// Its first address, a multiple of `page_bytes`: what is mapped there is replaced. `None`: anywhere.
    pub address: Option<usize>,
    /// The program may only read: a write raises SIGSEGV.
    pub read_only: bool,
}

impl Layout {
    /// The shard that owns `offset`, of `shards` in all.
    pub fn shard_of(&self, offset: usize, shards: usize) -> usize {
        (self.first_shard + offset / self.stripe_bytes) % shards
    }
}

/// The program's memory, as far as paging is concerned: the kernel's in production, a model in simulations.
///
/// All methods may be called from any thread. Each shard's faults are read by one thread.
pub trait AddressSpace: Send + Sync + 'static {
    /// What holds the bytes of pages that are not mapped.
    type Frame: Frame;

    /// How many shards, each with a queue of faults of its own.
    fn shards(&self) -> usize;

    /// Reserves addresses for a region and starts to catch its faults. Returns its first address, aligned to its page size.
    ///
    /// # Errors
    /// The operating system's, in words that say what to do. What was mapped at a given address is gone then, too, unless the address is unaligned or
    /// another region's.
    fn map(&self, layout: Layout) -> io::Result<usize>;

    /// Gives the addresses back, except those that the program has unmapped itself. All pages of the region must have been detached, or are lost with it.
    fn unmap(&self, address: usize, layout: Layout);

    /// A new zeroed frame of `pages` pages (at most [`RUN_PAGES_MAX`]): this takes physical memory, which dropping the frame gives back.
    ///
    /// # Errors
    /// The operating system's when memory or addresses run out, also for one of the pages alone.
    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<Self::Frame>;

    /// Maps the frame's pages from `address` on, all inside one stripe, and wakes the threads that sleep on them. The bytes move, they are not
    /// copied, where the kernel can.
    ///
    /// # Errors
    /// See [`InstallErrorKind`]; what was not mapped comes back.
    fn install(
        &self,
        shard: usize,
        address: usize,
        frame: Self::Frame,
    ) -> Result<(), InstallError<Self::Frame>>;

    /// Takes as many pages as possible from `address` on, at least one and at most `pages`, all inside one stripe, out of the mapping. Each
    /// goes atomically with respect to the program: every write is either in the frame or faults. The frame ends before the first page that can not be
    /// taken, and may be shorter than wished for lack of room: why, the next attempt tells.
    ///
    /// # Errors
    /// See [`DetachError`], about the first page; all pages are then as they were.
    fn detach(
        &self,
        shard: usize,
        address: usize,
        page_bytes: usize,
        pages: usize,
    ) -> Result<Self::Frame, DetachError>;

    /// Whether pages of this size can be copied in and out where other threads of the program run: see [`detach_scattered`](Self::detach_scattered).
    fn can_scatter(&self, page_bytes: usize) -> bool;

    /// Maps a copy of the frame, which is of one page, at `address`. Where moving a page makes every processor that runs the program forget its old address, a copy
    /// interrupts nobody. `false`: the page cannot be mapped so, and nothing has changed; [`install`](Self::install) says why.
    ///
    /// Only where [`can_scatter`](Self::can_scatter) says so.
    fn install_copy(&self, shard: usize, address: usize, frame: &Self::Frame) -> bool;

    /// Takes pages out that lie at these addresses, ascending, at most [`SCATTERED_PAGES_MAX`], all inside one stripe: copies each to its frame, of one page, and gives its memory
    /// back. Processors are interrupted a few times for all of them together. Each goes atomically, as in [`detach`](Self::detach). Returns how many of the leading ones
    /// were taken; the others are as they were.
    ///
    /// Meanwhile writes to what lies between the first and the last page are faults, which have to be tried again, and system calls that write there fail. What a device writes into one of
    /// the pages is lost. So that writes to other pages are not, calls must not overlap.
    ///
    /// Only where [`can_scatter`](Self::can_scatter) says so.
    fn detach_scattered(
        &self,
        shard: usize,
        addresses: &[usize],
        frames: &mut [Self::Frame],
    ) -> usize;

    /// Has writes to a page succeed again that another call of [`detach_scattered`](Self::detach_scattered) may have left protected: the kernel may forget to lift that of a page that it has
    /// swapped out, for one. Must not overlap with such a call.
    ///
    /// Only where [`can_scatter`](Self::can_scatter) says so.
    fn unprotect(&self, shard: usize, address: usize, page_bytes: usize);

    /// Whether a page is mapped at `address`. Slow; for rare cases.
    fn is_present(&self, address: usize) -> bool;

    /// Wakes the threads that sleep on the pages of a range without changing them; they try again.
    fn wake(&self, shard: usize, address: usize, bytes: usize);

    /// Makes every access to the absent page at `address` raise SIGBUS, until a frame is installed there. What the program has unmapped of it is left alone.
    ///
    /// # Errors
    /// The operating system's, where the kernel can not do this.
    fn poison(&self, shard: usize, address: usize, page_bytes: usize) -> io::Result<()>;

    /// Appends the faults that wait in a shard's queue; does not block.
    ///
    /// # Errors
    /// The operating system's.
    fn faults(&self, shard: usize, out: &mut Vec<Fault>) -> io::Result<()>;

    /// Appends what the program has unmapped of regions with pages of this shard (by `munmap`, `mremap`, or `mmap` over them), as far as
    /// [`faults`](Self::faults) has come across it: whole addresses, also those of other shards. From then on nothing is installed there or detached
    /// from there. The program's call returns only after `faults` has come across it.
    fn unmapped(&self, shard: usize, out: &mut Vec<Range<usize>>);

    /// Becomes readable when a fault waits in the shard's queue, or news for [`unmapped`](Self::unmapped).
    fn fault_fd(&self, shard: usize) -> Option<BorrowedFd<'_>>;
}
