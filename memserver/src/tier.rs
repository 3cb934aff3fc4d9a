//! [`Tier`]: lends more than the server's memory. Chunks that nobody uses leave it, compressed to a
//! pool first and then to a spill file, and come back when they are used.
//!
//! The rule it keeps: memory is counted before it is taken. Hot chunks, the pool, buffers and
//! tables together stay within `--memory`. Who needs a chunk waits for room a bounded time, and is
//! told that there is none. Bytes that come back are compared with the hash of those that left.
//!
//! Fairness: a chunk always leaves the share that has the most memory, a share being what one
//! session is lent. So a session that goes through much pushes out its own chunks, and who has no
//! more than an equal part keeps it.

mod disk;
mod extent;
mod pool;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt, io,
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_fabric::{
    log::later,
    memory::{Absent, ExtentMemory},
};
use farpage_wire::{ExtentId, SessionId, TierStat};
use hdrhistogram::Histogram;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use twox_hash::XxHash3_128;

use self::{
    disk::{Aligned, BLOCK_BYTES, Disk, SpillFile},
    extent::{CHUNK_BYTES, Chunk, NONE, Place, SEGMENT_CHUNKS, TieredExtent},
    pool::{Owner, Pool},
};

/// The least that `--memory` may be.
pub(crate) const LEAST_MEMORY_BYTES: u64 = 16 << 20;

/// Threads that move chunks out, so that a disk has more than one write to do.
const EVICTORS: usize = 4;
/// Chunks that are fetched from the spill file at once.
const DISK_FETCHES: usize = 8;
/// And from the pool.
const POOL_FETCHES: usize = 4;
/// Buffers of both, and the tables of the compressor: counted from the start.
const OWN_BYTES: u64 = 4 << 20;
/// What a chunk that is lent takes for its entry, a free slot's number, and the kernel's page table
/// of 16 pages of 8 bytes.
const TABLE_BYTES_PER_CHUNK: u64 = 176;
/// A compressed chunk that is longer is stored as it is: it would save too little.
const PACKED_MOST: usize = CHUNK_BYTES as usize / 4 * 3;
/// Memory that chunks leave to the pool, or what compresses could not leave a full memory.
const LEFT_TO_POOL_BYTES: u64 = (EVICTORS * PACKED_MOST) as u64;
/// How long an evictor that found nothing to do waits until it looks again.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a lease waits for the memory that its table takes.
const TABLE_PATIENCE: Duration = Duration::from_secs(5);
/// How long the end of a server waits for its evictors, which may wait for a disk.
const JOIN: Duration = Duration::from_secs(5);
/// Figures are logged so often at most.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// The same trouble is logged so often at most.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// See the module's text.
pub(crate) struct Tier {
    memory_bytes: u64,
    /// Evictors begin when half of it is free, and go on until all of it is.
    headroom_bytes: u64,
    slots_most: u64,
    books: Mutex<Books>,
    /// Memory came free.
    room: Condvar,
    /// Evictors have something to do.
    work: Condvar,
    pool: Pool,
    disk: Box<dyn Disk>,
    slots: Mutex<Slots>,
    /// For fetches from the spill file, and for those from the pool, which shall not wait for a
    /// disk.
    disk_buffers: Buffers,
    pool_buffers: Buffers,
    fetches: Mutex<Histogram<u64>>,
    figures: Figures,
    last_said: Mutex<Option<Instant>>,
    /// When the figures were logged last, and how many chunks had been moved by then.
    last_logged: Mutex<(Instant, u64)>,
}

/// Only ever read for display, so relaxed.
#[derive(Default)]
struct Figures {
    compressed_chunks: AtomicU64,
    spilled_chunks: AtomicU64,
    evictions: AtomicU64,
    no_room: AtomicU64,
    spill_errors: AtomicU64,
}

/// Who has how much memory.
#[derive(Default)]
struct Books {
    held_bytes: u64,
    /// What tables wait for. Chunks that are to be fetched wait behind them.
    wanted_bytes: u64,
    /// Slots that lent chunks may need.
    slots_kept: u64,
    extents: HashMap<ExtentId, Entry>,
    shares: HashMap<SessionId, Share>,
    stops: bool,
}

