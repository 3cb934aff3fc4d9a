//! Seeded simulations: the real workers over simulated memory and a simulated server, against a plain array.
//!
//! One thread plays everybody. A seed decides who takes the next step: a program thread that loads or stores a word, a filler or an evictor that takes a
//! turn. Half of the programs' threads mostly serve their faults themselves, step by step. Pages are reported held, faults twice; operations are delayed, reordered and lost. What a load returns is compared with
//! a plain array at once, and the budget is checked after each step.

mod lost;
mod room;

use std::{
    collections::HashMap,
    io,
    mem::ManuallyDrop,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    SessionOptions,
    sim::{SimConfig, SimServer},
};
use farpage_store::{
    BlockingOptions, Cluster, ClusterOptions, Codec, Element, PageStore, RegionId, RemoteOptions,
    Store, ZfpMode,
};
use farpage_vm::{AddressSpace, Faulted, SimOptions, SimSpace};
use parking_lot::{Condvar, Mutex};

use crate::{
    Advice, InThread, Mapped, PageError, Pager, PagerOptions, RegionOptions, ahead::Plan,
    doors::Command, evictor::Evictor, filler::Filler, job::Job, pager::Parts, region::Region,
};

const THREADS: usize = 4;
/// Of these, how many can serve their own faults, the first ones.
const GUESTS: usize = 2;
const PAGES: usize = 96;

/// Threads of the program that serve their own faults.
struct Guests {
    in_thread: Arc<InThread<SimSpace>>,
    /// What each of them is at.
    serving: [Option<(Arc<Region>, usize, Plan)>; GUESTS],
}

impl Guests {
    fn new(pager: &Pager<SimSpace>) -> Guests {
        Guests {
            in_thread: pager.in_thread().expect("there are some").clone(),
            serving: Default::default(),
        }
    }

    /// A thread begins to serve a fault, if it can.
    fn begin(&mut self, thread: usize, region: &Arc<Region>, address: usize) {
        if thread < GUESTS && !region.store.is_users_own() {
            let page = region.page_at(address);
            let mut guest = self.in_thread.guest(thread);
            let plan = guest.begin_serving(region, page, address);
            self.serving[thread] = plan.map(|plan| (region.clone(), page, plan));
        }
    }

    fn is_serving(&self, thread: usize) -> bool {
        thread < GUESTS && self.serving[thread].is_some()
    }

    /// Goes on with that. Returns whether nothing is left to do.
    fn step(&mut self, thread: usize) -> bool {
        let mut guest = self.in_thread.guest(thread);
        let done = guest.serve_a_step();
        if done && let Some((region, page, plan)) = self.serving[thread].take() {
            guest.end_serving(&region, page, plan);
        }
        done
    }

    fn turn(&mut self) {
        (0..GUESTS).for_each(|thread| _ = self.is_serving(thread) && self.step(thread));
    }
}

struct World {
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    guests: Guests,
    /// Dropped by [`World::end`] alone: while a failed simulation unwinds nobody drives the workers that a drop waits for.
    mapped: ManuallyDrop<Mapped<SimSpace>>,
    /// What the region holds.
    shadow: Vec<u64>,
    /// What each program thread is about to do: a word, and its new value if it is a store.
    intents: [Option<(usize, Option<u64>)>; THREADS],
    page_bytes: usize,
    budget_pages: usize,
}

