//! The client half of a session at a server process: the control connection and the thread that
//! keeps it.
//!
//! The rule it keeps: the thread that finds the connection broken declares its [`Death`] before
//! anything else, so that channels stop at once. A TCP session is resumed within its lease, by the
//! keeper or by the next call.
//!
//! A Unix socket is never reconnected, because closing it would end the session. A server that
//! misses a deadline owes the answer, which is taken when it comes. When the socket closes, the
//! server has ended the session, or its process has ended. If the process has ended, only calls
//! fail: the memory that it passed stays, and no other process can reach it. If this program was
//! stopped for longer than its lease, the memory is lost in both cases: the server may have ended
//! the session first and lent the memory of a named region to another client.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_signals::Mutex;
use farpage_wire::{
    Endpoint, ExtentId, Request, Response,
    control::{MAX_CLIENT_BYTES, MAX_FRAME_BYTES, Purpose},
};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{
    connect::{begin, is_refused, not_connected, open, turned_away},
    ending::{self, GOODBYE},
    requests::{gives, is_about_a_name, may_repeat},
    shared::SessionState,
};
use crate::{
    Buf, Channel, ConnectError, SessionOptions,
    attachment::{Attachment, Death, KeepAlive, Patience},
    errors::RequestError,
    log::later,
    rdma,
    regmem::{NullRegistrar, Registrar},
    shm::ShmChannel,
    stream::PeerProcess,
    tcp::TcpChannel,
};

/// Bit that is added to a line's number for the connection on which a channel over RDMA asks the
/// server for bytes that are not in its memory.
const ASKING: u64 = 1 << 63;

