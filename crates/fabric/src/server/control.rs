//! The control connection, server side: one session's requests, answered in their order.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{
    Challenge, PublicKey, Refusal, Request, Response, Secret, SessionId, Signature,
    control::{
        self as wire, Lease, LeaseKeys, MAX_CLIENT_BYTES, MAX_FIRST_FRAME_BYTES, MAX_FRAME_BYTES,
        MAX_MANIFEST_BYTES,
    },
    register::{Ballot, MAX_HOLDERS},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};

use super::{
    close::CloseReason,
    connection::{Connection, Ending},
    gate::Phase,
    kept::Asked,
    lines::LineHold,
    places::Aim,
    service::Service,
};
use crate::{
    host::{Admission, Asker, Host, Proposal, Transport},
    key,
    log::later,
    memory::ExtentMemory,
    nonblocking::timeout_until,
    stream::{PeerStream, ReceiveError},
};

/// Upper bound of the time that a client takes to receive an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Upper bound of the wait of each piece of a long request for room: less than most clients wait
/// for the answer.
const ROOM: Duration = Duration::from_secs(5);

/// Upper bound of the time from one request to the next of a client without a session.
const VISIT: Duration = Duration::from_secs(2);

/// Last event of a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Goodbye,
    Closed,
    /// The server's next process answers from now on.
    HandOver,
}

const NEEDS_A_SESSION: &str = "a request that needs a session, or a key, without one";

impl Connection {
    pub(super) fn control(
        &self,
        client: &str,
        resume: Option<(SessionId, Secret)>,
        until: Instant,
    ) -> Result<Ending, CloseReason> {
        if client.len() > MAX_CLIENT_BYTES {
            return Err(CloseReason::Violation(
                "the client's name for itself is too long".to_owned(),
            ));
        }
        let admission = match self.admit(client, resume) {
            Ok(admission) => admission,
            Err(refusal) => return self.turn_away(refusal, until).map(|()| Ending::Close),
        };
        let session = admission.session;
        let lease_ms = admission.lease.as_millis() as u64;
        let begun = Response::Begun {
            session,
            secret: admission.secret,
            lease_ms,
            paged: admission.paged,
            persistence: admission.persistence,
        };
        let asked = Asked::default();
        self.attend_session(session, admission.lease, asked, until, || {
            Ok(self.stream.send(&begun, until)?)
        })
    }

    /// Answers the requests of `session`, after `greet`.
    pub(super) fn attend_session(
        &self,
        session: SessionId,
        lease: Duration,
        mut asked: Asked,
        until: Instant,
        greet: impl FnOnce() -> Result<(), CloseReason>,
    ) -> Result<Ending, CloseReason> {
        self.stage.is_control();
        // A resumed session's older connection executes nothing once its client is answered here.
        let ended = self.take((session, None), until).and_then(|held| {
            greet()?;
            let ended = self.requests(session, lease, &held, &mut asked);
            asked.is_leaving &= !held.is_replaced();
            ended
        });
        match ended {
            Ok(Last::Goodbye) => {}
            Ok(Last::HandOver) => {
                let peer = &self.peer;
                let (service, session) = (&self.service, (session, lease));
                self.stage.set_kept();
                service.keep(&self.stream, self.transport, peer, session, asked);
                return Ok(Ending::HandOver);
            }
            // A server that ends has not lost its clients: over shared memory they keep what they
            // map.
            _ if self.service.shutdown.has_begun() => {}
            _ if asked.is_leaving => self.service.host.close(session),
            _ => self.service.host.lost(session),
        }
        ended.map(|_| Ending::Close)
    }

