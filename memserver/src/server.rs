//! [`Server`]: binds endpoints, runs the threads that serve them and the reaper, and ends it all.
//!
//! The rule it keeps: all that was started is joined before [`RunningServer`] is gone, also after
//! an error, so that a test or a program that embeds a server has no thread, socket file or lent
//! memory left afterwards.

mod handing;
mod taking;

use std::{
    collections::HashMap,
    fs, io,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_fabric::host::{Host, Origin};
use farpage_fabric::log;
use farpage_fabric::server::{
    BindError, ConnectionLimits, KeptConnection, Listener, ServerTraffic, Service, Shutdown,
    SocketAccess,
};
use farpage_wire::{Endpoint, Persistence, PublicKey, ServerStat};
use parking_lot::{Condvar, Mutex};
use tracing::{info, warn};

use crate::{
    descriptors,
    durable::{PersistError, Stored},
    handover::{Handover, HandoverError, Kept},
    state::{Limits, State},
    tier::{Evictors, LEAST_MEMORY_BYTES, Tier},
};

use self::taking::{divide, take_durable, take_tier};

farpage_wire::debug_as_display!(StartError, TiersError);

/// Default lease: long enough for a client that is starved of CPU, looked at in a debugger or cut
/// off by a network hiccup, short enough that the memory of a dead client is missed for a minute
/// only (over shared memory it is back at once).
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(60);
/// Default time to come back: long enough for a network that was cut, short enough that a program
/// that was ended can soon be started again.
pub(crate) const DEFAULT_RECONNECT_GRACE: Duration = Duration::from_secs(10);
/// Lease that does not end.
const FOR_GOOD: Duration = Duration::from_secs(365 * 24 * 3600);
/// Default grace: less than the 10 seconds that service managers and container runtimes wait
/// before they kill.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(5);
/// The longest wait of a server's end for a slow log.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Number of the reaper's looks per [shortest](Limits::shortest) time after which sessions end: the
/// memory of a silent client is back at most this fraction late.
const LOOKS_PER_LEASE: u32 = 8;

/// Settings of a server, made by [`Server::builder`].
#[derive(Clone, Debug)]
pub struct Server {
    pub(crate) listen: Vec<Endpoint>,
    pub(crate) capacity_bytes: u64,
    pub(crate) lease: Duration,
    pub(crate) reconnect_grace: Duration,
    pub(crate) grace: Duration,
    pub(crate) drain_timeout: Duration,
    pub(crate) access: SocketAccess,
    pub(crate) operators: Vec<PublicKey>,
    pub(crate) connections_per_address: Option<usize>,
    pub(crate) connections_per_client: Option<usize>,
    pub(crate) capacity_per_address: Option<u64>,
    pub(crate) extents_per_address: Option<usize>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) spill: Option<PathBuf>,
    pub(crate) persist: Option<(PathBuf, Persistence)>,
    pub(crate) weights: HashMap<Origin, u32>,
}

