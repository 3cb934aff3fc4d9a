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
    raw::{attach, grant},
    wait_until,
};
use farpage_wire::{
    Endpoint, ExtentId, MAX_OP_BYTES, Request, Response, Secret, SessionId,
    control::{self, Hello, Purpose},
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, OP_HEADER_BYTES, OPERAND_BYTES, OpHeader, OpKind,
        Status, WORD_BYTES,
    },
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

fn write_header(extent: ExtentId) -> OpHeader {
    OpHeader {
        kind: OpKind::Write,
        following: 0,
        sequence: 0,
        len: 4096,
        extent,
        offset: 0,
    }
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
fn frames_that_no_client_sends_close_only_their_own_connection() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    for endpoint in both.endpoints() {
        let bystander = Bystander::start(endpoint);

        // Before there is a session.
        is_closed_on(raw(endpoint), b"GET / HTTP/1.1\r\nHost: farpage\r\n\r\n");
        let mut other_version = Hello::new(Purpose::Control).encode();
        other_version[8] = 0xee;
        is_closed_on(raw(endpoint), &other_version);
        is_closed_on(greet(endpoint), &u32::MAX.to_le_bytes());
        is_closed_on(greet(endpoint), &[5, 0, 0, 0, 99, 99, 99, 99, 99]);
        is_closed_on(greet(endpoint), &control::encode(&grant(1)).unwrap());

        // In a session: a frame too long, one that is none.
        is_closed_on(begin(endpoint).0, &u32::MAX.to_le_bytes());
        is_closed_on(begin(endpoint).0, &[1, 0, 0, 0, 99]);
        bystander.finish();
    }
    wait_until("only sessions that may return are left", || {
        both.server.stat().granted_bytes == 0
    });
}

#[test]
fn operations_outside_the_own_leases_are_refused_and_end_the_connection() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let endpoint = &both.tcp;
    let bystander = Bystander::start(endpoint);
    let (_control, _data, other) = with_extent(endpoint);
    for change in [
        |op: OpHeader, _other| OpHeader {
            extent: ExtentId(u64::MAX),
            ..op
        },
        |op: OpHeader, other| OpHeader {
            extent: other,
            ..op
        },
        |op: OpHeader, _other| OpHeader {
            offset: MIB - 4095,
            ..op
        },
        |op: OpHeader, _other| OpHeader { offset: MIB, ..op },
        |op: OpHeader, _other| OpHeader {
            offset: u64::MAX - 5000,
            ..op
        },
        // Too far for 4096 bytes, and no multiple of 8 for an atomic.
        |op: OpHeader, _other| OpHeader {
            offset: MIB - 12,
            ..op
        },
    ] {
        for (kind, len, payload_bytes) in [
            (OpKind::Read, 4096, 0),
            (OpKind::Write, 4096, 4096),
            (OpKind::FetchAdd, WORD_BYTES, OPERAND_BYTES),
            (OpKind::CompareSwap, WORD_BYTES, OPERAND_BYTES),
        ] {
            let (_control, mut data, extent) = with_extent(endpoint);
            let op = change(
                OpHeader {
                    kind,
                    len,
                    ..write_header(extent)
                },
                other,
            );
            data.write_all(&op.encode()).unwrap();
            let _ = data.write_all(&vec![1; payload_bytes]);
            let mut answer = [0; ANSWER_HEADER_BYTES];
            data.read_exact(&mut answer).unwrap();
            assert_eq!(
                AnswerHeader::decode(&answer).unwrap().status,
                Status::Refused,
                "{op:?}"
            );
            is_closed_on(data, &[]);
        }
    }
    bystander.finish();
}

#[test]
fn data_headers_that_no_client_sends_close_only_their_own_connection() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let endpoint = &both.tcp;
    let bystander = Bystander::start(endpoint);
    let changes: [fn(OpHeader) -> OpHeader; 5] = [
        |op| OpHeader {
            len: MAX_OP_BYTES + 1,
            ..op
        },
        |op| OpHeader { len: 0, ..op },
        |op| OpHeader {
            offset: u64::MAX,
            ..op
        },
        |op| OpHeader {
            following: u16::MAX,
            ..op
        },
        |op| OpHeader {
            kind: OpKind::FetchAdd,
            len: 2 * WORD_BYTES,
            ..op
        },
    ];
    for change in changes {
        let (_control, data, extent) = with_extent(endpoint);
        is_closed_on(data, &change(write_header(extent)).encode());
    }
    let (_control, data, _) = with_extent(endpoint);
    is_closed_on(data, &[0xff; OP_HEADER_BYTES]);
    // A wrong secret, and a session that does not exist.
    let (_control, (session, secret)) = begin(endpoint);
    for forged in [(session, Secret([0; 16])), (SessionId(u64::MAX), secret)] {
        let mut data = RawClient::greet(endpoint, Purpose::Data).unwrap();
        let answer = data.ask(&attach(forged, 0)).unwrap();
        assert!(matches!(answer, Response::Refused(_)));
        is_closed_on(data, &[]);
    }
    bystander.finish();
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
            let mut bytes = write_header(extent).encode().to_vec();
            bytes.extend([1; 100]);
            half(data, &bytes);
            half(control, &[]);
            let (control, data, extent) = with_extent(endpoint);
            half(data, &write_header(extent).encode()[..20]);
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
                4 => [&write_header(ExtentId(1)).encode()[..8], bytes.as_slice()].concat(),
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
