//! The threads of the fillers: [`Team`].
//!
//! Each filler owns a shard for good, but no thread of its own. The load says how many threads are
//! awake, and they share the fillers between them. One alone serves all shards, which saves
//! wake-ups and leaves the cores to the program; the others sleep.
//!
//! **The model.** One more thread helps only if those awake are limited by their own speed and
//! there is a core for it. Both show in one figure, the share of the time in which a thread runs.
//! Near all of it: the thread is always at work and nobody takes its core away. Waiting for a link,
//! or for a core that others use, shows as less, and then one more thread would only wait as well.
//! When what all of them use would fit well into one thread fewer, the last goes to sleep.
//!
//! The rule: whoever drives a filler holds its lock, takes its fillers in the order of their
//! shards, and gives all of them back before it takes others.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_vm::{AddressSpace, Shard};
use nix::time::{ClockId, clock_gettime};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::{
    bell::{Bell, sleep_by},
    filler::Filler,
    shared::Shared,
    worker,
};

/// Between two looks at the load: long against a fault, short against what a program does.
const PERIOD: Duration = Duration::from_millis(2);
/// Loads in thousandths of a core: of a thread that could use help, and of all threads when they
/// would fit into one fewer.
const BUSY: u32 = 900;
const FITS: u32 = 600;

/// All fillers with their threads, one per shard.
pub(crate) struct Team<A: AddressSpace> {
    shared: Arc<Shared<A>>,
    /// By shard.
    fillers: Vec<CachePadded<Mutex<Filler<A>>>>,
    /// Threads that serve, the first ones; the others sleep.
    awake: AtomicUsize,
    /// Of each thread, in thousandths of a core.
    loads: Vec<AtomicU32>,
    /// Whether threads may sleep.
    tuned: bool,
}

/// The fillers that one thread drives.
type Crew<'a, A> = Vec<MutexGuard<'a, Filler<A>>>;
/// Places in a crew.
type Quiet = SmallVec<[usize; 4]>;

impl<A: AddressSpace> Team<A> {
    /// All fillers. `tuned`: as many threads serve as the load asks for; otherwise all.
    pub(crate) fn new(
        shared: &Arc<Shared<A>>,
        fillers: Vec<Filler<A>>,
        tuned: bool,
    ) -> Arc<Team<A>> {
        let threads = fillers.len();
        Arc::new(Team {
            shared: shared.clone(),
            fillers: fillers
                .into_iter()
                .map(|filler| CachePadded::new(Mutex::new(filler)))
                .collect(),
            awake: AtomicUsize::new(if tuned { 1 } else { threads }),
            loads: (0..threads).map(|_| AtomicU32::new(0)).collect(),
            tuned,
        })
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        (0..self.fillers.len())
            .map(|thread| {
                let team = self.clone();
                worker::spawn(format!("filler-{thread}"), move || team.serve(thread))
            })
            .collect()
    }

    fn serve(&self, thread: usize) {
        let mut crew = Crew::new();
        let mut seen = 0;
        let mut watch = Watch::start();
        // Those of the crew that are known to have no faults.
        let mut quiet = Quiet::new();
        while !self.shared.doors.is_stopping() {
            let awake = self.awake.load(Ordering::SeqCst);
            if awake != seen {
                // All of the old ones first: two threads would wait for each other.
                crew.clear();
                let mine = shards_of(thread, awake, self.fillers.len());
                crew.extend(mine.map(|shard| self.fillers[shard].lock()));
                (seen, watch) = (awake, Watch::start());
                quiet.clear();
            }
            if crew.is_empty() {
                self.rest(thread, seen);
                continue;
            }
            let mut again = false;
            for (at, filler) in crew.iter_mut().enumerate() {
                let busy = match quiet.contains(&at) {
                    true => filler.turn_without_faults(),
                    false => filler.turn(),
                };
                again |= busy && filler.has_work();
            }
            quiet.clear();
            // Where nothing is under way, the descriptors tell of the next fault with one system
            // call; looking for it first would take another.
            if !again {
                self.sleep(&crew, seen, &mut quiet);
            }
            if self.tuned
                && let Some(load) = watch.look()
            {
                self.weigh(thread, seen, load);
            }
        }
    }

    /// Nothing to do until more threads are needed.
    fn rest(&self, thread: usize, seen: usize) {
        let bell = &self.shared.doors.filler(Shard(thread)).rest;
        bell.prepare();
        if self.awake.load(Ordering::SeqCst) != seen || self.shared.doors.is_stopping() {
            return bell.cancel();
        }
        bell.sleep(Vec::new(), None);
    }

