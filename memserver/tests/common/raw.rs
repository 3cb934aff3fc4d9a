//! The protocol by hand, for peers that say what no client says.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{fd::AsRawFd, unix::net::UnixStream},
};

use farpage_wire::{
    Endpoint, Request, Response, Secret, SessionId,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::PATIENCE;

pub trait Stream: Read + Write + Send {
    /// Says that nothing more will be sent.
    fn finish(&self);
}

impl Stream for TcpStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

impl Stream for UnixStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

pub fn raw(endpoint: &Endpoint) -> Box<dyn Stream> {
    match endpoint {
        Endpoint::Shm(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        Endpoint::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        other => unreachable!("no server listens on {other}"),
    }
}

pub fn say(stream: &mut dyn Stream, request: &Request) {
    stream
        .write_all(&control::encode(request).unwrap())
        .unwrap();
}

pub fn hear(stream: &mut dyn Stream) -> Response {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).unwrap();
    let mut body = vec![0; control::frame_bytes(prefix, control::MAX_FRAME_BYTES).unwrap()];
    stream.read_exact(&mut body).unwrap();
    control::decode(&body).unwrap()
}

pub fn greet(endpoint: &Endpoint, purpose: Purpose) -> Box<dyn Stream> {
    let mut stream = raw(endpoint);
    stream.write_all(&Hello::new(purpose).encode()).unwrap();
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(Hello::decode(&hello).unwrap().purpose, purpose);
    stream
}

/// Begins a session by hand.
pub fn begin(endpoint: &Endpoint) -> (Box<dyn Stream>, SessionId, Secret) {
    let mut stream = greet(endpoint, Purpose::Control);
    say(
        &mut *stream,
        &Request::Begin {
            client: "by hand".to_owned(),
            resume: None,
        },
    );
    let Response::Begun {
        session, secret, ..
    } = hear(&mut *stream)
    else {
        panic!("no session")
    };
    (stream, session, secret)
}

/// Says hello from an address of this machine; `None` where the server closed the connection.
pub fn greet_from(
    source: [u8; 4],
    endpoint: &Endpoint,
    purpose: Purpose,
) -> Option<Box<dyn Stream>> {
    let Endpoint::Tcp { port, .. } = endpoint else {
        panic!("{endpoint} has no addresses")
    };
    let fd = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .unwrap();
    let address = |ip: [u8; 4], port: u16| libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(ip),
        },
        sin_zero: [0; 8],
    };
    let (from, to) = (address(source, 0), address([127, 0, 0, 1], *port));
    let bytes = size_of_val(&from) as libc::socklen_t;
    // SAFETY: the addresses are of the family of the socket and as long as is said.
    let connected = unsafe {
        libc::bind(fd.as_raw_fd(), (&raw const from).cast(), bytes) == 0
            && libc::connect(fd.as_raw_fd(), (&raw const to).cast(), bytes) == 0
    };
    assert!(connected, "{}", std::io::Error::last_os_error());
    let mut stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut hello = [0; HELLO_BYTES];
    let said = stream.write_all(&Hello::new(purpose).encode());
    said.and_then(|()| stream.read_exact(&mut hello)).ok()?;
    Some(Box::new(stream))
}

/// Sends a request and returns its answer; `None` where the server closed the connection.
pub fn ask(stream: &mut dyn Stream, request: &Request) -> Option<Response> {
    stream.write_all(&control::encode(request).unwrap()).ok()?;
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).ok()?;
    let mut body = vec![0; control::frame_bytes(prefix, control::MAX_FRAME_BYTES).unwrap()];
    stream.read_exact(&mut body).ok()?;
    Some(control::decode(&body).unwrap())
}

/// Begins or resumes a session; `None` where the server refuses.
pub fn begin_as(
    mut stream: Box<dyn Stream>,
    resume: Option<(SessionId, Secret)>,
) -> Option<(Box<dyn Stream>, SessionId, Secret)> {
    let client = "by hand".to_owned();
    match ask(&mut *stream, &Request::Begin { client, resume })? {
        Response::Begun {
            session, secret, ..
        } => Some((stream, session, secret)),
        _ => None,
    }
}
