//! [`PageStore::open`]: a region from what its servers keep under its name.
//!
//! The rule it keeps: nothing that a server says is trusted. A map whose entries overlap, or lie
//! nowhere, is an error, and gives back what was opened.

use std::{collections::HashSet, sync::Arc, thread, time::Duration};

use farpage_fabric::{
    Extent, ExtentId, OpenNameError, PublishError, ServerId, Session, Versions,
    log::later,
    register::{self, Answer, Ballot, Missing},
};

use super::{
    manifest::{
        BoundServer, Manifest, RegionManifest, VERSION, extents_of, places_of, span_of, words_of,
    },
    publish::Places,
    turn::{Asked, Turn, Undecided},
};
use crate::{
    Cluster, OpenStoreError, PageIndex, PageStore, PublishStoreError, Redundancy,
    codec::{self, Chooser, Scheme},
    entry::{PageEntry, PageTable},
    mover::{MoveError, Mover},
    names::{Claim, check_disks},
    place::SlotSpan,
    pool::{PoolReservation, Purpose, SlotPool},
    publications::{PIECE_BYTES, Publications, map_bytes},
    readers::{ReaderSlots, ToldVersions},
    remote::{Backing, RemoteStore, check_page_bytes, reserved_bytes},
};

/// Number of attempts to read the version of a region on several servers while it is published.
/// Each attempt takes less time than a publication.
const READ_TRIES: u32 = 10;
/// Pause after the first of these attempts, and so much more after each further one: a publication
/// takes milliseconds.
const READ_PAUSE: Duration = Duration::from_millis(2);

impl PageStore {
    /// Opens the region that was last published under `name`; errors call it `region`. Its length,
    /// page size and codec are those it was published with. No other store can open it for writing
    /// before this one is dropped.
    ///
    /// # Errors
    /// [`OpenStoreError`].
    pub fn open(
        cluster: &Arc<Cluster>,
        region: impl Into<Arc<str>>,
        name: &str,
    ) -> Result<Arc<Self>, OpenStoreError> {
        let opened = OpenedName::open(cluster, name, Vote::Asked)?;
        let pool = opened.pool(cluster, name, |holders| {
            Purpose::Named(ReaderSlots::new(name, holders))
        })?;
        if opened.turn.as_ref().is_some_and(Turn::is_shared) {
            opened.complete(&pool, name)?;
        }
        let store = Self::of_opened(cluster, region.into(), name, opened, Arc::clone(&pool))?;
        if pool.has_copies() {
            pool.set_whole();
            let started = cluster.start_repairs();
            started.map_err(|source| OpenStoreError::Repairs {
                name: name.to_owned(),
                source,
            })?;
        }
        Ok(store)
    }

    /// Opens the version that is published now, to read it. Any number of stores and programs can,
    /// also while another has the region open for writing. The version does not change before this
    /// store is dropped. Its pages are not to be written back.
    ///
    /// # Errors
    /// [`OpenStoreError`].
    pub fn open_to_read(
        cluster: &Arc<Cluster>,
        region: impl Into<Arc<str>>,
        name: &str,
    ) -> Result<Arc<Self>, OpenStoreError> {
        let mut tries = 0;
        let (opened, pool) = loop {
            tries += 1;
            let opened = OpenedName::read(cluster, name).and_then(|opened| {
                let pool = opened.pool(cluster, name, |_| Purpose::Reading)?;
                Ok((opened, pool))
            });
            match opened {
                Ok(opened) => break opened,
                // Another server was asked before the version was published.
                Err(OpenStoreError::ExtentMissing { .. } | OpenStoreError::Holders { .. })
                    if cluster.sessions().len() > 1 && tries < READ_TRIES =>
                {
                    thread::sleep(tries * READ_PAUSE);
                }
                Err(error) => return Err(error),
            }
        };
        Self::of_opened(cluster, region.into(), name, opened, pool)
    }

