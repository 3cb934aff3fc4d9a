//! Who may have which memory: the daemon's side of [`Host`].
//!
//! The rule it keeps: every byte that is granted belongs to exactly one session or one published name, and is given
//! back when the last of both lets go. Memory is always fresh: an extent is a new sealed file that reads as zeros, and
//! freeing it closes the file, so nobody sees what another client left behind.
//!
//! Two structures. The *ledger*, under one lock, is the truth: sessions, extents, names, sums; only control messages
//! and the reaper come here. The *leases* are what a READ or WRITE looks at: extent to owner and memory, in
//! shards that are only read-locked, and written while the ledger is held, so that both never disagree for long.
//! The downside: control messages of all clients take turns. They are rare, and none of them does I/O while it holds the lock.
//!
//! Left to others: sockets and frames (`farpage_fabric::server`), when to stop ([`crate::Server`]).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Admission, Asker, Host, Opened, Refusal, Transport},
    memory::ExtentMemory,
    server::Lines,
};
use farpage_wire::{ExtentId, NamedRegion, PublicKey, Secret, ServerStat, SessionId};
use parking_lot::{Condvar, Mutex, RwLock};
use tracing::{debug, info, warn};

mod names;

use names::{NameId, NameRecord};

/// What a server may give away.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most bytes granted at any time, manifests of named regions included.
    pub capacity_bytes: u64,
    /// A session that is silent for so long ends.
    pub lease: Duration,
    /// The most extents that one session may hold: each costs the server a descriptor and a mapping.
    pub extents_per_session: usize,
    /// The most extents altogether.
    pub extents: usize,
    /// The most sessions at once.
    pub sessions: usize,
    /// Keys whose holders may list and remove all names.
    pub operators: Vec<PublicKey>,
}

/// A connection that waits for its client looks once a second whether its leases have ended; this is a second more.
const QUIET: Duration = Duration::from_secs(2);
/// What an extent takes, whatever its length: whole pages of the server's memory.
const PAGE_BYTES: u64 = 4096;

/// The state of one server; see the module's text.
pub struct State {
    limits: Limits,
    started: Instant,
    leases: Leases,
    lines: Lines,
    ledger: Mutex<Ledger>,
    /// Signalled when a session ends, for those who wait for the last one.
    ended: Condvar,
}

#[derive(Default)]
struct Ledger {
    sessions: HashMap<SessionId, SessionRecord>,
    extents: HashMap<ExtentId, ExtentRecord>,
    names: BTreeMap<NameId, NameRecord>,
    granted_bytes: u64,
    sessions_ever: u64,
    extents_ever: u64,
    draining: bool,
    /// When the reaper last looked; a long gap means that this process did not run, not that the clients were silent.
    reaped: Option<Instant>,
}

struct SessionRecord {
    client: String,
    secret: Secret,
    transport: Transport,
    renewed: Instant,
    extents: HashSet<ExtentId>,
    names: HashSet<NameId>,
    /// Whose the names are that it uses, once its client has shown its key.
    key: Option<PublicKey>,
    /// Bytes of the pages that it keeps, and bytes that they take, as it says.
    held: [u64; 2],
}

struct ExtentRecord {
    memory: Arc<ExtentMemory>,
    lessee: Option<SessionId>,
    /// At most one: two names with one extent could be open in two sessions at once.
    name: Option<NameId>,
}

/// Memory on its way out. Unmapping gigabytes takes milliseconds, so it is [given back](give_back) after the ledger is unlocked.
type Freed = Vec<Arc<ExtentMemory>>;

/// Gives memory back to the system, also what a client over shared memory still maps.
fn give_back(freed: impl IntoIterator<Item = Arc<ExtentMemory>>) {
    for memory in freed {
        if let Err(error) = memory.punch() {
            warn!(extent = %memory.id(), %error, "an extent's memory stays for as long as a client maps it");
        }
    }
}

impl State {
    /// Nothing granted, nobody there.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            started: Instant::now(),
            leases: Leases::default(),
            lines: Lines::default(),
            ledger: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// From now on nobody new is admitted; sessions that are there go on.
    pub fn drain(&self) {
        self.ledger.lock().draining = true;
    }

