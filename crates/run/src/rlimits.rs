//! The launcher's limits (`ulimit`), raised for its own needs.
//!
//! The rule it keeps: the program has the limits that the launcher was started with.

use std::{mem::MaybeUninit, os::unix::process::CommandExt, process::Command};

/// Raised limits: memory that is lent counts as a file, and each program opens connections.
const RAISED: [libc::__rlimit_resource_t; 2] = [libc::RLIMIT_FSIZE, libc::RLIMIT_NOFILE];

/// Limits that the launcher was started with.
pub(crate) struct Limits([libc::rlimit; RAISED.len()]);

impl Limits {
    /// Raises the limits as far as a process may without rights.
    pub(crate) fn raise() -> Limits {
        Limits(RAISED.map(|of| {
            let mut before = MaybeUninit::<libc::rlimit>::zeroed();
            // SAFETY: there is room for the answer; all zeros is a limit.
            unsafe {
                libc::getrlimit(of, before.as_mut_ptr());
                let before = before.assume_init();
                let raised = libc::rlimit {
                    rlim_cur: before.rlim_max,
                    ..before
                };
                libc::setrlimit(of, &raw const raised);
                before
            }
        }))
    }

    /// Gives the program the limits as they were.
    pub(crate) fn prepare(&self, command: &mut Command) {
        let limits = self.0;
        let lower = move || {
            for (of, before) in RAISED.iter().zip(&limits) {
                // SAFETY: a limit that lasts for the call.
                unsafe { libc::setrlimit(*of, before) };
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls alone.
        unsafe { command.pre_exec(lower) };
    }
}
