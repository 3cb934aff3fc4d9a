//! Random 8-byte reads and updates, uniform or after Zipf's law, by several threads.
//!
//! The rule it keeps: every element identifies itself. Its high bits are a function of its index
//! and never change, its low bits count its updates: a wrong page shows at once, a lost update in
//! the sum of all counts, and no shadow copy is needed.

use clap::Args;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Result;
use farpage::Advice;
use serde_json::json;

use farpage_bench_kit::{
    arena::Arena,
    crew::each_share,
    data::Source,
    options::{Paging, Threads},
    pick::{Picker, mix},
    progress::Progress,
    report::{Figures, Report},
    yardsticks::{Plain, plain_bytes},
};

/// Number of bits of an element that count its updates.
const COUNT_BITS: u32 = 28;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Returns element `index` before any update.
fn fresh(source: &Source, index: u64) -> u64 {
    source.word(index) & !COUNT_MASK
}

#[derive(Args, Debug)]
pub(crate) struct RandomOptions {
    #[command(flatten)]
    pub(crate) paging: Paging,
    #[command(flatten)]
    pub(crate) threads: Threads,
    /// Puts the array into ordinary memory that is never paged, to compare paging with
    #[arg(long, conflicts_with = "server")]
    pub(crate) plain: bool,
    /// Gives no advice: farpage has to find out that accesses are random and read-ahead is of no
    /// use
    #[arg(long)]
    pub(crate) no_advice: bool,
    /// Zipf exponent below 1, such as 0.99: few elements get most accesses [default: uniform]
    #[arg(long, value_name = "THETA", value_parser = zipf_theta)]
    pub(crate) zipf: Option<f64>,
    /// Reads, and as many updates, by all threads together [default: 200000, fewer of
    /// pages above 64KiB; with --smoke 2000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) accesses: Option<u64>,
}

impl RandomOptions {
    /// Returns the number of reads, which is that of updates, too.
    pub(crate) fn accesses(&self) -> u64 {
        let default = match self.paging.common.run.smoke {
            true => 2_000,
            // A run should take less than a minute, and the time of a miss grows with its page.
            false => (200_000 * (64 << 10) / self.paging.page_bytes()).min(200_000),
        };
        self.accesses.unwrap_or(default)
    }
}

fn zipf_theta(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(theta) if theta > 0.0 && theta < 1.0 => Ok(theta),
        _ => Err("must be a number between 0 and 1".into()),
    }
}

pub(crate) fn run(options: &RandomOptions) -> Result<Report> {
    let paging = &options.paging;
    let arena = Arena::of_kind(options.plain, paging)?;
    let len = paging.size_bytes() / size_of::<u64>() as u64;
    let mut array = arena.array::<u64>(len, Advice::Sequential)?;
    let work = Work::new(options)?;
    let progress = Progress::new(4);

    progress.phase("filling");
    work.fill(&mut array);
    array.advise(match options.no_advice {
        true => Advice::Normal,
        false => Advice::Random,
    })?;

    let begin = arena.mark();
    progress.phase("reading");
    let reads = work.access(&mut array, false);
    let read = arena.since(&begin);
    progress.phase("updating");
    let updates = work.access(&mut array, true);
    let paged = arena.since(&begin);

    progress.phase("verifying");
    array.advise(Advice::Sequential)?;
    let (counted, shares) = work.count(&mut array);
    drop(progress);
    let done = work.accesses_per_thread * shares as u64;
    let wrong = work.wrong.load(Relaxed);
    if wrong > 0 || counted != done {
        eprintln!("{wrong} elements read were wrong; {counted} of {done} updates are there");
    }

    let config = arena.config().with(json!({
        "threads": work.threads,
        "zipf": options.zipf,
        "accesses": done,
    }));
    let us_per_access = us_per(reads + updates, 2 * done);
    let seconds = (reads + updates).as_secs_f64();
    // The array goes first, which makes room.
    drop(array);
    let mut figures = Figures {
        yardsticks: arena.compare(&paged, seconds, us_per_access, || {
            let time = work.plain_time(plain_bytes(&paging.common));
            Plain::PlainUsPerAccess(us_per(time, 2 * done))
        }),
        ..Figures::default()
    };
    // Pages that came ahead of a fault were not waited for.
    let misses = read.map_or(0, |read| read.counts.fills - read.counts.prefetches);
    let us_per_miss = || us_per(reads * shares as u32, misses);
    figures.add("us_per_access", us_per_access);
    figures.add("us_per_read", us_per(reads, done));
    figures.add("us_per_update", us_per(updates, done));
    figures.add("us_per_read_miss", (misses > 0).then(us_per_miss));
    Ok(Report {
        benchmark: "random",
        verified: wrong == 0 && counted == done,
        config,
        figures,
        paging: paged,
    })
}

