//! Prints what moving a page in and out costs, in both ways, next to the bare ioctl.

use std::time::Instant;

use farpage_vm::{
    AddressSpace, Features, KernelSpace, KernelSpaceOptions, Layout, RegisterMode, Transfer, Uffd,
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
    Ok(())
}

fn through_the_space(
    page_bytes: usize,
    transfer: Transfer,
) -> Result<(), Box<dyn std::error::Error>> {
    let options = KernelSpaceOptions {
        frame_bytes_max: BYTES,
        transfer: Some(transfer),
        ..KernelSpaceOptions::default()
    };
    let space = KernelSpace::new(options)?;
    let layout = Layout {
        bytes: BYTES,
        page_bytes,
        stripe_bytes: BYTES,
        first_shard: 0,
    };
    let base = space.map(layout)?;
    let pages = BYTES / page_bytes;
    let us_per_page = |start: Instant| start.elapsed().as_secs_f64() * 1e6 / pages as f64;

    let start = Instant::now();
    let mut frames = (0..pages)
        .map(|_| space.new_frame(page_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    let new = us_per_page(start);
    let (mut install, mut detach) = (f64::MAX, f64::MAX);
    // The best of five: the first also makes page tables.
    for _ in 0..5 {
        let start = Instant::now();
        for (page, frame) in frames.drain(..).enumerate() {
            space
                .install(0, base + page * page_bytes, frame)
                .map_err(|error| error.kind)?;
        }
        install = install.min(us_per_page(start));
        let start = Instant::now();
        for page in 0..pages {
            frames.push(space.detach(0, base + page * page_bytes, page_bytes)?);
        }
        detach = detach.min(us_per_page(start));
    }
    let start = Instant::now();
    drop(frames);
    let dropped = us_per_page(start);
    let mode = format!("{transfer:?}");
    println!(
        "{:>10} {mode:>6} {new:>10.2} {install:>10.2} {detach:>10.2} {dropped:>12.2}",
        page_bytes >> 10
    );
    space.unmap(base, layout);
    Ok(())
}

/// The ioctls alone, between two registered mappings.
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
