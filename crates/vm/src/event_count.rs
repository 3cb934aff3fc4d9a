//! Sleep until something may have changed, also in signal handlers: [`EventCount`].
//!
//! The rule: a thread [prepares](EventCount::prepare), looks once more, and sleeps only if it sees
//! no change. So no event between the look and the sleep is missed. While no thread sleeps, telling
//! of an event costs a look at a number that rarely changes.

use std::{
    ptr,
    sync::atomic::{AtomicU32, Ordering::SeqCst, fence},
    time::Duration,
};

/// Count of events that threads sleep for.
#[derive(Debug, Default)]
pub struct EventCount {
    /// Number of events, modulo 2^32: what sleepers compare.
    events: AtomicU32,
    sleepers: AtomicU32,
}

/// Count before the last look. Dropping it without a sleep takes it back.
#[must_use = "a thread that does not sleep counts as a sleeper until it is dropped"]
pub struct PreparedSleep<'a> {
    count: &'a EventCount,
    events: u32,
}

impl EventCount {
    /// Prepares for a sleep: events from now on end it.
    pub fn prepare(&self) -> PreparedSleep<'_> {
        // Before the sleeper looks: `tell` sees the sleeper, or the sleeper the change.
        self.sleepers.fetch_add(1, SeqCst);
        fence(SeqCst);
        PreparedSleep {
            count: self,
            events: self.events.load(SeqCst),
        }
    }

    /// Wakes all threads that have prepared. To be called after the change.
    pub fn tell(&self) {
        // Pairs with the one in `prepare`.
        fence(SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            self.events.fetch_add(1, SeqCst);
            let (operation, all) = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
            // SAFETY: the call takes the address of the count, and changes nothing.
            unsafe { libc::syscall(libc::SYS_futex, self.events.as_ptr(), operation, all) };
        }
    }
}

impl PreparedSleep<'_> {
    /// Sleeps until an event or a signal, at most `most`.
    pub fn sleep(self, most: Duration) {
        let time = libc::timespec {
            tv_sec: most.as_secs() as libc::time_t,
            tv_nsec: most.subsec_nanos().into(),
        };
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let events = self.count.events.as_ptr();
        // SAFETY: the call reads the count and the time.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                events,
                operation,
                self.events,
                ptr::from_ref(&time),
            )
        };
    }
}

impl Drop for PreparedSleep<'_> {
    fn drop(&mut self) {
        self.count.sleepers.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicBool, thread, time::Instant};

    use super::*;

    #[test]
    fn event_between_the_look_and_the_sleep_ends_the_sleep() {
        let count = EventCount::default();
        let prepared = count.prepare();
        count.tell();
        let began = Instant::now();
        prepared.sleep(Duration::from_secs(60));
        assert!(began.elapsed() < Duration::from_secs(30), "it slept");
        assert_eq!(count.sleepers.load(SeqCst), 0);
    }

    #[test]
    fn events_of_another_thread_are_never_missed() {
        let (count, turn) = (EventCount::default(), AtomicBool::new(false));
        let pass = |mine: bool| {
            for _ in 0..20_000 {
                while turn.load(SeqCst) != mine {
                    let prepared = count.prepare();
                    if turn.load(SeqCst) != mine {
                        prepared.sleep(Duration::from_secs(60));
                    }
                }
                turn.store(!mine, SeqCst);
                count.tell();
            }
        };
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| pass(false));
            scope.spawn(|| pass(true));
        });
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "an event was missed"
        );
    }
}
