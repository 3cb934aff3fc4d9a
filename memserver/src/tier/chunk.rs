//! [`Chunk`]: the unit in which bytes leave memory and come back.
//!
//! The rule it keeps: plain data. [`TieredExtent`](super::extent::TieredExtent) says who may change
//! a chunk.

/// Unit of moves: large enough that a disk's latency is paid rarely, small enough that a page of 4
/// KiB does not wait for much else. A segment, which has one lock, is the largest page.
pub(super) use farpage_wire::segment::{CHUNK_BYTES, SEGMENT_CHUNKS};

use crate::handover::{HandedChunk, HandedPlace};

/// Number that stands for no slot of the spill file, and for no cell of the pool.
pub(super) const NONE: u32 = u32::MAX;

/// Longest compressed chunk. Storing a longer one compressed would save too little.
pub(super) const PACKED_MOST: usize = CHUNK_BYTES as usize / 4 * 3;

/// Place of a chunk's bytes.
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
    /// Time of the last fetch, as a [count of fetches](super::figures::Figures::tick); 0 for never.
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

impl Chunk {
    /// Returns the chunk for the next process. `None` if it is being moved or held.
    pub(super) fn hand_over(&self) -> Option<HandedChunk> {
        let place = match self.place {
            Place::Hole => HandedPlace::Hole,
            Place::Hot if self.pins == 0 => HandedPlace::Hot,
            Place::Compressed => HandedPlace::Compressed(self.cell),
            Place::Spilled => HandedPlace::Spilled,
            Place::Hot | Place::Busy | Place::Orphan => return None,
        };
        Some(HandedChunk {
            place,
            is_young: self.is_young,
            stored_bytes: self.stored_bytes,
            slot: self.slot,
            fetched: self.fetched,
            hash: self.hash,
        })
    }
}

impl From<&HandedChunk> for Chunk {
    fn from(handed: &HandedChunk) -> Self {
        let (place, cell) = match handed.place {
            HandedPlace::Hole => (Place::Hole, NONE),
            HandedPlace::Hot => (Place::Hot, NONE),
            HandedPlace::Compressed(cell) => (Place::Compressed, cell),
            HandedPlace::Spilled => (Place::Spilled, NONE),
        };
        Self {
            place,
            is_young: handed.is_young,
            pins: 0,
            // A length from elsewhere must fit the buffers.
            stored_bytes: handed.stored_bytes.min(CHUNK_BYTES as u32),
            cell,
            slot: handed.slot,
            fetched: handed.fetched,
            hash: handed.hash,
        }
    }
}
