//! The real address space on the real kernel, in both ways of moving pages.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    collections::HashMap,
    fs,
    io::{Read, Seek, Write},
    ops::Range,
    os::fd::AsRawFd,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_vm::{
    AddressSpace, DetachError, Fault, Features, Frame, InstallErrorKind, KernelFrame, KernelSpace,
    KernelSpaceOptions, Layout, OpenError, Transfer, Uffd,
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork},
};

const BOTH: [Transfer; 2] = [Transfer::Move, Transfer::Copy];

fn space(transfer: Transfer, shards: usize) -> Arc<KernelSpace> {
    let options = KernelSpaceOptions {
        shards,
        frame_bytes_max: 64 << 20,
        transfer: Some(transfer),
        ..KernelSpaceOptions::default()
    };
    Arc::new(KernelSpace::new(options).unwrap())
}

fn layout(bytes: usize, page_bytes: usize) -> Layout {
    Layout {
        bytes,
        page_bytes,
        stripe_bytes: page_bytes,
        first_shard: 0,
        address: None,
        read_only: false,
    }
}

fn byte(address: usize) -> u8 {
    // SAFETY: the tests read mapped regions.
    unsafe { (address as *const u8).read_volatile() }
}

fn set(address: usize, value: u8) {
    // SAFETY: the tests write mapped regions.
    unsafe { (address as *mut u8).write_volatile(value) }
}

/// The smallest pager: keeps pages in a map, fills on fault, and evicts what it is told to: a page together with those behind it in its stripe, as
/// far as they are there.
struct Filler {
    space: Arc<KernelSpace>,
    base: usize,
    layout: Layout,
    /// Pages not mapped; a page that is in neither place is in the region.
    away: Vec<Mutex<Option<KernelFrame>>>,
    stop: AtomicBool,
    faults: AtomicUsize,
    /// Fills and evictions of more than one page.
    runs_filled: AtomicUsize,
    runs_evicted: AtomicUsize,
}

impl Filler {
    fn start(space: &Arc<KernelSpace>, layout: Layout) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let base = space.map(layout).unwrap();
        let pages = layout.bytes / layout.page_bytes;
        let away = (0..pages)
            .map(|_| Mutex::new(Some(space.new_frame(layout.page_bytes, 1).unwrap())))
            .collect();
        let filler = Arc::new(Self {
            space: Arc::clone(space),
            base,
            layout,
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

    fn run(&self, shard: usize) {
        let mut faults = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let fd = self.space.fault_fd(shard).unwrap();
            poll(
                &mut [PollFd::new(fd, PollFlags::POLLIN)],
                PollTimeout::from(10u8),
            )
            .unwrap();
            self.space.faults(shard, &mut faults).unwrap();
            for Fault { address, .. } in faults.drain(..) {
                self.faults.fetch_add(1, Ordering::Relaxed);
                self.fill(shard, (address - self.base) / self.layout.page_bytes);
            }
        }
    }

    /// A page and those behind it in its stripe.
    fn stripe_from(&self, page: usize) -> Range<usize> {
        let pages = self.layout.stripe_bytes / self.layout.page_bytes;
        page..(page - page % pages + pages).min(self.away.len())
    }

    fn fill(&self, shard: usize, page: usize) {
        let page_bytes = self.layout.page_bytes;
        let address = self.base + page * page_bytes;
        // Pages are locked in ascending order by all.
        let mut locked = vec![self.away[page].lock().unwrap()];
        let Some(mut run) = locked[0].take() else {
            return self.space.wake(shard, address, page_bytes);
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
        self.space.install(shard, address, run).unwrap();
    }

    /// Whether the page was there to be evicted.
    fn evict(&self, page: usize) -> Result<bool, DetachError> {
        let page_bytes = self.layout.page_bytes;
        let mut locked: Vec<_> = self
            .stripe_from(page)
            .map(|page| self.away[page].lock().unwrap())
            .take_while(|away| away.is_none())
            .collect();
        if locked.is_empty() {
            return Ok(false);
        }
        let offset = page * page_bytes;
        let shard = self.layout.shard_of(offset, self.space.shards());
        let mut rest = self
            .space
            .detach(shard, self.base + offset, page_bytes, locked.len())?;
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

    fn finish(self: Arc<Self>, threads: Vec<JoinHandle<()>>) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
        self.space.unmap(self.base, self.layout);
    }
}

#[test]
fn bytes_survive_install_and_detach_at_every_page_size() {
    for transfer in BOTH {
        for page_bytes in (12..=21).map(|shift| 1usize << shift) {
            let space = space(transfer, 1);
            let layout = layout(2 * page_bytes, page_bytes);
            let base = space.map(layout).unwrap();
            assert!(base.is_multiple_of(page_bytes));
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            assert!(frame.as_ref().iter().all(|&byte| byte == 0));
            for (index, byte) in frame.as_mut().iter_mut().enumerate() {
                *byte = (index * 7 + index / 4096) as u8;
            }
            let expected = frame.as_ref().to_vec();
            let at = base + page_bytes;
            for round in 0..3 {
                assert!(!space.is_present(at));
                space.install(0, at, frame).unwrap();
                assert!(space.is_present(at) && !space.is_present(base));
                set(at + page_bytes - 1, round);
                frame = space.detach(0, at, page_bytes, 1).unwrap();
                assert_eq!(frame.as_ref()[..page_bytes - 1], expected[..page_bytes - 1]);
                assert_eq!(frame.as_ref()[page_bytes - 1], round);
            }
            assert!(matches!(
                space.detach(0, at, page_bytes, 1),
                Err(DetachError::Absent)
            ));
            space.unmap(base, layout);
        }
    }
}

#[test]
fn writers_during_detach_keep_their_writes() {
    const PAGES: usize = 64;
    const EVICTIONS: usize = 8 * PAGES;
    for transfer in BOTH {
        for (page_bytes, run, seed) in [(4096, 1, 1), (65536, 1, 2), (4096, 8, 3), (65536, 8, 4)] {
            let space = space(transfer, 2);
            let layout = Layout {
                stripe_bytes: run * page_bytes,
                ..layout(PAGES * page_bytes, page_bytes)
            };
            let (filler, fillers) = Filler::start(&space, layout);
            let words = layout.bytes / 8;
            let running = Arc::new(AtomicBool::new(true));
            let word_of = move |state: &mut u64| {
                *state ^= *state << 13;
                *state ^= *state >> 7;
                *state ^= *state << 17;
                (*state % words as u64) as usize
            };
            let programs: Vec<_> = (1..=4u64)
                .map(|thread| {
                    let (base, running) = (filler.base, Arc::clone(&running));
                    thread::spawn(move || {
                        let mut state = thread * 7919 + seed;
                        let mut writes = 0u64;
                        while running.load(Ordering::Relaxed) {
                            let word = word_of(&mut state);
                            writes += 1;
                            // SAFETY: an aligned word of the region, accessed atomically by all.
                            let cell =
                                unsafe { AtomicU64::from_ptr((base + word * 8) as *mut u64) };
                            cell.fetch_add(word as u64 * 2 + 1, Ordering::Relaxed);
                        }
                        (thread, writes)
                    })
                })
                .collect();
            // The writers run for as long as it takes to evict that often, however the threads are scheduled.
            let mut evictions = 0;
            while evictions < EVICTIONS {
                // When everything is away, the writers and fillers need the processor.
                thread::yield_now();
                for page in 0..PAGES {
                    match filler.evict(page) {
                        Ok(evicted) => evictions += usize::from(evicted),
                        Err(DetachError::Held) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
            running.store(false, Ordering::Relaxed);
            let mut expected: HashMap<usize, u64> = HashMap::new();
            for program in programs {
                let (thread, writes) = program.join().unwrap();
                let mut state = thread * 7919 + seed;
                for _ in 0..writes {
                    let word = word_of(&mut state);
                    let cell = expected.entry(word).or_default();
                    *cell = cell.wrapping_add(word as u64 * 2 + 1);
                }
            }
            for (word, value) in expected {
                // SAFETY: a word of the region.
                let got = unsafe { ((filler.base + word * 8) as *const u64).read_volatile() };
                assert_eq!(got, value, "word {word}, {transfer:?}, seed {seed}");
            }
            let runs = [&filler.runs_filled, &filler.runs_evicted];
            assert!(run == 1 || runs.iter().all(|count| count.load(Ordering::Relaxed) > 0));
            filler.finish(fillers);
        }
    }
}

#[test]
fn system_calls_read_and_write_absent_pages() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = layout(8 * 65536, 65536);
        let (filler, threads) = Filler::start(&space, layout);
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..layout.bytes).map(|index| (index % 251) as u8).collect();
        file.write_all(&content).unwrap();
        file.rewind().unwrap();
        // SAFETY: the whole region, which no other thread writes.
        let region =
            unsafe { std::slice::from_raw_parts_mut(filler.base as *mut u8, layout.bytes) };
        file.read_exact(region).unwrap();
        for page in 0..8 {
            filler.evict(page).unwrap();
        }
        let mut copy = tempfile::tempfile().unwrap();
        copy.write_all(region).unwrap();
        copy.rewind().unwrap();
        let mut back = Vec::new();
        copy.read_to_end(&mut back).unwrap();
        assert_eq!(back, content);
        filler.finish(threads);
    }
}

#[test]
fn region_stays_usable_after_fork_and_exec_while_faulting() {
    let space = space(Transfer::Move, 1);
    let layout = layout(64 * 4096, 4096);
    let (filler, threads) = Filler::start(&space, layout);
    let running = Arc::new(AtomicBool::new(true));
    let program = {
        let (running, base) = (Arc::clone(&running), filler.base);
        thread::spawn(move || {
            let mut page = 0;
            while running.load(Ordering::Relaxed) {
                set(base + page % 64 * 4096, 1);
                page += 7;
            }
        })
    };
    for round in 0..20 {
        assert!(Command::new("/bin/true").status().unwrap().success());
        // SAFETY: the child only touches the region and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // The region is not inherited: this is SIGSEGV.
                byte(filler.base);
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                assert!(matches!(
                    waitpid(child, None).unwrap(),
                    WaitStatus::Signaled(_, Signal::SIGSEGV, _)
                ));
            }
        }
        for page in 0..64 {
            filler.evict(page).unwrap();
        }
        set(filler.base + 63 * 4096 + 9, round);
        assert_eq!(byte(filler.base + 63 * 4096 + 9), round);
    }
    running.store(false, Ordering::Relaxed);
    program.join().unwrap();
    assert!(filler.faults.load(Ordering::Relaxed) > 64);
    filler.finish(threads);
}

