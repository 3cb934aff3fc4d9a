//! The program's real memory: regions, their userfaultfds, and the two ways in which pages change sides.
//!
//! The rule it keeps: wherever in a run the kernel refuses, every page ends up whole on one side, and every write of the program is in it: the pages
//! before the refusal stay where they went, and the page that was halfway goes back. One caller at a time acts on a page (the pager's protocol); program threads do as they please.
//!
//! **Moving** (kernel 6.8): `UFFDIO_MOVE` between region and frame pool. It checks that the destination is registered with the descriptor that it
//! is called on: the shard's for moving in, the pool's for moving out. A run moves by one call, which has the processors forget the old addresses once.
//!
//! **Copying** (kernel 5.7; forced by [`KernelSpaceOptions::transfer`]): in by `UFFDIO_COPY`, out by `mremap` with `MREMAP_DONTUNMAP` to
//! a temporary address, atomic as `MOVE` is, then `UFFDIO_COPY` into the slot. Write-protecting the page and copying it where it lies would deadlock
//! when the program drops the page in between: the copy would fault on the region, in the thread whose turn it is to end that fault.
//! Out, a run is copied page by page, so that memory which runs out puts one page at stake and not a run.
//! The price: one page out, or one run in, more per transfer in progress than the frames account for, the mmap lock held for writing, no huge
//! pages, and pages that a device is writing to (direct I/O) are taken all the same, so that what the device writes after that is lost.

use std::{
    collections::BTreeSet,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;

use crate::{
    frame::{HUGE_PAGE_BYTES, KernelFrame, Pool},
    pagemap::Pagemap,
    space::{AddressSpace, DetachError, Fault, Frame, InstallError, InstallErrorKind, Layout},
    sys::{self, KERNEL_PAGE_BYTES, Refusal, Stopped},
    uffd::{FaultBuffer, Features, OpenError, RegisterMode, Uffd},
};

/// Page sizes: 4 KiB to 2 MiB.
const PAGE_SIZES: usize = 10;

/// How pages change sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transfer {
    /// By `UFFDIO_MOVE` (kernel 6.8): the physical page changes its address, nothing is copied.
    Move,
    /// By copying (kernel 5.7). Pages of 2 MiB are not huge then, each transfer in progress takes one page more (in: one run more), and what
    /// a device writes into a page while it is taken out is lost.
    Copy,
}

/// How a [`KernelSpace`] is made.
#[derive(Clone, Debug)]
pub struct KernelSpaceOptions {
    /// Number of shards, each with a userfaultfd of its own. Default: 1.
    pub shards: usize,
    /// Bytes of frames that may be held at once, per page size: frames that are not installed, not pages in regions. This is addresses, not memory
    /// (twice as many, so that pages of a run find room next to each other). Default: 1 GiB.
    pub frame_bytes_max: usize,
    /// How pages change sides. Default: `None`, the best that the kernel offers.
    pub transfer: Option<Transfer>,
    /// Catch only faults of the program's own instructions; a system call that touches an absent page fails with `EFAULT`. Needs no permission.
    /// Default: false.
    pub user_mode_only: bool,
    /// A fault is not reported to its shard but raises SIGBUS in the thread that faults, which serves it itself (see [`sigbus`](crate::sigbus)).
    /// No other thread is woken for it, which is most of a fault's cost. The price: a system call that touches an absent page fails with `EFAULT`,
    /// and a thread that blocks SIGBUS is killed by its first fault. Default: false.
    pub in_thread: bool,
}

impl Default for KernelSpaceOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            frame_bytes_max: 1 << 30,
            transfer: None,
            user_mode_only: false,
            in_thread: false,
        }
    }
}

/// The program's real memory.
#[derive(Debug)]
pub struct KernelSpace {
    shards: Vec<Shard>,
    pools: [OnceLock<Arc<Pool>>; PAGE_SIZES],
    /// Held while a pool is made, so that only one is.
    pool_maker: Mutex<()>,
    options: KernelSpaceOptions,
    transfer: Transfer,
    features: Features,
    pagemap: Pagemap,
    /// Pages made inaccessible because the kernel has no `UFFDIO_POISON`; always empty where it has.
    fenced: Mutex<BTreeSet<usize>>,
}

struct Shard {
    uffd: Uffd,
    /// Never contended: one thread reads a shard's faults.
    buffer: Mutex<FaultBuffer>,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.uffd.fmt(f)
    }
}

