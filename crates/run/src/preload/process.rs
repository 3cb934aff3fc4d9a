//! Processes and threads: `fork` and its kind, and `pthread_create`. `clone.rs` has `clone`.
//!
//! A child made by `fork` has what its parent had, and an arena of its own for what it allocates
//! itself. The rule: a call that copies the process fails with a line where the child would not
//! have all memory.

use std::{
    array,
    cell::UnsafeCell,
    ffi::{c_char, c_int, c_void},
    mem,
    sync::{
        RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use farpage::{ArenaHold, fork::Hooks};

use crate::{
    INSIDE, Inside, STARTING, errno, family, local,
    mappings::{self, Map},
    next::{self, Start as ThreadStart, next},
    report, say, set_errno, share, signal_stack, signals,
    state::{self, GENERATIONS},
    thread_stacks::LocalStack,
};

next! {
    /// `fork`.
    later_fork = c"fork"() -> c_int, else -1;
    /// `_Fork`.
    later_raw_fork = c"_Fork"() -> c_int, else -1;
    /// `forkpty`.
    later_forkpty = c"forkpty"(terminal: *mut c_int, name: *mut c_char, settings: *const libc::termios, size: *const libc::winsize) -> c_int, else -1;
    /// `daemon`.
    later_daemon = c"daemon"(keeps_folder: c_int, keeps_streams: c_int) -> c_int, else -1;
    /// `__register_atfork`.
    later_register_atfork = c"__register_atfork"(prepare: ForkHandler, parent: ForkHandler, child: ForkHandler, library: *mut c_void) -> c_int, else libc::ENOMEM;
}

/// Handler of `fork`, as `pthread_atfork` takes it.
type ForkHandler = Option<extern "C" fn()>;

/// `__register_atfork`, which `pthread_atfork` calls. The runtime's handlers are registered before
/// any other: those of an allocator, which takes its locks, then run while pages still come in, and
/// in a child after absent pages are caught.
///
/// # Safety
/// As `__register_atfork`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __register_atfork(
    prepare: ForkHandler,
    parent: ForkHandler,
    child: ForkHandler,
    library: *mut c_void,
) -> c_int {
    if !Inside::is() {
        let _inside = Inside::enter();
        register();
    }
    // SAFETY: the caller's promise.
    unsafe { later_register_atfork(prepare, parent, child, library) }
}

/// Registers the runtime's handlers, once.
fn register() {
    static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
    if !HAS_BEGUN.swap(true, Ordering::Relaxed) {
        farpage::fork::register();
        // SAFETY: the handler may run at any fork.
        unsafe { libc::pthread_atfork(None, None, Some(begin_child)) };
    }
}

/// Begins a child made by `fork`, after its absent pages are caught. Calls without handlers
/// (`_Fork`, raw ones) leave the C library's locks as they were: their children make no arena.
unsafe extern "C" fn begin_child() {
    if state::is_child() {
        share::begin_child();
        state::begin_child();
        local::begin_child();
        report::begin_child();
        HAS_THREADS.store(false, Ordering::Relaxed);
    }
}

/// Prepares for forks: each is begun by a wrapper of this file.
pub(crate) fn begin() {
    register();
    farpage::fork::leave_to_caller(Hooks {
        freezing,
        frozen,
        ended,
        grown: family::say_of_touched,
    });
}

/// Begins a copy of the process. Returns false, with an `errno`, if the child would not have all
/// memory: a line says why.
pub(crate) fn begins() -> bool {
    state::begin_fork();
    if Inside::is() || state::newest().is_none() {
        return true;
    }
    let began = {
        let _inside = Inside::enter();
        farpage::fork::begin()
    };
    if let Err(why) = &began {
        say(&format!(
            "fork fails: the child would not have the memory that is remote: {why}"
        ));
        state::end_fork();
        set_errno(libc::EAGAIN);
    }
    began.is_ok()
}

/// Locks that a child finds free.
#[derive(Default)]
struct Holds {
    /// The map of arenas' addresses.
    map: Option<RwLockWriteGuard<'static, Map>>,
    /// The records of the allocations of all arenas.
    records: [Option<ArenaHold<'static>>; GENERATIONS],
}

/// Locks that the thread which forks has.
struct Held(UnsafeCell<Holds>);

// SAFETY: for the thread that forks alone, of which there is one at a time.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(Holds {
    map: None,
    records: [const { None }; GENERATIONS],
}));

/// Freezes the process for a call that runs no handlers. Returns false, with an `errno`, if the
/// child would not have all memory: the call fails.
pub(crate) fn freezes() -> bool {
    let freezes = farpage::fork::freeze();
    if !freezes {
        end(false);
        set_errno(libc::EAGAIN);
    }
    freezes
}

/// Ends a fork, with the `errno` of the call.
pub(crate) fn end(in_child: bool) {
    let before = errno();
    farpage::fork::end(in_child);
    state::end_fork();
    if in_child {
        share::begin_child();
    }
    set_errno(before);
}

/// Waits for calls that change mappings, and keeps others from beginning. Such a call waits
/// for the end of the fork once reclaim is frozen, so that its lock is to be awaited before.
fn freezing() {
    let hold = state::newest().map(|_| mappings::change());
    // SAFETY: this thread forks.
    unsafe { (*HELD.0.get()).map = hold };
}

