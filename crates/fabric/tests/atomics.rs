//! Atomics beyond the conformance suite: the server's side of the memory, and the state that a
//! connection leaves when it ends.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Atomic, Busy, Channel, Completion, Endpoint, ExtentId, Op, Session, SessionOptions, Verb,
    memory::ExtentMemory,
    server::ServerThread,
    sim::{SimConfig, SimHost, SimServer},
};
use farpage_testkit::{op, tcp};

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `test` with a server. The third argument of `test` ends the server before it returns.
fn with_server(
    endpoint: &Endpoint,
    test: impl FnOnce(&dyn Fn() -> Arc<Session>, &SimHost, &(dyn Fn() + Sync)),
) {
    let host = Arc::new(SimHost::new(64 << 20));
    let options = SessionOptions {
        deadline: Duration::from_secs(5),
        ..SessionOptions::default()
    };
    let serving = ServerThread::start(endpoint, Arc::clone(&host) as _).expect("a free endpoint");
    let endpoint = serving.endpoint().clone();
    let serving = Mutex::new(serving);
    let end = || {
        let begun = Instant::now();
        let ended = serving.lock().expect("nobody panics").end();
        ended.expect("the server ends");
        assert!(begun.elapsed() < PATIENCE, "the server does not end");
    };
    test(
        &|| Session::connect(&endpoint, &options).expect("a live server"),
        &host,
        &end,
    );
    end();
}

fn add_one(extent: ExtentId) -> Op<Vec<u8>> {
    op(Verb::Atomic(Atomic::FetchAdd(1)), extent, 0, vec![0; 8])
}

/// Adds until there are `count` completions, or until the channel is dead.
fn add(
    channel: &mut dyn Channel<Vec<u8>>,
    extent: ExtentId,
    count: usize,
) -> Vec<Completion<Vec<u8>>> {
    let (mut posted, mut done) = (0, Vec::new());
    let begun = Instant::now();
    while done.len() < count && !(channel.in_flight() == 0 && is_dead(&done)) {
        assert!(begun.elapsed() < PATIENCE, "operations do not end");
        while posted < count && !is_dead(&done) {
            match channel.post(add_one(extent)) {
                Ok(()) => posted += 1,
                Err(Busy(_)) => break,
            }
        }
        channel.poll(&mut done);
    }
    done
}

fn is_dead(done: &[Completion<Vec<u8>>]) -> bool {
    done.last().is_some_and(|done| done.result.is_err())
}

fn succeeded(done: &[Completion<Vec<u8>>]) -> u64 {
    done.iter().filter(|done| done.result.is_ok()).count() as u64
}

fn word(memory: &ExtentMemory) -> u64 {
    memory
        .atomic(0, Atomic::FetchAdd(0))
        .expect("a lease that has not ended")
}

#[test]
fn atomics_of_clients_and_of_the_servers_own_threads_do_not_get_lost() {
    const EACH: usize = 3000;
    let folder = tempfile::tempdir().expect("a folder");
    for endpoint in [tcp(), Endpoint::Shm(folder.path().join("socket"))] {
        with_server(&endpoint, |connect, host, _| {
            let session = connect();
            let extent = session.grant_for_atomics(4096).expect("room").id;
            let memory = host.memory(extent).expect("granted");
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let mut channel = session.channel().expect("a live server");
                        assert_eq!(succeeded(&add(&mut *channel, extent, EACH)), EACH as u64);
                    });
                }
                for _ in 0..EACH {
                    memory.atomic(0, Atomic::FetchAdd(1)).expect("leased");
                    // Lets the clients in.
                    thread::yield_now();
                }
            });
            assert_eq!(word(&memory), 3 * EACH as u64, "{endpoint}");
        });
    }
}

#[test]
fn what_was_in_flight_when_the_server_ended_took_place_at_most_once() {
    for round in 0..20 {
        with_server(&tcp(), |connect, host, end| {
            let session = connect();
            let extent = session.grant_for_atomics(4096).expect("room").id;
            // The lease ends with the session, whose end the server cannot hear any more; the
            // handle stays.
            let memory = host.memory(extent).expect("granted").lease_anew();
            let mut channel = session.channel().expect("a live server");
            thread::scope(|scope| {
                let client = scope.spawn(move || add(&mut *channel, extent, usize::MAX));
                while word(&memory) < 100 * round {
                    thread::yield_now();
                }
                end();
                let done = client.join().expect("the client ends");
                let (succeeded, word) = (succeeded(&done), word(&memory));
                assert!(
                    (succeeded..=done.len() as u64).contains(&word),
                    "{word} of {succeeded} to {}",
                    done.len()
                );
            });
        });
    }
}

#[test]
fn what_a_simulation_loses_took_place_once_or_not_at_all() {
    let (mut lost, mut done_though_lost) = (0, 0);
    for seed in 0..200 {
        let server = SimServer::new(SimConfig {
            lose_one_in: Some(50),
            ..SimConfig::new(seed)
        });
        let session = server.session(&SessionOptions::default()).expect("alive");
        let extent = session.grant_for_atomics(4096).expect("room").id;
        let mut channel = session.channel().expect("alive");
        let done = add(&mut *channel, extent, 100);
        // A new channel sees the fate of the lost operations.
        let mut channel = session.channel().expect("alive");
        let mut looked = Vec::new();
        while looked.is_empty() || is_dead(&looked) {
            if channel.in_flight() == 0 {
                channel = session.channel().expect("alive");
                let look = Op {
                    verb: Verb::Read,
                    ..add_one(extent)
                };
                assert!(channel.post(look).is_ok());
                looked.clear();
            }
            channel.poll(&mut looked);
        }
        let bytes = looked[0].buf[..].try_into().expect("eight bytes");
        let (succeeded, word) = (succeeded(&done), u64::from_le_bytes(bytes));
        assert!(
            (succeeded..=done.len() as u64).contains(&word),
            "seed {seed}: {word} of {succeeded} to {}",
            done.len()
        );
        lost += done.len() as u64 - succeeded;
        done_though_lost += word - succeeded;
    }
    assert!(
        0 < done_though_lost && done_though_lost < lost,
        "both happen: {done_though_lost} of {lost}"
    );
}