/// Pins kernel pages as direct I/O in progress does: `vmsplice` takes references for as long as the pipe holds them, and a
/// registered io_uring buffer takes true pins. Only the latter is what `MOVE` checks.
struct Pinned {
    ring: i32,
}

impl Pinned {
    /// `None` where there is no io_uring; says then that `test` is skipped.
    fn new(test: &str, address: usize, len: usize) -> Option<Self> {
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

#[test]
fn pinned_page_stays_whole() {
    let space = space(Transfer::Move, 1);
    for page_bytes in [4096, 65536, 2 << 20] {
        let layout = layout(page_bytes, page_bytes);
        let base = space.map(layout).unwrap();
        let mut frame = space.new_frame(page_bytes, 1).unwrap();
        for (index, byte) in frame.as_mut().iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        space.install(0, base, frame).unwrap();
        // The last kernel page is pinned, so that the others have moved when the kernel refuses.
        let Some(pinned) = Pinned::new("pinned_page_stays_whole", base + page_bytes - 4096, 4096)
        else {
            return;
        };
        assert!(matches!(
            space.detach(0, base, page_bytes, 1),
            Err(DetachError::Held)
        ));
        for index in 0..page_bytes {
            assert!(index % 4096 != 0 || space.is_present(base + index));
            assert_eq!(byte(base + index), (index % 251) as u8);
        }
        drop(pinned);
        let frame = space.detach(0, base, page_bytes, 1).unwrap();
        assert!(
            frame
                .as_ref()
                .iter()
                .enumerate()
                .all(|(index, &byte)| byte == (index % 251) as u8)
        );
        space.unmap(base, layout);
    }
}

#[test]
fn writers_on_a_page_whose_detach_is_undone_lose_nothing() {
    let space = space(Transfer::Move, 1);
    let layout = layout(65536, 65536);
    let (filler, threads) = Filler::start(&space, layout);
    set(filler.base, 0);
    let Some(pinned) = Pinned::new(
        "writers_on_a_page_whose_detach_is_undone_lose_nothing",
        filler.base + 61440,
        4096,
    ) else {
        return;
    };
    let running = Arc::new(AtomicBool::new(true));
    let programs: Vec<_> = (0..3)
        .map(|thread| {
            let (running, base) = (Arc::clone(&running), filler.base);
            thread::spawn(move || {
                let mut count = 0u64;
                while running.load(Ordering::Relaxed) {
                    for kernel_page in 0..16 {
                        // SAFETY: an aligned word of the region that is this thread's alone, and atomic.
                        let cell = unsafe {
                            AtomicU64::from_ptr(
                                (base + kernel_page * 4096 + thread * 8) as *mut u64,
                            )
                        };
                        assert_eq!(cell.fetch_add(1, Ordering::Relaxed), count);
                    }
                    count += 1;
                }
                count
            })
        })
        .collect();
    for _ in 0..3000 {
        assert!(matches!(filler.evict(0), Err(DetachError::Held)));
    }
    running.store(false, Ordering::Relaxed);
    for program in programs {
        assert!(program.join().unwrap() > 0);
    }
    drop(pinned);
    filler.evict(0).unwrap();
    filler.finish(threads);
}

#[test]
fn page_dropped_by_the_program_is_absent_and_a_part_dropped_is_zeros() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let layout = layout(page_bytes, page_bytes);
            let base = space.map(layout).unwrap();
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            frame.as_mut().fill(9);
            space.install(0, base, frame).unwrap();
            // SAFETY: the region's own page.
            unsafe { libc::madvise(base as *mut _, 4096, libc::MADV_DONTNEED) };
            assert!(!space.is_present(base));
            if page_bytes == 4096 {
                assert!(matches!(
                    space.detach(0, base, page_bytes, 1),
                    Err(DetachError::Absent)
                ));
            } else {
                let frame = space.detach(0, base, page_bytes, 1).unwrap();
                assert!(frame.as_ref()[..4096].iter().all(|&byte| byte == 0));
                assert!(frame.as_ref()[4096..].iter().all(|&byte| byte == 9));
            }
            space.unmap(base, layout);
        }
    }
}

