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
//!
//! Where faults are served in-thread, single pages may also be copied where they lie (`scatter.rs`): no such fault waits for anybody there.

use std::{
    cell::Cell,
    collections::BTreeSet,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr,
    sync::{
        Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use crate::{
    frame::{HUGE_PAGE_BYTES, KernelFrame, Pool},
    pagemap::Pagemap,
    regions::{self, Ranges},
    space::{AddressSpace, DetachError, Fault, Frame, InstallError, InstallErrorKind, Layout},
    sys::{self, KERNEL_PAGE_BYTES, Refusal, Stopped},
    uffd::{FaultBuffer, Features, Message, OpenError, RegisterMode, Uffd},
};

/// How long to wait for a shard's messages to be read: its filler is dead, or starved beyond help.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);
/// A thread that waits for that yields its core at first, and then sleeps.
const CHANGE_YIELDS: Duration = Duration::from_micros(200);
const CHANGE_NAP: Duration = Duration::from_micros(50);

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
    number: u64,
    shards: Vec<Shard>,
    pools: [OnceLock<Arc<Pool>>; PAGE_SIZES],
    /// Held while a pool is made, so that only one is.
    pool_maker: Mutex<()>,
    options: KernelSpaceOptions,
    transfer: Transfer,
    features: Features,
    /// Whether single pages are copied in and out (`scatter.rs`).
    scatters: bool,
    pagemap: Pagemap,
    /// Pages made inaccessible because the kernel has no `UFFDIO_POISON`; always empty where it has.
    fenced: Mutex<BTreeSet<usize>>,
}

struct Shard {
    uffd: Uffd,
    /// Locked for writing while messages are read, for reading while pages change sides: the program's call that unmaps them returns when its message has
    /// been read, and what it then has there must not be taken for the region's. Of the standard library: it never allocates, and is locked in a signal handler.
    heard: RwLock<Heard>,
    has_news: AtomicBool,
    /// Which thread reads the messages.
    reader: AtomicUsize,
    /// Faults that it came across when it was after something else.
    early: Mutex<Vec<Fault>>,
}

/// What a shard's messages have said.
#[derive(Default)]
pub(crate) struct Heard {
    buffer: FaultBuffer,
    /// What the program has unmapped of the space's regions; whole addresses, not the shard's alone.
    pub(crate) gone: Ranges,
    /// What of it has not been told yet.
    news: Vec<Range<usize>>,
}

impl Shard {
    fn heard(&self) -> RwLockReadGuard<'_, Heard> {
        self.heard.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self) -> RwLockWriteGuard<'_, Heard> {
        self.heard.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_messages(&self) -> bool {
        let mut fds = [PollFd::new(self.uffd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

/// A number for this thread.
fn this_thread() -> usize {
    thread_local! {
        static HERE: Cell<u8> = const { Cell::new(0) };
    }
    HERE.with(|here| ptr::from_ref(here).addr())
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
            Transfer::Move => Features::MOVE | Features::EVENT_UNMAP,
            Transfer::Copy => Features::EVENT_UNMAP,
        };
        if supported.contains(Features::POISON) {
            features = features | Features::POISON;
        }
        let scatters = options.in_thread
            && transfer == Transfer::Move
            && supported.contains(Features::WP)
            && sys::can_copy_and_drop_each();
        if scatters {
            features = features | Features::WP;
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
                    heard: RwLock::default(),
                    has_news: AtomicBool::new(false),
                    reader: AtomicUsize::new(0),
                    early: Mutex::default(),
                })
            })
            .collect::<Result<_, OpenError>>()?;
        Ok(Self {
            number: regions::next_space(),
            shards,
            pools: Default::default(),
            pool_maker: Mutex::default(),
            options,
            transfer,
            features,
            scatters,
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

    pub(crate) fn uffd(&self, shard: usize) -> &Uffd {
        &self.shards[shard].uffd
    }

    /// Locked while pages change sides, so that no message of the shard is read meanwhile.
    pub(crate) fn heard(&self, shard: usize) -> RwLockReadGuard<'_, Heard> {
        self.shards[shard].heard()
    }

    /// The parts of a region that belong to one shard each.
    fn stripes(
        &self,
        address: usize,
        layout: Layout,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let shards = self.shards.len();
        let step = if shards == 1 {
            layout.bytes
        } else {
            layout.stripe_bytes
        };
        (0..layout.bytes).step_by(step).map(move |offset| {
            let start = address + offset;
            let end = start + step.min(layout.bytes - offset);
            (layout.shard_of(offset, shards), start..end)
        })
    }

    fn register(&self, address: usize, layout: &Layout) -> io::Result<()> {
        let mode = if self.can_scatter(layout.page_bytes) && !layout.read_only {
            RegisterMode::MISSING | RegisterMode::WRITE_PROTECT
        } else {
            RegisterMode::MISSING
        };
        self.stripes(address, *layout)
            .try_for_each(|(shard, part)| self.uffd(shard).register(part.start, part.len(), mode))
    }

    /// Reserves the addresses of a region and claims them.
    fn reserve(&self, layout: &Layout) -> io::Result<usize> {
        let huge = layout.page_bytes == HUGE_PAGE_BYTES;
        let claim = |start| {
            regions::claim(
                &(start..start + layout.bytes),
                self.number,
                layout.read_only,
            )
        };
        if let Some(start) = layout.address {
            let end = start.checked_add(layout.bytes);
            if start == 0 || !start.is_multiple_of(layout.page_bytes) || end.is_none() {
                let text = format!(
                    "no region of {} bytes can begin at {start:#x}: need a multiple of its page size, {}",
                    layout.bytes, layout.page_bytes
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            if !claim(start) {
                let text = format!(
                    "the {} bytes at {start:#x} belong to another region, at least in part: unmap that first",
                    layout.bytes
                );
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            // SAFETY: whoever asks for an address vouches for it, and no region of ours is there.
            unsafe { sys::reserve_at(start, layout.bytes, huge) }
                .inspect_err(|_| regions::give_up(start))?;
            return Ok(start);
        }
        // What the program has unmapped out of a region may be handed out again. It is kept until other addresses have been found.
        let mut unfit = Vec::new();
        let found = loop {
            match sys::reserve(layout.bytes, layout.page_bytes, huge) {
                Ok(start) if claim(start) => break Ok(start),
                Ok(start) => unfit.push(start),
                Err(errno) => break Err(errno.into()),
            }
        };
        for start in unfit {
            // SAFETY: reserved above, and nobody has learned of it.
            unsafe { sys::release(start, layout.bytes) };
        }
        found
    }

    /// Waits until all that was unmapped before this call is known.
    fn hear_all(&self) {
        for (shard, it) in self.shards.iter().enumerate() {
            let mut since = None;
            while it.uffd.is_changing() && self.wait_for_change(shard, &mut since) {}
            // Whoever has read the message has also noted it.
            drop(it.heard());
        }
    }

    /// A mapping is changing: lets its message be read. `false`: that takes too long.
    pub(crate) fn wait_for_change(&self, shard: usize, since: &mut Option<Instant>) -> bool {
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        let it = &self.shards[shard];
        if it.reader.load(Ordering::Relaxed) == this_thread() {
            let mut early = it.early.lock();
            if self.read_messages(it, &mut it.hear(), &mut early).is_err() {
                return false;
            }
        }
        if waited < CHANGE_YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(CHANGE_NAP);
        }
        waited < CHANGE_PATIENCE
    }

    fn read_messages(
        &self,
        shard: &Shard,
        heard: &mut Heard,
        out: &mut Vec<Fault>,
    ) -> io::Result<()> {
        let Heard { buffer, gone, news } = heard;
        shard.uffd.messages(buffer, |message| match message {
            Message::Fault(fault) => out.push(fault),
            Message::Unmapped(range) => {
                for part in regions::of_space(self.number, &range) {
                    gone.insert(part.clone());
                    news.push(part);
                }
                shard.has_news.store(true, Ordering::Release);
                // Who slept there meets what is there now.
                let _ = shard.uffd.wake(range.start, range.len());
            }
        })
    }

    /// Goes on with a call that puts something into a region, as far as the program has not unmapped it, and while mappings change. `step` is told how
    /// far it is and how far it may go.
    fn fill_region(
        &self,
        shard: usize,
        address: usize,
        len: usize,
        step: impl Fn(&Uffd, usize, usize) -> Result<(), Stopped>,
    ) -> Result<(), Stopped> {
        let it = &self.shards[shard];
        let (mut done, mut since) = (0, None);
        loop {
            let heard = it.heard();
            let there = heard.gone.free_bytes(&(address + done..address + len));
            let stopped = match there {
                0 => Ok(()),
                there => step(&it.uffd, done, there),
            };
            drop(heard);
            let (done_bytes, why) = match stopped {
                Ok(()) if done + there == len => return Ok(()),
                Ok(()) => (there, Refusal::Missing),
                Err(Stopped { done_bytes, why }) => (done_bytes, why),
            };
            done += done_bytes;
            if why != Refusal::Contended || !self.wait_for_change(shard, &mut since) {
                return Err(Stopped {
                    done_bytes: done,
                    why,
                });
            }
        }
    }

    /// [`Self::move_pages`] into a region.
    ///
    /// # Safety
    /// As there.
    unsafe fn move_in(
        &self,
        shard: usize,
        dst: usize,
        src: usize,
        len: usize,
        allow_holes: bool,
    ) -> Result<(), Stopped> {
        self.fill_region(shard, dst, len, |uffd, done, len| {
            // SAFETY: the caller's promise.
            unsafe { self.move_pages(uffd, dst + done, src + done, len, allow_holes) }
        })
    }

    /// [`Uffd::copy`] into a region.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn copy_in(
        &self,
        shard: usize,
        dst: usize,
        src: usize,
        len: usize,
    ) -> Result<(), Stopped> {
        self.fill_region(shard, dst, len, |uffd, done, len| {
            // SAFETY: the caller's promise.
            unsafe { uffd.copy(dst + done, src + done, len, false) }
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
        shard: usize,
        address: usize,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        match self.transfer {
            Transfer::Move => self.install_by_move(shard, address, frame),
            Transfer::Copy => self.install_by_copy(shard, address, frame),
        }
    }

    fn install_page_by_page(
        &self,
        shard: usize,
        mut address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let page_bytes = frame.pool().page_bytes();
        while frame.len() > page_bytes {
            let rest = frame.split_off(page_bytes);
            if let Err(mut error) = self.install_run(shard, address, frame) {
                error.frame.join(rest).expect("they were one a moment ago");
                return Err(error);
            }
            (address, frame) = (address + page_bytes, rest);
        }
        self.install_run(shard, address, frame)
    }

    fn install_by_move(
        &self,
        shard: usize,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let (slot, len) = (frame.address(), frame.len());
        // SAFETY: the slots are the frame's, which is consumed; a region's absent pages are the pager's to fill.
        let Err(Stopped { done_bytes, why }) =
            (unsafe { self.move_in(shard, address, slot, len, false) })
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
                self.install_by_copy(shard, address, frame)
            }
            why => self.take_back(shard, address, moved_bytes, frame, why),
        }
    }

    /// Copying replaces poison markers, which moving takes for pages.
    fn install_by_copy(
        &self,
        shard: usize,
        address: usize,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let (slot, len) = (frame.address(), frame.len());
        // SAFETY: the frame's pages are readable; a region's absent pages are the pager's to fill.
        let Err(Stopped { done_bytes, why }) = (unsafe { self.copy_in(shard, address, slot, len) })
        else {
            // Dropping the frame gives its pages back, so that there is one of each as before.
            return Ok(());
        };
        let copied_bytes = done_bytes % frame.pool().page_bytes();
        let whole_bytes = done_bytes - copied_bytes;
        drop(frame.split_front(whole_bytes));
        if copied_bytes > 0 {
            let address = address + whole_bytes;
            let heard = self.shards[shard].heard();
            let there = heard.gone.free_bytes(&(address..address + copied_bytes));
            // SAFETY: copies that this call made, and that the program has not unmapped since; the frame has the bytes. Who touches them faults again.
            let _ = unsafe { sys::madvise(address, there, libc::MADV_DONTNEED) };
        }
        Err(InstallError {
            frame,
            kind: refused(why),
        })
    }

    /// Undoes the part of a frame's first page that moved in before the rest was refused: part of the page was mapped already.
    fn take_back(
        &self,
        shard: usize,
        address: usize,
        moved_bytes: usize,
        mut frame: KernelFrame,
        why: Refusal,
    ) -> Result<(), InstallError<KernelFrame>> {
        if moved_bytes > 0 {
            let (slot, uffd) = (frame.address(), &frame.pool().uffd);
            let heard = self.shards[shard].heard();
            let there = heard.gone.free_bytes(&(address..address + moved_bytes));
            // SAFETY: what moved in a moment ago moves back, except what the program has unmapped since. Its writes to it come along; what it dropped is
            // a hole.
            let back = unsafe { self.move_pages(uffd, slot, address, there, true) };
            let mut short = None;
            if let Err(stopped) = back {
                let done = stopped.done_bytes;
                // Pinned or gone within that moment: the pinned page's bytes are taken as when copying.
                let len = there - done;
                match self.carry_out(address + done, len, slot + done, frame.pool()) {
                    // The program has dropped them.
                    Ok(()) | Err(CarryError::Refused(DetachError::Absent)) => {}
                    Err(CarryError::Refused(why)) => short = Some(io::Error::other(why)),
                    Err(CarryError::Staged(staged, why)) => {
                        // SAFETY: the mapping that the bytes were carried to, which nobody else knows.
                        unsafe { sys::release(staged, len) };
                        short = Some(why.into());
                    }
                }
            }
            // Not called a page of the program's (`Exists`, `Gone`): the frame has zeros where bytes are missing, so the page's owner must not take it for whole.
            let filled = frame.fill_holes_with_zeros(0..moved_bytes);
            if let Some(error) = short.or(filled.err()) {
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
        heard: RwLockReadGuard<'_, Heard>,
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
                // The kernel moves between writable mappings only.
                Err(Stopped {
                    done_bytes: 0,
                    why: Refusal::Invalid,
                }) if done == 0 && regions::is_read_only(address) => {
                    return self.detach_by_copy(shard, address, frame, heard);
                }
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
        // From here on it is about frames, and about putting back, which has to wait while mappings change.
        drop(heard);
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
        let slot = frame.address();
        let mut done = 0;
        let mut result = Ok(());
        while done < moved_bytes {
            // SAFETY: what moved out a moment ago moves back; the frame is consumed.
            let back = unsafe {
                self.move_in(shard, address + done, slot + done, moved_bytes - done, true)
            };
            let Err(Stopped { done_bytes, why }) = back else {
                break;
            };
            done += done_bytes;
            match why {
                // The program has unmapped it meanwhile.
                Refusal::Missing | Refusal::Ended => return Err(DetachError::Absent),
                // Nobody may fill a page that is being taken out. If somebody did, its bytes are the newer ones.
                Refusal::Exists => {}
                // A lock or a pin on the frame's page, which only copying passes.
                why => {
                    // SAFETY: as above; the slot is ours to read, and a hole in it is an error (EFAULT), since the pool is in SIGBUS mode.
                    match unsafe {
                        self.copy_in(shard, address + done, slot + done, KERNEL_PAGE_BYTES)
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
        heard: RwLockReadGuard<'_, Heard>,
    ) -> Result<KernelFrame, DetachError> {
        let (slot, len, page_bytes) = (frame.address(), frame.len(), frame.pool().page_bytes());
        // Dropping what was not copied gives back the part that was.
        frame.set_occupied();
        let mut refused = None;
        for done in (0..len).step_by(page_bytes) {
            if let Err(why) = self.copy_out(address + done, slot + done, frame.pool()) {
                refused = Some((done, why));
                break;
            }
        }
        // Putting back has to wait while mappings change.
        drop(heard);
        let Some((done, why)) = refused else {
            return Ok(frame);
        };
        let error = match why {
            CarryError::Refused(error) => error,
            CarryError::Staged(staged, why) => {
                let address = address + done;
                // SAFETY: `staged` is the mapping that the page was carried to, nobody else knows it.
                let back = unsafe { self.copy_in(shard, address, staged, page_bytes) };
                // SAFETY: as above, and it is not used after this.
                unsafe { sys::release(staged, page_bytes) };
                if let Err(Stopped { done_bytes, .. }) = back {
                    // Never zeros, never a hang: what can not be put back is poisoned.
                    let _ = self.poison(shard, address + done_bytes, page_bytes - done_bytes);
                }
                DetachError::Os(why.into())
            }
        };
        frame.split_front(done).ok_or(error)
    }

    /// Takes one page out of a region and copies it to a slot of a pool.
    fn copy_out(&self, address: usize, slot: usize, pool: &Pool) -> Result<(), CarryError> {
        let len = pool.page_bytes();
        // The program may drop the page between this and the next step: then it is taken out as zeros, which it reads there, too.
        let is_there = self.pagemap.any_occupied(address, len);
        match is_there.map_err(DetachError::Os) {
            Ok(true) => self.carry_out(address, len, slot, pool),
            Ok(false) => Err(CarryError::Refused(DetachError::Absent)),
            Err(error) => Err(CarryError::Refused(error)),
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
        let staged = unsafe { sys::carry_away(address, len) }.map_err(|errno| {
            CarryError::Refused(match errno {
                Errno::EFAULT => DetachError::Absent,
                errno => DetachError::Os(errno.into()),
            })
        })?;
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
                let write = if regions::is_read_only(page) {
                    0
                } else {
                    libc::PROT_WRITE
                };
                // SAFETY: a page of a region, whose protection this restores.
                let _ = unsafe { sys::protect(page, page_bytes, libc::PROT_READ | write) };
            }
        }
    }
}

/// A page that was not carried out by copying.
enum CarryError {
    /// It is where it was.
    Refused(DetachError),
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
        let address = self.reserve(&layout).map_err(|error| match error.raw_os_error() {
            None => error,
            Some(_) => io::Error::new(
                error.kind(),
                format!(
                    "cannot reserve {} bytes of addresses: {error} (see `ulimit -v`, `sysctl vm.overcommit_memory`, which 2 makes \
                     count addresses as memory, and `sysctl vm.max_map_count`)",
                    layout.bytes
                ),
            ),
        })?;
        // What was unmapped before is not about this region.
        self.hear_all();
        regions::begin(address);
        let protect = || {
            // SAFETY: reserved above, and nobody has learned of it.
            unsafe { sys::protect(address, layout.bytes, libc::PROT_READ) }
        };
        let registered = self.register(address, &layout);
        let ready = registered.and_then(|()| match layout.read_only {
            true => Ok(protect()?),
            false => Ok(()),
        });
        if let Err(error) = ready {
            self.unmap(address, layout);
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
        let all = address..address + layout.bytes;
        self.hear_all();
        let mut gone = Ranges::default();
        for shard in &self.shards {
            let heard = shard.heard();
            for part in heard.gone.inside(&all) {
                gone.insert(part);
            }
        }
        for part in gone.outside(all.clone()) {
            // SAFETY: the caller gives the region up.
            let _ = unsafe { sys::protect(part.start, part.len(), libc::PROT_NONE) };
            // Unregistered first, or this thread would wait for its own message to be read; and inaccessible before that, so that threads which sleep on a fault
            // there, and wake now, meet SIGSEGV and not a page of zeros.
            for (shard, stripe) in self.stripes(address, layout) {
                let (start, end) = (stripe.start.max(part.start), stripe.end.min(part.end));
                if start < end {
                    let _ = self.uffd(shard).unregister(start, end - start);
                }
            }
            // SAFETY: as above.
            unsafe { sys::release(part.start, part.len()) };
        }
        if !self.features.contains(Features::POISON) {
            let mut fenced = self.fenced.lock();
            let inside: Vec<_> = fenced.range(all.clone()).copied().collect();
            for page in inside {
                fenced.remove(&page);
            }
        }
        for shard in &self.shards {
            shard.hear().gone.remove(&all);
        }
        regions::give_up(address);
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
        let (len, page_bytes) = (frame.len(), frame.pool().page_bytes());
        let installed = match self.install_run(shard, address, frame) {
            // Or the program has divided the mapping (by `mprotect`, say), and the kernel refuses what spans two.
            Err(InstallError {
                frame,
                kind: InstallErrorKind::Gone,
            }) if frame.len() > page_bytes => {
                self.install_page_by_page(shard, address + len - frame.len(), frame)
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
        let mut frame = self
            .pool(page_bytes)
            .and_then(|pool| pool.vacant(pages, 1))
            .map_err(DetachError::Os)?;
        let heard = self.shards[shard].heard();
        let there = heard.gone.free_bytes(&(address..address + frame.len()));
        // A page that the program has unmapped in part is gone: what is left of it is not what the store shall have.
        match there / page_bytes * page_bytes {
            0 => return Err(DetachError::Absent),
            there if there < frame.len() => drop(frame.split_off(there)),
            _ => {}
        }
        match self.transfer {
            Transfer::Move => self.detach_by_move(shard, address, frame, heard),
            Transfer::Copy => self.detach_by_copy(shard, address, frame, heard),
        }
    }

    fn can_scatter(&self, page_bytes: usize) -> bool {
        self.scatters && page_bytes == KERNEL_PAGE_BYTES
    }

    fn install_copy(&self, shard: usize, address: usize, frame: &KernelFrame) -> bool {
        self.copy_one_in(shard, address, frame)
    }

    fn detach_scattered(
        &self,
        shard: usize,
        addresses: &[usize],
        frames: &mut [KernelFrame],
    ) -> usize {
        self.copy_out_scattered(shard, addresses, frames)
    }

    fn unprotect(&self, shard: usize, address: usize, page_bytes: usize) {
        self.lift(shard, address..address + page_bytes);
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
            let mut at = 0;
            while at < page_bytes {
                let poisoned =
                    self.fill_region(shard, address + at, page_bytes - at, |uffd, done, len| {
                        // SAFETY: an absent page of a region, whose fate is the pager's to decide.
                        unsafe { uffd.poison(address + at + done, len) }
                    });
                let Err(Stopped { done_bytes, why }) = poisoned else {
                    break;
                };
                match why {
                    // Poisoned before, by a fill that failed; or the program has unmapped this part of the page.
                    Refusal::Exists | Refusal::Missing | Refusal::Ended => {
                        at += done_bytes + KERNEL_PAGE_BYTES;
                    }
                    why => {
                        self.wake(shard, address, page_bytes);
                        return Err(why.into());
                    }
                }
            }
            self.wake(shard, address, page_bytes);
            return Ok(());
        }
        // Before kernel 6.6: no access at all, which is SIGSEGV.
        self.fenced.lock().insert(address);
        let heard = self.shards[shard].heard();
        let parts = heard.gone.outside(address..address + page_bytes);
        let fenced = parts.iter().try_for_each(|part| {
            // SAFETY: an absent page of a region, whose fate is the pager's to decide.
            unsafe { sys::protect(part.start, part.len(), libc::PROT_NONE) }
        });
        drop(heard);
        if fenced.is_err() {
            self.fenced.lock().remove(&address);
        }
        self.wake(shard, address, page_bytes);
        fenced.map_err(io::Error::from)
    }

    fn faults(&self, shard: usize, out: &mut Vec<Fault>) -> io::Result<()> {
        let it = &self.shards[shard];
        it.reader.store(this_thread(), Ordering::Relaxed);
        out.append(&mut it.early.lock());
        let mut heard = match it.heard.try_write() {
            Ok(heard) => heard,
            // Pages change sides at this moment. That is worth waiting for only if there is something to read.
            Err(_) if !it.has_messages() => return Ok(()),
            Err(_) => it.hear(),
        };
        self.read_messages(it, &mut heard, out)
    }

    fn unmapped(&self, shard: usize, out: &mut Vec<Range<usize>>) {
        let it = &self.shards[shard];
        if it.has_news.swap(false, Ordering::Acquire) {
            out.append(&mut it.hear().news);
        }
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
        address: None,
        read_only: false,
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
