//! [`Session`]: a client's stay at one memory server.
//!
//! The rule it keeps: the server's death is noticed by a thread of the session, so that no
//! operation and no call hangs on a server that is gone. The meaning of the bytes is left to the
//! callers.

mod connect;
mod ending;
mod keeper;
mod persist;
mod remote;
pub(crate) mod requests;
mod shared;
mod simulated;
mod talk;
mod visit;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use farpage_tables::{Held, Table};
use farpage_wire::{
    Endpoint, ExtentId, NamedRegion, Refusal, Request, Response, ServerStat, Versions,
    control::Lease,
    register::{Answer, Epoch},
};

pub(crate) use self::ending::begin_child;
pub use self::visit::Visit;
use self::{remote::Remote, requests::all_names};
use crate::{
    AllocError, Buf, Channel, ConnectError, ControlError, Link, OpenNameError, PublishError,
    SessionOptions,
    attachment::KeepAlive,
    channel::{Group, SingleChannel},
    errors::RequestError,
    home,
    host::{Bound, ClaimedName, Proposal},
    link::Shaped,
    log::later,
    rdma,
    regmem::{NullRegistrar, Registrar},
    sim::SimSession,
};

/// A client's stay at one server: leases memory and opens channels to it. Shared by threads.
///
/// Dropping it closes it in an orderly way: its extents are freed at once, except those that a
/// published name refers to. Channels keep their session alive.
#[derive(Debug)]
pub struct Session {
    endpoint: Endpoint,
    /// Text of the endpoint, for people.
    name: String,
    link: Option<Arc<Link>>,
    /// Reason why `auto` did not take rdma.
    fallback: Option<String>,
    backend: Held<Backend>,
    /// Number of lines that have been given out.
    lines: AtomicU64,
    /// Number of requests that have been numbered.
    serials: AtomicU64,
}

/// A sequence of channels of one session, each of which replaces the one before. A worker thread
/// moves its bytes through one line.
#[derive(Clone, Debug)]
pub struct Line {
    session: Arc<Session>,
    number: u64,
}

#[derive(Debug)]
enum Backend {
    Remote(Remote),
    Sim(SimSession),
}

/// Memory leased by a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Id of the extent in operations.
    pub id: ExtentId,
    /// Length in bytes.
    pub bytes: u64,
}

/// An opened named region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Manifest that the region's last publisher stored.
    pub manifest: Vec<u8>,
    /// Extents that the manifest refers to, leased to this session from now on.
    pub extents: Vec<Extent>,
    /// Number of the opened version, and the older versions that are still read.
    pub versions: Versions,
    /// The server, and what it remembers of the name's writers.
    pub vote: Answer,
}

/// A version of a named region, opened for reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Manifest that the version's publisher stored.
    pub manifest: Vec<u8>,
    /// Extents that the manifest refers to: each one's id in the manifest, and this session's lease
    /// of it. The leases take READs alone, and are to be [released](Session::release).
    pub extents: Vec<(ExtentId, Extent)>,
    /// The server, and what it remembers of the version's writer.
    pub vote: Answer,
}

impl Session {
    /// Begins a session at the server at `endpoint`. `sim:seed` makes a new simulated server of its
    /// own. `auto://host:port` takes rdma where it works, else tcp. [`endpoint`](Self::endpoint),
    /// [`fallback`](Self::fallback) and the log tell which.
    ///
    /// # Errors
    /// [`ConnectError`], within the deadline of `options`.
    pub fn connect(
        endpoint: &Endpoint,
        options: &SessionOptions,
    ) -> Result<Arc<Self>, ConnectError> {
        if let Some(table) = home::elsewhere(endpoint) {
            return table.run(|| Self::connect_here(endpoint, options));
        }
        Self::connect_here(endpoint, options)
    }

    /// Returns the descriptor table that sessions at `endpoints` are to begin on: `new`'s, unless
    /// one of them may go over RDMA, and this process has used RDMA on another table.
    ///
    /// # Errors
    /// The errors of `new`, and that no thread is to be had.
    pub fn table_for(
        endpoints: &[Endpoint],
        new: impl FnOnce() -> io::Result<Arc<Table>>,
    ) -> io::Result<Arc<Table>> {
        match endpoints.iter().any(home::may_be_rdma) && rdma::devices().is_ok() {
            true => home::choose(new),
            false => new(),
        }
    }

