//! Names of the directory, taken over at the start.
//!
//! The rule it keeps: a name whose bytes cannot be read is damaged, and others are served. Nobody
//! leases the extents, so the first client to open a name gets fresh handles.

use std::{collections::HashMap, path::Path, sync::Arc};

use farpage_fabric::{host::Origin, memory::ExtentMemory};
use farpage_wire::ExtentId;
use tracing::{info, warn};

use super::{
    State,
    accounts::{charge_of, charge_of_name},
    records::{ExtentRecord, NameId, NameRecord},
};
use crate::{
    durable::{Binding, LoadError, PersistError, Stored, StoredName},
    tier::Tenant,
};

impl State {
    /// Takes over the names that a start found in the directory at `path`.
    ///
    /// # Errors
    /// [`PersistError`]: there is too little room.
    pub(crate) fn restore(mut self, stored: Stored, path: &Path) -> Result<Self, PersistError> {
        let Stored {
            durable,
            mut names,
            extents_ever,
        } = stored;
        // 1. Room for all of them, damaged ones included: a name that does not fit is not dropped.
        let bindings = || names.iter().filter_map(|it| it.binding.as_ref().ok());
        let needed: u64 = bindings().map(charge_of_binding).sum::<u64>()
            + (names.len() - bindings().count()) as u64 * charge_of_name(0);
        let extents = bindings().map(|it| it.extents.len()).sum();
        if needed > self.limits.capacity_bytes {
            return Err(PersistError::Capacity {
                directory: path.to_owned(),
                needed,
                capacity: self.limits.capacity_bytes,
            });
        }
        if extents > self.limits.extents {
            return Err(PersistError::Extents {
                directory: path.to_owned(),
                extents,
                most: self.limits.extents,
            });
        }
        self.durable = Some(durable);
        // 2. Their bytes.
        let mut memories = HashMap::new();
        for stored in &mut names {
            match self.load(stored).map_err(|reason| PersistError::Memory {
                directory: path.to_owned(),
                reason,
            })? {
                Ok(loaded) => memories.extend(loaded),
                Err(reason) => stored.damage(&reason),
            }
        }
        // 3. The ledger.
        let ledger = self.ledger.get_mut();
        ledger.extents_ever = extents_ever;
        let (count, mut damaged) = (names.len(), 0);
        for StoredName {
            owner,
            name,
            binding,
        } in names
        {
            let id = NameId { owner, name };
            let record = match binding {
                Ok(binding) => {
                    // The identity lasts as long as a name.
                    ledger.id = binding.server.unwrap_or(ledger.id);
                    ledger.readings.at_least(binding.version);
                    let charge = charge_of_name(binding.manifest.len());
                    ledger.accounts.put_on(binding.origin, charge);
                    for extent in &binding.extents {
                        ledger.accounts.put_extent_on(binding.origin, extent.bytes);
                        let memory = memories.remove(&extent.id).expect("loaded above");
                        let record = ExtentRecord {
                            memory,
                            lessee: None,
                            name: Some(id.clone()),
                            origin: binding.origin,
                            mapped_by: None,
                            views: 0,
                            pins: 0,
                            mapped_to_read: false,
                        };
                        ledger.extents.insert(extent.id, record);
                    }
                    NameRecord {
                        manifest: Some(Arc::new(binding.manifest)),
                        extents: binding.extents.iter().map(|it| it.id).collect(),
                        version: binding.version,
                        on_disk: binding.version,
                        register: binding.register,
                        ..NameRecord::new(binding.origin)
                    }
                }
                Err(damage) => {
                    damaged += 1;
                    warn!(%owner, name = id.name, reason = &*damage.reason, "a named region is damaged");
                    let origin = Origin::Unknown;
                    ledger.accounts.put_on(origin, charge_of_name(0));
                    NameRecord {
                        manifest: Some(Arc::default()),
                        damage: Some(damage),
                        ..NameRecord::new(origin)
                    }
                }
            };
            ledger.names.insert(id, record);
        }
        info!(names = count, damaged, bytes = needed, directory = %path.display(), "named regions are back");
        Ok(self)
    }

    /// Makes the memory of a name's extents. An error of the outer result is for lack of memory,
    /// one of the inner for damage.
    #[expect(
        clippy::type_complexity,
        reason = "two kinds of failure, told apart once"
    )]
    fn load(
        &self,
        stored: &StoredName,
    ) -> Result<Result<Vec<(ExtentId, Arc<ExtentMemory>)>, String>, String> {
        let (Ok(binding), Some(durable)) = (&stored.binding, &self.durable) else {
            return Ok(Ok(Vec::new()));
        };
        let mut loaded: Vec<(ExtentId, Arc<ExtentMemory>)> = Vec::new();
        for extent in &binding.extents {
            let memory = self.make_memory(extent.id, extent.bytes, extent.atomics);
            let mut memory = memory.map_err(|error| error.to_string())?;
            if let Some(tier) = &self.tier {
                let kept = tier.keep_for(extent.bytes);
                let kept = kept.map_err(|left| {
                    format!("there is room for {left} bytes: give more --memory")
                })?;
                memory = tier.adopt(&memory, Tenant::NOBODY, kept);
            }
            match durable.load(&memory) {
                Ok(()) => {}
                Err(LoadError::Shortage(reason)) => return Err(reason),
                Err(LoadError::Damage(reason)) => {
                    if let Some(tier) = &self.tier {
                        let begun = loaded.iter().map(|(id, _)| *id);
                        begun.chain([extent.id]).for_each(|id| tier.discard(id));
                    }
                    return Ok(Err(reason));
                }
            }
            loaded.push((extent.id, memory));
        }
        Ok(Ok(loaded))
    }
}

/// Returns the charge of a name and its extents.
fn charge_of_binding(binding: &Binding) -> u64 {
    let extents = binding.extents.iter().map(|extent| charge_of(extent.bytes));
    extents.sum::<u64>() + charge_of_name(binding.manifest.len())
}
