//! Stores that users bring: an ordinary file, and stores that fail, stall and panic.
//!
//! The rule it keeps: whatever a store does, the error reaches the program, nothing is lost but
//! data that the store has lost itself, and other regions do not notice.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{
    Call, HookedStore, array_with, begin, builder, get, over_fabrics, set, shared, stored,
    stored_here,
    words::{assert_exercised, exercise, fill},
};
use farpage::{
    Advice, FileStore, FileStoreError, FlushError, PageError, RegionOptions, RemoteArray, Runtime,
};
use farpage_pager::FlushError as PagesError;
use farpage_store::StoreError;
use farpage_testkit::{KIB, MIB, Rng, mix, seed, wait_until};

/// Message of a store that panics.
const BUG: &str = "a bug in the user's store";

/// Builds a runtime without a server.
fn runtime(budget_bytes: usize, page_bytes: usize) -> Runtime {
    builder(budget_bytes, page_bytes)
        .deadline(Duration::from_secs(5))
        .build()
        .unwrap()
}

fn page_error(error: FlushError) -> PageError {
    match error {
        FlushError::Pages(PagesError::Page(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_users(error: &PageError) {
    let is_so = matches!(error, PageError::Store(StoreError::User { .. }));
    assert!(is_so, "{error:?}");
}

#[track_caller]
fn assert_panic(error: &PageError) {
    let is_so = matches!(error, PageError::Store(StoreError::Panicked { .. }));
    assert!(is_so, "{error:?}");
}

#[test]
fn file_keeps_its_bytes_from_one_region_to_the_next() {
    let Some(_watchdog) = begin(60) else { return };
    let directory = tempfile::tempdir().unwrap();
    // Odd lengths: the last page of the region is longer than the rest of the file.
    for bytes in [1, 4095, 4097, 3 * MIB + 5] {
        for page_bytes in [4 * KIB, 64 * KIB] {
            let path = directory.path().join(format!("{bytes}-{page_bytes}"));
            let runtime = runtime(MIB, page_bytes);
            let byte = |at: usize| mix(at as u64) as u8;
            let store = FileStore::create(&path, bytes as u64).unwrap();
            let mut region = runtime.region_with(bytes, stored(store)).unwrap();
            assert!(region.iter().all(|&b| b == 0), "a created file is empty");
            for at in 0..bytes {
                region[at] = byte(at);
            }
            region.flush().unwrap();
            let right: Vec<u8> = (0..bytes).map(byte).collect();
            assert!(
                fs::read(&path).unwrap() == right,
                "{bytes} bytes after a flush"
            );
            region[bytes / 2] ^= 0xff;
            region.close().unwrap();

            assert!(
                FileStore::create(&path, 1).is_err(),
                "what exists is not overwritten"
            );
            let store = FileStore::open(&path, 0, bytes as u64).unwrap();
            let mut region = runtime.region_with(bytes, stored(store)).unwrap();
            region[bytes / 2] ^= 0xff;
            assert!(region[..] == right, "{bytes} bytes reopened");
            // Dropping the region writes back as closing does.
            drop(region);
            assert!(
                fs::read(&path).unwrap() == right,
                "{bytes} bytes at the end"
            );
        }
    }
}

#[test]
fn file_of_the_wrong_length_is_an_error() {
    let Some(_watchdog) = begin(120) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pages");
    assert!(FileStore::open(&path, 0, 1).is_err(), "there is no file");
    fs::write(&path, vec![1; 10_000]).unwrap();
    for (offset, bytes) in [(0, 10_001), (1, 10_000), (u64::MAX, 2)] {
        let error = FileStore::open(&path, offset, bytes).unwrap_err();
        assert!(
            matches!(error, FileStoreError::TooShort { .. }),
            "{error:?}"
        );
    }
    let store = FileStore::open(&path, 4096, 4096).unwrap();
    let runtime = runtime(MIB, 4 * KIB);
    let mut region = runtime.region_with(4096, stored(store)).unwrap();
    region.fill(2);
    region.close().unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 10_000);
    assert!((0..10_000).all(|at| bytes[at] == if (4096..8192).contains(&at) { 2 } else { 1 }));
}

#[test]
fn store_is_asked_for_nothing_beyond_its_region() {
    let Some(_watchdog) = begin(120) else { return };
    let runtime = runtime(MIB, 16 * KIB);
    for bytes in [1, 16 * KIB - 1, 16 * KIB + 1] {
        // The store panics at a call beyond its bytes.
        let mut region = runtime.region_with(bytes, stored_here(bytes)).unwrap();
        region.fill(9);
        region.advise(.., Advice::DontNeed).unwrap();
        region.prefetch_now(..).unwrap();
        assert!(region.iter().all(|&byte| byte == 9));
        region.close().unwrap();
    }
}

#[test]
fn errors_of_a_store_reach_the_program_and_pass() {
    let Some(_watchdog) = begin(60) else { return };
    let seed = seed();
    let mut rng = Rng(seed);
    let calls = AtomicUsize::new(0);
    let sick = Arc::new(AtomicBool::new(true));
    let fails = sick.clone();
    let store = HookedStore::new(MIB, move |_, _| {
        let call = calls.fetch_add(1, Ordering::Relaxed) as u64;
        if fails.load(Ordering::Relaxed) && mix(seed ^ call).is_multiple_of(3) {
            return Err(io::Error::other("moody"));
        }
        Ok(())
    });
    // The budget has room for all pages: a page leaves only on request, so that no plain access
    // meets a failing read.
    let runtime = runtime(4 * MIB, 16 * KIB);
    let options = RegionOptions::new().read_ahead(0).store(store);
    let mut array: RemoteArray<u64> = runtime.array_with(MIB / 8, options).unwrap();
    let mut shadow = vec![0; array.len()];
    let (mut reads, mut writes, mut flushes) = (0, 0, 0);
    for _ in 0..30 {
        // Bring in: until a try succeeds.
        while let Err(error) = array.prefetch_now(..) {
            let PageError::Store(StoreError::User {
                message, operation, ..
            }) = &error
            else {
                panic!("{error:?}");
            };
            assert!(message.contains("moody"), "{error}");
            assert_eq!(*operation, "fill");
            assert!(error.may_retry());
            reads += 1;
            assert!(reads < 100_000, "seed {seed}");
        }
        assert!(array[..] == shadow[..], "seed {seed}");
        for _ in 0..1000 {
            let (at, value) = (rng.below(shadow.len()), rng.next());
            (array[at], shadow[at]) = (value, value);
        }
        match array.flush() {
            Ok(()) => {}
            Err(FlushError::Pages(PagesError::Durable(error))) => {
                assert_eq!(error.to_string(), "moody")
            }
            Err(error) => {
                let error = page_error(error);
                assert_users(&error);
                flushes += 1;
            }
        }
        // Write back: until a try succeeds.
        while let Err(error) = array.advise(.., Advice::DontNeed) {
            assert_users(&error);
            writes += 1;
            assert!(writes < 100_000, "seed {seed}");
        }
        assert_eq!(array.region().resident_pages(), 0);
    }
    println!("{reads} failed reads, {writes} failed evictions, {flushes} failed flushes");
    assert!(reads > 0 && writes > 0 && flushes > 0);

    sick.store(false, Ordering::Relaxed);
    array.prefetch_now(..).unwrap();
    assert!(array[..] == shadow[..], "seed {seed}");
    array.flush().unwrap();
    array.close().unwrap();
}

#[test]
fn evictions_that_fail_now_and_then_lose_nothing() {
    let Some(_watchdog) = begin(60) else { return };
    let seed = seed();
    let calls = AtomicUsize::new(0);
    let sick = Arc::new(AtomicBool::new(true));
    let fails = sick.clone();
    let store = HookedStore::new(8 * MIB, move |call, _| {
        let number = calls.fetch_add(1, Ordering::Relaxed) as u64;
        match call == Call::Write && fails.load(Ordering::Relaxed) {
            true if mix(seed ^ number).is_multiple_of(50) => Err(io::Error::other("moody")),
            _ => Ok(()),
        }
    });
    let runtime = runtime(MIB, 4 * KIB);
    let mut array = array_with(&runtime, 8 * MIB / 8, stored(store));
    let (array, words) = shared(&mut array);
    thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || exercise(words, thread, 4, &mut Rng(seed ^ thread as u64), 3000));
        }
    });
    let stats = runtime.stats();
    assert!(stats.pager.failed_evictions > 0, "{stats:?}");
    assert_eq!(stats.pager.poisoned, 0, "{stats:?}");
    let error = array
        .region()
        .take_error()
        .expect("an eviction in the background failed");
    assert_users(&error);
    sick.store(false, Ordering::Relaxed);
    array.flush().unwrap();
    assert_exercised(array);
}

