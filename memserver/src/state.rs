//! Ownership of the lent memory: the daemon's side of
//! [`Host`](farpage_fabric::host::Host).
//!
//! The rule it keeps: every byte that is granted belongs to one session, one published name or the
//! [`readers`] of a version, and is given back when the last of them lets go. Memory is always
//! fresh: an extent is a new sealed file that reads as zeros, and freeing it closes the file, so
//! nobody sees what another client left behind. A published extent whose file another user was
//! given is copied into a new one when it is opened. Memory that a client over shared memory gave
//! back and still maps stays [charged](reclaim) to that client.
//!
//! Two structures. The *ledger*, under one lock, is the truth: sessions, extents, names, sums; only
//! control messages and the reaper come here. The *leases* are what a READ or WRITE looks at:
//! extent to owner and memory, in shards that are only read-locked, and written while the ledger is
//! held, so that both never disagree for long. The downside: control messages of all clients take
//! turns. They are rare, and none of them does I/O while it holds the lock.
//!
//! Left to others: sockets and frames (`farpage_fabric::server`), when to stop ([`crate::Server`]).

use std::{
    hash::{BuildHasher, RandomState},
    process,
    sync::{Arc, mpsc::Sender},
    time::{Duration, Instant},
};

use farpage_fabric::log::later;
use farpage_wire::{ExtentId, ServerId, SessionId};
use parking_lot::{Condvar, Mutex};
use tracing::{info, warn};

mod accounts;
mod handing;
mod host;
mod jobs;
mod leases;
mod ledger;
mod names;
mod opening;
mod publishing;
mod readers;
mod reclaim;
mod records;
mod restoring;
mod views;

use crate::{durable::DurableNames, tier::Tier};
pub use accounts::Limits;
use leases::Leases;
use ledger::Ledger;
use records::{Freed, Job, Leaving, Retained, SessionRecord};

/// Pause between two looks for memory that sessions hold, while the server waits for its clients.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The state of one server: sessions, extents, names, leases and charges.
pub struct State {
    limits: Limits,
    started: Instant,
    leases: Leases,
    ledger: Mutex<Ledger>,
    retained: Mutex<Vec<Retained>>,
    /// Mover of chunks out of memory and back, on a server that lends more than its memory.
    tier: Option<Arc<Tier>>,
    /// Writer of published names, on a server that keeps them on a disk.
    durable: Option<DurableNames>,
    /// Publications that wait for the disk, and are answered already.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Signalled when a name's file has been written or removed.
    written: Condvar,
    /// Signalled when a session ends, for threads that wait for the last session.
    ended: Condvar,
}

