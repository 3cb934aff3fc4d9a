//! Faults served by the threads that raise them: [`InThread`].
//!
//! A touch of an absent page is then a signal in the thread itself. The signal handler runs an
//! [`InlineHandler`] right there: no hand-off to another thread and no wake-up, which are most of a
//! small page's fault. Each inline handler has an I/O queue of its own and serves one thread at a
//! time.
//!
//! **The contract of the handler**, for all code that it runs (`inline_handler.rs`,
//! `reclaim.rs`, and what they call):
//!
//! - It waits for no lock that the interrupted code can hold. The interrupted code touched a page.
//!   No code of ours touches pages under a lock, and while it holds one no handler of the program
//!   runs: signals are held back ([`farpage_signals`]).
//! - It allocates and frees nothing unless something fails: a page cannot be brought in, a channel
//!   is lost, or the program itself has given the page back to the kernel. Memory that it needs is
//!   reserved when a region is mapped ([`InThread::prepare`]).
//! - It writes no log, calls no user's store, writes nothing back and opens no channel. A page that
//!   fails goes over to its filler, still owned; changed pages go over to an evictor.
//!
//! The proof is `threads_in_one_runtime` of `farpage/tests/in_thread.rs`.
//!
//! A page with another owner is waited for: the thread leaves a note, and sleeps until the owner
//! wakes those that wait. Yielding the core alone would cost whole time slices beside busy threads.

use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_utils::CachePadded;
use farpage_signals::{Mutex, MutexGuard};
use farpage_store::PageIndex;
use farpage_vm::AddressSpace;
use nix::{sched::sched_yield, sys::pthread::pthread_self};

use crate::{
    doors::Ask,
    inline_handler::InlineHandler,
    protocol::{self, PageState},
    region::Region,
    shared::SharedParts,
};

/// Number of times that a thread yields its core before it sleeps: the owner of the page is mostly
/// about to publish it.
const YIELDS: u32 = 8;
/// Bounds of a sleep between two looks at a page. The longest suits a page whose owner wakes those
/// that wait. While no inline handler is idle, a sleep takes an eighth of the time waited so far,
/// and at least a part of what bringing the page in costs.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);
/// Number of looks after which a filler is asked again to serve a fault: it may have been too busy
/// to listen.
const ASK_AGAIN: u32 = 64;

/// Inline handlers that the program's threads run.
pub struct InThread<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    /// Inline handlers; a signal handler only ever tries their locks and never waits.
    handlers: Vec<CachePadded<Mutex<InlineHandler<A>>>>,
}

impl<A: AddressSpace> InThread<A> {
    /// Makes the service of faults. Serves as many threads at once as there are inline handlers;
    /// more wait.
    pub(crate) fn new(shared: Arc<SharedParts<A>>, handlers: Vec<InlineHandler<A>>) -> Self {
        let handlers = handlers
            .into_iter()
            .map(|handler| CachePadded::new(Mutex::new(handler)))
            .collect();
        InThread { shared, handlers }
    }

    /// Makes room for the region's faults in all inline handlers, before the first one.
    pub(crate) fn prepare(&self, region: &Region) {
        for handler in &self.handlers {
            handler.lock().fills.prepare(region);
        }
    }

    /// Opens lost channels of idle inline handlers again. For threads of our own.
    pub(crate) fn reopen(&self) {
        self.idle()
            .for_each(|mut handler| handler.fills.io.reopen());
    }

    /// Opens channels that idle inline handlers lack to servers that answer again. For threads of
    /// our own.
    pub(crate) fn open_lacking(&self) {
        (self.idle()).for_each(|mut handler| handler.fills.io.open_lacking());
    }

