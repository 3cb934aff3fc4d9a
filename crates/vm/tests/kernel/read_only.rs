//! Pages that the program may only read: in as copies, out by being dropped.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use farpage_vm::{
    AddressSpace, Geometry, InstallErrorKind, KernelFrame, KernelSpace, PageIn, PageOut,
    ReservedRoom, Transfer,
};

use crate::common::{
    BOTH, as_the_program, byte, events, mapped, numbered, numbers, pages, run_geometry, space,
    unmap_by_the_program,
};

/// Room that counts how often it was used up.
#[derive(Default)]
struct Rooms(usize);

impl ReservedRoom for Rooms {
    fn use_up(&mut self) {
        self.0 += 1;
    }
}

fn geometry(count: usize, page_bytes: usize) -> Geometry {
    Geometry {
        read_only: true,
        no_direct_io: false,
        ordinary: false,
        ..run_geometry(count, page_bytes)
    }
}

/// Maps copies of all pages of `frame`, which comes back.
fn copy_in(
    space: &KernelSpace,
    base: usize,
    page_bytes: usize,
    frame: KernelFrame,
) -> Result<KernelFrame, (InstallErrorKind, KernelFrame)> {
    let count = frame.as_ref().len() / page_bytes;
    let mut room = Rooms::default();
    let there = pages(0, base, page_bytes, count);
    match space.install(there, PageIn::Copy(frame, &mut room)) {
        Ok(frame) => {
            assert_eq!(room.0, 1, "the room is used up");
            Ok(frame.unwrap())
        }
        Err(refused) => {
            assert_eq!(room.0, 0, "the room was not used");
            Err((refused.kind, refused.frame))
        }
    }
}

#[test]
fn runs_are_copied_in_and_dropped_together() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let geometry = geometry(8, page_bytes);
            let base = space.map(geometry).unwrap().address;
            let frame = numbered(&space, page_bytes, 8, 1);
            let frame = copy_in(&space, base, page_bytes, frame).unwrap();
            let all = [1, 2, 3, 4, 5, 6, 7, 8];
            assert_eq!(numbers(mapped(base, 8 * page_bytes), page_bytes), all);
            assert_eq!(numbers(frame.as_ref(), page_bytes), all);
            let at = |page: usize| base + page * page_bytes;
            let runs = [
                pages(0, at(0), page_bytes, 2),
                pages(0, at(3), page_bytes, 1),
                pages(0, at(5), page_bytes, 3),
            ];
            assert_eq!(space.detach(PageOut::Drop(&runs)).unwrap().count(), 3);
            let there: Vec<_> = (0..8).map(|page| space.is_present(at(page))).collect();
            assert_eq!(
                there,
                [false, false, true, false, true, false, false, false]
            );
            // Where a page is left, no copy is mapped, and none is left of the pages before it.
            let (kind, frame) = copy_in(&space, base, page_bytes, frame).unwrap_err();
            assert!(matches!(kind, InstallErrorKind::Exists), "{kind:?}");
            assert_eq!(numbers(frame.as_ref(), page_bytes), all);
            assert!(!space.is_present(at(0)) && space.is_present(at(2)));
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn page_of_which_a_part_is_locked_is_dropped_whole() {
    let space = space(Transfer::Move, 1);
    let geometry = geometry(1, 65536);
    let base = space.map(geometry).unwrap().address;
    copy_in(&space, base, 65536, numbered(&space, 65536, 1, 1)).unwrap();
    let locked = std::ptr::without_provenance_mut(base + 32768);
    // SAFETY: mapped by this test, and locking changes no bytes.
    assert_eq!(unsafe { libc::mlock(locked, 4096) }, 0);
    let run = [pages(0, base, 65536, 1)];
    assert_eq!(space.detach(PageOut::Drop(&run)).unwrap().count(), 1);
    let parts = (base..base + 65536).step_by(4096);
    assert!(parts.into_iter().all(|at| !space.is_present(at)));
    space.unmap(base, geometry);
}

#[test]
fn what_the_program_has_unmapped_is_not_dropped() {
    let space = space(Transfer::Move, 1);
    let geometry = geometry(4, 4096);
    let base = space.map(geometry).unwrap().address;
    copy_in(&space, base, 4096, numbered(&space, 4096, 4, 1)).unwrap();
    as_the_program(&space, || unmap_by_the_program(base + 2 * 4096, 4096));
    let run = |page: usize, count| pages(0, base + page * 4096, 4096, count);
    let runs = [run(0, 1), run(1, 2), run(3, 1)];
    assert_eq!(space.detach(PageOut::Drop(&runs)).unwrap().count(), 1);
    assert!(!space.is_present(base) && space.is_present(base + 4096));
    assert!(space.is_present(base + 3 * 4096));
    space.unmap(base, geometry);
}

/// A thread that reads while pages are dropped finds the bytes that were there, or waits for them:
/// it never sees zeros.
#[test]
fn reader_beside_drops_never_sees_zeros() {
    const PAGES: usize = 32;
    let space = space(Transfer::Move, 1);
    let geometry = geometry(PAGES, 4096);
    let base = space.map(geometry).unwrap().address;
    let mut frame = copy_in(&space, base, 4096, numbered(&space, 4096, PAGES, 1)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|first| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                let mut rounds = 0;
                while !stop.load(Ordering::Relaxed) {
                    for page in (first..PAGES).step_by(2) {
                        assert_eq!(byte(base + page * 4096), page as u8 + 1);
                    }
                    rounds += 1;
                }
                rounds
            })
        })
        .collect();
    let run = |page: usize| pages(0, base + page * 4096, 4096, 1);
    let mut faults = 0;
    for round in 0..2_000 {
        let out: Vec<_> = (round % 3..PAGES).step_by(3).map(run).collect();
        assert_eq!(
            space.detach(PageOut::Drop(&out)).unwrap().count(),
            out.len()
        );
        for gone in out {
            let page = (gone.address() - base) / 4096;
            frame.as_mut()[..4096].fill(page as u8 + 1);
            let mut room = Rooms::default();
            let rest = farpage_vm::Frame::split_off(&mut frame, 4096);
            frame = (space.install(gone, PageIn::Copy(frame, &mut room)).unwrap()).unwrap();
            farpage_vm::Frame::join(&mut frame, rest).unwrap();
        }
        faults += events(&space, 0).faults.len();
    }
    stop.store(true, Ordering::Relaxed);
    let rounds: Vec<u64> = readers.into_iter().map(|it| it.join().unwrap()).collect();
    println!("{rounds:?} rounds of reading, {faults} faults were still waiting to be read");
    assert!(rounds.iter().all(|&rounds| rounds > 0));
    space.unmap(base, geometry);
}
