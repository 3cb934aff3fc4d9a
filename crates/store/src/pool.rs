//! [`SlotPool`]: slots on all servers for the regions that share it, and the extents that they are
//! carved out of.
//!
//! The rule it keeps: memory reserved for a region is granted before the region exists and is given
//! back only after it, so that writing back a page of a fully reserved raw region never waits for a
//! server's memory. For compressed pages this holds as long as slots of many sizes do not fragment
//! the space; then the pool grows, and says so if it cannot. It also grows for slots that are held
//! for [`Snapshots`], which take nothing of what is reserved from then on.

mod copies;
mod damage;
mod grants;
mod leaving;
mod sets;
mod spares;
mod wish;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use farpage_fabric::{AllocError, ExtentId, Session, log::later, regmem::RegPool};
use farpage_signals::Mutex;

use self::{damage::DamagedRanges, spares::SpareExtent, wish::RoomWish};
use crate::{
    Redundancy,
    groups::{Contents, ExtentGroup, GroupTable},
    health::ServerHealth,
    place::{SlotPlace, SlotSpan, slot_bytes},
    readers::ReaderSlots,
    roster::{Roster, SERVERS_MAX},
    slots::{Arena, Slot},
    snapshots::{OLDEST, Snapshots},
};

/// Longest extent asked for: a server may have to find it in one piece.
const EXTENT_BYTES_MAX: u64 = 1 << 30;

/// Slots on all servers for the regions that share it.
pub(crate) struct SlotPool {
    /// Port (of every I/O queue) and session of each server, as this pool numbers the servers: a
    /// published region keeps its own numbers.
    servers: Roster<(usize, Arc<Session>)>,
    purpose: Purpose,
    pub(crate) snapshots: Snapshots,
    /// Buffers for page maps.
    pub(crate) registered: RegPool,
    redundancy: Redundancy,
    /// Number of servers that have each page, with parity at first.
    copies: usize,
    /// Health of the servers, by port.
    health: Arc<ServerHealth>,
    /// Version of `health` that the arenas' choices follow.
    seen: AtomicU64,
    /// Slots by the server that their extents' groups were granted at first.
    arenas: Roster<Arc<Mutex<Arena>>>,
    pub(crate) groups: GroupTable,
    /// Bytes of the members on each server, of a pool with copies.
    copied_bytes: Box<[AtomicU64]>,
    /// Server on which a copy was damaged, plus 1, until that is logged; 0 without one.
    damaged_on: AtomicU32,
    /// Damaged ranges of extents in parity sets.
    damaged: Mutex<DamagedRanges>,
    /// Number of sealed groups: their room comes back.
    sealed: AtomicU32,
    /// Wish of writes for room that a set may have.
    room_awaited: Mutex<Option<RoomWish>>,
    /// Extents that stay granted when copies go back, so that sets can be opened.
    spares: Mutex<Vec<SpareExtent>>,
    /// Number of times that copies differed when a set was to be made.
    differing: AtomicU64,
    /// Extents of suspect servers that go back when their servers answer.
    owed: Mutex<Vec<(u8, ExtentId)>>,
    /// Bytes that were copied to replace lost copies.
    repaired_bytes: AtomicU64,
    /// True once all slots in use are known: what looks like a hole is one.
    is_whole: AtomicBool,
    /// Held while a publication names the members of groups, or one is replaced.
    members: Mutex<()>,
    /// Held while servers are asked for memory. The last refusal, and its time.
    growing: Mutex<Option<(Instant, AllocError)>>,
    /// True while a thread that asks for memory runs.
    is_growing: AtomicBool,
    /// Number of regions that have begun to give surplus back.
    ended: AtomicU64,
    /// Number of extents that have been added.
    grants: AtomicU64,
    next_server: AtomicUsize,
    next_run: AtomicUsize,
    /// Number of slots that were allocated for a write that has not ended.
    unsettled: AtomicU64,
    /// Bytes of slots that pages are in: now, and at most.
    kept_bytes: AtomicI64,
    kept_peak_bytes: AtomicI64,
}

