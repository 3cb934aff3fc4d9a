//! [`Host`] for [`State`]: the requests of clients.
//!
//! The rule it keeps: requests are refused before anything changes; logging and giving back come
//! after the ledger is unlocked.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Limit,
    host::{
        Admission, Asker, Bound, ClaimedName, Host, OpenedRegion, OpenedVersion, Peer, Proposal,
        Refusal, Transport, Versions,
    },
    log::later,
    memory::{ExtentFile, ExtentMemory},
};
use farpage_wire::{
    ExtentId, ExtentRange, NamedRegion, PersistStat, Persistence, PublicKey, Secret, ServerStat,
    SessionId, register::Epoch,
};
use parking_lot::MutexGuard;
use tracing::{debug, info, warn};

use super::{
    Ended, State,
    accounts::{charge_of, charge_of_name},
    records::{ExtentRecord, Given, Retained, SessionRecord},
};
use crate::{durable::DurableNames, tier::Tenant};

impl Host for State {
    fn admit(
        &self,
        client: &str,
        transport: Transport,
        peer: &Peer,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        if let Some((id, secret)) = resume {
            return self.resume(id, &secret, transport, peer);
        }
        let secret = new_secret()?;
        let mut ledger = self.ledger.lock();
        if ledger.draining {
            return Err(Refusal::Draining);
        }
        ledger.accounts.begin_session(&self.limits, peer.origin)?;
        ledger.sessions_ever += 1;
        let id = SessionId(ledger.sessions_ever);
        let record = SessionRecord {
            client: client.to_owned(),
            address: peer.name.clone(),
            secret,
            transport,
            origin: peer.origin,
            connections: 1,
            lease: self.limits.lease,
            renewed: Instant::now(),
            in_disk: 0,
            lost: None,
            extents: HashSet::new(),
            names: HashSet::new(),
            views: HashSet::new(),
            key: None,
            contents: [0; 2],
            given: None,
        };
        ledger.sessions.insert(id, record);
        drop(ledger);
        let (client, address) = (client.to_owned(), peer.name.clone());
        later(move || info!(session = %id, client, address, ?transport, "session begun"));
        Ok(self.admission(id, secret, self.limits.lease))
    }

    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        match ledger.known(session)?.secret == *secret {
            true => Ok(()),
            false => Err(Refusal::NoSession),
        }
    }

    fn renew(&self, session: SessionId) -> Result<(), Refusal> {
        self.ledger.lock().known(session)?.renewed = Instant::now();
        Ok(())
    }

    fn lost(&self, session: SessionId) {
        let mut ledger = self.ledger.lock();
        let Ok(record) = ledger.known(session) else {
            return;
        };
        record.connections = record.connections.saturating_sub(1);
        if record.connections > 0 {
            return;
        }
        let why = match record.transport {
            Transport::Shm => "its connection closed without a goodbye",
            // A session that holds nothing loses nothing, and would only take the place of another.
            Transport::Tcp | Transport::Rdma if record.holds_nothing() => {
                "its connection was lost, and it held nothing"
            }
            Transport::Tcp | Transport::Rdma => {
                record.lost = Some(Instant::now());
                let (client, address) = (record.client.clone(), record.address.clone());
                drop(ledger);
                later(move || {
                    info!(%session, client, address, "connection lost: the client may return for a while");
                });
                return;
            }
        };
        let ended = self.end(&mut ledger, session, why);
        drop(ledger);
        self.give_back(ended.into_iter().flat_map(Ended::finish));
    }

    fn close(&self, session: SessionId) {
        let ended = self.end(&mut self.ledger.lock(), session, "the client closed it");
        self.give_back(ended.into_iter().flat_map(Ended::finish));
    }

    fn grant(
        &self,
        session: SessionId,
        bytes: u64,
        atomics: bool,
        serial: Option<u64>,
    ) -> Result<Arc<ExtentMemory>, Refusal> {
        self.reclaim(session, bytes);
        let mut ledger = self.ledger.lock();
        if let Some(memory) = ledger.granted(session, serial) {
            return Ok(memory);
        }
        if ledger.asks_to_leave {
            return Err(Refusal::Draining);
        }
        let record = ledger.known(session)?;
        let held_extents = record.extents.len() + record.views.len();
        let (origin, mapped_by) = (record.origin, record.maps_as());
        if bytes == 0 {
            return Err(Refusal::Invalid(
                "an extent of 0 bytes was asked for".to_owned(),
            ));
        }
        if held_extents >= self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "this client holds {held_extents} extents, the most that one client may: close some arrays, or make fewer and larger ones"
            )));
        }
        ledger.accounts.lend(&self.limits, origin, bytes)?;
        let mut kept = None;
        if let Some(tier) = &self.tier {
            // Unlocked, since the tier may wait for memory.
            let answer = MutexGuard::unlocked(&mut ledger, || tier.keep_for(bytes));
            let asked = bytes;
            // Meanwhile the session may have ended, or have asked again.
            let early = match (answer, ledger.known(session).err()) {
                (_, Some(ended)) => Some(Err(ended)),
                (_, None) if ledger.asks_to_leave => Some(Err(Refusal::Draining)),
                (Err(available), None) => {
                    let limit = Limit::Memory(tier.memory_bytes());
                    Some(Err(Refusal::Full {
                        asked,
                        available,
                        limit,
                    }))
                }
                (Ok(room), None) => {
                    kept = Some(room);
                    ledger.granted(session, serial).map(Ok)
                }
            };
            if let Some(answer) = early {
                ledger.accounts.take_extent_off(origin, bytes);
                return answer;
            }
        }
        // Making the file and its mapping costs microseconds whatever its size: no page of it
        // exists before the first WRITE.
        let id = ExtentId(ledger.extents_ever + 1);
        let made = self.make_memory(id, bytes, atomics);
        let memory = match made {
            Ok(memory) => memory,
            Err(error) => {
                ledger.accounts.take_extent_off(origin, bytes);
                drop(ledger);
                let refusal = Refusal::Invalid(format!(
                    "the server cannot make an extent of {bytes} bytes: {error}"
                ));
                later(move || warn!(%session, bytes, %error, "cannot make an extent"));
                return Err(refusal);
            }
        };
        let memory = match self.tier.as_ref().zip(kept) {
            Some((tier, kept)) => {
                let origin = Some(origin);
                tier.adopt(&memory, Tenant { session, origin }, kept)
            }
            None => memory,
        };
        ledger.extents_ever += 1;
        ledger.extents.insert(
            id,
            ExtentRecord {
                memory: memory.clone(),
                lessee: Some(session),
                name: None,
                origin,
                mapped_by,
                views: 0,
                pins: 0,
                mapped_to_read: false,
            },
        );
        let record = ledger.known(session)?;
        record.extents.insert(id);
        record.remember(serial, Given::Extent(id));
        self.leases.insert(id, session, memory.clone());
        drop(ledger);
        later(move || debug!(%session, extent = %id, bytes, "extent granted"));
        Ok(memory)
    }

    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let holder = ledger.known(session)?;
        if holder.views.remove(&extent) {
            let freed = self.end_view(&mut ledger, extent);
            drop(ledger);
            self.give_back(freed);
            return Ok(());
        }
        if !holder.extents.remove(&extent) {
            return Err(Refusal::NotLeased(extent));
        }
        let leaving = self.end_lease(&mut ledger, extent);
        ledger.extent_released(extent);
        drop(ledger);
        self.give_back([leaving]);
        Ok(())
    }

    fn extent(&self, session: SessionId, extent: ExtentId) -> Option<Arc<ExtentMemory>> {
        self.leases.get(session, extent)
    }

    fn identify(&self, session: SessionId, key: PublicKey) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        match &mut ledger.known(session)?.key {
            Some(other) if *other != key => Err(Refusal::Invalid(
                "this session belongs to another key already".to_owned(),
            )),
            place => {
                *place = Some(key);
                Ok(())
            }
        }
    }

    fn claim(&self, session: SessionId, name: &str, replace: bool) -> Result<ClaimedName, Refusal> {
        self.reclaim(session, charge_of_name(0));
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        self.wait_name(&mut ledger, &id)?;
        ledger.claim(&self.limits, session, name, replace)
    }

    fn disclaim(&self, session: SessionId, name: &str) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        ledger.disclaim(session, &id);
        Ok(())
    }

    fn persist(
        &self,
        session: SessionId,
        name: &str,
        ranges: &[ExtentRange],
        wait: bool,
    ) -> Result<bool, Refusal> {
        self.persist_ranges(session, name, ranges, wait)
    }

    fn promise(&self, session: SessionId, name: &str, epoch: Epoch) -> Result<(), Refusal> {
        self.promise_name(session, name, epoch)
    }

    fn bind(
        &self,
        session: SessionId,
        name: &str,
        proposal: Proposal<'_>,
    ) -> Result<Bound, Refusal> {
        self.bind_name(session, name, proposal)
    }

    fn open(
        &self,
        session: SessionId,
        name: &str,
        serial: Option<u64>,
    ) -> Result<OpenedRegion, Refusal> {
        let ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        if ledger.given(session, serial) == Some(Given::Name(id.clone()))
            && let Some(opened) = ledger.opened(session, &id)
        {
            return Ok(opened);
        }
        drop(ledger);
        // Memory that was let go of meanwhile makes room for the extents that are taken over.
        self.sweep();
        let mut ledger = self.free_and_private(session, &id)?;
        let record = ledger.known(session)?;
        let held_extents = record.extents.len() + record.views.len();
        let (origin, mapped_by) = (record.origin, record.maps_as());
        let record = &ledger.names[&id];
        if held_extents + record.extents.len() > self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "the region has {} extents and this client holds {held_extents} already, more than {} together: close some arrays",
                record.extents.len(),
                self.limits.extents_per_session
            )));
        }
        // Extents that were published from elsewhere are this client's from now on.
        let ids = record.extents.clone();
        let moving: Vec<u64> = (ids.iter())
            .map(|id| &ledger.extents[id])
            .filter(|extent| extent.origin != origin)
            .map(|extent| charge_of(extent.memory.bytes()))
            .collect();
        let (extents, bytes) = (moving.len(), moving.iter().sum());
        (ledger.accounts).may_take_over(&self.limits, origin, extents, bytes)?;
        let record = ledger.names.get_mut(&id).expect("looked up above");
        record.holder = Some(session);
        for id in &ids {
            let record = ledger
                .extents
                .get_mut(id)
                .expect("a name keeps its extents");
            record.lessee = Some(session);
            record.memory = record.memory.lease_anew();
            if let Some(tier) = &self.tier {
                let origin = Some(origin);
                tier.assign(*id, Tenant { session, origin });
            }
            record.mapped_by = record.mapped_by.or(mapped_by);
            let before = std::mem::replace(&mut record.origin, origin);
            let bytes = record.memory.bytes();
            self.leases.insert(*id, session, record.memory.clone());
            ledger.accounts.take_extent_off(before, bytes);
            ledger.accounts.put_extent_on(origin, bytes);
        }
        let holder = ledger.known(session)?;
        holder.extents.extend(ids);
        holder.names.insert(id.clone());
        holder.remember(serial, Given::Name(id.clone()));
        let opened = ledger.opened(session, &id).expect("opened just now");
        drop(ledger);
        let (name, extents) = (name.to_owned(), opened.extents.len());
        later(move || info!(%session, name, extents, "named region opened"));
        Ok(opened)
    }

    fn read(
        &self,
        session: SessionId,
        name: &str,
        serial: Option<u64>,
    ) -> Result<OpenedVersion, Refusal> {
        self.begin_reading(session, name, serial)
    }

    fn readers(&self, session: SessionId, name: &str) -> Result<Versions, Refusal> {
        self.read_versions(session, name)
    }

    fn remove(&self, asker: Asker, name: &str, owner: Option<PublicKey>) -> Result<(), Refusal> {
        self.remove_name(asker, name, owner)
    }

    fn names(
        &self,
        asker: Asker,
        after: Option<(PublicKey, String)>,
    ) -> Result<Vec<NamedRegion>, Refusal> {
        let ledger = self.ledger.lock();
        let key = ledger.key_of(asker)?;
        let of = (!self.limits.operators.contains(&key)).then_some(key);
        Ok(ledger.list(of, after, |record| self.durability(record)))
    }

    fn report_contents(
        &self,
        session: SessionId,
        plain_bytes: u64,
        stored_bytes: u64,
    ) -> Result<(), Refusal> {
        self.ledger.lock().known(session)?.contents = [plain_bytes, stored_bytes];
        Ok(())
    }

    fn stat(&self) -> ServerStat {
        self.sweep();
        let retained = self.retained.lock();
        let retained_bytes = retained.iter().map(Retained::charge).sum();
        let ledger = self.ledger.lock();
        // Clients report any numbers: sums must not overflow.
        let held = |i: usize| {
            (ledger.sessions.values())
                .fold(0u64, |sum, record| sum.saturating_add(record.contents[i]))
        };
        let (logical_bytes, stored_bytes) = (held(0), held(1));
        let [readers, old_versions] = ledger.readings.sums();
        let extents = ledger.extents.values();
        let mut memories: Vec<_> = extents.map(|extent| extent.memory.file()).collect();
        memories.extend(retained.iter().map(Retained::file));
        let tier = self.tier.as_ref();
        let stat = ServerStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            draining: ledger.draining,
            capacity_bytes: match ledger.asks_to_leave {
                true => 0,
                false => self.limits.capacity_bytes,
            },
            granted_bytes: ledger.accounts.all().bytes,
            sessions: ledger.connected() as u64,
            lost_sessions: (ledger.sessions.len() - ledger.connected()) as u64,
            clients: ledger.clients(),
            extents: ledger.extents.len() as u64,
            named_regions: ledger.named_regions(),
            logical_bytes,
            stored_bytes,
            retained_bytes,
            readers,
            old_versions,
            tiers: tier.map_or_else(Default::default, |tier| tier.stat()),
            shares: tier.map_or_else(Vec::new, |tier| tier.shares()),
            persist: PersistStat {
                damaged_names: ledger.damaged_names(),
                ..PersistStat::default()
            },
            ..ServerStat::default()
        };
        drop(ledger);
        drop(retained);
        // A system call for each extent.
        let resident = memories.iter().map(ExtentFile::resident_bytes);
        ServerStat {
            resident_bytes: resident.sum(),
            persist: self
                .durable
                .as_ref()
                .map_or_else(Default::default, |durable| PersistStat {
                    directory: durable.directory().to_owned(),
                    disk_bytes: durable.disk_bytes(),
                    written_bytes: durable.written_bytes(),
                    error: durable.broken().unwrap_or_default(),
                    ..stat.persist
                }),
            ..stat
        }
    }
}

