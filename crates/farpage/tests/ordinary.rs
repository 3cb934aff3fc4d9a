//! Arenas that are ordinary memory until more is allocated than the budget.
//!
//! The rule it keeps: what the program wrote is there, whichever side of that moment it wrote it.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, fs,
    ops::Range,
    os::unix::process::CommandExt,
    process::Command,
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use common::{
    Fabric, Memory, ServerProcess, begin, builder,
    forks::{must_pass, start},
    serve_if_asked,
};
use farpage::{Advice, Arena, ByteSize, FaultMode, RegionOptions, Runtime};
use farpage_testkit::{KIB, MIB, TestProcess, mix, wait_until};
use nix::{sys::signal::Signal, unistd::Pid};

/// Variable of the environment that is set in a process that runs one test alone.
const ALONE: &str = "FARPAGE_TEST_ALONE";
const KERNEL_PAGE: usize = 4 * KIB;
const MODES: [FaultMode; 2] = [FaultMode::Filler, FaultMode::InThread];
const BUDGET: usize = 16 * MIB;
/// Bytes that are allocated while the arena is ordinary: room for one more page is left.
const FITS: usize = BUDGET - 256 * KIB;

fn runtime(memory: &Memory, mode: FaultMode, page_bytes: usize) -> Runtime {
    let builder = memory.builder(BUDGET, page_bytes).fault_mode(mode);
    builder
        .user_mode_only(mode == FaultMode::InThread)
        .build()
        .unwrap()
}

fn arena(runtime: &Runtime) -> Arena {
    let arena = runtime.arena_with(128 * MIB, RegionOptions::new().ordinary());
    arena.unwrap()
}

/// Calls `test` in both modes with a runtime of pages of 64 KiB, and an arena of it.
fn each_mode(test: impl Fn(&Runtime, Arena)) {
    let Some(_watchdog) = begin(60) else { return };
    for mode in MODES {
        let memory = Memory::start(Fabric::Shm, 192 * MIB);
        let runtime = runtime(&memory, mode, 64 * KIB);
        test(&runtime, arena(&runtime));
    }
}

fn allocate(arena: &Arena, bytes: usize) -> usize {
    arena.allocate(bytes, 1).unwrap().as_ptr() as usize
}

fn free(arena: &Arena, at: usize) {
    // SAFETY: the caller has nothing there any more.
    unsafe { arena.deallocate(NonNull::new(at as *mut u8).unwrap()) }.unwrap();
}

fn word(at: usize) -> u64 {
    // SAFETY: memory of the test's own.
    unsafe { (at as *const u64).read_volatile() }
}

fn set(at: usize, word: u64) {
    // SAFETY: as above.
    unsafe { (at as *mut u64).write_volatile(word) }
}

/// Writes a word to each kernel page of `range` that is `chosen`, by its number.
fn fill(range: Range<usize>, chosen: impl Fn(usize) -> bool) {
    for (number, at) in range.step_by(KERNEL_PAGE).enumerate() {
        if chosen(number) {
            set(at, mix(at as u64));
        }
    }
}

/// Checks the words that [`fill`] has written, and that all others are zeros.
fn check(range: Range<usize>, chosen: impl Fn(usize) -> bool) {
    for (number, at) in range.step_by(KERNEL_PAGE).enumerate() {
        let expected = if chosen(number) { mix(at as u64) } else { 0 };
        assert_eq!(word(at), expected, "kernel page {number}");
        assert_eq!(word(at + KERNEL_PAGE / 2), 0, "kernel page {number}");
    }
}

/// Counts the kernel pages of `range` that are in memory.
fn present(range: &Range<usize>) -> usize {
    let mut pages = vec![0_u8; range.len() / KERNEL_PAGE];
    // SAFETY: there is room for the answer.
    let asked = unsafe {
        let start = range.start as *mut libc::c_void;
        libc::mincore(start, range.len(), pages.as_mut_ptr())
    };
    assert_eq!(asked, 0);
    pages.iter().filter(|&&page| page & 1 != 0).count()
}

/// True for one of four kernel pages, except in every other sixteen.
fn every_fourth(number: usize) -> bool {
    number.is_multiple_of(4) && (number / 16).is_multiple_of(2)
}

