//! Stores that users bring: the [`Store`] trait, the threads that call one so that no worker waits
//! for it, and the [`Trust`] by which workers call one themselves.
//!
//! The rule it keeps: every job that was handed in comes back exactly once, also when the store
//! fails or panics. A call that never returns keeps its own page and its thread waiting; no other
//! region notices.

use std::{
    any::Any,
    io,
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use farpage_fabric::log::later;
use farpage_signals::Mutex;
use farpage_tables::{Doorbell, Held, Programs, is_private, run_outside, spawn_outside};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// A user's own store: the bytes of a region by offset. Called from several threads at once, never
/// twice at once for the same page. Each call is about one or more whole pages (the region's last
/// one may be shorter), so that `offset` is a multiple of the page size. A call that fails fails
/// for all of its pages.
///
/// A page that was never written to may be dropped and read again at any time, so a store must
/// return the same bytes for it: a program holds slices of this memory, which must not change by
/// themselves.
///
/// Calls come on farpage's threads, which have the program's descriptors. Some of these threads
/// keep to one CPU, and what a call starts would inherit that, so a store that has threads of its
/// own starts them when it is made.
pub trait Store: Send + Sync + 'static {
    /// Reads exactly `buf.len()` bytes at `offset`.
    ///
    /// # Errors
    /// Whatever went wrong; it reaches the program that touched the page.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all of `buf` at `offset`.
    ///
    /// # Errors
    /// Whatever went wrong; the page stays in local memory and the error surfaces when the region
    /// is flushed.
    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// Whatever went wrong.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns false if `read` and `write` never wait: workers then call them themselves from the
    /// start. True: threads of the store make the calls, until the store has returned at once for a
    /// while. In a runtime with memory servers all calls come on threads of the store, because
    /// workers do not have the program's descriptors there.
    fn may_block(&self) -> bool {
        true
    }

    /// Returns the name of this store in errors. Default: its type.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (**self).write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        (**self).flush()
    }
    fn may_block(&self) -> bool {
        (**self).may_block()
    }
    fn name(&self) -> String {
        (**self).name()
    }
}

/// Options of a user's store: the threads that call it.
#[derive(Clone, Debug)]
pub struct BlockingOptions {
    /// Upper bound of the store's threads. Each makes one call at a time, and ends after two
    /// seconds without work. Default: 8. With 0, workers make all calls themselves.
    pub threads: usize,
}

impl Default for BlockingOptions {
    fn default() -> Self {
        Self { threads: 8 }
    }
}

/// Time without work after which a thread of a store ends.
const IDLE: Duration = Duration::from_secs(2);

/// Job for a thread of a store.
pub(crate) trait StoreJob: Send {
    fn run(self: Box<Self>);
    /// Ends the job without having run it.
    fn fail(self: Box<Self>, why: io::Error);
}

/// Estimate of whether a store returns at once, from the time that its calls have taken so far.
///
/// A hand-off to another thread and back takes longer than the rest of a fault, so workers call a
/// store that returns at once themselves. Such a store may still take long, and then other faults
/// wait. So trust is lost faster than it is won.
struct Trust {
    /// Trust so far: 0, the maximum, means trusted; below means not yet.
    score: AtomicI32,
    /// Number of calls that workers are making themselves.
    inside: AtomicUsize,
}

impl Trust {
    /// Score of an unknown store: 16 calls that return at once make it trusted.
    const UNKNOWN: i32 = -16;
    /// Score after a longer call: its thread may have been kept waiting for a processor.
    const LONG: i32 = -64;
    /// Score after a call that has kept its thread from work.
    const STALLED: i32 = -1024;
    const STALL: Duration = Duration::from_millis(1);
    /// Time to wake a sleeping thread: a call within it, plus copying, returns at once.
    const WAKE_NS: u64 = 30_000;
    const COPIED_BYTES_PER_NS: u64 = 4;
    /// Largest call that a worker makes: a larger one takes longer than a hand-off to a thread.
    const BYTES_MAX: usize = 64 << 10;
    /// Upper bound of workers that call one store at once. A store that begins to stall is noticed
    /// only when the first of them returns.
    const INSIDE_MAX: usize = 4;

