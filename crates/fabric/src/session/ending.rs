//! The end of a process that still has sessions: returning from `main` and `exit` drop none of
//! them.
//!
//! The rule it keeps: nothing is taken away from a program that is ending. Destructors and threads
//! may use what was leased until the kernel closes the connections.

use std::{
    process,
    sync::{Arc, Mutex, Once, PoisonError, Weak},
    time::Instant,
};

use super::{remote::GOODBYE, shared::Shared};

/// Sessions over a network, with the process that began each: a child made by `fork` has their
/// sockets, too, and must not speak on them.
static SESSIONS: Mutex<Vec<(u32, Weak<Shared>)>> = Mutex::new(Vec::new());

/// Has a session announce the end of this process. Over shared memory the server sees the end
/// itself.
pub(super) fn register(shared: &Arc<Shared>) {
    if shared.local.is_some() {
        return;
    }
    static ONCE: Once = Once::new();
    // SAFETY: the function may run at any time until the process ends. Where there is no room for
    // it, a session waits for its reconnect grace at the server.
    ONCE.call_once(|| unsafe {
        libc::atexit(announce);
    });
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    sessions.retain(|(_, session)| session.strong_count() > 0);
    sessions.push((process::id(), Arc::downgrade(shared)));
}

extern "C" fn announce() {
    // A thread that is just making a session has no time to end it.
    let Ok(sessions) = SESSIONS.try_lock() else {
        return;
    };
    let until = Instant::now() + GOODBYE;
    let ours = sessions.iter().filter(|(by, _)| *by == process::id());
    for session in ours.filter_map(|(_, session)| session.upgrade()) {
        session.leave(until);
    }
}
