//! [`Areas`]: memory of this program that its peers WRITE into, each area lent to one peer by name.
//!
//! A [`Board`] goes the other way: the program writes it and any number of peers READ it.
//!
//! The rule it keeps: an area is lent once. When the peer that held it has gone, the area is gone,
//! too: a successor would share the memory with the old peer's mapping. A board is lent to every
//! peer that asks, since no peer can change it. The bytes mean something to the program alone,
//! which [offers](Areas::offer) areas and reads them, and [shows](Areas::show) boards and writes
//! them.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{
    ExtentId, Persistence, PublicKey, Refusal, Secret, ServerStat, SessionId, register::Answer,
};
use parking_lot::{Mutex, RwLock};

pub use super::ring::Board;
use super::ring::RingMemory;
use crate::{
    host::{Admission, Host, OpenedRegion, Peer, Transport, Versions},
    memory::{ExtentMemory, OutOfLease},
};

farpage_wire::debug_as_display!(OfferError);

/// Upper bound of sessions at a time; a peer has one.
const SESSIONS_MAX: usize = 4096;

/// A [`Host`] for a program that exchanges memory with its peers. It lends the offered areas and
/// the shown boards, and nothing else.
pub struct Areas {
    /// Longest silence over a network of a peer that has not gone.
    lease: Duration,
    state: Mutex<AreasState>,
    /// Callback for bytes that have arrived.
    arrival: RwLock<Option<Arc<Arrival>>>,
}

type Arrival = dyn Fn() + Send + Sync;

impl std::fmt::Debug for Areas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Areas")
            .field("lease", &self.lease)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct AreasState {
    last_id: u64,
    sessions: HashMap<SessionId, Stay>,
    areas: HashMap<String, Area>,
    boards: HashMap<String, Shown>,
}

/// A peer's session.
#[derive(Debug)]
struct Stay {
    secret: Secret,
    transport: Transport,
    heard: Instant,
}

#[derive(Debug)]
struct Area {
    memory: Arc<ExtentMemory>,
    holder: Holder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Nobody,
    Peer(SessionId),
    Gone,
}

/// A board and its leases: one for each session, since a lease ends with its session.
#[derive(Debug)]
struct Shown {
    memory: Arc<ExtentMemory>,
    leases: HashMap<SessionId, Arc<ExtentMemory>>,
}

impl Shown {
    fn end(&mut self, session: SessionId) -> bool {
        let lease = self.leases.remove(&session);
        lease.inspect(|lease| end(lease)).is_some()
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.leases.values().for_each(|lease| end(lease));
    }
}

fn end(lease: &ExtentMemory) {
    lease.revoke();
    lease.deregister();
}

/// State of an area's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The peer has not come yet.
    Awaited,
    /// The peer holds the area.
    Here,
    /// The peer has come and gone.
    Gone,
}

/// Reason why an area cannot be offered.
#[derive(thiserror::Error)]
pub enum OfferError {
    /// The system gave no memory.
    #[error("cannot make {bytes} bytes for peers: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// Error from the system.
        r#source: std::io::Error,
    },
    /// The memory cannot be mapped.
    #[error("cannot map memory for peers: {0}")]
    Map(#[from] OutOfLease),
}

impl Areas {
    /// Makes a host without areas. Over a network, a peer that is silent for `lease` has gone; over
    /// shared memory, a peer that has closed its socket.
    pub fn new(lease: Duration) -> Arc<Self> {
        Arc::new(Self {
            lease,
            state: Mutex::default(),
            arrival: RwLock::default(),
        })
    }

    /// Offers `bytes` zeroed bytes to the first peer that opens `name`. An area that was offered
    /// under `name` before is taken back.
    ///
    /// # Errors
    /// [`OfferError`]
    pub fn offer(&self, name: &str, bytes: u64) -> Result<RingMemory, OfferError> {
        let mut state = self.state.lock();
        state.last_id += 1;
        let memory = ExtentMemory::create(ExtentId(state.last_id), bytes, false)
            .map_err(|source| OfferError::Memory { bytes, source })?;
        // Made before the first lease: a landing outlives every lease.
        let landing = RingMemory::extent(&memory.lease_anew())?;
        let area = Area {
            memory,
            holder: Holder::Nobody,
        };
        if let Some(mut old) = state.areas.insert(name.to_owned(), area) {
            old.end();
        }
        Ok(landing)
    }

