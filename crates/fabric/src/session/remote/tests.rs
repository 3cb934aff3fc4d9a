//! Calls of a session to a server by hand, which loses answers.

use std::{
    net::TcpListener,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use farpage_wire::{
    ExtentId, Request, Response, Secret, SessionId, Versions,
    control::{HELLO_BYTES, Hello, Lease, MAX_FRAME_BYTES},
};

use super::{Remote, SessionOptions};
use crate::stream::PeerStream;

const PATIENCE: Duration = Duration::from_secs(20);

/// Serves one connection: says hello, begins session 1, and answers each further request with the
/// response of `answer`, if there is one.
fn served(
    listener: &TcpListener,
    mut answer: impl FnMut(Request) -> Option<Response>,
) -> Option<()> {
    let (socket, _) = listener.accept().expect("a client");
    socket.set_nonblocking(true).expect("a socket");
    let stream = PeerStream::Tcp(socket);
    let until = Instant::now() + PATIENCE;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello, until).ok()?;
    let purpose = Hello::decode(&hello).expect("a hello").purpose;
    stream
        .write_all(&Hello::new(purpose).encode(), until)
        .ok()?;
    loop {
        let request = stream.receive(MAX_FRAME_BYTES, until).ok()?;
        let said = match request {
            Request::Begin { .. } => Some(Response::Begun {
                session: SessionId(1),
                secret: Secret([1; 16]),
                lease_ms: 60_000,
                paged: false,
                persistence: farpage_wire::Persistence::Never,
            }),
            other => answer(other),
        };
        if let Some(said) = said {
            stream.send(&said, until).ok()?;
        }
    }
}

fn with_server(answer: impl FnMut(Request) -> Option<Response> + Send, test: impl FnOnce(&Remote)) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let endpoint = format!("tcp://{address}").parse().expect("an endpoint");
    let options = SessionOptions {
        deadline: Duration::from_secs(1),
        ..SessionOptions::default()
    };
    thread::scope(|scope| {
        scope.spawn(|| served(&listener, answer));
        let until = Instant::now() + PATIENCE;
        let remote = Remote::connect(&endpoint, &options, until).expect("a live server");
        test(&remote);
        drop(remote);
    });
}

#[test]
fn a_release_without_an_answer_is_untold_before_anybody_else_has_the_line() {
    let is_asked = AtomicBool::new(false);
    let silent = |request| match request {
        Request::Release { .. } => {
            is_asked.store(true, Ordering::SeqCst);
            None
        }
        _ => Some(Response::Done),
    };
    with_server(silent, |remote| {
        let shared = &remote.shared;
        let untold = shared.untold.lock();
        thread::scope(|scope| {
            let releasing = scope.spawn(|| remote.release(ExtentId(7)).is_ok());
            let begun = Instant::now();
            while !is_asked.load(Ordering::SeqCst) {
                assert!(begun.elapsed() < PATIENCE, "the release does not arrive");
                thread::sleep(Duration::from_millis(1));
            }
            // The server is given up. The only step left is to remember the release.
            let free = shared
                .line
                .try_lock_until(Instant::now() + Duration::from_secs(2))
                .is_some();
            assert!(!free, "somebody else may open the name again");
            drop(untold);
            assert!(releasing.join().expect("no panic"));
            assert_eq!(shared.untold.lock().len(), 1);
            // A silent server is not told of the release.
            shared.untold.lock().clear();
        });
    });
}

#[test]
fn what_a_lost_answer_gave_is_counted_as_often_as_it_is_given_back() {
    let lease = |id| Lease {
        id: ExtentId(id),
        bytes: 4096,
        atomics: false,
        paged: false,
        read_only: false,
    };
    let answers = |request| {
        Some(match request {
            Request::Open { name, .. } if name == "empty" => Response::Opened {
                manifest: Vec::new(),
                extents: Vec::new(),
                versions: Versions::default(),
                vote: Default::default(),
            },
            Request::Open { .. } => Response::Opened {
                manifest: Vec::new(),
                extents: vec![lease(1), lease(2)],
                versions: Versions::default(),
                vote: Default::default(),
            },
            _ => Response::Done,
        })
    };
    with_server(answers, |remote| {
        let shared = &remote.shared;
        let mut line = shared.line.lock();
        line.held = 5;
        let until = Instant::now() + PATIENCE;
        let name = |name: &str| name.to_owned();
        for lost in [
            Request::Open {
                name: name("x"),
                serial: Some(1),
            },
            Request::Open {
                name: name("empty"),
                serial: Some(2),
            },
            Request::Claim {
                name: name("x"),
                replace: false,
            },
        ] {
            shared.untold.lock().push(lost);
            shared.catch_up(&mut line, until).expect("a live server");
            assert_eq!(line.held, 5);
        }
    });
}
