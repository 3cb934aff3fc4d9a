//! Servers that were added since an I/O queue was made.
//!
//! The rule it keeps: ports are made where memory may be allocated, and never in a signal handler.

use std::sync::Arc;

use super::{IoQueue, RunBuffer, place_of, port::Port, run::Task};
use crate::{pool::SlotPool, remote::Backing};

impl<F: RunBuffer> IoQueue<F> {
    /// Makes ports to servers that were added since, closed ones. Allocates.
    pub(super) fn add_ports(&mut self) {
        let sessions = self.cluster.sessions();
        for (server, session) in sessions.iter().enumerate().skip(self.ports.len()) {
            let mut port = Port::added(session, &self.cluster.health, server);
            port.backlog.reserve(self.prepared);
            self.ports.push(port);
        }
        self.ports.absent.forget_want();
    }

    /// Hands requests to servers without a port over to their ports, which are made now. An I/O
    /// queue of signal handlers makes none: its requests go to another copy, or end.
    pub(super) fn meet_servers(&mut self) {
        if !self.passive && self.ports.len() < self.cluster.sessions().len() {
            self.add_ports();
        }
        for _ in 0..self.ports.absent.backlog.len() {
            let stray = self.ports.absent.backlog.pop_front();
            let op = stray.expect("counted above");
            let (server, pool) = self.server_of(op.tag);
            let port = pool.port(server);
            if port < self.ports.len() {
                self.ports[port].post(op);
                continue;
            }
            self.ports.absent.want_channel();
            if let Some(op) = self.redirect(op) {
                let error = self.ports.absent.why_late(self.deadline);
                self.finish(op.tag, op.buf, Err(error));
            }
        }
    }

    /// Returns the server that a request goes to, and the pool that numbers the server.
    fn server_of(&self, tag: u64) -> (u8, Arc<SlotPool>) {
        let (_, part) = place_of(tag);
        let run = self.run_of(tag);
        match (&run.store.backing, &run.parts[part].task) {
            (Backing::Remote(remote), Task::Moving(transfer)) => {
                (transfer.server, remote.pool.clone())
            }
            _ => unreachable!("a request belongs to a part that moves"),
        }
    }
}