    /// Sleeps until one of the crew may have something to do, or there is a new division. Finds out
    /// who has no faults.
    fn sleep(&self, crew: &Crew<'_, A>, seen: usize, quiet: &mut Quiet) {
        let bells: SmallVec<[&Bell; 4]> = crew
            .iter()
            .map(|filler| filler.bell(&self.shared))
            .collect();
        bells.iter().for_each(|bell| bell.prepare());
        let called = self.shared.doors.is_stopping() || self.awake.load(Ordering::SeqCst) != seen;
        if called || crew.iter().any(|filler| filler.is_called()) {
            return bells.iter().for_each(|bell| bell.cancel());
        }
        let mut fds = Vec::with_capacity(4 * crew.len());
        let mut until: Option<Instant> = None;
        let mut told = SmallVec::<[(usize, usize); 4]>::new();
        for (at, filler) in crew.iter().enumerate() {
            if filler.is_told_of_faults() {
                told.push((at, fds.len()));
            }
            until = until.into_iter().chain(filler.wait(&mut fds)).min();
        }
        sleep_by(&bells, &mut fds, until);
        let has_no_event = |&(_, fd): &(usize, usize)| fds[fd].any() == Some(false);
        quiet.extend(
            told.iter()
                .filter(|told| has_no_event(told))
                .map(|(at, _)| *at),
        );
    }

    /// Wakes one thread more, or sends the last one to sleep, if the load asks for it.
    fn weigh(&self, thread: usize, awake: usize, load: u32) {
        self.loads[thread].store(load, Ordering::Relaxed);
        let in_all = self.loads[..awake]
            .iter()
            .map(|load| load.load(Ordering::Relaxed))
            .sum();
        let needed = needed(awake, self.fillers.len(), thread, load, in_all);
        if needed > awake {
            // Until it has been seen at work it counts as needed.
            self.loads[awake].store(BUSY, Ordering::Relaxed);
        }
        if needed != awake {
            self.divide(awake, needed);
        }
    }

    /// `needed` threads are awake from now on, unless another number was set meanwhile.
    fn divide(&self, awake: usize, needed: usize) {
        let changed = (self.awake)
            .compare_exchange(awake, needed, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        if changed {
            self.shared.doors.ring_resting_fillers();
        }
    }
}

/// The shards that a thread serves while `awake` threads are awake.
fn shards_of(thread: usize, awake: usize, shards: usize) -> impl Iterator<Item = usize> {
    let end = if thread < awake { shards } else { 0 };
    (thread..end).step_by(awake)
}

/// How many threads shall be awake, after one of those that are found its load.
fn needed(awake: usize, threads: usize, thread: usize, load: u32, in_all: u32) -> usize {
    if load >= BUSY && awake < threads {
        awake + 1
    } else if thread + 1 == awake && awake > 1 && in_all < FITS * (awake as u32 - 1) {
        awake - 1
    } else {
        awake
    }
}

/// What part of the time a thread has run.
struct Watch {
    since: Instant,
    cpu: Duration,
}

impl Watch {
    fn start() -> Watch {
        Watch {
            since: Instant::now(),
            cpu: cpu_time(),
        }
    }

    /// The load since the last look, once a period has passed.
    fn look(&mut self) -> Option<u32> {
        let passed = self.since.elapsed();
        if passed < PERIOD {
            return None;
        }
        let before = std::mem::replace(self, Watch::start());
        let used = self.cpu.saturating_sub(before.cpu);
        Some((used.as_nanos() * 1000 / passed.as_nanos()) as u32)
    }
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("each thread has a clock")
        .into()
}

#[cfg(test)]
mod tests {
    use std::{mem::ManuallyDrop, sync::atomic::AtomicBool};

    use farpage_fabric::{
        SessionOptions,
        sim::{SimConfig, SimServer},
    };
    use farpage_store::{Cluster, ClusterOptions, PageStore, RemoteOptions};
    use farpage_vm::{Faulted, SimOptions, SimSpace};

    use super::*;
    use crate::{Mapped, Pager, PagerOptions, RegionOptions, pager::Parts};

    const SHARDS: usize = 4;
    const PROGRAMS: usize = 3;
    const PAGE_BYTES: usize = 4096;
    /// Stripes are of 16 MiB: each shard has one.
    const BYTES: u64 = 64 << 20;

    /// A program that touches pages of all shards, rings once for each fault, and counts in its own
    /// words.
    fn program(
        thread: usize,
        space: &SimSpace,
        shared: &Shared<SimSpace>,
        mapped: &Mapped<SimSpace>,
    ) {
        const ROUNDS: u64 = 40;
        const PAGES: usize = 16;
        let end = Instant::now() + Duration::from_secs(20);
        let access = |page: usize, value: Option<u64>| loop {
            let shard = page % SHARDS;
            let offset = shard * (16 << 20) + page / SHARDS * PAGE_BYTES;
            let address = mapped.address() + offset + thread * 8;
            let outcome = match value {
                Some(value) => space.try_store(thread, address, value).map(|()| value),
                None => space.try_load(thread, address),
            };
            match outcome {
                Ok(seen) => return seen,
                Err(Faulted::Asleep) => shared.doors.ring_fillers(),
                Err(other) => panic!("page {page}: {other}"),
            }
            while space.is_asleep(thread) {
                assert!(Instant::now() < end, "nobody serves page {page}");
                std::thread::yield_now();
            }
        };
        for round in 0..ROUNDS {
            for page in 0..PAGES {
                let page = (page * 5 + thread) % PAGES;
                assert_eq!(access(page, None), round, "page {page}");
                access(page, Some(round + 1));
            }
        }
    }