impl KernelSpace {
    /// Opens the userfaultfds. Takes no memory yet.
    ///
    /// # Errors
    /// See [`OpenError`].
    ///
    /// # Panics
    /// If `options.shards` is 0.
    pub fn new(options: KernelSpaceOptions) -> Result<Self, OpenError> {
        let supported = Uffd::supported(options.user_mode_only)?;
        Self::with_features(options, supported)
    }

    /// As on a kernel that has these features.
    fn with_features(options: KernelSpaceOptions, supported: Features) -> Result<Self, OpenError> {
        assert!(options.shards > 0, "a space has at least one shard");
        let kernel_page_bytes = page_size();
        if kernel_page_bytes != KERNEL_PAGE_BYTES {
            return Err(OpenError::KernelPage {
                bytes: kernel_page_bytes,
            });
        }
        let transfer = match options.transfer {
            Some(transfer) => transfer,
            None if supported.contains(Features::MOVE) => Transfer::Move,
            None => Transfer::Copy,
        };
        let mut features = match transfer {
            Transfer::Move => Features::MOVE,
            Transfer::Copy => Features::MISSING,
        };
        if supported.contains(Features::POISON) {
            features = features | Features::POISON;
        }
        let reported = if options.in_thread {
            Features::SIGBUS
        } else {
            Features::MISSING
        };
        let shards = (0..options.shards)
            .map(|_| {
                let uffd = Uffd::open(features | reported, options.user_mode_only)?;
                Ok(Shard {
                    uffd,
                    buffer: Mutex::default(),
                })
            })
            .collect::<Result<_, OpenError>>()?;
        Ok(Self {
            shards,
            pools: Default::default(),
            pool_maker: Mutex::default(),
            options,
            transfer,
            features,
            pagemap: Pagemap::open().map_err(OpenError::Pagemap)?,
            fenced: Mutex::default(),
        })
    }

    /// How pages change sides here.
    pub fn transfer(&self) -> Transfer {
        self.transfer
    }