    /// Waits until no session is left, or `deadline`. Returns how many are.
    pub fn wait_until_empty(&self, deadline: Instant) -> usize {
        let mut ledger = self.ledger.lock();
        while !ledger.sessions.is_empty()
            && !self.ended.wait_until(&mut ledger, deadline).timed_out()
        {}
        ledger.sessions.len()
    }

    /// Ends the sessions whose lease has run out at `now`. Returns how many.
    ///
    /// To be called several times per lease. If it was not, this process was stopped or starved, and renewals that
    /// clients sent in time may be unread: everyone gets a fresh lease then instead of losing memory through our fault.
    pub fn reap(&self, now: Instant) -> usize {
        let mut ledger = self.ledger.lock();
        let overslept = ledger
            .reaped
            .is_some_and(|before| now.saturating_duration_since(before) > self.limits.lease / 2);
        ledger.reaped = Some(now);
        if overslept {
            warn!("this server did not run for a while: all leases start anew");
            ledger
                .sessions
                .values_mut()
                .for_each(|session| session.renewed = now);
            return 0;
        }
        let lease = self.limits.lease;
        let silent: Vec<SessionId> = ledger
            .sessions
            .iter()
            .filter(|(_, session)| now.saturating_duration_since(session.renewed) > lease)
            .map(|(id, _)| *id)
            .collect();
        let freed: Vec<Freed> = silent
            .iter()
            .map(|id| self.end(&mut ledger, *id, "its lease ran out"))
            .collect();
        drop(ledger);
        freed.into_iter().for_each(give_back);
        silent.len()
    }

    /// Ends a session: what it leased is freed, unless a published name still refers to it.
    fn end(&self, ledger: &mut Ledger, id: SessionId, why: &str) -> Freed {
        let Some(session) = ledger.sessions.remove(&id) else {
            return Freed::new();
        };
        let (client, held_extents) = (session.client, session.extents.len());
        for name in &session.names {
            ledger.let_go_of(name);
        }
        let freed: Freed = session
            .extents
            .iter()
            .filter_map(|extent| self.let_go(ledger, *extent))
            .collect();
        info!(session = %id, client, held_extents, freed_extents = freed.len(), "session ended: {why}");
        self.ended.notify_all();
        freed
    }

    /// Takes an extent from its lessee; returns its memory if no name keeps it.
    fn let_go(&self, ledger: &mut Ledger, id: ExtentId) -> Option<Arc<ExtentMemory>> {
        let record = ledger
            .extents
            .get_mut(&id)
            .expect("a session holds only extents that exist");
        record.lessee = None;
        // The data connections that hold this handle in mid-operation stop, too.
        record.memory.revoke();
        let named = record.name.is_some();
        self.leases.remove(id);
        if named {
            None
        } else {
            ledger.forget_extent(id)
        }
    }

