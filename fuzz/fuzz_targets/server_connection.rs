//! A real server fed with arbitrary bytes on a connection, at several depths of the protocol: it neither ends nor
//! keeps anything that the connection borrowed.
//!
//! The first byte chooses the fabric and how much of the protocol is right before the rest is sent.
//! Run: `cargo +nightly fuzz run server_connection -- -timeout=20`; a bounded version runs with the tests of
//! `farpage-memserver` (`hostile.rs`).
#![no_main]

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixStream,
    sync::OnceLock,
    time::Duration,
};

use farpage_memserver::{RunningServer, Server};
use farpage_wire::{
    Endpoint, Request, Response,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let endpoint = &server().endpoints()[usize::from(choice & 1)];
    // The fuzzer's hook ends the process when any thread panics, the server's included.
    let _ = play(endpoint, choice >> 1, rest);
    let mut session = begin(endpoint).expect("the server still serves");
    session.say(&Request::Goodbye).ok();
});

fn play(endpoint: &Endpoint, depth: u8, bytes: &[u8]) -> std::io::Result<()> {
    let mut stream = match depth % 4 {
        0 => Stream::connect(endpoint)?,
        1 => greet(endpoint, Purpose::Control)?,
        2 => begin(endpoint)?,
        _ => attach(endpoint)?,
    };
    stream.write(bytes)?;
    stream.finish();
    Ok(())
}

fn server() -> &'static RunningServer {
    static SERVER: OnceLock<RunningServer> = OnceLock::new();
    SERVER.get_or_init(|| {
        let socket = tempfile::tempdir().expect("a directory").keep().join("s");
        Server::builder()
            .listen(
                format!("shm://{}", socket.display())
                    .parse()
                    .expect("an endpoint"),
            )
            .listen("tcp://127.0.0.1:0".parse().expect("an endpoint"))
            .capacity(64 << 20)
            .lease(Duration::from_secs(1))
            .start()
            .expect("a server")
    })
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn connect(endpoint: &Endpoint) -> std::io::Result<Self> {
        let patience = Some(Duration::from_secs(10));
        Ok(match endpoint {
            Endpoint::Shm(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(patience)?;
                Self::Unix(stream)
            }
            Endpoint::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port))?;
                stream.set_read_timeout(patience)?;
                Self::Tcp(stream)
            }
            other => unreachable!("the server listens on shm and tcp, not {other}"),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(bytes),
            Self::Tcp(stream) => stream.write_all(bytes),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::Unix(stream) => stream.read_exact(bytes),
            Self::Tcp(stream) => stream.read_exact(bytes),
        }
    }

    fn say(&mut self, request: &Request) -> std::io::Result<Response> {
        self.write(&control::encode(request).expect("short"))?;
        let mut prefix = [0; PREFIX_BYTES];
        self.read(&mut prefix)?;
        let mut body =
            vec![0; control::frame_bytes(prefix, control::MAX_FRAME_BYTES).expect("from a server")];
        self.read(&mut body)?;
        Ok(control::decode(&body).expect("from a server"))
    }

    /// Sends no more and waits until the server has closed its side.
    fn finish(mut self) {
        let _ = match &self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
        let mut byte = [0; 4096];
        while self.read(&mut byte).is_ok() {}
    }
}

fn greet(endpoint: &Endpoint, purpose: Purpose) -> std::io::Result<Stream> {
    let mut stream = Stream::connect(endpoint)?;
    stream.write(&Hello::new(purpose).encode())?;
    stream.read(&mut [0; HELLO_BYTES])?;
    Ok(stream)
}

fn begin(endpoint: &Endpoint) -> std::io::Result<Stream> {
    let mut stream = greet(endpoint, Purpose::Control)?;
    stream.say(&Request::Begin {
        client: "fuzz".to_owned(),
        resume: None,
    })?;
    Ok(stream)
}

/// A data connection of a session that has one extent, on TCP; elsewhere a session.
fn attach(endpoint: &Endpoint) -> std::io::Result<Stream> {
    let mut control = greet(endpoint, Purpose::Control)?;
    let begun = control.say(&Request::Begin {
        client: "fuzz".to_owned(),
        resume: None,
    })?;
    let Response::Begun {
        session, secret, ..
    } = begun
    else {
        return Ok(control);
    };
    control.say(&Request::Grant { bytes: 1 << 16 })?;
    if matches!(endpoint, Endpoint::Shm(_)) {
        return Ok(control);
    }
    let mut data = greet(endpoint, Purpose::Data)?;
    data.say(&Request::Attach { session, secret })?;
    Ok(data)
}
