//! [`IoQueue`]: the page I/O of one worker thread, with one channel per server and many operations
//! in flight.
//!
//! The rule it keeps: every request comes back from [`IoQueue::take_ended`] exactly once, with its
//! frame, before the cluster's deadline and the operation deadline of the session have passed since
//! it began; no call waits for a server or for a user's store. A request that the queue has no room
//! for is held until it has. Where a region has used up its memory, a separate thread asks for
//! more, and the run waits.
//!
//! A request is about a *run* of pages. It is cut into parts that move on their own: pages that
//! are next to each other on their server too by one READ or WRITE, encoded ones one by one
//! (`io_queue/run.rs`). A page that fails takes no other with it, except those of the same request.
//!
//! A transient failure (connection lost, no answer) opens a new channel, on a thread of its own
//! since that may take time, and repeats the request there: a READ changes nothing, and a WRITE
//! goes to slots that nothing refers to yet. A WRITE that seemed lost may still arrive until the
//! new channel is open, so its slots are used for nothing else before (`io_queue/port.rs`).
//!
//! The pages of a [`Snapshot`] are filled in the same way, from entries that the caller has.
//!
//! Deliberately absent: fairness between regions, and priorities. The pager decides what to start.

mod channels;
mod copies;
mod decode;
mod fill;
mod port;
mod run;
mod sources;
mod staging;
mod user_store;
mod write;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender};
use farpage_fabric::{ChannelError, Completion, ConnectError};
use nix::poll::{PollFd, PollFlags};

pub use self::run::{RunBuffer, RunCompletion, RunCounts, RunTiming, StoreCall};
use self::{
    port::{Port, PortState, Ports},
    run::{Direction, IoRun, SlotTransfer, Spare, Task},
    sources::SourceReads,
    staging::{IoBuf, Staging},
};
use crate::{
    Cluster, EntryWords, PageIndex, PageStore, Snapshot, StoreError,
    blocking::Waker,
    codec::{Coder, Watch},
    entry::PageEntry,
    place::{SlotPlace, SlotSpan},
    remote::Backing,
};

/// READs and WRITEs in flight at which an I/O queue begins no more runs: more than the queues of
/// its channels hold makes no difference. Calls of users' stores are counted apart, so that a store
/// that stalls leaves room for everything else.
const OPS_MAX: usize = 128;
/// Pause before the I/O queue looks again for room that other I/O queues' writes must make.
const ROOM_PAUSE: Duration = Duration::from_micros(100);

/// Pause before the I/O queue looks again for a copy that waiting requests can go to.
const COPIES_PAUSE: Duration = Duration::from_millis(50);

/// Number of requests of an I/O queue that have not been handed out.
#[derive(Clone, Copy, Debug, Default)]
pub struct IoLoad {
    /// Requests that wait for room in the queue.
    pub held: usize,
    /// Requests that have begun.
    pub begun: usize,
    /// Bytes of the frames of requests that have begun.
    pub begun_bytes: usize,
}

