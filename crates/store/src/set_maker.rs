//! [`SetMaker`]: gives extents parity once they are full and cool, and their copies back.
//!
//! The rule it keeps: a set never makes damage lasting. Why that holds:
//!
//! 1. The groups are *sealed*, as for a repair: no new write begins in them.
//! 2. The maker waits until every write that began before has ended, and nothing of a write that
//!    was given up can land any more. From then on no byte of these extents changes by a request.
//! 3. All copies are Good, so that each is complete. They are compared with each other, but for
//!    holes: a bit that has flipped in one is found, since the others differ. Such groups get no
//!    parity; fills find out by the pages' hashes which copy is wrong, and repairs replace it.
//! 4. Parity is computed from the copies that stay, whole, with the bytes in their holes; written,
//!    read back, and compared. Then all of the set is read again and compared: a hole or a parity
//!    that is read differently each time would make a page wrong that is decoded with it.
//! 5. One step under the table's lock makes the set, if no copy was lost or replaced since step 1,
//!    the groups are still sealed, and all of the set's servers answer. Only then the other copies
//!    go back.
//!
//! Slots that go out of use in a set are not written again. When a write finds no room, a set is
//! *opened*: the parity is computed once more and compared, repairs make the copies anew, the
//! parity goes back, and the slots are given out. A set whose parity is not that of its columns is
//! not opened: one of them is damaged, and the page's hash will tell which. No page's entry changes
//! in any of this. The choice of the extents' servers keeps all extents of a set on different ones.

mod columns;

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{ExtentId, log::later};

use self::columns::choose_columns;
use crate::{
    Cluster,
    groups::{ExtentGroup, Member, MemberState},
    mover::{MoveError, Mover, Pace, pieces_of},
    parity::{ParityCode, ParitySet, add_product},
    pool::SlotPool,
};

/// Part of an extent that may be holes when it gets parity: holes cost parity, too, and are given
/// out again only when the set is opened. Open, they would cost copies.
const HOLES_PART: u64 = 4;
/// Time for which a set that no server has room to open stays as it is.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// Time for which groups are kept out of use until writes to them have ended.
const SEALED_MAX: Duration = Duration::from_millis(100);

/// Interval at which servers are asked for extents that openings of sets need and that are missing.
const SPARES_EVERY: Duration = Duration::from_secs(1);

/// State of the making of sets between two turns.
#[derive(Default)]
pub(crate) struct SetMaker {
    /// Allocations in groups when they last changed, and the time when that was seen, by the
    /// address of the pool and the group's index.
    quiet: HashMap<(usize, u32), (u32, Instant)>,
    /// Groups whose copies differ, with the number of their changes.
    differing: HashMap<(usize, u32), u32>,
    /// The set that is made once writes have ended.
    sealed: Option<SealedSet>,
    /// Servers from which parity came back damaged, with the address of the pool: they come last.
    distrusted: HashSet<(usize, u8)>,
    /// Time when servers last had no room to open a set of a pool, by the pool's address, and the
    /// set's number.
    refused: HashMap<usize, (Instant, u32)>,
    /// Sets that stay half open until servers have room, each with the address of the pool: others
    /// are opened meanwhile.
    half_open: HashSet<(usize, u32)>,
    /// Time when servers were last asked for missing spare extents.
    asked: Option<Instant>,
    /// True once a lack of servers was reported.
    told_few: bool,
}

/// Returns the number by which a pool is known here.
fn address_of(pool: &Arc<SlotPool>) -> usize {
    Arc::as_ptr(pool).addr()
}

/// Groups that are to become a set.
struct SealedSet {
    pool: Arc<SlotPool>,
    code: ParityCode,
    /// Index and state of each group, and the position of the member that stays.
    columns: Vec<(u32, ExtentGroup, u8)>,
    /// Servers and extents for the parity.
    parity: Vec<(u8, ExtentId)>,
    /// Time since when the groups are sealed.
    since: Instant,
}

/// Reason why a set is not made.
enum Unmade {
    /// A server failed on the way, or has no room.
    Later,
    /// Copies of a group on these servers differ, or the columns of the group's set and its parity.
    Differs(u32, Vec<u8>),
    /// Parity did not come back as it was written.
    Damaged(u8),
}

impl From<(u8, MoveError)> for Unmade {
    fn from(_: (u8, MoveError)) -> Self {
        Self::Later
    }
}

