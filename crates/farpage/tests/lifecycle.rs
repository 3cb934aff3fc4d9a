//! Regions coming and going while everything else goes on, sizes and uses at the edges, and what
//! regions promise by advice.
//!
//! The rule it keeps: what is checked is what the program sees (bytes, typed errors, figures), over
//! shm and tcp where a server takes part.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{
    env, fs,
    io::{Read, Seek, Write},
    os::unix::process::CommandExt,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{
    Call, Fabric, HookedStore, KIB, Kin, MIB, Memory, Rng, Watchdog, builder, can_page, fabrics,
    get, mix, proc_bytes, seed, set, shared, wait_until,
};
use farpage::{Advice, ByteSize, CreateError, FaultMode, RegionOptions, RemoteArray, Runtime};
use farpage_fabric::AllocError;
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

fn pages(pages: usize) -> RegionOptions {
    RegionOptions::new().read_ahead(pages)
}

/// Random reads and writes on words of one's own, until told to stop or for so many turns.
fn exercise(
    words: &[std::sync::atomic::AtomicU64],
    thread: usize,
    of: usize,
    rng: &mut Rng,
    turns: usize,
) {
    for _ in 0..turns {
        let at = rng.below(words.len() / of) * of + thread;
        let (seen, right) = (get(words, at), mix(at as u64));
        assert!(seen == 0 || seen == right, "word {at} is {seen:#x}");
        set(words, at, right);
    }
}

/// Each word is what [`exercise`] writes, or was never written.
fn assert_exercised(words: &[u64]) {
    for (at, &seen) in words.iter().enumerate() {
        assert!(
            seen == 0 || seen == mix(at as u64),
            "word {at} is {seen:#x}"
        );
    }
}

fn fill(words: &mut [u64], salt: u64) {
    for (at, word) in words.iter_mut().enumerate() {
        *word = mix(at as u64 ^ salt << 32);
    }
}

fn assert_filled(words: &[u64], salt: u64) {
    for (at, &word) in words.iter().enumerate() {
        assert_eq!(word, mix(at as u64 ^ salt << 32), "word {at}");
    }
}

#[test]
fn ten_thousand_regions_are_unmapped_while_pages_are_evicted() {
    let test = "ten_thousand_regions_are_unmapped_while_pages_are_evicted";
    let _watchdog = Watchdog::new(test, Duration::from_secs(180));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let since = Instant::now();
        let memory = Memory::start(fabric, 256 * MIB);
        let runtime = memory.runtime(32 * PAGE, PAGE);
        let cycles = 5_000;
        let mut pressure: RemoteArray<u64> = runtime.array(64 * PAGE_WORDS).unwrap();
        let (_, words) = shared(&mut pressure);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng(seed);
                while !stop.load(Ordering::Relaxed) {
                    exercise(words, 0, 1, &mut rng, 1);
                }
            });
            let mappers: Vec<_> = (0..2)
                .map(|thread| {
                    let runtime = &runtime;
                    scope.spawn(move || {
                        map_and_give_up(runtime, cycles / 2, Rng(mix(seed) ^ thread))
                    })
                })
                .collect();
            let outcomes: Vec<_> = mappers
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            stop.store(true, Ordering::Relaxed);
            assert!(outcomes.iter().all(Result::is_ok), "seed {seed}");
        });
        drop(pressure);
        let stats = runtime.stats();
        println!(
            "{fabric}: {cycles} cycles in {:?}, {} evictions",
            since.elapsed(),
            stats.pager.evictions
        );
        assert!(stats.pager.evictions > cycles, "no pressure: {stats:?}");
        assert_eq!(stats.pager.resident_bytes, 0, "all frames are free again");
        assert_eq!(stats.pager.poisoned, 0, "{stats:?}");
    }
}

/// Makes regions of some pages, writes them, and gives most of them up in the middle of things.
fn map_and_give_up(runtime: &Runtime, cycles: u64, mut rng: Rng) {
    for cycle in 0..cycles {
        let len = (1 + rng.below(24)) * PAGE_WORDS;
        let mut array = runtime.array::<u64>(len).unwrap();
        for at in (0..len).step_by(PAGE_WORDS) {
            array[at] = mix(at as u64 ^ cycle);
        }
        if rng.one_in(4) {
            for at in (0..len).step_by(PAGE_WORDS) {
                assert_eq!(array[at], mix(at as u64 ^ cycle), "word {at}");
            }
        }
    }
}

