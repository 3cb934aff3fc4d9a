//! [`ConnectionPlaces`]: limits on the connections that a server serves, in all and per client.
//!
//! The rule it keeps: no address, no session and no crowd of silent connections takes the places of
//! the others. A connection is a *stranger* until it has said what it is for. Strangers share what
//! is left, and at least [`ConnectionPlaces::for_strangers`]. The oldest stranger is closed when
//! there is no place for a newer one. A connection that has begun, resumed or joined a session is
//! *settled*, and counts against its address and its session. A line's newer connection takes the
//! place of its older one, so that a client at its limit can replace connections that only seem
//! alive.
//!
//! Deliberately absent: fairness among clients behind one address, which cannot be told apart.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
};

use farpage_wire::{Refusal, SessionId};
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;

use super::lines::LineName;
use crate::{host::Origin, stream::PeerStream};

/// One in `KEPT_ONE_IN` of all places is kept from new sessions. Half of these are for resuming and
/// for a session's first data connection, half for strangers.
const KEPT_ONE_IN: usize = 8;

/// Upper bound of a server's connections at once by default. Each has a thread, so more are refused
/// rather than suffered.
const MAX_CONNECTIONS: usize = 4096;

/// One connection is allowed per this many files that the process may open: a connection over RDMA
/// takes several files, and lent memory takes some, too.
const OPEN_FILES_PER_CONNECTION: u64 = 4;

/// Limits on the number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// The most connections of a server, over all of its listeners. Each takes a thread and a
    /// descriptor.
    pub connections: usize,
    /// The most connections of one address, or of one user over shared memory. Default: three
    /// quarters.
    pub per_address: usize,
    /// The most data connections of one session. Default: a quarter.
    pub per_session: usize,
}

impl ConnectionLimits {
    /// Allows `connections` at most, with the defaults for the rest. 256 processes of one machine
    /// with 11 connections each fit into 4096.
    pub fn new(connections: usize) -> Self {
        Self {
            connections,
            per_address: (connections / 4 * 3).max(1),
            per_session: (connections / 4).max(1),
        }
    }
}

impl Default for ConnectionLimits {
    /// Allows 4096 connections, or one per four files that this process may open if that is less.
    fn default() -> Self {
        let open_files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        let connections = usize::try_from(open_files / OPEN_FILES_PER_CONNECTION);
        Self::new(connections.unwrap_or(usize::MAX).clamp(1, MAX_CONNECTIONS))
    }
}

/// Purpose of a connection. Its client has proved that the session is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    Begin,
    Resume(SessionId),
    /// A data connection of the session, with the line's number.
    Data(SessionId, u64),
}

impl Aim {
    /// Returns the line whose older connection this one replaces.
    fn line(self) -> Option<LineName> {
        match self {
            Self::Begin => None,
            Self::Resume(session) => Some((session, None)),
            Self::Data(session, line) => Some((session, Some(line))),
        }
    }
}

pub(super) struct ConnectionPlaces {
    limits: ConnectionLimits,
    state: Mutex<PlacesState>,
}

#[derive(Default)]
struct PlacesState {
    /// Strangers by order of arrival. A connection that is only being made has no stream yet.
    strangers: BTreeMap<u64, Weak<PeerStream>>,
    /// Settled connections by number. Limits are checked by counting this table, which takes tens
    /// of microseconds for thousands of connections. Sums beside the table could disagree with it.
    settled: HashMap<u64, Settled>,
}

/// A settled connection, which counts against its origin and its line's session.
#[derive(Clone, Copy)]
struct Settled {
    origin: Origin,
    /// The line that the connection is the newest of, if it has one.
    line: Option<LineName>,
}

impl Settled {
    /// Returns the session of a data connection.
    fn data(&self) -> Option<SessionId> {
        let (session, line) = self.line?;
        line.map(|_| session)
    }
}

/// One connection's place, until it is dropped.
pub(super) struct ConnectionPlace {
    places: Arc<ConnectionPlaces>,
    number: u64,
    origin: Origin,
}