/// Reason why a server did not start.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An endpoint is taken, or cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Settings without an endpoint to listen on.
    #[error(
        "a server needs an endpoint to listen on, such as shm:///run/farpage.sock or tcp://0.0.0.0:7400"
    )]
    NoEndpoint,
    /// The directory cannot hold a spill file.
    #[error(
        "cannot make a spill file in {directory}: {source}; --spill needs a directory on a disk that takes O_DIRECT, with room for all of --capacity"
    )]
    Spill {
        /// The directory.
        directory: PathBuf,
        /// The system's error.
        r#source: io::Error,
    },
    /// Settings that do not fit together, or not this machine.
    #[error(transparent)]
    Tiers(#[from] TiersError),
    /// The directory cannot hold names.
    #[error(transparent)]
    Persist(#[from] PersistError),
    /// An earlier process's state cannot be taken over.
    #[error(transparent)]
    Handover(#[from] HandoverError),
    /// The system refused a thread or a descriptor.
    #[error(
        "cannot start the server's threads: {0}; are the limits of processes or open files used up?"
    )]
    System(io::Error),
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl Server {
    /// Returns settings to change: no endpoints, 1 GiB, a lease of 60 seconds, a grace of 5,
    /// sockets for the own user.
    pub fn builder() -> Self {
        Self {
            listen: Vec::new(),
            capacity_bytes: 1 << 30,
            lease: DEFAULT_LEASE,
            reconnect_grace: DEFAULT_RECONNECT_GRACE,
            grace: DEFAULT_GRACE,
            drain_timeout: Duration::ZERO,
            access: SocketAccess::default(),
            operators: Vec::new(),
            connections_per_address: None,
            connections_per_client: None,
            capacity_per_address: None,
            extents_per_address: None,
            memory_bytes: None,
            spill: None,
            persist: None,
            weights: HashMap::new(),
        }
    }

    /// Adds a place to listen: `shm:///path`, `tcp://host:port` or `rdma://host:port`, where port 0
    /// finds a free one.
    pub fn listen(mut self, endpoint: Endpoint) -> Self {
        self.listen.push(endpoint);
        self
    }

    /// Sets the most bytes lent at any time. Default 1 GiB. Nothing is set aside: memory is taken
    /// when clients write.
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity_bytes = bytes;
        self
    }

    /// Returns settings of a server that a program starts for itself: leases that do not end, and
    /// no grace. A server that ends with its only client protects no other by taking memory from a
    /// program that is stopped, and has no client to wait for afterwards.
    pub fn of_one_program() -> Self {
        Self::builder().lease(FOR_GOOD).grace(Duration::ZERO)
    }

    /// Sets how long a client may be silent before its memory is taken back. Default 60 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the time for a client to come back after its connection closed without a goodbye,
    /// because it died or the network was cut. The client loses its memory afterwards; over shared
    /// memory at once. Default 10 s.
    pub fn reconnect_grace(mut self, grace: Duration) -> Self {
        self.reconnect_grace = grace;
        self
    }

    /// Sets the time for clients to finish in [`RunningServer::shutdown`]. Default 5 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets the time for clients to move their memory to other servers before the server ends.
    /// Runtimes learn within a few seconds that the server is about to end, and drain it by
    /// themselves. Nothing is granted meanwhile. The server then ends when no client has memory
    /// here, and connected clients have had four seconds to learn of the end. Replaces the grace.
    /// Default: zero, which asks nobody to move anything.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.drain_timeout = timeout;
        self
    }

    /// Sets the users who may connect to the sockets of `shm://` endpoints. Default: the user that
    /// the server runs as.
    pub fn access(mut self, access: SocketAccess) -> Self {
        self.access = access;
        self
    }

    /// Adds a key whose holder may list and remove all named regions.
    pub fn operator(mut self, key: PublicKey) -> Self {
        self.operators.push(key);
        self
    }

    /// Sets the most bytes lent to clients of one address, or over shared memory of one user,
    /// together. Default: all of the capacity.
    pub fn capacity_per_address(mut self, bytes: u64) -> Self {
        self.capacity_per_address = Some(bytes);
        self
    }

    /// Sets the most extents of clients of one address, or over shared memory of one user,
    /// together. Default: three quarters of the server's limit.
    pub fn extents_per_address(mut self, extents: usize) -> Self {
        self.extents_per_address = Some(extents);
        self
    }

    /// Sets the most connections from one address, or over shared memory from one user. Default:
    /// three quarters of the server's limit.
    pub fn connections_per_address(mut self, connections: usize) -> Self {
        self.connections_per_address = Some(connections);
        self
    }

    /// Sets the most data connections of one client. Default: a quarter of the server's limit.
    pub fn connections_per_client(mut self, connections: usize) -> Self {
        self.connections_per_client = Some(connections);
        self
    }

    /// Sets the most memory held for lent bytes, at least 16 MiB. More may be lent if there is a
    /// [`spill`](Self::spill) directory. Default: all lent bytes may be in memory.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory_bytes = Some(bytes);
        self
    }

    /// Sets a directory on a disk for lent bytes beyond [`memory`](Self::memory): for a file of the
    /// capacity's size, without a name, that is gone with the server. For `rdma://` endpoints the
    /// adapter needs on-demand paging.
    pub fn spill(mut self, directory: PathBuf) -> Self {
        self.spill = Some(directory);
        self
    }

    /// Sets a directory on a disk that keeps published names: they are there after a restart, and
    /// after a power cut. With [`Persistence::AtOnce`] a publication is on the disk before it is
    /// answered, with [`Persistence::Soon`] soon after. Default: names are gone with the server.
    pub fn persist(mut self, directory: PathBuf, when: Persistence) -> Self {
        self.persist = (when != Persistence::Never).then_some((directory, when));
        self
    }

    /// Sets the weight of the clients of one address, or over shared memory of one user. When
    /// [`memory`](Self::memory) is short, they keep the part of it that their weight is of the
    /// weights of all that need some. Default 1, which 0 also means.
    pub fn share(mut self, of: Origin, weight: u32) -> Self {
        self.weights.insert(of, weight.max(1));
        self
    }

    /// Binds every endpoint and starts to serve. Clients can connect after the return.
    ///
    /// # Errors
    /// [`StartError`]; nothing keeps running or listening.
    pub fn start(self) -> Result<RunningServer, StartError> {
        self.prepare(None)?.serve()
    }

    /// Starts to serve as [`start`](Self::start) does, with all that an earlier process has lent:
    /// its sessions, names and connections go on.
    ///
    /// # Errors
    /// [`StartError`], such as settings that would need the lent bytes to be elsewhere.
    pub fn take_over(self, mut handed: Handover) -> Result<RunningServer, StartError> {
        let kept = handed.take_kept();
        let prepared = self.prepare(Some(handed))?;
        // Only now: what is given back to the manager of a start that fails is there for the next.
        let mut unforgotten = None;
        if let Some(kept) = kept {
            kept.set_taken()?;
            unforgotten = kept.forget();
        }
        let mut running = prepared.serve()?;
        running.unforgotten = unforgotten;
        let stat = running.stat();
        info!(
            sessions = stat.sessions,
            extents = stat.extents,
            bytes = stat.granted_bytes,
            "took over from the earlier process"
        );
        Ok(running)
    }

    /// Checks that [`take_over`](Self::take_over) would succeed, and lets go of everything.
    ///
    /// # Errors
    /// The errors of [`take_over`](Self::take_over).
    pub fn rehearse(self, handed: Handover) -> Result<(), StartError> {
        self.prepare(Some(handed)).map(drop)
    }

    /// Does everything that can fail before the first thread is started.
    fn prepare(self, mut handed: Option<Handover>) -> Result<PreparedServer, StartError> {
        if self.listen.is_empty() {
            return Err(StartError::NoEndpoint);
        }
        check_tiers(
            self.memory_bytes,
            self.capacity_bytes,
            self.spill.is_some(),
            !self.weights.is_empty(),
        )?;
        let (tier, evictors) = match (self.memory_bytes, &self.spill) {
            (Some(memory_bytes), Some(directory)) if let Some(handed) = &mut handed => {
                let bytes = (memory_bytes, self.capacity_bytes);
                let tier = take_tier(handed, bytes, directory, self.weights)?;
                // Started when all chunks are known.
                (Some(tier), None)
            }
            (Some(memory_bytes), Some(directory)) => {
                let failed = |source| StartError::Spill {
                    directory: directory.clone(),
                    source,
                };
                let (tier, evictors) =
                    Tier::start(memory_bytes, self.capacity_bytes, directory, self.weights)
                        .map_err(failed)?;
                (Some(tier), Some(evictors))
            }
            _ => (None, None),
        };
        // An extent that clients share has a file for its words as well.
        let budget = descriptors::budget(1 + u64::from(tier.is_some()));
        let limits = Limits {
            capacity_bytes: self.capacity_bytes,
            capacity_per_address: self.capacity_per_address.unwrap_or(self.capacity_bytes),
            lease: self.lease,
            reconnect_grace: self.reconnect_grace,
            extents_per_session: budget.extents_per_session,
            extents: budget.extents,
            extents_per_address: (self.extents_per_address).unwrap_or(budget.extents_per_session),
            sessions: budget.sessions,
            operators: self.operators,
        };
        let look_every = limits.shortest() / LOOKS_PER_LEASE;
        // 1. All endpoints or none: a server that half listens would look healthy. Before the names
        //    are loaded, which takes long: clients that come meanwhile wait.
        let listeners: Vec<Listener> = self
            .listen
            .iter()
            .map(|endpoint| {
                let handed = handed.as_mut().map(|handed| handed.listener(endpoint));
                let listener = match handed.transpose()?.flatten() {
                    Some(listener) => listener,
                    None => Listener::bind(endpoint, self.access)?,
                };
                if tier.is_some() {
                    listener.check_paging()?;
                }
                Ok(listener)
            })
            .collect::<Result<_, BindError>>()?;
        let endpoints: Vec<Endpoint> = listeners
            .iter()
            .map(|listener| listener.endpoint().clone())
            .collect();
        let mut state = State::with_tier(limits, tier);
        let (traffic, mut kept) = (Arc::<ServerTraffic>::default(), Vec::new());
        match handed {
            None => {
                if let Some((directory, when)) = &self.persist {
                    state = state.restore(Stored::find(directory, *when)?, directory)?;
                }
            }
            Some(mut handed) => {
                for left in &handed.server.listeners {
                    let endpoint = &left.found;
                    warn!(%endpoint, "no longer listening there: the settings do not name it");
                }
                kept = handed.connections()?;
                let [read_bytes, written_bytes] = handed.server.traffic;
                traffic.count(read_bytes, written_bytes);
                let server = &mut handed.server;
                if let (None, Some(tier)) = (state.tier(), &server.tier) {
                    return Err(HandoverError::Setting {
                        setting: "--spill",
                        before: tier.directory.clone(),
                        now: "none".to_owned(),
                    }
                    .into());
                }
                let tiered = server
                    .tier
                    .take()
                    .map_or_else(Vec::new, |tier| tier.extents);
                state.take_over(handed.server.books, tiered, &mut handed.descriptors)?;
                let durable = handed.server.durable;
                let persist = self.persist.as_ref();
                state.set_durable(take_durable(durable, persist, &mut handed.descriptors)?);
            }
        }
        let mut limits = ConnectionLimits::default();
        limits.per_address = self.connections_per_address.unwrap_or(limits.per_address);
        limits.per_session = self.connections_per_client.unwrap_or(limits.per_session);
        let (state, shutdown) = (Arc::new(state), Shutdown::new()?);
        let host: Arc<dyn Host> = state.clone();
        let service = Service::new(host, limits, Arc::clone(&traffic), shutdown.clone());
        let running = RunningServer {
            asked: self.listen,
            endpoints,
            state,
            service,
            shutdown,
            traffic,
            look_every,
            reaper_stops: Arc::default(),
            reaper: None,
            listening: Vec::new(),
            writer: None,
            evictors,
            grace: self.grace,
            drain_timeout: self.drain_timeout,
            unforgotten: None,
        };
        Ok(PreparedServer {
            running,
            listeners,
            kept,
        })
    }
}

