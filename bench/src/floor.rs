//! Speed of this machine without paging, in one run, so that the other figures can be read as
//! ratios.
//!
//! The rule it keeps: nothing of the pager takes part.

use clap::Args;
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::Result;

use farpage_bench_kit::{
    bare::{
        self,
        Handling::{ByHandler, InThread, OnOneCpu, OnTwoCpus},
        How,
    },
    options::Common,
    progress::Progress,
    raw,
    report::{Config, Figures, Report},
    server::MemoryServer,
    work,
};

/// Upper bound of the bytes that a measurement of faults goes over, in memory that exists twice.
const FAULT_BYTES: usize = 128 << 20;
const MEMCPY_BYTES: usize = 64 << 20;

#[derive(Args, Debug)]
pub(crate) struct FloorOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Measures faults only: neither memory nor the fabric, and no memory server
    #[arg(long, conflicts_with = "server")]
    pub(crate) faults: bool,
}

pub(crate) fn run(options: &FloorOptions) -> Result<Report> {
    let common = &options.common;
    let progress = Progress::new(if options.faults { 2 } else { 5 });
    let mut figures = Figures::default();
    faults(common, &progress, &mut figures)?;
    let (mut wrong, mut server) = (0, "none".to_owned());
    if !options.faults {
        (wrong, server) = bytes(common, &progress, &mut figures)?;
    }
    drop(progress);

    if wrong > 0 {
        eprintln!("{wrong} pages came back from the fabric other than they were written");
    }
    Ok(Report {
        benchmark: "floor",
        verified: wrong == 0,
        config: Config::new(common, server),
        figures,
        paging: None,
    })
}

/// Measures page faults, one at a time.
fn faults(common: &Common, progress: &Progress, figures: &mut Figures) -> Result<()> {
    let page_bytes = common.page_size.as_u64() as usize;
    let samples_max = if common.run.smoke { 200 } else { 4096 };
    let samples = samples_max.min(FAULT_BYTES / page_bytes);
    let bare = |handling, how| bare::round_trips(handling, how, page_bytes, samples);

    progress.phase("the kernel's own fault");
    figures.add_fault("kernel_fault_us", &bare::kernel_faults(samples_max)?);
    progress.phase("bare userfaultfd");
    for (name, handling, how) in [
        ("uffd_round_trip_us", ByHandler, How::Copy),
        ("uffd_one_cpu_round_trip_us", OnOneCpu, How::Copy),
        ("uffd_two_cpu_round_trip_us", OnTwoCpus, How::Copy),
        ("uffd_move_round_trip_us", ByHandler, How::Move),
        ("uffd_in_thread_round_trip_us", InThread, How::Copy),
        ("uffd_in_thread_move_round_trip_us", InThread, How::Move),
        ("uffd_read_round_trip_us", ByHandler, How::Read),
        ("uffd_in_thread_read_round_trip_us", InThread, How::Read),
    ] {
        figures.add_fault(name, bare(handling, how)?.as_ref());
    }
    let replaced = bare(ByHandler, How::Replace)?;
    figures.add("uffd_replace_us", replaced.map(|times| times.mean() / 1e3));
    Ok(())
}

/// Measures memory, the fabric, and both. Returns the number of wrong pages, and the server.
fn bytes(common: &Common, progress: &Progress, figures: &mut Figures) -> Result<(u64, String)> {
    let smoke = common.run.smoke;
    progress.phase("memcpy");
    let memcpy = memcpy_mb_per_s(MEMCPY_BYTES / if smoke { 16 } else { 1 });
    progress.phase("the raw fabric");
    let server = MemoryServer::start(&common.at, 2 << 30)?;
    let time = Duration::from_millis(if smoke { 50 } else { 1000 });
    let (rates, wrong) = raw::rates(common, &server, time)?;
    progress.phase("triad's work without a pager");
    let work = work::rates(&work::Setting::of(common, time), &server)?;
    figures.add("memcpy_mb_per_s", memcpy);
    for (name, rate) in rates {
        figures.add(name, rate);
    }
    figures.add("work_mb_per_s", work.light);
    figures.add("moved_work_mb_per_s", work.heavy);
    Ok((wrong + work.wrong, server.endpoint().to_string()))
}

/// Returns the MB/s of the best of several copies by one thread. Bytes count once, as copied.
fn memcpy_mb_per_s(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let best = (0..8)
        .map(|_| {
            let begin = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&to);
            begin.elapsed()
        })
        .min()
        .expect("the range above is not empty");
    bytes as f64 / best.as_secs_f64() / 1e6
}
