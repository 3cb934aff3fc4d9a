//! [`Ledger`]: sessions, extents, names and sums, under the one lock of a [`State`](super::State).
//!
//! The rule it keeps: nothing here waits, does I/O or locks. Work that follows from a change, such
//! as giving memory back, is handed to the caller.

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
    /// Time of the reaper's last look. A long gap means that this process did not run, not that the
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
    /// Time at which the connection closed without a goodbye, if it did.
    pub(super) lost: Option<Instant>,
    pub(super) extents: HashSet<ExtentId>,
    pub(super) names: HashSet<NameId>,
    /// Leases to read published versions.
    pub(super) views: HashSet<ExtentId>,
    /// Owner of the names that the session uses, once its client has shown its key.
    pub(super) key: Option<PublicKey>,
    /// Bytes of the client's pages, and bytes that they are stored in, as the client reports.
    pub(super) contents: [u64; 2],
    /// The last numbered request that gave something, and its result.
    pub(super) given: Option<(u64, Given)>,
}

/// Result of a request, which is not given twice if only the answer was lost.
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
    /// Name of the extent, at most one: two could be open in two sessions at once.
    pub(super) name: Option<NameId>,
    /// Origin that is charged for the bytes: where the last lessee connected from.
    pub(super) origin: Origin,
    /// Origin that was given the memory's descriptor over shared memory, and may map it for ever.
    pub(super) mapped_by: Option<Origin>,
    /// Number of leases to read the extent.
    pub(super) views: usize,
    /// True if a reader was given a descriptor. Readers cannot write, and need nothing but the
    /// name's key to read again: they are no reason for a copy. But they may keep the memory.
    pub(super) mapped_to_read: bool,
}

/// Memory whose lease has ended. Adapters and the kernel take milliseconds to let gigabytes go, so
/// it is [given back](super::State::give_back) after the ledger is unlocked. Until then its handle
/// keeps others from [opening](super::State::free_and_private) the name that it belongs to.
pub(super) struct Leaving {
    pub(super) memory: Arc<ExtentMemory>,
    /// True if the bytes stay: a name or a reader keeps them.
    pub(super) is_kept: bool,
    /// Origin that is still charged: a client that may have kept the memory.
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

    /// Returns the origin that maps the session's extents, if the transport hands out descriptors.
    pub(super) fn maps_as(&self) -> Option<Origin> {
        (self.transport == Transport::Shm).then_some(self.origin)
    }
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
