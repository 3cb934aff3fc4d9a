//! [`ServerThread`], and the loop that accepts the connections of a [`Service`].
//!
//! The rule it keeps: a connection has its place among all of the server before anything is made
//! for it, whichever listener it came through.

use std::{
    collections::HashMap,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::Endpoint;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    connection::Connection,
    kept::{Accepted, KeptConnection, Stage, let_end},
    listen::{Listener, SocketAccess},
    places::{Aim, ConnectionLimits, ConnectionPlace},
    service::{Service, Shutdown},
    traffic::ServerTraffic,
};
use crate::{
    errors::BindError,
    host::{Host, Peer, Transport},
    log::later,
    stream::PeerStream,
};

/// Upper bound of a server's wait at its end for the threads of its connections, whose sockets are
/// closed by then.
const JOIN: Duration = Duration::from_secs(5);

/// Number of threads of closed connections that may exist beyond the limit before no more
/// connections are accepted.
const ENDING: usize = 64;

/// One listener with the default limits, served on a thread of its own. Dropping it ends it.
#[must_use = "the server ends when this is dropped"]
pub struct ServerThread {
    endpoint: Endpoint,
    traffic: Arc<ServerTraffic>,
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl ServerThread {
    /// Binds `endpoint` for this user alone and serves `host`. Clients can connect once this
    /// returns.
    ///
    /// # Errors
    /// [`BindError`]
    pub fn start(endpoint: &Endpoint, host: Arc<dyn Host>) -> Result<Self, BindError> {
        let listener = Listener::bind(endpoint, SocketAccess::Owner)?;
        let endpoint = listener.endpoint().clone();
        let failed = |source| BindError::Io {
            endpoint: endpoint.to_string(),
            source,
        };
        let (traffic, shutdown) = (
            Arc::<ServerTraffic>::default(),
            Shutdown::new().map_err(failed)?,
        );
        let limits = ConnectionLimits::default();
        let service = Service::new(host, limits, Arc::clone(&traffic), shutdown.clone());
        let thread = thread::Builder::new().name("farpage-listen".to_owned());
        let thread = thread.spawn(move || drop(service.serve(listener, Vec::new())));
        Ok(Self {
            thread: Some(thread.map_err(failed)?),
            endpoint,
            traffic,
            shutdown,
        })
    }

    /// Returns the endpoint, with the port that was found when 0 was asked for.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the payload bytes that the server has moved.
    pub fn traffic(&self) -> &ServerTraffic {
        &self.traffic
    }

    /// Closes all connections and waits until their threads have ended.
    ///
    /// # Errors
    /// The panic of the thread that accepts.
    pub fn end(&mut self) -> thread::Result<()> {
        self.shutdown.begin();
        self.thread.take().map_or(Ok(()), JoinHandle::join)
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        // A panic has printed its message.
        let _ = self.end();
    }
}

impl Service {
    /// Serves the control connections `kept` by an earlier process, and accepts and serves others,
    /// until the shutdown begins; then closes them, joins their threads and returns. Several
    /// threads may serve a listener each. After a [hand-over](Self::hand_over) returns the
    /// listener, for the next process.
    pub fn serve(
        self: &Arc<Self>,
        mut listener: Listener,
        kept: Vec<KeptConnection>,
    ) -> Option<Listener> {
        listener.is_served();
        let mut connections: HashMap<u64, Accepted> = HashMap::new();
        for kept in kept {
            connections.extend(self.go_on(kept));
        }
        while !self.shutdown.has_begun() {
            let mut fds = [listener.as_fd(), self.shutdown.0.begun.as_fd()]
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // An interrupted poll is as good as one that found nothing.
            let _ = poll(&mut fds, PollTimeout::NONE);
            connections.retain(|_, it| !it.thread.is_finished());
            if connections.len() >= self.limits.connections + ENDING {
                // Closed connections end at once. The next client waits for that in the backlog.
                let _ = poll(&mut fds[1..], PollTimeout::from(5u8));
                continue;
            }
            let call = match listener.accept() {
                Ok(Some(call)) => call,
                Ok(None) => continue,
                Err(error) => {
                    let endpoint = listener.endpoint().clone();
                    later(move || tracing::warn!(%endpoint, %error, "cannot accept a connection"));
                    // Out of descriptors: the client stays in the backlog, and spinning would not
                    // help it.
                    let _ = poll(&mut fds[1..], PollTimeout::from(50u8));
                    continue;
                }
            };
            let number = self.accepted.fetch_add(1, Ordering::Relaxed);
            let peer = call.peer().clone();
            let place = self.places.arrive(number, peer.origin);
            let Some(stream) = listener.answer(call, &*self.host, &place) else {
                continue;
            };
            let transport = listener.transport();
            let connection = self.connection(Arc::new(stream), transport, peer, place);
            connections.extend(self.spawn(number, connection, Connection::run));
        }
        let listener = match self.is_handing_over() {
            true => {
                let_end(connections.values());
                Some(listener)
            }
            false => {
                drop(listener);
                None
            }
        };
        self.frames.close();
        let until = Instant::now() + JOIN;
        let is_open = |it: &&Accepted| !it.thread.is_finished() && !it.stage.is_kept();
        let open = connections.values().filter(is_open);
        for stream in open.filter_map(|it| it.socket.upgrade()) {
            stream.close();
        }
        for Accepted { thread, .. } in connections.into_values() {
            // A join has no time limit; a closed socket wakes the threads at once.
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            match thread.is_finished().then(|| thread.join()) {
                Some(Ok(())) => {}
                Some(Err(_)) => {
                    later(|| {
                        tracing::error!("a connection's thread panicked; its message is above");
                    });
                }
                None => {
                    self.unsettled.store(true, Ordering::Relaxed);
                    later(|| {
                        tracing::warn!("a connection's thread did not end within {JOIN:?}");
                    });
                }
            }
        }
        listener
    }

