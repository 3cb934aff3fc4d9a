//! [`ReaderSlots`]: slots of a named region that only older published versions refer to, and that
//! other programs still read.
//!
//! The rule it keeps: a slot that a read version refers to is not free. The servers that hold the
//! name count readers, and say with each publication which older versions have some. A version that
//! has none then can get none any more there, since programs open the newest. A slot is free when
//! all these servers have said so, but for those on which nothing is written any more.
//!
//! A version's writer remembers its slots: 8 bytes per page of each version that is read, and of
//! the last one. A program that opens a region for writing does not know the slots of versions that
//! were replaced before. It leaves all space alone that was free in the region's extents at the
//! opening, until these versions have no readers.

use std::{mem, sync::Arc};

use farpage_fabric::{AllocError, Session, VersionRead, Versions, register::is_unread};
use farpage_signals::Mutex;

use crate::place::SlotSpan;

/// Slots that are kept for the readers of one region.
pub(crate) struct ReaderSlots {
    name: Arc<str>,
    kept: Mutex<Kept>,
}

/// The slots of a version, in ascending order of their [packed](crate::place::SlotPlace::pack)
/// places.
pub(crate) type PackedPlaces = Arc<[u64]>;

/// Versions that a server has told, and the server's number in the pool.
pub(crate) type ToldVersions = (u8, Versions);

/// Answer of a server about a name's readers, when the name is opened for writing.
pub(crate) struct OpenedReaders {
    /// The server's number in the pool.
    pub(crate) server: u8,
    /// The server's number of the opened version, before the version was accepted again. `None`:
    /// the server had another version, so that it is not known which slots are read there.
    pub(crate) opened: Option<u64>,
    /// The versions, after that.
    pub(crate) told: Versions,
}

#[derive(Default)]
struct Kept {
    /// Replaced versions that may be read.
    versions: Vec<OldVersion>,
    servers: Vec<ServerReaders>,
    /// Slots that only the maps of `versions` refer to.
    slots: Vec<SlotSpan>,
    /// Space that was free at the opening, while versions before the opened one are read.
    unknown: Vec<SlotSpan>,
}

/// A replaced version, by the writer's count: 0 is the one that was opened.
struct OldVersion {
    number: u64,
    places: PackedPlaces,
}

/// Readers as one server has told them.
struct ServerReaders {
    /// Number of the server in the pool.
    server: u8,
    session: Arc<Session>,
    /// Numbers of the server's versions, ascending, each with the writer's own. A version between
    /// two of them is of a publication whose answer was lost, and counts as the one before.
    numbers: Vec<(u64, u64)>,
    /// Number of the opened version: the slots of those before are unknown.
    opened: u64,
    /// Replaced versions that are read, by the server's numbers.
    read: Vec<VersionRead>,
}

impl ServerReaders {
    /// Returns the writer's number of a version of the server.
    fn number_of(&self, theirs: u64) -> u64 {
        let mut known = self.numbers.iter().rev();
        known
            .find(|(first, _)| *first <= theirs)
            .map_or(0, |it| it.1)
    }

    /// True if a replaced version is read. `None` if the server has accepted none since, so that
    /// programs may still open it.
    fn reads(&self, version: u64) -> Option<bool> {
        let newest = self.numbers.last().map_or(0, |it| it.1);
        let mut read = self.read.iter();
        (newest > version).then(|| read.any(|it| self.number_of(it.version) == version))
    }

    fn reads_unknown(&self) -> bool {
        self.read.iter().any(|it| it.version < self.opened)
    }

    /// Notes what the server says, which has accepted version `number` of the writer if one is
    /// given.
    fn note(&mut self, told: &Versions, number: Option<u64>) {
        if let Some(number) = number {
            self.numbers.push((told.published, number));
        }
        self.read.clone_from(&told.read);
        let of_read = self.read.iter().map(|it| self.number_of(it.version));
        let of_read: Vec<u64> = of_read.collect();
        let newest = self.numbers.last().copied();
        (self.numbers).retain(|it| Some(*it) == newest || of_read.contains(&it.1));
    }
}

impl Kept {
    /// Takes out the slots that no version which may be read refers to any more. Readers count at
    /// servers that are `written`.
    fn take_free(&mut self, written: impl Fn(u8) -> bool) -> Vec<SlotSpan> {
        let written = |it: &&ServerReaders| written(it.server);
        let servers = &self.servers;
        (self.versions).retain(|version| {
            let said = servers.iter().filter(written);
            !is_unread(said.map(|it| it.reads(version.number)))
        });
        let is_read = |slot: &SlotSpan| {
            let place = slot.place.pack();
            let mut versions = self.versions.iter();
            versions.any(|version| version.places.binary_search(&place).is_ok())
        };
        let slots = mem::take(&mut self.slots);
        let (kept, mut free): (_, Vec<_>) = slots.into_iter().partition(is_read);
        self.slots = kept;
        let mut counting = self.servers.iter().filter(written);
        if !counting.any(ServerReaders::reads_unknown) {
            free.append(&mut self.unknown);
        }
        free
    }
}

