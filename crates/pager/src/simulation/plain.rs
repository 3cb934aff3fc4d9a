//! One region over a store of the program's own, and one thread that uses it: [`Plain`].

use super::*;

pub(super) const PAGE_BYTES: usize = 4096;

/// A region and its store.
pub(super) struct Plain {
    pub(super) sim: Sim,
    pub(super) store: Arc<Flaky>,
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
        let budget = PagerOptions::new((local * PAGE_BYTES) as u64);
        let mut sim = Sim::new(1, space, SimConfig::new(1), &budget);
        let store = Flaky::new(pages * PAGE_BYTES, 1, 0);
        sim.map_own(pages, PAGE_BYTES, store.clone(), options);
        Plain { sim, store }
    }

    /// Stores a value in the first word of a page, or loads it. Returns the word, or the signal
    /// that the program gets.
    pub(super) fn try_page(&mut self, page: usize, value: Option<u64>) -> Result<u64, Faulted> {
        let address = self.mapped().address() + page * PAGE_BYTES;
        self.sim.access(0, address, value)
    }

    /// Stores a value in the first word of a page, or loads it.
    pub(super) fn access(&mut self, page: usize, value: Option<u64>) -> u64 {
        let outcome = self.try_page(page, value);
        outcome.unwrap_or_else(|signal| panic!("page {page}: {signal}"))
    }

    /// Makes every `one_in`-th call of the store fail; 0: none fails.
    pub(super) fn fail_one_in(&self, one_in: u64) {
        self.store.fail_one_in.store(one_in, Ordering::Relaxed);
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
        let (before, space) = (self.space.moves(), self.space.clone());
        let shared = self.shared();
        self.sim.end();
        let used = shared.frames.budget().used();
        assert_eq!(used, 0, "frames did not come back");
        space.moves() - before
    }
}

impl Deref for Plain {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        &self.sim
    }
}

impl DerefMut for Plain {
    fn deref_mut(&mut self) -> &mut Sim {
        &mut self.sim
    }
}
