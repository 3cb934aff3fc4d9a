//! Processes made by `fork`: a child has private copies of all regions.
//!
//! 1. Before the fork, in the parent ([`begin`], then [`freeze`]): reclaim is
//!    frozen, so that the bytes of each absent page are in remote memory. The slots of all pages
//!    are held from then on. Nothing is copied.
//! 2. The kernel shares present pages with the child, and copies the page tables.
//! 3. In the child ([`end`]): absent pages are caught by a userfaultfd of the child's own,
//!    before any other code runs. The descriptor goes to the parent.
//! 4. A keeper in the parent (`keeper.rs`) brings absent pages in, until the child has ended,
//!    or has called `exec`.
//!
//! Handlers of `pthread_atfork` do this. The C library calls the handlers that were registered
//! first last before a fork, and first in the child: so [`register`] should come before others.
//!
//! The rule it keeps: a page that cannot be brought in never reads as zeros. What happens in the
//! child before its end of step 3 uses neither memory of its own nor a lock of another thread.

#[cfg_attr(not(target_arch = "x86_64"), path = "no_agent.rs")]
mod agent;
mod call;
mod forked;
mod hooks;
mod image;
mod keeper;
mod kept;
mod link;
mod orders;
mod outgoing;
mod ready;
mod requests;
mod serving;
mod shared;
mod stored;

use std::{
    io, mem,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    process, ptr,
    sync::{
        Arc, Mutex as StdMutex, MutexGuard as StdMutexGuard, Once, PoisonError, Weak,
        atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_pager::{Frozen, MappedImage, Pager};
use farpage_signals::{Mutex, MutexGuard, SignalGuard};
use farpage_store::Snapshot;
use farpage_tables::{Held, HeldWeak};
use farpage_vm::{
    KernelSpace,
    child::{self, ChildFeatures},
};

pub use self::hooks::{Hooks, leave_to_caller};
use self::{
    hooks::{HOOKS, say},
    image::Census,
    keeper::Keeper,
    kept::Kept,
    link::{Kind, LinkName},
    shared::AcceptHold,
};

/// Time for which a fork waits until no page is on its way out.
const FREEZE: Duration = Duration::from_secs(5);
/// Time for which a process that was forked itself waits for the keeper.
const ANSWER: Duration = Duration::from_secs(5);
/// Time after which a line says that a process waits for its children.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two tries to send descriptors while the user's processes have too many on the way.
const RETRY: Duration = Duration::from_millis(1);
/// Number of descriptors that a child has at once until the keeper knows the child.
const SPARE: usize = 2;

/// Runtimes and keepers, held by the thread that forks.
static ATTENDED: Mutex<Attended> = Mutex::new(Attended {
    runtimes: Vec::new(),
    keepers: Vec::new(),
});
/// Process that has begun a fork with a keeper of its own.
static PARENT: AtomicU32 = AtomicU32::new(0);
/// The fork that the holder of [`ATTENDED`] has begun. For that thread alone.
static BEGUN: AtomicPtr<Forking> = AtomicPtr::new(ptr::null_mut());
/// Thread that has begun a fork; 0 if none has. A thread compares it with itself.
static FORKER: AtomicU64 = AtomicU64::new(0);
/// Regions that this process has got by a fork. Changed by the thread that forks.
static INHERITED: StdMutex<Vec<Inherited>> = StdMutex::new(Vec::new());

/// Runtimes whose regions children get, and the keepers of their children, also of runtimes that
/// have ended.
struct Attended {
    runtimes: Vec<AttendedRuntime>,
    keepers: Vec<(u32, Weak<Census>)>,
}

struct AttendedRuntime {
    process: u32,
    pager: HeldWeak<Pager<KernelSpace>>,
}

/// Attends to a runtime: its regions are inherited by children from now on.
pub(crate) fn attend(pager: &Held<Arc<Pager<KernelSpace>>>) {
    register();
    let mut attended = ATTENDED.lock();
    let process = process::id();
    (attended.runtimes).retain(|runtime| runtime.process == process && runtime.pager.exists());
    attended.runtimes.push(AttendedRuntime {
        process,
        pager: pager.downgrade(),
    });
}

/// Waits until the ends of all children that have ended are known, so that what was held for them
/// is free. To be called on the runtime's table.
pub(crate) fn settle(pager: &Pager<KernelSpace>) {
    if let Some(keeper) = pager.companion::<Keeper>() {
        keeper.settle();
    }
}

/// Registers the handlers of `fork`. Handlers that are registered later run before these in the
/// parent, and after these in the child.
pub fn register() {
    static ONCE: Once = Once::new();
    // SAFETY: the handlers may run at any fork.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
        libc::atexit(at_exit);
    });
}

