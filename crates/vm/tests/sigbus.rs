//! Faults served in the threads that raise them, and every other SIGBUS.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    alloc::{GlobalAlloc, Layout as AllocLayout, System},
    cell::Cell,
    fs::File,
    io::Read,
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    process::Command,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use farpage_vm::{
    AddressSpace, Fault, KernelFrame, KernelSpace, KernelSpaceOptions, Layout, SCATTERED_PAGES_MAX,
    sigbus::{FaultHandler, Registration, STACK_BYTES, Served},
};
use nix::errno::Errno;

const PAGE: usize = 4096;

/// Counts what each thread allocates and frees.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: AllocLayout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn space() -> Arc<KernelSpace> {
    let options = KernelSpaceOptions {
        in_thread: true,
        frame_bytes_max: 16 << 20,
        ..KernelSpaceOptions::default()
    };
    Arc::new(KernelSpace::new(options).unwrap())
}

fn counter(address: usize) -> &'static AtomicU64 {
    // SAFETY: an aligned address in a region that its test keeps mapped.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

/// A region with the smallest pager that serves in-thread: pages lie in a list while they are not mapped.
struct Toy {
    space: Arc<KernelSpace>,
    base: usize,
    layout: Layout,
    away: Vec<Mutex<Option<KernelFrame>>>,
    /// A page that can not be had.
    refused: Option<usize>,
    /// Whether pages are copied in.
    copies: bool,
    faults: AtomicUsize,
    writes: AtomicUsize,
    /// What the handler allocated.
    allocations: AtomicUsize,
}

impl Toy {
    fn new(pages: usize, refused: Option<usize>) -> Arc<Self> {
        let space = space();
        let layout = Layout {
            bytes: pages * PAGE,
            page_bytes: PAGE,
            stripe_bytes: PAGE,
            first_shard: 0,
            address: None,
            read_only: false,
        };
        let base = space.map(layout).unwrap();
        let copies = space.can_scatter(PAGE);
        let away = (0..pages)
            .map(|_| Mutex::new(Some(space.new_frame(PAGE, 1).unwrap())))
            .collect();
        Arc::new(Self {
            space,
            base,
            layout,
            away,
            refused,
            copies,
            faults: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
            allocations: AtomicUsize::new(0),
        })
    }

    fn register(self: &Arc<Self>) -> Registration {
        let handler = Arc::clone(self);
        Registration::new(self.base..self.base + self.layout.bytes, handler).unwrap()
    }

    fn address(&self, page: usize) -> usize {
        self.base + page * PAGE
    }

    /// Takes pages out by copying. Returns how many.
    fn evict_scattered(&self, pages: impl Iterator<Item = usize>) -> usize {
        let mut away: Vec<_> = pages
            .map(|page| (page, self.away[page].lock().unwrap()))
            .filter(|(_, away)| away.is_none())
            .collect();
        let addresses: Vec<_> = away.iter().map(|(page, _)| self.address(*page)).collect();
        let frame = |_: &usize| self.space.new_frame(PAGE, 1).unwrap();
        let mut frames: Vec<_> = addresses.iter().map(frame).collect();
        let taken = self.space.detach_scattered(0, &addresses, &mut frames);
        for ((_, away), frame) in away.iter_mut().zip(frames).take(taken) {
            **away = Some(frame);
        }
        taken
    }

    fn evict(&self, page: usize) {
        let mut away = self.away[page].lock().unwrap();
        if away.is_none() {
            let frame = self.space.detach(0, self.address(page), PAGE, 1).unwrap();
            *away = Some(frame);
        }
    }
}

// SAFETY: std's mutex neither allocates nor is held while a page is touched.
unsafe impl FaultHandler for Toy {
    fn fault(&self, fault: Fault) -> Served {
        let before = ALLOCATIONS.get();
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.writes
            .fetch_add(usize::from(fault.write), Ordering::Relaxed);
        let page = (fault.address - self.base) / PAGE;
        let served = if self.refused == Some(page) {
            Served::NotMine
        } else {
            let mut away = self.away[page].lock().unwrap();
            if let Some(frame) = away.take() {
                let address = self.address(page);
                let copied = self.copies && self.space.install_copy(0, address, &frame);
                if !copied {
                    self.space.install(0, address, frame).unwrap();
                }
            }
            Served::Retry
        };
        self.allocations
            .fetch_add(ALLOCATIONS.get() - before, Ordering::Relaxed);
        served
    }
}

