//! Pages that are copied in and out, many together.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
};

use farpage_vm::{AddressSpace, SCATTERED_PAGES_MAX};

use crate::common::{PAGE, Toy, count_up, counter, events};

/// Makes pages that are copied in and out. `None`, and says so: this kernel cannot.
fn copying(test: &str, pages: usize) -> Option<Arc<Toy>> {
    let toy = Toy::new(pages, None);
    if !toy.copies {
        eprintln!(
            "SKIPPED: {test}: this kernel cannot drop scattered pages of a process by itself (kernel 6.14)"
        );
        return None;
    }
    Some(toy)
}

#[test]
fn pages_that_are_copied_out_while_threads_write_lose_no_write() {
    const THREADS: usize = 3;
    const PAGES: usize = 64;
    const ROUNDS: usize = 4000;
    let Some(toy) = copying(
        "pages_that_are_copied_out_while_threads_write_lose_no_write",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    let mut taken = 0;
    count_up(&toy, THREADS, ROUNDS, |time| {
        // Every second one, or every third, from somewhere on: the others stay.
        let pages = (time % 7..PAGES).step_by(2 + time % 2);
        let out = toy.evict_scattered(pages.take(SCATTERED_PAGES_MAX));
        taken += out;
        out
    });
    assert!(taken >= PAGES, "{taken} pages went out");
    assert_eq!(toy.allocations.load(Ordering::Relaxed), 0);
}

#[test]
fn pages_are_copied_out_up_to_the_first_that_is_not_there() {
    const PAGES: usize = 8;
    let Some(toy) = copying(
        "pages_are_copied_out_up_to_the_first_that_is_not_there",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    for page in 0..PAGES {
        counter(toy.address(page)).store(page as u64 + 1, Ordering::Relaxed);
    }
    // SAFETY: a page of the test's region.
    let dropped = unsafe { libc::madvise(toy.address(4) as *mut _, PAGE, libc::MADV_DONTNEED) };
    assert_eq!(dropped, 0);
    assert_eq!(toy.evict_scattered([1, 3, 4, 6].into_iter()), 2);
    let is_there = |page: usize| toy.space.is_present(toy.address(page));
    let there: Vec<_> = (0..PAGES).filter(|&page| is_there(page)).collect();
    assert_eq!(there, [0, 2, 5, 6, 7]);
    // Pages that were protected can be written without a fault, and pages that left come back.
    let before = toy.faults.load(Ordering::Relaxed);
    for page in [0, 1, 2, 3, 5, 6, 7] {
        let value = counter(toy.address(page)).fetch_add(10, Ordering::Relaxed);
        assert_eq!(value, page as u64 + 1);
    }
    assert_eq!(toy.faults.load(Ordering::Relaxed) - before, 2);
}

#[test]
fn pages_are_copied_out_up_to_what_the_program_maps_among_them() {
    const PAGES: usize = 8;
    let Some(toy) = copying(
        "pages_are_copied_out_up_to_what_the_program_maps_among_them",
        PAGES,
    ) else {
        return;
    };
    let _registration = toy.register();
    for page in 0..PAGES {
        counter(toy.address(page)).store(page as u64 + 1, Ordering::Relaxed);
    }
    // In place of the fourth page the program has memory of its own.
    thread::scope(|scope| {
        let address = toy.address(3);
        let mapping = scope.spawn(move || {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: a page of the test's region, which nobody uses any more.
            unsafe { libc::mmap(address as *mut _, PAGE, libc::PROT_READ, flags, -1, 0) as usize }
        });
        while !mapping.is_finished() {
            events(&toy.space, 0);
        }
        assert_eq!(mapping.join().unwrap(), address);
    });
    assert_eq!(toy.evict_scattered([0, 2, 5].into_iter()), 2);
    assert_eq!(toy.evict_scattered([3, 5].into_iter()), 0);
    assert_eq!(toy.evict_scattered([5, 7].into_iter()), 2);
    let is_there = |page: usize| toy.space.is_present(toy.address(page));
    let there: Vec<_> = (0..PAGES).filter(|&page| is_there(page)).collect();
    assert_eq!(there, [1, 4, 6]);
    for page in [0, 1, 2, 4, 5, 6, 7] {
        let value = counter(toy.address(page)).fetch_add(10, Ordering::Relaxed);
        assert_eq!(value, page as u64 + 1);
    }
}
