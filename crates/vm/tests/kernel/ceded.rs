//! Ceded addresses: the program's own memory, until they are the region's again.

use std::thread;

use farpage_vm::{AddressSpace, Cede, DetachError, Geometry, InstallErrorKind, Transfer};

use crate::common::{
    BOTH, Moves, as_the_program, byte, events, map_over, mapped, numbered, numbers, pages,
    protection, run_geometry, set, space, told_by_the_program, two_stripes,
};

const RW: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

#[test]
fn bytes_of_ceded_pages_keep_the_protections_of_their_addresses() {
    let space = space(Transfer::Copy, 1);
    let base = space.map(run_geometry(4, 16384)).unwrap().address;
    let page = base + 16384;
    let wanted = [
        ("rw-p", RW),
        ("r--p", libc::PROT_READ),
        ("---p", 0),
        ("rw-p", RW),
    ];
    for (number, (_, protection)) in wanted.iter().enumerate() {
        // SAFETY: a region of this test's.
        let done = unsafe { libc::mprotect((page + number * 4096) as *mut _, 4096, *protection) };
        assert_eq!(done, 0);
    }
    as_the_program(&space, || {
        space.cede(page..page + 16384, Cede::With(&[7; 16384]))
    })
    .unwrap();
    for (number, (letters, _)) in wanted.iter().enumerate() {
        assert_eq!(protection(page + number * 4096).as_deref(), Some(*letters));
    }
    assert_eq!(
        [byte(page), byte(page + 4096), byte(page + 3 * 4096)],
        [7; 3]
    );
}

#[test]
fn ceded_addresses_are_left_alone_and_come_back_absent() {
    for transfer in BOTH {
        let space = space(transfer, 2);
        let (geometry, base) = two_stripes(&space);
        let page = |number: usize| base + number * 4096;
        // Across the two shards' stripes.
        drop(space.move_out(pages(0, page(12), 4096, 4)).unwrap());
        drop(space.move_out(pages(1, page(16), 4096, 4)).unwrap());
        let ceded = page(12)..page(20);
        for round in 0..3 {
            let bytes: Vec<u8> = (0..8).flat_map(|number| [40 + number; 4096]).collect();
            let cede = || space.cede(ceded.clone(), Cede::With(&bytes));
            let (done, told) = told_by_the_program(&space, cede);
            done.unwrap();
            let news = told.iter().map(|told| told.unmapped.len()).sum::<usize>();
            assert_eq!(news, 0, "what was ceded is no news");
            assert_eq!(
                numbers(mapped(page(12), 8 * 4096), 4096),
                [40, 41, 42, 43, 44, 45, 46, 47]
            );
            assert!(space.is_gone(page(12)) && space.is_gone(page(19) + 4095));
            assert!(!space.is_gone(page(11)) && !space.is_gone(page(20)));
            let kept = [base..page(12), page(20)..page(32)];
            assert_eq!(space.kept(base..page(32)), kept);
            // Nothing of the region's goes there, and nothing is taken from there.
            map_over(page(13), 4096, RW);
            set(page(13), 99);
            for (shard, number) in [(0, 12), (0, 13), (1, 16), (1, 19)] {
                let at = pages(shard, page(number), 4096, 1);
                let error = space.move_out(at).unwrap_err();
                assert!(matches!(error, DetachError::Absent), "{error:?}");
                space.poison(at).unwrap();
                let frame = numbered(&space, 4096, 1, 7);
                let error = space.move_in(shard, page(number), 4096, frame).unwrap_err();
                assert!(matches!(error.kind, InstallErrorKind::Gone));
            }
            assert_eq!((byte(page(13)), byte(page(16))), (99, 44));

            space.regain(base, geometry, ceded.clone()).unwrap();
            let all = base..page(32);
            assert_eq!(space.kept(all.clone()), std::slice::from_ref(&all));
            assert!((12..20).all(|number| !space.is_present(page(number))));
            assert_eq!(protection(page(15)).unwrap(), "rw-p");
            // A touch is a fault again.
            thread::scope(|scope| {
                let seen = scope.spawn(|| byte(page(17)));
                let fault = loop {
                    if let Some(fault) = events(&space, 1).faults.pop() {
                        break fault;
                    }
                    thread::yield_now();
                };
                assert_eq!(fault.address & !4095, page(17));
                let frame = numbered(&space, 4096, 1, 60 + round);
                space.move_in(1, page(17), 4096, frame).unwrap();
                assert_eq!(seen.join().unwrap(), 60 + round);
            });
            drop(space.move_out(pages(1, page(17), 4096, 1)).unwrap());
        }
        assert_eq!(
            numbers(mapped(base, 12 * 4096), 4096),
            (1..13).collect::<Vec<_>>()
        );
        assert_eq!(
            numbers(mapped(page(20), 12 * 4096), 4096),
            (5..17).collect::<Vec<_>>()
        );
        space.unmap(base, geometry);
    }
}

#[test]
fn memory_without_access_lies_where_no_bytes_are_given() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = run_geometry(8, 65536);
        let base = space.map(geometry).unwrap().address;
        let ceded = base + 65536..base + 3 * 65536;
        let cede = || space.cede(ceded.clone(), Cede::Barred);
        told_by_the_program(&space, cede).0.unwrap();
        assert_eq!(protection(ceded.start).unwrap(), "---p");
        map_over(ceded.start, 4096, RW);
        set(ceded.start, 5);
        // A region that ends leaves the program's memory alone.
        space.unmap(base, geometry);
        assert_eq!(byte(ceded.start), 5);
        assert_eq!(protection(base), None);
    }
}

#[test]
fn ceded_addresses_of_ordinary_memory_are_not_caught_until_they_are_regained() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let ordinary = Geometry {
            ordinary: true,
            ..run_geometry(8, 4096)
        };
        let base = space.map(ordinary).unwrap().address;
        let page = |number: usize| base + number * 4096;
        (0..8).for_each(|number| set(page(number), number as u8 + 1));
        space.cede(page(1)..page(2), Cede::InPlace).unwrap();
        space.cede(page(3)..page(5), Cede::Barred).unwrap();
        space.cede(page(6)..page(7), Cede::Barred).unwrap();
        // Shared memory refuses to be moved, so that registering it would show.
        map_over(page(3), 4096, RW);
        set(page(3), 40);
        space.regain(base, ordinary, page(6)..page(7)).unwrap();
        // No fault is caught yet.
        assert_eq!((byte(page(1)), byte(page(6))), (2, 0));
        space.begin_paging(base, ordinary).unwrap();
        for number in [0, 2, 5, 6, 7] {
            drop(space.move_out(pages(0, page(number), 4096, 1)).unwrap());
            assert!(!space.is_present(page(number)));
        }
        for number in [1, 3] {
            let error = space.move_out(pages(0, page(number), 4096, 1)).unwrap_err();
            assert!(matches!(error, DetachError::Absent), "{error:?}");
        }
        assert_eq!((byte(page(1)), byte(page(3))), (2, 40));
        let caught = Geometry {
            ordinary: false,
            ..ordinary
        };
        space.regain(base, caught, page(1)..page(2)).unwrap();
        assert!(!space.is_present(page(1)));
        space.unmap(base, ordinary);
        assert_eq!(byte(page(3)), 40);
    }
}
