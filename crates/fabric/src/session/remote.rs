//! The client half of a session at a server process: the control connection and the thread that
//! keeps it.
//!
//! The rule it keeps: whoever finds the connection broken declares its [`Death`] before anything
//! else, so that channels stop at once. A TCP session is resumed within its lease, by the thread or
//! by the next call.
//!
//! A Unix socket is never connected again. A server that does not answer on it in time owes the
//! answer, which is taken when it comes: closing the socket would end the session. When it closes,
//! the server has ended the session, or its process has ended. In the latter case only the calls
//! end: nobody else can come by the memory that it passed. If this program was stopped for longer
//! than its lease, the memory is lost in both cases: before its process ended the server may have
//! ended the session, and lent the memory of a named region to another.

use std::{
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, ExtentId, Refusal, Request, Response, Secret, SessionId,
    control::{
        self, ControlDecodeError, Lease, MAX_CLIENT_BYTES, MAX_FRAME_BYTES, Purpose, RemoteKey,
    },
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;
use std::os::fd::{AsFd, OwnedFd};

use super::{CallError, ConnectError, Death, Patience, Session, SessionOptions};
use crate::{
    Buf, Channel,
    key::Key,
    log::later,
    rdma,
    regmem::{NullRegistrar, Registrar},
    shm::{Directory, ShmChannel},
    stream::{PeerProcess, ReceiveError, Stream, retry, timeout_until},
    tcp::TcpChannel,
};

/// A connection on which the server says nothing for this part of the deadline is taken for dead,
/// so that there is time to try others: a router may have forgotten it, which nobody is told.
const ATTEMPTS: u32 = 4;

/// What a shorter lease counts as.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// How often a lost connection is tried again. Short against any lease, long against the cost of a
/// try.
const RESUME_EVERY: Duration = Duration::from_millis(100);

/// So that a connection that is refused at once is not asked for all the time.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// How long a server's process may live on after it closed a Unix socket, or it has ended the
/// session. Short, since what is written meanwhile is lost in that case.
const PARTING: Duration = Duration::from_secs(1);

const SILENT: &str = "the server has not answered in time; its memory can be read and written all the \
                      same, and what it owes is taken when it goes on";
const ENDED: &str = "the server's process has ended; what it lent can be read and written until this \
                     program ends, but nothing more can be asked of it: start a server, and this \
                     program again";

const OVERDUE: &str = "the server's process has ended, and it had not renewed this program's lease in time: \
                       what it lent may have been lent to others since";

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
    key: OnceLock<Key>,
    line: Mutex<Line>,
    /// The extents of a session over shared memory.
    directory: Arc<Directory>,
    /// What ends the channels over shared memory: there is never another connection.
    local: Option<Arc<Death>>,
    /// The server's process, where it can be seen.
    peer: Option<PeerProcess>,
    /// When the last renewal that was answered was begun: until a lease later the session is ours.
    renewed: Mutex<Instant>,
    /// How long that is over shared memory, where a session is never resumed.
    local_lease: Duration,
    /// The extents of a session over RDMA.
    rdma: Arc<rdma::Client>,
    closing: AtomicBool,
    /// What gives back to the server, and it was not told of or did not answer for.
    untold: Mutex<Vec<Request>>,
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
    talk: Talk,
}

/// What is under way on a control connection: a request, and then its answer. Each step goes on
/// where the one before it ran out of time.
#[derive(Debug, Default)]
struct Talk {
    request: Vec<u8>,
    sent: usize,
    /// Of the answer's frame, what has come.
    frame: Vec<u8>,
    /// When the request was begun, if it renews the lease.
    renewing: Option<Instant>,
    answer: Option<Response>,
    fds: Vec<OwnedFd>,
    /// Set while an answer is owed that nobody waits for: what takes the request back.
    owed: Option<Option<Request>>,
}

impl Talk {
    fn say(&mut self, request: Vec<u8>, renews: bool) {
        (self.request, self.sent) = (request, 0);
        self.renewing = renews.then(Instant::now);
    }