/// Slots and memory that are kept for an extent, until they are [used](Tier::adopt).
pub(crate) struct Kept {
    tier: Arc<Tier>,
    chunks: u64,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.chunks > 0 {
            let mut books = self.tier.books.lock();
            books.slots_kept -= self.chunks;
            books.held_bytes -= self.chunks * TABLE_BYTES_PER_CHUNK;
            drop(books);
            self.tier.room.notify_all();
        }
    }
}

struct Entry {
    extent: Weak<TieredExtent>,
    share: SessionId,
    /// Hot, or about to be.
    chunks: u64,
}

/// What one session is lent.
#[derive(Default)]
struct Share {
    chunks: u64,
    extents: Vec<ExtentId>,
    /// The clock's hand: an extent's place, and a segment of it.
    hand: (usize, usize),
}

struct Slots {
    most: u32,
    free: Vec<u32>,
    /// The first that was never used.
    fresh: u32,
    /// Could not be written. Taken again when there is no other, the one that failed first before
    /// the rest.
    failed: VecDeque<u32>,
    /// Hold bytes that could not be read back as they were.
    suspect: HashSet<u32>,
}

/// Buffers that are lent.
struct Buffers {
    free: Mutex<Vec<Transfer>>,
    came_back: Condvar,
}

/// Buffers for moving one chunk.
struct Transfer {
    plain: Vec<u8>,
    packed: Aligned,
    table: CompressTable,
}

/// The threads that move chunks out; dropping it ends them.
pub(crate) struct Evictors {
    tier: Arc<Tier>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tier").finish_non_exhaustive()
    }
}

impl Transfer {
    fn new() -> Self {
        let chunk = CHUNK_BYTES as usize;
        let most = get_maximum_output_size(chunk).next_multiple_of(BLOCK_BYTES);
        Self {
            plain: vec![0; chunk],
            packed: Aligned::new(most),
            table: CompressTable::default(),
        }
    }
}

impl Buffers {
    fn new(count: usize) -> Self {
        Self {
            free: Mutex::new((0..count).map(|_| Transfer::new()).collect()),
            came_back: Condvar::new(),
        }
    }
}

impl Tier {
    /// Memory of `memory_bytes` bytes, and a spill file in `directory` for `capacity_bytes`.
    pub(crate) fn start(
        memory_bytes: u64,
        capacity_bytes: u64,
        directory: &Path,
    ) -> io::Result<(Arc<Self>, Evictors)> {
        let spill_bytes = (capacity_bytes.checked_next_multiple_of(CHUNK_BYTES))
            .ok_or(io::ErrorKind::InvalidInput)?;
        let disk = SpillFile::create(directory, spill_bytes)?;
        Self::with_disk(memory_bytes, spill_bytes, Box::new(disk))
    }

    fn with_disk(
        memory_bytes: u64,
        spill_bytes: u64,
        disk: Box<dyn Disk>,
    ) -> io::Result<(Arc<Self>, Evictors)> {
        let fetches = Histogram::new_with_bounds(1, 1 << 36, 2).expect("bounds that it takes");
        let pool = Pool::new(memory_bytes / 4)?;
        let slots_most = (spill_bytes / CHUNK_BYTES).min(u64::from(NONE));
        let tier = Arc::new(Self {
            memory_bytes,
            headroom_bytes: (memory_bytes / 16).clamp(1 << 20, 64 << 20),
            slots_most,
            books: Mutex::new(Books {
                held_bytes: OWN_BYTES + pool.table_bytes(),
                ..Books::default()
            }),
            room: Condvar::new(),
            work: Condvar::new(),
            pool,
            disk,
            slots: Mutex::new(Slots::new(slots_most)),
            disk_buffers: Buffers::new(DISK_FETCHES),
            pool_buffers: Buffers::new(POOL_FETCHES),
            fetches: Mutex::new(fetches),
            figures: Figures::default(),
            last_said: Mutex::default(),
            last_logged: Mutex::new((Instant::now(), 0)),
        });
        let mut evictors = Evictors {
            tier: Arc::clone(&tier),
            threads: Vec::new(),
        };
        for _ in 0..EVICTORS {
            let tier = Arc::clone(&tier);
            let thread = thread::Builder::new().name("farpage-tier".to_owned());
            (evictors.threads).push(thread.spawn(move || tier.keep_room())?);
        }
        Ok((tier, evictors))
    }