/// Waits until no process made by `fork` needs this one any more: as long as one has pages that it
/// has not touched, and has not called `exec`. To be called before this process ends. Writes a line
/// if that takes long.
pub fn wait_for_children() {
    let process = process::id();
    // In a child another thread of the parent may have held the lock at the fork.
    if PARENT.load(Ordering::Relaxed) != process {
        return;
    }
    let attended = ATTENDED.lock();
    let keepers = attended.keepers.iter().filter(|(of, _)| *of == process);
    let children: Vec<_> = keepers.filter_map(|(_, census)| census.upgrade()).collect();
    drop(attended);
    let is_over = |patience| children.iter().all(|census| census.wait(patience));
    if is_over(PATIENCE) {
        return;
    }
    say("waits for processes made by fork, which have its memory, before it ends");
    if children.iter().all(|census| census.is_apart) {
        // Some may wait for the end of a pipe that this process has open.
        // SAFETY: the process is at its end, and what the runtime needs is on its own table.
        unsafe {
            libc::fflush(ptr::null_mut());
            libc::close_range(3, u32::MAX, 0);
        }
    }
    while !is_over(Duration::from_secs(3600)) {}
}

extern "C" fn at_exit() {
    wait_for_children();
}

extern "C" fn before() {
    if HOOKS.get().is_none()
        && !has_begun()
        && let Err(error) = begin()
    {
        say(&format!(
            "a child made by fork does not have the regions: {error}"
        ));
    }
    freeze();
}

extern "C" fn in_parent() {
    end(false);
}

extern "C" fn in_child() {
    // SAFETY: handlers of `fork` that were registered before this one start no thread.
    unsafe {
        child::begin();
        farpage_fabric::begin_child();
    }
    end(true);
}

/// True if this thread has begun a fork.
fn has_begun() -> bool {
    FORKER.load(Ordering::Relaxed) == thread()
}

/// Returns the calling thread, by which it is known in a child, too. Never 0.
fn thread() -> libc::pthread_t {
    // SAFETY: always succeeds.
    unsafe { libc::pthread_self() }
}

/// Begins a fork by the calling thread: what can fail is done here. The handlers of `fork` do the
/// rest. Signals are held back until the end of the fork.
///
/// # Errors
/// The reason why a child would not have the regions.
pub fn begin() -> Result<(), String> {
    if let Some(forking) = Forking::begin()? {
        BEGUN.store(Box::into_raw(Box::new(forking)), Ordering::Relaxed);
        FORKER.store(thread(), Ordering::Relaxed);
    }
    Ok(())
}

/// Does what the handlers of `fork` do before it, if this thread has [begun](begin) a fork. For
/// calls that run no handlers. Returns false if a child would not have all regions: a line has been
/// written.
pub fn freeze() -> bool {
    // SAFETY: this thread has begun it.
    !has_begun() || unsafe { &mut *BEGUN.load(Ordering::Relaxed) }.freeze()
}

/// Ends a fork that the calling thread has [begun](begin), in the parent, also where there is no
/// child, or in the child. The handlers of `fork` do this; for calls that run no handlers.
pub fn end(in_child: bool) {
    // Another thread may have begun one.
    if !has_begun() {
        return;
    }
    FORKER.store(0, Ordering::Relaxed);
    let begun = BEGUN.swap(ptr::null_mut(), Ordering::Relaxed);
    if in_child {
        // Its memory is not given back: another thread may have been in the allocator.
        // SAFETY: made by `begin`, and not used again.
        return unsafe { begun.read() }.end_in_child();
    }
    // SAFETY: made by `begin`, for this thread.
    unsafe { Box::from_raw(begun) }.end_in_parent();
}

/// A fork that has begun and not ended.
struct Forking {
    parts: Vec<Part>,
    /// True between [`Forking::freeze`] and the end.
    is_frozen: bool,
    /// Room for what the child keeps.
    inherited: Vec<Inherited>,
    /// Dropped last: signals are let in then.
    _lock: MutexGuard<'static, Attended>,
    _signals: SignalGuard,
}

