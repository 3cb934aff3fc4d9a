//! Sessions and servers that end, are lost, come back or fall silent.

use super::*;

#[test]
fn a_connection_lost_within_the_lease_is_resumed_with_its_extents() {
    // A relay stands for a network that breaks.
    let server = Server::tcp();
    let relay = Relay::to(&server.serving.endpoint().to_string());
    let endpoint = relay.url.parse().expect("an endpoint");
    let session = Session::connect(&endpoint, &options()).expect("a live server");
    let extent = session.grant(1 << 20).expect("room").id;
    write_and_read(&session, extent);
    let mut old = session.channel::<Vec<u8>>().expect("a live server");
    relay.close();
    let lost = transfer(&mut *old, op(Verb::Read, extent, 0, vec![0; 10]));
    let error = lost.expect_err("the network broke");
    assert!(error.is_transient(), "{error}");
    wait_until("the session is resumed", || session.stat().is_ok());
    write_and_read(&session, extent);
    assert_eq!(server.host.stat().sessions, 1);
}

#[test]
fn a_dropped_session_is_gone_when_the_drop_is_over() {
    let folder = tempfile::tempdir().expect("a folder");
    for endpoint in [Endpoint::Shm(folder.path().join("socket")), tcp()] {
        let server = Server::start(&endpoint);
        for _ in 0..50 {
            let session = server.session();
            write_and_read(&session, session.grant(1 << 20).expect("room").id);
            drop(session);
            let stat = server.host.stat();
            assert_eq!((stat.sessions, stat.granted_bytes), (0, 0), "{endpoint}");
        }
    }
}

#[test]
fn a_server_that_falls_silent_ends_calls_at_their_deadline() {
    let (listener, endpoint) = listener();
    let begun = Instant::now();
    let error = Session::connect(
        &endpoint,
        &SessionOptions {
            deadline: Duration::from_millis(200),
            ..options()
        },
    );
    assert!(matches!(error, Err(ConnectError::Unreachable { .. })));
    assert!(begun.elapsed() < PATIENCE);
    drop(listener);
}

#[test]
fn dropping_a_session_does_not_wait_for_a_server_that_is_stuck() {
    let (listener, endpoint) = listener();
    // The server begins a session, hears the first renewal and says nothing more.
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        stream.write_all(&hello).expect("a client that listens");
        let mut requests = stream.try_clone().expect("a socket");
        let mut heard = move || receive::<Request>(&mut requests).expect("a request");
        assert!(matches!(heard(), Request::Begin { .. }));
        let begun = Response::Begun {
            session: SessionId(1),
            secret: Secret([0; 16]),
            lease_ms: 30,
            paged: false,
            persistence: farpage_wire::Persistence::Never,
        };
        send(&mut stream, &begun).expect("a client that listens");
        assert_eq!(heard(), Request::Renew);
        stream
    });
    let options = SessionOptions {
        deadline: Duration::from_secs(60),
        ..options()
    };
    let session = Session::connect(&endpoint, &options).expect("it begins");
    let stuck = server.join().expect("it was renewed");
    let begun = Instant::now();
    drop(session);
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    drop(stuck);
}

#[test]
fn death_over_shared_memory_is_typed_for_calls_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&Endpoint::Shm(folder.path().join("socket")));
    let session = server.session();
    drop(server);
    let error = session.stat().expect_err("the server is gone");
    assert!(
        matches!(error, ControlError::Disconnected { .. }),
        "{error}"
    );
}

#[test]
fn a_socket_of_a_dead_server_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let endpoint = Endpoint::Shm(path.clone());
    drop(UnixListener::bind(&path).expect("a free path"));
    assert!(path.exists(), "a server that was killed leaves its socket");
    for (access, mode) in [(SocketAccess::Owner, 0o600), (SocketAccess::Group, 0o660)] {
        let listener = Listener::bind(&endpoint, access).expect("a stale socket is replaced");
        let permissions = fs::metadata(&path).expect("bound").permissions();
        assert_eq!(permissions.mode() & 0o777, mode);
        assert!(matches!(
            Listener::bind(&endpoint, access),
            Err(BindError::InUse { .. })
        ));
        drop(listener);
        assert!(!path.exists(), "an orderly end leaves nothing");
    }
    fs::write(&path, "precious").expect("a folder");
    assert!(matches!(
        Listener::bind(&endpoint, SocketAccess::Owner),
        Err(BindError::NotASocket { .. })
    ));
    assert_eq!(fs::read(&path).expect("untouched"), b"precious");
}

#[test]
fn shutdown_ends_busy_and_idle_connections_in_bounded_time() {
    let server = Server::tcp();
    let (_control, own) = server.begin();
    let _idle = server.attach(own);
    let mut half = server.attach(own);
    half.write_all(&[1; 3]).expect("connected");
    let begun = Instant::now();
    drop(server);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}
