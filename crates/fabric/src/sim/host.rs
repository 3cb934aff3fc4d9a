//! [`SimHost`]: lends memory without a policy.
//!
//! The rule it keeps: extents live as long as a lease, a name or a reader.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use farpage_wire::{
    Durability, ExtentId, Limit, NamedRegion, Persistence, PublicKey, Refusal, Secret, ServerId,
    ServerStat, SessionId,
    control::NAMES_PER_ANSWER,
    register::{Epoch, Register},
};
use parking_lot::Mutex;

use crate::{
    host::{
        Admission, Asker, Bound, ClaimedName, Host, OpenedRegion, OpenedVersion, Peer, Proposal,
        Transport, VersionRead, Versions,
    },
    memory::ExtentMemory,
};

/// Number of the next host: its identity.
static HOSTS: AtomicU64 = AtomicU64::new(1);

/// The plainest [`Host`]: all clients are admitted, names belong to all, and leases do not expire.
/// For simulations and for tests of transports.
#[derive(Debug)]
pub struct SimHost {
    id: ServerId,
    capacity_bytes: u64,
    state: Mutex<SimState>,
}

#[derive(Debug, Default)]
struct SimState {
    last_id: u64,
    sessions: HashMap<SessionId, Transport>,
    extents: HashMap<ExtentId, SimExtent>,
    names: HashMap<String, SimName>,
    views: HashMap<ExtentId, SimView>,
}

#[derive(Debug)]
struct SimExtent {
    memory: Arc<ExtentMemory>,
    owner: Option<SessionId>,
    names: usize,
}

#[derive(Debug, Default)]
struct SimName {
    /// Manifest, or `None` while the name is only claimed.
    manifest: Option<Vec<u8>>,
    extents: Vec<ExtentId>,
    claimed_by: Option<SessionId>,
    version: u64,
    register: Register,
}

impl SimName {
    fn is_published(&self) -> bool {
        self.manifest.is_some() && !self.register.is_removed()
    }
}

/// A lease to read an extent of a version.
#[derive(Debug)]
struct SimView {
    of: ExtentId,
    reader: SessionId,
    /// Number of the reading that the view belongs to.
    reading: u64,
    name: String,
    version: u64,
    memory: Arc<ExtentMemory>,
}

impl SimHost {
    /// Makes a host that grants up to `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            id: ServerId(HOSTS.fetch_add(1, Ordering::Relaxed).into()),
            capacity_bytes,
            state: Mutex::default(),
        }
    }

    /// Returns the memory of an extent, whichever client leases it, for threads of the server.
    pub fn memory(&self, extent: ExtentId) -> Option<Arc<ExtentMemory>> {
        let state = self.state.lock();
        Some(Arc::clone(&state.extents.get(&extent)?.memory))
    }
}

impl SimState {
    fn known(&self, session: SessionId) -> Result<(), Refusal> {
        let is_known = self.sessions.contains_key(&session);
        is_known.then_some(()).ok_or(Refusal::NoSession)
    }

