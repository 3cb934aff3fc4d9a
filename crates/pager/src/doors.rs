//! Access to workers: [`Doors`], with the mail and the asks that go through them.
//!
//! The rule: after something is put behind a door its waker is called, so that nothing lies there
//! while the worker sleeps. The worker decides what follows.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use crossbeam_channel::{Receiver, Sender};
use farpage_fabric::Since;
use farpage_store::{PageIndex, PageRange};
use farpage_tables::Doorbell;
use farpage_vm::Shard;

use crate::{
    PageError,
    ahead::ReadAhead,
    budget::Budget,
    freeze::Departure,
    region::{Region, RegionGuard},
    waker::WorkerWaker,
};

/// Upper bound of the asks that a filler takes at once: more than it works off while its core is
/// taken from it.
const ASKS_MAX: usize = 64;

/// Message of the program or of another worker to a filler.
#[derive(Debug)]
pub(crate) enum Command {
    /// Bring these pages in when there is room. Pages of other shards are passed over.
    Prefetch(Arc<Region>, PageRange),
    /// Bring these pages in even if they are poisoned or the budget is tight: the program waits for
    /// them. Each filler counts itself when it has taken its pages on. A page that is poisoned
    /// after that has failed again.
    Demand(Arc<Region>, PageRange, Arc<AtomicUsize>),
    /// Map this page if it is read ahead and held back: a thread of the program waits until it can
    /// own the page, and does not want its bytes.
    LetGo(Arc<Region>, PageIndex),
    /// Take over this page: a thread that has served its own fault since that time could not bring
    /// it in. The filler owns the page from here on.
    TakeOver(RegionGuard, PageIndex, PageError, Since),
    /// Publish this page as lost: a thread that serves its own faults owns it, and its newest bytes
    /// are gone. The filler owns the page from here on. The page counts as on its way out until it
    /// is published.
    Lose(RegionGuard, PageIndex, PageError, Departure),
    /// Give up whatever is kept for the region, which is closing.
    Settle(Arc<Region>),
}

/// Message to a filler of a thread that serves its own faults.
#[derive(Debug)]
pub(crate) enum Ask {
    /// Read these pages ahead.
    Ahead(Arc<Region>, ReadAhead),
    /// Serve the fault at this address.
    Fault(Arc<Region>, usize),
    /// Open channels that inline handlers lack to servers that answer again.
    Channels,
}

/// Doors of all workers, and the order to stop.
#[derive(Debug)]
pub(crate) struct Doors {
    /// Doors of the fillers, by shard.
    fillers: Vec<FillerDoor>,
    evictors: Vec<WorkerWaker>,
    /// True if evictors that are not needed stay asleep.
    tuned_evictors: bool,
    stopping: AtomicBool,
    /// Rung when fillers shall stop, for all threads that drive them.
    stopped: Doorbell,
}

/// Door of a filler.
#[derive(Debug)]
pub(crate) struct FillerDoor {
    pub(crate) waker: WorkerWaker,
    mail: Sender<Command>,
    /// Asks of threads. Bounded, so that a thread in a signal handler can send.
    asks: Sender<Ask>,
}

/// Receiving end of a filler's door.
#[derive(Debug)]
pub(crate) struct FillerInbox {
    pub(crate) mail: Receiver<Command>,
    pub(crate) asks: Receiver<Ask>,
}

impl Doors {
    pub(crate) fn new(
        fillers: Vec<FillerDoor>,
        evictors: Vec<WorkerWaker>,
        tuned_evictors: bool,
    ) -> io::Result<Doors> {
        Ok(Doors {
            fillers,
            evictors,
            tuned_evictors,
            stopping: AtomicBool::new(false),
            stopped: Doorbell::new()?,
        })
    }

    pub(crate) fn filler(&self, shard: Shard) -> &FillerDoor {
        &self.fillers[shard.0]
    }

    pub(crate) fn evictor(&self, index: usize) -> &WorkerWaker {
        &self.evictors[index]
    }

    pub(crate) fn wake_fillers(&self) {
        self.fillers.iter().for_each(|filler| filler.waker.wake());
    }

    /// True if the filler of `shard` has mail or asks that it has not looked at.
    pub(crate) fn has_mail(&self, shard: Shard) -> bool {
        let door = &self.fillers[shard.0];
        !door.mail.is_empty() || !door.asks.is_empty()
    }

    /// Returns a descriptor that is readable when fillers shall stop.
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stopped.as_fd()
    }

    /// Returns the number of evictors.
    pub(crate) fn evictors(&self) -> usize {
        self.evictors.len()
    }

    /// Wakes all evictors, for work that the program waits for.
    pub(crate) fn wake_evictors(&self) {
        self.evictors.iter().for_each(WorkerWaker::wake);
    }

    /// Wakes the evictors that are needed for the memory that is left.
    pub(crate) fn call_evictors(&self, budget: &Budget) {
        for (index, waker) in self.evictors.iter().enumerate() {
            if !self.needs_evictor(index, budget) {
                break;
            }
            waker.wake();
        }
    }

    /// True if the evictor with this `index` should start. The first is needed above the high water
    /// mark, the last when the budget is nearly used up, and all while a fill waits for a frame. So
    /// their number follows the pace of fillers and links: as long as one evictor keeps up, the
    /// level stays below the mark of the next.
    pub(crate) fn needs_evictor(&self, index: usize, budget: &Budget) -> bool {
        let step = if self.tuned_evictors { index } else { 0 };
        budget.is_above_mark(step, self.evictors.len())
    }

    /// Sends a command to every filler; each takes the pages of its own shard.
    pub(crate) fn tell_fillers(&self, command: impl Fn() -> Command) {
        (0..self.fillers.len()).for_each(|shard| self.tell_filler(Shard(shard), command()));
    }

    pub(crate) fn tell_filler(&self, shard: Shard, command: Command) {
        let door = &self.fillers[shard.0];
        // Fails only when the filler has stopped, and then no thread waits for its answer.
        if door.mail.send(command).is_ok() {
            door.waker.wake();
        }
    }

    /// Sends `ask` from within a signal handler. The ask is dropped if the filler is too busy to
    /// look.
    pub(crate) fn ask_filler(&self, shard: Shard, ask: Ask) {
        let door = &self.fillers[shard.0];
        if door.asks.try_send(ask).is_ok() {
            door.waker.wake();
        }
    }

    /// Makes all workers end after their turn.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.stopped.ring();
        self.wake_evictors();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

impl FillerDoor {
    pub(crate) fn new() -> io::Result<(FillerDoor, FillerInbox)> {
        let (sender, mail) = crossbeam_channel::unbounded();
        let (asks_sender, asks) = crossbeam_channel::bounded(ASKS_MAX);
        let door = FillerDoor {
            waker: WorkerWaker::new()?,
            mail: sender,
            asks: asks_sender,
        };
        Ok((door, FillerInbox { mail, asks }))
    }
}
