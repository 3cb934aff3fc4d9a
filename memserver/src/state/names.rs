//! Named regions in the ledger: their owners, their holders, and the extents that they keep.
//!
//! The rule it keeps: a name is looked up together with the key that it belongs to, so that another
//! key's names cannot be opened, published over, removed, listed, or taken first: two users'
//! `squares` are two regions. Only the operator's key reaches past this, to list and to remove.
//!
//! A name is *bound* once it was published, and *held* by one session while that claims it or
//! leases any of its extents. A name that is neither bound nor held is gone. A session that only
//! reads a version holds nothing: see [`readers`](super::readers).

use std::{
    collections::{HashSet, btree_map::Entry},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use farpage_fabric::host::{Asker, ClaimedName, OpenedRegion, Origin, Refusal, Versions};
use farpage_wire::{
    Durability, ExtentId, NamedRegion, PublicKey, SessionId, control::NAMES_PER_ANSWER,
    register::Register,
};

use super::{
    Limits,
    accounts::{charge_of, charge_of_name},
    ledger::Ledger,
    records::{Freed, NameId, NameRecord},
};
use crate::durable::name_file;

/// The most names of one key: listing them makes others wait. The capacity bounds the names of all
/// keys, since each takes a page.
pub(super) const NAMES_PER_KEY: usize = 4096;
/// The most names that one session claims and has published nothing under, so that one program does
/// not take all names of its user's key.
pub(super) const CLAIMS_PER_SESSION: usize = 1024;

impl Ledger {
    pub(super) fn key_of(&self, asker: Asker) -> Result<PublicKey, Refusal> {
        match asker {
            Asker::Key(key) => Ok(key),
            Asker::Session(session) => {
                let record = self.sessions.get(&session).ok_or(Refusal::NoSession)?;
                record.key.ok_or(Refusal::Unidentified)
            }
        }
    }

    /// Returns `name` under the key of `session`.
    pub(super) fn name_of(&self, session: SessionId, name: &str) -> Result<NameId, Refusal> {
        Ok(NameId::new(self.key_of(Asker::Session(session))?, name))
    }

    pub(super) fn claim(
        &mut self,
        limits: &Limits,
        session: SessionId,
        name: &str,
        replace: bool,
    ) -> Result<ClaimedName, Refusal> {
        let id = self.name_of(session, name)?;
        match self.may_bind(session, &id) {
            Err(Refusal::Exists) if replace || self.is_removed(&id) => {}
            other => other?,
        }
        if !self.names.contains_key(&id) && self.claims_of(session) >= CLAIMS_PER_SESSION {
            return Err(Refusal::Invalid(format!(
                "this client claims {CLAIMS_PER_SESSION} names that it has published nothing \
                 under, the most that one client may: publish or close some of its regions"
            )));
        }
        if !replace && let Some(twin) = self.damaged_twin(&id) {
            return Err(self.is_damaged(&twin));
        }
        let record = match self.names.entry(id.clone()) {
            Entry::Occupied(record) => record.into_mut(),
            Entry::Vacant(free) => {
                let origin = self.sessions[&session].origin;
                self.accounts.charge(limits, origin, charge_of_name(0))?;
                free.insert(NameRecord::new(origin))
            }
        };
        if record.is_published() && !replace {
            return Err(Refusal::Exists);
        }
        (record.holder, record.claimed) = (Some(session), true);
        let claimed = ClaimedName {
            vote: (self.id, record.register.clone()),
            is_bound: record.manifest.is_some(),
        };
        let session = self.sessions.get_mut(&session);
        session.expect("it has a key").names.insert(id);
        Ok(claimed)
    }

    /// True if a tombstone is all that is left of the name.
    fn is_removed(&self, id: &NameId) -> bool {
        let record = self.names.get(id);
        record.is_some_and(|record| record.register.is_removed())
    }

    pub(super) fn disclaim(&mut self, session: SessionId, id: &NameId) {
        let record = self.names.get_mut(id);
        if let Some(record) = record.filter(|record| record.holder == Some(session)) {
            record.claimed = false;
            self.settle(id);
        }
    }

    /// Checks that `session` may publish under the name: it holds the name, or the name is new.
    pub(super) fn may_bind(&self, session: SessionId, id: &NameId) -> Result<(), Refusal> {
        match self.names.get(id) {
            None if self.names_of(id.owner) >= NAMES_PER_KEY => Err(Refusal::Invalid(format!(
                "this server keeps {NAMES_PER_KEY} named regions of this key, the most that one \
                 key may have here: remove some"
            ))),
            None => Ok(()),
            Some(record) => match record.holder {
                Some(holder) if holder == session => Ok(()),
                Some(_) => Err(Refusal::InUse),
                None => Err(Refusal::Exists),
            },
        }
    }

    /// Returns the damaged name whose file `id` would have. A file that cannot be read does not
    /// tell its name, and is listed under another one.
    pub(super) fn damaged_twin(&self, id: &NameId) -> Option<NameId> {
        let behind = (Excluded(NameId::new(id.owner, "")), Unbounded);
        let its = self.names.range(behind);
        let mut damaged = its
            .take_while(|(other, _)| other.owner == id.owner)
            .filter_map(|(other, record)| Some((other, record.damage.as_ref()?)))
            .filter(|(other, _)| *other != id)
            .peekable();
        damaged.peek()?;
        let file = name_file(id.owner, &id.name);
        let twin = damaged.find(|(_, damage)| damage.file == file);
        twin.map(|(twin, _)| twin.clone())
    }

    /// Returns the refusal of a name whose file is that of `twin`.
    pub(super) fn is_damaged(&self, twin: &NameId) -> Refusal {
        let reason = self.names[twin].damage.as_ref().map(|it| &*it.reason);
        Refusal::Invalid(format!(
            "a region of this name is damaged on the server's disk, and listed as {:?} ({}): put a copy of the file in its place and start the server anew, or remove {:?}, or replace the region",
            twin.name,
            reason.unwrap_or_default(),
            twin.name
        ))
    }

    /// Forgets a damaged name whose file is another name's now.
    pub(super) fn forget_damaged(&mut self, id: &NameId) {
        let record = self.forget_name(id);
        let holder = record.and_then(|record| record.holder);
        if let Some(session) = holder.and_then(|holder| self.sessions.get_mut(&holder)) {
            session.names.remove(id);
        }
    }

    /// Returns those of `extents` that no name has, neither in memory nor in its damaged files.
    pub(super) fn unclaimed(&self, extents: &[ExtentId]) -> Vec<ExtentId> {
        let damaged = self.names.values().filter_map(|it| it.damage.as_ref());
        let claimed: HashSet<_> = damaged.flat_map(|damage| &damage.extents).collect();
        let is_free = |id: &&ExtentId| !claimed.contains(id) && !self.extents.contains_key(id);
        extents.iter().filter(is_free).copied().collect()
    }

    fn names_of(&self, key: PublicKey) -> usize {
        let behind = (Excluded(NameId::new(key, "")), Unbounded);
        let its = self.names.range(behind);
        its.take_while(|(id, _)| id.owner == key).count()
    }

    /// Counts the names that `session` claims and has published nothing under.
    fn claims_of(&self, session: SessionId) -> usize {
        let names = self.sessions[&session].names.iter();
        names
            .filter(|id| self.names[*id].manifest.is_none())
            .count()
    }

    /// Holds a name for `session` that nobody has claimed, until it is published.
    pub(super) fn hold_new(
        &mut self,
        limits: &Limits,
        session: SessionId,
        id: &NameId,
    ) -> Result<(), Refusal> {
        let origin = self.known(session)?.origin;
        self.accounts.charge(limits, origin, charge_of_name(0))?;
        let record = NameRecord {
            holder: Some(session),
            ..NameRecord::new(origin)
        };
        self.names.insert(id.clone(), record);
        self.known(session)?.names.insert(id.clone());
        Ok(())
    }

    /// Binds the name to extents of a session. The caller has checked and charged the session.
    /// Returns the memory that only the old binding kept.
    pub(super) fn bind(
        &mut self,
        (session, origin): (SessionId, Origin),
        id: NameId,
        (version, manifest, register): (u64, Arc<Vec<u8>>, Register),
        extents: &HashSet<ExtentId>,
    ) -> Freed {
        for extent in extents {
            let extent = self.extents.get_mut(extent);
            extent.expect("the session holds it, or it is pinned").name = Some(id.clone());
        }
        let record = (self.names.entry(id.clone())).or_insert_with(|| NameRecord::new(origin));
        self.readings.replace(record.version);
        record.version = version;
        record.manifest = Some(manifest);
        record.register = register;
        record.origin = origin;
        record.holder = Some(session);
        let old = std::mem::replace(&mut record.extents, extents.iter().copied().collect());
        let dropped: Vec<_> = (old.into_iter())
            .filter(|extent| !extents.contains(extent))
            .collect();
        // A session may have ended while the disk was written.
        if let Some(session) = self.sessions.get_mut(&session) {
            session.names.insert(id);
        }
        self.unname(&dropped)
    }

    /// Returns the extents of a name that `session` has open.
    pub(super) fn opened(&self, session: SessionId, id: &NameId) -> Option<OpenedRegion> {
        let record = self.names.get(id)?;
        let is_whole = |id| self.extents[id].lessee == Some(session);
        let is_open = record.holder == Some(session) && record.extents.iter().all(is_whole);
        is_open.then(|| OpenedRegion {
            // The manifest is not copied: others wait for the ledger.
            manifest: record.manifest.clone().unwrap_or_default(),
            extents: (record.extents.iter())
                .map(|id| self.extents[id].memory.clone())
                .collect(),
            versions: self.versions(id),
            vote: (self.id, record.register.clone()),
        })
    }

    /// Returns the published version of a name, and the older ones that are read.
    pub(super) fn versions(&self, id: &NameId) -> Versions {
        Versions {
            published: self.names.get(id).map_or(0, |record| record.version),
            read: self.readings.old_versions(id),
        }
    }

    /// Forgets a name that nobody but `asker` holds. Returns the memory that it alone kept: extents
    /// that are read stay.
    pub(super) fn remove(&mut self, asker: Asker, id: &NameId) -> Result<Freed, Refusal> {
        if let Some(holder) = self.may_remove(asker, id)? {
            let session = self.sessions.get_mut(&holder);
            session.expect("a holder is a session").names.remove(id);
        }
        let record = self.forget_name(id).expect("looked up above");
        Ok(self.unname(&record.extents))
    }

    /// Checks that nobody but `asker` holds the name. Returns the holder.
    pub(super) fn may_remove(
        &self,
        asker: Asker,
        id: &NameId,
    ) -> Result<Option<SessionId>, Refusal> {
        let record = self.names.get(id).ok_or(Refusal::NotFound)?;
        match record.holder {
            Some(holder) if asker != Asker::Session(holder) => Err(Refusal::InUse),
            holder => Ok(holder),
        }
    }

    /// Lists the names behind `after`, in their order: those of one key, or all.
    pub(super) fn list(
        &self,
        of: Option<PublicKey>,
        after: Option<(PublicKey, String)>,
        durability: impl Fn(&NameRecord) -> Durability,
    ) -> Vec<NamedRegion> {
        let after = after.map(|(owner, name)| NameId { owner, name });
        let first = of.map(|owner| NameId::new(owner, "")).max(after);
        let range = (first.map_or(Unbounded, Excluded), Unbounded);
        (self.names.range(range))
            .take_while(|(id, _)| of.is_none_or(|owner| id.owner == owner))
            .filter(|(_, record)| record.is_published())
            .take(NAMES_PER_ANSWER)
            .map(|(id, record)| NamedRegion {
                owner: id.owner,
                name: id.name.clone(),
                bytes: (record.extents.iter())
                    .map(|extent| charge_of(self.extents[extent].memory.bytes()))
                    .sum::<u64>()
                    + record.charge(),
                in_use: record.holder.is_some(),
                readers: self.readings.readers(id),
                old_versions: self.readings.old_versions(id).len() as u64,
                durability: durability(record),
            })
            .collect()
    }

    /// Counts the names whose files are damaged.
    pub(super) fn damaged_names(&self) -> u64 {
        let damaged = |record: &&NameRecord| record.damage.is_some();
        self.names.values().filter(damaged).count() as u64
    }

    pub(super) fn named_regions(&self) -> u64 {
        let bound = |record: &&NameRecord| record.is_published();
        self.names.values().filter(bound).count() as u64
    }

    /// Returns the charge of the name beside its extents, and the origin that is charged. `None` if
    /// replacing the bound version gives nothing back, since it is read.
    pub(super) fn charge_of(&self, id: &NameId) -> Option<(Origin, u64)> {
        let record = self.names.get(id)?;
        (!self.readings.is_read(record.version)).then(|| (record.origin, record.charge()))
    }

    fn forget_name(&mut self, id: &NameId) -> Option<NameRecord> {
        let given_back = self.charge_of(id);
        let record = self.names.remove(id)?;
        given_back.inspect(|(origin, bytes)| self.accounts.take_off(*origin, *bytes));
        self.readings.replace(record.version);
        Some(record)
    }

    /// Settles the name of `extent`, which was perhaps the last by which its session held the name.
    pub(super) fn extent_released(&mut self, extent: ExtentId) {
        let record = self.extents.get(&extent);
        if let Some(id) = record.and_then(|record| record.name.clone()) {
            self.settle(&id);
        }
    }

    /// Ends the hold on a name. A name that was never published is forgotten.
    pub(super) fn free_name(&mut self, id: &NameId) {
        if let Some(record) = self.names.get_mut(id) {
            record.claimed = false;
            if record.is_writing {
                record.is_unsettled = true;
                return;
            }
            record.holder = None;
            record.unwritten.clear();
            if record.manifest.is_none() {
                self.forget_name(id);
            }
        }
    }

    /// Ends the hold on a name that its holder neither claims nor leases anything of.
    pub(super) fn settle(&mut self, id: &NameId) {
        let record = self.names.get_mut(id).expect("the caller found it");
        record.is_unsettled |= record.is_writing;
        let mut extents = record.extents.iter();
        if record.is_writing
            || record.claimed
            || extents.any(|extent| self.extents[extent].lessee.is_some())
        {
            return;
        }
        let holder = record.holder.and_then(|id| self.sessions.get_mut(&id));
        if let Some(session) = holder {
            session.names.remove(id);
        }
        self.free_name(id);
    }

    /// Takes the name off `extents`. Returns those that nobody leases or reads.
    fn unname(&mut self, extents: &[ExtentId]) -> Freed {
        let mut freed = Freed::new();
        for id in extents {
            let record = self.extents.get_mut(id).expect("a name keeps its extents");
            record.name = None;
            if record.lessee.is_none() && !record.is_kept() {
                freed.push(self.forget_extent(*id));
            }
        }
        freed
    }
}
