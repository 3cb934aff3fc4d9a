//! Areas that a program lends to its peers: each to one of them, once, and nothing else.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ChannelError, Completion, Endpoint, Extent, Op, OpenNameError, Secret, Session,
    SessionOptions, Verb,
    areas::{Areas, Presence},
    conformance,
    host::{Host, Origin, Transport},
    patterns::{RingPlace, RingReceiver, RingSender},
    regmem::{RegPool, RegPoolOptions},
    server::ServerThread,
    sim::{SimConfig, SimServer},
};
use farpage_testkit::{op, tcp, transfer, wait_until};

const PATIENCE: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_millis(600);

fn options(folder: &Path) -> SessionOptions {
    SessionOptions {
        key_file: Some(folder.join("key")),
        ..SessionOptions::default()
    }
}

fn on_real_fabrics(test: impl Fn(&Arc<Areas>, &ServerThread, &SessionOptions)) {
    let folder = tempfile::tempdir().unwrap();
    let shm = Endpoint::Shm(folder.path().join("socket"));
    for endpoint in [shm, tcp()] {
        let areas = Areas::new(LEASE);
        let serving = ServerThread::start(&endpoint, Arc::clone(&areas) as _).unwrap();
        test(&areas, &serving, &options(folder.path()));
    }
}

/// Returns the end of one WRITE, on a channel of its own: a refused WRITE may end it.
fn write(session: &Arc<Session>, extent: Extent, offset: u64) -> Result<(), ChannelError> {
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    transfer(
        &mut *channel,
        op(Verb::Write, extent.id, offset, vec![7; 8]),
    )
    .map(drop)
}

#[test]
fn a_peer_writes_into_the_area_that_it_opened() {
    on_real_fabrics(|areas, serving, options| {
        let place = |extent| RingPlace {
            extent,
            offset: 0,
            capacity: 1024,
        };
        let landing = areas.offer("ring", 4096).unwrap();
        assert_eq!(areas.presence("ring"), Presence::Awaited);
        let session = Session::connect(serving.endpoint(), options).unwrap();
        let extent = session.open("ring").unwrap().extents[0];
        assert_eq!(
            (extent.bytes, areas.presence("ring")),
            (4096, Presence::Here)
        );
        let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
        let mut receiver = RingReceiver::new(landing, place(extent.id));
        let mut sender = RingSender::new(session.channel().unwrap(), &pool, place(extent.id));
        sender.send(b"hello").unwrap();
        sender.flush().unwrap();
        let (mut message, end) = (Vec::new(), Instant::now() + PATIENCE);
        while !receiver.receive(&mut message).unwrap() {
            sender.progress().unwrap();
            assert!(Instant::now() < end, "no message");
        }
        assert_eq!(message, b"hello");
        drop((sender, session));
        wait_until("the peer has gone", || {
            areas.presence("ring") == Presence::Gone
        });
    });
}

#[test]
fn an_area_is_lent_once_and_nothing_else_is_to_be_had() {
    on_real_fabrics(|areas, serving, options| {
        let connect = || Session::connect(serving.endpoint(), options).unwrap();
        let _landing = areas.offer("mine", 4096).unwrap();
        let _other = areas.offer("other", 4096).unwrap();
        let (holder, thief) = (connect(), connect());
        let is_absent = |name| matches!(thief.open(name), Err(OpenNameError::NotFound { .. }));
        let mine = holder.open("mine").unwrap().extents[0];
        // 1. The thief gets no area of another, neither by its name nor by its number.
        assert!(matches!(
            thief.open("mine"),
            Err(OpenNameError::InUse { .. })
        ));
        let other = thief.open("other").unwrap().extents[0];
        for (extent, offset) in [(mine, 0), (other, 4089), (other, u64::MAX)] {
            let refused = write(&thief, extent, offset);
            assert!(refused.is_err(), "{extent:?} {offset}");
        }
        assert!(write(&thief, other, 4088).is_ok());
        // 2. It gets nothing that was not offered.
        assert!(is_absent("absent"));
        assert!(thief.grant(4096).is_err() && thief.grant_for_atomics(4096).is_err());
        assert!(thief.claim("name", false).is_err() && thief.remove("mine").is_err());
        assert!(thief.publish("name", b"", &[other.id]).is_err());
        assert!(thief.release(mine.id).is_err());
        assert_eq!(thief.names().unwrap(), []);
        // 3. It gets no area that another has held, until it is offered anew.
        drop(holder);
        wait_until("the holder has gone", || {
            areas.presence("mine") == Presence::Gone
        });
        assert!(is_absent("mine"));
        let _landing = areas.offer("mine", 64).unwrap();
        assert_eq!(thief.open("mine").unwrap().extents[0].bytes, 64);
        // 4. It gets no area that it gave back itself.
        thief.release(other.id).unwrap();
        assert_eq!(areas.presence("other"), Presence::Gone);
        let refused = write(&thief, other, 0);
        assert!(refused.is_err());
        assert!(is_absent("other"));
    });
}

