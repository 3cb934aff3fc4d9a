//! [`Port`]: the way to one server: a channel, or the opening of a new one; and [`Ports`], the ways
//! to all servers.
//!
//! The rule it keeps: no operation is lost on the way. Operations not posted yet wait here, in
//! order; posted ones come back from the channel. The choice to repeat an operation or to give it
//! up is left to the I/O queue.
//!
//! All channels of a port are on one [`Line`], so that an open channel proves that nothing of the
//! earlier ones is under way any more. Until then WRITEs that were given up may still land. Their
//! slots wait here for the next channel, which is opened for that and frees them.

use std::{
    collections::VecDeque,
    ops::{Index, IndexMut},
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, TryRecvError};
use farpage_fabric::{Buf, Busy, Channel, ChannelError, ConnectError, ExtentId, Line, Op, Session};

use crate::{blocking::Waker, health::ServerHealth, place::SlotSpan, pool::SlotPool};

/// Pause between two attempts to open a channel: doubled from the first to the last.
const BACKOFF_MIN: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_millis(200);

/// The way to one server.
pub(super) struct Port<B> {
    /// `None` for the stand-in of ports that were not made yet.
    line: Option<Line>,
    pub(super) state: PortState<B>,
    /// Operations not posted yet: the queue is full or there is no channel.
    pub(super) backlog: VecDeque<Op<B>>,
    backoff: Duration,
    failure: Option<ChannelError>,
    /// True if the last attempt to open a channel failed.
    has_failed_to_open: bool,
    /// Slots of WRITEs that were given up and may still land, each with the extent.
    in_doubt: Vec<(Arc<DoubtfulSlots>, Option<ExtentId>)>,
    /// True if a copy was passed over because the port is closed.
    is_wanted: bool,
    /// Health of all servers, and the number of this one. `None` for a stand-in.
    health: Option<(Arc<ServerHealth>, usize)>,
}

/// Slots of a write that was given up. The slots are free when the last port that a WRITE may still
/// land through has let go of these slots.
pub(super) struct DoubtfulSlots {
    pool: Arc<SlotPool>,
    slots: Vec<SlotSpan>,
    /// True if the slots are not used again: a port has ended, and nobody will know what lands. The
    /// doubt stays, so that the extent gets no parity.
    are_lost: AtomicBool,
}

impl DoubtfulSlots {
    /// Makes the slots, in a row, of a write that [ends](SlotPool::end_writes).
    pub(super) fn new(pool: &Arc<SlotPool>, slots: Vec<SlotSpan>) -> Arc<Self> {
        pool.begin_doubt(slots[0].place);
        Arc::new(Self {
            pool: pool.clone(),
            slots,
            are_lost: AtomicBool::new(false),
        })
    }
}

