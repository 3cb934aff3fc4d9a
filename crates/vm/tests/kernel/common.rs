//! Shared parts of the tests of the address space: spaces, frames with numbered pages, the smallest
//! pager, and what a program does to its own mappings.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use farpage_vm::{
    AddressSpace, DetachError, EventScope, Events, Frame, Geometry, KernelFrame, KernelSpace,
    KernelSpaceOptions, PageFault, Shard, Transfer,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub(crate) use crate::moves::{Moves, events, geometry, pages};

pub(crate) const BOTH: [Transfer; 2] = [Transfer::Move, Transfer::Copy];

pub(crate) fn space(transfer: Transfer, shards: usize) -> Arc<KernelSpace> {
    let options = KernelSpaceOptions {
        shards,
        frame_bytes_max: 64 << 20,
        transfer: Some(transfer),
        ..KernelSpaceOptions::default()
    };
    Arc::new(KernelSpace::new(options).unwrap())
}

/// Returns the events that were taken from the kernel before.
pub(crate) fn kept_events(space: &KernelSpace, shard: usize) -> Events {
    let mut events = Events::default();
    space
        .events(Shard(shard), EventScope::Kept, &mut events)
        .unwrap();
    events
}

pub(crate) fn byte(address: usize) -> u8 {
    // SAFETY: the tests read mapped regions.
    unsafe { (address as *const u8).read_volatile() }
}

pub(crate) fn set(address: usize, value: u8) {
    // SAFETY: the tests write mapped regions.
    unsafe { (address as *mut u8).write_volatile(value) }
}

/// The smallest pager: keeps pages in a map, fills on fault, and evicts on request: a page together
/// with those behind it in its stripe, as far as they are there.
pub(crate) struct Filler {
    pub(crate) space: Arc<KernelSpace>,
    pub(crate) base: usize,
    pub(crate) geometry: Geometry,
    /// Frames of pages that are not mapped; a page without a frame is in the region.
    pub(crate) away: Vec<Mutex<Option<KernelFrame>>>,
    pub(crate) stop: AtomicBool,
    pub(crate) faults: AtomicUsize,
    /// Fills and evictions of more than one page.
    pub(crate) runs_filled: AtomicUsize,
    pub(crate) runs_evicted: AtomicUsize,
}

