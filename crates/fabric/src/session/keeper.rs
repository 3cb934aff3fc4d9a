//! The thread of a session: renews the lease, and notices the end of the connection.
//!
//! The rule it keeps: the end of the connection is declared before anything waits for a lock.

use std::{
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_wire::{Endpoint, Request, Response};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{shared::SessionState, talk::ControlLine};
use crate::{errors::RequestError, nonblocking::timeout_until};

/// Interval of attempts to resume a lost connection. Short against any lease, long against the cost
/// of an attempt.
const RESUME_EVERY: Duration = Duration::from_millis(100);

/// Interval at which the server is asked if its clients are to leave, where somebody wants to know:
/// short against the time that a server gives its clients to leave.
const DRAIN_LOOK_EVERY: Duration = Duration::from_secs(3);

impl SessionState {
    /// Runs the keeper thread: renews the lease, notices the end of the connection, resumes it
    /// where that is possible.
    pub(super) fn keep(&self) {
        let mut renewed = Instant::now();
        let mut looked = Instant::now();
        let mut told = [0; 2];
        loop {
            // 1. Look which connection to watch.
            let (stream, death, lease, over, owed) = {
                let line = self.line.lock();
                (
                    Arc::clone(&line.stream),
                    Arc::clone(&line.death),
                    line.lease,
                    line.over,
                    line.talk.owed.is_some(),
                )
            };
            let alive = death.reason().is_none();
            let can_resume = !over && !matches!(self.endpoint, Endpoint::Shm(_));
            let looks = self.drain_notice.lock().0.is_some();
            // A third of the lease, so that a renewal may fail once.
            let renews_at = renewed + lease / 3;
            let looks_at = looks.then(|| looked + DRAIN_LOOK_EVERY);
            let timeout = match (alive, can_resume) {
                (true, _) => timeout_until(looks_at.map_or(renews_at, |at| at.min(renews_at))),
                (false, true) => timeout_until(Instant::now() + RESUME_EVERY),
                (false, false) => PollTimeout::NONE,
            };
            // 2. Sleep. Two events of the connection wake us: its end, and an owed answer, which no
            // call waits for.
            let (end, mut flags) = stream.end();
            flags.set(PollFlags::POLLIN, owed || flags.contains(PollFlags::POLLIN));
            let mut fds = [
                PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
                PollFd::new(end, flags),
            ];
            let woken = poll(&mut fds[..if alive { 2 } else { 1 }], timeout);
            // 3. Find out why we woke.
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            // `None` stands for a bit that nix has no name for, which is ours.
            let seen = fds[1].revents();
            let answers = alive && owed && seen == Some(PollFlags::POLLIN);
            let ended = alive && !answers && seen != Some(PollFlags::empty()) && stream.has_ended();
            if fds[0].any() == Some(true) {
                // The read finds nothing if an earlier read took this wake-up, too.
                let _ = self.wake.read();
            }
            let until = Instant::now() + self.silence();
            if ended {
                // Declared before the lock: a call may hold it until its own deadline.
                self.declare(&death, "the server closed the connection");
            } else if answers {
                let mut line = self.line.lock();
                if line.talk.owed.is_some() && self.settle(&mut line, until).is_ok() {
                    let _ = self.catch_up(&mut line, until);
                }
            } else if woken == Ok(0) {
                let mut line = self.line.lock();
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                if !alive {
                    // Tried again after a while, and reported by the next call.
                    if self.mend(&mut line, until).is_ok() {
                        let _ = self.catch_up(&mut line, until);
                    }
                } else if line.death.reason().is_none() && Instant::now() >= renews_at {
                    told = self.renew(&mut line, told, until).unwrap_or(told);
                } else if line.death.reason().is_none() {
                    let notice = self.look_for_drain(&mut line, until);
                    looked = Instant::now();
                    drop(line);
                    notice.into_iter().for_each(|notice| notice());
                    continue;
                }
                renewed = Instant::now();
            } else if let Err(errno) = woken
                && errno != Errno::EINTR
            {
                death.declare(&format!("cannot wait for the server: {errno}"));
            }
        }
    }

    /// Asks the server if its clients are to leave. Returns the call to make if they are.
    fn look_for_drain(
        &self,
        line: &mut ControlLine,
        until: Instant,
    ) -> Option<Box<dyn FnOnce() + Send>> {
        match self.exchange(line, &Request::Stat, until) {
            Ok(Response::Stat(stat)) if stat.asks_to_leave() => self.drain_notice.lock().0.take(),
            _ => None,
        }
    }

    /// Renews the lease and reports figures that have changed. Returns the figures that the server
    /// has now.
    fn renew(
        &self,
        line: &mut ControlLine,
        told: [u64; 2],
        until: Instant,
    ) -> Result<[u64; 2], RequestError> {
        self.exchange(line, &Request::Renew, until)?;
        let contents = self
            .contents
            .each_ref()
            .map(|bytes| bytes.load(Ordering::Relaxed));
        if contents != told {
            let [plain_bytes, stored_bytes] = contents;
            let report = Request::Contents {
                plain_bytes,
                stored_bytes,
            };
            self.exchange(line, &report, until)?;
        }
        self.catch_up(line, until)?;
        Ok(contents)
    }
}
