//! Storage of chunks that left memory: compressed in the pool, or in a slot of the spill file.
//!
//! The rule it keeps: bytes that come back are compared with the hash of those that left.

use std::{sync::Arc, time::Instant};

use farpage_fabric::memory::Absent;
use lz4_flex::block::{compress_into_with_table, decompress_into};
use twox_hash::XxHash3_128;

use super::{
    PACKED_MOST, Tier,
    buffers::Transfer,
    disk::BLOCK_BYTES,
    extent::{CHUNK_BYTES, Chunk, NONE, Place, TieredExtent},
    pool::Owner,
};

impl Tier {
    /// Stores the bytes of `buffer.plain`. Returns the chunk as it is once its memory is given
    /// back. `was` is the hot chunk: its slot is freed, unless it has the same bytes already.
    pub(super) fn pack(
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

    /// Takes `bytes` of memory for the pool. Returns false if there is no room.
    pub(super) fn charge(&self, bytes: u64) -> bool {
        let mut books = self.books.lock();
        let has_room = books.held_bytes + bytes <= self.memory_bytes;
        if has_room {
            books.held_bytes += bytes;
        }
        has_room
    }

    /// Copies a chunk's bytes from the pool to the spill file.
    pub(super) fn spill_packed(&self, was: &Chunk, buffer: &mut Transfer) -> Result<Chunk, ()> {
        let len = was.stored_bytes as usize;
        (self.pool.get(was.cell, &mut buffer.packed[..len]))
            .map_err(|error| self.say(format!("cannot read the server's memory: {error}")))?;
        let gone = Chunk {
            hash: was.hash,
            ..Chunk::default()
        };
        self.spill(was.stored_bytes, &mut buffer.packed, gone)
    }

    /// Writes the first `stored_bytes` of `packed` to a slot. Fails without a write if the disk is
    /// busy for too long.
    pub(super) fn spill(
        &self,
        stored_bytes: u32,
        packed: &mut [u8],
        gone: Chunk,
    ) -> Result<Chunk, ()> {
        let len = stored_bytes as usize;
        let whole = len.next_multiple_of(BLOCK_BYTES);
        packed[len..whole].fill(0);
        let _turn = self.turns.take().ok_or(())?;
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

    /// Marks the slot of `was` as suspect: its bytes did not come back as they were written.
    pub(super) fn suspect(&self, was: &Chunk) {
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
            self.count_no_room();
            Err(Absent::NoRoom)
        })
    }
}

fn hash_of(bytes: &[u8]) -> [u64; 2] {
    let hash = XxHash3_128::oneshot(bytes);
    [hash as u64, (hash >> 64) as u64]
}