/// Use of a pool.
pub(crate) enum Purpose {
    /// Pool shared by regions without a name.
    Shared,
    /// Pool of one named region, open for writing.
    Named(ReaderSlots),
    /// Pool of one version of a named region, which others may read, too. Takes READs alone.
    Reading,
}

/// Outcome of a request for memory without waiting.
pub(crate) enum Growth {
    /// Servers are being asked; look again. Holds their last refusal, if any.
    UnderWay(Option<AllocError>),
    /// The servers refused just now.
    Refused(AllocError),
}

/// Bytes that a region was promised, per server.
pub(crate) struct PoolReservation(Vec<u64>);

impl SlotPool {
    /// Makes a pool without extents that keeps pages with this redundancy. Bytes that it holds for
    /// snapshots are counted in `held_bytes`, too.
    pub(crate) fn new(
        servers: Vec<(usize, Arc<Session>)>,
        registered: RegPool,
        (purpose, redundancy): (Purpose, Redundancy),
        health: Arc<ServerHealth>,
        held_bytes: Arc<AtomicU64>,
    ) -> Self {
        Self {
            is_whole: AtomicBool::new(matches!(purpose, Purpose::Shared)),
            purpose,
            snapshots: Snapshots::new(held_bytes),
            arenas: Roster::new(servers.iter().map(|_| new_arena())),
            registered,
            copied_bytes: (0..SERVERS_MAX).map(|_| AtomicU64::new(0)).collect(),
            servers: Roster::new(servers),
            copies: redundancy.copies(),
            redundancy,
            health,
            seen: AtomicU64::new(0),
            groups: GroupTable::default(),
            damaged_on: AtomicU32::new(0),
            damaged: Mutex::default(),
            sealed: AtomicU32::new(0),
            room_awaited: Mutex::default(),
            spares: Mutex::default(),
            differing: AtomicU64::new(0),
            owed: Mutex::default(),
            repaired_bytes: AtomicU64::new(0),
            members: Mutex::default(),
            growing: Mutex::new(None),
            is_growing: AtomicBool::new(false),
            ended: AtomicU64::new(0),
            grants: AtomicU64::new(0),
            next_server: AtomicUsize::new(0),
            next_run: AtomicUsize::new(0),
            unsettled: AtomicU64::new(0),
            kept_bytes: AtomicI64::new(0),
            kept_peak_bytes: AtomicI64::new(0),
        }
    }

    /// True if each page is on more than one server.
    pub(crate) fn has_copies(&self) -> bool {
        self.copies > 1
    }

    /// Returns the redundancy of pages.
    pub(crate) fn redundancy(&self) -> Redundancy {
        self.redundancy
    }

    pub(crate) fn servers(&self) -> &[(usize, Arc<Session>)] {
        &self.servers
    }

    /// Adds a server, which takes part in requests for memory from then on. Does nothing if there
    /// are as many servers as can be.
    pub(crate) fn add_server(&self, port: usize, session: Arc<Session>) {
        let _no_requests = self.growing.lock();
        // A place names an arena, and looks its server up.
        if self.servers.push((port, session)).is_ok() {
            let is_added = self.arenas.push(new_arena()).is_ok();
            debug_assert!(is_added, "there are as many arenas as servers");
        }
    }

    /// True if the pool belongs to one region, and ends with it.
    pub(crate) fn is_own(&self) -> bool {
        !matches!(self.purpose, Purpose::Shared)
    }

    /// Notes that all slots in use are known: repairs may copy the rest of an extent from now on.
    pub(crate) fn set_whole(&self) {
        self.is_whole.store(true, Ordering::Release);
    }

    /// True if this is the pool of a region that is written, and all slots in use are known.
    pub(crate) fn is_written_whole(&self) -> bool {
        self.is_whole.load(Ordering::Acquire) && !matches!(self.purpose, Purpose::Reading)
    }

    /// Returns the readers of older versions, for a named region that is open for writing.
    pub(crate) fn readers(&self) -> Option<&ReaderSlots> {
        match &self.purpose {
            Purpose::Named(readers) => Some(readers),
            Purpose::Shared | Purpose::Reading => None,
        }
    }

