//! When a server is given up ([`Patience`]), and that it was ([`Death`]).

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::ChannelError;

/// How long a channel waits for a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// The longest that an operation may take.
    pub(crate) deadline: Duration,
    /// The longest that nothing may come while something is expected.
    pub(crate) silence: Duration,
}

impl Patience {
    /// Until when a connection is waited for whose oldest operation was posted then, and of which
    /// was last heard then.
    pub(crate) fn until(self, posted: Instant, heard: Instant) -> Instant {
        (posted + self.deadline).min(posted.max(heard) + self.silence)
    }

    /// What it means that it is too late.
    pub(crate) fn end(self, endpoint: &str, posted: Instant) -> ChannelError {
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
    /// Whether the memory is out of reach, too. Looked at per operation. Release, after the reason
    /// is written; acquire, before it is read.
    memory_lost: AtomicBool,
}

impl Death {
    /// Says that the peer is gone. The first reason counts.
    pub(crate) fn declare(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
        self.memory_lost.store(true, Ordering::Release);
    }

    /// Says that the peer is gone, and that its memory is there all the same.
    pub(crate) fn declare_but_for_memory(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
    }

    /// Why the peer is gone, if it is.
    pub(crate) fn reason(&self) -> Option<String> {
        self.reason.get().cloned()
    }

    /// Why the peer's memory is out of reach, if it is.
    pub(crate) fn loss(&self) -> Option<String> {
        self.memory_lost
            .load(Ordering::Acquire)
            .then(|| self.reason().unwrap_or_default())
    }
}