    /// Begins a session on the calling thread's table.
    fn connect_here(
        endpoint: &Endpoint,
        options: &SessionOptions,
    ) -> Result<Arc<Self>, ConnectError> {
        let backend = match endpoint {
            Endpoint::Sim(seed) => Backend::Sim(SimSession::alone(*seed, &options.client)),
            Endpoint::Auto { host, port } => return Self::choose(host, *port, options),
            Endpoint::Shm(_) | Endpoint::Tcp { .. } | Endpoint::Rdma { .. } => {
                let until = Instant::now() + options.deadline;
                Backend::Remote(Remote::connect(endpoint, options, until)?)
            }
        };
        Ok(Arc::new(Self::new(endpoint.clone(), options, backend)))
    }

    /// Begins a session over rdma, or over tcp where rdma cannot be had. A server that refuses over
    /// rdma is not asked again.
    fn choose(host: &str, port: u16, options: &SessionOptions) -> Result<Arc<Self>, ConnectError> {
        let rdma = Endpoint::Rdma {
            host: host.to_owned(),
            port,
        };
        let tcp = Endpoint::Tcp {
            host: host.to_owned(),
            port,
        };
        let begun = Instant::now();
        // Half of the time, so that some is left for tcp: a missing adapter at the server is
        // noticed only by silence.
        let reason = match Remote::connect(&rdma, options, begun + options.deadline / 2) {
            Ok(remote) => {
                let endpoint = rdma.clone();
                later(move || tracing::info!(%endpoint, "auto: taking rdma"));
                return Ok(Arc::new(Self::new(rdma, options, Backend::Remote(remote))));
            }
            Err(ConnectError::NoRdma { reason, .. }) => reason,
            Err(error @ ConnectError::Unreachable { .. }) => error.to_string(),
            Err(error) => return Err(error),
        };
        let (endpoint, why) = (tcp.clone(), reason.clone());
        later(move || tracing::warn!(%endpoint, reason = why, "auto: taking tcp"));
        let remote = Remote::connect(&tcp, options, begun + options.deadline)?;
        let mut session = Self::new(tcp, options, Backend::Remote(remote));
        session.fallback = Some(reason);
        Ok(Arc::new(session))
    }

    fn new(endpoint: Endpoint, options: &SessionOptions, backend: Backend) -> Self {
        Self {
            name: endpoint.to_string(),
            endpoint,
            link: options.link.clone(),
            fallback: None,
            backend: Held::new(backend),
            lines: AtomicU64::new(0),
            serials: AtomicU64::new(0),
        }
    }

    /// Returns the server's endpoint; of `auto://`, the one that was taken.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the reason why an `auto://` endpoint is served over tcp, or `None` if it is not.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Leases zeroed memory, for READ and WRITE.
    ///
    /// # Errors
    /// [`AllocError::Full`] when the server has no room; the session goes on.
    pub fn grant(&self, bytes: u64) -> Result<Extent, AllocError> {
        self.grant_memory(bytes, false)
    }

    /// Leases zeroed memory that takes [`Verb::Atomic`](crate::Verb::Atomic), too.
    ///
    /// # Errors
    /// The errors of [`grant`](Self::grant).
    pub fn grant_for_atomics(&self, bytes: u64) -> Result<Extent, AllocError> {
        self.grant_memory(bytes, true)
    }

    fn grant_memory(&self, bytes: u64, atomics: bool) -> Result<Extent, AllocError> {
        let attempt = format!("grant {bytes} bytes");
        let serial = self.serial();
        match self.call(Request::Grant {
            bytes,
            atomics,
            serial,
        }) {
            Ok(Response::Granted { extent }) => Ok(extent.into()),
            Err(RequestError::Refused(Refusal::Full {
                asked,
                available,
                limit,
            })) => Err(AllocError::Full {
                endpoint: self.name.clone(),
                asked,
                available,
                limit,
            }),
            other => Err(self.failed(attempt, other).into()),
        }
    }