#[test]
fn install_over_a_page_hands_the_frame_back_whole() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = layout(65536, 65536);
        let base = space.map(layout).unwrap();
        let filled = |value| {
            let mut frame = space.new_frame(65536, 1).unwrap();
            frame.as_mut().fill(value);
            frame
        };
        space.install(0, base, filled(1)).unwrap();
        // A whole page is there; then all but its first half, so that half of the frame has gone in when the kernel refuses.
        for dropped in [0, 32768] {
            // SAFETY: the region's own page.
            unsafe { libc::madvise(base as *mut _, dropped, libc::MADV_DONTNEED) };
            let error = space.install(0, base, filled(2)).unwrap_err();
            assert!(matches!(error.kind, InstallErrorKind::Exists));
            assert!(error.frame.as_ref().iter().all(|&byte| byte == 2));
            assert_eq!(byte(base + 65535), 1);
            assert_eq!(space.is_present(base), dropped == 0);
        }
        space.unmap(base, layout);
        let error = space.install(0, base, filled(3)).unwrap_err();
        assert!(
            matches!(error.kind, InstallErrorKind::Gone),
            "{:?}",
            error.kind
        );
        assert!(error.frame.as_ref().iter().all(|&byte| byte == 3));
        assert!(matches!(
            space.detach(0, base, 65536, 1),
            Err(DetachError::Absent)
        ));
    }
}

/// A system call reports as an error what in the program would be a signal; the region is not inherited by a child that could take it.
fn system_call_can_read(address: usize) -> bool {
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

#[test]
fn poisoned_page_fails_and_install_heals_it() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let layout = layout(2 * page_bytes, page_bytes);
            let base = space.map(layout).unwrap();
            space.poison(0, base, page_bytes).unwrap();
            assert!(!system_call_can_read(base));
            assert!(!system_call_can_read(base + page_bytes - 4096));
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            frame.as_mut().fill(5);
            space.install(0, base, frame).unwrap();
            assert!(system_call_can_read(base));
            assert_eq!((byte(base), byte(base + page_bytes - 1)), (5, 5));
            let frame = space.detach(0, base, page_bytes, 1).unwrap();
            assert!(frame.as_ref().iter().all(|&byte| byte == 5));
            space.unmap(base, layout);
        }
    }
}

#[test]
fn touching_a_poisoned_page_kills_with_sigbus() {
    // A child of its own, since the region is not inherited by fork.
    // SAFETY: the child makes its own space and ends by the signal; it allocates, which glibc supports after fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let space = space(Transfer::Move, 1);
            let base = space.map(layout(4096, 4096)).unwrap();
            space.poison(0, base, 4096).unwrap();
            byte(base);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            assert!(matches!(
                waitpid(child, None).unwrap(),
                WaitStatus::Signaled(_, Signal::SIGBUS, _)
            ));
        }
    }
}

#[test]
fn unmapping_under_load_leaves_other_regions_alone() {
    let space = space(Transfer::Move, 2);
    let (filler, threads) = Filler::start(&space, layout(64 * 4096, 4096));
    let running = Arc::new(AtomicBool::new(true));
    let program = {
        let (running, base) = (Arc::clone(&running), filler.base);
        thread::spawn(move || {
            let mut page = 0;
            while running.load(Ordering::Relaxed) {
                set(base + page % 64 * 4096, 1);
                page += 11;
            }
        })
    };
    let other = layout(16 * 4096, 4096);
    for round in 0..2000 {
        let base = space.map(other).unwrap();
        let mut frame = space.new_frame(4096, 1).unwrap();
        frame.as_mut().fill(round as u8);
        space.install(0, base, frame).unwrap();
        assert_eq!(byte(base), round as u8);
        filler.evict(round % 64).unwrap();
        space.unmap(base, other);
    }
    running.store(false, Ordering::Relaxed);
    program.join().unwrap();
    filler.finish(threads);
}

fn count_of(path: &str) -> usize {
    fs::read_to_string(path).unwrap().lines().count()
}

