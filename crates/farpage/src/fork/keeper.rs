//! [`Keeper`]: a thread that brings absent pages in for processes made by `fork`.
//!
//! A child has a copy of the page table of its moment, and the slots that the table refers to are
//! held as long as the child lives. So the keeper reads a page's entry out of the child, reads the
//! page from the servers, and copies it into the child. What the child has dropped since holds
//! zeros.
//!
//! The rule it keeps: a child gets the bytes that the parent had at the fork, zeros where those
//! were, or SIGBUS. The keeper waits for no child, and takes no lock that a fault can need.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    ops::Range,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_store::{Cluster, EntryWords, Lane, PageIndex, RunCompletion, Snapshot};
use farpage_vm::{
    Refusal,
    child::{ChildEvent, ChildFeatures, ChildMemory},
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

use super::{
    hooks::{grown, say},
    image::{Census, Image},
    link::{self, Kind, LinkName},
    removed::Removed,
};

/// Bytes of a child beyond the budget that are worth a line.
const GROWN_BYTES: usize = 16 << 20;
/// Time between two looks at children whose connections are closed.
const LOOK: Duration = Duration::from_millis(50);
/// Time between two tries to put a page into a child that changes its mappings.
const RETRY: Duration = Duration::from_millis(1);
/// Time between two looks whether the thread has accepted a connection.
const PAUSE: Duration = Duration::from_micros(20);
/// Upper bound of the time that noticing the ends of children takes.
const SETTLE: Duration = Duration::from_secs(1);
/// Pages read ahead of a child that touches pages in order, at most, and their bytes.
const AHEAD_PAGES_MAX: usize = 64;
const AHEAD_BYTES_MAX: usize = 512 << 10;

/// Handle on the thread of one runtime. Dropping it ends the thread when no child is left.
pub(super) struct Keeper {
    pub(super) name: LinkName,
    pub(super) features: ChildFeatures,
    /// Socket that children inherit, where the thread works on the program's table.
    pub(super) listener: Option<RawFd>,
    shared: Arc<Shared>,
}

/// Keeper as other threads know it.
pub(super) struct Shared {
    /// Images whose children have not called yet, by number.
    expected: Mutex<HashMap<u64, Arc<Image>>>,
    census: Arc<Census>,
    /// Number of turns of the thread.
    turns: AtomicU64,
    /// Held while connections are accepted, and by a fork: where the thread works on the program's
    /// table, a child would get the keeper's own end of its connection.
    accepting: Mutex<()>,
    /// True while a fork holds `accepting`.
    is_held: AtomicBool,
    /// True from the end of a fork until the thread has accepted its connection. The next fork
    /// waits for that: forks in a row would leave the thread no time.
    is_due: AtomicBool,
    ends: AtomicBool,
    waker: EventFd,
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keeper {
    /// Starts the thread, on the table of the calling one.
    ///
    /// # Errors
    /// The reason in words.
    pub(super) fn start(cluster: Arc<Cluster>) -> Result<Keeper, String> {
        let features = ChildFeatures::find().map_err(|error| error.to_string())?;
        let name = LinkName::new();
        let start = || -> io::Result<(RawFd, Arc<Shared>)> {
            let listener = link::listen(&name)?;
            let number = listener.as_raw_fd();
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            let shared = Arc::new(Shared {
                expected: Mutex::default(),
                census: Arc::new(Census::new(farpage_tables::is_private())),
                turns: AtomicU64::new(0),
                accepting: Mutex::default(),
                is_held: AtomicBool::new(false),
                is_due: AtomicBool::new(false),
                ends: AtomicBool::new(false),
                waker: EventFd::from_value_and_flags(0, flags)?,
            });
            let serving = Serving::new(listener, shared.clone(), cluster);
            let builder = thread::Builder::new().name("farpage-children".into());
            let serve = move || {
                if catch_unwind(AssertUnwindSafe(|| serving.serve())).is_err() {
                    // Children would be ended without a word.
                    say("ends: the thread that serves processes made by fork has failed");
                    std::process::abort();
                }
            };
            farpage_tables::spawn(builder, serve)?;
            Ok((number, shared))
        };
        let (listener, shared) =
            start().map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Keeper {
            name,
            features,
            listener: (!shared.census.is_apart).then_some(listener),
            shared,
        })
    }

    /// Returns the count of images, which outlives the runtime.
    pub(super) fn census(&self) -> &Arc<Census> {
        &self.shared.census
    }

    /// Expects a child that has copies of these regions, which it names by `number`. Returns the
    /// addresses of the regions.
    pub(super) fn expect(
        &self,
        number: u64,
        regions: impl Iterator<Item = (Range<usize>, Snapshot)>,
    ) -> Vec<Range<usize>> {
        let image = Image::new(regions, &self.shared.census);
        let addresses = image.addresses();
        locked(&self.shared.expected).insert(number, Arc::new(image));
        addresses
    }

    /// Holds the thread back from accepting connections until the result is released.
    pub(super) fn hold(&self) -> AcceptHold<'_> {
        let until = Instant::now() + SETTLE;
        while self.shared.is_due.load(Ordering::SeqCst) && Instant::now() < until {
            thread::sleep(PAUSE);
        }
        let lock = locked(&self.shared.accepting);
        self.shared.is_held.store(true, Ordering::SeqCst);
        AcceptHold {
            shared: &self.shared,
            _lock: lock,
        }
    }

    /// Waits until the thread has noticed the ends of all children that have ended by now. To be
    /// called on the table of the thread.
    pub(super) fn settle(&self) {
        let (turns, until) = (&self.shared.turns, Instant::now() + SETTLE);
        // After a turn that is under way: one that accepts a child, one that hears of its end.
        let enough = turns.load(Ordering::SeqCst) + 4;
        let census = &self.shared.census;
        let is_over = || turns.load(Ordering::SeqCst) >= enough && !census.is_ending();
        census.wait_unless(is_over, || self.shared.wake(), (RETRY, until));
    }

    /// Expects the child of this number no longer.
    pub(super) fn forget(&self, number: u64) {
        let image = locked(&self.shared.expected).remove(&number);
        drop(image);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.wake();
    }
}

