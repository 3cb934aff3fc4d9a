//! Threads that workers run on.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use nix::sys::{
    prctl,
    signal::{SigSet, Signal},
};

/// Time after which a worker looks again for events without a wake-up.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// Starts a worker's thread. A panic in it ends the process with a message: without it the program
/// would hang at its next fault.
pub(crate) fn spawn(
    name: String,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let thread = Builder::new().name(name.clone());
    farpage_tables::spawn(thread, move || {
        // Signals are the program's, but for those that this thread raises itself, which would end
        // the process without a word: a store that runs in a thread started here may be the reason.
        // SIGBUS stays blocked: its handler may serve faults, which is not for workers.
        let mut signals = SigSet::all();
        for own in [Signal::SIGSEGV, Signal::SIGFPE, Signal::SIGILL] {
            signals.remove(own);
        }
        signals
            .thread_block()
            .expect("blocking signals cannot fail");
        // Timers of microseconds are ours.
        let _ = prctl::set_timerslack(1);
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            eprintln!(
                "farpage: worker {name} panicked; ending the process, which would hang without it"
            );
            std::process::abort();
        }
    })
}