#[test]
fn a_board_is_read_by_many_and_written_by_none() {
    on_real_fabrics(|areas, serving, options| {
        let connect = || Session::connect(serving.endpoint(), options).unwrap();
        conformance::check_boards(areas, &connect);
    });
    for seed in 0..4 {
        let areas = Areas::new(LEASE);
        let server = SimServer::with_host(SimConfig::new(seed), Arc::clone(&areas) as _);
        let connect = || server.session(&SessionOptions::default()).unwrap();
        conformance::check_boards(&areas, &connect);
    }
}

#[cfg(feature = "rdma")]
#[test]
fn a_board_is_read_by_many_and_written_by_none_over_rdma() {
    let Some(endpoint) = farpage_testkit::rdma() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let areas = Areas::new(LEASE);
    let serving = ServerThread::start(&endpoint, Arc::clone(&areas) as _).unwrap();
    let options = options(folder.path());
    let connect = || Session::connect(serving.endpoint(), &options).unwrap();
    conformance::check_boards(&areas, &connect);
}

#[test]
fn landed_floats_are_added_in_any_number() {
    let areas = Areas::new(LEASE);
    let server = SimServer::with_host(SimConfig::new(1), Arc::clone(&areas) as _);
    let session = server.session(&SessionOptions::default()).unwrap();
    for count in [1usize, 1023, 1024, 1025, 5000] {
        let landing = areas.offer("sum", 64 + 4 * count as u64).unwrap();
        let extent = session.open("sum").unwrap().extents[0];
        let floats: Vec<f32> = (0..count as u16).map(|i| f32::from(i) + 0.5).collect();
        let mut channel = session.channel::<Vec<u8>>().unwrap();
        let buf: Vec<u8> = floats
            .iter()
            .flat_map(|float| float.to_le_bytes())
            .collect();
        transfer(&mut *channel, op(Verb::Write, extent.id, 64, buf)).unwrap();
        let mut sums = vec![9.0; count];
        landing.add_floats(64, &mut sums, true);
        assert_eq!(sums, floats);
        landing.add_floats(64, &mut sums, false);
        assert!(
            sums.iter()
                .zip(&floats)
                .all(|(sum, float)| *sum == 2.0 * float)
        );
    }
}

#[test]
fn an_area_that_is_offered_anew_is_out_of_its_old_holders_reach() {
    on_real_fabrics(|areas, serving, options| {
        let _old = areas.offer("ring", 4096).unwrap();
        let session = Session::connect(serving.endpoint(), options).unwrap();
        let place = RingPlace {
            extent: session.open("ring").unwrap().extents[0].id,
            offset: 0,
            capacity: 1024,
        };
        let mut receiver = RingReceiver::new(areas.offer("ring", 4096).unwrap(), place);
        let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
        let mut sender = RingSender::new(session.channel().unwrap(), &pool, place);
        sender.send(b"late").unwrap();
        // Over shared memory the peer keeps its mappings, over a network nothing.
        let end = Instant::now() + PATIENCE;
        while sender.flush().is_ok() && !sender.is_idle() {
            assert!(Instant::now() < end, "a WRITE without an end");
        }
        assert!(!receiver.receive(&mut Vec::new()).unwrap());
    });
}

#[test]
fn a_simulated_peer_may_be_silent_for_longer_than_the_lease() {
    let areas = Areas::new(Duration::ZERO);
    let _landing = areas.offer("ring", 4096).unwrap();
    let server = SimServer::with_host(SimConfig::new(1), Arc::clone(&areas) as _);
    let session = server.session(&SessionOptions::default()).unwrap();
    session.open("ring").unwrap();
    thread::sleep(Duration::from_millis(2));
    assert_eq!(areas.presence("ring"), Presence::Here);
    drop(session);
    assert_eq!(areas.presence("ring"), Presence::Gone);
}

#[test]
fn a_peer_that_falls_silent_over_a_network_has_gone_when_its_lease_is_over() {
    let areas = Areas::new(Duration::from_millis(50));
    let _landing = areas.offer("ring", 4096).unwrap();
    let admission = areas
        .admit("peer", Transport::Tcp, &Origin::Unknown.into(), None)
        .unwrap();
    let session = admission.session;
    areas.open(session, "ring", None).unwrap();
    // The peer's connection breaks. It comes back in time with its own secret, and not with
    // another.
    areas.lost(session);
    let resume = |secret| {
        areas.admit(
            "peer",
            Transport::Tcp,
            &Origin::Unknown.into(),
            Some((session, secret)),
        )
    };
    assert!(resume(Secret([0; 16])).is_err());
    assert!(resume(admission.secret).is_ok());
    assert_eq!(areas.presence("ring"), Presence::Here);
    wait_until("silence is noticed", || {
        areas.presence("ring") == Presence::Gone
    });
    assert!(areas.renew(session).is_err() && areas.open(session, "ring", None).is_err());
}