    fn connection(
        self: &Arc<Self>,
        stream: Arc<PeerStream>,
        transport: Transport,
        peer: Peer,
        place: ConnectionPlace,
    ) -> Connection {
        place.occupy(&stream);
        Connection {
            stream,
            stage: Arc::<Stage>::default(),
            transport,
            peer,
            place,
            service: Arc::clone(self),
        }
    }

    /// Starts the thread of connection `number`. Logs why there is none.
    fn spawn(
        &self,
        number: u64,
        connection: Connection,
        run: impl FnOnce(&Connection) + Send + 'static,
    ) -> Option<(u64, Accepted)> {
        // The thread owns its socket: an ended connection is closed at once and not when the next
        // client comes.
        let socket = Arc::downgrade(&connection.stream);
        let stage = Arc::clone(&connection.stage);
        let thread = thread::Builder::new().name(format!("farpage-conn-{number}"));
        match thread.spawn(move || run(&connection)) {
            Ok(thread) => Some((
                number,
                Accepted {
                    stage,
                    socket,
                    thread,
                },
            )),
            Err(error) => {
                later(move || {
                    tracing::warn!(%error, "connection closed: cannot start a thread for it");
                });
                None
            }
        }
    }

    /// Serves a control connection of an earlier process.
    fn go_on(self: &Arc<Self>, kept: KeptConnection) -> Option<(u64, Accepted)> {
        let KeptConnection {
            stream,
            transport,
            peer,
            session,
            lease,
            asked,
        } = kept;
        let number = self.accepted.fetch_add(1, Ordering::Relaxed);
        let place = self.places.arrive(number, peer.origin);
        let connection = self.connection(stream, transport, peer, place);
        // Refused where the limits are lower than those of the earlier process: the connection then
        // gives way to others, as one does that has not said what it is for.
        if connection.place.settle(Aim::Resume(session)).is_ok() {
            connection.place.belongs_to(session);
        }
        self.spawn(number, connection, move |connection| {
            connection.go_on(session, lease, asked);
        })
    }
}
