//! Publication and removal of names, in memory and on the disk.
//!
//! The rule it keeps: the disk is written while the ledger is unlocked. Meanwhile the name
//! [is being written](super::records::NameRecord::is_writing), changes neither its holder nor its
//! version, and all extents that it has before or afterwards are pinned. A publication that the
//! disk refuses changes nothing.
//!
//! On a server that writes soon, a publication is bound in memory first, and its
//! [job](super::jobs) follows. The next publication of the name waits for the job: the bytes that
//! the job reads stay as they are until then, and so do the places that the version on the disk
//! uses.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Asker, Bound, Proposal, Refusal},
    log::later,
};
use farpage_wire::{
    Durability, ExtentId, ExtentRange, Persistence, PublicKey, SessionId,
    register::{Epoch, Register},
};
use parking_lot::MutexGuard;
use tracing::{debug, info};

use super::{
    State,
    accounts::charge_of_name,
    ledger::Ledger,
    records::{Freed, Job, NameId, NameRecord},
};
use crate::durable::{Binding, BoundExtent, Damage, DurableNames, Written, name_file};

/// The longest wait for a name that is being written: less than clients wait for an answer.
const WRITTEN: Duration = Duration::from_secs(5);
/// The longest wait of a request to persist: the client asks again.
const LATER: Duration = Duration::from_secs(1);
/// The most bytes of one request to persist: more would take a slow disk longer than clients wait.
const PERSIST_BYTES_MAX: u64 = 256 << 20;

impl State {
    /// Puts bytes of the session's extents on the disk, for the next publication of a name that the
    /// session may publish.
    pub(super) fn persist_ranges(
        &self,
        session: SessionId,
        name: &str,
        ranges: &[ExtentRange],
        wait: bool,
    ) -> Result<bool, Refusal> {
        let durable = self.disk()?;
        durable.check().map_err(Refusal::Invalid)?;
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        // 1. The last publication, which others are not to write again.
        if ledger.names.get(&id).is_some_and(|it| it.failed.is_some()) {
            ledger.may_bind(session, &id)?;
        }
        if !self.settle_job(&mut ledger, &id, Instant::now() + LATER)? {
            return Ok(false);
        }
        // 2. Everything that can be refused.
        ledger.may_bind(session, &id)?;
        let known = ledger.known(session)?;
        let not_leased = |range: &&ExtentRange| !known.extents.contains(&range.extent);
        if let Some(range) = ranges.iter().find(not_leased) {
            return Err(Refusal::NotLeased(range.extent));
        }
        let is_outside = |range: &&ExtentRange| {
            let end = range.offset.checked_add(range.bytes);
            let bytes = ledger.extents[&range.extent].memory.bytes();
            range.bytes == 0 || end.is_none_or(|end| end > bytes)
        };
        if let Some(range) = ranges.iter().find(is_outside) {
            return Err(Refusal::Invalid(format!(
                "extent {} has no {} bytes at {}",
                range.extent, range.bytes, range.offset
            )));
        }
        let sum = |sum: u64, range: &ExtentRange| sum.saturating_add(range.bytes);
        let bytes = ranges.iter().fold(0, sum);
        if bytes > PERSIST_BYTES_MAX {
            return Err(Refusal::Invalid(format!(
                "{bytes} bytes are more than the {PERSIST_BYTES_MAX} that one request may write to the disk"
            )));
        }
        // 3. The bytes: now, or with the publication. What replaces damaged files is on the disk
        //    before they are removed.
        let record = ledger.names.get(&id);
        let is_damaged = record.is_some_and(|it| it.damage.is_some());
        let is_for_later = !wait
            && durable.when() == Persistence::Soon
            && !is_damaged
            && ledger.damaged_twin(&id).is_none();
        if is_for_later && ledger.keep_for_later(session, &id, ranges) {
            return Ok(true);
        }
        let bytes = ledger.written(ranges);
        let written = self.in_disk(&mut ledger, session, || durable.write(&bytes));
        let ids = bytes.iter().map(|it| it.memory.id());
        let gone: Vec<_> = ids.filter(|id| !ledger.extents.contains_key(id)).collect();
        drop(ledger);
        durable.forget(gone);
        written.map(|()| true).map_err(Refusal::Invalid)
    }

