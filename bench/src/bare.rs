//! What the kernel does by itself: its own page fault, and a bare userfaultfd round trip with one handler thread.
//!
//! The rule it keeps: all of this program's `unsafe` that concerns mappings is here, and each measurement owns its mappings from beginning to
//! end. It knows nothing of farpage's pager; that is the point.

use std::{
    io,
    os::fd::AsFd,
    ptr::{self, NonNull},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};
use farpage_vm::{Fault, FaultBuffer, Features, RegisterMode, Uffd};
use hdrhistogram::Histogram;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use crate::report::new_histogram;

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
    let features = match how {
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
    // One system call per fault instead of two: the handler sleeps in `read` itself.
    fcntl(uffd.as_fd(), FcntlArg::F_SETFL(OFlag::empty()))
        .context("cannot make a userfaultfd blocking")?;

    let region = Mapping::new(count * page_bytes, page_bytes)?;
    let pool = Mapping::new(count * page_bytes, page_bytes)?;
    for page in 0..count {
        for offset in (0..page_bytes).step_by(KERNEL_PAGE_BYTES) {
            pool.write(page * page_bytes + offset, stamp(page));
        }
    }
    uffd.register(region.address(), region.bytes, RegisterMode::MISSING)
        .context("cannot register memory")?;

    let mut histogram = new_histogram();
    thread::scope(|scope| {
        let handler = scope.spawn(|| serve(&uffd, how, &region, &pool, page_bytes, count));
        for page in 0..count {
            let begin = Instant::now();
            let byte = region.read(page * page_bytes);
            histogram.saturating_record(begin.elapsed().as_nanos() as u64);
            assert_eq!(byte, stamp(page), "a page came back with other bytes");
        }
        handler.join().expect("the handler does not panic")
    })
    .context("cannot resolve a fault")?;
    Ok(Some(histogram))
}

/// The same with both threads on one CPU: no other core has to be woken, which on virtual machines can cost more than all else.
pub(crate) fn round_trips_on_one_cpu(
    how: How,
    page_bytes: usize,
    count: usize,
) -> Result<Option<Histogram<u64>>> {
    // In a thread of its own, since the restriction passes on to the threads that it starts and is never lifted.
    let pinned = thread::spawn(move || {
        let mut cpus = CpuSet::new();
        cpus.set(nix::sched::sched_getcpu()?)?;
        sched_setaffinity(Pid::from_raw(0), &cpus)?;
        round_trips(how, page_bytes, count)
    });
    pinned
        .join()
        .expect("the measurement does not panic")
        .context("cannot measure on one CPU")
}

/// Resolves `count` faults.
fn serve(
    uffd: &Uffd,
    how: How,
    region: &Mapping,
    pool: &Mapping,
    page_bytes: usize,
    count: usize,
) -> io::Result<()> {
    let mut buffer = FaultBuffer::default();
    let mut faults: Vec<Fault> = Vec::with_capacity(64);
    let mut served = 0;
    while served < count {
        uffd.faults(&mut buffer, &mut faults)?;
        for fault in faults.drain(..) {
            let offset = (fault.address - region.address()) & !(page_bytes - 1);
            let (to, from) = (region.address() + offset, pool.address() + offset);
            // SAFETY:
            // - both ranges are whole pages of mappings that outlive this call
            // - nobody reads the pool again, and the region's owner waits for exactly these bytes
            let resolved = unsafe {
                match how {
                    How::Copy => uffd.copy(to, from, page_bytes, false),
                    How::Move => uffd.move_pages(to, from, page_bytes, false),
                }
            };
            resolved.map_err(io::Error::other)?;
            served += 1;
        }
    }
    Ok(())
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
