//! Values that belong to one process, and the process's handler of SIGBUS.
//!
//! The rule it keeps: a child made by `fork` has a copy of every object but neither the threads nor
//! the mappings behind it. The child gets an exception, never a hang, and values that it drops are
//! left alone. Dropping a value waits, for write-backs or for threads to end, so it is done without
//! the interpreter's lock, too.

use std::{mem, ptr};

use nix::libc;
use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use pyo3::prelude::*;

use crate::error;

/// A value for the process that made it, until it is closed. Locked without the interpreter's lock
/// only, but for [`here`](Held::here): a thread that waits for one lock while it holds the other
/// stops all.
pub(crate) struct Held<T: End + Send + Sync> {
    pid: u32,
    value: RwLock<Option<T>>,
    /// The value's name in errors.
    what: String,
}

impl<T: End + Send + Sync> Held<T> {
    pub(crate) fn new(what: impl Into<String>, value: T) -> Held<T> {
        Held {
            pid: std::process::id(),
            value: RwLock::new(Some(value)),
            what: what.into(),
        }
    }

    pub(crate) fn what(&self) -> &str {
        &self.what
    }

    /// True in the process that made the value, and not in a child of it.
    pub(crate) fn is_own(&self) -> bool {
        self.pid == std::process::id()
    }

    pub(crate) fn check_process(&self) -> PyResult<()> {
        if self.is_own() {
            return Ok(());
        }
        Err(error::system(
            "a process made by fork has copies of its parent's arrays to read and write, and nothing more: \
             make a runtime in the child, or start processes by `spawn` or `forkserver`",
        ))
    }

    /// True if the value has not been closed. Waits while it is being closed. In a child made by
    /// `fork`, false.
    pub(crate) fn is_open(&self, py: Python<'_>) -> bool {
        self.is_own() && py.detach(|| self.value.read().is_some())
    }

    /// Calls `body` with the value, without the interpreter's lock. The value is not closed
    /// meanwhile.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&T) -> R + Send,
    ) -> PyResult<R> {
        self.check_process()?;
        let result = py.detach(|| self.value.read().as_ref().map(body));
        result.ok_or_else(|| error::closed(&self.what))
    }

    /// Locks the value's place, for a thread that closes the value and does not hold the
    /// interpreter's lock.
    pub(crate) fn place(&self) -> RwLockWriteGuard<'_, Option<T>> {
        self.value.write()
    }

    /// Returns the value, or `None` after its end, to callers that may hold the interpreter's lock:
    /// no thread may hold [`place`](Held::place) of such a value for long.
    pub(crate) fn here(&self) -> Option<MappedRwLockReadGuard<'_, T>> {
        RwLockReadGuard::try_map(self.value.read(), Option::as_ref).ok()
    }
}

/// End of a value that was dropped without being closed.
pub(crate) trait End {
    /// Ends the value. Says what went wrong, as text: no caller is left to be told.
    fn end(self) -> Result<(), String>;
}

impl<T: End + Send + Sync> Drop for Held<T> {
    fn drop(&mut self) {
        let mut value = self.value.get_mut().take();
        if !self.is_own() {
            mem::forget(value);
            return;
        }
        let mut end = || value.take().map_or(Ok(()), End::end);
        // At the interpreter's end there is no lock to release any more.
        let ended = Python::try_attach(|py| py.detach(&mut end)).unwrap_or_else(&mut end);
        if let Err(error) = ended {
            eprintln!("farpage: {error}");
        }
    }
}

/// Returns the address of the process's handler of SIGBUS; 0 or 1 if it has none. `faulthandler`
/// replaces the handler that serves in-thread faults.
#[pyfunction]
pub(crate) fn sigbus_handler() -> usize {
    // SAFETY: plain data, for which zeros are a value.
    let mut now: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: only asks; `now` may be written.
    unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut now) };
    now.sa_sigaction
}
