//! The program's own changes of its mappings: its memory is never taken for the region's.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use farpage_vm::{AddressSpace, DetachError, Events, Geometry, InstallErrorKind, Shard, Transfer};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::common::{
    BOTH, Moves, as_the_program, byte, events, geometry, kept_events, map_over, mapped, numbered,
    numbers, pages, protection, run_geometry, set, space, system_call_can_read,
    told_by_the_program, two_stripes, unmap_by_the_program,
};

#[test]
fn what_the_program_protects_or_locks_leaves_and_comes_back_whole() {
    const RW: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
    // Parts of the page, in kernel pages.
    for part in [0..16, 0..1, 15..16, 3..9] {
        for protection in [libc::PROT_READ, libc::PROT_NONE, RW | libc::PROT_EXEC, RW] {
            for transfer in BOTH {
                let space = space(transfer, 1);
                let geometry = geometry(2 * 65536, 65536);
                let base = space.map(geometry).unwrap().address;
                let (start, len) = (base + part.start * 4096, part.len() * 4096);
                // SAFETY: the region's own page.
                let changed = unsafe {
                    if protection == RW {
                        libc::mlock2(start as *const _, len, 1)
                    } else {
                        libc::mprotect(start as *mut _, len, protection)
                    }
                };
                assert_eq!(changed, 0);
                let holds = |page: &[u8]| {
                    let kernel_pages = page.chunks(4096).zip(1..);
                    kernel_pages.for_each(|(bytes, number)| {
                        assert!(
                            bytes.iter().all(|&byte| byte == number),
                            "{part:?} {protection}"
                        );
                    });
                };
                let mut frame = space.new_frame(65536, 1).unwrap();
                (frame.as_mut().chunks_mut(4096).zip(1..))
                    .for_each(|(bytes, number)| bytes.fill(number));
                // In, and out, and in again; the program writes where it may.
                for round in 0..2 {
                    space.move_in(0, base, 65536, frame).unwrap();
                    if protection != libc::PROT_NONE {
                        holds(mapped(base, 65536));
                    }
                    if part.start > 0 {
                        set(base + 77, 100 + round);
                        set(base + 77, 1);
                    }
                    frame = space.move_out(pages(0, base, 65536, 1)).unwrap();
                    holds(frame.as_ref());
                    assert!((0..16).all(|at| !space.is_present(base + at * 4096)));
                }
                space.move_in(0, base, 65536, frame).unwrap();
                // SAFETY: as above.
                unsafe { libc::mprotect(base as *mut _, 65536, RW) };
                holds(mapped(base, 65536));
                space.unmap(base, geometry);
            }
        }
    }
}

#[test]
fn what_the_program_maps_into_a_region_is_never_taken_for_its_pages() {
    for transfer in BOTH {
        let space = space(transfer, 2);
        let (geometry, base) = two_stripes(&space);
        let page = |number: usize| base + number * 4096;
        // Across the two shards' stripes.
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let ((), told) = told_by_the_program(&space, || map_over(page(12), 8 * 4096, rw));
        for number in 12..20 {
            set(page(number), 99);
        }
        for (shard, told) in told.iter().enumerate() {
            assert_eq!(told.unmapped[0], page(12)..page(20));
            let again = events(&space, shard).unmapped;
            assert_eq!(told.unmapped.len() + again.len(), 1, "told once");
        }
        let frame = space.move_out(pages(0, page(8), 4096, 8)).unwrap();
        assert_eq!(numbers(frame.as_ref(), 4096), [9, 10, 11, 12]);
        for (shard, number) in [(0, 12), (0, 15), (1, 16), (1, 19)] {
            let error = space
                .move_out(pages(shard, page(number), 4096, 1))
                .unwrap_err();
            assert!(matches!(error, DetachError::Absent), "{error:?}");
            space.poison(pages(shard, page(number), 4096, 1)).unwrap();
            let frame = numbered(&space, 4096, 1, 7);
            let error = space.move_in(shard, page(number), 4096, frame).unwrap_err();
            assert!(matches!(error.kind, InstallErrorKind::Gone));
        }
        // A run goes in as far as it can.
        drop(frame);
        let error = space
            .move_in(0, page(8), 4096, numbered(&space, 4096, 8, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 4096), [5, 6, 7, 8]);
        let frame = space.move_out(pages(1, page(20), 4096, 12)).unwrap();
        assert_eq!(
            numbers(frame.as_ref(), 4096),
            [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
        );
        space.unmap(base, geometry);
        for number in 12..20 {
            assert_eq!(byte(page(number)), 99);
        }
        assert_eq!(protection(page(11)), None);
        unmap_by_the_program(page(12), 8 * 4096);
        // The addresses are as good as others from here on.
        let again = Geometry {
            address: Some(base),
            ..geometry
        };
        assert_eq!(space.map(again).unwrap().address, base);
        space
            .move_in(0, page(12), 4096, numbered(&space, 4096, 1, 3))
            .unwrap();
        assert_eq!(byte(page(12)), 3);
        space.unmap(base, again);
    }
}

#[test]
fn page_that_the_program_unmaps_in_part_is_gone_and_what_is_left_of_it_raises_sigbus() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(3, 65536);
        let base = space.map(geometry).unwrap().address;
        as_the_program(&space, || unmap_by_the_program(base + 65536 + 8192, 4096));
        let error = space
            .move_in(0, base, 65536, numbered(&space, 65536, 3, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), [2, 3]);
        space.poison(pages(0, base + 65536, 65536, 1)).unwrap();
        assert!(!system_call_can_read(base + 65536));
        assert!(!system_call_can_read(base + 2 * 65536 - 1));
        assert_eq!(numbers(mapped(base, 65536), 65536), [1]);
        space.unmap(base, geometry);
        assert_eq!(protection(base + 65536), None);
    }
}

