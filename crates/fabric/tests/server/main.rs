//! A server half survives every input of a peer: that one connection is closed, the others go on.

mod ends;
mod operations;
mod protocol;

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ConnectError, ControlError, Endpoint, ExtentId, MAX_OP_BYTES, Op, Secret, Session, SessionId,
    SessionOptions, Verb,
    host::Host,
    server::{BindError, Listener, ServerThread, SocketAccess},
    sim::SimHost,
};

use farpage_testkit::{
    Identity, RawClient, Relay, op,
    raw::{self, closed, header, receive, send},
    tcp, transfer, wait_until,
};
use farpage_wire::{
    Request, Response,
    control::{self, HELLO_BYTES, Hello, Purpose},
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
        Self::start(&tcp())
    }

    fn session(&self) -> Arc<Session> {
        Session::connect(self.serving.endpoint(), &options()).expect("a live server")
    }

    fn stranger(&self) -> RawClient {
        RawClient::connect(self.serving.endpoint()).expect("a live server")
    }

    /// Begins a control connection, spoken by hand.
    fn begin(&self) -> (RawClient, Identity) {
        RawClient::session(self.serving.endpoint()).expect("a live server")
    }

    /// Attaches a data connection, spoken by hand, on a line of its own.
    fn attach(&self, own: Identity) -> RawClient {
        static LINES: AtomicU64 = AtomicU64::new(0);
        self.attach_to(own, LINES.fetch_add(1, Ordering::Relaxed))
    }

    fn attach_to(&self, own: Identity, line: u64) -> RawClient {
        RawClient::data(self.serving.endpoint(), own, line).expect("a live server")
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

/// Returns a port of this machine for a server by hand, and its endpoint.
fn listener() -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"))
        .parse()
        .expect("an endpoint");
    (listener, endpoint)
}

fn write_and_read(session: &Arc<Session>, extent: ExtentId) {
    let mut channel = session.channel::<Vec<u8>>().expect("a live server");
    for verb in [Verb::Write, Verb::Read] {
        let op = op(verb, extent, 0, vec![5; 4096]);
        transfer(&mut *channel, op).expect("leased memory");
    }
}
