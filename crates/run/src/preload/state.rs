//! The runtime and the arena of this process: how they begin and end.
//!
//! The rule it keeps: there is nothing before our constructor has run, and nothing in a child made
//! by `fork`. Where the runtime cannot be built, the program does not start.

use std::{
    env,
    ffi::{OsStr, c_int, c_void},
    process,
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};

use farpage::{
    Allowance, Arena, ArenaError, ByteSize, CreateError, FaultMode, RegionOptions, Reserve,
    Runtime, error::StoreCreateError,
};

use crate::{
    Inside, filter, give_up,
    heap::ALIGN,
    limits, made,
    maps::KERNEL_PAGE_BYTES,
    protect, report, say, set_errno,
    share::{self, Share},
    signals,
};

/// What the variables that `farpage run` sets begin with.
const PREFIX: &str = "FARPAGE_RUN_";

/// What `env` and its kind return when the program was not started.
const NOT_STARTED: i32 = 125;

/// Surplus of an arena over the capacity asked for: users count their arrays, and neither headers of
/// allocators, nor whole pages, nor small allocations beside the arrays.
const SPARE_PART: usize = 16;
const SPARE_BYTES: usize = 16 << 20;

/// The largest arena by default, as a multiple of this machine's memory: its page table has up to a
/// hundredth of its size.
const MEMORIES: u64 = 64;

const BEYOND_LIMIT: &str = "the program's own limit (setrlimit) leaves no room for the allocation";

const NOT_LOCKED: &str = "what is allocated cannot be locked in memory (mlockall)";

/// All that there is.
pub(crate) struct State {
    pub(crate) arena: Arena,
    pub(crate) runtime: Runtime,
    pub(crate) may_fork: bool,
    peak_bytes: AtomicUsize,
}

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
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
    get()
}

/// Returns the size from which on requests are served here.
pub(crate) fn min_bytes() -> usize {
    MIN_BYTES.load(Ordering::Relaxed)
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
    MIN_BYTES.store(usize::MAX, Ordering::Relaxed);
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
    if let Err(why) = start(min_bytes.parse().unwrap_or(usize::MAX), &inside) {
        say(&why);
        // SAFETY: ends the process without destructors, of which none has anything to do yet.
        unsafe { libc::_exit(NOT_STARTED) }
    }
    // SAFETY: the functions may run at any time until the process ends.
    unsafe {
        libc::atexit(report::finish);
        at_quick_exit(report::finish);
    }
    if variable("CHILDREN").is_none() {
        leave_environment();
    }
}

/// Serves requests of `min_bytes` and more from now on.
fn start(min_bytes: usize, inside: &Inside) -> Result<(), String> {
    let addresses_before = limits::addresses();
    // A server may not answer, and nothing is held that a signal could find.
    let state = inside.signals.wait(build)?;
    let addresses = state.arena.addresses();
    made::begin(addresses.len());
    START.store(addresses.start, Ordering::Relaxed);
    BYTES.store(addresses.len(), Ordering::Relaxed);
    PROCESS.store(process::id() as usize, Ordering::Relaxed);
    let lent = addresses.len() + addresses.len() / 8;
    limits::begin(addresses_before, lent as u64);
    let stats = variable("STATS").is_some();
    // A server on this machine sees the end of a process by itself.
    let is_seen = variable("SERVER").is_some_and(|server| server.starts_with("shm:"));
    if stats || !is_seen {
        report::begin(stats)?;
    }
    STATE.store(Box::into_raw(Box::new(state)), Ordering::Release);
    MIN_BYTES.store(min_bytes, Ordering::Relaxed);
    if variable("IN_THREAD").is_some() {
        signals::begin();
        filter::install(addresses)?;
    }
    Ok(())
}

unsafe extern "C" {
    fn at_quick_exit(function: extern "C" fn()) -> c_int;
}