    /// Keeps slots, and memory for a table, for an extent of so many bytes. Chunks have to leave
    /// memory for a table that it has no room for, which is waited for.
    ///
    /// # Errors
    /// How many bytes there still is room for, in the spill file and in memory for their table.
    pub(crate) fn keep_for(self: &Arc<Self>, bytes: u64) -> Result<Kept, u64> {
        let chunks = bytes.div_ceil(CHUNK_BYTES);
        let table_bytes = chunks * TABLE_BYTES_PER_CHUNK;
        let until = Instant::now() + TABLE_PATIENCE;
        let most_bytes = self.memory_bytes - LEFT_TO_POOL_BYTES;
        let mut books = self.books.lock();
        // Tables never leave memory: chunks keep the most of it.
        let most = (self.slots_most).min(self.memory_bytes / 4 / TABLE_BYTES_PER_CHUNK);
        let most = most.saturating_sub(books.slots_kept);
        if chunks > most {
            return Err(most * CHUNK_BYTES);
        }
        books.slots_kept += chunks;
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
            drop(books);
            self.room.notify_all();
            return Err(free_bytes / TABLE_BYTES_PER_CHUNK * CHUNK_BYTES);
        }
        books.held_bytes += table_bytes;
        drop(books);
        self.room.notify_all();
        self.wake_evictors_if_short();
        Ok(Kept {
            tier: Arc::clone(self),
            chunks,
        })
    }

    /// The same memory with a place for all of its chunks, as a part of the session's share. `kept`
    /// is for as many bytes.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        memory: &ExtentMemory,
        session: SessionId,
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
            share: session,
            chunks: 0,
        };
        books.extents.insert(memory.id(), entry);
        let share = books.shares.entry(session).or_default();
        share.extents.push(memory.id());
        paged
    }

    /// Moves an extent to the share of another session.
    pub(crate) fn assign(&self, id: ExtentId, session: SessionId) {
        let mut books = self.books.lock();
        let Some(mut entry) = books.leave_share(id) else {
            return;
        };
        entry.share = session;
        let share = books.shares.entry(session).or_default();
        share.chunks += entry.chunks;
        share.extents.push(id);
        books.extents.insert(id, entry);
    }

    /// Ends an extent: nobody can reach its bytes any more when it returns.
    ///
    /// What it took is free, but for chunks that are on their way. These follow, perhaps when a
    /// disk answers.
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
        if books.leave_share(id).is_some() {
            books.held_bytes -= hot * CHUNK_BYTES + chunks * TABLE_BYTES_PER_CHUNK;
            books.slots_kept -= chunks;
        }
        drop(books);
        self.room.notify_all();
    }

    /// Gives back the last of what a chunk took whose extent was discarded while it was on its way.
    fn forget_orphan(&self) {
        let mut books = self.books.lock();
        books.held_bytes -= TABLE_BYTES_PER_CHUNK;
        books.slots_kept -= 1;
        drop(books);
        self.room.notify_all();
    }

    /// Figures for people and monitors.
    pub(crate) fn stat(&self) -> TierStat {
        let (held_bytes, hot) = {
            let books = self.books.lock();
            let hot: u64 = books.shares.values().map(|share| share.chunks).sum();
            (books.held_bytes, hot)
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
            no_room: count(&figures.no_room),
            spill_errors: count(&figures.spill_errors),
        }
    }

    /// Logs the figures if the last time was a while ago and chunks have been moved since. To be
    /// called now and then.
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

    /// Counts memory for a chunk before it is taken, and waits for it until `until`.
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

    /// Whether an evictor has to begin.
    fn is_short(&self, books: &Books) -> bool {
        self.has_less_than(self.headroom_bytes / 2, books)
    }

    /// Whether less is free, beside what tables wait for.
    fn has_less_than(&self, bytes: u64, books: &Books) -> bool {
        books.held_bytes + books.wanted_bytes + bytes > self.memory_bytes
    }

    fn wake_evictors_if_short(&self) {
        if self.is_short(&self.books.lock()) {
            self.work.notify_one();
        }
    }

    /// What an evictor does until the end.
    fn keep_room(&self) {
        let mut buffer = Transfer::new();
        let mut books = self.books.lock();
        while !books.stops {
            if !self.is_short(&books) {
                self.work.wait(&mut books);
                continue;
            }
            // Many at once, so that most fetches meet no evictor.
            while !books.stops && self.has_less_than(self.headroom_bytes, &books) {
                let made_room = MutexGuard::unlocked(&mut books, || self.make_room(&mut buffer));
                if !made_room && !books.stops {
                    self.work.wait_for(&mut books, PAUSE);
                }
            }
        }
    }

    /// Moves something out. `false`: there was nothing, or it failed.
    fn make_room(&self, buffer: &mut Transfer) -> bool {
        let trimmed = self.pool.trim(self.headroom_bytes / 4);
        if trimmed > 0 {
            self.books.lock().held_bytes -= trimmed;
            self.room.notify_all();
            return true;
        }
        if self.pool.is_nearly_full() && self.demote_one(buffer) {
            return true;
        }
        let victim = self.books.lock().victim();
        match victim {
            Some((extent, chunk)) => {
                let is_out = extent.evict(chunk, buffer);
                match is_out {
                    true => drop(self.figures.evictions.fetch_add(1, Ordering::Relaxed)),
                    false => self.books.lock().pass_by(extent.id(), chunk),
                }
                is_out
            }
            None => self.demote_one(buffer),
        }
    }

    fn demote_one(&self, buffer: &mut Transfer) -> bool {
        let Some((Owner { extent, chunk }, cell)) = self.pool.oldest() else {
            return false;
        };
        (extent.upgrade()).is_some_and(|extent| extent.demote(chunk, cell, buffer))
    }

    /// Stores the bytes of `buffer.plain`, and returns what the chunk is once its memory is given
    /// back. `was` is the chunk while it was hot: its slot is free afterwards unless it is used on.
    fn pack(
        &self,
        extent: &Arc<TieredExtent>,
        chunk: usize,
        was: &Chunk,
        buffer: &mut Transfer,
    ) -> Result<Chunk, ()> {
        let hash = hash_of(&buffer.plain);
        let is_zero = buffer.plain.iter().all(|byte| *byte == 0);
        if was.slot != NONE && was.hash == hash && !is_zero {
            // The slot has these bytes already.
            return Ok(Chunk {
                place: Place::Spilled,
                ..*was
            });
        }
        self.forget(was);
        if is_zero {
            return Ok(Chunk::default());
        }
        let Transfer {
            plain,
            packed,
            table,
        } = buffer;
        let packed_bytes = compress_into_with_table(plain, packed, table)
            .expect("the buffer takes the worst case");
        let gone = Chunk {
            hash,
            ..Chunk::default()
        };
        if packed_bytes > PACKED_MOST {
            packed[..plain.len()].copy_from_slice(plain);
            return self.spill(CHUNK_BYTES as u32, packed, gone);
        }
        let owner = Owner {
            extent: Arc::downgrade(extent),
            chunk,
        };
        match self
            .pool
            .put(&packed[..packed_bytes], owner, |bytes| self.charge(bytes))
        {
            Some(cell) => Ok(Chunk {
                place: Place::Compressed,
                stored_bytes: packed_bytes as u32,
                cell,
                ..gone
            }),
            None => self.spill(packed_bytes as u32, packed, gone),
        }
    }

    /// Takes memory for the pool if there is some.
    fn charge(&self, bytes: u64) -> bool {
        let mut books = self.books.lock();
        let has_room = books.held_bytes + bytes <= self.memory_bytes;
        if has_room {
            books.held_bytes += bytes;
        }
        has_room
    }

    /// Moves what the pool has of a chunk to the spill file.
    fn spill_packed(&self, was: &Chunk, buffer: &mut Transfer) -> Result<Chunk, ()> {
        let len = was.stored_bytes as usize;
        (self.pool.get(was.cell, &mut buffer.packed[..len]))
            .map_err(|error| self.say(format!("cannot read the server's memory: {error}")))?;
        let gone = Chunk {
            hash: was.hash,
            ..Chunk::default()
        };
        self.spill(was.stored_bytes, &mut buffer.packed, gone)
    }

    /// Writes the first `stored_bytes` of `packed` to a slot.
    fn spill(&self, stored_bytes: u32, packed: &mut [u8], gone: Chunk) -> Result<Chunk, ()> {
        let len = stored_bytes as usize;
        let whole = len.next_multiple_of(BLOCK_BYTES);
        packed[len..whole].fill(0);
        let slot = self.slots.lock().take();
        let at = u64::from(slot) * CHUNK_BYTES;
        if let Err(error) = self.disk.write(at, &packed[..whole]) {
            self.slots.lock().failed.push_back(slot);
            self.count_spill_error(&format!("cannot write to the spill file: {error}"));
            return Err(());
        }
        Ok(Chunk {
            place: Place::Spilled,
            stored_bytes,
            slot,
            ..gone
        })
    }

    /// Fills `buffer.plain` with the bytes of a chunk that is compressed or spilled.
    fn unpack(&self, was: &Chunk, buffer: &mut Transfer) -> Result<(), ()> {
        let len = was.stored_bytes as usize;
        let Transfer { plain, packed, .. } = buffer;
        let read = match was.place {
            Place::Compressed => self.pool.get(was.cell, &mut packed[..len]),
            _ => {
                let at = u64::from(was.slot) * CHUNK_BYTES;
                self.disk
                    .read(at, &mut packed[..len.next_multiple_of(BLOCK_BYTES)])
            }
        };
        if let Err(error) = read {
            self.suspect(was);
            self.count_spill_error(&format!("cannot read back what left memory: {error}"));
            return Err(());
        }
        let is_whole = match len == plain.len() {
            true => {
                plain.copy_from_slice(&packed[..len]);
                true
            }
            false => decompress_into(&packed[..len], plain).is_ok_and(|bytes| bytes == plain.len()),
        };
        if !is_whole || hash_of(plain) != was.hash {
            self.suspect(was);
            self.count_spill_error("what left memory came back changed");
            return Err(());
        }
        Ok(())
    }

    /// Remembers that a slot did not give back what it was given.
    fn suspect(&self, was: &Chunk) {
        if was.place == Place::Spilled {
            self.slots.lock().suspect.insert(was.slot);
        }
    }

    /// Frees what a chunk is stored in.
    fn forget(&self, chunk: &Chunk) {
        if chunk.place == Place::Compressed {
            self.pool.free(chunk.cell);
        }
        if chunk.slot != NONE {
            self.slots.lock().give_back(chunk.slot);
        }
    }

    /// Lends a buffer for a fetch from `place`, and waits for one until `until`.
    fn with_buffer<T>(
        &self,
        place: Place,
        until: Instant,
        work: impl FnOnce(&mut Transfer) -> Result<T, Absent>,
    ) -> Result<T, Absent> {
        let Buffers { free, came_back } = match place {
            Place::Compressed => &self.pool_buffers,
            _ => &self.disk_buffers,
        };
        let mut buffers = free.lock();
        let mut buffer = loop {
            if let Some(buffer) = buffers.pop() {
                break buffer;
            }
            if came_back.wait_until(&mut buffers, until).timed_out() {
                drop(buffers);
                self.count_no_room();
                return Err(Absent::NoRoom);
            }
        };
        drop(buffers);
        let done = work(&mut buffer);
        free.lock().push(buffer);
        came_back.notify_one();
        done
    }

    /// Counts a chunk where it is now.
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

    /// Logs trouble, and not too much of it: `stat` has the counts.
    fn say(&self, what: String) {
        let now = Instant::now();
        let mut last = self.last_said.lock();
        if last.is_none_or(|last| now - last >= SAY_EVERY) {
            *last = Some(now);
            later(move || tracing::warn!("{what}"));
        }
    }
}