impl SetMaker {
    /// Ends and opens sets, and gives back what is of no use. Comes before the repairs of each
    /// turn, however long these go on. True if there may be more to do at once.
    pub(crate) fn tend(&mut self, cluster: &Cluster, pools: &[Arc<SlotPool>]) -> bool {
        if let Some(sealed) = &self.sealed
            && (sealed.pool.is_room_awaited() || sealed.since.elapsed() >= SEALED_MAX)
        {
            self.give_up();
        }
        self.look(pools);
        let asks = self.asked.is_none_or(|it| it.elapsed() >= SPARES_EVERY);
        if asks {
            self.asked = Some(Instant::now());
        }
        let mut any_done = false;
        for pool in pools.iter().filter(|pool| pool.code().is_some()) {
            pool.release_unused_sets();
            pool.release_useless_spares();
            if asks {
                pool.ask_for_spares();
            }
            any_done |= self.end_opening(pool) || self.open(cluster, pool);
        }
        any_done
    }

    /// Makes a set, or seals groups for one. True if there may be more to do at once.
    pub(crate) fn make(&mut self, cluster: &Cluster, pools: &[Arc<SlotPool>]) -> bool {
        if let Some(sealed) = self.sealed.take() {
            return self.finish(cluster, sealed);
        }
        let mut coded = pools.iter().filter(|pool| pool.code().is_some());
        coded.any(|pool| self.make_in(cluster, pool))
    }

    /// Gives the sealed groups up, if that of a pool is one of them: it is to be repaired.
    pub(crate) fn let_go(&mut self, pool: &Arc<SlotPool>, index: u32) {
        let is_one = |sealed: &SealedSet| {
            let mut columns = sealed.columns.iter();
            Arc::ptr_eq(&sealed.pool, pool) && columns.any(|(column, ..)| *column == index)
        };
        if self.sealed.as_ref().is_some_and(is_one) {
            self.give_up();
        }
    }

    /// Gives the sealed groups up. They have to cool down again.
    fn give_up(&mut self) {
        let Some(sealed) = self.sealed.take() else {
            return;
        };
        sealed.give_up(usize::MAX);
        for (index, ..) in &sealed.columns {
            if let Some((_, since)) = self.quiet.get_mut(&(address_of(&sealed.pool), *index)) {
                *since = Instant::now();
            }
        }
    }

    /// Notes that no server has room for a copy of a group. If the group's set is being opened, it
    /// is closed again, or stays half open.
    pub(crate) fn refuse(&mut self, pool: &Arc<SlotPool>, index: u32) {
        let column = pool.groups.get(index).and_then(|group| group.column);
        let set = column.and_then(|it| Some((it.set, pool.groups.set(it.set)?)));
        if let Some((number, set)) = set.filter(|(_, set)| set.is_opening) {
            match pool.keep_set(number, &set) {
                true => _ = (self.refused).insert(address_of(pool), (Instant::now(), number)),
                false => _ = self.half_open.insert((address_of(pool), number)),
            }
        }
    }

    /// Notes which groups have changed since the last look.
    fn look(&mut self, pools: &[Arc<SlotPool>]) {
        let now = Instant::now();
        let before = std::mem::take(&mut self.quiet);
        for pool in pools.iter().filter(|pool| pool.code().is_some()) {
            for (index, group) in (0..).zip(pool.groups.all()) {
                let Some(used) = pool.use_of(index).filter(|_| group.is_some()) else {
                    continue;
                };
                let key = (address_of(pool), index);
                let same = before
                    .get(&key)
                    .filter(|(count, _)| *count == used.allocated);
                let since = same.map_or(now, |(_, since)| *since);
                self.quiet.insert(key, (used.allocated, since));
            }
        }
        self.differing.retain(|key, _| self.quiet.contains_key(key));
        let is_there = |address: usize| pools.iter().any(|pool| address_of(pool) == address);
        self.refused.retain(|address, _| is_there(*address));
        self.half_open.retain(|(address, number)| {
            let pool = pools.iter().find(|pool| address_of(pool) == *address);
            let set = pool.and_then(|pool| pool.groups.set(*number));
            set.is_some_and(|set| set.is_opening)
        });
    }