/// Page I/O of one worker thread: requests `R`, each with a frame `F`. See the module.
pub struct IoQueue<R, F: RunBuffer> {
    deadline: Duration,
    cluster: Arc<Cluster>,
    ports: Ports<IoBuf<F>>,
    /// Number of requests that each port takes without allocating.
    prepared: usize,
    /// Runs under way. The tag of a request names its run and part.
    runs: Vec<Option<IoRun<R, F>>>,
    vacant: Vec<usize>,
    load: IoLoad,
    /// Runs that are held, or with parts that wait for a staging buffer or for remote memory,
    /// oldest first.
    waiting: VecDeque<usize>,
    /// Requests that have ended and were not handed out.
    ready: Vec<RunCompletion<R, F>>,
    /// Number of polls so far, and of turns of the driver.
    polls: u64,
    turns: u64,
    /// Requests that are posted or in a port's backlog.
    ops_in_flight: usize,
    staging: Staging,
    sources: SourceReads,
    coder: Coder,
    completions: Vec<Completion<IoBuf<F>>>,
    ended_calls: Receiver<Box<StoreCall<F>>>,
    ended_calls_sender: Sender<Box<StoreCall<F>>>,
    /// Number of calls that have not ended. The I/O queue's driver makes `calls_by_worker` of them.
    calls_in_flight: usize,
    calls_by_worker: usize,
    /// True if calls wait in `kept_calls` to be taken.
    keeps_calls: bool,
    kept_calls: VecDeque<StoreCall<F>>,
    waker: Arc<Waker>,
    /// True if lost channels stay lost until [`reopen`](Self::reopen).
    passive: bool,
    /// Time to look again for room that another I/O queue's operation must make.
    look_again: Option<Instant>,
    /// Reason why a write that waits for a slot has none, until the reason is taken.
    refused: Option<StoreError>,
    spare: Vec<Spare<F>>,
    watch: Watch,
    /// Scratch, empty between calls.
    places: Vec<SlotPlace>,
    freed: Vec<SlotSpan>,
    entries: Vec<(PageIndex, PageEntry)>,
}

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Makes an I/O queue with a channel to each server of the cluster. A server that cannot be
    /// reached is left out until it answers, if a region has copies or the server was to be
    /// emptied.
    ///
    /// # Errors
    /// [`ConnectError`] of the first server that cannot be reached.
    pub fn new(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> {
        let ports = (cluster.sessions().iter().enumerate())
            .map(|(server, session)| {
                let health = (&cluster.health, server);
                let may_be_closed = cluster.has_copies() || cluster.health.is_leaving(server);
                Port::new(session, health, may_be_closed)
            })
            .collect::<Result<_, _>>()?;
        Self::over(cluster, ports)
    }

    /// Makes an I/O queue whose channels are opened by the first requests. A server that cannot be
    /// reached fails these at their deadline.
    ///
    /// # Errors
    /// The operating system's, for lack of descriptors.
    pub fn unopened(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> {
        let sessions = cluster.sessions();
        let ports = sessions.iter().enumerate();
        let ports = ports.map(|(server, session)| Port::added(session, &cluster.health, server));
        Self::over(cluster, ports.collect())
    }

    fn over(cluster: &Arc<Cluster>, ports: Vec<Port<IoBuf<F>>>) -> Result<Self, ConnectError> {
        let waker = Waker::new().map_err(|source| ConnectError::Unreachable {
            endpoint: "doorbell of a worker".to_owned(),
            source,
        })?;
        let (ended_calls_sender, ended_calls) = crossbeam_channel::unbounded();
        Ok(Self {
            deadline: cluster.deadline,
            cluster: cluster.clone(),
            ports: Ports::new(ports),
            prepared: 0,
            runs: Vec::new(),
            vacant: Vec::new(),
            load: IoLoad::default(),
            waiting: VecDeque::new(),
            ready: Vec::with_capacity(64),
            polls: 0,
            turns: 0,
            ops_in_flight: 0,
            staging: Staging::new(cluster.registered.clone()),
            sources: SourceReads::new(cluster.registered.clone()),
            coder: Coder::new(),
            completions: Vec::new(),
            ended_calls,
            ended_calls_sender,
            calls_in_flight: 0,
            calls_by_worker: 0,
            keeps_calls: false,
            kept_calls: VecDeque::new(),
            waker: Arc::new(waker),
            passive: false,
            look_again: None,
            refused: None,
            spare: Vec::new(),
            watch: Watch::new(cluster.traffic.clone()),
            places: Vec::new(),
            freed: Vec::new(),
            entries: Vec::new(),
        })
    }

    /// Makes an I/O queue for signal handlers: it starts no thread. Without its channel a request
    /// fails at once, until [`reopen`](Self::reopen) has opened a new one. Only for
    /// remote memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn passive(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> {
        let mut io_queue = Self::new(cluster)?;
        io_queue.passive = true;
        Ok(io_queue)
    }

    /// Takes the reason why writes wait for slots, if servers have no room for them.
    pub fn take_refused(&mut self) -> Option<StoreError> {
        self.refused.take()
    }

    /// Prepares for one fill at a time of up to `pages` pages of this store: from now on such a
    /// fill allocates nothing unless it fails.
    pub fn prepare(&mut self, store: &PageStore, pages: usize) {
        self.runs.reserve(1);
        self.vacant.reserve(1);
        self.waiting.reserve(1);
        self.ready.reserve(1);
        self.completions.reserve(pages);
        self.prepared = self.prepared.max(pages);
        self.ports.absent.backlog.reserve(pages);
        for port in self.ports.iter_mut() {
            port.backlog.reserve(pages);
        }
        let (mut parts, mut hashes) = self.spare();
        parts.reserve(pages);
        hashes.reserve(pages);
        self.spare.push((parts, hashes));
        self.prepare_decoding(store, pages);
        if let Backing::Remote(remote) = &store.backing
            && !remote.scheme.is_raw()
        {
            self.coder.prepare(&remote.scheme, store.page_bytes);
            self.staging.prepare(store.page_bytes, pages);
        }
    }

    /// Requests `page` and the pages behind it in `frame`, as many as the frame holds. Pages that
    /// were never written or repeat one value need no READ. The request owns the pages until it is
    /// handed back.
    ///
    /// # Panics
    /// If the frame is not whole pages of the store, at least one.
    pub fn fill(&mut self, store: &Arc<PageStore>, page: PageIndex, frame: F, request: R) {
        self.begin_or_hold(Direction::Fill, (request, store, page), frame, None);
    }

    /// Requests a page of a snapshot in `frame`. `entry` is the page's entry in a copy of the
    /// process, at [`PageStore::entry_address`]. The words may be any: those that are no entry of
    /// the snapshot end in an error. Keep the snapshot until the request is handed back.
    ///
    /// # Panics
    /// If the frame is not one page of the store.
    pub fn fill_copy(
        &mut self,
        snapshot: &Snapshot,
        page: PageIndex,
        entry: EntryWords,
        frame: F,
        request: R,
    ) {
        let store = snapshot.store();
        assert_eq!(frame.as_ref().len(), store.page_bytes, "one page");
        self.begin_or_hold(Direction::Fill, (request, store, page), frame, Some(entry));
    }

    /// Requests that the pages of `frame` be written back whose hash says that they changed. The
    /// first page of the frame is `page`. The request owns the pages until it is handed back. A
    /// failed write leaves the last good copy of its pages in place.
    ///
    /// # Panics
    /// If the frame is not whole pages of the store, at least one.
    pub fn write_back(&mut self, store: &Arc<PageStore>, page: PageIndex, frame: F, request: R) {
        self.begin_or_hold(Direction::WriteBack, (request, store, page), frame, None);
    }

    fn begin_or_hold(
        &mut self,
        way: Direction,
        (request, store, page): (R, &Arc<PageStore>, PageIndex),
        frame: F,
        entry: Option<EntryWords>,
    ) {
        check_run(store, page, &frame);
        let spare = self.spare();
        let run = IoRun::new(
            way,
            (request, store, page),
            (frame, entry),
            spare,
            (self.polls, self.turns),
        );
        self.load.held += 1;
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.runs.push(None);
            self.runs.len() - 1
        });
        self.advance(index, run);
    }

    /// Begins a turn of the driver. What is posted and ends within one turn ends
    /// [at once](RunTiming::at_once).
    pub fn begin_turn(&mut self) {
        self.turns += 1;
    }

    /// Drives channels, repeats and deadlines; never waits. Returns whether requests have ended,
    /// which [`take_ended`](Self::take_ended) hands out.
    pub fn poll(&mut self) -> bool {
        self.polls += 1;
        self.look_again = None;
        self.watch.looks();
        self.meet_servers();
        let is_opening = |port: &Port<_>| matches!(port.state, PortState::Opening(_));
        if self.has_calls_elsewhere() || self.ports.iter().any(is_opening) {
            self.waker.clear();
        }
        if self.calls_in_flight > 0 {
            self.finish_calls();
        }
        for port in 0..self.ports.len() {
            self.drive(port);
        }
        // Ended requests make room for waiting runs, before the caller starts anything new.
        for _ in 0..self.waiting.len() {
            let index = self.waiting.pop_front().expect("counted above");
            let run = self.take(index);
            self.advance(index, run);
        }
        self.watch.looked();
        !self.ready.is_empty()
    }

    /// Takes a request that has ended, the last one first: its bytes are in the caches.
    pub fn take_ended(&mut self) -> Option<RunCompletion<R, F>> {
        let ended = self.ready.pop()?;
        self.load.begun -= 1;
        self.load.begun_bytes -= ended.frame.as_ref().len();
        Some(ended)
    }

    /// Takes back a held request that, by `is_over`, need not begin.
    pub fn withdraw(&mut self, is_over: impl Fn(&R) -> bool) -> Option<(R, F)> {
        if self.load.held == 0 {
            return None;
        }
        let is_over = |&index: &usize| {
            let run = self.runs[index].as_ref().expect("a waiting run is here");
            run.is_held() && is_over(&run.request)
        };
        let at = self.waiting.iter().position(is_over)?;
        let index = self.waiting.remove(at).expect("found just now");
        let (request, frame, spare) = self.take(index).withdraw();
        self.vacant.push(index);
        self.spare.push(spare);
        self.load.held -= 1;
        Some((request, frame))
    }

    /// Returns the requests that are held.
    pub fn held(&self) -> impl Iterator<Item = &R> {
        let runs = self.waiting.iter().map(|&index| {
            let run = self.runs[index].as_ref();
            run.expect("a waiting run is here")
        });
        runs.filter(|run| run.is_held()).map(|run| &run.request)
    }

    /// Returns all requests that were not handed back yet.
    pub fn requests(&self) -> impl Iterator<Item = &R> {
        let runs = self.runs.iter().flatten().map(|run| &run.request);
        runs.chain(self.ready.iter().map(|ended| &ended.request))
    }

    /// Returns all requests that were not handed back yet, to be changed.
    pub fn requests_mut(&mut self) -> impl Iterator<Item = &mut R> {
        let runs = self.runs.iter_mut().flatten().map(|run| &mut run.request);
        runs.chain(self.ready.iter_mut().map(|ended| &mut ended.request))
    }

    /// Returns the numbers of requests that were not handed back yet.
    pub fn load(&self) -> IoLoad {
        self.load
    }

    /// Returns the number of requests that were not handed back yet.
    pub fn in_flight(&self) -> usize {
        self.load.held + self.load.begun
    }

    /// Appends the descriptors to sleep on and returns when to [`poll`](Self::poll) at the latest;
    /// a time in the past means at once. With nothing in flight and nothing refused there is
    /// nothing to sleep on.
    pub fn wait<'a>(&'a self, fds: &mut impl Extend<PollFd<'a>>) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let mut until = self.look_again;
        let mut sooner = |time: Option<Instant>| until = until.into_iter().chain(time).min();
        let mut waker = self.has_calls_elsewhere();
        if !self.ports.absent.backlog.is_empty() {
            return Some(Instant::now());
        }
        for port in self.ports.iter() {
            match &port.state {
                PortState::Open { channel, .. } => {
                    let wait = channel.wait();
                    sooner(wait.until);
                    fds.extend(wait.poll_fd().filter(|fd| !fd.events().is_empty()));
                }
                PortState::Opening(_) => waker = true,
                PortState::Closed(at) if port.wants_channel() => sooner(Some(*at)),
                PortState::Closed(_) => {}
            }
            if !matches!(port.state, PortState::Open { .. }) {
                let waiting = || (port.backlog.iter()).filter_map(|op| self.part_of(op.tag));
                let looks = waiting().map(|it| self.run_of(it).started.look_by(self.deadline));
                sooner(looks.min());
                // The server may turn out to be silent for others, so that a copy misses a write.
                let any_copies = waiting().any(|tag| self.has_copies(tag));
                sooner(any_copies.then(|| Instant::now() + COPIES_PAUSE));
            }
        }
        if waker {
            fds.extend([PollFd::new(self.waker.fd(), PollFlags::POLLIN)]);
        }
        self.watch.sleeps(until);
        until
    }

    /// True if calls are under way that ring when they have returned.
    fn has_calls_elsewhere(&self) -> bool {
        self.calls_in_flight > self.calls_by_worker
    }

    /// True if a request for pages of this store begins at once.
    pub fn has_room(&self, store: &PageStore) -> bool {
        match &store.backing {
            Backing::Remote(remote) => {
                self.ops_in_flight < OPS_MAX
                    && (remote.scheme.is_raw() || self.staging.has(store.page_bytes))
            }
            Backing::Blocking(_) => self.calls_in_flight < OPS_MAX,
        }
    }

    fn spare(&mut self) -> Spare<F> {
        self.spare.pop().unwrap_or_default()
    }

    /// Begins a held run if there is room.
    fn begin(&mut self, run: &mut IoRun<R, F>) -> bool {
        if !self.has_room(&run.store) {
            return false;
        }
        let (frame, entry) = run.begin(self.load.begun == 0, (self.polls, self.turns));
        self.load.held -= 1;
        self.load.begun += 1;
        self.load.begun_bytes += frame.as_ref().len();
        match (&run.store.backing, run.way, entry) {
            (Backing::Blocking(_), ..) => run.cut_calls(frame),
            (_, Direction::WriteBack, _) => self.cut_write(run, frame),
            (_, Direction::Fill, None) => run.cut_fill(frame),
            (_, Direction::Fill, Some(entry)) => run.cut_copied(frame, entry),
        }
        true
    }

    /// Starts all parts of a run that can go now.
    fn advance(&mut self, index: usize, mut run: IoRun<R, F>) {
        let store = run.store.clone();
        let is_begun = !run.is_held() || self.begin(&mut run);
        let all = is_begun
            && match (&store.backing, run.way) {
                (Backing::Remote(remote), Direction::Fill) => self.fetch(index, &mut run, remote),
                (Backing::Remote(remote), _) => self.write(index, &mut run, remote),
                (Backing::Blocking(blocking), _) => {
                    self.call(index, &mut run, blocking);
                    true
                }
            };
        if !all {
            self.waiting.push_back(index);
        }
        self.put(index, run);
    }

    fn take(&mut self, index: usize) -> IoRun<R, F> {
        self.runs[index]
            .take()
            .expect("only runs that have not ended are referred to")
    }

    /// Puts a run back, or hands it out if it has ended.
    fn put(&mut self, index: usize, run: IoRun<R, F>) {
        if !run.has_ended() {
            self.runs[index] = Some(run);
            return;
        }
        let (done, spare) = run.finish(self.turns);
        self.vacant.push(index);
        self.ready.push(done);
        self.spare.push(spare);
    }

    /// Puts a run back behind a request of a part. A part that has to fetch its bytes does so at
    /// the end of the poll.
    fn put_waiting(&mut self, (index, part): (usize, usize), run: IoRun<R, F>) {
        if matches!(run.parts[part].task, Task::Fetch(_)) {
            self.wait_again(index);
        }
        self.put(index, run);
    }

    fn run_of(&self, tag: u64) -> &IoRun<R, F> {
        self.runs[place_of(tag).0]
            .as_ref()
            .expect("a request belongs to a run that has not ended")
    }

    /// Returns the tag of the part that a request belongs to. `None` for an abandoned one.
    fn part_of(&self, tag: u64) -> Option<u64> {
        if !SourceReads::is_one(tag) {
            return Some(tag);
        }
        let (index, part) = self.sources.get(tag).owner?;
        Some(tag_of(index, part))
    }

    /// Ends a part that moves, which has succeeded or failed for good.
    fn end_part(
        &mut self,
        (index, part): (usize, usize),
        mut run: IoRun<R, F>,
        (transfer, buf): (SlotTransfer, IoBuf<F>),
        result: Result<(), ChannelError>,
    ) {
        run.parts[part].task = Task::Moving(transfer);
        self.runs[index] = Some(run);
        self.finish(tag_of(index, part), buf, result);
    }

    /// Ends a request that has succeeded or failed for good.
    fn finish(&mut self, tag: u64, buf: IoBuf<F>, result: Result<(), ChannelError>) {
        let (index, part) = place_of(tag);
        self.ops_in_flight -= 1;
        let mut run = self.take(index);
        let store = run.store.clone();
        let (remote, transfer) = (store.remote_backing(), run.moving(part));
        let bytes = u64::from(transfer.bytes);
        self.watch.ended(run.way.index(), bytes);
        if let Some(chooser) = &remote.chooser {
            let (page, pages) = (run.page + run.parts[part].first, run.parts[part].pages);
            chooser.moved(run.way.index(), transfer.form, page, pages, bytes);
        }
        let block = match buf {
            IoBuf::Frame(frame) => {
                run.parts[part].frame = Some(frame);
                None
            }
            IoBuf::Staging(block) => Some(block),
        };
        match run.way {
            Direction::Fill => {
                let in_time = run.started.elapsed() < self.deadline;
                let (ports, may_wait) = (&self.ports, !self.passive);
                let outlook = || ports.outlook(remote, &transfer, in_time, may_wait);
                let coder = &mut self.coder;
                let block = block.as_ref().map(|block| block.as_ref());
                run.fetched(part, remote, (transfer, outlook), coder, block, result)
            }
            Direction::WriteBack => self.written(&mut run, part, remote, transfer, result),
        }
        if let Some(block) = block {
            self.staging.put(block, store.page_bytes);
        }
        // A damaged part is read again.
        self.put_waiting((index, part), run);
    }

    /// Lets a run's parts that do not move take their next step at the end of the poll.
    fn wait_again(&mut self, index: usize) {
        if !self.waiting.contains(&index) {
            self.waiting.push_back(index);
        }
    }
}

