//! [`SegmentWord`]: tells clients that reach memory without the server which bytes are there. Used
//! by a server that lends more than its memory.
//!
//! An extent is cut into *segments* of 2 MiB, and these into 32 *chunks* of 64 KiB. Each segment
//! has a word of 8 bytes: in its lower half a bit per chunk, set while the chunk is in memory, and
//! in its upper half a version, which grows by one with each chunk that leaves.
//!
//! The rule that makes a READ or a WRITE without the server safe, if both sides keep it:
//!
//! - The client looks at the word, moves the bytes, and looks at the word again. If the chunks were
//!   there and the version is the same, nothing left in between ([`Look::judge`]).
//! - The server changes the word before it looks at the bytes that leave, and takes their memory
//!   away last. When a chunk comes back, the word says so last.
//! - Each side's second step is ordered after its first one, stores before loads as well. So either
//!   the client sees the new version, or the server sees all that the client has written.

use crate::data::MAX_OP_BYTES;

/// Bytes of one chunk, the unit that leaves memory.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Chunks of one segment.
pub const SEGMENT_CHUNKS: usize = 32;
/// Bytes of one segment: no page is larger.
pub const SEGMENT_BYTES: u64 = CHUNK_BYTES * SEGMENT_CHUNKS as u64;

const _: () = assert!(MAX_OP_BYTES as u64 <= 8 * SEGMENT_BYTES);

/// The word of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SegmentWord(pub u64);

impl SegmentWord {
    /// Returns a bit for each chunk that is in memory.
    pub fn chunks(self) -> u32 {
        self.0 as u32
    }

    /// Returns the word after `chunks` have come into memory.
    #[must_use]
    pub fn with(self, chunks: u32) -> Self {
        Self(self.0 | u64::from(chunks))
    }

    /// Returns the word after `chunks` have left memory, or when they are about to.
    #[must_use]
    pub fn without(self, chunks: u32) -> Self {
        let rest = self.0 & !u64::from(chunks);
        Self(rest.wrapping_add(1 << 32))
    }

    /// Takes the first look of an operation that touches `chunks`. `None` if they are not all in
    /// memory: nothing may be touched then.
    pub fn look(self, chunks: u32) -> Option<Look> {
        (self.chunks() & chunks == chunks).then_some(Look(self))
    }
}

/// The word as it was before an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Look(SegmentWord);

impl Look {
    /// True if all bytes of the operation were moved from or to the server's memory, judged by the
    /// word `after` the operation. Otherwise the operation has to be done again.
    pub fn judge(self, after: SegmentWord) -> bool {
        self.0.0 >> 32 == after.0 >> 32
    }
}

/// Cuts the `len` bytes at `offset` into pieces of one segment each.
pub fn pieces(offset: u64, len: u64) -> impl Iterator<Item = Piece> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let segment = at / SEGMENT_BYTES;
            let begin = at;
            at = end.min((segment + 1) * SEGMENT_BYTES);
            let bit = |at: u64| ((at / CHUNK_BYTES) as usize % SEGMENT_CHUNKS) as u32;
            let (first, last) = (bit(begin), bit(at - 1));
            Piece {
                segment: segment as usize,
                offset: begin,
                len: at - begin,
                chunks: (u32::MAX << first) & (u32::MAX >> (31 - last)),
            }
        })
    })
}

/// The part of an operation that is in one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the segment.
    pub segment: usize,
    /// Offset of the part in the extent, in bytes.
    pub offset: u64,
    /// Length of the part in bytes.
    pub len: u64,
    /// A bit for each chunk that the part touches.
    pub chunks: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_name_each_chunk_that_is_touched_and_no_other() {
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..2000 {
            let (offset, len) = (draw(3 * SEGMENT_BYTES), 1 + draw(2 * SEGMENT_BYTES));
            let mut at = offset;
            let mut touched = Vec::new();
            for piece in pieces(offset, len) {
                assert_eq!(piece.offset, at);
                assert_eq!(piece.offset / SEGMENT_BYTES, piece.segment as u64);
                let last = piece.offset + piece.len - 1;
                assert_eq!(last / SEGMENT_BYTES, piece.segment as u64);
                let chunks = (0..SEGMENT_CHUNKS).filter(|chunk| piece.chunks >> chunk & 1 == 1);
                touched.extend(chunks.map(|chunk| piece.segment * SEGMENT_CHUNKS + chunk));
                at += piece.len;
            }
            assert_eq!(at, offset + len);
            let first = (offset / CHUNK_BYTES) as usize;
            let last = ((offset + len - 1) / CHUNK_BYTES) as usize;
            assert_eq!(touched, (first..=last).collect::<Vec<_>>());
        }
        assert_eq!(pieces(7, 0).count(), 0);
    }

    #[test]
    fn a_look_holds_until_a_chunk_of_the_segment_leaves() {
        let empty = SegmentWord::default();
        assert_eq!(empty.look(1), None);
        let word = empty.with(0b110);
        assert_eq!(word.look(0b111), None);
        let look = word.look(0b100).expect("it is there");
        assert!(look.judge(word));
        assert!(look.judge(word.with(1)), "what comes harms nobody");
        let left = word.without(0b100);
        assert_eq!(left.chunks(), 0b010);
        assert!(!look.judge(left));
        assert!(!look.judge(left.with(0b100)), "it left and came back");
        let last = SegmentWord(u64::MAX);
        assert_eq!(
            last.without(1).0,
            u64::from(u32::MAX - 1),
            "a version ends at 32 bits"
        );
    }
}
