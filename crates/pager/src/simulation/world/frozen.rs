//! Forks at any moment, between evictions, fills, flushes, discards and contents that move:
//! [`Forking`].

use std::collections::VecDeque;

use super::*;

/// Number of forks of one program.
const FORKS: usize = 40;
/// Distance of the words of a page that are compared. No divisor of a page's words.
const STRIDE: usize = 13;

/// Change of pages that no thread uses meanwhile.
enum Change {
    /// Pages that become zeros.
    Discard(Range<usize>),
    /// Pages whose contents get the page numbers from the second one on.
    Relocate(Range<usize>, usize),
}

/// World whose program forks.
struct Forking {
    world: World,
    jobs: Vec<Arc<Job>>,
    changes: VecDeque<Change>,
    /// Number of forks so far that met each of: a page on its way out, a handed over run, a job, a
    /// change that is half done.
    met: [usize; 4],
}

impl Forking {
    fn new(seed: u64) -> Forking {
        Forking {
            world: World::new(seed, false),
            jobs: Vec::new(),
            changes: VecDeque::new(),
            met: [0; 4],
        }
    }

    fn shared(&self) -> &SharedParts<SimSpace> {
        self.world.pager.shared()
    }

    /// Takes a step of one part, or begins something.
    fn step(&mut self) {
        self.world.step();
        let page = self.world.below(PAGES);
        match self.world.below(200) {
            0 if self.jobs.len() < 2 => {
                let (region, keep) = (self.world.region(), self.world.chance(2));
                let job = Job::new(region, pages_of(page..PAGES), keep);
                self.shared().jobs.add(job.clone());
                self.jobs.push(job);
            }
            1 => {
                self.world.prefetch(0, page..PAGES);
            }
            2..5 => self.drop_page(page),
            5 if self.changes.is_empty() => self.begin_change(),
            _ => {}
        }
        if self.world.chance(4) {
            self.go_on();
        }
        self.jobs.retain(|job| {
            let ended = job.has_ended();
            if ended {
                (job.wait(&SignalGuard::new())).expect("the store takes every page");
            }
            !ended
        });
    }

    /// Gives a page back to the kernel as the program may, if the store has its bytes.
    fn drop_page(&mut self, page: usize) {
        let region = self.world.mapped().region();
        if region.words.load(PageIndex(page)).state() == PageState::Resident && self.is_stored(page)
        {
            self.world
                .space
                .drop_page(region.address_of(PageIndex(page)));
        }
    }

    fn words(&self, page: usize) -> &[u64] {
        let words = self.world.page_bytes / 8;
        &self.world.shadow[page * words..][..words]
    }

    /// True if the store has the newest bytes of a page.
    fn is_stored(&self, page: usize) -> bool {
        let bytes = bytemuck::cast_slice(self.words(page));
        let store = &self.world.mapped().region().store;
        store.is_unchanged(PageIndex(page), bytes)
    }

    /// Picks pages that no thread is about to use, and begins to change them.
    fn begin_change(&mut self) {
        let count = 1 + self.world.below(PAGES / 4);
        let from = self.world.below(PAGES - 2 * count + 1);
        let to = from + count + self.world.below(PAGES - from - 2 * count + 1);
        let unused = [from..from + count, to..to + count];
        let words = self.world.page_bytes / 8;
        let mut used = self.world.intents.iter().flatten();
        if used.any(|(word, _)| unused.iter().any(|pages| pages.contains(&(word / words)))) {
            return;
        }
        self.changes.push_back(Change::Discard(to..to + count));
        if self.world.chance(2) {
            (self.changes).push_back(Change::Relocate(from..from + count, to));
        }
        self.world.unused = unused.into();
    }

    /// Takes a step of the change under way.
    fn go_on(&mut self) {
        let Some(change) = self.changes.front_mut() else {
            return;
        };
        let world = &mut self.world;
        let words = world.page_bytes / 8;
        let of = |pages: Range<usize>| pages.start * words..pages.end * words;
        let (first, done, rest) = match change {
            Change::Discard(pages) => {
                let zeros = world.mapped().try_discard(pages_of(pages.clone()));
                let done = world.dealt_with(PageIndex(pages.start), zeros);
                let first = pages.start;
                world.shadow[of(first..first + done)].fill(0);
                pages.start += done;
                ([first, first], done, pages.len())
            }
            Change::Relocate(from, to) => {
                let moved = (world.mapped()).try_relocate(pages_of(from.clone()), PageIndex(*to));
                let done = world.dealt_with(PageIndex(from.start), moved);
                let first = [from.start, *to];
                let old = of(first[0]..first[0] + done);
                world.shadow.copy_within(old.clone(), first[1] * words);
                world.shadow[old].fill(0);
                from.start += done;
                *to += done;
                (first, done, from.len())
            }
        };
        if done == 0 && world.chance(16) {
            // Pages that are read ahead and held back stay so until a thread asks for them.
            for page in first {
                world.mapped().ask_for(PageIndex(page));
            }
        }
        if rest == 0 {
            self.changes.pop_front();
        }
        if self.changes.is_empty() {
            self.world.unused.clear();
        }
    }

