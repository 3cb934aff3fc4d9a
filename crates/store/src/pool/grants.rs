//! Requests of a [`SlotPool`] to servers for memory: what regions reserve, and growth.
//!
//! The rule it keeps: a request that fails takes nothing.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_fabric::{AllocError, ControlError};

use super::{EXTENT_BYTES_MAX, Growth, PoolReservation, SlotPool};
use crate::{groups::ExtentGroup, slots::GRANULE_BYTES};

/// Longest extent of a pool with copies, so that a lost copy of one is soon made again.
const GROUP_BYTES_MAX: u64 = 64 << 20;
/// Shortest extent that a pool with copies asks for, if servers have it. Less than without copies,
/// since each is taken from several servers.
const GROUP_BYTES_MIN: u64 = 4 << 20;
/// Longest extent of a pool with parity, so that a set is soon made, and opened.
const COLUMN_BYTES_MAX: u64 = 16 << 20;
/// Part of a region that an extent with parity has at most. Extents of a set have one length, and
/// those that are left over have no parity.
const COLUMN_PART: u64 = 256;
/// Length below which room for copies is not looked for in shorter extents.
const PIECE_BYTES_MIN: u64 = 1 << 20;
/// Shortest extent that a shared pool asks for, if the server has it: many small regions then share
/// few extents. Servers back extents lazily.
const EXTENT_BYTES_MIN: u64 = 16 << 20;
/// Time for which a full server is not asked again.
const FULL_PAUSE: Duration = Duration::from_millis(50);

