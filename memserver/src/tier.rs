//! [`Tier`]: lends more than the server's memory. Unused chunks leave memory, compressed to a pool
//! first and then to a spill file, and come back when they are used.
//!
//! The rule it keeps: memory is counted before it is taken ([`Room`]), and bytes that come back are
//! compared with the hash of those that left ([`Storage`]). [`Mover`] moves chunks, for operations
//! and for the [`Evictors`]. This file begins and ends extents.

mod chunk;
mod disk;
mod evictors;
mod extent;
mod figures;
mod handing;
mod loans;
mod moves;
mod pool;
mod room;
mod shares;
mod storage;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::Origin,
    log::later,
    memory::{ExtentMemory, paging_bytes},
};
use farpage_wire::{ExtentId, ShareStat, TierStat};
use parking_lot::Mutex;

use self::{
    chunk::{CHUNK_BYTES, NONE},
    disk::{Disk, SpillFile},
    extent::TieredExtent,
    figures::Figures,
    moves::{Mover, Tiered},
    room::Room,
    shares::Entry,
    storage::Storage,
};
pub(crate) use self::{
    disk::{Aligned, BLOCK_BYTES},
    evictors::Evictors,
    shares::Tenant,
};

/// The least that `--memory` may be.
pub(crate) const LEAST_MEMORY_BYTES: u64 = 16 << 20;

/// Shortest time between two logs of the figures.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Memory for a part of the lent chunks, with a pool and a spill file for the rest.
pub(crate) struct Tier {
    mover: Arc<Mover>,
    /// Directory of the spill file, and the file's length.
    spill: (PathBuf, u64),
    /// Time of the last log of the figures, and the number of chunks moved until then.
    last_logged: Mutex<(Instant, u64)>,
}

/// Slots and memory that are reserved for an extent, until [`Tier::adopt`] uses them.
pub(crate) struct Kept {
    mover: Arc<Mover>,
    bytes: u64,
    chunks: u64,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.chunks > 0 {
            let own_bytes = paging_bytes(self.bytes);
            self.mover.room.give_table_back(self.chunks, own_bytes);
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
        let disk = Box::new(SpillFile::create(directory, spill_bytes)?);
        let mut tier = Self::make(memory_bytes, spill_bytes, disk, weights)?;
        tier.spill.0 = directory.to_owned();
        let tier = Arc::new(tier);
        let evictors = tier.evict()?;
        Ok((tier, evictors))
    }

    #[cfg(test)]
    fn with_disk(
        memory_bytes: u64,
        spill_bytes: u64,
        disk: Box<dyn Disk>,
        weights: HashMap<Origin, u32>,
    ) -> io::Result<(Arc<Self>, Evictors)> {
        let tier = Arc::new(Self::make(memory_bytes, spill_bytes, disk, weights)?);
        let evictors = tier.evict()?;
        Ok((tier, evictors))
    }

    /// Starts the threads that move chunks out of memory.
    ///
    /// # Errors
    /// The system has no thread.
    pub(crate) fn evict(&self) -> io::Result<Evictors> {
        self.mover.room.books.lock().stops = false;
        Evictors::start(&self.mover)
    }

    fn make(
        memory_bytes: u64,
        spill_bytes: u64,
        disk: Box<dyn Disk>,
        weights: HashMap<Origin, u32>,
    ) -> io::Result<Self> {
        let figures = Arc::new(Figures::new());
        let slots_most = (spill_bytes / CHUNK_BYTES).min(u64::from(NONE));
        let storage = Storage::new(memory_bytes / 4, slots_most, disk, Arc::clone(&figures))?;
        let held_bytes = storage.own_bytes();
        let of_room = Arc::clone(&figures);
        let mover = Arc::new(Mover {
            room: Room::new(memory_bytes, held_bytes, slots_most, weights, of_room),
            storage,
            figures,
        });
        let (spill, last_logged) = (
            (PathBuf::new(), spill_bytes),
            Mutex::new((Instant::now(), 0)),
        );
        Ok(Self {
            mover,
            spill,
            last_logged,
        })
    }