#[test]
fn faults_that_installing_came_across_are_kept_and_said_to_be() {
    let space = space(Transfer::Move, 1);
    let geometry = run_geometry(8, 4096);
    let base = space.map(geometry).unwrap().address;
    let page = |number: usize| base + number * 4096;
    // From now on this thread is the one that reads.
    assert!(kept_events(&space, 0).is_empty());
    assert!(!space.wait(Shard(0)).kept);
    let told = || {
        let fd = space.wait(Shard(0)).fd.unwrap();
        poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() > 0
    };
    // Asserted only behind the scope, which a sleeping reader would not let end.
    let mut early = Events::default();
    thread::scope(|scope| {
        let reader = scope.spawn(|| byte(page(0)));
        while !told() {
            thread::yield_now();
        }
        early = kept_events(&space, 0);
        let unmapper = scope.spawn(|| unmap_by_the_program(page(5), 4096));
        // The mapping has ended, and its message waits to be read.
        while protection(page(5)).is_some() {
            thread::yield_now();
        }
        space
            .move_in(0, page(1), 4096, numbered(&space, 4096, 1, 7))
            .unwrap();
        unmapper.join().unwrap();
        assert!(!told(), "both messages have been read");
        let kept = space.wait(Shard(0)).kept;
        let told = kept_events(&space, 0);
        let left = space.wait(Shard(0)).kept;
        space
            .move_in(0, page(0), 4096, numbered(&space, 4096, 1, 9))
            .unwrap();
        assert_eq!(reader.join().unwrap(), 9);
        assert!(kept && !left);
        assert_eq!((told.faults.len(), told.unmapped.len()), (1, 1));
        assert_eq!(told.faults[0].address, page(0));
    });
    assert!(early.is_empty(), "it waits in the kernel");
    space.unmap(base, geometry);
}

#[test]
fn pages_come_and_go_while_the_program_maps_over_others() {
    const PAGES: usize = 64;
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(PAGES, 4096);
        let base = space.map(geometry).unwrap().address;
        let (stop, taken) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    events(&space, 0);
                    thread::yield_now();
                }
            });
            // Takes out all that there is, and puts it back, all the time.
            let mover = scope.spawn(|| {
                for number in (0..PAGES).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let address = base + number * 4096;
                    let frame = match space.move_out(pages(0, address, 4096, 1)) {
                        Ok(frame) => frame,
                        Err(DetachError::Absent) => space.new_frame(4096, 1).unwrap(),
                        Err(error) => panic!("{error:?}"),
                    };
                    assert_ne!(frame.as_ref()[0], 99, "a page of the program's was taken");
                    match space
                        .move_in(0, address, 4096, frame)
                        .map_err(|error| error.kind)
                    {
                        Ok(()) | Err(InstallErrorKind::Gone) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            });
            // A mover that gets no processor before the end proves nothing.
            while taken.load(Ordering::Relaxed) == 0 && !mover.is_finished() {
                thread::yield_now();
            }
            for number in 0..PAGES {
                let address = base + number * 4096;
                map_over(address, 4096, libc::PROT_READ | libc::PROT_WRITE);
                set(address, 99);
                thread::yield_now();
                for number in 0..=number {
                    assert_eq!(byte(base + number * 4096), 99, "page {number} was touched");
                }
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap();
            mover.join().unwrap();
        });
        assert!(taken.into_inner() > 0);
        space.unmap(base, geometry);
        unmap_by_the_program(base, PAGES * 4096);
    }
}
