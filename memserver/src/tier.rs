//! [`Tier`]: lends more than the server's memory. Unused chunks leave memory, compressed to a pool
//! first and then to a spill file, and come back when they are used.
//!
//! The rule it keeps: memory is counted before it is taken. Hot chunks, the pool, buffers and
//! tables together stay within `--memory`. An operation waits for room a bounded time, and is then
//! told that there is none. Bytes that come back are compared with the hash of those that left.

mod buffers;
mod disk;
mod evictors;
mod extent;
mod pool;
mod shares;
mod slots;
mod stored;
#[cfg(test)]
mod tests;
mod turns;

use std::{
    collections::HashMap,
    fmt, io,
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::Origin,
    log::later,
    memory::{Absent, ExtentMemory, paging_bytes},
};
use farpage_wire::{ExtentId, ShareStat, TierStat};
use hdrhistogram::Histogram;
use parking_lot::{Condvar, Mutex};

use self::{
    buffers::Buffers,
    disk::{Disk, SpillFile},
    extent::{CHUNK_BYTES, NONE, Place, TieredExtent},
    pool::Pool,
    shares::{Books, Entry},
    slots::Slots,
    turns::Turns,
};
pub(crate) use self::{evictors::Evictors, shares::Tenant};

/// The least that `--memory` may be.
pub(crate) const LEAST_MEMORY_BYTES: u64 = 16 << 20;

/// Number of evictors. Several keep a disk busy, and one is left when the disk does not answer.
const EVICTORS: usize = 5;
/// Number of chunks that are fetched from the spill file at once.
const DISK_FETCHES: usize = 8;
/// Number of chunks that are fetched from the pool at once.
const POOL_FETCHES: usize = 4;
/// Memory of the fetch buffers and the compressor's tables, counted from the start.
const OWN_BYTES: u64 = 4 << 20;
/// Memory per lent chunk: its entry, a free slot's number, and the kernel's page table of 16 pages
/// of 8 bytes.
const TABLE_BYTES_PER_CHUNK: u64 = 176;
/// Longest compressed chunk. Storing a longer one compressed would save too little.
const PACKED_MOST: usize = CHUNK_BYTES as usize / 4 * 3;
/// Memory that chunks leave to the pool: compressed chunks could not leave a full memory otherwise.
const LEFT_TO_POOL_BYTES: u64 = (EVICTORS * PACKED_MOST) as u64;
/// The longest wait of a lease for the memory of its table.
const TABLE_PATIENCE: Duration = Duration::from_secs(5);
/// Shortest time between two logs of the figures.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// Shortest time between two logs of trouble.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Memory for a part of the lent chunks, with a pool and a spill file for the rest.
pub(crate) struct Tier {
    memory_bytes: u64,
    /// Free memory that evictors aim for. They begin when less than half of it is free.
    headroom_bytes: u64,
    slots_most: u64,
    books: Mutex<Books>,
    /// Signalled when memory comes free.
    room: Condvar,
    /// Signalled when evictors have something to do.
    work: Condvar,
    pool: Pool,
    disk: Box<dyn Disk>,
    slots: Mutex<Slots>,
    turns: Turns,
    /// Buffers of fetches from the spill file. Fetches from the pool have their own, and do not
    /// wait for a disk.
    disk_buffers: Buffers,
    pool_buffers: Buffers,
    fetches: Mutex<Histogram<u64>>,
    figures: Figures,
    /// Number of fetches so far; wraps around.
    ticks: AtomicU32,
    last_said: Mutex<Option<Instant>>,
    /// Time of the last log of the figures, and the number of chunks moved until then.
    last_logged: Mutex<(Instant, u64)>,
}

/// Counters for display only, so relaxed.
#[derive(Default)]
struct Figures {
    compressed_chunks: AtomicU64,
    spilled_chunks: AtomicU64,
    evictions: AtomicU64,
    /// Evictions of chunks that a client over shared memory reaches by itself.
    forced_seals: AtomicU64,
    stray_bytes: AtomicU64,
    no_room: AtomicU64,
    spill_errors: AtomicU64,
}

/// Slots and memory that are reserved for an extent, until [`Tier::adopt`] uses them.
pub(crate) struct Kept {
    tier: Arc<Tier>,
    bytes: u64,
    chunks: u64,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.chunks > 0 {
            let mut books = self.tier.books.lock();
            let own_bytes = paging_bytes(self.bytes);
            books.give_table_back(self.chunks, own_bytes);
            drop(books);
            self.tier.room.notify_all();
        }
    }
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tier").finish_non_exhaustive()
    }
}

