//! The kernel's own part: its page fault, and a bare userfaultfd round trip with one handler
//! thread, or with none.
//!
//! The rule it keeps: all of this program's `unsafe` that concerns mappings is here, and each
//! measurement owns its mappings from beginning to end. This module knows nothing of farpage's
//! pager, on purpose.

use std::{
    os::fd::AsFd,
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};
use farpage_vm::{
    FaultBuffer, Features, PageFault, RegisterMode, Stopped, Uffd,
    sigbus::{FaultHandler, FaultRegistration, Served},
};
use hdrhistogram::Histogram;
use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use twox_hash::XxHash3_128;

use crate::{
    cpus,
    pick::{Shuffle, mix},
    report::new_histogram,
};

/// The kernel's own page; farpage requires this size.
const KERNEL_PAGE_BYTES: usize = 4096;
/// Alignment from which the kernel may use huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Upper bound of the bytes over which faults on cold pages are spread: as many as `targets` has.
const COLD_BYTES_MAX: usize = 256 << 20;
/// Number of cold pages for each fault that is measured.
const COLD_PAGES_PER_FAULT: usize = 16;
/// Share of the cold pages that are resident at first if pages leave: one in 4. Pages that leave
/// have then been in no cache for a while.
const RESIDENT_SHARE: usize = 4;

/// Method by which a handler resolves a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_MOVE` from a pool of mapped pages.
    Move,
    /// `UFFDIO_MOVE` after the page's bytes were copied from memory that no cache has, and their
    /// hash was verified: the least that paging over shared memory has to do.
    Read,
    /// [`How::Read`], and a page that came in long ago is moved out, hashed and found unchanged.
    Replace,
}

impl How {
    fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Replace)
    }
}

/// Times first touches of fresh anonymous memory, one 4 KiB page each, in nanoseconds.
pub fn kernel_faults(count: usize) -> Result<Histogram<u64>> {
    let memory = Mapping::new(count * KERNEL_PAGE_BYTES, KERNEL_PAGE_BYTES)?;
    let mut histogram = new_histogram();
    for page in 0..count {
        let begin = Instant::now();
        memory.write(page * KERNEL_PAGE_BYTES, 1);
        histogram.saturating_record(begin.elapsed().as_nanos() as u64);
    }
    Ok(histogram)
}

/// Thread that serves a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// A handler thread that sleeps in `read`.
    ByHandler,
    /// A handler thread on the CPU of the faulting thread: no other CPU has to be woken.
    OnOneCpu,
    /// A handler thread on a CPU of its own, idle while the faulting thread works. Waking an idle
    /// CPU can cost more than all else on virtual machines.
    OnTwoCpus,
    /// The faulting thread, by the handler of the SIGBUS that the kernel raises: no hand-over.
    InThread,
}

/// Times `count` faults, one at a time, in nanoseconds. Returns `None` if the kernel lacks a
/// feature for that, or if there is only one CPU for [`Handling::OnTwoCpus`].
pub fn round_trips(
    handling: Handling,
    how: How,
    page_bytes: usize,
    count: usize,
) -> Result<Option<Histogram<u64>>> {
    match handling {
        Handling::ByHandler => return served_by(how, page_bytes, count, None),
        Handling::InThread => return in_thread(how, page_bytes, count),
        Handling::OnOneCpu | Handling::OnTwoCpus => {}
    }
    // In a thread of its own, since the restriction is never lifted.
    let kept = thread::spawn(move || {
        let (here, another) = cpus::two()?;
        let is_one = handling == Handling::OnOneCpu;
        let Some(handler) = (if is_one { Some(here) } else { another }) else {
            return Ok(None);
        };
        cpus::stay_on(here)?;
        served_by(how, page_bytes, count, Some(handler))
    });
    let kept = kept.join().expect("the measurement does not panic");
    kept.with_context(|| format!("cannot measure with threads kept to CPUs ({handling:?})"))
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
            let _given_up = GivenUp(bare);
            bare.serve()
        });
        // Without a handler the first fault would never end.
        let histogram = is_ready.recv().map(|()| bare.touch());
        let served = handler.join();
        served.map_err(|_| anyhow!("the handler has panicked"))??;
        Ok(Some(histogram.expect("a handler that failed has said so")?))
    })
}

fn in_thread(how: How, page_bytes: usize, count: usize) -> Result<Option<Histogram<u64>>> {
    let Some(bare) = Bare::new(how, Features::SIGBUS, page_bytes, count)? else {
        return Ok(None);
    };
    let bare = Arc::new(bare);
    let addresses = bare.region.address()..bare.region.address() + bare.region.bytes;
    let _registered =
        FaultRegistration::new(addresses, bare.clone()).context("cannot handle SIGBUS")?;
    bare.touch().map(Some)
}