    /// Checks that `secret` is the session's own.
    fn proved(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        self.known(session)?;
        let is_own = *secret == secret_of(session);
        is_own.then_some(()).ok_or(Refusal::NoSession)
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn owned(&self, session: SessionId, id: ExtentId) -> Result<&Arc<ExtentMemory>, Refusal> {
        match self.extents.get(&id) {
            Some(extent) if extent.owner == Some(session) => Ok(&extent.memory),
            _ => Err(Refusal::NotLeased(id)),
        }
    }

    fn granted_bytes(&self) -> u64 {
        let extents = self.extents.values();
        extents.map(|extent| extent.memory.bytes()).sum()
    }

    /// Returns the published version of a name, and the older ones that are read.
    fn versions(&self, name: &str) -> Versions {
        let published = self.names.get(name).map_or(0, |record| record.version);
        let old = self
            .readings(name)
            .filter(|(version, _)| *version != published);
        let mut read: Vec<VersionRead> = Vec::new();
        for (version, _) in old.collect::<BTreeSet<_>>() {
            match read.last_mut().filter(|last| last.version == version) {
                Some(last) => last.readers += 1,
                None => read.push(VersionRead {
                    version,
                    readers: 1,
                }),
            }
        }
        Versions { published, read }
    }

    /// Lists version and number of the readings of a name, a reading once for each of its views.
    fn readings(&self, name: &str) -> impl Iterator<Item = (u64, u64)> {
        let views = self.views.values().filter(move |view| view.name == name);
        views.map(|view| (view.version, view.reading))
    }

    /// Ends the leases to read that are over.
    fn end_views(&mut self, is_over: impl Fn(&ExtentId, &SimView) -> bool) {
        for (_, view) in self.views.extract_if(|id, view| is_over(id, view)) {
            view.memory.revoke();
            view.memory.deregister();
        }
        self.forget_extents();
    }

    /// Forgets extents without a lease, a name or a reader.
    fn forget_extents(&mut self) {
        let read: HashSet<_> = self.views.values().map(|view| view.of).collect();
        self.extents
            .retain(|id, extent| extent.owner.is_some() || extent.names > 0 || read.contains(id));
    }

    /// True if another session than `session` holds the name or one of its extents.
    fn in_use(&self, name: &SimName, session: SessionId) -> bool {
        self.holders(name).any(|holder| holder != session)
    }

    fn holders(&self, name: &SimName) -> impl Iterator<Item = SessionId> {
        let owner = |id| self.extents.get(id).and_then(|extent| extent.owner);
        name.claimed_by
            .into_iter()
            .chain(name.extents.iter().filter_map(owner))
    }

    fn disclaim(&mut self, session: SessionId, is_meant: impl Fn(&str) -> bool) {
        self.names.retain(|name, record| {
            if record.claimed_by == Some(session) && is_meant(name) {
                record.claimed_by = None;
            }
            record.manifest.is_some() || record.claimed_by.is_some()
        });
    }

    fn unlease(&mut self, id: ExtentId) {
        if let Some(extent) = self.extents.get_mut(&id) {
            extent.memory.revoke();
            extent.memory.deregister();
            extent.owner = None;
        }
        self.forget_extents();
    }

    fn end(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.disclaim(session, |_| true);
        let mine =
            |(id, extent): (&ExtentId, &SimExtent)| (extent.owner == Some(session)).then_some(*id);
        let held: Vec<_> = self.extents.iter().filter_map(mine).collect();
        held.into_iter().for_each(|id| self.unlease(id));
        self.end_views(|_, view| view.reader == session);
    }

    fn unname(&mut self, name: SimName) {
        for id in name.extents {
            let extent = self.extents.get_mut(&id).expect("a name keeps its extents");
            extent.names -= 1;
        }
        self.forget_extents();
    }
}

impl Host for SimHost {
    fn admit(
        &self,
        _client: &str,
        transport: Transport,
        _peer: &Peer,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        let mut state = self.state.lock();
        let session = match resume {
            Some((session, secret)) => state.proved(session, &secret).map(|()| session)?,
            None => SessionId(state.next_id()),
        };
        state.sessions.insert(session, transport);
        Ok(Admission {
            session,
            secret: secret_of(session),
            lease: Duration::from_secs(3),
            paged: false,
            persistence: Persistence::Never,
        })
    }

    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        self.state.lock().proved(session, secret)
    }

    fn renew(&self, session: SessionId) -> Result<(), Refusal> {
        self.state.lock().known(session)
    }

    fn lost(&self, session: SessionId) {
        let mut state = self.state.lock();
        if state.sessions.get(&session) == Some(&Transport::Shm) {
            state.end(session);
        }
    }

    fn close(&self, session: SessionId) {
        self.state.lock().end(session);
    }

