//! What the kernel does by itself: its own page fault, and a bare userfaultfd round trip with one handler thread, or with none.
//!
//! The rule it keeps: all of this program's `unsafe` that concerns mappings is here, and each measurement owns its mappings from beginning to
//! end. It knows nothing of farpage's pager; that is the point.

use std::{
    io,
    os::fd::AsFd,
    ptr::{self, NonNull},
    slice,
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};
use farpage_vm::{
    Fault, FaultBuffer, Features, RegisterMode, Stopped, Uffd,
    sigbus::{FaultHandler, Registration, Served},
};
use hdrhistogram::Histogram;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::{cpus, report::new_histogram};

/// The kernel's own page; farpage requires this size.
const KERNEL_PAGE_BYTES: usize = 4096;
/// Where larger pages begin to be possible.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// How a handler resolves a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_MOVE` from a pool of pages that are there.
    Move,
}

/// Nanoseconds of first touches of fresh anonymous memory, one 4 KiB page each.
pub(crate) fn kernel_faults(count: usize) -> Result<Histogram<u64>> {
    let memory = Mapping::new(count * KERNEL_PAGE_BYTES, KERNEL_PAGE_BYTES)?;
    let mut histogram = new_histogram();
    for page in 0..count {
        let begin = Instant::now();
        memory.write(page * KERNEL_PAGE_BYTES, 1);
        histogram.saturating_record(begin.elapsed().as_nanos() as u64);
    }
    Ok(histogram)
}

/// Nanoseconds of `count` faults, one at a time, each served by one handler thread that sleeps in `read`. `None` when the kernel
/// cannot do it that way.
pub(crate) fn round_trips(
    how: How,
    page_bytes: usize,
    count: usize,
) -> Result<Option<Histogram<u64>>> {
    served_by(how, page_bytes, count, None)
}

/// On which CPUs the thread that faults and the handler are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cpus {
    /// Both on one: no other CPU has to be woken.
    One,
    /// Each on one of its own, which goes idle while the other works. To wake it can cost more than all else on virtual machines.
    Two,
}

/// The same with the threads kept in their places, where otherwise the kernel chooses and may change its mind. `None` also when there is only one CPU
/// for two.
pub(crate) fn round_trips_on(
    cpus: Cpus,
    how: How,
    page_bytes: usize,
    count: usize,
) -> Result<Option<Histogram<u64>>> {
    // In a thread of its own, since the restriction is never lifted.
    let kept = thread::spawn(move || {
        let (here, another) = cpus::two()?;
        let handler = match cpus {
            Cpus::One => Some(here),
            Cpus::Two => another,
        };
        if handler.is_none() {
            return Ok(None);
        }
        cpus::stay_on(here)?;
        served_by(how, page_bytes, count, handler)
    });
    kept.join()
        .expect("the measurement does not panic")
        .with_context(|| format!("cannot measure with threads kept to CPUs ({cpus:?})"))
}

fn served_by(
    how: How,
    page_bytes: usize,
    count: usize,
    cpu: Option<usize>,
) -> Result<Option<Histogram<u64>>> {
    let Some(bare) = Bare::new(how, Features::MISSING, page_bytes, count)? else {
        return Ok(None);
    };
    // One system call per fault instead of two: the handler sleeps in `read` itself.
    fcntl(bare.uffd.as_fd(), FcntlArg::F_SETFL(OFlag::empty()))
        .context("cannot make a userfaultfd blocking")?;
    let bare = &bare;
    thread::scope(|scope| {
        let (ready, is_ready) = mpsc::channel();
        let handler = scope.spawn(move || -> Result<()> {
            cpu.map_or(Ok(()), cpus::stay_on)?;
            ready.send(()).expect("the thread below waits");
            bare.serve()
        });
        // Without a handler nobody would end the first fault.
        let histogram = is_ready.recv().map(|()| bare.touch());
        handler.join().expect("the handler does not panic")?;
        Ok(Some(histogram.expect("a handler that failed has said so")))
    })
}

/// Nanoseconds of `count` faults, one at a time, each of which raises SIGBUS in the thread itself, whose handler resolves it: no hand-over at all. `None`
/// when the kernel cannot do it that way.
pub(crate) fn in_thread_round_trips(
    how: How,
    page_bytes: usize,
    count: usize,
) -> Result<Option<Histogram<u64>>> {
    let Some(bare) = Bare::new(how, Features::SIGBUS, page_bytes, count)? else {
        return Ok(None);
    };
    let bare = Arc::new(bare);
    let addresses = bare.region.address()..bare.region.address() + bare.region.bytes;
    let _registered = Registration::new(addresses, bare.clone()).context("cannot handle SIGBUS")?;
    Ok(Some(bare.touch()))
}

/// Pages that are absent, and others to resolve their faults with.
struct Bare {
    uffd: Uffd,
    how: How,
    region: Mapping,
    pool: Mapping,
    page_bytes: usize,
    count: usize,
}

