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
    time::Duration,
};

use nix::sys::{
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, setsockopt,
        socket, sockopt,
    },
    time::{TimeVal, TimeValLike},
};
use tracing::warn;

use super::{error::HandoverError, successor::Carried};

/// Name of the state among the manager's descriptors.
pub(super) const STATE: &str = "farpage-state";
/// Beginning of the names of the others, which their places follow.
pub(super) const PLACE: &str = "farpage-";

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

    /// Tells the manager to forget descriptors.
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
    pub(super) manager: ServiceManager,
    pub(super) names: Vec<String>,
}

impl Kept {
    /// Tells the manager to forget the descriptors.
    pub(crate) fn forget(self) {
        self.manager.forget(self.names);
    }
}
