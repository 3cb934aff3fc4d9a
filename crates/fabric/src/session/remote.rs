//! The client half of a session at a server process: the control connection and the thread that keeps it.
//!
//! The rule it keeps: whoever finds the connection broken declares its [`Death`] before anything else, so that channels
//! stop at once. A TCP session is resumed within its lease, by the thread or by the next call; a Unix socket that closed
//! is the server's death, and the session stays dead.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, ExtentId, Refusal, Request, Response, Secret, SessionId,
    control::{ControlDecodeError, Lease, MAX_CLIENT_BYTES, MAX_FRAME_BYTES, Purpose, RemoteKey},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;
use std::os::fd::AsFd;

use super::{CallError, ConnectError, Death, Patience, Session, SessionOptions};
use crate::{
    Buf, Channel,
    key::Key,
    rdma,
    regmem::{NullRegistrar, Registrar},
    shm::{Directory, ShmChannel},
    stream::{ReceiveError, Stream, timeout_until},
    tcp::TcpChannel,
};

/// A connection on which the server says nothing for this part of the deadline is taken for dead, so that there is time to try others: a router may have
/// forgotten it, which nobody is told.
const ATTEMPTS: u32 = 4;

/// How often a lost connection is tried again. Short against any lease, long against the cost of a try.
const RESUME_EVERY: Duration = Duration::from_millis(100);

/// So that a connection that is refused at once is not asked for all the time.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// The longest that a goodbye may hold up a program that is ending.
const GOODBYE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Remote {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    endpoint: Endpoint,
    name: String,
    deadline: Duration,
    client: String,
    key_file: Option<PathBuf>,
    line: Mutex<Line>,
    /// The extents of a session over shared memory.
    directory: Arc<Directory>,
    /// The extents of a session over RDMA.
    rdma: Arc<rdma::Client>,
    closing: AtomicBool,
    /// Extents to release that the server was not told of, or did not answer for.
    unreleased: Mutex<Vec<ExtentId>>,
    /// Bytes of the pages that are kept there, and bytes that they take.
    held: [AtomicU64; 2],
    /// Wakes the keeper: closing, or a new connection to watch.
    wake: EventFd,
}

/// The control connection. Held during a call, so that answers meet their requests.
#[derive(Debug)]
struct Line {
    stream: Arc<Stream>,
    death: Arc<Death>,
    session: SessionId,
    secret: Secret,
    lease: Duration,
    /// Whether the server knows our key.
    identified: bool,
    /// Leases and claims that the server has granted and not taken back.
    held: usize,
    /// The server has forgotten the session: resuming is pointless.
    over: bool,
}

impl Remote {
    pub(super) fn connect(
        endpoint: &Endpoint,
        options: &SessionOptions,
        until: Instant,
    ) -> Result<Self, ConnectError> {
        let mut client = options.client.clone();
        client.truncate(client.floor_char_boundary(MAX_CLIENT_BYTES));
        let rdma = Arc::new(rdma::Client::new(options.rdma));
        let line = begin(endpoint, &rdma, &client, None, until)?;
        let no_resources = |source| ConnectError::Unreachable {
            endpoint: endpoint.to_string(),
            source,
        };
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let shared = Arc::new(Shared {
            endpoint: endpoint.clone(),
            name: endpoint.to_string(),
            deadline: options.deadline,
            client,
            key_file: options.key_file.clone(),
            line: Mutex::new(line),
            directory: Arc::default(),
            rdma,
            closing: AtomicBool::new(false),
            unreleased: Mutex::default(),
            held: Default::default(),
            wake: wake.map_err(|errno| no_resources(errno.into()))?,
        });
        let keeper = {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name("farpage-session".to_owned())
                .spawn(move || shared.keep())
                .map_err(no_resources)?
        };
        Ok(Self {
            shared,
            keeper: Some(keeper),
        })
    }

