//! The runtime and the arena of this process: how they begin and end.
//!
//! The rule it keeps: there is nothing before our constructor has run, and nothing in a child made
//! by `fork`. Where the runtime cannot be built, the program does not start. The arena, and with it
//! remote memory and a share of the budget, is taken by the first large request: shells and
//! wrappers that only start others take none.

use std::{
    ffi::{c_int, c_void},
    mem,
    path::{Path, PathBuf},
    process,
    ptr::{self, NonNull},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use farpage::{
    Allowance, Arena, ArenaError, ByteSize, CreateError, FaultMode, Region, RegionOptions, Reserve,
    Runtime, error::StoreCreateError,
};
use farpage_signals::Mutex;
use farpage_tables::Table;

use crate::{
    Inside, calls,
    descriptors::Window,
    destructors, environment,
    environment::{PREFIX, variable},
    exec, family, filter, give_up,
    heap::ALIGN,
    limits, made,
    maps::KERNEL_PAGE_BYTES,
    protect, report, say, set_errno,
    share::{self, Share},
    signals,
};

/// What `env` and its kind return when the program was not started.
const NOT_STARTED: i32 = 125;

/// Surplus of an arena over the capacity asked for: users count their arrays, and neither headers
/// of allocators, nor whole pages, nor small allocations beside the arrays.
const SPARE_PART: usize = 16;
const SPARE_BYTES: usize = 16 << 20;

/// The largest arena by default, as a multiple of this machine's memory: its page table has up to a
/// hundredth of its size.
const MEMORIES: u64 = 64;

const BEYOND_LIMIT: &str = "the program's own limit (setrlimit) leaves no room for the allocation";

/// Open files that a program and its runtime get by with. The runtime has 26 on two processors.
const FILES: libc::rlim_t = 64;

const NOT_LOCKED: &str = "what is allocated cannot be locked in memory (mlockall)";

/// All that there is.
pub(crate) struct State {
    pub(crate) arena: Arena,
    /// The page of [`Plan::first`].
    _first: Option<Region>,
    peak_bytes: AtomicUsize,
}

/// The runtime, and what its arena will be.
struct Plan {
    runtime: Runtime,
    /// The table that has the runtime's descriptors. `None` with in-thread faults: the program's.
    table: Option<Arc<Table>>,
    share: Option<Share>,
    /// Size of the arena, or why there will be none.
    size: Result<Size, String>,
    options: RegionOptions,
    /// With in-thread faults: a page that nobody touches. The runtime's handler of SIGBUS is
    /// installed with its first region, before the program installs one.
    first: Option<Region>,
}

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// The plan of the arena, until it is made.
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
static MAY_FORK: AtomicBool = AtomicBool::new(false);
/// True if programs that this one starts are interposed, too.
static CHILDREN: AtomicBool = AtomicBool::new(false);
/// The launcher's folder.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();
/// Requests of this size and more are served here.
static MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Who has built it.
static PROCESS: AtomicUsize = AtomicUsize::new(0);

/// Whether a request of `bytes` by this thread is served here.
pub(crate) fn serves(bytes: usize) -> Option<&'static State> {
    if bytes < MIN_BYTES.load(Ordering::Relaxed) || Inside::is() || crate::process::is_starting() {
        return None;
    }
    get().or_else(open)
}

/// Makes the arena, unless there is one. A process that gets none ends. `None`: the process stays
/// local (see [`stay_local`]), or is a child made by `fork`, which says so.
#[cold]
pub(crate) fn open() -> Option<&'static State> {
    let _inside = Inside::enter();
    if is_forked() {
        family::say_of_fork();
        return None;
    }
    let mut plan = PLAN.lock();
    if let Some(plan) = plan.take() {
        match plan.carry_out() {
            Ok(state) => state.begin(),
            Err(why) => not_started(&why),
        }
    }
    get()
}

