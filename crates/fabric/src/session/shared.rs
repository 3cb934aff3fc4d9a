//! [`SessionState`]: state that the calls, the channels and the keeper of a session share; above
//! all its control connection.
//!
//! The rule it keeps: requests take turns on the connection. If an answer never comes, the request
//! is sent again, or its gifts are given back.

use std::{
    fmt,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_signals::Mutex;
use farpage_wire::{
    Endpoint, Persistence, Refusal, Request, Response, Secret, SessionId,
    control::{self, ControlDecodeError, LeaseKeys, MAX_FRAME_BYTES},
};
use nix::sys::eventfd::EventFd;

use super::{
    connect::{begin, is_refused},
    requests::{is_about_a_name, leases_of, taking_back},
    talk::ControlLine,
};
use crate::{
    ConnectError,
    attachment::Death,
    errors::RequestError,
    key::Key,
    log::later,
    memory::MAX_PAGED_BYTES,
    rdma,
    shm::Directory,
    stream::{PeerProcess, ReceiveError},
};

/// Number of tries within the deadline. A connection that is silent for one part of it is taken for
/// dead, which leaves time to try others. A router may have forgotten the connection without
/// telling either side.
const ATTEMPTS: u32 = 4;

/// Time that a server's process may live on after its Unix socket closed. If it lives longer, it
/// has ended the session. Short, since bytes that are written meanwhile are lost in that case.
const PARTING: Duration = Duration::from_secs(1);

const SILENT: &str = "the server has not answered in time; its memory can be read and written all the \
                      same, and what it owes is taken when it goes on";
const ENDED: &str = "the server's process has ended; what it lent can be read and written until this \
                     program ends, but nothing more can be asked of it: start a server, and this \
                     program again";

/// Reason of a loss where the lease had not run out: see [`SessionState::lose`].
const ANEW: &str = "the server has been started anew, or this program was cut off from it for longer than it waits \
                    (--reconnect-grace): what was kept there is gone; start this program again";

const NOBODY: &str = "connection refused; if the server's process has ended, what it kept for this program is gone, also \
                      when it is started again";

const OVERDUE: &str = "the server's process has ended, and it had not renewed this program's lease in time: \
                       what it lent may have been lent to others since";

/// Call to make once the server says that it is about to end. `None`: nobody asked, or it was made.
#[derive(Default)]
pub(super) struct DrainNotice(pub(super) Option<Box<dyn FnOnce() + Send>>);

impl fmt::Debug for DrainNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DrainNotice")
            .field(&self.0.is_some())
            .finish()
    }
}

#[derive(Debug)]
pub(super) struct SessionState {
    pub(super) endpoint: Endpoint,
    pub(super) name: String,
    pub(super) deadline: Duration,
    pub(super) client: String,
    pub(super) key_file: Option<PathBuf>,
    pub(super) key: OnceLock<Key>,
    pub(super) line: Mutex<ControlLine>,
    /// Extents of a session over shared memory.
    pub(super) directory: Arc<Directory>,
    /// Death of the channels over shared memory: there is never another connection.
    pub(super) local: Option<Arc<Death>>,
    /// Process of the server, where it can be seen.
    pub(super) peer: Option<PeerProcess>,
    /// True once another process than `peer` has answered: the server's next one.
    pub(super) is_handed_over: AtomicBool,
    /// Time of sending the last answered renewal. The session is ours for one lease from then on.
    pub(super) renewed: Mutex<Instant>,
    /// Lease that the server granted at first.
    pub(super) lease: Duration,
    /// Reason why the memory is lost, once that is certain.
    pub(super) lost: OnceLock<String>,
    /// True if the server lends more than its memory.
    pub(super) paged: bool,
    /// Time at which published names are on the server's disk.
    pub(super) persistence: Persistence,
    /// Extents of a session over RDMA.
    pub(super) rdma: Arc<rdma::Client>,
    pub(super) closing: AtomicBool,
    /// Flag that is set once the end of this process is announced.
    pub(super) leaving: AtomicBool,
    /// Requests that give something back and that the server has not received, or not answered.
    pub(super) untold: Mutex<Vec<Request>>,
    /// Bytes of the pages that are kept at the server, before compression and as stored.
    pub(super) contents: [AtomicU64; 2],
    /// Call to make once the server says that it is about to end.
    pub(super) drain_notice: Mutex<DrainNotice>,
    /// Event that wakes the keeper: closing, or a new connection to watch.
    pub(super) wake: EventFd,
}

