//! Executor of the fillers, and its threads: [`Executor`].
//!
//! Each filler owns a shard for good, but no thread of its own. There is one *handler* per CPU that
//! the program may use, pinned there, and any of them drives any filler. A thread that faults gives
//! its CPU up, so that the handler next to it runs at once, while any other CPU would have to be
//! woken out of its halt.
//!
//! Handlers of CPUs on which threads have lately faulted sleep in all shards' descriptors, in the
//! wakers and in the channels of fillers with something under way ([`PollSet`]). The first to wake
//! takes the filler's lock ([`FillerTasks`]). The others rest ([`Handlers`]).
//!
//! Calls of users' stores that return at once are made by the handler that drives the filler,
//! without its lock, so that a fault costs no hand-off to a thread of the store. A call that does
//! not return is the business of `seats.rs`.

mod handlers;
mod tasks;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc};

use farpage_store::StoreCall;
use farpage_vm::AddressSpace;

use crate::{
    filler::Filler,
    run::PageRun,
    seats::{Seats, Serve},
    shared::SharedParts,
};
pub(crate) use handlers::cpus;
use handlers::{Affinity, Handlers};
use tasks::{Due, Dues, FillerTasks, PollSet, Turn, TurnOutcome};

/// Fillers of a runtime, and the threads that drive them.
pub(crate) struct Executor<A: AddressSpace> {
    tasks: FillerTasks<A>,
    handlers: Handlers,
    /// Seats of the handlers, by number.
    seats: Arc<Seats>,
}

/// Work that a turn of a handler has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkLeft {
    Nothing,
    /// The next turn may find something to do at once.
    Something,
    /// The handler has another thread by now; no work is left.
    NoSeat,
}

impl<A: AddressSpace> Executor<A> {
    /// Makes an executor of all fillers, and a handler for each of these CPUs.
    pub(crate) fn new(
        shared: &Arc<SharedParts<A>>,
        fillers: Vec<Filler<A>>,
        cpus: &[usize],
        seats: &Arc<Seats>,
    ) -> io::Result<Arc<Executor<A>>> {
        Ok(Arc::new(Executor {
            tasks: FillerTasks::new(shared, fillers)?,
            handlers: Handlers::new(cpus)?,
            seats: seats.clone(),
        }))
    }

    /// Returns the handlers' threads: their names and their work.
    pub(crate) fn serve_all(self: &Arc<Self>) -> Vec<(String, Serve)> {
        (0..self.handlers.len())
            .map(|number| {
                let executor = self.clone();
                let serve: Serve = Arc::new(move || executor.serve(number));
                (format!("filler-{number}"), serve)
            })
            .collect()
    }

    fn serve(&self, number: usize) {
        let doors = &self.tasks.shared.doors;
        let mut affinity = Affinity::new(self.handlers.cpu(number), self.handlers.len() > 1);
        let mut poll_set = PollSet::new(&self.tasks);
        // A handler that has lost its seat may have left work.
        let mut dues = self.all();
        while !doors.is_stopping() {
            affinity.keep();
            let mut again = Dues::new();
            for due in dues.drain(..) {
                match self.drive(number, due) {
                    WorkLeft::Nothing => {}
                    WorkLeft::Something => again.push(Due::all(due.shard)),
                    WorkLeft::NoSeat => return,
                }
            }
            dues = again;
            // Before a rest, too: another sleeping handler may have missed a wake-up seen here.
            let until = poll_set.prepare(&mut dues);
            if dues.is_empty() && self.goes_to_rest(number) {
                self.handlers.rest(number, doors.stopped());
                dues = self.all();
            } else {
                poll_set.sleep(until, &mut dues);
            }
        }
    }

    fn all(&self) -> Dues {
        (0..self.tasks.len()).map(Due::all).collect()
    }

    /// True if this handler is not needed, and another one is there.
    fn goes_to_rest(&self, number: usize) -> bool {
        // Other sleeping handlers do not know of a time that was set since.
        self.tasks.until().is_none() && self.handlers.goes_to_rest(number)
    }

    /// Takes a turn of a filler, and makes the calls of users' stores that this leads to.
    fn drive(&self, number: usize, due: Due) -> WorkLeft {
        let mut has_seat = true;
        let mut step = self.begin(due);
        loop {
            match step {
                TurnOutcome::Call(mut call) => {
                    if has_seat {
                        has_seat = self.seats.make(number, &mut call);
                    } else {
                        call.make();
                    }
                    step = self.go_on(due.shard, call);
                }
                TurnOutcome::Done { again: true } if has_seat => return WorkLeft::Something,
                TurnOutcome::Done { again: true } => step = self.begin(Due::all(due.shard)),
                TurnOutcome::Done { again: false } if has_seat => return WorkLeft::Nothing,
                TurnOutcome::Done { again: false } => return WorkLeft::NoSeat,
            }
        }
    }

    /// Takes a turn of a filler.
    fn begin(&self, due: Due) -> TurnOutcome<A> {
        self.after(self.tasks.begin(due))
    }

    /// Takes a turn of a filler after its call has returned.
    fn go_on(&self, shard: usize, call: StoreCall<PageRun<A::Frame>>) -> TurnOutcome<A> {
        self.after(self.tasks.go_on(shard, call))
    }

    /// Ends a turn. The filler's lock is free again: there is time to look for the CPU of a fault.
    fn after(&self, turn: Turn<A>) -> TurnOutcome<A> {
        if let Some(thread) = turn.faulted {
            self.handlers.look_for(thread);
        }
        turn.step
    }
}
