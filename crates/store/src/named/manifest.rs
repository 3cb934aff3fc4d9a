//! [`Manifest`]: the value that a name is bound to, and the words of a page map.
//!
//! The rule it keeps: published regions stay readable, so [`VERSION`] changes with every change of
//! these formats.

use std::collections::HashSet;

use farpage_fabric::{ExtentId, ServerId};
use serde::{Deserialize, Serialize};

use crate::{
    Codec, Layout,
    entry::{EntryWords, PageEntry},
    place::{SlotPlace, SlotSpan},
};

pub(super) const VERSION: u32 = 4;

/// Value that a name is bound to, on each server of the region.
#[derive(Serialize, Deserialize)]
pub(super) enum Manifest {
    /// The region, on the servers that hold the name: the first, or all of a region with copies.
    Region(Box<RegionManifest>),
    /// Marker on the other servers, which only keep extents.
    Part,
}

/// Server of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BoundServer {
    /// Identity of the server. Another one may have its endpoint by now.
    pub(super) id: ServerId,
    pub(super) endpoint: String,
}

/// Extents of different servers that hold the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BoundGroup {
    /// Server that entries name.
    pub(super) arena: u8,
    pub(super) bytes: u64,
    /// Server and extent of each copy that is complete.
    pub(super) members: Vec<(u8, ExtentId)>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct RegionManifest {
    pub(super) version: u32,
    pub(super) bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) codec: Codec,
    pub(super) layout: Layout,
    pub(super) seed: u64,
    /// True if the region's raw size is to be granted at once.
    pub(super) reserved: bool,
    /// Number of copies of each page.
    pub(super) copies: u8,
    /// Servers, by their numbers in entries.
    pub(super) servers: Vec<BoundServer>,
    /// Groups of extents, by their indices in entries.
    pub(super) groups: Vec<Option<BoundGroup>>,
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

/// Returns the indices of the groups that packed places lie in.
pub(super) fn extents_of(places: &[u64]) -> HashSet<u32> {
    let mut extents: Vec<u32> = (places.iter())
        .map(|place| SlotPlace::unpack(*place).extent)
        .collect();
    extents.dedup();
    extents.into_iter().collect()
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
