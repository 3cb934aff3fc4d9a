//! [`PageStore::publish`]: writes a region's page map to remote memory and binds its name to it.
//!
//! The rule it keeps: until the name is bound, the previous publication is whole on all servers.
//! The name is bound once a majority of its holders has accepted the binding.

use std::{collections::HashSet, sync::Arc};

use farpage_fabric::{ExtentId, Session, host::Proposal, log::later};

use super::{
    manifest::{
        BoundGroup, BoundServer, Manifest, RegionManifest, VERSION, bytes_of, extents_of,
        places_of, span_of, words_of,
    },
    persist::Additions,
};
use crate::{
    PageStore, PublishStoreError,
    codec::{self, Form},
    entry::{EntryWords, PUBLISHED, PageEntry, portable},
    groups::ExtentGroup,
    mover::{MoveError, Mover},
    place::SlotSpan,
    pool::SlotPool,
    publications::{Ended, PIECE_BYTES, map_bytes},
    readers::ToldVersions,
    remote::{Backing, RemoteStore},
    turn::{Turn, Undecided, may_have_happened},
};

impl PageStore {
    /// Publishes what has been written back so far under the region's name, atomically. A program
    /// that opens the name gets this state or, if this call fails or the process dies in it, the
    /// previous one. (If the connection breaks in the last step, either of the two.) Pages may be
    /// filled and written back meanwhile.
    ///
    /// # Errors
    /// [`PublishStoreError`].
    pub fn publish(&self) -> Result<(), PublishStoreError> {
        let Backing::Remote(
            remote @ RemoteStore {
                claim: Some(claim),
                publications: Some(publications),
                turn: Some(turn),
                ..
            },
        ) = &self.backing
        else {
            return Err(PublishStoreError::NotNamed {
                region: self.label.clone(),
            });
        };
        let (pool, name) = (&remote.pool, claim.name());
        let map_bytes = map_bytes(self.bytes, self.page_bytes);
        let full = |source| PublishStoreError::Alloc {
            name: name.to_owned(),
            source,
        };
        let mut publication = publications.begin(pool, map_bytes).map_err(full)?;
        let fixed = pool.fix_members();
        let mut additions = Additions::new(pool, &remote.on_disk);
        // 1. Copy the map.
        let map = publication.copy(|| self.copy_map(map_bytes, &mut additions));
        let places = places_of(&map, publication.area());
        let used = match pool.has_copies() {
            true => extents_of(&places),
            false => HashSet::new(),
        };
        // 2. Write it, put what is new on the servers' disks, and bind the name to the map.
        let result = match self.write_map(pool, name, &map, publication.area()) {
            Ok(entries) => {
                (entries.iter().filter_map(span_of)).for_each(|slot| additions.add(slot, true));
                let mut binding = Places::new(pool, name, turn);
                match additions.write(pool, name, &mut binding.takers) {
                    Ok(()) => binding.prepare().and_then(|()| {
                        let manifest = self.manifest(remote, &binding, map_bytes, entries);
                        binding.bind(manifest, &used)
                    }),
                    Err(error) => Err(NotBound {
                        error,
                        is_unknown: false,
                    }),
                }
            }
            Err(failure) => {
                let (failed, error) = *failure;
                publication.give_up_area(pool, failed);
                Err(NotBound {
                    error,
                    is_unknown: false,
                })
            }
        };
        // 3. Slots that only the previous map referred to are free now. After a failure, or when
        //    the server has ended, slots are free that only this map refers to.
        let ended = match &result {
            Ok(told) => Ended::Bound(told.clone()),
            Err(NotBound {
                is_unknown: true, ..
            }) => Ended::Unknown,
            Err(_) => Ended::Failed,
        };
        publication.end(pool, ended, places, || self.mark_published(&map));
        // 4. Give back what was needed beside the reservation while older versions were read.
        if result.is_ok() && remote.reservation.is_some() {
            pool.shrink();
        }
        drop(fixed);
        result.map(drop).map_err(|failure| failure.error)
    }

