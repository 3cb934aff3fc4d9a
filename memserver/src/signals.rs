//! [`Signals`]: wishes of an operator.
//!
//! The rule it keeps: no signal is lost while a process is replaced. Every thread blocks them, and
//! one thread takes them, except while the next process is about to begin. A signal that nobody has
//! taken waits for that process.

use std::{
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use parking_lot::{Mutex, MutexGuard};
use signal_hook::low_level;

/// Signals that ask for something.
const SIGNALS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGUSR2,
];

/// Taker of the signals SIGTERM, SIGINT, SIGHUP and SIGUSR2 of a daemon's process.
#[derive(Debug, Default)]
pub struct Signals(Mutex<Taken>);

/// State of a process's signals, locked while one is taken.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// First signal that asks to stop.
    stop: Option<i32>,
    /// True while nobody is served, and a signal to stop needs no care.
    is_loading: bool,
}

impl Signals {
    /// Takes signals from now on, and passes their numbers on. To be called before the process has
    /// a second thread. The first signal that asks to stop is passed on; another one ends the
    /// process on the spot, with the status that a shell gives for it. SIGHUP ends nothing: a
    /// terminal that closes must not take everybody's memory along.
    ///
    /// # Errors
    /// The kernel's error: no descriptors or threads left.
    pub fn take() -> io::Result<(Arc<Self>, Receiver<i32>)> {
        let set = SigSet::from_iter(SIGNALS);
        set.thread_block()?;
        let waiting = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let (signals, (asks, asked)) = (Arc::new(Self::default()), mpsc::channel());
        let thread = thread::Builder::new().name("farpage-signals".to_owned());
        let taking = Arc::clone(&signals);
        thread.spawn(move || while taking.pass_on(&waiting, &asks) {})?;
        Ok((signals, asked))
    }

    /// Notes that nobody is served yet, or that clients are served now. A signal to stop ends a
    /// process that serves nobody on the spot.
    pub fn set_loading(&self, is_loading: bool) {
        let mut taken = self.0.lock();
        taken.is_loading = is_loading;
        if let (true, Some(signal)) = (is_loading, taken.stop) {
            low_level::exit(128 + signal);
        }
    }

    /// Keeps signals from being taken until the result is dropped.
    pub(crate) fn hold(&self) -> MutexGuard<'_, Taken> {
        self.0.lock()
    }

    /// Passes the next signal on. False if nobody wants any.
    fn pass_on(&self, waiting: &SignalFd, asks: &Sender<i32>) -> bool {
        let mut fds = [PollFd::new(waiting.as_fd(), PollFlags::POLLIN)];
        // An interrupted poll is as good as one that found nothing.
        let _ = poll(&mut fds, PollTimeout::NONE);
        let mut taken = self.0.lock();
        let Ok(Some(signal)) = waiting.read_signal() else {
            return true;
        };
        let signal = signal.ssi_signo as i32;
        if [Signal::SIGTERM as i32, Signal::SIGINT as i32].contains(&signal) {
            if taken.is_loading || taken.stop.is_some() {
                low_level::exit(128 + signal);
            }
            taken.stop = Some(signal);
        }
        asks.send(signal).is_ok()
    }
}

impl Taken {
    /// True if the process was asked to stop.
    pub(crate) fn is_stop_asked(&self) -> bool {
        self.stop.is_some()
    }
}
