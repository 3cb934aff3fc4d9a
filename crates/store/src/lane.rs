//! [`Lane`]: what one worker thread moves pages with. One channel per server, many operations in flight.
//!
//! The rule it keeps: every accepted operation ends exactly once, in [`Lane::poll`], with its frame, before the
//! cluster's deadline and the operation deadline of the session have passed; no call waits for a server (except to ask
//! for more memory when a region has used up what was granted) or for a user's store.
//!
//! A transient failure (connection lost, no answer) opens a new channel, on a thread of its own since that may take
//! time, and repeats the operation there: a READ changes nothing, and a WRITE goes to a slot that nothing refers to yet.
//! A WRITE that seemed lost may still arrive later, so its slot is never used for another page.
//!
//! Deliberately absent: fairness between regions, and priorities. The pager decides what to start.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use farpage_fabric::{
    Buf, Busy, Channel, ChannelError, Completion, ConnectError, Op, Session, Verb,
};
use nix::poll::{PollFd, PollFlags};

use crate::{
    Cluster, Codec, PageStore, StoreError, StoreStats,
    blocking::{Bell, BlockingStore, CallError, Work, call},
    codec::{self, Encoder},
    entry::{Entry, Place},
    remote::{Backing, RemoteStore},
};

/// Operations in flight per lane: more than the queues of its channels hold makes no difference. Calls of users' stores
/// are counted apart, so that a store that stalls leaves room for everything else.
const OPS_MAX: usize = 128;
/// Staging buffers in flight per lane are this long together, or one page: they are local memory beside the budget.
const STAGING_BYTES_MAX: usize = 4 << 20;
/// Between two attempts to open a channel: doubled from the first to the last.
const BACKOFF_MIN: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_millis(200);
/// When another lane's writes must end before there is room, look again after so long.
const ROOM_PAUSE: Duration = Duration::from_micros(100);

/// The end of one operation.
#[derive(Debug)]
pub struct Done<F> {
    /// As given.
    pub tag: u64,
    /// As given. After a failed fill its bytes are unspecified; a write-back leaves them alone.
    pub frame: F,
    /// What happened.
    pub outcome: Result<Outcome, StoreError>,
}

/// What an operation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The frame holds the page.
    Filled {
        /// Payload bytes that moved; 0 when no request was needed.
        wire_bytes: u32,
    },
    /// The page was as its store has it: nothing to do.
    Clean,
    /// The page's new bytes are in its store.
    Written {
        /// Payload bytes that moved; 0 for a page of one repeated value.
        wire_bytes: u32,
    },
}

/// What one worker thread moves pages with. See the module.
pub struct Lane<F: Buf> {
    deadline: Duration,
    ports: Vec<Port<F>>,
    pending: Vec<Option<Pending<F>>>,
    vacant: Vec<usize>,
    /// What has ended and was not handed out.
    ready: Vec<Done<F>>,
    staging: Staging,
    encoder: Encoder,
    completions: Vec<Completion<IoBuf<F>>>,
    ended_calls: Receiver<Box<Call<F>>>,
    ended_calls_sender: Sender<Box<Call<F>>>,
    calls_in_flight: usize,
    bell: Arc<Bell>,
    /// Something was refused that the end of another lane's operation allows.
    look_again: Option<Instant>,
}

/// One operation in flight.
struct Pending<F> {
    tag: u64,
    store: Arc<PageStore>,
    page: u64,
    started: Instant,
    attempts: u32,
    /// While the bytes travel in a staging buffer.
    frame: Option<F>,
    task: Task,
}

#[derive(Clone, Copy)]
enum Task {
    Fill {
        server: u8,
        stored_bytes: u32,
        codec: Codec,
        hash: u128,
    },
    Write {
        place: Place,
        stored_bytes: u32,
        codec: Codec,
        hash: u128,
        suspect: bool,
    },
    Call,
}

/// What travels: the frame itself, or an encoded page.
enum IoBuf<F> {
    Frame(F),
    Staging(Vec<u8>),
}