    /// Takes all free space.
    pub(crate) fn take_holes(&self) -> Vec<SlotSpan> {
        let mut spans = Vec::new();
        for (server, arena) in self.arenas.iter().enumerate() {
            for (Slot { extent, mut offset }, mut left) in arena.lock().take_holes() {
                while left > 0 {
                    let bytes = left.min(EXTENT_BYTES_MAX);
                    let place = SlotPlace {
                        server: server as u8,
                        extent,
                        offset,
                    };
                    spans.push(SlotSpan {
                        place,
                        bytes: bytes as u32,
                    });
                    (offset, left) = (offset + bytes, left - bytes);
                }
            }
        }
        spans
    }

    pub(crate) fn session(&self, server: u8) -> &Arc<Session> {
        &self.servers[server as usize].1
    }

    pub(crate) fn endpoint(&self, server: u8) -> Arc<str> {
        self.session(server).endpoint().to_string().into()
    }

    pub(crate) fn port(&self, server: u8) -> usize {
        self.servers[server as usize].0
    }

    /// Returns the extent of a place in a pool without copies, or that of the home.
    pub(crate) fn extent(&self, place: SlotPlace) -> ExtentId {
        let home = self.home(place);
        home.expect("an extent with live slots is kept").1
    }

    /// Returns server and extent of a place in a pool without copies, or those of the home. `None`
    /// if the extent is gone.
    pub(crate) fn home(&self, place: SlotPlace) -> Option<(u8, ExtentId)> {
        self.groups.home(place.extent)
    }

    /// Returns server and id of every extent of a pool without copies, by index.
    #[cfg(test)]
    pub(crate) fn extents(&self) -> Vec<Option<(u8, ExtentId)>> {
        let home = |group: ExtentGroup| group.member(0).map(|home| (home.server, home.id));
        let groups = self.groups.all().into_iter();
        groups.map(|group| group.and_then(home)).collect()
    }

