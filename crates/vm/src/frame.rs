//! The frame pool: a reserved address range per page size, in whose slots pages lie while they are not mapped in a region.
//!
//! The rule it keeps: a slot is either vacant (absent, in the list, nobody's) or owned by one [`KernelFrame`], and only a frame whose page is
//! there is handed out. The range is registered with a userfaultfd of the pool's own in SIGBUS mode: so it can be the
//! destination of `UFFDIO_MOVE`, and a mistake of ours that touches an absent slot is a signal at that spot and not a thread that sleeps for ever.
//!
//! A frame's page is made in one of two ways (measured on 2 cores, kernel 6.18): up to 1 MiB by `UFFDIO_COPY` of zeros onto the
//! registered slot, which takes the mmap lock for reading only and costs about what the page's clearing costs; at 2 MiB by taking the slot out of the
//! registration, `MADV_POPULATE_WRITE`, and registering it again, since `UFFDIO_COPY` never makes a huge page.
//!
//! Memory that a device has registered (RDMA) can not lie here: pinned pages do not move.

use std::{fmt, io, sync::Arc};

use nix::errno::Errno;
use parking_lot::Mutex;

use crate::{
    sys::{self, KERNEL_PAGE_BYTES, Refusal, Stopped},
    uffd::{Features, RegisterMode, Uffd},
};

/// The size of a huge page, and the largest page.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What absent kernel pages of a frame are filled from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The frames of one page size.
pub(crate) struct Pool {
    pub(crate) uffd: Uffd,
    base: usize,
    page_bytes: usize,
    vacancies: Mutex<Vacancies>,
}

struct Vacancies {
    /// Slots that were used and are vacant again. Room for all is reserved, so that giving back never allocates.
    used: Vec<u32>,
    /// Slots from here on were never used.
    fresh: u32,
    slots: u32,
}

impl Pool {
    /// Reserves addresses for `slots` frames; this takes no memory.
    pub(crate) fn new(
        page_bytes: usize,
        slots: u32,
        user_mode_only: bool,
        features: Features,
    ) -> io::Result<Arc<Self>> {
        let uffd =
            Uffd::open(Features::SIGBUS | features, user_mode_only).map_err(io::Error::other)?;
        let bytes = page_bytes * slots as usize;
        let base = sys::reserve(bytes, page_bytes, page_bytes == HUGE_PAGE_BYTES)?;
        let pool = Self {
            uffd,
            base,
            page_bytes,
            vacancies: Mutex::new(Vacancies {
                used: Vec::with_capacity(slots as usize),
                fresh: 0,
                slots,
            }),
        };
        pool.uffd.register(base, bytes, RegisterMode::MISSING)?;
        Ok(Arc::new(pool))
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// A vacant slot: its frame must not be handed out before its page is there.
    pub(crate) fn vacant(self: &Arc<Self>) -> io::Result<KernelFrame> {
        let mut vacancies = self.vacancies.lock();
        let slot = match vacancies.used.pop() {
            Some(slot) => slot,
            None if vacancies.fresh < vacancies.slots => {
                vacancies.fresh += 1;
                vacancies.fresh - 1
            }
            None => {
                let text = format!(
                    "all {} frames of {} bytes are in use: raise the space's `frame_bytes_max`",
                    vacancies.slots, self.page_bytes
                );
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
            }
        };
        drop(vacancies);
        Ok(KernelFrame {
            pool: Arc::clone(self),
            slot,
            occupied: false,
        })
    }

    /// A frame with a new zeroed page.
    pub(crate) fn new_frame(self: &Arc<Self>) -> io::Result<KernelFrame> {
        let mut frame = self.vacant()?;
        // From here on a frame that is dropped gives back what it has got of its page.
        frame.occupied = true;
        if self.page_bytes < HUGE_PAGE_BYTES || !self.populate_huge(frame.address())? {
            frame.fill_holes_with_zeros()?;
        }
        Ok(frame)
    }

    /// Makes a huge page where the kernel has one to give, otherwise small ones. False: this kernel can not populate (before 5.14).
    fn populate_huge(&self, address: usize) -> io::Result<bool> {
        self.uffd.unregister(address, self.page_bytes)?;
        // SAFETY: the slot of a frame that this call owns.
        let populated =
            unsafe { sys::madvise(address, self.page_bytes, libc::MADV_POPULATE_WRITE) };
        self.uffd
            .register(address, self.page_bytes, RegisterMode::MISSING)?;
        match populated {
            Ok(()) => Ok(true),
            Err(Errno::EINVAL) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let slots = self.vacancies.get_mut().slots as usize;
        // SAFETY: the pool's own range; every frame holds the pool, hence none is left.
        unsafe { sys::release(self.base, slots * self.page_bytes) };
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} bytes at {:#x})", self.page_bytes, self.base)
    }
}

/// One page's bytes while the page is not mapped in a region: owned, present, never faulting. Dropping it gives its physical memory back.
#[derive(Debug)]
pub struct KernelFrame {
    pool: Arc<Pool>,
    slot: u32,
    /// Whether (part of) a page lies in the slot. False only inside this crate: on the way in, and after the page has moved away.
    occupied: bool,
}

impl KernelFrame {
    /// Where its bytes are, for as long as the frame lives.
    pub(crate) fn address(&self) -> usize {
        self.pool.base + self.slot as usize * self.pool.page_bytes
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The page is in the slot now (or part of it, in which case the frame is dropped or its holes are filled).
    pub(crate) fn set_occupied(&mut self) {
        self.occupied = true;
    }

    /// Gives the slot back after its page moved away.
    pub(crate) fn vacated(mut self) {
        self.occupied = false;
    }

    /// Maps zeros wherever a kernel page is absent.
    pub(crate) fn fill_holes_with_zeros(&mut self) -> io::Result<()> {
        let end = self.address() + self.pool.page_bytes;
        let mut at = self.address();
        while at < end {
            let len = ZEROS.len().min(end - at);
            // SAFETY: a slot that this frame owns; ZEROS is readable.
            match unsafe { self.pool.uffd.copy(at, ZEROS.as_ptr() as usize, len, false) } {
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

impl AsRef<[u8]> for KernelFrame {
    fn as_ref(&self) -> &[u8] {
        debug_assert!(self.occupied);
        // SAFETY: the slot is mapped while the pool lives, its page is present (this type's rule) and nobody else knows it.
        unsafe { std::slice::from_raw_parts(self.address() as *const u8, self.pool.page_bytes) }
    }
}

impl AsMut<[u8]> for KernelFrame {
    fn as_mut(&mut self) -> &mut [u8] {
        debug_assert!(self.occupied);
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut u8, self.pool.page_bytes) }
    }
}

impl Drop for KernelFrame {
    fn drop(&mut self) {
        if self.occupied {
            // SAFETY: the slot is this frame's.
            unsafe { sys::madvise(self.address(), self.pool.page_bytes, libc::MADV_DONTNEED) }
                .expect("a mapped, aligned range of ours can always be dropped");
        }
        self.pool.vacancies.lock().used.push(self.slot);
    }
}