impl<F: Buf> AsRef<[u8]> for IoBuf<F> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.as_ref(),
            Self::Staging(bytes) => bytes,
        }
    }
}

impl<F: Buf> AsMut<[u8]> for IoBuf<F> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Frame(frame) => frame.as_mut(),
            Self::Staging(bytes) => bytes,
        }
    }
}

/// The way to one server.
struct Port<F> {
    session: Arc<Session>,
    state: PortState<F>,
    /// Not posted yet: the queue is full or there is no channel.
    backlog: VecDeque<Op<IoBuf<F>>>,
    backoff: Duration,
    failure: Option<ChannelError>,
}

type ChannelResult<F> = Result<Box<dyn Channel<IoBuf<F>>>, ConnectError>;

enum PortState<F> {
    /// `broken`: an operation failed; what is in flight still has to come back.
    Open {
        channel: Box<dyn Channel<IoBuf<F>>>,
        broken: bool,
    },
    /// A thread opens a channel and rings.
    Opening(Receiver<ChannelResult<F>>),
    /// Not to be tried before this time.
    Closed(Instant),
}

impl<F: Buf> Lane<F> {
    /// A lane with a channel to each server of the cluster.
    ///
    /// # Errors
    /// [`ConnectError`] of the first server that cannot be reached.
    pub fn new(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> {
        let port = |session: &Arc<Session>| {
            Ok(Port {
                session: session.clone(),
                state: PortState::Open {
                    channel: session.channel()?,
                    broken: false,
                },
                backlog: VecDeque::new(),
                backoff: Duration::ZERO,
                failure: None,
            })
        };
        let bell = Bell::new().map_err(|source| ConnectError::Unreachable {
            endpoint: "eventfd of a worker".to_owned(),
            source,
        })?;
        let (ended_calls_sender, ended_calls) = crossbeam_channel::unbounded();
        Ok(Self {
            deadline: cluster.deadline,
            ports: cluster
                .sessions()
                .iter()
                .map(port)
                .collect::<Result<_, _>>()?,
            pending: Vec::new(),
            vacant: Vec::new(),
            ready: Vec::new(),
            staging: Staging::default(),
            encoder: Encoder::new(),
            completions: Vec::new(),
            ended_calls,
            ended_calls_sender,
            calls_in_flight: 0,
            bell: Arc::new(bell),
            look_again: None,
        })
    }

    /// Starts to bring `page` into `frame`. Ends at once, though still in [`poll`](Self::poll), for pages that were
    /// never written or repeat one value. The caller owns the page until the operation has ended.
    ///
    /// # Errors
    /// The frame: too much is in flight. Poll and try again.
    ///
    /// # Panics
    /// If the frame is shorter than a page.
    pub fn fill(
        &mut self,
        store: &Arc<PageStore>,
        page: u64,
        mut frame: F,
        tag: u64,
    ) -> Result<(), F> {
        let bytes = &mut frame.as_mut()[..store.page_bytes];
        let stats = &store.stats;
        match (&store.backing, store.table.load(page)) {
            (Backing::Blocking(blocking), _) => {
                return self.start_call(store, blocking, page, frame, tag, Verb::Read);
            }
            (Backing::Remote(_), Entry::Never | Entry::Kept { .. }) => {
                bytes.fill(0);
                StoreStats::add(&stats.fills_never, 1);
                self.ready.push(Done {
                    tag,
                    frame,
                    outcome: Ok(Outcome::Filled { wire_bytes: 0 }),
                });
            }
            (Backing::Remote(_), Entry::Repeated { value }) => {
                codec::fill_repeated(bytes, value);
                StoreStats::add(&stats.fills_repeated, 1);
                self.ready.push(Done {
                    tag,
                    frame,
                    outcome: Ok(Outcome::Filled { wire_bytes: 0 }),
                });
            }
            (
                Backing::Remote(remote),
                Entry::Stored {
                    place,
                    stored_bytes,
                    codec,
                    hash,
                    ..
                },
            ) => {
                let staged = codec != Codec::Raw;
                if !self.has_room(staged.then_some(store.page_bytes)) {
                    return Err(frame);
                }
                let (buf, frame) = if staged {
                    (
                        IoBuf::Staging(self.staging.take(store.page_bytes)),
                        Some(frame),
                    )
                } else {
                    (IoBuf::Frame(frame), None)
                };
                let task = Task::Fill {
                    server: place.server,
                    stored_bytes,
                    codec,
                    hash,
                };
                self.start_op(
                    store,
                    remote,
                    page,
                    tag,
                    task,
                    Verb::Read,
                    place,
                    stored_bytes,
                    buf,
                    frame,
                );
            }
        }
        Ok(())
    }

    /// Starts to write `page` back, if its hash says that it changed. The caller owns the page until the operation has
    /// ended. A write-back that fails leaves the last good copy in place.
    ///
    /// # Errors
    /// The frame: too much is in flight. Poll and try again.
    ///
    /// # Panics
    /// If the frame is shorter than a page.
    pub fn write_back(
        &mut self,
        store: &Arc<PageStore>,
        page: u64,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        match &store.backing {
            Backing::Remote(remote) => self.write_back_remote(store, remote, page, frame, tag),
            Backing::Blocking(blocking) => self.write_back_call(store, blocking, page, frame, tag),
        }
    }

    /// Appends what has ended. Drives channels, repeats and deadlines; never waits.
    pub fn poll(&mut self, done: &mut Vec<Done<F>>) {
        self.look_again = None;
        if self.calls_in_flight > 0
            || self
                .ports
                .iter()
                .any(|port| matches!(port.state, PortState::Opening(_)))
        {
            self.bell.hush();
            while let Ok(call) = self.ended_calls.try_recv() {
                self.calls_in_flight -= 1;
                self.finish_call(*call);
            }
        }
        for port in 0..self.ports.len() {
            self.drive(port);
        }
        done.append(&mut self.ready);
    }

    /// Operations that were accepted and not handed back yet.
    pub fn in_flight(&self) -> usize {
        self.pending.len() - self.vacant.len() + self.ready.len()
    }

    /// Appends the descriptors to sleep on and returns when to [`poll`](Self::poll) at the latest; a time in the past
    /// means at once. With nothing in flight and nothing refused there is nothing to sleep on.
    pub fn wait<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let mut until = self.look_again;
        let mut sooner = |time: Option<Instant>| until = until.into_iter().chain(time).min();
        let mut bell = self.calls_in_flight > 0;
        for port in &self.ports {
            match &port.state {
                PortState::Open { channel, .. } => {
                    let wait = channel.wait();
                    sooner(wait.until);
                    if let Some(fd) = wait.fd {
                        let mut events = PollFlags::empty();
                        events.set(PollFlags::POLLIN, wait.readable);
                        events.set(PollFlags::POLLOUT, wait.writable);
                        if !events.is_empty() {
                            fds.push(PollFd::new(fd, events));
                        }
                    }
                }
                PortState::Opening(_) => bell = true,
                PortState::Closed(at) if !port.backlog.is_empty() => sooner(Some(*at)),
                PortState::Closed(_) => {}
            }
            if !matches!(port.state, PortState::Open { .. }) {
                let started = port
                    .backlog
                    .iter()
                    .map(|op| self.pending(op.tag).started)
                    .min();
                sooner(started.map(|started| started + self.deadline));
            }
        }
        if bell {
            fds.push(PollFd::new(self.bell.fd(), PollFlags::POLLIN));
        }
        until
    }

