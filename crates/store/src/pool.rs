//! [`SlotPool`]: slots on all servers for the regions that share it, and the extents that they are
//! carved out of.
//!
//! The rule it keeps: memory reserved for a region is granted before the region exists and is given
//! back only after it, so that writing back a page of a fully reserved raw region never waits for a
//! server's memory. For compressed pages this holds as long as slots of many sizes do not fragment
//! the space; then the pool grows, and says so if it cannot. It also grows for slots that are held
//! for [`Snapshots`], which take nothing of what is reserved from then on.

use std::{
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{AllocError, ControlError, ExtentId, Session, log::later, regmem::RegPool};
use farpage_signals::Mutex;

use crate::{
    place::{SlotPlace, SlotSpan, slot_bytes},
    readers::ReaderSlots,
    slots::{Arena, GRANULE_BYTES, Slot},
    snapshots::{OLDEST, Snapshots},
};

/// Longest extent asked for: a server may have to find it in one piece.
const EXTENT_BYTES_MAX: u64 = 1 << 30;
/// Shortest extent that a shared pool asks for, if the server has it: many small regions then share
/// few extents. Servers back extents lazily.
const EXTENT_BYTES_MIN: u64 = 16 << 20;
/// Time for which a full server is not asked again.
const FULL_PAUSE: Duration = Duration::from_millis(50);

pub(crate) const NO_PANIC: &str = "nothing panics under this lock";

/// Slots on all servers for the regions that share it.
pub(crate) struct SlotPool {
    /// Port (of every lane) and session of each server, as this pool numbers the servers: a
    /// published region keeps its own numbers.
    servers: Vec<(usize, Arc<Session>)>,
    purpose: Purpose,
    pub(crate) snapshots: Snapshots,
    /// Buffers for page maps.
    pub(crate) registered: RegPool,
    arenas: Vec<Mutex<Arena>>,
    /// The standard library's lock, which never allocates: a signal handler may look an extent up.
    extents: RwLock<ExtentTable>,
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

#[derive(Default)]
struct ExtentTable {
    by_index: Vec<Option<(u8, ExtentId)>>,
    vacant: Vec<u32>,
    /// True once all extents were given back: no extent is added any more.
    closed: bool,
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
    /// Makes a pool without extents. Bytes that it holds for snapshots are counted in `held_bytes`,
    /// too.
    pub(crate) fn new(
        servers: Vec<(usize, Arc<Session>)>,
        registered: RegPool,
        purpose: Purpose,
        held_bytes: Arc<AtomicU64>,
    ) -> Self {
        Self {
            purpose,
            snapshots: Snapshots::new(servers.len(), held_bytes),
            arenas: servers.iter().map(|_| Mutex::new(Arena::new())).collect(),
            servers,
            registered,
            extents: RwLock::default(),
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

    pub(crate) fn servers(&self) -> &[(usize, Arc<Session>)] {
        &self.servers
    }

    /// True if the pool belongs to one region, and ends with it.
    pub(crate) fn is_own(&self) -> bool {
        !matches!(self.purpose, Purpose::Shared)
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

    pub(crate) fn session(&self, server: u8) -> &Session {
        &self.servers[server as usize].1
    }

    pub(crate) fn endpoint(&self, server: u8) -> Arc<str> {
        self.session(server).endpoint().to_string().into()
    }

    pub(crate) fn port(&self, server: u8) -> usize {
        self.servers[server as usize].0
    }

    pub(crate) fn extent(&self, place: SlotPlace) -> ExtentId {
        let (_, id) = self.extents.read().expect(NO_PANIC).by_index[place.extent as usize]
            .expect("an extent with live slots is kept");
        id
    }

    /// Returns server and id of every extent, by index.
    pub(crate) fn extents(&self) -> Vec<Option<(u8, ExtentId)>> {
        self.extents.read().expect(NO_PANIC).by_index.clone()
    }

    pub(crate) fn granted_bytes(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.lock().granted_bytes)
            .sum()
    }

    /// True if slots are allocated whose writes have not ended: the end of a write frees slots.
    pub(crate) fn has_unsettled(&self) -> bool {
        self.unsettled.load(Ordering::Relaxed) > 0
    }

    /// Ends what [`alloc`](Self::alloc) and [`alloc_run`](Self::alloc_run) began, for `slots`
    /// slots: they are now in pages' entries, were freed, or are given up with their lane.
    pub(crate) fn settle(&self, slots: usize) {
        self.unsettled.fetch_sub(slots as u64, Ordering::Relaxed);
    }

    /// Frees and settles `slots` of a write that did not take place: nothing arrives in them.
    pub(crate) fn abandon(&self, slots: &[SlotSpan]) {
        self.give_back(slots);
        self.settle(slots.len());
    }

    /// Promises `bytes` in units of at least a page, spread over the servers. Takes nothing on an
    /// error.
    pub(crate) fn reserve(
        &self,
        bytes: u64,
        page_bytes: usize,
    ) -> Result<PoolReservation, AllocError> {
        let _one_at_a_time = self.growing.lock();
        let unit = GRANULE_BYTES.max(page_bytes as u64);
        let servers = self.servers.len() as u64;
        let units = bytes.div_ceil(unit);
        let first = self.next_server.fetch_add(1, Ordering::Relaxed) as u64;
        let mut promised = vec![0u64; self.servers.len()];
        let mut failure = None;
        for i in 0..servers {
            let share = (units / servers + u64::from(i < units % servers)) * unit;
            // First the server whose turn it is, then any server that has room.
            for server in (0..servers).map(|other| ((first + i + other) % servers) as usize) {
                match self.promise(server, share, unit) {
                    Ok(()) => {
                        promised[server] += share;
                        failure = None;
                        break;
                    }
                    Err(error) => failure = Some(error),
                }
            }
            if let Some(error) = failure {
                self.take_back(&promised);
                self.release_surplus();
                return Err(error);
            }
        }
        Ok(PoolReservation(promised))
    }

    /// Takes a promise back and gives surplus extents to their servers. Call once the region's
    /// slots are freed.
    pub(crate) fn unreserve(&self, reservation: &PoolReservation) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        let _one_at_a_time = self.growing.lock();
        self.take_back(&reservation.0);
        self.release_surplus();
    }

    fn take_back(&self, promised: &[u64]) {
        for (arena, bytes) in self.arenas.iter().zip(promised) {
            arena.lock().reserved_bytes -= bytes;
        }
    }

    fn promise(&self, server: usize, bytes: u64, unit: u64) -> Result<(), AllocError> {
        let lacking = {
            let arena = self.arenas[server].lock();
            let held_bytes = self.snapshots.held_bytes_on(server);
            (arena.reserved_bytes + held_bytes + bytes).saturating_sub(arena.granted_bytes)
        };
        let mut granted = 0;
        while granted < lacking {
            let least = (lacking - granted).min(EXTENT_BYTES_MAX);
            granted += match self.grant(server, least.next_multiple_of(unit)) {
                Err(full @ AllocError::Full { .. }) => return Err(in_all(full, lacking, granted)),
                other => other?,
            };
        }
        self.arenas[server].lock().reserved_bytes += bytes;
        Ok(())
    }

    /// Asks a server for an extent of at least `least` bytes.
    fn grant(&self, server: usize, least: u64) -> Result<u64, AllocError> {
        let session = &self.servers[server].1;
        let wish = least.max(self.extent_bytes_min(server));
        let extent = match session.grant(wish) {
            Err(AllocError::Full { .. }) if least < wish => session.grant(least)?,
            other => other?,
        };
        if self.add(server as u8, extent.id, extent.bytes).is_none() {
            // The pool is closed, so nothing else would give the extent back.
            self.release(server, extent.id);
        }
        Ok(extent.bytes)
    }

    /// Returns the least length of the next extent, if the server has it. A pool of one region
    /// takes as much again as it has: a small region takes little, and a large one few extents.
    /// Extents beside a reservation have the reservation's length, so that any of them can stay
    /// when the others are given back.
    fn extent_bytes_min(&self, server: usize) -> u64 {
        if !self.is_own() {
            return EXTENT_BYTES_MIN;
        }
        let arena = self.arenas[server].lock();
        let has = match arena.reserved_bytes {
            0 => arena.granted_bytes,
            reserved => reserved,
        };
        has.min(EXTENT_BYTES_MIN)
    }

    /// Adds an extent and returns its index; `None` after [`release_all`](Self::release_all).
    pub(crate) fn add(&self, server: u8, id: ExtentId, bytes: u64) -> Option<u32> {
        let index = {
            let mut extents = self.extents.write().expect(NO_PANIC);
            if extents.closed {
                return None;
            }
            let index = extents.vacant.pop().unwrap_or_else(|| {
                extents.by_index.push(None);
                extents.by_index.len() as u32 - 1
            });
            assert!(
                index < SlotPlace::EXTENTS_MAX,
                "a pool has at most 16 million extents"
            );
            extents.by_index[index as usize] = Some((server, id));
            index
        };
        self.arenas[server as usize].lock().add(index, bytes);
        self.grants.fetch_add(1, Ordering::Release);
        Some(index)
    }

    /// Adds an index that a published map does not use. The index stays unused until
    /// [`end_gaps`](Self::end_gaps).
    pub(crate) fn add_gap(&self) {
        self.extents.write().expect(NO_PANIC).by_index.push(None);
    }

    /// Allows use of the gaps: all extents have the indices that a published map knows.
    pub(crate) fn end_gaps(&self) {
        let mut extents = self.extents.write().expect(NO_PANIC);
        let gaps = (extents.by_index.iter().zip(0..)).filter(|(extent, _)| extent.is_none());
        extents.vacant = gaps.map(|(_, index)| index).collect();
    }

    /// True if the place is on an extent of this pool.
    pub(crate) fn has_extent_of(&self, place: SlotPlace) -> bool {
        let extents = self.extents.read().expect(NO_PANIC);
        extents
            .by_index
            .get(place.extent as usize)
            .is_some_and(|extent| extent.is_some_and(|(on, _)| on == place.server))
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
                let id = {
                    let mut extents = self.extents.write().expect(NO_PANIC);
                    extents.vacant.push(index);
                    extents.by_index[index as usize]
                        .take()
                        .expect("an arena's extents are in the table")
                        .1
                };
                self.release(server, id);
            }
        }
    }

    fn release(&self, server: usize, id: ExtentId) {
        let session = &self.servers[server].1;
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
        let extents = {
            let mut extents = self.extents.write().expect(NO_PANIC);
            extents.closed = true;
            std::mem::take(&mut extents.by_index)
        };
        for (server, id) in extents.into_iter().flatten() {
            self.release(server as usize, id);
        }
    }

    /// Allocates a slot for `bytes`, on the server that `wish` (a page's number) falls on if that
    /// has room. [`settle`](Self::settle) ends the allocation.
    pub(crate) fn alloc(&self, bytes: u32, wish: u64) -> Option<SlotPlace> {
        let servers = self.arenas.len();
        let place = (0..servers)
            .map(|other| (wish as usize + other) % servers)
            .find_map(|server| {
                let Slot { extent, offset } = self.arenas[server].lock().alloc(bytes)?;
                Some(SlotPlace {
                    server: server as u8,
                    extent,
                    offset,
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
        for other in 0..self.arenas.len() {
            let server = (first + other) % self.arenas.len();
            let place = |Slot { extent, offset }| SlotPlace {
                server: server as u8,
                extent,
                offset,
            };
            let mut arena = self.arenas[server].lock();
            arena.alloc_run(bytes, end - places.len(), |slot| places.push(place(slot)));
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
            for row in of_server.chunk_by(|a, b| a.is_followed_by(b)) {
                let bytes = row.iter().map(|slot| slot_bytes(slot.bytes)).sum();
                arena.free(slot_of(row[0].place), bytes);
            }
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
        let extents = self.extents.read().expect(NO_PANIC);
        let (_, id) = (*extents.by_index.get(extent as usize)?)?;
        Some(id)
    }

    /// Returns the bytes in slots, on all servers.
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.lock().used_bytes())
            .sum()
    }

    /// Counts the page in `slot` among those that its server keeps (`pages` is 1), or no longer
    /// (-1). The server shows the sum. A pool that is only read counts nothing: its writer does.
    pub(crate) fn count_contents(&self, slot: SlotSpan, page_bytes: usize, pages: i64) {
        if matches!(self.purpose, Purpose::Reading) {
            return;
        }
        let bytes = pages * slot_bytes(slot.bytes) as i64;
        let kept = self.kept_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.kept_peak_bytes.fetch_max(kept, Ordering::Relaxed);
        let session = &self.servers[slot.place.server as usize].1;
        session.add_contents(pages * page_bytes as i64, bytes);
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

    /// Starts a thread that asks the servers for another extent that holds a slot of `bytes`: see
    /// [`grow`](Self::grow). Waits for nothing. For a caller that found no room after it had seen
    /// `grants` extents: if there are more by now, none is asked for, and the caller looks again.
    pub(crate) fn grow_elsewhere(self: &Arc<Self>, bytes: u32, grants: u64) -> Growth {
        let Some(refused) = self.growing.try_lock() else {
            return Growth::UnderWay(None);
        };
        if self.grants() != grants {
            return Growth::UnderWay(None);
        }
        let said = match &*refused {
            Some((at, error)) if at.elapsed() < FULL_PAUSE => {
                return Growth::Refused(error.clone());
            }
            said => said.as_ref().map(|(_, error)| error.clone()),
        };
        if !self.is_growing.swap(true, Ordering::Relaxed) {
            let (pool, ended) = (self.clone(), self.ended());
            let ask = move || {
                // `growing` keeps the servers' answer for the waiting callers.
                let _ = pool.grow_unless_ended(bytes, ended);
                pool.is_growing.store(false, Ordering::Relaxed);
            };
            if let Err(error) = farpage_tables::errand("farpage-grow", ask) {
                self.is_growing.store(false, Ordering::Relaxed);
                return Growth::Refused(AllocError::Control(ControlError::Disconnected {
                    endpoint: self.endpoint(0).to_string(),
                    attempt: "start a thread that asks for memory".to_owned(),
                    reason: error.to_string(),
                }));
            }
        }
        Growth::UnderWay(said)
    }

    /// Locks out all requests to servers for memory while the result is held.
    #[cfg(test)]
    pub(crate) fn lock_growth(&self) -> impl Sized + '_ {
        self.growing.lock()
    }

    /// Asks the servers for another extent that holds a slot of `bytes`. Calls a server and waits
    /// for its answer.
    pub(crate) fn grow(&self, bytes: u32) -> Result<(), AllocError> {
        self.grow_unless_ended(bytes, self.ended())
    }

    /// Returns the number of regions that have begun to give surplus back.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// [`grow`](Self::grow), for a caller that saw `ended` regions ended. If another region has
    /// ended since, the request may have been for that region, and its own search for surplus may
    /// have come too early. Then unused extents are given back now, and a caller that still waits
    /// asks again.
    pub(crate) fn grow_unless_ended(&self, bytes: u32, ended: u64) -> Result<(), AllocError> {
        let mut refused = self.growing.lock();
        if let Some((at, error)) = &*refused
            && at.elapsed() < FULL_PAUSE
        {
            return Err(error.clone());
        }
        let least = u64::from(bytes).next_power_of_two().max(GRANULE_BYTES);
        let first = self.next_server.fetch_add(1, Ordering::Relaxed);
        let mut failure = None;
        for other in 0..self.servers.len() {
            match self.grant((first + other) % self.servers.len(), least) {
                Ok(_) => {
                    *refused = None;
                    // A region counts itself before it waits for this lock. So one that is not
                    // counted yet looks for surplus after us.
                    if self.ended() != ended {
                        self.release_surplus();
                    }
                    return Ok(());
                }
                Err(error) => failure = Some(error),
            }
        }
        let full = failure.expect("a pool has at least one server");
        let room = self
            .readers()
            .map(|readers| readers.make_room(full.clone()));
        let error = match room {
            Some(Ok(free)) => {
                self.free(&free);
                return Ok(());
            }
            Some(Err(error)) => error,
            None => full,
        };
        *refused = Some((Instant::now(), error.clone()));
        Err(error)
    }
}

/// Turns the refusal of one extent into that of all `lacking` bytes, of which `granted` had been
/// granted.
fn in_all(mut full: AllocError, lacking: u64, granted: u64) -> AllocError {
    if let AllocError::Full {
        asked, available, ..
    } = &mut full
    {
        (*asked, *available) = (lacking, *available + granted);
    }
    full
}

fn slot_of(SlotPlace { extent, offset, .. }: SlotPlace) -> Slot {
    Slot { extent, offset }
}
