//! [`DrainReport`] and [`DrainError`], and the calls that wait until a server is empty.
//!
//! The rule it keeps: a call gets one answer. The judgement is left to [`drain`](crate::drain).

use std::{collections::HashMap, fmt, io};

use crossbeam_channel::{Receiver, Sender};
use farpage_signals::Mutex;
use farpage_wire::EndpointError;

farpage_wire::debug_as_display!(DrainError);

/// Outcome of a call that emptied a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DrainReport {
    /// Bytes that were copied from this server to others during the call. Room that no page used is
    /// not copied.
    pub moved_bytes: u64,
    /// Bytes that named regions of this program, or versions of them that it reads, have on the
    /// server and keep there: a name's memory does not move.
    pub named_bytes: u64,
}

/// Failure to empty a server. What was moved stays moved. Unless the server is
/// [`Unknown`](Self::Unknown), nothing new is put there until it is added again.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// The server's address cannot be read.
    #[error(transparent)]
    Address(#[from] EndpointError),
    /// The process is a child made by `fork`: the parent uses the servers.
    #[error("a child made by fork cannot empty servers; do so in its parent")]
    Forked,
    /// The program is no client of the server.
    #[error("{endpoint} is none of the memory servers of this runtime: {servers}")]
    Unknown {
        /// The endpoint that was given.
        endpoint: String,
        /// Endpoints of the runtime's servers.
        servers: String,
    },
    /// The other servers have no room for the rest.
    #[error(
        "{left_bytes} bytes are left on {endpoint}, since no other server has room for them{}; add a server or free memory, then drain {endpoint} again",
        Refusal(.refusal)
    )]
    NoRoom {
        /// The server's endpoint.
        endpoint: String,
        /// Bytes of the extents that are left on the server.
        left_bytes: u64,
        /// The last refusal of another server. `None` if there is no other server to ask.
        refusal: Option<String>,
    },
    /// The server ended, or fell silent, before all was moved, and other servers have no copy of
    /// the rest.
    #[error(
        "{left_bytes} bytes are left on {endpoint} and nowhere else, and it does not answer: {reason}; if it was only cut off, drain it again once it answers"
    )]
    Lost {
        /// The server's endpoint.
        endpoint: String,
        /// Bytes of the extents that are left on the server and have no copy elsewhere.
        left_bytes: u64,
        /// Reason why the server does not answer.
        reason: String,
    },
    /// Copying the rest fails again and again, at this server or at others.
    #[error(
        "{left_bytes} bytes are left on {endpoint}, since copying them fails again and again: {reason}; end the cause, or add another server, then drain {endpoint} again"
    )]
    Failed {
        /// The server's endpoint.
        endpoint: String,
        /// Bytes of the extents that are left on the server.
        left_bytes: u64,
        /// The last error.
        reason: String,
    },
    /// The server was added again meanwhile.
    #[error("{endpoint} was added again while it was being emptied")]
    Cancelled {
        /// The server's endpoint.
        endpoint: String,
    },
    /// The thread that moves extents could not be started.
    #[error("cannot start the thread that moves pages to other servers: {source}")]
    Thread {
        /// Error from the system.
        source: io::Error,
    },
}

/// The refusal of another server, if any, as part of a sentence.
struct Refusal<'a>(&'a Option<String>);

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(refusal) => write!(f, " ({refusal})"),
            None => Ok(()),
        }
    }
}

/// Calls that wait until a server is empty, and the bytes that were moved away so far.
#[derive(Default)]
pub(crate) struct DrainCalls(Mutex<DrainState>);

#[derive(Default)]
struct DrainState {
    calls: Vec<DrainCall>,
    /// Bytes that were moved away from each server, by port.
    moved_bytes: HashMap<usize, u64>,
}

/// A call that waits until a server is empty.
pub(crate) struct DrainCall {
    pub(crate) endpoint: String,
    /// Ports of the server: more than one if it was named twice.
    pub(crate) ports: Vec<usize>,
    answer: Sender<Result<(), DrainError>>,
    /// True once a turn of the repairs has begun since.
    is_seen: bool,
}

impl DrainCalls {
    /// Adds a call. Returns its answer to come.
    pub(crate) fn add(
        &self,
        endpoint: String,
        ports: Vec<usize>,
    ) -> Receiver<Result<(), DrainError>> {
        let (answer, answered) = crossbeam_channel::bounded(1);
        self.0.lock().calls.push(DrainCall {
            endpoint,
            ports,
            answer,
            is_seen: false,
        });
        answered
    }

    /// Notes that a turn of the repairs begins, which sees the servers of all calls so far leave.
    pub(crate) fn see(&self) {
        let mut state = self.0.lock();
        state.calls.iter_mut().for_each(|call| call.is_seen = true);
    }

    /// Answers the [seen](Self::see) calls that `judge` has an answer for.
    pub(crate) fn answer(&self, judge: impl Fn(&DrainCall) -> Option<Result<(), DrainError>>) {
        let calls = std::mem::take(&mut self.0.lock().calls);
        for call in calls {
            match call.is_seen.then(|| judge(&call)).flatten() {
                // A caller that is gone needs no answer.
                Some(answer) => _ = call.answer.send(answer),
                None => self.0.lock().calls.push(call),
            }
        }
    }

    /// Counts bytes that were moved away from a server, by its port.
    pub(crate) fn count(&self, port: usize, bytes: u64) {
        *self.0.lock().moved_bytes.entry(port).or_default() += bytes;
    }

    /// Returns the bytes that were moved away from servers, by their ports.
    pub(crate) fn moved_bytes(&self, ports: &[usize]) -> u64 {
        let state = self.0.lock();
        let moved = ports.iter().filter_map(|port| state.moved_bytes.get(port));
        moved.sum()
    }
}
