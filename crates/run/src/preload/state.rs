//! The runtime and the arena of this process: their beginning and end.
//!
//! The rule it keeps: neither exists before our constructor has run, nor in a child made by `fork`.
//! If the runtime cannot be built, the program does not start. The arena, and with it remote memory
//! and a share of the budget, is taken by the first large request: shells and wrappers that only
//! start others take none.

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

/// Exit status if the program was not started, as of `env` and its kind.
const NOT_STARTED: i32 = 125;

/// Surplus of an arena over its capacity: users count their arrays, and neither headers of
/// allocators, nor whole pages, nor small allocations beside the arrays.
const SPARE_PART: usize = 16;
const SPARE_BYTES: usize = 16 << 20;

/// Largest arena by default, as a multiple of this machine's memory: its page table has up to a
/// hundredth of its size.
const MEMORIES: u64 = 64;

const BEYOND_LIMIT: &str = "the program's own limit (setrlimit) leaves no room for the allocation";

/// Number of open files that suffice. The runtime has 26 on two processors.
const FILES: libc::rlim_t = 64;

const NOT_LOCKED: &str = "what is allocated cannot be locked in memory (mlockall)";

/// The arena and its figures.
pub(crate) struct State {
    pub(crate) arena: Arena,
    /// The page of [`Plan::first`].
    _first: Option<Region>,
    peak_bytes: AtomicUsize,
}

/// The runtime, and the parameters of its arena.
struct Plan {
    runtime: Runtime,
    /// Table with the runtime's descriptors. `None` with in-thread faults: the program's.
    table: Option<Arc<Table>>,
    share: Option<Share>,
    /// Size of the arena, or the reason why there will be none.
    size: Result<Size, String>,
    options: RegionOptions,
    /// Region of one page that is never touched, with in-thread faults. The runtime's handler of
    /// SIGBUS is installed with its first region, before the program installs one.
    first: Option<Region>,
}

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// Plan of the arena, until the arena is made.
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);
static MAY_FORK: AtomicBool = AtomicBool::new(false);
/// True if programs that this one starts are interposed, too.
static CHILDREN: AtomicBool = AtomicBool::new(false);
/// The launcher's folder.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();
/// Size in bytes from which on requests are served here.
static MIN_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Id of the process that has built the runtime.
static PROCESS: AtomicUsize = AtomicUsize::new(0);

/// Returns the state if a request of `bytes` by this thread is served here.
pub(crate) fn serves(bytes: usize) -> Option<&'static State> {
    if bytes < MIN_BYTES.load(Ordering::Relaxed) || Inside::is() || crate::process::is_starting() {
        return None;
    }
    get().or_else(open)
}

/// Makes the arena, unless it exists. A process that gets none ends. Returns `None` if the process
/// stays local (see [`stay_local`]), or is a child made by `fork`, for which it writes a line.
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
/// if no such plan exists.
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
    // The region of `Plan::first` stays: the handler of SIGBUS calls the program's own.
    mem::forget(plan);
    true
}

/// Returns the size from which on requests are served here.
pub(crate) fn min_bytes() -> usize {
    MIN_BYTES.load(Ordering::Relaxed)
}

/// Returns the runtime, once it is built. `None` in a child made by `fork`.
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

/// Returns the launcher's folder.
pub(crate) fn folder() -> &'static Path {
    FOLDER.get().map_or(Path::new(""), PathBuf::as_path)
}

/// True if `address` is the arena's, in this process or in the one that it was forked from.
pub(crate) fn owns(address: usize) -> bool {
    offset(address).is_some()
}

/// Returns the offset of `address` in the arena.
pub(crate) fn offset(address: usize) -> Option<usize> {
    let offset = address.wrapping_sub(START.load(Ordering::Relaxed));
    (offset < BYTES.load(Ordering::Relaxed)).then_some(offset)
}

/// Returns the state. `None` before its beginning, and in a child made by `fork`, by whatever call
/// (a raw `clone`, for one).
pub(crate) fn get() -> Option<&'static State> {
    // SAFETY: it is never given back; stored whole.
    let state = unsafe { STATE.load(Ordering::Acquire).as_ref() }?;
    (!is_forked()).then_some(state)
}

/// True if this is a child made by `fork` of a process that has an arena.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && process != process::id() as usize
}

/// Sends all requests to the next allocator from now on, in a child made by `fork`.
pub(crate) fn forget() {
    share::forget();
    STATE.store(ptr::null_mut(), Ordering::Release);
    if may_fork() {
        MIN_BYTES.store(usize::MAX, Ordering::Relaxed);
    }
}

/// Contents of new memory.
#[derive(Clone, Copy)]
pub(crate) enum Holds {
    Zeros,
    Anything,
}

impl State {
    /// Allocates memory with contents `holds`. Null, with a line, if the arena is full.
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

    /// Allocates as [`allocate`](Self::allocate), for a block that grows. The memory is not locked
    /// yet.
    pub(crate) fn allocate_to_grow(&self, bytes: usize, align: usize) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            let made = self.within_limits(bytes);
            let made = made.and_then(|()| self.arena.allocate_to_grow(bytes, align).map_err(full));
            made.inspect(|_| self.note_peak())
        };
        self.hand_out(made)
    }

    /// Refuses `bytes` more bytes if they exceed the program's own limits.
    fn within_limits(&self, bytes: usize) -> Result<(), String> {
        match limits::allow(self.arena.allocated_bytes().saturating_add(bytes)) {
            true => Ok(()),
            false => Err(BEYOND_LIMIT.to_owned()),
        }
    }

    /// Implements `realloc` for an allocation of the arena.
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
        // Bytes that are cut off are given back, so they must be neither protected nor locked.
        if whole < before && !protect::lift(self, start + whole..start + before) {
            return Err("a protection cannot be lifted".to_owned());
        }
        // 1. In place. SAFETY: the caller's promise. Pages that cannot be discarded now are tried
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
                // A program that tries with less hears of it once.
                static SAID: AtomicUsize = AtomicUsize::new(0);
                if SAID.fetch_add(1, Ordering::Relaxed) == 0 {
                    say(&why);
                }
                set_errno(libc::ENOMEM);
                ptr::null_mut()
            }
        }
    }

    /// Publishes the state, so that requests are served.
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

/// Runs as our constructor.
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
    // A server may not answer, so signals are let in: no lock is held that a handler could need.
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

/// Ends the process, because the runtime or memory for it is missing.
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
/// descriptors that the program cannot reach. In-thread faults need the runtime's descriptors in
/// the program's table.
fn start() -> Result<Plan, String> {
    if variable("IN_THREAD").is_some() {
        return build(None, Some(&window()?));
    }
    let table = Table::private().map_err(|error| error.to_string())?;
    table.run(|| build(Some(table.clone()), None))
}

/// Reserves numbers that the program cannot close for descriptors, while the result lives.
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
        // The kernel is never given absent memory, so no right to handle its faults is needed.
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
    // A server on this machine notices the end of a process by itself. Over a network the memory
    // there would stay for the time of a reconnection.
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
    /// Bytes without the surplus, which is left out if the server has no room for it.
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

    /// Returns the default size: all that the servers could lend now.
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
    /// Returns the bytes of addresses that the arena, and a server on this machine, will take.
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
                // A server that lends just the capacity needs a part of it for pages under way.
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
