//! Sleep of a worker on descriptors, and the call that wakes it: [`WorkerWaker`].
//!
//! The rule: work is made visible *before* [`WorkerWaker::wake`], and looked for *after*
//! [`WorkerWaker::prepare`]. Then no wake-up is lost, and one costs a system call only when the
//! worker really sleeps.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering, fence},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use farpage_tables::Doorbell;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        prctl,
        signal::{SigSet, Signal},
        time::TimeSpec,
    },
};

/// Waker of one worker.
#[derive(Debug)]
pub(crate) struct WorkerWaker {
    doorbell: Doorbell,
    asleep: AtomicBool,
}

impl WorkerWaker {
    pub(crate) fn new() -> io::Result<WorkerWaker> {
        Ok(WorkerWaker {
            doorbell: Doorbell::new()?,
            asleep: AtomicBool::new(false),
        })
    }

    /// Wakes the worker if it sleeps or is about to.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `prepare`: either the worker sees the work, or we see that it is
        // asleep.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.doorbell.ring();
        }
    }

    /// Announces that the worker is about to sleep. The worker must look for work once more before
    /// it calls [`sleep`](Self::sleep), or [`cancel`](Self::cancel) if it finds some.
    pub(crate) fn prepare(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes back [`prepare`](Self::prepare): the worker found work after all.
    pub(crate) fn cancel(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Returns a descriptor that is readable after a wake-up.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Clears the doorbell after a sleep on [`fd`](Self::fd) if the worker was `woken`.
    pub(crate) fn clear(&self, woken: bool) {
        if woken {
            self.doorbell.clear();
        }
    }

    /// Sleeps until a wake-up, an event on one of `fds`, or `until`. May wake for no reason.
    pub(crate) fn sleep<'a>(&'a self, mut fds: Vec<PollFd<'a>>, until: Option<Instant>) {
        fds.push(PollFd::new(self.fd(), PollFlags::POLLIN));
        sleep_on(&mut fds, until);
        self.cancel();
        self.clear(fds.last().is_some_and(|fd| fd.any() == Some(true)));
    }
}

/// Sleeps until an event on one of `fds`, or `until`. May wake for no reason.
pub(crate) fn sleep_on(fds: &mut [PollFd<'_>], until: Option<Instant>) {
    let timeout = until.map(|at| TimeSpec::from(at.saturating_duration_since(Instant::now())));
    match ppoll(fds, timeout, None) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => panic!("cannot poll a worker's descriptors: {e}"),
    }
}

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
        // SIGBUS stays blocked: its handler may serve faults, which is not for workers. SIGSYS is
        // raised by filters of system calls that the process had before this thread.
        let mut signals = SigSet::all();
        for own in [
            Signal::SIGSEGV,
            Signal::SIGFPE,
            Signal::SIGILL,
            Signal::SIGSYS,
        ] {
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

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread, time::Duration};

    use super::*;

    #[test]
    fn wake_up_after_prepare_is_never_lost() {
        let waker = Arc::new(WorkerWaker::new().unwrap());
        let round = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (w, r) = (waker.clone(), round.clone());
        let thread = thread::spawn(move || {
            for i in 1..=20_000 {
                r.store(i, Ordering::Relaxed);
                w.wake();
                while r.load(Ordering::Relaxed) == i {
                    std::hint::spin_loop();
                }
            }
        });
        let far = Instant::now() + Duration::from_secs(60);
        let mut served = 0;
        while served < 20_000 {
            waker.prepare();
            if round.load(Ordering::Relaxed) == 0 {
                waker.sleep(Vec::new(), Some(far));
                assert!(Instant::now() < far, "a wake-up was lost");
                continue;
            }
            waker.cancel();
            served += 1;
            round.store(0, Ordering::Relaxed);
        }
        thread.join().unwrap();
    }
}
