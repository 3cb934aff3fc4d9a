//! The threads that drive the fillers: [`Team`].
//!
//! Each filler owns a shard for good, but no thread of its own. There is one *handler* per CPU that
//! the program may use, pinned there, and any of them drives any filler. A thread that faults gives
//! its CPU up, so that the handler next to it runs at once, while any other CPU would have to be
//! woken out of its halt.
//!
//! Handlers of CPUs on which threads have lately faulted sleep in all shards' descriptors, as do
//! the bells and the channels of fillers with something under way. Whoever wakes first takes the
//! filler's lock. The others rest, so that a fault does not wake every CPU.
//!
//! Calls of users' stores that return at once are made by whoever drives the filler, without its
//! lock, so that a fault costs no hand-off to a thread of the store. What happens when one does not
//! return is in `seats.rs`.
//!
//! The rule: whoever drives a filler holds its lock, and leaves it only when it has told the post
//! what to wake up for. At least one handler is not at rest.

use std::{
    ffi::OsStr,
    fs::File,
    hint,
    io::{self, Cursor, Read, Write},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_store::StoreCall;
use farpage_vm::{AddressSpace, Asked, Shard};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags},
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    unistd::Pid,
};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::{
    bell::{Bell, sleep_on},
    filler::Filler,
    run::Local,
    seats::{Seats, Serve},
    shared::Shared,
    worker::RETRY,
};

/// A filler's lock is tried for so long before its handler sleeps: as long as a turn takes that
/// brings one page in.
const SPINS: u32 = 200;
/// Handlers that are not at rest at once. Each fault wakes all of them.
const AWAKE_MAX: usize = 8;
/// A handler rests when none of so many faults whose CPU was looked for was on its own.
const LATELY: u32 = 64;
/// Handlers whose CPU refused them try again when they have slept so many times.
const SET_AGAIN: u32 = 1 << 12;

/// All fillers, and the threads that drive them.
pub(crate) struct Team<A: AddressSpace> {
    shared: Arc<Shared<A>>,
    /// By shard.
    posts: Vec<CachePadded<Post<A>>>,
    handlers: Vec<CachePadded<Handler>>,
    /// Handlers that are not at rest.
    awake: AtomicUsize,
    /// Faults whose CPU was looked for.
    looks: AtomicU32,
    /// Where a handler has its number.
    seats: Arc<Seats>,
    started: Instant,
}

/// A filler, and what its handlers wake up for.
struct Post<A: AddressSpace> {
    filler: Mutex<Filler<A>>,
    /// The channels that something is under way on. Each tells of one event, until it is armed
    /// again.
    channels: Epoll,
    /// When to take a turn at the latest, in nanoseconds since the start. [`u64::MAX`]: whenever.
    until_ns: AtomicU64,
}

/// What others know of a handler.
struct Handler {
    cpu: usize,
    /// Calls it while it rests.
    bell: Bell,
    /// The team's `looks` when a fault was last seen on its CPU.
    lately: AtomicU32,
    rests: AtomicBool,
}

/// What a handler has to do for a shard.
#[derive(Clone, Copy)]
struct Due {
    shard: usize,
    /// Whether there may be faults.
    faults: bool,
    /// Whether channels have told of something.
    channels: bool,
}

impl Due {
    fn all(shard: usize) -> Due {
        Due {
            shard,
            faults: true,
            channels: false,
        }
    }
}

type Dues = SmallVec<[Due; 4]>;

/// What a turn of a filler leads to.
enum Step<A: AddressSpace> {
    /// A call to be made without the filler, which then goes on.
    Call(StoreCall<Local<A::Frame>>),
    /// `again`: the next turn may find something to do at once.
    Done { again: bool },
}

/// What a handler has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// The next turn may find something to do at once.
    Something,
    /// Nothing, and the handler has another thread by now.
    NoSeat,
}

impl<A: AddressSpace> Team<A> {
    /// All fillers, and a handler for each of these CPUs.
    pub(crate) fn new(
        shared: &Arc<Shared<A>>,
        mut fillers: Vec<Filler<A>>,
        cpus: &[usize],
        seats: &Arc<Seats>,
    ) -> io::Result<Arc<Team<A>>> {
        fillers.iter_mut().for_each(Filler::keep_calls);
        let posts = fillers.into_iter().map(Post::new);
        let handlers = cpus.iter().enumerate().map(|(number, &cpu)| {
            Ok(CachePadded::new(Handler {
                cpu,
                bell: Bell::new()?,
                lately: AtomicU32::new(0),
                rests: AtomicBool::new(number > 0),
            }))
        });
        Ok(Arc::new(Team {
            shared: shared.clone(),
            posts: posts.collect::<io::Result<_>>()?,
            handlers: handlers.collect::<io::Result<_>>()?,
            awake: AtomicUsize::new(1),
            looks: AtomicU32::new(0),
            seats: seats.clone(),
            started: Instant::now(),
        }))
    }