impl ConnectionPlaces {
    pub(super) fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            state: Mutex::default(),
        })
    }

    /// Counts the places kept from new sessions: at least one of each kind, if there are three.
    fn kept(&self) -> usize {
        let most = self.limits.connections.saturating_sub(1);
        (self.limits.connections / KEPT_ONE_IN).max(2).min(most)
    }

    /// Returns the number of places that no settled connection gets, so that a stranger can resume.
    fn for_strangers(&self) -> usize {
        self.kept().div_ceil(2)
    }

    /// Gives a place to a connection that has said nothing yet, and for which nothing was made.
    /// Closes the strangers that are too many, the oldest first.
    pub(super) fn arrive(self: &Arc<Self>, number: u64, origin: Origin) -> ConnectionPlace {
        let mut state = self.state.lock();
        state.strangers.insert(number, Weak::new());
        let mut evicted = Vec::new();
        while state.settled.len() + state.strangers.len() > self.limits.connections.max(2) {
            let Some((_, oldest)) = state.strangers.pop_first() else {
                break;
            };
            evicted.push(oldest);
        }
        drop(state);
        for stream in evicted.iter().filter_map(Weak::upgrade) {
            stream.close();
        }
        ConnectionPlace {
            places: Arc::clone(self),
            number,
            origin,
        }
    }
}

impl ConnectionPlace {
    /// Notes the connection's `stream`, which is closed when the connection has to give way, or at
    /// once if it had to already.
    pub(super) fn occupy(&self, stream: &Arc<PeerStream>) {
        let mut state = self.places.state.lock();
        if let Some(place) = state.strangers.get_mut(&self.number) {
            *place = Arc::downgrade(stream);
        } else if !state.settled.contains_key(&self.number) {
            drop(state);
            stream.close();
        }
    }

    /// Settles the connection, which has said its `aim`.
    ///
    /// # Errors
    /// A text for the client: there are too many connections of its kind.
    pub(super) fn settle(&self, aim: Aim) -> Result<(), Refusal> {
        let (limits, kept) = (&self.places.limits, self.places.kept());
        let for_returning = kept - self.places.for_strangers();
        let mut state = self.places.state.lock();
        // 1. Count the connections beside the one that this one replaces.
        let line = aim.line();
        let older = (state.settled.iter()).find_map(|(number, settled)| {
            (line.is_some() && settled.line == line).then_some(*number)
        });
        let count = |counts: &dyn Fn(&Settled) -> bool| {
            let others = state
                .settled
                .iter()
                .filter(|(number, _)| Some(**number) != older);
            others.filter(|(_, settled)| counts(settled)).count()
        };
        let of_all = count(&|_| true);
        let of_origin = count(&|settled| settled.origin == self.origin);
        let from_here = older.is_some_and(|older| state.settled[&older].origin == self.origin);
        let mut of_session = 0;
        if let Aim::Data(session, _) = aim {
            of_session = count(&|settled| settled.data() == Some(session));
            if of_session >= limits.per_session {
                return Err(Refusal::Invalid(format!(
                    "this client has {of_session} data connections, the most that one may have (--connections-per-client)"
                )));
            }
        }
        // 2. A client that has lost a connection must be able to come back, or it loses its memory.
        let extra = match aim {
            _ if older.is_some() => for_returning,
            Aim::Resume(_) => for_returning,
            Aim::Data(..) if of_session == 0 => for_returning,
            Aim::Begin | Aim::Data(..) => 0,
        };
        if of_origin >= limits.per_address + extra && !from_here {
            return Err(Refusal::Invalid(format!(
                "there are {of_origin} connections from this client's address, the most that one address may have (--connections-per-address)"
            )));
        }
        if of_all >= (limits.connections - kept + extra).max(1) && older.is_none() {
            return Err(Refusal::Invalid(format!(
                "there are {of_all} connections, and this server serves {} in all, which its limit of open files (ulimit -n) allows",
                limits.connections
            )));
        }
        // 3. From stranger to settled.
        state.strangers.remove(&self.number);
        if let Some(older) = older {
            state.settled.remove(&older);
        }
        let origin = self.origin;
        state.settled.insert(self.number, Settled { origin, line });
        Ok(())
    }

    /// Notes that this connection began `session`.
    pub(super) fn belongs_to(&self, session: SessionId) {
        let mut state = self.places.state.lock();
        if let Some(settled) = state.settled.get_mut(&self.number) {
            settled.line = Some((session, None));
        }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        state.strangers.remove(&self.number);
        state.settled.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::Ipv4Addr, os::unix::net::UnixStream};

    use super::*;

    fn stream() -> (Arc<PeerStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (Arc::new(PeerStream::Unix(ours)), theirs)
    }

