//! Restarts while a request takes long, or that take long themselves.

use std::{
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
};

use farpage_fabric::Verb;
use farpage_testkit::{RawClient, wait_until};
use farpage_wire::{Request, Response, control};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::{
    MIB, Watched,
    common::{Daemon, command_at, connect, read, stat, transfer, write},
};

/// Bytes of a request, in two halves.
fn halves(request: &Request) -> [Vec<u8>; 2] {
    let bytes = control::encode(request).unwrap();
    let (half, rest) = bytes.split_at(bytes.len() / 2);
    [half.to_vec(), rest.to_vec()]
}

/// Makes a request that is too long to be received without room, which `stat` counts.
fn long() -> Request {
    Request::Publish {
        name: "name".to_owned(),
        manifest: vec![1; 64 << 10],
        extents: vec![],
        ballot: None,
        keeps: false,
    }
}

#[test]
fn a_request_that_takes_long_makes_a_restart_wait_and_costs_nobody_anything() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    let (mut slow, _) = RawClient::session(&server.daemon.shm).unwrap();
    let other = connect(&server.daemon.shm);
    let kept = other.grant(MIB).unwrap();
    write(&other, &kept, 0, b"here").unwrap();
    let data = connect(&server.daemon.tcp);
    let extent = data.grant(MIB).unwrap();
    let line = data.line();
    let mut channel = line.channel::<Vec<u8>>().unwrap();
    let [half, rest] = halves(&long());
    slow.write_all(&half).unwrap();
    wait_until("the request has begun", || {
        stat(&server.daemon.tcp).request_bytes > 0
    });
    let said = server.restart_in_vain();
    assert!(said.contains("a request takes too long"), "{said}");
    // No connection was cut: the one that moves data goes on, and so does the request.
    transfer(&mut *channel, Verb::Write, extent.id, 0, vec![7; 8]).unwrap();
    slow.write_all(&rest).unwrap();
    let answer = slow.hear().unwrap();
    // A name that it has not claimed.
    assert!(matches!(answer, Response::Refused(_)), "{answer:?}");
    assert_eq!(stat(&server.daemon.tcp).sessions, 3);
    server.restart();
    assert_eq!(slow.ask(&Request::Renew).unwrap(), Response::Done);
    assert_eq!(read(&other, kept.id, 0, 4).unwrap(), b"here");
    assert_eq!(read(&data, extent.id, 0, 8).unwrap(), [7; 8]);
}

/// Starts a server whose program is then one that takes 3 s to start: once to rehearse, and once to
/// take over.
fn with_slow_successor(directory: &TempDir, arguments: &[&str]) -> Watched {
    let [program, script] = ["farpage-memserver", "script"].map(|name| directory.path().join(name));
    let binary = env!("CARGO_BIN_EXE_farpage-memserver");
    symlink(binary, &program).unwrap();
    let server = Watched::of(Daemon::run(command_at(&program), arguments));
    let slow = format!("#!/bin/sh\nsleep 3; exec {binary} \"$@\"\n");
    fs::write(&script, slow).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    fs::rename(&script, &program).unwrap();
    server
}

#[test]
fn a_stop_that_is_asked_for_during_a_restart_is_heard() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = with_slow_successor(&directory, &["--capacity", "64MiB"]);
    server.daemon.signal(Signal::SIGUSR2);
    wait_until("the restart begins", || server.count("\"restarting\"") == 1);
    server.daemon.signal(Signal::SIGTERM);
    assert_eq!(server.daemon.wait().code(), Some(0));
    wait_until("the log says why", || {
        server.count("asked to stop meanwhile") == 1
    });
}

#[test]
fn a_restart_that_takes_longer_than_a_lease_costs_no_session() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_slow_successor(&directory, &["--capacity", "64MiB", "--lease", "5s"]);
    let (mut client, _) = RawClient::session(&server.daemon.tcp).unwrap();
    client.grant(MIB).unwrap();
    let before = server.count("\"listening\"");
    server.daemon.signal(Signal::SIGUSR2);
    wait_until("the restart begins", || server.count("\"restarting\"") == 1);
    client.say(&Request::Renew).unwrap();
    wait_until("the next process listens", || {
        server.count("\"listening\"") == before + 2
    });
    assert_eq!(client.hear().unwrap(), Response::Done);
    assert_eq!(server.count("its lease ran out"), 0);
}