fn resident_kib() -> usize {
    let status = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("Rss:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// In a process of its own: other tests of this file change what is counted.
#[test]
fn mapping_ten_thousand_times_leaks_nothing_and_ten_thousand_fit_at_once() {
    const CHILD: &str = "FARPAGE_VM_TEST_ALONE";
    if std::env::var_os(CHILD).is_none() {
        let name = "mapping_ten_thousand_times_leaks_nothing_and_ten_thousand_fit_at_once";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
        return;
    }
    for transfer in BOTH {
        let space = space(transfer, 2);
        let layout = Layout {
            bytes: 65536,
            page_bytes: 4096,
            stripe_bytes: 32768,
            first_shard: 0,
            address: None,
            read_only: false,
        };
        let mut before = None;
        for cycle in 0..11_000 {
            let base = space.map(layout).unwrap();
            let mut frame = space.new_frame(4096, 1).unwrap();
            frame.as_mut()[0] = 1;
            space.install(0, base, frame).unwrap();
            // Every other page is lost with its region.
            if cycle % 2 == 0 {
                space.detach(0, base, 4096, 1).unwrap();
            }
            space.unmap(base, layout);
            let count = || {
                let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
                (descriptors, count_of("/proc/self/maps"), resident_kib())
            };
            if cycle == 999 {
                before = Some(count());
            } else if cycle == 10_999 {
                let (before, after) = (before.unwrap(), count());
                assert_eq!(before.0, after.0, "descriptors");
                assert!(after.1 <= before.1 + 4, "mappings: {before:?} {after:?}");
                assert!(after.2 <= before.2 + 1024, "resident: {before:?} {after:?}");
            }
        }
        let regions: Vec<_> = (0..10_000).map(|_| space.map(layout).unwrap()).collect();
        for base in regions {
            space.unmap(base, layout);
        }
    }
}

#[test]
fn frame_gives_its_memory_back_and_can_be_made_again() {
    for transfer in BOTH {
        let options = KernelSpaceOptions {
            frame_bytes_max: 4 << 20,
            transfer: Some(transfer),
            ..KernelSpaceOptions::default()
        };
        let space = KernelSpace::new(options).unwrap();
        for page_bytes in [4096, 65536, 2 << 20] {
            for value in 1..=3 {
                let frames: Vec<_> = (0..(4 << 20) / page_bytes)
                    .map(|_| {
                        let mut frame = space.new_frame(page_bytes, 1).unwrap();
                        assert!(frame.as_ref().iter().all(|&byte| byte == 0));
                        frame.as_mut().fill(value);
                        frame
                    })
                    .collect();
                assert!(
                    space.new_frame(page_bytes, 1).is_err(),
                    "the pool has a size"
                );
                let address = frames[0].as_ref().as_ptr() as usize;
                drop(frames);
                assert!(!space.is_present(address));
            }
        }
    }
}

#[test]
fn mlock_and_mprotect_by_the_program_are_reported_and_undone_safely() {
    let space = space(Transfer::Move, 1);
    let layout = layout(65536, 65536);
    let base = space.map(layout).unwrap();
    let mut frame = space.new_frame(65536, 1).unwrap();
    frame.as_mut().fill(4);
    // SAFETY: the region's own page.
    unsafe { libc::mprotect(base as *mut _, 65536, libc::PROT_READ) };
    space.install(0, base, frame).unwrap();
    assert_eq!(byte(base + 4096), 4);
    let error = space.detach(0, base, 65536, 1).unwrap_err();
    assert!(matches!(error, DetachError::Os(_)), "{error:?}");
    assert_eq!(byte(base + 4096), 4);
    // SAFETY: as above.
    unsafe { libc::mprotect(base as *mut _, 65536, libc::PROT_READ | libc::PROT_WRITE) };
    space.detach(0, base, 65536, 1).unwrap();
    space.unmap(base, layout);
}

#[test]
fn user_mode_only_makes_system_calls_fail_and_still_serves_the_program() {
    let options = KernelSpaceOptions {
        user_mode_only: true,
        ..KernelSpaceOptions::default()
    };
    let space = Arc::new(KernelSpace::new(options).unwrap());
    let (filler, threads) = Filler::start(&space, layout(2 * 4096, 4096));
    let mut file = tempfile::tempfile().unwrap();
    // SAFETY: the kernel checks the address.
    let rc = unsafe { libc::write(file.as_raw_fd(), (filler.base + 4096) as *const _, 8) };
    assert_eq!(
        (rc, std::io::Error::last_os_error().raw_os_error()),
        (-1, Some(libc::EFAULT))
    );
    file.flush().unwrap();
    assert_eq!(byte(filler.base), 0);
    filler.finish(threads);
}

#[test]
fn probe_prints_every_feature_and_a_remedy_for_what_is_missing() {
    let probe = farpage_vm::probe(false);
    let table = probe.to_string();
    println!("{table}");
    for name in [
        "MISSING",
        "WP",
        "MINOR",
        "SIGBUS",
        "MOVE",
        "POISON",
        "WP_ASYNC",
        "PAGEMAP_SCAN",
        "vm.max_map_count",
    ] {
        assert!(table.contains(name), "{name}");
    }
    assert!(
        probe
            .checks
            .iter()
            .all(|check| check.mend.is_some() == (check.verdict != farpage_vm::Verdict::Yes))
    );
    assert!(probe.usable());
}

#[test]
fn without_permission_the_error_says_what_to_do_and_user_mode_still_opens() {
    if !nix::unistd::geteuid().is_root()
        || fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
            .unwrap()
            .trim()
            == "1"
    {
        eprintln!(
            "SKIPPED: without_permission_the_error_says_what_to_do_and_user_mode_still_opens: \
             needs root, to become somebody who is not, where that matters"
        );
        return;
    }
    // SAFETY: the child changes its user and ends; it allocates, which glibc supports after fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            nix::unistd::setresuid(65534.into(), 65534.into(), 65534.into()).unwrap();
            let refused = Uffd::open(Features::MISSING, false);
            let text = refused
                .as_ref()
                .map_or_else(ToString::to_string, |_| String::new());
            let told = matches!(refused, Err(OpenError::NotPermitted { .. }))
                && text.contains("sysctl -w vm.unprivileged_userfaultfd=1");
            let opened = Uffd::open(Features::MISSING, true).is_ok();
            let verdicts = (
                farpage_vm::probe(false).usable(),
                farpage_vm::probe(true).usable(),
            );
            // The kernel hides a process that changed its user from itself, until it says otherwise.
            let hidden = verdicts == (false, false) && hidden_page_map_is_told();
            // SAFETY: changes one flag of this process.
            let shown = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) } == 0;
            let mended = shown && farpage_vm::probe(true).usable();
            let default_is_refused = !farpage_vm::probe(false).usable();
            let status = [told, opened, hidden, mended, default_is_refused]
                .iter()
                .position(|&fine| !fine);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(status.map_or(0, |which| 1 + which as i32)) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0))
        }
    }
}

/// Whether a process that changed its user is told so, instead of to mount what is mounted.
fn hidden_page_map_is_told() -> bool {
    let error = KernelSpace::new(KernelSpaceOptions {
        user_mode_only: true,
        ..KernelSpaceOptions::default()
    })
    .err();
    let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
    matches!(error, Some(OpenError::Pagemap(_)))
        && text.contains("PR_SET_DUMPABLE")
        && !text.contains("mount")
}

#[test]
fn poisoning_and_waking_end_the_sleep_of_a_system_call() {
    let space = space(Transfer::Move, 1);
    let layout = layout(4096, 4096);
    let base = space.map(layout).unwrap();
    let sleeper = thread::spawn(move || system_call_can_read(base));
    let mut faults = Vec::new();
    // A woken thread tries again, and its fault is reported again.
    for _ in 0..2 {
        poll(
            &mut [PollFd::new(space.fault_fd(0).unwrap(), PollFlags::POLLIN)],
            PollTimeout::NONE,
        )
        .unwrap();
        space.faults(0, &mut faults).unwrap();
        space.wake(0, base, 4096);
    }
    assert!(faults.len() >= 2);
    space.poison(0, base, 4096).unwrap();
    assert!(!sleeper.join().unwrap());
    // The region goes while somebody sleeps on it.
    space
        .install(0, base, space.new_frame(4096, 1).unwrap())
        .unwrap();
    drop(space.detach(0, base, 4096, 1).unwrap());
    let sleeper = thread::spawn(move || system_call_can_read(base));
    poll(
        &mut [PollFd::new(space.fault_fd(0).unwrap(), PollFlags::POLLIN)],
        PollTimeout::NONE,
    )
    .unwrap();
    space.unmap(base, layout);
    assert!(!sleeper.join().unwrap());
}

