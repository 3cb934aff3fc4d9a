//! Who makes room, and what a store or a wish that takes long holds up.

use super::*;

const PAGE_BYTES: usize = 4096;
const BUDGET_PAGES: usize = 4096;

impl Tight {
    fn with_budget(pages: usize, regions: usize) -> Tight {
        let budget_bytes = BUDGET_PAGES * PAGE_BYTES;
        Tight::new(1, &vec![PAGE_BYTES; regions], budget_bytes, pages)
    }

    /// Touches the first pages of a region in order.
    fn walk(&mut self, region: usize, pages: usize) {
        let base = self.regions[region].address();
        for page in 0..pages {
            self.touch(base + page * PAGE_BYTES, true);
        }
    }

    fn close(&mut self) {
        let regions = std::mem::take(&mut *self.regions);
        close(regions, &mut self.fillers, &mut self.evictors);
    }
}

#[test]
fn region_with_one_run_overdue_still_gives_pages() {
    let mut tight = Tight::with_budget(2 * BUDGET_PAGES, 1);
    let region = tight.regions[0].region().clone();
    region.count_overdue(region.run_pages);
    tight.walk(0, 2 * BUDGET_PAGES);
    region.count_overdue_out(region.run_pages);
    drop(region);
    tight.close();
}

#[test]
fn wish_for_many_pages_that_are_here_lets_faults_in_between() {
    let pages = 3 * BUDGET_PAGES;
    let mut tight = Tight::new(1, &[PAGE_BYTES], 2 * pages * PAGE_BYTES, pages);
    tight.walk(0, pages);
    let bytes = pages * PAGE_BYTES;
    (tight.regions[0].advise(0..bytes, Advice::WillNeed)).expect("a filler takes it");
    let mut turns = 0;
    while {
        tight.fillers[0].turn();
        tight.fillers[0].has_work()
    } {
        turns += 1;
    }
    assert!(turns >= 2, "all of {pages} pages in {turns} turns");
    tight.close();
}
