//! A server half survives whatever a peer sends: that one connection is closed, the others go on.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ConnectError, ControlError, Endpoint, ExtentId, MAX_OP_BYTES, Op, Secret, Session,
    SessionId, SessionOptions, Verb,
    host::Host,
    server::{BindError, Listener, Shutdown, SocketAccess, Traffic, serve},
    sim::SimHost,
};
use farpage_wire::{
    Request, Response,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
    data::{ANSWER_HEADER_BYTES, AnswerHeader, OP_HEADER_BYTES, OpHeader, OpKind, Status},
};

const PATIENCE: Duration = Duration::from_secs(20);

struct Server {
    endpoint: Endpoint,
    host: Arc<SimHost>,
    traffic: Arc<Traffic>,
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(endpoint: &Endpoint) -> Self {
        Self::start_with(endpoint, Arc::new(SimHost::new(64 << 20)))
    }

    fn start_with(endpoint: &Endpoint, host: Arc<SimHost>) -> Self {
        let listener = Listener::bind(endpoint, SocketAccess::Owner).expect("a free endpoint");
        let endpoint = listener.endpoint().clone();
        let (traffic, shutdown) = (
            Arc::<Traffic>::default(),
            Shutdown::new().expect("descriptors"),
        );
        let (host2, traffic2, switch) = (Arc::clone(&host), Arc::clone(&traffic), shutdown.clone());
        let thread = thread::spawn(move || serve(listener, host2, traffic2, switch));
        Self {
            endpoint,
            host,
            traffic,
            shutdown,
            thread: Some(thread),
        }
    }

    fn tcp() -> Self {
        Self::start(&"tcp://127.0.0.1:0".parse().expect("an endpoint"))
    }

    fn session(&self) -> Arc<Session> {
        Session::connect(&self.endpoint, &options()).expect("a live server")
    }

    fn stranger(&self) -> TcpStream {
        let Endpoint::Tcp { host, port } = &self.endpoint else {
            panic!("strangers come over TCP")
        };
        let stream = TcpStream::connect((host.as_str(), *port)).expect("a live server");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream
    }

    /// A control connection spoken by hand.
    fn begin(&self) -> (TcpStream, SessionId, Secret) {
        let mut stream = self.stranger();
        greet(&mut stream, Purpose::Control);
        say(
            &mut stream,
            &Request::Begin {
                client: "by hand".to_owned(),
                resume: None,
            },
        );
        match hear(&mut stream) {
            Response::Begun {
                session, secret, ..
            } => (stream, session, secret),
            other => panic!("{other:?}"),
        }
    }

    /// A data connection spoken by hand, on a line of its own.
    fn attach(&self, session: SessionId, secret: Secret) -> TcpStream {
        static LINES: AtomicU64 = AtomicU64::new(0);
        self.attach_to(session, secret, LINES.fetch_add(1, Ordering::Relaxed))
    }

    fn attach_to(&self, session: SessionId, secret: Secret, line: u64) -> TcpStream {
        let mut stream = self.stranger();
        greet(&mut stream, Purpose::Data);
        let attach = Request::Attach {
            session,
            secret,
            line,
        };
        say(&mut stream, &attach);
        assert_eq!(hear(&mut stream), Response::Done);
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.begin();
        self.thread
            .take()
            .expect("stopped once")
            .join()
            .expect("the server ends");
    }
}

fn options() -> SessionOptions {
    SessionOptions {
        deadline: Duration::from_secs(2),
        ..SessionOptions::default()
    }
}

fn greet(stream: &mut (impl Read + Write), purpose: Purpose) {
    stream
        .write_all(&Hello::new(purpose).encode())
        .expect("a live server");
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).expect("a hello");
    assert_eq!(Hello::decode(&bytes), Ok(Hello::new(purpose)));
}

fn say(stream: &mut impl Write, request: &Request) {
    stream
        .write_all(&control::encode(request).expect("short"))
        .expect("a live server");
}

fn hear(stream: &mut impl Read) -> Response {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).expect("an answer");
    let mut body = vec![0; control::frame_bytes(prefix, 1 << 20).expect("short")];
    stream.read_exact(&mut body).expect("an answer");
    control::decode(&body).expect("an answer")
}

/// Reads what the server still says until it has closed the connection.
fn closed(mut stream: TcpStream, story: &str) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{story}: the server did not close the connection: {error}"),
    }
    said
}

