//! [`Ledger`]: sessions, extents, names and sums, under the one lock of a [`State`](super::State).
//!
//! The rule it keeps: nothing here waits, does I/O or locks. What follows from a change outside,
//! such as memory that is given back, is handed to the caller.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use farpage_fabric::{
    host::{Origin, Refusal, Transport},
    memory::ExtentMemory,
};
use farpage_wire::{ClientStat, ExtentId, PublicKey, Secret, ServerStat, SessionId};

use super::{
    accounts::Accounts,
    names::{NameId, NameRecord},
    readers::Readings,
};

#[derive(Default)]
pub(super) struct Ledger {
    pub(super) sessions: HashMap<SessionId, SessionRecord>,
    pub(super) extents: HashMap<ExtentId, ExtentRecord>,
    pub(super) names: BTreeMap<NameId, NameRecord>,
    pub(super) readings: Readings,
    pub(super) accounts: Accounts,
    pub(super) sessions_ever: u64,
    pub(super) extents_ever: u64,
    pub(super) draining: bool,
    /// When the reaper last looked; a long gap means that this process did not run, not that the
    /// clients were silent.
    pub(super) reaped: Option<Instant>,
}

pub(super) struct SessionRecord {
    pub(super) client: String,
    /// Address of the client, for people.
    pub(super) address: String,
    pub(super) secret: Secret,
    pub(super) transport: Transport,
    pub(super) origin: Origin,
    /// Control connections that have not ended: a resumed session's old one may be noticed late.
    pub(super) connections: usize,
    pub(super) renewed: Instant,
    /// When its connection was closed without a goodbye, if it was.
    pub(super) lost: Option<Instant>,
    pub(super) extents: HashSet<ExtentId>,
    pub(super) names: HashSet<NameId>,
    /// Its leases to read what is published.
    pub(super) views: HashSet<ExtentId>,
    /// Whose the names are that it uses, once its client has shown its key.
    pub(super) key: Option<PublicKey>,
    /// Bytes of the pages that it keeps, and bytes that they take, as it says.
    pub(super) contents: [u64; 2],
    /// The last request that had a number and gave something, and what.
    pub(super) given: Option<(u64, Given)>,
}

/// What a request gave: not given twice where only the answer was lost.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Given {
    Extent(ExtentId),
    Name(NameId),
    /// The first of a reading's views.
    Reading(ExtentId),
}

pub(super) struct ExtentRecord {
    pub(super) memory: Arc<ExtentMemory>,
    pub(super) lessee: Option<SessionId>,
    /// At most one: two names with one extent could be open in two sessions at once.
    pub(super) name: Option<NameId>,
    /// Who its bytes are put on: where its last lessee connected from.
    pub(super) origin: Origin,
    /// Who was given the memory's descriptor over shared memory, and may map it for ever.
    pub(super) mapped_by: Option<Origin>,
    /// Leases to read it.
    pub(super) views: usize,
    /// Whether some reader was given a descriptor. Readers cannot write, and need nothing but the
    /// name's key to read it again: they are no reason for a copy. But they may keep the memory.
    pub(super) mapped_to_read: bool,
}

/// Memory whose lease has ended. Adapters and the kernel take milliseconds to let gigabytes go, so
/// it is [given back](State::give_back) after the ledger is unlocked. Until then its handle keeps
/// others from [opening](State::free_and_quiet) the name that it belongs to.
pub(super) struct Leaving {
    pub(super) memory: Arc<ExtentMemory>,
    /// Whether its bytes stay: a name has them, or somebody reads them.
    pub(super) is_kept: bool,
    /// Who it is still put on: a client that may have kept it.
    pub(super) charged: Option<Origin>,
}

pub(super) type Freed = Vec<Leaving>;

impl SessionRecord {
    pub(super) fn remember(&mut self, serial: Option<u64>, given: Given) {
        self.given = serial.map(|serial| (serial, given));
    }

    pub(super) fn is_connected(&self) -> bool {
        self.lost.is_none()
    }

    pub(super) fn holds_nothing(&self) -> bool {
        self.extents.is_empty() && self.names.is_empty() && self.views.is_empty()
    }

    /// Who maps what the session is lent, if its transport hands out descriptors.
    pub(super) fn maps_as(&self) -> Option<Origin> {
        (self.transport == Transport::Shm).then_some(self.origin)
    }
}

impl Ledger {
    /// What the session's request of that number gave, if it was the last that gave something.
    pub(super) fn given(&self, session: SessionId, serial: Option<u64>) -> Option<Given> {
        let (last, given) = self.sessions.get(&session)?.given.as_ref()?;
        (Some(*last) == serial).then(|| given.clone())
    }

    /// The extent that the session's request of that number was granted, if it still leases it.
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

    /// Who may map `memory`, if it is still an extent's.
    pub(super) fn mapper_of(&self, memory: &Arc<ExtentMemory>) -> Option<Origin> {
        let record = self.extents.get(&memory.id());
        let record = record.filter(|record| Arc::ptr_eq(&record.memory, memory))?;
        record.mapped_by
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
