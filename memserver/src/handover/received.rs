//! [`Handover`]: the state and the descriptors of an earlier process.
//!
//! The rule it keeps: each descriptor is taken once. Those that nobody takes are closed.

use std::{
    env,
    fs::File,
    io::Read,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    process,
    time::Duration,
};

use farpage_fabric::{
    host::Peer,
    server::{Asked, BindError, KeptConnection, Listener, take_inherited},
};
use farpage_wire::Endpoint;
use tracing::warn;

use super::{
    error::HandoverError,
    format::HandedServer,
    store::{Kept, MARK, STATE, ServiceManager, place_of},
};

/// First descriptor that a service manager passes (sd_listen_fds(3)).
const FIRST: RawFd = 3;

/// State and descriptors of an earlier process, for
/// [`Server::take_over`](crate::Server::take_over).
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

    /// Returns the capacity of the earlier process.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.server.capacity_bytes
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
            Ok(socket) => Listener::inherited(&listener.found, socket, listener.inode),
            Err(_) => Ok(None),
        }
    }

    /// Takes the control connections.
    pub(crate) fn connections(&mut self) -> Result<Vec<KeptConnection>, HandoverError> {
        let connections = std::mem::take(&mut self.server.connections);
        let kept = connections.into_iter().map(|it| {
            let peer = Peer {
                name: it.peer,
                origin: it.origin,
            };
            let asked = Asked {
                challenge: it.challenge,
                is_leaving: it.is_leaving,
            };
            let session = (it.session, Duration::from_millis(it.lease_ms));
            let socket = self.descriptors.take(it.socket)?;
            KeptConnection::inherited(socket, it.transport, peer, session, asked)
                .map_err(|error| HandoverError::State(format!("a connection: {error}")))
        });
        kept.collect()
    }
}

/// Reads a state.
fn read(state: OwnedFd) -> Result<HandedServer, HandoverError> {
    // The file's position is at its end, and shared with the process that wrote the state.
    let path = format!("/proc/self/fd/{}", state.as_raw_fd());
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(|error| HandoverError::State(format!("cannot read its state: {error}")))?;
    HandedServer::decode(&bytes).map_err(HandoverError::State)
}

impl Handover {
    /// Takes over what the service manager has kept for this process. `None` if the manager kept
    /// nothing, or nothing that can be used: the manager then forgets the descriptors, and their
    /// memory is free.
    pub fn kept() -> Option<Self> {
        let (names, descriptors) = passed()?;
        let manager = ServiceManager::of_this_process();
        let manager = manager.unwrap_or_else(|error| {
            warn!(%error, "cannot speak to the service manager");
            None
        })?;
        let mut kept = Kept {
            manager,
            names: names.clone(),
            mark: None,
        };
        match assemble(&names, descriptors) {
            Ok((mut handed, mark)) => {
                kept.mark = Some(mark);
                handed.kept = Some(kept);
                Some(handed)
            }
            Err(error) => {
                warn!(
                    descriptors = names.len(),
                    "{error}: the memory that it left is given back, and its clients have lost it"
                );
                // The next start refuses what is not forgotten.
                let _ = kept.forget();
                None
            }
        }
    }
}

/// Takes the descriptors that the manager has passed to this process and that are a server's.
fn passed() -> Option<(Vec<String>, Vec<Option<OwnedFd>>)> {
    let number = |name: &str| env::var(name).ok()?.parse::<i64>().ok();
    if number("LISTEN_PID")? != i64::from(process::id()) {
        return None;
    }
    let count = RawFd::try_from(number("LISTEN_FDS")?).ok()?;
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let all = names.split(':').zip(FIRST..FIRST.checked_add(count)?);
    let (names, descriptors): (Vec<_>, Vec<_>) = all
        .filter(|(name, _)| [STATE, MARK].contains(name) || place_of(name).is_some())
        .map(|(name, number)| (name.to_owned(), take_inherited(number).ok()))
        .unzip();
    (!names.is_empty()).then_some((names, descriptors))
}

/// Puts the descriptors at the places that their names say. Returns the mark, too.
fn assemble(
    names: &[String],
    descriptors: Vec<Option<OwnedFd>>,
) -> Result<(Handover, File), HandoverError> {
    let refused = |reason: &str| HandoverError::State(reason.to_owned());
    let (mut state, mut mark, mut places) = (None, None, Vec::new());
    places.resize_with(names.len(), || None);
    for (name, descriptor) in names.iter().zip(descriptors) {
        let slot = match &**name {
            STATE => Some(&mut state),
            MARK => Some(&mut mark),
            name => place_of(name).and_then(|place| places.get_mut(place)),
        };
        if let Some(slot) = slot
            && let Some(descriptor) = descriptor
            && slot.replace(descriptor).is_some()
        {
            return Err(refused("parts of two earlier processes are mixed"));
        }
    }
    let state = state.ok_or_else(|| refused("its state is missing"))?;
    let mark = File::from(mark.ok_or_else(|| refused("its mark is missing"))?);
    if !mark.metadata().is_ok_and(|mark| mark.len() == 0) {
        return Err(refused("another process has taken over already"));
    }
    let server = read(state)?;
    if places.iter().filter(|it| it.is_some()).count() < server.descriptors.len() {
        return Err(refused("descriptors are missing"));
    }
    let handed = Handover {
        server,
        descriptors: Descriptors::from(places),
        kept: None,
    };
    Ok((handed, mark))
}
