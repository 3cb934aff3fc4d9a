//! Regions that the program may only read: pages come in as copies and leave by being dropped.

use super::{plain::Plain, *};

const REGION_PAGES: usize = 2048;
const LOCAL_PAGES: usize = 512;
const ACCESSES: usize = 8_000;

/// Maps a read-only region whose pages hold their numbers plus one.
fn numbered(space: SimOptions) -> Plain {
    let options = RegionOptions {
        read_only: true,
        ..RegionOptions::default()
    };
    let plain = Plain::over(space, REGION_PAGES, LOCAL_PAGES, options);
    for page in 0..REGION_PAGES {
        plain.put(page, page as u64 + 1);
    }
    plain
}

/// Reads pages in rows and at random, while now and then all are asked to leave, some are pinned,
/// and the program drops some.
fn read(plain: &mut Plain, seed: u64) {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut row = 0;
    for step in 0..ACCESSES {
        let page = match next(&mut random) % 3 {
            0 => (next(&mut random) % REGION_PAGES as u64) as usize,
            _ => {
                row = (row + 1) % REGION_PAGES;
                row
            }
        };
        assert_eq!(plain.access(page, None), page as u64 + 1, "page {page}");
        let pages = plain.space.resident_pages() + plain.space.frame_pages();
        assert!(pages <= LOCAL_PAGES, "{pages} pages in memory");
        if step % 500 == 0 {
            let all = PageRange::first(REGION_PAGES);
            plain.run(0, all, false).expect("nothing is written");
        }
        if next(&mut random).is_multiple_of(50) {
            let address = plain.mapped().address() + page * plain::PAGE_BYTES;
            plain.space.drop_page(address);
        }
    }
}

#[test]
fn pages_that_may_only_be_read_are_dropped_and_come_back_whole() {
    for seed in seeds(0..6) {
        println!("seed {seed}");
        let mut plain = numbered(SimOptions {
            seed,
            duplicate_probability: 0.1,
            ..SimOptions::default()
        });
        read(&mut plain, seed);
        // Moved only where there was no room for a copy beside its frame.
        let moves = plain.space.moves();
        assert!(moves < ACCESSES / 100, "pages moved {moves} times");
        plain.end();
    }
}

#[test]
fn pages_that_cannot_be_dropped_leave_as_others_do() {
    for seed in seeds(0..6) {
        println!("seed {seed}");
        let mut plain = numbered(SimOptions {
            seed,
            busy_probability: 0.2,
            ..SimOptions::default()
        });
        read(&mut plain, seed);
        assert!(plain.space.moves() > ACCESSES / 100, "all could be dropped");
        plain.end();
    }
}

#[test]
fn a_read_only_region_ends_without_writing_or_moving() {
    let mut plain = numbered(SimOptions::default());
    (0..LOCAL_PAGES / 2).for_each(|page| _ = plain.access(page, None));
    plain.fail_one_in(1);
    plain.mapped().flush_out().expect("nothing is written");
    assert!(plain.space.resident_pages() > 0);
    assert_eq!(plain.end(), 0, "pages moved");
}
