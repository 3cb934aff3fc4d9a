//! [`Region`]: bytes under paging.

use std::{
    fmt,
    ops::{Bound, Deref, DerefMut, Range, RangeBounds},
    slice,
    sync::Arc,
    thread,
};

use bytesize::ByteSize;
use farpage_pager::{Advice, MapError, Mapped, PageError, PinError};
use farpage_store::{Codec, Layout, Reserve, Store, StoreStatsSnapshot};
use farpage_vm::{KernelSpace, sigbus::Registration};

use crate::{CloseError, FlushError, fault};

/// What a region or an array is to be like. Each option that is not set is the runtime's.
#[derive(Clone, Default)]
pub struct RegionOptions {
    pub(crate) page_bytes: Option<usize>,
    pub(crate) read_ahead: Option<usize>,
    pub(crate) codec: Option<Codec>,
    pub(crate) shape: Vec<usize>,
    pub(crate) reserve: Reserve,
    pub(crate) name: Option<String>,
    pub(crate) store: Option<Arc<dyn Store>>,
    pub(crate) address: Option<usize>,
    pub(crate) read_only: bool,
}

impl RegionOptions {
    /// Nothing set.
    pub fn new() -> RegionOptions {
        RegionOptions::default()
    }

    /// Page size: a power of two, 4 KiB to 2 MiB.
    pub fn page_size(mut self, page_size: ByteSize) -> Self {
        self.page_bytes = Some(page_size.as_u64() as usize);
        self
    }

    /// Pages that are read ahead of a sequential run at most; 0 switches it off.
    pub fn read_ahead(mut self, pages: usize) -> Self {
        self.read_ahead = Some(pages);
        self
    }

    /// How pages are encoded on the servers. Does nothing for a region with a store of its own.
    pub fn codec(mut self, codec: Codec) -> Self {
        self.codec = Some(codec);
        self
    }

    /// Elements per dimension, the slowest first, as in C: `[planes, rows, columns]`. Codecs that look at neighbours ([`Codec::Zfp`]) do much better when
    /// they know it; nothing else depends on it. Default: one dimension.
    pub fn shape(mut self, shape: impl AsRef<[usize]>) -> Self {
        self.shape = shape.as_ref().to_vec();
        self
    }

    /// How much remote memory is taken when the region is created. Default: [`Reserve::Full`], so that no eviction can fail for lack of it.
    /// Does nothing for a region with a store of its own.
    pub fn reserve(mut self, reserve: Reserve) -> Self {
        self.reserve = reserve;
        self
    }

    /// Publishes the region on its servers under this name at every flush and when it is closed; it outlives the program.
    /// Does nothing for a region with a store of its own.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Keeps the region's pages here instead of on the memory servers.
    pub fn store(mut self, store: impl Store) -> Self {
        self.store = Some(Arc::new(store));
        self
    }

    /// Maps the region at this address, a multiple of its page size, and nowhere else, as `mmap` does with `MAP_FIXED`. What is mapped there is replaced, all of it up to
    /// the end of the region's last page and nothing beside it; another region is not, that is an error. Default: wherever there is room.
    ///
    /// # Safety
    /// Nothing relies on what is mapped there when the region is created.
    pub unsafe fn address(mut self, address: usize) -> Self {
        self.address = Some(address);
        self
    }

    /// Protects the region: a write to its memory raises SIGSEGV, and taking a mutable slice of it panics. Its pages are copied when they come and go, which moving
    /// them would not be: for data that is only read, what matters more may be that it is so. Default: off.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }
}

impl fmt::Debug for RegionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionOptions")
            .field("page_bytes", &self.page_bytes)
            .field("read_ahead", &self.read_ahead)
            .field("codec", &self.codec)
            .field("shape", &self.shape)
            .field("reserve", &self.reserve)
            .field("name", &self.name)
            .field("store", &self.store.as_ref().map(|store| store.name()))
            .field("address", &self.address)
            .field("read_only", &self.read_only)
            .finish()
    }
}

/// Bytes under paging: a slice whose pages come and go.
///
/// Dropping a region gives its addresses up. What a named region or one with a store of its own
/// holds is written back before; an error of that is logged, so call [`close`](Region::close) to see
/// it. Other regions are gone with their contents.
///
/// A named region that is dropped while its thread panics is not published: the panic may have left
/// it half updated, and what was published before stays what others open.
/// [`flush`](Region::flush) and `close` publish at any time. A store of the region's own is written
/// back all the same, as a file mapping is: evictions have written parts of it already, so that
/// there is no older state to keep.
pub struct Region {
    /// Ends before the mapping does.
    _faults: Option<Registration>,
    mapped: Mapped<KernelSpace>,
    name: Option<String>,
    /// Whether its contents outlive it.
    keeps: bool,
    read_only: bool,
    closed: bool,
}