#[test]
fn panic_of_a_store_is_an_error() {
    let Some(_watchdog) = begin(30) else { return };
    let panics = Arc::new(AtomicU32::new(0));
    let on = panics.clone();
    let store = HookedStore::new(256 * KIB, move |call, _| {
        let on = on.load(Ordering::Relaxed);
        let panic = call == Call::Read && on & 1 != 0 || call == Call::Write && on & 2 != 0;
        assert!(!panic, "{BUG} (this message belongs to a test)");
        Ok(())
    });
    let runtime = runtime(MIB, 16 * KIB);
    let mut array = array_with(&runtime, 256 * KIB / 8, stored(store));
    array.fill(1);
    panics.store(2, Ordering::Relaxed);
    let error = page_error(array.flush().unwrap_err());
    assert_panic(&error);
    assert!(error.to_string().contains(BUG), "{error}");
    panics.store(0, Ordering::Relaxed);
    array.advise(.., Advice::DontNeed).unwrap();
    panics.store(1, Ordering::Relaxed);
    let error = array.prefetch_now(..).unwrap_err();
    assert_panic(&error);
    panics.store(0, Ordering::Relaxed);
    array.prefetch_now(..).unwrap();
    assert!(array.iter().all(|&word| word == 1));
    array.close().unwrap();
}