impl Tier {
    /// Starts a tier with `memory_bytes` bytes of memory, and a spill file in `directory` for
    /// `capacity_bytes`. `weights` has the shares whose weight is not 1.
    pub(crate) fn start(
        memory_bytes: u64,
        capacity_bytes: u64,
        directory: &Path,
        weights: HashMap<Origin, u32>,
    ) -> io::Result<(Arc<Self>, Evictors)> {
        let spill_bytes = (capacity_bytes.checked_next_multiple_of(CHUNK_BYTES))
            .ok_or(io::ErrorKind::InvalidInput)?;
        let disk = SpillFile::create(directory, spill_bytes)?;
        Self::with_disk(memory_bytes, spill_bytes, Box::new(disk), weights)
    }

    fn with_disk(
        memory_bytes: u64,
        spill_bytes: u64,
        disk: Box<dyn Disk>,
        weights: HashMap<Origin, u32>,
    ) -> io::Result<(Arc<Self>, Evictors)> {
        let fetches = Histogram::new_with_bounds(1, 1 << 36, 2).expect("bounds that it takes");
        let pool = Pool::new(memory_bytes / 4)?;
        let slots_most = (spill_bytes / CHUNK_BYTES).min(u64::from(NONE));
        let tier = Arc::new(Self {
            memory_bytes,
            headroom_bytes: (memory_bytes / 16).clamp(1 << 20, 64 << 20),
            slots_most,
            books: Mutex::new(Books::new(OWN_BYTES + pool.table_bytes(), weights)),
            room: Condvar::new(),
            work: Condvar::new(),
            pool,
            disk,
            slots: Mutex::new(Slots::new(slots_most)),
            turns: Turns::new(),
            disk_buffers: Buffers::new(DISK_FETCHES),
            pool_buffers: Buffers::new(POOL_FETCHES),
            fetches: Mutex::new(fetches),
            figures: Figures::default(),
            ticks: AtomicU32::new(0),
            last_said: Mutex::default(),
            last_logged: Mutex::new((Instant::now(), 0)),
        });
        let evictors = Evictors::start(&tier)?;
        Ok((tier, evictors))
    }

    /// Returns the most memory to hold for what is lent.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Reserves slots, and memory for a table, for an extent of `bytes` bytes. Waits a bounded time
    /// for chunks to leave memory if the table has no room, and for moved chunks of discarded
    /// extents to arrive if their slots or tables are needed.
    ///
    /// # Errors
    /// Number of bytes that there still is room for, in the spill file and in memory for their
    /// table.
    pub(crate) fn keep_for(self: &Arc<Self>, bytes: u64) -> Result<Kept, u64> {
        let chunks = bytes.div_ceil(CHUNK_BYTES);
        let own_bytes = paging_bytes(bytes);
        let table_bytes = chunks * TABLE_BYTES_PER_CHUNK + own_bytes;
        let until = Instant::now() + TABLE_PATIENCE;
        let most_bytes = self.memory_bytes - LEFT_TO_POOL_BYTES;
        let mut books = self.books.lock();
        // Tables never leave memory: chunks keep the most of it.
        let most_chunks = |books: &Books, orphans: u64| {
            let slots = (self.slots_most + orphans).saturating_sub(books.slots_kept);
            let orphans_bytes = orphans * TABLE_BYTES_PER_CHUNK;
            let free_bytes = (self.memory_bytes / 4 + orphans_bytes)
                .saturating_sub(books.table_bytes)
                .saturating_sub(own_bytes);
            slots.min(free_bytes / TABLE_BYTES_PER_CHUNK)
        };
        while chunks > most_chunks(&books, 0) {
            let orphans = u64::try_from(books.orphans).unwrap_or(0);
            let could_fit = chunks <= most_chunks(&books, orphans) && !books.stops;
            if !could_fit || self.room.wait_until(&mut books, until).timed_out() {
                return Err(most_chunks(&books, 0) * CHUNK_BYTES);
            }
        }
        books.slots_kept += chunks;
        books.table_bytes += table_bytes;
        books.wanted_bytes += table_bytes;
        let mut is_late = false;
        while books.held_bytes + table_bytes > most_bytes && !is_late && !books.stops {
            self.work.notify_all();
            is_late = self.room.wait_until(&mut books, until).timed_out();
        }
        books.wanted_bytes -= table_bytes;
        let free_bytes = most_bytes.saturating_sub(books.held_bytes);
        if table_bytes > free_bytes {
            books.slots_kept -= chunks;
            books.table_bytes -= table_bytes;
            drop(books);
            self.room.notify_all();
            let most = free_bytes.saturating_sub(own_bytes) / TABLE_BYTES_PER_CHUNK;
            return Err(most * CHUNK_BYTES);
        }
        books.held_bytes += table_bytes;
        drop(books);
        self.room.notify_all();
        self.wake_evictors_if_short();
        Ok(Kept {
            tier: Arc::clone(self),
            bytes,
            chunks,
        })
    }

