//! [`Room`]: the memory of the tier, counted before it is taken.
//!
//! The rule it keeps: hot chunks, the pool, buffers and tables together stay within `--memory`. An
//! operation waits for room a bounded time, and is then told that there is none.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::Origin,
    memory::{Absent, paging_bytes},
};
use farpage_wire::ExtentId;
use parking_lot::{Condvar, Mutex};

use super::{
    chunk::{CHUNK_BYTES, PACKED_MOST},
    figures::Figures,
    shares::{Books, TABLE_BYTES_PER_CHUNK},
    storage::EVICTORS,
};

/// Memory that chunks leave to the pool: compressed chunks could not leave a full memory otherwise.
const LEFT_TO_POOL_BYTES: u64 = (EVICTORS * PACKED_MOST) as u64;
/// The longest wait of a lease for the memory of its table.
pub(super) const TABLE_PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Room {
    pub(super) memory_bytes: u64,
    /// Free memory that evictors aim for. They begin when less than half of it is free.
    pub(super) headroom_bytes: u64,
    slots_most: u64,
    pub(super) books: Mutex<Books>,
    /// Signalled when memory comes free.
    pub(super) freed: Condvar,
    /// Signalled when evictors have something to do.
    pub(super) work: Condvar,
    figures: Arc<Figures>,
}

impl Room {
    /// Makes room of `memory_bytes` bytes, of which `held_bytes` are taken, for as many chunks as
    /// the spill file has slots.
    pub(super) fn new(
        memory_bytes: u64,
        held_bytes: u64,
        slots_most: u64,
        weights: HashMap<Origin, u32>,
        figures: Arc<Figures>,
    ) -> Self {
        Self {
            memory_bytes,
            headroom_bytes: (memory_bytes / 16).clamp(1 << 20, 64 << 20),
            slots_most,
            books: Mutex::new(Books::new(held_bytes, weights)),
            freed: Condvar::new(),
            work: Condvar::new(),
            figures,
        }
    }

    /// Reserves slots, and memory for a table, for an extent of `bytes` bytes. Waits a bounded time
    /// for chunks to leave memory if the table has no room, and for moved chunks of discarded
    /// extents to arrive if their slots or tables are needed.
    ///
    /// # Errors
    /// Number of bytes that there still is room for, in the spill file and in memory for their
    /// table.
    pub(super) fn keep_for(&self, bytes: u64) -> Result<(), u64> {
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
            if !could_fit || self.freed.wait_until(&mut books, until).timed_out() {
                return Err(most_chunks(&books, 0) * CHUNK_BYTES);
            }
        }
        books.slots_kept += chunks;
        books.table_bytes += table_bytes;
        books.wanted_bytes += table_bytes;
        let mut is_late = false;
        while books.held_bytes + table_bytes > most_bytes && !is_late && !books.stops {
            self.work.notify_all();
            is_late = self.freed.wait_until(&mut books, until).timed_out();
        }
        books.wanted_bytes -= table_bytes;
        let free_bytes = most_bytes.saturating_sub(books.held_bytes);
        if table_bytes > free_bytes {
            books.slots_kept -= chunks;
            books.table_bytes -= table_bytes;
            drop(books);
            self.freed.notify_all();
            let most = free_bytes.saturating_sub(own_bytes) / TABLE_BYTES_PER_CHUNK;
            return Err(most * CHUNK_BYTES);
        }
        books.held_bytes += table_bytes;
        drop(books);
        self.freed.notify_all();
        self.wake_evictors_if_short();
        Ok(())
    }

    /// Gives back what [`keep_for`](Self::keep_for) reserved, for `chunks` of the extent's chunks.
    /// `own_bytes` is for words and marks.
    pub(super) fn give_table_back(&self, chunks: u64, own_bytes: u64) {
        self.books.lock().give_table_back(chunks, own_bytes);
        self.freed.notify_all();
    }

    /// Gives back the slot and table of a chunk whose extent was discarded during the chunk's move.
    pub(super) fn forget_orphan(&self) {
        let mut books = self.books.lock();
        books.give_table_back(1, 0);
        books.orphans -= 1;
        drop(books);
        self.freed.notify_all();
    }

    /// Counts memory for a chunk before the memory is taken. Waits for room until `until`.
    pub(super) fn reserve(&self, id: ExtentId, until: Instant) -> Result<(), Absent> {
        let mut books = self.books.lock();
        let most_bytes = self.memory_bytes - LEFT_TO_POOL_BYTES;
        while books.held_bytes + books.wanted_bytes + CHUNK_BYTES > most_bytes {
            self.work.notify_all();
            if self.freed.wait_until(&mut books, until).timed_out() {
                drop(books);
                self.figures.count_no_room();
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

    pub(super) fn unreserve(&self, id: ExtentId) {
        let mut books = self.books.lock();
        books.held_bytes -= CHUNK_BYTES;
        books.count(id, -1);
        drop(books);
        self.freed.notify_all();
    }

    /// True if an evictor has to begin.
    pub(super) fn is_short(&self, books: &Books) -> bool {
        self.has_less_than(self.headroom_bytes / 2, books)
    }

    /// True if less than `bytes` is free, beside the memory that tables wait for.
    pub(super) fn has_less_than(&self, bytes: u64, books: &Books) -> bool {
        books.held_bytes + books.wanted_bytes + bytes > self.memory_bytes
    }

    pub(super) fn wake_evictors_if_short(&self) {
        if self.is_short(&self.books.lock()) {
            self.work.notify_one();
        }
    }

    /// Takes `bytes` of memory for the pool. Returns false if there is no room.
    pub(super) fn charge(&self, bytes: u64) -> bool {
        let mut books = self.books.lock();
        let has_room = books.held_bytes + bytes <= self.memory_bytes;
        if has_room {
            books.held_bytes += bytes;
        }
        has_room
    }

    /// Gives back `bytes` of the pool's memory.
    pub(super) fn discharge(&self, bytes: u64) {
        self.books.lock().held_bytes -= bytes;
        self.freed.notify_all();
    }
}