impl World {
    fn new(seed: u64, lossy: bool) -> World {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let page_bytes = 4096 << (next(&mut random) % 2);
        let budget_pages = 2 + (next(&mut random) % 30) as usize;
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: 2,
            seed,
            held_probability: 0.02,
            duplicate_probability: 0.1,
            ..SimOptions::default()
        }));
        let mut config = SimConfig::new(seed);
        config.delay_steps = 1 + next(&mut random) % 20;
        config.reorder = true;
        config.lose_one_in = lossy.then_some(200);
        let options = SessionOptions {
            deadline: Duration::from_secs(5),
            link: None,
            client: "simulation".into(),
            ..SessionOptions::default()
        };
        let session = SimServer::new(config)
            .session(&options)
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());

        let mut options = PagerOptions::new((budget_pages * page_bytes) as u64);
        options.evictors = 2;
        options.in_thread = GUESTS;
        // Only where the marks are far apart are there enough victims at once for copying them to be worth it.
        let is_cheaper = next(&mut random).is_multiple_of(2);
        if is_cheaper {
            (options.low_water, options.high_water) = (0.5, 0.75);
        }
        let Parts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let bytes = (PAGES * page_bytes) as u64;
        let store = PageStore::remote(
            &cluster,
            RegionId(1),
            bytes,
            page_bytes,
            &RemoteOptions::default(),
        )
        .expect("the server has room");
        let guests = Guests::new(&pager);
        pager.shared().scatter.costs().pretend(is_cheaper);
        let mapped = Arc::new(pager).map(store, RegionOptions::default());
        let mapped = ManuallyDrop::new(mapped.expect("the budget holds two pages"));
        World {
            random,
            space,
            fillers,
            evictors,
            guests,
            shadow: vec![0; PAGES * page_bytes / 8],
            mapped,
            intents: [None; THREADS],
            page_bytes,
            budget_pages,
        }
    }

    fn chance(&mut self, one_in: u64) -> bool {
        next(&mut self.random).is_multiple_of(one_in)
    }

    fn below(&mut self, limit: usize) -> usize {
        (next(&mut self.random) % limit as u64) as usize
    }

    /// Somebody takes a step.
    fn step(&mut self) {
        match self.below(8) {
            0..4 => {
                let thread = self.below(THREADS);
                self.program(thread);
            }
            4..6 => {
                let filler = self.below(self.fillers.len());
                self.fillers[filler].turn();
            }
            _ => {
                let evictor = self.below(self.evictors.len());
                self.evictors[evictor].turn();
            }
        }
        let pages = self.space.resident_pages() + self.space.frame_pages();
        assert!(
            pages <= self.budget_pages,
            "{pages} pages in memory, {} allowed",
            self.budget_pages
        );
    }

    fn program(&mut self, thread: usize) {
        if self.space.is_asleep(thread) {
            return;
        }
        let (word, value) = match self.intents[thread] {
            Some(intent) => intent,
            None => {
                // Some locality, so that pages are both wanted again soon and left alone.
                let page = if self.chance(2) {
                    self.below(PAGES)
                } else {
                    self.below(8)
                };
                let words = self.page_bytes / 8;
                let value = next(&mut self.random);
                (
                    page * words + self.below(words),
                    self.chance(2).then_some(value),
                )
            }
        };
        let address = self.mapped.address() + word * 8;
        if self.guests.is_serving(thread) {
            self.guests.step(thread);
            return;
        }
        if !self.space.is_present(address) && self.chance(2) {
            let region = self.mapped.region().clone();
            self.guests.begin(thread, &region, address);
            self.intents[thread] = Some((word, value));
            return;
        }
        let outcome = match value {
            Some(value) => self
                .space
                .try_store(thread, address, value)
                .map(|()| self.shadow[word] = value),
            None => self
                .space
                .try_load(thread, address)
                .map(|seen| assert_eq!(seen, self.shadow[word], "word {word}")),
        };
        self.intents[thread] = match outcome {
            Ok(()) => None,
            Err(Faulted::Asleep) => Some((word, value)),
            Err(other) => panic!("thread {thread} at word {word}: {other}"),
        };
    }

    /// Workers take turns until `done`.
    fn drive(&mut self, mut done: impl FnMut(&mut World) -> bool) {
        for _ in 0..2_000_000 {
            if done(self) {
                return;
            }
            self.guests.turn();
            self.fillers.iter_mut().for_each(|filler| _ = filler.turn());
            self.evictors
                .iter_mut()
                .for_each(|evictor| _ = evictor.turn());
        }
        panic!("the workers never get there");
    }

    fn finish_intents(&mut self) {
        self.drive(|world| {
            (0..THREADS).for_each(|thread| {
                if world.intents[thread].is_some() {
                    world.program(thread)
                }
            });
            world.intents.iter().all(Option::is_none)
        });
    }

    fn run_job(&mut self, pages: Range<usize>, keep: bool) {
        let job = Job::new(self.mapped.region().clone(), pages, keep);
        self.mapped.pager().shared().jobs.add(job.clone());
        self.drive(|_| job.has_ended());
        job.wait().expect("the store takes every page");
    }

    fn check_everything(&mut self) {
        for word in (0..self.shadow.len()).step_by(61) {
            self.intents[0] = Some((word, None));
            self.finish_intents();
        }
    }

    fn end(self) {
        let World {
            mapped,
            mut fillers,
            mut evictors,
            guests,
            space,
            ..
        } = self;
        let shared = mapped.pager().shared().clone();
        let region = mapped.region().clone();
        close(
            vec![ManuallyDrop::into_inner(mapped)],
            &mut fillers,
            &mut evictors,
        );
        assert!(
            region.counts_nothing(),
            "a chunk counts pages that are not there"
        );
        drop((fillers, evictors, guests, shared, region));
        assert_eq!(
            space.frame_pages() + space.resident_pages(),
            0,
            "frames are left behind"
        );
    }
}

/// Drops regions on a thread of its own, since that waits for the workers that are driven here.
fn close(
    regions: Vec<Mapped<SimSpace>>,
    fillers: &mut [Filler<SimSpace>],
    evictors: &mut [Evictor<SimSpace>],
) {
    let ender = std::thread::spawn(move || drop(regions));
    while !ender.is_finished() {
        fillers.iter_mut().for_each(|filler| _ = filler.turn());
        evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
    }
    ender.join().expect("dropping a region does not panic");
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}

