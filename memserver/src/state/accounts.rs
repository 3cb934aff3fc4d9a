//! [`Limits`] of a server, and [`Accounts`]: usage of them, in all and by origin.
//!
//! The rule it keeps: a charge is taken off the origin that it was put on, and no origin is charged
//! more than [`Limits`] allow, except where existing memory changes hands.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use farpage_fabric::{
    Limit,
    host::{Origin, Refusal},
};

use farpage_wire::PublicKey;

/// Unit of charges: an extent takes whole pages of the server's memory. A name takes one beside its
/// manifest: more than its entry, so that the capacity bounds the table of names.
const PAGE_BYTES: u64 = 4096;

/// The most that a server may give away, and the times after which it takes memory back.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most bytes granted at any time, manifests of named regions included.
    pub capacity_bytes: u64,
    /// The most bytes granted to clients of one address, or over shared memory of one user,
    /// together.
    pub capacity_per_address: u64,
    /// Time after which a silent session ends.
    pub lease: Duration,
    /// Time for a session to come back after its connection closed without a goodbye. The session
    /// ends afterwards; over shared memory at once.
    pub reconnect_grace: Duration,
    /// The most extents that one session may hold: each costs the server a descriptor and a
    /// mapping.
    pub extents_per_session: usize,
    /// The most extents altogether.
    pub extents: usize,
    /// The most extents of clients of one address, or over shared memory of one user, together.
    pub extents_per_address: usize,
    /// The most sessions at once.
    pub sessions: usize,
    /// Keys whose holders may list and remove all names.
    pub operators: Vec<PublicKey>,
}

impl Limits {
    /// Returns the shorter of the times after which sessions end.
    pub fn shortest(&self) -> Duration {
        self.lease.min(self.reconnect_grace)
    }
}

#[derive(Default)]
pub(super) struct Accounts {
    all: Usage,
    by_origin: HashMap<Origin, Usage>,
}

/// Usage by all clients, or by those of one origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) sessions: usize,
    pub(super) extents: usize,
    pub(super) bytes: u64,
}

impl Accounts {
    pub(super) fn all(&self) -> Usage {
        self.all
    }

    pub(super) fn of(&self, origin: Origin) -> Usage {
        self.by_origin.get(&origin).copied().unwrap_or_default()
    }

    /// Counts a session of `origin`, or refuses it.
    pub(super) fn begin_session(&mut self, limits: &Limits, origin: Origin) -> Result<(), Refusal> {
        if self.all.sessions >= limits.sessions {
            return Err(Refusal::Invalid(format!(
                "{} clients are connected, which is this server's limit",
                limits.sessions
            )));
        }
        let sessions = self.of(origin).sessions;
        if sessions >= most_of_one(limits.sessions) {
            return Err(Refusal::Invalid(format!(
                "{sessions} clients from this address are connected, the most that one address may have here"
            )));
        }
        self.change(origin, |usage| usage.sessions += 1);
        Ok(())
    }

    /// Counts a session of `origin` that began at an earlier process.
    pub(super) fn put_session_on(&mut self, origin: Origin) {
        self.change(origin, |usage| usage.sessions += 1);
    }

    pub(super) fn end_session(&mut self, origin: Origin) {
        self.change(origin, |usage| usage.sessions -= 1);
    }

    /// Counts an extent of `bytes` bytes, or refuses it and names the limit.
    pub(super) fn lend(
        &mut self,
        limits: &Limits,
        origin: Origin,
        bytes: u64,
    ) -> Result<(), Refusal> {
        self.may_exist(limits)?;
        self.may_have(limits, origin, 1)?;
        check(charge_of(bytes), bytes, self.available(limits, origin))?;
        self.put_extent_on(origin, bytes);
        Ok(())
    }

    /// True if an extent of `bytes` bytes more would be lent.
    pub(super) fn has_room(&self, limits: &Limits, origin: Origin, bytes: u64) -> bool {
        self.all.extents < limits.extents
            && self.of(origin).extents < limits.extents_per_address
            && charge_of(bytes) <= self.available(limits, origin).0
    }

    /// Counts an extent of `bytes` bytes that `origin` keeps although it was replaced by a copy, or
    /// refuses it at the server's limits. The limits of one origin do not matter: `origin` had the
    /// extent before.
    pub(super) fn keep(
        &mut self,
        limits: &Limits,
        origin: Origin,
        bytes: u64,
    ) -> Result<(), Refusal> {
        self.may_exist(limits)?;
        check(charge_of(bytes), bytes, self.left(limits))?;
        self.put_extent_on(origin, bytes);
        Ok(())
    }

