//! [`Service`]: state that the listeners of one server share, and the loop that accepts.
//!
//! The rule it keeps: a connection has its place among all of the server before anything is made
//! for it, whichever listener it came through.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{Endpoint, ServerStat};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

use super::{
    connection::Connection,
    frames::Frames,
    lines::Lines,
    listen::{Listener, SocketAccess},
    places::{ConnectionLimits, Places},
    together::Together,
};
use crate::{errors::BindError, host::Host, log::later, stream::Stream};

/// Upper bound of a server's wait at its end for the threads of its connections, whose sockets are
/// closed by then.
const JOIN: Duration = Duration::from_secs(5);

/// Number of threads of closed connections that may exist beyond the limit before no more
/// connections are accepted.
const ENDING: usize = 64;

/// Payload bytes moved by the server's CPU; one for all listeners of a daemon.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of READs. Only ever added to; read for display, so relaxed.
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
}

impl Traffic {
    /// Returns the payload bytes of READs.
    pub fn bytes_read(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Returns the payload bytes of WRITEs.
    pub fn bytes_written(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }
}

/// Switch that ends [`Service::serve`]. Clones are the same switch.
#[derive(Clone, Debug)]
pub struct Shutdown(Arc<(AtomicBool, EventFd)>);

impl Shutdown {
    /// Makes a switch that is off.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(Arc::new((AtomicBool::new(false), wake))))
    }

    /// Switches on, for good. Safe to call in a signal handler.
    pub fn begin(&self) {
        self.0.0.store(true, Ordering::Release);
        // Never read again, so it stays readable for every thread that sleeps on it.
        let _ = self.0.1.write(1);
    }

    /// True if the switch is on.
    pub fn has_begun(&self) -> bool {
        self.0.0.load(Ordering::Acquire)
    }
}

/// A server's connections, over all of its listeners.
pub struct Service {
    pub(super) host: Arc<dyn Host>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) shutdown: Shutdown,
    pub(super) lines: Lines,
    pub(super) frames: Frames,
    places: Arc<Places>,
    limits: ConnectionLimits,
    accepted: AtomicU64,
    /// Number of data connections over sockets.
    data_connections: AtomicUsize,
    together: OnceLock<Option<Together>>,
}

/// A data connection, counted until this is dropped.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One listener with the default limits, served on a thread of its own. Dropping it ends it.
#[must_use = "the server ends when this is dropped"]
pub struct Serving {
    endpoint: Endpoint,
    traffic: Arc<Traffic>,
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
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
        let (traffic, shutdown) = (Arc::<Traffic>::default(), Shutdown::new().map_err(failed)?);
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
    pub fn traffic(&self) -> &Traffic {
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

impl Drop for Serving {
    fn drop(&mut self) {
        // A panic has printed its message.
        let _ = self.end();
    }
}

impl Service {
    /// Makes a service. Clients can connect once it [serves](Self::serve) a listener.
    pub fn new(
        host: Arc<dyn Host>,
        limits: ConnectionLimits,
        traffic: Arc<Traffic>,
        shutdown: Shutdown,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            traffic,
            shutdown,
            lines: Lines::default(),
            frames: Frames::default(),
            places: Places::new(limits),
            limits,
            accepted: AtomicU64::new(0),
            data_connections: AtomicUsize::new(0),
            together: OnceLock::new(),
        })
    }

    pub(super) fn count_data_connection(&self) -> Counted<'_> {
        self.data_connections.fetch_add(1, Ordering::Relaxed);
        Counted(&self.data_connections)
    }

    /// Returns the thread that serves small batches, if there are several connections whose clients
    /// wait for one another.
    pub(super) fn together(&self) -> Option<&Together> {
        if !self.host.serves_together() || self.data_connections.load(Ordering::Relaxed) < 2 {
            return None;
        }
        let start = || {
            let started = Together::start();
            // Each connection then goes on with its own thread.
            let failed = |error| tracing::warn!(%error, "no thread for all data connections");
            started.map_err(|error| later(move || failed(error))).ok()
        };
        self.together.get_or_init(start).as_ref()
    }

    /// Returns the host's figures, and those of the connections.
    pub fn stat(&self) -> ServerStat {
        ServerStat {
            bytes_read: self.traffic.bytes_read(),
            bytes_written: self.traffic.bytes_written(),
            request_bytes: self.frames.bytes(),
            ..self.host.stat()
        }
    }

    /// Accepts and serves connections until the shutdown begins; then closes them, joins their
    /// threads and returns. Several threads may serve a listener each.
    pub fn serve(self: &Arc<Self>, listener: Listener) {
        // The threads own their sockets: an ended connection is closed at once and not when the
        // next client comes.
        let mut connections: HashMap<u64, (Weak<Stream>, JoinHandle<()>)> = HashMap::new();
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
