//! Peers that send what no client sends: each loses its own connection, and a client next to them
//! notices nothing.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    io::{Read, Write},
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{Daemon, connect, connect_as, read, stat, write};
use farpage_fabric::Session;
use farpage_testkit::{
    Both, Identity, RawClient,
    process::proc_bytes,
    raw::{grant, header},
    wait_until,
};
use farpage_wire::{
    Endpoint, ExtentId, Request, Response,
    control::{self, Hello, Purpose},
    data::OpKind,
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};

const MIB: u64 = 1 << 20;

/// Sends `bytes` and waits until the server has closed the connection.
#[track_caller]
fn is_closed_on(mut stream: RawClient, bytes: &[u8]) {
    // The server may have closed before all of it was sent.
    let _ = stream.write_all(bytes);
    stream.drain(&format!("{bytes:02x?}"));
}

fn raw(endpoint: &Endpoint) -> RawClient {
    RawClient::connect(endpoint).unwrap()
}

fn greet(endpoint: &Endpoint) -> RawClient {
    RawClient::greet(endpoint, Purpose::Control).unwrap()
}

fn begin(endpoint: &Endpoint) -> (RawClient, Identity) {
    RawClient::session(endpoint).unwrap()
}

/// Opens a data connection with an extent of 1 MiB. The first stream keeps the session alive.
fn with_extent(endpoint: &Endpoint) -> (RawClient, RawClient, ExtentId) {
    let (mut control, own) = begin(endpoint);
    let extent = control.grant(MIB).unwrap();
    let data = RawClient::data(endpoint, own, 0).unwrap();
    (control, data, extent.id)
}

/// A client that works without pause until dropped. `finish` fails if any of its work did.
struct Bystander {
    stop: Arc<AtomicBool>,
    work: Option<thread::JoinHandle<u64>>,
}

impl Bystander {
    fn start(endpoint: &Endpoint) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let session: Arc<Session> = connect(endpoint);
        let extent = session.grant(MIB).unwrap();
        let stopped = stop.clone();
        let work = thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) || rounds == 0 {
                let bytes = [rounds as u8; 512];
                write(&session, &extent, rounds * 512 % MIB, &bytes).unwrap();
                assert_eq!(
                    read(&session, extent.id, rounds * 512 % MIB, 512).unwrap(),
                    bytes
                );
                rounds += 1;
            }
            rounds
        });
        Self {
            stop,
            work: Some(work),
        }
    }

    /// Ends the client and returns how many rounds it made.
    fn finish(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.work
            .take()
            .expect("finished once")
            .join()
            .expect("the bystander was disturbed")
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn peers_that_fall_silent_in_mid_frame_hold_nobody_up() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    for endpoint in both.endpoints() {
        let mut silent = Vec::new();
        let mut half = |mut stream: RawClient, bytes: &[u8]| {
            stream.write_all(bytes).unwrap();
            silent.push(stream);
        };
        half(raw(endpoint), &[]);
        half(raw(endpoint), &Hello::new(Purpose::Control).encode()[..7]);
        half(greet(endpoint), &[9, 0]);
        half(begin(endpoint).0, &[200, 0, 0, 0, 1, 2]);
        if matches!(endpoint, Endpoint::Tcp { .. }) {
            let (control, data, extent) = with_extent(endpoint);
            let mut bytes = header(OpKind::Write, extent, 4096).encode().to_vec();
            bytes.extend([1; 100]);
            half(data, &bytes);
            half(control, &[]);
            let (control, data, extent) = with_extent(endpoint);
            half(data, &header(OpKind::Write, extent, 4096).encode()[..20]);
            half(control, &[]);
        }
        let bystander = Bystander::start(endpoint);
        for _ in 0..20 {
            drop(connect(endpoint));
        }
        assert!(bystander.finish() > 0);
        silent.iter().for_each(RawClient::finish);
    }
    // The server ends although some of them never said goodbye.
    both.server.shutdown();
}

#[test]
fn arbitrary_bytes_never_end_the_server() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let bystanders = both.endpoints().map(Bystander::start);
    let mut runner = TestRunner::new(Config {
        cases: 60,
        failure_persistence: None,
        ..Config::default()
    });
    let connection = (0..2usize, 0..5usize, vec(any::<u8>(), 0..400));
    runner
        .run(&connection, |(endpoint, depth, bytes)| {
            let endpoint = both.endpoints()[endpoint];
            let tcp = matches!(endpoint, Endpoint::Tcp { .. });
            // The deeper the bytes get, the more of the protocol was right before them.
            let (_control, mut stream) = match depth {
                0 => (None, raw(endpoint)),
                1 => (None, greet(endpoint)),
                2 => (None, begin(endpoint).0),
                _ if !tcp => (None, begin(endpoint).0),
                _ => {
                    let (control, data, _) = with_extent(endpoint);
                    (Some(control), data)
                }
            };
            let framed = match depth {
                2 => [&(bytes.len() as u32).to_le_bytes(), bytes.as_slice()].concat(),
                4 => [
                    &header(OpKind::Write, ExtentId(1), 4096).encode()[..8],
                    bytes.as_slice(),
                ]
                .concat(),
                _ => bytes,
            };
            let _ = stream.write_all(&framed);
            stream.finish();
            is_closed_on(stream, &[]);
            Ok(())
        })
        .unwrap();
    for bystander in bystanders {
        assert!(bystander.finish() > 0);
    }
}

fn peak_bytes(daemon: &Daemon) -> u64 {
    proc_bytes(daemon.child.id(), "status", "VmHWM") as u64
}

