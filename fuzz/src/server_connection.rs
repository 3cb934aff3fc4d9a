//! A real server fed with arbitrary bytes on a connection, at several depths of the protocol: it
//! neither ends nor keeps anything that the connection borrowed.
//!
//! The first byte chooses the fabric and how much of the protocol is right before the rest is sent.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixStream,
    panic,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use farpage_memserver::{RunningServer, Server};
use farpage_wire::{
    Endpoint, ExtentId, Request, Response,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
    data::{OpHeader, OpKind},
};

/// Plays a client that says `bytes`, then checks that the server still serves an honest one.
pub fn run(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let endpoint = &server().endpoints()[usize::from(choice & 1)];
    // The server decides the fate of the stranger's connection: a reset is as good as an answer.
    let _ = play(endpoint, choice >> 1, rest);
    let mut honest = greet(endpoint, Purpose::Control).expect("the server still serves");
    let begin = honest.say(&hello()).expect("the server still answers");
    assert!(
        matches!(begin, Response::Begun { .. } | Response::Refused(_)),
        "{begin:?}"
    );
    if matches!(begin, Response::Begun { .. }) {
        honest
            .say(&Request::Goodbye)
            .expect("the server still answers");
    }
    assert_eq!(PANICS.load(Relaxed), 0, "a thread of the server panicked");
}

/// Number of panics of any thread: those of the server would go unnoticed.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Makes inputs for each depth: an empty one, frames, and a whole operation for a data connection.
pub fn seeds() -> Vec<Vec<u8>> {
    let frame = |request: &Request| control::encode(request).expect("short");
    let op = OpHeader {
        kind: OpKind::Write,
        following: 0,
        sequence: 0,
        len: 64,
        extent: ExtentId(1),
        offset: 0,
    };
    let inputs = [
        vec![],
        Hello::new(Purpose::Control).encode().to_vec(),
        frame(&hello()),
        frame(&Request::Stat),
        frame(&Request::Grant {
            bytes: 1 << 16,
            atomics: false,
            serial: None,
        }),
        [&op.encode()[..], &[1; 64]].concat(),
    ];
    let choices = 0..2 * DEPTHS;
    choices
        .flat_map(|choice| {
            inputs
                .iter()
                .map(move |input| [&[choice], &input[..]].concat())
        })
        .collect()
}

/// Number of depths: raw, greeted, in a session, attached.
const DEPTHS: u8 = 4;

fn hello() -> Request {
    Request::Begin {
        client: "fuzz".to_owned(),
        resume: None,
    }
}

fn play(endpoint: &Endpoint, depth: u8, bytes: &[u8]) -> std::io::Result<()> {
    let mut stream = match depth % DEPTHS {
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
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Relaxed);
            before(info);
        }));
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
    stream.say(&hello())?;
    Ok(stream)
}

/// Opens a data connection of a session that has one extent, on TCP; elsewhere a session.
fn attach(endpoint: &Endpoint) -> std::io::Result<Stream> {
    let mut control = greet(endpoint, Purpose::Control)?;
    let begun = control.say(&hello())?;
    let Response::Begun {
        session, secret, ..
    } = begun
    else {
        return Ok(control);
    };
    control.say(&Request::Grant {
        bytes: 1 << 16,
        atomics: false,
        serial: None,
    })?;
    if matches!(endpoint, Endpoint::Shm(_)) {
        return Ok(control);
    }
    let mut data = greet(endpoint, Purpose::Data)?;
    data.say(&Request::Attach {
        session,
        secret,
        line: 0,
    })?;
    Ok(data)
}