    fn grant(
        &self,
        session: SessionId,
        bytes: u64,
        atomics: bool,
        _serial: Option<u64>,
    ) -> Result<Arc<ExtentMemory>, Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        let available = self.capacity_bytes - state.granted_bytes();
        if bytes > available {
            return Err(Refusal::Full {
                asked: bytes,
                available,
                limit: Limit::Capacity(self.capacity_bytes),
            });
        }
        let id = ExtentId(state.next_id());
        let memory = ExtentMemory::create(id, bytes, atomics)
            .map_err(|error| Refusal::Invalid(error.to_string()))?;
        let extent = SimExtent {
            memory: Arc::clone(&memory),
            owner: Some(session),
            names: 0,
        };
        state.extents.insert(id, extent);
        Ok(memory)
    }

    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        match state.views.get(&extent) {
            Some(view) if view.reader == session => state.end_views(|id, _| *id == extent),
            _ => {
                state.owned(session, extent)?;
                state.unlease(extent);
            }
        }
        Ok(())
    }

    fn extent(&self, session: SessionId, extent: ExtentId) -> Option<Arc<ExtentMemory>> {
        let state = self.state.lock();
        match state.views.get(&extent) {
            Some(view) if view.reader == session => Some(Arc::clone(&view.memory)),
            _ => state.owned(session, extent).ok().cloned(),
        }
    }

    fn identify(&self, session: SessionId, _key: PublicKey) -> Result<(), Refusal> {
        self.state.lock().known(session)
    }

    fn claim(&self, session: SessionId, name: &str, replace: bool) -> Result<ClaimedName, Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        if let Some(record) = state.names.get(name) {
            if state.in_use(record, session) {
                return Err(Refusal::InUse);
            }
            if record.is_published() && !replace {
                return Err(Refusal::Exists);
            }
        }
        let record = state.names.entry(name.to_owned()).or_default();
        record.claimed_by = Some(session);
        Ok(ClaimedName {
            vote: (self.id, record.register.clone()),
            is_bound: record.manifest.is_some(),
        })
    }

    fn disclaim(&self, session: SessionId, name: &str) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        state.disclaim(session, |other| other == name);
        Ok(())
    }

    fn promise(&self, session: SessionId, name: &str, epoch: Epoch) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        let record = state.names.get(name).ok_or(Refusal::NotFound)?;
        if !state.holders(record).any(|holder| holder == session) {
            return Err(Refusal::InUse);
        }
        let record = state.names.get_mut(name).expect("found above");
        let promised = record.register.promise(epoch);
        promised.map_err(|_| Refusal::Outdated)
    }

    fn bind(
        &self,
        session: SessionId,
        name: &str,
        proposal: Proposal<'_>,
    ) -> Result<Bound, Refusal> {
        let mut state = self.state.lock();
        let extents = proposal.extents;
        for id in extents {
            state.owned(session, *id)?;
        }
        let (mut claimed_by, mut register) = (None, Register::default());
        let mut kept = extents.to_vec();
        if let Some(old) = state.names.get(name) {
            if state.in_use(old, session) {
                return Err(Refusal::InUse);
            }
            if state.holders(old).next().is_none() {
                return Err(Refusal::Exists);
            }
            claimed_by = old.claimed_by;
            register = old.register.clone();
            if proposal.keeps {
                let only_old = old.extents.iter().filter(|id| !extents.contains(id));
                kept.extend(only_old);
            }
        }
        let bound = (state.names.get(name)).and_then(|old| old.manifest.as_ref());
        let stays = proposal.decide(&mut register, bound.is_some())?;
        let manifest = match bound.filter(|_| stays) {
            Some(bound) => bound.clone(),
            None => proposal.manifest,
        };
        for id in &kept {
            let extent = state.extents.get_mut(id);
            extent.expect("owned, or the name's").names += 1;
        }
        let keeps_more = kept.len() > extents.len();
        let new = SimName {
            manifest: Some(manifest),
            extents: kept,
            claimed_by,
            version: state.next_id(),
            register,
        };
        if let Some(old) = state.names.insert(name.to_owned(), new) {
            state.unname(old);
        }
        let versions = state.versions(name);
        Ok(Bound {
            versions,
            keeps_more,
        })
    }

    fn open(
        &self,
        session: SessionId,
        name: &str,
        _serial: Option<u64>,
    ) -> Result<OpenedRegion, Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        let named = state.names.get(name).ok_or(Refusal::NotFound)?;
        if state.holders(named).next().is_some() {
            return Err(Refusal::InUse);
        }
        let manifest = named.manifest.clone();
        let manifest = manifest.expect("bound, since nobody claims it");
        let vote = (self.id, named.register.clone());
        let mut extents = Vec::new();
        for id in named.extents.clone() {
            let extent = state.extents.get_mut(&id);
            let extent = extent.expect("a name keeps its extents");
            extent.owner = Some(session);
            extent.memory = extent.memory.lease_anew();
            extents.push(Arc::clone(&extent.memory));
        }
        Ok(OpenedRegion {
            manifest: Arc::new(manifest),
            extents,
            versions: state.versions(name),
            vote,
        })
    }

    fn read(
        &self,
        session: SessionId,
        name: &str,
        _serial: Option<u64>,
    ) -> Result<OpenedVersion, Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        let named = state.names.get(name).ok_or(Refusal::NotFound)?;
        let manifest = named.manifest.clone().ok_or(Refusal::NotFound)?;
        let vote = (self.id, named.register.clone());
        let (version, ids) = (named.version, named.extents.clone());
        let reading = state.next_id();
        let mut extents = Vec::new();
        for of in ids {
            let id = ExtentId(state.next_id());
            let memory = state.extents[&of].memory.view(id);
            extents.push((of, Arc::clone(&memory)));
            let view = SimView {
                of,
                reader: session,
                reading,
                name: name.to_owned(),
                version,
                memory,
            };
            state.views.insert(id, view);
        }
        Ok(OpenedVersion {
            manifest: Arc::new(manifest),
            extents,
            vote,
        })
    }

    fn readers(&self, session: SessionId, name: &str) -> Result<Versions, Refusal> {
        let state = self.state.lock();
        state.known(session)?;
        Ok(state.versions(name))
    }

    fn remove(&self, asker: Asker, name: &str, _owner: Option<PublicKey>) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let named = state.names.get(name).ok_or(Refusal::NotFound)?;
        let mut holders = state.holders(named);
        if holders.any(|holder| asker != Asker::Session(holder)) {
            return Err(Refusal::InUse);
        }
        drop(holders);
        let is_over = named.claimed_by.is_some() && named.register.is_removed();
        if matches!(asker, Asker::Session(_)) && named.register.is_shared() && !is_over {
            return Err(Refusal::Shared);
        }
        let named = state.names.remove(name).expect("seen above");
        state.unname(named);
        Ok(())
    }

    fn names(
        &self,
        _asker: Asker,
        after: Option<(PublicKey, String)>,
    ) -> Result<Vec<NamedRegion>, Refusal> {
        let state = self.state.lock();
        let bytes = |id| state.extents.get(id).map_or(0, |it| it.memory.bytes());
        let mut names: Vec<_> = (state.names.iter())
            .filter(|(name, record)| {
                record.is_published() && after.as_ref().is_none_or(|(_, after)| *name > after)
            })
            .map(|(name, record)| NamedRegion {
                owner: PublicKey([0; 32]),
                name: name.clone(),
                bytes: record.extents.iter().map(bytes).sum(),
                in_use: state.holders(record).next().is_some(),
                readers: state.readings(name).collect::<HashSet<_>>().len() as u64,
                old_versions: state.versions(name).read.len() as u64,
                durability: Durability::Memory,
            })
            .collect();
        names.sort_by(|a, b| a.name.cmp(&b.name));
        names.truncate(NAMES_PER_ANSWER);
        Ok(names)
    }

    fn stat(&self) -> ServerStat {
        let state = self.state.lock();
        ServerStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capacity_bytes: self.capacity_bytes,
            granted_bytes: state.granted_bytes(),
            resident_bytes: (state.extents.values())
                .map(|extent| extent.memory.resident_bytes())
                .sum(),
            sessions: state.sessions.len() as u64,
            extents: state.extents.len() as u64,
            named_regions: state.names.len() as u64,
            ..ServerStat::default()
        }
    }
}

/// Returns a secret that differs for each session. Guessable: enough where no client is hostile.
fn secret_of(session: SessionId) -> Secret {
    let mut bytes = [0x5a; 16];
    bytes[..8].copy_from_slice(&session.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Secret(bytes)
}