#[test]
fn bytes_are_right_when_paging_begins_under_eight_threads() {
    let Some(_watchdog) = begin(240) else { return };
    for (mode, page) in MODES
        .into_iter()
        .flat_map(|mode| [4, 64].map(|kib| (mode, kib * KIB)))
    {
        let memory = Memory::start(Fabric::Shm, 192 * MIB);
        let runtime = runtime(&memory, mode, page);
        let arena = arena(&runtime);
        let first = allocate(&arena, FITS);
        let first = first..first + FITS;
        fill(first.clone(), every_fourth);
        assert!(arena.is_ordinary());
        let stats = runtime.stats().pager;
        assert_eq!((stats.faults, stats.fills, stats.resident_bytes), (0, 0, 0));
        let (ends, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
        let second = thread::scope(|scope| {
            let (first, ends, rounds) = (&first, &ends, &rounds);
            for thread in 0..8 {
                scope.spawn(move || {
                    // Each thread has a word of each of its kernel pages, most of which are absent
                    // at first.
                    let mine = || (first.clone().step_by(KERNEL_PAGE).skip(thread)).step_by(8);
                    for round in 1_u64.. {
                        for at in mine() {
                            assert_eq!(word(at + 64), (round - 1) * at as u64);
                            set(at + 64, round * at as u64);
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                        if ends.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            let second = allocate(&arena, BUDGET);
            assert!(!arena.is_ordinary());
            fill(second..second + BUDGET, |_| true);
            let seen = rounds.load(Ordering::Relaxed);
            wait_until("the threads go on", || {
                rounds.load(Ordering::Relaxed) > seen + 8
            });
            ends.store(true, Ordering::Relaxed);
            second
        });
        check(first, every_fourth);
        check(second..second + BUDGET, |_| true);
        let stats = runtime.stats().pager;
        assert!(stats.evictions > 0, "{stats:?}");
        assert!(stats.peak_resident_bytes <= BUDGET as u64, "{stats:?}");
        let begun = arena.begun().unwrap();
        assert_eq!(begun.used_bytes, FITS);
        assert!(arena.touched_peak_bytes() >= FITS);
    }
}

/// A page that is partly there when paging begins is whole afterwards: system calls find it.
#[test]
fn pages_that_are_partly_there_are_whole_when_paging_begins() {
    let Some(_watchdog) = begin(60) else { return };
    const PAGE: usize = 64 * KIB;
    for mode in MODES {
        let memory = Memory::start(Fabric::Shm, 192 * MIB);
        let runtime = runtime(&memory, mode, PAGE);
        let arena = arena(&runtime);
        let block = allocate(&arena, FITS);
        let block = block..block + FITS;
        // A read is a touch, too.
        fill(block.clone(), every_fourth);
        let kernel_pages = present(&block);
        assert!(kernel_pages >= FITS / KERNEL_PAGE / 8);
        assert_eq!(word(block.end - KERNEL_PAGE), 0);
        let touched = FITS / PAGE / 2 + 1;
        arena.begin_paging().unwrap();
        assert_eq!(arena.region().resident_pages(), touched);
        assert_eq!(present(&block), touched * PAGE / KERNEL_PAGE);
        let bytes = runtime.stats().pager.resident_bytes;
        assert_eq!(bytes, (touched * PAGE) as u64);
        check(block, every_fourth);
    }
}

#[test]
fn huge_pages_of_the_program_leave_like_others_once_paging_begins() {
    // So little that no page leaves at once.
    const HALF: usize = BUDGET / 2;
    each_mode(|runtime, arena| {
        let block = allocate(&arena, HALF);
        let block = block..block + HALF;
        // SAFETY: advice on memory of the test's own.
        let advised = unsafe {
            let start = block.start as *mut libc::c_void;
            libc::madvise(start, block.len(), libc::MADV_HUGEPAGE)
        };
        let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        let has_huge = thp.is_ok_and(|thp| !thp.contains("[never]")) && advised == 0;
        fill(block.clone(), |_| true);
        if has_huge {
            let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
            let huge = rollup
                .lines()
                .find(|line| line.starts_with("AnonHuge"))
                .unwrap();
            assert!(!huge.contains(" 0 kB"), "{huge}");
        }
        // Beside the block, memory of a huge page is there that is nobody's.
        arena.begin_paging().unwrap();
        let pages = HALF / (64 * KIB);
        assert_eq!(arena.region().resident_pages(), pages);
        let outside = arena.addresses();
        assert_eq!(present(&outside), HALF / KERNEL_PAGE);
        wait_until("three quarters have left", || {
            runtime.set_budget(ByteSize(BUDGET as u64 / 4)) == ByteSize(0)
        });
        assert!(arena.region().resident_pages() <= BUDGET / 4 / (64 * KIB));
        check(block, |_| true);
    });
}

/// Runs `child` in a child made by `fork`, which it ends with 0 if it returns true.
fn forked(child: impl FnOnce() -> bool) -> Pid {
    start(|| i32::from(!child()))
}

/// Runs `child` as [`forked`] does, in a child of which no handler of `fork` knows.
fn raw_child(child: impl FnOnce() -> bool) -> Pid {
    // SAFETY: the child only looks at memory, and ends.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            let passed = child();
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!passed)) }
        }
        made => Pid::from_raw(i32::try_from(made).unwrap()),
    }
}

#[test]
fn children_have_copies_of_ordinary_memory_when_the_parent_begins_paging() {
    each_mode(|_, arena| {
        let block = allocate(&arena, FITS);
        let block = block..block + FITS;
        fill(block.clone(), every_fourth);
        // The child looks at its memory only when this one has changed its own.
        let (reads, writes) = nix::unistd::pipe().unwrap();
        let child = {
            let (arena, block) = (&arena, block.clone());
            forked(move || {
                let mut byte = [0];
                let told = nix::unistd::read(&reads, &mut byte) == Ok(1);
                let is_right = |(number, at): (usize, usize)| match every_fourth(number) {
                    true => word(at) == mix(at as u64),
                    false => word(at) == 0,
                };
                let mut pages = block.step_by(KERNEL_PAGE).enumerate();
                // It asks for no memory of the arena.
                told && pages.all(is_right) && arena.allocate(1, 1).is_err()
            })
        };
        let second = allocate(&arena, BUDGET);
        assert!(!arena.is_ordinary());
        fill(block.clone(), |_| true);
        fill(second..second + BUDGET, |_| true);
        check(block.clone(), |_| true);
        nix::unistd::write(&writes, b"1").unwrap();
        must_pass(child);
        check(block.clone(), |_| true);
        check(second..second + BUDGET, |_| true);
        // From here on children have what is remote, too.
        must_pass(forked(|| {
            let mut pages = block.clone().step_by(KERNEL_PAGE);
            pages.all(|at| word(at) == mix(at as u64))
        }));
    });
}

/// Runs in a process of its own: others fork, too.
#[test]
fn programs_are_started_while_the_arena_is_ordinary() {
    if env::var_os(ALONE).is_none() {
        return TestProcess::start(&[(ALONE, "1")]).must_pass(Duration::from_secs(60));
    }
    each_mode(|_, arena| {
        let block = allocate(&arena, FITS);
        fill(block..block + FITS, |_| true);
        let mut command = Command::new("/bin/true");
        // SAFETY: does nothing. With it, the child is made by `fork`.
        unsafe { command.pre_exec(|| Ok(())) };
        assert!(command.status().unwrap().success());
        assert!(arena.is_ordinary());
        // A child by the raw system call has ordinary memory, too.
        must_pass(raw_child(|| {
            let mut pages = (block..block + FITS).step_by(KERNEL_PAGE);
            pages.all(|at| word(at) == mix(at as u64))
        }));
        check(block..block + FITS, |_| true);
        arena.begin_paging().unwrap();
        // Pages that a child had for a moment leave all the same.
        (arena.region()).advise(.., Advice::DontNeed).unwrap();
        assert_eq!(arena.region().resident_pages(), 0);
        check(block..block + FITS, |_| true);
    });
}

#[test]
fn ordinary_memory_is_zeros_once_it_was_freed_or_discarded() {
    each_mode(|runtime, arena| {
        // Freed and allocated again, many times the budget.
        for _ in 0..8 {
            let block = allocate(&arena, FITS);
            check(block..block + FITS, |_| false);
            fill(block..block + FITS, |_| true);
            free(&arena, block);
        }
        assert_eq!(present(&arena.addresses()), 0);
        // Discarded in part: kernel pages go, and the rest of them is overwritten.
        let block = allocate(&arena, MIB);
        fill(block..block + MIB, |_| true);
        set(block + 5 * KERNEL_PAGE + 8, 1);
        // SAFETY: there are no references.
        unsafe { arena.discard(block + 5 * KERNEL_PAGE + 16..block + 40 * KERNEL_PAGE) }.unwrap();
        assert_eq!(present(&(block..block + MIB)), MIB / KERNEL_PAGE - 34);
        assert_eq!(word(block + 5 * KERNEL_PAGE + 8), 1);
        let kept = |number: usize| !(6..40).contains(&number);
        check(block..block + MIB, kept);
        // Grown where no room is behind it, so that it moves.
        let wall = arena.addresses().start + 2 * MIB;
        assert!(arena.claim(wall..wall + 64 * KIB));
        let old = NonNull::new(block as *mut u8).unwrap();
        // SAFETY: nobody else has it.
        let moved = unsafe { arena.reallocate(old, 4 * MIB, 1) }
            .unwrap()
            .as_ptr() as usize;
        assert_ne!(moved, block);
        for number in 0..MIB / KERNEL_PAGE {
            let expected = mix((block + number * KERNEL_PAGE) as u64);
            let expected = if kept(number) { expected } else { 0 };
            assert_eq!(word(moved + number * KERNEL_PAGE), expected);
        }
        check(moved + MIB..moved + 4 * MIB, |_| false);
        assert!(arena.is_ordinary());
        assert_eq!(runtime.stats().pager.fills, 0);
        // Discarded before paging begins, and looked at afterwards.
        let last = allocate(&arena, 2 * MIB);
        fill(last..last + 2 * MIB, |_| true);
        // SAFETY: there are no references.
        unsafe { arena.discard(last..last + MIB) }.unwrap();
        arena.begin_paging().unwrap();
        (arena.region()).advise(.., Advice::DontNeed).unwrap();
        check(last..last + MIB, |_| false);
        check(last + MIB..last + 2 * MIB, |_| true);
    });
}

#[test]
fn kept_memory_counts_while_the_arena_is_ordinary() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 192 * MIB);
    let runtime = runtime(&memory, FaultMode::Filler, 64 * KIB);
    let arena = arena(&runtime);
    let block = arena.allocate_uninit(256 * KIB, 1).unwrap().as_ptr() as usize;
    fill(block..block + 256 * KIB, |_| true);
    free(&arena, block);
    assert_eq!(
        present(&arena.addresses()),
        256 * KIB / KERNEL_PAGE,
        "it is kept"
    );
    let all = allocate(&arena, BUDGET);
    assert!(arena.is_ordinary());
    assert_eq!(present(&arena.addresses()), 0, "it made room");
    check(all..all + BUDGET, |_| false);
    assert_eq!(allocate(&arena, 1) % (64 * KIB), 0);
    assert!(!arena.is_ordinary());
}

