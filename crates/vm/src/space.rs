//! The seam of this crate: [`AddressSpace`], by which pages enter and leave the program's memory.
//!
//! The rule it keeps: the bytes of a page are either mapped in the program or in one frame, and
//! [`install`](AddressSpace::install) and [`detach`](AddressSpace::detach) change that atomically,
//! page by page. An address space knows addresses and shards; the choice of pages is left to the
//! pager.
//!
//! There is one way in and one way out, and each says how: by moving, or by copying. Moving keeps
//! the amount of memory: a frame's becomes the program's, or the other way round. Copying does not.
//! A copy that comes in is a page more, for which the caller hands over [`ReservedRoom`]; pages
//! that are copied out go back to the kernel, and the frames that took their bytes stay. Pages that
//! the program may only read come in as copies and are dropped: they hold what they were filled
//! with.

use std::{io, ops::Range, os::fd::BorrowedFd};

use smallvec::SmallVec;

use crate::pages::{Pages, Shard};

/// A page fault that the program raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// The address that was touched (at least kernel-page precise).
    pub address: usize,
    /// True if the access was a write.
    pub write: bool,
    /// True if the page is there, and may not be written to for now ([`PageOut::Copy`]).
    pub protected: bool,
    /// The kernel's number of the thread that touched the address; 0 if it is unknown.
    pub thread: u32,
}

/// Events of one shard's pages.
#[derive(Debug, Default)]
pub struct Events {
    /// Faults, oldest first.
    pub faults: Vec<PageFault>,
    /// Addresses that the program has unmapped in regions with pages of this shard (by `munmap`,
    /// `mremap`, or `mmap` over them), also addresses of other shards. Nothing is installed there
    /// or detached from there any more.
    pub unmapped: Vec<Range<usize>>,
}

/// Choice of events to hand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventScope {
    /// All events.
    All,
    /// Events that were taken from the kernel before, without looking for others.
    Kept,
}

/// Sources of a shard's events, to wait for.
#[derive(Clone, Copy, Debug)]
pub struct EventSources<'a> {
    /// Descriptor that becomes readable when something has happened that is not kept yet. `None`:
    /// there is none, and all events count as kept.
    pub fd: Option<BorrowedFd<'a>>,
    /// True if there are events that `fd` does not tell of any more. Installing pages may come
    /// across some.
    pub kept: bool,
}

impl Events {
    /// True if nothing happened.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.unmapped.is_empty()
    }
}

/// Upper bound of a run's pages: a word of the frame pool's map of vacant slots has as many bits.
/// At 4 KiB pages no longer run is worth its waiting: by then the fixed costs of a transfer are a
/// small part of it.
pub const RUN_PAGES_MAX: usize = 64;

/// Upper bound of the pages that [`PageOut::Copy`] takes.
pub const SCATTERED_PAGES_MAX: usize = crate::sys::RANGES_MAX;

/// A local buffer that holds the bytes of a run of pages (one or more, all of one size) while they
/// are not mapped: owned, present, never faulting.
pub trait Frame: AsRef<[u8]> + AsMut<[u8]> + Send + Sized + 'static {
    /// Keeps the first `bytes` and returns the rest. Cheap: nothing is copied or allocated.
    ///
    /// # Panics
    /// Unless `bytes` is a multiple of the page size, more than none and fewer than all.
    #[must_use = "the pages that are split off are given back when dropped"]
    fn split_off(&mut self, bytes: usize) -> Self;

    /// Appends `next`.
    ///
    /// # Errors
    /// `next` itself, if it does not lie directly behind this frame.
    fn join(&mut self, next: Self) -> Result<(), Self>;
}

/// Frames that are given back together.
pub type Batch<F> = SmallVec<[F; SCATTERED_PAGES_MAX]>;

/// Memory that the keeper of the budget has set aside for pages beside the frames. Dropped without
/// having been used, it is free again.
pub trait ReservedRoom {
    /// Uses the room up: its pages exist now.
    fn use_up(&mut self);
}