/// One stripe of `pages` pages.
fn run_layout(pages: usize, page_bytes: usize) -> Layout {
    Layout {
        stripe_bytes: pages * page_bytes,
        ..layout(pages * page_bytes, page_bytes)
    }
}

/// A frame whose every page is filled with its number, from `first` on.
fn numbered(space: &KernelSpace, page_bytes: usize, pages: usize, first: u8) -> KernelFrame {
    let mut frame = space.new_frame(page_bytes, pages).unwrap();
    for (number, page) in (first..).zip(frame.as_mut().chunks_mut(page_bytes)) {
        page.fill(number);
    }
    frame
}

/// The number that all of each page is filled with.
fn numbers(bytes: &[u8], page_bytes: usize) -> Vec<u8> {
    assert!(bytes.len().is_multiple_of(page_bytes));
    let number = |page: &[u8]| {
        assert!(page.iter().all(|&byte| byte == page[0]));
        page[0]
    };
    bytes.chunks(page_bytes).map(number).collect()
}

/// What the program sees of pages that are all there.
fn mapped(address: usize, len: usize) -> &'static [u8] {
    // SAFETY: the tests look at pages that are mapped, and do not change them meanwhile.
    unsafe { std::slice::from_raw_parts(address as *const u8, len) }
}

fn drop_range(address: usize, len: usize) {
    // SAFETY: part of the test's own region.
    let rc = unsafe { libc::madvise(address as *mut _, len, libc::MADV_DONTNEED) };
    assert_eq!(rc, 0);
}

#[test]
fn runs_survive_install_and_detach_at_every_page_size() {
    for transfer in BOTH {
        for page_bytes in (12..=21).map(|shift| 1usize << shift) {
            let space = space(transfer, 1);
            for pages in [1, 3, 7, 16, 64] {
                if pages * page_bytes > 16 << 20 {
                    continue;
                }
                let layout = run_layout(pages + 1, page_bytes);
                let at = space.map(layout).unwrap() + page_bytes;
                let mut frame = numbered(&space, page_bytes, pages, 1);
                for _ in 0..2 {
                    space.install(0, at, frame).unwrap();
                    frame = space.detach(0, at, page_bytes, pages).unwrap();
                    let expected: Vec<_> = (1..=pages as u8).collect();
                    assert_eq!(numbers(frame.as_ref(), page_bytes), expected);
                    assert!(!space.is_present(at + pages * page_bytes - 4096));
                }
                space.unmap(at - page_bytes, layout);
            }
        }
    }
}

#[test]
fn detached_run_ends_before_an_absent_page_and_a_page_partly_there_is_whole() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [8192, 65536, 2 << 20] {
            let layout = run_layout(6, page_bytes);
            let base = space.map(layout).unwrap();
            let page = |number: usize| base + number * page_bytes;
            space
                .install(0, base, numbered(&space, page_bytes, 6, 1))
                .unwrap();
            // From the last kernel page of page 1 to the first of page 3, and one in the middle of the run that follows.
            drop_range(page(2) - 4096, page_bytes + 2 * 4096);
            drop_range(page(4), 4096);
            let frame = space.detach(0, base, page_bytes, 6).unwrap();
            assert_eq!(frame.as_ref().len(), 2 * page_bytes);
            let (there, hole) = frame.as_ref().split_at(2 * page_bytes - 4096);
            assert_eq!(numbers(&there[..page_bytes], page_bytes), [1]);
            assert!(there[page_bytes..].iter().all(|&byte| byte == 2));
            assert!(hole.iter().all(|&byte| byte == 0));
            assert!(space.is_present(page(3) + 4096));
            assert!(matches!(
                space.detach(0, page(2), page_bytes, 4),
                Err(DetachError::Absent)
            ));
            let frame = space.detach(0, page(3), page_bytes, 3).unwrap();
            assert_eq!(frame.as_ref().len(), 3 * page_bytes);
            for (number, page) in (4..).zip(frame.as_ref().chunks(page_bytes)) {
                let holes = usize::from(number < 6) * 4096;
                assert!(page[..holes].iter().all(|&byte| byte == 0));
                assert!(page[holes..].iter().all(|&byte| byte == number));
            }
            space.unmap(base, layout);
        }
    }
}

#[test]
fn detached_run_ends_before_a_pinned_page_which_stays_whole() {
    let space = space(Transfer::Move, 1);
    for page_bytes in [4096, 65536, 2 << 20] {
        let layout = run_layout(5, page_bytes);
        let base = space.map(layout).unwrap();
        let page = |number: usize| base + number * page_bytes;
        space
            .install(0, base, numbered(&space, page_bytes, 5, 1))
            .unwrap();
        // The page has a hole, too, which stays one.
        if page_bytes > 4096 {
            drop_range(page(2), 4096);
        }
        let Some(pinned) = Pinned::new(
            "detached_run_ends_before_a_pinned_page_which_stays_whole",
            page(3) - 4096,
            4096,
        ) else {
            return;
        };
        let frame = space.detach(0, base, page_bytes, 5).unwrap();
        assert_eq!(numbers(frame.as_ref(), page_bytes), [1, 2]);
        for _ in 0..2 {
            assert_eq!(space.is_present(page(2)), page_bytes == 4096);
            let hole = if page_bytes > 4096 { 4096 } else { 0 };
            let rest = mapped(page(2) + hole, 3 * page_bytes - hole);
            let (pinned_page, behind) = rest.split_at(page_bytes - hole);
            assert!(pinned_page.iter().all(|&byte| byte == 3));
            assert_eq!(numbers(behind, page_bytes), [4, 5]);
            assert!(matches!(
                space.detach(0, page(2), page_bytes, 3),
                Err(DetachError::Held)
            ));
        }
        drop(pinned);
        assert_eq!(
            space
                .detach(0, page(2), page_bytes, 3)
                .unwrap()
                .as_ref()
                .len(),
            3 * page_bytes
        );
        space.unmap(base, layout);
    }
}

