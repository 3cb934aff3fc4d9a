//! [`Poller`]: one thread that serves the small batches of many data connections.
//!
//! The rule it keeps: the thread waits for no client. A batch that is not small, is malformed, or
//! whose answer the socket does not take, goes back to the connection's own thread with all bytes
//! that have come. So every other case is dealt with in [`super::serving`] alone.
//!
//! Clients may wait for one another, as workers do that exchange through a program of theirs. With
//! a thread each, every client would wake one, which then wakes the others: two changes of threads
//! per client. Here the last client's batch and all answers are one piece of work.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{
    SessionId,
    data::{ANSWER_HEADER_BYTES, OP_HEADER_BYTES, OPERAND_BYTES, OpHeader, OpKind},
};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;

use super::{announcements::Wake, ring::Board};
use crate::{
    host::Host,
    log::later,
    nonblocking::retry,
    server::{Batch, BatchVectors, CloseReason, Rest, ServerTraffic, still_leased},
    stream::PeerStream,
};

/// The most bytes of a small batch, and of its answer, headers included. Such a batch is copied
/// once more than others.
pub(crate) const SMALL_BYTES: usize = 72 << 10;

/// Upper bound of the connections whose events one look brings.
const EVENTS: usize = 16;
/// Token of the eventfd that wakes the thread.
const WOKEN: u64 = u64::MAX;

/// A data connection that leaves its small batches to the shared thread.
pub(crate) struct Delegation {
    pub(crate) stream: Arc<PeerStream>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) traffic: Arc<ServerTraffic>,
    pub(crate) session: SessionId,
    /// Number of the next operation.
    pub(crate) sequence: u32,
    /// Bytes that have come and were not taken.
    pub(crate) come: Vec<u8>,
}

/// A connection that goes back to its own thread.
pub(crate) struct DelegationEnd {
    /// Number of the next operation, as in [`Delegation`].
    pub(crate) sequence: u32,
    pub(crate) come: Vec<u8>,
    /// The end of an answer that the socket did not take.
    pub(crate) unsent: Vec<u8>,
}

type SendEnd = mpsc::Sender<Result<DelegationEnd, CloseReason>>;

/// State that the data connections of a server share if its host exchanges.
#[derive(Default)]
pub(crate) struct Exchange {
    /// Number of data connections over sockets.
    connections: AtomicUsize,
    poller: OnceLock<Option<Poller>>,
}

/// A data connection, counted until this is dropped.
pub(crate) struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Exchange {
    /// Counts a data connection that is served now.
    pub(crate) fn count(&self) -> Counted<'_> {
        self.connections.fetch_add(1, Ordering::Relaxed);
        Counted(&self.connections)
    }

    /// Returns the thread that serves small batches, if there are several connections, whose
    /// clients may wait for one another.
    pub(crate) fn poller(&self) -> Option<&Poller> {
        if self.connections.load(Ordering::Relaxed) < 2 {
            return None;
        }
        let start = || {
            // Each connection then goes on with its own thread.
            let failed = |error| tracing::warn!(%error, "no thread for all data connections");
            Poller::start()
                .map_err(|error| later(move || failed(error)))
                .ok()
        };
        self.poller.get_or_init(start).as_ref()
    }
}

/// The thread, which ends when this is dropped.
pub(crate) struct Poller {
    shared: Arc<DelegationQueue>,
    thread: Option<JoinHandle<()>>,
}

struct DelegationQueue {
    ready: Epoll,
    wake: EventFd,
    /// True if a thread that has news must write to `wake`. Sequentially consistent, against the
    /// news itself: either the thread sees the news before it sleeps, or it is woken.
    is_asleep: AtomicBool,
    is_over: AtomicBool,
    new: Mutex<Vec<(Delegation, SendEnd)>>,
}

impl Wake for DelegationQueue {
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            // Fails only when the counter is full, and then it is readable already.
            let _ = self.wake.write(1);
        }
    }
}