/// Guard of a handler thread. Its drop unregisters the region, so that no fault waits for a handler
/// that has ended: absent pages are zeros then.
struct GivenUp<'a>(&'a Bare);

impl Drop for GivenUp<'_> {
    fn drop(&mut self) {
        let (uffd, region) = (&self.0.uffd, &self.0.region);
        let unregistered = uffd.unregister(region.address(), region.bytes);
        unregistered.expect("it is registered");
    }
}

/// Absent pages, and a pool of pages to resolve their faults with.
struct Bare {
    uffd: Uffd,
    how: How,
    region: Mapping,
    pool: Mapping,
    /// Userfaultfd of the pool's addresses, which pages move out to.
    pool_uffd: Uffd,
    page_bytes: usize,
    /// Pages of the region in the order in which they come in. Pages before `first` are not
    /// measured; they are resident if pages leave.
    order: Vec<usize>,
    first: usize,
    /// Number of faults that were resolved.
    served: AtomicUsize,
    count: usize,
    /// Bytes that the region's pages shall have, and their hashes. Empty if the pool has the bytes.
    remote: Mapping,
    hashes: Vec<u128>,
}

impl Bare {
    fn new(how: How, reported: Features, page_bytes: usize, count: usize) -> Result<Option<Self>> {
        let features = reported
            | match how {
                How::Copy => Features::MISSING,
                How::Move | How::Read | How::Replace => Features::MOVE,
            };
        let supported = Uffd::supported(false).context("cannot measure bare userfaultfd")?;
        if !supported.contains(features) {
            return Ok(None);
        }
        let open =
            |features| Uffd::open(features, false).context("cannot measure bare userfaultfd");
        let uffd = open(features)?;
        let pool_uffd = open(features | Features::SIGBUS)?;
        let (mut order, mut first): (Vec<usize>, _) = ((0..count).collect(), 0);
        if how.reads() {
            let pages = (count * COLD_PAGES_PER_FAULT).min(COLD_BYTES_MAX / page_bytes);
            let shuffled = Shuffle::new(pages as u64, 1).map(|page| page as usize);
            (order, first) = (shuffled.collect(), pages / RESIDENT_SHARE);
        }
        let region = Mapping::new(order.len() * page_bytes, page_bytes)?;
        let pool = Mapping::new(count.max(1) * page_bytes, page_bytes)?;
        for page in 0..count {
            for offset in (0..page_bytes).step_by(KERNEL_PAGE_BYTES) {
                pool.write(page * page_bytes + offset, stamp(page));
            }
        }
        let remote_pages = if how.reads() { order.len() } else { 0 };
        let remote = Mapping::new(remote_pages * page_bytes, page_bytes)?;
        let hashes = (0..remote_pages).map(|page| {
            // SAFETY: nobody else knows the mapping yet.
            let bytes = unsafe { remote.bytes_mut(page * page_bytes, page_bytes) };
            for (number, word) in (0..).zip(bytes.as_chunks_mut().0) {
                *word = mix(page as u64 ^ number << 32).to_le_bytes();
            }
            bytes[0] = stamp(page);
            hash(bytes)
        });
        let hashes = hashes.collect();
        let register = |uffd: &Uffd, memory: &Mapping| {
            uffd.register(memory.address(), memory.bytes, RegisterMode::MISSING)
                .context("cannot register memory")
        };
        if how == How::Replace {
            // Pages that shall leave come in by the kernel's own faults.
            for &page in &order[..first] {
                // SAFETY: nobody else knows the mappings yet, and the pages do not overlap.
                let [to, from] = [&region, &remote]
                    .map(|memory| unsafe { memory.bytes_mut(page * page_bytes, page_bytes) });
                to.copy_from_slice(from);
            }
            register(&pool_uffd, &pool)?;
        }
        register(&uffd, &region)?;
        Ok(Some(Self {
            uffd,
            how,
            region,
            pool,
            pool_uffd,
            page_bytes,
            order,
            first,
            served: AtomicUsize::new(0),
            count,
            remote,
            hashes,
        }))
    }

    /// Touches one page after the other and times each, in nanoseconds.
    ///
    /// # Errors
    /// A page has wrong bytes: its fault was resolved wrongly, or the handler gave up.
    fn touch(&self) -> Result<Histogram<u64>> {
        let mut histogram = new_histogram();
        for &page in &self.order[self.first..][..self.count] {
            let begin = Instant::now();
            let byte = self.region.read(page * self.page_bytes);
            histogram.saturating_record(begin.elapsed().as_nanos() as u64);
            ensure!(byte == stamp(page), "a page came with other bytes");
        }
        Ok(histogram)
    }

