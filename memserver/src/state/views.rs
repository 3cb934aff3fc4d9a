//! Views of the extents of published versions: their beginning and end.
//!
//! The rule it keeps: a session's views count against its extents. An extent whose last view ends
//! is forgotten, unless a lessee or a name keeps it.

use std::sync::Arc;

use farpage_fabric::{
    host::{OpenedVersion, Refusal, Versions},
    log::later,
};
use farpage_wire::{ExtentId, SessionId};
use tracing::info;

use super::{
    State,
    accounts::charge_of_name,
    ledger::Ledger,
    readers::{VersionRecord, View},
    records::{Freed, Given, Leaving},
};

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
        let manifest = Arc::clone(record.published()?);
        let (extents, version, origin) = (record.extents.clone(), record.version, record.origin);
        let vote = (ledger.id, record.register.clone());
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
            let record = VersionRecord {
                name: id,
                manifest: Arc::clone(&manifest),
                origin,
                vote: vote.clone(),
                extents: views.len(),
                readers: 0,
                is_bound: true,
            };
            ledger.readings.add_reader(first, version, record);
            let reader = ledger.known(session)?;
            reader.remember(serial, Given::Reading(first));
        }
        drop(ledger);
        let name = name.to_owned();
        later(move || info!(%session, name, version, "named region opened for reading"));
        Ok(OpenedVersion {
            manifest,
            extents: views,
            vote,
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
        // 1. The reading, and the version, if this was its last.
        let (view, ended) = ledger.readings.end_view(id);
        view.memory.revoke();
        self.leases.remove(id);
        if let Some(version) = ended {
            let charge = charge_of_name(version.manifest.len());
            ledger.accounts.take_off(version.origin, charge);
        }
        // 2. The extent, if nobody else has it.
        let extent = ledger.extents.get_mut(&view.of);
        let extent = extent.expect("a view keeps its extent");
        extent.views -= 1;
        let is_over = extent.lessee.is_none() && !extent.is_kept();
        let own = Leaving {
            memory: view.memory,
            is_kept: true,
            charged: None,
        };
        let freed = is_over.then(|| ledger.forget_extent(view.of));
        [own].into_iter().chain(freed).collect()
    }
}
