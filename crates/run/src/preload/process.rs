//! Processes and threads: `fork` and its kind, and `pthread_create`.
//!
//! A child made by `fork` does not have the arena's memory. The rule: a call that copies the
//! process fails with a line while memory of the arena is allocated, unless the user allows it.

use std::ffi::{c_char, c_int, c_void};

use crate::{
    INSIDE, Inside, STARTING, family,
    next::{self, Start, next},
    report, say, set_errno, share, signals, state,
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
    /// `clone`.
    later_clone = c"clone"(start: *mut c_void, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: *mut c_void, tls: *mut c_void, child: *mut c_void) -> c_int, else -1;
}

/// True if the process may be copied. If not, says why.
fn may_copy() -> bool {
    let Some(state) = state::get() else {
        return true;
    };
    if state::may_fork() || Inside::is() {
        return true;
    }
    let allocated = {
        let _inside = Inside::enter();
        state.arena.allocated_bytes()
    };
    if allocated > 0 {
        say(
            "fork is refused: the child would not have the memory that is remote (touching it would raise SIGSEGV). \
             If the child uses none of it, run with --allow-fork",
        );
        set_errno(libc::ENOSYS);
    }
    allocated == 0
}

/// Gives up what is the parent's, in a child made by `fork`.
fn forget() {
    share::forget();
    state::forget();
}

/// Defines functions that copy the process. Each returns 0 in the child.
macro_rules! copies {
    ($($name:ident = $later:path, ($($arg:ident: $type:ty),*);)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                if !may_copy() {
                    return -1;
                }
                // SAFETY: the caller's promise.
                let child = unsafe { $later($($arg),*) };
                if child == 0 {
                    forget();
                }
                child
            }
        )+
    };
}

copies! {
    fork = later_fork, ();
    __fork = later_fork, ();
    _Fork = later_raw_fork, ();
    forkpty = later_forkpty, (terminal: *mut c_int, name: *mut c_char, settings: *const libc::termios, size: *const libc::winsize);
}

/// `daemon`. The process that goes on is the child, whose standard error may be closed by then.
///
/// # Safety
/// As `daemon`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn daemon(keeps_folder: c_int, keeps_streams: c_int) -> c_int {
    if !may_copy() {
        return -1;
    }
    if state::starts_interposed() {
        family::say_of_fork();
    }
    // SAFETY: the caller's promise.
    let code = unsafe { later_daemon(keeps_folder, keeps_streams) };
    if code == 0 {
        forget();
    }
    code
}

/// `clone`, which copies the process unless its flags share memory. The arguments behind `argument`
/// are passed to the C library unchanged.
///
/// # Safety
/// As `clone`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clone(
    start: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    tls: *mut c_void,
    child: *mut c_void,
) -> c_int {
    if flags & libc::CLONE_VM == 0 && !may_copy() {
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe { later_clone(start, stack, flags, argument, parent, tls, child) }
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
    start: Start,
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

/// `pthread_create`.
///
/// # Safety
/// As `pthread_create`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    if !Inside::is() {
        // The C library's memory of a thread may become that of a runtime's thread. This thread
        // does not work for the runtime meanwhile: the new one inherits its signal mask.
        STARTING.set(STARTING.get() + 1);
        // SAFETY: the caller's promise.
        let code = unsafe { next::pthread_create(thread, attributes, start, argument) };
        STARTING.set(STARTING.get() - 1);
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
