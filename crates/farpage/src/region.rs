//! [`Region`]: bytes under paging.

use std::{
    fmt, mem,
    ops::{Bound, Deref, DerefMut, Range, RangeBounds},
    slice,
    sync::Arc,
    thread,
};

use bytesize::ByteSize;
use farpage_pager::{Advice, MapError, MappedRegion, PageError, PinError};
use farpage_signals::SignalGuard;
use farpage_store::{
    Codec, ElementType, Elements, Layout, Redundancy, RemoteOptions, Reserve, Store,
    StoreStatsSnapshot,
};
use farpage_tables::Held;
use farpage_vm::{KernelSpace, sigbus::FaultRegistration};

use crate::{CloseError, FlushError, fault};

/// Options of a region or an array. An option that is not set is taken from the runtime.
#[derive(Clone, Default)]
pub struct RegionOptions {
    pub(crate) page_bytes: Option<usize>,
    pub(crate) shape: Vec<usize>,
    pub(crate) element_type: Option<ElementType>,
    pub(crate) store: Option<Arc<dyn Store>>,
    /// Options of the region's pages on memory servers.
    pub(crate) remote: RemoteOptions,
    /// Options of the region's paging.
    pub(crate) paging: farpage_pager::RegionOptions,
}

impl RegionOptions {
    /// Returns options of which none is set.
    pub fn new() -> RegionOptions {
        RegionOptions::default()
    }

    /// Sets what is not set as `defaults` has it.
    pub(crate) fn take_defaults(&mut self, defaults: &RegionOptions) {
        let (remote, paging) = (&defaults.remote, &defaults.paging);
        self.page_bytes = self.page_bytes.or(defaults.page_bytes);
        self.remote.codec = self.remote.codec.or(remote.codec);
        // Named regions have no parity.
        let is_possible = |it: &Redundancy| {
            self.remote.name.is_none() || !matches!(it, Redundancy::Parity { .. })
        };
        let default = remote.redundancy.filter(is_possible);
        self.remote.redundancy = self.remote.redundancy.or(default);
        self.paging.read_ahead = self.paging.read_ahead.or(paging.read_ahead);
        self.paging.no_direct_io = self.paging.no_direct_io.or(paging.no_direct_io);
    }

    /// Sets the page size: a power of two, 4 KiB to 2 MiB.
    pub fn page_size(mut self, page_size: ByteSize) -> Self {
        self.page_bytes = Some(page_size.as_u64() as usize);
        self
    }

    /// Sets the most pages that are read ahead of sequential access; 0 switches read-ahead off.
    pub fn read_ahead(mut self, pages: usize) -> Self {
        self.paging.read_ahead = Some(pages);
        self
    }

    /// Sets the codec of pages on the servers. No effect on a region with a store of its own.
    pub fn codec(mut self, codec: Codec) -> Self {
        self.remote.codec = Some(codec);
        self
    }

    /// Sets the elements per dimension, the slowest first, as in C: `[planes, rows, columns]`.
    /// Codecs that look at neighbours ([`Codec::Zfp`]) do much better with the shape; nothing else
    /// depends on it. Default: one dimension.
    pub fn shape(mut self, shape: impl AsRef<[usize]>) -> Self {
        self.shape = shape.as_ref().to_vec();
        self
    }

    /// Sets the type of a region's elements, if only run time knows it. The type is told to
    /// programs that open the region, and codecs go by it. Arrays have the type of their elements
    /// and ignore this option. Default: bytes without a type.
    pub fn element_type(mut self, of: ElementType) -> Self {
        self.element_type = Some(of);
        self
    }

    /// Sets how much remote memory is reserved when the region is created. Default:
    /// [`Reserve::Full`], so that no eviction fails for lack of memory. A [named](Self::name)
    /// region reserves twice its size and a little more, since the published version stays whole
    /// until the next one is. Does nothing for a region with a store of its own.
    pub fn reserve(mut self, reserve: Reserve) -> Self {
        self.remote.reserve = reserve;
        self
    }

