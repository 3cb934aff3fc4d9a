//! The server half of every transport: accepts connections, parses frames, moves bytes.
//!
//! The rule it keeps: nothing that a peer sends can do more than close its own connection, with one
//! logged line that names the peer and the reason. Who may have which memory is left to the
//! [`Host`].

mod control;
mod data;
mod lines;
mod listen;
mod places;

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{
    Refusal, Request, Response, Secret, SessionId,
    control::{HELLO_BYTES, Hello, MAX_FIRST_FRAME_BYTES, Purpose},
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        resource::{Resource, getrlimit},
    },
};

pub(crate) use self::{control::answer, listen::Peer};
pub use self::{
    lines::Lines,
    listen::{BindError, Listener, SocketAccess},
    places::ConnectionLimits,
};
use self::{
    lines::{Held, LineName},
    places::{Aim, Place, Places},
};
use crate::{
    host::{Host, Transport},
    stream::{ReceiveError, Stream, timeout_until},
};

/// How long a stranger may take to say who it is. Generous for a slow network, short for one that
/// only holds a thread.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// How often a thread that waits for a client looks whether its session still lives.
const LOOK: Duration = Duration::from_secs(1);

/// How long the end of a server waits for the threads of its connections, whose sockets are closed
/// by then.
const JOIN: Duration = Duration::from_secs(5);

/// Threads whose connections have been closed may be this many beyond the limit before no more are
/// accepted.
const ENDING: usize = 64;

/// Connections of a listener at once, of which each has a thread: more is refused rather than
/// suffered.
const MAX_CONNECTIONS: usize = 4096;

/// Of the files that the process may open, connections of a listener take at most one in so many: a
/// daemon may have two listeners, and needs as many files for the memory that it lends.
const OPEN_FILES_PER_CONNECTION: u64 = 4;

/// Payload bytes moved by the server's CPU; one for all listeners of a daemon.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Only ever added to; read for display, so relaxed.
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Traffic {
    /// Payload bytes of READs.
    pub fn bytes_read(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Payload bytes of WRITEs.
    pub fn bytes_written(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }
}

/// Ends [`serve`]; clones are the same switch.
#[derive(Clone, Debug)]
pub struct Shutdown(Arc<(AtomicBool, EventFd)>);

impl Shutdown {
    /// A switch that is off.
    ///
    /// # Errors
    /// What the kernel says: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(Arc::new((AtomicBool::new(false), wake))))
    }

    /// Switches on, for good. Safe to call in a signal handler.
    pub fn begin(&self) {
        self.0.0.store(true, Ordering::Release);
        // Never read again, so it stays readable for everybody who sleeps on it.
        let _ = self.0.1.write(1);
    }

    /// Whether it is on.
    pub fn has_begun(&self) -> bool {
        self.0.0.load(Ordering::Acquire)
    }
}

/// Accepts and serves connections until `shutdown` begins; then closes them, joins their threads
/// and returns.
///
/// [`Host::stat`] is completed with the bytes of `traffic`.
pub fn serve(listener: Listener, host: Arc<dyn Host>, traffic: Arc<Traffic>, shutdown: Shutdown) {
    serve_within(
        ConnectionLimits::default(),
        listener,
        host,
        traffic,
        shutdown,
    );
}

/// As [`serve`], with no more connections than `limits` says.
pub fn serve_within(
    limits: ConnectionLimits,
    listener: Listener,
    host: Arc<dyn Host>,
    traffic: Arc<Traffic>,
    shutdown: Shutdown,
) {
    // The threads own their sockets: what has ended is closed at once and not when the next client
    // comes.
    let mut connections: HashMap<u64, (Weak<Stream>, JoinHandle<()>)> = HashMap::new();
    let places = Places::new(limits);
    let mut count = 0;
    while !shutdown.has_begun() {
        let mut fds =
            [listener.as_fd(), shutdown.0.1.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // An interrupted poll is as good as one that found nothing.
        let _ = poll(&mut fds, PollTimeout::NONE);
        connections.retain(|_, (_, thread)| !thread.is_finished());
        if connections.len() >= limits.connections + ENDING {
            // Those that were closed end at once: who comes next waits for that in the backlog.
            let _ = poll(&mut fds[1..], PollTimeout::from(5u8));
            continue;
        }
        let (stream, peer) = match listener.accept(&*host) {
            Ok(Some(accepted)) => accepted,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(endpoint = %listener.endpoint(), %error, "cannot accept a connection");
                // Out of descriptors: the client stays in the backlog, and spinning would not help
                // it.
                let _ = poll(&mut fds[1..], PollTimeout::from(50u8));
                continue;
            }
        };
        let stream = Arc::new(stream);
        let socket = Arc::downgrade(&stream);
        count += 1;
        let place = places.arrive(count, peer.origin, &stream);
        let connection = Connection {
            stream,
            transport: listener.transport(),
            peer,
            place,
            host: Arc::clone(&host),
            traffic: Arc::clone(&traffic),
            shutdown: shutdown.clone(),
        };
        match thread::Builder::new()
            .name(format!("farpage-conn-{count}"))
            .spawn(move || connection.run())
        {
            Ok(thread) => drop(connections.insert(count, (socket, thread))),
            Err(error) => tracing::warn!(%error, "connection closed: cannot start a thread for it"),
        }
    }
    drop(listener);
    let until = Instant::now() + JOIN;
    for stream in connections
        .values()
        .filter_map(|(socket, _)| socket.upgrade())
    {
        stream.close();
    }
    for (_, thread) in connections.into_values() {
        // There is no join with an end; a closed socket wakes the threads at once.
        while !thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        match thread.is_finished().then(|| thread.join()) {
            Some(Ok(())) => {}
            Some(Err(_)) => tracing::error!("a connection's thread panicked; its message is above"),
            None => tracing::warn!("a connection's thread did not end within {JOIN:?}"),
        }
    }
}

