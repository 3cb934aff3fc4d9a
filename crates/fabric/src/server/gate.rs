//! [`Gate`]: the stop of a server's control connections between two requests.
//!
//! The rule it keeps: a stop can be taken back. A connection that is stopped has lost nothing, and
//! reads its next request when the gate opens again.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Gate that every control connection passes before it reads a request.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    /// Signalled when the phase changes, and when a connection stops or ends.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    phase: Phase,
    /// Number of control connections that answer requests.
    connections: usize,
    /// Number of those that stand at the gate.
    stopped: usize,
}

/// State of a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Open,
    Closed,
    /// The connections that come to the gate go on in the server's next process.
    HandsOver,
}

/// Counts a connection at its gate until it is dropped.
#[derive(Debug)]
pub(super) struct GateVisit<'a>(&'a Gate);

impl Gate {
    /// Counts a connection that is about to answer requests.
    pub(super) fn enter(&self) -> GateVisit<'_> {
        self.state.lock().connections += 1;
        GateVisit(self)
    }

    /// Returns the phase, once it is not [`Phase::Closed`].
    pub(super) fn pass(&self) -> Phase {
        let mut state = self.state.lock();
        if state.phase == Phase::Closed {
            state.stopped += 1;
            self.changed.notify_all();
            while state.phase == Phase::Closed {
                self.changed.wait(&mut state);
            }
            state.stopped -= 1;
        }
        state.phase
    }

    /// Closes the gate, and waits until all connections stand there, or until `until`. True if they
    /// do: then none of them executes a request, and none begins to.
    pub(super) fn close(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        state.phase = Phase::Closed;
        while state.stopped < state.connections
            && !self.changed.wait_until(&mut state, until).timed_out()
        {}
        state.stopped >= state.connections
    }

    /// Lets connections pass, into `phase`.
    pub(super) fn open(&self, phase: Phase) {
        self.state.lock().phase = phase;
        self.changed.notify_all();
    }
}

impl Drop for GateVisit<'_> {
    fn drop(&mut self) {
        self.0.state.lock().connections -= 1;
        self.0.changed.notify_all();
    }
}
