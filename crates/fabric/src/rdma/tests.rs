//! Tests with clients that cheat, or that look inside. They need a device:
//! `FARPAGE_TEST_RDMA_ADDRESS` names its address.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use crate::{
    Atomic, Channel, ChannelError, Completion, Extent, Op, RdmaOptions, Session, SessionOptions,
    Verb,
    areas::Areas,
    patterns::{RingPlace, RingReceiver, RingSender},
    regmem::{RegBuf, RegPool, RegPoolOptions},
    server::ServerThread,
    sim::SimHost,
};

pub(super) const MIB: usize = 1 << 20;

/// Time that is longer than any wait of the tests.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `test` with a server, if there is a device.
pub(super) fn with_server(test: impl FnOnce(&dyn Fn() -> Arc<Session>)) {
    let Some(endpoint) = farpage_testkit::rdma() else {
        return;
    };
    let host = Arc::new(SimHost::new(256 << 20));
    let mut server = ServerThread::start(&endpoint, host).expect("a free port");
    let options = SessionOptions {
        deadline: Duration::from_secs(5),
        ..SessionOptions::default()
    };
    test(&|| Session::connect(server.endpoint(), &options).expect("a live server"));
    server.end().expect("the server ends");
}

fn drain<B: crate::Buf>(channel: &mut dyn Channel<B>) -> Vec<Completion<B>> {
    let mut done = Vec::new();
    let until = Instant::now() + Duration::from_secs(20);
    while channel.in_flight() > 0 {
        assert!(Instant::now() < until, "operations did not end");
        channel.poll(&mut done);
    }
    done
}

pub(super) fn read(session: &Arc<Session>, extent: Extent) -> Result<Vec<u8>, ChannelError> {
    let mut channel = session.channel::<Vec<u8>>().expect("a live server");
    let op = Op {
        tag: 0,
        verb: Verb::Read,
        extent: extent.id,
        offset: 0,
        len: 4096,
        buf: vec![0xee; 4096],
    };
    assert!(channel.post(op).is_ok());
    let done = drain(&mut *channel).remove(0);
    done.result.map(|()| done.buf)
}

#[test]
fn a_key_opens_nothing_for_another_client_and_nothing_after_its_lease() {
    with_server(|connect| {
        let (owner, thief) = (connect(), connect());
        let extent = owner.grant(MIB as u64).expect("room");
        assert_eq!(read(&owner, extent), Ok(vec![0; 4096]));
        let leased = owner.rdma().get(extent.id).expect("leased");
        let lease = farpage_wire::control::Lease {
            id: extent.id,
            bytes: extent.bytes,
            atomics: false,
            paged: false,
            read_only: false,
        };
        let keys = farpage_wire::control::LeaseKeys {
            memory: leased.key,
            paged: None,
        };
        // The thief knows all that the owner knows.
        thief.rdma().insert(lease, keys);
        let error = read(&thief, extent).expect_err("another domain's key");
        assert!(error.to_string().contains("out of reach"), "{error}");
        assert_eq!(read(&owner, extent), Ok(vec![0; 4096]));
        // The owner goes on with the released extent. Another extent keeps its domain alive, so
        // that nothing but the key can end.
        let kept = owner.grant(MIB as u64).expect("room");
        assert_eq!(read(&owner, kept), Ok(vec![0; 4096]));
        owner.release(extent.id).expect("leased");
        owner.rdma().insert(lease, keys);
        let error = read(&owner, extent).expect_err("the lease is over");
        assert!(error.to_string().contains("out of reach"), "{error}");
    });
}

#[test]
fn registered_buffers_travel_as_they_lie_and_nothing_is_registered_on_the_way() {
    with_server(|connect| {
        const COUNT: usize = 24;
        let session = connect();
        let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
        let extent = session.grant((COUNT * MIB) as u64).expect("room");
        let mut channel = session.channel::<RegBuf>().expect("a live server");
        // Many times as much as the channel's own memory holds.
        let mut bufs: Vec<RegBuf> = (0..COUNT)
            .map(|i| {
                let mut buf = pool.acquire(MIB).expect("memory");
                buf.as_mut().fill(i as u8 + 1);
                buf
            })
            .collect();
        let registrations = pool.stats().registrations;
        for verb in [Verb::Write, Verb::Read] {
            for (i, mut buf) in bufs.drain(..).enumerate() {
                if verb == Verb::Read {
                    buf.as_mut().fill(0);
                }
                let op = Op {
                    tag: i as u64,
                    verb,
                    extent: extent.id,
                    offset: (i * MIB) as u64,
                    len: MIB as u32,
                    buf,
                };
                assert!(channel.post(op).is_ok(), "the queue has room");
            }
            bufs = drain(&mut *channel)
                .into_iter()
                .map(|done| {
                    done.result.expect("leased memory");
                    let byte = done.tag as u8 + 1;
                    assert!(
                        done.buf.as_ref().iter().all(|is| *is == byte),
                        "{verb:?} {byte}"
                    );
                    done.buf
                })
                .collect();
            assert_eq!(bufs.len(), COUNT);
        }
        assert_eq!(pool.stats().registrations, registrations);
    });
}

