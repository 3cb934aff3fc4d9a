//! Named regions: the page map in remote memory, so that another process can open the region.
//!
//! The rule it keeps: **until the last step of a publication, the previous one is whole.** The map
//! goes to blocks of its own, slots that the published map refers to are not reused before the next
//! publication has succeeded, and the name is bound last, on the region's first server. A process
//! that dies on the way leaves what was published before.
//!
//! The map is the entries of all pages, four little-endian words each, and zeros up to a whole
//! granule; it is cut into pieces of [`PIECE_BYTES`], each with an entry of its own in the
//! manifest, so that the manifest stays small and stretches without entries cost nothing. Entries
//! name servers and extents by their index in the manifest.

use std::{
    collections::HashSet,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use farpage_fabric::{
    AllocError, Channel, ChannelError, ConnectError, ControlError, ExtentId, Op, OpenError,
    PublishError, Session, Verb,
    log::later,
    regmem::{RegBuf, RegError},
};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use serde::{Deserialize, Serialize};

use crate::{
    Cluster, Codec, Layout, OpenStoreError, PageStore, PublishStoreError,
    cluster::Pool,
    codec::{self, Chooser, Form, Scheme},
    entry::{Entry, PageTable, Place, Span, Words, portable},
    names::Claim,
    remote::{Backing, RemoteStore, check_page_bytes, reserved_bytes},
    slots::GRANULE_BYTES,
};

const PIECE_BYTES: usize = 1 << 20;
const VERSION: u32 = 3;

/// What a name is bound to, on each server of the region.
#[derive(Serialize, Deserialize)]
enum Manifest {
    /// On the first server: the region.
    Region(Box<RegionManifest>),
    /// On the others: they only keep extents.
    Part,
}

#[derive(Serialize, Deserialize)]
struct RegionManifest {
    version: u32,
    bytes: u64,
    page_bytes: u64,
    codec: Codec,
    layout: Layout,
    seed: u64,
    /// Whether its raw size is to be granted at once.
    reserved: bool,
    /// Endpoints, by the servers' numbers in entries.
    servers: Vec<String>,
    /// Server and extent, by the extents' indices in entries.
    extents: Vec<Option<(u8, ExtentId)>>,
    map_bytes: u64,
    map: Vec<Words>,
}

/// Bytes of the map of a region: whole granules, so that its slots leave no odd holes between
/// pages.
pub(crate) fn map_bytes(bytes: u64, page_bytes: usize) -> u64 {
    (bytes.div_ceil(page_bytes as u64) * 32).next_multiple_of(GRANULE_BYTES)
}

/// What a region remembers about its publications.
#[derive(Default)]
pub(crate) struct Publications {
    /// Shared by whoever replaces an entry; exclusive while a map is copied or marked, which takes
    /// milliseconds per GiB of map. Whether a publication runs.
    commits: RwLock<bool>,
    /// Slots that the last published map refers to and that are not used any more.
    deferred: Mutex<Vec<Span>>,
    /// Slots that went out of use while a publication runs, whose map may refer to them.
    undecided: Mutex<Vec<Span>>,
    /// How many have ended.
    ended: AtomicU64,
    /// Locked by the one publication that runs.
    last: Mutex<Last>,
}

/// The last publication.
#[derive(Default)]
struct Last {
    /// The slots of its map.
    map: Vec<Span>,
    /// Slots for whole maps to come, where the region reserves its memory: between the many holes
    /// of a region that has been in use for long there may be none for a piece of a map.
    spare: Vec<Vec<Span>>,
    /// How many of these are kept.
    spares_max: usize,
}

/// The right to replace entries while no map is being copied.
pub(crate) struct Commit<'a> {
    publications: &'a Publications,
    publishing: RwLockReadGuard<'a, bool>,
}

impl Publications {
    /// Takes slots for maps to come, as far as there is room: what is missing is asked for when it
    /// is needed.
    pub(crate) fn set_aside(&self, pool: &Pool, map_bytes: u64, maps: usize) {
        let mut last = self.last.lock();
        last.spares_max = maps;
        let areas = (0..maps).map_while(|_| map_slots(pool, map_bytes).ok());
        last.spare = areas.collect();
    }

