//! Cost of sending away a page that did not change.
//!
//! The rule it keeps: only the evictors' CPU time counts, over a phase in which nothing is written.
//! Bringing pages in costs fillers and the program, and is measured elsewhere.

use anyhow::{Context, Result, ensure};
use farpage::Advice;

use farpage_bench_kit::{
    arena::Arena,
    cpus::time_of_threads,
    options::Paging,
    progress::Progress,
    report::{Figures, Report},
};

/// Number of times that all pages come in and leave again while the clock runs.
const ROUNDS: u64 = 2;
/// Prefix of the names that farpage gives to evictor threads.
const EVICTORS: [&str; 1] = ["evictor-"];

pub(crate) fn run(paging: &Paging) -> Result<Report> {
    let arena = Arena::start(paging)?;
    let source = paging.source()?;
    let len = paging.size_bytes() / size_of::<u64>() as u64;
    let mut array = arena.array::<u64>(len, Advice::Sequential)?;
    let progress = Progress::new(2 + ROUNDS);

    progress.phase("filling");
    for (index, element) in (0..).zip(array.iter_mut()) {
        *element = source.word(index);
    }
    // Each round reads the whole array and verifies it.
    let mut wrong = 0u64;
    let mut round = |phase| {
        progress.phase(phase);
        for (index, element) in (0..).zip(array.iter()) {
            wrong += u64::from(*element != source.word(index));
        }
    };

    round("changed pages leave");
    let (begin, cpu) = (arena.mark(), time_of_threads(&EVICTORS)?);
    for _ in 0..ROUNDS {
        round("unchanged pages leave");
    }
    let paged = arena.since(&begin).context("the array is remote")?;
    let cpu = time_of_threads(&EVICTORS)? - cpu;
    drop(progress);
    let clean = paged.counts.clean_evictions;
    let none = "no page was evicted: --budget has to be smaller than --size";
    ensure!(clean > 0, none);
    if wrong > 0 {
        eprintln!("{wrong} elements read were wrong");
    }
    let mut figures = Figures::default();
    let us = cpu.as_secs_f64() * 1e6 / clean as f64;
    figures.add("evictor_cpu_us_per_page", us);
    Ok(Report {
        benchmark: "eviction",
        verified: wrong == 0,
        config: arena.config(),
        figures,
        paging: Some(paged),
    })
}
