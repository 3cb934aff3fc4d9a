//! Budgets that barely suffice, and stores that stall.

mod frozen;
mod room;

use super::*;

/// Returns regions, each on a shard of its own, under one budget. One thread uses them, whose
/// instructions touch two neighbouring pages at once.
fn tight(seed: u64, page_bytes: &[usize], budget_bytes: usize, pages: usize) -> Sim {
    let space = SimOptions {
        shards: 2,
        seed,
        ..SimOptions::default()
    };
    let options = PagerOptions::new(budget_bytes as u64);
    let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut sim = Sim::new(random, space, SimConfig::new(seed), &options);
    for &page_bytes in page_bytes {
        sim.map(pages, page_bytes, Codec::Raw, RegionOptions::default());
    }
    sim
}

impl Sim {
    /// Touches a word until that succeeds.
    fn touch(&mut self, address: usize, stores: bool) {
        let touched = self.access(0, address, stores.then_some(1));
        touched.expect("a page is at fault");
    }

    /// Adds a region over a store whose writes stall.
    fn add_stalled(&mut self, pages: usize) -> Arc<Stalled> {
        let stalled = Arc::new(Stalled::default());
        self.map_own(pages, 4096, stalled.clone(), RegionOptions::default());
        stalled
    }

    /// Makes one instruction's touch of a page's last word and the next page's first, until both
    /// pages are there at once.
    fn touch_two(&mut self, region: usize, page: usize) {
        let next = self.regions[region].address() + (page + 1) * self.regions[region].page_bytes();
        for _ in 0..20_000 {
            if !self.space.is_asleep(0)
                && self.space.try_load(0, next - 8).is_ok()
                && self.space.try_load(0, next).is_ok()
            {
                return;
            }
            // Real workers are slower than the program now and then, but not for ever.
            self.turn();
        }
        panic!("pages {page} and {} are never there at once", page + 1);
    }
}

#[test]
fn instruction_that_touches_two_pages_gets_on_with_a_budget_of_two() {
    for seed in seeds(4000..4010) {
        for budget_pages in 2..6 {
            println!("seed {seed}, {budget_pages} pages");
            let mut sim = tight(seed, &[4096, 4096], budget_pages * 4096, PAGES);
            for _ in 0..200 {
                let (region, first) = (sim.below(2), sim.below(PAGES - 9));
                (first..first + 8).for_each(|page| sim.touch_two(region, page));
            }
            sim.end();
        }
    }
}

/// Store whose writes do not return before they may.
#[derive(Default)]
struct Stalled {
    goes_on: Mutex<bool>,
    gone_on: Condvar,
}

impl Stalled {
    /// Lets writes return from now on.
    fn go_on(&self) {
        *self.goes_on.lock() = true;
        self.gone_on.notify_all();
    }
}

impl Store for Stalled {
    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        let mut goes_on = self.goes_on.lock();
        while !*goes_on {
            goes_on = self.gone_on.wait(goes_on);
        }
        Ok(())
    }
}

#[test]
fn runs_in_pieces_for_a_store_that_stalls_hold_up_no_other_region() {
    let mut sim = tight(1, &[4096], 16384 * 4096, 5000);
    let stalled = sim.add_stalled(15_000);
    let base = sim.regions[1].address();
    // Every other page of the region changes, so that a run is many calls.
    for page in 0..15_000 {
        sim.touch(base + page * 4096, page % 2 == 1);
    }
    let other = sim.regions[0].address();
    for page in 0..5000 {
        sim.touch(other + page * 4096, true);
    }
    stalled.go_on();
    sim.end();
}
