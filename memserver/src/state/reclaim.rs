//! Reclaim of memory whose lease has ended, and the end of its charge.
//!
//! The rule it keeps: the ledger is unlocked meanwhile, since returning gigabytes takes
//! milliseconds. Memory that a client over shared memory gave back and has not let go of
//! ([`Retained`]) counts against the capacity, and against the client's user, until nobody has it
//! mapped or open any more. So no client can have more of the machine's memory than it is charged
//! for. Bytes that are written meanwhile are thrown away at each look: when a request needs room,
//! when figures are asked for, and in the reaper.

use farpage_fabric::{log::later, memory::ExtentFile};
use farpage_wire::SessionId;
use tracing::warn;

use super::{
    State,
    records::{Freed, Leaving, Retained},
};
use crate::tier::Tenant;

impl State {
    /// Takes memory from its adapter. Gives memory that is not kept back to the system, even if a
    /// client over shared memory still maps it.
    pub(super) fn give_back(&self, freed: impl IntoIterator<Item = Leaving>) {
        // Kept memory first: its name is free, and cannot be opened before its handles are gone.
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
            // Memory that was replaced by a copy leaves the extent as it is.
            if let Some(durable) = &self.durable
                && !self.ledger.lock().extents.contains_key(&memory.id())
            {
                durable.forget([memory.id()]);
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

    /// Ends the charges for memory that clients have let go of. Throws away bytes that were written
    /// to the rest since the last look.
    pub(super) fn sweep(&self) {
        // Gigabytes take milliseconds to give back: not while others wait.
        for file in self.settle_retained() {
            if file.resident_bytes() > 0 {
                punch(&file);
            }
        }
    }

    /// Ends the charges for memory that clients have let go of. Returns the files of the rest.
    fn settle_retained(&self) -> Vec<ExtentFile> {
        // Locked throughout, so that the next look finds the accounts settled.
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

    /// Sweeps if there is no room for `bytes` bytes more in `session`.
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

fn punch(file: &ExtentFile) {
    if let Err(error) = file.punch() {
        let extent = file.id();
        later(move || {
            warn!(%extent, %error, "an extent's memory stays for as long as a client maps it");
        });
    }
}
