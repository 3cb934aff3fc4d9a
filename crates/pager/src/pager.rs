//! Start and end of the workers: [`Pager`], the face of this crate.
//!
//! The rule: a pager only puts the parts together. The work of each worker is in its own file; a
//! region is mapped in `map.rs`, and used by the program in `mapped.rs`.

use std::{
    any::Any,
    fmt, io, mem,
    ops::Range,
    process,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use farpage_signals::{Mutex, SignalGuard};
use farpage_store::{Cluster, IoQueue, PageStore};
use farpage_tables::Table;
use farpage_vm::AddressSpace;

use crate::{
    PagerOptions, PagerStats, StartError,
    budget::Budget,
    crash_message::CrashMessage,
    doors::{Doors, FillerDoor, FillerInbox},
    evictor::Evictor,
    executor::{self, Executor},
    filler::Filler,
    in_thread::InThread,
    inline_handler::InlineHandler,
    pace::Pace,
    region::{RegionGuard, RegionId},
    run::RUN_BYTES_MAX,
    seats::Seats,
    shared::{SharedParts, Workers},
    waker::WorkerWaker,
};

/// A mapped region, for a copy of the process.
pub struct MappedImage {
    /// The region's addresses.
    pub addresses: Range<usize>,
    /// The store that keeps its pages.
    pub store: Arc<PageStore>,
    _guard: RegionGuard,
}

/// The workers of one runtime and the regions that they serve.
pub struct Pager<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    cluster: Arc<Cluster>,
    in_thread: Option<Arc<InThread<A>>>,
    next_id: AtomicU64,
    run_bytes_max: usize,
    deadline: Duration,
    /// Id of the process that has the threads.
    process: u32,
    /// Seats of the worker threads. `None` in a simulation.
    seats: Option<Arc<Seats>>,
    /// True once the worker threads have started.
    is_working: AtomicBool,
    /// Right to start them.
    starting: Mutex<()>,
    /// Part of a layer above that ends with the pager.
    companion: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl<A: AddressSpace> Pager<A> {
    /// Makes the evictors and, for the fillers, one handler per CPU that the caller may use, and
    /// starts their threads unless they [start late](PagerOptions::starts_late). Regions keep their
    /// pages by stores over `cluster`.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(
        space: Arc<A>,
        cluster: Arc<Cluster>,
        options: &PagerOptions,
    ) -> Result<Arc<Pager<A>>, StartError> {
        let PagerParts {
            mut pager,
            fillers,
            evictors,
        } = Pager::assemble(space, cluster, options)?;
        let cpus = executor::cpus();
        let seats = Seats::new(pager.shared.doors.clone(), cpus.len() + evictors.len())?;
        let seats = pager.seats.insert(Arc::new(seats));
        let mut serve = Executor::new(&pager.shared, fillers, &cpus, seats)?.serve_all();
        serve.extend(Evictor::serve_all(evictors, seats, cpus.len()));
        seats.assign(serve);
        if !options.starts_late {
            pager.begin_work()?;
        }
        Ok(Arc::new(pager))
    }

    /// Returns the number of threads that [`begin_work`](Self::begin_work) would start.
    pub fn threads_to_come(&self) -> usize {
        /// Threads of the descriptor table, and of the userfaultfds' keeper.
        const BESIDE: usize = 3;
        match (&self.seats, self.is_working.load(Ordering::Acquire)) {
            (Some(seats), false) => seats.threads() + BESIDE,
            _ => 0,
        }
    }

    /// Starts the workers' threads, unless they are there. To be called on the table of
    /// descriptors that the pager was made on.
    ///
    /// # Errors
    /// The operating system's. The next call starts what is missing.
    pub fn begin_work(&self) -> io::Result<()> {
        let Some(seats) = &self.seats else {
            return Ok(());
        };
        if self.is_working.load(Ordering::Acquire) {
            return Ok(());
        }
        let _starting = self.starting.lock();
        if let Some(table) = Table::current() {
            table.start()?;
        }
        self.shared.mapper.keep_open()?;
        seats.start()?;
        self.is_working.store(true, Ordering::Release);
        Ok(())
    }

    /// Puts all parts together, without threads: a simulation drives the workers itself.
    pub(crate) fn assemble(
        space: Arc<A>,
        cluster: Arc<Cluster>,
        options: &PagerOptions,
    ) -> Result<PagerParts<A>, StartError> {
        let marks = 0.0 < options.low_water
            && options.low_water < options.high_water
            && options.high_water <= 1.0;
        if !marks {
            let (low, high) = (options.low_water, options.high_water);
            return Err(StartError::Option(format!(
                "water marks of {low} and {high}: need 0 < low < high <= 1"
            )));
        }
        if space.shards() == 0 || options.evictors == 0 {
            return Err(StartError::Option(
                "need at least one filler and one evictor".into(),
            ));
        }
        let workers = Workers {
            fillers: space.shards(),
            evictors: options.evictors,
            inline_handlers: options.in_thread,
        };
        let (doors, inboxes) = doors(&workers, options.tune_evictors)?;
        let budget = Budget::new(options.budget_bytes, options.low_water, options.high_water);
        let shared = Arc::new(SharedParts::new(
            space,
            budget,
            doors,
            &workers,
            CrashMessage::new(options.crash_message, options.deadline),
        ));
        let (deadline, tuned) = (options.deadline, options.run_bytes.is_none());
        let mut handlers = Vec::new();
        for index in 0..workers.inline_handlers {
            let worker = workers.fillers + workers.evictors + index;
            let (io_queue, pace) = (IoQueue::passive(&cluster)?, Pace::new(tuned));
            handlers.push(InlineHandler::new(
                shared.clone(),
                worker,
                io_queue,
                pace,
                deadline,
            ));
        }
        let in_thread = (workers.inline_handlers > 0)
            .then(|| Arc::new(InThread::new(shared.clone(), handlers)));
        let mut fillers = Vec::new();
        for (shard, inbox) in inboxes.into_iter().enumerate() {
            fillers.push(Filler::new(
                shared.clone(),
                shard,
                IoQueue::new(&cluster)?,
                inbox,
                Pace::new(tuned),
                deadline,
                in_thread.clone(),
            ));
        }
        let mut evictors = Vec::new();
        for index in 0..workers.evictors {
            let io_queue = IoQueue::new(&cluster)?;
            evictors.push(Evictor::new(shared.clone(), index, io_queue, deadline));
        }
        let pager = Pager {
            shared,
            cluster,
            in_thread,
            next_id: AtomicU64::new(1),
            run_bytes_max: options.run_bytes.unwrap_or(RUN_BYTES_MAX),
            deadline,
            process: process::id(),
            seats: None,
            is_working: AtomicBool::new(false),
            starting: Mutex::default(),
            companion: OnceLock::new(),
        };
        Ok(PagerParts {
            pager,
            fillers,
            evictors,
        })
    }

    pub(crate) fn shared(&self) -> &Arc<SharedParts<A>> {
        &self.shared
    }

    /// Returns the time after which a fill without a frame is given up.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// True if this process is a child of the one that started the pager. The child has copies that
    /// it must not use: locks are held by threads that do not run there, and connections are the
    /// parent's.
    pub fn is_parents(&self) -> bool {
        self.process != process::id()
    }

    /// Returns the servers that regions keep their pages on.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// True if a region is mapped.
    pub fn has_regions(&self) -> bool {
        let _signals = SignalGuard::new();
        !self.shared.regions.read().is_empty()
    }

    /// Returns all mapped regions under paging, none of which ends while its part of the result
    /// lives. While reclaim is frozen, no other comes under paging.
    pub fn mapped(&self) -> Vec<MappedImage> {
        let _signals = SignalGuard::new();
        let regions = self.shared.regions.read();
        let paged = regions
            .values()
            .filter(|region| !region.beginning.is_ordinary());
        let entered = paged.filter_map(|region| {
            let end = region.address + region.geometry.bytes;
            Some(MappedImage {
                addresses: region.address..end,
                store: region.store.clone(),
                _guard: region.enter()?,
            })
        });
        entered.collect()
    }

    /// Returns the parts of `addresses`, of one region, that are neither
    /// [ceded](crate::MappedRegion::cede) nor unmapped.
    pub fn kept(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let _signals = SignalGuard::new();
        self.shared.mapper.kept(addresses)
    }

    /// Keeps `companion` until the pager ends. The first one stays.
    pub fn accompany(&self, companion: Box<dyn Any + Send + Sync>) {
        let _ = self.companion.set(companion);
    }

    /// Returns the companion, if it has this type.
    pub fn companion<T: 'static>(&self) -> Option<&T> {
        self.companion.get()?.downcast_ref()
    }

    /// Returns the upper bound of the bytes that move together.
    pub(crate) fn run_bytes_max(&self) -> usize {
        self.run_bytes_max
    }

    /// Returns the part that serves faults in the program's own threads, if the pager has it.
    pub fn in_thread(&self) -> Option<&Arc<InThread<A>>> {
        self.in_thread.as_ref()
    }

    pub(crate) fn next_region(&self) -> RegionId {
        RegionId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins to open the channels of idle inline handlers to servers that were added. Busy ones
    /// ask for their channels when they first need them.
    pub fn meet_servers(&self) {
        if let Some(in_thread) = &self.in_thread {
            in_thread.open_lacking();
        }
    }

    /// Changes the residency budget, at most to that of the start. Returns the number of bytes by
    /// which memory exceeds it for now. No more memory is taken until evictors have brought that to
    /// nothing, which they cannot while too much is pinned.
    pub fn set_budget(&self, bytes: u64) -> u64 {
        let _signals = SignalGuard::new();
        let exceeded = self.shared.frames.set_budget(bytes);
        let budget = self.shared.frames.budget().bytes();
        self.shared.installer.clock.set_budget(budget);
        exceeded
    }

    /// Returns a handle by which memory beside the pages is counted under the budget.
    pub fn lender(&self) -> Lender<A> {
        Lender(Arc::downgrade(&self.shared))
    }

    /// Returns the counts since the start.
    pub fn stats(&self) -> PagerStats {
        let budget = self.shared.frames.budget();
        let mut stats = PagerStats {
            budget_bytes: budget.bytes(),
            peak_resident_bytes: budget.peak(),
            resident_bytes: budget.used(),
            ..PagerStats::default()
        };
        self.shared.installer.clock.put_into(&mut stats);
        self.shared
            .counters
            .iter()
            .for_each(|worker| stats.add(worker));
        stats
    }
}