    fn pool(&self, page_bytes: usize) -> io::Result<&Arc<Pool>> {
        check_page_bytes(page_bytes)?;
        let cell = &self.pools[(page_bytes / KERNEL_PAGE_BYTES).ilog2() as usize];
        if let Some(pool) = cell.get() {
            return Ok(pool);
        }
        let _making = self.pool_maker.lock();
        if let Some(pool) = cell.get() {
            return Ok(pool);
        }
        let pages_max = u32::try_from(self.options.frame_bytes_max.div_ceil(page_bytes).max(1))
            .map_err(|_| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "frames of 2^32 pages or more: lower `frame_bytes_max`",
                )
            })?;
        let moving = self.features & Features::MOVE;
        let pool = Pool::new(page_bytes, pages_max, self.options.user_mode_only, moving)?;
        Ok(cell.get_or_init(|| pool))
    }

    fn uffd(&self, shard: usize) -> &Uffd {
        &self.shards[shard].uffd
    }

    fn register(&self, address: usize, layout: &Layout) -> io::Result<()> {
        if self.shards.len() == 1 {
            return self
                .uffd(0)
                .register(address, layout.bytes, RegisterMode::MISSING);
        }
        (0..layout.bytes)
            .step_by(layout.stripe_bytes)
            .try_for_each(|offset| {
                let len = layout.stripe_bytes.min(layout.bytes - offset);
                let shard = layout.shard_of(offset, self.shards.len());
                self.uffd(shard)
                    .register(address + offset, len, RegisterMode::MISSING)
            })
    }

    /// [`Uffd::move_pages`] out of pages that are the caller's, such that what is refused has not moved.
    ///
    /// From Linux 6.18 on, a move that has to try again inside the kernel (a page ages or migrates at that moment) forgets that it succeeded then, tries once
    /// more, and meets the pages that it has just moved itself: `EEXIST`, with nothing counted and nobody woken. That is told from a
    /// destination where something was before by the source, which is empty.
    ///
    /// # Safety
    /// As there.
    unsafe fn move_pages(
        &self,
        uffd: &Uffd,
        dst: usize,
        src: usize,
        len: usize,
        allow_holes: bool,
    ) -> Result<(), Stopped> {
        let mut done = 0;
        while done < len {
            // SAFETY: the caller's promise.
            let moved = unsafe { uffd.move_pages(dst + done, src + done, len - done, allow_holes) };
            let Err(Stopped { done_bytes, why }) = moved else {
                break;
            };
            done += done_bytes;
            let source_is_there = || {
                self.pagemap
                    .any_occupied(src + done, KERNEL_PAGE_BYTES)
                    .expect("/proc/self/pagemap stays readable for its owner")
            };
            if why != Refusal::Exists || source_is_there() {
                return Err(Stopped {
                    done_bytes: done,
                    why,
                });
            }
            // How many have moved is not said: the next one answers for itself.
            uffd.wake(dst + done, KERNEL_PAGE_BYTES)
                .expect("waking checks alignment only, and pages are aligned");
            done += KERNEL_PAGE_BYTES;
        }
        Ok(())
    }

    fn install_run(
        &self,
        uffd: &Uffd,
        address: usize,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        match self.transfer {
            Transfer::Move => self.install_by_move(uffd, address, frame),
            Transfer::Copy => self.install_by_copy(uffd, address, frame),
        }
    }

    fn install_page_by_page(
        &self,
        uffd: &Uffd,
        mut address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let page_bytes = frame.pool().page_bytes();
        while frame.len() > page_bytes {
            let rest = frame.split_off(page_bytes);
            if let Err(mut error) = self.install_run(uffd, address, frame) {
                error.frame.join(rest).expect("they were one a moment ago");
                return Err(error);
            }
            (address, frame) = (address + page_bytes, rest);
        }
        self.install_run(uffd, address, frame)
    }

    fn install_by_move(
        &self,
        uffd: &Uffd,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let (slot, len) = (frame.address(), frame.len());
        // SAFETY: the slots are the frame's, which is consumed; a region's absent pages are the pager's to fill.
        let Err(Stopped { done_bytes, why }) =
            (unsafe { self.move_pages(uffd, address, slot, len, false) })
        else {
            frame.vacated();
            return Ok(());
        };
        let moved_bytes = done_bytes % frame.pool().page_bytes();
        let whole_bytes = done_bytes - moved_bytes;
        if let Some(whole) = frame.split_front(whole_bytes) {
            whole.vacated();
        }
        let address = address + whole_bytes;
        match why {
            // Nothing of the page has moved: for a page that was poisoned, and for a mapping that `mlock` or `mprotect` made differ from the
            // pool's, where copying still works.
            Refusal::Exists | Refusal::Invalid if moved_bytes == 0 => {
                self.install_by_copy(uffd, address, frame)
            }
            why => self.take_back(address, moved_bytes, frame, why),
        }
    }

    /// Copying replaces poison markers, which moving takes for pages.
    fn install_by_copy(
        &self,
        uffd: &Uffd,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let (slot, len) = (frame.address(), frame.len());
        // SAFETY: the frame's pages are readable; a region's absent pages are the pager's to fill.
        let Err(Stopped { done_bytes, why }) = (unsafe { uffd.copy(address, slot, len, false) })
        else {
            // Dropping the frame gives its pages back, so that there is one of each as before.
            return Ok(());
        };
        let copied_bytes = done_bytes % frame.pool().page_bytes();
        let whole_bytes = done_bytes - copied_bytes;
        drop(frame.split_front(whole_bytes));
        if copied_bytes > 0 {
            let address = address + whole_bytes;
            // SAFETY: copies that this call made; the frame has the bytes. Who touches them faults again.
            let _ = unsafe { sys::madvise(address, copied_bytes, libc::MADV_DONTNEED) };
        }
        Err(InstallError {
            frame,
            kind: refused(why),
        })
    }

    /// Undoes the part of a frame's first page that moved in before the rest was refused: part of the page was mapped already.
    fn take_back(
        &self,
        address: usize,
        moved_bytes: usize,
        mut frame: KernelFrame,
        why: Refusal,
    ) -> Result<(), InstallError<KernelFrame>> {
        if moved_bytes > 0 {
            let (slot, uffd) = (frame.address(), &frame.pool().uffd);
            // SAFETY: what moved in a moment ago moves back. The program's writes to it since then come along; what it dropped is a hole.
            let back = unsafe { self.move_pages(uffd, slot, address, moved_bytes, true) };
            if let Err(stopped) = back {
                let done = stopped.done_bytes;
                // Pinned or gone within that moment: the pinned page's bytes are taken as when copying.
                let len = moved_bytes - done;
                if let Err(CarryError::Staged(staged, _)) =
                    self.carry_out(address + done, len, slot + done, frame.pool())
                {
                    // SAFETY: the mapping that the bytes were carried to, which nobody else knows.
                    unsafe { sys::release(staged, len) };
                }
            }
            if let Err(error) = frame.fill_holes_with_zeros(0..moved_bytes) {
                return Err(InstallError {
                    frame,
                    kind: InstallErrorKind::Os(error),
                });
            }
        }
        Err(InstallError {
            frame,
            kind: refused(why),
        })
    }

    fn detach_by_move(
        &self,
        shard: usize,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<KernelFrame, DetachError> {
        let (slot, len, page_bytes) = (frame.address(), frame.len(), frame.pool().page_bytes());
        // 1. Move up to the first page that is absent or refused: all at once or, where the program has divided the mapping (by `mprotect`, say) and
        // the kernel refuses what spans two, page by page.
        let (mut done, mut end) = (0, len);
        let mut why = None;
        let mut holes = Vec::<Range<usize>>::new();
        while done < len && why.is_none() {
            if done == end {
                end += page_bytes;
            }
            let page_end = done - done % page_bytes + page_bytes;
            // SAFETY: what the program relies on vanishes only from the mapping: touching it is a fault that waits for `install`. The slots are the frame's.
            match unsafe {
                let uffd = &frame.pool().uffd;
                self.move_pages(uffd, slot + done, address + done, end - done, false)
            } {
                Ok(()) => done = end,
                Err(Stopped {
                    done_bytes: 0,
                    why: Refusal::Invalid,
                }) if page_end < end => end = page_end,
                // The program dropped this kernel page; the rest of the page may be there.
                Err(Stopped {
                    done_bytes,
                    why: Refusal::Missing,
                }) => {
                    done += done_bytes;
                    let start = match holes.pop_if(|hole| hole.end == done) {
                        Some(hole) => hole.start,
                        None => done,
                    };
                    done += KERNEL_PAGE_BYTES;
                    holes.push(start..done);
                    if done.is_multiple_of(page_bytes) && start + page_bytes <= done {
                        done -= page_bytes;
                        why = Some(DetachError::Absent);
                    }
                }
                Err(Stopped {
                    done_bytes,
                    why: refusal,
                }) => {
                    done += done_bytes;
                    why = Some(match refusal {
                        Refusal::Held | Refusal::Contended => DetachError::Held,
                        Refusal::Ended => DetachError::Absent,
                        other => DetachError::Os(other.into()),
                    });
                }
            }
        }
        // 2. Make the pages whole that are partly there.
        let mut whole = done - done % page_bytes;
        for hole in &holes {
            if hole.start >= whole {
                break;
            }
            if let Err(error) = frame.fill_holes_with_zeros(hole.start..hole.end.min(whole)) {
                whole = hole.start - hole.start % page_bytes;
                why = Some(DetachError::Os(error));
                break;
            }
        }
        if whole == len {
            frame.set_occupied();
            return Ok(frame);
        }
        // 3. Put back what moved behind them, if it was more than holes.
        let kept = frame.split_front(whole);
        let moved = done > whole
            && !holes
                .last()
                .is_some_and(|hole| hole.start <= whole && hole.end >= done);
        let put_back = if moved {
            frame.set_occupied();
            self.put_back(shard, address + whole, done - whole, frame)
        } else {
            Ok(())
        };
        let Some(mut kept) = kept else {
            put_back?;
            return Err(why.expect("a run that ended early has a reason"));
        };
        kept.set_occupied();
        Ok(kept)
    }

    /// Undoes the part of a run that moved out before the rest was refused. Threads that touched it in between sleep on absent pages and are
    /// woken. Holes stay holes.
    fn put_back(
        &self,
        shard: usize,
        address: usize,
        moved_bytes: usize,
        frame: KernelFrame,
    ) -> Result<(), DetachError> {
        let (uffd, slot) = (self.uffd(shard), frame.address());
        let mut done = 0;
        let mut result = Ok(());
        while done < moved_bytes {
            // SAFETY: what moved out a moment ago moves back; the frame is consumed.
            let back = unsafe {
                self.move_pages(uffd, address + done, slot + done, moved_bytes - done, true)
            };
            let Err(Stopped { done_bytes, why }) = back else {
                break;
            };
            done += done_bytes;
            match why {
                // The region was unmapped meanwhile, and the page with it.
                Refusal::Missing | Refusal::Ended => return Err(DetachError::Absent),
                // Nobody may fill a page that is being taken out. If somebody did, its bytes are the newer ones.
                Refusal::Exists => {}
                // A lock or a pin on the frame's page, which only copying passes.
                why => {
                    // SAFETY: as above; the slot is ours to read, and a hole in it is an error (EFAULT), since the pool is in SIGBUS mode.
                    match unsafe {
                        uffd.copy(address + done, slot + done, KERNEL_PAGE_BYTES, false)
                    } {
                        Ok(())
                        | Err(Stopped {
                            why: Refusal::Exists | Refusal::Other(_),
                            ..
                        }) => {}
                        Err(_) => {
                            // Never zeros, never a hang: what can not be put back is poisoned.
                            let _ = self.poison(shard, address + done, KERNEL_PAGE_BYTES);
                            result = Err(DetachError::Os(why.into()));
                        }
                    }
                }
            }
            done += KERNEL_PAGE_BYTES;
        }
        result
    }

    fn detach_by_copy(
        &self,
        shard: usize,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<KernelFrame, DetachError> {
        let (slot, len, page_bytes) = (frame.address(), frame.len(), frame.pool().page_bytes());
        // Dropping what was not copied gives back the part that was.
        frame.set_occupied();
        for done in (0..len).step_by(page_bytes) {
            let copied = self.copy_out(shard, address + done, slot + done, frame.pool());
            if let Err(error) = copied {
                return frame.split_front(done).ok_or(error);
            }
        }
        Ok(frame)
    }

    /// Takes one page out of a region and copies it to a slot of a pool.
    fn copy_out(
        &self,
        shard: usize,
        address: usize,
        slot: usize,
        pool: &Pool,
    ) -> Result<(), DetachError> {
        let len = pool.page_bytes();
        // The program may drop the page between this and the next step: then it is taken out as zeros, which it reads there, too.
        if !self
            .pagemap
            .any_occupied(address, len)
            .map_err(DetachError::Os)?
        {
            return Err(DetachError::Absent);
        }
        match self.carry_out(address, len, slot, pool) {
            Ok(()) => Ok(()),
            Err(CarryError::Refused(errno)) if errno.raw_os_error() == Some(libc::EFAULT) => {
                Err(DetachError::Absent)
            }
            Err(CarryError::Refused(error)) => Err(DetachError::Os(error)),
            Err(CarryError::Staged(staged, why)) => {
                // SAFETY: `staged` is the mapping that the page was carried to, nobody else knows it.
                let back = unsafe { self.uffd(shard).copy(address, staged, len, false) };
                // SAFETY: as above, and it is not used after this.
                unsafe { sys::release(staged, len) };
                if let Err(Stopped { done_bytes, .. }) = back {
                    // Never zeros, never a hang: what can not be put back is poisoned.
                    let _ = self.poison(shard, address + done_bytes, len - done_bytes);
                }
                Err(DetachError::Os(why.into()))
            }
        }
    }

    /// Takes bytes out of a region by `mremap`, and copies them to a slot of a pool. Holes become zeros.
    fn carry_out(
        &self,
        address: usize,
        len: usize,
        slot: usize,
        pool: &Pool,
    ) -> Result<(), CarryError> {
        // SAFETY: lies in one stripe of a region, where absent pages are faults.
        let staged = unsafe { sys::carry_away(address, len) }
            .map_err(|errno| CarryError::Refused(errno.into()))?;
        // SAFETY: `staged` is a mapping that nobody else knows; the slot is the caller's.
        unsafe { pool.uffd.copy(slot, staged, len, false) }
            .map_err(|stopped| CarryError::Staged(staged, stopped.why))?;
        // SAFETY: as above, and it is not used after this.
        unsafe { sys::release(staged, len) };
        Ok(())
    }

    /// Makes fenced pages accessible again, so that the program's next touch meets what was installed.
    fn unfence(&self, address: usize, len: usize, page_bytes: usize) {
        if self.features.contains(Features::POISON) {
            return;
        }
        for page in (address..address + len).step_by(page_bytes) {
            if self.fenced.lock().remove(&page) {
                // SAFETY: a page of a region, whose protection this restores.
                let _ =
                    unsafe { sys::protect(page, page_bytes, libc::PROT_READ | libc::PROT_WRITE) };
            }
        }
    }
}

/// A page that was not carried out by copying.
enum CarryError {
    /// It is where it was.
    Refused(io::Error),
    /// It lies at this temporary address.
    Staged(usize, Refusal),
}

impl AddressSpace for KernelSpace {
    type Frame = KernelFrame;

    fn shards(&self) -> usize {
        self.shards.len()
    }

    fn map(&self, layout: Layout) -> io::Result<usize> {
        check_layout(&layout)?;
        let address = sys::reserve(layout.bytes, layout.page_bytes, layout.page_bytes == HUGE_PAGE_BYTES).map_err(|errno| {
            io::Error::new(
                io::Error::from(errno).kind(),
                format!(
                    "cannot reserve {} bytes of addresses: {errno} (see `ulimit -v`, `sysctl vm.overcommit_memory`, which 2 makes \
                     count addresses as memory, and `sysctl vm.max_map_count`)",
                    layout.bytes
                ),
            )
        })?;
        if let Err(error) = self.register(address, &layout) {
            // SAFETY: reserved above, and nobody has learned of it.
            unsafe { sys::release(address, layout.bytes) };
            let text = format!(
                "cannot register {} bytes with userfaultfd: {error}; when out of memory, a mapping per stripe exceeds \
                 `sysctl vm.max_map_count`: raise it (`sudo sysctl -w vm.max_map_count=1000000`) or choose larger stripes",
                layout.bytes
            );
            return Err(io::Error::new(error.kind(), text));
        }
        Ok(address)
    }

    fn unmap(&self, address: usize, layout: Layout) {
        if !self.features.contains(Features::POISON) {
            let mut fenced = self.fenced.lock();
            let inside: Vec<_> = fenced
                .range(address..address + layout.bytes)
                .copied()
                .collect();
            for page in inside {
                fenced.remove(&page);
            }
        }
        // SAFETY: the caller gives the region up.
        unsafe { sys::release(address, layout.bytes) };
        // Threads that slept on a fault there would sleep for ever. They are woken after the mapping is gone, so that they meet SIGSEGV and not a page of
        // zeros, which unregistering first would give them.
        for shard in &self.shards {
            let _ = shard.uffd.wake(address, layout.bytes);
        }
    }

    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<KernelFrame> {
        self.pool(page_bytes)?.new_frame(pages)
    }

    fn install(
        &self,
        shard: usize,
        address: usize,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let uffd = self.uffd(shard);
        let (len, page_bytes) = (frame.len(), frame.pool().page_bytes());
        let installed = match self.install_run(uffd, address, frame) {
            // Or the program has divided the mapping (by `mprotect`, say), and the kernel refuses what spans two.
            Err(InstallError {
                frame,
                kind: InstallErrorKind::Gone,
            }) if frame.len() > page_bytes => {
                self.install_page_by_page(uffd, address + len - frame.len(), frame)
            }
            installed => installed,
        };
        let refused_bytes = match &installed {
            Ok(()) => 0,
            Err(error) => error.frame.len(),
        };
        let installed_bytes = len - refused_bytes;
        self.unfence(address, installed_bytes, page_bytes);
        // The page that exists may have come after its fault was reported.
        if let Err(InstallError {
            kind: InstallErrorKind::Exists,
            ..
        }) = &installed
        {
            self.wake(shard, address + installed_bytes, page_bytes);
        }
        installed
    }

    fn detach(
        &self,
        shard: usize,
        address: usize,
        page_bytes: usize,
        pages: usize,
    ) -> Result<KernelFrame, DetachError> {
        let frame = self
            .pool(page_bytes)
            .and_then(|pool| pool.vacant(pages, 1))
            .map_err(DetachError::Os)?;
        match self.transfer {
            Transfer::Move => self.detach_by_move(shard, address, frame),
            Transfer::Copy => self.detach_by_copy(shard, address, frame),
        }
    }

    fn is_present(&self, address: usize) -> bool {
        self.pagemap
            .any_occupied(address, 1)
            .expect("/proc/self/pagemap stays readable for its owner")
    }

    fn wake(&self, shard: usize, address: usize, bytes: usize) {
        self.uffd(shard)
            .wake(address, bytes)
            .expect("waking checks alignment only, and pages are aligned");
    }

    fn poison(&self, shard: usize, address: usize, page_bytes: usize) -> io::Result<()> {
        if self.features.contains(Features::POISON) {
            // SAFETY: an absent page of a region, whose fate is the pager's to decide.
            let poisoned = unsafe { self.uffd(shard).poison(address, page_bytes) };
            return poisoned.or_else(|stopped| {
                self.wake(shard, address, page_bytes);
                // Poisoned before: a fill that was tried again has failed again.
                if stopped.why == Refusal::Exists {
                    Ok(())
                } else {
                    Err(stopped.why.into())
                }
            });
        }
        // Before kernel 6.6: no access at all, which is SIGSEGV.
        self.fenced.lock().insert(address);
        // SAFETY: an absent page of a region, whose fate is the pager's to decide.
        let fenced = unsafe { sys::protect(address, page_bytes, libc::PROT_NONE) };
        if fenced.is_err() {
            self.fenced.lock().remove(&address);
        }
        self.wake(shard, address, page_bytes);
        fenced.map_err(io::Error::from)
    }

    fn faults(&self, shard: usize, out: &mut Vec<Fault>) -> io::Result<()> {
        let shard = &self.shards[shard];
        shard.uffd.faults(&mut shard.buffer.lock(), out)
    }

    fn fault_fd(&self, shard: usize) -> Option<BorrowedFd<'_>> {
        Some(self.uffd(shard).as_fd())
    }
}