impl Drop for DoubtfulSlots {
    fn drop(&mut self) {
        match *self.are_lost.get_mut() {
            true => self.pool.settle_ended(self.slots.len()),
            false => self.pool.abandon(&self.slots),
        }
    }
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
    /// Makes a port with an open channel. With `may_be_closed`, a server that cannot be reached is
    /// no error: the channel is opened later.
    pub(super) fn new(
        session: &Arc<Session>,
        (health, server): (&Arc<ServerHealth>, usize),
        may_be_closed: bool,
    ) -> Result<Self, ConnectError> {
        let line = session.line();
        let mut port = Self {
            line: Some(line.clone()),
            health: Some((health.clone(), server)),
            ..Self::absent()
        };
        if may_be_closed && !port.is_fine() {
            // An attempt would take until its deadline.
            return Ok(port);
        }
        match line.channel() {
            Ok(channel) => {
                port.state = PortState::Open {
                    channel,
                    broken: false,
                }
            }
            Err(error) if may_be_closed => {
                health.failed(server);
                port.not_opened(Instant::now(), error.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(port)
    }

    /// Makes the port of a server that was added since. The channel is opened by the next
    /// [`recover`](Self::recover) or [`reopen`](Self::reopen).
    pub(super) fn added(session: &Arc<Session>, health: &Arc<ServerHealth>, server: usize) -> Self {
        Self {
            line: Some(session.line()),
            health: Some((health.clone(), server)),
            is_wanted: true,
            ..Self::absent()
        }
    }

    /// Makes the stand-in of ports that were not made yet: it is closed, and opens no channel.
    pub(super) fn absent() -> Self {
        Self {
            state: PortState::Closed(Instant::now()),
            line: None,
            backlog: VecDeque::new(),
            backoff: Duration::ZERO,
            failure: None,
            has_failed_to_open: false,
            in_doubt: Vec::new(),
            is_wanted: false,
            health: None,
        }
    }

    /// True if the server fell silent a moment ago, and nothing says yet that its channel does not
    /// open again.
    pub(super) fn may_reopen_soon(&self) -> bool {
        let may_answer =
            |(health, server): &(Arc<ServerHealth>, usize)| health.may_answer_soon(*server);
        !self.has_failed_to_open && self.health.as_ref().is_none_or(may_answer) && !self.is_lost()
    }

    /// True if the server is not suspect.
    pub(super) fn is_fine(&self) -> bool {
        let is_fine = |(health, server): &(Arc<ServerHealth>, usize)| health.is_fine(*server);
        self.health.as_ref().is_none_or(is_fine)
    }

    /// Asks for a channel if there is none. The next [`recover`](Self::recover) opens the channel.
    pub(super) fn want_channel(&mut self) {
        self.is_wanted = true;
    }

    /// True if a request or a copy was passed over because the port is closed.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Forgets that a channel was asked for.
    pub(super) fn forget_want(&mut self) {
        self.is_wanted = false;
    }

    /// True if a copy was passed over for want of a channel, and the server answers now.
    pub(super) fn lacks_channel(&self) -> bool {
        self.is_wanted && self.is_fine() && matches!(self.state, PortState::Closed(_))
    }

    /// Lets go of slots whose extent is not read any more: what lands there does no harm.
    pub(super) fn forget_doubts(&mut self) {
        let port = self.health.as_ref().map(|(_, server)| *server);
        self.in_doubt.retain(|(doubtful, extent)| {
            let extent = port.zip(*extent);
            extent.is_none_or(|extent| doubtful.pool.is_read(doubtful.slots[0].place, extent))
        });
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
                    self.in_doubt.clear();
                    self.is_wanted = false;
                    self.has_failed_to_open = false;
                    self.note(ServerHealth::succeeded);
                }
                Ok(Err(error)) => {
                    self.note(ServerHealth::failed);
                    self.not_opened(now, error.to_string());
                }
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

    /// True if the backlog, slots in doubt or a copy that was passed over need a channel.
    pub(super) fn wants_channel(&self) -> bool {
        !self.backlog.is_empty() || !self.in_doubt.is_empty() || self.is_wanted
    }

    /// Gives up a lost WRITE to `slots` in `extent`. The WRITE can still land unless a channel was
    /// opened since. If the port is open, one was: a lost WRITE breaks its own channel.
    pub(super) fn doubt(&mut self, slots: &Arc<DoubtfulSlots>, extent: Option<ExtentId>) {
        if !self.is_open() {
            self.in_doubt.push((slots.clone(), extent));
        }
    }

    /// True if no channel will ever reach the memory again.
    pub(super) fn is_lost(&self) -> bool {
        (self.line.as_ref()).is_some_and(|line| line.session().loss(false).is_some())
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
        self.note(ServerHealth::succeeded);
    }

    /// Marks the channel as broken: an operation failed for a transient reason.
    pub(super) fn failed(&mut self, error: &ChannelError) {
        self.failure = Some(error.clone());
        self.note(ServerHealth::failed);
        if let PortState::Open { broken, .. } = &mut self.state
            && !std::mem::replace(broken, true)
        {
            self.back_off();
        }
    }

    /// Gives up the slots in doubt when the port goes: no channel will tell what lands there.
    pub(super) fn give_up(&mut self) {
        for (doubtful, _) in self.in_doubt.drain(..) {
            doubtful.are_lost.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the error of operations that waited here past `deadline`.
    pub(super) fn why_late(&self, deadline: Duration) -> ChannelError {
        self.failure
            .clone()
            .unwrap_or_else(|| ChannelError::TimedOut {
                endpoint: self.endpoint(),
                deadline,
            })
    }

    fn open(&mut self, waker: &Arc<Waker>) {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let (Some(line), waker) = (self.line.clone(), waker.clone()) else {
            return;
        };
        let open = move || {
            // The I/O queue may be gone by now; then so is the channel.
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
        self.is_wanted = false;
        self.has_failed_to_open = true;
        self.failure = Some(ChannelError::Disconnected {
            endpoint: self.endpoint(),
            reason,
        });
    }

    /// Notes something about the server's health.
    fn note(&self, what: fn(&ServerHealth, usize)) {
        if let Some((health, server)) = &self.health {
            what(health, *server);
        }
    }

    fn endpoint(&self) -> String {
        match &self.line {
            Some(line) => line.session().endpoint().to_string(),
            None => "a server that was added just now".to_owned(),
        }
    }

    /// Lengthens the pause before the next attempt.
    fn back_off(&mut self) {
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
    }
}

/// Ports by the numbers of the servers. A server that was added since has none until the I/O queue
/// makes one, where memory may be allocated: its requests wait in a stand-in for the next look.
pub(super) struct Ports<B> {
    made: Vec<Port<B>>,
    /// Stand-in for all ports that were not made yet.
    pub(super) absent: Port<B>,
}

impl<B: Buf> Ports<B> {
    pub(super) fn new(made: Vec<Port<B>>) -> Self {
        Self {
            made,
            absent: Port::absent(),
        }
    }

    /// Returns the number of the ports that were made.
    pub(super) fn len(&self) -> usize {
        self.made.len()
    }

    /// Adds the port of the next server.
    pub(super) fn push(&mut self, port: Port<B>) {
        self.made.push(port);
    }

    pub(super) fn iter(&self) -> slice::Iter<'_, Port<B>> {
        self.made.iter()
    }

    pub(super) fn iter_mut(&mut self) -> slice::IterMut<'_, Port<B>> {
        self.made.iter_mut()
    }
}

impl<B> Index<usize> for Ports<B> {
    type Output = Port<B>;

    fn index(&self, server: usize) -> &Port<B> {
        self.made.get(server).unwrap_or(&self.absent)
    }
}

impl<B> IndexMut<usize> for Ports<B> {
    fn index_mut(&mut self, server: usize) -> &mut Port<B> {
        self.made.get_mut(server).unwrap_or(&mut self.absent)
    }
}
