//! A large region of which few pages are used: the cost of a page, and the memory that the region
//! takes beside its pages.
//!
//! The rule it keeps: another array makes the frames that hold pages, before the clock and the
//! memory count start. The count then belongs to the region's size alone.

use clap::Args;
use std::time::Instant;

use anyhow::{Result, ensure};
use farpage::Advice;
use serde_json::json;

use farpage_bench_kit::{
    arena::Arena,
    held::mapped_bytes,
    options::Paging,
    pick::{Shuffle, mix},
    progress::Progress,
    report::{Figures, Report},
};

/// Size of the array that makes the frames, over the budget.
const WARM_UP_BUDGETS: u64 = 3;

#[derive(Args, Debug)]
pub(crate) struct SparseOptions {
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Pages to use, evenly spread over the region; at most all of its pages [default: 16384, with
    /// --smoke 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) touches: Option<u64>,
}

pub(crate) fn run(options: &SparseOptions) -> Result<Report> {
    let paging = &options.paging;
    let page_bytes = paging.page_bytes();
    let page_elements = page_bytes / size_of::<u64>() as u64;
    let pages = paging.size_bytes() / page_bytes;
    let budget_pages = paging.budget_bytes() / page_bytes;
    let default = if paging.common.run.smoke { 256 } else { 16_384 };
    let touches = options.touches.unwrap_or(default).min(pages);
    ensure!(
        touches > budget_pages,
        "{touches} pages are used and {budget_pages} fit into the budget: all of them have to leave, so --budget has to be smaller"
    );
    let used_bytes = touches * page_bytes + WARM_UP_BUDGETS * paging.budget_bytes();
    let arena = Arena::for_pages(paging, used_bytes)?;
    let progress = Progress::new(3);

    progress.phase("making frames");
    let len = WARM_UP_BUDGETS * paging.budget_bytes() / size_of::<u64>() as u64;
    let mut warm = arena.array::<u64>(len, Advice::Sequential)?;
    for (index, element) in (0..).zip(warm.iter_mut()) {
        *element = mix(index);
    }

    // Pages of this process, and all that is known about them.
    let private_bytes = || mapped_bytes(std::process::id(), "Anonymous");
    let before_bytes = private_bytes()?;
    let mut array = arena.array::<u64>(pages * page_elements, Advice::Random)?;
    // One element in each page that is used.
    let place = |touch: u64| {
        let page = (u128::from(touch) * u128::from(pages) / u128::from(touches)) as u64;
        (page * page_elements + mix(page) % page_elements) as usize
    };
    let begin = arena.mark();
    let start = Instant::now();
    progress.phase("writing");
    for touch in Shuffle::new(touches, paging.seed) {
        array[place(touch)] = mix(!touch);
    }
    progress.phase("reading");
    let wrong = Shuffle::new(touches, paging.seed)
        .filter(|&touch| array[place(touch)] != mix(!touch))
        .count();
    let time = start.elapsed();
    let metadata_bytes = private_bytes()?.saturating_sub(before_bytes);
    let paged = arena.since(&begin);
    drop(progress);
    if wrong > 0 {
        eprintln!("{wrong} of {touches} elements are wrong");
    }

    let mut figures = Figures::default();
    let us = time.as_secs_f64() * 1e6 / (2 * touches) as f64;
    figures.add("us_per_sparse_page", us);
    figures.add("metadata_bytes", metadata_bytes as f64);
    Ok(Report {
        benchmark: "sparse",
        verified: wrong == 0,
        config: arena.config().with(json!({ "samples": touches })),
        figures,
        paging: paged,
    })
}
