//! Handlers that are awake or at rest: [`Handlers`]; CPUs that the program may use, the CPU where a
//! thread has run, and [`Affinity`] to one.
//!
//! A handler rests when no thread has lately faulted on its CPU, so that a fault does not wake
//! every CPU. The rule: at least one handler is not at rest.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Cursor, Read, Write},
    os::{fd::BorrowedFd, unix::ffi::OsStrExt},
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
};

use crossbeam_utils::CachePadded;
use nix::{
    poll::{PollFd, PollFlags},
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

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

/// Number of turns after which a handler whose CPU refused it tries again.
const SET_AGAIN: u32 = 1 << 12;

/// Binding of a handler to its CPU.
pub(super) struct Affinity {
    cpu: usize,
    /// Number of turns until the next attempt; `None`: the binding is made, or not wanted.
    in_turns: Option<u32>,
}

impl Affinity {
    /// Returns the affinity to `cpu`. `wanted`: there are other handlers, on other CPUs.
    pub(super) fn new(cpu: usize, wanted: bool) -> Affinity {
        Affinity {
            cpu,
            in_turns: wanted.then_some(0),
        }
    }

    /// Binds the thread when due. A CPU that the program may not use any more is tried again later.
    pub(super) fn keep(&mut self) {
        self.in_turns = match self.in_turns {
            Some(0) => {
                let mut cpus = CpuSet::new();
                let set = cpus
                    .set(self.cpu)
                    .and_then(|()| sched_setaffinity(Pid::from_raw(0), &cpus));
                set.is_err().then_some(SET_AGAIN)
            }
            turns => turns.map(|turns| turns - 1),
        };
    }
}

/// Returns the CPUs that the calling thread may use. If unknown: CPU 0 alone, to which no handler
/// is bound.
pub(crate) fn cpus() -> Vec<usize> {
    let cpus = sched_getaffinity(Pid::from_raw(0)).map_or(Vec::new(), |set| {
        let is_set = |&cpu: &usize| set.is_set(cpu).unwrap_or(false);
        (0..CpuSet::count()).filter(is_set).collect()
    });
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Returns the CPU on which a thread has run last. Allocates nothing.
pub(super) fn cpu_of(thread: u32) -> Option<usize> {
    let mut path = Cursor::new([0; 40]);
    write!(path, "/proc/self/task/{thread}/stat").ok()?;
    let path_len = path.position() as usize;
    let path = OsStr::from_bytes(&path.get_ref()[..path_len]);
    let mut text = [0; 512];
    let mut stat = File::open(path).ok()?;
    let len = stat.read(&mut text).ok()?;
    cpu_in(&text[..len])
}

/// Parses the CPU in a line of `/proc/PID/stat`, its 39th field.
fn cpu_in(stat: &[u8]) -> Option<usize> {
    // The second field is a name in brackets, which may have any bytes.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 2;
    let field = stat[behind_name..]
        .split(|&byte| byte == b' ')
        .nth(39 - 3)?;
    str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_of_a_thread_is_found_behind_any_name() {
        let line = b"12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 0 0\n";
        assert_eq!(cpu_in(line), Some(5));
        assert_eq!(cpu_in(b"12 (a) S 1"), None);
        let cpu = cpu_of(nix::unistd::gettid().as_raw().cast_unsigned());
        assert!(cpu.is_some_and(|cpu| cpu < CpuSet::count()), "{cpu:?}");
        assert_eq!(cpu_of(0), None);
    }
}
