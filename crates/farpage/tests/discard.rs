//! Discarded ranges read as zeros, and their old contents are gone: locally, at the servers, and
//! for every thread that looks.
//!
//! The rule it keeps: a value that was written before a discard began is never seen after it.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, Memory, array_with, begin, builder, get, over_fabrics, set, shared, stored_here,
    words::{assert_filled, fill},
};
use farpage::{Advice, FaultMode, RegionOptions, RemoteArray, Reserve, Runtime};
use farpage_testkit::{KIB, MIB, Rng, mix, seed, wait_until};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

/// Options without read-ahead: only pages that are touched come in.
fn no_read_ahead() -> RegionOptions {
    RegionOptions::new().read_ahead(0)
}

#[test]
fn discarded_range_reads_as_zeros_and_nothing_is_written_back() {
    over_fabrics(60, 16 * MIB, |memory| {
        let runtime = memory.runtime(64 * PAGE, PAGE);
        let mut array = array_with(&runtime, 200 * PAGE_WORDS, no_read_ahead());
        fill(&mut array, 1);
        let kept = |array: &RemoteArray<u64>, gone: std::ops::Range<usize>| {
            for (at, &word) in array.iter().enumerate() {
                let expected = if gone.contains(&at) {
                    0
                } else {
                    mix(at as u64 ^ 1 << 32)
                };
                assert_eq!(word, expected, "word {at}");
            }
        };
        kept(&array, 0..0);
        // 1. All of it remote, and parts of pages at both ends.
        array.advise(.., Advice::DontNeed).unwrap();
        let (before, gone) = (
            runtime.stats().store.bytes_written,
            10..150 * PAGE_WORDS + 7,
        );
        array.discard_range(gone.clone()).unwrap();
        assert_eq!(runtime.stats().store.bytes_written, before);
        assert!(array.region().resident_pages() <= 2, "the two at the ends");
        kept(&array, gone.clone());
        let written = runtime.stats().store.bytes_written - before;
        assert!(written <= 2 * PAGE as u64, "zeros need no slot: {written}");
        // 2. Changed and in memory.
        array[20 * PAGE_WORDS..30 * PAGE_WORDS].fill(5);
        let resident = array.region().resident_pages();
        array
            .discard_range(20 * PAGE_WORDS..30 * PAGE_WORDS)
            .unwrap();
        assert!(array.region().resident_pages() <= resident);
        kept(&array, gone.clone());
        // 3. The end of the array, which is not the end of a page.
        let mut odd: RemoteArray<u8> = runtime.array_with(3 * PAGE + 5, no_read_ahead()).unwrap();
        odd.fill(7);
        odd.discard_range(2 * PAGE..).unwrap();
        assert!(odd[..2 * PAGE].iter().all(|&byte| byte == 7));
        assert!(odd[2 * PAGE..].iter().all(|&byte| byte == 0));
        odd.discard_range(5..9).unwrap();
        assert_eq!(odd[4..10], [7, 0, 0, 0, 0, 7]);
        odd.discard_range(..).unwrap();
        assert_eq!(odd.region().resident_pages(), 0);
        assert!(odd.iter().all(|&byte| byte == 0));
    });
}

/// The server has room for half of the bytes that are written over time.
#[test]
fn slots_of_discarded_pages_are_free() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = memory.runtime(2 * MIB, PAGE);
    let options = RegionOptions::new().reserve(Reserve::OnDemand);
    let words = 10 * MIB / 8;
    let mut array: RemoteArray<u64> = runtime.array_with(4 * words, options).unwrap();
    for part in 0..4 {
        let part = part * words..(part + 1) * words;
        fill(&mut array[part.clone()], 2);
        array.advise(part.clone(), Advice::DontNeed).unwrap();
        assert_filled(&array[part.clone()], 2);
        array.discard_range(part).unwrap();
        assert!(array.take_error().is_none());
    }
}

