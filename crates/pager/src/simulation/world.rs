//! One region of few pages and all that may happen to it: [`World`].

mod frozen;
mod ordinary;

use super::*;

struct World {
    sim: Sim,
    /// Values of the region's words.
    shadow: Vec<u64>,
    /// Next access of each program thread: a word, and its new value if it is a store.
    intents: [Option<(usize, Option<u64>)>; THREADS],
    /// Pages that no thread uses.
    unused: Vec<Range<usize>>,
    page_bytes: usize,
    budget_pages: usize,
}

impl World {
    fn new(seed: u64, lossy: bool) -> World {
        World::with(seed, lossy, RegionOptions::default())
    }

    fn with(seed: u64, lossy: bool, region: RegionOptions) -> World {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let page_bytes = 4096 << (next(&mut random) % 2);
        let budget_pages = 2 + (next(&mut random) % 62) as usize;
        let space = SimOptions {
            shards: 2,
            seed,
            busy_probability: 0.02,
            duplicate_probability: 0.1,
            copies_out: !seed.is_multiple_of(3),
            ..SimOptions::default()
        };
        let mut config = SimConfig::new(seed);
        config.delay_steps = 1 + next(&mut random) % 20;
        config.reorder = true;
        config.lose_one_in = lossy.then_some(200);
        let mut options = PagerOptions::new((budget_pages * page_bytes) as u64);
        options.evictors = 2;
        options.in_thread = INLINE_HANDLERS;
        // Only where the marks are far apart are there enough victims at once for copying them to
        // be worth it.
        let is_cheaper = next(&mut random).is_multiple_of(2);
        if is_cheaper {
            (options.low_water, options.high_water) = (0.5, 0.75);
        }
        let mut sim = Sim::new(random, space, config, &options);
        sim.shared().scatter.costs().pretend(is_cheaper);
        sim.map(PAGES, page_bytes, Codec::Raw, region);
        World {
            sim,
            shadow: vec![0; PAGES * page_bytes / 8],
            intents: [None; THREADS],
            unused: Vec::new(),
            page_bytes,
            budget_pages,
        }
    }