    fn end_opening(&self, pool: &SlotPool) -> bool {
        let sets = pool.groups.sets().into_iter();
        let mut opening = sets.filter(|(_, set)| set.is_opening);
        opening.any(|(number, set)| pool.dissolve_set(number, &set))
    }

    /// Opens the set with the most room, if a write waits for room.
    fn open(&mut self, cluster: &Cluster, pool: &Arc<SlotPool>) -> bool {
        if self.is_refused(pool) || !pool.is_room_awaited() {
            return false;
        }
        let mut sets = pool.groups.sets();
        sets.retain(|(number, _)| !self.half_open.contains(&(address_of(pool), *number)));
        if sets.iter().any(|(_, set)| set.is_opening) {
            return false;
        }
        let key = |set: &ParitySet| (address_of(pool), set.columns()[0]);
        let changes = |set: &ParitySet| pool.groups.get(set.columns()[0]).map(|it| it.changes);
        sets.retain(|(_, set)| self.differing.get(&key(set)).copied() != changes(set));
        // One that no server had room for comes last.
        let refused = self.refused.get(&address_of(pool)).map(|it| it.1);
        sets.sort_by_cached_key(|(number, set)| (refused == Some(*number), pool.live_bytes(set)));
        for (number, set) in sets {
            match verify_set(pool, cluster, &set) {
                Ok(()) => return pool.open_set(number),
                Err(Unmade::Differs(index, servers)) => self.note_difference(pool, index, &servers),
                Err(_) => {}
            }
        }
        false
    }

    /// True if servers had no room to open a set of the pool a moment ago.
    fn is_refused(&self, pool: &Arc<SlotPool>) -> bool {
        let refused = self.refused.get(&address_of(pool));
        refused.is_some_and(|(at, _)| at.elapsed() < REFUSED_PAUSE)
    }

    /// Seals groups of a pool that are to become a set, if there are some.
    fn make_in(&mut self, cluster: &Cluster, pool: &Arc<SlotPool>) -> bool {
        let Some(code) = pool.code() else {
            return false;
        };
        let cool = self.cool_groups(cluster, pool);
        let mut servers: Vec<u8> = (0..pool.servers().len() as u8)
            .filter(|&server| pool.first_number(server) == server && pool.may_grant(server))
            .collect();
        if servers.len() < code.extents() {
            if cool.len() >= usize::from(code.data) {
                self.tell_of_few(code, servers.len());
            }
            return false;
        }
        self.told_few = false;
        let pool_at = address_of(pool);
        let mut alike = cool.chunk_by(|a, b| a.1.bytes == b.1.bytes);
        let found = alike.find_map(|alike| {
            let bytes = alike[0].1.bytes;
            // Parity and homes go where most extents are kept, so that copies go back where such
            // are lacking; else parity goes where this pool has the least.
            servers.sort_by_key(|&server| {
                let is_distrusted = self.distrusted.contains(&(pool_at, server));
                let spares = Reverse(pool.spares_on(server, bytes));
                (is_distrusted, spares, pool.copied_bytes_on(server))
            });
            SealedSet::choose(pool, code, alike, &servers)
        });
        let Some(sealed) = found else {
            return false;
        };
        for (at, (index, ..)) in sealed.columns.iter().enumerate() {
            if !pool.seal(*index) {
                sealed.give_up(at);
                return true;
            }
        }
        self.finish(cluster, sealed)
    }

    /// Returns the groups that may get parity, those of one length in a row.
    fn cool_groups(&self, cluster: &Cluster, pool: &Arc<SlotPool>) -> Vec<(u32, ExtentGroup)> {
        let is_whole = |group: &ExtentGroup| {
            let is_there = |(_, member): (u8, Member)| pool.may_grant(member.server);
            !group.lacks_copies() && group.members().all(is_there) && group.column.is_none()
        };
        let groups = (0..).zip(pool.groups.all());
        let mut cool: Vec<(u32, ExtentGroup)> = groups
            .filter_map(|(index, group)| Some((index, group.filter(is_whole)?)))
            .filter(|(index, group)| {
                let key = (address_of(pool), *index);
                let quiet = self.quiet.get(&key);
                // Where servers are full, what goes back now opens another set.
                let cool_after = match self.is_refused(pool) {
                    true => Duration::ZERO,
                    false => cluster.seal_after,
                };
                let is_cool = quiet.is_some_and(|(_, it)| it.elapsed() >= cool_after);
                let is_full = pool.use_of(*index).is_some_and(|it| {
                    it.is_settled && it.used_bytes > 0 && it.free_bytes <= group.bytes / HOLES_PART
                });
                is_cool && is_full && self.differing.get(&key) != Some(&group.changes)
            })
            .collect();
        cool.sort_by_key(|(_, group)| group.bytes);
        cool
    }

