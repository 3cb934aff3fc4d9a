//! [`Mover`]: moves chunks between memory, the pool and the spill file. [`Tiered`] brings them in
//! for operations.
//!
//! The rule it keeps: a chunk is owned, moved, and published, in this order. A chunk whose extent
//! was discarded meanwhile is freed by its mover.

use std::{fmt, io, sync::Arc, time::Instant};

use farpage_fabric::memory::{Absent, Residency, SegmentWords};

use super::{
    chunk::{CHUNK_BYTES, Chunk, NONE, Place},
    extent::TieredExtent,
    figures::Figures,
    loans::Transfer,
    pool::Owner,
    room::Room,
    storage::Storage,
};

/// Memory, the storage of what left it, and counts of moves.
pub(super) struct Mover {
    pub(super) room: Room,
    pub(super) storage: Storage,
    pub(super) figures: Arc<Figures>,
}

impl Mover {
    /// True if a chunk fetched at tick `fetched` would still be in memory, had it been brought in:
    /// fewer fetches than memory has chunks have followed.
    fn is_soon(&self, fetched: u32) -> bool {
        let since = u64::from(self.figures.fetches_since(fetched));
        fetched != 0 && since < self.room.memory_bytes / CHUNK_BYTES
    }

    /// Moves a chunk from [`take_cold`](TieredExtent::take_cold) out of memory. Returns false if it
    /// could not be stored, and is hot again.
    pub(super) fn evict(
        &self,
        extent: &Arc<TieredExtent>,
        chunk: usize,
        buffer: &mut Transfer,
    ) -> bool {
        let was = extent.owned(chunk);
        let (start, len) = extent.range(chunk);
        buffer.plain[len..].fill(0);
        let stored = (extent.file.read_at(start, &mut buffer.plain[..len]))
            .map_err(|error| {
                self.storage.forget(&was);
                (self.figures).say(format!("cannot read the server's memory: {error}"));
            })
            .and_then(|()| {
                let owner = Owner {
                    extent: Arc::downgrade(extent),
                    chunk,
                };
                let charge = |bytes| self.room.charge(bytes);
                self.storage.pack(owner, &was, buffer, charge)
            })
            .and_then(|stored| {
                let punched = extent.file.punch_range(start, len as u64);
                punched.map_err(|error| {
                    self.storage.forget(&stored);
                    (self.figures).say(format!("cannot give memory back: {error}"));
                })?;
                Ok(stored)
            });
        let Ok(now) = stored else {
            // Young: the next victim shall be another. Its slot is free already.
            let hot = Chunk {
                place: Place::Hot,
                is_young: true,
                slot: NONE,
                ..was
            };
            if !extent.publish(chunk, &was, hot) {
                extent.punch(chunk, 1);
                self.room.unreserve(extent.id());
                self.room.forget_orphan();
            }
            return false;
        };
        if !extent.publish(chunk, &was, now) {
            self.free_orphan(&now);
        }
        self.room.unreserve(extent.id());
        true
    }

    /// Moves a chunk from `cell` of the pool to the spill file. Returns false if that failed.
    pub(super) fn demote(
        &self,
        extent: &TieredExtent,
        chunk: usize,
        cell: u32,
        buffer: &mut Transfer,
    ) -> bool {
        let is_there = |chunk: &mut Chunk| chunk.place == Place::Compressed && chunk.cell == cell;
        let Some(was) = extent.own(chunk, is_there) else {
            return true;
        };
        let spilled = self.storage.spill_packed(&was, buffer);
        let now = spilled.unwrap_or(was);
        if !extent.publish(chunk, &was, now) {
            self.free_orphan(&now);
        }
        if spilled.is_ok() {
            self.storage.pool.free(cell);
        }
        spilled.is_ok()
    }

    /// Frees a chunk whose extent was discarded during the chunk's move.
    fn free_orphan(&self, chunk: &Chunk) {
        self.storage.forget(chunk);
        self.room.forget_orphan();
    }
}

/// Residency of an extent whose chunks leave memory and come back.
pub(super) struct Tiered {
    pub(super) mover: Arc<Mover>,
    pub(super) extent: Arc<TieredExtent>,
}

impl fmt::Debug for Tiered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tiered").field(&self.extent.id()).finish()
    }
}