    /// Returns the bytes that pages can be in: each is granted once per copy.
    pub(crate) fn granted_bytes(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.lock().granted_bytes)
            .sum()
    }

    /// Returns the bytes of all extents.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let groups = self.groups.all().into_iter().flatten();
        let bytes = |group: ExtentGroup| group.members().count() as u64 * group.bytes;
        groups.map(bytes).sum::<u64>() + self.spare_bytes(|_| true)
    }

    /// True if slots are allocated whose writes have not ended: the end of a write frees slots.
    pub(crate) fn has_unsettled(&self) -> bool {
        self.unsettled.load(Ordering::Relaxed) > 0
    }

    /// Ends what [`alloc`](Self::alloc) and [`alloc_run`](Self::alloc_run) began, for `slots` slots
    /// from `place` on: they are now in pages' entries, were freed, or are given up with their
    /// I/O queue.
    pub(crate) fn settle(&self, place: SlotPlace, slots: usize) {
        self.end_writes(place, slots);
        self.settle_ended(slots);
    }

    /// Settles slots whose writes were [ended](Self::end_writes) before.
    pub(crate) fn settle_ended(&self, slots: usize) {
        self.unsettled.fetch_sub(slots as u64, Ordering::Relaxed);
    }

    /// Frees and settles `slots`, in a row, of a write that [ended](Self::end_writes) and did not
    /// take place, and ends what [`begin_doubt`](Self::begin_doubt) began: nothing arrives in them.
    /// All in one step: once the slots are free, their extent may go back to its server, and its
    /// index may name another one.
    pub(crate) fn abandon(&self, slots: &[SlotSpan]) {
        let SlotPlace { server, extent, .. } = slots[0].place;
        let mut arena = self.arenas[usize::from(server)].lock();
        arena.end_doubt(extent);
        free_slots(&mut arena, slots);
        drop(arena);
        self.settle_ended(slots.len());
    }

    /// Adds a group of extents to an arena, and returns its index.
    fn add_group(&self, arena: u8, group: ExtentGroup) -> Option<u32> {
        let index = self.groups.add(group)?;
        let mut arena = self.arenas[arena as usize].lock();
        arena.add(index, group.bytes);
        // Looked up under the lock: what changes later comes by `follow_health`.
        let choice = self.choice_of(index);
        arena.choose(index, choice);
        drop(arena);
        self.grants.fetch_add(1, Ordering::Release);
        Some(index)
    }

    /// Gives surplus extents to their servers when a region without a reservation ends.
    pub(crate) fn trim(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        let _one_at_a_time = self.growing.lock();
        self.release_surplus();
    }

    /// Gives back extents that were taken beside a region's reservation, or for snapshots, and are
    /// not used any more.
    pub(crate) fn shrink(&self) {
        let mut refused = self.growing.lock();
        self.release_surplus();
        // The servers have room for a write that waits.
        *refused = None;
    }

    /// Gives back extents that nothing uses and no region was promised.
    fn release_surplus(&self) {
        for (server, arena) in self.arenas.iter().enumerate() {
            let held_bytes = self.snapshots.held_bytes_on(server);
            let surplus = arena.lock().take_surplus(held_bytes);
            for index in surplus {
                if let Some(group) = self.groups.remove(index) {
                    self.release_group(&group);
                }
            }
        }
    }

    fn release_group(&self, group: &ExtentGroup) {
        for (_, member) in group.members() {
            self.uncount_copy(member.server, group.bytes);
            self.release(member.server as usize, member.id);
        }
    }

    fn release(&self, server: usize, id: ExtentId) {
        let session = &self.servers[server].1;
        if self.has_copies() || self.is_leaving(server as u8) {
            if session.loss(false).is_some() {
                return;
            }
            if self.has_copies() && !self.is_usable(server as u8) {
                // A call would wait for its deadline. The repairs try again.
                self.owed.lock().push((server as u8, id));
                return;
            }
        }
        if let Err(error) = session.release(id) {
            // The session's end frees the extent at the latest.
            let endpoint = session.endpoint().clone();
            later(move || {
                tracing::warn!(%endpoint, extent = %id, %error, "extent not given back");
            });
        }
    }

    /// Gives all extents back: the end of a region with a pool of its own. An extent that a server
    /// grants from here on goes back at once.
    pub(crate) fn release_all(&self) {
        // A member that is being replaced is in no table.
        let _fixed = self.members.lock();
        for group in self.groups.close().into_iter().flatten() {
            self.release_group(&group);
        }
        self.release_spares(|_| true);
    }

    /// Allocates a slot for `bytes`, on the server that `wish` (a page's number) falls on if that
    /// has room. [`settle`](Self::settle) ends the allocation.
    pub(crate) fn alloc(&self, bytes: u32, wish: u64) -> Option<SlotPlace> {
        let servers = self.arenas.len();
        let place = self.choices().iter().find_map(|&choice| {
            (0..servers)
                .map(|other| (wish as usize + other) % servers)
                .find_map(|server| {
                    let mut arena = self.arenas[server].lock();
                    let Slot { extent, offset } = arena.alloc(bytes, choice)?;
                    arena.begin_writes(extent, 1);
                    Some(SlotPlace {
                        server: server as u8,
                        extent,
                        offset,
                    })
                })
        })?;
        self.unsettled.fetch_add(1, Ordering::Relaxed);
        Some(place)
    }

    /// Appends up to `count` places for pages of `bytes`, as many in a row as there is room for.
    /// Successive runs fall on successive servers. [`settle`](Self::settle) ends the allocation.
    pub(crate) fn alloc_run(&self, bytes: u32, count: usize, places: &mut Vec<SlotPlace>) {
        let (before, end) = (places.len(), places.len() + count);
        let first = self.next_run.fetch_add(1, Ordering::Relaxed);
        let servers = self.arenas.len();
        let tries =
            (self.choices().iter()).flat_map(|&choice| (0..servers).map(move |i| (choice, i)));
        for (choice, other) in tries {
            let server = (first + other) % servers;
            let place = |Slot { extent, offset }| SlotPlace {
                server: server as u8,
                extent,
                offset,
            };
            let from = places.len();
            let mut arena = self.arenas[server].lock();
            arena.alloc_run(bytes, end - from, choice, |slot| places.push(place(slot)));
            (places[from..].iter()).for_each(|place| arena.begin_writes(place.extent, 1));
            if places.len() == end {
                break;
            }
        }
        self.unsettled
            .fetch_add((places.len() - before) as u64, Ordering::Relaxed);
    }

    /// Frees `slots` that entries of pages had at some time, except those that snapshots may need.
    pub(crate) fn free(&self, slots: &[SlotSpan]) {
        let is_free = |slot: &&SlotSpan| !self.snapshots.hold(**slot, OLDEST);
        let free: Vec<SlotSpan> = slots.iter().filter(is_free).copied().collect();
        self.give_back(&free);
    }

    /// Frees `slots` that no snapshot needs. Neighbours in the list on the same server take one
    /// lock of its arena.
    pub(crate) fn give_back(&self, slots: &[SlotSpan]) {
        for of_server in slots.chunk_by(|a, b| a.place.server == b.place.server) {
            let mut arena = self.arenas[of_server[0].place.server as usize].lock();
            free_slots(&mut arena, of_server);
        }
    }

    /// Returns the extent of a slot that another process says is one; `None` if any of the slot is
    /// free, or nowhere.
    pub(crate) fn find(&self, slot: SlotSpan) -> Option<ExtentId> {
        let SlotPlace { server, extent, .. } = slot.place;
        let arena = self.arenas.get(usize::from(server))?;
        if !arena.lock().has(slot_of(slot.place), slot.bytes) {
            return None;
        }
        // The pool of a region that has ended has arenas, and no extents.
        let group = self.groups.get(extent)?;
        let (_, member) = group.good().next().or_else(|| group.members().next())?;
        Some(member.id)
    }

    /// Returns the bytes in slots, on all servers.
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.lock().used_bytes())
            .sum()
    }

    /// Counts the page in `slot` among those that a server keeps (`pages` is 1), or no longer (-1).
    /// The server shows the sum. A pool that is only read counts nothing: its writer does.
    pub(crate) fn count_contents(&self, slot: SlotSpan, page_bytes: usize, pages: i64) {
        if matches!(self.purpose, Purpose::Reading) {
            return;
        }
        let bytes = pages * slot_bytes(slot.bytes) as i64;
        let kept = self.kept_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.kept_peak_bytes.fetch_max(kept, Ordering::Relaxed);
        let contents = Contents {
            plain_bytes: pages * page_bytes as i64,
            stored_bytes: bytes,
        };
        let server = self.groups.count_contents(slot.place.extent, contents);
        let session = self.session(server.unwrap_or(slot.place.server));
        session.add_contents(contents.plain_bytes, contents.stored_bytes);
    }

    /// Returns the peak of the bytes that pages were in at once.
    pub(crate) fn kept_peak_bytes(&self) -> u64 {
        let peak = self.kept_peak_bytes.load(Ordering::Relaxed);
        peak.try_into().unwrap_or(0)
    }

    /// Takes a slot that a published map refers to. False if it is nowhere, or any of it is taken.
    pub(crate) fn claim(&self, slot: SlotSpan) -> bool {
        let arena = self.arenas.get(slot.place.server as usize);
        arena.is_some_and(|arena| arena.lock().claim(slot_of(slot.place), slot.bytes))
    }

    /// Returns the number of extents that have been added.
    pub(crate) fn grants(&self) -> u64 {
        self.grants.load(Ordering::Acquire)
    }
}

fn new_arena() -> Arc<Mutex<Arena>> {
    Arc::new(Mutex::new(Arena::new()))
}

fn slot_of(SlotPlace { extent, offset, .. }: SlotPlace) -> Slot {
    Slot { extent, offset }
}

/// Frees slots of an arena. Neighbours in the list are freed as one.
fn free_slots(arena: &mut Arena, slots: &[SlotSpan]) {
    for row in slots.chunk_by(|a, b| a.is_followed_by(b)) {
        let bytes = row.iter().map(|slot| slot_bytes(slot.bytes)).sum();
        arena.free(slot_of(row[0].place), bytes);
    }
}
