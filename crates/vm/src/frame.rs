//! The frame pools: a reserved address range per page size. Pages lie in its slots while they are
//! not mapped in a region.
//!
//! The rule it keeps: a slot is either vacant (absent, unowned) or owned by one [`KernelFrame`],
//! and only a frame whose pages are all there is handed out.
//!
//! A frame owns slots that lie next to each other: cutting and joining frames is arithmetic. The
//! range is registered with a userfaultfd of the pool's own, in SIGBUS mode. So it can be the
//! destination of `UFFDIO_MOVE`, and a mistake of ours that touches an absent slot is a signal at
//! that spot, not a thread that sleeps for ever.
//!
//! A frame's page is made in one of two ways (measured on 2 cores, kernel 6.18). Up to 1 MiB: by
//! `UFFDIO_COPY` of zeros onto the registered slot, which takes the mmap lock for reading only and
//! costs about what clearing the page costs. At 2 MiB: by taking the slot out of the registration,
//! `MADV_POPULATE_WRITE`, and registering it again, since `UFFDIO_COPY` never makes a huge page.
//!
//! Memory that a device has registered (RDMA) can not lie here: pinned pages do not move.

use std::{
    fmt, io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use nix::errno::Errno;

use crate::{
    space::{Batch, Frame, RUN_PAGES_MAX},
    sys::{self, Backing, KERNEL_PAGE_BYTES, Refusal, Stopped},
    uffd::{Features, RegisterMode, Uffd, UserfaultfdError},
    vacancies::{Vacancies, WORD_SLOTS},
};

/// The size of a huge page, and the largest page.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeros that absent kernel pages of a frame are filled from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

const _: () = assert!(RUN_PAGES_MAX == WORD_SLOTS as usize);

/// Number of slots per page that frames may hold: with half of them vacant, runs are found.
const SLOTS_PER_FRAME: u32 = 2;

/// Number of page sizes: 4 KiB to 2 MiB.
const PAGE_SIZES: usize = 10;

/// A pool for each page size, made when it is first asked for.
#[derive(Debug)]
pub(crate) struct Pools {
    pools: [OnceLock<Arc<FramePool>>; PAGE_SIZES],
    /// Held while a pool is made, so that only one is.
    making: farpage_signals::Mutex<()>,
    frame_bytes_max: usize,
    /// Userfaultfd of all pools: opened at once, since the process may give up the right to.
    uffd: Arc<Uffd>,
}

impl Pools {
    /// Makes pools of `frame_bytes_max` for each page size, whose userfaultfd agrees on `features`.
    ///
    /// # Errors
    /// See [`UserfaultfdError`].
    pub(crate) fn new(
        frame_bytes_max: usize,
        user_mode_only: bool,
        features: Features,
    ) -> Result<Self, UserfaultfdError> {
        Ok(Self {
            pools: Default::default(),
            making: farpage_signals::Mutex::default(),
            frame_bytes_max,
            uffd: Arc::new(Uffd::open(Features::SIGBUS | features, user_mode_only)?),
        })
    }

    /// Returns the pool for pages of `page_bytes`.
    pub(crate) fn of(&self, page_bytes: usize) -> io::Result<&Arc<FramePool>> {
        check_page_bytes(page_bytes)?;
        let cell = &self.pools[(page_bytes / KERNEL_PAGE_BYTES).ilog2() as usize];
        if let Some(pool) = cell.get() {
            return Ok(pool);
        }
        let _making = self.making.lock();
        if let Some(pool) = cell.get() {
            return Ok(pool);
        }
        let pages_max =
            u32::try_from(self.frame_bytes_max.div_ceil(page_bytes).max(1)).map_err(|_| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "frames of 2^32 pages or more: lower `frame_bytes_max`",
                )
            })?;
        let pool = FramePool::new(page_bytes, pages_max, Arc::clone(&self.uffd))?;
        Ok(cell.get_or_init(|| pool))
    }
}

/// Returns what backs pages of `page_bytes` under paging.
pub(crate) fn backing(page_bytes: usize) -> Backing {
    match page_bytes {
        HUGE_PAGE_BYTES => Backing::Huge,
        _ => Backing::Small,
    }
}

