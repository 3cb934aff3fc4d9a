//! [`Bundle`]: data connections that report to one completion queue, and [`RdmaChannel`], a bundle
//! of one.
//!
//! The rule it keeps: no wake-up is lost, and no completion. A bundle is one value, so that the
//! queue is polled, armed and slept on by the one thread that has it, and nobody takes a wake-up
//! that another waits for. The queue has room for every work request of all its queue pairs. What
//! completes carries the number of its [`Lane`]; a lane that fails ends its own operations, and
//! what is still reported of it afterwards is nobody's.

use std::{io, os::fd::AsFd, sync::Arc, time::Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    channel::{Lane, lane_of},
    verbs::{COMPLETIONS, Cq},
};
use crate::{Buf, Busy, Channel, Completion, Op, Wait, channel::Channels, stream::describe};

/// What became readable, in the bundle's own epoll: the queue, or the connection of the lane of
/// this number.
const COMPLETED: u64 = u64::MAX;

/// Events that one look brings; what is left comes with the next.
const EVENTS: usize = 8;

/// Several lanes and their queue.
pub(super) struct Bundle<B> {
    lanes: Vec<Lane<B>>,
    queue: Arc<Cq>,
    /// Readable when the armed queue has completions, or the connection manager has something to
    /// say.
    ready: Epoll,
    /// Whether the next completion will make `ready` readable, or has.
    is_armed: bool,
}

impl<B: Buf> Bundle<B> {
    /// The queue is that of all the lanes, which are numbered in their order.
    pub(super) fn new(queue: Arc<Cq>, lanes: Vec<Lane<B>>) -> io::Result<Self> {
        let ready = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let event = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        ready.add(&*queue, event(COMPLETED))?;
        for (number, lane) in (0..).zip(&lanes) {
            ready.add(lane.pair().id(), event(number))?;
        }
        Ok(Self {
            lanes,
            queue,
            ready,
            is_armed: false,
        })
    }

    fn turn(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) {
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            lane.begin_turn(&mut |completion| ended(number, completion));
        }
        if !self.lanes.iter().any(Lane::is_busy) {
            return;
        }
        let moved = self
            .collect(ended)
            .and_then(|any| if any { Ok(()) } else { self.look(ended) });
        if let Err(error) = moved {
            let reason = describe(&error);
            self.lanes.iter_mut().for_each(|lane| lane.fail(&reason));
        }
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            if lane.is_busy() {
                lane.end_turn(&mut |completion| ended(number, completion));
            }
        }
    }

    /// Hands back what has completed; whether there was anything.
    fn collect(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) -> io::Result<bool> {
        let mut any = false;
        loop {
            let mut reports = [None; COMPLETIONS];
            let count = self.queue.poll(&mut reports)?;
            any |= count > 0;
            for done in reports.into_iter().flatten() {
                let number = lane_of(&done);
                self.lanes[number].complete(done, &mut |completion| ended(number, completion));
            }
            if count < COMPLETIONS {
                return Ok(any);
            }
        }
    }

    /// Nothing has completed: makes sure that the next completion wakes, and hears what became of
    /// the connections.
    fn look(&mut self, ended: &mut impl FnMut(usize, Completion<B>)) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        // An interrupted look is as good as one that saw nothing.
        let count = self
            .ready
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                COMPLETED => self.is_armed &= !self.queue.take_wakeups(),
                number => self.lanes[number as usize].hear(),
            }
        }
        if !self.is_armed {
            self.queue.arm()?;
            self.is_armed = true;
            // What completed before the queue was armed does not wake.
            self.collect(ended)?;
        }
        Ok(())
    }

    fn sleep_on(&self) -> Wait<'_> {
        let busy = self.lanes.iter().any(Lane::is_busy);
        // A queue that is not armed wakes nobody: the next turn arms it, or finds something.
        if self.lanes.iter().any(Lane::is_ready) || busy && !self.is_armed {
            return Wait {
                until: Some(Instant::now()),
                ..Wait::default()
            };
        }
        if !busy {
            return Wait::default();
        }
        Wait {
            fd: Some(self.ready.0.as_fd()),
            readable: true,
            writable: false,
            until: self.lanes.iter().filter_map(Lane::until).min(),
        }
    }
}

impl<B: Buf> Channels<B> for Bundle<B> {
    fn post(&mut self, number: usize, op: Op<B>) -> Result<(), Busy<B>> {
        self.lanes[number].post(op)
    }

    fn poll(&mut self, ended: &mut dyn FnMut(usize, Completion<B>)) {
        self.turn(&mut |number, completion| ended(number, completion));
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(Lane::in_flight).sum()
    }

    fn wait(&self) -> Wait<'_> {
        self.sleep_on()
    }
}

/// One queue pair with a queue of its own.
pub(super) struct RdmaChannel<B>(pub(super) Bundle<B>);

impl<B: Buf> Channel<B> for RdmaChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        self.0.lanes[0].post(op)
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        self.0.turn(&mut |_, completion| done.push(completion));
        done.len() - before
    }

    /// A reliable connection executes requests in their order.
    fn writes_in_order(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.0.lanes[0].in_flight()
    }

    fn wait(&self) -> Wait<'_> {
        self.0.sleep_on()
    }
}
