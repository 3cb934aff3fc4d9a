//! Faults served by the threads that raise them: the same memory as ever, nothing that a signal
//! handler must not do, and every other SIGBUS delivered to the program.
//!
//! The rule it keeps: the program's own handler of SIGBUS is installed before the first runtime,
//! and returns once the cause of the signal has been mended, so that all tests share a process.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs::File,
    hint::black_box,
    io::{self, Read},
    mem,
    os::fd::IntoRawFd,
    ptr, slice,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use common::{
    Fabric, HookedStore, Memory, array_with, builder, fabrics, get, set, shared, stored,
    stored_here,
    words::{assert_filled, fill},
};
use farpage::{Advice, ByteSize, Codec, FaultMode, RegionOptions, RemoteArray, Runtime};
use farpage_testkit::{KIB, MIB, Relay, Rng, Watchdog, mix, seed, wait_until};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

/// The system's allocator. Counts calls of threads that have `WATCHED` set.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if WATCHED.get() {
        counted();
    }
}

/// Counts a call. A function of its own, so that a debugger can stop here.
#[inline(never)]
fn counted() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: the system's allocator does the work; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Counts calls of the allocator by this thread while `work`, which allocates nothing itself, runs.
fn watched(work: impl FnOnce()) {
    WATCHED.set(true);
    work();
    WATCHED.set(false);
}

/// The address of the last SIGBUS that came to the program's own handler.
static LOST: AtomicUsize = AtomicUsize::new(0);
/// Address of a mapping that is longer than its file. The handler lengthens the file.
static SHORT: AtomicUsize = AtomicUsize::new(0);
static SHORT_FILE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's, valid while the handler runs.
    let address = unsafe { (*info).si_addr() } as usize;
    if SHORT.load(Ordering::SeqCst) == address {
        // SAFETY: a file of this test's.
        unsafe { libc::ftruncate(SHORT_FILE.load(Ordering::SeqCst), PAGE as libc::off_t) };
        SHORT.store(0, Ordering::SeqCst);
    } else {
        LOST.store(address, Ordering::SeqCst);
        // Another thread brings the page back; until then the access fails again.
        thread::sleep(Duration::from_millis(1));
    }
}

/// Installs the program's handler. Must be called before the first runtime is built.
fn install_handler() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: a valid action, whose handler keeps to what is allowed in one.
        let installed = unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut())
        };
        assert_eq!(installed, 0);
    });
}

/// Begins a test as [`common::begin`] does, with the program's handler installed.
fn begin(seconds: u64) -> Option<Watchdog> {
    install_handler();
    common::begin(seconds)
}

fn runtime(budget_bytes: usize, server: Option<&str>) -> Runtime {
    let builder = builder(budget_bytes, PAGE).fault_mode(FaultMode::InThread);
    let builder = match server {
        Some(url) => builder.server(url),
        None => builder,
    };
    builder.build().unwrap()
}

#[test]
fn threads_see_the_same_array_as_without_paging() {
    let Some(_watchdog) = begin(120) else { return };
    let seed = seed();
    let (threads, len) = (4, 4 * MIB / 8);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        // The few pages that the workers need, and some more.
        for budget in [64 * KIB, 512 * KIB] {
            let runtime = runtime(budget, Some(&memory.url));
            let mut array: RemoteArray<u64> = runtime.array(len).unwrap();
            let (_, words) = shared(&mut array);
            // Each thread has its words in all pages, so that threads want the same pages at the
            // same time.
            let models: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..threads)
                    .map(|thread| scope.spawn(move || exercise(words, thread, threads, seed)))
                    .collect();
                let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().unwrap();
                threads.into_iter().map(join).collect()
            });
            for at in 0..len {
                let expected = models[at % threads][at / threads];
                assert_eq!(get(words, at), expected, "{fabric}, word {at}, seed {seed}");
            }
            let stats = runtime.stats().pager;
            assert!(stats.faults > 1000 && stats.evictions > 1000, "{stats:?}");
            assert_eq!(stats.poisoned, 0, "{stats:?}");
            assert!(stats.peak_resident_bytes <= budget as u64, "{stats:?}");
        }
    }
}

/// Writes and reads the words of one thread, in order and at random; returns their right values.
fn exercise(
    words: &[std::sync::atomic::AtomicU64],
    thread: usize,
    threads: usize,
    seed: u64,
) -> Vec<u64> {
    let mut rng = Rng(seed ^ thread as u64);
    let mut model = vec![0; words.len() / threads];
    for _ in 0..4 {
        for _ in 0..1000 {
            let (own, value) = (rng.below(model.len()), rng.next());
            set(words, own * threads + thread, value);
            model[own] = value;
        }
        let start = rng.below(model.len() / 2);
        let some = model.iter().enumerate().skip(start);
        for (own, &value) in some.take(model.len() / 4) {
            assert_eq!(get(words, own * threads + thread), value);
        }
    }
    model
}

