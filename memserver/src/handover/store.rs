//! [`ServiceManager`]: systemd, which keeps descriptors from one process of a service to the next
//! (sd_notify(3), sd_listen_fds(3)).
//!
//! The rule it keeps: the manager has descriptors only between two processes. A process that takes
//! over has the manager forget all of them before it serves, and one that cannot use them, too. So
//! a process that is killed leaves nothing behind.

use std::{
    env,
    io::{self, IoSlice, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    process,
    time::Duration,
};

use farpage_fabric::server::take_inherited;
use nix::sys::{
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, setsockopt,
        socket, sockopt,
    },
    time::{TimeVal, TimeValLike},
};
use tracing::warn;

use super::{
    HandoverError,
    received::{Descriptors, Handover, read},
    successor::Carried,
};

/// Name of the state among the manager's descriptors. The others have their places behind.
const STATE: &str = "farpage-state";
const PLACE: &str = "farpage-";

/// First descriptor that the manager passes.
const FIRST: RawFd = 3;

/// The longest wait for the manager.
const PATIENCE: Duration = Duration::from_secs(5);

/// The service manager of this process.
#[derive(Debug)]
pub struct ServiceManager {
    socket: OwnedFd,
    address: UnixAddr,
    /// Number of descriptors that the manager keeps.
    room: usize,
}

impl ServiceManager {
    /// Returns the service manager that the environment names, if it names one.
    ///
    /// # Errors
    /// The system's error: no descriptors left, or an address that is none.
    pub fn of_this_process() -> io::Result<Option<Self>> {
        let Some(path) = env::var_os("NOTIFY_SOCKET") else {
            return Ok(None);
        };
        let bytes = path.as_encoded_bytes();
        let address = match bytes.strip_prefix(b"@") {
            Some(name) => UnixAddr::new_abstract(name)?,
            None => UnixAddr::new(bytes)?,
        };
        let kind = (AddressFamily::Unix, SockType::Datagram);
        let socket = socket(kind.0, kind.1, SockFlag::SOCK_CLOEXEC, None)?;
        let patience = TimeVal::seconds(PATIENCE.as_secs() as i64);
        setsockopt(&socket, sockopt::SendTimeout, &patience)?;
        let room = env::var("FDSTORE").ok().and_then(|most| most.parse().ok());
        Ok(Some(Self {
            socket,
            address,
            room: room.unwrap_or(0),
        }))
    }

    /// True if the manager keeps descriptors.
    pub fn keeps_descriptors(&self) -> bool {
        self.room > 0
    }

    /// Says that clients are served.
    ///
    /// # Errors
    /// The system's error.
    pub fn say_ready(&self) -> io::Result<()> {
        self.say("READY=1", &[])
    }

    /// Gives the manager `carried` and `state`, in this order: without a state, nothing counts.
    pub(crate) fn store(
        &self,
        carried: &Carried<'_>,
        state: &OwnedFd,
    ) -> Result<(), HandoverError> {
        let count = carried.all().count() + 1;
        if count > self.room {
            return Err(HandoverError::Refused(format!(
                "the service manager keeps {} descriptors, and {count} are needed: raise FileDescriptorStoreMax=",
                self.room
            )));
        }
        let keep = |name: &str, descriptor: BorrowedFd<'_>| {
            // The manager is not to look whether a socket was closed.
            let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
            self.say(&text, &[descriptor.as_raw_fd()])
        };
        let stored = (carried.all().enumerate())
            .try_for_each(|(place, descriptor)| keep(&format!("{PLACE}{place}"), descriptor))
            .and_then(|()| keep(STATE, state.as_fd()))
            .and_then(|()| self.wait());
        stored.map_err(|error| {
            let names = (0..count - 1).map(|place| format!("{PLACE}{place}"));
            self.forget(names.chain([STATE.to_owned()]));
            HandoverError::Refused(format!("the service manager: {error}"))
        })
    }

    /// Has the manager forget descriptors.
    pub(crate) fn forget(&self, names: impl IntoIterator<Item = String>) {
        let forgotten = names
            .into_iter()
            .try_for_each(|name| self.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]))
            .and_then(|()| self.wait());
        if let Err(error) = forgotten {
            warn!(%error, "the service manager keeps descriptors that nobody needs: the memory behind them is free when the service is stopped");
        }
    }

    /// Waits until the manager has acted on everything that was said.
    fn wait(&self) -> io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        self.say("BARRIER=1", &[theirs.as_raw_fd()])?;
        drop(theirs);
        ours.set_read_timeout(Some(PATIENCE))?;
        // The manager closes its end.
        ours.read(&mut [0]).map(drop)
    }

    fn say(&self, text: &str, descriptors: &[RawFd]) -> io::Result<()> {
        let rights = [ControlMessage::ScmRights(descriptors)];
        let rights = if descriptors.is_empty() {
            &[]
        } else {
            &rights[..]
        };
        let bytes = [IoSlice::new(text.as_bytes())];
        let (to, flags) = (Some(&self.address), MsgFlags::MSG_NOSIGNAL);
        sendmsg(self.socket.as_raw_fd(), &bytes, rights, flags, to)?;
        Ok(())
    }
}

/// Descriptors that the manager of a process kept for it.
pub(crate) struct Kept {
    manager: ServiceManager,
    names: Vec<String>,
}

impl Kept {
    /// Has the manager forget the descriptors.
    pub(crate) fn forget(self) {
        self.manager.forget(self.names);
    }
}

impl Handover {
    /// Takes over what the service manager has kept for this process. `None` if it kept nothing, or
    /// nothing that can be used: the manager then forgets that, whose memory is free.
    pub fn kept() -> Option<Self> {
        let (names, descriptors) = passed()?;
        let manager = ServiceManager::of_this_process();
        let manager = manager.unwrap_or_else(|error| {
            warn!(%error, "cannot speak to the service manager");
            None
        })?;
        let kept = Kept {
            manager,
            names: names.clone(),
        };
        match assemble(&names, descriptors) {
            Ok(mut handed) => {
                handed.kept = Some(kept);
                Some(handed)
            }
            Err(error) => {
                warn!(
                    descriptors = names.len(),
                    "{error}: the memory that it left is given back, and its clients have lost it"
                );
                kept.forget();
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
        .filter(|(name, _)| name.starts_with(PLACE))
        .map(|(name, number)| (name.to_owned(), take_inherited(number).ok()))
        .unzip();
    (!names.is_empty()).then_some((names, descriptors))
}

/// Puts the descriptors at the places that their names say.
fn assemble(
    names: &[String],
    descriptors: Vec<Option<OwnedFd>>,
) -> Result<Handover, HandoverError> {
    let (mut state, mut places) = (None, Vec::new());
    places.resize_with(names.len(), || None);
    for (name, descriptor) in names.iter().zip(descriptors) {
        if name == STATE {
            state = descriptor;
        } else if let Some(place) = name.strip_prefix(PLACE)
            && let Ok(place) = place.parse::<usize>()
            && let Some(slot) = places.get_mut(place)
        {
            *slot = descriptor;
        }
    }
    let state = state.ok_or_else(|| HandoverError::State("its state is missing".to_owned()))?;
    let server = read(state)?;
    if places.iter().filter(|it| it.is_some()).count() < server.descriptors.len() {
        return Err(HandoverError::State("descriptors are missing".to_owned()));
    }
    Ok(Handover {
        server,
        descriptors: Descriptors::from(places),
        kept: None,
    })
}
