//! Descriptors that a handler sleeps on: [`PollSet`].
//!
//! Several handlers sleep on the same descriptors, and the first to wake takes the filler. So a
//! wake-up that one has seen may be missed by another, which looks before it sleeps.

use std::time::Instant;

use farpage_vm::{AddressSpace, Shard};
use nix::poll::{PollFd, PollFlags};

use super::tasks::{Due, Dues, FillerTasks};
use crate::waker::sleep_on;

/// Descriptors that a handler sleeps on, made once.
pub(super) struct PollSet<'a, A: AddressSpace> {
    tasks: &'a FillerTasks<A>,
    /// The descriptor that says that fillers shall stop. Then of each shard its waker, its channels
    /// and, where the address space has one, the descriptor of its faults.
    fds: Vec<PollFd<'a>>,
    has_faults_fd: bool,
}

impl<'a, A: AddressSpace> PollSet<'a, A> {
    pub(super) fn new(tasks: &'a FillerTasks<A>) -> Self {
        let shared = &tasks.shared;
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![readable(shared.doors.stopped())];
        for shard in 0..tasks.len() {
            fds.push(readable(tasks.waker(shard).fd()));
            fds.push(readable(tasks.channels(shard)));
            fds.extend(shared.mapper.wait(Shard(shard)).fd.map(readable));
        }
        PollSet {
            tasks,
            fds,
            has_faults_fd: shared.mapper.wait(Shard(0)).fd.is_some(),
        }
    }

    /// Makes every event from now on wake this handler. Appends earlier work, of which no event
    /// tells. Returns the time until which to sleep, a past one if something is due.
    pub(super) fn prepare(&self, dues: &mut Dues) -> Option<Instant> {
        let tasks = self.tasks;
        // The wakers stay prepared: other handlers may be asleep when this one wakes.
        (0..tasks.len()).for_each(|shard| tasks.waker(shard).prepare());
        for shard in 0..tasks.len() {
            let is_known = dues.iter().any(|due| due.shard == shard);
            if !is_known && tasks.is_called(shard) {
                dues.push(Due::all(shard));
            }
        }
        if dues.is_empty() {
            tasks.until()
        } else {
            Some(tasks.started())
        }
    }

    /// Sleeps until something happens, and appends the work that follows.
    pub(super) fn sleep(&mut self, until: Option<Instant>, dues: &mut Dues) {
        let tasks = self.tasks;
        sleep_on(&mut self.fds, until);
        let now_ns = until.map_or(0, |_| tasks.now_ns());
        let mut fds = self.fds[1..].iter();
        let mut told = || fds.next().is_some_and(|fd| fd.any() == Some(true));
        for shard in 0..tasks.len() {
            let woken = told();
            tasks.waker(shard).clear(woken);
            let channels = told();
            let faults = self.has_faults_fd && told();
            let is_late = tasks.is_late(shard, now_ns);
            if let Some(due) = dues.iter_mut().find(|due| due.shard == shard) {
                due.channels |= channels;
            } else if woken || channels || faults || is_late {
                dues.push(Due {
                    shard,
                    // Faults that no descriptor tells of come with a wake-up.
                    faults: faults || woken,
                    channels,
                });
            }
        }
    }
}