/// Gives up the plan of the arena: from now on all requests go to the next allocator. Returns false
/// if there is no such plan.
pub(crate) fn stay_local() -> bool {
    let _inside = Inside::enter();
    if is_forked() {
        return false;
    }
    let plan = PLAN.lock().take();
    let Some(plan) = plan else {
        return false;
    };
    MIN_BYTES.store(usize::MAX, Ordering::Relaxed);
    // The page of `Plan::first` stays: the handler of SIGBUS is the program's way to its own.
    mem::forget(plan);
    true
}

/// Returns the size from which on requests are served here.
pub(crate) fn min_bytes() -> usize {
    MIN_BYTES.load(Ordering::Relaxed)
}

/// The runtime, once it is built. `None` in a child made by `fork`.
pub(crate) fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get().filter(|_| !is_forked())
}

/// True if a program that this process becomes by `exec` is interposed.
pub(crate) fn starts_interposed() -> bool {
    (PROCESS.load(Ordering::Relaxed) != 0 && !is_forked()) || has_children_interposed()
}

/// True if programs that this one starts are interposed.
pub(crate) fn has_children_interposed() -> bool {
    CHILDREN.load(Ordering::Relaxed)
}

/// True if the user allows `fork` with remote memory.
pub(crate) fn may_fork() -> bool {
    MAY_FORK.load(Ordering::Relaxed)
}

/// The launcher's folder.
pub(crate) fn folder() -> &'static Path {
    FOLDER.get().map_or(Path::new(""), PathBuf::as_path)
}

/// Whether an address is the arena's, in this process or in the one that it was forked from.
pub(crate) fn owns(address: usize) -> bool {
    offset(address).is_some()
}

/// How far into the arena an address lies.
pub(crate) fn offset(address: usize) -> Option<usize> {
    let offset = address.wrapping_sub(START.load(Ordering::Relaxed));
    (offset < BYTES.load(Ordering::Relaxed)).then_some(offset)
}

/// `None` before it has begun, and in another process: a child made by `fork`, however it was made
/// (by a raw `clone`, for one).
pub(crate) fn get() -> Option<&'static State> {
    // SAFETY: it is never given back; stored whole.
    let state = unsafe { STATE.load(Ordering::Acquire).as_ref() }?;
    (!is_forked()).then_some(state)
}

/// Whether this is a child made by `fork` of a process that has an arena.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && process != process::id() as usize
}

/// In a child made by `fork`: from now on all requests go to the next allocator.
pub(crate) fn forget() {
    share::forget();
    STATE.store(ptr::null_mut(), Ordering::Release);
    if may_fork() {
        MIN_BYTES.store(usize::MAX, Ordering::Relaxed);
    }
}

/// What new memory holds.
#[derive(Clone, Copy)]
pub(crate) enum Holds {
    Zeros,
    Anything,
}