#[test]
fn flush_while_evicting_ends_and_loses_nothing() {
    let test = "flush_while_evicting_ends_and_loses_nothing";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(MIB, PAGE);
        let mut array: RemoteArray<u64> = runtime.array(8 * MIB / 8).unwrap();
        let (array, words) = shared(&mut array);
        let (stop, flushes) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        array.flush().unwrap();
                        flushes.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let writers: Vec<_> = (0..4)
                .map(|thread| {
                    scope.spawn(move || {
                        exercise(words, thread, 4, &mut Rng(seed ^ thread as u64), 8000)
                    })
                })
                .collect();
            let writers: Vec<_> = writers
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            stop.store(true, Ordering::Relaxed);
            assert!(
                writers.iter().all(Result::is_ok),
                "a writer found a wrong word; seed {seed}"
            );
        });
        println!("{fabric}: {} flushes", flushes.load(Ordering::Relaxed));
        assert!(flushes.load(Ordering::Relaxed) > 3);
        assert!(runtime.stats().pager.evictions > 1000);
        assert_exercised(array);
    }
}

#[test]
fn flush_takes_what_was_written_a_moment_ago() {
    let test = "flush_takes_what_was_written_a_moment_ago";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let stored = Arc::new(AtomicUsize::new(0));
    let writes = stored.clone();
    let store = HookedStore::new(64 * PAGE, move |call, _| {
        if call == Call::Write {
            writes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let runtime = builder(MIB, PAGE).build().unwrap();
    let mut array: RemoteArray<u64> = runtime
        .array_with(64 * PAGE_WORDS, pages(0).store(store))
        .unwrap();
    // Each page is flushed as soon as its first word is written, when its filler has hardly mapped
    // it.
    for round in 1..20 {
        for page in 0..64 {
            let before = stored.load(Ordering::Relaxed);
            array[page * PAGE_WORDS] = round;
            array.flush().unwrap();
            assert_eq!(
                stored.load(Ordering::Relaxed),
                before + 1,
                "page {page}, round {round}"
            );
        }
        array.advise(.., Advice::DontNeed).unwrap();
        assert_eq!(array.region().resident_pages(), 0, "round {round}");
    }
}

#[test]
fn one_page_per_filler_is_enough() {
    let test = "one_page_per_filler_is_enough";
    let _watchdog = Watchdog::new(test, Duration::from_secs(90));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 256 * MIB);
        for (page_bytes, fillers, turns) in [(PAGE, 2, 1500), (PAGE, 4, 1500), (2 * MIB, 2, 30)] {
            let runtime = Runtime::builder()
                .server(&memory.url)
                .budget(ByteSize((fillers * page_bytes) as u64))
                .page_size(ByteSize(page_bytes as u64))
                .fillers(fillers)
                .evictors(1)
                .build()
                .unwrap();
            let mut array: RemoteArray<u64> = runtime.array(16 * page_bytes / 8).unwrap();
            let (array, words) = shared(&mut array);
            thread::scope(|scope| {
                for thread in 0..8 {
                    scope.spawn(move || {
                        exercise(words, thread, 8, &mut Rng(seed ^ thread as u64), turns)
                    });
                }
            });
            assert_exercised(array);
            let stats = runtime.stats();
            assert!(
                stats.pager.peak_resident_bytes <= (fillers * page_bytes) as u64,
                "{stats:?}"
            );
            assert_eq!(stats.pager.poisoned, 0, "{stats:?}");
        }
    }
}

#[test]
fn one_instruction_may_touch_two_pages_when_two_fit() {
    let test = "one_instruction_may_touch_two_pages_when_two_fit";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(2 * PAGE, PAGE);
    let mut region = runtime.region(64 * PAGE).unwrap();
    for round in 1..20_u64 {
        for page in 1..64 {
            let at = page * PAGE - 4;
            let across: &mut [u8; 8] = (&mut region[at..at + 8]).try_into().unwrap();
            assert_eq!(
                u64::from_ne_bytes(*across),
                if round == 1 {
                    0
                } else {
                    mix(at as u64 ^ (round - 1))
                }
            );
            *across = mix(at as u64 ^ round).to_ne_bytes();
        }
    }
}

#[test]
fn ten_thousand_regions_at_once() {
    let test = "ten_thousand_regions_at_once";
    let _watchdog = Watchdog::new(test, Duration::from_secs(120));
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let since = Instant::now();
        let memory = Memory::start(fabric, 1 << 30);
        let runtime = memory.runtime(4 * MIB, PAGE);
        let mut arrays: Vec<RemoteArray<u64>> = (0..10_000)
            .map(|i| {
                let mut array = runtime
                    .array(2 * PAGE_WORDS)
                    .unwrap_or_else(|e| panic!("region {i}: {e}"));
                array[i % 2 * PAGE_WORDS + 1] = mix(i as u64);
                array
            })
            .collect();
        for (i, array) in arrays.iter_mut().enumerate() {
            assert_eq!(array[i % 2 * PAGE_WORDS + 1], mix(i as u64), "region {i}");
            assert_eq!(array[(1 - i % 2) * PAGE_WORDS + 1], 0, "region {i}");
        }
        drop(arrays);
        println!("{fabric}: {:?}", since.elapsed());
        assert_eq!(runtime.stats().pager.resident_bytes, 0);
    }
}

