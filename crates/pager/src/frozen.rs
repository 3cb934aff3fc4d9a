//! Reclaim that rests while the program forks: [`Pager::freeze`], [`Frozen`].
//!
//! The rule: what is inside the gate comes to an end, by workers that are woken for it, or the
//! freeze ends as an error.

use std::{process, thread, time::Duration};

use farpage_fabric::Since;
use farpage_signals::SignalGuard;
use farpage_vm::AddressSpace;

use crate::{FreezeError, Pager, doors::Doors, freeze::ReclaimGate};

/// Time between two looks at what is inside a closed gate.
const LOOK: Duration = Duration::from_micros(20);
/// Time that a freeze waits at most for fills that lack a frame. Otherwise forks in a row would
/// keep reclaim from ever making room. Evictors need a part of it for a write-back.
const ROOM_WAIT: Duration = Duration::from_millis(10);

/// Frozen reclaim: no page is on its way out, and no entry changes unless by a fill. Dropping it
/// thaws, except in a child of `fork`, whose copy stays as it is and is not to be used. To be
/// dropped on the runtime's table of descriptors.
#[derive(Debug)]
#[must_use = "reclaim goes on when it is dropped"]
pub struct Frozen<'a> {
    gate: &'a ReclaimGate,
    doors: &'a Doors,
    is_sealed: bool,
    /// Id of the process whose reclaim is frozen.
    process: u32,
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // The child's wakers are those of the parent.
        if self.process != process::id() {
            return;
        }
        self.gate.open(self.is_sealed);
        self.doors.wake_evictors();
        // Fillers have put faults off.
        self.doors.wake_fillers();
    }
}

impl<A: AddressSpace> Pager<A> {
    /// Freezes reclaim for a `fork` of this thread, until [`Frozen`] is dropped. From here on each
    /// page is mapped, or the store has its newest bytes, or it is [lost](crate::PageError::Lost).
    /// Regions that are being dropped are left alone. Threads go on to touch pages and to fault.
    /// Fills wait where the budget is used up, so a freeze should last for milliseconds.
    ///
    /// The thread that forks holds signals back, and must not touch a page that may be absent
    /// before the thaw: it might wait for a frame that nobody makes room for. Freezes overlap.
    ///
    /// # Errors
    /// [`FreezeError::Busy`]: runs were still on their way out at the `deadline`. Reclaim goes on.
    pub fn freeze(&self, deadline: Duration) -> Result<Frozen<'_>, FreezeError> {
        if self.is_parents() {
            return Err(FreezeError::Forked);
        }
        let (_signals, since) = (SignalGuard::new(), Since::now());
        let shared = self.shared();
        while shared.frames.budget().is_starving() && since.elapsed() < ROOM_WAIT.min(deadline) {
            thread::sleep(LOOK);
        }
        shared.gate.close();
        let mut frozen = Frozen {
            gate: &shared.gate,
            doors: &shared.doors,
            is_sealed: false,
            process: process::id(),
        };
        // Evictors map runs again that wait for a busy I/O queue.
        shared.doors.wake_evictors();
        loop {
            let runs = shared.gate.inside();
            if runs == 0 && frozen.is_sealed {
                return Ok(frozen);
            }
            if runs == 0 {
                shared.gate.seal();
                frozen.is_sealed = true;
                continue;
            }
            let waited = since.elapsed();
            if waited >= deadline {
                return Err(FreezeError::Busy { runs, waited });
            }
            // A thread that was inside may hand its run over at any time.
            if shared.hand_over.len() > 0 {
                shared.hand_over.call();
            }
            thread::sleep(LOOK);
        }
    }
}
