//! Control connections whose client cheats: its own connection ends, and others do not notice.
//! Needs a device, as `rdma/tests.rs` does.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_testkit::wait_until;
use farpage_wire::{
    Endpoint, Request,
    control::{HELLO_BYTES, Hello, Purpose, RemoteKey, encode},
};

use super::*;
use crate::{
    Session,
    rdma::{
        connect::control,
        tests::{MIB, read, with_server},
        verbs::EventKind,
    },
};

/// Time that is longer than the wait for a peer that does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

fn open(endpoint: &Endpoint, tell: impl FnOnce(RemoteKey) -> RemoteKey) -> Control {
    let plain = RegPool::new([], RegPoolOptions::default());
    control(endpoint, &plain, tell, Instant::now() + PATIENCE).expect("a live server")
}

/// Says hello and hears the answer.
fn greet(control: &mut Control) {
    let mut answer = [0; HELLO_BYTES];
    write_all(control, &Hello::new(Purpose::Control).encode());
    let mut heard = 0;
    wait_until("the server answers", || {
        heard += control
            .read(&mut answer[heard..])
            .expect("an honest server")
            .unwrap_or(0);
        heard == HELLO_BYTES
    });
    assert!(Hello::decode(&answer).is_ok());
}

fn write_all(control: &mut Control, mut bytes: &[u8]) {
    wait_until("all is said", || {
        let said = control.write(bytes).expect("memory").unwrap_or(0);
        bytes = &bytes[said..];
        bytes.is_empty()
    });
}

/// WRITEs `bytes` into the server's ring, by hand.
fn place(control: &mut Control, offset: u64, bytes: &[u8], notify: bool) {
    let mut buf = RegPool::new([], RegPoolOptions::default())
        .acquire(bytes.len())
        .expect("memory");
    buf.as_mut().copy_from_slice(bytes);
    let op = Op {
        tag: 0,
        verb: Verb::Write,
        extent: PLACE.extent,
        offset,
        len: bytes.len() as u32,
        buf,
    };
    let carrier = control.sender.channel_mut();
    carrier.hand_over(op, notify).expect("the queue has room");
}

/// True if the server has closed the connection.
fn is_closed(control: &mut Control) -> bool {
    control.sender.channel_mut().poll(&mut Vec::new());
    let event = control
        .pair()
        .id()
        .next_event()
        .expect("events can be read");
    control.failure().is_some() || event.is_some_and(|event| event.kind != EventKind::Established)
}

/// Runs `cheat` while an honest client goes on. In the end the cheat's connection is closed and the
/// honest one is not.
fn cheat(cheat: impl FnOnce(&Endpoint) -> Control) {
    with_server(|connect: &dyn Fn() -> Arc<Session>| {
        let honest = connect();
        let extent = honest.grant(MIB as u64).expect("room");
        let mut control = cheat(honest.endpoint());
        wait_until("the server has closed the connection", || {
            is_closed(&mut control)
        });
        assert_eq!(read(&honest, extent), Ok(vec![0; 4096]));
        honest.grant(MIB as u64).expect("the session goes on");
        connect().grant(MIB as u64).expect("the server goes on");
    });
}

#[test]
fn announcements_of_nothing_over_rdma_end_their_own_connection_only() {
    cheat(|endpoint| {
        let mut control = open(endpoint, |key| key);
        greet(&mut control);
        let begin = Request::Begin {
            client: "cheat".to_owned(),
            resume: None,
        };
        write_all(&mut control, &encode(&begin).expect("short"));
        // Bytes placed from now on lie where the server does not look any more.
        wait_until("the server answers", || {
            let heard = control.read(&mut [0; 256]).expect("an honest server");
            heard.is_some_and(|bytes| bytes > 0)
        });
        for _ in 0..=ANNOUNCEMENTS {
            place(&mut control, HEADER_BYTES as u64, &[1; 64], true);
            wait_until("it is placed", || {
                control.sender.channel_mut().poll(&mut Vec::new());
                control.sender.channel().in_flight() == 0
            });
        }
        // A client that renews its lease is not silent.
        let renew = encode(&Request::Renew).expect("short");
        wait_until("the server has closed the connection", || {
            let _ = control.write(&renew);
            let _ = control.read(&mut [0; 256]);
            is_closed(&mut control)
        });
        control
    });
}

#[test]
fn a_tail_beyond_the_ring_over_rdma_ends_its_own_connection_only() {
    cheat(|endpoint| {
        let mut control = open(endpoint, |key| key);
        greet(&mut control);
        // A position so far ahead is wrong whatever was sent so far.
        place(
            &mut control,
            0,
            &crate::exchange::ring::sealed(1 << 40),
            true,
        );
        control
    });
}

#[test]
fn a_client_over_rdma_that_takes_no_answers_ends_its_own_connection_only() {
    cheat(|endpoint| {
        let mut control = open(endpoint, |key| key);
        greet(&mut control);
        let begin = Request::Begin {
            client: "greedy".to_owned(),
            resume: None,
        };
        write_all(&mut control, &encode(&begin).expect("short"));
        // More than there are announcements for the answers.
        for _ in 0..ANNOUNCEMENTS + 2 {
            write_all(&mut control, &encode(&Request::Stat).expect("short"));
        }
        control
    });
}

#[test]
fn a_ring_over_rdma_that_is_not_where_its_client_says_ends_its_own_connection_only() {
    cheat(|endpoint| {
        let mut control = open(endpoint, |key| RemoteKey {
            address: key.address + (1 << 40),
            ..key
        });
        write_all(&mut control, &Hello::new(Purpose::Control).encode());
        control
    });
}

#[test]
fn a_key_of_a_control_connection_over_rdma_opens_nothing_through_another() {
    with_server(|connect| {
        let endpoint = connect().endpoint().clone();
        let mut owner = open(&endpoint, |key| key);
        let mut thief = open(&endpoint, |key| key);
        let stolen = owner.sender.channel().peer;
        thief.meet(stolen);
        place(&mut thief, HEADER_BYTES as u64, &[0xee; 64], false);
        wait_until("the adapter has refused", || {
            thief.sender.channel_mut().poll(&mut Vec::new());
            thief.failure().is_some()
        });
        let failure = thief.failure().expect("just seen");
        assert!(failure.describe().contains("out of reach"), "{failure:?}");
        greet(&mut owner);
    });
}

#[test]
fn a_manifest_many_times_as_long_as_a_ring_over_rdma_arrives_whole() {
    with_server(|connect| {
        let manifest: Vec<u8> = (0..MIB as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let session = connect();
        let extent = session.grant(MIB as u64).expect("room");
        session
            .publish("long", &manifest, &[extent.id])
            .expect("not too long");
        drop(session);
        let named = connect().open("long").expect("published");
        assert!(named.manifest == manifest, "another manifest");
    });
}