/// Hold on the thread, which accepts no connection.
pub(super) struct AcceptHold<'a> {
    shared: &'a Shared,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> AcceptHold<'a> {
    /// Lets the thread accept again. The caller [wakes](Shared::wake) the thread.
    pub(super) fn release(self) -> &'a Shared {
        self.shared.is_due.store(true, Ordering::SeqCst);
        self.shared.is_held.store(false, Ordering::SeqCst);
        self.shared
    }
}

impl Shared {
    /// Wakes the thread. To be called on its table.
    pub(super) fn wake(&self) {
        // A full counter wakes the thread, too.
        let _ = self.waker.write(1);
    }
}

/// Part of an image that one child has: what it has dropped itself holds zeros.
#[derive(Clone)]
struct View {
    image: Arc<Image>,
    removed: Removed,
}

/// Connection of a process that is about to fork, or of a child that has not called yet.
struct Visitor {
    socket: OwnedFd,
    view: Option<View>,
}

/// A process made by `fork`.
struct Child {
    /// Number by which the child calls itself.
    number: u64,
    /// Connection that the child keeps: its end kills the child, whose pages nobody brings then.
    socket: OwnedFd,
    is_hung_up: bool,
    memory: ChildMemory,
    view: View,
    /// Address behind the last pages that were asked for, and their number.
    ahead: (usize, usize),
    /// Bytes of the pages that were brought in.
    brought_bytes: usize,
}

/// Page on its way into a child.
#[derive(Clone, Copy)]
struct Arriving {
    child: u64,
    address: usize,
    /// True if a thread of the child waits for the page.
    is_wanted: bool,
}

/// The thread.
struct Serving {
    listener: OwnedFd,
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    /// Lane to the servers, from the first absent page on.
    lane: Option<Lane<Vec<u8>>>,
    visitors: Vec<Visitor>,
    children: HashMap<u64, Child>,
    next_child: u64,
    arriving: HashMap<u64, Arriving>,
    next_tag: u64,
    /// Faults that the lane had no room for.
    faults: VecDeque<Arriving>,
    /// Pages that children could not take yet.
    ready: Vec<(Arriving, Vec<u8>)>,
    next_look: Instant,
}

