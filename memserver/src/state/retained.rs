//! Memory that clients over shared memory gave back and have not let go of.
//!
//! The rule it keeps: it counts against the capacity, and against the client's user, until nobody
//! has it mapped or open any more, so that no client can have more of the machine's memory than it
//! is charged for. What is written to it meanwhile is thrown away at each look.
//!
//! Looked at where somebody needs the room, where figures are asked for, and by the reaper.

use farpage_fabric::{host::Origin, log::later, memory::ExtentFile};
use farpage_wire::SessionId;
use tracing::warn;

use super::{
    State,
    accounts::charge_of,
    ledger::{Freed, Leaving},
};
use crate::tier::Tenant;

pub(super) struct Retained {
    file: ExtentFile,
    /// Who it is put on.
    origin: Origin,
}

impl Retained {
    pub(super) fn charge(&self) -> u64 {
        charge_of(self.file.bytes())
    }

    pub(super) fn file(&self) -> ExtentFile {
        self.file.clone()
    }

    /// Whether somebody still has it.
    fn is_held(&self) -> bool {
        self.file.is_held_elsewhere().unwrap_or_else(|error| {
            let extent = self.file.id();
            later(move || {
                warn!(%extent, %error, "cannot tell whether a client has let go of memory: it is not charged for it");
            });
            false
        })
    }
}

fn punch(file: &ExtentFile) {
    if let Err(error) = file.punch() {
        let extent = file.id();
        later(move || {
            warn!(%extent, %error, "an extent's memory stays for as long as a client maps it");
        });
    }
}

impl State {
    /// Takes memory from its adapter and, unless it is kept, gives it back to the system, also what
    /// a client over shared memory still maps.
    pub(super) fn give_back(&self, freed: impl IntoIterator<Item = Leaving>) {
        // What is kept first: its name is free, and cannot be opened before its handles are gone.
        let (kept, freed): (Freed, Freed) = freed.into_iter().partition(|leaving| leaving.is_kept);
        for Leaving { memory, .. } in kept {
            memory.deregister();
            if let Some(tier) = &self.tier
                && !memory.is_view()
            {
                tier.assign(memory.id(), Tenant::NOBODY);
            }
        }
        let mut retained = Vec::new();
        for Leaving {
            memory, charged, ..
        } in freed
        {
            memory.deregister();
            if let Some(tier) = &self.tier {
                tier.discard(memory.id());
            }
            let file = memory.file();
            punch(&file);
            retained.extend(charged.map(|origin| Retained { file, origin }));
        }
        if !retained.is_empty() {
            self.retained.lock().append(&mut retained);
            self.sweep();
        }
    }

    /// Takes off their clients what they have let go of. What was written to the rest since the
    /// last look goes.
    pub(super) fn sweep(&self) {
        // Gigabytes take milliseconds to give back: not while others wait.
        for file in self.settle_retained() {
            if file.resident_bytes() > 0 {
                punch(&file);
            }
        }
    }

    /// Takes off their clients what they have let go of; returns what they have not.
    fn settle_retained(&self) -> Vec<ExtentFile> {
        // Held throughout: who looks next finds the accounts as they are then.
        let mut retained = self.retained.lock();
        let gone: Vec<_> = retained.extract_if(.., |one| !one.is_held()).collect();
        if !gone.is_empty() {
            let accounts = &mut self.ledger.lock().accounts;
            for Retained { file, origin } in gone {
                accounts.take_extent_off(origin, file.bytes());
            }
        }
        retained.iter().map(Retained::file).collect()
    }

    /// Looks whether there is room for `bytes` bytes more, and for what has been let go of where
    /// there is none.
    pub(super) fn reclaim(&self, session: SessionId, bytes: u64) {
        let has_room = {
            let ledger = self.ledger.lock();
            let origin = ledger.sessions.get(&session).map(|session| session.origin);
            origin.is_none_or(|origin| ledger.accounts.has_room(&self.limits, origin, bytes))
        };
        if !has_room {
            self.sweep();
        }
    }
}
