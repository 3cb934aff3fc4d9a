//! Single pages out by copying, while faults come as messages.

use std::thread;

use farpage_vm::{AddressSpace, Geometry, KernelFrame, KernelSpace, KernelSpaceOptions, PageOut};

use crate::common::{
    Moves, as_the_program, byte, drop_range, events, numbered, pages, run_geometry,
};

const PAGE: usize = 4096;
const PAGES: usize = 8;

/// Makes a space, and a region in which each page is full of its number, from 1 on. `None`: this
/// kernel cannot copy pages out.
fn region(test: &str) -> Option<(KernelSpace, usize)> {
    let space = KernelSpace::new(KernelSpaceOptions::default()).unwrap();
    let geometry = Geometry {
        no_direct_io: true,
        ordinary: false,
        ..run_geometry(PAGES, PAGE)
    };
    let mapping = space.map(geometry).unwrap();
    if !mapping.copies_out {
        eprintln!("SKIPPED: {test}: this kernel does not drop many pages by one call");
        return None;
    }
    let frame = numbered(&space, PAGE, PAGES, 1);
    space.move_in(0, mapping.address, PAGE, frame).unwrap();
    Some((space, mapping.address))
}

/// Copies out the pages with these numbers.
fn copy_out(
    space: &KernelSpace,
    base: usize,
    numbers: &[usize],
    own: &mut dyn FnMut(usize) -> bool,
) -> (usize, Vec<KernelFrame>) {
    let page = |&number: &usize| pages(0, base + number * PAGE, PAGE, 1);
    let out: Vec<_> = numbers.iter().map(page).collect();
    let frame = |_: &usize| space.new_frame(PAGE, 1).unwrap();
    let mut frames: Vec<_> = numbers.iter().map(frame).collect();
    let left = space.detach(PageOut::Copy(&out, &mut frames, own)).unwrap();
    (left.count(), frames)
}

#[test]
fn pages_that_somebody_has_taken_up_meanwhile_stay() {
    let Some((space, base)) = region("pages_that_somebody_has_taken_up_meanwhile_stay") else {
        return;
    };
    let (dealt_with, frames) = copy_out(&space, base, &[1, 2, 4, 7], &mut |at| at != 1);
    assert_eq!(dealt_with, 4);
    let there: Vec<_> = (0..PAGES)
        .filter(|page| space.is_present(base + page * PAGE))
        .collect();
    assert_eq!(there, [0, 2, 3, 5, 6]);
    let copies: Vec<_> = frames.iter().map(|frame| frame.as_ref()[0]).collect();
    assert_eq!(copies, [2, 3, 5, 8]);
}

#[test]
fn copying_waits_for_a_page_that_the_program_has_dropped_and_writers_wait_for_it() {
    let test = "copying_waits_for_a_page_that_the_program_has_dropped_and_writers_wait_for_it";
    let Some((space, base)) = region(test) else {
        return;
    };
    drop_range(base + 4 * PAGE, PAGE);
    let next_fault = || {
        loop {
            if let Some(fault) = events(&space, 0).faults.pop() {
                return fault;
            }
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        // The dropped page has been taken up by the thread that filled it.
        let copying = scope.spawn(|| copy_out(&space, base, &[1, 2, 4, 7], &mut |at| at != 2));
        let fault = next_fault();
        assert_eq!((fault.address, fault.write), (base + 4 * PAGE, false));
        assert!(!fault.protected && !copying.is_finished());
        // Between two pages that leave, and one of them.
        for page in [3, 2] {
            let address = base + page * PAGE;
            // SAFETY: a page of the test's region.
            let write = move || unsafe { (address as *mut u8).add(9).write_volatile(77) };
            scope.spawn(write);
            let fault = next_fault();
            assert!(fault.protected && fault.write, "{fault:?}");
            assert_eq!(fault.address & !(PAGE - 1), address);
            assert_eq!(byte(address + 9), page as u8 + 1);
        }
        let frame = numbered(&space, PAGE, 1, 50);
        space.move_in(0, base + 4 * PAGE, PAGE, frame).unwrap();
        let (dealt_with, frames) = copying.join().unwrap();
        assert_eq!((dealt_with, frames[2].as_ref()[0]), (4, 50));
        assert_eq!(byte(base + 4 * PAGE), 50);
        // The writer of the page that has left meets its absence, with the bytes that were copied.
        let fault = next_fault();
        assert_eq!(fault.address & !(PAGE - 1), base + 2 * PAGE);
        assert_eq!(frames[1].as_ref()[9], 3);
        let [_, third, ..] = <[_; 4]>::try_from(frames).unwrap();
        space.move_in(0, base + 2 * PAGE, PAGE, third).unwrap();
    });
    assert_eq!(byte(base + 3 * PAGE + 9), 77);
    assert_eq!(byte(base + 2 * PAGE + 9), 77);
}

#[test]
fn what_the_program_unmaps_while_pages_are_copied_stays_its_own() {
    let Some((space, base)) =
        region("what_the_program_unmaps_while_pages_are_copied_stays_its_own")
    else {
        return;
    };
    drop_range(base + 4 * PAGE, PAGE);
    thread::scope(|scope| {
        let copying = scope.spawn(|| copy_out(&space, base, &[1, 2, 4, 7], &mut |_| true));
        while events(&space, 0).faults.is_empty() {
            thread::yield_now();
        }
        as_the_program(&space, || {
            crate::common::map_over(
                base + 2 * PAGE,
                3 * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
            );
            // SAFETY: the program's own page.
            unsafe { ((base + 2 * PAGE) as *mut u8).write_volatile(9) };
        });
        // Pages behind the first one are not taken: the program's new pages are its own. Nor is the
        // first one if the mapping was still changing.
        let (dealt_with, frames) = copying.join().unwrap();
        assert!(dealt_with <= 1 && frames[0].as_ref()[0] == 2);
        assert_eq!(space.is_present(base + PAGE), dealt_with == 0);
    });
    assert_eq!(byte(base + 2 * PAGE), 9);
    assert!(space.is_present(base + 7 * PAGE));
}
