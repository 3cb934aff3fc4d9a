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
    host::{OpenedVersion, Origin, VersionRead},
    memory::ExtentMemory,
};
use farpage_wire::{ExtentId, register::Answer};

#[cfg(test)]
use super::accounts::charge_of_name;
use super::records::NameId;
use crate::handover::HandedVersion;

/// All readings of a server.
#[derive(Default)]
pub(super) struct Readings {
    /// Number of versions so far, of all names.
    versions_ever: u64,
    /// Versions that are read, by their numbers.
    versions: HashMap<u64, VersionRecord>,
    /// Numbers of versions that are read, by their names.
    of_names: HashMap<NameId, BTreeSet<u64>>,
    pub(super) views: HashMap<ExtentId, View>,
    /// Number of views that are left of each reading, by its first view.
    readings: HashMap<ExtentId, usize>,
}

pub(super) struct VersionRecord {
    pub(super) name: NameId,
    pub(super) manifest: Arc<Vec<u8>>,
    /// Origin that is charged for the manifest.
    pub(super) origin: Origin,
    /// Identity of this server, and its memory of the version's writer.
    pub(super) vote: Answer,
    /// Number of views of a reading.
    pub(super) extents: usize,
    pub(super) readers: u64,
    /// True if the name is still bound to the version, and charged for it.
    pub(super) is_bound: bool,
}

/// A lease to read one extent.
pub(super) struct View {
    pub(super) of: ExtentId,
    pub(super) memory: Arc<ExtentMemory>,
    pub(super) version: u64,
    /// The first view of its reading.
    pub(super) reading: ExtentId,
}

impl Readings {
    pub(super) fn next_version(&mut self) -> u64 {
        self.versions_ever += 1;
        self.versions_ever
    }

    /// Notes that versions up to `version` existed before the start.
    pub(super) fn at_least(&mut self, version: u64) {
        self.versions_ever = self.versions_ever.max(version);
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

    /// Counts a reader of `version`. The views of the reading, from `first` on, are in already.
    pub(super) fn add_reader(&mut self, first: ExtentId, version: u64, record: VersionRecord) {
        self.readings.insert(first, record.extents);
        let numbers = self.of_names.entry(record.name.clone()).or_default();
        numbers.insert(version);
        self.versions.entry(version).or_insert(record).readers += 1;
    }

    /// Removes a view. Returns it, and its version if that has no other view and no name.
    pub(super) fn end_view(&mut self, id: ExtentId) -> (View, Option<VersionRecord>) {
        let view = (self.views.remove(&id)).expect("a session has only views that exist");
        let left = (self.readings.get_mut(&view.reading)).expect("it has views");
        *left -= 1;
        if *left > 0 {
            return (view, None);
        }
        self.readings.remove(&view.reading);
        let version = (self.versions.get_mut(&view.version)).expect("it is read");
        version.readers -= 1;
        if version.readers > 0 {
            return (view, None);
        }
        let version = self.forget(view.version);
        (view, version.filter(|version| !version.is_bound))
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

    /// Returns the number of versions so far, and the versions that are read.
    pub(super) fn hand_over(&self) -> (u64, Vec<HandedVersion>) {
        let versions = self.versions.iter().map(|(version, record)| HandedVersion {
            version: *version,
            owner: record.name.owner,
            name: record.name.name.clone(),
            manifest: record.manifest.to_vec(),
            origin: record.origin,
            vote: record.vote.clone(),
            extents: record.extents as u64,
            is_bound: record.is_bound,
        });
        (self.versions_ever, versions.collect())
    }

    /// Takes over `versions`, whose views are in already.
    pub(super) fn take_over(&mut self, versions: HashMap<u64, VersionRecord>) {
        self.versions = versions;
        for view in self.views.values() {
            let left = self.readings.entry(view.reading).or_default();
            *left += 1;
            if *left == 1 {
                let version = self.versions.get_mut(&view.version);
                version.expect("the caller looked").readers += 1;
            }
        }
        // Without a reader nothing would ever end the version.
        self.versions.retain(|_, version| version.readers > 0);
        for (number, version) in &self.versions {
            let numbers = self.of_names.entry(version.name.clone()).or_default();
            numbers.insert(*number);
        }
    }

    /// Counts all readers, and the versions that are read and no name is bound to.
    pub(super) fn sums(&self) -> [u64; 2] {
        let versions = self.versions.values();
        let readers = versions.clone().map(|it| it.readers).sum();
        [readers, versions.filter(|it| !it.is_bound).count() as u64]
    }

    /// Returns the manifest and extents of a reading, if none of its views has ended.
    pub(super) fn whole(&self, first: ExtentId) -> Option<OpenedVersion> {
        let version = self.views.get(&first)?.version;
        let mut views: Vec<_> = (self.views.iter())
            .filter(|(_, view)| view.reading == first)
            .collect();
        views.sort_by_key(|(id, _)| **id);
        let version = &self.versions[&version];
        (views.len() == version.extents).then(|| OpenedVersion {
            manifest: Arc::clone(&version.manifest),
            vote: version.vote.clone(),
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
