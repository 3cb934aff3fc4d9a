//! Runs of pages in and out: as far as they can go, and the rest as it was.

use std::thread;

use farpage_vm::{AddressSpace, DetachError, InstallErrorKind, Shard, Transfer};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::common::{
    BOTH, Moves, Pinned, as_the_program, byte, drop_range, events, map_over, mapped, numbered,
    numbers, pages, run_geometry, space,
};

#[test]
fn runs_survive_install_and_detach_at_every_page_size() {
    for transfer in BOTH {
        for page_bytes in (12..=21).map(|shift| 1usize << shift) {
            let space = space(transfer, 1);
            for count in [1, 3, 7, 16, 64] {
                if count * page_bytes > 16 << 20 {
                    continue;
                }
                let geometry = run_geometry(count + 1, page_bytes);
                let at = space.map(geometry).unwrap().address + page_bytes;
                let mut frame = numbered(&space, page_bytes, count, 1);
                for _ in 0..2 {
                    space.move_in(0, at, page_bytes, frame).unwrap();
                    frame = space.move_out(pages(0, at, page_bytes, count)).unwrap();
                    let expected: Vec<_> = (1..=count as u8).collect();
                    assert_eq!(numbers(frame.as_ref(), page_bytes), expected);
                    assert!(!space.is_present(at + count * page_bytes - 4096));
                }
                space.unmap(at - page_bytes, geometry);
            }
        }
    }
}

#[test]
fn detached_run_ends_before_an_absent_page_and_a_page_partly_there_is_whole() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [8192, 65536, 2 << 20] {
            let geometry = run_geometry(6, page_bytes);
            let base = space.map(geometry).unwrap().address;
            let page = |number: usize| base + number * page_bytes;
            space
                .move_in(0, base, page_bytes, numbered(&space, page_bytes, 6, 1))
                .unwrap();
            // From the last kernel page of page 1 to the first of page 3, and one in the middle of
            // the run that follows.
            drop_range(page(2) - 4096, page_bytes + 2 * 4096);
            drop_range(page(4), 4096);
            let frame = space.move_out(pages(0, base, page_bytes, 6)).unwrap();
            assert_eq!(frame.as_ref().len(), 2 * page_bytes);
            let (there, hole) = frame.as_ref().split_at(2 * page_bytes - 4096);
            assert_eq!(numbers(&there[..page_bytes], page_bytes), [1]);
            assert!(there[page_bytes..].iter().all(|&byte| byte == 2));
            assert!(hole.iter().all(|&byte| byte == 0));
            assert!(space.is_present(page(3) + 4096));
            assert!(matches!(
                space.move_out(pages(0, page(2), page_bytes, 4)),
                Err(DetachError::Absent)
            ));
            let frame = space.move_out(pages(0, page(3), page_bytes, 3)).unwrap();
            assert_eq!(frame.as_ref().len(), 3 * page_bytes);
            for (number, page) in (4..).zip(frame.as_ref().chunks(page_bytes)) {
                let holes = usize::from(number < 6) * 4096;
                assert!(page[..holes].iter().all(|&byte| byte == 0));
                assert!(page[holes..].iter().all(|&byte| byte == number));
            }
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn detached_run_ends_before_a_pinned_page_which_stays_whole() {
    let space = space(Transfer::Move, 1);
    for page_bytes in [4096, 65536, 2 << 20] {
        let geometry = run_geometry(5, page_bytes);
        let base = space.map(geometry).unwrap().address;
        let page = |number: usize| base + number * page_bytes;
        space
            .move_in(0, base, page_bytes, numbered(&space, page_bytes, 5, 1))
            .unwrap();
        // The page has a hole, too, which stays one.
        if page_bytes > 4096 {
            drop_range(page(2), 4096);
        }
        let Some(pinned) = Pinned::new(
            "detached_run_ends_before_a_pinned_page_which_stays_whole",
            page(3) - 4096,
            4096,
        ) else {
            return;
        };
        let frame = space.move_out(pages(0, base, page_bytes, 5)).unwrap();
        assert_eq!(numbers(frame.as_ref(), page_bytes), [1, 2]);
        for _ in 0..2 {
            assert_eq!(space.is_present(page(2)), page_bytes == 4096);
            let hole = if page_bytes > 4096 { 4096 } else { 0 };
            let rest = mapped(page(2) + hole, 3 * page_bytes - hole);
            let (pinned_page, behind) = rest.split_at(page_bytes - hole);
            assert!(pinned_page.iter().all(|&byte| byte == 3));
            assert_eq!(numbers(behind, page_bytes), [4, 5]);
            assert!(matches!(
                space.move_out(pages(0, page(2), page_bytes, 3)),
                Err(DetachError::Busy)
            ));
        }
        drop(pinned);
        assert_eq!(
            space
                .move_out(pages(0, page(2), page_bytes, 3))
                .unwrap()
                .as_ref()
                .len(),
            3 * page_bytes
        );
        space.unmap(base, geometry);
    }
}

#[test]
fn installed_run_stops_at_a_mapped_page_and_hands_the_rest_back() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [65536, 2 << 20] {
            let geometry = run_geometry(4, page_bytes);
            // A whole page is there; then all but its first half, so that half of the page has gone
            // in when the kernel refuses.
            for dropped in [0, page_bytes / 2] {
                let base = space.map(geometry).unwrap().address;
                let there = base + 2 * page_bytes;
                space
                    .move_in(0, there, page_bytes, numbered(&space, page_bytes, 1, 9))
                    .unwrap();
                drop_range(there, dropped);
                let error = space
                    .move_in(0, base, page_bytes, numbered(&space, page_bytes, 4, 1))
                    .unwrap_err();
                assert!(matches!(error.kind, InstallErrorKind::Exists));
                assert_eq!(numbers(error.frame.as_ref(), page_bytes), [3, 4]);
                assert_eq!(numbers(mapped(base, 2 * page_bytes), page_bytes), [1, 2]);
                assert_eq!(space.is_present(there), dropped == 0);
                assert_eq!(byte(there + page_bytes - 1), 9);
                assert!(!space.is_present(there + page_bytes));
                drop(space.move_out(pages(0, there, page_bytes, 1)).unwrap());
                space.move_in(0, there, page_bytes, error.frame).unwrap();
                let all = mapped(base, 4 * page_bytes);
                assert_eq!(numbers(all, page_bytes), [1, 2, 3, 4]);
                space.unmap(base, geometry);
            }
        }
    }
}