    /// What the threads run, by their names.
    pub(crate) fn serve_all(self: &Arc<Self>) -> Vec<(String, Serve)> {
        (0..self.handlers.len())
            .map(|number| {
                let team = self.clone();
                let serve: Serve = Arc::new(move || team.serve(number));
                (format!("filler-{number}"), serve)
            })
            .collect()
    }

    fn serve(&self, number: usize) {
        let mut affinity = Affinity::new(self.handlers[number].cpu, self.handlers.len() > 1);
        let mut ears = Ears::new(self);
        // One that has lost its seat may have left some.
        let mut dues = self.all();
        while !self.shared.doors.is_stopping() {
            affinity.keep();
            let mut again = Dues::new();
            for due in dues.drain(..) {
                match self.drive(number, due) {
                    Left::Nothing => {}
                    Left::Something => again.push(Due::all(due.shard)),
                    Left::NoSeat => return,
                }
            }
            dues = again;
            // Before a rest, too: who sleeps beside it may have missed a ring that it has heard.
            let until = ears.prepare(&mut dues);
            if dues.is_empty() && self.goes_to_rest(number) {
                self.rest(number);
                dues = self.all();
            } else {
                ears.sleep(until, &mut dues);
            }
        }
    }

    fn all(&self) -> Dues {
        (0..self.posts.len()).map(Due::all).collect()
    }

    /// A handler takes a turn of a filler, and makes the calls of users' stores that this leads to.
    fn drive(&self, number: usize, due: Due) -> Left {
        let mut has_seat = true;
        let mut step = self.begin(due);
        loop {
            match step {
                Step::Call(mut call) => {
                    if has_seat {
                        has_seat = self.seats.make(number, &mut call);
                    } else {
                        call.make();
                    }
                    step = self.go_on(due.shard, call);
                }
                Step::Done { again: true } if has_seat => return Left::Something,
                Step::Done { again: true } => step = self.begin(Due::all(due.shard)),
                Step::Done { again: false } if has_seat => return Left::Nothing,
                Step::Done { again: false } => return Left::NoSeat,
            }
        }
    }

    /// Takes a turn of a filler.
    fn begin(&self, due: Due) -> Step<A> {
        let post = &self.posts[due.shard];
        let mut filler = post.lock();
        if due.channels {
            post.drain();
        }
        let busy = filler.turn(if due.faults { Asked::All } else { Asked::Kept });
        self.leave(post, filler, busy)
    }

    /// The same after a call has returned.
    fn go_on(&self, shard: usize, call: StoreCall<Local<A::Frame>>) -> Step<A> {
        let post = &self.posts[shard];
        let mut filler = post.lock();
        filler.end_call(call);
        let busy = filler.turn(Asked::Kept);
        self.leave(post, filler, busy)
    }

    /// Ends a turn: from here on others may drive the filler.
    fn leave(&self, post: &Post<A>, mut filler: MutexGuard<'_, Filler<A>>, busy: bool) -> Step<A> {
        let call = filler.take_call();
        let again = busy && call.is_none() && filler.has_work();
        if !again {
            post.arm(&filler, self.started);
        }
        let thread = filler.sample();
        drop(filler);
        if let Some(thread) = thread {
            self.look_for(thread);
        }
        call.map_or(Step::Done { again }, Step::Call)
    }

    /// Whether a filler was asked for something that it has not looked at, or for what it holds
    /// back; or there are faults that no descriptor tells of.
    fn is_called(&self, shard: Shard) -> bool {
        let shared = &self.shared;
        shared.doors.has_mail(shard)
            || shared.mapper.wait(shard).kept
            || shared.frames.budget().wants_what_is_held_back()
    }

    /// A thread has faulted: the handler of its CPU is not to rest.
    fn look_for(&self, thread: u32) {
        let now = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(cpu) = cpu_of(thread) else {
            return;
        };
        let Some(number) = self.handlers.iter().position(|handler| handler.cpu == cpu) else {
            return;
        };
        self.call(number, now);
    }