    /// Takes a step of one part.
    fn step(&mut self) {
        match self.below(8) {
            0..4 => {
                let thread = self.below(THREADS);
                self.program(thread);
            }
            other => self.turn_of_one(other - 4),
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
                if self.unused.iter().any(|pages| pages.contains(&page)) {
                    return;
                }
                let words = self.page_bytes / 8;
                let value = next(&mut self.random);
                (
                    page * words + self.below(words),
                    self.chance(2).then_some(value),
                )
            }
        };
        let (region, address) = (self.region(), self.mapped().address() + word * 8);
        self.intents[thread] = match self.try_access(thread, &region, address, value) {
            Ok(seen) if value.is_some() => {
                self.shadow[word] = seen;
                None
            }
            Ok(seen) => {
                assert_eq!(seen, self.shadow[word], "word {word}");
                None
            }
            Err(Faulted::Asleep) => Some((word, value)),
            Err(other) => panic!("thread {thread} at word {word}: {other}"),
        };
    }

    /// Takes turns of the workers until `done`.
    fn drive(&mut self, mut done: impl FnMut(&mut World) -> bool) {
        for _ in 0..2_000_000 {
            if done(self) {
                return;
            }
            self.turn();
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
        let written = self.run(0, pages_of(pages), keep);
        written.expect("the store takes every page");
    }

    /// Gives the contents of `count` pages from `from` on the page numbers from `to` on, while
    /// everything else goes on.
    fn relocate(&mut self, from: usize, to: usize, count: usize) {
        self.finish_intents();
        self.unused = vec![from..from + count, to..to + count];
        self.step_by_step(to..to + count, [to, to], |world, pages| {
            world.mapped().try_discard(pages)
        });
        self.step_by_step(from..from + count, [from, to], |world, pages| {
            let new = PageIndex(to + (pages.start.0 - from));
            world.mapped().try_relocate(pages, new)
        });
        let words = |page: usize| page * self.page_bytes / 8..(page + count) * self.page_bytes / 8;
        self.shadow.copy_within(words(from), words(to).start);
        self.shadow[words(from)].fill(0);
        self.unused.clear();
    }

    /// Cedes pages, while everything else goes on: with their bytes, which threads use meanwhile,
    /// or without.
    fn cede(&mut self, pages: Range<usize>, with_bytes: bool) {
        let firsts = [pages.start; 2];
        if with_bytes {
            return self.step_by_step(pages, firsts, |world, pages| {
                world.mapped().try_cede_with_bytes(pages.start)
            });
        }
        self.finish_intents();
        self.unused = vec![pages.clone()];
        self.step_by_step(pages.clone(), firsts, |world, pages| {
            let ceded = world.mapped().try_cede(pages)?;
            if !matches!(ceded, Attempt::Done(_)) {
                world.mapped().try_discard(pages)?;
            }
            Ok(ceded)
        });
        self.forget(pages);
    }

    /// Takes ceded pages back, while everything else goes on.
    fn regain(&mut self, pages: Range<usize>) {
        self.finish_intents();
        self.unused = vec![pages.clone()];
        let (shared, region) = (self.mapped().pager().shared(), self.mapped().region());
        (shared.mapper.regain(region, pages_of(pages.clone()))).expect("the space takes them back");
        self.step_by_step(pages.clone(), [pages.start; 2], |world, pages| {
            let is_settled = world.mapped().settle_regained(pages.start);
            Ok(Attempt::Done(usize::from(is_settled)))
        });
        self.forget(pages);
    }

    /// Expects zeros in pages that no thread uses, and lets threads use them again.
    fn forget(&mut self, pages: Range<usize>) {
        let words = self.page_bytes / 8;
        self.shadow[pages.start * words..pages.end * words].fill(0);
        self.unused.clear();
    }

    /// Acts on `pages`, while everything else goes on.
    /// `firsts`: the first pages of the ranges that it uses.
    fn step_by_step(
        &mut self,
        pages: Range<usize>,
        firsts: [usize; 2],
        act: impl Fn(&World, PageRange) -> Result<Attempt, PageError>,
    ) {
        let region = self.region();
        let mut rest = pages_of(pages.clone());
        self.drive(|world| {
            world.step();
            if world.chance(8) {
                world.prefetch(0, pages.clone());
            }
            let done = world.dealt_with(rest.start, act(world, rest));
            // Pages that are read ahead and held back stay so until a thread asks for them.
            let done_before = rest.start.0 - pages.start;
            for page in firsts.map(|first| PageIndex(first + done_before)) {
                if done == 0
                    && region.words.load(page).state() == PageState::Filling
                    && world.chance(16)
                {
                    world.mapped().demand(page.alone());
                }
            }
            rest.start += done;
            rest.is_empty()
        });
    }

    fn check_everything(&mut self) {
        for word in (0..self.shadow.len()).step_by(61) {
            self.intents[0] = Some((word, None));
            self.finish_intents();
        }
    }

    /// Checks everything, and drops the region.
    fn end(mut self) {
        self.finish_intents();
        self.check_everything();
        self.sim.end_without_frames();
    }
}

/// Runs a simulation for each seed.
fn each_seed(default: Range<u64>, lossy: bool, mut act: impl FnMut(&mut World)) {
    for seed in seeds(default) {
        println!("seed {seed}");
        let mut world = World::new(seed, lossy);
        act(&mut world);
        world.end();
    }
}

impl Deref for World {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        &self.sim
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Sim {
        &mut self.sim
    }
}