/// Handle on the budget of a pager, which it does not keep alive.
pub struct Lender<A: AddressSpace>(Weak<SharedParts<A>>);

impl<A: AddressSpace> Lender<A> {
    /// Returns the budget as it was set, before anything was lent. 0 if the pager has ended.
    pub fn budget(&self) -> u64 {
        let shared = self.0.upgrade();
        shared.map_or(0, |shared| shared.frames.budget().before_loans())
    }

    /// Lends `bytes` of the budget, in place of what was lent before: at most half of the budget.
    /// The pages have the rest, as after [`Pager::set_budget`].
    pub fn lend(&self, bytes: u64) {
        let Some(shared) = self.0.upgrade() else {
            return;
        };
        let _signals = SignalGuard::new();
        shared.frames.lend(bytes);
        shared
            .installer
            .clock
            .set_budget(shared.frames.budget().bytes());
    }
}

impl<A: AddressSpace> Drop for Pager<A> {
    fn drop(&mut self) {
        if self.is_parents() {
            // Dropping these parts would give back resources of the parent.
            mem::forget((
                self.shared.clone(),
                self.cluster.clone(),
                self.in_thread.clone(),
                self.seats.clone(),
                self.companion.take(),
            ));
            return;
        }
        self.shared.doors.stop();
        if let Some(seats) = &self.seats {
            seats.join();
        }
    }
}

impl<A: AddressSpace> fmt::Debug for Pager<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager")
            .field("workers", &self.shared.counters.len())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// Makes a door for each worker. Returns the doors and the inboxes of the fillers.
fn doors(workers: &Workers, tuned_evictors: bool) -> io::Result<(Arc<Doors>, Vec<FillerInbox>)> {
    let fillers = (0..workers.fillers).map(|_| FillerDoor::new());
    let (fillers, inboxes) = fillers.collect::<io::Result<(Vec<_>, Vec<_>)>>()?;
    let evictors = (0..workers.evictors)
        .map(|_| WorkerWaker::new())
        .collect::<io::Result<Vec<_>>>()?;
    let doors = Doors::new(fillers, evictors, tuned_evictors)?;
    Ok((Arc::new(doors), inboxes))
}

/// Parts of a pager: the pager and its workers, before they have threads.
pub(crate) struct PagerParts<A: AddressSpace> {
    pub(crate) pager: Pager<A>,
    pub(crate) fillers: Vec<Filler<A>>,
    pub(crate) evictors: Vec<Evictor<A>>,
}
