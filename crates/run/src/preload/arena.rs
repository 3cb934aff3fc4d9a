//! The beginning of the runtime and of the arena.
//!
//! The rule it keeps: neither exists before our constructor has run. If the runtime cannot be
//! built, the program does not start. The arena, and with it remote memory and a share of the
//! budget, is taken by the first large request: shells and wrappers that only start others take
//! none.
//!
//! A child made by `fork` builds a runtime like its parent's, but always with fillers, and makes an
//! arena of its own, once its large requests exceed [`CHILD_BYTES`]. If it cannot, its memory stays
//! local, with a line.

use std::{ffi::c_int, io, mem, sync::Arc};

use farpage::{
    Allowance, Builder, ByteSize, CreateError, FaultMode, Redundancy, Region, RegionOptions,
    Reserve, Runtime, error::StoreCreateError,
};
use farpage_signals::Mutex;
use farpage_tables::Table;
use farpage_vm::sigbus::on_stock_stack;

use crate::{
    Inside, code,
    descriptors::Window,
    destructors, environment,
    environment::{PREFIX, variable},
    exec, family, filter, guesses, is_starting, limits, local, mixed, next, process, report, say,
    share::Share,
    signal_stack, signals, small,
    state::{self, GENERATIONS, Options, State},
    statics,
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

/// Number of descriptors that the arena may need, with in-thread faults.
const NUMBERS_LEFT: u32 = 64;

/// Bytes of large requests that stay local in a child made by `fork`: many children allocate little
/// before they end, or call `exec`, and do without a runtime.
const CHILD_BYTES: usize = 1 << 20;

/// Number of open files that suffice. The runtime has 26 on two processors.
const FILES: libc::rlim_t = 64;

/// The runtime, and the parameters of its arena.
struct Plan {
    runtime: Runtime,
    /// Table with the runtime's descriptors. `None`: the program's, whose threads serve faults.
    table: Option<Arc<Table>>,
    share: Option<Share>,
    /// Size of the arena, or the reason why there will be none.
    size: Result<Size, String>,
    options: RegionOptions,
    /// True if making the arena takes no descriptors.
    is_on_demand: bool,
    /// Region of one page that is never touched, with in-thread faults. The runtime's handler of
    /// SIGBUS is installed with its first region, before the program installs one.
    first: Option<Region>,
}

/// Plan of the arena, until the arena is made.
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);

/// Returns the state if a request of `bytes` by this thread is served here.
pub(crate) fn serves(bytes: usize) -> Option<&'static State> {
    if bytes < state::min_bytes() || Inside::is() || is_starting() {
        return None;
    }
    state::get().or_else(|| open_or(bytes, |why| not_started(why)))
}

/// Makes the arena, unless it exists. A process that gets none ends. Returns `None` if the process
/// stays local (see [`stay_local`]), as a child made by `fork` may.
#[cold]
pub(crate) fn open() -> Option<&'static State> {
    open_or(0, |why| not_started(why))
}

/// Makes the arena, unless it exists, as [`open`] does. A process that gets none stays local.
#[cold]
pub(crate) fn try_open() -> Option<&'static State> {
    open_or(0, |why| {
        say(&format!("all memory stays local from now on: {why}"));
        state::serve_none();
        small::stay_local();
    })
}

/// Makes the arena for a request of `bytes` bytes.
#[cold]
fn open_or(bytes: usize, fails: impl FnOnce(&str)) -> Option<&'static State> {
    let inside = Inside::enter();
    if state::is_child() {
        return open_in_child(bytes, &inside);
    }
    let right = state::making()?;
    let plan = PLAN.lock().take();
    if let Some(plan) = plan {
        make(&inside, || plan.carry_out(), fails);
    }
    drop(right);
    state::get()
}

/// Makes the arena of a child made by `fork`. The plan of the parent is not the child's.
fn open_in_child(bytes: usize, inside: &Inside) -> Option<&'static State> {
    let stays_local = |why: &str| family::say_of_fork(why);
    // In this order: another thread may take the one chance between the two.
    if !state::may_begin_again() && state::is_forked() {
        stays_local(match state::is_confined() {
            true => "a filter of system calls (seccomp) was installed before",
            false => "the call that has made it runs no handlers of fork",
        });
        return None;
    }
    if state::ask(bytes) <= CHILD_BYTES {
        return None;
    }
    let right = state::making()?;
    if let Some(parents) = state::begin_again() {
        let plan = || match local::has_slot() {
            true => start_in_child(parents).and_then(Plan::carry_out),
            false => Err(format!(
                "in a line of forks the first {GENERATIONS} processes alone have remote memory"
            )),
        };
        make(inside, || on_stock_stack(plan), stays_local);
    }
    drop(right);
    state::get()
}

