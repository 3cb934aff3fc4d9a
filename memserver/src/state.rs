//! Who may have which memory: the daemon's side of [`Host`].
//!
//! The rule it keeps: every byte that is granted belongs to exactly one session or one published
//! name, and is given back when the last of both lets go. Memory is always fresh: an extent is a
//! new sealed file that reads as zeros, and freeing it closes the file, so nobody sees what another
//! client left behind. A published extent whose file another user was given is copied into a new
//! one when it is opened. What a client over shared memory gave back and did not let go of stays
//! [charged](retained) to it.
//!
//! Two structures. The *ledger*, under one lock, is the truth: sessions, extents, names, sums; only
//! control messages and the reaper come here. The *leases* are what a READ or WRITE looks at:
//! extent to owner and memory, in shards that are only read-locked, and written while the ledger is
//! held, so that both never disagree for long. The downside: control messages of all clients take
//! turns. They are rare, and none of them does I/O while it holds the lock.
//!
//! Left to others: sockets and frames (`farpage_fabric::server`), when to stop ([`crate::Server`]).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Admission, Asker, Host, Opened, Origin, Refusal, Transport},
    memory::{ExtentFile, ExtentMemory},
};
use farpage_wire::{ExtentId, NamedRegion, PublicKey, Secret, ServerStat, SessionId};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use tracing::{debug, info, warn};

mod accounts;
mod names;
mod retained;

use accounts::{Accounts, charge_of, charge_of_name};
use names::{NameId, NameRecord};
use retained::Retained;

/// What a server may give away.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The most bytes granted at any time, manifests of named regions included.
    pub capacity_bytes: u64,
    /// The most bytes granted to clients of one address, or over shared memory of one user,
    /// together.
    pub capacity_per_address: u64,
    /// A session that is silent for so long ends.
    pub lease: Duration,
    /// A session whose connection was closed without a goodbye, and that does not come back for so
    /// long, ends. Over shared memory it ends at once.
    pub reconnect_grace: Duration,
    /// The most extents that one session may hold: each costs the server a descriptor and a
    /// mapping.
    pub extents_per_session: usize,
    /// The most extents altogether.
    pub extents: usize,
    /// The most extents of clients of one address, or over shared memory of one user, together.
    pub extents_per_address: usize,
    /// The most sessions at once.
    pub sessions: usize,
    /// Keys whose holders may list and remove all names.
    pub operators: Vec<PublicKey>,
}

impl Limits {
    /// The shorter of the times after which sessions end.
    pub fn shortest(&self) -> Duration {
        self.lease.min(self.reconnect_grace)
    }
}

/// A connection that waits for its client looks once a second whether its leases have ended; this
/// is a second more.
const QUIET: Duration = Duration::from_secs(2);

/// The state of one server; see the module's text.
pub struct State {
    limits: Limits,
    started: Instant,
    leases: Leases,
    ledger: Mutex<Ledger>,
    retained: Mutex<Vec<Retained>>,
    /// Signalled when a session ends, for those who wait for the last one.
    ended: Condvar,
}

#[derive(Default)]
struct Ledger {
    sessions: HashMap<SessionId, SessionRecord>,
    extents: HashMap<ExtentId, ExtentRecord>,
    names: BTreeMap<NameId, NameRecord>,
    accounts: Accounts,
    sessions_ever: u64,
    extents_ever: u64,
    draining: bool,
    /// When the reaper last looked; a long gap means that this process did not run, not that the
    /// clients were silent.
    reaped: Option<Instant>,
}

struct SessionRecord {
    client: String,
    secret: Secret,
    transport: Transport,
    origin: Origin,
    /// Control connections that have not ended: a resumed session's old one may be noticed late.
    connections: usize,
    renewed: Instant,
    /// When its connection was closed without a goodbye, if it was.
    lost: Option<Instant>,
    extents: HashSet<ExtentId>,
    names: HashSet<NameId>,
    /// Whose the names are that it uses, once its client has shown its key.
    key: Option<PublicKey>,
    /// Bytes of the pages that it keeps, and bytes that they take, as it says.
    held: [u64; 2],
    /// The last request that had a number and gave something, and what.
    given: Option<(u64, Given)>,
}

/// What a request gave: not given twice where only the answer was lost.
#[derive(Clone, PartialEq, Eq)]
enum Given {
    Extent(ExtentId),
    Name(NameId),
}

struct ExtentRecord {
    memory: Arc<ExtentMemory>,
    lessee: Option<SessionId>,
    /// At most one: two names with one extent could be open in two sessions at once.
    name: Option<NameId>,
    /// Who its bytes are put on: where its last lessee connected from.
    origin: Origin,
    /// Who was given the memory's descriptor over shared memory, and may map it for ever.
    mapped_by: Option<Origin>,
}

