//! Seeded simulations: the real workers over simulated memory and a simulated server, against a plain array.
//!
//! One thread plays everybody. A seed decides who takes the next step: a program thread that loads or stores a word, a filler or an evictor that takes a
//! turn. Pages are reported held, faults twice; operations are delayed, reordered and lost. What a load returns is compared with
//! a plain array at once, and the budget is checked after each step.

use std::{mem::ManuallyDrop, ops::Range, sync::Arc, time::Duration};

use farpage_fabric::{
    SessionOptions,
    sim::{SimConfig, SimServer},
};
use farpage_store::{Cluster, ClusterOptions, PageStore, RegionId, RemoteOptions};
use farpage_vm::{Faulted, SimOptions, SimSpace};

use crate::{
    Advice, Pager, PagerOptions, RegionOptions,
    core::Command,
    evictor::Evictor,
    filler::Filler,
    job::Job,
    pager::{Mapped, Parts},
};

const THREADS: usize = 4;
const PAGES: usize = 96;

struct World {
    random: u64,
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
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
        }));
        let mut config = SimConfig::new(seed);
        config.delay_steps = 1 + next(&mut random) % 20;
        config.reorder = true;
        config.lose_one_in = lossy.then_some(200);
        let options = SessionOptions {
            deadline: Duration::from_secs(5),
            link: None,
            client: "simulation".into(),
        };
        let session = SimServer::new(config)
            .session(&options)
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());

        let mut options = PagerOptions::new((budget_pages * page_bytes) as u64);
        options.evictors = 2;
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
        let mapped = Arc::new(pager).map(store, RegionOptions::for_pages_of(page_bytes));
        let mapped = ManuallyDrop::new(mapped.expect("the budget holds two pages"));
        World {
            random,
            space,
            fillers,
            evictors,
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
        self.mapped
            .pager()
            .core()
            .jobs
            .lock()
            .push_back(job.clone());
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
            space,
            ..
        } = self;
        let core = mapped.pager().core().clone();
        close(
            vec![ManuallyDrop::into_inner(mapped)],
            &mut fillers,
            &mut evictors,
        );
        drop((fillers, evictors, core));
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
        world.end();
    }
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
                .core()
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
    fn new(seed: u64, page_bytes: [usize; 2], budget_bytes: usize) -> Tight {
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
        let regions = (page_bytes.into_iter().zip(1..))
            .map(|(page_bytes, id)| {
                let bytes = (PAGES * page_bytes) as u64;
                let options = RemoteOptions::default();
                let store = PageStore::remote(&cluster, RegionId(id), bytes, page_bytes, &options)
                    .expect("the server has room");
                pager
                    .map(store, RegionOptions::for_pages_of(page_bytes))
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
            let mut tight = Tight::new(seed, [4096, 4096], budget_pages * 4096);
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
