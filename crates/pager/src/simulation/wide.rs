//! Regions of many pages, runs and windows: [`Wide`].

use super::*;

/// Number of words of a page that programs use, so that a few words tell what a region holds.
const WORDS_USED: usize = 3;

/// Walk of a program thread through a region.
#[derive(Clone, Copy, Default)]
struct Walk {
    region: usize,
    page: usize,
    down: bool,
    pages_left: usize,
    stores: bool,
    /// Access that comes next: a word of the page and, if it is a store, its new value.
    next: Option<(usize, Option<u64>)>,
}

/// Regions of several stripes and two page sizes, and programs that go through them page by page,
/// so that runs and windows of many pages happen.
struct Wide {
    sim: Sim,
    flaky: Option<Arc<Flaky>>,
    /// Words of each region that are not 0.
    shadows: Vec<HashMap<usize, u64>>,
    walks: [Walk; THREADS],
    /// Pages that are pinned, and their region.
    pinned: Vec<(usize, Range<usize>)>,
}

impl Wide {
    fn new(seed: u64, lossy: bool, fails: bool) -> Wide {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let space = SimOptions {
            shards: 2,
            seed,
            busy_probability: [0.0, 0.02][(next(&mut random) % 2) as usize],
            duplicate_probability: 0.1,
            copies_out: !seed.is_multiple_of(3),
            ..SimOptions::default()
        };
        let mut config = SimConfig::new(seed);
        config.delay_steps = 1 + next(&mut random) % 40;
        config.lose_one_in = lossy.then_some(200);
        // A stripe is 16 MiB: the first region has a little more than one, the second a little more
        // than two.
        let sizes = match next(&mut random) % 3 {
            0 => vec![(4096, 4096 + 90)],
            1 => vec![(4096, 4096 + 90), (64 << 10, 2 * 256 + 21)],
            _ => vec![(16 << 10, 1024 + 5), (4096, 50)],
        };
        let largest = sizes[sizes.len() - 1].0.max(sizes[0].0) as u64;
        let budget_bytes = match next(&mut random) % 4 {
            0 => 2 * largest + (next(&mut random) % 8) * 4096,
            1 => 2 * largest + (next(&mut random) % 64) * 4096,
            2 => (1 << 20) + 2 * largest,
            _ => 4 << 20,
        };
        let mut options = PagerOptions::new(budget_bytes);
        options.in_thread = INLINE_HANDLERS;
        // Where a budget of few pages leaves none for read-ahead, there is one with room.
        if next(&mut random).is_multiple_of(2) {
            (options.low_water, options.high_water) = (0.5, 0.75);
        }
        let mut sim = Sim::new(random, space, config, &options);
        let is_cheaper = sim.chance(2);
        sim.shared().scatter.costs().pretend(is_cheaper);
        let mut flaky = None;
        for &(page_bytes, pages) in &sizes {
            if fails && sim.regions.is_empty() {
                let store = Flaky::new(pages * page_bytes, seed, 100);
                flaky = Some(store.clone());
                sim.map_own(pages, page_bytes, store, RegionOptions::default());
                continue;
            }
            let codecs = [
                Codec::Raw,
                Codec::Lz4,
                Codec::Shuffle {
                    element_bytes: Some(8),
                },
                Codec::Zfp {
                    mode: ZfpMode::Reversible,
                    element: Some(Element::I64),
                },
            ];
            let codec = codecs[sim.below(4)];
            sim.map(pages, page_bytes, codec, RegionOptions::default());
        }
        Wide {
            flaky,
            shadows: sizes.iter().map(|_| HashMap::new()).collect(),
            sim,
            walks: Default::default(),
            pinned: Vec::new(),
        }
    }

    fn pages(&self, region: usize) -> usize {
        self.regions[region].region().pages()
    }

    fn address(&self, region: usize, page: usize) -> usize {
        self.regions[region].region().address_of(PageIndex(page))
    }

    /// Picks a page near one that matters: the first, the last, the first behind a stripe, or any
    /// of a small part.
    fn some_page(&mut self, region: usize) -> usize {
        let pages = self.pages(region);
        let stripe = self.regions[region].region().geometry.stripe_bytes;
        let stripe = stripe / self.regions[region].page_bytes();
        let near = match self.below(5) {
            0 => 0,
            1 => pages,
            2 => stripe,
            3 => 2 * stripe,
            _ => self.below(600),
        };
        (near + self.below(100)).saturating_sub(50).min(pages - 1)
    }

    fn some_region(&mut self) -> usize {
        let regions = self.regions.len();
        self.below(regions)
    }

