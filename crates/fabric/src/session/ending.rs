//! The end of a process that still has sessions: returning from `main` and `exit` drop none of
//! them.
//!
//! The rule it keeps: nothing is taken away from a program that is ending. Destructors and threads
//! may use leased memory until the kernel closes the connections.

use std::{
    mem, process,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_signals::Mutex;
use farpage_tables::Table;

use super::shared::SessionState;

/// Upper bound of the time that a goodbye may hold up a program that is ending.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

/// A session over a network.
struct Open {
    /// The process that began the session: a child made by a call without handlers has its socket,
    /// too, and must not speak on it.
    process: u32,
    /// The descriptor table that has the session's socket. `None`: the program's.
    table: Option<Weak<Table>>,
    shared: Weak<SessionState>,
}

static SESSIONS: Mutex<Vec<Open>> = Mutex::new(Vec::new());

/// Begins a child made by `fork`, which has no sessions yet.
///
/// # Safety
/// The calling thread is the only one of this process, and outside of this module.
pub(crate) unsafe fn begin_child() {
    // SAFETY: the caller's promise.
    unsafe { SESSIONS.renew(Vec::new()) };
}

/// Notes a session, so that it announces the end of this process. Over shared memory the server
/// sees the end itself.
pub(super) fn register(shared: &Arc<SessionState>) {
    if shared.local.is_some() {
        return;
    }
    static IS_EXPECTED: AtomicBool = AtomicBool::new(false);
    if !IS_EXPECTED.swap(true, Ordering::Relaxed) {
        // SAFETY: the function may run at any time until the process ends. Where there is no room
        // for it, a session waits for its reconnect grace at the server.
        unsafe { libc::atexit(announce) };
    }
    let mut sessions = SESSIONS.lock();
    sessions.retain(|session| session.shared.strong_count() > 0);
    sessions.push(Open {
        process: process::id(),
        table: Table::current().map(|table| Arc::downgrade(&table)),
        shared: Arc::downgrade(shared),
    });
}

extern "C" fn announce() {
    // A thread that is just making a session has no time to end it.
    let Some(sessions) = (SESSIONS.try_lock()).map(|mut sessions| mem::take(&mut *sessions)) else {
        return;
    };
    let until = Instant::now() + GOODBYE;
    let process = process::id();
    for session in sessions.iter().filter(|session| session.process == process) {
        // Dropped where the session is used, since this may be the last reference.
        let leave = || {
            session
                .shared
                .upgrade()
                .map_or((), |shared| shared.leave(until))
        };
        match &session.table {
            None => leave(),
            // A table that is gone has taken its sessions along.
            Some(table) => table.upgrade().map_or((), |table| table.run(leave)),
        }
    }
}

#[cfg(test)]
mod tests {
    use farpage_testkit::passes_in_child;

    use super::*;

    #[test]
    fn a_child_made_while_sessions_are_noted_notes_its_own() {
        let noted = SESSIONS.lock();
        let passes = passes_in_child(|| {
            // SAFETY: the only thread, and the lock is its parent's.
            unsafe { begin_child() };
            SESSIONS.lock().is_empty()
        });
        drop(noted);
        assert!(passes);
    }
}
