//! Peers that use up connections, sessions and memory. Others go on, come back, and get in.
//!
//! The daemon has few open files here, so that there is not much to take.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    io::{self, Write},
    net::{Ipv4Addr, TcpStream},
    sync::mpsc,
    thread,
};

use common::{Daemon, connect, connect_as, read, stat, write};
use farpage_fabric::Endpoint;
use farpage_testkit::{
    Identity, PATIENCE, RawClient, Relay,
    raw::{attach, grant},
    wait_until,
};
use farpage_wire::{Refusal, Request, Response, control::Purpose};

const MIB: u64 = 1 << 20;
/// Open files of the daemon: a listener then has 256 connections, and the server 120 sessions.
const FILES: u64 = 1024;
const CONNECTIONS: usize = 256;
const SESSIONS: usize = 120;

/// Address of the attacker.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const VICTIM: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn greet(from: Ipv4Addr, endpoint: &Endpoint) -> io::Result<RawClient> {
    RawClient::greet_from(from, endpoint, Purpose::Control)
}

fn begin(from: Ipv4Addr, endpoint: &Endpoint) -> io::Result<(RawClient, Identity)> {
    let mut stream = greet(from, endpoint)?;
    let own = stream.begin(None)?;
    Ok((stream, own))
}

/// Opens a data connection. Fails with the refusal, or with none if the connection was closed.
fn data(
    from: Ipv4Addr,
    endpoint: &Endpoint,
    own: Identity,
    line: u64,
) -> Result<RawClient, Option<Refusal>> {
    let stream = RawClient::greet_from(from, endpoint, Purpose::Data);
    let mut stream = stream.map_err(|_| None)?;
    match stream.ask(&attach(own, line)) {
        Ok(Response::Done) => Ok(stream),
        Ok(Response::Refused(refusal)) => Err(Some(refusal)),
        _ => Err(None),
    }
}

#[test]
fn clients_that_begin_and_vanish_keep_nobody_out() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h"]);
    for _ in 0..3 * SESSIONS {
        drop(begin(VICTIM, &daemon.tcp));
    }
    let session = connect(&daemon.tcp);
    session.grant(MIB).unwrap();
    wait_until("nothing of them is left", || {
        stat(&daemon.tcp).sessions == 1
    });
}

#[test]
fn one_client_and_one_address_leave_places_to_others() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h"]);
    let endpoint = &daemon.tcp;
    let victim = connect(endpoint);
    let extent = victim.grant(MIB).unwrap();
    write(&victim, &extent, 0, b"mine").unwrap();
    // 1. As many data connections as one client gets.
    let (mut control, own) = begin(ATTACKER, endpoint).unwrap();
    control.say(&grant(MIB)).unwrap();
    let mut taken = Vec::new();
    let refused = loop {
        match data(ATTACKER, endpoint, own, taken.len() as u64) {
            Ok(stream) => taken.push(stream),
            Err(refused) => break refused,
        }
        assert!(taken.len() < CONNECTIONS, "one client has all connections");
    };
    assert!(
        matches!(&refused, Some(Refusal::Invalid(why)) if why.contains("--connections-per-client")),
        "{refused:?}"
    );
    assert_eq!(taken.len(), CONNECTIONS / 4);
    // 2. As many sessions as one address gets.
    while let Ok((stream, _)) = begin(ATTACKER, endpoint) {
        taken.push(stream);
        assert!(taken.len() < CONNECTIONS, "one address has all connections");
    }
    // 3. As many silent ones as there can be.
    for _ in 0..2 * CONNECTIONS {
        taken.extend(greet(ATTACKER, endpoint));
    }
    assert_eq!(read(&victim, extent.id, 0, 4).unwrap(), b"mine");
    let other = connect(endpoint);
    let second = other.grant(MIB).unwrap();
    write(&other, &second, 0, b"other").unwrap();
    assert!(stat(endpoint).sessions > 2);
    drop(taken);
}

#[test]
fn a_client_at_its_limit_replaces_its_own_connections_that_only_seem_alive() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h", "--reconnect-grace", "1h"]);
    let endpoint = &daemon.tcp;
    // 1. All data connections that one client gets. A router forgets them: nobody closes them.
    let (control, own) = begin(VICTIM, endpoint).unwrap();
    let mut forgotten = Vec::new();
    while let Ok(stream) = data(VICTIM, endpoint, own, forgotten.len() as u64) {
        forgotten.push(stream);
    }
    assert_eq!(forgotten.len(), CONNECTIONS / 4);
    // 2. All that the address gets beside them, and what is kept for those who come back.
    let mut taken = Vec::new();
    while let Ok((mut stream, own)) = begin(VICTIM, endpoint) {
        let _ = stream.ask(&grant(4096)).unwrap();
        taken.push((stream, own));
    }
    let mut back = Vec::new();
    while let Ok(stream) = data(VICTIM, endpoint, taken[back.len()].1, 0) {
        back.push(stream);
    }
    // 3. Its lines, twice each, and its control connection all the same.
    for round in 0..2 {
        for (line, old) in forgotten.iter_mut().enumerate() {
            let new = data(VICTIM, endpoint, own, line as u64);
            *old = new.unwrap_or_else(|refused| panic!("line {line}, {round}: {refused:?}"));
        }
    }
    let mut old = vec![control];
    for round in 0..2 * taken.len() {
        let mut new = greet(VICTIM, endpoint).unwrap();
        let resumed = new.begin(Some(own));
        resumed.unwrap_or_else(|error| panic!("round {round}: {error}"));
        old.push(new);
    }
    // 4. A new line is still one too many.
    let more = data(VICTIM, endpoint, own, 1 << 20);
    assert!(matches!(more, Err(Some(Refusal::Invalid(_)))));
}

