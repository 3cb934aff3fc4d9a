//! [`Attachment`]: a channel's view of its session. It says when the channel gives its server up
//! ([`Patience`]) and hears that the server is gone ([`Death`]).
//!
//! The rule it keeps: no operation outlasts the deadline, and none is waited for once the server is
//! known to be gone. The session itself is only kept alive here.

use std::{
    any::Any,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{ChannelError, Since};

/// Reference that keeps a session alive, and with it the leases of a channel's extents.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A channel's view of its session.
pub(crate) struct Attachment {
    pub(crate) endpoint: String,
    pub(crate) death: Arc<Death>,
    pub(crate) patience: Patience,
    pub(crate) _session: KeepAlive,
}

impl Attachment {
    /// Looks at the clock and at the session. `posted` is the time when the oldest operation was
    /// posted, if there is one, and `heard` the time of the server's last answer.
    ///
    /// # Errors
    /// The reason why the channel is dead from now on.
    pub(crate) fn check(&self, posted: Option<Since>, heard: Since) -> Result<(), ChannelError> {
        if let Some(reason) = self.death.reason() {
            return Err(self.lost(reason));
        }
        match posted {
            Some(posted) if self.patience.is_over(posted, heard) => {
                Err(self.patience.end(&self.endpoint, posted))
            }
            _ => Ok(()),
        }
    }

    /// Returns the error that operations end with when the connection is lost.
    pub(crate) fn lost(&self, reason: impl Into<String>) -> ChannelError {
        ChannelError::Disconnected {
            endpoint: self.endpoint.clone(),
            reason: reason.into(),
        }
    }
}

/// Time limits of a channel's waits for its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// The longest that an operation may take.
    pub(crate) deadline: Duration,
    /// The longest silence while an answer is due.
    pub(crate) silence: Duration,
}

impl Patience {
    /// True if the wait has ended for a connection whose oldest operation was posted at `posted`,
    /// and that last answered at `heard`.
    fn is_over(self, posted: Since, heard: Since) -> bool {
        posted.elapsed() >= self.deadline || posted.max(heard).elapsed() >= self.silence
    }

    /// Returns the time of the next look at the clock at the latest.
    pub(crate) fn look_by(self, posted: Since, heard: Since) -> Instant {
        (posted.look_by(self.deadline)).min(posted.max(heard).look_by(self.silence))
    }

    /// Returns the error of an operation that was posted at `posted` and is too late.
    pub(crate) fn end(self, endpoint: &str, posted: Since) -> ChannelError {
        let waited = posted.elapsed() >= self.deadline;
        ChannelError::TimedOut {
            endpoint: endpoint.to_owned(),
            deadline: if waited { self.deadline } else { self.silence },
        }
    }
}

/// The end of one control connection, shared with the channels that depend on it.
#[derive(Debug, Default)]
pub(crate) struct Death {
    reason: OnceLock<String>,
    /// True if the memory is out of reach, too. Read per operation. Stored with Release after the
    /// reason is set, and loaded with Acquire before the reason is read.
    memory_lost: AtomicBool,
}

impl Death {
    /// Declares that the peer is gone. The first reason counts.
    pub(crate) fn declare(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
        self.memory_lost.store(true, Ordering::Release);
    }

    /// Declares that the peer is gone but its memory can still be reached.
    pub(crate) fn declare_but_for_memory(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
    }

    /// Returns the reason why the peer is gone, if it is.
    pub(crate) fn reason(&self) -> Option<String> {
        self.reason.get().cloned()
    }

    /// Returns the reason why the peer's memory is out of reach, if it is.
    pub(crate) fn loss(&self) -> Option<String> {
        self.memory_lost
            .load(Ordering::Acquire)
            .then(|| self.reason().unwrap_or_default())
    }
}
