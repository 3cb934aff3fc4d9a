//! Pinned pages: present at every moment, as the kernel's page map and system calls on these pages
//! show, whatever else goes on.
//!
//! The rule it keeps: presence is looked up (`/proc/self/pagemap`), never concluded from the time
//! of an access.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, Memory, ServerProcess, begin, builder, fabrics, get, over_fabrics, serve_if_asked, set,
    shared, stored_here,
    words::{assert_filled, fill},
};
use farpage::{
    Advice, ByteSize, CreateError, PageError, PinError, RegionOptions, RemoteArray, Runtime,
};
use farpage_pager::MapError;
use farpage_store::StoreError;
use farpage_testkit::{KIB, MIB, Rng, mix, seed, test_name, wait_until};

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

/// Counts the absent kernel pages of `slice`: an access to one would fault.
fn absent_pages<T>(slice: *const [T]) -> usize {
    let (start, bytes) = (slice.cast::<u8>() as usize, slice.len() * size_of::<T>());
    let (first, end) = (start / PAGE, (start + bytes).div_ceil(PAGE));
    let mut entries = vec![0; 8 * (end - first)];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap
        .read_exact_at(&mut entries, 8 * first as u64)
        .unwrap();
    let is_present = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) >> 63 == 1;
    let (entries, _) = entries.as_chunks::<8>();
    entries.iter().filter(|entry| !is_present(entry)).count()
}

/// Touches every page of the array, over and over, so that all other pages have to leave.
fn sweep(words: &[u64], stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        for at in (0..words.len()).step_by(PAGE_WORDS) {
            assert_eq!(words[at], mix(at as u64), "word {at}");
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// Makes an array without read-ahead: when the array is given up, no planned page comes back later.
fn array(runtime: &Runtime, words: usize) -> RemoteArray<u64> {
    let options = RegionOptions::new().read_ahead(0);
    runtime.array_with(words, options).unwrap()
}

/// Returns the number of words whose pages can be pinned at once, as the error states that refuses
/// a pin of all of a larger array.
fn most_words(array: &RemoteArray<u64>) -> usize {
    match array.pin(..).unwrap_err() {
        PinError::Budget { most_bytes, .. } => most_bytes as usize / PAGE * PAGE_WORDS,
        other => panic!("{other:?}"),
    }
}

fn assert_budget_error(pinned: Result<(), PinError>) {
    assert!(matches!(pinned, Err(PinError::Budget { .. })), "{pinned:?}");
}

#[test]
fn pinned_pages_stay_while_a_larger_array_is_swept() {
    over_fabrics(60, 64 * MIB, |memory| {
        let fabric = memory.fabric;
        let runtime = memory.runtime(2 * MIB, PAGE);
        let (mut array, mut large) = (
            runtime.array::<u64>(4 * MIB / 8).unwrap(),
            runtime.array::<u64>(8 * MIB / 8).unwrap(),
        );
        fill(&mut array, 0);
        fill(&mut large, 0);
        let pinned = MIB / 8..2 * MIB / 8;
        array.pin(pinned.clone()).unwrap();
        let evictions = || runtime.stats().pager.evictions;
        let (stop, before) = (AtomicBool::new(false), evictions());
        thread::scope(|scope| {
            scope.spawn(|| sweep(&large, &stop));
            scope.spawn(|| sweep(&array, &stop));
            let mut samples = 0;
            wait_until("much has been evicted", || {
                assert_eq!(absent_pages(&array[pinned.clone()]), 0);
                samples += 1;
                evictions() > before + 8000
            });
            stop.store(true, Ordering::Relaxed);
            println!("{fabric}: {samples} samples");
        });
        assert_filled(&array, 0);
        array.unpin(pinned.clone());
        // Pages stay until other pages need the room.
        assert_eq!(absent_pages(&array[pinned.clone()]), 0);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| sweep(&large, &stop));
            wait_until("pages leave that are no longer pinned", || {
                absent_pages(&array[pinned.clone()]) > 0
            });
            stop.store(true, Ordering::Relaxed);
        });
    });
}