#[test]
fn a_request_that_was_cut_off_is_not_executed_after_its_session_was_resumed() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let (mut old, own) = begin(&both.tcp);
    let request = control::encode(&grant(MIB)).unwrap();
    let (last, most) = request.split_last().unwrap();
    old.write_all(most).unwrap();
    let mut new = greet(&both.tcp);
    new.begin(Some(own)).unwrap();
    is_closed_on(old, &[*last]);
    let Response::Stat(stat) = new.ask(&Request::Stat).unwrap() else {
        panic!("no figures")
    };
    assert_eq!((stat.sessions, stat.granted_bytes), (1, 0));
}

#[test]
fn a_publication_of_millions_of_ids_takes_no_memory_and_no_time_of_others() {
    let daemon = Daemon::start(&["--capacity", "16MiB", "--lease", "1h"]);
    let (mut stream, _) = begin(&daemon.tcp);
    let extent = stream.grant(MIB).unwrap();
    let publish = |ids: usize| {
        control::encode(&Request::Publish {
            name: "x".to_owned(),
            manifest: vec![],
            extents: vec![extent.id; ids],
            ballot: None,
            keeps: false,
        })
        .unwrap()
    };
    // Two of one is more than the client holds.
    stream.write_all(&publish(2)).unwrap();
    assert!(matches!(stream.hear().unwrap(), Response::Refused(_)));
    let before = peak_bytes(&daemon);
    // Whether it is refused for its length or for the memory that it takes, nobody else notices.
    let bystander = Bystander::start(&daemon.tcp);
    let _ = stream.write_all(&publish(23 << 20));
    let _ = stream.read(&mut [0]);
    bystander.finish();
    let taken = peak_bytes(&daemon).saturating_sub(before);
    assert!(taken < 64 * MIB, "{} MiB", taken / MIB);
}

#[test]
fn requests_that_are_half_sent_take_their_senders_room_and_nothing_that_is_lent() {
    let daemon = Daemon::start(&["--capacity", "16MiB", "--lease", "1h"]);
    let before = peak_bytes(&daemon);
    let attackers: Vec<_> = (0..12)
        .map(|_| {
            let mut stream = greet_from(2, &daemon.tcp);
            stream.begin(None).unwrap();
            thread::spawn(move || {
                let piece = vec![0; MIB as usize];
                let announced = (control::MAX_FRAME_BYTES as u32).to_le_bytes();
                let mut pieces = vec![&announced[..]];
                pieces.resize(control::MAX_FRAME_BYTES / piece.len(), &piece);
                // Bytes that the server does not read do not go out.
                let _ = pieces.iter().try_for_each(|piece| stream.write_all(piece));
                stream
            })
        })
        .collect();
    let stat = || stat(&daemon.tcp);
    wait_until("what is held is known", || stat().request_bytes > 40 * MIB);
    // Another address is received, long requests included, and has all that is lent.
    let directory = tempfile::tempdir().unwrap();
    let victim = connect_as(&daemon.tcp, &directory.path().join("key"));
    victim.publish("x", &vec![7; 2 << 20], &[]).unwrap();
    victim.grant(13 * MIB).unwrap();
    assert!(stat().request_bytes <= 48 * MIB, "{:?}", stat());
    let half: Vec<_> = attackers
        .into_iter()
        .map(|attacker| attacker.join().unwrap())
        .collect();
    let taken = peak_bytes(&daemon).saturating_sub(before);
    assert!(taken < 110 * MIB, "{} MiB", taken / MIB);
    drop(half);
    wait_until("it is given back", || stat().request_bytes == 0);
}

/// Says hello from 127.0.0.`host`.
fn greet_from(host: u8, endpoint: &Endpoint) -> RawClient {
    let source = Ipv4Addr::new(127, 0, 0, host);
    RawClient::greet_from(source, endpoint, Purpose::Control).unwrap()
}

/// Begins a session from 127.0.0.`host`, and sends the first `bytes` bytes of a request of the
/// greatest length.
fn sent_in_part(host: u8, endpoint: &Endpoint, bytes: usize) -> (RawClient, Identity) {
    let mut stream = greet_from(host, endpoint);
    let own = stream.begin(None).unwrap();
    let announced = (control::MAX_FRAME_BYTES as u32).to_le_bytes();
    stream.write_all(&announced).unwrap();
    // Bytes that the server does not read yet need not go out.
    let _ = stream.write_all(&vec![0; bytes]);
    (stream, own)
}

#[test]
fn requests_that_are_only_announced_keep_nobody_waiting() {
    let daemon = Daemon::start(&["--capacity", "64MiB", "--lease", "1h"]);
    let _announced: Vec<_> = (0..16)
        .map(|i| sent_in_part(1 + i / 2, &daemon.tcp, 0))
        .collect();
    thread::sleep(Duration::from_millis(100));
    let directory = tempfile::tempdir().unwrap();
    let victim = connect_as(&daemon.tcp, &directory.path().join("key"));
    let begun = Instant::now();
    victim.publish("x", &vec![7; 16 << 20], &[]).unwrap();
    // Before anybody's patience with the others ends.
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_session_whose_request_waits_for_room_can_be_resumed() {
    let daemon = Daemon::start(&["--lease", "1h"]);
    let stat = || stat(&daemon.tcp);
    let _held = [(); 2].map(|()| sent_in_part(2, &daemon.tcp, 23 << 20));
    wait_until("both are held", || stat().request_bytes >= 46 * MIB);
    // Less than the socket's buffers hold, and more than there is room for.
    let (_waits, own) = sent_in_part(2, &daemon.tcp, 2 << 20);
    wait_until("all room is taken", || stat().request_bytes >= 47 * MIB);
    assert!(greet_from(2, &daemon.tcp).begin(Some(own)).is_ok());
}
