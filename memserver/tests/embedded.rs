//! A server inside a program whose log waits for the program.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    sync::{Arc, Condvar, Mutex},
    time::Instant,
};

use common::connect;
use farpage_memserver::Server;
use farpage_testkit::{PATIENCE, tcp, wait_until};
use tracing::{Event, Metadata, Subscriber, span};

/// Subscriber that makes logging threads wait until it is opened, and counts lines.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Lines>, Condvar)>);

#[derive(Default)]
struct Lines {
    come: usize,
    is_open: bool,
}

impl Subscriber for Gate {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        let (lines, changed) = &*self.0;
        let mut lines = lines.lock().unwrap();
        lines.come += 1;
        let until = Instant::now() + PATIENCE;
        while !lines.is_open && Instant::now() < until {
            lines = changed.wait_timeout(lines, PATIENCE).unwrap().0;
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_log_that_waits_for_the_program_keeps_no_client_waiting() {
    let server = Server::builder().listen(tcp()).start().unwrap();
    let gate = Gate::default();
    tracing::subscriber::set_global_default(gate.clone()).unwrap();
    let begun = Instant::now();
    let session = connect(&server.endpoints()[0]);
    let extent = session.grant(4096).unwrap().id;
    session.release(extent).unwrap();
    drop(session);
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    let (lines, changed) = &*gate.0;
    wait_until("there is something to log", || {
        lines.lock().unwrap().come > 0
    });
    lines.lock().unwrap().is_open = true;
    changed.notify_all();
    drop(server);
    // Nothing is lost: a session has begun and has ended, and was granted something.
    assert!(lines.lock().unwrap().come >= 3);
}