    fn of_opened(
        cluster: &Arc<Cluster>,
        region: Arc<str>,
        name: &str,
        opened: OpenedName,
        pool: Arc<SlotPool>,
    ) -> Result<Arc<Self>, OpenStoreError> {
        let damaged = |detail: &str| damaged(name, detail);
        // 1. The servers and extents under the numbers that the map uses.
        let is_read_only = pool.readers().is_none();
        let scheme = opened.scheme(name)?;
        let page_bytes = opened.page_bytes(&region, name)?;
        // 2. The map, and the slots that it is in.
        let manifest = &opened.manifest;
        let slots: Vec<_> = manifest.map.iter().filter_map(span_of).collect();
        if let Some(index) = opened.missing_group(&pool, &places_of(&[], &slots)) {
            return Err(opened.extent_missing(name, index));
        }
        let map = opened.read_map(&pool, name)?;
        let pages = manifest.bytes.div_ceil(manifest.page_bytes);
        let entries = usize::try_from(pages)
            .ok()
            .and_then(|pages| map.get(..pages.checked_mul(32)?))
            .ok_or_else(|| damaged("its page map is shorter than its pages"))?;
        if !slots.iter().all(|slot| pool.claim(*slot)) {
            return Err(damaged("pieces of its map overlap, or lie nowhere"));
        }
        // 3. The store. Its table comes before the reservation, which nothing would take back.
        let table = PageTable::new(manifest.bytes, page_bytes)?;
        let reservation = match is_read_only {
            true => None,
            false => opened.reserve(&pool, page_bytes, name)?,
        };
        let mut places = places_of(&map, &slots);
        places.sort_unstable();
        if let Some(index) = opened.missing_group(&pool, &places) {
            return Err(opened.extent_missing(name, index));
        }
        let places = Arc::from(places);
        let told = opened.extents.told(&pool);
        let publications = (!is_read_only).then(|| Publications::of(Arc::clone(&places), slots));
        let is_reserved = reservation.is_some();
        let chooser = Chooser::new(&cluster.traffic, &scheme, pages);
        let remote = RemoteStore {
            pool: pool.clone(),
            chooser: chooser.map(Box::new),
            scheme: Box::new(scheme),
            page_bytes,
            reservation,
            claim: opened.claim.map(Box::new),
            turn: opened.turn.map(Box::new),
            publications,
        };
        let (bytes, seed) = (manifest.bytes, manifest.seed);
        let backing = Backing::Remote(remote);
        let store = Self::new(cluster, region, bytes, page_bytes, table, seed, backing);
        // From here on the store gives the extents back.
        opened.extents.hand_over(&pool);
        // 4. The entries.
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("made so above")
        };
        for (page, words) in PageIndex(0).onwards().zip(entries.as_chunks::<32>().0) {
            let entry = PageEntry::decode(words_of(words))
                .ok_or_else(|| damaged("an entry of its page map is none"))?;
            store.adopt(remote, page, entry).map_err(damaged)?;
        }
        // 5. All slots of the pages are taken now. Take the space that older versions may use, and
        //    slots for maps to come.
        if let Some(readers) = pool.readers() {
            readers.opened(&told, &places, || pool.take_holes());
        }
        if is_reserved && let Some(publications) = &remote.publications {
            publications.set_aside(&pool, map_bytes(bytes, page_bytes), 1);
        }
        Ok(store)
    }

    /// Takes over the entry of a published page. An error says what is wrong with the entry.
    fn adopt(
        &self,
        remote: &RemoteStore,
        page: PageIndex,
        entry: PageEntry,
    ) -> Result<(), &'static str> {
        let (page_bytes, pool) = (self.page_bytes, &remote.pool);
        match entry {
            PageEntry::Never => return Ok(()),
            PageEntry::Repeated { .. } => {}
            PageEntry::Kept { .. } => return Err("an entry refers to a store of its owner's"),
            PageEntry::Stored {
                place,
                stored_bytes,
                form,
                ..
            } => {
                let slot = SlotSpan {
                    place,
                    bytes: stored_bytes,
                };
                let is_possible = (remote.scheme).allows(form, stored_bytes as usize, page_bytes);
                if !(is_possible && pool.claim(slot)) {
                    return Err(
                        "two entries of its page map overlap, or one lies outside its extents",
                    );
                }
            }
        }
        self.table.store(page, entry);
        if let Some(slot) = entry.slot()
            && remote.publications.is_some()
        {
            pool.count_contents(slot, page_bytes, 1);
            self.table.mark_published(page);
        }
        Ok(())
    }
}

fn not_opened(name: &str, error: OpenNameError) -> OpenStoreError {
    match error {
        OpenNameError::InUse { endpoint, name } => OpenStoreError::InUse { name, endpoint },
        source => OpenStoreError::Open {
            name: name.to_owned(),
            source,
        },
    }
}

