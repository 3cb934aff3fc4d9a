//! [`Connection`]: one accepted connection, from its hello to its end.
//!
//! The rule it keeps: a peer is a stranger until it has said what the connection is for and, for a
//! session that exists, proved that it holds it. Requests are answered in [`super::control`], data
//! is moved in [`super::data`].

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{
    Refusal, Request, Response, Secret, SessionId,
    control::{HELLO_BYTES, Hello, MAX_FIRST_FRAME_BYTES, Purpose},
};
use nix::poll::{PollFd, PollFlags, poll};

use super::{
    close::CloseReason,
    kept::{Asked, Stage},
    lines::{LineHold, LineName},
    places::{Aim, ConnectionPlace},
    service::Service,
};
use crate::{
    host::{Peer, Transport},
    log::later,
    nonblocking::timeout_until,
    rdma::RdmaStream,
    stream::{PeerStream, ReceiveError},
};

/// The longest time that a stranger may take to say who it is. A client on a busy machine may not
/// run for seconds: one handshake in 16 took longer than 2 s at a load of 15 on two processors. A
/// stranger that only holds a thread holds one of a bounded number ([`super::places`]).
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Interval at which a thread that waits for a client checks that its session still lives.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// Fate of a connection that is served no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Close,
    /// The server's next process has the connection.
    HandOver,
}

/// One accepted connection and the state that its thread needs.
pub(crate) struct Connection {
    pub(crate) stream: Arc<PeerStream>,
    pub(super) stage: Arc<Stage>,
    pub(super) transport: Transport,
    pub(super) peer: Peer,
    pub(super) place: ConnectionPlace,
    pub(crate) service: Arc<Service>,
}

impl Connection {
    pub(super) fn run(&self) {
        self.end(self.converse());
    }

    /// Serves a control connection that an earlier process has served up to here.
    pub(super) fn go_on(&self, session: SessionId, lease: Duration, asked: Asked) {
        let until = Instant::now() + HANDSHAKE;
        self.end(self.attend_session(session, lease, asked, until, || Ok(())));
    }

    fn end(&self, ended: Result<Ending, CloseReason>) {
        match ended {
            Ok(Ending::HandOver) => return,
            Err(fault) if !self.service.shutdown.has_begun() => {
                let peer = self.peer.name.clone();
                later(move || tracing::warn!(peer, reason = %fault, "connection closed"));
            }
            Ok(Ending::Close) | Err(_) => {}
        }
        self.stream.close();
    }

    fn converse(&self) -> Result<Ending, CloseReason> {
        if let PeerStream::Rdma(stream) = &*self.stream
            && let Some((session, secret, line)) = stream.claim()
        {
            let until = Instant::now() + HANDSHAKE;
            let held = self.take((session, Some(line)), until)?;
            stream.accept()?;
            let ended = self.attend(stream, session, &secret);
            // Destroys the queue pair: only then is the line free.
            self.stream.close();
            drop(held);
            return ended.map(|()| Ending::Close);
        }
        let until = Instant::now() + HANDSHAKE;
        let mut bytes = [0; HELLO_BYTES];
        match self.stream.read_exact(&mut bytes, until) {
            // The client only looked whether a server is there.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Ok(Ending::Close);
            }
            other => other?,
        }
        let hello = Hello::decode(&bytes);
        // Sent even to another version, which can then tell its user.
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
        match (purpose, first) {
            (Purpose::Control, Request::Begin { client, resume }) => {
                self.control(&client, resume, until)
            }
            (Purpose::Control, first @ (Request::Stat | Request::Challenge)) => {
                self.visit(first).map(|()| Ending::Close)
            }
            // Over shared memory and RDMA for bytes that are not in the server's memory.
            (
                Purpose::Data,
                Request::Attach {
                    session,
                    secret,
                    line,
                },
            ) => {
                if let Err(refusal) = self.service.host.attach(session, &secret) {
                    return self.turn_away(refusal, until).map(|()| Ending::Close);
                }
                if let Err(refusal) = self.place.settle(Aim::Data(session, line)) {
                    return self.turn_away(refusal, until).map(|()| Ending::Close);
                }
                let held = self.take((session, Some(line)), until)?;
                self.stage.is_data();
                self.stream.send(&Response::Done, until)?;
                self.data(session, &secret, &held).map(|()| Ending::Close)
            }
            _ => Err(CloseReason::Violation(
                "the first request does not fit the hello".to_owned(),
            )),
        }
    }

    /// Takes `line` over for this connection, once the line's older connections have ended. The
    /// client is not answered before.
    pub(super) fn take(&self, line: LineName, until: Instant) -> Result<LineHold<'_>, CloseReason> {
        (self.service.lines)
            .take(line, &self.stream, until, &|| self.service.frames.wake())
            .ok_or_else(|| {
                CloseReason::Violation(
                    "its line has an older connection that does not end, or a newer one".to_owned(),
                )
            })
    }

    /// Waits for the end of a connection whose data is moved by an adapter, or of its session.
    /// Tells the host of WRITEs that notify.
    fn attend(
        &self,
        stream: &RdmaStream,
        session: SessionId,
        secret: &Secret,
    ) -> Result<(), CloseReason> {
        let host = &self.service.host;
        let mut look_at = Instant::now() + LOOK;
        loop {
            let mut fds = [PollFd::new(stream.arrivals_fd(), PollFlags::POLLIN)];
            // An interrupted poll is as good as one that found nothing.
            let _ = poll(&mut fds, timeout_until(look_at));
            if stream.has_heard()? {
                host.written(session);
            }
            if stream.has_ended() {
                return Ok(());
            }
            if Instant::now() >= look_at {
                look_at = Instant::now() + LOOK;
                host.attach(session, secret).map_err(CloseReason::Refused)?;
            }
        }
    }

    pub(super) fn turn_away(&self, refusal: Refusal, until: Instant) -> Result<(), CloseReason> {
        self.stream
            .send(&Response::Refused(refusal.clone()), until)?;
        Err(CloseReason::Refused(refusal))
    }
}
