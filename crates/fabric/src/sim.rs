//! A simulated server and its faults, inside this process: seeded, in virtual steps, no wall clock.
//!
//! The rule it keeps: all events depend on the seed and on the order of calls alone. A step is one
//! [`poll`](Channel::poll) of a channel. Injected: delay, reordering, a link rate, lost operations
//! (which may have taken place or not, and WRITEs among them may yet, until their line has a new
//! channel), READs that bring a wrong byte, the server's death.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{
    ExtentId, Limit, NamedRegion, PublicKey, Refusal, Request, Response, Secret, ServerStat,
    SessionId, control::NAMES_PER_ANSWER,
};
use parking_lot::Mutex;

use crate::{
    Buf, Busy, Channel, ChannelError, Completion, ConnectError, Op, PollInterest, Verb,
    attachment::{Death, KeepAlive},
    channel::{check_len, refused},
    errors::RequestError,
    host::{
        Admission, Asker, Host, OpenedRegion, OpenedVersion, Peer, Transport, VersionRead, Versions,
    },
    memory::ExtentMemory,
    server::answer,
};

/// Faults and limits of a simulated server.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The seed of the random numbers.
    pub seed: u64,
    /// The most bytes that the server grants.
    pub capacity_bytes: u64,
    /// Upper bound of the steps that an operation takes; each takes a random number from 1.
    pub delay_steps: u64,
    /// True if completions come in the order of their delays rather than of their operations.
    pub reorder: bool,
    /// One operation in `lose_one_in` is lost and ends in `TimedOut` after
    /// [`timeout_steps`](Self::timeout_steps).
    pub lose_one_in: Option<u64>,
    /// One READ in `damage_one_in` brings a wrong byte. The server has the right one.
    pub damage_one_in: Option<u64>,
    /// The operation deadline.
    pub timeout_steps: u64,
    /// Number of the operation at which the server dies, counted over all channels.
    pub die_at_op: Option<u64>,
    /// Payload bytes that a channel moves per step. `None`: unlimited.
    pub bytes_per_step: Option<u64>,
    /// Upper bound of operations in flight per channel.
    pub queue_depth: usize,
}

impl SimConfig {
    /// Returns delays of up to 8 steps with reordering, no loss, damage or death, no rate, queues
    /// of 64 operations, and 1 GiB.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            capacity_bytes: 1 << 30,
            delay_steps: 8,
            reorder: true,
            lose_one_in: None,
            damage_one_in: None,
            timeout_steps: 100,
            die_at_op: None,
            bytes_per_step: None,
            queue_depth: 64,
        }
    }
}

/// A simulated server that any number of sessions can use.
pub struct SimServer {
    config: SimConfig,
    host: Arc<dyn Host>,
    death: Arc<Death>,
    ops: AtomicU64,
    channels: AtomicU64,
    lose_answer: AtomicBool,
    /// WRITEs that seemed lost and may still land.
    late: Mutex<Vec<Late>>,
}

impl fmt::Debug for SimServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimServer({})", self.config.seed)
    }
}

/// A WRITE of a channel that is dead, on its way to the server.
#[derive(Debug)]
struct Late {
    session: SessionId,
    line: u64,
    extent: ExtentId,
    offset: u64,
    bytes: Vec<u8>,
}

impl SimServer {
    /// Makes a server with nothing granted.
    pub fn new(config: SimConfig) -> Arc<Self> {
        let host = Arc::new(SimHost::new(config.capacity_bytes));
        Self::with_host(config, host)
    }

    /// Makes a server that lends the memory of `host`. The capacity of `config` does not apply.
    pub fn with_host(config: SimConfig, host: Arc<dyn Host>) -> Arc<Self> {
        Arc::new(Self {
            host,
            config,
            death: Arc::default(),
            ops: AtomicU64::new(0),
            channels: AtomicU64::new(0),
            lose_answer: AtomicBool::new(false),
            late: Mutex::default(),
        })
    }

    /// Kills the server: all operations in flight end with an error at the next poll.
    pub fn kill(&self) {
        self.death.declare("the simulated server was killed");
    }

    /// Loses the answer to the next publication, which takes place all the same.
    pub fn lose_next_publish_answer(&self) {
        self.lose_answer.store(true, Ordering::Relaxed);
    }

