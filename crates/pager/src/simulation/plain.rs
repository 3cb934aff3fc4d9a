//! One region over a store of the program's own, and one thread that uses it: [`Plain`].

use super::*;

pub(super) const PAGE_BYTES: usize = 4096;

/// A region, its store and its workers. The caller takes their turns.
pub(super) struct Plain {
    pub(super) space: Arc<SimSpace>,
    pub(super) fillers: Vec<Filler<SimSpace>>,
    pub(super) evictors: Vec<Evictor<SimSpace>>,
    pub(super) store: Arc<Flaky>,
    /// Region. Not dropped by a simulation that fails: see `World`.
    pub(super) mapped: ManuallyDrop<MappedRegion<SimSpace>>,
}

impl Plain {
    /// Maps a region of `pages` pages of zeros, of which `local` fit.
    pub(super) fn new(pages: usize, local: usize, options: RegionOptions) -> Plain {
        Plain::over(SimOptions::default(), pages, local, options)
    }

    /// Maps such a region in a space with the options `space`.
    pub(super) fn over(
        space: SimOptions,
        pages: usize,
        local: usize,
        options: RegionOptions,
    ) -> Plain {
        let space = Arc::new(SimSpace::new(space));
        let session = SimServer::new(SimConfig::new(1))
            .session(&SessionOptions::default())
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let budget = PagerOptions::new((local * PAGE_BYTES) as u64);
        let PagerParts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &budget)
            .expect("the options are sound");
        let bytes = pages * PAGE_BYTES;
        let store = Arc::new(Flaky {
            bytes: Mutex::new(vec![0; bytes]),
            random: Mutex::new(1),
            fail_one_in: AtomicU64::new(0),
        });
        let (kept, blocking) = (store.clone(), BlockingOptions::default());
        let (region, bytes) = ("a region", bytes as u64);
        let pages = PageStore::blocking(&cluster, region, bytes, PAGE_BYTES, kept, &blocking)
            .expect("the page size is sound");
        let mapped = Arc::new(pager).map(pages, options);
        Plain {
            space,
            fillers,
            evictors,
            store,
            mapped: ManuallyDrop::new(mapped.expect("the budget holds two pages")),
        }
    }

    /// Stores a value in the first word of a page, or loads it.
    pub(super) fn access(&mut self, page: usize, value: Option<u64>) -> u64 {
        let address = self.mapped.address() + page * PAGE_BYTES;
        for _ in 0..10_000 {
            let outcome = match value {
                Some(value) => (self.space.try_store(0, address, value)).map(|()| value),
                None => self.space.try_load(0, address),
            };
            match outcome {
                Ok(seen) => return seen,
                Err(Faulted::Asleep) => {
                    while self.space.is_asleep(0) {
                        self.turn();
                    }
                }
                Err(other) => panic!("page {page}: {other}"),
            }
        }
        panic!("nobody serves page {page}");
    }

    /// Takes a turn of each worker.
    pub(super) fn turn(&mut self) {
        self.fillers
            .iter_mut()
            .for_each(|filler| _ = filler.turn(EventScope::All));
        (self.evictors.iter_mut()).for_each(|evictor| _ = evictor.turn());
    }

    /// Changes the first word of a page in the store.
    pub(super) fn put(&self, page: usize, value: u64) {
        self.store.bytes.lock()[page * PAGE_BYTES..][..8].copy_from_slice(&value.to_ne_bytes());
    }

    /// Returns the first word of a page in the store.
    pub(super) fn stored(&self, page: usize) -> u64 {
        let bytes = self.store.bytes.lock();
        let word = bytes[page * PAGE_BYTES..][..8].as_array();
        u64::from_ne_bytes(*word.expect("8 bytes were cut out"))
    }

    /// Drops the region. Returns how often pages moved for that.
    pub(super) fn end(self) -> usize {
        let Plain {
            space,
            mut fillers,
            mut evictors,
            mapped,
            ..
        } = self;
        let before = space.moves();
        let (pager, region) = (mapped.pager().clone(), mapped.region().clone());
        close(
            vec![ManuallyDrop::into_inner(mapped)],
            &mut fillers,
            &mut evictors,
        );
        assert!(region.counts_nothing(), "pages are counted that are gone");
        let budget = pager.shared().frames.budget();
        assert_eq!(budget.used(), 0, "frames did not come back");
        space.moves() - before
    }
}
