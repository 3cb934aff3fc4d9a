//! [`Places`]: how many connections a listener serves, and whose.
//!
//! The rule it keeps: no address, no session and no crowd of silent connections takes the places of
//! the others. A connection is a *stranger* until it has said what it is for. Strangers share what
//! is left, at least [`Places::kept`] places, and give way to newer ones: the oldest is closed when
//! there is no place. What has begun, resumed or joined a session is *settled*, and counts against
//! its address and its session.
//!
//! Deliberately absent: fairness among clients behind one address, which cannot be told apart.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
};

use farpage_wire::{Refusal, SessionId};
use parking_lot::Mutex;

use crate::{host::Origin, stream::Stream};

/// Of all places, one in so many is kept from new sessions: for resuming, for a session's first
/// data connection, and for strangers.
const KEPT_ONE_IN: usize = 8;

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Of a listener: each takes a thread and a descriptor.
    pub connections: usize,
    /// Of one address, or over shared memory of one user. Default: three quarters.
    pub per_address: usize,
    /// Data connections of one session. Default: a quarter.
    pub per_session: usize,
}

impl ConnectionLimits {
    /// At most `connections`; the defaults for the rest. 256 processes of one machine with 11
    /// connections each fit into 4096.
    pub fn new(connections: usize) -> Self {
        Self {
            connections,
            per_address: (connections / 4 * 3).max(1),
            per_session: (connections / 4).max(1),
        }
    }
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self::new(super::connections_max())
    }
}

/// What a connection turns out to be for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    Begin,
    Resume,
    Data(SessionId),
}

pub(super) struct Places {
    limits: ConnectionLimits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the order in which they came.
    strangers: BTreeMap<u64, Weak<Stream>>,
    settled: usize,
    by_origin: HashMap<Origin, usize>,
    by_session: HashMap<SessionId, usize>,
}

/// One connection's place, until it is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    origin: Origin,
    aim: Mutex<Option<Aim>>,
}

impl Places {
    pub(super) fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            state: Mutex::default(),
        })
    }

    fn kept(&self) -> usize {
        (self.limits.connections / KEPT_ONE_IN).max(1)
    }

    /// A place for a connection that has said nothing yet. Closes the strangers that are too many,
    /// the oldest first.
    pub(super) fn arrive(
        self: &Arc<Self>,
        number: u64,
        origin: Origin,
        stream: &Arc<Stream>,
    ) -> Place {
        let mut state = self.state.lock();
        state.strangers.insert(number, Arc::downgrade(stream));
        let mut evicted = Vec::new();
        while state.settled + state.strangers.len() > self.limits.connections.max(2) {
            let Some((_, oldest)) = state.strangers.pop_first() else {
                break;
            };
            evicted.push(oldest);
        }
        drop(state);
        for stream in evicted.iter().filter_map(Weak::upgrade) {
            stream.close();
        }
        Place {
            places: Arc::clone(self),
            number,
            origin,
            aim: Mutex::new(None),
        }
    }
}

