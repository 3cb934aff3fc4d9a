//! [`Successor`]: the process that takes over by `exec`.
//!
//! The rule it keeps: the successor's program has said that it can serve the very state, with the
//! very settings, before it replaces this one. A rehearsal is a process of its own that inherits
//! the descriptors, takes everything over, and ends without serving.

use std::{
    env,
    ffi::{CString, OsString},
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::server::let_inherit;
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::execvp,
};

use super::error::HandoverError;
use crate::signals::Signals;

/// The longest time that a rehearsal may take: it reads the state, and no memory.
const REHEARSAL: Duration = Duration::from_secs(10);

/// Flag of `serve` that names the descriptor of the state.
const TAKE_OVER: &str = "--take-over";
/// Flag of `serve` that ends a take-over before it serves.
const REHEARSE: &str = "--rehearse";

/// The most bytes of a rehearsal's complaint that are logged.
const SAID_BYTES: u64 = 4 << 10;

/// Descriptors that the next process inherits, by their places.
#[derive(Default)]
pub(crate) struct Carried<'a>(Vec<Box<dyn AsFd + 'a>>);

impl<'a> Carried<'a> {
    /// Adds a descriptor, and returns its place.
    pub(crate) fn add(&mut self, descriptor: impl AsFd + 'a) -> u32 {
        self.0.push(Box::new(descriptor));
        self.0.len() as u32 - 1
    }

    /// Lists the descriptors.
    pub(crate) fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|descriptor| descriptor.as_fd())
    }

    /// Lists the descriptors' numbers in this process.
    pub(crate) fn numbers(&self) -> Vec<i32> {
        self.all().map(|it| it.as_raw_fd()).collect()
    }
}

/// The program that takes over: the file at this program's path, with this process's arguments.
#[derive(Clone, Debug)]
pub struct Successor {
    program: OsString,
    arguments: Vec<OsString>,
    signals: Arc<Signals>,
}

impl Successor {
    /// Returns the successor of this process, which was started as a server and takes `signals`.
    pub fn of_this_process(signals: Arc<Signals>) -> Self {
        let mut all = env::args_os();
        let program = all.next().unwrap_or_default();
        let mut arguments: Vec<_> = all.collect();
        // The arguments of a process that has taken over itself.
        if let [.., flag, _] = &arguments[..]
            && flag == TAKE_OVER
        {
            arguments.truncate(arguments.len() - 2);
        }
        Self {
            program,
            arguments,
            signals,
        }
    }

    /// Lets the successor show that it can take over `state`.
    pub(crate) fn rehearse(&self, state: &OwnedFd) -> Result<(), HandoverError> {
        let failed = |error: io::Error| {
            let program = self.program.display();
            HandoverError::Rehearsal(format!("cannot start {program}: {error}"))
        };
        // A pipe could fill up, or be kept open by somebody else.
        let flags = MFdFlags::MFD_CLOEXEC;
        let said =
            memfd_create(c"farpage-rehearsal", flags).map_err(|errno| failed(errno.into()))?;
        let said = File::from(said);
        let rehearsal = Command::new(&self.program)
            .args(&self.arguments)
            .args([REHEARSE, TAKE_OVER])
            .arg(state.as_raw_fd().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let mut rehearsal = Rehearsing(rehearsal);
        let until = Instant::now() + REHEARSAL;
        // A wait for a child has no time limit.
        let status: ExitStatus = loop {
            match rehearsal.0.try_wait().map_err(failed)? {
                Some(status) => break status,
                None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                None => {
                    return Err(HandoverError::Rehearsal(format!(
                        "its rehearsal took longer than {REHEARSAL:?}"
                    )));
                }
            }
        };
        if status.success() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        (&said).rewind().map_err(failed)?;
        said.take(SAID_BYTES)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        let said = String::from_utf8_lossy(&bytes);
        Err(HandoverError::Rehearsal(format!(
            "{} ({status})",
            said.trim().replace('\n', "; ")
        )))
    }

    /// Replaces this process by the successor, which takes over `state`. Returns only if that
    /// fails.
    pub(crate) fn replace(&self, state: &OwnedFd) -> HandoverError {
        let text = |text: &OsString| CString::new(text.clone().into_vec());
        let number = state.as_raw_fd().to_string().into();
        let arguments = [&self.program];
        let arguments = arguments.into_iter().chain(&self.arguments);
        let arguments = arguments.cloned().chain([TAKE_OVER.into(), number]);
        let all: Result<Vec<_>, _> = arguments.map(|it| text(&it)).collect();
        let (Ok(program), Ok(all)) = (text(&self.program), all) else {
            return HandoverError::Rehearsal("an argument contains a zero".to_owned());
        };
        // Signals that come from here on wait for the next process, which blocks them as well.
        let taken = self.signals.hold();
        if taken.is_stop_asked() {
            return HandoverError::Refused("it was asked to stop meanwhile".to_owned());
        }
        let failed = match execvp(&program, &all) {
            Ok(never) => match never {},
            Err(errno) => errno,
        };
        HandoverError::Rehearsal(format!("cannot exec {}: {failed}", self.program.display()))
    }
}

/// A rehearsal, which ends when this is dropped.
struct Rehearsing(Child);

impl Drop for Rehearsing {
    fn drop(&mut self) {
        // A process that has ended by itself is no error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Puts `state` into a file in memory that cannot be changed.
pub(crate) fn seal(state: &[u8]) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let mut file = File::from(memfd_create(c"farpage-handover", flags)?);
    file.write_all(state)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::all()))?;
    Ok(file.into())
}

/// Lets the next process inherit all of `carried` and `state`, or not any more.
pub(crate) fn let_all_inherit(
    carried: &Carried<'_>,
    state: &OwnedFd,
    inherits: bool,
) -> io::Result<()> {
    carried
        .all()
        .chain([state.as_fd()])
        .try_for_each(|descriptor| let_inherit(descriptor, inherits))
}