/// Seeds of one run; `FARPAGE_SIM_SEEDS=from..to` replaces them.
fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("FARPAGE_SIM_SEEDS") else {
        return default;
    };
    let (from, to) = text
        .split_once("..")
        .expect("FARPAGE_SIM_SEEDS is from..to");
    from.parse().expect("a number")..to.parse().expect("a number")
}

#[test]
fn many_threads_see_a_plain_array() {
    let mut scattered = 0;
    for seed in seeds(0..60) {
        println!("seed {seed}");
        let mut world = World::new(seed, false);
        for step in 0..20_000 {
            if step == 10_000 {
                let advice = [Advice::Sequential, Advice::Random, Advice::Normal][world.below(3)];
                world
                    .mapped
                    .advise(0..0, advice)
                    .expect("advice of this kind does not fail");
            }
            world.step();
        }
        world.finish_intents();
        world.check_everything();
        scattered += world.space.scattered_pages();
        world.end();
    }
    let is_default = std::env::var_os("FARPAGE_SIM_SEEDS").is_none();
    assert!(scattered > 0 || !is_default, "no page was ever copied out");
}

#[test]
fn flushes_and_evictions_on_demand_disturb_nobody() {
    for seed in seeds(1000..1030) {
        println!("seed {seed}");
        let mut world = World::new(seed, false);
        for _ in 0..10 {
            (0..1000).for_each(|_| world.step());
            let first = world.below(PAGES);
            let keep = world.chance(2);
            world.run_job(first..PAGES, keep);
            let region = world.mapped.region().clone();
            world
                .mapped
                .pager()
                .shared()
                .doors
                .tell_fillers(|| Command::Prefetch(region.clone(), first..PAGES));
        }
        world.finish_intents();
        world.check_everything();
        world.end();
    }
}

#[test]
fn lost_operations_are_repeated() {
    for seed in seeds(2000..2008) {
        println!("seed {seed}");
        let mut world = World::new(seed, true);
        (0..5_000).for_each(|_| world.step());
        world.finish_intents();
        world.check_everything();
        world.end();
    }
}

#[test]
fn pages_that_the_program_drops_are_what_was_written_back_last() {
    for seed in seeds(3000..3030) {
        println!("seed {seed}");
        let mut world = World::new(seed, false);
        for _ in 0..20 {
            (0..300).for_each(|_| world.step());
            world.finish_intents();
            // Everything is written back, so dropping a page takes nothing away.
            world.run_job(0..PAGES, true);
            for _ in 0..PAGES / 4 {
                let page = world.below(PAGES);
                world
                    .space
                    .drop_page(world.mapped.address() + page * world.page_bytes);
            }
        }
        world.finish_intents();
        world.check_everything();
        world.end();
    }
}