/// Refuses a page size that is none of the [`PAGE_SIZES`] powers of two.
pub(crate) fn check_page_bytes(page_bytes: usize) -> io::Result<()> {
    if page_bytes.is_power_of_two() && (KERNEL_PAGE_BYTES..=HUGE_PAGE_BYTES).contains(&page_bytes) {
        return Ok(());
    }
    let text = format!("a page of {page_bytes} bytes: must be a power of two from 4096 to 2097152");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Frames of one page size.
pub(crate) struct FramePool {
    pub(crate) uffd: Arc<Uffd>,
    base: usize,
    page_bytes: usize,
    /// Upper bound of the pages of all frames.
    pages_max: u32,
    /// Lock of the standard library: it never allocates.
    /// Frames come and go inside a signal handler where faults are served in-thread.
    vacancies: Mutex<Vacancies>,
}

impl FramePool {
    /// Reserves addresses for frames of `pages_max` pages in all, with room to spare; this takes no
    /// memory.
    pub(crate) fn new(page_bytes: usize, pages_max: u32, uffd: Arc<Uffd>) -> io::Result<Arc<Self>> {
        let slots = pages_max.checked_mul(SLOTS_PER_FRAME).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "frames of 2^31 pages or more: lower `frame_bytes_max`",
            )
        })?;
        let bytes = page_bytes * slots as usize;
        let base = sys::reserve(bytes, page_bytes, backing(page_bytes))?;
        let pool = Self {
            uffd,
            base,
            page_bytes,
            pages_max,
            vacancies: Mutex::new(Vacancies::new(slots, pages_max)),
        };
        pool.uffd.register(base, bytes, RegisterMode::MISSING)?;
        Ok(Arc::new(pool))
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn vacancies(&self) -> MutexGuard<'_, Vacancies> {
        self.vacancies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes vacant slots next to each other: `pages` or, where these are not to be had, as many as
    /// there are, but not fewer than `at_least`. Their frame must not be handed out before its
    /// pages are there.
    pub(crate) fn vacant(
        self: &Arc<Self>,
        pages: usize,
        at_least: usize,
    ) -> io::Result<KernelFrame> {
        let narrow = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX);
        let taken = self.vacancies().take(narrow(pages), narrow(at_least));
        let Some((slot, slots)) = taken else {
            let text = format!(
                "no room for a run of {at_least} pages of {} bytes among {} in frames (runs are of at most {RUN_PAGES_MAX}): raise the \
                 space's `frame_bytes_max`",
                self.page_bytes, self.pages_max
            );
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        };
        Ok(KernelFrame {
            pool: Arc::clone(self),
            slot,
            slots,
            occupied: false,
        })
    }

    /// Makes a frame with new zeroed pages.
    pub(crate) fn new_frame(self: &Arc<Self>, pages: usize) -> io::Result<KernelFrame> {
        let mut frame = self.vacant(pages, pages)?;
        // From here on a frame that is dropped gives back the pages that it has got.
        frame.occupied = true;
        let (address, len) = (frame.address(), frame.len());
        if self.page_bytes < HUGE_PAGE_BYTES || !self.populate_huge(address, len)? {
            frame.fill_holes_with_zeros(0..len)?;
        }
        Ok(frame)
    }

    /// Makes huge pages where the kernel has them to give, otherwise small ones. `false`: this
    /// kernel cannot populate (before 5.14).
    fn populate_huge(&self, address: usize, len: usize) -> io::Result<bool> {
        self.uffd.unregister(address, len)?;
        // SAFETY: the slots of a frame that this call owns.
        let populated = unsafe { sys::madvise(address, len, libc::MADV_POPULATE_WRITE) };
        self.uffd.register(address, len, RegisterMode::MISSING)?;
        match populated {
            Ok(()) => Ok(true),
            Err(Errno::EINVAL) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for FramePool {
    fn drop(&mut self) {
        let slots = (self.pages_max * SLOTS_PER_FRAME) as usize;
        // SAFETY: the pool's own range; every frame holds the pool, hence none is left.
        unsafe { sys::release(self.base, slots * self.page_bytes) };
    }
}

impl fmt::Debug for FramePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "FramePool({} bytes at {:#x})",
            self.page_bytes, self.base
        )
    }
}

/// The bytes of a run of pages while they are not mapped in a region: owned, present, never
/// faulting. Dropping a frame gives its physical memory back.
#[derive(Debug)]
pub struct KernelFrame {
    pool: Arc<FramePool>,
    /// The frame's first slot.
    slot: u32,
    /// Number of slots; 0 only in a frame that was joined to another.
    slots: u32,
    /// True if pages lie in the slots, at least in part. False only inside this crate: before the
    /// pages have come, and after they have moved away.
    occupied: bool,
}

impl KernelFrame {
    /// Returns the address of the bytes, for as long as the frame lives.
    pub(crate) fn address(&self) -> usize {
        self.pool.base + self.slot as usize * self.pool.page_bytes
    }