    /// Makes a set of sealed groups, once nothing can land there any more. True if a step was
    /// taken.
    fn finish(&mut self, cluster: &Cluster, sealed: SealedSet) -> bool {
        let is_settled = |index: &u32| {
            let used = sealed.pool.use_of(*index);
            used.is_some_and(|used| used.is_settled)
        };
        let are_settled = sealed.columns.iter().all(|(index, ..)| is_settled(index));
        // Looked at behind that: the last write that was waited for may have missed a copy.
        if !sealed.is_whole() {
            sealed.give_up(usize::MAX);
            return true;
        }
        if !are_settled {
            self.sealed = Some(sealed);
            return false;
        }
        let mut mover = Mover::new(&sealed.pool);
        let made = sealed.make(cluster, &mut mover);
        if let Err(unmade) = &made {
            let is_damaged = |server| matches!(unmade, Unmade::Damaged(it) if *it == server);
            sealed.end_parity(|extent| mover.may_land_in(extent) || is_damaged(extent.0));
        }
        sealed.unseal(usize::MAX);
        match made {
            Ok(()) => {
                // What went back is room for the opening of another.
                self.refused.remove(&address_of(&sealed.pool));
                true
            }
            Err(Unmade::Later) => false,
            Err(Unmade::Differs(index, servers)) => {
                self.note_difference(&sealed.pool, index, &servers);
                true
            }
            Err(Unmade::Damaged(server)) => {
                let key = (address_of(&sealed.pool), server);
                let is_news = self.distrusted.insert(key);
                if is_news {
                    let endpoint = sealed.pool.endpoint(server);
                    later(move || {
                        tracing::warn!(
                            %endpoint,
                            "parity came back damaged from a memory server: it is written to others; check the server's memory"
                        );
                    });
                }
                sealed.pool.count_differing();
                is_news
            }
        }
    }

    /// Notes that a server has damaged bytes of a group, or of the group's set, and logs that once.
    fn note_difference(&mut self, pool: &Arc<SlotPool>, index: u32, servers: &[u8]) {
        let changes = pool.groups.get(index).map_or(0, |group| group.changes);
        let key = (address_of(pool), index);
        if self.differing.insert(key, changes).is_some() {
            return;
        }
        pool.count_differing();
        let names = servers.iter().map(|&it| pool.endpoint(it).to_string());
        let servers = names.collect::<Vec<_>>().join(" and ");
        later(move || {
            tracing::warn!(
                servers,
                "memory servers disagree about pages, so that one has damaged bytes: each page is read as its hash confirms; check the servers' memory"
            );
        });
    }

    /// Logs that pages keep their copies for want of servers, unless it has been said.
    fn tell_of_few(&mut self, code: ParityCode, servers: usize) {
        if !std::mem::replace(&mut self.told_few, true) {
            let (needed, copies) = (code.extents(), code.parity + 1);
            later(move || {
                tracing::warn!(
                    servers,
                    needed,
                    "too few memory servers for parity: pages keep {copies} copies each; add servers"
                );
            });
        }
    }
}

impl Drop for SetMaker {
    fn drop(&mut self) {
        if let Some(sealed) = self.sealed.take() {
            sealed.give_up(usize::MAX);
        }
    }
}

impl SealedSet {
    /// Chooses groups out of `alike`, whose homes are on different servers, and gets extents for
    /// the parity on other servers: on those first that come first in `servers`.
    fn choose(
        pool: &Arc<SlotPool>,
        code: ParityCode,
        alike: &[(u32, ExtentGroup)],
        servers: &[u8],
    ) -> Option<Self> {
        let bytes = alike[0].1.bytes;
        (0..servers.len()).find_map(|first| {
            let mut turned = servers.to_vec();
            turned.rotate_left(first);
            let (parity_on, homes) = turned.split_at(usize::from(code.parity));
            let columns = choose_columns(pool, code, alike, homes)?;
            let mut parity = Vec::new();
            for &server in parity_on {
                let granted = pool.grant_copy(server, bytes).map(|extent| extent.id);
                let found = granted.ok().or_else(|| pool.take_spare(server, bytes));
                parity.extend(found.map(|id| (server, id)));
            }
            let is_there = parity.len() == parity_on.len();
            let chosen = Self {
                pool: pool.clone(),
                code,
                columns,
                parity,
                since: Instant::now(),
            };
            if !is_there {
                chosen.return_parity();
            }
            is_there.then_some(chosen)
        })
    }