#[test]
fn smaller_budget_than_what_is_allocated_begins_paging() {
    each_mode(|runtime, arena| {
        let block = allocate(&arena, FITS);
        fill(block..block + FITS, |_| true);
        arena.keep_ordinary_to(FITS).unwrap();
        assert!(arena.is_ordinary());
        arena.keep_ordinary_to(FITS - 64 * KIB).unwrap();
        assert!(!arena.is_ordinary());
        wait_until("the rest has left", || {
            runtime.set_budget(ByteSize(BUDGET as u64 / 2)) == ByteSize(0)
        });
        check(block..block + FITS, |_| true);
        assert!(runtime.stats().pager.peak_resident_bytes <= BUDGET as u64);
    });
}

/// Pins are of pages under paging.
#[test]
fn pins_put_the_arena_under_paging() {
    let Some(_watchdog) = begin(60) else { return };
    for mode in MODES {
        let memory = Memory::start(Fabric::Shm, 384 * MIB);
        let runtime = runtime(&memory, mode, 64 * KIB);
        let pinned = arena(&runtime);
        let block = allocate(&pinned, MIB);
        fill(block..block + MIB, every_fourth);
        let offset = block - pinned.addresses().start;
        (pinned.region()).pin(offset..offset + MIB).unwrap();
        assert!(!pinned.is_ordinary());
        (pinned.region()).advise(.., Advice::DontNeed).unwrap();
        assert_eq!(present(&(block..block + MIB)), MIB / KERNEL_PAGE);
        check(block..block + MIB, every_fourth);
    }
}