    /// Returns the bytes of all pages.
    pub(crate) fn len(&self) -> usize {
        self.slots as usize * self.pool.page_bytes
    }

    pub(crate) fn pool(&self) -> &Arc<FramePool> {
        &self.pool
    }

    /// Notes that pages are in the slots now. A frame with only a part of them is dropped, or its
    /// holes are filled.
    pub(crate) fn set_occupied(&mut self) {
        self.occupied = true;
    }

    /// Gives the slots back after their pages moved away.
    pub(crate) fn vacated(mut self) {
        self.occupied = false;
    }

    /// Keeps the bytes behind the first `bytes`, and returns those before, if there are any.
    pub(crate) fn split_front(&mut self, bytes: usize) -> Option<Self> {
        (bytes > 0).then(|| {
            let rest = self.split_off(bytes);
            std::mem::replace(self, rest)
        })
    }

    /// Maps zeros at each absent kernel page in a range of the frame's bytes.
    pub(crate) fn fill_holes_with_zeros(&mut self, range: Range<usize>) -> io::Result<()> {
        let end = self.address() + range.end;
        let mut at = self.address() + range.start;
        while at < end {
            let len = ZEROS.len().min(end - at);
            // SAFETY: slots that this frame owns; ZEROS is readable.
            match unsafe { self.pool.uffd.copy(at, ZEROS.as_ptr() as usize, len) } {
                Ok(()) => at += len,
                Err(Stopped {
                    done_bytes,
                    why: Refusal::Exists,
                }) => at += done_bytes + KERNEL_PAGE_BYTES,
                Err(stopped) => return Err(stopped.why.into()),
            }
        }
        Ok(())
    }
}

/// Gives the memory of `frames` back by one call, so that the processors that run the program are
/// interrupted once.
pub(crate) fn drop_together(frames: Batch<KernelFrame>) {
    let ranges = || {
        let of = |frame: &KernelFrame| frame.address()..frame.address() + frame.len();
        frames.iter().map(of)
    };
    debug_assert!(frames.iter().all(|frame| frame.occupied));
    // SAFETY: the slots of frames that end here.
    let dropped = unsafe { sys::drop_each(ranges(), libc::MADV_DONTNEED) };
    // Before kernel 6.14 none is dropped by the call: frames that are left drop themselves.
    let dropped = dropped.unwrap_or(0);
    for (at, frame) in frames.into_iter().enumerate() {
        if at < dropped {
            frame.vacated();
        }
    }
}

impl Frame for KernelFrame {
    fn split_off(&mut self, bytes: usize) -> Self {
        let page_bytes = self.pool.page_bytes;
        assert!(
            bytes > 0 && bytes < self.len() && bytes.is_multiple_of(page_bytes),
            "{} bytes in pages of {page_bytes} can not be split after {bytes}",
            self.len()
        );
        let kept = (bytes / page_bytes) as u32;
        let rest = Self {
            pool: Arc::clone(&self.pool),
            slot: self.slot + kept,
            slots: self.slots - kept,
            occupied: self.occupied,
        };
        self.slots = kept;
        rest
    }

    fn join(&mut self, mut next: Self) -> Result<(), Self> {
        let behind = Arc::ptr_eq(&self.pool, &next.pool) && self.slot + self.slots == next.slot;
        if !behind {
            return Err(next);
        }
        self.slots += std::mem::take(&mut next.slots);
        Ok(())
    }
}

impl AsRef<[u8]> for KernelFrame {
    fn as_ref(&self) -> &[u8] {
        debug_assert!(self.occupied);
        // SAFETY:
        // - The slots are mapped while the pool lives, and the frame holds the pool.
        // - Their pages are present: this type's rule.
        // - Nobody else knows them.
        unsafe { std::slice::from_raw_parts(self.address() as *const u8, self.len()) }
    }
}

impl AsMut<[u8]> for KernelFrame {
    fn as_mut(&mut self) -> &mut [u8] {
        debug_assert!(self.occupied);
        // SAFETY: as in `as_ref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut u8, self.len()) }
    }
}

impl Drop for KernelFrame {
    fn drop(&mut self) {
        if self.slots == 0 {
            return;
        }
        if self.occupied {
            // SAFETY: the slots are this frame's.
            unsafe { sys::madvise(self.address(), self.len(), libc::MADV_DONTNEED) }
                .expect("a mapped, aligned range of ours can always be dropped");
        }
        self.pool.vacancies().give_back(self.slot, self.slots);
    }
}