#[test]
fn the_listeners_of_a_server_share_its_connections() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h"]);
    let mut taken = Vec::new();
    // 1. Over tcp three quarters, the most of one address.
    while let Ok((stream, own)) = begin(VICTIM, &daemon.tcp) {
        taken.push(stream);
        for line in 0.. {
            match data(VICTIM, &daemon.tcp, own, line) {
                Ok(stream) => taken.push(stream),
                Err(_) => break,
            }
        }
    }
    assert!(taken.len() >= CONNECTIONS * 3 / 4, "{}", taken.len());
    // 2. Over shm the rest, less what is kept.
    let refused = loop {
        let mut stream = RawClient::greet(&daemon.shm, Purpose::Control).unwrap();
        let client = "by hand".to_owned();
        let resume = None;
        match stream.ask(&Request::Begin { client, resume }) {
            Ok(Response::Begun { .. }) => taken.push(stream),
            other => break other,
        }
        assert!(taken.len() < CONNECTIONS);
    };
    let why = "this server serves 256 in all";
    assert!(
        matches!(&refused, Ok(Response::Refused(Refusal::Invalid(text))) if text.contains(why)),
        "{refused:?}"
    );
}

#[test]
fn a_full_server_takes_a_publication_that_needs_no_more_room() {
    let daemon = Daemon::with_files(FILES, &["--capacity", "64MiB"]);
    let directory = tempfile::tempdir().unwrap();
    let session = connect_as(&daemon.tcp, &directory.path().join("key"));
    let manifest = vec![7; 3 << 20];
    session.publish("x", &manifest, &[]).unwrap();
    let granted = stat(&daemon.tcp).granted_bytes;
    session.grant(64 * MIB - granted).unwrap();
    assert_eq!(stat(&daemon.tcp).granted_bytes, 64 * MIB);
    session.publish("x", &manifest, &[]).unwrap();
}

#[test]
fn who_was_cut_off_comes_back_though_the_own_address_is_crowded() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h"]);
    let endpoint = &daemon.tcp;
    let (mut stream, own) = begin(VICTIM, endpoint).unwrap();
    stream.grant(MIB).unwrap();
    drop(stream);
    // All that one address gets, with one client's data connections and sessions.
    let (_control, crowd) = begin(VICTIM, endpoint).unwrap();
    let mut taken = Vec::new();
    while let Ok(stream) = data(VICTIM, endpoint, crowd, taken.len() as u64) {
        taken.push(stream);
        assert!(taken.len() < CONNECTIONS);
    }
    while let Ok((stream, _)) = begin(VICTIM, endpoint) {
        taken.push(stream);
        assert!(taken.len() < CONNECTIONS);
    }
    let mut back = greet(VICTIM, endpoint).unwrap();
    let same = back.begin(Some(own)).expect("a place is kept");
    assert_eq!(same.0, own.0);
    assert!(data(VICTIM, endpoint, own, 0).is_ok());
    assert!(stat(endpoint).granted_bytes >= MIB);
    drop(taken);
}

#[test]
fn a_client_that_held_nothing_when_its_connection_broke_goes_on() {
    let daemon = Daemon::with_files(FILES, &["--lease", "1h"]);
    let relay = Relay::to(&daemon.tcp.to_string());
    let session = connect(&relay.url.parse().unwrap());
    let released = session.grant(MIB).unwrap();
    session.release(released.id).unwrap();
    relay.close();
    wait_until("it is served again", || session.grant(MIB).is_ok());
    assert!(stat(&daemon.tcp).sessions == 1);
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up_and_says_what_it_dropped() {
    let (daemon, log) = Daemon::unread(&["--lease", "1h"]);
    let endpoint = &daemon.tcp;
    let session = connect(endpoint);
    // Each is a line of its own: far more than a pipe holds.
    for _ in 0..3000 {
        let Endpoint::Tcp { port, .. } = endpoint else {
            panic!("tcp")
        };
        let mut stream = TcpStream::connect(("127.0.0.1", *port)).unwrap();
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: farpage\r\n\r\n");
    }
    session.grant(MIB).unwrap();
    connect(endpoint).grant(MIB).unwrap();
    stat(endpoint);
    let (say, said) = mpsc::channel();
    thread::spawn(move || {
        log.map_while(Result::ok)
            .try_for_each(|line| say.send(line))
    });
    loop {
        let line = said.recv_timeout(PATIENCE).expect("a word on it");
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        let message = event["message"].as_str().unwrap_or_default();
        if message.contains("were dropped") && event["lines"].as_u64() > Some(0) {
            break;
        }
    }
}

#[test]
fn the_ranks_of_a_large_machine_fit_by_default() {
    let limits = farpage_fabric::server::ConnectionLimits::new(4096);
    assert!(limits.per_address >= 256 * (1 + 8), "{limits:?}");
    // Threads that serve their own faults have a data connection each, two for each of 128 cores,
    // beside fillers and evictors.
    assert!(limits.per_session >= 2 * 128 + 8, "{limits:?}");
}