/// A server that only lacks its threads.
struct PreparedServer {
    running: RunningServer,
    listeners: Vec<Listener>,
    /// Connections of an earlier process.
    kept: Vec<KeptConnection>,
}

impl PreparedServer {
    fn serve(self) -> Result<RunningServer, StartError> {
        // From here on `running` ends what was started, also when a later thread cannot be.
        let mut running = self.running;
        running.spawn_threads(self.listeners, self.kept)?;
        for endpoint in &running.endpoints {
            let limits = running.state.limits();
            info!(%endpoint, capacity_bytes = limits.capacity_bytes, lease_ms = limits.lease.as_millis() as u64, "listening");
        }
        Ok(running)
    }
}

/// Reason why a server cannot lend more than its memory.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TiersError {
    /// The capacity exceeds memory, and there is no spill directory.
    #[error(
        "capacity exceeds memory, and there is no spill directory for the rest: give one (--spill), or less --capacity"
    )]
    NoSpill,
    /// A spill directory without a limit of memory.
    #[error("a spill directory without --memory would never be used: give both or none")]
    NoMemory,
    /// Shares of memory on a server without a spill directory.
    #[error("shares are of --memory, on a server with --spill: give both, or no --share")]
    NoShares,
    /// Less memory than the server needs for itself.
    #[error("memory is less than 16 MiB, which the server needs for itself: give it more")]
    TooLittle,
    /// The kernel gives shared memory in huge pages, more than is counted.
    #[error(
        "the kernel gives shared memory in huge pages, of which --memory counts a part: set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise or never"
    )]
    HugePages,
}