impl Bare {
    fn new(how: How, reported: Features, page_bytes: usize, count: usize) -> Result<Option<Self>> {
        let features = reported
            | match how {
                How::Copy => Features::MISSING,
                How::Move => Features::MOVE,
            };
        if !Uffd::supported(false)
            .context("cannot measure bare userfaultfd")?
            .contains(features)
        {
            return Ok(None);
        }
        let uffd = Uffd::open(features, false).context("cannot measure bare userfaultfd")?;
        let region = Mapping::new(count * page_bytes, page_bytes)?;
        let pool = Mapping::new(count * page_bytes, page_bytes)?;
        for page in 0..count {
            for offset in (0..page_bytes).step_by(KERNEL_PAGE_BYTES) {
                pool.write(page * page_bytes + offset, stamp(page));
            }
        }
        uffd.register(region.address(), region.bytes, RegisterMode::MISSING)
            .context("cannot register memory")?;
        Ok(Some(Self {
            uffd,
            how,
            region,
            pool,
            page_bytes,
            count,
        }))
    }

    /// Touches one page after the other.
    fn touch(&self) -> Histogram<u64> {
        let mut histogram = new_histogram();
        for page in 0..self.count {
            let begin = Instant::now();
            let byte = self.region.read(page * self.page_bytes);
            histogram.saturating_record(begin.elapsed().as_nanos() as u64);
            assert_eq!(byte, stamp(page), "a page came back with other bytes");
        }
        histogram
    }

    /// Resolves the faults of all pages.
    fn serve(&self) -> Result<()> {
        let mut buffer = FaultBuffer::default();
        let mut faults: Vec<Fault> = Vec::with_capacity(64);
        let mut served = 0;
        while served < self.count {
            self.uffd.faults(&mut buffer, &mut faults)?;
            for fault in faults.drain(..) {
                self.resolve(fault).context("cannot resolve a fault")?;
                served += 1;
            }
        }
        Ok(())
    }

    fn resolve(&self, fault: Fault) -> Result<(), Stopped> {
        let offset = (fault.address - self.region.address()) & !(self.page_bytes - 1);
        let (to, from) = (self.region.address() + offset, self.pool.address() + offset);
        // SAFETY:
        // - both ranges are whole pages of mappings that outlive this call
        // - nobody reads the pool again, and the region's owner waits for exactly these bytes
        unsafe {
            match self.how {
                How::Copy => self.uffd.copy(to, from, self.page_bytes, false),
                How::Move => self.uffd.move_pages(to, from, self.page_bytes, false),
            }
        }
    }
}

// SAFETY: one system call, which touches the pool alone: it allocates nothing and takes no lock.
unsafe impl FaultHandler for Bare {
    fn fault(&self, fault: Fault) -> Served {
        match self.resolve(fault) {
            Ok(()) => Served::Retry,
            Err(_) => Served::NotMine,
        }
    }
}

/// The elements of a run of pages that a space has installed at `address`.
///
/// # Safety
/// All of it is mapped, whole and aligned, and nobody else touches it as long as the slice is in use.
pub(crate) unsafe fn installed<'a>(address: usize, bytes: usize) -> &'a mut [f64] {
    let elements = bytes / size_of::<f64>();
    // SAFETY: the caller promises all of it; any bytes are numbers.
    unsafe { slice::from_raw_parts_mut(address as *mut f64, elements) }
}

fn stamp(page: usize) -> u8 {
    page as u8 | 1
}

/// Private anonymous memory, aligned to its page size, unmapped on drop.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// What was mapped, before alignment.
    whole: NonNull<libc::c_void>,
    whole_bytes: usize,
}

// SAFETY: plain memory that is accessed by volatile reads and writes of single bytes; the threads above take turns.
unsafe impl Sync for Mapping {}
// SAFETY: nothing about it belongs to a thread.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(bytes: usize, align: usize) -> Result<Self> {
        let whole_bytes = bytes + align;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                whole_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("cannot map memory");
        }
        let whole = NonNull::new(at).expect("mmap without MAP_FIXED never returns address zero");
        let gap = whole.as_ptr().cast::<u8>().align_offset(align);
        // SAFETY: `align` bytes more than asked for were mapped, and the gap is smaller.
        let start = unsafe { whole.cast::<u8>().add(gap) };
        let mapping = Self {
            start,
            bytes,
            whole,
            whole_bytes,
        };
        // Whether pages of 2 MiB are huge is part of the measurement; smaller ones must not be, or one fault would serve many.
        let advice = if align >= HUGE_PAGE_BYTES {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: advice on the mapping made above. A kernel without huge pages says EINVAL, which is as good.
        unsafe { libc::madvise(whole.as_ptr(), whole_bytes, advice) };
        Ok(mapping)
    }

    fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(
            offset < self.bytes,
            "offset {offset} lies outside of the mapping"
        );
        // SAFETY: within the mapping, as checked above.
        unsafe { self.start.as_ptr().add(offset) }
    }

    fn read(&self, offset: usize) -> u8 {
        // SAFETY: `at` gives an address inside the mapping, which is readable; absent pages are filled by the handler.
        unsafe { self.at(offset).read_volatile() }
    }

    fn write(&self, offset: usize, value: u8) {
        // SAFETY: `at` gives an address inside the mapping, which is writable and of which no reference exists.
        unsafe { self.at(offset).write_volatile(value) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nothing refers to it any more.
        unsafe { libc::munmap(self.whole.as_ptr(), self.whole_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_aligned_to_their_page() {
        for page_bytes in [4096, 65536, 2 << 20] {
            let mapping = Mapping::new(3 * page_bytes, page_bytes).unwrap();
            assert_eq!(mapping.address() % page_bytes, 0);
            mapping.write(3 * page_bytes - 1, 7);
            assert_eq!(mapping.read(3 * page_bytes - 1), 7);
        }
    }
}
