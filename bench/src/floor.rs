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
    bare::{self, Cpus, How},
    options::Common,
    progress::Progress,
    raw,
    report::{Config, Figures, Percentiles, Report},
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
    let progress = Progress::new(if options.faults { 5 } else { 8 });
    let mut figures = faults(common, &progress)?;
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
        config: Config::new(common, None, server),
        figures,
        paging: None,
    })
}

/// Measures page faults, one at a time.
fn faults(common: &Common, progress: &Progress) -> Result<Figures> {
    let page_bytes = common.page_size.as_u64() as usize;
    let samples_max = if common.run.smoke { 200 } else { 4096 };
    let samples = samples_max.min(FAULT_BYTES / page_bytes);

    progress.phase("the kernel's own fault");
    let kernel_fault = bare::kernel_faults(samples_max)?;
    progress.step(1);
    progress.phase("bare userfaultfd, COPY");
    let copy = bare::round_trips(How::Copy, page_bytes, samples)?;
    let on = |cpus| bare::round_trips_on(cpus, How::Copy, page_bytes, samples);
    let (one_cpu, two_cpus) = (on(Cpus::One)?, on(Cpus::Two)?);
    progress.step(1);
    progress.phase("bare userfaultfd, MOVE");
    let moved = bare::round_trips(How::Move, page_bytes, samples)?;
    progress.step(1);
    progress.phase("bare userfaultfd, in the thread itself");
    let in_thread = |how| bare::in_thread_round_trips(how, page_bytes, samples);
    let (in_thread_copy, in_thread_move) = (in_thread(How::Copy)?, in_thread(How::Move)?);
    progress.step(1);
    progress.phase("bare userfaultfd, with all that a page needs");
    let read = bare::round_trips(How::Read, page_bytes, samples)?;
    let in_thread_read = in_thread(How::Read)?;
    let replaced = bare::round_trips(How::Replace, page_bytes, samples)?;
    progress.step(1);
    Ok(Figures {
        kernel_fault_us: Some(Percentiles::of(&kernel_fault)),
        uffd_round_trip_us: copy.as_ref().map(Percentiles::of),
        uffd_one_cpu_round_trip_us: one_cpu.as_ref().map(Percentiles::of),
        uffd_two_cpu_round_trip_us: two_cpus.as_ref().map(Percentiles::of),
        uffd_in_thread_round_trip_us: in_thread_copy.as_ref().map(Percentiles::of),
        uffd_in_thread_move_round_trip_us: in_thread_move.as_ref().map(Percentiles::of),
        uffd_move_round_trip_us: moved.as_ref().map(Percentiles::of),
        uffd_read_round_trip_us: read.as_ref().map(Percentiles::of),
        uffd_in_thread_read_round_trip_us: in_thread_read.as_ref().map(Percentiles::of),
        uffd_replace_us: replaced.map(|times| times.mean() / 1000.0),
        ..Figures::default()
    })
}

/// Measures memory, the fabric, and both. Returns the number of wrong pages, and the server.
fn bytes(common: &Common, progress: &Progress, figures: &mut Figures) -> Result<(u64, String)> {
    progress.phase("memcpy");
    figures.memcpy_mb_per_s = Some(memcpy_mb_per_s(if common.run.smoke {
        MEMCPY_BYTES / 16
    } else {
        MEMCPY_BYTES
    }));
    progress.step(1);
    progress.phase("the raw fabric");
    let server = MemoryServer::start(&common.at, 2 << 30)?;
    let time = Duration::from_millis(if common.run.smoke { 50 } else { 1000 });
    let rates = raw::rates(common, &server, time)?;
    figures.raw_read_mb_per_s = Some(rates.read);
    figures.raw_write_mb_per_s = Some(rates.write);
    figures.raw_cold_read_mb_per_s = Some(rates.cold_read);
    figures.raw_cold_write_mb_per_s = Some(rates.cold_write);
    figures.raw_read_write_mb_per_s = Some(rates.read_write);
    progress.step(1);
    progress.phase("triad's work without a pager");
    let work = work::rates(&work::Setting::of(common, time), &server)?;
    figures.work_mb_per_s = Some(work.work);
    figures.moved_work_mb_per_s = Some(work.moving);
    progress.step(1);
    Ok((rates.wrong + work.wrong, server.endpoint().to_string()))
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
