//! [`ServiceManager`]: systemd, which keeps descriptors from one process of a service to the next
//! (sd_notify(3), sd_listen_fds(3)).
//!
//! The rule it keeps: the manager has descriptors only between two processes. A process that takes
//! over has the manager forget all of them before it serves, and one that cannot use them, too. So
//! a process that is killed leaves nothing behind.

use std::{
    env,
    fs::File,
    io::{self, IoSlice, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    process,
    time::Duration,
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
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
/// Name of the file that is empty until a process has taken the others over.
pub(super) const MARK: &str = "farpage-mark";
/// Beginning of the names of the others, which their places follow. Short: the names of all
/// descriptors are one string of the next process's environment.
const PLACE: &str = "f";

/// Upper bound of all names together: the kernel passes strings of 128 KiB.
const NAMES_BYTES: usize = 120 << 10;

/// Returns the name of the descriptor at `place`.
fn name_of(place: usize) -> String {
    format!("{PLACE}{place}")
}

/// Returns the place of the descriptor called `name`, if it has one.
pub(super) fn place_of(name: &str) -> Option<usize> {
    name.strip_prefix(PLACE)?.parse().ok()
}

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
    /// Returns the service manager that the environment names, if it names one, and started this
    /// process: what another process of the service says is not for this one to say.
    ///
    /// # Errors
    /// The system's error: no descriptors left, or an address that is none.
    pub fn of_this_process() -> io::Result<Option<Self>> {
        let number = |name: &str| env::var(name).ok()?.parse::<usize>().ok();
        let main = number("SYSTEMD_EXEC_PID");
        let is_main = main == Some(process::id() as usize);
        let path = env::var_os("NOTIFY_SOCKET").filter(|_| main.is_none() || is_main);
        let Some(path) = path else {
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
        // The manager throws away what another process than the service's main one gives it.
        let room = number("FDSTORE").filter(|_| is_main).unwrap_or(0);
        Ok(Some(Self {
            socket,
            address,
            room,
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

    /// Gives the manager `carried`, a mark and `state`, in this order: without a state, nothing
    /// counts.
    pub(crate) fn store(
        &self,
        carried: &Carried<'_>,
        state: &OwnedFd,
    ) -> Result<(), HandoverError> {
        let mut names: Vec<String> = (0..carried.all().count()).map(name_of).collect();
        names.extend([MARK, STATE].map(str::to_owned));
        let count = names.len();
        if names.iter().map(|name| name.len() + 1).sum::<usize>() > NAMES_BYTES {
            return Err(HandoverError::Refused(format!(
                "the names of {count} descriptors are too long for the environment of a process"
            )));
        }
        if count > self.room {
            return Err(HandoverError::Refused(format!(
                "the service manager keeps {} descriptors, and {count} are needed: raise FileDescriptorStoreMax=",
                self.room
            )));
        }
        let failed =
            |error: io::Error| HandoverError::Refused(format!("the service manager: {error}"));
        let flags = MFdFlags::MFD_CLOEXEC;
        let mark = memfd_create(c"farpage-mark", flags).map_err(|errno| failed(errno.into()))?;
        let keep = |(name, descriptor): (&String, BorrowedFd<'_>)| {
            // The manager is not to look whether a socket was closed.
            let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
            self.say(&text, &[descriptor.as_raw_fd()])
        };
        let all = carried.all().chain([mark.as_fd(), state.as_fd()]);
        let stored = names.iter().zip(all).try_for_each(keep);
        stored.and_then(|()| self.wait()).map_err(|error| {
            self.forget(&names);
            failed(error)
        })
    }

    /// Tells the manager to forget descriptors. True if it does.
    fn forget(&self, names: &[String]) -> bool {
        let forgotten = names
            .iter()
            .try_for_each(|name| self.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]))
            .and_then(|()| self.wait());
        if let Err(error) = &forgotten {
            warn!(%error, "the service manager keeps descriptors that nobody needs: the memory behind them is free when the service is stopped");
        }
        forgotten.is_ok()
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
    pub(super) mark: Option<File>,
}

impl Kept {
    /// Notes that this process takes the descriptors over: if the manager should pass them to
    /// another one, that one refuses them.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn set_taken(&self) -> io::Result<()> {
        let mut mark = self.mark.as_ref();
        mark.as_mut()
            .map_or(Ok(()), |mark| mark.write_all(b"taken"))
    }

    /// Tells the manager to forget the descriptors. Returns them if it does not, to be tried again.
    pub(crate) fn forget(self) -> Option<Self> {
        match self.manager.forget(&self.names) {
            true => None,
            false => Some(self),
        }
    }
}