    /// Updates the trust after a call about `bytes` bytes that lasted `took`.
    fn learn(&self, bytes: usize, took: Duration) {
        let at_once_ns = Self::WAKE_NS + bytes as u64 / Self::COPIED_BYTES_PER_NS;
        let before = self.score.load(Ordering::Relaxed);
        let after = if took <= Duration::from_nanos(at_once_ns) {
            (before + 1).min(0)
        } else if took < Self::STALL {
            before.min(Self::LONG)
        } else {
            before.min(Self::STALLED)
        };
        // A concurrent update may be lost; the next call makes up for it.
        if after != before {
            self.score.store(after, Ordering::Relaxed);
        }
    }

    fn is_there(&self) -> bool {
        self.score.load(Ordering::Relaxed) >= 0
            && self.inside.load(Ordering::Relaxed) < Self::INSIDE_MAX
    }
}

/// A store with its threads.
pub(crate) struct BlockingStore {
    pub(crate) store: Programs<Arc<dyn Store>>,
    /// True where workers have descriptors of their own: the store's are the program's.
    is_outside: bool,
    trust: Trust,
    threads_max: usize,
    jobs: Sender<Box<dyn StoreJob>>,
    crew: Arc<Crew>,
}

struct Crew {
    jobs: Receiver<Box<dyn StoreJob>>,
    count: Mutex<CrewCounts>,
    /// CPUs of the thread that made the store. Workers, which start threads, keep to one CPU.
    cpus: Option<CpuSet>,
}

/// Counts of threads and jobs. Unless a thread is refused, no job waits for a busy thread while one
/// more may be started: `threads >= min(outstanding, threads_max)`.
#[derive(Default)]
struct CrewCounts {
    threads: usize,
    /// Jobs that were handed in and have not ended.
    outstanding: usize,
}

impl BlockingStore {
    pub(crate) fn new(store: Arc<dyn Store>, options: &BlockingOptions) -> Self {
        let (jobs, receiver) = crossbeam_channel::unbounded();
        let crew = Arc::new(Crew {
            jobs: receiver,
            count: Mutex::default(),
            cpus: sched_getaffinity(Pid::from_raw(0)).ok(),
        });
        Self {
            store: Programs::new(store),
            is_outside: is_private(),
            trust: Trust {
                score: AtomicI32::new(Trust::UNKNOWN),
                inside: AtomicUsize::new(0),
            },
            threads_max: options.threads,
            jobs,
            crew,
        }
    }

    /// True if a worker makes all calls itself, from the first one on.
    pub(crate) fn is_workers(&self) -> bool {
        !self.is_outside && (self.threads_max == 0 || !self.store.may_block())
    }

    /// True if a worker is to make a call about `bytes` bytes itself.
    pub(crate) fn is_trusted(&self, bytes: usize) -> bool {
        let is_trusted = bytes <= Trust::BYTES_MAX && self.trust.is_there();
        !self.is_outside && (self.threads_max == 0 || is_trusted)
    }

