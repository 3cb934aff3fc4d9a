//! [`Together`]: one thread that serves the small batches of many data connections.
//!
//! The rule it keeps: the thread waits for no client. A batch that is not small, is malformed, or
//! whose answer the socket does not take, goes back to the connection's own thread with all bytes
//! that have come. So every other case is dealt with in [`super::data`] alone.
//!
//! Clients may wait for one another, as workers do that exchange through a program of theirs. With
//! a thread each, every client would wake one, which then wakes the others: two changes of threads
//! per client. Here the last client's batch and all answers are one piece of work.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_wire::{
    SessionId,
    data::{ANSWER_HEADER_BYTES, Condition, MAX_BATCH, OP_HEADER_BYTES, OPERAND_BYTES, OpKind},
};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
};
use parking_lot::Mutex;

use super::{
    operation::{Checked, answer_to, header_at, permitted},
    traffic::ServerTraffic,
    transfer::vector,
};
use crate::{
    announcements::Wake,
    host::Host,
    nonblocking::retry,
    ring::Board,
    stream::{PeerStream, SocketMessage},
};

/// The most bytes of a small batch, and of its answer, headers included. Such a batch is copied
/// once more than others.
pub(super) const SMALL_BYTES: usize = 72 << 10;

/// Upper bound of the connections whose events one look brings.
const EVENTS: usize = 16;
/// Token of the eventfd that wakes the thread.
const WOKEN: u64 = u64::MAX;

/// A data connection that leaves its small batches to the shared thread.
pub(super) struct Delegation {
    pub(super) stream: Arc<PeerStream>,
    pub(super) host: Arc<dyn Host>,
    pub(super) traffic: Arc<ServerTraffic>,
    pub(super) session: SessionId,
    /// Number of the next operation.
    pub(super) sequence: u32,
    /// Bytes that have come and were not taken.
    pub(super) come: Vec<u8>,
}

/// A connection that goes back to its own thread.
pub(super) struct DelegationEnd {
    /// Number of the next operation, as in [`Delegation`].
    pub(super) sequence: u32,
    pub(super) come: Vec<u8>,
    /// The end of an answer that the socket did not take.
    pub(super) unsent: Vec<u8>,
    /// True if a lease that the answer needs has ended.
    pub(super) is_over: bool,
}

/// The thread, which ends when this is dropped.
pub(super) struct Together {
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
    new: Mutex<Vec<(Delegation, mpsc::Sender<DelegationEnd>)>>,
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

impl Together {
    pub(super) fn start() -> io::Result<Self> {
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
    pub(super) fn serve(&self, guest: Delegation) -> mpsc::Receiver<DelegationEnd> {
        let (back, here) = mpsc::channel();
        self.shared.new.lock().push((guest, back));
        self.shared.wake();
        here
    }
}

impl Drop for Together {
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
    back: mpsc::Sender<DelegationEnd>,
    /// Buffer whose first `come` bytes have been received.
    buffer: Box<[u8]>,
    come: usize,
    /// True if more has come than there was room for, while an answer waited.
    has_more: bool,
    /// The batch whose answer waits for numbers.
    waiting: Option<PlacedBatch>,
}

/// A batch whose WRITEs have been placed.
struct PlacedBatch {
    ops: Vec<(Checked, Option<Condition>)>,
    until: Instant,
}

/// Reason why a connection leaves.
enum Leave {
    /// The connection's own thread decides about the bytes that have come or will come.
    Ask,
    Unsent(Vec<u8>),
    LeaseEnded,
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