    /// Gives up the set, of which the first `count` groups are sealed. Nothing is under way to its
    /// parity extents.
    fn give_up(&self, count: usize) {
        self.return_parity();
        self.unseal(count);
    }

    fn return_parity(&self) {
        self.end_parity(|_| false);
    }

    /// Gives up the parity extents: they are kept or go back. One that is `unfit` to be kept, since
    /// something may still land there or it came back damaged, only goes back.
    fn end_parity(&self, unfit: impl Fn((u8, ExtentId)) -> bool) {
        for &(server, id) in &self.parity {
            match unfit((server, id)) {
                true => self.pool.renew_spare(server, id, self.bytes()),
                false => self.pool.return_spare(server, id, self.bytes()),
            }
        }
    }

    /// Puts the first `count` groups back into use.
    fn unseal(&self, count: usize) {
        for (index, ..) in self.columns.iter().take(count) {
            self.pool.unseal(*index);
        }
    }

    /// True if all groups are there, with all of their copies.
    fn is_whole(&self) -> bool {
        self.columns.iter().all(|(index, before, _)| {
            let now = self.pool.groups.get(*index);
            now.is_some_and(|now| now.has_extents_of(before) && !now.lacks_copies())
        })
    }

    /// Makes the set of settled groups.
    fn make(&self, cluster: &Cluster, mover: &mut Mover) -> Result<(), Unmade> {
        let before = self.allocated();
        self.compute(cluster, mover)?;
        let (columns, parity) = (self.homes(), self.parity.as_slice());
        let is_right = are_consistent(
            &self.pool,
            cluster,
            self.code,
            &columns,
            parity,
            self.bytes(),
        )?;
        if !is_right {
            let servers = columns.iter().chain(parity).map(|it| it.0);
            return Err(Unmade::Differs(self.columns[0].0, servers.collect()));
        }
        // A server may have failed meanwhile: its part of the set would be missing from the start.
        let mut extents = columns.iter().chain(parity);
        let are_there = extents.all(|(server, _)| self.pool.is_usable(*server));
        let now = self.allocated();
        let are_sealed = now == before && now.iter().all(Option::is_some);
        let is_made =
            are_there && are_sealed && (self.pool).make_set(self.code, &self.columns, &self.parity);
        is_made.then_some(()).ok_or(Unmade::Later)
    }

    /// Returns the number of slots that were ever allocated in each group. `None` for one that is
    /// not sealed and at rest.
    fn allocated(&self) -> Vec<Option<u32>> {
        let allocated = |index| {
            let used = self.pool.use_of(index)?;
            (used.is_sealed && used.is_settled).then_some(used.allocated)
        };
        let columns = self.columns.iter();
        columns.map(|(index, ..)| allocated(*index)).collect()
    }

    /// Returns server and extent of each member that stays.
    fn homes(&self) -> Vec<(u8, ExtentId)> {
        let homes = self.columns.iter().map(|(_, group, home)| {
            let home = group.member(*home);
            let home = home.expect("a whole group has all members");
            (home.server, home.id)
        });
        homes.collect()
    }

    /// Returns the length of each extent.
    fn bytes(&self) -> u64 {
        self.columns[0].1.bytes
    }

