//! A simulated server and its faults, inside this process: seeded, in virtual steps, no wall clock.
//!
//! The rule it keeps: all events depend on the seed and on the order of calls alone. A step is one
//! [`poll`](Channel::poll) of a channel. Injected: delay, reordering, a link rate, lost operations
//! (which may have taken place or not, and WRITEs among them may yet, until their line has a new
//! channel), READs that bring a wrong byte, a cut that heals, the server's death.

mod channel;
mod host;
mod server;

use std::sync::{Arc, atomic::Ordering};

use farpage_wire::{Request, Response, SessionId};

use self::channel::SimChannel;
pub use self::{
    host::SimHost,
    server::{SimConfig, SimServer},
};
use crate::{
    Buf, Channel, ConnectError,
    attachment::KeepAlive,
    errors::RequestError,
    host::{Peer, Transport},
    server::answer,
};

/// One client of a simulated server.
#[derive(Debug)]
pub(crate) struct SimSession {
    server: Arc<SimServer>,
    id: SessionId,
}

impl SimSession {
    /// Begins a session at a server of its own.
    pub(crate) fn alone(seed: u64, client: &str) -> Self {
        Self::begin(SimServer::new(SimConfig::new(seed)), client)
    }

    pub(crate) fn begin(server: Arc<SimServer>, client: &str) -> Self {
        let admission = server
            .host
            .admit(client, Transport::Shm, &Peer::unknown(), None)
            .expect("a simulated server admits everybody");
        Self {
            server,
            id: admission.session,
        }
    }

    pub(crate) fn call(&self, request: Request) -> Result<Response, RequestError> {
        if let Some(reason) = self.server.silence() {
            return Err(RequestError::NotAsked(reason));
        }
        let is_lost = matches!(request, Request::Publish { .. } | Request::Prepare { .. })
            && self.server.lose_answer.swap(false, Ordering::Relaxed);
        match answer(&*self.server.host, self.id, request) {
            Ok(_) if is_lost => Err(RequestError::Disconnected("the answer was lost".to_owned())),
            Ok((Response::Refused(refusal), _)) => Err(RequestError::Refused(refusal)),
            Ok((response, _)) => Ok(response),
            Err(violation) => Err(RequestError::Disconnected(violation)),
        }
    }

    pub(crate) fn channel<B: Buf>(
        &self,
        session: KeepAlive,
        line: u64,
    ) -> Result<Box<dyn Channel<B>>, ConnectError> {
        self.server.alive()?;
        let channel = SimChannel::new(&self.server, self.id, line, session);
        Ok(Box::new(channel))
    }
}

impl Drop for SimSession {
    fn drop(&mut self) {
        self.server.host.close(self.id);
    }
}
