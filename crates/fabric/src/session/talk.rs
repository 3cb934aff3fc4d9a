//! [`ControlLine`]: a control connection, and the one request that is under way on it.
//!
//! The rule it keeps: an answer meets its request, or the connection is closed.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{Persistence, Request, Response, Secret, SessionId, control::MAX_FRAME_BYTES};
use nix::poll::PollFlags;

use super::requests::{fds_of, leases_of};
use crate::{
    attachment::Death,
    nonblocking::retry,
    stream::{PeerStream, ReceiveError},
};

/// A control connection. Locked during a call, so that answers meet their requests.
#[derive(Debug)]
pub(super) struct ControlLine {
    pub(super) stream: Arc<PeerStream>,
    pub(super) death: Arc<Death>,
    pub(super) session: SessionId,
    pub(super) secret: Secret,
    pub(super) lease: Duration,
    /// True if the server knows our key.
    pub(super) identified: bool,
    /// Leases and claims that the server has granted and not taken back.
    pub(super) held: usize,
    /// True if the server has forgotten the session: resuming is pointless.
    pub(super) over: bool,
    /// True if the server lends more than its memory.
    pub(super) paged: bool,
    /// Time at which published names are on the server's disk.
    pub(super) persistence: Persistence,
    pub(super) talk: Talk,
}

/// State of a request on a control connection, and of its answer. Each step goes on where the one
/// before it ran out of time.
#[derive(Debug, Default)]
pub(super) struct Talk {
    request: Vec<u8>,
    sent: usize,
    /// Bytes of the answer's frame that have come.
    frame: Vec<u8>,
    /// Start of the request, if it renews the lease.
    pub(super) renewing: Option<Instant>,
    answer: Option<Response>,
    fds: Vec<OwnedFd>,
    /// Present while the server owes an answer that no call waits for. The inner request takes back
    /// the gifts of that answer, unless they are memory.
    pub(super) owed: Option<Option<Request>>,
}

impl Talk {
    pub(super) fn say(&mut self, request: Vec<u8>, renews: bool) {
        (self.request, self.sent) = (request, 0);
        self.renewing = renews.then(Instant::now);
    }

    /// Sends the rest of the request. Waits for the answer and the descriptors that follow it.
    pub(super) fn hear(
        &mut self,
        stream: &PeerStream,
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
        if let (PeerStream::Unix(_), Some(answer)) = (stream, &self.answer) {
            let fds = leases_of(answer).iter().map(fds_of).sum();
            stream.receive_fds(&mut self.fds, fds, until)?;
        }
        let answer = self.answer.take().expect("received just now");
        Ok((answer, std::mem::take(&mut self.fds)))
    }
}
