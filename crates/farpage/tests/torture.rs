//! Eight threads against a shadow copy: random reads, writes and atomic additions on an array
//! twenty times the budget, for every page size, over both fabrics, raw and compressed.
//!
//! The rule it keeps: a thread reads and writes only words of its own, so that it knows what each
//! of them must be; words of all share every page. `FARPAGE_TORTURE_OPS` sets the number of
//! operations in all (the long form is ten million), `FARPAGE_TEST_SEED` repeats a run.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{
    env,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, KIB, MIB, Memory, Rng, Watchdog, can_page, can_reach, get, mix, seed, set, shared,
};
use farpage::{Codec, RegionOptions, RemoteArray};

const THREADS: usize = 8;
/// Words are dealt to the threads in turn; the last of each deal is everybody's, for additions.
const DEAL: usize = THREADS + 1;
/// The budget holds 5 % of the data.
const DATA_PER_BUDGET: usize = 20;
/// Four tests, each over all page sizes; some ten seconds in all on two cores.
const OPS_DEFAULT: u64 = 200_000;
/// Over RDMA, whose adapter is emulated in a machine that is emulated: the same time for a tenth of
/// the operations and pages that are not so large.
const OPS_DEFAULT_RDMA: u64 = 20_000;
const PAGE_BYTES_MAX_RDMA: usize = 128 * KIB;

#[test]
fn eight_threads_over_shm_keep_every_word() {
    torture(
        "eight_threads_over_shm_keep_every_word",
        Fabric::Shm,
        Codec::Raw,
    );
}

#[test]
fn eight_threads_over_shm_compressed_keep_every_word() {
    torture(
        "eight_threads_over_shm_compressed_keep_every_word",
        Fabric::Shm,
        Codec::Lz4,
    );
}

#[test]
fn eight_threads_over_tcp_keep_every_word() {
    torture(
        "eight_threads_over_tcp_keep_every_word",
        Fabric::Tcp,
        Codec::Raw,
    );
}

#[test]
fn eight_threads_over_tcp_with_changing_codecs_keep_every_word() {
    torture(
        "eight_threads_over_tcp_with_changing_codecs_keep_every_word",
        Fabric::Tcp,
        Codec::ADAPTIVE,
    );
}

#[cfg(feature = "rdma")]
#[test]
fn eight_threads_over_rdma_keep_every_word() {
    torture(
        "eight_threads_over_rdma_keep_every_word",
        Fabric::Rdma,
        Codec::Raw,
    );
}

#[cfg(feature = "rdma")]
#[test]
fn eight_threads_over_rdma_compressed_keep_every_word() {
    torture(
        "eight_threads_over_rdma_compressed_keep_every_word",
        Fabric::Rdma,
        Codec::Lz4,
    );
}

fn torture(test: &'static str, fabric: Fabric, codec: Codec) {
    if !can_page(test) || !can_reach(test, fabric) {
        return;
    }
    let (ops_default, page_bytes_max) = match fabric {
        Fabric::Rdma => (OPS_DEFAULT_RDMA, PAGE_BYTES_MAX_RDMA),
        _ => (OPS_DEFAULT, usize::MAX),
    };
    let ops = env::var("FARPAGE_TORTURE_OPS").map_or(ops_default, |ops| {
        ops.parse().expect("FARPAGE_TORTURE_OPS is a whole number")
    }) / 4;
    let _watchdog = Watchdog::new(test, Duration::from_secs(120 + ops / 500));
    let seed = seed(test);
    // About the same time for every page size: an operation costs a fill and an eviction of its
    // page.
    let weight = |page_bytes: usize| 1.0 / (20.0 + page_bytes as f64 / 2000.0);
    let page_sizes = || common::page_sizes().filter(|&bytes| bytes <= page_bytes_max);
    let weights: f64 = page_sizes().map(weight).sum();
    for page_bytes in page_sizes() {
        let ops = ops as f64 * weight(page_bytes) / weights;
        one_page_size(fabric, codec, page_bytes, ops as usize / THREADS + 1, seed);
    }
}

fn one_page_size(
    fabric: Fabric,
    codec: Codec,
    page_bytes: usize,
    ops_per_thread: usize,
    seed: u64,
) {
    let since = Instant::now();
    let budget_bytes = MIB.max(8 * page_bytes);
    // The last page is not a whole one.
    let words = budget_bytes * DATA_PER_BUDGET / 8 + 3;
    let memory = Memory::start(fabric, 3 * words * 8 + 64 * MIB);
    let runtime = memory.runtime(budget_bytes, page_bytes);
    let mut array: RemoteArray<u64> = runtime
        .array_with(words, RegionOptions::new().codec(codec))
        .unwrap();
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

/// Pages of all kinds that a store treats differently: never written, one repeated value, noise,
/// smooth, zeros that were written.
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
        // Mostly anywhere; now and then on from where it was, so that there are runs.
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