/// Checks that these settings fit together, and fit this machine.
pub(crate) fn check_tiers(
    memory_bytes: Option<u64>,
    capacity_bytes: u64,
    spills: bool,
    has_shares: bool,
) -> Result<(), TiersError> {
    match memory_bytes {
        _ if has_shares && !spills => Err(TiersError::NoShares),
        None if spills => Err(TiersError::NoMemory),
        None => Ok(()),
        Some(bytes) if !spills && bytes < capacity_bytes => Err(TiersError::NoSpill),
        Some(_) if !spills => Ok(()),
        Some(bytes) if bytes < LEAST_MEMORY_BYTES => Err(TiersError::TooLittle),
        // A kernel without the file has no huge pages.
        Some(_) => match fs::read_to_string(SHMEM_HUGE_PAGES) {
            Ok(choice)
                if ["[always]", "[within_size]", "[force]"]
                    .iter()
                    .any(|one| choice.contains(one)) =>
            {
                Err(TiersError::HugePages)
            }
            Ok(_) | Err(_) => Ok(()),
        },
    }
}

/// The least time for the disk to take publications that are answered already.
const LAST_JOBS: Duration = Duration::from_secs(10);

/// Time within which clients learn that the server is about to end: they ask every three seconds.
const TOLD_WITHIN: Duration = Duration::from_secs(4);

