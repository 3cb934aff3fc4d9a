//! Regions at the edges: of any size, given to system calls, advised, and refused.
//!
//! The rule it keeps: checks compare what the program sees (bytes, typed errors, figures), over shm
//! and tcp if a server takes part.

mod common;

use std::{
    io::{Read, Seek, Write},
    thread,
};

use common::{
    Fabric, Memory, array_with, begin, builder, over_fabrics, page_sizes, shared,
    words::{self, assert_exercised, assert_filled, exercise, fill},
};
use farpage::{Advice, ByteSize, CreateError, FaultMode, RegionOptions, RemoteArray};
use farpage_fabric::AllocError;
use farpage_testkit::{KIB, MIB, Rng, mix, seed, wait_until};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

fn pages(pages: usize) -> RegionOptions {
    RegionOptions::new().read_ahead(pages)
}

#[test]
fn regions_of_any_size_keep_every_byte() {
    over_fabrics(60, 256 * MIB, |memory| {
        for page_bytes in [PAGE, 64 * KIB, 2 * MIB] {
            let runtime = memory.runtime(4 * MIB, page_bytes);
            for bytes in [1, 2, 4095, 4096, 4097, 65_537, 999_999, 2 * MIB + 1] {
                // Pages that are being read ahead would come in after the advice.
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
    });
}

#[test]
fn system_calls_read_into_absent_pages_and_write_from_them() {
    let bytes = 3 * MIB + 77;
    let right = words::bytes(bytes, 0);
    over_fabrics(60, 64 * MIB, |memory| {
        for page_bytes in [PAGE, 64 * KIB] {
            // One system call moves many times the budget. Only filler threads can serve its
            // faults.
            let runtime = memory
                .builder(512 * KIB, page_bytes)
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
            // Through a pipe with a waiting thread at its other end.
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
    });
}

#[test]
fn regions_of_all_page_sizes_share_a_budget() {
    let seed = seed();
    over_fabrics(60, 512 * MIB, |memory| {
        let runtime = memory.runtime(6 * MIB, PAGE);
        let mut arrays: Vec<RemoteArray<u64>> = page_sizes()
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
    });
}

#[test]
fn pages_never_written_cost_no_request() {
    over_fabrics(120, 64 * MIB, |memory| {
        let runtime = memory.runtime(MIB, PAGE);
        let array = runtime.array::<u64>(8 * MIB / 8).unwrap();
        for _ in 0..2 {
            assert!(array.iter().all(|&word| word == 0));
        }
        let stats = runtime.stats();
        // The last fills may not be counted yet.
        assert!(stats.pager.fills >= 4000, "{stats:?}");
        let requests = (
            stats.store.fills,
            stats.store.bytes_read,
            stats.store.bytes_written,
            stats.pager.writes,
        );
        assert_eq!(requests, (0, 0, 0, 0), "{stats:?}");
    });
}

#[test]
fn advice_moves_pages_and_keeps_their_bytes() {
    over_fabrics(60, 64 * MIB, |memory| {
        let runtime = memory.runtime(4 * MIB, PAGE);
        let region_pages = 64;
        let mut array = array_with(&runtime, region_pages * PAGE_WORDS, pages(16));
        // Random: a fault brings no other pages.
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

        // Sequential: the first fault brings other pages.
        array.advise(.., Advice::DontNeed).unwrap();
        array.advise(.., Advice::Sequential).unwrap();
        assert_eq!(array[0], mix(1 << 32));
        wait_until("pages are read ahead", || {
            array.region().resident_pages() > 1
        });
        assert_filled(&array, 1);
    });
}

#[test]
fn prefetch_now_leaves_nothing_to_fault_on() {
    over_fabrics(60, 64 * MIB, |memory| {
        let runtime = memory.runtime(4 * MIB, PAGE);
        let mut array = runtime.array::<u64>(2 * MIB / 8).unwrap();
        fill(&mut array, 1);
        array.advise(.., Advice::DontNeed).unwrap();
        let faults = runtime.stats().pager.faults;
        array.prefetch_now(..).unwrap();
        assert_eq!(array.region().resident_pages(), 2 * MIB / PAGE);
        assert_filled(&array, 1);
        assert_eq!(runtime.stats().pager.faults, faults);
        // More data than the budget comes and goes.
        let mut large = runtime.array::<u64>(16 * MIB / 8).unwrap();
        fill(&mut large, 2);
        large.prefetch_now(..).unwrap();
        assert_filled(&large, 2);
    });
}

#[test]
fn reading_ahead_saves_most_faults_of_a_sequential_pass() {
    over_fabrics(60, 64 * MIB, |memory| {
        let fabric = memory.fabric;
        let runtime = memory.runtime(2 * MIB, PAGE);
        let faults = |ahead: usize| {
            let mut array = array_with(&runtime, 8 * MIB / 8, pages(ahead));
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
    });
}

/// First touches of memory that is ample, in an order without a pattern.
#[test]
fn blank_pages_come_along_while_there_is_ample_room_and_not_otherwise() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let stats = |budget: usize, ahead: usize| {
        let runtime = memory.runtime(budget, PAGE);
        let mut array = array_with(&runtime, 8 * MIB / 8, pages(ahead));
        let count = 8 * MIB / PAGE;
        for at in 0..count {
            // 389 shares no factor with a power of two, so each page comes once.
            array[at * 389 % count * (PAGE / 8)] = at as u64 + 1;
        }
        for at in 0..count {
            assert_eq!(array[at * 389 % count * (PAGE / 8)], at as u64 + 1);
        }
        let pager = runtime.stats().pager;
        let (faults, along) = (pager.faults as usize, pager.prefetches as usize);
        println!("budget {budget}, {ahead} ahead: {faults} faults, {along} of {count} pages along");
        (faults, along, count)
    };
    let (ample, _, count) = stats(16 * MIB, 32);
    assert!(ample * 3 < count, "{ample} faults");
    let (without, along, _) = stats(16 * MIB, 0);
    assert_eq!((without, along), (count, 0), "read-ahead is turned off");
    // Room for a quarter of the pages. Once it is full, pages come alone.
    let (_, along, _) = stats(2 * MIB, 32);
    assert!(along < count / 2, "{along} came along");
}

#[test]
fn region_too_large_for_its_server_is_an_error_and_others_go_on() {
    over_fabrics(120, 32 * MIB, |memory| {
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
    });
}

#[test]
fn budget_that_holds_less_than_a_page_per_filler_is_an_error() {
    let Some(_watchdog) = begin(120) else { return };
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
    let Some(_watchdog) = begin(120) else { return };
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
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Tcp, 16 * MIB);
    // The loopback interface has no RDMA on any machine.
    let auto = memory.url.replace("tcp://", "auto://");
    let runtimes = [&memory.url, &auto].map(|url| builder(MIB, PAGE).server(url).build().unwrap());
    assert_eq!(runtimes.each_ref().map(|r| r.stats().fallbacks), [0, 1]);
    assert!(runtimes[1].sessions()[0].fallback().is_some());
    let said = runtimes.each_ref().map(|r| r.stats().to_string());
    assert!(!said[0].contains("rdma"), "{}", said[0]);
    assert!(said[1].contains("want of rdma"), "{}", said[1]);
}
