//! Threads of workers, and their replacement when one does not come back: [`Seats`].
//!
//! Workers make calls of users' stores themselves where these return at once, which saves a
//! hand-off to another thread and back. It is not known beforehand if a call does. So while there
//! are such calls, a *watchdog* wakes now and then, and where a thread has been in one for too long
//! it puts another on its seat. The old thread ends when its call has returned.
//!
//! The rule: a thread holds no lock while it is in a call, so that another can drive its worker.
//! The threads start long after their seats are made, if nothing needs them before.

use std::{
    io, mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_fabric::log::later;
use farpage_signals::Mutex;
use farpage_store::StoreCall;
use farpage_vm::Frame;
use nix::poll::{PollFd, PollFlags};

use crate::{
    doors::Doors,
    run::PageRun,
    waker::{WorkerWaker, sleep_on, spawn},
};

/// Time in a call after which a thread is not waited for. As long again may pass until the watchdog
/// sees it.
const PATIENCE: Duration = Duration::from_millis(1);
/// Number of wake-ups without a call after which the watchdog sleeps.
const QUIET_TIMES: u32 = 8;

/// Work of a worker's thread. Returns when the workers stop, or when the thread has lost its seat.
pub(crate) type Serve = Arc<dyn Fn() + Send + Sync>;

/// Seats of the workers that have a thread of their own, and the threads.
pub(crate) struct Seats {
    doors: Arc<Doors>,
    /// Names and work of the threads, by seat. Empty once the threads have ended.
    serve: Mutex<Vec<(String, Serve)>>,
    started: Instant,
    /// Start of the call that a seat's thread is in, in nanoseconds since `started`; 0: in none.
    inside_ns: Vec<CachePadded<AtomicU64>>,
    /// True if there was a call since the watchdog has looked.
    any: AtomicBool,
    /// Waker of the watchdog.
    waker: WorkerWaker,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Seats {
    pub(crate) fn new(doors: Arc<Doors>, seats: usize) -> io::Result<Seats> {
        Ok(Seats {
            doors,
            serve: Mutex::default(),
            started: Instant::now(),
            inside_ns: (0..seats).map(|_| CachePadded::default()).collect(),
            any: AtomicBool::new(false),
            waker: WorkerWaker::new()?,
            threads: Mutex::default(),
        })
    }

    fn now_ns(&self) -> u64 {
        // Never 0, which says that there is no call.
        self.started.elapsed().as_nanos() as u64 + 1
    }

    /// Makes a call on the seat's thread. Returns whether the seat is still this thread's.
    pub(crate) fn make<F: Frame>(&self, seat: usize, call: &mut StoreCall<PageRun<F>>) -> bool {
        // Unique among the seat's calls: replacing a thread takes longer than a tick.
        let since_ns = self.now_ns();
        self.inside_ns[seat].store(since_ns, Ordering::Release);
        if !self.any.load(Ordering::Relaxed) {
            self.any.store(true, Ordering::Relaxed);
            self.waker.wake();
        }
        call.make();
        self.inside_ns[seat]
            .compare_exchange(since_ns, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Assigns names and work to the seats. Their threads start later.
    pub(crate) fn assign(&self, serve: Vec<(String, Serve)>) {
        *self.serve.lock() = serve;
    }

    /// Returns the number of threads: one on each seat, and the watchdog.
    pub(crate) fn threads(&self) -> usize {
        self.inside_ns.len() + 1
    }

    /// Starts a thread on each seat, and the watchdog. After an error the next call starts those
    /// that are missing.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let serve = self.serve.lock().clone();
        let mut threads = self.threads.lock();
        while let Some((name, serve)) = serve.get(threads.len()).cloned() {
            threads.push(spawn(name, move || serve())?);
        }
        if threads.len() == serve.len() {
            let seats = self.clone();
            threads.push(spawn("lookout".to_owned(), move || seats.watch(&serve))?);
        }
        Ok(())
    }

    /// Waits for all threads. The workers have been told to stop, and no region is left, so no call
    /// is left, either.
    pub(crate) fn join(&self) {
        // The work refers to the seats.
        self.serve.lock().clear();
        // The watchdog may add threads until it ends.
        loop {
            let threads = mem::take(&mut *self.threads.lock());
            if threads.is_empty() {
                break;
            }
            for thread in threads {
                // A worker that panicked has ended the process already.
                let _ = thread.join();
            }
        }
    }

    fn watch(self: &Arc<Self>, serve: &[(String, Serve)]) {
        let mut quiet = 0;
        while !self.doors.is_stopping() {
            quiet += 1;
            if self.any.swap(false, Ordering::Relaxed) {
                quiet = 0;
            }
            for (seat, (name, serve)) in serve.iter().enumerate() {
                let since_ns = self.inside_ns[seat].load(Ordering::Acquire);
                if since_ns == 0 {
                    continue;
                }
                quiet = 0;
                if self.now_ns() - since_ns > PATIENCE.as_nanos() as u64
                    && let Err(error) = self.replace(seat, since_ns, name, serve)
                {
                    later(
                        move || tracing::warn!(%error, "no thread for a worker whose thread is in a call of a store"),
                    );
                }
            }
            let stopped = PollFd::new(self.doors.stopped(), PollFlags::POLLIN);
            if quiet < QUIET_TIMES {
                sleep_on(&mut [stopped], Some(Instant::now() + PATIENCE));
                continue;
            }
            self.waker.prepare();
            if self.any.load(Ordering::Relaxed) || self.doors.is_stopping() {
                self.waker.cancel();
            } else {
                self.waker.sleep(vec![stopped], None);
            }
        }
    }

    /// Puts another thread on a seat, unless the call of its thread has returned meanwhile.
    fn replace(
        self: &Arc<Self>,
        seat: usize,
        since_ns: u64,
        name: &str,
        serve: &Serve,
    ) -> io::Result<()> {
        let (seats, serve) = (self.clone(), serve.clone());
        let thread = spawn(name.to_owned(), move || {
            let inside_ns = &seats.inside_ns[seat];
            if (inside_ns.compare_exchange(since_ns, 0, Ordering::AcqRel, Ordering::Relaxed))
                .is_ok()
            {
                serve();
            }
        })?;
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }
}
