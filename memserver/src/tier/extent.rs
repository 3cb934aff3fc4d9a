//! [`TieredExtent`]: where each chunk of one extent is, and who uses it now.
//!
//! The rule it keeps: whoever makes a chunk `Busy` moves it, and nobody else touches it until it is
//! published in another state. A chunk leaves memory only while nobody holds it, and it is hot
//! again only once all of its bytes are back and their hash is right. Who discards an extent does
//! not wait for a chunk that is on its way: whoever moves it frees it then.
//!
//! Clients over shared memory reach hot chunks by themselves, and look at the segments' [words]
//! before and after. So the word changes before the bytes of a chunk that leaves are looked at, and
//! once those of one that comes are there. Both happen under the segment's lock.
//!
//! [words]: farpage_wire::segment
//!
//! Lock order: the pool's cells, the tier's books, a segment. Nobody waits for one of the first two
//! while it holds a segment.

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

/// What is moved at once: large enough that a disk's latency is paid rarely, small enough that a
/// page of 4 KiB does not wait for much else. A segment, which has one lock, is the largest page.
pub(super) use farpage_wire::segment::{CHUNK_BYTES, SEGMENT_CHUNKS};

/// No slot of the spill file, no cell of the pool.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    /// Zeros, and nowhere.
    #[default]
    Hole,
    /// In memory.
    Hot,
    /// In the pool, from `cell` on.
    Compressed,
    /// In the spill file, at `slot`.
    Spilled,
    /// On its way: see the module's text.
    Busy,
    /// On its way in an extent that was discarded: whoever moves it frees it.
    Orphan,
}

/// One chunk. Its last bytes are zeros where the extent ends before it does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) place: Place,
    /// Held since the clock's hand was here last.
    pub(super) is_young: bool,
    pub(super) pins: u32,
    /// Length in the pool or in the spill file; [`CHUNK_BYTES`] means that it is not compressed.
    pub(super) stored_bytes: u32,
    pub(super) cell: u32,
    /// While the chunk is hot, the slot still holds the bytes that have `hash`.
    pub(super) slot: u32,
    /// When it was fetched last, by the tier's [count](Tier::tick) of fetches; 0 for never.
    pub(super) fetched: u32,
    /// Of the chunk's bytes when they left memory last.
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
    /// Made when the segment is first touched: a grant takes no time for its size.
    chunks: Mutex<Option<Box<Chunks>>>,
    /// A chunk was published, or let go of in an extent that is released.
    changed: Condvar,
}

pub(super) struct TieredExtent {
    tier: Arc<Tier>,
    pub(super) file: ExtentFile,
    released: AtomicBool,
    segments: Box<[Segment]>,
    /// Made when a client over shared memory is lent it first.
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

    /// Changes what clients are told about a segment, whose lock is held.
    fn tell(&self, segment: usize, change: impl FnOnce(SegmentWord) -> SegmentWord) {
        if let Some(words) = self.words.get() {
            words.set(segment, change(words.get(segment)));
        }
    }

    /// Whether clients have been lent the memory itself.
    pub(super) fn is_shared(&self) -> bool {
        self.words.get().is_some()
    }

    /// How many bytes are in the file beside those of `chunks` chunks: clients that share the
    /// memory have touched what was not there.
    pub(super) fn stray_bytes(&self, chunks: u64) -> u64 {
        if !self.is_shared() {
            return 0;
        }
        let accounted = chunks * CHUNK_BYTES + self.file.marks_bytes();
        self.file.resident_bytes().saturating_sub(accounted)
    }

    /// Gives back the memory of chunks that are elsewhere. Those on their way are left alone.
    pub(super) fn punch_strays(&self) {
        let mut from = 0;
        while let Some(at) = self.file.next_data(from) {
            let number = (at / SEGMENT_BYTES) as usize;
            let Some(segment) = self.segments.get(number) else {
                break;
            };
            from = (number as u64 + 1) * SEGMENT_BYTES;
            // Held: nobody brings a chunk in meanwhile.
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

    /// Where a chunk begins, and how many of its bytes the extent has.
    fn range(&self, chunk: usize) -> (u64, usize) {
        let start = chunk as u64 * CHUNK_BYTES;
        (start, CHUNK_BYTES.min(self.file.bytes() - start) as usize)
    }

    /// Ends the move of a chunk, which was `was` before and is `now` from here on. `false`: the
    /// extent was discarded meanwhile, and what the chunk is stored in is free.
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
        // Counted before anybody can move it on.
        self.tier.moved(was.place, now.place);
        *place = now;
        drop(chunks);
        segment.changed.notify_all();
        !is_orphan
    }

    /// Holds a chunk if it is hot.
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

    /// Holds a chunk, and brings it into memory before if it is elsewhere.
    fn bring(&self, chunk: usize, until: Instant) -> Result<(), Absent> {
        let begun = Instant::now();
        let (segment, i) = self.segment(chunk);
        // 1. Own it, or find that it has come.
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

    /// Puts a chunk's bytes back into the memory.
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
                // What came of it is a part of the bytes, and nobody's.
                self.punch(chunk, 1);
                self.tier
                    .say(format!("cannot fill memory of the server: {error}"));
                Absent::NoRoom
            })
        })
    }

    /// Gives back the memory of so many chunks, as far as the extent has them.
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

    /// Owns a chunk of `segment` that nobody holds and that has not been held since the last call,
    /// or, if `takes_young`, any that nobody holds. The others become older.
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

    /// Moves a chunk that [`take_cold`](Self::take_cold) gave out of memory. `false`: it could not
    /// be stored, and is hot again.
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

    /// Moves a chunk from `cell` of the pool to the spill file. `false`: that failed.
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

    /// Ends it: nobody can hold a byte any more when it returns, and what it took is free but for
    /// chunks that are on their way. Returns how many chunks were hot, and how many are on their
    /// way.
    pub(super) fn discard(&self) -> (u64, u64) {
        self.released.store(true, Ordering::Relaxed);
        let (mut hot, mut orphans) = (0, 0);
        for (number, segment) in self.segments.iter().enumerate() {
            let mut chunks = segment.lock();
            self.tell(number, |word| word.without(u32::MAX));
            // As short as a system call that does not block.
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
        // 1. Own it, unless it is asked for again soon: then it is worth its memory.
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
            // A disk may have taken its time: who released the extent has been told that nobody
            // reads it any more.
            if self.released.load(Ordering::Relaxed) {
                return Err(Absent::Released);
            }
            take(&buffer.plain[(offset - start) as usize..][..len as usize]);
            Ok(())
        });
        // 3. It stays where it is.
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
        // Whoever changes a word holds its segment's lock: all of them see the words, or none.
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