#[test]
fn installed_run_stops_at_a_mapped_page_and_hands_the_rest_back() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [65536, 2 << 20] {
            let layout = run_layout(4, page_bytes);
            // A whole page is there; then all but its first half, so that half of the page has gone in when the kernel refuses.
            for dropped in [0, page_bytes / 2] {
                let base = space.map(layout).unwrap();
                let there = base + 2 * page_bytes;
                space
                    .install(0, there, numbered(&space, page_bytes, 1, 9))
                    .unwrap();
                drop_range(there, dropped);
                let error = space
                    .install(0, base, numbered(&space, page_bytes, 4, 1))
                    .unwrap_err();
                assert!(matches!(error.kind, InstallErrorKind::Exists));
                assert_eq!(numbers(error.frame.as_ref(), page_bytes), [3, 4]);
                assert_eq!(numbers(mapped(base, 2 * page_bytes), page_bytes), [1, 2]);
                assert_eq!(space.is_present(there), dropped == 0);
                assert_eq!(byte(there + page_bytes - 1), 9);
                assert!(!space.is_present(there + page_bytes));
                drop(space.detach(0, there, page_bytes, 1).unwrap());
                space.install(0, there, error.frame).unwrap();
                let all = mapped(base, 4 * page_bytes);
                assert_eq!(numbers(all, page_bytes), [1, 2, 3, 4]);
                space.unmap(base, layout);
            }
        }
    }
}

#[test]
fn threads_asleep_all_over_a_run_wake_when_it_is_installed() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = run_layout(4, 65536);
        let base = space.map(layout).unwrap();
        let sleepers: Vec<_> = (0..4)
            .map(|page| thread::spawn(move || byte(base + page * 65536 + 40_000)))
            .collect();
        let mut faults = Vec::new();
        while faults.len() < 4 {
            poll(
                &mut [PollFd::new(space.fault_fd(0).unwrap(), PollFlags::POLLIN)],
                PollTimeout::NONE,
            )
            .unwrap();
            space.faults(0, &mut faults).unwrap();
        }
        space
            .install(0, base, numbered(&space, 65536, 4, 1))
            .unwrap();
        for (number, sleeper) in (1..).zip(sleepers) {
            assert_eq!(sleeper.join().unwrap(), number);
        }
        space.unmap(base, layout);
    }
}

#[test]
fn installed_run_heals_the_poisoned_pages_in_it() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = run_layout(5, 65536);
        let base = space.map(layout).unwrap();
        for page in [1, 3] {
            space.poison(0, base + page * 65536, 65536).unwrap();
        }
        space
            .install(0, base, numbered(&space, 65536, 5, 1))
            .unwrap();
        assert_eq!(numbers(mapped(base, 5 * 65536), 65536), [1, 2, 3, 4, 5]);
        space.unmap(base, layout);
    }
}

#[test]
fn run_across_a_mapping_that_the_program_divided_goes_as_far_as_its_pages_can() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = run_layout(6, 65536);
        let base = space.map(layout).unwrap();
        let page = |number: usize| base + number * 65536;
        // SAFETY: a page of the region.
        unsafe { libc::mprotect(page(1) as *mut _, 65536, libc::PROT_READ) };
        space
            .install(0, base, numbered(&space, 65536, 6, 1))
            .unwrap();
        let all = [1, 2, 3, 4, 5, 6];
        assert_eq!(numbers(mapped(base, 6 * 65536), 65536), all);
        let frame = space.detach(0, base, 65536, 6).unwrap();
        if transfer == Transfer::Move {
            assert_eq!(numbers(frame.as_ref(), 65536), [1]);
            let error = space.detach(0, page(1), 65536, 5).unwrap_err();
            assert!(matches!(error, DetachError::Os(_)), "{error:?}");
            let rest = space.detach(0, page(2), 65536, 4).unwrap();
            assert_eq!(numbers(rest.as_ref(), 65536), all[2..]);
        } else {
            assert_eq!(numbers(frame.as_ref(), 65536), all);
        }
        drop(frame);
        // Part of the region goes. It is mapped again, without faults, so that no other test's mapping comes to lie there.
        // SAFETY: a page of the region, replaced.
        unsafe {
            as_the_program(&space, || map_over(page(4), 65536, libc::PROT_NONE));
            libc::mprotect(page(1) as *mut _, 65536, libc::PROT_READ | libc::PROT_WRITE);
            libc::madvise(base as *mut _, 4 * 65536, libc::MADV_DONTNEED);
        }
        let error = space
            .install(0, base, numbered(&space, 65536, 6, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), all[4..]);
        let frame = space.detach(0, base, 65536, 6).unwrap();
        assert_eq!(numbers(frame.as_ref(), 65536), all[..4]);
        space.unmap(base, layout);
        let error = space.install(0, base, frame).unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), all[..4]);
    }
}

/// Runs what the program does to its mappings, while the space's messages are read: the kernel lets it go on only then.
fn as_the_program<T: Send>(space: &KernelSpace, act: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let acting = scope.spawn(act);
        while !acting.is_finished() {
            for shard in 0..space.shards() {
                space.faults(shard, &mut Vec::new()).unwrap();
            }
            thread::yield_now();
        }
        acting.join().unwrap()
    })
}

/// Maps anonymous memory of the program's own over what is there.
fn map_over(address: usize, len: usize, protection: libc::c_int) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the tests map over their own regions, whose pages they do not use any more.
    let mapped = unsafe { libc::mmap(address as *mut _, len, protection, flags, -1, 0) };
    assert_eq!(mapped as usize, address);
}

fn unmap_by_the_program(address: usize, len: usize) {
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munmap(address as *mut _, len) }, 0);
}

/// What `/proc/self/maps` says of the mapping that holds `address`.
fn protection(address: usize) -> Option<String> {
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

#[test]
fn what_the_program_maps_into_a_region_is_never_taken_for_its_pages() {
    for transfer in BOTH {
        let space = space(transfer, 2);
        let layout = Layout {
            stripe_bytes: 65536,
            ..run_layout(32, 4096)
        };
        let base = space.map(layout).unwrap();
        let page = |number: usize| base + number * 4096;
        for half in 0..2 {
            let frame = numbered(&space, 4096, 16, 1);
            space.install(half, page(16 * half), frame).unwrap();
        }
        // Across the two shards' stripes.
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        as_the_program(&space, || map_over(page(12), 8 * 4096, rw));
        for number in 12..20 {
            set(page(number), 99);
        }
        for shard in 0..2 {
            let mut news = Vec::new();
            space.unmapped(shard, &mut news);
            assert_eq!(news[0], page(12)..page(20));
            space.unmapped(shard, &mut news);
            assert_eq!(news.len(), 1, "told once");
        }
        let frame = space.detach(0, page(8), 4096, 8).unwrap();
        assert_eq!(numbers(frame.as_ref(), 4096), [9, 10, 11, 12]);
        for (shard, number) in [(0, 12), (0, 15), (1, 16), (1, 19)] {
            let error = space.detach(shard, page(number), 4096, 1).unwrap_err();
            assert!(matches!(error, DetachError::Absent), "{error:?}");
            space.poison(shard, page(number), 4096).unwrap();
            let frame = numbered(&space, 4096, 1, 7);
            let error = space.install(shard, page(number), frame).unwrap_err();
            assert!(matches!(error.kind, InstallErrorKind::Gone));
        }
        // A run goes in as far as it can.
        drop(frame);
        let error = space
            .install(0, page(8), numbered(&space, 4096, 8, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 4096), [5, 6, 7, 8]);
        let frame = space.detach(1, page(20), 4096, 12).unwrap();
        assert_eq!(
            numbers(frame.as_ref(), 4096),
            [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
        );
        space.unmap(base, layout);
        for number in 12..20 {
            assert_eq!(byte(page(number)), 99);
        }
        assert_eq!(protection(page(11)), None);
        unmap_by_the_program(page(12), 8 * 4096);
        // The addresses are as good as others from here on.
        let again = Layout {
            address: Some(base),
            ..layout
        };
        assert_eq!(space.map(again).unwrap(), base);
        space
            .install(0, page(12), numbered(&space, 4096, 1, 3))
            .unwrap();
        assert_eq!(byte(page(12)), 3);
        space.unmap(base, again);
    }
}

#[test]
fn page_that_the_program_unmaps_in_part_is_gone_and_what_is_left_of_it_raises_sigbus() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = run_layout(3, 65536);
        let base = space.map(layout).unwrap();
        as_the_program(&space, || unmap_by_the_program(base + 65536 + 8192, 4096));
        let error = space
            .install(0, base, numbered(&space, 65536, 3, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), [2, 3]);
        space.poison(0, base + 65536, 65536).unwrap();
        assert!(!system_call_can_read(base + 65536));
        assert!(!system_call_can_read(base + 2 * 65536 - 1));
        assert_eq!(numbers(mapped(base, 65536), 65536), [1]);
        space.unmap(base, layout);
        assert_eq!(protection(base + 65536), None);
    }
}