/// Regions that a child gets from one keeper.
struct Part {
    name: LinkName,
    features: ChildFeatures,
    /// Number by which the keeper knows this process, if it was forked itself.
    number: u64,
    /// Descriptors that the child closes, to have room for its own.
    spare: [OwnedFd; SPARE],
    regions: Vec<Range<usize>>,
    /// Connection to the keeper, for the child.
    socket: OwnedFd,
    /// Number of the keeper's listening socket, if the child gets a copy: while one is open, the
    /// keeper's end is not seen.
    listener: Option<RawFd>,
    /// True if the child gets the regions.
    is_inherited: bool,
    /// Parts that only the process has that made the regions.
    own: Option<Own>,
}

struct Own {
    pager: Held<Arc<Pager<KernelSpace>>>,
    /// Borrows from the pager.
    frozen: Option<Frozen<'static>>,
    /// Borrows from the pager's companion.
    hold: Option<AcceptHold<'static>>,
    /// Guards of the regions, which none of them ends before.
    mapped: Vec<MappedImage>,
}

/// Regions that this process has got by a fork, of one keeper.
struct Inherited {
    /// Id of the process that has the regions: not of a copy of it in turn.
    process: u32,
    name: LinkName,
    features: ChildFeatures,
    regions: Vec<Range<usize>>,
    /// Number by which the keeper knows this process.
    number: u64,
    /// Descriptors that this process keeps open: the connection and the userfaultfd.
    kept: [Kept; 2],
}

impl Forking {
    /// Does all that can fail. `None`: there is nothing to inherit.
    fn begin() -> Result<Option<Forking>, String> {
        let signals = SignalGuard::new();
        let mut attended = ATTENDED.lock();
        let mut parts = Vec::new();
        let process = process::id();
        for inherited in inherited().iter().filter(|it| it.process == process) {
            parts.push(inherited.part()?);
        }
        let Attended { runtimes, keepers } = &mut *attended;
        for runtime in runtimes.iter() {
            parts.extend(runtime.part(keepers)?);
        }
        // The lock is held over each fork of a process with runtimes, so that no other thread holds
        // it then: a child could never take it.
        let is_attended = !runtimes.is_empty() || !parts.is_empty();
        let forking = Forking {
            is_frozen: false,
            inherited: Vec::with_capacity(parts.len()),
            parts,
            _lock: attended,
            _signals: signals,
        };
        Ok(is_attended.then_some(forking))
    }

    /// Makes the regions such that a copy of this process has all of their bytes, until the end.
    fn freeze(&mut self) -> bool {
        if self.is_frozen {
            return true;
        }
        self.is_frozen = true;
        if let Some(hooks) = HOOKS.get() {
            (hooks.freezing)();
        }
        for part in &mut self.parts {
            part.is_inherited = match &mut part.own {
                None => ask(part.socket.as_fd(), part.number),
                Some(own) => own.freeze(part.socket.as_fd(), &mut part.regions),
            };
            if part.is_inherited {
                set_inherited(&part.regions, true);
            }
        }
        if let Some(hooks) = HOOKS.get() {
            (hooks.frozen)();
        }
        self.parts.iter().all(|part| part.is_inherited)
    }

    fn end_in_parent(self) {
        self.tell_of_end(false);
        for part in self.parts.iter().filter(|part| part.is_inherited) {
            set_inherited(&part.regions, false);
        }
    }

    fn tell_of_end(&self, in_child: bool) {
        if let (Some(hooks), true) = (HOOKS.get(), self.is_frozen) {
            (hooks.ended)(in_child);
        }
    }

    /// Catches the faults of all regions. Regions of which that fails lose their addresses:
    /// touching them raises SIGSEGV. Neither asks for memory nor gives any back.
    fn end_in_child(self) {
        self.tell_of_end(true);
        let Forking {
            mut parts,
            inherited: mut all,
            ..
        } = self;
        agent::forget_calls();
        all.extend(parts.drain(..).filter_map(Part::end_in_child));
        mem::forget(parts);
        let mut inherited = inherited();
        for before in inherited.iter() {
            before.kept.iter().for_each(Kept::close);
        }
        mem::forget(mem::replace(&mut *inherited, all));
    }
}

/// Returns the regions that this process has got by a fork. For the thread that forks.
fn inherited() -> StdMutexGuard<'static, Vec<Inherited>> {
    INHERITED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Own {
    fn drop(&mut self) {
        let frozen = self.frozen.take();
        self.pager.with(|_| drop(frozen));
        // A guard of this thread's, which wakes a thread of the table.
        if let Some(hold) = self.hold.take() {
            let shared = hold.release();
            self.pager.with(|_| shared.wake());
        }
    }
}