    /// Waits for a request. `true` if the server hands over instead.
    fn is_handed_over(&self, until: Instant) -> bool {
        // A control connection over RDMA cannot change hands.
        if self.transport == Transport::Rdma {
            return false;
        }
        let Service { gate, shutdown, .. } = &*self.service;
        while gate.pass() == Phase::Open && !shutdown.has_begun() {
            let (begun, stops) = (shutdown.0.begun.as_fd(), shutdown.0.stops.as_fd());
            let mut fds =
                [self.stream.as_fd(), begun, stops].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut fds, timeout_until(until)) {
                Err(Errno::EINTR) => {}
                // The read that follows says what is wrong.
                _ if fds[1..].iter().all(|fd| fd.any() != Some(true)) => return false,
                _ => {}
            }
        }
        self.service.is_handing_over()
    }

    /// Gives the connection its place and its session.
    fn admit(
        &self,
        client: &str,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal> {
        let host = &self.service.host;
        let aim = match &resume {
            Some((session, secret)) => {
                // Checked first: this connection takes the place of the session's older one.
                host.attach(*session, secret)?;
                Aim::Resume(*session)
            }
            None => Aim::Begin,
        };
        self.place.settle(aim)?;
        let admission = host.admit(client, self.transport, &self.peer, resume)?;
        self.place.belongs_to(admission.session);
        Ok(admission)
    }

    /// Answers requests until the client says goodbye or closes the connection without it, or the
    /// server hands over. Keeps in `asked` what the client has announced.
    fn requests(
        &self,
        session: SessionId,
        lease: Duration,
        held: &LineHold<'_>,
        asked: &mut Asked,
    ) -> Result<Last, CloseReason> {
        let _visit = self.service.gate.enter();
        loop {
            // A client that lives renews well within its lease: silence is a peer that vanished
            // without a word.
            let silent_at = Instant::now() + lease;
            if self.is_handed_over(silent_at) {
                // The newer connection of the session is the one to keep.
                return match held.is_replaced() {
                    true => Err(CloseReason::replaced()),
                    false => Ok(Last::HandOver),
                };
            }
            let mut room = self.service.frames.room(self.peer.origin);
            let received = self
                .stream
                .receive_charged(MAX_FRAME_BYTES, silent_at, &mut |bytes| {
                    // A connection that replaces this one waits for its end.
                    room.grow(bytes, Instant::now() + ROOM, &|| held.is_replaced())
                });
            let request: Request = match received {
                Err(ReceiveError::Io(error))
                    if error.kind() == std::io::ErrorKind::UnexpectedEof =>
                {
                    return Ok(Last::Closed);
                }
                Err(ReceiveError::Refused(refusal)) => {
                    let until = Instant::now() + ANSWER;
                    self.stream.send(&Response::Refused(refusal), until)?;
                    continue;
                }
                other => other?,
            };
            if held.is_replaced() {
                return Err(CloseReason::replaced());
            }
            let goodbye = request == Request::Goodbye;
            asked.is_leaving |= request == Request::Leaving;
            let (mut response, memories) = match request {
                Request::Challenge => (challenge(&mut asked.challenge)?, Vec::new()),
                Request::Identify { key, signature } => {
                    let shown = prove(&mut asked.challenge, key, signature)
                        .and_then(|()| self.service.host.identify(session, key));
                    (done_or_refused(shown), Vec::new())
                }
                Request::Stat => (Response::Stat(Box::new(self.service.stat())), Vec::new()),
                other => {
                    answer(&*self.service.host, session, other).map_err(CloseReason::Violation)?
                }
            };
            // The host has charged for all that it keeps of the request.
            drop(room);
            let keys = match self.register(session, &memories) {
                Ok(keys) => keys,
                Err(reason) => {
                    let (peer, why) = (self.peer.name.clone(), reason.clone());
                    later(move || tracing::warn!(peer, reason = why, "memory was not lent"));
                    for memory in &memories {
                        // Refused only when the session has ended, and the lease with it.
                        let _ = self.service.host.release(session, memory.id());
                    }
                    response = Response::Refused(Refusal::Invalid(reason));
                    None
                }
            };
            let until = Instant::now() + ANSWER;
            self.stream.send(&response, until)?;
            if let Some(keys) = keys {
                self.stream.send(&keys, until)?;
            }
            if self.transport == Transport::Shm && !memories.is_empty() {
                // The memory of each lease goes to the client that owns the lease.
                let lent = memories.iter().map(|memory| memory.lend_all());
                let lent: Vec<Vec<OwnedFd>> = lent.collect::<Result<_, _>>()?;
                let fds: Vec<_> = lent.iter().flatten().map(AsRawFd::as_raw_fd).collect();
                self.stream.send_fds(&fds, until)?;
            }
            if goodbye {
                return Ok(Last::Goodbye);
            }
            if response == Response::Refused(Refusal::NoSession) {
                return Err(CloseReason::Refused(Refusal::NoSession));
            }
        }
    }
}

