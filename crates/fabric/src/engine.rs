//! [`CompletionEngine`] waits for operations to end; [`Waiter`] polls, sleeps or does both.
//!
//! The rule it keeps: no completion is missed. Notification is one-shot: an operation that ended
//! before the notification was armed wakes nobody. A waiter arms, polls once more, and then sleeps.
//!
//! One thread that serves many connections opens them with [`CompletionEngine::open`], so that they
//! share a completion queue: one poll finds what has ended on any of them, and there is one
//! descriptor to sleep on. Workers that serve connections of their own have an engine each.
//! Channels that share a queue stay in one engine, because two threads at one queue would take each
//! other's wake-ups.

use std::{
    hint, io,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, ppoll},
    sys::time::TimeSpec,
};

use crate::{
    Buf, Busy, Channel, Completion, ConnectError, Op, PollInterest, Session,
    channel::{Group, SingleChannel},
};

/// Upper bound of a spin: several times a wake-up's cost. Longer waits are not worth a core.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// Polls between two looks at the clock. The core is then yielded, because the thread that makes
/// the awaited event may need it.
const POLLS: u32 = 64;

/// Way of waiting of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitMode {
    /// Polls without end: least latency, one core.
    Poll,
    /// Sleeps until it is woken.
    Event,
    /// Polls for twice as long as recent waits took, then sleeps. Sleeps at once when they took
    /// longer than spinning is worth.
    #[default]
    Adaptive,
}

/// A source of items that a thread can wait for.
pub trait Source {
    /// Result of waiting.
    type Item;
    /// Takes an item if there is one now.
    fn poll(&mut self) -> Option<Self::Item>;
    /// Makes [`sleep`](Self::sleep) return on every event from now on.
    fn arm(&mut self);
    /// Sleeps until something may have happened since [`arm`](Self::arm), or until `until`.
    ///
    /// # Errors
    /// The system's error.
    fn sleep(&mut self, until: Option<Instant>) -> io::Result<()>;
}

/// A way of waiting, with the average of recent waits.
#[derive(Clone, Debug, Default)]
pub struct Waiter {
    waiting: WaitMode,
    /// Average of recent waits. Each new one counts an eighth.
    recent: Duration,
}

impl Waiter {
    /// Makes a waiter that has no recent waits.
    pub fn new(waiting: WaitMode) -> Self {
        Self {
            waiting,
            recent: Duration::ZERO,
        }
    }

    /// Waits until the source has an item. Returns `None` if `until` comes first.
    ///
    /// # Errors
    /// The source's error from sleeping.
    pub fn wait<S: Source>(
        &mut self,
        source: &mut S,
        until: Option<Instant>,
    ) -> io::Result<Option<S::Item>> {
        if let Some(item) = source.poll() {
            return Ok(Some(item));
        }
        let begin = Instant::now();
        let item = self.wait_from(begin, source, until)?;
        self.recent = (self.recent * 7 + begin.elapsed()) / 8;
        Ok(item)
    }

    fn wait_from<S: Source>(
        &self,
        begin: Instant,
        source: &mut S,
        until: Option<Instant>,
    ) -> io::Result<Option<S::Item>> {
        // 1. Look.
        let spin = match self.waiting {
            WaitMode::Poll => Some(Duration::MAX),
            WaitMode::Event => None,
            WaitMode::Adaptive => (self.recent * 2 <= SPIN_MAX).then_some(self.recent * 2),
        };
        let late = |now: Instant| until.is_some_and(|until| now >= until);
        while let Some(spin) = spin {
            for _ in 0..POLLS {
                if let Some(item) = source.poll() {
                    return Ok(Some(item));
                }
                hint::spin_loop();
            }
            let now = Instant::now();
            if late(now) {
                return Ok(None);
            }
            if now - begin >= spin {
                break;
            }
            thread::yield_now();
        }
        // 2. Arm, look once more, sleep.
        loop {
            source.arm();
            if let Some(item) = source.poll() {
                return Ok(Some(item));
            }
            if late(Instant::now()) {
                return Ok(None);
            }
            source.sleep(until)?;
        }
    }
}

/// An engine of channels, which waits for their operations.
pub struct CompletionEngine<B> {
    queues: Queues<B>,
    waiter: Waiter,
}

struct Queues<B> {
    groups: Vec<Group<B>>,
    /// Group, and index in the group, of each channel by its number.
    places: Vec<(usize, usize)>,
}

impl<B: Buf> CompletionEngine<B> {
    /// Makes an engine without channels.
    pub fn new(waiting: WaitMode) -> Self {
        Self {
            queues: Queues {
                groups: Vec::new(),
                places: Vec::new(),
            },
            waiter: Waiter::new(waiting),
        }
    }