/// Two regions, each on a shard of its own, under one budget; one thread, whose instructions touch two neighbouring pages at once.
struct Tight {
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    /// Not dropped by a simulation that fails: see [`World::mapped`].
    regions: ManuallyDrop<Vec<Mapped<SimSpace>>>,
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
        let Parts {
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
        let regions = (page_bytes.iter().zip(1..))
            .map(|(&page_bytes, id)| {
                let bytes = (pages * page_bytes) as u64;
                let options = RemoteOptions::default();
                let store = PageStore::remote(&cluster, RegionId(id), bytes, page_bytes, &options)
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

    /// Touches a word until that is done.
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
            self.fillers.iter_mut().for_each(|filler| _ = filler.turn());
            self.evictors
                .iter_mut()
                .for_each(|evictor| _ = evictor.turn());
        }
    }

    /// One instruction that touches a page's last word and the next page's first, until both are there at once.
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
            self.fillers.iter_mut().for_each(|filler| _ = filler.turn());
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

/// Words of a page that programs use, so that what a region holds is known by a few of its words.
const WORDS_USED: usize = 3;

/// A store that fails now and then.
struct Flaky {
    bytes: Mutex<Vec<u8>>,
    random: Mutex<u64>,
    /// One call in so many fails; 0: none.
    fail_one_in: AtomicU64,
}

impl Flaky {
    fn call(&self) -> io::Result<()> {
        match self.fail_one_in.load(Ordering::Relaxed) {
            n if n > 0 && next(&mut self.random.lock()).is_multiple_of(n) => {
                Err(io::Error::other("the store fails now and then"))
            }
            _ => Ok(()),
        }
    }
}

impl Store for Flaky {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.call()?;
        buf.copy_from_slice(&self.bytes.lock()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.call()?;
        self.bytes.lock()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn may_block(&self) -> bool {
        false
    }
}

/// What a program thread is at.
#[derive(Clone, Copy, Default)]
struct Walk {
    region: usize,
    page: usize,
    down: bool,
    pages_left: usize,
    stores: bool,
    /// The access that it is about to make: a word of the page and, if it is a store, its new value.
    next: Option<(usize, Option<u64>)>,
}

/// Regions of several stripes and two page sizes, and programs that go through them page by page, so that runs and windows of many pages happen.
struct Wide {
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    guests: Guests,
    /// Not dropped by a simulation that fails: see [`World::mapped`].
    regions: ManuallyDrop<Vec<Mapped<SimSpace>>>,
    flaky: Option<Arc<Flaky>>,
    /// What the words of each region hold that are not 0.
    shadows: Vec<HashMap<usize, u64>>,
    walks: [Walk; THREADS],
    /// Pages that are pinned, by their region.
    pinned: Vec<(usize, Range<usize>)>,
}

impl Wide {
    fn new(seed: u64, lossy: bool, fails: bool) -> Wide {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: 2,
            seed,
            held_probability: [0.0, 0.02][(next(&mut random) % 2) as usize],
            duplicate_probability: 0.1,
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
        // A stripe is 16 MiB: the first region has a little more than one, the second a little more than two.
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
        options.in_thread = GUESTS;
        // Where a budget of few pages leaves none for read-ahead, there is one with room.
        if next(&mut random).is_multiple_of(2) {
            (options.low_water, options.high_water) = (0.5, 0.75);
        }
        let Parts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let guests = Guests::new(&pager);
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
                    PageStore::blocking(&cluster, RegionId(id), bytes, page_bytes, store, &options)
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
                    PageStore::remote(&cluster, RegionId(id), bytes, page_bytes, &options)
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
            guests,
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
        self.regions[region].region().address_of(page)
    }

    /// A page near one that matters: the first, the last, the first behind a stripe, or any of a small part.
    fn some_page(&mut self, region: usize) -> usize {
        let pages = self.pages(region);
        let stripe = self.regions[region].region().layout.stripe_bytes;
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
                // Some are fast.
                for _ in 0..1 + self.below(4) {
                    self.program(thread);
                }
            }
            4..6 => {
                let filler = self.below(self.fillers.len());
                self.fillers[filler].turn();
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

    /// A step of a program thread. Whether it got on.
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
        if self.guests.is_serving(thread) {
            self.guests.step(thread);
            return false;
        }
        if !self.space.is_present(address) && self.chance(2) {
            self.guests.begin(thread, &region, address);
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
                        Command::Demand(region.clone(), pages.clone(), Arc::default())
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

    /// Workers take turns until `done`.
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
        self.guests.turn();
        self.fillers.iter_mut().for_each(|filler| _ = filler.turn());
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

    /// A job by the evictors, while the programs go on if they are `busy`.
    fn run_job(
        &mut self,
        region: usize,
        pages: Range<usize>,
        keep: bool,
        busy: bool,
    ) -> Result<(), PageError> {
        // What is written back is away for a moment, pinned or not.
        let pinned = std::mem::take(&mut self.pinned);
        let job = Job::new(self.regions[region].region().clone(), pages, keep);
        let shared = self.regions[region].pager().shared().clone();
        shared.jobs.add(job.clone());
        self.drive(|wide| {
            if busy && !job.has_ended() {
                wide.step();
            }
            job.has_ended()
        });
        self.pinned = pinned;
        let outcome = job.wait();
        let may_fail = self.flaky.is_some() && region == 0;
        assert!(outcome.is_ok() || may_fail, "{outcome:?}");
        outcome
    }

    /// Everything of a region is in its store.
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
        let guests = &mut self.guests;
        let pinned = std::thread::scope(|scope| {
            let bytes = pages.start * page_bytes..pages.end * page_bytes;
            let pinner = scope.spawn(move || regions[region].pin(bytes).is_ok());
            while !pinner.is_finished() {
                guests.turn();
                fillers.iter_mut().for_each(|filler| _ = filler.turn());
                evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
            }
            pinner.join().expect("pinning does not panic")
        });
        if pinned {
            self.pinned.push((region, pages));
        }
    }

    /// The program gives pages back to the kernel whose bytes are all in the store.
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
                    .tell_fillers(|| Command::Prefetch(of.clone(), pages.clone()));
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

    /// Every word that was ever written is as it was written last.
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
        // Nobody touches anything any more: what is under way ends.
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
            guests,
            space,
            ..
        } = self;
        drop((fillers, evictors, guests, shared));
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

/// A store whose writes do not return before they may.
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
            self.gone_on.wait(&mut goes_on);
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
        RegionId(9),
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
    // Every other page of it changes, so that a run is many calls.
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