impl SessionState {
    /// Returns the session, its secret and its [`Death`], for a data connection to attach with.
    /// Resumes the session first when its connection broke.
    pub(super) fn claim(
        &self,
        until: Instant,
    ) -> Result<(SessionId, Secret, Arc<Death>), ConnectError> {
        // The lock ends here: connecting takes its time, and calls need not wait for it.
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

    /// Returns the reason why the memory is lost: see [`Session::loss`](super::Session::loss).
    pub(super) fn loss(&self, refused: bool) -> Option<String> {
        let told = self.lost.get().cloned();
        told.or_else(|| refused.then(|| self.overdue()).flatten())
    }

    /// Notes that the server has ended the session, or never had it. Returns the reason.
    fn lose(&self) -> String {
        let why = || self.overdue().unwrap_or_else(|| ANEW.to_owned());
        self.lost.get_or_init(why).clone()
    }

    /// Returns the reason why the server may have ended the session, if this program did not renew
    /// its lease in time.
    fn overdue(&self) -> Option<String> {
        let lease = self.lease;
        (self.renewed.lock().elapsed() > lease).then(|| {
            format!(
                "this program was stopped, or cut off, for longer than its lease of {lease:?}, and the server has lent its memory to others; \
                 start this program again, after a longer --lease at the server if it is to be stopped for so long"
            )
        })
    }

    /// Returns the longest silence of a connection that is not taken for dead.
    pub(super) fn silence(&self) -> Duration {
        self.deadline / ATTEMPTS
    }

    /// Calls `attempt` with the time when it must end, and again as long as it times out before the
    /// deadline.
    pub(super) fn persist<T>(
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

    pub(super) fn can_resume(&self, line: &ControlLine) -> bool {
        !line.over && !matches!(self.endpoint, Endpoint::Shm(_))
    }

    /// Makes sure that the control connection works, and is ready for a request. The request may
    /// take place only once, so it cannot be sent again if no answer comes.
    pub(super) fn ready(
        &self,
        line: &mut ControlLine,
        request: &Request,
        until: Instant,
    ) -> Result<(), RequestError> {
        match (&self.endpoint, request) {
            // The end of a local connection is always seen. A stopped server may give something
            // later, which is given back when it goes on. A publication cannot be taken back.
            (Endpoint::Shm(_), request) if !matches!(request, Request::Publish { .. }) => {}
            _ => self.exchange(line, &Request::Renew, until).map(drop)?,
        }
        self.catch_up(line, until)?;
        match is_about_a_name(request) {
            true => self.identify(line, until),
            false => Ok(()),
        }
    }

    /// Sends the requests in `untold`, which the server missed.
    pub(super) fn catch_up(
        &self,
        line: &mut ControlLine,
        until: Instant,
    ) -> Result<(), RequestError> {
        loop {
            // Not locked during the request: settling an owed answer adds to `untold`, too.
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
                Err(error @ RequestError::Disconnected(_)) => {
                    self.untold.lock().push(request);
                    return Err(error);
                }
                // The server refuses to take back twice. Then only the first answer was lost.
                Err(_) => {}
            }
        }
    }

    /// Resumes a broken connection, if there is a way.
    pub(super) fn mend(&self, line: &mut ControlLine, until: Instant) -> Result<(), ConnectError> {
        let Some(reason) = line.death.reason() else {
            return Ok(());
        };
        if !self.can_resume(line) {
            return Err(self.ended(&reason));
        }
        let begun = Instant::now();
        match begin(
            &self.endpoint,
            &self.rdma,
            &self.client,
            Some((line.session, line.secret)),
            until,
        ) {
            Ok(resumed) => {
                *self.renewed.lock() = begun;
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
            // The server keeps no session that holds nothing, so a new session loses nothing.
            Err(ConnectError::Refused { .. }) if line.held == 0 => {
                *line = begin(&self.endpoint, &self.rdma, &self.client, None, until)?;
                *self.renewed.lock() = begun;
                self.wake_keeper();
                Ok(())
            }
            Err(ConnectError::Refused { reason, .. })
                if reason == Refusal::NoSession.to_string() =>
            {
                line.over = true;
                self.lose();
                Err(self.ended(&reason))
            }
            Err(error) if is_refused(&error) => Err(ConnectError::Unreachable {
                endpoint: self.name.clone(),
                source: std::io::Error::new(std::io::ErrorKind::ConnectionRefused, NOBODY),
            }),
            Err(error) => {
                line.over |= matches!(error, ConnectError::Refused { .. });
                Err(error)
            }
        }
    }

    /// Announces the end of this process, over a network: over shared memory the server sees it.
    /// Does nothing the second time, and where the connection is broken, or busy until `until`.
    pub(super) fn leave(&self, until: Instant) {
        if self.local.is_none()
            && !self.leaving.swap(true, Ordering::Relaxed)
            && let Some(mut line) = self.line.try_lock_until(until)
            && line.death.reason().is_none()
        {
            let _ = self.exchange(&mut line, &Request::Leaving, until);
        }
    }

    /// Returns the user's key. The first call reads the file, which may take long.
    pub(super) fn key(&self) -> Result<&Key, RequestError> {
        if let Some(key) = self.key.get() {
            return Ok(key);
        }
        let file = self.key_file.clone().map_or_else(Key::default_file, Ok);
        let key = file
            .and_then(|file| Key::load_or_make(&file))
            .map_err(|error| RequestError::Key(error.to_string()))?;
        Ok(self.key.get_or_init(|| key))
    }

    /// Shows our key, once per session: names belong to keys.
    pub(super) fn identify(
        &self,
        line: &mut ControlLine,
        until: Instant,
    ) -> Result<(), RequestError> {
        if line.identified {
            return Ok(());
        }
        let key = self.key()?;
        let Response::Challenge(challenge) = self.exchange(line, &Request::Challenge, until)?
        else {
            self.give_up(line, "the server answered something else than a challenge");
            return Err(RequestError::Disconnected(
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

    /// Sends a request and waits for its answer. Keeps the leases of the answer.
    pub(super) fn exchange(
        &self,
        line: &mut ControlLine,
        request: &Request,
        until: Instant,
    ) -> Result<Response, RequestError> {
        let bytes = match control::encode(request) {
            Ok(bytes) => bytes,
            // Nothing was sent, so nothing is broken.
            Err(error) => return Err(RequestError::Refused(Refusal::Invalid(error.to_string()))),
        };
        self.settle(line, until)?;
        let has_ended = |peer: &PeerProcess| peer.ends(Instant::now());
        let is_handed_over = self.peer.as_ref().is_some_and(has_ended);
        line.talk.say(bytes, *request == Request::Renew);
        match self.hear(line, until) {
            Ok((answer, fds)) => {
                // The end of the process that answers now cannot be seen.
                self.is_handed_over
                    .fetch_or(is_handed_over, Ordering::Relaxed);
                self.keep_leases(line, &answer, fds, until)
                    .map_err(|error| self.broken(line, &error))?;
                if let Response::Refused(refusal) = answer {
                    return Err(RequestError::Refused(refusal));
                }
                line.held = match (request, &answer) {
                    (Request::Claim { .. }, _) | (_, Response::Granted { .. }) => line.held + 1,
                    (_, Response::Opened { extents, .. }) => line.held + extents.len().max(1),
                    (_, Response::Reading { leases, .. }) => line.held + leases.len(),
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

    /// Takes the answer that is owed, if there is one: else the next request would meet it. Gives
    /// back what the answer gave, since its caller was told that the request failed.
    pub(super) fn settle(
        &self,
        line: &mut ControlLine,
        until: Instant,
    ) -> Result<(), RequestError> {
        if line.talk.owed.is_none() {
            return Ok(());
        }
        let (answer, _) = self.hear(line, until)?;
        let endpoint = self.name.clone();
        later(move || tracing::info!(endpoint, "the server answers again"));
        let taking_back = line.talk.owed.take().flatten();
        if !matches!(answer, Response::Refused(_)) {
            // Counted as if the answer had come in time, because giving back counts down.
            line.held += leases_of(&answer)
                .len()
                .max(usize::from(taking_back.is_some()));
            self.give_back(taking_back, &answer);
        }
        Ok(())
    }

    /// Queues in `untold` the requests that give back what `answer` gave.
    pub(super) fn give_back(&self, taking_back: Option<Request>, answer: &Response) {
        let mut untold = self.untold.lock();
        let leases = leases_of(answer);
        if leases.is_empty() {
            untold.extend(taking_back);
        }
        // Releasing the last extent of an opened name frees the name, too.
        let leases = leases.iter();
        untold.extend(leases.map(|lease| Request::Release { extent: lease.id }));
    }

    /// Waits for the answer to the last request. If it does not come in time and the session cannot
    /// be resumed, the server owes it.
    pub(super) fn hear(
        &self,
        line: &mut ControlLine,
        until: Instant,
    ) -> Result<(Response, Vec<OwnedFd>), RequestError> {
        match line.talk.hear(&line.stream, until) {
            Ok((answer, fds)) => {
                let asked = line.talk.renewing.take();
                if answer == Response::Refused(Refusal::NoSession) {
                    line.over = true;
                    line.death.declare(&self.lose());
                    self.close(line);
                } else if let Some(asked) = asked {
                    // The time of sending, not of reading: the answer may have waited while this
                    // program was stopped.
                    *self.renewed.lock() = asked;
                }
                Ok((answer, fds))
            }
            Err(ReceiveError::Io(error))
                if self.local.is_some() && error.kind() == std::io::ErrorKind::TimedOut =>
            {
                Err(RequestError::Disconnected(SILENT.to_owned()))
            }
            Err(error) => Err(self.broken(line, &error)),
        }
    }

    /// Keeps the memory that an answer grants.
    pub(super) fn keep_leases(
        &self,
        line: &ControlLine,
        answer: &Response,
        fds: Vec<OwnedFd>,
        until: Instant,
    ) -> Result<(), ReceiveError> {
        let leases = leases_of(answer);
        if (leases.iter()).any(|lease| lease.paged && lease.bytes > MAX_PAGED_BYTES) {
            return Err(ControlDecodeError::Frame.into());
        }
        match self.endpoint {
            Endpoint::Shm(_) => {
                let mut fds = fds.into_iter();
                for lease in leases {
                    let Some(memory) = fds.next() else {
                        break;
                    };
                    let words = if lease.paged { fds.next() } else { None };
                    self.directory.insert(*lease, memory, words)?;
                }
            }
            Endpoint::Rdma { .. } if !leases.is_empty() => {
                let keys: Vec<LeaseKeys> = line.stream.receive(MAX_FRAME_BYTES, until)?;
                if keys.len() != leases.len() {
                    return Err(ControlDecodeError::Frame.into());
                }
                for (lease, keys) in leases.iter().zip(keys) {
                    self.rdma.insert(*lease, keys);
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn broken(&self, line: &ControlLine, error: &ReceiveError) -> RequestError {
        let reason = error.to_string();
        self.give_up(line, &reason);
        RequestError::Disconnected(line.death.reason().unwrap_or(reason))
    }

    pub(super) fn give_up(&self, line: &ControlLine, reason: &str) {
        self.declare(&line.death, reason);
        self.close(line);
    }

    pub(super) fn close(&self, line: &ControlLine) {
        // Without closing, the next request would meet a missed answer.
        line.stream.close();
        self.wake_keeper();
    }

    /// Declares that a connection has ended, and what that means for the memory behind it.
    pub(super) fn declare(&self, death: &Death, reason: &str) {
        if death.reason().is_some() {
            return;
        }
        let ends = |peer: &PeerProcess| peer.ends(Instant::now() + PARTING);
        if self.local.is_none() {
            return death.declare(reason);
        }
        // A server that lends more than its memory loses the bytes that were elsewhere.
        let peer = self.peer.as_ref();
        let peer = peer.filter(|_| !self.is_handed_over.load(Ordering::Relaxed));
        if !self.paged && peer.is_some_and(ends) {
            // Looked at last: this program may have been stopped until just now.
            if self.renewed.lock().elapsed() <= self.lease {
                return death.declare_but_for_memory(ENDED);
            }
            let _ = self.lost.set(OVERDUE.to_owned());
        } else if self.overdue().is_none() {
            let _ = self.lost.set(format!(
                "{reason}, and with it went this program's memory there"
            ));
        }
        death.declare(&self.lose());
    }

    /// Returns the error of a session that cannot be resumed.
    pub(super) fn ended(&self, reason: &str) -> ConnectError {
        ConnectError::Ended {
            endpoint: self.name.clone(),
            reason: self.loss(false).unwrap_or_else(|| reason.to_owned()),
        }
    }

    pub(super) fn wake_keeper(&self) {
        // Fails only when the counter is full, and then the keeper is awake.
        let _ = self.wake.write(1);
    }
}