fn damaged(name: &str, detail: &str) -> OpenStoreError {
    OpenStoreError::Damaged {
        name: name.to_owned(),
        detail: detail.to_owned(),
    }
}

/// An opened name, given back unless a store takes it over.
struct OpenedName {
    manifest: Box<RegionManifest>,
    extents: OpenedExtents,
    /// Turn at the name, let go after the extents. A region that is only read has none.
    turn: Option<Turn>,
    /// Claim on the name, let go after the extents. A region that is only read claims nothing.
    claim: Option<Claim>,
}

/// Extent: the id that the manifest knows, and the extent as it is leased to this client.
type LeasedExtent = (ExtentId, Extent);

/// A server's part of an opened name.
struct OpenedServer {
    session: Arc<Session>,
    answer: Answer,
    manifest: Vec<u8>,
    extents: Vec<LeasedExtent>,
    versions: Versions,
}

/// Parts of an opened name, by server. Dropping this value gives the extents back.
struct OpenedExtents(Vec<OpenedServer>);

impl Drop for OpenedExtents {
    fn drop(&mut self) {
        for OpenedServer {
            session, extents, ..
        } in &self.0
        {
            give_back(session, extents);
        }
    }
}

fn give_back(session: &Session, extents: &[LeasedExtent]) {
    for (_, extent) in extents {
        if let Err(error) = session.release(extent.id) {
            let (endpoint, extent) = (session.endpoint().clone(), extent.id);
            later(move || {
                tracing::warn!(%endpoint, %extent, %error, "extent not given back");
            });
        }
    }
}

impl OpenedExtents {
    /// Leaves the pool's extents to the pool. Gives back extents that an unfinished publication had
    /// added, and copies that are not complete.
    fn hand_over(mut self, pool: &SlotPool) {
        let groups = pool.groups.all().into_iter().flatten();
        let members = groups.flat_map(|group| group.members().collect::<Vec<_>>());
        let kept: HashSet<_> = members
            .map(|(_, member)| (member.server, member.id))
            .collect();
        for OpenedServer {
            session, extents, ..
        } in &mut self.0
        {
            let servers = (0..).zip(pool.servers());
            let its: Vec<u8> = servers
                .filter(|(_, (_, other))| Arc::ptr_eq(other, session))
                .map(|(server, _)| server)
                .collect();
            let is_kept = |id| its.iter().any(|server| kept.contains(&(*server, id)));
            extents.retain(|(_, extent)| !is_kept(extent.id));
        }
    }

    /// Returns the versions that servers of the pool have told.
    fn told(&self, pool: &SlotPool) -> Vec<ToldVersions> {
        let told = self.0.iter().filter_map(|it| {
            let server = pool.number_of(&it.session)?;
            Some((server, it.versions.clone()))
        });
        told.collect()
    }

    fn answers(&self) -> Vec<Answer> {
        self.0.iter().map(|it| it.answer.clone()).collect()
    }

    /// Finds the region that servers with a ballot agree on.
    fn region(&self, name: &str, ballot: &Ballot) -> Result<Box<RegionManifest>, OpenStoreError> {
        let mut manifest = None;
        for it in &self.0 {
            let unreadable = || {
                let endpoint = it.session.endpoint();
                damaged(
                    name,
                    &format!("{endpoint} has a manifest for it that this version cannot read"),
                )
            };
            let accepted = it.answer.1.accepted.as_ref();
            if accepted.is_some_and(|it| it.removed) {
                continue;
            }
            match postcard::from_bytes(&it.manifest) {
                Ok(Manifest::Region(found)) if found.version == VERSION => {
                    let accepted = accepted.ok_or_else(unreadable)?;
                    if accepted.stamp == ballot.stamp {
                        manifest = Some(found);
                    } else if self.is_rival(ballot, accepted) {
                        return Err(damaged(
                            name,
                            "several servers have a region of that name, published by clients of one of them: open it with that server alone",
                        ));
                    }
                }
                Ok(Manifest::Part) => {}
                _ => return Err(unreadable()),
            }
        }
        manifest.ok_or_else(|| OpenStoreError::NotFound {
            name: name.to_owned(),
        })
    }

