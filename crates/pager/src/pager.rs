//! The face of this crate: [`Pager`] starts the workers and maps regions, [`Mapped`] is a mapped region.

use std::{
    fmt, io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_store::{Cluster, Lane, PageStore};
use farpage_vm::{AddressSpace, Layout};

use crate::{
    PageError, PagerStats,
    bell::Bell,
    core::{Command, Core, FillerDoor, Heat},
    evictor::Evictor,
    filler::{BYTES_AHEAD_MAX, Filler},
    frames::Frames,
    in_thread::InThread,
    job::Job,
    pace::Pace,
    protocol::{self, State, Word},
    region::{CHUNK_PAGES, Region},
    run::RUN_BYTES_MAX,
    team::Team,
    worker,
};

/// Stripes are not cut smaller than this, so that small regions stay one kernel mapping each.
const STRIPE_BYTES_MIN: usize = 16 << 20;
/// Stripes per shard of a large region: neighbouring parts of it are served by different fillers, for a handful of kernel mappings.
const STRIPES_PER_SHARD: usize = 4;

/// Read ahead at most over links that answer at once: several runs, which leaves time to map one while another travels.
const READ_AHEAD_BYTES: usize = 1 << 20;
const READ_AHEAD_PAGES_MAX: usize = 256;
/// And over links that take their time: as much as a filler has in flight.
const READ_AHEAD_BYTES_MAX: usize = BYTES_AHEAD_MAX;

/// How a pager works. All of it is the application's choice.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PagerOptions {
    /// Bytes of pages that may be mapped or in flight at once, over all regions.
    pub budget_bytes: u64,
    /// Evictor threads. Default: 2. (There is one filler per shard of the address space.)
    pub evictors: usize,
    /// Filler threads that the load does not need sleep, and those that are awake share the shards. Otherwise each filler has its own. Default: true.
    pub tune_fillers: bool,
    /// Evictors that the load does not need sleep. Otherwise all of them start at the high mark. Default: true.
    pub tune_evictors: bool,
    /// Bytes of neighbouring pages that move together at most; at least a page does. Default: none, for 512 KiB, and less over slow links.
    pub run_bytes: Option<usize>,
    /// Evictors start when more than this fraction of the budget is used. Default: 0.95.
    pub high_water: f64,
    /// And stop at this one. Default: 0.90.
    pub low_water: f64,
    /// Of the program's threads, how many can serve their own faults at once; the address space must have been opened for it. Default: 0, all faults are
    /// served by the filler threads.
    pub in_thread: usize,
    /// A page that cannot be brought in within this time is poisoned. Default: 10 s.
    pub deadline: Duration,
}

impl PagerOptions {
    /// The defaults with a budget.
    pub fn new(budget_bytes: u64) -> PagerOptions {
        PagerOptions {
            budget_bytes,
            evictors: 2,
            tune_fillers: true,
            tune_evictors: true,
            run_bytes: None,
            high_water: 0.95,
            low_water: 0.90,
            in_thread: 0,
            deadline: Duration::from_secs(10),
        }
    }
}

/// A pager could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An option makes no sense.
    #[error("{0}")]
    Option(String),
    /// A worker could not connect to a memory server.
    #[error("a worker could not connect")]
    Connect(#[from] farpage_fabric::ConnectError),
    /// The operating system gave no thread or descriptor.
    #[error("cannot start a worker: {0}")]
    Os(#[from] io::Error),
}

/// A region could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The budget cannot hold the pages that the workers need at once.
    #[error(
        "a budget of {budget_bytes} bytes, of which {pinned_bytes} are pinned, is too small for pages of {page_bytes} bytes: {pages_min} of them must \
         fit beside what is pinned (one per filler, and two at least, since one instruction may touch two); raise the budget, unpin pages or use \
         smaller ones"
    )]
    Budget {
        /// The runtime's budget.
        budget_bytes: u64,
        /// Bytes of it that the program has pinned.
        pinned_bytes: u64,
        /// The region's page size.
        page_bytes: usize,
        /// Pages that it must hold.
        pages_min: u64,
    },
    /// The operating system's.
    #[error("cannot map a region of {bytes} bytes: {source}")]
    Os {
        /// The region's size.
        bytes: u64,
        /// The reason.
        source: io::Error,
    },
}

