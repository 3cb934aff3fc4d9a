//! Crash message on standard error, shown before SIGBUS ends the program: [`CrashMessage`].
//!
//! The rule: one line for each cause and region, however many pages it costs. Writing never waits:
//! a line that standard error has no room for is left out, and the standard library's lock of it is
//! not taken. A thread that prints the bytes of a lost page holds that lock while it waits for us.

use std::{collections::HashSet, io, mem, os::fd::AsFd, time::Duration};

use farpage_signals::Mutex;
use farpage_store::{PageIndex, StoreError};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd,
};

use crate::{PageError, region::Region};

/// Writer of the reasons why pages are poisoned.
pub(crate) struct CrashMessage {
    wanted: bool,
    deadline: Duration,
    /// Regions and causes that were told.
    told: Mutex<HashSet<(u64, String)>>,
}

impl CrashMessage {
    pub(crate) fn new(wanted: bool, deadline: Duration) -> CrashMessage {
        CrashMessage {
            wanted,
            deadline,
            told: Mutex::default(),
        }
    }

    /// Writes the reason before a page is poisoned: the signal of a later touch says nothing.
    pub(crate) fn say(&self, region: &Region, page: PageIndex, error: &PageError) {
        if !self.wanted || !self.told.lock().insert((region.id.0, cause(error))) {
            return;
        }
        let advice = match error.may_retry() {
            true => format!(
                " See whether the server runs and can be reached; `prefetch_now` returns such errors \
                 and tries again, FARPAGE_DEADLINE waits longer than {:?}.",
                self.deadline
            ),
            false => String::new(),
        };
        write(&format!(
            "farpage: {error}. Touching page {page} raises SIGBUS (\"Bus error\").{advice} \
             (FARPAGE_LAST_WORDS=0 turns this line off.)\n"
        ));
    }
}

/// Writes a line to standard error without waiting for its reader.
pub(crate) fn write(line: &str) {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    // A pipe without a reader must not keep the page from being poisoned.
    if poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
        let _ = unistd::write(stderr.as_fd(), line.as_bytes());
    }
}

/// Returns the cause of a loss without the page: a server or store, or a kind of error.
fn cause(error: &PageError) -> String {
    match error {
        PageError::Store(
            StoreError::Remote { server, .. } | StoreError::Corrupt { server, .. },
        ) => server.to_string(),
        PageError::Store(StoreError::User { store, .. } | StoreError::Panicked { store, .. }) => {
            store.clone()
        }
        PageError::Store(error) => format!("{:?}", mem::discriminant(error)),
        error => format!("{:?}", mem::discriminant(error)),
    }
}