#[test]
fn many_threads_map_and_unmap_at_once() {
    let test = "many_threads_map_and_unmap_at_once";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 512 * MIB);
        let runtime = memory.runtime(2 * MIB, PAGE);
        thread::scope(|scope| {
            for thread in 0..8 {
                let runtime = &runtime;
                scope.spawn(move || {
                    let mut rng = Rng(seed ^ thread);
                    for _ in 0..100 {
                        let page_bytes = PAGE << rng.below(6);
                        let options = RegionOptions::new().page_size(ByteSize(page_bytes as u64));
                        let len = 1 + rng.below(4 * page_bytes / 8);
                        let mut array = runtime.array_with::<u64>(len, options).unwrap();
                        fill(&mut array, thread);
                        assert_filled(&array, thread);
                    }
                });
            }
        });
        assert_eq!(runtime.stats().pager.resident_bytes, 0);
    }
}

const CHILD: &str = "FARPAGE_TEST_LIFECYCLE";

#[test]
fn mapping_and_unmapping_leaves_nothing_behind() {
    let test = "mapping_and_unmapping_leaves_nothing_behind";
    if let Ok(url) = env::var(CHILD) {
        return map_and_unmap(&url);
    }
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        println!("{fabric}:");
        let memory = Memory::start(fabric, 256 * MIB);
        Kin::start(test, &[(CHILD, &memory.url)]).must_pass(Duration::from_secs(60));
        wait_until("the server has everything back", || {
            memory.server.stat().granted_bytes == 0
        });
    }
}

fn map_and_unmap(url: &str) {
    let runtime = builder(MIB, 16 * KIB).server(url).build().unwrap();
    let cycles = |n: usize| {
        for cycle in 0..n {
            let options = RegionOptions::new().page_size(ByteSize::kib(4 << (cycle % 5)));
            let mut array = runtime.array_with::<u64>(256 * KIB / 8, options).unwrap();
            fill(&mut array, cycle as u64);
            assert_eq!(array[100], mix(100 ^ (cycle as u64) << 32));
        }
    };
    let figures = || {
        [
            proc_bytes("status", "VmRSS"),
            proc_bytes("status", "VmSize"),
            fs::read_dir("/proc/self/fd").unwrap().count(),
            fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .count(),
        ]
    };
    // Until pools and heaps have the size that they keep.
    cycles(200);
    let before = figures();
    cycles(1000);
    let after = figures();
    println!("RSS, address space, descriptors, mappings: {before:?}, after 1000 cycles {after:?}");
    assert!(after[0] < before[0] + MIB, "resident memory grows");
    assert!(after[1] < before[1] + MIB, "address space grows");
    assert_eq!(after[2], before[2], "descriptors");
    assert!(after[3] < before[3] + 10, "mappings");
}