    /// Sets how pages outlive the death of servers: [copies](Redundancy::Copies) on several
    /// servers, or [parity](Redundancy::Parity). A [named](Self::name) region may have copies, and
    /// is refused with parity. Default: the runtime's, but one copy for a named region where that
    /// is parity. Does nothing for a region with a store of its own.
    pub fn redundancy(mut self, redundancy: Redundancy) -> Self {
        self.remote.redundancy = Some(redundancy);
        self
    }

    /// Names the region. Every flush and the close publish it on its servers under this name, where
    /// it outlives the program. Creation takes the name, and fails if the name exists already:
    /// [open](crate::Runtime::open_region) it, [remove](crate::Runtime::remove) it, or
    /// [replace](Self::replace) it. Does nothing for a region with a store of its own.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.remote.name = Some(name.into());
        self
    }

    /// Lets a [named](Self::name) region replace the one that exists under its name. The old one
    /// stays until the first flush, or the close. On several servers, a program that dies in the
    /// middle of that may leave neither. A region that another program has open for writing is not
    /// replaced. Readers keep the version that they opened. Default: off.
    pub fn replace(mut self, replace: bool) -> Self {
        self.remote.replace = replace;
        self
    }

    /// Keeps the region's pages in `store` instead of on the memory servers.
    pub fn store(mut self, store: impl Store) -> Self {
        self.store = Some(Arc::new(store));
        self
    }

    /// Maps the region at `address`, a multiple of its page size, as `mmap` does with `MAP_FIXED`.
    /// Mappings between `address` and the end of the region's last page are replaced, except those
    /// of another region, which are an error. Default: an address chosen by the kernel.
    ///
    /// # Safety
    /// Nothing may rely on the mappings that are replaced when the region is created.
    pub unsafe fn address(mut self, address: usize) -> Self {
        self.paging.address = Some(address);
        self
    }

    /// Makes the region read-only: a write to its memory raises SIGSEGV, and taking a mutable slice
    /// of it panics. Eviction drops its pages without comparing them. So a program must not make
    /// the memory writable by itself (`mprotect`): its writes would be lost. Default: off.
    pub fn read_only(mut self) -> Self {
        self.paging.read_only = true;
        self
    }

    /// Promises that no device writes into the region's memory: it is no buffer of `O_DIRECT`
    /// reads, of RDMA or of registered buffers of `io_uring`. Then pages of 4 KiB leave as copies,
    /// many by one call, which makes random access by several threads faster. If the promise is
    /// broken, bytes that a device writes into a page while the page leaves are lost. Ordinary
    /// system calls may write there as ever.
    ///
    /// No effect on other page sizes, before kernel 6.14, with
    /// [`user_mode_only`](crate::Builder::user_mode_only) or with a single evictor. In-thread
    /// faults need no promise. Default: [`Builder::no_direct_io`](crate::Builder::no_direct_io).
    pub fn no_direct_io(mut self, promised: bool) -> Self {
        self.paging.no_direct_io = Some(promised);
        self
    }
}

impl fmt::Debug for RegionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionOptions")
            .field("page_bytes", &self.page_bytes)
            .field("shape", &self.shape)
            .field("element_type", &self.element_type)
            .field("store", &self.store.as_ref().map(|store| store.name()))
            .field("remote", &self.remote)
            .field("paging", &self.paging)
            .finish()
    }
}

/// Bytes under paging: a slice whose pages come and go.
///
/// Dropping a region unmaps it. A named region, or one with a store of its own, is written back
/// before. An error is only logged: call [`close`](Region::close) to see it. The contents of other
/// regions are gone.
///
/// A named region that is dropped while its thread panics is not published: the panic may have left
/// it half updated. Others open the version that was published before. [`flush`](Region::flush) and
/// `close` publish at any time. A store of the region's own is written back even then, as a file
/// mapping is: evictions have written parts of it already, so there is no older state to keep.
pub struct Region {
    /// Registration for in-thread faults. Must be dropped before `mapped`.
    _faults: Option<FaultRegistration>,
    pub(crate) mapped: Held<MappedRegion<KernelSpace>>,
    name: Option<String>,
    /// True if the region's contents outlive it.
    keeps: bool,
    read_only: bool,
    closed: bool,
}

