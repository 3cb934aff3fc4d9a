//! [`TieredExtent`]: place and users of each chunk of one extent.
//!
//! The rule it keeps: the thread that makes a chunk `Busy` moves it, and no other touches it until
//! it is published in another state. A chunk leaves memory only while no operation holds it, and is
//! hot again only once all of its bytes are back and their hash is right. Discarding an extent does
//! not wait for chunks that are being moved: their movers free them.
//!
//! Clients over shared memory reach hot chunks by themselves, and look at the segments' [words]
//! before and after. So a word changes before the bytes of a leaving chunk are read, and after
//! those of an arriving chunk are there. Both happen under the segment's lock.
//!
//! [words]: farpage_wire::segment
//!
//! Lock order: the pool's cells, the tier's books, a segment. No thread waits for one of the first
//! two while it holds a segment.

use std::{
    fmt, io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Instant,
};

use farpage_fabric::memory::{Absent, ExtentFile, Residency, SegmentWords};
use farpage_wire::{
    ExtentId,
    segment::{SEGMENT_BYTES, SegmentWord},
};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{Tier, buffers::Transfer};

/// Unit of moves: large enough that a disk's latency is paid rarely, small enough that a page of 4
/// KiB does not wait for much else. A segment, which has one lock, is the largest page.
pub(super) use farpage_wire::segment::{CHUNK_BYTES, SEGMENT_CHUNKS};

/// Number that stands for no slot of the spill file, and for no cell of the pool.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    /// All zeros, stored nowhere.
    #[default]
    Hole,
    /// Stored in memory.
    Hot,
    /// Stored in the pool, from `cell` on.
    Compressed,
    /// Stored in the spill file, at `slot`.
    Spilled,
    /// Being moved by one thread, which alone may touch the chunk.
    Busy,
    /// Being moved, in an extent that was discarded: the mover frees the chunk.
    Orphan,
}

/// One chunk. Its bytes beyond the extent's end are zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) place: Place,
    /// True if the chunk was held since the clock's hand passed last.
    pub(super) is_young: bool,
    pub(super) pins: u32,
    /// Length in the pool or in the spill file; [`CHUNK_BYTES`] means not compressed.
    pub(super) stored_bytes: u32,
    pub(super) cell: u32,
    /// Slot in the spill file. While the chunk is hot, it still holds the bytes that have `hash`.
    pub(super) slot: u32,
    /// Time of the last fetch, by the tier's [count](Tier::tick) of fetches; 0 for never.
    pub(super) fetched: u32,
    /// Hash of the chunk's bytes when they left memory last.
    pub(super) hash: [u64; 2],
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            place: Place::Hole,
            is_young: false,
            pins: 0,
            stored_bytes: 0,
            cell: NONE,
            slot: NONE,
            fetched: 0,
            hash: [0; 2],
        }
    }
}

type Chunks = [Chunk; SEGMENT_CHUNKS];

#[derive(Default)]
pub(super) struct Segment {
    /// A bit per hot chunk: lets the clock pass by without the lock.
    hot: AtomicU32,
    /// Chunks of the segment, made when it is first touched: a grant takes no time for its size.
    chunks: Mutex<Option<Box<Chunks>>>,
    /// Signalled when a chunk is published, or let go of in a released extent.
    changed: Condvar,
}

pub(super) struct TieredExtent {
    tier: Arc<Tier>,
    pub(super) file: ExtentFile,
    released: AtomicBool,
    segments: Box<[Segment]>,
    /// Words of the segments, made when the extent is first lent over shared memory.
    words: OnceLock<SegmentWords>,
}

impl fmt::Debug for TieredExtent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TieredExtent").field(&self.id()).finish()
    }
}

impl Segment {
    fn lock(&self) -> MutexGuard<'_, Option<Box<Chunks>>> {
        self.chunks.lock()
    }
}

fn made(chunks: &mut Option<Box<Chunks>>) -> &mut Chunks {
    chunks.get_or_insert_with(|| Box::new([Chunk::default(); SEGMENT_CHUNKS]))
}

