//! Answers that never arrive: the server's work is neither lost nor done twice.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use common::{connect_as, read, write};
use farpage_fabric::{Endpoint, Session, SessionOptions};
use farpage_testkit::{
    Both,
    raw::{receive, send},
    wait_until,
};
use farpage_wire::{Request, Response, control::HELLO_BYTES};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Relay between a client and a server. It loses the answers of the next requests that give
/// something, and their connections.
struct Relay {
    endpoint: Endpoint,
    losses: Arc<AtomicUsize>,
}

impl Relay {
    fn before(server: &Endpoint) -> Self {
        let Endpoint::Tcp { port, .. } = *server else {
            panic!("a relay is for tcp")
        };
        let relay = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp://{}", relay.local_addr().unwrap());
        let losses = Arc::new(AtomicUsize::new(0));
        let shared = Arc::clone(&losses);
        thread::spawn(move || {
            for client in relay.incoming() {
                let (client, losses) = (client.unwrap(), Arc::clone(&shared));
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else {
                    return;
                };
                // An error is an end; both sides see it when the streams are dropped.
                thread::spawn(move || pass(client, server, &losses));
            }
        });
        Self {
            endpoint: endpoint.parse().unwrap(),
            losses,
        }
    }

    fn lose(&self, answers: usize) {
        self.losses.store(answers, Ordering::SeqCst);
    }
}

/// Passes hellos, requests and answers on, in turns, as a control connection carries them. Data
/// goes both ways at a time.
fn pass(mut client: TcpStream, mut server: TcpStream, losses: &AtomicUsize) -> io::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    client.read_exact(&mut hello)?;
    server.write_all(&hello)?;
    let is_data = hello[10] == 2;
    server.read_exact(&mut hello)?;
    client.write_all(&hello)?;
    if is_data {
        let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
        let ended = io::copy(&mut server, &mut client).map(drop);
        let _ = client.shutdown(std::net::Shutdown::Both);
        return ended;
    }
    loop {
        let request: Request = receive(&mut client)?;
        send(&mut server, &request)?;
        let answer: Response = receive(&mut server)?;
        let gives = matches!(
            request,
            Request::Grant { .. } | Request::Open { .. } | Request::Claim { .. }
        );
        let left = losses.load(Ordering::SeqCst);
        if gives && left > 0 {
            losses.store(left - 1, Ordering::SeqCst);
            return Ok(());
        }
        send(&mut client, &answer)?;
    }
}

fn start() -> (Both, tempfile::TempDir) {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    (both, tempfile::tempdir().unwrap())
}

#[test]
fn what_is_asked_again_is_given_once() {
    let (both, keys) = start();
    let relay = Relay::before(&both.tcp);
    let session = connect_as(&relay.endpoint, &keys.path().join("key"));
    // 1. One answer lost, then two.
    for (losses, name) in [(1, "a"), (2, "b")] {
        relay.lose(losses);
        session.claim(name, false).unwrap();
        relay.lose(losses);
        let extent = session.grant(MIB).unwrap();
        write(&session, &extent, 0, name.as_bytes()).unwrap();
        session.publish(name, b"map", &[extent.id]).unwrap();
        session.release(extent.id).unwrap();
        session.disclaim(name).unwrap();
        relay.lose(losses);
        let opened = session.open(name).unwrap();
        assert_eq!(opened.manifest, b"map");
        let extent = opened.extents[0];
        assert_eq!(read(&session, extent.id, 0, 1).unwrap(), name.as_bytes());
        // Opening it a second time is no repetition.
        let twice = session.open(name).unwrap_err();
        assert!(
            matches!(twice, farpage_fabric::OpenNameError::InUse { .. }),
            "{twice}"
        );
    }
    // 2. Nothing was given twice.
    let stat = both.server.stat();
    let named = MIB + PAGE + 3;
    assert_eq!((stat.extents, stat.granted_bytes), (2, 2 * named));
    assert_eq!(stat.sessions, 1);
}

#[test]
fn what_nobody_waits_for_any_more_is_given_back() {
    let (both, keys) = start();
    let relay = Relay::before(&both.tcp);
    let key_file = keys.path().join("key");
    let options = SessionOptions {
        key_file: Some(key_file.clone()),
        deadline: Duration::from_secs(1),
        ..SessionOptions::default()
    };
    let session = Session::connect(&relay.endpoint, &options).unwrap();
    let other = connect_as(&both.tcp, &key_file);
    let kept = session.grant(MIB).unwrap();
    session.publish("x", b"map", &[kept.id]).unwrap();
    session.release(kept.id).unwrap();
    // So that the session is worth coming back for.
    let kept = session.grant(PAGE).unwrap();
    let attempts: [&dyn Fn() -> bool; 3] = [
        &|| session.open("x").is_err(),
        &|| session.claim("new", false).is_err(),
        &|| session.grant(8 * MIB).is_err(),
    ];
    for fails in attempts {
        relay.lose(usize::MAX);
        assert!(fails());
        relay.lose(0);
        wait_until("it is served again", || session.stat().is_ok());
        let bytes = both.server.stat().granted_bytes;
        assert_eq!(bytes, MIB + PAGE + 3 + PAGE);
    }
    other.open("x").unwrap();
    other.claim("new", false).unwrap();
    session.release(kept.id).unwrap();
}
