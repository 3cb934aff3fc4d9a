//! Processes and threads: `fork` and `pthread_create`.
//!
//! A child made by `fork` does not have the arena's memory. The rule: `fork` fails with a word of
//! why while anything is allocated there, unless the user allows it.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
};

use crate::{INSIDE, Inside, next, next::Start, report, say, set_errno, signals, state};

/// `fork`.
///
/// # Safety
/// As `fork`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fork() -> c_int {
    if let Some(state) = state::get()
        && !state.may_fork
        && !Inside::is()
    {
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
            return -1;
        }
    }
    // SAFETY: the caller's promise.
    let child = unsafe { next::fork() };
    if child == 0 {
        state::forget();
    }
    child
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

thread_local! {
    /// Calls of `pthread_create` that this thread is in: a handler may interrupt one by another.
    static STARTING: Cell<u32> = const { Cell::new(0) };
}

/// True while this thread of the program starts another.
pub(crate) fn is_starting() -> bool {
    STARTING.get() > 0
}

struct Thread {
    start: Start,
    argument: *mut c_void,
}

/// What a thread that works for the runtime starts works for the runtime.
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
        // What the C library keeps of a thread may become a thread's of the runtime. This thread
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
