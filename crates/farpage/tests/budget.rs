//! The residency budget, seen from the kernel: the anonymous memory of a process that pages under
//! pressure.
//!
//! The rule it keeps: a budget is measured in a process of its own that does nothing else, with the
//! server in another process. Memory that a server lends over shm is shared, not anonymous, so it
//! does not count.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use common::{
    Fabric, Memory, begin, builder, can_page, fabrics, shared,
    words::{assert_filled, exercise, fill, word},
};
use farpage::{Allowance, ByteSize, Codec, RegionOptions, RemoteArray, Runtime};
use farpage_testkit::{
    KIB, MIB, Rng, TestProcess, Watchdog, mix, process::proc_bytes, seed, wait_until,
};

const THREADS: usize = 4;
const ROUNDS: usize = 10;
const CHILD: &str = "FARPAGE_TEST_BUDGET";
/// Upper bound of anonymous memory beside pages: words and entries of pages, page tables, heaps of
/// threads. Measured at 0.5 to 2 MiB.
const SLACK_BYTES: usize = 4 * MIB;
/// Upper bound of buffers for encoded pages, beside the budget: 4 MiB per worker. Measured at 10
/// MiB for four workers.
const STAGING_BYTES: usize = 4 * 4 * MIB;

#[test]
fn anonymous_memory_stays_within_the_budget() {
    in_a_process_of_its_own(|url, seed| {
        let budget_bytes = 48 * MIB;
        let runtime = builder(budget_bytes, 4 * KIB).server(url).build().unwrap();
        let regions = [
            (4 * KIB, 64 * MIB, Codec::Raw),
            (64 * KIB, 96 * MIB, Codec::Raw),
            (2 * MIB, 160 * MIB, Codec::Raw),
            (256 * KIB, 96 * MIB, Codec::Raw),
        ];
        pressure(&runtime, &regions, budget_bytes, SLACK_BYTES, 300, seed);
    });
}

#[test]
fn budget_beyond_memory_is_an_error_that_says_so() {
    let most = Allowance::of_this_process().bytes;
    let error = Runtime::builder().budget(ByteSize(most + 1)).build();
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("a budget of") && text.contains("does not fit"),
        "{text}"
    );
    if can_page() {
        Runtime::builder().budget(ByteSize(most)).build().unwrap();
    }
}

#[test]
fn compressing_takes_its_buffers_and_no_more() {
    in_a_process_of_its_own(|url, seed| {
        let budget_bytes = 32 * MIB;
        let runtime = builder(budget_bytes, 4 * KIB).server(url).build().unwrap();
        let regions = [
            (64 * KIB, 96 * MIB, Codec::Lz4),
            (2 * MIB, 128 * MIB, Codec::Lz4),
        ];
        let slack_bytes = SLACK_BYTES + STAGING_BYTES;
        pressure(&runtime, &regions, budget_bytes, slack_bytes, 200, seed);
    });
}

#[test]
fn one_page_per_filler_is_never_exceeded() {
    in_a_process_of_its_own(|url, seed| {
        let budget_bytes = 2 * 64 * KIB;
        let runtime = builder(budget_bytes, 64 * KIB).server(url).build().unwrap();
        let regions = [
            (64 * KIB, 16 * MIB, Codec::Raw),
            (4 * KIB, 8 * MIB, Codec::Raw),
        ];
        pressure(&runtime, &regions, budget_bytes, SLACK_BYTES, 200, seed);
    });
}

/// Runs `body` over both fabrics, each time in a process with nothing but a client.
fn in_a_process_of_its_own(body: fn(&str, u64)) {
    if let Ok(url) = env::var(CHILD) {
        return body(&url, seed());
    }
    if !can_page() {
        return;
    }
    for fabric in fabrics() {
        println!("{fabric}:");
        let memory = Memory::start(fabric, 1 << 30);
        TestProcess::start(&[(CHILD, &memory.url)]).must_pass(Duration::from_secs(200));
    }
}

