//! The threads that workers run on.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use nix::sys::{prctl, signal::SigSet};

/// After so long a worker looks again for what nobody rings for.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// Starts a worker's thread. A panic in it ends the process with a message: without it the program would hang at its next fault.
pub(crate) fn spawn(
    name: String,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.clone()).spawn(move || {
        // Signals are the program's; timers of microseconds are ours.
        SigSet::all()
            .thread_block()
            .expect("blocking signals cannot fail");
        let _ = prctl::set_timerslack(1);
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            eprintln!(
                "farpage: worker {name} panicked; ending the process, which would hang without it"
            );
            std::process::abort();
        }
    })
}
