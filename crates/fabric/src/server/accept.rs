//! [`ServerThread`], and the loop that accepts the connections of a [`Service`].
//!
//! The rule it keeps: a connection has its place among all of the server before anything is made
//! for it, whichever listener it came through.

use std::{
    collections::HashMap,
    os::fd::AsFd,
    sync::{Arc, Weak, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::Endpoint;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    connection::Connection,
    listen::{Listener, SocketAccess},
    places::ConnectionLimits,
    service::{Service, Shutdown},
    traffic::ServerTraffic,
};
use crate::{errors::BindError, host::Host, log::later, stream::PeerStream};

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
        let thread = thread.spawn(move || service.serve(listener));
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
    /// Accepts and serves connections until the shutdown begins; then closes them, joins their
    /// threads and returns. Several threads may serve a listener each.
    pub fn serve(self: &Arc<Self>, listener: Listener) {
        // The threads own their sockets: an ended connection is closed at once and not when the
        // next client comes.
        let mut connections: HashMap<u64, (Weak<PeerStream>, JoinHandle<()>)> = HashMap::new();
        while !self.shutdown.has_begun() {
            let mut fds = [listener.as_fd(), self.shutdown.0.1.as_fd()]
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // An interrupted poll is as good as one that found nothing.
            let _ = poll(&mut fds, PollTimeout::NONE);
            connections.retain(|_, (_, thread)| !thread.is_finished());
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
            let stream = Arc::new(stream);
            place.occupy(&stream);
            let socket = Arc::downgrade(&stream);
            let connection = Connection {
                stream,
                transport: listener.transport(),
                peer,
                place,
                service: Arc::clone(self),
            };
            match thread::Builder::new()
                .name(format!("farpage-conn-{number}"))
                .spawn(move || connection.run())
            {
                Ok(thread) => drop(connections.insert(number, (socket, thread))),
                Err(error) => {
                    later(move || {
                        tracing::warn!(%error, "connection closed: cannot start a thread for it");
                    });
                }
            }
        }
        drop(listener);
        self.frames.close();
        let until = Instant::now() + JOIN;
        for stream in (connections.values()).filter_map(|(socket, _)| socket.upgrade()) {
            stream.close();
        }
        for (_, thread) in connections.into_values() {
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
                None => later(|| {
                    tracing::warn!("a connection's thread did not end within {JOIN:?}");
                }),
            }
        }
    }
}