fn write_and_read(session: &Arc<Session>, extent: ExtentId) {
    let mut channel = session.channel::<Vec<u8>>().expect("a live server");
    for verb in [Verb::Write, Verb::Read] {
        let op = Op {
            tag: 0,
            verb,
            extent,
            offset: 0,
            len: 4096,
            buf: vec![5; 4096],
        };
        channel.post(op).expect("room");
        finish(&mut *channel).expect("leased memory");
    }
}

fn finish(channel: &mut dyn Channel<Vec<u8>>) -> Result<(), farpage_fabric::ChannelError> {
    let begun = Instant::now();
    let mut done = Vec::new();
    while channel.poll(&mut done) == 0 {
        assert!(begun.elapsed() < PATIENCE, "the operation did not end");
        thread::yield_now();
    }
    done.remove(0).result
}

fn until(story: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{story}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn shared_memory_copies_one_operation_in_each_poll() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&Endpoint::Shm(folder.path().join("socket")));
    let session = server.session();
    let extent = session.grant(1 << 20).expect("room").id;
    let op = |verb, value| Op {
        tag: u64::from(value),
        verb,
        extent,
        offset: 0,
        len: 4096,
        buf: vec![value; 4096],
    };
    let [mut writer, mut reader] = [(); 2].map(|()| session.channel::<Vec<u8>>().expect("alive"));
    let mut remote_value = || {
        reader.post(op(Verb::Read, 0xee)).expect("room");
        let mut done = Vec::new();
        assert_eq!(reader.poll(&mut done), 1);
        done[0].buf[4095]
    };
    for value in [7, 9] {
        writer.post(op(Verb::Write, value)).expect("room");
    }
    assert_eq!(remote_value(), 0, "posted, not polled");
    let mut done = Vec::new();
    for value in [7, 9] {
        assert!(
            writer
                .wait()
                .until
                .is_some_and(|until| until <= Instant::now())
        );
        assert_eq!(writer.poll(&mut done), 1);
        assert_eq!(done.pop().expect("ended").tag, u64::from(value));
        assert_eq!(remote_value(), value);
    }
    assert_eq!((writer.in_flight(), writer.wait().until), (0, None));
}

#[test]
fn strangers_that_speak_something_else_are_closed_and_others_go_on() {
    let server = Server::tcp();
    let session = server.session();
    let extent = session.grant(1 << 20).expect("room").id;
    let hello = Hello::new(Purpose::Control).encode();
    let mut bad_purpose = hello;
    bad_purpose[10] = 9;
    let frame = |request: &Request| control::encode(request).expect("short");
    let attach = frame(&Request::Attach {
        session: SessionId(1),
        secret: Secret([0; 16]),
        line: 0,
    });
    let stories: [(&str, Vec<u8>); 7] = [
        (
            "another protocol",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        ),
        ("a bad hello", bad_purpose.to_vec()),
        ("a huge first frame", [&hello[..], &[0xff; 4]].concat()),
        (
            "garbage for a request",
            [&hello[..], &[3, 0, 0, 0, 0xff, 0xff, 0xff]].concat(),
        ),
        (
            "a request before the session",
            [
                hello.to_vec(),
                frame(&Request::Grant {
                    bytes: 1,
                    atomics: false,
                    serial: None,
                }),
            ]
            .concat(),
        ),
        (
            "attach on a control connection",
            [hello.to_vec(), attach.clone()].concat(),
        ),
        (
            "attach with a wrong secret",
            [Hello::new(Purpose::Data).encode().to_vec(), attach].concat(),
        ),
    ];
    for (story, bytes) in stories {
        let mut stream = server.stranger();
        stream.write_all(&bytes).expect("the server listens");
        closed(stream, story);
        write_and_read(&session, extent);
    }
}

#[test]
fn another_version_is_told_which_one_the_server_speaks() {
    let server = Server::tcp();
    let mut stream = server.stranger();
    let mut hello = Hello::new(Purpose::Control).encode();
    hello[8] = 99;
    stream.write_all(&hello).expect("the server listens");
    assert_eq!(
        closed(stream, "version 99"),
        Hello::new(Purpose::Control).encode()
    );
}

#[test]
fn a_client_of_another_version_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        hello[8] = 99;
        stream.write_all(&hello).expect("a client");
    });
    let error = Session::connect(&endpoint, &options()).expect_err("version 99");
    assert!(matches!(error, ConnectError::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("version 99"), "{error}");
    server.join().expect("the server ends");
}

