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
/// Version before, which is read, too: its regions are without copies.
const VERSION_BEFORE: u32 = 3;

/// Value that a name is bound to, on each server of the region.
#[derive(Serialize, Deserialize)]
pub(super) enum Manifest {
    /// The region, on the servers that hold the name: the first, or all of a region with copies.
    Region(Box<RegionManifest>),
    /// Marker on the other servers, which only keep extents.
    Part,
}

impl Manifest {
    /// Reads a manifest of this version, or of the one before. `None` if it is neither.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match postcard::take_from_bytes::<(u32, u32)>(bytes) {
            // The first kind is a region, which begins with its version.
            Ok(((0, VERSION_BEFORE), _)) => {
                let before = postcard::from_bytes::<((u32, u32), RegionBefore)>(bytes);
                Some(Self::Region(Box::new(before.ok()?.1.into())))
            }
            Ok(((0, version), _)) if version != VERSION => None,
            _ => postcard::from_bytes(bytes).ok(),
        }
    }
}

/// Region as [`VERSION_BEFORE`] describes it, behind the version.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Serialize))]
struct RegionBefore {
    bytes: u64,
    page_bytes: u64,
    codec: Codec,
    layout: Layout,
    seed: u64,
    reserved: bool,
    servers: Vec<String>,
    extents: Vec<Option<(u8, ExtentId)>>,
    map_bytes: u64,
    map: Vec<EntryWords>,
}

impl From<RegionBefore> for RegionManifest {
    fn from(before: RegionBefore) -> Self {
        let server = |endpoint| BoundServer {
            id: ServerId::default(),
            endpoint,
        };
        // The length of the only copy is that of the group.
        let group = |(server, id)| BoundGroup {
            arena: server,
            bytes: 0,
            members: vec![(server, id)],
        };
        let groups = before.extents.into_iter();
        Self {
            version: VERSION,
            bytes: before.bytes,
            page_bytes: before.page_bytes,
            codec: before.codec,
            layout: before.layout,
            seed: before.seed,
            reserved: before.reserved,
            copies: 1,
            servers: before.servers.into_iter().map(server).collect(),
            groups: groups.map(|extent| extent.map(group)).collect(),
            map_bytes: before.map_bytes,
            map: before.map,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_of_the_version_before_is_read() {
        let before = |version| {
            let region = RegionBefore {
                bytes: 9000,
                page_bytes: 4096,
                codec: Codec::Raw,
                layout: Layout::default(),
                seed: 5,
                reserved: true,
                servers: vec!["tcp://a:1".to_owned(), "tcp://b:1".to_owned()],
                extents: vec![Some((1, ExtentId(7))), None],
                map_bytes: 4096,
                map: vec![[1, 2, 3, 4]],
            };
            postcard::to_stdvec(&((0u32, version), region)).unwrap()
        };
        let Some(Manifest::Region(region)) = Manifest::decode(&before(VERSION_BEFORE)) else {
            panic!("a region");
        };
        assert_eq!((region.version, region.copies), (VERSION, 1));
        assert_eq!(
            (region.bytes, region.reserved, region.seed),
            (9000, true, 5)
        );
        assert_eq!(region.servers[1].endpoint, "tcp://b:1");
        let group = region.groups[0].as_ref().unwrap();
        assert_eq!(
            (group.arena, &group.members[..]),
            (1, &[(1, ExtentId(7))][..])
        );
        assert!(region.groups[1].is_none());
        assert_eq!(region.map, [[1, 2, 3, 4]]);
        let now = postcard::to_stdvec(&Manifest::Region(region)).unwrap();
        assert!(matches!(Manifest::decode(&now), Some(Manifest::Region(_))));
        let part = postcard::to_stdvec(&Manifest::Part).unwrap();
        assert!(matches!(Manifest::decode(&part), Some(Manifest::Part)));
        assert!(Manifest::decode(&before(VERSION + 1)).is_none());
        assert!(Manifest::decode(&before(VERSION_BEFORE)[..20]).is_none());
    }
}