impl State {
    /// Memory from the arena, which holds zeros or anything; null, and a word of it, if it is full.
    pub(crate) fn allocate(&self, bytes: usize, align: usize, holds: Holds) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            let made = self.within_limits(bytes).and_then(|()| {
                let made = match holds {
                    Holds::Zeros => self.arena.allocate(bytes, align),
                    Holds::Anything => self.arena.allocate_uninit(bytes, align),
                };
                made.map_err(full)
            });
            made.and_then(|made| {
                let start = made.as_ptr() as usize;
                let end = start + bytes.next_multiple_of(KERNEL_PAGE_BYTES);
                if protect::made(self, start..end) {
                    self.note_peak();
                    return Ok(made);
                }
                // SAFETY: nobody has seen it.
                let _ = unsafe { self.arena.deallocate(made) };
                Err(NOT_LOCKED.to_owned())
            })
        };
        self.hand_out(made)
    }

    /// The same for what something moves to that grows. It is not locked yet.
    pub(crate) fn allocate_to_grow(&self, bytes: usize, align: usize) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            let made = self.within_limits(bytes);
            let made = made.and_then(|()| self.arena.allocate_to_grow(bytes, align).map_err(full));
            made.inspect(|_| self.note_peak())
        };
        self.hand_out(made)
    }

    /// Refuses `bytes` more where the program's own limits do.
    fn within_limits(&self, bytes: usize) -> Result<(), String> {
        match limits::allow(self.arena.allocated_bytes().saturating_add(bytes)) {
            true => Ok(()),
            false => Err(BEYOND_LIMIT.to_owned()),
        }
    }

    /// What `realloc` does to an allocation of the arena.
    ///
    /// # Safety
    /// As `realloc`.
    pub(crate) unsafe fn reallocate(&self, old: NonNull<u8>, bytes: usize) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            // SAFETY: the caller's promise.
            let made = unsafe { self.resize(old, bytes) };
            made.inspect(|_| self.note_peak())
        };
        self.hand_out(made)
    }

    /// # Safety
    /// As `realloc`.
    unsafe fn resize(&self, old: NonNull<u8>, bytes: usize) -> Result<NonNull<u8>, String> {
        let Some(before) = self.arena.usable_bytes(old) else {
            give_up("realloc(): invalid pointer");
        };
        let start = old.as_ptr() as usize;
        let page_bytes = self.arena.region().page_bytes();
        let too_long = || format!("{bytes} bytes are more than any arena has");
        let whole = bytes
            .checked_next_multiple_of(page_bytes)
            .ok_or_else(too_long)?;
        if whole > before {
            self.within_limits(whole - before)?;
        }
        // What is cut off is given back, so that it is neither protected nor locked.
        if whole < before && !protect::lift(self, start + whole..start + before) {
            return Err("a protection cannot be lifted".to_owned());
        }
        // 1. Where it lies. SAFETY: the caller's promise. What cannot be discarded now is tried
        // again.
        if unsafe { self.arena.resize(old, bytes) }.unwrap_or(true) {
            if whole <= before || protect::made(self, start + before..start + whole) {
                return Ok(old);
            }
            // SAFETY: nobody has seen what was added.
            let _ = unsafe { self.arena.resize(old, before) };
            return Err(NOT_LOCKED.to_owned());
        }
        // 2. Elsewhere.
        let made = self.arena.allocate_to_grow(bytes, ALIGN).map_err(full)?;
        let place = made.as_ptr() as usize;
        // SAFETY: nobody uses the old bytes, and the new ones are nobody's but ours.
        let is_moved =
            unsafe { protect::relocate(self, start..start + before, place..place + whole) };
        // SAFETY: nobody uses the one that is given up. As above.
        let _ = unsafe { self.arena.deallocate(if is_moved { old } else { made }) };
        if is_moved {
            Ok(made)
        } else {
            Err("what grows cannot move, or not be locked in memory".to_owned())
        }
    }

    fn hand_out(&self, made: Result<NonNull<u8>, String>) -> *mut c_void {
        match made {
            Ok(made) => made.as_ptr().cast(),
            Err(why) => {
                // Programs that try with less have a reason to hear of it once.
                static SAID: AtomicUsize = AtomicUsize::new(0);
                if SAID.fetch_add(1, Ordering::Relaxed) == 0 {
                    say(&why);
                }
                set_errno(libc::ENOMEM);
                ptr::null_mut()
            }
        }
    }

    /// Begins to serve requests.
    fn begin(self) {
        let addresses = self.arena.addresses();
        made::begin(addresses.len());
        family::note_arena();
        START.store(addresses.start, Ordering::Relaxed);
        BYTES.store(addresses.len(), Ordering::Relaxed);
        STATE.store(Box::into_raw(Box::new(self)), Ordering::Release);
        calls::begin();
    }

    pub(crate) fn note_peak(&self) {
        let now = self.arena.allocated_bytes();
        self.peak_bytes.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the most that was allocated at once.
    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

fn full(error: ArenaError) -> String {
    format!("{error} (farpage run --capacity)")
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Our constructor.
extern "C" fn begin() {
    let inside = Inside::enter();
    let Some(min_bytes) = variable("MIN_BYTES") else {
        return;
    };
    destructors::begin();
    environment::keep();
    FOLDER.get_or_init(|| variable("FOLDER").unwrap_or_default().into());
    exec::take_note();
    family::begin(folder());
    MAY_FORK.store(variable("ALLOW_FORK").is_some(), Ordering::Relaxed);
    CHILDREN.store(variable("CHILDREN").is_some(), Ordering::Relaxed);
    let addresses_before = limits::addresses();
    // A server may not answer, and nothing is held that a signal could find.
    let plan = inside.signals.wait(start);
    let plan = plan.unwrap_or_else(|why| not_started(&why));
    limits::begin(addresses_before, plan.addresses_ahead());
    *PLAN.lock() = Some(plan);
    PROCESS.store(process::id() as usize, Ordering::Relaxed);
    MIN_BYTES.store(min_bytes.parse().unwrap_or(usize::MAX), Ordering::Relaxed);
    // SAFETY: the functions may run at any time until the process ends.
    unsafe {
        libc::atexit(report::finish);
        at_quick_exit(report::finish);
    }
    if !has_children_interposed() {
        environment::leave();
    }
}

/// Ends the process: there is no runtime, or no memory for it.
fn not_started(why: &str) -> ! {
    let mut files: libc::rlimit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: there is room for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files) };
    match files.rlim_cur {
        few if few < FILES => say(&format!(
            "{why} (`ulimit -n` allows {few} open files: raise it to {FILES})"
        )),
        _ => say(why),
    }
    loop {
        // SAFETY: ends the process without destructors, and without a word of what there is not.
        unsafe { libc::syscall(libc::SYS_exit_group, NOT_STARTED) };
    }
}

