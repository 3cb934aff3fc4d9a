//! [`IoQueue`]: the page I/O of one worker thread, with one channel per server and many operations
//! in flight.
//!
//! The rule it keeps: every accepted operation ends exactly once, in [`IoQueue::poll`], with its
//! frame, before the cluster's deadline and the operation deadline of the session have passed; no
//! call waits for a server or for a user's store. Where a region has used up its memory, a separate
//! thread asks for more, and the run waits.
//!
//! An operation is about a *run* of pages. It is cut into parts that move on their own: pages that
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

mod call;
mod copies;
mod fill;
mod home;
mod operation;
mod port;
mod ports;
mod run;
mod servers;
mod staging;
mod user_store;
mod write;

use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender};
use farpage_fabric::{ChannelError, Completion, ConnectError, Op, Verb};
use nix::poll::{PollFd, PollFlags, PollTimeout};

pub use self::{
    call::StoreCall,
    operation::{RunBuffer, RunCompletion, RunCounts},
};
use self::{
    port::{Port, PortState},
    ports::Ports,
    run::{Direction, IoRun, SlotTransfer, Spare, Task},
    staging::{IoBuf, Staging},
};
use crate::{
    Cluster, EntryWords, PageIndex, PageStore, Snapshot, StoreError,
    blocking::Waker,
    codec::{Coder, Watch},
    entry::PageEntry,
    place::{SlotPlace, SlotSpan},
    remote::{Backing, RemoteStore},
};

/// Requests in flight at which an I/O queue takes no more runs: more than the queues of its
/// channels hold makes no difference. Calls of users' stores are counted apart, so that a store
/// that stalls leaves room for everything else.
const OPS_MAX: usize = 128;
/// Pause before the I/O queue looks again for room that other I/O queues' writes must make.
const ROOM_PAUSE: Duration = Duration::from_micros(100);

/// Pause before the I/O queue looks again for a copy that waiting requests can go to.
const COPIES_PAUSE: Duration = Duration::from_millis(50);