    /// Whether one runs, at whose end slots come free.
    pub(crate) fn is_running(&self) -> bool {
        *self.commits.read()
    }

    /// How many have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn commit(&self) -> Commit<'_> {
        Commit {
            publications: self,
            publishing: self.commits.read(),
        }
    }
}

impl Commit<'_> {
    /// Whether a slot that goes out of use has to be kept; then it will be freed by a later
    /// publication.
    pub(crate) fn keep(&self, slot: Span, published: bool) -> bool {
        let list = match (published, *self.publishing) {
            (true, _) => &self.publications.deferred,
            (false, true) => &self.publications.undecided,
            (false, false) => return false,
        };
        list.lock().push(slot);
        true
    }
}

impl PageStore {
    /// Publishes what has been written back so far under the region's name, atomically: whoever
    /// opens the name gets this state or, if this call fails or the process dies in it, the
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
                ..
            },
        ) = &self.backing
        else {
            return Err(PublishStoreError::NotNamed {
                region: self.label.clone(),
            });
        };
        let (pool, name) = (&remote.pool, claim.name());
        let mut last = publications.last.lock();
        // Its slots before its content: what is evicted meanwhile must not take their room.
        let map_bytes = map_bytes(self.bytes, self.page_bytes);
        let area = match last.spare.pop() {
            Some(area) => area,
            None => map_slots(pool, map_bytes).map_err(|source| PublishStoreError::Alloc {
                name: name.to_owned(),
                source,
            })?,
        };
        // 1. Copy the map. From here on the slots that it refers to are kept.
        let (map, stale) = {
            let mut publishing = publications.commits.write();
            *publishing = true;
            let mut map = Vec::with_capacity(map_bytes as usize);
            for page in 0..self.pages() {
                map.extend(bytes_of(portable(self.table.load_words(page))));
            }
            map.resize(map_bytes as usize, 0);
            (map, std::mem::take(&mut *publications.deferred.lock()))
        };
        // 2. Write it, and bind the name to it.
        let (area, result) = match self.write_map(pool, name, &map, &area) {
            Ok(entries) => (area, self.bind(remote, name, map_bytes, entries)),
            Err(failure) => {
                let (failed, error) = *failure;
                // The write may arrive later: its slot is given up, and what is left of the area is
                // none.
                let others = area.into_iter().filter(|&slot| Some(slot) != failed);
                pool.free(&others.collect::<Vec<_>>());
                (Vec::new(), Err(error))
            }
        };
        // 3. What only the previous map referred to is free now; after a failure, what only this
        //    one refers to.
        let mut publishing = publications.commits.write();
        *publishing = false;
        publications.ended.fetch_add(1, Ordering::Release);
        let undecided = std::mem::take(&mut *publications.undecided.lock());
        if let Err(error) = &result
            && !may_have_happened(error)
        {
            publications.deferred.lock().extend(stale);
            pool.free(&undecided);
            last.give_back(pool, area, map_bytes);
            return result;
        }
        for (page, words) in (0..self.pages()).zip(map.as_chunks::<32>().0) {
            if span_of(&words_of(words)).is_some()
                && bytes_of(portable(self.table.load_words(page))) == *words
            {
                self.table.mark_published(page);
            }
        }
        publications.deferred.lock().extend(undecided);
        if result.is_ok() {
            pool.free(&stale);
            let before = std::mem::replace(&mut last.map, area);
            last.give_back(pool, before, map_bytes);
        } else {
            // The name may be bound to either map: the next publication frees what both refer to.
            publications.deferred.lock().extend(stale);
            last.map.extend(area);
        }
        result
    }

    /// Opens the region that was last published under `name`, and which errors call `region`. Its
    /// length, page size and codec are
    /// those it was published with. Nobody else can open it before this store is dropped.
    ///
    /// # Errors
    /// [`OpenStoreError`].
    pub fn open(
        cluster: &Arc<Cluster>,
        region: impl Into<Arc<str>>,
        name: &str,
    ) -> Result<Arc<Self>, OpenStoreError> {
        let region = region.into();
        let mut opened = Held::open(cluster, name)?;
        let damaged = |detail: &str| OpenStoreError::Damaged {
            name: name.to_owned(),
            detail: detail.to_owned(),
        };
        // 1. The servers and extents under the numbers that the map uses.
        let pool = Arc::new(opened.pool(cluster, name)?);
        let manifest = &opened.manifest;
        let scheme = Scheme::new(manifest.codec, manifest.layout.clone())
            .map_err(|error| damaged(&error.to_string()))?;
        let page_bytes = usize::try_from(manifest.page_bytes).unwrap_or(usize::MAX);
        check_page_bytes(&region, page_bytes)
            .map_err(|_| damaged("its page size is impossible"))?;
        let elements = manifest.layout.elements.as_ref();
        if elements.is_some_and(|elements| !elements.fit(manifest.bytes)) {
            return Err(damaged("it is shorter than its elements"));
        }
        // 2. The map.
        let pages = manifest.bytes.div_ceil(manifest.page_bytes);
        let map = opened.read_map(&pool, name)?;
        let entries_bytes = usize::try_from(pages)
            .ok()
            .and_then(|pages| pages.checked_mul(32));
        let entries = entries_bytes
            .and_then(|bytes| map.get(..bytes))
            .ok_or_else(|| damaged("its page map is shorter than its pages"))?;
        // 3. The map's own slots.
        let slots: Vec<_> = manifest.map.iter().filter_map(span_of).collect();
        if !slots.iter().all(|slot| pool.claim(*slot)) {
            return Err(damaged("pieces of its map overlap, or lie nowhere"));
        }
        // 4. The entries.
        let publications = Publications::default();
        *publications.last.lock() = Last {
            map: slots,
            ..Last::default()
        };
        // Before memory is reserved: nobody would take that back.
        let table = PageTable::new(manifest.bytes, page_bytes)?;
        let reservation = if manifest.reserved {
            let bytes = reserved_bytes(manifest.bytes, page_bytes, true);
            let failed = |source| OpenStoreError::Alloc {
                name: name.to_owned(),
                source,
            };
            Some(pool.reserve(bytes, page_bytes).map_err(failed)?)
        } else {
            None
        };
        let chooser = Chooser::new(&cluster.traffic, &scheme, pages);
        let remote = RemoteStore {
            pool: pool.clone(),
            chooser: chooser.map(Box::new),
            scheme: Box::new(scheme),
            page_bytes,
            reservation,
            claim: Some(Box::new(opened.claim)),
            publications: Some(publications),
        };
        let store = Self::new(
            cluster,
            region,
            manifest.bytes,
            page_bytes,
            table,
            manifest.seed,
            Backing::Remote(remote),
        );
        // From here on the store gives the extents back. What a publication that did not come to
        // its end had added goes now.
        let kept: HashSet<_> = pool.extents().into_iter().flatten().collect();
        for (session, extents) in &mut opened.hold.0 {
            let same = |(_, other): &(usize, Arc<Session>)| Arc::ptr_eq(other, session);
            let server = pool.servers().iter().position(same);
            let is_kept = |id| server.is_some_and(|server| kept.contains(&(server as u8, id)));
            extents.retain(|extent| !is_kept(extent.id));
        }
        drop(opened.hold);
        for (page, words) in (0u64..).zip(entries.as_chunks::<32>().0) {
            let words = words_of(words);
            let entry =
                Entry::decode(words).ok_or_else(|| damaged("an entry of its page map is none"))?;
            match entry {
                Entry::Never => continue,
                Entry::Repeated { .. } => {}
                Entry::Kept { .. } => {
                    return Err(damaged("an entry refers to a store of its owner's"));
                }
                Entry::Stored {
                    place,
                    stored_bytes,
                    form,
                    ..
                } => {
                    let Backing::Remote(remote) = &store.backing else {
                        unreachable!("made so above")
                    };
                    let possible = (remote.scheme).allows(form, stored_bytes as usize, page_bytes);
                    let slot = Span {
                        place,
                        bytes: stored_bytes,
                    };
                    if !(possible && pool.claim(slot)) {
                        return Err(damaged(
                            "two entries of its page map overlap, or one lies outside its extents",
                        ));
                    }
                }
            }
            store.table.store(page, entry);
            if let Some(slot) = entry.slot() {
                pool.hold(slot, page_bytes, 1);
            }
            if matches!(entry, Entry::Stored { .. }) {
                store.table.mark_published(page);
            }
        }
        // Only now that all slots of the pages are taken.
        if let Backing::Remote(RemoteStore {
            reservation: Some(_),
            publications: Some(publications),
            ..
        }) = &store.backing
        {
            publications.set_aside(&pool, map_bytes(store.bytes, page_bytes), 1);
        }
        Ok(store)
    }

    /// Writes the map's pieces to the slots of `area`; what is all zeros needs no write. An error
    /// comes with the slot whose write failed.
    fn write_map(
        &self,
        pool: &Pool,
        name: &str,
        map: &[u8],
        area: &[Span],
    ) -> Result<Vec<Words>, Box<(Option<Span>, PublishStoreError)>> {
        let name = || name.to_owned();
        let mut mover = Mover::new(pool);
        let mut entries: Vec<Words> = Vec::new();
        for (piece, &slot) in map.chunks(PIECE_BYTES).zip(area) {
            if piece.iter().all(|&byte| byte == 0) {
                entries.push(Entry::Never.encode());
                continue;
            }
            let failed = |slot, error| Box::new((slot, error));
            let written = mover.write(slot.place, piece);
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
            let entry = Entry::Stored {
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

    fn bind(
        &self,
        remote: &RemoteStore,
        name: &str,
        map_bytes: u64,
        map: Vec<Words>,
    ) -> Result<(), PublishStoreError> {
        let pool = &remote.pool;
        let extents = pool.extents();
        let manifest = Manifest::Region(Box::new(RegionManifest {
            version: VERSION,
            bytes: self.bytes,
            page_bytes: self.page_bytes as u64,
            codec: remote.scheme.codec,
            layout: remote.scheme.layout.clone(),
            seed: self.seed,
            reserved: remote.reservation.is_some(),
            servers: pool
                .servers()
                .iter()
                .map(|(_, session)| session.endpoint().to_string())
                .collect(),
            extents: extents.clone(),
            map_bytes,
            map,
        }));
        // The first server last: its manifest is the publication. The others hold at least what any
        // of its maps needs. A server that holds nothing is told so, too: what the name kept there
        // before is free then.
        for (server, (_, session)) in pool.servers().iter().enumerate().rev() {
            let manifest = if server == 0 {
                &manifest
            } else {
                &Manifest::Part
            };
            let manifest = postcard::to_stdvec(manifest).expect("a manifest is plain data");
            let held: Vec<_> = extents
                .iter()
                .flatten()
                .filter(|(on, _)| usize::from(*on) == server)
                .map(|(_, id)| *id)
                .collect();
            session.publish(name, &manifest, &held).map_err(|source| {
                PublishStoreError::Publish {
                    name: name.to_owned(),
                    source,
                }
            })?;
        }
        Ok(())
    }
}

impl Last {
    /// These slots hold no map any more: they wait for the next one, if they are all that it takes.
    fn give_back(&mut self, pool: &Pool, area: Vec<Span>, map_bytes: u64) {
        let whole = area.len() == (map_bytes as usize).div_ceil(PIECE_BYTES);
        if whole && self.spare.len() < self.spares_max {
            self.spare.push(area);
        } else {
            pool.free(&area);
        }
    }
}

/// Slots for all pieces of a map.
fn map_slots(pool: &Pool, map_bytes: u64) -> Result<Vec<Span>, AllocError> {
    let pieces = map_bytes.div_ceil(PIECE_BYTES as u64);
    let mut slots = Vec::with_capacity(pieces as usize);
    for piece in 0..pieces {
        let left = map_bytes - piece * PIECE_BYTES as u64;
        let bytes = left.min(PIECE_BYTES as u64) as u32;
        let place = loop {
            match pool.alloc(bytes, piece) {
                Some(place) => break place,
                None => {
                    if let Err(error) = pool.grow(bytes) {
                        pool.free(&slots);
                        return Err(error);
                    }
                }
            }
        };
        pool.settle(1);
        slots.push(Span { place, bytes });
    }
    Ok(slots)
}

/// An opened name, given back unless a store takes it over.
struct Held {
    manifest: Box<RegionManifest>,
    hold: Hold,
    /// Let go after the extents.
    claim: Claim,
}

struct Hold(Vec<(Arc<Session>, Vec<farpage_fabric::Extent>)>);

impl Drop for Hold {
    fn drop(&mut self) {
        for (session, extents) in &self.0 {
            for extent in extents {
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

impl Held {
    fn open(cluster: &Arc<Cluster>, name: &str) -> Result<Self, OpenStoreError> {
        let claim = Claim::here(cluster, name).ok_or_else(|| OpenStoreError::Held {
            name: name.to_owned(),
        })?;
        let mut hold = Hold(Vec::new());
        let mut region = None;
        for session in cluster.sessions() {
            let named = match session.open(name) {
                Ok(named) => named,
                Err(OpenError::NotFound { .. }) => continue,
                Err(source) => {
                    return Err(OpenStoreError::Open {
                        name: name.to_owned(),
                        source,
                    });
                }
            };
            claim.opened(session);
            hold.0.push((session.clone(), named.extents));
            match postcard::from_bytes(&named.manifest) {
                Ok(Manifest::Region(manifest)) if manifest.version == VERSION => {
                    if region.replace(manifest).is_some() {
                        let detail = "several servers have a region of that name, published by clients of one of them: open it with that server alone";
                        return Err(OpenStoreError::Damaged {
                            name: name.to_owned(),
                            detail: detail.to_owned(),
                        });
                    }
                }
                Ok(Manifest::Part) => {}
                _ => {
                    let detail = format!(
                        "{} has a manifest for it that this version cannot read",
                        session.endpoint()
                    );
                    return Err(OpenStoreError::Damaged {
                        name: name.to_owned(),
                        detail,
                    });
                }
            }
        }
        let manifest = region.ok_or_else(|| OpenStoreError::NotFound {
            name: name.to_owned(),
        })?;
        // Also where it has nothing now: it may be published there again.
        let failed = |source| OpenStoreError::Claim {
            name: name.to_owned(),
            source,
        };
        claim.take(true).map_err(failed)?;
        Ok(Self {
            manifest,
            hold,
            claim,
        })
    }

    /// A pool that numbers servers and extents as the manifest does, and has the cluster's other
    /// servers behind them.
    fn pool(&self, cluster: &Cluster, name: &str) -> Result<Pool, OpenStoreError> {
        let sessions = cluster.sessions();
        let port_of = |endpoint: &String| {
            let missing = || OpenStoreError::ServerMissing {
                name: name.to_owned(),
                endpoint: endpoint.clone(),
            };
            sessions
                .iter()
                .position(|session| session.endpoint().to_string() == *endpoint)
                .ok_or_else(missing)
        };
        let mut ports = self
            .manifest
            .servers
            .iter()
            .map(port_of)
            .collect::<Result<Vec<_>, _>>()?;
        ports.extend((0..sessions.len()).filter(|port| {
            !self
                .manifest
                .servers
                .contains(&sessions[*port].endpoint().to_string())
        }));
        let pool = cluster.new_pool(ports);
        for extent in &self.manifest.extents {
            let Some((server, id)) = *extent else {
                pool.add_gap();
                continue;
            };
            let endpoint = self
                .manifest
                .servers
                .get(server as usize)
                .cloned()
                .unwrap_or_default();
            let opened = self
                .hold
                .0
                .iter()
                .filter(|(session, _)| session.endpoint().to_string() == endpoint);
            let found = opened
                .flat_map(|(_, extents)| extents)
                .find(|extent| extent.id == id);
            let missing = || OpenStoreError::ExtentMissing {
                name: name.to_owned(),
                endpoint,
                extent: id,
            };
            pool.add(server, id, found.ok_or_else(missing)?.bytes);
        }
        Ok(pool)
    }

    fn read_map(&self, pool: &Pool, name: &str) -> Result<Vec<u8>, OpenStoreError> {
        let name = || name.to_owned();
        let damaged = || OpenStoreError::Damaged {
            name: name(),
            detail: "its page map is not what was published".into(),
        };
        let map_bytes = usize::try_from(self.manifest.map_bytes).map_err(|_| damaged())?;
        if map_bytes.div_ceil(PIECE_BYTES) != self.manifest.map.len() {
            return Err(damaged());
        }
        let mut mover = Mover::new(pool);
        let mut map = Vec::new();
        for (i, words) in self.manifest.map.iter().enumerate() {
            let len = (map_bytes - i * PIECE_BYTES).min(PIECE_BYTES);
            match Entry::decode(*words) {
                Some(Entry::Never) => map.resize(map.len() + len, 0),
                Some(Entry::Stored {
                    place,
                    hash,
                    stored_bytes,
                    ..
                }) if stored_bytes as usize == len && pool.holds(place) => {
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

/// Moves pieces of a map one after another. It waits, so it is nothing for a worker.
struct Mover<'a> {
    pool: &'a Pool,
    channels: Vec<Option<Box<dyn Channel<RegBuf>>>>,
}

enum MoveError {
    Memory(RegError),
    Connect(ConnectError),
    Channel(ChannelError),
}

impl<'a> Mover<'a> {
    fn new(pool: &'a Pool) -> Self {
        Self {
            pool,
            channels: pool.servers().iter().map(|_| None).collect(),
        }
    }

    fn read(&mut self, place: Place, len: usize) -> Result<RegBuf, MoveError> {
        let buf = (self.pool.registered.acquire(len)).map_err(MoveError::Memory)?;
        self.transfer(Verb::Read, place, buf)
    }

    fn write(&mut self, place: Place, piece: &[u8]) -> Result<(), MoveError> {
        let mut buf = (self.pool.registered.acquire(piece.len())).map_err(MoveError::Memory)?;
        buf.as_mut().copy_from_slice(piece);
        self.transfer(Verb::Write, place, buf).map(drop)
    }

    fn transfer(&mut self, verb: Verb, place: Place, buf: RegBuf) -> Result<RegBuf, MoveError> {
        let server = place.server as usize;
        let channel = match &mut self.channels[server] {
            Some(channel) => channel,
            none => none.insert(
                self.pool.servers()[server]
                    .1
                    .channel()
                    .map_err(MoveError::Connect)?,
            ),
        };
        let len = buf.as_ref().len() as u32;
        let op = Op {
            tag: 0,
            verb,
            extent: self.pool.extent(place),
            offset: place.offset,
            len,
            buf,
        };
        assert!(channel.post(op).is_ok(), "a channel takes one operation");
        let mut done = Vec::new();
        while channel.poll(&mut done) == 0 {
            let wait = channel.wait();
            sleep(wait.fd, wait.readable, wait.writable, wait.until);
        }
        let completion = done.pop().expect("poll returned one");
        completion
            .result
            .map(|()| completion.buf)
            .map_err(MoveError::Channel)
    }
}

fn sleep(fd: Option<BorrowedFd<'_>>, readable: bool, writable: bool, until: Option<Instant>) {
    let mut events = PollFlags::empty();
    events.set(PollFlags::POLLIN, readable);
    events.set(PollFlags::POLLOUT, writable);
    let mut fds: Vec<_> = fd.map(|fd| PollFd::new(fd, events)).into_iter().collect();
    let timeout = until.map_or(PollTimeout::NONE, |until| {
        let left = until.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left.as_millis() + u128::from(!left.is_zero()))
            .unwrap_or(PollTimeout::MAX)
    });
    // Whatever it says, the channel is polled next.
    let _ = nix::poll::poll(&mut fds, timeout);
}

/// Whether the name may be bound all the same: only the answer was lost.
fn may_have_happened(error: &PublishStoreError) -> bool {
    matches!(
        error,
        PublishStoreError::Publish {
            source: PublishError::Control(ControlError::Disconnected { .. }),
            ..
        }
    )
}

fn span_of(words: &Words) -> Option<Span> {
    Entry::decode(*words)?.slot()
}

fn words_of(bytes: &[u8; 32]) -> Words {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn bytes_of(words: Words) -> [u8; 32] {
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
    fn a_slot_that_a_running_publication_may_refer_to_is_kept() {
        let place = |offset| Span {
            place: Place {
                server: 0,
                extent: 0,
                offset,
            },
            bytes: 64,
        };
        let publications = Publications::default();
        assert!(!publications.commit().keep(place(0), false));
        assert!(publications.commit().keep(place(64), true));
        *publications.commits.write() = true;
        assert!(publications.commit().keep(place(128), false));
        assert!(publications.commit().keep(place(192), true));
        assert_eq!(*publications.deferred.lock(), [place(64), place(192)]);
        assert_eq!(*publications.undecided.lock(), [place(128)]);
    }
}
