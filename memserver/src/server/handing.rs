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
    time::{Duration, Instant},
};

use farpage_fabric::{
    log,
    server::{KeptConnection, Listener, Shutdown},
};
use farpage_wire::{Endpoint, SessionId};

use super::{LAST_LINES, RunningServer, join};
use crate::handover::{
    Carried, HandedConnection, HandedListener, HandedServer, HandoverError, Kept, ServiceManager,
    Successor, let_all_inherit, seal,
};

/// The longest wait for publications that are answered already, while requests wait.
const WRITTEN: Duration = Duration::from_secs(5);

/// The longest wait for requests under way at a restart, which can be asked for again.
const SOON: Duration = Duration::from_secs(2);
/// The longest wait for requests under way before an end after which nothing is left.
const BEFORE_THE_END: Duration = Duration::from_secs(20);

/// Urgency of a hand-over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Urgency {
    /// The server serves on if a request takes too long.
    Later,
    /// The process ends in any case. A request that takes too long loses its connection.
    Now,
}

impl RunningServer {
    /// Replaces this process by `successor`, which has all that is lent, and serves on. Returns
    /// only if that is not possible, and serves on then: nothing is lost.
    pub fn restart(&mut self, successor: &Successor) -> HandoverError {
        match self.end_with(Urgency::Later, |server, carried| {
            replace(server, carried, successor)
        }) {
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
        // What the manager was to forget before would mix with what it is to keep.
        if let Some(kept) = self.unforgotten.take().and_then(Kept::forget) {
            self.unforgotten = Some(kept);
            let reason = "the service manager keeps what it was to forget";
            return Err(HandoverError::Refused(reason.to_owned()));
        }
        self.end_with(Urgency::Now, |server, carried| {
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
        urgency: Urgency,
        hand: impl FnOnce(&HandedServer, &Carried<'_>) -> Result<T, HandoverError>,
    ) -> Result<T, HandoverError> {
        self.may_hand_over()?;
        let (listeners, kept) = self.pause(urgency)?;
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
        Ok(())
    }

    /// Stops all requests, while data is moved still.
    ///
    /// # Errors
    /// [`HandoverError`]: one takes too long, or a disk does.
    fn stop_requests(&self, urgency: Urgency) -> Result<(), HandoverError> {
        let patience = match urgency {
            Urgency::Later => SOON,
            Urgency::Now => BEFORE_THE_END,
        };
        let refused = |reason: &str| Err(HandoverError::Refused(reason.to_owned()));
        let is_stopped = self.service.stop_requests(Instant::now() + patience);
        if !is_stopped && urgency == Urgency::Later {
            return refused("a request takes too long: try again when it has ended");
        }
        // No request adds a publication any more.
        match self.state.wait_written(Instant::now() + WRITTEN) {
            true => Ok(()),
            false => refused(
                "the disk of --persist takes too long: try again when it has all publications",
            ),
        }
    }

    /// Stops serving. Returns the listeners, and the connections between two requests.
    ///
    /// # Errors
    /// [`HandoverError`]: a request takes too long. Everything goes on as if nothing had been.
    fn pause(
        &mut self,
        urgency: Urgency,
    ) -> Result<(Vec<Listener>, Vec<KeptConnection>), HandoverError> {
        // A lease that ends while its renewal is not read would be the server's fault.
        self.stop_reaper();
        if let Err(refused) = self.stop_requests(urgency) {
            self.service.take_requests();
            if let Err(error) = self.spawn_reaper(self.look_every) {
                tracing::error!(%error, "cannot take memory back from clients that are gone");
            }
            return Err(refused);
        }
        self.service.hand_over();
        let listeners = self.listening.drain(..).filter_map(join).flatten();
        let listeners = listeners.collect();
        // A writer whose disk hangs stays, and a name that is being written is a refusal.
        if self.state.wait_written(Instant::now() + WRITTEN) {
            self.state.end_jobs();
            self.writer.take().map(join);
        }
        drop(self.evictors.take());
        let kept = self.service.take_kept();
        let mut sessions: HashMap<SessionId, usize> = HashMap::new();
        for connection in &kept {
            *sessions.entry(connection.session).or_default() += 1;
        }
        self.state.disconnect(&sessions);
        Ok((listeners, kept))
    }

    /// Serves again.
    fn resume(&mut self, listeners: Vec<Listener>, kept: Vec<KeptConnection>) {
        if let Some(tier) = self.state.tier() {
            tier.go_on();
        }
        let resumed = Shutdown::new().and_then(|shutdown| {
            self.service = self.service.again(shutdown.clone());
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
                inode: listener.inode(),
            });
        }
        let mut connections = Vec::new();
        for it in kept {
            connections.push(HandedConnection {
                socket: carried.add(it.as_fd()),
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
            capacity_bytes: self.state.limits().capacity_bytes,
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
) -> Result<Infallible, HandoverError> {
    let state = seal(&server.encode()).map_err(system)?;
    let_all_inherit(carried, &state, true).map_err(system)?;
    let replaced = successor.rehearse(&state).and_then(|()| {
        log::flush(Instant::now() + LAST_LINES);
        Err(successor.replace(&state))
    });
    let_all_inherit(carried, &state, false).map_err(system)?;
    replaced
}

fn system(error: io::Error) -> HandoverError {
    HandoverError::Refused(format!("the system refuses it: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use farpage_testkit::{RawClient, wait_until};
    use farpage_wire::{Request, Response, control};

    use super::*;
    use crate::Server;

    #[test]
    fn a_request_that_takes_too_long_keeps_its_connection_and_the_process() {
        let endpoint = "tcp://127.0.0.1:0".parse().expect("an endpoint");
        let server = Server::builder().listen(endpoint).start();
        let mut server = server.expect("started");
        let connect = |server: &RunningServer| {
            let begun = RawClient::session(&server.endpoints()[0]);
            begun.expect("a session").0
        };
        let (mut slow, mut quick) = (connect(&server), connect(&server));
        // Long enough to be counted while it comes.
        let publish = Request::Publish {
            name: "name".to_owned(),
            manifest: vec![1; 64 << 10],
            extents: Vec::new(),
            ballot: None,
            keeps: false,
        };
        let request = control::encode(&publish).expect("short");
        let (half, rest) = request.split_at(request.len() / 2);
        slow.write_all(half).expect("sent");
        wait_until("it is being received", || server.stat().request_bytes > 0);
        let granted = |client: &mut RawClient| client.grant(4096).is_ok();
        let handed = server.end_with(Urgency::Later, |_, _| Ok(()));
        let said = handed.expect_err("it is not stopped").to_string();
        assert!(said.contains("takes too long"), "{said}");
        assert!(granted(&mut quick));
        slow.write_all(rest).expect("sent");
        let answer = slow.hear().expect("an answer");
        assert!(matches!(answer, Response::Refused(_)), "no key: {answer:?}");
        // Both connections can be handed over now, and stay where nobody takes them.
        for _ in 0..2 {
            let failed = |_: &HandedServer, _: &Carried<'_>| -> Result<(), _> {
                Err(HandoverError::Refused("nobody takes over".to_owned()))
            };
            let said = server
                .end_with(Urgency::Later, failed)
                .expect_err("refused")
                .to_string();
            assert!(said.contains("nobody takes over"), "{said}");
            assert!(granted(&mut quick) && granted(&mut slow));
        }
        assert_eq!(server.stat().sessions, 2);
    }
}
