//! Faults served by the threads that raise them: [`InThread`].
//!
//! A touch of an absent page is then a signal in the thread itself, and its handler runs a filler's state machine right there: no hand-off to
//! another thread and no wake-up, which are most of a small page's fault. Each such filler has a lane of its own and serves one thread at a time.
//!
//! The rule is that of a signal handler: no lock is waited for that the interrupted code can hold, and nothing is allocated unless something fails. The interrupted
//! code touched a page, and no code of ours touches pages, so that none of our own locks is held by it, nor is the allocator's.
//!
//! Where memory is tight, such a thread also takes out a few pages (`handover.rs`). What only a thread of its own can do is left to the filler threads, and to evictors: to write back what changed, to call a user's store, to open a lost channel, to log why a page is
//! lost (a page that fails here is handed over to its filler, still owned), and to read ahead beyond the run that the fault brings in. Pages in other hands
//! are waited for by yielding the core.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_vm::AddressSpace;
use nix::{sched::sched_yield, sys::pthread::pthread_self};
use parking_lot::Mutex;

use crate::{
    core::{Ask, Core},
    filler::Filler,
    protocol::{self, State},
    region::Region,
};

/// So often a thread yields its core before it sleeps: who owns the page is mostly about to publish it.
const YIELDS: u32 = 64;
/// Naps between two looks at a page that others own take an eighth of the time that it was waited for, and at least a part of what bringing it in costs.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);
/// A filler is asked again to serve a fault after so many looks: it may have been too busy to listen.
const ASK_AGAIN: u32 = 64;

/// Fillers that the program's threads run.
pub struct InThread<A: AddressSpace> {
    core: Arc<Core<A>>,
    /// Only ever tried in a signal handler, never waited for.
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

    /// Before the region's first fault.
    pub(crate) fn prepare(&self, region: &Region) {
        for filler in &self.fillers {
            filler.lock().prepare(region);
        }
    }

    /// Opens lost channels again, as far as nobody is using them. For threads of our own.
    pub(crate) fn reopen(&self) {
        for mut filler in self.fillers.iter().filter_map(|filler| filler.try_lock()) {
            filler.reopen();
        }
    }

    /// The filler of a thread, for who takes its steps one by one.
    #[cfg(test)]
    pub(crate) fn filler(&self, thread: usize) -> parking_lot::MutexGuard<'_, Filler<A>> {
        self.fillers[thread].lock()
    }

    /// Serves a fault at `address`, of a `write` or not, in the thread that raised it; to be called from a signal handler. `false`: there is no page to be had.
    pub fn serve(&self, address: usize, write: bool) -> bool {
        let Some(region) = self.core.region_at(address) else {
            return false;
        };
        let page = region.page_at(address);
        region.store.expect(page as u64);
        let (mut since, mut looks) = (None, 0);
        loop {
            match region.words.load(page).state() {
                State::Poisoned | State::Lost => return false,
                State::Resident if self.core.space.is_present(address) => {
                    if !write || !self.core.may_scatter(&region) {
                        return true;
                    }
                    // It came, or is protected while others leave, and is looked at again when they have left.
                    if let Some(_turn) = self.core.scatter.try_turn() {
                        let shard = region.shard_of(page, self.core.shards());
                        let address = region.address_of(page);
                        (self.core.space).unprotect(shard, address, region.page_bytes());
                        return true;
                    }
                }
                // Remote, or called resident although the program gave it back to the kernel itself. If it could not be brought in, the access
                // fails once more and finds its filler at work on it.
                State::Remote | State::Resident if self.fill(&region, page, address, looks) => {
                    return true;
                }
                State::Remote | State::Resident => {}
                // Who owns a page that leaves gives it back for this note; one that is filled is coming anyway.
                State::Filling | State::Leaving => {
                    region.words.try_apply(page, protocol::note);
                    self.core.noted(&region, page);
                }
            }
            if region.is_closing() {
                return false;
            }
            looks += 1;
            if looks < YIELDS {
                let _ = sched_yield();
            } else {
                let since: &mut Instant = since.get_or_insert_with(Instant::now);
                thread::sleep((since.elapsed() / 8).clamp(NAP_MIN, NAP_MAX));
            }
        }
    }

    /// Brings a page in with a filler that nobody uses, or asks the page's own. `false`: wait and look again.
    fn fill(&self, region: &Arc<Region>, page: usize, address: usize, looks: u32) -> bool {
        if region.store.is_users_own() {
            if looks.is_multiple_of(ASK_AGAIN) {
                let shard = region.shard_of(page, self.core.shards());
                self.core
                    .ask_filler(shard, Ask::Fault(region.clone(), address));
            }
            return false;
        }
        // A thread comes back to the filler that knows its streams.
        let first = place_of(pthread_self() as u64, self.fillers.len());
        let (before, from) = self.fillers.split_at(first);
        let mut free = from.iter().chain(before);
        let free = free.find_map(|filler| filler.try_lock());
        free.map(|mut filler| filler.serve(region, page, address))
            .is_some()
    }
}

/// Spreads threads over so many places. What tells a thread is an address, which a signal handler may ask for and which is at hand; to ask for its number is a system
/// call.
fn place_of(thread: u64, places: usize) -> usize {
    // 2^64 divided by the golden ratio: addresses that differ by the size of a stack, whatever that is, end up far from each other.
    let spread = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((u128::from(spread) * places as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_spread_over_all_places_however_large_their_stacks_are() {
        const BASE: u64 = 0x7f12_3456_76c0;
        for stack_bytes in [64 << 10, (2 << 20) + 4096, 8 << 20, 64 << 20] {
            for places in [1, 2, 3, 4, 16] {
                let mut threads = vec![0; places];
                for thread in 0..4 * places as u64 {
                    threads[place_of(BASE - thread * stack_bytes, places)] += 1;
                }
                let few = threads.iter().all(|count| (1..=8).contains(count));
                assert!(few, "stacks of {stack_bytes} bytes: {threads:?}");
            }
        }
    }
}
