//! The end of serving at a hand-over, and its beginning in the next process or, if that cannot take
//! over, in this one.
//!
//! The rule it keeps: from the moment at which clients are not served any more, every way leads to
//! their being served again.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    os::fd::AsFd,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Origin, Transport},
    log,
    server::{KeptConnection, Listener, Service, Shutdown},
};
use farpage_wire::{Endpoint, Persistence, SessionId};
use nix::sys::signal::{SigSet, Signal};
use tracing::{info, warn};

use super::{LAST_LINES, RunningServer, join};
use crate::{
    durable::DurableNames,
    handover::{
        Carried, Descriptors, HandedConnection, HandedDurable, HandedListener, HandedServer,
        Handover, HandoverError, ServiceManager, Successor, let_all_inherit, seal,
    },
    tier::Tier,
};

/// The longest wait for publications that are answered already.
const WRITTEN: Duration = Duration::from_secs(10);

/// Signals that the next process handles once it can. Until then they wait.
const SIGNALS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGUSR2,
];

/// Lets signals come to this process that an earlier one left waiting.
///
/// # Errors
/// The kernel's error.
pub fn take_signals() -> io::Result<()> {
    Ok(SigSet::from_iter(SIGNALS).thread_unblock()?)
}

impl RunningServer {
    /// Replaces this process by `successor`, which has all that is lent, and serves on. Returns
    /// only if that is not possible, and serves on then: nothing is lost.
    pub fn restart(&mut self, successor: &Successor) -> HandoverError {
        let began = Instant::now();
        let replace = |server: &HandedServer, carried: &Carried<'_>| {
            replace(server, carried, successor, began)
        };
        match self.end_with(replace) {
            Err(failed) => failed,
            Ok(never) => match never {},
        }
    }

    /// Gives all that is lent to `manager`, for the service's next process. The caller ends this
    /// process at once, by `exit`: what the next one has is not to be closed.
    ///
    /// # Errors
    /// [`HandoverError`]; the server serves on.
    pub fn store(&mut self, manager: &ServiceManager) -> Result<(), HandoverError> {
        self.end_with(|server, carried| {
            let state = seal(&server.encode()).map_err(system)?;
            manager.store(carried, &state)?;
            log::flush(Instant::now() + LAST_LINES);
            Ok(())
        })
    }

    /// Stops serving, and calls `hand` with everything that the next process needs. Serves on if
    /// that fails.
    fn end_with<T>(
        &mut self,
        hand: impl FnOnce(&HandedServer, &Carried<'_>) -> Result<T, HandoverError>,
    ) -> Result<T, HandoverError> {
        self.may_hand_over()?;
        let (listeners, kept) = self.pause();
        let mut carried = Carried::default();
        let handed = self
            .hand_over(&listeners, &kept, &mut carried)
            .and_then(|server| hand(&server, &carried));
        drop(carried);
        match handed {
            Ok(handed) => {
                // They belong to the next process, too, and are not to be closed by this one.
                std::mem::forget((listeners, kept));
                Ok(handed)
            }
            Err(failed) => {
                self.resume(listeners, kept);
                Err(failed)
            }
        }
    }

    /// Checks that the server can be handed over now.
    fn may_hand_over(&self) -> Result<(), HandoverError> {
        let rdma = |endpoint: &&Endpoint| matches!(endpoint, Endpoint::Rdma { .. });
        if let Some(endpoint) = self.endpoints.iter().find(rdma) {
            return Err(HandoverError::Refused(format!(
                "clients over {endpoint} have keys of memory that end with this process; stop and start the server, or drain it with --drain-timeout"
            )));
        }
        // Data is moved meanwhile.
        if !self.state.wait_written(Instant::now() + WRITTEN) {
            return Err(HandoverError::Refused(
                "the disk of --persist takes too long: try again when it has all publications"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Stops serving. Returns the listeners, and the connections between two requests.
    fn pause(&mut self) -> (Vec<Listener>, Vec<KeptConnection>) {
        self.service.hand_over();
        let listeners = self.listening.drain(..).filter_map(join).flatten();
        let listeners = listeners.collect();
        self.stop_reaper();
        self.state.end_jobs();
        self.writer.take().map(join);
        drop(self.evictors.take());
        let kept = self.service.take_kept();
        let mut sessions: HashMap<SessionId, usize> = HashMap::new();
        for connection in &kept {
            *sessions.entry(connection.session).or_default() += 1;
        }
        self.state.disconnect(&sessions);
        (listeners, kept)
    }

    /// Serves again.
    fn resume(&mut self, listeners: Vec<Listener>, kept: Vec<KeptConnection>) {
        *self.reaper_stops.0.lock() = false;
        if let Some(tier) = self.state.tier() {
            tier.go_on();
        }
        let resumed = Shutdown::new().and_then(|shutdown| {
            let (host, traffic) = (self.state.clone(), Arc::clone(&self.traffic));
            self.service = Service::new(host, self.limits, traffic, shutdown.clone());
            self.shutdown = shutdown;
            self.spawn_threads(listeners, kept)
        });
        if let Err(error) = resumed {
            tracing::error!(%error, "cannot serve all clients again");
        }
    }

    /// Writes all that the next process needs.
    fn hand_over<'a>(
        &self,
        listeners: &'a [Listener],
        kept: &'a [KeptConnection],
        carried: &mut Carried<'a>,
    ) -> Result<HandedServer, HandoverError> {
        if !self.service.is_settled() {
            return Err(HandoverError::Refused(
                "a request takes too long: try again when it has ended".to_owned(),
            ));
        }
        let books = self.state.hand_over(carried)?;
        let durable = self.state.durable().map(|durable| {
            let lock = durable.locked().ok_or_else(|| {
                HandoverError::Refused("the directory of --persist is not locked".to_owned())
            })?;
            Ok(durable.hand_over(carried.add(lock)))
        });
        let tier = self.state.tier().map(|tier| tier.hand_over(carried));
        let mut handed_listeners = Vec::new();
        for listener in listeners {
            let found = listener.endpoint();
            let place = self.endpoints.iter().position(|it| it == found);
            let place = place.expect("a listener of this server");
            handed_listeners.push(HandedListener {
                asked: self.asked[place].clone(),
                found: found.clone(),
                socket: carried.add(listener.as_fd()),
            });
        }
        let mut connections = Vec::new();
        for it in kept {
            connections.push(HandedConnection {
                socket: carried.add(it.socket.as_fd()),
                transport: it.transport,
                peer: it.peer.name.clone(),
                origin: it.peer.origin,
                session: it.session,
                lease_ms: it.lease.as_millis() as u64,
                challenge: it.asked.challenge,
                is_leaving: it.asked.is_leaving,
            });
        }
        Ok(HandedServer {
            descriptors: carried.numbers(),
            listeners: handed_listeners,
            connections,
            traffic: [self.traffic.bytes_read(), self.traffic.bytes_written()],
            books,
            durable: durable.transpose()?,
            tier: tier.transpose()?,
        })
    }
}

/// Replaces this process by `successor`. Returns only if that fails.
fn replace(
    server: &HandedServer,
    carried: &Carried<'_>,
    successor: &Successor,
    began: Instant,
) -> Result<Infallible, HandoverError> {
    let state = seal(&server.encode()).map_err(system)?;
    let_all_inherit(carried, &state, true).map_err(system)?;
    let replaced = successor.rehearse(&state).and_then(|()| {
        info!(
            sessions = server.books.sessions.len(),
            extents = server.books.extents.len(),
            ms = began.elapsed().as_millis() as u64,
            "handing over to the next process"
        );
        log::flush(Instant::now() + LAST_LINES);
        let signals = SigSet::from_iter(SIGNALS);
        signals
            .thread_block()
            .map_err(|errno| system(errno.into()))?;
        let refused = successor.replace(&state);
        signals
            .thread_unblock()
            .map_err(|errno| system(errno.into()))?;
        Err(refused)
    });
    let_all_inherit(carried, &state, false).map_err(system)?;
    replaced
}

fn system(error: io::Error) -> HandoverError {
    HandoverError::Refused(format!("the system refuses it: {error}"))
}

/// Divides kept connections among `listeners`: each goes to the first of its transport, or to the
/// first of all.
pub(super) fn divide(
    listeners: Vec<Listener>,
    kept: Vec<KeptConnection>,
) -> Vec<(Listener, Vec<KeptConnection>)> {
    let mut all: Vec<_> = listeners.into_iter().map(|it| (it, Vec::new())).collect();
    for connection in kept {
        let is_its = |it: &(Listener, Vec<_>)| it.0.transport() == connection.transport;
        let place = all.iter().position(is_its).unwrap_or(0);
        match all.get_mut(place) {
            Some((_, its)) => its.push(connection),
            None => warn!("a client's connection is closed, since no endpoint is left"),
        }
    }
    debug_assert!(
        (all.iter()).all(|(_, its)| its.iter().all(|it| it.transport != Transport::Rdma))
    );
    all
}

/// Takes over the directory of names.
///
/// # Errors
/// [`HandoverError`]: the settings name another directory, or none.
pub(super) fn take_durable(
    handed: Option<HandedDurable>,
    persist: Option<&(std::path::PathBuf, Persistence)>,
    descriptors: &mut Descriptors,
) -> Result<Option<DurableNames>, HandoverError> {
    let none = || "none".to_owned();
    let before = handed.as_ref().map(|it| it.directory.clone());
    let now = persist.map(|(directory, _)| directory.display().to_string());
    if before != now {
        return Err(HandoverError::Setting {
            setting: "--persist",
            before: before.unwrap_or_else(none),
            now: now.unwrap_or_else(none),
        });
    }
    let Some((handed, (directory, when))) = handed.zip(persist) else {
        return Ok(None);
    };
    let lock = descriptors.take(handed.lock)?;
    let directory: &Path = directory;
    DurableNames::take_over(directory, *when, handed, lock)
        .map(Some)
        .map_err(|error| HandoverError::State(format!("{}: {error}", directory.display())))
}

/// Takes over what is outside of memory.
///
/// # Errors
/// [`HandoverError`]: the settings have changed.
pub(super) fn take_tier(
    handed: &mut Handover,
    bytes: (u64, u64),
    directory: &Path,
    weights: HashMap<Origin, u32>,
) -> Result<Arc<Tier>, HandoverError> {
    let Some(tier) = &mut handed.server.tier else {
        return Err(HandoverError::Setting {
            setting: "--spill",
            before: "none".to_owned(),
            now: directory.display().to_string(),
        });
    };
    Tier::take_over(tier, &mut handed.descriptors, bytes, directory, weights)
}