impl Region {
    pub(crate) fn new(
        mapped: Mapped<KernelSpace>,
        name: Option<String>,
        keeps: bool,
        read_only: bool,
    ) -> Result<Region, MapError> {
        let bytes = mapped.store().bytes();
        let faults = fault::register(&mapped).map_err(|source| MapError::Os { bytes, source })?;
        Ok(Region {
            _faults: faults,
            mapped,
            name,
            keeps,
            read_only,
            closed: false,
        })
    }

    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.mapped.store().layout()
    }

    /// The region's page size in bytes.
    pub fn page_bytes(&self) -> usize {
        self.mapped.page_bytes()
    }

    /// How its pages are encoded on the servers; `None` if it has a store of its own.
    pub fn codec(&self) -> Option<Codec> {
        self.mapped.store().codec()
    }

    /// What this region's pages have been through.
    pub fn store_stats(&self) -> StoreStatsSnapshot {
        self.mapped.store().stats()
    }

    /// Pages that are in local memory now. A page that is just being mapped may not be counted yet.
    pub fn resident_pages(&self) -> usize {
        self.mapped.resident_pages()
    }

    /// Tells how a range of bytes will be used.
    ///
    /// # Errors
    /// [`Advice::DontNeed`] waits until changed pages are written back, and says which one could not be.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn advise(&self, range: impl RangeBounds<usize>, advice: Advice) -> Result<(), PageError> {
        self.mapped.advise(byte_range(range, self.len(), 1), advice)
    }

    /// Brings a range of bytes in and waits for it; pages that were lost are tried again. So a program learns of a dead server by an error instead of
    /// SIGBUS. If the range is larger than the budget, its first pages may have left again when this returns.
    ///
    /// # Errors
    /// Why a page could not be brought in.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn prefetch_now(&self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        self.mapped.prefetch_now(byte_range(range, self.len(), 1))
    }

    /// Brings a range of bytes in and keeps it in memory until [`unpin`](Self::unpin): no access of it waits, however tight the budget is.
    ///
    /// Whole pages are pinned: all that the range touches. Pins are counted (up to 255 per page), so that parts of a program can pin the same page
    /// without knowing of each other; all end with the region. Pinned pages count towards the budget, and about a tenth of it, four pages at least, is left
    /// to all others. Keeping memory from being swapped out by the kernel is not part of it.
    ///
    /// # System calls
    ///
    /// A system call (`read` into a region, `write` from it) that is given an absent page waits for it like any access, unless the runtime is one of
    /// [`user_mode_only`](crate::Builder::user_mode_only) or [`FaultMode::InThread`](crate::FaultMode::InThread): there it fails with `EFAULT`, or ends
    /// early, having done a part. Given pinned pages it does neither, with one exception: while [`flush`](Self::flush) or [`Advice::DontNeed`] writes a
    /// page back, the page is absent for a moment, pinned or not. Where that matters, do not run the two at the same time.
    ///
    /// ```no_run
    /// use std::{fs::File, io::Read};
    /// use farpage::{ByteSize, Runtime};
    ///
    /// let runtime = Runtime::builder().server("shm:///run/farpage.sock").budget(ByteSize::mib(256)).user_mode_only(true).build()?;
    /// let mut region = runtime.region(8 << 30)?;
    /// region.pin(..64 << 20)?;
    /// File::open("records")?.read_exact(&mut region[..64 << 20])?;
    /// region.unpin(..64 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`PinError`]; what was pinned before is pinned as before, and nothing more.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn pin(&self, range: impl RangeBounds<usize>) -> Result<(), PinError> {
        self.mapped.pin(byte_range(range, self.len(), 1))
    }

    /// Takes one [`pin`](Self::pin) of each page back that the range touches; a page that has none is left alone. Pages without a pin leave when others
    /// need their room, not before. Name the range that was pinned: a smaller one leaves pins behind.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn unpin(&self, range: impl RangeBounds<usize>) {
        self.mapped.unpin(byte_range(range, self.len(), 1));
    }

    /// Copies `bytes` to `offset`, and so brings [lost](PageError::Lost) pages back that they cover wholly. (The region's last page ends with the
    /// region.) Where no page is lost it does what copying into the slice does, which raises SIGBUS where one is.
    ///
    /// # Errors
    /// A lost page is covered in part only: nothing was copied. Or a lost page could not be mapped, and is still lost.
    ///
    /// # Panics
    /// If the bytes do not fit the region behind `offset`, or the region is [read-only](RegionOptions::read_only).
    pub fn overwrite(&mut self, offset: usize, bytes: &[u8]) -> Result<(), PageError> {
        let range = byte_range(offset..offset + bytes.len(), self.len(), 1);
        self.mapped.put_lost(offset, bytes)?;
        self[range].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes all changes back and keeps the pages. A region with a store of its own is durable after this as far as the store can make it; a named one is
    /// published, atomically: whoever opens it sees all of this state or all of the one before.
    ///
    /// # Errors
    /// See [`FlushError`]; nothing is lost, and it may be called again.
    pub fn flush(&self) -> Result<(), FlushError> {
        self.mapped.flush()?;
        match &self.name {
            Some(name) => Ok(self.mapped.store().publish(name)?),
            None => Ok(()),
        }
    }

    /// Closes the region. Contents that outlive it are flushed before; those of other regions are
    /// gone.
    ///
    /// # Errors
    /// Why contents could not be flushed. The error holds the region:
    /// [`into_inner`](CloseError::into_inner) gives it back with everything that is in it.
    pub fn close(mut self) -> Result<(), CloseError<Region>> {
        self.end().map_err(|source| CloseError::new(self, source))
    }

    /// Flushes what outlives the region. From here on dropping it writes nothing back, whatever came
    /// of it: the program knows.
    pub(crate) fn end(&mut self) -> Result<(), FlushError> {
        self.closed = true;
        if self.keeps { self.flush() } else { Ok(()) }
    }

    /// Dropping the region writes back again what outlives it.
    pub(crate) fn reopen(&mut self) {
        self.closed = false;
    }

    /// Closes the region without writing back: what changed since the last flush is lost.
    pub fn discard(mut self) {
        self.closed = true;
    }

    /// The first error of work in the background since the last call: an eviction that failed (its page is still here), or a page that
    /// could not be brought in (touching it raises SIGBUS).
    pub fn take_error(&self) -> Option<PageError> {
        self.mapped.take_error()
    }
}