#[test]
fn a_stranger_that_says_nothing_is_closed_in_time() {
    let server = Server::tcp();
    let begun = Instant::now();
    closed(server.stranger(), "silence");
    assert!(
        begun.elapsed() > Duration::from_millis(500),
        "a slow network gets its time"
    );
}

#[test]
fn hostile_operations_end_their_connection_and_touch_nothing() {
    let server = Server::tcp();
    let victim = server.session();
    let theirs = victim.grant(1 << 20).expect("room").id;
    write_and_read(&victim, theirs);
    let (mut control, session, secret) = server.begin();
    say(
        &mut control,
        &Request::Grant {
            bytes: 10_000,
            atomics: false,
            serial: None,
        },
    );
    let Response::Granted { extent: own } = hear(&mut control) else {
        panic!("no grant")
    };
    // A READ, which would be answered if it were accepted.
    let good = OpHeader {
        kind: OpKind::Read,
        following: 0,
        sequence: 0,
        len: 4096,
        extent: own.id,
        offset: 0,
    };
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.encode();
        bytes[at] = byte;
        bytes.to_vec()
    };
    let two = [
        OpHeader {
            following: 1,
            ..good
        }
        .encode(),
        OpHeader {
            sequence: 1,
            following: 1,
            ..good
        }
        .encode(),
    ];
    let stories: [(&str, Vec<u8>); 10] = [
        ("bad magic", changed(0, 0)),
        ("an unknown operation", changed(4, 7)),
        ("reserved bytes", changed(5, 1)),
        ("a batch too long", changed(7, 0xff)),
        (
            "too many bytes",
            OpHeader {
                len: MAX_OP_BYTES + 1,
                ..good
            }
            .encode()
            .to_vec(),
        ),
        ("no bytes", OpHeader { len: 0, ..good }.encode().to_vec()),
        (
            "an address that wraps",
            OpHeader {
                offset: u64::MAX - 10,
                ..good
            }
            .encode()
            .to_vec(),
        ),
        (
            "the wrong sequence",
            OpHeader {
                sequence: 5,
                ..good
            }
            .encode()
            .to_vec(),
        ),
        ("a batch that does not count down", two.concat()),
        (
            "half a header",
            good.encode()[..OP_HEADER_BYTES / 2].to_vec(),
        ),
    ];
    for (story, bytes) in stories {
        let mut stream = server.attach(session, secret);
        stream.write_all(&bytes).expect("the server listens");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("connected");
        assert_eq!(closed(stream, story), [], "{story}");
    }
    let write = OpHeader {
        kind: OpKind::Write,
        ..good
    };
    for (story, header) in [
        (
            "beyond the extent",
            OpHeader {
                offset: 9_000,
                ..write
            },
        ),
        (
            "somebody else's extent",
            OpHeader {
                extent: theirs,
                ..write
            },
        ),
        (
            "no extent",
            OpHeader {
                extent: ExtentId(u64::MAX),
                ..write
            },
        ),
        (
            "reading somebody else's extent",
            OpHeader {
                extent: theirs,
                ..good
            },
        ),
    ] {
        let mut stream = server.attach(session, secret);
        stream
            .write_all(&header.encode())
            .expect("the server listens");
        // The payload of a refused WRITE must not push the refusal out of the socket.
        stream.write_all(&[9; 4096]).expect("the server reads it");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("connected");
        let answer = closed(stream, story);
        assert_eq!((answer.len(), answer[4]), (16, 1), "{story}");
    }
    let memory = server
        .host
        .extent(SessionId(1), theirs)
        .expect("the victim's lease");
    let mut bytes = [0; 4096];
    memory.copy_out(0, &mut bytes).expect("in range");
    assert_eq!(bytes, [5; 4096]);
    write_and_read(&victim, theirs);
    // Counted after the answer is sent.
    let counted = || (server.traffic.bytes_read(), server.traffic.bytes_written()) == (8192, 8192);
    until(
        "refused operations are not counted, and the others are",
        counted,
    );
}

#[test]
fn data_connections_end_with_their_session() {
    let server = Server::tcp();
    let (mut control, session, secret) = server.begin();
    let data = server.attach(session, secret);
    say(&mut control, &Request::Goodbye);
    assert_eq!(hear(&mut control), Response::Done);
    closed(data, "an idle data connection after the goodbye");
}