impl Place {
    /// The connection has said what it is for.
    ///
    /// # Errors
    /// In words for the client: there are too many of its kind.
    pub(super) fn settle(&self, aim: Aim) -> Result<(), Refusal> {
        let (limits, kept) = (&self.places.limits, self.places.kept());
        let mut state = self.places.state.lock();
        let of_origin = state.by_origin.get(&self.origin).copied().unwrap_or(0);
        let mut of_session = 0;
        if let Aim::Data(session) = aim {
            of_session = state.by_session.get(&session).copied().unwrap_or(0);
            if of_session >= limits.per_session {
                return Err(Refusal::Invalid(format!(
                    "this client has {of_session} data connections, the most that one may have (--connections-per-client)"
                )));
            }
        }
        // Who has lost a connection must be able to come back, or it loses its memory.
        let extra = match aim {
            Aim::Resume => kept,
            Aim::Data(_) if of_session == 0 => kept,
            Aim::Begin | Aim::Data(_) => 0,
        };
        if of_origin >= limits.per_address + extra {
            return Err(Refusal::Invalid(format!(
                "there are {of_origin} connections from this client's address, the most that one may have (--connections-per-address)"
            )));
        }
        if state.settled >= (limits.connections + extra).saturating_sub(kept).max(1) {
            return Err(Refusal::Invalid(format!(
                "there are {} connections, and this server serves {} in all, which its limit of open files (ulimit -n) allows",
                state.settled, limits.connections
            )));
        }
        state.strangers.remove(&self.number);
        state.settled += 1;
        *state.by_origin.entry(self.origin).or_default() += 1;
        if let Aim::Data(session) = aim {
            *state.by_session.entry(session).or_default() += 1;
        }
        *self.aim.lock() = Some(aim);
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        state.strangers.remove(&self.number);
        let Some(aim) = *self.aim.lock() else { return };
        state.settled -= 1;
        leave(&mut state.by_origin, self.origin);
        if let Aim::Data(session) = aim {
            leave(&mut state.by_session, session);
        }
    }
}

/// One less; an entry for nobody is dropped.
fn leave<K: Eq + std::hash::Hash>(counts: &mut HashMap<K, usize>, key: K) {
    if let std::collections::hash_map::Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::Ipv4Addr, os::unix::net::UnixStream};

    use super::*;

    fn stream() -> (Arc<Stream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (Arc::new(Stream::Unix(ours)), theirs)
    }

    fn address(last: u8) -> Origin {
        Origin::Address(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[test]
    fn no_address_and_no_session_takes_all_and_who_was_cut_off_comes_back() {
        let places = Places::new(ConnectionLimits::new(16));
        let (socket, _peer) = stream();
        let mut number = 0;
        let mut place = |origin, aim| {
            number += 1;
            let place = places.arrive(number, origin, &socket);
            place.settle(aim).map(|()| place)
        };
        let (victim, attacker) = (SessionId(1), SessionId(2));
        let control = place(address(1), Aim::Begin).expect("room");
        // 1. One session gets a quarter, one address three.
        let mut taken: Vec<_> = (0..4)
            .map(|_| place(address(2), Aim::Data(attacker)).expect("room"))
            .collect();
        let refused = place(address(2), Aim::Data(attacker)).err();
        assert!(matches!(refused, Some(Refusal::Invalid(why)) if why.contains("per-client")));
        taken.extend((4..12).map(|_| place(address(2), Aim::Begin).expect("room")));
        let refused = place(address(2), Aim::Begin).err();
        assert!(matches!(refused, Some(Refusal::Invalid(why)) if why.contains("per-address")));
        // 2. Another address, and more of it than is left for all.
        taken.push(place(address(3), Aim::Begin).expect("room for others"));
        assert!(place(address(3), Aim::Begin).is_err(), "the rest is kept");
        // 3. Who was there before comes back, with a first data connection; also from the crowded
        //    address.
        drop(control);
        let _back = place(address(1), Aim::Resume).expect("a place is kept");
        let _data = place(address(1), Aim::Data(victim)).expect("a place is kept");
        drop(taken);
        assert!(place(address(2), Aim::Begin).is_ok(), "places come back");
    }

    #[test]
    fn silent_strangers_give_way_to_newer_ones() {
        let places = Places::new(ConnectionLimits::new(8));
        let mut held = Vec::new();
        for number in 0..20 {
            let (socket, peer) = stream();
            held.push((places.arrive(number, address(1), &socket), socket, peer));
        }
        for (i, (_, _, peer)) in held.iter_mut().enumerate() {
            peer.set_nonblocking(true).expect("a socket");
            let is_closed = matches!(peer.read(&mut [0]), Ok(0));
            assert_eq!(is_closed, i < 12, "{i}");
        }
        assert!(held[19].0.settle(Aim::Begin).is_ok());
    }
}