impl Connection {
    /// Answers a client that begins no session: figures, and names once it has shown its key.
    pub(super) fn visit(&self, first: Request) -> Result<(), CloseReason> {
        let (mut request, mut asked, mut asker) = (first, None, None);
        loop {
            let response = match request {
                Request::Stat => Response::Stat(Box::new(self.service.stat())),
                Request::Challenge => challenge(&mut asked)?,
                Request::Identify { key, signature } => {
                    let shown = prove(&mut asked, key, signature);
                    asker = shown.is_ok().then_some(Asker::Key(key));
                    done_or_refused(shown)
                }
                other => match asker {
                    Some(asker) => answer_about_names(&*self.service.host, asker, other)
                        .map_err(|_| CloseReason::Violation(NEEDS_A_SESSION.to_owned()))?,
                    None => return Err(CloseReason::Violation(NEEDS_A_SESSION.to_owned())),
                },
            };
            self.stream.send(&response, Instant::now() + ANSWER)?;
            request = match self
                .stream
                .receive(MAX_FIRST_FRAME_BYTES, Instant::now() + VISIT)
            {
                Err(ReceiveError::Io(error))
                    if error.kind() == std::io::ErrorKind::UnexpectedEof =>
                {
                    return Ok(());
                }
                other => other?,
            };
        }
    }

