//! State of everything at one moment: [`World`], its pages, threads and workers.

use std::fmt;

use farpage_pager::protocol::PageWord;

/// Number of the write that made the page what it is; 0: never written.
pub(super) type Version = u8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Mapping {
    #[default]
    Absent,
    Poison,
    Mapped(Version),
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub(super) word: PageWord,
    pub(super) mapping: Mapping,
    /// True if the mapped page cannot be written to for now.
    pub(super) protected: bool,
    pub(super) stored: Version,
    /// Version that a read must see.
    pub(super) last: Version,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Thread {
    /// Number of accesses done.
    pub(super) done: u8,
    /// Page that the thread sleeps on, plus 1; 0: the thread is awake.
    pub(super) asleep: u8,
    pub(super) asked: Asked,
}

/// Progress of a thread that waits for a page without touching it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Asked {
    #[default]
    NotYet,
    /// The request is in the fillers' mail.
    Waiting,
    /// A filler has taken the page on.
    TakenOn,
}

/// Step that a runtime thread takes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Next {
    /// Take a fault from the batch, read a new batch, or begin something.
    #[default]
    Idle,
    // Owning nothing.
    Look,
    Own,
    Wake,
    // At the gate, counted as inside and owning nothing.
    ComeIn,
    Choose,
    GoOut,
    // An evictor that copies, owning nothing.
    Protect,
    CopyOut,
    /// Sleep: the copying has met an absent page.
    Sleep,
    OwnCopied(Version),
    Lift,
    // Steps that only a broken twin takes: after publishing.
    LateInstall(Version),
    LateWrite(Version),
    // An evictor that copies, owning a leaving page.
    GiveBack(Version),
    LiftLeft(Version),
    // A filler, owning a filling page.
    LookAgain,
    TakeFrame,
    Fetch,
    Install(Version),
    AlreadyMapped,
    PublishFailed,
    Poison(Bytes),
    WakePoisoned(Bytes),
    PublishPoisoned(Bytes),
    // A filler or an evictor, owning the page that it has just mapped.
    WakeInstalled,
    PublishInstalled,
    // An evictor or flusher, owning a leaving page.
    Detach,
    PutBack(Version),
    PublishStayed,
    PublishRemoved,
    Compare(Version),
    Write(Version),
    PublishLeft(Version),
    Reinstall(Version),
}

/// Bytes that are left of a page that is poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Bytes {
    Stored,
    Lost,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Worker {
    pub(super) next: Next,
    pub(super) page: u8,
    /// True if the worker counts as inside the reclaim gate.
    pub(super) inside: bool,
    /// Faults that were read and are not served yet: page + 1, 0 for none.
    pub(super) batch: [u8; 3],
}

pub(super) const FILLERS: usize = 2;
pub(super) const EVICTOR: usize = 2;
pub(super) const FLUSHER: usize = 3;
const EVICTORS_FAULT: u8 = 3;

/// State of everything at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(super) pages: [Page; 2],
    pub(super) threads: [Thread; 2],
    /// Faults that no filler has read yet, oldest first: thread + 1, 3 for the evictor's, 0 for
    /// none.
    pub(super) unread: [u8; 3],
    pub(super) workers: [Worker; 4],
    /// Number of free frames; `None`: there are always enough.
    pub(super) frames: Option<u8>,
    pub(super) fork: Fork,
}

/// Progress of the thread that forks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Fork {
    #[default]
    NotYet,
    /// The gate is closed to reclaim.
    Closed,
    /// Gate in which nothing was. Fillers may have come in since.
    Quiet,
    /// The gate is closed to fillers, too.
    Sealed,
    /// Gate in which nothing is: the kernel may copy the program.
    Frozen,
    Done,
}

impl Next {
    pub(super) fn owns_the_page(self) -> bool {
        self >= Next::GiveBack(0)
    }

    pub(super) fn has_a_frame(self) -> bool {
        use Next::*;
        self.has_detached_bytes()
            || matches!(
                self,
                Fetch | PublishFailed | Install(_) | LateInstall(_) | LateWrite(_)
            )
    }