#[test]
fn pinned_pages_stay_in_memory_as_zeros() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = memory.runtime(64 * PAGE, PAGE);
    let mut array: RemoteArray<u64> = runtime.array_with(8 * PAGE_WORDS, no_read_ahead()).unwrap();
    fill(&mut array, 3);
    array.pin(2 * PAGE_WORDS..5 * PAGE_WORDS).unwrap();
    array.discard_range(..).unwrap();
    assert_eq!(array.region().resident_pages(), 3);
    let faults = runtime.stats().pager.faults;
    assert!(
        array[2 * PAGE_WORDS..5 * PAGE_WORDS]
            .iter()
            .all(|&word| word == 0)
    );
    assert_eq!(runtime.stats().pager.faults, faults);
    array.unpin(2 * PAGE_WORDS..5 * PAGE_WORDS);
    array.discard_range(..).unwrap();
    assert_eq!(array.region().resident_pages(), 0);
}

/// Pages that a stream has read ahead stay unmapped until a touch, and have an owner.
#[test]
fn pages_that_are_read_ahead_are_discarded() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(8 * MIB, PAGE);
    let mut array: RemoteArray<u64> = runtime.array(16 * MIB / 8).unwrap();
    array.advise(.., Advice::Sequential).unwrap();
    for round in 1..20 {
        fill(&mut array[..1024 * PAGE_WORDS], round);
        array.advise(.., Advice::DontNeed).unwrap();
        assert_filled(&array[..100 * PAGE_WORDS], round);
        array.discard_range(..).unwrap();
        assert!(array.iter().all(|&word| word == 0));
        array.discard_range(..).unwrap();
    }
}

/// Memory that a program frees and takes again is new: its pages do not count as returns.
#[test]
fn what_is_touched_after_a_discard_has_not_come_back() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = memory.runtime(8 * MIB, PAGE);
    let mut array: RemoteArray<u64> = runtime.array(MIB / 8).unwrap();
    for round in 1..4 {
        fill(&mut array, round);
        if round == 2 {
            array.advise(.., Advice::DontNeed).unwrap();
        }
        array.discard_range(..).unwrap();
    }
    fill(&mut array, 4);
    assert_eq!(runtime.stats().pager.returns, 0);
    array.advise(.., Advice::DontNeed).unwrap();
    assert_filled(&array, 4);
    // A page that has come in is counted a moment after it is mapped.
    let (returns, all) = (|| runtime.stats().pager.returns, (MIB / PAGE) as u64);
    wait_until("all have come back", || returns() >= all);
    assert_eq!(returns(), all);
}

#[test]
fn users_own_store_gets_zeros() {
    let Some(_watchdog) = begin(120) else { return };
    let runtime = builder(MIB, PAGE).build().unwrap();
    let options = stored_here(8 * PAGE);
    let mut array: RemoteArray<u64> = runtime.array_with(8 * PAGE_WORDS, options).unwrap();
    fill(&mut array, 4);
    array.flush().unwrap();
    array.discard_range(PAGE_WORDS..6 * PAGE_WORDS).unwrap();
    array.advise(.., Advice::DontNeed).unwrap();
    assert!(
        array[PAGE_WORDS..6 * PAGE_WORDS]
            .iter()
            .all(|&word| word == 0)
    );
    assert_filled(&array[..PAGE_WORDS], 4);
}

#[test]
fn published_version_keeps_what_is_discarded_later() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(64 * PAGE, PAGE);
    let byte = |at: usize| mix(at as u64) as u8;
    let options = RegionOptions::new().name("kept");
    let mut region = runtime.region_with(200 * PAGE, options).unwrap();
    for (at, slot) in region.iter_mut().enumerate() {
        *slot = byte(at);
    }
    region.flush().unwrap();
    region.discard_range(..).unwrap();
    region[0] = 1;
    region.advise(.., Advice::DontNeed).unwrap();
    // Nothing of the discarded region is published.
    region.discard();
    let mut region = runtime.open_region("kept").unwrap();
    assert!((region.iter().enumerate()).all(|(at, &seen)| seen == byte(at)));
    region.close().unwrap();
    // Pages of a region that was opened and not touched yet.
    region = runtime.open_region("kept").unwrap();
    region.discard_range(..).unwrap();
    region.close().unwrap();
    let region = runtime.open_region("kept").unwrap();
    assert!(region.iter().all(|&seen| seen == 0));
}