/// The kernel's setting of huge pages for memfds: the value in use stands in brackets.
const SHMEM_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// A server at work. Dropping it ends the server at once; [`shutdown`](Self::shutdown) lets clients
/// finish first.
#[must_use = "the server ends when this is dropped"]
pub struct RunningServer {
    /// Endpoints of the settings.
    asked: Vec<Endpoint>,
    endpoints: Vec<Endpoint>,
    state: Arc<State>,
    service: Arc<Service>,
    shutdown: Shutdown,
    traffic: Arc<ServerTraffic>,
    /// Interval of the reaper's looks.
    look_every: Duration,
    reaper_stops: Arc<(Mutex<bool>, Condvar)>,
    reaper: Option<JoinHandle<()>>,
    /// Threads of the listeners, which they return at a hand-over.
    listening: Vec<JoinHandle<Option<Listener>>>,
    /// Writer of publications, ended after the threads that publish, and after its jobs.
    writer: Option<JoinHandle<()>>,
    /// Evictors, ended after the threads, which wait for memory.
    evictors: Option<Evictors>,
    grace: Duration,
    drain_timeout: Duration,
    /// Descriptors that the service manager was to forget, and has not.
    unforgotten: Option<Kept>,
}

impl RunningServer {
    /// Returns the endpoints in the order of [`Server::listen`], with the found port where 0 was.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Returns the current figures.
    pub fn stat(&self) -> ServerStat {
        self.service.stat()
    }