    /// Adds a channel, which keeps its own queue. Returns its number, counted from 0.
    pub fn add(&mut self, channel: Box<dyn Channel<B>>) -> usize {
        let number = self.queues.places.len();
        self.queues.places.push((self.queues.groups.len(), 0));
        self.queues.groups.push(Group {
            channels: Box::new(SingleChannel::new(channel)),
            numbers: vec![number],
        });
        number
    }

    /// Opens one channel per entry of `sessions` and adds them. A session may be listed several
    /// times. Returns the channels' numbers, in the same order.
    ///
    /// Over RDMA, channels through one adapter share a completion queue, with room for all
    /// operations that they may have in flight. A channel that dies ends only its own operations.
    /// Without an adapter, and behind a [`Link`](crate::Link), each channel has a queue of its own.
    ///
    /// # Errors
    /// [`ConnectError`], within the deadlines of the sessions' options, also when the adapter's
    /// queues are too small for so many channels. The engine is then unchanged.
    pub fn open(&mut self, sessions: &[Arc<Session>]) -> Result<Range<usize>, ConnectError> {
        let groups = Session::channels(sessions)?;
        let first = self.queues.places.len();
        let numbers = first..first + sessions.len();
        self.queues.places.resize(numbers.end, (0, 0));
        for mut group in groups {
            for (place, number) in group.numbers.iter_mut().enumerate() {
                *number += first;
                self.queues.places[*number] = (self.queues.groups.len(), place);
            }
            self.queues.groups.push(group);
        }
        Ok(numbers)
    }

    /// Posts `op` on the channel with number `channel`.
    ///
    /// # Errors
    /// [`Busy`] with the operation when the channel's queue is full.
    ///
    /// # Panics
    /// If there is no such channel, and when [`Channel::post`] does.
    pub fn post(&mut self, channel: usize, op: Op<B>) -> Result<(), Busy<B>> {
        let (group, place) = self.queues.places[channel];
        self.queues.groups[group].channels.post(place, op)
    }

    /// Returns the number of operations that have not ended, over all channels.
    pub fn in_flight(&self) -> usize {
        let groups = self.queues.groups.iter();
        groups.map(|group| group.channels.in_flight()).sum()
    }

    /// Waits until an operation has ended or `until` has come. Appends the ended operations to
    /// `done`, each with the number of its channel. Returns at once when nothing is in flight.
    ///
    /// # Errors
    /// The system's error while sleeping.
    pub fn wait(
        &mut self,
        done: &mut Vec<(usize, Completion<B>)>,
        until: Option<Instant>,
    ) -> io::Result<usize> {
        if self.in_flight() == 0 {
            return Ok(0);
        }
        let ended = self.waiter.wait(&mut self.queues, until)?;
        let before = done.len();
        done.extend(ended.into_iter().flatten());
        Ok(done.len() - before)
    }
}

impl<B: Buf> Source for Queues<B> {
    type Item = Vec<(usize, Completion<B>)>;

    fn poll(&mut self) -> Option<Self::Item> {
        let mut ended = Vec::new();
        for Group { channels, numbers } in &mut self.groups {
            if channels.in_flight() > 0 {
                channels.poll(&mut |place, completion| ended.push((numbers[place], completion)));
            }
        }
        (!ended.is_empty()).then_some(ended)
    }

    /// Arms the completions of all channels, which [`Channel::wait`] does.
    fn arm(&mut self) {
        for group in &self.groups {
            group.channels.wait();
        }
    }

    fn sleep(&mut self, until: Option<Instant>) -> io::Result<()> {
        sleep(self.groups.iter().map(|group| group.channels.wait()), until)
    }
}

/// Sleeps until one of several channels may have something to do, or until `until`. A signal ends
/// the sleep, too.
///
/// # Errors
/// The system's error.
pub fn sleep<'a>(
    waits: impl IntoIterator<Item = PollInterest<'a>>,
    mut until: Option<Instant>,
) -> io::Result<()> {
    let mut fds = Vec::new();
    for wait in waits {
        until = until.into_iter().chain(wait.until).min();
        fds.extend(wait.poll_fd());
    }
    sleep_on(&mut fds, until)
}

/// Sleeps until one of `fds` is ready, or until `until`. A signal ends the sleep, too.
pub(super) fn sleep_on(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    let timeout =
        until.map(|until| TimeSpec::from(until.saturating_duration_since(Instant::now())));
    match ppoll(fds, timeout, None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
