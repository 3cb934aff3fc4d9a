//! [`Handover`]: the state and the descriptors of an earlier process.
//!
//! The rule it keeps: each descriptor is taken once. Those that nobody takes are closed.

use std::{
    fs::File,
    io::Read,
    os::fd::{OwnedFd, RawFd},
    time::Duration,
};

use farpage_fabric::{
    host::Peer,
    server::{Asked, BindError, KeptConnection, Listener, take_inherited},
};
use farpage_wire::Endpoint;

use super::{HandoverError, format::HandedServer, store::Kept};

/// State and descriptors of an earlier process, for [`Server::take_over`](crate::Server::take_over).
pub struct Handover {
    pub(crate) server: HandedServer,
    pub(crate) descriptors: Descriptors,
    /// Descriptors that a service manager has until this process serves.
    pub(super) kept: Option<Kept>,
}

/// Descriptors of a hand-over, by their places.
pub(crate) struct Descriptors(Vec<Option<OwnedFd>>);

impl From<Vec<Option<OwnedFd>>> for Descriptors {
    fn from(descriptors: Vec<Option<OwnedFd>>) -> Self {
        Self(descriptors)
    }
}

impl Descriptors {
    /// Takes the descriptor at `place`.
    ///
    /// # Errors
    /// There is none, or it was taken.
    pub(crate) fn take(&mut self, place: u32) -> Result<OwnedFd, HandoverError> {
        let descriptor = self.0.get_mut(place as usize).and_then(Option::take);
        descriptor.ok_or_else(|| {
            HandoverError::State(format!("descriptor {place} of its state is missing"))
        })
    }
}

impl Handover {
    /// Takes over the state in the inherited descriptor `number`, and the descriptors that the
    /// state refers to.
    ///
    /// # Errors
    /// [`HandoverError::State`]: the state is damaged, of another version, or not there.
    pub fn inherit(number: RawFd) -> Result<Self, HandoverError> {
        let failed = |error| HandoverError::State(format!("descriptor {number}: {error}"));
        let state = take_inherited(number).map_err(failed)?;
        let server = read(state)?;
        let descriptors = server.descriptors.iter().map(|number| {
            take_inherited(*number)
                .map(Some)
                .map_err(|error| HandoverError::State(format!("descriptor {number}: {error}")))
        });
        let descriptors = descriptors.collect::<Result<_, _>>()?;
        Ok(Self {
            server,
            descriptors: Descriptors(descriptors),
            kept: None,
        })
    }

    /// Takes the descriptors that the service manager is to forget.
    pub(crate) fn take_kept(&mut self) -> Option<Kept> {
        self.kept.take()
    }

    /// Takes the listener of `endpoint`, which the settings name, if there is one.
    pub(crate) fn listener(&mut self, endpoint: &Endpoint) -> Result<Option<Listener>, BindError> {
        let listeners = &mut self.server.listeners;
        let Some(place) = listeners.iter().position(|it| it.asked == *endpoint) else {
            return Ok(None);
        };
        let listener = listeners.swap_remove(place);
        match self.descriptors.take(listener.socket) {
            Ok(socket) => Listener::inherited(&listener.found, socket).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Takes the control connections.
    pub(crate) fn connections(&mut self) -> Result<Vec<KeptConnection>, HandoverError> {
        let connections = std::mem::take(&mut self.server.connections);
        let kept = connections.into_iter().map(|it| {
            Ok(KeptConnection {
                socket: self.descriptors.take(it.socket)?,
                transport: it.transport,
                peer: Peer {
                    name: it.peer,
                    origin: it.origin,
                },
                session: it.session,
                lease: Duration::from_millis(it.lease_ms),
                asked: Asked {
                    challenge: it.challenge,
                    is_leaving: it.is_leaving,
                },
            })
        });
        kept.collect()
    }
}

/// Reads a state.
pub(super) fn read(state: OwnedFd) -> Result<HandedServer, HandoverError> {
    // The file's position is at its end, and shared with the process that wrote the state.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&state));
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(|error| HandoverError::State(format!("cannot read its state: {error}")))?;
    HandedServer::decode(&bytes).map_err(HandoverError::State)
}