    fn due(&self) -> Option<u64> {
        let mut seats = self.seats.iter();
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
                waiting: None,
            };
            self.seats.insert(number, seat);
            self.turn(number, |seat, shared| match is_watched {
                true => seat.receive(shared, false),
                false => Err(Leave::Ask),
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
        let until = self.seats.values().filter_map(Seat::until).min();
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
        let (unsent, is_over) = match leave {
            Leave::Ask => (Vec::new(), false),
            Leave::Unsent(unsent) => (unsent, false),
            Leave::LeaseEnded => (Vec::new(), true),
        };
        // The connection's own thread has gone only if the process ends.
        let _ = back.send(DelegationEnd {
            sequence: guest.sequence,
            come: buffer[..come].to_vec(),
            unsent,
            is_over,
        });
    }
}

impl Seat {
    /// Returns the time at which the waiting answer cannot wait any longer.
    fn until(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|waiting| waiting.until)
    }

    fn is_due(&self) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| {
            waiting.first().is_none() || waiting.is_revoked() || Instant::now() >= waiting.until
        })
    }

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
                Ok(0) => return Err(Leave::Ask),
                Ok(bytes) => {
                    self.come += bytes;
                    // The next byte, and the end, wake.
                    if bytes < room && !may_have_ended {
                        return self.take_batches(shared);
                    }
                }
                Err(error) if retry(&error) => return Ok(()),
                Err(_) => return Err(Leave::Ask),
            }
        }
    }

    /// Serves the batches that are whole, up to one whose answer waits.
    fn take_batches(&mut self, shared: &Arc<DelegationQueue>) -> Result<(), Leave> {
        while self.waiting.is_none() {
            let Some(bytes) = whole(&self.buffer[..self.come])? else {
                return Ok(());
            };
            let waiting = self.place(bytes)?;
            self.buffer.copy_within(bytes..self.come, 0);
            self.come -= bytes;
            for (op, condition) in &waiting.ops {
                if condition.is_some() {
                    op.span.lease().announcements().watch(shared);
                }
            }
            self.waiting = Some(waiting);
            if self.is_due() {
                self.answer()?;
            }
        }
        Ok(())
    }

    /// Checks the batch of the first `bytes` bytes, and places its WRITEs. Does nothing with a
    /// batch that is to be refused.
    fn place(&mut self, bytes: usize) -> Result<PlacedBatch, Leave> {
        let (guest, batch) = (&mut self.guest, &self.buffer[..bytes]);
        let count = 1 + usize::from(header_at(batch, 0).map_err(|_| Leave::Ask)?.following);
        let mut sequence = guest.sequence;
        let mut ops = Vec::with_capacity(count);
        for i in 0..count {
            let header = header_at(batch, i).map_err(|_| Leave::Ask)?;
            let left = count - 1 - i;
            if usize::from(header.following) != left || header.sequence != sequence {
                return Err(Leave::Ask);
            }
            sequence = sequence.wrapping_add(1);
            let op = permitted(&*guest.host, guest.session, header).ok_or(Leave::Ask)?;
            // Memory that is elsewhere has to be waited for.
            if op.span.residency().is_some() {
                return Err(Leave::Ask);
            }
            ops.push((op, None));
        }
        let (now, mut rest) = (Instant::now(), &batch[count * OP_HEADER_BYTES..]);
        let mut until = now + Board::WAIT_MAX;
        let mut written = 0;
        for (op, condition) in &mut ops {
            let (payload, behind) = rest.split_at(payload_bytes(op.header.kind, op.header.len));
            rest = behind;
            match op.header.kind {
                OpKind::Write => {
                    op.span.write(payload);
                    written += payload.len() as u64;
                }
                OpKind::ReadWhen => {
                    let operands = payload.try_into().expect("operands have one length");
                    let waits = Condition::decode(operands);
                    until = until.min(now + Duration::from_millis(waits.wait_ms));
                    *condition = Some(waits);
                }
                _ => {}
            }
        }
        guest.sequence = sequence;
        if written > 0 {
            guest
                .traffic
                .written_bytes
                .fetch_add(written, Ordering::Relaxed);
            guest.host.written(guest.session);
        }
        Ok(PlacedBatch { ops, until })
    }

    /// Answers the batch that has waited.
    fn answer(&mut self) -> Result<(), Leave> {
        let Some(mut waiting) = self.waiting.take() else {
            return Ok(());
        };
        if waiting.is_revoked() {
            return Err(Leave::LeaseEnded);
        }
        let first = waiting.first();
        let (mut read, mut total) = (0, 0);
        let mut headers = [[0; ANSWER_HEADER_BYTES]; MAX_BATCH];
        let mut vectors = Vec::with_capacity(2 * waiting.ops.len());
        for ((number, (op, condition)), header) in
            waiting.ops.iter_mut().enumerate().zip(&mut headers)
        {
            let is_waiting = condition.is_some() && first.is_some_and(|first| first <= number);
            let answer = answer_to(&op.header, is_waiting);
            *header = answer.encode();
            vectors.push(vector(header.as_mut_ptr(), header.len()));
            total += header.len() + answer.len as usize;
            if answer.len > 0 {
                read += u64::from(answer.len);
                vectors.push(vector(op.span.as_ptr(), op.span.len()));
            }
        }
        let mut message = SocketMessage::new(vectors.as_mut_ptr(), vectors.len());
        // SAFETY: every vector is an answer header or lies in a span, all kept until the end of
        // this function; they are only read.
        let sent = unsafe { self.guest.stream.send_message(&mut message) };
        let sent = match sent {
            Ok(bytes) => bytes,
            Err(error) if retry(&error) => 0,
            Err(_) => return Err(Leave::Ask),
        };
        self.guest
            .traffic
            .read_bytes
            .fetch_add(read, Ordering::Relaxed);
        if sent == total {
            return Ok(());
        }
        // SAFETY: as above.
        let mut unsent = unsafe { message.bytes() };
        unsent.drain(..sent);
        Err(Leave::Unsent(unsent))
    }
}