    /// Promises to accept no binding from a writer before `epoch`, of a name that the session
    /// holds. The promise lasts as long as the binding: it is on the disk with it.
    pub(super) fn promise_name(
        &self,
        session: SessionId,
        name: &str,
        epoch: Epoch,
    ) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        if !self.settle_job(&mut ledger, &id, Instant::now() + WRITTEN)? {
            return Err(still_written());
        }
        let record = ledger.names.get(&id).ok_or(Refusal::NotFound)?;
        if record.holder != Some(session) {
            return Err(Refusal::InUse);
        }
        let mut register = record.register.clone();
        (register.promise(epoch)).map_err(|_| Refusal::Outdated)?;
        if let (Some(durable), Some(manifest), None) =
            (&self.durable, &record.manifest, &record.damage)
        {
            let binding = Binding {
                server: Some(ledger.id),
                version: record.version,
                origin: record.origin,
                manifest: manifest.to_vec(),
                extents: ledger.bound(&record.extents.iter().copied().collect()),
                register: register.clone(),
            };
            let pinned = ledger.begin_writing(&id, &HashSet::new());
            let write = || durable.bind(id.owner, &id.name, &binding);
            let written = self.in_disk(&mut ledger, session, write);
            if written.is_ok() {
                ledger.name(&id).register = register;
            }
            self.end_writing(ledger, &id, &pinned);
            return written.map_err(Refusal::Invalid);
        }
        ledger.name(&id).register = register;
        Ok(())
    }

    /// Binds a name to a manifest and extents of the session. Where other servers have to bind the
    /// name, too, extents of the version before stay.
    pub(super) fn bind_name(
        &self,
        session: SessionId,
        name: &str,
        proposal: Proposal<'_>,
    ) -> Result<Bound, Refusal> {
        let charge = charge_of_name(proposal.manifest.len());
        self.reclaim(session, charge);
        let mut ledger = self.ledger.lock();
        // 1. Everything that can be refused, before anything changes: the old binding stays whole.
        let id = ledger.name_of(session, name)?;
        self.wait_name(&mut ledger, &id)?;
        ledger.may_bind(session, &id)?;
        if !self.settle_job(&mut ledger, &id, Instant::now() + WRITTEN)? {
            return Err(still_written());
        }
        let before = ledger.names.get(&id);
        let mut register = before.map_or_else(Register::default, |it| it.register.clone());
        let bound = before.and_then(|it| it.manifest.as_ref());
        let stays = proposal.decide(&mut register, bound.is_some())?;
        let manifest = match bound.filter(|_| stays) {
            // The binding keeps extents for one that is to be accepted.
            Some(bound) => bound.to_vec(),
            None => proposal.manifest,
        };
        let charge = charge_of_name(manifest.len());
        let twin = ledger.damaged_twin(&id);
        if let Some(twin) = &twin {
            // The holder of the name has claimed it in order to replace what is there.
            if !ledger.names.contains_key(&id) {
                return Err(ledger.is_damaged(twin));
            }
            if ledger.name(twin).is_writing {
                return Err(Refusal::Invalid(
                    "the damaged region of this name is being removed: try again".to_owned(),
                ));
            }
        }
        let mut extents = ledger.may_publish(session, &id, proposal.extents)?;
        let named = extents.len();
        if let Some(record) = ledger.names.get(&id).filter(|_| proposal.keeps) {
            extents.extend(&record.extents);
        }
        let keeps_more = extents.len() > named;
        let origin = ledger.sessions[&session].origin;
        let mut is_new = false;
        if let Some(durable) = &self.durable {
            durable.check().map_err(Refusal::Invalid)?;
            is_new = !ledger.names.contains_key(&id);
        }
        if is_new {
            ledger.hold_new(&self.limits, session, &id)?;
        }
        let old = ledger.charge_of(&id);
        let accounts = &mut ledger.accounts;
        old.inspect(|(origin, bytes)| accounts.take_off(*origin, *bytes));
        let charged = accounts.charge(&self.limits, origin, charge);
        // The old version is charged until it is replaced.
        old.inspect(|(origin, bytes)| accounts.put_on(*origin, *bytes));
        if let Err(full) = charged {
            if is_new {
                ledger.settle(&id);
            }
            return Err(full);
        }
        // 2. The disk.
        let version = ledger.readings.next_version();
        let (mut job, mut pinned) = (None, HashSet::new());
        if let Some(durable) = &self.durable {
            let binding = Binding {
                server: Some(ledger.id),
                version,
                origin,
                manifest: manifest.clone(),
                extents: ledger.bound(&extents),
                register: register.clone(),
            };
            let ranges = std::mem::take(&mut ledger.name(&id).unwritten);
            let mut used = extents.clone();
            used.extend(ledger.present(&ranges));
            pinned = ledger.begin_writing(&id, &used);
            if ranges.is_empty() {
                if let Some(twin) = &twin {
                    ledger.name(twin).is_writing = true;
                }
                let bind = || durable.bind(id.owner, &id.name, &binding);
                let bound = self.in_disk(&mut ledger, session, bind);
                if let Some(twin) = &twin {
                    ledger.stop_writing(twin);
                }
                if let Err(reason) = bound {
                    ledger.accounts.take_off(origin, charge);
                    ledger.name(&id).is_unsettled |= is_new;
                    self.end_writing(ledger, &id, &pinned);
                    return Err(Refusal::Invalid(reason));
                }
                ledger.name(&id).on_disk = version;
            } else {
                job = Some(Job {
                    id: id.clone(),
                    binding,
                    ranges,
                    pinned: pinned.clone(),
                    is_retry: false,
                });
            }
        }
        // 3. The new binding, and the memory that only the old one kept.
        let old = ledger.charge_of(&id);
        old.inspect(|(origin, bytes)| ledger.accounts.take_off(*origin, *bytes));
        let damage = ledger.names.get_mut(&id).and_then(|it| it.damage.take());
        let damage = damage.map(|damage| Damage {
            extents: ledger.unclaimed(&damage.extents),
            ..damage
        });
        // The twin's file is this name's now.
        twin.inspect(|twin| ledger.forget_damaged(twin));
        let (count, manifest) = (extents.len(), Arc::new(manifest));
        let publisher = (session, origin);
        let value = (version, manifest, register);
        let freed = ledger.bind(publisher, id.clone(), value, &extents);
        let versions = ledger.versions(&id);
        match job {
            None if self.durable.is_some() => self.end_writing(ledger, &id, &pinned),
            _ => drop(ledger),
        }
        self.give_back(freed);
        self.forget_damaged(&id, damage);
        if let Some(job) = job {
            self.follow_up(job);
        }
        let name = name.to_owned();
        later(move || debug!(%session, name, extents = count, "named region published"));
        Ok(Bound {
            versions,
            keeps_more,
        })
    }

    /// Forgets a name, and frees its memory except what is still read.
    pub(super) fn remove_name(
        &self,
        asker: Asker,
        name: &str,
        owner: Option<PublicKey>,
    ) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let key = ledger.key_of(asker)?;
        let owner = owner.unwrap_or(key);
        if owner != key && !self.limits.operators.contains(&key) {
            return Err(Refusal::NotFound);
        }
        let id = NameId::new(owner, name);
        self.wait_name(&mut ledger, &id)?;
        ledger.may_remove(asker, &id)?;
        // The operator may remove what this server has. A client may once all servers that hold the
        // name have its tombstone, which takes a claim.
        let record = ledger.name(&id);
        let is_over = record.holder.is_some() && record.register.is_removed();
        if matches!(asker, Asker::Session(_)) && record.register.is_shared() && !is_over {
            return Err(Refusal::Shared);
        }
        // 1. The disk: a name that is gone must not come back with the next start.
        if let Some(durable) = &self.durable {
            durable.check().map_err(Refusal::Invalid)?;
        }
        let record = ledger.name(&id);
        let damage = record.damage.clone();
        if let Some(durable) = &self.durable
            && (record.on_disk > 0 || damage.is_some() || record.failed.is_some())
        {
            let pinned = ledger.begin_writing(&id, &HashSet::new());
            let unbind = || match &damage {
                Some(damage) => durable.unbind_file(&damage.file),
                None => durable.unbind(owner, name),
            };
            let removed = match asker {
                Asker::Session(session) => self.in_disk(&mut ledger, session, unbind),
                Asker::Key(_) => MutexGuard::unlocked(&mut ledger, unbind),
            };
            if durable.check().is_err() {
                // The name's file may be there, and may not.
                ledger.name(&id).on_disk = 0;
            }
            let unpinned = ledger.end_writing(&id, &pinned);
            debug_assert!(unpinned.is_empty(), "the name keeps its extents");
            self.written.notify_all();
            removed.map_err(Refusal::Invalid)?;
        }
        // 2. Memory.
        let failed = ledger.name(&id).failed.take();
        let mut freed = ledger.remove(asker, &id)?;
        let pinned = failed.map(|failed| failed.job.pinned);
        freed.extend(ledger.unpin(&pinned.unwrap_or_default()));
        let damaged = damage.map(|damage| ledger.unclaimed(&damage.extents));
        drop(ledger);
        self.give_back(freed);
        if let (Some(durable), Some(extents)) = (&self.durable, damaged) {
            durable.forget(extents);
        }
        let name = name.to_owned();
        later(move || info!(%owner, name, "named region removed"));
        Ok(())
    }

    /// Waits until nobody writes the name's file.
    pub(super) fn wait_name(
        &self,
        ledger: &mut MutexGuard<'_, Ledger>,
        id: &NameId,
    ) -> Result<(), Refusal> {
        let until = Instant::now() + WRITTEN;
        while ledger.names.get(id).is_some_and(|it| it.is_writing) {
            if self.written.wait_until(ledger, until).timed_out() {
                return Err(still_written());
            }
        }
        Ok(())
    }

    pub(super) fn end_writing(
        &self,
        mut ledger: MutexGuard<'_, Ledger>,
        id: &NameId,
        pinned: &HashSet<ExtentId>,
    ) {
        let freed = ledger.end_writing(id, pinned);
        drop(ledger);
        self.written.notify_all();
        self.give_back(freed);
    }

    /// Removes the files of a damaged version that was replaced.
    fn forget_damaged(&self, id: &NameId, damage: Option<Damage>) {
        let Some((durable, damage)) = self.durable.as_ref().zip(damage) else {
            return;
        };
        durable.forget(damage.extents);
        if damage.file != name_file(id.owner, &id.name)
            && let Err(reason) = durable.unbind_file(&damage.file)
        {
            later(move || tracing::warn!("a damaged file stays: {reason}"));
        }
    }

    /// Returns the place of a name after a restart.
    pub(super) fn durability(&self, record: &NameRecord) -> Durability {
        match (&self.durable, &record.damage) {
            (None, _) => Durability::Memory,
            (_, Some(damage)) => Durability::Damaged(damage.reason.to_string()),
            (Some(_), _) if record.on_disk == record.version => Durability::Disk,
            (Some(durable), _) => {
                let failed = record.failed.as_ref().map(|it| it.reason.clone());
                (durable.broken().or(failed)).map_or(Durability::Soon, Durability::Failed)
            }
        }
    }

    fn disk(&self) -> Result<&DurableNames, Refusal> {
        (self.durable.as_ref()).ok_or_else(|| {
            Refusal::Invalid("this server keeps no names on a disk (--persist)".to_owned())
        })
    }
}