    /// Registers `memories`, which were just leased, with the adapter, where there is one.
    fn register(
        &self,
        session: SessionId,
        memories: &[Arc<ExtentMemory>],
    ) -> Result<Option<Vec<LeaseKeys>>, String> {
        match &*self.stream {
            PeerStream::Rdma(stream) if !memories.is_empty() => {
                stream.register(session, memories).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Puts `request` to the host. Returns the answer and the memory that it leases, or the reason why
/// no client may send such a request here.
pub(crate) fn answer(
    host: &dyn Host,
    session: SessionId,
    request: Request,
) -> Result<(Response, Vec<Arc<ExtentMemory>>), String> {
    let done = |()| (Response::Done, Vec::new());
    let result = match request {
        Request::Begin { .. }
        | Request::Attach { .. }
        | Request::Challenge
        | Request::Identify { .. } => {
            return Err("a session was begun within a session".to_owned());
        }
        Request::Renew => host.renew(session).map(done),
        // Noted by the connection, whose end is the session's.
        Request::Leaving => Ok(done(())),
        Request::Contents {
            plain_bytes,
            stored_bytes,
        } => host
            .report_contents(session, plain_bytes, stored_bytes)
            .map(done),
        Request::Goodbye => {
            host.close(session);
            Ok(done(()))
        }
        Request::Grant {
            bytes,
            atomics,
            serial,
        } => host.grant(session, bytes, atomics, serial).map(|memory| {
            let lease = lease_of(&memory);
            (Response::Granted { extent: lease }, vec![memory])
        }),
        Request::Release { extent } => host.release(session, extent).map(done),
        Request::Publish {
            name,
            manifest,
            extents,
            ballot,
            keeps,
        } => check_name(&name)
            .and_then(|()| check_manifest(&manifest))
            .and_then(|()| check_ballot(ballot.as_deref()))
            .and_then(|()| {
                let extents = &extents;
                let proposal = Proposal {
                    manifest,
                    extents,
                    ballot: ballot.map(|ballot| *ballot),
                    keeps,
                };
                host.bind(session, &name, proposal)
            })
            .map(|bound| {
                let response = Response::Bound {
                    versions: bound.versions,
                    keeps_more: bound.keeps_more,
                };
                (response, Vec::new())
            }),
        Request::Promise { name, epoch } => check_name(&name)
            .and_then(|()| host.promise(session, &name, epoch))
            .map(done),
        Request::Persist { name, ranges, wait } => check_name(&name)
            .and_then(|()| host.persist(session, &name, &ranges, wait))
            .map(|is_taken| match is_taken {
                true => done(()),
                false => (Response::Later, Vec::new()),
            }),
        Request::Open { name, serial } => check_name(&name)
            .and_then(|()| host.open(session, &name, serial))
            .map(|opened| {
                let extents = opened.extents.iter().map(lease_of).collect();
                (
                    Response::Opened {
                        manifest: Arc::unwrap_or_clone(opened.manifest),
                        extents,
                        versions: opened.versions,
                        vote: opened.vote,
                    },
                    opened.extents,
                )
            }),
        Request::Read { name, serial } => check_name(&name)
            .and_then(|()| host.read(session, &name, serial))
            .map(|reading| {
                let (extents, views): (_, Vec<_>) = reading.extents.into_iter().unzip();
                let read = Response::Reading {
                    manifest: Arc::unwrap_or_clone(reading.manifest),
                    extents,
                    leases: views.iter().map(lease_of).collect(),
                    vote: reading.vote,
                };
                (read, views)
            }),
        Request::Readers { name } => host
            .readers(session, &name)
            .map(|versions| (Response::Versions(versions), Vec::new())),
        Request::Claim { name, replace } => check_name(&name)
            .and_then(|()| host.claim(session, &name, replace))
            .map(|claimed| {
                let response = Response::Claimed {
                    vote: claimed.vote,
                    is_bound: claimed.is_bound,
                };
                (response, Vec::new())
            }),
        Request::Disclaim { name } => host.disclaim(session, &name).map(done),
        request @ (Request::Remove { .. } | Request::Names { .. }) => {
            let response = answer_about_names(host, Asker::Session(session), request);
            Ok((response.expect("matched just now"), Vec::new()))
        }
        Request::Stat => Ok((Response::Stat(Box::new(host.stat())), Vec::new())),
    };
    Ok(result.unwrap_or_else(|refusal| (Response::Refused(refusal), Vec::new())))
}

/// Lists or removes names; gives the request back if it asks for something else.
fn answer_about_names(
    host: &dyn Host,
    asker: Asker,
    request: Request,
) -> Result<Response, Request> {
    Ok(match request {
        Request::Remove { name, owner } => {
            done_or_refused(check_name(&name).and_then(|()| host.remove(asker, &name, owner)))
        }
        Request::Names { after } => host
            .names(asker, after)
            .map_or_else(Response::Refused, Response::Names),
        other => return Err(other),
    })
}

/// Makes a new challenge to sign, which `asked` keeps for one proof.
fn challenge(asked: &mut Option<Challenge>) -> Result<Response, CloseReason> {
    let challenge = key::challenge()?;
    *asked = Some(challenge);
    Ok(Response::Challenge(challenge))
}

/// Checks that the client holds the private half of `key`.
fn prove(
    asked: &mut Option<Challenge>,
    key: PublicKey,
    signature: Signature,
) -> Result<(), Refusal> {
    match asked.take() {
        Some(challenge) if key::is_signed(&key, &challenge, &signature) => Ok(()),
        Some(_) => Err(Refusal::Invalid(
            "the signature was not made with that key for this challenge".to_owned(),
        )),
        None => Err(Refusal::Invalid(
            "a key was shown without a challenge".to_owned(),
        )),
    }
}

fn done_or_refused(result: Result<(), Refusal>) -> Response {
    result.map_or_else(Response::Refused, |()| Response::Done)
}

fn lease_of(memory: &Arc<ExtentMemory>) -> Lease {
    Lease {
        id: memory.id(),
        bytes: memory.bytes(),
        atomics: memory.has_atomics(),
        paged: memory.is_paged(),
        read_only: memory.is_read_only(),
    }
}

fn check_name(name: &str) -> Result<(), Refusal> {
    wire::check_name(name).map_err(|error| Refusal::Invalid(error.to_string()))
}

/// Checks that a ballot is short: the host keeps it.
fn check_ballot(ballot: Option<&Ballot>) -> Result<(), Refusal> {
    match ballot {
        Some(ballot) if ballot.holders.len() > MAX_HOLDERS => Err(Refusal::Invalid(format!(
            "a name has at most {MAX_HOLDERS} holders, not {}",
            ballot.holders.len()
        ))),
        _ => Ok(()),
    }
}

fn check_manifest(manifest: &[u8]) -> Result<(), Refusal> {
    match manifest.len() {
        0..=MAX_MANIFEST_BYTES => Ok(()),
        bytes => Err(Refusal::Invalid(format!(
            "a manifest has at most {MAX_MANIFEST_BYTES} bytes, not {bytes}"
        ))),
    }
}