impl ReaderSlots {
    /// Makes the readers, none yet, of the region `name`, which the servers of these `sessions`
    /// count. Each comes with its number in the pool.
    pub(crate) fn new(name: &str, sessions: impl IntoIterator<Item = (u8, Arc<Session>)>) -> Self {
        let servers = sessions.into_iter().map(|(server, session)| ServerReaders {
            server,
            session,
            numbers: Vec::new(),
            opened: 0,
            read: Vec::new(),
        });
        Self {
            name: name.into(),
            kept: Mutex::new(Kept {
                servers: servers.collect(),
                ..Kept::default()
            }),
        }
    }

    /// Notes the readers that servers told when the region was opened. The region's slots are at
    /// `places`, all of them taken. Takes the `holes` between them if other versions are read.
    pub(crate) fn opened(
        &self,
        readers: &[OpenedReaders],
        places: &PackedPlaces,
        holes: impl FnOnce() -> Vec<SlotSpan>,
    ) {
        let mut kept = self.kept.lock();
        let mut is_read = false;
        for said in readers {
            let mut servers = kept.servers.iter_mut();
            if let Some(it) = servers.find(|it| it.server == said.server) {
                it.opened = said.opened.unwrap_or(said.told.published);
                it.numbers.extend(said.opened.map(|number| (number, 0)));
                it.note(&said.told, Some(0));
                is_read |= it.reads_unknown();
            }
        }
        // A slot that an older version shares with the opened one goes when the region is written.
        kept.versions.push(OldVersion {
            number: 0,
            places: Arc::clone(places),
        });
        if is_read {
            kept.unknown = holes();
        }
    }

    /// Notes that version `number` has been published, as its holders `told`. Version `since`,
    /// whose slots are at `places`, is replaced. Returns true if that one may be read.
    pub(crate) fn published(
        &self,
        told: &[ToldVersions],
        number: u64,
        (since, places): (u64, PackedPlaces),
        written: impl Fn(u8) -> bool,
    ) -> bool {
        let mut kept = self.kept.lock();
        for (server, versions) in told {
            let mut servers = kept.servers.iter_mut();
            if let Some(it) = servers.find(|it| it.server == *server) {
                it.note(versions, Some(number));
            }
        }
        let version = OldVersion {
            number: since,
            places,
        };
        kept.versions.retain(|it| it.number != since);
        kept.versions.push(version);
        let said = kept.servers.iter().filter(|it| written(it.server));
        !is_unread(said.map(|it| it.reads(since)))
    }

    /// Keeps slots that the published version does not refer to, and replaced ones may. Returns
    /// slots that are free, since no version that is read refers to them.
    pub(crate) fn keep(
        &self,
        stale: impl IntoIterator<Item = SlotSpan>,
        written: impl Fn(u8) -> bool,
    ) -> Vec<SlotSpan> {
        let mut kept = self.kept.lock();
        kept.slots.extend(stale);
        kept.take_free(written)
    }

    /// Asks which versions are still read when the servers have no room. Returns the slots that are
    /// free by now.
    ///
    /// # Errors
    /// `full`, with the versions that are read, if nothing is free.
    pub(crate) fn make_room(
        &self,
        full: AllocError,
        written: impl Fn(u8) -> bool,
    ) -> Result<Vec<SlotSpan>, AllocError> {
        if !matches!(full, AllocError::Full { .. }) {
            return Err(full);
        }
        let asked: Vec<_> = {
            let kept = self.kept.lock();
            if kept.slots.is_empty() && kept.unknown.is_empty() {
                return Err(full);
            }
            let servers = kept.servers.iter().filter(|it| written(it.server));
            servers
                .map(|it| (it.server, Arc::clone(&it.session)))
                .collect()
        };
        let mut told = Vec::new();
        for (server, session) in asked {
            match session.readers(&self.name) {
                Ok(versions) => told.push((server, versions)),
                Err(error) if told.is_empty() => return Err(error.into()),
                // Its readers count as before.
                Err(_) => {}
            }
        }
        let mut kept = self.kept.lock();
        for (server, versions) in &told {
            let mut servers = kept.servers.iter_mut();
            let Some(it) = servers.find(|it| it.server == *server) else {
                continue;
            };
            // An answer from before the last publication lacks the readers that the publication
            // turned into readers of an older version.
            if versions.published >= it.numbers.last().map_or(0, |it| it.0) {
                it.note(versions, None);
            }
        }
        let free = kept.take_free(written);
        if !free.is_empty() {
            return Ok(free);
        }
        let most = told.into_iter().map(|(_, versions)| versions.read);
        let read = most.max_by_key(Vec::len).unwrap_or_default();
        Err(AllocError::Read {
            full: Box::new(full),
            name: Arc::clone(&self.name),
            read: read.into(),
        })
    }
}
