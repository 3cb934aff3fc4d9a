//! Budgets that barely suffice, and stores that stall: [`Tight`].

mod frozen;
mod room;

use super::*;

/// Two regions, each on a shard of its own, under one budget; one thread, whose instructions touch
/// two neighbouring pages at once.
struct Tight {
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    /// Regions. Not dropped by a simulation that fails: see `World`.
    regions: ManuallyDrop<Vec<MappedRegion<SimSpace>>>,
}

impl Tight {
    fn new(seed: u64, page_bytes: &[usize], budget_bytes: usize, pages: usize) -> Tight {
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: 2,
            seed,
            ..SimOptions::default()
        }));
        let session = SimServer::new(SimConfig::new(seed))
            .session(&SessionOptions {
                deadline: Duration::from_secs(5),
                link: None,
                client: "simulation".into(),
                ..SessionOptions::default()
            })
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let PagerParts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(
            space.clone(),
            cluster.clone(),
            &PagerOptions::new(budget_bytes as u64),
        )
        .expect("the options are sound");
        let pager = Arc::new(pager);
        let regions = page_bytes
            .iter()
            .map(|&page_bytes| {
                let bytes = (pages * page_bytes) as u64;
                let options = RemoteOptions::default();
                let store = PageStore::remote(&cluster, "a region", bytes, page_bytes, &options)
                    .expect("the server has room");
                pager
                    .map(store, RegionOptions::default())
                    .expect("the budget holds two pages")
            })
            .collect();
        Tight {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            space,
            fillers,
            evictors,
            regions: ManuallyDrop::new(regions),
        }
    }

    /// Touches a word until that succeeds.
    fn touch(&mut self, address: usize, stores: bool) {
        let started = Instant::now();
        loop {
            let done = !self.space.is_asleep(0)
                && if stores {
                    self.space.try_store(0, address, 1).is_ok()
                } else {
                    self.space.try_load(0, address).is_ok()
                };
            if done {
                return;
            }
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "a touch never gets its page"
            );
            self.fillers
                .iter_mut()
                .for_each(|filler| _ = filler.turn(EventScope::All));
            self.evictors
                .iter_mut()
                .for_each(|evictor| _ = evictor.turn());
        }
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
            self.fillers
                .iter_mut()
                .for_each(|filler| _ = filler.turn(EventScope::All));
            self.evictors
                .iter_mut()
                .for_each(|evictor| _ = evictor.turn());
        }
        panic!("pages {page} and {} are never there at once", page + 1);
    }
}

#[test]
fn instruction_that_touches_two_pages_gets_on_with_a_budget_of_two() {
    for seed in seeds(4000..4010) {
        for budget_pages in 2..6 {
            println!("seed {seed}, {budget_pages} pages");
            let mut tight = Tight::new(seed, &[4096, 4096], budget_pages * 4096, PAGES);
            for _ in 0..200 {
                let region = (next(&mut tight.random) % 2) as usize;
                let first = (next(&mut tight.random) % (PAGES as u64 - 9)) as usize;
                (first..first + 8).for_each(|page| tight.touch_two(region, page));
            }
            close(
                std::mem::take(&mut tight.regions),
                &mut tight.fillers,
                &mut tight.evictors,
            );
        }
    }
}

/// Store whose writes do not return before they may.
#[derive(Default)]
struct Stalled {
    goes_on: Mutex<bool>,
    gone_on: Condvar,
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
    let mut tight = Tight::new(1, &[4096], 16384 * 4096, 5000);
    let stalled = Arc::new(Stalled::default());
    let pager = tight.regions[0].pager().clone();
    let bytes = 15_000 * 4096;
    let store = PageStore::blocking(
        pager.cluster(),
        "a region",
        bytes,
        4096,
        stalled.clone(),
        &BlockingOptions::default(),
    );
    let slow = pager
        .map(store.expect("pages of 4096"), RegionOptions::default())
        .expect("the budget holds two pages");
    let base = slow.address();
    tight.regions.push(slow);
    // Every other page of the region changes, so that a run is many calls.
    for page in 0..15_000 {
        tight.touch(base + page * 4096, page % 2 == 1);
    }
    let other = tight.regions[0].address();
    for page in 0..5000 {
        tight.touch(other + page * 4096, true);
    }
    *stalled.goes_on.lock() = true;
    stalled.gone_on.notify_all();
    close(
        std::mem::take(&mut tight.regions),
        &mut tight.fillers,
        &mut tight.evictors,
    );
}