    /// Compares the copies, and writes the parity and reads it back.
    fn compute(&self, cluster: &Cluster, mover: &mut Mover) -> Result<(), Unmade> {
        let mut pace = pace_of(&self.pool, cluster);
        let used: Vec<_> = (self.columns.iter())
            .map(|(index, ..)| self.pool.pieces_at_rest(*index).ok_or(Unmade::Later))
            .collect::<Result<_, _>>()?;
        for (offset, len) in pieces_of(self.bytes()) {
            let mut sums = Vec::new();
            for (server, _) in &self.parity {
                let mut sum = mover.buffer(len).map_err(|error| (*server, error))?;
                sum.as_mut().fill(0);
                sums.push(sum);
            }
            for ((number, (index, group, home)), used) in (0..).zip(&self.columns).zip(&used) {
                let extent = |member: Member| (member.server, member.id);
                let stays = group.member(*home).expect("a whole group has all members");
                let bytes = mover.read_piece(extent(stays), offset, len)?;
                for (at, other) in group.members().filter(|(at, _)| at != home) {
                    let copy = mover.read_piece(extent(other), offset, len)?;
                    if !are_same(used, offset, bytes.as_ref(), copy.as_ref()) {
                        let servers = [*home, at].map(|at| group.member(at).map(|it| it.server));
                        let servers = servers.into_iter().flatten().collect();
                        return Err(Unmade::Differs(*index, servers));
                    }
                    pace.moved(len as u64);
                }
                for (at, sum) in (self.code.data..).zip(&mut sums) {
                    let coefficient = self.code.coefficient(at, number);
                    add_product(sum.as_mut(), bytes.as_ref(), coefficient);
                }
                pace.moved(len as u64);
            }
            for (&extent, sum) in self.parity.iter().zip(sums) {
                let sum = mover.write_piece(extent, offset, sum)?;
                let back = mover.read_piece(extent, offset, len)?;
                if back.as_ref() != sum.as_ref() {
                    return Err(Unmade::Damaged(extent.0));
                }
                pace.moved(2 * len as u64);
            }
        }
        Ok(())
    }
}

/// Returns the pace at which sets are read: none while a write waits for room.
fn pace_of(pool: &SlotPool, cluster: &Cluster) -> Pace {
    Pace::new(cluster.repair_rate.filter(|_| !pool.is_room_awaited()))
}

/// Compares the parity of a set with that of its columns.
fn verify_set(pool: &SlotPool, cluster: &Cluster, set: &ParitySet) -> Result<(), Unmade> {
    let first = set.columns()[0];
    let view = pool.groups.set_of(first).ok_or(Unmade::Later)?;
    let homes: Vec<(u8, ExtentId)> = (view.homes())
        .filter(|it| it.state == MemberState::Good && pool.is_usable(it.server))
        .map(|it| (it.server, it.id))
        .collect();
    let group = pool.groups.get(first).ok_or(Unmade::Later)?;
    if homes.len() < set.code.extents() {
        return Err(Unmade::Later);
    }
    let (columns, parity) = homes.split_at(usize::from(set.code.data));
    match are_consistent(pool, cluster, set.code, columns, parity, group.bytes)? {
        true => Ok(()),
        false => {
            let servers = homes.iter().map(|it| it.0).collect();
            Err(Unmade::Differs(first, servers))
        }
    }
}

/// True if `parity` extents of `bytes` bytes are those of `columns`, holes included.
fn are_consistent(
    pool: &SlotPool,
    cluster: &Cluster,
    code: ParityCode,
    columns: &[(u8, ExtentId)],
    parity: &[(u8, ExtentId)],
    bytes: u64,
) -> Result<bool, Unmade> {
    let mut mover = Mover::new(pool);
    let mut pace = pace_of(pool, cluster);
    for (offset, len) in pieces_of(bytes) {
        let mut sums = Vec::new();
        for &extent in parity {
            sums.push(mover.read_piece(extent, offset, len)?);
        }
        for (number, &column) in (0..).zip(columns) {
            let bytes = mover.read_piece(column, offset, len)?;
            for (at, sum) in (code.data..).zip(&mut sums) {
                let coefficient = code.coefficient(at, number);
                add_product(sum.as_mut(), bytes.as_ref(), coefficient);
            }
        }
        // The parity minus itself.
        if sums
            .iter()
            .any(|sum| sum.as_ref().iter().any(|&byte| byte != 0))
        {
            return Ok(false);
        }
        pace.moved(((columns.len() + parity.len()) * len) as u64);
    }
    Ok(true)
}

/// True if two pieces at `offset` of an extent are the same where the extent is in use.
fn are_same(used: &[(u64, u64)], offset: u64, one: &[u8], other: &[u8]) -> bool {
    let end = offset + one.len() as u64;
    used.iter().all(|&(start, len)| {
        let (from, to) = (start.max(offset), (start + len).min(end));
        let range = || (from - offset) as usize..(to - offset) as usize;
        from >= to || one[range()] == other[range()]
    })
}