impl Region {
    pub(crate) fn new(
        mapped: Held<MappedRegion<KernelSpace>>,
        name: Option<String>,
        keeps: bool,
        read_only: bool,
    ) -> Result<Region, MapError> {
        let bytes = mapped.get().store().bytes();
        let faults =
            fault::register(mapped.get()).map_err(|source| MapError::Os { bytes, source })?;
        Ok(Region {
            _faults: faults,
            mapped,
            name,
            keeps,
            read_only,
            closed: false,
        })
    }

    /// Gives unused remote memory back to the servers, if the region reserves none.
    pub(crate) fn trim(&self) {
        let _signals = SignalGuard::new();
        self.mapped.with(|mapped| mapped.store().trim());
    }

    pub(crate) fn is_parents(&self) -> bool {
        self.mapped.get().pager().is_parents()
    }

    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.mapped.get().store().layout()
    }

    /// Returns the region's page size in bytes.
    pub fn page_bytes(&self) -> usize {
        self.mapped.get().page_bytes()
    }

    /// Returns the codec of the region's pages on the servers; `None` if it has a store of its own.
    pub fn codec(&self) -> Option<Codec> {
        self.mapped.get().store().codec()
    }

    /// Returns the elements that the region was created to hold; `None` for bytes without a type.
    pub fn elements(&self) -> Option<&Elements> {
        self.layout()?.elements.as_ref()
    }

    /// Returns the elements per dimension, the slowest first, as the region was created; empty for
    /// one dimension.
    pub fn shape(&self) -> Vec<usize> {
        let shape = self.layout().map_or(&[][..], |layout| &layout.shape);
        shape.iter().map(|&side| side as usize).collect()
    }

    /// Returns counts of this region's pages on their way to and from the store.
    pub fn store_stats(&self) -> StoreStatsSnapshot {
        let _signals = SignalGuard::new();
        self.mapped.get().store().stats()
    }

    /// Returns the most bytes that servers kept at once of this region's pages, and of other
    /// regions without a name that have its page size and codec. 0 if it has a store of its own.
    pub fn kept_peak_bytes(&self) -> u64 {
        let _signals = SignalGuard::new();
        self.mapped.get().store().kept_peak_bytes()
    }

    /// Returns the number of pages in local memory, perhaps without pages that are just being
    /// mapped.
    pub fn resident_pages(&self) -> usize {
        self.mapped.get().resident_pages()
    }

    /// Counts the pages that are in local memory or were written, and not discarded since.
    pub(crate) fn touched_pages(&self) -> usize {
        self.mapped.get().store().stats().touched_pages() as usize
    }

    /// True if touching some page of `bytes` raises SIGBUS, or may, because a fill of the page is
    /// under way.
    pub(crate) fn has_broken(&self, bytes: Range<usize>) -> bool {
        self.mapped.get().has_broken(bytes)
    }

    /// True if the kernel may hold references to pages of `bytes` ([`Advice::ZeroCopy`]).
    pub(crate) fn is_zero_copy(&self, bytes: Range<usize>) -> bool {
        self.mapped.get().is_zero_copy(bytes)
    }

    /// Says how the program will use a range of bytes.
    ///
    /// # Errors
    /// [`Advice::DontNeed`] waits until changed pages are written back. Its error names a page that
    /// could not be.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn advise(&self, range: impl RangeBounds<usize>, advice: Advice) -> Result<(), PageError> {
        let bytes = byte_range(range, self.len(), 1);
        self.mapped.with(|mapped| mapped.advise(bytes, advice))
    }

    /// Brings a range of bytes in and waits for it. Pages that failed before are tried again. A
    /// dead server is an error here, where an access would raise SIGBUS. If the range is larger
    /// than the budget, its first pages may have left again when `prefetch_now` returns.
    ///
    /// # Errors
    /// The reason why a page could not be brought in.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn prefetch_now(&self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        let bytes = byte_range(range, self.len(), 1);
        self.mapped.with(|mapped| mapped.prefetch_now(bytes))
    }

    /// Brings a range of bytes in and keeps it in memory until [`unpin`](Self::unpin). Accesses to
    /// the range do not wait until then.
    ///
    /// Every page that the range touches is pinned whole. Pins are counted (up to 255 per page), so
    /// parts of a program can pin the same page without knowing of each other. All pins end with
    /// the region. Pinned pages count towards the budget; about a tenth of it, at least four pages,
    /// stays free for other pages. The kernel may still swap pinned pages out.
    ///
    /// # System calls
    ///
    /// A system call (`read` into a region, `write` from it) that is given an absent page waits for
    /// it like any access, unless the runtime is one of
    /// [`user_mode_only`](crate::Builder::user_mode_only) or
    /// [`FaultMode::InThread`](crate::FaultMode::InThread): there it fails with `EFAULT`, or ends
    /// early, having done a part. Given pinned pages it succeeds, with one exception: while
    /// [`flush`](Self::flush) or [`Advice::DontNeed`] writes a page back, the page is absent for a
    /// moment, pinned or not. Do not run these at the same time as such a system call.
    ///
    /// ```no_run
    /// use std::{fs::File, io::Read};
    /// use farpage::{ByteSize, Runtime};
    ///
    /// let runtime = Runtime::builder()
    ///     .server("shm:///run/farpage.sock")
    ///     .budget(ByteSize::mib(256))
    ///     .user_mode_only(true)
    ///     .build()?;
    /// let mut region = runtime.region(8 << 30)?;
    /// region.pin(..64 << 20)?;
    /// File::open("records")?.read_exact(&mut region[..64 << 20])?;
    /// region.unpin(..64 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`PinError`]. Nothing is pinned then that was not pinned before.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn pin(&self, range: impl RangeBounds<usize>) -> Result<(), PinError> {
        let bytes = byte_range(range, self.len(), 1);
        self.mapped.with(|mapped| mapped.pin(bytes))
    }

    /// Takes back one [`pin`](Self::pin) of each page that the range touches. A page without a pin
    /// is left alone. Unpinned pages stay until other pages need their room. Give the range that
    /// was pinned: a smaller one leaves pins behind.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn unpin(&self, range: impl RangeBounds<usize>) {
        self.mapped.get().unpin(byte_range(range, self.len(), 1));
    }

    /// Copies `bytes` to `offset`. [Lost](PageError::Lost) pages that `bytes` covers wholly come
    /// back; the region's last page ends with the region. Without lost pages this is the same as
    /// copying into the slice, which would raise SIGBUS on a lost page.
    ///
    /// # Errors
    /// `bytes` covers a lost page only in part: nothing was copied. Or a lost page could not be
    /// mapped, and is still lost.
    ///
    /// # Panics
    /// If the bytes do not fit the region behind `offset`, or the region is
    /// [read-only](RegionOptions::read_only).
    pub fn overwrite(&mut self, offset: usize, bytes: &[u8]) -> Result<(), PageError> {
        let range = byte_range(offset..offset + bytes.len(), self.len(), 1);
        (self.mapped).with(|mapped| mapped.put_lost(offset, bytes))?;
        self[range].copy_from_slice(bytes);
        Ok(())
    }

    /// Makes a range of bytes zeros and gives up their contents: their remote memory is free for
    /// other pages, their local memory goes back to the budget, and nothing is written back. An
    /// allocator means this by `madvise(MADV_DONTNEED)`; [`Advice::DontNeed`] keeps the data.
    /// [Lost](PageError::Lost) pages that the range covers wholly come back as zeros.
    ///
    /// Pages that the range covers only in part are zeroed in memory. So are all pages of a region
    /// with a store of its own. Pinned pages stay in memory.
    ///
    /// # Errors
    /// A page that the kernel, a device or a slow server holds until the
    /// [deadline](crate::Builder::deadline), or that is covered in part and cannot be brought in.
    /// Bytes before that page are zeros.
    ///
    /// # Panics
    /// If the range does not lie in the region, or the region is
    /// [read-only](RegionOptions::read_only).
    pub fn discard_range(&mut self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        // SAFETY: the exclusive borrow: nobody has a reference to any byte.
        unsafe { self.discard_shared(range) }
    }

    /// Discards as [`discard_range`](Self::discard_range) does, for threads that share the region
    /// by its address. A write of another thread lands either before the discard, and is gone, or
    /// after the discard, on zeros.
    ///
    /// # Errors
    /// As [`discard_range`](Self::discard_range).
    ///
    /// # Panics
    /// As [`discard_range`](Self::discard_range).
    ///
    /// # Safety
    /// There is no reference to bytes of the range: they change.
    pub unsafe fn discard_shared(&self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        let range = byte_range(range, self.len(), 1);
        assert!(!self.read_only, "a read-only region cannot be discarded");
        let advise = |part: &Range<usize>, advice| {
            self.mapped
                .with(|mapped| mapped.advise(part.clone(), advice))
        };
        let renew = |part: &Range<usize>| match !part.is_empty()
            && self.mapped.get().is_zero_copy(part.clone())
        {
            // The kernel may still read the old contents: the zeros go to new memory.
            true => advise(part, Advice::DontNeed),
            false => Ok(()),
        };
        let write = |part: Range<usize>| {
            let first = (self.mapped.get().address() + part.start) as *mut u8;
            // SAFETY: in the region, which is mapped and writable; the caller promises that there
            // is no reference to these bytes.
            unsafe { first.write_bytes(0, part.len()) }
        };
        if self.mapped.get().store().is_users_own() {
            let zeros = vec![0; range.len()];
            (self.mapped).with(|mapped| mapped.put_lost(range.start, &zeros))?;
            renew(&range)?;
            write(range);
            return Ok(());
        }
        let zero = |part: Range<usize>| match part.is_empty() {
            true => Ok(()),
            false => {
                renew(&part)?;
                let act = || write(part.clone());
                self.mapped
                    .with(|mapped| mapped.with_pages(part.clone(), act))
            }
        };
        let whole = self.mapped.with(|mapped| mapped.discard(range.clone()))?;
        if whole.is_empty() {
            return zero(range);
        }
        zero(range.start..whole.start)?;
        zero(whole.end.min(range.end)..range.end)
    }

    /// Moves the bytes of `from` to the range of the same length at `to`. Whole pages move by their
    /// entries, without coming in; if `from` and `to` lie differently in their pages, all bytes are
    /// copied. The contents of `from` are unspecified afterwards.
    ///
    /// # Safety
    /// Nobody uses the pages that either range touches wholly, nor the bytes of other pages in the
    /// ranges. The ranges lie in the region, which is writable, and no page is touched by both.
    pub(crate) unsafe fn relocate(&self, from: Range<usize>, to: usize) -> Result<(), PageError> {
        let page_bytes = self.page_bytes();
        let copy = |part: Range<usize>| {
            let at = |byte: usize| (self.mapped.get().address() + byte) as *mut u8;
            // SAFETY: both lie in the region, which is mapped and writable; nobody else uses them,
            // and they do not overlap: the caller's promise.
            unsafe {
                at(to + (part.start - from.start))
                    .copy_from_nonoverlapping(at(part.start), part.len())
            }
        };
        let moved = |mapped: &MappedRegion<_>| mapped.relocate_ordinary(from.clone(), to, copy);
        if self.mapped.with(moved)? {
            return Ok(());
        }
        let first = from.start.next_multiple_of(page_bytes);
        let last = from.end / page_bytes * page_bytes;
        if !(to + (first - from.start)).is_multiple_of(page_bytes) || last <= first {
            copy(from.clone());
            return Ok(());
        }
        let stays = |old: usize, _| copy(old..old + page_bytes);
        let to_first = to + (first - from.start);
        (self.mapped).with(|mapped| mapped.relocate(first..last, to_first, stays))?;
        copy(from.start..first);
        copy(last..from.end);
        Ok(())
    }

    /// Writes all changes back and keeps the pages. A named region is published atomically: a
    /// program that opens it sees either all of this state or all of the state before. On servers
    /// with `--persist` the state is on their disks then. A region with a store of its own is as
    /// durable as the store makes it.
    ///
    /// # Errors
    /// See [`FlushError`]. Nothing is lost, and `flush` may be called again.
    pub fn flush(&self) -> Result<(), FlushError> {
        self.mapped.with(|mapped| mapped.flush())?;
        self.publish()
    }

    fn publish(&self) -> Result<(), FlushError> {
        match &self.name {
            Some(_) => {
                let _signals = SignalGuard::new();
                Ok(self.mapped.with(|mapped| mapped.store().publish())?)
            }
            None => Ok(()),
        }
    }

    /// Writes all changes back as [`flush`](Self::flush) does, and gives up all pages but pinned
    /// ones, as [`close`](Self::close) does first. Each page moves once; `flush`, which keeps
    /// pages, takes each out and maps it again.
    ///
    /// # Errors
    /// As `flush`. The pages that could not be written back stay.
    pub fn flush_out(&self) -> Result<(), FlushError> {
        self.mapped.with(|mapped| mapped.flush_out())?;
        self.publish()
    }

    /// Closes the region. A named region, or one with a store of its own, is flushed first; the
    /// contents of other regions are gone.
    ///
    /// # Errors
    /// The reason why contents could not be flushed. The error holds the region:
    /// [`into_inner`](CloseError::into_inner) gives it back with all its contents.
    pub fn close(mut self) -> Result<(), CloseError<Region>> {
        self.end().map_err(|source| CloseError::new(self, source))
    }

    /// Flushes a region whose contents outlive it. Dropping the region writes nothing back from now
    /// on, even if this fails: the caller has the error.
    pub(crate) fn end(&mut self) -> Result<(), FlushError> {
        self.closed = true;
        if self.keeps { self.flush_out() } else { Ok(()) }
    }

    /// Undoes [`end`](Self::end): dropping the region writes back contents that outlive it.
    pub(crate) fn reopen(&mut self) {
        self.closed = false;
    }

    /// Closes the region without writing back: changes since the last flush are lost.
    pub fn discard(mut self) {
        self.closed = true;
    }

    /// Takes the first error in the background since the last call: a failed eviction (the page is
    /// still in memory), or a page that could not be brought in (touching it raises SIGBUS).
    pub fn take_error(&self) -> Option<PageError> {
        self.mapped.get().take_error()
    }
}

