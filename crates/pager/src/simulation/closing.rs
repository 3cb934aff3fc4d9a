//! End of a region: pages that move, pages that are written back, and the rest after a failed end.

use super::{plain::Plain, *};

/// Number of pages, which all fit.
const REGION_PAGES: usize = 256;

/// Returns a region whose pages are all there. Each holds its number plus `add`.
fn full(add: u64) -> Plain {
    let mut plain = Plain::new(REGION_PAGES, 2 * REGION_PAGES, RegionOptions::default());
    for page in 0..REGION_PAGES {
        plain.access(page, Some(page as u64 + add));
    }
    assert_eq!(plain.space.resident_pages(), REGION_PAGES);
    plain
}

/// Flushes as a `close` of the program does first.
fn flush_out(plain: &mut Plain) -> Result<(), crate::FlushError> {
    plain.beside(|regions| regions[0].flush_out())
}

#[test]
fn a_closing_region_moves_each_page_once_and_neighbours_together() {
    let mut plain = full(1);
    let before = plain.space.moves();
    flush_out(&mut plain).expect("the store takes every page");
    let moves = plain.space.moves() - before;
    assert_eq!(moves, REGION_PAGES / CHUNK_PAGES, "to write all back");
    assert_eq!(plain.space.resident_pages(), 0);
    let stored = (0..REGION_PAGES).map(|page| plain.stored(page));
    assert!(stored.eq((0..REGION_PAGES as u64).map(|page| page + 1)));
    assert_eq!(plain.end(), 0, "nothing was left to take out");
}

#[test]
fn a_dropped_region_gives_its_frames_back_in_runs() {
    let plain = full(1);
    assert_eq!(plain.end(), REGION_PAGES / CHUNK_PAGES);
}

#[test]
fn a_region_whose_close_fails_goes_on_with_all_its_contents() {
    let mut plain = full(7);
    plain.fail_one_in(1);
    flush_out(&mut plain).expect_err("the store takes nothing");
    assert_eq!(plain.space.resident_pages(), REGION_PAGES);
    plain.fail_one_in(2);
    flush_out(&mut plain).expect_err("the store takes a part");
    plain.fail_one_in(0);
    for page in 0..REGION_PAGES {
        assert_eq!(plain.access(page, None), page as u64 + 7);
    }
    flush_out(&mut plain).expect("the store takes every page");
    let stored = (0..REGION_PAGES).map(|page| plain.stored(page));
    assert!(stored.eq((0..REGION_PAGES as u64).map(|page| page + 7)));
    plain.end();
}