/// Makes and publishes the arena. The caller has the right to that.
fn make(inside: &Inside, made: impl FnOnce() -> Result<State, String>, fails: impl FnOnce(&str)) {
    // A server may not answer. The right is held, so that no handler may run: another thread must
    // not be there to set one.
    let made = match process::has_threads() {
        true => made(),
        false => inside.signals.wait_mortal(made),
    };
    match made {
        Ok(state) => {
            family::note_arena();
            state::publish(state);
            guesses::begin();
        }
        Err(why) => fails(&why),
    }
}

/// Gives up the plan of the arena: from now on all requests go to the next allocator. Returns false
/// if no such plan exists.
pub(crate) fn stay_local() -> bool {
    let _inside = Inside::enter();
    if state::is_child() {
        return false;
    }
    let plan = PLAN.lock().take();
    let Some(plan) = plan else {
        return false;
    };
    state::serve_none();
    small::stay_local();
    // The region of `Plan::first` stays: the handler of SIGBUS calls the program's own.
    mem::forget(plan);
    true
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Runs as our constructor.
extern "C" fn begin() {
    // Before this thread's first guard, which registers a destructor, and takes memory.
    let addresses_before = limits::addresses();
    destructors::begin();
    code::begin();
    let inside = Inside::enter();
    let Some(min_bytes) = variable("MIN_BYTES") else {
        return;
    };
    let min_bytes = min_bytes.parse().unwrap_or(usize::MAX);
    // Before the C library makes blocks for what follows.
    mixed::begin();
    environment::keep();
    state::set_options(Options {
        interposes_children: variable("CHILDREN").is_some(),
        folder: variable("FOLDER").unwrap_or_default().into(),
    });
    exec::take_note();
    next::look_up_all();
    process::begin();
    family::begin(state::folder());
    drop(inside);
    small::load();
    let inside = Inside::enter();
    // A server may not answer, so signals are let in: no lock is held that a handler could need.
    let plan = inside.signals.wait(|| start(min_bytes));
    let plan = plan.unwrap_or_else(|why| not_started(&why));
    let threads_to_come = plan.runtime.threads_to_come();
    limits::begin(addresses_before, plan.addresses_ahead(), threads_to_come);
    *PLAN.lock() = Some(plan);
    state::serve_from(min_bytes);
    small::begin();
    if !state::statics().is_empty() {
        open();
    }
    // SAFETY: the functions may run at any time until the process ends.
    unsafe {
        libc::atexit(report::finish);
        at_quick_exit(report::finish);
    }
    if !state::has_children_interposed() {
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
fn start(min_bytes: usize) -> Result<Plan, String> {
    match variable("IN_THREAD").map(|asked| (asked == "1", filter::is_available())) {
        Some((true, _) | (_, Ok(()))) => {
            statics::find(min_bytes, true);
            return build(None, None, Some(&window()?));
        }
        Some((_, Err(why))) => say(&format!(
            "{why}: filler threads serve the faults (--fillers)"
        )),
        None => {}
    }
    statics::find(min_bytes, false);
    let table = Table::private().map_err(|error| error.to_string())?;
    table.run(|| build(None, Some(table.clone()), None))
}

/// Starts the runtime of a child made by `fork` as its `parents` was started, on a table of
/// descriptors that the program cannot reach, in both fault modes. Numbers in the program's table
/// could only be set apart while no other thread makes descriptors.
fn start_in_child(parents: &Runtime) -> Result<Plan, String> {
    let addresses_before = limits::addresses_of_program();
    let table = Table::private().map_err(|error| error.to_string())?;
    let plan = table.run(|| build(Some(parents), Some(table.clone()), None))?;
    let threads_to_come = plan.runtime.threads_to_come();
    limits::begin(addresses_before, plan.addresses_ahead(), threads_to_come);
    Ok(plan)
}

/// Reserves numbers that the program cannot close for descriptors, while the result lives.
fn window() -> Result<Window, String> {
    Window::open().map_err(no_numbers)
}

fn no_numbers(error: io::Error) -> String {
    format!("the runtime's descriptors have no numbers apart: {error} (--fillers needs none)")
}

/// Builds the runtime, on `table` or with descriptors of `window`. In a child made by `fork` it has
/// the options of its `parents`.
fn build(
    parents: Option<&Runtime>,
    table: Option<Arc<Table>>,
    window: Option<&Window>,
) -> Result<Plan, String> {
    let share = match variable("SHARES") {
        Some(socket) => Some(Share::connect(&socket, window.is_some())?),
        None if parents.is_some() => {
            return Err("the budget is too small to be shared (4 MiB for each process)".to_owned());
        }
        None => None,
    };
    let redundancy: Redundancy = match variable("REDUNDANCY") {
        Some(text) => (text.parse()).map_err(|error| format!("{PREFIX}REDUNDANCY: {error}"))?,
        None => Redundancy::None,
    };
    let is_ordinary = variable("AT_ONCE").is_none();
    let starts_late = is_ordinary && may_start_late();
    let built = match parents {
        Some(parents) => parents.of_child(starts_late),
        None => builder(redundancy, window.is_some())?
            .starts_late(starts_late)
            .build(),
    };
    let runtime = built.map_err(|error| error.to_string())?;
    if parents.is_none() {
        state::set_runtime(runtime.clone());
    }
    let asked = variable("CAPACITY").map(|text| bytes(&text, "CAPACITY"));
    let asked = asked.transpose()?.map(Size::of_capacity);
    let is_on_demand = asked.is_none() || parents.is_some() || variable("ON_DEMAND").is_some();
    let mut size = match (asked, parents) {
        (Some(asked), None) => Ok(asked),
        (Some(asked), Some(_)) => Size::of_room(&runtime, redundancy).map(|room| room.min(&asked)),
        (None, _) => Size::of_room(&runtime, redundancy),
    };
    let mut options = RegionOptions::new();
    // While all that is allocated fits the budget, memory is as without us.
    if is_ordinary {
        options = options.ordinary();
    }
    if is_on_demand {
        options = options.reserve(Reserve::OnDemand);
    }
    let mut first = None;
    if let (Some(window), Ok(size)) = (window, &size) {
        first = Some(region_of_handler(&runtime)?);
        let address = begin_filter(size.bytes)?;
        // SAFETY: reserved for this alone.
        options = unsafe { options.address(address) };
        window.plug(if is_on_demand { 0 } else { NUMBERS_LEFT });
        filter::install(address, window.numbers())?;
    }
    if let (Some(_), true, Ok(size)) = (parents, signals::are_ours(), &mut size) {
        // The inherited filter of system calls looks for these addresses.
        let addresses = filter::place_again(state::all().count())?;
        *size = size.min(&Size::exactly(addresses.len()));
        // SAFETY: reserved for this alone.
        options = unsafe { options.address(addresses.start) };
    }
    let stats = variable("STATS").is_some() && parents.is_none();
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
        is_on_demand,
        first,
    })
}

/// True if the runtime's threads may start when they are needed, from within a request for memory:
/// what the C library then asks for comes to this library, no limit of the user's can be used up by
/// then, and a new thread has an arena of the C library's to itself. A signal handler's request may
/// have interrupted a thread that holds another.
fn may_start_late() -> bool {
    let limits_arenas = |name| std::env::var_os(name).is_some();
    mixed::serves_c_library()
        && limits::leave_room_for_threads()
        && !["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"]
            .into_iter()
            .any(limits_arenas)
}

/// Parses a number of bytes of the variable `name`.
fn bytes(text: &str, name: &str) -> Result<u64, String> {
    text.parse().map_err(|e| format!("{PREFIX}{name}: {e}"))
}

/// Returns the options of the runtime, as `farpage run` has passed them.
fn builder(redundancy: Redundancy, in_thread: bool) -> Result<Builder, String> {
    let need = |name: &str| variable(name).ok_or(format!("{PREFIX}{name} is not set"));
    let builder = if in_thread {
        // The kernel is never given absent memory, so no right to handle its faults is needed.
        Runtime::builder()
            .fault_mode(FaultMode::InThread)
            .user_mode_only(true)
    } else {
        Runtime::builder().fault_mode(FaultMode::Filler)
    };
    Ok(builder
        .redundancy(redundancy)
        .server(need("SERVER")?)
        .budget(ByteSize(bytes(&need("BUDGET")?, "BUDGET")?)))
}

/// Makes the region of [`Plan::first`].
fn region_of_handler(runtime: &Runtime) -> Result<Region, String> {
    let on_demand = RegionOptions::new()
        .reserve(Reserve::OnDemand)
        .redundancy(Redundancy::None)
        .ordinary();
    let made = runtime.region_with(1, on_demand);
    made.map_err(|error| error.to_string())
}

/// Prepares for the filter of system calls. Returns the address of an arena of `bytes` bytes.
fn begin_filter(bytes: usize) -> Result<usize, String> {
    let address = filter::place(bytes)?;
    signals::begin();
    signal_stack::begin();
    signal_stack::give();
    Ok(address)
}

/// Size of an arena in bytes.
struct Size {
    bytes: usize,
    /// Bytes without the surplus, which is left out if the server has no room for it.
    least: usize,
}

impl Size {
    fn of_capacity(bytes: u64) -> Size {
        let bytes = bytes as usize;
        let surplus = bytes / SPARE_PART + SPARE_BYTES;
        Size {
            bytes: bytes.saturating_add(surplus),
            least: bytes,
        }
    }

    /// Returns the default size: all that the servers could lend now.
    fn of_room(runtime: &Runtime, redundancy: Redundancy) -> Result<Size, String> {
        let mut rooms = Vec::new();
        for session in runtime.sessions() {
            let stat = session.stat().map_err(|error| error.to_string())?;
            rooms.push(stat.capacity_bytes.saturating_sub(stat.granted_bytes));
        }
        let room = redundancy.room(&rooms);
        if room == 0 {
            return Err(
                "the server has lent all of its memory: free some there, or raise its --capacity"
                    .to_owned(),
            );
        }
        let most = Allowance::of_this_process().available_bytes;
        Ok(Size::exactly(
            room.min(most.saturating_mul(MEMORIES)) as usize
        ))
    }

    /// Returns a size without a surplus.
    fn exactly(bytes: usize) -> Size {
        Size {
            bytes,
            least: bytes,
        }
    }

    /// Returns the smaller of two sizes.
    fn min(&self, other: &Size) -> Size {
        Size {
            bytes: self.bytes.min(other.bytes),
            least: self.least.min(other.least),
        }
    }
}

impl Plan {
    /// Returns the bytes of addresses that the arena, and a server on this machine, will take.
    fn addresses_ahead(&self) -> u64 {
        let bytes = self.size.as_ref().map_or(0, |size| size.bytes as u64);
        2 * bytes + bytes / 8
    }

    /// Takes a share of the budget and makes the arena, on the runtime's table. The stack is not
    /// the program's: the smallest one of a thread has no room for this.
    fn carry_out(self) -> Result<State, String> {
        match self.table.clone() {
            Some(table) => table.run(|| self.make()),
            None => on_stock_stack(|| self.make()),
        }
    }

    fn make(mut self) -> Result<State, String> {
        let size = self.size?;
        if let Some(share) = &mut self.share {
            share.take(&self.runtime)?;
        }
        // Other processes may have to give that share back first: other threads of the program open
        // files meanwhile.
        let window = match (&self.table, self.is_on_demand) {
            (None, false) => Some(window()?),
            _ => None,
        };
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
        let regions = match state::is_child() {
            // Those of the parent are inherited.
            true => Vec::new(),
            false => statics::make(&self.runtime, arena.region().page_bytes())
                .map_err(|error| format!("static arrays: {error}"))?,
        };
        (arena.add_beside(regions)).map_err(|error| format!("static arrays: {error}"))?;
        if let Some(window) = window {
            window.plug(0);
        }
        if let Some(share) = self.share {
            share.keep(self.runtime.clone())?;
        }
        // A child that gets no arena keeps no runtime.
        if state::is_child() {
            state::set_runtime(self.runtime);
        }
        Ok(State::new(arena, self.first))
    }
}