/// Changed pages could not all be made safe. They are still in memory, except those that a [`PageError::Lost`] names.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// A page could not be written back.
    #[error(transparent)]
    Page(#[from] PageError),
    /// All pages were written, but the store could not make them durable.
    #[error("the region's store could not make its pages durable: {0}")]
    Durable(io::Error),
}

/// How the program will use a region, or a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Advice {
    /// Nothing known: sequential runs are found from the faults. Holds for the whole region.
    #[default]
    Normal,
    /// In order: reads ahead from the first fault on. Holds for the whole region.
    Sequential,
    /// In no order: never reads ahead. Holds for the whole region.
    Random,
    /// The range is needed soon: brought in while there is room. Does not wait.
    WillNeed,
    /// The range is not needed soon: written back where it changed, and given up. The data stays, and pinned pages do.
    DontNeed,
}

impl Advice {
    pub(crate) fn from_u8(value: u8) -> Advice {
        match value {
            1 => Advice::Sequential,
            2 => Advice::Random,
            _ => Advice::Normal,
        }
    }
}

/// What a region is to be like.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct RegionOptions {
    /// Pages to read ahead at most; 0 switches it off. A sixteenth of the budget is the limit. Default: none, for a megabyte, and as much more as it takes to
    /// cover the link's delay.
    pub read_ahead: Option<usize>,
    /// The region's first address, a multiple of its page size; whoever sets it vouches for what is mapped there, which is replaced. Default: `None`, anywhere.
    pub address: Option<usize>,
    /// The program may only read: a write raises SIGSEGV. Default: false.
    pub read_only: bool,
}

/// The workers of one runtime and the regions that they serve.
pub struct Pager<A: AddressSpace> {
    core: Arc<Core<A>>,
    cluster: Arc<Cluster>,
    in_thread: Option<Arc<InThread<A>>>,
    next_id: AtomicU64,
    run_bytes_max: usize,
    deadline: Duration,
    threads: Vec<JoinHandle<()>>,
}

impl<A: AddressSpace> Pager<A> {
    /// Starts one filler per shard of `space`, and the evictors. Regions keep their pages by stores over `cluster`.
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
        pager.threads = Team::new(&pager.core, fillers, options.tune_fillers).start()?;
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
        let mut doors = Vec::new();
        let mut inboxes = Vec::new();
        for _ in 0..space.shards() {
            let (door, inbox) = FillerDoor::new()?;
            doors.push(door);
            inboxes.push(inbox);
        }
        let bells = (0..options.evictors)
            .map(|_| Bell::new())
            .collect::<io::Result<Vec<_>>>()?;
        let frames = Frames::new(
            space.clone(),
            options.budget_bytes,
            options.low_water,
            options.high_water,
        );
        let core = Arc::new(Core::new(
            space,
            frames,
            doors,
            bells,
            options.tune_evictors,
            options.in_thread,
        ));
        let filler = |worker, shard, inbox, lane| {
            let pace = Pace::new(options.run_bytes.is_none());
            Filler::new(
                core.clone(),
                worker,
                shard,
                lane,
                inbox,
                pace,
                options.deadline,
            )
        };
        let mut fillers = Vec::new();
        for (shard, inbox) in inboxes.into_iter().enumerate() {
            fillers.push(filler(shard, shard, inbox, Lane::new(&cluster)?));
        }
        let mut evictors = Vec::new();
        for index in 0..options.evictors {
            let lane = Lane::new(&cluster)?;
            evictors.push(Evictor::new(core.clone(), index, lane, options.deadline));
        }
        let mut in_thread = Vec::new();
        for index in 0..options.in_thread {
            let worker = fillers.len() + evictors.len() + index;
            let (_, inbox) = FillerDoor::new()?;
            in_thread.push(filler(worker, 0, inbox, Lane::passive(&cluster)?));
        }
        let in_thread =
            (options.in_thread > 0).then(|| Arc::new(InThread::new(core.clone(), in_thread)));
        if let Some(in_thread) = &in_thread {
            // Nobody has set it before.
            let _ = core.in_thread.set(Arc::downgrade(in_thread));
        }
        let pager = Pager {
            core,
            cluster,
            in_thread,
            next_id: AtomicU64::new(1),
            run_bytes_max: options.run_bytes.unwrap_or(RUN_BYTES_MAX),
            deadline: options.deadline,
            threads: Vec::new(),
        };
        Ok(Parts {
            pager,
            fillers,
            evictors,
        })
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> &Arc<Core<A>> {
        &self.core
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
        let budget_bytes = self.core.frames.budget();
        let pinned_bytes = self.core.frames.pinned();
        let pages_min = self.core.shards().max(2) as u64;
        if budget_bytes.saturating_sub(pinned_bytes) < pages_min * page_bytes as u64 {
            return Err(MapError::Budget {
                budget_bytes,
                pinned_bytes,
                page_bytes,
                pages_min,
            });
        }
        self.core.frames.expect(page_bytes);
        let id = store.region().0;
        let layout = Layout {
            address: options.address,
            read_only: options.read_only,
            ..self.layout(id, bytes, page_bytes)
        };
        let address = self
            .core
            .space
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
        let region = Region::new(id, address, layout, store, read_ahead, run_pages);
        let region = Arc::new(region);
        if let Some(in_thread) = &self.in_thread {
            in_thread.prepare(&region);
        }
        self.core.regions.insert(region.clone());
        Ok(Mapped {
            pager: self.clone(),
            region,
        })
    }

