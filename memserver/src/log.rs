//! The daemon's log writer, which never waits.
//!
//! The rule it keeps: a thread that logs goes on at once, even if nobody reads standard error.
//! Lines wait in a queue that a thread of its own empties. A line beyond the queue's length, or
//! beyond the rate that a person could follow, is dropped, counted and reported: peers decide how
//! many lines there are.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait for a reader: some hundred KiB.
const QUEUE: usize = 2048;
/// Lines at once, for example when a thousand clients of a job begin together.
const BURST: f64 = 1000.0;
/// Lines per second for good: a hostile peer cannot fill a disk in a day.
const PER_SECOND: f64 = 100.0;
/// Time between reports of dropped lines.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Writer of whole lines to standard error, which drops lines rather than wait. Clones share it.
#[derive(Clone)]
pub(crate) struct LogWriter {
    queue: NonBlocking,
    rate: Arc<Rate>,
}

/// A bucket of tokens, one for each line.
struct Rate {
    bucket: Mutex<(f64, Instant)>,
    dropped: AtomicU64,
}

impl LogWriter {
    /// Returns the writer, and a guard whose drop writes waiting lines, for a second at most.
    pub(crate) fn stderr() -> (Self, WorkerGuard) {
        let (queue, guard) = NonBlockingBuilder::default()
            .lossy(true)
            .buffered_lines_limit(QUEUE)
            .thread_name("farpage-log")
            .finish(io::stderr());
        let rate = Arc::new(Rate {
            bucket: Mutex::new((BURST, Instant::now())),
            dropped: AtomicU64::new(0),
        });
        (Self { queue, rate }, guard)
    }

    /// Counts the lines that were dropped so far.
    fn dropped(&self) -> u64 {
        let beyond_the_queue = self.queue.error_counter().dropped_lines() as u64;
        self.rate.dropped.load(Ordering::Relaxed) + beyond_the_queue
    }

    /// Starts a thread that reports dropped lines through the log itself. The thread ends with the
    /// process.
    pub(crate) fn say_what_is_dropped(self) -> io::Result<()> {
        let say = move || {
            let mut said = 0;
            loop {
                thread::sleep(SAY_EVERY);
                let dropped = self.dropped();
                if dropped > said {
                    // A report that is dropped itself counts, and another one follows.
                    tracing::warn!(
                        lines = dropped - said,
                        "log lines were dropped: there were too many, or nobody reads them"
                    );
                    said = dropped;
                }
            }
        };
        let thread = thread::Builder::new().name("farpage-log-say".to_owned());
        thread.spawn(say).map(drop)
    }
}

impl Rate {
    fn takes(&self, now: Instant) -> bool {
        let mut bucket = self.bucket.lock();
        let (tokens, filled) = *bucket;
        let earned = now.saturating_duration_since(filled).as_secs_f64() * PER_SECOND;
        let tokens = (tokens + earned).min(BURST);
        let takes = tokens >= 1.0;
        *bucket = (if takes { tokens - 1.0 } else { tokens }, now);
        takes
    }
}

impl Write for LogWriter {
    /// Writes one line: `tracing_subscriber` makes one call per line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.rate.takes(Instant::now()) {
            return self.queue.write(line);
        }
        self.rate.dropped.fetch_add(1, Ordering::Relaxed);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for LogWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_rate_are_dropped_until_time_has_passed() {
        let begun = Instant::now();
        let rate = Rate {
            bucket: Mutex::new((BURST, begun)),
            dropped: AtomicU64::new(0),
        };
        let taken = (0..5000).filter(|_| rate.takes(begun)).count();
        assert_eq!(taken, BURST as usize);
        let later = begun + Duration::from_secs(2);
        let taken = (0..5000).filter(|_| rate.takes(later)).count();
        assert_eq!(taken, 2 * PER_SECOND as usize);
    }
}