    /// Waits for operations that began under an earlier lease of the name's extents and have not ended: a late WRITE
    /// must not land among the next holder's bytes, nor a late READ see them. False when they do not end in time.
    fn is_quiet(&self, name: &NameId) -> bool {
        let until = Instant::now() + QUIET;
        loop {
            let ledger = self.ledger.lock();
            let free = ledger
                .names
                .get(name)
                .filter(|record| record.holder.is_none());
            // Nobody leases these handles: each beyond the ledger's own belongs to an operation.
            let is_busy = free.is_some_and(|record| {
                let mut extents = record.extents.iter();
                extents.any(|id| Arc::strong_count(&ledger.extents[id].memory) > 1)
            });
            drop(ledger);
            if !is_busy || Instant::now() >= until {
                return !is_busy;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn known(ledger: &mut Ledger, id: SessionId) -> Result<&mut SessionRecord, Refusal> {
        ledger.sessions.get_mut(&id).ok_or(Refusal::NoSession)
    }

    /// Takes `bytes` out of what is available, or says how much is.
    fn charge(&self, ledger: &mut Ledger, bytes: u64) -> Result<(), Refusal> {
        let available = self
            .limits
            .capacity_bytes
            .saturating_sub(ledger.granted_bytes);
        if bytes > available {
            return Err(Refusal::Full {
                asked: bytes,
                available,
            });
        }
        ledger.granted_bytes += bytes;
        Ok(())
    }

    fn resume(
        &self,
        ledger: &mut Ledger,
        id: SessionId,
        secret: &Secret,
    ) -> Result<Admission, Refusal> {
        let session = Self::known(ledger, id)?;
        if session.secret != *secret {
            warn!(session = %id, "a client tried to resume a session with a wrong secret");
            return Err(Refusal::NoSession);
        }
        session.renewed = Instant::now();
        info!(session = %id, client = session.client, "session resumed");
        Ok(Admission {
            session: id,
            secret: session.secret,
            lease: self.limits.lease,
        })
    }
}

impl Ledger {
    /// Removes an extent that nobody leases and no name refers to, and gives its bytes back to the capacity.
    fn forget_extent(&mut self, id: ExtentId) -> Option<Arc<ExtentMemory>> {
        let record = self.extents.remove(&id)?;
        self.granted_bytes -= charge_of(record.memory.bytes());
        Some(record.memory)
    }
}

impl Host for State {
    fn admit(
        &self,
        client: &str,
        transport: Transport,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        let mut ledger = self.ledger.lock();
        if let Some((id, secret)) = resume {
            return self.resume(&mut ledger, id, &secret);
        }
        if ledger.draining {
            return Err(Refusal::Draining);
        }
        if ledger.sessions.len() >= self.limits.sessions {
            return Err(Refusal::Invalid(format!(
                "{} clients are connected, which is this server's limit",
                self.limits.sessions
            )));
        }
        ledger.sessions_ever += 1;
        let id = SessionId(ledger.sessions_ever);
        let secret = new_secret()?;
        let record = SessionRecord {
            client: client.to_owned(),
            secret,
            transport,
            renewed: Instant::now(),
            extents: HashSet::new(),
            names: HashSet::new(),
            key: None,
            held: [0; 2],
        };
        ledger.sessions.insert(id, record);
        info!(session = %id, client, ?transport, "session begun");
        Ok(Admission {
            session: id,
            secret,
            lease: self.limits.lease,
        })
    }

    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        match Self::known(&mut ledger, session)?.secret == *secret {
            true => Ok(()),
            false => Err(Refusal::NoSession),
        }
    }

    fn lines(&self) -> &Lines {
        &self.lines
    }

    fn renew(&self, session: SessionId) -> Result<(), Refusal> {
        Self::known(&mut self.ledger.lock(), session)?.renewed = Instant::now();
        Ok(())
    }

    fn lost(&self, session: SessionId) {
        let mut ledger = self.ledger.lock();
        let Ok(record) = Self::known(&mut ledger, session) else {
            return;
        };
        let freed = match record.transport {
            Transport::Shm => self.end(
                &mut ledger,
                session,
                "its connection closed without a goodbye",
            ),
            Transport::Tcp | Transport::Rdma => {
                info!(session = %session, client = record.client, "connection lost: the client may return within its lease");
                Freed::new()
            }
        };
        drop(ledger);
        give_back(freed);
    }

    fn close(&self, session: SessionId) {
        let mut ledger = self.ledger.lock();
        let freed = self.end(&mut ledger, session, "the client closed it");
        drop(ledger);
        give_back(freed);
    }

    fn grant(&self, session: SessionId, bytes: u64) -> Result<Arc<ExtentMemory>, Refusal> {
        let mut ledger = self.ledger.lock();
        let held_extents = Self::known(&mut ledger, session)?.extents.len();
        if bytes == 0 {
            return Err(Refusal::Invalid(
                "an extent of 0 bytes was asked for".to_owned(),
            ));
        }
        if held_extents >= self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "this client holds {held_extents} extents, the most that one client may: release some or ask for larger ones"
            )));
        }
        if ledger.extents.len() >= self.limits.extents {
            return Err(Refusal::Invalid(format!(
                "this server holds {} extents, its most: ask for larger ones, or raise its limit of open files",
                self.limits.extents
            )));
        }
        self.charge(&mut ledger, charge_of(bytes))
            .map_err(|full| match full {
                Refusal::Full { available, .. } => Refusal::Full {
                    asked: bytes,
                    available,
                },
                other => other,
            })?;
        // Making the file and its mapping costs microseconds whatever its size: no page of it exists before the first WRITE.
        let id = ExtentId(ledger.extents_ever + 1);
        let memory = match ExtentMemory::create(id, bytes) {
            Ok(memory) => memory,
            Err(error) => {
                ledger.granted_bytes -= charge_of(bytes);
                drop(ledger);
                warn!(session = %session, bytes, %error, "cannot make an extent");
                return Err(Refusal::Invalid(format!(
                    "the server cannot make an extent of {bytes} bytes: {error}"
                )));
            }
        };
        ledger.extents_ever += 1;
        ledger.extents.insert(
            id,
            ExtentRecord {
                memory: memory.clone(),
                lessee: Some(session),
                name: None,
            },
        );
        Self::known(&mut ledger, session)?.extents.insert(id);
        self.leases.insert(id, session, memory.clone());
        debug!(session = %session, extent = %id, bytes, "extent granted");
        Ok(memory)
    }

    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        if !Self::known(&mut ledger, session)?.extents.remove(&extent) {
            return Err(Refusal::NotLeased(extent));
        }
        let freed = self.let_go(&mut ledger, extent);
        ledger.let_go_of_name(extent);
        drop(ledger);
        give_back(freed);
        Ok(())
    }

    fn extent(&self, session: SessionId, extent: ExtentId) -> Option<Arc<ExtentMemory>> {
        self.leases.get(session, extent)
    }

    fn identify(&self, session: SessionId, key: PublicKey) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        match &mut Self::known(&mut ledger, session)?.key {
            Some(other) if *other != key => Err(Refusal::Invalid(
                "this session belongs to another key already".to_owned(),
            )),
            place => {
                *place = Some(key);
                Ok(())
            }
        }
    }

    fn claim(&self, session: SessionId, name: &str, replace: bool) -> Result<(), Refusal> {
        self.ledger.lock().claim(session, name, replace)
    }

    fn disclaim(&self, session: SessionId, name: &str) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        ledger.disclaim(session, &id);
        Ok(())
    }

    fn publish(
        &self,
        session: SessionId,
        name: &str,
        manifest: Vec<u8>,
        extents: &[ExtentId],
    ) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        // 1. Everything that can be refused, before anything changes: the old binding stays whole.
        let id = ledger.name_of(session, name)?;
        let held = &ledger.sessions[&session].extents;
        if let Some(stranger) = extents.iter().find(|id| !held.contains(id)) {
            return Err(Refusal::NotLeased(*stranger));
        }
        let distinct: HashSet<ExtentId> = extents.iter().copied().collect();
        for extent in &distinct {
            let bound = ledger.extents[extent].name.as_ref();
            if let Some(other) = bound.filter(|other| **other != id) {
                return Err(Refusal::Invalid(format!(
                    "extent {extent} belongs to the named region {:?} already",
                    other.name
                )));
            }
        }
        ledger.may_bind(session, &id)?;
        let old_manifest_bytes = ledger.manifest_bytes(&id);
        ledger.granted_bytes -= old_manifest_bytes;
        if let Err(full) = self.charge(&mut ledger, manifest.len() as u64) {
            ledger.granted_bytes += old_manifest_bytes;
            return Err(full);
        }
        // 2. The new binding, and what only the old one kept.
        let extents = distinct.len();
        let freed = ledger.bind(session, id, manifest, distinct);
        drop(ledger);
        give_back(freed);
        debug!(session = %session, name, extents, "named region published");
        Ok(())
    }

    fn open(&self, session: SessionId, name: &str) -> Result<Opened, Refusal> {
        let id = self.ledger.lock().name_of(session, name)?;
        if !self.is_quiet(&id) {
            return Err(Refusal::InUse);
        }
        let mut ledger = self.ledger.lock();
        let held_extents = Self::known(&mut ledger, session)?.extents.len();
        let Some(record) = ledger.names.get_mut(&id) else {
            return Err(Refusal::NotFound);
        };
        if record.holder.is_some() {
            return Err(Refusal::InUse);
        }
        if held_extents + record.extents.len() > self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "the region has {} extents and this client holds {held_extents} already, more than {} together: release some",
                record.extents.len(),
                self.limits.extents_per_session
            )));
        }
        record.holder = Some(session);
        let manifest = record.manifest.clone().unwrap_or_default();
        let ids = record.extents.clone();
        let mut extents = Vec::with_capacity(ids.len());
        for id in &ids {
            let record = ledger
                .extents
                .get_mut(id)
                .expect("a name keeps its extents");
            record.lessee = Some(session);
            record.memory = record.memory.lease_anew();
            self.leases.insert(*id, session, record.memory.clone());
            extents.push(record.memory.clone());
        }
        let holder = Self::known(&mut ledger, session)?;
        holder.extents.extend(ids);
        holder.names.insert(id);
        info!(session = %session, name, extents = extents.len(), "named region opened");
        Ok(Opened { manifest, extents })
    }

    fn remove(&self, asker: Asker, name: &str, owner: Option<PublicKey>) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        let key = ledger.key_of(asker)?;
        let owner = owner.unwrap_or(key);
        if owner != key && !self.limits.operators.contains(&key) {
            return Err(Refusal::NotFound);
        }
        let id = NameId::new(owner, name);
        let freed = ledger.remove(asker, &id)?;
        drop(ledger);
        give_back(freed);
        info!(%owner, name, "named region removed");
        Ok(())
    }

    fn names(
        &self,
        asker: Asker,
        after: Option<(PublicKey, String)>,
    ) -> Result<Vec<NamedRegion>, Refusal> {
        let ledger = self.ledger.lock();
        let key = ledger.key_of(asker)?;
        let of = (!self.limits.operators.contains(&key)).then_some(key);
        Ok(ledger.list(of, after))
    }

    fn hold(&self, session: SessionId, plain_bytes: u64, stored_bytes: u64) -> Result<(), Refusal> {
        Self::known(&mut self.ledger.lock(), session)?.held = [plain_bytes, stored_bytes];
        Ok(())
    }

    fn stat(&self) -> ServerStat {
        let ledger = self.ledger.lock();
        // Clients say what they like: no sum of it may overflow.
        let held = |i: usize| {
            (ledger.sessions.values()).fold(0u64, |sum, record| sum.saturating_add(record.held[i]))
        };
        let (logical_bytes, stored_bytes) = (held(0), held(1));
        let resident_bytes = ledger
            .extents
            .values()
            .map(|extent| extent.memory.resident_bytes())
            .sum();
        ServerStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            draining: ledger.draining,
            capacity_bytes: self.limits.capacity_bytes,
            granted_bytes: ledger.granted_bytes,
            resident_bytes,
            sessions: ledger.sessions.len() as u64,
            extents: ledger.extents.len() as u64,
            named_regions: ledger.named_regions(),
            logical_bytes,
            stored_bytes,
            ..ServerStat::default()
        }
    }
}