    /// Returns the idle inline handlers, one after another.
    fn idle(&self) -> impl Iterator<Item = MutexGuard<'_, InlineHandler<A>>> {
        (self.handlers.iter()).filter_map(|handler| handler.try_lock())
    }

    /// Returns the inline handler of a thread, for tests that take its steps one by one.
    #[cfg(test)]
    pub(crate) fn handler(
        &self,
        thread: usize,
    ) -> farpage_signals::MutexGuard<'_, InlineHandler<A>> {
        self.handlers[thread].lock()
    }

    /// Serves a fault at `address`, of a `write` or not, in the thread that raised it. To be called
    /// from a signal handler. `false`: there is no page to be had.
    pub fn serve(&self, address: usize, write: bool) -> bool {
        let Some(region) = self.shared.regions.at(address) else {
            return false;
        };
        let page = region.page_at(address);
        region.store.expect(page);
        let (mut since, mut looks) = (None, 0);
        loop {
            let seen = region.words.load(page).state();
            match seen {
                PageState::Poisoned => {
                    let is_gone = self.shared.mapper.is_gone(&region, page);
                    return is_gone && is_first_try(&region, address);
                }
                // The kernel reported faults of ordinary memory for a moment, and refused to report
                // all. Or a child made by `fork` has mapped a file there.
                _ if !region.beginning.catches_faults() => return is_first_try(&region, address),
                PageState::Lost => return false,
                PageState::Resident if self.shared.mapper.is_present(address) => {
                    if !write || self.shared.scatter.unprotect(&region, page) {
                        return true;
                    }
                }
                // Remote, or called resident although the program gave it back to the kernel
                // itself. If the page could not be brought in, the access fails once more and finds
                // its filler at work on it.
                PageState::Remote | PageState::Resident
                    if self.fill(&region, page, address, looks) =>
                {
                    return true;
                }
                PageState::Remote | PageState::Resident => {}
                // A page on its way in may be a read-ahead marker, and the program has come along.
                PageState::Filling | PageState::Leaving if looks == 0 => {
                    self.fill(&region, page, address, looks);
                }
                // The owner of a page that leaves gives it back for this note; a page that is
                // filled is coming anyway, or is held back since the last look.
                PageState::Filling | PageState::Leaving => {
                    region.words.try_apply(page, protocol::note);
                    self.shared.hand_over.noted(&region, page);
                    if let Some(mut handler) = self.idle_handler() {
                        handler.map_marker(&region, page);
                    }
                }
            }
            if region.is_closing() {
                return false;
            }
            looks += 1;
            if looks < YIELDS {
                let _ = sched_yield();
            } else {
                let nap = match seen {
                    PageState::Filling | PageState::Leaving => NAP_MAX,
                    _ => {
                        let since: &mut Instant = since.get_or_insert_with(Instant::now);
                        (since.elapsed() / 8).clamp(NAP_MIN, NAP_MAX)
                    }
                };
                let prepared = self.shared.mapper.event_count(&region, page).prepare();
                if region.words.load(page).state() == seen {
                    prepared.sleep(nap);
                }
            }
        }
    }

    /// Brings a page in with an idle inline handler, or asks the page's filler. `false`: wait and
    /// look again.
    fn fill(&self, region: &Arc<Region>, page: PageIndex, address: usize, looks: u32) -> bool {
        if region.store.is_users_own() {
            if looks.is_multiple_of(ASK_AGAIN) {
                let shard = self.shared.mapper.shard_of(region, page);
                let ask = Ask::Fault(region.clone(), address);
                self.shared.doors.ask_filler(shard, ask);
            }
            return false;
        }
        self.idle_handler()
            .map(|mut handler| handler.serve(region, page, address))
            .is_some()
    }

    /// Returns an idle inline handler. A thread comes back to the one that knows its streams.
    fn idle_handler(&self) -> Option<MutexGuard<'_, InlineHandler<A>>> {
        let first = place_of(pthread_self() as u64, self.handlers.len());
        let (before, from) = self.handlers.split_at(first);
        let mut free = from.iter().chain(before);
        free.find_map(|handler| handler.try_lock())
    }
}

/// True if this thread has not come here from `address` before, or faults of the region are no
/// longer reported at some addresses since: the access is tried again, on the memory that lies
/// there now. If that raises SIGBUS, too, the signal is of that memory, as behind the end of a
/// file.
fn is_first_try(region: &Region, address: usize) -> bool {
    thread_local! {
        static TRIED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }
    let now = (address, region.times_released());
    TRIED.replace(now) != now
}

/// Spreads threads over `places` places. `thread` is an address that identifies the thread: a
/// signal handler has it at hand, while a thread's number costs a system call.
fn place_of(thread: u64, places: usize) -> usize {
    // 2^64 divided by the golden ratio: addresses that differ by the size of a stack, whatever
    // size, end up far from each other.
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
