//! [`Ledger`]: sessions, extents, names and sums, under the one lock of a [`State`](super::State).
//!
//! The rule it keeps: nothing here waits, does I/O or locks. Work that follows from a change, such
//! as giving memory back, is handed to the caller.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant,
};

use farpage_fabric::{
    host::{Origin, Refusal},
    memory::ExtentMemory,
};
use farpage_wire::{ClientStat, ExtentId, ServerId, ServerStat, SessionId};

use super::{
    accounts::Accounts,
    readers::Readings,
    records::{ExtentRecord, Given, Leaving, NameId, NameRecord, SessionRecord},
};

#[derive(Default)]
pub(super) struct Ledger {
    /// Identity of this server, which lasts as long as its names.
    pub(super) id: ServerId,
    pub(super) sessions: HashMap<SessionId, SessionRecord>,
    pub(super) extents: HashMap<ExtentId, ExtentRecord>,
    pub(super) names: BTreeMap<NameId, NameRecord>,
    pub(super) readings: Readings,
    pub(super) accounts: Accounts,
    pub(super) sessions_ever: u64,
    pub(super) extents_ever: u64,
    pub(super) draining: bool,
    /// True once clients are asked to move their memory away: nothing is granted from then on.
    pub(super) asks_to_leave: bool,
    /// Time of the reaper's last look. A long gap means that this process did not run, not that the
    /// clients were silent.
    pub(super) reaped: Option<Instant>,
}

impl Ledger {
    /// Returns the result of request `serial` of `session`, if it was the last that gave something.
    pub(super) fn given(&self, session: SessionId, serial: Option<u64>) -> Option<Given> {
        let (last, given) = self.sessions.get(&session)?.given.as_ref()?;
        (Some(*last) == serial).then(|| given.clone())
    }

    /// Returns the extent that request `serial` of `session` was granted, if it is still leased.
    pub(super) fn granted(
        &self,
        session: SessionId,
        serial: Option<u64>,
    ) -> Option<Arc<ExtentMemory>> {
        let Given::Extent(id) = self.given(session, serial)? else {
            return None;
        };
        let record = self.extents.get(&id)?;
        (record.lessee == Some(session)).then(|| record.memory.clone())
    }

    /// Removes an extent that nobody leases or reads and no name refers to. Its bytes go back to
    /// the capacity at once where no client can have kept it.
    pub(super) fn forget_extent(&mut self, id: ExtentId) -> Leaving {
        let record = (self.extents.remove(&id)).expect("the caller found it");
        let may_be_kept = record.mapped_by.is_some() || record.mapped_to_read;
        let charged = may_be_kept.then_some(record.origin);
        if charged.is_none() {
            (self.accounts).take_extent_off(record.origin, record.memory.bytes());
        }
        Leaving {
            memory: record.memory,
            is_kept: false,
            charged,
        }
    }

    /// Returns the origin that may map `memory`, if that is still an extent's.
    pub(super) fn mapper_of(&self, memory: &Arc<ExtentMemory>) -> Option<Origin> {
        let record = self.extents.get(&memory.id());
        let record = record.filter(|record| Arc::ptr_eq(&record.memory, memory))?;
        record.mapped_by
    }

    /// Returns the bytes that sessions lease.
    pub(super) fn held_bytes(&self) -> u64 {
        let leased = self.sessions.values().flat_map(|session| &session.extents);
        leased
            .map(|extent| self.extents[extent].memory.bytes())
            .sum()
    }

    /// Counts the sessions whose client is connected.
    pub(super) fn connected(&self) -> usize {
        let sessions = self.sessions.values();
        sessions.filter(|session| session.is_connected()).count()
    }

    /// Lists the clients of all sessions, those that are lent most first.
    pub(super) fn clients(&self) -> Vec<ClientStat> {
        let lent = |extent: &ExtentId| self.extents[extent].memory.bytes();
        let mut clients: Vec<_> = (self.sessions.values())
            .map(|session| ClientStat {
                name: session.client.clone(),
                address: session.address.clone(),
                connected: session.is_connected(),
                granted_bytes: session.extents.iter().map(lent).sum(),
                extents: session.extents.len() as u64,
            })
            .collect();
        clients.sort_by(|a, b| {
            let key = |client: &ClientStat| Reverse(client.granted_bytes);
            (key(a), &a.address).cmp(&(key(b), &b.address))
        });
        clients.truncate(ServerStat::CLIENTS_MOST);
        clients
    }

    pub(super) fn known(&mut self, id: SessionId) -> Result<&mut SessionRecord, Refusal> {
        self.sessions.get_mut(&id).ok_or(Refusal::NoSession)
    }
}