    /// True if another ballot is that of another region: its own holders agree on it.
    fn is_rival(&self, ballot: &Ballot, other: &Ballot) -> bool {
        let is_strange = |id: &ServerId| !ballot.holders.contains(id);
        let agrees = |id: &ServerId| {
            let mut servers = self.0.iter();
            servers.any(|it| it.answer.0 == *id && it.answer.1.accepted.as_ref() == Some(other))
        };
        other.holders.iter().all(is_strange) && register::is_majority(&other.holders, agrees)
    }
}

/// Say of the holders of a name that do not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vote {
    /// A majority has to answer.
    Asked,
    /// The operator says that the others are gone for good.
    Waived,
}

impl Cluster {
    /// Makes the servers of this cluster the only holders of a name whose other holders are gone for
    /// good, with the newest version that they have. A region with copies can be opened for writing
    /// then. Changes that only the other holders have are lost, and those servers must not come back
    /// to programs that do not use one of these.
    ///
    /// # Errors
    /// [`OpenStoreError`]
    pub fn adopt(self: &Arc<Self>, name: &str) -> Result<(), OpenStoreError> {
        let opened = OpenedName::open(self, name, Vote::Waived)?;
        let pool = opened.pool(self, name, |holders| {
            Purpose::Named(ReaderSlots::new(name, holders))
        })?;
        opened.complete(&pool, name)
    }
}

/// Servers that did not answer, each with its reason.
type Silent = Vec<(Arc<Session>, OpenNameError)>;

impl OpenedName {
    fn open(cluster: &Arc<Cluster>, name: &str, vote: Vote) -> Result<Self, OpenStoreError> {
        check_disks(&cluster.name_sessions()).map_err(|source| OpenStoreError::Mixed {
            name: name.to_owned(),
            source,
        })?;
        let claim = Claim::here(cluster, name).ok_or_else(|| OpenStoreError::Held {
            name: name.to_owned(),
        })?;
        let open = |session: &Arc<Session>| {
            let named = session.open(name)?;
            claim.opened(session);
            let leased = named.extents.iter().map(|extent| (extent.id, *extent));
            Ok(OpenedServer {
                session: session.clone(),
                answer: named.vote,
                manifest: named.manifest,
                extents: leased.collect(),
                versions: named.versions,
            })
        };
        let (extents, silent) = ask_all(cluster, name, open)?;
        let answers = extents.answers();
        let found = match vote {
            Vote::Asked => register::to_write(&answers),
            Vote::Waived => Ok(register::newest(&answers)),
        };
        let found = found.map(|it| it.cloned());
        let ballot = choose(name, found, &silent, "writers wait for them")?;
        let manifest = extents.region(name, &ballot)?;
        if manifest.copies <= 1 {
            needs_all(name, &silent)?;
        }
        // Claimed also on servers without pages of the region: it may be published there again.
        let failed = |error| match error {
            PublishError::InUse { endpoint, name } => OpenStoreError::InUse { name, endpoint },
            source => OpenStoreError::Claim {
                name: name.to_owned(),
                source,
            },
        };
        let has_answered = |session: &Arc<Session>| {
            let mut silent = silent_sessions(&silent);
            !silent.any(|other| Arc::ptr_eq(other, session))
        };
        let asked = claim.take(true, has_answered).map_err(failed)?;
        let asked = holders_first(asked, &ballot.holders);
        let before = match vote {
            Vote::Asked => &ballot.holders[..],
            Vote::Waived => &[],
        };
        let copies = usize::from(manifest.copies.max(1));
        let turn = Turn::begin(name, &asked, before, copies);
        let turn = turn.map_err(|undecided| too_few(name, undecided))?;
        Ok(Self {
            manifest,
            extents,
            turn: Some(turn),
            claim: Some(claim),
        })
    }