    /// Shows `bytes` zeroed bytes to every peer that opens `name`. A board that was shown under
    /// `name` before is taken back.
    ///
    /// # Errors
    /// [`OfferError`]
    pub fn show(&self, name: &str, bytes: u64) -> Result<Board, OfferError> {
        let mut state = self.state.lock();
        state.last_id += 1;
        let memory = ExtentMemory::create_to_read(ExtentId(state.last_id), bytes)
            .map_err(|source| OfferError::Memory { bytes, source })?;
        let board = Board::extent(&memory.lease_anew())?;
        let shown = Shown {
            memory,
            leases: HashMap::new(),
        };
        state.boards.insert(name.to_owned(), shown);
        Ok(board)
    }

    /// Sets `arrival`, which is called after a peer's WRITEs have been placed. Over TCP the thread
    /// that placed them calls it, before the peer is answered. Over RDMA it is called for WRITEs
    /// that [notify](crate::Channel::post_notifying), as those of a ring's tail do. Over shared
    /// memory peers place bytes by themselves, so a program has to look. `arrival` is short, or
    /// does what the peer waits for. It replaces an earlier one; `None` ends the calls.
    pub fn on_arrival(&self, arrival: Option<Arc<dyn Fn() + Send + Sync>>) {
        *self.arrival.write() = arrival;
    }

    /// Returns the state of an area's peer. The peer of an area that was never offered is awaited.
    pub fn presence(&self, name: &str) -> Presence {
        let mut state = self.state.lock();
        state.expire(self.lease);
        match state.areas.get(name).map(|area| area.holder) {
            None | Some(Holder::Nobody) => Presence::Awaited,
            Some(Holder::Peer(_)) => Presence::Here,
            Some(Holder::Gone) => Presence::Gone,
        }
    }
}

impl Area {
    fn is_held(&self, session: SessionId, extent: ExtentId) -> bool {
        self.holder == Holder::Peer(session) && self.memory.id() == extent
    }

    fn end(&mut self) {
        end(&self.memory);
        self.holder = Holder::Gone;
    }
}

impl AreasState {
    fn known(&mut self, session: SessionId) -> Result<&mut Stay, Refusal> {
        self.sessions.get_mut(&session).ok_or(Refusal::NoSession)
    }

    /// Returns the session, if `secret` is its own.
    fn proved(&mut self, session: SessionId, secret: &Secret) -> Result<&mut Stay, Refusal> {
        let stay = self.known(session)?;
        match stay.secret == *secret {
            true => Ok(stay),
            false => Err(Refusal::NoSession),
        }
    }

    fn end(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        let held = |area: &&mut Area| area.holder == Holder::Peer(session);
        self.areas.values_mut().filter(held).for_each(Area::end);
        self.boards.values_mut().for_each(|board| {
            board.end(session);
        });
    }

    /// Ends the sessions that were silent for `lease`. Over shared memory a closed socket says that
    /// a peer has gone, and silence says nothing: a simulated session renews no lease.
    fn expire(&mut self, lease: Duration) {
        let silent = |(id, stay): (&SessionId, &Stay)| {
            let is_over = stay.transport != Transport::Shm && stay.heard.elapsed() > lease;
            is_over.then_some(*id)
        };
        let ended: Vec<_> = self.sessions.iter().filter_map(silent).collect();
        ended.into_iter().for_each(|session| self.end(session));
    }
}