    /// Resolves the faults of all pages.
    fn serve(&self) -> Result<()> {
        let mut buffer = FaultBuffer::default();
        let mut faults: Vec<PageFault> = Vec::with_capacity(64);
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

    fn resolve(&self, fault: PageFault) -> Result<(), Stopped> {
        let len = self.page_bytes;
        let page = (fault.address - self.region.address()) / len;
        let served = self.served.fetch_add(1, Relaxed);
        let slot = match self.how {
            How::Copy | How::Move => page,
            How::Read => served,
            // The page that left last has left its memory in this slot.
            How::Replace => 0,
        };
        let to = self.region.address() + page * len;
        let from = self.pool.address() + slot * len;
        if self.how.reads() {
            // SAFETY: faults are resolved one at a time, and nobody else touches the slot, or
            // writes to remote memory; they do not overlap.
            let [there, here] = [(&self.remote, page), (&self.pool, slot)]
                .map(|(memory, page)| unsafe { memory.bytes_mut(page * len, len) });
            here.copy_from_slice(there);
            assert_eq!(hash(here), self.hashes[page], "a page was read wrongly");
        }
        // SAFETY:
        // - both ranges are whole pages of mappings that outlive this call
        // - nobody reads the pool again, and the region's owner waits for exactly these bytes
        unsafe {
            match self.how {
                How::Copy => self.uffd.copy(to, from, len),
                _ => self.uffd.move_pages(to, from, len, false),
            }
        }?;
        if self.how == How::Replace {
            let leaving = self.order[served];
            let address = self.region.address() + leaving * len;
            // SAFETY: the slot is vacant since the call above, and nobody touches the page again:
            // it came before those that are touched.
            unsafe { self.pool_uffd.move_pages(from, address, len, false) }?;
            // SAFETY: faults are resolved one at a time, and nobody else touches the slot.
            let bytes = unsafe { self.pool.bytes_mut(slot * len, len) };
            assert_eq!(hash(bytes), self.hashes[leaving], "a page has changed");
        }
        Ok(())
    }
}

// SAFETY: system calls, which touch the pool and the region alone, copies and hashes: unless it
// fails it allocates nothing and takes no lock.
unsafe impl FaultHandler for Bare {
    fn fault(&self, fault: PageFault) -> Served {
        match self.resolve(fault) {
            Ok(()) => Served::Retry,
            Err(_) => Served::NotMine,
        }
    }
}

/// Returns the elements of a run of pages that a space has installed at `address`.
///
/// # Safety
/// The whole range is mapped and aligned, and nobody else touches it as long as the slice is in
/// use.
pub unsafe fn installed<'a>(address: usize, bytes: usize) -> &'a mut [f64] {
    let elements = bytes / size_of::<f64>();
    // SAFETY: the caller promises all of it; any bytes are numbers.
    unsafe { slice::from_raw_parts_mut(address as *mut f64, elements) }
}

/// Returns the hash that farpage verifies.
fn hash(page: &[u8]) -> u128 {
    XxHash3_128::oneshot(page)
}

fn stamp(page: usize) -> u8 {
    page as u8 | 1
}

/// Private anonymous memory, aligned to its page size. The threads above take turns at it.
struct Mapping {
    whole: MmapRaw,
    /// Bytes before the first page, and of all pages.
    gap: usize,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize, align: usize) -> Result<Self> {
        let mut options = MmapOptions::new();
        let whole = options.len(bytes + align).no_reserve_swap().map_anon();
        let whole = MmapRaw::from(whole.context("cannot map memory")?);
        // Whether pages of 2 MiB are huge is part of the measurement; smaller ones must not be, or
        // one fault would serve many.
        let advice = match align >= HUGE_PAGE_BYTES {
            true => Advice::HugePage,
            false => Advice::NoHugePage,
        };
        // A kernel without huge pages says EINVAL, which is as good.
        let _ = whole.advise(advice);
        let gap = whole.as_ptr().align_offset(align);
        Ok(Self { whole, gap, bytes })
    }

    fn address(&self) -> usize {
        self.whole.as_ptr() as usize + self.gap
    }

    /// # Safety
    /// The pages are mapped. Nobody else writes to them as long as the slice is in use, or reads
    /// them while the slice is written to.
    #[expect(clippy::mut_from_ref, reason = "those who share it take turns")]
    unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(len <= self.bytes - offset, "beyond the mapping");
        // SAFETY: inside the mapping; the rest is the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.whole.as_mut_ptr().add(self.gap + offset), len) }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.bytes, "beyond the mapping");
        // SAFETY: within the mapping, as checked above, which is `align` bytes longer.
        unsafe { self.whole.as_mut_ptr().add(self.gap + offset) }
    }

    fn read(&self, offset: usize) -> u8 {
        // SAFETY: `at` gives an address inside the mapping, which is readable; absent pages are
        // filled by the handler.
        unsafe { self.at(offset).read_volatile() }
    }

    fn write(&self, offset: usize, value: u8) {
        // SAFETY: `at` gives an address inside the mapping, which is writable and of which no
        // reference exists.
        unsafe { self.at(offset).write_volatile(value) }
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
