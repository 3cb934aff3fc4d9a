//! Eight threads against a shadow copy: random reads, writes and atomic additions on an array
//! twenty times the budget, for every page size, over both fabrics, raw and compressed.
//!
//! The rule it keeps: a thread reads and writes only words of its own, so that it knows the right
//! value of each; words of all threads share every page. `FARPAGE_TORTURE_OPS` sets the number of
//! operations in all (the long form is ten million), `FARPAGE_TEST_SEED` repeats a run.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    collections::VecDeque,
    env,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{Fabric, Memory, begin, can_page, can_reach, get, page_sizes, set, shared};
use farpage::{Codec, RegionOptions, RemoteArray};
use farpage_testkit::{KIB, MIB, Rng, Watchdog, mix, seed};

const THREADS: usize = 8;
/// Number of words in a deal: one for each thread, and one for additions of all threads.
const DEAL: usize = THREADS + 1;
/// Data per budget: the budget holds 5 % of the data.
const DATA_PER_BUDGET: usize = 20;
/// Operations of a test over all page sizes; four tests take some ten seconds on two cores.
const OPS_DEFAULT: u64 = 200_000;
/// Operations over RDMA, with an emulated adapter in an emulated machine: the same time for a tenth
/// of the operations, on smaller pages.
const OPS_DEFAULT_RDMA: u64 = 20_000;
const PAGE_BYTES_MAX_RDMA: usize = 128 * KIB;

#[test]
fn eight_threads_over_shm_keep_every_word() {
    torture(Fabric::Shm, Codec::Raw);
}

#[test]
fn eight_threads_over_shm_compressed_keep_every_word() {
    torture(Fabric::Shm, Codec::Lz4);
}

#[test]
fn eight_threads_over_tcp_keep_every_word() {
    torture(Fabric::Tcp, Codec::Raw);
}

#[test]
fn eight_threads_over_tcp_with_changing_codecs_keep_every_word() {
    torture(Fabric::Tcp, Codec::ADAPTIVE);
}

/// Pages of 4 KiB leave as copies here, while threads write to neighbouring pages.
#[test]
fn eight_threads_that_promise_no_direct_io_keep_every_word() {
    let Some(_watchdog) = begin(240) else { return };
    let options = RegionOptions::new().no_direct_io(true);
    let ops = OPS_DEFAULT as usize / THREADS;
    one_page_size(Fabric::Shm, Codec::Raw, 4 * KIB, ops, seed(), options);
}

/// An evictor that copies a page which the program drops at that moment sleeps on its own fault.
/// The page then has its last written-back contents, and its neighbours keep their writes.
#[test]
fn pages_that_the_program_drops_while_they_are_copied_out_come_back_whole() {
    const PAGE_WORDS: usize = 4 * KIB / 8;
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(4 * MIB, 4 * KIB);
    let words = 16 * MIB / 8;
    let options = RegionOptions::new().no_direct_io(true).read_ahead(0);
    let mut array: RemoteArray<u64> = runtime.array_with(words, options).unwrap();
    let (_, all) = shared(&mut array);
    (0..words).for_each(|at| set(all, at, mix(at as u64)));
    array.flush().unwrap();
    let (_, all) = shared(&mut array);
    let pages = words / PAGE_WORDS;
    let end = Instant::now() + Duration::from_secs(6);
    thread::scope(|scope| {
        for reader in 0..3 {
            let mut rng = Rng(seed() + reader);
            scope.spawn(move || {
                while Instant::now() < end {
                    let at = rng.below(words);
                    if at / PAGE_WORDS % 4 > 1 {
                        assert_eq!(get(all, at), mix(at as u64), "word {at}");
                    }
                }
            });
        }
        let mut rng = Rng(seed() + 7);
        scope.spawn(move || {
            // The middle word of every fourth page counts the writes.
            let middle = |page: usize| page * PAGE_WORDS + PAGE_WORDS / 2;
            let mut counts: Vec<_> = (0..pages).map(|page| mix(middle(page) as u64)).collect();
            while Instant::now() < end {
                let page = rng.below(pages / 4) * 4;
                let at = middle(page);
                assert_eq!(get(all, at), counts[page], "word {at}");
                counts[page] = counts[page].wrapping_add(1);
                set(all, at, counts[page]);
            }
        });
        let mut rng = Rng(seed() + 8);
        let base = all.as_ptr() as usize;
        scope.spawn(move || {
            let drop_page = |page: usize| {
                let address = base + page * 4 * KIB;
                // SAFETY: a page of the array, whose words nobody but this thread relies on, or
                // nobody has changed since the flush.
                let dropped =
                    unsafe { libc::madvise(address as *mut _, 4 * KIB, libc::MADV_DONTNEED) };
                assert_eq!(dropped, 0);
            };
            // Pages that are written to right after they were dropped, with values and times.
            let mut written = VecDeque::new();
            let mut count = 0;
            while Instant::now() < end {
                drop_page(rng.below(pages / 4) * 4 + 2);
                let page = rng.below(pages / 4) * 4 + 1;
                if written.iter().any(|&(other, _)| other == page) {
                    continue;
                }
                drop_page(page);
                count += 1;
                set(all, page * PAGE_WORDS, count);
                written.push_back((page, count));
                if written.len() > 16 {
                    let (page, count) = written.pop_front().unwrap();
                    assert_eq!(get(all, page * PAGE_WORDS), count, "page {page}");
                }
            }
        });
    });
    let stats = runtime.stats();
    assert!(
        stats.pager.peak_resident_bytes <= 4 * MIB as u64,
        "{stats:?}"
    );
    array.close().unwrap();
}