fn refused(why: Refusal) -> InstallErrorKind {
    match why {
        Refusal::Exists => InstallErrorKind::Exists,
        Refusal::Missing | Refusal::Ended => InstallErrorKind::Gone,
        other => InstallErrorKind::Os(other.into()),
    }
}

fn page_size() -> usize {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| usize::try_from(bytes).ok())
        .expect("every Linux tells its page size")
}

fn check_page_bytes(page_bytes: usize) -> io::Result<()> {
    if page_bytes.is_power_of_two() && (KERNEL_PAGE_BYTES..=HUGE_PAGE_BYTES).contains(&page_bytes) {
        return Ok(());
    }
    let text = format!("a page of {page_bytes} bytes: must be a power of two from 4096 to 2097152");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn check_layout(layout: &Layout) -> io::Result<()> {
    check_page_bytes(layout.page_bytes)?;
    let whole_pages = |bytes: usize| bytes > 0 && bytes.is_multiple_of(layout.page_bytes);
    if whole_pages(layout.bytes) && whole_pages(layout.stripe_bytes) {
        return Ok(());
    }
    let text = format!("{layout:?}: region and stripe must be a positive multiple of the page");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 65536;
    const LAYOUT: Layout = Layout {
        bytes: 2 * PAGE,
        page_bytes: PAGE,
        stripe_bytes: PAGE,
        first_shard: 0,
    };

    #[test]
    fn kernel_without_move_and_poison_is_served_by_copying_and_fencing() {
        let space =
            KernelSpace::with_features(KernelSpaceOptions::default(), Features::WP).unwrap();
        assert_eq!(space.transfer(), Transfer::Copy);
        let base = space.map(LAYOUT).unwrap();
        let protection = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let line = maps
                .lines()
                .find(|line| line.starts_with(&format!("{base:x}-")))
                .unwrap();
            line.split(' ').nth(1).unwrap().to_owned()
        };
        space.poison(0, base, PAGE).unwrap();
        assert_eq!(protection(), "---p");
        let mut frame = space.new_frame(PAGE, 1).unwrap();
        frame.as_mut()[PAGE - 1] = 3;
        space.install(0, base, frame).unwrap();
        assert_eq!(protection(), "rw-p");
        assert_eq!(
            space.detach(0, base, PAGE, 1).unwrap().as_ref()[PAGE - 1],
            3
        );
        space.poison(0, base, PAGE).unwrap();
        space.unmap(base, LAYOUT);
        assert!(space.fenced.lock().is_empty());
    }

    #[test]
    fn layouts_that_are_no_whole_pages_are_refused() {
        let space = KernelSpace::new(KernelSpaceOptions::default()).unwrap();
        for wrong in [
            Layout {
                bytes: PAGE + 1,
                ..LAYOUT
            },
            Layout { bytes: 0, ..LAYOUT },
            Layout {
                stripe_bytes: 4096,
                ..LAYOUT
            },
            Layout {
                page_bytes: 2048,
                ..LAYOUT
            },
            Layout {
                page_bytes: 4 << 20,
                bytes: 4 << 20,
                stripe_bytes: 4 << 20,
                ..LAYOUT
            },
        ] {
            assert_eq!(
                space.map(wrong).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{wrong:?}"
            );
        }
    }
}