#[test]
fn handler_neither_allocates_nor_frees() {
    let Some(_watchdog) = begin(120) else { return };
    let len = 8 * MIB / 8;
    for (fabric, codec) in fabrics()
        .into_iter()
        .flat_map(|fabric| [Codec::Raw, Codec::Lz4].map(|codec| (fabric, codec)))
    {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = runtime(MIB, Some(&memory.url));
        let options = RegionOptions::new().codec(codec);
        let mut array: RemoteArray<u64> = runtime.array_with(len, options).unwrap();
        // These words compress to about a half.
        for (at, word) in array.iter_mut().enumerate() {
            *word = mix(at as u64) & 0xffff_ffff;
        }
        let (_, words) = shared(&mut array);
        let pass = |thread: usize| {
            let mut rng = Rng(thread as u64);
            // In order, where pages come in runs; then at random, where threads sometimes want the
            // same page.
            for at in (0..len).step_by(PAGE_WORDS / 2) {
                black_box(get(words, at));
            }
            for _ in 0..2000 {
                set(words, rng.below(len) & !3 | thread, 7);
            }
        };
        pass(0);
        let (calls, faults) = (CALLS.load(Ordering::Relaxed), runtime.stats().pager.faults);
        thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || watched(|| pass(thread)));
            }
        });
        assert!(runtime.stats().pager.faults > faults + 4000);
        assert_eq!(
            CALLS.load(Ordering::Relaxed) - calls,
            0,
            "{fabric}, {codec:?}"
        );
    }
}

#[test]
fn pages_that_threads_have_taken_out_come_back_when_they_are_wanted() {
    let Some(_watchdog) = begin(60) else { return };
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = runtime(MIB, Some(&memory.url));
        let mut array: RemoteArray<u64> = runtime.array(2 * MIB / 8).unwrap();
        array.advise(.., Advice::Random).unwrap();
        let (_, words) = shared(&mut array);
        // Up to between the marks: threads take pages out, all of them changed, and no evictor has
        // been woken.
        for pages in 230..=242 {
            for page in 0..pages {
                set(words, page * PAGE_WORDS, pages as u64);
            }
            for page in 0..pages {
                assert_eq!(get(words, page * PAGE_WORDS), pages as u64);
            }
        }
        let stats = runtime.stats().pager;
        assert!(stats.steals + stats.evictions > 0, "{stats:?}");
    }
}

#[test]
fn lost_page_raises_sigbus_and_heals() {
    let Some(_watchdog) = begin(60) else { return };
    let broken = Arc::new(AtomicBool::new(false));
    let hook = broken.clone();
    let store = HookedStore::new(MIB, move |_, _| {
        if hook.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk is gone"));
        }
        Ok(())
    });
    let runtime = runtime(MIB, None);
    let mut array = array_with(&runtime, MIB / 8, stored(store));
    let at = 77 * PAGE_WORDS;
    array[at] = 5;
    array.advise(.., Advice::DontNeed).unwrap();
    broken.store(true, Ordering::Relaxed);
    let (array, words) = shared(&mut array);
    let address = ptr::from_ref(&words[at]) as usize;
    thread::scope(|scope| {
        let reader = scope.spawn(move || get(words, at));
        wait_until("the program learns of the lost page", || {
            LOST.load(Ordering::SeqCst) == address
        });
        let error = array.take_error().unwrap().to_string();
        assert!(error.contains("the disk is gone"), "{error}");
        array.prefetch_now(at..at + 1).unwrap_err();
        broken.store(false, Ordering::Relaxed);
        array.prefetch_now(at..at + 1).unwrap();
        assert_eq!(reader.join().unwrap(), 5);
    });
    assert!(runtime.stats().pager.poisoned > 0);
}

#[test]
fn system_calls_fail_on_absent_memory_and_find_pinned_memory() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = runtime(MIB, Some(&memory.url));
    let mut region = runtime.region(4 * MIB).unwrap();
    let mut zeros = File::open("/dev/zero").unwrap();
    let bytes = 64 * KIB;
    region[..bytes].fill(1);
    region.advise(.., Advice::DontNeed).unwrap();
    let error = zeros.read(&mut region[..bytes]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    region.pin(..bytes).unwrap();
    zeros.read_exact(&mut region[..bytes]).unwrap();
    region.unpin(..bytes);
    region.advise(.., Advice::DontNeed).unwrap();
    assert!(region[..bytes].iter().all(|&byte| byte == 0));
}