impl PlacedBatch {
    /// Returns the index of the first READ whose number is not there.
    fn first(&self) -> Option<usize> {
        self.ops.iter().position(|(op, condition)| {
            (condition.as_ref()).is_some_and(|condition| !Board::has_reached(&op.span, condition))
        })
    }

    fn is_revoked(&self) -> bool {
        self.ops.iter().any(|(op, _)| op.span.is_revoked())
    }
}

/// Returns the number of bytes that travel behind the headers for an operation.
fn payload_bytes(kind: OpKind, len: u32) -> usize {
    match kind {
        OpKind::Read => 0,
        OpKind::Write => len as usize,
        OpKind::FetchAdd | OpKind::CompareSwap | OpKind::ReadWhen => OPERAND_BYTES,
    }
}

/// Returns the length of the batch that `come` begins with, or `None` while it is not whole. A
/// batch that is not small, is malformed, or has atomics, makes the connection leave.
fn whole(come: &[u8]) -> Result<Option<usize>, Leave> {
    if come.len() < OP_HEADER_BYTES {
        return Ok(None);
    }
    let count = 1 + usize::from(header_at(come, 0).map_err(|_| Leave::Ask)?.following);
    if count > MAX_BATCH {
        return Err(Leave::Ask);
    }
    if come.len() < count * OP_HEADER_BYTES {
        return Ok(None);
    }
    let mut bytes = count * OP_HEADER_BYTES;
    let mut answer_bytes = count * ANSWER_HEADER_BYTES;
    for i in 0..count {
        let header = header_at(come, i).map_err(|_| Leave::Ask)?;
        bytes += payload_bytes(header.kind, header.len);
        match header.kind {
            OpKind::Read | OpKind::ReadWhen => answer_bytes += header.len as usize,
            OpKind::Write => {}
            OpKind::FetchAdd | OpKind::CompareSwap => return Err(Leave::Ask),
        }
    }
    match bytes.max(answer_bytes) > SMALL_BYTES {
        true => Err(Leave::Ask),
        false => Ok((come.len() >= bytes).then_some(bytes)),
    }
}