/// Memory whose lease has ended. Adapters and the kernel take milliseconds to let gigabytes go, so
/// it is [given back](State::give_back) after the ledger is unlocked. Until then its handle keeps
/// others from [opening](State::free_and_quiet) the name that it belongs to.
struct Leaving {
    memory: Arc<ExtentMemory>,
    /// Whether a name keeps its bytes.
    is_kept: bool,
    /// Who it is still put on: a client that may have kept it.
    charged: Option<Origin>,
}

type Freed = Vec<Leaving>;

impl State {
    /// Nothing granted, nobody there.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            started: Instant::now(),
            leases: Leases::default(),
            ledger: Mutex::default(),
            retained: Mutex::default(),
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

    /// Ends the sessions whose lease has run out at `now`, or whose client is gone and has not come
    /// back. Returns how many.
    ///
    /// To be called several times per [shortest](Limits::shortest) time. If it was not, this
    /// process was stopped or starved, and renewals that clients sent in time may be unread:
    /// everyone gets a fresh lease then instead of losing memory through our fault.
    pub fn reap(&self, now: Instant) -> usize {
        let began = Instant::now();
        let mut ledger = self.ledger.lock();
        let overslept = ledger.reaped.is_some_and(|before| {
            now.saturating_duration_since(before) > self.limits.shortest() / 2
        });
        ledger.reaped = Some(now);
        if overslept {
            for session in ledger.sessions.values_mut() {
                session.renewed = now;
                session.lost = session.lost.map(|_| now);
            }
            drop(ledger);
            warn!("this server did not run for a while: all leases start anew");
            return 0;
        }
        let since = |then| now.saturating_duration_since(then);
        let why = |session: &SessionRecord| {
            let is_gone = |lost| since(lost) > self.limits.reconnect_grace;
            if session.lost.is_some_and(is_gone) {
                Some("its connection was closed without a goodbye, and it did not come back")
            } else {
                (since(session.renewed) > self.limits.lease).then_some("its lease ran out")
            }
        };
        let over: Vec<(SessionId, &str)> = (ledger.sessions.iter())
            .filter_map(|(id, session)| Some((*id, why(session)?)))
            .collect();
        let ended: Vec<Ended> = (over.iter())
            .filter_map(|(id, why)| self.end(&mut ledger, *id, why))
            .collect();
        drop(ledger);
        let count = ended.len();
        // All together: what is kept of the last comes before what is freed of the first.
        self.give_back(ended.into_iter().flat_map(Ended::finish));
        self.sweep();
        // Our own work is no time in which this process did not run.
        self.ledger.lock().reaped = Some(now + began.elapsed());
        count
    }

    /// Ends a session: what it leased is freed, unless a published name still refers to it.
    fn end(&self, ledger: &mut Ledger, id: SessionId, why: &'static str) -> Option<Ended> {
        let session = ledger.sessions.remove(&id)?;
        ledger.accounts.end_session(session.origin);
        for name in &session.names {
            ledger.let_go_of(name);
        }
        let freed: Freed = session
            .extents
            .iter()
            .map(|extent| self.let_go(ledger, *extent))
            .collect();
        self.ended.notify_all();
        Some(Ended {
            id,
            client: session.client,
            held_extents: session.extents.len(),
            freed,
            why,
        })
    }

    /// Takes an extent from its lessee; forgets it if no name keeps it.
    fn let_go(&self, ledger: &mut Ledger, id: ExtentId) -> Leaving {
        let record = ledger
            .extents
            .get_mut(&id)
            .expect("a session holds only extents that exist");
        record.lessee = None;
        // The data connections that hold this handle in mid-operation stop, too.
        record.memory.revoke();
        let (memory, is_kept) = (record.memory.clone(), record.name.is_some());
        self.leases.remove(id);
        match is_kept {
            true => Leaving {
                memory,
                is_kept,
                charged: None,
            },
            false => ledger.forget_extent(id),
        }
    }

