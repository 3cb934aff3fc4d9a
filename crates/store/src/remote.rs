//! [`PageStore`]: the pages of one region, in slots on memory servers or in a user's own store.
//!
//! The rule it keeps: an entry is replaced only when the new bytes are complete, and the old slot
//! is freed only after that; a failure on the way leaves the last good copy. Moving the bytes is
//! left to the [`IoQueue`](crate::IoQueue).

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
    hint::black_box,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use farpage_fabric::{AllocError, MAX_OP_BYTES};

use crate::{
    BlockingOptions, Cluster, Codec, CreateError, EntryWords, Layout, PageIndex, PageRange,
    Redundancy, RemoteOptions, Reserve, Store, StoreStats, StoreStatsSnapshot,
    blocking::BlockingStore,
    cluster::PoolKey,
    codec::{self, Chooser, Scheme},
    entry::{PageEntry, PageTable},
    names::Claim,
    on_disk::OnDisk,
    place::{SlotPlace, SlotSpan},
    pool::{Growth, PoolReservation, Purpose, SlotPool},
    publications::{Publications, map_bytes},
    readers::ReaderSlots,
    turn::Turn,
};

/// The pages of one region. Dropping it frees its remote memory, except what was published under a
/// name.
pub struct PageStore {
    /// Name of the region in messages.
    pub(crate) label: Arc<str>,
    pub(crate) bytes: u64,
    pub(crate) page_bytes: usize,
    pub(crate) table: PageTable,
    pub(crate) seed: u64,
    pub(crate) stats: Arc<StoreStats>,
    pub(crate) backing: Backing,
    cluster: Arc<Cluster>,
    retired: AtomicBool,
}

#[expect(
    clippy::large_enum_variant,
    reason = "there is one per region, and each transfer looks at what is remote"
)]
pub(crate) enum Backing {
    Remote(RemoteStore),
    Blocking(Arc<BlockingStore>),
}

/// A region's share of the memory servers.
pub(crate) struct RemoteStore {
    pub(crate) pool: Arc<SlotPool>,
    pub(crate) scheme: Box<Scheme>,
    pub(crate) page_bytes: usize,
    /// The chooser of an adaptive codec.
    pub(crate) chooser: Option<Box<Chooser>>,
    pub(crate) reservation: Option<PoolReservation>,
    /// The claim on the region's name, unless the region is only read.
    pub(crate) claim: Option<Box<Claim>>,
    /// The turn at the region's name, unless the region is only read.
    pub(crate) turn: Option<Box<Turn>>,
    /// Copies of a named region that are on disks.
    pub(crate) on_disk: OnDisk,
    /// The publications of a named region, unless it is only read.
    pub(crate) publications: Option<Publications>,
}