/// Page I/O of one worker thread. See the module.
pub struct IoQueue<F: RunBuffer> {
    deadline: Duration,
    cluster: Arc<Cluster>,
    ports: Ports<IoBuf<F>>,
    /// Number of requests that each port takes without allocating.
    prepared: usize,
    /// Runs under way. The tag of a request names its run and part.
    runs: Vec<Option<IoRun<F>>>,
    vacant: Vec<usize>,
    /// Runs with parts that wait for a staging buffer or for remote memory, oldest first.
    waiting: VecDeque<usize>,
    /// Operations that have ended and were not handed out.
    ready: Vec<RunCompletion<F>>,
    /// Requests that are posted or in a port's backlog.
    ops_in_flight: usize,
    staging: Staging,
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

impl<F: RunBuffer> IoQueue<F> {
    /// Makes an I/O queue with a channel to each server of the cluster. A server that cannot be
    /// reached is left out until it answers, if a region has copies or the server was to be
    /// emptied.
    ///
    /// # Errors
    /// [`ConnectError`] of the first server that cannot be reached.
    pub fn new(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> {
        let waker = Waker::new().map_err(|source| ConnectError::Unreachable {
            endpoint: "eventfd of a worker".to_owned(),
            source,
        })?;
        let (ended_calls_sender, ended_calls) = crossbeam_channel::unbounded();
        let ports = (cluster.sessions().iter().enumerate())
            .map(|(server, session)| {
                let health = (&cluster.health, server);
                let may_be_closed = cluster.has_copies() || cluster.health.is_leaving(server);
                Port::new(session, health, may_be_closed)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            deadline: cluster.deadline,
            cluster: cluster.clone(),
            ports: Ports::new(ports),
            prepared: 0,
            runs: Vec::new(),
            vacant: Vec::new(),
            waiting: VecDeque::new(),
            ready: Vec::new(),
            ops_in_flight: 0,
            staging: Staging::new(cluster.registered.clone()),
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

    /// Makes an I/O queue for signal handlers: it starts no thread. Without its channel an
    /// operation fails at once, until [`reopen`](Self::reopen) has opened a new one. Only for
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

    /// Begins to open channels that were lost.
    pub fn reopen(&mut self) {
        self.add_ports();
        for port in self.ports.iter_mut() {
            port.reopen(&self.waker);
        }
    }

    /// True if copies of pages are passed over for want of channels that can be opened now. For
    /// I/O queues that open none themselves.
    pub fn lacks_channels(&self) -> bool {
        self.passive
            && (self.ports.absent.is_wanted() || self.ports.iter().any(Port::lacks_channel))
    }

    /// Begins to open the channels that the I/O queue [lacks](Self::lacks_channels).
    pub fn open_lacking(&mut self) {
        self.add_ports();
        for port in self.ports.iter_mut().filter(|port| port.lacks_channel()) {
            port.reopen(&self.waker);
        }
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
        if let Backing::Remote(remote) = &store.backing
            && !remote.scheme.is_raw()
        {
            self.coder.prepare(&remote.scheme, store.page_bytes);
            self.staging.prepare(store.page_bytes, pages);
        }
    }

    /// Starts to bring `page` and the pages behind it into `frame`, as many as the frame holds.
    /// Pages that were never written or repeat one value need no request. The caller owns the pages
    /// until the operation has ended.
    ///
    /// # Errors
    /// The frame: too much is in flight. Nothing was started; poll and try again.
    ///
    /// # Panics
    /// If the frame is not whole pages of the store, at least one.
    pub fn fill(
        &mut self,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        check_run(store, page, &frame);
        match &store.backing {
            Backing::Remote(remote) => self.fill_remote(store, remote, page, frame, tag),
            Backing::Blocking(_) => self.call_user(store, page, frame, tag, Direction::Fill),
        }
    }

    /// Starts to bring a page of a snapshot into `frame`. `entry` is the page's entry in a copy of
    /// the process, at [`PageStore::entry_address`]. The words may be any: those that are no entry
    /// of the snapshot end in an error. Keep the snapshot until the operation has ended.
    ///
    /// # Errors
    /// The frame: too much is in flight. Nothing was started; poll and try again.
    ///
    /// # Panics
    /// If the frame is not one page of the store.
    pub fn fill_copy(
        &mut self,
        snapshot: &Snapshot,
        page: PageIndex,
        entry: EntryWords,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        let store = snapshot.store();
        check_run(store, page, &frame);
        assert_eq!(frame.as_ref().len(), store.page_bytes, "one page");
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("only regions in remote memory have snapshots")
        };
        self.fill_copied(store, remote, page, entry, frame, tag)
    }

    /// Brings a page of a snapshot into `frame` as [`fill_copy`](Self::fill_copy) does, and waits.
    /// For an I/O queue that nothing else uses.
    ///
    /// # Panics
    /// If anything is in flight, or the frame is not one page of the store.
    #[cfg(test)]
    pub(crate) fn read_copy(
        &mut self,
        snapshot: &Snapshot,
        page: PageIndex,
        entry: EntryWords,
        frame: F,
    ) -> RunCompletion<F> {
        assert_eq!(self.in_flight(), 0, "an I/O queue that nothing else uses");
        let is_accepted = self.fill_copy(snapshot, page, entry, frame, 0).is_ok();
        assert!(is_accepted, "an idle I/O queue has room");
        let mut done = Vec::new();
        loop {
            self.poll(&mut done);
            if let Some(done) = done.pop() {
                return done;
            }
            let mut fds = Vec::new();
            let until = self.wait(&mut fds);
            sleep(&mut fds, until);
        }
    }

    /// Starts to write back the pages of `frame` whose hash says that they changed. The first page
    /// of the frame is `page`. The caller owns the pages until the operation has ended. A failed
    /// write leaves the last good copy of its pages in place.
    ///
    /// # Errors
    /// The frame: too much is in flight. Nothing was started; poll and try again.
    ///
    /// # Panics
    /// If the frame is not whole pages of the store, at least one.
    pub fn write_back(
        &mut self,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: F,
        tag: u64,
    ) -> Result<(), F> {
        check_run(store, page, &frame);
        match &store.backing {
            Backing::Remote(remote) => self.write_remote(store, remote, page, frame, tag),
            Backing::Blocking(_) => self.call_user(store, page, frame, tag, Direction::WriteBack),
        }
    }

    /// Appends the operations that have ended. Drives channels, repeats and deadlines; never waits.
    pub fn poll(&mut self, done: &mut Vec<RunCompletion<F>>) {
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
        // Ended operations make room for waiting runs, before the caller starts anything new.
        for _ in 0..self.waiting.len() {
            let index = self.waiting.pop_front().expect("counted above");
            let run = self.take(index);
            self.advance(index, run);
        }
        self.watch.looked();
        done.append(&mut self.ready);
    }

    /// Returns the number of operations that were accepted and not handed back yet.
    pub fn in_flight(&self) -> usize {
        self.runs.len() - self.vacant.len() + self.ready.len()
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
                let looks = (port.backlog.iter())
                    .map(|op| self.run_of(op.tag).started.look_by(self.deadline));
                sooner(looks.min());
                // The server may turn out to be silent for others, so that a copy misses a write.
                let any_copies = port.backlog.iter().any(|op| self.has_copies(op.tag));
                sooner(any_copies.then(|| Instant::now() + COPIES_PAUSE));
            }
        }
        if waker {
            fds.extend([PollFd::new(self.waker.fd(), PollFlags::POLLIN)]);
        }
        self.watch.sleeps(until);
        until
    }

    /// True if one more run may start.
    fn has_room(&self, store: &PageStore, remote: &RemoteStore) -> bool {
        self.ops_in_flight < OPS_MAX
            && (remote.scheme.is_raw() || self.staging.has(store.page_bytes))
    }

    fn spare(&mut self) -> Spare<F> {
        self.spare.pop().unwrap_or_default()
    }

    /// Begins a run whose parts are cut.
    fn launch(&mut self, run: IoRun<F>) {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.runs.push(None);
            self.runs.len() - 1
        });
        self.advance(index, run);
    }