#[test]
fn many_threads_see_a_plain_array() {
    let (mut scattered, mut copied_beside_moves) = (0, 0);
    each_seed(0..60, false, |world| {
        for step in 0..20_000 {
            if step == 10_000 {
                let advice = [Advice::Sequential, Advice::Random, Advice::Normal][world.below(3)];
                world
                    .mapped()
                    .advise(0..0, advice)
                    .expect("advice of this kind does not fail");
            }
            world.step();
        }
        scattered += world.space.scattered_pages();
        if !world.mapped().region().copies_out {
            copied_beside_moves += world.space.copied_in();
        }
    });
    let is_default = std::env::var_os("FARPAGE_SIM_SEEDS").is_none();
    assert!(scattered > 0 || !is_default, "no page was ever copied out");
    assert!(
        copied_beside_moves > 0 || !is_default,
        "no page was ever copied in where pages leave by moving"
    );
}

#[test]
fn flushes_and_evictions_on_demand_disturb_nobody() {
    each_seed(1000..1030, false, |world| {
        for _ in 0..10 {
            (0..1000).for_each(|_| world.step());
            let first = world.below(PAGES);
            let keep = world.chance(2);
            world.run_job(first..PAGES, keep);
            world.prefetch(0, first..PAGES);
        }
    });
}

#[test]
fn lost_operations_are_repeated() {
    each_seed(2000..2008, true, |world| {
        (0..5_000).for_each(|_| world.step());
    });
}

#[test]
fn pages_that_the_program_drops_are_what_was_written_back_last() {
    each_seed(3000..3030, false, |world| {
        for _ in 0..20 {
            (0..300).for_each(|_| world.step());
            world.finish_intents();
            // Everything is written back, so dropping a page takes nothing away.
            world.run_job(0..PAGES, true);
            for _ in 0..PAGES / 4 {
                let page = world.below(PAGES);
                world
                    .space
                    .drop_page(world.mapped().address() + page * world.page_bytes);
            }
        }
    });
}

#[test]
fn contents_that_change_their_places_are_whole_under_pressure() {
    each_seed(4000..4060, false, |world| {
        for _ in 0..15 {
            (0..300).for_each(|_| world.step());
            let count = 1 + world.below(PAGES / 2);
            let from = world.below(PAGES - 2 * count + 1);
            let to = from + count + world.below(PAGES - from - 2 * count + 1);
            let (from, to) = if world.chance(2) {
                (from, to)
            } else {
                (to, from)
            };
            world.relocate(from, to, count);
        }
    });
}

#[test]
fn ceded_pages_are_the_programs_own_until_they_are_regained() {
    each_seed(5000..5060, false, |world| {
        for _ in 0..10 {
            (0..300).for_each(|_| world.step());
            let first = world.below(PAGES);
            let pages = first..first + 1 + world.below(PAGES - first);
            let with_bytes = world.chance(2);
            world.cede(pages.clone(), with_bytes);
            // Evictors find nothing there, whatever they do meanwhile.
            (0..500).for_each(|_| world.step());
            for page in pages.clone() {
                let word = world.mapped().region().words.load(PageIndex(page));
                let is_left_alone = match word.state() {
                    PageState::Poisoned => true,
                    // A worker has read a fault late, and owns the page until it sees that.
                    PageState::Filling => !world.fillers.iter().all(Filler::is_at_rest),
                    _ => false,
                };
                assert!(is_left_alone, "page {page} is {:?}", word.state());
            }
            world.regain(pages);
        }
    });
}

#[test]
fn pages_that_cannot_be_ceded_keep_their_bytes() {
    each_seed(6000..6010, false, |world| {
        (0..3000).for_each(|_| world.step());
        world.finish_intents();
        world.space.refuse_to_cede(true);
        let mut refused = 0;
        for page in (0..PAGES).map(PageIndex) {
            match world.mapped().try_cede_with_bytes(page) {
                Err(_) => refused += 1,
                Ok(Attempt::Done(_)) => panic!("page {page} is ceded"),
                Ok(Attempt::Absent | Attempt::NotNow(_)) => {}
            }
        }
        assert!(refused > 0, "no page was there to be ceded");
        world.check_everything();
    });
}