/// A region of one page whose handler calls `serve` and then lets the page be.
struct Calling<F> {
    toy: Arc<Toy>,
    serve: F,
}

// SAFETY: as `Toy`; what the tests call is allowed in a handler.
unsafe impl<F: Fn() + Send + Sync> FaultHandler for Calling<F> {
    fn fault(&self, fault: Fault) -> Served {
        (self.serve)();
        self.toy.fault(fault)
    }
}

fn calling(serve: impl Fn() + Send + Sync + 'static) -> (usize, Registration) {
    let toy = Toy::new(1, None);
    let base = toy.base;
    let handler = Arc::new(Calling { toy, serve });
    let registration = Registration::new(base..base + PAGE, handler).unwrap();
    (base, registration)
}

/// Threads count up in all pages, half of them walking the pages together and half against them, while `evict`, told which time it is, takes some out again and again. No count is lost.
fn count_up(toy: &Toy, threads: usize, rounds: usize, mut evict: impl FnMut(usize) + Send) {
    let (pages, stop) = (toy.away.len(), AtomicBool::new(false));
    thread::scope(|scope| {
        let stop = &stop;
        let evictor = scope.spawn(move || {
            for time in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                evict(time);
            }
        });
        let writers: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    for step in 0..rounds * pages {
                        let page = step % pages;
                        let page = if thread % 2 == 0 {
                            page
                        } else {
                            pages - 1 - page
                        };
                        counter(toy.address(page)).fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        evictor.join().unwrap();
    });
    for page in 0..pages {
        let count = counter(toy.address(page)).load(Ordering::Relaxed);
        assert_eq!(count, (threads * rounds) as u64, "page {page}");
    }
}

#[test]
fn threads_serve_their_own_faults_and_lose_no_write() {
    const THREADS: usize = 4;
    const PAGES: usize = 32;
    const ROUNDS: usize = 400;
    let toy = Toy::new(PAGES, None);
    let _registration = toy.register();
    count_up(&toy, THREADS, ROUNDS, |time| toy.evict(time % PAGES));
    assert!(toy.faults.load(Ordering::Relaxed) >= PAGES);
    assert_eq!(toy.allocations.load(Ordering::Relaxed), 0);
    let mut reported = Vec::new();
    toy.space.faults(0, &mut reported).unwrap();
    assert_eq!(reported, []);
}

/// Pages that are copied in and out. `None`, and says so: this kernel cannot.
fn copying(test: &str, pages: usize) -> Option<Arc<Toy>> {
    let toy = Toy::new(pages, None);
    if !toy.copies {
        eprintln!(
            "SKIPPED: {test}: this kernel cannot drop scattered pages of a process by itself (kernel 6.14)"
        );
        return None;
    }
    Some(toy)
}