impl PageStore {
    /// Makes a region of zeros in remote memory, which errors call `region`: "array 3 of 12 MiB".
    ///
    /// # Errors
    /// [`CreateError`]; nothing was taken then.
    pub fn remote(
        cluster: &Arc<Cluster>,
        region: impl Into<Arc<str>>,
        bytes: u64,
        page_bytes: usize,
        options: &RemoteOptions,
    ) -> Result<Arc<Self>, CreateError> {
        let region = region.into();
        check_page_bytes(&region, page_bytes)?;
        check_bytes(&region, bytes)?;
        if cluster.sessions().is_empty() {
            return Err(CreateError::NoServer { region });
        }
        let scheme = match Scheme::new(options.codec.unwrap_or_default(), options.layout.clone()) {
            Ok(scheme) => scheme,
            Err(source) => return Err(CreateError::Codec { region, source }),
        };
        let redundancy = check_redundancy(&region, cluster, options)?;
        if redundancy.copies() > 1 {
            let started = cluster.start_repairs();
            started.map_err(|source| CreateError::Repairs {
                region: region.clone(),
                source,
            })?;
        }
        // Claimed before any memory is taken, and on all servers: a name that another client has
        // fails here and not at the first publication.
        let (claim, turn) = match &options.name {
            Some(name) => {
                let (claim, turn) = Claim::on_all(cluster, name, options.replace, redundancy)?;
                (Some(claim), Some(turn))
            }
            None => (None, None),
        };
        let named = claim.is_some();
        let pool = if let (Some(name), Some(turn)) = (&options.name, &turn) {
            let ports = cluster.name_ports();
            let readers = ReaderSlots::new(name, turn.numbered(cluster, &ports));
            let pool = cluster.own_pool(ports, Purpose::Named(readers), redundancy);
            pool.set_whole();
            pool
        } else {
            cluster.shared_pool(PoolKey {
                page_bytes,
                is_raw: scheme.is_raw(),
                reserve: options.reserve,
                redundancy,
            })
        };
        // Made before memory is reserved: after a failure nothing would take that back.
        let table = PageTable::new(bytes, page_bytes)?;
        let reservation = match options.reserve {
            Reserve::OnDemand => None,
            Reserve::Full => {
                let needed_bytes = reserved_bytes(bytes, page_bytes, named);
                let failed = |source| CreateError::Alloc {
                    region: region.clone(),
                    bytes,
                    needed_bytes,
                    named,
                    source,
                };
                Some(pool.reserve(needed_bytes, page_bytes).map_err(failed)?)
            }
        };
        let publications = named.then(Publications::default);
        if let (Some(publications), Some(_)) = (&publications, &reservation) {
            publications.set_aside(&pool, map_bytes(bytes, page_bytes), 2);
        }
        let chooser = Chooser::new(&cluster.traffic, &scheme, bytes.div_ceil(page_bytes as u64));
        let remote = RemoteStore {
            pool,
            scheme: Box::new(scheme),
            page_bytes,
            chooser: chooser.map(Box::new),
            reservation,
            claim: claim.map(Box::new),
            turn: turn.map(Box::new),
            on_disk: OnDisk::default(),
            publications,
        };
        let seed = RandomState::new().hash_one(&region);
        let backing = Backing::Remote(remote);
        Ok(Self::new(
            cluster, region, bytes, page_bytes, table, seed, backing,
        ))
    }