impl Filler {
    pub(crate) fn start(
        space: &Arc<KernelSpace>,
        geometry: Geometry,
    ) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let base = space.map(geometry).unwrap().address;
        let pages = geometry.bytes / geometry.page_bytes;
        let away = (0..pages)
            .map(|_| Mutex::new(Some(space.new_frame(geometry.page_bytes, 1).unwrap())))
            .collect();
        let filler = Arc::new(Self {
            space: Arc::clone(space),
            base,
            geometry,
            away,
            stop: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
            runs_filled: AtomicUsize::new(0),
            runs_evicted: AtomicUsize::new(0),
        });
        let threads = (0..space.shards())
            .map(|shard| {
                let filler = Arc::clone(&filler);
                thread::spawn(move || filler.run(shard))
            })
            .collect();
        (filler, threads)
    }

    pub(crate) fn run(&self, shard: usize) {
        while !self.stop.load(Ordering::Relaxed) {
            let fd = self.space.wait(Shard(shard)).fd.unwrap();
            poll(
                &mut [PollFd::new(fd, PollFlags::POLLIN)],
                PollTimeout::from(10u8),
            )
            .unwrap();
            for PageFault { address, .. } in events(&self.space, shard).faults {
                self.faults.fetch_add(1, Ordering::Relaxed);
                self.fill(shard, (address - self.base) / self.geometry.page_bytes);
            }
        }
    }

    /// Returns a page and those behind it in its stripe.
    pub(crate) fn stripe_from(&self, page: usize) -> Range<usize> {
        let pages = self.geometry.stripe_bytes / self.geometry.page_bytes;
        page..(page - page % pages + pages).min(self.away.len())
    }

    pub(crate) fn fill(&self, shard: usize, page: usize) {
        let page_bytes = self.geometry.page_bytes;
        let address = self.base + page * page_bytes;
        // Pages are locked in ascending order by all.
        let mut locked = vec![self.away[page].lock().unwrap()];
        let Some(mut run) = locked[0].take() else {
            return self.space.wake(pages(shard, address, page_bytes, 1));
        };
        for next in self.stripe_from(page).skip(1) {
            let mut away = self.away[next].lock().unwrap();
            if let Err(elsewhere) = away.take().map_or(Ok(()), |frame| run.join(frame)) {
                *away = Some(elsewhere);
            }
            if run.as_ref().len() != (next - page + 1) * page_bytes {
                break;
            }
            locked.push(away);
        }
        if locked.len() > 1 {
            self.runs_filled.fetch_add(1, Ordering::Relaxed);
        }
        self.space.move_in(shard, address, page_bytes, run).unwrap();
    }

    /// Evicts a page. True if it was there.
    pub(crate) fn evict(&self, page: usize) -> Result<bool, DetachError> {
        let page_bytes = self.geometry.page_bytes;
        let mut locked: Vec<_> = self
            .stripe_from(page)
            .map(|page| self.away[page].lock().unwrap())
            .take_while(|away| away.is_none())
            .collect();
        if locked.is_empty() {
            return Ok(false);
        }
        let offset = page * page_bytes;
        let shard = self.geometry.shard_of(offset, self.space.shards()).0;
        let mut rest =
            self.space
                .move_out(pages(shard, self.base + offset, page_bytes, locked.len()))?;
        let pages = rest.as_ref().len() / page_bytes;
        if pages > 1 {
            self.runs_evicted.fetch_add(1, Ordering::Relaxed);
        }
        for away in &mut locked[..pages - 1] {
            let behind = rest.split_off(page_bytes);
            **away = Some(std::mem::replace(&mut rest, behind));
        }
        *locked[pages - 1] = Some(rest);
        Ok(true)
    }

    pub(crate) fn finish(self: Arc<Self>, threads: Vec<JoinHandle<()>>) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
        self.space.unmap(self.base, self.geometry);
    }
}

/// Pin on kernel pages as direct I/O in progress has it: `vmsplice` takes references for as long as
/// the pipe holds them, and a registered io_uring buffer takes true pins. Only the latter is what
/// `MOVE` checks.
pub(crate) struct Pinned {
    pub(crate) ring: i32,
}

impl Pinned {
    /// Pins `len` bytes. `None` where there is no io_uring; says then that `test` is skipped.
    pub(crate) fn new(test: &str, address: usize, len: usize) -> Option<Self> {
        let mut params = [0u32; 30];
        // SAFETY: `params` is an io_uring_params (120 bytes) of zeros.
        let ring =
            unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) } as i32;
        if ring < 0 {
            eprintln!("SKIPPED: {test}: io_uring is not available here");
            return None;
        }
        let iovec = libc::iovec {
            iov_base: address as *mut _,
            iov_len: len,
        };
        // SAFETY: IORING_REGISTER_BUFFERS (0) with one valid vector.
        let rc = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, 0, &iovec, 1) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        Some(Self { ring })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: IORING_UNREGISTER_BUFFERS (1), then our own descriptor.
        unsafe {
            libc::syscall(libc::SYS_io_uring_register, self.ring, 1, 0, 0);
            libc::close(self.ring);
        }
    }
}

/// True if a system call can read the byte: it reports as an error what in the program would be a
/// signal. A child could take the signal, but does not inherit the region.
pub(crate) fn system_call_can_read(address: usize) -> bool {
    let mut pipe = [0; 2];
    // SAFETY: room for two descriptors, closed below.
    unsafe { libc::pipe(pipe.as_mut_ptr()) };
    // SAFETY: the kernel checks the address.
    let rc = unsafe { libc::write(pipe[1], address as *const _, 1) };
    // SAFETY: our own descriptors.
    pipe.iter()
        .for_each(|&fd| unsafe { assert_eq!(libc::close(fd), 0) });
    rc == 1
}

