//! [`Manifest`]: the value that a name is bound to, and the words of a page map.
//!
//! The rule it keeps: published regions stay readable, so [`VERSION`] changes with every change of
//! these formats.

use farpage_fabric::ExtentId;
use serde::{Deserialize, Serialize};

use crate::{
    Codec, Layout,
    entry::{EntryWords, PageEntry},
    place::SlotSpan,
};

pub(super) const VERSION: u32 = 3;

/// Value that a name is bound to, on each server of the region.
#[derive(Serialize, Deserialize)]
pub(super) enum Manifest {
    /// The region, on its first server.
    Region(Box<RegionManifest>),
    /// Marker on the other servers, which only keep extents.
    Part,
}

#[derive(Serialize, Deserialize)]
pub(super) struct RegionManifest {
    pub(super) version: u32,
    pub(super) bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) codec: Codec,
    pub(super) layout: Layout,
    pub(super) seed: u64,
    /// True if the region's raw size is to be granted at once.
    pub(super) reserved: bool,
    /// Endpoints, by the servers' numbers in entries.
    pub(super) servers: Vec<String>,
    /// Server and extent, by the extents' indices in entries.
    pub(super) extents: Vec<Option<(u8, ExtentId)>>,
    pub(super) map_bytes: u64,
    pub(super) map: Vec<EntryWords>,
}

/// Returns the slot that an entry of a map refers to.
pub(super) fn span_of(words: &EntryWords) -> Option<SlotSpan> {
    PageEntry::decode(*words)?.slot()
}

/// Returns the slots of a version: those that its map refers to, and those of the map.
pub(super) fn places_of(map: &[u8], area: &[SlotSpan]) -> Vec<u64> {
    let pages = map.as_chunks::<32>().0.iter();
    let slots = pages.filter_map(|words| span_of(&words_of(words)));
    let slots = slots.chain(area.iter().copied());
    slots.map(|slot| slot.place.pack()).collect()
}

pub(super) fn words_of(bytes: &[u8; 32]) -> EntryWords {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

pub(super) fn bytes_of(words: EntryWords) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}
