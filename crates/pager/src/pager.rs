//! The face of this crate: [`Pager`] starts the workers and maps regions.
//!
//! The rule it keeps: it puts the parts together and lets them go. What a worker does is in its
//! own file; what the program does with a region is in `mapped.rs`.

use std::{
    fmt, io, mem, process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use farpage_store::{Cluster, Lane, PageStore, RegionId};
use farpage_vm::{AddressSpace, Layout};

use crate::{
    MapError, Mapped, PagerOptions, PagerStats, RegionOptions, StartError,
    bell::Bell,
    budget::Budget,
    doors::{Doors, FillerDoor, Inbox},
    evictor::Evictor,
    filler::Filler,
    guest::Guest,
    in_thread::InThread,
    last_words::LastWords,
    pace::Pace,
    region::{CHUNK_PAGES, Region},
    run::RUN_BYTES_MAX,
    shared::{Shared, Workers},
    team::Team,
    wishes::BYTES_AHEAD_MAX,
    worker,
};

/// Stripes are not cut smaller than this, so that small regions stay one kernel mapping each.
const STRIPE_BYTES_MIN: usize = 16 << 20;
/// Stripes per shard of a large region. Different fillers serve neighbouring parts of it, for a
/// handful of kernel mappings.
const STRIPES_PER_SHARD: usize = 4;

/// Read ahead at most over links that answer at once: several runs, so that one is mapped while
/// another travels.
const READ_AHEAD_BYTES: usize = 1 << 20;
const READ_AHEAD_PAGES_MAX: usize = 256;
/// And over slow links: as much as a filler has in flight.
const READ_AHEAD_BYTES_MAX: usize = BYTES_AHEAD_MAX;

/// The workers of one runtime and the regions that they serve.
pub struct Pager<A: AddressSpace> {
    shared: Arc<Shared<A>>,
    cluster: Arc<Cluster>,
    in_thread: Option<Arc<InThread<A>>>,
    next_id: AtomicU64,
    run_bytes_max: usize,
    deadline: Duration,
    /// The process that has the threads.
    process: u32,
    threads: Vec<JoinHandle<()>>,
}

impl<A: AddressSpace> Pager<A> {
    /// Starts one filler per shard of `space`, and the evictors. Regions keep their pages by stores
    /// over `cluster`.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(
        space: Arc<A>,
        cluster: Arc<Cluster>,
        options: &PagerOptions,
    ) -> Result<Arc<Pager<A>>, StartError> {
        let Parts {
            mut pager,
            fillers,
            evictors,
        } = Pager::assemble(space, cluster, options)?;
        pager.threads = Team::new(&pager.shared, fillers, options.tune_fillers).start()?;
        for (i, evictor) in evictors.into_iter().enumerate() {
            let serve = move || evictor.serve();
            (pager.threads).push(worker::spawn(format!("evictor-{i}"), serve)?);
        }
        Ok(Arc::new(pager))
    }

    /// All parts, without threads: a simulation drives the workers itself.
    pub(crate) fn assemble(
        space: Arc<A>,
        cluster: Arc<Cluster>,
        options: &PagerOptions,
    ) -> Result<Parts<A>, StartError> {
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
            guests: options.in_thread,
        };
        let (doors, inboxes) = doors(&workers, options.tune_evictors)?;
        let budget = Budget::new(options.budget_bytes, options.low_water, options.high_water);
        let shared = Arc::new(Shared::new(
            space,
            budget,
            doors,
            &workers,
            LastWords::new(options.last_words, options.deadline),
        ));
        let (deadline, tuned) = (options.deadline, options.run_bytes.is_none());
        let mut guests = Vec::new();
        for index in 0..workers.guests {
            let worker = workers.fillers + workers.evictors + index;
            let (lane, pace) = (Lane::passive(&cluster)?, Pace::new(tuned));
            guests.push(Guest::new(shared.clone(), worker, lane, pace, deadline));
        }
        let in_thread =
            (workers.guests > 0).then(|| Arc::new(InThread::new(shared.clone(), guests)));
        let mut fillers = Vec::new();
        for (shard, inbox) in inboxes.into_iter().enumerate() {
            fillers.push(Filler::new(
                shared.clone(),
                shard,
                Lane::new(&cluster)?,
                inbox,
                Pace::new(tuned),
                deadline,
                in_thread.clone(),
            ));
        }
        let mut evictors = Vec::new();
        for index in 0..workers.evictors {
            let lane = Lane::new(&cluster)?;
            evictors.push(Evictor::new(shared.clone(), index, lane, deadline));
        }
        let pager = Pager {
            shared,
            cluster,
            in_thread,
            next_id: AtomicU64::new(1),
            run_bytes_max: options.run_bytes.unwrap_or(RUN_BYTES_MAX),
            deadline,
            process: process::id(),
            threads: Vec::new(),
        };
        Ok(Parts {
            pager,
            fillers,
            evictors,
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<A>> {
        &self.shared
    }

    /// After this time a fill without a frame is given up.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether this process is a child of the one that started the pager. It has copies of everything
    /// that it must not use: threads that do not run there hold locks, and connections are the
    /// parent's.
    pub fn is_parents(&self) -> bool {
        self.process != process::id()
    }

    /// The servers that regions keep their pages on.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// What serves the faults of the program's threads, where they do that themselves.
    pub fn in_thread(&self) -> Option<&Arc<InThread<A>>> {
        self.in_thread.as_ref()
    }

    /// A number for the next region, by which errors call it.
    pub fn next_region(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Maps the pages of a store.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn map(
        self: &Arc<Self>,
        store: Arc<PageStore>,
        options: RegionOptions,
    ) -> Result<Mapped<A>, MapError> {
        let (bytes, page_bytes) = (store.bytes(), store.page_bytes());
        let budget = self.shared.frames.budget();
        let (budget_bytes, pinned_bytes) = (budget.bytes(), budget.pinned());
        let pages_min = self.shared.shards().max(2) as u64;
        if budget_bytes.saturating_sub(pinned_bytes) < pages_min * page_bytes as u64 {
            return Err(MapError::Budget {
                budget_bytes,
                pinned_bytes,
                page_bytes,
                pages_min,
            });
        }
        self.shared.frames.expect(page_bytes);
        let id = store.region();
        let layout = Layout {
            address: options.address,
            read_only: options.read_only,
            ..self.layout(id, bytes, page_bytes)
        };
        let mapping = self
            .shared
            .mapper
            .map(layout)
            .map_err(|source| MapError::Os { bytes, source })?;
        // A window must not push out what was read ahead just before it.
        let most = (budget_bytes / 16) as usize / page_bytes;
        let read_ahead = match options.read_ahead {
            Some(pages) => pages.min(most)..=pages.min(most),
            None => {
                let first = (READ_AHEAD_BYTES / page_bytes).clamp(1, READ_AHEAD_PAGES_MAX);
                first.min(most)..=(READ_AHEAD_BYTES_MAX / page_bytes).min(most)
            }
        };
        let run_pages = (self.run_bytes_max / page_bytes).clamp(1, CHUNK_PAGES);
        let region = Region::new(
            id,
            options.label.unwrap_or_else(|| format!("region {id}")),
            mapping,
            layout,
            store,
            read_ahead,
            run_pages,
        );
        let region = Arc::new(region);
        if let Some(in_thread) = &self.in_thread {
            in_thread.prepare(&region);
        }
        self.shared.regions.insert(region.clone());
        Ok(Mapped::new(self.clone(), region))
    }

    fn layout(&self, id: RegionId, bytes: u64, page_bytes: usize) -> Layout {
        let shards = self.shared.shards();
        let bytes = (bytes as usize).next_multiple_of(page_bytes);
        let stripe_bytes = bytes
            .div_ceil(shards * STRIPES_PER_SHARD)
            .max(STRIPE_BYTES_MIN)
            .next_multiple_of(page_bytes.max(2 << 20));
        Layout {
            bytes,
            page_bytes,
            stripe_bytes,
            first_shard: id.0 as usize % shards,
            address: None,
            read_only: false,
        }
    }

    /// What happened so far.
    pub fn stats(&self) -> PagerStats {
        let budget = self.shared.frames.budget();
        let mut stats = PagerStats {
            budget_bytes: budget.bytes(),
            peak_resident_bytes: budget.peak(),
            resident_bytes: budget.used(),
            ..PagerStats::default()
        };
        self.shared
            .counters
            .iter()
            .for_each(|worker| stats.add(worker));
        stats
    }
}

impl<A: AddressSpace> Drop for Pager<A> {
    fn drop(&mut self) {
        if self.is_parents() {
            // What they would give back at their end is the parent's.
            mem::forget((
                self.shared.clone(),
                self.cluster.clone(),
                self.in_thread.clone(),
                mem::take(&mut self.threads),
            ));
            return;
        }
        self.shared.doors.stop();
        for thread in self.threads.drain(..) {
            // A worker that panicked has ended the process already.
            let _ = thread.join();
        }
    }
}

impl<A: AddressSpace> fmt::Debug for Pager<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager")
            .field("workers", &self.threads.len())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// A door for each worker, and what lies behind those of the fillers.
fn doors(workers: &Workers, tuned_evictors: bool) -> io::Result<(Arc<Doors>, Vec<Inbox>)> {
    let fillers = (0..workers.fillers).map(|_| FillerDoor::new());
    let (fillers, inboxes) = fillers.collect::<io::Result<(Vec<_>, Vec<_>)>>()?;
    let evictors = (0..workers.evictors)
        .map(|_| Bell::new())
        .collect::<io::Result<Vec<_>>>()?;
    let doors = Doors::new(fillers, evictors, tuned_evictors);
    Ok((Arc::new(doors), inboxes))
}

/// A pager and its workers before they have threads.
pub(crate) struct Parts<A: AddressSpace> {
    pub(crate) pager: Pager<A>,
    pub(crate) fillers: Vec<Filler<A>>,
    pub(crate) evictors: Vec<Evictor<A>>,
}
