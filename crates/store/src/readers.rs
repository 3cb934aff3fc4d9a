//! [`ReaderSlots`]: slots of a named region that only older published versions refer to, and that
//! other programs still read.
//!
//! The rule it keeps: a slot that a read version refers to is not free. The region's first server
//! counts readers, and says with each publication which older versions have some. A version that
//! has none then can get none any more, since programs open the newest.
//!
//! A version's writer remembers its slots: 8 bytes per page of each version that is read, and of
//! the last one. A program that opens a region for writing does not know the slots of versions that
//! were replaced before. It leaves all space alone that was free in the region's extents at the
//! opening, until these versions have no readers.

use std::{mem, sync::Arc};

use farpage_fabric::{AllocError, Session, VersionRead, Versions};
use farpage_signals::Mutex;

use crate::place::SlotSpan;

/// Slots that are kept for the readers of one region.
pub(crate) struct ReaderSlots {
    name: Arc<str>,
    /// Session at the region's first server.
    session: Arc<Session>,
    kept: Mutex<Kept>,
}

/// The slots of a version, in ascending order of their [packed](crate::place::SlotPlace::pack)
/// places.
pub(crate) type PackedPlaces = Arc<[u64]>;

#[derive(Default)]
struct Kept {
    /// Older versions that were read when the server was last asked.
    versions: Vec<VersionSlots>,
    /// The published version, as of the newest answer.
    published: u64,
    /// Slots that only the maps of `versions` refer to.
    slots: Vec<SlotSpan>,
    /// The version that was opened.
    opened: u64,
    /// Space that was free at the opening, while versions before `opened` are read.
    unknown: Vec<SlotSpan>,
}

struct VersionSlots {
    number: u64,
    places: PackedPlaces,
}

impl Kept {
    fn is_read(&self, slot: &SlotSpan) -> bool {
        let place = slot.place.pack();
        let mut versions = self.versions.iter();
        versions.any(|version| version.places.binary_search(&place).is_ok())
    }

    /// Takes out the slots that no version that is read refers to any more.
    fn take_free(&mut self) -> Vec<SlotSpan> {
        let slots = mem::take(&mut self.slots);
        let (kept, mut free): (_, Vec<_>) = slots.into_iter().partition(|slot| self.is_read(slot));
        self.slots = kept;
        if !(self.versions.iter()).any(|version| version.number < self.opened) {
            free.append(&mut self.unknown);
        }
        free
    }
}

impl ReaderSlots {
    /// Makes the readers, none yet, of the region `name`, whose first server `session` is of.
    pub(crate) fn new(name: &str, session: &Arc<Session>) -> Self {
        Self {
            name: name.into(),
            session: Arc::clone(session),
            kept: Mutex::default(),
        }
    }

    /// Notes the readers that `versions` told when the region was opened. The region's slots are at
    /// `places`, all of them taken. Takes the `holes` between them if older versions are read.
    pub(crate) fn opened(
        &self,
        versions: &Versions,
        places: &PackedPlaces,
        holes: impl FnOnce() -> Vec<SlotSpan>,
    ) {
        let mut kept = self.kept.lock();
        kept.opened = versions.published;
        kept.published = versions.published;
        // A slot that an older version shares with the opened one goes when the region is written.
        let all = versions.read.iter().map(|read| VersionSlots {
            number: read.version,
            places: Arc::clone(places),
        });
        kept.versions = all.collect();
        if !kept.versions.is_empty() {
            kept.unknown = holes();
        }
    }

    /// Notes that a version has been published, as `answer` says. `stale` are slots that the new
    /// version does not refer to, but versions from `since` on, whose slots are at `places`, may.
    /// Returns slots that are free, since no version that is read refers to them.
    pub(crate) fn published(
        &self,
        answer: &Versions,
        (since, places): (u64, &PackedPlaces),
        stale: impl IntoIterator<Item = SlotSpan>,
    ) -> Vec<SlotSpan> {
        let mut kept = self.kept.lock();
        let known = mem::take(&mut kept.versions);
        let version = |read: &VersionRead| {
            let number = read.version;
            let known = known.iter().find(|version| version.number == number);
            let places = match known {
                Some(version) => Arc::clone(&version.places),
                None if number >= since => Arc::clone(places),
                // A version of a replaced region, which has extents of its own.
                None => Arc::default(),
            };
            VersionSlots { number, places }
        };
        kept.versions = answer.read.iter().map(version).collect();
        kept.published = answer.published;
        kept.slots.extend(stale);
        kept.take_free()
    }

    /// Asks which versions are still read when the servers have no room. Returns the slots that are
    /// free by now.
    ///
    /// # Errors
    /// `full`, with the versions that are read, if nothing is free.
    pub(crate) fn make_room(&self, full: AllocError) -> Result<Vec<SlotSpan>, AllocError> {
        if !matches!(full, AllocError::Full { .. }) {
            return Err(full);
        }
        let is_idle = {
            let kept = self.kept.lock();
            kept.slots.is_empty() && kept.unknown.is_empty()
        };
        if is_idle {
            return Err(full);
        }
        let Versions { published, read } = self.session.readers(&self.name)?;
        let mut kept = self.kept.lock();
        // An answer from before the last publication lacks the readers that the publication turned
        // into readers of an older version.
        if published >= kept.published {
            let is_read = |it: &VersionSlots| read.iter().any(|read| read.version == it.number);
            kept.versions.retain(is_read);
        }
        let free = kept.take_free();
        if !free.is_empty() {
            return Ok(free);
        }
        Err(AllocError::Read {
            full: Box::new(full),
            name: Arc::clone(&self.name),
            read: read.into(),
        })
    }
}