    /// Returns the most memory to hold for what is lent.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.mover.room.memory_bytes
    }

    /// Reserves slots, and memory for a table, for an extent of `bytes` bytes, as
    /// [`Room::keep_for`].
    ///
    /// # Errors
    /// Number of bytes that there still is room for, in the spill file and in memory for their
    /// table.
    pub(crate) fn keep_for(&self, bytes: u64) -> Result<Kept, u64> {
        self.mover.room.keep_for(bytes)?;
        Ok(Kept {
            mover: Arc::clone(&self.mover),
            bytes,
            chunks: bytes.div_ceil(CHUNK_BYTES),
        })
    }

    /// Makes `memory` a tiered extent, whose chunks count in the share of `tenant`. `kept` is for
    /// as many bytes.
    pub(crate) fn adopt(
        &self,
        memory: &ExtentMemory,
        tenant: Tenant,
        mut kept: Kept,
    ) -> Arc<ExtentMemory> {
        kept.chunks = 0;
        let mut books = self.mover.room.books.lock();
        let mut extent = Weak::new();
        let paged = memory.paged(|file| {
            let made = Arc::new(TieredExtent::new(Arc::clone(&self.mover.figures), file));
            extent = Arc::downgrade(&made);
            Arc::new(Tiered {
                mover: Arc::clone(&self.mover),
                extent: made,
            })
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
        let mut books = self.mover.room.books.lock();
        if let Some(entry) = books.leave_share(id) {
            books.join_share(id, Entry { tenant, ..entry });
        }
    }

    /// Ends extent `id`: no operation can reach its bytes after the return.
    ///
    /// Its memory and slots are free, except those of chunks that are being moved. These follow
    /// when the move ends, perhaps when a disk answers.
    pub(crate) fn discard(&self, id: ExtentId) {
        let Mover { room, storage, .. } = &*self.mover;
        let extent = (room.books.lock().extents.get(&id)).map(|entry| entry.extent.clone());
        let Some(extent) = extent.and_then(|extent| extent.upgrade()) else {
            return;
        };
        let (hot, orphans) = extent.discard(|chunk| storage.forget(chunk));
        let chunks = extent.chunks() - orphans;
        let mut books = room.books.lock();
        books.orphans += orphans as i64;
        if books.leave_share(id).is_some() {
            books.held_bytes -= hot * CHUNK_BYTES;
            books.give_table_back(chunks, paging_bytes(extent.bytes()));
        }
        drop(books);
        room.freed.notify_all();
    }

    /// Gives back memory that clients over shared memory took by touching absent chunks. Called now
    /// and then.
    ///
    /// A client that keeps to the [words](farpage_wire::segment) takes such memory when a chunk
    /// leaves in the middle of a copy. Until the next call the client's share counts as larger by
    /// that memory, so that the share's own chunks leave first.
    pub(crate) fn punch_strays(&self) {
        let Mover { room, figures, .. } = &*self.mover;
        let ids: Vec<_> = room.books.lock().extents.keys().copied().collect();
        for id in ids {
            let mut books = room.books.lock();
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
                figures.stray_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }

    /// Lists the shares of memory, the largest first.
    pub(crate) fn shares(&self) -> Vec<ShareStat> {
        self.mover.room.books.lock().stat()
    }

    /// Returns figures for people and monitors.
    pub(crate) fn stat(&self) -> TierStat {
        let Mover {
            room,
            storage,
            figures,
        } = &*self.mover;
        let (held_bytes, hot) = {
            let books = room.books.lock();
            (books.held_bytes, books.chunks())
        };
        let count = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let fetches = figures.fetches.lock();
        TierStat {
            memory_bytes: room.memory_bytes,
            held_bytes,
            hot_bytes: hot * CHUNK_BYTES,
            compressed_bytes: count(&figures.compressed_chunks) * CHUNK_BYTES,
            pool_bytes: storage.pool.bytes(),
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
}