    #[test]
    fn fillers_change_hands_while_programs_fault() {
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: SHARDS,
            seed: 1,
            held_probability: 0.0,
            duplicate_probability: 0.0,
            ..SimOptions::default()
        }));
        let session = SimServer::new(SimConfig::new(1))
            .session(&SessionOptions::default())
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let options = PagerOptions::new(8 * PAGE_BYTES as u64);
        let Parts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let shared = pager.shared().clone();
        let team = Team::new(&shared, fillers, true);
        let mut threads = team.start().expect("threads start");
        for evictor in evictors {
            let serve = move || evictor.serve();
            threads.push(worker::spawn("evictor".to_owned(), serve).expect("a thread starts"));
        }
        let options = RemoteOptions::default();
        let store = PageStore::remote(&cluster, "a region", BYTES, PAGE_BYTES, &options)
            .expect("the server has room");
        let mapped = (Arc::new(pager).map(store, RegionOptions::default()))
            .expect("the budget holds the pages of all fillers");
        // While a failed test unwinds nobody may serve what a drop waits for.
        let mapped = ManuallyDrop::new(mapped);

        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for needed in (1..=SHARDS).chain((1..SHARDS).rev()).cycle() {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    team.divide(team.awake.load(Ordering::SeqCst), needed);
                    std::thread::yield_now();
                }
            });
            let programs: Vec<_> = (0..PROGRAMS)
                .map(|thread| {
                    let (space, shared, mapped) = (&space, &shared, &mapped);
                    scope.spawn(move || program(thread, space, shared, mapped))
                })
                .collect();
            let ends: Vec<_> = programs.into_iter().map(|program| program.join()).collect();
            done.store(true, Ordering::Relaxed);
            ends.into_iter()
                .for_each(|end| end.expect("the program sees what it wrote"));
        });
        // The region needs its workers to the end, and the workers end with the pager.
        drop(ManuallyDrop::into_inner(mapped));
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("workers end"));
    }

    #[test]
    fn filler_with_faults_that_no_descriptor_tells_of_does_not_sleep() {
        let space = Arc::new(SimSpace::new(SimOptions::default()));
        let session = SimServer::new(SimConfig::new(1))
            .session(&SessionOptions::default())
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let options = PagerOptions::new(8 * PAGE_BYTES as u64);
        let Parts {
            pager, mut fillers, ..
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let options = RemoteOptions::default();
        let store = PageStore::remote(&cluster, RegionId(1), 1 << 20, PAGE_BYTES, &options)
            .expect("the server has room");
        let mapped = (Arc::new(pager).map(store, RegionOptions::default()))
            .expect("the budget holds the pages of all fillers");
        let mapped = ManuallyDrop::new(mapped);
        assert!(!fillers[0].is_called());
        assert_eq!(
            space.try_load(0, mapped.address()),
            Err(Faulted::Asleep),
            "nobody has brought the page in"
        );
        space.keep_events(Shard(0));
        assert!(fillers[0].is_called());
        fillers[0].turn();
        assert!(!fillers[0].is_called());
        assert!(!space.is_asleep(0));
    }

    #[test]
    fn each_shard_is_served_by_one_thread_that_is_awake() {
        for shards in 1..=5 {
            for awake in 1..=shards {
                let mut served: Vec<_> = (0..shards)
                    .flat_map(|thread| shards_of(thread, awake, shards))
                    .collect();
                served.sort_unstable();
                assert!(served.into_iter().eq(0..shards));
                assert_eq!(shards_of(awake, awake, shards).count(), 0);
            }
        }
    }

    #[test]
    fn threads_come_for_load_and_go_without() {
        assert_eq!(needed(1, 4, 0, 950, 950), 2);
        assert_eq!(needed(4, 4, 0, 950, 3800), 4, "there are no more");
        assert_eq!(needed(2, 4, 1, 450, 950), 2, "would be too much for one");
        assert_eq!(needed(2, 4, 1, 250, 500), 1);
        assert_eq!(needed(2, 4, 0, 250, 500), 2, "the last one decides");
        assert_eq!(needed(1, 4, 0, 0, 0), 1);
        // Waiting for a core or a link.
        assert_eq!(needed(1, 4, 0, 600, 600), 1);
    }

    #[test]
    fn a_thread_at_work_has_load_and_one_that_sleeps_has_none() {
        let mut watch = Watch::start();
        std::thread::sleep(20 * PERIOD);
        let asleep = watch.look().expect("more than a period has passed");
        assert!(asleep < 100, "{asleep}");
        assert!(watch.look().is_none(), "a period has not passed");
    }
}
