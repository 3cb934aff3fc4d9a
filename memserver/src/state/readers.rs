//! [`Readings`]: the readers of each version of a named region.
//!
//! The rule it keeps: the extents of a version stay until its last reader has gone, whatever
//! becomes of the name. A reader has a *view* of each extent, a lease of its own that takes READs
//! alone. Views end one by one, or with the session. The reader counts until its last view has
//! ended. A version without extents needs nothing to stay, so nobody is counted.
//!
//! A replaced version that is read stays charged to its publisher. So publishing needs room for
//! both manifests.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use farpage_fabric::{
    host::{OpenedVersion, Origin, Refusal, VersionRead, Versions},
    log::later,
    memory::ExtentMemory,
};
use farpage_wire::{ExtentId, SessionId};
use tracing::info;

use super::{
    State,
    accounts::charge_of_name,
    ledger::{Freed, Given, Leaving, Ledger},
    names::NameId,
};

/// All readings of a server.
#[derive(Default)]
pub(super) struct Readings {
    /// Number of versions so far, of all names.
    versions_ever: u64,
    /// Versions that are read, by their numbers.
    versions: HashMap<u64, VersionRecord>,
    /// Numbers of versions that are read, by their names.
    of_names: HashMap<NameId, BTreeSet<u64>>,
    views: HashMap<ExtentId, View>,
    /// Number of views that are left of each reading, by its first view.
    readings: HashMap<ExtentId, usize>,
}

struct VersionRecord {
    name: NameId,
    manifest: Arc<Vec<u8>>,
    /// Origin that is charged for the manifest.
    origin: Origin,
    /// Number of views of a reading.
    extents: usize,
    readers: u64,
    /// True if the name is still bound to the version, and charged for it.
    is_bound: bool,
}

/// A lease to read one extent.
struct View {
    of: ExtentId,
    memory: Arc<ExtentMemory>,
    version: u64,
    /// The first view of its reading.
    reading: ExtentId,
}

impl Readings {
    pub(super) fn next_version(&mut self) -> u64 {
        self.versions_ever += 1;
        self.versions_ever
    }

    pub(super) fn is_read(&self, version: u64) -> bool {
        self.versions.contains_key(&version)
    }

    /// Marks `version` as replaced: no name is bound to it any more.
    pub(super) fn replace(&mut self, version: u64) {
        if let Some(record) = self.versions.get_mut(&version) {
            record.is_bound = false;
        }
    }

    /// Lists the versions of the name that have been replaced and are read.
    pub(super) fn old_versions(&self, name: &NameId) -> Vec<VersionRead> {
        let old = self.of_name(name).filter(|(_, it)| !it.is_bound);
        old.map(|(version, it)| VersionRead {
            version,
            readers: it.readers,
        })
        .collect()
    }

    /// Counts the readers of all versions of the name.
    pub(super) fn readers(&self, name: &NameId) -> u64 {
        self.of_name(name).map(|(_, it)| it.readers).sum()
    }

    fn of_name(&self, name: &NameId) -> impl Iterator<Item = (u64, &VersionRecord)> {
        let numbers = self.of_names.get(name).into_iter().flatten();
        numbers.map(|number| (*number, &self.versions[number]))
    }

    /// Removes a version that nobody reads any more.
    fn forget(&mut self, version: u64) -> Option<VersionRecord> {
        let record = self.versions.remove(&version)?;
        if let Some(numbers) = self.of_names.get_mut(&record.name) {
            numbers.remove(&version);
            if numbers.is_empty() {
                self.of_names.remove(&record.name);
            }
        }
        Some(record)
    }

    /// Counts all readers, and the versions that are read and no name is bound to.
    pub(super) fn sums(&self) -> [u64; 2] {
        let versions = self.versions.values();
        let readers = versions.clone().map(|it| it.readers).sum();
        [readers, versions.filter(|it| !it.is_bound).count() as u64]
    }

    /// Returns the manifest and extents of a reading, if none of its views has ended.
    fn whole(&self, first: ExtentId) -> Option<OpenedVersion> {
        let version = self.views.get(&first)?.version;
        let mut views: Vec<_> = (self.views.iter())
            .filter(|(_, view)| view.reading == first)
            .collect();
        views.sort_by_key(|(id, _)| **id);
        let version = &self.versions[&version];
        (views.len() == version.extents).then(|| OpenedVersion {
            manifest: Arc::clone(&version.manifest),
            extents: (views.iter())
                .map(|(_, view)| (view.of, Arc::clone(&view.memory)))
                .collect(),
        })
    }