    /// Returns the number of operations posted so far, over all channels.
    pub fn operations(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    /// Places the bytes of a WRITE that seemed lost.
    fn land(&self, late: &Late) {
        if let Some(lease) = self.host.extent(late.session, late.extent) {
            // A WRITE outside of a lease is refused without a notice.
            let _ = lease.copy_in(late.offset, &late.bytes);
        }
    }

    /// Returns the seed of the server's random numbers, which is also its endpoint.
    pub(crate) fn seed(&self) -> u64 {
        self.config.seed
    }

    fn endpoint(&self) -> String {
        format!("sim:{}", self.config.seed)
    }

    pub(crate) fn alive(&self) -> Result<(), ConnectError> {
        match self.death.reason() {
            None => Ok(()),
            Some(reason) => {
                let source = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, reason);
                Err(ConnectError::Unreachable {
                    endpoint: self.endpoint(),
                    source,
                })
            }
        }
    }
}

/// One client of a simulated server.
#[derive(Debug)]
pub(crate) struct SimSession {
    server: Arc<SimServer>,
    id: SessionId,
}

impl SimSession {
    /// Begins a session at a server of its own.
    pub(crate) fn alone(seed: u64, client: &str) -> Self {
        Self::begin(SimServer::new(SimConfig::new(seed)), client)
    }

    pub(crate) fn begin(server: Arc<SimServer>, client: &str) -> Self {
        let admission = server
            .host
            .admit(client, Transport::Shm, &Peer::unknown(), None)
            .expect("a simulated server admits everybody");
        Self {
            server,
            id: admission.session,
        }
    }

    pub(crate) fn call(&self, request: Request) -> Result<Response, RequestError> {
        if let Some(reason) = self.server.death.reason() {
            return Err(RequestError::NotAsked(reason));
        }
        let is_lost = matches!(request, Request::Publish { .. })
            && self.server.lose_answer.swap(false, Ordering::Relaxed);
        match answer(&*self.server.host, self.id, request) {
            Ok(_) if is_lost => Err(RequestError::Disconnected("the answer was lost".to_owned())),
            Ok((Response::Refused(refusal), _)) => Err(RequestError::Refused(refusal)),
            Ok((response, _)) => Ok(response),
            Err(violation) => Err(RequestError::Disconnected(violation)),
        }
    }

    pub(crate) fn channel<B: Buf>(
        &self,
        session: KeepAlive,
        line: u64,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        self.server.alive()?;
        let number = self.server.channels.fetch_add(1, Ordering::Relaxed);
        let mut random =
            Random(self.server.config.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // WRITEs of the line's earlier channels land now or never.
        self.server.late.lock().retain(|late| {
            let mine = (late.session, late.line) == (self.id, line);
            if mine && random.below(2) == 0 {
                self.server.land(late);
            }
            !mine
        });
        Ok(Box::new(SimChannel {
            server: Arc::clone(&self.server),
            session: self.id,
            line,
            random,
            step: 0,
            link_free_at: 0,
            flying: Vec::new(),
            dead: None,
            _session: session,
        }))
    }
}

impl Drop for SimSession {
    fn drop(&mut self) {
        self.server.host.close(self.id);
    }
}

struct SimChannel<B> {
    server: Arc<SimServer>,
    session: SessionId,
    line: u64,
    random: Random,
    step: u64,
    link_free_at: u64,
    /// Operations in flight, in the order of posting.
    flying: Vec<Flying<B>>,
    dead: Option<ChannelError>,
    _session: KeepAlive,
}

struct Flying<B> {
    op: Op<B>,
    due_step: u64,
    /// True if the operation is lost: it ends in `TimedOut` when due.
    lost: bool,
}

impl<B: Buf> Channel<B> for SimChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        let config = &self.server.config;
        if self.flying.len() >= config.queue_depth {
            return Err(Busy(op));
        }
        check_len(&op);
        if self.server.ops.fetch_add(1, Ordering::Relaxed) + 1
            == config.die_at_op.unwrap_or(u64::MAX)
        {
            self.server.kill();
        }
        let mut due_step = self.step + 1 + self.random.below(config.delay_steps);
        if let Some(rate) = config.bytes_per_step {
            self.link_free_at = self.link_free_at.max(self.step) + u64::from(op.len).div_ceil(rate);
            due_step += self.link_free_at - self.step;
        }
        if !config.reorder {
            due_step = due_step.max(self.flying.last().map_or(0, |last| last.due_step));
        }
        let lost = config
            .lose_one_in
            .is_some_and(|n| self.random.below(n) == 0);
        if lost {
            due_step = self.step + config.timeout_steps;
        }
        self.flying.push(Flying { op, due_step, lost });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        self.step += 1;
        if let Some(reason) = self.server.death.reason() {
            let endpoint = self.server.endpoint();
            self.dead
                .get_or_insert(ChannelError::Disconnected { endpoint, reason });
        }
        // 0. WRITEs that other channels gave up may land now.
        let mut late = self.server.late.lock();
        if !late.is_empty() && self.random.below(4) == 0 {
            let landed = self.random.below(late.len() as u64) as usize;
            self.server.land(&late.remove(landed));
        }
        drop(late);
        // 1. Operations that are due, in the order in which they are due.
        while self.dead.is_none() {
            let due =
                |flying: &Flying<B>| (flying.due_step <= self.step).then_some(flying.due_step);
            let next = self
                .flying
                .iter()
                .enumerate()
                .filter_map(|(i, flying)| Some((due(flying)?, i)))
                .min();
            let Some((_, i)) = next else { break };
            let mut flying = self.flying.remove(i);
            let result = if flying.lost {
                self.lose(&mut flying.op);
                let deadline = Duration::from_millis(self.server.config.timeout_steps);
                let error = ChannelError::TimedOut {
                    endpoint: self.server.endpoint(),
                    deadline,
                };
                self.dead = Some(error.clone());
                Err(error)
            } else {
                let result = self.carry_out(&mut flying.op);
                self.damage(&mut flying.op);
                result
            };
            done.push(flying.complete(result));
        }
        // 2. The rest of a dead channel. Some of it had reached the server.
        if let Some(error) = self.dead.clone() {
            for mut flying in std::mem::take(&mut self.flying) {
                self.lose(&mut flying.op);
                done.push(flying.complete(Err(error.clone())));
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        // A step passes with every poll, so there is nothing to sleep for.
        PollInterest {
            until: (!self.flying.is_empty()).then(Instant::now),
            ..PollInterest::default()
        }
    }
}

impl<B: Buf> SimChannel<B> {
    /// Decides the fate of an operation of a dead channel: it takes place unnoticed, it may take
    /// place later if it is a WRITE, or it never does.
    fn lose(&mut self, op: &mut Op<B>) {
        match (self.random.below(3), op.verb) {
            (0, _) => {
                let _ = self.carry_out(op);
            }
            (1, Verb::Write) => self.server.late.lock().push(Late {
                session: self.session,
                line: self.line,
                extent: op.extent,
                offset: op.offset,
                bytes: op.buf.as_ref()[..op.len as usize].to_vec(),
            }),
            _ => {}
        }
    }