#[test]
fn system_calls_find_pinned_memory_while_threads_take_out_what_lies_around_it() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = runtime(4 * MIB, Some(&memory.url));
    let mut array: RemoteArray<u64> = runtime.array(8 * MIB / 8).unwrap();
    array.advise(.., Advice::Random).unwrap();
    let len = array.len();
    let (array, words) = shared(&mut array);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for thread in 0..2 {
            let stop = &stop;
            scope.spawn(move || {
                // Each thread has words of its own in all pages. The kernel has the last ones.
                let (mut rng, mut sums) = (Rng(thread), vec![0; len / PAGE_WORDS]);
                while !stop.load(Ordering::Relaxed) {
                    let page = rng.below(sums.len());
                    let word = page * PAGE_WORDS + thread as usize;
                    assert_eq!(get(words, word), sums[page]);
                    sums[page] += 1;
                    set(words, word, sums[page]);
                }
            });
        }
        let mut zeros = File::open("/dev/zero").unwrap();
        let mut rng = Rng(7);
        for _ in 0..20_000 {
            let page = rng.below(len / PAGE_WORDS);
            let first = page * PAGE_WORDS + PAGE_WORDS / 2;
            array.pin(first..first + 1).unwrap();
            for _ in 0..3 {
                // SAFETY: words that no other thread uses.
                let bytes =
                    unsafe { slice::from_raw_parts_mut(words[first].as_ptr().cast::<u8>(), 8) };
                zeros.read_exact(bytes).unwrap();
            }
            array.unpin(first..first + 1);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn another_sigbus_goes_to_the_programs_handler() {
    let Some(_watchdog) = begin(120) else { return };
    let runtime = runtime(MIB, None);
    let array = array_with(&runtime, MIB / 8, stored_here(MIB));
    assert_eq!(array[9], 0, "the runtime's handler is at work");
    let fd = tempfile::tempfile().unwrap().into_raw_fd();
    // SAFETY: a new mapping, which nothing else knows.
    let short = unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    assert_ne!(short, libc::MAP_FAILED);
    SHORT_FILE.store(fd, Ordering::SeqCst);
    SHORT.store(short as usize, Ordering::SeqCst);
    // SAFETY: mapped above; the handler makes the file as long as the mapping.
    assert_eq!(unsafe { short.cast::<u8>().read_volatile() }, 0);
    assert_eq!(
        SHORT.load(Ordering::SeqCst),
        0,
        "the handler was not called"
    );
}

#[test]
fn pages_that_the_program_unmaps_are_gone_and_no_others() {
    let Some(_watchdog) = begin(60) else { return };
    let (pages, hole) = (MIB / PAGE, 100..180);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 16 * MIB);
        let runtime = runtime(256 * KIB, Some(&memory.url));
        let mut array: RemoteArray<u64> = runtime.array(MIB / 8).unwrap();
        for page in 0..pages {
            array[page * PAGE_WORDS] = mix(page as u64);
        }
        let (array, words) = shared(&mut array);
        let address = |page: usize| ptr::from_ref(&words[page * PAGE_WORDS]) as usize;
        let others_are_intact = || {
            for page in (0..pages).filter(|page| !hole.contains(page)) {
                assert_eq!(get(words, page * PAGE_WORDS), mix(page as u64), "{fabric}");
            }
        };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        others_are_intact();
                    }
                });
            }
            for page in hole.clone() {
                // Brought in and changed just now, so an eviction would write it back.
                set(words, page * PAGE_WORDS, 1);
                match page % 2 {
                    // SAFETY: nobody uses the page any more.
                    0 => assert_eq!(unsafe { libc::munmap(address(page) as *mut _, PAGE) }, 0),
                    _ => map_over(address(page), PAGE).fill(7),
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        let lost = hole.start * PAGE_WORDS;
        let error = array.prefetch_now(lost..lost + 1).unwrap_err().to_string();
        assert!(error.contains("the program has unmapped"), "{error}");

        others_are_intact();
        array.advise(.., Advice::DontNeed).unwrap();
        others_are_intact();
        // Unmapped addresses may belong to any mapping by now.
        for page in hole.clone().skip(1).step_by(2) {
            // SAFETY: the program's own since it was mapped over.
            let own = unsafe { slice::from_raw_parts(address(page) as *const u8, PAGE) };
            assert!(own.iter().all(|&byte| byte == 7), "{fabric}, page {page}");
        }
        assert_eq!(runtime.stats().pager.poisoned, 0);
    }
}