#[test]
fn a_slow_reader_is_not_sent_what_the_next_holder_writes() {
    let server = Server::tcp();
    let (mut control, session, secret) = server.begin();
    say(
        &mut control,
        &Request::Grant {
            bytes: 2 << 20,
            atomics: false,
            serial: None,
        },
    );
    let Response::Granted { extent } = hear(&mut control) else {
        panic!("no grant")
    };
    let publish = Request::Publish {
        name: "x".to_owned(),
        manifest: Vec::new(),
        extents: vec![extent.id],
    };
    say(&mut control, &publish);
    assert_eq!(hear(&mut control), Response::Done);
    // Asks for far more than the sockets hold, and does not read it.
    let mut data = server.attach(session, secret);
    let count = 64;
    for i in 0..count {
        let header = OpHeader {
            kind: OpKind::Read,
            following: count - 1 - i,
            sequence: i.into(),
            len: 2 << 20,
            extent: extent.id,
            offset: 0,
        };
        data.write_all(&header.encode()).expect("headers fit");
    }
    // Until the sockets are full: what is being sent at this moment may still go out.
    let mut waste = vec![0; 128 << 20];
    let mut arrived = || data.peek(&mut waste).expect("answers");
    let mut before = 0;
    while before != arrived() {
        before = arrived();
        thread::sleep(Duration::from_millis(200));
    }
    say(&mut control, &Request::Release { extent: extent.id });
    assert_eq!(hear(&mut control), Response::Done);
    let next = server.session();
    next.open("x").expect("nobody holds it");
    let mut channel = next.channel::<Vec<u8>>().expect("alive");
    let op = Op {
        tag: 0,
        verb: Verb::Write,
        extent: extent.id,
        offset: 0,
        len: 2 << 20,
        buf: vec![0xbb; 2 << 20],
    };
    assert!(channel.post(op).is_ok());
    finish(&mut *channel).expect("leased");
    // One after another, whatever had been sent before the lease ended may arrive; then comes the
    // end.
    let sent = closed(data, "a READ whose lease has ended");
    let headers = usize::from(count) * ANSWER_HEADER_BYTES;
    let foreign = sent.iter().filter(|&&byte| byte == 0xbb).count();
    assert!(foreign <= headers, "{foreign} bytes of another client");
}

#[test]
fn a_half_sent_write_gives_an_extent_up_when_its_lease_ends() {
    let server = Server::tcp();
    let (mut control, session, secret) = server.begin();
    say(
        &mut control,
        &Request::Grant {
            bytes: 4096,
            atomics: false,
            serial: None,
        },
    );
    let Response::Granted { extent } = hear(&mut control) else {
        panic!("no grant")
    };
    let mut data = server.attach(session, secret);
    let header = OpHeader {
        kind: OpKind::Write,
        following: 0,
        sequence: 0,
        len: 4096,
        extent: extent.id,
        offset: 0,
    };
    data.write_all(&header.encode()).expect("a header fits");
    data.write_all(&[1; 100]).expect("a part fits");
    let memory = server.host.extent(session, extent.id).expect("leased");
    until("the WRITE has begun", || memory.resident_bytes() > 0);
    say(&mut control, &Request::Release { extent: extent.id });
    assert_eq!(hear(&mut control), Response::Done);
    closed(data, "a WRITE whose lease has ended");
    assert_eq!(Arc::strong_count(&memory), 1, "nobody keeps the memory");
}

#[test]
fn a_write_that_was_cut_off_never_lands_after_its_line_has_a_new_connection() {
    let server = Server::tcp();
    let (mut control, session, secret) = server.begin();
    say(
        &mut control,
        &Request::Grant {
            bytes: 4096,
            atomics: false,
            serial: None,
        },
    );
    let Response::Granted { extent } = hear(&mut control) else {
        panic!("no grant")
    };
    let memory = server.host.extent(session, extent.id).expect("leased");
    for round in 1..=20 {
        // A network that lets half of a WRITE through, and the rest whenever it likes.
        let mut old = server.attach_to(session, secret, 7);
        let other = server.attach_to(session, secret, 8);
        let header = OpHeader {
            kind: OpKind::Write,
            following: 0,
            sequence: 0,
            len: 4096,
            extent: extent.id,
            offset: 0,
        };
        old.write_all(&header.encode()).expect("a header fits");
        old.write_all(&[round; 100]).expect("a part fits");
        let byte_at = |offset| {
            let mut byte = [0];
            memory.copy_out(offset, &mut byte).expect("leased");
            byte[0]
        };
        until("the WRITE has begun", || byte_at(99) == round);
        let mut new = server.attach_to(session, secret, 7);
        // The client has been answered: the place may be used for something else.
        memory.copy_in(0, &[0xee; 4096]).expect("leased");
        // Nobody may read it any more, so that writing it may fail.
        let _ = old.write_all(&[round; 3996]);
        closed(old, "a connection whose line has a newer one");
        new.write_all(&header.encode()).expect("a header fits");
        assert!(
            (0..4096).all(|offset| byte_at(offset) == 0xee),
            "round {round}: a WRITE landed late"
        );
        new.write_all(&[0; 4096]).expect("it fits");
        let mut answer = [0; ANSWER_HEADER_BYTES];
        new.read_exact(&mut answer).expect("the new one is served");
        drop((new, other));
    }
}