    fn some_pages(&mut self, region: usize) -> Range<usize> {
        let first = self.some_page(region);
        let len = 1 + self.below(300);
        first..(first + len).min(self.pages(region))
    }

    fn step(&mut self) {
        match self.below(8) {
            0..4 => {
                let thread = self.below(THREADS);
                // Some threads are fast.
                for _ in 0..1 + self.below(4) {
                    self.program(thread);
                }
            }
            other => self.turn_of_one(other - 4),
        }
        for at in 0..self.pinned.len() {
            let (region, pages) = self.pinned[at].clone();
            for page in pages {
                let address = self.address(region, page);
                assert!(self.space.is_present(address), "pinned page {page} is away");
            }
        }
    }

    fn start_walk(&mut self) -> Walk {
        let region = self.some_region();
        let alone = self.chance(4);
        Walk {
            region,
            page: self.some_page(region),
            down: self.chance(3),
            pages_left: if alone { 1 } else { 1 + self.below(400) },
            stores: self.chance(2),
            next: None,
        }
    }

    /// Takes a step of a program thread. Returns whether it got on.
    fn program(&mut self, thread: usize) -> bool {
        if self.space.is_asleep(thread) {
            return false;
        }
        if self.walks[thread].pages_left == 0 {
            self.walks[thread] = self.start_walk();
        }
        let mut walk = self.walks[thread];
        let page_words = self.regions[walk.region].page_bytes() / 8;
        let (word, value) = match walk.next {
            Some(next) => next,
            None => {
                let word = self.below(WORDS_USED) * (page_words / WORDS_USED);
                let stores = walk.stores && self.chance(2);
                let value = next(&mut self.random) & [0, u64::MAX][usize::from(!self.chance(8))];
                (walk.page * page_words + word, stores.then_some(value))
            }
        };
        let region = self.regions[walk.region].region().clone();
        let address = region.address + word * 8;
        walk.next = match self.try_access(thread, &region, address, value) {
            Ok(seen) => {
                let shadow = &mut self.shadows[walk.region];
                if value.is_some() {
                    shadow.insert(word, seen);
                }
                let expected = shadow.get(&word).copied().unwrap_or(0);
                assert_eq!(seen, expected, "word {word} of region {}", walk.region);
                None
            }
            Err(Faulted::Asleep) => Some((word, value)),
            Err(Faulted::Sigbus) if self.flaky.is_some() => {
                let page = PageIndex(walk.page).alone();
                let demand = || Command::Demand(region.clone(), page, Arc::default());
                self.shared().doors.tell_fillers(demand);
                Some((word, value))
            }
            Err(other) => panic!("thread {thread} at word {word}: {other}"),
        };
        if walk.next.is_none() {
            walk.pages_left -= 1;
            let next = if walk.down {
                walk.page.checked_sub(1)
            } else {
                Some(walk.page + 1).filter(|&page| page < region.pages())
            };
            match next {
                Some(page) => walk.page = page,
                None => walk.pages_left = 0,
            }
        }
        self.walks[thread] = walk;
        walk.next.is_none()
    }