fn hash_of(bytes: &[u8]) -> [u64; 2] {
    let hash = XxHash3_128::oneshot(bytes);
    [hash as u64, (hash >> 64) as u64]
}

impl Books {
    /// Counts a chunk of an extent that is hot, or no longer.
    fn count(&mut self, id: ExtentId, change: i64) {
        if let Some(entry) = self.extents.get_mut(&id) {
            entry.chunks = entry.chunks.wrapping_add_signed(change);
            let share = self.shares.get_mut(&entry.share);
            let share = share.expect("an extent has a share");
            share.chunks = share.chunks.wrapping_add_signed(change);
        }
    }

    /// Takes an extent out of its share; who has no extents has no share.
    fn leave_share(&mut self, id: ExtentId) -> Option<Entry> {
        let entry = self.extents.remove(&id)?;
        let share = self.shares.get_mut(&entry.share);
        let share = share.expect("an extent has a share");
        share.chunks -= entry.chunks;
        share.extents.retain(|other| *other != id);
        if share.extents.is_empty() {
            self.shares.remove(&entry.share);
        }
        Some(entry)
    }

    /// A chunk of the largest share that was not used for a turn of its clock.
    fn victim(&mut self) -> Option<(Arc<TieredExtent>, usize)> {
        let share = self.shares.values_mut().max_by_key(|share| share.chunks)?;
        let Share { extents, hand, .. } = share;
        // In the first whole turn all may be young, in the second only those that were used
        // meanwhile.
        let mut turns = 0;
        while turns <= 2 {
            let (at, segment) = *hand;
            let Some(id) = extents.get(at) else {
                *hand = (0, 0);
                turns += 1;
                continue;
            };
            if let Some(extent) = self.extents[id].extent.upgrade() {
                for segment in segment..extent.segments() {
                    if let Some(chunk) = extent.take_cold(segment) {
                        *hand = (at, segment);
                        return Some((extent, chunk));
                    }
                }
            }
            *hand = (at + 1, 0);
        }
        None
    }

