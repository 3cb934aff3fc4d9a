//! [`Bundle`]: data connections that report to one completion queue, and [`RdmaChannel`], a bundle
//! of one.
//!
//! The rule it keeps: no wake-up is lost, and no completion. One thread at a time has the bundle.
//! It polls, arms and sleeps on the completion queue, so no thread takes a wake-up that another
//! waits for. The completion queue has room for every work request of all queue pairs. A completion
//! carries the number of its [`SendQueue`]. A send queue that fails ends its own operations;
//! completions that still come for it are thrown away.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Instant,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    channel::{SendQueue, number_of},
    verbs::{COMPLETIONS, Cq, Pair},
};
use crate::{
    Buf, Busy, Channel, Completion, Op, PollInterest, channel::Channels, nonblocking::describe,
};

/// Token of the completion queue in the bundle's own epoll. Any other token is the number of the
/// send queue whose connection became readable.
const COMPLETED: u64 = u64::MAX;

/// Upper bound of the events that one look brings; the rest comes with the next.
const EVENTS: usize = 8;

/// Several send queues and their completion queue.
pub(super) struct Bundle<B> {
    queues: Vec<SendQueue<B>>,
    cq: Arc<Cq>,
    /// Readable when the armed completion queue has completions, or when the connection manager has
    /// an event.
    ready: Epoll,
    /// True if the next completion will make `ready` readable, or has.
    is_armed: bool,
}

impl<B: Buf> Bundle<B> {
    /// Makes a bundle of `queues`, which are numbered in their order and all report to `cq`.
    pub(super) fn new(cq: Arc<Cq>, queues: Vec<SendQueue<B>>) -> io::Result<Self> {
        let ready = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let event = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        ready.add(&*cq, event(COMPLETED))?;
        for (number, queue) in (0..).zip(&queues) {
            ready.add(queue.pair().id(), event(number))?;
        }
        Ok(Self {
            queues,
            cq,
            ready,
            is_armed: false,
        })
    }

    fn turn(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) {
        for (number, queue) in self.queues.iter_mut().enumerate() {
            queue.begin_turn(&mut |completion| ended(number, completion));
        }
        if !self.queues.iter().any(SendQueue::is_busy) {
            return;
        }
        let moved = self
            .collect(ended)
            .and_then(|any| if any { Ok(()) } else { self.look(ended) });
        if let Err(error) = moved {
            let reason = describe(&error);
            self.queues.iter_mut().for_each(|queue| queue.fail(&reason));
        }
        for (number, queue) in self.queues.iter_mut().enumerate() {
            if queue.is_busy() {
                queue.end_turn(&mut |completion| ended(number, completion));
            }
        }
    }

    /// Hands completed operations back. True if there were any.
    fn collect(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) -> io::Result<bool> {
        let mut any = false;
        loop {
            let mut reports = [None; COMPLETIONS];
            let count = self.cq.poll(&mut reports)?;
            any |= count > 0;
            for done in reports.into_iter().flatten() {
                let number = number_of(&done);
                self.queues[number].complete(done, &mut |completion| ended(number, completion));
            }
            if count < COMPLETIONS {
                return Ok(any);
            }
        }
    }

    /// Arms the completion queue after a turn without completions, so that the next one wakes, and
    /// takes the events of the connections.
    fn look(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        // An interrupted look is as good as one that saw nothing.
        let count = self
            .ready
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                COMPLETED => self.is_armed &= !self.cq.take_wakeups(),
                number => self.queues[number as usize].hear(),
            }
        }
        if !self.is_armed {
            self.cq.arm()?;
            self.is_armed = true;
            // Completions from before `cq` was armed do not wake.
            self.collect(ended)?;
        }
        Ok(())
    }

    fn sleep_on(&self) -> PollInterest<'_> {
        let busy = self.queues.iter().any(SendQueue::is_busy);
        // A completion queue that is not armed wakes nobody: the next turn arms it, or finds
        // something.
        if self.queues.iter().any(SendQueue::is_ready) || busy && !self.is_armed {
            return PollInterest {
                until: Some(Instant::now()),
                ..PollInterest::default()
            };
        }
        if !busy {
            return PollInterest::default();
        }
        PollInterest {
            fd: Some(self.ready.0.as_fd()),
            readable: true,
            writable: false,
            until: self.queues.iter().filter_map(SendQueue::until).min(),
        }
    }
}

impl<B: Buf> Channels<B> for Bundle<B> {
    fn post(&mut self, number: usize, op: Op<B>) -> Result<(), Busy<B>> {
        self.queues[number].post(op)
    }

    fn poll(&mut self, ended: &mut dyn FnMut(usize, Completion<B>)) {
        self.turn(&mut |number, completion| ended(number, completion));
    }

    fn in_flight(&self) -> usize {
        self.queues.iter().map(SendQueue::in_flight).sum()
    }

    fn wait(&self) -> PollInterest<'_> {
        self.sleep_on()
    }
}

/// One queue pair with a completion queue of its own.
pub(super) struct RdmaChannel<B>(pub(super) Bundle<B>);

impl<B: Buf> RdmaChannel<B> {
    pub(super) fn pair(&self) -> &Pair {
        self.0.queues[0].pair()
    }
}

impl<B> AsFd for RdmaChannel<B> {
    /// Returns a descriptor that is readable on an awaited completion, or on an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ready.0.as_fd()
    }
}

impl<B: Buf> Channel<B> for RdmaChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.0.queues[0].post(op)
    }

    fn post_notifying(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.0.queues[0].post_telling(op, true)
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        self.0.turn(&mut |_, completion| done.push(completion));
        done.len() - before
    }

    /// Returns true: a reliable connection executes requests in their order.
    fn writes_in_order(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.0.queues[0].in_flight()
    }

    fn wait(&self) -> PollInterest<'_> {
        self.0.sleep_on()
    }
}