fn us_per(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

/// Accesses to an array, of which each thread has a part: updates of one element by two threads
/// would be a race.
struct Work {
    source: Source,
    seed: u64,
    zipf: Option<f64>,
    threads: usize,
    accesses_per_thread: u64,
    /// Number of elements that were wrong.
    wrong: AtomicU64,
}

impl Work {
    fn new(options: &RandomOptions) -> Result<Work> {
        let threads = options.threads.count();
        Ok(Work {
            source: options.paging.source()?,
            seed: options.paging.seed,
            zipf: options.zipf,
            threads,
            accesses_per_thread: options.accesses().div_ceil(threads as u64),
            wrong: AtomicU64::new(0),
        })
    }

    fn fill(&self, array: &mut [u64]) {
        each_share(array, self.threads, |first, part| {
            for (index, element) in (first as u64..).zip(part) {
                *element = fresh(&self.source, index);
            }
        });
    }

    /// Reads or updates. Picks are the same every time, so that both see the same misses.
    fn access(&self, array: &mut [u64], update: bool) -> Duration {
        let start = Instant::now();
        each_share(array, self.threads, |first, part| {
            let seed = mix(self.seed) ^ first as u64;
            let mut picker = Picker::new(part.len() as u64, self.zipf, seed);
            let mut bad = 0u64;
            for _ in 0..self.accesses_per_thread {
                let at = picker.pick();
                let element = &mut part[at as usize];
                let index = first as u64 + at;
                bad += u64::from(*element & !COUNT_MASK != fresh(&self.source, index));
                if update {
                    *element += 1;
                }
            }
            self.wrong.fetch_add(bad, Relaxed);
        });
        start.elapsed()
    }

    /// Verifies every element. Returns the number of updates of all of them, and the number of
    /// parts that the array was cut into.
    fn count(&self, array: &mut [u64]) -> (u64, usize) {
        let counted = AtomicU64::new(0);
        let shares = each_share(array, self.threads, |first, part| {
            let (mut bad, mut count) = (0u64, 0);
            for (index, element) in (first as u64..).zip(part) {
                bad += u64::from(*element & !COUNT_MASK != fresh(&self.source, index));
                count += *element & COUNT_MASK;
            }
            self.wrong.fetch_add(bad, Relaxed);
            counted.fetch_add(count, Relaxed);
        });
        (counted.into_inner(), shares)
    }

    /// Returns the time that the same reads and updates take in ordinary memory.
    fn plain_time(&self, bytes: usize) -> Duration {
        let len = (bytes / size_of::<u64>()) as u64;
        let mut plain: Vec<u64> = (0..len).map(|index| fresh(&self.source, index)).collect();
        self.access(&mut plain, false) + self.access(&mut plain, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_bench_kit::data::DataOptions;

    #[test]
    fn an_update_leaves_the_mark_of_its_element() {
        let random = Source::new(&DataOptions::default(), 1).unwrap();
        let element = fresh(&random, 77);
        assert_eq!(element & COUNT_MASK, 0);
        assert_eq!((element + COUNT_MASK) & !COUNT_MASK, element);
        assert_ne!(element, fresh(&random, 78));
    }
}