/// What an extent of so many bytes takes out of the capacity.
fn charge_of(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(PAGE_BYTES)
        .unwrap_or(u64::MAX)
}

/// Guessing it must be hopeless: it comes from the kernel's random generator.
fn new_secret() -> Result<Secret, Refusal> {
    let mut bytes = [0; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(Secret(bytes)),
        Err(error) => Err(Refusal::Invalid(format!(
            "the server cannot make a secret: {error}"
        ))),
    }
}

/// Enough that threads of a large machine rarely meet in one; each is a lock and a small table.
const SHARDS: usize = 64;

type Shard = RwLock<HashMap<ExtentId, (SessionId, Arc<ExtentMemory>)>>;

/// Extent to owner and memory, for the data path.
struct Leases {
    shards: [Shard; SHARDS],
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::default()),
        }
    }
}

impl Leases {
    fn shard(&self, id: ExtentId) -> &Shard {
        // Ids are handed out one after the other, which spreads them evenly.
        &self.shards[(id.0 % SHARDS as u64) as usize]
    }

    fn get(&self, session: SessionId, id: ExtentId) -> Option<Arc<ExtentMemory>> {
        let shard = self.shard(id).read();
        let (owner, memory) = shard.get(&id)?;
        (*owner == session).then(|| memory.clone())
    }

    fn insert(&self, id: ExtentId, session: SessionId, memory: Arc<ExtentMemory>) {
        self.shard(id).write().insert(id, (session, memory));
    }

    fn remove(&self, id: ExtentId) {
        self.shard(id).write().remove(&id);
    }
}

#[cfg(test)]
mod tests;