/// Maps shared memory over ceded addresses.
fn share(addresses: &Range<usize>) {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: ceded addresses of the test's own.
    let made = unsafe {
        let start = addresses.start as *mut libc::c_void;
        libc::mmap(start, addresses.len(), access, flags, -1, 0)
    };
    assert_eq!(made as usize, addresses.start);
}

/// Ceded pages are the program's own before paging begins, meanwhile and afterwards.
#[test]
fn ceded_pages_of_ordinary_memory_are_left_alone_when_paging_begins() {
    each_mode(|runtime, arena| {
        let block = allocate(&arena, 2 * MIB);
        let all = block..block + 2 * MIB;
        fill(all.clone(), |_| true);
        let kept = block..block + 64 * KIB;
        let gone = kept.end..kept.end + MIB;
        let regained = gone.end..gone.end + 64 * KIB;
        arena.cede_with_bytes(kept.start).unwrap();
        for ceded in [&gone, &regained] {
            // SAFETY: there are no references.
            unsafe { arena.cede(ceded.clone()) }.unwrap();
        }
        share(&gone);
        fill(gone.clone(), every_fourth);
        // SAFETY: nobody uses what is there.
        unsafe { arena.regain(regained.clone()) }.unwrap();
        check(regained.clone(), |_| false);
        fill(regained.clone(), every_fourth);
        assert!(arena.is_ordinary());
        // What a page keeps beside another mapping is the program's memory.
        assert_eq!(arena.used_bytes(), all.len() - gone.len());

        let more = allocate(&arena, FITS);
        assert!(!arena.is_ordinary());
        fill(more..more + FITS, |_| true);
        let rest = regained.end..all.end;
        for _ in 0..2 {
            check(kept.clone(), |_| true);
            check(gone.clone(), every_fourth);
            check(regained.clone(), every_fourth);
            check(rest.clone(), |_| true);
            arena.region().advise(.., Advice::DontNeed).unwrap();
            // What is ceded never leaves.
            assert_eq!(present(&kept), kept.len() / KERNEL_PAGE);
            assert_eq!(present(&rest), 0);
        }
        for ceded in [kept, gone] {
            // SAFETY: nobody uses what is there.
            unsafe { arena.regain(ceded.clone()) }.unwrap();
            check(ceded.clone(), |_| false);
            fill(ceded, |_| true);
        }
        assert!(runtime.stats().pager.peak_resident_bytes <= BUDGET as u64);
        free(&arena, block);
        check(more..more + FITS, |_| true);
    });
}

