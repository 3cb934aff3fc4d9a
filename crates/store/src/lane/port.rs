//! [`Port`]: the way to one server, a channel or how to get a new one.
//!
//! The rule it keeps: no operation is lost on the way. What is not posted yet waits here, in order;
//! what was posted comes back from the channel. Whether an operation is repeated or given up is
//! left to the lane.
//!
//! All channels of a port are on one [`Line`], so that an open one says that nothing of the earlier
//! ones is under way any more. Until then WRITEs that were given up may still land: their slots
//! wait here, and are freed by the next channel, which is opened for that.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, TryRecvError};
use farpage_fabric::{Buf, Busy, Channel, ChannelError, ConnectError, Line, Op, Session};

use crate::{blocking::Waker, place::Span, pool::SlotPool};

/// Between two attempts to open a channel: doubled from the first to the last.
const BACKOFF_MIN: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_millis(200);

/// The way to one server.
pub(super) struct Port<B> {
    line: Line,
    pub(super) state: PortState<B>,
    /// Not posted yet: the queue is full or there is no channel.
    pub(super) backlog: VecDeque<Op<B>>,
    backoff: Duration,
    failure: Option<ChannelError>,
    /// Slots of WRITEs that were given up and may still land.
    in_doubt: Vec<(Arc<SlotPool>, Vec<Span>)>,
}

type ChannelResult<B> = Result<Box<dyn Channel<B>>, ConnectError>;

pub(super) enum PortState<B> {
    /// `broken`: an operation failed; what is in flight still has to come back.
    Open {
        channel: Box<dyn Channel<B>>,
        broken: bool,
    },
    /// A thread opens a channel and rings.
    Opening(Receiver<ChannelResult<B>>),
    /// Not to be tried before this time.
    Closed(Instant),
}

impl<B: Buf> Port<B> {
    /// A port with an open channel.
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

    /// Posts what waits, as far as the channel takes it.
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

    /// Whether operations can be posted: neither broken nor closed.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, PortState::Open { broken: false, .. })
    }

    /// From a broken channel to a new one, a step at a time. Without a waker none is opened.
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

    /// Whether there is something that a channel is to be opened for.
    pub(super) fn wants_channel(&self) -> bool {
        !self.backlog.is_empty() || !self.in_doubt.is_empty()
    }

    /// Gives up a lost WRITE to these slots. It can still land unless a channel was opened since.
    /// If the port is open, one was: a lost WRITE breaks its own channel.
    pub(super) fn doubt(&mut self, pool: &Arc<SlotPool>, slots: Vec<Span>) {
        if self.is_open() {
            return pool.abandon(&slots);
        }
        self.in_doubt.push((pool.clone(), slots));
    }

    /// Returns true if no channel will ever reach the memory again.
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

    /// An operation ended as it should.
    pub(super) fn succeeded(&mut self) {
        self.backoff = Duration::ZERO;
    }

    /// An operation failed for a transient reason: the channel is dead.
    pub(super) fn failed(&mut self, error: &ChannelError) {
        self.failure = Some(error.clone());
        if let PortState::Open { broken, .. } = &mut self.state
            && !std::mem::replace(broken, true)
        {
            self.back_off();
        }
    }

    /// The port goes. The slots in doubt are given up: nobody will know what lands there.
    pub(super) fn give_up(&mut self) {
        for (pool, slots) in self.in_doubt.drain(..) {
            pool.settle(slots.len());
        }
    }

    /// The error of operations that waited here past `deadline`.
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

    /// The next attempt comes after a longer pause.
    fn back_off(&mut self) {
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
    }
}
