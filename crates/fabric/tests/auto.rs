//! Messages of a machine or a server without RDMA, and the choice of `auto://` there.
//!
//! The rule it keeps: each test runs with the feature `rdma` and without it; tests that need a
//! device, or that there is none, say when they skip.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
    time::Duration,
};

use farpage_fabric::{
    ConnectError, Endpoint, Session, SessionOptions, rdma_devices,
    server::{Listener, ServerThread, SocketAccess},
    sim::SimHost,
};
use farpage_testkit::{rdma, tcp, test_name};

/// Messages of a build without the feature, or of a machine without a device: the state of things
/// and the remedy.
const REASON: [&str; 2] = if cfg!(feature = "rdma") {
    ["no RDMA device found", "modprobe rdma_rxe"]
} else {
    ["built without RDMA", "--features rdma"]
};

fn has_no_device() -> bool {
    let devices = rdma_devices();
    if let Ok(devices) = &devices {
        let test = test_name();
        eprintln!("SKIPPED: {test}: this machine has RDMA: {devices:?}");
    }
    devices.is_err()
}

fn assert_says(text: &str) {
    for part in REASON {
        assert!(text.contains(part), "`{text}` does not say `{part}`");
    }
    assert!(
        text.contains("tcp://"),
        "`{text}` does not name what is left"
    );
}

/// Log of the calling thread, from warnings down.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody panics").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the session that `auto://` makes with a server at `at`, the log, and the server's
/// endpoint.
fn auto(at: &Endpoint) -> (Arc<Session>, String, Endpoint) {
    let host = Arc::new(SimHost::new(1 << 20));
    let mut server = ServerThread::start(at, host).expect("a free port");
    let served = server.endpoint().clone();
    let (Endpoint::Tcp { host, port } | Endpoint::Rdma { host, port }) = served.clone() else {
        panic!("{served} has no port");
    };
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let session = tracing::subscriber::with_default(subscriber, || {
        let options = SessionOptions {
            deadline: Duration::from_secs(5),
            ..SessionOptions::default()
        };
        Session::connect(&Endpoint::Auto { host, port }, &options).expect("a live server")
    });
    let extent = session.grant(4096).expect("room");
    session.release(extent.id).expect("leased");
    server.end().expect("the server ends");
    let log = String::from_utf8(log.0.lock().expect("nobody panics").clone()).expect("text");
    (session, log, served)
}

#[test]
fn what_cannot_be_had_is_refused_with_the_reason_and_the_remedy() {
    if !has_no_device() {
        return;
    }
    let endpoint = "rdma://127.0.0.1:7471".parse().expect("an endpoint");
    assert_says(&rdma_devices().expect_err("there is none"));
    let error = Session::connect(&endpoint, &SessionOptions::default()).expect_err("no RDMA");
    assert!(matches!(error, ConnectError::NoRdma { .. }), "{error:?}");
    assert_says(&error.to_string());
    let error = Listener::bind(&endpoint, SocketAccess::Owner).expect_err("no RDMA");
    assert_says(&error.to_string());
}

#[test]
fn auto_takes_tcp_where_there_is_no_device_and_says_why() {
    if !has_no_device() {
        return;
    }
    let (session, log, served) = auto(&tcp());
    assert_eq!(session.endpoint(), &served);
    assert_says(session.fallback().expect("it is not rdma"));
    assert!(log.contains("WARN") && log.contains("taking tcp"), "{log}");
    assert_says(&log);
}

#[test]
fn auto_takes_tcp_where_only_the_server_has_no_rdma_and_says_why() {
    let Some(Endpoint::Rdma { host, port }) = rdma() else {
        return;
    };
    let (session, log, served) = auto(&Endpoint::Tcp { host, port });
    assert_eq!(session.endpoint(), &served);
    let reason = session.fallback().expect("it is not rdma");
    assert!(reason.contains("rdma://"), "{reason}");
    assert!(log.contains("WARN") && log.contains(reason), "{log}");
}

#[test]
fn auto_takes_rdma_where_both_have_it_and_says_so() {
    let Some(endpoint) = rdma() else { return };
    let (session, log, served) = auto(&endpoint);
    assert_eq!(session.endpoint(), &served);
    assert_eq!(session.fallback(), None);
    assert!(log.contains("taking rdma"), "{log}");
}