    /// A fault was on the CPU of this handler, when so many had been looked for.
    fn call(&self, number: usize, now: u32) {
        let handler = &self.handlers[number];
        handler.lately.store(now, Ordering::Relaxed);
        if self.awake.load(Ordering::Relaxed) < AWAKE_MAX
            && handler.rests.swap(false, Ordering::SeqCst)
        {
            self.awake.fetch_add(1, Ordering::SeqCst);
            handler.bell.ring();
        }
    }

    /// Whether this handler is not needed, and another one is there.
    fn goes_to_rest(&self, number: usize) -> bool {
        // Others that sleep do not know of a time that was set since.
        if self.until_ns() != u64::MAX {
            return false;
        }
        let handler = &self.handlers[number];
        if handler.rests.load(Ordering::SeqCst) {
            return true;
        }
        let lately = handler.lately.load(Ordering::Relaxed);
        if self.looks.load(Ordering::Relaxed).wrapping_sub(lately) < LATELY {
            return false;
        }
        let one_fewer = |awake: usize| (awake > 1).then(|| awake - 1);
        let goes = (self.awake)
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_fewer)
            .is_ok();
        if goes {
            handler.rests.store(true, Ordering::SeqCst);
        }
        goes
    }

    /// Sleeps until it is called.
    fn rest(&self, number: usize) {
        let Handler { bell, rests, .. } = &*self.handlers[number];
        bell.prepare();
        if !rests.load(Ordering::SeqCst) {
            return bell.cancel();
        }
        let stopped = PollFd::new(self.shared.doors.stopped(), PollFlags::POLLIN);
        bell.sleep(vec![stopped], None);
    }

    fn bell(&self, shard: usize) -> &Bell {
        &self.shared.doors.filler(Shard(shard)).bell
    }

    /// When some filler is to take a turn at the latest.
    fn until_ns(&self) -> u64 {
        let until_ns = |post: &CachePadded<Post<A>>| post.until_ns.load(Ordering::SeqCst);
        self.posts.iter().map(until_ns).min().unwrap_or(u64::MAX)
    }
}