    fn write_back_remote(
        &mut self,
        store: &Arc<PageStore>,
        remote: &RemoteStore,
        page: u64,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        let bytes = &frame.as_ref()[..store.page_bytes];
        let stats = &store.stats;
        // 1. Is it as its store has it? A page of one value needs no hash, and no slot.
        let old = store.table.load(page);
        if let Some(value) = codec::repeated(bytes) {
            let same = old == Entry::Repeated { value } || (old == Entry::Never && value == 0);
            let outcome = if same {
                StoreStats::add(&stats.write_backs_clean, 1);
                Outcome::Clean
            } else {
                remote.commit(&store.table, page, Entry::Repeated { value });
                StoreStats::add(&stats.write_backs_repeated, 1);
                StoreStats::add(&stats.bytes_plain, store.page_bytes as u64);
                Outcome::Written { wire_bytes: 0 }
            };
            self.ready.push(Done {
                tag,
                frame,
                outcome: Ok(outcome),
            });
            return Ok(());
        }
        if !self.has_room((remote.codec != Codec::Raw).then_some(store.page_bytes)) {
            return Err(frame);
        }
        let hash = codec::hash(bytes, store.seed);
        if matches!(old, Entry::Stored { hash: old, .. } if old == hash) {
            StoreStats::add(&stats.write_backs_clean, 1);
            self.ready.push(Done {
                tag,
                frame,
                outcome: Ok(Outcome::Clean),
            });
            return Ok(());
        }
        // 2. Fewer bytes, if it saves a size class.
        let mut encoded = None;
        if remote.codec == Codec::Lz4 {
            let mut out = self.staging.take(store.page_bytes);
            let len = self.encoder.lz4(bytes, &mut out);
            if crate::slots::class_of(len as u32) < crate::slots::class_of(bytes.len() as u32) {
                encoded = Some((out, len as u32));
            } else {
                self.staging.put(out, store.page_bytes);
            }
        }
        let (codec, stored_bytes) = match &encoded {
            Some((_, len)) => (Codec::Lz4, *len),
            None => (Codec::Raw, bytes.len() as u32),
        };
        // 3. A new slot; the old one stays until the new one is complete.
        let place = match remote.alloc(stored_bytes, page) {
            Ok(Some(place)) => place,
            room => {
                if let Some((out, _)) = encoded {
                    self.staging.put(out, store.page_bytes);
                }
                let Err(source) = room else {
                    self.look_again = Some(Instant::now() + ROOM_PAUSE);
                    return Err(frame);
                };
                StoreStats::add(&stats.errors, 1);
                let error = StoreError::Full {
                    region: store.region,
                    page,
                    source,
                };
                self.ready.push(Done {
                    tag,
                    frame,
                    outcome: Err(error),
                });
                return Ok(());
            }
        };
        // 4. On its way.
        let (buf, frame) = match encoded {
            Some((out, _)) => (IoBuf::Staging(out), Some(frame)),
            None => (IoBuf::Frame(frame), None),
        };
        let task = Task::Write {
            place,
            stored_bytes,
            codec,
            hash,
            suspect: false,
        };
        self.start_op(
            store,
            remote,
            page,
            tag,
            task,
            Verb::Write,
            place,
            stored_bytes,
            buf,
            frame,
        );
        Ok(())
    }

