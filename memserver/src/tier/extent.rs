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
//! Lock order: the pool's cells, the books, a segment. No thread waits for one of the first two
//! while it holds a segment.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Instant,
};

use farpage_fabric::memory::{Absent, ExtentFile, SegmentWords};
use farpage_wire::{
    ExtentId,
    segment::{SEGMENT_BYTES, SegmentWord},
};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    chunk::{CHUNK_BYTES, Chunk, Place, SEGMENT_CHUNKS},
    figures::Figures,
};
use crate::handover::{HandedChunk, HandedTiered, HandoverError};

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
    figures: Arc<Figures>,
    pub(super) file: ExtentFile,
    released: AtomicBool,
    segments: Box<[Segment]>,
    /// Words of the segments, made when the extent is first lent over shared memory.
    words: OnceLock<SegmentWords>,
    /// True if clients of an earlier process were lent the memory itself. Their words say for good
    /// that no chunk is in memory, so that they ask the server.
    was_shared: bool,
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
    pub(super) fn new(figures: Arc<Figures>, file: ExtentFile) -> Self {
        let segments = file.bytes().div_ceil(SEGMENT_BYTES);
        Self {
            figures,
            file,
            released: AtomicBool::new(false),
            segments: (0..segments).map(|_| Segment::default()).collect(),
            words: OnceLock::new(),
            was_shared: false,
        }
    }

    /// Makes an extent whose chunks are where they were at an earlier process. Returns
    /// the extent, and how many of its chunks are hot.
    ///
    /// # Errors
    /// The records fit no extent of this size.
    pub(super) fn take_over(
        figures: Arc<Figures>,
        file: ExtentFile,
        handed: &HandedTiered,
    ) -> Result<(Self, u64), HandoverError> {
        let wrong = || HandoverError::State(format!("chunks of extent {}", handed.id));
        let mut extent = Self::new(figures, file);
        extent.was_shared = handed.is_shared;
        let (count, mut hot) = (extent.chunks(), 0);
        for (number, chunks) in &handed.segments {
            let first = u64::from(*number) * SEGMENT_CHUNKS as u64;
            let segment = extent.segments.get_mut(*number as usize);
            let (segment, place) = segment
                .zip(<&[HandedChunk; SEGMENT_CHUNKS]>::try_from(&chunks[..]).ok())
                .ok_or_else(wrong)?;
            let made = made(segment.chunks.get_mut());
            for (i, (chunk, handed)) in made.iter_mut().zip(place).enumerate() {
                *chunk = Chunk::from(handed);
                if first + i as u64 >= count && chunk.place != Place::Hole {
                    return Err(wrong());
                }
                if chunk.place == Place::Hot {
                    hot += 1;
                    *segment.hot.get_mut() |= 1 << i;
                }
                extent.figures.moved(Place::Hole, chunk.place);
            }
        }
        Ok((extent, hot))
    }

    /// Returns the segments' chunks for the next process. `None` if a chunk is being moved.
    pub(super) fn hand_over(&self) -> Option<Vec<(u32, Vec<HandedChunk>)>> {
        let mut segments = Vec::new();
        for (number, segment) in self.segments.iter().enumerate() {
            if let Some(chunks) = &*segment.lock() {
                let chunks = chunks.iter().map(Chunk::hand_over);
                segments.push((number as u32, chunks.collect::<Option<_>>()?));
            }
        }
        Some(segments)
    }

    /// Tells clients over shared memory that no chunk is in memory, so that they ask the server; or
    /// else which are.
    pub(super) fn tell_all(&self, are_absent: bool) {
        for (number, segment) in self.segments.iter().enumerate() {
            let _chunks = segment.lock();
            let hot = segment.hot.load(Ordering::Relaxed);
            self.tell(number, |word| match are_absent {
                true => word.without(u32::MAX),
                false => word.with(hot),
            });
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
        self.was_shared || self.words.get().is_some()
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
    pub(super) fn range(&self, chunk: usize) -> (u64, usize) {
        let start = chunk as u64 * CHUNK_BYTES;
        (start, CHUNK_BYTES.min(self.file.bytes() - start) as usize)
    }

    /// Ends the move of `chunk` from `was` to `now`. Returns false if the extent was discarded
    /// meanwhile: the caller then frees what the chunk is stored in.
    pub(super) fn publish(&self, chunk: usize, was: &Chunk, now: Chunk) -> bool {
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
        self.figures.moved(was.place, now.place);
        *place = now;
        drop(chunks);
        segment.changed.notify_all();
        !is_orphan
    }

    /// Holds `chunk` if it is hot. Returns true if so.
    pub(super) fn pin(&self, chunk: usize) -> Result<bool, Absent> {
        let (segment, i) = self.segment(chunk);
        let mut chunks = segment.lock();
        if self.is_released() {
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

    /// Holds `chunk` if it is hot, and waits for it while it is being moved. Else owns it, and
    /// returns it as it was.
    pub(super) fn hold_or_own(
        &self,
        chunk: usize,
        until: Instant,
    ) -> Result<Option<Chunk>, Absent> {
        let (segment, i) = self.segment(chunk);
        let mut chunks = segment.lock();
        loop {
            if self.is_released() {
                return Err(Absent::Released);
            }
            let chunk = &mut made(&mut chunks)[i];
            match chunk.place {
                Place::Hot => {
                    chunk.pins += 1;
                    chunk.is_young = true;
                    return Ok(None);
                }
                Place::Busy => {
                    if segment.changed.wait_until(&mut chunks, until).timed_out() {
                        self.figures.count_no_room();
                        return Err(Absent::NoRoom);
                    }
                }
                // A READ of many chunks has taken too long already.
                _ if Instant::now() >= until => {
                    self.figures.count_no_room();
                    return Err(Absent::NoRoom);
                }
                Place::Hole | Place::Compressed | Place::Spilled => {
                    chunk.fetched = self.figures.tick();
                    let was = *chunk;
                    chunk.place = Place::Busy;
                    return Ok(Some(was));
                }
                Place::Orphan => unreachable!("only a released extent has one"),
            }
        }
    }

    /// Owns `chunk` if `is_wanted`, and returns it as it was before.
    pub(super) fn own(
        &self,
        chunk: usize,
        is_wanted: impl FnOnce(&mut Chunk) -> bool,
    ) -> Option<Chunk> {
        let (segment, i) = self.segment(chunk);
        let mut chunks = segment.lock();
        let chunk = &mut chunks.as_mut()?[i];
        is_wanted(chunk).then(|| {
            let was = *chunk;
            chunk.place = Place::Busy;
            was
        })
    }

    /// Returns a chunk as it is now. `None` if it was never touched.
    pub(super) fn looked_at(&self, chunk: usize) -> Option<Chunk> {
        let (segment, i) = self.segment(chunk);
        Some(segment.lock().as_ref()?[i])
    }

    /// Returns a chunk that the caller owns.
    pub(super) fn owned(&self, chunk: usize) -> Chunk {
        let (segment, i) = self.segment(chunk);
        made(&mut segment.lock())[i]
    }

    /// True if the extent was discarded, or is about to be.
    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }

    /// Gives back the memory of `chunks` chunks from `first` on, as far as the extent has them.
    pub(super) fn punch(&self, first: usize, chunks: usize) {
        let start = first as u64 * CHUNK_BYTES;
        let len = (chunks as u64 * CHUNK_BYTES).min(self.file.bytes().saturating_sub(start));
        if len == 0 {
            return;
        }
        if let Err(error) = self.file.punch_range(start, len) {
            self.figures
                .say(format!("cannot give memory back: {error}"));
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
        if self.is_released() {
            return None;
        }
        let chunks = chunks.as_mut()?;
        let marks = match self.words.get() {
            Some(_) => self.file.take_marks(number),
            // Clients of an earlier process mark nothing: they ask.
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

    /// Ends the extent. No operation can hold a byte after the return, and all memory and slots are
    /// free except those of chunks that are being moved. Returns how many chunks were hot, and how
    /// many are being moved. `forget` frees what a chunk is stored in.
    pub(super) fn discard(&self, forget: impl Fn(&Chunk)) -> (u64, u64) {
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
                self.figures.moved(chunk.place, Place::Hole);
                forget(&chunk);
            }
        }
        if let Err(error) = self.file.punch() {
            self.figures
                .say(format!("cannot give memory back: {error}"));
        }
        (hot, orphans)
    }

    /// Ends a hold of the `len` bytes at `offset`.
    pub(super) fn let_go(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for chunk in offset / CHUNK_BYTES..=(offset + len - 1) / CHUNK_BYTES {
            let (segment, i) = self.segment(chunk as usize);
            let mut chunks = segment.lock();
            let chunk = &mut made(&mut chunks)[i];
            chunk.pins -= 1;
            if chunk.pins == 0 && self.is_released() {
                segment.changed.notify_all();
            }
        }
    }

    /// Returns the words of the segments, and makes them first if the extent is not shared yet.
    pub(super) fn share(&self) -> io::Result<&SegmentWords> {
        if let Some(words) = self.words.get() {
            return Ok(words);
        }
        let made = SegmentWords::create(self.file.bytes())?;
        // Threads that change a word hold its segment's lock: all see the words, or none.
        let chunks: Vec<_> = self.segments.iter().map(Segment::lock).collect();
        let is_released = self.is_released();
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