impl TieredExtent {
    pub(super) fn new(tier: Arc<Tier>, file: ExtentFile) -> Self {
        let segments = file.bytes().div_ceil(SEGMENT_BYTES);
        Self {
            tier,
            file,
            released: AtomicBool::new(false),
            segments: (0..segments).map(|_| Segment::default()).collect(),
            words: OnceLock::new(),
        }
    }

    /// Changes the word of `segment`, whose lock is held.
    fn tell(&self, segment: usize, change: impl FnOnce(SegmentWord) -> SegmentWord) {
        if let Some(words) = self.words.get() {
            words.set(segment, change(words.get(segment)));
        }
    }

    /// True if clients have been lent the memory itself.
    pub(super) fn is_shared(&self) -> bool {
        self.words.get().is_some()
    }

    /// Returns the bytes in the file beyond those of `chunks` chunks: clients that share the memory
    /// have touched absent chunks.
    pub(super) fn stray_bytes(&self, chunks: u64) -> u64 {
        if !self.is_shared() {
            return 0;
        }
        let accounted = chunks * CHUNK_BYTES + self.file.marks_bytes();
        self.file.resident_bytes().saturating_sub(accounted)
    }

    /// Gives back the memory of chunks that are stored elsewhere, but not of those being moved.
    pub(super) fn punch_strays(&self) {
        let mut from = 0;
        while let Some(at) = self.file.next_data(from) {
            let number = (at / SEGMENT_BYTES) as usize;
            let Some(segment) = self.segments.get(number) else {
                break;
            };
            from = (number as u64 + 1) * SEGMENT_BYTES;
            // The lock keeps chunks from coming in meanwhile.
            let chunks = segment.lock();
            let is_out = |chunk: &Chunk| {
                matches!(
                    chunk.place,
                    Place::Hole | Place::Compressed | Place::Spilled
                )
            };
            let Some(chunks) = &*chunks else {
                self.punch(number * SEGMENT_CHUNKS, SEGMENT_CHUNKS);
                continue;
            };
            // Neighbours at once.
            let mut first = number * SEGMENT_CHUNKS;
            for run in chunks.chunk_by(|one, next| is_out(one) == is_out(next)) {
                if is_out(&run[0]) {
                    self.punch(first, run.len());
                }
                first += run.len();
            }
        }
    }

    pub(super) fn id(&self) -> ExtentId {
        self.file.id()
    }

    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    pub(super) fn chunks(&self) -> u64 {
        self.file.bytes().div_ceil(CHUNK_BYTES)
    }

    #[cfg(test)]
    pub(super) fn place(&self, chunk: usize) -> Place {
        let (segment, i) = self.segment(chunk);
        made(&mut segment.lock())[i].place
    }

    fn segment(&self, chunk: usize) -> (&Segment, usize) {
        (
            &self.segments[chunk / SEGMENT_CHUNKS],
            chunk % SEGMENT_CHUNKS,
        )
    }

    /// Returns the start of `chunk`, and how many of its bytes the extent has.
    fn range(&self, chunk: usize) -> (u64, usize) {
        let start = chunk as u64 * CHUNK_BYTES;
        (start, CHUNK_BYTES.min(self.file.bytes() - start) as usize)
    }

    /// Ends the move of `chunk` from `was` to `now`. Returns false if the extent was discarded
    /// meanwhile: the caller then frees what the chunk is stored in.
    fn publish(&self, chunk: usize, was: &Chunk, now: Chunk) -> bool {
        let (segment, i) = self.segment(chunk);
        let mut chunks = segment.lock();
        let place = &mut made(&mut chunks)[i];
        let is_orphan = place.place == Place::Orphan;
        let now = if is_orphan { Chunk::default() } else { now };
        let bit = 1 << i;
        match now.place {
            Place::Hot => {
                segment.hot.fetch_or(bit, Ordering::Relaxed);
                self.tell(chunk / SEGMENT_CHUNKS, |word| word.with(bit));
            }
            _ => drop(segment.hot.fetch_and(!bit, Ordering::Relaxed)),
        }
        // Counted before another thread can move the chunk on.
        self.tier.moved(was.place, now.place);
        *place = now;
        drop(chunks);
        segment.changed.notify_all();
        !is_orphan
    }