/// Way in which pages come in.
pub enum PageIn<'a, F> {
    /// The frame's memory becomes the program's. Nothing is copied, where the kernel can.
    Move(F),
    /// The program gets a copy of the frame, and uses up this room, which is for as many pages.
    /// Where moving a page makes every processor that runs the program forget its old address, a
    /// copy interrupts nobody. For runs of regions that the program may only read, and for single
    /// pages where [`RegionMapping::copies_in`] says so.
    Copy(F, &'a mut dyn ReservedRoom),
}

/// Pages that go out, and the way.
pub enum PageOut<'a, F> {
    /// A run, whose memory becomes a frame's.
    Move(Pages),
    /// Single pages of one stripe, ascending, [`SCATTERED_PAGES_MAX`] at most: each is copied to
    /// its frame, which is of one page, and its memory goes back to the kernel. Processors are
    /// interrupted a few times for all of them together. Only where [`RegionMapping::copies_out`]
    /// says so.
    ///
    /// The pages need no owner while they are copied. The last argument is called with each copied
    /// page's place among them. It owns the page, or returns false if another thread has taken the
    /// page up since before the call: then the page may differ from its copy, and stays.
    ///
    /// Meanwhile a write anywhere from the first to the last of the pages is a fault. A page that
    /// the program drops is a fault of the calling thread, which sleeps until the page is served.
    /// (Where threads serve their own faults, the write is to be tried again, a system call that
    /// writes there fails, and a dropped page ends the copying.) What a device writes into one of
    /// the pages is lost. Calls must not overlap, or what the program writes to other pages is lost
    /// as well.
    Copy(&'a [Pages], &'a mut [F], &'a mut dyn FnMut(usize) -> bool),
    /// Runs of one stripe of a region that the program may only read, ascending,
    /// [`SCATTERED_PAGES_MAX`] at most: their memory goes back to the kernel, and their bytes are
    /// kept nowhere. Processors are interrupted once for all runs together.
    Drop(&'a [Pages]),
}

/// Result of detaching: the leading pages of those that were asked for have left.
#[derive(Debug)]
#[must_use = "the pages have left the program's memory"]
pub enum Detached<F> {
    /// Frame of a run that moved: the bytes and the memory of at least one page.
    Moved(F),
    /// Number of leading pages that were copied; those of them that were owned have left. The next
    /// page cannot be copied, or was owned and is there.
    Copied(usize),
    /// Number of leading runs that were dropped.
    Dropped(usize),
}

impl<F> Detached<F> {
    /// Returns the frame of a run that moved.
    ///
    /// # Panics
    /// If another way out was asked for.
    pub fn into_frame(self) -> F {
        match self {
            Self::Moved(frame) => frame,
            Self::Copied(_) | Self::Dropped(_) => panic!("what did not move has no frame"),
        }
    }

    /// Returns the number of pages dealt with, or of runs dropped; 0 if pages were moved.
    pub fn count(&self) -> usize {
        match self {
            Self::Moved(_) => 0,
            Self::Copied(count) | Self::Dropped(count) => *count,
        }
    }
}

/// Failure to take out the first page of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DetachError {
    /// The kernel or a device uses the page (a pending direct read, for example): it stays mapped;
    /// try another victim.
    #[error("the page is busy: the kernel or a device uses it")]
    Busy,
    /// The page is absent: the program took it away itself with `madvise` or `munmap`.
    #[error("the page is not mapped")]
    Absent,
    /// Any other failure; the page stays mapped.
    #[error("cannot take a page out of the address space: {0}")]
    Os(io::Error),
}

/// Failure to map a page. The pages of the run before it are mapped, and their threads woken.
#[derive(Debug)]
pub struct InstallError<F> {
    /// The unmapped rest, unchanged: from the refused page to the end of the run.
    pub frame: F,
    /// Reason why the first page of `frame` was refused.
    pub kind: InstallErrorKind,
}

/// Reason why a page could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallErrorKind {
    /// A page is already mapped there; sleeping threads have been woken.
    #[error("a page is already mapped there")]
    Exists,
    /// The program has unmapped the page's addresses itself, or part of them.
    #[error("the program has unmapped the addresses")]
    Gone,
    /// Any other failure.
    #[error("cannot map a page: {0}")]
    Os(io::Error),
}