    /// Changes one byte of a READ's buffer, if the configuration wants it.
    fn damage(&mut self, op: &mut Op<B>) {
        let Some(one_in) = self.server.config.damage_one_in else {
            return;
        };
        if op.verb == Verb::Read && self.random.below(one_in) == 0 {
            let at = self.random.below(u64::from(op.len)) as usize;
            op.buf.as_mut()[at] ^= 1;
        }
    }

    fn carry_out(&self, op: &mut Op<B>) -> Result<(), ChannelError> {
        let lease = self.server.host.extent(self.session, op.extent);
        let bytes = op.len as usize;
        let takes = |lease: &Arc<ExtentMemory>| op.verb == Verb::Read || !lease.is_read_only();
        let moved = lease.filter(takes).map(|lease| match op.verb {
            Verb::Read => lease.copy_out(op.offset, &mut op.buf.as_mut()[..bytes]),
            Verb::Write => lease.copy_in(op.offset, &op.buf.as_ref()[..bytes]),
            Verb::Atomic(atomic) => lease.atomic(op.offset, atomic).map(|old| {
                op.buf.as_mut()[..bytes].copy_from_slice(&old.to_le_bytes());
            }),
        });
        match moved {
            Some(Ok(())) => Ok(()),
            _ => Err(refused(&self.server.endpoint(), op)),
        }
    }
}

impl<B> Flying<B> {
    fn complete(self, result: Result<(), ChannelError>) -> Completion<B> {
        Completion {
            tag: self.op.tag,
            verb: self.op.verb,
            buf: self.op.buf,
            result,
        }
    }
}

/// A random number generator, SplitMix64: small, and the same on every machine for ever.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit.max(1)
    }
}