/// A pin that comes while pages are on their way out must wait for the right thing.
#[test]
fn system_calls_find_pinned_pages_whatever_leaves() {
    let seed = seed();
    over_fabrics(60, 64 * MIB, |memory| {
        let runtime = memory
            .builder(512 * KIB, PAGE)
            .user_mode_only(true)
            .build()
            .unwrap();
        let mut array = array(&runtime, MIB / 8);
        fill(&mut array, 0);
        let pages = array.len() / PAGE_WORDS;

        let file = tempfile::tempfile().unwrap();
        array.advise(.., Advice::DontNeed).unwrap();
        let error = file.write_all_at(array.region(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");

        let (stop, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        let array = &array;
        thread::scope(|scope| {
            scope.spawn(|| sweep(array, &stop));
            let pinners = (1..4).map(|thread| {
                let turns = &turns;
                scope.spawn(move || {
                    let mut rng = Rng(seed ^ thread);
                    let file = tempfile::tempfile().unwrap();
                    for _ in 0..700 {
                        // Ranges of several threads overlap, and have their pages in common at the
                        // edges.
                        let first = rng.below(pages - 8) * PAGE + rng.below(PAGE);
                        let range = first..first + 1 + rng.below(7 * PAGE);
                        array.region().pin(range.clone()).unwrap();
                        let bytes = &array.region()[range.clone()];
                        file.write_all_at(bytes, 0).unwrap();
                        assert_eq!(absent_pages(bytes), 0);
                        let mut seen = vec![0; bytes.len()];
                        file.read_exact_at(&mut seen, 0).unwrap();
                        assert!(seen == bytes, "bytes {range:?}");
                        array.region().unpin(range);
                        turns.fetch_add(1, Ordering::Relaxed);
                    }
                })
            });
            let pinners: Vec<_> = pinners.collect();
            let results: Vec<_> = pinners.into_iter().map(|pinner| pinner.join()).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(results.iter().all(Result::is_ok), "a pinner has failed");
        });
        assert_filled(array, 0);
        // Nothing is pinned any more: all of the room is free again, and no page is held.
        array.pin(..most_words(array)).unwrap();
        array.unpin(..);
        array.advise(.., Advice::DontNeed).unwrap();
        assert_eq!(absent_pages(&array[..]), pages);
    });
}

#[test]
fn flush_of_pinned_pages_that_are_being_written_loses_nothing() {
    over_fabrics(60, 64 * MIB, |memory| {
        let fabric = memory.fabric;
        let runtime = memory.runtime(2 * MIB, PAGE);
        let mut array = runtime.array::<u64>(MIB / 8).unwrap();
        array.pin(..).unwrap();
        let (stop, rounds) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; 3]);
        {
            let (array, words) = shared(&mut array);
            thread::scope(|scope| {
                for (thread, rounds) in rounds.iter().enumerate() {
                    let stop = &stop;
                    scope.spawn(move || {
                        while !stop.load(Ordering::Relaxed) {
                            let round = rounds.load(Ordering::Relaxed);
                            for at in (thread..words.len()).step_by(3 * 61) {
                                assert_eq!(get(words, at), round as u64, "word {at}");
                                set(words, at, round as u64 + 1);
                            }
                            rounds.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                for turn in 0..100 {
                    if turn % 2 == 0 {
                        array.flush().unwrap();
                    } else {
                        array.advise(.., Advice::DontNeed).unwrap();
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
        assert_eq!(
            absent_pages(&array[..]),
            0,
            "what was flushed is there again"
        );
        array.unpin(..);
        array.advise(.., Advice::DontNeed).unwrap();
        for (thread, rounds) in rounds.iter().enumerate() {
            let rounds = rounds.load(Ordering::Relaxed);
            assert!(rounds > 0);
            for at in (thread..array.len()).step_by(3 * 61) {
                assert_eq!(array[at], rounds as u64, "{fabric}: word {at}");
            }
        }
    });
}

#[test]
fn pages_stay_until_each_pin_is_taken_back() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(2 * MIB, PAGE);
    let mut array = array(&runtime, 64 * PAGE_WORDS);
    fill(&mut array, 0);
    let absent_after_giving_up = |array: &RemoteArray<u64>| {
        array.advise(.., Advice::DontNeed).unwrap();
        absent_pages(&array[..])
    };
    array.pin(..).unwrap();
    // One word pins its page, an empty range pins nothing.
    array.pin(5..6).unwrap();
    array.pin(PAGE_WORDS + 5..PAGE_WORDS + 5).unwrap();
    assert_eq!(absent_after_giving_up(&array), 0);
    array.unpin(..);
    assert_eq!(absent_after_giving_up(&array), 63);
    assert_eq!(absent_pages(&array[..PAGE_WORDS]), 0);
    // An unpin without a pin does nothing, now and at the next pin.
    array.unpin(..);
    array.unpin(..);
    assert_eq!(absent_after_giving_up(&array), 64);
    array.pin(3 * PAGE_WORDS..=5 * PAGE_WORDS).unwrap();
    assert_eq!(absent_pages(&array[3 * PAGE_WORDS..6 * PAGE_WORDS]), 0);
    assert_eq!(absent_after_giving_up(&array), 61);
    assert_filled(&array, 0);
}

#[test]
fn page_that_is_pinned_too_often_is_an_error() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let array = array(&runtime, 2 * PAGE_WORDS);
    (0..255).for_each(|_| array.pin(PAGE_WORDS..).unwrap());
    let error = array.pin(..).unwrap_err();
    assert!(
        matches!(error, PinError::TooOften { page: 1, .. }),
        "{error:?}"
    );
    // The page before it was not pinned either.
    array.advise(.., Advice::DontNeed).unwrap();
    assert_eq!(absent_pages(&array[..]), 1);
    array.unpin(PAGE_WORDS..);
    array.pin(..).unwrap();
}

#[test]
fn more_pins_than_the_budget_has_room_for_are_an_error() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    for budget_bytes in [32 * PAGE, MIB] {
        let runtime = memory.runtime(budget_bytes, PAGE);
        let mut array = array(&runtime, 2 * MIB / 8);
        fill(&mut array, 0);
        let most = most_words(&array);
        assert!(
            budget_bytes / 2 < most * 8 && most * 8 < budget_bytes,
            "{most} words of {budget_bytes} bytes"
        );
        // The failed pin has pinned nothing: all pages can leave, and all of the room is free.
        array.advise(.., Advice::DontNeed).unwrap();
        assert_eq!(absent_pages(&array[..]), 2 * MIB / PAGE);
        array.pin(..most).unwrap();
        assert_budget_error(array.pin(most..most + 1));
        // A page that is pinned already takes no more room.
        array.pin(..most).unwrap();
        array.unpin(..most);
        assert_budget_error(array.pin(most..most + 1));
        // All other pages get on with the room that is left.
        assert_filled(&array, 0);
        assert_eq!(absent_pages(&array[..most]), 0);
        array.unpin(..1);
        array.pin(most..most + 1).unwrap();
        assert_eq!(absent_pages(&array[PAGE_WORDS..most + 1]), 0);
    }
    // Nothing can be pinned in a budget that instructions need whole.
    let runtime = memory.runtime(2 * PAGE, PAGE);
    let mut array = runtime.array::<u64>(MIB / 8).unwrap();
    assert_eq!(most_words(&array), 0);
    fill(&mut array, 0);
    assert_filled(&array, 0);
}

#[test]
fn region_of_larger_pages_than_fit_beside_the_pinned_is_an_error() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let small = runtime.array::<u64>(2 * MIB / 8).unwrap();
    let most = most_words(&small);
    small.pin(..most).unwrap();
    let large = || {
        let options = RegionOptions::new().page_size(ByteSize::kib(256));
        runtime.array_with::<u64>(MIB / 8, options)
    };
    let error = large().unwrap_err();
    match error {
        CreateError::Map(MapError::Budget { pinned_bytes, .. }) => {
            assert_eq!(pinned_bytes as usize, most * 8);
        }
        other => panic!("{other:?}"),
    }
    small.unpin(..);
    small.pin(..64 * PAGE_WORDS).unwrap();
    let mut large = large().unwrap();
    fill(&mut large, 0);
    assert_filled(&large, 0);
    assert_eq!(absent_pages(&small[..64 * PAGE_WORDS]), 0);
    // The larger pages need more room, so fewer pages can be pinned from now on.
    assert_budget_error(small.pin(64 * PAGE_WORDS..65 * PAGE_WORDS));
}

#[test]
fn region_that_is_closed_with_pins_gives_their_room_back() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let most = {
        let array = runtime.array::<u64>(2 * MIB / 8).unwrap();
        most_words(&array)
    };
    for turn in 0..10 {
        let array = runtime.array::<u64>(2 * MIB / 8).unwrap();
        array.pin(..most).unwrap();
        array.pin(..PAGE_WORDS).unwrap();
        if turn % 2 == 0 {
            array.close().unwrap();
        }
    }
    assert_eq!(runtime.stats().pager.resident_bytes, 0);
}

#[test]
fn pin_of_what_a_dead_server_holds_names_it() {
    if serve_if_asked() {
        return;
    }
    let Some(_watchdog) = begin(60) else { return };
    let deadline = Duration::from_secs(1);
    for fabric in fabrics() {
        let mut server = ServerProcess::start(&test_name(), fabric, 64 * MIB);
        let runtime: Runtime = builder(MIB, PAGE)
            .server(&server.url)
            .deadline(deadline)
            .build()
            .unwrap();
        let mut array = array(&runtime, MIB / 2 / 8);
        fill(&mut array, 0);
        array.advise(.., Advice::DontNeed).unwrap();
        server.kill();
        if fabric == Fabric::Shm {
            // Memory over shm outlives its server.
            array.pin(..).unwrap();
            assert_filled(&array, 0);
            continue;
        }
        // Pages that were read before the death is noticed are pinned all the same.
        wait_until("a pin fails", || {
            let pinned = array.pin(..);
            array.unpin(..);
            array.advise(.., Advice::DontNeed).unwrap();
            pinned.is_err()
        });
        let since = Instant::now();
        let error = array.pin(..).unwrap_err();
        // Additional time for a busy machine.
        assert!(
            since.elapsed() < deadline + Duration::from_secs(4),
            "{:?}",
            since.elapsed()
        );
        assert!(
            matches!(&error, PinError::Page(PageError::Store(StoreError::Remote { server: at, .. })) if **at == *server.url),
            "{error:?}"
        );
        assert!(error.to_string().contains(&server.url), "{error}");
        // The failed pin has pinned nothing: as much as ever can be pinned elsewhere.
        let options = stored_here(2 * MIB);
        let own = runtime.array_with::<u64>(2 * MIB / 8, options).unwrap();
        own.pin(..most_words(&own)).unwrap();
    }
}
