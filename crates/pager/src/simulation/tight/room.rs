//! Making of room: the pages that leave when a program goes round in a loop, and the work that a
//! slow store or a late prefetch holds up.

use super::*;

const PAGE_BYTES: usize = 4096;
const BUDGET_PAGES: usize = 4096;

fn with_budget(pages: usize, regions: usize) -> Sim {
    let budget_bytes = BUDGET_PAGES * PAGE_BYTES;
    tight(1, &vec![PAGE_BYTES; regions], budget_bytes, pages)
}

impl Sim {
    /// Touches the first pages of a region in order. Returns how many had to come in.
    fn walk(&mut self, region: usize, pages: usize) -> usize {
        let fills = |sim: &Sim| sim.regions[region].pager().stats().fills as usize;
        let (before, base) = (fills(self), self.regions[region].address());
        for page in 0..pages {
            self.touch(base + page * PAGE_BYTES, true);
        }
        fills(self) - before
    }
}

#[test]
fn loop_over_more_than_fits_finds_a_part_in_memory() {
    // Many windows, so that pages that stay for a while are few beside them.
    let budget_pages = 8 * BUDGET_PAGES;
    let pages = 2 * budget_pages;
    let mut sim = tight(1, &[PAGE_BYTES], budget_pages * PAGE_BYTES, pages);
    let fills: Vec<_> = (0..5).map(|_| sim.walk(0, pages)).collect();
    assert!(fills[0] >= pages, "{fills:?}");
    let later = fills[1..].iter().max().expect("there are more");
    assert!(*later < pages * 9 / 10, "{fills:?} of {pages}");
    sim.end();
}

#[test]
fn what_is_never_used_again_makes_room_for_a_loop() {
    let mut sim = with_budget(BUDGET_PAGES, 2);
    sim.walk(0, BUDGET_PAGES);
    let pages = BUDGET_PAGES / 2;
    let fills: Vec<_> = (0..5).map(|_| sim.walk(1, pages)).collect();
    assert!(fills[4] < pages / 10, "{fills:?} of {pages}");
    sim.end();
}

#[test]
fn region_with_one_run_overdue_still_gives_pages() {
    let mut sim = with_budget(2 * BUDGET_PAGES, 1);
    let region = sim.regions[0].region().clone();
    region.count_overdue(region.run_pages);
    sim.walk(0, 2 * BUDGET_PAGES);
    region.count_overdue_out(region.run_pages);
    drop(region);
    sim.end();
}

#[test]
fn prefetch_of_many_pages_that_are_here_lets_faults_in_between() {
    let pages = 3 * BUDGET_PAGES;
    let mut sim = tight(1, &[PAGE_BYTES], 2 * pages * PAGE_BYTES, pages);
    sim.walk(0, pages);
    let bytes = pages * PAGE_BYTES;
    (sim.regions[0].advise(0..bytes, Advice::WillNeed)).expect("a filler takes it");
    let mut turns = 0;
    while {
        sim.fillers[0].turn(EventScope::All);
        sim.fillers[0].has_work()
    } {
        turns += 1;
    }
    assert!(turns >= 2, "all of {pages} pages in {turns} turns");
    sim.end();
}