#[test]
fn addresses_without_access_take_nothing_of_the_budget() {
    each_mode(|_, arena| {
        let block = arena.allocate_idle(64 * MIB, 1).unwrap().as_ptr() as usize;
        assert!(arena.is_ordinary() && arena.used_bytes() == 0);
        let used = block + MIB..block + 3 * MIB;
        arena.begin_use(&used).unwrap();
        // Once more is no more.
        arena.begin_use(&(used.start + KIB..used.end)).unwrap();
        fill(used.clone(), |_| true);
        assert!(arena.is_ordinary() && arena.used_bytes() == used.len());
        // SAFETY: there are no references.
        unsafe { arena.discard(used.start + MIB..used.end) }.unwrap();
        arena.end_use(&(used.start + MIB..used.end));
        assert_eq!(arena.used_bytes(), MIB);
        free(&arena, block);
        assert_eq!(arena.used_bytes(), 0);
        // Whatever takes their place counts.
        let block = allocate(&arena, FITS);
        assert_eq!(arena.used_bytes(), FITS);
        fill(block..block + FITS, |_| true);
        let other = arena.allocate_idle(64 * MIB, 1).unwrap().as_ptr() as usize;
        assert!(arena.is_ordinary());
        arena.begin_use(&(other..other + 300 * KIB)).unwrap();
        assert!(!arena.is_ordinary());
        fill(other..other + 300 * KIB, |_| true);
        check(block..block + FITS, |_| true);
        check(other..other + 300 * KIB, |_| true);
    });
}

/// The memory of a server that has died is missed only by what is remote.
#[test]
fn death_of_the_server_harms_nothing_that_is_ordinary() {
    if serve_if_asked() {
        return;
    }
    let Some(_watchdog) = begin(60) else { return };
    let test = "death_of_the_server_harms_nothing_that_is_ordinary";
    for mode in MODES {
        let server = ServerProcess::start(test, Fabric::Tcp, 192 * MIB);
        let builder = builder(BUDGET, 64 * KIB)
            .server(&server.url)
            .fault_mode(mode);
        let builder = builder.user_mode_only(mode == FaultMode::InThread);
        let runtime = builder.build().unwrap();
        let arena = arena(&runtime);
        let block = allocate(&arena, FITS);
        fill(block..block + MIB, |_| true);
        server.signal(Signal::SIGKILL);
        fill(block + MIB..block + FITS, |_| true);
        check(block..block + FITS, |_| true);
        let again = allocate(&arena, 64 * KIB);
        free(&arena, again);
        assert!(arena.is_ordinary());
        // Its memory is there as before, and only what exceeds the budget cannot leave.
        allocate(&arena, MIB);
        assert!(!arena.is_ordinary());
        check(block..block + MIB, |_| true);
    }
}
