//! What all workers of a runtime share: [`Core`].
//!
//! It holds the few steps that fillers, evictors and the program's own calls have in common (publishing a page, waking each other);
//! the order of things in a fill is in `filler.rs`, that of an eviction in `evictor.rs`.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::Range,
    sync::{
        Arc, OnceLock, RwLock, RwLockReadGuard, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use crossbeam_channel::{Receiver, Sender};
use crossbeam_utils::CachePadded;

use farpage_vm::{AddressSpace, InstallError, InstallErrorKind};
use parking_lot::Mutex;

use crate::{
    PageError,
    ahead::Plan,
    behind::{Back, Behind},
    bell::Bell,
    frames::Frames,
    handover::HandOver,
    in_thread::InThread,
    job::Job,
    protocol::{self, HEAT_MAX, OnFailed, State, Word},
    region::Region,
    run::{keep_first, pages_in},
    scatter::Scatter,
    stats::Counters,
    sweep::Sweep,
};

/// All mapped regions by their first address. The standard library's lock, since a signal handler reads it: it never allocates.
#[derive(Debug, Default)]
pub(crate) struct RegionTable(RwLock<BTreeMap<usize, Arc<Region>>>);

impl RegionTable {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Arc<Region>>> {
        self.0.read().expect("nothing panics under this lock")
    }

    pub(crate) fn insert(&self, region: Arc<Region>) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.insert(region.address, region);
    }

    pub(crate) fn remove(&self, address: usize) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.remove(&address);
    }
}

/// What the program or another worker asks of a filler.
#[derive(Debug)]
pub(crate) enum Command {
    /// Bring these pages in when there is room. Pages of other shards are passed over.
    Prefetch(Arc<Region>, Range<usize>),
    /// Bring these pages in even if they are poisoned or the budget is tight; the program waits for them. Each filler counts itself
    /// when it has taken its pages on: what is poisoned after that has failed again.
    Demand(Arc<Region>, Range<usize>, Arc<AtomicUsize>),
    /// A thread that serves its own faults, since that time, could not bring this page in. The page is the filler's from here on; the region has been entered.
    TakeOver(Arc<Region>, usize, PageError, Instant),
    /// A thread that serves its own faults owns this page, and the page's newest bytes are gone. It is the filler's from here on; the region has
    /// been entered.
    Lose(Arc<Region>, usize, PageError),
    /// The region is closing: give up whatever is kept for it.
    Settle(Arc<Region>),
}

/// What a thread that serves its own faults asks of a filler.
#[derive(Debug)]
pub(crate) enum Ask {
    /// These pages would better be brought in.
    Ahead(Arc<Region>, Plan),
    /// Serve the fault at this address.
    Fault(Arc<Region>, usize),
}

/// How to reach a filler.
#[derive(Debug)]
pub(crate) struct FillerDoor {
    pub(crate) bell: Bell,
    /// Wakes the thread of this number when it is not needed and sleeps.
    pub(crate) rest: Bell,
    pub(crate) mail: Sender<Command>,
    /// Bounded, so that a thread in a signal handler can send.
    pub(crate) asks: Sender<Ask>,
}

/// Where a filler finds what it is asked for.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) mail: Receiver<Command>,
    pub(crate) asks: Receiver<Ask>,
}

/// More than one filler works off while its core is taken from it.
const ASKS_MAX: usize = 64;

impl FillerDoor {
    pub(crate) fn new() -> io::Result<(FillerDoor, Inbox)> {
        let (sender, mail) = crossbeam_channel::unbounded();
        let (asks_sender, asks) = crossbeam_channel::bounded(ASKS_MAX);
        let door = FillerDoor {
            bell: Bell::new()?,
            rest: Bell::new()?,
            mail: sender,
            asks: asks_sender,
        };
        Ok((door, Inbox { mail, asks }))
    }
}

impl Inbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.mail.is_empty() && self.asks.is_empty()
    }
}

