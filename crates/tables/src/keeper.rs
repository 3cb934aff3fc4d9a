//! [`Keeper`]: second references to descriptors of the program's table.
//!
//! The rule it keeps: a kept descriptor's file stays open until the keeper is dropped, whatever the
//! program closes. The kernel fills absent pages with zeros when the last reference to their
//! userfaultfd goes.

use std::{
    fmt, io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    process,
    sync::Arc,
};

use farpage_signals::SignalGuard;

use crate::{private::leave_programs_table, queue::Queue, table::start_apart};

/// A thread that keeps descriptors open.
pub struct Keeper(Arc<Queue>);

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keeper")
    }
}

impl Keeper {
    /// Keeps the files of `kept` open, by a thread with a table of its own.
    ///
    /// # Errors
    /// No thread can be started, or the kernel has no `close_range` (5.9).
    pub fn new(kept: &[BorrowedFd<'_>]) -> io::Result<Keeper> {
        let mut kept: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
        kept.sort_unstable();
        let queue = Arc::<Queue>::default();
        let _signals = SignalGuard::new();
        let started = start_apart("farpage-keep", queue.clone(), move || {
            leave_programs_table(&kept)
        });
        started.map(|()| Keeper(queue))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Ends the process, whose program has closed or replaced a descriptor of the runtime's. The absent
/// pages can no longer be brought in.
pub fn lost(what: &str) -> ! {
    eprintln!(
        "farpage: the program has closed or replaced a descriptor of farpage's ({what}); ending the process, whose memory cannot \
         be brought in without it. Close only descriptors that the program has opened"
    );
    process::abort()
}