#[test]
fn pages_come_and_go_while_the_program_maps_over_others() {
    const PAGES: usize = 64;
    for transfer in BOTH {
        let space = space(transfer, 1);
        let layout = run_layout(PAGES, 4096);
        let base = space.map(layout).unwrap();
        let stop = AtomicBool::new(false);
        let taken = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    space.faults(0, &mut Vec::new()).unwrap();
                    thread::yield_now();
                }
            });
            // Takes out all that there is, and puts it back, all the time.
            let mover = scope.spawn(|| {
                for (taken, number) in (0..PAGES).cycle().enumerate() {
                    if stop.load(Ordering::Relaxed) {
                        return taken;
                    }
                    let address = base + number * 4096;
                    let frame = match space.detach(0, address, 4096, 1) {
                        Ok(frame) => frame,
                        Err(DetachError::Absent) => space.new_frame(4096, 1).unwrap(),
                        Err(error) => panic!("{error:?}"),
                    };
                    assert_ne!(frame.as_ref()[0], 99, "a page of the program's was taken");
                    match space.install(0, address, frame).map_err(|error| error.kind) {
                        Ok(()) | Err(InstallErrorKind::Gone) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
                unreachable!("the range is endless");
            });
            for number in 0..PAGES {
                let address = base + number * 4096;
                map_over(address, 4096, libc::PROT_READ | libc::PROT_WRITE);
                set(address, 99);
                thread::yield_now();
                for number in 0..=number {
                    assert_eq!(byte(base + number * 4096), 99, "page {number} was touched");
                }
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap();
            mover.join().unwrap()
        });
        assert!(taken > 0);
        space.unmap(base, layout);
        unmap_by_the_program(base, PAGES * 4096);
    }
}

#[test]
fn region_at_a_given_address_replaces_what_is_there_and_nothing_else() {
    let space = space(Transfer::Move, 2);
    for page_bytes in [4096, 65536] {
        let around = run_layout(4, page_bytes);
        // A region finds aligned addresses; the program has them afterwards.
        let start = space.map(around).unwrap();
        space.unmap(start, around);
        map_over(start, 4 * page_bytes, libc::PROT_READ | libc::PROT_WRITE);
        for number in 0..4 {
            set(start + number * page_bytes, 50);
        }
        let layout = Layout {
            address: Some(start + page_bytes),
            ..run_layout(2, page_bytes)
        };
        assert_eq!(space.map(layout).unwrap(), start + page_bytes);
        assert_eq!((byte(start), byte(start + 3 * page_bytes)), (50, 50));
        let shard = layout.shard_of(0, 2);
        space
            .install(
                shard,
                start + page_bytes,
                numbered(&space, page_bytes, 2, 1),
            )
            .unwrap();
        assert_eq!(byte(start + page_bytes), 1);
        // Not over another region, and not at just any address.
        let refused = |address| {
            let layout = Layout {
                address: Some(address),
                ..layout
            };
            space.map(layout).unwrap_err().kind()
        };
        use std::io::ErrorKind::{AlreadyExists, InvalidInput};
        assert_eq!(refused(start), AlreadyExists);
        assert_eq!(refused(start + 2 * page_bytes), AlreadyExists);
        assert_eq!(refused(start + 2048), InvalidInput);
        assert_eq!(refused(0), InvalidInput);
        assert_eq!(refused(usize::MAX - page_bytes + 1), InvalidInput);
        assert_eq!(byte(start + page_bytes), 1);
        space.unmap(start + page_bytes, layout);
        assert_eq!((byte(start), byte(start + 3 * page_bytes)), (50, 50));
        assert_eq!(protection(start + page_bytes), None);
        unmap_by_the_program(start, page_bytes);
        unmap_by_the_program(start + 3 * page_bytes, page_bytes);
    }
}

#[test]
fn new_region_keeps_out_of_what_the_program_has_unmapped_of_another() {
    let space = space(Transfer::Move, 1);
    let layout = run_layout(64, 65536);
    let base = space.map(layout).unwrap();
    as_the_program(&space, || unmap_by_the_program(base + 65536, 62 * 65536));
    let small: Vec<usize> = (0..32)
        .map(|_| space.map(run_layout(2, 4096)).unwrap())
        .collect();
    for &address in &small {
        assert!(address + 8192 <= base || base + layout.bytes <= address);
        space.unmap(address, run_layout(2, 4096));
    }
    space.unmap(base, layout);
}

#[test]
fn read_only_region_is_paged_and_cannot_be_written() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let layout = Layout {
                read_only: true,
                ..run_layout(4, page_bytes)
            };
            let base = space.map(layout).unwrap();
            for round in 0..3 {
                space
                    .install(0, base, numbered(&space, page_bytes, 4, round))
                    .unwrap();
                let there = numbers(mapped(base, 4 * page_bytes), page_bytes);
                assert_eq!(there, [round, round + 1, round + 2, round + 3]);
                assert_eq!(protection(base + page_bytes).as_deref(), Some("r--p"));
                let frame = space.detach(0, base, page_bytes, 4).unwrap();
                assert_eq!(numbers(frame.as_ref(), page_bytes), there);
                assert!(!space.is_present(base));
            }
            space.poison(0, base, page_bytes).unwrap();
            space
                .install(0, base, numbered(&space, page_bytes, 1, 9))
                .unwrap();
            assert_eq!(numbers(mapped(base, page_bytes), page_bytes), [9]);
            assert_eq!(protection(base).as_deref(), Some("r--p"));
            space.unmap(base, layout);
        }
    }
}

