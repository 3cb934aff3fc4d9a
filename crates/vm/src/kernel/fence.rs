//! The fence of a shard: it keeps the program's unmapping and our transfers apart ([`Fence`]).
//!
//! When the program unmaps a part of a region, the kernel sends the shard a message and lets the
//! program's call return as soon as that message is read. From then on the program may have memory
//! of its own at these addresses.
//!
//! The rule it keeps: messages are read under the lock for writing, and pages change sides under
//! the lock for reading. So whatever lies at an address that is not known to be gone is the
//! region's for as long as the lock is held. No thread waits for a changing mapping while it holds
//! the lock: the change ends only when a thread reads.

use std::{
    cell::Cell,
    fmt, io,
    ops::Range,
    os::fd::AsFd,
    ptr,
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_signals::Mutex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::messages::Messages;
use crate::{
    space::{EventScope, EventSources, Events, PageFault},
    sys::{Refusal, Stopped},
    uffd::Uffd,
};

/// Longest wait for a shard's messages: then its filler is dead, or starved beyond help.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);
/// Time for which such a wait yields the core, before it goes on with naps.
const CHANGE_YIELDS: Duration = Duration::from_micros(200);
const CHANGE_NAP: Duration = Duration::from_micros(50);

/// A shard's userfaultfd, behind the lock that orders its messages and its transfers.
pub(super) struct Fence {
    uffd: Uffd,
    /// Number of the space, by which its regions are known.
    space: u64,
    /// Lock of the standard library: it never allocates, and is taken in a signal handler.
    messages: RwLock<Messages>,
    /// True if there are news: set with `Release` when noted, taken with `Acquire` before a read.
    has_news: AtomicBool,
    /// Number of the thread that reads the messages: all others wait for it.
    reader: AtomicUsize,
    /// Faults that the reader came across while it waited for a change to end.
    early: Mutex<Vec<PageFault>>,
}

/// Hold on the fence: no message of the shard is read while it lives.
pub(super) type Fenced<'a> = RwLockReadGuard<'a, Messages>;

impl Fence {
    pub(super) fn new(uffd: Uffd, space: u64) -> Self {
        Self {
            uffd,
            space,
            messages: RwLock::default(),
            has_news: AtomicBool::new(false),
            reader: AtomicUsize::new(0),
            early: Mutex::default(),
        }
    }

    pub(super) fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// Keeps messages from being read until the result is dropped.
    pub(super) fn lock(&self) -> Fenced<'_> {
        self.messages.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> RwLockWriteGuard<'_, Messages> {
        self.messages
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something into `range`, as far as the program has not unmapped it, and waits while
    /// mappings change. `step` is told how many bytes are done and how many may follow.
    ///
    /// # Errors
    /// [`Stopped`]: what lies before `done_bytes` is done. [`Refusal::Missing`] where the program
    /// has unmapped what follows.
    pub(super) fn fill(
        &self,
        range: Range<usize>,
        step: impl Fn(&Uffd, usize, usize) -> Result<(), Stopped>,
    ) -> Result<(), Stopped> {
        let len = range.len();
        let (mut done, mut since) = (0, None);
        loop {
            let fenced = self.lock();
            let there = fenced.gone.free_bytes(&(range.start + done..range.end));
            let stopped = match there {
                0 => Ok(()),
                there => step(&self.uffd, done, there),
            };
            drop(fenced);
            let (done_bytes, why) = match stopped {
                Ok(()) if done + there == len => return Ok(()),
                Ok(()) => (there, Refusal::Missing),
                Err(Stopped { done_bytes, why }) => (done_bytes, why),
            };
            done += done_bytes;
            if why != Refusal::Contended || !self.wait_for_change(&mut since) {
                return Err(Stopped {
                    done_bytes: done,
                    why,
                });
            }
        }
    }

    /// Waits a moment for a mapping that changes. The thread that reads this shard's messages reads
    /// them here; all others leave it time to. `since` is when the waiting began. `false`: the wait
    /// has taken too long.
    pub(super) fn wait_for_change(&self, since: &mut Option<Instant>) -> bool {
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        if self.reader.load(Ordering::Relaxed) == this_thread() {
            let mut early = self.early.lock();
            if self.read(&mut self.open(), &mut early).is_err() {
                return false;
            }
        }
        if waited < CHANGE_YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(CHANGE_NAP);
        }
        waited < CHANGE_PATIENCE
    }

    /// Waits until all addresses that were unmapped before this call are known to be gone.
    pub(super) fn catch_up(&self) {
        let mut since = None;
        while self.uffd.is_changing() && self.wait_for_change(&mut since) {}
        // The reader notes a message under the lock in which it has read it.
        drop(self.lock());
    }

    /// Appends the faults that wait, and the addresses that the program has unmapped; does not
    /// block. To be called by one thread at a time: that thread reads the messages from now on, and
    /// other threads wait for it alone.
    pub(super) fn events(&self, asked: EventScope, out: &mut Events) -> io::Result<()> {
        self.reader.store(this_thread(), Ordering::Relaxed);
        out.faults.append(&mut self.early.lock());
        if asked == EventScope::All {
            self.read_unless_busy(&mut out.faults)?;
        }
        // Others may have read messages, too.
        if self.has_news.swap(false, Ordering::Acquire) {
            self.open().take_news(&mut out.unmapped);
        }
        Ok(())
    }

    /// Returns the sources of [`events`](Self::events), to wait for.
    pub(super) fn wait(&self) -> EventSources<'_> {
        EventSources {
            fd: Some(self.uffd.as_fd()),
            kept: self.has_news.load(Ordering::Acquire) || !self.early.lock().is_empty(),
        }
    }

    fn read_unless_busy(&self, faults: &mut Vec<PageFault>) -> io::Result<()> {
        let mut messages = match self.messages.try_write() {
            Ok(messages) => messages,
            // Pages change sides at this moment: worth waiting for only if there is a message.
            Err(_) if !self.has_messages() => return Ok(()),
            Err(_) => self.open(),
        };
        self.read(&mut messages, faults)
    }

    /// Lets nothing be put into `range` or taken out of it from now on, as if the program had
    /// unmapped it.
    pub(super) fn cede(&self, range: Range<usize>) {
        self.open().gone.insert(range);
    }

    /// Forgets what is known of addresses: of a region that ends, or that are the region's again.
    pub(super) fn forget(&self, addresses: &Range<usize>) {
        self.open().gone.remove(addresses);
    }

    /// Wakes the threads that sleep on the pages in `range`.
    pub(super) fn wake(&self, range: Range<usize>) {
        self.uffd
            .wake(range.start, range.len())
            .expect("waking checks alignment only, and pages are aligned");
    }

    fn read(&self, messages: &mut Messages, out: &mut Vec<PageFault>) -> io::Result<()> {
        let unmapped = messages.read(&self.uffd, self.space, out);
        if !matches!(unmapped, Ok(false)) {
            self.has_news.store(true, Ordering::Release);
        }
        unmapped.map(drop)
    }

    fn has_messages(&self) -> bool {
        let mut fds = [PollFd::new(self.uffd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uffd.fmt(f)
    }
}

/// Returns a number for this thread, other than 0.
fn this_thread() -> usize {
    thread_local! {
        static HERE: Cell<u8> = const { Cell::new(0) };
    }
    HERE.with(|here| ptr::from_ref(here).addr())
}
