//! [`Storage`]: chunks that left memory, compressed in the pool or in a slot of the spill file.
//!
//! The rule it keeps: bytes that come back are compared with the hash of those that left.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::memory::Absent;
use lz4_flex::block::{compress_into_with_table, decompress_into};
use parking_lot::Mutex;
use twox_hash::XxHash3_128;

use super::{
    chunk::{CHUNK_BYTES, Chunk, NONE, PACKED_MOST, Place},
    disk::{BLOCK_BYTES, Disk},
    figures::Figures,
    loans::{Loans, Transfer},
    pool::{Owner, Pool},
};
use crate::handover::{HandedPool, HandedSlots, HandoverError};

/// Number of evictors. Several keep a disk busy, and one is left when the disk does not answer.
pub(super) const EVICTORS: usize = 5;
/// The longest wait of an evictor for a turn at the disk: several writes of a sound disk. Its chunk
/// then stays hot, and the clock goes on to the next segment.
const PATIENCE: Duration = Duration::from_millis(20);

/// Number of chunks that are fetched from the spill file at once.
pub(super) const DISK_FETCHES: usize = 8;
/// Number of chunks that are fetched from the pool at once.
const POOL_FETCHES: usize = 4;
/// Memory of the fetch buffers and the compressor's tables, counted from the start.
const OWN_BYTES: u64 = 4 << 20;

pub(super) struct Storage {
    pub(super) pool: Pool,
    disk: Box<dyn Disk>,
    pub(super) slots: Mutex<Slots>,
    /// Rights to write to the spill file. One evictor never has any: a disk may not answer, and
    /// chunks that leave memory without it (zeros, compressible or unchanged ones) must leave all
    /// the same.
    turns: Loans<()>,
    /// Buffers of fetches from the spill file. Fetches from the pool have their own, and do not
    /// wait for a disk.
    pub(super) disk_buffers: Loans<Transfer>,
    pool_buffers: Loans<Transfer>,
    figures: Arc<Figures>,
}

impl Storage {
    /// Makes storage with a pool of `pool_bytes` bytes, and a spill file of `slots_most` slots.
    pub(super) fn new(
        pool_bytes: u64,
        slots_most: u64,
        disk: Box<dyn Disk>,
        figures: Arc<Figures>,
    ) -> io::Result<Self> {
        Ok(Self {
            pool: Pool::new(pool_bytes)?,
            disk,
            slots: Mutex::new(Slots::new(slots_most)),
            turns: Loans::new(EVICTORS - 1, || ()),
            disk_buffers: Loans::new(DISK_FETCHES, Transfer::new),
            pool_buffers: Loans::new(POOL_FETCHES, Transfer::new),
            figures,
        })
    }

    /// Takes over the pool and the slots of an earlier process. Nothing was taken yet.
    pub(super) fn take_over(
        &mut self,
        slots: HandedSlots,
        pool: HandedPool,
        memory: OwnedFd,
    ) -> Result<(), HandoverError> {
        let mine = self.slots.get_mut();
        let all = slots.free.iter().chain(&slots.failed);
        if slots.fresh > mine.most || all.chain(&slots.suspect).any(|it| *it >= slots.fresh) {
            return Err(HandoverError::State("a slot is outside".to_owned()));
        }
        *mine = Slots {
            most: mine.most,
            free: slots.free,
            fresh: slots.fresh,
            failed: slots.failed.into(),
            suspect: slots.suspect.into_iter().collect(),
        };
        self.pool.take_over(pool, memory)
    }