pub(crate) struct Core<A: AddressSpace> {
    pub(crate) space: Arc<A>,
    pub(crate) frames: Frames<A>,
    pub(crate) regions: RegionTable,
    pub(crate) sweep: Sweep,
    pub(crate) behind: Behind,
    /// Ticks once per 4 KiB that were filled; wraps.
    clock: CachePadded<AtomicU32>,
    budget_ticks: u32,
    pub(crate) fillers: Vec<FillerDoor>,
    pub(crate) evictors: Vec<Bell>,
    /// Whether evictors that are not needed stay asleep.
    tuned_evictors: bool,
    pub(crate) jobs: Mutex<VecDeque<Arc<Job>>>,
    /// What threads of the program took out and evictors write back.
    pub(crate) handed_over: HandOver<A::Frame>,
    pub(crate) scatter: Scatter,
    /// One set per worker: fillers, evictors, fillers that the program's threads run.
    pub(crate) counters: Vec<CachePadded<Counters>>,
    pub(crate) stopping: AtomicBool,
    /// Fillers that the program's threads run, where they do.
    pub(crate) in_thread: OnceLock<Weak<InThread<A>>>,
}

impl<A: AddressSpace> Core<A> {
    pub(crate) fn new(
        space: Arc<A>,
        frames: Frames<A>,
        fillers: Vec<FillerDoor>,
        evictors: Vec<Bell>,
        tuned_evictors: bool,
        in_thread: usize,
    ) -> Core<A> {
        let budget_ticks = u32::try_from(frames.budget() >> 12).unwrap_or(u32::MAX / 4);
        let workers = fillers.len() + evictors.len() + in_thread;
        Core {
            space,
            frames,
            regions: RegionTable::default(),
            sweep: Sweep::new(budget_ticks),
            behind: Behind::new(budget_ticks),
            // Far from 0, the stamp of pages that never left: those must not look as if they had just left.
            clock: CachePadded::new(AtomicU32::new(u32::MAX / 2)),
            budget_ticks,
            fillers,
            handed_over: HandOver::new(in_thread, evictors.len()),
            scatter: Scatter::default(),
            evictors,
            tuned_evictors,
            jobs: Mutex::default(),
            counters: (0..workers).map(|_| CachePadded::default()).collect(),
            stopping: AtomicBool::new(false),
            in_thread: OnceLock::new(),
        }
    }

    pub(crate) fn shards(&self) -> usize {
        self.fillers.len()
    }

    pub(crate) fn now(&self) -> u32 {
        self.clock.load(Ordering::Relaxed)
    }

    /// The regions that have some of these addresses.
    pub(crate) fn regions_in(&self, addresses: &Range<usize>) -> Vec<Arc<Region>> {
        let regions = self.regions.read();
        let below = regions.range(..addresses.end).rev();
        below
            .take_while(|(_, region)| region.address + region.layout.bytes > addresses.start)
            .map(|(_, region)| region.clone())
            .collect()
    }

    /// The region at an address, if one is mapped there.
    pub(crate) fn region_at(&self, address: usize) -> Option<Arc<Region>> {
        let regions = self.regions.read();
        let (_, region) = regions.range(..=address).next_back()?;
        region.contains(address).then(|| region.clone())
    }

