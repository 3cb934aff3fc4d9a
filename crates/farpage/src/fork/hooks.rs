//! [`Hooks`] of a library that wraps all functions which fork, and lines for people.
//!
//! The rule it keeps: without hooks the same facts are logged.

use std::sync::OnceLock;

/// Calls to a library that wraps all functions which fork: before this process is frozen, while it
/// is, and after.
#[derive(Clone, Copy)]
pub struct Hooks {
    /// Called before the regions are frozen: may wait for calls of other threads on the regions.
    pub freezing: fn(),
    /// Called when the regions are frozen.
    pub frozen: fn(),
    /// Called at the end of the fork, before any other code of the process: true in the child.
    pub ended: fn(bool),
    /// Called once for a child that has touched as many bytes of absent pages, which stay in its
    /// memory for a reason.
    pub grown: fn(usize, &str),
}

pub(super) static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Notes that a child has touched as many bytes of absent pages, which stay in its memory because
/// of `why`.
pub(super) fn grown(bytes: usize, why: &str) {
    match HOOKS.get() {
        Some(hooks) => (hooks.grown)(bytes, why),
        None => tracing::warn!(
            bytes,
            why,
            "what a child made by fork touches stays in its memory, beyond the budget"
        ),
    }
}

/// Tells that a process made by `fork` cannot go on.
pub(super) fn failed(what: &str) {
    match HOOKS.get() {
        Some(_) => say(what),
        None => tracing::error!("{what}"),
    }
}

/// Leaves the beginning of forks to the caller, who [begins](super::begin) each: the handlers of
/// `fork` do the rest alone.
pub fn leave_to_caller(hooks: Hooks) {
    let _ = HOOKS.set(hooks);
}

/// Writes a line to standard error at once.
pub(super) fn say(line: &str) {
    let line = format!("farpage: {line}\n");
    // SAFETY: the bytes are there. A closed descriptor is the program's business.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}