    /// Makes a region over a user's own store, which errors call `region`. The store's bytes are
    /// the region's content.
    ///
    /// # Errors
    /// [`CreateError::PageSize`], [`CreateError::Size`] and [`CreateError::Table`].
    pub fn blocking(
        cluster: &Arc<Cluster>,
        region: impl Into<Arc<str>>,
        bytes: u64,
        page_bytes: usize,
        store: Arc<dyn Store>,
        options: &BlockingOptions,
    ) -> Result<Arc<Self>, CreateError> {
        let region = region.into();
        check_page_bytes(&region, page_bytes)?;
        check_bytes(&region, bytes)?;
        let table = PageTable::new(bytes, page_bytes)?;
        let backing = Backing::Blocking(Arc::new(BlockingStore::new(store, options)));
        let seed = RandomState::new().hash_one(&region);
        Ok(Self::new(
            cluster, region, bytes, page_bytes, table, seed, backing,
        ))
    }

    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        label: Arc<str>,
        bytes: u64,
        page_bytes: usize,
        table: PageTable,
        seed: u64,
        backing: Backing,
    ) -> Arc<Self> {
        let stats = Arc::<StoreStats>::default();
        cluster.opened(&stats);
        Arc::new(Self {
            label,
            bytes,
            page_bytes,
            table,
            seed,
            stats,
            backing,
            cluster: cluster.clone(),
            retired: AtomicBool::new(false),
        })
    }

    /// Makes what has been written back durable in a user's own store. Does nothing for remote
    /// memory.
    ///
    /// # Errors
    /// The store's own.
    pub fn flush(&self) -> io::Result<()> {
        match &self.backing {
            Backing::Remote(_) => Ok(()),
            Backing::Blocking(blocking) => blocking.flush(),
        }
    }

    /// Returns the name of the region in errors, as given.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// Returns the region's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the length of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns the number of pages; the last one may be used in part only.
    pub fn pages(&self) -> u64 {
        self.bytes.div_ceil(self.page_bytes as u64)
    }

    /// Returns the codec of the region's pages; `None` in a user's own store.
    pub fn codec(&self) -> Option<Codec> {
        match &self.backing {
            Backing::Remote(remote) => Some(remote.scheme.codec),
            Backing::Blocking(_) => None,
        }
    }

    /// Returns the layout of the region's bytes; `None` in a user's own store.
    pub fn layout(&self) -> Option<&Layout> {
        match &self.backing {
            Backing::Remote(remote) => Some(&remote.scheme.layout),
            Backing::Blocking(_) => None,
        }
    }

    /// Returns the part in remote memory of a store that has one.
    pub(crate) fn remote_backing(&self) -> &RemoteStore {
        match &self.backing {
            Backing::Remote(remote) => remote,
            Backing::Blocking(_) => unreachable!("users' stores have no channels and no snapshots"),
        }
    }

    /// True if the pages are kept in a user's own store, whose calls may do anything.
    pub fn is_users_own(&self) -> bool {
        matches!(self.backing, Backing::Blocking(_))
    }

    /// True if the store has the page with these bytes, by its 128-bit hash: nothing is to be
    /// written back then. `bytes` is a whole page; bytes beyond the region's end count for nothing
    /// in a user's own store. For the page's owner, and for signal handlers too: allocates nothing
    /// and asks no server.
    pub fn is_unchanged(&self, page: PageIndex, bytes: &[u8]) -> bool {
        let entry = self.table.load(page);
        // What a user's own store holds is not known by its value.
        let by_value = !matches!(entry, PageEntry::Stored { .. }) && !self.is_users_own();
        let value = by_value.then(|| codec::repeated(bytes)).flatten();
        self.compare_entry(entry, page, bytes, value).is_ok()
    }

    /// Compares a whole page with what the store has of it. `value` is the one that all of its
    /// bytes repeat, if the caller has looked, and needs no hash then. `Err`: the bytes differ;
    /// their hash, if the comparison took one.
    pub(crate) fn compare(
        &self,
        page: PageIndex,
        bytes: &[u8],
        value: Option<u64>,
    ) -> Result<(), Option<u128>> {
        self.compare_entry(self.table.load(page), page, bytes, value)
    }

    fn compare_entry(
        &self,
        entry: PageEntry,
        page: PageIndex,
        bytes: &[u8],
        value: Option<u64>,
    ) -> Result<(), Option<u128>> {
        if let Some(value) = value {
            return entry.repeats(value).then_some(()).ok_or(None);
        }
        let (old, hash) = match entry {
            PageEntry::Stored { hash, .. } => (Some(hash), self.hash(bytes)),
            PageEntry::Kept { hash, unsure, .. } => (
                (!unsure).then_some(hash),
                self.hash(&bytes[..self.page_len(page)]),
            ),
            _ => return Err(None),
        };
        if old == Some(hash) {
            Ok(())
        } else {
            Err(Some(hash))
        }
    }

    /// Returns the hash of a page of the region.
    pub fn hash(&self, page: &[u8]) -> u128 {
        codec::hash(page, self.seed)
    }

    /// True if an entry of the region, which may come from a copy of the process, is of a page with
    /// these bytes.
    pub fn is_of(&self, entry: EntryWords, bytes: &[u8]) -> bool {
        match PageEntry::decode_timed(entry) {
            Some(PageEntry::Stored { hash, .. }) => hash == self.hash(bytes),
            Some(entry) => codec::repeated(bytes).is_some_and(|value| entry.repeats(value)),
            None => false,
        }
    }

    /// Makes a store without pages beside this one, which keeps pages of the same size raw, on the
    /// same servers and in as many copies. It takes remote memory as pages are written. Asks no
    /// server.
    ///
    /// # Errors
    /// As [`remote`](Self::remote).
    pub fn beside(&self, region: impl Into<Arc<str>>) -> Result<Arc<Self>, CreateError> {
        let redundancy = match &self.backing {
            Backing::Remote(remote) => remote.pool.redundancy(),
            Backing::Blocking(_) => Redundancy::None,
        };
        let options = RemoteOptions {
            reserve: Reserve::OnDemand,
            redundancy: Some(redundancy),
            ..RemoteOptions::default()
        };
        let (cluster, page_bytes) = (&self.cluster, self.page_bytes);
        Self::remote(cluster, region, self.bytes, page_bytes, &options)
    }

    /// Fetches the page's entry into the processor's cache. Call it before the page is filled, and
    /// do something else meanwhile. Any thread may call it; the page's owner reads the entry later.
    pub fn expect(&self, page: PageIndex) {
        // The processor waits for a value only where it is used.
        black_box(self.table.is_stored(page));
    }

    /// Counts `pages` pages that left unchanged, without an [`IoQueue`](crate::IoQueue).
    pub fn count_clean(&self, pages: usize) {
        let clean = &self.stats.write_backs_clean;
        clean.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Counts `pages` pages that nothing is stored of and that are in local memory now, without a
    /// [`IoQueue`](crate::IoQueue).
    pub fn count_made(&self, pages: usize) {
        (self.stats.fills_never).fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Counts a page that has just left, if it is blank again.
    pub fn count_left(&self, page: PageIndex) {
        if self.is_blank(page) {
            self.stats.blanked.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the counters of the store.
    pub fn stats(&self) -> StoreStatsSnapshot {
        let mut stats = self.stats.snapshot();
        if let Backing::Remote(remote) = &self.backing {
            stats.held_bytes = remote.pool.snapshots.held_bytes();
            stats.under_protected_bytes = remote.pool.under_protected_bytes();
            stats.repaired_bytes = remote.pool.repaired_bytes();
            stats.draining_bytes = remote.pool.draining_bytes();
            (stats.sealed_bytes, stats.parity_bytes) = remote.pool.sealed_bytes();
            stats.corrupt += remote.pool.differing();
        }
        stats
    }

    /// Returns the bytes of remote memory that all regions of the cluster hold for snapshots.
    pub(crate) fn held_bytes_in_all(&self) -> u64 {
        self.cluster.held_bytes()
    }

    /// Returns the pool of a region in remote memory that was not retired.
    pub(crate) fn pool_if_open(&self) -> Option<&Arc<SlotPool>> {
        match &self.backing {
            Backing::Remote(remote) if !self.retired.load(Ordering::Acquire) => Some(&remote.pool),
            _ => None,
        }
    }

    /// Returns the address of the entry of `page`: [`EntryWords`](crate::EntryWords) in the
    /// processor's byte order. A copy of this process has its copy of the entry there.
    ///
    /// # Panics
    /// If the region has no such page.
    pub fn entry_address(&self, page: PageIndex) -> usize {
        self.table.address(page)
    }

    /// Returns the words of the entry of `page`, as a copy of the process has them. For the page's
    /// owner.
    pub fn entry_words(&self, page: PageIndex) -> EntryWords {
        self.table.load_words(page)
    }

    /// Gives back the remote memory of a page whose bytes are not needed any more, except what was
    /// published under a name. For the page's owner.
    pub fn forget(&self, page: PageIndex) {
        if let Backing::Remote(remote) = &self.backing
            && self.table.is_stored(page)
        {
            remote.commit(
                &self.table,
                [(page, PageEntry::Never)].into_iter(),
                &mut Vec::new(),
            );
        }
    }

    /// True if the page was never written, or has been cleared since: it holds zeros, and nothing
    /// is stored of it. A hint for threads that do not own the page. False in a user's own store.
    pub fn is_blank(&self, page: PageIndex) -> bool {
        !self.is_users_own() && self.table.is_never(page)
    }

    /// Makes the pages hold zeros. Frees what is stored of them, except what was published under a
    /// name. For the pages' owner, in remote memory.
    pub fn clear(&self, pages: PageRange) {
        if let Backing::Remote(remote) = &self.backing {
            let written = pages.iter().filter(|&page| !self.table.is_never(page));
            let entries = written.map(|page| (page, PageEntry::Never));
            remote.commit(&self.table, entries, &mut Vec::new());
        }
    }

    /// Gives page `to` what is stored of page `from`, which becomes blank. Nothing may be stored of
    /// `to`. For the owner of both, in remote memory without a name.
    pub fn relocate(&self, from: PageIndex, to: PageIndex) {
        debug_assert!(self.is_blank(to), "page {to} has something stored");
        // Snapshots need the slot as before.
        let (entry, time) = self.table.load_timed(from);
        self.table.store_timed(to, entry, time);
        self.table.store(from, PageEntry::Never);
    }

    /// Returns the most bytes that the servers kept at once of this region, and of regions that
    /// share its remote memory. 0 in a user's own store.
    pub fn kept_peak_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Remote(remote) => remote.pool.kept_peak_bytes(),
            Backing::Blocking(_) => 0,
        }
    }

    /// True if other programs know the region by a name.
    pub fn has_name(&self) -> bool {
        matches!(&self.backing, Backing::Remote(remote) if remote.claim.is_some())
    }

    /// Gives remote memory that no page uses back to the servers, if the region has reserved none.
    /// Asks a server and waits for its answer.
    pub fn trim(&self) {
        if let Backing::Remote(remote) = &self.backing
            && remote.reservation.is_none()
            && !remote.pool.is_own()
        {
            remote.pool.trim();
        }
    }

    /// Gives the region's remote memory back, except what was published under a name, now and on
    /// this thread. Call when the region's pages are not used any more. Dropping does the same on
    /// the thread that comes last, which may then have to ask a server.
    ///
    /// Slots that a snapshot needs stay until the snapshot ends. A named region keeps its name and
    /// all of its memory until its last snapshot ends: nobody can open the name before.
    pub fn retire(&self) {
        if self.retired.swap(true, Ordering::AcqRel) {
            return;
        }
        self.cluster.closed(&self.stats);
        let Backing::Remote(remote) = &self.backing else {
            return;
        };
        for page in (self.all().iter()).filter(|&page| self.table.is_stored(page)) {
            if let Some(slot) = self.table.load(page).slot() {
                remote.pool.count_contents(slot, self.page_bytes, -1);
            }
        }
        if remote.pool.is_own() {
            if !remote.pool.snapshots.end_pool_later() {
                remote.end_pool();
            }
            return;
        }
        for page in (self.all().iter()).filter(|&page| self.table.is_stored(page)) {
            let (entry, time) = self.table.load_timed(page);
            if let Some(slot) = entry.slot()
                && !remote.pool.snapshots.hold(slot, time)
            {
                remote.pool.give_back(&[slot]);
            }
        }
        match &remote.reservation {
            Some(reservation) => remote.pool.unreserve(reservation),
            None => remote.pool.trim(),
        }
    }

    /// Returns all pages.
    pub(crate) fn all(&self) -> PageRange {
        PageRange::first(self.pages() as usize)
    }

    /// Returns the number of the page's bytes that belong to the region.
    pub(crate) fn page_len(&self, page: PageIndex) -> usize {
        (self.bytes - page.offset(self.page_bytes) as u64).min(self.page_bytes as u64) as usize
    }
}

impl Drop for PageStore {
    fn drop(&mut self) {
        self.retire();
    }
}

impl RemoteStore {
    /// Ends the pool of one region, and lets its name go.
    pub(crate) fn end_pool(&self) {
        self.pool.release_all();
        // Last, so that the next client to open the name finds nothing of it held.
        self.claim.as_ref().inspect(|claim| claim.let_go());
    }

    /// Allocates a slot for one encoded page. Waits for nothing.
    pub(crate) fn alloc(&self, bytes: u32, page: PageIndex) -> Result<SlotPlace, NoSlot> {
        let mut place = None;
        self.take(bytes, || {
            place = self.pool.alloc(bytes, page.number());
            place.is_some()
        })?;
        Ok(place.expect("there was room"))
    }

    /// Appends slots for `count` raw pages to `places`, as many in a row as possible. Slots that
    /// were found stay appended after an error. Waits for nothing.
    pub(crate) fn alloc_run(
        &self,
        page_bytes: usize,
        count: usize,
        places: &mut Vec<SlotPlace>,
    ) -> Result<(), NoSlot> {
        let end = places.len() + count;
        self.take(page_bytes as u32, || {
            let missing = end - places.len();
            self.pool.alloc_run(page_bytes as u32, missing, places);
            places.len() == end
        })
    }

    /// Takes slots by `alloc`. If it finds too few, starts to ask servers for memory.
    fn take(&self, bytes: u32, mut alloc: impl FnMut() -> bool) -> Result<(), NoSlot> {
        // Looked at before the search: a write, a publication, a snapshot or a repair that ends in
        // between may have made room.
        let unsettled =
            self.pool.has_unsettled() || self.pool.snapshots.hold_any() || self.pool.has_sealed();
        let published = self.publications.as_ref().map(Publications::ended);
        let grants = self.pool.grants();
        if alloc() {
            return Ok(());
        }
        Err(match self.pool.grow_elsewhere(bytes, grants) {
            Growth::UnderWay(refused) => NoSlot::Growing { refused },
            Growth::Refused(source) => {
                let publishes = self.publications.as_ref().is_some_and(|publications| {
                    publications.is_running() || Some(publications.ended()) != published
                });
                let is_held = self.pool.snapshots.hold_any();
                let is_held = is_held || self.pool.room_in_sets() > 0;
                let later = unsettled || self.pool.has_unsettled() || publishes || is_held;
                NoSlot::Full { source, later }
            }
        })
    }

    /// Puts new entries of pages in place and frees the slots that they had before, except those
    /// that a published map or a snapshot needs. `freed` is scratch.
    pub(crate) fn commit(
        &self,
        table: &PageTable,
        entries: impl Iterator<Item = (PageIndex, PageEntry)>,
        freed: &mut Vec<SlotSpan>,
    ) {
        // A map that is being published must see each entry whole and must keep the slots that it
        // refers to.
        let commits = self
            .publications
            .as_ref()
            .map(|publications| publications.commit());
        let snapshots = &self.pool.snapshots;
        let present = snapshots.now();
        for (page, entry) in entries {
            let (old, time) = table.load_timed(page);
            table.store_timed(page, entry, present.time());
            for (slot, pages) in [(old.slot(), -1), (entry.slot(), 1)] {
                if let Some(slot) = slot {
                    self.pool.count_contents(slot, self.page_bytes, pages);
                }
            }
            if let PageEntry::Stored {
                place,
                stored_bytes: bytes,
                published,
                ..
            } = old
            {
                let slot = SlotSpan { place, bytes };
                let is_kept = (commits.as_ref())
                    .is_some_and(|commits| commits.keep(slot, published))
                    || present.has_live() && snapshots.hold(slot, time);
                if !is_kept {
                    freed.push(slot);
                }
            }
        }
        drop(commits);
        self.pool.give_back(freed);
        freed.clear();
    }
}

/// Reason why there is no slot.
pub(crate) enum NoSlot {
    /// Servers are being asked for memory. Holds their last refusal, if any.
    Growing { refused: Option<AllocError> },
    /// The servers gave no room.
    Full {
        source: AllocError,
        /// True if writes in flight, a publication, snapshots, a repair or the opening of a parity
        /// set may make room when they end.
        later: bool,
    },
}

/// Returns the bytes that a fully reserved region is granted: its pages and, since they are written
/// out of place, some on their way. A `named` region gets its pages twice, and two page maps, since
/// a publication stays whole until the next one is.
pub(crate) fn reserved_bytes(bytes: u64, page_bytes: usize, named: bool) -> u64 {
    let whole = bytes.next_multiple_of(page_bytes as u64);
    let on_their_way = whole.min((16 * page_bytes as u64).max(1 << 20));
    let published = if named {
        whole + 2 * map_bytes(bytes, page_bytes)
    } else {
        0
    };
    whole + on_their_way + published
}

/// Upper bound of a region: the addresses under four levels of page tables, the fewest there are. A
/// larger region could not be mapped, and its page tables would not fit in memory.
const REGION_BYTES_MAX: u64 = 1 << 47;

fn check_bytes(region: &Arc<str>, bytes: u64) -> Result<(), CreateError> {
    match bytes {
        1..=REGION_BYTES_MAX => Ok(()),
        _ => Err(CreateError::Size {
            region: region.clone(),
            bytes,
            most: REGION_BYTES_MAX,
        }),
    }
}

/// Checks the redundancy of a region, and returns it.
fn check_redundancy(
    region: &Arc<str>,
    cluster: &Cluster,
    options: &RemoteOptions,
) -> Result<Redundancy, CreateError> {
    let (redundancy, copies) = (options.redundancy(), options.redundancy().copies());
    let endpoints = cluster.sessions().iter().map(|session| session.endpoint());
    let servers = endpoints.collect::<HashSet<_>>().len();
    let region = region.clone();
    match &options.name {
        _ if !redundancy.is_valid() => Err(CreateError::Redundancy { region, redundancy }),
        Some(name) if redundancy.code().is_some() => {
            Err(CreateError::NamedParity { name: name.clone() })
        }
        _ if copies > servers => Err(CreateError::TooFewServers {
            region,
            copies,
            servers,
        }),
        _ => Ok(redundancy),
    }
}

pub(crate) fn check_page_bytes(region: &Arc<str>, page_bytes: usize) -> Result<(), CreateError> {
    let good = page_bytes.is_power_of_two() && (4096..=MAX_OP_BYTES as usize).contains(&page_bytes);
    if good {
        Ok(())
    } else {
        Err(CreateError::PageSize {
            region: region.clone(),
            page_bytes,
        })
    }
}