    /// Opens a name for reading on all servers.
    fn read(cluster: &Arc<Cluster>, name: &str) -> Result<Self, OpenStoreError> {
        let read = |session: &Arc<Session>| {
            let reading = session.read(name)?;
            Ok(OpenedServer {
                session: session.clone(),
                answer: reading.vote,
                manifest: reading.manifest,
                extents: reading.extents,
                versions: Versions::default(),
            })
        };
        let (mut extents, silent) = ask_all(cluster, name, read)?;
        let found = register::to_read(&extents.answers()).map(|it| it.cloned());
        let ballot = choose(
            name,
            found,
            &silent,
            "a version that is being published, or whose writer has died, is read when the region has been opened for writing",
        )?;
        let manifest = extents.region(name, &ballot)?;
        if manifest.copies <= 1 {
            needs_all(name, &silent)?;
        }
        // A holder that has another version counts this reader for that one.
        for it in &mut extents.0 {
            let accepted = it.answer.1.accepted.as_ref();
            if accepted.is_some_and(|accepted| accepted.stamp != ballot.stamp) {
                give_back(&it.session, &std::mem::take(&mut it.extents));
            }
        }
        Ok(Self {
            manifest,
            extents,
            turn: None,
            claim: None,
        })
    }

    /// Makes the binding that was found the only one: has the holders accept it in this turn.
    fn complete(&self, pool: &SlotPool, name: &str) -> Result<(), OpenStoreError> {
        let turn = self.turn.as_ref().expect("opened for writing");
        let manifest = RegionManifest::clone(&self.manifest);
        // It stays as it is: copies on servers that are away are complete until a page is written.
        // Every server that takes part has to know it.
        let places = Places::all(pool, name, turn);
        let bound = places.bind(manifest, &HashSet::new());
        let failed = |source| OpenStoreError::Complete {
            name: name.to_owned(),
            source: Box::new(source),
        };
        let told = bound.map_err(|failure| failed(failure.error))?;
        let (have, need) = (told.len(), turn.holders().count());
        match have == need {
            true => Ok(()),
            false => Err(failed(PublishStoreError::Holders {
                name: name.to_owned(),
                have,
                need,
                reason: "a server has fallen silent".to_owned(),
            })),
        }
    }

    fn scheme(&self, name: &str) -> Result<Scheme, OpenStoreError> {
        let manifest = &self.manifest;
        let elements = manifest.layout.elements.as_ref();
        if elements.is_some_and(|elements| !elements.fit(manifest.bytes)) {
            return Err(damaged(name, "it is shorter than its elements"));
        }
        Scheme::new(manifest.codec, manifest.layout.clone())
            .map_err(|error| damaged(name, &error.to_string()))
    }

    fn page_bytes(&self, region: &Arc<str>, name: &str) -> Result<usize, OpenStoreError> {
        let page_bytes = usize::try_from(self.manifest.page_bytes).unwrap_or(usize::MAX);
        match check_page_bytes(region, page_bytes) {
            Ok(()) => Ok(page_bytes),
            Err(_) => Err(damaged(name, "its page size is impossible")),
        }
    }

    /// Reserves memory for the region, if it is fully reserved.
    fn reserve(
        &self,
        pool: &SlotPool,
        page_bytes: usize,
        name: &str,
    ) -> Result<Option<PoolReservation>, OpenStoreError> {
        if !self.manifest.reserved {
            return Ok(None);
        }
        let bytes = reserved_bytes(self.manifest.bytes, page_bytes, true);
        let failed = |source| OpenStoreError::Alloc {
            name: name.to_owned(),
            source,
        };
        pool.reserve(bytes, page_bytes).map_err(failed).map(Some)
    }