    /// Maps a run of pages that the caller owns, and publishes them. A page that is refused is handed to `refused` with its frame and what the operating
    /// system said: the caller still owns it.
    pub(crate) fn install(
        &self,
        region: &Region,
        mut pages: Range<usize>,
        frame: A::Frame,
        heat: Heat,
        mut refused: impl FnMut(usize, A::Frame, io::Error),
    ) {
        region.touch(&pages);
        for page in pages.clone() {
            region.words.apply(page, |w| (protocol::installing(w), ()));
        }
        let (page_bytes, mut rest) = (region.page_bytes(), Some(frame));
        while let Some(frame) = rest.take() {
            let shard = region.shard_of(pages.start, self.shards());
            let address = region.address_of(pages.start);
            let Err(InstallError { mut frame, kind }) = self.space.install(shard, address, frame)
            else {
                return self.arrived(region, pages, heat);
            };
            let first = pages.end - pages_in(&frame, page_bytes);
            self.arrived(region, pages.start..first, heat);
            rest = keep_first(&mut frame, 1, page_bytes);
            pages.start = first + 1;
            let error = match kind {
                // The program took the page away and somebody put it back before we looked: the mapped bytes are the newer ones. Our frame is dropped, and
                // its share of the budget stands for the mapped page from now on.
                InstallErrorKind::Exists => {
                    drop(frame);
                    self.arrived(region, first..first + 1, heat);
                    continue;
                }
                InstallErrorKind::Gone => {
                    self.release(frame, page_bytes);
                    self.gone(region, first, heat != Heat::Cold);
                    continue;
                }
                InstallErrorKind::Os(error) => error,
                kind => io::Error::other(kind),
            };
            // Threads may sleep whose notes were settled just now, so a page that is not there after all counts as wanted.
            region.words.apply(first, protocol::fault);
            refused(first, frame, error);
        }
    }

    /// A page that the caller owns has no addresses any more: the program has unmapped them. Whoever still wants the page is told so, if `wanted`.
    pub(crate) fn gone(&self, region: &Region, page: usize, wanted: bool) {
        // Before the word says so: whoever sees the page poisoned looks for the reason.
        if wanted {
            region.record(PageError::Unmapped {
                region: region.id,
                page: page as u64,
            });
        }
        region.words.apply(page, |w| (protocol::poisoned(w), ()));
        self.wake(region, page..page + 1);
    }

    pub(crate) fn arrived(&self, region: &Region, pages: Range<usize>, heat: Heat) {
        region.count_in(&pages);
        self.publish(region, pages, heat);
    }

    /// Publishes pages that the caller owns and that are mapped.
    pub(crate) fn publish(&self, region: &Region, pages: Range<usize>, heat: Heat) {
        let ticks = (region.page_bytes() >> 12) * pages.len();
        let now = self.clock.fetch_add(ticks as u32, Ordering::Relaxed);
        let mut noted: Option<Range<usize>> = None;
        let mut back = Back::default();
        for page in pages {
            let before = region.words.apply(page, |w| {
                let heat = match heat {
                    Heat::Hot => HEAT_MAX,
                    // It came back before the budget turned over once more: with a little more memory it would not have left.
                    Heat::Refault => u8::from(now.wrapping_sub(w.stamp()) < self.budget_ticks / 2),
                    Heat::Cold => 0,
                };
                (protocol::installed(w, heat, now), w)
            });
            if before.state() == State::Filling {
                back.count(before.stamp(), now, region.page_bytes());
            }
            if before.wanted() {
                noted = Some(noted.map_or(page, |noted| noted.start)..page + 1);
            }
        }
        self.behind.came_back(&back);
        if let Some(noted) = noted {
            self.wake(region, noted);
        }
    }

    /// Wakes the threads that sleep on a run of pages; they try again.
    pub(crate) fn wake(&self, region: &Region, pages: Range<usize>) {
        let shard = region.shard_of(pages.start, self.shards());
        let bytes = pages.len() * region.page_bytes();
        self.space
            .wake(shard, region.address_of(pages.start), bytes);
    }

    /// A page that the caller owns cannot be brought in: whoever waits for it gets SIGBUS.
    /// Returns whether somebody did.
    pub(crate) fn fail_fill(&self, region: &Region, page: usize, error: PageError) -> bool {
        // Before the word says so: whoever sees the page poisoned looks for the reason.
        region.record(error.clone());
        match region.words.apply(page, protocol::fill_failed) {
            OnFailed::Dropped => false,
            OnFailed::MustPoison => {
                tracing::error!(%error, page, address = format_args!("{:#x}", region.address_of(page)), "page is lost for now; touching it raises SIGBUS");
                self.poison(region, page, protocol::poisoned);
                true
            }
        }
    }