#[test]
fn threads_asleep_all_over_a_run_wake_when_it_is_installed() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(4, 65536);
        let base = space.map(geometry).unwrap().address;
        let sleepers: Vec<_> = (0..4)
            .map(|page| thread::spawn(move || byte(base + page * 65536 + 40_000)))
            .collect();
        let mut faults = Vec::new();
        while faults.len() < 4 {
            poll(
                &mut [PollFd::new(
                    space.wait(Shard(0)).fd.unwrap(),
                    PollFlags::POLLIN,
                )],
                PollTimeout::NONE,
            )
            .unwrap();
            faults.extend(events(&space, 0).faults);
        }
        space
            .move_in(0, base, 65536, numbered(&space, 65536, 4, 1))
            .unwrap();
        for (number, sleeper) in (1..).zip(sleepers) {
            assert_eq!(sleeper.join().unwrap(), number);
        }
        space.unmap(base, geometry);
    }
}

#[test]
fn installed_run_heals_the_poisoned_pages_in_it() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(5, 65536);
        let base = space.map(geometry).unwrap().address;
        for page in [1, 3] {
            space
                .poison(pages(0, base + page * 65536, 65536, 1))
                .unwrap();
        }
        space
            .move_in(0, base, 65536, numbered(&space, 65536, 5, 1))
            .unwrap();
        assert_eq!(numbers(mapped(base, 5 * 65536), 65536), [1, 2, 3, 4, 5]);
        space.unmap(base, geometry);
    }
}

#[test]
fn run_across_a_mapping_that_the_program_divided_goes_as_far_as_its_pages_can() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(6, 65536);
        let base = space.map(geometry).unwrap().address;
        let page = |number: usize| base + number * 65536;
        // SAFETY: a page of the region.
        unsafe { libc::mprotect(page(1) as *mut _, 65536, libc::PROT_READ) };
        space
            .move_in(0, base, 65536, numbered(&space, 65536, 6, 1))
            .unwrap();
        let all = [1, 2, 3, 4, 5, 6];
        assert_eq!(numbers(mapped(base, 6 * 65536), 65536), all);
        let frame = space.move_out(pages(0, base, 65536, 6)).unwrap();
        if transfer == Transfer::Move {
            assert_eq!(numbers(frame.as_ref(), 65536), [1]);
            let rest = space.move_out(pages(0, page(1), 65536, 5)).unwrap();
            assert_eq!(numbers(rest.as_ref(), 65536), all[1..]);
        } else {
            assert_eq!(numbers(frame.as_ref(), 65536), all);
        }
        drop(frame);
        // Part of the region goes. It is mapped again, without faults, so that no other test's
        // mapping comes to lie there. SAFETY: a page of the region, replaced.
        unsafe {
            as_the_program(&space, || map_over(page(4), 65536, libc::PROT_NONE));
            libc::mprotect(page(1) as *mut _, 65536, libc::PROT_READ | libc::PROT_WRITE);
            libc::madvise(base as *mut _, 4 * 65536, libc::MADV_DONTNEED);
        }
        let error = space
            .move_in(0, base, 65536, numbered(&space, 65536, 6, 1))
            .unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), all[4..]);
        let frame = space.move_out(pages(0, base, 65536, 6)).unwrap();
        assert_eq!(numbers(frame.as_ref(), 65536), all[..4]);
        space.unmap(base, geometry);
        let error = space.move_in(0, base, 65536, frame).unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Gone));
        assert_eq!(numbers(error.frame.as_ref(), 65536), all[..4]);
    }
}
