//! Prints what moving a page in and out costs: in both ways, next to the bare ioctl; and in runs,
//! alone and while another thread of the process is running, whose processor must be told to forget
//! the old addresses.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use farpage_vm::{
    AddressSpace, Features, Geometry, KernelSpace, KernelSpaceOptions, PageIn, PageOut, Pages,
    RegisterMode, Shard, Transfer, Uffd,
};

const BYTES: usize = 64 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{:>10} {:>6} {:>10} {:>10} {:>10} {:>12}",
        "page KiB", "mode", "new us", "install us", "detach us", "drop us"
    );
    for page_bytes in [4 << 10, 64 << 10, 2 << 20] {
        for transfer in [Transfer::Move, Transfer::Copy] {
            through_the_space(page_bytes, transfer)?;
        }
        bare_move(page_bytes)?;
    }
    println!(
        "\n{:>10} {:>6} {:>6} {:>13} {:>13} {:>13} {:>13}   (us per page; alone, with a running thread)",
        "page KiB", "mode", "run", "install", "detach", "install with", "detach with"
    );
    for transfer in [Transfer::Move, Transfer::Copy] {
        for page_bytes in [4 << 10, 64 << 10] {
            for run in [1, 4, 16, 64] {
                in_runs(page_bytes, run, transfer)?;
            }
        }
    }
    Ok(())
}

fn in_runs(
    page_bytes: usize,
    run: usize,
    transfer: Transfer,
) -> Result<(), Box<dyn std::error::Error>> {
    let (space, geometry) = space(page_bytes, transfer)?;
    let base = space.map(geometry)?.address;
    let alone = install_and_detach(&space, base, page_bytes, run)?;
    let running = AtomicBool::new(true);
    let accompanied = thread::scope(|scope| {
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let cost = install_and_detach(&space, base, page_bytes, run);
        running.store(false, Ordering::Relaxed);
        cost
    })?;
    let mode = format!("{transfer:?}");
    println!(
        "{:>10} {mode:>6} {run:>6} {:>13.3} {:>13.3} {:>13.3} {:>13.3}",
        page_bytes >> 10,
        alone[0],
        alone[1],
        accompanied[0],
        accompanied[1]
    );
    space.unmap(base, geometry);
    Ok(())
}

/// Returns microseconds per page: the best of five rounds, of which the first makes page tables.
fn install_and_detach(
    space: &KernelSpace,
    base: usize,
    page_bytes: usize,
    run: usize,
) -> Result<[f64; 2], Box<dyn std::error::Error>> {
    let starts: Vec<_> = (base..base + BYTES).step_by(run * page_bytes).collect();
    let us_per_page =
        |start: Instant| start.elapsed().as_secs_f64() * 1e6 / (BYTES / page_bytes) as f64;
    let mut frames = starts
        .iter()
        .map(|_| space.new_frame(page_bytes, run))
        .collect::<Result<Vec<_>, _>>()?;
    let mut best = [f64::MAX; 2];
    for _ in 0..5 {
        let start = Instant::now();
        for (&address, frame) in starts.iter().zip(frames.drain(..)) {
            let pages = Pages::new(Shard(0), address, page_bytes, run);
            space
                .install(pages, PageIn::Move(frame))
                .map_err(|error| error.kind)?;
        }
        best[0] = best[0].min(us_per_page(start));
        let start = Instant::now();
        for &address in &starts {
            let pages = Pages::new(Shard(0), address, page_bytes, run);
            let frame = space.detach(PageOut::Move(pages))?.into_frame();
            assert_eq!(frame.as_ref().len(), run * page_bytes);
            frames.push(frame);
        }
        best[1] = best[1].min(us_per_page(start));
    }
    Ok(best)
}

fn space(
    page_bytes: usize,
    transfer: Transfer,
) -> Result<(KernelSpace, Geometry), Box<dyn std::error::Error>> {
    let options = KernelSpaceOptions {
        frame_bytes_max: BYTES,
        transfer: Some(transfer),
        ..KernelSpaceOptions::default()
    };
    let geometry = Geometry {
        bytes: BYTES,
        page_bytes,
        stripe_bytes: BYTES,
        first_shard: 0,
        address: None,
        read_only: false,
        no_direct_io: false,
        ordinary: false,
    };
    Ok((KernelSpace::new(options)?, geometry))
}

fn through_the_space(
    page_bytes: usize,
    transfer: Transfer,
) -> Result<(), Box<dyn std::error::Error>> {
    let (space, geometry) = space(page_bytes, transfer)?;
    let base = space.map(geometry)?.address;
    let pages = BYTES / page_bytes;
    let us_per_page = |start: Instant| start.elapsed().as_secs_f64() * 1e6 / pages as f64;

    let start = Instant::now();
    let frames = (0..pages)
        .map(|_| space.new_frame(page_bytes, 1))
        .collect::<Result<Vec<_>, _>>()?;
    let new = us_per_page(start);
    let start = Instant::now();
    drop(frames);
    let dropped = us_per_page(start);
    let [install, detach] = install_and_detach(&space, base, page_bytes, 1)?;
    let mode = format!("{transfer:?}");
    println!(
        "{:>10} {mode:>6} {new:>10.2} {install:>10.2} {detach:>10.2} {dropped:>12.2}",
        page_bytes >> 10
    );
    space.unmap(base, geometry);
    Ok(())
}

/// Times the ioctls alone, between two registered mappings.
fn bare_move(page_bytes: usize) -> Result<(), Box<dyn std::error::Error>> {
    let uffd = Uffd::open(Features::MOVE, false)?;
    let map = || {
        // SAFETY: a new mapping.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), BYTES + (2 << 20), 3, flags, -1, 0)
        };
        let start = (start as usize).next_multiple_of(2 << 20);
        let advice = if page_bytes == 2 << 20 {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: the mapping made above.
        unsafe { libc::madvise(start as *mut _, BYTES, advice) };
        start
    };
    let (here, there) = (map(), map());
    // SAFETY: the mapping made above.
    unsafe { std::ptr::write_bytes(here as *mut u8, 1, BYTES) };
    uffd.register(here, BYTES, RegisterMode::MISSING)?;
    uffd.register(there, BYTES, RegisterMode::MISSING)?;
    let pages = BYTES / page_bytes;
    let mut best = [f64::MAX; 2];
    for _ in 0..5 {
        for (best, (to, from)) in best.iter_mut().zip([(there, here), (here, there)]) {
            let start = Instant::now();
            for offset in (0..BYTES).step_by(page_bytes) {
                // SAFETY: two mappings of this function's, whose bytes nobody relies on.
                unsafe { uffd.move_pages(to + offset, from + offset, page_bytes, false) }?;
            }
            *best = best.min(start.elapsed().as_secs_f64() * 1e6 / pages as f64);
        }
    }
    println!(
        "{:>10} {:>6} {:>10} {:>10.2} {:>10.2}",
        page_bytes >> 10,
        "ioctl",
        "",
        best[0],
        best[1]
    );
    Ok(())
}