    /// Counts pages that are kept there from now on, or (by negative figures) no more.
    pub(super) fn hold(&self, plain_bytes: i64, stored_bytes: i64) {
        for (held, bytes) in self.shared.held.iter().zip([plain_bytes, stored_bytes]) {
            held.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Asks the server; resumes the session first if its connection broke, or is silent.
    pub(super) fn call(&self, request: Request) -> Result<Response, CallError> {
        let shared = &self.shared;
        let until = Instant::now() + shared.deadline;
        let Some(mut line) = shared.line.try_lock_until(until) else {
            let reason = "the server did not answer an earlier call in time";
            return Err(CallError::Disconnected(reason.to_owned()));
        };
        loop {
            let soon = until.min(Instant::now() + shared.silence());
            let asked = match shared.mend(&mut line, soon) {
                // Nobody is there: trying again would only take longer.
                Err(error) if is_refused(&error) => {
                    return Err(CallError::Disconnected(error.to_string()));
                }
                Err(error) => Err(CallError::Disconnected(error.to_string())),
                Ok(()) => match shared.ready(&mut line, &request, soon) {
                    Ok(()) => match shared.exchange(&mut line, &request, until) {
                        Err(error) if may_repeat(&request) => Err(error),
                        other => return other,
                    },
                    Err(error) => Err(error),
                },
            };
            match asked {
                Err(CallError::Disconnected(_))
                    if shared.can_resume(&line) && Instant::now() < until =>
                {
                    thread::sleep(BETWEEN_TRIES);
                }
                other => return other,
            }
        }
    }

    pub(super) fn channel<B: Buf>(
        &self,
        session: &Arc<Session>,
        line: u64,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        self.shared
            .persist(|until| self.try_channel(session, line, until))
    }

    fn try_channel<B: Buf>(
        &self,
        session: &Arc<Session>,
        line: u64,
        until: Instant,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        if let Some(route) = self.try_route(session, line, until)? {
            return rdma::channel(route);
        }
        let shared = &self.shared;
        let (id, secret, death) = shared.claim(until)?;
        if let Endpoint::Shm(_) = shared.endpoint {
            let directory = Arc::clone(&shared.directory);
            return Ok(Box::new(ShmChannel::new(session, directory, death)));
        }
        let request = Request::Attach {
            session: id,
            secret,
            line,
        };
        let stream = open(&shared.endpoint, &shared.rdma, Purpose::Data, until)?;
        let asked = stream
            .send(&request, until)
            .and_then(|()| stream.receive(MAX_FRAME_BYTES, until));
        match asked.map_err(|error| not_connected(&shared.name, error))? {
            Response::Done => Ok(Box::new(TcpChannel::new(
                session,
                stream,
                death,
                Patience {
                    deadline: shared.deadline,
                    silence: shared.silence(),
                },
            ))),
            answer => Err(turned_away(&shared.name, answer)),
        }
    }

    /// The way for a channel over RDMA, if the session is over RDMA.
    pub(super) fn route(
        &self,
        session: &Arc<Session>,
        line: u64,
    ) -> Result<Option<rdma::Route>, ConnectError> {
        self.shared
            .persist(|until| self.try_route(session, line, until))
    }

    fn try_route(
        &self,
        session: &Arc<Session>,
        line: u64,
        until: Instant,
    ) -> Result<Option<rdma::Route>, ConnectError> {
        let shared = &self.shared;
        if !matches!(shared.endpoint, Endpoint::Rdma { .. }) {
            return Ok(None);
        }
        let (id, secret, death) = shared.claim(until)?;
        let patience = Patience {
            deadline: shared.deadline,
            silence: shared.silence(),
        };
        let claim = (id, secret, line);
        let route = shared.rdma.route(session, claim, death, patience, until)?;
        Ok(Some(route))
    }

    /// Makes memory known to the adapter of this session, if it has one.
    pub(super) fn registrar(&self) -> Arc<dyn Registrar> {
        match self.shared.endpoint {
            Endpoint::Rdma { .. } => self.shared.rdma.registrar(),
            _ => Arc::new(NullRegistrar),
        }
    }

    #[cfg(all(test, feature = "rdma"))]
    pub(super) fn rdma(&self) -> &rdma::Client {
        &self.shared.rdma
    }

    /// Gives a lease back. Nobody waits for a server that is silent: it is told later.
    pub(super) fn release(&self, id: ExtentId) -> Result<Response, CallError> {
        let shared = &self.shared;
        shared.directory.remove(id);
        shared.rdma.remove(id);
        let until = Instant::now() + shared.silence();
        let request = Request::Release { extent: id };
        let line = shared.line.try_lock_until(until);
        let answer = match line {
            Some(mut line) if line.death.reason().is_none() => {
                shared.exchange(&mut line, &request, until)
            }
            Some(line) if !shared.can_resume(&line) => {
                let reason = line.death.reason().unwrap_or_default();
                return Err(CallError::Disconnected(reason));
            }
            _ => Err(CallError::Disconnected(String::new())),
        };
        match answer {
            Err(CallError::Disconnected(_)) if !matches!(shared.endpoint, Endpoint::Shm(_)) => {
                shared.unreleased.lock().push(id);
                Ok(Response::Done)
            }
            other => other,
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.wake_keeper();
        let until = Instant::now() + self.shared.deadline.min(GOODBYE);
        let Some(mut line) = self.shared.line.try_lock_until(until) else {
            // The keeper waits for a server that is stuck. It ends at its deadline, and the connection with it.
            return;
        };
        if line.death.reason().is_none() {
            // Waits for the answer, so that the memory is free when the drop is over. A server that is gone frees it itself.
            let _ = self.shared.exchange(&mut line, &Request::Goodbye, until);
        }
        line.stream.close();
        drop(line);
        let keeper = self.keeper.take().expect("joined only here");
        if keeper.join().is_err() {
            tracing::error!(
                endpoint = self.shared.name,
                "the thread of a session panicked; its message is above"
            );
        }
    }
}

impl Shared {
    /// The keeper thread: renews the lease, notices the end of the connection, resumes it where that is possible.
    fn keep(&self) {
        let mut renewed = Instant::now();
        let mut told = [0; 2];
        loop {
            // 1. What to watch.
            let (stream, death, lease, over) = {
                let line = self.line.lock();
                (
                    Arc::clone(&line.stream),
                    Arc::clone(&line.death),
                    line.lease,
                    line.over,
                )
            };
            let alive = death.reason().is_none();
            let can_resume = !over && !matches!(self.endpoint, Endpoint::Shm(_));
            let timeout = match (alive, can_resume) {
                // A third of the lease, so that a renewal may fail once.
                (true, _) => timeout_until(renewed + lease / 3),
                (false, true) => timeout_until(Instant::now() + RESUME_EVERY),
                (false, false) => PollTimeout::NONE,
            };
            // 2. Sleep. Answers to calls are none of our business: only the end of the connection wakes us.
            let (end, flags) = stream.end();
            let mut fds = [
                PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
                PollFd::new(end, flags),
            ];
            let woken = poll(&mut fds[..if alive { 2 } else { 1 }], timeout);
            // 3. What happened?
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            // `None` stands for a bit that nix has no name for, which is ours.
            let ended = alive && fds[1].any() != Some(false) && stream.has_ended();
            if fds[0].any() == Some(true) {
                // Empty when somebody else's wake was counted into an earlier read.
                let _ = self.wake.read();
            }
            let until = Instant::now() + self.silence();
            if ended {
                // Before the lock: a call may hold it until its own deadline.
                death.declare("the server closed the connection");
            } else if woken == Ok(0) {
                let mut line = self.line.lock();
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                if !alive {
                    // Tried again after a while, and said by whatever needs the session.
                    if self.mend(&mut line, until).is_ok() {
                        let _ = self.catch_up(&mut line, until);
                    }
                } else if line.death.reason().is_none() {
                    let _ = self.exchange(&mut line, &Request::Renew, until);
                    let held = self
                        .held
                        .each_ref()
                        .map(|bytes| bytes.load(Ordering::Relaxed));
                    if held != told {
                        told = held;
                        let [plain_bytes, stored_bytes] = held;
                        let hold = Request::Hold {
                            plain_bytes,
                            stored_bytes,
                        };
                        let _ = self.exchange(&mut line, &hold, until);
                    }
                }
                renewed = Instant::now();
            } else if let Err(errno) = woken
                && errno != Errno::EINTR
            {
                death.declare(&format!("cannot wait for the server: {errno}"));
            }
        }
    }

    /// What a data connection says of whom it belongs to, and where it hears of the server's death. Resumes the session first when its connection broke.
    fn claim(&self, until: Instant) -> Result<(SessionId, Secret, Arc<Death>), ConnectError> {
        // Connecting takes its time, and calls need not wait for it: the lock ends here.
        let mut line =
            self.line
                .try_lock_until(until)
                .ok_or_else(|| ConnectError::Unreachable {
                    endpoint: self.name.clone(),
                    source: std::io::ErrorKind::TimedOut.into(),
                })?;
        self.mend(&mut line, until)?;
        Ok((line.session, line.secret, Arc::clone(&line.death)))
    }

    /// How long a connection may be silent.
    fn silence(&self) -> Duration {
        self.deadline / ATTEMPTS
    }

    /// Connects by `attempt`, which is given its own end, again and again until the deadline: for as long as nobody says no.
    fn persist<T>(
        &self,
        attempt: impl Fn(Instant) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let until = Instant::now() + self.deadline;
        loop {
            match attempt(until.min(Instant::now() + self.silence())) {
                Err(ConnectError::Unreachable { source, .. })
                    if source.kind() == std::io::ErrorKind::TimedOut && Instant::now() < until => {}
                other => return other,
            }
        }
    }

    fn can_resume(&self, line: &Line) -> bool {
        !line.over && !matches!(self.endpoint, Endpoint::Shm(_))
    }

    /// Makes the control connection ready for a request.
    fn ready(&self, line: &mut Line, request: &Request, until: Instant) -> Result<(), CallError> {
        self.probe(line, until)?;
        match is_about_a_name(request) {
            true => self.identify(line, until),
            false => Ok(()),
        }
    }

    /// Makes sure that the control connection works: what is asked next may take place only once, so that it cannot be asked again when no answer comes.
    fn probe(&self, line: &mut Line, until: Instant) -> Result<(), CallError> {
        match self.endpoint {
            // The end of a local connection is always seen.
            Endpoint::Shm(_) => {}
            _ => self.exchange(line, &Request::Renew, until).map(drop)?,
        }
        self.catch_up(line, until)
    }

    /// Tells the server what it was not told when it could not be reached.
    fn catch_up(&self, line: &mut Line, until: Instant) -> Result<(), CallError> {
        let mut unreleased = self.unreleased.lock();
        while let Some(&extent) = unreleased.last() {
            // It refuses what it has released already, where only the answer was lost.
            match self.exchange(line, &Request::Release { extent }, until) {
                Err(error @ CallError::Disconnected(_)) => return Err(error),
                _ => unreleased.pop(),
            };
        }
        Ok(())
    }

    /// Brings a broken connection back, if there is a way.
    fn mend(&self, line: &mut Line, until: Instant) -> Result<(), ConnectError> {
        let Some(reason) = line.death.reason() else {
            return Ok(());
        };
        if !self.can_resume(line) {
            let source = std::io::Error::new(
                std::io::ErrorKind::ConnectionAborted,
                format!("the session ended: {reason}"),
            );
            return Err(ConnectError::Unreachable {
                endpoint: self.name.clone(),
                source,
            });
        }
        match begin(
            &self.endpoint,
            &self.rdma,
            &self.client,
            Some((line.session, line.secret)),
            until,
        ) {
            Ok(resumed) => {
                tracing::info!(
                    endpoint = self.name,
                    reason,
                    "session resumed after its connection was lost"
                );
                let (identified, held) = (line.identified, line.held);
                *line = resumed;
                (line.identified, line.held) = (identified, held);
                self.wake_keeper();
                Ok(())
            }
            // The server keeps no session that holds nothing, and nothing is lost by another.
            Err(ConnectError::Refused { .. }) if line.held == 0 => {
                *line = begin(&self.endpoint, &self.rdma, &self.client, None, until)?;
                self.wake_keeper();
                Ok(())
            }
            Err(error) => {
                line.over |= matches!(error, ConnectError::Refused { .. });
                Err(error)
            }
        }
    }

    /// Shows our key, once per session: names belong to keys.
    fn identify(&self, line: &mut Line, until: Instant) -> Result<(), CallError> {
        if line.identified {
            return Ok(());
        }
        let file = self.key_file.clone().map_or_else(Key::default_file, Ok);
        let key = file
            .and_then(|file| Key::load_or_make(&file))
            .map_err(|error| CallError::Key(error.to_string()))?;
        let Response::Challenge(challenge) = self.exchange(line, &Request::Challenge, until)?
        else {
            self.give_up(line, "the server answered something else than a challenge");
            return Err(CallError::Disconnected(
                "the server answered something else than a challenge".to_owned(),
            ));
        };
        let identify = Request::Identify {
            key: key.public(),
            signature: key.sign(&challenge),
        };
        self.exchange(line, &identify, until)?;
        line.identified = true;
        Ok(())
    }

    /// One request and its answer, with the descriptors that follow it.
    fn exchange(
        &self,
        line: &mut Line,
        request: &Request,
        until: Instant,
    ) -> Result<Response, CallError> {
        match self.converse(&line.stream, request, until) {
            Ok(Response::Refused(refusal)) => {
                if refusal == Refusal::NoSession {
                    line.over = true;
                    self.give_up(line, "the server has ended the session");
                }
                Err(CallError::Refused(refusal))
            }
            Ok(answer) => {
                line.held = match (request, &answer) {
                    (Request::Claim { .. }, _) | (_, Response::Granted { .. }) => line.held + 1,
                    (_, Response::Opened { extents, .. }) => line.held + extents.len().max(1),
                    (Request::Release { .. } | Request::Disclaim { .. }, _) => {
                        line.held.saturating_sub(1)
                    }
                    _ => line.held,
                };
                Ok(answer)
            }
            // Nothing was sent, so nothing is broken.
            Err(ReceiveError::Decode(error @ ControlDecodeError::TooLong { .. })) => {
                Err(CallError::Refused(Refusal::Invalid(error.to_string())))
            }
            Err(error) => {
                let reason = error.to_string();
                self.give_up(line, &reason);
                Err(CallError::Disconnected(reason))
            }
        }
    }

    fn converse(
        &self,
        stream: &Stream,
        request: &Request,
        until: Instant,
    ) -> Result<Response, ReceiveError> {
        stream.send(request, until)?;
        let answer = stream.receive(MAX_FRAME_BYTES, until)?;
        let leases: &[Lease] = match &answer {
            Response::Granted { extent } => std::slice::from_ref(extent),
            Response::Opened { extents, .. } => extents,
            _ => &[],
        };
        match self.endpoint {
            Endpoint::Shm(_) => {
                for (lease, fd) in leases.iter().zip(stream.receive_fds(leases.len(), until)?) {
                    self.directory.insert(*lease, fd)?;
                }
            }
            Endpoint::Rdma { .. } if !leases.is_empty() => {
                let keys: Vec<RemoteKey> = stream.receive(MAX_FRAME_BYTES, until)?;
                if keys.len() != leases.len() {
                    return Err(ControlDecodeError::Frame.into());
                }
                for (lease, key) in leases.iter().zip(keys) {
                    self.rdma.insert(*lease, key);
                }
            }
            _ => {}
        }
        Ok(answer)
    }

    fn give_up(&self, line: &Line, reason: &str) {
        line.death.declare(reason);
        // After a missed answer the next one would meet the wrong request.
        line.stream.close();
        self.wake_keeper();
    }

    fn wake_keeper(&self) {
        // Fails only when the counter is full, and then the keeper is awake.
        let _ = self.wake.write(1);
    }
}

fn is_about_a_name(request: &Request) -> bool {
    matches!(
        request,
        Request::Claim { .. }
            | Request::Publish { .. }
            | Request::Open { .. }
            | Request::Remove { .. }
            | Request::Names { .. }
    )
}

/// Whether asking twice does what asking once does. The binding that a lost answer was about is this client's own.
fn may_repeat(request: &Request) -> bool {
    matches!(
        request,
        Request::Renew | Request::Hold { .. } | Request::Stat | Request::Publish { .. }
    )
}

/// Whether nobody listens there.
fn is_refused(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Unreachable { source, .. }
        if source.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Connects and says hello.
pub(super) fn open(
    endpoint: &Endpoint,
    rdma: &rdma::Client,
    purpose: Purpose,
    until: Instant,
) -> Result<Stream, ConnectError> {
    let name = endpoint.to_string();
    let stream = match endpoint {
        Endpoint::Rdma { .. } => Stream::Rdma(Box::new(rdma.connect(endpoint, until)?)),
        _ => Stream::connect(endpoint, until).map_err(|source| ConnectError::Unreachable {
            endpoint: name.clone(),
            source,
        })?,
    };
    stream
        .greet(purpose, until)
        .map_err(|error| not_connected(&name, error))?;
    Ok(stream)
}

/// Begins a session or resumes one.
fn begin(
    endpoint: &Endpoint,
    rdma: &rdma::Client,
    client: &str,
    resume: Option<(SessionId, Secret)>,
    until: Instant,
) -> Result<Line, ConnectError> {
    let name = endpoint.to_string();
    let stream = open(endpoint, rdma, Purpose::Control, until)?;
    let request = Request::Begin {
        client: client.to_owned(),
        resume,
    };
    let answer = stream
        .send(&request, until)
        .and_then(|()| stream.receive(MAX_FRAME_BYTES, until));
    match answer.map_err(|error| not_connected(&name, error))? {
        Response::Begun {
            session,
            secret,
            lease_ms,
        } => Ok(Line {
            stream: Arc::new(stream),
            death: Arc::default(),
            session,
            secret,
            lease: Duration::from_millis(lease_ms),
            identified: false,
            held: 0,
            over: false,
        }),
        answer => Err(turned_away(&name, answer)),
    }
}

pub(super) fn not_connected(name: &str, error: ReceiveError) -> ConnectError {
    let endpoint = name.to_owned();
    match error {
        ReceiveError::Io(source) => ConnectError::Unreachable { endpoint, source },
        ReceiveError::Refused(refusal) => ConnectError::Refused {
            endpoint,
            reason: refusal.to_string(),
        },
        ReceiveError::Decode(error) => ConnectError::Protocol {
            endpoint,
            reason: error.to_string(),
        },
    }
}

pub(super) fn turned_away(name: &str, answer: Response) -> ConnectError {
    let endpoint = name.to_owned();
    match answer {
        Response::Refused(refusal) => ConnectError::Refused {
            endpoint,
            reason: refusal.to_string(),
        },
        _ => ConnectError::Protocol {
            endpoint,
            reason: "with something that was not asked for".to_owned(),
        },
    }
}