/// Layout of a region in a new mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Length of the region, a multiple of `page_bytes`.
    pub bytes: usize,
    /// Page size: a power of two, 4 KiB to 2 MiB.
    pub page_bytes: usize,
    /// Length of a stripe, a multiple of `page_bytes`: each stripe of the region belongs to one
    /// shard, the next stripe to the next shard.
    pub stripe_bytes: usize,
    /// The shard of the first stripe.
    pub first_shard: usize,
    /// First address of the region, a multiple of `page_bytes`: what is mapped there is replaced.
    /// `None`: anywhere.
    pub address: Option<usize>,
    /// True if the program may only read: a write raises SIGSEGV. The program must not make the
    /// region writable by itself: its writes would be lost when the page leaves.
    pub read_only: bool,
    /// True if the program lets no device write into the region's pages: they may be copied out.
    pub no_direct_io: bool,
    /// True if the addresses are ordinary memory of the program's, until
    /// [`AddressSpace::begin_paging`].
    pub ordinary: bool,
}

impl Geometry {
    /// Returns the shard that owns `offset`, of `shards` in all.
    pub fn shard_of(&self, offset: usize, shards: usize) -> Shard {
        Shard((self.first_shard + offset / self.stripe_bytes) % shards)
    }
}

/// Memory at addresses that are ceded.
#[derive(Clone, Copy, Debug)]
pub enum Cede<'a> {
    /// New memory without access.
    Barred,
    /// New memory with these bytes, which are as long as the addresses, and with the protections of
    /// the addresses if the kernel can move several mappings at once.
    With(&'a [u8]),
    /// The memory that is there, in a region of ordinary memory.
    InPlace,
}

/// Addresses of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionMapping {
    /// The first address, a multiple of the page size.
    pub address: usize,
    /// True if pages come in by copying, too: see [`PageIn::Copy`].
    pub copies_in: bool,
    /// True if pages go out by copying, too: see [`PageOut::Copy`].
    pub copies_out: bool,
}