#[test]
fn frame_is_cut_and_joined_and_what_is_dropped_gives_its_memory_back() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let mut first = numbered(&space, page_bytes, 6, 1);
            let address = first.as_ref().as_ptr() as usize;
            let mut middle = first.split_off(2 * page_bytes);
            let last = middle.split_off(3 * page_bytes);
            assert_eq!(numbers(first.as_ref(), page_bytes), [1, 2]);
            assert_eq!(numbers(middle.as_ref(), page_bytes), [3, 4, 5]);
            let last = first.join(last).unwrap_err();
            let first = middle.join(first).unwrap_err();
            middle.join(last).unwrap();
            assert_eq!(numbers(middle.as_ref(), page_bytes), [3, 4, 5, 6]);
            drop(first);
            assert!(!space.is_present(address) && !space.is_present(address + page_bytes));
            // The vacant slots are found again.
            let again = numbered(&space, page_bytes, 2, 1);
            assert_eq!(again.as_ref().as_ptr() as usize, address);
            let mut again = again;
            again.join(middle).unwrap();
            let all = [1, 2, 3, 4, 5, 6];
            assert_eq!(numbers(again.as_ref(), page_bytes), all);
            for wrong in [0, 6 * page_bytes, page_bytes / 2] {
                let cut = std::panic::AssertUnwindSafe(|| drop(again.split_off(wrong)));
                assert!(std::panic::catch_unwind(cut).is_err(), "{wrong}");
            }
            drop(again);
            assert!((0..6).all(|page| !space.is_present(address + page * page_bytes)));
        }
    }
}

#[test]
fn frames_made_cut_joined_moved_and_dropped_at_random_never_overlap_and_leak_no_slot() {
    const PAGES_MAX: usize = 256;
    for transfer in BOTH {
        for seed in 1..=4u64 {
            let options = KernelSpaceOptions {
                frame_bytes_max: PAGES_MAX * 4096,
                transfer: Some(transfer),
                ..KernelSpaceOptions::default()
            };
            let space = KernelSpace::new(options).unwrap();
            let layout = run_layout(64, 4096);
            let base = space.map(layout).unwrap();
            let mut state = seed;
            let mut below = move |end: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % end as u64) as usize
            };
            // Frames with the value that each of their pages was filled with.
            let mut model: Vec<(KernelFrame, Vec<u8>)> = Vec::new();
            for step in 0..3000 {
                let held: usize = model.iter().map(|(_, values)| values.len()).sum();
                let pick = below(model.len().max(1));
                match below(6) {
                    0 | 1 => {
                        let pages = 1 + below(24);
                        match space.new_frame(4096, pages) {
                            Ok(mut frame) => {
                                assert!(held + pages <= PAGES_MAX);
                                let value = step as u8;
                                frame.as_mut().fill(value);
                                model.push((frame, vec![value; pages]));
                            }
                            // One page is always found. At these sizes a run is, too, while half of what may be held is not.
                            Err(_) => assert!(held + pages > PAGES_MAX || held > PAGES_MAX / 2),
                        }
                    }
                    _ if model.is_empty() => {}
                    2 => {
                        let (frame, values) = &mut model[pick];
                        if values.len() > 1 {
                            let at = 1 + below(values.len() - 1);
                            let rest = (frame.split_off(at * 4096), values.split_off(at));
                            model.push(rest);
                        }
                    }
                    3 => {
                        let (frame, values) = model.swap_remove(pick);
                        let behind = frame.as_ref().as_ptr_range().start;
                        let before = model
                            .iter_mut()
                            .find(|(before, _)| before.as_ref().as_ptr_range().end == behind);
                        match before {
                            Some((before, all)) => {
                                before.join(frame).unwrap();
                                all.extend(values);
                            }
                            None => model.push((frame, values)),
                        }
                    }
                    4 => drop(model.swap_remove(pick)),
                    _ => {
                        let (frame, values) = model.swap_remove(pick);
                        if values.len() > 64 {
                            continue;
                        }
                        space.install(0, base, frame).unwrap();
                        // May come back in shorter runs.
                        let mut done = 0;
                        while done < values.len() {
                            let at = base + done * 4096;
                            let frame = space.detach(0, at, 4096, values.len() - done).unwrap();
                            let pages = frame.as_ref().len() / 4096;
                            model.push((frame, values[done..done + pages].to_vec()));
                            done += pages;
                        }
                    }
                }
                if step % 16 == 0 {
                    for (frame, values) in &model {
                        assert_eq!(&numbers(frame.as_ref(), 4096), values, "seed {seed}");
                    }
                }
            }
            drop(model);
            let all: Vec<_> = (0..PAGES_MAX)
                .map(|_| space.new_frame(4096, 1).unwrap())
                .collect();
            assert!(space.new_frame(4096, 1).is_err());
            drop(all);
            space.unmap(base, layout);
        }
    }
}

/// What ages pages beside a move (here the program, elsewhere reclaim or DAMON) makes the kernel try again inside the move. From Linux 6.18 on it then
/// says that the destination exists, because of the pages that it has just moved there itself.
#[test]
fn pages_that_age_while_they_move_are_neither_lost_nor_called_refused() {
    for (page_bytes, pages) in [(4096, 1), (65536, 1), (4096, 64), (65536, 8)] {
        let space = space(Transfer::Move, 1);
        let layout = run_layout(pages, page_bytes);
        let base = space.map(layout).unwrap();
        let frame = numbered(&space, page_bytes, pages, 1);
        let expected: Vec<_> = (1..=pages as u8).collect();
        let slots = AtomicUsize::new(frame.as_ref().as_ptr() as usize);
        let running = AtomicBool::new(true);
        thread::scope(|scope| {
            scope.spawn(|| {
                while running.load(Ordering::Relaxed) {
                    for start in [base, slots.load(Ordering::Relaxed)] {
                        // SAFETY: advice that leaves bytes alone, about mappings that outlive the thread.
                        unsafe { libc::madvise(start as *mut _, layout.bytes, libc::MADV_COLD) };
                    }
                }
            });
            let _stop = Stop(&running);
            let mut frame = frame;
            let since = Instant::now();
            while since.elapsed() < Duration::from_secs(1) {
                for _ in 0..64 {
                    space.install(0, base, frame).unwrap();
                    frame = space.detach(0, base, page_bytes, pages).unwrap();
                    slots.store(frame.as_ref().as_ptr() as usize, Ordering::Relaxed);
                }
                assert_eq!(numbers(frame.as_ref(), page_bytes), expected);
            }
        });
        space.unmap(base, layout);
    }
}

/// Ends what runs beside a test, however the test ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
