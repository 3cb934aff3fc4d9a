//! The suite that every fabric must pass, against this crate's server: the real binary that is
//! really killed, and a server that lends more than its memory.

#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{sync::Arc, time::Duration};

use common::Daemon;
use farpage_fabric::{
    Session, SessionOptions,
    conformance::{self, Fabric, NEEDED_BYTES},
};
use farpage_testkit::Both;
use farpage_wire::Endpoint;

/// Capacity for the suite, and as much again for sessions that are about to end.
const CAPACITY_BYTES: u64 = 2 * NEEDED_BYTES;

fn connect(endpoint: &Endpoint) -> Arc<Session> {
    let deadline = Duration::from_secs(5);
    Session::connect(
        endpoint,
        &SessionOptions {
            deadline,
            ..SessionOptions::default()
        },
    )
    .unwrap()
}

fn against_the_binary(endpoint: impl Fn(&Daemon) -> &Endpoint) {
    let mut daemon = Daemon::start(&["--capacity", &CAPACITY_BYTES.to_string()]);
    let endpoint = endpoint(&daemon).clone();
    conformance::check(Fabric {
        connect: &|| connect(&endpoint),
        kill: Box::new(move || daemon.kill()),
        memory_stays: matches!(endpoint, Endpoint::Shm(_)),
    });
}

#[test]
fn shm_to_a_server_that_lends_more_than_its_memory_conforms() {
    let spill = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let both = Both::start_as(|server| {
        (server.capacity(CAPACITY_BYTES))
            .memory(16 << 20)
            .spill(spill.path().to_owned())
    });
    let endpoint = both.shm.clone();
    conformance::check(Fabric {
        connect: &|| connect(&endpoint),
        kill: Box::new(move || drop(both)),
        memory_stays: false,
    });
}

/// Runs if there is an adapter with on-demand paging.
#[cfg(feature = "rdma")]
#[test]
fn rdma_to_a_server_that_lends_more_than_its_memory_conforms() {
    let Some(endpoint) = farpage_testkit::rdma() else {
        return;
    };
    let spill = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let server = farpage_memserver::Server::builder()
        .listen(endpoint)
        .capacity(CAPACITY_BYTES)
        .memory(16 << 20)
        .spill(spill.path().to_owned())
        .grace(std::time::Duration::from_millis(100))
        .start()
        .unwrap();
    let endpoint = server.endpoints()[0].clone();
    conformance::check(Fabric {
        connect: &|| connect(&endpoint),
        kill: Box::new(move || drop(server)),
        memory_stays: false,
    });
}

#[test]
fn shm_to_the_binary_conforms() {
    against_the_binary(|daemon| &daemon.shm);
}

#[test]
fn tcp_to_the_binary_conforms() {
    against_the_binary(|daemon| &daemon.tcp);
}
