//! [`later`]: log lines of threads that others wait for.
//!
//! The rule it keeps: no subscriber runs on a thread that moves pages, keeps a session or serves
//! clients, which may live in the same program. A subscriber may wait for a lock whose holder waits
//! for a page, or touch remote memory itself. The lines that wait are bounded, and dropped lines
//! are counted in the log.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    process, thread,
    time::{Duration, Instant},
};

use farpage_signals::Mutex;
use tracing::{Dispatch, dispatcher, level_filters::LevelFilter};

/// Upper bound of lines that wait. A lost server causes one for each page that is wanted.
const LINES_MAX: usize = 1024;
/// Longest wait for the lock of the lines. The lock is held for moments, but the child of a fork
/// may find it held by a thread that the child does not have.
const PATIENCE: Duration = Duration::from_millis(20);

type LogLine = Box<dyn FnOnce() + Send>;

struct LogQueue {
    /// Lines, each with the subscriber of the thread that logged it.
    lines: VecDeque<(Dispatch, LogLine)>,
    dropped: u64,
    /// The process whose thread writes the lines, while there are lines.
    writer: Option<u32>,
}

static WAITING: Mutex<LogQueue> = Mutex::new(LogQueue {
    lines: VecDeque::new(),
    dropped: 0,
    writer: None,
});

/// Runs `line`, which logs something, on a thread that no other work waits for. Returns at once.
pub fn later(line: impl FnOnce() + Send + 'static) {
    if LevelFilter::current() == LevelFilter::OFF {
        return;
    }
    let subscriber = dispatcher::get_default(Dispatch::clone);
    let Some(mut waiting) = WAITING.try_lock_until(Instant::now() + PATIENCE) else {
        return;
    };
    let process = process::id();
    if waiting.writer.is_some_and(|writer| writer != process) {
        // The lines are those of the parent process, which writes them itself.
        waiting.lines.clear();
        (waiting.dropped, waiting.writer) = (0, None);
    }
    if waiting.lines.len() < LINES_MAX {
        waiting.lines.push_back((subscriber, Box::new(line)));
    } else {
        waiting.dropped += 1;
    }
    if waiting.writer.is_none() {
        // A subscriber is the program's code. If no thread starts, the next line tries again.
        let writer = farpage_tables::errand_outside("farpage-log", write);
        waiting.writer = writer.ok().map(|()| process);
    }
}

/// Waits until all lines have been written, or until `until`. For the end of a program or a server.
pub fn flush(until: Instant) {
    let is_done = || match WAITING.try_lock_until(Instant::now() + PATIENCE) {
        Some(waiting) => waiting.writer.is_none(),
        None => false,
    };
    while !is_done() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Writes lines until there are none.
fn write() {
    let next = || {
        let mut waiting = WAITING.lock();
        let next = waiting.lines.pop_front();
        if next.is_none() {
            waiting.writer = None;
        }
        (next, std::mem::take(&mut waiting.dropped))
    };
    while let (Some((subscriber, line)), dropped) = next() {
        // A subscriber's panic, whose message has been printed, costs its line.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            dispatcher::with_default(&subscriber, || {
                line();
                if dropped > 0 {
                    tracing::warn!(dropped, "lines were dropped: they came faster than logged");
                }
            });
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    };

    use tracing::{
        Event, Metadata, Subscriber,
        field::{Field, Visit},
        span,
    };

    use super::*;

    /// A subscriber's counts: events, and the sum of their `dropped` fields.
    #[derive(Default)]
    struct Counting {
        events: AtomicU64,
        dropped: AtomicU64,
    }

    struct Counter(Arc<Counting>);

    impl Visit for &Counting {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "dropped" {
                self.dropped.fetch_add(value, Ordering::Relaxed);
            }
        }

        fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
    }

    impl Subscriber for Counter {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, event: &Event<'_>) {
            self.0.events.fetch_add(1, Ordering::Relaxed);
            event.record(&mut &*self.0);
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn lines_beyond_the_bound_are_dropped_and_counted() {
        let counting = Arc::new(Counting::default());
        let patience = Duration::from_secs(60);
        tracing::subscriber::with_default(Counter(counting.clone()), || {
            let (go, gate) = mpsc::channel::<()>();
            let (tell, told) = mpsc::channel();
            let (begun, began) = mpsc::channel();
            // Holds the writer back.
            later(move || {
                begun.send(()).expect("the test waits");
                gate.recv_timeout(patience).expect("the test goes on");
            });
            began.recv_timeout(patience).expect("a writer");
            for _ in 0..LINES_MAX + 7 {
                later(|| tracing::info!("a line"));
            }
            // A panic costs one line, and not those behind it.
            go.send(()).expect("the writer waits");
            let send = move || tell.send(()).expect("the test waits");
            loop {
                let send = send.clone();
                later(move || panic!("a subscriber's, as this test wants it"));
                later(send);
                if told.recv_timeout(Duration::from_millis(10)).is_ok() {
                    break;
                }
            }
        });
        let lines = counting.events.load(Ordering::Relaxed);
        let dropped = counting.dropped.load(Ordering::Relaxed);
        assert!(dropped >= 7, "{dropped}");
        assert!(lines > LINES_MAX as u64, "{lines}");
    }
}
