//! Waiting with a bound: for conditions, and for whole tests.

use std::{
    fmt::Display,
    fs, process,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

/// The longest wait for a condition: far beyond what anything takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Polls `holds` until it returns true. Fails the test with `what` after [`PATIENCE`].
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(
            Instant::now() < deadline,
            "waited {PATIENCE:?} in vain until {what}"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the name of the running test, after which libtest names the test's thread.
///
/// # Panics
/// In a thread that the test has started itself.
pub fn test_name() -> String {
    let thread = thread::current();
    let name = thread.name().filter(|name| *name != "main");
    name.expect("libtest runs a test in a thread of the test's name")
        .to_owned()
}

/// Guard that ends this process with a message unless it is dropped in time: a test of something
/// that must not hang would hang for ever otherwise.
pub struct Watchdog {
    _leash: Sender<()>,
}

impl Watchdog {
    /// Starts a watchdog of the running test.
    pub fn new(patience: Duration) -> Watchdog {
        let test = test_name();
        let (leash, end) = mpsc::channel();
        thread::spawn(move || {
            if end.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                let threads = wait_channels("self");
                eprintln!("{test} hangs: not done after {patience:?}; its threads:\n{threads}");
                process::abort();
            }
        });
        Watchdog { _leash: leash }
    }
}

/// Returns a line for each thread of `process`, with the function of the kernel in which the thread
/// sleeps.
pub(crate) fn wait_channels(process: impl Display) -> String {
    let tasks = fs::read_dir(format!("/proc/{process}/task"));
    let line = |task: fs::DirEntry| {
        let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        format!("  {} in {}\n", read("comm").trim(), read("wchan"))
    };
    tasks.into_iter().flatten().flatten().map(line).collect()
}