impl Own {
    /// Freezes reclaim and holds the slots of all pages. Replaces `regions` by those that a child
    /// gets. Returns false if it gets none.
    fn freeze(&mut self, socket: BorrowedFd<'_>, regions: &mut Vec<Range<usize>>) -> bool {
        let frozen = self.pager.with(|pager| {
            let frozen = pager.freeze(FREEZE);
            // SAFETY: the pager outlives it: it is dropped before, or never in a child.
            frozen.map(|frozen| unsafe { mem::transmute::<Frozen<'_>, Frozen<'static>>(frozen) })
        });
        match frozen {
            Ok(frozen) => self.frozen = Some(frozen),
            Err(error) => {
                say(&format!(
                    "a child made by fork does not have the regions: {error}"
                ));
                return false;
            }
        }
        let pager = self.pager.get();
        let Some(keeper) = pager.companion::<Keeper>() else {
            return false;
        };
        self.mapped = pager.mapped();
        if self.mapped.is_empty() {
            // All is ordinary memory, of which the kernel makes copies.
            regions.clear();
            return true;
        }
        let number = link::random();
        *regions = keeper.expect(
            number,
            self.mapped.iter().filter_map(|region| {
                let snapshot = Snapshot::take(&region.store)?;
                let addresses = region.addresses.clone();
                // Memory at ceded addresses is inherited as the program has it.
                Some((addresses.clone(), pager.kept(addresses), snapshot))
            }),
        );
        let is_told = link::send(socket, Kind::Image, number, &[]);
        if !is_told {
            self.pager.with(|_| keeper.forget(number));
            say(
                "a child made by fork does not have the regions: the thread that serves children does not answer",
            );
        }
        is_told
    }
}

impl Part {
    /// Catches the faults of the regions in a process that `fork` has just made, and hands the
    /// descriptor to the keeper.
    fn end_in_child(self) -> Option<Inherited> {
        let Part {
            name,
            features,
            number: _,
            spare,
            regions,
            socket,
            listener,
            is_inherited,
            own,
        } = self;
        drop(spare);
        if let Some(listener) = listener {
            // SAFETY: this process's copy, which nobody uses.
            unsafe { libc::syscall(libc::SYS_close, listener) };
        }
        // Of the parent, whose threads and descriptors are not here.
        mem::forget(own);
        if !is_inherited || regions.is_empty() {
            mem::forget(regions);
            return None;
        }
        let number = link::random();
        let kind = agent::expect_call(number, &name);
        match arm(&regions, &features, &socket, (kind, number)) {
            Ok(uffd) => {
                set_inherited(&regions, false);
                Some(Inherited {
                    process: process::id(),
                    name,
                    features,
                    regions,
                    number,
                    kept: [Kept::keep(socket), Kept::keep(uffd)],
                })
            }
            Err(error) => {
                take_away(&regions);
                say_in_child(error);
                mem::forget(regions);
                None
            }
        }
    }
}

/// Catches faults, and tells the keeper. The end of the connection kills this process from then on:
/// nobody could bring its pages in.
fn arm(
    regions: &[Range<usize>],
    features: &ChildFeatures,
    socket: &OwnedFd,
    (kind, number): (Kind, u64),
) -> Result<OwnedFd, &'static str> {
    let armed = child::arm(regions, features).map_err(|_| "userfaultfd is refused")?;
    let (uffd, catches_calls) = armed;
    // A page that has left would make system calls fail, except where they go by local buffers.
    let may_leave = catches_calls || HOOKS.get().is_some();
    let kind = if may_leave { kind } else { Kind::Deaf };
    let memory = open_memory().ok_or("/proc/self/mem cannot be opened")?;
    let descriptors = [uffd.as_fd(), memory.as_fd()];
    let begun = Instant::now();
    while !link::send(socket.as_fd(), kind, number, &descriptors) {
        if io::Error::last_os_error().raw_os_error() != Some(libc::ETOOMANYREFS) {
            return Err("the parent has ended");
        }
        // The kernel tells nobody when descriptors of another process arrive.
        if begun.elapsed() > ANSWER {
            return Err("too many descriptors are on their way between processes (`ulimit -n`)");
        }
        std::thread::sleep(RETRY);
    }
    link::kill_at_end(socket.as_fd());
    Ok(uffd)
}