    /// Makes `memory` a tiered extent, whose chunks count in the share of `tenant`. `kept` is for
    /// as many bytes.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        memory: &ExtentMemory,
        tenant: Tenant,
        mut kept: Kept,
    ) -> Arc<ExtentMemory> {
        kept.chunks = 0;
        let mut books = self.books.lock();
        let mut extent = Weak::new();
        let paged = memory.paged(|file| {
            let made = Arc::new(TieredExtent::new(Arc::clone(self), file));
            extent = Arc::downgrade(&made);
            made
        });
        let entry = Entry {
            extent,
            tenant,
            chunks: 0,
            strays: 0,
        };
        books.join_share(memory.id(), entry);
        paged
    }

    /// Moves an extent to the share of another tenant.
    pub(crate) fn assign(&self, id: ExtentId, tenant: Tenant) {
        let mut books = self.books.lock();
        if let Some(entry) = books.leave_share(id) {
            books.join_share(id, Entry { tenant, ..entry });
        }
    }

    /// Ends extent `id`: no operation can reach its bytes after the return.
    ///
    /// Its memory and slots are free, except those of chunks that are being moved. These follow
    /// when the move ends, perhaps when a disk answers.
    pub(crate) fn discard(&self, id: ExtentId) {
        let extent = self
            .books
            .lock()
            .extents
            .get(&id)
            .map(|entry| entry.extent.clone());
        let Some(extent) = extent.and_then(|extent| extent.upgrade()) else {
            return;
        };
        let (hot, orphans) = extent.discard();
        let chunks = extent.chunks() - orphans;
        let mut books = self.books.lock();
        books.orphans += orphans as i64;
        if books.leave_share(id).is_some() {
            books.held_bytes -= hot * CHUNK_BYTES;
            books.give_table_back(chunks, paging_bytes(extent.bytes()));
        }
        drop(books);
        self.room.notify_all();
    }

    /// Gives back memory that clients over shared memory took by touching absent chunks. Called now
    /// and then.
    ///
    /// A client that keeps to the [words](farpage_wire::segment) takes such memory when a chunk
    /// leaves in the middle of a copy. Until the next call the client's share counts as larger by
    /// that memory, so that the share's own chunks leave first.
    pub(crate) fn punch_strays(&self) {
        let ids: Vec<_> = self.books.lock().extents.keys().copied().collect();
        for id in ids {
            let mut books = self.books.lock();
            let Some(entry) = books.extents.get_mut(&id) else {
                continue;
            };
            let Some(extent) = entry.extent.upgrade() else {
                continue;
            };
            // Under the lock, so that no chunk comes or goes unseen.
            let bytes = extent.stray_bytes(entry.chunks - entry.strays);
            let strays = bytes.div_ceil(CHUNK_BYTES);
            let change = strays as i64 - std::mem::replace(&mut entry.strays, strays) as i64;
            books.count(id, change);
            drop(books);
            if bytes > 0 {
                extent.punch_strays();
                self.figures.stray_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }

    /// Gives back the slot and table of a chunk whose extent was discarded during the chunk's move.
    fn forget_orphan(&self) {
        let mut books = self.books.lock();
        books.give_table_back(1, 0);
        books.orphans -= 1;
        drop(books);
        self.room.notify_all();
    }

    /// Lists the shares of memory, the largest first.
    pub(crate) fn shares(&self) -> Vec<ShareStat> {
        self.books.lock().stat()
    }

    /// Returns figures for people and monitors.
    pub(crate) fn stat(&self) -> TierStat {
        let (held_bytes, hot) = {
            let books = self.books.lock();
            (books.held_bytes, books.chunks())
        };
        let count = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let fetches = self.fetches.lock();
        let figures = &self.figures;
        TierStat {
            memory_bytes: self.memory_bytes,
            held_bytes,
            hot_bytes: hot * CHUNK_BYTES,
            compressed_bytes: count(&figures.compressed_chunks) * CHUNK_BYTES,
            pool_bytes: self.pool.bytes(),
            spilled_bytes: count(&figures.spilled_chunks) * CHUNK_BYTES,
            evictions: count(&figures.evictions),
            fetches: fetches.len(),
            fetch_p50_us: fetches.value_at_quantile(0.5) / 1000,
            fetch_p99_us: fetches.value_at_quantile(0.99) / 1000,
            forced_seals: count(&figures.forced_seals),
            stray_bytes: count(&figures.stray_bytes),
            no_room: count(&figures.no_room),
            spill_errors: count(&figures.spill_errors),
        }
    }

    /// Logs the figures, once per `LOG_EVERY` at most, if chunks have been moved since.
    pub(crate) fn log_figures(&self, now: Instant) {
        let mut last = self.last_logged.lock();
        if now.saturating_duration_since(last.0) < LOG_EVERY {
            return;
        }
        let stat = self.stat();
        let moved = stat.evictions + stat.fetches;
        if std::mem::replace(&mut *last, (now, moved)).1 != moved {
            later(move || {
                tracing::info!(
                    held_bytes = stat.held_bytes,
                    hot_bytes = stat.hot_bytes,
                    compressed_bytes = stat.compressed_bytes,
                    spilled_bytes = stat.spilled_bytes,
                    evictions = stat.evictions,
                    fetches = stat.fetches,
                    fetch_p50_us = stat.fetch_p50_us,
                    fetch_p99_us = stat.fetch_p99_us,
                    no_room = stat.no_room,
                    spill_errors = stat.spill_errors,
                    "where what is lent is"
                );
            });
        }
    }

    /// Counts memory for a chunk before the memory is taken. Waits for room until `until`.
    fn reserve(&self, id: ExtentId, until: Instant) -> Result<(), Absent> {
        let mut books = self.books.lock();
        let most_bytes = self.memory_bytes - LEFT_TO_POOL_BYTES;
        while books.held_bytes + books.wanted_bytes + CHUNK_BYTES > most_bytes {
            self.work.notify_all();
            if self.room.wait_until(&mut books, until).timed_out() {
                drop(books);
                self.count_no_room();
                return Err(Absent::NoRoom);
            }
        }
        books.held_bytes += CHUNK_BYTES;
        books.count(id, 1);
        if self.is_short(&books) {
            self.work.notify_one();
        }
        Ok(())
    }

    fn unreserve(&self, id: ExtentId) {
        let mut books = self.books.lock();
        books.held_bytes -= CHUNK_BYTES;
        books.count(id, -1);
        drop(books);
        self.room.notify_all();
    }

    /// True if an evictor has to begin.
    fn is_short(&self, books: &Books) -> bool {
        self.has_less_than(self.headroom_bytes / 2, books)
    }

    /// True if less than `bytes` is free, beside the memory that tables wait for.
    fn has_less_than(&self, bytes: u64, books: &Books) -> bool {
        books.held_bytes + books.wanted_bytes + bytes > self.memory_bytes
    }

    fn wake_evictors_if_short(&self) {
        if self.is_short(&self.books.lock()) {
            self.work.notify_one();
        }
    }

    /// Counts a chunk's move between places in the figures.
    fn moved(&self, from: Place, to: Place) {
        let figure = |place| match place {
            Place::Compressed => Some(&self.figures.compressed_chunks),
            Place::Spilled => Some(&self.figures.spilled_chunks),
            Place::Hole | Place::Hot | Place::Busy | Place::Orphan => None,
        };
        if let Some(figure) = figure(from) {
            figure.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(figure) = figure(to) {
            figure.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a fetch. Returns the number of fetches so far, never 0.
    fn tick(&self) -> u32 {
        self.ticks
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1)
            .max(1)
    }

    /// True if a chunk fetched at tick `fetched` would still be in memory, had it been brought in:
    /// fewer fetches than memory has chunks have followed.
    fn is_soon(&self, fetched: u32) -> bool {
        let since = self.ticks.load(Ordering::Relaxed).wrapping_sub(fetched);
        fetched != 0 && u64::from(since) < self.memory_bytes / CHUNK_BYTES
    }

    fn count_fetch(&self, took: Duration) {
        self.fetches
            .lock()
            .saturating_record(took.as_nanos() as u64);
    }

    fn count_no_room(&self) {
        self.figures.no_room.fetch_add(1, Ordering::Relaxed);
        self.say("an operation was turned down: no memory came free in time".to_owned());
    }

    fn count_spill_error(&self, what: &str) {
        self.figures.spill_errors.fetch_add(1, Ordering::Relaxed);
        self.say(what.to_owned());
    }

    /// Logs trouble, once per `SAY_EVERY` at most; `stat` has the counts.
    fn say(&self, what: String) {
        let now = Instant::now();
        let mut last = self.last_said.lock();
        if last.is_none_or(|last| now - last >= SAY_EVERY) {
            *last = Some(now);
            later(move || tracing::warn!("{what}"));
        }
    }
}
