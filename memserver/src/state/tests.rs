//! Tests of the books: what clients ask for, in order and out of it, and that nothing is left at
//! the end.

mod disk;
mod lifetimes;
mod model;
mod persist;
mod readers;
mod regions;
mod room;

use std::{os::unix::fs::FileExt, sync::Arc, thread, time::Duration};

use farpage_fabric::{
    Limit,
    host::{Admission, Asker, Host, OpenedRegion, OpenedVersion, Origin, Refusal, Transport},
    memory::ExtentMemory,
};

use farpage_wire::{NamedRegion, PublicKey, Secret};

use proptest::{collection::vec, prelude::*};

use super::{accounts::charge_of, *};

const LEASE: Duration = Duration::from_secs(8);

const RECONNECT_GRACE: Duration = Duration::from_secs(8);

fn state(capacity_bytes: u64) -> State {
    State::new(Limits {
        capacity_bytes,
        capacity_per_address: capacity_bytes,
        lease: LEASE,
        reconnect_grace: RECONNECT_GRACE,
        extents_per_session: 6,
        extents: 16,
        extents_per_address: 16,
        sessions: 7,
        operators: vec![OPERATOR],
    })
}

const HERE: Origin = Origin::User(0);

/// Owner of the names in most tests.
const KEY: PublicKey = PublicKey([1; 32]);

const OPERATOR: PublicKey = PublicKey([2; 32]);

/// Begins a session of a client at `origin`, whose key nobody knows yet.
fn admit(state: &State, transport: Transport, origin: Origin) -> Admission {
    state
        .admit("test", transport, &origin.into(), None)
        .unwrap()
}

/// Resumes `session` from [`HERE`] over TCP, with `secret`.
fn resume(state: &State, session: SessionId, secret: Secret) -> Result<Admission, Refusal> {
    let resumed = Some((session, secret));
    state.admit("test", Transport::Tcp, &HERE.into(), resumed)
}

/// Begins a session of a client at `origin` with [`KEY`].
fn client_at(state: &State, transport: Transport, origin: Origin) -> SessionId {
    let session = admit(state, transport, origin).session;
    state.identify(session, KEY).unwrap();
    session
}

fn client(state: &State, transport: Transport) -> SessionId {
    client_at(state, transport, HERE)
}

/// Begins a session over each of `transports`.
fn clients<const N: usize>(state: &State, transports: [Transport; N]) -> [SessionId; N] {
    transports.map(|transport| client(state, transport))
}

fn remove(state: &State, session: SessionId, name: &str) -> Result<(), Refusal> {
    state.remove(Asker::Session(session), name, None)
}

impl State {
    /// Grants an extent by a request without a number.
    fn grant(&self, session: SessionId, bytes: u64) -> Result<Arc<ExtentMemory>, Refusal> {
        Host::grant(self, session, bytes, false, None)
    }

    fn read(&self, session: SessionId, name: &str) -> Result<OpenedVersion, Refusal> {
        Host::read(self, session, name, None)
    }

    fn open(&self, session: SessionId, name: &str) -> Result<OpenedRegion, Refusal> {
        Host::open(self, session, name, None)
    }

    fn held(&self, session: SessionId) -> Vec<ExtentId> {
        let ledger = self.ledger.lock();
        let mut held: Vec<_> = ledger
            .sessions
            .get(&session)
            .map_or_else(Vec::new, |record| record.extents.iter().copied().collect());
        held.sort();
        held
    }

    fn views(&self, session: SessionId) -> Vec<ExtentId> {
        let ledger = self.ledger.lock();
        let views = ledger.sessions.get(&session).map(|it| it.views.iter());
        let mut views: Vec<_> = views.into_iter().flatten().copied().collect();
        views.sort();
        views
    }

    /// Asserts that ledger and leases agree, and that the sums are right.
    fn check(&self) {
        let retained = self.retained.lock();
        let ledger = self.ledger.lock();
        let extents = ledger.extents.values();
        let bytes: u64 = extents.map(|extent| charge_of(extent.memory.bytes())).sum();
        let names = ledger.names.values();
        let named: u64 = names
            .map(|name| 4096 + name.manifest.as_ref().map_or(0, |manifest| manifest.len()) as u64)
            .sum();
        let all = ledger.accounts.all();
        let kept: u64 = retained.iter().map(Retained::charge).sum();
        assert_eq!(all.bytes, bytes + named + kept + ledger.readings.charge());
        assert!(all.bytes <= self.limits.capacity_bytes);
        assert_eq!(all.extents, ledger.extents.len() + retained.len());
        assert_eq!(all.sessions, ledger.sessions.len());
        assert_eq!(all, ledger.accounts.sum());
        let views: Vec<_> = ledger.readings.views().collect();
        for (view, of) in &views {
            let of_session = |it: &SessionRecord| it.views.contains(view);
            let mut readers = (ledger.sessions.iter()).filter(|(_, it)| of_session(it));
            let (reader, _) = readers.next().expect("a view belongs to a session");
            assert!(readers.next().is_none());
            let memory = self.extent(*reader, *view).expect("leased");
            assert!(memory.is_view() && ledger.extents.contains_key(of));
            memory.copy_out(0, &mut [0]).expect("not revoked");
        }
        let leased = self.leases.count() - views.len();
        let mut extents = ledger.extents.values();
        let held = ledger
            .sessions
            .values()
            .map(|session| session.extents.len());
        assert_eq!(leased, held.sum::<usize>());
        assert_eq!(
            leased,
            extents.by_ref().filter(|it| it.lessee.is_some()).count()
        );
        for (id, extent) in &ledger.extents {
            assert_eq!(
                extent.views,
                views.iter().filter(|(_, of)| of == id).count()
            );
            assert!(
                extent.lessee.is_some() || extent.name.is_some() || extent.views > 0,
                "extent {id} belongs to nobody"
            );
            if let Some(name) = &extent.name {
                assert!(ledger.names[name].extents.contains(id));
            }
            if let Some(lessee) = extent.lessee {
                assert!(ledger.sessions[&lessee].extents.contains(id));
                let memory = self.extent(lessee, *id).expect("leased");
                memory.copy_out(0, &mut [0]).expect("not revoked");
            }
        }
        for (name, record) in &ledger.names {
            for id in &record.extents {
                let extent = &ledger.extents[id];
                assert_eq!(extent.name.as_ref(), Some(name));
                assert!(
                    extent.lessee.is_none() || extent.lessee == record.holder,
                    "extent {id} leased to a stranger"
                );
            }
            if let Some(holder) = record.holder {
                assert!(ledger.sessions[&holder].names.contains(name));
            }
        }
    }
}

/// Returns the descriptor that a client over shared memory was given, and may keep for ever.
fn descriptor_of(memory: &ExtentMemory) -> std::fs::File {
    memory.lend().unwrap().into()
}