impl<A: AddressSpace> Post<A> {
    fn new(filler: Filler<A>) -> io::Result<CachePadded<Post<A>>> {
        Ok(CachePadded::new(Post {
            filler: Mutex::new(filler),
            channels: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            until_ns: AtomicU64::new(u64::MAX),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Filler<A>> {
        for _ in 0..SPINS {
            if let Some(filler) = self.filler.try_lock() {
                return filler;
            }
            hint::spin_loop();
        }
        self.filler.lock()
    }

    /// All handlers may wake up from now on for what this filler waits for.
    fn arm(&self, filler: &Filler<A>, started: Instant) {
        let mut fds = SmallVec::<[PollFd<'_>; 4]>::new();
        let mut until = filler.wait(&mut fds);
        for fd in &fds {
            if self.arm_channel(fd).is_err() {
                // Lack of memory: it is looked at now and then.
                until = until.into_iter().chain([Instant::now() + RETRY]).min();
            }
        }
        let until_ns = until.map_or(u64::MAX, |until| {
            until.saturating_duration_since(started).as_nanos() as u64
        });
        self.until_ns.store(until_ns, Ordering::SeqCst);
    }

    fn arm_channel(&self, fd: &PollFd<'_>) -> nix::Result<()> {
        let mut flags = EpollFlags::EPOLLONESHOT;
        flags.set(EpollFlags::EPOLLIN, fd.events().contains(PollFlags::POLLIN));
        flags.set(
            EpollFlags::EPOLLOUT,
            fd.events().contains(PollFlags::POLLOUT),
        );
        let mut event = EpollEvent::new(flags, 0);
        match self.channels.modify(fd.as_fd(), &mut event) {
            Err(Errno::ENOENT) => self.channels.add(fd.as_fd(), event),
            armed => armed,
        }
    }

    /// The filler is about to look at its channels.
    fn drain(&self) {
        // What does not fit tells of itself again.
        let _ = self
            .channels
            .wait(&mut [EpollEvent::empty(); 4], EpollTimeout::ZERO);
    }
}

/// What a handler sleeps on, made once.
struct Ears<'a, A: AddressSpace> {
    team: &'a Team<A>,
    /// What says that fillers shall stop. Then of each shard its bell, its channels and, where the
    /// address space has one, the descriptor of its faults.
    fds: Vec<PollFd<'a>>,
    has_faults_fd: bool,
}

impl<'a, A: AddressSpace> Ears<'a, A> {
    fn new(team: &'a Team<A>) -> Self {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![readable(team.shared.doors.stopped())];
        for (shard, post) in team.posts.iter().enumerate() {
            let shard = Shard(shard);
            fds.push(readable(team.bell(shard.0).fd()));
            fds.push(readable(post.channels.0.as_fd()));
            fds.extend(team.shared.mapper.wait(shard).fd.map(readable));
        }
        Ears {
            team,
            fds,
            has_faults_fd: team.shared.mapper.wait(Shard(0)).fd.is_some(),
        }
    }

    /// From now on whatever happens wakes this handler. Appends what has happened before, which
    /// nothing tells of. Returns until when to sleep: not at all if something is due.
    fn prepare(&self, dues: &mut Dues) -> Option<Instant> {
        let team = self.team;
        // They stay so: others may be asleep when this handler wakes.
        (0..team.posts.len()).for_each(|shard| team.bell(shard).prepare());
        for shard in 0..team.posts.len() {
            let is_known = dues.iter().any(|due| due.shard == shard);
            if !is_known && team.is_called(Shard(shard)) {
                dues.push(Due::all(shard));
            }
        }
        if !dues.is_empty() {
            return Some(team.started);
        }
        let until_ns = team.until_ns();
        (until_ns != u64::MAX).then(|| team.started + Duration::from_nanos(until_ns))
    }

    /// Sleeps until something happens, and appends what.
    fn sleep(&mut self, until: Option<Instant>, dues: &mut Dues) {
        let team = self.team;
        sleep_on(&mut self.fds, until);
        let now_ns = match until {
            Some(_) => team.started.elapsed().as_nanos() as u64,
            None => 0,
        };
        let mut fds = self.fds[1..].iter();
        let mut told = || fds.next().is_some_and(|fd| fd.any() == Some(true));
        for shard in 0..team.posts.len() {
            let rings = told();
            team.bell(shard).hear(rings);
            let channels = told();
            let faults = self.has_faults_fd && told();
            let is_late = team.posts[shard].until_ns.load(Ordering::SeqCst) <= now_ns;
            if let Some(due) = dues.iter_mut().find(|due| due.shard == shard) {
                due.channels |= channels;
            } else if rings || channels || faults || is_late {
                dues.push(Due {
                    shard,
                    // Faults that no descriptor tells of come with a ring.
                    faults: faults || rings,
                    channels,
                });
            }
        }
    }
}

/// Keeps a handler on its CPU.
struct Affinity {
    cpu: usize,
    /// Turns until it is tried, where it was not done.
    in_turns: Option<u32>,
}

impl Affinity {
    /// `wanted`: there are others, on other CPUs.
    fn new(cpu: usize, wanted: bool) -> Affinity {
        Affinity {
            cpu,
            in_turns: wanted.then_some(0),
        }
    }

    /// A CPU that is refused, because the program may not use it any more, is tried again later.
    fn keep(&mut self) {
        self.in_turns = match self.in_turns {
            Some(0) => {
                let mut cpus = CpuSet::new();
                let set = cpus
                    .set(self.cpu)
                    .and_then(|()| sched_setaffinity(Pid::from_raw(0), &cpus));
                set.is_err().then_some(SET_AGAIN)
            }
            turns => turns.map(|turns| turns - 1),
        };
    }
}

/// The CPUs that the calling thread may use. Unknown: one, on which no handler is held.
pub(crate) fn cpus() -> Vec<usize> {
    let cpus = sched_getaffinity(Pid::from_raw(0)).map_or(Vec::new(), |set| {
        let is_set = |&cpu: &usize| set.is_set(cpu).unwrap_or(false);
        (0..CpuSet::count()).filter(is_set).collect()
    });
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// The CPU on which a thread has run last. Nothing is allocated.
fn cpu_of(thread: u32) -> Option<usize> {
    let mut path = Cursor::new([0; 40]);
    write!(path, "/proc/self/task/{thread}/stat").ok()?;
    let path_len = path.position() as usize;
    let path = OsStr::from_bytes(&path.get_ref()[..path_len]);
    let mut text = [0; 512];
    let mut stat = File::open(path).ok()?;
    let len = stat.read(&mut text).ok()?;
    cpu_in(&text[..len])
}

/// What a line of `/proc/PID/stat` says of the CPU, its 39th field.
fn cpu_in(stat: &[u8]) -> Option<usize> {
    // The second field is a name in brackets, which may have any bytes.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 2;
    let field = stat[behind_name..]
        .split(|&byte| byte == b' ')
        .nth(39 - 3)?;
    str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{mem::ManuallyDrop, sync::atomic::AtomicBool};

    use farpage_fabric::{
        SessionOptions,
        sim::{SimConfig, SimServer},
    };
    use farpage_store::{
        BlockingOptions, Cluster, ClusterOptions, PageIndex, PageRange, PageStore, RemoteOptions,
        Store,
    };
    use farpage_vm::{Faulted, SimOptions, SimSpace};
    use parking_lot::Condvar;

    use super::*;
    use crate::{
        Mapped, Pager, PagerOptions, RegionOptions,
        evictor::Evictor,
        job::Job,
        pager::Parts,
        simulation::{self, next},
    };

    const SHARDS: usize = 4;
    /// More than there are CPUs, which no handler minds.
    const HANDLERS: [usize; 3] = [0, 1, 1 << 9];
    const PROGRAMS: usize = 3;
    const PAGE_BYTES: usize = 4096;
    /// Stripes are of 16 MiB: each shard has one.
    const BYTES: u64 = 64 << 20;

    /// A program that touches pages of all shards, rings once for each fault, and counts in its own
    /// words.
    fn program(
        thread: usize,
        space: &SimSpace,
        shared: &Shared<SimSpace>,
        mapped: &Mapped<SimSpace>,
    ) {
        const ROUNDS: u64 = 40;
        const PAGES: usize = 16;
        let end = Instant::now() + Duration::from_secs(20);
        let access = |page: usize, value: Option<u64>| loop {
            let shard = page % SHARDS;
            let offset = shard * (16 << 20) + page / SHARDS * PAGE_BYTES;
            let address = mapped.address() + offset + thread * 8;
            let outcome = match value {
                Some(value) => space.try_store(thread, address, value).map(|()| value),
                None => space.try_load(thread, address),
            };
            match outcome {
                Ok(seen) => return seen,
                Err(Faulted::Asleep) => shared.doors.ring_fillers(),
                Err(other) => panic!("page {page}: {other}"),
            }
            while space.is_asleep(thread) {
                assert!(Instant::now() < end, "nobody serves page {page}");
                std::thread::yield_now();
            }
        };
        for round in 0..ROUNDS {
            for page in 0..PAGES {
                let page = (page * 5 + thread) % PAGES;
                assert_eq!(access(page, None), round, "page {page}");
                access(page, Some(round + 1));
            }
        }
    }

    /// A region of [`BYTES`] over simulated memory, and a team whose threads do not run.
    struct World {
        space: Arc<SimSpace>,
        cluster: Arc<Cluster>,
        team: Arc<Team<SimSpace>>,
        evictors: Vec<Evictor<SimSpace>>,
        /// While a failed test unwinds nobody may serve what a drop waits for.
        mapped: ManuallyDrop<Mapped<SimSpace>>,
    }

    fn world(seed: u64) -> World {
        world_with(seed, &HANDLERS)
    }

    fn world_with(seed: u64, handlers: &[usize]) -> World {
        let space = Arc::new(SimSpace::new(SimOptions {
            shards: SHARDS,
            seed,
            busy_probability: 0.0,
            duplicate_probability: 0.0,
            ..SimOptions::default()
        }));
        let session = SimServer::new(SimConfig::new(seed))
            .session(&SessionOptions::default())
            .expect("the simulated server takes sessions");
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let options = PagerOptions::new(8 * PAGE_BYTES as u64);
        let Parts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let seats = Seats::new(
            pager.shared().doors.clone(),
            handlers.len() + evictors.len(),
        );
        let seats = Arc::new(seats.expect("descriptors are to be had"));
        let team = Team::new(pager.shared(), fillers, handlers, &seats);
        let options = RemoteOptions::default();
        let store = PageStore::remote(&cluster, "a region", BYTES, PAGE_BYTES, &options)
            .expect("the server has room");
        let mapped = (Arc::new(pager).map(store, RegionOptions::default()))
            .expect("the budget holds the pages of all fillers");
        World {
            space,
            cluster,
            team: team.expect("descriptors are to be had"),
            evictors,
            mapped: ManuallyDrop::new(mapped),
        }
    }

    fn shard_at(mapped: &Mapped<SimSpace>, offset: usize) -> Shard {
        mapped
            .region()
            .shard_of(PageIndex(offset / PAGE_BYTES), SHARDS)
    }

    #[test]
    fn fillers_change_hands_while_programs_fault() {
        let World {
            space,
            team,
            evictors,
            mapped,
            ..
        } = world(1);
        let shared = team.shared.clone();
        start(&team, evictors);

        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in (0..HANDLERS.len()).cycle() {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    // The others are to rest.
                    let now = team.looks.fetch_add(LATELY, Ordering::Relaxed) + LATELY;
                    team.call(number, now);
                    std::thread::yield_now();
                }
            });
            let programs: Vec<_> = (0..PROGRAMS)
                .map(|thread| {
                    let (space, shared, mapped) = (&space, &shared, &mapped);
                    scope.spawn(move || program(thread, space, shared, mapped))
                })
                .collect();
            let ends: Vec<_> = programs.into_iter().map(|program| program.join()).collect();
            done.store(true, Ordering::Relaxed);
            ends.into_iter()
                .for_each(|end| end.expect("the program sees what it wrote"));
        });
        end(&team, vec![ManuallyDrop::into_inner(mapped)]);
    }

    fn start(team: &Arc<Team<SimSpace>>, evictors: Vec<Evictor<SimSpace>>) {
        let mut serve = team.serve_all();
        serve.extend(Evictor::serve_all(evictors, &team.seats, serve.len()));
        team.seats.start(serve).expect("threads start");
    }

    /// The regions need their workers to the end, and the workers end with the pager.
    fn end(team: &Team<SimSpace>, regions: Vec<Mapped<SimSpace>>) {
        drop(regions);
        team.seats.join();
    }

    #[test]
    fn filler_with_faults_that_no_descriptor_tells_of_does_not_sleep() {
        let World {
            space,
            team,
            mut evictors,
            mapped,
            ..
        } = world(1);
        let mut ears = Ears::new(&team);
        let mut dues = Dues::new();
        ears.prepare(&mut dues);
        assert!(dues.is_empty());
        let absent = space.try_load(0, mapped.address());
        assert_eq!(absent, Err(Faulted::Asleep));
        let end = Instant::now() + Duration::from_secs(20);
        while space.is_asleep(0) {
            assert!(Instant::now() < end, "nobody looks for the fault");
            ears.prepare(&mut dues);
            ears.sleep(Some(Instant::now()), &mut dues);
            dues.retain(|due| team.drive(0, *due) == Left::Something);
        }
        close(&team, &mut evictors, vec![ManuallyDrop::into_inner(mapped)]);
    }

    /// Drops the regions. All workers take turns until they are gone.
    fn close(
        team: &Team<SimSpace>,
        evictors: &mut [Evictor<SimSpace>],
        regions: Vec<Mapped<SimSpace>>,
    ) {
        simulation::drop_beside(regions, || {
            (0..SHARDS).for_each(|shard| _ = team.drive(0, Due::all(shard)));
            evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
        });
    }

    #[test]
    fn handler_rests_only_where_nothing_is_asked_for_and_no_time_is_set() {
        let World {
            space: _space,
            team,
            mut evictors,
            mapped,
            ..
        } = world(1);
        let ears = Ears::new(&team);
        // As a handler's first turn: a ring would be swallowed, since nobody has prepared for it.
        (0..SHARDS).for_each(|shard| _ = team.drive(0, Due::all(shard)));
        let region = mapped.region().clone();
        (team.shared.doors).tell_fillers(|| crate::doors::Command::Settle(region.clone()));
        let mut dues = Dues::new();
        ears.prepare(&mut dues);
        assert_eq!(
            dues.len(),
            SHARDS,
            "what was asked for is found before a rest"
        );
        // Marked as resting, but something is to be done at a time that nobody else knows of.
        team.posts[0].until_ns.store(1, Ordering::SeqCst);
        assert!(!team.goes_to_rest(1));
        team.posts[0].until_ns.store(u64::MAX, Ordering::SeqCst);
        assert!(team.goes_to_rest(1));
        close(&team, &mut evictors, vec![ManuallyDrop::into_inner(mapped)]);
    }

    /// A handler without a thread.
    struct Puppet<'a> {
        ears: Ears<'a, SimSpace>,
        dues: Dues,
        asleep: Option<Option<Instant>>,
        /// It is in a call of a store, which a turn of this shard's filler has led to.
        call: Option<(usize, StoreCall<Local<<SimSpace as AddressSpace>::Frame>>)>,
    }