    pub(super) fn has_detached_bytes(self) -> bool {
        use Next::*;
        matches!(
            self,
            LiftLeft(_) | PutBack(_) | Reinstall(_) | Compare(_) | Write(_) | PublishLeft(_)
        )
    }
}

impl Page {
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.mapping, Mapping::Mapped(_))
    }

    /// Maps `mapping` from now on.
    pub(super) fn map(&mut self, mapping: Mapping) {
        (self.mapping, self.protected) = (mapping, false);
    }
}

impl World {
    pub(super) fn go(&mut self, worker: usize, next: Next) {
        let worker = &mut self.workers[worker];
        // A fill waits for its frame outside the gate.
        worker.inside &= next != Next::TakeFrame;
        worker.next = match next {
            Next::Idle if worker.inside => Next::GoOut,
            next => next,
        };
        if next == Next::Idle {
            worker.page = 0;
        }
    }

    /// True if reclaim is not let in.
    pub(super) fn is_closed(&self) -> bool {
        !matches!(self.fork, Fork::NotYet | Fork::Done)
    }

    /// True if nothing is let in.
    pub(super) fn is_sealed(&self) -> bool {
        matches!(self.fork, Fork::Sealed | Fork::Frozen)
    }

    pub(super) fn add_frame(&mut self) {
        self.frames = self.frames.map(|frames| frames + 1);
    }

    pub(super) fn take_frame(&mut self) {
        self.frames = self.frames.map(|frames| frames - 1);
    }

    pub(super) fn own(&mut self, worker: usize, page: usize, word: PageWord, next: Next) {
        self.pages[page].word = word;
        self.workers[worker].page = page as u8;
        self.go(worker, next);
    }

    pub(super) fn fault(&mut self, thread: usize, page: usize) {
        self.threads[thread].asleep = page as u8 + 1;
        push(&mut self.unread, thread as u8 + 1);
    }

    pub(super) fn fault_of_evictor(&mut self) {
        push(&mut self.unread, EVICTORS_FAULT);
    }

    /// Reads the faults. Returns their pages plus 1.
    pub(super) fn read_faults(&mut self) -> [u8; 3] {
        std::mem::take(&mut self.unread).map(|fault| match fault {
            0 => 0,
            EVICTORS_FAULT => self.workers[EVICTOR].page + 1,
            thread => self.threads[usize::from(thread) - 1].asleep,
        })
    }

    /// Wakes all that sleep on the page, as the kernel does; a fault that is not read yet is gone
    /// with its sleeper.
    pub(super) fn wake(&mut self, page: usize) {
        for thread in 0..2 {
            if usize::from(self.threads[thread].asleep) == page + 1 {
                self.threads[thread].asleep = 0;
                self.unread = without(self.unread, thread as u8 + 1);
            }
        }
        let evictor = &mut self.workers[EVICTOR];
        if evictor.next == Next::Sleep && usize::from(evictor.page) == page {
            evictor.next = Next::CopyOut;
            self.unread = without(self.unread, EVICTORS_FAULT);
        }
    }
}

fn without(queue: [u8; 3], item: u8) -> [u8; 3] {
    match queue {
        [first, second, third] if first == item => [second, third, 0],
        [first, second, third] if second == item => [first, third, 0],
        [first, second, third] if third == item => [first, second, 0],
        _ => queue,
    }
}

fn push(queue: &mut [u8; 3], item: u8) {
    let free = queue.iter_mut().find(|slot| **slot == 0);
    *free.expect("each thread has at most one fault in the queue") = item;
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for page in &self.pages {
            let (word, mapping, stored) = (page.word, page.mapping, page.stored);
            let note = if word.wanted() { "+WANTED" } else { "" };
            let pin = if word.pinned() { "+PINNED" } else { "" };
            write!(
                f,
                "| {:?}{note}{pin}, {mapping:?}, stored {stored} ",
                word.state()
            )?;
        }
        let asleep = self.threads.iter().filter(|t| t.asleep > 0).count();
        let unread = self.unread.iter().filter(|&&thread| thread != 0).count();
        write!(f, "| {asleep} asleep, {unread} unread")?;
        match self.fork {
            Fork::NotYet => Ok(()),
            fork => write!(f, ", fork: {fork:?}"),
        }
    }
}