    /// Takes steps until nothing is inside the gate.
    fn wait(&mut self) {
        for _ in 0..1_000_000 {
            if self.shared().gate.inside() == 0 {
                return;
            }
            if self.shared().hand_over.len() > 0 {
                self.shared().hand_over.call();
            }
            self.step();
        }
        panic!("{} runs never leave the gate", self.shared().gate.inside());
    }

    /// Forks once. Returns what a child made then would not have.
    fn fork(&mut self, waits: bool) -> Option<String> {
        let region = self.world.mapped().region();
        let is_leaving = |page| region.words.load(PageIndex(page)).state() == PageState::Leaving;
        let met = [
            (0..PAGES).any(is_leaving),
            self.shared().hand_over.len() > 0,
            !self.jobs.is_empty(),
            !self.changes.is_empty(),
        ];
        (self.met.iter_mut().zip(met)).for_each(|(all, met)| *all += usize::from(met));
        self.shared().gate.close();
        if waits {
            self.wait();
        }
        self.shared().gate.seal();
        if waits {
            self.wait();
        }
        let mut missing = self.missing();
        for _ in 0..self.world.below(4) {
            (0..self.world.below(60)).for_each(|_| self.step());
            missing = missing.or_else(|| self.missing());
        }
        self.shared().gate.open(true);
        missing
    }

    /// Returns the first page that a child made now would not have as it is, and why.
    fn missing(&self) -> Option<String> {
        let (region, space) = (self.world.mapped().region(), &self.world.space);
        (0..PAGES).find_map(|page| {
            let state = region.words.load(PageIndex(page)).state();
            let address = region.address_of(PageIndex(page));
            let is_there = space.is_present(address);
            let words = self.words(page).iter().enumerate().step_by(STRIDE);
            let is_whole = if is_there {
                let mut same =
                    words.map(|(at, &word)| space.try_load(THREADS, address + 8 * at) == Ok(word));
                same.all(|same| same)
            } else {
                self.is_stored(page)
            };
            let is_right = is_whole && state != PageState::Leaving;
            (!is_right)
                .then(|| format!("page {page}: {state:?}, mapped: {is_there}, whole: {is_whole}"))
        })
    }

    fn end(mut self) {
        for _ in 0..1_000_000 {
            if self.jobs.is_empty() && self.changes.is_empty() {
                break;
            }
            self.step();
        }
        assert!(self.changes.is_empty(), "a change never ends");
        let jobs = mem::take(&mut self.jobs);
        self.world.drive(|_| jobs.iter().all(|job| job.has_ended()));
        self.world.finish_intents();
        self.world.drive(|world| world.shared().gate.inside() == 0);
        self.world.end();
    }
}

#[test]
fn children_have_every_page_whenever_the_program_forks() {
    let mut met = [0; 4];
    for seed in seeds(8000..8024) {
        println!("seed {seed}");
        let mut forking = Forking::new(seed);
        for _ in 0..FORKS {
            (0..forking.world.below(300)).for_each(|_| forking.step());
            if let Some(missing) = forking.fork(true) {
                panic!("{missing}");
            }
        }
        (met.iter_mut().zip(forking.met)).for_each(|(all, met)| *all += met);
        forking.end();
    }
    println!("pages leaving, handed over, jobs, changes: {met:?}");
    let is_default = std::env::var_os("FARPAGE_SIM_SEEDS").is_none();
    assert!(!is_default || met.iter().all(|&met| met > 20), "{met:?}");
}

#[test]
fn twin_that_does_not_wait_makes_children_that_lack_pages() {
    for seed in seeds(8000..8006) {
        let mut forking = Forking::new(seed);
        let missing = (0..FORKS).find_map(|_| {
            (0..forking.world.below(300)).for_each(|_| forking.step());
            forking.fork(false)
        });
        println!("seed {seed}: {missing:?}");
        assert!(missing.is_some(), "no page was on its way in {FORKS} forks");
        forking.end();
    }
}