fn still_written() -> Refusal {
    Refusal::Invalid(
        "the region's last publication is still being written to the server's disk: try again later".to_owned(),
    )
}

impl Ledger {
    /// Checks that `session` may publish `extents` under the name. Returns them without repetition.
    fn may_publish(
        &self,
        session: SessionId,
        id: &NameId,
        extents: &[ExtentId],
    ) -> Result<HashSet<ExtentId>, Refusal> {
        let record = self.sessions.get(&session).ok_or(Refusal::NoSession)?;
        let held = &record.extents;
        // One id more than are held is looked at: a client can repeat one id millions of times.
        let possible = &extents[..extents.len().min(held.len() + 1)];
        if let Some(stranger) = possible.iter().find(|id| !held.contains(id)) {
            return Err(Refusal::NotLeased(*stranger));
        }
        if extents.len() > held.len() {
            return Err(Refusal::Invalid(format!(
                "{} extents were named, and this client holds {}",
                extents.len(),
                held.len()
            )));
        }
        let distinct: HashSet<ExtentId> = extents.iter().copied().collect();
        for extent in &distinct {
            let bound = self.extents[extent].name.as_ref();
            if let Some(other) = bound.filter(|other| *other != id) {
                return Err(Refusal::Invalid(format!(
                    "extent {extent} belongs to the named region {:?} already",
                    other.name
                )));
            }
        }
        self.may_bind(session, id)?;
        Ok(distinct)
    }