/// Converts `range`, in elements of `size` bytes out of `len`, to a range of bytes.
///
/// # Panics
/// If `range` does not lie in `0..len`.
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
    /// Returns the region, open and unchanged.
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
        // - the addresses are mapped for as long as `mapped` lives, which the borrow ensures, and
        //   `bytes` fit `mapped_bytes`;
        // - every byte is initialised: a page is zero or what was stored before it can be read;
        // - nobody writes the bytes meanwhile: workers move pages, but the program sees the same
        //   bytes.
        unsafe {
            slice::from_raw_parts(
                self.mapped.get().address() as *const u8,
                self.mapped.get().store().bytes() as usize,
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
                self.mapped.get().address() as *mut u8,
                self.mapped.get().store().bytes() as usize,
            )
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.mapped.get().pager().is_parents() {
            // A thread of the parent may have been in the handler when the process forked. Dropping
            // the registration would wait for that thread for ever.
            mem::forget(self._faults.take());
            return;
        }
        if !self.keeps || self.closed {
            return;
        }
        // A region that was created while the panic unwinds is not published either: the destructor
        // that created it may have been cut short by a panic of its own, which cannot be seen here.
        // Such a region has to be closed.
        if self.name.is_some() && thread::panicking() {
            tracing::error!(
                name = self.name,
                "a region was dropped by a panic: its changes since the last flush are not published"
            );
            return;
        }
        if let Err(error) = self.flush_out() {
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