/// Reads and writes at random on all regions by several threads, while another thread watches the
/// kernel's counter of anonymous pages. `smaps_rollup` is read between rounds: it walks the
/// mappings one after the other, and would count a page twice that moves meanwhile.
fn pressure(
    runtime: &Runtime,
    regions: &[(usize, usize, Codec)],
    budget_bytes: usize,
    slack_bytes: usize,
    ops_per_round: usize,
    seed: u64,
) {
    let _watchdog = Watchdog::new(Duration::from_secs(180));
    let baseline_bytes = proc_bytes("self", "smaps_rollup", "Anonymous");
    let mut arrays: Vec<RemoteArray<u64>> = regions
        .iter()
        .map(|&(page_bytes, bytes, codec)| {
            let options = RegionOptions::new()
                .page_size(ByteSize(page_bytes as u64))
                .codec(codec);
            runtime.array_with(bytes / 8, options).unwrap()
        })
        .collect();
    let words: Vec<_> = arrays.iter_mut().map(|array| shared(array).1).collect();
    let (peak_bytes, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut peak_rollup_bytes = 0;
    let samples = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut samples = 0;
            while !done.load(Ordering::Relaxed) {
                peak_bytes.fetch_max(proc_bytes("self", "status", "RssAnon"), Ordering::Relaxed);
                samples += 1;
            }
            samples
        });
        for round in 0..ROUNDS {
            thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (words, mut rng) =
                        (&words, Rng(mix(seed) ^ (round * THREADS + thread) as u64));
                    scope.spawn(move || {
                        for _ in 0..ops_per_round {
                            let words = words[rng.below(words.len())];
                            exercise(words, thread, THREADS, &mut rng, 1);
                        }
                    });
                }
            });
            peak_rollup_bytes =
                peak_rollup_bytes.max(proc_bytes("self", "smaps_rollup", "Anonymous"));
        }
        done.store(true, Ordering::Relaxed);
        watcher.join().expect("nothing in it panics")
    });

    let growth_bytes = peak_bytes
        .into_inner()
        .max(peak_rollup_bytes)
        .saturating_sub(baseline_bytes);
    let stats = runtime.stats();
    println!(
        "budget {} KiB, grown by {} KiB at most in {samples} samples, {} evictions",
        budget_bytes / KIB,
        growth_bytes / KIB,
        stats.pager.evictions
    );
    assert!(samples > 20, "{samples} samples show nothing");
    assert!(stats.pager.evictions > 1000, "no pressure: {stats:?}");
    assert!(
        stats.pager.peak_resident_bytes <= budget_bytes as u64,
        "{stats:?}"
    );
    assert!(
        growth_bytes <= budget_bytes + slack_bytes,
        "anonymous memory grew by {growth_bytes} bytes with a budget of {budget_bytes}"
    );
}

#[test]
fn budget_changes_while_the_program_runs() {
    let Some(_watchdog) = begin(180) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let page = 16 * KIB;
    let runtime = memory.runtime(128 * page, page);
    let mut array: RemoteArray<u64> = runtime.array(256 * page / 8).unwrap();
    let resident = || runtime.stats().pager.resident_bytes;
    fill(&mut array, 1);
    for (salt, pages) in [(2, 16u64), (3, 128), (4, 40), (5, 8)] {
        let budget = pages * page as u64;
        wait_until("nothing exceeds the budget", || {
            runtime.set_budget(ByteSize(budget)) == ByteSize(0)
        });
        assert_eq!(array[7], word(7, salt - 1));
        fill(&mut array, salt);
        assert!(
            resident() <= budget,
            "{} of {pages} pages",
            resident() / page as u64
        );
        if pages == 128 {
            assert!(resident() > budget / 2, "what is larger again is used");
        }
        assert_eq!(runtime.stats().pager.budget_bytes, budget);
    }
    // The budget never exceeds the one that the runtime was built with.
    runtime.set_budget(ByteSize(1 << 40));
    assert_eq!(runtime.stats().pager.budget_bytes, 128 * page as u64);
    assert_filled(&array, 5);
}
