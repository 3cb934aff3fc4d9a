//! Faults served by the threads that raise them: [`InThread`].
//!
//! A touch of an absent page is then a signal in the thread itself, and its handler runs a filler's state machine right there: no hand-off to
//! another thread and no wake-up, which are most of a small page's fault. Each such filler has a lane of its own and serves one thread at a time.
//!
//! The rule is that of a signal handler: no lock is waited for that the interrupted code can hold, and nothing allocates once a filler has served its
//! first pages. The interrupted code touched a page, and no code of ours touches pages, so that none of our own locks is held by it.
//!
//! What is read ahead beyond the run that the fault brings in goes to the filler threads; pages in other hands are waited for by yielding the core.

use std::{sync::Arc, thread, time::Duration};

use crossbeam_utils::CachePadded;
use farpage_vm::AddressSpace;
use nix::{sched::sched_yield, unistd::gettid};
use parking_lot::Mutex;

use crate::{
    core::Core,
    filler::Filler,
    protocol::{self, State},
    region::Region,
};

/// So often a thread yields its core before it sleeps: who owns the page is mostly about to publish it.
const YIELDS: u32 = 64;
/// A nap between two looks at a page that others own: a part of what bringing it in costs.
const NAP: Duration = Duration::from_micros(20);

/// Fillers that the program's threads run.
pub struct InThread<A: AddressSpace> {
    core: Arc<Core<A>>,
    fillers: Vec<CachePadded<Mutex<Filler<A>>>>,
}

impl<A: AddressSpace> InThread<A> {
    /// As many threads as there are fillers are served at once; more wait for each other.
    pub(crate) fn new(core: Arc<Core<A>>, fillers: Vec<Filler<A>>) -> Self {
        let fillers = fillers
            .into_iter()
            .map(|filler| CachePadded::new(Mutex::new(filler)))
            .collect();
        InThread { core, fillers }
    }

    /// Brings a remote page in with a filler that nobody uses. `false`: all are in use.
    fn fill(&self, region: &Arc<Region>, page: usize, address: usize) -> bool {
        // A thread comes back to the filler that knows its streams.
        let first = gettid().as_raw() as usize % self.fillers.len();
        let (before, from) = self.fillers.split_at(first);
        let free = from
            .iter()
            .chain(before)
            .find_map(|filler| filler.try_lock());
        free.map(|mut filler| filler.serve(region, page, address))
            .is_some()
    }

    /// Serves a fault at `address` in the thread that raised it; to be called from a signal handler. `false`: there is no page to be had.
    pub fn serve(&self, address: usize) -> bool {
        let Some(region) = self.core.region_at(address) else {
            return false;
        };
        let page = region.page_at(address);
        let mut waits = 0;
        loop {
            match region.words.load(page).state() {
                State::Poisoned => return false,
                State::Resident if self.core.space.is_present(address) => return true,
                // Remote, or called resident although the program gave it back to the kernel itself. If it could not be brought in, the
                // access fails once more and finds it poisoned.
                State::Remote | State::Resident if self.fill(&region, page, address) => {
                    return true;
                }
                State::Remote | State::Resident => {}
                // Who owns a page that leaves gives it back for this note; one that is filled is coming anyway.
                State::Filling | State::Leaving => {
                    region.words.try_apply(page, protocol::note);
                }
            }
            if region.is_closing() {
                return false;
            }
            waits += 1;
            if waits < YIELDS {
                let _ = sched_yield();
            } else {
                thread::sleep(NAP);
            }
        }
    }
}