    /// Makes a pool that numbers servers and extents as the manifest does, and has the cluster's
    /// other servers behind them. In the place of a missing server of a region with copies is
    /// another one, which has none of its extents.
    fn pool(
        &self,
        cluster: &Cluster,
        name: &str,
        purpose: impl FnOnce(Vec<(u8, Arc<Session>)>) -> Purpose,
    ) -> Result<Arc<SlotPool>, OpenStoreError> {
        let manifest = &self.manifest;
        let has_copies = manifest.copies > 1;
        // 1. The servers.
        let found = self.found_ports(cluster, name)?;
        let stand_in = found.iter().flatten().next().copied();
        let stand_in = stand_in.ok_or_else(|| damaged(name, "it is on no server that answers"))?;
        let mut ports: Vec<usize> = found.iter().map(|port| port.unwrap_or(stand_in)).collect();
        let sessions = cluster.sessions();
        let is_new = |port: &usize| {
            let endpoint = sessions[*port].endpoint().to_string();
            let takes_part = || match &self.turn {
                Some(turn) => turn.id_of(&sessions[*port]).is_some(),
                None => true,
            };
            match has_copies {
                true => !ports.contains(port) && takes_part(),
                false => !(manifest.servers.iter()).any(|it| it.endpoint == endpoint),
            }
        };
        let others: Vec<usize> = cluster.name_ports().into_iter().filter(is_new).collect();
        ports.extend(others);
        let holders = (self.turn.as_ref()).map_or(Vec::new(), |it| it.numbered(cluster, &ports));
        let redundancy = match manifest.copies {
            0 | 1 => Redundancy::None,
            copies => Redundancy::Copies(copies),
        };
        if !redundancy.is_valid() {
            return Err(damaged(name, "its number of copies is impossible"));
        }
        let pool = cluster.own_pool(ports, purpose(holders), redundancy);
        // 2. The extents that are there.
        for (index, group) in (0..).zip(&manifest.groups) {
            let Some(group) = group else {
                pool.groups.add_gap();
                continue;
            };
            if usize::from(group.arena) >= manifest.servers.len() {
                return Err(damaged(name, "its extents are on no server"));
            }
            let here = |&(server, id): &(u8, ExtentId)| {
                let port = found.get(usize::from(server)).copied().flatten()?;
                let mut servers = self.extents.0.iter();
                let server_part = servers.find(|it| Arc::ptr_eq(&it.session, &sessions[port]))?;
                let mut extents = server_part.extents.iter();
                let (_, extent) = extents.find(|(known, _)| *known == id)?;
                (extent.bytes >= group.bytes).then_some((server, extent.id))
            };
            let members: Vec<_> = group.members.iter().filter_map(here).collect();
            let most = usize::from(manifest.copies.max(1));
            if members.len() > most {
                return Err(damaged(name, "it has more copies than it says"));
            }
            if members.is_empty() && !has_copies {
                return Err(self.extent_missing(name, index));
            }
            pool.add_opened(group.arena, group.bytes, members);
        }
        pool.groups.end_gaps();
        Ok(pool)
    }

    /// Returns the cluster's port of each server of the manifest. `None`: the server of a region
    /// with copies is missing.
    fn found_ports(
        &self,
        cluster: &Cluster,
        name: &str,
    ) -> Result<Vec<Option<usize>>, OpenStoreError> {
        let sessions = cluster.sessions();
        let port_of = |server: &BoundServer| {
            if self.manifest.copies > 1 {
                let mut opened = self.extents.0.iter();
                let session = &opened.find(|it| it.answer.0 == server.id)?.session;
                return sessions.iter().position(|it| Arc::ptr_eq(it, session));
            }
            sessions
                .iter()
                .rposition(|session| session.endpoint().to_string() == server.endpoint)
        };
        let ports = self
            .manifest
            .servers
            .iter()
            .map(|server| match port_of(server) {
                None if self.manifest.copies <= 1 => Err(OpenStoreError::ServerMissing {
                    name: name.to_owned(),
                    endpoint: server.endpoint.clone(),
                }),
                port => Ok(port),
            });
        ports.collect()
    }

    /// Returns a group that `places` lie in and that no server has a copy of.
    fn missing_group(&self, pool: &SlotPool, places: &[u64]) -> Option<u32> {
        let is_missing = |index: &u32| {
            let group = pool.groups.get(*index);
            group.is_some_and(|group| group.members().count() == 0)
        };
        extents_of(places).into_iter().find(is_missing)
    }

    fn extent_missing(&self, name: &str, index: u32) -> OpenStoreError {
        let group = self.manifest.groups.get(index as usize);
        let members = group.and_then(Option::as_ref).map(|it| &it.members[..]);
        let members = members.unwrap_or_default();
        let endpoint = |server: u8| {
            let server = self.manifest.servers.get(usize::from(server));
            server.map_or_else(String::new, |it| it.endpoint.clone())
        };
        let endpoints: Vec<_> = members
            .iter()
            .map(|(server, _)| endpoint(*server))
            .collect();
        OpenStoreError::ExtentMissing {
            name: name.to_owned(),
            endpoint: endpoints.join(" and "),
            extent: members.first().map_or(ExtentId(0), |(_, id)| *id),
        }
    }

