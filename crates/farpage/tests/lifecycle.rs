//! Regions coming and going, flushed and forked while everything else goes on.
//!
//! The rule it keeps: checks compare what the program sees (bytes, typed errors, figures), over shm
//! and tcp if a server takes part.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, fs,
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
    Call, Fabric, HookedStore, Memory, array_with, begin, builder, fabrics, over_fabrics, shared,
    words::{assert_exercised, assert_filled, exercise, fill},
};
use farpage::{Advice, ByteSize, RegionOptions, RemoteArray, Runtime};
use farpage_testkit::{KIB, MIB, Rng, TestProcess, mix, process::proc_bytes, seed, wait_until};
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

fn pages(pages: usize) -> RegionOptions {
    RegionOptions::new().read_ahead(pages)
}

#[test]
fn ten_thousand_regions_are_unmapped_while_pages_are_evicted() {
    let Some(_watchdog) = begin(180) else { return };
    let seed = seed();
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

/// Makes regions of some pages, writes them, and gives most of them up while pages are under way.
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
    let seed = seed();
    over_fabrics(60, 64 * MIB, |memory| {
        let fabric = memory.fabric;
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
    });
}

#[test]
fn flush_takes_what_was_written_a_moment_ago() {
    let Some(_watchdog) = begin(60) else { return };
    let stored = Arc::new(AtomicUsize::new(0));
    let writes = stored.clone();
    let store = HookedStore::new(64 * PAGE, move |call, _| {
        if call == Call::Write {
            writes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let runtime = builder(MIB, PAGE).build().unwrap();
    let mut array = array_with(&runtime, 64 * PAGE_WORDS, pages(0).store(store));
    // Each page is flushed as soon as its first word is written, when its filler has hardly mapped
    // the page.
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
    let seed = seed();
    over_fabrics(90, 256 * MIB, |memory| {
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
    });
}

#[test]
fn one_instruction_may_touch_two_pages_when_two_fit() {
    let Some(_watchdog) = begin(60) else { return };
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
    let Some(_watchdog) = begin(120) else { return };
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
    let seed = seed();
    over_fabrics(60, 512 * MIB, |memory| {
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
    });
}

const CHILD: &str = "FARPAGE_TEST_LIFECYCLE";

#[test]
fn mapping_and_unmapping_leaves_nothing_behind() {
    if let Ok(url) = env::var(CHILD) {
        return map_and_unmap(&url);
    }
    let Some(_watchdog) = begin(240) else { return };
    for fabric in fabrics() {
        println!("{fabric}:");
        let memory = Memory::start(fabric, 256 * MIB);
        TestProcess::start(&[(CHILD, &memory.url)]).must_pass(Duration::from_secs(60));
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
            proc_bytes("self", "status", "VmRSS"),
            proc_bytes("self", "status", "VmSize"),
            fs::read_dir("/proc/self/fd").unwrap().count(),
            fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .count(),
        ]
    };
    // First cycles, until pools and heaps have their final size.
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
fn children_come_and_go_while_the_parent_pages() {
    let seed = seed();
    over_fabrics(60, 64 * MIB, |memory| {
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
    });
}
