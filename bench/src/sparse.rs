//! A large region of which few pages are used: the cost of a page, and the memory that the region
//! takes beside its pages.
//!
//! The rule it keeps: another array makes the frames that hold pages, before the clock and the
//! memory count start. The count then belongs to the region's size alone.

use clap::Args;
use std::{fs, time::Instant};

use anyhow::{Context, Result, ensure};
use farpage::Advice;

use farpage_bench_kit::options::{Common, Paging};
use farpage_bench_kit::{
    pick::{Shuffle, mix},
    progress::Progress,
    remote::Remote,
    report::{Figures, Report},
};

/// Size of the array that makes the frames, over the budget.
const WARM_UP_BUDGETS: u64 = 3;

#[derive(Args, Debug)]
pub(crate) struct SparseOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Pages to use, evenly spread over the region; at most all of its pages [default: 16384, with
    /// --smoke 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) touches: Option<u64>,
}

pub(crate) fn run(options: &SparseOptions) -> Result<Report> {
    let (common, paging) = (&options.common, &options.paging);
    let page_bytes = common.page_size.as_u64();
    let page_elements = page_bytes / size_of::<u64>() as u64;
    let pages = paging.size_bytes(common) / page_bytes;
    let budget_pages = paging.budget_bytes(common) / page_bytes;
    let touches = options
        .touches
        .unwrap_or(if common.run.smoke { 256 } else { 16_384 })
        .min(pages);
    ensure!(
        touches > budget_pages,
        "{touches} pages are used and {budget_pages} fit into the budget: all of them have to leave, so --budget has to be smaller"
    );
    let used_bytes = touches * page_bytes + WARM_UP_BUDGETS * paging.budget_bytes(common);
    let remote = Remote::for_pages(common, paging, used_bytes)?;
    let progress = Progress::new(3);

    progress.phase("making frames");
    let mut warm = remote.array::<u64>(
        WARM_UP_BUDGETS * paging.budget_bytes(common) / size_of::<u64>() as u64,
        Advice::Sequential,
    )?;
    for (index, element) in (0..).zip(warm.iter_mut()) {
        *element = mix(index);
    }
    progress.step(1);

    let private_bytes = private_bytes()?;
    let mut array = remote.array::<u64>(pages * page_elements, Advice::Random)?;
    // One element in each page that is used.
    let place = |touch: u64| {
        let page = (u128::from(touch) * u128::from(pages) / u128::from(touches)) as u64;
        (page * page_elements + mix(page) % page_elements) as usize
    };
    let begin = remote.mark();
    let start = Instant::now();
    progress.phase("writing");
    for touch in Shuffle::new(touches, paging.seed) {
        array[place(touch)] = mix(!touch);
    }
    progress.step(1);
    progress.phase("reading");
    let wrong = Shuffle::new(touches, paging.seed)
        .filter(|&touch| array[place(touch)] != mix(!touch))
        .count();
    let time = start.elapsed();
    let metadata_bytes = self::private_bytes()?.saturating_sub(private_bytes);
    let end = remote.mark();
    progress.step(1);
    drop(progress);
    if wrong > 0 {
        eprintln!("{wrong} of {touches} elements are wrong");
    }

    let mut config = remote.config(common, paging);
    config.samples = Some(touches);
    Ok(Report {
        benchmark: "sparse",
        verified: wrong == 0,
        config,
        figures: Figures {
            us_per_sparse_page: Some(time.as_secs_f64() * 1e6 / (2 * touches) as f64),
            metadata_bytes: Some(metadata_bytes),
            ..Figures::default()
        },
        paging: Some(Remote::figures(&begin, &end)),
    })
}

/// Returns the anonymous memory of this process: its pages, and all that is known about them.
fn private_bytes() -> Result<u64> {
    const PATH: &str = "/proc/self/smaps_rollup";
    let text = fs::read_to_string(PATH)
        .with_context(|| format!("cannot read how much memory this program has from {PATH}"))?;
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:")?.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse().ok())
        .with_context(|| format!("{PATH} has no line `Anonymous: ... kB`"))?;
    Ok(kib << 10)
}