/// The program's memory, as far as paging is concerned: the kernel's in production, a model in
/// simulations.
///
/// All methods may be called from any thread. Each shard's events are read by one thread at a time,
/// which calls [`events`](Self::events) before it does anything else for the shard.
pub trait AddressSpace: Send + Sync + 'static {
    /// Holder of the bytes of pages that are not mapped.
    type Frame: Frame;

    /// Returns the number of shards, each with a queue of faults of its own.
    fn shards(&self) -> usize;

    /// Makes sure that faults are caught whatever descriptors the program closes. To be called
    /// before the first region is under paging.
    ///
    /// # Errors
    /// The operating system's, for lack of a thread.
    fn keep_open(&self) -> io::Result<()> {
        Ok(())
    }

    /// Reserves addresses for a region and starts to catch its faults.
    ///
    /// # Errors
    /// The operating system's, in words that say what to do. What was mapped at a given address is
    /// gone then, too, unless the address is unaligned or another region's.
    fn map(&self, geometry: Geometry) -> io::Result<RegionMapping>;

    /// Starts to catch the faults of a region that was mapped as ordinary memory. Pages that are
    /// there stay as they are.
    ///
    /// # Errors
    /// The operating system's. The region is ordinary memory as before, and threads that slept on a
    /// fault meanwhile are woken.
    fn begin_paging(&self, address: usize, geometry: Geometry) -> io::Result<()>;

    /// Gives the memory at `addresses`, whole kernel pages of one region, back to the kernel: in
    /// ordinary memory they are zeros from then on, and under paging they are absent.
    ///
    /// # Errors
    /// The operating system's: the memory stays, at least in part.
    fn drop_memory(&self, addresses: Range<usize>) -> io::Result<()>;

    /// Lets the kernel back `addresses` of ordinary memory with huge pages, or not. Where it has no
    /// such pages, nothing changes.
    fn advise_huge(&self, addresses: Range<usize>, huge: bool);

    /// Appends the parts of `addresses`, whole kernel pages of one region, where memory is,
    /// ascending.
    fn present(&self, addresses: Range<usize>, out: &mut Vec<Range<usize>>);

    /// Maps zeros at `part`, absent kernel pages of one page that has an owner, and wakes the
    /// threads that sleep there.
    ///
    /// # Errors
    /// The operating system's. The part is absent, or a part of it.
    fn put_zeros(&self, shard: Shard, part: Range<usize>) -> io::Result<()>;

    /// Gives the addresses back, except those that the program has unmapped itself. All pages of
    /// the region must have been detached, or are lost with it.
    fn unmap(&self, address: usize, geometry: Geometry);

    /// Takes `addresses`, whole pages of one region that are absent and have the caller as their
    /// owner, or are ordinary memory, out of paging until they are [regained](Self::regain).
    /// Private anonymous memory lies there then. The program may map there what it likes: nothing
    /// is installed there or detached from there any more. Waits until the events of all shards of
    /// the addresses have been read.
    ///
    /// # Errors
    /// The operating system's. The addresses are the region's as before.
    fn cede(&self, addresses: Range<usize>, how: Cede<'_>) -> io::Result<()>;

    /// Takes ceded addresses of the region at `address` back: what is mapped there is gone, and all
    /// pages are absent, or ordinary memory if the geometry says so. The program must not use them
    /// meanwhile.
    ///
    /// # Errors
    /// The operating system's. The addresses are ceded as before, or cannot be accessed.
    fn regain(&self, address: usize, geometry: Geometry, ceded: Range<usize>) -> io::Result<()>;

    /// Returns the parts of `addresses`, of one region, that are not ceded.
    fn kept(&self, addresses: Range<usize>) -> Vec<Range<usize>>;

    /// True if `address`, of a region, is ceded or was unmapped by the program.
    fn is_gone(&self, address: usize) -> bool;

    /// Makes a new zeroed frame of `pages` pages (at most [`RUN_PAGES_MAX`]): this takes physical
    /// memory, which dropping the frame gives back.
    ///
    /// # Errors
    /// The operating system's when memory or addresses run out, also for one of the pages alone.
    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<Self::Frame>;

    /// Drops frames, [`SCATTERED_PAGES_MAX`] at most. Processors are interrupted once for all
    /// frames together, where the kernel can.
    fn drop_frames(&self, frames: Batch<Self::Frame>);

    /// Maps a frame at `pages`, which are as many as the frame has, and wakes the threads that
    /// sleep on them. Returns a frame that was copied: it is free again.
    ///
    /// # Errors
    /// See [`InstallErrorKind`]. Pages that were not mapped come back. Of a run that was to be
    /// copied nothing is mapped then, and the room for it is not used up.
    fn install(
        &self,
        pages: Pages,
        how: PageIn<'_, Self::Frame>,
    ) -> Result<Option<Self::Frame>, InstallError<Self::Frame>>;

    /// Takes pages out of the mapping: as many as possible from the first on. Each goes atomically
    /// with respect to the program: every write to a page is either in the frame or faults. Pages
    /// that were not taken are as they were; the next attempt tells the reason. A run may also end
    /// early for lack of room for a frame.
    ///
    /// # Errors
    /// See [`DetachError`], about the first page of a run.
    fn detach(&self, out: PageOut<'_, Self::Frame>) -> Result<Detached<Self::Frame>, DetachError>;

    /// Lets the program write again to pages that an earlier [`PageOut::Copy`] has left protected.
    /// The kernel may, for one, forget to lift the protection of a page that it has swapped out.
    /// Must not overlap with such a call.
    fn unprotect(&self, pages: Pages);

    /// Wakes the threads that sleep on these pages without changing them; they try again.
    fn wake(&self, pages: Pages);

    /// Makes every access to these absent pages raise SIGBUS, until a frame is installed there.
    /// Addresses that the program has unmapped are left alone.
    ///
    /// # Errors
    /// The operating system's, where the kernel cannot do this.
    fn poison(&self, pages: Pages) -> io::Result<()>;

    /// True if a page is mapped at `address`. Slow; for rare cases.
    fn is_present(&self, address: usize) -> bool;

    /// Appends what has happened in a shard; does not block. A program's call that unmaps returns
    /// only after this method has come across it. From now on the calling thread is the one that
    /// reads the events of this shard.
    ///
    /// # Errors
    /// The operating system's.
    fn events(&self, shard: Shard, asked: EventScope, out: &mut Events) -> io::Result<()>;

    /// Returns the sources of a shard's events, to wait for.
    fn wait(&self, shard: Shard) -> EventSources<'_>;
}