impl Host for Areas {
    fn admit(
        &self,
        _client: &str,
        transport: Transport,
        _peer: &Peer,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        let mut state = self.state.lock();
        state.expire(self.lease);
        let admission = |session, secret| Admission {
            session,
            secret,
            lease: self.lease,
            paged: false,
            persistence: Persistence::Never,
        };
        if let Some((session, secret)) = resume {
            state.proved(session, &secret)?.heard = Instant::now();
            return Ok(admission(session, secret));
        }
        if state.sessions.len() >= SESSIONS_MAX {
            return Err(Refusal::Invalid(format!(
                "{SESSIONS_MAX} peers are connected, the most that there may be"
            )));
        }
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Refusal::Invalid(format!("no random numbers: {error}")))?;
        state.last_id += 1;
        let (session, secret) = (SessionId(state.last_id), Secret(bytes));
        let stay = Stay {
            secret,
            transport,
            heard: Instant::now(),
        };
        state.sessions.insert(session, stay);
        Ok(admission(session, secret))
    }

    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal> {
        self.state.lock().proved(session, secret).map(|_| ())
    }

    fn renew(&self, session: SessionId) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        state.expire(self.lease);
        state.known(session)?.heard = Instant::now();
        Ok(())
    }

    fn lost(&self, session: SessionId) {
        let mut state = self.state.lock();
        // Over a network the peer may come back within its lease.
        if state
            .known(session)
            .is_ok_and(|stay| stay.transport == Transport::Shm)
        {
            state.end(session);
        }
    }

    fn close(&self, session: SessionId) {
        self.state.lock().end(session);
    }

    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let mut boards = state.boards.values_mut();
        if let Some(board) = boards.find(|board| board.memory.id() == extent) {
            let was_held = board.end(session);
            return was_held.then_some(()).ok_or(Refusal::NotLeased(extent));
        }
        let mut areas = state.areas.values_mut();
        let area = areas.find(|area| area.is_held(session, extent));
        area.ok_or(Refusal::NotLeased(extent))?.end();
        Ok(())
    }

    fn extent(&self, session: SessionId, extent: ExtentId) -> Option<Arc<ExtentMemory>> {
        let state = self.state.lock();
        let mut areas = state.areas.values();
        let area = areas.find(|area| area.is_held(session, extent));
        let area = area.map(|area| &area.memory);
        let mut boards = state.boards.values();
        let mut shown = || boards.find(|board| board.memory.id() == extent);
        area.or_else(|| shown()?.leases.get(&session)).cloned()
    }

    fn written(&self, _session: SessionId) {
        let arrival = self.arrival.read().clone();
        if let Some(arrival) = arrival {
            arrival();
        }
    }

    fn exchanges(&self) -> bool {
        true
    }

    fn identify(&self, session: SessionId, _key: PublicKey) -> Result<(), Refusal> {
        self.state.lock().known(session).map(|_| ())
    }

    /// Lends the board or the area of this name. A session whose answer was lost asks again, and
    /// gets the same.
    fn open(
        &self,
        session: SessionId,
        name: &str,
        _serial: Option<u64>,
    ) -> Result<OpenedRegion, Refusal> {
        let mut state = self.state.lock();
        state.expire(self.lease);
        state.known(session)?;
        if let Some(Shown { memory, leases }) = state.boards.get_mut(name) {
            let lease = leases.entry(session).or_insert_with(|| memory.lease_anew());
            return Ok(OpenedRegion {
                manifest: Arc::default(),
                extents: vec![Arc::clone(lease)],
                versions: Versions::default(),
                vote: Answer::default(),
            });
        }
        let area = state.areas.get_mut(name).ok_or(Refusal::NotFound)?;
        match area.holder {
            Holder::Nobody => area.holder = Holder::Peer(session),
            Holder::Peer(holder) if holder == session => {}
            Holder::Peer(_) => return Err(Refusal::InUse),
            Holder::Gone => return Err(Refusal::NotFound),
        }
        Ok(OpenedRegion {
            manifest: Arc::default(),
            extents: vec![Arc::clone(&area.memory)],
            versions: Versions::default(),
            vote: Answer::default(),
        })
    }

    fn stat(&self) -> ServerStat {
        let state = self.state.lock();
        let areas = state.areas.values().map(|area| &area.memory);
        let boards = state.boards.values().map(|board| &board.memory);
        let bytes = areas.chain(boards).map(|memory| memory.bytes()).sum();
        ServerStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capacity_bytes: bytes,
            granted_bytes: bytes,
            sessions: state.sessions.len() as u64,
            extents: (state.areas.len() + state.boards.len()) as u64,
            ..ServerStat::default()
        }
    }
}
