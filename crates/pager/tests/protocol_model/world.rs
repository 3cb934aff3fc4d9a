//! State of everything at one moment: [`World`], its pages, threads and workers.

use std::fmt;

use farpage_pager::protocol::PageWord;

use super::{Access, Paging};

/// Number of the write that made the page what it is; 0: never written.
pub(super) type Version = u8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mapping {
    Absent,
    Poison,
    Mapped(Version),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub(super) word: PageWord,
    pub(super) mapping: Mapping,
    /// True if the mapped page cannot be written to for now.
    pub(super) protected: bool,
    pub(super) stored: Version,
    /// Version that a read must see.
    pub(super) last: Version,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Thread {
    /// Number of accesses done.
    pub(super) done: u8,
    pub(super) asleep: bool,
    pub(super) asked: Asked,
}

/// Progress of a thread that waits for a page without touching it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Asked {
    NotYet,
    /// The request is in the fillers' mail.
    Waiting,
    /// A filler has taken the page on.
    TakenOn,
}

/// Step that a runtime thread takes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Next {
    /// Take a fault from the batch, read a new batch, or begin something.
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

    // Steps that only a broken twin takes: after publishing.
    LateInstall(Version),
    LateWrite(Version),
}

/// Bytes that are left of a page that is poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Bytes {
    Stored,
    Lost,
}

/// Version that the program writes when it overwrites a lost page.
pub(super) const OVERWRITTEN: Version = 99;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Worker {
    pub(super) next: Next,
    pub(super) page: u8,
    /// True if the worker counts as inside the reclaim gate.
    pub(super) inside: bool,
    /// Faults that were read and are not served yet: page + 1, 0 for none.
    pub(super) batch: [u8; 3],
}

pub(super) const FILLERS: [usize; 2] = [0, 1];
pub(super) const EVICTOR: usize = 2;
pub(super) const FLUSHER: usize = 3;
pub(super) const EVICTORS_FAULT: u8 = 3;
pub(super) const WORKER_NAMES: [&str; 4] = ["filler a", "filler b", "evictor", "flusher"];
pub(super) const THREAD_NAMES: [&str; 2] = ["thread 0", "thread 1"];

/// State of everything at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(super) pages: [Page; 2],
    pub(super) threads: [Thread; 2],
    /// Faults that no filler has read yet, oldest first: thread + 1, 3 for the evictor's, 0 for
    /// none.
    pub(super) unread: [u8; 3],
    pub(super) workers: [Worker; 4],
    pub(super) frames: u8,
    pub(super) fork: Fork,
}

/// Progress of the thread that forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Fork {
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
        use Next::*;
        !matches!(
            self,
            Idle | Look | Own | Wake | LateInstall(_) | LateWrite(_)
        ) && !matches!(self, Protect | CopyOut | Sleep | OwnCopied(_) | Lift)
            && !matches!(self, ComeIn | Choose | GoOut)
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
            LiftLeft(_) | PutBack(_) | Compare(_) | Write(_) | PublishLeft(_) | Reinstall(_)
        )
    }
}

impl Page {
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.mapping, Mapping::Mapped(_))
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

    pub(super) fn add_frames(&mut self, paging: &Paging, count: u8) {
        if paging.frames.is_some() {
            self.frames += count;
        }
    }

    pub(super) fn own(&mut self, worker: usize, page: usize, word: PageWord, next: Next) {
        self.pages[page].word = word;
        self.workers[worker].page = page as u8;
        self.go(worker, next);
    }

    /// Wakes all that sleep on the page, as the kernel does; a fault that is not read yet is gone
    /// with its sleeper.
    pub(super) fn wake(&mut self, paging: &Paging, page: usize) {
        for thread in 0..2 {
            let Thread { done, asleep, .. } = self.threads[thread];
            let Some(Access::Read(on) | Access::Write(on)) = paging.access(thread, done) else {
                continue;
            };
            if asleep && on == page {
                self.threads[thread].asleep = false;
                self.unread = without(self.unread, thread as u8 + 1);
            }
        }
        let evictor = &mut self.workers[EVICTOR];
        if evictor.next == Next::Sleep && usize::from(evictor.page) == page {
            evictor.next = Next::CopyOut;
            self.unread = without(self.unread, EVICTORS_FAULT);
        }
    }

    /// Maps `mapping` at the page from now on.
    pub(super) fn map(&mut self, page: usize, mapping: Mapping) {
        let page = &mut self.pages[page];
        (page.mapping, page.protected) = (mapping, false);
    }
}

pub(super) fn without(queue: [u8; 3], item: u8) -> [u8; 3] {
    match queue {
        [first, second, third] if first == item => [second, third, 0],
        [first, second, third] if second == item => [first, third, 0],
        [first, second, third] if third == item => [first, second, 0],
        _ => queue,
    }
}

pub(super) fn push(queue: &mut [u8; 3], item: u8) {
    *queue
        .iter_mut()
        .find(|slot| **slot == 0)
        .expect("each thread has at most one fault in the queue") = item;
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Page {
            word,
            mapping,
            stored,
            ..
        } in &self.pages
        {
            let note = if word.wanted() { "+WANTED" } else { "" };
            let pin = if word.pinned() { "+PINNED" } else { "" };
            write!(
                f,
                "| {:?}{note}{pin}, {mapping:?}, stored {stored} ",
                word.state()
            )?;
        }
        let asleep = self.threads.iter().filter(|t| t.asleep).count();
        let unread = self.unread.iter().filter(|&&thread| thread != 0).count();
        write!(f, "| {asleep} asleep, {unread} unread")?;
        match self.fork {
            Fork::NotYet => Ok(()),
            fork => write!(f, ", fork: {fork:?}"),
        }
    }
}
