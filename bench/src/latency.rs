//! Times of single page faults, one at a time, as the program sees them.
//!
//! The rule it keeps: a sample is an access to a page that is on the server, never to a local one;
//! pages are visited in an order that no read-ahead can guess; and the bytes that a fault brings
//! are checked.

use std::time::Instant;

use anyhow::{Result, ensure};
use farpage::Advice;
use hdrhistogram::Histogram;
use serde_json::json;

use farpage_bench_kit::{
    arena::Arena,
    data::Source,
    options::Paging,
    pick::{Shuffle, mix},
    progress::Progress,
    raw,
    report::{Figures, Percentiles, Report, new_histogram},
    yardsticks::{Yardsticks, plain_bytes},
};

/// Fraction of the budget that the first state touches: below the high-water mark, so that nothing
/// is evicted.
const ROOM: f64 = 0.8;

pub(crate) fn run(paging: &Paging) -> Result<Report> {
    let (arena, common) = (Arena::start(paging)?, &paging.common);
    let page_elements = paging.page_bytes() / size_of::<u64>() as u64;
    let pages = paging.size_bytes() / paging.page_bytes();
    let budget_pages = paging.budget_bytes() / paging.page_bytes();
    ensure!(
        pages >= 2 * budget_pages && budget_pages >= 8,
        "{pages} pages and a budget of {budget_pages}: --size has to be at least twice the --budget, and that 8 pages"
    );
    // Faults to time in each state, as far as there are pages.
    let samples = if common.run.smoke { 200 } else { 20_000 };
    let mut array = arena.array::<u64>(pages * page_elements, Advice::Sequential)?;
    let source = paging.source()?;
    let mut pages = Pages {
        page_elements,
        source: &source,
        seed: paging.seed,
        wrong: 0,
    };
    let progress = Progress::new(3);

    progress.phase("filling");
    pages.fill(&mut array);
    array.advise(Advice::Random)?;

    // 1. All pages are remote and unchanged; each read brings one in, into a budget with room.
    progress.phase("room in the budget");
    array.advise(Advice::DontNeed)?;
    let begin = arena.mark();
    let room = samples.min((budget_pages as f64 * ROOM) as u64);
    let with_room = pages.touch(&mut array, room, 0, false);

    // 2. The budget is full of changed pages; each write brings a page in and pushes one out.
    progress.phase("changed pages leave");
    pages.touch(&mut array, 2 * budget_pages, 0, true);
    let evicting = pages.touch(&mut array, samples, 2 * budget_pages, true);
    let paged = arena.since(&begin);
    drop(progress);

    // 3. Yardsticks: the same reads in ordinary memory, and a READ alone. The array is dropped
    //    first, which makes room.
    drop(array);
    let fault = Percentiles::of(&with_room);
    let yardsticks = arena.yardsticks(|server| {
        let fabric_read_us = raw::read_us(common, server)?;
        // Enough pages for an order that no read-ahead can guess, whatever their size.
        let bytes = plain_bytes(common).max(16 * paging.page_bytes() as usize);
        let len = bytes / size_of::<u64>();
        let mut plain = vec![0; len];
        pages.fill(&mut plain);
        let plain = Percentiles::of(&pages.touch(&mut plain, samples, 0, false));
        Ok(Yardsticks::of_faults(fault.p50, plain.p50, fabric_read_us))
    });

    let wrong = pages.wrong;
    if wrong > 0 {
        eprintln!("{wrong} pages came back with bytes that are not theirs");
    }
    let mut figures = Figures {
        yardsticks,
        ..Figures::default()
    };
    figures.add_fault("fault_us", &with_room);
    figures.add_fault("evicting_fault_us", &evicting);
    Ok(Report {
        benchmark: "latency",
        verified: wrong == 0,
        config: arena.config().with(json!({ "samples": samples })),
        figures,
        paging: paged,
    })
}

struct Pages<'a> {
    page_elements: u64,
    source: &'a Source,
    seed: u64,
    wrong: u64,
}

impl Pages<'_> {
    fn fill(&self, array: &mut [u64]) {
        for (index, element) in (0..).zip(array) {
            *element = self.source.word(index);
        }
    }

    /// Reads or writes one element in each of `count` pages of an endless random order, after its
    /// first `skip` pages.
    ///
    /// The order visits each page once per round: a page is touched again only after all others,
    /// and has left long before.
    fn touch(&mut self, array: &mut [u64], count: u64, skip: u64, write: bool) -> Histogram<u64> {
        let mut histogram = new_histogram();
        let page_elements = self.page_elements;
        let pages = array.len() as u64 / page_elements;
        let (source, seed) = (self.source, self.seed);
        let round = std::iter::repeat_with(|| Shuffle::new(pages, seed)).flatten();
        for page in round.skip(skip as usize).take(count as usize) {
            let index = page * page_elements + mix(page) % page_elements;
            let element = &mut array[index as usize];
            let right = source.word(index);
            let begin = Instant::now();
            let found = if write {
                // Flips the low bit, which is not compared: the same value again would leave the
                // page unchanged.
                *element ^= 1;
                *element
            } else {
                std::hint::black_box(*element)
            };
            histogram.saturating_record(begin.elapsed().as_nanos() as u64);
            self.wrong += u64::from((found ^ right) >> 1 != 0);
        }
        histogram
    }
}