    /// Copies the map, and lists the slots that the disks lack in `additions`.
    fn copy_map(&self, map_bytes: u64, additions: &mut Additions) -> Vec<u8> {
        let mut map = Vec::with_capacity(map_bytes as usize);
        for page in self.all() {
            let words = self.table.load_words(page);
            let entry = portable(words);
            if let Some(slot) = span_of(&entry) {
                additions.add(slot, words[1] & PUBLISHED == 0);
            }
            map.extend(bytes_of(entry));
        }
        map.resize(map_bytes as usize, 0);
        map
    }

    /// Marks the pages whose entries are still those of the map.
    fn mark_published(&self, map: &[u8]) {
        for (page, words) in self.all().iter().zip(map.as_chunks::<32>().0) {
            if span_of(&words_of(words)).is_some()
                && bytes_of(portable(self.table.load_words(page))) == *words
            {
                self.table.mark_published(page);
            }
        }
    }

    /// Writes the map's pieces to the slots of `area`; a piece of zeros needs no write. An error
    /// comes with the slot whose write failed.
    fn write_map(
        &self,
        pool: &SlotPool,
        name: &str,
        map: &[u8],
        area: &[SlotSpan],
    ) -> Result<Vec<EntryWords>, Box<(Option<SlotSpan>, PublishStoreError)>> {
        let name = || name.to_owned();
        let mut mover = Mover::new(pool);
        let mut entries: Vec<EntryWords> = Vec::new();
        for (piece, &slot) in map.chunks(PIECE_BYTES).zip(area) {
            if piece.iter().all(|&byte| byte == 0) {
                entries.push(PageEntry::Never.encode());
                continue;
            }
            let failed = |slot, error| Box::new((slot, error));
            let written = mover.write_copies(slot.place, piece);
            written.map_err(|error| match error {
                MoveError::Memory(source) => failed(
                    None,
                    PublishStoreError::Memory {
                        name: name(),
                        source,
                    },
                ),
                MoveError::Connect(source) => failed(
                    None,
                    PublishStoreError::Connect {
                        name: name(),
                        source,
                    },
                ),
                MoveError::Channel(source) => failed(
                    Some(slot),
                    PublishStoreError::Map {
                        name: name(),
                        source,
                    },
                ),
            })?;
            let entry = PageEntry::Stored {
                place: slot.place,
                stored_bytes: slot.bytes,
                form: Form::Raw,
                hash: codec::hash(piece, self.seed),
                published: false,
            };
            entries.push(entry.encode());
        }
        Ok(entries)
    }

    /// Returns the manifest of a map.
    fn manifest(
        &self,
        remote: &RemoteStore,
        places: &Places<'_>,
        map_bytes: u64,
        map: Vec<EntryWords>,
    ) -> RegionManifest {
        RegionManifest {
            version: VERSION,
            bytes: self.bytes,
            page_bytes: self.page_bytes as u64,
            codec: remote.scheme.codec,
            layout: remote.scheme.layout.clone(),
            seed: self.seed,
            reserved: remote.reservation.is_some(),
            copies: remote.pool.redundancy().copies() as u8,
            servers: places.servers(),
            groups: places.groups(),
            map_bytes,
            map,
        }
    }
}

/// Publication of a binding: its servers and extents.
pub(super) struct Places<'a> {
    pub(super) pool: &'a SlotPool,
    pub(super) name: &'a str,
    pub(super) turn: &'a Turn,
    /// Servers that take part, by their numbers.
    pub(super) takers: Vec<u8>,
}

/// Failure to bind a name.
pub(super) struct NotBound {
    pub(super) error: PublishStoreError,
    /// True if the name may be bound nevertheless.
    pub(super) is_unknown: bool,
}

