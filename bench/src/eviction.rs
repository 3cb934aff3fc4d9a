//! Cost of sending away a page that did not change.
//!
//! The rule it keeps: only the evictors' CPU time counts, over a phase in which nothing is written.
//! Bringing pages in costs fillers and the program, and is measured elsewhere.

use clap::Args;
use std::fs;

use anyhow::{Context, Result, ensure};
use farpage::Advice;

use farpage_bench_kit::options::{Common, Paging};
use farpage_bench_kit::{
    progress::Progress,
    remote::Remote,
    report::{Figures, Report},
};

/// Number of times that all pages come in and leave again while the clock runs.
const ROUNDS: u64 = 2;
/// Prefix of the names that farpage gives to evictor threads.
const EVICTOR_NAME: &str = "evictor-";

#[derive(Args, Debug)]
pub(crate) struct EvictionOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
}

pub(crate) fn run(options: &EvictionOptions) -> Result<Report> {
    let (common, paging) = (&options.common, &options.paging);
    let remote = Remote::start(common, paging)?;
    let source = paging.source()?;
    let len = paging.size_bytes(common) / size_of::<u64>() as u64;
    let mut array = remote.array::<u64>(len, Advice::Sequential)?;
    let progress = Progress::new(2 + ROUNDS);

    progress.phase("filling");
    for (index, element) in (0..).zip(array.iter_mut()) {
        *element = source.word(index);
    }
    progress.step(1);
    // Each round reads the whole array and verifies it.
    let mut wrong = 0u64;
    let mut round = || {
        for (index, element) in (0..).zip(array.iter()) {
            wrong += u64::from(*element != source.word(index));
        }
        progress.step(1);
    };

    progress.phase("changed pages leave");
    round();
    progress.phase("unchanged pages leave");
    let (begin, cpu_ns) = (remote.mark(), evictors_cpu_ns()?);
    for _ in 0..ROUNDS {
        round();
    }
    let (end, cpu_ns) = (remote.mark(), evictors_cpu_ns()? - cpu_ns);
    drop(progress);
    let figures = Remote::figures(&begin, &end);
    ensure!(
        figures.clean_evictions > 0,
        "no page was evicted: --budget has to be smaller than --size"
    );
    if wrong > 0 {
        eprintln!("{wrong} elements read were wrong");
    }
    Ok(Report {
        benchmark: "eviction",
        verified: wrong == 0,
        config: remote.config(common, paging),
        figures: Figures {
            evictor_cpu_us_per_page: Some(cpu_ns as f64 / 1000.0 / figures.clean_evictions as f64),
            ..Figures::default()
        },
        paging: Some(figures),
    })
}

/// Returns the CPU nanoseconds of this process's evictors so far.
fn evictors_cpu_ns() -> Result<u64> {
    let mut sum = None;
    for task in fs::read_dir("/proc/self/task").context("cannot list this program's threads")? {
        let task = task.context("cannot list this program's threads")?.path();
        // A thread that ends meanwhile is no evictor: evictors stay.
        let Ok(name) = fs::read_to_string(task.join("comm")) else {
            continue;
        };
        if name.starts_with(EVICTOR_NAME) {
            let path = task.join("schedstat");
            let text = fs::read_to_string(&path).with_context(|| {
                format!("cannot read a thread's CPU time from {}", path.display())
            })?;
            let ns: u64 = text
                .split(' ')
                .next()
                .and_then(|first| first.parse().ok())
                .with_context(|| format!("{} holds no time: {text:?}", path.display()))?;
            *sum.get_or_insert(0) += ns;
        }
    }
    sum.with_context(|| format!("farpage has no threads named {EVICTOR_NAME}N"))
}