#[test]
fn pages_that_are_copied_out_while_threads_write_lose_no_write() {
    const THREADS: usize = 3;
    const PAGES: usize = 64;
    const ROUNDS: usize = 4000;
    let Some(toy) = copying(
        "pages_that_are_copied_out_while_threads_write_lose_no_write",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    let mut taken = 0;
    count_up(&toy, THREADS, ROUNDS, |time| {
        // Every second one, or every third, from somewhere on: the others stay.
        let pages = (time % 7..PAGES).step_by(2 + time % 2);
        taken += toy.evict_scattered(pages.take(SCATTERED_PAGES_MAX));
    });
    assert!(taken >= PAGES, "{taken} pages went out");
    assert_eq!(toy.allocations.load(Ordering::Relaxed), 0);
}

#[test]
fn pages_are_copied_out_up_to_the_first_that_is_not_there() {
    const PAGES: usize = 8;
    let Some(toy) = copying(
        "pages_are_copied_out_up_to_the_first_that_is_not_there",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    for page in 0..PAGES {
        counter(toy.address(page)).store(page as u64 + 1, Ordering::Relaxed);
    }
    // SAFETY: a page of the test's region.
    let dropped = unsafe { libc::madvise(toy.address(4) as *mut _, PAGE, libc::MADV_DONTNEED) };
    assert_eq!(dropped, 0);
    assert_eq!(toy.evict_scattered([1, 3, 4, 6].into_iter()), 2);
    let is_there = |page: usize| toy.space.is_present(toy.address(page));
    let there: Vec<_> = (0..PAGES).filter(|&page| is_there(page)).collect();
    assert_eq!(there, [0, 2, 5, 6, 7]);
    // What was protected meanwhile can be written without a fault, and what left comes back.
    let before = toy.faults.load(Ordering::Relaxed);
    for page in [0, 1, 2, 3, 5, 6, 7] {
        let value = counter(toy.address(page)).fetch_add(10, Ordering::Relaxed);
        assert_eq!(value, page as u64 + 1);
    }
    assert_eq!(toy.faults.load(Ordering::Relaxed) - before, 2);
}

#[test]
fn pages_are_copied_out_up_to_what_the_program_maps_among_them() {
    const PAGES: usize = 8;
    let Some(toy) = copying(
        "pages_are_copied_out_up_to_what_the_program_maps_among_them",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    for page in 0..PAGES {
        counter(toy.address(page)).store(page as u64 + 1, Ordering::Relaxed);
    }
    // In place of the fourth page the program has memory of its own.
    thread::scope(|scope| {
        let address = toy.address(3);
        let mapping = scope.spawn(move || {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: a page of the test's region, which nobody uses any more.
            unsafe { libc::mmap(address as *mut _, PAGE, libc::PROT_READ, flags, -1, 0) as usize }
        });
        while !mapping.is_finished() {
            toy.space.faults(0, &mut Vec::new()).unwrap();
        }
        assert_eq!(mapping.join().unwrap(), address);
    });
    assert_eq!(toy.evict_scattered([0, 2, 5].into_iter()), 2);
    assert_eq!(toy.evict_scattered([3, 5].into_iter()), 0);
    assert_eq!(toy.evict_scattered([5, 7].into_iter()), 2);
    let is_there = |page: usize| toy.space.is_present(toy.address(page));
    let there: Vec<_> = (0..PAGES).filter(|&page| is_there(page)).collect();
    assert_eq!(there, [1, 4, 6]);
    for page in [0, 1, 2, 4, 5, 6, 7] {
        let value = counter(toy.address(page)).fetch_add(10, Ordering::Relaxed);
        assert_eq!(value, page as u64 + 1);
    }
}

#[test]
fn allocations_are_counted() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2);
}

#[test]
fn reads_and_writes_are_told_apart() {
    let toy = Toy::new(2, None);
    let _registration = toy.register();
    counter(toy.address(0)).load(Ordering::Relaxed);
    let expected = if cfg!(target_arch = "x86_64") { 0 } else { 1 };
    assert_eq!(toy.writes.load(Ordering::Relaxed), expected);
    counter(toy.address(1)).store(1, Ordering::Relaxed);
    assert_eq!(toy.writes.load(Ordering::Relaxed), expected + 1);
}

#[test]
fn system_calls_fail_on_absent_pages_and_work_on_present_ones() {
    let toy = Toy::new(1, None);
    let _registration = toy.register();
    let mut zeros = File::open("/dev/zero").unwrap();
    // SAFETY: a region that stays mapped; the file is the only one to write it.
    let page = unsafe { std::slice::from_raw_parts_mut(toy.base as *mut u8, PAGE) };
    assert_eq!(
        zeros.read(page).unwrap_err().raw_os_error(),
        Some(libc::EFAULT)
    );
    counter(toy.base).load(Ordering::Relaxed);
    assert_eq!(zeros.read(page).unwrap(), PAGE);
}

#[test]
fn errno_is_as_before() {
    let (address, _registration) = calling(|| Errno::set_raw(libc::EIO));
    Errno::set_raw(libc::EXDEV);
    counter(address).store(1, Ordering::Relaxed);
    assert_eq!(Errno::last_raw(), libc::EXDEV);
}

#[test]
fn threads_with_little_stack_and_without_one_for_signals_are_served() {
    // Nearly all of the stack that handlers are promised.
    let use_stack = || {
        let mut bytes = [0u8; STACK_BYTES - (16 << 10)];
        std::hint::black_box(&mut bytes).fill(1);
    };
    for alternate in [true, false] {
        let (address, registration) = calling(use_stack);
        let thread = thread::Builder::new().stack_size(48 << 10);
        let thread = thread.spawn(move || {
            if !alternate {
                // SAFETY: all zeros is a valid stack_t.
                let mut none: libc::stack_t = unsafe { std::mem::zeroed() };
                none.ss_flags = libc::SS_DISABLE;
                // SAFETY: nothing of this thread is on its alternate stack.
                unsafe { libc::sigaltstack(&none, ptr::null_mut()) };
            }
            counter(address).fetch_add(1, Ordering::Relaxed)
        });
        assert_eq!(thread.unwrap().join().unwrap(), 0);
        drop(registration);
    }
}

#[test]
fn more_threads_than_stacks_in_stock_are_served_at_once() {
    const THREADS: usize = 100;
    static SERVING: AtomicUsize = AtomicUsize::new(0);
    let regions: Vec<_> = (0..THREADS)
        .map(|_| {
            calling(|| {
                SERVING.fetch_add(1, Ordering::Relaxed);
                while SERVING.load(Ordering::Relaxed) < THREADS {
                    thread::yield_now();
                }
            })
        })
        .collect();
    thread::scope(|scope| {
        for (address, _) in &regions {
            scope.spawn(|| counter(*address).store(1, Ordering::Relaxed));
        }
    });
    assert_eq!(SERVING.load(Ordering::Relaxed), THREADS, "each served once");
    for (address, _) in &regions {
        assert_eq!(counter(*address).load(Ordering::Relaxed), 1);
    }
}

#[test]
fn signals_wait_until_the_fault_is_served() {
    static ARRIVED: AtomicUsize = AtomicUsize::new(0);
    static ARRIVED_MEANWHILE: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn arrived(_: libc::c_int) {
        // Enough to lay over what the fault left on the alternate stack.
        std::hint::black_box([1u8; 1024]);
        ARRIVED.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = arrived as *const () as usize;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the handler counts and returns.
    Errno::result(unsafe { libc::sigaction(libc::SIGUSR1, &action, ptr::null_mut()) }).unwrap();
    let (address, _registration) = calling(|| {
        // SAFETY: sends a signal to this thread.
        unsafe { libc::raise(libc::SIGUSR1) };
        ARRIVED_MEANWHILE.fetch_add(ARRIVED.load(Ordering::Relaxed), Ordering::Relaxed);
    });
    counter(address).store(1, Ordering::Relaxed);
    assert_eq!(ARRIVED_MEANWHILE.load(Ordering::Relaxed), 0);
    assert_eq!(ARRIVED.load(Ordering::Relaxed), 1);
}

#[test]
fn end_of_a_registration_waits_for_its_handlers_and_for_no_others() {
    static ENTERED: AtomicUsize = AtomicUsize::new(0);
    static RELEASED: AtomicBool = AtomicBool::new(false);
    static SERVED: AtomicBool = AtomicBool::new(false);
    let (address, registration) = calling(|| {
        ENTERED.store(1, Ordering::SeqCst);
        while !RELEASED.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        SERVED.store(true, Ordering::SeqCst);
    });
    thread::scope(|scope| {
        scope.spawn(|| counter(address).store(1, Ordering::Relaxed));
        while ENTERED.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // Others come and go meanwhile.
        let (other, others) = calling(|| {});
        counter(other).store(1, Ordering::Relaxed);
        drop(others);
        let ending = scope.spawn(|| {
            ENTERED.store(2, Ordering::SeqCst);
            drop(registration);
            SERVED.load(Ordering::SeqCst)
        });
        while ENTERED.load(Ordering::SeqCst) < 2 {
            thread::yield_now();
        }
        RELEASED.store(true, Ordering::SeqCst);
        assert!(ending.join().unwrap());
    });
}

#[test]
fn registrations_come_and_go_while_others_are_served() {
    let toy = Toy::new(8, None);
    let registration = toy.register();
    let stop = AtomicBool::new(false);
    let steps: u64 = thread::scope(|scope| {
        let counting = [0, 1].map(|thread| {
            let (toy, stop) = (&toy, &stop);
            scope.spawn(move || {
                let mut steps = 0;
                while !stop.load(Ordering::Relaxed) {
                    toy.evict((steps + thread) % 8);
                    counter(toy.address(steps % 8)).fetch_add(1, Ordering::Relaxed);
                    steps += 1;
                }
                steps as u64
            })
        });
        for _ in 0..2000 {
            let (address, other) = calling(|| {});
            counter(address).store(1, Ordering::Relaxed);
            assert_eq!(counter(address).load(Ordering::Relaxed), 1);
            drop(other);
        }
        stop.store(true, Ordering::Relaxed);
        counting.map(|thread| thread.join().unwrap()).iter().sum()
    });
    let counted = (0..8).map(|page| counter(toy.address(page)).load(Ordering::Relaxed));
    assert_eq!(counted.sum::<u64>(), steps);
    drop(registration);
}

#[test]
#[should_panic(expected = "overlaps")]
fn ranges_that_overlap_are_our_own_mistake() {
    let toy = Toy::new(2, None);
    let _registration = toy.register();
    let _ = Registration::new(toy.base + PAGE..toy.base + 3 * PAGE, toy);
}

/// Runs `child` in a process of its own, whose SIGBUS handler nobody has touched, and says how it ended.
fn in_a_process_of_its_own(test: &str, child: impl FnOnce()) -> Option<std::process::ExitStatus> {
    const MARK: &str = "FARPAGE_TEST_SIGBUS_CHILD";
    if std::env::var_os(MARK).is_some() {
        child();
        return None;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, "1")
        .output()
        .unwrap();
    Some(status.status)
}

/// An address behind the end of the file that is mapped there.
fn behind_the_end_of_a_file() -> usize {
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 * PAGE as u64).unwrap();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(ptr::null_mut(), 2 * PAGE, prot, libc::MAP_SHARED, fd, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    file.set_len(PAGE as u64).unwrap();
    start as usize + PAGE
}

#[test]
fn foreign_sigbus_reaches_the_handler_that_was_there_before() {
    static TOUCHED: AtomicUsize = AtomicUsize::new(0);
    static MASKED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn before(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel's, valid while the handler runs.
        let address = unsafe { (*info).si_addr() } as usize;
        TOUCHED.store(address, Ordering::Relaxed);
        // SAFETY: all zeros is a valid set; asks only.
        let blocked = unsafe {
            let mut held: libc::sigset_t = std::mem::zeroed();
            libc::sigprocmask(libc::SIG_BLOCK, ptr::null(), &mut held);
            libc::sigismember(&held, libc::SIGBUS) + 2 * libc::sigismember(&held, libc::SIGUSR1)
        };
        MASKED.store(blocked as usize, Ordering::Relaxed);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces the page that this test maps.
        unsafe { libc::mmap((address & !(PAGE - 1)) as *mut _, PAGE, prot, flags, -1, 0) };
    }
    let ended = in_a_process_of_its_own(
        "foreign_sigbus_reaches_the_handler_that_was_there_before",
        || {
            // SAFETY: all zeros is a valid sigaction.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = before as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            // SAFETY: the handler does what is allowed in one.
            Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) })
                .unwrap();
            let toy = Toy::new(2, Some(1));
            let _registration = toy.register();
            let foreign = behind_the_end_of_a_file() + 24;
            counter(foreign).store(7, Ordering::Relaxed);
            assert_eq!(TOUCHED.load(Ordering::Relaxed), foreign);
            assert_eq!(MASKED.load(Ordering::Relaxed), 1);
            // Ours is served as before, and what is refused goes the same way.
            counter(toy.address(0)).store(7, Ordering::Relaxed);
            assert_eq!(TOUCHED.load(Ordering::Relaxed), foreign);
            let touched = AtomicBool::new(false);
            thread::scope(|scope| {
                // The handler maps over a page of the region: the kernel lets it go on when that is read.
                scope.spawn(|| {
                    while !touched.load(Ordering::Acquire) {
                        toy.space.faults(0, &mut Vec::new()).unwrap();
                        thread::yield_now();
                    }
                });
                counter(toy.address(1)).store(7, Ordering::Relaxed);
                touched.store(true, Ordering::Release);
            });
            assert_eq!(TOUCHED.load(Ordering::Relaxed), toy.address(1));
        },
    );
    assert!(ended.is_none_or(|status| status.success()), "{ended:?}");
}