#[test]
fn regions_of_any_size_keep_every_byte() {
    let test = "regions_of_any_size_keep_every_byte";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 256 * MIB);
        for page_bytes in [PAGE, 64 * KIB, 2 * MIB] {
            let runtime = memory.runtime(4 * MIB, page_bytes);
            for bytes in [1, 2, 4095, 4096, 4097, 65_537, 999_999, 2 * MIB + 1] {
                // What is being read ahead would come in behind the advice.
                let mut region = runtime.region_with(bytes, pages(0)).unwrap();
                assert_eq!(region.len(), bytes);
                for (at, byte) in region.iter_mut().enumerate() {
                    *byte = mix(at as u64) as u8;
                }
                region.advise(.., Advice::DontNeed).unwrap();
                assert_eq!(region.resident_pages(), 0);
                let wrong = (0..bytes).find(|&at| region[at] != mix(at as u64) as u8);
                assert_eq!(wrong, None, "{bytes} bytes in pages of {page_bytes}");
                region.flush().unwrap();
                region.close().unwrap();
            }
            assert!(runtime.array::<[u64; 3]>(0).unwrap().is_empty());
            let mut odd = runtime.array::<[u8; 3]>(1001).unwrap();
            odd[1000] = [1, 2, 3];
            assert_eq!((odd.len(), odd[1000], odd[999]), (1001, [1, 2, 3], [0; 3]));
        }
    }
}

#[test]
fn system_calls_read_into_absent_pages_and_write_from_them() {
    let test = "system_calls_read_into_absent_pages_and_write_from_them";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let bytes = 3 * MIB + 77;
    let right: Vec<u8> = (0..bytes).map(|at| mix(at as u64) as u8).collect();
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        for page_bytes in [PAGE, 64 * KIB] {
            // One system call goes over many times what the budget holds. Only filler threads can
            // serve its faults.
            let runtime = builder(512 * KIB, page_bytes)
                .server(&memory.url)
                .fault_mode(FaultMode::Filler)
                .build()
                .unwrap();
            let mut region = runtime.region(bytes).unwrap();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&right).unwrap();
            file.rewind().unwrap();
            file.read_exact(&mut region).unwrap();
            assert!(region[..] == right[..]);
            region.advise(.., Advice::DontNeed).unwrap();
            file.set_len(0).unwrap();
            file.rewind().unwrap();
            file.write_all(&region).unwrap();
            file.rewind().unwrap();
            let mut back = Vec::new();
            file.read_to_end(&mut back).unwrap();
            assert!(back == right);
            region.advise(.., Advice::DontNeed).unwrap();
            // Through a pipe, whose other end waits.
            let (mut reader, mut writer) = std::io::pipe().unwrap();
            let other_end = thread::spawn(move || {
                let mut back = Vec::new();
                reader.read_to_end(&mut back).unwrap();
                back
            });
            writer.write_all(&region).unwrap();
            drop(writer);
            assert!(other_end.join().unwrap() == right);
        }
    }
}

#[test]
fn children_come_and_go_while_the_parent_pages() {
    let test = "children_come_and_go_while_the_parent_pages";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(MIB, PAGE);
        let mut array: RemoteArray<u64> = runtime.array(8 * MIB / 8).unwrap();
        let (array, words) = shared(&mut array);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for thread in 0..3 {
                let stop = &stop;
                scope.spawn(move || {
                    let mut rng = Rng(seed ^ thread as u64);
                    while !stop.load(Ordering::Relaxed) {
                        exercise(words, thread, 3, &mut rng, 100);
                    }
                });
            }
            for _ in 0..20 {
                let mut command = Command::new("true");
                // SAFETY: nothing is done between fork and exec; that something could be makes it a
                // real fork.
                unsafe { command.pre_exec(|| Ok(())) };
                assert!(command.status().unwrap().success());
                // SAFETY: the child calls only functions that are safe in a signal handler.
                match unsafe { fork() }.unwrap() {
                    ForkResult::Child => {
                        // SAFETY: as above.
                        unsafe {
                            libc::usleep(10_000);
                            libc::_exit(0);
                        }
                    }
                    ForkResult::Parent { child } => {
                        // The parent pages on while the child has copies of all descriptors.
                        exercise(words, 0, words.len(), &mut Rng(seed), 1);
                        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_exercised(array);
        assert_eq!(runtime.stats().pager.poisoned, 0);
    }
}

#[test]
fn regions_of_all_page_sizes_share_a_budget() {
    let test = "regions_of_all_page_sizes_share_a_budget";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    let seed = seed(test);
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 512 * MIB);
        let runtime = memory.runtime(6 * MIB, PAGE);
        let mut arrays: Vec<RemoteArray<u64>> = common::page_sizes()
            .map(|page_bytes| {
                let options = RegionOptions::new().page_size(ByteSize(page_bytes as u64));
                runtime.array_with(8 * MIB / 8, options).unwrap()
            })
            .collect();
        let words: Vec<_> = arrays.iter_mut().map(|array| shared(array).1).collect();
        thread::scope(|scope| {
            for thread in 0..6 {
                let words = &words;
                scope.spawn(move || {
                    let mut rng = Rng(seed ^ thread as u64);
                    for _ in 0..1500 {
                        exercise(words[rng.below(words.len())], thread, 6, &mut rng, 1);
                    }
                });
            }
        });
        for array in &arrays {
            assert_exercised(array);
        }
        let stats = runtime.stats();
        assert!(
            stats.pager.peak_resident_bytes <= 6 * MIB as u64,
            "{stats:?}"
        );
        assert_eq!(stats.pager.poisoned, 0, "{stats:?}");
    }
}