    /// Counts a call that a worker begins to make itself.
    pub(crate) fn enter(&self) {
        self.trust.inside.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a call that a worker has made itself.
    pub(crate) fn leave(&self) {
        self.trust.inside.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes a call about `bytes` bytes and times it. A panic is an error like any other.
    pub(crate) fn call(
        &self,
        bytes: usize,
        f: impl FnOnce(&dyn Store) -> io::Result<()>,
    ) -> Result<(), StoreCallError> {
        let began = Instant::now();
        let result = call(|| f(&**self.store));
        self.trust.learn(bytes, began.elapsed());
        result
    }

    /// Makes everything written so far durable.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let store = Arc::clone(&self.store);
        run_outside("farpage-store", move || match call(|| store.flush()) {
            Ok(()) => Ok(()),
            Err(StoreCallError::Io(error)) => Err(error),
            Err(StoreCallError::Panic(message)) => Err(io::Error::other(format!(
                "store {} panicked in flush: {message}",
                store.name()
            ))),
        })?
    }

    /// Runs `work` on a thread of this store. If no thread can be had, runs it here and now, or
    /// fails it where the calling thread does not have the program's descriptors.
    pub(crate) fn submit(&self, work: Box<dyn StoreJob>) {
        let mut count = self.crew.count.lock();
        if count.outstanding >= count.threads && count.threads < self.threads_max {
            let crew = self.crew.clone();
            match spawn_outside("farpage-store", move || crew.work()) {
                Ok(()) => count.threads += 1,
                Err(error) => {
                    let why = io::Error::new(error.kind(), format!("no thread for it: {error}"));
                    later(move || tracing::warn!(%error, "no thread for a store"));
                    if count.threads == 0 {
                        drop(count);
                        return match self.is_outside {
                            true => work.fail(why),
                            false => work.run(),
                        };
                    }
                }
            }
        }
        count.outstanding += 1;
        self.jobs.send(work).expect("the crew holds a receiver");
    }
}

impl Crew {
    fn work(&self) {
        if let Some(cpus) = &self.cpus {
            // Fails if these CPUs are gone by now; the thread then keeps the CPUs that it has.
            let _ = sched_setaffinity(Pid::from_raw(0), cpus);
        }
        loop {
            match self.jobs.recv_timeout(IDLE) {
                Ok(work) => {
                    work.run();
                    self.count.lock().outstanding -= 1;
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut count = self.count.lock();
                    if count.outstanding < count.threads {
                        count.threads -= 1;
                        return;
                    }
                }
            }
        }
    }
}

/// Failure of a call to a store.
#[derive(Debug)]
pub(crate) enum StoreCallError {
    Io(io::Error),
    Panic(String),
}

/// Calls a store; a panic is an error like any other.
pub(crate) fn call(f: impl FnOnce() -> io::Result<()>) -> Result<(), StoreCallError> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(StoreCallError::Io),
        Err(payload) => Err(StoreCallError::Panic(panic_text(payload))),
    }
}

fn panic_text(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload
            .downcast::<&str>()
            .map_or_else(|_| "no message".to_owned(), |text| (*text).to_owned()),
    }
}

/// Waker of the I/O queue that waits for work done elsewhere. Rings once per sleep of the I/O
/// queue.
pub(crate) struct Waker {
    doorbell: Held<Doorbell>,
    woken: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            doorbell: Held::new(Doorbell::new()?),
            woken: AtomicBool::new(false),
        })
    }

    /// Wakes the I/O queue. Call after the result was put where the I/O queue looks.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.doorbell.with(Doorbell::ring);
        }
    }

    /// Clears the doorbell. Call before looking: a result that is put after the look rings again.
    pub(crate) fn clear(&self) {
        // Clear first: a waker in between finds the flag set and does not ring, but the look finds
        // its result.
        self.doorbell.get().clear();
        self.woken.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.doorbell.get().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Store for Nothing {
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the number of calls that return at once until workers make them.
    fn until_trusted(store: &BlockingStore) -> usize {
        let mut calls = 0;
        while !store.is_trusted(4096) {
            assert!(calls < 10_000, "it is never trusted");
            store.trust.learn(4096, Duration::from_micros(2));
            calls += 1;
        }
        calls
    }

    #[test]
    fn store_is_trusted_while_it_returns_at_once() {
        let store = BlockingStore::new(Arc::new(Nothing), &BlockingOptions::default());
        assert_eq!(until_trusted(&store), 16, "nobody knows it");
        assert_eq!(until_trusted(&store), 0);
        store.trust.learn(64 << 10, Duration::from_micros(45));
        assert_eq!(until_trusted(&store), 0, "longer calls may take longer");
        store.trust.learn(4096, Duration::from_micros(45));
        assert_eq!(until_trusted(&store), 64, "it is slow at times");
        store.trust.learn(4096, Duration::from_millis(2));
        store.trust.learn(4096, Duration::from_micros(45));
        assert_eq!(until_trusted(&store), 1024, "it stalls at times");
    }

    #[test]
    fn workers_make_few_and_short_calls_at_once() {
        let store = BlockingStore::new(Arc::new(Nothing), &BlockingOptions::default());
        until_trusted(&store);
        assert!(store.is_trusted(64 << 10) && !store.is_trusted(65 << 10));
        for _ in 0..Trust::INSIDE_MAX {
            assert!(store.is_trusted(4096));
            store.enter();
        }
        assert!(!store.is_trusted(4096));
        store.leave();
        assert!(store.is_trusted(4096));
    }
}
