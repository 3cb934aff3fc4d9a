//! Stores that users bring: the [`Store`] trait, the threads that call one so that no worker waits
//! for it, and the [`Trust`] by which workers call one themselves.
//!
//! The rule it keeps: every job that was handed in comes back exactly once, also when the store
//! fails or panics. A call that never returns keeps its own page waiting, and the thread that makes
//! it; no other region notices.

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
use farpage_tables::{Held, Programs, is_private, run_outside, spawn_outside};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::eventfd::{EfdFlags, EventFd},
    unistd::Pid,
};
use parking_lot::Mutex;

/// What a user plugs in: the bytes of a region by offset. Called from several threads at once,
/// never twice at once for the same page. Each call is about one or more whole pages (the region's
/// last one may be shorter), so that `offset` is a multiple of the page size. A call that fails
/// fails for all of its pages.
///
/// A page that nobody has written to may be dropped and read again at any time, so a store must
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

    /// False: `read` and `write` return without waiting for anything, so that they are called on
    /// the worker's own thread from the start. True: on threads of the store, until it has shown
    /// for a while that it returns at once. In a runtime with memory servers all calls come on
    /// threads of the store, because workers do not have the program's descriptors there.
    fn may_block(&self) -> bool {
        true
    }

    /// How errors call this store. By default its type.
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

/// How a user's store is driven.
#[derive(Clone, Debug)]
pub struct BlockingOptions {
    /// Threads of the store, at most. Each makes one call at a time, and ends when it has had no
    /// work for two seconds. Default: 8. None: workers make all calls themselves.
    pub threads: usize,
}

impl Default for BlockingOptions {
    fn default() -> Self {
        Self { threads: 8 }
    }
}

/// A thread ends after this long without work.
const IDLE: Duration = Duration::from_secs(2);

/// Something to do on a thread of a store.
pub(crate) trait Work: Send {
    fn run(self: Box<Self>);
    /// Ends it without having run it.
    fn fail(self: Box<Self>, why: io::Error);
}

/// Whether a store returns at once, by how long its calls have taken so far.
///
/// A hand-off to another thread and back takes longer than the rest of a fault, so workers call a
/// store that returns at once themselves. It may take long all the same, and then other faults
/// wait. So trust is lost faster than it is won.
struct Trust {
    /// Trusted from 0 on, which is the most.
    score: AtomicI32,
    /// Calls that workers are making themselves.
    inside: AtomicUsize,
}

impl Trust {
    /// So many calls that return at once make up for not knowing the store.
    const UNKNOWN: i32 = -16;
    /// The same after one that took longer: it may have been kept waiting for a processor.
    const LONG: i32 = -64;
    /// And after one that has kept its thread from work.
    const STALLED: i32 = -1024;
    const STALL: Duration = Duration::from_millis(1);
    /// A call returns at once within the time that waking a sleeping thread takes, and copying.
    const WAKE_NS: u64 = 30_000;
    const COPIED_BYTES_PER_NS: u64 = 4;
    /// A longer call takes longer than handing it to another thread, which makes it meanwhile.
    const BYTES_MAX: usize = 64 << 10;
    /// Workers that call the same store at once. When it begins to stall, nobody knows before the
    /// first of them returns.
    const INSIDE_MAX: usize = 4;

    /// A call about so many bytes has taken so long.
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
        // What another thread learns meanwhile may be forgotten; the next call says it again.
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
    jobs: Sender<Box<dyn Work>>,
    crew: Arc<Crew>,
}

struct Crew {
    jobs: Receiver<Box<dyn Work>>,
    count: Mutex<Count>,
    /// Those that the thread which made the store may use. Workers keep to one, and start threads.
    cpus: Option<CpuSet>,
}

/// At any time `threads >= min(outstanding, threads_max)`, so that no job waits for a thread that
/// is busy with another while one more may be started.
#[derive(Default)]
struct Count {
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

    /// A worker begins to make a call itself.
    pub(crate) fn enter(&self) {
        self.trust.inside.fetch_add(1, Ordering::Relaxed);
    }

    /// And has ended it.
    pub(crate) fn leave(&self) {
        self.trust.inside.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes a call about so many bytes. A panic is an error like any other.
    pub(crate) fn call(
        &self,
        bytes: usize,
        f: impl FnOnce(&dyn Store) -> io::Result<()>,
    ) -> Result<(), CallError> {
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
            Err(CallError::Io(error)) => Err(error),
            Err(CallError::Panic(message)) => Err(io::Error::other(format!(
                "store {} panicked in flush: {message}",
                store.name()
            ))),
        })?
    }

    /// Runs the work on a thread of this store. If none can be had, it is run here and now, or
    /// fails where the calling thread does not have the program's descriptors.
    pub(crate) fn submit(&self, work: Box<dyn Work>) {
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
            // CPUs that are refused by now are none to go back to.
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

/// Why a call to a store failed.
#[derive(Debug)]
pub(crate) enum CallError {
    Io(io::Error),
    Panic(String),
}

/// Calls a store; a panic is an error like any other.
pub(crate) fn call(f: impl FnOnce() -> io::Result<()>) -> Result<(), CallError> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(CallError::Io),
        Err(payload) => Err(CallError::Panic(panic_text(payload))),
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

/// Wakes the lane that waits for work done elsewhere. One write per sleep, however many things end.
pub(crate) struct Waker {
    event: Held<EventFd>,
    woken: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            event: Held::new(event),
            woken: AtomicBool::new(false),
        })
    }

    /// Call after what is to be found was put where the lane looks.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // It can only fail when the counter is full, and then the descriptor is readable
            // anyway.
            let _ = self.event.with(|event| event.write(1));
        }
    }

    /// Call before looking: what is put after the look rings again.
    pub(crate) fn clear(&self) {
        // Read first: whoever rings in between finds the flag set and does not write, but is found
        // by the look.
        let _ = self.event.get().read();
        self.woken.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.get().as_fd()
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

    /// How many calls that return at once it takes until workers make them.
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
