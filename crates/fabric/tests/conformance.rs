//! Every transport passes the conformance suite, over the plainest host.

use std::{sync::Arc, time::Duration};

use farpage_fabric::{
    Endpoint, Link, Session, SessionOptions,
    conformance::{self, Fabric, NEEDED_BYTES},
    server::ServerThread,
    sim::{SimConfig, SimHost, SimServer},
};
use farpage_testkit::tcp;

fn options() -> SessionOptions {
    SessionOptions {
        deadline: Duration::from_secs(5),
        ..SessionOptions::default()
    }
}

fn check(endpoint: &Endpoint, options: SessionOptions) {
    let host = Arc::new(SimHost::new(NEEDED_BYTES));
    let mut server = ServerThread::start(endpoint, host).expect("a free endpoint");
    let endpoint = server.endpoint().clone();
    let connect = || Session::connect(&endpoint, &options).expect("a live server");
    conformance::check(Fabric {
        connect: &connect,
        kill: Box::new(move || server.end().expect("the server ends")),
        memory_stays: false,
    });
}

fn check_sim(config: SimConfig) {
    println!("seed {}", config.seed);
    let server = SimServer::new(SimConfig {
        capacity_bytes: NEEDED_BYTES,
        ..config
    });
    let connect = || server.session(&options()).expect("a live server");
    conformance::check(Fabric {
        connect: &connect,
        kill: Box::new(|| server.kill()),
        memory_stays: false,
    });
}

#[test]
fn shared_memory_conforms() {
    let folder = tempfile::tempdir().expect("a folder");
    check(&Endpoint::Shm(folder.path().join("socket")), options());
}

#[test]
fn tcp_conforms() {
    check(&tcp(), options());
}

#[test]
fn shaped_shared_memory_conforms() {
    let folder = tempfile::tempdir().expect("a folder");
    let link = Some(Arc::new(Link::new(100.0, 20.0)));
    check(
        &Endpoint::Shm(folder.path().join("socket")),
        SessionOptions { link, ..options() },
    );
}

#[test]
fn shaped_tcp_conforms() {
    let link = Some(Arc::new(Link::new(100.0, 20.0)));
    check(&tcp(), SessionOptions { link, ..options() });
}

#[test]
fn simulation_conforms() {
    for seed in 0..4 {
        check_sim(SimConfig::new(seed));
    }
    check_sim(SimConfig {
        reorder: false,
        bytes_per_step: Some(1 << 20),
        queue_depth: 17,
        ..SimConfig::new(7)
    });
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_conforms() {
    if let Some(endpoint) = farpage_testkit::rdma() {
        check(&endpoint, options());
    }
}