impl Poller {
    pub(crate) fn start() -> io::Result<Self> {
        let ready = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        ready.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, WOKEN))?;
        let shared = Arc::new(DelegationQueue {
            ready,
            wake,
            is_asleep: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            new: Mutex::default(),
        });
        let served = Arc::clone(&shared);
        let thread = thread::Builder::new().name("farpage-conn-all".to_owned());
        let thread = thread.spawn(move || SeatTable::new(served).serve())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Takes `guest` over. The receiver hears when the connection's own thread has to go on.
    pub(crate) fn serve(
        &self,
        guest: Delegation,
    ) -> mpsc::Receiver<Result<DelegationEnd, CloseReason>> {
        let (back, here) = mpsc::channel();
        self.shared.new.lock().push((guest, back));
        self.shared.wake();
        here
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message.
            let _ = thread.join();
        }
    }
}

/// State that only the thread uses.
struct SeatTable {
    shared: Arc<DelegationQueue>,
    seats: HashMap<u64, Seat>,
    last: u64,
}

struct Seat {
    guest: Delegation,
    back: SendEnd,
    /// Buffer whose first `come` bytes have been received.
    buffer: Box<[u8]>,
    come: usize,
    /// True if more has come than there was room for, while an answer waited.
    has_more: bool,
    batch: Batch,
    vectors: BatchVectors,
    /// Time at which the answer to `batch` cannot wait for numbers any longer. `None`: no answer
    /// waits.
    until: Option<Instant>,
}

/// Reason why a connection leaves.
enum Leave {
    /// The connection's own thread sends these bytes, and decides about those that have come or
    /// will come.
    GoOn(Vec<u8>),
    Close(CloseReason),
}

impl Leave {
    /// The connection's own thread decides.
    const ASK: Self = Self::GoOn(Vec::new());
}

impl SeatTable {
    fn new(shared: Arc<DelegationQueue>) -> Self {
        Self {
            shared,
            seats: HashMap::new(),
            last: 0,
        }
    }

    fn serve(mut self) {
        while !self.shared.is_over.load(Ordering::SeqCst) {
            self.seat_new();
            // Bytes of one client may be what others wait for.
            while let Some(number) = self.due() {
                self.turn(number, |seat, shared| {
                    seat.answer()?;
                    match seat.has_more {
                        true => seat.receive(shared, false),
                        false => seat.take_batches(shared),
                    }
                });
            }
            self.sleep();
        }
    }

    fn due(&mut self) -> Option<u64> {
        let mut seats = self.seats.iter_mut();
        seats.find_map(|(number, seat)| seat.is_due().then_some(*number))
    }

    fn seat_new(&mut self) {
        let new = std::mem::take(&mut *self.shared.new.lock());
        for (guest, back) in new {
            self.last += 1;
            let number = self.last;
            let mut buffer = vec![0; SMALL_BYTES.max(guest.come.len())].into_boxed_slice();
            buffer[..guest.come.len()].copy_from_slice(&guest.come);
            let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
            let event = EpollEvent::new(edges, number);
            let is_watched = self.shared.ready.add(guest.stream.as_fd(), event).is_ok();
            let seat = Seat {
                come: guest.come.len(),
                guest,
                back,
                buffer,
                has_more: false,
                batch: Batch::default(),
                vectors: BatchVectors::default(),
                until: None,
            };
            self.seats.insert(number, seat);
            self.turn(number, |seat, shared| match is_watched {
                true => seat.receive(shared, false),
                false => Err(Leave::ASK),
            });
        }
    }