#[test]
fn pages_never_written_cost_no_request() {
    let test = "pages_never_written_cost_no_request";
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(MIB, PAGE);
        let array = runtime.array::<u64>(8 * MIB / 8).unwrap();
        for _ in 0..2 {
            assert!(array.iter().all(|&word| word == 0));
        }
        let stats = runtime.stats();
        // The last ones may not be counted yet.
        assert!(stats.pager.fills >= 4000, "{stats:?}");
        let requests = (
            stats.store.fills,
            stats.store.bytes_read,
            stats.store.bytes_written,
            stats.pager.writes,
        );
        assert_eq!(requests, (0, 0, 0, 0), "{stats:?}");
    }
}

#[test]
fn advice_moves_pages_and_keeps_their_bytes() {
    let test = "advice_moves_pages_and_keeps_their_bytes";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(4 * MIB, PAGE);
        let region_pages = 64;
        let mut array = runtime
            .array_with::<u64>(region_pages * PAGE_WORDS, pages(16))
            .unwrap();
        // Random: no fault brings others, so that nothing comes in behind our back.
        array.advise(.., Advice::Random).unwrap();
        fill(&mut array, 1);
        array
            .advise(10 * PAGE_WORDS..20 * PAGE_WORDS, Advice::DontNeed)
            .unwrap();
        // The program runs on as soon as a page is mapped, a moment before its filler counts it.
        wait_until("the other pages are counted", || {
            array.region().resident_pages() == region_pages - 10
        });
        assert_filled(&array, 1);
        array.advise(.., Advice::DontNeed).unwrap();
        assert_eq!(array.region().resident_pages(), 0);
        let faults = runtime.stats().pager.faults;
        assert_filled(&array, 1);
        assert_eq!(runtime.stats().pager.faults - faults, region_pages as u64);

        array.advise(.., Advice::DontNeed).unwrap();
        let faults = runtime.stats().pager.faults;
        array.advise(.., Advice::WillNeed).unwrap();
        wait_until("all pages are here", || {
            array.region().resident_pages() == region_pages
        });
        assert_filled(&array, 1);
        assert_eq!(
            runtime.stats().pager.faults,
            faults,
            "nothing was left to fault on"
        );

        // Sequential: the first fault brings others.
        array.advise(.., Advice::DontNeed).unwrap();
        array.advise(.., Advice::Sequential).unwrap();
        assert_eq!(array[0], mix(1 << 32));
        wait_until("pages are read ahead", || {
            array.region().resident_pages() > 1
        });
        assert_filled(&array, 1);
    }
}

#[test]
fn prefetch_now_leaves_nothing_to_fault_on() {
    let test = "prefetch_now_leaves_nothing_to_fault_on";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(4 * MIB, PAGE);
        let mut array = runtime.array::<u64>(2 * MIB / 8).unwrap();
        fill(&mut array, 1);
        array.advise(.., Advice::DontNeed).unwrap();
        let faults = runtime.stats().pager.faults;
        array.prefetch_now(..).unwrap();
        assert_eq!(array.region().resident_pages(), 2 * MIB / PAGE);
        assert_filled(&array, 1);
        assert_eq!(runtime.stats().pager.faults, faults);
        // More than fits comes and goes.
        let mut large = runtime.array::<u64>(16 * MIB / 8).unwrap();
        fill(&mut large, 2);
        large.prefetch_now(..).unwrap();
        assert_filled(&large, 2);
    }
}