    /// Whether one more operation may start, with a staging buffer for a page of so many bytes.
    fn has_room(&self, staging: Option<usize>) -> bool {
        self.pending.len() - self.vacant.len() - self.calls_in_flight < OPS_MAX
            && staging.is_none_or(|page_bytes| {
                self.staging.bytes_out == 0
                    || self.staging.bytes_out + page_bytes <= STAGING_BYTES_MAX
            })
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of one operation, each needed once"
    )]
    fn start_op(
        &mut self,
        store: &Arc<PageStore>,
        remote: &RemoteStore,
        page: u64,
        tag: u64,
        task: Task,
        verb: Verb,
        place: Place,
        len: u32,
        buf: IoBuf<F>,
        frame: Option<F>,
    ) {
        let started = Instant::now();
        let index = self.insert(Pending {
            tag,
            store: store.clone(),
            page,
            started,
            attempts: 1,
            frame,
            task,
        });
        let op = Op {
            tag: index,
            verb,
            extent: remote.pool.extent(place),
            offset: place.offset,
            len,
            buf,
        };
        self.ports[remote.pool.port(place.server)].post(op);
    }

    fn insert(&mut self, pending: Pending<F>) -> u64 {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        self.pending[index] = Some(pending);
        index as u64
    }

    fn remove(&mut self, index: u64) -> Pending<F> {
        self.vacant.push(index as usize);
        self.pending[index as usize]
            .take()
            .expect("a completion belongs to an operation in flight")
    }

    fn pending(&self, index: u64) -> &Pending<F> {
        self.pending[index as usize]
            .as_ref()
            .expect("a completion belongs to an operation in flight")
    }

    /// Lets one port make progress.
    fn drive(&mut self, at: usize) {
        // 1. What has ended. Failed operations go to the backlog or end.
        if let PortState::Open { channel, .. } = &mut self.ports[at].state {
            let mut completions = std::mem::take(&mut self.completions);
            channel.poll(&mut completions);
            for completion in completions.drain(..) {
                self.complete(at, completion);
            }
            self.completions = completions;
        }
        // 2. From a broken channel to a new one.
        let bell = &self.bell;
        let port = &mut self.ports[at];
        let now = Instant::now();
        match &mut port.state {
            PortState::Open {
                channel,
                broken: true,
            } if channel.in_flight() == 0 => {
                port.state = PortState::Closed(now + port.backoff);
            }
            PortState::Open { .. } => {}
            PortState::Opening(result) => match result.try_recv() {
                Ok(Ok(channel)) => {
                    port.state = PortState::Open {
                        channel,
                        broken: false,
                    }
                }
                Ok(Err(error)) => port.failed(now, error.to_string()),
                Err(TryRecvError::Disconnected) => {
                    port.failed(now, "the thread that opens it died".to_owned())
                }
                Err(TryRecvError::Empty) => {}
            },
            PortState::Closed(at) if *at <= now && !port.backlog.is_empty() => port.open(bell),
            PortState::Closed(_) => {}
        }
        // 3. What has waited: on its way, or too late.
        if port.backlog.is_empty() {
            return;
        }
        if matches!(port.state, PortState::Open { broken: false, .. }) {
            port.post_backlog();
            return;
        }
        for _ in 0..self.ports[at].backlog.len() {
            let op = self.ports[at].backlog.pop_front().expect("counted above");
            if now.duration_since(self.pending(op.tag).started) < self.deadline {
                self.ports[at].backlog.push_back(op);
                continue;
            }
            let port = &self.ports[at];
            let error = port
                .failure
                .clone()
                .unwrap_or_else(|| ChannelError::TimedOut {
                    endpoint: port.session.endpoint().to_string(),
                    deadline: self.deadline,
                });
            self.finish_op(op.tag, op.buf, Err(error));
        }
    }

    fn complete(&mut self, at: usize, completion: Completion<IoBuf<F>>) {
        let Completion {
            tag,
            verb,
            buf,
            result,
        } = completion;
        let deadline = self.deadline;
        let port = &mut self.ports[at];
        match result {
            Err(error) if error.is_transient() => {
                port.failure = Some(error.clone());
                if let PortState::Open { broken, .. } = &mut port.state
                    && !std::mem::replace(broken, true)
                {
                    // The first attempt comes at once, the next ones after longer and longer pauses.
                    port.backoff = (port.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
                }
                let pending = self.pending[tag as usize]
                    .as_mut()
                    .expect("a completion belongs to an operation in flight");
                let mut target = None;
                if let Task::Write {
                    suspect,
                    place,
                    stored_bytes,
                    ..
                } = &mut pending.task
                {
                    *suspect = true;
                    target = Some((*place, *stored_bytes));
                }
                if pending.started.elapsed() >= deadline {
                    return self.finish_op(tag, buf, Err(error));
                }
                pending.attempts += 1;
                StoreStats::add(&pending.store.stats.retries, 1);
                let (place, len) =
                    target.unwrap_or_else(|| match pending.store.table.load(pending.page) {
                        Entry::Stored {
                            place,
                            stored_bytes,
                            ..
                        } => (place, stored_bytes),
                        other => {
                            unreachable!("a page that is being filled from a slot is {other:?}")
                        }
                    });
                let Backing::Remote(remote) = &pending.store.backing else {
                    unreachable!("user stores have no channel")
                };
                let extent = remote.pool.extent(place);
                self.ports[at].backlog.push_back(Op {
                    tag,
                    verb,
                    extent,
                    offset: place.offset,
                    len,
                    buf,
                });
            }
            result => {
                if result.is_ok() {
                    port.backoff = Duration::ZERO;
                }
                self.finish_op(tag, buf, result);
            }
        }
    }

    fn finish_op(&mut self, index: u64, buf: IoBuf<F>, result: Result<(), ChannelError>) {
        let Pending {
            tag,
            store,
            page,
            attempts,
            frame,
            task,
            ..
        } = self.remove(index);
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("user stores have no channel")
        };
        let (mut frame, staged) = match (buf, frame) {
            (IoBuf::Frame(frame), _) => (frame, None),
            (IoBuf::Staging(bytes), Some(frame)) => (frame, Some(bytes)),
            (IoBuf::Staging(_), None) => unreachable!("a staged operation keeps its frame"),
        };
        let stats = &store.stats;
        let failed = |server: u8, operation, source: ChannelError| StoreError::Remote {
            region: store.region,
            page,
            server: remote.pool.endpoint(server),
            operation,
            attempts,
            retry: source.is_transient(),
            source,
        };
        let outcome = match task {
            Task::Fill { server, .. } if result.is_err() => Err(failed(
                server,
                "fill",
                result.expect_err("checked in the guard"),
            )),
            Task::Fill {
                server,
                stored_bytes,
                codec,
                hash,
            } => {
                let bytes = &mut frame.as_mut()[..store.page_bytes];
                let whole = match (codec, &staged) {
                    (Codec::Lz4, Some(block)) => {
                        codec::decode_lz4(&block[..stored_bytes as usize], bytes)
                    }
                    _ => stored_bytes as usize == store.page_bytes,
                };
                let detail = match whole {
                    false => Some("it does not decode to a page"),
                    true if codec::hash(bytes, store.seed) != hash => {
                        Some("its hash does not match")
                    }
                    true => None,
                };
                match detail {
                    None => {
                        StoreStats::add(&stats.fills, 1);
                        StoreStats::add(&stats.bytes_read, u64::from(stored_bytes));
                        Ok(Outcome::Filled {
                            wire_bytes: stored_bytes,
                        })
                    }
                    Some(detail) => {
                        StoreStats::add(&stats.corrupt, 1);
                        let server = remote.pool.endpoint(server);
                        Err(StoreError::Corrupt {
                            region: store.region,
                            page,
                            server,
                            detail,
                        })
                    }
                }
            }
            Task::Write {
                place,
                stored_bytes,
                codec,
                hash,
                suspect,
            } => match result {
                Ok(()) => {
                    let entry = Entry::Stored {
                        place,
                        stored_bytes,
                        codec,
                        hash,
                        published: false,
                        suspect,
                    };
                    remote.commit(&store.table, page, entry);
                    remote.pool.settle();
                    let kind = match codec {
                        Codec::Raw => &stats.write_backs_raw,
                        Codec::Lz4 => &stats.write_backs_lz4,
                    };
                    StoreStats::add(kind, 1);
                    StoreStats::add(&stats.bytes_written, u64::from(stored_bytes));
                    StoreStats::add(&stats.bytes_plain, store.page_bytes as u64);
                    StoreStats::add(&stats.bytes_stored, u64::from(stored_bytes));
                    Ok(Outcome::Written {
                        wire_bytes: stored_bytes,
                    })
                }
                Err(error) => {
                    remote.abandon(place, suspect);
                    Err(failed(place.server, "write-back", error))
                }
            },
            Task::Call => unreachable!("calls end in finish_call"),
        };
        if outcome.is_err() {
            StoreStats::add(&stats.errors, 1);
        }
        if let Some(bytes) = staged {
            self.staging.put(bytes, store.page_bytes);
        }
        self.ready.push(Done {
            tag,
            frame,
            outcome,
        });
    }

    fn write_back_call(
        &mut self,
        store: &Arc<PageStore>,
        blocking: &BlockingStore,
        page: u64,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        let hash = codec::hash(&frame.as_ref()[..store.page_len(page)], store.seed);
        if matches!(store.table.load(page), Entry::Kept { hash: old, unsure: false, .. } if old == hash)
        {
            StoreStats::add(&store.stats.write_backs_clean, 1);
            self.ready.push(Done {
                tag,
                frame,
                outcome: Ok(Outcome::Clean),
            });
            return Ok(());
        }
        self.start_call(store, blocking, page, frame, tag, Verb::Write)
    }

    fn start_call(
        &mut self,
        store: &Arc<PageStore>,
        blocking: &BlockingStore,
        page: u64,
        frame: F,
        tag: u64,
        verb: Verb,
    ) -> Result<(), F> {
        if self.calls_in_flight == OPS_MAX {
            return Err(frame);
        }
        let started = Instant::now();
        let pending = Pending {
            tag,
            store: store.clone(),
            page,
            started,
            attempts: 1,
            frame: None,
            task: Task::Call,
        };
        let mut call = Call {
            index: self.insert(pending),
            store: blocking.store.clone(),
            verb,
            offset: page * store.page_bytes as u64,
            len: store.page_len(page),
            frame,
            result: Ok(()),
            reply: self.ended_calls_sender.clone(),
            bell: self.bell.clone(),
        };
        if blocking.store.may_block() {
            self.calls_in_flight += 1;
            blocking.submit(Box::new(call));
        } else {
            call.perform();
            self.finish_call(call);
        }
        Ok(())
    }

    fn finish_call(&mut self, call: Call<F>) {
        let Call {
            index,
            verb,
            len,
            mut frame,
            result,
            store: user,
            ..
        } = call;
        let Pending {
            tag, store, page, ..
        } = self.remove(index);
        let stats = &store.stats;
        let old = store.table.load(page);
        let operation = match verb {
            Verb::Read => "fill",
            Verb::Write => "write-back",
        };
        let error = |error| {
            let (region, store) = (store.region, user.name());
            match error {
                CallError::Io(error) => {
                    let (kind, message) = (error.kind(), error.to_string());
                    StoreError::User {
                        region,
                        page,
                        store,
                        operation,
                        kind,
                        message,
                    }
                }
                CallError::Panic(message) => StoreError::Panicked {
                    region,
                    page,
                    store,
                    operation,
                    message,
                },
            }
        };
        let outcome = match (verb, result) {
            (Verb::Read, Err(failure)) => Err(error(failure)),
            (Verb::Read, Ok(())) => {
                let (bytes, beyond) = frame.as_mut()[..store.page_bytes].split_at_mut(len);
                beyond.fill(0);
                let hash = codec::hash(bytes, store.seed);
                // What others put into the store is theirs to change; what we wrote must come back.
                match old {
                    Entry::Kept {
                        hash: old,
                        written: true,
                        ..
                    } if old != hash => {
                        StoreStats::add(&stats.corrupt, 1);
                        Err(StoreError::Corrupt {
                            region: store.region,
                            page,
                            server: user.name(),
                            detail: "its hash does not match what was last written",
                        })
                    }
                    Entry::Kept { written: true, .. } => Ok(()),
                    _ => {
                        store.table.store(
                            page,
                            Entry::Kept {
                                hash,
                                written: false,
                                unsure: false,
                            },
                        );
                        Ok(())
                    }
                }
                .map(|()| {
                    StoreStats::add(&stats.fills, 1);
                    StoreStats::add(&stats.bytes_read, len as u64);
                    Outcome::Filled {
                        wire_bytes: len as u32,
                    }
                })
            }
            (Verb::Write, Ok(())) => {
                let hash = codec::hash(&frame.as_ref()[..len], store.seed);
                store.table.store(
                    page,
                    Entry::Kept {
                        hash,
                        written: true,
                        unsure: false,
                    },
                );
                StoreStats::add(&stats.write_backs_raw, 1);
                StoreStats::add(&stats.bytes_written, len as u64);
                StoreStats::add(&stats.bytes_plain, len as u64);
                StoreStats::add(&stats.bytes_stored, len as u64);
                Ok(Outcome::Written {
                    wire_bytes: len as u32,
                })
            }
            (Verb::Write, Err(failure)) => {
                // It may have been written in part: never again clean before a write succeeds.
                if let Entry::Kept { hash, written, .. } = old {
                    store.table.store(
                        page,
                        Entry::Kept {
                            hash,
                            written,
                            unsure: true,
                        },
                    );
                }
                Err(error(failure))
            }
        };
        if outcome.is_err() {
            StoreStats::add(&stats.errors, 1);
        }
        self.ready.push(Done {
            tag,
            frame,
            outcome,
        });
    }
}

