//! Single pages in and out: every byte and every write survives, whatever the kernel refuses.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_vm::{AddressSpace, DetachError, Geometry, InstallErrorKind, Transfer};

use crate::common::{
    BOTH, Filler, Moves, Pinned, Stop, byte, geometry, numbered, numbers, pages, run_geometry, set,
    space,
};

#[test]
fn bytes_survive_install_and_detach_at_every_page_size() {
    for transfer in BOTH {
        for page_bytes in (12..=21).map(|shift| 1usize << shift) {
            let space = space(transfer, 1);
            let geometry = geometry(2 * page_bytes, page_bytes);
            let base = space.map(geometry).unwrap().address;
            assert!(base.is_multiple_of(page_bytes));
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            assert!(frame.as_ref().iter().all(|&byte| byte == 0));
            for (index, byte) in frame.as_mut().iter_mut().enumerate() {
                *byte = (index * 7 + index / 4096) as u8;
            }
            let expected = frame.as_ref().to_vec();
            let at = base + page_bytes;
            for round in 0..3 {
                assert!(!space.is_present(at));
                space.move_in(0, at, page_bytes, frame).unwrap();
                assert!(space.is_present(at) && !space.is_present(base));
                set(at + page_bytes - 1, round);
                frame = space.move_out(pages(0, at, page_bytes, 1)).unwrap();
                assert_eq!(frame.as_ref()[..page_bytes - 1], expected[..page_bytes - 1]);
                assert_eq!(frame.as_ref()[page_bytes - 1], round);
            }
            assert!(matches!(
                space.move_out(pages(0, at, page_bytes, 1)),
                Err(DetachError::Absent)
            ));
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn writers_during_detach_keep_their_writes() {
    const PAGES: usize = 64;
    const EVICTIONS: usize = 8 * PAGES;
    for transfer in BOTH {
        for (page_bytes, run, seed) in [(4096, 1, 1), (65536, 1, 2), (4096, 8, 3), (65536, 8, 4)] {
            let space = space(transfer, 2);
            let geometry = Geometry {
                stripe_bytes: run * page_bytes,
                ..geometry(PAGES * page_bytes, page_bytes)
            };
            let (filler, fillers) = Filler::start(&space, geometry);
            let words = geometry.bytes / 8;
            let running = Arc::new(AtomicBool::new(true));
            let word_of = move |state: &mut u64| {
                *state ^= *state << 13;
                *state ^= *state >> 7;
                *state ^= *state << 17;
                (*state % words as u64) as usize
            };
            let programs: Vec<_> = (1..=4u64)
                .map(|thread| {
                    let (base, running) = (filler.base, Arc::clone(&running));
                    thread::spawn(move || {
                        let mut state = thread * 7919 + seed;
                        let mut writes = 0u64;
                        while running.load(Ordering::Relaxed) {
                            let word = word_of(&mut state);
                            writes += 1;
                            // SAFETY: an aligned word of the region, accessed atomically by all.
                            let cell =
                                unsafe { AtomicU64::from_ptr((base + word * 8) as *mut u64) };
                            cell.fetch_add(word as u64 * 2 + 1, Ordering::Relaxed);
                        }
                        (thread, writes)
                    })
                })
                .collect();
            // The writers run for as long as it takes to evict that often, however the threads are
            // scheduled.
            let mut evictions = 0;
            while evictions < EVICTIONS {
                // When everything is away, the writers and fillers need the processor.
                thread::yield_now();
                for page in 0..PAGES {
                    match filler.evict(page) {
                        Ok(evicted) => evictions += usize::from(evicted),
                        Err(DetachError::Busy) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
            running.store(false, Ordering::Relaxed);
            let mut expected: HashMap<usize, u64> = HashMap::new();
            for program in programs {
                let (thread, writes) = program.join().unwrap();
                let mut state = thread * 7919 + seed;
                for _ in 0..writes {
                    let word = word_of(&mut state);
                    let cell = expected.entry(word).or_default();
                    *cell = cell.wrapping_add(word as u64 * 2 + 1);
                }
            }
            for (word, value) in expected {
                // SAFETY: a word of the region.
                let got = unsafe { ((filler.base + word * 8) as *const u64).read_volatile() };
                assert_eq!(got, value, "word {word}, {transfer:?}, seed {seed}");
            }
            let runs = [&filler.runs_filled, &filler.runs_evicted];
            assert!(run == 1 || runs.iter().all(|count| count.load(Ordering::Relaxed) > 0));
            filler.finish(fillers);
        }
    }
}

#[test]
fn pinned_page_stays_whole() {
    let space = space(Transfer::Move, 1);
    for page_bytes in [4096, 65536, 2 << 20] {
        let geometry = geometry(page_bytes, page_bytes);
        let base = space.map(geometry).unwrap().address;
        let mut frame = space.new_frame(page_bytes, 1).unwrap();
        for (index, byte) in frame.as_mut().iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        space.move_in(0, base, page_bytes, frame).unwrap();
        // The last kernel page is pinned, so that the others have moved when the kernel refuses.
        let Some(pinned) = Pinned::new("pinned_page_stays_whole", base + page_bytes - 4096, 4096)
        else {
            return;
        };
        assert!(matches!(
            space.move_out(pages(0, base, page_bytes, 1)),
            Err(DetachError::Busy)
        ));
        for index in 0..page_bytes {
            assert!(index % 4096 != 0 || space.is_present(base + index));
            assert_eq!(byte(base + index), (index % 251) as u8);
        }
        drop(pinned);
        let frame = space.move_out(pages(0, base, page_bytes, 1)).unwrap();
        assert!(
            frame
                .as_ref()
                .iter()
                .enumerate()
                .all(|(index, &byte)| byte == (index % 251) as u8)
        );
        space.unmap(base, geometry);
    }
}

/// A store that reads by direct I/O leaves pins on the frame's pages for a moment after its reads
/// have ended.
#[test]
fn frame_with_a_pinned_page_is_mapped_whole() {
    let test = "frame_with_a_pinned_page_is_mapped_whole";
    let space = space(Transfer::Move, 1);
    for page_bytes in [4096, 65536] {
        let geometry = run_geometry(3, page_bytes);
        let base = space.map(geometry).unwrap().address;
        // The first kernel page of a page, and the last one, when the others have moved.
        for at in [page_bytes, 2 * page_bytes - 4096] {
            let frame = numbered(&space, page_bytes, 3, 1);
            let address = frame.as_ref().as_ptr() as usize;
            let Some(pinned) = Pinned::new(test, address + at, 4096) else {
                return;
            };
            space.move_in(0, base, page_bytes, frame).unwrap();
            drop(pinned);
            let frame = space.move_out(pages(0, base, page_bytes, 3)).unwrap();
            assert_eq!(numbers(frame.as_ref(), page_bytes), [1, 2, 3]);
        }
        space.unmap(base, geometry);
    }
}

#[test]
fn writers_on_a_page_whose_detach_is_undone_lose_nothing() {
    let space = space(Transfer::Move, 1);
    let geometry = geometry(65536, 65536);
    let (filler, threads) = Filler::start(&space, geometry);
    set(filler.base, 0);
    let Some(pinned) = Pinned::new(
        "writers_on_a_page_whose_detach_is_undone_lose_nothing",
        filler.base + 61440,
        4096,
    ) else {
        return;
    };
    let running = Arc::new(AtomicBool::new(true));
    let programs: Vec<_> = (0..3)
        .map(|thread| {
            let (running, base) = (Arc::clone(&running), filler.base);
            thread::spawn(move || {
                let mut count = 0u64;
                while running.load(Ordering::Relaxed) {
                    for kernel_page in 0..16 {
                        // SAFETY: an aligned word of the region that is this thread's alone, and
                        // atomic.
                        let cell = unsafe {
                            AtomicU64::from_ptr(
                                (base + kernel_page * 4096 + thread * 8) as *mut u64,
                            )
                        };
                        assert_eq!(cell.fetch_add(1, Ordering::Relaxed), count);
                    }
                    count += 1;
                }
                count
            })
        })
        .collect();
    for _ in 0..3000 {
        assert!(matches!(filler.evict(0), Err(DetachError::Busy)));
    }
    running.store(false, Ordering::Relaxed);
    for program in programs {
        assert!(program.join().unwrap() > 0);
    }
    drop(pinned);
    filler.evict(0).unwrap();
    filler.finish(threads);
}

#[test]
fn page_dropped_by_the_program_is_absent_and_a_part_dropped_is_zeros() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let geometry = geometry(page_bytes, page_bytes);
            let base = space.map(geometry).unwrap().address;
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            frame.as_mut().fill(9);
            space.move_in(0, base, page_bytes, frame).unwrap();
            // SAFETY: the region's own page.
            unsafe { libc::madvise(base as *mut _, 4096, libc::MADV_DONTNEED) };
            assert!(!space.is_present(base));
            if page_bytes == 4096 {
                assert!(matches!(
                    space.move_out(pages(0, base, page_bytes, 1)),
                    Err(DetachError::Absent)
                ));
            } else {
                let frame = space.move_out(pages(0, base, page_bytes, 1)).unwrap();
                assert!(frame.as_ref()[..4096].iter().all(|&byte| byte == 0));
                assert!(frame.as_ref()[4096..].iter().all(|&byte| byte == 9));
            }
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn install_over_a_page_hands_the_frame_back_whole() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = geometry(65536, 65536);
        let base = space.map(geometry).unwrap().address;
        let filled = |value| {
            let mut frame = space.new_frame(65536, 1).unwrap();
            frame.as_mut().fill(value);
            frame
        };
        space.move_in(0, base, 65536, filled(1)).unwrap();
        // A whole page is there; then all but its first half, so that half of the frame has gone in
        // when the kernel refuses.
        for dropped in [0, 32768] {
            // SAFETY: the region's own page.
            unsafe { libc::madvise(base as *mut _, dropped, libc::MADV_DONTNEED) };
            let error = space.move_in(0, base, 65536, filled(2)).unwrap_err();
            assert!(matches!(error.kind, InstallErrorKind::Exists));
            assert!(error.frame.as_ref().iter().all(|&byte| byte == 2));
            assert_eq!(byte(base + 65535), 1);
            assert_eq!(space.is_present(base), dropped == 0);
        }
        space.unmap(base, geometry);
        let error = space.move_in(0, base, 65536, filled(3)).unwrap_err();
        assert!(
            matches!(error.kind, InstallErrorKind::Gone),
            "{:?}",
            error.kind
        );
        assert!(error.frame.as_ref().iter().all(|&byte| byte == 3));
        assert!(matches!(
            space.move_out(pages(0, base, 65536, 1)),
            Err(DetachError::Absent)
        ));
    }
}

/// Ageing of pages beside a move (here by the program, elsewhere by reclaim or DAMON) makes the
/// kernel try again inside the move. From Linux 6.18 on it then says that the destination exists,
/// because of the pages that it has just moved there itself.
#[test]
fn pages_that_age_while_they_move_are_neither_lost_nor_called_refused() {
    for (page_bytes, count) in [(4096, 1), (65536, 1), (4096, 64), (65536, 8)] {
        let space = space(Transfer::Move, 1);
        let geometry = run_geometry(count, page_bytes);
        let base = space.map(geometry).unwrap().address;
        let frame = numbered(&space, page_bytes, count, 1);
        let expected: Vec<_> = (1..=count as u8).collect();
        let slots = AtomicUsize::new(frame.as_ref().as_ptr() as usize);
        let running = AtomicBool::new(true);
        thread::scope(|scope| {
            scope.spawn(|| {
                while running.load(Ordering::Relaxed) {
                    for start in [base, slots.load(Ordering::Relaxed)] {
                        // SAFETY: advice that leaves bytes alone, about mappings that outlive the
                        // thread.
                        unsafe { libc::madvise(start as *mut _, geometry.bytes, libc::MADV_COLD) };
                    }
                }
            });
            let _stop = Stop(&running);
            let mut frame = frame;
            let since = Instant::now();
            while since.elapsed() < Duration::from_secs(1) {
                for _ in 0..64 {
                    space.move_in(0, base, page_bytes, frame).unwrap();
                    frame = space.move_out(pages(0, base, page_bytes, count)).unwrap();
                    slots.store(frame.as_ref().as_ptr() as usize, Ordering::Relaxed);
                }
                assert_eq!(numbers(frame.as_ref(), page_bytes), expected);
            }
        });
        space.unmap(base, geometry);
    }
}
