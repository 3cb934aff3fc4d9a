//! The threads that fillers and evictors run on.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use farpage_vm::AddressSpace;
use nix::sys::{prctl, signal::SigSet};

use crate::{evictor::Evictor, filler::Filler};

/// After so long a worker looks again for what nobody rings for.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// What a thread drives.
pub(crate) trait Worker: Send + 'static {
    fn turn(&mut self) -> bool;
    fn sleep(&mut self);
    fn is_stopping(&self) -> bool;
}

impl<A: AddressSpace> Worker for Filler<A> {
    fn turn(&mut self) -> bool {
        Filler::turn(self)
    }
    fn sleep(&mut self) {
        Filler::sleep(self);
    }
    fn is_stopping(&self) -> bool {
        Filler::is_stopping(self)
    }
}

impl<A: AddressSpace> Worker for Evictor<A> {
    fn turn(&mut self) -> bool {
        Evictor::turn(self)
    }
    fn sleep(&mut self) {
        Evictor::sleep(self);
    }
    fn is_stopping(&self) -> bool {
        Evictor::is_stopping(self)
    }
}

/// Starts a worker's thread. A panic in it ends the process with a message: without it the program would hang at its next fault.
pub(crate) fn spawn(name: String, mut worker: impl Worker) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.clone()).spawn(move || {
        // Signals are the program's; timers of microseconds are ours.
        SigSet::all()
            .thread_block()
            .expect("blocking signals cannot fail");
        let _ = prctl::set_timerslack(1);
        let run = catch_unwind(AssertUnwindSafe(|| {
            while !worker.is_stopping() {
                if !worker.turn() {
                    worker.sleep();
                }
            }
        }));
        if run.is_err() {
            eprintln!(
                "farpage: worker {name} panicked; ending the process, which would hang without it"
            );
            std::process::abort();
        }
    })
}