fn connections_max() -> usize {
    let open_files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(open_files / OPEN_FILES_PER_CONNECTION)
        .unwrap_or(usize::MAX)
        .clamp(1, MAX_CONNECTIONS)
}

/// One accepted connection and what its thread needs.
struct Connection {
    stream: Arc<Stream>,
    transport: Transport,
    peer: Peer,
    place: Place,
    host: Arc<dyn Host>,
    traffic: Arc<Traffic>,
    shutdown: Shutdown,
}

/// Why a connection is closed before its client closed it.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error(transparent)]
    Header(#[from] farpage_wire::data::DataDecodeError),
    #[error("{0}")]
    Refused(Refusal),
    #[error("{0}")]
    Violation(String),
}

impl Fault {
    fn replaced() -> Self {
        Self::Violation("its client has opened another in its place".to_owned())
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Receive(error.into())
    }
}

impl Connection {
    fn run(&self) {
        let ended = self.converse();
        if let Err(fault) = ended
            && !self.shutdown.has_begun()
        {
            tracing::warn!(peer = self.peer.name, reason = %fault, "connection closed");
        }
        self.stream.close();
    }

    fn converse(&self) -> Result<(), Fault> {
        if let Stream::Rdma(stream) = &*self.stream
            && let Some((session, secret, line)) = stream.claim()
        {
            let until = Instant::now() + HANDSHAKE;
            self.place
                .settle(Aim::Data(session))
                .map_err(Fault::Refused)?;
            let held = self.take((session, Some(line)), until)?;
            stream.accept()?;
            let ended = self.attend(session, &secret);
            // Destroys the queue pair: only then is the line free.
            self.stream.close();
            drop(held);
            return ended;
        }
        let until = Instant::now() + HANDSHAKE;
        let mut bytes = [0; HELLO_BYTES];
        match self.stream.read_exact(&mut bytes, until) {
            // Somebody looked whether we are there.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let hello = Hello::decode(&bytes);
        // Said even to another version, which then can tell its user.
        let purpose = hello
            .as_ref()
            .map_or(Purpose::Control, |hello| hello.purpose);
        if !matches!(
            hello,
            Err(farpage_wire::control::ControlDecodeError::NotFarpage)
        ) {
            self.stream
                .write_all(&Hello::new(purpose).encode(), until)?;
        }
        hello.map_err(ReceiveError::from)?;
        let first: Request = self.stream.receive(MAX_FIRST_FRAME_BYTES, until)?;
        match (purpose, first, self.transport) {
            (Purpose::Control, Request::Begin { client, resume }, _) => {
                self.control(&client, resume, until)
            }
            (Purpose::Control, first @ (Request::Stat | Request::Challenge), _) => {
                self.visit(first)
            }
            (
                Purpose::Data,
                Request::Attach {
                    session,
                    secret,
                    line,
                },
                Transport::Tcp,
            ) => {
                if let Err(refusal) = self.host.attach(session, &secret) {
                    return self.turn_away(refusal, until);
                }
                if let Err(refusal) = self.place.settle(Aim::Data(session)) {
                    return self.turn_away(refusal, until);
                }
                let held = self.take((session, Some(line)), until)?;
                self.stream.send(&Response::Done, until)?;
                self.data(session, &secret, &held)
            }
            _ => Err(Fault::Violation(
                "the first request does not fit the hello".to_owned(),
            )),
        }
    }

    /// Takes a line over for this connection. The client is not answered before its older ones have
    /// ended.
    fn take(&self, line: LineName, until: Instant) -> Result<Held<'_>, Fault> {
        self.host
            .lines()
            .take(line, &self.stream, until)
            .ok_or_else(|| {
                Fault::Violation(
                    "its line has an older connection that does not end, or a newer one".to_owned(),
                )
            })
    }

    /// Waits for the end of a connection whose data is moved by an adapter, or of its session.
    fn attend(&self, session: SessionId, secret: &Secret) -> Result<(), Fault> {
        let (end, flags) = self.stream.end();
        loop {
            let mut fds = [PollFd::new(end, flags)];
            // An interrupted poll is as good as one that found nothing.
            let _ = poll(&mut fds, timeout_until(Instant::now() + LOOK));
            if self.stream.has_ended() {
                return Ok(());
            }
            self.host.attach(session, secret).map_err(Fault::Refused)?;
        }
    }

    fn turn_away(&self, refusal: Refusal, until: Instant) -> Result<(), Fault> {
        self.stream
            .send(&Response::Refused(refusal.clone()), until)?;
        Err(Fault::Refused(refusal))
    }
}