    /// Starts all parts of a run that can go now.
    fn advance(&mut self, index: usize, mut run: IoRun<F>) {
        let store = run.store.clone();
        let all = match (&store.backing, run.way) {
            (Backing::Remote(remote), Direction::Fill) => self.fetch(index, &mut run, remote),
            (Backing::Remote(remote), Direction::WriteBack) => self.write(index, &mut run, remote),
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

    fn take(&mut self, index: usize) -> IoRun<F> {
        self.runs[index]
            .take()
            .expect("only runs that have not ended are referred to")
    }

    /// Puts a run back, or hands it out if it has ended.
    fn put(&mut self, index: usize, run: IoRun<F>) {
        if !run.has_ended() {
            self.runs[index] = Some(run);
            return;
        }
        let (done, spare) = run.finish();
        self.vacant.push(index);
        self.ready.push(done);
        self.spare.push(spare);
    }

    fn run_of(&self, tag: u64) -> &IoRun<F> {
        self.runs[place_of(tag).0]
            .as_ref()
            .expect("a request belongs to a run that has not ended")
    }

    fn post(
        &mut self,
        index: usize,
        run: &mut IoRun<F>,
        part: usize,
        remote: &RemoteStore,
        mut transfer: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        match remote.pool.has_copies() {
            true => self.aim_first(run.way, remote, &mut transfer),
            false => _ = transfer.aim_home(remote),
        }
        run.parts[part].task = Task::Moving(transfer);
        self.ops_in_flight += 1;
        self.watch.posted(run.way.index());
        self.repost(tag_of(index, part), run.way.verb(), remote, transfer, buf);
    }

    fn repost(
        &mut self,
        tag: u64,
        verb: Verb,
        remote: &RemoteStore,
        SlotTransfer {
            place,
            server,
            extent,
            bytes,
            ..
        }: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        let op = Op {
            tag,
            verb,
            extent: extent.unwrap_or_else(|| remote.pool.extent(place)),
            offset: place.offset,
            len: bytes,
            buf,
        };
        self.ports[remote.pool.port(server)].post(op);
    }

    /// Lets one port make progress.
    fn drive(&mut self, at: usize) {
        // 1. Completions. Failed requests go to the backlog or end. A complete run is handed out
        //    first: its bytes are in the caches now.
        while self.poll_channel(at) && self.ready.is_empty() {}
        // 2. Replace a broken channel.
        let port = &mut self.ports[at];
        if port.is_open() && port.backlog.is_empty() {
            return;
        }
        let now = Instant::now();
        port.forget_doubts();
        port.recover(now, (!self.passive).then_some(&self.waker));
        // 3. The backlog: post it, or fail the operations that are too late.
        if port.backlog.is_empty() {
            return;
        }
        if port.is_open() {
            return port.post_backlog();
        }
        let is_lost = port.is_lost();
        for _ in 0..port.backlog.len() {
            let op = self.ports[at].backlog.pop_front().expect("counted above");
            let Some(op) = self.redirect(op) else {
                continue;
            };
            let in_time = self.run_of(op.tag).started.elapsed() < self.deadline;
            if in_time && !self.passive && !is_lost {
                self.ports[at].backlog.push_back(op);
            } else {
                let error = self.ports[at].why_late(self.deadline);
                self.finish(op.tag, op.buf, Err(error));
            }
        }
    }

    /// Polls a channel. True if more can end without waiting.
    fn poll_channel(&mut self, at: usize) -> bool {
        let PortState::Open { channel, .. } = &mut self.ports[at].state else {
            return false;
        };
        let mut completions = mem::take(&mut self.completions);
        channel.poll(&mut completions);
        let until = channel.wait().until;
        for completion in completions.drain(..) {
            self.complete(at, completion);
        }
        self.completions = completions;
        until.is_some_and(|until| until <= Instant::now())
    }

    fn complete(&mut self, at: usize, completion: Completion<IoBuf<F>>) {
        let Completion {
            tag, buf, result, ..
        } = completion;
        match &result {
            Ok(()) => self.ports[at].succeeded(),
            Err(error) if error.is_transient() => self.ports[at].failed(error),
            Err(_) => {}
        }
        match result {
            result if self.has_copies(tag) => self.complete_copy(tag, buf, result),
            Err(error) if error.is_transient() || self.has_moved(tag) => {
                self.repeat(tag, buf, error);
            }
            result => self.finish(tag, buf, result),
        }
    }

    /// Repeats a request that seems lost, if there is time.
    fn repeat(&mut self, tag: u64, buf: IoBuf<F>, error: ChannelError) {
        let (index, part) = place_of(tag);
        let run = self.runs[index]
            .as_mut()
            .expect("a request belongs to a run that has not ended");
        let Task::Moving(transfer) = &mut run.parts[part].task else {
            unreachable!("a request belongs to a part that moves")
        };
        if run.way == Direction::WriteBack {
            transfer.doubt = 1;
        }
        let store = run.store.clone();
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("user stores have no channel")
        };
        if run.way == Direction::Fill {
            transfer.aim_home(remote);
        }
        let session = remote.pool.session(transfer.server);
        let is_lost = session.loss(false).is_some();
        if is_lost || run.started.elapsed() >= self.deadline {
            return self.finish(tag, buf, Err(error));
        }
        transfer.attempts += 1;
        run.tally.retries += 1;
        let (verb, transfer) = (run.way.verb(), *transfer);
        self.repost(tag, verb, remote, transfer, buf);
    }

    /// Ends a request that has succeeded or failed for good.
    fn finish(&mut self, tag: u64, buf: IoBuf<F>, result: Result<(), ChannelError>) {
        let (index, part) = place_of(tag);
        self.ops_in_flight -= 1;
        let mut run = self.take(index);
        let store = run.store.clone();
        let Backing::Remote(remote) = &store.backing else {
            unreachable!("user stores have no channel")
        };
        let Task::Moving(transfer) = run.parts[part].task else {
            unreachable!("a request belongs to a part that moves")
        };
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
                let outlook = self.outlook(&run, remote, &transfer);
                let coder = &mut self.coder;
                let block = block.as_ref().map(|block| block.as_ref());
                run.fetched(part, remote, (transfer, outlook), coder, block, result)
            }
            Direction::WriteBack => self.written(&mut run, part, remote, transfer, result),
        }
        if let Some(block) = block {
            self.staging.put(block, store.page_bytes);
        }
        // A damaged part is read again at the end of this poll.
        if matches!(run.parts[part].task, Task::Fetch(_)) && !self.waiting.contains(&index) {
            self.waiting.push_back(index);
        }
        self.put(index, run);
    }
}

impl<F: RunBuffer> Drop for IoQueue<F> {
    /// Gives up all operations in flight. Their frames are dropped, and slots that were being
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
                moving.for_each(|(place, pages)| remote.pool.settle(place, pages));
            }
        }
        self.ports.iter_mut().for_each(Port::give_up);
    }
}

/// Waits for an event of `fds`, at most until a time.
pub(crate) fn sleep(fds: &mut [PollFd<'_>], until: Option<Instant>) {
    let timeout = until.map_or(PollTimeout::NONE, |until| {
        let left = until.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left.as_millis() + u128::from(!left.is_zero()))
            .unwrap_or(PollTimeout::MAX)
    });
    // Whatever the call returns, the caller polls its channels next.
    let _ = nix::poll::poll(fds, timeout);
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