/// Returns the geometry of one stripe of `pages` pages.
pub(crate) fn run_geometry(pages: usize, page_bytes: usize) -> Geometry {
    Geometry {
        stripe_bytes: pages * page_bytes,
        ..geometry(pages * page_bytes, page_bytes)
    }
}

/// Maps a region of two stripes, of 16 pages each, which belong to two shards. All pages are there;
/// in each stripe they are numbered from 1 on. Returns the region's geometry and address.
pub(crate) fn two_stripes(space: &KernelSpace) -> (Geometry, usize) {
    let geometry = Geometry {
        stripe_bytes: 65536,
        ..run_geometry(32, 4096)
    };
    let base = space.map(geometry).unwrap().address;
    for half in 0..2 {
        let frame = numbered(space, 4096, 16, 1);
        space
            .move_in(half, base + half * 65536, 4096, frame)
            .unwrap();
    }
    (geometry, base)
}

/// Makes a frame whose every page is filled with its number, from `first` on.
pub(crate) fn numbered(
    space: &KernelSpace,
    page_bytes: usize,
    pages: usize,
    first: u8,
) -> KernelFrame {
    let mut frame = space.new_frame(page_bytes, pages).unwrap();
    for (number, page) in (first..).zip(frame.as_mut().chunks_mut(page_bytes)) {
        page.fill(number);
    }
    frame
}

/// Returns the number that all of each page is filled with.
pub(crate) fn numbers(bytes: &[u8], page_bytes: usize) -> Vec<u8> {
    assert!(bytes.len().is_multiple_of(page_bytes));
    let number = |page: &[u8]| {
        assert!(page.iter().all(|&byte| byte == page[0]));
        page[0]
    };
    bytes.chunks(page_bytes).map(number).collect()
}

/// Returns what the program sees of pages that are all there.
pub(crate) fn mapped(address: usize, len: usize) -> &'static [u8] {
    // SAFETY: the tests look at pages that are mapped, and do not change them meanwhile.
    unsafe { std::slice::from_raw_parts(address as *const u8, len) }
}

pub(crate) fn drop_range(address: usize, len: usize) {
    // SAFETY: part of the test's own region.
    let rc = unsafe { libc::madvise(address as *mut _, len, libc::MADV_DONTNEED) };
    assert_eq!(rc, 0);
}

/// Runs what the program does to its mappings, while the space's messages are read: the kernel lets
/// the program go on only then.
pub(crate) fn as_the_program<T: Send>(space: &KernelSpace, act: impl FnOnce() -> T + Send) -> T {
    told_by_the_program(space, act).0
}

/// Runs `act` as [`as_the_program`]; also returns what each shard was told meanwhile.
pub(crate) fn told_by_the_program<T: Send>(
    space: &KernelSpace,
    act: impl FnOnce() -> T + Send,
) -> (T, Vec<Events>) {
    let mut told: Vec<_> = (0..space.shards()).map(|_| Events::default()).collect();
    let done = thread::scope(|scope| {
        let acting = scope.spawn(act);
        loop {
            // Looked at once more after the end: the last message lets it end.
            let is_finished = acting.is_finished();
            for (shard, told) in told.iter_mut().enumerate() {
                space.events(Shard(shard), EventScope::All, told).unwrap();
            }
            if is_finished {
                return acting.join().unwrap();
            }
            thread::yield_now();
        }
    });
    (done, told)
}

/// Maps anonymous memory of the program's own over what is there.
pub(crate) fn map_over(address: usize, len: usize, protection: libc::c_int) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the tests map over their own regions, whose pages they do not use any more.
    let mapped = unsafe { libc::mmap(address as *mut _, len, protection, flags, -1, 0) };
    assert_eq!(mapped as usize, address);
}

pub(crate) fn unmap_by_the_program(address: usize, len: usize) {
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munmap(address as *mut _, len) }, 0);
}

/// Returns the protection in `/proc/self/maps` of the mapping that holds `address`.
pub(crate) fn protection(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let at = |text| usize::from_str_radix(text, 16).unwrap();
        (at(start)..at(end))
            .contains(&address)
            .then(|| rest[..4].to_owned())
    })
}

/// Guard that ends what runs beside a test, however the test ends.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