unsafe extern "C" {
    fn at_quick_exit(function: extern "C" fn()) -> c_int;
}

/// Starts the runtime, while the process has all of its rights and one thread, on a table of
/// descriptors that the program cannot reach. Faults that the program's threads serve themselves
/// need the runtime's descriptors in the program's table.
fn start() -> Result<Plan, String> {
    if variable("IN_THREAD").is_some() {
        return build(None, Some(&window()?));
    }
    let table = Table::private().map_err(|error| error.to_string())?;
    table.run(|| build(Some(table.clone()), None))
}

/// Gives descriptors numbers that the program cannot close, while the result lives.
fn window() -> Result<Window, String> {
    let no = |error| format!("the runtime's descriptors have no numbers apart: {error}");
    Window::open().map_err(no)
}

/// Builds the runtime, on `table` or with descriptors of `window`.
fn build(table: Option<Arc<Table>>, window: Option<&Window>) -> Result<Plan, String> {
    let need = |name: &str| variable(name).ok_or(format!("{PREFIX}{name} is not set"));
    let bytes = |text: &str, name: &str| -> Result<u64, String> {
        text.parse().map_err(|e| format!("{PREFIX}{name}: {e}"))
    };
    let share = match variable("SHARES") {
        Some(socket) => Some(Share::connect(&socket)?),
        None => None,
    };
    let builder = if window.is_some() {
        // The kernel is never given absent memory, so that no right to handle its faults is needed.
        Runtime::builder()
            .fault_mode(FaultMode::InThread)
            .user_mode_only(true)
    } else {
        Runtime::builder().fault_mode(FaultMode::Filler)
    };
    let runtime = builder
        .server(need("SERVER")?)
        .budget(ByteSize(bytes(&need("BUDGET")?, "BUDGET")?))
        .build()
        .map_err(|error| error.to_string())?;
    let _ = RUNTIME.set(runtime.clone());
    let asked = variable("CAPACITY");
    let asked = asked.map(|text| bytes(&text, "CAPACITY")).transpose()?;
    let size = match asked {
        Some(asked) => Ok(Size::of_capacity(asked as usize)),
        None => Size::of_room(&runtime),
    };
    let mut options = RegionOptions::new();
    if variable("ON_DEMAND").is_some() || asked.is_none() {
        options = options.reserve(Reserve::OnDemand);
    }
    let mut first = None;
    if let (Some(window), Ok(size)) = (window, &size) {
        let on_demand = RegionOptions::new().reserve(Reserve::OnDemand);
        let made = runtime.region_with(1, on_demand);
        first = Some(made.map_err(|error| error.to_string())?);
        let address = filter::place(size.bytes)?;
        // SAFETY: reserved just now, for this alone.
        options = unsafe { options.address(address) };
        signals::begin();
        filter::install(address..address + size.bytes, window.numbers())?;
    }
    let stats = variable("STATS").is_some();
    // A server on this machine sees the end of a process by itself. Over a network its memory there
    // would stay for the time of a reconnection.
    let is_seen = variable("SERVER").is_some_and(|server| server.starts_with("shm:"));
    if stats || !is_seen {
        report::begin(stats)?;
    }
    Ok(Plan {
        runtime,
        table,
        share,
        size,
        options,
        first,
    })
}

