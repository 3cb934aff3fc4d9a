//! How workers are reached: [`Doors`], with the mail and the asks that go through them.
//!
//! The rule it keeps: whoever puts something behind a door rings its bell afterwards, so that
//! nothing lies there while the worker sleeps. What a worker does about it is its own business.

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
use farpage_vm::Shard;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{PageError, ahead::Plan, bell::Bell, budget::Budget, region::Region};

/// A filler takes no more asks than this at once: more than it works off while its core is taken
/// from it.
const ASKS_MAX: usize = 64;

/// What the program or another worker asks of a filler.
#[derive(Debug)]
pub(crate) enum Command {
    /// Bring these pages in when there is room. Pages of other shards are passed over.
    Prefetch(Arc<Region>, PageRange),
    /// Bring these pages in even if they are poisoned or the budget is tight: the program waits for
    /// them. Each filler counts itself when it has taken its pages on. What is poisoned after that
    /// has failed again.
    Demand(Arc<Region>, PageRange, Arc<AtomicUsize>),
    /// Map this page if it is read ahead and held back: a thread of the program waits until it can
    /// own the page, and does not want its bytes.
    LetGo(Arc<Region>, PageIndex),
    /// A thread that has served its own fault since that time could not bring this page in. The
    /// page is the filler's from here on, and the region has been entered.
    TakeOver(Arc<Region>, PageIndex, PageError, Since),
    /// A thread that serves its own faults owns this page, and the page's newest bytes are gone.
    /// The page is the filler's from here on, and the region has been entered.
    Lose(Arc<Region>, PageIndex, PageError),
    /// The region is closing: give up whatever is kept for it.
    Settle(Arc<Region>),
}

/// What a thread that serves its own faults asks of a filler.
#[derive(Debug)]
pub(crate) enum Ask {
    /// These pages would better be brought in.
    Ahead(Arc<Region>, Plan),
    /// Serve the fault at this address.
    Fault(Arc<Region>, usize),
}

/// How to reach all workers, and whether they shall go on.
#[derive(Debug)]
pub(crate) struct Doors {
    /// By shard.
    fillers: Vec<FillerDoor>,
    evictors: Vec<Bell>,
    /// Whether evictors that are not needed stay asleep.
    tuned_evictors: bool,
    stopping: AtomicBool,
    /// Readable when fillers shall stop, to all threads that drive them.
    stopped: EventFd,
}

/// How to reach a filler.
#[derive(Debug)]
pub(crate) struct FillerDoor {
    pub(crate) bell: Bell,
    mail: Sender<Command>,
    /// Bounded, so that a thread in a signal handler can send.
    asks: Sender<Ask>,
}

/// Where a filler finds what it is asked for.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) mail: Receiver<Command>,
    pub(crate) asks: Receiver<Ask>,
}

impl Doors {
    pub(crate) fn new(
        fillers: Vec<FillerDoor>,
        evictors: Vec<Bell>,
        tuned_evictors: bool,
    ) -> io::Result<Doors> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Doors {
            fillers,
            evictors,
            tuned_evictors,
            stopping: AtomicBool::new(false),
            stopped: EventFd::from_value_and_flags(0, flags)?,
        })
    }

    pub(crate) fn filler(&self, shard: Shard) -> &FillerDoor {
        &self.fillers[shard.0]
    }

    pub(crate) fn evictor(&self, index: usize) -> &Bell {
        &self.evictors[index]
    }

    pub(crate) fn ring_fillers(&self) {
        self.fillers.iter().for_each(|filler| filler.bell.ring());
    }

    /// Whether a filler was asked for something that it has not looked at.
    pub(crate) fn has_mail(&self, shard: Shard) -> bool {
        let door = &self.fillers[shard.0];
        !door.mail.is_empty() || !door.asks.is_empty()
    }

    /// Readable when fillers shall stop.
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stopped.as_fd()
    }

    /// How many evictors there are.
    pub(crate) fn evictors(&self) -> usize {
        self.evictors.len()
    }

    /// For what the program waits for.
    pub(crate) fn ring_evictors(&self) {
        self.evictors.iter().for_each(Bell::ring);
    }

    /// Rings those evictors that are needed for the memory that is left.
    pub(crate) fn call_evictors(&self, budget: &Budget) {
        for (index, bell) in self.evictors.iter().enumerate() {
            if !self.needs_evictor(index, budget) {
                break;
            }
            bell.ring();
        }
    }

    /// Whether an evictor should start. The first is needed above the high water mark, the last
    /// when the budget is nearly used up, and all while a fill waits for a frame. So their number
    /// follows what fillers take and what a link carries: as long as one keeps up, the level stays
    /// below the mark of the next.
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
        // Fails only when the filler has stopped, and then nobody waits for what it would have
        // done.
        if door.mail.send(command).is_ok() {
            door.bell.ring();
        }
    }

    /// Asks a filler for something from within a signal handler. Forgotten if the filler is too
    /// busy to look.
    pub(crate) fn ask_filler(&self, shard: Shard, ask: Ask) {
        let door = &self.fillers[shard.0];
        if door.asks.try_send(ask).is_ok() {
            door.bell.ring();
        }
    }

    /// All workers end after their turn.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.stopped
            .write(1)
            .expect("one event does not overflow an eventfd");
        self.ring_evictors();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

impl FillerDoor {
    pub(crate) fn new() -> io::Result<(FillerDoor, Inbox)> {
        let (sender, mail) = crossbeam_channel::unbounded();
        let (asks_sender, asks) = crossbeam_channel::bounded(ASKS_MAX);
        let door = FillerDoor {
            bell: Bell::new()?,
            mail: sender,
            asks: asks_sender,
        };
        Ok((door, Inbox { mail, asks }))
    }
}