fn frozen() {
    let mut arenas = state::all();
    let holds = array::from_fn(|_| arenas.next().map(|state| state.arena.hold()));
    debug_assert!(arenas.next().is_none(), "a line of forks has few arenas");
    // SAFETY: this thread forks.
    unsafe { (*HELD.0.get()).records = holds };
}

fn ended(in_child: bool) {
    // SAFETY: this thread forks, or is the copy of the one that does.
    drop(unsafe { mem::take(&mut *HELD.0.get()) });
    if !in_child && state::get().is_some() {
        family::note_copied();
    }
}

/// Defines functions that copy the process and run the handlers of `fork`. Each returns 0 in the
/// child.
macro_rules! copies {
    ($($name:ident = $later:path, ($($arg:ident: $type:ty),*);)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                if !begins() {
                    return -1;
                }
                // SAFETY: the caller's promise.
                let child = unsafe { $later($($arg),*) };
                if child != 0 {
                    // Where the call failed before any handler.
                    end(false);
                }
                child
            }
        )+
    };
}

copies! {
    fork = later_fork, ();
    __fork = later_fork, ();
    forkpty = later_forkpty, (terminal: *mut c_int, name: *mut c_char, settings: *const libc::termios, size: *const libc::winsize);
}

/// `_Fork`, which runs no handlers.
///
/// # Safety
/// As `_Fork`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Fork() -> c_int {
    if !begins() {
        return -1;
    }
    if !freezes() {
        return -1;
    }
    // SAFETY: the caller's promise.
    let child = unsafe { later_raw_fork() };
    end(child == 0);
    child
}

/// `daemon`. The process that goes on is the child. The parent ends when no process needs its
/// memory any more.
///
/// # Safety
/// As `daemon`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn daemon(keeps_folder: c_int, keeps_streams: c_int) -> c_int {
    if state::newest().is_none() {
        if state::starts_interposed() {
            family::say_of_fork("the launcher does not wait for a daemon without remote memory");
        }
        // SAFETY: the caller's promise.
        return unsafe { later_daemon(keeps_folder, keeps_streams) };
    }
    // SAFETY: as for `daemon`.
    unsafe {
        match fork() {
            -1 => return -1,
            0 => {}
            _ => _exit(0),
        }
        if libc::setsid() < 0 {
            return -1;
        }
        if keeps_folder == 0 && libc::chdir(c"/".as_ptr()) != 0 {
            return -1;
        }
        if keeps_streams == 0 {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            if null < 0 {
                return -1;
            }
            (0..=2).for_each(|stream| {
                libc::dup2(null, stream);
            });
            if null > 2 {
                libc::close(null);
            }
        }
    }
    0
}

/// `_exit`.
///
/// # Safety
/// As `_exit`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _exit(status: c_int) -> ! {
    report::finish();
    loop {
        // SAFETY: ends the process.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// `_Exit`.
///
/// # Safety
/// As `_Exit`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's promise.
    unsafe { _exit(status) }
}

struct Thread {
    start: ThreadStart,
    argument: *mut c_void,
}

/// Runs a thread that the runtime has started. It works for the runtime, like its own threads.
extern "C" fn start_inside(thread: *mut c_void) -> *mut c_void {
    INSIDE.set(1);
    signals::leave_to_program();
    // SAFETY: made below, and passed to this thread alone.
    let thread = unsafe { Box::from_raw(thread.cast::<Thread>()) };
    (thread.start)(thread.argument)
}

/// True if the program has started a thread. Relaxed: only its first thread reads false.
static HAS_THREADS: AtomicBool = AtomicBool::new(false);

/// True if threads of the program may run beside this one.
pub(crate) fn has_threads() -> bool {
    HAS_THREADS.load(Ordering::Relaxed)
}

/// `pthread_create`.
///
/// # Safety
/// As `pthread_create`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: ThreadStart,
    argument: *mut c_void,
) -> c_int {
    if !Inside::is() {
        HAS_THREADS.store(true, Ordering::Relaxed);
        // The C library's memory of a thread may become that of a runtime's thread. This thread
        // does not work for the runtime meanwhile: the new one inherits its signal mask.
        let errand = match signals::are_ours() {
            true => signal_stack::before_start(start, argument),
            false => (start, argument),
        };
        // SAFETY: the caller's promise.
        let local = unsafe { LocalStack::in_place_of(attributes) };
        let attributes = local.as_ref().map_or(attributes, LocalStack::attributes);
        STARTING.set(STARTING.get() + 1);
        // SAFETY: the caller's promise.
        let code = unsafe { next::pthread_create(thread, attributes, errand.0, errand.1) };
        STARTING.set(STARTING.get() - 1);
        if code != 0 {
            signal_stack::forget(errand);
        }
        return code;
    }
    let ours = Box::into_raw(Box::new(Thread { start, argument }));
    // SAFETY: the caller's promise; the thread takes over what `ours` points to.
    let code = unsafe { next::pthread_create(thread, attributes, start_inside, ours.cast()) };
    if code != 0 {
        // SAFETY: no thread has it.
        drop(unsafe { Box::from_raw(ours) });
    }
    code
}
