//! A server half survives every input of a peer: that one connection is closed, the others go on.

mod ends;
mod operations;
mod protocol;

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
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ConnectError, ControlError, Endpoint, ExtentId, MAX_OP_BYTES, Op, Secret, Session,
    SessionId, SessionOptions, Verb,
    host::Host,
    server::{BindError, Listener, ServerThread, SocketAccess},
    sim::SimHost,
};

use farpage_wire::{
    Request, Response,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
    data::{ANSWER_HEADER_BYTES, AnswerHeader, OP_HEADER_BYTES, OpHeader, OpKind, Status},
};

const PATIENCE: Duration = Duration::from_secs(20);

struct Server {
    serving: ServerThread,
    host: Arc<SimHost>,
}

impl Server {
    fn start(endpoint: &Endpoint) -> Self {
        Self::start_with(endpoint, Arc::new(SimHost::new(64 << 20)))
    }

    fn start_with(endpoint: &Endpoint, host: Arc<SimHost>) -> Self {
        let served = Arc::clone(&host);
        let serving = ServerThread::start(endpoint, served).expect("a free endpoint");
        Self { serving, host }
    }

    fn tcp() -> Self {
        Self::start(&"tcp://127.0.0.1:0".parse().expect("an endpoint"))
    }

    fn session(&self) -> Arc<Session> {
        Session::connect(self.serving.endpoint(), &options()).expect("a live server")
    }

    fn stranger(&self) -> TcpStream {
        let Endpoint::Tcp { host, port } = self.serving.endpoint() else {
            panic!("strangers come over TCP")
        };
        let stream = TcpStream::connect((host.as_str(), *port)).expect("a live server");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream
    }

    /// Begins a control connection, spoken by hand.
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

    /// Attaches a data connection, spoken by hand, on a line of its own.
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
        self.serving.end().expect("the server ends");
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

/// Asks for an extent of `bytes` bytes, as a client by hand.
fn grant(control: &mut TcpStream, bytes: u64) -> farpage_wire::control::Lease {
    let request = Request::Grant {
        bytes,
        atomics: false,
        serial: None,
    };
    say(control, &request);
    let Response::Granted { extent } = hear(control) else {
        panic!("no grant")
    };
    extent
}

/// Returns a port of this machine for a server by hand, and its endpoint.
fn listener() -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
    (listener, endpoint)
}

/// Reads the server's last bytes until it has closed the connection.
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