/// The plainest [`Host`]: all clients are admitted, names belong to all, and leases do not expire.
/// For simulations and for tests of transports.
#[derive(Debug)]
pub struct SimHost {
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
        self.sessions
            .contains_key(&session)
            .then_some(())
            .ok_or(Refusal::NoSession)
    }

    fn owned(&self, session: SessionId, id: ExtentId) -> Result<&Arc<ExtentMemory>, Refusal> {
        match self.extents.get(&id) {
            Some(extent) if extent.owner == Some(session) => Ok(&extent.memory),
            _ => Err(Refusal::NotLeased(id)),
        }
    }

    fn granted_bytes(&self) -> u64 {
        self.extents
            .values()
            .map(|extent| extent.memory.bytes())
            .sum()
    }

    /// Returns the published version of a name, and the older ones that are read.
    fn versions(&self, name: &str) -> Versions {
        let published = self.names.get(name).map_or(0, |record| record.version);
        let mut readings: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        let views = self.views.values();
        for view in views.filter(|view| view.name == name && view.version != published) {
            readings
                .entry(view.version)
                .or_default()
                .insert(view.reading);
        }
        let read = readings.into_iter().map(|(version, readings)| VersionRead {
            version,
            readers: readings.len() as u64,
        });
        Versions {
            published,
            read: read.collect(),
        }
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
            Some((session, secret)) => {
                state.known(session)?;
                (secret == secret_of(session))
                    .then_some(session)
                    .ok_or(Refusal::NoSession)?
            }
            None => {
                state.last_id += 1;
                SessionId(state.last_id)
            }
        };
        state.sessions.insert(session, transport);
        Ok(Admission {
            session,
            secret: secret_of(session),
            lease: Duration::from_secs(3),
            paged: false,
        })
    }

    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        self.state.lock().known(session)?;
        (*secret == secret_of(session))
            .then_some(())
            .ok_or(Refusal::NoSession)
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
        state.last_id += 1;
        let id = ExtentId(state.last_id);
        let memory = ExtentMemory::create(id, bytes, atomics)
            .map_err(|error| Refusal::Invalid(error.to_string()))?;
        state.extents.insert(
            id,
            SimExtent {
                memory: Arc::clone(&memory),
                owner: Some(session),
                names: 0,
            },
        );
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

    fn claim(&self, session: SessionId, name: &str, replace: bool) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        if let Some(record) = state.names.get(name) {
            if state.in_use(record, session) {
                return Err(Refusal::InUse);
            }
            if record.manifest.is_some() && !replace {
                return Err(Refusal::Exists);
            }
        }
        state.names.entry(name.to_owned()).or_default().claimed_by = Some(session);
        Ok(())
    }

    fn disclaim(&self, session: SessionId, name: &str) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        state.known(session)?;
        state.disclaim(session, |other| other == name);
        Ok(())
    }

    fn publish(
        &self,
        session: SessionId,
        name: &str,
        manifest: Vec<u8>,
        extents: &[ExtentId],
    ) -> Result<Versions, Refusal> {
        let mut state = self.state.lock();
        extents
            .iter()
            .try_for_each(|id| state.owned(session, *id).map(|_| ()))?;
        let mut claimed_by = None;
        if let Some(old) = state.names.get(name) {
            if state.in_use(old, session) {
                return Err(Refusal::InUse);
            }
            if state.holders(old).next().is_none() {
                return Err(Refusal::Exists);
            }
            claimed_by = old.claimed_by;
        }
        for id in extents {
            state
                .extents
                .get_mut(id)
                .expect("owned, as seen above")
                .names += 1;
        }
        state.last_id += 1;
        let new = SimName {
            manifest: Some(manifest),
            extents: extents.to_vec(),
            claimed_by,
            version: state.last_id,
        };
        if let Some(old) = state.names.insert(name.to_owned(), new) {
            state.unname(old);
        }
        Ok(state.versions(name))
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
        let manifest = named
            .manifest
            .clone()
            .expect("bound, since nobody claims it");
        let mut extents = Vec::new();
        for id in named.extents.clone() {
            let extent = state
                .extents
                .get_mut(&id)
                .expect("a name keeps its extents");
            extent.owner = Some(session);
            extent.memory = extent.memory.lease_anew();
            extents.push(Arc::clone(&extent.memory));
        }
        Ok(OpenedRegion {
            manifest: Arc::new(manifest),
            extents,
            versions: state.versions(name),
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
        let (version, ids) = (named.version, named.extents.clone());
        state.last_id += 1;
        let reading = state.last_id;
        let mut extents = Vec::new();
        for of in ids {
            state.last_id += 1;
            let id = ExtentId(state.last_id);
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
        if state
            .holders(named)
            .any(|holder| asker != Asker::Session(holder))
        {
            return Err(Refusal::InUse);
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
                record.manifest.is_some() && after.as_ref().is_none_or(|(_, after)| *name > after)
            })
            .map(|(name, record)| NamedRegion {
                owner: PublicKey([0; 32]),
                name: name.clone(),
                bytes: record.extents.iter().map(bytes).sum(),
                in_use: state.holders(record).next().is_some(),
                readers: (state.views.values())
                    .filter(|view| view.name == *name)
                    .map(|view| view.reading)
                    .collect::<HashSet<_>>()
                    .len() as u64,
                old_versions: state.versions(name).read.len() as u64,
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
            resident_bytes: state
                .extents
                .values()
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