    /// Checks that there may be one extent more.
    fn may_exist(&self, limits: &Limits) -> Result<(), Refusal> {
        match self.all.extents < limits.extents {
            true => Ok(()),
            false => Err(Refusal::Invalid(format!(
                "this server holds {} extents, its most: make fewer and larger arrays, or raise its limit of open files",
                limits.extents
            ))),
        }
    }

    /// Checks that `origin` may have `more` extents more. Zero more are always allowed, even where
    /// `origin` has too many already.
    fn may_have(&self, limits: &Limits, origin: Origin, more: usize) -> Result<(), Refusal> {
        let extents = self.of(origin).extents;
        match more > 0 && extents + more > limits.extents_per_address {
            false => Ok(()),
            true => Err(Refusal::Invalid(format!(
                "clients from this address hold {extents} extents, and {} are the most that one address may have here (--extents-per-address): close some arrays, or make fewer and larger ones",
                limits.extents_per_address
            ))),
        }
    }

    /// Checks that existing extents may be put on another origin.
    pub(super) fn may_take_over(
        &self,
        limits: &Limits,
        origin: Origin,
        extents: usize,
        asked: u64,
    ) -> Result<(), Refusal> {
        self.may_have(limits, origin, extents)?;
        check(asked, asked, self.left_to(limits, origin))
    }

    pub(super) fn put_extent_on(&mut self, origin: Origin, bytes: u64) {
        self.change(origin, |usage| {
            usage.extents += 1;
            usage.bytes += charge_of(bytes);
        });
    }

    pub(super) fn take_extent_off(&mut self, origin: Origin, bytes: u64) {
        self.change(origin, |usage| {
            usage.extents -= 1;
            usage.bytes -= charge_of(bytes);
        });
    }

    /// Charges `asked` bytes to `origin`, or refuses and says how much is available.
    pub(super) fn charge(
        &mut self,
        limits: &Limits,
        origin: Origin,
        asked: u64,
    ) -> Result<(), Refusal> {
        check(asked, asked, self.available(limits, origin))?;
        self.put_on(origin, asked);
        Ok(())
    }

    pub(super) fn put_on(&mut self, origin: Origin, bytes: u64) {
        self.change(origin, |usage| usage.bytes += bytes);
    }

    pub(super) fn take_off(&mut self, origin: Origin, bytes: u64) {
        self.change(origin, |usage| usage.bytes -= bytes);
    }

    /// Returns the bytes that `origin` could still be lent, and the limit that allows no more.
    fn available(&self, limits: &Limits, origin: Origin) -> (u64, Limit) {
        let (of_all, of_its) = (self.left(limits), self.left_to(limits, origin));
        if of_its.0 < of_all.0 { of_its } else { of_all }
    }

    /// Returns the bytes left of the capacity.
    fn left(&self, limits: &Limits) -> (u64, Limit) {
        let most = limits.capacity_bytes;
        let left = most.saturating_sub(self.all.bytes);
        (left, Limit::Capacity(most))
    }

    /// Returns the bytes left of the most that one origin may have.
    fn left_to(&self, limits: &Limits, origin: Origin) -> (u64, Limit) {
        let most = limits.capacity_per_address;
        let left = most.saturating_sub(self.of(origin).bytes);
        (left, Limit::PerAddress(most))
    }

    /// Applies `change` to the sums and to `origin`. An origin without usage is forgotten.
    fn change(&mut self, origin: Origin, change: impl Fn(&mut Usage)) {
        change(&mut self.all);
        let usage = self.by_origin.entry(origin).or_default();
        change(usage);
        if *usage == Usage::default()
            && let Entry::Occupied(entry) = self.by_origin.entry(origin)
        {
            entry.remove();
        }
    }

    #[cfg(test)]
    pub(super) fn sum(&self) -> Usage {
        (self.by_origin.values()).fold(Usage::default(), |sum, usage| Usage {
            sessions: sum.sessions + usage.sessions,
            extents: sum.extents + usage.extents,
            bytes: sum.bytes + usage.bytes,
        })
    }
}

/// Refuses a request for `asked` bytes if its `charge` exceeds the available bytes.
fn check(charge: u64, asked: u64, (available, limit): (u64, Limit)) -> Result<(), Refusal> {
    match charge > available {
        false => Ok(()),
        true => Err(Refusal::Full {
            asked,
            available,
            limit,
        }),
    }
}

/// Returns how many of `all` one address may have: a quarter is left to others.
fn most_of_one(all: usize) -> usize {
    (all * 3 / 4).max(1)
}

/// Returns the charge of an extent of `bytes` bytes.
pub(super) fn charge_of(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(PAGE_BYTES)
        .unwrap_or(u64::MAX)
}

/// Returns the charge of a name with a manifest of `manifest_bytes`, beside its extents.
pub(super) fn charge_of_name(manifest_bytes: usize) -> u64 {
    PAGE_BYTES + manifest_bytes as u64
}