    /// The answer to what was said, and the descriptors that come with it.
    fn hear(
        &mut self,
        stream: &Stream,
        until: Instant,
    ) -> Result<(Response, Vec<OwnedFd>), ReceiveError> {
        while self.sent < self.request.len() {
            match stream.write(&self.request[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(error) if retry(&error) => stream.wait(PollFlags::POLLOUT, until)?,
                Err(error) => return Err(error.into()),
            }
        }
        if self.answer.is_none() {
            self.answer = Some(stream.receive_on(&mut self.frame, MAX_FRAME_BYTES, until)?);
        }
        if let (Stream::Unix(_), Some(answer)) = (stream, &self.answer) {
            stream.receive_fds(&mut self.fds, leases_of(answer).len(), until)?;
        }
        let answer = self.answer.take().expect("received just now");
        Ok((answer, std::mem::take(&mut self.fds)))
    }
}

/// The memory that an answer speaks of.
fn leases_of(answer: &Response) -> &[Lease] {
    match answer {
        Response::Granted { extent } => std::slice::from_ref(extent),
        Response::Opened { extents, .. } => extents,
        _ => &[],
    }
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
        let begun = Instant::now();
        let line = begin(endpoint, &rdma, &client, None, until)?;
        let no_resources = |source| ConnectError::Unreachable {
            endpoint: endpoint.to_string(),
            source,
        };
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let local = matches!(endpoint, Endpoint::Shm(_)).then(|| Arc::clone(&line.death));
        let shared = Arc::new(Shared {
            endpoint: endpoint.clone(),
            name: endpoint.to_string(),
            deadline: options.deadline,
            client,
            key_file: options.key_file.clone(),
            key: OnceLock::new(),
            peer: PeerProcess::of(&line.stream),
            renewed: Mutex::new(begun),
            local_lease: line.lease,
            line: Mutex::new(line),
            directory: Arc::default(),
            local,
            rdma,
            closing: AtomicBool::new(false),
            untold: Mutex::default(),
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
        if is_about_a_name(&request) {
            // Not while others wait for the line: a file may be far away.
            shared.key()?;
        }
        let until = Instant::now() + shared.deadline;
        let Some(mut line) = shared.line.try_lock_until(until) else {
            let reason = "the server did not answer an earlier call in time";
            return Err(CallError::Disconnected(reason.to_owned()));
        };
        let mut was_sent = false;
        let answer = loop {
            let soon = until.min(Instant::now() + shared.silence());
            let asked = match shared.mend(&mut line, soon) {
                // Nobody is there: trying again would only take longer.
                Err(error) if is_refused(&error) => {
                    break Err(CallError::Disconnected(error.to_string()));
                }
                Err(error) => Err(CallError::Disconnected(error.to_string())),
                Ok(()) => match shared.ready(&mut line, &request, soon) {
                    Ok(()) => {
                        was_sent = true;
                        match shared.exchange(&mut line, &request, until) {
                            Err(error) if may_repeat(&request) => Err(error),
                            other => break other,
                        }
                    }
                    Err(error) => Err(error),
                },
            };
            match asked {
                Err(CallError::Disconnected(_))
                    if shared.can_resume(&line) && Instant::now() < until =>
                {
                    thread::sleep(BETWEEN_TRIES);
                }
                other => break other,
            }
        };
        // Over a Unix socket the answer is owed; elsewhere it is asked for again, and what it gives
        // is given back.
        let is_lost = was_sent && matches!(answer, Err(CallError::Disconnected(_)));
        if is_lost && shared.local.is_none() && gives(&request) {
            shared.untold.lock().push(request);
        }
        answer
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
        if let Some(death) = &shared.local {
            // No server is needed for it.
            return match death.loss() {
                Some(reason) => Err(shared.ended(&reason)),
                None => Ok(Box::new(ShmChannel::new(
                    session,
                    Arc::clone(&shared.directory),
                    Arc::clone(death),
                ))),
            };
        }
        let (id, secret, death) = shared.claim(until)?;
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
            Some(mut line) if line.death.reason().is_none() && line.talk.owed.is_none() => {
                shared.exchange(&mut line, &request, until)
            }
            Some(line) if line.death.reason().is_some() && !shared.can_resume(&line) => {
                let reason = line.death.reason().unwrap_or_default();
                return Err(CallError::Disconnected(reason));
            }
            _ => Err(CallError::Disconnected(String::new())),
        };
        match answer {
            Err(CallError::Disconnected(_)) => {
                shared.untold.lock().push(request);
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
            // The keeper waits for a server that is stuck. It ends at its deadline, and the
            // connection with it.
            return;
        };
        // No channel is left, or the session would live.
        self.shared.directory.clear();
        if line.death.reason().is_none() {
            // Waits for the answer, so that the memory is free when the drop is over. A server that
            // is gone frees it itself.
            let _ = self.shared.exchange(&mut line, &Request::Goodbye, until);
        }
        line.stream.close();
        drop(line);
        let keeper = self.keeper.take().expect("joined only here");
        if keeper.join().is_err() {
            let endpoint = self.shared.name.clone();
            later(move || {
                tracing::error!(
                    endpoint,
                    "the thread of a session panicked; its message is above"
                );
            });
        }
    }
}

impl Shared {
    /// The keeper thread: renews the lease, notices the end of the connection, resumes it where
    /// that is possible.
    fn keep(&self) {
        let mut renewed = Instant::now();
        let mut told = [0; 2];
        loop {
            // 1. What to watch.
            let (stream, death, lease, over, owed) = {
                let line = self.line.lock();
                (
                    Arc::clone(&line.stream),
                    Arc::clone(&line.death),
                    line.lease,
                    line.over,
                    line.talk.owed.is_some(),
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
            // 2. Sleep. Only the end of the connection wakes us, and an answer that nobody waits
            //    for.
            let (end, mut flags) = stream.end();
            flags.set(PollFlags::POLLIN, owed || flags.contains(PollFlags::POLLIN));
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
            let seen = fds[1].revents();
            let answers = alive && owed && seen == Some(PollFlags::POLLIN);
            let ended = alive && !answers && seen != Some(PollFlags::empty()) && stream.has_ended();
            if fds[0].any() == Some(true) {
                // Empty when somebody else's wake was counted into an earlier read.
                let _ = self.wake.read();
            }
            let until = Instant::now() + self.silence();
            if ended {
                // Before the lock: a call may hold it until its own deadline.
                self.declare(&death, "the server closed the connection");
            } else if answers {
                let mut line = self.line.lock();
                if line.talk.owed.is_some() && self.settle(&mut line, until).is_ok() {
                    let _ = self.catch_up(&mut line, until);
                }
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
                    told = self.renew(&mut line, told, until).unwrap_or(told);
                }
                renewed = Instant::now();
            } else if let Err(errno) = woken
                && errno != Errno::EINTR
            {
                death.declare(&format!("cannot wait for the server: {errno}"));
            }
        }
    }

    /// Renews the lease and tells what was not told yet. Returns the figures that the server has
    /// now.
    fn renew(
        &self,
        line: &mut Line,
        told: [u64; 2],
        until: Instant,
    ) -> Result<[u64; 2], CallError> {
        self.exchange(line, &Request::Renew, until)?;
        let held = self
            .held
            .each_ref()
            .map(|bytes| bytes.load(Ordering::Relaxed));
        if held != told {
            let [plain_bytes, stored_bytes] = held;
            let hold = Request::Hold {
                plain_bytes,
                stored_bytes,
            };
            self.exchange(line, &hold, until)?;
        }
        self.catch_up(line, until)?;
        Ok(held)
    }

    /// What a data connection says of whom it belongs to, and where it hears of the server's death.
    /// Resumes the session first when its connection broke.
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

    /// Connects by `attempt`, which is given its own end, again and again until the deadline: for
    /// as long as nobody says no.
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

    /// Makes sure that the control connection works: what is asked next may take place only once,
    /// so that it cannot be asked again when no answer comes.
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
        loop {
            // Not held while it is asked: what an answer owes is put here, too.
            let Some(request) = self.untold.lock().pop() else {
                return Ok(());
            };
            match self.exchange(line, &request, until) {
                Ok(answer) => {
                    for lease in leases_of(&answer) {
                        self.rdma.remove(lease.id);
                    }
                    self.give_back(taking_back(&request), &answer);
                }
                Err(error @ CallError::Disconnected(_)) => {
                    self.untold.lock().push(request);
                    return Err(error);
                }
                // It refuses what it has taken back already, where only the answer was lost.
                Err(_) => {}
            }
        }
    }

    /// Brings a broken connection back, if there is a way.
    fn mend(&self, line: &mut Line, until: Instant) -> Result<(), ConnectError> {
        let Some(reason) = line.death.reason() else {
            return Ok(());
        };
        if !self.can_resume(line) {
            return Err(self.ended(&reason));
        }
        match begin(
            &self.endpoint,
            &self.rdma,
            &self.client,
            Some((line.session, line.secret)),
            until,
        ) {
            Ok(resumed) => {
                let endpoint = self.name.clone();
                later(move || {
                    tracing::info!(
                        endpoint,
                        reason,
                        "session resumed after its connection was lost"
                    );
                });
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

    /// The user's key. Reads the file where nobody has yet, which may take its time.
    fn key(&self) -> Result<&Key, CallError> {
        if let Some(key) = self.key.get() {
            return Ok(key);
        }
        let file = self.key_file.clone().map_or_else(Key::default_file, Ok);
        let key = file
            .and_then(|file| Key::load_or_make(&file))
            .map_err(|error| CallError::Key(error.to_string()))?;
        Ok(self.key.get_or_init(|| key))
    }

    /// Shows our key, once per session: names belong to keys.
    fn identify(&self, line: &mut Line, until: Instant) -> Result<(), CallError> {
        if line.identified {
            return Ok(());
        }
        let key = self.key()?;
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
        let bytes = match control::encode(request) {
            Ok(bytes) => bytes,
            // Nothing was sent, so nothing is broken.
            Err(error) => return Err(CallError::Refused(Refusal::Invalid(error.to_string()))),
        };
        self.settle(line, until)?;
        line.talk.say(bytes, *request == Request::Renew);
        match self.hear(line, until) {
            Ok((answer, fds)) => {
                self.keep_leases(line, &answer, fds, until)
                    .map_err(|error| self.broken(line, &error))?;
                if let Response::Refused(refusal) = answer {
                    return Err(CallError::Refused(refusal));
                }
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
            Err(error) => {
                if line.death.reason().is_none() {
                    line.talk.owed = Some(taking_back(request));
                    let endpoint = self.name.clone();
                    later(move || tracing::warn!(endpoint, "{SILENT}"));
                    self.wake_keeper();
                }
                Err(error)
            }
        }
    }

    /// Takes the answer that is owed, if one is: the next one would meet the wrong request. What it
    /// gave is given back, since whoever asked for it was told that it failed.
    fn settle(&self, line: &mut Line, until: Instant) -> Result<(), CallError> {
        if line.talk.owed.is_none() {
            return Ok(());
        }
        let (answer, _) = self.hear(line, until)?;
        let endpoint = self.name.clone();
        later(move || tracing::info!(endpoint, "the server answers again"));
        let taking_back = line.talk.owed.take().flatten();
        if !matches!(answer, Response::Refused(_)) {
            self.give_back(taking_back, &answer);
        }
        Ok(())
    }

    /// Has the server told that nobody wants what an answer gave.
    fn give_back(&self, taking_back: Option<Request>, answer: &Response) {
        let mut untold = self.untold.lock();
        untold.extend(taking_back);
        // Told before what is above: the last is told first.
        let leases = leases_of(answer).iter();
        untold.extend(leases.map(|lease| Request::Release { extent: lease.id }));
    }

    /// Waits for the answer to what was said last. A silent server owes it if nothing can be
    /// resumed.
    fn hear(&self, line: &mut Line, until: Instant) -> Result<(Response, Vec<OwnedFd>), CallError> {
        match line.talk.hear(&line.stream, until) {
            Ok((answer, fds)) => {
                // Not when the answer was read: it may have lain there while this program was
                // stopped.
                if let Some(asked) = line.talk.renewing.take() {
                    *self.renewed.lock() = asked;
                }
                if answer == Response::Refused(Refusal::NoSession) {
                    line.over = true;
                    line.death.declare("the server has ended the session");
                    self.close(line);
                }
                Ok((answer, fds))
            }
            Err(ReceiveError::Io(error))
                if self.local.is_some() && error.kind() == std::io::ErrorKind::TimedOut =>
            {
                Err(CallError::Disconnected(SILENT.to_owned()))
            }
            Err(error) => Err(self.broken(line, &error)),
        }
    }

    /// Keeps the memory that an answer speaks of.
    fn keep_leases(
        &self,
        line: &Line,
        answer: &Response,
        fds: Vec<OwnedFd>,
        until: Instant,
    ) -> Result<(), ReceiveError> {
        let leases = leases_of(answer);
        match self.endpoint {
            Endpoint::Shm(_) => {
                for (lease, fd) in leases.iter().zip(fds) {
                    self.directory.insert(*lease, fd)?;
                }
            }
            Endpoint::Rdma { .. } if !leases.is_empty() => {
                let keys: Vec<RemoteKey> = line.stream.receive(MAX_FRAME_BYTES, until)?;
                if keys.len() != leases.len() {
                    return Err(ControlDecodeError::Frame.into());
                }
                for (lease, key) in leases.iter().zip(keys) {
                    self.rdma.insert(*lease, key);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn broken(&self, line: &Line, error: &ReceiveError) -> CallError {
        let reason = error.to_string();
        self.give_up(line, &reason);
        CallError::Disconnected(line.death.reason().unwrap_or(reason))
    }

    fn give_up(&self, line: &Line, reason: &str) {
        self.declare(&line.death, reason);
        self.close(line);
    }

    fn close(&self, line: &Line) {
        // After a missed answer the next one would meet the wrong request.
        line.stream.close();
        self.wake_keeper();
    }

    /// Says that a connection has ended, and what that means for the memory behind it.
    fn declare(&self, death: &Death, reason: &str) {
        if death.reason().is_some() {
            return;
        }
        let ends = |peer: &PeerProcess| peer.ends(Instant::now() + PARTING);
        if self.peer.as_ref().is_some_and(ends) {
            // Looked at last: this program may have been stopped until just now.
            if self.renewed.lock().elapsed() > self.local_lease {
                death.declare(OVERDUE);
            } else {
                death.declare_but_for_memory(ENDED);
            }
        } else {
            death.declare(reason);
        }
    }

    /// The session cannot be had back.
    fn ended(&self, reason: &str) -> ConnectError {
        ConnectError::Unreachable {
            endpoint: self.name.clone(),
            source: std::io::Error::new(
                std::io::ErrorKind::ConnectionAborted,
                format!("the session ended: {reason}"),
            ),
        }
    }

    fn wake_keeper(&self) {
        // Fails only when the counter is full, and then the keeper is awake.
        let _ = self.wake.write(1);
    }
}

/// What takes a request back that succeeded when nobody waited for its answer any more, memory
/// apart.
fn taking_back(request: &Request) -> Option<Request> {
    match request {
        Request::Claim { name, .. } | Request::Open { name, .. } => {
            Some(Request::Disclaim { name: name.clone() })
        }
        _ => None,
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

/// Whether a request gives memory or a name, which somebody has to give back.
fn gives(request: &Request) -> bool {
    matches!(
        request,
        Request::Grant { .. } | Request::Open { .. } | Request::Claim { .. }
    )
}

/// Whether asking twice does what asking once does. The binding that a lost answer was about is
/// this client's own; so is a claim, and what is given has a number.
fn may_repeat(request: &Request) -> bool {
    gives(request)
        || matches!(
            request,
            Request::Renew
                | Request::Hold { .. }
                | Request::Stat
                | Request::Publish { .. }
                | Request::Disclaim { .. }
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
            // A server that says 0 must not make the keeper spin.
            lease: Duration::from_millis(lease_ms).max(SHORTEST_LEASE),
            identified: false,
            held: 0,
            over: false,
            talk: Talk::default(),
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