    /// Drains: admits no new client, and returns when the last client has left. Cuts off clients
    /// that are still there after the grace. With a [drain timeout](Server::drain_timeout), returns
    /// when no client has memory here, or the timeout is over.
    pub fn shutdown(self) {
        if !self.drain_timeout.is_zero() {
            self.state.ask_to_leave();
            let told = Instant::now() + TOLD_WITHIN;
            let deadline = Instant::now() + self.drain_timeout;
            match self.state.wait_until_unused(told, deadline) {
                0 => info!("no client has memory here any more"),
                bytes => warn!(
                    bytes,
                    "the drain timeout of {:?} is over: clients lose what they still have here",
                    self.drain_timeout
                ),
            }
            return;
        }
        self.state.drain();
        let left = self.state.wait_until_empty(Instant::now() + self.grace);
        if left > 0 {
            warn!(
                clients = left,
                "the grace of {:?} is over: closing the connections that are left", self.grace
            );
        }
    }

    /// Starts the threads that serve `listeners` and the connections `kept`.
    fn spawn_threads(
        &mut self,
        listeners: Vec<Listener>,
        kept: Vec<KeptConnection>,
    ) -> io::Result<()> {
        if let (Some(tier), None) = (self.state.tier(), &self.evictors) {
            self.evictors = Some(tier.evict()?);
        }
        self.spawn_reaper(self.look_every)?;
        if self.state.has_jobs() && self.writer.is_none() {
            self.spawn_writer()?;
        }
        for (listener, kept) in divide(listeners, kept) {
            let service = self.service.clone();
            let thread = thread::Builder::new().name("farpage-listen".to_owned());
            self.listening
                .push(thread.spawn(move || service.serve(listener, kept))?);
        }
        Ok(())
    }

    fn stop_reaper(&mut self) {
        *self.reaper_stops.0.lock() = true;
        self.reaper_stops.1.notify_all();
        self.reaper.take().map(join);
    }

    /// Starts the thread that writes publications after their answer.
    fn spawn_writer(&mut self) -> io::Result<()> {
        let state = self.state.clone();
        let jobs = state.take_jobs();
        let thread = thread::Builder::new().name("farpage-persist".to_owned());
        let writer = thread.spawn(move || state.write_publications(&jobs))?;
        self.writer = Some(writer);
        Ok(())
    }

    fn spawn_reaper(&mut self, every: Duration) -> io::Result<()> {
        self.state.renew_connected(Instant::now());
        *self.reaper_stops.0.lock() = false;
        let (state, stops) = (self.state.clone(), self.reaper_stops.clone());
        let reap = move || {
            let (stopped, wake) = &*stops;
            let mut stopped = stopped.lock();
            // Clients speak first: their renewals may have waited while nobody was served.
            while wake
                .wait_while_for(&mut stopped, |stopped| !*stopped, every)
                .timed_out()
            {
                state.reap(Instant::now());
            }
        };
        let thread = thread::Builder::new().name("farpage-reap".to_owned());
        self.reaper = Some(thread.spawn(reap)?);
        Ok(())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.state.drain();
        self.shutdown.begin();
        self.listening
            .drain(..)
            .for_each(|thread| drop(join(thread)));
        self.stop_reaper();
        self.state.end_jobs();
        let patience = self.drain_timeout.max(LAST_JOBS);
        // A disk that hangs keeps the writer: the thread ends with the process.
        let is_written = self.state.wait_jobs(Instant::now() + patience);
        let writer = self.writer.take().filter(|_| is_written);
        writer.map(join);
        drop(self.evictors.take());
        // Log lines of the threads.
        log::flush(Instant::now() + LAST_LINES);
    }
}

/// Waits for a thread's end. Logs a panic.
fn join<T>(thread: JoinHandle<T>) -> Option<T> {
    let ended = thread.join();
    if ended.is_err() {
        warn!("a thread of the server panicked; its message is above");
    }
    ended.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_endpoints_does_not_start() {
        assert!(matches!(
            Server::builder().start().map(|_| ()),
            Err(StartError::NoEndpoint)
        ));
    }
}
