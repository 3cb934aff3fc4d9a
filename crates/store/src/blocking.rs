//! Stores that users bring: the [`Store`] trait, and the threads that call one so that no worker
//! ever waits for it.
//!
//! The rule it keeps: every job that was handed in comes back exactly once, also when the store
//! fails or panics. A call that never returns keeps its own page waiting, and one of the store's
//! threads; no other region notices.

use std::{
    any::Any,
    io,
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use farpage_fabric::log::later;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

/// What a user plugs in: the bytes of a region by offset. Called from several threads at once,
/// never twice at once for the same page. Each call is about one or more whole pages (the region's
/// last one may be shorter), so that `offset` is a multiple of the page size. A call that fails
/// fails for all of its pages.
///
/// A page that nobody has written to may be dropped and read again at any time, so a store must
/// return the same bytes for it: a program holds slices of this memory, which must not change by
/// themselves.
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

    /// False: `read` and `write` return without waiting for anything and are called on the worker's
    /// own thread.
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
    /// Calls at once, at most. Each is made on a thread of its own, which ends when it has had no
    /// work for two seconds. Default: 8.
    pub threads: usize,
}

impl Default for BlockingOptions {
    fn default() -> Self {
        Self { threads: 8 }
    }
}

/// A thread without work ends after so long.
const IDLE: Duration = Duration::from_secs(2);

/// Something to do on a thread of a store.
pub(crate) trait Work: Send {
    fn run(self: Box<Self>);
}

/// A store with its threads.
pub(crate) struct BlockingStore {
    pub(crate) store: Arc<dyn Store>,
    threads_max: usize,
    jobs: Sender<Box<dyn Work>>,
    crew: Arc<Crew>,
}

struct Crew {
    jobs: Receiver<Box<dyn Work>>,
    count: Mutex<Count>,
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
        });
        Self {
            store,
            threads_max: options.threads.max(1),
            jobs,
            crew,
        }
    }

    /// Runs the work on a thread of this store, or here and now if no thread can be had.
    pub(crate) fn submit(&self, work: Box<dyn Work>) {
        let mut count = self.crew.count.lock();
        if count.outstanding >= count.threads && count.threads < self.threads_max {
            let crew = self.crew.clone();
            match thread::Builder::new()
                .name("farpage-store".into())
                .spawn(move || crew.work())
            {
                Ok(_) => count.threads += 1,
                Err(error) => {
                    later(move || tracing::warn!(%error, "no thread for a store"));
                    if count.threads == 0 {
                        drop(count);
                        return work.run();
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
    event: EventFd,
    woken: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            event,
            woken: AtomicBool::new(false),
        })
    }

    /// Call after what is to be found was put where the lane looks.
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // It can only fail when the counter is full, and then the descriptor is readable
            // anyway.
            let _ = self.event.write(1);
        }
    }

    /// Call before looking: what is put after the look rings again.
    pub(crate) fn clear(&self) {
        // Read first: whoever rings in between finds the flag set and does not write, but is found
        // by the look.
        let _ = self.event.read();
        self.woken.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
