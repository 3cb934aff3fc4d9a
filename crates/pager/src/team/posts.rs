//! The fillers, each under its lock, with what whoever sleeps for it wakes up for: [`Posts`].
//!
//! The rule: whoever drives a filler holds its lock, and leaves it only when it has told the post
//! what to wake up for.

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
use farpage_store::StoreCall;
use farpage_vm::{AddressSpace, Asked, Shard};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::{bell::Bell, filler::Filler, run::Local, shared::Shared, worker::RETRY};

/// A filler's lock is tried for so long before its handler sleeps: as long as a turn takes that
/// brings one page in.
const SPINS: u32 = 200;

/// All fillers, by shard.
pub(super) struct Posts<A: AddressSpace> {
    pub(super) shared: Arc<Shared<A>>,
    all: Vec<CachePadded<Post<A>>>,
    started: Instant,
}

/// A filler, and what its handlers wake up for.
struct Post<A: AddressSpace> {
    filler: Mutex<Filler<A>>,
    /// The channels that something is under way on. Each tells of one event, until it is armed
    /// again.
    channels: Epoll,
    /// When to take a turn at the latest, in nanoseconds since the start. [`u64::MAX`]: whenever.
    until_ns: AtomicU64,
}

/// What a handler has to do for a shard.
#[derive(Clone, Copy)]
pub(super) struct Due {
    pub(super) shard: usize,
    /// Whether there may be faults.
    pub(super) faults: bool,
    /// Whether channels have told of something.
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

/// What a turn of a filler leads to.
pub(super) enum Step<A: AddressSpace> {
    /// A call to be made without the filler, which then goes on.
    Call(StoreCall<Local<A::Frame>>),
    /// `again`: the next turn may find something to do at once.
    Done { again: bool },
}

/// A turn that has ended.
pub(super) struct Turn<A: AddressSpace> {
    pub(super) step: Step<A>,
    /// A thread that has faulted, now and then: its CPU is to be looked for.
    pub(super) faulted: Option<u32>,
}

impl<A: AddressSpace> Posts<A> {
    pub(super) fn new(
        shared: &Arc<Shared<A>>,
        mut fillers: Vec<Filler<A>>,
    ) -> io::Result<Posts<A>> {
        fillers.iter_mut().for_each(Filler::keep_calls);
        let all = fillers.into_iter().map(Post::new);
        Ok(Posts {
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
        let post = &self.all[due.shard];
        let mut filler = post.lock();
        if due.channels {
            post.drain();
        }
        let busy = filler.turn(if due.faults { Asked::All } else { Asked::Kept });
        self.leave(post, filler, busy)
    }

    /// The same after a call has returned.
    pub(super) fn go_on(&self, shard: usize, call: StoreCall<Local<A::Frame>>) -> Turn<A> {
        let post = &self.all[shard];
        let mut filler = post.lock();
        filler.end_call(call);
        let busy = filler.turn(Asked::Kept);
        self.leave(post, filler, busy)
    }

    /// Ends a turn: from here on others may drive the filler.
    fn leave(&self, post: &Post<A>, mut filler: MutexGuard<'_, Filler<A>>, busy: bool) -> Turn<A> {
        let call = filler.take_call();
        let again = busy && call.is_none() && filler.has_work();
        if !again {
            post.arm(&filler, self.started);
        }
        Turn {
            step: call.map_or(Step::Done { again }, Step::Call),
            faulted: filler.sample(),
        }
    }

    /// Whether a filler was asked for something that it has not looked at, or for what it holds
    /// back; or there are faults that no descriptor tells of.
    pub(super) fn is_called(&self, shard: usize) -> bool {
        let (shared, shard) = (&self.shared, Shard(shard));
        shared.doors.has_mail(shard)
            || shared.mapper.wait(shard).kept
            || shared.frames.budget().wants_what_is_held_back()
    }

    pub(super) fn bell(&self, shard: usize) -> &Bell {
        &self.shared.doors.filler(Shard(shard)).bell
    }

    /// Readable when a channel of this filler has something.
    pub(super) fn channels(&self, shard: usize) -> BorrowedFd<'_> {
        self.all[shard].channels.0.as_fd()
    }

    /// The start, which is over: who sleeps until then does not sleep.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Whether this filler was to take a turn by then.
    pub(super) fn is_late(&self, shard: usize, now_ns: u64) -> bool {
        self.all[shard].until_ns.load(Ordering::SeqCst) <= now_ns
    }

    /// When some filler is to take a turn at the latest. `None`: whenever.
    pub(super) fn until(&self) -> Option<Instant> {
        let until_ns = |post: &CachePadded<Post<A>>| post.until_ns.load(Ordering::SeqCst);
        let until_ns = self.all.iter().map(until_ns).min().unwrap_or(u64::MAX);
        (until_ns != u64::MAX).then(|| self.started + Duration::from_nanos(until_ns))
    }

    #[cfg(test)]
    pub(super) fn set_until_ns(&self, shard: usize, until_ns: u64) {
        self.all[shard].until_ns.store(until_ns, Ordering::SeqCst);
    }
}

impl<A: AddressSpace> Post<A> {
    fn new(filler: Filler<A>) -> io::Result<CachePadded<Post<A>>> {
        Ok(CachePadded::new(Post {
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

    /// All handlers may wake up from now on for what this filler waits for.
    fn arm(&self, filler: &Filler<A>, started: Instant) {
        let mut fds = SmallVec::<[PollFd<'_>; 4]>::new();
        let mut until = filler.wait(&mut fds);
        for fd in &fds {
            if self.arm_channel(fd).is_err() {
                // Lack of memory: it is looked at now and then.
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

    /// The filler is about to look at its channels.
    fn drain(&self) {
        // What does not fit tells of itself again.
        let _ = self
            .channels
            .wait(&mut [EpollEvent::empty(); 4], EpollTimeout::ZERO);
    }
}