    /// Takes turns of the workers until `done`.
    fn drive(&mut self, mut done: impl FnMut(&mut Wide) -> bool) {
        let started = Instant::now();
        while !done(self) {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "the workers never get there: {:?}",
                self.regions
            );
            self.turn();
        }
    }

    fn finish_accesses(&mut self) {
        self.drive(|wide| {
            (0..THREADS).for_each(|thread| {
                if wide.walks[thread].next.is_some() {
                    wide.program(thread);
                }
            });
            wide.walks.iter().all(|walk| walk.next.is_none())
        });
    }

    /// Runs a job by the evictors, while the programs go on if they are `busy`.
    fn run_job(
        &mut self,
        region: usize,
        pages: Range<usize>,
        keep: bool,
        busy: bool,
    ) -> Result<(), PageError> {
        // A page that is written back is away for a moment, pinned or not.
        let pinned = mem::take(&mut self.pinned);
        let job = Job::new(self.regions[region].region().clone(), pages_of(pages), keep);
        let shared = self.shared();
        shared.jobs.add(job.clone());
        self.drive(|wide| {
            if busy && !job.has_ended() {
                wide.step();
            }
            job.has_ended()
        });
        self.pinned = pinned;
        let outcome = job.wait(&SignalGuard::new());
        let may_fail = self.flaky.is_some() && region == 0;
        assert!(outcome.is_ok() || may_fail, "{outcome:?}");
        outcome
    }

    /// Writes all pages of a region to its store.
    fn flush(&mut self, region: usize) {
        let everything = 0..self.pages(region);
        let flush = |_: &i32| {
            self.run_job(region, everything.clone(), true, false)
                .is_ok()
        };
        let done = (0..100).find(flush);
        assert!(
            done.is_some(),
            "a store that fails now and then always fails"
        );
    }

    /// Pins pages, or takes a pin back.
    fn pin(&mut self) {
        if self.chance(2) && !self.pinned.is_empty() {
            let pinned = self.pinned.len();
            let at = self.below(pinned);
            let (region, pages) = self.pinned.swap_remove(at);
            let page_bytes = self.regions[region].page_bytes();
            self.regions[region].unpin(pages.start * page_bytes..pages.end * page_bytes);
            return;
        }
        let region = self.some_region();
        let mut pages = self.some_pages(region);
        pages.end = pages.end.min(pages.start + 1 + self.below(12));
        let page_bytes = self.regions[region].page_bytes();
        let bytes = pages.start * page_bytes..pages.end * page_bytes;
        let pinned = self.beside(|regions| regions[region].pin(bytes).is_ok());
        if pinned {
            self.pinned.push((region, pages));
        }
    }

    /// Gives pages whose bytes are all in the store back to the kernel, as the program may.
    fn drop_pages(&mut self) {
        let region = self.some_region();
        self.finish_accesses();
        self.flush(region);
        for page in self.some_pages(region) {
            let pinned =
                |(of, pages): &(usize, Range<usize>)| *of == region && pages.contains(&page);
            if !self.pinned.iter().any(pinned) && self.chance(2) {
                self.space.drop_page(self.address(region, page));
            }
        }
    }

    fn disturb(&mut self) {
        let region = self.some_region();
        let pages = self.some_pages(region);
        let page_bytes = self.regions[region].page_bytes();
        match self.below(8) {
            0 => self.flush(region),
            1 => {
                let (keep, busy) = (self.chance(2), self.chance(2));
                let _ = self.run_job(region, pages, keep, busy);
            }
            2 => self.prefetch(region, pages),
            3 => {
                let advice = [Advice::Sequential, Advice::Random, Advice::Normal];
                let advice = advice[self.below(3)];
                self.regions[region]
                    .advise(0..page_bytes, advice)
                    .expect("advice of this kind does not fail");
            }
            4 | 5 => self.pin(),
            _ => self.drop_pages(),
        }
    }

    /// Checks that every word that was ever written is as it was written last.
    fn check_everything(&mut self) {
        if let Some(flaky) = &self.flaky {
            flaky.fail_one_in.store(0, Ordering::Relaxed);
        }
        self.finish_accesses();
        for region in 0..self.regions.len() {
            let page_words = self.regions[region].page_bytes() / 8;
            let mut words: Vec<_> = self.shadows[region].keys().copied().collect();
            words.sort_unstable();
            for word in words {
                self.walks[0] = Walk {
                    region,
                    page: word / page_words,
                    pages_left: 1,
                    next: Some((word, None)),
                    ..Walk::default()
                };
                self.finish_accesses();
            }
        }
    }

    fn end(mut self) {
        // No thread touches a page any more: requests under way end.
        self.drive(|wide| wide.evictors.iter().all(Evictor::is_at_rest));
        self.close();
        self.drive(|wide| wide.fillers.iter().all(Filler::is_at_rest));
        assert!(self.evictors.iter().all(Evictor::is_at_rest));
        let shared = self.shared();
        let budget = shared.frames.budget();
        assert_eq!(
            (budget.used(), budget.leaving(), budget.pinned()),
            (0, 0, 0)
        );
        assert!(budget.peak() <= budget.bytes());
        drop(shared);
        self.sim.end_without_frames();
    }
}

impl Deref for Wide {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        &self.sim
    }
}

impl DerefMut for Wide {
    fn deref_mut(&mut self) -> &mut Sim {
        &mut self.sim
    }
}

fn walk_through(seed: u64, lossy: bool, fails: bool) {
    println!("seed {seed}");
    let mut wide = Wide::new(seed, lossy, fails);
    for _ in 0..12 {
        (0..1500).for_each(|_| wide.step());
        wide.disturb();
    }
    wide.check_everything();
    wide.end();
}

#[test]
fn programs_that_go_up_and_down_see_plain_arrays() {
    for seed in seeds(5000..5030) {
        walk_through(seed, false, false);
    }
}

#[test]
fn runs_survive_lost_operations() {
    for seed in seeds(6000..6010) {
        walk_through(seed, true, false);
    }
}

#[test]
fn runs_survive_a_store_that_fails_now_and_then() {
    for seed in seeds(7000..7020) {
        walk_through(seed, false, true);
    }
}