    /// Sleeps until a client has sent something, there is news, or a wait is over. Then serves the
    /// bytes that have come.
    fn sleep(&mut self) {
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let has_news = self.shared.is_over.load(Ordering::SeqCst)
            || !self.shared.new.lock().is_empty()
            || self.due().is_some();
        let until = self.seats.values().filter_map(|seat| seat.until).min();
        let timeout = match (has_news, until) {
            (true, _) => EpollTimeout::ZERO,
            (false, None) => EpollTimeout::NONE,
            // Rounded up, so that the wait is over then. No answer waits much beyond a second.
            (false, Some(until)) => {
                let left =
                    until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                EpollTimeout::from(left.as_millis().min(10_000) as u16)
            }
        };
        let mut events = [EpollEvent::empty(); EVENTS];
        // An interrupted sleep is as good as one that found nothing.
        let count = self.shared.ready.wait(&mut events, timeout).unwrap_or(0);
        self.shared.is_asleep.store(false, Ordering::SeqCst);
        for event in &events[..count] {
            match event.data() {
                // Read so that it wakes again; the thread looks for the news anyway.
                WOKEN => drop(self.shared.wake.read()),
                number => {
                    let may_have_ended = event.events() != EpollFlags::EPOLLIN;
                    self.turn(number, |seat, shared| seat.receive(shared, may_have_ended));
                }
            }
        }
    }

    /// Runs `act` for the connection `number`, which leaves if `act` says so.
    fn turn(
        &mut self,
        number: u64,
        act: impl FnOnce(&mut Seat, &Arc<DelegationQueue>) -> Result<(), Leave>,
    ) {
        let Some(seat) = self.seats.get_mut(&number) else {
            return;
        };
        let Err(leave) = act(seat, &self.shared) else {
            return;
        };
        let Seat {
            guest,
            back,
            buffer,
            come,
            ..
        } = self.seats.remove(&number).expect("it has a seat");
        // Fails only for a connection that was never watched.
        let _ = self.shared.ready.delete(guest.stream.as_fd());
        // The connection's own thread has gone only if the process ends.
        let _ = back.send(match leave {
            Leave::GoOn(unsent) => Ok(DelegationEnd {
                sequence: guest.sequence,
                come: buffer[..come].to_vec(),
                unsent,
            }),
            Leave::Close(reason) => Err(reason),
        });
    }
}

impl Seat {
    /// Receives bytes and serves their batches. `may_have_ended`: reads on until no more have come.
    fn receive(
        &mut self,
        shared: &Arc<DelegationQueue>,
        may_have_ended: bool,
    ) -> Result<(), Leave> {
        loop {
            self.take_batches(shared)?;
            let room = self.buffer.len() - self.come;
            self.has_more = room == 0;
            if self.has_more {
                return Ok(());
            }
            match self.guest.stream.read(&mut self.buffer[self.come..]) {
                Ok(0) => return Err(Leave::ASK),
                Ok(bytes) => {
                    self.come += bytes;
                    // The next byte, and the end, wake.
                    if bytes < room && !may_have_ended {
                        return self.take_batches(shared);
                    }
                }
                Err(error) if retry(&error) => return Ok(()),
                Err(_) => return Err(Leave::ASK),
            }
        }
    }

    /// Serves the batches that are whole, up to one whose answer waits.
    fn take_batches(&mut self, shared: &Arc<DelegationQueue>) -> Result<(), Leave> {
        while self.until.is_none() {
            let Some((count, bytes)) = whole(&self.buffer[..self.come])? else {
                return Ok(());
            };
            self.place(count, bytes, shared)?;
            self.buffer.copy_within(bytes..self.come, 0);
            self.come -= bytes;
            if self.is_due() {
                self.answer()?;
            }
        }
        Ok(())
    }

