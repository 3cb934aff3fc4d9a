//! Stacks that the program gives its threads (`pthread_attr_setstack`), in remote memory.
//!
//! A new thread makes system calls with addresses of its stack while it holds signals back, so that
//! the filter of in-thread faults would end the process.
//!
//! The rule it keeps: a thread gets a local stack of the same size instead, with a line.

use std::{
    ffi::{c_int, c_void},
    mem::{self, MaybeUninit},
    ptr,
};

use libc::{cpu_set_t, pthread_attr_t, sched_param, sigset_t};

use crate::{next, say_once, signals, state};

type Get = unsafe extern "C" fn(*const pthread_attr_t, *mut c_int) -> c_int;
type GetSignals = unsafe extern "C" fn(*const pthread_attr_t, *mut sigset_t) -> c_int;
type Set = unsafe extern "C" fn(*mut pthread_attr_t, c_int) -> c_int;

unsafe extern "C" {
    fn pthread_attr_getstack(
        attributes: *const pthread_attr_t,
        start: *mut *mut c_void,
        bytes: *mut usize,
    ) -> c_int;
    fn pthread_attr_getdetachstate(attributes: *const pthread_attr_t, state: *mut c_int) -> c_int;
    fn pthread_attr_getinheritsched(attributes: *const pthread_attr_t, how: *mut c_int) -> c_int;
    fn pthread_attr_setinheritsched(attributes: *mut pthread_attr_t, how: c_int) -> c_int;
    fn pthread_attr_getschedpolicy(attributes: *const pthread_attr_t, policy: *mut c_int) -> c_int;
    fn pthread_attr_setschedpolicy(attributes: *mut pthread_attr_t, policy: c_int) -> c_int;
    fn pthread_attr_getschedparam(
        attributes: *const pthread_attr_t,
        parameters: *mut sched_param,
    ) -> c_int;
    fn pthread_attr_setschedparam(
        attributes: *mut pthread_attr_t,
        parameters: *const sched_param,
    ) -> c_int;
}

/// Numbers that a thread's attributes have.
const NUMBERS: [(Get, Set); 3] = [
    (
        pthread_attr_getdetachstate,
        libc::pthread_attr_setdetachstate,
    ),
    (pthread_attr_getinheritsched, pthread_attr_setinheritsched),
    (pthread_attr_getschedpolicy, pthread_attr_setschedpolicy),
];

/// Attributes of a thread with a local stack, in place of the program's.
pub(crate) struct LocalStack(pthread_attr_t);

impl LocalStack {
    /// Copies `given`, without its stack. `None` if the stack is not remote, or faults are served
    /// by filler threads.
    ///
    /// # Safety
    /// `given` are attributes, or null.
    pub(crate) unsafe fn in_place_of(given: *const pthread_attr_t) -> Option<LocalStack> {
        if given.is_null() || !signals::are_ours() {
            return None;
        }
        let (mut start, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the caller's promise, and room for the answers.
        let asked = unsafe { pthread_attr_getstack(given, &raw mut start, &raw mut bytes) };
        if asked != 0 || start.is_null() || !state::is_remote(start.addr(), bytes) {
            return None;
        }
        say_once(
            "a thread's stack in remote memory is replaced by a local one of its size: --fillers, or --small no and a larger --min-bytes, leave the stack where it is",
        );
        // SAFETY: the caller's promise. Answers are initialised, and read if there are some.
        unsafe {
            let mut made = MaybeUninit::<pthread_attr_t>::zeroed();
            libc::pthread_attr_init(made.as_mut_ptr());
            let mut made = made.assume_init();
            libc::pthread_attr_setstacksize(&raw mut made, bytes);
            for (get, set) in NUMBERS {
                let mut number = 0;
                get(given, &raw mut number);
                set(&raw mut made, number);
            }
            let mut parameters = MaybeUninit::<sched_param>::zeroed();
            pthread_attr_getschedparam(given, parameters.as_mut_ptr());
            pthread_attr_setschedparam(&raw mut made, parameters.as_ptr());
            let mut processors = MaybeUninit::<cpu_set_t>::zeroed();
            let size = size_of::<cpu_set_t>();
            if libc::pthread_attr_getaffinity_np(given, size, processors.as_mut_ptr()) == 0 {
                libc::pthread_attr_setaffinity_np(&raw mut made, size, processors.as_ptr());
            }
            // Older C libraries have no signals here.
            let get = next::look_up(libc::RTLD_NEXT, c"pthread_attr_getsigmask_np");
            if !get.is_null() {
                let get: GetSignals = mem::transmute(get);
                let mut held = MaybeUninit::<sigset_t>::zeroed();
                if get(given, held.as_mut_ptr()) == 0 {
                    signals::pthread_attr_setsigmask_np(&raw mut made, held.as_ptr());
                }
            }
            Some(LocalStack(made))
        }
    }

    pub(crate) fn attributes(&self) -> *const pthread_attr_t {
        &raw const self.0
    }
}

impl Drop for LocalStack {
    fn drop(&mut self) {
        // SAFETY: made above.
        unsafe { libc::pthread_attr_destroy(&raw mut self.0) };
    }
}
