//! [`PageStore::open`]: a region from what its servers keep under its name.
//!
//! The rule it keeps: nothing that a server says is trusted. A map whose entries overlap, or lie
//! nowhere, is an error, and gives back what was opened.

use std::{collections::HashSet, sync::Arc};

use farpage_fabric::{
    Extent, ExtentId, OpenNameError, PublishError, Session, Versions, log::later,
};

use super::manifest::{Manifest, RegionManifest, VERSION, places_of, span_of, words_of};
use crate::{
    Cluster, OpenStoreError, PageIndex, PageStore,
    codec::{self, Chooser, Scheme},
    entry::{PageEntry, PageTable},
    mover::{MoveError, Mover},
    names::{Claim, check_disks},
    place::SlotSpan,
    pool::{PoolReservation, Purpose, SlotPool},
    publications::{PIECE_BYTES, Publications, map_bytes},
    readers::ReaderSlots,
    remote::{Backing, RemoteStore, check_page_bytes, reserved_bytes},
};

/// Number of attempts to read the version of a region on several servers while it is published.
/// Each attempt takes less time than a publication.
const READ_TRIES: usize = 10;

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
        let pool = opened.pool(cluster, name, |first| {
            Purpose::Named(ReaderSlots::new(name, first))
        })?;
        Self::of_opened(cluster, region.into(), name, opened, pool)
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
            let opened = OpenedName::read(cluster, name)?;
            match opened.pool(cluster, name, |_| Purpose::Reading) {
                Ok(pool) => break (opened, pool),
                // Another server was asked before the version was published.
                Err(OpenStoreError::ExtentMissing { .. })
                    if cluster.sessions().len() > 1 && tries < READ_TRIES => {}
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
        let map = opened.read_map(&pool, name)?;
        let manifest = &opened.manifest;
        let pages = manifest.bytes.div_ceil(manifest.page_bytes);
        let entries = usize::try_from(pages)
            .ok()
            .and_then(|pages| map.get(..pages.checked_mul(32)?))
            .ok_or_else(|| damaged("its page map is shorter than its pages"))?;
        let slots: Vec<_> = manifest.map.iter().filter_map(span_of).collect();
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
        let (places, versions) = (Arc::from(places), opened.versions);
        let publications = (!is_read_only)
            .then(|| Publications::of(versions.published, Arc::clone(&places), slots));
        let is_reserved = reservation.is_some();
        let chooser = Chooser::new(&cluster.traffic, &scheme, pages);
        let remote = RemoteStore {
            pool: pool.clone(),
            chooser: chooser.map(Box::new),
            scheme: Box::new(scheme),
            page_bytes,
            reservation,
            claim: opened.claim.map(Box::new),
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
            readers.opened(&versions, &places, || pool.take_holes());
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
    /// The answer of the region's first server about its versions.
    versions: Versions,
    extents: OpenedExtents,
    /// Claim on the name, let go after the extents. A region that is only read claims nothing.
    claim: Option<Claim>,
}

/// Extent: the id that the manifest knows, and the extent as it is leased to this client.
type LeasedExtent = (ExtentId, Extent);

/// Extents of an opened name, by server. Dropping this value gives the extents back.
struct OpenedExtents(Vec<(Arc<Session>, Vec<LeasedExtent>)>);

/// The manifests of an opened name.
#[derive(Default)]
struct Manifests(Option<(Box<RegionManifest>, Versions)>);

impl Manifests {
    /// Takes the manifest of one server.
    fn add(
        &mut self,
        session: &Session,
        name: &str,
        manifest: &[u8],
        versions: Versions,
    ) -> Result<(), OpenStoreError> {
        let detail = match postcard::from_bytes(manifest) {
            Ok(Manifest::Region(manifest)) if manifest.version == VERSION => {
                if self.0.replace((manifest, versions)).is_none() {
                    return Ok(());
                }
                "several servers have a region of that name, published by clients of one of them: open it with that server alone".to_owned()
            }
            Ok(Manifest::Part) => return Ok(()),
            _ => {
                let endpoint = session.endpoint();
                format!("{endpoint} has a manifest for it that this version cannot read")
            }
        };
        Err(damaged(name, &detail))
    }

    fn found(self, name: &str) -> Result<(Box<RegionManifest>, Versions), OpenStoreError> {
        self.0.ok_or_else(|| OpenStoreError::NotFound {
            name: name.to_owned(),
        })
    }
}

impl Drop for OpenedExtents {
    fn drop(&mut self) {
        for (session, extents) in &self.0 {
            for (_, extent) in extents {
                if let Err(error) = session.release(extent.id) {
                    let (endpoint, extent) = (session.endpoint().clone(), extent.id);
                    later(move || {
                        tracing::warn!(%endpoint, %extent, %error, "extent not given back");
                    });
                }
            }
        }
    }
}

impl OpenedExtents {
    /// Leaves the pool's extents to the pool. Gives back extents that an unfinished publication had
    /// added.
    fn hand_over(mut self, pool: &SlotPool) {
        let kept: HashSet<_> = pool.extents().into_iter().flatten().collect();
        for (session, extents) in &mut self.0 {
            let same = |(_, other): &(usize, Arc<Session>)| Arc::ptr_eq(other, session);
            let server = pool.servers().iter().position(same);
            let is_kept = |id| server.is_some_and(|server| kept.contains(&(server as u8, id)));
            extents.retain(|(_, extent)| !is_kept(extent.id));
        }
    }
}

impl OpenedName {
    fn open(cluster: &Arc<Cluster>, name: &str) -> Result<Self, OpenStoreError> {
        check_disks(&cluster.name_sessions()).map_err(|source| OpenStoreError::Mixed {
            name: name.to_owned(),
            source,
        })?;
        let claim = Claim::here(cluster, name).ok_or_else(|| OpenStoreError::Held {
            name: name.to_owned(),
        })?;
        let mut extents = OpenedExtents(Vec::new());
        let mut manifests = Manifests::default();
        for session in &cluster.name_sessions() {
            let named = match session.open(name) {
                Ok(named) => named,
                Err(OpenNameError::NotFound { .. }) => continue,
                Err(error) => return Err(not_opened(name, error)),
            };
            claim.opened(session);
            let leased = named.extents.iter().map(|extent| (extent.id, *extent));
            extents.0.push((session.clone(), leased.collect()));
            manifests.add(session, name, &named.manifest, named.versions)?;
        }
        let (manifest, versions) = manifests.found(name)?;
        // Claimed also on servers without pages of the region: it may be published there again.
        let failed = |error| match error {
            PublishError::InUse { endpoint, name } => OpenStoreError::InUse { name, endpoint },
            source => OpenStoreError::Claim {
                name: name.to_owned(),
                source,
            },
        };
        claim.take(true).map_err(failed)?;
        Ok(Self {
            manifest,
            versions,
            extents,
            claim: Some(claim),
        })
    }

    /// Opens a name for reading on all servers.
    fn read(cluster: &Arc<Cluster>, name: &str) -> Result<Self, OpenStoreError> {
        let mut extents = OpenedExtents(Vec::new());
        let mut manifests = Manifests::default();
        for session in &cluster.name_sessions() {
            let reading = match session.read(name) {
                Ok(reading) => reading,
                Err(OpenNameError::NotFound { .. }) => continue,
                Err(error) => return Err(not_opened(name, error)),
            };
            extents.0.push((session.clone(), reading.extents));
            manifests.add(session, name, &reading.manifest, Versions::default())?;
        }
        let (manifest, versions) = manifests.found(name)?;
        Ok(Self {
            manifest,
            versions,
            extents,
            claim: None,
        })
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
    /// other servers behind them.
    fn pool(
        &self,
        cluster: &Cluster,
        name: &str,
        purpose: impl FnOnce(&Arc<Session>) -> Purpose,
    ) -> Result<Arc<SlotPool>, OpenStoreError> {
        let sessions = cluster.sessions();
        let port_of = |endpoint: &String| {
            let missing = || OpenStoreError::ServerMissing {
                name: name.to_owned(),
                endpoint: endpoint.clone(),
            };
            sessions
                .iter()
                .rposition(|session| session.endpoint().to_string() == *endpoint)
                .ok_or_else(missing)
        };
        let mut ports = self
            .manifest
            .servers
            .iter()
            .map(port_of)
            .collect::<Result<Vec<_>, _>>()?;
        ports.extend(cluster.name_ports().into_iter().filter(|port| {
            !self
                .manifest
                .servers
                .contains(&sessions[*port].endpoint().to_string())
        }));
        let first = *ports
            .first()
            .ok_or_else(|| damaged(name, "it is on no server"))?;
        let pool = cluster.own_pool(ports, purpose(&sessions[first]));
        for extent in &self.manifest.extents {
            let Some((server, id)) = *extent else {
                pool.groups.add_gap();
                continue;
            };
            let endpoint = self
                .manifest
                .servers
                .get(server as usize)
                .cloned()
                .unwrap_or_default();
            let opened = self
                .extents
                .0
                .iter()
                .filter(|(session, _)| session.endpoint().to_string() == endpoint);
            let found = opened
                .flat_map(|(_, extents)| extents)
                .find(|(known, _)| *known == id);
            let missing = || OpenStoreError::ExtentMissing {
                name: name.to_owned(),
                endpoint,
                extent: id,
            };
            let (_, extent) = found.ok_or_else(missing)?;
            pool.add(server, extent.id, extent.bytes);
        }
        pool.groups.end_gaps();
        Ok(pool)
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
                }) if stored_bytes as usize == len && pool.has_extent_of(place) => {
                    let piece = mover.read(place, len).map_err(|error| match error {
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
                    if codec::hash(piece.as_ref(), self.manifest.seed) != hash {
                        return Err(damaged());
                    }
                    map.extend_from_slice(piece.as_ref());
                }
                _ => return Err(damaged()),
            }
        }
        Ok(map)
    }
}