impl Tiered {
    /// Holds `chunk`, and brings it into memory first if it is elsewhere.
    fn bring(&self, chunk: usize, until: Instant) -> Result<(), Absent> {
        let Self { mover, extent } = self;
        let begun = Instant::now();
        // 1. Own the chunk, or find that it has come.
        let Some(was) = extent.hold_or_own(chunk, until)? else {
            return Ok(());
        };
        // 2. Room and bytes.
        let brought = mover.room.reserve(extent.id(), until).and_then(|()| {
            let loaded = self.load(chunk, &was, until);
            if loaded.is_err() {
                mover.room.unreserve(extent.id());
            }
            loaded
        });
        // 3. Publish.
        let hot = Chunk {
            place: Place::Hot,
            is_young: true,
            pins: 1,
            cell: NONE,
            ..was
        };
        let now = if brought.is_ok() { hot } else { was };
        if !extent.publish(chunk, &was, now) {
            if brought.is_ok() {
                extent.punch(chunk, 1);
                mover.room.unreserve(extent.id());
            }
            mover.free_orphan(&was);
            return Err(Absent::Released);
        }
        brought?;
        if was.place == Place::Compressed {
            mover.storage.pool.free(was.cell);
        }
        if was.place != Place::Hole {
            mover.figures.count_fetch(begun.elapsed());
        }
        Ok(())
    }

    /// Puts the bytes of `chunk` back into memory.
    fn load(&self, chunk: usize, was: &Chunk, until: Instant) -> Result<(), Absent> {
        if was.place == Place::Hole {
            return Ok(());
        }
        let Self { mover, extent } = self;
        let (start, len) = extent.range(chunk);
        mover.storage.with_buffer(was.place, until, |buffer| {
            let unpacked = mover.storage.unpack(was, buffer);
            unpacked.map_err(|()| Absent::Unreadable)?;
            let written = extent.file.write_at(start, &buffer.plain[..len]);
            written.map_err(|error| {
                // A part of the bytes may have been written, and belongs to nobody.
                extent.punch(chunk, 1);
                (mover.figures).say(format!("cannot fill memory of the server: {error}"));
                Absent::NoRoom
            })
        })
    }
}

impl Residency for Tiered {
    fn pass(
        &self,
        offset: u64,
        len: u64,
        until: Instant,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Absent> {
        let Self { mover, extent } = self;
        let begun = Instant::now();
        let chunk = (offset / CHUNK_BYTES) as usize;
        let (start, _) = extent.range(chunk);
        if offset + len > start + CHUNK_BYTES {
            return Ok(false);
        }
        // 1. Own the chunk, unless its last fetch was recent: then it is worth its memory.
        let stays = |chunk: &mut Chunk| {
            let stays = !extent.is_released()
                && matches!(chunk.place, Place::Compressed | Place::Spilled)
                && !mover.is_soon(chunk.fetched);
            if stays {
                chunk.fetched = mover.figures.tick();
            }
            stays
        };
        let Some(was) = extent.own(chunk, stays) else {
            return Ok(false);
        };
        // 2. Its bytes.
        let passed = mover.storage.with_buffer(was.place, until, |buffer| {
            let unpacked = mover.storage.unpack(&was, buffer);
            unpacked.map_err(|()| Absent::Unreadable)?;
            // A disk may have taken long: the thread that released the extent was told that nobody
            // reads it any more.
            if extent.is_released() {
                return Err(Absent::Released);
            }
            take(&buffer.plain[(offset - start) as usize..][..len as usize]);
            Ok(())
        });
        // 3. The chunk stays where it is.
        if !extent.publish(chunk, &was, was) {
            mover.free_orphan(&was);
        }
        passed?;
        mover.figures.count_fetch(begun.elapsed());
        Ok(true)
    }

    fn hold(&self, offset: u64, len: u64, until: Option<Instant>) -> Result<u64, Absent> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let chunk = (at / CHUNK_BYTES) as usize;
            match (self.extent.pin(chunk), until) {
                (Ok(true), _) => {}
                (Ok(false), Some(until)) if at == offset => self.bring(chunk, until)?,
                (Err(absent), _) if at == offset => return Err(absent),
                (Ok(false) | Err(_), _) => break,
            }
            at = end.min((chunk as u64 + 1) * CHUNK_BYTES);
        }
        Ok(at - offset)
    }

    fn let_go(&self, offset: u64, len: u64) {
        self.extent.let_go(offset, len);
    }

    fn share(&self) -> io::Result<&SegmentWords> {
        self.extent.share()
    }
}