impl<R, F: RunBuffer> Drop for IoQueue<R, F> {
    /// Gives up all requests in flight. Their frames are dropped, and slots that were being
    /// written, or that a lost WRITE may still reach, are not used again.
    fn drop(&mut self) {
        for run in self.runs.iter().flatten() {
            let Backing::Remote(remote) = &run.store.backing else {
                continue;
            };
            let moving = run.parts.iter().filter_map(|part| match part.task {
                Task::Moving(transfer) => Some((transfer.place, part.pages)),
                _ => None,
            });
            if run.way == Direction::WriteBack {
                moving.for_each(|(place, pages)| {
                    // Nobody will know what lands there: the doubt stays.
                    remote.pool.begin_doubt(place);
                    remote.pool.settle(place, pages);
                });
            }
        }
        self.ports.iter_mut().for_each(Port::give_up);
    }
}

fn check_run<F: RunBuffer>(store: &PageStore, page: PageIndex, frame: &F) {
    let bytes = frame.as_ref().len();
    let pages = bytes / store.page_bytes;
    assert!(
        bytes.is_multiple_of(store.page_bytes)
            && pages > 0
            && page.0 + pages <= store.pages() as usize,
        "a frame of {bytes} bytes at page {page} of {}, {} bytes each",
        store.pages(),
        store.page_bytes
    );
}

/// Returns the tag of a request for `part` of the run at `index`.
fn tag_of(index: usize, part: usize) -> u64 {
    ((index as u64) << 32) | part as u64
}

fn place_of(tag: u64) -> (usize, usize) {
    ((tag >> 32) as usize, tag as u32 as usize)
}
