//! 200 clients that die holding memory: real processes, really killed. Nothing of theirs may stay.
//!
//! This test program runs itself as the client: with [`ENDPOINT`] set, the test named
//! [`HOLDING_TEST`] becomes one.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use common::{connect, write};
use farpage_testkit::{Both, PATIENCE, TestProcess, say, test_command, wait_until};
use farpage_wire::Endpoint;
use nix::sys::signal::Signal;

const ENDPOINT: &str = "FARPAGE_TEST_DIE_AT";
/// Variable of a client that ends by `exit` instead of waiting to be killed.
const EXITS: &str = "FARPAGE_TEST_EXITS";
const HOLDING: &str = "holding memory";
const EXTENT_BYTES: u64 = 1 << 20;
const DEATHS: usize = 200;

/// Lock of the running test: descriptors are counted for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

/// The test that a client process runs.
const HOLDING_TEST: &str = "two_hundred_dead_shm_clients_leave_nothing_at_once";

/// Holds memory until it is killed.
fn be_a_client(endpoint: &str) {
    let session = connect(&endpoint.parse().unwrap());
    for byte in 0..2 {
        let extent = session.grant(EXTENT_BYTES).unwrap();
        write(&session, &extent, 4096, &[byte; 4096]).unwrap();
    }
    say(HOLDING);
    if std::env::var_os(EXITS).is_some() {
        // The session is alive, as where a runtime is in a static.
        std::process::exit(0);
    }
    // Bounded, so that a failed test leaves nobody behind.
    std::thread::sleep(Duration::from_secs(60));
}

fn client_command(endpoint: &Endpoint) -> Command {
    let mut command = test_command(HOLDING_TEST);
    command.env(ENDPOINT, endpoint.to_string());
    command
}

fn client(endpoint: &Endpoint) -> TestProcess {
    TestProcess::spawn(client_command(endpoint).stderr(Stdio::null()))
}

fn wait_until_holding(client: &mut TestProcess) {
    client.wait_for_line(HOLDING);
}

/// Kills [`DEATHS`] clients of `endpoint`, `at_once` in each round. Returns how long the last of
/// their memory stayed, in the worst round.
fn die(both: &Both, endpoint: &Endpoint, at_once: usize) -> Duration {
    let mut worst = Duration::ZERO;
    for _ in 0..DEATHS / at_once {
        let mut clients: Vec<_> = (0..at_once).map(|_| client(endpoint)).collect();
        clients.iter_mut().for_each(wait_until_holding);
        let held = both.server.stat();
        assert_eq!(held.granted_bytes, at_once as u64 * 2 * EXTENT_BYTES);
        assert_eq!(held.sessions, at_once as u64);
        for client in &mut clients {
            client.signal(Signal::SIGKILL);
        }
        for client in &mut clients {
            client.wait(PATIENCE);
        }
        let killed = Instant::now();
        wait_until("the memory of dead clients is back", || {
            both.server.stat().granted_bytes == 0
        });
        worst = worst.max(killed.elapsed());
        let left = both.server.stat();
        assert_eq!(
            (left.sessions, left.extents, left.resident_bytes),
            (0, 0, 0)
        );
    }
    worst
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn wait_until_descriptors_are_back(before: usize) {
    wait_until("no descriptor is left", || open_descriptors() <= before);
}

#[test]
fn two_hundred_dead_shm_clients_leave_nothing_at_once() {
    if let Ok(endpoint) = std::env::var(ENDPOINT) {
        return be_a_client(&endpoint);
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A lease that cannot run out here: what comes back does so because the connection closed.
    let both = Both::start(1 << 30, Duration::from_secs(600));
    let before = open_descriptors();
    let worst = die(&both, &both.shm, 20);
    println!("memory of dead shm clients was back after {worst:?} at most");
    wait_until_descriptors_are_back(before);
}

#[test]
fn a_killed_tcp_client_leaves_nothing_after_its_grace() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (lease, grace) = (Duration::from_secs(600), Duration::from_secs(1));
    let both = Both::start_with(1 << 30, lease, grace);
    for signal in [Signal::SIGKILL, Signal::SIGINT] {
        let mut dead = client(&both.tcp);
        wait_until_holding(&mut dead);
        dead.signal(signal);
        dead.wait(PATIENCE);
        let stat = both.server.stat();
        let sessions = stat.sessions + stat.lost_sessions;
        assert_eq!(sessions, 1, "it may have been cut off");
        wait_until("the memory of a dead client is back", || {
            both.server.stat().granted_bytes == 0
        });
    }
}

#[test]
fn a_tcp_client_that_exits_leaves_nothing_at_once() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Lease and grace do not end here: memory comes back because the client said that it ends.
    let forever = Duration::from_secs(600);
    let both = Both::start_with(1 << 30, forever, forever);
    let mut command = client_command(&both.tcp);
    let output = command.env(EXITS, "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    wait_until("the memory of a client that has ended is back", || {
        both.server.stat().granted_bytes == 0
    });
}

#[test]
fn two_hundred_dead_tcp_clients_leave_nothing_after_their_lease() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Short, and long enough for 50 clients that start together on a loaded machine to renew in
    // time.
    let lease = Duration::from_secs(2);
    let both = Both::start(1 << 30, lease);
    let before = open_descriptors();
    let worst = die(&both, &both.tcp, 50);
    println!(
        "memory of dead tcp clients was back after {worst:?} at most, with a lease of {lease:?}"
    );
    assert!(worst < lease * 4, "{worst:?}");
    wait_until_descriptors_are_back(before);
}