#[cfg(feature = "rdma")]
#[test]
fn eight_threads_over_rdma_keep_every_word() {
    torture(Fabric::Rdma, Codec::Raw);
}

#[cfg(feature = "rdma")]
#[test]
fn eight_threads_over_rdma_compressed_keep_every_word() {
    torture(Fabric::Rdma, Codec::Lz4);
}

fn torture(fabric: Fabric, codec: Codec) {
    if !can_page() || !can_reach(fabric) {
        return;
    }
    let (ops_default, page_bytes_max) = match fabric {
        Fabric::Rdma => (OPS_DEFAULT_RDMA, PAGE_BYTES_MAX_RDMA),
        _ => (OPS_DEFAULT, usize::MAX),
    };
    let ops = env::var("FARPAGE_TORTURE_OPS").map_or(ops_default, |ops| {
        ops.parse().expect("FARPAGE_TORTURE_OPS is a whole number")
    }) / 4;
    let _watchdog = Watchdog::new(Duration::from_secs(120 + ops / 500));
    let seed = seed();
    // About the same time for every page size: an operation costs a fill and an eviction.
    let weight = |page_bytes: usize| 1.0 / (20.0 + page_bytes as f64 / 2000.0);
    let page_sizes = || page_sizes().filter(|&bytes| bytes <= page_bytes_max);
    let weights: f64 = page_sizes().map(weight).sum();
    for page_bytes in page_sizes() {
        let ops = ops as f64 * weight(page_bytes) / weights;
        let (ops, options) = (ops as usize / THREADS + 1, RegionOptions::new());
        one_page_size(fabric, codec, page_bytes, ops, seed, options);
    }
}

fn one_page_size(
    fabric: Fabric,
    codec: Codec,
    page_bytes: usize,
    ops_per_thread: usize,
    seed: u64,
    options: RegionOptions,
) {
    let since = Instant::now();
    let budget_bytes = MIB.max(8 * page_bytes);
    // The last page is not a whole one.
    let words = budget_bytes * DATA_PER_BUDGET / 8 + 3;
    let memory = Memory::start(fabric, 3 * words * 8 + 64 * MIB);
    let runtime = memory.runtime(budget_bytes, page_bytes);
    let mut array: RemoteArray<u64> = runtime.array_with(words, options.codec(codec)).unwrap();
    let shadow: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
    let here = format!(
        "{fabric}, {codec:?}, pages of {} KiB, seed {seed}",
        page_bytes / KIB
    );

    let (array, remote) = shared(&mut array);
    lay_out(remote, &shadow, page_bytes / 8);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (here, shadow) = (&here, &shadow);
            let rng = Rng(mix(seed) ^ mix((thread * 64 + page_bytes) as u64));
            scope.spawn(move || run(thread, ops_per_thread, rng, remote, shadow, here));
        }
    });
    array.flush().unwrap();
    for at in 0..words {
        assert_eq!(
            get(remote, at),
            get(&shadow, at),
            "word {at} at the end; {here}"
        );
    }

    let stats = runtime.stats();
    assert!(
        stats.pager.peak_resident_bytes <= budget_bytes as u64,
        "{stats:?}; {here}"
    );
    assert!(stats.pager.evictions > 0, "{stats:?}; {here}");
    let bad = (
        stats.pager.poisoned,
        stats.pager.failed_evictions,
        stats.store.corrupt,
        stats.store.errors,
    );
    assert_eq!(bad, (0, 0, 0, 0), "{stats:?}; {here}");
    println!(
        "{here}: {} operations, {} fills, {} evictions, {} steals in {:?}",
        ops_per_thread * THREADS,
        stats.pager.fills,
        stats.pager.evictions,
        stats.pager.steals,
        since.elapsed()
    );
}

/// Writes pages of all kinds that a store treats differently: never written, one repeated value,
/// noise, smooth, zeros that were written.
fn lay_out(remote: &[AtomicU64], shadow: &[AtomicU64], page_words: usize) {
    for at in 0..remote.len() {
        let page = at / page_words;
        let value = match page % 5 {
            0 => continue,
            1 => page as u64,
            2 => mix(at as u64),
            3 => at as u64 / 16,
            _ => 0,
        };
        set(remote, at, value);
        set(shadow, at, value);
    }
}

fn run(
    thread: usize,
    ops: usize,
    mut rng: Rng,
    remote: &[AtomicU64],
    shadow: &[AtomicU64],
    here: &str,
) {
    let deals = remote.len() / DEAL;
    let mut deal = 0;
    for op in 0..ops {
        // Mostly random deals; one in four follows the last, so that there are runs.
        deal = if rng.one_in(4) {
            deal + 1
        } else {
            rng.below(deals)
        } % deals;
        let own = deal * DEAL + thread;
        match rng.below(16) {
            0 => {
                let (at, more) = (deal * DEAL + THREADS, rng.next());
                remote[at].fetch_add(more, Ordering::Relaxed);
                shadow[at].fetch_add(more, Ordering::Relaxed);
            }
            1..8 => {
                let value = rng.next();
                set(remote, own, value);
                set(shadow, own, value);
            }
            _ => assert_eq!(
                get(remote, own),
                get(shadow, own),
                "word {own}, thread {thread}, operation {op}; {here}"
            ),
        }
    }
}