impl SlotPool {
    /// Promises `bytes` in units of at least a page, spread over the servers. Takes nothing on an
    /// error.
    pub(crate) fn reserve(
        &self,
        bytes: u64,
        page_bytes: usize,
    ) -> Result<PoolReservation, AllocError> {
        let _one_at_a_time = self.growing.lock();
        let unit = GRANULE_BYTES.max(page_bytes as u64);
        if self.has_copies() {
            return self.reserve_copies(bytes.next_multiple_of(unit), unit);
        }
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

    /// Promises `bytes` of which each server of the pool may have the first copy. The room for
    /// copies may be in pieces on several servers: where long extents do not fit, shorter ones may.
    fn reserve_copies(&self, bytes: u64, unit: u64) -> Result<PoolReservation, AllocError> {
        let servers = self.servers.len();
        let first = self.next_server.fetch_add(1, Ordering::Relaxed);
        let mut promised = vec![0u64; servers];
        let mut most = match self.code() {
            Some(_) => column_bytes(bytes).max(unit),
            None => bytes.div_ceil(servers as u64).min(GROUP_BYTES_MAX),
        };
        let (mut left, mut turn) = (bytes, 0);
        while left > 0 {
            let piece = most.min(left).next_multiple_of(unit);
            let mut failure = None;
            let homes = (0..servers).map(|other| (first + turn + other) % servers);
            let found = homes.into_iter().find(|&home| {
                let promise = self.promise(home, piece, unit);
                promise.map_err(|error| failure = Some(error)).is_ok()
            });
            if let Some(home) = found {
                promised[home] += piece;
                left = left.saturating_sub(piece);
                turn += 1;
            } else if most > PIECE_BYTES_MIN {
                most /= 2;
            } else {
                self.take_back(&promised);
                self.release_surplus();
                return Err(failure.expect("a pool has servers, which refused"));
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
            self.follow_health();
            let arena = self.arenas[server].lock();
            let held_bytes = self.snapshots.held_bytes_on(server);
            // Bytes of lost extents are no room: regions that were promised them lack them, too.
            (arena.reserved_bytes + held_bytes + bytes).saturating_sub(arena.kept_bytes())
        };
        let mut granted = 0;
        while granted < lacking {
            let least = (lacking - granted).min(self.extent_bytes_max());
            let whole = self.copies;
            granted += match self.grant(server, least.next_multiple_of(unit), whole) {
                Err(full @ AllocError::Full { .. }) => return Err(in_all(full, lacking, granted)),
                other => other?,
            };
        }
        self.arenas[server].lock().reserved_bytes += bytes;
        Ok(())
    }

    /// Asks a server for an extent of at least `least` bytes, and other servers for its copies. At
    /// least `copies_min` are granted.
    fn grant(&self, server: usize, least: u64, copies_min: usize) -> Result<u64, AllocError> {
        let wish = match self.code() {
            // Lengths are powers of two, so that extents find others of their length for a set.
            Some(_) => least.max(self.extent_bytes_min(server)).next_power_of_two(),
            None => least.max(self.extent_bytes_min(server)),
        };
        let group = match self.grant_copies(server, wish, copies_min) {
            Err(AllocError::Full { .. }) if least < wish => {
                self.grant_copies(server, least, copies_min)?
            }
            other => other?,
        };
        if self.add_group(server as u8, group).is_none() {
            // The pool is closed, so nothing else would give the extents back.
            self.release_group(&group);
        }
        if group.lacks_copies() {
            self.health.changed();
        }
        Ok(group.bytes)
    }

    /// Asks for extents of `wish` bytes on different servers, with the home on `home`. Fewer copies
    /// than the pool's are granted only where so few servers answer, and at least `copies_min`.
    fn grant_copies(
        &self,
        home: usize,
        wish: u64,
        copies_min: usize,
    ) -> Result<ExtentGroup, AllocError> {
        if !self.may_grow_on(home as u8) {
            return Err(self.no_grant(home));
        }
        if !self.has_copies() {
            let extent = self.servers[home].1.grant(wish)?;
            return Ok(ExtentGroup::new(1, extent.bytes, [(home as u8, extent.id)]));
        }
        if !self.is_usable(home as u8) {
            return Err(self.no_grant(home));
        }
        // Copies go where this pool has the least.
        let mut others: Vec<usize> = (0..self.servers.len()).collect();
        others.retain(|&server| server != home);
        others.sort_by_key(|&server| self.copied_bytes[server].load(Ordering::Relaxed));
        let (mut granted, mut bytes) = (Vec::new(), u64::MAX);
        let (mut failure, mut silent) = (None, Vec::new());
        for server in std::iter::once(home).chain(others) {
            if granted.len() == self.copies {
                break;
            }
            if (granted.iter()).any(|&(other, _)| self.is_same(other, server as u8)) {
                continue;
            }
            if !self.is_usable(server as u8) || !self.may_grow_on(server as u8) {
                silent.push(server as u8);
                failure.get_or_insert_with(|| self.no_grant(server));
                continue;
            }
            match self.servers[server].1.grant(wish) {
                Ok(extent) => {
                    bytes = bytes.min(extent.bytes);
                    granted.push((server as u8, extent.id));
                }
                Err(error @ (AllocError::Full { .. } | AllocError::Read { .. })) => {
                    failure = Some(error);
                }
                // The server answers, and is about to end.
                Err(error @ AllocError::Control(ControlError::Refused { .. })) => {
                    silent.push(server as u8);
                    failure = Some(error);
                }
                Err(error) => {
                    self.health.failed(self.servers[server].0);
                    silent.push(server as u8);
                    failure = Some(error);
                }
            }
            if server == home && granted.is_empty() {
                break;
            }
        }
        let is_enough = granted.len() == self.copies
            || granted.len() >= copies_min && self.servers_without(&silent) < self.copies;
        if granted.is_empty() || !is_enough {
            for (server, id) in granted {
                self.release(server as usize, id);
            }
            return Err(failure.unwrap_or_else(|| self.no_grant(home)));
        }
        let group = ExtentGroup::new(self.copies, bytes, granted);
        for (_, member) in group.members() {
            self.count_copy(member.server, bytes);
        }
        Ok(group)
    }

    /// Returns the number of different servers, without the `silent` ones.
    fn servers_without(&self, silent: &[u8]) -> usize {
        let servers = 0..self.servers.len() as u8;
        let is_silent = |&one: &u8| silent.iter().any(|&other| self.is_same(one, other));
        let is_first = |&one: &u8| !(0..one).any(|before| self.is_same(before, one));
        servers.filter(|it| !is_silent(it) && is_first(it)).count()
    }

    /// Returns the reason why a server is not asked for memory.
    fn no_grant(&self, server: usize) -> AllocError {
        let reason = match self.is_leaving(server as u8) {
            true => "the server is being emptied; add a server",
            false => "the server does not answer; start it, or add a server",
        };
        AllocError::Control(ControlError::Disconnected {
            endpoint: self.endpoint(server as u8).to_string(),
            attempt: match self.copies {
                1 => "get memory".to_owned(),
                copies => format!("get memory for {copies} copies"),
            },
            reason: reason.to_owned(),
        })
    }

    /// Returns the most bytes that one extent has.
    fn extent_bytes_max(&self) -> u64 {
        match (self.code(), self.has_copies()) {
            (Some(_), _) => COLUMN_BYTES_MAX,
            (None, true) => GROUP_BYTES_MAX,
            (None, false) => EXTENT_BYTES_MAX,
        }
    }

    /// Returns the least length of the next extent, if the server has it. A pool of one region
    /// takes as much again as it has: a small region takes little, and a large one few extents.
    /// Extents beside a reservation have the reservation's length, so that any of them can stay
    /// when the others are given back.
    fn extent_bytes_min(&self, server: usize) -> u64 {
        if self.code().is_some() {
            return column_bytes(self.granted_bytes());
        }
        if !self.is_own() {
            return if self.has_copies() {
                GROUP_BYTES_MIN
            } else {
                EXTENT_BYTES_MIN
            };
        }
        let arena = self.arenas[server].lock();
        let has = match arena.reserved_bytes {
            0 => arena.granted_bytes,
            reserved => reserved,
        };
        has.min(EXTENT_BYTES_MIN)
    }

    /// Starts a thread that asks the servers for another extent that holds a slot of `bytes`: see
    /// [`grow`](Self::grow). Waits for nothing. For a caller that found no room after it had seen
    /// `grants` extents: if there are more by now, none is asked for, and the caller looks again.
    pub(crate) fn grow_elsewhere(self: &Arc<Self>, bytes: u32, grants: u64) -> Growth {
        let Some(refused) = self.growing.try_lock() else {
            return Growth::UnderWay(None);
        };
        if self.grants() != grants || self.await_room() {
            return Growth::UnderWay(None);
        }
        let said = match &*refused {
            Some((at, error)) if at.elapsed() < FULL_PAUSE => {
                self.await_any_room();
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
        let mut failure: Option<AllocError> = None;
        let servers = self.servers.len();
        let mut turns: Vec<usize> = (0..servers).map(|i| (first + i) % servers).collect();
        // Servers that leave come last, where they may grant at all.
        turns.sort_by_key(|&server| self.is_leaving(server as u8));
        for server in turns {
            match self.grant(server, least, 1) {
                Ok(_) => {
                    *refused = None;
                    // A region counts itself before it waits for this lock. So one that is not
                    // counted yet looks for surplus after us.
                    if self.ended() != ended {
                        self.release_surplus();
                    }
                    return Ok(());
                }
                // A full server may have room again. A refusal to ask another says nothing of room.
                Err(AllocError::Control(_)) if failure.is_some() => {}
                Err(error) => failure = Some(error),
            }
        }
        let full = failure.expect("a pool has at least one server");
        let room = self
            .readers()
            .map(|readers| readers.make_room(full.clone(), |server| self.is_written(server)));
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

/// Returns the length of the extents of a pool with parity that has, or is to have, `bytes` bytes.
fn column_bytes(bytes: u64) -> u64 {
    let part = (bytes / COLUMN_PART).clamp(GRANULE_BYTES, COLUMN_BYTES_MAX);
    1 << part.ilog2()
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