    /// Moves the clock's hand on if it is still at the segment of a chunk that could not be stored.
    /// The others there are likely to fail as well.
    fn pass_by(&mut self, id: ExtentId, chunk: usize) {
        let Some(entry) = self.extents.get(&id) else {
            return;
        };
        let share = self.shares.get_mut(&entry.share);
        let Share { extents, hand, .. } = share.expect("an extent has a share");
        let segment = chunk / SEGMENT_CHUNKS;
        if extents.get(hand.0) == Some(&id) && hand.1 == segment {
            hand.1 += 1;
        }
    }
}

impl Slots {
    fn new(most: u64) -> Self {
        Self {
            most: most as u32,
            free: Vec::new(),
            fresh: 0,
            failed: VecDeque::new(),
            suspect: HashSet::new(),
        }
    }

    /// Nobody has the slot any more.
    fn give_back(&mut self, slot: u32) {
        match self.suspect.remove(&slot) {
            true => self.failed.push_back(slot),
            false => self.free.push(slot),
        }
    }

    /// A slot that nobody has. There is one for each chunk that is lent.
    fn take(&mut self) -> u32 {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        if self.fresh < self.most {
            self.fresh += 1;
            return self.fresh - 1;
        }
        let slot = self.failed.pop_front();
        slot.expect("a chunk that is lent has a slot")
    }
}

impl Drop for Evictors {
    fn drop(&mut self) {
        self.tier.books.lock().stops = true;
        self.tier.work.notify_all();
        let until = Instant::now() + JOIN;
        for thread in self.threads.drain(..) {
            // There is no join with an end.
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            match thread.is_finished().then(|| thread.join()) {
                Some(Ok(())) => {}
                Some(Err(_)) => {
                    later(|| tracing::error!("an evictor panicked; its message is above"));
                }
                None => later(|| {
                    tracing::warn!(
                        "an evictor did not end within {JOIN:?}: the disk does not answer"
                    );
                }),
            }
        }
    }
}