impl<'a> Places<'a> {
    /// Takes the servers that answer. Of a pool without copies all are needed.
    pub(super) fn new(pool: &'a SlotPool, name: &'a str, turn: &'a Turn) -> Self {
        let servers = 0..pool.servers().len() as u8;
        let is_usable = |session: &Arc<Session>| {
            let number = pool.number_of(session);
            number.is_some_and(|server| pool.is_usable(server))
        };
        let takers = match pool.has_copies() && turn.is_enough(is_usable) {
            true => servers.filter(|&server| pool.is_usable(server)).collect(),
            false => servers.collect(),
        };
        Self {
            pool,
            name,
            turn,
            takers,
        }
    }

    /// Takes all servers.
    pub(super) fn all(pool: &'a SlotPool, name: &'a str, turn: &'a Turn) -> Self {
        Self {
            pool,
            name,
            turn,
            takers: (0..pool.servers().len() as u8).collect(),
        }
    }

    /// Makes the holders keep the extents of this version beside those of the one before, so that
    /// the version is whole wherever it is accepted. Servers that do not answer have no part in it.
    ///
    /// # Errors
    /// Too few holders answer; before the first version, any of them does not. The name keeps its
    /// binding.
    pub(super) fn prepare(&mut self) -> Result<(), NotBound> {
        if !self.turn.is_shared() {
            return Ok(());
        }
        let (pool, turn) = (self.pool, self.turn);
        let part = encode(&Manifest::Part);
        if !turn.is_founded() {
            let part = |session: &Arc<Session>| (part.clone(), self.held(session));
            let founded = turn.found(part).map_err(|it| it.into_error(self.name))?;
            for session in founded.iter().map(|it| &it.session) {
                turn.note_kept(session, &self.held(session));
            }
            return Ok(());
        }
        let mut first = None;
        for session in turn.holders() {
            let Some(server) = pool.number_of(session) else {
                continue;
            };
            if !self.takers.contains(&server) {
                continue;
            }
            let extents = self.held(session);
            if turn.keeps(session, &extents) {
                continue;
            }
            let proposal = Proposal {
                manifest: part.clone(),
                extents: &extents,
                ballot: None,
                keeps: true,
            };
            match session.propose(self.name, proposal) {
                Ok(_) => turn.note_kept(session, &extents),
                Err(error) => {
                    let is_it = |it: &u8| Arc::ptr_eq(pool.session(*it), session);
                    self.takers.retain(|it| !is_it(it));
                    first.get_or_insert(error);
                }
            }
        }
        let takes = |session: &Arc<Session>| self.takes(session);
        match turn.is_enough(takes) {
            true => Ok(()),
            false => Err(Undecided {
                have: turn.holders().filter(|it| takes(it)).count(),
                need: turn.need(),
                error: first,
                is_unknown: false,
            }
            .into_error(self.name)),
        }
    }

    fn takes(&self, session: &Arc<Session>) -> bool {
        let mut takers = self.takers.iter();
        takers.any(|server| Arc::ptr_eq(self.pool.session(*server), session))
    }

    /// Returns the extents of the version at a server.
    fn held(&self, session: &Arc<Session>) -> Vec<ExtentId> {
        let groups = self.groups();
        let members = groups.iter().flatten().flat_map(|group| &group.members);
        let its = members.filter(|(on, _)| Arc::ptr_eq(self.pool.session(*on), session));
        its.map(|(_, id)| *id).collect()
    }