    #[cfg(test)]
    pub(super) fn charge(&self) -> u64 {
        let old = self.versions.values().filter(|it| !it.is_bound);
        old.map(|it| charge_of_name(it.manifest.len())).sum()
    }

    /// Lists the views, each with its extent.
    #[cfg(test)]
    pub(super) fn views(&self) -> impl Iterator<Item = (ExtentId, ExtentId)> {
        self.views.iter().map(|(id, view)| (*id, view.of))
    }
}

impl State {
    /// Leases the published version of a name, to read it.
    pub(super) fn begin_reading(
        &self,
        session: SessionId,
        name: &str,
        serial: Option<u64>,
    ) -> Result<OpenedVersion, Refusal> {
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        if let Some(Given::Reading(first)) = ledger.given(session, serial)
            && let Some(reading) = ledger.readings.whole(first)
        {
            return Ok(reading);
        }
        let record = ledger.names.get(&id).ok_or(Refusal::NotFound)?;
        let manifest = record.manifest.clone().ok_or(Refusal::NotFound)?;
        let (extents, version, origin) = (record.extents.clone(), record.version, record.origin);
        let reader = ledger.known(session)?;
        let held = reader.extents.len() + reader.views.len();
        if held + extents.len() > self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "the region has {} extents and this client holds {held} already, more than {} together: close some arrays",
                extents.len(),
                self.limits.extents_per_session
            )));
        }
        let is_mapped = reader.maps_as().is_some();
        let first = ExtentId(ledger.extents_ever + 1);
        let mut views = Vec::with_capacity(extents.len());
        for of in extents {
            ledger.extents_ever += 1;
            let view = ExtentId(ledger.extents_ever);
            let extent = ledger.extents.get_mut(&of);
            let extent = extent.expect("a name keeps its extents");
            extent.views += 1;
            extent.mapped_to_read |= is_mapped;
            let memory = extent.memory.view(view);
            self.leases.insert(view, session, Arc::clone(&memory));
            let lease = View {
                of,
                memory: Arc::clone(&memory),
                version,
                reading: first,
            };
            ledger.readings.views.insert(view, lease);
            ledger.known(session)?.views.insert(view);
            views.push((of, memory));
        }
        if !views.is_empty() {
            ledger.readings.readings.insert(first, views.len());
            let name = id.clone();
            let numbers = ledger.readings.of_names.entry(id).or_default();
            numbers.insert(version);
            let read = ledger.readings.versions.entry(version);
            let read = read.or_insert_with(|| VersionRecord {
                name,
                manifest: Arc::clone(&manifest),
                origin,
                extents: views.len(),
                readers: 0,
                is_bound: true,
            });
            read.readers += 1;
            let reader = ledger.known(session)?;
            reader.remember(serial, Given::Reading(first));
        }
        drop(ledger);
        let name = name.to_owned();
        later(move || info!(%session, name, version, "named region opened for reading"));
        Ok(OpenedVersion {
            manifest,
            extents: views,
        })
    }

    /// Returns the published version of a name, and the older ones that are read.
    pub(super) fn read_versions(
        &self,
        session: SessionId,
        name: &str,
    ) -> Result<Versions, Refusal> {
        let ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        Ok(ledger.versions(&id))
    }

    /// Ends a view. Returns its own handle, and its extent if nobody keeps that any more.
    pub(super) fn end_view(&self, ledger: &mut Ledger, id: ExtentId) -> Freed {
        let readings = &mut ledger.readings;
        let view = (readings.views.remove(&id)).expect("a session has only views that exist");
        view.memory.revoke();
        self.leases.remove(id);
        // 1. The reading, and the version, if this was its last.
        let left = (readings.readings.get_mut(&view.reading)).expect("it has views");
        *left -= 1;
        if *left == 0 {
            readings.readings.remove(&view.reading);
            let version = (readings.versions.get_mut(&view.version)).expect("it is read");
            version.readers -= 1;
            if version.readers == 0
                && let Some(version) = readings.forget(view.version)
                && !version.is_bound
            {
                let charge = charge_of_name(version.manifest.len());
                ledger.accounts.take_off(version.origin, charge);
            }
        }
        // 2. The extent, if nobody else has it.
        let extent = ledger.extents.get_mut(&view.of);
        let extent = extent.expect("a view keeps its extent");
        extent.views -= 1;
        let is_over = extent.views == 0 && extent.lessee.is_none() && extent.name.is_none();
        let own = Leaving {
            memory: view.memory,
            is_kept: true,
            charged: None,
        };
        let freed = is_over.then(|| ledger.forget_extent(view.of));
        [own].into_iter().chain(freed).collect()
    }
}