/// Size of an arena in bytes.
struct Size {
    bytes: usize,
    /// Bytes without the surplus, which is left out where the server has no room for it.
    least: usize,
}

impl Size {
    fn of_capacity(bytes: usize) -> Size {
        let surplus = bytes / SPARE_PART + SPARE_BYTES;
        Size {
            bytes: bytes.saturating_add(surplus),
            least: bytes,
        }
    }

    /// The default: all that the servers could lend now.
    fn of_room(runtime: &Runtime) -> Result<Size, String> {
        let mut room = 0u64;
        for session in runtime.sessions() {
            let stat = session.stat().map_err(|error| error.to_string())?;
            room += stat.capacity_bytes.saturating_sub(stat.granted_bytes);
        }
        if room == 0 {
            return Err(
                "the server has lent all of its memory: free some there, or raise its --capacity"
                    .to_owned(),
            );
        }
        let most = Allowance::of_this_process().available_bytes;
        let bytes = room.min(most.saturating_mul(MEMORIES)) as usize;
        Ok(Size {
            bytes,
            least: bytes,
        })
    }
}

impl Plan {
    /// Addresses that the arena will take, and that a server on this machine will lend, in bytes.
    fn addresses_ahead(&self) -> u64 {
        let bytes = self.size.as_ref().map_or(0, |size| size.bytes as u64);
        2 * bytes + bytes / 8
    }

    /// Takes a share of the budget and makes the arena, on the runtime's table.
    fn carry_out(self) -> Result<State, String> {
        match self.table.clone() {
            Some(table) => table.run(|| self.make()),
            None => self.make(),
        }
    }

    fn make(self) -> Result<State, String> {
        let size = self.size?;
        let _window = match self.table {
            Some(_) => None,
            None => Some(window()?),
        };
        if let Some(share) = self.share {
            share.keep(self.runtime.clone(), self.table.is_none())?;
        }
        use StoreCreateError::Alloc;
        let make = |bytes| self.runtime.arena_with(bytes, self.options.clone());
        let arena = match make(size.bytes) {
            Err(CreateError::Store(Alloc { .. })) => match make(size.least) {
                // A server that lends just the capacity needs a part of it for pages on their way.
                Err(CreateError::Store(Alloc {
                    bytes,
                    needed_bytes,
                    ..
                })) => make(size.least.saturating_sub((needed_bytes - bytes) as usize)),
                made => made,
            },
            made => made,
        };
        let arena = arena.map_err(|error| match error {
            // Advice in words of the command line.
            CreateError::Store(error @ Alloc { .. }) => {
                format!("{error}, or reserve less (--capacity)")
            }
            error => error.to_string(),
        })?;
        Ok(State {
            arena,
            _first: self.first,
            peak_bytes: AtomicUsize::new(0),
        })
    }
}