impl<F: Buf> Drop for Lane<F> {
    /// What is still in flight is given up: its frames go with it, and slots that were being written are not used again.
    fn drop(&mut self) {
        for pending in self.pending.iter().flatten() {
            if let (Backing::Remote(remote), Task::Write { place, .. }) =
                (&pending.store.backing, pending.task)
            {
                remote.abandon(place, true);
            }
        }
    }
}

impl<F: Buf> Port<F> {
    fn post(&mut self, op: Op<IoBuf<F>>) {
        self.backlog.push_back(op);
        self.post_backlog();
    }

    fn post_backlog(&mut self) {
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

    fn open(&mut self, bell: &Arc<Bell>) {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let (session, bell) = (self.session.clone(), bell.clone());
        let open = move || {
            // The lane may be gone by now; then so is the channel.
            let _ = sender.send(session.channel());
            bell.ring();
        };
        match thread::Builder::new()
            .name("farpage-reopen".into())
            .spawn(open)
        {
            Ok(_) => self.state = PortState::Opening(receiver),
            Err(error) => self.failed(Instant::now(), error.to_string()),
        }
    }

    fn failed(&mut self, now: Instant, reason: String) {
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.state = PortState::Closed(now + self.backoff);
        self.failure = Some(ChannelError::Disconnected {
            endpoint: self.session.endpoint().to_string(),
            reason,
        });
    }
}

/// Buffers for encoded pages, by page size; made once and used again.
#[derive(Default)]
struct Staging {
    free: [Vec<Vec<u8>>; 32],
    /// Plain lengths of the pages whose buffers are out.
    bytes_out: usize,
}

impl Staging {
    fn take(&mut self, page_bytes: usize) -> Vec<u8> {
        self.bytes_out += page_bytes;
        let free = &mut self.free[page_bytes.ilog2() as usize];
        free.pop()
            .unwrap_or_else(|| vec![0; Encoder::bound(page_bytes)])
    }

    fn put(&mut self, buffer: Vec<u8>, page_bytes: usize) {
        self.bytes_out -= page_bytes;
        self.free[page_bytes.ilog2() as usize].push(buffer);
    }
}

/// One call of a user's store.
struct Call<F> {
    index: u64,
    store: Arc<dyn crate::Store>,
    verb: Verb,
    offset: u64,
    len: usize,
    frame: F,
    result: Result<(), CallError>,
    reply: Sender<Box<Call<F>>>,
    bell: Arc<Bell>,
}

impl<F: Buf> Call<F> {
    fn perform(&mut self) {
        let Self {
            store,
            offset,
            len,
            frame,
            ..
        } = self;
        self.result = match self.verb {
            Verb::Read => call(|| store.read(*offset, &mut frame.as_mut()[..*len])),
            Verb::Write => call(|| store.write(*offset, &frame.as_ref()[..*len])),
        };
    }
}

impl<F: Buf> Work for Call<F> {
    fn run(mut self: Box<Self>) {
        self.perform();
        let (reply, bell) = (self.reply.clone(), self.bell.clone());
        // A lane that is gone wants no answer.
        if reply.send(self).is_ok() {
            bell.ring();
        }
    }
}