fn build() -> Result<State, String> {
    let need = |name: &str| variable(name).ok_or(format!("{PREFIX}{name} is not set"));
    let bytes = |name: &str| -> Result<u64, String> {
        need(name)?
            .parse()
            .map_err(|e| format!("{PREFIX}{name}: {e}"))
    };
    // First: whoever has none does nothing else.
    let share = match variable("SHARES") {
        Some(socket) => Some(Share::get(&socket)?),
        None => None,
    };
    let in_thread = variable("IN_THREAD").is_some();
    let builder = if in_thread {
        // The kernel is never given absent memory, so that no right to handle its faults is needed.
        Runtime::builder()
            .fault_mode(FaultMode::InThread)
            .user_mode_only(true)
    } else {
        Runtime::builder().fault_mode(FaultMode::Filler)
    };
    let runtime = builder
        .server(need("SERVER")?)
        .budget(ByteSize(bytes("BUDGET")?))
        .build()
        .map_err(|error| error.to_string())?;
    if let Some(share) = share {
        share.keep(runtime.clone())?;
    }
    let arena = arena(&runtime)?;
    Ok(State {
        arena,
        runtime,
        may_fork: variable("ALLOW_FORK").is_some(),
        peak_bytes: AtomicUsize::new(0),
    })
}

/// Makes the arena. Without a capacity of the user's it has room for all that the servers could lend
/// now, and nothing is reserved there.
fn arena(runtime: &Runtime) -> Result<Arena, String> {
    let asked = variable("CAPACITY").map(|bytes| bytes.parse::<usize>());
    let asked = asked
        .transpose()
        .map_err(|e| format!("{PREFIX}CAPACITY: {e}"))?;
    let (bytes, least) = match asked {
        Some(bytes) => (
            bytes.saturating_add(bytes / SPARE_PART + SPARE_BYTES),
            bytes,
        ),
        None => {
            let room = room(runtime)? as usize;
            (room, room)
        }
    };
    let mut options = RegionOptions::new();
    if variable("ON_DEMAND").is_some() || asked.is_none() {
        options = options.reserve(Reserve::OnDemand);
    }
    if variable("IN_THREAD").is_some() {
        let address = filter::place(bytes)?;
        // SAFETY: reserved just now, for this alone.
        options = unsafe { options.address(address) };
    }
    use StoreCreateError::Alloc;
    let make = |bytes| runtime.arena_with(bytes, options.clone());
    let arena = match make(bytes) {
        Err(CreateError::Store(Alloc { .. })) => match make(least) {
            // A server that lends just the capacity needs a part of it for pages on their way.
            Err(CreateError::Store(Alloc {
                bytes,
                needed_bytes,
                ..
            })) => make(least.saturating_sub((needed_bytes - bytes) as usize)),
            made => made,
        },
        made => made,
    };
    arena.map_err(|error| match error {
        // Advice in words of the command line.
        CreateError::Store(error @ Alloc { .. }) => {
            format!("{error}, or reserve less (--capacity)")
        }
        error => error.to_string(),
    })
}

/// Returns the bytes that the servers could lend now.
fn room(runtime: &Runtime) -> Result<u64, String> {
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
    Ok(room.min(most.saturating_mul(MEMORIES)))
}

fn variable(name: &str) -> Option<String> {
    env::var(format!("{PREFIX}{name}")).ok()
}

/// What the program starts is not to be interposed.
fn leave_environment() {
    let ours: Vec<_> = env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(|name| name.starts_with(PREFIX)))
        .collect();
    let preloaded = variable("PRELOADED").unwrap_or_default();
    // SAFETY: the program's threads do not run yet; the runtime's read no variables any more.
    unsafe {
        for (name, _) in ours {
            env::remove_var(name);
        }
        match preloaded.as_str() {
            "" => env::remove_var("LD_PRELOAD"),
            before => env::set_var("LD_PRELOAD", OsStr::new(before)),
        }
    }
}
