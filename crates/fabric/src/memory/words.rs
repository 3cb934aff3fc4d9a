//! [`SegmentWords`] and marks: what the server and the clients that share an extent's memory tell
//! each other about its segments.
//!
//! The rule it keeps: words and marks are touched as atomics only, by every process.

#[cfg(feature = "rdma")]
use std::ptr::NonNull;
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use farpage_wire::{
    data::WORD_BYTES,
    segment::{SEGMENT_BYTES, SegmentWord},
};
use memmap2::{MmapOptions, MmapRaw};

use super::memfd::{open_anew, seal_to_read, sealable};

/// Bytes of a segment's mark.
pub(crate) const MARK_BYTES: u64 = 4;

/// Size of a page, the least that the kernel maps.
const PAGE_BYTES: u64 = 4096;

/// Words of an extent's segments. Clients that share its memory can read them, and only the server
/// can write them.
#[derive(Debug)]
pub struct SegmentWords {
    file: File,
    map: MmapRaw,
}

impl SegmentWords {
    /// Makes words for an extent of `extent_bytes` bytes, of which none is present.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or no memory.
    pub fn create(extent_bytes: u64) -> io::Result<Self> {
        let bytes = words_bytes(extent_bytes);
        let file = sealable(c"farpage-words", bytes)?;
        let map = MmapOptions::new().len(bytes as usize).map_raw(&file)?;
        map.advise(memmap2::Advice::DontFork)?;
        // The mapping above stays writable.
        seal_to_read(&file)?;
        Ok(Self { file, map })
    }

    /// Sets which chunks of a segment are present. A client that sees the new word sees the bytes
    /// that were brought in before. Later accesses by this thread come after the word is visible.
    ///
    /// # Panics
    /// If the extent has no such segment.
    pub fn set(&self, segment: usize, word: SegmentWord) {
        // A locked instruction: loads that follow do not overtake it.
        word_at(&self.map, segment).swap(word.0, Ordering::SeqCst);
    }

    /// Returns the word that was set last.
    ///
    /// # Panics
    /// If the extent has no such segment.
    pub fn get(&self, segment: usize) -> SegmentWord {
        SegmentWord(word_at(&self.map, segment).load(Ordering::Relaxed))
    }

    /// Returns the words' place in memory, for an adapter.
    #[cfg(feature = "rdma")]
    pub(crate) fn place(&self) -> NonNull<[u8]> {
        let first = NonNull::new(self.map.as_mut_ptr()).expect("a mapping is not at address 0");
        NonNull::slice_from_raw_parts(first, self.map.len())
    }

    /// Returns a descriptor for a client, which may keep it for as long as it likes.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left, or no `/proc`.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        open_anew(&self.file, false).map(OwnedFd::from)
    }
}

/// Returns the memory that an extent of `extent_bytes` bytes takes beside its own if clients can
/// reach it by themselves while it is [`paged`](super::ExtentMemory::paged): its words and marks.
pub fn paging_bytes(extent_bytes: u64) -> u64 {
    let (begin, end) = marks(extent_bytes);
    words_bytes(extent_bytes) + end - begin
}

/// Returns the size of the file that has the words of an extent of `extent_bytes` bytes.
pub(crate) fn words_bytes(extent_bytes: u64) -> u64 {
    let segments = extent_bytes.div_ceil(SEGMENT_BYTES);
    (segments * u64::from(WORD_BYTES)).next_multiple_of(PAGE_BYTES)
}

/// Returns where the marks of an extent of `extent_bytes` bytes begin and end in its file.
pub(crate) fn marks(extent_bytes: u64) -> (u64, u64) {
    let begin = extent_bytes.next_multiple_of(PAGE_BYTES);
    let segments = extent_bytes.div_ceil(SEGMENT_BYTES);
    (
        begin,
        (begin + segments * MARK_BYTES).next_multiple_of(PAGE_BYTES),
    )
}

/// Returns the word of a segment in a mapping of [`words_bytes`].
///
/// # Panics
/// If the mapping has no such word.
pub(crate) fn word_at(map: &MmapRaw, segment: usize) -> &AtomicU64 {
    assert!(segment < map.len() / size_of::<AtomicU64>());
    // SAFETY:
    // - checked against the mapping, which begins at a page and lives as long as the reference;
    // - words are touched as atomics only, by every process; a mapping that can only be read is
    //   only loaded from.
    unsafe { &*map.as_ptr().cast::<AtomicU64>().add(segment) }
}

/// Returns the mark of a segment in a mapping of an extent's file. A client sets a chunk's bit when
/// it touches the chunk. The server does not see the touch, and moves out chunks without a bit.
///
/// # Panics
/// If the mapping has no such mark.
pub(crate) fn mark_at(map: &MmapRaw, extent_bytes: u64, segment: usize) -> &AtomicU32 {
    let at = marks(extent_bytes).0 as usize + segment * MARK_BYTES as usize;
    assert!(at + MARK_BYTES as usize <= map.len());
    // SAFETY: as in `word_at`; marks begin at a page and have 4 bytes each. Whatever a client
    // writes there only says which of its chunks leave first.
    unsafe { &*map.as_ptr().add(at).cast::<AtomicU32>() }
}