    fn layout(&self, id: u64, bytes: u64, page_bytes: usize) -> Layout {
        let shards = self.core.shards();
        let bytes = (bytes as usize).next_multiple_of(page_bytes);
        let stripe_bytes = bytes
            .div_ceil(shards * STRIPES_PER_SHARD)
            .max(STRIPE_BYTES_MIN)
            .next_multiple_of(page_bytes.max(2 << 20));
        Layout {
            bytes,
            page_bytes,
            stripe_bytes,
            first_shard: id as usize % shards,
            address: None,
            read_only: false,
        }
    }

    /// What happened so far.
    pub fn stats(&self) -> PagerStats {
        let mut stats = PagerStats {
            budget_bytes: self.core.frames.budget(),
            peak_resident_bytes: self.core.frames.peak(),
            resident_bytes: self.core.frames.used(),
            ..PagerStats::default()
        };
        self.core
            .counters
            .iter()
            .for_each(|worker| stats.add(worker));
        stats
    }
}

impl<A: AddressSpace> Drop for Pager<A> {
    fn drop(&mut self) {
        self.core.stopping.store(true, Ordering::SeqCst);
        for door in &self.core.fillers {
            door.bell.ring();
            door.rest.ring();
        }
        self.core.ring_evictors();
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

/// A pager and its workers before they have threads.
pub(crate) struct Parts<A: AddressSpace> {
    pub(crate) pager: Pager<A>,
    pub(crate) fillers: Vec<Filler<A>>,
    pub(crate) evictors: Vec<Evictor<A>>,
}

/// Why pages could not be pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Pinned pages would leave too little of the budget for all others.
    #[error(
        "cannot pin {asked_bytes} bytes more: of this budget {most_bytes} bytes can be pinned at once; unpin others or raise the budget"
    )]
    Budget {
        /// Bytes of the pages asked for.
        asked_bytes: u64,
        /// Bytes that can be pinned in all.
        most_bytes: u64,
    },
    /// The page is pinned 255 times.
    #[error(
        "page {page} of region {region} is pinned 255 times already: every pin needs its unpin"
    )]
    TooOften {
        /// The region's number.
        region: u64,
        /// The page's index in it.
        page: u64,
    },
    /// A page could not be brought in.
    #[error(transparent)]
    Page(#[from] PageError),
}

/// A mapped region. Dropping it gives its addresses and its pages up, without writing back.
pub struct Mapped<A: AddressSpace> {
    pager: Arc<Pager<A>>,
    region: Arc<Region>,
}