impl Serving {
    fn new(listener: OwnedFd, shared: Arc<Shared>, cluster: Arc<Cluster>) -> Serving {
        Serving {
            listener,
            shared,
            cluster,
            lane: None,
            visitors: Vec::new(),
            children: HashMap::new(),
            next_child: 0,
            arriving: HashMap::new(),
            next_tag: 0,
            faults: VecDeque::new(),
            ready: Vec::new(),
            next_look: Instant::now(),
        }
    }

    fn serve(mut self) {
        loop {
            self.wait();
            self.hear_visitors();
            self.hear_children();
            self.fill();
            self.look_for_ended();
            self.shared.turns.fetch_add(1, Ordering::SeqCst);
            self.shared.census.tell();
            let is_idle = self.visitors.is_empty() && self.children.is_empty();
            if is_idle && self.shared.ends.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Sleeps until something has happened, and notes which children have hung up.
    fn wait(&mut self) {
        let mut until = None;
        let mut sooner = |time: Instant| {
            until = Some(until.map_or(time, |until: Instant| until.min(time)));
        };
        if self.children.values().any(|child| child.is_hung_up) {
            sooner(self.next_look);
        }
        if !self.ready.is_empty() || !self.faults.is_empty() {
            sooner(Instant::now() + RETRY);
        }
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = Vec::new();
        let mut talking = Vec::new();
        for (&key, child) in self.children.iter().filter(|(_, child)| !child.is_hung_up) {
            talking.push(key);
            fds.push(PollFd::new(child.socket.as_fd(), PollFlags::empty()));
        }
        fds.extend(
            self.children
                .values()
                .map(|child| readable(child.memory.fd())),
        );
        fds.extend(
            self.visitors
                .iter()
                .map(|visitor| readable(visitor.socket.as_fd())),
        );
        fds.push(readable(self.shared.waker.as_fd()));
        if !self.shared.is_held.load(Ordering::SeqCst) {
            fds.push(readable(self.listener.as_fd()));
        }
        if let Some(lane) = &self.lane
            && let Some(time) = lane.wait(&mut fds)
        {
            sooner(time);
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            let millis = left.as_nanos().div_ceil(1_000_000);
            PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
        });
        // A failure of the kernel's is met again, and told, where the descriptor is used.
        let _ = poll(&mut fds, timeout);
        let has_hung_up = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let hung_up: Vec<u64> = (talking.iter().zip(&fds))
            .filter(|(_, fd)| has_hung_up(fd))
            .map(|(&key, _)| key)
            .collect();
        for key in hung_up {
            let child = self.children.get_mut(&key);
            child.expect("a child of this turn").is_hung_up = true;
            self.next_look = Instant::now();
        }
        if self.shared.waker.read().is_ok() {
            self.next_look = Instant::now();
        }
    }

    /// Accepts connections, and takes what processes say on theirs.
    fn hear_visitors(&mut self) {
        if let Ok(_accepting) = self.shared.accepting.try_lock() {
            self.shared.is_due.store(false, Ordering::SeqCst);
            loop {
                match link::accept(self.listener.as_fd()) {
                    Ok(socket) => self.visitors.push(Visitor { socket, view: None }),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // For lack of descriptors, most likely: children that end make room.
                    Err(_) => {
                        thread::sleep(RETRY);
                        break;
                    }
                }
            }
        }
        for visitor in mem::take(&mut self.visitors) {
            let stays = self.hear(visitor);
            self.visitors.extend(stays);
        }
    }

    /// Takes what a visitor says. Returns the visitor, unless it has gone or become a child.
    fn hear(&mut self, mut visitor: Visitor) -> Option<Visitor> {
        loop {
            let received = match link::receive(visitor.socket.as_fd()) {
                Ok(received) => received?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(visitor),
                Err(_) => return None,
            };
            match received.kind {
                Kind::Image => {
                    let image = locked(&self.shared.expected).remove(&received.value);
                    visitor.view = image.map(View::of);
                }
                Kind::Child => {
                    visitor.view = Some(self.view_of(received.value)?);
                    link::send(visitor.socket.as_fd(), Kind::Child, received.value, &[]);
                }
                Kind::Armed => {
                    let mut descriptors = received.descriptors.into_iter();
                    let (uffd, memory) = (descriptors.next()?, descriptors.next()?);
                    let child = Child {
                        number: received.value,
                        socket: visitor.socket,
                        is_hung_up: false,
                        memory: ChildMemory::new(uffd, memory),
                        view: visitor.view?,
                        ahead: (0, 0),
                        brought_bytes: 0,
                    };
                    self.next_child += 1;
                    self.children.insert(self.next_child, child);
                    return None;
                }
            }
        }
    }

    /// Returns what the child of this number has now: what it has dropped so far is known.
    fn view_of(&mut self, number: u64) -> Option<View> {
        let mut children = self.children.iter();
        let (&key, _) = children.find(|(_, child)| child.number == number)?;
        self.take_events(key);
        Some(self.children[&key].view.clone())
    }

    fn hear_children(&mut self) {
        let keys: Vec<u64> = self.children.keys().copied().collect();
        keys.into_iter().for_each(|key| self.take_events(key));
    }

    /// Takes what has happened in a child.
    fn take_events(&mut self, key: u64) {
        let child = self.children.get_mut(&key).expect("a child of this turn");
        let mut events = Vec::new();
        if let Err(error) = child.memory.events(&mut events) {
            tracing::error!(%error, "cannot read the faults of a process made by fork");
        }
        for event in events {
            match event {
                ChildEvent::Removed(range) => child.view.removed.insert(range),
                ChildEvent::Fault(address) => {
                    self.faults.push_back(Arriving {
                        child: key,
                        address,
                        is_wanted: true,
                    });
                }
            }
        }
    }

    /// Brings in the pages of faults, and puts those that have come into their children.
    fn fill(&mut self) {
        let mut done: Vec<RunCompletion<Vec<u8>>> = Vec::new();
        if let Some(lane) = &mut self.lane {
            lane.poll(&mut done);
        }
        let ready = mem::take(&mut self.ready);
        for (arriving, bytes) in ready {
            self.put(arriving, bytes);
        }
        for completion in done {
            let arriving = self.arriving.remove(&completion.tag);
            let arriving = arriving.expect("a tag is used once");
            match completion.failed.into_iter().next() {
                None => self.put(arriving, completion.frame),
                Some((_, error)) if arriving.is_wanted => {
                    self.give_up(arriving, completion.frame.len(), &error);
                }
                // Read ahead: the next fault there tries again.
                Some(_) => {}
            }
        }
        while let Some(fault) = self.faults.pop_front() {
            if !self.begin(fault) {
                self.faults.push_front(fault);
                break;
            }
        }
    }

    /// Begins to bring in the page of a fault, and pages behind it if the child touches pages in
    /// order. Returns false if that has to wait.
    fn begin(&mut self, fault: Arriving) -> bool {
        let Some(child) = self.children.get_mut(&fault.child) else {
            return true;
        };
        let image = child.view.image.clone();
        let Some(region) = image.region(fault.address) else {
            return true;
        };
        let page_bytes = region.page_bytes();
        let (first, start) = region.page(fault.address);
        let wanted = Arriving {
            address: start,
            ..fault
        };
        let end = start + page_bytes;
        let dropped: usize = child
            .view
            .removed
            .within(&(start..end))
            .map(|part| part.len())
            .sum();
        if dropped == page_bytes {
            self.put(wanted, vec![0; page_bytes]);
            return true;
        }
        let most = (AHEAD_BYTES_MAX / page_bytes).clamp(1, AHEAD_PAGES_MAX);
        let (expected, before) = child.ahead;
        let count = match expected == start {
            true => (2 * before).clamp(1, most),
            false => 1,
        };
        let left = (region.addresses.end - start) / page_bytes;
        let count = count.min(left).max(1);
        let mut words = vec![0_u8; count * mem::size_of::<EntryWords>()];
        let entries = region.snapshot.store().entry_address(first);
        match child.memory.read(entries, &mut words) {
            Ok(true) => {}
            Ok(false) => return true,
            Err(error) => {
                self.give_up(wanted, page_bytes, &error);
                return true;
            }
        }
        if self.lane.is_none() {
            match Lane::new(&self.cluster) {
                Ok(lane) => self.lane = Some(lane),
                Err(error) => {
                    self.give_up(wanted, page_bytes, &error);
                    return true;
                }
            }
        }
        let lane = self.lane.as_mut().expect("made above");
        let (words, _) = words.as_chunks::<{ mem::size_of::<EntryWords>() }>();
        for (at, words) in words.iter().enumerate() {
            let arriving = Arriving {
                child: fault.child,
                address: start + at * page_bytes,
                is_wanted: at == 0,
            };
            let is_same = |other: &Arriving| {
                (other.child, other.address) == (arriving.child, arriving.address)
            };
            if let Some(other) = self.arriving.values_mut().find(|other| is_same(other)) {
                other.is_wanted |= arriving.is_wanted;
                continue;
            }
            let tag = self.next_tag;
            let (page, frame) = (first + at, vec![0; page_bytes]);
            let began = lane.fill_copy(&region.snapshot, page, words_of(words), frame, tag);
            if began.is_err() {
                // Too much is in flight. What is read ahead is left out then.
                return at > 0;
            }
            self.next_tag += 1;
            self.arriving.insert(tag, arriving);
        }
        child.ahead = (start + count * page_bytes, count);
        true
    }

    /// Puts a page into a child.
    fn put(&mut self, arriving: Arriving, mut bytes: Vec<u8>) {
        let Some(child) = self.children.get_mut(&arriving.child) else {
            return;
        };
        let start = arriving.address;
        let removed = &child.view.removed;
        for part in removed.within(&(start..start + bytes.len())) {
            bytes[part.start - start..part.end - start].fill(0);
        }
        match child.memory.put(start, &bytes) {
            Ok(()) => {
                let before = child.brought_bytes;
                child.brought_bytes += bytes.len();
                if before < GROWN_BYTES && child.brought_bytes >= GROWN_BYTES {
                    grown(child.brought_bytes);
                }
            }
            Err(Refusal::Ended) => {}
            // The child changes its mappings, which may be among the events of the next turn, or
            // the machine is short of memory.
            Err(_) => self.ready.push((arriving, bytes)),
        }
    }

    /// Makes a page that cannot be brought in raise SIGBUS.
    fn give_up(&self, arriving: Arriving, page_bytes: usize, error: &dyn std::fmt::Display) {
        let Some(child) = self.children.get(&arriving.child) else {
            return;
        };
        tracing::error!(
            %error,
            "a page of a process made by fork cannot be brought in: touching it raises SIGBUS"
        );
        match child.memory.poison(arriving.address, page_bytes) {
            Ok(()) | Err(Refusal::Ended) => {}
            // The child changes its mappings. Its thread tries again.
            Err(Refusal::Contended) => child.memory.wake(arriving.address),
            // Without `UFFDIO_POISON` nothing but the end keeps the child from waiting for ever.
            Err(_) => child.end(),
        }
    }

    /// Forgets the children that have ended, or have called `exec`.
    fn look_for_ended(&mut self) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK;
        let is_over = |_: &u64, child: &mut Child| child.is_hung_up && !child.is_alive();
        let ended: Vec<_> = self.children.extract_if(is_over).collect();
        // Servers may have to be asked, which the other children must not wait for.
        if !ended.is_empty() {
            let census = self.shared.census.clone();
            census.begin_to_end();
            let end = move || {
                drop(ended);
                census.has_ended();
            };
            if farpage_tables::errand("farpage-child", end).is_err() {
                // No thread can be started: dropping the closure has dropped the images.
                self.shared.census.has_ended();
            }
        }
    }
}

impl View {
    fn of(image: Arc<Image>) -> View {
        View {
            image,
            removed: Removed::default(),
        }
    }
}

impl Child {
    /// True if the child still has its memory.
    fn is_alive(&self) -> bool {
        let Some(region) = self.view.image.regions.first() else {
            return false;
        };
        let entry = region.snapshot.store().entry_address(PageIndex(0));
        self.memory.read(entry, &mut [0]).unwrap_or(false)
    }

    /// Ends the child's connection, which ends the child.
    fn end(&self) {
        // SAFETY: shuts down this process's own socket.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

fn words_of(bytes: &[u8; mem::size_of::<EntryWords>()]) -> EntryWords {
    let (words, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}