    /// Checks the batch of the first `bytes` bytes, which has `count` operations, and places its
    /// WRITEs. Does nothing with a batch that is to be refused.
    fn place(
        &mut self,
        count: usize,
        bytes: usize,
        shared: &Arc<DelegationQueue>,
    ) -> Result<(), Leave> {
        let (guest, batch) = (&mut self.guest, &mut self.batch);
        let (headers, payload) = self.buffer[..bytes].split_at(count * OP_HEADER_BYTES);
        let next = batch.check(&*guest.host, guest.session, guest.sequence, headers);
        let next = next.map_err(|_| Leave::ASK)?;
        // No host that exchanges has paged memory, which would have to be held.
        let is_paged = batch.ops.iter().any(|op| op.span.residency().is_some());
        if batch.is_refused() || is_paged {
            return Err(Leave::ASK);
        }
        batch.place(&mut self.vectors);
        // SAFETY: each vector lies in a span of the batch: bytes of a mapping that live as long as
        // the span, writable, to which no reference exists; or is the place of operands, which
        // nobody looks at meanwhile.
        unsafe { Rest::new(&mut self.vectors.vectors).message().fill(payload) };
        guest.sequence = next;
        let now = Instant::now();
        let mut until = now + Board::WAIT_MAX;
        for (i, op) in batch.ops.iter().enumerate() {
            if let Some(condition) = batch.condition(i) {
                until = until.min(now + Duration::from_millis(condition.wait_ms));
                op.span.lease().announcements().watch(shared);
            }
        }
        self.until = Some(until);
        let written = batch.written_bytes();
        if written > 0 {
            guest.traffic.count(0, written);
            guest.host.written(guest.session);
        }
        Ok(())
    }

    /// True if the batch that has waited is to be answered now.
    fn is_due(&mut self) -> bool {
        let Some(until) = self.until else {
            return false;
        };
        self.batch.look(Board::has_reached);
        self.batch.waiting.is_none()
            || still_leased(&self.batch.ops).is_err()
            || Instant::now() >= until
    }

    /// Answers the batch that has waited, if there is one.
    fn answer(&mut self) -> Result<(), Leave> {
        if self.until.take().is_none() {
            return Ok(());
        }
        still_leased(&self.batch.ops).map_err(Leave::Close)?;
        self.batch.look(Board::has_reached);
        self.batch.answer(&mut self.vectors);
        let mut rest = Rest::new(&mut self.vectors.vectors);
        // SAFETY: every vector is an answer header or lies in a span, all kept by the batch; they
        // are only read.
        let sent = unsafe { self.guest.stream.send_message(&mut rest.message()) };
        match sent {
            Ok(bytes) => rest.advance(bytes),
            Err(error) if retry(&error) => {}
            Err(_) => return Err(Leave::ASK),
        }
        self.guest.traffic.count(self.batch.read_bytes(), 0);
        // SAFETY: as above.
        let unsent = unsafe { rest.message().bytes() };
        self.batch.ops.clear();
        match unsent.is_empty() {
            true => Ok(()),
            false => Err(Leave::GoOn(unsent)),
        }
    }
}

/// Returns the number of operations and the length of the batch that `come` begins with, or `None`
/// while it is not whole. A batch that is not small, is malformed, or has atomics, makes the
/// connection leave.
fn whole(come: &[u8]) -> Result<Option<(usize, usize)>, Leave> {
    let (headers, _) = come.as_chunks::<OP_HEADER_BYTES>();
    let decode = |bytes| OpHeader::decode(bytes).map_err(|_| Leave::ASK);
    let Some(first) = headers.first().map(decode).transpose()? else {
        return Ok(None);
    };
    let count = 1 + usize::from(first.following);
    let Some(headers) = headers.get(..count) else {
        return Ok(None);
    };
    let mut bytes = count * OP_HEADER_BYTES;
    let mut answer_bytes = count * ANSWER_HEADER_BYTES;
    for header in headers {
        let header = decode(header)?;
        match header.kind {
            OpKind::Read => answer_bytes += header.len as usize,
            OpKind::ReadWhen => {
                answer_bytes += header.len as usize;
                bytes += OPERAND_BYTES;
            }
            OpKind::Write => bytes += header.len as usize,
            OpKind::FetchAdd | OpKind::CompareSwap => return Err(Leave::ASK),
        }
    }
    match bytes.max(answer_bytes) > SMALL_BYTES {
        true => Err(Leave::ASK),
        false => Ok((come.len() >= bytes).then_some((count, bytes))),
    }
}