impl State {
    fn admission(&self, session: SessionId, secret: Secret, lease: Duration) -> Admission {
        Admission {
            session,
            secret,
            lease,
            paged: self.tier.is_some(),
            persistence: (self.durable.as_ref()).map_or(Persistence::Never, DurableNames::when),
        }
    }

    /// Makes zeroed memory that a tier can adopt, if there is one.
    pub(super) fn make_memory(
        &self,
        id: ExtentId,
        bytes: u64,
        atomics: bool,
    ) -> std::io::Result<Arc<ExtentMemory>> {
        match &self.tier {
            Some(_) => ExtentMemory::create_with_marks(id, bytes, atomics),
            None => ExtentMemory::create(id, bytes, atomics),
        }
    }

    fn resume(
        &self,
        id: SessionId,
        secret: &Secret,
        transport: Transport,
        peer: &Peer,
    ) -> Result<Admission, Refusal> {
        let mut ledger = self.ledger.lock();
        let session = ledger.known(id)?;
        let address = peer.name.clone();
        if session.secret != *secret {
            drop(ledger);
            later(move || {
                warn!(session = %id, address, "a client tried to resume a session with a wrong secret");
            });
            return Err(Refusal::NoSession);
        }
        // A client that maps its extents is charged for what it keeps: no change to or from shm.
        if (session.transport == Transport::Shm) != (transport == Transport::Shm) {
            drop(ledger);
            later(move || {
                warn!(session = %id, address, ?transport, "a client tried to resume a session elsewhere");
            });
            return Err(Refusal::NoSession);
        }
        session.renewed = Instant::now();
        session.connections += 1;
        session.lost = None;
        session.address.clone_from(&address);
        let (secret, client, lease) = (session.secret, session.client.clone(), session.lease);
        drop(ledger);
        later(move || info!(session = %id, client, address, "session resumed"));
        Ok(self.admission(id, secret, lease))
    }
}

/// Makes a secret that cannot be guessed, from the kernel's random generator.
fn new_secret() -> Result<Secret, Refusal> {
    let mut bytes = [0; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(Secret(bytes)),
        Err(error) => Err(Refusal::Invalid(format!(
            "the server cannot make a secret: {error}"
        ))),
    }
}