    fn read_map(&self, pool: &SlotPool, name: &str) -> Result<Vec<u8>, OpenStoreError> {
        let damaged = || damaged(name, "its page map is not what was published");
        let name = || name.to_owned();
        let map_bytes = usize::try_from(self.manifest.map_bytes).map_err(|_| damaged())?;
        if map_bytes.div_ceil(PIECE_BYTES) != self.manifest.map.len() {
            return Err(damaged());
        }
        let mut mover = Mover::new(pool);
        let mut map = Vec::new();
        for (i, words) in self.manifest.map.iter().enumerate() {
            let len = (map_bytes - i * PIECE_BYTES).min(PIECE_BYTES);
            match PageEntry::decode(*words) {
                Some(PageEntry::Never) => map.resize(map.len() + len, 0),
                Some(PageEntry::Stored {
                    place,
                    hash,
                    stored_bytes,
                    ..
                }) if stored_bytes as usize == len && pool.group(place).is_some() => {
                    let is_right = |piece: &[u8]| codec::hash(piece, self.manifest.seed) == hash;
                    let piece = mover.read_right(place, len, is_right);
                    let piece = piece.map_err(|error| match error {
                        MoveError::Memory(source) => OpenStoreError::Memory {
                            name: name(),
                            source,
                        },
                        MoveError::Connect(source) => OpenStoreError::Connect {
                            name: name(),
                            source,
                        },
                        MoveError::Channel(source) => OpenStoreError::Map {
                            name: name(),
                            source,
                        },
                    })?;
                    let piece = piece.ok_or_else(damaged)?;
                    map.extend_from_slice(piece.as_ref());
                }
                _ => return Err(damaged()),
            }
        }
        Ok(map)
    }
}

/// Asks all servers for a name. Returns their parts, and those that did not answer.
fn ask_all(
    cluster: &Cluster,
    name: &str,
    ask: impl Fn(&Arc<Session>) -> Result<OpenedServer, OpenNameError>,
) -> Result<(OpenedExtents, Silent), OpenStoreError> {
    let (mut parts, mut silent) = (OpenedExtents(Vec::new()), Vec::new());
    for session in cluster.name_sessions() {
        match ask(&session) {
            Ok(part) => parts.0.push(part),
            Err(OpenNameError::NotFound { .. }) => {}
            Err(error @ OpenNameError::InUse { .. }) => return Err(not_opened(name, error)),
            Err(error) => silent.push((session, error)),
        }
    }
    if parts.0.is_empty()
        && let Some((_, error)) = silent.pop()
    {
        return Err(not_opened(name, error));
    }
    Ok((parts, silent))
}

fn silent_sessions(silent: &Silent) -> impl Iterator<Item = &Arc<Session>> {
    silent.iter().map(|(session, _)| session)
}

/// Returns the ballot that was found, which is that of a region.
fn choose(
    name: &str,
    found: Result<Option<Ballot>, Missing>,
    silent: &Silent,
    writing: &'static str,
) -> Result<Ballot, OpenStoreError> {
    match found {
        Ok(Some(ballot)) if !ballot.removed => Ok(ballot),
        Ok(_) => Err(OpenStoreError::NotFound {
            name: name.to_owned(),
        }),
        Err(Missing { have, need, .. }) => {
            let reasons = silent.iter().map(|(_, error)| format!("; {error}"));
            Err(OpenStoreError::Holders {
                name: name.to_owned(),
                have,
                need,
                missing: reasons.collect(),
                writing,
            })
        }
    }
}

/// Checks that all servers have answered, as a region without copies needs.
fn needs_all(name: &str, silent: &Silent) -> Result<(), OpenStoreError> {
    match silent.first() {
        None => Ok(()),
        Some((_, error)) => Err(not_opened(name, error.clone())),
    }
}

/// Puts the servers that hold a name before the others.
fn holders_first(mut asked: Vec<Asked>, holders: &[ServerId]) -> Vec<Asked> {
    asked.sort_by_key(|(_, (id, _))| !holders.contains(id));
    asked
}

fn too_few(name: &str, undecided: Undecided) -> OpenStoreError {
    match undecided.error {
        Some(PublishError::InUse { endpoint, name }) => OpenStoreError::InUse { name, endpoint },
        error => OpenStoreError::Holders {
            name: name.to_owned(),
            have: undecided.have,
            need: undecided.need,
            missing: error.map_or_else(String::new, |error| format!("; {error}")),
            writing: "",
        },
    }
}
