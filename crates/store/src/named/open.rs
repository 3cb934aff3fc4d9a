//! [`PageStore::open`]: a region from what its servers keep under its name.
//!
//! The rule it keeps: nothing that a server says is trusted. A map whose entries overlap, or lie
//! nowhere, is an error, and gives back what was opened.

use std::{collections::HashSet, sync::Arc, thread, time::Duration};

use farpage_fabric::{
    Extent, ExtentId, OpenNameError, PublishError, Session, Versions,
    log::later,
    register::{self, Answer, Ballot, Unusable},
};

use super::{
    manifest::{BoundServer, Manifest, RegionManifest, extents_of, places_of, span_of, words_of},
    publish::Places,
};
use crate::{
    Cluster, OpenStoreError, PageIndex, PageStore, PublishStoreError, Redundancy,
    codec::{self, Chooser, Scheme},
    entry::{PageEntry, PageTable},
    mover::{MoveError, Mover},
    names::{Claim, check_disks},
    on_disk::OnDisk,
    place::SlotSpan,
    pool::{PoolReservation, Purpose, SlotPool},
    publications::{PIECE_BYTES, Publications, map_bytes},
    readers::{OpenedReaders, ReaderSlots, ToldVersions},
    remote::{Backing, RemoteStore, check_page_bytes, reserved_bytes},
    roster::SERVERS_MAX,
    turn::{Turn, Undecided, answers_of},
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
        let opened = OpenedName::open(cluster, name)?;
        let pool = opened.pool(cluster, name, |holders| {
            Purpose::Named(ReaderSlots::new(name, holders))
        })?;
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
        let (mut tries, mut silent) = (0, Silent::new());
        let (opened, pool) = loop {
            tries += 1;
            let opened = OpenedName::read(cluster, name, &mut silent).and_then(|opened| {
                let pool = opened.pool(cluster, name, |_| Purpose::Reading)?;
                Ok((opened, pool))
            });
            match opened {
                Ok(opened) => break opened,
                // Another server was asked before the version was published, or the name used anew.
                Err(
                    OpenStoreError::ExtentMissing { .. }
                    | OpenStoreError::Holders { .. }
                    | OpenStoreError::Rivals { .. },
                ) if cluster.sessions().len() > 1 && tries < READ_TRIES => {
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
        let mut places = places_of(&map, &slots);
        places.sort_unstable();
        if let Some(index) = opened.missing_group(&pool, &places) {
            return Err(opened.extent_missing(name, index));
        }
        // 3. A region that is whole becomes the name's only one. What holders keep of others goes.
        let told = match opened.turn.as_ref().is_some_and(Turn::is_shared) {
            true => opened.complete(&pool, name)?,
            false => Vec::new(),
        };
        let readers = opened.readers(&pool, &told);
        // 4. The store. Its table comes before the reservation, which nothing would take back.
        let table = PageTable::new(manifest.bytes, page_bytes)?;
        let reservation = match is_read_only {
            true => None,
            false => opened.reserve(&pool, page_bytes, name)?,
        };
        let places = Arc::from(places);
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
            on_disk: OnDisk::of(&pool),
            publications,
        };
        let (bytes, seed) = (manifest.bytes, manifest.seed);
        let backing = Backing::Remote(remote);
        let store = Self::new(cluster, region, bytes, page_bytes, table, seed, backing);
        // From here on the store gives the extents back.
        opened.extents.hand_over(&pool);
        // 5. The entries.
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("made so above")
        };
        for (page, words) in PageIndex(0).onwards().zip(entries.as_chunks::<32>().0) {
            let entry = PageEntry::decode(words_of(words))
                .ok_or_else(|| damaged("an entry of its page map is none"))?;
            store.adopt(remote, page, entry).map_err(damaged)?;
        }
        // 6. All slots of the pages are taken now. Take the space that older versions may use, and
        //    slots for maps to come.
        if let Some(slots) = pool.readers() {
            slots.opened(&readers, &places, || pool.take_holes());
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
    /// Ballot of the binding, which several servers hold.
    last: Option<Ballot>,
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

    fn answers(&self) -> Vec<Answer> {
        self.0.iter().map(|it| it.answer.clone()).collect()
    }

    /// Finds the region of a binding, or without one, that of a name which one server holds.
    /// Returns a server that has the manifest, too.
    fn region(
        &self,
        name: &str,
        last: Option<&Ballot>,
    ) -> Result<(Box<RegionManifest>, Arc<Session>), OpenStoreError> {
        let mut found = None;
        for it in &self.0 {
            let accepted = it.answer.1.accepted.as_ref();
            if accepted.is_some() && accepted != last {
                continue;
            }
            let manifest = Manifest::decode(&it.manifest).ok_or_else(|| {
                let endpoint = it.session.endpoint();
                damaged(
                    name,
                    &format!("{endpoint} has a manifest for it that this version cannot read"),
                )
            })?;
            let Manifest::Region(region) = manifest else {
                continue;
            };
            let is_rival = found.is_some() && last.is_none() || accepted != last;
            if is_rival {
                return Err(rivals(name));
            }
            found = Some((region, it.session.clone()));
        }
        let found = found.ok_or_else(|| not_found(name))?;
        match found.0.copies > 1 {
            has_copies if has_copies == last.is_some() => Ok(found),
            _ => Err(damaged(
                name,
                "its servers do not hold it as its manifest says",
            )),
        }
    }
}

/// Servers that did not answer, each with its reason.
type Silent = Vec<(Arc<Session>, OpenNameError)>;

impl OpenedName {
    fn open(cluster: &Arc<Cluster>, name: &str) -> Result<Self, OpenStoreError> {
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
        let mut silent = Silent::new();
        let extents = ask_all(cluster, name, &mut silent, open)?;
        // Claimed also on servers without pages of the region: it may be published there again, and
        // a holder that knows of nothing says so.
        let failed = |error| match error {
            PublishError::InUse { endpoint, name } => OpenStoreError::InUse { name, endpoint },
            source => OpenStoreError::Claim {
                name: name.to_owned(),
                source,
            },
        };
        let has_answered = |session: &Arc<Session>| !is_silent(&silent, session);
        let asked = claim.take(true, has_answered).map_err(failed)?;
        let answers = answers_of(&asked);
        let found = register::to_write(&answers);
        let last = found.map_err(|it| {
            unusable(
                name,
                it,
                &silent,
                "while they are away, open it for reading",
            )
        })?;
        let too_few = |undecided| too_few(name, undecided);
        let turn = last.map(|last| Turn::begin(name, &asked, Some(last)));
        let turn = turn.transpose().map_err(too_few)?;
        if let Some(turn) = &turn
            && last.is_some_and(|last| last.removed)
        {
            turn.bury().map_err(too_few)?;
            return Err(not_found(name));
        }
        let (manifest, first) = extents.region(name, last)?;
        let turn = match turn {
            Some(turn) => turn,
            None => {
                needs_all(name, &silent)?;
                Turn::alone(name, &first)
            }
        };
        Ok(Self {
            manifest,
            last: last.cloned(),
            extents,
            turn: Some(turn),
            claim: Some(claim),
        })
    }

    /// Opens a name for reading on all servers but the `silent` ones.
    fn read(
        cluster: &Arc<Cluster>,
        name: &str,
        silent: &mut Silent,
    ) -> Result<Self, OpenStoreError> {
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
        let mut extents = ask_all(cluster, name, silent, read)?;
        let answers = extents.answers();
        let found = register::to_read(&answers);
        let last = found.map_err(|it| {
            let note = "a version that is being published, or whose writer has died, is read when the region has been opened for writing";
            unusable(name, it, silent, note)
        })?;
        if last.is_some_and(|last| last.removed) {
            return Err(not_found(name));
        }
        let (manifest, _) = extents.region(name, last)?;
        if last.is_none() {
            needs_all(name, silent)?;
        }
        // A holder that has another version counts this reader for that one.
        for it in &mut extents.0 {
            if it.answer.1.accepted.as_ref() != last {
                give_back(&it.session, &std::mem::take(&mut it.extents));
            }
        }
        Ok(Self {
            manifest,
            last: last.cloned(),
            extents,
            turn: None,
            claim: None,
        })
    }

    /// Makes the binding that was found the only one: has the holders accept it in this turn.
    /// Returns what they said of their readers.
    fn complete(&self, pool: &SlotPool, name: &str) -> Result<Vec<ToldVersions>, OpenStoreError> {
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
            true => Ok(told),
            false => Err(failed(PublishStoreError::Holders {
                name: name.to_owned(),
                have,
                need,
                reason: "a server has fallen silent".to_owned(),
            })),
        }
    }

    /// Returns what the servers of the pool say of their readers: when the name was opened or, if
    /// several hold it, when they accepted the version since, as they have `told`. Which pages the
    /// readers of another version read is not known.
    fn readers(&self, pool: &SlotPool, told: &[ToldVersions]) -> Vec<OpenedReaders> {
        let opened = self.extents.0.iter().filter_map(|it| {
            let server = pool.number_of(&it.session)?;
            let is_it = it.answer.1.accepted == self.last;
            let mut told = told.iter();
            let versions = match &self.last {
                None => &it.versions,
                Some(_) => &told.find(|(other, _)| *other == server)?.1,
            };
            Some(OpenedReaders {
                server,
                opened: is_it.then_some(it.versions.published),
                told: versions.clone(),
            })
        });
        opened.collect()
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
            let is_holder =
                || (self.turn.as_ref()).is_some_and(|turn| turn.id_of(&sessions[*port]).is_some());
            match has_copies {
                true => !ports.contains(port) && is_holder(),
                false => !(manifest.servers.iter()).any(|it| it.endpoint == endpoint),
            }
        };
        let others: Vec<usize> = cluster.name_ports().into_iter().filter(is_new).collect();
        for other in others {
            // The place of a stand-in is free: a holder that comes back has one again.
            let is_spare = |at: &usize| ports[..*at].contains(&ports[*at]);
            match (0..ports.len()).find(is_spare) {
                Some(at) => ports[at] = other,
                None => ports.push(other),
            }
        }
        if ports.len() > SERVERS_MAX {
            return Err(damaged(
                name,
                "it is on more servers than a region can have",
            ));
        }
        let holders = (self.turn.as_ref()).map_or(Vec::new(), |it| it.numbered(cluster, &ports));
        let redundancy = match manifest.copies {
            0 | 1 => Redundancy::None,
            copies => Redundancy::Copies(copies),
        };
        if !redundancy.is_valid() {
            return Err(damaged(name, "its number of copies is impossible"));
        }
        let pool = cluster.own_pool(ports.iter().copied(), purpose(holders), redundancy);
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
                let number = ports.iter().position(|it| *it == port)?;
                (extent.bytes >= group.bytes).then_some((number as u8, extent))
            };
            let members: Vec<_> = group.members.iter().filter_map(here).collect();
            let most = usize::from(manifest.copies.max(1));
            if members.len() > most {
                return Err(damaged(name, "it has more copies than it says"));
            }
            if members.is_empty() && !has_copies {
                return Err(self.extent_missing(name, index));
            }
            let bytes = match has_copies {
                true => group.bytes,
                false => members[0].1.bytes,
            };
            let members = members.iter().map(|(server, extent)| (*server, extent.id));
            pool.add_opened(group.arena, bytes, members);
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

/// Asks all servers for a name, but those that are `silent` already. Returns their parts, and notes
/// the servers that do not answer.
fn ask_all(
    cluster: &Cluster,
    name: &str,
    silent: &mut Silent,
    ask: impl Fn(&Arc<Session>) -> Result<OpenedServer, OpenNameError>,
) -> Result<OpenedExtents, OpenStoreError> {
    let mut parts = OpenedExtents(Vec::new());
    for session in cluster.name_sessions() {
        if is_silent(silent, &session) {
            continue;
        }
        match ask(&session) {
            Ok(part) => parts.0.push(part),
            Err(OpenNameError::NotFound { .. }) => {}
            Err(error @ OpenNameError::InUse { .. }) => return Err(not_opened(name, error)),
            Err(error) => silent.push((session, error)),
        }
    }
    match silent.first() {
        Some((_, error)) if parts.0.is_empty() => Err(not_opened(name, error.clone())),
        _ => Ok(parts),
    }
}

fn is_silent(silent: &Silent, session: &Arc<Session>) -> bool {
    silent.iter().any(|(other, _)| Arc::ptr_eq(other, session))
}

/// Checks that all servers have answered, as a region without copies needs.
fn needs_all(name: &str, silent: &Silent) -> Result<(), OpenStoreError> {
    match silent.first() {
        None => Ok(()),
        Some((_, error)) => Err(not_opened(name, error.clone())),
    }
}

fn not_found(name: &str) -> OpenStoreError {
    OpenStoreError::NotFound {
        name: name.to_owned(),
    }
}

fn rivals(name: &str) -> OpenStoreError {
    OpenStoreError::Rivals {
        name: name.to_owned(),
    }
}

fn unusable(name: &str, why: Unusable, silent: &Silent, note: &'static str) -> OpenStoreError {
    match why {
        Unusable::Rivals => rivals(name),
        Unusable::Few { have, need } => {
            let reasons = silent.iter().map(|(_, error)| format!("; {error}"));
            OpenStoreError::Holders {
                name: name.to_owned(),
                have,
                need,
                missing: reasons.collect(),
                note,
            }
        }
    }
}

fn too_few(name: &str, undecided: Undecided) -> OpenStoreError {
    match undecided.error {
        Some(PublishError::InUse { endpoint, name }) => OpenStoreError::InUse { name, endpoint },
        _ => OpenStoreError::Holders {
            name: name.to_owned(),
            have: undecided.have,
            need: undecided.need,
            missing: format!("; {}", undecided.reason()),
            note: "open it again",
        },
    }
}