#[test]
fn a_connection_lost_within_the_lease_is_resumed_with_its_extents() {
    // A relay stands for a network that breaks.
    let server = Server::tcp();
    let Endpoint::Tcp { host, port } = server.endpoint.clone() else {
        panic!("tcp")
    };
    let relay = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", relay.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
    let lines = Arc::new(std::sync::Mutex::new(Vec::new()));
    let held = Arc::clone(&lines);
    thread::spawn(move || {
        for client in relay.incoming() {
            let client = client.expect("a client");
            let Ok(upstream) = TcpStream::connect((host.as_str(), port)) else {
                return;
            };
            for (from, to) in [(&client, &upstream), (&upstream, &client)] {
                let (mut from, mut to) = (
                    from.try_clone().expect("a socket"),
                    to.try_clone().expect("a socket"),
                );
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
            held.lock().expect("no panic").push(client);
        }
    });
    let session = Session::connect(&endpoint, &options()).expect("a live server");
    let extent = session.grant(1 << 20).expect("room").id;
    write_and_read(&session, extent);
    let mut old = session.channel::<Vec<u8>>().expect("a live server");
    for line in lines.lock().expect("no panic").drain(..) {
        // Those of closed channels are gone already.
        let _ = line.shutdown(std::net::Shutdown::Both);
    }
    old.post(Op {
        tag: 0,
        verb: Verb::Read,
        extent,
        offset: 0,
        len: 10,
        buf: vec![0; 10],
    })
    .expect("room");
    let error = finish(&mut *old).expect_err("the network broke");
    assert!(error.is_transient(), "{error}");
    until("the session is resumed", || session.stat().is_ok());
    write_and_read(&session, extent);
    assert_eq!(server.host.stat().sessions, 1);
}

#[test]
fn a_dropped_session_is_gone_when_the_drop_is_over() {
    let folder = tempfile::tempdir().expect("a folder");
    for endpoint in [
        Endpoint::Shm(folder.path().join("socket")),
        "tcp://127.0.0.1:0".parse().expect("an endpoint"),
    ] {
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
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
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
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
    // Begins a session, hears the first renewal and says nothing more.
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        stream.write_all(&hello).expect("a client that listens");
        let mut requests = stream.try_clone().expect("a socket");
        let mut heard = move || {
            let mut prefix = [0; PREFIX_BYTES];
            requests.read_exact(&mut prefix).expect("a request");
            let mut body = vec![0; u32::from_le_bytes(prefix) as usize];
            requests.read_exact(&mut body).expect("a request");
            control::decode::<Request>(&body).expect("a request")
        };
        assert!(matches!(heard(), Request::Begin { .. }));
        let begun = Response::Begun {
            session: SessionId(1),
            secret: Secret([0; 16]),
            lease_ms: 30,
        };
        stream
            .write_all(&control::encode(&begun).expect("short"))
            .expect("a client that listens");
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
    let (_control, session, secret) = server.begin();
    let _idle = server.attach(session, secret);
    let mut half = server.attach(session, secret);
    half.write_all(&[1; 3]).expect("connected");
    let begun = Instant::now();
    drop(server);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_refusal_reaches_a_client_that_is_slow_to_read_and_still_sending() {
    let server = Server::tcp();
    let (mut control, session, secret) = server.begin();
    say(
        &mut control,
        &Request::Grant {
            bytes: 2 << 20,
            atomics: false,
            serial: None,
        },
    );
    let Response::Granted { extent } = hear(&mut control) else {
        panic!("no grant")
    };
    let mut stream = server.attach(session, secret);
    let read = |i: u16| OpHeader {
        kind: OpKind::Read,
        following: 8 - i,
        sequence: u32::from(i),
        len: 2 << 20,
        extent: extent.id,
        offset: 0,
    };
    for i in 0..8 {
        stream.write_all(&read(i).encode()).expect("connected");
    }
    let refused = OpHeader {
        kind: OpKind::Write,
        extent: ExtentId(u64::MAX),
        ..read(8)
    };
    stream.write_all(&refused.encode()).expect("connected");
    // Never read by the server as anything, but not a reason to lose what it has said.
    stream.write_all(&[9; 100_000]).expect("connected");
    let mut answers = vec![0; 8 * (ANSWER_HEADER_BYTES + (2 << 20))];
    stream
        .read_exact(&mut answers)
        .expect("the READs before the refusal");
    let mut answer = [0; ANSWER_HEADER_BYTES];
    stream.read_exact(&mut answer).expect("the refusal");
    assert_eq!(
        AnswerHeader::decode(&answer),
        Ok(AnswerHeader {
            status: Status::Refused,
            sequence: 8,
            len: 0
        })
    );
}

#[test]
fn a_client_that_dies_without_a_goodbye_holds_nothing_over_shared_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let server = Server::start(&Endpoint::Shm(path.clone()));
    for _ in 0..200 {
        let mut stream = UnixStream::connect(&path).expect("a live server");
        greet(&mut stream, Purpose::Control);
        say(
            &mut stream,
            &Request::Begin {
                client: "doomed".to_owned(),
                resume: None,
            },
        );
        hear(&mut stream);
        say(
            &mut stream,
            &Request::Grant {
                bytes: 1 << 20,
                atomics: false,
                serial: None,
            },
        );
        assert!(matches!(hear(&mut stream), Response::Granted { .. }));
    }
    until("200 dead clients are forgotten", || {
        let stat = server.host.stat();
        (stat.sessions, stat.granted_bytes) == (0, 0)
    });
}

#[test]
fn a_server_that_answers_nonsense_ends_the_channel_with_a_reason() {
    let good = AnswerHeader {
        status: Status::Ok,
        sequence: 0,
        len: 4096,
    };
    let stories: [(&str, Vec<u8>, &str); 5] = [
        (
            "another sequence",
            AnswerHeader {
                sequence: 1,
                ..good
            }
            .encode()
            .to_vec(),
            "out of order",
        ),
        (
            "another length",
            AnswerHeader { len: 4095, ..good }.encode().to_vec(),
            "another length",
        ),
        ("garbage", vec![0x55; ANSWER_HEADER_BYTES], "magic"),
        ("half an answer", good.encode()[..9].to_vec(), "closed"),
        (
            "half a payload",
            [&good.encode()[..], &[0; 2048]].concat(),
            "closed",
        ),
    ];
    // The goodbye is not answered either.
    let hurried = SessionOptions {
        deadline: Duration::from_millis(300),
        ..options()
    };
    for (story, answer, reason) in stories {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
            .parse()
            .expect("an endpoint");
        let server = thread::spawn(move || {
            let accept = |purpose: Purpose, response: Response| {
                let (mut stream, _) = listener.accept().expect("a client");
                greet(&mut stream, purpose);
                let mut prefix = [0; PREFIX_BYTES];
                stream.read_exact(&mut prefix).expect("a request");
                let mut body = vec![0; control::frame_bytes(prefix, 1 << 10).expect("short")];
                stream.read_exact(&mut body).expect("a request");
                stream
                    .write_all(&control::encode(&response).expect("short"))
                    .expect("a client");
                stream
            };
            let begun = Response::Begun {
                session: SessionId(1),
                secret: Secret([1; 16]),
                lease_ms: 60_000,
            };
            let control = accept(Purpose::Control, begun);
            let mut data = accept(Purpose::Data, Response::Done);
            let mut header = [0; OP_HEADER_BYTES];
            data.read_exact(&mut header).expect("an operation");
            data.write_all(&answer).expect("a client");
            drop(data);
            // Kept until the client leaves, so that only the data connection breaks.
            closed(control, "the client leaves");
        });
        let session = Session::connect(&endpoint, &hurried).expect("it speaks the protocol");
        let mut channel = session
            .channel::<Vec<u8>>()
            .expect("it speaks the protocol");
        let op = Op {
            tag: 0,
            verb: Verb::Read,
            extent: ExtentId(1),
            offset: 0,
            len: 4096,
            buf: vec![0; 4096],
        };
        channel.post(op).expect("room");
        let error = finish(&mut *channel).expect_err(story).to_string();
        assert!(error.contains(reason), "{story}: {error}");
        drop((channel, session));
        server.join().expect("the server ends");
    }
}
