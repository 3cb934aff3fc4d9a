//! Seeded simulations: the real workers over simulated memory and a simulated server, against a
//! plain array.
//!
//! One thread plays all parts. A seed decides which takes the next step: a program thread that
//! loads or stores a word, a filler or an evictor that takes a turn. Half of the program's threads
//! mostly serve their faults themselves, step by step. Pages are reported held, faults twice;
//! operations are delayed, reordered and lost. The result of a load is compared with a plain array
//! at once, and the budget is checked after each step.

mod closing;
mod hot;
mod in_order;
mod lost;
mod plain;
mod read_only;
mod tight;
mod wide;
mod world;

use std::{
    collections::HashMap,
    io,
    mem::{self, ManuallyDrop},
    ops::{Deref, DerefMut, Range},
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
use farpage_signals::{Condvar, Mutex, MutexGuard, SignalGuard};
use farpage_store::{
    BlockingOptions, Cluster, ClusterOptions, Codec, Element, PageIndex, PageRange, PageStore,
    RemoteOptions, Store, ZfpMode,
};
use farpage_vm::{AddressSpace, EventScope, Faulted, SimOptions, SimSpace};

use crate::{
    Advice, InThread, MappedRegion, PageError, Pager, PagerOptions, RegionOptions,
    ahead::ReadAhead,
    doors::Command,
    evictor::Evictor,
    filler::Filler,
    inline_handler::InlineHandler,
    job::Job,
    owner_wait::Attempt,
    pager::PagerParts,
    protocol::PageState,
    region::{CHUNK_PAGES, Region},
    shared::SharedParts,
};

const THREADS: usize = 4;
/// Number of threads, the first ones, that can serve their own faults.
const INLINE_HANDLERS: usize = 2;
const PAGES: usize = 96;

/// Returns pages by the numbers that programs have for them.
fn pages_of(numbers: Range<usize>) -> PageRange {
    PageIndex(numbers.start).until(PageIndex(numbers.end))
}

/// Threads of the program that serve their own faults.
struct InlineHandlers {
    /// `None`: fillers serve all faults.
    in_thread: Option<Arc<InThread<SimSpace>>>,
    /// Fault that each thread is serving.
    serving: [Option<(Arc<Region>, PageIndex, ReadAhead)>; INLINE_HANDLERS],
}

impl InlineHandlers {
    fn handler(&self, thread: usize) -> MutexGuard<'_, InlineHandler<SimSpace>> {
        let in_thread = self.in_thread.as_ref();
        in_thread.expect("the program has some").handler(thread)
    }

    /// Begins to serve a fault in a thread, if the thread can.
    fn begin(&mut self, thread: usize, region: &Arc<Region>, address: usize) {
        let is_one = self.in_thread.is_some() && thread < INLINE_HANDLERS;
        if is_one && !region.store.is_users_own() {
            let page = region.page_at(address);
            let plan = self.handler(thread).begin_serving(region, page, address);
            self.serving[thread] = plan.map(|plan| (region.clone(), page, plan));
        }
    }

    fn is_serving(&self, thread: usize) -> bool {
        thread < INLINE_HANDLERS && self.serving[thread].is_some()
    }

    /// Goes on with a thread's fault. Returns whether nothing is left to do.
    fn step(&mut self, thread: usize) -> bool {
        let done = self.handler(thread).serve_a_step();
        if done && let Some((region, page, plan)) = self.serving[thread].take() {
            self.handler(thread).end_serving(&region, page, plan);
        }
        done
    }

    fn turn(&mut self) {
        (0..INLINE_HANDLERS).for_each(|thread| _ = self.is_serving(thread) && self.step(thread));
    }
}

/// Drops regions on a thread of its own, since a drop waits for workers that `turn` drives here.
pub(crate) fn drop_beside(regions: Vec<MappedRegion<SimSpace>>, mut turn: impl FnMut()) {
    let ender = std::thread::spawn(move || drop(regions));
    while !ender.is_finished() {
        turn();
    }
    ender.join().expect("dropping a region does not panic");
}

/// A pager over simulated memory and a simulated server, and regions of it. The simulation takes
/// the workers' turns.
struct Sim {
    random: u64,
    space: Arc<SimSpace>,
    cluster: Arc<Cluster>,
    pager: Arc<Pager<SimSpace>>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    inline_handlers: InlineHandlers,
    /// Regions. Dropped by [`Sim::close`] alone: while a failed simulation unwinds, the workers
    /// that a drop waits for do not run.
    regions: ManuallyDrop<Vec<MappedRegion<SimSpace>>>,
}