/// Opens the memory of this process. The kernel hides it from a process that has changed its user,
/// unless that can be dumped.
fn open_memory() -> Option<OwnedFd> {
    let (path, flags) = (c"/proc/self/mem".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
    // SAFETY: opens a descriptor by a path of C's. The process is as before then.
    let opened = unsafe {
        match libc::open(path, flags) {
            -1 => {
                let before = libc::prctl(libc::PR_GET_DUMPABLE);
                libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
                let opened = libc::open(path, flags);
                libc::prctl(libc::PR_SET_DUMPABLE, before, 0, 0, 0);
                opened
            }
            opened => opened,
        }
    };
    // SAFETY: made just now, and nobody else's.
    (opened >= 0).then(|| unsafe { OwnedFd::from_raw_fd(opened) })
}

impl AttendedRuntime {
    /// Returns the part of this runtime, if it has regions. Starts its keeper before its first one.
    fn part(&self, keepers: &mut Vec<(u32, Weak<Census>)>) -> Result<Option<Part>, String> {
        if self.process != process::id() {
            return Ok(None);
        }
        let Some(pager) = self.pager.upgrade() else {
            return Ok(None);
        };
        if !pager.get().has_regions() {
            return Ok(None);
        }
        if pager.get().companion::<Keeper>().is_none() {
            let keeper = pager.with(|pager| Keeper::start(pager))?;
            keepers.retain(|(_, census)| census.strong_count() > 0);
            keepers.push((self.process, Arc::downgrade(keeper.census())));
            PARENT.store(self.process, Ordering::Relaxed);
            pager.get().accompany(Box::new(keeper));
        }
        let keeper = pager.get().companion::<Keeper>().expect("set above");
        let (name, features, listener) = (keeper.name, keeper.features, keeper.listener);
        // SAFETY: the companion outlives it: it is dropped before, or never in a child.
        let hold = unsafe { mem::transmute::<AcceptHold<'_>, AcceptHold<'static>>(keeper.hold()) };
        let own = Own {
            pager,
            frozen: None,
            hold: Some(hold),
            mapped: Vec::new(),
        };
        let socket = link::connect(&name).map_err(no_keeper)?;
        Ok(Some(Part {
            name,
            features,
            number: 0,
            spare: spare(&socket)?,
            regions: Vec::new(),
            socket,
            listener,
            is_inherited: false,
            own: Some(own),
        }))
    }
}

impl Inherited {
    /// Returns the part of these regions.
    fn part(&self) -> Result<Part, String> {
        let socket = link::connect(&self.name).map_err(no_keeper)?;
        Ok(Part {
            name: self.name,
            features: self.features,
            number: self.number,
            spare: spare(&socket)?,
            regions: self.regions.clone(),
            socket,
            listener: None,
            is_inherited: false,
            own: None,
        })
    }
}

/// Asks the keeper to note what this process, of this number, has dropped: its child has the same.
fn ask(socket: BorrowedFd<'_>, number: u64) -> bool {
    let is_known = link::send(socket, Kind::Child, number, &[])
        && link::is_readable(socket, ANSWER)
        && matches!(link::receive(socket), Ok(Some(_)));
    if !is_known {
        say(
            "a child made by fork does not have the regions: the process that has them does not answer",
        );
    }
    is_known
}

/// Makes descriptors that stand in for those that a child will need.
fn spare(socket: &OwnedFd) -> Result<[OwnedFd; SPARE], String> {
    let make = || socket.try_clone().map_err(no_keeper);
    Ok([make()?, make()?])
}

fn no_keeper(error: io::Error) -> String {
    format!("the thread that serves children cannot be reached: {error}")
}

fn set_inherited(regions: &[Range<usize>], inherited: bool) {
    for region in regions {
        // SAFETY: the child catches the faults first of all. Where advice is refused, the child
        // does not have the region.
        let _ = unsafe { child::set_inherited(region, inherited) };
    }
}

/// Takes the memory of regions away, and leaves nothing that can be touched: the kernel could place
/// other memory at free addresses.
fn take_away(regions: &[Range<usize>]) {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    for region in regions {
        let (start, len) = (region.start, region.len());
        // SAFETY: the child's own copy. Touching it must not read zeros.
        unsafe {
            if libc::syscall(libc::SYS_mmap, start, len, libc::PROT_NONE, kind, -1, 0) < 0 {
                libc::syscall(libc::SYS_munmap, start, len);
            }
        }
    }
}

/// Writes a line without memory of this process's own.
fn say_in_child(reason: &'static str) {
    for part in [
        "farpage: a child made by fork does not have the regions: ",
        reason,
        "\n",
    ] {
        // SAFETY: the bytes are there. A closed descriptor is the program's business.
        unsafe { libc::write(2, part.as_ptr().cast(), part.len()) };
    }
}