/// Pause between attempts, so that an immediate refusal does not make us spin.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Remote {
    pub(super) shared: Arc<SessionState>,
    keeper: Option<JoinHandle<()>>,
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
        let shared = Arc::new(SessionState {
            endpoint: endpoint.clone(),
            name: endpoint.to_string(),
            deadline: options.deadline,
            client,
            key_file: options.key_file.clone(),
            key: OnceLock::new(),
            peer: PeerProcess::of(&line.stream),
            is_handed_over: AtomicBool::new(false),
            renewed: Mutex::new(begun),
            lease: line.lease,
            lost: OnceLock::new(),
            paged: line.paged,
            persistence: line.persistence,
            line: Mutex::new(line),
            directory: Arc::default(),
            local,
            rdma,
            closing: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            untold: Mutex::default(),
            contents: Default::default(),
            drain_notice: Mutex::default(),
            wake: wake.map_err(|errno| no_resources(errno.into()))?,
        });
        ending::register(&shared);
        let keeper = {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name("farpage-session".to_owned());
            farpage_tables::spawn(thread, move || shared.keep()).map_err(no_resources)?
        };
        Ok(Self {
            shared,
            keeper: Some(keeper),
        })
    }

    /// Sets the call to make once the server says that it is about to end.
    pub(super) fn when_draining(&self, notice: Box<dyn FnOnce() + Send>) {
        self.shared.drain_notice.lock().0 = Some(notice);
        self.shared.wake_keeper();
    }

    /// Announces the end of this process.
    pub(super) fn leave(&self) {
        self.shared
            .leave(Instant::now() + self.shared.deadline.min(GOODBYE));
    }

    pub(super) fn has_outlived_server(&self) -> bool {
        let local = self.shared.local.as_ref();
        local.is_some_and(|death| death.reason().is_some() && death.loss().is_none())
    }

    /// Adds to the bytes of the pages that are kept at the server. Negative values subtract.
    pub(super) fn add_contents(&self, plain_bytes: i64, stored_bytes: i64) {
        for (total, bytes) in self.shared.contents.iter().zip([plain_bytes, stored_bytes]) {
            total.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Sends `request` and waits for its answer. Resumes the session first if its connection broke
    /// or is silent.
    pub(super) fn call(&self, request: Request) -> Result<Response, RequestError> {
        let shared = &self.shared;
        if is_about_a_name(&request) {
            // Read before the lock is taken, for which others wait: a file may be far away.
            shared.key()?;
        }
        let until = Instant::now() + shared.deadline;
        let Some(mut line) = shared.line.try_lock_until(until) else {
            let reason = "the server did not answer an earlier call in time";
            return Err(RequestError::NotAsked(reason.to_owned()));
        };
        let mut sendings = 0;
        let answer = loop {
            // If there is no other connection to try, this one has all the time.
            let soon = match shared.local {
                Some(_) => until,
                None => until.min(Instant::now() + shared.silence()),
            };
            let asked = match shared.mend(&mut line, soon) {
                // No process listens there: trying again would only take longer.
                Err(error) if is_refused(&error) => {
                    break Err(RequestError::Disconnected(error.to_string()));
                }
                Err(error) => Err(RequestError::Disconnected(error.to_string())),
                Ok(()) => match shared.ready(&mut line, &request, soon) {
                    Ok(()) => {
                        sendings += 1;
                        match shared.exchange(&mut line, &request, until) {
                            Err(error) if may_repeat(&request) => Err(error),
                            other => break other,
                        }
                    }
                    Err(error) => Err(error),
                },
            };
            match asked {
                Err(RequestError::Disconnected(_))
                    if shared.can_resume(&line) && Instant::now() < until =>
                {
                    thread::sleep(BETWEEN_TRIES);
                }
                other => break other,
            }
        };
        let answer = match answer {
            Err(RequestError::Disconnected(reason)) if sendings == 0 => {
                Err(RequestError::NotAsked(reason))
            }
            // The server may have executed the first sending although its answer was lost.
            Err(RequestError::Refused(refusal))
                if sendings > 1 && matches!(request, Request::Publish { .. }) =>
            {
                Err(RequestError::Disconnected(format!(
                    "its answer was lost, and the second time it was refused: {refusal}"
                )))
            }
            answer => answer,
        };
        // Over a Unix socket the server owes the answer. Elsewhere the request is sent again, and
        // what it gives is given back.
        let is_lost = sendings > 0 && matches!(answer, Err(RequestError::Disconnected(_)));
        if is_lost && shared.local.is_none() && gives(&request) {
            shared.untold.lock().push(request);
        }
        answer
    }

    pub(super) fn channel<B: Buf>(
        &self,
        session: &KeepAlive,
        line: u64,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        self.shared
            .persist(|until| self.try_channel(session, line, until))
    }

    fn try_channel<B: Buf>(
        &self,
        session: &KeepAlive,
        line: u64,
        until: Instant,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        let shared = &self.shared;
        if let Some(route) = self.try_route(session, line, until)? {
            return match shared.paged {
                true => {
                    let asking = self.data_channel(session, line | ASKING, until)?;
                    rdma::paged_channel(route, asking)
                }
                false => rdma::channel(route),
            };
        }
        let Some(death) = &shared.local else {
            return Ok(Box::new(self.data_channel(session, line, until)?));
        };
        if let Some(reason) = death.loss() {
            return Err(shared.ended(&reason));
        }
        // A connection to the server is needed only if some memory may be elsewhere.
        let asking = match shared.paged {
            true => Some(self.data_channel(session, line, until)?),
            false => None,
        };
        Ok(Box::new(ShmChannel::new(
            self.attachment(session, Arc::clone(death)),
            Arc::clone(&shared.directory),
            asking,
        )))
    }

    /// Opens a channel on which the server moves the bytes.
    fn data_channel<B: Buf>(
        &self,
        session: &KeepAlive,
        line: u64,
        until: Instant,
    ) -> Result<TcpChannel<B>, ConnectError> {
        let shared = &self.shared;
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
            Response::Done => Ok(TcpChannel::new(self.attachment(session, death), stream)),
            answer => Err(turned_away(&shared.name, answer)),
        }
    }

    /// Opens the route of a channel that may share a completion queue, over RDMA without paging.
    pub(super) fn route(
        &self,
        session: &KeepAlive,
        line: u64,
    ) -> Result<Option<rdma::Route>, ConnectError> {
        if self.shared.paged {
            return Ok(None);
        }
        self.shared
            .persist(|until| self.try_route(session, line, until))
    }

    fn try_route(
        &self,
        session: &KeepAlive,
        line: u64,
        until: Instant,
    ) -> Result<Option<rdma::Route>, ConnectError> {
        let shared = &self.shared;
        if !matches!(shared.endpoint, Endpoint::Rdma { .. }) {
            return Ok(None);
        }
        let (id, secret, death) = shared.claim(until)?;
        let attachment = self.attachment(session, death);
        let claim = (id, secret, line);
        let route = (shared.rdma).route(&shared.endpoint, claim, attachment, until)?;
        Ok(Some(route))
    }

    /// Makes the attachment of a channel of `session`; `death` is that of the connection that the
    /// channel depends on.
    fn attachment(&self, session: &KeepAlive, death: Arc<Death>) -> Attachment {
        let shared = &self.shared;
        Attachment {
            endpoint: shared.name.clone(),
            death,
            patience: Patience {
                deadline: shared.deadline,
                silence: shared.silence(),
            },
            _session: Arc::clone(session),
        }
    }

    /// Returns the registrar of the session's adapter, if it has one.
    pub(super) fn registrar(&self) -> Arc<dyn Registrar> {
        match self.shared.endpoint {
            Endpoint::Rdma { .. } => self.shared.rdma.registrar(),
            _ => Arc::new(NullRegistrar),
        }
    }

    /// Gives a lease back. Does not wait for a silent server, which is told later.
    pub(super) fn release(&self, id: ExtentId) -> Result<Response, RequestError> {
        let shared = &self.shared;
        shared.directory.remove(id);
        shared.rdma.remove(id);
        let until = Instant::now() + shared.silence();
        let request = Request::Release { extent: id };
        // Held until the end, also while `untold` is added to. The server may have executed the
        // release without answering, and a later open of the name leases the same extents again.
        // That open sends `untold` first, so this release must be in `untold` before it.
        let mut line = shared.line.try_lock_until(until);
        let answer = match &mut line {
            Some(line) if line.death.reason().is_none() && line.talk.owed.is_none() => {
                shared.exchange(line, &request, until)
            }
            Some(line) if line.death.reason().is_some() && !shared.can_resume(line) => {
                let reason = line.death.reason().unwrap_or_default();
                return Err(RequestError::Disconnected(reason));
            }
            _ => Err(RequestError::Disconnected(String::new())),
        };
        match answer {
            Err(RequestError::Disconnected(_)) => {
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
        // No channel is left: a channel would keep the session alive.
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

#[cfg(test)]
mod tests;