    impl Puppet<'_> {
        /// Does the next thing that other handlers may come between.
        fn step(&mut self) {
            if let Some((shard, mut call)) = self.call.take() {
                call.make();
                return self.took(shard, self.ears.team.go_on(shard, call));
            }
            match (self.asleep, self.dues.pop()) {
                (Some(until), _) => {
                    let now = Instant::now();
                    self.ears.sleep(Some(now), &mut self.dues);
                    // In its sleep it has heard nothing before the time.
                    if until.is_none_or(|until| now < until) && self.dues.is_empty() {
                        return;
                    }
                    self.asleep = None;
                }
                (None, Some(due)) => self.took(due.shard, self.ears.team.begin(due)),
                (None, None) => {
                    let until = self.ears.prepare(&mut self.dues);
                    if self.dues.is_empty() {
                        self.asleep = Some(until);
                    }
                }
            }
        }

        fn took(&mut self, shard: usize, step: Step<SimSpace>) {
            match step {
                Step::Call(call) => self.call = Some((shard, call)),
                Step::Done { again: true } => self.dues.push(Due::all(shard)),
                Step::Done { again: false } => {}
            }
        }
    }

    /// A store of a user's own, whose calls wait while the gate is shut.
    #[derive(Default)]
    struct Gated {
        bytes: Mutex<Vec<u8>>,
        is_shut: Mutex<bool>,
        opened: Condvar,
        waiting: AtomicUsize,
    }

    impl Gated {
        /// A region over it, whose calls are all made by workers.
        fn map(
            self: &Arc<Self>,
            cluster: &Arc<Cluster>,
            pager: &Arc<Pager<SimSpace>>,
        ) -> Mapped<SimSpace> {
            *self.bytes.lock() = vec![0; BYTES as usize];
            let options = BlockingOptions { threads: 0 };
            let store =
                PageStore::blocking(cluster, "own", BYTES, PAGE_BYTES, self.clone(), &options);
            let store = store.expect("the sizes are sound");
            (pager.map(store, RegionOptions::default()))
                .expect("the budget holds pages of all fillers")
        }

        fn pass(&self) {
            let mut is_shut = self.is_shut.lock();
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while *is_shut {
                self.opened.wait(&mut is_shut);
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }

        fn shut(&self) {
            *self.is_shut.lock() = true;
        }

        fn open(&self) {
            *self.is_shut.lock() = false;
            self.opened.notify_all();
        }
    }

    impl Store for Gated {
        fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.pass();
            buf.copy_from_slice(&self.bytes.lock()[offset as usize..][..buf.len()]);
            Ok(())
        }

        fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
            self.pass();
            self.bytes.lock()[offset as usize..][..buf.len()].copy_from_slice(buf);
            Ok(())
        }
    }

    #[test]
    fn handlers_that_take_over_from_each_other_leave_no_fault_behind() {
        for seed in 1..=20_u64 {
            println!("seed {seed}");
            let World {
                space,
                cluster,
                team,
                mut evictors,
                mapped,
            } = world(seed);
            let own = Arc::new(Gated::default()).map(&cluster, mapped.pager());
            let regions = [mapped, ManuallyDrop::new(own)];
            let mut random = seed;
            let mut below = |limit: usize| (next(&mut random) % limit as u64) as usize;
            let mut puppets: Vec<_> = HANDLERS
                .map(|_| Puppet {
                    ears: Ears::new(&team),
                    dues: team.all(),
                    asleep: None,
                    call: None,
                })
                .into();
            let mut wants: [Option<(usize, usize)>; PROGRAMS] = [None; PROGRAMS];
            // By region and page: how often it was added to.
            let mut shadow = [[0; 16]; 2];
            let (mut accesses, mut calls) = (0, 0);
            let mut since = Instant::now();
            while accesses < 2000 {
                assert!(since.elapsed() < Duration::from_secs(20), "nobody gets on");
                match below(10) {
                    0..3 => {
                        let thread = below(PROGRAMS);
                        let (region, page) =
                            *wants[thread].get_or_insert_with(|| (below(2), below(16)));
                        if space.is_asleep(thread) {
                            continue;
                        }
                        let mapped = &regions[region];
                        let offset = (page % SHARDS) * (16 << 20) + page / SHARDS * PAGE_BYTES;
                        let address = mapped.address() + offset;
                        let outcome = space.try_load(thread, address).and_then(|seen| {
                            assert_eq!(seen, shadow[region][page], "page {page} of {region}");
                            space.try_store(thread, address, seen + 1)
                        });
                        match outcome {
                            Ok(()) => {
                                shadow[region][page] += 1;
                                (wants[thread], since) = (None, Instant::now());
                                accesses += 1;
                            }
                            // As the kernel does: once for each fault.
                            Err(Faulted::Asleep) => team.bell(shard_at(mapped, offset).0).ring(),
                            Err(other) => panic!("page {page}: {other}"),
                        }
                    }
                    3 => _ = evictors[below(2)].turn(),
                    _ => {
                        let puppet = &mut puppets[below(HANDLERS.len())];
                        puppet.step();
                        calls += usize::from(puppet.call.is_some());
                    }
                }
            }
            assert!(calls > 100, "handlers were in {calls} calls");
            while puppets.iter().any(|puppet| puppet.call.is_some()) {
                puppets.iter_mut().for_each(Puppet::step);
            }
            drop(puppets);
            let regions = regions.map(ManuallyDrop::into_inner);
            close(&team, &mut evictors, regions.into());
        }
    }

    /// A word of each of the first pages is added to.
    fn add_to(
        space: &SimSpace,
        shared: &Shared<SimSpace>,
        mapped: &Mapped<SimSpace>,
        pages: usize,
    ) {
        let end = Instant::now() + Duration::from_secs(20);
        for page in 0..pages {
            let address =
                mapped.address() + (page % SHARDS) * (16 << 20) + page / SHARDS * PAGE_BYTES;
            loop {
                match space
                    .try_load(1, address)
                    .and_then(|seen| space.try_store(1, address, seen + 1))
                {
                    Ok(()) => break,
                    Err(Faulted::Asleep) => shared.doors.ring_fillers(),
                    Err(other) => panic!("page {page}: {other}"),
                }
                while space.is_asleep(1) {
                    assert!(Instant::now() < end, "nobody serves page {page}");
                    std::thread::yield_now();
                }
            }
        }
    }

    #[test]
    fn workers_whose_only_thread_is_kept_by_a_store_go_on() {
        for writes in [false, true] {
            let World {
                space,
                cluster,
                team,
                evictors,
                mapped,
            } = world_with(1, &HANDLERS[..1]);
            let shared = team.shared.clone();
            start(&team, evictors);
            let gated = Arc::new(Gated::default());
            let own = ManuallyDrop::new(gated.map(&cluster, mapped.pager()));
            if writes {
                // The store keeps them, and less than the budget.
                add_to(&space, &shared, &own, 3);
            }
            gated.shut();
            let pages = PageRange::first(own.region().pages());
            let job = Job::new(own.region().clone(), pages, false);
            if writes {
                shared.jobs.add(job.clone());
                shared.doors.ring_evictors();
            } else {
                assert_eq!(space.try_load(0, own.address()), Err(Faulted::Asleep));
                shared.doors.ring_fillers();
            }
            let limit = Instant::now() + Duration::from_secs(20);
            while gated.waiting.load(Ordering::SeqCst) == 0 {
                assert!(Instant::now() < limit, "nobody calls the store");
                std::thread::yield_now();
            }
            // Twice, since they have to leave for each other.
            add_to(&space, &shared, &mapped, 16);
            add_to(&space, &shared, &mapped, 16);
            gated.open();
            while space.is_asleep(0) || writes && !job.has_ended() {
                assert!(Instant::now() < limit, "the call came to nothing");
                std::thread::yield_now();
            }
            end(&team, [own, mapped].map(ManuallyDrop::into_inner).into());
        }
    }

    #[test]
    fn cpu_of_a_thread_is_found_behind_any_name() {
        let line = b"12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 0 0\n";
        assert_eq!(cpu_in(line), Some(5));
        assert_eq!(cpu_in(b"12 (a) S 1"), None);
        let cpu = cpu_of(nix::unistd::gettid().as_raw().cast_unsigned());
        assert!(cpu.is_some_and(|cpu| cpu < CpuSet::count()), "{cpu:?}");
        assert_eq!(cpu_of(0), None);
    }
}