impl<A: AddressSpace> Mapped<A> {
    /// The first address, aligned to the page size.
    pub fn address(&self) -> usize {
        self.region.address
    }

    /// Bytes that are mapped: the store's size, rounded up to whole pages.
    pub fn mapped_bytes(&self) -> usize {
        self.region.layout.bytes
    }

    /// The region's page size.
    pub fn page_bytes(&self) -> usize {
        self.region.page_bytes()
    }

    /// Pages that are mapped now. A page that is just being mapped may not be counted yet.
    pub fn resident_pages(&self) -> usize {
        self.region.resident()
    }

    /// Where the pages are kept.
    pub fn store(&self) -> &Arc<PageStore> {
        &self.region.store
    }

    /// The pager that serves the region.
    pub fn pager(&self) -> &Arc<Pager<A>> {
        &self.pager
    }

    /// Tells how the bytes in `range` will be used.
    ///
    /// # Errors
    /// [`Advice::DontNeed`] waits until changed pages are written back, and says which one could not be.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), PageError> {
        let pages = self.pages(range);
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => self.region.set_advice(advice),
            Advice::WillNeed => self
                .core()
                .tell_fillers(|| Command::Prefetch(self.region.clone(), pages.clone())),
            Advice::DontNeed => return self.run(pages, false),
        }
        Ok(())
    }

    /// Puts `bytes` in the place of the pages that lie in `offset..offset + bytes.len()` and are [lost](PageError::Lost). Pages that are
    /// not lost are left alone, whatever they hold.
    ///
    /// # Errors
    /// A lost page lies in the range in part only, or cannot be mapped: it is lost as before. The others may have been put back.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn put_lost(&self, offset: usize, bytes: &[u8]) -> Result<(), PageError> {
        let (region, page_bytes) = (&self.region, self.page_bytes());
        let range = offset..offset + bytes.len();
        let lost = region.lost(&self.pages(range.clone()));
        let within = |page: usize| {
            let end = ((page + 1) * page_bytes).min(region.store.bytes() as usize);
            page * page_bytes..end
        };
        if let Some((_, error)) = lost.iter().find(|(page, _)| {
            let page = within(*page);
            page.start < range.start || range.end < page.end
        }) {
            return Err(error.clone());
        }
        for (page, error) in lost {
            let at = within(page);
            self.put(page, &bytes[at.start - offset..at.end - offset], &error)?;
        }
        Ok(())
    }

    /// Maps a lost page with these bytes. `lost`: why it is.
    fn put(&self, page: usize, bytes: &[u8], lost: &PageError) -> Result<(), PageError> {
        let (core, region, since) = (self.core(), &self.region, Instant::now());
        let page_bytes = region.page_bytes();
        let mut frame = loop {
            if let Some(frame) = core.frames.for_demand(page_bytes, 0) {
                break frame;
            }
            let waited = since.elapsed();
            if waited > self.pager.deadline {
                core.frames.end_starving();
                return Err(PageError::NoFrame {
                    region: region.id,
                    page: page as u64,
                    waited,
                });
            }
            core.call_evictors();
            core.ring_fillers();
            thread::sleep(Duration::from_micros(100));
        };
        let (ours, rest) = frame.as_mut().split_at_mut(bytes.len());
        ours.copy_from_slice(bytes);
        rest.fill(0);
        if region.words.try_apply(page, protocol::taken_up).is_none() {
            // Another call has put it back.
            core.release(frame, page_bytes);
            return Ok(());
        }
        // While it is ours: from the moment that it is mapped it may be lost again.
        region.found(page);
        let mut outcome = Ok(());
        core.install(
            region,
            page..page + 1,
            frame,
            Heat::Hot,
            |page, frame, _| {
                core.release(frame, page_bytes);
                outcome = Err(core.lose(region, page, lost));
            },
        );
        outcome
    }

    /// Brings the bytes in `range` in and waits for them; lost pages are tried again. This is how to learn of a dead server by an error
    /// instead of SIGBUS. With a budget smaller than the range its first pages may have left again when this returns.
    ///
    /// # Errors
    /// Why a page could not be brought in.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn prefetch_now(&self, range: Range<usize>) -> Result<(), PageError> {
        let pages = self.pages(range);
        for first in pages.clone().step_by(CHUNK_PAGES) {
            let chunk = first..(first + CHUNK_PAGES).min(pages.end);
            self.region.take_error();
            let taken_on = self.demand(chunk.clone());
            let mut outcome = Ok(());
            for page in chunk {
                match outcome {
                    Ok(()) => outcome = self.wait_for(page, &taken_on),
                    // What is under way ends before we return: its error would be the next call's.
                    Err(_) => self.wait_while_filling(page),
                }
            }
            outcome?;
        }
        Ok(())
    }

    fn wait_while_filling(&self, page: usize) {
        while self.region.words.load(page).state() == State::Filling {
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Asks for pages; returns how many fillers have taken theirs on.
    fn demand(&self, pages: Range<usize>) -> Arc<AtomicUsize> {
        let taken_on = Arc::new(AtomicUsize::new(0));
        self.core()
            .tell_fillers(|| Command::Demand(self.region.clone(), pages.clone(), taken_on.clone()));
        taken_on
    }

    fn wait_for(&self, page: usize, taken_on: &AtomicUsize) -> Result<(), PageError> {
        let since = Instant::now();
        let mut asked = since;
        loop {
            // Before the word: one that is poisoned may have been so before we asked, and one that is called resident may have been given back by
            // the program itself.
            let is_new = taken_on.load(Ordering::Acquire) == self.core().shards();
            let word = self.region.words.load(page);
            match word.state() {
                State::Resident if is_new => return Ok(()),
                // A pinned one comes back, and only then is its pin worth something.
                State::Leaving if !word.pinned() => return Ok(()),
                State::Lost => {
                    let lost = self.region.lost(&(page..page + 1)).pop();
                    // It may have been overwritten just now.
                    if let Some((_, error)) = lost {
                        return Err(error);
                    }
                }
                State::Poisoned if is_new => {
                    let waited = since.elapsed();
                    let unknown = PageError::NoFrame {
                        region: self.region.id,
                        page: page as u64,
                        waited,
                    };
                    return Err(self.region.take_error().unwrap_or(unknown));
                }
                _ => {}
            }
            // It was on its way for nobody and failed, or it came and went.
            if asked.elapsed() > Duration::from_millis(5) {
                asked = Instant::now();
                self.demand(page..page + 1);
            }
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Brings the bytes in `range` in and keeps them in memory until [`unpin`](Self::unpin): no access of them waits, and system calls find them there,
    /// except while [`flush`](Self::flush) or [`Advice::DontNeed`] writes one back. Whole pages are pinned. Pins are counted, up to
    /// 255 per page; all end with the region. This is `umap_fetch_and_pin` of umap (LLNL), with a way back.
    ///
    /// # Errors
    /// See [`PinError`]; nothing is pinned then that was not before.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn pin(&self, range: Range<usize>) -> Result<(), PinError> {
        let pages = self.pages(range.clone());
        for page in pages.clone() {
            if let Err(error) = self.pin_page(page, &pages) {
                self.unpin_pages(pages.start..page);
                return Err(error);
            }
        }
        // Pages may just be taken out between which these lie, so that system calls could not write to them.
        self.core().scatter.wait();
        self.prefetch_now(range).map_err(|error| {
            self.unpin_pages(pages);
            PinError::Page(error)
        })
    }

    fn pin_page(&self, page: usize, of: &Range<usize>) -> Result<(), PinError> {
        let (region, frames) = (&self.region, &self.core().frames);
        let page_bytes = region.page_bytes() as u64;
        loop {
            let seen = region.words.load(page);
            if protocol::pin(seen).is_none() {
                return Err(PinError::TooOften {
                    region: region.id,
                    page: page as u64,
                });
            }
            // The first pin of a page sets its bytes aside, before the page is pinned: no more is pinned than there is room for.
            let first = !seen.pinned();
            if first && !frames.pin(page_bytes) {
                return Err(PinError::Budget {
                    asked_bytes: of.len() as u64 * page_bytes,
                    most_bytes: frames.pinned_max(),
                });
            }
            let pin = |w: Word| protocol::pin(w).filter(|_| w.pinned() != first);
            if region.words.try_apply(page, pin).is_some() {
                if first {
                    region.count_pinned();
                }
                return Ok(());
            }
            // Another thread has pinned it meanwhile, or taken its last pin back.
            if first {
                frames.unpin(page_bytes);
            }
        }
    }

    /// Takes back one [`pin`](Self::pin) of each page that `range` touches; pages that are not pinned are left alone.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub fn unpin(&self, range: Range<usize>) {
        self.unpin_pages(self.pages(range));
    }

    fn unpin_pages(&self, pages: Range<usize>) {
        for page in pages {
            if let Some((_, now)) = self.region.words.try_apply(page, protocol::unpin)
                && !now.pinned()
            {
                self.region.count_unpinned();
                self.core().frames.unpin(self.region.page_bytes() as u64);
            }
        }
    }

    /// Writes all changed pages back, keeps them mapped, and makes them durable as far as the store can.
    ///
    /// # Errors
    /// See [`FlushError`].
    pub fn flush(&self) -> Result<(), FlushError> {
        self.run(0..self.region.pages(), true)?;
        // What would be published or made durable holds an older state of these.
        if let Some((_, error)) = self
            .region
            .lost(&(0..self.region.pages()))
            .into_iter()
            .next()
        {
            return Err(error.into());
        }
        self.region.store.flush().map_err(FlushError::Durable)
    }

    /// The first error of work in the background (an eviction or a fill that failed) since this was last called.
    pub fn take_error(&self) -> Option<PageError> {
        self.region.take_error()
    }

    fn run(&self, pages: Range<usize>, keep: bool) -> Result<(), PageError> {
        let job = Job::new(self.region.clone(), pages, keep);
        self.core().jobs.lock().push_back(job.clone());
        self.core().ring_evictors();
        job.wait()
    }

    fn core(&self) -> &Core<A> {
        &self.pager.core
    }

    #[cfg(test)]
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The pages that a range of bytes touches.
    fn pages(&self, range: Range<usize>) -> Range<usize> {
        assert!(
            range.start <= range.end && range.end <= self.region.layout.bytes,
            "bytes {range:?} do not lie in a region of {} bytes",
            self.region.layout.bytes
        );
        let first = range.start / self.region.page_bytes();
        if range.is_empty() {
            return first..first;
        }
        first..range.end.div_ceil(self.region.page_bytes())
    }
}

impl<A: AddressSpace> Drop for Mapped<A> {
    fn drop(&mut self) {
        let (core, region) = (self.core(), &self.region);
        core.regions.remove(region.address);
        region.close();
        core.tell_fillers(|| Command::Settle(region.clone()));
        core.ring_evictors();
        region.wait_until_quiet();
        // Nobody but us owns a page of it from here on. Its frames go on to other regions.
        let mut chunk = region.next_touched(0);
        while let Some(at) = chunk {
            for page in region.chunk(at).filter(|_| region.resident() > 0) {
                if region.words.try_apply(page, protocol::borrow).is_none() {
                    continue;
                }
                region.count_out(&(page..page + 1));
                let (shard, page_bytes) =
                    (region.shard_of(page, core.shards()), region.page_bytes());
                match core
                    .space
                    .detach(shard, region.address_of(page), page_bytes, 1)
                {
                    Ok(frame) => core.release(frame, page_bytes),
                    // Taken by the program before, or lost together with the mapping.
                    Err(_) => core.frames.forget(page_bytes),
                }
            }
            chunk = region.next_touched(at + 1);
        }
        core.frames
            .unpin(region.pinned() as u64 * region.page_bytes() as u64);
        core.space.unmap(region.address, region.layout);
        // Now and here: a worker that still holds the region for a moment must not be the one to give remote memory back.
        region.store.retire();
    }
}

impl<A: AddressSpace> fmt::Debug for Mapped<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("address", &format_args!("{:#x}", self.region.address))
            .field("bytes", &self.region.layout.bytes)
            .field("page_bytes", &self.region.page_bytes())
            .field("resident_pages", &self.region.resident())
            .finish_non_exhaustive()
    }
}