#[test]
fn stalling_store_does_not_slow_other_regions_down() {
    over_fabrics(120, 128 * MIB, |memory| {
        let fabric = memory.fabric;
        let runtime = memory.runtime(16 * MIB, 4 * KIB);
        let mut fast: RemoteArray<u64> = runtime.array(32 * MIB / 8).unwrap();
        let slow_store = HookedStore::new(8 * MIB, |call, _| {
            if call != Call::Flush {
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        let options = RegionOptions::new().store(slow_store);
        let mut slow: RemoteArray<u64> = runtime.array_with(8 * MIB / 8, options).unwrap();
        fill(&mut fast, 0);
        let (_, fast) = shared(&mut fast);
        let (slow, slow_words) = shared(&mut slow);
        let mut rng = Rng(seed());
        let mut held = false;
        for attempt in 0..3 {
            let alone = fault_p99(fast, &mut rng);
            let (stop, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
            let beside = thread::scope(|scope| {
                for thread in 0..3 {
                    let (stop, turns, mut rng) = (&stop, &turns, rng.clone());
                    scope.spawn(move || {
                        while !stop.load(Ordering::Relaxed) {
                            // The first touch costs nothing; a page that was changed and left costs
                            // 20 ms each way.
                            set(slow_words, rng.below(slow_words.len()), thread);
                            turns.fetch_add(1, Ordering::Relaxed);
                            if rng.one_in(50) {
                                slow.advise(.., Advice::DontNeed).unwrap();
                            }
                        }
                    });
                }
                wait_until("the slow region pages", || {
                    turns.load(Ordering::Relaxed) > 60
                });
                let p99 = fault_p99(fast, &mut rng);
                stop.store(true, Ordering::Relaxed);
                p99
            });
            println!(
                "{fabric}, attempt {attempt}: p99 of faults {alone:?} alone, {beside:?} beside a store that stalls 20 ms"
            );
            // The bound is a millisecond, unless the machine is too busy for that even without the
            // slow store.
            held = beside
                < (4 * alone)
                    .max(Duration::from_millis(1))
                    .min(Duration::from_millis(10));
            if held {
                break;
            }
        }
        assert!(held, "{fabric}: the slow region slows the fast one down");
        assert!(runtime.stats().store.bytes_written > 0);
    });
}

/// Record of a store's calls.
#[derive(Default)]
struct Calls {
    stall: AtomicBool,
    stalled: AtomicUsize,
    /// True if a worker has made the last call itself.
    by_worker: AtomicBool,
}

/// Makes a store that returns at once until it is told to stall.
fn stalling_store(bytes: usize) -> (impl farpage::Store, Arc<Calls>) {
    let calls = Arc::<Calls>::default();
    let told = calls.clone();
    let store = HookedStore::new(bytes, move |call, _| {
        if call == Call::Flush {
            return Ok(());
        }
        let by_worker = thread::current().name() != Some("farpage-store");
        told.by_worker.store(by_worker, Ordering::SeqCst);
        told.stalled.fetch_add(1, Ordering::SeqCst);
        while told.stall.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        told.stalled.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    });
    (store, calls)
}

#[test]
fn store_that_workers_call_and_that_stalls_holds_up_nobody_else() {
    let Some(_watchdog) = begin(60) else { return };
    for stalled_call in [Call::Read, Call::Write] {
        let runtime = runtime(2 * MIB, 4 * KIB);
        let (store, calls) = stalling_store(MIB);
        let options = stored(store);
        let mut own: RemoteArray<u64> = runtime.array_with(MIB / 8, options).unwrap();
        let options = stored_here(8 * MIB);
        let mut other: RemoteArray<u64> = runtime.array_with(8 * MIB / 8, options).unwrap();
        fill(&mut other, 0);
        own.advise(.., Advice::Random).unwrap();
        // Every second page, so that each page is a call of its own.
        let pages = || (0..MIB / 8).step_by(2 * 512);
        let mut rounds = 0;
        wait_until("workers call the store", || {
            own.advise(.., Advice::DontNeed).unwrap();
            pages().for_each(|at| assert_eq!(own[at], rounds));
            if stalled_call == Call::Write {
                rounds += 1;
                pages().for_each(|at| own[at] = rounds);
                own.flush().unwrap();
            }
            calls.by_worker.load(Ordering::SeqCst)
        });
        match stalled_call {
            Call::Write => pages().for_each(|at| own[at] = rounds + 1),
            _ => own.advise(.., Advice::DontNeed).unwrap(),
        }
        calls.stall.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let own = &own;
            for thread in 0..4 {
                scope.spawn(move || match stalled_call {
                    Call::Write => own.flush().unwrap(),
                    _ => assert_eq!(own[thread * 2 * 512], rounds),
                });
            }
            wait_until("the store stalls", || {
                calls.stalled.load(Ordering::SeqCst) > 0
            });
            let began = Instant::now();
            // Faults, writebacks, and a region that begins and ends.
            assert!((0..other.len()).all(|at| other[at] == mix(at as u64)));
            other.flush().unwrap();
            let options = stored_here(MIB);
            let mut third: RemoteArray<u64> = runtime.array_with(MIB / 8, options).unwrap();
            third.fill(3);
            third.close().unwrap();
            let stalled = calls.stalled.load(Ordering::SeqCst);
            println!(
                "{stalled_call:?}: {:?} beside {stalled} calls that stall",
                began.elapsed()
            );
            assert!(stalled > 0);
            calls.stall.store(false, Ordering::SeqCst);
        });
        let last = rounds + u64::from(stalled_call == Call::Write);
        pages().for_each(|at| assert_eq!(own[at], last));
        own.close().unwrap();
        other.close().unwrap();
    }
}

#[test]
fn store_that_reads_another_region_is_served() {
    let Some(_watchdog) = begin(120) else { return };
    let runtime = runtime(MIB, 4 * KIB);
    let mut below = array_with(&runtime, 4 * MIB / 8, stored_here(4 * MIB));
    fill(&mut below, 0);
    let below = Arc::new(below);
    // The region ends in this thread, whichever thread calls its store last.
    let behind = Arc::downgrade(&below);
    let store = HookedStore::new(4 * MIB, move |_, offset| {
        if let Some(below) = behind.upgrade() {
            let at = offset as usize / 8;
            assert_eq!(below[at], mix(at as u64), "word {at}");
        }
        Ok(())
    });
    let above = array_with(&runtime, 4 * MIB / 8, stored(store));
    above.advise(.., Advice::Random).unwrap();
    thread::scope(|scope| {
        for thread in 0..3 {
            let (above, mut rng) = (&above, Rng(seed() ^ thread));
            scope.spawn(move || {
                for _ in 0..2000 {
                    assert_eq!(above[rng.below(above.len())], 0);
                }
            });
        }
    });
    drop(above);
    drop(below);
}

#[test]
fn trusted_store_that_panics_fails_its_pages_alone() {
    let Some(_watchdog) = begin(30) else { return };
    let panics = Arc::new(AtomicBool::new(false));
    let on = panics.clone();
    let store = HookedStore::new(MIB, move |_, _| {
        let panics = on.load(Ordering::Relaxed);
        assert!(!panics, "{BUG} (this message belongs to a test)");
        Ok(())
    });
    let runtime = runtime(512 * KIB, 4 * KIB);
    let mut array = array_with(&runtime, MIB / 8, stored(store));
    array.advise(.., Advice::Random).unwrap();
    array.fill(1);
    assert!(array.iter().all(|&word| word == 1));
    panics.store(true, Ordering::Relaxed);
    for page in 0..8 {
        if let Err(error) = array.prefetch_now(page * 512..page * 512 + 1) {
            assert_panic(&error);
        }
    }
    panics.store(false, Ordering::Relaxed);
    array.prefetch_now(..16 * 512).unwrap();
    for page in 0..256 {
        array.prefetch_now(page * 512..page * 512 + 1).unwrap();
        assert_eq!(array[page * 512], 1);
    }
    array.close().unwrap();
}

/// Returns the 99th percentile of the times of accesses that find their page absent.
fn fault_p99(words: &[std::sync::atomic::AtomicU64], rng: &mut Rng) -> Duration {
    let mut times: Vec<Duration> = (0..6000)
        .map(|_| {
            let at = rng.below(words.len());
            let since = Instant::now();
            assert_eq!(get(words, at), mix(at as u64), "word {at}");
            since.elapsed()
        })
        .collect();
    // Half of the data is resident: hits take no time and do not count.
    times.retain(|&time| time > Duration::from_micros(2));
    times.sort_unstable();
    times[times.len() * 99 / 100]
}