    /// Binds the name to a region, and has the servers forget what only the version before has.
    /// `used` are the indices of the groups that the region's map refers to. Returns what the
    /// holders said.
    pub(super) fn bind(
        &self,
        manifest: RegionManifest,
        used: &HashSet<u32>,
    ) -> Result<Vec<ToldVersions>, NotBound> {
        let (pool, name) = (self.pool, self.name);
        let failed = |source| NotBound {
            is_unknown: may_have_happened(&source),
            error: PublishStoreError::Publish {
                name: name.to_owned(),
                source,
            },
        };
        let lacks = |index: &&u32| {
            let group = manifest.groups.get(**index as usize);
            group.is_none_or(|it| it.as_ref().is_none_or(|it| it.members.is_empty()))
        };
        if let Some(index) = used.iter().find(lacks) {
            return Err(NotBound {
                is_unknown: false,
                error: PublishStoreError::Lost {
                    name: name.to_owned(),
                    endpoints: pool.endpoints_of(*index),
                },
            });
        }
        let is_holder = |session: &Arc<Session>| {
            let mut holders = self.turn.holders();
            holders.any(|holder| Arc::ptr_eq(holder, session))
        };
        // 1. Without copies, one server holds the name. The others keep at least the extents that
        //    its maps need, of this version and of the one before. A server that holds none is told
        //    so, too.
        let part = encode(&Manifest::Part);
        let part_of = |session: &Arc<Session>, keeps| {
            let proposal = Proposal {
                manifest: part.clone(),
                extents: &self.held(session),
                ballot: None,
                keeps,
            };
            session.propose(name, proposal)
        };
        let mut keep_more = Vec::new();
        for (_, session) in pool.servers().iter().filter(|(_, it)| !is_holder(it)) {
            let bound = part_of(session, true).map_err(failed)?;
            if bound.keeps_more {
                keep_more.push(session);
            }
        }
        // 2. The holders' manifest is the publication.
        let region = encode(&Manifest::Region(Box::new(manifest)));
        let takes = |session: &Arc<Session>| self.takes(session);
        let whole = |session: &Arc<Session>| (region.clone(), self.held(session));
        let accepted = self.turn.propose(false, takes, whole);
        let accepted = accepted.map_err(|undecided| undecided.into_error(name))?;
        // 3. All free what only the version before has.
        self.turn.settle(false, &accepted, whole);
        for session in keep_more {
            if let Err(error) = part_of(session, false) {
                let (endpoint, name) = (session.endpoint().clone(), name.to_owned());
                later(move || {
                    tracing::warn!(%endpoint, name, %error, "memory of the version before stays until the next flush");
                });
            }
        }
        let told = accepted.into_iter().filter_map(|it| {
            let server = pool.number_of(&it.session)?;
            Some((server, it.bound.versions))
        });
        Ok(told.collect())
    }

    fn servers(&self) -> Vec<BoundServer> {
        let servers = self.pool.servers().iter();
        let server = |(_, session): &(usize, Arc<Session>)| BoundServer {
            id: self.turn.id_of(session).unwrap_or_default(),
            endpoint: session.endpoint().to_string(),
        };
        servers.map(server).collect()
    }

    /// Returns the groups with those of their complete copies whose servers take part.
    fn groups(&self) -> Vec<Option<BoundGroup>> {
        let groups = self.pool.bound_groups().into_iter();
        let group = |(arena, group): (u8, ExtentGroup)| BoundGroup {
            arena,
            bytes: group.bytes,
            members: (group.good())
                .filter(|(_, member)| self.takers.contains(&member.server))
                .map(|(_, member)| (member.server, member.id))
                .collect(),
        };
        groups.map(|it| it.map(group)).collect()
    }
}

fn encode(manifest: &Manifest) -> Vec<u8> {
    postcard::to_stdvec(manifest).expect("a manifest is plain data")
}

impl Undecided {
    /// Returns the failure to publish region `name`.
    fn into_error(self, name: &str) -> NotBound {
        let (reason, is_unknown) = (self.reason(), self.is_unknown);
        let Self { have, need, .. } = self;
        let name = name.to_owned();
        let error = match self.error {
            // A majority of one.
            Some(source) if need == 1 => PublishStoreError::Publish { name, source },
            _ => PublishStoreError::Holders {
                name,
                have,
                need,
                reason,
            },
        };
        NotBound { error, is_unknown }
    }
}