#[test]
fn old_values_come_into_registered_buffers_whether_the_adapter_reaches_them_or_not() {
    with_server(|connect| {
        let session = connect();
        let extent = session.grant_for_atomics(4096).expect("room");
        let mut channel = session.channel::<RegBuf>().expect("a live server");
        let known = RegPool::new([session.registrar()], RegPoolOptions::default());
        let unknown = RegPool::new([], RegPoolOptions::default());
        for (turn, pool) in (0..6).zip([&known, &unknown].into_iter().cycle()) {
            let mut buf = pool.acquire(64).expect("memory");
            buf.as_mut().fill(0xee);
            let op = Op {
                tag: 0,
                verb: Verb::Atomic(Atomic::FetchAdd(3)),
                extent: extent.id,
                offset: 4088,
                len: 8,
                buf,
            };
            assert!(channel.post(op).is_ok());
            let done = drain(&mut *channel).remove(0);
            done.result.expect("leased memory");
            let (old, rest) = done.buf.as_ref().split_at(8);
            assert_eq!(old, u64::to_le_bytes(turn * 3));
            assert!(rest.iter().all(|byte| *byte == 0xee));
        }
    });
}

#[test]
fn what_is_no_registered_memory_is_counted_when_it_is_copied() {
    with_server(|connect| {
        let session = connect();
        let extent = session.grant(MIB as u64).expect("room");
        let mut channel = session.channel::<RegBuf>().expect("a live server");
        let known = RegPool::new([session.registrar()], RegPoolOptions::default());
        let unknown = RegPool::new([], RegPoolOptions::default());
        let mut move_both_ways = |pool: &RegPool| {
            let mut buf = pool.acquire(4096).expect("memory");
            for verb in [Verb::Write, Verb::Read] {
                let op = Op {
                    tag: 0,
                    verb,
                    extent: extent.id,
                    offset: 0,
                    len: 4096,
                    buf,
                };
                assert!(channel.post(op).is_ok());
                buf = drain(&mut *channel).remove(0).buf;
            }
            session.bounced_bytes()
        };
        assert_eq!(move_both_ways(&known), 0);
        assert_eq!(move_both_ways(&unknown), 2 * 4096);
        assert_eq!(move_both_ways(&known), 2 * 4096);
    });
}

/// Covers more messages than a server has receives ready, and a client that does not notify.
#[test]
fn a_program_that_lends_areas_hears_of_each_message_over_rdma() {
    let Some(endpoint) = farpage_testkit::rdma() else {
        return;
    };
    let areas = Areas::new(PATIENCE);
    let mut server = ServerThread::start(&endpoint, Arc::clone(&areas) as _).expect("a free port");
    let (tell, heard) = mpsc::channel();
    areas.on_arrival(Some(Arc::new(move || {
        // Fails when the test has ended and nobody listens any more.
        let _ = tell.send(());
    })));
    for immediate in [true, false] {
        let options = SessionOptions {
            rdma: RdmaOptions {
                immediate,
                ..RdmaOptions::default()
            },
            ..SessionOptions::default()
        };
        let landing = areas.offer("ring", 8192).expect("memory");
        let session = Session::connect(server.endpoint(), &options).expect("a live server");
        let place = RingPlace {
            extent: session.open("ring").expect("lent").extents[0].id,
            offset: 0,
            capacity: 1024,
        };
        let mut receiver = RingReceiver::new(landing, place);
        let channel = session.channel().expect("a live server");
        let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
        let mut sender = RingSender::new(channel, &pool, place);
        let mut message = Vec::new();
        for number in 0..600_u64 {
            sender.ask().expect("memory");
            while sender.send(&number.to_le_bytes()).is_err() {
                sender.progress().expect("a live server");
            }
            sender.flush().expect("a live server");
            if immediate {
                heard.recv_timeout(PATIENCE).expect("an arrival");
            }
            let until = Instant::now() + PATIENCE;
            while !receiver.receive(&mut message).expect("an honest sender") {
                assert!(Instant::now() < until, "message {number} does not come");
                sender.progress().expect("a live server");
            }
            assert_eq!(message, number.to_le_bytes());
        }
        if !immediate {
            assert!(heard.try_recv().is_err(), "nobody notifies");
        }
    }
    server.end().expect("the server ends");
}

#[test]
fn sessions_at_one_adapter_share_a_queue() {
    with_server(|connect| {
        let (one, other) = (connect(), connect());
        let sessions = [Arc::clone(&one), other, one];
        let groups = Session::channels::<Vec<u8>>(&sessions).expect("a live server");
        let numbers: Vec<_> = groups.iter().map(|group| &group.numbers[..]).collect();
        assert_eq!(numbers, [[0, 1, 2]]);
    });
}