    /// Returns the spill file's descriptor.
    pub(super) fn disk(&self) -> Option<BorrowedFd<'_>> {
        self.disk.descriptor()
    }

    /// Returns the slots that hold nothing.
    pub(super) fn hand_over(&self) -> HandedSlots {
        let slots = self.slots.lock();
        HandedSlots {
            fresh: slots.fresh,
            free: slots.free.clone(),
            failed: slots.failed.iter().copied().collect(),
            suspect: slots.suspect.iter().copied().collect(),
        }
    }

    /// Returns the memory that tables and buffers take at most.
    pub(super) fn own_bytes(&self) -> u64 {
        OWN_BYTES + self.pool.table_bytes()
    }

    /// Stores the bytes of `buffer.plain`. Returns the chunk as it is once its memory is given
    /// back. `was` is the hot chunk of `owner`: its slot is freed, unless it has the same bytes
    /// already. `charge` takes memory for the pool, and returns false if there is no room.
    pub(super) fn pack(
        &self,
        owner: Owner,
        was: &Chunk,
        buffer: &mut Transfer,
        charge: impl FnOnce(u64) -> bool,
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
        match self.pool.put(&packed[..packed_bytes], owner, charge) {
            Some(cell) => Ok(Chunk {
                place: Place::Compressed,
                stored_bytes: packed_bytes as u32,
                cell,
                ..gone
            }),
            None => self.spill(packed_bytes as u32, packed, gone),
        }
    }

    /// Copies a chunk's bytes from the pool to the spill file.
    pub(super) fn spill_packed(&self, was: &Chunk, buffer: &mut Transfer) -> Result<Chunk, ()> {
        let len = was.stored_bytes as usize;
        (self.pool.get(was.cell, &mut buffer.packed[..len])).map_err(|error| {
            self.figures
                .say(format!("cannot read the server's memory: {error}"))
        })?;
        let gone = Chunk {
            hash: was.hash,
            ..Chunk::default()
        };
        self.spill(was.stored_bytes, &mut buffer.packed, gone)
    }

    /// Writes the first `stored_bytes` of `packed` to a slot. Fails without a write if the disk is
    /// busy for too long.
    fn spill(&self, stored_bytes: u32, packed: &mut [u8], gone: Chunk) -> Result<Chunk, ()> {
        let len = stored_bytes as usize;
        let whole = len.next_multiple_of(BLOCK_BYTES);
        packed[len..whole].fill(0);
        let write = |_: &mut ()| {
            let slot = self.slots.lock().take();
            let written = (self.disk).write(u64::from(slot) * CHUNK_BYTES, &packed[..whole]);
            written.map(|()| slot).map_err(|error| {
                self.slots.lock().failed.push_back(slot);
                self.figures
                    .count_spill_error(&format!("cannot write to the spill file: {error}"));
            })
        };
        let slot = self
            .turns
            .lend(Instant::now() + PATIENCE, write)
            .ok_or(())??;
        Ok(Chunk {
            place: Place::Spilled,
            stored_bytes,
            slot,
            ..gone
        })
    }

    /// Fills `buffer.plain` with the bytes of a chunk that is compressed or spilled.
    pub(super) fn unpack(&self, was: &Chunk, buffer: &mut Transfer) -> Result<(), ()> {
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
            self.figures
                .count_spill_error(&format!("cannot read back what left memory: {error}"));
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
            self.figures
                .count_spill_error("what left memory came back changed");
            return Err(());
        }
        Ok(())
    }

    /// Marks the slot of `was` as suspect: its bytes did not come back as they were written.
    fn suspect(&self, was: &Chunk) {
        if was.place == Place::Spilled {
            self.slots.lock().suspect.insert(was.slot);
        }
    }

    /// Frees the cells and the slot of `chunk`.
    pub(super) fn forget(&self, chunk: &Chunk) {
        if chunk.place == Place::Compressed {
            self.pool.free(chunk.cell);
        }
        if chunk.slot != NONE {
            self.slots.lock().give_back(chunk.slot);
        }
    }

    /// Lends a buffer for a fetch from `place`, and waits for one until `until`.
    pub(super) fn with_buffer<T>(
        &self,
        place: Place,
        until: Instant,
        work: impl FnOnce(&mut Transfer) -> Result<T, Absent>,
    ) -> Result<T, Absent> {
        let buffers = match place {
            Place::Compressed => &self.pool_buffers,
            _ => &self.disk_buffers,
        };
        buffers.lend(until, work).unwrap_or_else(|| {
            self.figures.count_no_room();
            Err(Absent::NoRoom)
        })
    }
}

/// The free places of the spill file. There is a slot for each chunk that is lent. A slot that
/// failed is used again only when there is no other.
pub(super) struct Slots {
    most: u32,
    pub(super) free: Vec<u32>,
    /// Number of the first slot that was never used.
    pub(super) fresh: u32,
    /// Slots that could not be written. Taken again when there is no other, in the order of their
    /// failures.
    pub(super) failed: VecDeque<u32>,
    /// Slots whose bytes could not be read back as they were written.
    pub(super) suspect: HashSet<u32>,
}

impl Slots {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most: most as u32,
            free: Vec::new(),
            fresh: 0,
            failed: VecDeque::new(),
            suspect: HashSet::new(),
        }
    }

    /// Gives `slot` back. A suspect slot counts as failed.
    pub(super) fn give_back(&mut self, slot: u32) {
        match self.suspect.remove(&slot) {
            true => self.failed.push_back(slot),
            false => self.free.push(slot),
        }
    }

    /// Takes a free slot. There is one for each chunk that is lent.
    pub(super) fn take(&mut self) -> u32 {
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

fn hash_of(bytes: &[u8]) -> [u64; 2] {
    let hash = XxHash3_128::oneshot(bytes);
    [hash as u64, (hash >> 64) as u64]
}