/// A range of `size`-byte elements out of `len`, as a range of bytes.
///
/// # Panics
/// If it does not lie in `0..len`.
pub(crate) fn byte_range(range: impl RangeBounds<usize>, len: usize, size: usize) -> Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    assert!(
        start <= end && end <= len,
        "range {start}..{end} does not lie in 0..{len}"
    );
    start * size..end * size
}

impl CloseError<Region> {
    /// The region, open and as it was.
    pub fn into_inner(self) -> Region {
        let mut region = self.into_closed();
        region.reopen();
        region
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY:
        // - the addresses are mapped for as long as `mapped` lives, which the borrow ensures, and `bytes` fit `mapped_bytes`;
        // - every byte is initialised: a page is zero or what was stored before it can be read;
        // - nobody writes the bytes meanwhile: workers move pages, but keep what the program sees of them.
        unsafe {
            slice::from_raw_parts(
                self.mapped.address() as *const u8,
                self.mapped.store().bytes() as usize,
            )
        }
    }
}

impl DerefMut for Region {
    /// # Panics
    /// If the region is [read-only](RegionOptions::read_only).
    fn deref_mut(&mut self) -> &mut [u8] {
        assert!(!self.read_only, "a read-only region has no mutable slice");
        // SAFETY: as in `deref`; the exclusive borrow makes this the only slice.
        unsafe {
            slice::from_raw_parts_mut(
                self.mapped.address() as *mut u8,
                self.mapped.store().bytes() as usize,
            )
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.keeps || self.closed {
            return;
        }
        // Whether a region was made before the panic or while it unwinds makes no difference: a
        // destructor that makes one may have been cut short by a panic of its own, which nobody
        // here can see. So who makes one there has to close it.
        if self.name.is_some() && thread::panicking() {
            tracing::error!(
                name = self.name,
                "a region was dropped by a panic: its changes since the last flush are not published"
            );
            return;
        }
        if let Err(error) = self.flush() {
            tracing::error!(%error, name = self.name, "a region that was dropped could not be flushed; its last changes are lost");
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("name", &self.name)
            .field("mapped", &self.mapped)
            .finish_non_exhaustive()
    }
}
