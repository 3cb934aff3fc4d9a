//! [`ServerHealth`]: which servers answer.
//!
//! The rule it keeps: a server is *suspect* from the first transient failure until an operation
//! succeeds there. Suspicion is a hint for the choice among copies of a page. What suspicion means
//! for the memory of a server is left to the [repairs](crate::repair).

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::Thread,
    time::{Duration, Instant},
};

use crate::roster::SERVERS_MAX;

/// Health of each server of a cluster, by the number of its session. Signal handlers read and
/// write it: nothing here allocates or waits.
pub(crate) struct ServerHealth {
    /// Time of the first failure since the last success, in milliseconds since `began`, plus 1.
    /// Zero: the server is not suspect. Relaxed: hints, which no memory depends on.
    suspect_since: Box<[AtomicU64]>,
    /// Flags of the servers, true if an operation has succeeded there since the last look.
    heard: Box<[AtomicBool]>,
    /// Flags of the servers that are being emptied, or were.
    leaving: Box<[AtomicBool]>,
    /// Flags of the servers of which somebody was told that they are empty, since they leave.
    emptied: Box<[AtomicBool]>,
    /// Number of flags in `leaving` that are set.
    leaving_count: AtomicUsize,
    /// Number of changes. A pool that has seen fewer looks at its groups again.
    version: AtomicU64,
    began: Instant,
    /// Time of silence that may be a short one.
    reopen_within: Duration,
    /// Thread that repairs, once there is one.
    repairer: OnceLock<Thread>,
}

impl ServerHealth {
    /// Makes the health of servers that all answer, with room for as many as there can be. A
    /// silence of up to `reopen_within` may be a short one.
    pub(crate) fn new(reopen_within: Duration) -> Self {
        Self {
            suspect_since: (0..SERVERS_MAX).map(|_| AtomicU64::new(0)).collect(),
            heard: (0..SERVERS_MAX).map(|_| AtomicBool::new(false)).collect(),
            leaving: (0..SERVERS_MAX).map(|_| AtomicBool::new(false)).collect(),
            emptied: (0..SERVERS_MAX).map(|_| AtomicBool::new(false)).collect(),
            leaving_count: AtomicUsize::new(0),
            version: AtomicU64::new(0),
            began: Instant::now(),
            reopen_within,
            repairer: OnceLock::new(),
        }
    }

    /// Names the thread that is woken by changes, unless one was named before.
    pub(crate) fn set_repairer(&self, thread: Thread) {
        let _ = self.repairer.set(thread);
    }

    /// Wakes the thread that repairs.
    pub(crate) fn wake(&self) {
        if let Some(thread) = self.repairer.get() {
            thread.unpark();
        }
    }

    /// Notes that an operation failed at a server for a transient reason.
    pub(crate) fn failed(&self, server: usize) {
        let now = self.began.elapsed().as_millis() as u64 + 1;
        let first = self.suspect_since[server].compare_exchange(
            0,
            now,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if first.is_ok() {
            self.changed();
        }
    }

    /// Notes that an operation succeeded at a server.
    pub(crate) fn succeeded(&self, server: usize) {
        // Looked at first: the line is not fetched for writing by each operation.
        if !self.heard[server].load(Ordering::Relaxed) {
            self.heard[server].store(true, Ordering::Relaxed);
        }
        self.answered(server);
    }

    /// Notes that a server answered a call that was made to hear of it.
    pub(crate) fn answered(&self, server: usize) {
        if !self.is_fine(server) {
            self.suspect_since[server].store(0, Ordering::Relaxed);
            self.changed();
        }
    }

    /// True if an operation has succeeded at the server since the last call.
    pub(crate) fn take_heard(&self, server: usize) -> bool {
        self.heard[server].swap(false, Ordering::Relaxed)
    }

    /// Takes a server out of the choice for new memory, or back in. Requests for memory that are
    /// under way may still be granted there.
    pub(crate) fn set_leaving(&self, server: usize, leaves: bool) {
        if !leaves {
            self.emptied[server].store(false, Ordering::SeqCst);
        }
        if self.leaving[server].swap(leaves, Ordering::SeqCst) != leaves {
            match leaves {
                true => self.leaving_count.fetch_add(1, Ordering::SeqCst),
                false => self.leaving_count.fetch_sub(1, Ordering::SeqCst),
            };
            self.changed();
        }
    }

    /// True if the server is being emptied, or was.
    pub(crate) fn is_leaving(&self, server: usize) -> bool {
        self.leaving[server].load(Ordering::SeqCst)
    }

    /// Notes if somebody is told that a leaving server is empty.
    pub(crate) fn set_emptied(&self, server: usize, is_empty: bool) {
        self.emptied[server].store(is_empty, Ordering::SeqCst);
    }

    /// True if somebody was told that the server, which leaves, is empty.
    pub(crate) fn is_emptied(&self, server: usize) -> bool {
        self.emptied[server].load(Ordering::SeqCst)
    }

    /// True if the server is being emptied, or was, and is suspect: it may have ended.
    pub(crate) fn is_left(&self, server: usize) -> bool {
        self.is_leaving(server) && !self.is_fine(server)
    }

    /// True if any server is being emptied, or was.
    pub(crate) fn any_leaving(&self) -> bool {
        self.leaving_count.load(Ordering::SeqCst) > 0
    }

    /// True if the server is not suspect.
    pub(crate) fn is_fine(&self, server: usize) -> bool {
        self.suspect_since[server].load(Ordering::Relaxed) == 0
    }

    /// Returns the time for which a server has been suspect.
    pub(crate) fn suspect_for(&self, server: usize) -> Option<Duration> {
        let since = self.suspect_since[server].load(Ordering::Relaxed);
        let since = Duration::from_millis(since.checked_sub(1)?);
        Some(self.began.elapsed().saturating_sub(since))
    }

    /// True if the server is not suspect, or has been for so short that it may answer in a moment.
    pub(crate) fn may_answer_soon(&self, server: usize) -> bool {
        let silent = self.suspect_for(server);
        silent.is_none_or(|silent| silent < self.reopen_within)
    }

    /// Returns the number of changes so far.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Notes that servers, or members on them, have changed.
    pub(crate) fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_operations_spare_a_server_the_next_call() {
        let health = ServerHealth::new(Duration::ZERO);
        health.answered(0);
        assert!(!health.take_heard(0));
        health.succeeded(0);
        assert!(!health.take_heard(1));
        assert!(health.take_heard(0) && !health.take_heard(0));
        health.failed(1);
        assert!(!health.is_fine(1));
        health.answered(1);
        assert!(health.is_fine(1) && !health.take_heard(1));
    }
}
