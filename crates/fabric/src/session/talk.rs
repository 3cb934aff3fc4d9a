//! [`ControlLine`]: a control connection, and the one request that is under way on it.
//!
//! The rule it keeps: an answer meets its request, or the connection is closed.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{Request, Response, Secret, SessionId, control::MAX_FRAME_BYTES};
use nix::poll::PollFlags;

use super::requests::{fds_of, leases_of};
use crate::{
    attachment::Death,
    nonblocking::retry,
    stream::{ReceiveError, Stream},
};

/// The control connection. Held during a call, so that answers meet their requests.
#[derive(Debug)]
pub(super) struct ControlLine {
    pub(super) stream: Arc<Stream>,
    pub(super) death: Arc<Death>,
    pub(super) session: SessionId,
    pub(super) secret: Secret,
    pub(super) lease: Duration,
    /// Whether the server knows our key.
    pub(super) identified: bool,
    /// Leases and claims that the server has granted and not taken back.
    pub(super) held: usize,
    /// The server has forgotten the session: resuming is pointless.
    pub(super) over: bool,
    /// Whether the server lends more than its memory.
    pub(super) paged: bool,
    pub(super) talk: Talk,
}

/// What is under way on a control connection: a request, and then its answer. Each step goes on
/// where the one before it ran out of time.
#[derive(Debug, Default)]
pub(super) struct Talk {
    request: Vec<u8>,
    sent: usize,
    /// The bytes of the answer's frame that have come.
    frame: Vec<u8>,
    /// When the request was begun, if it renews the lease.
    pub(super) renewing: Option<Instant>,
    answer: Option<Response>,
    fds: Vec<OwnedFd>,
    /// Set while the server owes an answer that nobody waits for. The inner request takes back what
    /// that answer gives, unless it gives memory.
    pub(super) owed: Option<Option<Request>>,
}

impl Talk {
    pub(super) fn say(&mut self, request: Vec<u8>, renews: bool) {
        (self.request, self.sent) = (request, 0);
        self.renewing = renews.then(Instant::now);
    }

    /// The answer to what was said, and the descriptors that come with it.
    pub(super) fn hear(
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
            let fds = leases_of(answer).iter().map(fds_of).sum();
            stream.receive_fds(&mut self.fds, fds, until)?;
        }
        let answer = self.answer.take().expect("received just now");
        Ok((answer, std::mem::take(&mut self.fds)))
    }
}