fn default_sigbus() {
    // SAFETY: all zeros is SIG_DFL.
    let default = unsafe { std::mem::zeroed() };
    // SAFETY: installs no handler.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &default, ptr::null_mut()) }).unwrap();
}

fn assert_killed(ended: Option<std::process::ExitStatus>) {
    if let Some(status) = ended {
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
    }
}

#[test]
fn foreign_sigbus_kills_where_nobody_handled_it() {
    assert_killed(in_a_process_of_its_own(
        "foreign_sigbus_kills_where_nobody_handled_it",
        || {
            default_sigbus();
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            counter(behind_the_end_of_a_file()).store(7, Ordering::Relaxed);
        },
    ));
}

#[test]
fn foreign_sigbus_kills_a_program_with_the_handler_of_rust() {
    assert_killed(in_a_process_of_its_own(
        "foreign_sigbus_kills_a_program_with_the_handler_of_rust",
        || {
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            counter(behind_the_end_of_a_file()).store(7, Ordering::Relaxed);
        },
    ));
}

#[test]
fn sigbus_that_was_sent_kills_where_nobody_handled_it() {
    assert_killed(in_a_process_of_its_own(
        "sigbus_that_was_sent_kills_where_nobody_handled_it",
        || {
            default_sigbus();
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGBUS) };
        },
    ));
}