impl State {
    /// Makes the state of a server without sessions and grants.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            started: Instant::now(),
            leases: Leases::default(),
            ledger: Mutex::new(Ledger {
                id: new_id(),
                ..Ledger::default()
            }),
            retained: Mutex::default(),
            tier: None,
            durable: None,
            jobs: Mutex::default(),
            written: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    /// Makes a state as [`new`](Self::new) does, with memory that `tier` moves out and back.
    /// Adapters then need on-demand paging.
    pub(crate) fn with_tier(limits: Limits, tier: Option<Arc<Tier>>) -> Self {
        Self {
            tier,
            ..Self::new(limits)
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes over the names' directory of an earlier process.
    pub(crate) fn set_durable(&mut self, durable: Option<DurableNames>) {
        self.durable = durable;
    }

    /// Returns the mover of chunks, if there is one.
    pub(crate) fn tier(&self) -> Option<&Arc<Tier>> {
        self.tier.as_ref()
    }

    /// Returns the writer of published names, if they are kept on a disk.
    pub(crate) fn durable(&self) -> Option<&DurableNames> {
        self.durable.as_ref()
    }

    /// Stops admitting new sessions. Existing sessions go on.
    pub fn drain(&self) {
        self.ledger.lock().draining = true;
    }

    /// Stops admitting new sessions, and asks the existing ones to move their memory to other
    /// servers. Grants nothing from now on.
    pub(crate) fn ask_to_leave(&self) {
        let mut ledger = self.ledger.lock();
        (ledger.draining, ledger.asks_to_leave) = (true, true);
    }

    /// Waits until no session is left, or `deadline`. Returns how many clients are still connected.
    pub fn wait_until_empty(&self, deadline: Instant) -> usize {
        let mut ledger = self.ledger.lock();
        while !ledger.sessions.is_empty()
            && !self.ended.wait_until(&mut ledger, deadline).timed_out()
        {}
        ledger.connected()
    }

    /// Waits until no session holds memory any more, or until the deadline. While clients are
    /// connected, waits until `told` at least. Returns the bytes that sessions still hold.
    pub fn wait_until_unused(&self, told: Instant, deadline: Instant) -> u64 {
        let mut ledger = self.ledger.lock();
        loop {
            let held = ledger.held_bytes();
            let now = Instant::now();
            let is_unused = held == 0 && (now >= told || ledger.connected() == 0);
            if is_unused || now >= deadline {
                return held;
            }
            // The end of a session rings; an extent that is given back does not.
            let look = deadline.min(now + LOOK_EVERY);
            self.ended.wait_until(&mut ledger, look);
        }
    }

    /// Ends the sessions whose lease has run out at `now`, or whose client is gone and has not come
    /// back. Returns the number of ended sessions.
    ///
    /// The caller calls `reap` several times per [shortest](Limits::shortest) time. After a longer
    /// gap this process was stopped or starved, and renewals that clients sent in time may be
    /// unread: all sessions get a fresh lease then, instead of losing memory through our fault.
    pub fn reap(&self, now: Instant) -> usize {
        let began = Instant::now();
        if let Some(tier) = &self.tier {
            tier.punch_strays();
            tier.log_figures(now);
        }
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
            later(|| warn!("this server did not run for a while: all leases start anew"));
            return 0;
        }
        let since = |then| now.saturating_duration_since(then);
        let why = |session: &SessionRecord| {
            let is_gone = |lost| since(lost) > self.limits.reconnect_grace;
            if session.lost.is_some_and(is_gone) {
                Some("its connection was closed without a goodbye, and it did not come back")
            } else {
                (since(session.renewed) > session.lease).then_some("its lease ran out")
            }
        };
        let over: Vec<(SessionId, &str)> = (ledger.sessions.iter())
            .filter(|(_, session)| session.in_disk == 0)
            .filter_map(|(id, session)| Some((*id, why(session)?)))
            .collect();
        let ended: Vec<Ended> = (over.iter())
            .filter_map(|(id, why)| self.end(&mut ledger, *id, why))
            .collect();
        drop(ledger);
        let count = ended.len();
        // All sessions together: `give_back` handles kept memory before freed memory.
        self.give_back(ended.into_iter().flat_map(Ended::finish));
        self.sweep();
        // The time of this pass is no gap in which the process did not run.
        self.ledger.lock().reaped = Some(now + began.elapsed());
        count
    }

    /// Ends session `id`. Its extents are freed, unless a published name or a reader keeps them.
    fn end(&self, ledger: &mut Ledger, id: SessionId, why: &'static str) -> Option<Ended> {
        let session = ledger.sessions.remove(&id)?;
        ledger.accounts.end_session(session.origin);
        for name in &session.names {
            ledger.free_name(name);
        }
        let mut freed = Freed::new();
        for extent in &session.extents {
            freed.push(self.end_lease(ledger, *extent));
        }
        for view in &session.views {
            freed.extend(self.end_view(ledger, *view));
        }
        self.ended.notify_all();
        Some(Ended {
            id,
            client: session.client,
            address: session.address,
            held_extents: session.extents.len() + session.views.len(),
            freed,
            why,
        })
    }

    /// Takes extent `id` from its lessee. Forgets the extent if no name and no reader keeps it.
    fn end_lease(&self, ledger: &mut Ledger, id: ExtentId) -> Leaving {
        let record = ledger
            .extents
            .get_mut(&id)
            .expect("a session holds only extents that exist");
        record.lessee = None;
        // The data connections that hold this handle in mid-operation stop, too.
        record.memory.revoke();
        let is_kept = record.is_kept();
        let memory = record.memory.clone();
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
}

/// Draws an identity that no other server has. The standard library's hashers have random keys.
fn new_id() -> ServerId {
    let half = || u128::from(RandomState::new().hash_one(process::id()));
    ServerId(half() << 64 | half())
}

/// A session that has ended, to be logged and given back once the ledger is unlocked.
struct Ended {
    id: SessionId,
    client: String,
    address: String,
    held_extents: usize,
    freed: Freed,
    why: &'static str,
}

impl Ended {
    /// Logs the end. Returns the memory to be [given back](State::give_back).
    fn finish(self) -> Freed {
        let (client, address, held_extents, freed_extents) = (
            self.client,
            self.address,
            self.held_extents,
            self.freed.iter().filter(|leaving| !leaving.is_kept).count(),
        );
        let (session, why) = (self.id, self.why);
        later(move || {
            info!(%session, client, address, held_extents, freed_extents, "session ended: {why}");
        });
        self.freed
    }
}

#[cfg(test)]
mod tests;