    /// Waits for operations that began under an earlier lease of the name's extents and have not
    /// ended: a late WRITE must not land among the next holder's bytes, nor a late READ see them.
    /// Returns the ledger in which the name is free and quiet.
    ///
    /// # Errors
    /// Somebody holds it, or the operations do not end in time.
    fn free_and_quiet(&self, id: &NameId) -> Result<MutexGuard<'_, Ledger>, Refusal> {
        let until = Instant::now() + QUIET;
        loop {
            let ledger = self.ledger.lock();
            let record = ledger.names.get(id).ok_or(Refusal::NotFound)?;
            if record.holder.is_some() {
                return Err(Refusal::InUse);
            }
            // Nobody leases these handles: each beyond the ledger's own belongs to an operation.
            let mut extents = record.extents.iter();
            if !extents.any(|id| Arc::strong_count(&ledger.extents[id].memory) > 1) {
                return Ok(ledger);
            }
            drop(ledger);
            if Instant::now() >= until {
                return Err(Refusal::InUse);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// As [`free_and_quiet`](Self::free_and_quiet), with memory that nobody but the session's user
    /// maps.
    ///
    /// Who was lent memory over shared memory may map it ever after. The next holder who is not
    /// that user, or whom the system does not say, gets copies, one extent after the other, made
    /// while the ledger is unlocked: one extent at a time exists twice. The handles that are kept
    /// meanwhile make other sessions wait.
    fn free_and_private(
        &self,
        session: SessionId,
        id: &NameId,
    ) -> Result<MutexGuard<'_, Ledger>, Refusal> {
        loop {
            let mut ledger = self.free_and_quiet(id)?;
            let user = Self::known(&mut ledger, session)?.origin;
            let is_foreign = |extent: &&ExtentRecord| {
                let by = extent.mapped_by;
                by.is_some_and(|by| by != user || by == Origin::Unknown)
            };
            let foreign: Vec<Arc<ExtentMemory>> = (ledger.names[id].extents.iter())
                .map(|id| &ledger.extents[id])
                .filter(is_foreign)
                .map(|extent| extent.memory.clone())
                .collect();
            if foreign.is_empty() {
                return Ok(ledger);
            }
            drop(ledger);
            for memory in foreign {
                self.replace_memory(session, memory)?;
            }
        }
    }

    /// Puts a copy in the place of an extent's memory that nobody leases.
    fn replace_memory(&self, session: SessionId, old: Arc<ExtentMemory>) -> Result<(), Refusal> {
        let fresh = old.copy_afresh().map_err(|error| {
            let extent = old.id();
            warn!(%session, %extent, %error, "cannot copy an extent for another user");
            Refusal::Invalid(format!(
                "the server cannot copy extent {extent}, which another user may still map: {error}"
            ))
        })?;
        let mut ledger = self.ledger.lock();
        // Copying is no silence of the client, whose renewals wait behind this request.
        Self::known(&mut ledger, session)?.renewed = Instant::now();
        let record = ledger.extents.get_mut(&old.id());
        // The name may have been removed meanwhile; it cannot have been opened.
        let Some(record) = record.filter(|record| Arc::ptr_eq(&record.memory, &old)) else {
            return Ok(());
        };
        record.memory = fresh;
        let charged = record.mapped_by.take();
        if let Some(holder) = charged {
            ledger.accounts.put_extent_on(holder, old.bytes());
        }
        drop(ledger);
        self.give_back([Leaving {
            memory: old,
            is_kept: false,
            charged,
        }]);
        Ok(())
    }

    fn known(ledger: &mut Ledger, id: SessionId) -> Result<&mut SessionRecord, Refusal> {
        ledger.sessions.get_mut(&id).ok_or(Refusal::NoSession)
    }

    fn resume(&self, id: SessionId, secret: &Secret) -> Result<Admission, Refusal> {
        let mut ledger = self.ledger.lock();
        let session = Self::known(&mut ledger, id)?;
        if session.secret != *secret {
            drop(ledger);
            warn!(session = %id, "a client tried to resume a session with a wrong secret");
            return Err(Refusal::NoSession);
        }
        session.renewed = Instant::now();
        session.connections += 1;
        session.lost = None;
        let (secret, client) = (session.secret, session.client.clone());
        drop(ledger);
        info!(session = %id, client, "session resumed");
        Ok(Admission {
            session: id,
            secret,
            lease: self.limits.lease,
        })
    }
}

impl SessionRecord {
    fn remember(&mut self, serial: Option<u64>, given: Given) {
        self.given = serial.map(|serial| (serial, given));
    }

    fn holds_nothing(&self) -> bool {
        self.extents.is_empty() && self.names.is_empty()
    }

