//! [`Serving`]: the keeper's thread.
//!
//! The rule it keeps: a turn waits for no child. What has to wait for one, or for room in the I/O
//! queue, waits in a queue of its own until a later turn.

use std::{
    collections::{HashMap, VecDeque},
    io, iter, mem,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use farpage_pager::Lender;
use farpage_store::{Cluster, EntryWords, StoreError};
use farpage_vm::{
    KernelSpace, Refusal,
    child::{ChildEvent, ChildMemory},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    call::{Uncalled, call, has_agents_alone},
    forked::{Arriving, Child, View, words_of},
    hooks::failed,
    link::{self, Kind},
    outgoing::{Outgoing, clear},
    ready::{Ready, readable},
    requests::{Begun, KeeperQueue, KeeperRequest, KeeperTask, Source, arriving, queue_of},
    shared::{Shared, locked},
    stored::Place,
};

/// Time between two looks at children whose connections are closed.
const LOOK: Duration = Duration::from_millis(50);
/// Time between two tries to put a page into a child that changes its mappings.
const RETRY: Duration = Duration::from_millis(1);
/// Pages read ahead of a child that touches pages in order, at most, and their bytes.
const AHEAD_PAGES_MAX: usize = 64;
const AHEAD_BYTES_MAX: usize = 512 << 10;
/// Least share of a child in the budget.
const SHARE_BYTES_MIN: usize = 512 << 10;
/// Step in which the budget of the parent changes.
const LENT_STEP: u64 = 256 << 10;

/// Connection of a process that is about to fork, or of a child that has not called yet.
struct Visitor {
    socket: OwnedFd,
    view: Option<View>,
    /// Child that the view is of, from the request on.
    of: Option<u64>,
}

/// The thread.
pub(super) struct Serving {
    listener: OwnedFd,
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    lender: Lender<KernelSpace>,
    /// Bytes that children have of the budget.
    lent: u64,
    /// Half of the budget, also when the runtime has ended.
    half: usize,
    /// Upper bound of the bytes that were brought into one child.
    share: usize,
    /// I/O queue to the servers, from the first absent page on.
    io: Option<KeeperQueue>,
    visitors: Vec<Visitor>,
    children: HashMap<u64, Child>,
    next_child: u64,
    /// Sources of completed requests whose child has ended, which may be the last to be dropped.
    spent: Vec<Source>,
    /// Faults that the I/O queue had no room for.
    faults: VecDeque<Arriving>,
    /// Pages that children could not take yet.
    ready: Ready,
    next_look: Instant,
}

impl Serving {
    pub(super) fn new(
        listener: OwnedFd,
        shared: Arc<Shared>,
        cluster: Arc<Cluster>,
        lender: Lender<KernelSpace>,
    ) -> Serving {
        Serving {
            listener,
            shared,
            cluster,
            lender,
            lent: 0,
            half: 0,
            share: SHARE_BYTES_MIN,
            io: None,
            visitors: Vec::new(),
            children: HashMap::new(),
            next_child: 0,
            spent: Vec::new(),
            faults: VecDeque::new(),
            ready: Ready::default(),
            next_look: Instant::now(),
        }
    }

    pub(super) fn serve(mut self) {
        loop {
            self.wait();
            self.hear_children();
            self.hear_visitors();
            self.fill();
            self.move_out();
            self.look_for_ended();
            self.divide_budget();
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
        let waits =
            |child: &Child| !child.outgoing.back.is_empty() || !child.outgoing.to_write.is_empty();
        let is_asking = |visitor: &Visitor| visitor.of.is_some() && visitor.view.is_none();
        let any_waits = self.children.values().any(waits) || self.visitors.iter().any(is_asking);
        if !self.ready.is_empty() || !self.faults.is_empty() || any_waits {
            sooner(Instant::now() + RETRY);
        }
        // Not at once: what is late may have to wait for something else.
        let soon = Instant::now() + RETRY;
        let late = self.children.values().map(|child| &child.outgoing);
        let late = late.filter_map(Outgoing::is_late_at);
        late.for_each(|time| sooner(time.max(soon)));
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = Vec::new();
        let mut talking = Vec::new();
        for (&key, child) in self.children.iter().filter(|(_, child)| !child.is_hung_up) {
            talking.push(key);
            fds.push(PollFd::new(child.socket.as_fd(), PollFlags::empty()));
        }
        let heard = self.children.values();
        let heard = heard.filter(|child| !child.outgoing.is_moving());
        fds.extend(heard.map(|child| readable(child.memory.fd())));
        let agents = self.children.values();
        fds.extend(agents.filter_map(|child| child.outgoing.fd()).map(readable));
        fds.extend(
            self.visitors
                .iter()
                .map(|visitor| readable(visitor.socket.as_fd())),
        );
        let doorbell = fds.len();
        fds.push(readable(self.shared.waker.as_fd()));
        if !self.shared.is_held.load(Ordering::SeqCst) {
            fds.push(readable(self.listener.as_fd()));
        }
        if let Some(io) = &self.io
            && let Some(time) = io.wait(&mut fds)
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
        let has_event = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let is_woken = has_event(&fds[doorbell]);
        let hung_up: Vec<u64> = (talking.iter().zip(&fds))
            .filter(|(_, fd)| has_event(fd))
            .map(|(&key, _)| key)
            .collect();
        for key in hung_up {
            let child = self.children.get_mut(&key);
            child.expect("a child of this turn").is_hung_up = true;
            self.next_look = Instant::now();
        }
        if is_woken {
            self.shared.waker.clear();
            self.next_look = Instant::now();
        }
    }

    /// Accepts connections, and takes what processes say on theirs.
    fn hear_visitors(&mut self) {
        if let Ok(_accepting) = self.shared.accepting.try_lock() {
            self.shared.is_due.store(false, Ordering::SeqCst);
            loop {
                match link::accept(self.listener.as_fd()) {
                    Ok(socket) => self.visitors.push(Visitor {
                        socket,
                        view: None,
                        of: None,
                    }),
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
            if let (Some(key), None) = (visitor.of, &visitor.view) {
                // Pages that are on their way out are settled first. A child that has ended asks
                // for nothing any more.
                self.children.get(&key)?;
                if !self.is_settled(key) {
                    return Some(visitor);
                }
                // What the child has dropped so far is known then.
                self.take_events(key);
                let child = &self.children[&key];
                visitor.view = Some(child.view.inherit());
                link::send(visitor.socket.as_fd(), Kind::Child, child.number, &[]);
            }
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
                    visitor.of = Some(self.key_of(received.value)?);
                }
                Kind::Armed | Kind::Deaf => {
                    let mut descriptors = received.descriptors.into_iter();
                    let (uffd, memory) = (descriptors.next()?, descriptors.next()?);
                    let is_deaf = received.kind == Kind::Deaf;
                    let view = visitor.view?;
                    let memory = ChildMemory::new(uffd, memory);
                    let caller = (received.value, received.sender, is_deaf);
                    let child = Child::new(caller, visitor.socket, memory, view);
                    self.next_child += 1;
                    self.children.insert(self.next_child, child);
                    return None;
                }
                Kind::Agent => {
                    let key = self.key_of(received.value)?;
                    let child = self.children.get_mut(&key)?;
                    let parts = child.view.image.kept();
                    child.outgoing.welcome(visitor.socket, &parts);
                    return None;
                }
                Kind::Tether => return None,
            }
        }
    }

    /// Returns the child of this number.
    fn key_of(&self, number: u64) -> Option<u64> {
        let mut children = self.children.iter();
        let (&key, _) = children.find(|(_, child)| child.number == number)?;
        Some(key)
    }

    /// True if the view of a child has all pages that are not in the child's memory.
    fn is_settled(&self, key: u64) -> bool {
        self.children[&key].outgoing.is_settled() && !self.ready.has_only_copy(key)
    }

    fn hear_children(&mut self) {
        let keys: Vec<u64> = self.children.keys().copied().collect();
        for key in keys {
            let child = self.children.get_mut(&key).expect("a child of this turn");
            while let Some(report) = child.outgoing.hear() {
                child.take_moved(&report);
            }
            if !child.outgoing.is_moving() {
                self.take_events(key);
            }
            let child = self.children.get_mut(&key).expect("a child of this turn");
            child.put_back();
        }
    }

    /// Takes what has happened in a child.
    fn take_events(&mut self, key: u64) {
        let child = self.children.get_mut(&key).expect("a child of this turn");
        let mut events = Vec::new();
        if let Err(error) = child.memory.events(&mut events) {
            failed(&format!(
                "cannot read the faults of a process made by fork: {error}"
            ));
        }
        let io = &self.io;
        let is_idle = |address: usize| {
            let is_read = |it: &Arriving| (it.child, it.address) == (key, address);
            !arriving(io).any(is_read)
        };
        for event in events {
            match event {
                ChildEvent::Removed(range) => child.drop_range(range, is_idle),
                ChildEvent::Unmapped(range) => child.unmap_range(range, is_idle),
                ChildEvent::Fault(address) => {
                    let is_same = |it: &Arriving| (it.child, it.address) == (key, address);
                    if !self.faults.iter().any(is_same) {
                        self.faults.push_back(Arriving {
                            child: key,
                            address,
                            is_wanted: true,
                            is_only_copy: false,
                        });
                    }
                }
            }
        }
    }

    /// Brings in the pages of faults, and puts those that have come into their children.
    fn fill(&mut self) {
        let mut done = Vec::new();
        if let Some(io) = &mut self.io {
            io.poll();
            done.extend(iter::from_fn(|| io.take_ended()));
            // The first that ended is the one that a thread of the child waits for.
            done.reverse();
        }
        let ready = mem::take(&mut self.ready);
        for (arriving, bytes) in ready {
            self.put(arriving, bytes);
        }
        for completion in done {
            let KeeperRequest { task, source } = completion.request;
            let (KeeperTask::Read(Arriving { child, .. }) | KeeperTask::Write { child, .. }) = task;
            if !self.children.contains_key(&child) {
                self.spent.push(source);
                continue;
            }
            let error = completion.failed.into_iter().next().map(|(_, error)| error);
            match (task, error) {
                (KeeperTask::Write { child, address }, error) => {
                    self.has_written(child, address, completion.frame, error);
                }
                (KeeperTask::Read(arriving), None) => self.put(arriving, completion.frame),
                (KeeperTask::Read(arriving), Some(error)) if arriving.is_wanted => {
                    self.give_up(arriving, completion.frame.len(), &error);
                }
                // Read ahead: the next fault there tries again.
                (KeeperTask::Read(_), Some(_)) => {}
            }
        }
        let mut waiting = VecDeque::new();
        while let Some(fault) = self.faults.pop_front() {
            match self.begin(fault) {
                Begun::Done => {}
                Begun::Waits => waiting.push_back(fault),
                Begun::NoRoom => {
                    self.faults.push_front(fault);
                    break;
                }
            }
        }
        waiting.append(&mut self.faults);
        self.faults = waiting;
    }

    /// Begins to bring in the page of a fault, and pages behind it if the child touches pages in
    /// order.
    fn begin(&mut self, fault: Arriving) -> Begun {
        let Some(child) = self.children.get_mut(&fault.child) else {
            return Begun::Done;
        };
        let image = child.view.image.clone();
        let Some(region) = image.region(fault.address) else {
            return Begun::Done;
        };
        let page_bytes = region.page_bytes();
        let (first, start) = region.page(fault.address);
        let page_at = |at: usize| start + at * page_bytes..start + (at + 1) * page_bytes;
        let wanted = Arriving {
            address: start,
            ..fault
        };
        let is_ready = |at: usize| self.ready.has(fault.child, page_at(at).start);
        if child.outgoing.is_held(&page_at(0)) || is_ready(0) {
            return Begun::Waits;
        }
        if child.outgoing.want(start) {
            return Begun::Done;
        }
        // No page leaves while the child forks, and its fork may need what this thread holds.
        let is_forking = (self.visitors.iter()).any(|visitor| visitor.of == Some(fault.child));
        if !is_forking && child.outgoing.is_full(page_bytes, self.share) {
            return Begun::Waits;
        }
        if child.view.removed.all(&page_at(0), |it| it) {
            self.put(wanted, vec![0; page_bytes]);
            return Begun::Done;
        }
        let most = (AHEAD_BYTES_MAX.min(self.share / 4) / page_bytes).clamp(1, AHEAD_PAGES_MAX);
        let (expected, before) = child.ahead;
        let count = match expected == start {
            true => (2 * before).clamp(1, most),
            false => 1,
        };
        let left = (region.addresses.end - start) / page_bytes;
        let count = count.min(left).max(1);
        let is_taken = |at: usize| child.outgoing.has(&page_at(at)) || is_ready(at);
        let count = readable(count, is_taken);
        let mut words = vec![0_u8; count * mem::size_of::<EntryWords>()];
        let entries = region.snapshot.store().entry_address(first);
        match child.memory.read(entries, &mut words) {
            Ok(true) => {}
            Ok(false) => return Begun::Done,
            Err(error) => {
                self.give_up(wanted, page_bytes, &error);
                return Begun::Done;
            }
        }
        let io = match queue_of(&mut self.io, &self.cluster) {
            Ok(io) => io,
            Err(error) => {
                self.give_up(wanted, page_bytes, &error);
                return Begun::Done;
            }
        };
        let (words, _) = words.as_chunks::<{ mem::size_of::<EntryWords>() }>();
        for (at, words) in words.iter().enumerate() {
            let address = page_at(at).start;
            let arriving = Arriving {
                child: fault.child,
                address,
                is_wanted: at == 0,
                is_only_copy: false,
            };
            let is_same = |other: &Arriving| {
                (other.child, other.address) == (arriving.child, arriving.address)
            };
            let other = io
                .requests_mut()
                .find_map(|request| match &mut request.task {
                    KeeperTask::Read(other) if is_same(other) => Some(other),
                    _ => None,
                });
            if let Some(other) = other {
                other.is_wanted |= arriving.is_wanted;
                continue;
            }
            let (page, frame) = (first + at, vec![0; page_bytes]);
            let place = child.view.stored.place(region, address);
            let store = match &place {
                Place::Image => region.snapshot.store(),
                Place::Own(store) => store,
                Place::Inherited(snapshot, _) => snapshot.store(),
            };
            if !io.has_room(store) {
                // Too much is in flight. What is read ahead is left out then.
                return if at > 0 { Begun::Done } else { Begun::NoRoom };
            }
            let request = KeeperRequest {
                task: KeeperTask::Read(arriving),
                source: (place.clone(), image.clone()),
            };
            match &place {
                Place::Image => {
                    io.fill_copy(&region.snapshot, page, words_of(words), frame, request);
                }
                Place::Own(store) => io.fill(store, page, frame, request),
                Place::Inherited(snapshot, words) => {
                    io.fill_copy(snapshot, page, *words, frame, request);
                }
            }
        }
        child.ahead = (start + count * page_bytes, count);
        Begun::Done
    }

    /// Puts a page into a child.
    fn put(&mut self, arriving: Arriving, mut bytes: Vec<u8>) {
        let Some(child) = self.children.get_mut(&arriving.child) else {
            return;
        };
        let start = arriving.address;
        clear(&child.view.removed, start, &mut bytes);
        match child.put(start, &bytes) {
            Ok(()) => {
                let region = child
                    .view
                    .image
                    .region(start)
                    .expect("pages are in regions");
                let hash = region.snapshot.store().hash(&bytes);
                let hash = (!arriving.is_only_copy).then_some(hash);
                child.outgoing.brought(start, bytes.len(), hash);
            }
            Err(Refusal::Ended) => {}
            // The child changes its mappings, which may be among the events of the next turn, or
            // the machine is short of memory.
            Err(_) => self.ready.push(arriving, bytes),
        }
    }

    /// Takes note of the end of the WRITE of changed bytes.
    fn has_written(&mut self, key: u64, address: usize, bytes: Vec<u8>, error: Option<StoreError>) {
        let Some(child) = self.children.get_mut(&key) else {
            return;
        };
        let is_wanted = child.outgoing.has_left(address, bytes.len());
        let is_only_copy = match error {
            None => {
                let image = child.view.image.clone();
                let region = image.region(address).expect("pages are in regions");
                child.view.stored.insert(region, address);
                false
            }
            Some(error) => {
                child
                    .outgoing
                    .give_up(&format!("its changed pages cannot be written: {error}"));
                true
            }
        };
        if is_wanted || is_only_copy {
            let arriving = Arriving {
                child: key,
                address,
                is_wanted,
                is_only_copy,
            };
            self.put(arriving, bytes);
        }
    }

    /// Finds the share of each child, and makes the parent's budget smaller by what they have.
    fn divide_budget(&mut self) {
        let bytes = || self.children.values().map(|child| child.outgoing.bytes());
        let lent = (bytes().sum::<usize>() as u64).next_multiple_of(LENT_STEP);
        if lent != self.lent {
            self.lent = lent;
            self.lender.lend(lent);
        }
        let sharing = bytes().filter(|&bytes| bytes > 0).count().max(1);
        if let budget @ 1.. = self.lender.budget() {
            self.half = usize::try_from(budget / 2).unwrap_or(usize::MAX);
        }
        self.share = (self.half / sharing).max(SHARE_BYTES_MIN);
    }

    /// Moves pages out of children that have more than their share.
    fn move_out(&mut self) {
        let keys: Vec<u64> = self.children.keys().copied().collect();
        for key in keys {
            let child = self.children.get_mut(&key).expect("a child of this turn");
            if !child.outgoing.see_to_agent() && !child.is_hung_up && child.is_alive() {
                failed("the agent of a process made by fork has ended with pages: it ends");
                child.end();
            }
            if child.outgoing.wants_agent() {
                let called = match child.process.filter(|_| !child.is_deaf) {
                    Some(process) => call(process, child.number, || child.is_alive()),
                    None => {
                        let why = "it handles SIGURG itself, faults in its system calls \
                                   cannot be caught, or the processor is another";
                        Err(Uncalled::Never(why.into()))
                    }
                };
                match called {
                    Ok(()) => child.outgoing.has_called(),
                    Err(Uncalled::Later) => child.outgoing.postpone(),
                    Err(Uncalled::Never(why)) => child.outgoing.give_up(&why),
                }
            }
            self.write(key);
            let is_forking = |visitor: &Visitor| visitor.of == Some(key);
            if self.visitors.iter().any(is_forking) {
                continue;
            }
            let (io, ready) = (&self.io, &self.ready);
            let is_busy = |address: usize| {
                let is_it = |it: &Arriving| (it.child, it.address) == (key, address);
                ready.has(key, address) || arriving(io).any(is_it)
            };
            let child = self.children.get_mut(&key).expect("a child of this turn");
            child.outgoing.send(self.share, is_busy);
        }
    }

    /// Begins to write changed pages of a child.
    fn write(&mut self, key: u64) {
        let child = self.children.get_mut(&key).expect("a child of this turn");
        while let Some((address, bytes)) = child.outgoing.to_write.pop_front() {
            let region = child
                .view
                .image
                .region(address)
                .expect("pages are in regions");
            let store = child.view.stored.store(region);
            let store = store.map_err(|error| error.to_string());
            let io = queue_of(&mut self.io, &self.cluster).map_err(|error| error.to_string());
            let (store, io) = match store.and_then(|store| Ok((store, io?))) {
                Ok(both) => both,
                Err(error) => {
                    let why = format!("its changed pages have no remote memory: {error}");
                    child.outgoing.give_up(&why);
                    let is_wanted = child.outgoing.has_left(address, bytes.len());
                    let arriving = Arriving {
                        child: key,
                        address,
                        is_wanted,
                        is_only_copy: true,
                    };
                    self.put(arriving, bytes);
                    return self.write(key);
                }
            };
            if !io.has_room(&store) {
                child.outgoing.to_write.push_front((address, bytes));
                return;
            }
            let request = KeeperRequest {
                task: KeeperTask::Write {
                    child: key,
                    address,
                },
                source: (Place::Own(store.clone()), child.view.image.clone()),
            };
            io.write_back(&store, region.page(address).0, bytes, request);
        }
    }

    /// Makes a page that cannot be brought in raise SIGBUS.
    fn give_up(&mut self, arriving: Arriving, page_bytes: usize, error: &dyn std::fmt::Display) {
        let Some(child) = self.children.get_mut(&arriving.child) else {
            return;
        };
        failed(&format!(
            "a page of a process made by fork cannot be brought in: touching it raises SIGBUS: {error}"
        ));
        match child.memory.poison(arriving.address, page_bytes) {
            Ok(()) | Err(Refusal::Ended) => {}
            // The child changes its mappings. Its thread tries again.
            Err(Refusal::Contended) => child.memory.wake(arriving.address),
            // Without `UFFDIO_POISON` nothing but the end keeps the child from waiting for ever.
            Err(_) => child.end(),
        }
    }

    /// Forgets the children that have ended, or have called `exec`. Tethers those that have closed
    /// their connection and live on.
    fn look_for_ended(&mut self) {
        if !self.spent.is_empty() {
            self.shared.drop_elsewhere(mem::take(&mut self.spent));
        }
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK;
        for child in self.children.values_mut().filter(|it| it.is_hung_up) {
            match child.process.is_some_and(has_agents_alone) {
                true => child.outgoing.let_go(),
                false => child.tether(),
            }
        }
        let is_over = |_: &u64, child: &mut Child| child.is_hung_up && !child.is_alive();
        let mut ended: Vec<_> = self.children.extract_if(is_over).collect();
        (ended.iter_mut()).for_each(|(_, child)| child.untether());
        if !ended.is_empty() {
            self.shared.drop_elsewhere(ended);
        }
    }
}
