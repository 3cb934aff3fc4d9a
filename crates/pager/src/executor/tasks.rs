//! Fillers, each under its lock, with the events that its handlers wake up for: [`FillerTasks`].
//!
//! The rule: a handler that drives a filler holds its lock, and releases it only when it has told
//! the task what to wake up for.

use std::{
    hint, io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_signals::{Mutex, MutexGuard};
use farpage_store::StoreCall;
use farpage_vm::{AddressSpace, EventScope, Shard};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use smallvec::SmallVec;

use crate::{
    filler::Filler,
    run::PageRun,
    shared::SharedParts,
    waker::{RETRY, WorkerWaker, sleep_on},
};

/// Number of attempts at a filler's lock before its handler sleeps: as long as a turn takes that
/// brings one page in.
const SPINS: u32 = 200;

/// Tasks of all fillers, by shard.
pub(super) struct FillerTasks<A: AddressSpace> {
    pub(super) shared: Arc<SharedParts<A>>,
    all: Vec<CachePadded<FillerTask<A>>>,
    started: Instant,
}

/// Task of one filler, with the events that its handlers wake up for.
struct FillerTask<A: AddressSpace> {
    filler: Mutex<Filler<A>>,
    /// Channels with something under way. Each tells of one event, until it is armed again.
    channels: Epoll,
    /// Time of the next turn at the latest, in nanoseconds since `started`. [`u64::MAX`]: none.
    until_ns: AtomicU64,
}

/// Work of a handler for a shard.
#[derive(Clone, Copy)]
pub(super) struct Due {
    pub(super) shard: usize,
    /// True if there may be faults.
    pub(super) faults: bool,
    /// True if channels have told of something.
    pub(super) channels: bool,
}

impl Due {
    pub(super) fn all(shard: usize) -> Due {
        Due {
            shard,
            faults: true,
            channels: false,
        }
    }
}

pub(super) type Dues = SmallVec<[Due; 4]>;

/// Consequence of a turn of a filler.
pub(super) enum TurnOutcome<A: AddressSpace> {
    /// Call to be made without the filler, which then goes on.
    Call(StoreCall<PageRun<A::Frame>>),
    /// End of the turn. `again`: the next turn may find something to do at once.
    Done { again: bool },
}

/// Turn that has ended.
pub(super) struct Turn<A: AddressSpace> {
    pub(super) step: TurnOutcome<A>,
    /// Thread that has faulted, now and then: its CPU is to be looked for.
    pub(super) faulted: Option<u32>,
}

impl<A: AddressSpace> FillerTasks<A> {
    pub(super) fn new(
        shared: &Arc<SharedParts<A>>,
        mut fillers: Vec<Filler<A>>,
    ) -> io::Result<FillerTasks<A>> {
        (fillers.iter_mut()).for_each(|filler| filler.io().keep_calls());
        let all = fillers.into_iter().map(FillerTask::new);
        Ok(FillerTasks {
            shared: shared.clone(),
            all: all.collect::<io::Result<_>>()?,
            started: Instant::now(),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes a turn of a filler.
    pub(super) fn begin(&self, due: Due) -> Turn<A> {
        let task = &self.all[due.shard];
        let mut filler = task.lock();
        if due.channels {
            task.drain();
        }
        let busy = filler.turn(if due.faults {
            EventScope::All
        } else {
            EventScope::Kept
        });
        self.leave(task, filler, busy)
    }

    /// Takes a turn of a filler after its call has returned.
    pub(super) fn go_on(&self, shard: usize, call: StoreCall<PageRun<A::Frame>>) -> Turn<A> {
        let task = &self.all[shard];
        let mut filler = task.lock();
        filler.io().end_call(call);
        let busy = filler.turn(EventScope::Kept);
        self.leave(task, filler, busy)
    }

    /// Ends a turn: from here on others may drive the filler.
    fn leave(
        &self,
        task: &FillerTask<A>,
        mut filler: MutexGuard<'_, Filler<A>>,
        busy: bool,
    ) -> Turn<A> {
        let call = filler.io().take_call();
        let again = busy && call.is_none() && filler.has_work();
        if !again {
            task.arm(&filler, self.started);
        }
        Turn {
            step: call.map_or(TurnOutcome::Done { again }, TurnOutcome::Call),
            faulted: filler.sample(),
        }
    }

    /// True if a filler has mail or asks that it has not looked at, if frames that it holds back
    /// are needed, or if there are faults that no descriptor tells of.
    pub(super) fn is_called(&self, shard: usize) -> bool {
        let (shared, shard) = (&self.shared, Shard(shard));
        shared.doors.has_mail(shard)
            || shared.mapper.wait(shard).kept
            || shared.frames.budget().wants_what_is_held_back()
    }

    pub(super) fn waker(&self, shard: usize) -> &WorkerWaker {
        &self.shared.doors.filler(Shard(shard)).waker
    }

    /// Returns a descriptor that is readable when a channel of this filler has something.
    pub(super) fn channels(&self, shard: usize) -> BorrowedFd<'_> {
        self.all[shard].channels.0.as_fd()
    }

    /// Returns the start, a time that is past: a sleep until then ends at once.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// True if this filler was to take a turn by `now_ns`.
    pub(super) fn is_late(&self, shard: usize, now_ns: u64) -> bool {
        self.all[shard].until_ns.load(Ordering::SeqCst) <= now_ns
    }

    /// Returns the time of the next turn of some filler at the latest. `None`: there is none.
    pub(super) fn until(&self) -> Option<Instant> {
        let until_ns = |task: &CachePadded<FillerTask<A>>| task.until_ns.load(Ordering::SeqCst);
        let until_ns = self.all.iter().map(until_ns).min().unwrap_or(u64::MAX);
        (until_ns != u64::MAX).then(|| self.started + Duration::from_nanos(until_ns))
    }

    #[cfg(test)]
    pub(super) fn set_until_ns(&self, shard: usize, until_ns: u64) {
        self.all[shard].until_ns.store(until_ns, Ordering::SeqCst);
    }
}

impl<A: AddressSpace> FillerTask<A> {
    fn new(filler: Filler<A>) -> io::Result<CachePadded<FillerTask<A>>> {
        Ok(CachePadded::new(FillerTask {
            filler: Mutex::new(filler),
            channels: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            until_ns: AtomicU64::new(u64::MAX),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Filler<A>> {
        for _ in 0..SPINS {
            if let Some(filler) = self.filler.try_lock() {
                return filler;
            }
            hint::spin_loop();
        }
        self.filler.lock()
    }

    /// Lets all handlers wake up from now on for the events that this filler waits for.
    fn arm(&self, filler: &Filler<A>, started: Instant) {
        let mut fds = SmallVec::<[PollFd<'_>; 4]>::new();
        let mut until = filler.wait(&mut fds);
        for fd in &fds {
            if self.arm_channel(fd).is_err() {
                // Lack of memory: the channel is looked at now and then.
                until = until.into_iter().chain([Instant::now() + RETRY]).min();
            }
        }
        let until_ns = until.map_or(u64::MAX, |until| {
            until.saturating_duration_since(started).as_nanos() as u64
        });
        self.until_ns.store(until_ns, Ordering::SeqCst);
    }

    fn arm_channel(&self, fd: &PollFd<'_>) -> nix::Result<()> {
        let mut flags = EpollFlags::EPOLLONESHOT;
        flags.set(EpollFlags::EPOLLIN, fd.events().contains(PollFlags::POLLIN));
        flags.set(
            EpollFlags::EPOLLOUT,
            fd.events().contains(PollFlags::POLLOUT),
        );
        let mut event = EpollEvent::new(flags, 0);
        match self.channels.modify(fd.as_fd(), &mut event) {
            Err(Errno::ENOENT) => self.channels.add(fd.as_fd(), event),
            armed => armed,
        }
    }

    /// Takes the channels' events: the filler is about to look at its channels.
    fn drain(&self) {
        // Events that do not fit are told again.
        let _ = self
            .channels
            .wait(&mut [EpollEvent::empty(); 4], EpollTimeout::ZERO);
    }
}

/// Descriptors that a handler sleeps on, made once. Several handlers sleep on the same descriptors,
/// and the first to wake takes the filler. So a wake-up that one has seen may be missed by another,
/// which looks before it sleeps.
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