/// Checks peers whose small batches one thread serves, and the cases that go back to their own
/// threads: large batches, answers that a socket does not take, a READ that waits in vain, and
/// refusals.
#[test]
fn peers_whose_small_batches_are_served_together_do_not_harm_one_another() {
    const AREA_BYTES: usize = 8 << 20;
    const PEERS: u64 = 3;
    let folder = tempfile::tempdir().unwrap();
    let areas = Areas::new(PATIENCE);
    let serving = ServerThread::start(&tcp(), Arc::clone(&areas) as _).unwrap();
    let board = areas.show("board", AREA_BYTES as u64).unwrap();
    let options = options(folder.path());
    let options = SessionOptions {
        // READs wait for half of a quarter of the deadline.
        deadline: Duration::from_secs(4),
        ..options
    };
    struct Peer {
        session: Arc<Session>,
        channel: Box<dyn Channel<Vec<u8>>>,
        area: Extent,
        board: Extent,
    }
    impl Peer {
        fn post(&mut self, verb: Verb, extent: Extent, bytes: Vec<u8>) {
            let op = op(verb, extent.id, 0, bytes);
            assert!(self.channel.post(op).is_ok());
        }

        fn post_when(&mut self, bytes: usize, least: u64) {
            let op = Op {
                tag: 1,
                ..op(Verb::Read, self.board.id, 0, vec![0; bytes])
            };
            assert!(self.channel.post_when(op, least).is_ok());
        }

        fn done(&mut self) -> Vec<Completion<Vec<u8>>> {
            let (mut done, end) = (Vec::new(), Instant::now() + PATIENCE);
            while self.channel.in_flight() > 0 {
                self.channel.poll(&mut done);
                assert!(Instant::now() < end, "an operation without an end");
                thread::sleep(Duration::from_micros(100));
            }
            done
        }
    }
    let peers = (0..PEERS).map(|number| {
        areas
            .offer(&format!("area-{number}"), AREA_BYTES as u64)
            .unwrap();
        let session = Session::connect(serving.endpoint(), &options).unwrap();
        let open = |name: &str| session.open(name).unwrap().extents[0];
        Peer {
            channel: session.channel().unwrap(),
            area: open(&format!("area-{number}")),
            board: open("board"),
            session: Arc::clone(&session),
        }
    });
    let mut peers: Vec<Peer> = peers.collect();
    for version in 1..=40 {
        // 1. Each writes and waits for a number; the sizes are small, large, and between.
        let bytes = [100, 60 << 10, 1 << 20, 100][version as usize % 4];
        for (number, peer) in (0..).zip(&mut peers) {
            peer.post(Verb::Write, peer.area, vec![version as u8 + number; bytes]);
            peer.post_when(bytes.max(16), version);
            let mut early = Vec::new();
            peer.channel.poll(&mut early);
            assert!(early.iter().all(|done| done.tag == 0), "read too early");
        }
        // 2. Another thread announces the number that they wait for, and their answers come.
        board.announce(0, version);
        for (number, peer) in (0..).zip(&mut peers) {
            for done in peer.done() {
                done.result.unwrap();
                let is_number = done.tag == 0 || done.buf[0] == version as u8;
                assert!(is_number, "version {version}");
            }
            // 3. The bytes that were written are read.
            peer.post(Verb::Read, peer.area, vec![0; bytes]);
            let done = peer.done().pop().unwrap();
            done.result.unwrap();
            assert!(done.buf.iter().all(|byte| *byte == version as u8 + number));
        }
    }
    // A wait in vain ends in time, and with it the operations behind it.
    let begun = Instant::now();
    peers[0].post_when(64, 1000);
    let ours = peers[0].area;
    peers[0].post(Verb::Read, ours, vec![0; 64]);
    let done = peers[0].done();
    assert!(
        matches!(done[0].result, Err(ChannelError::NotYet { .. })),
        "{done:?}"
    );
    assert!(done[1].result.is_ok() && done[1].buf[0] == 40, "{done:?}");
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    // A refusal ends its own connection only, as does a peer that goes while it waits.
    let theirs = peers[1].area;
    peers[0].post(Verb::Write, theirs, vec![9; 64]);
    let refused = peers[0].done().pop().unwrap();
    assert!(
        matches!(refused.result, Err(ChannelError::Refused { .. })),
        "{refused:?}"
    );
    peers[2].post_when(64, 1000);
    peers[2].channel.poll(&mut Vec::new());
    drop(peers.pop());
    peers[1].post_when(64, 41);
    peers[1].channel.poll(&mut Vec::new());
    board.announce(0, 41);
    let done = peers[1].done().pop().unwrap();
    assert!(done.result.is_ok() && done.buf[0] == 41, "{done:?}");
    peers[1].post(Verb::Read, theirs, vec![0; 64]);
    assert_eq!(
        peers[1].done().pop().unwrap().buf,
        [41; 64],
        "nobody else wrote there"
    );
    drop(peers.remove(0).session);
}