/// Writers raise their words while others discard them and pages are evicted all the time.
#[test]
fn no_value_of_before_is_seen_after_a_discard() {
    let seed = seed();
    over_fabrics(120, 64 * MIB, |memory| {
        race(&memory.runtime(32 * PAGE, PAGE), seed);
        let in_thread = builder(32 * PAGE, PAGE).fault_mode(FaultMode::InThread);
        race(&in_thread.server(&memory.url).build().unwrap(), seed);
    });
}

const RACED_PAGES: usize = 96;

fn race(runtime: &Runtime, seed: u64) {
    let mut array: RemoteArray<u64> = runtime.array(RACED_PAGES * PAGE_WORDS).unwrap();
    let (array, words) = shared(&mut array);
    let stop = AtomicBool::new(false);
    // The highest value that each page's first word has surely had.
    let written: Vec<AtomicU64> = (0..RACED_PAGES).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for part in 0..2 {
            let (written, stop) = (&written, &stop);
            scope.spawn(move || {
                let mut rng = Rng(mix(seed) ^ part);
                let mut value = 0;
                while !stop.load(Ordering::Relaxed) {
                    value += 1;
                    let page = 2 * rng.below(RACED_PAGES / 2) + part as usize;
                    set(words, page * PAGE_WORDS, value);
                    set(words, page * PAGE_WORDS + 100, value);
                    written[page].store(value, Ordering::Release);
                }
            });
        }
        let discarder = |number: u64| {
            let (written, stop) = (&written, &stop);
            move || {
                let (mut rng, since) = (Rng(mix(seed + 1) ^ number), Instant::now());
                let (mut rounds, mut gone) = (0, 0);
                while since.elapsed() < Duration::from_millis(700) || rounds < 50 {
                    rounds += 1;
                    let first = rng.below(RACED_PAGES);
                    let end = (first + 1 + rng.below(12)).min(RACED_PAGES);
                    let before: Vec<u64> = written[first..end]
                        .iter()
                        .map(|word| word.load(Ordering::Acquire))
                        .collect();
                    let bytes = first * PAGE..end * PAGE;
                    // SAFETY: the words are atomic, and nobody has a reference to plain ones.
                    unsafe { array.region().discard_shared(bytes) }.unwrap();
                    for (page, before) in (first..end).zip(before) {
                        for word in [0, 100] {
                            let seen = get(words, page * PAGE_WORDS + word);
                            assert!(
                                seen == 0 || seen > before,
                                "page {page}: {seen} was written before the discard, seed {seed}"
                            );
                            gone += u64::from(before > 0);
                        }
                    }
                }
                stop.store(true, Ordering::Relaxed);
                gone
            }
        };
        let discarders = [scope.spawn(discarder(1)), scope.spawn(discarder(2))];
        for thread in discarders {
            let gone = thread.join();
            stop.store(true, Ordering::Relaxed);
            assert!(gone.unwrap() > 0, "nothing was there to discard");
        }
    });
    assert!(array.region().take_error().is_none());
}

#[test]
fn core_dumps_leave_regions_out() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 16 * MIB);
    let runtime = memory.runtime(64 * PAGE, PAGE);
    let region = runtime.region(MIB).unwrap();
    let address = region.as_ptr() as usize;
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    let mut seen = 0;
    for line in smaps.lines() {
        let range = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'));
        if let Some((start, end)) = range
            && let (Ok(start), Ok(end)) = (
                usize::from_str_radix(start, 16),
                usize::from_str_radix(end, 16),
            )
        {
            inside = start < address + MIB && address < end;
        }
        if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
            seen += 1;
        }
    }
    assert!(seen > 0, "the region is in smaps");
}