    /// The bytes of a page that the caller owns are gone, and the store has others: touching the page raises SIGBUS until the program
    /// overwrites it. Returns what the program is told.
    pub(crate) fn lose(&self, region: &Region, page: usize, why: &PageError) -> PageError {
        let error = match why {
            PageError::Lost { .. } => why.clone(),
            why => PageError::Lost {
                region: region.id,
                page: page as u64,
                why: why.to_string(),
            },
        };
        tracing::error!(%error, page, address = format_args!("{:#x}", region.address_of(page)), "page is lost; touching it raises SIGBUS");
        region.record(error.clone());
        region.lose(page, error.clone());
        self.poison(region, page, protocol::lost);
        error
    }

    /// Makes every access to a page that the caller owns raise SIGBUS, and publishes that.
    fn poison(&self, region: &Region, page: usize, published: impl Fn(Word) -> Word) {
        let (shard, address) = (
            region.shard_of(page, self.shards()),
            region.address_of(page),
        );
        if let Err(error) = self.space.poison(shard, address, region.page_bytes()) {
            // Nothing else can stop a thread that waits for it from sleeping for ever.
            tracing::error!(%error, "cannot poison a lost page");
            std::process::abort();
        }
        region.words.apply(page, |w| (published(w), ()));
        self.space.wake(shard, address, region.page_bytes());
    }

    /// Gives a frame back whose pages are free, and wakes fillers if one waits for it.
    pub(crate) fn release(&self, frame: A::Frame, page_bytes: usize) {
        if self.frames.release(frame, page_bytes) {
            self.ring_fillers();
        }
    }

    pub(crate) fn ring_fillers(&self) {
        self.fillers.iter().for_each(|filler| filler.bell.ring());
    }

    /// For what the program waits for.
    pub(crate) fn ring_evictors(&self) {
        self.evictors.iter().for_each(Bell::ring);
    }

    /// Rings those evictors that are needed for the memory that is left.
    pub(crate) fn call_evictors(&self) {
        for (index, bell) in self.evictors.iter().enumerate() {
            if !self.needs_evictor(index) {
                break;
            }
            bell.ring();
        }
    }

    /// Whether an evictor should start. The first one is needed above the high water mark, the last one when the budget is nearly used up, and all while a fill waits
    /// for a frame. So their number follows what fillers take and what a link carries, whatever that is: as long as one keeps up, the level stays below the mark
    /// of the next.
    pub(crate) fn needs_evictor(&self, index: usize) -> bool {
        let step = if self.tuned_evictors { index } else { 0 };
        self.frames.is_above_mark(step, self.evictors.len())
    }

    /// Sends a command to every filler; each takes the pages of its own shard.
    pub(crate) fn tell_fillers(&self, command: impl Fn() -> Command) {
        (0..self.shards()).for_each(|shard| self.tell_filler(shard, command()));
    }

    pub(crate) fn tell_filler(&self, shard: usize, command: Command) {
        let door = &self.fillers[shard];
        // Fails only when the filler has stopped, and then nobody waits for what it would have done.
        if door.mail.send(command).is_ok() {
            door.bell.ring();
        }
    }

    /// Asks a filler for something from within a signal handler. Forgotten if the filler is too busy to look.
    pub(crate) fn ask_filler(&self, shard: usize, ask: Ask) {
        let door = &self.fillers[shard];
        if door.asks.try_send(ask).is_ok() {
            door.bell.ring();
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// Why a page is installed, as far as its stay is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heat {
    /// Somebody wanted it while it was leaving.
    Hot,
    /// Somebody faulted on it; it is warm if it had left only recently.
    Refault,
    /// Brought in ahead of need.
    Cold,
}