    fn address(last: u8) -> Origin {
        Origin::Address(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[test]
    fn no_address_and_no_session_takes_all_and_who_was_cut_off_comes_back() {
        let places = ConnectionPlaces::new(ConnectionLimits::new(16));
        let (mut number, mut line) = (0, 0);
        let mut place = |origin, aim| {
            number += 1;
            let place = places.arrive(number, origin);
            place.settle(aim).map(|()| place)
        };
        let mut data = |session| {
            line += 1;
            Aim::Data(session, line)
        };
        let (victim, attacker) = (SessionId(1), SessionId(2));
        let control = place(address(1), Aim::Begin).expect("room");
        // 1. One session gets a quarter, one address three.
        let mut taken: Vec<_> = (0..4)
            .map(|_| place(address(2), data(attacker)).expect("room"))
            .collect();
        let refused = place(address(2), data(attacker)).err();
        assert!(matches!(refused, Some(Refusal::Invalid(why)) if why.contains("per-client")));
        taken.extend((4..12).map(|_| place(address(2), Aim::Begin).expect("room")));
        let refused = place(address(2), Aim::Begin).err();
        assert!(matches!(refused, Some(Refusal::Invalid(why)) if why.contains("per-address")));
        // 2. Another address, and more of it than is left for all.
        taken.push(place(address(3), Aim::Begin).expect("room for others"));
        assert!(place(address(3), Aim::Begin).is_err(), "the rest is kept");
        // 3. The session from before comes back, with a first data connection.
        drop(control);
        let _back = place(address(1), Aim::Resume(victim)).expect("a place is kept");
        let _data = place(address(1), data(victim)).expect("a place is kept");
        drop(taken);
        assert!(place(address(2), Aim::Begin).is_ok(), "places come back");
    }

    #[test]
    fn clients_that_come_back_leave_room_for_strangers() {
        for connections in [3, 8, 16, 64] {
            let places = ConnectionPlaces::new(ConnectionLimits::new(connections));
            let mut settled = Vec::new();
            let mut number = 0;
            for host in 1..=3 {
                for session in 1..=connections as u64 {
                    number += 1;
                    let place = places.arrive(number, address(host));
                    let session = SessionId(100 * u64::from(host) + session);
                    if place.settle(Aim::Resume(session)).is_ok() {
                        settled.push(place);
                    }
                }
            }
            assert!(settled.len() < connections, "{connections}");
            let (socket, mut peer) = stream();
            let stranger = places.arrive(number + 1, address(4));
            stranger.occupy(&socket);
            peer.set_nonblocking(true).expect("a socket");
            let is_closed = matches!(peer.read(&mut [0]), Ok(0));
            assert!(!is_closed, "{connections}: nobody can say that it resumes");
        }
    }

    #[test]
    fn silent_strangers_give_way_to_newer_ones() {
        let places = ConnectionPlaces::new(ConnectionLimits::new(8));
        let mut held = Vec::new();
        for number in 0..20 {
            let (socket, peer) = stream();
            let place = places.arrive(number, address(1));
            place.occupy(&socket);
            held.push((place, socket, peer));
        }
        for (i, (_, _, peer)) in held.iter_mut().enumerate() {
            peer.set_nonblocking(true).expect("a socket");
            let is_closed = matches!(peer.read(&mut [0]), Ok(0));
            assert_eq!(is_closed, i < 12, "{i}");
        }
        assert!(held[19].0.settle(Aim::Begin).is_ok());
        // A connection that had to give way before it was made is closed as soon as it is made.
        let late = places.arrive(100, address(1));
        let _newer: Vec<_> = (101..109).map(|i| places.arrive(i, address(1))).collect();
        let (socket, mut peer) = stream();
        late.occupy(&socket);
        assert!(matches!(peer.read(&mut [0]), Ok(0)));
    }

    #[test]
    fn a_newer_connection_of_a_line_takes_the_place_of_the_older_one() {
        let places = ConnectionPlaces::new(ConnectionLimits::new(8));
        let mut numbers = 0..;
        let mut place = |origin, aim| {
            let place = places.arrive(numbers.next().expect("endless"), origin);
            place.settle(aim).map(|()| place)
        };
        let session = SessionId(1);
        let control = place(address(1), Aim::Begin).expect("room");
        control.belongs_to(session);
        let _full: Vec<_> = (0..2)
            .map(|line| place(address(1), Aim::Data(session, line)).expect("room"))
            .collect();
        let mut all = vec![control];
        for round in 0..20 {
            // From another address, too: a router may have given it a new one.
            let aim = Aim::Data(session, round % 2);
            all.push(place(address(2 + round as u8 % 2), aim).expect("its own place"));
            assert!(place(address(1), Aim::Data(session, 7)).is_err());
            all.push(place(address(1), Aim::Resume(session)).expect("its own place"));
        }
        assert_eq!(places.state.lock().settled.len(), 3);
        drop(all);
        drop(_full);
        assert!(places.state.lock().settled.is_empty());
    }
}
