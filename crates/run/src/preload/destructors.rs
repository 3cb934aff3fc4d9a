//! Destructors of threads' variables: `__cxa_thread_atexit_impl`.
//!
//! The C library keeps destructors in memory of the program's allocator, whose own state may be
//! remote. The rule: destructors of the runtime's variables are kept here, in the runtime's memory.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use farpage_signals::holds_signals_back;

use crate::{Inside, next::next};

/// Function that destroys a thread's variable.
type Destructor = unsafe extern "C" fn(*mut c_void);

/// A variable of this thread that is destroyed at its end.
struct Variable {
    destructor: Destructor,
    object: *mut c_void,
    next: *mut Variable,
}

next! {
    /// `__cxa_thread_atexit_impl`.
    next_thread_atexit = c"__cxa_thread_atexit_impl"(destructor: Destructor, object: *mut c_void, library: *mut c_void) -> c_int, else -1;
}

thread_local! {
    /// The newest variable of this thread.
    static VARIABLES: Cell<*mut Variable> = const { Cell::new(ptr::null_mut()) };
}

/// Key whose destructor runs at a thread's end; `KEYS_MAX` before it is made.
static KEY: AtomicU32 = AtomicU32::new(KEYS_MAX);

/// Number of keys for which the C library has room in each thread. More keys would need memory.
const KEYS_MAX: u32 = 32;

/// Makes the key, before the program makes its own.
pub(crate) fn begin() {
    let mut key = KEYS_MAX;
    // SAFETY: the key is written before it is read, and the function is of the type asked for.
    unsafe { libc::pthread_key_create(&raw mut key, Some(destroy)) };
    KEY.store(key, Ordering::Relaxed);
}

/// `__cxa_thread_atexit_impl`. Without a key, the variables of a thread stay.
///
/// # Safety
/// As `__cxa_thread_atexit_impl`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn __cxa_thread_atexit_impl(
    destructor: Destructor,
    object: *mut c_void,
    library: *mut c_void,
) -> c_int {
    // A thread's first guard registers one before the thread counts as inside.
    if !Inside::is() && !holds_signals_back() {
        // SAFETY: the caller's promise.
        return unsafe { next_thread_atexit(destructor, object, library) };
    }
    let key = KEY.load(Ordering::Relaxed);
    if key < KEYS_MAX {
        let next = VARIABLES.get();
        VARIABLES.set(Box::into_raw(Box::new(Variable {
            destructor,
            object,
            next,
        })));
        // SAFETY: the key was made; its value only has to differ from null.
        unsafe { libc::pthread_setspecific(key, ptr::from_ref(&KEY).cast()) };
    }
    0
}

/// Destroys this thread's variables, the newest first.
unsafe extern "C" fn destroy(_: *mut c_void) {
    let _inside = Inside::enter();
    loop {
        let newest = VARIABLES.get();
        if newest.is_null() {
            return;
        }
        // SAFETY: made above, and taken off the list.
        let variable = unsafe { Box::from_raw(newest) };
        VARIABLES.set(variable.next);
        // SAFETY: whoever registered it promised that.
        unsafe { (variable.destructor)(variable.object) };
    }
}
