//! [`Readers`]: slots of a named region that only older published versions refer to, and that other
//! programs still read.
//!
//! The rule it keeps: a slot that a read version refers to is not free. The region's first server
//! counts readers, and says with each publication which older versions have some. A version that
//! has none then can get none any more, since programs open the newest.
//!
//! Which slots a version refers to is remembered by its writer: 8 bytes per page of each version
//! that is read, and of the last one. A program that opens a region for writing does not know the
//! slots of versions that were replaced before. It leaves all space alone that was free in the
//! region's extents then, until these versions have no readers.

use std::{mem, sync::Arc};

use farpage_fabric::{AllocError, Session, VersionRead, Versions};
use parking_lot::Mutex;

use crate::place::Span;

/// What is kept for the readers of one region.
pub(crate) struct Readers {
    name: Arc<str>,
    /// At the region's first server.
    session: Arc<Session>,
    kept: Mutex<Kept>,
}

/// The slots of a version, in ascending order of their [packed](crate::place::Place::pack) places.
pub(crate) type Places = Arc<[u64]>;

#[derive(Default)]
struct Kept {
    /// Older versions that were read when the server was last asked.
    versions: Vec<Version>,
    /// The published version, as of the newest answer.
    published: u64,
    /// Slots that no map refers to but those of `versions`.
    slots: Vec<Span>,
    /// The version that was opened.
    opened: u64,
    /// What was free then, while versions before it are read.
    unknown: Vec<Span>,
}

struct Version {
    number: u64,
    places: Places,
}

impl Kept {
    fn is_read(&self, slot: &Span) -> bool {
        let place = slot.place.pack();
        let mut versions = self.versions.iter();
        versions.any(|version| version.places.binary_search(&place).is_ok())
    }

    /// Takes out what no version that is read refers to any more.
    fn take_free(&mut self) -> Vec<Span> {
        let slots = mem::take(&mut self.slots);
        let (kept, mut free): (_, Vec<_>) = slots.into_iter().partition(|slot| self.is_read(slot));
        self.slots = kept;
        if !(self.versions.iter()).any(|version| version.number < self.opened) {
            free.append(&mut self.unknown);
        }
        free
    }
}

impl Readers {
    /// Nobody reads the region named `name`, whose first server `session` is of.
    pub(crate) fn new(name: &str, session: &Arc<Session>) -> Self {
        Self {
            name: name.into(),
            session: Arc::clone(session),
            kept: Mutex::default(),
        }
    }

    /// The region was opened when `versions` told who reads it. Its slots are at `places`, and all
    /// of them are taken. Takes the `holes` between them, if versions before are read.
    pub(crate) fn opened(
        &self,
        versions: &Versions,
        places: &Places,
        holes: impl FnOnce() -> Vec<Span>,
    ) {
        let mut kept = self.kept.lock();
        kept.opened = versions.published;
        kept.published = versions.published;
        // A slot that they share with the opened version goes when the region is written.
        let all = versions.read.iter().map(|read| Version {
            number: read.version,
            places: Arc::clone(places),
        });
        kept.versions = all.collect();
        if !kept.versions.is_empty() {
            kept.unknown = holes();
        }
    }

    /// A version has been published, as `answer` says. `stale` are slots that it does not refer to,
    /// and that versions from `since` on may, whose slots are at `places`. Returns what is free,
    /// since nobody reads it.
    pub(crate) fn published(
        &self,
        answer: &Versions,
        (since, places): (u64, &Places),
        stale: impl IntoIterator<Item = Span>,
    ) -> Vec<Span> {
        let mut kept = self.kept.lock();
        let known = mem::take(&mut kept.versions);
        let version = |read: &VersionRead| {
            let number = read.version;
            let known = known.iter().find(|version| version.number == number);
            let places = match known {
                Some(version) => Arc::clone(&version.places),
                None if number >= since => Arc::clone(places),
                // Of another region, which this one has replaced: in extents of its own.
                None => Arc::default(),
            };
            Version { number, places }
        };
        kept.versions = answer.read.iter().map(version).collect();
        kept.published = answer.published;
        kept.slots.extend(stale);
        kept.take_free()
    }

    /// The servers have no room. Asks who still reads, and returns what is free, since nobody does
    /// any more.
    ///
    /// # Errors
    /// Nothing is free: `full`, and who reads what.
    pub(crate) fn make_room(&self, full: AllocError) -> Result<Vec<Span>, AllocError> {
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
        // An answer from before the last publication knows nothing of whom that made a reader of an
        // older version.
        if published >= kept.published {
            let is_read = |it: &Version| read.iter().any(|read| read.version == it.number);
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