#[test]
fn what_is_left_of_a_page_that_the_program_unmaps_in_part_raises_sigbus() {
    let Some(_watchdog) = begin(60) else { return };
    let page_words = 16 * PAGE_WORDS;
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = runtime(MIB, Some(&memory.url));
    let options = RegionOptions::new().page_size(ByteSize::kib(64));
    let mut array: RemoteArray<u64> = runtime.array_with(2 * MIB / 8, options).unwrap();
    array.fill(5);
    array.advise(.., Advice::DontNeed).unwrap();
    let (_, words) = shared(&mut array);
    let address = ptr::from_ref(&words[9 * page_words]) as usize;
    // SAFETY: nobody uses the page any more.
    let unmapped = unsafe { libc::munmap((address + 32 * KIB) as *mut _, 32 * KIB) };
    assert_eq!(unmapped, 0);
    thread::scope(|scope| {
        let reader = scope.spawn(move || get(words, 9 * page_words));
        wait_until("the program learns of the lost page", || {
            LOST.load(Ordering::SeqCst) == address
        });
        // The access succeeds once another mapping is there.
        map_over(address, 32 * KIB);
        assert_eq!(reader.join().unwrap(), 0);
    });
    for page in [8, 10] {
        assert_eq!(get(words, page * page_words), 5);
    }
}

#[test]
fn pages_that_the_program_unmaps_leave_the_budget_at_once() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = runtime(MIB, Some(&memory.url));
    let mut array: RemoteArray<u64> = runtime.array(128 * KIB / 8).unwrap();
    array.fill(5);
    let resident_bytes = || runtime.stats().pager.resident_bytes;
    assert_eq!(resident_bytes(), 128 * KIB as u64);
    let address = array.as_ptr() as usize;
    // SAFETY: nobody uses these pages any more.
    let unmapped = unsafe { libc::munmap((address + 32 * KIB) as *mut _, 64 * KIB) };
    assert_eq!(unmapped, 0);
    // No eviction has met the pages: there is room.
    wait_until("they are counted out", || {
        resident_bytes() == 64 * KIB as u64
    });
}

/// Maps other memory over addresses of a region, as a program may. Returns that memory.
fn map_over(address: usize, bytes: usize) -> &'static mut [u8] {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let (at, rw) = (address as *mut _, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: addresses of the calling test's own region.
    let mapped = unsafe { libc::mmap(at, bytes, rw, flags, -1, 0) };
    assert_eq!(mapped, at);
    // SAFETY: mapped just now, and never unmapped.
    unsafe { slice::from_raw_parts_mut(mapped.cast(), bytes) }
}

#[test]
fn runtimes_of_both_modes_work_side_by_side() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let ours = runtime(512 * KIB, Some(&memory.url));
    let theirs = builder(512 * KIB, PAGE)
        .fault_mode(FaultMode::Filler)
        .server(&memory.url)
        .build()
        .unwrap();
    thread::scope(|scope| {
        for (runtime, number) in [(&ours, 1), (&theirs, 2)] {
            scope.spawn(move || {
                let mut array: RemoteArray<u64> = runtime.array(4 * MIB / 8).unwrap();
                for _ in 0..3 {
                    fill(&mut array, number);
                    assert_filled(&array, number);
                }
            });
        }
    });
    // Copies between the regions fault on either side.
    let mut from: RemoteArray<u64> = theirs.array(2 * MIB / 8).unwrap();
    let mut to: RemoteArray<u64> = ours.array(2 * MIB / 8).unwrap();
    from.fill(3);
    to.copy_from_slice(&from);
    assert!(to.iter().all(|&word| word == 3));
    // System calls wait for the memory of a runtime with filler threads.
    let mut region = theirs.region(MIB).unwrap();
    File::open("/dev/zero")
        .unwrap()
        .read_exact(&mut region)
        .unwrap();
}

#[test]
fn connections_that_break_are_opened_again() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Tcp, 64 * MIB);
    let relay = Relay::to(&memory.url);
    let runtime = runtime(512 * KIB, Some(&relay.url));
    let mut array: RemoteArray<u64> = runtime.array(4 * MIB / 8).unwrap();
    fill(&mut array, 0);
    for round in 0..5 {
        relay.close();
        for (at, &word) in array.iter().enumerate().skip(round).step_by(100) {
            assert_eq!(word, mix(at as u64));
        }
    }
    let stats = runtime.stats();
    assert_eq!(stats.pager.poisoned, 0, "{stats:?}");
}
