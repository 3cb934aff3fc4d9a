//! [`LeasedExtent`]: an extent as a client knows it, and [`Paged`], which of its chunks are in the
//! server's memory.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use farpage_wire::{
    ExtentId,
    control::{Lease, PagedKeys, RemoteKey},
    data::{MAX_OP_BYTES, WORD_BYTES},
    segment::{Look, SEGMENT_BYTES, SegmentWord, pieces},
};

use crate::memory::{marks, words_bytes};

/// Upper bound of the segments of an operation: the longest one has as many bytes as a segment.
pub(super) const SEGMENTS: usize = 2;
const _: () = assert!(MAX_OP_BYTES as u64 <= SEGMENT_BYTES);

/// Time after which the client marks anew: the server clears marks when it looks for unused chunks,
/// and does not tell how often.
const MARK_AGAIN: Duration = Duration::from_millis(100);

/// Bit in an extent's number that stands for its words, which have a key; [`MARKS`]: for its marks.
pub(super) const WORDS: u64 = 1 << 63;
pub(super) const MARKS: u64 = 1 << 62;

/// Words of the segments of an operation.
pub(super) type OpWords = [u8; SEGMENTS * WORD_BYTES as usize];

/// An extent that is leased to this client.
#[derive(Debug)]
pub(super) struct LeasedExtent {
    pub(super) id: ExtentId,
    pub(super) bytes: u64,
    /// True if the extent takes atomics. An atomic on another makes the adapter end the connection.
    pub(super) atomics: bool,
    /// True if the extent takes READs only. A WRITE makes the adapter end the connection.
    pub(super) read_only: bool,
    pub(super) key: RemoteKey,
    /// State of memory that the server may have moved elsewhere.
    pub(super) paged: Option<Paged>,
    /// True once the lease is given back, so that channels drop what they cached. Relaxed: it
    /// guards nothing else.
    pub(super) released: AtomicBool,
}

/// Knowledge of a paged extent that the channels of a session share.
#[derive(Debug)]
pub(super) struct Paged {
    /// The words that were seen last, also by another channel.
    known: Box<[AtomicU64]>,
    marked: Box<[Marked]>,
    born: Instant,
    /// Copy of [`PagedKeys::granule_bytes`].
    pub(super) granule_bytes: u32,
}

/// Bits of a segment that were marked.
#[derive(Debug, Default)]
struct Marked {
    /// Time of the last mark, in units of [`MARK_AGAIN`], in the upper half; its bits in the lower.
    last: AtomicU64,
    /// Bits of the unit before: the server may not have taken them yet.
    before: AtomicU32,
}

impl Paged {
    fn new(extent_bytes: u64, granule_bytes: u32) -> Self {
        let words = words_bytes(extent_bytes) / u64::from(WORD_BYTES);
        Self {
            known: (0..words).map(|_| AtomicU64::new(0)).collect(),
            marked: (0..words).map(|_| Marked::default()).collect(),
            born: Instant::now(),
            granule_bytes,
        }
    }

    /// Returns the looks before an operation, one per segment, if all of its chunks are there.
    pub(super) fn looks(&self, offset: u64, len: u64) -> Option<[Option<Look>; SEGMENTS]> {
        let mut looks = [None; SEGMENTS];
        for (piece, look) in pieces(offset, len).zip(&mut looks) {
            // Acquire: pairs with the release in `see`, perhaps by another thread.
            let known = SegmentWord(self.known[piece.segment].load(Ordering::Acquire));
            *look = Some(known.look(piece.chunks)?);
        }
        Some(looks)
    }

    /// Notes the `words` of the segments of an operation. True if the operation counts.
    pub(super) fn see(
        &self,
        offset: u64,
        len: u64,
        words: &OpWords,
        looks: &[Option<Look>; SEGMENTS],
    ) -> bool {
        let mut counts = true;
        let seen = words.chunks_exact(WORD_BYTES as usize).zip(looks);
        for (piece, (word, look)) in pieces(offset, len).zip(seen) {
            let word = SegmentWord(u64::from_le_bytes(word.try_into().expect("8 bytes")));
            self.known[piece.segment].store(word.0, Ordering::Release);
            counts &= look.is_some_and(|look| look.judge(word));
        }
        counts
    }

    /// Returns the mark to set for `chunks` of a segment, if one is missing.
    pub(super) fn mark(&self, segment: usize, chunks: u32) -> Option<u32> {
        let now = (self.born.elapsed().as_millis() / MARK_AGAIN.as_millis()) as u32;
        let Marked { last, before } = &self.marked[segment];
        let was = last.load(Ordering::Relaxed);
        let (then, mut bits) = ((was >> 32) as u32, was as u32);
        if then != now {
            let kept = if now - then == 1 { bits } else { 0 };
            before.store(kept, Ordering::Relaxed);
            bits = 0;
        }
        let new = bits | chunks;
        // Marks of another thread meanwhile are made again at worst.
        last.store(u64::from(now) << 32 | u64::from(new), Ordering::Relaxed);
        (new != bits).then(|| new | before.load(Ordering::Relaxed))
    }
}

/// Makes the leases that stand for a paged lease: of its bytes, its words and its marks.
pub(super) fn leases(lease: Lease, key: RemoteKey, keys: &PagedKeys) -> [LeasedExtent; 3] {
    let (begin, end) = marks(lease.bytes);
    let part = |id, bytes, read_only, key, paged| LeasedExtent {
        id: ExtentId(id),
        bytes,
        atomics: lease.atomics,
        read_only,
        key,
        paged,
        released: false.into(),
    };
    let paged = Some(Paged::new(lease.bytes, keys.granule_bytes));
    let words_bytes = words_bytes(lease.bytes);
    [
        part(lease.id.0, lease.bytes, lease.read_only, key, paged),
        part(lease.id.0 | WORDS, words_bytes, true, keys.words, None),
        part(lease.id.0 | MARKS, end - begin, false, keys.marks, None),
    ]
}

/// Returns the numbers under which [`leases`] are kept.
pub(super) fn parts(id: ExtentId) -> [ExtentId; 3] {
    [id, ExtentId(id.0 | WORDS), ExtentId(id.0 | MARKS)]
}