    /// Ends the lease of an extent. Its bytes are gone unless a published name refers to them. A
    /// server that is unreachable now is told later, if the session goes on then.
    ///
    /// # Errors
    /// [`ControlError`]
    pub fn release(&self, id: ExtentId) -> Result<(), ControlError> {
        let answer = match self.backend.is_parents() {
            true => Err(forked()),
            false => self.backend.with(|backend| match backend {
                Backend::Remote(remote) => remote.release(id),
                Backend::Sim(sim) => sim.call(Request::Release { extent: id }),
            }),
        };
        match answer {
            Ok(Response::Done) => Ok(()),
            other => Err(self.failed(format!("release extent {id}"), other)),
        }
    }

    /// Opens a channel: one per worker thread. Resumes the session first when its control
    /// connection broke.
    ///
    /// # Errors
    /// [`ConnectError`], within the deadline of the session's options.
    pub fn channel<B: Buf>(self: &Arc<Self>) -> Result<Box<dyn Channel<B>>, ConnectError> {
        self.line().channel()
    }

    /// Returns a line that no other channel is on.
    pub fn line(self: &Arc<Self>) -> Line {
        Line {
            session: Arc::clone(self),
            // Relaxed: only that numbers differ matters.
            number: self.lines.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Opens a channel of each of `sessions`, numbered in their order. Channels through one adapter
    /// share a completion queue.
    pub(crate) fn channels<B: Buf>(sessions: &[Arc<Self>]) -> Result<Vec<Group<B>>, ConnectError> {
        let (mut groups, mut routes) = (Vec::new(), Vec::new());
        for (number, session) in sessions.iter().enumerate() {
            session.check_table()?;
            let route = match session.remote().filter(|_| session.link.is_none()) {
                Some(remote) => {
                    remote.route(&(Arc::clone(session) as KeepAlive), session.line().number)?
                }
                None => None,
            };
            match route {
                Some(route) => routes.push((number, route)),
                None => groups.push(Group {
                    channels: Box::new(SingleChannel::new(session.channel()?)),
                    numbers: vec![number],
                }),
            }
        }
        groups.extend(rdma::channels(routes)?);
        Ok(groups)
    }

    /// Returns the connection to a server process. `None`: the server is simulated.
    fn remote(&self) -> Option<&Remote> {
        match self.backend.get() {
            Backend::Remote(remote) => Some(remote),
            Backend::Sim(_) => None,
        }
    }

    /// Returns the registrar of the adapter that this session's channels use. Without an adapter,
    /// and before the first channel is open, returns the [`NullRegistrar`].
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        (self.remote()).map_or_else(|| Arc::new(NullRegistrar) as _, Remote::registrar)
    }

    /// Returns the number of bytes that channels over RDMA have copied through registered memory of
    /// their own, because their buffers are not registered. 0 over other fabrics.
    pub fn bounced_bytes(&self) -> u64 {
        (self.remote()).map_or(0, |remote| remote.shared.rdma.bounced_bytes())
    }

    /// Returns the state that the session's channels over RDMA share, for tests that cheat.
    #[cfg(all(test, feature = "rdma"))]
    pub(crate) fn rdma(&self) -> &crate::rdma::Client {
        &self.remote().expect("asked over RDMA only").shared.rdma
    }

    /// True if the server's process is known to have ended although the memory that it lent can
    /// still be reached. Its names can no longer be opened. Known over shared memory only.
    pub fn has_outlived_server(&self) -> bool {
        self.remote().is_some_and(Remote::has_outlived_server)
    }

    /// Returns the reason why this session's memory is lost, once the server has ended the session
    /// or is known to have been started anew. With `refused`, also where the lease must have run
    /// out: for a caller that has just found memory that is not its own any more.
    pub fn loss(&self, refused: bool) -> Option<String> {
        self.remote()?.shared.loss(refused)
    }

    /// Adds to the bytes of the pages that this client keeps on the server. Negative values
    /// subtract. The server is told the sums with every renewal of the lease, for its figures.
    pub fn add_contents(&self, plain_bytes: i64, stored_bytes: i64) {
        if let Some(remote) = self.remote() {
            remote.add_contents(plain_bytes, stored_bytes);
        }
    }

    /// Tells the server that this process ends. The session goes on until the kernel closes its
    /// connection. Then the server frees its memory at once, and does not wait for a client that
    /// may have been cut off. Sessions announce the end by themselves when a process returns from
    /// `main` or calls `exit`. A process that ends otherwise, as by `_exit`, calls this before.
    pub fn leave(&self) {
        self.backend.with(|backend| {
            if let Backend::Remote(remote) = backend {
                remote.leave();
            }
        });
    }

    /// Asks for the server's figures.
    ///
    /// # Errors
    /// [`ControlError`]
    pub fn stat(&self) -> Result<ServerStat, ControlError> {
        match self.call(Request::Stat) {
            Ok(Response::Stat(stat)) => Ok(*stat),
            other => Err(self.failed("read the figures".to_owned(), other)),
        }
    }

    /// Calls `notice` once, when the server says that it is about to end, and that its clients
    /// should move their memory elsewhere. The server is asked every few seconds. The call is made
    /// by a thread of the session, which nothing may hold up.
    pub fn when_draining(&self, notice: impl FnOnce() + Send + 'static) {
        // A simulated server never says so.
        if let Some(remote) = self.remote() {
            remote.when_draining(Box::new(notice));
        }
    }

    /// Holds a name for this session, so that no other publishes it first. With `replace` the name
    /// may be bound already; its binding stays until this session publishes. Returns what the
    /// server remembers of the name's writers.
    ///
    /// # Errors
    /// [`PublishError::Exists`] when the name is bound and `replace` is false,
    /// [`PublishError::InUse`] when another client holds the name.
    pub fn claim(&self, name: &str, replace: bool) -> Result<ClaimedName, PublishError> {
        let request = Request::Claim {
            name: name.to_owned(),
            replace,
        };
        match self.bind("claim", name, request)? {
            Response::Claimed { vote, is_bound } => Ok(ClaimedName { vote, is_bound }),
            other => Err(self.failed(format!("claim `{name}`"), Ok(other)).into()),
        }
    }

    /// Makes the server promise to accept no binding of a name that this session holds from a
    /// writer before `epoch`.
    ///
    /// # Errors
    /// [`PublishError::Outdated`] when the server has promised itself to a later writer.
    pub fn promise(&self, name: &str, epoch: Epoch) -> Result<(), PublishError> {
        let request = Request::Promise {
            name: name.to_owned(),
            epoch,
        };
        match self.bind("claim", name, request)? {
            Response::Done => Ok(()),
            other => Err(self.failed(format!("claim `{name}`"), Ok(other)).into()),
        }
    }

    /// Ends a [`claim`](Self::claim). A name that was never published is free again. A published
    /// name can be opened once its extents are released.
    ///
    /// # Errors
    /// [`ControlError`]
    pub fn disclaim(&self, name: &str) -> Result<(), ControlError> {
        let request = Request::Disclaim {
            name: name.to_owned(),
        };
        self.done(format!("disclaim `{name}`"), request)
    }

    /// Binds a name to a manifest and the extents that it refers to, and replaces an earlier
    /// binding atomically. Name and extents outlive this session. A manifest has at most
    /// [`MAX_MANIFEST_BYTES`](farpage_wire::control::MAX_MANIFEST_BYTES). Returns the number of the
    /// new version, and the older ones that are still read: the bytes that their manifests refer to
    /// must not change.
    ///
    /// # Errors
    /// [`PublishError::InUse`] when another client holds the region of that name,
    /// [`PublishError::Exists`] when it is bound and this session neither opened nor claimed it,
    /// [`PublishError::NotAsked`] when the server does not answer. The server is asked for a sign
    /// of life first, so that a publication without an answer is rare.
    pub fn publish(
        &self,
        name: &str,
        manifest: &[u8],
        extents: &[ExtentId],
    ) -> Result<Versions, PublishError> {
        let proposal = Proposal {
            manifest: manifest.to_vec(),
            extents,
            ballot: None,
            keeps: false,
        };
        Ok(self.propose(name, proposal)?.versions)
    }

    /// Publishes as [`publish`](Self::publish) does, a binding that other servers hold, too.
    ///
    /// # Errors
    /// As for [`publish`](Self::publish); and [`PublishError::Outdated`] when the server has
    /// promised itself to a later writer.
    pub fn propose(&self, name: &str, proposal: Proposal<'_>) -> Result<Bound, PublishError> {
        let request = Request::Publish {
            name: name.to_owned(),
            manifest: proposal.manifest,
            extents: proposal.extents.to_vec(),
            ballot: proposal.ballot.map(Box::new),
            keeps: proposal.keeps,
        };
        match self.bind("publish", name, request)? {
            Response::Bound {
                versions,
                keeps_more,
            } => Ok(Bound {
                versions,
                keeps_more,
            }),
            other => Err(self.failed(format!("publish `{name}`"), Ok(other)).into()),
        }
    }

    fn bind(&self, verb: &str, name: &str, request: Request) -> Result<Response, PublishError> {
        let (endpoint, owned) = (self.name.clone(), name.to_owned());
        match self.call(request) {
            Ok(response) => Ok(response),
            Err(RequestError::Refused(Refusal::InUse)) => Err(PublishError::InUse {
                endpoint,
                name: owned,
            }),
            Err(RequestError::Refused(Refusal::Exists)) => Err(PublishError::Exists {
                endpoint,
                name: owned,
            }),
            Err(RequestError::Refused(Refusal::Outdated)) => Err(PublishError::Outdated {
                endpoint,
                name: owned,
            }),
            Err(RequestError::Refused(Refusal::OtherRegion)) => Err(PublishError::OtherRegion {
                endpoint,
                name: owned,
            }),
            Err(error @ RequestError::NotAsked(_)) => Err(PublishError::NotAsked(
                self.failed(format!("{verb} `{name}`"), Err(error)),
            )),
            other => Err(self.failed(format!("{verb} `{name}`"), other).into()),
        }
    }

    /// Opens a named region for writing. No other session can, until this one closes or releases
    /// the extents.
    ///
    /// # Errors
    /// [`OpenNameError::NotFound`], [`OpenNameError::InUse`].
    pub fn open(&self, name: &str) -> Result<Named, OpenNameError> {
        let request = Request::Open {
            name: name.to_owned(),
            serial: self.serial(),
        };
        match self.find("open", name, request)? {
            Response::Opened {
                manifest,
                extents,
                versions,
                vote,
            } => Ok(Named {
                manifest,
                extents: extents.into_iter().map(Extent::from).collect(),
                versions,
                vote,
            }),
            other => Err(self.failed(format!("open `{name}`"), Ok(other)).into()),
        }
    }

    /// Opens the published version of a named region for reading. Any number of clients can at a
    /// time, also while another has the region open for writing. The version stays as it is until
    /// its extents are [released](Self::release).
    ///
    /// # Errors
    /// [`OpenNameError::NotFound`]
    pub fn read(&self, name: &str) -> Result<Reading, OpenNameError> {
        let request = Request::Read {
            name: name.to_owned(),
            serial: self.serial(),
        };
        match self.find("read", name, request)? {
            Response::Reading {
                manifest,
                extents,
                leases,
                vote,
            } if extents.len() == leases.len() => {
                let leases = leases.into_iter().map(Extent::from);
                Ok(Reading {
                    manifest,
                    extents: extents.into_iter().zip(leases).collect(),
                    vote,
                })
            }
            other => Err(self.failed(format!("read `{name}`"), Ok(other)).into()),
        }
    }

    /// Returns the published version of a name of this user's key, and the older ones in use.
    ///
    /// # Errors
    /// [`ControlError`]
    pub fn readers(&self, name: &str) -> Result<Versions, ControlError> {
        let request = Request::Readers {
            name: name.to_owned(),
        };
        match self.call(request) {
            Ok(Response::Versions(versions)) => Ok(versions),
            other => Err(self.failed(format!("ask who reads `{name}`"), other)),
        }
    }

    /// Sends a request about a name that exists, and returns the answer.
    fn find(&self, verb: &str, name: &str, request: Request) -> Result<Response, OpenNameError> {
        let (endpoint, name) = (self.name.clone(), name.to_owned());
        match self.call(request) {
            Ok(response) => Ok(response),
            Err(RequestError::Refused(Refusal::NotFound)) => {
                Err(OpenNameError::NotFound { endpoint, name })
            }
            Err(RequestError::Refused(Refusal::InUse)) => {
                Err(OpenNameError::InUse { endpoint, name })
            }
            Err(RequestError::Refused(Refusal::Shared)) => {
                Err(OpenNameError::Shared { endpoint, name })
            }
            other => Err(self.failed(format!("{verb} `{name}`"), other).into()),
        }
    }

    /// Forgets a name and frees its memory.
    ///
    /// # Errors
    /// [`OpenNameError::NotFound`], [`OpenNameError::InUse`].
    pub fn remove(&self, name: &str) -> Result<(), OpenNameError> {
        let request = Request::Remove {
            name: name.to_owned(),
            owner: None,
        };
        match self.find("remove", name, request)? {
            Response::Done => Ok(()),
            other => Err(self.failed(format!("remove `{name}`"), Ok(other)).into()),
        }
    }

    /// Returns the names of this user's key, ascending, or of all keys if it is the operator's.
    ///
    /// # Errors
    /// [`ControlError`]
    pub fn names(&self) -> Result<Vec<NamedRegion>, ControlError> {
        all_names(|request| self.call(request))
            .map_err(|error| self.failed("list names".to_owned(), *error))
    }

    /// Returns a new number for a request that gives memory: repeating the request gives no more.
    fn serial(&self) -> Option<u64> {
        // Relaxed: only that numbers differ matters.
        Some(self.serials.fetch_add(1, Ordering::Relaxed))
    }

    fn call(&self, request: Request) -> Result<Response, RequestError> {
        if self.backend.is_parents() {
            return Err(forked());
        }
        self.backend.with(|backend| match backend {
            Backend::Remote(remote) => remote.call(request),
            Backend::Sim(sim) => sim.call(request),
        })
    }

    /// Checks that the calling thread may open channels of this session.
    ///
    /// # Errors
    /// The calling thread does not have the session's descriptors.
    fn check_table(&self) -> Result<(), ConnectError> {
        let why = "its descriptors are on a table of a runtime, whose threads alone have channels";
        match self.backend.is_here() {
            true => Ok(()),
            false => Err(ConnectError::Unreachable {
                endpoint: self.name.clone(),
                source: io::Error::new(io::ErrorKind::Unsupported, why),
            }),
        }
    }

    fn done(&self, attempt: String, request: Request) -> Result<(), ControlError> {
        match self.call(request) {
            Ok(Response::Done) => Ok(()),
            other => Err(self.failed(attempt, other)),
        }
    }

    fn failed(&self, attempt: String, answer: Result<Response, RequestError>) -> ControlError {
        let endpoint = self.name.clone();
        match answer {
            Ok(_) => ControlError::Refused {
                endpoint,
                attempt,
                reason: "it answered something else".to_owned(),
            },
            Err(RequestError::Refused(refusal)) => ControlError::Refused {
                endpoint,
                attempt,
                reason: refusal.to_string(),
            },
            Err(RequestError::Disconnected(reason) | RequestError::NotAsked(reason)) => {
                ControlError::Disconnected {
                    endpoint,
                    attempt,
                    reason,
                }
            }
            Err(RequestError::Key(reason)) => ControlError::Key {
                endpoint,
                attempt,
                reason,
            },
        }
    }
}

/// Returns the error of a call in a child made by `fork`, which does not have the connection.
fn forked() -> RequestError {
    RequestError::NotAsked("this process is a child of the one that connected".to_owned())
}

impl Line {
    /// Opens a channel that replaces the line's earlier ones, which end. Once it is open, each of
    /// their operations has taken place or never will: a WRITE that seemed lost can no longer land.
    /// Resumes the session first when its control connection broke.
    ///
    /// # Errors
    /// [`ConnectError`], within the deadline of the session's options.
    pub fn channel<B: Buf>(&self) -> Result<Box<dyn Channel<B>>, ConnectError> {
        let session = &self.session;
        session.check_table()?;
        let guard = Arc::clone(session) as KeepAlive;
        let channel = match session.backend.get() {
            Backend::Remote(remote) => remote.channel(&guard, self.number)?,
            Backend::Sim(sim) => sim.channel(guard, self.number)?,
        };
        Ok(match &session.link {
            Some(link) => Box::new(Shaped::new(channel, Arc::clone(link))),
            None => channel,
        })
    }

    /// Returns the session that the line belongs to.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl From<Lease> for Extent {
    fn from(lease: Lease) -> Self {
        Self {
            id: lease.id,
            bytes: lease.bytes,
        }
    }
}