    pub(super) fn name(&mut self, id: &NameId) -> &mut NameRecord {
        let record = self.names.get_mut(id);
        record.expect("the caller found it, and a name that is being written stays")
    }

    /// Returns the memory of `ranges`, by extent.
    pub(super) fn written(&self, ranges: &[ExtentRange]) -> Vec<Written> {
        let mut by_extent: BTreeMap<ExtentId, Vec<(u64, u64)>> = BTreeMap::new();
        for range in ranges {
            let ranges = by_extent.entry(range.extent).or_default();
            ranges.push((range.offset, range.bytes));
        }
        // An extent that was given back since has nothing that the publication needs.
        let written = by_extent.into_iter().filter_map(|(id, ranges)| {
            let memory = Arc::clone(&self.extents.get(&id)?.memory);
            Some(Written { memory, ranges })
        });
        written.collect()
    }

    /// Returns the extents of `ranges` that have not been given back.
    fn present(&self, ranges: &[ExtentRange]) -> HashSet<ExtentId> {
        let extents = ranges.iter().map(|range| range.extent);
        extents.filter(|id| self.extents.contains_key(id)).collect()
    }

    fn bound(&self, extents: &HashSet<ExtentId>) -> Vec<BoundExtent> {
        let bound = |id: &ExtentId| {
            let memory = &self.extents[id].memory;
            BoundExtent {
                id: *id,
                bytes: memory.bytes(),
                atomics: memory.has_atomics(),
            }
        };
        extents.iter().map(bound).collect()
    }

    /// Marks the name as being written. Pins its extents, and those of `more`. Returns all of them.
    fn begin_writing(&mut self, id: &NameId, more: &HashSet<ExtentId>) -> HashSet<ExtentId> {
        let record = self.name(id);
        record.is_writing = true;
        let pinned: HashSet<_> = record.extents.iter().chain(more).copied().collect();
        for id in &pinned {
            let extent = self.extents.get_mut(id);
            extent.expect("a name or a session keeps it").pins += 1;
        }
        pinned
    }

    /// Ends [`begin_writing`](Self::begin_writing). Returns the extents that nobody needs any more.
    fn end_writing(&mut self, id: &NameId, pinned: &HashSet<ExtentId>) -> Freed {
        self.stop_writing(id);
        self.unpin(pinned)
    }

    /// Returns those of `pinned` that nobody needs any more.
    fn unpin(&mut self, pinned: &HashSet<ExtentId>) -> Freed {
        let mut freed = Freed::new();
        for id in pinned {
            let extent = self.extents.get_mut(id).expect("pinned");
            extent.pins -= 1;
            if extent.lessee.is_none() && !extent.is_kept() {
                freed.push(self.forget_extent(*id));
            }
        }
        freed
    }
}
