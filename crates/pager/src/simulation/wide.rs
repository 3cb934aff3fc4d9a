//! Regions of many pages, runs and windows: [`Wide`].

use farpage_signals::SignalGuard;

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
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    inline_handlers: InlineHandlers,
    /// Regions. Not dropped by a simulation that fails: see `World`.
    regions: ManuallyDrop<Vec<MappedRegion<SimSpace>>>,
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
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: 2,
            seed,
            busy_probability: [0.0, 0.02][(next(&mut random) % 2) as usize],
            duplicate_probability: 0.1,
            copies_out: !seed.is_multiple_of(3),
            ..SimOptions::default()
        }));
        let mut config = SimConfig::new(seed);
        config.delay_steps = 1 + next(&mut random) % 40;
        config.lose_one_in = lossy.then_some(200);
        let session = SimServer::new(config)
            .session(&SessionOptions {
                deadline: Duration::from_secs(5),
                link: None,
                client: "simulation".into(),
                ..SessionOptions::default()
            })
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
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
        let PagerParts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let inline_handlers = InlineHandlers::new(&pager);
        pager
            .shared()
            .scatter
            .costs()
            .pretend(next(&mut random).is_multiple_of(2));
        let pager = Arc::new(pager);
        let mut flaky = None;
        let regions: Vec<_> = (sizes.into_iter().zip(1..))
            .map(|((page_bytes, pages), id)| {
                let bytes = (pages * page_bytes) as u64;
                let store = if fails && id == 1 {
                    let store = Arc::new(Flaky {
                        bytes: Mutex::new(vec![0; bytes as usize]),
                        random: Mutex::new(seed | 1),
                        fail_one_in: AtomicU64::new(100),
                    });
                    flaky = Some(store.clone());
                    let options = BlockingOptions::default();
                    PageStore::blocking(&cluster, "a region", bytes, page_bytes, store, &options)
                } else {
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
                    let codec = codecs[(next(&mut random) % 4) as usize];
                    let options = RemoteOptions {
                        codec,
                        ..RemoteOptions::default()
                    };
                    PageStore::remote(&cluster, "a region", bytes, page_bytes, &options)
                };
                pager
                    .map(
                        store.expect("the server has room"),
                        RegionOptions::default(),
                    )
                    .expect("the budget holds two pages")
            })
            .collect();
        Wide {
            random,
            space,
            fillers,
            evictors,
            inline_handlers,
            flaky,
            shadows: regions.iter().map(|_| HashMap::new()).collect(),
            regions: ManuallyDrop::new(regions),
            walks: Default::default(),
            pinned: Vec::new(),
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        (next(&mut self.random) % limit as u64) as usize
    }

    fn chance(&mut self, one_in: u64) -> bool {
        next(&mut self.random).is_multiple_of(one_in)
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
            4..6 => {
                let filler = self.below(self.fillers.len());
                self.fillers[filler].turn(EventScope::All);
            }
            _ => {
                let evictor = self.below(self.evictors.len());
                self.evictors[evictor].turn();
            }
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
        let region = self.below(self.regions.len());
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
        if self.inline_handlers.is_serving(thread) {
            self.inline_handlers.step(thread);
            return false;
        }
        if !self.space.is_present(address) && self.chance(2) {
            self.inline_handlers.begin(thread, &region, address);
            walk.next = Some((word, value));
            self.walks[thread] = walk;
            return false;
        }
        let shadow = &mut self.shadows[walk.region];
        let outcome = match value {
            Some(value) => (self.space.try_store(thread, address, value))
                .map(|()| _ = shadow.insert(word, value)),
            None => self.space.try_load(thread, address).map(|seen| {
                let expected = shadow.get(&word).copied().unwrap_or(0);
                assert_eq!(seen, expected, "word {word} of region {}", walk.region);
            }),
        };
        walk.next = match outcome {
            Ok(()) => None,
            Err(Faulted::Asleep) => Some((word, value)),
            Err(Faulted::Sigbus) if self.flaky.is_some() => {
                let pages = walk.page..walk.page + 1;
                self.regions[walk.region]
                    .pager()
                    .shared()
                    .doors
                    .tell_fillers(|| {
                        Command::Demand(region.clone(), pages_of(pages.clone()), Arc::default())
                    });
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

    fn turn(&mut self) {
        self.inline_handlers.turn();
        self.fillers
            .iter_mut()
            .for_each(|filler| _ = filler.turn(EventScope::All));
        self.evictors
            .iter_mut()
            .for_each(|evictor| _ = evictor.turn());
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
        let pinned = std::mem::take(&mut self.pinned);
        let job = Job::new(self.regions[region].region().clone(), pages_of(pages), keep);
        let shared = self.regions[region].pager().shared().clone();
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
            let at = self.below(self.pinned.len());
            let (region, pages) = self.pinned.swap_remove(at);
            let page_bytes = self.regions[region].page_bytes();
            self.regions[region].unpin(pages.start * page_bytes..pages.end * page_bytes);
            return;
        }
        let region = self.below(self.regions.len());
        let mut pages = self.some_pages(region);
        pages.end = pages.end.min(pages.start + 1 + self.below(12));
        let page_bytes = self.regions[region].page_bytes();
        let (regions, fillers, evictors) = (&self.regions, &mut self.fillers, &mut self.evictors);
        let inline_handlers = &mut self.inline_handlers;
        let pinned = std::thread::scope(|scope| {
            let bytes = pages.start * page_bytes..pages.end * page_bytes;
            let pinner = scope.spawn(move || regions[region].pin(bytes).is_ok());
            while !pinner.is_finished() {
                inline_handlers.turn();
                fillers
                    .iter_mut()
                    .for_each(|filler| _ = filler.turn(EventScope::All));
                evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
            }
            pinner.join().expect("pinning does not panic")
        });
        if pinned {
            self.pinned.push((region, pages));
        }
    }

    /// Gives pages whose bytes are all in the store back to the kernel, as the program may.
    fn drop_pages(&mut self) {
        let region = self.below(self.regions.len());
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
        let region = self.below(self.regions.len());
        let pages = self.some_pages(region);
        let page_bytes = self.regions[region].page_bytes();
        match self.below(8) {
            0 => self.flush(region),
            1 => {
                let (keep, busy) = (self.chance(2), self.chance(2));
                let _ = self.run_job(region, pages, keep, busy);
            }
            2 => {
                let of = self.regions[region].region().clone();
                self.regions[region]
                    .pager()
                    .shared()
                    .doors
                    .tell_fillers(|| Command::Prefetch(of.clone(), pages_of(pages.clone())));
            }
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
        let shared = self.regions[0].pager().shared().clone();
        let regions = std::mem::take(&mut *self.regions);
        let closed: Vec<_> = regions
            .iter()
            .map(|mapped| mapped.region().clone())
            .collect();
        close(regions, &mut self.fillers, &mut self.evictors);
        for region in closed {
            assert_eq!((region.resident(), region.overdue()), (0, 0));
        }
        self.drive(|wide| wide.fillers.iter().all(Filler::is_at_rest));
        assert!(self.evictors.iter().all(Evictor::is_at_rest));
        let budget = shared.frames.budget();
        assert_eq!(
            (budget.used(), budget.leaving(), budget.pinned()),
            (0, 0, 0)
        );
        assert!(budget.peak() <= budget.bytes());
        let Wide {
            fillers,
            evictors,
            inline_handlers,
            space,
            ..
        } = self;
        drop((fillers, evictors, inline_handlers, shared));
        assert_eq!(space.frame_pages() + space.resident_pages(), 0);
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