#[test]
fn reading_ahead_saves_most_faults_of_a_sequential_pass() {
    let test = "reading_ahead_saves_most_faults_of_a_sequential_pass";
    let _watchdog = Watchdog::new(test, Duration::from_secs(60));
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 64 * MIB);
        let runtime = memory.runtime(2 * MIB, PAGE);
        let faults = |ahead: usize| {
            let mut array = runtime
                .array_with::<u64>(8 * MIB / 8, pages(ahead))
                .unwrap();
            fill(&mut array, 3);
            array.advise(.., Advice::DontNeed).unwrap();
            let before = runtime.stats().pager.faults;
            assert_filled(&array, 3);
            runtime.stats().pager.faults - before
        };
        let (without, with) = (faults(0), faults(32));
        println!("{fabric}: {without} faults without, {with} with reading ahead");
        assert_eq!(without as usize, 8 * MIB / PAGE);
        assert!(with * 2 < without, "{with} of {without} faults");
    }
}

#[test]
fn region_too_large_for_its_server_is_an_error_and_others_go_on() {
    let test = "region_too_large_for_its_server_is_an_error_and_others_go_on";
    if !can_page(test) {
        return;
    }
    for fabric in fabrics() {
        let memory = Memory::start(fabric, 32 * MIB);
        let runtime = memory.runtime(MIB, PAGE);
        let mut array = runtime.array::<u64>(4 * MIB / 8).unwrap();
        fill(&mut array, 5);
        let error = runtime.array::<u64>(64 * MIB / 8).unwrap_err();
        let full = matches!(
            &error,
            CreateError::Store(farpage_store::CreateError::Alloc {
                source: AllocError::Full { .. },
                ..
            })
        );
        assert!(full, "{error:?}");
        assert!(error.to_string().contains(&memory.url), "{error}");
        assert_filled(&array, 5);
        let mut more = runtime.array::<u64>(4 * MIB / 8).unwrap();
        fill(&mut more, 6);
        assert_filled(&more, 6);
        assert_filled(&array, 5);
        drop(array);
        drop(more);
        assert!(runtime.array::<u64>(usize::MAX).is_err());
        runtime.array::<u64>(8 * MIB / 8).unwrap();
    }
}

#[test]
fn budget_that_holds_less_than_a_page_per_filler_is_an_error() {
    let test = "budget_that_holds_less_than_a_page_per_filler_is_an_error";
    if !can_page(test) {
        return;
    }
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(2 * PAGE, PAGE);
    let options = RegionOptions::new().page_size(ByteSize::kib(8));
    let error = runtime.array_with::<u64>(10, options).unwrap_err();
    assert!(
        matches!(
            error,
            CreateError::Map(farpage_pager::MapError::Budget { .. })
        ),
        "{error:?}"
    );
    runtime.array::<u64>(10).unwrap()[9] = 1;
    for page_bytes in [0, 100, 2 * KIB, 12 * KIB, 4 * MIB] {
        let options = RegionOptions::new().page_size(ByteSize(page_bytes as u64));
        assert!(
            runtime.array_with::<u64>(10, options).is_err(),
            "pages of {page_bytes} bytes"
        );
    }
}

#[test]
fn region_without_a_server_is_an_error() {
    let test = "region_without_a_server_is_an_error";
    if !can_page(test) {
        return;
    }
    let error = builder(MIB, PAGE)
        .build()
        .unwrap()
        .array::<u64>(10)
        .unwrap_err();
    assert!(
        matches!(
            error,
            CreateError::Store(farpage_store::CreateError::NoServer { .. })
        ),
        "{error:?}"
    );
}

#[test]
fn a_server_taken_over_tcp_for_want_of_rdma_is_counted_and_says_why() {
    if !can_page("a_server_taken_over_tcp_for_want_of_rdma_is_counted_and_says_why") {
        return;
    }
    let memory = Memory::start(Fabric::Tcp, 16 * MIB);
    // Nothing speaks RDMA on the loopback interface, on no machine.
    let auto = memory.url.replace("tcp://", "auto://");
    let runtimes = [&memory.url, &auto].map(|url| builder(MIB, PAGE).server(url).build().unwrap());
    assert_eq!(runtimes.each_ref().map(|r| r.stats().fallbacks), [0, 1]);
    assert!(runtimes[1].sessions()[0].fallback().is_some());
    let said = runtimes.each_ref().map(|r| r.stats().to_string());
    assert!(!said[0].contains("rdma"), "{}", said[0]);
    assert!(said[1].contains("want of rdma"), "{}", said[1]);
}
