//! Handlers that are awake or at rest: [`Handlers`].
//!
//! A handler rests when no thread has lately faulted on its CPU, so that a fault does not wake
//! every CPU. The rule: at least one handler is not at rest.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
};

use crossbeam_utils::CachePadded;
use nix::poll::{PollFd, PollFlags};

use super::cpu::cpu_of;
use crate::waker::WorkerWaker;

/// Upper bound of the handlers that are not at rest. Each fault wakes all of them.
const AWAKE_MAX: usize = 8;
/// Number of sampled faults without one on its own CPU after which a handler rests.
const LATELY: u32 = 64;

/// Handlers of an executor, by number.
pub(super) struct Handlers {
    all: Vec<CachePadded<Handler>>,
    /// Number of handlers that are not at rest.
    awake: AtomicUsize,
    /// Number of faults whose CPU was looked for.
    looks: AtomicU32,
}

/// State of a handler that others see.
struct Handler {
    cpu: usize,
    /// Waker of the handler while it rests.
    waker: WorkerWaker,
    /// Value of the handlers' `looks` when a fault was last seen on this handler's CPU.
    lately: AtomicU32,
    rests: AtomicBool,
}

impl Handlers {
    /// Makes one handler for each of these CPUs. The first is awake.
    pub(super) fn new(cpus: &[usize]) -> io::Result<Handlers> {
        let all = cpus.iter().enumerate().map(|(number, &cpu)| {
            Ok(CachePadded::new(Handler {
                cpu,
                waker: WorkerWaker::new()?,
                lately: AtomicU32::new(0),
                rests: AtomicBool::new(number > 0),
            }))
        });
        Ok(Handlers {
            all: all.collect::<io::Result<_>>()?,
            awake: AtomicUsize::new(1),
            looks: AtomicU32::new(0),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn cpu(&self, number: usize) -> usize {
        self.all[number].cpu
    }

    /// Keeps the handler of a faulting thread's CPU from rest.
    pub(super) fn look_for(&self, thread: u32) {
        let now = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(cpu) = cpu_of(thread) else {
            return;
        };
        let Some(number) = self.all.iter().position(|handler| handler.cpu == cpu) else {
            return;
        };
        self.call(number, now);
    }

    /// Notes a fault on the CPU of this handler, when `now` faults had been looked for.
    fn call(&self, number: usize, now: u32) {
        let handler = &self.all[number];
        handler.lately.store(now, Ordering::Relaxed);
        if self.awake.load(Ordering::Relaxed) < AWAKE_MAX
            && handler.rests.swap(false, Ordering::SeqCst)
        {
            self.awake.fetch_add(1, Ordering::SeqCst);
            handler.waker.wake();
        }
    }

    /// Calls a handler as if no other handler's CPU had seen a fault lately.
    #[cfg(test)]
    pub(super) fn call_alone(&self, number: usize) {
        let now = self.looks.fetch_add(LATELY, Ordering::Relaxed) + LATELY;
        self.call(number, now);
    }

    /// True if this handler is not needed, and another one is there.
    pub(super) fn goes_to_rest(&self, number: usize) -> bool {
        let handler = &self.all[number];
        if handler.rests.load(Ordering::SeqCst) {
            return true;
        }
        let lately = handler.lately.load(Ordering::Relaxed);
        if self.looks.load(Ordering::Relaxed).wrapping_sub(lately) < LATELY {
            return false;
        }
        let one_fewer = |awake: usize| (awake > 1).then(|| awake - 1);
        let goes = (self.awake)
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_fewer)
            .is_ok();
        if goes {
            handler.rests.store(true, Ordering::SeqCst);
        }
        goes
    }

    /// Sleeps until the handler is called, or until `stopped` is readable.
    pub(super) fn rest(&self, number: usize, stopped: BorrowedFd<'_>) {
        let Handler { waker, rests, .. } = &*self.all[number];
        waker.prepare();
        if !rests.load(Ordering::SeqCst) {
            return waker.cancel();
        }
        waker.sleep(vec![PollFd::new(stopped, PollFlags::POLLIN)], None);
    }
}