    /// Who maps what the session is lent, if its transport hands out descriptors.
    fn maps_as(&self) -> Option<Origin> {
        (self.transport == Transport::Shm).then_some(self.origin)
    }
}

/// A session that is over: what is said and given back once the ledger is unlocked.
struct Ended {
    id: SessionId,
    client: String,
    held_extents: usize,
    freed: Freed,
    why: &'static str,
}

impl Ended {
    /// Says so; what it held is to be [given back](State::give_back).
    fn finish(self) -> Freed {
        let (client, held_extents, freed_extents) = (
            self.client,
            self.held_extents,
            self.freed.iter().filter(|leaving| !leaving.is_kept).count(),
        );
        info!(session = %self.id, client, held_extents, freed_extents, "session ended: {}", self.why);
        self.freed
    }
}

impl Ledger {
    /// What the session's request of that number gave, if it was the last that gave something.
    fn given(&self, session: SessionId, serial: Option<u64>) -> Option<Given> {
        let (last, given) = self.sessions.get(&session)?.given.as_ref()?;
        (Some(*last) == serial).then(|| given.clone())
    }

    /// Removes an extent that nobody leases and no name refers to. Its bytes go back to the
    /// capacity at once where no client can have kept it.
    fn forget_extent(&mut self, id: ExtentId) -> Leaving {
        let record = (self.extents.remove(&id)).expect("the caller found it");
        let charged = record.mapped_by.map(|_| record.origin);
        if charged.is_none() {
            (self.accounts).take_extent_off(record.origin, record.memory.bytes());
        }
        Leaving {
            memory: record.memory,
            is_kept: false,
            charged,
        }
    }
}

impl Host for State {
    fn admit(
        &self,
        client: &str,
        transport: Transport,
        origin: Origin,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        if let Some((id, secret)) = resume {
            return self.resume(id, &secret);
        }
        let secret = new_secret()?;
        let mut ledger = self.ledger.lock();
        if ledger.draining {
            return Err(Refusal::Draining);
        }
        ledger.accounts.begin_session(&self.limits, origin)?;
        ledger.sessions_ever += 1;
        let id = SessionId(ledger.sessions_ever);
        let record = SessionRecord {
            client: client.to_owned(),
            secret,
            transport,
            origin,
            connections: 1,
            renewed: Instant::now(),
            lost: None,
            extents: HashSet::new(),
            names: HashSet::new(),
            key: None,
            held: [0; 2],
            given: None,
        };
        ledger.sessions.insert(id, record);
        drop(ledger);
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

    fn renew(&self, session: SessionId) -> Result<(), Refusal> {
        Self::known(&mut self.ledger.lock(), session)?.renewed = Instant::now();
        Ok(())
    }

    fn lost(&self, session: SessionId) {
        let mut ledger = self.ledger.lock();
        let Ok(record) = Self::known(&mut ledger, session) else {
            return;
        };
        record.connections = record.connections.saturating_sub(1);
        if record.connections > 0 {
            return;
        }
        let why = match record.transport {
            Transport::Shm => "its connection closed without a goodbye",
            // Who holds nothing loses nothing, and would only take the place of another.
            Transport::Tcp | Transport::Rdma if record.holds_nothing() => {
                "its connection was lost, and it held nothing"
            }
            Transport::Tcp | Transport::Rdma => {
                record.lost = Some(Instant::now());
                let client = record.client.clone();
                drop(ledger);
                info!(session = %session, client, "connection lost: the client may return for a while");
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
        self.make_room(session, bytes);
        let mut ledger = self.ledger.lock();
        if let Some(Given::Extent(id)) = ledger.given(session, serial)
            && let Some(record) = ledger.extents.get(&id)
            && record.lessee == Some(session)
        {
            return Ok(record.memory.clone());
        }
        let record = Self::known(&mut ledger, session)?;
        let (held_extents, origin) = (record.extents.len(), record.origin);
        let mapped_by = record.maps_as();
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
        ledger.accounts.lend(&self.limits, origin, bytes)?;
        // Making the file and its mapping costs microseconds whatever its size: no page of it
        // exists before the first WRITE.
        let id = ExtentId(ledger.extents_ever + 1);
        let memory = match ExtentMemory::create(id, bytes, atomics) {
            Ok(memory) => memory,
            Err(error) => {
                ledger.accounts.take_extent_off(origin, bytes);
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
                origin,
                mapped_by,
            },
        );
        let record = Self::known(&mut ledger, session)?;
        record.extents.insert(id);
        record.remember(serial, Given::Extent(id));
        self.leases.insert(id, session, memory.clone());
        drop(ledger);
        debug!(session = %session, extent = %id, bytes, "extent granted");
        Ok(memory)
    }

    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal> {
        let mut ledger = self.ledger.lock();
        if !Self::known(&mut ledger, session)?.extents.remove(&extent) {
            return Err(Refusal::NotLeased(extent));
        }
        let leaving = self.let_go(&mut ledger, extent);
        ledger.let_go_of_name(extent);
        drop(ledger);
        self.give_back([leaving]);
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
        self.make_room(session, charge_of_name(0));
        (self.ledger.lock()).claim(&self.limits, session, name, replace)
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
        self.make_room(session, charge_of_name(manifest.len()));
        let mut ledger = self.ledger.lock();
        // 1. Everything that can be refused, before anything changes: the old binding stays whole.
        let id = ledger.name_of(session, name)?;
        let held = &ledger.sessions[&session].extents;
        // No more are looked at than there can be: a client can say one id millions of times.
        let possible = &extents[..extents.len().min(held.len() + 1)];
        if let Some(stranger) = possible.iter().find(|id| !held.contains(id)) {
            return Err(Refusal::NotLeased(*stranger));
        }
        if extents.len() > held.len() {
            return Err(Refusal::Invalid(format!(
                "{} extents were named, and this client holds {}",
                extents.len(),
                held.len()
            )));
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
        let origin = ledger.sessions[&session].origin;
        let old = ledger.charge_of(&id);
        let accounts = &mut ledger.accounts;
        old.inspect(|(origin, bytes)| accounts.take_off(*origin, *bytes));
        if let Err(full) = accounts.charge(&self.limits, origin, charge_of_name(manifest.len())) {
            old.inspect(|(origin, bytes)| accounts.put_on(*origin, *bytes));
            return Err(full);
        }
        // 2. The new binding, and what only the old one kept.
        let extents = distinct.len();
        let freed = ledger.bind(session, id, Arc::new(manifest), distinct);
        drop(ledger);
        self.give_back(freed);
        debug!(session = %session, name, extents, "named region published");
        Ok(())
    }

    fn open(&self, session: SessionId, name: &str, serial: Option<u64>) -> Result<Opened, Refusal> {
        let ledger = self.ledger.lock();
        let id = ledger.name_of(session, name)?;
        if ledger.given(session, serial) == Some(Given::Name(id.clone()))
            && let Some(opened) = ledger.opened(session, &id)
        {
            return Ok(opened);
        }
        drop(ledger);
        // What it takes over counts against its address, beside what was let go of meanwhile.
        self.sweep();
        let mut ledger = self.free_and_private(session, &id)?;
        let record = Self::known(&mut ledger, session)?;
        let (held_extents, origin) = (record.extents.len(), record.origin);
        let mapped_by = record.maps_as();
        let record = &ledger.names[&id];
        if held_extents + record.extents.len() > self.limits.extents_per_session {
            return Err(Refusal::Invalid(format!(
                "the region has {} extents and this client holds {held_extents} already, more than {} together: release some",
                record.extents.len(),
                self.limits.extents_per_session
            )));
        }
        // What was published from elsewhere is this client's from now on.
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
            record.mapped_by = record.mapped_by.or(mapped_by);
            let before = std::mem::replace(&mut record.origin, origin);
            let bytes = record.memory.bytes();
            self.leases.insert(*id, session, record.memory.clone());
            ledger.accounts.take_extent_off(before, bytes);
            ledger.accounts.put_extent_on(origin, bytes);
        }
        let holder = Self::known(&mut ledger, session)?;
        holder.extents.extend(ids);
        holder.names.insert(id.clone());
        holder.remember(serial, Given::Name(id.clone()));
        let opened = ledger.opened(session, &id).expect("opened just now");
        drop(ledger);
        info!(session = %session, name, extents = opened.extents.len(), "named region opened");
        Ok(opened)
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
        self.give_back(freed);
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
        self.sweep();
        let retained = self.retained.lock();
        let retained_bytes = retained.iter().map(Retained::charge).sum();
        let ledger = self.ledger.lock();
        // Clients say what they like: no sum of it may overflow.
        let held = |i: usize| {
            (ledger.sessions.values()).fold(0u64, |sum, record| sum.saturating_add(record.held[i]))
        };
        let (logical_bytes, stored_bytes) = (held(0), held(1));
        let extents = ledger.extents.values();
        let mut memories: Vec<_> = extents.map(|extent| extent.memory.file()).collect();
        memories.extend(retained.iter().map(Retained::file));
        let stat = ServerStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            draining: ledger.draining,
            capacity_bytes: self.limits.capacity_bytes,
            granted_bytes: ledger.accounts.all().bytes,
            sessions: ledger.sessions.len() as u64,
            extents: ledger.extents.len() as u64,
            named_regions: ledger.named_regions(),
            logical_bytes,
            stored_bytes,
            retained_bytes,
            ..ServerStat::default()
        };
        drop(ledger);
        drop(retained);
        // A system call for each extent.
        let resident = memories.iter().map(ExtentFile::resident_bytes);
        ServerStat {
            resident_bytes: resident.sum(),
            ..stat
        }
    }
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