    /// Holds `chunk` if it is hot. Returns true if so.
    fn pin(&self, chunk: usize) -> Result<bool, Absent> {
        let (segment, i) = self.segment(chunk);
        let mut chunks = segment.lock();
        if self.released.load(Ordering::Relaxed) {
            return Err(Absent::Released);
        }
        let chunk = &mut made(&mut chunks)[i];
        let is_hot = chunk.place == Place::Hot;
        if is_hot {
            chunk.pins += 1;
            chunk.is_young = true;
        }
        Ok(is_hot)
    }

    /// Holds `chunk`, and brings it into memory first if it is elsewhere.
    fn bring(&self, chunk: usize, until: Instant) -> Result<(), Absent> {
        let begun = Instant::now();
        let (segment, i) = self.segment(chunk);
        // 1. Own the chunk, or find that it has come.
        let mut chunks = segment.lock();
        let was = loop {
            if self.released.load(Ordering::Relaxed) {
                return Err(Absent::Released);
            }
            let chunk = &mut made(&mut chunks)[i];
            match chunk.place {
                Place::Hot => {
                    chunk.pins += 1;
                    chunk.is_young = true;
                    return Ok(());
                }
                Place::Busy => {
                    if segment.changed.wait_until(&mut chunks, until).timed_out() {
                        self.tier.count_no_room();
                        return Err(Absent::NoRoom);
                    }
                }
                // A READ of many chunks has taken too long already.
                _ if Instant::now() >= until => {
                    self.tier.count_no_room();
                    return Err(Absent::NoRoom);
                }
                Place::Hole | Place::Compressed | Place::Spilled => {
                    chunk.fetched = self.tier.tick();
                    let was = *chunk;
                    chunk.place = Place::Busy;
                    break was;
                }
                Place::Orphan => unreachable!("only a released extent has one"),
            }
        };
        drop(chunks);
        // 2. Room and bytes.
        let brought = self.tier.reserve(self.id(), until).and_then(|()| {
            let loaded = self.load(chunk, &was, until);
            if loaded.is_err() {
                self.tier.unreserve(self.id());
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
        if !self.publish(chunk, &was, now) {
            self.tier.forget(&was);
            if brought.is_ok() {
                self.punch(chunk, 1);
                self.tier.unreserve(self.id());
            }
            self.tier.forget_orphan();
            return Err(Absent::Released);
        }
        brought?;
        if was.place == Place::Compressed {
            self.tier.pool.free(was.cell);
        }
        if was.place != Place::Hole {
            self.tier.count_fetch(begun.elapsed());
        }
        Ok(())
    }

    /// Puts the bytes of `chunk` back into memory.
    fn load(&self, chunk: usize, was: &Chunk, until: Instant) -> Result<(), Absent> {
        if was.place == Place::Hole {
            return Ok(());
        }
        let (start, len) = self.range(chunk);
        self.tier.with_buffer(was.place, until, |buffer| {
            self.tier
                .unpack(was, buffer)
                .map_err(|()| Absent::Unreadable)?;
            let written = self.file.write_at(start, &buffer.plain[..len]);
            written.map_err(|error| {
                // A part of the bytes may have been written, and belongs to nobody.
                self.punch(chunk, 1);
                self.tier
                    .say(format!("cannot fill memory of the server: {error}"));
                Absent::NoRoom
            })
        })
    }

    /// Gives back the memory of `chunks` chunks from `first` on, as far as the extent has them.
    fn punch(&self, first: usize, chunks: usize) {
        let start = first as u64 * CHUNK_BYTES;
        let len = (chunks as u64 * CHUNK_BYTES).min(self.file.bytes().saturating_sub(start));
        if len == 0 {
            return;
        }
        if let Err(error) = self.file.punch_range(start, len) {
            self.tier.say(format!("cannot give memory back: {error}"));
        }
    }

    /// Owns a chunk of `segment` that is not held, and has not been since the last call. With
    /// `takes_young`, owns any that is not held. Chunks that are passed over become older.
    pub(super) fn take_cold(&self, segment: usize, takes_young: bool) -> Option<usize> {
        let number = segment;
        let segment = &self.segments[number];
        if segment.hot.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut chunks = segment.lock();
        if self.released.load(Ordering::Relaxed) {
            return None;
        }
        let chunks = chunks.as_mut()?;
        let marks = match self.words.get() {
            Some(_) => self.file.take_marks(number),
            None => 0,
        };
        for (i, chunk) in chunks.iter_mut().enumerate() {
            chunk.is_young |= marks >> i & 1 == 1;
        }
        for (i, chunk) in chunks.iter_mut().enumerate() {
            if chunk.place != Place::Hot || chunk.pins > 0 {
                continue;
            }
            if !std::mem::take(&mut chunk.is_young) || takes_young {
                chunk.place = Place::Busy;
                self.tell(number, |word| word.without(1 << i));
                return Some(number * SEGMENT_CHUNKS + i);
            }
        }
        None
    }

    /// Moves a chunk from [`take_cold`](Self::take_cold) out of memory. Returns false if it could
    /// not be stored, and is hot again.
    pub(super) fn evict(self: &Arc<Self>, chunk: usize, buffer: &mut Transfer) -> bool {
        let (segment, i) = self.segment(chunk);
        let was = made(&mut segment.lock())[i];
        let (start, len) = self.range(chunk);
        buffer.plain[len..].fill(0);
        let stored = (self.file.read_at(start, &mut buffer.plain[..len]))
            .map_err(|error| {
                self.tier.forget(&was);
                self.tier
                    .say(format!("cannot read the server's memory: {error}"));
            })
            .and_then(|()| self.tier.pack(self, chunk, &was, buffer))
            .and_then(|stored| {
                let punched = self.file.punch_range(start, len as u64);
                punched.map_err(|error| {
                    self.tier.forget(&stored);
                    self.tier.say(format!("cannot give memory back: {error}"));
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
            if !self.publish(chunk, &was, hot) {
                self.punch(chunk, 1);
                self.tier.unreserve(self.id());
                self.tier.forget_orphan();
            }
            return false;
        };
        if !self.publish(chunk, &was, now) {
            self.tier.forget(&now);
            self.tier.forget_orphan();
        }
        self.tier.unreserve(self.id());
        true
    }

    /// Moves a chunk from `cell` of the pool to the spill file. Returns false if that failed.
    pub(super) fn demote(&self, chunk: usize, cell: u32, buffer: &mut Transfer) -> bool {
        let (segment, i) = self.segment(chunk);
        let was = {
            let mut chunks = segment.lock();
            let Some(chunk) = chunks.as_mut().map(|chunks| &mut chunks[i]) else {
                return true;
            };
            if chunk.place != Place::Compressed || chunk.cell != cell {
                return true;
            }
            let was = *chunk;
            chunk.place = Place::Busy;
            was
        };
        let spilled = self.tier.spill_packed(&was, buffer);
        let now = spilled.unwrap_or(was);
        if !self.publish(chunk, &was, now) {
            self.tier.forget(&now);
            self.tier.forget_orphan();
        }
        if spilled.is_ok() {
            self.tier.pool.free(cell);
        }
        spilled.is_ok()
    }

    /// Ends the extent. No operation can hold a byte after the return, and all memory and slots are
    /// free except those of chunks that are being moved. Returns how many chunks were hot, and how
    /// many are being moved.
    pub(super) fn discard(&self) -> (u64, u64) {
        self.released.store(true, Ordering::Relaxed);
        let (mut hot, mut orphans) = (0, 0);
        for (number, segment) in self.segments.iter().enumerate() {
            let mut chunks = segment.lock();
            self.tell(number, |word| word.without(u32::MAX));
            // Held for as long as a system call that does not block.
            let in_use = |chunks: &mut Option<Box<Chunks>>| {
                let mut chunks = chunks.iter().flat_map(|chunks| chunks.iter());
                chunks.any(|chunk| chunk.pins > 0)
            };
            segment.changed.wait_while(&mut chunks, in_use);
            // Chunks that were on their way may have come meanwhile.
            self.tell(number, |word| word.without(u32::MAX));
            let mut gone = Vec::new();
            for chunk in chunks.iter_mut().flat_map(|chunks| chunks.iter_mut()) {
                match chunk.place {
                    Place::Busy => {
                        chunk.place = Place::Orphan;
                        orphans += 1;
                    }
                    _ => gone.push(std::mem::take(chunk)),
                }
            }
            segment.hot.store(0, Ordering::Relaxed);
            let is_busy = |chunks: &Chunks| chunks.iter().any(|chunk| chunk.place == Place::Orphan);
            if !chunks.as_deref().is_some_and(is_busy) {
                *chunks = None;
            }
            drop(chunks);
            segment.changed.notify_all();
            for chunk in gone {
                hot += u64::from(chunk.place == Place::Hot);
                self.tier.moved(chunk.place, Place::Hole);
                self.tier.forget(&chunk);
            }
        }
        if let Err(error) = self.file.punch() {
            self.tier.say(format!("cannot give memory back: {error}"));
        }
        (hot, orphans)
    }
}

impl Residency for TieredExtent {
    fn pass(
        &self,
        offset: u64,
        len: u64,
        until: Instant,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Absent> {
        let begun = Instant::now();
        let chunk = (offset / CHUNK_BYTES) as usize;
        let (start, _) = self.range(chunk);
        if offset + len > start + CHUNK_BYTES {
            return Ok(false);
        }
        let (segment, i) = self.segment(chunk);
        // 1. Own the chunk, unless its last fetch was recent: then it is worth its memory.
        let was = {
            let mut chunks = segment.lock();
            let chunk = &mut made(&mut chunks)[i];
            if self.released.load(Ordering::Relaxed)
                || !matches!(chunk.place, Place::Compressed | Place::Spilled)
                || self.tier.is_soon(chunk.fetched)
            {
                return Ok(false);
            }
            chunk.fetched = self.tier.tick();
            let was = *chunk;
            chunk.place = Place::Busy;
            was
        };
        // 2. Its bytes.
        let passed = self.tier.with_buffer(was.place, until, |buffer| {
            self.tier
                .unpack(&was, buffer)
                .map_err(|()| Absent::Unreadable)?;
            // A disk may have taken long: the thread that released the extent was told that nobody
            // reads it any more.
            if self.released.load(Ordering::Relaxed) {
                return Err(Absent::Released);
            }
            take(&buffer.plain[(offset - start) as usize..][..len as usize]);
            Ok(())
        });
        // 3. The chunk stays where it is.
        if !self.publish(chunk, &was, was) {
            self.tier.forget(&was);
            self.tier.forget_orphan();
        }
        passed?;
        self.tier.count_fetch(begun.elapsed());
        Ok(true)
    }

    fn hold(&self, offset: u64, len: u64, until: Option<Instant>) -> Result<u64, Absent> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let chunk = (at / CHUNK_BYTES) as usize;
            match (self.pin(chunk), until) {
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
        if len == 0 {
            return;
        }
        for chunk in offset / CHUNK_BYTES..=(offset + len - 1) / CHUNK_BYTES {
            let (segment, i) = self.segment(chunk as usize);
            let mut chunks = segment.lock();
            let chunk = &mut made(&mut chunks)[i];
            chunk.pins -= 1;
            if chunk.pins == 0 && self.released.load(Ordering::Relaxed) {
                segment.changed.notify_all();
            }
        }
    }

    fn share(&self) -> io::Result<&SegmentWords> {
        if let Some(words) = self.words.get() {
            return Ok(words);
        }
        let made = SegmentWords::create(self.file.bytes())?;
        // Threads that change a word hold its segment's lock: all see the words, or none.
        let chunks: Vec<_> = self.segments.iter().map(Segment::lock).collect();
        let is_released = self.released.load(Ordering::Relaxed);
        if is_released || self.words.set(made).is_err() {
            drop(chunks);
            return match is_released {
                true => Err(io::ErrorKind::NotFound.into()),
                false => self.share(),
            };
        }
        let words = self.words.get().expect("set just now");
        for (number, chunks) in chunks.iter().enumerate() {
            let is_hot = |i: &usize| {
                let chunks = chunks.as_ref();
                chunks.is_some_and(|chunks| chunks[*i].place == Place::Hot)
            };
            let hot = (0..SEGMENT_CHUNKS).filter(is_hot).map(|i| 1 << i);
            words.set(number, words.get(number).with(hot.sum()));
        }
        drop(chunks);
        Ok(words)
    }
}