impl Sim {
    fn new(random: u64, space: SimOptions, server: SimConfig, options: &PagerOptions) -> Sim {
        let space = Arc::new(SimSpace::new(space));
        let session = SimServer::new(server)
            .session(&SessionOptions {
                deadline: Duration::from_secs(5),
                ..SessionOptions::default()
            })
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let PagerParts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), options)
            .expect("the options are sound");
        Sim {
            random,
            space,
            cluster,
            inline_handlers: InlineHandlers {
                in_thread: pager.in_thread().cloned(),
                serving: Default::default(),
            },
            pager: Arc::new(pager),
            fillers,
            evictors,
            regions: ManuallyDrop::new(Vec::new()),
        }
    }

    /// Maps one more region, of `pages` pages on the server.
    fn map(&mut self, pages: usize, page_bytes: usize, codec: Codec, options: RegionOptions) {
        let (bytes, remote) = (
            (pages * page_bytes) as u64,
            RemoteOptions {
                codec: Some(codec),
                ..RemoteOptions::default()
            },
        );
        let store = PageStore::remote(&self.cluster, "a region", bytes, page_bytes, &remote);
        self.add(store.expect("the server has room"), options);
    }

    /// Maps one more region, of `pages` pages in a store of the program's own.
    fn map_own(
        &mut self,
        pages: usize,
        page_bytes: usize,
        store: Arc<dyn Store>,
        options: RegionOptions,
    ) {
        let (bytes, blocking) = ((pages * page_bytes) as u64, BlockingOptions::default());
        let store = PageStore::blocking(
            &self.cluster,
            "a region",
            bytes,
            page_bytes,
            store,
            &blocking,
        );
        self.add(store.expect("the page size is sound"), options);
    }

    fn add(&mut self, store: Arc<PageStore>, options: RegionOptions) {
        let mapped = self.pager.map(store, options);
        self.regions
            .push(mapped.expect("the budget holds two pages"));
    }

    /// Returns the number of pages of the first region that an attempt has dealt with. A page that
    /// is refused for the moment, or has to come in, is tried again.
    fn dealt_with(&self, page: PageIndex, attempt: Result<Attempt, PageError>) -> usize {
        match attempt {
            Ok(Attempt::Done(count)) => return count,
            Ok(Attempt::NotNow(_)) | Err(PageError::Busy { .. }) => {}
            Ok(Attempt::Absent) => _ = self.mapped().demand(page.alone()),
            Err(error) => panic!("{error}"),
        }
        0
    }

    /// Returns the first region.
    fn mapped(&self) -> &MappedRegion<SimSpace> {
        &self.regions[0]
    }

    /// Returns the first region as its workers know it.
    fn region(&self) -> Arc<Region> {
        self.mapped().region().clone()
    }

    fn shared(&self) -> Arc<SharedParts<SimSpace>> {
        self.pager.shared().clone()
    }

    fn state(&self, region: usize, page: usize) -> PageState {
        self.regions[region]
            .region()
            .words
            .load(PageIndex(page))
            .state()
    }

    fn below(&mut self, limit: usize) -> usize {
        (next(&mut self.random) % limit as u64) as usize
    }

    fn chance(&mut self, one_in: u64) -> bool {
        next(&mut self.random).is_multiple_of(one_in)
    }

    /// Takes a turn of each worker.
    fn turn(&mut self) {
        self.inline_handlers.turn();
        for filler in &mut self.fillers {
            filler.turn(EventScope::All);
        }
        self.evictors
            .iter_mut()
            .for_each(|evictor| _ = evictor.turn());
    }

    /// Takes a turn of a filler or an evictor. `of_eight`: 0 to 3, below 2 for a filler.
    fn turn_of_one(&mut self, of_eight: usize) {
        if of_eight < 2 {
            let filler = self.below(self.fillers.len());
            self.fillers[filler].turn(EventScope::All);
        } else {
            let evictor = self.below(self.evictors.len());
            self.evictors[evictor].turn();
        }
    }

    /// Makes a call that may wait for the workers, on a thread of its own, while they take turns.
    fn beside<T: Send>(&mut self, call: impl FnOnce(&[MappedRegion<SimSpace>]) -> T + Send) -> T {
        let regions = mem::take(&mut *self.regions);
        let outcome = std::thread::scope(|scope| {
            let caller = scope.spawn(|| call(&regions));
            while !caller.is_finished() {
                self.turn();
            }
            caller.join().expect("a call does not panic")
        });
        *self.regions = regions;
        outcome
    }

    /// Takes turns of the workers until `job` has ended.
    fn run(&mut self, region: usize, pages: PageRange, keep: bool) -> Result<(), PageError> {
        let job = Job::new(self.regions[region].region().clone(), pages, keep);
        self.shared().jobs.add(job.clone());
        while !job.has_ended() {
            self.turn();
        }
        job.wait(&SignalGuard::new())
    }

    /// Asks fillers to bring pages in.
    fn prefetch(&self, region: usize, pages: Range<usize>) {
        let region = self.regions[region].region();
        let ask = || Command::Prefetch(region.clone(), pages_of(pages.clone()));
        self.pager.shared().doors.tell_fillers(ask);
    }

    /// Tries once to store a word, or to load it. A thread that serves its own faults goes on with
    /// one, or may begin with one, instead.
    fn try_access(
        &mut self,
        thread: usize,
        region: &Arc<Region>,
        address: usize,
        value: Option<u64>,
    ) -> Result<u64, Faulted> {
        if self.inline_handlers.is_serving(thread) {
            self.inline_handlers.step(thread);
            return Err(Faulted::Asleep);
        }
        if !self.space.is_present(address) && self.chance(2) {
            self.inline_handlers.begin(thread, region, address);
            return Err(Faulted::Asleep);
        }
        self.touch_once(thread, address, value)
    }

    fn touch_once(
        &self,
        thread: usize,
        address: usize,
        value: Option<u64>,
    ) -> Result<u64, Faulted> {
        match value {
            _ if self.space.is_asleep(thread) => Err(Faulted::Asleep),
            Some(value) => (self.space.try_store(thread, address, value)).map(|()| value),
            None => self.space.try_load(thread, address),
        }
    }

    /// Stores a word, or loads it, while the workers take turns. Returns the word, or the signal
    /// that the program gets.
    fn access(
        &mut self,
        thread: usize,
        address: usize,
        value: Option<u64>,
    ) -> Result<u64, Faulted> {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            match self.touch_once(thread, address, value) {
                Err(Faulted::Asleep) => self.turn(),
                outcome => return outcome,
            }
            assert!(Instant::now() < end, "an access never gets its page");
        }
    }

    /// Drops the regions.
    fn close(&mut self) {
        let regions = mem::take(&mut *self.regions);
        drop_beside(regions, || self.turn());
    }

    /// Drops the regions, the workers and the pager. Returns the space.
    fn end(mut self) -> Arc<SimSpace> {
        let regions = self.regions.iter();
        let closed: Vec<_> = regions.map(|mapped| mapped.region().clone()).collect();
        self.close();
        for region in closed {
            assert!(region.counts_nothing(), "pages are counted that are gone");
            assert_eq!(region.overdue(), 0);
        }
        self.space.clone()
    }

    /// Ends the simulation, of which the caller holds no part. No frame is left behind.
    fn end_without_frames(self) {
        let space = self.end();
        let pages = space.frame_pages() + space.resident_pages();
        assert_eq!(pages, 0, "frames are left behind");
    }
}

pub(crate) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 11
}

/// Returns the seeds of one run; `FARPAGE_SIM_SEEDS=from..to` replaces them.
fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("FARPAGE_SIM_SEEDS") else {
        return default;
    };
    let (from, to) = text
        .split_once("..")
        .expect("FARPAGE_SIM_SEEDS is from..to");
    from.parse().expect("a number")..to.parse().expect("a number")
}

/// A store that fails now and then.
struct Flaky {
    bytes: Mutex<Vec<u8>>,
    random: Mutex<u64>,
    /// Number of calls of which one fails; 0: none fails.
    fail_one_in: AtomicU64,
}

impl Flaky {
    fn new(bytes: usize, seed: u64, fail_one_in: u64) -> Arc<Flaky> {
        Arc::new(Flaky {
            bytes: Mutex::new(vec![0; bytes]),
            random: Mutex::new(seed | 1),
            fail_one_in: AtomicU64::new(fail_one_in),
        })
    }

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
