//! [`Port`]: the way to one server: a channel, or the opening of a new one.
//!
//! The rule it keeps: no operation is lost on the way. Operations not posted yet wait here, in
//! order; posted ones come back from the channel. The choice to repeat an operation or to give it
//! up is left to the lane.
//!
//! All channels of a port are on one [`Line`], so that an open channel proves that nothing of the
//! earlier ones is under way any more. Until then WRITEs that were given up may still land. Their
//! slots wait here for the next channel, which is opened for that and frees them.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, TryRecvError};
use farpage_fabric::{Buf, Busy, Channel, ChannelError, ConnectError, Line, Op, Session};

use crate::{blocking::Waker, place::SlotSpan, pool::SlotPool};

/// Pause between two attempts to open a channel: doubled from the first to the last.
const BACKOFF_MIN: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_millis(200);

/// The way to one server.
pub(super) struct Port<B> {
    line: Line,
    pub(super) state: PortState<B>,
    /// Operations not posted yet: the queue is full or there is no channel.
    pub(super) backlog: VecDeque<Op<B>>,
    backoff: Duration,
    failure: Option<ChannelError>,
    /// Slots of WRITEs that were given up and may still land.
    in_doubt: Vec<(Arc<SlotPool>, Vec<SlotSpan>)>,
}

type ChannelResult<B> = Result<Box<dyn Channel<B>>, ConnectError>;

pub(super) enum PortState<B> {
    /// An open channel. `broken`: an operation failed; requests in flight still have to come back.
    Open {
        channel: Box<dyn Channel<B>>,
        broken: bool,
    },
    /// A thread opens a channel and rings.
    Opening(Receiver<ChannelResult<B>>),
    /// A lost channel, which is not to be reopened before this time.
    Closed(Instant),
}

impl<B: Buf> Port<B> {
    /// Makes a port with an open channel.
    pub(super) fn new(session: &Arc<Session>) -> Result<Self, ConnectError> {
        let line = session.line();
        Ok(Self {
            state: PortState::Open {
                channel: line.channel()?,
                broken: false,
            },
            line,
            backlog: VecDeque::new(),
            backoff: Duration::ZERO,
            failure: None,
            in_doubt: Vec::new(),
        })
    }

    /// Posts the operation, now or later.
    pub(super) fn post(&mut self, op: Op<B>) {
        self.backlog.push_back(op);
        self.post_backlog();
    }

    /// Posts the backlog, as far as the channel takes it.
    pub(super) fn post_backlog(&mut self) {
        let PortState::Open {
            channel,
            broken: false,
        } = &mut self.state
        else {
            return;
        };
        while let Some(op) = self.backlog.pop_front() {
            if let Err(Busy(op)) = channel.post(op) {
                self.backlog.push_front(op);
                return;
            }
        }
    }

    /// True if operations can be posted: the channel is neither broken nor closed.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, PortState::Open { broken: false, .. })
    }

    /// Takes a step from a broken channel to a new one. Without a waker no channel is opened.
    pub(super) fn recover(&mut self, now: Instant, waker: Option<&Arc<Waker>>) {
        let wants_channel = self.wants_channel();
        match &mut self.state {
            PortState::Open {
                channel,
                broken: true,
            } if channel.in_flight() == 0 => {
                self.state = PortState::Closed(now + self.backoff);
            }
            PortState::Open { .. } => {}
            PortState::Opening(result) => match result.try_recv() {
                Ok(Ok(channel)) => {
                    self.state = PortState::Open {
                        channel,
                        broken: false,
                    };
                    for (pool, slots) in self.in_doubt.drain(..) {
                        pool.abandon(&slots);
                    }
                }
                Ok(Err(error)) => self.not_opened(now, error.to_string()),
                Err(TryRecvError::Disconnected) => {
                    self.not_opened(now, "the thread that opens it died".to_owned())
                }
                Err(TryRecvError::Empty) => {}
            },
            PortState::Closed(at) if *at <= now && wants_channel => {
                if let Some(waker) = waker {
                    self.open(waker);
                }
            }
            PortState::Closed(_) => {}
        }
    }

    /// True if the backlog or slots in doubt need a channel.
    pub(super) fn wants_channel(&self) -> bool {
        !self.backlog.is_empty() || !self.in_doubt.is_empty()
    }

    /// Gives up a lost WRITE to `slots`. The WRITE can still land unless a channel was opened
    /// since. If the port is open, one was: a lost WRITE breaks its own channel.
    pub(super) fn doubt(&mut self, pool: &Arc<SlotPool>, slots: Vec<SlotSpan>) {
        if self.is_open() {
            return pool.abandon(&slots);
        }
        self.in_doubt.push((pool.clone(), slots));
    }

    /// True if no channel will ever reach the memory again.
    pub(super) fn is_lost(&self) -> bool {
        self.line.session().loss(false).is_some()
    }

    /// Begins to open a channel if there is none.
    pub(super) fn reopen(&mut self, waker: &Arc<Waker>) {
        self.recover(Instant::now(), None);
        if matches!(self.state, PortState::Closed(_)) {
            self.open(waker);
        }
    }

    /// Ends the back-off: an operation ended as it should.
    pub(super) fn succeeded(&mut self) {
        self.backoff = Duration::ZERO;
    }

    /// Marks the channel as broken: an operation failed for a transient reason.
    pub(super) fn failed(&mut self, error: &ChannelError) {
        self.failure = Some(error.clone());
        if let PortState::Open { broken, .. } = &mut self.state
            && !std::mem::replace(broken, true)
        {
            self.back_off();
        }
    }

    /// Gives up the slots in doubt when the port goes: no channel will tell what lands there.
    pub(super) fn give_up(&mut self) {
        for (pool, slots) in self.in_doubt.drain(..) {
            pool.settle(slots.len());
        }
    }

    /// Returns the error of operations that waited here past `deadline`.
    pub(super) fn why_late(&self, deadline: Duration) -> ChannelError {
        self.failure
            .clone()
            .unwrap_or_else(|| ChannelError::TimedOut {
                endpoint: self.line.session().endpoint().to_string(),
                deadline,
            })
    }

    fn open(&mut self, waker: &Arc<Waker>) {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let (line, waker) = (self.line.clone(), waker.clone());
        let open = move || {
            // The lane may be gone by now; then so is the channel.
            let _ = sender.send(line.channel());
            waker.wake();
        };
        match farpage_tables::errand("farpage-reopen", open) {
            Ok(()) => self.state = PortState::Opening(receiver),
            Err(error) => self.not_opened(Instant::now(), error.to_string()),
        }
    }

    fn not_opened(&mut self, now: Instant, reason: String) {
        self.back_off();
        self.state = PortState::Closed(now + self.backoff);
        self.failure = Some(ChannelError::Disconnected {
            endpoint: self.line.session().endpoint().to_string(),
            reason,
        });
    }

    /// Lengthens the pause before the next attempt.
    fn back_off(&mut self) {
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
    }
}