#[test]
fn refused_page_kills_at_the_address_that_was_touched() {
    let ended = in_a_process_of_its_own(
        "refused_page_kills_at_the_address_that_was_touched",
        touch_a_refused_page_while_traced,
    );
    assert!(ended.is_none_or(|status| status.success()), "{ended:?}");
}

fn touch_a_refused_page_while_traced() {
    const OFFSET: usize = 40;
    // SAFETY: the child ends by the signal; it allocates, which glibc supports after fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        default_sigbus();
        let toy = Toy::new(1, Some(0));
        let _registration = toy.register();
        // SAFETY: asks the parent, which waits, to trace: from here on each signal stops the child.
        unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
        counter(toy.base + OFFSET).store(1, Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut seen = Vec::new();
    let status = loop {
        let mut status = 0;
        // SAFETY: waits for the child made above.
        Errno::result(unsafe { libc::waitpid(child, &mut status, 0) }).unwrap();
        if !libc::WIFSTOPPED(status) {
            break status;
        }
        // SAFETY: all zeros is a valid siginfo; the child is stopped.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::ptrace(libc::PTRACE_GETSIGINFO, child, 0, &raw mut info);
            seen.push((info.si_signo, info.si_code, info.si_addr() as usize));
            libc::ptrace(
                libc::PTRACE_CONT,
                child,
                0,
                libc::c_long::from(info.si_signo),
            );
        }
    };
    assert!(libc::WIFSIGNALED(status), "{status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
    // Once on its way to the handler, once to kill.
    assert_eq!(seen.len(), 2, "{seen:x?}");
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].0, libc::SIGBUS);
    assert_eq!(seen[0].2 % PAGE, OFFSET);
}

#[test]
fn child_after_fork_can_register_for_itself() {
    let (address, _registration) = calling(|| {});
    // SAFETY: the child allocates, which glibc supports after fork, and ends without destructors of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let served = std::panic::catch_unwind(|| {
            let toy = Toy::new(1, None);
            // The parent's range is free here, also for the region.
            drop(Registration::new(
                address..address + PAGE,
                Arc::clone(&toy) as _,
            ));
            let _registration = toy.register();
            counter(toy.base).store(1, Ordering::Relaxed);
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(served.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    Errno::result(unsafe { libc::waitpid(child, &mut status, 0) }).unwrap();
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "{status:#x}"
    );
    counter(address).store(1, Ordering::Relaxed);
}
